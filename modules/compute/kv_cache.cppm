// quire.compute.kv_cache: the K and V arrays of every layer in blocks, on the device and, for swapping, on the host.
// **Owns** their memory; the block manager knows which block holds what.
export module quire.compute.kv_cache;

import quire.compute.backend;
import quire.compute.memory;
import quire.core.base;
import quire.core.std;
import quire.core.tensor;
import quire.model_file.config;
import quire.paging.block;

export namespace quire {

class KvCache {
public:
    // Allocates memory for n_blocks × block_size tokens on the device and for n_swap blocks on the host. Error: how much did
    // not fit.
    static Result<KvCache> create(Backend& backend, const ModelConfig& config, DType type, int n_blocks, int block_size,
                                  int n_swap = 0);

    std::span<const KvLayer> layers() const { return layers_; }
    std::size_t              bytes() const { return memory_.bytes(); }
    std::size_t              swap_bytes() const { return swap_layers_.empty() ? 0 : swap_memory_.bytes(); }
    std::size_t              block_bytes() const; // of one block across all layers: what a swap moves

    // Runs the block moves of a step, before its tokens.
    void move_blocks(Backend& backend, const BlockMoves& moves) const;

    // The bytes of one token's K and V across all layers (the paper, section 3).
    static std::size_t bytes_per_token(const ModelConfig& config, DType type);

private:
    Buffer               memory_, swap_memory_;
    std::vector<KvLayer> layers_, swap_layers_;
};

} // namespace quire

module :private;

namespace quire {

std::size_t KvCache::bytes_per_token(const ModelConfig& config, DType type) {
    return std::size_t(config.n_layers) * row_bytes(type, config.cache_width());
}

Result<KvCache> KvCache::create(Backend& backend, const ModelConfig& config, DType type, int n_blocks, int block_size,
                                int n_swap) {
    KvCache cache;
    for (const bool swap : {false, true}) {
        const int n = swap ? n_swap : n_blocks;
        if (n == 0) continue;
        KvLayer           shape{nullptr,         nullptr,          type, n, block_size, config.n_kv_heads,
                      config.head_dim, config.value_dim, swap};
        const std::size_t array = shape.block_bytes() * std::size_t(n), layer = config.latent ? array : 2 * array,
                          bytes = layer * std::size_t(config.n_layers);
        Result<Buffer> memory   = swap ? backend.allocate_host(bytes) : backend.allocate(bytes);
        if (!memory)
            return fail_with(ErrorKind::system, swap ? "the swap pool needs " : "the KV cache needs ", n, " blocks of ",
                             block_size, " tokens at ", bytes_per_token(config, type),
                             " bytes each: ", memory.error().message);
        auto* at = static_cast<std::byte*>(memory->data());
        for (int i = 0; i < config.n_layers; i++, at += layer) {
            shape.k = at;
            shape.v = config.latent ? nullptr : at + array;
            (swap ? cache.swap_layers_ : cache.layers_).push_back(shape);
        }
        (swap ? cache.swap_memory_ : cache.memory_) = std::move(*memory);
    }
    return cache;
}

std::size_t KvCache::block_bytes() const {
    return layers_.empty() ? 0 : (layers_[0].latent() ? 1 : 2) * layers_[0].block_bytes() * layers_.size();
}

void KvCache::move_blocks(Backend& backend, const BlockMoves& moves) const {
    backend.copy_blocks(moves.swap_out, layers_, swap_layers_);
    backend.copy_blocks(moves.swap_in, swap_layers_, layers_);
    backend.copy_blocks(moves.copies, layers_, layers_);
}

} // namespace quire
