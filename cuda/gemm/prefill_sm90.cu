// GEMMs of halves with the many rows of x of a prefill, on Hopper's tensor cores (wgmma), fused with what follows: SwiGLU, or RoPE and
// store of q, k and v. A persistent kernel: as many CTAs as SMs, each taking tiles of 128 rows of x × 256 rows of weights, in steps
// of 64 columns. Two warpgroups multiply 64 rows of x each; one warp of a third group loads x and weights by TMA, four steps
// ahead. CTAs that run at the same time use the same few weights, which stay in the L2 cache.
//
// The number of tiles is seldom a multiple of the number of CTAs: 28 remaining tiles for 132 CTAs would take as long as 132. So the last
// tiles, too few for all CTAs, are cut into strips with fewer rows of weights, which take a half or a quarter of the time.
//
// A tile of gate and up has 128 rows of each, so that one thread has both sums of a result; likewise both of a RoPE pair. A sum
// is bit-identical whatever the tile and the number of rows.
//
// Limits: rows and cols are multiples of 8, results are halves; heads with RoPE have 64 or 128 dimensions, RoPE on all of them.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "../epilogue.cuh"
#include "../kernels.h"
#include "../paged_kv.cuh"
#include "../pipeline.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "../rope.cuh"
#include "../warp.cuh"

namespace quire::cuda {

namespace {

constexpr int                  M = 128, N = 256, stages = 4; // rows of x and of weights of a tile; of the ring
constexpr int                  row_bytes = tile_k * 2;       // of a tile, in shared memory
[[maybe_unused]] constexpr int x_bytes = M * row_bytes, stage_bytes = (M + N) * row_bytes;

struct Maps {
    CUtensorMap x, weight[max_projections], strip[max_projections]; // weights: half of a tile's rows, or of a strip's
};

struct Job {
    __half*      out[max_projections];
    const float* bias[max_projections];
    int          rows[max_projections];             // of the weights, and of the results
    int          first_column[max_projections + 1]; // of tiles: products one after another, N rows of weights each
    int          n_rows, n_steps;                   // of x; of 64 columns
    int          n_down;                            // tiles of a column: M rows of x each
    int          n_whole, n_all;                    // tiles as they are; and strips
    RopeStore    rope;
    const std::int32_t *positions, *slots;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

struct Tile {
    int product, first_row; // of its weights, of each where there are two
    int first_x;
};
template <Epilogue E, int Strips>
__device__ Tile tile_of(const Job& job, int i) {
    constexpr int rows  = E == Epilogue::swiglu ? N / 2 : N;
    const int     strip = i < job.n_whole ? 0 : (i - job.n_whole) % Strips,
              whole = i < job.n_whole ? i : job.n_whole + (i - job.n_whole) / Strips, column = whole / job.n_down;
    const int product = column < job.first_column[1] ? 0 : column < job.first_column[2] ? 1 : 2;
    return {product, (column - job.first_column[product]) * rows + strip * (rows / Strips), whole % job.n_down * M};
}

// Rotates whole heads of D, as wgmma lays Width columns of the rows `row` and row + 8 over the lanes.
template <int D, int Width>
__device__ void rotate(float (&sum)[N / 2], const Job& job, int row) {
    static_assert(Width % D == 0);
    const RopeStore& a    = job.rope;
    const int        lane = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float position = float(job.positions[min(row + 8 * r, job.n_rows - 1)]);
        const auto  each     = [&](int pair, int one, int other) {
            float sine, cosine;
            rope_angle(position, a.inv_freq[pair], sine, cosine);
            sine *= a.scale, cosine *= a.scale;
#pragma unroll
            for (int head = 0; head < Width / 2; head += D / 2) {
                float &      x = sum[head + one], &y = sum[head + other];
                const float2 rotated = rotate_pair(x, y, sine, cosine);
                x = rotated.x, y = rotated.y;
            }
        };
        if (a.neox) {
#pragma unroll
            for (int j = 0; j < D / 8; j++) // two columns of each eight
                each(j / 2 * 8 + lane * 2 + j % 2, j / 2 * 4 + 2 * r + j % 2, D / 4 + j / 2 * 4 + 2 * r + j % 2);
        } else {
#pragma unroll
            for (int j = 0; j < D / 8; j++) each(j * 4 + lane, j * 4 + 2 * r, j * 4 + 2 * r + 1);
        }
    }
}

// 32 neighbouring results, from `to` on: of each lane of four two of each of four groups of 8.
__device__ void store_row(__half* to, int n, const std::uint32_t (&words)[4]) {
    const uint4 eight = transpose_quad(words);
    const int   at    = int(threadIdx.x) % 4 * 8;
    if (to != nullptr && at < n) *reinterpret_cast<uint4*>(to + at) = eight;
}

#endif

// Strips: of a tile, of those that come last. D: of rotated heads.
template <Epilogue E, int Strips, int D>
__global__ void __launch_bounds__(384, 1)
    prompt_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Job job) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ unsigned char memory[];
    auto*      ring = reinterpret_cast<unsigned char*>((reinterpret_cast<std::uintptr_t>(memory) + 1023) / 1024 * 1024);
    __shared__ std::uint64_t full[stages], empty[stages];
    const Pipeline<stages>   pipeline{ring, full, empty};
    const int                group = uniform(int(threadIdx.x) / 128);
    if (threadIdx.x == 0) {
        pipeline.init(1, 2);
        mbarrier_init_fence();
    }
    __syncthreads();
    wait_for_inputs();
    const int first = int(blockIdx.x), step = int(gridDim.x);

