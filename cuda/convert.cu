// Repacks GGUF's blocks into layouts that a warp can read in 16-byte words: int8 with a scale (and a minimum) for each group,
// with exactly the numbers of the file, or fp16. Block layouts: the GGUF format document; drawn in
// modules/model_file/quants/blocks.cppm and lattice_blocks.cppm.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>

#include "kernels.h"
#include "warp.cuh"

namespace quire::cuda {

namespace {

// ggml_type's numbers, as quire.core.tensor's DType has them.
enum : std::uint32_t {
    F32     = 0,
    F16     = 1,
    Q4_0    = 2,
    Q5_0    = 6,
    Q8_0    = 8,
    Q3_K    = 11,
    Q4_K    = 12,
    Q5_K    = 13,
    Q6_K    = 14,
    IQ2_XS  = 17,
    IQ3_XXS = 18,
    IQ4_NL  = 20,
    IQ4_XS  = 23,
    BF16    = 30,
    MXFP4   = 39,
    NVFP4   = 40
};

using Byte = unsigned char;

__device__ float fp16_at(const Byte* p) { return __half2float(__ushort_as_half(std::uint16_t(p[0] | p[1] << 8))); }

__device__ unsigned word_at(const Byte* p) { return p[0] | p[1] << 8 | p[2] << 16 | unsigned(p[3]) << 24; }

// Levels of IQ4 and, doubled, of 4-bit floats (E2M1), four to a word, the first in the lowest byte.
__device__ constexpr unsigned iq4_words[4] = {0xbfad9881, 0xf6eaddcf, 0x26190d01, 0x71594535};
__device__ constexpr unsigned fp4_words[4] = {0x03020100, 0x0c080604, 0xfdfeff00, 0xf4f8fafc};

__device__ int level_of(const unsigned (&words)[4], int i) { // selected, as an array in registers has no address
    const unsigned low = i & 4 ? words[1] : words[0], high = i & 4 ? words[3] : words[2];
    return static_cast<signed char>((i & 8 ? high : low) >> (8 * (i & 3)) & 255);
}

// 8 elements of a lattice: the point's bytes with signs of 7 bits; the eighth makes their number even.
__device__ void signed_point(const std::int8_t* point, int n, unsigned seven, int from, int* q) {
    const unsigned signs = seven | (unsigned(__popc(seven)) & 1) << 7;
    for (int i = 0; i < n; i++) q[i] = signs >> (from + i) & 1 ? -point[i] : point[i];
}

// One group of weights: its q's, scale and minimum. `points`: the lattice of IQ2 and IQ3.
template <std::uint32_t Type>
__device__ void read_group(const Byte* blocks, const std::int8_t* points, std::int64_t g, int* q, float& scale,
                           float& min) {
    min = 0;
    if constexpr (Type == Q8_0) {
        const Byte* b = blocks + g * 34;
        scale         = fp16_at(b);
        for (int i = 0; i < 32; i++) q[i] = static_cast<signed char>(b[2 + i]);
    } else if constexpr (Type == Q4_0) {
        const Byte* b = blocks + g * 18;
        scale         = fp16_at(b);
        for (int i = 0; i < 16; i++) q[i] = (b[2 + i] & 15) - 8, q[i + 16] = (b[2 + i] >> 4) - 8;
    } else if constexpr (Type == Q5_0) {
        const Byte*         b    = blocks + g * 22;
        const std::uint32_t high = b[2] | b[3] << 8 | b[4] << 16 | std::uint32_t(b[5]) << 24;
        scale                    = fp16_at(b);
        for (int i = 0; i < 16; i++) {
            q[i]      = ((b[6 + i] & 15) | ((high >> i & 1) << 4)) - 16;
            q[i + 16] = ((b[6 + i] >> 4) | ((high >> (i + 16) & 1) << 4)) - 16;
        }
    } else if constexpr (Type == Q5_K) { // groups of 32, eight in a superblock of 176 bytes
        const Byte* b = blocks + g / 8 * 176;
        const int   j = int(g % 8);
        int         s, m;
        q4_k_scale(b + 4, j, s, m);
        scale = fp16_at(b) * float(s);
        min   = fp16_at(b + 2) * float(m);
        for (int i = 0; i < 32; i++) {
            const Byte low = b[48 + j / 2 * 32 + i];
            q[i]           = (j % 2 ? low >> 4 : low & 15) | (b[16 + i] >> j & 1) << 4;
        }
    } else if constexpr (Type == Q6_K) { // groups of 16, sixteen in a superblock of 210 bytes
        const Byte* b = blocks + g / 16 * 210;
        const int j = int(g % 16), part = j / 8, quarter = j % 8 / 2, from = j % 2 * 16; // 128 weights in four quarters
        const Byte *low = b + part * 64 + quarter % 2 * 32 + from, *high = b + 128 + part * 32 + from;
        scale = fp16_at(b + 208) * float(static_cast<signed char>(b[192 + j]));
        for (int i = 0; i < 16; i++)
            q[i] = ((quarter < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> (2 * quarter) & 3) << 4) - 32;
    } else if constexpr (Type == Q3_K) { // groups of 16, sixteen in a superblock of 110 bytes
        const Byte* b = blocks + g / 16 * 110;
        const int   j = int(g % 16), part = j / 8, quarter = j % 8 / 2, from = j % 2 * 16;
        const Byte* scales = b + 96;
        const int   s      = (scales[j % 8] >> (j / 8 * 4) & 15) | (scales[8 + j % 4] >> (j / 4 * 2) & 3) << 4;
        scale              = fp16_at(b + 108) * float(s - 32);
        for (int i = 0; i < 16; i++)
            q[i] =
                (b[32 + part * 32 + from + i] >> (2 * quarter) & 3) - (b[from + i] >> (4 * part + quarter) & 1 ? 0 : 4);
    } else if constexpr (Type == IQ4_NL) {
        const Byte* b = blocks + g * 18;
        scale         = fp16_at(b);
        for (int i = 0; i < 16; i++)
            q[i] = level_of(iq4_words, b[2 + i] & 15), q[i + 16] = level_of(iq4_words, b[2 + i] >> 4);
    } else if constexpr (Type == IQ4_XS) { // groups of 16: halves of the eight 32 in a superblock of 136 bytes
        const Byte* b = blocks + g / 16 * 136;
        const int   j = int(g % 16) / 2, shift = int(g % 2) * 4;
        const int   s = (b[4 + j / 2] >> (j % 2 * 4) & 15) | ((b[2] | b[3] << 8) >> (2 * j) & 3) << 4;
        scale         = fp16_at(b) * float(s - 32);
        for (int i = 0; i < 16; i++) q[i] = level_of(iq4_words, b[8 + 16 * j + i] >> shift & 15);
    } else if constexpr (Type == MXFP4) { // groups of 16: halves of a block
        const Byte* b     = blocks + g / 2 * 17;
        const int   shift = int(g % 2) * 4;
        scale             = __uint_as_float(b[0] < 2 ? 0x00200000u << b[0] : (b[0] - 1u) << 23);
        for (int i = 0; i < 16; i++) q[i] = level_of(fp4_words, b[1 + i] >> shift & 15);
    } else if constexpr (Type == NVFP4) { // groups of 16, four in a block of 36 bytes
        const Byte*    b        = blocks + g / 4 * 36;
        const int      j        = int(g % 4);
        const unsigned exponent = b[j] >> 3 & 15, mantissa = b[j] & 7;
        scale = b[j] == 0x7f    ? 0.0f
                : exponent == 0 ? float(mantissa) * 0x1p-10f
                                : __uint_as_float((exponent + 119) << 23 | mantissa << 20);
        for (int i = 0; i < 8; i++) {
            q[i]     = level_of(fp4_words, b[4 + 8 * j + i] & 15);
            q[i + 8] = level_of(fp4_words, b[4 + 8 * j + i] >> 4);
        }
    } else if constexpr (Type == IQ3_XXS) { // groups of 16: halves of the eight 32 in a superblock of 98 bytes
        const Byte*    b = blocks + g / 16 * 98;
        const int      j = int(g % 16) / 2, half = int(g % 2);
        const unsigned rest = word_at(b + 66 + 4 * j);
        scale               = fp16_at(b) * (0.5f + float(rest >> 28)) * 0.5f;
        for (int i = 0; i < 4; i++)
            signed_point(points + 4 * b[2 + 8 * j + 4 * half + i], 4, rest >> (14 * half + i / 2 * 7) & 127, i % 2 * 4,
                         q + 4 * i);
    } else if constexpr (Type == IQ2_XS) { // groups of 16, sixteen in a superblock of 74 bytes
        const Byte* b = blocks + g / 16 * 74;
        const int   j = int(g % 16);
        scale         = fp16_at(b) * (0.5f + float(b[66 + j / 2] >> (j % 2 * 4) & 15)) * 0.25f;
        for (int i = 0; i < 2; i++) {
            const unsigned both = b[2 + 4 * j + 2 * i] | b[3 + 4 * j + 2 * i] << 8;
            signed_point(points + 8 * (both & 511), 8, both >> 9, 0, q + 8 * i);
        }
    }
}

template <std::uint32_t Type, int Group, bool FloatScales>
__global__ void to_i8_kernel(const Byte* blocks, const std::int8_t* points, std::int8_t* out, void* scales, float* mins,
                             std::int64_t n_groups) {
    const std::int64_t g = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (g >= n_groups) return;
    int   q[Group];
    float scale, min;
    read_group<Type>(blocks, points, g, q, scale, min);
    for (int i = 0; i < Group; i++) out[g * Group + i] = std::int8_t(q[i]);
    if (FloatScales) static_cast<float*>(scales)[g] = scale;
    else static_cast<__half*>(scales)[g] = __float2half(scale);
    if (mins) mins[g] = min;
}

__global__ void to_f16_kernel(std::uint32_t type, const void* in, __half* out, std::int64_t n) {
    const std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float v = type == F32    ? static_cast<const float*>(in)[i]
                    : type == BF16 ? __uint_as_float(std::uint32_t(static_cast<const std::uint16_t*>(in)[i]) << 16)
                                   : __half2float(static_cast<const __half*>(in)[i]);
    out[i]        = __float2half(fminf(fmaxf(v, -65504.0f), 65504.0f));
}

// 8 weights a thread.
__global__ void dequantize_kernel(Weight w, __half* out, std::int64_t n) {
    const std::int64_t i = (std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
    if (i >= n) return;
    __half v[8];
    if (w.form == WeightForm::i8) {
        const std::int64_t g     = i / w.group;
        const float        scale = w.float_scales ? static_cast<const float*>(w.scales)[g]
                                                  : __half2float(static_cast<const __half*>(w.scales)[g]);
        const float        min   = w.mins ? static_cast<const float*>(w.mins)[g] : 0.0f;
        const char4*       q     = reinterpret_cast<const char4*>(static_cast<const std::int8_t*>(w.data) + i);
        const char4        a = q[0], b = q[1];
        const float        f[8] = {float(a.x), float(a.y), float(a.z), float(a.w),
                                   float(b.x), float(b.y), float(b.z), float(b.w)};
        for (int k = 0; k < 8; k++) v[k] = __float2half(scale * f[k] - min);
    } else { // q4_k
        const Byte* block = static_cast<const Byte*>(w.data) + i / 256 * 144;
        const int   in = int(i % 256), chunk = in / 64, j = in / 32;
        int         s, m;
        q4_k_scale(block + 4, j, s, m);
        const float d = fp16_at(block) * float(s), min = fp16_at(block + 2) * float(m);
        for (int k = 0; k < 8; k++) {
            const Byte byte = block[16 + chunk * 32 + in % 32 + k];
            v[k]            = __float2half(d * float(j % 2 ? byte >> 4 : byte & 15) - min);
        }
    }
    *reinterpret_cast<uint4*>(out + i) = *reinterpret_cast<const uint4*>(v);
}

// The largest absolute scale, as the bits of a float; of Q4_K that of a superblock with the largest of 6 bits.
__global__ void largest_scale_kernel(Weight w, std::int64_t n, unsigned* largest) {
    float most = 0;
    for (std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n;
         i += std::int64_t(gridDim.x) * blockDim.x) {
        const float scale = w.form == WeightForm::q4_k ? 63 * fp16_at(static_cast<const Byte*>(w.data) + i * 144)
                            : w.float_scales           ? static_cast<const float*>(w.scales)[i]
                                                       : __half2float(static_cast<const __half*>(w.scales)[i]);
        most              = fmaxf(most, fabsf(scale));
    }
    most = warp_max(most);
    if (threadIdx.x % 32 == 0) atomicMax(largest, __float_as_uint(most));
}

template <std::uint32_t Type, int Group, bool FloatScales>
void run_i8(const void* blocks, const std::int8_t* points, std::int8_t* q, void* scales, float* mins, std::int64_t n,
            Context& gpu) {
    const std::int64_t groups = n / Group;
    run_in_order(to_i8_kernel<Type, Group, FloatScales>, dim3(unsigned((groups + 127) / 128)), 128, 0, gpu,
                 static_cast<const Byte*>(blocks), points, q, scales, mins, groups);
}

} // namespace

bool convertible(std::uint32_t type) {
    for (std::uint32_t t :
         {F32, F16, BF16, Q4_0, Q5_0, Q8_0, Q3_K, Q4_K, Q5_K, Q6_K, IQ2_XS, IQ3_XXS, IQ4_NL, IQ4_XS, MXFP4, NVFP4})
        if (t == type) return true;
    return false;
}

void i8_layout(std::uint32_t type, int& group, bool& float_scales, bool& has_mins) {
    const bool half = type == Q4_0 || type == Q5_0 || type == Q8_0 || type == IQ4_NL; // their scale is an fp16
    group           = half || type == Q5_K ? 32 : 16;
    float_scales    = !half; // two scales multiplied, or a power of two: fp16 does not hold that exactly
    has_mins        = type == Q5_K;
}

void to_f16(std::uint32_t type, const void* blocks, Half* out, std::int64_t n, Context& gpu) {
    run_in_order(to_f16_kernel, dim3(unsigned((n + 255) / 256)), 256, 0, gpu, type, blocks,
                 reinterpret_cast<__half*>(out), n);
}

void to_i8(std::uint32_t type, const void* blocks, const std::int8_t* points, std::int8_t* q, void* scales, float* mins,
           std::int64_t n, Context& gpu) {
    switch (type) {
#define TO_I8(T, group, float_scales) \
    case T: return run_i8<T, group, float_scales>(blocks, points, q, scales, mins, n, gpu);
        TO_I8(Q8_0, 32, false)
        TO_I8(Q4_0, 32, false)
        TO_I8(Q5_0, 32, false)
        TO_I8(IQ4_NL, 32, false)
        TO_I8(Q5_K, 32, true)
        TO_I8(Q3_K, 16, true)
        TO_I8(Q6_K, 16, true)
        TO_I8(IQ4_XS, 16, true)
        TO_I8(MXFP4, 16, true)
        TO_I8(NVFP4, 16, true)
        TO_I8(IQ3_XXS, 16, true)
        TO_I8(IQ2_XS, 16, true)
#undef TO_I8
    }
}

int scale_exponent_of(const Weight& weight, Context& gpu) {
    const std::int64_t n = weight.rows * weight.cols / (weight.form == WeightForm::q4_k ? 256 : weight.group);
    gpu.note(cudaMemsetAsync(gpu.next_tile, 0, sizeof(unsigned), gpu.stream));
    run_in_order(largest_scale_kernel, dim3(unsigned(gpu.n_sms)), 256, 0, gpu, weight, n, gpu.next_tile);
    float largest = 0;
    gpu.note(cudaMemcpyAsync(&largest, gpu.next_tile, sizeof(float), cudaMemcpyDeviceToHost, gpu.stream));
    gpu.note(cudaMemsetAsync(gpu.next_tile, 0, sizeof(unsigned), gpu.stream));
    gpu.note(cudaStreamSynchronize(gpu.stream));
    int exponent = 0;
    if (std::isfinite(largest) && largest > 0) std::frexp(largest, &exponent);
    return exponent;
}

void dequantize(const Weight& weight, Half* out, Context& gpu) {
    const std::int64_t n = weight.rows * weight.cols;
    run_in_order(dequantize_kernel, dim3(unsigned((n / 8 + 255) / 256)), 256, 0, gpu, weight,
                 reinterpret_cast<__half*>(out), n);
}

} // namespace quire::cuda
