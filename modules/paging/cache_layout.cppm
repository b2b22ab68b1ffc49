// quire.paging.cache_layout: what a sequence remembers, as groups of layers whose memory is managed alike, and how each group's
// memory is made of the pool's blocks, which are all of one size. Plain values, owns nothing.
export module quire.paging.cache_layout;

import quire.core.base;
import quire.core.std;
import quire.core.tensor;

export namespace quire {

// The element types of K and V: F32, F16 and BF16 are numbers. I8 and F8 (e4m3) are codes: a float32 scale times a row's codes, those of one
// token and KV head, are its numbers.
struct KvTypes {
    DType k = DType::F16, v = DType::F16;

    KvTypes() = default;
    KvTypes(DType both) : k(both), v(both) {}
    KvTypes(DType k_type, DType v_type) : k(k_type), v(v_type) {}
    bool operator==(const KvTypes&) const = default;
};
constexpr bool has_scales(DType type) { return type == DType::I8 || type == DType::F8; }

// An array that a layer keeps for each block: [heads][block_size][width] elements: K, V, or the scales of quantised ones.
struct CacheArray {
    DType type  = DType::F16;
    int   heads = 0, width = 0;

    std::size_t bytes(int block_size) const {
        return std::size_t(heads) * std::size_t(block_size) * row_bytes(type, width);
    }
    bool operator==(const CacheArray&) const = default;
};

// The memory of one layer for a sequence: arrays for each block of tokens, or a state, or nothing.
struct LayerCache {
    int window = 0; // positions that the layer sees, with its own; 0: all
    // K and V, of a latent cache (DeepSeek-V2, section 2.1) one array; then the scales of quantised arrays.
    std::vector<CacheArray> arrays;
    std::size_t             state                               = 0; // bytes of a recurrent state
    bool                    operator==(const LayerCache&) const = default;

    std::size_t bytes(int block_size) const; // of the arrays, for a block of tokens
    // Whether K with its scales has the bytes of V with its scales, so that one's place has room for the other.
    bool has_halves() const { return arrays.size() > 1 && arrays[0] == arrays[1]; }
};

// Layers that see the same positions and keep arrays of the same shape. A sequence has a block table for each group. An entry of
// that table is the memory of block_size tokens in all layers of the group: `blocks` blocks of the pool.
//
// Or all layers with a recurrent state. A sequence has one state for all its tokens: a state unit of `blocks` blocks, through which its bytes run,
// layer after layer.
struct CacheGroup {
    int                      window = 0;            // as LayerCache says; what lies behind it is given back
    int                      blocks = 1;            // of the pool, in one table entry or unit
    std::vector<int>         layers;                // in the order of their places
    LayerCache               layer            = {}; // each of them; a state: its bytes in all layers
    int                      layers_per_block = 1;  // places of a block, mostly for a layer each
    std::vector<std::size_t> offsets = {}; // a state: where each layer's begins in the unit, at multiples of 256
    bool halves = false; // K with its scales and V with its scales have a place each: a block may end between them

    bool keeps_state() const { return layer.state > 0; }
    // Where layer i, or its K or V, stands: in which block of an entry, and there in which place.
    struct Place {
        int block, nth;
    };
    Place place(std::size_t i, bool of_v = false) const {
        const int at = int(i) * (halves ? 2 : 1) + (halves && of_v);
        return {at / layers_per_block, at % layers_per_block};
    }
};

// The groups of a model. All of them take blocks from one pool, so that what one group does not use another one can.
struct CacheLayout {
    std::vector<CacheGroup> groups = {CacheGroup{}}; // groups that see all positions first, a state last
    // Where all arrays of all layers have one shape, each of these has memory of its own for all blocks (0). Else a block is contiguous: so many
    // bytes, for layers of whichever group.
    std::size_t block_bytes = 0;

