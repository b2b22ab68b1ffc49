// Operations of the CPU backend as a whole, beyond the kernel tests: the cache's layout, RoPE, threads.
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>

import quire.compute.backend;
import quire.compute.cpu.backend;
import quire.compute.kv_cache;
import quire.compute.memory;
import quire.compute.model;
import quire.compute.rope_frequencies;
import quire.compute.program;
import quire.core.base;
import quire.core.std;
import quire.core.tensor;
import quire.core.thread_pool;
import quire.model_file.config;
import quire.model_file.quants;
import quire.paging.block;
import quire.paging.cache_layout;
import quire.step.plan;

using namespace quire;

namespace {

// One operation on a device that the test can read: the CPU.
class OneOperation {
public:
    ValueId value(std::string_view name, std::int64_t cols) { return program_.value({name, cols, false, true}); }
    void    compile(Backend& backend, Operation operation, std::span<const KvLayer> layers, int max_tokens) {
        program_.operations.push_back(std::move(operation));
        program_.head              = 1;
        Result<Activations> values = Activations::create(backend, program_, max_tokens, 1);
        REQUIRE(values);
        values_ = std::move(*values);
        backend.compile(program_, values_, layers, {});
    }
    float* data(ValueId id) const { return static_cast<float*>(values_.at(id, {}).data); }

private:
    Program     program_;
    Activations values_;
};

} // namespace

TEST_CASE("the pool runs every item once, on any number of threads") {
    for (int threads : {1, 2, 5}) {
        ThreadPool pool(threads);
        for (int round = 0; round < 300; round++)
            for (int n : {0, 1, 2, 7, 100}) {
                std::vector<std::atomic<int>> hits(static_cast<std::size_t>(n));
                pool.run(n, [&](int item, int thread) {
                    check(thread >= 0 && thread < threads, "a thread beyond the pool");
                    hits[std::size_t(item)]++;
                });
                for (auto& h : hits) REQUIRE(h == 1);
            }
    }
}

TEST_CASE("copies of weights lie side by side, are zero at first, and outgrow a chunk") {
    LargePages pages;
    const auto sizes = {std::size_t(1), std::size_t(100), std::size_t(5 << 20), std::size_t(64),
                        std::size_t(300 << 20)};
    std::vector<std::pair<std::byte*, std::size_t>> pieces;
    for (const std::size_t bytes : sizes) {
        const Result<std::byte*> piece = pages.take(bytes);
        REQUIRE(piece);
        CHECK(reinterpret_cast<std::uintptr_t>(*piece) % 64 == 0);
        pieces.emplace_back(*piece, std::min<std::size_t>(bytes, 8 << 20)); // of the largest its beginning
        pages.touch(*piece, pieces.back().second);
    }
    CHECK(pieces[1].first == pieces[0].first + 64);
    for (std::size_t i = 0; i < pieces.size(); i++) {
        const std::span memory(pieces[i].first, pieces[i].second);
        CHECK(std::ranges::all_of(memory, [](std::byte b) { return b == std::byte{0}; }));
        std::ranges::fill(memory, std::byte(i + 1));
    }
    pages.settle();
    for (std::size_t i = 0; i < pieces.size(); i++)
        CHECK(std::ranges::all_of(std::span(pieces[i].first, pieces[i].second),
                                  [&](std::byte b) { return b == std::byte(i + 1); }));
    const Result<std::byte*> too_much = pages.take(std::size_t(1) << 55);
    REQUIRE(!too_much);
    CHECK(too_much.error().kind == ErrorKind::system);
}

