// quire.compute.ranks.shards: how a model splits over N ranks, as data: which rows or columns of each weight a rank has (Megatron-LM, Shoeybi et
// al. 2019; the paper, section 4.6). Plain values, owns nothing. Backends see the split only as the program of a rank.
//
//   rows, by head                attn_q, attn_k, attn_v, attn_k_b, attn_v_b, attn_sinks
//   columns, by head             attn_output
//   rows                         ffn_gate, ffn_up; of each expert, too; token_embd, output
//   columns                      ffn_down; of each expert, too
//   whole, on every rank         norms, routers, learned positions, the weights that make a latent row or lie around latent experts
//
// A weight that is split by columns gives partial sums, which the ranks add up (AllReduce); only the first rank has its bias. If there are
// more ranks than KV heads, several ranks have one KV head.
//
// Bits that do not depend on N: with `exact` these columns are cut into 8 leaves, whose borders depend on the model alone. Each leaf is
// summed by itself in float32, and the leaves are added by one tree; each rank has a branch of the tree.
export module quire.compute.ranks.shards;

import quire.core.base;
import quire.model_file.quants;
import quire.model_file.weights;

export namespace quire {

struct Range {
    std::int64_t first = 0, n = 0;
    std::int64_t end() const { return first + n; }
    bool         operator==(const Range&) const = default;
};

// Leaves of a sum over columns when bits must not depend on the number of ranks.
inline constexpr int exact_leaves = 8;

// The part of a model that one of `n` ranks has.
struct RankShape {
    int                index = 0, n = 1;
    bool               exact = false;
    ModelConfig        config; // heads and widths of the feed-forward networks are the rank's; all else is the model's
    Range              vocab, heads;
    std::vector<Range> kv_heads; // by layer; empty: the model is whole
    // The columns of attn_output, of ffn_down and of the experts' ffn_down that this rank sums: its leaves, one unless `exact`. An empty
    // leaf adds nothing. No leaves: the model is whole, and no partial sums are added up.
    std::vector<Range> attention, ff, expert_ff, shared_ff;

    bool  whole() const { return n == 1 && !exact; }
    Range kv_heads_of(int layer) const { return kv_heads.empty() ? Range{} : kv_heads[std::size_t(layer)]; }
};

// The shapes of all ranks. Error: why this model cannot be split so; `path` names the model.
Result<std::vector<RankShape>> split_model(const std::string& path, const ModelConfig& config,
                                           const ModelTensors& tensors, int n_ranks, bool exact);

// Matrices of one layer that are split by columns, one for each leaf of the rank; empty where the model is whole.
template <class T>
struct LayerLeavesOf {
    std::vector<LinearOf<T>>        attn_output, ffn_down, shared_down;
    std::vector<ExpertTensorsOf<T>> experts; // gate, up and down
};
using LayerLeaves = LayerLeavesOf<TensorView>;

// Memory for parts of weights that do not lie in one piece in the file.
using SliceMemory = std::deque<std::vector<std::byte>>;

// `weight` has `n_matrices` matrices, one after the other: takes these rows and columns of each matrix. A part that lies in one piece is
// not copied. A part whose border cuts a block of a quantised type becomes F32.
TensorView slice_of(const TensorView& weight, Range rows, Range columns, SliceMemory& memory, int n_matrices = 1);

// The rank's part of one layer, and of the tensors outside the layers.
LayerTensors rank_layer(const RankShape& shape, int index, const LayerTensors& layer, LayerLeaves& leaves,
                        SliceMemory& memory);
void         rank_ends(const RankShape& shape, ModelTensors& tensors, SliceMemory& memory);

} // namespace quire

module :private;

