// bench quality: what a type of K and V, GEMMs in fp8, or another file of weights change in a model's predictions of a text.
import quire.core.base;
import quire.core.json;
import quire.compute.kv_cache;
import quire.engine.kv_quality;

#include "commands.h"
#include "quality_text.h"

namespace quire::bench {

namespace {

// The log-probabilities of the whole vocabulary at neighbouring positions of a text, by token; and the token that followed.
struct Predictions {
    std::vector<float> logprobs; // [positions][vocabulary]
    std::vector<Token> followed;
    std::size_t        bytes_per_token = 0; // of K and V

    std::span<const float> at(std::size_t i) const {
        const std::size_t n = logprobs.size() / followed.size();
        return std::span(logprobs).subspan(i * n, n);
    }
};

using Tokens = std::vector<Token>;

// Predicts windows of a text, each from its beginning. `visit(i, p)` gets the i-th position of all, with the whole vocabulary.
Result<void> predict(Engine& engine, std::span<const Tokens> windows,
                     const std::function<void(std::size_t, const PositionLogprobs&)>& visit) {
    std::size_t at = 0;
    for (const Tokens& window : windows) {
        Request request;
        request.prompt          = window;
        request.max_tokens      = 0;
        request.prompt_logprobs = engine.config().vocab_size;
        Result<RequestId> id    = engine.submit(std::move(request));
        if (!id) return std::unexpected(id.error());
        std::vector<Output> events;
        for (bool more = true; more;) {
            more = engine.step(events);
            for (const Output& e : events) {
                if (e.finish == FinishReason::failed) return fail(e.message);
                for (const PositionLogprobs& p : e.prompt_logprobs) visit(at++, p);
            }
            events.clear();
        }
    }
    return {};
}

// fp8: with the GEMMs of all steps of several tokens in e4m3.
Result<Engine> load(const QualityArguments& a, const std::string& path, KvTypes types, bool fp8 = false) {
    EngineOptions o = a.engine;
    if (o.device == "auto") o.device = o.fp8_rows > 0 ? "cuda" : "cpu"; // a CPU runs all types
    o.fp8_rows      = fp8 ? 2 : 0;
    o.kv_type       = types;
    o.context       = a.window;
    o.max_sequences = 1;
    o.kv_blocks     = (a.window + 15) / 16 + 1;
    o.swap_blocks   = 0;
    o.prefix_cache  = false;
    o.tune          = false;
    return Engine::load(path, o);
}

// How predictions differ from the predictions that they are compared with.
struct Difference {
    double mean = 0, p99 = 0, most = 0; // KL divergence in nats, of the positions
    double same_top   = 0;              // share of the positions with the same most likely token
    double perplexity = 0, expected_perplexity = 0;
};

// KL(expected || got) of one position: Σ p · (ln p - ln q).
double divergence(std::span<const float> expected, std::span<const TokenLogprob> got) {
    double sum = 0;
    for (const TokenLogprob& t : got) {
        const double p = double(expected[std::size_t(t.token)]);
        if (std::exp(p) > 0) sum += std::exp(p) * (p - double(t.logprob));
    }
    return std::max(sum, 0.0); // below 0 by rounding only
}

Result<Difference> compare(Engine& engine, std::span<const Tokens> windows, const Predictions& expected) {
    std::vector<double> divergences;
    double              surprise = 0, expected_surprise = 0, same = 0;
    auto                ok = predict(engine, windows, [&](std::size_t i, const PositionLogprobs& p) {
        const std::span<const float> want = expected.at(i);
        divergences.push_back(divergence(want, p.top));
        same += double(std::ranges::max_element(want) - want.begin() == p.top[0].token);
        surprise -= double(p.chosen.logprob);
        expected_surprise -= double(want[std::size_t(p.chosen.token)]);
    });
    if (!ok) return std::unexpected(ok.error());
    Difference d;
    const auto n = double(divergences.size());
    for (double one : divergences) d.mean += one / n;
    std::ranges::sort(divergences);
    d.p99                 = divergences[std::min(divergences.size() - 1, divergences.size() * 99 / 100)];
    d.most                = divergences.back();
    d.same_top            = same / n;
    d.perplexity          = std::exp(surprise / n);
    d.expected_perplexity = std::exp(expected_surprise / n);
    return d;
}

Result<std::string> text_of(const std::string& path) {
    if (path.empty()) return std::string(quality_text);
    std::ifstream file(path, std::ios::binary);
    std::string   text{std::istreambuf_iterator<char>(file), {}};
    if (!file) return fail(path, ": cannot be read");
    return text;
}

} // namespace

int quality(const QualityArguments& a) {
    const Result<std::string> text = text_of(a.text);
    if (!text) return complain(text.error());
    const std::string& base = a.against.empty() ? a.model : a.against;
    const bool         fp8  = a.engine.fp8_rows > 0; // the only difference, but for other weights
    const KvTypes      base_type(fp8 ? a.engine.kv_type : KvTypes(a.reference == "f16" ? DType::F16 : DType::F32));

    std::vector<Tokens> windows;
    Predictions         expected;
    {
        Result<Engine> engine = load(a, base, base_type);
        if (!engine) return complain(engine.error());
        Tokens tokens = engine->tokenizer().encode(*text);
        tokens.resize(std::min(tokens.size(), std::size_t(a.tokens)));
        for (std::size_t at = 0; at + 1 < tokens.size(); at += std::size_t(a.window) - 1) {
            const auto n = std::min(std::size_t(a.window) - 1, tokens.size() - at);
            if (n > 1)
                windows.emplace_back(tokens.begin() + std::ptrdiff_t(at), tokens.begin() + std::ptrdiff_t(at + n));
        }
        if (windows.empty()) return complain({ErrorKind::input, "the text has fewer than two tokens"});
        const auto vocab = std::size_t(engine->config().vocab_size);
        const auto ok    = predict(*engine, windows, [&](std::size_t i, const PositionLogprobs& p) {
            expected.logprobs.resize((i + 1) * vocab);
            expected.followed.push_back(p.chosen.token);
            for (const TokenLogprob& t : p.top) expected.logprobs[i * vocab + std::size_t(t.token)] = t.logprob;
        });
        if (!ok) return complain(ok.error());
        std::fprintf(stderr, "%s: %zu positions in %zu windows of %d tokens, compared with K and V in %s of %s\n",
                     engine->describe().c_str(), expected.followed.size(), windows.size(), a.window,
                     name_of(base_type).c_str(), base.c_str());
    }
    Json                 rows = Json::array();
    std::vector<KvTypes> types; // all but the reference, or the one that was asked for
    if (fp8 || !a.against.empty() || a.engine.kv_type != DType::F16) types.push_back(a.engine.kv_type);
    else
        for (const KvTypeName& one : kv_type_names)
            if (base_type != one.type) types.emplace_back(one.type);
    for (const KvTypes& type : types) {
        Result<Engine> engine = load(a, a.model, type, fp8);
        if (!engine) return complain(engine.error());
        if (std::size_t(engine->config().vocab_size) * expected.followed.size() != expected.logprobs.size())
            return complain({ErrorKind::input, cat(a.model, " and ", base, " have vocabularies of different sizes")});
        const Result<Difference> d = compare(*engine, windows, expected);
        if (!d) return complain(d.error());
        const std::size_t bytes = KvCache::bytes_per_token(engine->config(), type);
        const std::string what  = cat(name_of(type), fp8 ? ", prompts in fp8" : "");
        const double      more  = d->perplexity / d->expected_perplexity - 1;
        if (!a.json && &type == &types.front())
            std::printf(
                "| K and V | bytes a token | mean KLD | p99 KLD | largest KLD | same top | perplexity | against the "
                "reference |\n"
                "| --- | --: | --: | --: | --: | --: | --: | --: |\n");
        if (a.json)
            rows.push_back(Json{{"kv_type", name_of(type)},
                                {"prompt_precision", fp8 ? "fp8" : "f16"},
                                {"bytes_per_token", bytes},
                                {"mean_kld", d->mean},
                                {"p99_kld", d->p99},
                                {"largest_kld", d->most},
                                {"same_top", d->same_top},
                                {"perplexity", d->perplexity},
                                {"reference_perplexity", d->expected_perplexity}});
        else
            std::printf("| %s | %zu | %.2e | %.2e | %.2e | %.2f %% | %.4f | %+.3f %% |\n", what.c_str(), bytes, d->mean,
                        d->p99, d->most, 100 * d->same_top, d->perplexity, 100 * more);
        std::fflush(stdout);
        if (a.against.empty() && (fp8 || base_type == DType::F32) &&
            int(expected.followed.size()) >= least_quality_positions) {
            const auto where = remember_kv_quality(engine->model_hash(), fp8 ? fp8_prompts : name_of(type),
                                                   {int(expected.followed.size()), d->mean, d->p99});
            if (&type != &types.back()) continue;
            const std::string what_for = fp8 ? "the start of servers and chats" : "--kv-type auto";
            std::fprintf(
                stderr, "%s\n",
                where ? cat("remembered in ", *where, ", for ", what_for).c_str() : where.error().message.c_str());
        }
    }
    if (a.json) std::printf("%s\n", json_dump(rows).c_str());
    return 0;
}

} // namespace quire::bench
