// quire.tools.inspect.constrain: texts under a constraint, without a model's weights: whether a text is accepted, and the time of its masks.
// Owns nothing.
module;

#include <time.h>

export module quire.tools.inspect.constrain;

import quire.constraint.compile;
import quire.core.base;

export namespace quire {

// The trie of a model's vocabulary, for constraints.
std::shared_ptr<const TokenTrie> token_trie_of(const Tokenizer& tokenizer);

// {"accepted", "refused_at", "tokens", "first_mask_us", "mask_us_mean", "mask_us_max"}: `text` goes through the constraint token by token,
// with a mask before each; times are the thread's processor time, so that other programs do not count. Error: the constraint cannot be compiled.
Result<Json> constrain(const Tokenizer& tokenizer, const ConstraintSpec& spec, std::string_view text);

std::string hexadecimal(std::string_view bytes);

struct ConstrainTests {
    SchemaOptions schema;
    bool          masks   = false; // print also the vocabulary, and of each test the tokens and masks
    int           n_walks = 0;     // random texts under the masks of each schema, from `seed`
    std::uint64_t seed    = 0;
};

// Lines {"id", "schema", "tests": [{"valid", "data"}]} → for each a line {"id", "compiled", "error", "accepted", "first_mask_us",
// "mask_us_mean", "mask_us_max"} for `print`. The data goes through as compact JSON in UTF-8. Error: a line that is not so.
//
// With masks: first a line {"vocabulary": [bytes of each token], "end": [tokens]}; then also "tokens": [[…]] and "masks": [[…]],
// one more than tokens: token t is bit t % 8 of byte t / 8. Bytes are in hexadecimal. With walks: "walks": [texts]; "error" is then also
// that of a walk that came where no token can follow, with its text so far.
Result<void> constrain_tests(const Tokenizer& tokenizer, std::istream& lines, const ConstrainTests& options,
                             const std::function<void(const Json&)>& print);

} // namespace quire

module :private;

namespace quire {

std::shared_ptr<const TokenTrie> token_trie_of(const Tokenizer& tokenizer) {
    return make_token_trie(tokenizer, tokenizer.vocab_size());
}

// Processor time of this thread: masks are made on one, and other programs must not count.
class ProcessorWatch {
public:
    ProcessorWatch() : start_(now()) {}
    double microseconds() const { return now() - start_; }

private:
    static double now() {
        timespec t{};
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        return double(t.tv_sec) * 1e6 + double(t.tv_nsec) / 1e3;
    }
    double start_;
};

// The result of one text under a constraint.
struct Walk {
    bool                accepted   = false;
    std::size_t         refused_at = 0; // byte
    std::size_t         n_tokens   = 0;
    std::string         error;
    std::vector<double> mask_us;
    Json                tokens = Json::array(), masks = Json::array(); // where they are wanted
};

std::string hexadecimal(std::string_view bytes) {
    constexpr std::string_view digits = "0123456789abcdef";
    std::string                out;
    for (const char c : bytes) {
        out += digits[static_cast<unsigned char>(c) >> 4];
        out += digits[static_cast<unsigned char>(c) & 15];
    }
    return out;
}

bool has(std::span<const std::uint64_t> bits, Token t) { return (bits[std::size_t(t) / 64] >> (t % 64) & 1) != 0; }

std::string hexadecimal_mask(std::span<const std::uint64_t> bits, int n_tokens) {
    std::string bytes(std::size_t(n_tokens + 7) / 8, '\0');
    for (Token t = 0; t < n_tokens; t++)
        if (has(bits, t)) bytes[std::size_t(t) / 8] = char(bytes[std::size_t(t) / 8] | 1 << (t % 8));
    return hexadecimal(bytes);
}

Walk walk_text(const Tokenizer& tokenizer, const std::shared_ptr<Constraint>& constraint,
               const std::shared_ptr<const TokenTrie>& trie, std::string_view text, ProcessorWatch first,
               bool show_masks = false) {
    Walk                       walk;
    ConstraintState            state(constraint, trie);
    std::vector<std::uint64_t> bits(state.words());
    const std::vector<Token>   tokens = tokenizer.encode(text, {.add_special = false, .parse_special = false});
    std::string                spelled;
    for (Token t : tokens) spelled += trie->bytes(t);
    // A tokenizer that puts a space in front, or repairs bytes, does not spell the text: then every byte is a step.
    const bool exact = spelled == text;
    walk.n_tokens    = tokens.size();
    const auto mask  = [&] {
        ProcessorWatch watch;
        auto           ok = state.mask(bits);
        walk.mask_us.push_back((walk.mask_us.empty() ? first : watch).microseconds());
        if (!ok && !state.may_end() && !(ok.error().kind == ErrorKind::input)) walk.error = ok.error().message;
        if (show_masks) walk.masks.push_back(hexadecimal_mask(bits, trie->vocab_size()));
    };
    std::size_t at = 0;
    for (std::size_t i = 0; i < (exact ? tokens.size() : text.size()); i++) {
        if (i == 0 || exact) mask();
        const std::string_view bytes   = exact ? trie->bytes(tokens[i]) : text.substr(i, 1);
        const bool             allowed = !exact || has(bits, tokens[i]);
        if (show_masks && exact) walk.tokens.push_back(tokens[i]);
        const bool went = state.accept_bytes(bytes);
        if (exact && walk.error.empty() && went != allowed) walk.error = "the mask and the text disagree";
        if (!went) {
            walk.refused_at = at + state.refused_at();
            return walk;
        }
        at += bytes.size();
    }
    mask();
    walk.accepted   = state.may_end();
    walk.refused_at = at;
    return walk;
}

// A JSON text that was parsed before, in the form that constraints get: no white space, strings in their shortest spelling,
// numbers as they stand, however long. `skim`: from `at` over one value; `each` is called for the elements or members on its top level.
class JsonText {
public:
    JsonText(std::string_view text, std::size_t at = 0) : text_(text), at_(at) {}

