// quire.compute.cpu.attention: how the threads share a step's attention: tiles of neighbouring queries, and groups of tiles whose sequences
// begin with the same blocks. **Owns** the tiles of the current step.
export module quire.compute.cpu.attention;

import quire.compute.cpu.kernel_table;
import quire.compute.cpu.workers;
import quire.core.base;

export namespace quire {

class CpuAttention {
public:
    CpuAttention(const CpuKernels& kernels, Workers& workers) : kernels_(kernels), workers_(workers) {}

    // Cuts the queries of a step into tiles. The plan outlives the step's calls of run().
    void begin_step(const StepPlan& plan);
    // sinks: Attention::sinks, or null.
    void run(const Attention& op, const float* sinks, const Tensor& q, const Tensor& out, const KvLayer& cache);

private:
    static constexpr int          tile_rows   = 16; // tokens of one sequence that share a pass over their K and V
    static constexpr int          group_size  = 16; // tiles whose sums stay in the caches
    static constexpr std::int64_t worth_split = 1'000'000; // multiply-adds of one KV head from which three passes pay

    struct QueryTile {
        int sequence, first_row, n_rows;
    };
    // Neighbours in tiles_, worked on together: their sequences begin with the same blocks.
    struct TileGroup {
        int first, n, shared_blocks;
    };
    void group_tiles();

    const CpuKernels&      kernels_;
    Workers&               workers_;
    const StepPlan*        plan_ = nullptr;
    std::vector<QueryTile> tiles_;
    std::vector<TileGroup> groups_;
    std::vector<float>     split_; // the scores of a head in passes
};

} // namespace quire

module :private;

