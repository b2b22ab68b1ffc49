// Shared by the subcommands that run a model: the model's sizes, random prompts, a timed batch, the fraction of the limit.
#include "../../cuda/kernels.h"
#include "../../cuda/ranks/ranks.h"

import quire.compute.kv_cache;
import quire.core.base;
import quire.engine.engine;

#include "commands.h"

namespace quire::bench {

int complain(const Error& error, int code) {
    std::fprintf(stderr, "bench: %s\n", error.message.c_str());
    return code;
}

Result<Work> work_of(const std::string& path, KvTypes types) {
    Result<Gguf> file = Gguf::open(path);
    if (!file) return std::unexpected(file.error());
    Result<ModelConfig> config = read_config(*file);
    if (!config) return std::unexpected(config.error());
    Work work;
    for (const GgufTensor& t : file->tensors()) {
        if (t.name == "token_embd.weight" && file->tensor("output.weight")) continue; // one row a token
        work.weight_bytes += double(t.bytes);
        work.parameters += double(t.view().rows * t.view().cols);
        if (!t.name.contains("_exps.")) continue;
        work.expert_bytes += double(t.bytes);
        work.expert_parameters += double(t.view().rows * t.view().cols);
    }
    if (config->experts.n > 0) work.used = double(config->experts.used) / config->experts.n;
    work.kv_bytes_per_token = double(KvCache::bytes_per_token(*config, types));
    return work;
}

std::vector<Token> random_prompt(const Engine& engine, int n, unsigned seed) {
    std::mt19937       random(seed);
    std::vector<Token> prompt(static_cast<std::size_t>(n));
    for (Token& t : prompt) t = 259 + int(random() % unsigned(std::max(1, engine.config().vocab_size - 259)));
    for (Token& t : prompt) t = std::min(t, engine.config().vocab_size - 1);
    return prompt;
}

// Most tokens that one sequence may generate before the last prompt is computed.
int head_start(int n_sequences, int n_prompt, int step_tokens) {
    return n_sequences > 1 ? int(std::int64_t(n_sequences) * n_prompt / step_tokens) + 2 : 0;
}
// Most tokens of a step, as the engine will choose them.
int step_tokens(const Arguments& a) {
    cuda::DeviceInfo info;
    if (a.batch_tokens > 0) return a.batch_tokens;
    if (a.engine.tensor_parallel > 1) cuda::announce_ranks();
    return a.engine.device != "cpu" && cuda::open_device(0, info) == nullptr ? 2048 : 256;
}

// Computes n_sequences prompts of n_prompt tokens at once (`shared`: the same prompt each time), then generates n_tokens from each prompt.
// Times the two parts separately. `sampled`: greedy if null, else at temperature 1 under that constraint, if it is one.
Result<Timed> run_batch(Engine& engine, int n_sequences, int n_prompt, int n_tokens, unsigned seed, bool shared,
                        const Polymorphic<TokenFilter>* sampled) {
    std::vector<RequestId> ids;
    for (int i = 0; i < n_sequences; i++) {
        Request r;
        r.prompt = random_prompt(engine, std::max(n_prompt, 1), seed * 1000 + (shared ? 0 : unsigned(i)));
        r.max_tokens =
            n_tokens + 1 + (n_tokens > 0 ? head_start(n_sequences, n_prompt, engine.options().max_batch_tokens) : 0);
        r.ignore_end           = true;
        r.sampling.temperature = sampled ? 1 : 0;
        r.sampling.seed        = seed * 1000 + unsigned(i);
        if (sampled) r.constraint = *sampled;
        Result<RequestId> id = engine.submit(std::move(r));
        if (!id) return std::unexpected(id.error());
        ids.push_back(*id);
    }
    Timed               timed;
    std::vector<Output> events;
    std::set<RequestId> begun; // have their first token
    bool                ended = false;
    Stopwatch           watch;
    while (int(begun.size()) < n_sequences && engine.step(events)) {
        for (const Output& e : events) begun.insert(e.id), ended |= e.done;
        events.clear();
    }
    timed.prefill = watch.seconds();
    watch.restart();
    std::size_t left = std::size_t(n_sequences) * std::size_t(n_tokens);
    while (left > 0 && (sampled || !ended) && engine.step(events)) { // a constraint may end an answer
        timed.steps++;
        for (const Output& e : events) left -= std::min(left, e.tokens.size());
        if (left > 0) ended = std::ranges::any_of(events, &Output::done);
        events.clear();
    }
    timed.decode = watch.seconds();
    timed.tokens = double(n_sequences) * n_tokens - double(left);
    if (left > 0 && !sampled) return fail("a sequence ended before all had their tokens: there are too few blocks");
    for (RequestId id : ids) engine.cancel(id);
    while (engine.step(events)) events.clear();
    return timed;
}

EngineOptions options_of(const Arguments& a, int n_sequences, int n_tokens) {
    EngineOptions o    = a.engine;
    o.prefix_cache     = false;
    o.max_sequences    = n_sequences;
    o.context          = n_tokens;
    o.max_batch_tokens = a.batch_tokens > 0 ? std::max(a.batch_tokens, n_sequences) : 0;
    o.kv_blocks        = a.kv_blocks > 0 ? a.kv_blocks : n_sequences * ((n_tokens + 15) / 16 + 1);
    o.swap_blocks      = 0;
    if (a.kv_blocks == 0) o.watermark = 0; // all sequences fit to their ends: none waits for free blocks
    return o;
}

std::string limit_of(const Arguments& a, double seconds, double bytes, double flop) {
    if (a.bandwidth <= 0 && a.tflops <= 0) return "";
    const double least =
        std::max(a.bandwidth > 0 ? bytes / (a.bandwidth * 1e9) : 0, a.tflops > 0 ? flop / (a.tflops * 1e12) : 0);
    char text[32];
    std::snprintf(text, sizeof text, "%.0f %%", 100 * least / seconds);
    return text;
}

} // namespace quire::bench
