// quire.serve.api.answer: the answers to a request as values, and the interface through which an API writes them. Owns nothing.
export module quire.serve.api.answer;

import quire.core.base;
import quire.core.hash;
export import quire.core.json;
import quire.schedule.request;
export import quire.serve.api.error;
import quire.serve.http.exchange;
export import quire.text.calls.tool_calls;

export namespace quire {

struct Usage {
    int prompt_tokens = 0, completion_tokens = 0, cached_tokens = 0;
    int reasoning_tokens = 0;                  // of the completion
    int loaded_tokens    = 0;                  // of the cached ones, tokens that were in host memory
    int disk_tokens      = 0;                  // of these, tokens that files had
    int draft_tokens = 0, accepted_tokens = 0; // see Output
};
// Adds to the details of a prompt's tokens where the cached ones were, if some were not on the device.
void add_tiers(Json& details, const Usage& usage);

// One token, spelled in bytes, with its log-probability.
struct SpelledLogprob {
    Token       token = -1;
    std::string bytes;
    float       logprob = 0;
};
struct SpelledPosition {
    std::optional<SpelledLogprob> chosen; // none: the first token of an echoed prompt
    SpelledLogprob                token;  // as spelled, where `chosen` is none
    std::vector<SpelledLogprob>   top;
    std::size_t                   offset = 0; // of its text in the whole text, in characters
};

// How long an answer took so far: tokens, and milliseconds from the first step of its prompt to its first token, and from there on. The
// prompt's steps made the first token, so the second time is for the tokens behind the first.
struct Timings {
    int    prompt_tokens = 0, cached_tokens = 0, generated_tokens = 0;
    int    draft_tokens = 0, accepted_tokens = 0; // of the prompt's request; see Output
    double prompt_ms = 0, generated_ms = 0;
};
// llama.cpp's object `timings`. predicted_n counts all tokens; predicted_ms is the time behind the first one, and predicted_per_token_ms
// and predicted_per_second divide it by the tokens of that time, which are one less; of a single token both are 0.
Json timings_json(const Timings& timings);

// How far a prompt is computed, in tokens, and the milliseconds since its first step.
struct PromptProgress {
    int    total = 0, cached = 0, computed = 0;
    double ms = 0;
};
// llama.cpp's object `prompt_progress`.
Json progress_json(const PromptProgress& progress);

// One answer, or a piece of it, for the client: what an Output becomes once its tokens are text. An Output has tokens, and no text; the
// texts of a Choice are made from them once, and moved from there on.
struct Choice {
    int                           index = 0;      // among the answers to all prompts of the request
    bool                          first = false;  // the first piece of its answer
    std::vector<AnswerPart>       parts;          // only chats have others than content
    int                           first_call = 0; // index of the first of the calls
    std::vector<SpelledPosition>  logprobs;
    std::vector<Token>            token_ids;
    std::vector<Token>            prompt_token_ids;
    std::vector<SpelledPosition>  prompt_logprobs;
    std::string                   finish_reason; // "": not finished
    std::string                   stop_string;   // that ended it
    Token                         stop_token    = -1;
    int                           n_tokens      = 0; // of the answer so far
    int                           prompt_tokens = 0;
    std::optional<Timings>        timings;  // at its end, and with each piece where that was asked for
    std::optional<PromptProgress> progress; // of the prompt, where it was asked for
};
// Appends the next piece of the same answer. The whole answer has the counts, the end and the times of its last piece.
void append(Choice& whole, Choice piece);

// The bytes of a log-probability until a whole response is written: as a value, as JSON values and as text. About as measured with n_probs 100;
// each byte of the token's text takes logprob_byte more.
constexpr std::size_t logprob_bytes = 400, logprob_byte = 32;
// The bytes that a piece takes until a whole response is written, about.
std::size_t held_bytes(const Choice& piece);

// The values that all parts of one response share.
struct ResponseHead {
    std::string  id; // of the request: the API puts its prefix before it
    std::string  model;
    std::int64_t created = 0;
    bool         chat    = false;
    // the options that the request asked for
    bool after_samplers = false; // the log-probabilities are those of SamplingParams::after_samplers
    bool logprobs = false, token_ids = false, prompt_logprobs = false, tokens_as_ids = false;
    bool include_usage = false, continuous_usage = false;
    bool timings_per_token = false;
    int  slot              = -1; // of llama.cpp; -1: none
    Json verbose; // llama.cpp's object `__verbose`: `prompt` and `generation_settings`; null where it was not asked for
    bool short_call_ids = false; // 9 letters and digits, as Mistral's templates take them
};

// A name for a call of an answer; the request's id always gives the same names. `prefix`: of names that are not short.
std::string call_id(const ResponseHead& head, int answer, int call, std::string_view prefix = "call_");

// Writes the answers to one request in the form of one API, whole or as a stream of events. Used by one thread.
class AnswerRenderer {
public:
    virtual ~AnswerRenderer() = default;

