// The functions of cuda_tools.h, compiled once for all tests.
#include <catch2/catch_test_macros.hpp>

import quire.core.base;
import quire.core.std;
import quire.model_file.quants;

#include "cuda_tools.h"

namespace quire::testing {

bool no_gpu() {
    cuda::DeviceInfo info;
    const char*      why = cuda::open_device(0, info);
    if (why) WARN("not tested: " << why);
    return why != nullptr;
}

Gpu::Gpu() {
    const char* why = nullptr;
    context         = cuda::create_context(0, why);
    INFO((why ? why : ""));
    REQUIRE(context != nullptr);
}
Gpu::~Gpu() { cuda::destroy_context(context); }

void require_done(cuda::Context& gpu) {
    cuda::synchronize(gpu);
    const char* error = cuda::last_error(gpu);
    INFO((error ? error : ""));
    REQUIRE(error == nullptr);
}

std::vector<std::uint16_t> random_fp16(std::size_t n, std::mt19937& random, float scale) {
    std::normal_distribution<float> normal(0, scale);
    std::vector<std::uint16_t>      out(n);
    for (auto& h : out) h = f32_to_f16(normal(random));
    return out;
}

std::vector<std::int32_t> with_v_slots(std::vector<std::int32_t> slots) {
    std::vector<std::int32_t> stored;
    for (const std::int32_t slot : slots)
        if (slot >= 0) stored.push_back(slot);
    for (std::size_t t = 0, n = slots.size(); t < n; t++) {
        slots.push_back(slots[t] < 0 ? -1 : stored.back());
        if (slots[t] >= 0) stored.pop_back();
    }
    return slots;
}

double relative_error(const std::vector<float>& got, const std::vector<double>& want) {
    double d = 0, all = 0;
    for (std::size_t i = 0; i < want.size(); i++) {
        d += (double(got[i]) - want[i]) * (double(got[i]) - want[i]);
        all += want[i] * want[i];
    }
    return std::isnan(d) ? 1e30 : std::sqrt(d / std::max(all, 1e-30));
}

std::vector<float> floats_of(const std::vector<std::uint16_t>& fp16) {
    std::vector<float> out(fp16.size());
    for (std::size_t i = 0; i < fp16.size(); i++) out[i] = f16_to_f32(fp16[i]);
    return out;
}

double activated(cuda::Activation activation, double g, double u) {
    switch (activation) {
        case cuda::Activation::silu: return g / (1 + std::exp(-g)) * u;
        case cuda::Activation::gelu_tanh:
            return 0.5 * g * (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * (g + 0.044715 * g * g * g))) * u;
        case cuda::Activation::gelu_erf: return 0.5 * g * (1 + std::erf(g / std::sqrt(2.0))) * u;
        case cuda::Activation::relu: return std::max(g, 0.0) * u;
        case cuda::Activation::relu_squared: return std::max(g, 0.0) * std::max(g, 0.0) * u;
        case cuda::Activation::sigmoid: return 1 / (1 + std::exp(-g)) * u;
        case cuda::Activation::clamped_swiglu:
            g = std::min(g, 7.0), u = std::clamp(u, -7.0, 7.0);
            return g / (1 + std::exp(-1.702 * g)) * (u + 1);
    }
    return 0;
}

} // namespace quire::testing