    int              blocks_per_entry() const; // of all groups together
    int              blocks_per_unit() const;  // of a state; 0: no layer has one
    std::vector<int> parts() const;            // of each group: blocks of an entry, 0 of a state
    // The groups that have tables.
    std::span<const CacheGroup> tables() const { return std::span(groups).first(groups.size() - keeps_state()); }
    bool                        keeps_state() const { return groups.back().keeps_state(); }
    // Whether some group keeps all positions of a sequence.
    bool keeps_all() const { return groups[0].window == 0 && !groups[0].keeps_state(); }
    int  widest_window() const; // of the groups that have one; 0: none has
    // Blocks that a sequence of n_tokens holds, at most, while its tokens are computed one after the other; with `whole` nothing is
    // given back.
    int blocks_at_once(int n_tokens, int block_size, bool whole = false) const;
    // The longest sequence, up to `most` tokens, that so many blocks are enough for.
    int longest(std::int64_t n_blocks, int block_size, int most) const;
    // The part of the pool's memory that no layer uses, where this is largest: a sequence with blocks of one group alone. A state counts
    // with the blocks of the 512 tokens before it.
    double waste(int block_size = 16) const;
    // The first entry of a table that a position sees.
    static int first_entry_seen(int window, int position, int block_size) {
        return window > 0 ? std::max(position - window + 1, 0) / block_size : 0;
    }
};

inline constexpr int most_cache_groups = 4;

// Layers with equal caches form a group. All layers with a state form one. A layer without memory is in no group. A window of `context` or more
// counts as none. A block holds as many layers as possible with a waste of at most 2 %; if no number has that, blocks end between the K and V
// of layers, too; if that is not enough, blocks have the size with the least waste.
// Groups beyond most_cache_groups join the group with the next wider window, where their arrays have one shape.
CacheLayout make_cache_layout(std::span<const LayerCache> layers, int context, int block_size = 16);

} // namespace quire

module :private;

