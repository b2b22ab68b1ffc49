// Makes GPUs ranks: peer access, the memory through which the GPUs of one process reach each other, NCCL.
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "../context.cuh"
#include "nccl.cuh"

namespace quire::cuda {

// The part of NCCL's interface that is used, as nccl.h has it (2.x).
struct NcclLibrary {
    struct UniqueId {
        char bytes[128];
    };
    using Communicator                                     = struct OpaqueCommunicator*;
    int (*GetVersion)(int*)                                = nullptr;
    int (*GetUniqueId)(UniqueId*)                          = nullptr;
    int (*CommInitRank)(Communicator*, int, UniqueId, int) = nullptr;
    int (*CommAbort)(Communicator)                         = nullptr;
    int (*CommGetAsyncError)(Communicator, int*)           = nullptr;
    const char* (*GetErrorString)(int)                     = nullptr;
    int (*AllReduce)(const void*, void*, std::size_t, int, int, Communicator, cudaStream_t) = nullptr;
    int (*AllGather)(const void*, void*, std::size_t, int, Communicator, cudaStream_t)      = nullptr;
    int (*Broadcast)(const void*, void*, std::size_t, int, int, Communicator, cudaStream_t) = nullptr;
    int (*GroupStart)()                                                                     = nullptr;
    int (*GroupEnd)()                                                                       = nullptr;
    static constexpr int int8 = 0, float16 = 6, float32 = 7, sum = 0, success = 0, in_progress = 7;

    // Null: it is not installed.
    static const NcclLibrary* get() {
        static const std::unique_ptr<NcclLibrary> one = [] {
            void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
            auto  all     = std::make_unique<NcclLibrary>();
            if (library == nullptr) return std::unique_ptr<NcclLibrary>();
            const auto find = [&](auto& function, const char* name) {
                void* const address = dlsym(library, name);
                std::memcpy(&function, &address, sizeof address);
                return address != nullptr;
            };
            const bool found = find(all->GetVersion, "ncclGetVersion") && find(all->GetUniqueId, "ncclGetUniqueId") &&
                               find(all->CommInitRank, "ncclCommInitRank") && find(all->CommAbort, "ncclCommAbort") &&
                               find(all->CommGetAsyncError, "ncclCommGetAsyncError") &&
                               find(all->GetErrorString, "ncclGetErrorString") &&
                               find(all->AllReduce, "ncclAllReduce") && find(all->AllGather, "ncclAllGather") &&
                               find(all->Broadcast, "ncclBroadcast") && find(all->GroupStart, "ncclGroupStart") &&
                               find(all->GroupEnd, "ncclGroupEnd");
            return found ? std::move(all) : std::unique_ptr<NcclLibrary>();
        }();
        return one.get();
    }
};

// Of all ranks that were connected together.
struct Meeting {
    NcclLibrary::UniqueId id{};
    bool                  usable = false;
};

struct Nccl {
    std::shared_ptr<Meeting>  meeting;
    NcclLibrary::Communicator communicator = nullptr;
    std::int64_t              from         = 0; // bytes of the smallest message that NCCL sums; 0: none
    int                       version      = 0;
    std::size_t               piece        = 0; // bytes; 0: all ranks are of this process
};

namespace {

constexpr std::int64_t packet_bytes = 8; // of data

bool enable_peers(Context* const* gpus, int n, const char*& why) {
    for (int i = 0; i < n; i++) {
        if (cudaSetDevice(gpus[i]->device) != cudaSuccess) {
            why = "a GPU cannot be used";
            return false;
        }
        for (int j = 0; j < n; j++) {
            if (gpus[i]->device == gpus[j]->device) continue;
            int can = 0;
            cudaDeviceCanAccessPeer(&can, gpus[i]->device, gpus[j]->device);
            if (can == 0) {
                why = "they cannot reach each other's memory (no peer access)";
                return false;
            }
            const cudaError_t error = cudaDeviceEnablePeerAccess(gpus[j]->device, 0);
            if (error != cudaSuccess && error != cudaErrorPeerAccessAlreadyEnabled) {
                why = cudaGetErrorString(error);
                return false;
            }
            cudaGetLastError();
        }
    }
    return true;
}

bool share_a_device(Context* const* gpus, int n) {
    for (int i = 0; i < n; i++)
        for (int j = 0; j < i; j++)
            if (gpus[i]->device == gpus[j]->device) return true;
    return false;
}

// Ranks that share a GPU have this many waiting CTAs together. The other SMs stay free for the kernels for which the CTAs wait, because
// some GEMMs take all registers of an SM. No kernel of such a rank begins before the one before it ends.
constexpr int shared_one_shot_ctas = 64;

// Makes rank i with `bytes` of its GPU's memory. If there is no memory, destroys ranks 0 .. i.
bool add_rank(Context* const* gpus, int i, std::size_t bytes, Rank** ranks, const char*& why) {
    Rank& rank = *(ranks[i] = new Rank);
    use(*gpus[i]);
    gpus[i]->is_rank = true;
    rank.memory      = gpus[i]->take(bytes);
    if (cudaHostAlloc(reinterpret_cast<void**>(&rank.lost), sizeof(int), cudaHostAllocPortable) != cudaSuccess)
        rank.lost = nullptr;
    if (rank.memory != nullptr && rank.lost != nullptr) {
        *rank.lost = 0;
        return true;
    }
    why = "there is no memory left for what they send each other";
    for (int j = 0; j <= i; j++) destroy_rank(ranks[j]);
    return false;
}

} // namespace

void announce_ranks() {
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); // streams of ranks that share a GPU must not wait for each other
}

