// quire.compute.kv_cache: what the layers remember, in blocks, on the device and, for swapping, on the host: K and V, and recurrent states.
// **Owns** their memory. The block manager knows whose tokens a block holds.
export module quire.compute.kv_cache;

export import quire.compute.backend;
import quire.core.base;
export import quire.core.tensor;
export import quire.model_file.config;
export import quire.paging.cache_layout;

export namespace quire {

// The groups of a model's layers (quire.paging.cache_layout), with keys and values of these types, blocks of `block_size` tokens and sequences of
// at most `context` tokens. Where prompts are computed whole, all layers keep all positions. `config`: of one rank's part of the model; all
// ranks have as many heads, and so the same layout.
CacheLayout cache_layout(const ModelConfig& config, KvTypes types, int context, int block_size = 16);

// In how many ways the layers differ in what they remember: in the shape of K and V, or in having a state. Each takes a cache group.
int cache_shapes(const ModelConfig& config);
// Whether there is a layout. `path`: of the model's file, for the error: no layer remembers anything, or there are too many shapes.
Result<void> check_cache_shapes(const std::string& path, const ModelConfig& config);

class KvCache {
public:
    // Allocates n_blocks blocks of block_size tokens on the device and n_swap on the host. A layout without layers means that every layer
    // keeps all positions. Error: how much did not fit.
    static Result<KvCache> create(Backend& backend, const ModelConfig& config, KvTypes types, int n_blocks,
                                  int block_size, int n_swap = 0, const CacheLayout& layout = {});

    std::span<const KvLayer>    layers() const { return layers_; } // of the model
    std::span<const StateLayer> states() const { return states_; } // likewise; empty where no layer has a state
    std::span<const BlockArray> arrays() const { return arrays_; } // of the pool on the device, for copies
    std::size_t                 bytes() const { return memory_.bytes(); }

    // Runs the block moves of a step, before its tokens.
    void move_blocks(Backend& backend, const BlockMoves& moves) const;

    // Appends the memory of a block of the host pool, in pieces.
    void append_host_block(BlockId block, std::vector<std::span<std::byte>>& pieces) const;

    // The bytes of one token's K and V, and of their scales, across all layers (the paper, section 3).
    static std::size_t bytes_per_token(const ModelConfig& config, KvTypes types);
    // The bytes of a sequence's recurrent state across all layers.
    static std::size_t state_bytes(const ModelConfig& config);
    // The bytes of a block of the pool: in all layers that share a block.
    static std::size_t block_bytes(const ModelConfig& config, KvTypes types, const CacheLayout& layout, int block_size);

private:
    void place(const ModelConfig& config, KvTypes types, const CacheLayout& layout, int n_blocks, int block_size);

    Buffer                  memory_, swap_memory_;
    std::vector<KvLayer>    layers_;
    std::vector<StateLayer> states_;
    std::vector<BlockArray> arrays_, swap_arrays_;
};

} // namespace quire

module :private;

