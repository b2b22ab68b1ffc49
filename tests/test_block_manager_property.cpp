// Random sequences of all operations of a block manager. Every invariant is checked after each operation, and a model of
// each block's slots checks that what a block table says is what was written. Once more with hashes of few bits, which
// collide all the time.
// QUIRE_LONG=1 runs a million operations on every pool; QUIRE_SEED chooses other sequences.
#include <catch2/catch_test_macros.hpp>
#include <cstdlib>

import quire.core.base;
import quire.paging.block_manager;
import quire.paging.cache_layout;
import quire.paging.block_hash;
import quire.paging.block;
import quire.core.std;

using namespace quire;

namespace {

// The content of a slot: the hash of all tokens up to its own. Equal exactly when K and V would be.
using Content = std::uint64_t;

struct Live {
    std::vector<TableId>            tables; // of one request
    std::vector<std::vector<Token>> tokens;
    std::vector<int>                computed;
    CacheNamespace                  space;
    bool                            swapped = false, pinned = false, whole = false;
};

class World {
public:
    World(int n_blocks, int block_size, unsigned seed, ChainHash hash, const CacheLayout& layout, int n_tier)
        : random_(seed), size_(block_size), m_({.n_blocks   = n_blocks,
                                                .block_size = block_size,
                                                .n_swap     = n_blocks / 2,
                                                .hash       = hash,
                                                .layout     = layout,
                                                .n_tier     = n_tier}),
          device_(std::size_t(n_blocks * block_size)), swap_(std::size_t(m_.n_swap() * block_size)) {}

    void operation() {
        const int what = below(12);
        if (what <= 1 && live_.size() < 40) admit();
        else if (live_.empty()) return;
        else {
            const std::size_t at = std::size_t(below(int(live_.size())));
            Live&             l  = live_[at];
            if (what == 2) cancel(at);
            else if (what == 3) swap(l);
            else if (what == 4 && below(20) == 0) m_.drop_cache();
            else if (l.swapped || l.pinned) {
                if (l.pinned && below(8) == 0) cancel(at);
            } else if (what == 5) fork(l);
            else if (what == 6) free_one(at);
            else if (what == 7 && below(4) == 0) pin(l);
            else if (what == 8) give_back(l);
            else append(l);
        }
        m_.check_invariants();
    }

    void finish() {
        while (!live_.empty()) cancel(live_.size() - 1);
        run_moves();
        m_.check_invariants();
        CHECK(m_.n_free() == m_.n_blocks());
        CHECK(m_.n_swap_free() == m_.n_swap());
        CHECK(m_.n_pinned() == 0);
    }

    std::map<std::string, int> happened;

private:
    int below(int n) { return int(random_() % unsigned(n)); }

    static Content next_content(Content before, const CacheNamespace&, Token token) {
        return (before + std::uint64_t(token) + 1) * 0x9e3779b97f4a7c15ull;
    }

    void run_moves() {
        BlockMoves moves;
        m_.take_moves(moves);
        const auto move = [&](const std::vector<BlockCopy>& list, std::vector<Content>& from,
                              std::vector<Content>& to) {
            for (auto [a, b] : list)
                std::copy_n(from.begin() + std::ptrdiff_t(a) * size_, size_, to.begin() + std::ptrdiff_t(b) * size_);
        };
        move(moves.swap_out, device_, swap_);
        move(moves.swap_in, swap_, device_);
        move(moves.copies, device_, device_);
        happened["copies"] += int(moves.copies.size());
        happened["swap_out"] += int(moves.swap_out.size());
        happened["swap_in"] += int(moves.swap_in.size());
    }

    // Writes positions first .. n-1 of one sequence, after looking at all that it would read, in the blocks of each group.
    void write(Live& l, std::size_t i, int first, int n) {
        Content content = 0;
        for (int p = 0; p < n; p++) {
            content = next_content(content, l.space, l.tokens[i][std::size_t(p)]);
            for (int g = 0; g < m_.n_groups(); g++) {
                const int window = m_.layout().groups[std::size_t(g)].window;
                if (window > 0 && p < first - window + 1) continue;
                BlockId block = m_.blocks(l.tables[i], g)[std::size_t(p / size_)];
                REQUIRE(block >= 0);
                for (Content own = content + Content(g); block >= 0; block = m_.next_of(block), own *= 3) {
                    Content& at = device_[std::size_t(block * size_ + p % size_)];
                    if (p < first) REQUIRE(at == own);
                    at = own;
                }
            }
        }
    }

    void give_back(Live& l) {
        for (std::size_t i = 0; i < l.tables.size(); i++)
            happened["given back"] += m_.release_behind(l.tables[i], l.computed[i]);
    }

