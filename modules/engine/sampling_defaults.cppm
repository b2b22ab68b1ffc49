// quire.engine.sampling_defaults: the samplers where a request names none: llama.cpp's defaults, and the values that the model's authors
// recommend in the keys general.sampling.* of its file, which llama.cpp writes and reads. Owns nothing.
export module quire.engine.sampling_defaults;

import quire.core.base;
import quire.model_file.gguf;
import quire.schedule.sampling_params;

export namespace quire {

// llama.cpp's defaults, where neither the model's file nor a flag nor a request says anything: of `chat`, the server and its page.
SamplingParams usual_sampling();

// Samplers as a request or a flag names them: `dry.breakers` are texts here.
struct SamplerChoice {
    SamplingParams           params = usual_sampling();
    std::vector<std::string> dry_breakers{"\n", ":", "\"", "*"};
};

struct FileSampling {
    std::string said,
        refused; // for a line: the values that were taken; the values that no sampler allows; "": none
};

// Puts the file's values into `choice`, except where `given` says that the user gave the flag for the value.
FileSampling take_file_sampling(const Gguf& file, const std::function<bool(const std::string& flag)>& given,
                                SamplerChoice& choice);

// The samplers that are on, for a line: "temperature 0.8, top_k 40".
std::string describe_sampling(const SamplingParams& params);

} // namespace quire

module :private;

namespace quire {

SamplingParams usual_sampling() {
    SamplingParams p;
    p.temperature   = 0.8f;
    p.top_k         = 40;
    p.top_p         = 0.95f;
    p.min_p         = 0.05f;
    p.repeat_last_n = 64;
    return p;
}

// `whole`: an integer. The order of sampling (general.sampling.sequence) is fixed.
struct FileKey {
    const char* name; // behind general.sampling.
    const char* flag;
    float SamplingParams::* number = nullptr;
    int SamplingParams::* whole    = nullptr;
    double                least = 0, most = 0;
};

constexpr double  huge  = 1 << 30;
constexpr FileKey all[] = {
    {.name = "temp", .flag = "--temp", .number = &SamplingParams::temperature, .least = 0, .most = 100},
    {.name = "top_k", .flag = "--top-k", .whole = &SamplingParams::top_k, .least = -1, .most = huge},
    {.name = "top_p", .flag = "--top-p", .number = &SamplingParams::top_p, .least = 1e-9, .most = 1},
    {.name = "min_p", .flag = "--min-p", .number = &SamplingParams::min_p, .least = 0, .most = 1},
    {.name   = "xtc_probability",
     .flag   = "--xtc-probability",
     .number = &SamplingParams::xtc_probability,
     .least  = 0,
     .most   = 1},
    {.name   = "xtc_threshold",
     .flag   = "--xtc-threshold",
     .number = &SamplingParams::xtc_threshold,
     .least  = 0,
     .most   = 1},
    {.name  = "penalty_last_n",
     .flag  = "--repeat-last-n",
     .whole = &SamplingParams::repeat_last_n,
     .least = -1,
     .most  = huge},
    {.name   = "penalty_repeat",
     .flag   = "--repeat-penalty",
     .number = &SamplingParams::repetition_penalty,
     .least  = 0.01,
     .most   = 100},
    {.name = "mirostat", .flag = "--mirostat", .whole = &SamplingParams::mirostat, .least = 0, .most = 2},
    {.name   = "mirostat_tau",
     .flag   = "--mirostat-ent",
     .number = &SamplingParams::mirostat_tau,
     .least  = 0,
     .most   = 100},
    {.name = "mirostat_eta", .flag = "--mirostat-lr", .number = &SamplingParams::mirostat_eta, .least = 0, .most = 1},
};

FileSampling take_file_sampling(const Gguf& file, const std::function<bool(const std::string& flag)>& given,
                                SamplerChoice& choice) {
    FileSampling out;
    const auto   add = [](std::string& list, const std::string& item) { list += cat(list.empty() ? "" : ", ", item); };
    for (const FileKey& k : all) {
        const std::string key = cat("general.sampling.", k.name);
        if (!file.find(key)) continue;
        const Result<double> value = file.number(key);
        if (!value || !(*value >= k.least && *value <= k.most) || (k.whole && std::trunc(*value) != *value)) {
            add(out.refused, value ? cat(key, " = ", *value) : key);
            continue;
        }
        if (given(k.flag)) continue;
        if (k.whole) choice.params.*k.whole = int(*value);
        else choice.params.*k.number = float(*value);
        add(out.said, cat(k.name, ' ', *value));
    }
    choice.params.top_k = std::max(choice.params.top_k, 0);
    return out;
}

std::string describe_sampling(const SamplingParams& p) {
    const SamplingParams off;
    std::string          out = cat("temperature ", p.temperature);
    const auto           add = [&](const char* name, auto value, auto neutral) {
        if (value != neutral) out += cat(", ", name, ' ', value);
    };
    add("top_k", p.top_k, off.top_k);
    add("top_p", p.top_p, off.top_p);
    add("min_p", p.min_p, off.min_p);
    add("typical_p", p.typical_p, off.typical_p);
    add("top_n_sigma", p.top_n_sigma, off.top_n_sigma);
    add("xtc_probability", p.xtc_probability, off.xtc_probability);
    add("mirostat", p.mirostat, off.mirostat);
    add("dry_multiplier", p.dry.multiplier, off.dry.multiplier);
    add("repeat_penalty", p.repetition_penalty, off.repetition_penalty);
    add("presence_penalty", p.presence_penalty, off.presence_penalty);
    add("frequency_penalty", p.frequency_penalty, off.frequency_penalty);
    return out;
}

} // namespace quire
