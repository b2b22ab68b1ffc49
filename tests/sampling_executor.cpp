// The executor of sampling_executor.h, compiled once for all tests.
#include <catch2/catch_test_macros.hpp>

import quire.core.base;
import quire.core.std;
import quire.decode.candidates;
import quire.decode.sampler;
import quire.engine.engine;
import quire.engine.executor;
import quire.engine.local_executor;
import quire.model_file.weights;

#include "sampling_executor.h"

namespace quire::testing {

namespace {

class SamplingExecutor final : public Executor {
public:
    SamplingExecutor(Gguf file, std::unique_ptr<Executor> inner, int vocab)
        : file_(std::move(file)), inner_(std::move(inner)), row_(std::size_t(vocab)), candidates_(vocab) {}

    MoveTicket move_blocks(const BlockMoves& moves) override { return inner_->move_blocks(moves); }
    void       wait_for_moves(MoveTicket ticket) override { inner_->wait_for_moves(ticket); }
    void       launch(const StepPlan& plan) override {
        plan_.clear();
        inner_->launch(plan);
    }
    SamplingLimits sampling_limits() const override {
        return {.tasks = 1000, .edits = 100'000, .uniforms = 1000, .results = 1000};
    }
    void        sample(const StepPlan& plan) override { plan_ = plan.sampling; }
    StepResults results() override {
        StepResults results = inner_->results();
        sampled_.clear();
        const std::span<const float> rows =
            plan_.tasks.empty() ? std::span<const float>() : std::span<const float>(results.rows());
        for (const SamplingTask& task : plan_.tasks) draw(task, rows);
        results.sampled = sampled_;
        return results;
    }
    std::vector<std::span<std::byte>> host_block(BlockId block) const override { return inner_->host_block(block); }
    ExecutorMemory                    memory() const override { return inner_->memory(); }
    std::string                       tuning() const override { return inner_->tuning(); }
    double                            weight_bandwidth() override { return inner_->weight_bandwidth(); }
    std::string                       describe() const override { return inner_->describe(); }
    std::string                       numerics() const override { return inner_->numerics(); }
    std::string                       explain() const override { return inner_->explain(); }

private:
    void draw(const SamplingTask& task, std::span<const float> rows) {
        check(task.first_mask < 0 && !task.logprobs && task.mirostat == 0, "a task that this device does not know");
        const auto logits = rows.subspan(std::size_t(task.row) * row_.size(), row_.size());
        if (task.only_edited) std::ranges::fill(row_, -std::numeric_limits<float>::infinity());
        else std::ranges::copy(logits, row_.begin());
        for (const LogitEdit& e :
             std::span(plan_.edits).subspan(std::size_t(task.first_edit), std::size_t(task.n_edits))) {
            const float x              = logits[std::size_t(e.token)];
            row_[std::size_t(e.token)] = (x > 0 ? x / e.divide : x * e.divide) - e.subtract + e.add;
        }
        SamplingParams params;
        params.temperature = task.temperature;
        params.top_p       = task.top_p;
        params.top_k       = task.top_k;
        params.min_p       = task.min_p;
        for (double u :
             std::span(plan_.uniforms).subspan(std::size_t(task.first_uniform), std::size_t(task.n_uniforms)))
            sampled_.push_back({task.temperature > 0 ? candidates_.draw(row_, params, u, 1, 0).token : argmax(row_)});
    }

    Gguf                      file_; // of the weights
    std::unique_ptr<Executor> inner_;
    SamplingPlan              plan_;
    std::vector<float>        row_;
    Candidates                candidates_;
    std::vector<TokenLogprob> sampled_;
};

} // namespace

Engine load_sampling(const std::string& path, const EngineOptions& options) {
    const auto make = [&](EngineOptions& o, ModelConfig& config) -> Result<std::unique_ptr<Executor>> {
        Result<Gguf> file = Gguf::open(path);
        if (!file) return std::unexpected(file.error());
        const Result<ModelTensors> tensors = bind_tensors(*file, config);
        if (!tensors) return std::unexpected(tensors.error());
        o.device                                = "cpu";
        Result<std::unique_ptr<Executor>> inner = make_local_executor(path, o, config, *tensors, 256, {});
        if (!inner) return std::unexpected(inner.error());
        o.device = "cuda";
        return std::make_unique<SamplingExecutor>(std::move(*file), std::move(*inner), config.vocab_size);
    };
    Result<Engine> engine = Engine::load(path, options, {}, make);
    INFO(path << ": " << (engine ? "" : engine.error().message));
    REQUIRE(engine.has_value());
    return std::move(*engine);
}

} // namespace quire::testing
