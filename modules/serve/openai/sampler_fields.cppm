// quire.serve.openai.sampler_fields: the fields of requests that choose samplers, with llama.cpp's names (docs/sampling.md). Owns nothing.
export module quire.serve.openai.sampler_fields;

import quire.core.base;
import quire.engine.sampling_defaults;
import quire.serve.api.generation_request;
import quire.serve.api.json_fields;
import quire.serve.api.limits;

export namespace quire {

// How tokens are drawn: the samplers, the seed, and the tokens that may come.
void parse_sampling(JsonFields& f, GenerationRequest& out, const ApiLimits& limits);
// Beam search. The fields of parse_sampling() and the numbers of answers and tokens are read before.
void parse_beams(JsonFields& f, GenerationRequest& out, const ApiLimits& limits);

} // namespace quire

module :private;

namespace quire {

constexpr int    longest_breaker = 40;  // bytes
constexpr double most_bias       = 1e6; // far beyond all logits, and a sum of some of them is finite

// The order of sampling, with llama.cpp's names and letters (docs/sampling.md).
constexpr std::array<std::pair<std::string_view, char>, 9> order{{{"penalties", 'e'},
                                                                  {"dry", 'd'},
                                                                  {"top_n_sigma", 's'},
                                                                  {"top_k", 'k'},
                                                                  {"typ_p", 'y'},
                                                                  {"top_p", 'p'},
                                                                  {"min_p", 'm'},
                                                                  {"xtc", 'x'},
                                                                  {"temperature", 't'}}};

void switch_off(std::string_view sampler, SamplingParams& p) {
    const SamplingParams none; // plain sampling from the model
    if (sampler == "penalties") {
        p.repetition_penalty = none.repetition_penalty;
        p.presence_penalty   = none.presence_penalty;
        p.frequency_penalty  = none.frequency_penalty;
    } else if (sampler == "dry") p.dry.multiplier = none.dry.multiplier;
    else if (sampler == "top_n_sigma") p.top_n_sigma = none.top_n_sigma;
    else if (sampler == "top_k") p.top_k = none.top_k;
    else if (sampler == "typ_p") p.typical_p = none.typical_p;
    else if (sampler == "top_p") p.top_p = none.top_p;
    else if (sampler == "min_p") p.min_p = none.min_p;
    else if (sampler == "xtc") p.xtc_probability = none.xtc_probability;
    else if (sampler == "temperature") {
        p.temperature    = none.temperature;
        p.dynatemp_range = none.dynatemp_range;
    }
}

// The field `samplers`: names, or a text of their letters. Those that it does not name are off. Their order is fixed.
void choose_samplers(JsonFields& f, SamplingParams& p) {
    const Json* v = f.find("samplers");
    f.describe("samplers", R"({"type":["string","array"],"items":{"type":"string"}})");
    if (!v) return;
    if (!v->is_string() && !v->is_array())
        return f.fail("samplers", cat("samplers is ", type_name(*v), "; it has to be a list of names"));
    std::array<bool, order.size()> on{};
    std::size_t                    last = 0;
    const auto                     take = [&](auto at, const std::string& as) {
        if (at == order.end()) return f.fail("samplers", cat("samplers names ", quote(as), ", which is not known"));
        const auto i = std::size_t(at - order.begin());
        if (i < last)
            return f.fail("samplers", cat("samplers has ", order[i].first, " behind ", order[last].first,
                                                              "; their order is fixed: penalties, dry, top_n_sigma, top_k, typ_p, top_p, "
                                                                                  "min_p, xtc, temperature"));
        last  = i;
        on[i] = true;
    };
    if (v->is_string())
        for (const char letter : v->get_ref<const std::string&>())
            take(std::ranges::find(order, letter, &std::pair<std::string_view, char>::second), std::string(1, letter));
    else
        for (const Json& one : *v) {
            if (!one.is_string()) return f.fail("samplers", "samplers has to be a list of names");
            std::string_view name = one.get_ref<const std::string&>();
            if (name == "typical_p" || name == "typical") name = "typ_p";
            if (name == "temp") name = "temperature";
            take(std::ranges::find(order, name, &std::pair<std::string_view, char>::first), std::string(name));
            if (f.failed()) return;
        }
    for (std::size_t i = 0; i < order.size(); i++)
        if (!on[i]) switch_off(order[i].first, p);
}

// Sets the samplers of `out`: to the request's values, else to those of `otherwise`. Returns DRY's breakers. `most_breakers`: how many
// breakers a request may have.
std::vector<std::string> parse_samplers(JsonFields& f, const SamplerChoice& otherwise, int most_breakers,
                                        SamplingParams& out) {
    constexpr int         huge   = std::numeric_limits<int>::max();
    const SamplingParams& d      = otherwise.params;
    const auto            number = [&](const char* name, double least, double most, float usual, bool above = false) {
        return float(f.number(name, least, most, double(usual), above));
    };
    out.temperature        = number("temperature", 0, 100, d.temperature);
    out.top_p              = number("top_p", 0, 1, d.top_p, true);
    out.min_p              = number("min_p", 0, 1, d.min_p);
    out.top_k              = std::max(f.integer("top_k", -1, huge, d.top_k), 0);
    out.presence_penalty   = number("presence_penalty", -2, 2, d.presence_penalty);
    out.frequency_penalty  = number("frequency_penalty", -2, 2, d.frequency_penalty);
    out.repetition_penalty = number("repeat_penalty", 0, 100, d.repetition_penalty, true); // llama.cpp's name
    out.repetition_penalty = number("repetition_penalty", 0, 100, out.repetition_penalty, true);
    out.repeat_last_n      = f.integer("repeat_last_n", -1, huge, d.repeat_last_n);
    out.top_n_sigma        = number("top_n_sigma", -1, 1e6, d.top_n_sigma);
    out.typical_p          = number("typical_p", 0, 1, d.typical_p, true);
    out.xtc_probability    = number("xtc_probability", 0, 1, d.xtc_probability);
    out.xtc_threshold      = number("xtc_threshold", 0, 1, d.xtc_threshold);
    out.dynatemp_range     = number("dynatemp_range", 0, 100, d.dynatemp_range);
    out.dynatemp_exponent  = number("dynatemp_exponent", 0, 100, d.dynatemp_exponent);
    out.mirostat           = f.integer("mirostat", 0, 2, d.mirostat);
    out.mirostat_tau       = number("mirostat_tau", 0, 100, d.mirostat_tau);
    out.mirostat_eta       = number("mirostat_eta", 0, 1, d.mirostat_eta);
    out.dry.multiplier     = number("dry_multiplier", 0, 1000, d.dry.multiplier);
    out.dry.base           = number("dry_base", 1, 1000, d.dry.base);
    out.dry.allowed_length = f.integer("dry_allowed_length", 1, huge, d.dry.allowed_length);
    out.dry.last_n         = f.integer("dry_penalty_last_n", -1, huge, d.dry.last_n);
    std::vector<std::string> breakers = f.texts("dry_sequence_breakers", most_breakers, longest_breaker);
    return f.has("dry_sequence_breakers") ? breakers : otherwise.dry_breakers;
}

// Fails where a sampler that the request names does not go with beam search, and switches them all off.
void refuse_samplers(JsonFields& f, SamplingParams& params) {
    const SamplingParams none;
    const auto           refuse = [&](const char* name, bool on) {
        if (on && f.has(name)) f.fail(name, cat(name, " does not go with beam search"));
    };
    // 0, or 1, are the model's own probabilities.
    if (params.temperature != 0 && f.has("temperature") && params.temperature != 1)
        f.fail("temperature", "beam search takes the model's own probabilities: temperature can be 0 or 1");
    refuse("top_p", params.top_p != 1);
    refuse("top_k", params.top_k != 0);
    refuse("min_p", params.min_p != 0);
    refuse("presence_penalty", params.presence_penalty != 0);
    refuse("frequency_penalty", params.frequency_penalty != 0);
    for (const char* name : {"repetition_penalty", "repeat_penalty"})
        if (params.repetition_penalty != 1 && f.has(name))
            f.fail(name, "a repetition penalty does not go with beam search");
    refuse("top_n_sigma", params.top_n_sigma > 0);
    refuse("typical_p", params.typical_p < 1);
    refuse("xtc_probability", params.xtc_probability > 0);
    refuse("dynatemp_range", params.dynatemp_range > 0);
    refuse("mirostat", params.mirostat > 0);
    refuse("dry_multiplier", params.dry.multiplier > 0);
    params.temperature = none.temperature;
    params.top_p       = none.top_p;
    params.top_k       = none.top_k;
    params.min_p       = none.min_p;

    params.presence_penalty = params.frequency_penalty = 0;
    params.repetition_penalty                          = 1;
    params.mirostat                                    = none.mirostat;
    params.dry                                         = none.dry;
}

void parse_bias(JsonFields& f, GenerationRequest& out, const ApiLimits& limits) {
    const Json* v = f.find("logit_bias");
    f.describe("logit_bias", R"({"type":["object","array"]})");
    if (!v) return;
    if (!v->is_object() && !v->is_array())
        return f.fail("logit_bias", cat("logit_bias is ", type_name(*v), "; it has to be an object of token ids"));
    if (v->size() > std::size_t(limits.logit_bias))
        return f.fail("logit_bias", cat("logit_bias has ", v->size(), " entries; ", limits.logit_bias, " are allowed"));
    const auto add = [&](const Json& key, const Json& bias) {
        float value = 0;
        if (bias.is_boolean() && !bias.get<bool>()) value = -std::numeric_limits<float>::infinity(); // never
        else if (bias.is_number() && std::abs(bias.get<double>()) <= most_bias) value = bias.get<float>();
        else return f.fail("logit_bias", "a bias has to be a number in -1000000..1000000");
        std::optional<std::int64_t> id;
        if (key.is_string()) {
            const auto&  text       = key.get_ref<const std::string&>();
            std::int64_t n          = 0;
            const auto [end, wrong] = std::from_chars(text.data(), text.data() + text.size(), n);
            if (wrong == std::errc{} && end == text.data() + text.size()) id = n;
            else if (wrong == std::errc{} || text.empty() || wrong == std::errc::result_out_of_range ||
                     text.size() > std::size_t(limits.stop_bytes))
                return f.fail("logit_bias", cat("logit_bias has the key ", quote(text), ", which is no token id"));
            else return void(out.text_bias.emplace_back(text, value));
        } else {
            id = JsonFields::integer_of(key);
        }
        if (!id || *id < 0 || *id >= limits.vocab_size)
            return f.fail("logit_bias", cat("logit_bias names ",
                                            key.is_string() ? quote(key.get<std::string>()) : JsonFields::shown(key),
                                            ", which is no token id in 0..", limits.vocab_size - 1));
        out.request.sampling.logit_bias.emplace_back(Token(*id), value);
    };
    if (v->is_object()) {
        for (auto at = v->begin(); at != v->end(); ++at) add(Json(at.key()), at.value());
        return;
    }
    for (const Json& pair : *v)
        if (pair.is_array() && pair.size() == 2) add(pair[0], pair[1]);
        else return f.fail("logit_bias", "a list of logit_bias has pairs of a token and a bias");
}

void parse_sampling(JsonFields& f, GenerationRequest& out, const ApiLimits& limits) {
    SamplingParams& s = out.request.sampling;
    out.dry_breakers  = parse_samplers(f, limits.samplers, limits.stops, s);
    choose_samplers(f, s);
    s.top_p              = std::max(s.top_p, std::numeric_limits<float>::min());
    s.typical_p          = std::max(s.typical_p, std::numeric_limits<float>::min());
    s.repetition_penalty = std::max(s.repetition_penalty, 1e-6f);
    f.describe("seed", R"({"type":"integer","minimum":-9223372036854775808,"maximum":18446744073709551615})");
    const Json* given = f.find("seed");
    const bool  large = given && given->is_number_unsigned(); // up to 2^64 - 1
    if (const auto seed = large ? std::nullopt
                                : f.integer("seed", std::numeric_limits<std::int64_t>::min(),
                                            std::numeric_limits<std::int64_t>::max());
        large || (seed && *seed != -1) || (!seed && limits.seed != -1)) {
        s.seed       = large ? given->get<std::uint64_t>() : std::uint64_t(seed.value_or(limits.seed));
        out.has_seed = true;
    }
    s.allowed_tokens = f.tokens("allowed_token_ids", limits.vocab_size);
    if (const Json* v = f.find("allowed_token_ids"); v && v->is_array() && v->empty())
        f.fail("allowed_token_ids", "allowed_token_ids is empty: no token could come");
    out.bad_words = f.texts("bad_words", limits.stops, limits.stop_bytes);
    parse_bias(f, out, limits);
}

void parse_beams(JsonFields& f, GenerationRequest& out, const ApiLimits& limits) {
    Request&   r       = out.request;
    const bool beams   = f.boolean("use_beam_search", false);
    const int  width   = f.integer("beam_width", 0, limits.best_of, 0);
    const auto penalty = f.number("length_penalty", -100, 100, 1);
    r.length_penalty   = float(penalty);
    f.describe("early_stopping", R"({"enum":[true,false,"never"]})");
    if (const Json* v = f.find("early_stopping")) {
        if (v->is_boolean()) r.early_stopping = v->get<bool>() ? EarlyStopping::yes : EarlyStopping::no;
        else if (*v == "never") r.early_stopping = EarlyStopping::never;
        else f.fail("early_stopping", "early_stopping has to be true, false or \"never\"");
    }
    if (!beams && width == 0) {
        if (penalty != 1) f.fail("length_penalty", "length_penalty needs use_beam_search");
        if (r.early_stopping != EarlyStopping::no) f.fail("early_stopping", "early_stopping needs use_beam_search");
        return;
    }
    if (!beams) return f.fail("beam_width", "beam_width needs use_beam_search");
    r.beam_width = width > 0 ? width : std::max(r.best_of, r.n);
    r.best_of    = 0;
    if (r.beam_width < r.n)
        f.fail("beam_width", cat("beam_width is ", r.beam_width, ", less than the ", r.n, " answers wanted"));
    // Beams follow the model's own distribution.
    const SamplingParams& s = r.sampling;
    if (!s.logit_bias.empty() || !out.text_bias.empty())
        f.fail("logit_bias", "logit_bias does not go with beam search");
    if (f.has("allowed_token_ids")) f.fail("allowed_token_ids", "allowed_token_ids does not go with beam search");
    if (!out.bad_words.empty()) f.fail("bad_words", "bad_words does not go with beam search");
    if (r.min_tokens > 0) f.fail("min_tokens", "min_tokens does not go with beam search");
    refuse_samplers(f, r.sampling);
}

} // namespace quire