TEST_CASE("a stack of matrices is read matrix by matrix, whatever their number of rows") {
    constexpr int n = 3, cols = 64;
    std::mt19937  random(5);
    for (DType type : {DType::Q4_0, DType::Q8_0, DType::F16}) // repacked at load or not, and multiplied as floats
        for (int rows : {16, 24, 7}) {
            CAPTURE(dtype_info(type).name, rows);
            std::vector<std::byte> blocks(std::size_t(n * rows) * row_bytes(type, cols));
            for (std::byte& b : blocks) b = std::byte(random() % 60); // a scale of two such bytes is below 1
            std::vector<float> weights(std::size_t(n * rows * cols));
            dequantize(type, blocks.data(), weights.data(), std::int64_t(weights.size()));
            auto backend = make_cpu_backend(2);
            REQUIRE(backend);
            const auto stack = (*backend)->prepare({type, n * rows, cols, blocks.data()}, WeightUse::stack, n);
            REQUIRE(stack);
            OneOperation  op;
            const ValueId x = op.value("x", n * cols), out = op.value("out", n * rows);
            op.compile(**backend, HeadGemm{x, out, *stack, n}, {}, 1);
            for (int i = 0; i < n * cols; i++) op.data(x)[i] = float(i % 7 - 3);
            StepPlan plan;
            plan.tokens = plan.positions = {0};
            plan.token_start             = {0, 1};
            plan.context_lens            = {1};
            plan.groups[0].table_start   = {0, 0};
            plan.groups[0].parts[0]      = {};
            (*backend)->run(plan);
            for (int row = 0; row < n * rows; row++) {
                double sum = 0;
                for (int c = 0; c < cols; c++)
                    sum += double(weights[std::size_t(row * cols + c)]) * double(op.data(x)[row / rows * cols + c]);
                CHECK(double(op.data(out)[row]) == Catch::Approx(sum).margin(1e-3).epsilon(1e-3));
            }
        }
}

TEST_CASE("rope rotates pairs by position, and K and V land in their slots") {
    auto backend = make_cpu_backend(1);
    REQUIRE(backend);
    Backend&    b = **backend;
    ModelConfig c;
    c.n_layers = 1, c.n_heads = 2, c.rope_dim = 4;
    c.layers.assign(1, {.n_kv_heads = 1, .head_dim = 8, .value_dim = 8});
    auto cache = KvCache::create(b, c, DType::F32, 3, 4);
    REQUIRE(cache);
    const std::array<float, 2> freq{1.0f, 0.25f};
    for (bool neox : {false, true}) {
        StepPlan plan;
        plan.tokens       = {0, 0};
        plan.positions    = {5, 6};
        plan.token_start  = {0, 2};
        plan.context_lens = {7};
        plan.readable     = {5};
        plan.groups[0]    = {{0, 2}, {0}, {{{0, 2}, {9, 10}}}}; // block 2, offsets 1 and 2
        OneOperation  one;
        const ValueId q_id = one.value("q", 16), k_id = one.value("k", 8), v_id = one.value("v", 8);
        one.compile(b, RopeAndStore{q_id, k_id, v_id, {freq, 2.0f, neox}, 0, 8, 0}, cache->layers(), 2);
        float *q = one.data(q_id), *k = one.data(k_id), *v = one.data(v_id);
        std::fill_n(q, 32, 1.0f);
        for (std::size_t i = 0; i < 16; i++) k[i] = float(i), v[i] = 100 + float(i);
        b.run(plan);
        const auto* kc = static_cast<const float*>(cache->layers()[0].k) + 9 * 8; // one kv head: [block][offset][8]
        const auto* vc = static_cast<const float*>(cache->layers()[0].v) + 9 * 8;
        for (std::size_t t = 0; t < 2; t++)
            for (std::size_t i = 0; i < 2; i++) {
                const std::size_t a = neox ? i : 2 * i, z = neox ? i + 2 : 2 * i + 1;
                const double      angle = double(plan.positions[t]) * double(freq[i]), x = double(8 * t + a),
                             y = double(8 * t + z);
                CHECK(kc[t * 8 + a] == Catch::Approx(2 * (x * std::cos(angle) - y * std::sin(angle))).margin(1e-4));
                CHECK(kc[t * 8 + z] == Catch::Approx(2 * (x * std::sin(angle) + y * std::cos(angle))).margin(1e-4));
                CHECK(q[t * 16 + 8 + a] ==
                      Catch::Approx(2 * (std::cos(angle) - std::sin(angle))).margin(1e-4)); // second head
            }
        for (std::size_t i = 4; i < 8; i++) CHECK(kc[i] == float(i)); // beyond rope_dim
        for (std::size_t i = 0; i < 16; i++) CHECK(vc[i] == 100 + float(i));
    }
}

