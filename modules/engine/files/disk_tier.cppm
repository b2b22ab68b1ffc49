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
    KnownText             known;      // what the memory had when the files were asked
    std::vector<HostUnit> units = {}; // parents before children; read: with their blocks in host memory
    std::vector<BlockId>  kept  = {}; // units of host memory that these continue
};

// A unit that is lent no longer.
struct DiskWritten {
    BlockId unit     = -1;
    bool    is_there = false; // else the files have refused it
};

struct DiskDone {
    std::vector<DiskWritten>       written;
    std::vector<DiskFound>         read;
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
    // The units that the memory lacks of the longest beginning of `tokens` that memory and files have together; none, if the memory alone,
    // which has `known`, has one as long. Looks into the index, at no file.
    DiskFound look_up(RequestId id, const CacheNamespace& space, KnownText known, std::span<const Token> tokens) const;
    void      read(DiskFound found); // what was looked up, into units that are lent
    DiskDone  take_done();           // since the last call
    void      wait(double seconds);  // until something is done

private:
    void                              run();
    bool                              do_one(std::unique_lock<std::mutex>& lock);
    void                              read_now(DiskFound& found);
    bool                              write_now(const HostUnit& unit, bool& is_there);
    std::vector<std::span<std::byte>> memory_of(const HostUnit& unit) const;
    int                               first_seen(int lane, int n_blocks) const; // by the token behind so many blocks
    void                              take_changes();
    void                              publish_counts();

    DiskTierOptions                o_;
    std::unique_ptr<SegmentStore>  store_; // the thread's
    std::uint64_t                  first_serial_;
    SegmentsFound                  found_;
    std::atomic<std::size_t>       n_records_ = 0;
    std::atomic<std::uint64_t>     bytes_     = 0;
    std::atomic<bool>              has_done_  = false;
    mutable std::mutex             mutex_;
    std::condition_variable        work_, results_;
    std::deque<DiskFound>          reads_; // before writes: requests wait for them
    std::deque<HostUnit>           writes_;
    std::vector<TextChange>        changes_; // the thread's, like the next: not published yet
    std::vector<SegmentStore::Key> gone_;
    DiskDone                       done_;
    SegmentStats                   stats_;
    bool                           ends_ = false;
    std::thread                    thread_;
};

} // namespace quire

module :private;

namespace quire {

DiskTier::DiskTier(DiskTierOptions options)
    : o_(std::move(options)), store_(std::make_unique<SegmentStore>(o_.segments, std::move(o_.files))),
      first_serial_(store_->first_serial()), found_(store_->found()) {
    take_changes();
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

void DiskTier::read(DiskFound found) {
    {
        std::scoped_lock lock(mutex_);
        reads_.push_back(std::move(found));
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
    for (TextChange& change : changes_) done_.changes.push_back(std::move(change));
    done_.gone.insert(done_.gone.end(), gone_.begin(), gone_.end());
}

// The caller does not hold the mutex, which the engine's thread takes in each step: take_gone() searches all names of records.
void DiskTier::take_changes() {
    changes_ = store_->take_changes();
    gone_    = store_->take_gone();
}

void DiskTier::run() {
    std::unique_lock lock(mutex_);
    do work_.wait(lock, [&] { return ends_ || !reads_.empty() || !writes_.empty(); });
    while (do_one(lock));
}

// False: there is none left when it ends.
bool DiskTier::do_one(std::unique_lock<std::mutex>& lock) {
    if (!reads_.empty() && !ends_) {
        DiskFound found = std::move(reads_.front());
        reads_.pop_front();
        lock.unlock();
        read_now(found);
        take_changes();
        lock.lock();
        done_.read.push_back(std::move(found));
    } else if (!writes_.empty()) {
        const HostUnit& unit     = writes_.front(); // others only add to the end
        bool            is_there = false;
        lock.unlock();
        const bool done = write_now(unit, is_there);
        take_changes();
        lock.lock();
        if (done) {
            done_.written.push_back({unit.unit, is_there});
            writes_.pop_front();
        }
    } else {
        return false;
    }
    publish_counts();
    has_done_ = true;
    results_.notify_one();
    return true;
}

// False: there is more to do for it, and reads come first.
bool DiskTier::write_now(const HostUnit& unit, bool& is_there) {
    const std::vector<std::span<std::byte>> memory = memory_of(unit);
    if (!store_->make_room(unit.space, unit.serial, unit.parent, unit.lane, unit.tokens, memory)) return false;
    is_there = store_->append(unit.space, unit.serial, unit.parent, unit.lane, unit.tokens, memory) ||
               store_->has(unit.serial, unit.lane);
    return true;
}

void DiskTier::read_now(DiskFound& found) {
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

DiskFound DiskTier::look_up(RequestId id, const CacheNamespace& space, KnownText text,
                            std::span<const Token> tokens) const {
    DiskFound                  found{id, space, std::move(text)};
    const auto                 size    = std::size_t(o_.segments.block_size);
    const auto                 block   = [&](std::size_t i) { return tokens.subspan(i * size, size); };
    const KnownText&           known   = found.known;
    const std::size_t          n_lanes = o_.lanes.size();
    std::vector<std::uint64_t> serials;
    for (const Prefix& text : known.texts) serials.push_back(text.serial);
    while ((serials.size() + 1) * size <= tokens.size()) {
        const std::uint64_t before = serials.empty() ? 0 : serials.back();
        const std::uint64_t next   = store_->find(space, before, block(serials.size()));
        if (next == 0) break;
        serials.push_back(next);
    }
    const auto in_memory = [&](int i, int lane) {
        return i < known.n_blocks() && known.units[std::size_t(i) * n_lanes + std::size_t(lane)];
    };
    const int end = most_usable(o_.lanes, int(size), int(serials.size()), [&](int i, int lane) {
        return in_memory(i, lane) || store_->has(serials[std::size_t(i)], lane);
    });
    if (end <= known.n_usable) return found;
    for (int i = 0; i < end; i++)
        for (int lane = 0; lane < int(n_lanes); lane++) {
            if (in_memory(i, lane) || i < first_seen(lane, end)) continue;
            HostUnit& unit  = found.units.emplace_back();
            unit.lane       = lane;
            unit.depth      = i;
            unit.serial     = serials[std::size_t(i)];
            unit.parent     = i == 0 ? 0 : serials[std::size_t(i) - 1];
            const auto here = block(std::size_t(i));
            if (lane == 0) unit.tokens.assign(here.begin(), here.end());
        }
    return found;
}

} // namespace quire
