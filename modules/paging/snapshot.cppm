// quire.paging.snapshot: the KV memory at one moment, and a run as a list of such moments: plain values for block_view, tests and
// the server. The block manager and the scheduler fill them in; the engine does not read them. Owns nothing.
export module quire.paging.snapshot;

import quire.core.base;
import quire.paging.block;
import quire.core.std;

export namespace quire {

// One physical block of the device pool.
struct BlockView {
    int           ref_count = 0;     // block tables and pins that map it; 0: free
    int           filled    = 0;     // slots with K and V that can still be read, 0 .. block_size
    bool          pinned    = false; // belongs to a pinned prefix: never evicted
    bool          cached    = false; // in the prefix cache; it can be free at the same time
    std::uint64_t hash      = 0;     // when cached; of a state that is cached, the hash of the tokens that it has seen
    int           group     = 0;     // the cache group whose layers it serves; 0 where it serves none
    bool          state     = false; // a part of a recurrent state
    BlockId       first     = -1;    // of an entry or a state of several blocks: its first one; -1: this is it

    bool operator==(const BlockView&) const = default;
};

enum class ViewStatus : std::uint8_t { waiting, running, swapped, preempted, pinned };

// One sequence. A request that forked has several, told apart by `index`.
struct SequenceView {
    RequestId  request  = 0;
    int        index    = 0;
    ViewStatus status   = ViewStatus::waiting;
    int        n_prompt = 0, n_tokens = 0; // n_tokens: the prompt and what was generated so far
    int        n_computed = 0;             // leading tokens whose K and V are written
    int        n_released = 0;             // leading blocks that a sliding window has left behind
    // The table of the first cache group: logical → physical, from n_released on; ids of the host pool while swapped; none while
    // preempted. Of an entry of several blocks the first one.
    std::vector<BlockId> blocks;
    // The text of each block's tokens if it was recorded, else empty.
    std::vector<std::string> texts;
    struct Table {
        int                  n_released = 0;
        std::vector<BlockId> blocks;
        bool                 operator==(const Table&) const = default;
    };
    std::vector<Table> other_groups{}; // their tables
    // The blocks of its recurrent state, and how many tokens this has seen.
    std::vector<BlockId> state{};
    int                  n_in_state = 0;
};

// The events since the last snapshot.
enum class MemoryEventKind : std::uint8_t { admit, fork, copy, swap_out, swap_in, recompute, evict, free, finish, pin };
struct MemoryEvent {
    MemoryEventKind kind    = MemoryEventKind::admit;
    RequestId       request = 0;
    int             index   = 0;
    BlockId         from = -1, to = -1; // copy, swap: blocks; evict: from; others -1
};

struct Snapshot {
    std::uint64_t             step = 0;
    std::string               label; // an explanation; "" in an ordinary run
    int                       block_size = 0;
    int                       context    = 0;    // tokens that the longest sequence can have; 0: not recorded
    std::vector<BlockView>    blocks;            // [n_blocks]
    int                       n_swap_blocks = 0; // size of the host pool
    int                       n_swap_used   = 0;
    int                       n_host_cached = 0; // blocks of the prefix cache in the memory of that pool
    int                       n_in_files    = 0; // units of the prefix cache in files
    std::vector<SequenceView> sequences;
    std::vector<MemoryEvent>  events;
};

// A recorded run.
struct Trace {
    std::string           model; // file name, for the title
    std::string           title; // "" or what the run shows
    std::vector<Snapshot> steps;
};

// Sums over one snapshot. used + cached + free = the blocks of the pool.
struct MemoryTotals {
    int    used = 0, cached = 0, free = 0; // in a table or pinned; in no table but cached; neither
    int    pinned = 0;                     // of the used ones
    int    shared = 0;                     // of the used ones: in more than one table
    double waste  = 0; // fraction of the slots of used blocks that are empty (the paper, section 4.3)
    double saved = 0; // blocks saved by sharing, as a fraction of the blocks needed without it (the paper, section 6.3)
};
MemoryTotals totals(const Snapshot& snapshot);

} // namespace quire

module :private;

namespace quire {

MemoryTotals totals(const Snapshot& snapshot) {
    MemoryTotals t;
    int          entries = 0, filled = 0;
    for (const BlockView& block : snapshot.blocks) {
        if (block.ref_count == 0) {
            (block.cached ? t.cached : t.free)++;
            continue;
        }
        t.used++;
        t.pinned += block.pinned;
        t.shared += block.ref_count > 1;
        entries += block.ref_count;
        filled += block.filled;
    }
    if (t.used > 0) t.waste = 1 - double(filled) / (double(t.used) * snapshot.block_size);
    if (entries > 0) t.saved = 1 - double(t.used) / entries;
    return t;
}

} // namespace quire
