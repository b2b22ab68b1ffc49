// quire.tools.hub.fetch: a file from a URL: resumed where it stopped, checked by size and digest, there as a whole or not at all.
// Owns nothing; the unfinished part stays on the disk.
module;

#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <cerrno>
#include <csignal>

export module quire.tools.hub.fetch;

import quire.core.base;
import quire.core.output_file;
export import quire.tools.hub.http_client;

export namespace quire {

// How far a file is.
struct FetchProgress {
    std::string  name;
    std::int64_t done = 0, size = -1; // bytes; -1: not known yet
    double       rate = 0;            // bytes in a second, since this process began
};

// The reports of a fetch while it runs.
struct FetchReport {
    std::function<void(const FetchProgress&)> progress; // some times in a second, and with done = size at the end
    std::function<void(const std::string&)>   note;     // one sentence
};

struct RemoteFile {
    std::string  name; // in sentences
    std::string  url, token;
    std::string  path;      // of the whole file; PATH.incomplete is what came of it
    std::string  lock;      // a file that one process at a time locks
    std::int64_t size = -1; // bytes; -1: the server says it
    std::string  digest; // in hexadecimal: SHA-256 (64 digits), or SHA-1 as git has it (40); "": the server may say one
    // A GGUF file of any server: its ETag or date is kept in PATH.etag, and it is asked for again.
    bool                                   tagged        = false;
    double                                 stall_seconds = 10;
    std::function<Error(const WebAnswer&)> refused; // what a refusal means, in a sentence; empty: the status
};

// Waits before another attempt. A server's Retry-After counts.
class Patience {
public:
    explicit Patience(const FetchReport& report) : report_(report) {}
    // Whether to try again; then the time to wait is over.
    bool again(const std::string& name, const WebAnswer& failed);
    void reset() { n_failed_ = 0; } // something came

private:
    const FetchReport& report_;
    int                n_failed_ = 0;
};

// The file is at `path` when this returns. Does nothing if it is there already, unless it is tagged. Several processes may fetch the same
// file at once: one does, the others wait. Error: what failed, and what to do.
Result<void> fetch_file(const RemoteFile& file, const FetchReport& report);

// Why a request failed, in a sentence that begins with `name`.
Error describe_failure(const std::string& name, const std::string& url, const WebAnswer& answer);

// 1234567 → "1.2 MiB"
std::string bytes_text(std::int64_t n);

} // namespace quire

module :private;

