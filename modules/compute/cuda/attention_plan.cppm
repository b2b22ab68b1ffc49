// quire.compute.cuda.attention_plan: how a step's attention is cut for the GPU: split-KV items for sequences that decode, tiles of
// queries for prompts, tiles of queries that share a beginning. **Owns** scratch memory.
module;

#include "../../../cuda/kernels.h"

export module quire.compute.cuda.attention_plan;

import quire.compute.cuda.shared_prefixes;
import quire.core.base;
import quire.step.plan;

export namespace quire {

struct AttentionShape {
    int  head_dim = 0, value_dim = 0, n_heads = 0, n_kv_heads = 0;
    int  block_size    = 0;     // 0: blocks that sequences share are read for each of them
    int  most_queries  = 0;     // of a step in split-KV items, where it is not deterministic
    int  window        = 0;     // sliding window; 0: none
    bool chunked       = false; // Attention::chunked
    int  first         = 0;     // Attention::first
    bool deterministic = false; // splits at fixed positions, the same in any step
    bool alone = false; // one query in all: the decode megakernel, which gives a CTA of each SM one split of a KV head
    bool rounded  = false; // numbers of items are rounded up, so that steps share a CUDA graph
    int  unpacked = 0;     // blocks of codes that one launch of prompts can have as fp16; 0: K and V are no codes
    int  entry    = 0;     // tokens of such a block
    // Reading K and V once for all sequences that share them costs a launch: worth it where it saves so many bytes in a layer.
    std::int64_t least_saved = 80 << 20;
};

struct AttentionWork {
    int  n_items = 0, n_short = 0; // SplitKvItems
    bool one_warp = false;
    int  n_tiles  = 0;                       // PrefillTiles
    int  n_shared = 0, n_shared_queries = 0; // SharedTiles
};

// Room for the largest steps: places in a list of items, and the items of a launch, because the splits of a launch have memory. In
// deterministic steps every row is cut at the same positions, and items that exceed a launch take another one.
struct AttentionRoom {
    int list = 0, launch = 0;
};
AttentionRoom attention_room(const AttentionShape& shape, const cuda::Context& gpu, int max_tokens, int max_sequences,
                             int context);
// Where the launches of a deterministic step begin, of at most `most` items each, and the end; no row is in two of them.
void launches_of(std::span<const cuda::SplitKvItem> items, int most, std::vector<int>& begins);

// Tiles of prompts that are computed together, and the blocks of codes that are unpacked for them.
struct PrefillLaunch {
    int first_tile = 0, n_tiles = 0;
    int first_unpack = 0, n_unpacks = 0, most_entries = 0, n_blocks = 0;
};

// The lists of a step, as words of 4 bytes, with room for most_shared_tiles() SharedTiles, most_shared_queries() SharedQueries, and an
// UnpackedBlocks and the place of a table for each sequence.
struct AttentionLists {
    std::int32_t *items = nullptr, *tiles = nullptr, *shared = nullptr, *queries = nullptr, *unpacks = nullptr,
                 *unpacked_starts        = nullptr;
    std::vector<PrefillLaunch>* prefills = nullptr; // in order; null: without codes there is one launch of all
};
int most_shared_tiles(const cuda::Context& gpu);
int most_shared_queries(int max_sequences);

// **Owns** scratch memory, from step to step.
class AttentionPlanner {
public:
    // Writes the lists for layers with these tables.
    AttentionWork plan(const StepPlan& plan, const GroupPlan& tables, const AttentionShape& shape,
                       const cuda::Context& gpu, const AttentionLists& lists);

private:
    // The beginning of a sequence that it shares: positions, and their splits; where the results of all splits of the sequence begin, and
    // their number.
    struct Beginning {
        int end = 0, n_splits = 0, result = 0, n_results = 0;
    };
    // Cuts the shared beginnings into splits of this length, and their queries into tiles of n_queries. 0: nothing is shared.
    int shared_length(const StepPlan& plan, const GroupPlan& tables, const AttentionShape& shape,
                      const cuda::Context& gpu, int n_queries);
    int write_shared(const StepPlan& plan, const GroupPlan& tables, int length, int n_queries,
                     const AttentionLists& lists);

    SharedPrefixes         prefixes_;
    std::vector<Beginning> beginnings_; // [S]
};

} // namespace quire

module :private;

