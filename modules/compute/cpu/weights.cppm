// quire.compute.cpu.weights: the weights of a file as the CPU's GEMMs read them. **Owns** repacked copies and copies of vectors.
//
// A weight whose type is repacked at load is copied, and the pages of the file are given back: Embed may ask for a row of them again. A
// vector is copied, too, because it would keep a large page of the file. Every other weight stays where it is.
export module quire.compute.cpu.weights;

export import quire.compute.backend;
import quire.compute.cpu.file_pages;
import quire.compute.cpu.kernel_table;
export import quire.compute.cpu.workers;
export import quire.compute.program;
import quire.core.base;
export import quire.core.tensor;

export namespace quire {

class CpuWeights {
public:
    CpuWeights(const CpuKernels& kernels, Workers& workers) : kernels_(kernels), workers_(workers) {}

    Result<WeightHandle> prepare(const TensorView& tensor, WeightUse use, int n); // as Backend::prepare()
    // Call when all weights are prepared.
    void settle() { copies_.settle(); }

    // The rows as the file has them.
    const TensorView& rows(const WeightHandle& weight) const { return weights_[std::size_t(weight.number)].rows; }
    // A vector, or a stack of vectors; null for an empty handle.
    const float* vector(const WeightHandle& weight) const {
        return weight ? static_cast<const float*>(rows(weight).data) : nullptr;
    }
    // Matrix i of a stack of n, where GEMMs read it.
    TensorView for_gemm(const WeightHandle& stack, std::int64_t n = 1, std::int64_t i = 0) const;
    // All matrices that GEMMs read, where they read them; stacks that lie in one piece as one.
    std::vector<TensorView> of_gemms() const;
    // Gives the pages of a table back if Embed alone reads it.
    void give_back_lookup(const WeightHandle& table) const;

    std::size_t bytes() const { return bytes_; } // of repacked copies

private:
    struct Weight {
        TensorView       rows; // in the file, or the copy of a vector
        const std::byte* packed =
            nullptr;       // where GEMMs read: the repacked copy, or the rows; null for a table that Embed alone reads
        int         n = 1; // matrices that are repacked each by itself
        MappedPages pages; // of a table that Embed alone reads
    };
    Result<std::byte*> repack(const TensorView& stack, int n);

    const CpuKernels&               kernels_;
    Workers&                        workers_;
    std::vector<Weight>             weights_; // by WeightHandle::number
    std::vector<std::vector<float>> vectors_;
    LargePages                      copies_;
    std::size_t                     bytes_ = 0;
};

} // namespace quire

module :private;

namespace quire {

Result<WeightHandle> CpuWeights::prepare(const TensorView& tensor, WeightUse use, int n) {
    Weight weight;
    weight.rows = tensor;
    if (use == WeightUse::lookup || use == WeightUse::adapter_rows) {
        weight.pages = pages_around(tensor.data);
    } else if (tensor.rows == 1 && tensor.type == DType::F32) {
        const auto* from = static_cast<const float*>(tensor.data);
        weight.rows.data = vectors_.emplace_back(from, from + tensor.cols).data();
        weight.packed    = static_cast<const std::byte*>(weight.rows.data);
        give_back(pages_around(tensor.data), tensor.data, std::size_t(tensor.cols) * sizeof(float));
    } else if (!repacked_at_load(tensor.type)) {
        weight.packed = static_cast<const std::byte*>(tensor.data);
    } else {
        weight.n                = tensor.rows / n % 16 == 0 ? 1 : n; // no group of 16 rows lies in two matrices
        Result<std::byte*> copy = repack(tensor, weight.n);
        if (!copy) return std::unexpected(copy.error());
        weight.packed = *copy;
    }
    weights_.push_back(weight);
    return WeightHandle{tensor.type, tensor.rows, tensor.cols, int(weights_.size()) - 1};
}

// Rows of a repacked matrix: groups of 16 rows are interleaved, so the last group is filled up.
static std::int64_t packed_rows(std::int64_t rows) { return (rows + 15) / 16 * 16; }

Result<std::byte*> CpuWeights::repack(const TensorView& stack, int n) {
    const std::size_t  stride = row_bytes(stack.type, stack.cols);
    const TensorView   first{stack.type, stack.rows / n, stack.cols, stack.data};
    const std::size_t  bytes  = std::size_t(packed_rows(first.rows)) * stride;
    Result<std::byte*> memory = copies_.take(std::size_t(n) * bytes);
    if (!memory) return memory;
    bytes_ += std::size_t(n) * bytes;
    const MappedPages pages = pages_around(stack.data);
    for (int i = 0; i < n; i++) {
        TensorView matrix = first;
        matrix.data       = static_cast<const std::byte*>(stack.data) + std::size_t(i * first.rows) * stride;
        std::byte* to     = *memory + std::size_t(i) * bytes;
        workers_.split(packed_rows(first.rows) / 16,
                       std::max<std::int64_t>(1, std::int64_t((std::size_t(4) << 20) / (16 * stride))),
                       [&](std::int64_t begin, std::int64_t end) {
                           copies_.touch(to + std::size_t(begin) * 16 * stride, std::size_t(end - begin) * 16 * stride);
                           kernels_.repack(matrix, to, begin, end);
                           give_back(pages,
                                     static_cast<const std::byte*>(matrix.data) + std::size_t(begin) * 16 * stride,
                                     std::size_t(std::min(end * 16, matrix.rows) - begin * 16) * stride);
                       });
    }
    return memory;
}

TensorView CpuWeights::for_gemm(const WeightHandle& stack, std::int64_t n, std::int64_t i) const {
    const Weight&      weight = weights_[std::size_t(stack.number)];
    const std::int64_t rows   = stack.rows / n;
    check(weight.packed != nullptr, "gemm: a weight that was not prepared for one");
    return {stack.type, rows, stack.cols,
            weight.packed + std::size_t(i * (repacked_at_load(stack.type) ? packed_rows(rows) : rows)) *
                                row_bytes(stack.type, stack.cols)};
}

std::vector<TensorView> CpuWeights::of_gemms() const {
    std::vector<TensorView> matrices;
    for (std::size_t w = 0; w < weights_.size(); w++) {
        const auto& [rows, packed, n, pages] = weights_[w];
        if (packed == nullptr || rows.rows == 1) continue;
        for (int i = 0; i < n; i++) matrices.push_back(for_gemm({rows.type, rows.rows, rows.cols, int(w)}, n, i));
    }
    return matrices;
}

void CpuWeights::give_back_lookup(const WeightHandle& table) const {
    const Weight& weight = weights_[std::size_t(table.number)];
    give_back(weight.pages, weight.rows.data, std::size_t(table.rows) * row_bytes(table.type, table.cols));
}

} // namespace quire