static_assert(sizeof(NcclId) == sizeof(NcclLibrary::UniqueId));

bool make_nccl_id(NcclId& id) {
    const NcclLibrary* const nccl = NcclLibrary::get();
    NcclLibrary::UniqueId    made;
    if (nccl == nullptr || nccl->GetUniqueId(&made) != NcclLibrary::success) return false;
    std::memcpy(&id, &made, sizeof id);
    return true;
}

bool connect_ranks(Context* const* gpus, int n, std::size_t bytes, double seconds, Rank** ranks, const char*& why) {
    if (!can_reduce(n)) {
        why = "there are no kernels for this number of them";
        return false;
    }
    if (!enable_peers(gpus, n, why)) return false;
    const bool         shared        = share_a_device(gpus, n);
    const std::int64_t room          = std::int64_t(bytes) / packet_bytes;
    const std::size_t  inbox_bytes   = std::size_t(2 * n * room) * sizeof(uint4),
                      flag_bytes     = std::size_t(2 * two_shot_ctas * n) * sizeof(unsigned);
    const auto               meeting = std::make_shared<Meeting>();
    const NcclLibrary* const nccl    = NcclLibrary::get();
    setenv("NCCL_NVLS_ENABLE", "0", 0); // NVLink multicast stays off
    meeting->usable = !shared && nccl != nullptr && nccl->GetUniqueId(&meeting->id) == 0;
    for (int i = 0; i < n; i++) {
        if (!add_rank(gpus, i, inbox_bytes + flag_bytes + n_state * sizeof(unsigned), ranks, why)) return false;
        Rank& rank = *ranks[i];
        if (shared) gpus[i]->launches_overlap = false, rank.most_rows = shared_one_shot_ctas / n;
        rank.nccl         = new Nccl{meeting, nullptr, 0, 0, 0};
        rank.view.index   = i;
        rank.view.n       = n;
        rank.view.room    = room;
        rank.view.lost    = rank.lost;
        rank.view.timeout = static_cast<unsigned long long>(seconds * 1e9);
        rank.view.ctas    = shared ? shared_two_shot_ctas : two_shot_ctas;
        rank.view.state   = reinterpret_cast<unsigned*>(static_cast<char*>(rank.memory) + inbox_bytes + flag_bytes);
    }
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++) {
            ranks[i]->view.inbox_of[j] = static_cast<uint4*>(ranks[j]->memory);
            ranks[i]->view.flags_of[j] =
                reinterpret_cast<unsigned*>(static_cast<char*>(ranks[j]->memory) + inbox_bytes);
        }
    return true;
}

