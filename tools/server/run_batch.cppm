// quire.tools.server.run_batch: OpenAI's batches without a network: answers the requests of a file, one a line, and writes a line for each answer as
// soon as it is there. **Owns** the lock of the file with the answers.
module;

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>
#include <cerrno>

export module quire.tools.server.run_batch;

import quire.core.base;
import quire.core.json;
import quire.serve.endpoints;
import quire.serve.http.exchange;
import quire.tools.common.read_file;

export namespace quire {

// The right to write a batch's output. While one is there, every other process that asks for the same file is refused, also if it has
// another name for the file. The system takes the right back from a process that ends, however that happens. Copies share one right.
class BatchLock {
public:
    // Error: another batch writes there, or the file cannot be opened. `make`: a file that is not there is made, else there is no right to it
    // yet. A pipe or a device has as many writers as it likes.
    Result<void> take(const std::string& out, bool make);

private:
    struct File;
    std::shared_ptr<const File> file_; // null: no right
};

// Whether the files of a batch can be used. A server asks this before it reads its model, and no file changes. Returns the right to write
// `out`, as far as the file is there. Error: as of run_batch().
Result<BatchLock> check_batch_files(const std::string& in, const std::string& out);

struct BatchOptions {
    std::string                             in, out;                            // files of JSON lines
    int                                     at_once     = 1;                    // requests that wait or run
    std::size_t                             line_bytes  = std::size_t(1) << 26; // of a line, at most
    double                                  say_seconds = 10; // from one line about the progress to the next
    std::function<void(const std::string&)> say{};            // a line for a person; any thread
    BatchLock                               lock{}; // of check_batch_files(); run_batch() takes what is missing
};

// Answers every line of `in` whose custom_id has no answer in `out`, so that a batch which was interrupted goes on. A line that is no request
// gets a line with an error, once. Error: a file cannot be read or written, `out` is no output of a batch, or another batch writes there.
Result<void> run_batch(Endpoints& endpoints, const BatchOptions& options);

} // namespace quire

module :private;

namespace quire {

class NobodyElse final : public HttpPeer { // the file has no connection
public:
    bool gone() const override { return false; }
    void cut() override {}
    void when_gone(std::function<void()>) override {}
    bool count_memory(std::size_t) override { return true; }
};

Error cannot_write(const std::string& out, int why) {
    return {ErrorKind::system, cat("cannot write ", quote(out), ": ", std::strerror(why))};
}

struct BatchLock::File {
    explicit File(int opened) : fd(opened) {}
    File(const File&)            = delete;
    File& operator=(const File&) = delete;
    ~File() { ::close(fd); } // and with that the lock

    int fd;
};

Result<void> BatchLock::take(const std::string& out, bool make) {
    if (file_) return {};
    std::error_code error;
    const bool      there = std::filesystem::exists(out, error);
    if (there ? !std::filesystem::is_regular_file(out, error) : !make) return {};
    const int fd = ::open(out.c_str(), O_WRONLY | O_CLOEXEC | (make ? O_CREAT : 0), 0666);
    if (fd < 0) return std::unexpected(cannot_write(out, errno));
    auto file = std::make_shared<const File>(fd);
    // A file system without locks refuses in other words; a batch runs there as before.
    if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        return fail_with(ErrorKind::system, "another --run-batch writes ", quote(out), " now; nothing was written");
    file_ = std::move(file);
    return {};
}

// The complete lines of `out`.
struct Answered {
    std::set<std::string> done;    // custom_ids that have an answer
    std::set<std::string> refused; // ids of the lines that refuse a line of `in`
    std::size_t           n_failed = 0;
    std::uint64_t         bytes    = 0;
};

class BatchRun {
public:
    BatchRun(Endpoints& endpoints, const BatchOptions& options)
        : endpoints_(endpoints), o_(options), lock_(options.lock) {}
    Result<void> run();

private:
    // A line on its way: what will be written of it, and its request. No request: `out` says all. `out` is null: it was answered before.
    struct Line {
        Json out, request;
    };
    bool next(Line& line);
    Line begin(const std::string& text, std::size_t number);
    bool read_line(std::string& text);
    void answer_lines();
    Json answer(Line line);
    Json ask(const std::string& url, Json body);
    void write(const Json& line);

