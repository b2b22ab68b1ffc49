// quire.compute.cuda.rank: one GPU's side of a model that several GPUs run: its connection to the others, and the operations in which ranks
// meet. **Owns** the connection and the memory for the sum of this rank's parts.
module;

#include "../../../cuda/kernels.h"
#include "../../../cuda/ranks/ranks.h"

export module quire.compute.cuda.rank;

import quire.compute.cuda.fusion;
import quire.compute.cuda.weights;
import quire.compute.ranks.rank_group;
import quire.core.base;

export namespace quire {

class CudaRank {
public:
    CudaRank(cuda::Context& gpu, bool deterministic) : gpu_(gpu), deterministic_(deterministic) {}

    // Connects the ranks of this process, or the local ranks of `group` with those of other processes. Both come after compile().
    static Result<void> connect(std::span<CudaRank* const> ranks, double seconds);
    static Result<void> connect(std::span<CudaRank* const> ranks, const std::shared_ptr<RankGroup>& group);

    // The lowered operations of the program; both outlive the rank. Connecting fills in the addresses of the other ranks.
    void compile(const Program& program, std::span<LoweredOperation> operations, int max_tokens, DeviceMemory& memory);

    // Whether ranks of other processes run the model, too; from connect() on.
    bool spans_processes() const { return group_ != nullptr; }
    bool has_lost_a_rank() const { return rank_ && cuda::lost_a_rank(*rank_); }

    void run(const AllReduce&, const LoweredOperation& op);
    void run(const AllGather& gather, const LoweredOperation& op);
    // Waits until the device has run everything that was launched. A kernel of NCCL waits for ever for a process that is gone: then the kernel
    // is ended.
    void wait_for_device();

private:
    // An operation in which ranks meet: the k-th collective of one rank belongs to the k-th of every other rank. Other operations may differ,
    // because not every rank has a part of every weight. Processes send each other these bytes.
    struct Collective {
        std::int64_t at      = 0; // in the rank's program
        std::int64_t gathers = 0; // else it sums
        std::int64_t first = 0, cols = 0;
        std::int64_t of_floats = 0; // the summands, as far as this rank knows
    };
    struct Destroy {
        void operator()(cuda::Rank* rank) const { cuda::destroy_rank(rank); }
    };
    static std::vector<cuda::Context*> gpus_of(std::span<CudaRank* const> ranks);
    std::vector<Collective>            collectives() const;
    // Takes the types and columns of the other ranks from the collectives of all. Error: the ranks' collectives differ.
    Result<void> join(const std::vector<std::vector<Collective>>& of);
    // The array that this rank sends in an AllReduce: its only part, or the sum of its parts, or zeros if it has none.
    void* sent(const LoweredOperation& op) const {
        return op.parts.n == 1 && op.parts.of[0] != nullptr ? const_cast<void*>(op.parts.of[0]) : sum_of_parts_;
    }

    cuda::Context&                       gpu_;
    bool                                 deterministic_;
    std::unique_ptr<cuda::Rank, Destroy> rank_;  // null: it runs alone
    std::shared_ptr<RankGroup>           group_; // null: all ranks are of this process
    const Program*                       program_ = nullptr;
    std::span<LoweredOperation>          operations_;
    float*                               sum_of_parts_ = nullptr; // of this rank, where AllReduce has several
};

} // namespace quire

module :private;

