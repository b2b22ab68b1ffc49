// The decode megakernel's program: a list of instructions, GEMVs and attention, which the host compiles and every CTA
// interprets.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "../gemm/gemv.cuh"
#include "../kernels.h"

namespace quire::cuda::megakernel {

constexpr int  warps              = 15; // consumers: all but the producer
constexpr int  threads            = 16 * 32;
constexpr int  max_hidden         = 8192;
constexpr int  max_dynamic_chunks = 16; // of one instruction for one CTA
constexpr int  max_shared         = 215 * 1024;
constexpr Half empty_fp16         = 0xffff; // marks a value that is not there yet: a NaN that conversions do not make

// K or V of a layer; what all layers have alike is in Program::attend.
struct CacheArray {
    unsigned char* rows   = nullptr;
    float*         scales = nullptr;
};

// A GEMV of one or several projections, whose x is the RMS norm of the residual or the output of an earlier instruction; or
// attention.
struct Instruction {
    bool         is_attention       = false;
    bool         waits_for_previous = false; // reads the results of the instruction before
    bool         gated              = false; // gate and up, with the activation as the epilogue
    Activation   activation         = Activation::silu;
    Kind         kind               = kind_f16;
    int          cols = 0, n_pairs = 0; // K; pairs of rows
    const float* norm     = nullptr;    // weights of the norm, if x is one,
    float        eps      = 0;
    const Half*  add      = nullptr; // .. after this was added to the residual
    float*       residual = nullptr; // .. which is written here, if it is wanted
    Half*        columns  = nullptr; // .. and here
    const Half*  x        = nullptr; // else x
    Projections  all{};
    // A stage of the weight pipeline has `rows` rows: first the data of all, then their scales, then their minima.
    int part_bytes[3] = {}, n_parts = 0, row_bytes = 0;
    // How the warps divide a stage: a row has `tasks` (of a lane, or fp16: of a warp), and a warp takes `span` consecutive
    // ones, in one pass or two. A row gets up to max_sums partial sums.
    int      rows = 0, passes = 0, tasks = 0, span = 0, max_sums = 0;
    unsigned tasks_inverse = 0, rows_inverse = 0; // division by multiplication
    int      batch = 0;                           // stages whose sums a warp reduces together
    // The rows of this CTA; filled in by the producer.
    int first_pair = 0, pairs = 0, stages = 0;
    // Dynamic tile scheduling: SMs do not get equal shares of a busy memory. Of a long gated GEMV a CTA has only n_static
    // chunks of its own, of `rows` pairs each (two stages: of gate, of up), and takes further ones from a common counter as it
    // has room for them.
    int       n_static = 0, n_dynamic = 0;             // n_dynamic: of all CTAs
    unsigned* next_chunk                    = nullptr; // the counter of this step
    unsigned* next_chunk_of_next_step       = nullptr;
    int       taken[max_dynamic_chunks + 1] = {}; // their first pairs, then -1; filled in by the producer
    int       n_taken                       = 0;
    // Attention, and the exchange between CTAs (megakernel_exchange.cuh).
    const Half *q = nullptr, *k = nullptr, *v = nullptr;
    CacheArray  cache_k, cache_v;
    Half*       attended  = nullptr;
    uint4*      cleared   = nullptr; // where this instruction's results will be in the next step: emptied by this step
    int         n_cleared = 0, n_attended = 0; // in words of eight fp16 values; in values
};
static_assert(sizeof(Instruction) % 4 == 0 && std::is_trivially_copyable_v<Instruction>);

// Columns of a lane's task.
constexpr __host__ __device__ int task_cols(Kind k) { return k == kind_f16 ? 8 : k == kind_q4_k ? 64 : 32; }

// The values that all instructions share.
struct Program {
    Weight embedding;
    int    hidden = 0, n_ops = 0, x_room = 0, pipeline_bytes = 0; // shared memory for x, and for the weight pipeline
    int    attention_warps     = 0;
    int    shared              = 0; // all the shared memory of a CTA
    std::int64_t exchange_size = 0; // fp16 values that CTAs exchange in a step
    RopeStore    rope;
    Attention    attend;
};

// Compiles operations into a program for n_sms CTAs. False: not the operations of a model that it knows, or too large.
bool compile(const Operation* operations, int n, int n_sms, Program& program, std::vector<Instruction>& ops);
// Gives all values that CTAs exchange addresses of their own in `memory`, or with null only counts them. False: an instruction
// reads a value that no instruction writes.
bool place_exchange(std::vector<Instruction>& ops, Half* memory, std::int64_t& n);

} // namespace quire::cuda::megakernel
