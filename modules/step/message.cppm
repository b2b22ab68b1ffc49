// quire.step.message: StepPlan ↔ bytes, for ranks in other processes: the differences from the plan before. Sender and receiver each **own** the
// block tables of the last plan.
//
// A message is a row of numbers (LEB128, small ones in one byte). Of each sequence: its place in the last plan; the rows and the context that
// it adds; how many positions before these are not readable; of each cache group where the block table begins now, how much of the old table
// still holds, and the ids behind that; the tokens. Then come the logit rows. Positions and slots follow from these numbers. 64 decoding
// sequences take about 500 bytes.
export module quire.step.message;

import quire.core.base;
import quire.step.plan;

export namespace quire {

// The limits of a receiver; a message beyond them is refused.
struct StepMessageLimits {
    int block_size = 16, n_blocks = 0, n_swap = 0, context = 0, max_tokens = 0, max_sequences = 0, vocab_size = 0;
    std::vector<int> parts = {1}; // of each cache group
};

// The sequences of the last plan.
struct SentSequences {
    struct Table {                                   // of a cache group
        std::int32_t                      first = 0; // the entry that the parts begin with, behind the released entries
        std::int32_t                      n_released = 0; // entries before it that stand in the plan
        std::vector<std::vector<BlockId>> parts;
    };
    struct One {
        std::int32_t       context = 0;
        std::vector<Table> tables;
    };
    std::vector<One> all;
};

// The plan without its moves, its sampling and its adapters: a model with adapters runs in one process.
class StepSender {
public:
    explicit StepSender(int block_size) : block_size_(block_size) {}
    void write(const StepPlan& plan, std::vector<std::byte>& out);

private:
    int           block_size_;
    SentSequences last_;
};

class StepReceiver {
public:
    explicit StepReceiver(const StepMessageLimits& limits) : limits_(limits) {}
    // Error: write() did not make this message after the earlier ones. The plan must not be used then.
    Result<void> read(std::span<const std::byte> message, StepPlan& plan);

private:
    StepMessageLimits limits_;
    SentSequences     last_, next_;
};

// Appends the moves to `out`, as a message of their own.
void write_moves(const BlockMoves& moves, std::vector<std::byte>& out);
// Error: write_moves() did not make this message, or a block is beyond the limits. The moves must not be used then.
Result<void> read_moves(std::span<const std::byte> message, const StepMessageLimits& limits, BlockMoves& moves);

} // namespace quire

module :private;

namespace quire {

void put(std::vector<std::byte>& out, std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) out.push_back(std::byte((value & 0x7f) | 0x80));
    out.push_back(std::byte(value));
}

void put_signed(std::vector<std::byte>& out, std::int64_t value) {
    put(out, (std::uint64_t(value) << 1) ^ std::uint64_t(value >> 63));
}

// Reads numbers that have to lie within bounds; after the first that does not, all are 0.
class NumberReader {
public:
    explicit NumberReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

    bool ok() const { return ok_; }
    bool at_end() const { return ok_ && at_ == bytes_.size(); }
    int  next(std::int64_t least, std::int64_t most) { return int(within(std::int64_t(raw()), least, most)); }
    int  next_signed(std::int64_t base, std::int64_t least, std::int64_t most) {
        const std::uint64_t v = raw();
        const std::int64_t  d = std::int64_t(v >> 1) ^ -std::int64_t(v & 1);
        return int(within(base + std::clamp<std::int64_t>(d, -most_delta, most_delta), least, most));
    }

private:
    static constexpr std::int64_t most_delta = std::int64_t(1) << 40;

    std::uint64_t raw() {
        std::uint64_t value = 0;
        for (int shift = 0; shift < 63; shift += 7) {
            if (at_ >= bytes_.size()) break;
            const auto byte = std::uint64_t(bytes_[at_++]);
            value |= (byte & 0x7f) << shift;
            if (byte < 0x80) return value;
        }
        ok_ = false;
        return 0;
    }
    std::int64_t within(std::int64_t value, std::int64_t least, std::int64_t most) {
        if (!ok_ || value < least || value > most) {
            ok_ = false;
            return 0;
        }
        return value;
    }

    std::span<const std::byte> bytes_;
    std::size_t                at_ = 0;
    bool                       ok_ = true;
};

