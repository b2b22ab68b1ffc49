// quire.compute.cuda.shared_prefixes: which sequences of a step begin with the same blocks, as a tree: all of them share a beginning, some of
// them share what follows, and so on. Attention reads K and V of such positions once for all of the sequences. **Owns** the lists of the
// last step.
export module quire.compute.cuda.shared_prefixes;

import quire.core.base;
import quire.step.plan;

export namespace quire {

// Positions begin .. end-1 of the sequences order()[first] .. order()[first + n - 1] are in the same blocks.
struct SharedPrefix {
    int first = 0, n = 0, begin = 0, end = 0;
};

class SharedPrefixes {
public:
    // Of the sequences with one query. The block with a query's own position is never shared. `least`: positions that a shared
    // part has at least.
    void find(const StepPlan& plan, const GroupPlan& tables, int block_size, int least);

    std::span<const std::int32_t> order() const { return order_; } // sequences of the plan
    // Each after the ones that lie before it; the parts of one sequence follow each other without a gap, from position 0 on.
    std::span<const SharedPrefix> prefixes() const { return prefixes_; }

private:
    std::vector<std::int32_t> order_;
    std::vector<int>          common_; // [order] leading blocks that a sequence shares with the one before it
    std::vector<SharedPrefix> prefixes_, open_;
};

} // namespace quire

module :private;

namespace quire {

// How many ids two tables have in common from the beginning on.
int n_common(std::span<const BlockId> a, std::span<const BlockId> b) {
    constexpr std::size_t step = 32; // memcmp is faster than a loop
    const std::size_t     n    = std::min(a.size(), b.size());
    std::size_t           i    = 0;
    while (i + step <= n && std::memcmp(&a[i], &b[i], step * sizeof a[0]) == 0) i += step;
    while (i < n && a[i] == b[i]) i++;
    return int(i);
}

void SharedPrefixes::find(const StepPlan& plan, const GroupPlan& tables, int block_size, int least) {
    prefixes_.clear();
    const auto row        = [&](int s) { return std::size_t(plan.token_start[std::size_t(s)]); };
    const auto takes_part = [&](int s) { return row(s + 1) - row(s) == 1 && tables.first_entry[std::size_t(s)] == 0; };
    const auto blocks     = [&](int s) { // in front of the one with the query's position
        const auto at = std::size_t(s), n = std::size_t(plan.positions[row(s)] / block_size);
        return std::span(tables.parts[0].tables).subspan(std::size_t(tables.table_start[at]), n);
    };
    const auto in_order = [&](int a, int b, int common) {
        const auto ours = blocks(a), theirs = blocks(b);
        const auto at = std::size_t(common);
        if (at < ours.size() && at < theirs.size()) return ours[at] < theirs[at];
        return ours.size() != theirs.size() ? ours.size() < theirs.size() : a < b;
    };
    int n = 0;
    for (int s = 0; s < plan.n_seqs(); s++) n += takes_part(s);
    // Mostly the sequences are those of the step before, and their order is the same.
    const auto compare_neighbours = [&] {
        common_.assign(std::size_t(n), 0);
        for (std::size_t i = 1; i < order_.size(); i++) {
            common_[i] = n_common(blocks(order_[i - 1]), blocks(order_[i]));
            if (!in_order(order_[i - 1], order_[i], common_[i])) return false;
        }
        return true;
    };
    const bool same = int(order_.size()) == n &&
                      std::ranges::all_of(order_, [&](int s) { return s < plan.n_seqs() && takes_part(s); });
    if (!same || !compare_neighbours()) {
        order_.clear();
        for (int s = 0; s < plan.n_seqs(); s++)
            if (takes_part(s)) order_.push_back(s);
        std::ranges::sort(order_, [&](int a, int b) { return in_order(a, b, n_common(blocks(a), blocks(b))); });
        compare_neighbours();
    }
    // Neighbours from `first` on that share the positions before `begin`; `end` is not known yet.
    for (open_.assign(1, {0, n, 0, 0}); !open_.empty();) {
        SharedPrefix some = open_.back();
        open_.pop_back();
        if (some.n < 2) continue;
        const auto inside = std::span(common_).subspan(std::size_t(some.first) + 1, std::size_t(some.n) - 1);
        const int  all    = *std::ranges::min_element(inside);
        some.end          = all * block_size;
        if (some.end - some.begin >= least) {
            prefixes_.push_back(some);
            some.begin = some.end;
        }
        for (int from = 0, i = 0; i <= int(inside.size()); i++)
            if (i == int(inside.size()) || inside[std::size_t(i)] == all) {
                open_.push_back({some.first + from, i + 1 - from, some.begin, 0});
                from = i + 1;
            }
    }
}

} // namespace quire
