// quire.engine.files.disk_requests: between scheduler and files. A new request waits here until what the files have of its prompt is in host
// memory, where the scheduler finds it. A unit that is copied to host memory goes to the files when the copy is done. **Owns** the disk tier and
// the requests that wait.
export module quire.engine.files.disk_requests;

import quire.core.base;
import quire.engine.executor;
export import quire.engine.files.disk_tier;
import quire.paging.block_hash;
import quire.paging.prefix_cache;
import quire.schedule.scheduler;

export namespace quire {

// A request that has moved what the cache has of its prompt, see CacheMove.
struct CacheMoved {
    RequestId id       = 0;
    int       n_tokens = 0; // that are there now
    int       n_prompt = 0;
    int       n_missed = 0; // that the memory has, and the files did not take
};

class DiskRequests {
public:
    // Both outlive it. `jobs`: see DiskTierOptions.
    DiskRequests(SegmentOptions options, std::unique_ptr<SegmentFiles> files, std::function<int()> jobs,
                 Scheduler& scheduler, const Executor& executor);

    // Takes a request if the files may have more of its prompt than the memory has, or if it only moves, and returns true.
    bool take(RequestId id, Request& request);
    // Passes a request on to the scheduler without what the files have, if it is here.
    void pass_on(RequestId id);
    // Passes on what the files have brought, between steps.
    void update();
    // A plan has taken the pending moves; and they are done, before the next update().
    void moves_taken();
    void moves_done();
    // The requests that have moved all, or were passed on, since the last call.
    std::vector<CacheMoved> take_moved() { return std::exchange(moved_, {}); }

    bool            brings() const { return !saved_.empty(); } // moves_done() gives units to the files
    int             n_waiting() const { return int(waiting_.size() + saves_.size()); } // requests
    void            wait(double seconds) { disk_.wait(seconds); } // until there is something to update
    const DiskTier& tier() const { return disk_; }

private:
    // A prompt whose blocks go to the files.
    struct Save {
        std::vector<Token>   prompt;
        CacheNamespace       space;
        std::vector<BlockId> lent     = {}; // units that are on the way
        int                  n_blocks = -1; // that the files had when they were asked last; -1: they were not
    };
    void log(const TextChange& change);
    bool look_up(RequestId id, Request& request);
    void begin_to_save(Save& save);
    void look_at_saves();
    void end_look(RequestId id, int n_blocks);
    bool begin_to_read(DiskFound found);
    void end_read(const DiskFound& found);

    Scheduler&                                   scheduler_;
    std::map<RequestId, Request>                 waiting_;
    std::map<RequestId, Save>                    saves_;
    std::vector<CacheMoved>                      moved_;
    std::vector<HostUnit>                        saved_;  // whose content is there when the moves at hand are done
    std::unordered_map<std::uint64_t, BlockHash> hashes_; // of the texts in the files, by serial
    bool                                         salts_;  // requests with a salt or with adapters are in the files, too
    DiskTier                                     disk_;
};

} // namespace quire

module :private;