TEST_CASE("copied blocks carry K and V of every layer") {
    auto backend = make_cpu_backend(2);
    REQUIRE(backend);
    ModelConfig c;
    c.n_layers = 3, c.n_heads = 1;
    c.layers.assign(3, {.n_kv_heads = 1, .head_dim = 2, .value_dim = 2});
    auto cache = KvCache::create(**backend, c, DType::F32, 4, 2);
    REQUIRE(cache);
    for (const KvLayer& l : cache->layers())
        for (int i = 0; i < 16; i++) {
            static_cast<float*>(l.k)[i] = float(i);
            static_cast<float*>(l.v)[i] = float(-i);
        }
    const std::vector<BlockCopy> copies{{1, 3}, {0, 2}};
    (*backend)->copy_blocks(copies, cache->arrays(), cache->arrays());
    for (const KvLayer& l : cache->layers())
        for (int i = 0; i < 4; i++) {
            CHECK(static_cast<float*>(l.k)[12 + i] == float(4 + i));
            CHECK(static_cast<float*>(l.v)[8 + i] == float(-i));
        }
}

// Decoding sequences that begin with the same blocks, others between them, and a prompt: the same bits as each alone.
TEST_CASE("attention over a shared prefix gives every sequence what it gets alone") {
    ModelConfig c;
    c.n_layers = 1, c.n_heads = 14;
    c.layers.assign(1, {.n_kv_heads = 2, .head_dim = 24, .value_dim = 24}); // groups of 7, which no tile divides
    constexpr int                   block = 5, shared = 30, n_seqs = 9, cols = 14 * 24;
    std::mt19937                    random(4);
    std::normal_distribution<float> normal;
    for (int threads : {1, 3})
        for (DType type : {DType::F16, DType::F32}) {
            auto backend = make_cpu_backend(threads);
            REQUIRE(backend);
            Backend& b     = **backend;
            auto     cache = KvCache::create(b, c, type, 400, block);
            REQUIRE(cache);
            for (void* array : {cache->layers()[0].k, cache->layers()[0].v})
                for (std::size_t i = 0; i < 400 * block * 2 * 24; i++) {
                    const float x = normal(random);
                    if (type == DType::F32) static_cast<float*>(array)[i] = x;
                    else static_cast<std::uint16_t*>(array)[i] = f32_to_f16(x);
                }
            // Sequence s: of the prefix 30, 30, 17 or no blocks, then some of its own; the last one runs 21 tokens at once.
            StepPlan   all;
            GroupPlan& tables = all.groups[0];
            all.token_start = tables.table_start = {0};
            for (int s = 0, own = shared; s < n_seqs; s++) {
                const int of_prefix = std::array{shared, shared, 17, 0}[std::size_t(s % 4)],
                          n = s == n_seqs - 1 ? 21 : 1, length = (of_prefix + s) * block + 22;
                for (int i = 0; i < (length + block - 1) / block; i++)
                    tables.parts[0].tables.push_back(i < of_prefix ? i : own++);
                for (int t = 0; t < n; t++) all.tokens.push_back(0), all.positions.push_back(length - n + t);
                all.context_lens.push_back(length);
                all.readable.push_back(length - n);
                all.token_start.push_back(int(all.tokens.size()));
                tables.table_start.push_back(int(tables.parts[0].tables.size()));
                tables.first_entry.push_back(0);
                REQUIRE(own < 400);
            }
            std::vector<float> q(all.tokens.size() * cols), together(q.size()), alone(q.size());
            for (float& x : q) x = normal(random);
            OneOperation  attend;
            const ValueId q_id = attend.value("q", cols), out_id = attend.value("out", cols);
            attend.compile(b, Attention{q_id, out_id, 0, 14, 0.2f, 0, 0, {}}, cache->layers(), all.n_tokens());
            std::ranges::copy(q, attend.data(q_id));
            b.run(all);
            std::copy_n(attend.data(out_id), together.size(), together.begin());
            for (std::size_t s = 0; s < n_seqs; s++) {
                const int first = all.token_start[s], n = all.token_start[s + 1] - first;
                StepPlan  one;
                one.tokens.assign(std::size_t(n), 0);
                one.positions.assign(all.positions.begin() + first, all.positions.begin() + first + n);
                one.token_start                  = {0, n};
                one.context_lens                 = {all.context_lens[s]};
                one.readable                     = {all.readable[s]};
                const std::vector<BlockId>& from = tables.parts[0].tables;
                const std::vector<BlockId>  own_table(from.begin() + tables.table_start[s],
                                                      from.begin() + tables.table_start[s + 1]);
                one.groups[0] = {{0, int(own_table.size())}, {0}, {{own_table, {}}}};
                std::copy_n(q.begin() + first * cols, n * cols, attend.data(q_id));
                b.run(one);
                std::copy_n(attend.data(out_id), n * cols, alone.begin() + first * cols);
            }
            CHECK(together == alone);
        }
}

