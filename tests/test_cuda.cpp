// The GPU against plain C++ and against the CPU engine. Without a GPU these tests say so and pass.
#include <catch2/catch_test_macros.hpp>

#include "../cuda/kernels.h"
#include "reference.h"

import quire.base;
import quire.config;
import quire.engine;
import quire.quants;
import quire.request;
import quire.scheduler;
import quire.snapshot;
import quire.std;
import quire.tensor;

#include "engine_tools.h"

using namespace quire;
using namespace quire::testing;

namespace {

bool no_gpu() {
    cuda::DeviceInfo info;
    const char*      why = cuda::open_device(0, info);
    if (why) WARN("not tested: " << why);
    return why != nullptr;
}

// A vector in device memory; outputs begin as NaN, so that what was not written shows.
template <class T>
struct OnDevice {
    explicit OnDevice(const std::vector<T>& values)
        : n(values.size()), data(static_cast<T*>(cuda::allocate(n * sizeof(T)))) {
        cuda::upload(data, values.data(), n * sizeof(T));
    }
    OnDevice(const OnDevice&)            = delete;
    OnDevice& operator=(const OnDevice&) = delete;
    ~OnDevice() { cuda::release(data); }
    std::vector<T> back(cuda::Stream stream) const {
        std::vector<T> out(n);
        cuda::copy_to_host(out.data(), data, n * sizeof(T), stream);
        cuda::synchronize(stream);
        const char* error = cuda::last_error();
        INFO((error ? error : ""));
        REQUIRE(error == nullptr);
        return out;
    }
    std::size_t n;
    T*          data;
};

constexpr std::uint16_t half_nan = 0x7e00;

std::vector<std::uint16_t> random_halves(std::size_t n, std::mt19937& random, float scale = 1) {
    std::normal_distribution<float> normal(0, scale);
    std::vector<std::uint16_t>      out(n);
    for (auto& h : out) h = f32_to_f16(normal(random));
    return out;
}

double relative_error(const std::vector<float>& got, const std::vector<double>& want) {
    double d = 0, all = 0;
    for (std::size_t i = 0; i < want.size(); i++) {
        d += (double(got[i]) - want[i]) * (double(got[i]) - want[i]);
        all += want[i] * want[i];
    }
    return std::isnan(d) ? 1e30 : std::sqrt(d / std::max(all, 1e-30));
}

std::vector<float> floats_of(const std::vector<std::uint16_t>& halves) {
    std::vector<float> out;
    for (std::uint16_t h : halves) out.push_back(f16_to_f32(h));
    return out;
}

} // namespace