namespace quire {

DiskRequests::DiskRequests(SegmentOptions options, std::unique_ptr<SegmentFiles> files, std::function<int()> jobs,
                           Scheduler& scheduler, const Executor& executor)
    : scheduler_(scheduler), salts_(options.cipher.has_value()),
      disk_({std::move(options),
             std::move(files),
             {scheduler.blocks().lanes().begin(), scheduler.blocks().lanes().end()},
             [&executor](BlockId block) { return executor.host_block(block); },
             std::move(jobs)}) {
    scheduler_.blocks().begin_serials(disk_.first_serial());
}

bool DiskRequests::take(RequestId id, Request& request) {
    if (request.cache_move == CacheMove::save) {
        const CacheNamespace space = scheduler_.namespace_of(request);
        begin_to_save(saves_.emplace(id, Save{std::move(request.prompt), space}).first->second);
        return true;
    }
    if (look_up(id, request)) return true;
    if (request.cache_move != CacheMove::load) return false;
    waiting_.emplace(id, std::move(request));
    pass_on(id);
    return true;
}

bool DiskRequests::look_up(RequestId id, Request& request) {
    const auto size   = std::size_t(scheduler_.blocks().block_size());
    const bool shared = request.cache_salt.empty() && (!request.adapters || request.adapters->empty());
    if ((!shared && !salts_) || !request.uses_cache || request.wants_all_rows()) return false;
    const CacheNamespace space = scheduler_.namespace_of(request);
    const auto           most =
        (std::max<std::size_t>(request.prompt.size(), 1) - 1) / size; // blocks: one token is left to compute
    const auto text  = std::span<const Token>(request.prompt).first(most * size);
    KnownText  known = scheduler_.blocks().known(space, text);
    scheduler_.blocks().host().offer(known.texts);
    if (disk_.empty() || std::size_t(known.n_usable) == most) return false;
    if (!begin_to_read(disk_.look_up(id, space, std::move(known), text))) return false;
    waiting_.emplace(id, std::move(request));
    return true;
}

void DiskRequests::pass_on(RequestId id) {
    if (const auto save = saves_.find(id); save != saves_.end()) end_look(id, save->second.n_blocks);
    const auto at = waiting_.find(id);
    if (at == waiting_.end()) return;
    if (const Request& request = at->second; request.cache_move == CacheMove::load) {
        const int n = scheduler_.blocks().known(scheduler_.namespace_of(request), request.prompt).n_usable;
        moved_.push_back({id, n * scheduler_.blocks().block_size(), int(request.prompt.size())});
    } else {
        scheduler_.add(id, std::move(at->second));
    }
    waiting_.erase(at);
}

void DiskRequests::update() {
    DiskDone done = disk_.take_done();
    for (const TextChange& change : done.changes) log(change);
    HostTier& host = scheduler_.blocks().host();
    for (const DiskWritten& written : done.written) host.give_back(written.unit, written.is_there);
    for (const DiskFound& found : done.read) end_read(found);
    host.files_lost(std::move(done.gone)); // last: what was written can be gone by now
    look_at_saves();
}

// A text whose parent is in no file, which no prompt leads to, is not told. Neither are texts that are markers: what files have of the windows
// behind them is not known here.
void DiskRequests::log(const TextChange& change) {
    BlockManager& blocks = scheduler_.blocks();
    if (!blocks.layout().keeps_all()) return;
    CacheChange told;
    told.medium = Medium::files;
    told.stored = change.stored;
    if (!change.stored) {
        const auto at = hashes_.find(change.serial);
        if (at == hashes_.end()) return;
        told.hash = at->second;
        hashes_.erase(at);
    } else {
        const auto before = hashes_.find(change.parent);
        if (change.parent != 0 && before == hashes_.end()) return;
        if (change.parent != 0) told.parent = before->second;
        told.tokens = change.tokens;
        told.hash   = blocks.hash_of({told.parent, change.parent}, told.tokens);
        hashes_.emplace(change.serial, told.hash);
    }
    blocks.host().log_files(std::move(told));
}

// -- a prompt whose blocks go to the files

void DiskRequests::begin_to_save(Save& save) {
    scheduler_.blocks().save(save.space, save.prompt);
    const auto lent = scheduler_.blocks().host().lent();
    save.lent       = {lent.begin(), lent.end()};
}

// The texts to save are written, or were refused: asks the files for the part that they have.
void DiskRequests::look_at_saves() {
    const HostTier& host = scheduler_.blocks().host();
    for (auto at = saves_.begin(); at != saves_.end();) {
        auto& [id, save] = *at++; // end_look() may erase it
        // A save does not wait for a unit once more that came back and is lent for another text.
        std::erase_if(save.lent, [&](BlockId unit) { return !host.is_lent(unit); });
        if (!save.lent.empty()) continue;
        const DiskFound found = disk_.look_up(id, save.space, {}, save.prompt);
        end_look(id, int(std::ranges::count_if(found.units, [](const HostUnit& unit) { return unit.lane == 0; })));
    }
}

// Once more as long as that brings blocks to the files: some are left out while many wait for the disk.
void DiskRequests::end_look(RequestId id, int n_blocks) {
    const auto at      = saves_.find(id);
    Save&      save    = at->second;
    const int  n_known = scheduler_.blocks().known(save.space, save.prompt).n_usable;
    if (n_blocks > std::exchange(save.n_blocks, n_blocks) && n_blocks < n_known) return begin_to_save(save);
    const int size = scheduler_.blocks().block_size(), n_there = std::max(n_blocks, 0);
    moved_.push_back({id, n_there * size, int(save.prompt.size()), std::max(n_known - n_there, 0) * size});
    saves_.erase(at);
}

// -- what comes from the files

// As many units as host memory has room for, beside the units that they continue. False: none.
bool DiskRequests::begin_to_read(DiskFound found) {
    if (found.units.empty()) return false;
    HostTier& host = scheduler_.blocks().host();
    found.kept     = host.keep(found.known.texts);
    std::size_t n  = 0;
    while (n < found.units.size() && host.lend(found.units[n])) n++;
    found.units.resize(n);
    if (n == 0) host.let_go(found.kept);
    else disk_.read(std::move(found));
    return n > 0;
}

void DiskRequests::end_read(const DiskFound& found) {
    BlockManager&              blocks = scheduler_.blocks();
    const std::vector<Prefix>& known  = found.known.texts;
    const Prefix               root{chain_root(found.space)};
    Prefix                     last = known.empty() ? root : known.back(); // of the blocks so far, the known ones first
    Prefix                     before, here; // the text of the unit at hand without its block, and with it
    bool                       whole = true; // every block up to there was read
    for (const HostUnit& unit : found.units) {
        const auto depth = std::size_t(unit.depth);
        if (depth < known.size()) {
            before = depth > 0 ? known[depth - 1] : root;
            here   = known[depth];
        } else if (unit.lane == 0) {
            whole  = whole && unit.is_read;
            before = last;
            here = last = {blocks.hash_of(last, unit.tokens), unit.serial};
        }
        if (whole && unit.is_read) blocks.host().enter(unit, found.space, before, *here.hash);
        blocks.host().give_back(unit.unit);
    }
    blocks.host().let_go(found.kept);
    const auto at = waiting_.find(found.id);
    if (at == waiting_.end()) return; // cancelled
    const int n_now = blocks.known(found.space, at->second.prompt).n_usable;
    pass_on(found.id);
    if (SequenceGroup* const group = scheduler_.find(found.id)) // none: it only moved
        group->n_from_disk = std::max(n_now - found.known.n_usable, 0) * blocks.block_size();
}

void DiskRequests::moves_taken() { saved_ = scheduler_.blocks().host().take_saved(); }

void DiskRequests::moves_done() {
    if (!saved_.empty()) disk_.write(std::exchange(saved_, {}));
}

} // namespace quire
