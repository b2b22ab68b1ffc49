// quire.engine.files.segment_store: units of the prefix cache in files, so that they outlive the process. **Owns** the files and the index of
// what is in them. One thread uses a store.
//
// The files (segments) only grow, and are numbered. A segment is a head, then records one behind the other:
//
//   segment   magic, model, tokens of a block, whether there is a key, checksum                  32 bytes, little-endian
//   record    magic, lane, name, parent's name, namespace, model, sizes, seals, checksums       160 bytes
//             the tokens of the block; the payload: the bytes of the unit's blocks. Both are encrypted where there is a key
//
// Whatever ends the process, at any write, leaves whole records and at most one torn one behind them. A record is found only when the
// checksum of its head and tokens is right, and its payload is given out only when that is right too.
//
// A text has a name that no other text of any directory has: a random number of the store that wrote it first, and the serial that it had
// there. A record says its own name and that of the text before its tokens. So the chain of tokens is compared from the beginning of a prompt
// on, whatever hashes collide, and wherever the segments of a directory come from. In memory a text is known by a serial of this store.
export module quire.engine.files.segment_store;

import quire.core.base;
import quire.core.hash;
import quire.core.std;
import quire.core.thread_pool;
export import quire.engine.files.cipher;
export import quire.engine.files.segment_files;
import quire.paging.block_hash;

export namespace quire {

struct SegmentOptions {
    std::uint64_t bytes = 0; // of all segments; the oldest goes when a record has no room
    // Fingerprint of all that a unit's bytes depend on: weights, layout, types, numerics. Segments of another model, or of another key, are
    // left alone, and count.
    std::uint64_t         model      = 0;
    int                   block_size = 16; // tokens of a record
    std::optional<Cipher> cipher     = {}; // none: tokens and payloads can be read by every user who can read the files
    int                   threads    = 1;  // of read()
};

// A unit to be read into memory of its size.
struct UnitRead {
    std::uint64_t                     serial = 0;
    int                               lane   = 0;
    std::vector<std::span<std::byte>> memory;
    bool                              whole = false; // it was there, and is right
};

struct SegmentStats {
    std::uint64_t written = 0, read = 0; // records
    std::uint64_t damaged = 0; // records, or ends of segments, that were dropped because their checksum was wrong
    std::uint64_t refused = 0, segments_gone = 0; // records that a full disk did not take; segments given up for others
    std::uint64_t kept = 0;                       // records of such segments that were written once more
};

// The segments and records that a store found when it was opened.
struct SegmentsFound {
    std::uint64_t bytes   = 0; // of all segments that are still there
    std::size_t   records = 0; // that can be used
    int           other   = 0; // segments of another model, other settings or another key
    int           damaged = 0; // ends of segments that are not whole
    int           old     = 0; // segments of an earlier format, which were deleted
    int           open    = 0; // segments without encryption, which were deleted because there is a key
    int           foreign = 0; // files of other users, or that they can write: they are left alone
};

// A text of the shared namespace whose last block the first lane has from now on, or no longer.
struct TextChange {
    bool               stored = false;
    std::uint64_t      serial = 0, parent = 0;
    std::vector<Token> tokens = {}; // stored: of the block
};

// find() and has() may be called by any thread, the rest by one.
class SegmentStore {
public:
    using Key = std::pair<std::uint64_t, int>; // of a record: the serial of its text, and its lane

    // Reads the heads of all records.
    SegmentStore(SegmentOptions options, std::unique_ptr<SegmentFiles> files);
    SegmentStore(const SegmentStore&)            = delete;
    SegmentStore& operator=(const SegmentStore&) = delete;
    ~SegmentStore();

