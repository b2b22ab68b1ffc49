// quire.compute.kv_cache: the K and V arrays of the layers in blocks, on the device and, for swapping, on the host.
// **Owns** their memory. The block manager knows whose tokens a block holds.
export module quire.compute.kv_cache;

export import quire.compute.backend;
import quire.core.base;
export import quire.core.tensor;
export import quire.model_file.config;
import quire.paging.cache_layout;

export namespace quire {

// The groups of a model's layers (quire.paging.cache_layout), with keys and values of a type and sequences of at most `context`
// tokens. Where prompts are computed whole, all layers keep all positions.
CacheLayout cache_layout(const ModelConfig& config, DType type, int context);

class KvCache {
public:
    // Allocates n_blocks blocks of block_size tokens on the device and n_swap on the host. A layout without layers means one group of all
    // layers. Error: how much did not fit.
    static Result<KvCache> create(Backend& backend, const ModelConfig& config, DType type, int n_blocks, int block_size,
                                  int n_swap = 0, const CacheLayout& layout = {});

    std::span<const KvLayer>    layers() const { return layers_; } // of the model
    std::span<const StateLayer> states() const { return states_; } // likewise; empty where no layer has a state
    std::size_t                 bytes() const { return memory_.bytes(); }

    // Runs the block moves of a step, before its tokens.
    void move_blocks(Backend& backend, const BlockMoves& moves) const;

    // The bytes of one token's K and V across all layers (the paper, section 3).
    static std::size_t bytes_per_token(const ModelConfig& config, DType type);
    // The bytes of a block: block_size tokens in layers_per_block layers.
    static std::size_t block_bytes(const ModelConfig& config, DType type, const CacheLayout& layout, int block_size);

private:
    Buffer                  memory_, swap_memory_;
    std::vector<KvLayer>    layers_;
    std::vector<StateLayer> states_;
    // The arrays of K and V, one for each layer of a block: layer i of a group uses array i % layers_per_block.
    std::vector<KvLayer> arrays_, swap_arrays_;
};

} // namespace quire

module :private;

namespace quire {

CacheLayout cache_layout(const ModelConfig& config, DType type, int context) {
    std::vector<LayerCache> layers;
    for (const LayerConfig& l : config.layers) {
        LayerCache& cache = layers.emplace_back();
        cache.window      = config.family && config.family->encoder ? 0 : l.window;
        cache.arrays.push_back({type, l.n_kv_heads, l.head_dim});
        if (!config.latent) cache.arrays.push_back({type, l.n_kv_heads, l.value_dim});
    }
    return make_cache_layout(layers, context);
}

std::size_t KvCache::bytes_per_token(const ModelConfig& config, DType type) {
    std::size_t bytes = 0;
    for (const LayerConfig& l : config.layers) bytes += row_bytes(type, config.cache_width(l));
    return bytes;
}

std::size_t KvCache::block_bytes(const ModelConfig& config, DType type, const CacheLayout& layout, int block_size) {
    return std::size_t(layout.layers_per_block) * row_bytes(type, config.cache_width(config.layers.at(0))) *
           std::size_t(block_size);
}

Result<KvCache> KvCache::create(Backend& backend, const ModelConfig& config, DType type, int n_blocks, int block_size,
                                int n_swap, const CacheLayout& given) {
    const CacheLayout  layout = given.groups[0].layers.empty() ? cache_layout(config, type, 1) : given;
    const LayerConfig& heads  = config.layers.at(0);
    KvCache            cache;
    for (const bool swap : {false, true}) {
        const int n = swap ? n_swap : n_blocks;
        if (n == 0) continue;
        KvLayer shape{nullptr, nullptr, type, n, block_size, heads.n_kv_heads, heads.head_dim, heads.value_dim, swap};
        const std::size_t array = shape.block_bytes() * std::size_t(n), layer = config.latent ? array : 2 * array,
                          bytes = layer * std::size_t(layout.layers_per_block);
        Result<Buffer> memory   = swap ? backend.allocate_host(bytes) : backend.allocate(bytes);
        if (!memory)
            return fail_with(ErrorKind::system, swap ? "the swap pool needs " : "the KV cache needs ", n, " blocks of ",
                             block_size, " tokens at ",
                             block_bytes(config, type, layout, block_size) / std::size_t(block_size),
                             " bytes each: ", memory.error().message);
        auto* at = static_cast<std::byte*>(memory->data());
        for (int i = 0; i < layout.layers_per_block; i++, at += layer) {
            shape.k = at;
            shape.v = config.latent ? nullptr : at + array;
            (swap ? cache.swap_arrays_ : cache.arrays_).push_back(shape);
        }
        (swap ? cache.swap_memory_ : cache.memory_) = std::move(*memory);
    }
    cache.layers_.resize(config.layers.size());
    for (std::size_t g = 0; g < layout.groups.size(); g++)
        for (int i = 0; int layer : layout.groups[g].layers) {
            KvLayer& of = cache.layers_[std::size_t(layer)];
            of          = cache.arrays_[std::size_t(i % layout.layers_per_block)];
            of.group    = int(g);
            of.part     = i++ / layout.layers_per_block;
        }
    return cache;
}

void KvCache::move_blocks(Backend& backend, const BlockMoves& moves) const {
    backend.copy_blocks(moves.swap_out, arrays_, swap_arrays_);
    backend.copy_blocks(moves.swap_in, swap_arrays_, arrays_);
    backend.copy_blocks(moves.copies, arrays_, arrays_);
}

} // namespace quire