TEST_CASE("GPU: products with every kind of weight equal plain sums", "[cuda]") {
    if (no_gpu()) return;
    cuda::Stream stream = cuda::create_stream();
    std::mt19937 random(1);
    for (DType type : {DType::F16, DType::Q8_0, DType::Q4_0, DType::Q5_0, DType::Q4_K, DType::Q5_K, DType::Q6_K})
        for (auto [rows, cols] : {std::pair(1, 256), std::pair(7, 512), std::pair(64, 1280), std::pair(130, 768)})
            for (int n : {1, 2, 3, 5, 8}) {
                CAPTURE(dtype_info(type).name, rows, cols, n);
                // Random blocks whose scales are small halves.
                const DTypeInfo&       info = dtype_info(type);
                std::vector<std::byte> blocks(row_bytes(type, cols) * std::size_t(rows));
                for (std::byte& b : blocks) b = std::byte(random() & 255);
                if (type == DType::F16) {
                    const auto h = random_halves(std::size_t(rows) * std::size_t(cols), random);
                    std::memcpy(blocks.data(), h.data(), blocks.size());
                } else {
                    const std::vector<int> places = type == DType::Q6_K                          ? std::vector{208}
                                                    : type == DType::Q4_K || type == DType::Q5_K ? std::vector{0, 2}
                                                                                                 : std::vector{0};
                    for (std::size_t at = 0; at < blocks.size(); at += std::size_t(info.bytes))
                        for (int place : places) {
                            const std::uint16_t h = f32_to_f16(0.001f * float(1 + random() % 16));
                            std::memcpy(blocks.data() + at + std::size_t(place), &h, 2);
                        }
                }
                std::vector<float> weights(std::size_t(rows) * std::size_t(cols));
                for (int r = 0; r < rows; r++)
                    dequantize(type, blocks.data() + std::size_t(r) * row_bytes(type, cols),
                               weights.data() + std::ptrdiff_t(r) * cols, cols);
                const auto          x = random_halves(std::size_t(8) * std::size_t(cols), random);
                std::vector<double> want;
                std::vector<float>  bias;
                for (int r = 0; r < rows; r++) bias.push_back(float(r % 5));
                for (int t = 0; t < n; t++)
                    for (int r = 0; r < rows; r++) {
                        double sum = double(bias[std::size_t(r)]);
                        for (int c = 0; c < cols; c++)
                            sum += double(weights[std::size_t(r * cols + c)]) *
                                   double(f16_to_f32(x[std::size_t(t * cols + c)]));
                        want.push_back(sum);
                    }

                cuda::Product product;
                product.weight.rows = rows, product.weight.cols = cols;
                OnDevice<std::byte>   raw(blocks);
                OnDevice<std::int8_t> q(std::vector<std::int8_t>(weights.size()));
                OnDevice<float>       scales(std::vector<float>(weights.size() / 16)),
                    mins(std::vector<float>(weights.size() / 16));
                OnDevice<std::uint16_t> there(x);
                OnDevice<float>         biases(bias),
                    out(std::vector<float>(want.size(), std::numeric_limits<float>::quiet_NaN()));
                if (type == DType::F16) product.weight.data = raw.data;
                else if (type == DType::Q4_K) {
                    product.weight.form = cuda::WeightForm::q4_k;
                    product.weight.data = raw.data;
                } else {
                    bool has_mins       = false;
                    product.weight.form = cuda::WeightForm::i8;
                    cuda::i8_layout(std::uint32_t(type), product.weight.group, product.weight.float_scales, has_mins);
                    cuda::to_i8(std::uint32_t(type), raw.data, q.data, scales.data, has_mins ? mins.data : nullptr,
                                std::int64_t(weights.size()), stream);
                    product.weight.data   = q.data;
                    product.weight.scales = scales.data;
                    product.weight.mins   = has_mins ? mins.data : nullptr;
                }
                product.bias         = biases.data;
                product.out          = out.data;
                product.out_is_float = true;
                cuda::matmul_vector(there.data, n, cols, &product, 1, stream);
                CHECK(relative_error(out.back(stream), want) < 2e-3);
            }
    cuda::destroy_stream(stream);
}