    // Greater than the serial of any text that the files have: the first one for a new text.
    std::uint64_t        first_serial() const { return names_.size(); }
    const SegmentsFound& found() const { return found_; }
    // The serial of the text that continues text `parent` (0: nothing) with these tokens, as far as the first lane has it; 0: none.
    std::uint64_t find(const CacheNamespace& space, std::uint64_t parent, std::span<const Token> tokens) const;
    bool          has(std::uint64_t serial, int lane) const;
    // The unit of a lane; tokens [block_size] for the first lane, none for others. A text that is there under another serial, because it was
    // computed again, is known by that one from now on. False: the unit is there already, or the disk is full.
    bool append(const CacheNamespace& space, std::uint64_t serial, std::uint64_t parent, int lane,
                std::span<const Token> tokens, Pieces payload);
    // Does a part of the work for which append() might have to give up the oldest segment, so that a reader does not wait for all of it. False:
    // there is more to do.
    bool make_room(const CacheNamespace& space, std::uint64_t serial, std::uint64_t parent, int lane,
                   std::span<const Token> tokens, Pieces payload);
    // A damaged record is forgotten.
    void read(std::span<UnitRead> units);

    std::uint64_t       bytes() const { return bytes_; } // of all segments
    std::size_t         n_records() const { return records_.size(); }
    const SegmentStats& stats() const { return stats_; }
    // Since the last call; at first what the files had, parents before children.
    std::vector<TextChange> take_changes() { return std::exchange(changes_, {}); }
    // The records of all namespaces that are there no longer, since the last call, under each serial of their texts.
    std::vector<Key> take_gone();

private:
    struct Name { // of a text, in every directory; zeros: of the text without tokens
        std::uint64_t store = 0, serial = 0;
        auto          operator<=>(const Name&) const = default;
    };
    using Serials = std::map<Name, std::uint64_t>;
    struct Place {
        std::uint64_t segment = 0, at = 0; // where the record begins
        std::uint64_t bytes     = 0;       // of the record
        std::uint64_t child_key = 0;       // of the first lane, in children_
        bool          used      = false;   // read since it was written
    };
    struct Segment {
        std::uint64_t    bytes = 0;
        std::vector<Key> records;
    };
    struct Child {
        CacheNamespace     space;
        std::uint64_t      parent = 0, serial = 0;
        std::vector<Token> tokens;
    };
    struct RecordHead;
    struct Drop { // of the oldest segment: the records from `next` on are still to be written once more, or forgotten
        std::uint64_t    segment = 0, left = 0; // left: bytes that may be written
        std::vector<Key> records;
        std::size_t      next = 0;
    };

    std::uint64_t find_child(const CacheNamespace& space, std::uint64_t parent, std::span<const Token> tokens) const;
    bool has_record(std::uint64_t serial, int lane) const { return records_.contains({known_as(serial), lane}); }
    bool wants(const CacheNamespace& space, std::uint64_t serial, std::uint64_t parent, int lane,
               std::span<const Token> tokens);
    std::uint64_t known_as(std::uint64_t serial) const {
        const auto at = aliases_.find(serial);
        return at == aliases_.end() ? serial : at->second;
    }
    Name name_of(std::uint64_t serial) const { return serial < names_.size() ? names_[serial] : Name{store_, serial}; }
    std::uint64_t             serial_of(const Name& name, Serials& serials);
    std::uint64_t             reserve() const { return o_.bytes / 16; } // for what drop_oldest() writes again
    std::optional<RecordHead> read_head(std::uint64_t segment, std::uint64_t at, std::vector<Token>& tokens) const;
    bool                      drop_unusable(std::uint64_t segment);
    void                      scan(std::uint64_t segment, Serials& serials);
    void                      sort_changes();
    bool                      begin_segment();
    bool                      fetch(const Key& key, const Place& place, Pieces payload) const;
    std::optional<Place>      write(RecordHead& head, std::span<std::byte> tokens, Pieces payload);
    Drop                      begin_drop();
    bool                      drop_oldest(std::uint64_t most_bytes);
    bool                      make_room(std::uint64_t bytes, std::uint64_t most_bytes);
    bool                      keep(const Key& key, Place& place);
    void                      forget(const Key& key);
    void                      enter(Child child, int lane, const Place& place);

