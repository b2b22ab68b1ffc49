// A model on several ranks of the CPU: how it is split, that the answers stay what they are, and what happens when a rank is lost.
#include <catch2/catch_test_macros.hpp>

#include <filesystem>

#include "reference.h"

import quire.compute.model;
import quire.compute.program;
import quire.compute.ranks.rank_group;
import quire.compute.ranks.shards;
import quire.core.base;
import quire.core.std;
import quire.core.tensor;
import quire.engine.engine;
import quire.engine.ranks.rank_threads;
import quire.model_file.config;
import quire.model_file.family;
import quire.model_file.gguf;
import quire.model_file.weights;
import quire.schedule.request;

#include "engine_tools.h"

using namespace quire;
using namespace quire::testing;

namespace {

EngineOptions with_ranks(int n, bool deterministic = false) {
    EngineOptions o;
    o.tensor_parallel  = n;
    o.deterministic    = deterministic;
    o.threads          = 2;
    o.kv_type          = DType::F32;
    o.max_batch_tokens = 64;
    o.kv_blocks        = 64;
    o.block_size       = 8;
    o.context          = 128;
    return o;
}

// Two prompts of which the second is cut in two steps, and one that begins like the first.
std::vector<Request> some_requests(int vocab) {
    std::mt19937         random(5);
    std::vector<Request> requests;
    for (int n : {7, 70, 20}) {
        std::vector<Token> prompt;
        for (int i = 0; i < n; i++) prompt.push_back(int(random() % unsigned(vocab)));
        if (n == 20) std::copy_n(requests[0].prompt.begin(), 7, prompt.begin());
        requests.push_back(greedy(prompt, 6));
        requests.back().prompt_logprobs = 1;
    }
    return requests;
}

// One file of each family, and of each type of weights.
std::vector<std::string> models() {
    std::vector<std::string> paths;
    for (const auto& entry : std::filesystem::directory_iterator(reference("models")))
        paths.push_back(entry.path().string());
    std::ranges::sort(paths);
    return paths;
}

void check_close(const Answer& got, const Answer& want, double limit) {
    double worst = 0, largest = 0;
    REQUIRE(got.prompt_logits.size() == want.prompt_logits.size());
    for (std::size_t i = 0; i < want.prompt_logits.size(); i++) {
        worst   = std::max(worst, std::abs(double(got.prompt_logits[i]) - double(want.prompt_logits[i])));
        largest = std::max(largest, std::abs(double(want.prompt_logits[i])));
    }
    CHECK(worst <= limit * largest);
}

// The sentence that refuses a model on n ranks; "": nothing speaks against it.
std::string_view refusal(const ModelConfig& c, int n, bool exact) {
    const bool mixed =
        std::ranges::any_of(c.layers, [&](const LayerConfig& layer) { return layer.head_dim != c.layers[0].head_dim; });
    if (c.recurrent.taps == 0 && mixed) return "heads of different sizes";
    if (c.recurrent.taps > 0 || c.n_heads % n != 0 || (c.n_kv_heads % n != 0 && n % c.n_kv_heads != 0))
        return "cannot be split over";
    const int width =
        c.experts.shared_ff_size > 0 ? std::min(c.experts.ff_size, c.experts.shared_ff_size) : c.experts.ff_size;
    if (c.experts.n > 0 && width < 32 * n) return "too narrow for";
    return exact ? "possible on up to" : "";
}

} // namespace

TEST_CASE("every model gives the same logits on 1, 2 and 4 ranks", "[ranks]") {
    int n_models = 0;
    for (const std::string& path : models()) {
        Result<Engine> one = Engine::load(path, with_ranks(1));
        if (!one) continue; // not a file that quire runs
        n_models++;
        const auto requests = some_requests(one->config().vocab_size);
        const auto want     = run(*one, requests);
        for (int n : {2, 4}) {
            Result<Engine> ranks = Engine::load(path, with_ranks(n));
            CAPTURE(path, n, (ranks ? "" : ranks.error().message));
            if (!ranks) {
                const std::string_view why = refusal(one->config(), n, false);
                CHECK(why != "");
                CHECK(ranks.error().message.contains(why));
                continue;
            }
            CHECK(ranks->describe().find(cat(n, " ranks of")) == 0);
            const auto got = run(*ranks, requests);
            for (std::size_t i = 0; i < want.size(); i++) {
                CAPTURE(i);
                // Sums in another order; a cut through a block of weights leaves them as floats, which no longer round activations.
                check_close(got[i], want[i], one->config().experts.n > 0 ? 0.05 : 2e-3);
            }
        }
    }
    CHECK(n_models >= 4);
}

