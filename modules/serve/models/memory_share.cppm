// quire.serve.models.memory_share: the memory that a model needs before it is loaded, and its share beside the models that are loaded later.
// Owns nothing.
export module quire.serve.models.memory_share;

import quire.core.base;
import quire.engine.load_estimate;
import quire.engine.options;

export namespace quire {

// Bytes, of the memory where the model computes.
struct MemoryNeeds {
    std::size_t weights = 0;
    std::size_t pool    = 0;     // of a KV pool that is just large enough
    std::size_t other   = 0;     // the blocks that are swapped, and the host tier
    std::size_t block   = 0;     // of the pool
    std::size_t blocks  = 0;     // of the tokens that there has to be room for
    bool        on_host = false; // the model computes on the CPU

    std::size_t all() const { return weights + pool + (on_host ? other : 0); }
};
MemoryNeeds needs_of(const LoadEstimate& estimate, const EngineOptions& engine);

struct MemoryShare {
    std::size_t bytes = 0; // of memory for all models; 0: what the device has
    int         most  = 1; // models at once
    int         left  = 1; // models of these that are not loaded yet, this one included
    std::size_t host  = 0; // of the other models' pools on the host, whose pages may not be there yet
};
// Limits the memory that the engine takes to its share.
void share_memory(EngineOptions& engine, const MemoryNeeds& needs, const MemoryShare& share);

} // namespace quire

module :private;

namespace quire {

constexpr int least_tokens = 2048; // of context, that a model without --ctx-size has to have room for

MemoryNeeds needs_of(const LoadEstimate& estimate, const EngineOptions& engine) {
    const int   least = engine.context > 0 ? engine.context : std::min(estimate.trained, least_tokens);
    MemoryNeeds needs;
    needs.weights = estimate.all_weight_bytes();
    needs.block   = std::size_t(engine.block_size) * estimate.kv_bytes_per_token;
    needs.blocks  = (std::size_t(least) + std::size_t(engine.block_size) - 1) / std::size_t(engine.block_size);
    needs.pool    = engine.kv_blocks > 0 ? std::size_t(engine.kv_blocks) * needs.block
                                         : std::size_t(least) * estimate.kv_bytes_per_token + estimate.state_bytes;
    needs.other   = std::size_t(std::max(engine.swap_blocks, 0)) * needs.block +
                  std::size_t(std::max<std::int64_t>(engine.kv_host_bytes, 0));
    needs.on_host = estimate.device == "cpu";
    return needs;
}

void share_memory(EngineOptions& engine, const MemoryNeeds& needs, const MemoryShare& share) {
    engine.pool_share /= share.left;
    if (needs.on_host) engine.set_aside = share.host;
    if (share.bytes == 0 || engine.kv_blocks > 0 || needs.block == 0) return;
    const std::size_t one  = share.bytes / std::size_t(share.most);
    const std::size_t room = std::max(one - std::min(one, needs.weights), needs.pool);
    const std::size_t per_pair =
        engine.swap_blocks < 0 && needs.on_host ? 2 : 1; // a block may have one of the swap beside it
    engine.kv_blocks = int(std::clamp<std::size_t>(room / per_pair / needs.block, needs.blocks, 1 << 24));
}

} // namespace quire
