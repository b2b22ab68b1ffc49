// quire.compute.cuda.step_upload: what the kernels read of a step's plan: rounds its rows up, cuts its attention, sends the arrays up.
// **Owns** the pinned buffer; its place on the device is the backend's. Regions of the buffer stand at fixed places, so that CUDA graphs can
// name them.
module;

#include "../../../cuda/kernels.h"

export module quire.compute.cuda.step_upload;

import quire.compute.backend;
import quire.compute.cuda.attention_plan;
import quire.compute.cuda.lowering;
import quire.compute.cuda.pinned_memory;
import quire.compute.cuda.weights;
import quire.core.base;

export namespace quire {

// Rows of a decoding step, rounded up: each size is captured once.
int rounded_rows(int n);

class StepUpload {
public:
    StepUpload(cuda::Context& gpu, bool deterministic) : gpu_(gpu), deterministic_(deterministic) {}

    // Takes memory for the largest step. False: there is not enough.
    bool prepare(const StepLimits& limits, DeviceMemory& memory, PinnedMemory& pinned);
    // Takes the kinds of attention of the program.
    void compile(const Program& program, std::span<const KvLayer> layers);
    // From now on a step of one token runs in the decode megakernel.
    void use_megakernel() { megakernel_ = true; }
    // Sends the plan up. Whether the step only decodes, in the shape of other steps, so that a graph can replay it.
    bool send(const StepPlan& plan);

    // -- before the first step
    std::span<const AttentionKind> attentions() const { return kinds_; } // each has lists of items and tiles in a step
    const StepTables&              tables() const { return tables_; }
    std::size_t                    n_tables() const { return plans_.size(); }
    int                            most_items() const { return room_.launch; } // of a launch: their splits need memory

