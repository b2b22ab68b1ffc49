// quire.compute.cuda.sampling: the sampling of a step on the GPU: tasks, draws and edits go up in one copy, answers come back in another.
// **Owns** the pinned buffers of both; their places on the device are the backend's.
module;

#include "../../../cuda/kernels.h"

export module quire.compute.cuda.sampling;

import quire.compute.backend;
import quire.compute.cuda.pinned_memory;
import quire.compute.cuda.weights;
import quire.core.base;
import quire.step.logprobs;

export namespace quire {

class DeviceSampling {
public:
    explicit DeviceSampling(cuda::Context& gpu) : gpu_(gpu) {}

    // Takes memory for steps with up to `rows` rows of logits. False: there is not enough.
    bool           prepare(int rows, int vocab_size, DeviceMemory& memory, PinnedMemory& pinned);
    SamplingLimits limits() const { return limits_; }
    void           run(const SamplingPlan& sampling, const Tensor& logits);
    // Begins to copy the answers to the host. When the device is done, take_answers() returns them once.
    void                          fetch_answers();
    std::span<const TokenLogprob> take_answers() { return {host_answers_, std::exchange(n_answers_, 0)}; }

private:
    cuda::Context& gpu_;
    SamplingLimits limits_;
    std::byte *    host_ = nullptr, *device_ = nullptr;
    TokenLogprob * host_answers_ = nullptr, *answers_ = nullptr;
    std::size_t    n_answers_ = 0;
};

} // namespace quire

module :private;

namespace quire {

// Of the buffer that goes up: random numbers, then tasks, then edits; the masks come behind these.
static std::size_t sampling_bytes(std::size_t n_tasks, std::size_t n_uniforms, std::size_t n_edits) {
    return n_tasks * sizeof(cuda::SampleTask) + n_uniforms * sizeof(double) + n_edits * sizeof(cuda::LogitEdit);
}

bool DeviceSampling::prepare(int rows, int vocab_size, DeviceMemory& memory, PinnedMemory& pinned) {
    limits_ = {
        rows, 65536, 16 * rows, 128 * rows, std::min(cuda::max_top, vocab_size), rows * ((vocab_size + 63) / 64)};
    const std::size_t request =
        sampling_bytes(std::size_t(rows), std::size_t(limits_.uniforms), std::size_t(limits_.edits)) +
        std::size_t(limits_.mask_words) * 8;
    const std::size_t reply = std::size_t(limits_.results) * sizeof(TokenLogprob);
    host_                   = static_cast<std::byte*>(pinned.take(request));
    device_                 = static_cast<std::byte*>(memory.take(request));
    host_answers_           = static_cast<TokenLogprob*>(pinned.take(reply));
    answers_                = static_cast<TokenLogprob*>(memory.take(reply));
    return host_ && device_ && host_answers_ && answers_;
}

void DeviceSampling::run(const SamplingPlan& sampling, const Tensor& logits) {
    check(int(sampling.tasks.size()) <= limits_.tasks && int(sampling.edits.size()) <= limits_.edits &&
              int(sampling.uniforms.size()) <= limits_.uniforms && int(sampling.masks.size()) <= limits_.mask_words,
          "more to sample than announced");
    const std::size_t at_tasks = sampling.uniforms.size() * sizeof(double),
                      at_edits = sampling_bytes(sampling.tasks.size(), sampling.uniforms.size(), 0);
    std::memcpy(host_, sampling.uniforms.data(), at_tasks);
    auto* tasks = reinterpret_cast<cuda::SampleTask*>(host_ + at_tasks);
    n_answers_  = 0;
    for (const SamplingTask& t : sampling.tasks) {
        *tasks++   = {.row               = t.row,
                      .chosen            = t.chosen,
                      .first_edit        = t.first_edit,
                      .n_edits           = t.n_edits,
                      .first_draw        = t.first_uniform,
                      .n_draws           = t.chosen >= 0 ? 1 : t.n_uniforms,
                      .n_top             = t.n_top,
                      .first_out         = 2 * t.first_result,
                      .wants_logprobs    = t.logprobs,
                      .only_edited       = t.only_edited,
                      .first_mask        = t.first_mask < 0 ? -1 : 2 * t.first_mask, // words of 32 bits
                      .top_n_sigma       = t.top_n_sigma,
                      .top_k             = t.top_k,
                      .typical_p         = t.typical_p,
                      .top_p             = t.top_p,
                      .min_p             = t.min_p,
                      .xtc_threshold     = t.xtc_threshold,
                      .temperature       = t.temperature,
                      .dynatemp_range    = t.dynatemp_range,
                      .dynatemp_exponent = t.dynatemp_exponent,
                      .mirostat          = t.mirostat,
                      .mu                = t.mu};
        n_answers_ = std::max(n_answers_, std::size_t(t.first_result + t.n_results()));
    }
    auto* edits = reinterpret_cast<cuda::LogitEdit*>(host_ + at_edits);
    for (const LogitEdit& e : sampling.edits) *edits++ = {e.token, e.divide, e.subtract, e.add};
    const std::size_t at_masks = at_edits + sampling.edits.size() * sizeof(cuda::LogitEdit);
    cuda::copy_to_device(device_, host_, at_masks, gpu_);
    if (const std::size_t bytes = sampling.masks.size() * 8; bytes > 0) { // 16 KiB a sequence: while the model runs
        std::memcpy(host_ + at_masks, sampling.masks.data(), bytes);
        cuda::copy_to_device_beside(device_ + at_masks, host_ + at_masks, bytes, gpu_);
    }
    cuda::sample(static_cast<float*>(logits.data), logits.cols,
                 reinterpret_cast<const cuda::SampleTask*>(device_ + at_tasks), int(sampling.tasks.size()),
                 reinterpret_cast<cuda::LogitEdit*>(device_ + at_edits), reinterpret_cast<const double*>(device_),
                 reinterpret_cast<const std::uint32_t*>(device_ + at_masks), reinterpret_cast<std::int32_t*>(answers_),
                 gpu_);
}

void DeviceSampling::fetch_answers() {
    if (n_answers_ > 0) cuda::copy_to_host(host_answers_, answers_, n_answers_ * sizeof(TokenLogprob), gpu_);
}

} // namespace quire
