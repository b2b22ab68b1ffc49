// quire.compute.cuda.attention_plan: how a step's attention is cut for the GPU: split-KV items for sequences with one query, tiles of
// queries for prompts. Owns nothing.
module;

#include "../../../cuda/kernels.h"

export module quire.compute.cuda.attention_plan;

import quire.core.base;
import quire.step.plan;

export namespace quire {

struct AttentionShape {
    int  head_dim = 0, value_dim = 0, n_kv_heads = 0;
    int  window        = 0;     // sliding window; 0: none
    bool deterministic = false; // splits at fixed positions, the same in any step
    bool rounded       = false; // numbers of items are rounded up, so that steps share a CUDA graph
};

struct AttentionWork {
    int  n_items = 0, n_short = 0; // SplitKvItems
    bool one_warp = false;
    int  n_tiles  = 0; // PrefillTiles
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

// Writes the step's SplitKvItems, for layers with these tables, and PrefillTiles, as words of 4 bytes.
AttentionWork plan_attention(const StepPlan& plan, const GroupPlan& tables, const AttentionShape& shape,
                             const cuda::Context& gpu, std::int32_t* items, std::int32_t* tiles);

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

// Splits of a list keep to most_splits(): longer ones where the contexts of a step ask for more.
int bounded(int length, std::int64_t positions, const cuda::Context& gpu) {
    const auto most = std::max(cuda::most_splits(gpu), 1);
    const auto each = (positions + most - 1) / most, unit = std::int64_t(cuda::fixed_split_length);
    return std::max(length, int((each + unit - 1) / unit * unit));
}

AttentionWork plan_attention(const StepPlan& plan, const GroupPlan& tables, const AttentionShape& shape,
                             const cuda::Context& gpu, std::int32_t* items, std::int32_t* tiles) {
    check(plan.readable.size() == std::size_t(plan.n_seqs()), "a plan that does not say what is readable");
    AttentionWork work;
    int           n_items = 0;
    const auto    item    = [&](const cuda::SplitKvItem& i) {
        std::memcpy(items + std::size_t(n_items++) * sizeof i / 4, &i, sizeof i);
    };
    const int  tile      = cuda::prefill_tile(gpu, shape.head_dim, shape.value_dim);
    const auto seen_from = [&](int row) { // the first position in the window of a row's token
        return shape.window > 0 ? std::max(0, plan.positions[std::size_t(row)] - shape.window + 1) : 0;
    };
    const auto single = [&](int s) { // a sequence of one query
        return plan.token_start[std::size_t(s) + 1] - plan.token_start[std::size_t(s)] == 1;
    };
    cuda::SplitLengths lengths;
    std::int64_t       positions = 0; // of the sequences of one query
    if (!shape.deterministic) {
        for (int s = 0; s < plan.n_seqs(); s++)
            if (const int row = plan.token_start[std::size_t(s)]; single(s))
                positions += plan.positions[std::size_t(row)] + 1 - seen_from(row);
        lengths        = cuda::split_lengths(gpu, shape.head_dim, shape.value_dim, positions * shape.n_kv_heads);
        lengths.length = bounded(lengths.length, positions, gpu);
        if (lengths.short_length > 0) lengths.short_length = bounded(lengths.short_length, positions, gpu);
        if (lengths.short_length >= lengths.length) lengths.short_length = 0;
    }
    int        longest = 0, most_splits = 1;
    const auto one_query = [&](int row, int s, int wanted) {
        const int  begin = seen_from(row), end = plan.positions[std::size_t(row)] + 1;
        const bool fixed = shape.deterministic;
        const int  from  = fixed ? begin / wanted * wanted : begin;
        const auto [n, length] =
            fixed ? cuda::Splits{(end - from + wanted - 1) / wanted, wanted} : cuda::splits_of(end - from, wanted);
        longest     = std::max(longest, end - begin);
        most_splits = std::max(most_splits, n);
        for (int i = 0; i < n; i++)
            item({row, tables.origin(std::size_t(s)), std::max(begin, from + i * length),
                  std::min(end, from + (i + 1) * length), n, i, plan.readable[std::size_t(s)]});
    };
    for (int s = 0; s < plan.n_seqs(); s++) {
        const int first = plan.token_start[std::size_t(s)], end = plan.token_start[std::size_t(s) + 1];
        if (tile > 0 && (single(s) || shape.deterministic)) {
            for (int row = first; row < end; row++) one_query(row, s, lengths.length);
            continue;
        }
        for (int row = first; row < end; row += std::max(tile, 16)) {
            std::int32_t* to = tiles + std::size_t(work.n_tiles++) * 3;
            to[0] = s, to[1] = row, to[2] = std::min(std::max(tile, 16), end - row);
        }
    }
    const auto round_up = [&](int from) {
        const int n = shape.rounded ? rounded_items(n_items - from) : n_items - from;
        while (n_items - from < n) item({});
        return n;
    };
    work.one_warp =
        !shape.deterministic && most_splits == 1 &&
        cuda::one_warp_each(gpu, shape.head_dim, shape.value_dim, shape.n_kv_heads, n_items, positions, longest);
    work.n_items = round_up(0);
    if (lengths.short_length > 0 && tile > 0) {
        for (int s = 0; s < plan.n_seqs(); s++)
            if (single(s)) one_query(plan.token_start[std::size_t(s)], s, lengths.short_length);
        work.n_short = round_up(work.n_items);
    }
    return work;
}

} // namespace quire
