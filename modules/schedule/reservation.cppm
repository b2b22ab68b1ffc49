// quire.schedule.reservation: the systems that the paper compares with (section 6.1): each sequence gets a contiguous chunk of KV
// slots for all it may ever hold before it starts. **Owns** the buddy allocator behind the chunks.
export module quire.schedule.reservation;

import quire.core.base;
import quire.core.std;
import quire.paging.block;
import quire.paging.block_manager;
import quire.paging.cache_layout;
import quire.paging.buddy_allocator;
import quire.schedule.request;
import quire.schedule.sequence;

export namespace quire {

// How KV memory is given out. All but `quire` reserve a chunk, rounded up to a power of two, and share nothing; requests never
// overtake one another and are never preempted.
enum class System : std::uint8_t {
    quire,             // blocks on demand
    orca_max,          // the longest possible sequence, whatever the prompt
    orca_pow2,         // the prompt and the output's length rounded up to a power of two
    orca_oracle,       // the prompt and the output's true length, which is max_tokens where the end is ignored
    faster_transformer // as orca_max; and a batch starts when the one before it is over: nobody joins it
};

inline constexpr std::array systems{System::quire, System::orca_max, System::orca_pow2, System::orca_oracle,
                                    System::faster_transformer};
std::string_view            name_of(System system); // "orca-max"
std::optional<System>       find_system(std::string_view name);

// KV slots that one sequence asks for before it starts. `context`: the longest sequence.
int slots_wanted(System system, int n_prompt, int n_output, int context);

// What the slots of the pool are used for, as Fig. 2 has it; together all of them.
struct MemoryUse {
    std::int64_t tokens      = 0; // known tokens of running sequences; shared ones count once
    std::int64_t reservation = 0; // their sequence will fill these
    std::int64_t internal    = 0; // asked for and never filled
    std::int64_t other       = 0; // rounding, pieces too small for anybody, free blocks
};

class Reservations {
public:
    Reservations(System system, int n_blocks, int block_size, int context);

    // Error: why a request can never run.
    Result<void> check_request(const Request& request) const;
    // A chunk for each sequence that the request will have, or none (false).
    bool reserve(SequenceGroup& group);
    void release(SequenceGroup& group);
    // An empty table begins in the first chunk of its group.
    void place_first(SequenceGroup& group, BlockManager& blocks) const;
    // Sequences that were forked move to a chunk of their own: their KV is copied, as nothing can be shared.
    void place_forks(SequenceGroup& group, BlockManager& blocks) const;
    // Whether requests may join those that run.
    bool joins() const { return system_ != System::faster_transformer; }

    MemoryUse memory_use(std::span<const std::unique_ptr<SequenceGroup>> running) const;

private:
    int wanted(const Request& request) const {
        return slots_wanted(system_, int(request.prompt.size()), request.max_tokens, context_);
    }
    int blocks_wanted(const Request& request) const { return (wanted(request) + block_size_ - 1) / block_size_; }

    System         system_;
    BuddyAllocator runs_;
    int            n_blocks_, block_size_, context_;
};

// The same with blocks on demand: what is not a token is `other`. A block that several sequences share counts once, and so does
// one of a pinned prefix.
MemoryUse memory_use(std::span<const std::unique_ptr<SequenceGroup>> running,
                     std::span<const std::unique_ptr<SequenceGroup>> pinned, const BlockManager& blocks);

} // namespace quire

module :private;

