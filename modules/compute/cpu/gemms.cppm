// quire.compute.cpu.gemms: how the threads share GEMMs: makes the input ready for the kernels and cuts the rows of the weights into pieces.
// **Owns** the memory of prepared inputs.
export module quire.compute.cpu.gemms;

import quire.compute.cpu.kernel_table;
import quire.compute.cpu.tuning;
import quire.compute.cpu.weights;
import quire.core.base;

export namespace quire {

// One of several GEMMs with the same input.
struct GemmOutput {
    TensorView   weight; // as CpuWeights::for_gemm()
    const float* bias;   // or null
    Tensor       out;
};

// One GEMM, or several with the same input. Gemms::run() fills in what stands below n_outputs.
struct GemmGroup {
    Tensor                                  x;
    std::array<GemmOutput, max_projections> outputs;
    std::size_t                             n_outputs = 0;
    QuantisedRows                           quantised;
    const float*                            packed = nullptr;
    // Where the groups of 16 rows of each output begin, in one list of them all.
    std::array<std::int64_t, max_projections + 1> begin{};
    std::int64_t                                  first_item = 0;
};

class Gemms {
public:
    Gemms(const CpuKernels& kernels, Workers& workers, const CpuWeights& weights, const Prefetching& prefetch)
        : kernels_(kernels), workers_(workers), weights_(weights), prefetch_(prefetch) {}

    GemmOutput output(const Projection& p, Tensor out) const {
        return {weights_.for_gemm(p.weight), weights_.vector(p.bias), out};
    }
    void run(Tensor x, std::span<const GemmOutput> outputs);
    // Several groups at once.
    void run(std::span<GemmGroup> groups);

    // gate = activation(gate), times `up` unless null.
    void activate(Activation activation, Tensor gate, const float* up);
    void multiply(const Tensor& x, float factor);

private:
    const CpuKernels&  kernels_;
    Workers&           workers_;
    const CpuWeights&  weights_;
    const Prefetching& prefetch_;
    std::vector<float> quantised_, packed_; // the inputs of the current GEMMs: int16-quantised, and as packed panels
};

} // namespace quire

module :private;

namespace quire {

void Gemms::run(Tensor x, std::span<const GemmOutput> outputs) {
    GemmGroup group;
    group.x         = x;
    group.n_outputs = outputs.size();
    std::ranges::copy(outputs, group.outputs.begin());
    run(std::span(&group, 1));
}

void Gemms::run(std::span<GemmGroup> groups) {
    // The forms of its input that the weights of a group want: int16-quantised, packed, or both. The memory of all groups is one piece.
    constexpr auto on_line   = [](std::size_t n) { return (n + 15) / 16 * 16; };
    std::size_t    quantised = 0, packed = 0;
    std::int64_t   all = 0, most_rows = 0;
    bool           any_packed = false;
    double         work       = 0;
    for (GemmGroup& g : groups) {
        bool integer = false, floating = false;
        g.quantised = {};
        g.packed    = nullptr;
        for (std::size_t i = 0; i < g.n_outputs; i++) {
            const TensorView& w = g.outputs[i].weight;
            check(g.x.cols == w.cols && g.outputs[i].out.cols == w.rows && g.outputs[i].out.rows == g.x.rows,
                  "gemm: shapes");
            g.begin[i + 1]                                   = g.begin[i] + (w.rows + 15) / 16;
            (uses_integer_gemm(w.type) ? integer : floating) = true;
            g.quantised.for_wide |= wide_integers(w.type);
        }
        const auto n = std::size_t(g.x.rows), cols = std::size_t(g.x.cols);
        if (integer) {
            g.quantised.m = g.x.rows, g.quantised.k = g.x.cols;
            quantised += on_line(n * (cols / 2 + 3 * (cols / 32)));
        }
        if (floating) packed += on_line(n * cols), any_packed = true;
        all += g.begin[g.n_outputs];
        most_rows = std::max(most_rows, g.x.rows);
        work += double(g.x.rows) * double(g.begin[g.n_outputs]) * 16 * double(g.x.cols);
    }
    float *to_quantised = quantised > 0 ? grown(quantised_, quantised) : nullptr,
          *to_packed    = packed > 0 ? grown(packed_, packed) : nullptr;
    for (GemmGroup& g : groups) {
        const auto n = std::size_t(g.x.rows), cols = std::size_t(g.x.cols), tiles = cols / 32;
        bool       floating = false;
        for (std::size_t i = 0; i < g.n_outputs; i++) floating |= !uses_integer_gemm(g.outputs[i].weight.type);
        if (QuantisedRows& q = g.quantised; q.m > 0) {
            q.integers = reinterpret_cast<std::int16_t*>(to_quantised);
            q.scales   = reinterpret_cast<float*>(q.integers + n * cols);
            q.sums     = q.scales + n * tiles;
            q.products = reinterpret_cast<std::int32_t*>(q.sums + n * tiles);
            to_quantised += on_line(n * (cols / 2 + 3 * tiles));
        }
        if (floating) {
            g.packed = to_packed;
            to_packed += on_line(n * cols);
        }
    }
    // The threads share the pieces of a single group, or whole groups if there are several.
    const auto prepare_rows = [&](GemmGroup& g, auto&& over) {
        if (g.quantised.m > 0)
            over(g.x.rows, g.x.rows > few_rows ? 8 : std::max<std::int64_t>(1, 16384 / g.x.cols), // eight share lines
                 [&](std::int64_t first, std::int64_t last) {
                     kernels_.quantise_rows(floats(g.x), g.quantised, first, last);
                 });
        if (g.packed)
            over(kernels_.token_tiles(g.x.rows), 4, [&](std::int64_t first, std::int64_t last) {
                kernels_.pack_panels(floats(g.x), g.x.rows, g.x.cols, const_cast<float*>(g.packed), first, last);
            });
    };
    if (groups.size() == 1) {
        prepare_rows(groups[0],
                     [&](std::int64_t n, std::int64_t grain, auto&& body) { workers_.split(n, grain, body); });
    } else {
        workers_.split(std::int64_t(groups.size()), 1, [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t i = first; i < last; i++)
                prepare_rows(groups[std::size_t(i)], [](std::int64_t n, std::int64_t, auto&& body) { body(0, n); });
        });
    }