    void admit() {
        Live l;
        if (below(3) == 0) l.space = cache_namespace(below(2) ? "a" : "b");
        const int most = std::max(2, std::min(m_.n_blocks() * size_, 6 * size_ + 3));
        // Few different beginnings, so that prefixes recur and part somewhere.
        std::vector<Token> tokens;
        const int          n = 1 + below(most), kind = below(3), differs = below(2 * most);
        for (int p = 0; p < n; p++) tokens.push_back(p >= differs ? below(2) : kind);
        const TableId t = m_.open_table(l.space);
        l.whole         = below(4) == 0;
        if (!m_.allocate(t, tokens, below(3), true, l.whole)) {
            m_.close_table(t);
            happened["refused"]++;
            return;
        }
        l.tables        = {t};
        l.tokens        = {tokens};
        const bool wait = m_.must_wait(t, n);
        REQUIRE_FALSE(wait);                   // nothing is under way between operations
        if (!m_.allocate_slots(t, n - 1, 1)) { // a reserved last block that is cached by now, and no room to copy it
            run_moves();
            m_.close_table(t);
            return;
        }
        const int first = m_.next_unwritten(t, 0, n);
        happened[first > 0 ? "hit" : "miss"]++;
        happened["hit in host memory"] += m_.n_loaded(t) > 0;
        happened["partial"] += first % size_ != 0;
        m_.will_write({t, first, n - first});
        run_moves();
        write(l, 0, first, n);
        m_.commit();
        m_.publish(t, l.tokens[0], n);
        l.computed = {n};
        live_.push_back(std::move(l));
    }

    void append(Live& l) {
        // All sequences of the request or none.
        std::vector<Write> writes;
        const int          n = 1 + below(2) * below(size_);
        for (std::size_t i = 0; i < l.tables.size(); i++) writes.push_back({l.tables[i], l.computed[i], n});
        const int free_before = m_.n_free();
        if (!m_.allocate_slots(writes)) {
            REQUIRE(m_.n_free() == free_before);
            happened["no room"]++;
            return;
        }
        run_moves();
        for (std::size_t i = 0; i < l.tables.size(); i++) {
            for (int k = 0; k < n; k++) l.tokens[i].push_back(below(2));
            write(l, i, l.computed[i], l.computed[i] + n);
            l.computed[i] += n;
            m_.publish(l.tables[i], l.tokens[i], l.computed[i]);
        }
        happened["append"]++;
    }

    void fork(Live& l) {
        if (l.tables.size() >= 5) return;
        const auto i = std::size_t(below(int(l.tables.size())));
        l.tables.push_back(m_.fork_table(l.tables[i]));
        l.tokens.push_back(l.tokens[i]);
        l.computed.push_back(l.computed[i]);
        happened["fork"]++;
    }

    void free_one(std::size_t at) {
        Live&      l = live_[at];
        const auto i = std::ptrdiff_t(below(int(l.tables.size())));
        m_.close_table(l.tables[std::size_t(i)], below(4) == 0);
        l.tables.erase(l.tables.begin() + i);
        l.tokens.erase(l.tokens.begin() + i);
        l.computed.erase(l.computed.begin() + i);
        if (l.tables.empty()) live_.erase(live_.begin() + std::ptrdiff_t(at));
    }

    void cancel(std::size_t at) {
        for (TableId t : live_[at].tables) m_.close_table(t);
        live_.erase(live_.begin() + std::ptrdiff_t(at));
        happened["cancel"]++;
    }

    void pin(Live& l) {
        if (l.tables.size() != 1 || m_.n_pinned() > m_.n_blocks() / 4) return;
        for (int g = 0; g < m_.n_groups(); g++)
            if (m_.n_released(l.tables[0], g) > 0) return;
        m_.pin_table(l.tables[0], l.tokens[0]);
        l.pinned = true;
        happened["pin"]++;
        verify(l);
    }

    void verify(Live& l) {
        for (std::size_t i = 0; i < l.tables.size(); i++) write(l, i, l.computed[i], l.computed[i]);
    }

    void swap(Live& l) {
        if (l.pinned) return;
        if (!l.swapped) {
            l.swapped = m_.swap_out(l.tables);
            run_moves();
            return;
        }
        const int  free_before = m_.n_free(), room = m_.blocks_to_swap_in(l.tables);
        const bool in = m_.swap_in(l.tables);
        REQUIRE(in == (room <= free_before));
        if (!in) return;
        run_moves();
        m_.commit();
        l.swapped = false;
        verify(l);
    }

    std::mt19937         random_;
    int                  size_;
    BlockManager         m_;
    std::vector<Content> device_, swap_;
    std::vector<Live>    live_;
};

} // namespace

