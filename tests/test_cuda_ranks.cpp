// A model on two GPUs of this process: what the kernels between them compute, the answers, and a rank that is lost. Without two GPUs
// nothing is tested.
#include <catch2/catch_test_macros.hpp>

#include <unistd.h>

#include <filesystem>

#include "../cuda/kernels.h"
#include "../cuda/ranks.h"
#include "process.h"
#include "reference.h"

import quire.core.base;
import quire.core.std;
import quire.core.tensor;
import quire.engine.engine;
import quire.model_file.config;
import quire.schedule.request;
import quire.tools.bench.random_model;

#include "cuda_tools.h"
#include "engine_tools.h"

using namespace quire;
using namespace quire::testing;

namespace {

bool no_two_gpus() {
    cuda::announce_ranks();
    cuda::DeviceInfo info;
    const char*      why = cuda::open_device(1, info);
    if (why) WARN("not tested: " << why);
    return why != nullptr;
}

// Two contexts that are ranks.
struct TwoGpus {
    explicit TwoGpus(std::size_t one_shot_bytes, double seconds = 20) {
        const char* why = nullptr;
        for (int i = 0; i < 2; i++) REQUIRE((gpus[i] = cuda::create_context(i, why)) != nullptr);
        const bool connected = cuda::connect_ranks(gpus, 2, one_shot_bytes, seconds, ranks, why);
        INFO((why ? why : ""));
        REQUIRE(connected);
    }
    TwoGpus(const TwoGpus&)            = delete;
    TwoGpus& operator=(const TwoGpus&) = delete;
    ~TwoGpus() {
        for (cuda::Rank* rank : ranks) cuda::destroy_rank(rank);
        for (cuda::Context* gpu : gpus) cuda::destroy_context(gpu);
    }
    // f(rank) on both at once; waits for what it has launched.
    void run(const std::function<void(int)>& f) {
        const auto one = [&](int r) {
            cuda::use(*gpus[r]);
            f(r);
            cuda::synchronize(*gpus[r]);
        };
        std::jthread other([&] { one(1); });
        one(0);
    }
    cuda::Context* gpus[2]{};
    cuda::Rank*    ranks[2]{};
};

template <class T>
std::vector<T> random_values(std::size_t n, std::mt19937& random) {
    std::normal_distribution<float> normal(0, 1);
    std::vector<T>                  out(n);
    for (T& v : out) {
        if constexpr (std::is_same_v<T, float>) v = normal(random);
        else v = f32_to_f16(normal(random));
    }
    return out;
}

// Sums of every size, exactly: two numbers have one sum in float32.
template <class T>
void check_sums(TwoGpus& two, bool by_nccl) {
    std::mt19937 random(3);
    for (const auto& [rows, cols] : std::vector<std::pair<int, int>>{
             {1, 8}, {1, 5120}, {3, 4096}, {2, 31}, {7, 100}, {128, 512}, {200, 1024}, {1, 16384}, {1000, 2048}}) {
        CAPTURE(rows, cols, sizeof(T));
        const auto           n         = std::size_t(rows) * std::size_t(cols);
        const std::vector<T> values[2] = {random_values<T>(n, random), random_values<T>(n, random)};
        const OnDevice<T>    x0((cuda::use(*two.gpus[0]), *two.gpus[0]), values[0]);
        const OnDevice<T>    x1((cuda::use(*two.gpus[1]), *two.gpus[1]), values[1]);
        cuda::AllReduce      sum;
        sum.x.of[0] = sum.out.of[0] = x0.data;
        sum.x.of[1] = sum.out.of[1] = x1.data;
        sum.x_is_float = sum.out_is_float = std::is_same_v<T, float>;
        sum.exact                         = !by_nccl;
        two.run([&](int r) { cuda::all_reduce(sum, rows, cols, *two.ranks[r], *two.gpus[r]); });
        for (int r = 0; r < 2; r++) {
            cuda::use(*two.gpus[r]);
            const std::vector<T> got   = (r == 0 ? x0 : x1).back(*two.gpus[r]);
            std::size_t          wrong = 0;
            for (std::size_t i = 0; i < n; i++) {
                if constexpr (std::is_same_v<T, float>) wrong += got[i] != values[0][i] + values[1][i];
                else wrong += got[i] != f32_to_f16(f16_to_f32(values[0][i]) + f16_to_f32(values[1][i]));
            }
            CHECK(wrong == 0);
        }
    }
}

EngineOptions on_gpus(int n, bool deterministic) {
    EngineOptions o;
    o.device           = "cuda";
    o.tensor_parallel  = n;
    o.deterministic    = deterministic;
    o.kv_blocks        = 512;
    o.swap_blocks      = 64;
    o.max_batch_tokens = deterministic ? 256 : 2048;
    o.max_sequences    = 12;
    return o;
}

// One sequence alone; twelve that decode together; a prompt that fills a step.
std::vector<std::vector<Request>> batches(const Engine& engine) {
    std::mt19937 random(6);
    const int    longest = std::min(1700, engine.options().context - 20);
    const auto   prompt  = [&](int n) {
        std::vector<Token> tokens;
        for (int i = 0; i < n; i++) tokens.push_back(int(random() % unsigned(engine.config().vocab_size)));
        return tokens;
    };
    std::vector<std::vector<Request>> out(3);
    out[0] = {greedy(prompt(std::min(20, longest)), 8)};
    for (int i = 0; i < 12; i++) out[1].push_back(greedy(prompt(1 + i % 5), 8));
    out[2] = {greedy(prompt(longest), 4)};
    return out;
}

void compare(const std::string& path) {
    Engine one = load(path, on_gpus(1, false));
    if (one.config().n_heads % 2 != 0 || (one.config().n_kv_heads % 2 != 0 && one.config().n_kv_heads != 1)) return;
    Engine two = load(path, on_gpus(2, false));
    for (const std::vector<Request>& batch : batches(one)) {
        const auto want = run(one, batch), got = run(two, batch);
        for (std::size_t i = 0; i < batch.size(); i++) {
            CAPTURE(batch.size(), i);
            double squares = 0;
            for (std::size_t t = 0; t < want[i].prompt_logits.size(); t++)
                squares += std::pow(double(got[i].prompt_logits[t]) - double(want[i].prompt_logits[t]), 2);
            CHECK(std::sqrt(squares / double(want[i].prompt_logits.size())) < 0.05);
            for (std::size_t k = 0; k < want[i].tokens.size(); k++) {
                const auto& top = want[i].logprobs[k].top;
                if (want[i].tokens[k] != got[i].tokens[k]) { // only where the choice is close
                    CHECK(top[0].logprob - top[1].logprob < 0.1f);
                    break;
                }
            }
        }
    }
}

void compare_bits(const std::string& path) {
    Engine one = load(path, on_gpus(1, true));
    if (one.config().n_heads % 2 != 0 || (one.config().n_kv_heads % 2 != 0 && one.config().n_kv_heads != 1)) return;
    Engine two = load(path, on_gpus(2, true));
    for (const std::vector<Request>& batch : batches(one)) {
        const auto want = run(one, batch), got = run(two, batch);
        for (std::size_t i = 0; i < batch.size(); i++) {
            CAPTURE(batch.size(), i);
            CHECK(identical(got[i], want[i]));
        }
    }
}

constexpr ModelShape shapes[] = {{"heads of 64", 3, 512, 8, 2, 1280, 2048, 2048},
                                 {"heads of 128", 2, 1024, 8, 8, 2816, 2048, 2048}};

} // namespace

