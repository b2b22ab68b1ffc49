// The golden vectors V1, V2, V3, V7 and V8 are those of the paper (section 4.3, Fig. 6 and 8), of a lesson on block
// pools and of miniVLLM's documentation.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "process.h"

import quire.core.base;
import quire.paging.block_manager;
import quire.paging.cache_layout;
import quire.core.tensor;
import quire.paging.block_hash;
import quire.paging.block_index;
import quire.paging.prefix_cache;
import quire.paging.block;
import quire.core.std;

#include "block_tools.h"

using namespace quire;
using namespace quire::testing;

TEST_CASE("V1: how many blocks a KV budget holds") {
    BlockManager      m({983, 16, 0, {}});
    const std::size_t per_token =
        std::size_t(2) * 40 * 40 * 128 * 2; // OPT-13B: K and V, layers, heads, head_dim, halves
    CHECK(per_token == 819'200);
    CHECK((std::size_t(12) << 30) / per_token == 15'728);
    CHECK((std::size_t(12) << 30) / per_token / 16 == std::size_t(m.n_blocks()));
    CHECK(m.n_blocks() / m.blocks_for(2048) == 7); // requests of 2048 tokens
}

TEST_CASE("V2: blocks are taken one by one as a sequence grows") {
    BlockManager m({8, 4, 0, {7, 1, 3, 0, 2, 4, 5, 6}});
    TableId      t = m.open_table();
    REQUIRE(m.allocate_slots(t, 0, 7)); // the prompt: 4 + 3 tokens
    CHECK(table_of(m, t) == std::vector<BlockId>{7, 1});
    REQUIRE(m.allocate_slots(t, 7, 1)); // the first decode fills block 1
    CHECK(table_of(m, t) == std::vector<BlockId>{7, 1});
    CHECK(m.slot(t, 7) == 1 * 4 + 3);
    REQUIRE(m.allocate_slots(t, 8, 1)); // the second needs a new one
    CHECK(table_of(m, t) == std::vector<BlockId>{7, 1, 3});
    CHECK(m.slot(t, 8) == 3 * 4);
    m.close_table(t);
    CHECK(m.n_free() == 8);
    m.check_invariants();
}

TEST_CASE("V3: the first of two samples to write copies the shared block, the second writes in place") {
    BlockManager m({8, 4, 0, {7, 1, 3, 0, 2, 4, 5, 6}});
    TableId      first = m.open_table();
    REQUIRE(m.allocate_slots(first, 0, 7));
    TableId second = m.fork_table(first);
    CHECK(m.ref_count(7) == 2);
    CHECK(m.ref_count(1) == 2);
    REQUIRE(m.allocate_slots(first, 7, 1));
    const std::vector<BlockCopy> copies = step(m);
    REQUIRE(copies.size() == 1);
    CHECK(copies[0].from == 1);
    CHECK(copies[0].to == 3);
    CHECK(table_of(m, first) == std::vector<BlockId>{7, 3});
    CHECK(m.ref_count(7) == 2);
    CHECK(m.ref_count(1) == 1);
    REQUIRE(m.allocate_slots(second, 7, 1));
    CHECK(m.n_copies() == 0);
    CHECK(table_of(m, second) == std::vector<BlockId>{7, 1});
    m.check_invariants();
}

TEST_CASE("V7: a slab of the longest length wastes what a short sequence leaves; blocks waste less than one block") {
    BlockManager m({128, 16, 0, {}});
    TableId      t = m.open_table();
    REQUIRE(m.allocate_slots(t, 0, 80));
    CHECK((2048 - 80) * 1000 / 2048 == 960); // 96.1 % of a slab of 2048
    CHECK(m.n_used() * 16 - 80 < 16);
}

TEST_CASE("V8: a block's hash depends on every token before it") {
    const auto x = text(16, 0), y = text(16, 100), z = text(16, 200);
    const auto hx = chain_hash({}, x), hz = chain_hash({}, z);
    CHECK(hx != hz);
    CHECK(chain_hash(hx, y) != chain_hash(hz, y));
    CHECK(chain_hash({}, y) != chain_hash(hx, y));
    // XXH64 of the 64 bytes 00000000 01000000 … 0f000000 by an independent implementation in Python.
    CHECK(hx == 0x8a44256aed976c78ull);
}

TEST_CASE("V4: beams fork and die; blocks nobody holds any more come back") {
    // Four beams of four blocks each, [0 1 3 5] [0 1 3 6] [0 1 3 7] [0 2 4 8].
    BlockManager n({13, 1, 0, {0, 2, 4, 8, 1, 3, 5, 6, 7, 9, 10, 11, 12}});
    TableId      b3 = n.open_table();
    REQUIRE(n.allocate_slots(b3, 0, 1)); // 0
    TableId b0 = n.fork_table(b3);
    REQUIRE(n.allocate_slots(b3, 1, 3)); // 2, 4, 8
    REQUIRE(n.allocate_slots(b0, 1, 2)); // 1, 3
    TableId b1 = n.fork_table(b0), b2 = n.fork_table(b0);
    REQUIRE(n.allocate_slots(b0, 3, 1)); // 5
    REQUIRE(n.allocate_slots(b1, 3, 1)); // 6
    REQUIRE(n.allocate_slots(b2, 3, 1)); // 7
    CHECK(table_of(n, b0) == std::vector<BlockId>{0, 1, 3, 5});
    CHECK(table_of(n, b1) == std::vector<BlockId>{0, 1, 3, 6});
    CHECK(table_of(n, b2) == std::vector<BlockId>{0, 1, 3, 7});
    CHECK(table_of(n, b3) == std::vector<BlockId>{0, 2, 4, 8});
    // The survivors' parents are 1, 1, 2, 2.
    n.close_table(b0);
    n.close_table(b3);
    for (BlockId freed : {2, 4, 5, 8}) CHECK(n.ref_count(freed) == 0);
    TableId c1 = n.fork_table(b1), c2 = n.fork_table(b2);
    for (TableId beam : {b1, c1, b2, c2}) REQUIRE(n.allocate_slots(beam, 4, 1));
    CHECK(table_of(n, b1) == std::vector<BlockId>{0, 1, 3, 6, 9});
    CHECK(table_of(n, c1) == std::vector<BlockId>{0, 1, 3, 6, 10});
    CHECK(table_of(n, b2) == std::vector<BlockId>{0, 1, 3, 7, 11});
    CHECK(table_of(n, c2) == std::vector<BlockId>{0, 1, 3, 7, 12});
    for (BlockId shared : {0, 1, 3}) CHECK(n.ref_count(shared) == 4);
    for (BlockId shared : {6, 7}) CHECK(n.ref_count(shared) == 2);
    CHECK(n.n_copies() == 0);
    n.check_invariants();
}

TEST_CASE("V5: the lesson's pool of 64 blocks") {
    BlockManager m({64, 16, 0, {}});
    TableId      first = m.open_table();
    REQUIRE(m.allocate_slots(first, 0, 64));
    CHECK(m.n_used() == 4);
    std::vector<TableId> beams{first};
    for (int i = 0; i < 3; i++) beams.push_back(m.fork_table(first));
    CHECK(m.n_used() == 4);
    for (BlockId block : m.blocks(first)) CHECK(m.ref_count(block) == 4);
    for (TableId beam : beams) REQUIRE(m.allocate_slots(beam, 64, 10)); // at a boundary: a block each, no copy
    CHECK(m.n_used() == 8);
    CHECK(m.n_copies() == 0);
    int naive = 0;
    for (TableId beam : beams) naive += int(m.blocks(beam).size());
    CHECK(naive == 20);
    for (TableId beam : beams) REQUIRE(m.allocate_slots(beam, 74, 7)); // 17 tokens of their own
    CHECK(m.n_used() == 12);
    m.check_invariants();
}

TEST_CASE("V5, other way: a write into the last shared block copies it, except for the last sharer") {
    BlockManager         m({64, 16, 0, {}});
    std::vector<TableId> beams{m.open_table()};
    REQUIRE(m.allocate_slots(beams[0], 0, 64));
    for (int i = 0; i < 3; i++) beams.push_back(m.fork_table(beams[0]));
    for (TableId beam : beams) REQUIRE(m.allocate_slots(beam, 63, 1));
    CHECK(m.n_copies() == 3); // n - 1
    for (TableId beam : beams) REQUIRE(m.allocate_slots(beam, 64, 10));
    CHECK(m.n_used() == 11);
    CHECK(step(m).size() == 3);
}

TEST_CASE("V6: a prompt of 256 tokens under four beams takes a quarter of the blocks") {
    BlockManager         m({64, 16, 0, {}});
    std::vector<TableId> beams{m.open_table()};
    REQUIRE(m.allocate_slots(beams[0], 0, 256));
    for (int i = 0; i < 3; i++) beams.push_back(m.fork_table(beams[0]));
    int naive = 0;
    for (TableId beam : beams) naive += int(m.blocks(beam).size());
    CHECK(m.n_used() == 16);
    CHECK(naive == 64);
    CHECK(m.distinct_blocks(beams) == 16);
}

TEST_CASE("V9: a pinned prefix of 341 tokens is 21 shared blocks and one copy for each request") {
    BlockManager m({64, 16, 0, {}});
    const auto   prefix = text(341);
    TableId      pin    = filled(m, prefix);
    m.pin_table(pin, prefix);
    CHECK(m.n_pinned() == 22);
    m.check_invariants();
    for (int request = 0; request < 3; request++) {
        auto prompt = prefix;
        for (Token t : text(20, 1000 * (request + 1))) prompt.push_back(t);
        TableId t = m.open_table();
        REQUIRE(m.allocate(t, prompt));
        CHECK(m.next_unwritten(t, 0, int(prompt.size())) == 341); // only the task's own tokens are computed
        const auto copies = step(m);
        REQUIRE(copies.size() == 1);
        CHECK(copies[0].from == m.blocks(pin)[21]);
        CHECK(copies[0].to == m.blocks(t)[21]);
        for (std::size_t i = 0; i < 21; i++) CHECK(m.blocks(t)[i] == m.blocks(pin)[i]);
        m.close_table(t);
    }
    // Nothing evicts it, and when it is let go it is an ordinary prefix.
    TableId all = m.open_table();
    REQUIRE(m.allocate_slots(all, 0, (64 - 22) * 16));
    CHECK_FALSE(m.allocate_slots(all, (64 - 22) * 16, 1));
    m.close_table(pin);
    CHECK(m.n_pinned() == 0);
    CHECK(m.allocate_slots(all, (64 - 22) * 16, 22 * 16));
    m.check_invariants();
}

TEST_CASE("V11: the swap pool can overflow although it is as large as the device's, and then nothing is lost") {
    // Sixteen sequences of one block, each growing block by block to 16; the latest is evicted first, nobody is admitted.
    constexpr int        n = 16;
    BlockManager         large({n, 1, 1000, {}});
    std::vector<TableId> running;
    for (int i = 0; i < n; i++) {
        running.push_back(large.open_table());
        REQUIRE(large.allocate_slots(running.back(), 0, 1));
    }
    std::vector<int> peaks;
    for (int length = 2; length <= n && running.size() > 1; length++) {
        bool evicted = false;
        for (std::size_t i = 0; i < running.size(); i++)
            while (i < running.size() && !large.allocate_slots(running[i], length - 1, 1)) {
                REQUIRE(large.swap_out(std::array{running.back()}));
                running.pop_back();
                evicted = true;
            }
        BlockMoves moves;
        large.take_moves(moves);
        large.check_invariants();
        if (evicted) peaks.push_back(large.n_swap() - large.n_swap_free());
    }
    REQUIRE(peaks.size() >= 6);
    CHECK(std::vector<int>(peaks.begin(), peaks.begin() + 6) == std::vector<int>{8, 14, 17, 21, 26, 34});

    BlockManager small({4, 1, 1, {}});
    TableId      a = small.open_table(), b = small.open_table();
    REQUIRE(small.allocate_slots(a, 0, 1));
    REQUIRE(small.allocate_slots(b, 0, 2));
    CHECK(small.swap_out(std::array{a}));
    CHECK_FALSE(small.swap_out(std::array{b})); // no room: the caller recomputes
    CHECK(small.blocks(b).size() == 2);
    small.check_invariants();
}

TEST_CASE("equal prefixes share blocks, from the first block to the first difference") {
    BlockManager m({16, 4, 0, {}});
    auto         a  = text(12);
    TableId      ta = filled(m, a);
    auto         b  = a;
    b[9]            = 99; // in the third block
    TableId tb      = m.open_table();
    REQUIRE(m.allocate(tb, b));
    CHECK(m.blocks(tb)[0] == m.blocks(ta)[0]);
    CHECK(m.ref_count(m.blocks(ta)[1]) == 2);
    CHECK(m.ref_count(m.blocks(ta)[2]) == 1);
    CHECK(m.next_unwritten(tb, 0, 12) == 9); // the ninth token comes along in a copy
    const auto copies = step(m);
    REQUIRE(copies.size() == 1);
    CHECK(copies[0].from == m.blocks(ta)[2]);
    CHECK(copies[0].to == m.blocks(tb)[2]);
}

TEST_CASE("a prompt that is cached whole computes one token, not a block") {
    BlockManager m({16, 4, 0, {}});
    auto         a = text(12);
    TableId      t = filled(m, a);
    CHECK(found(m, a) == 11);
    CHECK(found(m, text(11)) == 10);
    CHECK(found(m, text(9)) == 8);
    CHECK(found(m, text(1)) == 0);
    m.close_table(t);
    CHECK(found(m, a) == 11); // free, but still there
}

TEST_CASE("of several continuations the one with the longest common part is copied") {
    BlockManager m({16, 4, 0, {}});
    filled(m, std::vector<Token>{1, 2, 3, 4, 5, 6, 7, 8});
    filled(m, std::vector<Token>{1, 2, 3, 4, 5, 9, 9, 9});
    CHECK(found(m, std::vector<Token>{1, 2, 3, 4, 5, 6, 7, 0, 0}) == 7);
    CHECK(found(m, std::vector<Token>{1, 2, 3, 4, 5, 9, 0, 0, 0}) == 6);
    CHECK(found(m, std::vector<Token>{1, 2, 0, 0}) == 2);
    CHECK(found(m, std::vector<Token>{0, 2, 3, 4}) == 0);
}

TEST_CASE("without room for the block to copy its tokens are computed") {
    BlockManager m({3, 4, 0, {}});
    TableId      t = filled(m, text(12));
    m.close_table(t);
    CHECK(found(m, text(12)) == 8); // all three blocks are needed: the third cannot stay beside its copy
    m.check_invariants();
}

TEST_CASE("requests of the same step share what one of them computes") {
    BlockManager m({16, 4, 0, {}});
    const auto   a     = text(13);
    TableId      first = m.open_table(), second = m.open_table();
    REQUIRE(m.allocate(first, a));
    REQUIRE(m.allocate(second, a));
    CHECK(m.n_used() == 5); // three shared blocks, a last one each
    CHECK(m.next_unwritten(first, 0, 13) == 0);
    CHECK(m.next_unwritten(second, 0, 13) == 0); // nobody has said that it will
    m.will_write({first, 0, 13});
    CHECK(m.next_unwritten(second, 0, 13) == 12);
    CHECK_FALSE(m.is_cached(m.blocks(first)[0]));
    step(m);
    CHECK(m.is_cached(m.blocks(first)[0]));
    CHECK(m.next_unwritten(second, 0, 13) == 12);
}

TEST_CASE("who shares a block that nobody came to write writes it itself") {
    BlockManager m({16, 4, 0, {}});
    const auto   a     = text(13);
    TableId      first = m.open_table(), second = m.open_table();
    REQUIRE(m.allocate(first, a));
    REQUIRE(m.allocate(second, a));
    m.will_write({first, 0, 6}); // a chunk: one block and a half
    step(m);
    CHECK(m.next_unwritten(second, 0, 13) == 4);
    m.close_table(first);
    CHECK(m.next_unwritten(second, 0, 13) == 4);
    REQUIRE(m.allocate_slots(second, 12, 1));
    CHECK(m.n_copies() == 0); // in place: these are the tokens that the block is reserved for
    m.will_write({second, 4, 9});
    step(m);
    CHECK(found(m, a) == 12);
}

TEST_CASE("equal prompts that fill their last block: the second waits a step and computes one token") {
    BlockManager m({16, 4, 0, {}});
    const auto   a     = text(8);
    TableId      first = m.open_table(), second = m.open_table();
    REQUIRE(m.allocate(first, a));
    m.will_write({first, 0, 8});
    REQUIRE(m.allocate(second, a));
    CHECK(m.must_wait(second, 8));
    step(m);
    CHECK_FALSE(m.must_wait(second, 8));
    REQUIRE(m.allocate_slots(second, 7, 1));
    CHECK(m.next_unwritten(second, 0, 8) == 7);
    CHECK(step(m).size() == 1);
    CHECK(m.blocks(second)[1] != m.blocks(first)[1]);
}

TEST_CASE("namespaces do not see each other's blocks") {
    BlockManager m({32, 4, 0, {}});
    const auto   a   = text(12);
    const auto   one = cache_namespace("tenant one"), two = cache_namespace("tenant two");
    CHECK(one != two);
    CHECK(one == cache_namespace("tenant one"));
    CHECK(cache_namespace("") == CacheNamespace{});
    filled(m, a, one);
    CHECK(found(m, a, one) == 11);
    CHECK(found(m, a, two) == 0);
    CHECK(found(m, a) == 0);
}

TEST_CASE("the tail of a freed prefix is evicted before its head, and a gap ends a hit") {
    BlockManager m({4, 4, 0, {}});
    auto         a = text(13);
    TableId      t = filled(m, a);
    m.close_table(t);
    TableId other = m.open_table();
    REQUIRE(m.allocate_slots(other, 0, 12)); // takes the plain block and two cached ones
    m.close_table(other);
    CHECK(found(m, a) == 4);
    m.check_invariants();
}

TEST_CASE("a freed block is found again until it is reused, and its old hash is gone after that") {
    BlockManager m({3, 4, 0, {}});
    auto         a = text(5);
    TableId      t = filled(m, a);
    m.close_table(t);
    CHECK(m.n_free() == 3);
    CHECK(m.n_cached_free() == 1);
    CHECK(found(m, a) == 4);
    TableId big = m.open_table();
    REQUIRE(m.allocate_slots(big, 0, 12)); // the whole pool
    m.close_table(big);
    CHECK(found(m, a) == 0);
    m.check_invariants();
}

TEST_CASE("blocks without a hash are handed out before cached ones") {
    BlockManager m({4, 4, 0, {}});
    TableId      t = filled(m, text(4));
    m.close_table(t); // block 0 is cached and free
    TableId other = m.open_table();
    REQUIRE(m.allocate_slots(other, 0, 12));
    CHECK(table_of(m, other) == std::vector<BlockId>{1, 2, 3});
    CHECK(m.n_cached_free() == 1);
}

TEST_CASE("cached blocks count as free for others, but not twice for who finds them") {
    BlockManager m({4, 4, 0, {}});
    const auto   a = text(13);
    m.close_table(filled(m, a));
    CHECK(m.blocks_to_allocate({}, a) == 4); // three hits leave the free list, and one is fresh
    TableId t = m.open_table();
    CHECK(m.allocate(t, a));
    CHECK(m.n_free() == 0);
    CHECK(m.blocks_to_allocate({}, a) == 1);
}

TEST_CASE("what the sequences of a request take together is known before, also once others have gone") {
    std::mt19937 random(11);
    const auto   below  = [&](int n) { return int(random() % unsigned(n)); };
    int          shared = 0, hits = 0;
    for (int trial = 0; trial < 2000; trial++) {
        const int            size = 1 + below(5);
        BlockManager         m({400, size, 0, {}});
        std::vector<TableId> others; // that go, and that stay
        const auto           tokens_of = [&](int n) {
            std::vector<Token> tokens;
            const int          differs = below(2 * n);
            for (int i = 0; i < n; i++) tokens.push_back(i < differs ? 7 : below(2));
            return tokens;
        };
        for (int i = below(5); i > 0; i--) others.push_back(filled(m, tokens_of(1 + below(30))));
        for (int i = below(3); i > 0 && !others.empty(); i--) m.close_table(others.back()), others.pop_back();
        std::vector<std::vector<Token>>     texts(std::size_t(1 + below(4)));
        std::vector<std::span<const Token>> spans;
        const int                           n = 1 + below(30);
        for (auto& text : texts) spans.emplace_back(text = tokens_of(n));
        const std::span<const TableId> closing = std::span(others).first(std::size_t(below(int(others.size()) + 1)));
        const int                      need = m.blocks_to_allocate({}, spans, closing), room = m.n_free(closing);
        const int                      untouched = m.n_free();
        for (TableId t : closing) m.close_table(t);
        REQUIRE(m.n_free() == room);
        hits += room > untouched;
        int apart = 0;
        for (const auto& text : texts) apart += m.blocks_for(int(text.size()));
        for (const auto& text : texts) {
            REQUIRE(m.allocate(m.open_table(), text));
            BlockMoves moves;
            m.take_moves(moves); // what is copied is free again
        }
        REQUIRE(m.n_free() == room - need);
        shared += need < apart;
    }
    CHECK(shared > 500);
    CHECK(hits > 100);
}

TEST_CASE("of forked sequences each allocates the whole blocks that no sequence before it has, and the rest") {
    std::mt19937 random(12);
    const auto   below  = [&](int n) { return int(random() % unsigned(n)); };
    int          shared = 0, equal = 0;
    for (int trial = 0; trial < 500; trial++) {
        const int                       size = 1 + below(5);
        const BlockManager              m({4000, size, 0, {}}); // without a cached block
        std::vector<std::vector<Token>> texts{text(1 + below(20))};
        for (int i = below(60); i > 0; i--) {
            for (auto& t : texts) t.push_back(below(4) == 0);
            if (below(3) == 0 && texts.size() < 20) {
                const std::vector<Token> fork = texts[std::size_t(below(int(texts.size())))];
                texts.push_back(fork);
            }
            if (below(8) == 0 && texts.size() > 1) texts.erase(texts.begin() + below(int(texts.size())));
        }
        // Each sequence is compared with all before it.
        int need = 0;
        for (std::size_t i = 0; i < texts.size(); i++) {
            int most = 0;
            for (std::size_t j = 0; j < i; j++) {
                const auto same =
                    std::mismatch(texts[i].begin(), texts[i].end(), texts[j].begin(), texts[j].end()).first -
                    texts[i].begin();
                most = std::max(most, int(same) / size);
            }
            need += m.blocks_for(int(texts[i].size())) - most;
            shared += most;
            equal += most * size == int(texts[i].size());
        }
        const std::vector<std::span<const Token>> spans(texts.begin(), texts.end());
        REQUIRE(m.blocks_to_allocate({}, spans, {}) == need);
    }
    CHECK(shared > 1000);
    CHECK(equal > 50);
}

TEST_CASE("what was generated is found once its block is full") {
    BlockManager m({8, 4, 0, {}});
    auto         a = text(3);
    TableId      t = filled(m, a);
    for (int i = 3; i < 6; i++) {
        REQUIRE(m.allocate_slots(t, i, 1));
        a.push_back(i);
        step(m);
        m.publish(t, a, i + 1);
    }
    CHECK(m.is_cached(m.blocks(t)[0]));
    CHECK_FALSE(m.is_cached(m.blocks(t)[1]));
    CHECK(found(m, a) == 4);
}

TEST_CASE("the first of two equal blocks stays the one that is found") {
    BlockManager m({8, 4, 0, {}});
    auto         a     = text(9);
    TableId      first = m.open_table(), second = m.open_table();
    REQUIRE(m.allocate(first, a, 0, false)); // both compute, as requests for every row do
    REQUIRE(m.allocate(second, a, 0, false));
    m.publish(first, a, 9);
    m.publish(second, a, 9);
    m.close_table(second);
    TableId third = m.open_table();
    REQUIRE(m.allocate(third, a));
    CHECK(m.blocks(third)[0] == m.blocks(first)[0]);
    m.check_invariants();
}

TEST_CASE("a block is not found behind another prefix of the same hash") {
    // All first blocks have one hash, all second blocks another.
    BlockManager m({9, 4, 0, {}, [](std::optional<BlockHash> parent, std::span<const Token>) -> BlockHash {
                        return parent ? *parent + 1 : 1;
                    }});
    auto         a = text(13), b = a; // alike but for the first block
    std::fill_n(b.begin(), 4, 99);
    // The first block of `a` is one table's, the second block another's, which computed the first for itself.
    const TableId first = m.open_table(), second = m.open_table();
    REQUIRE(m.allocate(first, std::span(a).first(5), 0, false));
    REQUIRE(m.allocate(second, std::span(a).first(12), 0, false));
    m.publish(first, a, 4);
    m.publish(second, a, 9);
    m.close_table(first);
    CHECK(m.is_cached(m.blocks(second)[1]));
    const TableId other = m.open_table();
    REQUIRE(m.allocate_slots(other, 0, 24)); // the whole pool: the first block is forgotten
    m.close_table(other);
    CHECK_FALSE(m.is_cached(m.blocks(second)[1])); // and with it what followed
    m.check_invariants();

    const TableId third = filled(m, std::span(b).first(5)); // its first block under the same hash
    CHECK(found(m, b) == 4);
    CHECK(found(m, a) == 0);
    m.close_table(third);
    m.drop_cache();

    // A table that still has all of it brings it back with the next block that is full.
    m.publish(second, a, 12);
    CHECK(found(m, a) == 12);
    CHECK(found(m, b) == 0);
}

TEST_CASE("swapped blocks get their hashes back only behind their prefix") {
    const auto two_hashes = [](std::optional<BlockHash> parent, std::span<const Token>) -> BlockHash {
        return parent ? *parent + 1 : 1;
    };
    BlockManager m({9, 4, 6, {}, two_hashes});
    auto         a = text(9), b = a;
    std::fill_n(b.begin(), 4, 99);
    const TableId t = filled(m, a);
    REQUIRE(m.swap_out(std::array{t}));
    step(m);
    m.drop_cache();
    const TableId other = filled(m, std::span(b).first(5)); // takes the hash of the first block
    REQUIRE(m.swap_in(std::array{t}));
    step(m);
    CHECK(found(m, b) == 4);
    CHECK(found(m, a) == 0);
    m.publish(t, a, 9); // its first block cannot have a hash now
    CHECK(found(m, a) == 0);
    m.close_table(other);
    m.close_table(t);
    m.check_invariants();
}

TEST_CASE("a write into a block that the cache knows copies it, or makes the cache forget it") {
    BlockManager m({3, 4, 0, {}});
    const auto   a = text(8);
    TableId      t = filled(m, a), waiting = m.fork_table(t);
    m.close_table(t); // `waiting` is alone with two cached blocks
    REQUIRE(m.allocate_slots(waiting, 7, 1));
    CHECK(step(m).size() == 1);
    TableId      other = m.open_table();
    BlockManager full({2, 4, 0, {}});
    TableId      u = filled(full, a);
    REQUIRE(full.allocate_slots(u, 7, 1)); // no third block
    CHECK(step(full).empty());
    CHECK_FALSE(full.is_cached(full.blocks(u)[1]));
    m.close_table(other);
}

TEST_CASE("swapped tables keep what they shared") {
    BlockManager m({8, 4, 8, {}});
    TableId      a = m.open_table();
    REQUIRE(m.allocate_slots(a, 0, 6));
    TableId b = m.fork_table(a);
    REQUIRE(m.allocate_slots(b, 6, 1)); // copies the second block
    step(m);
    const std::array both{a, b};
    REQUIRE(m.swap_out(both));
    CHECK(m.n_free() == 8);
    CHECK(m.n_swap_free() == 5); // the shared block went out once
    BlockMoves moves;
    m.take_moves(moves);
    CHECK(moves.swap_out.size() == 3);
    TableId other = m.open_table();
    REQUIRE(m.allocate_slots(other, 0, 5 * 4 + 1)); // so that they come back elsewhere
    CHECK_FALSE(m.swap_in(both));
    m.close_table(other);
    REQUIRE(m.swap_in(both, 1));
    CHECK(m.blocks(a)[0] == m.blocks(b)[0]);
    CHECK(m.ref_count(m.blocks(a)[0]) == 2);
    CHECK(m.blocks(a)[1] != m.blocks(b)[1]);
    moves.clear();
    m.take_moves(moves);
    CHECK(moves.swap_in.size() == 3);
    CHECK(m.n_swap_free() == 8);
    m.check_invariants();
}

TEST_CASE("what the cache still has comes back without a copy") {
    BlockManager m({8, 4, 8, {}});
    const auto   a = text(10);
    TableId      t = filled(m, a);
    REQUIRE(m.swap_out(std::array{t}));
    REQUIRE(m.swap_in(std::array{t}));
    BlockMoves moves;
    m.take_moves(moves);
    CHECK(moves.swap_out.size() == 3);
    CHECK(moves.swap_in.size() == 1); // the last block, which has no hash
    m.commit();
    // And what was evicted gets its hash back with its bytes.
    REQUIRE(m.swap_out(std::array{t}));
    TableId all = m.open_table();
    REQUIRE(m.allocate_slots(all, 0, 32));
    step(m);
    m.close_table(all);
    REQUIRE(m.swap_in(std::array{t}));
    CHECK_FALSE(m.is_cached(m.blocks(t)[0])); // not before the step has run
    step(m);
    CHECK(m.is_cached(m.blocks(t)[0]));
    CHECK(found(m, a) == 8);
}

TEST_CASE("a swapped table can be closed") {
    BlockManager m({4, 4, 4, {}});
    TableId      t = m.open_table();
    REQUIRE(m.allocate_slots(t, 0, 9));
    REQUIRE(m.swap_out(std::array{t}));
    m.close_table(t);
    step(m);
    CHECK(m.n_swap_free() == 4);
    CHECK(m.n_free() == 4);
}

TEST_CASE("a reservation that does not fit changes nothing") {
    BlockManager m({2, 4, 0, {}});
    TableId      t = m.open_table();
    REQUIRE(m.allocate_slots(t, 0, 4));
    CHECK_FALSE(m.allocate_slots(t, 4, 5));
    CHECK(m.n_free() == 1);
    CHECK(m.blocks(t).size() == 1);
    m.check_invariants();
}

TEST_CASE("a block size of one token works") {
    BlockManager m({4, 1, 0, {}});
    auto         a = text(3);
    TableId      t = filled(m, a);
    CHECK(m.blocks(t).size() == 3);
    REQUIRE(m.allocate_slots(t, 3, 1));
    CHECK_FALSE(m.allocate_slots(t, 4, 1));
    m.check_invariants();
}

TEST_CASE("the hash table survives any order of insertions and erasures") {
    std::mt19937                 random(7);
    BlockIndex                   cache(64);
    std::map<BlockHash, BlockId> model;
    for (int i = 0; i < 100'000; i++) {
        BlockHash hash = random() % 100; // crowded: long probe runs
        if (random() % 2 && model.size() < 64) {
            REQUIRE(cache.insert(hash, BlockId(i)) == model.emplace(hash, BlockId(i)).second);
        } else if (model.contains(hash)) {
            cache.erase(hash);
            model.erase(hash);
        }
        hash = random() % 100;
        REQUIRE(cache.find(hash) == (model.contains(hash) ? model[hash] : -1));
        REQUIRE(cache.size() == int(model.size()));
    }
}

TEST_CASE("misuse stops the process in every build") {
    using quire::testing::stops;
    BlockManager  m({8, 4, 2, {}});
    const TableId t = m.open_table();
    REQUIRE(m.allocate_slots(t, 0, 9));
    CHECK_FALSE(stops([] {})); // the helper itself
    CHECK(stops([&] {          // given back twice
        m.close_table(t);
        m.close_table(t);
    }));
    CHECK(stops([&] { // a fork of what has been given back
        m.close_table(t);
        m.fork_table(t);
    }));
    CHECK(stops([&] { m.slot(t, 12); })); // a position without a block
    CHECK(stops([&] {                     // a fork of what is not on the device
        TableId small = m.open_table();
        m.allocate_slots(small, 0, 4);
        m.swap_out(std::array{small});
        m.fork_table(small);
    }));
    CHECK(stops([&] { m.ref_count(8); }));
    m.check_invariants();
}

TEST_CASE("what follows a block that is not written is not cached before it") {
    BlockManager             m({8, 4});
    const std::vector<Token> whole = text(13);
    const TableId            first = m.open_table();
    REQUIRE(m.allocate(first, text(8))); // two blocks that others can find, of which a step writes the first
    m.will_write({first, 0, 4});
    step(m);
    m.publish(first, text(8), 4);
    const TableId apart = m.open_table(); // the same text, computed without the cache
    REQUIRE(m.allocate(apart, text(12), 0, false));
    step(m);
    m.publish(apart, text(12), 12);
    m.check_invariants();
    m.close_table(apart);
    const TableId last = m.open_table();
    REQUIRE(m.allocate(last, whole));
    m.will_write({first, 4, 4});
    CHECK(m.n_readable(last, m.next_unwritten(last, 0, 13)) == 4); // the next four are written in this step
    step(m);
    m.publish(first, text(8), 8);
    CHECK(m.n_readable(last, 8) == 8);
}

TEST_CASE("markers are as many as the running texts need, and bounded for very long contexts", "[paging]") {
    CHECK(markers_for(100, 16, 4, 1024) == 2 * 4 * (64 + 2) + 2 * 100);
    CHECK(markers_for(100, 16, 64, 1 << 20) == (1 << 18) + 2 * 100);
    CHECK(markers_for(100, 1, 4096, 1 << 30) == (1 << 18) + 2 * 100); // the product is more than an int
}
