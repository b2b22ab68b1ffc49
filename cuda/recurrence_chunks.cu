// The recurrence of a prompt in chunks of 64 tokens, on tensor cores (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta
// Rule over Sequence Length"; Dao and Gu 2024, section 6). Of a chunk, with the state S before it, keys K, queries Q, values V, and the decay
// G(i) from the chunk's beginning to token i:
//   R = β·(V - G·K·S)      U = T·R      out = G·Q·S + P·U      S = G(63)·S + (G(63) / G·K)ᵀ·U
//   T = (1 + A)⁻¹,  A(i, j) = β(i)·G(i) / G(j)·K(i)·K(j) for j < i,   P(i, j) = G(i) / G(j)·Q(i)·K(j) for j <= i
// A selective scan has U = Δ·V. T and P do not depend on S: a first kernel makes them for all chunks at once. A second one goes through the
// chunks of a sequence, a CTA for 32 columns of a head, with S in registers in float32. Operands of products are fp16.
//
// Sequences with few tokens in the step are left to recurrence.cu. The sums depend on where a prompt was cut into steps.
//
// Bytes: for each token, group and head some 4 · key_dim and 2 · 128, written once and read for each 32 columns, mostly from the L2.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "epilogue.cuh"
#include "kernels.h"
#include "ptx/cp_async.cuh"
#include "ptx/mma.cuh"
#include "recurrence.cuh"
#include "warp.cuh"

namespace quire::cuda {

namespace {

constexpr int chunk = 64, warps = 4, columns_of_cta = 32, matrix_pitch = chunk + 8, value_pitch = columns_of_cta + 8;

// The first kernel leaves for the second, of each chunk: keys and queries [groups][2][64][Keys], T and P [heads][2][64][64], the factors
// [heads][4][64].
enum Factor {
    decayed,
    strength,
    rest,
    row_scale,
    n_factors
}; // G(i); β or Δ; G(63) / G(i); what P's row was divided by
struct Workspace {
    unsigned char* memory;
    std::int64_t   slot_bytes, keys_bytes, matrices_bytes;