TEST_CASE("two GPUs: sums of messages of every size are exact, in one shot and in two", "[cuda][cuda-ranks]") {
    if (no_two_gpus()) return;
    TwoGpus large(std::size_t(2) << 20), small(512); // nearly all in one shot; nearly all in two
    for (int round = 0; round < 3; round++) {        // the inboxes take turns
        check_sums<std::uint16_t>(large, false);
        check_sums<float>(large, false);
        check_sums<std::uint16_t>(small, false);
        check_sums<float>(small, false);
    }
}

TEST_CASE("two GPUs: NCCL, where it is installed, gives the same sums of two", "[cuda][cuda-ranks]") {
    if (no_two_gpus()) return;
    setenv("QUIRE_NCCL_FROM", "1", 1);
    TwoGpus two(512);
    two.run([&](int r) { cuda::join_nccl(*two.ranks[r], *two.gpus[r]); });
    unsetenv("QUIRE_NCCL_FROM");
    if (cuda::nccl_version(*two.ranks[0]) == 0) {
        WARN("not tested: no libnccl.so.2");
        return;
    }
    check_sums<std::uint16_t>(two, true);
    check_sums<float>(two, true);
}

TEST_CASE("two GPUs: the sum with the norm that follows, and gathering", "[cuda][cuda-ranks]") {
    if (no_two_gpus()) return;
    TwoGpus                    two(std::size_t(2) << 20);
    std::mt19937               random(4);
    const int                  rows = 5, cols = 1024;
    const std::size_t          n        = std::size_t(rows) * cols;
    const auto                 residual = random_values<float>(n, random), weight = random_values<float>(cols, random);
    std::vector<std::uint16_t> x[2] = {random_fp16(n, random), random_fp16(n, random)};
    std::vector<std::unique_ptr<OnDevice<std::uint16_t>>> parts, normed, out;
    std::vector<std::unique_ptr<OnDevice<float>>>         sums, weights;
    for (int r = 0; r < 2; r++) {
        cuda::use(*two.gpus[r]);
        parts.push_back(std::make_unique<OnDevice<std::uint16_t>>(*two.gpus[r], x[r]));
        normed.push_back(std::make_unique<OnDevice<std::uint16_t>>(*two.gpus[r], std::vector(n, fp16_nan)));
        out.push_back(std::make_unique<OnDevice<std::uint16_t>>(*two.gpus[r], std::vector(2 * n, fp16_nan)));
        sums.push_back(std::make_unique<OnDevice<float>>(*two.gpus[r], residual));
        weights.push_back(std::make_unique<OnDevice<float>>(*two.gpus[r], weight));
    }
    cuda::AllReduce   sum;
    cuda::RankArrays  gathered;
    cuda::RankColumns columns;
    for (int r = 0; r < 2; r++) {
        columns.first[r] = r * cols, columns.n[r] = cols;
        sum.x.of[r] = sum.out.of[r] = parts[std::size_t(r)]->data;
        gathered.of[r]              = out[std::size_t(r)]->data;
    }
    two.run([&](int r) {
        const auto i = std::size_t(r);
        cuda::all_gather(parts[i]->data, columns, gathered, 2 * cols, rows, 2, *two.ranks[r], *two.gpus[r]);
        CHECK(cuda::all_reduce_norm(sum, cuda::NormKind::rms, weights[i]->data, nullptr, 1e-5f, sums[i]->data,
                                    normed[i]->data, rows, cols, *two.ranks[r], *two.gpus[r]));
    });
    for (int r = 0; r < 2; r++) {
        const auto i = std::size_t(r);
        cuda::use(*two.gpus[r]);
        const auto new_residual = sums[i]->back(*two.gpus[r]);
        const auto got          = floats_of(normed[i]->back(*two.gpus[r]));
        const auto all          = out[i]->back(*two.gpus[r]);
        for (int row = 0; row < rows; row++) {
            double squares = 0;
            for (int c = 0; c < cols; c++) {
                const auto  at   = std::size_t(row * cols + c);
                const float want = residual[at] + f16_to_f32(f32_to_f16(f16_to_f32(x[0][at]) + f16_to_f32(x[1][at])));
                REQUIRE(new_residual[at] == want);
                squares += double(want) * double(want);
                REQUIRE(all[std::size_t(row * 2 * cols + c)] == x[0][at]);
                REQUIRE(all[std::size_t(row * 2 * cols + cols + c)] == x[1][at]);
            }
            const double scale = 1 / std::sqrt(squares / cols + 1e-5);
            for (int c = 0; c < cols; c++) {
                const auto   at   = std::size_t(row * cols + c);
                const double want = double(new_residual[at]) * scale * double(weight[std::size_t(c)]);
                REQUIRE(std::abs(double(got[at]) - want) <= 2e-3 * std::max(1.0, std::abs(want)));
            }
        }
    }
}