    // The body of a whole response.
    virtual std::string response(std::vector<Choice> choices, const Usage& usage) = 0;

    // A stream is begin(), pieces, end(); each returns the text of no, one or several events. Counts in `usage` are up to now.
    virtual std::string begin(const Usage&) { return {}; }
    virtual std::string piece(Choice piece, const Usage& usage) = 0;
    virtual std::string end(const Usage& usage)                 = 0;
    // In place of end(): the stream cannot go on.
    virtual std::string failure(const ApiError& error) = 0;
    // failure() where there is no memory to write anything.
    virtual std::string_view out_of_memory() const = 0;
    // Whether Choice::logprobs are to be those of the tokens of the text alone, in the piece that has the text; else of all tokens.
    virtual bool logprobs_of_text() const { return false; }
    // After a silence.
    virtual std::string ping() { return std::string(comment_event); }
    // The Content-Type of a stream.
    virtual std::string_view type() const { return "text/event-stream"; }
};

// The number of characters of a text in UTF-8.
std::size_t count_characters(std::string_view text);
// A finite number for JSON, which has none for -inf and NaN.
double finite_logprob(float logprob);
Json   bytes_json(std::string_view bytes);
// Adds the member `logprob`, or `prob` where it is one after the samplers, as in llama.cpp.
void add_logprob(Json& json, const SpelledLogprob& token, bool after_samplers);
// The positions that have a log-probability: of each the JSON that `one` makes of its token, with such JSON of the best tokens as
// `top_logprobs`, or `top_probs` after the samplers.
Json logprobs_json(std::span<const SpelledPosition> positions, const std::function<Json(const SpelledLogprob&)>& one,
                   bool after_samplers = false);

} // namespace quire

module :private;

