// quire.paging.cache_layout: what a sequence remembers, as groups of layers whose memory is managed alike, and how each group's
// memory is made of the pool's blocks, which are all of one size. Plain values, owns nothing.
export module quire.paging.cache_layout;

import quire.core.base;
import quire.core.std;
import quire.core.tensor;

export namespace quire {

// An array that a layer keeps for each block: [heads][block_size][width] elements: K, V, or the scales of quantised ones.
struct CacheArray {
    DType type  = DType::F16;
    int   heads = 0, width = 0;

    std::size_t bytes(int block_size) const {
        return std::size_t(heads) * std::size_t(block_size) * row_bytes(type, width);
    }
    bool operator==(const CacheArray&) const = default;
};

// The memory of one layer for a sequence.
struct LayerCache {
    int                     window = 0; // positions that the layer sees, with its own; 0: all
    std::vector<CacheArray> arrays;     // K and V; of a latent cache (DeepSeek-V2, section 2.1) one
    bool                    operator==(const LayerCache&) const = default;
};

// Layers that see the same positions and keep arrays of the same shape. A sequence has a block table for each group. An entry of
// that table is the memory of block_size tokens in all layers of the group: `blocks` blocks of the pool.
struct CacheGroup {
    int              window = 0; // as LayerCache says; what lies behind it is given back
    int              blocks = 1; // of the pool, in one table entry
    std::vector<int> layers; // in the order of their places: layer i stands in block i / layers_per_block of an entry
    LayerCache       layer = {}; // each of them
};

// The groups of a model. All of them take blocks from one pool, so that what one group does not use another one can.
struct CacheLayout {
    std::vector<CacheGroup> groups           = {CacheGroup{}}; // those that see all positions first
    int                     layers_per_block = 1;

    int              blocks_per_entry() const; // of all groups together
    std::vector<int> parts() const;            // of each group: blocks of an entry
    // Whether some group keeps all positions of a sequence.
    bool keeps_all() const { return groups[0].window == 0; }
    int  widest_window() const; // of the groups that have one; 0: none has
    // Blocks that a sequence of n_tokens holds, at most, while its tokens are computed one after the other; with `whole` nothing is
    // given back.
    int blocks_at_once(int n_tokens, int block_size, bool whole = false) const;
    // The longest sequence, up to `most` tokens, that so many blocks are enough for.
    int longest(std::int64_t n_blocks, int block_size, int most) const;
    // The part of the pool's memory that no layer uses, where this is largest: a sequence with blocks of one group alone.
    double waste() const;
    // The first entry of a table that a position sees.
    static int first_entry_seen(int window, int position, int block_size) {
        return window > 0 ? std::max(position - window + 1, 0) / block_size : 0;
    }
};

inline constexpr int most_cache_groups = 4;

// Layers with equal caches form a group; a window of `context` or more is none. A block holds the most layers by which all groups can be
// divided with a waste of at most 2 %, so that tables are short. Groups beyond most_cache_groups join the one with the next wider
// window.
CacheLayout make_cache_layout(std::span<const LayerCache> layers, int context);

} // namespace quire

module :private;

namespace quire {

int CacheLayout::blocks_per_entry() const {
    int n = 0;
    for (const CacheGroup& g : groups) n += g.blocks;
    return n;
}

std::vector<int> CacheLayout::parts() const {
    std::vector<int> parts;
    for (const CacheGroup& g : groups) parts.push_back(g.blocks);
    return parts;
}

int CacheLayout::widest_window() const {
    int widest = 0;
    for (const CacheGroup& g : groups) widest = std::max(widest, g.window);
    return widest;
}

// A block's first position sees window - 1 positions in the blocks before it.
int CacheLayout::blocks_at_once(int n_tokens, int block_size, bool whole) const {
    const int all = (n_tokens + block_size - 1) / block_size;
    int       n   = 0;
    for (const CacheGroup& g : groups)
        n +=
            g.blocks * (g.window > 0 && !whole ? std::min(all, (g.window - 1 + block_size - 1) / block_size + 1) : all);
    return n;
}

int CacheLayout::longest(std::int64_t n_blocks, int block_size, int most) const {
    int enough = 0;
    for (int too_long = most + 1; too_long - enough > 1;) {
        const int n                                                     = enough + (too_long - enough) / 2;
        (blocks_at_once(n, block_size) <= n_blocks ? enough : too_long) = n;
    }
    return enough;
}

int divided_up(int n, int step) { return (n + step - 1) / step; }

double waste_of(const CacheGroup& group, int layers_per_block) {
    const int n = int(group.layers.size());
    return 1 - double(n) / (double(divided_up(n, layers_per_block)) * layers_per_block);
}

double CacheLayout::waste() const {
    double most = 0;
    for (const CacheGroup& g : groups)
        if (!g.layers.empty()) most = std::max(most, waste_of(g, layers_per_block));
    return most;
}

CacheLayout make_cache_layout(std::span<const LayerCache> layers, int context) {
    CacheLayout layout;
    layout.groups.clear();
    const auto add = [&](const LayerCache& cache, int layer) {
        auto at = std::ranges::find(layout.groups, cache, &CacheGroup::layer);
        if (at == layout.groups.end()) {
            layout.groups.push_back({cache.window, 1, {}, cache});
            at = layout.groups.end() - 1;
        }
        at->layers.push_back(layer);
    };
    for (std::size_t i = 0; i < layers.size(); i++) {
        LayerCache cache = layers[i];
        if (cache.window >= context) cache.window = 0;
        add(cache, int(i));
    }
    const auto order = [](const CacheGroup& g) {
        return std::pair(g.window == 0 ? std::numeric_limits<int>::min() : -g.window, g.layers[0]);
    };
    std::ranges::sort(layout.groups, {}, order);
    while (layout.groups.size() > std::size_t(most_cache_groups)) { // the wider window of two holds for both
        CacheGroup& to = layout.groups[layout.groups.size() - 2];
        to.layers.insert(to.layers.end(), layout.groups.back().layers.begin(), layout.groups.back().layers.end());
        layout.groups.pop_back();
    }
    int most = int(layers.size());
    for (const CacheGroup& g : layout.groups) most = std::min(most, int(g.layers.size()));
    constexpr double most_waste = 0.02;
    for (layout.layers_per_block = most; layout.layers_per_block > 1 && layout.waste() > most_waste;)
        layout.layers_per_block--;
    for (CacheGroup& g : layout.groups) g.blocks = divided_up(int(g.layers.size()), layout.layers_per_block);
    return layout;
}

} // namespace quire
