// bench kernel: single GPU kernels: bytes or operations over the time of a launch. Weights and caches are larger than the L2.
#include "../../cuda/kernels.h"

import quire.compute.cuda.attention_plan;
import quire.core.base;
import quire.core.tensor;
import quire.step.plan;

#include "kernel_gpu.h"

namespace quire::bench {

namespace {

constexpr int D = 128, block = 16; // head_dim, and tokens in a KV block

// Decoding sequences: `common` positions in the same blocks, `own` more of each, in blocks of `size` tokens.
struct DecodeShape {
    int          sequences, common, own, heads, kv_heads, size = block;
    bool         together = false; // the common positions are read once for all
    cuda::KvType type     = cuda::KvType::f16;
};

// Seconds of split-KV attention, cut as in a step.
double decode_seconds(Gpu& gpu, const DecodeShape& d) {
    const int                 L = d.common + d.own, shared = d.common / d.size, per = (L + d.size - 1) / d.size;
    const int                 S = d.sequences, H = d.heads, K = d.kv_heads, n_blocks = shared + S * (per - shared);
    std::vector<std::int32_t> ids(std::size_t(n_blocks), 0);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(3));
    StepPlan   step;
    GroupPlan& group  = step.groups[0];
    step.token_start  = {0};
    group.table_start = {0};
    for (int s = 0; s < S; s++) {
        std::vector<std::int32_t>& table = group.parts[0].tables;
        table.insert(table.end(), ids.begin(), ids.begin() + shared);
        const auto own = ids.begin() + shared + s * (per - shared);
        table.insert(table.end(), own, own + per - shared);
        group.table_start.push_back(int(table.size()));
        group.first_entry.push_back(0);
        step.tokens.push_back(0), step.positions.push_back(L - 1), step.context_lens.push_back(L);
        step.readable.push_back(L - 1), step.token_start.push_back(s + 1);
    }
    AttentionShape shape;
    shape.head_dim = shape.value_dim = D, shape.n_heads = H, shape.n_kv_heads = K;
    shape.block_size = d.together ? d.size : 0;
    if (d.type != cuda::KvType::f16) shape.unpacked = n_blocks, shape.entry = d.size;
    const AttentionRoom       room    = attention_room(shape, gpu.context(), S, S, L);
    const auto                ints    = [](std::size_t bytes) { return std::vector<std::int32_t>(bytes / 4); };
    std::vector<std::int32_t> items   = ints(std::size_t(room.list) * sizeof(cuda::SplitKvItem)),
                              tiles   = ints(std::size_t(S) * 12),
                              shareds = ints(std::size_t(most_shared_tiles(gpu.context())) * sizeof(cuda::SharedTile)),
                              queries = ints(std::size_t(most_shared_queries(S)) * sizeof(cuda::SharedQuery));
    AttentionPlanner    planner;
    const AttentionWork work =
        planner.plan(step, group, shape, gpu.context(), {items.data(), tiles.data(), shareds.data(), queries.data()});
    cuda::Plan plan;
    plan.block_tables                   = static_cast<std::int32_t*>(gpu.ints(group.parts[0].tables));
    plan.table_start                    = static_cast<std::int32_t*>(gpu.ints(group.table_start));
    plan.positions                      = static_cast<std::int32_t*>(gpu.ints(step.positions));
    plan.items                          = {static_cast<cuda::SplitKvItem*>(gpu.ints(items)),
                                           work.n_items,
                                           work.n_short,
                                           work.one_warp,
                                           {static_cast<cuda::SharedTile*>(gpu.ints(shareds)),
                                            static_cast<cuda::SharedQuery*>(gpu.ints(queries)), work.n_shared, work.n_shared_queries}};
    const bool                   coded  = d.type != cuda::KvType::f16;
    const std::size_t            n      = std::size_t(n_blocks) * std::size_t(d.size) * std::size_t(K) * D;
    const int                    copies = std::max(1, int(400e6 / (double(n) * (coded ? 2 : 4))));
    std::vector<cuda::Attention> all;
    for (int i = 0; i < copies; i++) {
        cuda::Attention t;
        t.q   = static_cast<cuda::Half*>(gpu.fp16(std::size_t(S) * std::size_t(H) * D));
        t.out = static_cast<cuda::Half*>(gpu.zeros(std::size_t(S) * std::size_t(H) * D * 2));
        if (t.coded = coded; coded) { // any codes, all scales 0
            for (cuda::KvArray* array : {&t.k_array, &t.v_array})
                *array = {gpu.fp16(n / 2), static_cast<float*>(gpu.zeros(n / D * 4)), d.type, K * d.size, K * d.size};
        } else {
            t.cache_k = static_cast<cuda::Half*>(gpu.fp16(n));
            t.cache_v = static_cast<cuda::Half*>(gpu.fp16(n));
        }
        t.n_heads = H, t.n_kv_heads = K, t.head_dim = t.value_dim = D, t.block_size = d.size, t.scale = 0.088f;
        t.block_rows = K * d.size;
        all.push_back(t);
    }
    auto*        partial  = static_cast<float*>(gpu.zeros(std::size_t(room.launch) * std::size_t(H) * (D + 2) * 4));
    auto*        counters = static_cast<std::int32_t*>(gpu.zeros(std::size_t(S) * std::size_t(H) * 4));
    const double seconds  = gpu.seconds(
        [&](int i) { cuda::attention_decode(all[std::size_t(i % copies)], plan, partial, counters, gpu.context()); });
    gpu.clear();
    return seconds;
}

// Sequences that begin with the same blocks: each on its own, and together.
void shared_attention(Gpu& gpu, const Arguments& a) {
    for (auto [S, common, own] : {std::array{4, 2048, 128}, std::array{8, 512, 128}, std::array{16, 2048, 128},
                                  std::array{64, 256, 128}, std::array{64, 2048, 128}, std::array{256, 1024, 256}})
        for (const bool together : {false, true}) {
            if (!wanted(a, {"shared decode"})) continue;
            const DecodeShape shape{S, common, own, 32, 8, block, together};
            // The bytes that have to be read: those of all sequences, or the common ones once.
            kernel_line(together ? "shared decode, together" : "shared decode, each alone",
                        cat(S, " × (", common, " + ", own, "), heads 32/8"), decode_seconds(gpu, shape),
                        (double(together ? common : S * common) + double(S) * own) * 8 * D * 4, 0, a);
        }
}

// Over codes in place of fp16, a scale for each row.
void coded_attention(Gpu& gpu, const Arguments& a) {
    for (auto [S, L] : {std::array{1, 32000}, std::array{8, 4096}, std::array{64, 512}, std::array{64, 4096}})
        for (const auto& [name, type] : {std::pair{"coded decode f16", cuda::KvType::f16},
                                         {"coded decode q8_0", cuda::KvType::i8},
                                         {"coded decode fp8", cuda::KvType::e4m3}}) {
            if (!wanted(a, {"coded decode"})) continue;
            const double bytes = type == cuda::KvType::f16 ? 4 * D : 2 * D + 2 * 4;
            kernel_line(name, cat(S, " × ", L, ", heads 32/8"),
                        decode_seconds(gpu, {S, 0, L, 32, 8, block, false, type}), double(S) * L * 8 * bytes, 0, a);
        }
}

// Over a paged cache and over a contiguous one.
void decode_attention(Gpu& gpu, const Arguments& a) {
    struct Shape {
        int sequences, context, heads, kv_heads;
    };
    for (auto [S, L, H, K] :
         {Shape{1, 4096, 40, 40}, Shape{1, 16384, 40, 40}, Shape{8, 1024, 40, 40}, Shape{32, 1024, 40, 40},
          Shape{64, 512, 40, 40}, Shape{128, 1024, 40, 40}, Shape{8, 4096, 32, 8}, Shape{64, 2048, 32, 8},
          Shape{128, 4096, 32, 8}, Shape{256, 544, 32, 8}, Shape{256, 1024, 32, 8}})
        for (int size : {block, L}) { // paged; and contiguous, as one block a sequence
            if (!wanted(a, {"decode"})) continue;
            kernel_line(size == block ? "decode paged 16" : "decode contiguous",
                        cat(S, " × ", L, ", heads ", H, "/", K), decode_seconds(gpu, {S, 0, L, H, K, size}),
                        double(S) * L * K * D * 4, 0, a);
        }
}

// Causal attention of one prompt.
void prefill_attention(Gpu& gpu, const Arguments& a) {
    for (int L : {2048, 8192}) {
        if (!wanted(a, {"prefill attention"})) continue;
        const int                 H = 40;
        std::vector<std::int32_t> table, positions, tiles;
        for (int i = 0; i < L / block; i++) table.push_back(i);
        for (int i = 0; i < L; i++) positions.push_back(i);
        const int tile = cuda::prefill_tile(gpu.context(), D, D);
        for (int row = 0; row < L; row += tile) tiles.insert(tiles.end(), {0, row, std::min(tile, L - row)});
        cuda::Plan plan;
        plan.block_tables      = static_cast<std::int32_t*>(gpu.ints(table));
        plan.table_start       = static_cast<std::int32_t*>(gpu.ints({0}));
        plan.positions         = static_cast<std::int32_t*>(gpu.ints(positions));
        const auto*       list = static_cast<cuda::PrefillTile*>(gpu.ints(tiles));
        const std::size_t n    = std::size_t(L) * H * D;
        cuda::Attention   t;
        t.q = static_cast<cuda::Half*>(gpu.fp16(n)), t.cache_k = static_cast<cuda::Half*>(gpu.fp16(n));
        t.cache_v = static_cast<cuda::Half*>(gpu.fp16(n)), t.out = static_cast<cuda::Half*>(gpu.zeros(n * 2));
        t.n_heads = t.n_kv_heads = H, t.head_dim = t.value_dim = D, t.block_size = block, t.scale = 0.088f;
        t.block_rows = H * block;
        const double s =
            gpu.seconds([&](int) { cuda::attention_prefill(t, plan, list, int(tiles.size() / 3), gpu.context()); });
        kernel_line("prefill attention", cat(L, ", heads ", H), s, 0, 2.0 * L * L * H * D, a);
        gpu.clear();
    }
}

// Attention over a latent cache of the shape of DeepSeek-V2 (rows of 576, of which 512 are the value), decoding and of a prompt, and
// the GEMMs of its heads.
void latent_attention(Gpu& gpu, const Arguments& a) {
    constexpr int row = 576, value = 512, L = 4096, most = 64;
    for (int H : {16, 128}) {
        const double flop = 2.0 * H * (row + value); // of a query and a position
        for (int S : {1, 8, most}) {
            if (!wanted(a, {"latent decode"})) continue;
            std::vector<std::int32_t> table, items;
            for (int i = 0; i < S * L / block; i++) table.push_back(i);
            const auto [n, length] =
                cuda::splits_of(L, cuda::split_lengths(gpu.context(), row, value, std::int64_t(S) * L).length);
            for (int s = 0; s < S; s++)
                for (int c = 0; c < n; c++)
                    items.insert(items.end(),
                                 {s, s * L / block, c * length, std::min(L, (c + 1) * length), n, c, 0, 0, 0});
            cuda::Plan plan;
            plan.block_tables = static_cast<std::int32_t*>(gpu.ints(table));
            plan.items        = {static_cast<cuda::SplitKvItem*>(gpu.ints(items)), S * n, 0, false, {}};
            const double                 bytes  = double(S) * L * row * 2;
            const int                    copies = std::max(1, int(200e6 / bytes));
            std::vector<cuda::Attention> all;
            for (int i = 0; i < copies; i++) {
                cuda::Attention t;
                t.q       = static_cast<cuda::Half*>(gpu.fp16(std::size_t(S * H * row)));
                t.out     = static_cast<cuda::Half*>(gpu.zeros(std::size_t(S * H * value) * 2));
                t.cache_k = static_cast<cuda::Half*>(gpu.fp16(std::size_t(S) * L * row));
                t.n_heads = H, t.n_kv_heads = 1, t.head_dim = row, t.value_dim = value;
                t.block_size = t.block_rows = block;
                t.scale                     = 0.07f;
                all.push_back(t);
            }
            auto*        partial  = static_cast<float*>(gpu.zeros(std::size_t(S * n * H) * (value + 2) * 4));
            auto*        counters = static_cast<std::int32_t*>(gpu.zeros(std::size_t(S * H) * 4));
            const double s        = gpu.seconds([&](int i) {
                cuda::attention_decode(all[std::size_t(i % copies)], plan, partial, counters, gpu.context());
            });
            kernel_line("latent decode", cat(S, " × ", L, ", heads ", H), s, bytes, flop * S * L, a);
            gpu.clear();
        }
        if (wanted(a, {"latent prefill"})) {
            constexpr int             T = 2048;
            std::vector<std::int32_t> table(T / block), positions(T), tiles;
            std::iota(table.begin(), table.end(), 0);
            std::iota(positions.begin(), positions.end(), 0);
            const int tile = std::max(cuda::prefill_tile(gpu.context(), row, value), 1);
            for (int first = 0; first < T; first += tile)
                tiles.insert(tiles.end(), {0, first, std::min(tile, T - first)});
            cuda::Plan plan;
            plan.block_tables    = static_cast<std::int32_t*>(gpu.ints(table));
            plan.table_start     = static_cast<std::int32_t*>(gpu.ints({0}));
            plan.positions       = static_cast<std::int32_t*>(gpu.ints(positions));
            const auto*     list = static_cast<cuda::PrefillTile*>(gpu.ints(tiles));
            cuda::Attention t;
            t.q       = static_cast<cuda::Half*>(gpu.fp16(std::size_t(T) * std::size_t(H * row)));
            t.out     = static_cast<cuda::Half*>(gpu.zeros(std::size_t(T) * std::size_t(H * value) * 2));
            t.cache_k = static_cast<cuda::Half*>(gpu.fp16(std::size_t(T) * row));
            t.n_heads = H, t.n_kv_heads = 1, t.head_dim = row, t.value_dim = value;
            t.block_size = t.block_rows = block, t.scale = 0.07f;
            const double s =
                gpu.seconds([&](int) { cuda::attention_prefill(t, plan, list, int(tiles.size() / 3), gpu.context()); });
            kernel_line("latent prefill", cat(T, ", heads ", H), s, 0, flop * T * T / 2, a);
            gpu.clear();
        }
    }
    for (int n : {1, 16, 2048}) {
        if (!wanted(a, {"head GEMM"})) continue;
        constexpr int               heads = 16, rows = 512, cols = 128, copies = 32, x_dim = cols + row - value;
        std::vector<cuda::HeadGemm> all(copies);
        auto*                       x   = static_cast<cuda::Half*>(gpu.fp16(std::size_t(n) * heads * x_dim));
        auto*                       out = static_cast<cuda::Half*>(gpu.zeros(std::size_t(n) * heads * row * 2));
        for (cuda::HeadGemm& op : all) {
            op.x = x, op.out = out, op.n_heads = heads, op.x_dim = x_dim;
            op.weight.rows = heads * rows, op.weight.cols = cols;
            op.weight.data = gpu.fp16(std::size_t(heads) * rows * cols);
        }
        const double weights = double(heads) * rows * cols;
        const double s = gpu.seconds([&](int i) { cuda::head_gemm(all[std::size_t(i % copies)], n, gpu.context()); });
        kernel_line("head GEMM f16", cat(n, " rows, ", heads, " of ", rows, " × ", cols), s,
                    weights * 2 + double(n) * heads * (x_dim + row) * 2, 2 * n * weights, a);
        gpu.clear();
    }
}

// The recurrences of Qwen3.5-27B (gated delta rule) and of Nemotron-H-8B (selective scan): of a decode step, and of one prompt token by token
// and in chunks. Counted are the states and rows, and the products that a chunk of 64 tokens needs.
void recurrences(Gpu& gpu, const Arguments& a) {
    if (!wanted(a, {"recurrence"})) return;
    struct Shape {
        const char* name;
        int         heads, groups, keys, values;
        bool        delta;
    };
    for (const Shape& m : {Shape{"delta rule", 48, 16, 128, 128, true}, Shape{"scan", 128, 8, 128, 64, false}})
        for (const auto& [n, T] :
             {std::pair(1, 1), std::pair(32, 1), std::pair(1, 512), std::pair(1, 2048), std::pair(4, 512)})
            for (const bool in_chunks : {false, true}) {
                if (in_chunks && T == 1) continue;
                const std::int64_t floats = std::int64_t(m.heads) * m.keys * m.values, block = 16384;
                const int          unit = int(floats / block), columns = 2 * m.groups * m.keys + m.heads * m.values;
                const auto         rows = std::size_t(n * T);
                std::vector<std::int32_t> blocks, starts;
                for (int i = 0; i < n * unit; i++) blocks.push_back(i);
                for (int i = 0; i <= n; i++) starts.push_back(i * T);
                cuda::States states;
                states.memory       = static_cast<float*>(gpu.zeros(std::size_t(n) * std::size_t(floats) * 4));
                states.block_floats = block, states.unit = unit, states.n_sequences = n, states.most_tokens = T;
                states.token_start = static_cast<std::int32_t*>(gpu.ints(starts));
                states.from = states.to = static_cast<std::int32_t*>(gpu.ints(blocks));
                cuda::Recurrence op;
                op.x       = static_cast<cuda::Half*>(gpu.fp16(rows * std::size_t(columns)));
                op.step    = static_cast<float*>(gpu.zeros(rows * std::size_t(m.heads) * 4));
                op.write   = m.delta ? op.step : nullptr;
                op.out     = static_cast<float*>(gpu.zeros(rows * std::size_t(m.heads * m.values) * 4));
                op.n_heads = m.heads, op.n_groups = m.groups, op.key_dim = m.keys, op.value_dim = m.values;
                op.step_bias = op.decay = static_cast<float*>(gpu.zeros(std::size_t(m.heads) * 4));
                op.delta = m.delta, op.grouped = !m.delta;
                if (in_chunks)
                    op.chunks = gpu.zeros(cuda::recurrence_chunks_bytes(m.heads, m.groups, m.keys, int(rows)));
                const double s     = gpu.seconds([&](int) { cuda::recurrence(op, states, gpu.context()); });
                const double chunk = std::min(T, 64), products = m.delta ? 3.0 : 2.0; // with S: K, Q and the update
                const double flop = 2.0 * double(rows) * m.heads *
                                    (products * m.keys * m.values + chunk / 2 * products * (m.keys + m.values) / 2);
                kernel_line(in_chunks ? "recurrence, chunks" : "recurrence", cat(m.name, ", ", n, " × ", T), s,
                            2.0 * n * double(floats) * 4 + double(rows) * (2.0 * columns + 4.0 * m.heads * m.values),
                            T == 1 ? 0 : flop, a);
                gpu.clear();
            }
}

// Kernels limited by memory bandwidth: the activations, blocks and logits of a step. Counted are the bytes they must move.
void memory_kernels(Gpu& gpu, const Arguments& a) {
    const auto fp16   = [&](std::size_t n) { return static_cast<cuda::Half*>(gpu.fp16(n)); };
    const auto floats = [&](std::size_t n) { return static_cast<float*>(gpu.zeros(n * 4)); };
    const auto line   = [&](const char* name, const std::string& shape, double bytes,
                          const std::function<void()>& launch) {
        if (wanted(a, {name})) kernel_line(name, shape, gpu.seconds([&](int) { launch(); }), bytes, 0, a);
        gpu.clear();
    };
    constexpr std::size_t hidden = 5120, ff = 13824, heads = 40, D = 128, vocab = 32000, block = 16;
    for (const std::size_t T : {std::size_t(8), std::size_t(64), std::size_t(2048)}) {
        const auto n = std::int64_t(T);
        if (wanted(a, {"norm"})) {
            auto *x = fp16(T * hidden), *out = fp16(T * hidden);
            auto *residual = floats(T * hidden), *weight = floats(hidden);
            line("norm", cat(T, " × ", hidden), double(T * hidden) * 12, [&] {
                cuda::norm(x, false, {}, cuda::NormKind::rms, weight, nullptr, 1e-5f, residual, out, n,
                           std::int64_t(hidden), gpu.context());
            });
        }
        if (wanted(a, {"swiglu"})) {
            auto *gate = fp16(T * ff), *up = fp16(T * ff);
            line("swiglu", cat(T, " × ", ff), double(T * ff) * 6,
                 [&] { cuda::activate(cuda::Activation::silu, gate, up, std::int64_t(T * ff), gpu.context()); });
        }
        if (wanted(a, {"geglu"})) {
            auto *gate = fp16(T * ff), *up = fp16(T * ff);
            line("geglu", cat(T, " × ", ff), double(T * ff) * 6,
                 [&] { cuda::activate(cuda::Activation::gelu_tanh, gate, up, std::int64_t(T * ff), gpu.context()); });
        }
        if (wanted(a, {"rope + store"})) {
            std::vector<std::int32_t> numbers(T);
            std::iota(numbers.begin(), numbers.end(), 0);
            cuda::Plan plan;
            plan.positions = plan.slots = static_cast<std::int32_t*>(gpu.ints(numbers));
            cuda::RopeStore r;
            r.q = fp16(T * hidden), r.k = fp16(T * hidden), r.v = fp16(T * hidden);
            r.cache_k = fp16((T + block) * hidden), r.cache_v = fp16((T + block) * hidden);
            r.inv_freq = floats(D / 2), r.n_pairs = int(D / 2), r.n_heads = r.n_kv_heads = int(heads);
            r.head_dim = r.q_dim = r.value_dim = int(D), r.block_size = int(block), r.block_rows = int(heads * block);
            line("rope + store", cat(T, ", heads ", heads), double(T * hidden) * 12,
                 [&] { cuda::rope_and_store(r, plan, n, gpu.context()); });
        }
    }
    if (wanted(a, {"copy blocks"})) { // of 40 layers
        constexpr std::size_t    n_arrays = 80, n_copies = 16, bytes = block * hidden * 2;
        std::vector<const void*> arrays;
        for (std::size_t i = 0; i < n_arrays; i++) arrays.push_back(gpu.zeros(2 * n_copies * bytes));
        void* bases = gpu.zeros(n_arrays * sizeof(void*));
        cuda::upload(bases, static_cast<const void*>(arrays.data()), n_arrays * sizeof(void*), gpu.context());
        std::vector<std::int32_t> pairs;
        for (int i = 0; i < int(n_copies); i++) pairs.insert(pairs.end(), {i, int(n_copies) + i});
        const auto*      list = static_cast<std::int32_t*>(gpu.ints(pairs));
        cuda::BlockPools pools;
        pools.from = static_cast<const void**>(bases), pools.to = static_cast<void**>(bases);
        pools.n_arrays = int(n_arrays), pools.bytes = pools.stride = bytes;
        line("copy blocks", cat(n_copies, " of 40 layers"), double(n_copies * n_arrays * bytes) * 2,
             [&] { cuda::copy_blocks(pools, list, int(n_copies), gpu.context()); });
    }
    constexpr std::size_t rows = 64;
    if (wanted(a, {"argmax"})) {
        auto* logits = floats(rows * vocab);
        auto* best   = static_cast<std::int32_t*>(gpu.zeros(rows * 4));
        line("argmax", cat(rows, " × ", vocab), double(rows * vocab) * 4,
             [&] { cuda::argmax(logits, best, std::int64_t(rows), std::int64_t(vocab), gpu.context()); });
    }
    if (wanted(a, {"sample"})) {
        std::mt19937                    random(1);
        std::normal_distribution<float> normal(0, 3);
        std::vector<float>              values(rows * vocab);
        for (float& v : values) v = normal(random);
        auto* logits = floats(rows * vocab);
        cuda::upload(logits, values.data(), values.size() * 4, gpu.context());
        std::vector<cuda::SampleTask> tasks(rows);
        std::vector<double>           draws(rows);
        for (std::size_t i = 0; i < rows; i++) {
            cuda::SampleTask& t = tasks[i];
            t.row = t.first_draw = int(i), t.first_out = int(2 * i), t.n_draws = 1;
            t.temperature = 0.8f, t.top_k = 40, t.top_p = 0.95f;
            draws[i] = double(random()) / 4294967296.0;
        }
        auto* list    = static_cast<cuda::SampleTask*>(gpu.zeros(rows * sizeof(cuda::SampleTask)));
        auto* numbers = static_cast<double*>(gpu.zeros(rows * 8));
        cuda::upload(list, tasks.data(), rows * sizeof(cuda::SampleTask), gpu.context());
        cuda::upload(numbers, draws.data(), rows * 8, gpu.context());
        auto* answers = static_cast<std::int32_t*>(gpu.zeros(rows * 16));
        line("sample", cat(rows, " × ", vocab, ", top_k 40"), double(rows * vocab) * 4, [&] {
            cuda::sample(logits, std::int64_t(vocab), list, int(rows), nullptr, numbers, nullptr, answers,
                         gpu.context());
        });
    }
}

} // namespace

