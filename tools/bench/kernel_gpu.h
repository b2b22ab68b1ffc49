// Shared by the measurements of `bench kernel`: a GPU with memory for them, and a line of the table. To be included last, below the imports.
#pragma once

#include "../../cuda/kernels.h"
#include "commands.h"

namespace quire::bench {

class Gpu {
public:
    Gpu() {
        const char* why = nullptr;
        context_        = cuda::create_context(0, why);
        check(context_ != nullptr, cat("no GPU to measure on: ", why != nullptr ? why : ""));
        cuda::open_cublaslt(*context_);
        cuda::prepare_layer_kernel(*context_);
        begin_ = cuda::create_event(), end_ = cuda::create_event();
    }
    Gpu(const Gpu&)            = delete;
    Gpu& operator=(const Gpu&) = delete;
    ~Gpu() {
        clear();
        cuda::destroy_event(begin_), cuda::destroy_event(end_);
        cuda::destroy_context(context_);
    }
    cuda::Context& context() { return *context_; }
    // Random fp16 values with a standard deviation of 1/70.
    void* fp16(std::size_t n) {
        static const std::vector<std::uint16_t> pattern = [] {
            std::vector<std::uint16_t>      made((std::size_t(4) << 20) | 1);
            std::mt19937                    random(1);
            std::normal_distribution<float> normal(0, 1.0f / 70);
            for (auto& h : made) h = f32_to_f16(normal(random));
            return made;
        }();
        auto* to = static_cast<std::uint16_t*>(cuda::allocate(*context_, n * 2));
        check(to != nullptr, "the GPU's memory is full");
        for (std::size_t at = 0; at < n; at += pattern.size())
            cuda::upload(to + at, pattern.data(), std::min(pattern.size(), n - at) * 2, *context_);
        return memory_.emplace_back(to);
    }
    void* ints(const std::vector<std::int32_t>& values) {
        void* to = cuda::allocate(*context_, values.size() * 4);
        cuda::upload(to, values.data(), values.size() * 4, *context_);
        return memory_.emplace_back(to);
    }
    void* zeros(std::size_t bytes) { return memory_.emplace_back(cuda::allocate(*context_, bytes)); }
    void  clear() {
        for (void* m : memory_) cuda::release(m);
        memory_.clear();
    }
    // Median seconds of one launch; `launch` gets the number of the repetition.
    double seconds(const std::function<void(int)>& launch, int each = 10) {
        std::vector<double> samples;
        for (int i = 0; i < 3; i++) launch(i);
        for (int round = 0; round < 9; round++) {
            cuda::record_event(begin_, *context_);
            for (int i = 0; i < each; i++) launch(round * each + i);
            cuda::record_event(end_, *context_);
            samples.push_back(cuda::seconds_between(begin_, end_) / each);
        }
        if (const char* error = cuda::last_error(*context_)) std::fprintf(stderr, "bench: CUDA: %s\n", error);
        std::sort(samples.begin(), samples.end());
        return samples[samples.size() / 2];
    }

private:
    cuda::Context*     context_;
    void *             begin_, *end_;
    std::vector<void*> memory_;
};

inline void kernel_line(const std::string& kernel, const std::string& shape, double seconds, double bytes, double flop,
                        const Arguments& a) {
    const double of = std::max(bytes / seconds / ((a.bandwidth > 0 ? a.bandwidth : 4300) * 1e9),
                               flop / seconds / ((a.tflops > 0 ? a.tflops : 790) * 1e12));
    std::printf("| %-18s | %-28s | %9.1f | %6.2f | %7.1f | %5.0f %% |\n", kernel.c_str(), shape.c_str(), seconds * 1e6,
                bytes / seconds / 1e12, flop / seconds / 1e12, 100 * of);
    std::fflush(stdout);
}

// Whether --only asks for a kernel of one of these names, or for all.
inline bool wanted(const Arguments& a, std::initializer_list<std::string_view> names) {
    return std::ranges::any_of(names, [&](std::string_view name) { return name.starts_with(a.only); });
}

// -- kernel_gemms.cpp
void small_gemms(Gpu& gpu, const Arguments& a);
void layer_kernels(Gpu& gpu, const Arguments& a);
void prefill_gemms(Gpu& gpu, const Arguments& a);
void experts(Gpu& gpu, const Arguments& a);

} // namespace quire::bench