    // Name (of a member) and place of each value.
    void each(const std::function<void(const std::string&, std::size_t)>& with) {
        space();
        const char  open   = text_[at_++];
        const bool  object = open == '{';
        std::string name, unused;
        for (space(); text_[at_] != '}' && text_[at_] != ']'; space()) {
            if (object) {
                name = json_parse(token()).value_or(Json("")).get<std::string>();
                space();
                at_++; // :
                space();
            }
            with(name, at_);
            unused.clear();
            value(unused);
            space();
            if (text_[at_] == ',') at_++;
        }
    }
    std::string compact() {
        std::string out;
        value(out);
        return out;
    }

private:
    void space() {
        while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) at_++;
    }
    // A string, a number or a word.
    std::string_view token() {
        const std::size_t first = at_;
        if (text_[at_] == '"') {
            for (at_++; text_[at_] != '"'; at_++) at_ += text_[at_] == '\\';
            at_++;
        } else {
            while (at_ < text_.size() && std::string_view(" \t\r\n,:]}").find(text_[at_]) == std::string_view::npos)
                at_++;
        }
        return text_.substr(first, at_ - first);
    }
    void value(std::string& out) {
        int depth = 0;
        do {
            space();
            if (const char c = text_[at_]; std::string_view("{}[],:").find(c) != std::string_view::npos) {
                depth += c == '{' || c == '[' ? 1 : c == '}' || c == ']' ? -1 : 0;
                out += c;
                at_++;
            } else {
                const std::string_view all = token();
                if (all[0] != '"') out += all;
                else if (Result<Json> string = json_parse(all)) out += json_dump(*string);
            }
        } while (depth > 0);
    }

    std::string_view text_;
    std::size_t      at_;
};

// The data of each test of a line, as texts.
std::vector<std::string> test_data(std::string_view line) {
    std::vector<std::string> all;
    JsonText(line).each([&](const std::string& key, std::size_t tests) {
        if (key != "tests") return;
        all.clear();
        JsonText(line, tests).each([&](const std::string&, std::size_t test) {
            all.emplace_back();
            JsonText(line, test).each([&](const std::string& member, std::size_t data) {
                if (member == "data") all.back() = JsonText(line, data).compact();
            });
        });
    });
    return all;
}

// A random text under the masks: half of its tokens are such as bring JSON to an end. Nothing: none within 200 tokens. Error: no token can
// follow, or one of the mask is refused.
Result<std::optional<std::string>> random_text(const std::shared_ptr<Constraint>&      constraint,
                                               const std::shared_ptr<const TokenTrie>& trie, std::mt19937_64& random) {
    ConstraintState            state(constraint, trie);
    std::vector<std::uint64_t> bits(state.words());
    std::string                text;
    for (int i = 0; i < 200; i++) {
        const auto failed = [&](std::string_view why) {
            return fail("a walk fails behind ", json_quoted(text), ": ", why);
        };
        if (auto ok = state.mask(bits); !ok) return failed(ok.error().message);
        std::vector<Token> any, marks;
        for (Token t = 0; t < trie->vocab_size(); t++) {
            if (!has(bits, t)) continue;
            any.push_back(t);
            if (trie->bytes(t).find_first_not_of("\"{}[]:,") == std::string_view::npos)
                marks.push_back(t); // the end also
        }
        const std::vector<Token>& from = !marks.empty() && random() % 2 == 0 ? marks : any;
        if (from.empty()) return failed("the mask has no token");
        const Token t = from[random() % from.size()];
        if (!state.accept(t)) return failed("a token of the mask is refused");
        if (state.ended()) return text;
        text += trie->bytes(t);
    }
    return std::nullopt;
}