std::vector<PagedOverhead> paged_overhead() {
    cuda::DeviceInfo           info;
    std::vector<PagedOverhead> out;
    if (cuda::open_device(0, info)) return out;
    Gpu gpu;
    for (int sequences : {8, 32})
        for (int context : {64, 128, 256, 1024})
            for (int size : {1, 4, 16, 64})
                out.push_back({sequences, context, size,
                               decode_seconds(gpu, {sequences, 0, context, 40, 40, size}) /
                                   decode_seconds(gpu, {sequences, 0, context, 40, 40, context})});
    return out;
}

int kernels(const Arguments& a) {
    cuda::DeviceInfo info;
    if (const char* why = cuda::open_device(0, info))
        return complain({ErrorKind::system, cat("no GPU to measure: ", why)});
    std::printf(
        "%s\n\n| kernel | shape | µs | TB/s | TFLOP/s | of the limit |\n| --- | --- | ---: | ---: | ---: | ---: |\n",
        info.name);
    Gpu gpu;
    small_gemms(gpu, a);
    decode_attention(gpu, a);
    coded_attention(gpu, a);
    shared_attention(gpu, a);
    prefill_attention(gpu, a);
    latent_attention(gpu, a);
    prefill_gemms(gpu, a);
    layer_kernels(gpu, a);
    experts(gpu, a);
    recurrences(gpu, a);
    memory_kernels(gpu, a);
    return 0;
}

} // namespace quire::bench
