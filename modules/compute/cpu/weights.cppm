// quire.compute.cpu.weights: the weights of a file as the CPU's GEMMs read them. **Owns** repacked copies and copies of vectors.
//
// A weight whose type is repacked at load is copied, and the pages of the file are given back: Embed may ask for a row of them again. A
// vector is copied, too, because it would keep a large page of the file. Every other weight stays where it is.
export module quire.compute.cpu.weights;

import quire.compute.cpu.file_pages;
import quire.compute.cpu.kernel_table;
import quire.compute.cpu.workers;
import quire.compute.memory;
import quire.core.base;
import quire.core.std;
import quire.core.tensor;

export namespace quire {

class CpuWeights {
public:
    CpuWeights(const CpuKernels& kernels, Workers& workers) : kernels_(kernels), workers_(workers) {}

    // As Backend::prepare(), prepare_stack() and prepare_lookup().
    Result<TensorView> prepare(const TensorView& weight);
    Result<TensorView> prepare_stack(const TensorView& weights, int n);
    Result<TensorView> prepare_lookup(const TensorView& weight);
    // Call when all weights are prepared.
    void settle() { copies_.settle(); }

    // A prepared matrix where GEMMs read it.
    TensorView for_gemm(TensorView weight) const;
    // The matrices that GEMMs read, where they read them.
    std::vector<TensorView> of_gemms() const;
    // Gives the pages of a table back if Embed alone reads it.
    void give_back_lookup(const TensorView& table) const;

    std::size_t bytes() const { return bytes_; } // of repacked copies

private:
    const CpuKernels&                                 kernels_;
    Workers&                                          workers_;
    std::vector<TensorView>                           weights_; // that GEMMs read, as they were in the file
    std::vector<std::vector<float>>                   vectors_;
    std::unordered_map<const void*, const std::byte*> repacked_; // by their address in the file
    LargePages                                        copies_;   // the memory of repacked_
    std::size_t                                       bytes_ = 0;
    std::unordered_map<const void*, MappedPages>      lookups_; // tables that Embed alone reads
};

} // namespace quire

module :private;

namespace quire {

Result<TensorView> CpuWeights::prepare(const TensorView& weight) {
    if (weight.rows == 1 && weight.type == DType::F32) {
        const auto*        from = static_cast<const float*>(weight.data);
        std::vector<float> copy(from, from + weight.cols);
        give_back(pages_around(weight.data), weight.data, std::size_t(weight.cols) * sizeof(float));
        return TensorView{weight.type, 1, weight.cols, vectors_.emplace_back(std::move(copy)).data()};
    }
    if (repacked_.contains(weight.data)) return weight;
    weights_.push_back(weight);
    if (!repacked_at_load(weight.type)) return weight;
    const std::size_t  stride = row_bytes(weight.type, weight.cols);
    const std::int64_t groups = (weight.rows + 15) / 16;
    const std::size_t  bytes  = std::size_t(groups) * 16 * stride;
    Result<std::byte*> memory = copies_.take(bytes);
    if (!memory) return std::unexpected(memory.error());
    bytes_ += bytes;
    std::byte*        to    = *memory;
    const MappedPages pages = pages_around(weight.data);
    workers_.split(groups, std::max<std::int64_t>(1, std::int64_t((std::size_t(4) << 20) / (16 * stride))),
                   [&](std::int64_t first, std::int64_t last) {
                       copies_.touch(to + std::size_t(first) * 16 * stride, std::size_t(last - first) * 16 * stride);
                       kernels_.repack(weight, to, first, last);
                       give_back(pages, static_cast<const std::byte*>(weight.data) + std::size_t(first) * 16 * stride,
                                 std::size_t(std::min(last * 16, weight.rows) - first * 16) * stride);
                   });
    repacked_.emplace(weight.data, to);
    return weight;
}

// The stack is repacked as one matrix if no group of 16 rows lies in two of its matrices, else matrix by matrix.
Result<TensorView> CpuWeights::prepare_stack(const TensorView& weights, int n) {
    const std::int64_t rows  = weights.rows / n;
    const std::size_t  bytes = std::size_t(rows) * row_bytes(weights.type, weights.cols);
    const auto         part  = [&](int i) {
        return TensorView{weights.type, rows, weights.cols,
                          static_cast<const std::byte*>(weights.data) + std::size_t(i) * bytes};
    };
    if (!repacked_at_load(weights.type)) return prepare(weights);
    if (rows % 16 == 0) {
        if (auto all = prepare(weights); !all) return all;
        const std::byte* copy = repacked_.at(weights.data);
        for (int i = 1; i < n; i++) repacked_.emplace(part(i).data, copy + std::size_t(i) * bytes);
        return weights;
    }
    for (int i = 0; i < n; i++)
        if (auto one = prepare(part(i)); !one) return one;
    return weights;
}

Result<TensorView> CpuWeights::prepare_lookup(const TensorView& weight) {
    lookups_.emplace(weight.data, pages_around(weight.data));
    return weight;
}

TensorView CpuWeights::for_gemm(TensorView weight) const {
    if (repacked_at_load(weight.type)) {
        const auto copy = repacked_.find(weight.data);
        check(copy != repacked_.end(), "gemm: a weight that was not prepared");
        weight.data = copy->second;
    }
    return weight;
}

std::vector<TensorView> CpuWeights::of_gemms() const {
    std::vector<TensorView> weights;
    for (const TensorView& w : weights_) weights.push_back(for_gemm(w));
    return weights;
}

void CpuWeights::give_back_lookup(const TensorView& table) const {
    if (const auto pages = lookups_.find(table.data); pages != lookups_.end())
        give_back(pages->second, table.data, std::size_t(table.rows) * row_bytes(table.type, table.cols));
}

} // namespace quire