// Threads take heads alone and then share what is left; 3 heads and 2,300 positions are enough work for that.
TEST_CASE("attention of one long sequence has the same bits with any number of threads") {
    constexpr int heads = 6, dim = 128, block = 16, blocks = 144, length = 2300;
    ModelConfig   c;
    c.n_layers = 1, c.n_heads = heads;
    c.layers.assign(1, {.n_kv_heads = 3, .head_dim = dim, .value_dim = dim});
    std::mt19937                    random(5);
    std::normal_distribution<float> normal;
    std::vector<float>              q(heads * dim), kv(std::size_t(2) * blocks * block * 3 * dim), first;
    for (std::vector<float>* values : {&q, &kv})
        for (float& x : *values) x = normal(random);
    for (int threads : {1, 2, 3, 4, 5}) {
        auto backend = make_cpu_backend(threads);
        REQUIRE(backend);
        auto cache = KvCache::create(**backend, c, DType::F32, blocks, block);
        REQUIRE(cache);
        std::copy_n(kv.data(), kv.size() / 2, static_cast<float*>(cache->layers()[0].k));
        std::copy_n(kv.data() + kv.size() / 2, kv.size() / 2, static_cast<float*>(cache->layers()[0].v));
        StepPlan plan;
        plan.tokens       = {0};
        plan.positions    = {length - 1};
        plan.token_start  = {0, 1};
        plan.context_lens = {length};
        plan.readable     = {length - 1};
        std::vector<BlockId> table(blocks);
        std::iota(table.begin(), table.end(), 0);
        plan.groups[0] = {{0, blocks}, {0}, {{table, {}}}};
        OneOperation  attend;
        const ValueId q_id = attend.value("q", heads * dim), out_id = attend.value("out", heads * dim);
        attend.compile(**backend, Attention{q_id, out_id, 0, heads, 0.1f, 0, 0, {}}, cache->layers(), 1);
        std::ranges::copy(q, attend.data(q_id));
        (*backend)->run(plan);
        const std::vector<float> out(attend.data(out_id), attend.data(out_id) + heads * dim);
        CAPTURE(threads);
        if (first.empty()) first = out;
        CHECK(out == first);
    }
}

