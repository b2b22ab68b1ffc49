// The common parts of the tests of kernels: a GPU context, vectors in its memory, random values. To be included last, below the imports.
#pragma once

#include "../cuda/kernels.h"

import quire.core.std;

namespace quire::testing {

bool no_gpu();

// A context of a test's own.
struct Gpu {
    Gpu();
    Gpu(const Gpu&)            = delete;
    Gpu& operator=(const Gpu&) = delete;
    ~Gpu();
    operator cuda::Context&() const { return *context; }
    cuda::Context* context;
};

// Waits for the kernels, which have to succeed.
void require_done(cuda::Context& gpu);

// A vector in device memory; outputs begin as NaN, so that what was not written shows.
template <class T>
struct OnDevice {
    OnDevice(cuda::Context& gpu, const std::vector<T>& values)
        : n(values.size()), data(static_cast<T*>(cuda::allocate(gpu, n * sizeof(T)))) {
        cuda::upload(data, values.data(), n * sizeof(T), gpu);
    }
    OnDevice(const OnDevice&)            = delete;
    OnDevice& operator=(const OnDevice&) = delete;
    ~OnDevice() { cuda::release(data); }
    std::vector<T> back(cuda::Context& gpu) const {
        std::vector<T> out(n);
        cuda::copy_to_host(out.data(), data, n * sizeof(T), gpu);
        require_done(gpu);
        return out;
    }
    std::size_t n;
    T*          data;
};

inline constexpr std::uint16_t fp16_nan = 0x7e00;

std::vector<std::uint16_t> random_fp16(std::size_t n, std::mt19937& random, float scale = 1);

// The slots of a step for K, and behind them other ones for V: those of K in reverse order.
std::vector<std::int32_t> with_v_slots(std::vector<std::int32_t> slots);

double relative_error(const std::vector<float>& got, const std::vector<double>& want);

std::vector<float> floats_of(const std::vector<std::uint16_t>& fp16);

inline constexpr cuda::Activation activations[] = {cuda::Activation::silu, cuda::Activation::gelu_tanh,
                                                   cuda::Activation::gelu_erf, cuda::Activation::relu,
                                                   cuda::Activation::clamped_swiglu};

// activation(g) · u, in double precision.
double activated(cuda::Activation activation, double g, double u);

} // namespace quire::testing
