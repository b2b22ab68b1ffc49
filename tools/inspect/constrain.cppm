// quire.tools.inspect.constrain: texts under a constraint, without a model's weights: is a text accepted, and what do its masks cost.
export module quire.tools.inspect.constrain;

import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.text.grammar.compile;
import quire.text.tokenizer;

export namespace quire {

// The trie of a model's vocabulary, for constraints.
std::shared_ptr<const TokenTrie> token_trie_of(const Tokenizer& tokenizer);

// {"accepted", "refused_at", "tokens", "first_mask_us", "mask_us_mean", "mask_us_max"}: `text` goes through the constraint token by token,
// with a mask before each. Error: the constraint cannot be compiled.
Result<Json> constrain(const Tokenizer& tokenizer, const ConstraintSpec& spec, std::string_view text);

// Lines {"id", "schema", "tests": [{"valid", "data"}]} → for each a line {"id", "compiled", "error", "accepted", "first_mask_us",
// "mask_us_mean", "mask_us_max"} for `print`. The data goes through as compact JSON in UTF-8. Error: a line that is not so.
Result<void> constrain_tests(const Tokenizer& tokenizer, std::istream& lines, bool ordered,
                             const std::function<void(const Json&)>& print);

} // namespace quire

module :private;

namespace quire {

std::shared_ptr<const TokenTrie> token_trie_of(const Tokenizer& tokenizer) {
    return make_token_trie(tokenizer, tokenizer.vocab_size());
}

// What one text makes of a constraint.
struct Walk {
    bool                accepted   = false;
    std::size_t         refused_at = 0; // byte
    std::size_t         n_tokens   = 0;
    std::string         error;
    std::vector<double> mask_us;
};

Walk walk_text(const Tokenizer& tokenizer, const std::shared_ptr<Constraint>& constraint,
               const std::shared_ptr<const TokenTrie>& trie, std::string_view text, Stopwatch first) {
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
        Stopwatch watch;
        auto      ok = state.mask(bits);
        walk.mask_us.push_back((walk.mask_us.empty() ? first : watch).seconds() * 1e6);
        if (!ok && !state.may_end() && !(ok.error().kind == ErrorKind::input)) walk.error = ok.error().message;
    };
    std::size_t at = 0;
    for (std::size_t i = 0; i < (exact ? tokens.size() : text.size()); i++) {
        if (i == 0 || exact) mask();
        const std::string_view bytes   = exact ? trie->bytes(tokens[i]) : text.substr(i, 1);
        const bool             allowed = !exact || (bits[std::size_t(tokens[i]) / 64] >> (tokens[i] % 64) & 1) != 0;
        const bool             went    = state.accept_bytes(bytes);
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
    Stopwatch                           watch;
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

Result<void> constrain_tests(const Tokenizer& tokenizer, std::istream& lines, bool ordered,
                             const std::function<void(const Json&)>& print) {
    const auto  trie = token_trie_of(tokenizer);
    std::string line;
    for (std::size_t n = 1; std::getline(lines, line); n++) {
        if (line.empty()) continue;
        Result<Json> json = json_parse(line, {.depth = 256, .members = 1 << 20});
        if (!json) return fail("line ", n, ": ", json.error().message);
        const auto schema = json->find("schema"), tests = json->find("tests");
        if (!json->is_object() || schema == json->end() || tests == json->end() || !tests->is_array())
            return fail("line ", n, R"( is not {"id", "schema", "tests": [...]})");
        Json                                out{{"id", json->value("id", Json())}};
        Stopwatch                           watch;
        Result<std::shared_ptr<Constraint>> made = compile_schema(*schema, ordered);
        out["compiled"]                          = made.has_value();
        out["error"]                             = made ? Json() : Json(made.error().message);
        Json                accepted             = Json::array();
        std::vector<double> first, rest;
        if (made) {
            for (const Json& test : *tests) {
                if (!test.is_object() || !test.contains("data")) return fail("line ", n, ": a test has no \"data\"");
                const Walk walk = walk_text(tokenizer, *made, trie, json_dump(test["data"]), watch);
                accepted.push_back(walk.accepted);
                if (!walk.error.empty() && out["error"].is_null()) out["error"] = walk.error;
                if (first.empty()) first.push_back(walk.mask_us[0]);
                rest.insert(rest.end(), walk.mask_us.begin() + 1, walk.mask_us.end());
            }
        }
        out["accepted"] = std::move(accepted);
        add_times(out, first, rest);
        print(out);
    }
    return {};
}

} // namespace quire