namespace quire {

void CpuAttention::begin_step(const StepPlan& plan) {
    plan_ = &plan;
    tiles_.clear();
    for (int s = 0; s < plan.n_seqs(); s++)
        for (int row = plan.token_start[std::size_t(s)], end = plan.token_start[std::size_t(s) + 1]; row < end;
             row += tile_rows)
            tiles_.push_back({s, row, std::min(tile_rows, end - row)});
    group_tiles();
}

// Tiles of one row come in the order of their block tables: tiles whose tables begin alike are neighbours then, and form groups. A group is
// not so large that threads would have nothing to do.
void CpuAttention::group_tiles() {
    const auto table = [&](const QueryTile& tile) {
        const auto       s    = std::size_t(tile.sequence);
        const GroupPlan& plan = plan_->groups[0];                  // the one that keeps all positions, if one does
        if (plan.keeps_state()) return std::span<const BlockId>(); // no layer attends
        return std::span(plan.parts[0].tables)
            .subspan(std::size_t(plan.table_start[s]), std::size_t(plan.table_start[s + 1] - plan.table_start[s]));
    };
    std::sort(tiles_.begin(), tiles_.end(), [&](const QueryTile& a, const QueryTile& b) {
        if (a.n_rows > 1 || b.n_rows > 1) return a.n_rows != b.n_rows ? a.n_rows > b.n_rows : a.first_row < b.first_row;
        const auto ours = table(a), theirs = table(b);
        const auto [x, y] = std::mismatch(ours.begin(), ours.end(), theirs.begin(), theirs.end());
        return y != theirs.end() && (x == ours.end() || *x < *y);
    });
    const auto single = std::count_if(tiles_.begin(), tiles_.end(), [](const QueryTile& t) { return t.n_rows == 1; });
    const int  most   = std::clamp(int(single) / workers_.n(), 1, group_size);
    groups_.clear();
    for (int i = 0; i < int(tiles_.size()); i++) {
        const auto blocks = table(tiles_[std::size_t(i)]);
        if (!groups_.empty() && tiles_[std::size_t(i)].n_rows == 1) {
            TileGroup&       group  = groups_.back();
            const QueryTile& leader = tiles_[std::size_t(group.first)];
            const auto       first  = table(leader);
            const auto       common =
                std::mismatch(first.begin(), first.end(), blocks.begin(), blocks.end()).first - first.begin();
            if (leader.n_rows == 1 && group.n < most && common > 0 && common >= group.shared_blocks / 2) {
                group.shared_blocks = group.n == 1 ? int(common) : std::min(group.shared_blocks, int(common));
                group.n++;
                continue;
            }
        }
        groups_.push_back({i, 1, 0});
    }
}

void CpuAttention::run(const Attention& op, const float* sinks, const Tensor& q, const Tensor& out,
                       const KvLayer& cache) {
    const int        K = cache.n_kv_heads, group = op.n_heads / K, D = cache.head_dim, Dv = cache.value_dim;
    const GroupPlan& tables = plan_->groups[std::size_t(cache.group)];
    const bool       apart  = op.first > 0; // each tile has a window of its own, which ends at position `first`
    std::int64_t     work   = 0;            // multiply-adds of q·k and of the weighted sum
    for (std::int32_t length : plan_->context_lens)
        work += 2 * std::int64_t(op.window > 0 ? std::min(length, op.window) : length) * op.n_heads * D;
    const auto rows_of = [&](const void* array, DType type, const std::byte* scales, int h) {
        const std::size_t first = std::size_t(h) * std::size_t(cache.block_size);
        return KvRows{static_cast<const std::byte*>(array) + first * row_bytes(type, D), type,
                      scales ? scales + first * sizeof(float) : nullptr}; // a latent cache has one head
    };
    const auto table_of = [&](int part, const QueryTile& tile) {
        return tables.parts[std::size_t(part)].tables.data() + tables.origin(std::size_t(tile.sequence));
    };
    const auto task_of = [&](int item, std::array<AttentionPart, group_size>& parts) {
        const TileGroup tiles  = apart ? TileGroup{item / K, 1, 0} : groups_[std::size_t(item / K)];
        const int       h      = item % K;
        int             shared = tiles.shared_blocks * cache.block_size;
        for (int i = 0; i < tiles.n; i++) {
            const QueryTile& tile = tiles_[std::size_t(tiles.first) + std::size_t(i)];
            AttentionPart&   part = parts[std::size_t(i)];
            part                  = {floats(q) + tile.first_row * q.cols + std::int64_t(h) * group * D,
                                     floats(out) + tile.first_row * out.cols + std::int64_t(h) * group * Dv,
                                     tile.n_rows,
                                     plan_->positions[std::size_t(tile.first_row)],
                                     table_of(cache.part, tile),
                                     table_of(cache.v_part, tile),
                    op.causal ? -1 : plan_->context_lens[std::size_t(tile.sequence)] - 1};
            shared                = std::min(shared, part.first_position + 1);
        }
        AttentionTask task;
        task.parts        = std::span(parts).first(std::size_t(tiles.n));
        task.shared       = op.window > 0 || apart || cache.group > 0 ? 0 : shared / attention_chunk * attention_chunk;
        task.q_stride     = q.cols;
        task.out_stride   = out.cols;
        task.n_heads      = group;
        task.head_dim     = D;
        task.value_dim    = Dv;
        task.window       = apart ? parts[0].first_position + 1 - op.first : op.window;
        task.chunked      = op.chunked;
        task.scale        = op.scale;
        task.softcap      = op.softcap;
        task.sinks        = sinks ? sinks + h * group : nullptr;
        task.k            = rows_of(cache.k, cache.type, cache.k_scales, h);
        task.v            = cache.latent() ? task.k : rows_of(cache.v, cache.v_type, cache.v_scales, h);
        task.latent       = cache.latent();
        task.block_stride = cache.stride;
        task.block_size   = cache.block_size;
        return task;
    };
    const auto one_head = [&](int item, int thread) {
        std::array<AttentionPart, group_size> parts;
        AttentionTask                         task      = task_of(item, parts);
        int                                   n_queries = 0;
        for (const AttentionPart& part : task.parts) n_queries += part.n_tokens * group;
        task.scratch = workers_.scratch(thread, attention_scratch(n_queries, D));
        kernels_.attention(task);
    };
    // All threads work on one kv head of a token: on its chunks, then on the columns of V.
    const auto split_head = [&](int item) {
        constexpr int                         columns = 32;
        std::array<AttentionPart, group_size> parts;
        const AttentionTask                   task = task_of(item, parts);
        SplitAttention                        pass;
        pass.n_chunks       = attention_chunks(task, parts[0].first_position);
        const std::size_t n = std::size_t(group) * std::size_t(pass.n_chunks);
        pass.scores         = grown(split_, split_attention_floats(group, pass.n_chunks));
        pass.highest        = pass.scores + n * attention_chunk;
        pass.sums           = pass.highest + n;
        pass.rescale        = pass.sums + n;
        const int  grain    = std::max((pass.n_chunks + 4 * workers_.n() - 1) / (4 * workers_.n()), 1);
        const auto passes   = [&](auto kernel, int size, int piece) {
            workers_.run((size + piece - 1) / piece, [&](int i, int thread) {
                AttentionTask own = task;
                own.scratch       = workers_.scratch(thread, attention_scratch(group, D));
                kernel(own, pass, i * piece, std::min((i + 1) * piece, size));
            });
        };
        passes(kernels_.attention_scores, pass.n_chunks, grain);
        passes(kernels_.attention_weights, pass.n_chunks, grain);
        passes(kernels_.attention_values, Dv, Dv >= columns * workers_.n() ? columns : 16);
    };
    for (const QueryTile& t : tiles_)
        check(!apart || (t.n_rows == 1 && op.window == 0 && plan_->positions[std::size_t(t.first_row)] >= op.first),
              "attention: a query that sees no position");
    const int  items = int(apart ? tiles_.size() : groups_.size()) * K;
    const bool splits =
        items % workers_.n() > 0 && items < 4 * workers_.n() && op.causal && work >= worth_split * items &&
        std::ranges::all_of(
            groups_, [&](const TileGroup& g) { return g.n == 1 && tiles_[std::size_t(g.first)].n_rows == 1; });
    if (work < worth_threads && int(tiles_.size()) == plan_->n_seqs()) {
        for (int item = 0; item < items; item++) one_head(item, 0);
        return;
    }
    // A head for each thread, as long as there are so many; all threads take the rest head by head.
    const int alone = splits ? items - items % workers_.n() : items;
    if (alone > 0) workers_.run(alone, one_head);
    for (int item = alone; item < items; item++) split_head(item);
}

} // namespace quire
