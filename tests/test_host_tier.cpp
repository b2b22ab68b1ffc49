// The tier in host memory: what it keeps, for whom, and how it shares its pool with swapped requests.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "process.h"

import quire.core.base;
import quire.paging.block_manager;
import quire.paging.cache_layout;
import quire.paging.host_tier;
import quire.core.tensor;
import quire.paging.block_hash;
import quire.paging.block_index;
import quire.paging.prefix_cache;
import quire.paging.block;
import quire.core.std;

#include "block_tools.h"

using namespace quire;
using namespace quire::testing;

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

TEST_CASE("texts that have no room together keep their beginnings, and what comes back often stays") {
    BlockManager m({.n_blocks = 4, .block_size = 4, .n_tier = 20});
    int          n_found = 0;
    for (int round = 0; round < 8; round++)
        for (Token i = 0; i < 7; i++) { // of four blocks each, one after the other
            if (round == 7) n_found += found(m, text(16, 100 * i));
            m.close_table(filled(m, text(16, 100 * i)));
            m.check_invariants();
        }
    CHECK(n_found > 0); // by recency alone nothing

    BlockManager often({.n_blocks = 4, .block_size = 4, .n_tier = 16});
    for (int i = 0; i < 30; i++) {
        if (i % 4 == 0) often.close_table(filled(often, text(16)));
        often.close_table(filled(often, text(16, Token(100 + 100 * i)))); // never again
        often.check_invariants();
    }
    CHECK(found(often, text(16)) == 12);
}

TEST_CASE("files get later what they could not take at once") {
    BlockManager m({.n_blocks = 8, .block_size = 4, .n_tier = 8, .for_files = ForFiles::shared});
    m.close_table(filled(m, text(32)));
    std::set<std::uint64_t> offered;
    std::vector<HostUnit>   some;
    do {
        step(m); // the moves are taken
        some = m.host().take_saved();
        CHECK(some.size() <= 3); // a quarter of the pool, and the one that exceeds it
        for (const HostUnit& unit : some) {
            CHECK(offered.insert(unit.serial).second);
            m.host().give_back(unit.unit); // written
        }
        m.check_invariants();
    } while (!some.empty());
    CHECK(offered.size() == 8);
    CHECK_FALSE(m.host().has_late());
    m.close_table(filled(m, text(32))); // files have them
    step(m);
    CHECK(m.host().take_saved().empty());
}