TEST_CASE("deterministic: the same bits on 1, 2 and 4 ranks", "[ranks]") {
    int n_compared = 0;
    for (const std::string& path : models()) {
        Result<Engine> one = Engine::load(path, with_ranks(1, true));
        if (!one) continue;
        const auto requests = some_requests(one->config().vocab_size);
        const auto want     = run(*one, requests);
        for (int n : {2, 4}) {
            Result<Engine> ranks = Engine::load(path, with_ranks(n, true));
            CAPTURE(path, n, (ranks ? "" : ranks.error().message));
            if (!ranks) {
                CHECK(ranks.error().message.contains(refusal(one->config(), n, true)));
                continue;
            }
            n_compared++;
            const auto got = run(*ranks, requests);
            for (std::size_t i = 0; i < want.size(); i++) {
                CAPTURE(i);
                CHECK(identical(got[i], want[i]));
            }
        }
    }
    CHECK(n_compared >= 4);
}

TEST_CASE("parts of all ranks are the whole model, each number once", "[ranks]") {
    Result<Gguf> file = Gguf::open(reference("models/qwen2-Q4_0.gguf"));
    REQUIRE(file);
    const ModelConfig  config  = read_config(*file).value();
    const ModelTensors tensors = bind_tensors(*file, config).value();
    for (bool exact : {false, true}) {
        const auto shapes = split_model("m", config, tensors, 2, exact).value();
        REQUIRE(shapes.size() == 2);
        for (auto leaves : {&RankShape::attention, &RankShape::ff}) {
            std::int64_t next = 0;
            for (const RankShape& s : shapes) {
                CHECK((s.*leaves).size() == (exact ? std::size_t(4) : std::size_t(1)));
                for (const Range& leaf : s.*leaves) {
                    if (leaf.n == 0) continue;
                    CHECK(leaf.first == next);
                    next = leaf.end();
                }
            }
            CHECK(next == (leaves == &RankShape::ff ? config.ff_size : config.n_heads * config.value_dim));
        }
        CHECK(shapes[0].vocab.end() == shapes[1].vocab.first);
        CHECK(shapes[1].vocab.end() == config.vocab_size);
        CHECK(shapes[0].config.n_heads * 2 == config.n_heads);
    }
    const auto three = split_model("m", config, tensors, 5, false);
    REQUIRE(!three);
    CHECK(three.error().message.starts_with("m: "));
}

TEST_CASE("columns of a weight: whole blocks as they are, cut blocks as floats", "[ranks]") {
    std::vector<float> values(4 * 6);
    for (std::size_t i = 0; i < values.size(); i++) values[i] = float(i);
    const TensorView w{DType::F32, 4, 6, values.data()};
    SliceMemory      memory;
    const auto       floats = [](const TensorView& v) {
        return std::vector<float>(static_cast<const float*>(v.data),
                                        static_cast<const float*>(v.data) + v.rows * v.cols);
    };
    CHECK(slice_of(w, {1, 2}, {0, 6}, memory).data == values.data() + 6); // in one piece
    CHECK(memory.empty());
    CHECK(floats(slice_of(w, {1, 2}, {2, 3}, memory)) == std::vector<float>{8, 9, 10, 14, 15, 16});
    CHECK(floats(slice_of(w, {1, 1}, {0, 6}, memory, 2)) ==
          std::vector<float>{6, 7, 8, 9, 10, 11, 18, 19, 20, 21, 22, 23}); // row 1 of each of two matrices

    std::vector<std::byte> quantised(2 * 68); // two rows of 64 in Q8_0: a scale of 1.0 in fp16, then 32 bytes
    for (std::size_t i = 0; i < quantised.size(); i++)
        quantised[i] = i % 34 == 0 ? std::byte(0) : i % 34 == 1 ? std::byte(0x3c) : std::byte(i % 34 - 2);
    const TensorView q{DType::Q8_0, 2, 64, quantised.data()};
    CHECK(slice_of(q, {0, 2}, {32, 32}, memory).type == DType::Q8_0);
    const TensorView cut = slice_of(q, {0, 2}, {30, 4}, memory);
    CHECK(cut.type == DType::F32);
    CHECK(floats(cut) == std::vector<float>{30, 31, 0, 1, 30, 31, 0, 1});
}