TEST_CASE("blocks go to the swap pool and come back elsewhere") {
    auto backend = make_cpu_backend(2);
    REQUIRE(backend);
    ModelConfig c;
    c.n_layers = 3, c.n_heads = 1;
    c.layers.assign(3, {.n_kv_heads = 1, .head_dim = 2, .value_dim = 2});
    auto cache = KvCache::create(**backend, c, DType::F32, 4, 2, 3);
    REQUIRE(cache);
    float value = 0;
    for (const KvLayer& l : cache->layers())
        for (void* array : {l.k, l.v})
            for (int i = 0; i < 16; i++) static_cast<float*>(array)[i] = value++;
    BlockMoves out, in;
    out.swap_out = {{1, 2}, {3, 0}};
    in.swap_in   = {{2, 0}, {0, 1}};
    in.copies    = {{0, 2}, {1, 0}}; // in this order
    cache->move_blocks(**backend, out);
    cache->move_blocks(**backend, in);
    value = 0;
    for (const KvLayer& l : cache->layers())
        for (void* array : {l.k, l.v}) {
            for (int i = 0; i < 4; i++) {
                CHECK(static_cast<float*>(array)[8 + i] == value + float(4 + i));
                CHECK(static_cast<float*>(array)[4 + i] == value + float(12 + i));
                CHECK(static_cast<float*>(array)[i] == value + float(12 + i));
            }
            value += 16;
        }
}

// Where some K or V has scales, all arrays of all layers share contiguous blocks.
TEST_CASE("codes and scales of every layer have a place of their own in a block") {
    auto backend = make_cpu_backend(1);
    REQUIRE(backend);
    for (const bool latent : {false, true})
        for (const KvTypes types : {KvTypes(DType::I8), KvTypes(DType::F8, DType::F16), KvTypes(DType::F32, DType::I8)})
            for (int block : {1, 5, 16}) {
                ModelConfig c;
                c.n_layers = 3, c.n_heads = 4;
                c.layers.assign(3, {.n_kv_heads = latent ? 1 : 2, .head_dim = 40, .value_dim = latent ? 24 : 40});
                if (latent) c.latent.emplace();
                if (latent && !has_scales(types.k)) continue; // as before
                const CacheLayout layout = cache_layout(c, types, 64, block);
                REQUIRE(layout.block_bytes > 0);
                auto cache = KvCache::create(**backend, c, types, 4, block, 0, layout);
                REQUIRE(cache);
                std::vector<std::pair<std::uintptr_t, std::size_t>> places; // in block 0, with their bytes
                std::size_t                                         token = 0;
                for (const KvLayer& l : cache->layers()) {
                    const auto rows = std::size_t(l.n_kv_heads * block);
                    const auto add  = [&](const void* array, std::size_t bytes) {
                        if (array) places.emplace_back(std::uintptr_t(array), rows * bytes);
                        if (array) token += std::size_t(l.n_kv_heads) * bytes;
                    };
                    CHECK(l.stride == layout.block_bytes);
                    add(l.k, row_bytes(l.type, l.head_dim)), add(l.v, row_bytes(l.v_type, l.head_dim));
                    add(l.k_scales, latent ? 8 : 4), add(l.v_scales, 4);
                }
                CHECK(token == KvCache::bytes_per_token(c, types));
                std::ranges::sort(places);
                for (std::size_t i = 1; i < places.size(); i++)
                    CHECK(places[i - 1].first + places[i - 1].second <= places[i].first);
                CHECK(places.back().first + places.back().second <= places[0].first + layout.block_bytes);
            }
}

