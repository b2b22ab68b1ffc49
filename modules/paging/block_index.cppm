// quire.paging.block_index: from hashes to blocks, of fixed size. Owns the table.
export module quire.paging.block_index;

import quire.core.base;
import quire.core.std;
import quire.paging.block;
import quire.paging.block_hash;

export namespace quire {

// hash → block, open addressing with linear probing at a load of at most one half: no allocation after construction.
class BlockIndex {
public:
    explicit BlockIndex(int capacity); // at most that many entries

    BlockId find(BlockHash hash) const; // or -1
    // Keeps an entry that is there already: the first block registered under a hash stays. True if it was inserted.
    bool insert(BlockHash hash, BlockId block);
    void assign(BlockHash hash, BlockId block); // another block under a hash that is there
    void erase(BlockHash hash);                 // a hash without an entry is a broken invariant
    int  size() const { return size_; }

private:
    struct Entry {
        BlockHash hash  = 0;
        BlockId   block = -1; // -1: empty
    };
    std::size_t        home(BlockHash hash) const;
    std::size_t        position(BlockHash hash) const; // of the entry, which must be there
    std::vector<Entry> entries_;                       // a power of two
    int                size_ = 0, capacity_ = 0;
};

} // namespace quire

module :private;

namespace quire {

BlockIndex::BlockIndex(int capacity)
    : entries_(std::bit_ceil(std::size_t(std::max(capacity, 1)) * 2)), capacity_(capacity) {}

std::size_t BlockIndex::home(BlockHash hash) const { return std::size_t(hash) & (entries_.size() - 1); }

BlockId BlockIndex::find(BlockHash hash) const {
    for (std::size_t i = home(hash);; i = (i + 1) & (entries_.size() - 1)) {
        if (entries_[i].block < 0) return -1;
        if (entries_[i].hash == hash) return entries_[i].block;
    }
}

bool BlockIndex::insert(BlockHash hash, BlockId block) {
    std::size_t i = home(hash);
    for (; entries_[i].block >= 0; i = (i + 1) & (entries_.size() - 1))
        if (entries_[i].hash == hash) return false;
    check(size_ < capacity_, "more cached blocks than blocks");
    entries_[i] = {hash, block};
    size_++;
    return true;
}

std::size_t BlockIndex::position(BlockHash hash) const {
    std::size_t i = home(hash);
    while (entries_[i].block >= 0 && entries_[i].hash != hash) i = (i + 1) & (entries_.size() - 1);
    check(entries_[i].block >= 0, "a hash that is not in the prefix cache was looked for");
    return i;
}

void BlockIndex::assign(BlockHash hash, BlockId block) { entries_[position(hash)].block = block; }

void BlockIndex::erase(BlockHash hash) {
    const std::size_t mask = entries_.size() - 1;
    std::size_t       hole = position(hash);
    // Close the gap: move back each later entry of the run that may stand in the hole.
    for (std::size_t i = (hole + 1) & mask; entries_[i].block >= 0; i = (i + 1) & mask) {
        std::size_t distance = (i - home(entries_[i].hash)) & mask;
        if (distance >= ((i - hole) & mask)) {
            entries_[hole] = entries_[i];
            hole           = i;
        }
    }
    entries_[hole] = {};
    size_--;
}

} // namespace quire
