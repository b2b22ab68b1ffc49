// quire.engine.files.disk_tier: the third level of the prefix cache: units in host memory are written to files and read from them by a thread of
// its own, so that no step waits for a disk. **Owns** the files, the thread and the work that waits for it.
export module quire.engine.files.disk_tier;

import quire.core.base;
import quire.core.std;
export import quire.engine.files.segment_store;
import quire.paging.block;
import quire.paging.block_hash;
import quire.paging.cache_layout;
import quire.paging.host_tier;
import quire.paging.prefix_cache;

export namespace quire {

struct DiskTierOptions {
    SegmentOptions                segments;
    std::unique_ptr<SegmentFiles> files;
    std::vector<Lane>             lanes; // of the prefix cache
    // The memory of a block in host memory. The thread asks for it while the block is lent to it.
    std::function<std::vector<std::span<std::byte>>(BlockId)> memory;
    // For tests: there is no thread, and each update() does so many jobs.
    std::function<int()> jobs = {};
};

// Units of a request's prompt that the files have, and the memory lacks.
struct DiskFound {
    RequestId             id = 0;
    CacheNamespace        space;
    KnownText             known;           // what the memory had when the files were asked
    std::vector<HostUnit> units   = {};    // parents before children; read: with their blocks in host memory
    bool                  is_read = false; // else only looked up
};

// A unit that is lent no longer.
struct DiskWritten {
    BlockId unit     = -1;
    bool    is_there = false; // else the files have refused it
};

struct DiskDone {
    std::vector<DiskWritten>       written;
    std::vector<DiskFound>         found;
    std::vector<TextChange>        changes; // of what the files have
    std::vector<SegmentStore::Key> gone;    // what they have no longer
};

class DiskTier {
public:
    explicit DiskTier(DiskTierOptions options);
    DiskTier(const DiskTier&)            = delete;
    DiskTier& operator=(const DiskTier&) = delete;
    ~DiskTier(); // what waits to be written is written

    std::uint64_t        first_serial() const { return first_serial_; } // see SegmentStore
    const SegmentsFound& found() const { return found_; }               // when the files were opened
    bool                 empty() const { return n_records_ == 0; }
    std::size_t          n_records() const { return n_records_; }
    std::uint64_t        bytes() const { return bytes_; }
    SegmentStats         stats() const;

    // -- the engine's thread; none of these waits for a file

    void write(std::vector<HostUnit> units); // that are lent
    // Looks for the units that `tokens` could go on behind, of which the memory has `known`. The last token is left to compute.
    void     look_up(RequestId id, const CacheNamespace& space, KnownText known, std::vector<Token> tokens);
    void     take(DiskFound found); // reads what was looked up, into units that are lent
    DiskDone take_done();           // since the last call
    void     wait(double seconds);  // until something is done

private:
    struct Job {
        DiskFound          found;
        std::vector<Token> tokens = {};
    };
    void                              run();
    bool                              do_one(std::unique_lock<std::mutex>& lock);
    void                              add(Job job);
    void                              look_up(Job& job) const;
    void                              read(DiskFound& found);
    std::vector<std::span<std::byte>> memory_of(const HostUnit& unit) const;
    int                               first_seen(int lane, int n_blocks) const; // by the token behind so many blocks
    void                              publish_counts();

    DiskTierOptions               o_;
    std::unique_ptr<SegmentStore> store_; // the thread's
    std::uint64_t                 first_serial_;
    SegmentsFound                 found_;
    std::atomic<std::size_t>      n_records_ = 0;
    std::atomic<std::uint64_t>    bytes_     = 0;
    std::atomic<bool>             has_done_  = false;
    mutable std::mutex            mutex_;
    std::condition_variable       work_, results_;
    std::deque<Job>               jobs_; // before writes: requests wait for them
    std::deque<HostUnit>          writes_;
    DiskDone                      done_;
    SegmentStats                  stats_;
    bool                          ends_ = false;
    std::thread                   thread_;
};

} // namespace quire

module :private;

namespace quire {

DiskTier::DiskTier(DiskTierOptions options)
    : o_(std::move(options)), store_(std::make_unique<SegmentStore>(o_.segments, std::move(o_.files))),
      first_serial_(store_->first_serial()), found_(store_->found()) {
    publish_counts();
    has_done_ = !done_.changes.empty();
    if (!o_.jobs) thread_ = std::thread([this] { run(); });
}

DiskTier::~DiskTier() {
    if (!thread_.joinable()) return;
    {
        std::scoped_lock lock(mutex_);
        ends_ = true;
    }
    work_.notify_one();
    thread_.join();
}

SegmentStats DiskTier::stats() const {
    std::scoped_lock lock(mutex_);
    return stats_;
}

void DiskTier::write(std::vector<HostUnit> units) {
    {
        std::scoped_lock lock(mutex_);
        for (HostUnit& unit : units) writes_.push_back(std::move(unit));
    }
    work_.notify_one();
}

void DiskTier::look_up(RequestId id, const CacheNamespace& space, KnownText known, std::vector<Token> tokens) {
    add({{id, space, std::move(known)}, std::move(tokens)});
}

void DiskTier::take(DiskFound found) {
    found.is_read = true;
    add({std::move(found)});
}

void DiskTier::add(Job job) {
    {
        std::scoped_lock lock(mutex_);
        jobs_.push_back(std::move(job));
    }
    work_.notify_one();
}

DiskDone DiskTier::take_done() {
    if (o_.jobs) {
        std::unique_lock lock(mutex_);
        for (int n = o_.jobs(); n > 0 && do_one(lock); n--) {}
    }
    if (!has_done_) return {};
    std::scoped_lock lock(mutex_);
    has_done_ = false;
    return std::exchange(done_, {});
}

void DiskTier::wait(double seconds) {
    if (o_.jobs) return;
    std::unique_lock lock(mutex_);
    results_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return has_done_.load(); });
}

