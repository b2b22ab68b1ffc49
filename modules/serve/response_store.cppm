// quire.serve.response_store: responses that later requests continue or ask for, by their ids. **Owns** their texts, within a number of bytes; the
// oldest go first.
export module quire.serve.response_store;

import quire.core.base;

export namespace quire {

// Texts in JSON.
struct StoredResponse {
    std::string response; // the object
    std::string input;    // the list of items before its output, those of earlier responses as well
};

// Any thread. An owner is the API key of a request; an owner's responses are unknown to every other.
class ResponseStore {
public:
    // `most_bytes`: of all texts together; 0: nothing is stored.
    explicit ResponseStore(std::size_t most_bytes) : most_(most_bytes) {}

    bool on() const { return most_ > 0; }
    // A response of more than an eighth of the memory is not stored.
    void put(const std::string& owner, const std::string& id, StoredResponse response);
    // Null: there is none, or no longer.
    std::shared_ptr<const StoredResponse> find(const std::string& owner, const std::string& id) const;
    // False: there was none.
    bool erase(const std::string& owner, const std::string& id);

private:
    using Key = std::pair<std::string, std::string>; // owner and id
    struct Entry {
        Key                                   key;
        std::shared_ptr<const StoredResponse> response;
        std::size_t                           bytes = 0;
    };
    void drop(std::list<Entry>::iterator entry);

    const std::size_t                         most_;
    mutable std::mutex                        mutex_;   // guards what follows
    std::list<Entry>                          entries_; // the oldest first
    std::map<Key, std::list<Entry>::iterator> by_key_;
    std::size_t                               bytes_ = 0; // of the entries
};

} // namespace quire

module :private;

namespace quire {

void ResponseStore::put(const std::string& owner, const std::string& id, StoredResponse response) {
    constexpr std::size_t overhead = 512; // of an entry, about
    const std::size_t     bytes =
        response.response.size() + response.input.size() + 2 * (owner.size() + id.size()) + overhead;
    if (bytes > most_ / 8) return;
    auto                   shared = std::make_shared<const StoredResponse>(std::move(response));
    const std::scoped_lock lock(mutex_);
    const Key              key{owner, id};
    if (const auto at = by_key_.find(key); at != by_key_.end()) drop(at->second);
    while (bytes_ + bytes > most_) drop(entries_.begin());
    by_key_[key] = entries_.insert(entries_.end(), {key, std::move(shared), bytes});
    bytes_ += bytes;
}

std::shared_ptr<const StoredResponse> ResponseStore::find(const std::string& owner, const std::string& id) const {
    const std::scoped_lock lock(mutex_);
    const auto             at = by_key_.find({owner, id});
    return at == by_key_.end() ? nullptr : at->second->response;
}

bool ResponseStore::erase(const std::string& owner, const std::string& id) {
    const std::scoped_lock lock(mutex_);
    const auto             at = by_key_.find({owner, id});
    if (at == by_key_.end()) return false;
    drop(at->second);
    return true;
}

void ResponseStore::drop(std::list<Entry>::iterator entry) {
    bytes_ -= entry->bytes;
    by_key_.erase(entry->key);
    entries_.erase(entry);
}

} // namespace quire