namespace quire {

void CudaRank::compile(const Program& program, std::span<LoweredOperation> operations, int max_tokens,
                       DeviceMemory& memory) {
    program_    = &program;
    operations_ = operations;
    for (const LoweredOperation& op : operations) {
        if (op.parts.n == 0 || sent(op) != nullptr) continue;
        sum_of_parts_ =
            static_cast<float*>(memory.take(std::size_t(max_tokens) * std::size_t(op.device.cols) * sizeof(float)));
        check(sum_of_parts_ != nullptr, "the GPU has no memory left for the sums of a rank's parts");
    }
}

std::vector<cuda::Context*> CudaRank::gpus_of(std::span<CudaRank* const> ranks) {
    std::vector<cuda::Context*> gpus;
    for (const CudaRank* rank : ranks) gpus.push_back(&rank->gpu_);
    return gpus;
}

Result<void> CudaRank::connect(std::span<CudaRank* const> ranks, double seconds) {
    const int                         n    = int(ranks.size());
    const std::vector<cuda::Context*> gpus = gpus_of(ranks);
    if (n > cuda::max_ranks) return fail("a model runs on up to ", cuda::max_ranks, " GPUs, not on ", n);
    // Larger messages take two shots: with more ranks sooner, as each of them gets everybody's.
    const std::size_t one_shot = (std::size_t(2) << 20) / std::size_t(n * n / 4 > 0 ? n * n / 4 : 1);
    std::array<cuda::Rank*, cuda::max_ranks> made{};
    const char*                              why = nullptr;
    if (!cuda::connect_ranks(gpus.data(), n, one_shot, seconds, made.data(), why))
        return fail_with(ErrorKind::system, "the GPUs cannot work together: ", why);
    std::vector<std::jthread> joining; // all at once: a rank that joins waits for the others
    for (int r = 0; r < n; r++) {
        CudaRank& rank = *ranks[std::size_t(r)];
        rank.rank_.reset(made[std::size_t(r)]);
        if (!rank.deterministic_)
            joining.emplace_back([&rank] {
                cuda::use(rank.gpu_);
                cuda::join_nccl(*rank.rank_, rank.gpu_);
            });
    }
    joining.clear();
    std::vector<std::vector<Collective>> of;
    for (const CudaRank* rank : ranks) of.push_back(rank->collectives());
    for (std::size_t r = 0; r < ranks.size(); r++) {
        if (auto ok = ranks[r]->join(of); !ok) return ok;
        for (std::size_t k = 0; k < of[r].size(); k++) {
            LoweredOperation& op = ranks[r]->operations_[std::size_t(of[r][k].at)];
            for (std::size_t p = 0; p < ranks.size(); p++) {
                const LoweredOperation& its = ranks[p]->operations_[std::size_t(of[p][k].at)];
                op.reduce.x.of[p]           = ranks[p]->sent(its);
                op.reduce.out.of[p]         = its.device.out;
            }
        }
    }
    return {};
}

std::vector<CudaRank::Collective> CudaRank::collectives() const {
    std::vector<Collective> out;
    for (std::size_t i = 0; i < operations_.size(); i++) {
        const LoweredOperation& op     = operations_[i];
        const auto*             gather = std::get_if<AllGather>(&program_->operations[i]);
        if (gather) out.push_back({std::int64_t(i), 1, gather->first, op.device.cols, 0});
        else if (std::holds_alternative<AllReduce>(program_->operations[i]))
            out.push_back({std::int64_t(i), 0, 0, op.device.cols, op.parts.n > 1 || op.parts.is_float});
    }
    return out;
}

Result<void> CudaRank::join(const std::vector<std::vector<Collective>>& of) {
    const std::vector<Collective> mine = collectives();
    for (std::size_t k = 0; k < mine.size(); k++) {
        LoweredOperation& op = operations_[std::size_t(mine[k].at)];
        op.reduce.exact      = deterministic_;
        for (std::size_t p = 0; p < of.size(); p++) {
            if (of[p].size() != mine.size() || of[p][k].gathers != mine[k].gathers)
                return fail("ranks that run different programs");
            if (of[p][k].of_floats) op.reduce.x_is_float = true; // a rank without a part does not know
            op.columns.first[p] = of[p][k].first, op.columns.n[p] = of[p][k].cols;
        }
    }
    return {};
}

Result<void> CudaRank::connect(std::span<CudaRank* const> ranks, const std::shared_ptr<RankGroup>& group) try {
    const auto                        n_local = ranks.size(), n = std::size_t(group->n());
    const std::vector<cuda::Context*> gpus = gpus_of(ranks);
    if (n > cuda::max_ranks) return fail("a model runs on up to ", cuda::max_ranks, " GPUs, not on ", n);
    cuda::NcclId id;
    if (group->first() == 0 && !cuda::make_nccl_id(id))
        return fail_with(
            ErrorKind::system,
            "GPUs of several processes need NCCL (libnccl.so.2): it is not installed, or finds no network");
    // NCCL's id, of which rank 0's counts, then the collectives of these ranks.
    std::vector<Collective> mine;
    for (const CudaRank* rank : ranks) std::ranges::copy(rank->collectives(), std::back_inserter(mine));
    const std::size_t      each = mine.size() / n_local;
    std::vector<std::byte> message(sizeof id + mine.size() * sizeof mine[0]);
    std::memcpy(message.data(), &id, sizeof id);
    std::memcpy(message.data() + sizeof id, mine.data(), message.size() - sizeof id);
    std::vector<std::vector<std::byte>> said    = group->exchange(message);
    said[std::size_t(group->first()) / n_local] = message;
    for (const std::vector<std::byte>& theirs : said)
        if (theirs.size() != message.size()) return fail("ranks that run different programs");
    std::memcpy(&id, said[0].data(), sizeof id);

    std::array<cuda::Rank*, cuda::max_ranks> made{};
    const char*                              why = nullptr;
    if (!cuda::connect_ranks_by_nccl(gpus.data(), int(n_local), group->first(), int(n), id, 60, made.data(), why))
        return fail_with(ErrorKind::system, "the GPUs of ", n / n_local, " processes cannot work together: ", why);
    std::vector<std::vector<Collective>> of(n, std::vector<Collective>(each));
    for (std::size_t p = 0; p < n && each > 0; p++)
        std::memcpy(of[p].data(), said[p / n_local].data() + sizeof id + p % n_local * each * sizeof mine[0],
                    each * sizeof mine[0]);
    for (std::size_t r = 0; r < n_local; r++) {
        CudaRank& rank = *ranks[r];
        rank.rank_.reset(made[r]);
        rank.group_ = group;
        if (auto ok = rank.join(of); !ok) return ok;
        const std::size_t me = std::size_t(group->first()) + r;
        for (const Collective& c : of[me]) {
            LoweredOperation& op = rank.operations_[std::size_t(c.at)];
            op.reduce.x.of[me]   = rank.sent(op);
            op.reduce.out.of[me] = op.device.out;
        }
    }
    return {};
} catch (const std::runtime_error& e) { // a process is gone
    return fail_with(ErrorKind::system, e.what());
}

void CudaRank::wait_for_device() {
    if (!group_) return cuda::synchronize(gpu_);
    constexpr double soon = 1e-3, look = 5e-3,
                     grace     = 1; // seconds; a process that has ended may have sent all that it had to
    double                next = look;
    std::optional<double> lost;
    for (const Stopwatch watch; !cuda::is_idle(gpu_);) {
        const double seconds = watch.seconds();
        if (seconds > soon) std::this_thread::sleep_for(std::chrono::microseconds(20));
        if (seconds < next) continue;
        next              = seconds + look;
        const char* error = cuda::nccl_failure(*rank_);
        if (!lost && (error != nullptr || group_->has_lost_a_process())) lost = seconds;
        if (seconds > group_->seconds())
            group_->fail(group_->first(),
                         cat("no answer of the other processes within ", group_->seconds(), " seconds"));
        else if (!lost || seconds < *lost + grace) continue;
        if (!group_->has_lost_a_process()) group_->fail(group_->first(), cat("NCCL: ", error ? error : "no answer"));
        cuda::leave_nccl(*rank_);
        cuda::synchronize(gpu_);
        throw std::runtime_error(*group_->failure());
    }
}

void CudaRank::run(const AllReduce&, const LoweredOperation& lowered) {
    const cuda::Operation& o = lowered.device;
    if (!rank_) { // alone: the parts' sum
        cuda::sum_parts(lowered.parts, o.out, lowered.reduce.out_is_float, o.rows * o.cols, gpu_);
        return;
    }
    if (sent(lowered) == sum_of_parts_) cuda::sum_parts(lowered.parts, sum_of_parts_, true, o.rows * o.cols, gpu_);
    cuda::all_reduce(lowered.reduce, o.rows, o.cols, *rank_, gpu_);
}

void CudaRank::run(const AllGather& gather, const LoweredOperation& op) {
    check(rank_ != nullptr, "all_gather: one rank");
    cuda::all_gather(op.device.x, op.columns, op.reduce.out, (*program_)[gather.out].cols, op.device.rows,
                     op.f32 ? 4 : 2, *rank_, gpu_);
}

} // namespace quire
