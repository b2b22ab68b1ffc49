// quire.engine.parked_cache: what host memory keeps of the prefix cache of a model that leaves, for the engine that loads the model again.
// **Owns** a copy of the blocks.
export module quire.engine.parked_cache;

import quire.compute.memory;
import quire.core.base;
import quire.core.thread_pool;
import quire.engine.executor;
import quire.paging.block_manager;

export namespace quire {

struct ParkedCache {
    std::string             basis; // of K and V, see basis_of_kv()
    std::vector<ParkedUnit> units; // their blocks are those of `memory`, in order
    std::size_t             block_bytes = 0;
    Buffer                  memory;

    std::size_t bytes() const { return memory.bytes(); }
};

// When no request is left: brings the blocks of the device to host memory, and copies what is there, that of the most value first, up to so many
// bytes. Null: there is nothing, or no memory for it.
std::shared_ptr<const ParkedCache> park_cache(std::string basis, BlockManager& blocks, Executor& executor,
                                              std::size_t most_bytes);

// Before the first request: as much of it as host memory has room for can be found again. Returns how many blocks. Nothing of another basis.
int take_parked(const ParkedCache& parked, const std::string& basis, BlockManager& blocks, const Executor& executor);

} // namespace quire

module :private;

namespace quire {

void copy_in_parallel(std::size_t n, const std::function<void(std::size_t)>& copy) {
    constexpr std::size_t at_once = 64; // blocks
    constexpr int         most    = 8;  // threads: as many as memory needs
    ThreadPool            threads(std::min(most, physical_cores()));
    threads.run(int((n + at_once - 1) / at_once), [&](int i, int) {
        const std::size_t first = std::size_t(i) * at_once;
        for (std::size_t at = first; at < std::min(n, first + at_once); at++) copy(at);
    });
}

std::size_t bytes_of(const std::vector<std::span<std::byte>>& pieces) {
    std::size_t sum = 0;
    for (const auto& piece : pieces) sum += piece.size();
    return sum;
}

std::shared_ptr<const ParkedCache> park_cache(std::string basis, BlockManager& blocks, Executor& executor,
                                              std::size_t most_bytes) {
    for (bool more = true; more;) { // few at a time: host memory cannot forget what moves still write
        more = blocks.move_to_host(std::max(blocks.n_swap() / 8, 1));
        BlockMoves moves;
        blocks.take_moves(moves);
        if (!moves.empty()) executor.wait_for_moves(executor.move_blocks(moves));
    }
    auto parked   = std::make_shared<ParkedCache>();
    parked->basis = std::move(basis);
    parked->units = blocks.host().units();
    if (parked->units.empty()) return nullptr;
    parked->block_bytes = bytes_of(executor.host_block(0));
    std::vector<BlockId> from;
    std::size_t          n = 0; // units
    for (; n < parked->units.size(); n++) {
        const std::vector<BlockId>& more = parked->units[n].blocks;
        if ((from.size() + more.size()) * parked->block_bytes > most_bytes) break;
        from.insert(from.end(), more.begin(), more.end());
    }
    parked->units.resize(n);
    if (from.empty()) return nullptr;
    Result<Buffer> memory = fresh_memory(from.size() * parked->block_bytes);
    if (!memory) return nullptr;
    parked->memory = std::move(*memory);
    copy_in_parallel(from.size(), [&](std::size_t i) {
        auto* to = static_cast<std::byte*>(parked->memory.data()) + i * parked->block_bytes;
        for (const auto& piece : executor.host_block(from[i])) to = std::ranges::copy(piece, to).out;
    });
    return parked;
}

int take_parked(const ParkedCache& parked, const std::string& basis, BlockManager& blocks, const Executor& executor) {
    if (parked.basis != basis || blocks.n_swap() == 0 || bytes_of(executor.host_block(0)) != parked.block_bytes)
        return 0;
    std::vector<std::pair<std::size_t, BlockId>> copies; // the block there, the block here
    std::uint64_t                                last_serial = 0;
    std::size_t                                  at          = 0;
    for (ParkedUnit unit : parked.units) {
        const std::size_t n = unit.blocks.size();
        if (blocks.host().adopt(unit)) {
            last_serial = std::max(last_serial, unit.entry.serial);
            for (std::size_t i = 0; i < n; i++) copies.emplace_back(at + i, unit.blocks[i]);
        }
        at += n;
    }
    blocks.begin_serials(last_serial + 1);
    copy_in_parallel(copies.size(), [&](std::size_t i) {
        const auto [there, here] = copies[i];
        const std::byte* from    = static_cast<const std::byte*>(parked.memory.data()) + there * parked.block_bytes;
        for (const auto& piece : executor.host_block(here)) {
            std::ranges::copy(std::span(from, piece.size()), piece.begin());
            from += piece.size();
        }
    });
    return int(copies.size());
}

} // namespace quire
