// The life cycle of a request as miniVLLM's documentation describes it, on quire's block manager. Corresponding names:
//
//   miniVLLM                          quire
//   can_allocate(seq), allocate(seq)  allocate(table, tokens): all or nothing; cached blocks are not counted twice
//   can_append(seq), append(seq)      allocate_slots(table, position, n), before the token is written; then publish(…)
//   deallocate(seq)                   close_table(table)
//   hash_to_block_id, compute_hash    the prefix cache, chain_hash
//   block.hash = -1                   HashState::none: the block is not full yet
//   num_cached_tokens                 next_unwritten(table, 0, n)
//
// miniVLLM calls can_append() before and append() after a token is added, and gives a block its hash before its K and
// V are written. Here one call allocates the slot, and a block is cached after the step that writes it: commit().
import quire.core.base;
import quire.paging.block_manager;
import quire.paging.block;
import quire.core.std;

using namespace quire;

void print(const BlockManager& m, std::string_view what, TableId table) {
    std::printf("%-44.*s table", int(what.size()), what.data());
    for (BlockId b : m.blocks(table)) std::printf(" %d%s", b, m.is_cached(b) ? "#" : "");
    std::printf("  free %d\n", m.n_free());
}

// The step that runs the model: its moves are handed to the backend, then everything announced is written.
void run_step(BlockManager& m) {
    BlockMoves moves;
    m.take_moves(moves);
    m.commit();
}

int main() {
    BlockManager       m({.n_blocks = 8, .block_size = 4});
    std::vector<Token> tokens{11, 12, 13, 14, 15, 16, 17};

    // Waiting → running: blocks for the whole prompt. '#' marks a block that can be found by its hash.
    const TableId a = m.open_table();
    check(m.allocate(a, tokens), "seven tokens fit");
    print(m, "allocated, nothing computed yet", a);
    m.will_write({a, 0, 7}); // prefill
    run_step(m);
    print(m, "prefill has run: the full block has a name", a);

    // Decode: allocate the slot, run, report the written tokens.
    for (Token t : {18, 19, 20}) {
        check(m.allocate_slots(a, int(tokens.size()), 1), "a free block");
        tokens.push_back(t);
        run_step(m);
        m.publish(a, tokens, int(tokens.size()));
        print(m, cat("decoded token ", tokens.size()), a);
    }

    // A second request with the same beginning computes only its new tokens.
    std::vector<Token> second{11, 12, 13, 14, 15, 16, 99, 98};
    const TableId      b = m.open_table();
    check(m.allocate(b, second), "it fits");
    std::printf("the second request finds %d of its %zu tokens: a shared block, and part of another by a copy\n",
                m.next_unwritten(b, 0, int(second.size())), second.size());
    print(m, "the second request", b);
    run_step(m);

    // Finished: the blocks are free at once; blocks with a hash can be found until their memory is needed.
    m.close_table(a);
    m.close_table(b);
    std::printf("both finished: %d of %d blocks free, %d of them cached\n", m.n_free(), m.n_blocks(),
                m.n_cached_free());
    m.check_invariants();
}