    // -- the step that was sent
    StepShape         shape() const { return shape_; }
    const cuda::Plan& plan(int tables) const { return plans_[std::size_t(tables)]; }
    const cuda::Plan& plan() const { return plans_[0]; } // for kernels that read no block tables
    // The states of a layer, before and after the step.
    cuda::States states(const StateLayer& layer) const {
        cuda::States to;
        to.memory       = reinterpret_cast<float*>(layer.memory);
        to.block_floats = std::int64_t(layer.block_bytes / sizeof(float));
        to.offset       = std::int64_t(layer.offset / sizeof(float));
        to.unit         = limits_.unit;
        to.token_start  = device_ + at_tokens_;
        to.from         = device_ + at_from_;
        to.to           = device_ + at_to_;
        to.n_sequences  = n_runs_;
        to.most_tokens  = most_tokens_;
        return to;
    }
    // Attention of a kind: calls launch(items) for each launch, in order, because launches share the memory of their splits.
    template <class Launch>
    void each_launch(int list, const Launch& launch) const {
        cuda::SplitKvItems all = items(std::size_t(list));
        if (!deterministic_) return launch(all);
        const std::vector<int>& begins = launches_[std::size_t(list)];
        for (std::size_t k = 0; k + 1 < begins.size(); k++) {
            cuda::SplitKvItems some = all;
            some.list = all.list + begins[k], some.n = begins[k + 1] - begins[k];
            launch(some);
        }
    }
    // Prompts likewise: launch(tiles, n_tiles, unpacks, of them), because launches share the memory of unpacked blocks.
    template <class Launch>
    void each_prefill(int list, const Launch& launch) const {
        const auto        at    = std::size_t(list);
        const auto* const tiles = reinterpret_cast<const cuda::PrefillTile*>(device_ + tiles_at(at));
        if (unpacked_ == 0) return launch(tiles, work_[at].n_tiles, nullptr, PrefillLaunch{});
        const auto* const unpacks = reinterpret_cast<const cuda::UnpackedBlocks*>(device_ + unpacks_at(at));
        for (const PrefillLaunch& some : prefills_[at])
            launch(tiles + some.first_tile, some.n_tiles, unpacks + some.first_unpack, some);
    }
    // A plan with block tables that lead to unpacked blocks.
    cuda::Plan unpacked_plan(int tables, int list) const {
        cuda::Plan plan   = plans_[std::size_t(tables)];
        plan.block_tables = identity_;
        plan.table_start  = device_ + unpacks_at(std::size_t(list)) + 4 * (std::size_t(limits_.max_sequences) + 1);
        return plan;
    }
    int unpacked_blocks() const { return unpacked_; } // room for them; 0: K and V are no codes
    // A graph depends on the addresses, on the rows, and on the numbers of entries in each list.
    using Key = std::array<int, 1 + 5 * most_attentions>;
    Key key() const {
        Key key{shape_.tokens};
        for (std::size_t i = 0; const AttentionWork& w : work_)
            for (int n : {w.n_items, w.n_short, int(w.one_warp), w.n_shared, w.n_shared_queries}) key[++i] = n;
        return key;
    }

private:
    cuda::SplitKvItems items(std::size_t list) const {
        const std::int32_t* const at = device_ + at_items_ + list * list_ints_;
        return {reinterpret_cast<const cuda::SplitKvItem*>(at),
                work_[list].n_items,
                work_[list].n_short,
                work_[list].one_warp,
                {reinterpret_cast<const cuda::SharedTile*>(at + at_shared_),
                 reinterpret_cast<const cuda::SharedQuery*>(at + at_queries_), work_[list].n_shared,
                 work_[list].n_shared_queries}};
    }
    // Unpacks, and a place of a table for each sequence.
    std::size_t    unpack_ints() const { return unpacked_ > 0 ? 5 * (std::size_t(limits_.max_sequences) + 1) : 0; }
    std::size_t    unpacks_at(std::size_t list) const { return at_unpacks_ + list * unpack_ints(); }
    std::size_t    tiles_at(std::size_t list) const { return at_tiles_ + list * std::size_t(limits_.max_tokens) * 3; }
    AttentionShape attention_shape(const AttentionKind& kind, bool rounded, int first) const {
        AttentionShape shape;
        shape.first    = first;
        shape.head_dim = kind.head_dim, shape.value_dim = kind.value_dim;
        shape.most_queries = limits_.max_sequences;
        shape.n_heads = limits_.n_heads, shape.n_kv_heads = kind.n_kv_heads;
        shape.block_size = block_size_, shape.window = kind.window, shape.chunked = kind.chunked;
        shape.deterministic = deterministic_, shape.rounded = rounded;
        shape.alone    = megakernel_ && rounded && shape_.tokens == 1 && first == 0; // guesses run in plain kernels
        shape.unpacked = unpacked_, shape.entry = limits_.block_size;
        return shape;
    }
    void put_states(const StepPlan& plan);
    // Copies n numbers from this place on, with the next ones if those are near. flush(): the last ones, too.
    void copy(std::size_t at, std::size_t n);
    void flush();
    int  n_runs_ = 0, most_tokens_ = 0; // sequences, with the ones that only fill up a graph; the tokens of the longest

    cuda::Context& gpu_;
    bool           deterministic_, megakernel_ = false;
    StepLimits     limits_;
    std::int32_t * host_ = nullptr, *device_ = nullptr;
    std::size_t    at_positions_ = 0, at_slots_ = 0, at_rows_ = 0, at_starts_ = 0, at_items_ = 0, at_tiles_ = 0,
                at_unpacks_ = 0, at_tables_ = 0, at_tokens_ = 0, at_from_ = 0, at_to_ = 0;
    std::size_t table_ints_ = 0,
                list_ints_  = 0; // room for the block tables of one part, and for the lists of an attention
    std::size_t                                   at_shared_ = 0, at_queries_ = 0; // in the lists of an attention
    int                                           block_size_ = 0;
    StepTables                                    tables_;
    std::vector<cuda::Plan>                       plans_; // for the layers of each part
    std::vector<AttentionKind>                    kinds_;
    std::array<AttentionWork, most_attentions>    work_;
    AttentionPlanner                              planner_;
    AttentionRoom                                 room_;
    std::array<std::vector<int>, most_attentions> launches_; // of deterministic steps: see launches_of()
    std::array<std::vector<PrefillLaunch>, most_attentions> prefills_;
    int                                                     unpacked_ = 0;
    std::int32_t*                                           identity_ = nullptr; // 0, 1, 2 ... on the device
    StepShape                                               shape_;
    std::size_t copied_begin_ = 0, copied_end_ = 0; // of the copy that has yet to be made
};

} // namespace quire

