// How a StepPlan says where the K and V of a position are: the one file of the simulator that knows it.
#pragma once

import quire.core.base;
import quire.core.std;
import quire.paging.block;
import quire.core.tensor;
import quire.paging.cache_layout;
import quire.step.plan;

namespace quire::simulation {

// A layer with a recurrent state, among the windows of layers.
constexpr int recurrent = -1;

// Where a layer's K and V stand: in a group, in one of the blocks that make up an entry of its tables, and there beside other layers. Or the
// place of its state among the states of a unit.
struct Lane {
    int  group = 0, part = 0, place = 0;
    int  window = 0; // position i sees i - window + 1 .. i; 0: all
    bool state  = false;
};

// Of layers with these windows, all of one shape, or with states of so many bytes.
inline CacheLayout layout_of(std::span<const int> windows, int context, int state_bytes, int block_size) {
    std::vector<LayerCache> layers;
    for (int window : windows)
        if (window == recurrent) layers.push_back({0, {}, std::size_t(state_bytes)});
        else layers.push_back({window, {{DType::F16, 1, 8}, {DType::F16, 1, 8}}, 0});
    return make_cache_layout(layers, context, block_size);
}

inline std::vector<Lane> lanes_of(const CacheLayout& layout, std::span<const int> windows) {
    std::vector<Lane> lanes(windows.size());
    for (std::size_t g = 0; g < layout.groups.size(); g++)
        for (std::size_t i = 0; i < layout.groups[g].layers.size(); i++) {
            const auto layer = std::size_t(layout.groups[g].layers[i]);
            if (layout.groups[g].keeps_state()) {
                lanes[layer] = {int(g), 0, int(i), 0, true};
                continue;
            }
            const auto [part, place] = layout.groups[g].place(i); // of K: a cell has both
            lanes[layer]             = {int(g), part, place, windows[layer], false};
        }
    return lanes;
}

// The most blocks that a sequence of so many tokens holds.
inline int blocks_for(const CacheLayout& layout, int n_tokens, int block_size) {
    return (n_tokens + block_size - 1) / block_size * layout.blocks_per_entry() + layout.blocks_per_unit();
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
