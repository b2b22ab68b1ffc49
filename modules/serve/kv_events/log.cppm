// quire.serve.kv_events.log: which blocks the prefix cache has, as batches of vLLM's KV events in MessagePack: numbered, the last ones kept
// to be handed out again, or all blocks that there are as one batch. **Owns** them. No sockets.
//
//   batch   [seconds: float64, [event ...], 0]
//   event   {"type": "BlockStored", "block_hashes": [u64], "parent_block_hash": u64 | nil, "token_ids": [u32], "block_size": n,
//            "lora_id": nil, "medium": "GPU", "lora_name": nil}
//           {"type": "BlockRemoved", "block_hashes": [u64], "medium": "GPU"}
//           Of a recurrent state, which stands at the end of its block, both have "group_idx": 1 as well, the first "kv_cache_spec_kind": "mamba".
//           Of blocks in host memory "medium" is "CPU", of blocks in files "STORAGE".
//           {"type": "AllBlocksCleared"}
export module quire.serve.kv_events.log;

import quire.core.base;
import quire.core.json;
import quire.paging.block_hash;

export namespace quire {

struct KvBatch {
    std::int64_t number = 0;
    std::string  bytes;
};

// The most batches that are kept for consumers, and that wait for one consumer.
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
        BlockHash                hash   = 0;
        bool                     state  = false;
        Medium                   medium = Medium::device;
    };
    const KvBatch& keep(std::string bytes);

    int                                                         block_size_;
    std::size_t                                                 keep_, keep_bytes_, bytes_ = 0;
    std::int64_t                                                next_ = 0;
    std::deque<std::shared_ptr<const KvBatch>>                  batches_;
    mutable std::shared_ptr<const KvBatch>                      whole_; // see next(), and when it was made
    mutable double                                              whole_at_ = 0;
    std::map<std::uint64_t, Stored>                             blocks_; // in the order in which they came
    std::array<std::unordered_map<BlockHash, std::uint64_t>, 6> order_;  // of blocks and of states, by medium
    std::uint64_t                                               last_order_ = 0;
};

} // namespace quire

module :private;

namespace quire {

Json cleared() { return {{"type", "AllBlocksCleared"}}; }

// vLLM's name.
const char* name_of(Medium medium) {
    return medium == Medium::device ? "GPU" : medium == Medium::host ? "CPU" : "STORAGE";
}

// Blocks that follow one another, the tokens of all of them.
Json stored(std::span<const BlockHash> hashes, std::optional<BlockHash> parent, std::span<const Token> tokens,
            int block_size, bool state, Medium medium) {
    Json event{
        {"type", "BlockStored"},     {"block_hashes", hashes},   {"parent_block_hash", parent ? Json(*parent) : Json()},
        {"token_ids", tokens},       {"block_size", block_size}, {"lora_id", nullptr},
        {"medium", name_of(medium)}, {"lora_name", nullptr}};
    if (state) event["group_idx"] = 1, event["kv_cache_spec_kind"] = "mamba";
    return event;
}

Json removed(std::span<const BlockHash> hashes, bool state, Medium medium) {
    Json event{{"type", "BlockRemoved"}, {"block_hashes", hashes}, {"medium", name_of(medium)}};
    if (state) event["group_idx"] = 1;
    return event;
}

std::string batch(double now, Json events) { return json_msgpack(Json::array({now, std::move(events), 0})); }

KvEventLog::KvEventLog(int block_size, double now, std::size_t keep_last, std::size_t keep_bytes)
    : block_size_(block_size), keep_(keep_last), keep_bytes_(keep_bytes) {
    (void)keep(batch(now, Json::array({cleared()})));
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
        const CacheChange& c     = changes[i];
        auto&              order = order_[2 * std::size_t(c.medium) + c.state];
        if (c.stored) {
            order[c.hash]        = ++last_order_;
            blocks_[last_order_] = {c.parent, c.tokens, c.hash, c.state, c.medium};
        } else if (const auto at = order.find(c.hash); at != order.end()) {
            blocks_.erase(at->second);
            order.erase(at);
        }
        const bool joins = i > 0 && changes[i - 1].stored == c.stored && changes[i - 1].state == c.state &&
                           changes[i - 1].medium == c.medium &&
                           (!c.stored || (c.parent && *c.parent == changes[i - 1].hash));
        if (joins) runs.back().n++;
        else runs.push_back({i, 1});
    }
    Json                   events = Json::array();
    std::vector<BlockHash> hashes;
    std::vector<Token>     tokens;
    for (const Run& run : runs) {
        hashes.clear();
        tokens.clear();
        for (const CacheChange& c : changes.subspan(run.first, run.n)) {
            hashes.push_back(c.hash);
            tokens.insert(tokens.end(), c.tokens.begin(), c.tokens.end());
        }
        const CacheChange& first = changes[run.first];
        events.push_back(first.stored ? stored(hashes, first.parent, tokens, block_size_, first.state, first.medium)
                                      : removed(hashes, first.state, first.medium));
    }
    return keep(batch(now, std::move(events)));
}

std::shared_ptr<const KvBatch> KvEventLog::next(std::int64_t first, double now) const {
    if (first >= next_) return {};
    const std::int64_t kept = batches_.front()->number;
    if (first >= kept) return batches_[std::size_t(first - kept)];
    // The batches after whole_ must be kept, so that the consumer can go on.
    if (!whole_ || whole_->number + 1 < kept || now - whole_at_ >= 1) {
        Json events = Json::array({cleared()});
        for (const auto& [order, block] : blocks_)
            events.push_back(
                stored(std::span(&block.hash, 1), block.parent, block.tokens, block_size_, block.state, block.medium));
        whole_at_ = now;
        whole_    = std::make_shared<const KvBatch>(next_ - 1, batch(now, std::move(events)));
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
