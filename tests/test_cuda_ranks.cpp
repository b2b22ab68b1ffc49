// A model on several GPUs of this process: what the kernels between them compute, the answers, and a rank that is lost. Where there
// are fewer GPUs than ranks, ranks share them. Without a GPU nothing is tested.
#include <catch2/catch_test_macros.hpp>

#include <unistd.h>

#include <filesystem>

#include "../cuda/kernels.h"
#include "../cuda/ranks/ranks.h"
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

bool no_gpus() {
    cuda::announce_ranks();
    return no_gpu();
}

int ranks_per_gpu(int n) { return (n + cuda::n_devices() - 1) / cuda::n_devices(); }

// Contexts that are ranks.
struct Gpus {
    explicit Gpus(int ranks_wanted, std::size_t one_shot_bytes, double seconds = 20) : n(ranks_wanted) {
        const char* why = nullptr;
        for (int i = 0; i < n; i++) REQUIRE((gpus[i] = cuda::create_context(i / ranks_per_gpu(n), why)) != nullptr);
        const bool connected = cuda::connect_ranks(gpus, n, one_shot_bytes, seconds, ranks, why);
        INFO((why ? why : ""));
        REQUIRE(connected);
    }
    Gpus(const Gpus&)            = delete;
    Gpus& operator=(const Gpus&) = delete;
    ~Gpus() {
        for (cuda::Rank* rank : ranks) cuda::destroy_rank(rank);
        for (int i = 0; i < n; i++) cuda::destroy_context(gpus[i]);
    }
    cuda::Context& use(int r) const {
        cuda::use(*gpus[r]);
        return *gpus[r];
    }
    // f(rank) on all at once; waits for what it has launched.
    void run(const std::function<void(int)>& f) const {
        std::vector<std::jthread> threads;
        for (int r = 0; r < n; r++)
            threads.emplace_back([&, r] {
                use(r);
                f(r);
                cuda::synchronize(*gpus[r]);
            });
    }
    int            n;
    cuda::Context* gpus[cuda::max_ranks]{};
    cuda::Rank*    ranks[cuda::max_ranks]{};
};

// The sum in the order of the ranks that ranks.h promises.
float tree(const float* v, int n) {
    const int half = (n + 1) / 2;
    return n == 1 ? v[0] : tree(v, half) + tree(v + half, n - half);
}

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

// Sums of every size, exactly.
template <class T>
void check_sums(const Gpus& all, bool by_nccl) {
    std::mt19937 random(3);
    for (const auto& [rows, cols] : std::vector<std::pair<int, int>>{
             {1, 8}, {1, 5120}, {3, 4096}, {2, 31}, {7, 100}, {128, 512}, {200, 1024}, {1, 16384}, {1000, 2048}}) {
        CAPTURE(all.n, rows, cols, sizeof(T));
        const auto                                n = std::size_t(rows) * std::size_t(cols);
        std::vector<std::vector<T>>               values;
        std::vector<std::unique_ptr<OnDevice<T>>> x;
        cuda::AllReduce                           sum;
        for (int r = 0; r < all.n; r++) {
            values.push_back(random_values<T>(n, random));
            x.push_back(std::make_unique<OnDevice<T>>(all.use(r), values.back()));
            sum.x.of[r] = sum.out.of[r] = x.back()->data;
        }
        sum.x_is_float = sum.out_is_float = std::is_same_v<T, float>;
        sum.exact                         = !by_nccl;
        all.run([&](int r) { cuda::all_reduce(sum, rows, cols, *all.ranks[r], *all.gpus[r]); });
        std::vector<T> want(n);
        for (std::size_t i = 0; i < n; i++) {
            float v[cuda::max_ranks];
            for (int r = 0; r < all.n; r++) {
                if constexpr (std::is_same_v<T, float>) v[r] = values[std::size_t(r)][i];
                else v[r] = f16_to_f32(values[std::size_t(r)][i]);
            }
            if constexpr (std::is_same_v<T, float>) want[i] = tree(v, all.n);
            else want[i] = f32_to_f16(tree(v, all.n));
        }
        for (int r = 0; r < all.n; r++) CHECK(x[std::size_t(r)]->back(all.use(r)) == want);
    }
}