namespace quire {

void add_tiers(Json& details, const Usage& u) {
    if (u.loaded_tokens == 0) return;
    details["cached_tokens_by_tier"] = {{"device", u.cached_tokens - u.loaded_tokens},
                                        {"host", u.loaded_tokens - u.disk_tokens},
                                        {"disk", u.disk_tokens}};
}

Json timings_json(const Timings& t) {
    const auto rate     = [](int n, double ms) { return ms > 0 ? n * 1e3 / ms : 0; };
    const auto each     = [](int n, double ms) { return n > 0 ? ms / n : 0; };
    const int  computed = t.prompt_tokens - t.cached_tokens, behind_first = std::max(t.generated_tokens - 1, 0);
    Json       json = {{"cache_n", t.cached_tokens},
                       {"prompt_n", computed},
                       {"prompt_ms", t.prompt_ms},
                       {"prompt_per_token_ms", each(computed, t.prompt_ms)},
                       {"prompt_per_second", rate(computed, t.prompt_ms)},
                       {"predicted_n", t.generated_tokens},
                       {"predicted_ms", t.generated_ms},
                       {"predicted_per_token_ms", each(behind_first, t.generated_ms)},
                       {"predicted_per_second", rate(behind_first, t.generated_ms)}};
    if (t.draft_tokens > 0) json["draft_n"] = t.draft_tokens, json["draft_n_accepted"] = t.accepted_tokens;
    return json;
}

Json progress_json(const PromptProgress& p) {
    return {{"total", p.total}, {"cache", p.cached}, {"processed", p.computed}, {"time_ms", std::int64_t(p.ms)}};
}

void append(Choice& whole, Choice piece) {
    const auto move_to = [](auto& to, auto& from) { std::move(from.begin(), from.end(), std::back_inserter(to)); };
    append(whole.parts, std::move(piece.parts));
    move_to(whole.logprobs, piece.logprobs);
    move_to(whole.token_ids, piece.token_ids);
    move_to(whole.prompt_token_ids, piece.prompt_token_ids);
    move_to(whole.prompt_logprobs, piece.prompt_logprobs);
    if (piece.finish_reason.empty()) return;
    whole.finish_reason = std::move(piece.finish_reason);
    whole.stop_string   = std::move(piece.stop_string);
    whole.stop_token    = piece.stop_token;
    whole.n_tokens      = piece.n_tokens;
    whole.prompt_tokens = piece.prompt_tokens;
    whole.timings       = piece.timings;
}

std::size_t held_bytes(const Choice& piece) {
    constexpr std::size_t per_text = 4, per_id = 32, per_call = 1024;
    const auto            one = [](const SpelledLogprob& l) { return logprob_bytes + l.bytes.size() * logprob_byte; };
    std::size_t           sum = (piece.token_ids.size() + piece.prompt_token_ids.size()) * per_id;
    for (const AnswerPart& part : piece.parts) {
        sum += (part.text.size() + part.call.arguments.size()) * per_text;
        if (part.kind == AnswerPart::Kind::call && !part.call.more) sum += per_call;
    }
    for (const auto* positions : {&piece.logprobs, &piece.prompt_logprobs})
        for (const SpelledPosition& p : *positions) {
            sum += one(p.chosen ? *p.chosen : p.token);
            for (const SpelledLogprob& l : p.top) sum += one(l);
        }
    return sum;
}

std::string call_id(const ResponseHead& head, int answer, int call, std::string_view prefix) {
    constexpr std::string_view alphabet = "0123456789abcdefghijklmnopqrstuvwxyz";
    std::uint64_t              hash     = hash_bytes(cat(head.id, '/', answer, '/', call));
    std::string                id(head.short_call_ids ? "" : prefix);
    for (int i = 0; i < 9; i++, hash /= alphabet.size()) id += alphabet[hash % alphabet.size()];
    return id;
}

std::size_t count_characters(std::string_view text) {
    return std::size_t(
        std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

double finite_logprob(float logprob) { return logprob > -9999 ? double(logprob) : -9999.0; }

Json bytes_json(std::string_view bytes) {
    Json list = Json::array();
    for (char c : bytes) list.push_back(int(static_cast<unsigned char>(c)));
    return list;
}

void add_logprob(Json& json, const SpelledLogprob& token, bool after_samplers) {
    if (after_samplers) json["prob"] = std::exp(double(token.logprob));
    else json["logprob"] = finite_logprob(token.logprob);
}

Json logprobs_json(std::span<const SpelledPosition> positions, const std::function<Json(const SpelledLogprob&)>& one,
                   bool after_samplers) {
    Json list = Json::array();
    for (const SpelledPosition& p : positions) {
        if (!p.chosen) continue;
        Json item = one(*p.chosen), top = Json::array();
        for (const SpelledLogprob& t : p.top) top.push_back(one(t));
        item[after_samplers ? "top_probs" : "top_logprobs"] = std::move(top);
        list.push_back(std::move(item));
    }
    return list;
}

} // namespace quire