    Endpoints&            endpoints_;
    const BatchOptions&   o_;
    BatchLock             lock_;
    std::mutex            mutex_; // of all below
    std::ifstream         in_;
    std::ofstream         out_;
    Answered              before_; // what `out` had at first
    std::set<std::string> taken_;  // custom_ids that this run has met
    std::size_t           n_lines_ = 0, n_answered_ = 0, n_failed_ = 0, n_asked_ = 0;
    std::size_t           n_read_ = 0; // lines of `in`, the empty ones as well
    bool                  broken_ = false;
    Stopwatch             since_said_;
};

// The string `name` of an object; "": there is none.
std::string text_of(const Json& object, const char* name) {
    const auto at = object.find(name);
    return at != object.end() && at->is_string() ? at->get<std::string>() : std::string();
}

// Whether a line of `out` has the answer that its request asked for.
bool answers_well(const Json& line) {
    const Json& response = line["response"];
    const auto  status   = response.find("status_code");
    return status != response.end() && *status == 200;
}

Result<Answered> read_answered(const std::string& out) {
    std::error_code error;
    if (!std::filesystem::is_regular_file(out, error)) return Answered(); // there is none, or it keeps nothing
    std::ifstream file(out, std::ios::binary);
    Answered      all;
    for (std::string line; std::getline(file, line) && !file.eof(); all.bytes += line.size() + 1) {
        const Result<Json> json = json_parse(line);
        if (!json || !json->is_object() || !json->contains("custom_id") || !json->contains("response"))
            return fail(quote(out), " has a line that is no answer of a batch; it is not written to");
        if ((*json)["response"].is_null()) all.refused.insert(text_of(*json, "id"));
        else all.done.insert(text_of(*json, "custom_id"));
        all.n_failed += !answers_well(*json);
    }
    return all;
}

// A last line that was not written to its end is cut off.
Result<void> cut_to(const std::string& path, std::uint64_t bytes) {
    std::error_code error;
    if (!std::filesystem::is_regular_file(path, error)) return {};
    if (std::filesystem::file_size(path, error) > bytes && !error) std::filesystem::resize_file(path, bytes, error);
    if (error) return fail_with(ErrorKind::system, "cannot cut the last line off ", quote(path), ": ", error.message());
    return {};
}

Result<BatchLock> check_batch_files(const std::string& in, const std::string& out) {
    std::error_code error;
    if (!std::ifstream(in, std::ios::binary) || !std::filesystem::is_regular_file(in, error))
        return std::unexpected(cannot_read(in));
    const auto no_output = [&](int why) { return std::unexpected(cannot_write(out, why)); };
    if (std::filesystem::exists(out, error)) {
        if (std::filesystem::is_directory(out, error)) return no_output(EISDIR);
        if (access(out.c_str(), W_OK) != 0) return no_output(errno);
    } else {
        const std::string folder = std::filesystem::path(out).parent_path().string();
        if (access(folder.empty() ? "." : folder.c_str(), W_OK | X_OK) != 0) return no_output(errno);
    }
    BatchLock lock;
    if (auto ok = lock.take(out, false); !ok) return std::unexpected(ok.error());
    if (const Result<Answered> before = read_answered(out); !before) return std::unexpected(before.error());
    return lock;
}

Result<void> BatchRun::run() {
    in_.open(o_.in, std::ios::binary);
    std::error_code error;
    if (!in_ || !std::filesystem::is_regular_file(o_.in, error)) return std::unexpected(cannot_read(o_.in));
    if (auto ok = lock_.take(o_.out, true); !ok) return ok; // before the lines are read: another batch adds some
    Result<Answered> before = read_answered(o_.out);
    if (!before) return std::unexpected(before.error());
    if (auto ok = cut_to(o_.out, before->bytes); !ok) return ok;
    before_   = std::move(*before);
    n_failed_ = before_.n_failed;
    for (std::string line; read_line(line);) n_lines_ += !line.empty();
    in_.seekg(0);
    out_.open(o_.out, std::ios::binary | std::ios::app);
    if (!out_) return fail_with(ErrorKind::system, "cannot write ", quote(o_.out));
    if (!before_.done.empty() && o_.say)
        o_.say(cat(quote(o_.out), " has ", before_.done.size(), " answers; the batch goes on behind them"));
    {
        std::vector<std::jthread> threads;
        for (int i = 0; i < o_.at_once; i++) threads.emplace_back([this] { answer_lines(); });
    }
    if (broken_) return fail_with(ErrorKind::system, "cannot write ", quote(o_.out), ": the disk is full?");
    if (o_.say)
        o_.say(cat(n_answered_, " of ", n_lines_, " lines are answered, ", n_failed_, " of them with an error"));
    return {};
}

// One line of `in` without its end, and no more of it than shows that it is too long. False: there are no more lines.
bool BatchRun::read_line(std::string& text) {
    constexpr int end  = std::char_traits<char>::eof();
    auto&         from = *in_.rdbuf();
    int           c    = from.sbumpc();
    text.clear();
    if (c == end) return false;
    for (; c != end && c != '\n'; c = from.sbumpc())
        if (text.size() <= o_.line_bytes) text += char(c);
    return true;
}

bool BatchRun::next(Line& line) {
    const std::scoped_lock lock(mutex_);
    for (std::string text; !broken_ && read_line(text);) {
        n_read_++;
        if (text.empty()) continue;
        line = begin(text, n_read_);
        return true;
    }
    return false;
}

void BatchRun::answer_lines() {
    for (Line line; next(line);) {
        Json refused = line.out;
        Json out;
        try {
            out = answer(std::move(line));
        } catch (const std::exception& error) { // of this line alone
            out          = std::move(refused);
            out["error"] = {{"code", "failed"}, {"message", error.what()}};
        }
        write(out);
    }
}

// Under the lock, in the order of the file: of equal custom_ids the first line has the answer.
BatchRun::Line BatchRun::begin(const std::string& line, std::size_t number) {
    const std::string name = cat("batch_req_", number);
    Json              out{{"id", name}, {"custom_id", nullptr}, {"response", nullptr}, {"error", nullptr}};
    const auto        wrong = [&](const std::string& why) {
        if (before_.refused.contains(name)) return Line();
        out["error"] = {{"code", "invalid_request"}, {"message", why}};
        return Line{out, {}};
    };
    if (line.size() > o_.line_bytes) return wrong(cat("the line has more than ", o_.line_bytes, " bytes"));
    Result<Json> json = json_parse(line);
    if (!json || !json->is_object()) return wrong("the line is no JSON object");
    const auto        text = [&](const char* member) { return text_of(*json, member); };
    const std::string id   = text("custom_id");
    if (json->contains("custom_id") && !(*json)["custom_id"].is_string()) return wrong("custom_id has to be a string");
    if (id.empty()) return wrong("custom_id is missing");
    out["custom_id"] = id;
    if (!taken_.insert(id).second) return wrong("the custom_id stands in an earlier line, too");
    if (before_.done.contains(id)) return {};
    if (text("method") != "POST") return wrong("method has to be POST");
    const auto body = json->find("body");
    if (body == json->end() || !body->is_object()) return wrong("body has to be an object");
    if (const auto stream = body->find("stream"); stream != body->end() && *stream == true)
        return wrong("a batch has no streams: stream is true");
    if (!Endpoints::in_batches(text("url")))
        return wrong(cat("url is ", quote(text("url")), ", which no batch can ask"));
    return {std::move(out), std::move(*json)};
}

Json BatchRun::answer(Line line) {
    if (!line.request.is_null())
        line.out["response"] = ask(line.request["url"].get<std::string>(), std::move(line.request["body"]));
    return std::move(line.out);
}

Json BatchRun::ask(const std::string& url, Json body) {
    constexpr double wait = 0.5, longest = 600; // seconds, where there is no room
    if (url.ends_with("/completions") && !body.contains("priority")) body["priority"] = 1'000'000; // the last
    const std::string text = json_dump(body);
    for (const Stopwatch watch;; std::this_thread::sleep_for(std::chrono::duration<double>(wait))) {
        NobodyElse   peer;
        HttpExchange e;
        e.request.method = "POST";
        e.request.path   = url;
        e.request.body   = text;
        e.peer           = &peer;
        {
            const std::scoped_lock lock(mutex_);
            e.request.id = cat("batch-", ++n_asked_);
        }
        endpoints_.answer(e);
        const int status = e.response.status;
        if ((status == 429 || status == 503) && watch.seconds() < longest) continue;
        Result<Json> answered = json_parse(e.response.body);
        return {
            {"status_code", status}, {"request_id", e.request.id}, {"body", answered ? std::move(*answered) : Json()}};
    }
}

void BatchRun::write(const Json& line) {
    const std::scoped_lock lock(mutex_);
    n_answered_++;
    if (!line.is_null()) {
        n_failed_ += !answers_well(line);
        const std::string text = json_dump(line) + '\n';
        out_.write(text.data(), std::ptrdiff_t(text.size()));
        out_.flush();
        broken_ = broken_ || !out_;
    }
    if (since_said_.seconds() < o_.say_seconds || !o_.say) return;
    since_said_ = {};
    o_.say(cat(n_answered_, " of ", n_lines_, " lines are answered"));
}

Result<void> run_batch(Endpoints& endpoints, const BatchOptions& options) { return BatchRun(endpoints, options).run(); }

} // namespace quire
