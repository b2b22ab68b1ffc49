// quire.core.output_file: writes a file completely or not at all. **Owns** the unfinished part.
module;

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>
#include <csignal>

export module quire.core.output_file;

import quire.core.base;

export namespace quire {

// Written without a name, or where the file system cannot do that, under a temporary name next to its path, and named by finish(), which
// waits until the disk has it: a full disk, a killed process or a lost machine leaves no partial file, and an earlier file stays. Links stay,
// and so does an earlier file's mode. Other than regular files, such as a pipe or a terminal, are written directly.
class OutputFile {
public:
    explicit OutputFile(const std::string& path);
    OutputFile(const OutputFile&)            = delete;
    OutputFile& operator=(const OutputFile&) = delete;
    ~OutputFile();

    void write(std::span<const std::byte> bytes); // does nothing once something failed
    bool good() const { return file_ != nullptr && fault_ == 0; }
    // Error: the first failure, in the system's words.
    Result<void> finish();

private:
    std::string path_, part_; // part_: "" where it is written as it is
    std::FILE*  file_     = nullptr;
    bool        is_named_ = true;
    int         fault_    = 0; // errno
};

// Error: `output` is a regular file and one of `inputs`, by this or another name or link, so that writing it would destroy what is
// read. Paths that lead to no file, such as "" and "-", are like nothing.
Result<void> check_not_input(const std::string& output, std::span<const std::string> inputs);

// Writes a whole file at once.
Result<void> write_file(const std::string& path, std::string_view text);

// Error: standard output could not take everything that was printed.
Result<void> flush_output();

} // namespace quire

module :private;

namespace quire {

// A path to an open file that has no name.
std::string name_of(int fd) { return cat("/proc/self/fd/", fd); }

// Where a path leads: links are followed, also to a file that is not there yet.
std::string followed(const std::string& path) {
    std::filesystem::path at = path;
    for (int links = 0; links < 40; links++) {
        std::error_code             error;
        const std::filesystem::path next = std::filesystem::read_symlink(at, error);
        if (error) break; // it is no link
        at = at.parent_path() / next;
    }
    return at.string();
}

OutputFile::OutputFile(const std::string& path) : path_(path) {
    std::signal(SIGXFSZ, SIG_IGN); // beyond a limit of size a write fails like any other
    struct stat info{};
    const bool  there = stat(path.c_str(), &info) == 0;
    if (!there && errno != ENOENT) {
        fault_ = errno; // such as a link that leads to itself
        return;
    }
    if (there && !S_ISREG(info.st_mode)) {
        file_ = std::fopen(path.c_str(), "wb");
    } else {
        path_                    = followed(path);
        part_                    = cat(path_, '.', getpid(), ".part");
        const mode_t      mode   = there ? info.st_mode & 0777 : 0666;
        const std::string folder = std::filesystem::path(path_).parent_path().string();
        int               fd     = open(folder.empty() ? "." : folder.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, mode);
        if (fd >= 0 && access(name_of(fd).c_str(), F_OK) != 0) { // it could not be named: there is no /proc
            close(fd);
            fd = -1;
        }
        is_named_ = fd < 0;
        if (fd < 0) fd = open(part_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode);
        if (fd >= 0 && there) (void)fchmod(fd, mode); // without the umask
        if (fd >= 0) file_ = fdopen(fd, "wb");
    }
    if (file_ == nullptr) fault_ = errno;
}

OutputFile::~OutputFile() {
    if (file_ != nullptr) std::fclose(file_);
    if (file_ != nullptr && !part_.empty() && is_named_) unlink(part_.c_str());
}

void OutputFile::write(std::span<const std::byte> bytes) {
    if (good() && std::fwrite(bytes.data(), 1, bytes.size(), file_) != bytes.size()) fault_ = errno;
}

Result<void> OutputFile::finish() {
    if (file_ != nullptr) {
        if (!part_.empty() && fault_ == 0 && // before an earlier file goes; not every file system can do that
            (std::fflush(file_) != 0 || (fsync(fileno(file_)) != 0 && errno != EINVAL && errno != EROFS)))
            fault_ = errno;
        if (!is_named_ && fault_ == 0) {
            unlink(part_.c_str()); // of an earlier process with this number
            if (linkat(AT_FDCWD, name_of(fileno(file_)).c_str(), AT_FDCWD, part_.c_str(), AT_SYMLINK_FOLLOW) != 0)
                fault_ = errno;
        }
        if (std::fclose(std::exchange(file_, nullptr)) != 0 && fault_ == 0) fault_ = errno;
        if (fault_ == 0 && !part_.empty() && std::rename(part_.c_str(), path_.c_str()) != 0) fault_ = errno;
        if (fault_ != 0 && !part_.empty()) unlink(part_.c_str());
    }
    if (fault_ != 0) return fail_with(ErrorKind::system, "cannot write ", path_, ": ", std::strerror(fault_));
    return {};
}

Result<void> check_not_input(const std::string& output, std::span<const std::string> inputs) {
    struct stat to{}, from{};
    if (stat(output.c_str(), &to) != 0 || !S_ISREG(to.st_mode)) return {};
    for (const std::string& input : inputs)
        if (stat(input.c_str(), &from) == 0 && from.st_dev == to.st_dev && from.st_ino == to.st_ino)
            return fail("the output ", output, " is also an input",
                        input == output ? std::string(", so nothing was written")
                                        : cat(" (", input, "), so nothing was written"));
    return {};
}

Result<void> write_file(const std::string& path, std::string_view text) {
    OutputFile file(path);
    file.write(std::as_bytes(std::span(text)));
    return file.finish();
}

Result<void> flush_output() {
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return {};
    return fail_with(ErrorKind::system, "cannot write to standard output: ", std::strerror(errno));
}

} // namespace quire
