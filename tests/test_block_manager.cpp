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

using namespace quire;

namespace {

std::vector<Token> text(int n, Token first = 0) {
    std::vector<Token> tokens(static_cast<std::size_t>(n));
    std::iota(tokens.begin(), tokens.end(), first);
    return tokens;
}

std::vector<BlockId> table_of(const BlockManager& m, TableId t) {
    auto ids = m.blocks(t);
    return {ids.begin(), ids.end()};
}

// Runs the step that a scheduler would: the moves go out, everything announced is written.
std::vector<BlockCopy> step(BlockManager& m) {
    BlockMoves moves;
    m.take_moves(moves);
    m.commit();
    m.check_invariants();
    return moves.copies;
}

// A sequence as the scheduler would keep it, its prompt written in one step.
TableId filled(BlockManager& m, std::span<const Token> tokens, const CacheNamespace& space = {}) {
    const TableId t = m.open_table(space);
    REQUIRE(m.allocate(t, tokens));
    const int n = int(tokens.size()), first = m.next_unwritten(t, 0, n);
    REQUIRE(m.allocate_slots(t, n - 1, 1));
    m.will_write({t, first, n - first});
    step(m);
    m.publish(t, tokens, n);
    return t;
}

// The leading tokens that a new sequence would find.
int found(BlockManager& m, std::span<const Token> tokens, const CacheNamespace& space = {}) {
    const TableId t = m.open_table(space);
    REQUIRE(m.allocate(t, tokens));
    const int n = m.next_unwritten(t, 0, int(tokens.size()));
    step(m);
    m.close_table(t);
    return n;
}

} // namespace

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
    REQUIRE(m.allocate(first, a, 0, false)); // both compute, as those do who want every row
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

    // Who still has all of it brings it back with the next block that is full.
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

TEST_CASE("blocks behind a window are given back once, stay cached, and follow a fork and a swap", "[blocks]") {
    CacheLayout layout;
    layout.groups[0].window = 9;
    BlockManager       m({.n_blocks = 12, .block_size = 4, .n_swap = 8, .layout = layout});
    std::vector<Token> tokens(20);
    std::iota(tokens.begin(), tokens.end(), 1);
    const TableId t = m.open_table();
    REQUIRE(m.allocate(t, tokens));
    m.will_write({t, 0, 20});
    m.commit();
    m.publish(t, tokens, 20);
    const std::vector<BlockId> before(m.blocks(t).begin(), m.blocks(t).end());
    CHECK(m.release_behind(t, 11) == 0); // position 3 is seen, in the first block
    CHECK(m.release_behind(t, 19) == 2);
    CHECK(m.release_behind(t, 19) == 0);
    CHECK(m.n_released(t) == 2);
    CHECK(m.blocks(t)[1] == released_block);
    CHECK(m.blocks(t)[2] == before[2]);
    CHECK(m.n_used() == 3);
    CHECK(m.n_held(t) == 3);
    CHECK(m.is_cached(before[0]));
    m.check_invariants();
    const TableId child = m.fork_table(t);
    CHECK(m.n_released(child) == 2);
    CHECK(m.ref_count(before[2]) == 2);
    CHECK(m.distinct_blocks(std::array{t, child}) == 3);
    REQUIRE(m.swap_out(std::array{t, child}));
    CHECK(m.n_swap_free() == 5);
    CHECK(m.n_used() == 0);
    REQUIRE(m.swap_in(std::array{t, child}));
    CHECK(m.n_used() == 3);
    CHECK(m.blocks(child)[0] == released_block);
    m.check_invariants();
    // Its prefix goes from the cache; what the sequence fills later has no name, and nothing breaks.
    m.close_table(child);
    m.drop_cache();
    tokens.resize(28, 7);
    REQUIRE(m.allocate_slots(t, 20, 8));
    m.publish(t, tokens, 28);
    CHECK(m.release_behind(t, 32) == 4);
    m.check_invariants();
    m.close_table(t);
    CHECK(m.n_used() == 0);
    m.check_invariants();
}