module :private;

namespace quire {

int rounded_rows(int n) {
    for (int size : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128})
        if (n <= size) return size;
    return (n + 31) / 32 * 32;
}

bool StepUpload::prepare(const StepLimits& l, DeviceMemory& memory, PinnedMemory& pinned) {
    limits_      = l;
    const auto T = std::size_t(l.max_tokens), S = std::size_t(l.max_sequences) + 1, L = std::size_t(l.max_logit_rows);
    check(l.n_attentions <= int(work_.size()), "more kinds of attention than a step has lists for");
    room_ = attention_room(attention_shape({}, true, 0), gpu_, l.max_tokens, l.max_sequences, l.context);
    for (int n = 0; int parts : l.parts) {
        tables_.first.push_back(n);
        n += parts;
        plans_.resize(std::size_t(std::max(n, 1))); // a model without K and V has the slots of a step nevertheless
    }
    table_ints_          = S * (std::size_t(l.max_blocks_per_sequence) + 1);
    tables_.tables_apart = int(table_ints_), tables_.slots_apart = int(T);
    at_positions_ = T;
    at_slots_     = 2 * T;
    at_rows_      = at_slots_ + plans_.size() * T;
    at_starts_    = at_rows_ + std::max(L, T);
    at_items_     = at_starts_ + l.parts.size() * S;
    at_shared_    = std::size_t(room_.list) * sizeof(cuda::SplitKvItem) / 4;
    at_queries_   = at_shared_ + std::size_t(most_shared_tiles(gpu_)) * sizeof(cuda::SharedTile) / 4;
    list_ints_    = at_queries_ + std::size_t(most_shared_queries(l.max_sequences)) * sizeof(cuda::SharedQuery) / 4;
    at_tiles_     = at_items_ + std::size_t(l.n_attentions) * list_ints_;
    at_unpacks_   = at_tiles_ + std::size_t(l.n_attentions) * T * 3;
    // Room for the longest sequence, or for several short ones.
    constexpr int usual = 16384;
    if (l.coded_cols > 0)
        unpacked_ =
            (std::max(l.context, std::min(usual, l.max_sequences * l.context)) + l.block_size - 1) / l.block_size + 1;
    at_tables_              = at_unpacks_ + std::size_t(l.n_attentions) * unpack_ints();
    at_tokens_              = at_tables_ + plans_.size() * table_ints_;
    const std::size_t units = std::max(T, S) * std::size_t(l.unit); // a graph's rows are sequences of one token
    at_from_                = at_tokens_ + (l.unit > 0 ? std::max(T, S) + 1 : 0);
    at_to_                  = at_from_ + units;
    const std::size_t bytes = (at_to_ + units) * 4;
    host_                   = static_cast<std::int32_t*>(pinned.take(bytes));
    device_                 = static_cast<std::int32_t*>(memory.take(bytes));
    if (!host_ || !device_) return false;
    if (unpacked_ > 0) {
        std::vector<std::int32_t> identity(std::size_t(unpacked_), 0);
        std::iota(identity.begin(), identity.end(), 0);
        identity_ = static_cast<std::int32_t*>(memory.take(identity.size() * 4));
        if (!identity_) return false;
        cuda::upload(identity_, identity.data(), identity.size() * 4, gpu_);
    }
    for (std::size_t g = 0; g < l.parts.size(); g++)
        for (int part = 0; part < std::max(l.parts[g], l.parts.size() == 1 ? 1 : 0); part++) {
            const auto  i     = std::size_t(tables_.first[g]) + std::size_t(part);
            cuda::Plan& plan  = plans_[i];
            plan.tokens       = device_;
            plan.positions    = device_ + at_positions_;
            plan.logit_rows   = device_ + at_rows_;
            plan.slots        = device_ + at_slots_ + i * T;
            plan.table_start  = device_ + at_starts_ + g * S;
            plan.block_tables = device_ + at_tables_ + i * table_ints_;
            if (l.unit == 0) continue;
            plan.token_start = device_ + at_tokens_;
            plan.state_from  = device_ + at_from_;
            plan.state_to    = device_ + at_to_;
            plan.unit        = l.unit;
        }
    return true;
}