    SegmentOptions                   o_;
    std::unique_ptr<SegmentFiles>    files_;
    std::uint64_t                    store_; // this one's part of the names of new texts
    std::vector<Name>                names_; // of the texts in the files when the store was opened, by serial
    SegmentsFound                    found_;
    std::uint64_t                    growing_ = 0, bytes_ = 0;
    bool                             grows_ = false; // the segment growing_ is this store's
    std::map<std::uint64_t, Segment> segments_;      // by number, the oldest first
    std::optional<Drop>              drop_;          // that is not complete
    mutable std::shared_mutex        index_;         // of which keys records_, aliases_ and children_ have
    std::map<Key, Place>             records_;
    std::unordered_map<std::uint64_t, std::uint64_t> aliases_; // of texts that were computed again: the first serial
    std::unordered_map<std::uint64_t, std::vector<Child>> children_;   // by a hash of parent and tokens
    std::unordered_map<std::uint64_t, int>                n_children_; // by serial
    SegmentStats                                          stats_;
    std::vector<TextChange>                               changes_;
    std::vector<Key>                                      gone_;
    std::vector<std::byte>                                buffer_;
    ThreadPool                                            readers_;
};

} // namespace quire

module :private;

namespace quire {

constexpr std::uint64_t segment_magic     = 0x32304745534b51ull; // "QKSEG02"
constexpr std::uint64_t old_segment_magic = 0x31304745534b51ull; // "QKSEG01"
constexpr std::uint32_t record_magic      = 0x32524b51;          // "QKR2"
constexpr std::uint64_t most_segment      = 1 << 22;             // a greater number is not ours
constexpr std::uint64_t cached_bytes      = 1 << 18;             // read at once, less than a core's L2
constexpr std::uint64_t whole             = ~std::uint64_t(0);   // without a limit
constexpr std::uint64_t slice_bytes       = 1 << 24;             // written once more at a time

struct SegmentHead {
    std::uint64_t magic = segment_magic, model = 0;
    std::uint32_t block_size = 0, encrypted = 0;
    std::uint64_t checksum = 0;
};

struct SegmentStore::RecordHead {
    std::uint32_t  magic = record_magic, lane = 0;
    Name           name, parent;
    CacheNamespace space;
    std::uint64_t  model    = 0;
    std::uint32_t  n_tokens = 0, unused = 0;
    std::uint64_t  payload_bytes = 0;
    Seal           tokens_seal{}, payload_seal{}; // where there is a key
    std::uint64_t  payload_checksum = 0;          // where there is none
    std::uint64_t  segment          = 0;          // a record that was copied elsewhere is not this one
    std::uint64_t  checksum         = 0;          // of the above and the tokens, as they are in the file