void add_times(Json& out, const std::vector<double>& first, const std::vector<double>& all) {
    const auto shown = [](double us) { return std::round(us * 10) / 10; };
    double     sum = 0, most = 0;
    for (double us : all) sum += us, most = std::max(most, us);
    out["first_mask_us"] = first.empty() ? 0.0 : shown(first[0]);
    out["mask_us_mean"]  = all.empty() ? 0.0 : shown(sum / double(all.size()));
    out["mask_us_max"]   = shown(most);
}

Result<Json> constrain(const Tokenizer& tokenizer, const ConstraintSpec& spec, std::string_view text) {
    const auto                          trie = token_trie_of(tokenizer);
    ProcessorWatch                      watch;
    Result<std::shared_ptr<Constraint>> made = compile_constraint(spec);
    if (!made) return std::unexpected(made.error());
    const Walk walk = walk_text(tokenizer, *made, trie, text, watch);
    Json       out{{"accepted", walk.accepted}};
    out["refused_at"] = walk.accepted ? Json() : Json(walk.refused_at);
    if (!walk.error.empty()) out["error"] = walk.error;
    out["tokens"]            = walk.n_tokens;
    std::vector<double> rest = walk.mask_us;
    if (!rest.empty()) rest.erase(rest.begin());
    add_times(out, walk.mask_us, rest);
    return out;
}

Result<void> constrain_tests(const Tokenizer& tokenizer, std::istream& lines, const ConstrainTests& options,
                             const std::function<void(const Json&)>& print) {
    const auto      trie = token_trie_of(tokenizer);
    std::mt19937_64 random(options.seed);
    std::string     line;
    if (options.masks) {
        Json vocabulary = Json::array();
        for (Token t = 0; t < trie->vocab_size(); t++) vocabulary.push_back(hexadecimal(trie->bytes(t)));
        print({{"vocabulary", std::move(vocabulary)}, {"end", trie->ends()}});
    }
    for (std::size_t n = 1; std::getline(lines, line); n++) {
        if (line.empty()) continue;
        Result<Json> json = json_parse(line, {.depth = 256, .members = 1 << 20});
        if (!json) return fail("line ", n, ": ", json.error().message);
        const auto schema = json->find("schema"), tests = json->find("tests");
        if (!json->is_object() || schema == json->end() || tests == json->end() || !tests->is_array())
            return fail("line ", n, R"( is not {"id", "schema", "tests": [...]})");
        Json                                out{{"id", json->value("id", Json())}};
        ProcessorWatch                      watch;
        Result<std::shared_ptr<Constraint>> made = compile_schema(*schema, options.schema);
        out["compiled"]                          = made.has_value();
        out["error"]                             = made ? Json() : Json(made.error().message);
        Json                accepted             = Json::array();
        Json                tokens = Json::array(), masks = Json::array(), walks = Json::array();
        std::vector<double> first, rest;
        if (made) {
            for (const Json& test : *tests)
                if (!test.is_object() || !test.contains("data")) return fail("line ", n, ": a test has no \"data\"");
            for (const std::string& data : test_data(line)) {
                const Walk walk = walk_text(tokenizer, *made, trie, data, watch, options.masks);
                accepted.push_back(walk.accepted);
                if (!walk.error.empty() && out["error"].is_null()) out["error"] = walk.error;
                if (first.empty()) first.push_back(walk.mask_us[0]);
                rest.insert(rest.end(), walk.mask_us.begin() + 1, walk.mask_us.end());
                tokens.push_back(walk.tokens);
                masks.push_back(walk.masks);
            }
            for (int i = 0; i < options.n_walks; i++) {
                const Result<std::optional<std::string>> text = random_text(*made, trie, random);
                if (text && *text) walks.push_back(**text);
                else if (!text && out["error"].is_null()) out["error"] = text.error().message;
            }
        }
        out["accepted"] = std::move(accepted);
        if (options.masks) out["tokens"] = std::move(tokens), out["masks"] = std::move(masks);
        if (options.n_walks > 0) out["walks"] = std::move(walks);
        add_times(out, first, rest);
        print(out);
    }
    return {};
}

} // namespace quire
