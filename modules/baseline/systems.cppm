// quire.baseline.systems: the systems that the paper compares with (section 6.1): before a sequence starts, it gets one contiguous chunk of KV
// slots for all tokens that it may ever have. **Owns** the buddy allocator behind the chunks.
export module quire.baseline.systems;

import quire.baseline.buddy_allocator;
import quire.core.base;
import quire.schedule.reservation;
import quire.schedule.sequence;

export namespace quire {

// How KV memory is given out. All but `quire` reserve a chunk, rounded up to a power of two.
enum class System : std::uint8_t {
    quire,             // blocks on demand
    orca_max,          // the longest possible sequence, whatever the prompt
    orca_pow2,         // the prompt and the output's length rounded up to a power of two
    orca_oracle,       // the prompt and the output's true length, which is max_tokens where the end is ignored
    faster_transformer // as orca_max; and a batch starts when the one before it is over: no request joins it
};

inline constexpr std::array systems{System::quire, System::orca_max, System::orca_pow2, System::orca_oracle,
                                    System::faster_transformer};
std::string_view            name_of(System system); // "orca-max"
std::optional<System>       find_system(std::string_view name);

// KV slots that one sequence asks for before it starts. `context`: the longest sequence.
int slots_wanted(System system, int n_prompt, int n_output, int context);

// For SchedulerOptions and EngineOptions; of `quire`: an empty function.
MakeReservations reservations_of(System system);

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

class ChunkReservations final : public Reservations {
public:
    ChunkReservations(System system, int n_blocks, int block_size, int context)
        : system_(system), runs_(n_blocks), n_blocks_(n_blocks), block_size_(block_size), context_(context) {}

    Result<void> check_request(const Request& request) const override {
        if (request.pin) return fail(name_of(system_), " shares nothing: a prompt cannot be pinned");
        const int n = runs_.most_runs(blocks_wanted(request));
        if (request.width() > n)
            return fail_with(ErrorKind::limit, name_of(system_), " reserves ", request.width(), " chunks of ",
                             wanted(request), " slots for the request; the whole pool has ", n, " of that size");
        return {};
    }

    bool reserve(SequenceGroup& group) override {
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

    void release(SequenceGroup& group) override {
        for (const BlockRun& run : group.runs) runs_.give_back(run);
        group.runs.clear();
    }

    void place_first(SequenceGroup& group, BlockManager& blocks) const override {
        blocks.place(group.sequences[0]->table, group.runs[0].first);
    }

    void place_forks(SequenceGroup& group, BlockManager& blocks) const override {
        const auto in_use = [&](const BlockRun& run) {
            return std::ranges::any_of(group.sequences,
                                       [&](const auto& s) { return blocks.placed_at(s->table) == run.first; });
        };
        // The first pass is for sequences whose blocks lie in a chunk without an owner: they stay there, and the others copy from it.
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

    bool joins() const override { return system_ != System::faster_transformer; }

    MemoryUse memory_use(std::span<const std::unique_ptr<SequenceGroup>> running) const override {
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


private:
    int wanted(const Request& request) const {
        return slots_wanted(system_, int(request.prompt.size()), request.max_tokens, context_);
    }
    int blocks_wanted(const Request& request) const { return (wanted(request) + block_size_ - 1) / block_size_; }

    System         system_;
    BuddyAllocator runs_;
    int            n_blocks_, block_size_, context_;
};

MakeReservations reservations_of(System system) {
    if (system == System::quire) return {};
    return [system](int n_blocks, int block_size, int context) {
        return std::make_unique<ChunkReservations>(system, n_blocks, block_size, context);
    };
}

} // namespace quire