TEST_CASE("a prefix is found where a window's last blocks are left, though the first ones are gone", "[blocks]") {
    CacheLayout layout;
    layout.groups[0].window = 8;
    const bool with_all     = GENERATE(false, true); // beside a group that keeps all
    if (with_all) layout.groups.insert(layout.groups.begin(), CacheGroup{});
    BlockManager       m({.n_blocks = with_all ? 14 : 6, .block_size = 4, .layout = layout});
    std::vector<Token> tokens(24);
    std::iota(tokens.begin(), tokens.end(), 1);
    const int     window = with_all; // its group
    const TableId t      = m.open_table();
    for (int n = 4; n <= 24; n += 4) {
        REQUIRE(m.allocate_slots(t, n - 4, 4));
        m.commit();
        m.publish(t, tokens, n);
        m.release_behind(t, n);
    }
    CHECK(m.n_released(t, window) == 4);
    m.close_table(t);
    const TableId other = m.open_table(); // takes the oldest blocks: of positions 0 to 15
    REQUIRE(m.allocate_slots(other, 0, 8));
    tokens.resize(27, 99);
    const TableId again = m.open_table();
    REQUIRE(m.allocate(again, tokens));
    CHECK(m.next_unwritten(again, 0, 27) == 24);
    CHECK(m.n_released(again, window) == 4);
    CHECK(m.n_found(again) == 6);
    m.check_invariants();
}

TEST_CASE("an entry of several blocks is taken, shared, copied and given back as one", "[blocks]") {
    CacheLayout layout;
    layout.groups = {CacheGroup{0, 1, {}, {}}, CacheGroup{8, 3, {}, {}}};
    BlockManager  m({.n_blocks = 16, .block_size = 4, .n_swap = 8, .layout = layout});
    const TableId t = m.open_table();
    REQUIRE(m.allocate_slots(t, 0, 6));
    CHECK(m.n_used() == 8);
    CHECK(m.n_held(t) == 8);
    const TableId child = m.fork_table(t);
    CHECK(m.n_used() == 8);
    REQUIRE(m.allocate_slots(child, 6, 1)); // both groups' last entries are copied
    CHECK(m.n_used() == 12);
    BlockMoves moves;
    m.take_moves(moves);
    REQUIRE(moves.copies.size() == 4);
    BlockId from = m.blocks(t, 1)[1], to = m.blocks(child, 1)[1];
    for (std::size_t i = 1; i < 4; i++, from = m.next_of(from), to = m.next_of(to)) {
        CHECK(moves.copies[i].from == from);
        CHECK(moves.copies[i].to == to);
    }
    REQUIRE(m.swap_out(std::array{child}));
    CHECK(m.n_swap_free() == 0);
    m.check_invariants();
    CHECK_FALSE(m.swap_out(std::array{t}));
    m.close_table(t);
    CHECK(m.n_used() == 0);
    REQUIRE(m.swap_in(std::array{child}));
    CHECK(m.n_used() == 8);
    m.check_invariants();
    m.close_table(child);
    CHECK(m.n_free() == 16);
    m.check_invariants();
}

