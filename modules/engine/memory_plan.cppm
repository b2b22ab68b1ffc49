// quire.engine.memory_plan: from the options and the memory of the devices: how many tokens a step has, how long a sequence may be, how many
// blocks the pools have. Owns nothing.
export module quire.engine.memory_plan;

import quire.compute.kv_cache;
import quire.core.base;
import quire.engine.options;
import quire.paging.cache_layout;
import quire.schedule.checkpoints;

export namespace quire {

class MemoryPlan {
public:
    // Fills in `options`, which must outlive the plan. `rank_config`: of one rank's part of the model. `ranks`: the devices of this process.
    MemoryPlan(EngineOptions& options, const ModelConfig& config, const ModelConfig& rank_config,
               std::vector<Backend*> ranks, const std::shared_ptr<ProcessGroup>& processes);

    // Before the weights are loaded. Error: how much memory the pools that the options ask for would need, and how much there is.
    Result<void> check_asked();
    // Once the weights are there: the longest sequence that the workspaces of a step have to hold. Workspaces come before the pool, so that
    // the pool takes the memory that is really left.
    int most_context() const {
        return context_with(o_.kv_blocks > 0 ? std::size_t(o_.kv_blocks) - for_drafts_ : affordable_blocks());
    }
    // Once weights and workspaces are there: decides the context and the blocks of both pools, alike in all processes.
    Result<void> decide();

private:
    Result<void>          check_room(std::size_t kv_blocks) const;
    std::size_t           affordable_blocks() const;
    int                   context_with(std::size_t blocks) const;
    std::size_t           blocks_for(int tokens) const;
    std::size_t           tier_block_bytes() const; // with the bookkeeping
    std::size_t           tier_asked() const;
    Result<std::uint64_t> agree(std::uint64_t mine) const;

    EngineOptions&                o_;
    const ModelConfig&            config_;
    std::vector<Backend*>         ranks_;
    std::shared_ptr<ProcessGroup> processes_;      // or null
    std::size_t                   block_bytes_;    // of one rank's part of a block
    std::size_t                   swap_asked_ = 0; // swap blocks
    std::size_t                   for_drafts_ =
        0; // of the KV blocks that were asked for, those of the states before steps with draft tokens
};

} // namespace quire

module :private;