namespace quire {

// K and V of a layer, then the scales of quantised arrays. A latent row has the type of K and two scales: of the value, and of the rest.
std::vector<CacheArray> arrays_of(const ModelConfig& config, const LayerConfig& l, KvTypes types) {
    std::vector<CacheArray> arrays{{types.k, l.n_kv_heads, l.head_dim}};
    if (!config.latent) arrays.push_back({types.v, l.n_kv_heads, l.value_dim});
    if (has_scales(types.k)) arrays.push_back({DType::F32, l.n_kv_heads, config.latent ? 2 : 1});
    if (has_scales(types.v) && !config.latent) arrays.push_back({DType::F32, l.n_kv_heads, 1});
    return arrays;
}

CacheLayout cache_layout(const ModelConfig& config, KvTypes types, int context, int block_size) {
    std::vector<LayerCache> layers;
    for (const LayerConfig& l : config.layers) {
        LayerCache& cache = layers.emplace_back();
        cache.window      = config.family && config.family->encoder ? 0 : l.window;
        cache.state       = l.state.bytes();
        if (l.keeps_kv()) cache.arrays = arrays_of(config, l, types);
    }
    return make_cache_layout(layers, context, block_size);
}

int cache_shapes(const ModelConfig& config) {
    std::set<std::tuple<int, int, int>> shapes;
    for (const LayerConfig& l : config.layers)
        if (l.keeps_kv()) shapes.insert({l.n_kv_heads, l.head_dim, l.value_dim});
    return int(shapes.size()) + std::ranges::any_of(config.layers, &LayerConfig::keeps_state);
}

Result<void> check_cache_shapes(const std::string& path, const ModelConfig& config) {
    const int n = cache_shapes(config);
    if (n == 0) return fail(path, ": no layer has keys and values or a recurrent state");
    if (n > most_cache_groups)
        return fail(path, ": the layers have keys, values and states of ", n, " different shapes; quire has room for ",
                    most_cache_groups);
    return {};
}

std::size_t KvCache::bytes_per_token(const ModelConfig& config, KvTypes types) {
    std::size_t bytes = 0;
    for (const LayerConfig& l : config.layers)
        if (l.keeps_kv())
            for (const CacheArray& array : arrays_of(config, l, types)) bytes += array.bytes(1);
    return bytes;
}

std::size_t KvCache::state_bytes(const ModelConfig& config) {
    std::size_t bytes = 0;
    for (const LayerConfig& l : config.layers) bytes += l.state.bytes();
    return bytes;
}

std::size_t KvCache::block_bytes(const ModelConfig& config, KvTypes types, const CacheLayout& layout, int block_size) {
    if (layout.block_bytes > 0) return layout.block_bytes;
    const CacheGroup&  group = layout.groups[0];
    const LayerConfig& one   = config.layers.at(std::size_t(group.layers.at(0)));
    std::size_t        layer = 0;
    for (const CacheArray& array : arrays_of(config, one, types)) layer += array.bytes(block_size);
    return std::size_t(group.layers_per_block) * layer;
}

// The arrays of a pool, for copies. Where blocks are contiguous they are cut into equal parts, which are copied side by side.
std::vector<BlockArray> arrays_of(const CacheLayout& layout, std::size_t block_bytes, int n_kv_arrays,
                                  std::byte* memory, int n_blocks, bool on_host) {
    const bool contiguous = layout.block_bytes > 0;
    int        n          = contiguous ? most_block_pieces : n_kv_arrays;
    while (contiguous && block_bytes % (std::size_t(n) * 256) != 0) n--;
    const std::size_t       bytes = block_bytes / std::size_t(n);
    std::vector<BlockArray> arrays;
    for (std::size_t i = 0; i < std::size_t(n); i++)
        arrays.push_back({memory + i * bytes * (contiguous ? 1 : std::size_t(n_blocks)), bytes,
                          contiguous ? block_bytes : bytes, on_host});
    return arrays;
}

Result<KvCache> KvCache::create(Backend& backend, const ModelConfig& config, KvTypes types, int n_blocks,
                                int block_size, int n_swap, const CacheLayout& given) {
    const CacheLayout layout = given.groups[0].layers.empty() ? cache_layout(config, types, 1, block_size) : given;
    const std::size_t block  = block_bytes(config, types, layout, block_size);
    KvCache           cache;
    for (const bool swap : {false, true}) {
        const int n = swap ? n_swap : n_blocks;
        if (n == 0) continue;
        const std::size_t bytes  = block * std::size_t(n);
        Result<Buffer>    memory = swap ? backend.allocate_host(bytes) : backend.allocate(bytes);
        if (!memory)
            return fail_with(ErrorKind::system, swap ? "the swap pool needs " : "the KV cache needs ", n, " blocks of ",
                             block_size, " tokens at ", block / std::size_t(block_size),
                             " bytes each: ", memory.error().message);
        (swap ? cache.swap_arrays_ : cache.arrays_) =
            arrays_of(layout, block, layout.groups[0].layers_per_block * (config.latent ? 1 : 2),
                      static_cast<std::byte*>(memory->data()), n, swap);
        (swap ? cache.swap_memory_ : cache.memory_) = std::move(*memory);
    }
    cache.place(config, types, layout, n_blocks, block_size);
    return cache;
}

// Where each layer's memory lies, in the places of its group (CacheGroup::place).
void KvCache::place(const ModelConfig& config, KvTypes types, const CacheLayout& layout, int n_blocks, int block_size) {
    auto* const memory     = static_cast<std::byte*>(memory_.data());
    const bool  contiguous = layout.block_bytes > 0;
    layers_.resize(config.layers.size());
    if (layout.keeps_state()) states_.resize(config.layers.size());
    for (std::size_t g = 0; g < layout.groups.size(); g++) {
        const CacheGroup& group = layout.groups[g];
        for (std::size_t i = 0; i < group.layers.size(); i++) {
            const auto         layer = std::size_t(group.layers[i]);
            const LayerConfig& l     = config.layers[layer];
            if (group.keeps_state()) {
                states_[layer] = {memory, layout.block_bytes, int(g), group.offsets[i], l.state.bytes()};
                continue;
            }
            const CacheGroup::Place place = group.place(i), v_place = group.place(i, true);
            KvLayer&                to = layers_[layer];
            to                         = {nullptr,      nullptr,    types.k,     n_blocks, block_size,
                                          l.n_kv_heads, l.head_dim, l.value_dim, int(g),   place.block};
            to.v_part                  = v_place.block;
            to.v_type                  = config.latent ? types.k : types.v;
            to.stride                  = contiguous ? layout.block_bytes : to.block_bytes();
            // A layer's K, V and scales, one after the other, or those of K and those of V; of one block, or of all blocks.
            const auto arrays   = arrays_of(config, l, types);
            const auto bytes_of = [&](const CacheArray& array) {
                return array.bytes(block_size) * (contiguous ? 1 : std::size_t(n_blocks));
            };
            std::size_t layer_bytes = 0;
            for (const CacheArray& array : arrays) layer_bytes += bytes_of(array);
            const auto begin_of = [&](const CacheGroup::Place& p) {
                return memory + std::size_t(p.nth) * layer_bytes / (group.halves ? 2 : 1);
            };
            std::byte *k_at = begin_of(place), *v_at = begin_of(v_place);
            auto       next = arrays.begin();
            const auto take = [&](bool of_v) {
                std::byte*& at = of_v && group.halves ? v_at : k_at;
                return std::exchange(at, at + bytes_of(*next++));
            };
            to.k = take(false);
            if (!config.latent) to.v = take(true);
            if (has_scales(to.type)) to.k_scales = take(false);
            if (has_scales(to.v_type) && to.v) to.v_scales = take(true);
        }
    }
    for (std::size_t i = 0; i < layers_.size(); i++)
        if (const int source = config.layers[i].kv_source; source >= 0) layers_[i] = layers_[std::size_t(source)];
}

void KvCache::append_host_block(BlockId block, std::vector<std::span<std::byte>>& pieces) const {
    for (const BlockArray& array : swap_arrays_)
        pieces.emplace_back(array.data + std::size_t(block) * array.stride, array.bytes);
}

void KvCache::move_blocks(Backend& backend, const BlockMoves& moves) const {
    backend.copy_blocks(moves.swap_out, arrays_, swap_arrays_);
    backend.copy_blocks(moves.swap_in, swap_arrays_, arrays_);
    backend.copy_blocks(moves.copies, arrays_, arrays_);
}

} // namespace quire