    const std::int64_t threads = workers_.n();
    const bool         alone   = work < double(worth_threads);
    // Many tokens pass over a piece several times: the piece should still be in a cache then.
    const std::int64_t most  = any_packed             ? 9
                               : most_rows > few_rows ? 8
                                                      : 64; // 9 · 16 rows are three row blocks of the float GEMM
    const std::int64_t even  = all / (8 * threads) / 2 * 2; // two groups at once cost less than each alone
    const std::int64_t piece = alone ? all : std::clamp<std::int64_t>(even, 1, most);
    std::int64_t       items = 0;
    for (GemmGroup& g : groups) {
        g.first_item = items;
        items += (g.begin[g.n_outputs] + piece - 1) / piece;
    }
    const auto run = [&](int item, int thread) {
        const auto         after = std::upper_bound(groups.begin(), groups.end(), std::int64_t(item),
                                                    [](std::int64_t i, const GemmGroup& g) { return i < g.first_item; });
        const GemmGroup&   g     = *(after - 1);
        const std::int64_t first = (item - g.first_item) * piece, last = std::min(g.begin[g.n_outputs], first + piece);
        for (std::size_t i = 0; i < g.n_outputs; i++) {
            if (first >= g.begin[i + 1] || last <= g.begin[i]) continue;
            const auto& [weight, bias, out] = g.outputs[i];
            GemmTask task{&weight, bias, floats(g.x), &g.quantised, g.packed, floats(out), prefetch_.of(weight.type),
                          g.x.rows};
            task.first   = (std::max(first, g.begin[i]) - g.begin[i]) * 16;
            task.last    = std::min((std::min(last, g.begin[i + 1]) - g.begin[i]) * 16, weight.rows);
            task.scratch = workers_.scratch(thread, gemm_scratch);
            kernels_.gemm(task);
        }
    };
    if (alone)
        for (std::int64_t i = 0; i < items; i++) run(int(i), 0);
    else workers_.run(int(items), run);
}

void Gemms::activate(Activation activation, Tensor gate, const float* up) {
    workers_.split(gate.rows * gate.cols, 8192, [&](std::int64_t first, std::int64_t last) {
        kernels_.activate(activation, floats(gate) + first, up ? up + first : nullptr, last - first);
    });
}

void Gemms::multiply(const Tensor& x, float factor) {
    workers_.split(x.rows * x.cols, 65536, [&](std::int64_t first, std::int64_t last) {
        for (float *v = floats(x) + first, *end = floats(x) + last; v < end; v++) *v *= factor;
    });
}

} // namespace quire