namespace quire {

constexpr int most_positions = std::numeric_limits<std::int32_t>::max(); // of all blocks: a slot is an int

// Bytes of the host's bookkeeping for a block of a pool.
std::size_t notes_of_block(int block_size) { return 512 + 8 * std::size_t(block_size); }

// The most tokens of a step, where the options do not say. On a GPU more tokens make better use of the weights that are read, but decoding
// requests wait longer for a prompt: a step of 4,096 tokens takes a tenth of a second on an H200 with eight billion weights.
int tokens_of_step(const EngineOptions& o, const ModelConfig& c, const Backend& backend) {
    if (o.device != "cuda") return 256;
    if (o.deterministic) return 512; // it keeps partial sums of each token
    const double ff =
        c.experts.n > 0 ? double(c.experts.used) * c.experts.ff_size + c.experts.shared_ff_size : c.ff_size;
    double columns = 0; // of the weights that a token is multiplied with
    for (const LayerConfig& l : c.layers)
        columns += double(l.head_dim + l.value_dim) * (l.attends() ? c.n_heads + l.n_kv_heads : 0) + 3 * ff;
    const double weights = columns * c.hidden_size;
    const bool   room = backend.memory_available() >= std::size_t(40) << 30; // the activations of 8B take 0.5 GiB more
    return room && weights / o.tensor_parallel < 9e9 ? 4096 : 2048;
}

MemoryPlan::MemoryPlan(EngineOptions& options, const ModelConfig& config, const ModelConfig& rank_config,
                       std::vector<Backend*> ranks, const std::shared_ptr<ProcessGroup>& processes)
    : o_(options), config_(config), ranks_(std::move(ranks)), processes_(processes) {
    if (o_.max_batch_tokens == 0)
        o_.max_batch_tokens = std::max(o_.max_sequences, tokens_of_step(o_, config, *ranks_[0]));
    // Systems that reserve contiguous memory give nothing back: as if no window were shorter than the context.
    const int longest = o_.context > 0 ? o_.context : config.context_length;
    o_.layout         = cache_layout(rank_config, o_.kv_type, o_.reservations ? 1 : longest, o_.block_size);
    block_bytes_      = KvCache::block_bytes(rank_config, o_.kv_type, o_.layout, o_.block_size);
    // On a CPU it takes some hundred times as long to compute tokens again: the states may take more memory than K and V.
    const std::size_t share = o_.device == "cpu" ? 4 : 1;
    if (o_.checkpoint_interval == 0)
        o_.checkpoint_interval =
            checkpoint_interval(KvCache::state_bytes(rank_config),
                                share * KvCache::bytes_per_token(rank_config, o_.kv_type), o_.block_size);
}

std::size_t MemoryPlan::blocks_for(int tokens) const {
    return std::size_t(o_.layout.blocks_at_once(tokens, o_.block_size));
}

std::size_t MemoryPlan::tier_block_bytes() const {
    return block_bytes_ * ranks_.size() + notes_of_block(o_.block_size);
}

// Blocks of the tier in host memory: at most one for each two positions.
std::size_t MemoryPlan::tier_asked() const {
    const auto bytes = std::size_t(std::max<std::int64_t>(o_.kv_host_bytes, 0));
    return std::min(bytes / tier_block_bytes(), std::size_t(most_positions / 2 / o_.block_size));
}

// The smallest value of all processes.
Result<std::uint64_t> MemoryPlan::agree(std::uint64_t mine) const {
    return processes_ ? processes_->all_reduce_min(mine) : mine;
}

Result<void> MemoryPlan::check_asked() {
    // A model without K and V has blocks for its states alone. A step with draft tokens keeps the state before it, too. The states of all
    // sequences fit beside the watermark.
    const auto per_entry = std::size_t(std::max(o_.layout.blocks_per_entry(), 1)),
               states    = std::size_t(o_.layout.blocks_per_unit()) * std::size_t(o_.max_sequences);
    const auto above     = [&](std::size_t n) { return std::size_t(std::ceil(double(n) / (1 - o_.watermark))); };
    const auto plain     = std::size_t(o_.kv_blocks) * per_entry + above(states),
               kv_asked  = o_.kv_blocks == 0 ? 0
                           : o_.drafts.on    ? plain + above(2 * states) - above(states)
                                             : plain;
    for_drafts_          = kv_asked - std::min(kv_asked, plain); // the context does not depend on drafts
    swap_asked_          = std::size_t(std::max(o_.swap_blocks, 0)) * per_entry;
    if (auto ok = check_room(kv_asked > 0 ? kv_asked : blocks_for(o_.context)); !ok) return ok;
    if (swap_asked_ > std::size_t(most_positions))
        return fail_with(ErrorKind::limit, swap_asked_, " swap blocks are more than there can be");
    o_.kv_blocks = int(kv_asked);
    if (o_.swap_blocks > 0) o_.swap_blocks = int(swap_asked_);
    return {};
}

std::string in_gib(std::size_t bytes) {
    char       text[32];
    const bool small = bytes < std::size_t(1) << 30;
    std::snprintf(text, sizeof text, "%.1f %s", double(bytes) / double(small ? 1 << 20 : 1 << 30),
                  small ? "MiB" : "GiB");
    return text;
}

// Error: there is not enough memory for kv_blocks blocks on the device and for the swap blocks that were asked for, with the host's
// bookkeeping for each block.
Result<void> MemoryPlan::check_room(std::size_t kv_blocks) const {
    const EngineOptions& o = o_;
    if (kv_blocks > std::size_t(most_positions / o.block_size))
        return fail_with(ErrorKind::limit, kv_blocks, " KV blocks of ", o.block_size, " tokens hold more than ",
                         most_positions, " tokens, the most there can be");
    const bool        on_host = o.device == "cpu";
    const std::size_t tier    = tier_asked();
    const std::size_t notes   = (kv_blocks + swap_asked_ + tier) * notes_of_block(o.block_size);
    const std::size_t ranks   = std::size_t(o.tensor_parallel / o.processes.n); // of this process
    const std::size_t pool    = kv_blocks * block_bytes_ * (on_host ? ranks : 1),
                      swap = swap_asked_ * block_bytes_ * ranks, kept = tier * block_bytes_ * ranks;
    const std::size_t host   = (on_host ? pool : 0) + swap + kept + notes;
    const auto        refuse = [&](std::size_t wanted, std::size_t left, std::string_view whose) {
        const std::string context = o.context > 0 ? cat(" for a context of ", o.context) : "";
        return fail_with(ErrorKind::limit,
                         pool > 0
                                    ? cat(kv_blocks, " KV blocks of ", o.block_size, " tokens", context, ": ", in_gib(pool),
                                          " at ", block_bytes_ / std::size_t(o.block_size), " bytes a token; ")
                                    : "",
                         swap > 0 ? cat(swap_asked_, " swap blocks: ", in_gib(swap), "; ") : "",
                         kept > 0 ? cat("blocks kept in host memory: ", in_gib(kept), "; ") : "", "with bookkeeping ",
                                in_gib(wanted), ", and ", whose, " has ", in_gib(left), " left",
                         o.set_aside > 0 ? cat(" beside ", in_gib(o.set_aside), " for another model") : "");
    };
    const auto beside = [&](std::size_t room) { return room - std::min(room, o.set_aside); };
    if (const std::size_t left = beside(ranks_[0]->memory_available()); !on_host && pool > left)
        return refuse(pool, left, "the GPU");
    const std::size_t free = available_memory();
    if (const std::size_t left = on_host ? beside(free) : free; host > left) return refuse(host, left, "the machine");
    return {};
}

// KV blocks that every rank has memory for.
std::size_t MemoryPlan::affordable_blocks() const {
    std::size_t n = std::size_t(most_positions / o_.block_size);
    for (const Backend* rank : ranks_) {
        const auto beside = [&](std::size_t all) { return all - std::min(all, o_.set_aside); };
        // On a CPU a cache takes a third of what is free, at most a part of the machine: that part is not less beside other models.
        std::size_t room = rank->memory_for_cache();
        room             = o_.device == "cpu" ? std::min(room, beside(available_memory()) / 3) : beside(room);
        n                = std::min(n, std::size_t(double(room) * o_.pool_share) / block_bytes_);
    }
    n /= o_.device == "cpu" ? ranks_.size() : std::size_t(o_.ranks_per_gpu); // the ranks share the memory
    return std::max(n, std::size_t(1));
}

// The context that was asked for, or the longest one that so many blocks are enough for.
int MemoryPlan::context_with(std::size_t blocks) const {
    if (o_.context > 0) return o_.context;
    return std::max(o_.layout.longest(std::int64_t(blocks), o_.block_size, config_.context_length), 1);
}

Result<void> MemoryPlan::decide() {
    const Result<std::uint64_t> affordable = agree(affordable_blocks());
    if (!affordable) return std::unexpected(affordable.error());
    o_.context = context_with(o_.kv_blocks > 0 ? std::size_t(o_.kv_blocks) - for_drafts_ : std::size_t(*affordable));
    if (o_.kv_blocks == 0) {
        const int entries = (o_.context + o_.block_size - 1) / o_.block_size;
        const int states = o_.context / std::max(o_.checkpoint_interval, 1) + 3; // of a sequence and of its checkpoints
        const std::size_t all = (std::size_t(entries) * std::size_t(o_.layout.blocks_per_entry()) +
                                 std::size_t(states) * std::size_t(o_.layout.blocks_per_unit())) *
                                std::size_t(o_.max_sequences);
        o_.kv_blocks = int(std::max(blocks_for(o_.context), std::min(std::size_t(*affordable), all)));
    }
    // As many as blocks on the device (the paper, section 4.5), but no more than a few GiB of pinned memory.
    constexpr std::size_t most_pinned = std::size_t(4) << 30;
    if (o_.swap_blocks < 0) {
        const std::size_t all   = block_bytes_ * ranks_.size(); // of a block
        const std::size_t there = available_memory(), pool = std::size_t(o_.kv_blocks) * all;
        const std::size_t most =
            o_.device == "cuda" ? std::min(most_pinned, there / 2) : (there - std::min(there, pool)) / 2;
        const Result<std::uint64_t> n = agree(std::min(std::size_t(o_.kv_blocks), most / all));
        if (!n) return std::unexpected(n.error());
        o_.swap_blocks = int(*n);
    }
    // The blocks of a small model are so small that a limit of bytes alone would allow millions of them, whose bookkeeping takes seconds to
    // set up.
    constexpr std::size_t most_tier_blocks = std::size_t(1) << 18;
    if (o_.kv_host_bytes < 0)
        o_.kv_host_bytes = o_.device == "cuda" || o_.keeps_files()
                               ? std::int64_t(std::min({std::size_t(8) << 30, available_memory() / 8,
                                                        most_tier_blocks * tier_block_bytes()}))
                               : 0;
    const Result<std::uint64_t> tier = agree(tier_asked());
    if (!tier) return std::unexpected(tier.error());
    o_.tier_blocks = int(*tier);
    return check_room(std::size_t(o_.kv_blocks)); // once more, now that the weights are there
}

} // namespace quire