TEST_CASE("GPU: attention over blocks equals plain attention", "[cuda]") {
    if (no_gpu()) return;
    cuda::Stream stream = cuda::create_stream();
    std::mt19937 random(2);
    struct Case {
        int D, heads, kv_heads, block, context, n_queries, window;
    };
    std::vector<Case> cases;
    for (int D : {16, 32, 48, 64, 80, 96, 128, 256})
        for (auto [heads, kv] : {std::pair(4, 4), std::pair(4, 2), std::pair(8, 1), std::pair(9, 3)})
            for (auto [context, queries] : {std::pair(1, 1), std::pair(17, 1), std::pair(300, 1), std::pair(513, 1),
                                            std::pair(70, 70), std::pair(200, 131)})
                cases.push_back({D, heads, kv, std::array{1, 8, 16, 24, 256}[random() % 5], context, queries,
                                 random() % 3 == 0 ? 33 : 0});
    for (const Case& c : cases) {
        if (c.D % 16 != 0 && c.n_queries == 1) continue;
        CAPTURE(c.D, c.heads, c.kv_heads, c.block, c.context, c.n_queries, c.window);
        const int                 n_blocks = (c.context + c.block - 1) / c.block + 3;
        std::vector<std::int32_t> ids(std::size_t(n_blocks), 0), positions, items, tiles;
        std::iota(ids.begin(), ids.end(), 0);
        std::shuffle(ids.begin(), ids.end(), random);
        const auto n_cache = std::size_t(n_blocks) * std::size_t(c.block) * std::size_t(c.kv_heads) * std::size_t(c.D);
        const auto k = random_halves(n_cache, random), v = random_halves(n_cache, random),
                   q      = random_halves(std::size_t(c.n_queries) * std::size_t(c.heads) * std::size_t(c.D), random);
        const float scale = 1 / std::sqrt(float(c.D));
        auto        at    = [&](int position, int head, int d) {
            return ((std::size_t(ids[std::size_t(position / c.block)]) * std::size_t(c.kv_heads) + std::size_t(head)) *
                        std::size_t(c.block) +
                    std::size_t(position % c.block)) *
                       std::size_t(c.D) +
                   std::size_t(d);
        };
        std::vector<double> want;
        for (int t = 0; t < c.n_queries; t++) {
            const int last = c.context - c.n_queries + t, first = c.window > 0 ? std::max(0, last - c.window + 1) : 0;
            positions.push_back(last);
            for (int h = 0; h < c.heads; h++) {
                const int           kv = h / (c.heads / c.kv_heads);
                std::vector<double> p;
                double              limit = -1e30, sum = 0;
                for (int j = first; j <= last; j++) {
                    double s = 0;
                    for (int d = 0; d < c.D; d++)
                        s += double(f16_to_f32(
                                 q[(std::size_t(t) * std::size_t(c.heads) + std::size_t(h)) * std::size_t(c.D) +
                                   std::size_t(d)])) *
                             double(f16_to_f32(k[at(j, kv, d)]));
                    p.push_back(s * double(scale));
                    limit = std::max(limit, p.back());
                }
                for (double& s : p) sum += s = std::exp(s - limit);
                for (int d = 0; d < c.D; d++) {
                    double o = 0;
                    for (int j = first; j <= last; j++)
                        o += p[std::size_t(j - first)] * double(f16_to_f32(v[at(j, kv, d)]));
                    want.push_back(o / sum);
                }
            }
        }
        OnDevice<std::uint16_t> dk(k), dv(v), dq(q), out(std::vector<std::uint16_t>(want.size(), half_nan));
        OnDevice<std::int32_t>  dtable(ids), dstart({0}), dpositions(positions);
        cuda::Plan              plan;
        plan.block_tables = dtable.data, plan.table_start = dstart.data, plan.positions = dpositions.data;
        cuda::Attention a;
        a.q = dq.data, a.cache_k = dk.data, a.cache_v = dv.data, a.out = out.data;
        a.n_heads = c.heads, a.n_kv_heads = c.kv_heads, a.head_dim = c.D, a.block_size = c.block, a.scale = scale,
        a.window       = c.window;
        const int tile = cuda::prefill_tile(c.D);
        if (c.n_queries == 1 && tile > 0) {
            const int chunk = cuda::attention_chunk,
                      begin = c.window > 0 ? std::max(0, c.context - c.window) / chunk : 0,
                      n     = (c.context - 1) / chunk + 1 - begin;
            for (int i = 0; i < n; i++) items.insert(items.end(), {0, 0, (begin + i) * chunk, n, i});
            OnDevice<std::int32_t> list(items), tickets(std::vector<std::int32_t>(std::size_t(c.heads), 0));
            OnDevice<float> partial(std::vector<float>(std::size_t(n) * std::size_t(c.heads) * std::size_t(c.D + 2)));
            for (int again = 0; again < 2; again++) // the tickets are ready for the next launch
                cuda::attention_decode(a, plan, reinterpret_cast<const cuda::DecodeItem*>(list.data), n, partial.data,
                                       tickets.data, stream);
            CHECK(relative_error(floats_of(out.back(stream)), want) < 5e-3);
        } else {
            const int most = std::max(tile, 16);
            for (int row = 0; row < c.n_queries; row += most)
                tiles.insert(tiles.end(), {0, row, std::min(most, c.n_queries - row)});
            OnDevice<std::int32_t> list(tiles);
            cuda::attention_prefill(a, plan, reinterpret_cast<const cuda::PrefillTile*>(list.data),
                                    int(tiles.size() / 3), stream);
            CHECK(relative_error(floats_of(out.back(stream)), want) < 5e-3);
        }
    }
    cuda::destroy_stream(stream);
}

