// Runs plans on hashes, and looks for plans that cannot be.
#include <cstdio>
#include <stdexcept>

#include "sim_executor.h"

import quire.engine.files.segment_files;

namespace quire::simulation {

// Layers of a block, at most.
static int cells_of(const CacheLayout& layout) {
    int n = 1;
    for (const CacheGroup& g : layout.groups) n = std::max(n, g.layers_per_block);
    return n;
}

SimExecutor::SimExecutor(SimOptions options, std::shared_ptr<Clock> clock)
    : o_(std::move(options)), clock_(std::move(clock)), n_cells_(cells_of(o_.layout)),
      device_(std::size_t(o_.n_blocks * o_.block_size * n_cells_)),
      swap_(std::size_t(o_.n_swap * o_.block_size * n_cells_)), order_(o_.seed, Stream::move_order),
      step_(o_.first_step) {
    std::uint64_t n = 0;
    for (std::vector<Cell>* memory : {&device_, &swap_})
        for (Cell& c : *memory)
            for (std::uint64_t& v : c.value) v = mix(++n);
    const std::size_t n_values = o_.layout.keeps_state() ? o_.layout.groups.back().layers.size() * n_rounds : 0;
    for (const bool swap : {false, true}) {
        states(swap).resize(std::size_t(swap ? o_.n_swap : o_.n_blocks));
        for (StateBlock& b : states(swap))
            for (std::size_t i = 0; i < n_values; i++) b.value.push_back(mix(++n));
    }
}

void SimExecutor::fault(const std::string& what) {
    if (broken_.empty()) broken_ = cat("step ", step_, " of the device: ", what);
}

void SimExecutor::copy(bool from_swap, bool to_swap, std::span<const BlockCopy> list) {
    const std::vector<Cell>& from = cells(from_swap);
    std::vector<Cell>&       to   = cells(to_swap);
    const std::ptrdiff_t     n    = std::ptrdiff_t(o_.block_size) * n_cells_;
    for (const auto [a, b] : list) {
        if (a < 0 || b < 0 || (a + 1) * n > std::ptrdiff_t(from.size()) || (b + 1) * n > std::ptrdiff_t(to.size())) {
            fault(cat("block ", a, " cannot be copied to ", b));
            continue;
        }
        std::copy_n(from.begin() + a * n, n, to.begin() + b * n);
        states(to_swap)[std::size_t(b)] = states(from_swap)[std::size_t(a)];
        clock_->pass(o_.block_seconds);
        n_moves++;
    }
}

std::vector<std::span<std::byte>> SimExecutor::host_block(BlockId block) const {
    const auto        n     = std::size_t(o_.block_size) * std::size_t(n_cells_);
    const StateBlock& state = swap_states_[std::size_t(block)];
    return {piece_of(std::span(swap_).subspan(std::size_t(block) * n, n)), piece_of(std::span(state.value)),
            piece_of(state.step)};
}

// How a value stands in block i of a unit.
static std::uint64_t scrambled(std::uint64_t value, int i) { return value ^ mix(std::uint64_t(i) + 99); }

std::uint64_t SimExecutor::read_state(const GroupPlan& group, int s, const Lane& lane, int round) {
    const std::span<const BlockId> unit = group.from(std::size_t(s));
    if (unit[0] < 0) return 0;
    const std::size_t   at    = std::size_t(lane.place) * n_rounds + std::size_t(round);
    const std::uint64_t value = scrambled(states_[std::size_t(unit[0])].value[at], 0);
    for (int i = 0; i < group.unit; i++) {
        const StateBlock& b = states_[std::size_t(unit[std::size_t(i)])];
        if (b.step < 0)
            fault(cat("sequence ", s, " reads a state from block ", unit[std::size_t(i)],
                      b.step == -1 ? ", where none was written" : ", which has other content"));
        if (scrambled(b.value[at], i) != value) fault(cat("sequence ", s, " reads a state that is in pieces"));
    }
    return value;
}

void SimExecutor::write_state(const GroupPlan& group, int s, const Lane& lane, int round, std::uint64_t value) {
    const std::span<const BlockId> unit = group.to(std::size_t(s));
    for (int i = 0; i < group.unit; i++) {
        StateBlock& b                                                    = states_[std::size_t(unit[std::size_t(i)])];
        b.value[std::size_t(lane.place) * n_rounds + std::size_t(round)] = scrambled(value, i);
        b.step                                                           = step_;
        const std::int64_t first = std::int64_t(unit[std::size_t(i)]) * o_.block_size * n_cells_;
        for (std::int64_t c = 0; c < std::int64_t(o_.block_size) * n_cells_; c++)
            device_[std::size_t(first + c)].step = -2; // the memory of K and V no more
    }
}

// Whether the states of a step are there, and none is written that another sequence reads or writes.
void SimExecutor::check_states() {
    for (const GroupPlan& group : plan_.groups) {
        if (!group.keeps_state()) continue;
        std::map<BlockId, int> writers;
        const auto             n = std::size_t(plan_.n_seqs());
        if (group.state_from.size() != n * std::size_t(group.unit) || group.state_to.size() != group.state_from.size())
            return fault("a plan without the states of its sequences");
        for (std::size_t s = 0; s < n; s++)
            for (BlockId b : group.to(s)) {
                if (b < 0 || b >= o_.n_blocks) return fault(cat("a state in block ", b, " of ", o_.n_blocks));
                if (!writers.emplace(b, int(s)).second) fault(cat("two states are written to block ", b));
            }
        for (std::size_t s = 0; s < n; s++) {
            const bool begins = plan_.positions[std::size_t(plan_.token_start[s])] == 0;
            if (begins != (group.from(s)[0] < 0))
                fault(cat("sequence ", s, begins ? " begins with" : " has no", " state"));
            n_states_kept += !begins && group.from(s)[0] != group.to(s)[0];
            for (BlockId b : group.from(s))
                if (const auto w = writers.find(b); b >= 0 && w != writers.end() && w->second != int(s))
                    fault(cat("sequence ", s, " reads the state that sequence ", w->second, " writes"));
        }
    }
}

// A device that copies beside its steps makes moves at any time up to the one when somebody waits for them.
MoveTicket SimExecutor::move_blocks(const BlockMoves& moves) {
    if (std::exchange(trouble.move, false)) throw std::runtime_error("a simulated failure of a move");
    if (trace)
        for (const auto& [name, list] :
             {std::pair("out", &moves.swap_out), std::pair("in", &moves.swap_in), std::pair("copy", &moves.copies)})
            for (const auto [a, b] : *list) std::printf("   %s %d to %d\n", name, a, b);
    waiting_.push_back(moves);
    if (std::exchange(trouble.torn_move, false)) tear(moves);
    if (o_.reordered_moves)
        for (std::vector<BlockCopy>* list :
             {&waiting_.back().swap_out, &waiting_.back().swap_in, &waiting_.back().copies})
            for (std::size_t i = list->size(); i > 1; i--)
                std::swap((*list)[i - 1], (*list)[std::size_t(order_.below(int(i)))]);
    asked_++;
    if (!o_.late_moves) wait_for_moves(asked_);
    make_some_moves();
    return asked_;
}

// Some of the moves that nobody waits for yet: a list is made behind the lists before it.
void SimExecutor::make_some_moves() {
    if (!o_.reordered_moves || waiting_.empty()) return;
    BlockMoves& moves = waiting_.front();
    const auto  some  = [&](bool from_swap, bool to_swap, std::vector<BlockCopy>& list) {
        for (int n = list.empty() ? 0 : order_.below(int(list.size()) + 1); n > 0; n--) {
            copy(from_swap, to_swap, std::array{list.back()});
            list.pop_back();
            n_early_moves++;
        }
        return list.empty();
    };
    (void)(some(false, true, moves.swap_out) && some(true, false, moves.swap_in) && some(false, false, moves.copies));
}

// Makes some of the moves and the half of one, and fails.
void SimExecutor::tear(const BlockMoves& moves) {
    wait_for_moves(asked_);
    for (const auto& [from_swap, to_swap, list] :
         {std::tuple(false, true, &moves.swap_out), std::tuple(true, false, &moves.swap_in),
          std::tuple(false, false, &moves.copies)}) {
        if (list->empty()) continue;
        const int n = order_.below(int(list->size()));
        copy(from_swap, to_swap, std::span(*list).first(std::size_t(n)));
        const auto [a, b]         = (*list)[std::size_t(n)];
        const std::ptrdiff_t size = std::ptrdiff_t(o_.block_size) * n_cells_;
        std::copy_n(cells(from_swap).begin() + a * size, size / 2, cells(to_swap).begin() + b * size);
        n_torn_moves++;
        break;
    }
    throw std::runtime_error("a simulated failure in the middle of a move");
}

void SimExecutor::wait_for_moves(MoveTicket ticket) {
    if (ticket > asked_) fault("a ticket of moves that were not started");
    for (; moved_ < ticket && !waiting_.empty(); moved_++) {
        const BlockMoves& moves = waiting_.front();
        copy(false, true, moves.swap_out);
        copy(true, false, moves.swap_in);
        copy(false, false, moves.copies);
        waiting_.pop_front();
    }
}

void SimExecutor::launch(const StepPlan& plan) {
    if (before_launch) before_launch();
    if (std::exchange(trouble.launch, false)) throw std::runtime_error("a simulated failure of a launch");
    step_++;
    wait_for_moves(plan.after);
    plan_     = plan;
    computed_ = false;
    if (trace) print();
    clock_->pass(1e-3 + o_.token_seconds * plan.n_tokens());
    if (!o_.late) compute();
}

void SimExecutor::print() const {
    for (int s = 0; s < plan_.n_seqs(); s++) {
        const int   first = plan_.token_start[std::size_t(s)], end = plan_.token_start[std::size_t(s) + 1];
        std::string text =
            cat("   sequence ", s, ", positions ", plan_.positions[std::size_t(first)], "..",
                plan_.positions[std::size_t(end - 1)], ", ", plan_.readable[std::size_t(s)], " readable; tokens");
        for (int t = first; t < end; t++) text += cat(" ", plan_.tokens[std::size_t(t)]);
        for (const GroupPlan& group : plan_.groups)
            if (group.keeps_state())
                text += cat("; state of block ", group.from(std::size_t(s))[0], " to ", group.to(std::size_t(s))[0]);
        for (const Lane& lane : o_.lanes) {
            if (lane.state) continue;
            text += "; slots";
            for (int t = first; t < end; t++) text += cat(" ", slot_of(plan_, lane, t));
            text += ", blocks";
            for (int i = 0; i * o_.block_size < plan_.context_lens[std::size_t(s)]; i++)
                text += cat(" ", block_of(plan_, lane, s, i));
        }
        std::printf("%s\n", text.c_str());
    }
}

StepResults SimExecutor::results() {
    if (std::exchange(trouble.results, false)) throw std::runtime_error("a simulated failure of a step");
    if (!computed_) compute();
    if (plan_.logit_rows.empty()) return {};
    return {best_, {}, [this] { return std::span<const float>(logits_); }, {}};
}

void SimExecutor::scribble(BlockId block) {
    const auto reads = [&](const std::vector<BlockCopy>& list) {
        return std::ranges::any_of(list, [&](const BlockCopy& copy) { return copy.from == block; });
    };
    for (const BlockMoves& moves : waiting_)
        if (reads(moves.swap_out) || reads(moves.copies)) return; // the next step comes after them
    for (std::int64_t slot = std::int64_t(block) * o_.block_size; slot < std::int64_t(block + 1) * o_.block_size;
         slot++)
        for (int l = 0; l < int(o_.lanes.size()); l++) {
            if (o_.lanes[std::size_t(l)].state) continue;
            Cell& c = cell(device_, l, slot);
            c.step  = -2;
            for (std::uint64_t& v : c.value) v = mix(v + 1);
        }
    StateBlock& state = states_[std::size_t(block)];
    state.step        = -2;
    for (std::uint64_t& v : state.value) v = mix(v + 1);
}

void SimExecutor::compute() {
    computed_         = true;
    const StepPlan& p = plan_;
    const int       n = p.n_tokens(), n_slots = o_.n_blocks * o_.block_size, n_lanes = int(o_.lanes.size());
    state_.resize(std::size_t(n));
    next_.resize(std::size_t(n));
    for (int t = 0; t < n; t++) {
        if (p.tokens[std::size_t(t)] < 0 || p.tokens[std::size_t(t)] >= o_.vocab)
            return fault("a token outside the vocabulary");
        for (const Lane& lane : o_.lanes)
            if (const int slot = lane.state ? 0 : slot_of(p, lane, t); slot < 0 || slot >= n_slots)
                return fault(cat("slot ", slot, " of ", n_slots));
        state_[std::size_t(t)] = embed(p.tokens[std::size_t(t)], p.positions[std::size_t(t)]);
    }
    check_states();
    if (!broken_.empty()) return;
    for (int r = 0; r < n_rounds; r++) {
        const auto round = std::size_t(r);
        for (int l = 0; l < n_lanes; l++)
            for (int t = 0; t < n && !o_.lanes[std::size_t(l)].state; t++) {
                Cell&               c = cell(device_, l, slot_of(p, o_.lanes[std::size_t(l)], t));
                const std::uint64_t v = stored(state_[std::size_t(t)], l, r);
                if (r == 0 && c.step == step_) {
                    n_same_step++;
                    if (c.value[round] != v) fault("two tokens of a step are written to one slot");
                }
                c.value[round]                                                                     = v;
                c.step                                                                             = step_;
                states_[std::size_t(slot_of(p, o_.lanes[std::size_t(l)], t) / o_.block_size)].step = -2;
            }
        for (int s = 0; s < p.n_seqs(); s++) {
            running_.assign(std::size_t(n_lanes), 0);
            for (int l = 0; l < n_lanes; l++)
                if (const Lane& lane = o_.lanes[std::size_t(l)]; lane.state)
                    running_[std::size_t(l)] = read_state(p.groups[std::size_t(lane.group)], s, lane, r);
            for (int t = p.token_start[std::size_t(s)]; t < p.token_start[std::size_t(s) + 1]; t++) {
                const int     position = p.positions[std::size_t(t)];
                std::uint64_t state    = state_[std::size_t(t)];
                for (int l = 0; l < n_lanes; l++) {
                    const Lane&   lane = o_.lanes[std::size_t(l)];
                    std::uint64_t sum  = 0;
                    if (lane.state) {
                        std::uint64_t& own = running_[std::size_t(l)];
                        own                = recur(own, stored(state_[std::size_t(t)], l, r));
                        state              = attend(state, own);
                        continue;
                    }
                    for (int q = first_seen(lane, position), end = 0; q <= position; q = end) {
                        const int     i     = q / o_.block_size;
                        const BlockId block = block_of(p, lane, s, i);
                        end                 = std::min(position + 1, (i + 1) * o_.block_size);
                        if (block < 0 || block >= o_.n_blocks) {
                            fault(cat("sequence ", s, " reads position ", q, " for ", position,
                                      ", and its table has no block for it"));
                            continue;
                        }
                        for (; q < end; q++) {
                            const Cell& c = cell(device_, l, std::int64_t(block) * o_.block_size + q % o_.block_size);
                            sum += seen(c.value[round], q);
                            if (c.step < 0)
                                fault(cat("sequence ", s, " reads position ", q, " for ", position, " from block ",
                                          block,
                                          c.step == -1 ? ", where nothing was written" : ", which was given back"));
                            if (c.step == step_ && q < p.readable[std::size_t(s)])
                                fault(cat("sequence ", s, ": position ", q, " of block ", block,
                                          " is written in the step that may read it from the beginning"));
                        }
                    }
                    state = attend(state, sum);
                }
                next_[std::size_t(t)] = state;
            }
            for (int l = 0; l < n_lanes; l++)
                if (const Lane& lane = o_.lanes[std::size_t(l)]; lane.state)
                    write_state(p.groups[std::size_t(lane.group)], s, lane, r, running_[std::size_t(l)]);
        }
        std::swap(state_, next_);
    }
    const auto vocab = std::size_t(o_.vocab);
    logits_.resize(p.logit_rows.size() * vocab);
    best_.clear();
    const std::size_t bad =
        trouble.not_finite && !p.logit_rows.empty() ? std::size_t(step_) % p.logit_rows.size() : p.logit_rows.size();
    for (std::size_t i = 0; i < p.logit_rows.size(); i++) {
        const std::span<float> row = std::span(logits_).subspan(i * vocab, vocab);
        logits_of(state_[std::size_t(p.logit_rows[i])], o_.ends, row);
        if (i == bad) {
            row[vocab / 2]     = std::numeric_limits<float>::quiet_NaN();
            trouble.not_finite = false;
            n_not_finite++;
        }
        if (o_.best) best_.push_back(i == bad ? -1 : Token(std::max_element(row.begin(), row.end()) - row.begin()));
    }
}

} // namespace quire::simulation