    if (group == 2) {
        // 40 + 2 · 232 are the 3 · 168 registers of the launch.
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x != 256) return;
        PipelineState<stages> at = pipeline.producer_start();
        for (int i = first; i < job.n_all; i += step) {
            const Tile         t     = tile_of<E, Strips>(job, i);
            const bool         whole = i < job.n_whole;
            const CUtensorMap* map   = whole ? maps.weight : maps.strip;
            const int          half  = whole ? N / 2 : N / 2 / Strips; // of the rows of weights
            for (int k = 0; k < job.n_steps; k++) {
                pipeline.producer_acquire(at);
                mbarrier_arrive_expect_tx(&full[at.stage], unsigned(x_bytes + 2 * half * row_bytes));
                unsigned char *x = pipeline.memory + at.stage * stage_bytes, *w = x + x_bytes;
                tma_copy_2d(x, maps.x, k * tile_k, t.first_x, &full[at.stage]);
                tma_copy_2d(w, map[t.product], k * tile_k, t.first_row, &full[at.stage]);
                if (E == Epilogue::swiglu)
                    tma_copy_2d(w + half * row_bytes, map[1], k * tile_k, t.first_row, &full[at.stage]);
                else tma_copy_2d(w + half * row_bytes, map[t.product], k * tile_k, t.first_row + half, &full[at.stage]);
                at.advance();
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int           lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    const unsigned      at           = shared_address(ring);
    const std::uint64_t x0           = matrix_descriptor(at + unsigned(group) * 64 * row_bytes, 16, 8 * row_bytes),
                        w0           = matrix_descriptor(at + x_bytes, 16, 8 * row_bytes);
    float                 sum[N / 2] = {};
    PipelineState<stages> now;
    const auto            free_stage = [&](int s) {
        if (threadIdx.x % 128 == 0) pipeline.consumer_release(s);
    };
    const auto work = [&]<int Width>(std::integral_constant<int, Width>, const Tile& t) {
        int before = 0;
        for (int k = 0; k < job.n_steps; k++) {
            pipeline.consumer_wait(now);
            const std::uint64_t x = advance(x0, unsigned(now.stage * stage_bytes)),
                                w = advance(w0, unsigned(now.stage * stage_bytes));
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < tile_k / 16; j++)
                wgmma_ss<Width>(sum, advance(x, unsigned(j) * 32), advance(w, unsigned(j) * 32), k + j);
            wgmma_commit();
            wgmma_wait<1>();
            if (k > 0) free_stage(before);
            before = now.stage;
            now.advance();
        }
        wgmma_wait<0>();
        wgmma_pin(sum);
        free_stage(before);

        const int n_cols = job.rows[t.product], row = t.first_x + warp * 16 + lane / 4; // and row + 8
        if (const float* bias = job.bias[t.product]; E != Epilogue::swiglu && bias != nullptr)
#pragma unroll
            for (int i = 0; i < Width / 2; i++)
                if (const int col = t.first_row + i / 4 * 8 + lane % 4 * 2 + i % 2; col < n_cols) sum[i] += bias[col];
        if constexpr (E == Epilogue::rope_store)
            if (t.product < 2) rotate<D, Width>(sum, job, row);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const bool is_row = row + 8 * r < job.n_rows;
            const int  slot   = E == Epilogue::rope_store && is_row ? job.slots[row + 8 * r] : -1;
            const auto place  = [&](int col) -> __half* { // of results
                if (!is_row) return nullptr;
                if (E != Epilogue::rope_store || t.product == 0)
                    return job.out[t.product] + std::int64_t(row + 8 * r) * n_cols + col;
                // Entries that only fill up a graph have no slot.
                const RopeStore& a = job.rope;
                if (slot < 0) return nullptr;
                return reinterpret_cast<__half*>(t.product == 1 ? a.cache_k : a.cache_v) +
                       kv_row_of_slot(slot, col / D, a.n_kv_heads, a.block_size) * D + col % D;
            };
#pragma unroll
            for (int c = 0; c < (E == Epilogue::swiglu ? Width / 2 : Width); c += 32) {
                std::uint32_t words[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float both[2];
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        const int k = (c / 8 + i) * 4 + 2 * r + j;
                        both[j]     = sum[k];
                        if constexpr (E == Epilogue::swiglu) both[j] = swiglu(sum[k], sum[Width / 4 + k]);
                    }
                    words[i] = pack(both[0], both[1]);
                }
                store_row(place(t.first_row + c), n_cols - t.first_row - c, words);
            }
        }
    };
    for (int i = first; i < job.n_all; i += step) {
        const Tile t = tile_of<E, Strips>(job, i);
        if (i < job.n_whole) work(std::integral_constant<int, N>{}, t);
        else work(std::integral_constant<int, N / Strips>{}, t);
    }
