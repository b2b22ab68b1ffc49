// The worked examples of the paper and of the lesson, played with the toy model: block by block as the documents say.
#include <catch2/catch_test_macros.hpp>

import quire.core.base;
import quire.paging.block;
import quire.paging.snapshot;
import quire.core.std;
import quire.tools.viz.walkthroughs;

using namespace quire;

namespace {

Trace played(std::string_view name) {
    Result<Trace> trace = play(name, QUIRE_ROOT "/models/quire-14m-q8_0.gguf");
    REQUIRE(trace);
    return std::move(*trace);
}

std::vector<BlockId> table(const Snapshot& s, std::size_t sequence) { return s.sequences.at(sequence).blocks; }

int refs(const Snapshot& s, BlockId b) { return s.blocks.at(std::size_t(b)).ref_count; }

using Ids = std::vector<BlockId>;

} // namespace

TEST_CASE("V2 on a real engine: the paper's Fig. 6") {
    const Trace t = played("fig6");
    REQUIRE(t.steps.size() == 4);
    CHECK(table(t.steps[0], 0) == Ids{7, 1});
    CHECK(t.steps[0].blocks[7].filled == 4);
    CHECK(t.steps[0].blocks[1].filled == 3);
    CHECK(table(t.steps[1], 0) == Ids{7, 1});
    CHECK(t.steps[1].blocks[1].filled == 4);
    CHECK(table(t.steps[2], 0) == Ids{7, 1, 3});
    CHECK(t.steps[2].blocks[3].filled == 1);
    CHECK(totals(t.steps[3]).used == 0);
}

TEST_CASE("V3 on a real engine: the paper's Fig. 8") {
    const Trace t = played("fig8");
    REQUIRE(t.steps.size() == 4);
    CHECK(table(t.steps[0], 0) == Ids{7, 1});
    CHECK(table(t.steps[0], 1) == Ids{7, 1});
    CHECK(refs(t.steps[0], 7) == 2);
    CHECK(refs(t.steps[0], 1) == 2);
    CHECK(table(t.steps[1], 0) == Ids{7, 3});
    CHECK(table(t.steps[1], 1) == Ids{7, 1});
    CHECK(refs(t.steps[1], 7) == 2);
    CHECK(refs(t.steps[1], 1) == 1);
    CHECK(refs(t.steps[1], 3) == 1);
    int copies = 0;
    for (const MemoryEvent& e : t.steps[1].events)
        if (e.kind == MemoryEventKind::copy) {
            copies++;
            CHECK(e.from == 1);
            CHECK(e.to == 3);
        }
    CHECK(copies == 1);
}

TEST_CASE("V4 on a real engine: the paper's Fig. 9") {
    const Trace t = played("fig9");
    REQUIRE(t.steps.size() > 13);
    const Snapshot &before = t.steps[11], &dead = t.steps[12], &after = t.steps[13];
    CHECK(table(before, 0) == Ids{0, 1, 3, 5});
    CHECK(table(before, 1) == Ids{0, 1, 3, 6});
    CHECK(table(before, 2) == Ids{0, 1, 3, 7});
    CHECK(table(before, 3) == Ids{0, 2, 4, 8});
    for (BlockId b : {2, 4, 5, 8}) CHECK(refs(dead, b) == 0);
    CHECK(table(after, 0) == Ids{0, 1, 3, 6, 9});
    CHECK(table(after, 1) == Ids{0, 1, 3, 6, 10});
    CHECK(table(after, 2) == Ids{0, 1, 3, 7, 11});
    CHECK(table(after, 3) == Ids{0, 1, 3, 7, 12});
    for (BlockId b : {0, 1, 3}) CHECK(refs(after, b) == 4);
    for (BlockId b : {6, 7}) CHECK(refs(after, b) == 2);
    for (const Snapshot& s : t.steps)
        for (const MemoryEvent& e : s.events) CHECK(e.kind != MemoryEventKind::copy);
}

TEST_CASE("V5 on a real engine: the lesson's pool") {
    const Trace t = played("lesson");
    REQUIRE(t.steps.size() >= 18);
    CHECK(totals(t.steps[0]).used == 4);
    for (BlockId b : table(t.steps[0], 0)) CHECK(refs(t.steps[0], b) == 4);
    CHECK(totals(t.steps[1]).used == 8);
    CHECK(totals(t.steps[10]).used == 8);
    CHECK(t.steps[10].sequences[0].n_computed == 74);
    CHECK(totals(t.steps[10]).saved == 1 - 8.0 / 20);
    CHECK(totals(t.steps[16]).used == 8);
    CHECK(totals(t.steps[17]).used == 12); // the 17th token of each beam
}

TEST_CASE("a swap on a real engine") {
    const Trace t   = played("swap");
    int         out = 0, in = 0;
    for (const Snapshot& s : t.steps) {
        for (const MemoryEvent& e : s.events) {
            out += e.kind == MemoryEventKind::swap_out && e.from >= 0;
            in += e.kind == MemoryEventKind::swap_in && e.from >= 0;
        }
        if (s.n_swap_used > 0) CHECK(s.sequences.back().status == ViewStatus::swapped);
    }
    CHECK(out > 0);
    CHECK(in > 0);
    CHECK(in <= out); // less what the cache still had
    CHECK(t.steps.back().n_swap_used == 0);
}

TEST_CASE("every walk-through has a name, and another name is an error") {
    CHECK(walkthroughs().size() == 5);
    CHECK_FALSE(play("fig7", QUIRE_ROOT "/models/quire-14m-q8_0.gguf"));
    CHECK_FALSE(play("fig6", "/nowhere.gguf"));
}