namespace {

// Of a pool of n_blocks blocks, and how many operations.
struct Pool {
    int         n_blocks, block_size, operations;
    CacheLayout layout = {};
};

// (window, blocks of an entry) of each group.
CacheLayout groups(std::initializer_list<std::pair<int, int>> all) {
    CacheLayout layout;
    layout.groups.clear();
    for (auto [window, blocks] : all) layout.groups.push_back({window, blocks, {}, {}});
    return layout;
}

// QUIRE_LONG=1: so many on each, whatever the pool says.
std::map<std::string, int> try_out(const std::vector<Pool>& pools, ChainHash hash, int many) {
    const bool                 all    = std::getenv("QUIRE_LONG") != nullptr;
    const char*                chosen = std::getenv("QUIRE_SEED");
    const unsigned             seed   = chosen ? unsigned(std::atoi(chosen)) : 20261121u;
    std::map<std::string, int> happened;
    for (const Pool& pool : pools) {
        // Half of the pools keep in host memory what they evict.
        const int n_tier = &pool - pools.data() & 1 ? 0 : 2 * pool.n_blocks;
        CAPTURE(seed, pool.n_blocks, pool.block_size, n_tier);
        World world(pool.n_blocks, pool.block_size, seed + unsigned(pool.n_blocks * 1000 + pool.block_size), hash,
                    pool.layout, n_tier);
        for (int i = 0, n = all ? many : pool.operations; i < n; i++) {
            CAPTURE(i);
            world.operation();
        }
        world.finish();
        for (const auto& [what, n] : world.happened) happened[what] += n;
    }
    return happened;
}

// The lowest bits of the real one, so that most hashes collide.
template <int bits>
BlockHash short_hash(std::optional<BlockHash> parent, std::span<const Token> block) {
    return chain_hash(parent, block) & ((1u << bits) - 1);
}

} // namespace

TEST_CASE("random histories: every invariant after each operation, and every slot holds what its table says") {
    // The check after each operation walks the whole pool, so large pools get fewer of them; together a million.
    auto happened = try_out({{1, 1, 50'000},
                             {1, 16, 50'000},
                             {2, 256, 50'000},
                             {3, 4, 150'000},
                             {8, 1, 150'000},
                             {16, 3, 250'000},
                             {37, 16, 200'000},
                             {64, 8, 93'000},
                             {512, 32, 5'000},
                             {4096, 16, 1'000},
                             {4096, 1, 1'000}},
                            chain_hash, 1'000'000);
    // Or the test tried too little.
    for (const char* what : {"copies", "swap_out", "swap_in", "refused", "hit", "miss", "partial", "append", "no room",
                             "fork", "cancel", "pin", "hit in host memory"}) {
        CAPTURE(what);
        CHECK(happened[what] > 100);
    }
}

TEST_CASE("random histories with windows, several groups, and entries of several blocks") {
    auto happened = try_out({{8, 4, 60'000, groups({{6, 1}})},
                             {16, 3, 60'000, groups({{0, 1}, {5, 1}})},
                             {40, 4, 60'000, groups({{0, 1}, {9, 3}})},
                             {60, 2, 60'000, groups({{0, 2}, {0, 1}, {4, 3}})},
                             {50, 4, 60'000, groups({{0, 1}, {20, 1}, {7, 2}, {1, 1}})},
                             {37, 16, 30'000, groups({{20, 2}, {8, 1}})},
                             {600, 8, 2'000, groups({{0, 1}, {16, 5}})}},
                            chain_hash, 500'000);
    for (const char* what : {"copies", "swap_out", "swap_in", "refused", "hit", "miss", "partial", "append", "no room",
                             "fork", "cancel", "pin", "given back", "hit in host memory"}) {
        CAPTURE(what);
        CHECK(happened[what] > 100);
    }
}

TEST_CASE("random histories with hashes that collide") {
    const std::vector<Pool> pools = {{3, 4, 20'000},
                                     {8, 1, 40'000},
                                     {16, 3, 40'000},
                                     {37, 4, 40'000},
                                     {64, 2, 20'000},
                                     {40, 4, 20'000, groups({{0, 1}, {9, 3}})},
                                     {16, 4, 20'000, groups({{6, 1}})}};
    for (const ChainHash hash : {short_hash<0>, short_hash<1>, short_hash<3>, short_hash<5>}) {
        auto happened = try_out(pools, hash, 250'000);
        for (const char* what : {"hit", "partial", "swap_in", "pin", "hit in host memory"}) {
            CAPTURE(what);
            CHECK(happened[what] > 100);
        }
    }
}