    __host__ __device__ Workspace(void* room, int n_heads, int n_groups, int keys)
        : memory(static_cast<unsigned char*>(room)), keys_bytes(std::int64_t(n_groups) * 2 * chunk * keys * 2),
          matrices_bytes(std::int64_t(n_heads) * 2 * chunk * chunk * 2) {
        slot_bytes = keys_bytes + matrices_bytes + std::int64_t(n_heads) * n_factors * chunk * 4;
    }
    __device__ __half* keys(int slot, int group, int keys) const {
        return reinterpret_cast<__half*>(memory + slot * slot_bytes) + std::int64_t(group) * 2 * chunk * keys;
    }
    __device__ __half* matrices(int slot, int head) const {
        return reinterpret_cast<__half*>(memory + slot * slot_bytes + keys_bytes) +
               std::int64_t(head) * 2 * chunk * chunk;
    }
    __device__ float* factors(int slot, int head) const {
        return reinterpret_cast<float*>(memory + slot * slot_bytes + keys_bytes + matrices_bytes) +
               std::int64_t(head) * n_factors * chunk;
    }
};

// Sequences of at least 32 tokens: none shares a slot with the next.
static_assert(least_chunked == chunk / 2);
__device__ int slot_of(const Run& run, int c) { return int(run.first / least_chunked) + c; }

// 1, or the power of two by which numbers up to `most` are divided to fit into fp16 with room to spare.
__device__ float power_of_two_above(float most) {
    constexpr float room = 16384;
    return most <= room || !isfinite(most) ? 1.0f : exp2f(ceilf(log2f(most / room)));
}
// 1 / the length of a vector, by the sum of its squares.
__device__ float inverse_length(float squares) { return 1 / sqrtf(squares + 1e-6f); }

// Fragments of matrices in shared memory, rows `pitch` apart. 16 rows and columns of the left operand, also of a transposed one; 16 rows
// and columns of the right one, likewise: words 0 and 1 are of the first 8 columns.
__device__ void load_left(std::uint32_t (&a)[4], const __half* m, int pitch, int row, int col) {
    const int lane = int(threadIdx.x) % 32;
    ldmatrix_x4(a, m + (row + lane % 16) * pitch + col + lane / 16 * 8);
}
__device__ void load_left_transposed(std::uint32_t (&a)[4], const __half* m, int pitch, int row, int col) {
    const int lane = int(threadIdx.x) % 32;
    ldmatrix_x4_transposed(a, m + (col + lane % 8 + lane / 16 * 8) * pitch + row + lane / 8 % 2 * 8);
}
__device__ void load_right(std::uint32_t (&b)[4], const __half* m, int pitch, int row, int col) {
    const int lane = int(threadIdx.x) % 32;
    ldmatrix_x4_transposed(b, m + (row + lane % 16) * pitch + col + lane / 16 * 8);
}
__device__ void load_right_transposed(std::uint32_t (&b)[4], const __half* m, int pitch, int row, int col) {
    const int lane = int(threadIdx.x) % 32;
    ldmatrix_x4(b, m + (col + lane % 8 + lane / 16 * 8) * pitch + row + lane / 8 % 2 * 8);
}

// -- the first kernel: a CTA for a chunk and a head

template <int Keys>
struct Prepared {
    static constexpr int pitch = Keys + 8;
    union {
        struct {
            __half keys[chunk * pitch], queries[chunk * pitch];
        };
        float inverse[chunk * matrix_pitch]; // T, when K and Q are used
    };
    float lower[chunk * matrix_pitch], product[3 * 16 * 16]; // A; of blocks of A and T
    float exponent[chunk], strength[chunk];                  // exponent: log G(i)
};

// Blocks of 16 rows and columns of T that are `Distance` below the diagonal: T(a, b) = -T(a, a) · sum of A(a, c)·T(c, b) for b <= c < a.
template <int Distance>
__device__ void invert_blocks(const float* lower, float* inverse, float* product) {
    constexpr int threads_of_block = 32 << (Distance - 1), rows = 256 / threads_of_block; // of a thread
    const int     b = int(threadIdx.x) / threads_of_block, a = b + Distance, col = int(threadIdx.x) % 16,
              first  = int(threadIdx.x) % threads_of_block / 16 * rows;
    const bool works = b < 4 - Distance;
    if (works) {
        float sum[rows] = {};
        for (int k = 0; k < Distance * 16; k++) {
            const float t = inverse[(b * 16 + k) * matrix_pitch + b * 16 + col];
#pragma unroll
            for (int r = 0; r < rows; r++)
                sum[r] = fmaf(lower[(a * 16 + first + r) * matrix_pitch + b * 16 + k], t, sum[r]);
        }
#pragma unroll
        for (int r = 0; r < rows; r++) product[b * 256 + (first + r) * 16 + col] = sum[r];
    }
    __syncthreads();
    if (works) {
        float sum[rows] = {};
        for (int k = 0; k < 16; k++) {
            const float t = product[b * 256 + k * 16 + col];
#pragma unroll
            for (int r = 0; r < rows; r++)
                sum[r] = fmaf(inverse[(a * 16 + first + r) * matrix_pitch + a * 16 + k], t, sum[r]);
        }
#pragma unroll
        for (int r = 0; r < rows; r++) inverse[(a * 16 + first + r) * matrix_pitch + b * 16 + col] = -sum[r];
    }
    __syncthreads();
}

// T of A, both in shared memory; blocks above the diagonal are not written.
__device__ void invert(const float* lower, float* inverse, float* product) {
    if (threadIdx.x < chunk) { // a column of a block on the diagonal
        const int at = int(threadIdx.x) / 16 * 16 * (matrix_pitch + 1), col = int(threadIdx.x) % 16;
        float     t[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            t[i] = i == col ? 1.0f : 0.0f;
#pragma unroll
            for (int k = 0; k < i; k++) t[i] = fmaf(-lower[at + i * matrix_pitch + k], t[k], t[i]);
            inverse[at + i * matrix_pitch + col] = t[i];
        }
    }
    __syncthreads();
    invert_blocks<1>(lower, inverse, product);
    invert_blocks<2>(lower, inverse, product);
    invert_blocks<3>(lower, inverse, product);
}

template <int Keys, bool Delta>
__global__ void __launch_bounds__(warps * 32) prepare_chunks_kernel(Recurrence a, States states) {
    extern __shared__ __align__(16) unsigned char memory[];
    wait_for_inputs();
    auto&         s     = *reinterpret_cast<Prepared<Keys>*>(memory);
    constexpr int pitch = Prepared<Keys>::pitch, per_lane = Keys / 32;
    const Run     run   = run_of(states, int(blockIdx.z));
    const int     begin = int(blockIdx.x) * chunk, n = min(chunk, run.n - begin);
    if (run.n < least_chunked || n <= 0) return;
    const int       lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, h = int(blockIdx.y);
    const Columns   of(a, h, Delta);
    const Workspace work(a.chunks, a.n_heads, a.n_groups, Keys);
    const int       slot = slot_of(run, int(blockIdx.x));

    // Keys and queries. Rows behind the last token are zeros, and change nothing.
    constexpr int at_once = 4;
    for (int first = warp * at_once; first < chunk; first += warps * at_once) {
        __half k[at_once][per_lane], q[at_once][per_lane];
#pragma unroll
        for (int r = 0; r < at_once; r++) {
            const auto* x =
                reinterpret_cast<const __half*>(a.x) + (run.first + begin + min(first + r, n - 1)) * of.columns;
#pragma unroll
            for (int j = 0; j < per_lane; j++) {
                const int c = min(lane + 32 * j, a.key_dim - 1);
                k[r][j] = x[of.k + c], q[r][j] = x[of.q + c];
            }
        }
#pragma unroll
        for (int r = 0; r < at_once; r++) {
            const int t  = first + r;
            float     kk = 0, qq = 0, k_scale = 1, q_scale = 1;
            float     ks[per_lane], qs[per_lane];
#pragma unroll
            for (int j = 0; j < per_lane; j++) {
                const bool valid = t < n && lane + 32 * j < a.key_dim;
                ks[j] = valid ? __half2float(k[r][j]) : 0.0f, qs[j] = valid ? __half2float(q[r][j]) : 0.0f;
                kk += ks[j] * ks[j], qq += qs[j] * qs[j];
            }
            if (Delta)
                k_scale = inverse_length(warp_sum(kk)),
                q_scale = inverse_length(warp_sum(qq)) * rsqrtf(float(a.key_dim));
#pragma unroll
            for (int j = 0; j < per_lane; j++) {
                const int c              = lane + 32 * j;
                s.keys[t * pitch + c]    = to_finite(ks[j] * k_scale);
                s.queries[t * pitch + c] = to_finite(qs[j] * q_scale);
            }
        }
    }
    // The exponents of the decays, added up from the chunk's beginning.
    if (threadIdx.x < chunk) {
        const int   t    = int(threadIdx.x);
        const auto* row  = a.step + (run.first + begin + min(t, n - 1)) * of.step_columns;
        const float size = t < n ? softplus(row[of.step] + a.step_bias[h]) : 0.0f;
        // A factor below e^-40 forgets all that was before. A sum of larger numbers would lose the digits of small ones.
        float sum = max_or_nan(a.decay[h] * size, -40.0f);
#pragma unroll
        for (int step = 1; step < 32; step *= 2)
            if (const float before = __shfl_up_sync(~0u, sum, unsigned(step)); lane >= step) sum += before;
        s.exponent[t]      = sum;
        const auto* writes = of.writes + (run.first + begin + min(t, n - 1)) * of.step_columns;
        s.strength[t]      = !Delta ? size : t < n ? 1 / (1 + expf(-writes[of.write])) : 0.0f;
    }
    __syncthreads();
    if (warp == 1) s.exponent[threadIdx.x] += s.exponent[31];
    __syncthreads();

    const bool first_of_group = a.grouped ? h % (a.n_heads / a.n_groups) == 0 : h < a.n_groups;
    if (first_of_group) {
        __half* const to = work.keys(slot, of.group, Keys);
        for (int i = int(threadIdx.x); i < 2 * chunk * Keys / 8; i += warps * 32) {
            const int row = i / (Keys / 8), col = i % (Keys / 8) * 8;
            *reinterpret_cast<uint4*>(to + row * Keys + col) =
                *reinterpret_cast<const uint4*>((row < chunk ? s.keys : s.queries) + row % chunk * pitch + col);
        }
    }
    float* const factors = work.factors(slot, h);
    if (threadIdx.x < chunk) {
        const int t                   = int(threadIdx.x);
        factors[decayed * chunk + t]  = expf(s.exponent[t]);
        factors[strength * chunk + t] = s.strength[t];
        factors[rest * chunk + t]     = expf(s.exponent[chunk - 1] - s.exponent[t]);
    }

    // A warp has 16 rows of both products, and the columns up to the diagonal.
    float by_keys[8][4] = {}, by_queries[8][4] = {};
#pragma unroll
    for (int step = 0; step < Keys / 16; step++) {
        std::uint32_t k[4], q[4], b[4];
        if (Delta) load_left(k, s.keys, pitch, warp * 16, step * 16);
        load_left(q, s.queries, pitch, warp * 16, step * 16);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j > warp) break;
            load_right_transposed(b, s.keys, pitch, step * 16, j * 16);
            if (Delta) mma_m16n8k16(by_keys[2 * j], k, b[0], b[1]), mma_m16n8k16(by_keys[2 * j + 1], k, b[2], b[3]);
            mma_m16n8k16(by_queries[2 * j], q, b[0], b[1]), mma_m16n8k16(by_queries[2 * j + 1], q, b[2], b[3]);
        }
    }
    float most[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int   row = warp * 16 + lane / 4 + i / 2 * 8, col = j * 8 + lane % 4 * 2 + i % 2;
            const float decay = col <= row ? expf(s.exponent[row] - s.exponent[col]) : 0.0f;
            by_queries[j][i]  = col <= row ? by_queries[j][i] * decay : 0.0f;
            most[i / 2]       = max_or_nan(most[i / 2], fabsf(by_queries[j][i]));
            if (Delta) s.lower[row * matrix_pitch + col] = col < row ? by_keys[j][i] * decay * s.strength[row] : 0.0f;
        }
    // A row of P with numbers that are too large for fp16 is divided by a power of two.
    __half* const matrices = work.matrices(slot, h);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float largest     = max_or_nan(most[half], __shfl_xor_sync(~0u, most[half], 1));
        largest           = max_or_nan(largest, __shfl_xor_sync(~0u, largest, 2));
        const float scale = power_of_two_above(largest);
        const int   row   = warp * 16 + lane / 4 + half * 8;
        if (lane % 4 == 0) factors[row_scale * chunk + row] = scale;
#pragma unroll
        for (int j = 0; j < 8; j++)
            *reinterpret_cast<std::uint32_t*>(matrices + chunk * chunk + row * chunk + j * 8 + lane % 4 * 2) =
                pack_finite(by_queries[j][2 * half] / scale, by_queries[j][2 * half + 1] / scale);
    }
    if (!Delta) return;
    __syncthreads(); // K and Q are used
    invert(s.lower, s.inverse, s.product);
    for (int i = int(threadIdx.x); i < chunk * chunk / 8; i += warps * 32) {
        const int    row = i / 8, col = i % 8 * 8;
        const float* from    = s.inverse + row * matrix_pitch + col;
        const bool   is_zero = col / 16 > row / 16;
        uint4        words{};
        if (!is_zero)
            words = {pack_finite(from[0], from[1]), pack_finite(from[2], from[3]), pack_finite(from[4], from[5]),
                     pack_finite(from[6], from[7])};
        *reinterpret_cast<uint4*>(matrices + row * chunk + col) = words;
    }
}