EngineOptions on_gpus(int n, bool deterministic) {
    EngineOptions o;
    o.device           = "cuda";
    o.tensor_parallel  = n;
    o.ranks_per_gpu    = ranks_per_gpu(n);
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

// Models with recurrent layers, or with heads of several sizes, run on one rank.
bool can_split(const Engine& engine, int n) {
    const ModelConfig& c = engine.config();
    const auto unlike    = [&](const LayerConfig& l) { return l.attends() && !c.latent && l.value_dim != c.value_dim; };
    if (c.recurrent.taps > 0 || std::ranges::any_of(c.layers, unlike)) return false;
    return c.n_heads % n == 0 && (c.n_kv_heads % n == 0 || n % c.n_kv_heads == 0);
}

void compare(const std::string& path, int n) {
    Engine one = load(path, on_gpus(1, false));
    if (!can_split(one, n)) return;
    Engine many = load(path, on_gpus(n, false));
    for (const std::vector<Request>& batch : batches(one)) {
        const auto want = run(one, batch), got = run(many, batch);
        int        other_experts = 0; // a sequence where a router's choice was nearly a tie and fell the other way
        for (std::size_t i = 0; i < batch.size(); i++) {
            CAPTURE(n, batch.size(), i);
            double squares = 0;
            for (std::size_t t = 0; t < want[i].prompt_logits.size(); t++)
                squares += std::pow(double(got[i].prompt_logits[t]) - double(want[i].prompt_logits[t]), 2);
            const bool same = std::sqrt(squares / double(want[i].prompt_logits.size())) < 0.05;
            if (!same && one.config().experts.n > 0 && ++other_experts == 1) continue;
            CHECK(same);
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
    for (const int n : {2, 4, 8}) {
        if (!can_split(one, n)) continue;
        Result<Engine> many = Engine::load(path, on_gpus(n, true));
        if (!many) {
            INFO(many.error().message);
            CHECK(many.error().message.find("bits that do not depend on the number of ranks are possible on up to") !=
                  std::string::npos);
            continue;
        }
        for (const std::vector<Request>& batch : batches(one)) {
            const auto want = run(one, batch), got = run(*many, batch);
            for (std::size_t i = 0; i < batch.size(); i++) {
                CAPTURE(n, batch.size(), i);
                CHECK(identical(got[i], want[i]));
            }
        }
    }
}

constexpr ModelShape shapes[] = {{"heads of 64", 3, 512, 8, 2, 1280, 2048, 2048},
                                 {"heads of 128", 2, 1024, 8, 8, 2816, 2048, 2048}};

} // namespace

TEST_CASE("ranks on GPUs: sums of messages of every size are exact, in one shot and in two", "[cuda][cuda-ranks]") {
    if (no_gpus()) return;
    for (const int n : {2, 3, 4, 8}) {
        const Gpus large(n, std::size_t(2) << 20), small(n, 512); // many in one shot; nearly all in two
        for (int round = 0; round < 3; round++) {                 // the inboxes take turns
            check_sums<std::uint16_t>(large, false);
            check_sums<float>(large, false);
            check_sums<std::uint16_t>(small, false);
            check_sums<float>(small, false);
        }
    }
}

TEST_CASE("ranks on GPUs: NCCL, where it is installed, gives the same sums of two", "[cuda][cuda-ranks]") {
    if (no_gpus()) return;
    if (cuda::n_devices() < 2) {
        WARN("not tested: NCCL wants a GPU for each rank");
        return;
    }
    setenv("QUIRE_NCCL_FROM", "1", 1);
    const Gpus two(2, 512);
    two.run([&](int r) { cuda::join_nccl(*two.ranks[r], *two.gpus[r]); });
    unsetenv("QUIRE_NCCL_FROM");
    if (cuda::nccl_version(*two.ranks[0]) == 0) {
        WARN("not tested: no libnccl.so.2");
        return;
    }
    check_sums<std::uint16_t>(two, true);
    check_sums<float>(two, true);
}

TEST_CASE("ranks on GPUs: gathering", "[cuda][cuda-ranks]") {
    if (no_gpus()) return;
    const Gpus                                            two(2, std::size_t(2) << 20);
    std::mt19937                                          random(4);
    const int                                             rows = 5, cols = 1024;
    const std::size_t                                     n    = std::size_t(rows) * cols;
    const std::vector<std::uint16_t>                      x[2] = {random_fp16(n, random), random_fp16(n, random)};
    std::vector<std::unique_ptr<OnDevice<std::uint16_t>>> parts, out;
    cuda::RankArrays                                      gathered;
    cuda::RankColumns                                     columns;
    for (int r = 0; r < 2; r++) {
        cuda::use(*two.gpus[r]);
        parts.push_back(std::make_unique<OnDevice<std::uint16_t>>(*two.gpus[r], x[r]));
        out.push_back(std::make_unique<OnDevice<std::uint16_t>>(*two.gpus[r], std::vector(2 * n, fp16_nan)));
        columns.first[r] = r * cols, columns.n[r] = cols;
        gathered.of[r] = out.back()->data;
    }
    two.run([&](int r) {
        cuda::all_gather(parts[std::size_t(r)]->data, columns, gathered, 2 * cols, rows, 2, *two.ranks[r],
                         *two.gpus[r]);
    });
    for (int r = 0; r < 2; r++) {
        cuda::use(*two.gpus[r]);
        const auto all = out[std::size_t(r)]->back(*two.gpus[r]);
        for (std::size_t row = 0; row < rows; row++)
            for (std::size_t c = 0; c < cols; c++)
                for (std::size_t p = 0; p < 2; p++) REQUIRE(all[(row * 2 + p) * cols + c] == x[p][row * cols + c]);
    }
}

TEST_CASE("ranks on GPUs: a rank that does not come is noticed in time", "[cuda][cuda-ranks]") {
    if (no_gpus()) return;
    const Gpus            two(2, std::size_t(2) << 20, 0.3);
    const OnDevice<float> x((cuda::use(*two.gpus[0]), *two.gpus[0]), std::vector<float>(4096, 1.0f));
    cuda::AllReduce       sum;
    sum.x.of[0] = sum.out.of[0] = sum.x.of[1] = sum.out.of[1] = x.data;
    sum.x_is_float = sum.out_is_float = sum.exact = true;
    cuda::all_reduce(sum, 2, 2048, *two.ranks[0], *two.gpus[0]);
    cuda::synchronize(*two.gpus[0]);
    CHECK(cuda::lost_a_rank(*two.ranks[0]));
    CHECK(!cuda::lost_a_rank(*two.ranks[1]));
}

TEST_CASE("ranks on GPUs answer as one GPU, for every reference model and shape", "[cuda][cuda-ranks]") {
    if (no_gpus()) return;
    for (const auto& entry : std::filesystem::directory_iterator(reference("models"))) {
        CAPTURE(entry.path().string());
        EngineOptions o = on_gpus(1, false);
        if (!Engine::load(entry.path().string(), o)) continue;
        for (const int n : {2, 4}) compare(entry.path().string(), n);
    }
    const std::string path = temporary();
    for (const ModelShape& shape : shapes)
        for (DType type : {DType::F16, DType::Q8_0, DType::Q4_K}) {
            CAPTURE(shape.name, dtype_info(type).name);
            REQUIRE(write_random_model(path, shape, type));
            for (const int n : {2, 4, 8}) compare(path, n);
        }
    unlink(path.c_str());
}

TEST_CASE("ranks on GPUs, deterministic: the same bits as one GPU", "[cuda][cuda-ranks]") {
    if (no_gpus()) return;
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
