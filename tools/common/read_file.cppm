// quire.tools.common.read_file: a whole file, or the reason why it cannot be read. Owns nothing.
module;

#include <sys/stat.h>
#include <sys/sysmacros.h>

export module quire.tools.common.read_file;

import quire.core.base;

export namespace quire {

// "cannot read 'PATH': " and the reason.
Error cannot_read(const std::string& path);
// A regular file, or what comes through a pipe until its end, of at most `most` bytes. /dev/null is an empty file; no other device is read.
Result<std::string> read_file(const std::string& path, std::size_t most = std::size_t(16) << 20);

} // namespace quire

module :private;

namespace quire {

Error cannot_read(const std::string& path) {
    std::error_code   ignored;
    const char* const reason = std::filesystem::is_directory(path, ignored)      ? "it is a directory"
                               : std::filesystem::is_regular_file(path, ignored) ? "the system does not allow it"
                               : std::filesystem::exists(path, ignored)          ? "it is no regular file"
                                                                                 : "no such file";
    return {ErrorKind::system, cat("cannot read ", quote(path), ": ", reason)};
}

Result<std::string> read_file(const std::string& path, std::size_t most) {
    std::ifstream file;
    struct stat   info{};
    const bool    there = stat(path.c_str(), &info) == 0;
    if (there && S_ISCHR(info.st_mode) && info.st_rdev == makedev(1, 3)) return std::string(); // /dev/null
    if (there && (S_ISREG(info.st_mode) || S_ISFIFO(info.st_mode))) file.open(path, std::ios::binary);
    if (!file.is_open()) return std::unexpected(cannot_read(path));
    std::string text;
    char        buffer[65536];
    while (file.read(buffer, sizeof buffer), file.gcount() > 0) {
        text.append(buffer, std::size_t(file.gcount()));
        if (text.size() > most)
            return fail_with(ErrorKind::limit, quote(path), " has more than ",
                             most >> 20 > 0 ? cat(most >> 20, " MiB") : cat(most >> 10, " KiB"));
    }
    if (!file.eof()) return std::unexpected(cannot_read(path));
    return text;
}

} // namespace quire