// -- the second kernel: a CTA for 32 columns of a head in a sequence. A warp has 16 of a chunk's tokens, and a quarter of S's rows.

template <int Keys>
struct Chunk {
    static constexpr int pitch = Keys + 8;
    __half               keys[2][chunk * pitch], queries[chunk * pitch];
    __half               inverse[chunk * matrix_pitch], product[chunk * matrix_pitch]; // T and P
    __half               state[Keys * value_pitch];                                    // S in fp16
    __half               values[chunk * value_pitch];                                  // R
    __half               written[chunk * value_pitch], decayed[chunk * value_pitch];   // U, and U · G(63) / G
    float                factors[2][n_factors * chunk];
    float                most[warps];
};

// d += a warp's 16 rows of a lower triangular matrix [64][64] times `right` [64][32].
__device__ void multiply_lower(const __half* lower, const __half* right, float (&d)[4][4]) {
    const int warp = int(threadIdx.x) / 32;
#pragma unroll
    for (int step = 0; step < chunk / 16; step++) {
        if (step > warp) break; // above the diagonal
        std::uint32_t a[4], b[4];
        load_left(a, lower, matrix_pitch, warp * 16, step * 16);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            load_right(b, right, value_pitch, step * 16, j * 16);
            mma_m16n8k16(d[2 * j], a, b[0], b[1]), mma_m16n8k16(d[2 * j + 1], a, b[2], b[3]);
        }
    }
}

