// The host's side of the layer kernel: which operations one launch runs.
#include <algorithm>
#include <cstdlib>

#include "../context.cuh"
#include "../rope.cuh"
#include "layer_program.cuh"

namespace quire::cuda::layer_kernel {

// Tiles of 128 rows, by pairs: [64 columns][8 rows, `row` apart][2, `pair` apart][n3, `third` apart][n4, `fourth` apart], of which
// a tile has box3 · box4. Distances are in elements.
bool encode_pairs(CUtensorMap& map, const void* data, std::int64_t cols, std::int64_t row, std::int64_t pair,
                  std::int64_t n3, std::int64_t third, int box3, std::int64_t n4, std::int64_t fourth, int box4) {
    return encode_tensor_map<5>(map, data, {cols, 8, 2, n3, n4}, {row, pair, third, fourth},
                                {tile_k, 8, 2, box3, box4});
}

// Whether `rope` rotates the results of this GEMM, whole heads of q and k.
bool rotates(const RopeStore& rope, const Operation& op) {
    return rotates_results(rope, op) && rope.head_dim >= 16 && tile_rows % rope.head_dim == 0 &&
           !op.projection[0].out_is_float;
}
// Whether `norm` adds the result of this product to the residual.
bool norms(const Operation& norm, const Operation& op) {
    return op.kind == Operation::gemm && op.n_projections == 1 && norm.x == op.projection[0].out &&
           !op.projection[0].out_is_float && norm.residual != nullptr && norm.cols == op.projection[0].weight.rows &&
           norm.cols <= 4 * team * 4;
}

// The products of `op`, and what `next` makes of them. Returns how many of the two it is; 0: not for this kernel.
int understand(const Operation& op, const Operation* next, int n_tokens, Parts& parts) {
    Part&              part = parts.part[parts.n_parts];
    const std::int64_t cols = op.cols;
    if (cols % 8 != 0 || (op.kind != Operation::gemm && op.kind != Operation::gated_gemm)) return 0;
    for (int k = 0; k < op.n_projections; k++)
        if (op.projection[k].weight.form != WeightForm::f16 || op.projection[k].weight.cols != cols) return 0;
    part.n_projections = op.n_projections;
    part.n_steps       = int((cols + tile_k - 1) / tile_k);
    part.epilogue      = Epilogue::store;
    part.first_tile[0] = 0;
    if (!encode_matrix(part.x, op.x, n_tokens, cols, rounded(n_tokens))) return 0;
    if (op.kind == Operation::gated_gemm) {
        const Weight &     gate = op.projection[0].weight, &up = op.projection[1].weight;
        const std::int64_t apart = static_cast<const Half*>(up.data) - static_cast<const Half*>(gate.data);
        part.up_first            = apart < 0;
        if (gate.rows != up.rows || gate.rows % 8 != 0 || op.projection[0].out_is_float ||
            !encode_pairs(part.weight[0], part.up_first ? up.data : gate.data, cols, cols, std::abs(apart),
                          gate.rows / 8, 8 * cols, 8, 1, 8 * cols, 1))
            return 0;
        part.epilogue      = Epilogue::swiglu;
        part.n_projections = 1;
        part.along[0]      = 3;
        part.apart[0]      = 8;
        part.result[0]     = {nullptr, op.projection[0].out, int(gate.rows), false};
        part.first_tile[1] = int((gate.rows + 63) / 64);
        return part.first_tile[1] <= most_tiles ? 1 : 0;
    }
    if (next && next->kind == Operation::norm && norms(*next, op)) {
        part.epilogue    = Epilogue::add_norm;
        part.norm_weight = next->norm_weight;
        part.eps         = next->eps;
        part.residual    = next->residual;
    } else if (next && next->kind == Operation::rope_and_store && rotates(next->rope, op)) {
        part.epilogue = Epilogue::rope_store;
        parts.rope    = next->rope;
    }
    for (int k = 0; k < op.n_projections; k++) {
        const Projection&  p    = op.projection[k];
        const std::int64_t rows = p.weight.rows;
        const int          D    = parts.rope.head_dim;
        const bool half = part.epilogue == Epilogue::rope_store && k < 2 && parts.rope.neox; // pairs half a head apart
        if (rows % 16 != 0 || !(half ? encode_pairs(part.weight[k], p.weight.data, cols, cols, D / 2 * cols, D / 16,
                                                    8 * cols, D / 16, rows / D, D * cols, tile_rows / D)
                                     : encode_pairs(part.weight[k], p.weight.data, cols, 2 * cols, cols, rows / 16,
                                                    16 * cols, 8, 1, 16 * cols, 1)))
            return 0;
        part.along[k]  = half ? 4 : 3;
        part.apart[k]  = half ? tile_rows / D : 8;
        part.result[k] = {p.bias, part.epilogue == Epilogue::add_norm ? next->out : p.out, int(rows), p.out_is_float};
        part.first_tile[k + 1] = part.first_tile[k] + int((rows + tile_rows - 1) / tile_rows);
    }
    return part.first_tile[part.n_projections] > most_tiles ? 0 : part.epilogue == Epilogue::store ? 1 : 2;
}

// As many operations as one launch runs, from the first one on; returns how many, 0: none.
int compile(const Operation* ops, int n_ops, int n_tokens, const Context& gpu, Parts& parts) {
    const auto& room = gpu.layer;
    if (n_ops < 2 || !room.partial_sums || !room.fix_up || !room.fix_up_arrivals || !room.grid_barrier ||
        tensor_map_encoder() == nullptr)
        return 0;
    int done = 0;
    for (bool more = true; more && done < n_ops && parts.n_parts < most_parts;) {
        const int n = understand(ops[done], done + 1 < n_ops ? &ops[done + 1] : nullptr, n_tokens, parts);
        if (n == 0) break;
        more = parts.part[parts.n_parts++].epilogue != Epilogue::rope_store;
        done += n;
    }
    return done < 2 ? 0 : done;
}

} // namespace quire::cuda::layer_kernel

namespace quire::cuda {

using namespace layer_kernel;

int match_layer_kernel(const Operation* ops, int n_ops, const Context& gpu) {
    Parts parts{};
    return compile(ops, n_ops, most_tokens, gpu, parts);
}

} // namespace quire::cuda
