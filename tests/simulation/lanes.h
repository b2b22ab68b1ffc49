// How a StepPlan says where the K and V of a position are: the one file of the simulator that knows it.
#pragma once

import quire.core.base;
import quire.core.std;
import quire.paging.block;
import quire.core.tensor;
import quire.paging.cache_layout;
import quire.step.plan;

namespace quire::simulation {

// Where a layer's K and V stand: in a group, in one of the blocks that make up an entry of its tables, and there beside other layers.
struct Lane {
    int group = 0, part = 0, place = 0;
    int window = 0; // position i sees i - window + 1 .. i; 0: all
};

// Of layers with these windows, all of one shape.
inline CacheLayout layout_of(std::span<const int> windows, int context) {
    std::vector<LayerCache> layers;
    for (int window : windows) layers.push_back({window, {{DType::F16, 1, 8}, {DType::F16, 1, 8}}});
    return make_cache_layout(layers, context);
}

inline std::vector<Lane> lanes_of(const CacheLayout& layout, std::span<const int> windows) {
    std::vector<Lane> lanes(windows.size());
    for (std::size_t g = 0; g < layout.groups.size(); g++)
        for (std::size_t i = 0; i < layout.groups[g].layers.size(); i++) {
            const auto layer = std::size_t(layout.groups[g].layers[i]);
            const int  n     = layout.groups[g].layers_per_block;
            lanes[layer]     = {int(g), int(i) / n, int(i) % n, windows[layer]};
        }
    return lanes;
}

// The most blocks that a sequence of so many tokens holds.
inline int blocks_for(const CacheLayout& layout, int n_tokens, int block_size) {
    return (n_tokens + block_size - 1) / block_size * layout.blocks_per_entry();
}

// Where row t of the plan is written.
inline int slot_of(const StepPlan& plan, const Lane& lane, int t) {
    return plan.groups[std::size_t(lane.group)].parts[std::size_t(lane.part)].slots[std::size_t(t)];
}

// The block for entry i of sequence s, or -1 where its table has none.
inline BlockId block_of(const StepPlan& plan, const Lane& lane, int s, int i) {
    const GroupPlan& group = plan.groups[std::size_t(lane.group)];
    const int        first = group.first_entry[std::size_t(s)];
    const int        at    = group.table_start[std::size_t(s)] + i - first;
    if (i < first || at >= group.table_start[std::size_t(s) + 1]) return -1;
    return group.parts[std::size_t(lane.part)].tables[std::size_t(at)];
}

} // namespace quire::simulation