#endif
}

template <Epilogue E, int Strips, int D = N>
void launch(const Maps& maps, const Job& job, int n_blocks, Context& gpu) {
    constexpr int shared = stages * (M + N) * row_bytes + 1024;
    prepare_kernel(gpu, prompt_kernel<E, Strips, D>, 384, shared);
    run_kernel(prompt_kernel<E, Strips, D>, dim3(unsigned(n_blocks)), 384, shared, gpu, maps, job);
}

} // namespace

int match_prefill_gemm(const Operation* ops, int n_ops, const Context& gpu) {
    if (n_ops < 1 || !gpu.sm90 || tensor_map_encoder() == nullptr) return 0;
    const Operation& op    = ops[0];
    const bool       gated = op.kind == Operation::gated_gemm;
    if ((op.kind != Operation::gemm && !gated) || op.cols % 8 != 0) return 0;
    for (int i = 0; i < op.n_projections; i++) {
        const Projection& p = op.projection[i];
        if (p.weight.rows % 8 != 0 || p.out_is_float) return 0;
        if (gated && (p.bias || p.weight.rows != op.projection[0].weight.rows)) return 0;
    }
    return n_ops > 1 && ops[1].kind == Operation::rope_and_store && rotates_results(ops[1].rope, op) &&
                   (ops[1].rope.head_dim == 64 || ops[1].rope.head_dim == 128)
               ? 2
               : 1;
}

int run_prefill_gemm(const Operation* ops, int n_ops, const Plan& plan, Context& gpu) {
    const Operation& op     = ops[0];
    const bool       gated  = op.kind == Operation::gated_gemm;
    const bool       turned = n_ops > 1 && match_prefill_gemm(ops, n_ops, gpu) == 2;
    const int        rows   = gated ? N / 2 : N; // of a tile's weights
    Job              job{};
    Maps             maps;
    job.n_rows  = int(op.rows);
    job.n_steps = int((op.cols + tile_k - 1) / tile_k);
    job.n_down  = int((op.rows + M - 1) / M);
    for (int k = 0; k < max_projections; k++) {
        const Projection& p     = op.projection[k];
        job.out[k]              = static_cast<__half*>(p.out);
        job.bias[k]             = p.bias;
        job.rows[k]             = int(p.weight.rows);
        const bool begins       = k < (gated ? 1 : op.n_projections);
        job.first_column[k + 1] = job.first_column[k] + (begins ? (job.rows[k] + rows - 1) / rows : 0);
    }
    if (turned) {
        job.rope      = ops[1].rope;
        job.positions = plan.positions;
        job.slots     = plan.slots;
    }
    // The last tiles as they are, in halves, or in quarters: what takes the shortest time. A half takes more than half of it.
    const int  n = job.first_column[max_projections] * job.n_down, at_once = gpu.n_sms, rest = n % at_once;
    const auto time   = [&](int strips, double each) { return (rest * strips + at_once - 1) / at_once * each; };
    const int  D      = turned ? job.rope.head_dim : 0;
    const bool finer  = D == 64 || (D == 0 && time(4, 0.33) < time(2, 0.55));
    const int  strips = finer ? 4 : 2;
    const bool cut    = time(strips, finer ? 0.33 : 0.55) < time(1, 1);
    job.n_whole       = cut ? n - rest : n;
    job.n_all         = cut ? n - rest + rest * strips : n;
    bool ok           = encode_matrix(maps.x, op.x, op.rows, op.cols, M);
    for (int k = 0; k < op.n_projections; k++) {
        const Weight& w = op.projection[k].weight;
        ok              = ok && encode_matrix(maps.weight[k], w.data, w.rows, op.cols, N / 2) &&
             encode_matrix(maps.strip[k], w.data, w.rows, op.cols, N / 2 / strips);
    }
    const auto run = D == 64    ? launch<Epilogue::rope_store, 4, 64>
                     : D == 128 ? launch<Epilogue::rope_store, 2, 128>
                     : gated    ? (finer ? launch<Epilogue::swiglu, 4> : launch<Epilogue::swiglu, 2>)
                                : (finer ? launch<Epilogue::store, 4> : launch<Epilogue::store, 2>);
    // Without maps a launch that fails, so that last_error() tells.
    run(maps, job, ok ? std::min(at_once, job.n_all) : 0, gpu);
    return turned ? 2 : 1;
}

} // namespace quire::cuda
