// K and V as codes (KvArray in kernels.h).
//   rope_store_codes_kernel: RoPE and KV store. A warp takes one head of a token, of q, k or v, as float32 in shared memory, rotates its pairs by
//                            their position, spreads it by a Hadamard matrix (not v, and no latent row), and stores fp16 or codes
//   unpack_kernel:           blocks of codes as blocks of fp16
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "../kernels.h"
#include "../rope.cuh"
#include "codes.cuh"

namespace quire::cuda {

namespace {

constexpr int row_warps = 4; // of a CTA

// x [n], all lanes of a warp: each `size` numbers times the Hadamard matrix of that size over √size.
__device__ void spread(float* x, int n, int size, int lane) {
    for (int apart = 1; apart < size; apart *= 2) {
        for (int i = lane; i < n / 2; i += 32) {
            const int   at = 2 * (i & -apart) + (i & (apart - 1)); // apart: a power of two
            const float a = x[at], b = x[at + apart];
            x[at] = a + b, x[at + apart] = a - b;
        }
        __syncwarp();
    }
    const float factor = rsqrtf(float(size));
    for (int i = lane; i < n; i += 32) x[i] *= factor;
    __syncwarp();
}

// x [n] to numbers first .. first + n of a row.
__device__ void store_row(const float* x, int n, const KvArray& a, int slot, int kv_head, int block_size, int cols,
                          int first, int part, int lane) {
    const int  block = slot / block_size, offset = slot % block_size;
    const auto at = kv_row(block, kv_head, offset, a.block_rows, block_size) * cols + first;
    if (!a.scales) {
        for (int i = lane; i < n; i += 32) static_cast<__half*>(a.rows)[at + i] = __float2half(x[i]);
        return;
    }
    float most = 0;
    for (int i = lane; i < n; i += 32) most = max_or_nan(most, fabsf(x[i]));
    const RowCode code(warp_max_or_nan(most), a.type);
    if (lane == 0) a.scales[kv_row(block, kv_head, offset, a.block_scales, block_size) * a.parts + part] = code.scale;
    for (int i = lane; i < n; i += 32) static_cast<unsigned char*>(a.rows)[at + i] = code.of(x[i]);
}

__global__ void __launch_bounds__(row_warps * 32) rope_store_codes_kernel(RopeStore a, Plan plan) {
    wait_for_inputs();
    extern __shared__ float memory[];
    const std::int64_t      t    = blockIdx.x;
    const int               lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32), slot = plan.slots[t];
    const int  head = int(blockIdx.y) * row_warps + warp, stored = a.n_heads + a.n_kv_heads, D = a.head_dim;
    const bool latent = a.v_array.rows == nullptr, is_q = head < a.n_heads, is_k = !is_q && head < stored;
    if (head >= stored + a.n_kv_heads || (!is_q && slot < 0)) return; // tokens that only fill up a graph have no slot
    const int v_dim = latent ? a.value_dim : D, k_dim = latent ? D - v_dim : D,
              n        = is_q   ? a.q_dim
                         : is_k ? k_dim
                                : v_dim,
              kv_head  = head - (is_k ? a.n_heads : stored);
    __half* const from = is_q   ? reinterpret_cast<__half*>(a.q) + (t * a.n_heads + head) * n
                         : is_k ? reinterpret_cast<__half*>(a.k) + (t * a.n_kv_heads + kv_head) * n
                                : reinterpret_cast<__half*>(a.v) + (t * a.n_kv_heads + kv_head) * n;
    float* const  x    = memory + warp * max(D, a.q_dim);
    for (int i = lane; i < n; i += 32) x[i] = __half2float(from[i]);
    __syncwarp();
    float* const turned = x + (is_q ? a.q_first : 0);
    for (int pair = lane; pair < a.n_pairs && (is_q || is_k); pair += 32) {
        float& one   = turned[a.neox ? pair : 2 * pair];
        float& other = turned[a.neox ? pair + a.n_pairs : 2 * pair + 1];
        float  sine, cosine;
        rope_angle(float(plan.positions[t]), a.inv_freq[pair], sine, cosine);
        const float2 rotated = rotate_pair(one, other, sine * a.scale, cosine * a.scale);
        one = rotated.x, other = rotated.y;
    }
    __syncwarp();
    if (a.rotation > 1 && (is_q || is_k)) spread(x, n, a.rotation, lane);
    if (is_q)
        for (int i = lane; i < n; i += 32) from[i] = to_finite(x[i]);
    else if (is_k) store_row(x, n, a.k_array, slot, kv_head, a.block_size, D, latent ? v_dim : 0, latent ? 1 : 0, lane);
    else
        store_row(x, n, latent ? a.k_array : a.v_array, a.v_slots == 0 ? slot : plan.slots[t + a.v_slots], kv_head,
                  a.block_size, D, 0, 0, lane);
}

// A CTA for an entry of a sequence's block table.
__global__ void unpack_kernel(Attention a, Plan plan, const UnpackedBlocks* items, __half* k, __half* v) {
    wait_for_inputs();
    const UnpackedBlocks item  = items[blockIdx.y];
    const int            entry = int(blockIdx.x), D = a.head_dim;
    if (entry >= item.n) return;
    const auto* const  id    = plan.block_tables + plan.table_start[item.sequence] + item.first + entry;
    const int          block = *id, v_block = a.v_tables == 0 ? block : id[a.v_tables];
    const int          rows = a.n_kv_heads * a.block_size, step = D % 8 == 0 ? 8 : 1, words = D / step;
    const std::int64_t to = std::int64_t(item.at + entry) * rows * D;
    for (int i = int(threadIdx.x); i < 2 * rows * words; i += int(blockDim.x)) {
        const bool  is_k = i < rows * words;
        const int   in = is_k ? i : i - rows * words, row = in / words, first = in % words * step;
        __half*     at = (is_k ? k : v) + to + std::int64_t(row) * D + first;
        const KvRow from(is_k ? a.k_array : a.v_array, is_k ? block : v_block, row / a.block_size, row % a.block_size,
                         a.block_size, D);
        // A block that was given back lies before the window: its weights are 0, but not every number times 0 is.
        if (step == 8) *reinterpret_cast<uint4*>(at) = block < 0 ? make_uint4(0, 0, 0, 0) : from.eight(first);
        else *at = block < 0 ? __half(0.0f) : to_finite(from.number(first));
    }
}

} // namespace

void unpack_codes(const Attention& args, const Plan& plan, const UnpackedBlocks* items, int n_items, int most_entries,
                  Half* k, Half* v, Context& gpu) {
    run_kernel(unpack_kernel, dim3(unsigned(most_entries), unsigned(n_items)), 256, 0, gpu, args, plan, items,
               reinterpret_cast<__half*>(k), reinterpret_cast<__half*>(v));
}

void rope_and_store_codes(const RopeStore& args, const Plan& plan, std::int64_t n, Context& gpu) {
    const int      heads  = args.n_heads + 2 * args.n_kv_heads;
    const unsigned shared = unsigned(row_warps * std::max(args.head_dim, args.q_dim)) * sizeof(float);
    run_kernel(rope_store_codes_kernel, dim3(unsigned(n), unsigned((heads + row_warps - 1) / row_warps)),
               row_warps * 32, shared, gpu, args, plan);
}

} // namespace quire::cuda