void DiskTier::publish_counts() {
    n_records_ = store_->n_records();
    bytes_     = store_->bytes();
    stats_     = store_->stats();
    for (TextChange& change : store_->take_changes()) done_.changes.push_back(std::move(change));
    for (const SegmentStore::Key& key : store_->take_gone()) done_.gone.push_back(key);
}

void DiskTier::run() {
    std::unique_lock lock(mutex_);
    do work_.wait(lock, [&] { return ends_ || !jobs_.empty() || !writes_.empty(); });
    while (do_one(lock));
}

// False: there is none left when it ends.
bool DiskTier::do_one(std::unique_lock<std::mutex>& lock) {
    if (!jobs_.empty() && !ends_) {
        Job job = std::move(jobs_.front());
        jobs_.pop_front();
        lock.unlock();
        job.found.is_read ? read(job.found) : look_up(job);
        lock.lock();
        done_.found.push_back(std::move(job.found));
    } else if (!writes_.empty()) {
        const HostUnit unit = std::move(writes_.front());
        writes_.pop_front();
        lock.unlock();
        const bool is_there =
            store_->append(unit.space, unit.serial, unit.parent, unit.lane, unit.tokens, memory_of(unit)) ||
            store_->has(unit.serial, unit.lane);
        lock.lock();
        done_.written.push_back({unit.unit, is_there});
    } else {
        return false;
    }
    publish_counts();
    has_done_ = true;
    results_.notify_one();
    return true;
}

void DiskTier::read(DiskFound& found) {
    std::vector<UnitRead> units;
    for (const HostUnit& unit : found.units) units.push_back({unit.serial, unit.lane, memory_of(unit)});
    store_->read(units);
    for (std::size_t i = 0; i < units.size(); i++) found.units[i].is_read = units[i].whole;
}

std::vector<std::span<std::byte>> DiskTier::memory_of(const HostUnit& unit) const {
    std::vector<std::span<std::byte>> memory;
    for (BlockId block : unit.blocks)
        for (std::span<std::byte> piece : o_.memory(block)) memory.push_back(piece);
    return memory;
}

int DiskTier::first_seen(int lane, int n_blocks) const {
    const Lane& l = o_.lanes[std::size_t(lane)];
    if (l.state) return n_blocks - 1;
    return CacheLayout::first_entry_seen(l.window, n_blocks * o_.segments.block_size, o_.segments.block_size);
}

// Finds the units that the memory lacks of the longest beginning that memory and files have together. None, if the memory alone has one as long.
void DiskTier::look_up(Job& job) const {
    const auto                 size    = std::size_t(o_.segments.block_size);
    const auto                 block   = [&](std::size_t i) { return std::span(job.tokens).subspan(i * size, size); };
    const KnownText&           known   = job.found.known;
    const std::size_t          n_lanes = o_.lanes.size();
    std::vector<std::uint64_t> serials;
    for (const Prefix& text : known.texts) serials.push_back(text.serial);
    while ((serials.size() + 1) * size < job.tokens.size()) {
        const std::uint64_t before = serials.empty() ? 0 : serials.back();
        const std::uint64_t next   = store_->find(job.found.space, before, block(serials.size()));
        if (next == 0) break;
        serials.push_back(next);
    }
    const auto in_memory = [&](int i, int lane) {
        return i < known.n_blocks() && known.units[std::size_t(i) * n_lanes + std::size_t(lane)];
    };
    const int end = most_usable(o_.lanes, int(size), int(serials.size()), [&](int i, int lane) {
        return in_memory(i, lane) || store_->has(serials[std::size_t(i)], lane);
    });
    if (end <= known.n_usable) return;
    for (int i = 0; i < end; i++)
        for (int lane = 0; lane < int(n_lanes); lane++) {
            if (in_memory(i, lane) || i < first_seen(lane, end)) continue;
            HostUnit& unit    = job.found.units.emplace_back();
            unit.lane         = lane;
            unit.depth        = i;
            unit.serial       = serials[std::size_t(i)];
            unit.parent       = i == 0 ? 0 : serials[std::size_t(i) - 1];
            const auto tokens = block(std::size_t(i));
            if (lane == 0) unit.tokens.assign(tokens.begin(), tokens.end());
        }
}

} // namespace quire
