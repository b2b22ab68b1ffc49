// The GPU's attention, RoPE and KV store against plain loops. Without a GPU these tests print that and pass.
#include <unistd.h>

#include <catch2/catch_test_macros.hpp>

#include "../cuda/kernels.h"

import quire.compute.cuda.attention_plan;
import quire.compute.cuda.shared_prefixes;
import quire.core.std;
import quire.core.tensor;
import quire.step.plan;

#include "cuda_tools.h"

using namespace quire;
using namespace quire::testing;

constexpr int item_words = sizeof(cuda::SplitKvItem) / 4;

namespace {

// K or V as codes with scales that are powers of two, so that fp16 holds their products exactly: `numbers` are these, rows of `cols`.
struct Codes {
    std::vector<std::uint8_t> codes;
    std::vector<float>        scales; // `parts` of a row: of the first `first` numbers, and of the rest
};
Codes random_codes(std::vector<std::uint16_t>& numbers, int cols, int parts, int first, cuda::KvType type,
                   std::mt19937& random) {
    Codes to{std::vector<std::uint8_t>(numbers.size()),
             std::vector<float>(numbers.size() / std::size_t(cols) * std::size_t(parts))};
    for (float& scale : to.scales) scale = std::ldexp(type == cuda::KvType::i8 ? 1.0f : 0.25f, -int(5 + random() % 3));
    for (std::size_t i = 0; i < numbers.size(); i++) {
        auto& code = to.codes[i];
        do code = std::uint8_t(random());
        while (type == cuda::KvType::i8 ? code == 0 : (code & 0x7f) > 0x68); // e4m3: up to 16
        const int   exponent = code >> 3 & 15, mantissa = code & 7;
        const float e4m3 = std::ldexp(float(exponent > 0 ? 8 + mantissa : mantissa), std::max(exponent, 1) - 10) *
                           (code & 0x80 ? -1.0f : 1.0f);
        const auto part = std::size_t(parts > 1 && int(i % std::size_t(cols)) >= first);
        numbers[i]      = f32_to_f16((type == cuda::KvType::i8 ? float(code) - 128 : e4m3) *
                                     to.scales[i / std::size_t(cols) * std::size_t(parts) + part]);
    }
    return to;
}

} // namespace