namespace quire {

// Piece i of n of `size`, cut at multiples of `unit`: the pieces differ by one unit, the larger ones come first of each pair.
static Range piece_of(std::int64_t size, std::int64_t unit, std::int64_t i, std::int64_t n) {
    const std::int64_t units = (size + unit - 1) / unit;
    const auto         begin = [&](std::int64_t k) { return std::min(size, (units * k + n - 1) / n * unit); };
    return {begin(i), begin(i + 1) - begin(i)};
}

// Columns are cut at whole blocks of the types, unless these are fewer than the pieces, and not too finely for the kernels.
static std::int64_t unit_of(std::int64_t columns, std::int64_t block, std::int64_t pieces) {
    const std::int64_t fine = columns >= 1024 ? 64 : 16;
    return columns / std::max(block, fine) >= pieces ? std::max(block, fine) : 16;
}

static std::int64_t block_of(const TensorView& w) { return w ? dtype_info(w.type).items : 1; }

// The leaves of rank r among n: all of them cut `size` into exact_leaves if `exact`, else into one for each rank.
static std::vector<Range> leaves_of(std::int64_t size, std::int64_t unit, int r, int n, bool exact) {
    const int          all = exact ? exact_leaves : n, mine = all / n;
    std::vector<Range> leaves;
    for (int i = 0; i < mine; i++) leaves.push_back(piece_of(size, unit, std::int64_t(r) * mine + i, all));
    return leaves;
}

static Range span_of(const std::vector<Range>& leaves) {
    return {leaves.front().first, leaves.back().end() - leaves.front().first};
}

Result<std::vector<RankShape>> split_model(const std::string& path, const ModelConfig& c, const ModelTensors& w, int n,
                                           bool exact) {
    if (n < 1) return fail("a model runs on at least 1 rank, not on ", n);
    if (exact && exact_leaves % n != 0)
        return fail("bits that do not depend on the number of ranks are for 1, 2, 4 or 8 of them, not for ", n);
    if (c.recurrent.taps > 0 && n > 1)
        return fail(path, ": layers that keep a state cannot be split over ", n, " ranks yet");
    // The layer of a draft of EAGLE-3, the last one, is not split.
    for (const LayerConfig& l : std::span(c.layers).first(c.layers.size() - (c.draft ? 1 : 0))) {
        if ((n > 1 || exact) && l.attends() && !c.latent && l.value_dim != c.value_dim)
            return fail(path,
                        ": its layers have heads of different sizes, which only one rank without exact sums can "
                        "have");
        if (c.n_heads % n != 0 || (l.attends() && l.n_kv_heads % n != 0 && n % l.n_kv_heads != 0))
            return fail(path, ": ", c.n_heads, " heads with ", l.n_kv_heads, " KV heads cannot be split over ", n,
                        " ranks: the number of ranks has to divide the heads, and to divide the KV heads or be a "
                        "multiple of them");
    }
    const bool beside = std::ranges::any_of(w.layers, [](const LayerTensors& l) {
        return l.input_gate || (l.experts && (l.ffn_up || l.experts->gate_up));
    });
    if ((n > 1 || exact) &&
        (beside || !std::ranges::all_of(c.layers, [&](const LayerConfig& l) { return l.ff_size == c.ff_size; })))
        return fail(path, ": its layers have parts that only one rank without exact sums can have");
    std::int64_t ff_block = 1, expert_block = 1, shared_block = 1, o_block = 1;
    for (const LayerTensors& l : w.layers) {
        o_block  = std::max(o_block, block_of(l.attn_output.weight));
        ff_block = std::max(ff_block, block_of(l.ffn_down.weight));
        if (!l.experts) continue;
        expert_block = std::max(expert_block, block_of(l.experts->down.weight));
        shared_block = std::max(shared_block, block_of(l.experts->shared_down.weight));
    }
    // With `exact` a part of attn_output's columns is whole heads and, where that is possible, whole blocks.
    const std::int64_t value_dim = c.latent ? c.latent->value_dim : c.value_dim, K = c.n_heads * value_dim;
    int                parts = std::gcd(exact_leaves, c.n_heads);
    while (parts > 2 && K / parts % o_block != 0) parts /= 2;
    const bool aligned = K / parts % o_block == 0;
    if (!aligned) parts = std::gcd(exact_leaves, c.n_heads);
    if (exact && n > parts)
        return fail(path, ": bits that do not depend on the number of ranks are possible on up to ", parts,
                    " ranks with its heads and blocks of weights, not on ", n);
    std::vector<RankShape> shapes;
    for (int r = 0; r < n; r++) {
        RankShape& s = shapes.emplace_back();
        s.index      = r;
        s.n          = n;
        s.exact      = exact;
        s.config     = c;
        s.vocab      = piece_of(c.vocab_size, 16, r, n);
        s.heads      = {std::int64_t(r) * (c.n_heads / n), c.n_heads / n};
        for (LayerConfig& l : s.config.layers) {
            const int all = l.n_kv_heads;
            s.kv_heads.push_back(all == 0   ? Range{}
                                 : all >= n ? Range{std::int64_t(r) * (all / n), all / n}
                                            : Range{r / (n / all), 1});
            l.n_kv_heads = int(s.kv_heads.back().n);
        }
        if (s.whole()) break;
        if (exact && K > 0) { // the heads in as many parts as there can be ranks, each part in leaves
            const int          each  = exact_leaves / parts;
            const std::int64_t width = K / parts,
                               unit  = std::min(width,
                                                unit_of(width, aligned ? std::max<std::int64_t>(o_block, 32) : 32, 1));
            for (int i = r * (exact_leaves / n); i < (r + 1) * (exact_leaves / n); i++) {
                Range leaf = piece_of(width, unit, i % each, each);
                leaf.first += i / each * width;
                s.attention.push_back(leaf);
            }
        } else s.attention = {{s.heads.first * value_dim, s.heads.n * value_dim}};
        const auto widths = [&](int& size, std::int64_t block, std::vector<Range>& leaves) {
            if (size == 0) return true;
            leaves = leaves_of(size, unit_of(size, block, exact ? exact_leaves : n), r, n, exact);
            size   = int(span_of(leaves).n);
            return size > 0;
        };
        const bool dense = !std::ranges::all_of(c.layers, &LayerConfig::experts);
        if (!(dense ? widths(s.config.ff_size, ff_block, s.ff) : true) ||
            !widths(s.config.experts.ff_size, expert_block, s.expert_ff) ||
            !widths(s.config.experts.shared_ff_size, shared_block, s.shared_ff) || s.vocab.n == 0)
            return fail(path, ": its feed-forward networks or its vocabulary are too narrow for ", n, " ranks");
        s.config.n_heads    = int(s.heads.n);
        s.config.n_kv_heads = std::max(c.n_kv_heads / n, 1);
    }
    return shapes;
}

TensorView slice_of(const TensorView& w, Range rows, Range columns, SliceMemory& memory, int n) {
    if (!w) return {};
    const std::int64_t each = w.rows / n; // rows of one matrix
    const auto*        from = static_cast<const std::byte*>(w.data);
    const std::size_t  row  = row_bytes(w.type, w.cols);
    if (columns.n == w.cols && (n == 1 || rows.n == each))
        return {w.type, n * rows.n, w.cols, from + std::size_t(rows.first) * row};
    const std::int64_t      block = dtype_info(w.type).items;
    const bool              whole = columns.first % block == 0 && columns.n % block == 0;
    const DType             type  = whole ? w.type : DType::F32;
    const std::size_t       bytes = row_bytes(type, columns.n);
    std::vector<std::byte>& to    = memory.emplace_back(std::size_t(n * rows.n) * bytes);
    std::vector<float>      values(whole ? 0 : std::size_t(w.cols));
    std::byte*              at = to.data();
    for (int i = 0; i < n; i++)
        for (std::int64_t r = rows.first; r < rows.end(); r++, at += bytes) {
            const std::byte* source = from + std::size_t(i * each + r) * row;
            if (whole) {
                std::memcpy(at, source + row_bytes(w.type, columns.first), bytes);
                continue;
            }
            dequantize(w.type, source, values.data(), w.cols);
            std::memcpy(at, values.data() + columns.first, bytes);
        }
    return {type, n * rows.n, columns.n, to.data()};
}

// The rank's piece of a vector, or of n vectors one after the other.
static TensorView elements_of(const TensorView& v, Range range, SliceMemory& memory) {
    if (v && v.rows == 1) // a piece of it
        return {v.type, 1, range.n, static_cast<const std::byte*>(v.data) + row_bytes(v.type, range.first)};
    return slice_of(v, {0, v.rows}, range, memory);
}

static Linear rows_of(const Linear& l, Range rows, SliceMemory& memory, int n = 1) {
    if (!l) return {};
    return {slice_of(l.weight, rows, {0, l.weight.cols}, memory, n), elements_of(l.bias, rows, memory)};
}

static Range times(Range r, std::int64_t factor) { return {r.first * factor, r.n * factor}; }

// One matrix, or n of them, for each leaf; the bias goes to the model's first leaf that is not empty.
static std::vector<Linear> columns_of(const Linear& l, const std::vector<Range>& leaves, SliceMemory& memory,
                                      int n = 1) {
    std::vector<Linear> out;
    if (!l) return out;
    for (const Range& leaf : leaves) {
        Linear& part = out.emplace_back();
        if (leaf.n == 0) continue;
        part.weight = slice_of(l.weight, {0, l.weight.rows / n}, leaf, memory, n);
        if (leaf.first == 0) part.bias = l.bias;
    }
    return out;
}

LayerTensors rank_layer(const RankShape& s, int index, const LayerTensors& whole, LayerLeaves& leaves,
                        SliceMemory& memory) {
    LayerTensors l = whole;
    if (s.whole()) return l;
    const ModelConfig& c = s.config;
    if (l.latent) {
        LatentTensors&     t        = *l.latent;
        const std::int64_t H        = whole.latent->k_b.rows / c.latent->kv_rank; // heads of the model
        const auto         of_heads = [&](TensorView& stack) {
            const std::int64_t rows = stack.rows / H;
            stack                   = slice_of(stack, times(s.heads, rows), {0, stack.cols}, memory);
        };
        l.attn_q = rows_of(whole.attn_q, times(s.heads, c.latent->nope_dim + c.rope_dim), memory);
        of_heads(t.k_b);
        of_heads(t.v_b);
    } else {
        const LayerConfig& layer = c.layers[std::size_t(index)];
        const Range        kv    = s.kv_heads_of(index);
        l.attn_q = rows_of(whole.attn_q, times(s.heads, layer.head_dim * (c.family->attention_gate ? 2 : 1)), memory);
        l.attn_k = rows_of(whole.attn_k, times(kv, layer.head_dim), memory);
        l.attn_v = rows_of(whole.attn_v, times(kv, layer.value_dim), memory);
    }
    if (l.attn_sinks) l.attn_sinks = elements_of(whole.attn_sinks, s.heads, memory);
    leaves.attn_output = columns_of(whole.attn_output, s.attention, memory);
    l.attn_output      = {};
    if (whole.ffn_down) {
        l.ffn_gate      = rows_of(whole.ffn_gate, span_of(s.ff), memory);
        l.ffn_up        = rows_of(whole.ffn_up, span_of(s.ff), memory);
        leaves.ffn_down = columns_of(whole.ffn_down, s.ff, memory);
        l.ffn_down      = {};
    }
    if (!whole.experts) return l;
    const ExpertTensors& e     = *whole.experts;
    ExpertTensors&       mine  = *l.experts;
    const int            n     = c.experts.n;
    const auto           downs = columns_of(e.down, s.expert_ff, memory, n);
    for (std::size_t i = 0; i < s.expert_ff.size(); i++) {
        ExpertTensors& leaf = leaves.experts.emplace_back();
        if (s.expert_ff[i].n == 0) continue;
        leaf.gate = rows_of(e.gate, s.expert_ff[i], memory, n);
        leaf.up   = rows_of(e.up, s.expert_ff[i], memory, n);
        leaf.down = downs[i];
    }
    mine.gate = mine.up = mine.down = {};
    if (e.shared_up) {
        mine.shared_gate   = rows_of(e.shared_gate, span_of(s.shared_ff), memory);
        mine.shared_up     = rows_of(e.shared_up, span_of(s.shared_ff), memory);
        leaves.shared_down = columns_of(e.shared_down, s.shared_ff, memory);
        mine.shared_down   = {};
    }
    return l;
}

void rank_ends(const RankShape& s, ModelTensors& w, SliceMemory& memory) {
    if (s.n == 1) return;
    const bool tied = w.output.weight.data == w.token_embd.data;
    w.token_embd    = slice_of(w.token_embd, s.vocab, {0, w.token_embd.cols}, memory);
    w.output =
        tied ? Linear{w.token_embd, elements_of(w.output.bias, s.vocab, memory)} : rows_of(w.output, s.vocab, memory);
}

} // namespace quire