namespace {

// From this size on NCCL's own sum moves less than gathering does: each rank sends 2 (n - 1) / n of the message instead of n - 1.
std::int64_t sums_from(int n) { return std::max((std::int64_t(16) << 20) / (std::int64_t(n) * n), std::int64_t(1)); }

constexpr std::size_t most_piece = std::size_t(4) << 20;

// The state of the threads in which ranks join; a thread may outlive the call that waits for it.
struct Joining {
    std::mutex              mutex;
    std::condition_variable changed;
    int                     n_left = 0, error = NcclLibrary::success;
};

// Joins, and sends one message of each kind: the first ones make the connections.
int join_and_try(Rank& rank, Context& gpu, const NcclLibrary& nccl, const NcclLibrary::UniqueId& id) {
    Nccl& mine = *rank.nccl;
    use(gpu);
    int error = nccl.CommInitRank(&mine.communicator, rank.view.n, id, rank.view.index);
    if (error != NcclLibrary::success) return error;
    char* const memory = static_cast<char*>(rank.memory);
    for (const std::size_t bytes : {std::size_t(1) << 10, mine.piece}) {
        error = nccl.AllGather(memory + std::size_t(rank.view.index) * bytes, memory, bytes, NcclLibrary::int8,
                               mine.communicator, gpu.stream);
        if (error != NcclLibrary::success) return error;
        nccl.GroupStart();
        for (int p = 0; p < rank.view.n; p++)
            nccl.Broadcast(memory, memory + std::size_t(p) * mine.piece, bytes, NcclLibrary::int8, p, mine.communicator,
                           gpu.stream);
        error = nccl.GroupEnd();
        if (error != NcclLibrary::success) return error;
        for (const int type : {NcclLibrary::float16, NcclLibrary::float32}) {
            error = nccl.AllReduce(memory, memory, bytes / 4, type, NcclLibrary::sum, mine.communicator, gpu.stream);
            if (error != NcclLibrary::success) return error;
        }
    }
    synchronize(gpu);
    return NcclLibrary::success;
}

} // namespace

bool connect_ranks_by_nccl(Context* const* gpus, int n_local, int first, int n, const NcclId& id, double seconds,
                           Rank** ranks, const char*& why) {
    const NcclLibrary* const nccl = NcclLibrary::get();
    if (nccl == nullptr || !can_reduce(n)) {
        why = nccl == nullptr ? "NCCL (libnccl.so.2) is not installed" : "there are no kernels for this number of them";
        return false;
    }
    setenv("NCCL_NVLS_ENABLE", "0", 0); // NVLink multicast stays off
    NcclLibrary::UniqueId their_id;
    std::memcpy(&their_id, &id, sizeof their_id);
    const auto joining = std::make_shared<Joining>();
    joining->n_left    = n_local;
    for (int i = 0; i < n_local; i++) {
        if (!add_rank(gpus, i, std::size_t(n) * most_piece, ranks, why)) return false;
        Rank& rank      = *ranks[i];
        rank.nccl       = new Nccl{nullptr, nullptr, sums_from(n), 0, most_piece};
        rank.view.index = first + i;
        rank.view.n     = n;
        nccl->GetVersion(&rank.nccl->version);
    }
    for (int i = 0; i < n_local; i++)
        std::thread([joining, nccl, their_id, rank = ranks[i], gpu = gpus[i]] {
            const int        error = join_and_try(*rank, *gpu, *nccl, their_id);
            std::scoped_lock lock(joining->mutex);
            if (error != NcclLibrary::success && joining->error == NcclLibrary::success) joining->error = error;
            joining->n_left--;
            joining->changed.notify_all();
        }).detach();
    std::unique_lock lock(joining->mutex);
    const bool       all =
        joining->changed.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return joining->n_left == 0; });
    if (!all) { // memory that a thread of NCCL still uses is not freed
        why = "the other processes do not come to NCCL's rendezvous";
        return false;
    }
    if (joining->error == NcclLibrary::success) return true;
    why = nccl->GetErrorString(joining->error);
    for (int i = 0; i < n_local; i++) destroy_rank(ranks[i]);
    return false;
}

const char* nccl_failure(const Rank& rank) {
    if (rank.nccl->communicator == nullptr) return "it was left";
    int       error  = NcclLibrary::success;
    const int called = NcclLibrary::get()->CommGetAsyncError(rank.nccl->communicator, &error);
    if (called != NcclLibrary::success) error = called;
    return error == NcclLibrary::success || error == NcclLibrary::in_progress
               ? nullptr
               : NcclLibrary::get()->GetErrorString(error);
}