void StepUpload::compile(const Program& program, std::span<const KvLayer> layers) {
    kinds_ = attentions_of(program, layers);
    for (const KvLayer& layer : layers) block_size_ = std::max(block_size_, layer.block_size);
    check(int(kinds_.size()) <= limits_.n_attentions, "more kinds of attention than announced");
}

// The words of so many entries of a list.
template <class Entry>
std::size_t ints(int n) {
    return std::size_t(n) * sizeof(Entry) / 4;
}

// The state units of the step. Sequences that fill up a graph come behind the others, with no tokens.
void StepUpload::put_states(const StepPlan& plan) {
    for (const GroupPlan& group : plan.groups) {
        if (!group.keeps_state()) continue;
        const std::size_t n = group.state_from.size(), S = std::size_t(plan.n_seqs()),
                          all = std::max(S, std::size_t(shape_.tokens > plan.n_tokens() ? shape_.tokens : 0));
        check(group.unit == limits_.unit && n == S * std::size_t(group.unit) && group.state_to.size() == n,
              "a plan with other states than announced");
        n_runs_      = int(all);
        most_tokens_ = 0;
        for (std::size_t s = 0; s < S; s++)
            most_tokens_ = std::max(most_tokens_, plan.token_start[s + 1] - plan.token_start[s]);
        std::ranges::copy(plan.token_start, host_ + at_tokens_);
        std::fill_n(host_ + at_tokens_ + S + 1, all - S, plan.token_start.back());
        std::ranges::copy(group.state_from, host_ + at_from_);
        std::ranges::copy(group.state_to, host_ + at_to_);
        copy(at_tokens_, all + 1);
        copy(at_from_, n);
        copy(at_to_, n);
    }
}

void StepUpload::copy(std::size_t at, std::size_t n) {
    constexpr std::size_t gap = 16384; // nearer ones go together with the up to 64 KB between them
    if (n == 0) return;
    if (at > copied_end_ + gap) {
        flush();
        copied_begin_ = at;
    }
    copied_end_ = at + n;
}

void StepUpload::flush() {
    if (const std::size_t n = copied_end_ - copied_begin_; n > 0)
        cuda::copy_to_device(device_ + copied_begin_, host_ + copied_begin_, n * 4, gpu_);
    copied_begin_ = copied_end_ = 0;
}