// A layer's K and V among those of other layers in contiguous blocks, or in two of them: the same bits as in memory of its own, also after moves.
TEST_CASE("attention over contiguous blocks gives the bits of attention over a layer's own arrays") {
    ModelConfig c;
    c.n_layers = 3, c.n_heads = 4;
    c.layers.assign(3, {.n_kv_heads = 2, .head_dim = 24, .value_dim = 24});
    constexpr int block = 4, n_tokens = 19, cols = 4 * 24, kv_cols = 2 * 24;
    auto          backend = make_cpu_backend(2);
    REQUIRE(backend);
    Backend& b = **backend;
    for (DType type : {DType::F16, DType::F32, DType::I8}) { // codes are in contiguous blocks in any case
        std::vector<std::vector<float>> results;
        for (const int halves : {0, 6, 3, 1}) { // of a contiguous block: all; K0 V0 K1, V1 K2 V2; each alone
            CacheLayout layout = cache_layout(c, type, 64, block);
            REQUIRE(layout.groups.size() == 1);
            // Whole rows and 256 bytes.
            const std::size_t all = KvCache::block_bytes(c, type, layout, block) / 6 * std::size_t(halves);
            if (halves > 0) layout.block_bytes = (all + 767) / 768 * 768;
            CacheGroup& group = layout.groups[0];
            if (halves % 6 > 0) group.blocks = 6 / halves, group.layers_per_block = halves, group.halves = true;
            auto cache = KvCache::create(b, c, type, 96, block, 96, layout);
            REQUIRE(cache);
            CHECK(cache->bytes() == 96 * KvCache::block_bytes(c, type, layout, block));
            for (int i = 0; i < 3; i++) {
                const KvLayer& l = cache->layers()[std::size_t(i)];
                CHECK(l.part == (group.halves ? 2 * i / halves : 0));
                CHECK(l.v_part == (group.halves ? (2 * i + 1) / halves : 0));
            }
            std::mt19937                    random(7);
            std::normal_distribution<float> normal;
            StepPlan                        plan;
            GroupPlan&                      tables = plan.groups[0];
            std::vector<BlockId>            ids{9, 2, 14, 0, 7};
            for (int t = 0; t < n_tokens; t++) {
                plan.tokens.push_back(0), plan.positions.push_back(t);
                tables.parts[0].slots.push_back(ids[std::size_t(t / block)] * block + t % block);
            }
            const auto add_parts = [&] { // each in the 16 blocks behind
                tables.parts.resize(1);
                for (int n = 1; n < group.blocks; n++) {
                    GroupPlan::Part part = tables.parts.back();
                    for (BlockId& id : part.tables) id += 16;
                    for (std::int32_t& slot : part.slots) slot += 16 * block;
                    tables.parts.push_back(std::move(part));
                }
            };
            plan.token_start = {0, n_tokens}, plan.context_lens = {n_tokens}, plan.readable = {0};
            tables.table_start = {0, int(ids.size())}, tables.first_entry = {0}, tables.parts[0].tables = ids;
            add_parts();
            const auto fill = [&](float* x, int n) {
                for (int i = 0; i < n; i++) x[i] = normal(random);
            };
            for (int layer = 0; layer < 3; layer++) {
                OneOperation  store;
                const ValueId q = store.value("q", cols), k = store.value("k", kv_cols), v = store.value("v", kv_cols);
                store.compile(b, RopeAndStore{q, k, v, {}, layer, 24, 0}, cache->layers(), n_tokens);
                fill(store.data(k), n_tokens * kv_cols), fill(store.data(v), n_tokens * kv_cols);
                b.run(plan);
            }
            // Out to the swap pool, back to other blocks, and one of these copied.
            BlockMoves out, in;
            out.swap_out = {{9, 3}, {2, 0}, {14, 5}, {0, 1}, {7, 2}};
            in.swap_in   = {{3, 1}, {0, 11}, {5, 4}, {1, 9}, {2, 3}};
            in.copies    = {{4, 15}};
            for (std::vector<BlockCopy>* moves : {&out.swap_out, &in.swap_in, &in.copies})
                for (std::size_t i = 0, n = moves->size(); i + n < n * std::size_t(group.blocks); i++)
                    moves->push_back({(*moves)[i].from + 16, (*moves)[i].to + 16});
            cache->move_blocks(b, out);
            cache->move_blocks(b, in);
            tables.parts[0].tables = {1, 11, 15, 9, 3};
            add_parts();
            std::vector<float>& result = results.emplace_back();
            for (int layer = 0; layer < 3; layer++) {
                OneOperation  attend;
                const ValueId q = attend.value("q", cols), to = attend.value("out", cols);
                attend.compile(b, Attention{q, to, layer, 4, 0.2f, 0, 0, {}}, cache->layers(), n_tokens);
                fill(attend.data(q), n_tokens * cols);
                b.run(plan);
                result.insert(result.end(), attend.data(to), attend.data(to) + n_tokens * cols);
            }
        }
        for (const std::vector<float>& result : results) CHECK(result == results[0]);
    }
}

