// quire.serve.api.generation_settings: the settings of a request, under llama.cpp's names: for `generation_settings` of /completion
// and `params` of /slots. **Owns** the settings of the requests that run.
export module quire.serve.api.generation_settings;

import quire.core.base;
export import quire.core.json;
export import quire.serve.api.generation_request;

export namespace quire {

// `ends`: the vocabulary's end tokens.
Json settings_json(const GenerationRequest& request, std::span<const Token> ends = {});
// The shortest decimal number that is this float: 0.8, not 0.800000011920929.
double decimal(float value);

// The settings of the requests that run. Any thread.
class RunningSettings {
public:
    // Keeps the settings of these requests as long as the result lives. This object must outlive the result.
    std::shared_ptr<void> add(std::vector<RequestId> ids, Json settings);
    // Null: nothing is known of that request.
    std::shared_ptr<const Json> find(RequestId id) const;

private:
    mutable std::mutex                                         mutex_;
    std::unordered_map<RequestId, std::shared_ptr<const Json>> settings_;
};

} // namespace quire

module :private;

namespace quire {

double decimal(float value) {
    char       text[32];
    const auto end = std::to_chars(text, text + sizeof text, value).ptr;
    double     out = double(value);
    std::from_chars(text, end, out);
    return out;
}

Json settings_json(const GenerationRequest& r, std::span<const Token> ends) {
    const SamplingParams& s      = r.request.sampling;
    Json                  biases = Json::array();
    for (const auto& [token, bias] : s.logit_bias)
        biases.push_back({{"token", token}, {"bias", std::isfinite(bias) ? Json(decimal(bias)) : Json()}});
    if (r.request.ignore_end)
        for (Token token : ends) biases.push_back({{"token", token}, {"bias", nullptr}}); // −∞
    Json adapters = Json::array();
    if (r.request.adapters)
        for (auto [id, scale] : *r.request.adapters) adapters.push_back({{"id", id}, {"scale", decimal(scale)}});
    return {{"n_predict", r.max_tokens.value_or(-1)},
            {"max_tokens", r.max_tokens.value_or(-1)},
            {"seed", s.seed},
            {"temperature", decimal(s.temperature)},
            {"top_k", s.top_k},
            {"top_p", decimal(s.top_p)},
            {"min_p", decimal(s.min_p)},
            {"typical_p", decimal(s.typical_p)},
            {"top_n_sigma", decimal(s.top_n_sigma)},
            {"xtc_probability", decimal(s.xtc_probability)},
            {"xtc_threshold", decimal(s.xtc_threshold)},
            {"dynatemp_range", decimal(s.dynatemp_range)},
            {"dynatemp_exponent", decimal(s.dynatemp_exponent)},
            {"mirostat", s.mirostat},
            {"mirostat_tau", decimal(s.mirostat_tau)},
            {"mirostat_eta", decimal(s.mirostat_eta)},
            {"dry_multiplier", decimal(s.dry.multiplier)},
            {"dry_base", decimal(s.dry.base)},
            {"dry_allowed_length", s.dry.allowed_length},
            {"dry_penalty_last_n", s.dry.last_n},
            {"dry_sequence_breakers", r.dry_breakers},
            {"repeat_last_n", s.repeat_last_n},
            {"repeat_penalty", decimal(s.repetition_penalty)},
            {"presence_penalty", decimal(s.presence_penalty)},
            {"frequency_penalty", decimal(s.frequency_penalty)},
            {"adaptive_target", -1}, // off: quire has no such sampler
            {"adaptive_decay", 0.9},
            {"n_probs", std::max(s.logprobs, 0)},
            {"post_sampling_probs", s.after_samplers},
            {"ignore_eos", r.request.ignore_end},
            {"logit_bias", std::move(biases)},
            {"lora", std::move(adapters)},
            {"stop", r.stop},
            {"stream", r.stream},
            {"timings_per_token", r.timings_per_token}};
}

std::shared_ptr<void> RunningSettings::add(std::vector<RequestId> ids, Json settings) {
    const auto shared = std::make_shared<const Json>(std::move(settings));
    {
        const std::scoped_lock lock(mutex_);
        for (RequestId id : ids) settings_[id] = shared;
    }
    return {nullptr, [this, ids = std::move(ids)](void*) {
                const std::scoped_lock lock(mutex_);
                for (RequestId id : ids) settings_.erase(id);
            }};
}

std::shared_ptr<const Json> RunningSettings::find(RequestId id) const {
    const std::scoped_lock lock(mutex_);
    const auto             at = settings_.find(id);
    return at == settings_.end() ? nullptr : at->second;
}

} // namespace quire
