// quire.schedule.step_message: StepPlan ↔ bytes, for ranks in other processes: what is new since the plan before. Sender and receiver
// each **own** the block tables of the last plan.
//
// A message is a row of numbers (LEB128, small ones in one byte): of each sequence the place it had in the last plan, the rows and the
// context it adds, how many positions before these are not readable, how much of its old block table still holds and the ids behind
// that, its tokens; then the logit rows. Positions and slots follow from these. 64 sequences that decode take about 450 bytes.
export module quire.schedule.step_message;

import quire.core.base;
import quire.core.std;
import quire.paging.block;
import quire.schedule.step_plan;

export namespace quire {

// What a receiver can take; everything beyond is refused.
struct StepMessageLimits {
    int block_size = 16, n_blocks = 0, n_swap = 0, context = 0, max_tokens = 0, max_sequences = 0, vocab_size = 0;
};

// What the last plan said of its sequences.
struct SentSequences {
    struct One {
        std::int32_t         context = 0;
        std::vector<BlockId> table;
    };
    std::vector<One> all;
};

// The plan without its moves and its sampling.
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
    // Error: not a message that write() made after those before. The plan is then not to be used.
    Result<void> read(std::span<const std::byte> message, StepPlan& plan);

private:
    StepMessageLimits limits_;
    SentSequences     last_, next_;
};

void         write_moves(const BlockMoves& moves, std::vector<std::byte>& out);
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

// The place in the last plan whose block table goes on in this one: usually the one behind the last that was found. -1: none.
int find_last(const SentSequences& last, std::span<const BlockId> table, int expected) {
    const auto begins = [&](int i) {
        const std::vector<BlockId>& old = last.all[std::size_t(i)].table;
        return !old.empty() && !table.empty() && common(old, table) + 1 >= int(std::min(old.size(), table.size()));
    };
    const int n = int(last.all.size());
    for (int k = 0; k < n; k++)
        if (const int i = (expected + k) % n; begins(i)) return i;
    return -1;
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
                  context = at(plan.context_lens);
        const auto table  = std::span(plan.block_tables)
                               .subspan(std::size_t(at(plan.table_start)),
                                        std::size_t(behind(plan.table_start) - at(plan.table_start)));
        const int old = find_last(last_, table, last_.all.empty() ? 0 : expected % int(last_.all.size()));
        const SentSequences::One none, &base = old < 0 ? none : last_.all[std::size_t(old)];
        const int                same = common(base.table, table);
        expected                      = old + 1;
        put(out, std::uint64_t(expected));
        put(out, std::uint64_t(n_tokens));
        put_signed(out, context - n_tokens - base.context);
        put(out, std::uint64_t(context - n_tokens - at(plan.readable)));
        put(out, std::uint64_t(same));
        put(out, table.size() - std::size_t(same));
        for (BlockId id : table.subspan(std::size_t(same))) put(out, std::uint64_t(id));
        for (int t = first; t < first + n_tokens; t++) {
            const int position = context - n_tokens + t - first;
            check(plan.positions[std::size_t(t)] == position &&
                      plan.slots[std::size_t(t)] ==
                          table[std::size_t(position / block_size_)] * block_size_ + position % block_size_,
                  "a plan whose positions do not follow from its contexts");
            put(out, std::uint64_t(plan.tokens[std::size_t(t)]));
        }
        next.all[std::size_t(s)] = {context, {table.begin(), table.end()}};
    }
    put(out, plan.logit_rows.size());
    for (std::int32_t last = -1; std::int32_t row : plan.logit_rows)
        put(out, std::uint64_t(row - std::exchange(last, row)));
    last_ = std::move(next);
}

Result<void> StepReceiver::read(std::span<const std::byte> message, StepPlan& plan) {
    plan.clear();
    NumberReader in(message);
    const int    n = in.next(0, limits_.max_sequences);
    plan.token_start.push_back(0);
    plan.table_start.push_back(0);
    next_.all.resize(std::size_t(n));
    for (int s = 0; s < n && in.ok(); s++) {
        const int                old      = in.next(0, std::int64_t(last_.all.size())) - 1;
        const int                n_tokens = in.next(1, limits_.max_tokens - plan.n_tokens());
        const SentSequences::One none, &base = old < 0 ? none : last_.all[std::size_t(old)];
        const int                first    = in.next_signed(base.context, 0, limits_.context - n_tokens);
        const int                hidden   = in.next(0, first);
        const int                same     = in.next(0, std::int64_t(base.table.size()));
        const int                n_blocks = (first + n_tokens + limits_.block_size - 1) / limits_.block_size;
        const int                more     = in.next(n_blocks - same, n_blocks - same);
        if (!in.ok()) break;
        auto& [context, table] = next_.all[std::size_t(s)];
        context                = first + n_tokens;
        table.assign(base.table.begin(), base.table.begin() + same);
        for (int i = 0; i < more; i++) table.push_back(in.next(0, limits_.n_blocks - 1));
        for (int position = first; position < context; position++) {
            plan.tokens.push_back(in.next(0, limits_.vocab_size - 1));
            plan.positions.push_back(position);
            plan.slots.push_back(table[std::size_t(position / limits_.block_size)] * limits_.block_size +
                                 position % limits_.block_size);
        }
        plan.token_start.push_back(plan.n_tokens());
        plan.context_lens.push_back(context);
        plan.readable.push_back(first - hidden);
        plan.block_tables.insert(plan.block_tables.end(), table.begin(), table.end());
        plan.table_start.push_back(std::int32_t(plan.block_tables.size()));
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
