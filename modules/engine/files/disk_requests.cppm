// quire.engine.files.disk_requests: between scheduler and files. A new request waits here until what the files have of its prompt is in host
// memory, where the scheduler finds it. What is copied to host memory goes to the files when the copies are done. **Owns** the disk tier and
// the requests that wait.
export module quire.engine.files.disk_requests;

import quire.core.base;
import quire.engine.executor;
export import quire.engine.files.disk_tier;
import quire.paging.block_hash;
import quire.schedule.scheduler;

export namespace quire {

class DiskRequests {
public:
    // Both outlive it. `jobs`: see DiskTierOptions.
    DiskRequests(SegmentOptions options, std::unique_ptr<SegmentFiles> files, std::function<int()> jobs,
                 Scheduler& scheduler, const Executor& executor);

    // Takes a request if the files may have more of its prompt than the memory has, and returns true.
    bool take(RequestId id, Request& request);
    // Passes a request on to the scheduler without what the files have, if it is here.
    void pass_on(RequestId id);
    // Passes on what the files have brought, between steps.
    void update();
    // A plan has taken the pending moves; and they are done, before the next update().
    void moves_taken();
    void moves_done();

    int             n_waiting() const { return int(waiting_.size()); } // requests
    void            wait(double seconds) { disk_.wait(seconds); }      // until there is something to update
    const DiskTier& tier() const { return disk_; }

private:
    void begin_to_read(DiskFound found);
    void end_read(const DiskFound& found);

    Scheduler&                   scheduler_;
    std::map<RequestId, Request> waiting_;
    std::vector<HostUnit>        saved_; // whose content is there when the moves at hand are done
    bool                         salts_; // requests with a salt are in the files, too
    DiskTier                     disk_;
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
    const auto size = std::size_t(scheduler_.blocks().block_size());
    if (disk_.empty() || (!request.cache_salt.empty() && !salts_) || request.wants_all_rows()) return false;
    const CacheNamespace space = scheduler_.namespace_of(request);
    const auto [n, text]       = scheduler_.blocks().known(space, request.prompt);
    if (std::size_t(n + 1) * size >= request.prompt.size()) return false;
    disk_.look_up(id, space, text, n, request.prompt);
    waiting_.emplace(id, std::move(request));
    return true;
}

void DiskRequests::pass_on(RequestId id) {
    const auto at = waiting_.find(id);
    if (at == waiting_.end()) return;
    scheduler_.add(id, std::move(at->second));
    waiting_.erase(at);
}

void DiskRequests::update() {
    DiskDone done = disk_.take_done();
    for (BlockId unit : done.written) scheduler_.blocks().host().give_back(unit);
    for (DiskFound& found : done.found)
        if (found.is_read) end_read(found);
        else begin_to_read(std::move(found));
}

// As many units as host memory has room for.
void DiskRequests::begin_to_read(DiskFound found) {
    if (!waiting_.contains(found.id)) return; // cancelled
    std::size_t n = 0;
    while (n < found.units.size() && scheduler_.blocks().host().lend(found.units[n])) n++;
    found.units.resize(n);
    if (n > 0) disk_.take(std::move(found));
    else pass_on(found.id);
}

void DiskRequests::end_read(const DiskFound& found) {
    HostTier& host = scheduler_.blocks().host();
    Prefix    before, here = found.from; // the text of the unit at hand without its block, and with it
    int       n_read = 0;                // blocks
    bool      whole  = true;             // every block up to there was read
    for (const HostUnit& unit : found.units) {
        if (unit.lane == 0) {
            whole  = whole && unit.is_read;
            before = std::exchange(here, {scheduler_.blocks().hash_of(here, unit.tokens), unit.serial});
            n_read += whole;
        }
        if (whole && unit.is_read) host.enter(unit, found.space, before, *here.hash);
        host.give_back(unit.unit);
    }
    if (!waiting_.contains(found.id)) return; // cancelled
    pass_on(found.id);
    scheduler_.find(found.id)->n_from_disk = n_read * scheduler_.blocks().block_size();
}

void DiskRequests::moves_taken() { saved_ = scheduler_.blocks().host().take_saved(); }

void DiskRequests::moves_done() {
    if (!saved_.empty()) disk_.write(std::exchange(saved_, {}));
}

} // namespace quire
