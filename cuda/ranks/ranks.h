// The interface to this folder: several GPUs that run a model together. The GPUs of one process write to each other's memory and read
// from it (peer access; no NVLink multicast). GPUs of several processes exchange all messages by NCCL. Plain types, as in kernels.h;
// cuda/none.cpp stands in where there is no CUDA.
//
// Every rank makes the same calls in the same order, from its own thread and in its own stream.
#pragma once

#include "../kernels.h"

namespace quire::cuda {

constexpr int max_ranks = 16;

// Before the first call of any function: all kernels are loaded at once. A kernel that is loaded at its first launch may have to wait for
// a running kernel of its GPU; that kernel waits for another rank, and that rank waits for the loader.
void announce_ranks();

// One GPU's view of the other ranks. Destroyed after the last step of every rank.
struct Rank;

// Makes gpus[i] rank i of n: ranks[i]. `bytes`: of the largest message that is sent in one shot; `seconds`: how long a kernel waits for
// the other ranks. False: `why` says why the GPUs cannot work together.
bool connect_ranks(Context* const* gpus, int n, std::size_t bytes, double seconds, Rank** ranks, const char*& why);
void destroy_rank(Rank* rank);

// The id by which the processes find each other in NCCL: one process makes the id and sends it to the others. False: NCCL is not
// installed, or finds no network.
struct NcclId {
    char bytes[128] = {};
};
bool make_nccl_id(NcclId& id);
// Makes gpus[i] rank first + i of n: ranks[i]. The other ranks belong to other processes, which make this call at the same time.
// `seconds`: how long the processes wait for each other in this call. False: `why` says what failed.
bool connect_ranks_by_nccl(Context* const* gpus, int n_local, int first, int n, const NcclId& id, double seconds,
                           Rank** ranks, const char*& why);
// NCCL's error for a message that has failed, or null. NCCL does not notice every lost process.
const char* nccl_failure(const Rank& rank);
// Ends the messages for which NCCL still waits; nothing is sent any more.
void leave_nccl(Rank& rank);

// Whether a kernel of this rank has waited for another rank in vain: all results since then are not valid.
bool lost_a_rank(const Rank& rank);
// NCCL's version, or 0: there is none, or the ranks have no communicator yet.
int nccl_version(const Rank& rank);
// Loads NCCL and joins the communicator of these ranks, every rank from its own thread at once, before their first message. Without
// NCCL nothing happens.
void join_nccl(Rank& rank, Context& gpu);

// One array of all ranks, by its address on each rank.
struct RankArrays {
    void* of[max_ranks] = {};
};

// Where the columns of each rank stand in the row of all ranks' columns.
struct RankColumns {
    std::int64_t first[max_ranks] = {}, n[max_ranks] = {};
};

// out = Σ over the ranks of x, [rows × cols], by a tree in the order of the ranks: the first half, rounded up, plus the others; in
// float32, rounded once. x and out may be the same if they have one type. The size decides how: in one shot (each rank sends all
// and adds all up), in two (each adds up its part), or, unless `exact`, by NCCL, whose order is its own. Between processes NCCL gathers
// small messages, and each rank adds them up.
struct AllReduce {
    RankArrays x, out;
    bool       x_is_float = false, out_is_float = false;
    bool       exact = false;
};
void all_reduce(const AllReduce& args, std::int64_t rows, std::int64_t cols, Rank& rank, Context& gpu);
// Copies x [rows × this rank's columns] to these columns of `out` [rows × out_cols] on every rank; elements of 2 or 4 bytes.
void all_gather(const void* x, const RankColumns& columns, const RankArrays& out, std::int64_t out_cols,
                std::int64_t rows, int element, Rank& rank, Context& gpu);

// -- what only programs of ranks need, on one GPU

// out [rows × cols] = columns first .. of x [rows × x_cols]; elements of 2 or 4 bytes.
void          take_columns(const void* x, std::int64_t x_cols, std::int64_t first, void* out, std::int64_t cols,
                           std::int64_t rows, int element, Context& gpu);
constexpr int max_parts = 8;
struct Parts {
    const void* of[max_parts] = {}; // null: nothing
    int         n             = 0;
    bool        is_float      = false;
};
// out [n] = the sum of `parts`, in the order of all_reduce().
void sum_parts(const Parts& parts, void* out, bool out_is_float, std::int64_t n, Context& gpu);
// embed() from a table that has only the rows of tokens first ..; others give zeros.
void embed_part(const Weight& weight, std::int32_t first, const Weight* positions, float scale, int offset,
                const Plan& plan, float* out, std::int64_t n_tokens, Context& gpu);

} // namespace quire::cuda
