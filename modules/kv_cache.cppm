// quire.kv_cache: the K and V arrays of every layer, cut into blocks. **Owns** their memory; which block holds what is
// the block manager's business.
export module quire.kv_cache;

import quire.backend;
import quire.base;
import quire.config;
import quire.request;
import quire.std;
import quire.tensor;

export namespace quire {

class KvCache {
public:
    // Takes n_blocks × block_size tokens' worth of memory at once. Error: the sum that did not fit.
    static Result<KvCache> create(Backend& backend, const ModelConfig& config, DType type, int n_blocks, int block_size);

    std::span<const KvLayer> layers() const { return layers_; }
    std::size_t              bytes() const { return memory_.bytes(); }

    // The bytes of one token's K and V across all layers (the paper, section 3).
    static std::size_t bytes_per_token(const ModelConfig& config, DType type);

private:
    Buffer               memory_;
    std::vector<KvLayer> layers_;
};

} // namespace quire

module :private;

namespace quire {

std::size_t KvCache::bytes_per_token(const ModelConfig& config, DType type) {
    return 2 * std::size_t(config.n_layers) * std::size_t(config.n_kv_heads) * row_bytes(type, config.head_dim);
}

Result<KvCache> KvCache::create(Backend& backend, const ModelConfig& config, DType type, int n_blocks, int block_size) {
    const KvLayer     shape{nullptr, nullptr, type, n_blocks, block_size, config.n_kv_heads, config.head_dim};
    const std::size_t array = shape.block_bytes() * std::size_t(n_blocks);
    Result<Buffer>    memory = backend.allocate(2 * array * std::size_t(config.n_layers));
    if (!memory)
        return fail_with(ErrorKind::system, "the KV cache needs ", n_blocks, " blocks of ", block_size, " tokens at ",
                         bytes_per_token(config, type), " bytes each: ", memory.error().message);
    KvCache cache;
    cache.memory_ = std::move(*memory);
    auto* at      = static_cast<std::byte*>(cache.memory_.data());
    for (int i = 0; i < config.n_layers; i++, at += 2 * array) {
        cache.layers_.push_back(shape);
        cache.layers_.back().k = at;
        cache.layers_.back().v = at + array;
    }
    return cache;
}

} // namespace quire
