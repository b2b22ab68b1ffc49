// The decode megakernel's program: what its instructions say, shared by the host, which compiles it, and the kernel.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "../gemm/gemv.cuh"
#include "../kernels.h"

namespace quire::cuda::megakernel {

constexpr int  warps        = 15; // of the team that does everything but filling the ring
constexpr int  threads      = 16 * 32;
constexpr int  most_hidden  = 8192;
constexpr int  most_claims  = 16; // chunks of a product
constexpr int  most_shared  = 215 * 1024;
constexpr Half cleared_half = 0xffff; // a not-a-number that conversions do not make

// An operation of the tape: products of x, or attention.
struct Op {
    bool         attends = false;
    bool         waits   = false; // for what the one before wrote
    bool         gated   = false;
    Kind         kind    = kind_f16;
    int          cols = 0, n_pairs = 0; // of x; of rows
    const float* norm     = nullptr;    // x is the residual's norm, or
    float        eps      = 0;
    const Half*  add      = nullptr; // .. after this was added to the residual
    float*       residual = nullptr; // .. which is written there
    const Half*  x        = nullptr; // x
    Projections  all{};
    // Data, scales and minima lie in a stage one after another, each of all its rows.
    int part_bytes[3] = {}, n_parts = 0, row_bytes = 0;
    // How the warps share a stage of some rows: a row has `tasks`, and a warp takes `span` of them in one go, or in each of two
    // passes.
    int      rows = 0, passes = 0, tasks = 0, span = 0, most_sums = 0; // .. sums of a row at most
    unsigned tasks_inverse = 0, rows_inverse = 0;
    int      batch = 0; // stages whose sums a warp adds up together
    // This block's part, filled in by the producer: pairs, stages.
    int first_pair = 0, pairs = 0, stages = 0;
    // Processors do not get the same share of a busy memory. So of long gated products a block has only `own` chunks, of `rows`
    // pairs each (two stages: of gate, of up), and claims more of what is left as it has room for them.
    int       own = 0, n_claimable = 0;
    unsigned* claims                   = nullptr; // how many have been claimed in this step
    unsigned* next_claims              = nullptr; // .. and in the next one
    int       claimed[most_claims + 1] = {};      // first pairs, and then -1; filled in by the producer
    int       n_claimed                = 0;
    // Of attention, and what blocks tell one another.
    const Half *q = nullptr, *k = nullptr, *v = nullptr;
    Half *      cache_k = nullptr, *cache_v = nullptr, *attended = nullptr;
    uint4*      cleared   = nullptr;           // by this step for the next one: where results will be, so many words
    int         n_cleared = 0, n_attended = 0; // .. halves
};
static_assert(sizeof(Op) % 4 == 0 && std::is_trivially_copyable_v<Op>);

// Columns of a lane's task.
constexpr __host__ __device__ int task_cols(Kind k) { return k == kind_f16 ? 8 : k == kind_q4_k ? 64 : 32; }

// What all operations have in common.
struct Shape {
    Weight       embedding;
    int          hidden = 0, n_ops = 0, x_room = 0, ring_bytes = 0; // .. bytes, bytes
    int          attending = 0;                                     // warps
    std::int64_t exchanged = 0;                                     // halves that blocks tell one another in a step
    RopeStore    rope;
    Attention    attend;
};

bool share(Op& op);
bool exchange(std::vector<Op>& ops, Half* memory, std::int64_t& n);
bool understand(const Operation* told, int n, Shape& shape, std::vector<Op>& ops);

} // namespace quire::cuda::megakernel