TEST_CASE("a layout puts layers with equal caches together and wastes at most 2 % of the pool", "[blocks]") {
    const std::vector<CacheArray> arrays{{DType::F16, 8, 128}, {DType::F16, 8, 128}};
    const auto                    layout = [&](int n, int period, int window, int context) {
        std::vector<LayerCache> layers;
        for (int i = 0; i < n; i++) layers.push_back({period > 0 && (i + 1) % period == 0 ? 0 : window, arrays});
        return make_cache_layout(layers, context);
    };
    struct Expected {
        int n, period, window, context;
        int all, windowed, layers_per_block; // blocks of an entry
    };
    for (const Expected& e : {Expected{24, 2, 128, 131072, 1, 1, 12},  // gpt-oss-20b
                              Expected{48, 6, 1024, 131072, 1, 5, 8},  // Gemma 3 12B
                              Expected{62, 6, 1024, 131072, 5, 26, 2}, // Gemma 3 27B
                              Expected{34, 6, 1024, 131072, 5, 29, 1}, // Gemma 3 4B
                              Expected{42, 2, 4096, 8192, 1, 1, 21},   // Gemma 2 9B
                              Expected{42, 2, 4096, 4096, 1, 0, 42},   // its context is no longer than its window
                              Expected{32, 0, 4096, 32768, 0, 1, 32},  // Mistral 7B
                              Expected{32, 1, 0, 32768, 1, 0, 32}}) {
        CAPTURE(e.n, e.period, e.window);
        const CacheLayout made = layout(e.n, e.period, e.window, e.context);
        CHECK(made.groups[0].layers_per_block == e.layers_per_block);
        CHECK(made.waste() <= 0.02);
        CHECK(made.keeps_all() == (e.all > 0));
        REQUIRE(made.groups.size() == std::size_t((e.all > 0) + (e.windowed > 0)));
        if (e.all > 0) CHECK(made.groups.front().blocks == e.all);
        if (e.windowed > 0) CHECK(made.groups.back().blocks == e.windowed);
        if (e.windowed > 0) CHECK(made.groups.back().window == e.window);
        std::size_t n = 0;
        for (const CacheGroup& g : made.groups) n += g.layers.size();
        CHECK(n == std::size_t(e.n));
    }
    const CacheLayout gemma = layout(48, 6, 1024, 131072);
    CHECK(gemma.blocks_per_entry() == 6);
    CHECK(gemma.blocks_at_once(32768, 16) == 2048 + 5 * 65);
    CHECK(gemma.blocks_at_once(100, 16) == 7 * 6);
    CHECK(gemma.blocks_at_once(32768, 16, true) == 2048 * 6);
}

// A state counts with the blocks of 512 tokens; a layer of K and V is never cut.
TEST_CASE("K and V and states take blocks of one size and waste at most 2 % of the pool", "[blocks]") {
    struct Expected {
        int         full, kv_heads, head_dim, recurrent;
        std::size_t floats; // of a layer's state
        std::size_t block;  // KiB
        int         unit;   // blocks
    };
    for (const Expected& e : {Expected{16, 4, 256, 48, 3 * 10240 + 48 * 128 * 128, 1024, 150}, // Qwen3.5 27B
                              Expected{10, 2, 256, 30, 3 * 8192 + 32 * 128 * 128, 320, 201},   // Qwen3.5 35B-A3B
                              Expected{6, 8, 64, 10, 2 * 1024, 192, 1},                        // LFM2 350M
                              Expected{4, 8, 128, 27, 3 * 12288 + 10240 * 128, 256, 556},      // Nemotron Nano 9B
                              Expected{0, 0, 0, 64, 3 * 5376 + 5120 * 128, 167872, 1}}) {      // Mamba-2 2.7B
        CAPTURE(e.full, e.recurrent);
        std::vector<LayerCache> layers;
        const CacheArray        array{DType::F16, e.kv_heads, e.head_dim};
        for (int i = 0; i < e.full; i++) layers.push_back({0, {array, array}, 0});
        for (int i = 0; i < e.recurrent; i++) layers.push_back({0, {}, e.floats * 4});
        const CacheLayout made = make_cache_layout(layers, 131072, 16);
        CHECK(made.block_bytes == e.block * 1024);
        CHECK(made.blocks_per_unit() == e.unit);
        CHECK(made.blocks_per_entry() == (e.full > 0 ? 1 : 0));
        CHECK(made.waste() <= 0.02);
        CHECK(made.keeps_all() == (e.full > 0));
        CHECK(made.blocks_at_once(8000, 16) == (e.full > 0 ? 500 : 0) + e.unit);
    }
}

// -- recurrent states