// Gemma 4 has two shapes of layers, and layers that read the K and V of others.
TEST_CASE("a model whose layers have too many shapes, or remember nothing, is refused") {
    ModelConfig c;
    c.n_heads      = 8;
    const auto why = [&] {
        const Result<void> ok = check_cache_shapes("m.gguf", c);
        return ok ? std::string() : ok.error().message;
    };
    c.layers.emplace_back();
    CHECK(why() == "m.gguf: no layer has keys and values or a recurrent state");
    for (int i = 0; i < 8; i++) {
        LayerConfig& l = c.layers.emplace_back();
        l.n_kv_heads = 1 + i % 4, l.head_dim = l.value_dim = 64;
    }
    CHECK(why().empty());
    CHECK(cache_layout(c, DType::F16, 4096).groups.size() == 4);
    c.layers[3].head_dim = 32;
    CHECK(why() == "m.gguf: the layers have keys, values and states of 5 different shapes; quire has room for 4");
    c.layers[3].head_dim = 64;
    c.layers.push_back({.state = {3, 10, 2, 4, 6}});
    CHECK(why() == "m.gguf: the layers have keys, values and states of 5 different shapes; quire has room for 4");
}

TEST_CASE("layers of several shapes, layers that share K and V, and states lie in one pool") {
    ModelConfig c;
    c.n_heads = 8;
    for (int i = 0; i < 12; i++) {
        LayerConfig& l = c.layers.emplace_back();
        if (i % 4 == 3) l.n_kv_heads = 1, l.head_dim = l.value_dim = 512;
        else l.n_kv_heads = 2, l.head_dim = l.value_dim = 256, l.window = 64;
    }
    c.layers[10].kv_source = 9, c.layers[11].kv_source = 7;
    c.layers.push_back({.state = {3, 10, 2, 4, 6}}); // 120 bytes, rounded up to 256, and 192
    c.layers.push_back({.state = {3, 40, 0, 0, 0}}); // 480 bytes
    c.layers.push_back({});                          // remembers nothing
    c.n_layers               = int(c.layers.size());
    const CacheLayout layout = cache_layout(c, DType::F16, 4096, 16);
    REQUIRE(layout.groups.size() == 3);
    CHECK(layout.groups[0].layers == std::vector<int>{3, 7});
    CHECK(layout.groups[1].layers == std::vector<int>{0, 1, 2, 4, 5, 6, 8, 9});
    CHECK(layout.groups[2].layers == std::vector<int>{12, 13});
    CHECK(layout.groups[2].offsets == std::vector<std::size_t>{0, 512});
    CHECK(layout.groups[2].layer.state == 1024);
    CHECK(layout.parts().back() == 0);
    CHECK(layout.blocks_per_unit() == 1);
    CHECK(layout.block_bytes % (512 * 2) == 0); // whole rows
    CHECK(layout.waste() <= 0.02);
    auto backend = make_cpu_backend(1);
    REQUIRE(backend);
    auto cache = KvCache::create(**backend, c, DType::F16, 5, 16, 0, layout);
    REQUIRE(cache);
    CHECK(cache->bytes() == 5 * layout.block_bytes);
    // Every byte of a block belongs to at most one array of each group, and every array lies in its block.
    const auto* const base = cache->arrays()[0].data;
    for (const CacheGroup& g : layout.groups) {
        std::set<std::tuple<int, std::ptrdiff_t>> begins;
        for (int layer : g.layers) {
            if (g.keeps_state()) continue;
            const KvLayer& l = cache->layers()[std::size_t(layer)];
            CHECK(l.stride == layout.block_bytes);
            for (void* array : {l.k, l.v}) {
                const std::ptrdiff_t at = static_cast<std::byte*>(array) - base;
                CHECK(at >= 0);
                CHECK(std::size_t(at) + l.block_bytes() <= layout.block_bytes);
                CHECK(std::size_t(at) % l.block_bytes() == 0);
                CHECK(begins.emplace(l.part, at).second);
            }
        }
    }
    CHECK(cache->layers()[10].k == cache->layers()[9].k);
    CHECK(cache->layers()[11].part == cache->layers()[7].part);
    CHECK(cache->layers()[14].k == nullptr);
    REQUIRE(cache->states().size() == c.layers.size());
    CHECK(cache->states()[0].memory == nullptr);
    CHECK(cache->states()[13].offset == 512);
    CHECK(cache->states()[13].bytes == 512); // rounded up for matrices behind it
}

