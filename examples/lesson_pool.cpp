// A pool of 64 blocks used by hand: new sequence, append, fork, write to a shared block, release. No model, only the block
// manager. The exercises come from a lesson on PagedAttention; see "V5" in tests/test_block_manager.cpp.
import quire.core.base;
import quire.paging.block_manager;
import quire.paging.block;
import quire.core.std;

using namespace quire;

// The pool as a picture: one digit per block, how many sequences map it.
void show(const BlockManager& pool, std::string_view what) {
    std::printf("%-62.*s ", int(what.size()), what.data());
    for (BlockId b = 0; b < 20; b++) std::printf("%c", pool.ref_count(b) ? char('0' + pool.ref_count(b)) : '.');
    std::printf("…  %2d used\n", pool.n_used());
}

int main() {
    BlockManager pool({.n_blocks = 64, .block_size = 16});

    // A prompt of 64 tokens takes four blocks. allocate_slots() makes room for positions that are about to be written.
    const TableId prompt = pool.open_table();
    check(pool.allocate_slots(prompt, 0, 64), "64 tokens fit");
    show(pool, "a new sequence, 64 tokens appended");

    // A fork copies the table, not the blocks: each is mapped four times now.
    std::vector<TableId> beams{prompt};
    while (beams.size() < 4) beams.push_back(pool.fork_table(prompt));
    show(pool, "forked three times");

    // The blocks are full, so each beam takes one of its own for its next ten tokens, and nothing is copied.
    for (TableId beam : beams) check(pool.allocate_slots(beam, 64, 10), "room for ten tokens");
    show(pool, "ten tokens for each of the four beams");

    int naive = 0;
    for (TableId beam : beams) naive += int(pool.blocks(beam).size());
    std::printf("without sharing the four would hold %d blocks: %.0f %% saved\n", naive,
                100 - 100.0 * pool.n_used() / naive);

    // Writing to a block that others map copies it first. A fork of beam 3 shares its last, partly filled block.
    const TableId twin = pool.fork_table(beams[3]);
    show(pool, "beam 3 forked again, in the middle of a block");
    check(pool.allocate_slots(twin, 74, 1), "room for a copy");
    BlockMoves moves;
    pool.take_moves(moves); // the copies that a backend has to make before the step
    for (auto [from, to] : moves.copies) std::printf("copy on write: block %d → block %d\n", from, to);
    show(pool, "the fork wrote a token: its last block is a copy");
    check(pool.allocate_slots(beams[3], 74, 1), "no block needed");
    std::printf("beam 3 is alone with its block again and writes in place: %d copies\n", pool.n_copies());

    for (TableId beam : beams) pool.close_table(beam);
    pool.close_table(twin);
    show(pool, "all released");
    pool.check_invariants();
}
