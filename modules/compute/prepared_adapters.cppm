// quire.compute.prepared_adapters: the matrices of LoRA adapters, found by the weights that they belong to while these are prepared. **Owns** the
// lists of them; the adapters are read once, in their files.
export module quire.compute.prepared_adapters;

import quire.compute.backend;
import quire.core.base;
export import quire.model_file.adapter;

export namespace quire {

// Backend::prepare(), or what stands for it.
using Prepare = std::function<Result<WeightHandle>(const TensorView&, WeightUse, int n)>;

class PreparedAdapters {
public:
    PreparedAdapters(std::span<const Adapter> adapters, Prepare prepare)
        : adapters_(adapters), prepare_(std::move(prepare)) {
        for (const Adapter& adapter : adapters) changed_.emplace_back(adapter.tensors.size());
    }

    // A weight, which can be some rows of a tensor of the file.
    Result<void> add(const TensorView& weight, const WeightHandle& handle);
    Result<void> add_embedding();
    // The pairs of a weight of a GEMM, with `scale`. These pairs count as computed from now on.
    std::vector<LoraPair> take(const WeightHandle& weight, float scale) {
        const auto at = weights_.find(weight.number);
        return at == weights_.end() ? std::vector<LoraPair>() : take(std::exchange(at->second, {}), weight.rows, scale);
    }
    std::vector<LoraPair> take_embedding(float scale) { return take(std::exchange(embedding_, {}), 0, scale); }
    bool                  has(const WeightHandle& weight) const { return weights_.contains(weight.number); }
    // Error: a tensor of which not all rows were taken.
    Result<void> check_taken() const;

private:
    struct One {
        LoraPair    pair;
        std::size_t tensor = 0; // of its adapter
    };
    // A tensor of an adapter, and how much of it the program computes.
    struct Changed {
        WeightHandle a;
        std::int64_t rows  = 0; // of the model's tensor, that are computed
        bool         taken = false;
    };
    Result<void>          add_pair(std::size_t adapter, std::size_t tensor, const TensorView& b, std::vector<One>& to);
    std::vector<LoraPair> take(std::vector<One> all, std::int64_t rows, float scale);

    std::span<const Adapter>          adapters_;
    Prepare                           prepare_;
    std::map<int, std::vector<One>>   weights_; // by WeightHandle::number
    std::vector<One>                  embedding_;
    std::vector<std::vector<Changed>> changed_; // of each adapter, as its tensors
};

} // namespace quire

module :private;

namespace quire {

Result<void> PreparedAdapters::add_pair(std::size_t adapter, std::size_t tensor, const TensorView& b,
                                        std::vector<One>& to) {
    const AdaptedTensor& t    = adapters_[adapter].tensors[tensor];
    Changed&             mine = changed_[adapter][tensor];
    if (!mine.a) {
        const Result<WeightHandle> a = prepare_(t.a, t.embedding ? WeightUse::adapter_rows : WeightUse::adapter, 1);
        if (!a) return std::unexpected(a.error());
        mine.a = *a;
    }
    const Result<WeightHandle> ready = prepare_(b, WeightUse::adapter, 1);
    if (!ready) return std::unexpected(ready.error());
    to.push_back({{mine.a, *ready, int(adapter), adapters_[adapter].scale_of(t)}, tensor});
    return {};
}

Result<void> PreparedAdapters::add(const TensorView& weight, const WeightHandle& handle) {
    for (std::size_t i = 0; i < adapters_.size(); i++)
        for (std::size_t j = 0; j < adapters_[i].tensors.size(); j++) {
            const AdaptedTensor& t      = adapters_[i].tensors[j];
            const std::size_t    stride = row_bytes(t.base.type, t.base.cols);
            const auto *         begin  = static_cast<const std::byte*>(t.base.data),
                       *at              = static_cast<const std::byte*>(weight.data);
            if (t.embedding || weight.cols != t.base.cols || at < begin ||
                at >= begin + std::size_t(t.base.rows) * stride)
                continue;
            TensorView b = t.b; // of the rows of the weight
            b.data =
                static_cast<const std::byte*>(b.data) + std::size_t(at - begin) / stride * row_bytes(b.type, b.cols);
            b.rows = weight.rows;
            if (auto ok = add_pair(i, j, b, weights_[handle.number]); !ok) return ok;
        }
    return {};
}

Result<void> PreparedAdapters::add_embedding() {
    for (std::size_t i = 0; i < adapters_.size(); i++)
        for (std::size_t j = 0; j < adapters_[i].tensors.size(); j++)
            if (const AdaptedTensor& t = adapters_[i].tensors[j]; t.embedding)
                if (auto ok = add_pair(i, j, t.b, embedding_); !ok) return ok;
    return {};
}

std::vector<LoraPair> PreparedAdapters::take(std::vector<One> all, std::int64_t rows, float scale) {
    std::vector<LoraPair> pairs;
    for (One& one : all) {
        Changed& mine = changed_[std::size_t(one.pair.adapter)][one.tensor];
        mine.taken    = true;
        mine.rows += rows;
        one.pair.scale *= scale;
        pairs.push_back(one.pair);
    }
    return pairs;
}

Result<void> PreparedAdapters::check_taken() const {
    for (std::size_t i = 0; i < adapters_.size(); i++)
        for (std::size_t j = 0; j < adapters_[i].tensors.size(); j++) {
            const AdaptedTensor& t = adapters_[i].tensors[j];
            if (!changed_[i][j].taken || (!t.embedding && changed_[i][j].rows != t.base.rows))
                return fail(adapters_[i].file.path(), ": it changes tensor ", t.name,
                            ", which quire cannot adapt: adapters change dense matrices, the embedding and the output");
        }
    return {};
}

} // namespace quire