    std::uint64_t              before_payload() const { return sizeof *this + n_tokens * sizeof(Token); }
    std::span<const std::byte> sealed() const { return std::as_bytes(std::span(this, 1)).first(80); } // by both seals
};
static_assert(sizeof(SegmentHead) == 32 && std::endian::native == std::endian::little);

std::uint64_t checksum_of(std::uint64_t seed, Pieces pieces) {
    for (std::span<const std::byte> piece : pieces) seed = hash_bytes(piece.data(), piece.size(), seed);
    return seed;
}

template <class Name>
std::uint64_t checksum_of_payload(const Name& name, Pieces payload) {
    return checksum_of(hash_bytes(&name, sizeof name), payload);
}

// Of a head, whose last eight bytes it is; and of what follows.
template <class Head>
std::uint64_t checksum_of(Head& head, std::span<std::byte> behind = {}) {
    return checksum_of(0, std::array{piece_of(head).first(sizeof head - 8), behind});
}

std::uint64_t key_of(const CacheNamespace& space, std::uint64_t parent, std::span<const Token> tokens) {
    return hash_bytes(tokens.data(), tokens.size_bytes(), parent ^ space.low);
}

std::uint64_t random_number() {
    std::random_device random;
    return (std::uint64_t(random()) << 32) | random();
}

SegmentStore::SegmentStore(SegmentOptions options, std::unique_ptr<SegmentFiles> files)
    : o_(std::move(options)), files_(std::move(files)), store_(random_number()), names_(1), readers_(o_.threads) {
    if (o_.cipher) o_.model = o_.cipher->name_of("model", cat(o_.model))[0];
    Serials serials{{Name{}, 0}};
    for (const auto [number, bytes] : files_->sizes()) {
        if (number > most_segment) continue;
        growing_ = number;
        if (drop_unusable(number)) continue;
        segments_[number].bytes = bytes;
        bytes_ += bytes;
        scan(number, serials);
    }
    sort_changes();
    while (bytes_ > o_.bytes && !segments_.empty()) drop_oldest(whole);
    found_.bytes   = bytes_;
    found_.records = records_.size();
    found_.damaged = int(stats_.damaged);
    found_.foreign = files_->n_foreign();
}

SegmentStore::~SegmentStore() = default;

// A record whose head and tokens are whole.
std::optional<SegmentStore::RecordHead> SegmentStore::read_head(std::uint64_t segment, std::uint64_t at,
                                                                std::vector<Token>& tokens) const {
    RecordHead head;
    static_assert(sizeof head == 160);
    if (!files_->read(segment, at, std::array{piece_of(head)}) || head.magic != record_magic ||
        head.segment != segment || head.model != o_.model ||
        (head.n_tokens != 0 && head.n_tokens != std::uint32_t(o_.block_size)))
        return std::nullopt;
    tokens.resize(head.n_tokens);
    const std::span<std::byte> bytes = piece_of(std::span(tokens));
    if (!files_->read(segment, at + sizeof head, std::array{bytes}) || head.checksum != checksum_of(head, bytes) ||
        (o_.cipher && !o_.cipher->open(head.tokens_seal, head.sealed(), std::array{bytes})))
        return std::nullopt;
    return head;
}

// The serial of a text in the files; a new one, if it was not named before.
std::uint64_t SegmentStore::serial_of(const Name& name, Serials& serials) {
    const auto [at, added] = serials.try_emplace(name, names_.size());
    if (added) names_.push_back(name);
    return at->second;
}

// Deletes a segment that no process will read any more: one of an earlier format, or one that all can read where there is a key.
bool SegmentStore::drop_unusable(std::uint64_t segment) {
    SegmentHead head;
    if (!files_->read(segment, 0, std::array{piece_of(head)})) return false;
    const bool old  = head.magic == old_segment_magic,
               open = head.magic == segment_magic && !head.encrypted && o_.cipher;
    if (old || open) files_->remove(segment);
    found_.old += old;
    found_.open += open;
    return old || open;
}

// Enters the records of a segment, up to the first one that is not whole.
void SegmentStore::scan(std::uint64_t segment, Serials& serials) {
    const std::uint64_t size = segments_[segment].bytes;
    SegmentHead         first;
    const bool          whole = files_->read(segment, 0, std::array{piece_of(first)}) && first.magic == segment_magic &&
                       first.checksum == checksum_of(first);
    const bool ours = whole && first.model == o_.model && first.block_size == std::uint32_t(o_.block_size) &&
                      bool(first.encrypted) == o_.cipher.has_value();
    if (whole && !ours) found_.other++;
    if (!whole) stats_.damaged++;
    for (std::uint64_t at = sizeof first; ours && at < size;) {
        std::vector<Token> tokens;
        const auto         head = read_head(segment, at, tokens);
        if (!head || head->name == Name{} || head->payload_bytes > size - std::min(size, at + head->before_payload())) {
            stats_.damaged++;
            return;
        }
        const std::uint64_t bytes  = head->before_payload() + head->payload_bytes;
        const std::uint64_t parent = serial_of(head->parent, serials), serial = serial_of(head->name, serials);
        if (!has_record(serial, int(head->lane)))
            enter({head->space, parent, serial, std::move(tokens)}, int(head->lane), {segment, at, bytes});
        at += bytes;
    }
}

// Puts parents before children, because a record that was written once more is behind records that continue it. Texts whose parent is in no
// file, which no prompt leads to, are left out.
void SegmentStore::sort_changes() {
    std::unordered_map<std::uint64_t, std::vector<TextChange>> by_parent;
    for (TextChange& change : changes_) by_parent[change.parent].push_back(std::move(change));
    changes_.clear();
    const auto add = [&](std::uint64_t parent) {
        const auto at = by_parent.find(parent);
        if (at == by_parent.end()) return;
        for (TextChange& change : at->second) changes_.push_back(std::move(change));
        by_parent.erase(at);
    };
    add(0);
    for (std::size_t i = 0; i < changes_.size(); i++) add(changes_[i].serial);
}

void SegmentStore::enter(Child child, int lane, const Place& place) {
    const std::unique_lock lock(index_);
    const Key              key{child.serial, lane};
    Place&                 to = records_[key] = place;
    to.child_key                              = key_of(child.space, child.parent, child.tokens);
    segments_[place.segment].records.push_back(key);
    if (lane > 0) return;
    n_children_[child.parent]++;
    if (child.space == CacheNamespace{}) changes_.push_back({true, child.serial, child.parent, child.tokens});
    children_[to.child_key].push_back(std::move(child));
}

std::uint64_t SegmentStore::find(const CacheNamespace& space, std::uint64_t parent,
                                 std::span<const Token> tokens) const {
    const std::shared_lock lock(index_);
    return find_child(space, parent, tokens);
}

bool SegmentStore::has(std::uint64_t serial, int lane) const {
    const std::shared_lock lock(index_);
    return has_record(serial, lane);
}

std::uint64_t SegmentStore::find_child(const CacheNamespace& space, std::uint64_t parent,
                                       std::span<const Token> tokens) const {
    parent        = known_as(parent);
    const auto at = children_.find(key_of(space, parent, tokens));
    if (at == children_.end()) return 0;
    for (const Child& child : at->second)
        if (child.parent == parent && child.space == space && std::ranges::equal(child.tokens, tokens))
            return child.serial;
    return 0;
}

void SegmentStore::forget(const Key& key) {
    const auto at = records_.find(key);
    if (at == records_.end()) return;
    gone_.push_back(key);
    const std::unique_lock lock(index_);
    if (key.second == 0) {
        const auto children = children_.find(at->second.child_key);
        const auto own      = std::ranges::find(children->second, key.first, &Child::serial);
        const auto count    = n_children_.find(own->parent);
        if (--count->second == 0) n_children_.erase(count);
        if (own->space == CacheNamespace{}) changes_.push_back({false, key.first});
        children->second.erase(own);
        if (children->second.empty()) children_.erase(children);
    }
    records_.erase(at);
}

std::vector<SegmentStore::Key> SegmentStore::take_gone() {
    std::vector<Key> gone = std::exchange(gone_, {});
    if (gone.empty()) return gone;
    std::ranges::sort(gone);
    std::vector<Key> all = gone;
    for (const auto& [serial, first] : aliases_)
        for (auto at = std::ranges::lower_bound(gone, Key{first, 0}); at != gone.end() && at->first == first; ++at)
            all.emplace_back(serial, at->second);
    return all;
}

// Begins to give up the oldest segment: forgets its records that lead to no others and were not read. The others are written once more, the
// first ones first, as far as they have no more than half of its bytes: the beginning that many prompts share is rarely read, because it
// stays in memory, but all texts behind it are reached through it only.
SegmentStore::Drop SegmentStore::begin_drop() {
    const auto& [oldest, segment] = *segments_.begin();
    Drop drop{oldest, oldest == growing_ ? 0 : std::min(segment.bytes / 2, reserve()), segment.records};
    for (const Key& key : std::views::reverse(drop.records)) { // a child before its parent
        const auto at = records_.find(key);
        if (at == records_.end() || at->second.segment != oldest || at->second.used) continue;
        if (key.second > 0 || !n_children_.contains(key.first)) forget(key);
    }
    return drop;
}

// Goes on giving up the oldest segment, and deletes it. Writes about `most_bytes` at most. False: there is more to do.
bool SegmentStore::drop_oldest(std::uint64_t most_bytes) {
    if (!drop_) drop_ = begin_drop();
    for (std::uint64_t written = 0; drop_->next < drop_->records.size(); drop_->next++) {
        const Key& key = drop_->records[drop_->next];
        const auto at  = records_.find(key);
        if (at == records_.end() || at->second.segment != drop_->segment) continue;
        if (written >= most_bytes) return false;
        const std::uint64_t bytes = at->second.bytes;
        if (bytes <= drop_->left && keep(key, at->second)) drop_->left -= bytes, written += bytes;
        else forget(key);
    }
    files_->remove(drop_->segment);
    bytes_ -= segments_.at(drop_->segment).bytes;
    if (drop_->segment == growing_) grows_ = false;
    segments_.erase(drop_->segment);
    stats_.segments_gone++;
    drop_.reset();
    return true;
}

// As make_room(), for a record of so many bytes.
bool SegmentStore::make_room(std::uint64_t bytes, std::uint64_t most_bytes) {
    const auto is_full = [&] { return bytes_ + bytes > o_.bytes - reserve() && !segments_.empty(); };
    if (bytes > o_.bytes - reserve() || !is_full()) return true;
    return drop_oldest(most_bytes) && !is_full();
}

// Writes a record again, as it is.
bool SegmentStore::keep(const Key& key, Place& place) {
    RecordHead head;
    buffer_.resize(place.bytes - sizeof head);
    if (!files_->read(place.segment, place.at, std::array{piece_of(head), std::span(buffer_)})) return false;
    const std::size_t n_tokens = std::min(buffer_.size(), head.n_tokens * sizeof(Token));
    const auto        tokens = std::span(buffer_).first(n_tokens), payload = std::span(buffer_).subspan(n_tokens);
    if (head.checksum != checksum_of(head, tokens)) return false;
    auto to = write(head, tokens, std::array{payload});
    if (!to) return false;
    to->child_key = place.child_key;
    place         = *to;
    segments_[place.segment].records.push_back(key);
    stats_.kept++;
    return true;
}

bool SegmentStore::begin_segment() {
    int tries = found_.foreign + 1; // their numbers are taken
    do grows_ = growing_ < most_segment && files_->create(++growing_);
    while (!grows_ && --tries > 0);
    if (!grows_) return false;
    SegmentHead head{.model = o_.model, .block_size = std::uint32_t(o_.block_size), .encrypted = o_.cipher.has_value()};
    head.checksum = checksum_of(head);
    if (!files_->append(growing_, std::array{piece_of(head)})) {
        files_->remove(growing_--); // numbers are not used up while the disk is full
        return grows_ = false;
    }
    segments_[growing_].bytes = sizeof head;
    bytes_ += sizeof head;
    return true;
}

// To the segment that grows. An eighth of the bytes to a segment, so that little goes with the oldest one.
std::optional<SegmentStore::Place> SegmentStore::write(RecordHead& head, std::span<std::byte> tokens, Pieces payload) {
    const std::uint64_t bytes = head.before_payload() + head.payload_bytes;
    const bool          full  = !grows_ || segments_.at(growing_).bytes + bytes > o_.bytes / 8;
    if (full && !begin_segment()) {
        stats_.refused++;
        return std::nullopt;
    }
    Segment& to   = segments_.at(growing_);
    head.segment  = growing_;
    head.checksum = checksum_of(head, tokens);
    if (!files_->append(growing_, std::array{piece_of(head), tokens}) || !files_->append(growing_, payload)) {
        stats_.refused++;
        grows_ = files_->cut(growing_, to.bytes); // else the next record begins another segment
        return std::nullopt;
    }
    const Place place{growing_, to.bytes, bytes};
    to.bytes += bytes;
    bytes_ += bytes;
    return place;
}

// Whether a unit is not there yet.
bool SegmentStore::wants(const CacheNamespace& space, std::uint64_t serial, std::uint64_t parent, int lane,
                         std::span<const Token> tokens) {
    if (lane == 0 && !has_record(serial, 0)) {
        const std::uint64_t    first = find_child(space, parent, tokens);
        const std::unique_lock lock(index_);
        if (aliases_.size() > 4 * records_.size() + 65536) aliases_.clear(); // costs records of texts that are there
        if (first != 0) aliases_[serial] = first;
    }
    return !has_record(serial, lane);
}

bool SegmentStore::make_room(const CacheNamespace& space, std::uint64_t serial, std::uint64_t parent, int lane,
                             std::span<const Token> tokens, Pieces payload) {
    const std::uint64_t bytes = sizeof(SegmentHead) + sizeof(RecordHead) + tokens.size_bytes() + size_of(payload);
    return !wants(space, serial, parent, lane, tokens) || make_room(bytes, slice_bytes);
}

bool SegmentStore::append(const CacheNamespace& space, std::uint64_t serial, std::uint64_t parent, int lane,
                          std::span<const Token> tokens, Pieces payload) {
    check(serial > 0 && (lane > 0 || int(tokens.size()) == o_.block_size), "a record without its text");
    if (!wants(space, serial, parent, lane, tokens)) return false;
    parent = known_as(parent);
    RecordHead head{
        .lane = std::uint32_t(lane), .name = name_of(known_as(serial)), .parent = name_of(parent), .space = space};
    head.model                = o_.model;
    head.n_tokens             = std::uint32_t(tokens.size());
    head.payload_bytes        = size_of(payload);
    const std::uint64_t bytes = head.before_payload() + head.payload_bytes + sizeof(SegmentHead);
    if (bytes > o_.bytes - reserve()) return false;
    while (!make_room(bytes, whole)) {}

    std::vector<Token>         own(tokens.begin(), tokens.end());
    const std::span<std::byte> text = piece_of(std::span(own));
    std::span<std::byte>       hidden;
    if (o_.cipher) {
        buffer_.resize(head.payload_bytes);
        hidden            = std::span(buffer_);
        head.tokens_seal  = o_.cipher->seal(head.sealed(), std::array{text}, text);
        head.payload_seal = o_.cipher->seal(head.sealed(), payload, hidden);
    } else {
        head.payload_checksum = checksum_of_payload(head.name, payload);
    }
    const auto place = write(head, text, o_.cipher ? Pieces(std::span(&hidden, 1)) : payload);
    if (!place) return false;
    stats_.written++;
    enter({space, parent, known_as(serial), {tokens.begin(), tokens.end()}}, lane, *place);
    return true;
}

bool SegmentStore::fetch(const Key& key, const Place& place, Pieces payload) const {
    std::vector<Token> tokens;
    const auto         head = read_head(place.segment, place.at, tokens);
    if (!head || head->name != name_of(key.first) || head->lane != std::uint32_t(key.second) ||
        head->payload_bytes != size_of(payload))
        return false;
    std::uint64_t at = place.at + head->before_payload();
    if (o_.cipher)
        return files_->read(place.segment, at, payload) && o_.cipher->open(head->payload_seal, head->sealed(), payload);
    std::uint64_t checksum = checksum_of_payload(head->name, {});
    for (std::size_t i = 0, n = 0; i < payload.size(); i += n) {
        std::uint64_t bytes = 0; // of the next pieces, which are summed while the processor's cache has them
        for (n = 0; i + n < payload.size() && (n == 0 || bytes + payload[i + n].size() <= cached_bytes); n++)
            bytes += payload[i + n].size();
        const Pieces some = payload.subspan(i, n);
        if (!files_->read(place.segment, at, some)) return false;
        checksum = checksum_of(checksum, some);
        at += bytes;
    }
    return head->payload_checksum == checksum;
}

void SegmentStore::read(std::span<UnitRead> units) {
    const auto key_of_unit = [&](const UnitRead& unit) { return Key{known_as(unit.serial), unit.lane}; };
    readers_.run(int(units.size()), [&](int i, int) { // they change nothing but the unit
        UnitRead&  unit = units[std::size_t(i)];
        const auto at   = records_.find(key_of_unit(unit));
        unit.whole      = at != records_.end() && fetch(at->first, at->second, unit.memory);
    });
    for (const UnitRead& unit : units) {
        const auto at = records_.find(key_of_unit(unit));
        if (at == records_.end()) continue;
        (unit.whole ? stats_.read : stats_.damaged)++;
        at->second.used = true;
        if (!unit.whole) forget(at->first);
    }
}

} // namespace quire
