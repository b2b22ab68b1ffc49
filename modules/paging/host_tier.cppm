// quire.paging.host_tier: the second level of the prefix cache. A unit that the device's pool evicts stays in host memory until its memory is
// needed there, too. **Owns** the host pool, which it shares with swapped requests, and the index of what is kept.
//
// A unit is what one lane has at the end of one text: a bundle of blocks, or a marker without memory. It is known by the hash and the
// serial of the text, which are the same on the device and here. So a text that leaves the device, and comes back, is the same text for
// all that continues it.
//
// The unit of the least value is forgotten first. The value of a unit is set when it is saved or comes back: it is that of the unit that was
// forgotten last, plus uses/√(1 + depth). The uses are how often it came back, plus 1, at most 16; the depth is the number of blocks before
// its own in its text. So values rise with time, and what is not used goes. Of units that are used equally, the end of a text goes
// first: the end is useless without the units before it. Where the texts in use need more than the room, some beginnings stay; by recency alone
// each text would be forgotten just before its next use. All units of a lane have equally many bytes, and a token costs about the
// same to compute wherever it stands, so these two are no part of the value.
export module quire.paging.host_tier;

import quire.core.base;
import quire.core.std;
import quire.paging.block;
import quire.paging.block_hash;
import quire.paging.block_index;
import quire.paging.block_pool;

export namespace quire {

// The units that are copied to host memory as soon as they enter the prefix cache, for files: none, the shared namespace's, all.
enum class ForFiles : std::uint8_t { none, shared, all };

struct HostTierOptions {
    int      n_blocks = 0, block_size = 16; // of the pool, swapped requests included
    int      n_markers  = 0;
    bool     keeps      = false; // false: the pool is for swapped requests alone
    ForFiles for_files  = ForFiles::none;
    bool     has_states = false; // the last lane is that of the recurrent states
};

// A unit with its identity in every process. Files keep such units.
struct HostUnit {
    BlockId              unit   = -1;
    int                  lane   = 0;
    CacheNamespace       space  = {};
    std::uint64_t        serial = 0, parent = 0; // of its text, and of the text before its block
    std::vector<Token>   tokens  = {};           // of the block, in the first lane
    std::vector<BlockId> blocks  = {};
    int                  depth   = 0;     // blocks of the text before its own
    bool                 is_read = false; // a file had it
};

// A unit with all that the next engine of the same model needs.
struct ParkedUnit {
    int                  lane   = 0;
    CacheEntry           entry  = {};
    std::vector<Token>   tokens = {}; // of the block, in the first lane
    std::vector<BlockId> blocks = {};
    std::uint8_t         uses   = 1;
};

struct HostTierStats {
    std::uint64_t stored = 0, loaded = 0, dropped = 0; // blocks: from the device, back to it, and forgotten
};

class HostTier {
public:
    // `bundles`: blocks of a unit, by lane. `out`: where the copies from the device are noted; it outlives the tier.
    HostTier(const HostTierOptions& options, std::span<const int> bundles, std::vector<BlockCopy>& out);

    BlockPool&           pool() { return pool_; }
    const BlockPool&     pool() const { return pool_; }
    bool                 keeps() const { return keeps_; }
    int                  n_cached() const { return pool_.n_cached_free(); } // blocks
    const HostTierStats& stats() const { return stats_; }

    // The unit of a lane at the end of a text, or -1.
    BlockId find(const Prefix& text, int lane) const;
    // The unit of the first lane that continues `parent` with these tokens, which are compared, or -1. `hash`: of the two.
    BlockId find(BlockHash hash, const Prefix& parent, const CacheNamespace& space,
                 std::span<const Token> tokens) const;
    Prefix  prefix_of(BlockId unit) const { return {pool_.entry(unit).hash, pool_.entry(unit).serial}; }