namespace quire {

std::string bytes_text(std::int64_t n) {
    constexpr const char* units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    double                value   = double(n);
    int                   unit    = 0;
    while (value >= 1024 && unit < 4) value /= 1024, unit++;
    char text[64];
    std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
    return text;
}

Error describe_failure(const std::string& name, const std::string& url, const WebAnswer& answer) {
    const std::string origin = quote(origin_of(url));
    if (answer.status == 429)
        return {ErrorKind::system,
                cat(name, ": ", origin, " takes no more requests for now (429): try again ",
                    answer.retry_after > 0 ? cat("in ", answer.retry_after, " seconds") : std::string("later"))};
    if (answer.status >= 400) {
        std::string words = answer.header("x-error-message");
        return {ErrorKind::system, cat(name, ": ", origin, " answered with status ", answer.status,
                                       words.empty() ? "" : cat(" (", quote(words, 200), ")"))};
    }
    if (!answer.fault.empty())
        return {ErrorKind::system, cat(name, ": ", origin, " cannot be read: ", quote(answer.fault, 200),
                                       answer.status == 0 ? "; check the network and the proxy's variables" : "")};
    return {ErrorKind::system, cat(name, ": ", origin, " answered with status ", answer.status)};
}

bool Patience::again(const std::string& name, const WebAnswer& failed) {
    constexpr int    most       = 4;   // attempts that bring nothing, one after another
    constexpr double longest    = 120; // seconds that are waited for a server that names a time
    constexpr int    statuses[] = {408, 425, 429, 500, 502, 503, 504};
    const bool       refused    = failed.status >= 400;
    if (refused ? std::ranges::find(statuses, failed.status) == std::end(statuses) : !failed.passing) return false;
    if (++n_failed_ > most) return false;
    const double seconds = refused && failed.retry_after > 0 ? failed.retry_after : 0.25 * double(1 << n_failed_);
    if (seconds > longest) return false;
    if (report_.note)
        report_.note(cat(name, ": ", refused ? cat("status ", failed.status) : quote(failed.fault, 200),
                         "; the next attempt is in ", seconds, seconds == 1 ? " second" : " seconds"));
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    return true;
}

bool is_hex(std::string_view text, std::size_t n) {
    return text.size() == n && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

// W/"x" and "x" → x
std::string bare_etag(std::string_view etag) {
    if (etag.starts_with("W/")) etag.remove_prefix(2);
    if (etag.size() > 1 && etag.front() == '"' && etag.back() == '"') etag = etag.substr(1, etag.size() - 2);
    return std::string(etag);
}

class Digest {
public:
    // git's SHA-1 begins with the size.
    Digest(bool git, std::int64_t size) : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
        EVP_DigestInit_ex(context_.get(), git ? EVP_sha1() : EVP_sha256(), nullptr);
        const std::string head = cat("blob ", size);
        if (git) EVP_DigestUpdate(context_.get(), head.c_str(), head.size() + 1); // with the zero
    }
    void        add(const void* bytes, std::size_t n) { EVP_DigestUpdate(context_.get(), bytes, n); }
    std::string hex() {
        unsigned char bytes[EVP_MAX_MD_SIZE];
        unsigned int  n = 0;
        EVP_DigestFinal_ex(context_.get(), bytes, &n);
        std::string text;
        for (unsigned i = 0; i < n; i++) {
            text += "0123456789abcdef"[bytes[i] >> 4];
            text += "0123456789abcdef"[bytes[i] & 15];
        }
        return text;
    }

private:
    std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_;
};

class Descriptor {
public:
    explicit Descriptor(int fd) : fd_(fd) {}
    Descriptor(const Descriptor&)            = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    ~Descriptor() {
        if (fd_ >= 0) close(fd_);
    }
    operator int() const { return fd_; } // NOLINT: it is one

private:
    int fd_;
};

// The digest of a file's first `size` bytes; "": it cannot be read.
std::string digest_of(int fd, std::int64_t size, bool git) {
    Digest            digest(git, size);
    std::vector<char> buffer(std::size_t(1) << 20);
    for (std::int64_t at = 0; at < size;) {
        const ssize_t n = pread(fd, buffer.data(), std::size_t(std::min<std::int64_t>(size - at, 1 << 20)), at);
        if (n <= 0) return "";
        digest.add(buffer.data(), std::size_t(n));
        at += n;
    }
    return digest.hex();
}

// One process at a time. Where the file system has no locks, the digest still shows if two wrote one file.
Descriptor take_lock(const RemoteFile& file, const FetchReport& report) {
    std::error_code ignored;
    std::filesystem::create_directories(std::filesystem::path(file.lock).parent_path(), ignored);
    const int fd = open(file.lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0664);
    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        if (report.note) report.note(cat(file.name, ": waiting for another process that fetches it"));
        while (flock(fd, LOCK_EX) != 0 && errno == EINTR) {}
    }
    return Descriptor(fd);
}

std::string first_line(const std::string& path) {
    std::ifstream file(path);
    std::string   line;
    std::getline(file, line);
    return line;
}

// One file on its way.
class Fetch {
public:
    Fetch(const RemoteFile& file, const FetchReport& report, int fd)
        : file_(file), report_(report), part_(file.path + ".incomplete"), fd_(fd), size_(file.size) {}

    Result<void> run();

private:
    Result<void> check_room(std::int64_t more) const;
    void         start_again() {
        done_ = 0;
        if (ftruncate(fd_, 0) != 0) error_ = fail_here(cat("cannot be written: ", std::strerror(errno)));
    }
    bool                 take(const WebAnswer& head, std::string_view bytes); // a piece of the body
    std::optional<Error> begin(const WebAnswer& head);                        // the first piece
    Result<void>         finish();
    Error                fail_here(const std::string& what) const {
        return {ErrorKind::system, cat(file_.name, ": ", part_, " ", what)};
    }
    void show(bool now = false);

    const RemoteFile&                     file_;
    const FetchReport&                    report_;
    std::string                           part_;
    int                                   fd_;
    std::int64_t                          size_, done_ = 0, asked_from_ = 0, came_ = 0; // came_: with this process
    bool                                  began_ = false;                               // a body, with this request
    std::string                           etag_, digest_;
    std::optional<Error>                  error_; // for good
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now(), shown_{};
};