TEST_CASE("GPU: attention over blocks equals plain attention", "[cuda]") {
    if (no_gpu()) return;
    const Gpu    gpu;
    std::mt19937 random(2);
    struct Case {
        int   D, heads, kv_heads, block, context, n_queries, window;
        float softcap;
        bool  decodes   = n_queries == 1; // each query for itself, as those of many sequences
        int   value_dim = 0;              // of a latent cache
        bool  chunked   = false;          // the window is a chunk
    };
    std::vector<Case> cases;
    for (int D : {16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 512})
        for (auto [heads, kv] : {std::pair(4, 4), std::pair(4, 2), std::pair(8, 1), std::pair(9, 3)})
            for (auto [context, queries] : {std::pair(1, 1), std::pair(17, 1), std::pair(300, 1), std::pair(513, 1),
                                            std::pair(2100, 1), std::pair(70, 70), std::pair(200, 131)})
                cases.push_back({D, heads, kv, std::array{1, 8, 16, 24, 256}[random() % 5], context, queries,
                                 random() % 3 == 0 ? 33 : 0, random() % 4 == 0 ? 2.5f : 0.0f});
    for (int D : {64, 128}) { // block sizes of all kinds; and more tiles than a GPU has SMs
        for (int block : {1, 4, 8, 12, 16, 32, 40, 64, 128, 256, 384})
            cases.push_back({D, 2, 1, block, 333, 261, block == 32 ? 200 : 0, 0});
        cases.push_back({D, 45, 5, 16, 260, 257, 0, 0});
    }
    for (auto [D, queries] :
         {std::pair(64, 56), std::pair(128, 34), std::pair(256, 12)}) // the last heads' splits are shorter
        for (int window : {0, 500}) cases.push_back({D, 24, 24, 16, 600, queries, window, 0, true});
    // Latent: the shape of DeepSeek-V2, and one of the plain kernel.
    for (auto [D, value] : {std::pair(576, 512), std::pair(80, 64)})
        for (int heads : {1, 16, 17, 40, 128})
            for (auto [context, queries] :
                 {std::pair(1, 1), std::pair(300, 1), std::pair(2100, 1), std::pair(70, 70), std::pair(130, 37)})
                if (heads < 100 || context < 100)
                    cases.push_back({D, heads, 1, std::array{1, 8, 16, 24, 256}[random() % 5], context, queries,
                                     random() % 3 == 0 ? 33 : 0, random() % 4 == 0 ? 2.5f : 0.0f, queries == 1, value});
    for (int D : {48, 64, 96, 128, 256, 512}) // chunks
        for (auto [context, queries] : {std::pair(700, 1), std::pair(700, 560), std::pair(513, 2)})
            cases.push_back({D, 4, 2, 16, context, queries, 256, 0, queries == 1, 0, true});
    for (const Case& c : cases) {
        if (c.D % 16 != 0 && c.n_queries == 1) continue;
        const int  V     = c.value_dim > 0 ? c.value_dim : c.D;
        const bool sinks = random() % 2 == 0;
        // Rows of a block: some are other layers', and need not be whole tiles.
        const int rows = c.kv_heads * c.block + int(random() % 2 * (random() % 100));
        CAPTURE(sinks, c.value_dim, c.D, c.heads, c.kv_heads, c.block, c.context, c.n_queries, c.window, c.softcap,
                c.decodes, rows);
        const int n_blocks = (c.context + c.block - 1) / c.block + 3;
        // The blocks of K, and behind them those of V, which are other ones or the same.
        const bool                apart = c.value_dim == 0 && random() % 3 == 0;
        std::vector<std::int32_t> ids(std::size_t(n_blocks), 0), positions, items, tiles;
        std::iota(ids.begin(), ids.end(), 0);
        std::shuffle(ids.begin(), ids.end(), random);
        ids.insert(ids.end(), ids.begin(), ids.begin() + n_blocks);
        if (apart) std::shuffle(ids.begin() + n_blocks, ids.end(), random);
        const auto n_cache = std::size_t(n_blocks) * std::size_t(rows) * std::size_t(c.D);
        auto       k = random_fp16(n_cache, random), v = c.value_dim > 0 ? k : random_fp16(n_cache, random);
        const std::vector<float> sink = floats_of(random_fp16(std::size_t(c.heads), random, 3));
        const auto  q     = random_fp16(std::size_t(c.n_queries) * std::size_t(c.heads) * std::size_t(c.D), random);
        const float scale = 1 / std::sqrt(float(c.D));
        auto        at    = [&](int position, int head, int d, bool of_v) {
            return (std::size_t(ids[std::size_t(position / c.block + (of_v ? n_blocks : 0))]) * std::size_t(rows) +
                    std::size_t(head * c.block + position % c.block)) *
                       std::size_t(c.D) +
                   std::size_t(d);
        };
        // A third of the cases as codes, K or V or both.
        const int            parts = c.value_dim > 0 ? 2 : 1;
        const bool           coded = c.block % 4 == 0 && random() % 3 == 0;
        std::array<bool, 2>  has_codes{};
        std::array           types{cuda::KvType(1 + random() % 2), cuda::KvType(1 + random() % 2)};
        std::array<Codes, 2> codes;
        for (std::size_t i = 0; i < 2 && coded; i++) {
            has_codes[i] = c.value_dim > 0 ? i == 0 : random() % 4 != 0;
            if (has_codes[i]) codes[i] = random_codes(i == 0 ? k : v, c.D, parts, V, types[i], random);
        }
        if (c.value_dim > 0) v = k;
        CAPTURE(apart, coded, has_codes[0], has_codes[1], int(types[0]), int(types[1]));
        for (int position = c.context; position < n_blocks * c.block; position++) // nobody may read what is not written
            for (int head = 0; head < c.kv_heads; head++) {
                for (int d = 0; d < c.D; d++)
                    k[at(position, head, d, false)] = v[at(position, head, d, true)] = fp16_nan;
                for (std::size_t i = 0; i < 2; i++)
                    for (int part = 0; part < parts && has_codes[i]; part++)
                        codes[i].scales[at(position, head, 0, i == 1) / std::size_t(c.D) * std::size_t(parts) +
                                        std::size_t(part)] = std::numeric_limits<float>::quiet_NaN();
            }
        std::vector<double> want;
        for (int t = 0; t < c.n_queries; t++) {
            const int last = c.context - c.n_queries + t, first = c.chunked      ? last / c.window * c.window
                                                                  : c.window > 0 ? std::max(0, last - c.window + 1)
                                                                                 : 0;
            positions.push_back(last);
            for (int h = 0; h < c.heads; h++) {
                const int           kv = h / (c.heads / c.kv_heads);
                std::vector<double> p;
                double              limit = sinks ? double(sink[std::size_t(h)]) : -1e30, sum = 0;
                for (int j = first; j <= last; j++) {
                    double s = 0;
                    for (int d = 0; d < c.D; d++)
                        s += double(f16_to_f32(
                                 q[(std::size_t(t) * std::size_t(c.heads) + std::size_t(h)) * std::size_t(c.D) +
                                   std::size_t(d)])) *
                             double(f16_to_f32(k[at(j, kv, d, false)]));
                    s *= double(scale);
                    p.push_back(c.softcap > 0 ? double(c.softcap) * std::tanh(s / double(c.softcap)) : s);
                    limit = std::max(limit, p.back());
                }
                for (double& s : p) sum += s = std::exp(s - limit);
                if (sinks) sum += std::exp(double(sink[std::size_t(h)]) - limit);
                for (int d = 0; d < V; d++) {
                    double o = 0;
                    for (int j = first; j <= last; j++)
                        o += p[std::size_t(j - first)] * double(f16_to_f32(v[at(j, kv, d, true)]));
                    want.push_back(o / sum);
                }
            }
        }
        OnDevice<std::uint16_t> dk(gpu, k), dv(gpu, v), dq(gpu, q),
            out(gpu, std::vector<std::uint16_t>(want.size(), fp16_nan));
        OnDevice<std::int32_t> dtable(gpu, ids), dstart(gpu, {0}), dpositions(gpu, positions);
        cuda::Plan             plan;
        plan.block_tables = dtable.data, plan.table_start = dstart.data, plan.positions = dpositions.data;
        cuda::Attention a;
        a.q = dq.data, a.cache_k = dk.data, a.cache_v = dv.data, a.out = out.data;
        a.n_heads = c.heads, a.n_kv_heads = c.kv_heads, a.head_dim = c.D, a.block_size = c.block, a.scale = scale,
        a.window = c.chunked ? 0 : c.window, a.chunk = c.chunked ? c.window : 0, a.softcap = c.softcap, a.value_dim = V,
        a.block_rows = rows, a.v_tables = apart ? n_blocks : 0;
        const OnDevice<float> there_sinks(gpu, sink);
        if (sinks) a.sinks = there_sinks.data;
        if (c.value_dim > 0) a.cache_v = nullptr;
        const std::vector            none_of{std::uint8_t(0)};
        const OnDevice<std::uint8_t> k_codes(gpu, has_codes[0] ? codes[0].codes : none_of),
            v_codes(gpu, has_codes[1] ? codes[1].codes : none_of);
        const OnDevice<float> k_scales(gpu, codes[0].scales), v_scales(gpu, codes[1].scales);
        a.coded   = coded;
        a.k_array = has_codes[0] ? cuda::KvArray{k_codes.data, k_scales.data, types[0], rows, rows, parts}
                                 : cuda::KvArray{dk.data, nullptr, cuda::KvType::f16, rows};
        a.v_array = c.value_dim > 0 ? cuda::KvArray{}
                    : has_codes[1]  ? cuda::KvArray{v_codes.data, v_scales.data, types[1], rows, rows, parts}
                                    : cuda::KvArray{dv.data, nullptr, cuda::KvType::f16, rows};
        if (coded) a.cache_k = a.cache_v = nullptr;
        const int tile = cuda::prefill_tile(gpu, c.D, V);
        if (c.decodes && tile > 0) {
            // Short splits, of the lengths that the device is given, and long ones, as very long contexts have them.
            const int  which = c.n_queries == 1 ? int(random() % 3) : 1;
            const auto lengths =
                which == 0 ? cuda::SplitLengths{}
                : which == 1
                    ? cuda::split_lengths(gpu, c.D, V, std::int64_t(1) << (c.n_queries > 1 ? 24 : 8 + random() % 16))
                    : cuda::SplitLengths{256 * int(2 + random() % 7), 0};
            const auto cut = [&](int chunk) {
                const auto before = items.size();
                for (int t = 0; t < c.n_queries; t++) {
                    const int end          = positions[std::size_t(t)] + 1,
                              begin        = c.chunked      ? (end - 1) / c.window * c.window
                                             : c.window > 0 ? std::max(0, end - c.window)
                                                            : 0,
                              old          = int(random() % 2) * (end - 1);
                    const auto [n, length] = cuda::splits_of(end - begin, chunk);
                    for (int i = 0; i < n; i++)
                        items.insert(items.end(), {t, 0, begin + i * length, std::min(end, begin + (i + 1) * length), n,
                                                   i, old, 0, 0});
                }
                return int(items.size() - before) / item_words;
            };
            plan.items.n = cut(lengths.length);
            if (lengths.short_length > 0) plan.items.n_short = cut(lengths.short_length);
            OnDevice<std::int32_t> list(gpu, items),
                arrivals(gpu, std::vector<std::int32_t>(std::size_t(c.heads) * std::size_t(c.n_queries), 0));
            OnDevice<float> partial(
                gpu, std::vector<float>(items.size() / item_words * std::size_t(c.heads) * std::size_t(V + 2)));
            plan.items.list = reinterpret_cast<const cuda::SplitKvItem*>(list.data);
            for (int again = 0; again < 2; again++) // the arrivals are ready for the next launch
                cuda::attention_decode(a, plan, partial.data, arrivals.data, gpu);
            CHECK(relative_error(floats_of(out.back(gpu)), want) < 5e-3);
            for (std::size_t at = 4; at < items.size(); at += item_words)
                if (items[at] > 1) plan.items.n = 0; // in several splits
            if (plan.items.n == 0) continue;
            plan.items.one_warp = true;
            const std::vector<std::uint16_t> none(want.size(), fp16_nan);
            cuda::upload(out.data, none.data(), none.size() * 2, gpu);
            cuda::attention_decode(a, plan, partial.data, arrivals.data, gpu);
            CHECK(relative_error(floats_of(out.back(gpu)), want) < 5e-3);
        } else {
            const int most = std::max(tile, 16);
            for (int row = 0, n = 0; row < c.n_queries; row += n) {
                n = std::min(most, c.n_queries - row);
                if (c.chunked) n = std::min(n, c.window - positions[std::size_t(row)] % c.window);
                tiles.insert(tiles.end(), {0, row, n});
            }
            OnDevice<std::int32_t> list(gpu, tiles);
            // Codes as fp16, their table behind the one of the cache.
            std::vector<std::int32_t> unpack{0, 0, (c.context + c.block - 1) / c.block, 0};
            const std::size_t n_unpacked = coded && c.value_dim == 0 ? std::size_t(unpack[2]) * std::size_t(c.block) *
                                                                           std::size_t(c.kv_heads * c.D)
                                                                     : 1;
            OnDevice<std::uint16_t> unpacked_k(gpu, std::vector<std::uint16_t>(n_unpacked)),
                unpacked_v(gpu, std::vector<std::uint16_t>(n_unpacked));
            std::vector<std::int32_t> identity(std::size_t(unpack[2]), 0);
            std::iota(identity.begin(), identity.end(), 0);
            OnDevice<std::int32_t> there_unpack(gpu, unpack), there_identity(gpu, identity);
            if (coded && c.value_dim == 0) {
                cuda::unpack_codes(a, plan, reinterpret_cast<const cuda::UnpackedBlocks*>(there_unpack.data), 1,
                                   unpack[2], unpacked_k.data, unpacked_v.data, gpu);
                plan.block_tables = there_identity.data;
                a.coded = false, a.cache_k = unpacked_k.data, a.cache_v = unpacked_v.data;
                a.block_rows = c.kv_heads * c.block, a.v_tables = 0;
            }
            cuda::attention_prefill(a, plan, reinterpret_cast<const cuda::PrefillTile*>(list.data),
                                    int(tiles.size() / 3), gpu);
            CHECK(relative_error(floats_of(out.back(gpu)), want) < 5e-3);
        }
    }
}

