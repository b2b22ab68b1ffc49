// quire.serve.generation_settings: what a request is generated with, under llama.cpp's names: for `generation_settings` of /completion
// and `params` of /slots. **Owns** the settings of the requests that run.
export module quire.serve.generation_settings;

import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.schedule.request;
import quire.serve.openai_request;

export namespace quire {

Json settings_json(const GenerationRequest& request);

// The settings of the requests that run. Any thread.
class RunningSettings {
public:
    // The settings of these requests, until the result is let go of. This must outlive it.
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

Json settings_json(const GenerationRequest& r) {
    const SamplingParams& s = r.request.sampling;
    return {{"n_predict", r.max_tokens.value_or(-1)},
            {"max_tokens", r.max_tokens.value_or(-1)},
            {"seed", s.seed},
            {"temperature", s.temperature},
            {"top_k", s.top_k},
            {"top_p", s.top_p},
            {"min_p", s.min_p},
            {"repeat_last_n", s.repeat_last_n},
            {"repeat_penalty", s.repetition_penalty},
            {"presence_penalty", s.presence_penalty},
            {"frequency_penalty", s.frequency_penalty},
            {"n_probs", std::max(s.logprobs, 0)},
            {"ignore_eos", r.request.ignore_end},
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
