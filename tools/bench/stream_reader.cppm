// quire.tools.bench.stream_reader: a streamed answer of an OpenAI-compatible server, from the bytes of a connection. Owns nothing.
export module quire.tools.bench.stream_reader;

import quire.core.base;
import quire.core.json;
import quire.serve.http.parser;

export namespace quire {

// One answer. Times are in seconds after the start.
struct LoadResult {
    std::string         error; // why the answer is incomplete; "": it is complete
    double              sent = 0, end = 0;
    std::vector<double> times;                                // when pieces of text arrived
    int                 prompt_tokens = 0, output_tokens = 0; // as the server counts them
    std::string         text;
};

// Parses the answer to one request from the bytes of a connection, in pieces of any size.
class StreamReader {
public:
    // False when the answer is complete or has failed.
    bool feed(std::string_view bytes, double now, LoadResult& result);
    // The connection has ended.
    void close(double now, LoadResult& result);

    bool               begun() const { return begun_; }
    bool               reusable() const { return over_ && keep_alive_; }
    const std::string& plain_body() const { return plain_; } // of an answer that is not an event stream

private:
    bool read_head(LoadResult& result);
    void read_body(double now, LoadResult& result);
    void read_events(double now, LoadResult& result);
    void read_event(std::string_view data, double now, LoadResult& result);
    void finish(LoadResult& result);

    std::string                in_, body_, plain_;
    ChunkDecoder               chunks_;
    std::optional<std::size_t> left_; // of a body of a given length
    int                        status_ = 0;
    bool begun_ = false, have_head_ = false, chunked_ = false, events_ = false, keep_alive_ = true, done_ = false,
         over_ = false;
};

} // namespace quire

module :private;