namespace {

// Layers that attend, with blocks of one block to an entry, and layers with states of 3 blocks; or the states alone.
CacheLayout with_states(bool attends = true) {
    CacheLayout layout;
    CacheGroup  state;
    state.blocks      = 3;
    state.layer.state = 700;
    if (!attends) layout.groups.clear();
    layout.groups.push_back(state);
    layout.block_bytes = 256;
    return layout;
}

// The tokens from the end of the state up to n run in a step.
void run_to(BlockManager& m, TableId t, std::span<const Token> tokens, int n) {
    const int from = m.state_at(t);
    REQUIRE(m.allocate_slots(std::array{Write{t, from, n - from}}));
    m.will_write({t, from, n - from});
    step(m);
    m.advance(t, n);
    m.publish(t, tokens, n);
}

} // namespace

TEST_CASE("a state is written in place until others share it, and then beside it", "[blocks]") {
    const bool               attends = GENERATE(true, false);
    BlockManager             m({.n_blocks = 40, .block_size = 4, .n_swap = 20, .layout = with_states(attends)});
    const std::vector<Token> tokens = text(30);
    const int                kv     = attends ? 1 : 0; // blocks of an entry
    const TableId            t      = m.open_table();
    REQUIRE(m.allocate(t, std::span(tokens).first(10)));
    CHECK(m.n_used() == 3 * kv + 3);
    CHECK(m.state_from(t) == -1); // zeros
    const BlockId first = m.state_to(t);
    REQUIRE(first >= 0);
    run_to(m, t, tokens, 6);
    CHECK(m.state_from(t) == first);
    CHECK(m.state_to(t) == first);
    CHECK(m.next_unwritten(t, 0, 10) == 6);
    run_to(m, t, tokens, 10);
    CHECK(m.state_to(t) == first);
    // A fork: both read the state, and neither writes it.
    const TableId child = m.fork_table(t);
    CHECK(m.state_from(child) == first);
    const std::array writes{Write{t, 10, 1}, Write{child, 10, 1}};
    CHECK(m.blocks_to_write(writes) == 6 + kv);
    REQUIRE(m.allocate_slots(writes));
    CHECK(m.state_from(t) == first);
    CHECK(m.state_from(child) == first);
    CHECK(m.state_to(t) != first);
    CHECK(m.state_to(child) != first);
    CHECK(m.state_to(child) != m.state_to(t));
    m.check_invariants();
    step(m);
    m.advance(t, 11);
    CHECK(m.ref_count(first) == 1);
    m.advance(child, 11);
    CHECK(m.ref_count(first) == 0);
    // The tokens of a step may have to run again: the state before them stays.
    const BlockId own = m.state_from(t);
    REQUIRE(m.allocate_slots(std::array{Write{t, 11, 1, true}}));
    CHECK(m.state_to(t) != own);
    step(m); // and nothing advances
    CHECK(m.state_from(t) == own);
    m.check_invariants();
    // Both go to the swap pool and come back.
    REQUIRE(m.swap_out(std::array{t, child}));
    CHECK(m.n_used() == 0);
    CHECK(m.n_swap() - m.n_swap_free() == (3 + 1) * kv + 6);
    m.check_invariants();
    BlockMoves moves;
    m.take_moves(moves);
    REQUIRE(m.blocks_to_swap_in(std::array{t, child}) <= m.n_free());
    REQUIRE(m.swap_in(std::array{t, child}));
    CHECK(m.state_at(t) == 11);
    CHECK(m.state_from(t) != m.state_from(child));
    m.check_invariants();
    m.close_table(t);
    m.close_table(child);
    m.drop_cache();
    CHECK(m.n_free() == 40);
    m.check_invariants();
}

