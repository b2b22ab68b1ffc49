// quire.tools.bench.replicas.router: how a router chooses among replicas. The router learns the contents of the replicas' prefix caches from
// the events that they publish. **Owns** this index, and the load that it has sent to each replica.
export module quire.tools.bench.replicas.router;

import quire.core.base;
import quire.paging.block_hash;

export namespace quire::replicas {

enum class Policy : std::uint8_t { random, round_robin, least_loaded, kv_aware };
std::string_view      name_of(Policy policy);
std::optional<Policy> policy_named(std::string_view name);

class Router {
public:
    Router(Policy policy, int n_replicas, int block_size, std::uint32_t seed);

    struct Choice {
        int replica = 0;
        int work    = 0; // the prompt's tokens that the replica has to compute, as far as is known here
    };
    // least_loaded: fewest requests under way. kv_aware: fewest tokens to compute, of this prompt and of prompts that have been
    // sent there and have no first token yet, where a request under way counts as `request_weight`. Equal ones by chance.
    Choice choose(std::span<const Token> prompt);
    void   first_token(const Choice& choice);
    void   ended(const Choice& choice) { loads_[std::size_t(choice.replica)].n_requests--; }
    // The changes that a replica has published.
    void events(int replica, std::span<const CacheChange> changes);

    static constexpr int request_weight = 64;

private:
    struct Load {
        int n_requests = 0, work = 0;
    };
    int any_of_least(const std::function<std::int64_t(int)>& cost);

    Policy                                          policy_;
    int                                             block_size_, next_ = 0;
    std::mt19937                                    random_;
    std::vector<Load>                               loads_;
    std::unordered_map<BlockHash, std::vector<int>> holders_; // of each block
    std::vector<int>                                overlap_; // blocks of the prompt at hand, of each replica
};

} // namespace quire::replicas

module :private;

namespace quire::replicas {

constexpr std::array<std::string_view, 4> names{"random", "round-robin", "least-loaded", "kv-aware"};

std::string_view name_of(Policy policy) { return names[std::size_t(policy)]; }

std::optional<Policy> policy_named(std::string_view name) {
    const auto at = std::ranges::find(names, name);
    if (at == names.end()) return {};
    return Policy(at - names.begin());
}

Router::Router(Policy policy, int n_replicas, int block_size, std::uint32_t seed)
    : policy_(policy), block_size_(block_size), random_(seed), loads_(std::size_t(n_replicas)),
      overlap_(std::size_t(n_replicas), 0) {}

int Router::any_of_least(const std::function<std::int64_t(int)>& cost) {
    std::int64_t least  = std::numeric_limits<std::int64_t>::max();
    int          chosen = 0, n_equal = 0;
    for (int r = 0; r < int(loads_.size()); r++) {
        const std::int64_t c = cost(r);
        if (c > least) continue;
        n_equal = c < least ? 1 : n_equal + 1;
        least   = c;
        if (random_() % unsigned(n_equal) == 0) chosen = r;
    }
    return chosen;
}

Router::Choice Router::choose(std::span<const Token> prompt) {
    std::ranges::fill(overlap_, 0);
    std::optional<BlockHash> parent;
    const auto               size = std::size_t(block_size_);
    for (std::size_t block = 0; policy_ == Policy::kv_aware && (block + 1) * size <= prompt.size(); block++) {
        parent        = chain_hash(parent, prompt.subspan(block * size, size));
        const auto at = holders_.find(*parent);
        if (at == holders_.end()) break;
        for (int r : at->second) // a gap ends the usable prefix
            if (overlap_[std::size_t(r)] == int(block)) overlap_[std::size_t(r)]++;
    }
    const int  n    = int(prompt.size());
    const auto work = [&](int r) { return std::max(1, n - overlap_[std::size_t(r)] * block_size_); };
    const auto load = [&](int r) -> const Load& { return loads_[std::size_t(r)]; };
    int        r    = 0;
    switch (policy_) {
        case Policy::random: r = int(random_() % loads_.size()); break;
        case Policy::round_robin: r = std::exchange(next_, (next_ + 1) % int(loads_.size())); break;
        case Policy::least_loaded: r = any_of_least([&](int i) { return load(i).n_requests; }); break;
        case Policy::kv_aware:
            r = any_of_least([&](int i) {
                return std::int64_t(work(i)) + load(i).work + std::int64_t(request_weight) * load(i).n_requests;
            });
    }
    const Choice choice{r, work(r)};
    loads_[std::size_t(r)].n_requests++;
    loads_[std::size_t(r)].work += choice.work;
    return choice;
}

void Router::first_token(const Choice& choice) { loads_[std::size_t(choice.replica)].work -= choice.work; }

void Router::events(int replica, std::span<const CacheChange> changes) {
    if (policy_ != Policy::kv_aware) return;
    for (const CacheChange& c : changes) {
        if (c.group > 0 || c.state) continue; // the first group's blocks are the texts
        if (c.stored) {
            std::vector<int>& all = holders_[c.hash];
            if (std::ranges::find(all, replica) == all.end()) all.push_back(replica);
        } else if (const auto at = holders_.find(c.hash); at != holders_.end()) {
            std::erase_if(at->second, [&](int r) { return r == replica; });
            if (at->second.empty()) holders_.erase(at);
        }
    }
}

} // namespace quire::replicas