bool StepUpload::send(const StepPlan& plan) {
    const int T        = plan.n_tokens();
    bool      decoding = !deterministic_ && T == plan.n_seqs() && plan.logit_rows.size() == plan.tokens.size();
    shape_             = {T, int(plan.logit_rows.size())};
    if (decoding && rounded_rows(T) <= limits_.max_tokens && rounded_rows(T) <= limits_.max_logit_rows)
        shape_.tokens = shape_.logit_rows = rounded_rows(T);
    else decoding = false;
    check(shape_.tokens <= limits_.max_tokens && plan.n_seqs() <= limits_.max_sequences &&
              shape_.logit_rows <= std::max(limits_.max_logit_rows, 8), // as many as Model::create() takes
          "a step larger than announced");
    check(plan.groups.size() == tables_.first.size(), "a plan for other cache groups");

    const auto put = [&](std::size_t at, const std::vector<std::int32_t>& values) {
        std::copy(values.begin(), values.end(), host_ + at);
    };
    put(0, plan.tokens);
    put(at_positions_, plan.positions);
    put(at_rows_, plan.logit_rows);
    for (int t = T; t < shape_.tokens; t++) host_[t] = host_[at_positions_ + std::size_t(t)] = 0;
    const auto room = std::size_t(limits_.max_tokens);
    for (std::size_t g = 0; g < plan.groups.size(); g++) {
        const GroupPlan& group = plan.groups[g];
        for (int s = 0; s < plan.n_seqs() && !group.keeps_state(); s++)
            host_[at_starts_ + g * (std::size_t(limits_.max_sequences) + 1) + std::size_t(s)] =
                group.origin(std::size_t(s));
        for (std::size_t part = 0; part < group.parts.size(); part++) {
            const std::size_t i         = std::size_t(tables_.first[g]) + part;
            const auto& [tables, slots] = group.parts[part];
            check(tables.size() <= table_ints_, "more block tables than announced");
            put(at_tables_ + i * table_ints_, tables);
            put(at_slots_ + i * room, slots);
            for (int t = T; t < shape_.tokens; t++) host_[at_slots_ + i * room + std::size_t(t)] = -1;
        }
    }
    if (tables_.first.size() == 1 && plan.groups[0].keeps_state()) // no layer has slots: whether a row counts
        for (int t = 0; t < shape_.tokens; t++) host_[at_slots_ + std::size_t(t)] = t < T ? 0 : -1;
    for (int l = int(plan.logit_rows.size()); l < shape_.logit_rows; l++) host_[at_rows_ + std::size_t(l)] = 0;

    bool tiles = false;
    for (std::size_t i = 0; i < kinds_.size(); i++) {
        std::int32_t* const list = host_ + at_items_ + i * list_ints_;
        work_[i]                 = planner_.plan(
            plan, plan.groups[std::size_t(kinds_[i].group)], attention_shape(kinds_[i], decoding, plan.guesses), gpu_,
            {list, host_ + tiles_at(i), list + at_shared_, list + at_queries_, host_ + unpacks_at(i),
                             host_ + unpacks_at(i) + 4 * (std::size_t(limits_.max_sequences) + 1), &prefills_[i]});
        tiles = tiles || work_[i].n_tiles > 0;
        check(work_[i].n_items + work_[i].n_short <= room_.list, "more splits than announced");
        if (deterministic_)
            launches_of({reinterpret_cast<const cuda::SplitKvItem*>(list), std::size_t(work_[i].n_items)}, room_.launch,
                        launches_[i]);
    }
    plans_[0].items = items(0);
    // In the order of the buffer, and no more than the step has: deterministic steps have room for very many items.
    copy(0, std::size_t(shape_.tokens));
    copy(at_positions_, std::size_t(shape_.tokens));
    for (std::size_t i = 0; i < plans_.size(); i++) copy(at_slots_ + i * room, std::size_t(shape_.tokens));
    copy(at_rows_, std::size_t(shape_.logit_rows));
    copy(at_starts_, at_items_ - at_starts_);
    for (std::size_t i = 0; i < kinds_.size(); i++) {
        const AttentionWork& work = work_[i];
        const std::size_t    at   = at_items_ + i * list_ints_;
        copy(at, ints<cuda::SplitKvItem>(work.n_items + work.n_short));
        copy(at + at_shared_, ints<cuda::SharedTile>(work.n_shared));
        copy(at + at_queries_, ints<cuda::SharedQuery>(work.n_shared_queries));
    }
    for (std::size_t i = 0; i < kinds_.size(); i++) copy(tiles_at(i), std::size_t(work_[i].n_tiles) * 3);
    for (std::size_t i = 0; i < kinds_.size() && tiles; i++) copy(unpacks_at(i), unpack_ints());
    for (std::size_t g = 0, i = 0; g < plan.groups.size(); g++)
        for (const GroupPlan::Part& part : plan.groups[g].parts)
            copy(at_tables_ + i++ * table_ints_, part.tables.size());
    put_states(plan);
    flush();
    return decoding && !tiles;
}

} // namespace quire
