// quire.tools.common.sampler_flags: the flags of samplers, with llama.cpp's names, and the model file's word where none is typed. Owns
// nothing.
export module quire.tools.common.sampler_flags;

import quire.core.base;
import quire.schedule.sampling_params;
import quire.engine.sampling_defaults;
import quire.tools.common.engine_flags;
import quire.tools.flags.cli;

export namespace quire {

// Whether a flag of that name was typed; once the command line is parsed, and as long as the application is there.
using FlagGiven = std::function<bool(const std::string& name)>;

FlagGiven add_sampler_flags(CLI::App& app, SamplerChoice& choice);

} // namespace quire

module :private;

namespace quire {

FlagGiven add_sampler_flags(CLI::App& app, SamplerChoice& choice) {
    SamplingParams& p = choice.params;
    add_number(app, "--temp", p.temperature, 0, 100,
               "temperature; 0: always the most likely token, which the file of the toy model asks for");
    add_number(app, "--top-k", p.top_k, 0, 1 << 30, "choose from the k most likely tokens; 0: all");
    add_number(app, "--top-p", p.top_p, 1e-9, 1,
               "choose from the most likely tokens with this total probability; 1: all", "above 0, at most 1");
    add_number(app, "--min-p", p.min_p, 0, 1,
               "choose from tokens with at least this fraction of the top probability; 0: all");
    add_number(app, "--repeat-penalty", p.repetition_penalty, 0.01, 100,
               "above 1: tokens that occurred before become less likely");
    add_number(app, "--repeat-last-n", p.repeat_last_n, -1, 1 << 24,
               "number of last tokens that the penalties count; -1: all");
    add_number(app, "--presence-penalty", p.presence_penalty, -100, 100,
               "subtracted from the logits of tokens generated before");
    add_number(app, "--frequency-penalty", p.frequency_penalty, -100, 100,
               "subtracted once for each time a token was generated");
    add_number(app, "--top-n-sigma,--top-nsigma", p.top_n_sigma, -1, 1e6,
               "choose from tokens within so many standard deviations of the best logit; 0 or -1: all");
    add_number(app, "--typical,--typical-p", p.typical_p, 1e-9, 1,
               "choose from the tokens closest to the mean surprise with this total probability; 1: all",
               "above 0, at most 1");
    add_number(app, "--xtc-probability", p.xtc_probability, 0, 1,
               "XTC: chance of dropping all but the least likely of the top tokens");
    add_number(app, "--xtc-threshold", p.xtc_threshold, 0, 1,
               "XTC: tokens of at least this probability are top tokens; above 0.5: none");
    add_number(app, "--dynatemp-range", p.dynatemp_range, 0, 100,
               "the temperature varies by so much in both directions, with the entropy");
    add_number(app, "--dynatemp-exp", p.dynatemp_exponent, 0, 100, "exponent of the entropy in that");
    add_number(app, "--mirostat", p.mirostat, 0, 2,
               "1 or 2: mirostat, in place of all other samplers but the temperature");
    add_number(app, "--mirostat-ent", p.mirostat_tau, 0, 100, "the surprise that mirostat aims at, in bits");
    add_number(app, "--mirostat-lr", p.mirostat_eta, 0, 1, "how fast mirostat corrects itself");
    add_number(app, "--dry-multiplier", p.dry.multiplier, 0, 1000,
               "DRY: the penalty of a token that continues a repetition");
    add_number(app, "--dry-base", p.dry.base, 1, 1000, "DRY: the penalty grows by this factor with each token");
    add_number(app, "--dry-allowed-length", p.dry.allowed_length, 1, 1 << 24, "DRY: shorter repetitions cost nothing");
    add_number(app, "--dry-penalty-last-n", p.dry.last_n, -1, 1 << 24,
               "DRY: number of last tokens it looks at; -1: all");
    app.add_option_function<std::vector<std::string>>(
           "--dry-sequence-breaker",
           [&choice](const std::vector<std::string>& texts) {
               choice.dry_breakers = texts;
               if (texts == std::vector<std::string>{"none"}) choice.dry_breakers.clear();
           },
           "DRY: no repetition reaches across one of these texts; may be given several times; none: no breakers")
        ->check([](const std::string& text) {
            return text.empty() || text.size() > 40 ? std::string("a text of 1 to 40 bytes is needed") : std::string();
        })
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
        ->default_str("\"\\n\" \":\" \"\\\"\" \"*\"");
    return [&app](const std::string& name) { return app.count(name) > 0; };
}

} // namespace quire
