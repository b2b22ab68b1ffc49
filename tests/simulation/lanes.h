// How a StepPlan says where the K and V of a position are: the one file of the simulator that knows it.
#pragma once

import quire.core.base;
import quire.core.std;
import quire.paging.block;
import quire.step.plan;

namespace quire::simulation {

// Layers whose K and V stand in the same units of memory: those of one window.
struct Lane {
    int group  = 0;
    int unit   = 0; // of the units that make up a block of the group
    int window = 0; // position i sees i - window + 1 .. i; 0: all
};

// Of layers with these windows.
inline std::vector<Lane> lanes_of(std::span<const int> windows) {
    std::vector<Lane> lanes;
    for (int window : windows)
        if (!std::ranges::any_of(lanes, [&](const Lane& l) { return l.window == window; }))
            lanes.push_back({int(lanes.size()), 0, window});
    return lanes;
}

// Lanes that have cells of their own in the same slot.
inline int cells_in_slot(std::span<const Lane> lanes) { return int(lanes.size()); }
inline int cell_in_slot(std::span<const Lane> lanes, int lane) { return int(&lanes[std::size_t(lane)] - lanes.data()); }

// The most units that a sequence of so many tokens holds.
inline int units_for(std::span<const Lane>, int n_tokens, int block_size) {
    return (n_tokens + block_size - 1) / block_size;
}

// Where row t of the plan is written.
inline int slot_of(const StepPlan& plan, const Lane&, int t) { return plan.slots[std::size_t(t)]; }

// The unit with block i of sequence s, or -1 where its table has none.
inline BlockId unit_of(const StepPlan& plan, const Lane&, int s, int i) {
    const int first = plan.table_start[std::size_t(s)], end = plan.table_start[std::size_t(s) + 1];
    return i >= 0 && first + i < end ? plan.block_tables[std::size_t(first + i)] : -1;
}

} // namespace quire::simulation
