// Matches operations to the layer kernel, on the host, and describes their weights to TMA.
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "../context.cuh"
#include "../rope.cuh"
#include "layer_program.cuh"

namespace quire::cuda::layer_kernel {

namespace {

std::int64_t row_bytes(const Weight& w) {
    return w.form == WeightForm::f16 ? w.cols * 2 : w.form == WeightForm::q4_k ? w.cols / 256 * 144 : w.cols;
}

// A tensor map of weights whose tiles are 128 rows in pairs: [the columns of a stage][8 rows, `row` apart][2, `pair` apart][n3, `third`
// apart][n4, `fourth` apart], box3 · box4 of the last two. Distances are in bytes.
bool encode_pairs(CUtensorMap& map, const Weight& w, std::int64_t row, std::int64_t pair, std::int64_t n3,
                  std::int64_t third, int box3, std::int64_t n4, std::int64_t fourth, int box4) {
    const bool fp16 = w.form == WeightForm::f16;
    return encode_tensor_map<5>(map, w.data, fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8,
                                {fp16 ? w.cols : row_bytes(w), 8, 2, n3, n4}, {row, pair, third, fourth},
                                {fp16 ? tile_k : stage_row_bytes(kind_of(w)), 8, 2, box3, box4},
                                w.form == WeightForm::q4_k ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B);
}

// The scales of the pairs of two matrices, or of one. half: see Quantised; 0: the pairs are equal rows of the two.
Quantised quantised_pairs(const Weight& a, const Weight& b, int half) {
    Quantised q{};
    q.kind = kind_of(a);
    q.half = half > 0 ? half : 1 << 30;
    if (q.kind != kind_q4_k) q.row_groups = int(a.cols / a.group);
    for (int i = 0; i < 2; i++) {
        const Weight&      w     = i == 0 ? a : b;
        const std::int64_t first = half > 0 && i == 1 ? std::int64_t(half) * q.row_groups : 0;
        q.scales[i]              = static_cast<const char*>(w.scales) + first * (w.float_scales ? 4 : 2);
        q.mins[i]                = static_cast<const char*>(w.mins) + first * 4;
        q.shift[i]               = std::ldexp(1.0f, shift_of(w));
        q.unscale[i]             = unscale_of(w);
    }
    return q;
}

// Whether the kernel can read these weights.
bool readable(const Weight& w) {
    return w.form == WeightForm::f16 || (w.form == WeightForm::i8 && w.cols % 128 == 0) ||
           (w.form == WeightForm::q4_k && w.cols % 256 == 0);
}

// Whether `rope` rotates the results of this GEMM, whole heads of q and k.
bool fuses_rope(const RopeStore& rope, const Operation& op) {
    return rotates_results(rope, op) && rope.head_dim >= 16 && tile_n % rope.head_dim == 0 &&
           !op.projection[0].out_is_float;
}
// Whether `norm` adds the result of this GEMM to the residual.
bool adds_norm(const Operation& norm, const Operation& op) {
    return op.kind == Operation::gemm && op.n_projections == 1 && norm.x == op.projection[0].out &&
           !op.projection[0].out_is_float && norm.residual != nullptr && norm.cols == op.projection[0].weight.rows &&
           norm.cols <= max_norm_cols;
}

// Appends the phase of the GEMM `op`, with `next` as its epilogue if that is possible. Returns how many of the two operations
// it runs; 0: none.
int match_phase(const Operation& op, const Operation* next, int n_tokens, Params& params) {
    Phase&             phase = params.phase[params.n_phases];
    const std::int64_t cols  = op.cols;
    if (cols % 8 != 0 || (op.kind != Operation::gemm && op.kind != Operation::gated_gemm)) return 0;
    const bool quantised = op.projection[0].weight.form != WeightForm::f16;
    if ((params.n_phases > 0 && quantised != params.quantised) || (!quantised && n_tokens > max_layer_kernel_rows))
        return 0;
    for (int k = 0; k < op.n_projections; k++)
        if (const Weight& w = op.projection[k].weight;
            w.cols != cols || !readable(w) || quantised != (w.form != WeightForm::f16))
            return 0;
    const int unit      = quantised ? 256 : tile_k; // columns
    params.quantised    = quantised;
    phase.cols          = int(cols);
    phase.n_projections = op.n_projections;
    phase.k_tiles       = int((cols + unit - 1) / unit);
    phase.epilogue      = Epilogue::store;
    phase.first_tile[0] = 0;
    const int x_rows    = (n_tokens + 7) / 8 * 8; // the swizzle has 8 rows
    params.x_bytes      = unsigned(x_rows * tile_k * 2);
    if (!encode_matrix(phase.x, op.x, n_tokens, cols, x_rows)) return 0;
    if (op.kind == Operation::gated_gemm) {
        if (op.projection[0].bias || op.projection[1].bias ||
            (op.activation != Activation::silu && op.activation != Activation::gelu_tanh))
            return 0;
        const Weight &     gate = op.projection[0].weight, &up = op.projection[1].weight;
        const std::int64_t distance = static_cast<const char*>(up.data) - static_cast<const char*>(gate.data);
        phase.up_first              = distance < 0;
        const Weight &     a = phase.up_first ? up : gate, &b = phase.up_first ? gate : up;
        const std::int64_t bytes = row_bytes(gate);
        if (gate.rows != up.rows || gate.rows % 8 != 0 || op.projection[0].out_is_float ||
            kind_of(gate) != kind_of(up) ||
            !encode_pairs(phase.weight[0], a, bytes, std::abs(distance), gate.rows / 8, 8 * bytes, 8, 1, 8 * bytes, 1))
            return 0;
        if (quantised) phase.quantised[0] = quantised_pairs(a, b, 0);
        phase.epilogue      = op.activation == Activation::silu ? Epilogue::swiglu : Epilogue::geglu;
        phase.n_projections = 1;
        phase.tile_dim[0]   = 3;
        phase.tile_step[0]  = 8;
        phase.result[0]     = {nullptr, op.projection[0].out, int(gate.rows), false, 1};
        phase.first_tile[1] = int((gate.rows + 63) / 64);
        return phase.first_tile[1] <= max_tiles ? 1 : 0;
    }
    if (next && next->kind == Operation::norm && adds_norm(*next, op)) {
        phase.epilogue    = Epilogue::add_norm;
        phase.norm_weight = next->norm_weight;
        phase.eps         = next->eps;
        phase.residual    = next->residual;
    } else if (next && next->kind == Operation::rope_and_store && fuses_rope(next->rope, op)) {
        phase.epilogue = Epilogue::rope_store;
        params.rope    = next->rope;
    }
    for (int k = 0; k < op.n_projections; k++) {
        const Projection&  p    = op.projection[k];
        const std::int64_t rows = p.weight.rows;
        const int          D    = params.rope.head_dim;
        const bool         neox = phase.epilogue == Epilogue::rope_store && k < 2 &&
                          params.rope.neox; // the rows of a pair are half a head apart
        const std::int64_t bytes = row_bytes(p.weight);
        if (rows % 16 != 0 || !(neox ? encode_pairs(phase.weight[k], p.weight, bytes, D / 2 * bytes, D / 16, 8 * bytes,
                                                    D / 16, rows / D, D * bytes, tile_n / D)
                                     : encode_pairs(phase.weight[k], p.weight, 2 * bytes, bytes, rows / 16, 16 * bytes,
                                                    8, 1, 16 * bytes, 1)))
            return 0;
        if (quantised) phase.quantised[k] = quantised_pairs(p.weight, p.weight, neox ? D / 2 : 1);
        phase.tile_dim[k]  = neox ? 4 : 3;
        phase.tile_step[k] = neox ? tile_n / D : 8;
        phase.result[k] = {p.bias, phase.epilogue == Epilogue::add_norm ? next->out : p.out, int(rows), p.out_is_float,
                           p.scale};
        phase.first_tile[k + 1] = phase.first_tile[k] + int((rows + tile_n - 1) / tile_n);
    }
    return phase.first_tile[phase.n_projections] > max_tiles ? 0 : phase.epilogue == Epilogue::store ? 1 : 2;
}

} // namespace

int compile(const Operation* ops, int n_ops, int n_tokens, const Context& gpu, Params& params) {
    const auto& room = gpu.layer;
    if (!room.partial_sums || !room.fix_up || !room.fix_up_arrivals || !room.grid_barrier ||
        tensor_map_encoder() == nullptr)
        return 0;
    int done = 0;
    for (bool more = true; more && done < n_ops && params.n_phases < max_phases;) {
        const int n = match_phase(ops[done], done + 1 < n_ops ? &ops[done + 1] : nullptr, n_tokens, params);
        if (n == 0) break;
        more = params.phase[params.n_phases++].epilogue != Epilogue::rope_store;
        done += n;
    }
    return done < 2 && (n_ops > 1 || !params.quantised) ? 0 : done;
}

} // namespace quire::cuda::layer_kernel

namespace quire::cuda {

using namespace layer_kernel;

int match_layer_kernel(const Operation* ops, int n_ops, int n_tokens, const Context& gpu) {
    Params params{};
    if (n_ops < 2 || n_tokens > max_quantised_layer_rows) return 0;
    return compile(ops, n_ops, std::min(n_tokens, max_tokens), gpu, params);
}

bool can_layer_gemm(const Context& gpu, const Weight& weight) {
    return gpu.layer.grid_barrier != nullptr && weight.form != WeightForm::f16 && readable(weight) &&
           weight.rows % 16 == 0 && weight.rows <= max_tiles * tile_n;
}

} // namespace quire::cuda