std::size_t piece_bytes(const Rank& rank) { return rank.nccl->piece; }

const void* gather_pieces(const void* mine, std::size_t bytes, Rank& rank, Context& gpu) {
    const Nccl& nccl = *rank.nccl;
    if (nccl.communicator == nullptr ||
        NcclLibrary::get()->AllGather(mine, rank.memory, bytes, NcclLibrary::int8, nccl.communicator, gpu.stream) != 0)
        gpu.note(cudaErrorUnknown);
    return rank.memory;
}

const void* gather_pieces(const void* mine, const std::size_t* bytes_of, Rank& rank, Context& gpu) {
    const Nccl&              nccl    = *rank.nccl;
    const NcclLibrary* const library = NcclLibrary::get();
    if (nccl.communicator == nullptr) {
        gpu.note(cudaErrorUnknown);
        return rank.memory;
    }
    library->GroupStart();
    for (int p = 0; p < rank.view.n; p++)
        library->Broadcast(mine, static_cast<char*>(rank.memory) + std::size_t(p) * nccl.piece, bytes_of[p],
                           NcclLibrary::int8, p, nccl.communicator, gpu.stream);
    if (library->GroupEnd() != NcclLibrary::success) gpu.note(cudaErrorUnknown);
    return rank.memory;
}

void destroy_rank(Rank* rank) {
    if (rank == nullptr) return;
    leave_nccl(*rank);
    delete rank->nccl;
    release(rank->memory);
    release_host(rank->lost);
    delete rank;
}

bool lost_a_rank(const Rank& rank) { return *const_cast<const volatile int*>(rank.lost) != 0; }

int nccl_version(const Rank& rank) { return rank.nccl->version; }

void leave_nccl(Rank& rank) {
    if (rank.nccl != nullptr && rank.nccl->communicator != nullptr)
        NcclLibrary::get()->CommAbort(rank.nccl->communicator);
    if (rank.nccl != nullptr) rank.nccl->communicator = nullptr;
}

// The message size from which on NCCL sums. On two H200s NCCL took 98 µs for 20 MB, which is also the links' limit for two shots: see
// docs/scale-out.md. With more ranks NCCL's rings use the links better.
void join_nccl(Rank& rank, Context& gpu) {
    const NcclLibrary* const nccl = NcclLibrary::get();
    Nccl&                    mine = *rank.nccl;
    if (nccl == nullptr || !mine.meeting->usable) return;
    if (nccl->CommInitRank(&mine.communicator, rank.view.n, mine.meeting->id, rank.view.index) != 0) {
        mine.communicator = nullptr;
        return;
    }
    // The first sum makes the connections; the inbox is zeros, and remains so.
    const std::size_t inbox_bytes = std::size_t(2 * rank.view.n * rank.view.room) * sizeof(uint4);
    for (const int type : {NcclLibrary::float16, NcclLibrary::float32}) {
        const std::size_t n = inbox_bytes / (type == NcclLibrary::float16 ? 2 : 4);
        if (nccl->AllReduce(rank.memory, rank.memory, n, type, NcclLibrary::sum, mine.communicator, gpu.stream) != 0)
            gpu.note(cudaErrorUnknown);
    }
    synchronize(gpu);
    nccl->GetVersion(&mine.version);
    mine.from = std::int64_t(8) << 20;
    if (const char* const from = std::getenv("QUIRE_NCCL_FROM")) mine.from = std::atoll(from); // bytes, to measure
}

bool nccl_all_reduce(const AllReduce& args, std::int64_t n, Rank& rank, Context& gpu) {
    Nccl& mine = *rank.nccl;
    if (mine.communicator == nullptr || args.x_is_float != args.out_is_float ||
        n * (args.x_is_float ? 4 : 2) < mine.from)
        return false;
    const int me    = rank.view.index;
    const int error = NcclLibrary::get()->AllReduce(args.x.of[me], args.out.of[me], std::size_t(n),
                                                    args.x_is_float ? NcclLibrary::float32 : NcclLibrary::float16,
                                                    NcclLibrary::sum, mine.communicator, gpu.stream);
    if (error != 0) gpu.note(cudaErrorUnknown);
    return true;
}

} // namespace quire::cuda
