// quire.serve.openai.sampler_fields: the fields of requests that choose samplers, with llama.cpp's names (docs/sampling.md). Owns nothing.
export module quire.serve.openai.sampler_fields;

import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.engine.sampling_defaults;
import quire.schedule.sampling_params;
import quire.serve.api.json_fields;

export namespace quire {

// Sets the samplers of `out`: to the request's values, else to those of `otherwise`. Returns DRY's breakers. `most_breakers`: how many
// breakers a request may have.
std::vector<std::string> parse_samplers(JsonFields& f, const SamplerChoice& otherwise, int most_breakers,
                                        SamplingParams& out);

// Fails where a sampler that the request names does not go with beam search, and switches them all off.
void refuse_samplers(JsonFields& f, SamplingParams& params);

} // namespace quire

module :private;

namespace quire {

constexpr int longest_breaker = 40; // bytes

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
    if (!f.has("dry_sequence_breakers")) return otherwise.dry_breakers;
    return f.texts("dry_sequence_breakers", most_breakers, longest_breaker);
}

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

} // namespace quire