namespace quire {

std::size_t LayerCache::bytes(int block_size) const {
    std::size_t n = 0;
    for (const CacheArray& array : arrays) n += array.bytes(block_size);
    return n;
}

int CacheLayout::blocks_per_entry() const {
    int n = 0;
    for (const CacheGroup& g : tables()) n += g.blocks;
    return n;
}

int CacheLayout::blocks_per_unit() const { return keeps_state() ? groups.back().blocks : 0; }

std::vector<int> CacheLayout::parts() const {
    std::vector<int> parts;
    for (const CacheGroup& g : groups) parts.push_back(g.keeps_state() ? 0 : g.blocks);
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
    for (const CacheGroup& g : tables())
        n +=
            g.blocks * (g.window > 0 && !whole ? std::min(all, (g.window - 1 + block_size - 1) / block_size + 1) : all);
    return n + blocks_per_unit();
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

double waste_of(double used, double blocks, double block_bytes) { return 1 - used / (blocks * block_bytes); }

double CacheLayout::waste(int block_size) const {
    constexpr int tokens = 512;
    double        most = 0, used = 0, all = 0; // of the tables, for these tokens
    for (const CacheGroup& g : tables()) {
        const double n = double(g.layers.size());
        if (n == 0) continue;
        const double layer   = std::max(double(g.layer.bytes(block_size)), 1.0),
                     block   = block_bytes > 0 ? double(block_bytes) : g.layers_per_block * layer,
                     entries = double(divided_up(g.window > 0 ? std::min(g.window, tokens) : tokens, block_size));
        most                 = std::max(most, waste_of(n * layer, g.blocks, block));
        used += entries * n * layer;
        all += entries * g.blocks * block;
    }
    if (!keeps_state()) return most;
    const CacheGroup& unit = groups.back();
    return std::max(most, 1 - (used + double(unit.layer.state)) / (all + double(unit.blocks) * double(block_bytes)));
}

// Gives each group its blocks of so many bytes; with `halves`, K and V places of their own where that takes fewer blocks. False: some
// layer has no room in one.
bool divide(CacheLayout& layout, std::size_t block_bytes, int block_size, bool halves) {
    layout.block_bytes = block_bytes;
    for (CacheGroup& g : layout.groups) {
        if (g.keeps_state()) {
            g.blocks = int((g.layer.state + block_bytes - 1) / block_bytes);
            continue;
        }
        g.blocks = 0;
        for (const bool in_halves : {false, true}) {
            if (in_halves && !(halves && g.layer.has_halves())) continue;
            const std::size_t of_layer = in_halves ? 2 : 1, n = g.layers.size() * of_layer,
                              most = std::min(block_bytes / (g.layer.bytes(block_size) / of_layer), n);
            const int blocks       = most > 0 ? divided_up(int(n), int(most)) : 0;
            if (blocks == 0 || (g.blocks > 0 && blocks >= g.blocks)) continue;
            g.halves = in_halves, g.blocks = blocks, g.layers_per_block = divided_up(int(n), blocks);
        }
        if (g.blocks == 0) return false;
    }
    return true;
}

// Blocks for groups whose layers have arrays of different shapes, or a state: of the sizes that some layers of a group fill.
void divide_shapes(CacheLayout& layout, int block_size) {
    // A row of each array, which kernels count in, and 256 bytes, on which they rely.
    std::size_t unit = 256;
    for (const CacheGroup& g : layout.tables())
        for (const CacheArray& a : g.layer.arrays) {
            const std::size_t row = row_bytes(a.type, a.width);
            unit                  = unit / std::gcd(unit, row) * row;
        }
    const auto       rounded     = [&](std::size_t bytes) { return (bytes + unit - 1) / unit * unit; };
    constexpr double most_waste  = 0.02;
    std::size_t      best        = 0;
    bool             best_halves = false;
    double           least       = 2;
    for (const bool halves : {false, true}) {
        std::vector<std::size_t> sizes;
        for (const CacheGroup& g : layout.tables())
            for (std::size_t n = 1, of_layer = halves ? 2 : 1; n <= of_layer * g.layers.size(); n++)
                sizes.push_back(rounded(n * g.layer.bytes(block_size) / of_layer));
        if (sizes.empty()) sizes.push_back(rounded(layout.groups.back().layer.state));
        std::ranges::sort(sizes, std::greater());
        for (std::size_t size : sizes) {
            if (!divide(layout, size, block_size, halves)) continue;
            const double waste = std::max(layout.waste(block_size), most_waste);
            if (waste < least) least = waste, best = size, best_halves = halves;
        }
        if (least <= most_waste) break;
    }
    divide(layout, best, block_size, best_halves);
}

// Groups whose layers all have arrays of one shape. A block holds the most layers by which they can be divided.
void divide_layers(CacheLayout& layout) {
    int most = std::numeric_limits<int>::max();
    for (const CacheGroup& g : layout.groups) most = std::min(most, int(g.layers.size()));
    constexpr double most_waste = 0.02;
    for (int n = most; n >= 1; n--) {
        for (CacheGroup& g : layout.groups) {
            g.layers_per_block = n;
            g.blocks           = divided_up(int(g.layers.size()), n);
        }
        if (layout.waste() <= most_waste) return;
    }
}

CacheLayout make_cache_layout(std::span<const LayerCache> layers, int context, int block_size) {
    CacheLayout layout;
    CacheGroup  state;
    layout.groups.clear();
    const auto add = [&](const LayerCache& cache, int layer) {
        auto at = std::ranges::find(layout.groups, cache, &CacheGroup::layer);
        if (at == layout.groups.end()) {
            layout.groups.push_back({cache.window, 1, {}, cache, 1, {}});
            at = layout.groups.end() - 1;
        }
        at->layers.push_back(layer);
    };
    for (std::size_t i = 0; i < layers.size(); i++) {
        LayerCache cache = layers[i];
        if (cache.window >= context) cache.window = 0;
        if (!cache.arrays.empty()) add(cache, int(i));
        if (cache.state == 0) continue;
        state.layers.push_back(int(i));
        state.offsets.push_back(state.layer.state);
        state.layer.state += (cache.state + 255) / 256 * 256;
    }
    const auto order = [](const CacheGroup& g) {
        return std::pair(g.window == 0 ? std::numeric_limits<int>::min() : -g.window, g.layers[0]);
    };
    std::ranges::sort(layout.groups, {}, order);
    const auto        same = [](const CacheGroup& a, const CacheGroup& b) { return a.layer.arrays == b.layer.arrays; };
    const std::size_t most_tables = std::size_t(most_cache_groups) - (state.keeps_state() ? 1 : 0);
    while (layout.groups.size() > most_tables) { // the wider window of two holds for both
        int from = int(layout.groups.size()) - 1, to = -1;
        for (; from > 0 && to < 0; from -= to < 0)
            for (to = from - 1; to >= 0 && !same(layout.groups[std::size_t(to)], layout.groups[std::size_t(from)]);)
                to--;
        check(to >= 0, "layers of more different shapes than there can be cache groups");
        std::vector<int>&       layers_to   = layout.groups[std::size_t(to)].layers;
        const std::vector<int>& layers_from = layout.groups[std::size_t(from)].layers;
        layers_to.insert(layers_to.end(), layers_from.begin(), layers_from.end());
        layout.groups.erase(layout.groups.begin() + from);
    }
    const bool one_shape = std::ranges::all_of(layout.groups, [&](const CacheGroup& g) {
        return same(g, layout.groups[0]) &&
               std::ranges::all_of(g.layer.arrays, [&](const CacheArray& array) { return array == g.layer.arrays[0]; });
    });
    if (state.keeps_state()) layout.groups.push_back(std::move(state));
    check(!layout.groups.empty(), "a model whose layers remember nothing");
    if (one_shape && !layout.keeps_state()) divide_layers(layout);
    else divide_shapes(layout, block_size);
    return layout;
}

} // namespace quire