// A warp that waits for a tile of K and V, while another one of its warpgroup says that the tile can be overwritten, may miss the tile and wait for
// ever: about once in ten thousand launches.
TEST_CASE("GPU: attention of prompts of all lengths ends each time, with the same bits", "[cuda]") {
    if (no_gpu()) return;
    const Gpu     gpu;
    std::mt19937  random(20261130);
    constexpr int heads = 32, kv_heads = 8, block = 16, n_blocks = 1024, most_tokens = 4096;
    alarm(120); // ends a test that hangs: no other thread could stop the kernel
    for (const int D : {64, 128, 256, 512}) {
        const int                     columns = kv_heads * D;
        const OnDevice<std::uint16_t> k(gpu, random_fp16(std::size_t(n_blocks * block * columns), random)),
            v(gpu, random_fp16(std::size_t(n_blocks * block * columns), random)),
            q(gpu, random_fp16(std::size_t(most_tokens * heads * D), random));
        for (int mix = 0; mix < 6; mix++) {
            std::vector<std::int32_t> ids, starts, positions, tiles;
            for (int left = most_tokens; left > 0; starts.push_back(int(ids.size()))) {
                const int mean = 1 << (3 + random() % 8), n = std::min(left, 1 + int(random() % unsigned(2 * mean))),
                          before = random() % 2 == 0 ? 0 : int(random() % 500), first = most_tokens - left;
                if (starts.empty()) starts.push_back(0);
                const int sequence = int(starts.size()) - 1;
                for (int i = 0; i < n; i++) positions.push_back(before + i);
                for (int row = 0; row < n; row += 128)
                    tiles.insert(tiles.end(), {sequence, first + row, std::min(128, n - row)});
                for (int i = 0; i * block < before + n; i++) ids.push_back(int(random() % n_blocks));
                left -= n;
            }
            const OnDevice<std::int32_t> dtable(gpu, ids), dstart(gpu, starts), dpositions(gpu, positions),
                list(gpu, tiles);
            const OnDevice<std::uint16_t> out(
                gpu, std::vector<std::uint16_t>(std::size_t(most_tokens * heads * D), fp16_nan));
            cuda::Plan plan;
            plan.block_tables = dtable.data, plan.table_start = dstart.data, plan.positions = dpositions.data;
            cuda::Attention a;
            a.q = q.data, a.cache_k = k.data, a.cache_v = v.data, a.out = out.data;
            a.n_heads = heads, a.n_kv_heads = kv_heads, a.head_dim = a.value_dim = D, a.block_size = block;
            a.block_rows = kv_heads * block, a.scale = 1 / std::sqrt(float(D));
            const auto attend = [&] {
                cuda::attention_prefill(a, plan, reinterpret_cast<const cuda::PrefillTile*>(list.data),
                                        int(tiles.size() / 3), gpu);
            };
            attend();
            const std::vector<std::uint16_t> once = out.back(gpu);
            for (int again = 0; again < 300; again++) attend();
            CHECK(out.back(gpu) == once);
        }
    }
    alarm(0);
}