namespace quire {

constexpr std::array<std::string_view, systems.size()> names{"quire", "orca-max", "orca-pow2", "orca-oracle",
                                                             "faster-transformer"};

std::string_view name_of(System system) { return names[std::size_t(system)]; }

std::optional<System> find_system(std::string_view name) {
    for (System system : systems)
        if (name_of(system) == name) return system;
    return std::nullopt;
}

int slots_wanted(System system, int n_prompt, int n_output, int context) {
    switch (system) {
        case System::quire: return n_prompt;
        case System::orca_max:
        case System::faster_transformer: return context;
        case System::orca_pow2:
            return std::min(context, n_prompt + int(std::bit_ceil(unsigned(std::min(std::max(n_output, 1), context)))));
        case System::orca_oracle: return std::min(context, n_prompt + n_output);
    }
    return context;
}

Reservations::Reservations(System system, int n_blocks, int block_size, int context)
    : system_(system), runs_(n_blocks), n_blocks_(n_blocks), block_size_(block_size), context_(context) {}

Result<void> Reservations::check_request(const Request& request) const {
    if (request.pin) return fail(name_of(system_), " shares nothing: a prompt cannot be pinned");
    const int n = runs_.most_runs(blocks_wanted(request));
    if (request.width() > n)
        return fail_with(ErrorKind::limit, name_of(system_), " reserves ", request.width(), " chunks of ",
                         wanted(request), " slots for the request; the whole pool has ", n, " of that size");
    return {};
}

bool Reservations::reserve(SequenceGroup& group) {
    const int n = blocks_wanted(group.request);
    while (int(group.runs.size()) < group.request.width()) {
        const std::optional<BlockRun> run = runs_.take(n);
        if (!run) {
            release(group);
            return false;
        }
        group.runs.push_back(*run);
    }
    return true;
}

void Reservations::release(SequenceGroup& group) {
    for (const BlockRun& run : group.runs) runs_.give_back(run);
    group.runs.clear();
}

void Reservations::place_first(SequenceGroup& group, BlockManager& blocks) const {
    blocks.place(group.sequences[0]->table, group.runs[0].first);
}

void Reservations::place_forks(SequenceGroup& group, BlockManager& blocks) const {
    const auto in_use = [&](const BlockRun& run) {
        return std::ranges::any_of(group.sequences,
                                   [&](const auto& s) { return blocks.placed_at(s->table) == run.first; });
    };
    // First those whose blocks are in a chunk that its own sequence has left: they stay there, and others copy from it.
    for (const bool stays : {true, false})
        for (const auto& s : group.sequences) {
            if (blocks.placed_at(s->table) >= 0) continue;
            const BlockId here = blocks.blocks(s->table)[0];
            const auto    run  = std::ranges::find_if(
                group.runs, [&](const BlockRun& r) { return (!stays || r.first == here) && !in_use(r); });
            if (run != group.runs.end()) blocks.place(s->table, run->first);
            else check(stays, "more sequences than chunks");
        }
}

MemoryUse Reservations::memory_use(std::span<const std::unique_ptr<SequenceGroup>> running) const {
    MemoryUse    use;
    std::int64_t asked = 0;
    for (const auto& group : running) {
        const Request&     r     = group->request;
        const std::int64_t width = std::int64_t(group->runs.size());
        const std::int64_t final = width * std::min(group->n_prompt() + r.max_tokens, context_);
        std::int64_t       now   = 0;
        for (const auto& s : group->sequences) now += std::int64_t(s->tokens.size());
        use.tokens += now;
        use.reservation += final - now;
        use.internal += width * wanted(r) - final;
        asked += width * wanted(r);
    }
    use.other = std::int64_t(n_blocks_) * block_size_ - asked;
    return use;
}

MemoryUse memory_use(std::span<const std::unique_ptr<SequenceGroup>> running,
                     std::span<const std::unique_ptr<SequenceGroup>> pinned, const BlockManager& blocks) {
    // Blocks fill from left to right: only the last one of a table has free slots.
    std::int64_t                         free_slots = 0;
    std::vector<std::pair<BlockId, int>> shared; // last blocks of several tables, and their free slots
    for (const auto groups : {running, pinned})
        for (const auto& group : groups)
            for (const auto& s : group->sequences) {
                if (s->table < 0 || blocks.blocks(s->table).empty()) continue;
                const std::span<const BlockId> table = blocks.blocks(s->table);
                const int n = std::max(int(table.size()) * blocks.block_size() - int(s->tokens.size()), 0) *
                              blocks.layout().blocks_per_entry();
                if (n == 0 || table.back() == released_block) continue;
                if (blocks.ref_count(table.back()) > 1) shared.emplace_back(table.back(), n);
                else free_slots += n;
            }
    std::ranges::sort(shared); // of each block the least: what one of the sharers has filled is not free
    for (std::size_t i = 0; i < shared.size(); i++)
        if (i == 0 || shared[i - 1].first != shared[i].first) free_slots += shared[i].second;
    MemoryUse use;
    use.tokens = std::int64_t(blocks.n_used()) * blocks.block_size() - free_slots;
    use.other  = std::int64_t(blocks.n_blocks()) * blocks.block_size() - use.tokens;
    return use;
}

} // namespace quire