    // A bundle of a lane for new content; what has the least value is forgotten for it. -1: there is none.
    BlockId take(int lane);
    // The pool of the device forgets a bundle that is cached: keeps it here, if there is room. The first lane has the tokens. The content
    // has to stay until the moves of the next step.
    void save(const BlockPool& device, BlockId bundle, std::span<const Token> tokens);
    // A unit is the source of a copy to the device: it stays what it is until the moves are taken, and then counts as just used.
    void load(BlockId unit);
    void clear(); // forgets all units that are neither lent nor kept for a prompt
    // Keeps the units of `texts`, which a prompt continues, until let_go() gets the list that keep() returns.
    std::vector<BlockId> keep(std::span<const Prefix> texts);
    void                 let_go(std::span<const BlockId> units);
    int n_kept_for(BlockId unit) const { return kept_.empty() ? 0 : kept_[std::size_t(unit)]; } // prompts
    int n_away() const { return n_lent_ + n_kept_back_; } // blocks that are lent or kept for a prompt

    // -- for files

    bool at_once() const { return for_files_ != ForFiles::none; } // save() is wanted as soon as something is cached
    bool has_saved() const { return !saved_.empty(); }
    bool has_late() const { return !late_.empty(); } // units that files could not take, and will be offered again
    // Saves a unit that is here once more, for files that may lack it.
    void save_again(BlockId unit);
    // Texts are used again: their units go to files that have refused or lost them. Only a use offers these units again, so that an idle
    // engine does not write to a full disk.
    void offer(std::span<const Prefix> texts);
    // The serials and lanes of units that files have no longer.
    void files_lost(std::vector<std::pair<std::uint64_t, int>> gone);
    // The units for files that were saved since the last call and that no file has: lent, so that no step
    // overwrites them. While a quarter of the pool is lent, other units wait. Their content is there once the moves that were taken have run.
    std::vector<HostUnit> take_saved();
    // Lends room for a unit of the lane of `wanted`, and fills in its unit and blocks. False: there is none.
    bool lend(HostUnit& wanted);
    // The unit comes back; `in_files`: files have what it has. enter(): before that, a unit that was read can be found from now on, unless
    // another one is found in its place.
    void enter(const HostUnit& read, const CacheNamespace& space, const Prefix& parent, BlockHash hash);
    void give_back(BlockId unit, bool in_files = true);
    std::span<const BlockId> lent() const { return lent_; }
    bool is_lent(BlockId unit) const { return !lent_at_.empty() && lent_at_[std::size_t(unit)] >= 0; }

    // -- for an engine that takes the place of this one

    // The units that nobody reads or writes: markers, then the others, those of the most value first.
    std::vector<ParkedUnit> units() const;
    // A unit of the engine before, under the serial that it had there, gets room that is free: sets its blocks, whose content has to be there
    // before the next plan. False: there is no room.
    bool adopt(ParkedUnit& unit);

    void pause(bool on) { paused_ = on; } // save() keeps nothing

    // As PrefixCache::log_changes(). The first changes are the units that were adopted.
    void log_changes(bool on);
    // A block that files have from now on, or no longer.
    void log_files(CacheChange change) {
        if (logging_) changes_.push_back(std::move(change));
    }
    std::vector<CacheChange> take_changes() { return std::exchange(changes_, {}); }

    void check_invariants() const;

private:
    void                 forget(BlockId unit);
    void                 use(BlockId unit); // sets its value
    void                 drop_value(BlockId unit);
    BlockId              least_value() const; // of the free units with memory; or -1
    bool                 lend_to_files(BlockId unit);
    void                 lend_late();
    void                 begin_loan(BlockId unit);
    std::vector<BlockId> blocks_of(BlockId unit) const;
    void                 log(BlockId unit, bool stored, std::span<const Token> tokens = {});

    BlockPool                 pool_;
    BlockIndex                index_; // of units, by hash and lane
    std::vector<BlockCopy>&   out_;
    int                       n_lanes_;
    bool                      keeps_, paused_ = false, logging_ = false, adopted_ = false;
    ForFiles                  for_files_;
    std::vector<BlockId>      saved_, lent_;                 // saved_: since take_saved(); they are lent already
    std::vector<std::int32_t> lent_at_;                      // [n_ids] the place in lent_, or -1
    std::vector<std::int32_t> kept_;                         // [n_ids] the prompts for which a unit is kept
    int                       n_lent_ = 0, n_kept_back_ = 0; // blocks; kept back: for prompts, and not lent
    std::vector<bool>         in_files_;                     // [n_ids]
    std::deque<BlockId>       late_;                         // units that are to be lent when files keep up
    std::vector<bool>         is_late_;                      // [n_ids]
    std::vector<bool>         is_told_;                      // [n_ids] by log()
    bool                      has_states_;
    HostTierStats             stats_;
    std::vector<CacheChange>  changes_;
    // Units that are not lent, by their value; and the value of each, 0: it is not there.
    std::set<std::pair<double, BlockId>> by_value_;
    std::vector<double>                  values_;        // [n_ids]
    std::vector<std::uint8_t>            uses_;          // [n_ids]
    double                               forgotten_ = 0; // value of the unit that was forgotten last
};

} // namespace quire

