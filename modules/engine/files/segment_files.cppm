// quire.engine.files.segment_files: numbered files that only grow, in a directory of one process. **Owns** the lock of the directory. One
// thread uses it.
module;

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#include <cerrno>
#include <csignal>

export module quire.engine.files.segment_files;

import quire.core.base;
import quire.core.std;

export namespace quire {

// The pieces of memory that something is in, one behind the other.
using Pieces = std::span<const std::span<std::byte>>;

std::size_t size_of(Pieces pieces); // bytes

// A value as a piece. The functions below take what they only read as memory that they could write.
template <class T>
std::span<std::byte> piece_of(std::span<T> values) {
    return {const_cast<std::byte*>(reinterpret_cast<const std::byte*>(values.data())), values.size_bytes()};
}
template <class T>
std::span<std::byte> piece_of(T& value) {
    return piece_of(std::span(&value, 1));
}

// Files and their numbers, from 1.
class SegmentFiles {
public:
    virtual ~SegmentFiles() = default;

    virtual std::map<std::uint64_t, std::uint64_t> sizes() const = 0; // bytes, by number
    virtual int                                    n_foreign() const {
        return 0;
    } // files that sizes() leaves out, because others than their owner could have written them

    // False: the disk does not do it. What append() has written then may be there in part, until cut() takes it back.
    virtual bool create(std::uint64_t file)                                      = 0; // that is not there
    virtual bool append(std::uint64_t file, Pieces pieces)                       = 0;
    virtual bool cut(std::uint64_t file, std::uint64_t bytes)                    = 0; // to so many
    virtual bool read(std::uint64_t file, std::uint64_t at, Pieces pieces) const = 0; // fills all of them
    virtual void remove(std::uint64_t file)                                      = 0;
};

// Makes a directory for its owner alone, if it is not there. Error: it cannot be made, or not be used; it belongs to another user, or others
// than its owner can use it.
Result<void> make_private_directory(const std::string& path);

// The files of a directory, NUMBER.kv. It is made if it is not there; it and its files are for their owner alone. Error: it cannot be used, or
// another process uses it. Files of other users are left alone.
Result<std::unique_ptr<SegmentFiles>> open_directory(const std::string& path);

} // namespace quire

module :private;

namespace quire {

std::size_t size_of(Pieces pieces) {
    std::size_t n = 0;
    for (std::span<const std::byte> piece : pieces) n += piece.size();
    return n;
}

// Pieces are small: many go into one call of the system. `call`: preadv or writev of a list.
template <class Call>
bool each_batch(Pieces pieces, Call&& call) {
    std::array<iovec, 256> batch;
    for (std::size_t i = 0, skip = 0;;) { // skip: bytes of piece i that are done
        while (i < pieces.size() && skip >= pieces[i].size()) skip -= pieces[i++].size();
        if (i == pieces.size()) return true;
        int n = 0;
        for (std::size_t k = i; k < pieces.size() && n < int(batch.size()); k++, n++)
            batch[std::size_t(n)] = {pieces[k].data(), pieces[k].size()};
        batch[0]           = {pieces[i].data() + skip, pieces[i].size() - skip};
        const ssize_t done = call(batch.data(), n);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return false;
        skip += std::size_t(done);
    }
}

class Directory final : public SegmentFiles {
public:
    Directory(std::string path, int lock) : path_(std::move(path)), lock_(lock) {}
    Directory(const Directory&)            = delete;
    Directory& operator=(const Directory&) = delete;
    ~Directory() override {
        end();
        close(lock_);
    }

