// Makes GPUs of this process ranks: peer access, the memory through which they reach each other, NCCL.
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <memory>

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
    int (*AllReduce)(const void*, void*, std::size_t, int, int, Communicator, cudaStream_t) = nullptr;
    static constexpr int float16 = 6, float32 = 7, sum = 0;

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
                               find(all->AllReduce, "ncclAllReduce");
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
    std::int64_t              from         = 0; // this rank's copy; 0: NCCL is not used
    int                       version      = 0;
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
            if (i == j) continue;
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

} // namespace

void announce_ranks() { setenv("CUDA_MODULE_LOADING", "EAGER", 0); }

bool connect_ranks(Context* const* gpus, int n, std::size_t bytes, double seconds, Rank** ranks, const char*& why) {
    if (!can_reduce(n)) {
        why = "there are no kernels for this number of them";
        return false;
    }
    if (!enable_peers(gpus, n, why)) return false;
    const std::int64_t room          = std::int64_t(bytes) / packet_bytes;
    const std::size_t  inbox_bytes   = std::size_t(2 * n * room) * sizeof(uint4),
                      flag_bytes     = std::size_t(2 * two_shot_ctas * n) * sizeof(unsigned);
    const auto               meeting = std::make_shared<Meeting>();
    const NcclLibrary* const nccl    = NcclLibrary::get();
    setenv("NCCL_NVLS_ENABLE", "0", 0); // NVLink multicast stays off
    meeting->usable = nccl != nullptr && nccl->GetUniqueId(&meeting->id) == 0;
    for (int i = 0; i < n; i++) {
        auto& rank = *(ranks[i] = new Rank);
        use(*gpus[i]);
        gpus[i]->is_rank = true;
        rank.memory      = gpus[i]->take(inbox_bytes + flag_bytes + n_state * sizeof(unsigned));
        if (cudaHostAlloc(reinterpret_cast<void**>(&rank.lost), sizeof(int), cudaHostAllocPortable) != cudaSuccess)
            rank.lost = nullptr;
        if (rank.memory == nullptr || rank.lost == nullptr) {
            why = "there is no memory left for what they send each other";
            for (int j = 0; j <= i; j++) destroy_rank(ranks[j]);
            return false;
        }
        *rank.lost         = 0;
        rank.nccl          = new Nccl{meeting, nullptr, 0, 0};
        rank.view.index    = i;
        rank.view.n        = n;
        rank.view.room     = room;
        rank.view.lost     = rank.lost;
        rank.view.patience = static_cast<unsigned long long>(seconds * 1e9);
        rank.view.state    = reinterpret_cast<unsigned*>(static_cast<char*>(rank.memory) + inbox_bytes + flag_bytes);
    }
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++) {
            ranks[i]->view.inbox_of[j] = static_cast<uint4*>(ranks[j]->memory);
            ranks[i]->view.flags_of[j] =
                reinterpret_cast<unsigned*>(static_cast<char*>(ranks[j]->memory) + inbox_bytes);
        }
    return true;
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

// From this size on. Measured on two H200s NCCL took 98 µs for 20 MB, which is what the links allow of two shots, too: see
// docs/scale-out.md. With more ranks its rings use the links better.
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
