// Layers that keep a state of fixed size for a sequence: the causal convolution, and the recurrence of a head's matrix (gated delta rule,
// selective scan). Tokens run in the order of the sequence, and each sum has one order, so the bits do not depend on the step's other
// tokens, nor on where a prompt was cut into steps.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "epilogue.cuh"
#include "kernels.h"
#include "recurrence.cuh"
#include "warp.cuh"

namespace quire::cuda {

namespace {

// -- the causal convolution: a thread for each column, a CTA for conv_tokens tokens of a sequence. The first one of a sequence reads the old
// state and writes the new one, which may be the same memory.

constexpr int conv_threads = 128, conv_tokens = 32;

template <int Taps> // most taps: the inputs of as many tokens stand in registers
__global__ void __launch_bounds__(conv_threads) causal_conv_kernel(CausalConv a, States states) {
    reads_early(); // weights, the plan, and the state, which no other kernel of the step writes
    const int column = int(blockIdx.x * conv_threads + threadIdx.x), past = a.taps - 1;
    const Run run   = run_of(states, int(blockIdx.y));
    const int first = int(blockIdx.z) * conv_tokens;
    if (column >= a.columns || first >= run.n) return wait_for_inputs();
    const auto  at     = [&](int t) { return (run.first + t) * a.columns + column; };
    const auto* factor = reinterpret_cast<const __half*>(a.factor ? a.factor : a.x);
    const auto  input  = [&](int t) {
        const float x = __half2float(reinterpret_cast<const __half*>(a.x)[at(t)]), by = __half2float(factor[at(t)]);
        return a.factor ? x * by : x;
    };
    // window[Taps - 1]: the newest input; the oldest of `taps` stands at Taps - taps
    float window[Taps], weight[Taps], state[Taps];
#pragma unroll
    for (int j = 0; j < Taps; j++) {
        const int tap = j - (Taps - a.taps); // of the kernel
        weight[j]     = tap >= 0 ? a.weight[std::int64_t(column) * a.taps + tap] : 0.0f;
        state[j]      = 0;
        // in front of the first token: the state's row `past` - 1 is the newest
        const int row = j - (Taps - past);
        if (first == 0 && row >= 0 && run.from)
            state[j] = *float_of(states, run.from, std::int64_t(row) * a.columns + column);
    }
    const float bias             = a.bias ? a.bias[column] : 0.0f;
    float*      next_state[Taps] = {}; // where the new rows go
#pragma unroll
    for (int j = 0; j < Taps; j++)
        if (const int row = j - (Taps - past); first == 0 && row >= 0)
            next_state[j] = float_of(states, run.to, std::int64_t(row) * a.columns + column);
    wait_for_inputs();
#pragma unroll
    for (int j = 0; j < Taps; j++)
        window[j] = first == 0 ? state[j] : j - (Taps - past) >= 0 ? input(first - (Taps - j)) : 0.0f;
    constexpr int each = 8; // tokens whose loads are in flight
    const int     end  = min(first + conv_tokens, run.n);
    const auto*   gate = reinterpret_cast<const __half*>(a.gate ? a.gate : a.x);
    for (int begin = first; begin < end; begin += each) {
        float x[each], gates[each];
#pragma unroll
        for (int u = 0; u < each; u++)
            x[u] = input(min(begin + u, end - 1)), gates[u] = __half2float(gate[at(min(begin + u, end - 1))]);
#pragma unroll
        for (int u = 0; u < each; u++) {
            if (begin + u >= end) break;
#pragma unroll
            for (int j = 0; j + 1 < Taps; j++) window[j] = window[j + 1];
            window[Taps - 1] = x[u];
            float sum        = bias;
#pragma unroll
            for (int j = 0; j < Taps; j++) sum = fmaf(window[j], weight[j], sum);
            reinterpret_cast<__half*>(a.out)[at(begin + u)] =
                to_finite(a.gate ? sum * gates[u] : activated(Activation::silu, sum));
        }
    }
    if (first != 0) return;
    // The last `past` of the old rows and this step's inputs: new row j is old row j + n, or the input of token j + n - past. They stand in the
    // window already where this CTA has all tokens.
    if (end < run.n) {
#pragma unroll
        for (int j = 0; j < Taps; j++)
            if (const int t = j - (Taps - past) + run.n - past; t >= 0) window[j] = input(t);
    }
#pragma unroll
    for (int j = 0; j < Taps; j++)
        if (next_state[j]) *next_state[j] = window[j];
}

// -- the recurrence: a CTA for 32 columns of a head's matrix in one sequence. A warp has 8 columns; four lanes share a column: lane / 8 = p
// has the rows 16·i + 4·p + 0 .. 3, in registers through all tokens. q, k, v and the decays of `tile` tokens at a time stand in shared
// memory, prepared by all warps; then each warp goes through the tokens without waiting for the others.

constexpr int scan_warps = 4, scan_columns = 8 * scan_warps, scan_tile = 16;

// Floats of shared memory for a token: k, q, v, decay, what is written.
__host__ __device__ constexpr int scan_floats(int rows) { return 2 * rows + scan_columns + 4; }

// The sum over the four lanes of a column.
__device__ float column_sum(float v) {
    v += __shfl_xor_sync(~0u, v, 8);
    return v + __shfl_xor_sync(~0u, v, 16);
}

// Groups: of 16 rows; the rows beyond key_dim are 0.
template <int Groups, bool Delta>
__global__ void __launch_bounds__(scan_warps * 32) recurrence_kernel(Recurrence a, States states, bool in_chunks) {
    constexpr int           rows = Groups * 16, stride = scan_floats(rows);
    extern __shared__ float tokens[]; // [scan_tile][stride]
    reads_early();                    // weights, the plan, and the state, which no other kernel of the step writes
    const Run run = run_of(states, int(blockIdx.z));
    if (run.n == 0 || (in_chunks && run.n >= least_chunked)) return wait_for_inputs();
    const int     lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, p = lane / 8;
    const int     h = int(blockIdx.y), N = a.key_dim, d = a.value_dim;
    const int     first_column = int(blockIdx.x) * scan_columns, column = first_column + warp * 8 + lane % 8;
    const Columns of(a, h, Delta);
    const int     v_at  = of.v + first_column;
    const float   decay = a.decay[h], step_bias = a.step_bias[h], skip = a.skip ? a.skip[h] : 0.0f;
    const bool    mine = column < d;

    // A float of the matrix: one address and a distance where all of the head's matrix lies in one block.
    const std::int64_t matrix = a.state_at + std::int64_t(h) * N * d;
    const auto block_of = [&](std::int64_t at) { return unsigned(states.offset + at) / unsigned(states.block_floats); };
    const bool is_near  = block_of(matrix) == block_of(matrix + std::int64_t(N) * d - 1);
    float* const from   = is_near && run.from ? float_of(states, run.from, matrix) : nullptr;
    float* const to_state = is_near ? float_of(states, run.to, matrix) : nullptr;
    const auto   each_row = [&](const std::int32_t* unit, float* base, auto&& body) {
#pragma unroll
        for (int g = 0; g < Groups; g++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (const int n = 16 * g + 4 * p + i; mine && n < N)
                    body(g * 4 + i, is_near ? base + n * d + column
                                            : float_of(states, unit, matrix + std::int64_t(n) * d + column));
    };
    float S[Groups * 4] = {};
    if (run.from) each_row(run.from, from, [&](int r, const float* at) { S[r] = *at; });
    wait_for_inputs();

    for (int begin = 0; begin < run.n; begin += scan_tile) {
        const int n_tokens = min(scan_tile, run.n - begin);
        __syncthreads(); // all are done with the tile before
        for (int t = warp; t < n_tokens; t += scan_warps) {
            const std::int64_t row  = run.first + begin + t;
            const auto*        x    = reinterpret_cast<const __half*>(a.x) + row * of.columns;
            const float        step = a.step[row * of.step_columns + of.step],
                        writes      = Delta ? of.writes[row * of.step_columns + of.write] : 0.0f;
            const __half v          = x[v_at + min(lane, d - 1 - first_column)];
            float*       to         = tokens + t * stride;
            float        k[Groups / 2 + 1], q[Groups / 2 + 1], kk = 0, qq = 0;
#pragma unroll
            for (int i = 0; i < (rows + 31) / 32; i++) { // without branches, so that all loads are in flight
                const int n = min(lane + 32 * i, N - 1);
                k[i] = __half2float(x[of.k + n]), q[i] = __half2float(x[of.q + n]);
            }
#pragma unroll
            for (int i = 0; i < (rows + 31) / 32; i++) {
                if (lane + 32 * i >= N) k[i] = q[i] = 0;
                kk += k[i] * k[i], qq += q[i] * q[i];
            }
            float k_scale = 1, q_scale = 1;
            if (Delta) {
                constexpr float eps = 1e-6f;
                k_scale = 1 / sqrtf(warp_sum(kk) + eps), q_scale = 1 / sqrtf((warp_sum(qq) + eps) * float(N));
            }
#pragma unroll
            for (int i = 0; i < (rows + 31) / 32; i++)
                if (const int n = lane + 32 * i; n < rows) to[n] = k[i] * k_scale, to[rows + n] = q[i] * q_scale;
            to[2 * rows + lane] = first_column + lane < d ? __half2float(v) : 0.0f;
            if (lane == 0) {
                const float size                = softplus(step + step_bias);
                to[2 * rows + scan_columns]     = expf(decay * size);
                to[2 * rows + scan_columns + 1] = Delta ? 1 / (1 + expf(-writes)) : size;
            }
        }
        __syncthreads();
        for (int t = 0; t < n_tokens; t++) {
            const float* const token = tokens + t * stride;
            const auto *       ks    = reinterpret_cast<const float4*>(token),
                       *qs           = reinterpret_cast<const float4*>(token + rows);
            const float v = token[2 * rows + warp * 8 + lane % 8], g = token[2 * rows + scan_columns],
                        write = token[2 * rows + scan_columns + 1];
            float u           = v;
            if (Delta) {
                float sum[4] = {};
#pragma unroll
                for (int i = 0; i < Groups; i++) {
                    const float4 k = ks[i * 4 + p];
                    sum[0] = fmaf(S[4 * i], k.x, sum[0]), sum[1] = fmaf(S[4 * i + 1], k.y, sum[1]);
                    sum[2] = fmaf(S[4 * i + 2], k.z, sum[2]), sum[3] = fmaf(S[4 * i + 3], k.w, sum[3]);
                }
                u -= g * column_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
            }
            u *= write;
            float sum[4] = {};
#pragma unroll
            for (int i = 0; i < Groups; i++) {
                const float4 k = ks[i * 4 + p], q = qs[i * 4 + p];
                S[4 * i]     = fmaf(k.x, u, g * S[4 * i]);
                S[4 * i + 1] = fmaf(k.y, u, g * S[4 * i + 1]);
                S[4 * i + 2] = fmaf(k.z, u, g * S[4 * i + 2]);
                S[4 * i + 3] = fmaf(k.w, u, g * S[4 * i + 3]);
                sum[0] = fmaf(S[4 * i], q.x, sum[0]), sum[1] = fmaf(S[4 * i + 1], q.y, sum[1]);
                sum[2] = fmaf(S[4 * i + 2], q.z, sum[2]), sum[3] = fmaf(S[4 * i + 3], q.w, sum[3]);
            }
            const float out = column_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
            if (p == 0 && mine)
                a.out[(run.first + begin + t) * (std::int64_t(a.n_heads) * d) + h * d + column] = fmaf(skip, v, out);
        }
    }
    each_row(run.to, to_state, [&](int r, float* at) { *at = S[r]; });
}

} // namespace

void causal_conv(const CausalConv& op, const States& states, Context& gpu) {
    if (states.n_sequences == 0) return;
    const dim3 grid(unsigned((op.columns + conv_threads - 1) / conv_threads), unsigned(states.n_sequences),
                    unsigned((states.most_tokens + conv_tokens - 1) / conv_tokens));
    run_kernel(op.taps <= 4 ? causal_conv_kernel<4> : causal_conv_kernel<max_conv_taps>, grid, conv_threads, 0, gpu, op,
               states);
}

void recurrence(const Recurrence& op, const States& states, Context& gpu) {
    if (states.n_sequences == 0) return;
    const bool in_chunks = op.chunks != nullptr && states.most_tokens >= least_chunked;
    if (in_chunks) recurrence_in_chunks(op, states, gpu);
    if (in_chunks && states.n_sequences == 1) return;
    const dim3 grid(unsigned((op.value_dim + scan_columns - 1) / scan_columns), unsigned(op.n_heads),
                    unsigned(states.n_sequences));
    const auto run = [&]<int Groups>() {
        const int tokens = std::min(states.most_tokens, scan_tile);
        run_kernel(op.delta ? recurrence_kernel<Groups, true> : recurrence_kernel<Groups, false>, grid, scan_warps * 32,
                   std::size_t(tokens) * scan_floats(Groups * 16) * sizeof(float), gpu, op, states, in_chunks);
    };
    if (op.key_dim <= 16) run.operator()<1>();
    else if (op.key_dim <= 32) run.operator()<2>();
    else if (op.key_dim <= 64) run.operator()<4>();
    else if (op.key_dim <= 128) run.operator()<8>();
    else run.operator()<16>();
}

} // namespace quire::cuda