TEST_CASE("two GPUs: a rank that does not come is noticed in time", "[cuda][cuda-ranks]") {
    if (no_two_gpus()) return;
    TwoGpus               two(std::size_t(2) << 20, 0.3);
    const OnDevice<float> x((cuda::use(*two.gpus[0]), *two.gpus[0]), std::vector<float>(4096, 1.0f));
    cuda::AllReduce       sum;
    sum.x.of[0] = sum.out.of[0] = sum.x.of[1] = sum.out.of[1] = x.data;
    sum.x_is_float = sum.out_is_float = sum.exact = true;
    cuda::all_reduce(sum, 2, 2048, *two.ranks[0], *two.gpus[0]);
    cuda::synchronize(*two.gpus[0]);
    CHECK(cuda::lost_a_rank(*two.ranks[0]));
    CHECK(!cuda::lost_a_rank(*two.ranks[1]));
}

TEST_CASE("two GPUs answer as one, for every reference model and shape", "[cuda][cuda-ranks]") {
    if (no_two_gpus()) return;
    for (const auto& entry : std::filesystem::directory_iterator(reference("models"))) {
        CAPTURE(entry.path().string());
        EngineOptions o = on_gpus(1, false);
        if (Engine::load(entry.path().string(), o)) compare(entry.path().string());
    }
    const std::string path = temporary();
    for (const ModelShape& shape : shapes)
        for (DType type : {DType::F16, DType::Q8_0, DType::Q4_K}) {
            CAPTURE(shape.name, dtype_info(type).name);
            REQUIRE(write_random_model(path, shape, type));
            compare(path);
        }
    unlink(path.c_str());
}

TEST_CASE("two GPUs, deterministic: the same bits as one", "[cuda][cuda-ranks]") {
    if (no_two_gpus()) return;
    for (const auto& entry : std::filesystem::directory_iterator(reference("models"))) {
        CAPTURE(entry.path().string());
        EngineOptions o = on_gpus(1, true);
        if (Engine::load(entry.path().string(), o)) compare_bits(entry.path().string());
    }
    const std::string path = temporary();
    for (const ModelShape& shape : shapes)
        for (DType type : {DType::F16, DType::Q8_0, DType::Q4_K}) {
            CAPTURE(shape.name, dtype_info(type).name);
            REQUIRE(write_random_model(path, shape, type));
            compare_bits(path);
        }
    unlink(path.c_str());
}
