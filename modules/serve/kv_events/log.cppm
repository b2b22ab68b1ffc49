// quire.serve.kv_events.log: which blocks the prefix cache has, as batches of vLLM's KV events in MessagePack: numbered, the last ones kept
// to be handed out again, or all blocks that there are as one batch. **Owns** them. No sockets.
//
//   batch   [seconds: float64, [event ...], 0]
//   event   {"type": "BlockStored", "block_hashes": [u64], "parent_block_hash": u64 | nil, "token_ids": [u32], "block_size": n,
//            "lora_id": nil, "medium": "GPU", "lora_name": nil}
//           {"type": "BlockRemoved", "block_hashes": [u64], "medium": "GPU"}
//           {"type": "AllBlocksCleared"}
export module quire.serve.kv_events.log;

import quire.core.base;
import quire.core.std;
import quire.paging.block_hash;

export namespace quire {

struct KvBatch {
    std::int64_t number = 0;
    std::string  bytes;
};

// Kept to be handed out again, and waiting for one consumer, at most.
inline constexpr int most_kv_batches = 10'000;

class KvEventLog {
public:
    // keep: batches that can be handed out again, fewer if they have more bytes than keep_bytes. The first batch, number 0, says that
    // there are no blocks.
    KvEventLog(int block_size, double now, std::size_t keep = most_kv_batches,
               std::size_t keep_bytes = std::size_t(64) << 20);

    // The next batch.
    const KvBatch& add(std::span<const CacheChange> changes, double now);
    // For a consumer that lacks the batches from `first` on: batch `first`; or, if this batch is no longer kept, a batch that
    // clears everything and lists the blocks after a later batch, parents before children, with that batch's number. The list is made at
    // most once a second, whatever the number of consumers. Null: the consumer has all batches.
    std::shared_ptr<const KvBatch> next(std::int64_t first, double now) const;
    std::vector<KvBatch>           from(std::int64_t first, double now) const; // next() again and again

private:
    struct Stored {
        std::optional<BlockHash> parent;
        std::vector<Token>       tokens;
        BlockHash                hash = 0;
    };
    const KvBatch& keep(std::string bytes);

    int                                          block_size_;
    std::size_t                                  keep_, keep_bytes_, bytes_ = 0;
    std::int64_t                                 next_ = 0;
    std::deque<std::shared_ptr<const KvBatch>>   batches_;
    mutable std::shared_ptr<const KvBatch>       whole_; // see next(), and when it was made
    mutable double                               whole_at_ = 0;
    std::map<std::uint64_t, Stored>              blocks_; // in the order in which they came
    std::unordered_map<BlockHash, std::uint64_t> order_;
    std::uint64_t                                last_order_ = 0;
};

} // namespace quire

module :private;