namespace quire {

bool same_name(std::string_view a, std::string_view b) {
    return a.size() == b.size() && std::ranges::equal(a, b, [](char x, char y) { return (x | 32) == (y | 32); });
}

std::string reason_of(const std::string& body) {
    const Result<Json> json = json_parse(body);
    if (json && json->is_object() && json->contains("error")) {
        const Json& error = (*json)["error"];
        if (error.is_object() && error.contains("message") && error["message"].is_string())
            return error["message"].get<std::string>();
        return json_dump(error);
    }
    return body.empty() ? "an empty answer" : body.substr(0, 200);
}

bool StreamReader::feed(std::string_view bytes, double now, LoadResult& result) {
    in_ += bytes;
    begun_ |= !bytes.empty();
    if (!have_head_ && !read_head(result)) return !over_;
    if (!over_) read_body(now, result);
    return !over_;
}

void StreamReader::close(double now, LoadResult& result) {
    keep_alive_ = false;
    if (over_) return;
    result.end = now;
    if (!have_head_ || left_ || chunked_) result.error = "the connection ended before the answer did";
    finish(result);
}

bool StreamReader::read_head(LoadResult& result) {
    const auto refuse = [&](const char* why) {
        result.error = why;
        over_        = true;
        keep_alive_  = false;
        return false;
    };
    constexpr std::size_t longest = 65536;
    const std::size_t     end     = in_.find("\r\n\r\n");
    if (end == std::string::npos) {
        if (in_.size() <= longest) return false;
        return refuse("the answer's head has no end");
    }
    const std::string_view head = std::string_view(in_).substr(0, end + 2);
    if (!head.starts_with("HTTP/1.") || head.size() < 12) {
        return refuse("the answer is not HTTP/1.1");
    }
    std::from_chars(head.data() + 9, head.data() + 12, status_);
    keep_alive_ = head[7] == '1';
    for (std::size_t at = head.find("\r\n") + 2; at < head.size();) {
        const std::size_t stop  = head.find("\r\n", at);
        std::string_view  line  = head.substr(at, stop - at);
        at                      = stop + 2;
        const std::size_t colon = line.find(':');
        if (colon == std::string_view::npos) continue;
        const std::string_view name  = line.substr(0, colon);
        std::string_view       value = line.substr(colon + 1);
        while (value.starts_with(' ')) value.remove_prefix(1);
        if (same_name(name, "transfer-encoding")) chunked_ = value.find("chunked") != std::string_view::npos;
        if (same_name(name, "content-type")) events_ = value.starts_with("text/event-stream");
        if (same_name(name, "connection") && same_name(value, "close")) keep_alive_ = false;
        if (same_name(name, "content-length")) {
            std::size_t n = 0;
            std::from_chars(value.data(), value.data() + value.size(), n);
            left_ = n;
        }
    }
    in_.erase(0, end + 4);
    if (status_ == 100) return read_head(result);
    have_head_ = true;
    if (!left_ && !chunked_) keep_alive_ = false;
    return true;
}

void StreamReader::read_body(double now, LoadResult& result) {
    bool ended = false;
    if (chunked_) {
        HttpLimits limits;
        limits.body_bytes    = std::numeric_limits<std::size_t>::max() / 2;
        std::size_t at       = 0;
        const auto  complete = chunks_.feed(in_, at, body_, limits);
        in_.erase(0, at);
        if (!complete) {
            result.error = complete.error().message;
            keep_alive_  = false;
        }
        ended = !complete || *complete;
    } else if (left_) {
        const std::size_t n = std::min(*left_, in_.size());
        body_.append(in_, 0, n);
        in_.erase(0, n);
        *left_ -= n;
        ended = *left_ == 0;
    } else {
        body_ += std::exchange(in_, {});
    }
    if (events_ && status_ == 200) read_events(now, result);
    else plain_ += std::exchange(body_, {});
    if (!ended) return;
    result.end = now;
    finish(result);
}

// Lines of "data: …"; whatever else a line begins with is not for us.
void StreamReader::read_events(double now, LoadResult& result) {
    std::size_t at = 0;
    for (std::size_t end; (end = body_.find('\n', at)) != std::string::npos; at = end + 1) {
        std::string_view line = std::string_view(body_).substr(at, end - at);
        if (line.ends_with('\r')) line.remove_suffix(1);
        if (!line.starts_with("data:")) continue;
        line.remove_prefix(5);
        while (line.starts_with(' ')) line.remove_prefix(1);
        read_event(line, now, result);
    }
    body_.erase(0, at);
}

void StreamReader::read_event(std::string_view data, double now, LoadResult& result) {
    if (data == "[DONE]") {
        done_ = true;
        return;
    }
    const Result<Json> json = json_parse(data);
    if (!json || !json->is_object()) {
        result.error = cat("an event is no JSON object: ", quote(data));
        return;
    }
    if (json->contains("error")) {
        result.error = reason_of(std::string(data));
        return;
    }
    if (const auto usage = json->find("usage"); usage != json->end() && usage->is_object()) {
        const auto count = [&](const char* name) {
            const auto at = usage->find(name);
            return at != usage->end() && at->is_number_integer() ? at->get<int>() : 0;
        };
        result.prompt_tokens = count("prompt_tokens");
        result.output_tokens = count("completion_tokens");
    }
    const auto choices = json->find("choices");
    if (choices == json->end() || !choices->is_array()) return;
    for (const Json& choice : *choices) {
        if (!choice.is_object()) continue;
        const auto delta = choice.find("delta");
        const bool chat  = delta != choice.end() && delta->is_object();
        const auto text  = chat ? delta->find("content") : choice.find("text");
        if (text == (chat ? delta->end() : choice.end()) || !text->is_string()) continue;
        const auto& piece = text->get_ref<const std::string&>();
        if (piece.empty()) continue;
        result.times.push_back(now);
        result.text += piece;
    }
}

void StreamReader::finish(LoadResult& result) {
    over_ = true;
    if (!result.error.empty()) return;
    if (status_ != 200) result.error = cat("status ", status_, ": ", reason_of(plain_));
    else if (events_ && !done_) result.error = "the stream ended without [DONE]";
}

} // namespace quire
