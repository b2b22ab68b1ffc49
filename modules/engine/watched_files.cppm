// quire.engine.watched_files: stops an engine whose model file is written in place while it runs. Owns nothing.
export module quire.engine.watched_files;

import quire.core.base;
import quire.engine.fingerprint;
import quire.model_file.gguf;

export namespace quire {

// The files of weights that an engine reads. A check throws std::runtime_error with one sentence that names the file.
class WatchedFiles {
public:
    using TimePoint = std::chrono::steady_clock::time_point;

    // The file as it is now is the file that was loaded. It has to outlive this object.
    void add(Gguf& file);
    // full_fingerprint() of a file that was added, for K and V that outlast the process: from now on a change of any weight is noticed.
    void compare_all(const Gguf& file, std::uint64_t hash, int threads);

    // The path of a file that the memory has zeros in place of a part of; "": there is none. See Gguf::torn().
    std::string torn() const;
    // Whether torn() names a file: asked after each step.
    void check_torn() const;
    // Whether a file has other metadata or other weights than it had: of a large file samples of the weights, unless compare_all() is called. A
    // file is looked at every 20 ms only, unless `at_once`, so that few steps run with other weights.
    void check_changed(TimePoint now, bool at_once);

private:
    struct File {
        Gguf*                        file = nullptr;
        std::uint64_t                hash = 0;    // fingerprint() when it was loaded
        std::optional<std::uint64_t> full;        // full_fingerprint() then; nothing: not known
        int                          threads = 1; // that compute it
    };

    std::vector<File> files_;
    TimePoint         looked_at_{};
};

} // namespace quire

module :private;

namespace quire {

constexpr std::chrono::milliseconds between_looks{20};

[[noreturn]] void fail_for_file(const std::string& path) {
    throw std::runtime_error(
        cat(quote(std::filesystem::path(path).filename().string(), 256), " was changed in place while it was loaded"));
}

void WatchedFiles::add(Gguf& file) {
    constexpr std::size_t small = std::size_t(64) << 20; // bytes: some ms
    std::size_t           bytes = 0;
    for (const GgufTensor& t : file.tensors()) bytes += t.bytes;
    File& added = files_.emplace_back(&file, fingerprint(file));
    if (bytes <= small) added.full = full_fingerprint(file, 1, "");
}

void WatchedFiles::compare_all(const Gguf& file, std::uint64_t hash, int threads) {
    for (File& one : files_)
        if (one.file == &file) one.full = hash, one.threads = threads;
}

std::string WatchedFiles::torn() const {
    for (const File& one : files_)
        if (std::string path = one.file->torn(); !path.empty()) return path;
    return {};
}

void WatchedFiles::check_torn() const {
    if (const std::string path = torn(); !path.empty()) fail_for_file(path);
}

void WatchedFiles::check_changed(TimePoint now, bool at_once) {
    if (!at_once && now - looked_at_ < between_looks) return;
    looked_at_ = now;
    for (const File& one : files_)
        if (const std::string path = one.file->changed();
            !path.empty() && (fingerprint(*one.file) != one.hash ||
                              (one.full && full_fingerprint(*one.file, one.threads, "") != *one.full)))
            fail_for_file(path);
}

} // namespace quire
