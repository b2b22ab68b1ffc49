// Cache groups in the block manager: windows, entries of several blocks, layouts, recurrent states and their checkpoints.
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
import quire.paging.snapshot;
import quire.paging.block;
import quire.core.std;

#include "block_tools.h"

using namespace quire;
using namespace quire::testing;

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

// Blocks are contiguous where layers have several shapes, or codes. Of K and V of different types K is the larger one, and a layer is never cut.
TEST_CASE("a block of several shapes of layers wastes at most 2 % of the pool", "[blocks]") {
    struct Layers {
        int n, window, kv_heads, head_dim;
    };
    struct Expected {
        std::vector<Layers> groups;
        KvTypes             types;
        std::size_t         block;      // bytes
        std::vector<int>    blocks;     // of the entries
        int                 halved = 0; // layers with K and V in two blocks
        double              waste  = 0.02;
    };
    const std::vector<Layers> gemma4{{5, 0, 2, 512}, {25, 1024, 8, 256}}, // 26B-A4B
        gemma3_1b{{4, 0, 1, 256}, {22, 512, 1, 256}}, gemma3_4b{{5, 0, 4, 256}, {29, 1024, 4, 256}},
        gemma3_12b{{8, 0, 8, 256}, {40, 1024, 8, 256}}, gemma3_27b{{10, 0, 16, 128}, {52, 1024, 16, 128}},
        gpt_oss{{12, 0, 8, 64}, {12, 128, 8, 64}}, llama{{32, 0, 8, 128}};
    const KvTypes mixed{DType::F16, DType::I8};
    for (const Expected& e :
         {Expected{gemma4, DType::F16, 320 << 10, {1, 10}, 5}, Expected{gemma4, DType::I8, 650 * 256, {1, 10}, 5},
          Expected{gemma4, DType::F8, 650 * 256, {1, 10}, 5}, Expected{gemma4, mixed, 1160 * 256, {1, 9}, 0, 0.171},
          Expected{gemma3_1b, DType::I8, 65 * 256, {2, 11}}, Expected{gemma3_1b, mixed, 98 * 256, {2, 11}},
          Expected{gemma3_4b, DType::I8, 130 * 256, {5, 29}}, Expected{gemma3_12b, DType::I8, 2080 * 256, {1, 5}},
          Expected{gemma3_27b, DType::I8, 528 * 256, {5, 26}}, Expected{gpt_oss, DType::I8, 816 * 256, {1, 1}},
          Expected{llama, DType::I8, 4224 * 256, {1}}}) {
        CAPTURE(e.groups[0].n, e.groups[0].kv_heads, e.groups[0].head_dim, int(e.types.k), int(e.types.v));
        std::vector<LayerCache> layers;
        for (const Layers& l : e.groups) {
            std::vector<CacheArray> arrays{{e.types.k, l.kv_heads, l.head_dim}, {e.types.v, l.kv_heads, l.head_dim}};
            for (const DType type : {e.types.k, e.types.v})
                if (has_scales(type)) arrays.push_back({DType::F32, l.kv_heads, 1});
            for (int i = 0; i < l.n; i++) layers.push_back({l.window, arrays});
        }
        const CacheLayout made = make_cache_layout(layers, 131072, 16);
        CHECK(made.block_bytes == e.block);
        CHECK(made.parts() == e.blocks);
        CHECK(made.waste() <= e.waste);
        int halved = 0;
        for (const CacheGroup& g : made.groups) {
            std::set<std::pair<int, int>> places;
            for (std::size_t i = 0; i < g.layers.size(); i++) {
                const auto k = g.place(i), v = g.place(i, true);
                halved += k.block != v.block;
                for (const auto& p : {k, v}) {
                    CHECK((p.block < g.blocks && p.nth < g.layers_per_block));
                    places.emplace(p.block, p.nth);
                }
            }
            CHECK(places.size() == g.layers.size() * (g.halves ? 2 : 1));
            const std::size_t of_place = g.layer.bytes(16) / (g.halves ? 2 : 1);
            CHECK(std::size_t(g.layers_per_block) * of_place <= made.block_bytes);
        }
        CHECK(halved == e.halved);
    }
}