    std::map<std::uint64_t, std::uint64_t> sizes() const override;
    int                                    n_foreign() const override;
    bool                                   create(std::uint64_t file) override {
        end();
        out_ = ::open(path_of(file).c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
        growing_ = file;
        return out_ >= 0;
    }
    bool append(std::uint64_t file, Pieces pieces) override {
        return grows(file) && each_batch(pieces, [&](const iovec* list, int n) { return writev(out_, list, n); });
    }
    bool cut(std::uint64_t file, std::uint64_t bytes) override {
        return grows(file) && ftruncate(out_, off_t(bytes)) == 0;
    }
    bool read(std::uint64_t file, std::uint64_t at, Pieces pieces) const override;
    void remove(std::uint64_t file) override {
        if (grows(file)) end();
        unlink(path_of(file).c_str());
    }

private:
    std::string path_of(std::uint64_t file) const { return cat(path_, "/", file, ".kv"); }
    bool        grows(std::uint64_t file) const { return out_ >= 0 && growing_ == file; }
    void        end() {
        if (out_ >= 0) close(std::exchange(out_, -1));
    }

    std::string   path_;
    int           lock_, out_ = -1; // out_: of the file that create() has made last
    std::uint64_t growing_ = 0;
};

// Calls `visit` with the number of each file and what the system says of it.
template <class Visit>
void each_segment(const std::string& path, Visit&& visit) {
    DIR* const directory = opendir(path.c_str());
    while (const dirent* entry = directory ? readdir(directory) : nullptr) {
        const std::string_view name = entry->d_name;
        struct stat            info{};
        if (!name.ends_with(".kv") || fstatat(dirfd(directory), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0 ||
            !S_ISREG(info.st_mode))
            continue;
        const auto number = to_number<std::uint64_t>(name.substr(0, name.size() - 3));
        if (number && cat(*number, ".kv") == name) visit(*number, info);
    }
    if (directory) closedir(directory);
}

bool is_own(const struct stat& info) { return info.st_uid == geteuid() && (info.st_mode & (S_IWGRP | S_IWOTH)) == 0; }

std::map<std::uint64_t, std::uint64_t> Directory::sizes() const {
    std::map<std::uint64_t, std::uint64_t> sizes;
    each_segment(path_, [&](std::uint64_t number, const struct stat& info) {
        if (is_own(info)) sizes[number] = std::uint64_t(info.st_size);
    });
    return sizes;
}

int Directory::n_foreign() const {
    int n = 0;
    each_segment(path_, [&](std::uint64_t, const struct stat& info) { n += !is_own(info); });
    return n;
}

bool Directory::read(std::uint64_t file, std::uint64_t at, Pieces pieces) const {
    const int in = ::open(path_of(file).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (in < 0) return false;
    const bool all = each_batch(pieces, [&](const iovec* list, int n) {
        const ssize_t got = preadv(in, list, n, off_t(at));
        at += std::uint64_t(std::max<ssize_t>(got, 0));
        return got;
    });
    close(in);
    return all;
}

std::unexpected<Error> refused(std::string_view what, const std::string& name) {
    return fail_with(ErrorKind::system, "cannot ", what, " ", name, ": ", std::strerror(errno));
}

bool is_empty(const std::string& path) {
    std::error_code error;
    return std::filesystem::directory_iterator(path, error) == std::filesystem::directory_iterator();
}

// An empty directory that its owner has just made becomes private; one that is in use, as /tmp, keeps its mode and is refused.
Result<void> make_private_directory(const std::string& path) {
    struct stat info{};
    if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return refused("make the directory", path);
    if (std::error_code error; std::filesystem::exists(path, error) && !std::filesystem::is_directory(path, error))
        return fail_with(ErrorKind::system, path, " is no directory");
    if (access(path.c_str(), R_OK | W_OK | X_OK) != 0 || stat(path.c_str(), &info) != 0)
        return refused("use the directory", path);
    if (info.st_uid != geteuid())
        return fail_with(ErrorKind::system, "the directory ", path, " belongs to another user (", info.st_uid,
                         "): name one that this user owns, or that is not there yet");
    const bool open = (info.st_mode & (S_IRWXG | S_IRWXO)) != 0;
    if (!open || (is_empty(path) && chmod(path.c_str(), 0700) == 0)) return {};
    char mode[8];
    std::snprintf(mode, sizeof mode, "%04o", unsigned(info.st_mode) & 07777u);
    return fail_with(ErrorKind::system, "the directory ", path, " is open to other users (mode ", mode,
                     "): make it private (chmod 700), or name one that is not there yet");
}

Result<std::unique_ptr<SegmentFiles>> open_directory(const std::string& path) {
    std::signal(SIGXFSZ, SIG_IGN); // beyond a limit of size a write fails like any other
    if (auto ok = make_private_directory(path); !ok) return std::unexpected(ok.error());
    const std::string name = path + "/lock";
    const int         lock = ::open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (lock < 0) return refused("open", name);
    if (flock(lock, LOCK_EX | LOCK_NB) != 0) {
        close(lock);
        return fail_with(ErrorKind::system, path, " is in use by another process");
    }
    return std::make_unique<Directory>(path, lock);
}

} // namespace quire