TEST_CASE("a deterministic step whose splits exceed a launch takes several, with whole rows") {
    std::vector<cuda::SplitKvItem> items;
    for (const int n : {3, 1, 4, 4, 2, 1}) // splits of each row
        for (int i = 0; i < n; i++) items.push_back({.n_splits = n, .split = i});
    std::vector<int> begins;
    launches_of(items, 100, begins);
    CHECK(begins == std::vector<int>{0, 15});
    launches_of(items, 5, begins);
    CHECK(begins == std::vector<int>{0, 4, 8, 12, 15});
    launches_of(items, 4, begins);
    CHECK(begins == std::vector<int>{0, 4, 8, 12, 15});
    launches_of({}, 4, begins);
    CHECK(begins == std::vector<int>{0, 0});
}

TEST_CASE("GPU: RoPE and KV store of every form equal plain loops", "[cuda]") {
    if (no_gpu()) return;
    const Gpu    gpu;
    std::mt19937 random(21);
    struct Shape {
        int  n, heads, kv_heads, D, n_pairs, q_dim, q_first, value_dim;
        bool neox;
        bool biased = false; // by what a GEMM has left
    };
    for (const Shape& s :
         {Shape{3, 4, 2, 64, 32, 64, 0, 64, true}, Shape{40, 4, 2, 64, 16, 64, 0, 64, true},
          Shape{40, 4, 2, 64, 16, 64, 0, 64, false}, Shape{5, 3, 3, 80, 0, 80, 0, 80, false},
          Shape{40, 6, 2, 80, 0, 80, 0, 80, false, true}, Shape{3, 64, 64, 64, 0, 64, 0, 64, false, true},
          Shape{5, 3, 1, 15, 5, 15, 0, 15, true}, Shape{3, 16, 1, 576, 32, 192, 128, 512, false},
          Shape{40, 5, 1, 576, 32, 192, 128, 512, true}, Shape{7, 4, 1, 80, 8, 48, 32, 64, false},
          Shape{7, 3, 1, 27, 3, 17, 11, 21, false}}) {
        CAPTURE(s.n, s.heads, s.kv_heads, s.D, s.n_pairs, s.q_dim, s.q_first, s.value_dim, s.neox);
        const bool latent = s.value_dim != s.D;
        const int  k_dim = latent ? s.D - s.value_dim : s.D, block = 4, rows = s.kv_heads * block + s.n % 2;
        const auto q    = random_fp16(std::size_t(s.n * s.heads * s.q_dim), random),
                   k    = random_fp16(std::size_t(s.n * s.kv_heads * k_dim), random),
                   v    = random_fp16(std::size_t(s.n * s.kv_heads * s.value_dim), random);
        const auto bias = [&](int heads) {
            std::vector<float> of = floats_of(random_fp16(std::size_t(heads * s.D), random));
            if (!s.biased) std::ranges::fill(of, 0.0f);
            return of;
        };
        const std::vector<float>  q_bias = bias(s.heads), k_bias = bias(s.kv_heads), v_bias = bias(s.kv_heads);
        const OnDevice<float>     there_q_bias(gpu, q_bias), there_k_bias(gpu, k_bias), there_v_bias(gpu, v_bias);
        std::vector<float>        frequencies;
        std::vector<std::int32_t> positions, slots;
        for (int i = 0; i < s.n_pairs; i++) frequencies.push_back(float(std::pow(10000.0, -2.0 * i / (2 * s.n_pairs))));
        for (int t = 0; t < s.n; t++) positions.push_back(13 * t + 1), slots.push_back(t + 1 == s.n ? -1 : 2 + 2 * t);
        slots             = with_v_slots(slots);
        const int v_slots = latent ? 0 : s.heads % 2 * s.n; // K and V in other blocks, or not
        frequencies.push_back(0);                           // never an empty buffer
        const auto cache = std::vector<std::uint16_t>(std::size_t((s.n / 2 + 2) * rows * s.D), fp16_nan);
        const OnDevice<std::uint16_t> there_q(gpu, q), there_k(gpu, k), there_v(gpu, v), cache_k(gpu, cache),
            cache_v(gpu, cache);
        const OnDevice<float>        there_frequencies(gpu, frequencies);
        const OnDevice<std::int32_t> there_positions(gpu, positions), there_slots(gpu, slots);
        cuda::Plan                   plan;
        plan.positions = there_positions.data, plan.slots = there_slots.data;
        cuda::RopeStore a;
        a.q = there_q.data, a.k = there_k.data, a.v = there_v.data, a.cache_k = cache_k.data;
        a.cache_v = latent ? nullptr : cache_v.data, a.inv_freq = there_frequencies.data, a.n_pairs = s.n_pairs;
        a.n_heads = s.heads, a.n_kv_heads = s.kv_heads, a.head_dim = s.D, a.block_size = block, a.q_dim = s.q_dim;
        a.q_first = s.q_first, a.value_dim = s.value_dim, a.scale = 1.25f, a.neox = s.neox;
        a.block_rows = rows, a.v_slots = v_slots;
        if (s.biased) {
            REQUIRE(cuda::can_add_biases(a));
            a.q_bias = there_q_bias.data, a.k_bias = there_k_bias.data, a.v_bias = there_v_bias.data;
        }
        cuda::rope_and_store(a, plan, s.n, gpu);
        const auto plus = [&](const std::vector<std::uint16_t>& x, const std::vector<float>& of) {
            std::vector<float> xs = floats_of(x);
            for (std::size_t i = 0; s.biased && i < xs.size(); i++) xs[i] += of[i % of.size()];
            return xs;
        };
        const auto rotated = [&](const std::vector<float>& xs, int heads, int dim, int first) {
            std::vector<double> out(xs.begin(), xs.end());
            for (int head = 0; head < s.n * heads; head++)
                for (int i = 0; i < s.n_pairs; i++) {
                    const int one = s.neox ? i : 2 * i, other = s.neox ? i + s.n_pairs : 2 * i + 1;
                    double &  c = out[std::size_t(head * dim + first + one)],
                           &d   = out[std::size_t(head * dim + first + other)];
                    const double angle =
                        double(positions[std::size_t(head / heads)]) * double(frequencies[std::size_t(i)]);
                    const double turned = 1.25 * (c * std::cos(angle) - d * std::sin(angle));
                    d                   = 1.25 * (c * std::sin(angle) + d * std::cos(angle));
                    c                   = turned;
                }
            return out;
        };
        CHECK(relative_error(floats_of(there_q.back(gpu)), rotated(plus(q, q_bias), s.heads, s.q_dim, s.q_first)) <
              1e-3);
        const std::vector<double> ks = rotated(plus(k, k_bias), s.kv_heads, k_dim, 0);
        const std::vector<float>  vs = plus(v, v_bias);
        const auto stored = [&](const OnDevice<std::uint16_t>& from, int first, int dim, const auto& want, int at) {
            const std::vector<std::uint16_t> all = from.back(gpu);
            std::vector<float>               got;
            std::vector<double>              wanted;
            for (int t = 0; t + 1 < s.n; t++)
                for (int h = 0; h < s.kv_heads; h++)
                    for (int d = 0; d < dim; d++) {
                        const int slot = slots[std::size_t(t + at)];
                        got.push_back(f16_to_f32(
                            all[std::size_t((slot / block * rows + h * block + slot % block) * s.D + first + d)]));
                        wanted.push_back(double(want[std::size_t((t * s.kv_heads + h) * dim + d)]));
                    }
            CHECK(relative_error(got, wanted) < 1e-3);
            return std::ranges::count_if(all, [](std::uint16_t h) { return h != fp16_nan; });
        };
        const auto all = std::ptrdiff_t((s.n - 1) * s.kv_heads * s.D); // and nothing else
        CHECK(stored(cache_k, latent ? s.value_dim : 0, k_dim, ks, 0) == all);
        CHECK(stored(latent ? cache_k : cache_v, 0, s.value_dim, vs, v_slots) == all);
    }
}

