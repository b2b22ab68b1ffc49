// quire.engine: the loop: schedule → execute → sample → deliver.
// **Owns** the model file, the model, the KV cache, the scheduler and the inbox. One thread calls step().
module;

#include <unistd.h>

export module quire.engine;

import quire.backend;
import quire.base;
import quire.config;
import quire.cpu;
import quire.gguf;
import quire.kv_cache;
import quire.model;
import quire.request;
import quire.sampler;
import quire.scheduler;
import quire.std;
import quire.tensor;
import quire.tokenizer;
import quire.weights;

export namespace quire {

enum class KvType { f16, f32 };

struct EngineOptions {
    int         threads = 0;           // 0: the physical cores
    std::string isa;                   // "": the widest there is; "plain", "avx2", "avx512"
    int         block_size       = 16; // tokens, 1..256
    int         context          = 0;  // longest sequence in tokens; 0: the model's, less if its KV would not fit
    int         kv_blocks        = 0;  // 0: a full context for each sequence, at most a quarter of the memory
    KvType      kv_type          = KvType::f16;
    int         max_batch_tokens = 512; // of one step, chunks of prompts included
    int         max_sequences    = 16;  // running at once
    bool        prefix_cache     = true;
};

// Counters since the start, for timings and tests.
struct EngineStats {
    std::uint64_t steps          = 0;
    std::uint64_t prefill_tokens = 0; // prompt tokens computed (not found in the cache)
    std::uint64_t cached_tokens  = 0; // prompt tokens found in the cache
    std::uint64_t decode_tokens  = 0;
    std::uint64_t preemptions    = 0;
};

// What a loader reports while it works: a fraction 0..1.
using Progress = std::function<void(double)>;

class Engine {
public:
    // Reads a model file, checks it, takes all memory. Error: one sentence naming file and place.
    static Result<Engine> load(const std::string& path, const EngineOptions& options, const Progress& progress = {});

    Engine(Engine&&) noexcept;
    Engine& operator=(Engine&&) noexcept;
    ~Engine();

    const ModelConfig& config() const;
    const Tokenizer&   tokenizer() const;
    EngineOptions      options() const;       // with the defaults filled in
    std::string        chat_template() const; // tokenizer.chat_template, or ""
    std::string        describe() const;      // one line: device, instruction set, threads, blocks
    EngineStats        stats() const;

    // Any thread. The request is checked at once: the id, or why it can never run.
    Result<RequestId> submit(Request request);
    // Any thread. The request ends with reason `cancelled`, unless it has ended already.
    void cancel(RequestId id);

    // The owner's thread only. One iteration; false when nothing is left to do. New events are appended to `out`.
    bool step(std::vector<Output>& out);

    // The block tables' invariants, all of them: stops at a broken one. Between steps, for tests.
    void check_invariants() const;

private:
    struct Impl;
    explicit Engine(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

} // namespace quire

module :private;

namespace quire {

constexpr int default_logit_rows = 64; // so that prompt log-probabilities come in chunks of that many positions

struct Engine::Impl {
    EngineOptions            options;
    Gguf                     file;
    ModelConfig              config;
    Tokenizer                tokenizer;
    std::unique_ptr<Backend> backend;
    Model                    model;
    KvCache                  cache;
    Scheduler                scheduler;
    Sampler                  sampler;
    StepPlan                 plan;
    EngineStats              stats;
    std::vector<Output>      partial; // prompt log-probabilities of requests whose prompt is not through

    // The inbox: what other threads left since the last step.
    std::mutex                                 mutex;
    std::vector<std::pair<RequestId, Request>> submitted;
    std::vector<RequestId>                     cancelled;
    RequestId                                  next_id = 1;

    Impl(EngineOptions options_, Gguf file_, ModelConfig config_, Tokenizer tokenizer_,
         std::unique_ptr<Backend> backend_, Model model_, KvCache cache_, const SchedulerOptions& scheduling)
        : options(std::move(options_)), file(std::move(file_)), config(std::move(config_)),
          tokenizer(std::move(tokenizer_)), backend(std::move(backend_)), model(std::move(model_)),
          cache(std::move(cache_)), scheduler(scheduling), sampler(config.vocab_size) {}