// A state counts with the blocks of 512 tokens; a layer of K and V is never cut.
TEST_CASE("K and V and states take blocks of one size and waste at most 2 % of the pool", "[blocks]") {
    struct Expected {
        int         full, kv_heads, head_dim, recurrent;
        std::size_t floats; // of a layer's state
        std::size_t block;  // KiB
        int         unit;   // blocks
        DType       type = DType::F16;
    };
    for (const Expected& e : {Expected{16, 4, 256, 48, 3 * 10240 + 48 * 128 * 128, 1024, 150}, // Qwen3.5 27B
                              Expected{10, 2, 256, 30, 3 * 8192 + 32 * 128 * 128, 320, 201},   // Qwen3.5 35B-A3B
                              Expected{16, 4, 256, 48, 3 * 10240 + 48 * 128 * 128, 520, 295, DType::I8},
                              Expected{6, 8, 64, 10, 2 * 1024, 192, 1},                   // LFM2 350M
                              Expected{4, 8, 128, 27, 3 * 12288 + 10240 * 128, 256, 556}, // Nemotron Nano 9B
                              Expected{0, 0, 0, 64, 3 * 5376 + 5120 * 128, 167872, 1}}) { // Mamba-2 2.7B
        CAPTURE(e.full, e.recurrent);
        std::vector<LayerCache> layers;
        std::vector<CacheArray> arrays(2, {e.type, e.kv_heads, e.head_dim});
        if (has_scales(e.type)) arrays.resize(4, {DType::F32, e.kv_heads, 1});
        for (int i = 0; i < e.full; i++) layers.push_back({0, arrays, 0});
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

TEST_CASE("a state that is noted at the end of a block becomes a checkpoint when the answer ends", "[blocks]") {
    const bool               attends = GENERATE(true, false);
    BlockManager             m({.n_blocks = 60, .block_size = 4, .n_swap = 40, .layout = with_states(attends)});
    const std::vector<Token> tokens = text(40);
    const TableId            t      = m.open_table();
    REQUIRE(m.allocate(t, std::span(tokens).first(7)));
    CHECK_FALSE(m.keep_last(t, tokens)); // none is noted
    run_to(m, t, tokens, 8);
    const BlockId first = m.state_from(t);
    m.note_last(t);
    const int held = m.n_held(t);
    m.check_invariants();
    run_to(m, t, tokens, 9); // beside it
    CHECK(m.state_from(t) != first);
    CHECK(m.ref_count(first) == 1);
    CHECK_FALSE(m.is_cached(first));
    CHECK(m.n_held(t) == held + 3 + (attends ? 1 : 0));
    const BlockId second = m.state_from(t);
    run_to(m, t, tokens, 11); // in place
    CHECK(m.state_from(t) == second);
    // A step that is planned before the end of the next block has run writes to the unit of the old one.
    REQUIRE(m.allocate_slots(std::array{Write{t, 11, 1}}));
    REQUIRE(m.take_next(t));
    REQUIRE(m.take_next(t)); // once
    CHECK(m.state_to(t) == second);
    CHECK(m.state_after(t) == first);
    m.check_invariants();
    m.will_write({t, 11, 1});
    step(m);
    m.advance(t, 12);
    m.publish(t, tokens, 12);
    CHECK(m.state_from(t) == second);
    CHECK(m.state_to(t) == first);
    m.note_last(t);
    m.check_invariants();
    run_to(m, t, tokens, 14);
    CHECK(m.state_from(t) == first);
    CHECK(m.ref_count(second) == 1);
    // A fork does not have it.
    const TableId child = m.fork_table(t);
    CHECK_FALSE(m.keep_last(child, tokens));
    m.close_table(child);
    REQUIRE(m.keep_last(t, tokens));
    CHECK_FALSE(m.keep_last(t, tokens)); // others find it already
    m.check_invariants();
    m.close_table(t);
    CHECK(m.n_used() == 0);
    CHECK(m.is_cached(second));
    const TableId next = m.open_table();
    REQUIRE(m.allocate(next, std::span(tokens).first(20)));
    CHECK(m.state_at(next) == 12);
    CHECK(m.state_from(next) == second);
    // The noted state goes where its memory is needed, and with a swap.
    run_to(m, next, tokens, 16);
    m.note_last(next);
    CHECK_FALSE(m.drop_last()); // it is the state still
    run_to(m, next, tokens, 20);
    const int free = m.n_free();
    REQUIRE(m.drop_last());
    CHECK_FALSE(m.drop_last());
    CHECK(m.n_free() == free + 3);
    m.note_last(next);
    REQUIRE(m.swap_out(std::array{next}));
    CHECK_FALSE(m.keep_last(next, tokens));
    CHECK(m.n_used() == 0);
    m.check_invariants();
    m.close_table(next);
    m.drop_cache();
    CHECK(m.n_free() == 60);
    m.check_invariants();
}

TEST_CASE("a swap that finds no room leaves the table as it was", "[blocks]") {
    BlockManager             m({.n_blocks = 60, .block_size = 4, .n_swap = 2, .layout = with_states(true)});
    const std::vector<Token> tokens = text(40);
    const TableId            t      = m.open_table();
    REQUIRE(m.allocate(t, std::span(tokens).first(7)));
    run_to(m, t, tokens, 8);
    m.note_last(t);
    run_to(m, t, tokens, 9);
    const int held = m.n_held(t);
    CHECK_FALSE(m.swap_out(std::array{t}));
    CHECK(m.n_held(t) == held);
    m.check_invariants();
    CHECK(m.keep_last(t, tokens)); // a preemption for recomputation goes on from the noted state
    m.close_table(t);
    m.check_invariants();
}

TEST_CASE("where there is no room for another state, one that is noted is written over", "[blocks]") {
    BlockManager             m({.n_blocks = 8, .block_size = 4, .layout = with_states()});
    const std::vector<Token> tokens = text(20);
    const TableId            t      = m.open_table();
    REQUIRE(m.allocate(t, std::span(tokens).first(12))); // 3 blocks, and 3 of the state
    run_to(m, t, tokens, 8);
    const BlockId state = m.state_from(t);
    m.note_last(t);
    CHECK_FALSE(m.take_next(t)); // 2 blocks are free, a state has 3
    run_to(m, t, tokens, 12);
    CHECK(m.state_from(t) == state);
    CHECK(m.ref_count(state) == 1);
    CHECK_FALSE(m.keep_last(t, tokens));
    m.check_invariants();
    m.close_table(t);
    CHECK(m.n_used() == 0);
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

TEST_CASE("a state that comes back is not found at an entry that another sequence has yet to write", "[blocks]") {
    BlockManager             m({.n_blocks = 16, .block_size = 4, .n_swap = 20, .layout = with_states(), .n_tier = 20});
    const std::vector<Token> tokens = text(9);
    const TableId            t      = m.open_table();
    REQUIRE(m.allocate(t, tokens));
    run_to(m, t, tokens, 8);
    REQUIRE(m.keep_state(t, tokens));
    REQUIRE(m.swap_out(std::array{t}));
    step(m);
    const TableId other = m.open_table();
    REQUIRE(m.allocate_slots(other, 0, 52)); // the whole pool: the text goes on in host memory
    step(m);
    m.close_table(other);
    const TableId again = m.open_table();
    REQUIRE(m.allocate(again, std::span(tokens).first(8))); // enters both blocks once more
    REQUIRE(m.swap_in(std::array{t}));
    step(m);
    CHECK_FALSE(m.is_cached(m.state_from(t)));
    run_to(m, again, tokens, 8);
    REQUIRE(m.keep_state(t, tokens));
    CHECK(m.is_cached(m.state_from(t)));
    m.close_table(t);
    m.close_table(again);
    m.check_invariants();
}

TEST_CASE("a snapshot names the entry of each further block", "[blocks]") {
    CacheLayout layout = with_states();
    layout.groups.insert(layout.groups.begin() + 1, CacheGroup{8, 3, {}, {}});
    BlockManager             m({.n_blocks = 40, .block_size = 4, .layout = layout});
    const std::vector<Token> tokens = text(18);
    const TableId            t      = m.open_table();
    REQUIRE(m.allocate(t, tokens));
    run_to(m, t, tokens, 18);
    Snapshot s;
    m.view(s);
    std::set<BlockId> named; // by the tables
    for (int g = 0; g < 2; g++)
        for (BlockId block : m.blocks(t, g)) named.insert(block);
    named.insert(m.state_from(t));
    int n_further = 0;
    for (BlockId id = 0; id < m.n_blocks(); id++) {
        const BlockView& b = s.blocks[std::size_t(id)];
        if (b.ref_count == 0) continue;
        CAPTURE(id, b.first);
        CHECK(named.contains(id) == (b.first < 0));
        if (b.first < 0) continue;
        CHECK(named.contains(b.first));
        CHECK(s.blocks[std::size_t(b.first)].group == b.group);
        n_further++;
    }
    CHECK(n_further == 2 * 5 + 2); // 5 entries of 3 blocks, and a state of 3
    m.close_table(t);
}

TEST_CASE("changes of the cache say what the layers of a group see", "[blocks]") {
    CacheLayout layout = with_states();
    layout.groups.insert(layout.groups.begin() + 1, {CacheGroup{0, 2, {}, {}}, CacheGroup{8, 1, {}, {}}});
    BlockManager m({.n_blocks = 40, .block_size = 4, .layout = layout});
    m.log_cache(true);
    const std::vector<Token> tokens = text(9);
    const TableId            t      = m.open_table();
    REQUIRE(m.allocate(t, tokens));
    run_to(m, t, tokens, 8);
    REQUIRE(m.keep_state(t, tokens));
    std::set<std::array<int, 3>> seen; // group, window, state
    for (const CacheChange& change : m.take_cache_changes()) seen.insert({change.group, change.window, change.state});
    CHECK(seen == std::set<std::array<int, 3>>{{0, 0, 0}, {1, 0, 0}, {2, 8, 0}, {3, 0, 1}});
    m.close_table(t);
}
