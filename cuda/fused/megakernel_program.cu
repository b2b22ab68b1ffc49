// The host's side of the decode megakernel's program.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <map>
#include <vector>

#include "../attention/decode.cuh"
#include "../gemm/gemv_tma.cuh"
#include "megakernel_program.cuh"

namespace quire::cuda::megakernel {

// How the warps share an operation's rows: those numbers of rows and passes for which most lanes have something to do, in stages
// that are not too large. False: its rows are too long.
bool share(Op& op) {
    const int  tasks    = op.cols / task_cols(op.kind);
    double     best     = 0;
    const auto consider = [&](int passes, int span, int tasks_of_row, int room) {
        const int rows = room / tasks_of_row;
        if (rows < 1 || (rows > 1 && rows * op.row_bytes > 24 * 1024)) return;
        const double used = double(rows * tasks_of_row) / room;
        if (used > best) best = used, op.passes = passes, op.span = span, op.tasks = tasks_of_row, op.rows = rows;
    };
    if (op.kind == kind_f16) {
        const int units = (tasks + 31) / 32; // of a warp
        for (int span : {8, 4, 3, 1})
            if (span <= units) consider(1, span, units, warps * span);
    } else {
        consider(1, 32, tasks, warps * 32);
        if (best == 0 && op.kind != kind_q4_k) consider(2, 32, tasks, 2 * warps * 32);
    }
    op.batch = op.kind == kind_f16 ? 2 : 4 / std::max(op.passes, 1);
    if (best > 0) op.rows_inverse = (1u << 20) / unsigned(op.rows) + 1;
    if (best > 0) op.tasks_inverse = ((1u << 22) + unsigned(op.tasks) - 1) / unsigned(op.tasks);
    for (int r = 0; r < op.rows; r++) {
        const int first = r * op.tasks, last = first + op.tasks - 1;
        op.most_sums = std::max(op.most_sums, last / op.span - first / op.span + 1);
    }
    return best > 0;
}

// Gives all halves that blocks tell one another places of their own in `memory`, or null to count them only. False: an operation
// reads what none writes.
bool exchange(std::vector<Op>& ops, Half* memory, std::int64_t& n) {
    std::map<const void*, std::int64_t> places; // of what was told to be there
    n                = 0;
    const auto write = [&](Half* out, std::int64_t halves) {
        const std::int64_t at = places[out] = n;
        n += (halves + 7) / 8 * 8;
        return memory ? memory + at : out;
    };
    bool       known = true;
    const auto read  = [&](const Half*& p) {
        const auto found = places.find(p);
        if (p && found == places.end()) known = false;
        else if (p && memory) p = memory + found->second;
    };
    for (Op& op : ops) {
        read(op.add), read(op.x), read(op.q), read(op.k), read(op.v);
        const std::int64_t first = n;
        if (op.attends) op.attended = write(op.attended, op.n_attended);
        for (int k = 0; k < (op.gated ? 1 : op.all.n); k++)
            if (Projection& to = op.all.projection[k]; !to.out_is_float)
                to.out = write(static_cast<Half*>(to.out), to.weight.rows);
        if (memory) op.cleared = reinterpret_cast<uint4*>(memory + first);
        op.n_cleared = int((n - first) / 8);
    }
    return known;
}

// Reads what was told into operations of the tape. False: something else than a model that it knows.
bool understand(const Operation* told, int n, Shape& shape, std::vector<Op>& ops) {
    const void*      residual = nullptr; // the name by which it goes, and after select
    const void*      selected = nullptr;
    const Operation *norm = nullptr, *rope = nullptr; // the latest
    const Half*      pending = nullptr;               // to be added at the next norm
    bool             fresh   = false;                 // that norm has not been used yet
    const auto       halves  = [](const void* p) { return static_cast<const Half*>(p); };
    for (int t = 0; t < n; t++) {
        const Operation& op = told[t];
        switch (op.kind) {
            case Operation::embed:
                if (residual || op.weight.cols > most_hidden || op.weight.cols % 32 != 0) return false;
                residual        = op.residual;
                shape.embedding = op.weight;
                shape.hidden    = int(op.weight.cols);
                break;
            case Operation::add:
                if (op.residual != residual || pending) return false;
                pending = halves(op.x);
                break;
            case Operation::select_rows:
                if (op.x != residual) return false;
                selected = op.residual;
                break;
            case Operation::norm:
                if (op.cols != shape.hidden) return false;
                if (op.residual) {
                    if (op.residual != residual || pending) return false;
                    pending = halves(op.x);
                } else if (op.x != residual && op.x != selected) {
                    return false;
                }
                norm  = &op;
                fresh = true;
                break;
            case Operation::rope_and_store:
                if (rope && (rope->rope.n_pairs != op.rope.n_pairs || rope->rope.inv_freq != op.rope.inv_freq))
                    return false;
                rope       = &op;
                shape.rope = op.rope;
                break;
            case Operation::attention: {
                if (!rope || rope->rope.q != op.attend.q) return false;
                shape.attend = op.attend;
                Op to;
                to.attends    = true;
                to.waits      = true;
                to.q          = rope->rope.q;
                to.k          = rope->rope.k;
                to.v          = rope->rope.v;
                to.cache_k    = rope->rope.cache_k;
                to.cache_v    = rope->rope.cache_v;
                to.attended   = op.attend.out;
                to.n_attended = op.attend.n_heads * op.attend.head_dim;
                ops.push_back(to);
                break;
            }
            case Operation::gemm:
            case Operation::gated_gemm: {
                const bool normed = norm && norm->out == op.x;
                for (int first = 0; first < op.n_projections;) {
                    Op to;
                    first += gather(op.projection + first, op.n_projections - first, to.all);
                    to.gated = op.kind == Operation::gated_gemm;
                    if (to.gated && to.all.n != 2) return false;
                    to.kind  = kind_of(to.all.projection[0].weight);
                    to.cols  = int(op.cols);
                    to.waits = !normed || fresh;
                    if (normed) {
                        to.norm = norm->norm_weight;
                        to.eps  = norm->eps;
                        if (fresh) {
                            to.add  = pending;
                            pending = nullptr;
                            fresh   = false;
                        }
                        if (norm->x == selected && selected)
                            to.residual = static_cast<float*>(const_cast<void*>(selected));
                    } else {
                        to.x = halves(op.x);
                    }
                    if (to.cols % (to.kind == kind_f16 ? 8 : 256) != 0) return false;
                    for (int k = 0; k < to.all.n; k++)
                        if (to.all.projection[k].weight.rows % 2 != 0) return false;
                    to.n_pairs = to.all.first_row[to.all.n] / 2;
                    if (to.gated) {
                        if (to.all.projection[0].weight.rows != to.all.projection[1].weight.rows) return false;
                        to.n_pairs = int(to.all.projection[0].weight.rows);
                    }
                    ops.push_back(to);
                }
                break;
            }
        }
    }
    return !ops.empty() && rope && std::has_single_bit(unsigned(shape.attend.block_size)) &&
           shape.attend.softcap == 0 && (shape.attend.head_dim == 64 || shape.attend.head_dim == 128);
}

} // namespace quire::cuda::megakernel