TEST_CASE("files are offered again what they have refused or lost, when its text is used again") {
    BlockManager m({.n_blocks = 8, .block_size = 4, .n_tier = 64, .for_files = ForFiles::shared});
    const auto   use     = [&] { m.host().offer(m.known({}, text(16)).texts); };
    const auto   written = [&](bool is_there) {
        const std::vector<HostUnit> units = m.host().take_saved();
        for (const HostUnit& unit : units) m.host().give_back(unit.unit, is_there);
        m.check_invariants();
        return units;
    };
    m.close_table(filled(m, text(16)));
    step(m);
    CHECK(written(false).size() == 4);
    CHECK_FALSE(m.host().has_saved()); // not before the text is used
    CHECK_FALSE(m.host().has_late());
    use();
    const std::vector<HostUnit> units = written(true);
    REQUIRE(units.size() == 4);
    use();
    CHECK_FALSE(m.host().has_saved()); // files have them
    m.host().files_lost({{units[1].serial, 0}, {units[2].serial, 1}, {units[3].serial + 1, 0}});
    CHECK_FALSE(m.host().has_saved());
    use();
    const std::vector<HostUnit> again = written(true);
    REQUIRE(again.size() == 1);
    CHECK(again[0].serial == units[1].serial);
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

TEST_CASE("a request that comes back is not cached behind an entry that another one has yet to write") {
    BlockManager             m({.n_blocks = 6, .block_size = 4, .n_swap = 4, .n_tier = 12});
    const std::vector<Token> a = text(12);
    const TableId            t = filled(m, std::span(a).first(9));
    REQUIRE(m.swap_out(std::array{t}));
    step(m);
    // The full blocks of t leave for host memory, where their texts keep their serials.
    m.close_table(filled(m, text(24, 50)));
    const TableId again = m.open_table();
    REQUIRE(m.allocate(again, std::span(a).first(4))); // enters the first one once more
    REQUIRE(m.swap_in(std::array{t}));
    step(m); // checks the invariants
    CHECK_FALSE(m.is_cached(m.blocks(t)[1]));
    REQUIRE(m.allocate_slots(t, 9, 3));
    m.publish(t, a, 12);
    CHECK_FALSE(m.is_cached(m.blocks(t)[1]));
    m.will_write({again, 0, 4});
    step(m);
    m.publish(t, a, 12);
    CHECK(m.is_cached(m.blocks(t)[1]));
    m.close_table(t);
    m.close_table(again);
    CHECK(found(m, text(13)) == 12);
}

TEST_CASE("a block manager finds what another one had in host memory") {
    const BlockManagerOptions options{.n_blocks = 6, .block_size = 4, .n_tier = 8};
    BlockManager              m(options);
    const std::vector<Token>  a = text(16), b = text(16, 100);
    m.close_table(filled(m, a));
    m.close_table(filled(m, b));
    for (bool more = true; more; step(m)) more = m.move_to_host(2);
    CHECK(m.n_cached_free() == 0);
    CHECK(m.n_on_host() == 8);
    const std::vector<ParkedUnit> units = m.host().units();
    REQUIRE(units.size() == 8);
    CHECK(units[0].entry.depth == 0); // the beginnings first
    CHECK(units[1].entry.depth == 0);

    for (const int room : {8, 3}) {
        BlockManager  other({.n_blocks = 6, .block_size = 4, .n_tier = room});
        int           n    = 0;
        std::uint64_t last = 0;
        for (ParkedUnit unit : units) {
            n += other.host().adopt(unit);
            last = std::max(last, unit.entry.serial);
        }
        other.begin_serials(last + 1);
        other.check_invariants();
        CHECK(n == room);
        other.log_cache(true);
        const std::vector<CacheChange> changes = other.take_cache_changes();
        REQUIRE(int(changes.size()) == room);
        CHECK_FALSE(changes[0].parent);
        CHECK(changes[0].medium == Medium::host);
        CHECK(found(other, a) + found(other, b) == (room == 8 ? 24 : 12));
        other.close_table(filled(other, text(24, 200))); // new texts get new serials
        for (bool more = true; more; step(other)) more = other.move_to_host(2);
        other.check_invariants();
        CHECK(found(other, text(24, 200)) > 0);
    }
}

TEST_CASE("reading the rest of a text from files does not forget its beginning") {
    BlockManager m({.n_blocks = 4, .block_size = 4, .n_tier = 8, .for_files = ForFiles::shared});
    const auto   written = [&] {
        step(m);
        for (const HostUnit& unit : m.host().take_saved()) m.host().give_back(unit.unit);
    };
    for (const std::vector<Token>& tokens : {text(16), text(16, 100)}) { // one block at a time, as files take them
        m.close_table(filled(m, tokens));
        for (int i = 0; i < 4; i++) written();
    }
    const std::vector<Token>   beginning = text(12);
    const KnownText            known     = m.known({}, beginning);
    const std::vector<BlockId> kept      = m.host().keep(known.texts);
    REQUIRE(kept.size() == 3);
    m.check_invariants();
    CHECK(m.n_swap_free() == 8); // no request is swapped
    std::vector<HostUnit> read;
    for (HostUnit unit; m.host().lend(unit); unit = {}) read.push_back(unit);
    CHECK(read.size() == 5); // the rest of the pool
    m.check_invariants();
    for (const HostUnit& unit : read) m.host().give_back(unit.unit);
    m.host().let_go(kept);
    CHECK(m.known({}, beginning).n_blocks() == 3);
    m.check_invariants();
}
