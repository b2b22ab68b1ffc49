// quire.serve.models.file_stamp: tells a model's file from a later one of its name. Owns nothing.
module;

#include <sys/stat.h>

export module quire.serve.models.file_stamp;

import quire.core.base;

export namespace quire {

// A file's numbers and times.
using FileStamp = std::array<std::int64_t, 5>;

FileStamp stamp_of(const std::string& path);

// Whether `error`, with which the file could not be loaded, lasts as long as its stamp: it is one of a file alone, not of the parts beside it,
// and not of this machine.
bool lasts(const Error& error, const std::string& path);

} // namespace quire

module :private;

namespace quire {

FileStamp stamp_of(const std::string& path) {
    struct stat of{};
    if (stat(path.c_str(), &of) != 0) return {};
    return {std::int64_t(of.st_dev), std::int64_t(of.st_ino), std::int64_t(of.st_size), std::int64_t(of.st_mtim.tv_sec),
            std::int64_t(of.st_mtim.tv_nsec)};
}

bool lasts(const Error& error, const std::string& path) {
    return error.kind == ErrorKind::input && !path.contains("-00001-of-");
}

} // namespace quire