TEST_CASE("a state is read and written through the blocks of its unit") {
    std::vector<std::byte>     memory(6 * 256);
    const StateLayer           state{memory.data(), 256, 0, 512, 700};
    const std::vector<BlockId> unit{4, 1, 5, 0, 2};
    std::vector<std::byte>     in(700), out(700);
    for (std::size_t i = 0; i < in.size(); i++) in[i] = std::byte(i * 37 + 5);
    state.write(unit, 0, 300, in.data());
    state.write(unit, 300, 400, in.data() + 300);
    state.read(unit, 0, 700, out.data());
    CHECK(in == out);
    CHECK(memory[5 * 256] == in[0]);
    CHECK(memory[255] == in[511]);
    CHECK(memory[2 * 256] == in[512]);
    CHECK(state.piece(unit, 200, 500).n == 56);
}

TEST_CASE("rope frequencies: gpt-oss does not round the bounds of YaRN's ramp") {
    ModelConfig c; // of gpt-oss 20B; its ramp goes from pair 8.09278 to pair 17.39802
    c.rope_dim              = 64;
    c.rope_base             = 150000;
    c.rope_scaling          = RopeScaling::yarn;
    c.rope_factor           = 32;
    c.rope_original_context = 4096;
    float      scale        = 0;
    const auto part         = [&](int pair) { // how much of the pair's frequency is left
        return double(rope_frequencies(c, false, {}, scale)[std::size_t(pair)]) * std::pow(150000.0, pair / 32.0);
    };
    const auto expected = [](double ramp) { return Catch::Approx(1 - ramp + ramp / 32).epsilon(1e-5); };
    CHECK(part(9) == expected(0.1));
    CHECK(part(17) == expected(0.9));
    c.yarn_rounds = false;
    CHECK(part(8) == expected(0));
    CHECK(part(9) == expected((9 - 8.092779) / (17.398025 - 8.092779)));
    CHECK(part(17) == expected((17 - 8.092779) / (17.398025 - 8.092779)));
    CHECK(part(18) == expected(1));
}

TEST_CASE("rope frequencies: plain, linear, divided by the file's factors") {
    ModelConfig c;
    c.rope_dim  = 4;
    c.rope_base = 10000;
    float scale = 0;
    CHECK(rope_frequencies(c, false, {}, scale)[1] == Catch::Approx(0.01f));
    CHECK(scale == 1);
    const std::array<float, 2> divisors{2, 4};
    CHECK(rope_frequencies(c, false, divisors, scale)[1] == Catch::Approx(0.0025f));
    c.rope_scaling = RopeScaling::linear;
    c.rope_factor  = 4;
    CHECK(rope_frequencies(c, false, {}, scale)[0] == Catch::Approx(0.25f));
    c.rope_scaling          = RopeScaling::yarn; // against `transformers` in the engine's reference test (qwen2-yarn)
    c.rope_original_context = 64;
    CHECK(rope_frequencies(c, false, {}, scale).size() == 2);
    CHECK(scale == Catch::Approx(0.1 * std::log(4.0) + 1));
    c.yarn_scales_rope = false; // the scores are scaled instead
    c.rope_attn_factor = 0.5f;
    rope_frequencies(c, false, {}, scale);
    CHECK(scale == 0.5f);
    c.yarn_attn_factor = 3; // in place of YaRN's own
    rope_frequencies(c, false, {}, scale);
    CHECK(scale == 1.5f);
    c.rope_base_local = 100; // layers with a window: another base, no scaling
    c.rope_dim_local  = 4;
    CHECK(rope_frequencies(c, true, {}, scale)[1] == Catch::Approx(0.1f));
    CHECK(scale == 1);
}