void Fetch::show(bool now) {
    const auto time = std::chrono::steady_clock::now();
    if (!report_.progress || (!now && time - shown_ < std::chrono::milliseconds(200))) return;
    shown_               = time;
    const double seconds = std::chrono::duration<double>(time - start_).count();
    report_.progress({file_.name, done_, size_, seconds > 0 ? double(came_) / seconds : 0});
}

Result<void> Fetch::check_room(std::int64_t more) const {
    struct statvfs disk{};
    if (fstatvfs(fd_, &disk) != 0) return {};
    const std::int64_t free = std::int64_t(disk.f_bavail) * std::int64_t(disk.f_frsize);
    if (more <= free) return {};
    return std::unexpected(
        Error{ErrorKind::system, cat(file_.name, ": ", bytes_text(more), " are to come, and ",
                                     std::filesystem::path(part_).parent_path().string(), " has room for ",
                                     bytes_text(free), ": make room, or name another folder in HF_HUB_CACHE")});
}

// "bytes 100-199/200" → 100 and 200; -1: there is no such number
std::pair<std::int64_t, std::int64_t> content_range(const std::string& text) {
    const std::size_t dash = text.find('-'), slash = text.find('/');
    if (!text.starts_with("bytes ") || dash == std::string::npos || slash == std::string::npos) return {-1, -1};
    return {to_number<std::int64_t>(std::string_view(text).substr(6, dash - 6)).value_or(-1),
            to_number<std::int64_t>(std::string_view(text).substr(slash + 1)).value_or(-1)};
}

std::optional<Error> Fetch::begin(const WebAnswer& head) {
    std::int64_t total = -1;
    if (head.status == 206) {
        const auto [from, all] = content_range(head.header("content-range"));
        if (from != done_ || asked_from_ == 0)
            return fail_here(cat("has ", done_, " bytes, and ", origin_of(file_.url), " went on from byte ", from,
                                 ": delete it and try again"));
        total = all;
    } else {
        if (done_ > 0) start_again(); // the server knows no ranges, or has another version
        if (const auto at = head.headers.find("content-length"); at != head.headers.end())
            total = to_number<std::int64_t>(at->second).value_or(-1);
    }
    if (file_.size >= 0 && total >= 0 && total != file_.size)
        return fail_here(cat("should have ", file_.size, " bytes, and ", origin_of(file_.url), " offers ", total,
                             ": the file has changed, or a proxy answers in its place"));
    if (total >= 0) size_ = total;
    // The hub's are digests, of other servers it is a name of the version only.
    for (const std::string& etag : {head.header("x-linked-etag"), file_.tagged ? "" : head.header("etag")})
        if (digest_.empty() && is_hex(bare_etag(etag), 64)) digest_ = bare_etag(etag);
    etag_ = head.header("etag");
    if (etag_.empty()) etag_ = head.header("last-modified");
    if (file_.tagged) { // of which version the part is
        if (auto ok = write_file(part_ + ".etag", etag_); !ok) return ok.error();
    }
    if (size_ >= 0)
        if (auto ok = check_room(size_ - done_); !ok) return ok.error();
    return std::nullopt;
}

bool Fetch::take(const WebAnswer& head, std::string_view bytes) {
    if (!std::exchange(began_, true)) {
        if (std::optional<Error> wrong = begin(head)) error_ = std::move(wrong);
    }
    if (!error_ && size_ >= 0 && done_ + std::int64_t(bytes.size()) > size_)
        error_ = fail_here(cat("gets more than its ", size_, " bytes"));
    while (!error_ && !bytes.empty()) {
        const ssize_t n = pwrite(fd_, bytes.data(), bytes.size(), done_);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            error_ = fail_here(cat("cannot be written: ", std::strerror(n < 0 ? errno : ENOSPC), " (",
                                   bytes_text(done_), " are kept, and the same command goes on from there)"));
            break;
        }
        bytes.remove_prefix(std::size_t(n));
        done_ += n;
        came_ += n;
    }
    return !error_;
}