int common(std::span<const BlockId> a, std::span<const BlockId> b) {
    return int(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

// How many entries a table of this plan has in common with one of the last plan, from its first entry on.
int common(const SentSequences::Table& last, std::size_t part, std::int32_t first, std::span<const BlockId> table) {
    if (part >= last.parts.size() || first < last.first) return 0;
    const std::span<const BlockId> old = last.parts[part];
    return common(old.subspan(std::min(std::size_t(first - last.first), old.size())), table);
}

// The place in the last plan whose block table goes on in this one: usually the one behind the last that was found. -1: none.
int find_last(const SentSequences& last, const SentSequences::Table& table, int expected) {
    const auto begins = [&](int i) {
        const SentSequences::Table& old = last.all[std::size_t(i)].tables[0];
        if (old.parts[0].empty() || table.parts[0].empty() || table.first < old.first) return false;
        const auto there =
            std::min(old.parts[0].size() - std::min(old.parts[0].size(), std::size_t(table.first - old.first)),
                     table.parts[0].size());
        return common(old, 0, table.first, table.parts[0]) + 1 >= int(there);
    };
    const int n = int(last.all.size());
    for (int k = 0; k < n; k++)
        if (const int i = (expected + k) % n; begins(i)) return i;
    return -1;
}

SentSequences::Table table_of(const GroupPlan& plan, std::size_t s) {
    const auto begin = std::size_t(plan.table_start[s]), size = std::size_t(plan.table_start[s + 1]) - begin;
    const std::span<const BlockId> one = std::span(plan.parts[0].tables).subspan(begin, size);
    const auto           n = std::size_t(std::ranges::find_if(one, [](BlockId id) { return id >= 0; }) - one.begin());
    SentSequences::Table table{plan.first_entry[s] + std::int32_t(n), std::int32_t(n), {}};
    for (const GroupPlan::Part& part : plan.parts) {
        const auto entries = std::span(part.tables).subspan(begin + n, size - n);
        table.parts.emplace_back(entries.begin(), entries.end());
    }
    return table;
}

void StepSender::write(const StepPlan& plan, std::vector<std::byte>& out) {
    const int n = plan.n_seqs();
    put(out, std::uint64_t(n));
    int           expected = 0;
    SentSequences next;
    next.all.resize(std::size_t(n));
    for (int s = 0; s < n; s++) {
        const auto at     = [&](const std::vector<std::int32_t>& v) { return v[std::size_t(s)]; };
        const auto behind = [&](const std::vector<std::int32_t>& v) { return v[std::size_t(s) + 1]; };
        const int  first = at(plan.token_start), n_tokens = behind(plan.token_start) - first,
                  context                         = at(plan.context_lens);
        std::vector<SentSequences::Table>& tables = next.all[std::size_t(s)].tables;
        for (const GroupPlan& group : plan.groups) tables.push_back(table_of(group, std::size_t(s)));
        next.all[std::size_t(s)].context = context;
        const int old = find_last(last_, tables[0], last_.all.empty() ? 0 : expected % int(last_.all.size()));
        const SentSequences::One none, &base = old < 0 ? none : last_.all[std::size_t(old)];
        expected = old + 1;
        put(out, std::uint64_t(expected));
        put(out, std::uint64_t(n_tokens));
        put_signed(out, context - n_tokens - base.context);
        const SentSequences::Table nothing;
        const auto                 before_of = [&](std::size_t g) -> const SentSequences::Table& {
            return old < 0 ? nothing : base.tables[g];
        };
        bool moved = false; // some table begins elsewhere
        for (std::size_t g = 0; g < tables.size(); g++)
            moved = moved || tables[g].first != before_of(g).first || tables[g].n_released != before_of(g).n_released;
        put(out, 2 * std::uint64_t(context - n_tokens - at(plan.readable)) + (moved ? 1 : 0));
        for (std::size_t g = 0; g < tables.size(); g++) {
            const SentSequences::Table& before = before_of(g);
            if (moved) put_signed(out, tables[g].first - before.first);
            if (moved) put(out, std::uint64_t(tables[g].n_released));
            for (std::size_t part = 0; part < tables[g].parts.size(); part++) {
                const std::span<const BlockId> ids  = tables[g].parts[part];
                const int                      same = common(before, part, tables[g].first, ids);
                put(out, std::uint64_t(same));
                put(out, ids.size() - std::size_t(same));
                for (BlockId id : ids.subspan(std::size_t(same))) put(out, std::uint64_t(id));
                for (int t = first; t < first + n_tokens; t++) {
                    const int position = context - n_tokens + t - first;
                    check(plan.positions[std::size_t(t)] == position &&
                              plan.groups[g].parts[part].slots[std::size_t(t)] ==
                                  ids[std::size_t(position / block_size_ - tables[g].first)] * block_size_ +
                                      position % block_size_,
                          "a plan whose positions do not follow from its contexts");
                }
            }
        }
        for (int t = first; t < first + n_tokens; t++) put(out, std::uint64_t(plan.tokens[std::size_t(t)]));
    }
    put(out, plan.logit_rows.size());
    for (std::int32_t last = -1; std::int32_t row : plan.logit_rows)
        put(out, std::uint64_t(row - std::exchange(last, row)));
    last_ = std::move(next);
}

Result<void> StepReceiver::read(std::span<const std::byte> message, StepPlan& plan) {
    plan.groups.resize(limits_.parts.size());
    for (std::size_t g = 0; g < plan.groups.size(); g++) plan.groups[g].parts.resize(std::size_t(limits_.parts[g]));
    plan.clear();
    NumberReader in(message);
    const int    n = in.next(0, limits_.max_sequences);
    plan.token_start.push_back(0);
    for (GroupPlan& group : plan.groups) group.table_start.push_back(0);
    next_.all.assign(std::size_t(n), {});
    for (int s = 0; s < n && in.ok(); s++) {
        const int                old      = in.next(0, std::int64_t(last_.all.size())) - 1;
        const int                n_tokens = in.next(1, limits_.max_tokens - plan.n_tokens());
        const SentSequences::One none, &base = old < 0 ? none : last_.all[std::size_t(old)];
        const int                first    = in.next_signed(base.context, 0, limits_.context - n_tokens);
        const int                hidden   = in.next(0, 2 * std::int64_t(first) + 1);
        const bool               moved    = hidden % 2 == 1;
        const int                entries  = (first + n_tokens + limits_.block_size - 1) / limits_.block_size;
        next_.all[std::size_t(s)].context = first + n_tokens;
        for (std::size_t g = 0; g < plan.groups.size() && in.ok(); g++) {
            const SentSequences::Table none_of_it, &before = old < 0 ? none_of_it : base.tables[g];
            GroupPlan&                 group = plan.groups[g];
            SentSequences::Table&      table = next_.all[std::size_t(s)].tables.emplace_back();
            table.first      = moved ? in.next_signed(before.first, 0, first / limits_.block_size) : before.first;
            table.n_released = moved ? in.next(0, table.first) : before.n_released;
            if (table.first > first / limits_.block_size) return fail("a step that cannot be came from rank 0");
            table.parts.resize(group.parts.size());
            for (std::size_t part = 0; part < group.parts.size() && in.ok(); part++) {
                const auto               skip = std::size_t(std::max(table.first - before.first, 0));
                std::span<const BlockId> all;
                if (part < before.parts.size() && before.first <= table.first) all = before.parts[part];
                const auto kept = all.subspan(std::min(skip, all.size()));
                const int  same = in.next(0, std::int64_t(kept.size()));
                const int  size = entries - table.first;
                const int  more = in.next(size - same, size - same);
                auto&      ids  = table.parts[part];
                if (!in.ok()) break;
                ids.assign(kept.begin(), kept.begin() + same);
                for (int i = 0; i < more; i++) ids.push_back(in.next(0, limits_.n_blocks - 1));
                auto& [tables, slots] = group.parts[part];
                tables.insert(tables.end(), std::size_t(table.n_released), -1);
                tables.insert(tables.end(), ids.begin(), ids.end());
                for (int position = first; position < first + n_tokens; position++)
                    slots.push_back(ids[std::size_t(position / limits_.block_size - table.first)] * limits_.block_size +
                                    position % limits_.block_size);
            }
            group.first_entry.push_back(table.first - table.n_released);
            group.table_start.push_back(std::int32_t(group.parts[0].tables.size()));
        }
        if (!in.ok()) break;
        for (int position = first; position < first + n_tokens; position++) {
            plan.tokens.push_back(in.next(0, limits_.vocab_size - 1));
            plan.positions.push_back(position);
        }
        plan.token_start.push_back(plan.n_tokens());
        plan.context_lens.push_back(first + n_tokens);
        plan.readable.push_back(first - hidden / 2);
    }
    const int n_rows = in.next(0, plan.n_tokens());
    for (int i = 0, row = -1; i < n_rows && in.ok(); i++) {
        row += in.next(1, plan.n_tokens() - 1 - row);
        plan.logit_rows.push_back(row);
    }
    if (!in.at_end()) return fail("a step that cannot be came from rank 0");
    std::swap(last_, next_);
    return {};
}

void write_moves(const BlockMoves& moves, std::vector<std::byte>& out) {
    for (const auto* list : {&moves.copies, &moves.swap_out, &moves.swap_in}) {
        put(out, list->size());
        for (auto [from, to] : *list) put(out, std::uint64_t(from)), put(out, std::uint64_t(to));
    }
}

Result<void> read_moves(std::span<const std::byte> message, const StepMessageLimits& limits, BlockMoves& moves) {
    moves.clear();
    NumberReader in(message);
    const auto   read = [&](std::vector<BlockCopy>& list, int n_from, int n_to) {
        for (int n = in.next(0, std::int64_t(message.size())); n > 0 && in.ok(); n--) {
            const int from = in.next(0, n_from - 1);
            list.push_back({from, in.next(0, n_to - 1)});
        }
    };
    read(moves.copies, limits.n_blocks, limits.n_blocks);
    read(moves.swap_out, limits.n_blocks, limits.n_swap);
    read(moves.swap_in, limits.n_swap, limits.n_blocks);
    if (!in.at_end()) return fail("block moves that cannot be came from rank 0");
    return {};
}

} // namespace quire
