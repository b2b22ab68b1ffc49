// quire.serve.kv_events.log: which blocks the prefix cache has, as batches of vLLM's KV events in MessagePack: numbered, the last ones kept
// to be handed out again, or all blocks that there are as one batch. **Owns** them. No sockets.
//
//   batch   [seconds: float64, [event ...], 0]
//   event   {"type": "BlockStored", "block_hashes": [u64], "parent_block_hash": u64 | nil, "token_ids": [u32], "block_size": n,
//            "lora_id": nil, "medium": "GPU", "lora_name": nil}
//           {"type": "BlockRemoved", "block_hashes": [u64], "medium": "GPU"}
//           Of the layers of a cache group behind the first, both have its number as "group_idx" as well, the first "kv_cache_spec_kind":
//           "full_attention", or "sliding_window" where the layers have a window. A recurrent state, which stands at the end of its block, has
//           "group_idx" in any case, and the kind "mamba".
//           Of blocks in host memory "medium" is "CPU", of blocks in files "STORAGE".
//           {"type": "AllBlocksCleared"}
export module quire.serve.kv_events.log;

import quire.core.base;
import quire.core.json;
import quire.paging.block_hash;
import quire.paging.cache_layout;

export namespace quire {

struct KvBatch {
    std::int64_t number = 0;
    std::string  bytes;
};

// The place of a block, as events tell it beside the block's text.
struct KvPlace {
    int    group  = 0;
    int    window = 0; // as CacheChange says; every block of a group has one
    bool   state  = false;
    Medium medium = Medium::device;

    static constexpr std::size_t n = std::size_t(3) * most_cache_groups; // of numbers
    std::size_t                  number() const { return std::size_t(3) * std::size_t(group) + std::size_t(medium); }
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
        BlockHash                hash = 0;
        KvPlace                  place;
    };
    const KvBatch& keep(std::string bytes);

    int                                                                  block_size_;
    std::size_t                                                          keep_, keep_bytes_, bytes_ = 0;
    std::int64_t                                                         next_ = 0;
    std::deque<std::shared_ptr<const KvBatch>>                           batches_;
    mutable std::shared_ptr<const KvBatch>                               whole_; // see next(), and when it was made
    mutable double                                                       whole_at_ = 0;
    std::map<std::uint64_t, Stored>                                      blocks_; // in the order in which they came
    std::array<std::unordered_map<BlockHash, std::uint64_t>, KvPlace::n> order_;  // by place
    std::uint64_t                                                        last_order_ = 0;
};

} // namespace quire

module :private;

namespace quire {

Json cleared() { return {{"type", "AllBlocksCleared"}}; }

// vLLM's name.
const char* name_of(Medium medium) {
    return medium == Medium::device ? "GPU" : medium == Medium::host ? "CPU" : "STORAGE";
}

// The events of the first group name none: routers look for texts among these alone.
bool has_group(const KvPlace& place) { return place.group > 0 || place.state; }

// Blocks that follow one another, the tokens of all of them.
Json stored(std::span<const BlockHash> hashes, std::optional<BlockHash> parent, std::span<const Token> tokens,
            int block_size, const KvPlace& place) {
    Json event{{"type", "BlockStored"},
               {"block_hashes", hashes},
               {"parent_block_hash", parent ? Json(*parent) : Json()},
               {"token_ids", tokens},
               {"block_size", block_size},
               {"lora_id", nullptr},
               {"medium", name_of(place.medium)},
               {"lora_name", nullptr}};
    if (has_group(place)) {
        event["group_idx"]          = place.group;
        event["kv_cache_spec_kind"] = place.state ? "mamba" : place.window > 0 ? "sliding_window" : "full_attention";
    }
    return event;
}

Json removed(std::span<const BlockHash> hashes, const KvPlace& place) {
    Json event{{"type", "BlockRemoved"}, {"block_hashes", hashes}, {"medium", name_of(place.medium)}};
    if (has_group(place)) event["group_idx"] = place.group;
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
    // Changes that are one event: blocks of one chain, or several that go. The groups of a chain come by turns.
    struct Run {
        KvPlace                         place;
        std::vector<const CacheChange*> changes;
    };
    constexpr std::size_t               none = ~std::size_t(0);
    std::vector<Run>                    runs;
    std::array<std::size_t, KvPlace::n> open; // by place: the run that a change can join
    open.fill(none);
    for (std::size_t i = 0; i < changes.size(); i++) {
        const CacheChange& c = changes[i];
        const KvPlace      place{c.group, c.window, c.state, c.medium};
        auto&              order = order_[place.number()];
        if (const auto at = order.find(c.hash); at != order.end()) {
            blocks_.erase(at->second);
            order.erase(at);
        }
        if (c.stored) {
            order[c.hash]        = ++last_order_;
            blocks_[last_order_] = {c.parent, c.tokens, c.hash, place};
        }
        if (i > 0 && changes[i - 1].stored != c.stored) open.fill(none);
        std::size_t& at    = open[place.number()];
        const bool   joins = at != none && (!c.stored || (c.parent && *c.parent == runs[at].changes.back()->hash));
        if (!joins) {
            at = runs.size();
            runs.push_back({place, {}});
        }
        runs[at].changes.push_back(&c);
    }
    Json                   events = Json::array();
    std::vector<BlockHash> hashes;
    std::vector<Token>     tokens;
    for (const Run& run : runs) {
        hashes.clear();
        tokens.clear();
        for (const CacheChange* c : run.changes) {
            hashes.push_back(c->hash);
            tokens.insert(tokens.end(), c->tokens.begin(), c->tokens.end());
        }
        const CacheChange& first = *run.changes.front();
        events.push_back(first.stored ? stored(hashes, first.parent, tokens, block_size_, run.place)
                                      : removed(hashes, run.place));
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
        // A block that came back behind a window is younger than the blocks that continue it.
        std::unordered_set<std::uint64_t> told;
        std::vector<const Stored*>        chain;
        for (const auto& [order, block] : blocks_) {
            chain.clear();
            const auto& orders = order_[block.place.number()];
            for (std::uint64_t at = order; told.insert(at).second;) {
                const Stored& one = blocks_.at(at);
                chain.push_back(&one);
                const auto before = one.parent ? orders.find(*one.parent) : orders.end();
                if (before == orders.end()) break;
                at = before->second;
            }
            for (; !chain.empty(); chain.pop_back()) {
                const Stored& one = *chain.back();
                events.push_back(stored(std::span(&one.hash, 1), one.parent, one.tokens, block_size_, one.place));
            }
        }
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