TEST_CASE("a prompt goes on behind the last checkpoint that it begins with", "[blocks]") {
    const bool               attends = GENERATE(true, false);
    BlockManager             m({.n_blocks = 60, .block_size = 4, .n_swap = 20, .layout = with_states(attends)});
    const std::vector<Token> tokens = text(40);
    const TableId            t      = m.open_table();
    REQUIRE(m.allocate(t, std::span(tokens).first(23)));
    run_to(m, t, tokens, 3);
    CHECK_FALSE(m.keep_state(t, tokens)); // not at the end of a block
    run_to(m, t, tokens, 8);
    const BlockId kept = m.state_from(t);
    REQUIRE(m.keep_state(t, tokens));
    CHECK(m.is_cached(kept));
    run_to(m, t, tokens, 23);
    CHECK(m.state_from(t) != kept); // the next step has written beside it
    CHECK(m.is_cached(kept));
    CHECK(m.ref_count(kept) == 0);
    m.check_invariants();
    // K and V are there for 20 tokens, a state for 8: before, at and behind the checkpoint.
    for (auto [n, found] : {std::pair(8, 0), std::pair(9, 8), std::pair(21, 8), std::pair(40, 8)}) {
        CAPTURE(n);
        const TableId next = m.open_table();
        REQUIRE(m.allocate(next, std::span(tokens).first(std::size_t(n))));
        CHECK(m.n_found(next) * 4 == found);
        CHECK(m.state_at(next) == found);
        CHECK(m.next_unwritten(next, 0, n) == found);
        CHECK(m.state_from(next) == (found > 0 ? kept : -1));
        CHECK(m.state_to(next) != kept);
        m.check_invariants();
        m.close_table(next);
    }
    // Two at once share the state and no block behind it.
    const TableId a = m.open_table(), b = m.open_table();
    REQUIRE(m.allocate(a, std::span(tokens).first(17)));
    REQUIRE(m.allocate(b, std::span(tokens).first(17)));
    CHECK(m.ref_count(kept) == 2);
    CHECK(m.state_to(a) != m.state_to(b));
    if (attends) CHECK(m.blocks(a)[2] != m.blocks(b)[2]);
    run_to(m, a, tokens, 16);
    REQUIRE(m.keep_state(a, tokens));
    run_to(m, b, tokens, 16);
    CHECK(m.keep_state(b, tokens)); // there is one already
    CHECK(m.state_to(b) == m.state_from(b));
    m.check_invariants();
    m.close_table(a);
    m.close_table(b);
    m.close_table(t);
    // Another text finds nothing, and A finds its own again.
    const std::vector<Token> other(23, 9);
    const TableId            o = m.open_table();
    REQUIRE(m.allocate(o, other));
    CHECK(m.state_from(o) == -1);
    run_to(m, o, other, 23);
    m.close_table(o);
    const TableId again = m.open_table();
    REQUIRE(m.allocate(again, std::span(tokens).first(20)));
    CHECK(m.state_at(again) == 16);
    m.close_table(again);
    m.drop_cache();
    CHECK(m.n_free() == 60);
    m.check_invariants();
}

TEST_CASE("where there is no room for another state, one that only the cache could find is written over", "[blocks]") {
    BlockManager             m({.n_blocks = 8, .block_size = 4, .layout = with_states()});
    const std::vector<Token> tokens = text(20);
    const TableId            t      = m.open_table();
    REQUIRE(m.allocate(t, std::span(tokens).first(12))); // 3 blocks, and 3 of the state
    run_to(m, t, tokens, 8);
    const BlockId kept = m.state_from(t);
    REQUIRE(m.keep_state(t, tokens));
    run_to(m, t, tokens, 12); // 2 blocks are free, a state has 3
    CHECK(m.state_from(t) == kept);
    CHECK_FALSE(m.is_cached(kept));
    m.check_invariants();
    m.close_table(t);
    const TableId next = m.open_table();
    REQUIRE(m.allocate(next, std::span(tokens).first(12)));
    CHECK(m.state_at(next) == 0);
    m.check_invariants();
}