// A step of one query each: tables[s] are the blocks of sequence s, which has `lengths[s]` positions.
StepPlan one_query_each(const std::vector<std::vector<BlockId>>& tables, const std::vector<int>& lengths) {
    StepPlan plan;
    plan.groups[0].table_start = {0};
    plan.token_start           = {0};
    for (std::size_t s = 0; s < tables.size(); s++) {
        plan.tokens.push_back(0);
        plan.positions.push_back(lengths[s] - 1);
        plan.context_lens.push_back(lengths[s]);
        plan.readable.push_back(0);
        plan.token_start.push_back(int(s) + 1);
        GroupPlan& group = plan.groups[0];
        group.first_entry.push_back(0);
        group.parts[0].tables.insert(group.parts[0].tables.end(), tables[s].begin(), tables[s].end());
        group.table_start.push_back(int(group.parts[0].tables.size()));
    }
    return plan;
}

TEST_CASE("the sequences of a step that begin with the same blocks are found as a tree") {
    // 0, 2 and 5 begin with 1 2 3; of these 0 and 5 go on with 4. The last block of a sequence is never shared.
    const std::vector<std::vector<BlockId>> tables  = {{1, 2, 3, 4, 5}, {7, 8},     {1, 2, 3, 6},
                                                       {9, 2, 3},       {7, 8, 10}, {1, 2, 3, 4, 11}};
    const std::vector<int>                  lengths = {70, 32, 60, 48, 33, 65};
    StepPlan                                plan    = one_query_each(tables, lengths);
    SharedPrefixes                          prefixes;
    const auto                              found = [&](int least) {
        prefixes.find(plan, plan.groups[0], 16, least);
        std::vector<std::vector<int>> all; // begin, end, then the sequences in order
        for (const SharedPrefix& p : prefixes.prefixes()) {
            std::vector<int> one(prefixes.order().begin() + p.first, prefixes.order().begin() + p.first + p.n);
            std::ranges::sort(one);
            one.insert(one.begin(), {p.begin, p.end});
            all.push_back(one);
        }
        std::ranges::sort(all);
        return all;
    };
    CHECK(found(16) == std::vector<std::vector<int>>{{0, 16, 1, 4}, {0, 48, 0, 2, 5}, {48, 64, 0, 5}});
    CHECK(found(48) == std::vector<std::vector<int>>{{0, 48, 0, 2, 5}});
    CHECK(found(64) == std::vector<std::vector<int>>{{0, 64, 0, 5}}); // what too few share is left to fewer
    plan.groups[0].first_entry[5] = 1;                                // behind a window
    CHECK(found(48) == std::vector<std::vector<int>>{{0, 48, 0, 2}});
    plan.token_start = {0, 1, 2, 4, 5, 6, 7}; // sequence 2 has two queries
    CHECK(found(16) == std::vector<std::vector<int>>{{0, 16, 1, 4}});
}

