// quire.model_file.mapped_file: a file in memory, read-only. **Owns** its mapping.
//
// A file that becomes shorter while it is mapped would end the process at the next read behind its end (SIGBUS). Instead such reads find zeros,
// the mapping is *torn*, and the engine that reads it fails before it delivers anything; others go on.
module;

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>
#include <csignal>

export module quire.model_file.mapped_file;

import quire.core.base;

export namespace quire {

class MappedFile {
public:
    // Error: one sentence naming the file and what is wrong with it; it has fewer than `least` bytes.
    static Result<MappedFile> open(const std::string& path, std::size_t least);
    // Bytes that the caller owns.
    explicit MappedFile(std::span<const std::byte> bytes) : bytes_(bytes) {}

    MappedFile() = default;
    MappedFile(MappedFile&& o) noexcept { *this = std::move(o); }
    MappedFile& operator=(MappedFile&& o) noexcept {
        std::swap(bytes_, o.bytes_);
        std::swap(path_, o.path_);
        std::swap(seen_, o.seen_);
        std::swap(fd_, o.fd_);
        std::swap(guard_, o.guard_);
        return *this;
    }
    ~MappedFile();

    std::span<const std::byte> bytes() const { return bytes_; }
    void                       prefetch() const; // asks the system to read it ahead
    // Whether a part of it was read that the file does not have any more. Any thread.
    bool torn() const;
    // Whether the file's size or times have changed since open(), or since the last call. A file that takes its name is another file.
    bool               changed();
    const std::string& path() const { return path_; } // "": the caller owns the bytes

private:
    // Of the file: its size, and the times of its last write and change.
    using State = std::array<std::int64_t, 5>;
    static State state_of(const struct stat& info);

    std::span<const std::byte> bytes_;
    std::string                path_;
    State                      seen_{};
    int                        fd_    = -1; // of the file, whatever has its name by now
    int                        guard_ = -1; // the place in `guarded`
};

} // namespace quire

module :private;

namespace quire {

// The mappings that the handler of SIGBUS knows. It must not wait for a lock, so the places are fixed.
struct Guarded {
    std::atomic<std::uintptr_t> begin = 0, end = 0; // begin 0: free; 1: taken, not set yet
    std::atomic<bool>           torn = false;
};
std::array<Guarded, 4096> guarded;
struct sigaction          before; // what SIGBUS did

// All pages behind one that the file has lost are lost, too.
void replace_lost_pages(int, siginfo_t* info, void*) {
    const auto           at   = reinterpret_cast<std::uintptr_t>(info->si_addr);
    const std::uintptr_t page = at & ~std::uintptr_t(4095);
    for (Guarded& g : guarded) {
        const std::uintptr_t begin = g.begin.load(std::memory_order_acquire), end = g.end.load();
        if (begin <= 1 || at < begin || at >= end) continue;
        g.torn = true;
        if (mmap(reinterpret_cast<void*>(page), end - page, PROT_READ,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != MAP_FAILED)
            return;
        break;
    }
    sigaction(SIGBUS, &before, nullptr); // the read fails once more, and now as it did before
}

void install_handler() {
    static const bool done = [] {
        struct sigaction action{};
        action.sa_sigaction = replace_lost_pages;
        action.sa_flags     = SA_SIGINFO | SA_ONSTACK;
        sigemptyset(&action.sa_mask);
        return sigaction(SIGBUS, &action, &before) == 0;
    }();
    (void)done;
}

int guard(std::uintptr_t begin, std::size_t bytes) {
    install_handler();
    for (std::size_t i = 0; i < guarded.size(); i++) {
        std::uintptr_t unused = 0;
        if (!guarded[i].begin.compare_exchange_strong(unused, 1)) continue;
        guarded[i].torn = false;
        guarded[i].end  = begin + bytes;
        guarded[i].begin.store(begin, std::memory_order_release);
        return int(i);
    }
    return -1; // so many files are not guarded
}

MappedFile::State MappedFile::state_of(const struct stat& info) {
    return {std::int64_t(info.st_size), std::int64_t(info.st_mtim.tv_sec), std::int64_t(info.st_mtim.tv_nsec),
            std::int64_t(info.st_ctim.tv_sec), std::int64_t(info.st_ctim.tv_nsec)};
}

Result<MappedFile> MappedFile::open(const std::string& path, std::size_t least) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); // a pipe would block here otherwise
    if (fd < 0) return fail_with(ErrorKind::system, "cannot open ", path, ": ", std::strerror(errno));
    struct stat info{};
    void*       data = MAP_FAILED;
    std::string why;
    if (fstat(fd, &info) != 0) why = std::strerror(errno);
    else if (!S_ISREG(info.st_mode))
        why = S_ISDIR(info.st_mode) ? "it is a directory, not a GGUF file" : "it is not a regular file";
    else if (std::size_t(info.st_size) < least)
        why = cat("it has ", info.st_size, " bytes, a GGUF header alone has ", least, ": an incomplete download?");
    else if ((data = mmap(nullptr, std::size_t(info.st_size), PROT_READ, MAP_SHARED, fd, 0)) == MAP_FAILED)
        why = std::strerror(errno);
    if (data == MAP_FAILED) {
        close(fd);
        return fail("cannot use ", path, ": ", why);
    }
    MappedFile file(std::span(static_cast<const std::byte*>(data), std::size_t(info.st_size)));
    file.path_  = path;
    file.seen_  = state_of(info);
    file.fd_    = fd;
    file.guard_ = guard(reinterpret_cast<std::uintptr_t>(data), file.bytes_.size());
    return file;
}

MappedFile::~MappedFile() {
    if (path_.empty()) return;
    // First the guard: the next mapping can have the same addresses.
    if (guard_ >= 0) guarded[std::size_t(guard_)].begin.store(0, std::memory_order_release);
    munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
    close(fd_);
}

void MappedFile::prefetch() const {
    if (!path_.empty()) madvise(const_cast<std::byte*>(bytes_.data()), bytes_.size(), MADV_WILLNEED); // only a hint
}

bool MappedFile::torn() const { return guard_ >= 0 && guarded[std::size_t(guard_)].torn; }

bool MappedFile::changed() {
    struct stat info{};
    return fd_ >= 0 && fstat(fd_, &info) == 0 && std::exchange(seen_, state_of(info)) != state_of(info);
}

} // namespace quire