TEST_CASE("GPU: the engine answers as on the CPU", "[cuda]") {
    if (no_gpu()) return;
    for (const char* name :
         {"llama3-gqa-F16.gguf", "llama3-gqa-Q8_0.gguf", "mistral-swa-Q8_0.gguf", "qwen2-Q4_0.gguf", "gpt2-F32.gguf"}) {
        CAPTURE(name);
        EngineOptions o;
        o.device                 = "cpu";
        Engine cpu               = load(reference(cat("models/", name)), o);
        o.device                 = "cuda";
        o.kv_blocks              = 512;
        Engine               gpu = load(reference(cat("models/", name)), o);
        std::mt19937         random(3);
        std::vector<Request> requests;
        for (int n : {1, 7, 16, 33, 130, 300}) {
            std::vector<Token> prompt;
            for (int i = 0; i < n; i++) prompt.push_back(int(random() % unsigned(cpu.config().vocab_size)));
            requests.push_back(greedy(prompt, 16));
        }
        const auto want = run(cpu, requests), got = run(gpu, requests);
        for (std::size_t i = 0; i < requests.size(); i++) {
            double squares = 0;
            for (std::size_t t = 0; t < want[i].prompt_logits.size(); t++)
                squares += std::pow(double(got[i].prompt_logits[t]) - double(want[i].prompt_logits[t]), 2);
            CHECK(std::sqrt(squares / double(want[i].prompt_logits.size())) < 0.05);
            // The same token wherever the choice is not close.
            for (std::size_t k = 0; k < want[i].tokens.size(); k++) {
                if (want[i].tokens[k] == got[i].tokens[k]) continue;
                const auto& top = want[i].logprobs[k].top;
                CHECK(top[0].logprob - top[1].logprob < 0.2f);
                break;
            }
        }
    }
}

TEST_CASE("GPU, deterministic: random mixes give every request the bits it gets alone", "[cuda]") {
    if (no_gpu()) return;
    const std::string path = reference("models/llama3-gqa-Q8_0.gguf");
    std::mt19937      random(4);
    auto              below = [&](int n) { return int(random() % unsigned(n)); };
    EngineOptions     plain;
    plain.device               = "cuda";
    plain.deterministic        = true;
    plain.kv_blocks            = 256;
    plain.context              = 200;
    plain.prefix_cache         = false;
    Engine               alone = load(path, plain);
    std::vector<Request> requests;
    std::vector<Token>   common(60);
    for (Token& t : common) t = below(alone.config().vocab_size);
    for (int i = 0; i < 12; i++) {
        std::vector<Token> prompt(common.begin(), common.begin() + (i % 2 ? below(60) : 0));
        for (int n = 1 + below(60); n > 0; n--) prompt.push_back(below(alone.config().vocab_size));
        requests.push_back(greedy(std::move(prompt), 1 + below(40)));
        if (i % 4 == 1) requests.back().sampling.temperature = 1;
    }
    std::vector<Answer> expected;
    for (const Request& r : requests) expected.push_back(run(alone, {r})[0]);
    std::uint64_t preemptions = 0;
    for (int round = 0; round < 12; round++) {
        EngineOptions o    = plain;
        o.block_size       = std::array{1, 8, 16, 32}[std::size_t(round % 4)];
        o.recovery         = round % 2 ? Recovery::swap : Recovery::recompute;
        o.prefix_cache     = round % 3 != 0;
        o.max_sequences    = 2 + below(8);
        o.max_batch_tokens = o.max_sequences + below(90);
        o.kv_blocks        = (200 + o.block_size - 1) / o.block_size + below(4);
        CAPTURE(round, o.block_size, o.max_sequences, o.max_batch_tokens, o.prefix_cache, o.kv_blocks);
        Engine     engine = load(path, o);
        const auto got    = run(engine, requests);
        for (std::size_t i = 0; i < requests.size(); i++) {
            CAPTURE(i);
            CHECK(identical(got[i], expected[i]));
        }
        preemptions += engine.stats().preemptions;
    }
    CHECK(preemptions > 0);
}