namespace quire {

// Items in a list, rounded up as AttentionShape::rounded does.
int rounded_items(int n) {
    const int step = std::max(8, int(std::bit_floor(unsigned(n))) / 4);
    return (n + step - 1) / step * step;
}

AttentionRoom attention_room(const AttentionShape& shape, const cuda::Context& gpu, int max_tokens, int max_sequences,
                             int context) {
    const int of_row = context / cuda::fixed_split_length + 2; // splits of a row that is cut at fixed positions
    if (shape.deterministic) return {max_tokens * of_row, std::max(cuda::most_splits(gpu), of_row)};
    const int list = rounded_items(max_sequences + cuda::most_splits(gpu)); // of long items, and as many short ones
    return {2 * list, 2 * list};
}

void launches_of(std::span<const cuda::SplitKvItem> items, int most, std::vector<int>& begins) {
    begins.assign(1, 0);
    for (std::size_t i = 0; i < items.size(); i++)
        if (items[i].split == 0 && int(i) + items[i].n_splits - begins.back() > most) begins.push_back(int(i));
    begins.push_back(int(items.size()));
}

template <class Entry>
void put(std::int32_t* list, int at, const Entry& entry) {
    std::memcpy(list + std::size_t(at) * sizeof entry / 4, &entry, sizeof entry);
}

// Splits of a list keep to most_splits(): longer ones where the contexts of a step ask for more.
int bounded(int length, std::int64_t positions, const cuda::Context& gpu) {
    const auto most = std::max(cuda::most_splits(gpu), 1);
    const auto each = (positions + most - 1) / most, unit = std::int64_t(cuda::fixed_split_length);
    return std::max(length, int((each + unit - 1) / unit * unit));
}

int most_shared_queries(int max_sequences) { return rounded_items(max_sequences); }
int most_shared_tiles(const cuda::Context& gpu) { return rounded_items(cuda::most_splits(gpu)); }

constexpr int least_shared = 64; // positions that are worth a split
constexpr int few_queries  = 8;  // of a sequence that decodes

int AttentionPlanner::shared_length(const StepPlan& plan, const GroupPlan& tables, const AttentionShape& shape,
                                    const cuda::Context& gpu, int n_queries) {
    if (n_queries == 0 || plan.n_seqs() < 2) return 0;
    prefixes_.find(plan, tables, shape.block_size, least_shared);
    const auto   tiles_of  = [&](const SharedPrefix& p) { return std::int64_t(p.n + n_queries - 1) / n_queries; };
    const auto   splits_of = [&](const SharedPrefix& p, int length) { return (p.end - p.begin + length - 1) / length; };
    std::int64_t saved = 0, work = 0; // positions
    int          longest = 0;
    for (const SharedPrefix& p : prefixes_.prefixes()) {
        const int n = p.end - p.begin;
        saved += std::int64_t(p.n - 1) * n;
        work += tiles_of(p) * n;
        longest = std::max(longest, n);
    }
    if (saved * shape.n_kv_heads * (shape.head_dim + shape.value_dim) * 2 < shape.least_saved) return 0;
    for (int length = cuda::shared_split_length(gpu, work * shape.n_kv_heads);; length *= 2) {
        std::int64_t tiles = 0, results = 0;
        for (const SharedPrefix& p : prefixes_.prefixes()) {
            tiles += splits_of(p, length) * tiles_of(p);
            results += std::int64_t(splits_of(p, length)) * p.n;
        }
        if (std::max(tiles, results) <= cuda::most_splits(gpu)) return length;
        if (length >= longest) return 0;
    }
}

// SharedTiles and, for beginnings_ with the places of their results, the queries. Returns the number of tiles.
int AttentionPlanner::write_shared(const StepPlan& plan, const GroupPlan& tables, int length, int n_queries,
                                   const AttentionLists& lists) {
    int        n_tiles = 0;
    const auto order   = prefixes_.order();
    for (std::size_t i = 0; i < order.size(); i++) {
        const auto s = std::size_t(order[i]);
        put(lists.queries, int(i),
            cuda::SharedQuery{plan.token_start[s], beginnings_[s].result,
                              beginnings_[s].n_splits == 0 ? 0 : beginnings_[s].n_results});
        beginnings_[s].n_splits = 0; // counted again below
    }
    for (const SharedPrefix& p : prefixes_.prefixes()) {
        const auto some     = order.subspan(std::size_t(p.first), std::size_t(p.n));
        const auto first    = std::size_t(some[0]);
        const int  split    = beginnings_[first].n_splits;
        const bool readable = std::ranges::all_of(some, [&](int s) { return plan.readable[std::size_t(s)] >= p.end; });
        int        n        = 0;
        for (int begin = p.begin; begin < p.end; begin += length, n++)
            for (int query = 0; query < p.n; query += n_queries)
                put(lists.shared, n_tiles++,
                    cuda::SharedTile{p.first + query, std::min(n_queries, p.n - query), tables.origin(first), begin,
                                     std::min(begin + length, p.end), split + n, readable});
        for (const int s : some) beginnings_[std::size_t(s)].n_splits += n;
    }
    return n_tiles;
}

// The entries of a sequence's table that its tiles read go behind those of the sequences before, or begin another launch. Kernels read up to
// 256 positions before the positions that a tile sees. A table of 0, 1, 2 ... leads to the unpacked blocks.
void unpack(int s, int first_position, int last_position, const AttentionShape& shape, const AttentionWork& work,
            const AttentionLists& lists) {
    const int first = std::max(0, first_position - 256) / shape.entry, n = last_position / shape.entry + 1 - first;
    check(n <= shape.unpacked, "a sequence longer than the room for unpacked blocks");
    std::vector<PrefillLaunch>& all    = *lists.prefills;
    const int                   before = all.empty() ? 0 : all.back().first_unpack + all.back().n_unpacks;
    if (all.empty() || all.back().n_blocks + n > shape.unpacked) all.push_back({work.n_tiles, 0, before, 0, 0, 0});
    PrefillLaunch& launch = all.back();
    put(lists.unpacks, before, cuda::UnpackedBlocks{s, first, n, launch.n_blocks});
    lists.unpacked_starts[s] = launch.n_blocks - first;
    launch.n_unpacks++;
    launch.n_blocks += n;
    launch.most_entries = std::max(launch.most_entries, n);
}

AttentionWork AttentionPlanner::plan(const StepPlan& plan, const GroupPlan& tables, const AttentionShape& shape,
                                     const cuda::Context& gpu, const AttentionLists& lists) {
    check(plan.readable.size() == std::size_t(plan.n_seqs()), "a plan that does not say what is readable");
    AttentionWork work;
    int           n_items = 0, n_results = 0;
    const auto    item      = [&](const cuda::SplitKvItem& i) { put(lists.items, n_items++, i); };
    const int     rows      = cuda::shared_tile_rows(shape.head_dim, shape.value_dim);
    const int     n_queries = shape.block_size == 0 || shape.deterministic || shape.window > 0 || shape.first > 0
                                  ? 0
                                  : rows / (shape.n_heads / shape.n_kv_heads);
    const int     shared    = shared_length(plan, tables, shape, gpu, n_queries);
    beginnings_.assign(std::size_t(plan.n_seqs()), {});
    if (lists.prefills) lists.prefills->clear();
    if (shared > 0)
        for (const SharedPrefix& p : prefixes_.prefixes())
            for (int i = 0; i < p.n; i++) {
                Beginning& of = beginnings_[std::size_t(prefixes_.order()[std::size_t(p.first) + std::size_t(i)])];
                of.end        = p.end;
                of.n_splits += (p.end - p.begin + shared - 1) / shared;
            }
    const int  tile      = cuda::prefill_tile(gpu, shape.head_dim, shape.value_dim);
    const auto seen_from = [&](int row) { // the first position in the window of a row's token
        const int position = plan.positions[std::size_t(row)];
        return shape.window == 0 ? shape.first
               : shape.chunked   ? position / shape.window * shape.window
                                 : std::max(0, position - shape.window + 1);
    };
    // Sequences of one query, and of the few that check a draft, are decoded; longer ones are prompts.
    const auto rows_of = [&](int s) { return plan.token_start[std::size_t(s) + 1] - plan.token_start[std::size_t(s)]; };
    int        n_few   = 0; // queries
    for (int s = 0; s < plan.n_seqs(); s++) n_few += rows_of(s) <= few_queries ? rows_of(s) : 0;
    const auto decodes = [&](int s) {
        return rows_of(s) == 1 || (rows_of(s) <= few_queries && n_few <= shape.most_queries);
    };
    cuda::SplitLengths lengths;
    std::int64_t       positions = 0; // of the sequences that decode
    if (!shape.deterministic) {
        for (int s = 0; s < plan.n_seqs(); s++)
            for (int row = plan.token_start[std::size_t(s)]; decodes(s) && row < plan.token_start[std::size_t(s) + 1];
                 row++)
                positions +=
                    plan.positions[std::size_t(row)] + 1 - std::max(seen_from(row), beginnings_[std::size_t(s)].end);
        lengths =
            cuda::split_lengths(gpu, shape.head_dim, shape.value_dim, positions * shape.n_kv_heads, shape.unpacked > 0);
        lengths.length = bounded(lengths.length, positions, gpu);
        if (lengths.short_length > 0) lengths.short_length = bounded(lengths.short_length, positions, gpu);
        if (lengths.short_length >= lengths.length || shared > 0) lengths.short_length = 0;
    }
    if (shape.alone) {
        const int n = cuda::megakernel_splits(gpu, shape.n_heads, shape.n_kv_heads);
        if (positions > n * cuda::fixed_split_length) lengths = {(int(positions) + 16 * n - 1) / (16 * n) * 16};
    }
    int        longest = 0, most_splits = 1;
    const auto one_query = [&](int row, int s, int wanted) {
        Beginning& of    = beginnings_[std::size_t(s)];
        const int  begin = std::max(seen_from(row), of.end), end = plan.positions[std::size_t(row)] + 1;
        const bool fixed = shape.deterministic;
        const int  from  = fixed ? begin / wanted * wanted : begin;
        const auto [n, length] =
            fixed ? cuda::Splits{(end - from + wanted - 1) / wanted, wanted} : cuda::splits_of(end - from, wanted);
        longest      = std::max(longest, end - begin);
        of.result    = n_results;
        of.n_results = of.n_splits + n;
        n_results += of.n_results;
        most_splits = std::max(most_splits, n);
        for (int i = 0; i < n; i++)
            item({row, tables.origin(std::size_t(s)), std::max(begin, from + i * length),
                  std::min(end, from + (i + 1) * length), of.n_results, of.n_splits + i, plan.readable[std::size_t(s)],
                  of.n_splits, shared > 0 ? of.result + of.n_splits + i - n_items : 0});
    };
    for (int s = 0; s < plan.n_seqs(); s++) {
        const int first = plan.token_start[std::size_t(s)], end = plan.token_start[std::size_t(s) + 1];
        if (tile > 0 && (decodes(s) || shape.deterministic)) {
            for (int row = first; row < end; row++) one_query(row, s, lengths.length);
            continue;
        }
        if (shape.unpacked > 0 && first < end)
            unpack(s, seen_from(first), plan.positions[std::size_t(end) - 1], shape, work, lists);
        for (int row = first; row < end;) {
            std::int32_t* to = lists.tiles + std::size_t(work.n_tiles++) * 3;
            int           n  = std::min(std::max(tile, 16), end - row);
            if (shape.chunked) n = std::min(n, shape.window - plan.positions[std::size_t(row)] % shape.window);
            to[0] = s, to[1] = row, to[2] = n;
            row += n;
        }
        if (shape.unpacked > 0 && first < end)
            lists.prefills->back().n_tiles = work.n_tiles - lists.prefills->back().first_tile;
    }
    const auto round_up = [&](int from) {
        const int n = shape.rounded ? rounded_items(n_items - from) : n_items - from;
        while (n_items - from < n) item({});
        return n;
    };
    work.one_warp = !shape.deterministic && most_splits == 1 &&
                    cuda::one_warp_each(gpu, shape.head_dim, shape.value_dim, shape.n_kv_heads, n_items, positions,
                                        longest, shared > 0);
    work.n_items = round_up(0);
    if (lengths.short_length > 0 && tile > 0) {
        for (int s = 0; s < plan.n_seqs(); s++)
            for (int row = plan.token_start[std::size_t(s)]; decodes(s) && row < plan.token_start[std::size_t(s) + 1];
                 row++)
                one_query(row, s, lengths.short_length);
        work.n_short = round_up(work.n_items);
    }
    if (shared > 0) {
        const int n = write_shared(plan, tables, shared, n_queries, lists), queries = int(prefixes_.order().size());
        work.n_shared         = shape.rounded ? rounded_items(n) : n;
        work.n_shared_queries = shape.rounded ? rounded_items(queries) : queries;
        for (int i = n; i < work.n_shared; i++) put(lists.shared, i, cuda::SharedTile{});
        for (int i = queries; i < work.n_shared_queries; i++) put(lists.queries, i, cuda::SharedQuery{});
    }
    return work;
}

} // namespace quire