module :private;

namespace quire {

BlockHash key_of(BlockHash hash, int lane) { return hash ^ (std::uint64_t(lane) * 0x9e3779b97f4a7c15ull); }

HostTier::HostTier(const HostTierOptions& o, std::span<const int> bundles, std::vector<BlockCopy>& out)
    : pool_(o.n_blocks, o.block_size, o.keeps ? FreeOrder::fifo : FreeOrder::lifo, {}, bundles,
            o.keeps ? o.n_markers : 0),
      index_(o.keeps ? pool_.n_ids() : 0), out_(out), n_lanes_(int(bundles.size())), keeps_(o.keeps),
      for_files_(o.keeps ? o.for_files : ForFiles::none), lent_at_(at_once() ? std::size_t(pool_.n_ids()) : 0, -1),
      kept_(lent_at_.size()), in_files_(lent_at_.size()), is_late_(in_files_.size()), has_states_(o.has_states),
      values_(o.keeps ? std::size_t(pool_.n_ids()) : 0), uses_(values_.size(), 1) {}

BlockId HostTier::find(const Prefix& text, int lane) const {
    const BlockId unit = keeps_ && text.hash ? index_.find(key_of(*text.hash, lane)) : -1;
    return unit >= 0 && pool_.lane(unit) == lane && prefix_of(unit) == text ? unit : -1;
}

BlockId HostTier::find(BlockHash hash, const Prefix& parent, const CacheNamespace& space,
                       std::span<const Token> tokens) const {
    const BlockId unit = keeps_ ? index_.find(key_of(hash, 0)) : -1;
    if (unit < 0 || pool_.lane(unit) != 0) return -1;
    const CacheEntry& entry = pool_.entry(unit);
    const bool        same  = entry.hash == hash && entry.parent.serial == parent.serial && entry.space == space &&
                      std::ranges::equal(pool_.tokens(unit), tokens);
    return same ? unit : -1;
}

BlockId HostTier::take(int lane) {
    const int n = pool_.blocks_of_lane(lane);
    if (n > pool_.n_free()) return -1;
    for (;;) {
        const bool    there = n == 0 || pool_.n_free() - pool_.n_cached_free() >= n;
        const BlockId unit  = there ? pool_.take(lane) : -1;
        if (unit >= 0) return unit;
        const BlockId next = n > 0 ? least_value() : pool_.first_cached_marker();
        if (next < 0) return -1;
        if (n > 0) forgotten_ = std::max(forgotten_, values_[std::size_t(next)]);
        forget(next);
    }
}

void HostTier::use(BlockId unit) {
    drop_value(unit);
    if (pool_.n_blocks(unit) == 0) return; // markers are forgotten in the order of their use
    double& value = values_[std::size_t(unit)];
    value         = forgotten_ + uses_[std::size_t(unit)] / std::sqrt(1.0 + pool_.entry(unit).depth);
    by_value_.emplace(value, unit);
}

void HostTier::drop_value(BlockId unit) {
    double& value = values_[std::size_t(unit)];
    if (value > 0) by_value_.erase({value, unit});
    value = 0;
}

BlockId HostTier::least_value() const {
    for (const auto& [value, unit] : by_value_)
        if (pool_.is_free(unit)) return unit; // else a move at hand reads or writes it
    return -1;
}

void HostTier::forget(BlockId unit) {
    log(unit, false);
    stats_.dropped += std::uint64_t(pool_.n_blocks(unit));
    index_.erase(key_of(pool_.entry(unit).hash, pool_.lane(unit)));
    drop_value(unit);
    uses_[std::size_t(unit)] = 1;
    pool_.clear_entry(unit);
    if (at_once()) in_files_[std::size_t(unit)] = false;
}

void HostTier::save(const BlockPool& device, BlockId from, std::span<const Token> tokens) {
    CacheEntry entry = device.entry(from);
    if (!keeps_ || paused_ || entry.state != HashState::cached || entry.n_tokens < device.block_size() ||
        entry.space.is_temporary())
        return;
    const int       lane = device.lane(from);
    const BlockHash key  = key_of(entry.hash, lane);
    if (const BlockId old = index_.find(key); old >= 0) {
        if (!pool_.is_free(old)) return; // a move at hand, or a file, reads or writes it
        if (pool_.lane(old) == lane && pool_.entry(old).serial == entry.serial) return save_again(old);
        forget(old); // another text with this hash, or a text that nothing leads to any more
    }
    const BlockId to = take(lane);
    if (to < 0) return;
    if (device.n_blocks(from) > 0) add_copy(out_, device, from, pool_, to);
    const BlockId text = entry.owner >= 0 ? entry.owner : from;
    entry.owner        = -1;
    pool_.set_entry(to, entry, tokens);
    index_.insert(key, to);
    stats_.stored += std::uint64_t(pool_.n_blocks(to));
    log(to, true, device.tokens(text));
    use(to);
    if (lend_to_files(to)) return;
    pool_.hold(to); // until the copy is made
    pool_.release(to);
}

// Puts a unit that is already kept at the place of one just used.
void HostTier::save_again(BlockId unit) {
    if (!pool_.is_free(unit)) return;
    use(unit);
    pool_.acquire(unit);
    if (!lend_to_files(unit)) pool_.release(unit);
}

void HostTier::offer(std::span<const Prefix> texts) {
    if (!at_once()) return;
    for (const Prefix& text : texts)
        for (int lane = 0; lane < n_lanes_; lane++)
            if (const BlockId unit = find(text, lane); unit >= 0 && !in_files_[std::size_t(unit)]) save_again(unit);
}

void HostTier::files_lost(std::vector<std::pair<std::uint64_t, int>> gone) {
    if (!at_once() || gone.empty()) return;
    std::ranges::sort(gone);
    for (BlockId unit = 0; unit < pool_.n_ids(); unit++)
        if (in_files_[std::size_t(unit)] &&
            std::binary_search(gone.begin(), gone.end(),
                               std::pair<std::uint64_t, int>(pool_.entry(unit).serial, pool_.lane(unit))))
            in_files_[std::size_t(unit)] = false;
}

// Notes a unit for take_saved(), unless files have it or cannot keep up. False: it is not lent.
bool HostTier::lend_to_files(BlockId unit) {
    if (!at_once() || in_files_[std::size_t(unit)] ||
        (for_files_ == ForFiles::shared && pool_.entry(unit).space != CacheNamespace{}))
        return false;
    if (4 * n_lent_ > pool_.size()) {
        if (!is_late_[std::size_t(unit)]) late_.push_back(unit);
        is_late_[std::size_t(unit)] = true;
        return false;
    }
    begin_loan(unit);
    saved_.push_back(unit);
    return true;
}

// Files keep up again: lends them what they could not take, as far as it is still here.
void HostTier::lend_late() {
    while (!late_.empty() && 4 * n_lent_ <= pool_.size()) {
        const BlockId unit = late_.front();
        const bool    here = pool_.bundle_of(unit) == unit && pool_.state(unit) == HashState::cached;
        if (here && pool_.ref_count(unit) == 0 && !pool_.is_free(unit)) return; // moves that are not taken yet have it
        if (here && n_kept_for(unit) > 0 && !is_lent(unit)) return;             // a prompt has it
        late_.pop_front();
        is_late_[std::size_t(unit)] = false;
        if (!here || pool_.ref_count(unit) > 0) continue;
        pool_.acquire(unit);
        if (!lend_to_files(unit)) pool_.release(unit);
    }
}

void HostTier::begin_loan(BlockId unit) {
    drop_value(unit);
    lent_at_[std::size_t(unit)] = std::int32_t(lent_.size());
    lent_.push_back(unit);
    n_lent_ += pool_.n_blocks(unit);
}

std::vector<BlockId> HostTier::blocks_of(BlockId unit) const {
    std::vector<BlockId> blocks;
    if (pool_.n_blocks(unit) > 0)
        for (BlockId b = unit; b >= 0; b = pool_.next_of(b)) blocks.push_back(b);
    return blocks;
}

std::vector<HostUnit> HostTier::take_saved() {
    lend_late();
    std::vector<HostUnit> units;
    for (BlockId unit : saved_) {
        const CacheEntry& entry  = pool_.entry(unit);
        const auto        tokens = pool_.lane(unit) == 0 ? pool_.tokens(unit) : std::span<const Token>{};
        units.push_back({unit,
                         pool_.lane(unit),
                         entry.space,
                         entry.serial,
                         entry.parent.serial,
                         {tokens.begin(), tokens.end()},
                         blocks_of(unit)});
    }
    saved_.clear();
    return units;
}

bool HostTier::lend(HostUnit& wanted) {
    wanted.unit = 2 * n_lent_ > pool_.size() ? -1 : take(wanted.lane);
    if (wanted.unit < 0) return false;
    wanted.blocks = blocks_of(wanted.unit);
    begin_loan(wanted.unit);
    return true;
}

void HostTier::enter(const HostUnit& read, const CacheNamespace& space, const Prefix& parent, BlockHash hash) {
    if (index_.find(key_of(hash, read.lane)) >= 0) return;
    const auto size = std::int16_t(pool_.block_size());
    pool_.set_entry(read.unit, {HashState::cached, size, -1, hash, parent, space, read.serial, read.depth},
                    read.tokens);
    index_.insert(key_of(hash, read.lane), read.unit);
    log(read.unit, true);
}

// A unit that comes back without an entry was not read.
void HostTier::give_back(BlockId unit, bool in_files) {
    check(is_lent(unit), "a unit came back that was not lent");
    const std::int32_t at = std::exchange(lent_at_[std::size_t(unit)], -1);
    if (lent_.back() != unit) {
        lent_[std::size_t(at)]              = lent_.back();
        lent_at_[std::size_t(lent_.back())] = at;
    }
    lent_.pop_back();
    n_lent_ -= pool_.n_blocks(unit);
    if (n_kept_for(unit) > 0) n_kept_back_ += pool_.n_blocks(unit);
    const bool cached            = pool_.state(unit) == HashState::cached;
    in_files_[std::size_t(unit)] = cached && in_files;
    if (cached && n_kept_for(unit) == 0) use(unit);
    pool_.release(unit);
}

void HostTier::load(BlockId unit) {
    constexpr std::uint8_t most_uses = 16;
    std::uint8_t&          uses      = uses_[std::size_t(unit)];
    uses                             = std::min(std::uint8_t(uses + 1), most_uses);
    if (pool_.ref_count(unit) == 0) use(unit); // else it is lent, and gets its value when it is given back
    stats_.loaded += std::uint64_t(pool_.n_blocks(unit));
    pool_.hold(unit);
}

std::vector<BlockId> HostTier::keep(std::span<const Prefix> texts) {
    std::vector<BlockId> units;
    for (const Prefix& text : texts)
        for (int lane = 0; lane < n_lanes_; lane++)
            if (const BlockId unit = find(text, lane); unit >= 0) {
                if (kept_[std::size_t(unit)]++ == 0 && !is_lent(unit)) n_kept_back_ += pool_.n_blocks(unit);
                drop_value(unit); // else each least_value() would pass it
                pool_.acquire(unit);
                units.push_back(unit);
            }
    return units;
}

void HostTier::let_go(std::span<const BlockId> units) {
    for (BlockId unit : units) {
        if (--kept_[std::size_t(unit)] == 0 && !is_lent(unit)) n_kept_back_ -= pool_.n_blocks(unit);
        if (!is_lent(unit) && n_kept_for(unit) == 0) use(unit);
        pool_.release(unit);
    }
}

void HostTier::clear() {
    while (pool_.first_cached_free() >= 0) forget(pool_.first_cached_free());
    while (pool_.first_cached_marker() >= 0) forget(pool_.first_cached_marker());
}

std::vector<ParkedUnit> HostTier::units() const {
    std::vector<BlockId> ids;
    for (BlockId unit = 0; keeps_ && unit < pool_.n_ids(); unit++)
        if (pool_.bundle_of(unit) == unit && pool_.state(unit) == HashState::cached && pool_.is_free(unit))
            ids.push_back(unit);
    const auto is_before = [&](BlockId a, BlockId b) {
        const bool a_is_marker = pool_.n_blocks(a) == 0, b_is_marker = pool_.n_blocks(b) == 0;
        if (a_is_marker != b_is_marker) return a_is_marker;
        const double a_value = values_[std::size_t(a)], b_value = values_[std::size_t(b)];
        return a_value != b_value ? a_value > b_value : pool_.entry(a).depth < pool_.entry(b).depth;
    };
    std::ranges::sort(ids, is_before);
    std::vector<ParkedUnit> units;
    for (BlockId unit : ids) {
        const auto tokens = pool_.lane(unit) == 0 ? pool_.tokens(unit) : std::span<const Token>{};
        units.push_back({pool_.lane(unit),
                         pool_.entry(unit),
                         {tokens.begin(), tokens.end()},
                         blocks_of(unit),
                         uses_[std::size_t(unit)]});
    }
    return units;
}

bool HostTier::adopt(ParkedUnit& unit) {
    const BlockHash key  = key_of(unit.entry.hash, unit.lane);
    const bool      room = pool_.n_free() - pool_.n_cached_free() >= pool_.blocks_of_lane(unit.lane);
    const BlockId   to   = keeps_ && room && index_.find(key) < 0 ? pool_.take(unit.lane) : -1;
    if (to < 0) return false;
    pool_.set_entry(to, unit.entry, unit.tokens);
    index_.insert(key, to);
    uses_[std::size_t(to)] = unit.uses;
    use(to);
    pool_.release(to);
    unit.blocks = blocks_of(to);
    adopted_    = true;
    return true;
}

void HostTier::log_changes(bool on) {
    logging_ = on;
    changes_.clear();
    is_told_.assign(on ? values_.size() : 0, false);
    if (!on || !std::exchange(adopted_, false)) return;
    std::vector<BlockId> ids; // the beginnings of texts first
    for (BlockId unit = 0; unit < pool_.n_ids(); unit++)
        if (pool_.bundle_of(unit) == unit && pool_.state(unit) == HashState::cached) ids.push_back(unit);
    std::ranges::sort(ids, {}, [&](BlockId unit) { return std::pair(pool_.entry(unit).depth, unit); });
    for (BlockId unit : ids) log(unit, true);
}

// Blocks of the shared namespace. Neither states in host memory are told, nor markers, nor a unit that came without its tokens where the unit
// of the first lane, which has them, is not here.
void HostTier::log(BlockId unit, bool stored, std::span<const Token> tokens) {
    if (!logging_) return;
    const CacheEntry& entry = pool_.entry(unit);
    const int         lane  = pool_.lane(unit);
    const bool        state = has_states_ && lane == n_lanes_ - 1;
    if (stored ? pool_.n_blocks(unit) == 0 || state || entry.space != CacheNamespace{} : !is_told_[std::size_t(unit)])
        return;
    if (stored && tokens.empty()) {
        const BlockId text = find(prefix_of(unit), 0);
        if (text < 0) return;
        tokens = pool_.tokens(text);
    }
    is_told_[std::size_t(unit)] = stored;
    CacheChange& change         = changes_.emplace_back(stored, entry.hash);
    change.group                = pool_.group_of_lane(lane);
    change.medium               = Medium::host;
    if (!stored) return;
    change.parent = entry.parent.hash;
    change.tokens.assign(tokens.begin(), tokens.end());
}

void HostTier::check_invariants() const {
    int n = 0, n_valued = 0;
    for (BlockId unit = 0; unit < pool_.n_ids(); unit++) {
        const CacheEntry& entry   = pool_.entry(unit);
        const bool        lent    = is_lent(unit);
        const bool        swapped = pool_.ref_count(unit) > 0 && !lent && n_kept_for(unit) == 0;
        if (pool_.bundle_of(unit) != unit || entry.state != HashState::cached || swapped) continue;
        n++;
        const bool valued = !lent && n_kept_for(unit) == 0 && pool_.n_blocks(unit) > 0;
        check(!valued || by_value_.contains({values_[std::size_t(unit)], unit}), "a unit in host memory has no value");
        n_valued += valued;
        check(index_.find(key_of(entry.hash, pool_.lane(unit))) == unit, "a unit in host memory is not in the index");
    }
    check(n_valued == int(by_value_.size()), "host memory has the value of a unit that is not there");
    check(n == index_.size(), "the index of host memory has a unit that is not there");
}

} // namespace quire
