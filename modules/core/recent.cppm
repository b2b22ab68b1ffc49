// quire.core.recent: a map of bounded size that forgets what was not used for longest.
// **Owns** its entries.
export module quire.core.recent;

import quire.core.base;

export namespace quire {

template <class Key, class Value>
class Recent {
public:
    explicit Recent(std::size_t most) : most_(most) {}

    std::size_t size() const { return entries_.size(); }
    // The value of a key, used from now on; null where there is none.
    Value* find(const Key& key) {
        const auto at = entries_.find(key);
        if (at == entries_.end()) return nullptr;
        at->second.used = ++now_;
        return &at->second.value;
    }
    // A new one, of a key that has none. What has to go for it, if anything, is handed to `forget` first.
    Value& add(const Key& key, Value value, const std::function<void(Value&)>& forget) {
        check(!entries_.contains(key), "a key that is known already");
        if (entries_.size() >= most_) {
            const auto oldest = std::ranges::min_element(entries_, {}, [](const auto& e) { return e.second.used; });
            forget(oldest->second.value);
            entries_.erase(oldest);
        }
        return entries_.emplace(key, Entry{std::move(value), ++now_}).first->second.value;
    }
    void each(const std::function<void(Value&)>& what) {
        for (auto& [key, entry] : entries_) what(entry.value);
    }

private:
    struct Entry {
        Value         value;
        std::uint64_t used;
    };
    std::size_t          most_;
    std::uint64_t        now_ = 0;
    std::map<Key, Entry> entries_;
};

} // namespace quire