// 64 rows of Bytes bytes each; by all threads.
template <int Bytes>
__device__ void copy_rows(__half* to, int pitch, const __half* from) {
    constexpr int pieces = Bytes / 16, step = warps * 32 / pieces;
    const int     row = int(threadIdx.x) / pieces, col = int(threadIdx.x) % pieces * 8;
    to += row * pitch + col, from += row * (Bytes / 2) + col;
#pragma unroll
    for (int r = 0; r < chunk; r += step) cp_async(to + r * pitch, from + r * (Bytes / 2));
}

template <int Keys, bool Delta>
__global__ void __launch_bounds__(warps * 32, 2) run_chunks_kernel(Recurrence a, States states) {
    extern __shared__ __align__(16) unsigned char memory[];
    wait_for_inputs();
    auto&         s     = *reinterpret_cast<Chunk<Keys>*>(memory);
    constexpr int pitch = Chunk<Keys>::pitch, tiles = Keys / 64; // of 16 rows of S, of a warp
    const Run     run = run_of(states, int(blockIdx.z));
    if (run.n < least_chunked) return;
    const int       lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, h = int(blockIdx.y);
    const int       N = a.key_dim, d = a.value_dim, first_column = int(blockIdx.x) * columns_of_cta;
    const Columns   of(a, h, Delta);
    const Workspace work(a.chunks, a.n_heads, a.n_groups, Keys);
    const float     skip = a.skip ? a.skip[h] : 0.0f;
    const int       quad = lane % 4 * 2; // the first of this lane's two columns in a tile of 8

    // S: rows warp · Keys / 4 + 16 · tile + lane / 4 (+ 8), columns 8 · j + quad (+ 1).
    // body(tile, column tile, i, place, whether S has it): without branches, so that many loads are in flight.
    const auto each = [&](const std::int32_t* unit, const auto& body) {
        const HeadMatrix matrix(states, unit, a.state_at + std::int64_t(h) * N * d, N * d);
        const auto       all = [&](const auto& place) {
#pragma unroll
            for (int tile = 0; tile < tiles; tile++)
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int row = warp * (Keys / 4) + tile * 16 + lane / 4 + i / 2 * 8,
                                  col = first_column + j * 8 + quad + i % 2;
                        body(tile, j, i, place(min(row, N - 1) * d + min(col, d - 1)), row < N && col < d);
                    }
        };
        if (matrix.in_two_blocks) all([&](int at) { return matrix.near(at); });
        else all([&](int at) { return matrix.any(at); });
    };
    float S[tiles][4][4] = {};
    if (run.from)
        each(run.from, [&](int tile, int j, int i, const float* at, bool valid) {
            const float v = *at;
            S[tile][j][i] = valid ? v : 0.0f;
        });
    // Puts S into shared memory in fp16, divided by the power of two that is returned.
    const auto put_state = [&] {
        float scale = 1;
        if (!Delta) { // keys of length 1 and strengths below 1 keep S near the values
            float most = 0;
#pragma unroll
            for (int tile = 0; tile < tiles; tile++)
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) most = fmaxf(most, fabsf(S[tile][j][i]));
            most = warp_max(most);
            if (lane == 0) s.most[warp] = most;
            __syncthreads();
            scale = power_of_two_above(fmaxf(fmaxf(s.most[0], s.most[1]), fmaxf(s.most[2], s.most[3])));
        }
