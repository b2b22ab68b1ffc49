// Models with layers that keep a state, on the CPU backend itself: logits against those of `transformers`, however a prompt is cut into steps
// and wherever its state lies.
#include <catch2/catch_test_macros.hpp>

#include <nlohmann/json.hpp>

#include "reference.h"

import quire.compute.backend;
import quire.compute.cpu.backend;
import quire.compute.model;
import quire.compute.ranks.shards;
import quire.core.base;
import quire.model_file.gguf;
import quire.model_file.weights;

#include "npy.h"

using namespace quire;
using namespace quire::testing;

namespace {

template <class T>
T value_of(Result<T> result) {
    INFO((result ? "" : result.error().message));
    REQUIRE(result.has_value());
    return std::move(*result);
}

// One sequence on a backend, without an engine. Its state has two units of blocks, which take turns.
class Sequence {
public:
    static constexpr int context = 320, block = 16;

    Sequence(const std::string& path, std::size_t state_block)
        : file_(value_of(Gguf::open(path))), config_(value_of(read_config(file_))),
          tensors_(value_of(bind_tensors(file_, config_))), backend_(value_of(make_cpu_backend(2))) {
        const auto shapes = value_of(split_model(path, config_, tensors_, 1, false));
        model_            = value_of(Model::create(*backend_, shapes[0], tensors_, context, context, context, {}));
        kv_.resize(config_.layers.size());
        std::size_t bytes = 0;
        for (std::size_t i = 0; i < kv_.size(); i++) {
            const LayerConfig& l = config_.layers[i];
            if (l.attends()) {
                for (auto& array : memory_.emplace_back())
                    array.resize(std::size_t(context * l.n_kv_heads * l.head_dim));
                kv_[i]        = {memory_.back()[0].data(),
                                 memory_.back()[1].data(),
                                 DType::F32,
                                 context / block,
                                 block,
                                 l.n_kv_heads,
                                 l.head_dim,
                                 l.value_dim};
                kv_[i].stride = kv_[i].block_bytes();
                kv_[i].v_type = DType::F32;
            }
            states_.push_back({nullptr, state_block, 1, bytes, l.state.bytes()});
            bytes += (l.state.bytes() + 255) / 256 * 256;
        }
        unit_ = int((bytes + state_block - 1) / state_block);
        state_memory_.assign(2 * std::size_t(unit_) * state_block, std::byte(0x7f)); // no zeros: large numbers
        for (StateLayer& s : states_) s.memory = state_memory_.data();
        REQUIRE(backend_->prepare_steps({}));
        backend_->compile(model_.program(), model_.values(), kv_, states_);
    }

    // Runs tokens, the first ones of a sequence, in steps of these sizes; the logits of all.
    std::vector<float> run(const std::vector<Token>& tokens, const std::vector<int>& steps, bool two_units) {
        std::vector<float> logits;
        int                done = 0, at = 0;
        for (int n : steps) {
            StepPlan plan;
            plan.groups.resize(2);
            for (int i = done; i < done + n; i++) {
                plan.tokens.push_back(tokens[std::size_t(i)]);
                plan.positions.push_back(i);
                plan.logit_rows.push_back(i - done);
                plan.groups[0].parts[0].slots.push_back(i);
            }
            plan.token_start  = {0, n};
            plan.context_lens = {done + n};
            for (int b = 0; b * block < done + n; b++) plan.groups[0].parts[0].tables.push_back(b);
            plan.groups[0].table_start = {0, int(plan.groups[0].parts[0].tables.size())};
            plan.groups[0].first_entry = {0};
            GroupPlan& state           = plan.groups[1];
            state.unit                 = unit_;
            const int next             = two_units ? 1 - at : at;
            for (int b = 0; b < unit_; b++) { // the blocks of a unit lie in disorder
                state.state_from.push_back(done == 0 ? -1 : (unit_ - 1 - b) * 2 + at);
                state.state_to.push_back((unit_ - 1 - b) * 2 + next);
            }
            backend_->run(plan);
            const auto rows = backend_->to_host(model_.values().at(model_.program().logits, {n, n}));
            logits.insert(logits.end(), rows.begin(), rows.end());
            done += n, at = next;
        }
        return logits;
    }

private:
    Gguf                                          file_;
    ModelConfig                                   config_;
    ModelTensors                                  tensors_;
    std::unique_ptr<Backend>                      backend_;
    Model                                         model_;
    std::deque<std::array<std::vector<float>, 2>> memory_;
    std::vector<KvLayer>                          kv_;
    std::vector<StateLayer>                       states_;
    std::vector<std::byte>                        state_memory_;
    int                                           unit_ = 0;
};

} // namespace

TEST_CASE("layers that keep a state give the logits of transformers, whatever the steps") {
    for (const char* name :
         {"lfm2-F16", "lfm2-Q8_0", "lfm2moe-F16", "qwen35-F16", "qwen35-k-Q8_0", "qwen35-k-Q4_K_M", "qwen35-128-F16",
          "qwen35-mtp-F16", "qwen35moe-F16", "qwen3next-F16", "granitehybrid-F16", "granitehybrid-dense-F16",
          "nemotron_h-F16", "nemotron_h-Q8_0", "nemotron_h-128-F16", "nemotron_h_moe-F16", "mamba2-F16"}) {
        const std::string path = cat("models/", name, ".gguf");
        if (!has_reference(path)) continue;
        CAPTURE(name);
        const auto        dash   = std::string_view(name).rfind('-');
        const std::string folder = cat("logits/", std::string_view(name).substr(0, dash), "/"),
                          type(std::string_view(name).substr(dash + 1));
        std::ifstream file(reference(cat(folder, "expected.json")));
        const auto    expected = nlohmann::json::parse(file);
        const auto    last = read_npy(reference(cat(folder, "last_logits", type == "F16" ? "" : "." + type, ".npy")));
        Sequence      small(reference(path), 256), large(reference(path), std::size_t(1) << 20);
        for (std::size_t i = 0; i < expected["prompts"].size(); i++) {
            const auto        tokens = expected["prompts"][i]["tokens"].get<std::vector<Token>>();
            const int         n      = int(tokens.size());
            const auto        whole  = large.run(tokens, {n}, false);
            const std::size_t vocab  = whole.size() / tokens.size();
            float             worst = 0, largest = 0;
            for (std::size_t t = 0; t < vocab; t++) {
                worst   = std::max(worst, std::abs(whole[whole.size() - vocab + t] - last[i * vocab + t]));
                largest = std::max(largest, std::abs(last[i * vocab + t]));
            }
            CAPTURE(i, n);
            CHECK(worst <= 1e-3f * largest);
            // Alone, in two steps (also within the taps of a convolution), in many.
            if (n == 1) continue;
            std::vector<int> ones(std::size_t(n), 1), mixed;
            for (int left = n, k = 1; left > 0; left -= mixed.back(), k = k % 7 + 2) mixed.push_back(std::min(left, k));
            CHECK(small.run(tokens, {n}, true) == whole);
            CHECK(small.run(tokens, {1, n - 1}, false) == whole);
            CHECK(small.run(tokens, {n - 1, 1}, true) == whole);
            CHECK(large.run(tokens, mixed, true) == whole);
            CHECK(small.run(tokens, mixed, false) == whole);
            if (n < 40) CHECK(small.run(tokens, ones, true) == whole);
        }
    }
}