namespace quire {

namespace {

// MessagePack: a type byte, then big-endian values; https://github.com/msgpack/msgpack/blob/master/spec.md
class Packer {
public:
    void nil() { byte(0xc0); }
    void number(std::uint64_t v) {
        if (v < 128) byte(int(v));
        else if (v <= 0xff) byte(0xcc), big_endian(v, 1);
        else if (v <= 0xffff) byte(0xcd), big_endian(v, 2);
        else if (v <= 0xffffffff) byte(0xce), big_endian(v, 4);
        else byte(0xcf), big_endian(v, 8);
    }
    void number(double v) {
        byte(0xcb);
        big_endian(std::bit_cast<std::uint64_t>(v), 8);
    }
    void text(std::string_view s) { // shorter than 32 bytes
        byte(0xa0 | int(s.size()));
        bytes_ += s;
    }
    void array(std::size_t n) {
        if (n < 16) byte(0x90 | int(n));
        else if (n <= 0xffff) byte(0xdc), big_endian(n, 2);
        else byte(0xdd), big_endian(n, 4);
    }
    void        map(std::size_t n) { byte(0x80 | int(n)); } // fewer than 16 pairs
    std::string take() { return std::move(bytes_); }

private:
    void byte(int b) { bytes_ += char(b); }
    void big_endian(std::uint64_t v, int n) {
        for (int i = n - 1; i >= 0; i--) byte(int(v >> (8 * i) & 255));
    }
    std::string bytes_;
};

void cleared(Packer& p) {
    p.map(1);
    p.text("type");
    p.text("AllBlocksCleared");
}

// Blocks that follow one another, the tokens of all of them.
void stored(Packer& p, std::span<const BlockHash> hashes, std::optional<BlockHash> parent,
            std::span<const Token> tokens, int block_size) {
    p.map(8);
    p.text("type");
    p.text("BlockStored");
    p.text("block_hashes");
    p.array(hashes.size());
    for (BlockHash hash : hashes) p.number(std::uint64_t(hash));
    p.text("parent_block_hash");
    if (parent) p.number(std::uint64_t(*parent));
    else p.nil();
    p.text("token_ids");
    p.array(tokens.size());
    for (Token token : tokens) p.number(std::uint64_t(token));
    p.text("block_size");
    p.number(std::uint64_t(block_size));
    p.text("lora_id");
    p.nil();
    p.text("medium");
    p.text("GPU");
    p.text("lora_name");
    p.nil();
}

void removed(Packer& p, std::span<const BlockHash> hashes) {
    p.map(3);
    p.text("type");
    p.text("BlockRemoved");
    p.text("block_hashes");
    p.array(hashes.size());
    for (BlockHash hash : hashes) p.number(std::uint64_t(hash));
    p.text("medium");
    p.text("GPU");
}

// The events between "[seconds, [" and "], 0]".
std::string batch(double now, std::size_t n_events, const std::function<void(Packer&)>& events) {
    Packer p;
    p.array(3);
    p.number(now);
    p.array(n_events);
    events(p);
    p.number(std::uint64_t(0));
    return p.take();
}

} // namespace

KvEventLog::KvEventLog(int block_size, double now, std::size_t keep_last, std::size_t keep_bytes)
    : block_size_(block_size), keep_(keep_last), keep_bytes_(keep_bytes) {
    (void)keep(batch(now, 1, cleared));
}

const KvBatch& KvEventLog::keep(std::string bytes) {
    bytes_ += bytes.size();
    batches_.push_back(std::make_shared<const KvBatch>(next_++, std::move(bytes)));
    while (batches_.size() > keep_ || (bytes_ > keep_bytes_ && batches_.size() > 1)) {
        bytes_ -= batches_.front()->bytes.size();
        batches_.pop_front();
    }
    return *batches_.back();
}

const KvBatch& KvEventLog::add(std::span<const CacheChange> changes, double now) {
    // Neighbours that are one event: blocks of one chain, or several that go.
    struct Run {
        std::size_t first, n;
    };
    std::vector<Run> runs;
    for (std::size_t i = 0; i < changes.size(); i++) {
        const CacheChange& c = changes[i];
        if (c.stored) {
            order_[c.hash]       = ++last_order_;
            blocks_[last_order_] = {c.parent, c.tokens, c.hash};
        } else if (const auto at = order_.find(c.hash); at != order_.end()) {
            blocks_.erase(at->second);
            order_.erase(at);
        }
        const bool joins =
            i > 0 && changes[i - 1].stored == c.stored && (!c.stored || (c.parent && *c.parent == changes[i - 1].hash));
        if (joins) runs.back().n++;
        else runs.push_back({i, 1});
    }
    return keep(batch(now, runs.size(), [&](Packer& p) {
        std::vector<BlockHash> hashes;
        std::vector<Token>     tokens;
        for (const Run& run : runs) {
            hashes.clear();
            tokens.clear();
            for (const CacheChange& c : changes.subspan(run.first, run.n)) {
                hashes.push_back(c.hash);
                tokens.insert(tokens.end(), c.tokens.begin(), c.tokens.end());
            }
            if (changes[run.first].stored) stored(p, hashes, changes[run.first].parent, tokens, block_size_);
            else removed(p, hashes);
        }
    }));
}

std::shared_ptr<const KvBatch> KvEventLog::next(std::int64_t first, double now) const {
    if (first >= next_) return {};
    const std::int64_t kept = batches_.front()->number;
    if (first >= kept) return batches_[std::size_t(first - kept)];
    // The batches after whole_ must be kept, so that the consumer can go on.
    if (!whole_ || whole_->number + 1 < kept || now - whole_at_ >= 1) {
        whole_at_ = now;
        whole_    = std::make_shared<const KvBatch>(next_ - 1, batch(now, 1 + blocks_.size(), [&](Packer& p) {
                                                     cleared(p);
                                                     for (const auto& [order, block] : blocks_)
                                                         stored(p, std::span(&block.hash, 1), block.parent,
                                                                   block.tokens, block_size_);
                                                 }));
    }
    return whole_;
}

std::vector<KvBatch> KvEventLog::from(std::int64_t first, double now) const {
    std::vector<KvBatch> out;
    while (const auto one = next(first, now)) {
        first = one->number + 1;
        out.push_back(*one);
    }
    return out;
}

} // namespace quire