#pragma unroll
        for (int tile = 0; tile < tiles; tile++)
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int row = warp * (Keys / 4) + tile * 16 + lane / 4 + half * 8;
                    *reinterpret_cast<std::uint32_t*>(s.state + row * value_pitch + j * 8 + quad) =
                        pack_finite(S[tile][j][2 * half] / scale, S[tile][j][2 * half + 1] / scale);
                }
        return scale;
    };
    const int  n_chunks  = (run.n + chunk - 1) / chunk;
    const auto load_keys = [&](int c) {
        if (c < n_chunks) {
            const __half* const from = work.keys(slot_of(run, c), of.group, Keys);
            copy_rows<Keys * 2>(s.keys[c % 2], pitch, from);
            copy_rows<Keys * 2>(s.queries, pitch, from + chunk * Keys);
            if (threadIdx.x < n_factors * chunk / 4)
                cp_async(s.factors[c % 2] + threadIdx.x * 4, work.factors(slot_of(run, c), h) + threadIdx.x * 4);
        }
        cp_async_commit();
    };
    const auto load_inverse = [&](int c) {
        if (Delta && c < n_chunks) copy_rows<chunk * 2>(s.inverse, matrix_pitch, work.matrices(slot_of(run, c), h));
        cp_async_commit();
    };
    const auto load_product = [&](int c) {
        if (c < n_chunks)
            copy_rows<chunk * 2>(s.product, matrix_pitch, work.matrices(slot_of(run, c), h) + chunk * chunk);
        cp_async_commit();
    };
    // V of this lane's places in a chunk: [tile of 8 columns][two rows][two columns], fp16. Places behind the last token or column have other
    // numbers, which change nothing: their strength is 0, or their results are not stored.
    std::uint32_t value[4][2];
    const bool    in_pairs    = of.columns % 2 == 0 && of.v % 2 == 0 && d % 2 == 0;
    const auto    load_values = [&](int c) {
        const __half* rows[2];
#pragma unroll
        for (int half = 0; half < 2; half++)
            rows[half] = reinterpret_cast<const __half*>(a.x) + of.v +
                         (run.first + min(c * chunk + warp * 16 + lane / 4 + half * 8, run.n - 1)) * of.columns;
        if (in_pairs) {
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    value[j][half] =
                        *reinterpret_cast<const std::uint32_t*>(rows[half] + min(first_column + j * 8 + quad, d - 2));
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int col  = first_column + j * 8 + quad;
                    value[j][half] = std::uint32_t(__half_as_ushort(rows[half][min(col, d - 1)])) |
                                     std::uint32_t(__half_as_ushort(rows[half][min(col + 1, d - 1)])) << 16;
                }
        }
    };
    const auto value_at = [&](int j, int i) {
        const float2 two = as_float2(value[j][i / 2]);
        return i % 2 == 0 ? two.x : two.y;
    };
    load_keys(0), load_inverse(0), load_product(0), load_values(0);
    float scale = put_state();
    for (int c = 0; c < n_chunks; c++) {
        cp_async_wait<1>(); // all but P
        __syncthreads();
        const __half* const keys          = s.keys[c % 2];
        const float* const  factors       = s.factors[c % 2];
        float               by_keys[4][4] = {}, out[4][4] = {};
#pragma unroll
        for (int step = 0; step < Keys / 16; step++) {
            std::uint32_t k[4], q[4], b[4];
            if (Delta) load_left(k, keys, pitch, warp * 16, step * 16);
            load_left(q, s.queries, pitch, warp * 16, step * 16);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                load_right(b, s.state, value_pitch, step * 16, j * 16);
                if (Delta) mma_m16n8k16(by_keys[2 * j], k, b[0], b[1]), mma_m16n8k16(by_keys[2 * j + 1], k, b[2], b[3]);
                mma_m16n8k16(out[2 * j], q, b[0], b[1]), mma_m16n8k16(out[2 * j + 1], q, b[2], b[3]);
            }
        }
        const int   row  = warp * 16 + lane / 4;
        const float last = factors[decayed * chunk + chunk - 1];
        float       g[2], tail[2], write[2], product_scale[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            g[half]             = factors[decayed * chunk + row + half * 8] * scale;
            write[half]         = factors[strength * chunk + row + half * 8];
            tail[half]          = factors[rest * chunk + row + half * 8];
            product_scale[half] = factors[row_scale * chunk + row + half * 8];
        }
        float written[4][4] = {};
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                out[j][i] *= g[i / 2];
                written[j][i] = write[i / 2] * (Delta ? value_at(j, i) - g[i / 2] * by_keys[j][i] : value_at(j, i));
            }
        if (Delta) {
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    *reinterpret_cast<std::uint32_t*>(s.values + (row + half * 8) * value_pitch + j * 8 + quad) =
                        pack_finite(written[j][2 * half], written[j][2 * half + 1]);
                    written[j][2 * half] = written[j][2 * half + 1] = 0;
                }
            __syncthreads(); // R is complete; Q and S in fp16 are used
            load_keys(c + 1);
            multiply_lower(s.inverse, s.values, written);
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float one = written[j][2 * half], other = written[j][2 * half + 1];
                const int   at                                    = (row + half * 8) * value_pitch + j * 8 + quad;
                *reinterpret_cast<std::uint32_t*>(s.written + at) = pack_finite(one, other);
                *reinterpret_cast<std::uint32_t*>(s.decayed + at) = pack_finite(one * tail[half], other * tail[half]);
            }
        if (Delta) cp_async_wait<1>(); // all but the next chunk's keys
        else cp_async_wait<0>();
        __syncthreads(); // U and P are there; T is used
        if (!Delta) load_keys(c + 1);
        load_inverse(c + 1);
        float within[4][4] = {};
        multiply_lower(s.product, s.written, within);
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int  t = c * chunk + row + half * 8, col = first_column + j * 8 + quad;
                const auto result = [&](int i) {
                    return fmaf(skip, value_at(j, i), fmaf(product_scale[half], within[j][i], out[j][i]));
                };
                float* const to = a.out + (run.first + t) * (std::int64_t(a.n_heads) * d) + h * d + col;
                if (t >= run.n || col >= d) continue;
                if (in_pairs) *reinterpret_cast<float2*>(to) = {result(2 * half), result(2 * half + 1)};
                else {
                    to[0] = result(2 * half);
                    if (col + 1 < d) to[1] = result(2 * half + 1);
                }
            }
        if (c + 1 < n_chunks) load_values(c + 1);