TEST_CASE("a pinned prompt keeps its last checkpoint", "[blocks]") {
    BlockManager             m({.n_blocks = 40, .block_size = 4, .layout = with_states()});
    const std::vector<Token> tokens = text(30);
    const TableId            t      = m.open_table();
    REQUIRE(m.allocate(t, std::span(tokens).first(11), 0, true, true));
    run_to(m, t, tokens, 8);
    REQUIRE(m.keep_state(t, tokens));
    run_to(m, t, tokens, 11);
    m.pin_table(t, std::span(tokens).first(11));
    CHECK(m.n_pinned() == 3 + 3);
    CHECK(m.n_used() == 6);
    m.check_invariants();
    m.drop_cache();
    const TableId next = m.open_table();
    REQUIRE(m.allocate(next, tokens));
    CHECK(m.state_at(next) == 8);
    m.close_table(next);
    m.close_table(t);
    CHECK(m.n_pinned() == 0);
    CHECK(m.n_used() == 0);
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

TEST_CASE("what the pool evicts comes back from host memory") {
    BlockManager             m({.n_blocks = 4, .block_size = 4, .n_tier = 8});
    const std::vector<Token> a = text(16), b = text(16, 100);
    m.close_table(filled(m, a));
    m.close_table(filled(m, b)); // takes all four blocks
    CHECK(m.n_on_host() == 4);
    CHECK(m.host_stats().stored == 4);

    const TableId t = m.open_table();
    REQUIRE(m.allocate(t, a));
    CHECK(m.n_loaded(t) == 3); // the last token is computed, with its block
    CHECK(m.next_unwritten(t, 0, 16) == 12);
    BlockMoves moves;
    m.take_moves(moves);
    CHECK(moves.swap_out.size() == 4); // b leaves for a
    REQUIRE(moves.swap_in.size() == 3);
    std::set<BlockId> sources;
    for (std::size_t i = 0; i < 3; i++) {
        CHECK(moves.swap_in[i].to == m.blocks(t)[i]);
        sources.insert(moves.swap_in[i].from);
    }
    CHECK(sources.size() == 3);
    for (auto [from, to] : moves.swap_out)
        CHECK_FALSE(sources.contains(to)); // nothing is written over before it is read
    m.check_invariants();
    m.close_table(t);
    CHECK(m.n_on_host() == 8);
    CHECK(found(m, b) == 12);
    CHECK(m.host_stats().dropped == 0); // all of both is there, so nothing more had to be moved out

    m.drop_cache();
    CHECK(m.n_on_host() == 0);
    CHECK(found(m, a) == 0);
}

TEST_CASE("host memory keeps what was used last, and nothing without a tier") {
    BlockManager m({.n_blocks = 2, .block_size = 4, .n_tier = 4}), none({.n_blocks = 2, .block_size = 4});
    for (BlockManager* manager : {&m, &none})
        for (Token i = 0; i < 5; i++) manager->close_table(filled(*manager, text(8, 100 * i)));
    CHECK(m.host_stats().dropped == 4); // of eight blocks
    CHECK(found(m, text(8, 300)) == 4);
    CHECK(found(m, text(8, 0)) == 0);
    CHECK(none.host_stats().stored == 0);
    CHECK(found(none, text(8, 300)) == 0);
}

TEST_CASE("a namespace finds nothing of another one in host memory") {
    BlockManager         m({.n_blocks = 2, .block_size = 4, .n_tier = 8});
    const CacheNamespace mine = cache_namespace("mine"), yours = cache_namespace("yours");
    m.close_table(filled(m, text(8), mine));
    m.close_table(filled(m, text(8, 50)));
    CHECK(found(m, text(8), yours) == 0);
    CHECK(found(m, text(8)) == 0);
    CHECK(found(m, text(8), mine) == 4);
}

TEST_CASE("swapped requests and the tier share the pool in host memory") {
    BlockManager m({.n_blocks = 4, .block_size = 4, .n_swap = 0, .n_tier = 4});
    m.close_table(filled(m, text(16)));
    const TableId t = filled(m, text(16, 50));
    CHECK(m.n_on_host() == 4);
    REQUIRE(m.swap_out(std::array{t}));
    CHECK(m.n_on_host() == 0); // it gave way
    CHECK(m.n_swap_free() == 0);
    step(m);
    REQUIRE(m.swap_in(std::array{t}));
    step(m);
    m.close_table(t);
    CHECK(m.n_swap_free() == 4);
}