TEST_CASE("GPU: sequences that share their beginning attend to it together", "[cuda]") {
    if (no_gpu()) return;
    const Gpu    gpu;
    std::mt19937 random(31);
    struct Shape {
        int   D, heads, kv_heads, block, sequences;
        float softcap = 0;
    };
    for (const Shape& c : {Shape{64, 8, 2, 16, 40}, Shape{128, 8, 2, 16, 70}, Shape{128, 4, 4, 16, 130},
                           Shape{128, 7, 1, 8, 9}, Shape{256, 8, 1, 16, 21}, Shape{192, 4, 2, 16, 17},
                           Shape{80, 6, 3, 24, 33, 2.5f}, Shape{96, 4, 4, 32, 5}, Shape{64, 40, 1, 16, 6}}) {
        const bool sinks = random() % 2 == 0, rounded = random() % 2 == 0, apart = random() % 2 == 0;
        CAPTURE(c.D, c.heads, c.kv_heads, c.block, c.sequences, sinks, rounded, apart);
        // Three beginnings, of which the second goes on in two ways; some sequences share nothing.
        std::vector<std::vector<BlockId>> stems(5), tables;
        std::vector<int>                  lengths;
        int                               n_blocks = 0;
        const auto                        more     = [&](std::vector<BlockId>& table, int n) {
            for (int i = 0; i < n; i++) table.push_back(n_blocks++);
        };
        more(stems[0], 1600 / c.block), more(stems[1], 700 / c.block), more(stems[2], 130 / c.block);
        stems[3] = stems[4] = stems[1];
        more(stems[3], 330 / c.block), more(stems[4], 90 / c.block);
        for (int s = 0; s < c.sequences; s++) {
            std::vector<BlockId>& table = tables.emplace_back();
            if (random() % 8 > 0) table = stems[random() % 5];
            const int own = int(random() % (c.sequences % 2 == 0 ? 200 : 900));
            lengths.push_back(int(table.size()) * c.block + own + 1);
            more(table, own / c.block + 1);
        }
        std::vector<BlockId> ids(std::size_t(n_blocks), 0); // anywhere in the cache
        std::iota(ids.begin(), ids.end(), 0);
        std::shuffle(ids.begin(), ids.end(), random);
        for (std::vector<BlockId>& table : tables)
            for (BlockId& id : table) id = ids[std::size_t(id)];
        const StepPlan step = one_query_each(tables, lengths);

        const auto n_cache = std::size_t(n_blocks * c.block * c.kv_heads * c.D);
        auto       k = random_fp16(n_cache, random), v = random_fp16(n_cache, random);
        const auto q     = random_fp16(std::size_t(c.sequences * c.heads * c.D), random);
        const auto sink  = floats_of(random_fp16(std::size_t(c.heads), random, 3));
        const auto scale = float(1 / std::sqrt(double(c.D)));
        // V of a block, if not in the block, is as far from the last one.
        const auto block_of_v = [&](BlockId block) { return apart ? n_blocks - 1 - block : block; };
        const auto at         = [&](std::size_t s, int position, int head, bool of_v) {
            BlockId block = tables[s][std::size_t(position / c.block)];
            if (of_v) block = block_of_v(block);
            return std::size_t(((block * c.kv_heads + head) * c.block + position % c.block) * c.D);
        };
        for (std::size_t s = 0; s < tables.size(); s++) // nobody may read what is not written
            for (int position = lengths[s]; position < int(tables[s].size()) * c.block; position++)
                for (int head = 0; head < c.kv_heads; head++)
                    for (int d = 0; d < c.D; d++)
                        k[at(s, position, head, false) + std::size_t(d)] =
                            v[at(s, position, head, true) + std::size_t(d)] = fp16_nan;
        const std::vector<float> ks = floats_of(k), vs = floats_of(v), qs = floats_of(q);
        std::vector<double>      want;
        for (std::size_t s = 0; s < tables.size(); s++)
            for (int h = 0; h < c.heads; h++) {
                std::vector<double> p, o(std::size_t(c.D), 0.0);
                double              most = sinks ? double(sink[std::size_t(h)]) : -1e30, sum = 0;
                for (int j = 0; j < lengths[s]; j++) {
                    float dot = 0;
                    for (int d = 0; d < c.D; d++)
                        dot += qs[(s * std::size_t(c.heads) + std::size_t(h)) * std::size_t(c.D) + std::size_t(d)] *
                               ks[at(s, j, h / (c.heads / c.kv_heads), false) + std::size_t(d)];
                    const double x = double(dot * scale), cap = double(c.softcap);
                    p.push_back(cap > 0 ? cap * std::tanh(x / cap) : x);
                    most = std::max(most, p.back());
                }
                for (double& x : p) sum += x = std::exp(x - most);
                if (sinks) sum += std::exp(double(sink[std::size_t(h)]) - most);
                for (int j = 0; j < lengths[s]; j++)
                    for (int d = 0; d < c.D; d++)
                        o[std::size_t(d)] += p[std::size_t(j)] / sum *
                                             double(vs[at(s, j, h / (c.heads / c.kv_heads), true) + std::size_t(d)]);
                want.insert(want.end(), o.begin(), o.end());
            }

        AttentionShape shape;
        shape.head_dim = shape.value_dim = c.D, shape.n_heads = c.heads, shape.n_kv_heads = c.kv_heads;
        shape.block_size = c.block, shape.rounded = rounded, shape.least_saved = 1;
        const AttentionRoom       room = attention_room(shape, gpu, c.sequences, c.sequences, 4096);
        std::vector<std::int32_t> items(std::size_t(room.list * item_words)), tiles(std::size_t(c.sequences * 3)),
            shared(std::size_t(most_shared_tiles(gpu)) * sizeof(cuda::SharedTile) / 4),
            queries(std::size_t(most_shared_queries(c.sequences)) * sizeof(cuda::SharedQuery) / 4);
        AttentionPlanner    planner;
        const AttentionWork work =
            planner.plan(step, step.groups[0], shape, gpu, {items.data(), tiles.data(), shared.data(), queries.data()});
        REQUIRE(work.n_shared > 0);
        REQUIRE(work.n_tiles == 0);
        const OnDevice<std::uint16_t> dk(gpu, k), dv(gpu, v), dq(gpu, q),
            out(gpu, std::vector<std::uint16_t>(want.size(), fp16_nan));
        std::vector<BlockId> both = step.groups[0].parts[0].tables; // of K, then of V
        for (std::size_t i = 0, n = both.size(); i < n; i++) both.push_back(block_of_v(both[i]));
        const OnDevice<std::int32_t> there_items(gpu, items), there_shared(gpu, shared), there_queries(gpu, queries),
            there_tables(gpu, both), there_positions(gpu, step.positions),
            arrivals(gpu, std::vector<std::int32_t>(std::size_t(c.sequences * c.heads), 0));
        const OnDevice<float> there_sinks(gpu, sink),
            partial(gpu, std::vector<float>(std::size_t(room.launch * c.heads * (c.D + 2)),
                                            std::numeric_limits<float>::quiet_NaN()));
        cuda::Plan plan;
        plan.block_tables = there_tables.data, plan.positions = there_positions.data;
        plan.items = {
            reinterpret_cast<const cuda::SplitKvItem*>(there_items.data),
            work.n_items,
            0,
            work.one_warp,
            {reinterpret_cast<const cuda::SharedTile*>(there_shared.data),
             reinterpret_cast<const cuda::SharedQuery*>(there_queries.data), work.n_shared, work.n_shared_queries}};
        cuda::Attention a;
        a.q = dq.data, a.cache_k = dk.data, a.cache_v = dv.data, a.out = out.data;
        a.n_heads = c.heads, a.n_kv_heads = c.kv_heads, a.head_dim = a.value_dim = c.D, a.block_size = c.block;
        a.block_rows = c.kv_heads * c.block, a.v_tables = apart ? int(both.size() / 2) : 0;
        a.scale = scale, a.softcap = c.softcap, a.sinks = sinks ? there_sinks.data : nullptr;
        for (int again = 0; again < 2; again++) cuda::attention_decode(a, plan, partial.data, arrivals.data, gpu);
        CHECK(relative_error(floats_of(out.back(gpu)), want) < 5e-3);
    }
}