#pragma unroll
        for (int tile = 0; tile < tiles; tile++)
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) S[tile][j][i] *= last;
#pragma unroll
        for (int step = 0; step < 4; step++) {
            std::uint32_t b[2][4];
#pragma unroll
            for (int j = 0; j < 2; j++) load_right(b[j], s.decayed, value_pitch, step * 16, j * 16);
#pragma unroll
            for (int tile = 0; tile < tiles; tile++) {
                std::uint32_t k[4];
                load_left_transposed(k, keys, pitch, warp * (Keys / 4) + tile * 16, step * 16);
#pragma unroll
                for (int j = 0; j < 2; j++)
                    mma_m16n8k16(S[tile][2 * j], k, b[j][0], b[j][1]),
                        mma_m16n8k16(S[tile][2 * j + 1], k, b[j][2], b[j][3]);
            }
        }
        if (c + 1 == n_chunks) break;
        scale = put_state();
        __syncthreads(); // P is used
        load_product(c + 1);
    }
    each(run.to, [&](int tile, int j, int i, float* at, bool valid) {
        if (valid) *at = S[tile][j][i];
    });
}

int padded_keys(int key_dim) { return key_dim <= 64 ? 64 : 128; }

} // namespace

std::size_t recurrence_chunks_bytes(int n_heads, int n_groups, int key_dim, int max_tokens) {
    if (n_heads == 0 || key_dim > max_chunked_keys) return 0;
    const Workspace work(nullptr, n_heads, n_groups, padded_keys(key_dim));
    return std::size_t(work.slot_bytes) * std::size_t(max_tokens / least_chunked + 1);
}

void recurrence_in_chunks(const Recurrence& op, const States& states, Context& gpu) {
    const dim3 all(unsigned((states.most_tokens + chunk - 1) / chunk), unsigned(op.n_heads),
                   unsigned(states.n_sequences)),
        columns(unsigned((op.value_dim + columns_of_cta - 1) / columns_of_cta), unsigned(op.n_heads),
                unsigned(states.n_sequences));
    const auto run = [&]<int Keys, bool Delta>() {
        constexpr int first = sizeof(Prepared<Keys>), second = sizeof(Chunk<Keys>);
        prepare_kernel(gpu, prepare_chunks_kernel<Keys, Delta>, warps * 32, first);
        prepare_kernel(gpu, run_chunks_kernel<Keys, Delta>, warps * 32, second);
        run_kernel(prepare_chunks_kernel<Keys, Delta>, all, warps * 32, first, gpu, op, states);
        run_kernel(run_chunks_kernel<Keys, Delta>, columns, warps * 32, second, gpu, op, states);
    };
    if (op.key_dim <= 64) op.delta ? run.operator()<64, true>() : run.operator()<64, false>();
    else op.delta ? run.operator()<128, true>() : run.operator()<128, false>();
}

} // namespace quire::cuda
