// Compiles the operations of a model into the decode megakernel's program, on the host: lowers them to instructions, divides
// the rows of each among warps, stages and CTAs, and lays out shared memory and the exchange buffer.
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

namespace {

// How the warps divide a stage: the numbers of rows and passes that keep most lanes busy, in stages that are not too large.
// False: the rows are too long.
bool plan_stages(Instruction& op) {
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
        op.max_sums = std::max(op.max_sums, last / op.span - first / op.span + 1);
    }
    return best > 0;
}

// Operations → instructions: norms, residual additions and RoPE become part of the GEMV or attention that reads them. False:
// not a model that it knows.
bool lower(const Operation* operations, int n, Program& program, std::vector<Instruction>& ops) {
    const void*      residual = nullptr; // its address in the operations; and after select_rows
    const void*      selected = nullptr;
    const Operation *norm = nullptr, *rope = nullptr; // the latest ones
    const Half*      pending = nullptr;               // to be added at the next norm
    bool             fresh   = false;                 // no GEMV has read that norm yet
    Half*            columns = nullptr;               // the residual is wanted there
    const auto array_of = [](const KvArray& a) { return CacheArray{static_cast<unsigned char*>(a.rows), a.scales}; };
    const auto same     = [](const KvArray& a, const KvArray& b) {
        return a.type == b.type && a.block_rows == b.block_rows && a.block_scales == b.block_scales;
    };
    const auto fp16 = [](const void* p) { return static_cast<const Half*>(p); };
    for (int t = 0; t < n; t++) {
        const Operation& op = operations[t];
        switch (op.kind) {
            case Operation::embed:
                if (residual || op.weight.cols > max_hidden || op.weight.cols % 32 != 0) return false;
                residual          = op.residual;
                program.embedding = op.weight;
                program.hidden    = int(op.weight.cols);
                break;
            case Operation::add:
                if (op.residual != residual || pending) return false;
                pending = fp16(op.x);
                break;
            case Operation::put_columns: // of the residual that the next norm reads
                if (op.x != residual || op.cols != program.hidden || columns || !(fresh || pending)) return false;
                columns = static_cast<Half*>(op.out);
                break;
            case Operation::select_rows:
                if (op.x != residual) return false;
                selected = op.residual;
                break;
            case Operation::norm:
                if (op.cols != program.hidden) return false;
                if (op.residual) {
                    if (op.residual != residual || pending) return false;
                    pending = fp16(op.x);
                } else if (op.x != residual && op.x != selected) {
                    return false;
                }
                norm  = &op;
                fresh = true;
                break;
            case Operation::rope_and_store:
                if (rope && (rope->rope.n_pairs != op.rope.n_pairs || rope->rope.inv_freq != op.rope.inv_freq))
                    return false;
                rope         = &op;
                program.rope = op.rope;
                break;
            case Operation::attention: {
                // All layers have the same attention, and K and V the same type.
                if (!rope || rope->rope.q != op.attend.q || op.attend.sinks || op.attend.latent() ||
                    rope->rope.q_first != 0 || rope->rope.q_dim != op.attend.head_dim ||
                    !same(op.attend.k_array, op.attend.v_array) ||
                    (program.attend.q &&
                     (program.attend.window != op.attend.window || program.attend.softcap != op.attend.softcap ||
                      program.attend.scale != op.attend.scale || !same(program.attend.k_array, op.attend.k_array))))
                    return false;
                program.attend = op.attend;
                Instruction to;
                to.is_attention       = true;
                to.waits_for_previous = true;
                to.q                  = rope->rope.q;
                to.k                  = rope->rope.k;
                to.v                  = rope->rope.v;
                to.cache_k            = array_of(op.attend.k_array);
                to.cache_v            = array_of(op.attend.v_array);
                to.attended           = op.attend.out;
                to.n_attended         = op.attend.n_heads * op.attend.head_dim;
                ops.push_back(to);
                break;
            }
            case Operation::gemm:
            case Operation::gated_gemm: {
                const bool normed = norm && norm->out == op.x;
                for (int first = 0; first < op.n_projections;) {
                    Instruction to;
                    first += take_same_form(op.projection + first, op.n_projections - first, to.all);
                    to.gated      = op.kind == Operation::gated_gemm;
                    to.activation = op.activation;
                    if (to.gated && (to.all.n != 2 || to.all.projection[0].bias || to.all.projection[1].bias))
                        return false;
                    for (int k = 0; k < to.all.n; k++)
                        if (to.all.projection[k].scale != 1) return false;
                    to.kind               = kind_of(to.all.projection[0].weight);
                    to.cols               = int(op.cols);
                    to.waits_for_previous = !normed || fresh;
                    if (normed) {
                        to.norm = norm->norm_weight;
                        to.eps  = norm->eps;
                        if (fresh) {
                            to.add     = pending;
                            to.columns = columns;
                            pending    = nullptr;
                            columns    = nullptr;
                            fresh      = false;
                        }
                        if (norm->x == selected && selected)
                            to.residual = static_cast<float*>(const_cast<void*>(selected));
                    } else {
                        to.x = fp16(op.x);
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
    return !ops.empty() && !columns && rope && std::has_single_bit(unsigned(program.attend.block_size)) &&
           program.attend.softcap == 0 && (program.attend.head_dim == 64 || program.attend.head_dim == 128);
}

// Divides the rows of every instruction, and shared memory: the residual, x in its widest form (or partial sums, or what
// attention needs), the weight pipeline. False: it does not fit.
bool plan(int n_sms, Program& program, std::vector<Instruction>& ops) {
    const int head_dim = program.attend.head_dim;
    const int group    = std::min(max_heads, program.attend.n_heads / program.attend.n_kv_heads);
    // See AttentionShared; at the end of `beside` the two scales of the newest position, aligned.
    const int values = group * head_dim * 4, beside = 2 * warps * max_heads * 4 + (max_heads + 2) * head_dim * 2 + 16;
    int       room = beside + 4 * values, largest_stage = 0;
    for (Instruction& op : ops) {
        if (op.is_attention) continue;
        for (const auto bytes : {data_bytes, scale_bytes, min_bytes}) {
            if (bytes(op.kind, 256) == 0) break;
            op.row_bytes += op.part_bytes[op.n_parts++] = bytes(op.kind, op.cols);
        }
        if (!plan_stages(op)) return false;
        const int chunks = (op.n_pairs + op.rows - 1) / op.rows, each = chunks / n_sms;
        int       batches = ((op.n_pairs / n_sms + 1) * 2 + op.rows * op.batch - 1) / (op.rows * op.batch);
        if (op.gated && each >= max_dynamic_chunks / 2) {
            op.n_static  = std::max(each * 3 / 4, (chunks + n_sms - 1) / n_sms - max_dynamic_chunks / 2);
            op.n_dynamic = chunks - op.n_static * n_sms;
            batches += max_dynamic_chunks;
        }
        largest_stage = std::max(largest_stage, op.rows * op.row_bytes);
        room          = std::max({room, x_bytes(op.kind, op.cols), batches * op.batch * op.rows * op.max_sums * 4});
    }
    program.x_room          = (room + 127) / 128 * 128;
    program.attention_warps = std::min(warps, (program.x_room - beside) / values);
    program.n_ops           = int(ops.size());
    program.pipeline_bytes  = (max_shared - program.hidden * 4 - program.x_room) / 128 * 128;
    program.shared          = program.hidden * 4 + program.x_room + program.pipeline_bytes;
    return program.pipeline_bytes >= 3 * largest_stage;
}

} // namespace

bool compile(const Operation* operations, int n, int n_sms, Program& program, std::vector<Instruction>& ops) {
    return lower(operations, n, program, ops) && plan(n_sms, program, ops) &&
           place_exchange(ops, nullptr, program.exchange_size);
}

bool place_exchange(std::vector<Instruction>& ops, Half* memory, std::int64_t& n) {
    std::map<const void*, std::int64_t> places; // of the values, by their address in the operations
    n                = 0;
    const auto write = [&](Half* out, std::int64_t values) {
        const std::int64_t at = places[out] = n;
        n += (values + 7) / 8 * 8;
        return memory ? memory + at : out;
    };
    bool       known = true;
    const auto read  = [&](const Half*& p) {
        const auto found = places.find(p);
        if (p && found == places.end()) known = false;
        else if (p && memory) p = memory + found->second;
    };
    for (Instruction& op : ops) {
        read(op.add), read(op.x), read(op.q), read(op.k), read(op.v);
        const std::int64_t first = n;
        if (op.is_attention) op.attended = write(op.attended, op.n_attended);
        for (int k = 0; k < (op.gated ? 1 : op.all.n); k++)
            if (Projection& to = op.all.projection[k]; !to.out_is_float)
                to.out = write(static_cast<Half*>(to.out), to.weight.rows);
        if (memory) op.cleared = reinterpret_cast<uint4*>(memory + first);
        op.n_cleared = int((n - first) / 8);
    }
    return known;
}

} // namespace quire::cuda::megakernel