TEST_CASE("swap, recomputation, copy on write, forks, beams and the prefix cache on two ranks", "[ranks]") {
    const std::string   path = reference("models/qwen2-Q4_0.gguf");
    std::vector<Answer> before;
    for (int n : {1, 2}) {
        EngineOptions o = with_ranks(n, true);
        o.kv_blocks     = 24; // too few for all at once
        o.swap_blocks   = 24;
        o.max_sequences = 8;
        Engine engine   = load(path, o);
        auto   requests = some_requests(engine.config().vocab_size);
        for (Request& r : requests) r.max_tokens = 30;
        requests.push_back(requests[1]); // found in the cache, or computed beside it
        Request several = requests[0];
        several.n = several.best_of  = 3;
        several.sampling.temperature = 1;
        several.sampling.seed        = 3;
        Request beams                = requests[2];
        beams.beam_width = beams.n = 3;
        const auto first           = run(engine, requests);
        Request    again           = requests[2];
        again.prompt_logprobs      = -1; // what is found in the cache has none
        (void)run(engine, {again});
        const auto          then = run(engine, {again});
        std::vector<Answer> all  = first;
        all.insert(all.end(), then.begin(), then.end());
        for (const Request& r : {several, beams}) {
            const auto answers = run(engine, {r});
            all.insert(all.end(), answers.begin(), answers.end());
        }
        CHECK(then[0].cached_tokens > 0);
        CHECK(engine.stats().swapped_out + engine.stats().preemptions > 0);
        CHECK(engine.stats().memory.copied_blocks > 0);
        if (n == 1) {
            before = all;
            continue;
        }
        REQUIRE(all.size() == before.size());
        for (std::size_t i = 0; i < all.size(); i++) {
            CAPTURE(i);
            CHECK(identical(all[i], before[i]));
        }
    }
}

TEST_CASE("a number of ranks that does not fit is refused in one sentence", "[ranks]") {
    const std::string path = reference("models/qwen2-Q4_0.gguf");
    for (int n : {0, -1, 3, 5, 64}) {
        const auto engine = Engine::load(path, with_ranks(n));
        REQUIRE(!engine);
        CAPTURE(engine.error().message);
        CHECK(engine.error().message.find("rank") != std::string::npos);
    }
    CHECK(!Engine::load(path, with_ranks(3, true)));
}

TEST_CASE("a rank that throws ends the step of all with its words, and no step runs any more", "[ranks]") {
    auto             group = std::make_shared<RankGroup>(3, 20);
    RankThreads      threads(group, 100);
    std::atomic<int> sum{0};
    threads.run([&](int rank) {
        sum += rank;
        group->barrier(rank);
        sum += 10;
    });
    CHECK(sum == 33);
    for (int round = 0; round < 2; round++) {
        std::string said;
        try {
            threads.run([&](int rank) {
                if (rank == 1) throw std::runtime_error("the GPU is gone");
                group->barrier(rank); // would wait for ever
            });
        } catch (const std::runtime_error& e) {
            said = e.what();
        }
        CHECK(said == "rank 1: the GPU is gone");
    }
    CHECK(!threads.hangs());
}

TEST_CASE("a rank that hangs is noticed in time", "[ranks]") {
    auto              group = std::make_shared<RankGroup>(2, 0.2);
    std::atomic<bool> go{false}, left{false};
    {
        RankThreads threads(group, 100);
        std::string said;
        try {
            threads.run([&](int rank) {
                if (rank == 1) {
                    while (!go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
                    left = true;
                    return;
                }
                group->barrier(rank);
            });
        } catch (const std::runtime_error& e) {
            said = e.what();
        }
        CHECK(said == "rank 1: no answer within 0.2 seconds");
        CHECK(threads.hangs());
    }
    go = true;
    while (!left) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

TEST_CASE("a rank's program splits what is split and adds up what has to be", "[ranks]") {
    Result<Gguf> file = Gguf::open(reference("models/qwen2-Q4_0.gguf"));
    REQUIRE(file);
    const ModelConfig        config  = read_config(*file).value();
    ModelTensors             tensors = bind_tensors(*file, config).value();
    const auto               shapes  = split_model("m", config, tensors, 2, false).value();
    std::vector<LayerLeaves> leaves(tensors.layers.size());
    SliceMemory              memory;
    for (std::size_t i = 0; i < leaves.size(); i++)
        tensors.layers[i] = rank_layer(shapes[1], int(i), tensors.layers[i], leaves[i], memory);
    rank_ends(shapes[1], tensors, memory);
    const Program p = build_program(shapes[1], tensors, leaves, 128);
    std::string   kinds;
    for (std::size_t i = p.layers[0]; i < p.layers[1]; i++) kinds += cat(kind_of(p.operations[i]), " ");
    CHECK(kinds == "norm gemm rope_and_store attention gemm all_reduce norm gated_gemm gemm all_reduce ");
    for (const Operation& operation : p.operations)
        if (const auto* gemm = std::get_if<Gemm>(&operation))
            for (const Projection& to : gemm->projections) {
                CHECK(to.weight.cols == p[gemm->x].cols);
                CHECK(to.weight.rows == p[to.out].cols);
            }
}