Result<void> Fetch::finish() {
    show(true);
    if (!digest_.empty()) {
        const std::string got = digest_of(fd_, done_, digest_.size() == 40);
        if (got != digest_) {
            start_again();
            return std::unexpected(
                Error{ErrorKind::system, cat(file_.name, ": what came from ", origin_of(file_.url), " has the digest ",
                                             got, ", not ", digest_, "; it was deleted, so try again")});
        }
    }
    char magic[4]{};
    if (file_.tagged && (pread(fd_, magic, 4, 0) != 4 || std::string_view(magic, 4) != "GGUF")) {
        start_again();
        return std::unexpected(Error{ErrorKind::system, cat(file_.name, ": what came from ", origin_of(file_.url),
                                                            " is no GGUF file; it was deleted")});
    }
    if (fdatasync(fd_) != 0 || std::rename(part_.c_str(), file_.path.c_str()) != 0)
        return std::unexpected(fail_here(cat("cannot become ", file_.path, ": ", std::strerror(errno))));
    if (!file_.tagged) return {};
    unlink((part_ + ".etag").c_str());
    return write_file(file_.path + ".etag", etag_);
}

Result<void> Fetch::run() {
    std::error_code ignored;
    struct stat     info{};
    const bool      there = file_.tagged && std::filesystem::exists(file_.path, ignored);
    if (there && first_line(file_.path + ".etag").empty()) return {}; // the server names no versions
    digest_ = file_.digest;
    if (fstat(fd_, &info) == 0) done_ = info.st_size;
    const std::string part_etag = file_.tagged ? first_line(part_ + ".etag") : "";
    const bool        same      = !file_.tagged || (!part_etag.empty() && !part_etag.starts_with("W/"));
    if (!same || (size_ >= 0 && done_ > size_)) start_again();
    etag_            = part_etag;
    bool     resumed = done_ > 0;
    Patience patience(report_);
    while (!error_) {
        if (done_ > 0 && done_ == size_) {
            auto ok = finish();
            if (ok || !std::exchange(resumed, false))
                return ok; // the part of an earlier time was wrong: once more, all of it
        }
        began_      = false;
        asked_from_ = done_;
        WebRequest request{file_.url, file_.token, done_, "", file_.stall_seconds};
        if (file_.tagged) request.etag = done_ > 0 ? etag_ : there ? first_line(file_.path + ".etag") : "";
        const std::int64_t before = came_;
        const WebAnswer    answer = web_get(
            request, [&](const WebAnswer& head, std::string_view bytes) { return take(head, bytes); }, [&] { show(); });
        if (error_) break;
        if (answer.status == 304 && there) return {};
        if (answer.fault.empty() && (answer.status == 200 || answer.status == 206)) {
            if (!began_) { // an empty body
                if (std::optional<Error> wrong = begin(answer)) return std::unexpected(*wrong);
            }
            if (size_ < 0) size_ = done_;
            if (done_ == size_ && done_ > 0) continue;
            if (size_ == 0) return std::unexpected(fail_here("would be empty: that is no model"));
        }
        if (came_ > before) patience.reset();
        if (answer.status == 416 && done_ > 0 && done_ != size_) { // what is there is no beginning of the file
            start_again();
            continue;
        }
        WebAnswer failed = answer;
        if (failed.fault.empty() && failed.status < 400) failed.fault = "the body ended early", failed.passing = true;
        if (patience.again(file_.name, failed)) continue;
        if (there) {
            if (report_.note)
                report_.note(describe_failure(file_.name, file_.url, failed).message +
                             "; the copy that is here is used");
            return {};
        }
        Error error = failed.status >= 400 && file_.refused ? file_.refused(failed)
                                                            : describe_failure(file_.name, file_.url, failed);
        if (done_ > 0)
            error.message += cat("; ", bytes_text(done_), " are kept, and the same command goes on from there");
        return std::unexpected(std::move(error));
    }
    return std::unexpected(*error_);
}

Result<void> fetch_file(const RemoteFile& file, const FetchReport& report) {
    std::error_code error;
    if (!file.tagged && std::filesystem::exists(file.path, error)) return {};
    std::signal(SIGXFSZ, SIG_IGN); // beyond a limit of size a write fails like any other
    std::filesystem::create_directories(std::filesystem::path(file.path).parent_path(), error);
    const Descriptor lock = take_lock(file, report);
    if (!file.tagged && std::filesystem::exists(file.path, error)) return {}; // another process was first
    const std::string part = file.path + ".incomplete";
    const Descriptor  fd(open(part.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
    if (fd < 0) return fail_with(ErrorKind::system, file.name, ": cannot write ", part, ": ", std::strerror(errno));
    auto        done = Fetch(file, report, fd).run();
    struct stat info{};
    if (stat(part.c_str(), &info) == 0 && info.st_size == 0) { // nothing came: nothing is left behind
        unlink(part.c_str());
        unlink((part + ".etag").c_str());
    }
    return done;
}

} // namespace quire