    void    take_inbox(std::vector<Output>& out);
    void    finish(RequestId id, FinishReason reason, std::vector<Output>& out);
    void    deliver(const Scheduled& item, std::span<const float> logits, std::vector<Output>& out);
    Output& partial_of(RequestId id);
};

// The memory that KV blocks may take when nobody says how much.
std::size_t quarter_of_memory() {
    return std::size_t(sysconf(_SC_PHYS_PAGES)) * std::size_t(sysconf(_SC_PAGE_SIZE)) / 4;
}

Result<Engine> Engine::load(const std::string& path, const EngineOptions& wanted, const Progress& progress) {
    EngineOptions o = wanted;
    if (o.block_size < 1 || o.block_size > 256) return fail("block size ", o.block_size, " is not in 1..256");
    if (o.max_sequences < 1 || o.max_batch_tokens < o.max_sequences)
        return fail("a step of ", o.max_batch_tokens, " tokens cannot hold one of each of ", o.max_sequences,
                    " sequences");
    if (o.context < 0 || o.kv_blocks < 0 || o.threads < 0)
        return fail("context, KV blocks and threads cannot be negative");

    Result<Gguf> file = Gguf::open(path);
    if (!file) return std::unexpected(file.error());
    Result<ModelConfig> config = read_config(*file);
    if (!config) return std::unexpected(config.error());
    Result<ModelTensors> tensors = bind_tensors(*file, *config);
    if (!tensors) return std::unexpected(tensors.error());
    Result<Tokenizer> tokenizer = Tokenizer::load(*file);
    if (!tokenizer) return std::unexpected(tokenizer.error());
    file->prefetch();

    Result<std::unique_ptr<Backend>> backend = make_cpu_backend(o.threads, o.isa);
    if (!backend) return std::unexpected(backend.error());

    // How long a sequence may be and how many blocks there are, the one from the other where only one is given.
    const DType       kv_dtype    = o.kv_type == KvType::f16 ? DType::F16 : DType::F32;
    const std::size_t block_bytes = KvCache::bytes_per_token(*config, kv_dtype) * std::size_t(o.block_size);
    const std::size_t affordable =
        std::min<std::size_t>(std::max<std::size_t>(quarter_of_memory() / block_bytes, 1), 1 << 30);
    const auto blocks_for = [&](int tokens) {
        return (std::size_t(tokens) + std::size_t(o.block_size) - 1) / std::size_t(o.block_size);
    };
    if (o.context == 0) {
        const std::size_t pool = (o.kv_blocks > 0 ? std::size_t(o.kv_blocks) : affordable) * std::size_t(o.block_size);
        o.context              = int(std::min(std::size_t(config->context_length), pool));
    }
    if (o.kv_blocks == 0) {
        const std::size_t one = blocks_for(o.context);
        o.kv_blocks           = int(std::max(one, std::min(affordable, one * std::size_t(o.max_sequences))));
    }

    const int     logit_rows = std::max(o.max_sequences, default_logit_rows);
    Result<Model> model      = Model::create(**backend, *config, *tensors, o.max_batch_tokens, logit_rows, progress);
    if (!model) return std::unexpected(model.error());
    Result<KvCache> cache = KvCache::create(**backend, *config, kv_dtype, o.kv_blocks, o.block_size);
    if (!cache) return std::unexpected(cache.error());

    const SchedulerOptions scheduling{o.kv_blocks,     o.block_size, o.context,     o.max_batch_tokens,
                                      o.max_sequences, logit_rows,   o.prefix_cache};
    return Engine(std::make_unique<Impl>(o, std::move(*file), std::move(*config), std::move(*tokenizer),
                                         std::move(*backend), std::move(*model), std::move(*cache), scheduling));
}

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::Engine(Engine&&) noexcept            = default;
Engine& Engine::operator=(Engine&&) noexcept = default;
Engine::~Engine()                            = default;

const ModelConfig& Engine::config() const { return impl_->config; }
const Tokenizer&   Engine::tokenizer() const { return impl_->tokenizer; }
EngineOptions      Engine::options() const { return impl_->options; }
EngineStats        Engine::stats() const { return impl_->stats; }
void               Engine::check_invariants() const { impl_->scheduler.blocks().check_invariants(); }

std::string Engine::chat_template() const {
    Result<std::string_view> text = impl_->file.text("tokenizer.chat_template", "");
    return text ? std::string(*text) : std::string();
}

std::string Engine::describe() const {
    const EngineOptions& o = impl_->options;
    return cat(impl_->backend->describe(), "; KV ", o.kv_blocks, " blocks of ", o.block_size, " tokens, ",
               impl_->cache.bytes() >> 20, " MiB; context ", o.context);
}

Result<RequestId> Engine::submit(Request request) {
    const int vocab = impl_->config.vocab_size;
    for (std::size_t i = 0; i < request.prompt.size(); i++)
        if (request.prompt[i] < 0 || request.prompt[i] >= vocab)
            return fail("token ", request.prompt[i], " at position ", i, " of the prompt is outside the vocabulary of ",
                        vocab);
    for (auto [token, bias] : request.sampling.logit_bias)
        if (token < 0 || token >= vocab)
            return fail("token ", token, " of logit_bias is outside the vocabulary of ", vocab);
    if (request.max_tokens < 1) return fail("max_tokens is ", request.max_tokens, "; at least 1 is needed");
    if (auto ok = impl_->scheduler.check_request(request); !ok) return std::unexpected(ok.error());

    std::scoped_lock lock(impl_->mutex);
    impl_->submitted.emplace_back(impl_->next_id, std::move(request));
    return impl_->next_id++;
}

void Engine::cancel(RequestId id) {
    std::scoped_lock lock(impl_->mutex);
    impl_->cancelled.push_back(id);
}

void Engine::Impl::take_inbox(std::vector<Output>& out) {
    std::scoped_lock lock(mutex);
    for (auto& [id, request] : submitted) scheduler.add(id, std::move(request));
    submitted.clear();
    for (RequestId id : cancelled) finish(id, FinishReason::cancelled, out);
    cancelled.clear();
}

void Engine::Impl::finish(RequestId id, FinishReason reason, std::vector<Output>& out) {
    std::unique_ptr<Sequence> sequence = scheduler.remove(id);
    if (!sequence) return; // ended before the cancellation came
    std::erase_if(partial, [&](const Output& o) { return o.id == id; });
    Output& event       = out.emplace_back();
    event.id            = id;
    event.prompt_tokens = sequence->n_prompt();
    event.cached_tokens = sequence->n_cached;
    event.finish        = reason;
}

Output& Engine::Impl::partial_of(RequestId id) {
    auto at = std::ranges::find_if(partial, [&](const Output& o) { return o.id == id; });
    if (at != partial.end()) return *at;
    partial.emplace_back().id = id;
    return partial.back();
}

// Turns one sequence's rows of logits into its next token and an event.
void Engine::Impl::deliver(const Scheduled& item, std::span<const float> logits, std::vector<Output>& out) {
    Sequence&      s       = *item.sequence;
    const Request& request = s.request;
    const auto     vocab   = std::size_t(config.vocab_size);
    auto           row = [&](int i) { return logits.subspan(std::size_t(item.first_logit_row + i) * vocab, vocab); };

    if (request.prompt_logprobs >= 0 && item.first < s.n_prompt()) {
        Output& event = partial_of(s.id);
        for (int i = 0; i < item.n_logit_rows; i++) {
            const int next = item.first + i + 1; // the row speaks about this position
            if (next < s.n_prompt() && int(event.prompt_logprobs.size()) < next)
                event.prompt_logprobs.push_back(
                    sampler.logprobs(row(i), s.tokens[std::size_t(next)], request.prompt_logprobs));
        }
    }
    if (!item.samples) return;

    Output event;
    if (s.n_generated() == 0) {
        if (request.prompt_logprobs >= 0) event = std::move(partial_of(s.id));
        if (request.return_logits) {
            std::span<const float> last = row(item.n_logit_rows - 1);
            event.prompt_logits.assign(last.begin(), last.end());
        }
        std::erase_if(partial, [&](const Output& o) { return o.id == s.id; });
    }
    std::span<const float> last  = row(item.n_logit_rows - 1);
    const Token            token = sampler.sample(last, request.sampling, s.tokens, s.n_generated());
    if (request.sampling.logprobs >= 0)
        event.logprobs.push_back(sampler.logprobs(last, token, request.sampling.logprobs));
    event.id            = s.id;
    event.prompt_tokens = s.n_prompt();
    event.cached_tokens = s.n_cached;
    event.tokens.push_back(token);
    event.finish = scheduler.append(s, token, tokenizer.is_end(token));
    out.push_back(std::move(event));
}

bool Engine::step(std::vector<Output>& out) {
    Impl& e = *impl_;
    e.take_inbox(out);
    std::span<const Scheduled> scheduled = e.scheduler.schedule(e.plan);
    for (RequestId id : e.scheduler.take_outgrown()) e.finish(id, FinishReason::length, out);
    if (scheduled.empty()) return !e.scheduler.idle();

    std::span<const float> logits = e.model.forward(e.plan, e.cache);
    e.scheduler.commit();
    e.stats.steps++;
    e.stats.preemptions = e.scheduler.n_preemptions();

    const std::size_t first_event = out.size();
    for (const Scheduled& item : scheduled) {
        const Sequence& s = *item.sequence;
        if (item.first == s.n_cached && s.n_preempted == 0 && item.first < s.n_prompt())
            e.stats.cached_tokens += std::uint64_t(s.n_cached);
        if (item.first < s.n_prompt()) e.stats.prefill_tokens += std::uint64_t(item.n_tokens);
        else e.stats.decode_tokens += std::uint64_t(item.n_tokens);
        e.deliver(item, logits, out);
    }
    // Finished sequences leave now, so that their blocks serve the next step.
    for (std::size_t i = first_event; i < out.size(); i++)
        if (out[i].finish != FinishReason::none) e.scheduler.remove(out[i].id);
    return true;
}

} // namespace quire
