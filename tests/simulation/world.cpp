// Engines, requests and expectations of a scenario.
#include <stdexcept>

#include "world.h"

import quire.core.json;
import quire.decode.sampler;
import quire.model_file.config;

namespace quire::simulation {

const std::string& model_path() {
    static const std::string path = QUIRE_ROOT "/tests/data/models/llama3-gqa-Q8_0.gguf";
    return path;
}

// Guesses what follows in one of the known texts, with tokens changed where the guesses are to be wrong. `end`: an end token.
class SimGuesser final : public TokenGuesser {
public:
    SimGuesser(std::shared_ptr<const Texts> texts, Guesses how, Token end)
        : texts_(std::move(texts)), how_(how), end_(end) {}

    void guess(std::span<const Token> text, int n, std::vector<Token>& guess) override {
        const std::uint64_t luck = mix(text.size() * 31 + std::uint64_t(text.back()));
        if (how_ > Guesses::wrong) n = int(luck % std::uint64_t(n + 1));
        const auto begins_so = [&](const std::vector<Token>& known) {
            return known.size() > text.size() && std::ranges::equal(text, std::span(known).first(text.size()));
        };
        const auto known = std::ranges::find_if(*texts_, begins_so);
        for (std::size_t i = 0; i < std::size_t(n); i++) {
            const std::size_t at    = text.size() + i;
            const bool        there = known != texts_->end() && at < known->size();
            const Token       right = there ? (*known)[at] : Token(mix(luck + i) % vocab);
            guess.push_back(instead_of(right, luck, int(i), n));
        }
    }

private:
    // Number i of n guesses, where `right` is the right one.
    Token instead_of(Token right, std::uint64_t luck, int i, int n) const {
        const Token wrong = (right + 1) % vocab;
        switch (how_) {
            case Guesses::right: return right;
            case Guesses::wrong: return wrong;
            case Guesses::mixed:
            case Guesses::paying: return mix(luck ^ std::uint64_t(i)) % 4 == 0 ? wrong : right;
            case Guesses::random: return Token(mix(luck * 7 + std::uint64_t(i)) % vocab);
            case Guesses::adversarial: break;
        }
        switch (luck / 64 % 4) {
            case 0: return i + 1 < n ? right : wrong;
            case 1: return i + 1 < n ? right : end_;
            case 2: return end_;
            default: return Token(luck / 256 % vocab);
        }
    }

    static constexpr int         vocab = 600; // fewer than the model's
    std::shared_ptr<const Texts> texts_;
    Guesses                      how_;
    Token                        end_;
};

SimEngine make_engine(const Scenario& s, bool alone, std::shared_ptr<SimDisk> disk, const Left& left) {
    SimEngine     sim;
    EngineOptions o;
    o.device                 = "cpu";
    o.block_size             = alone ? 256 : s.block_size;
    const CacheLayout layout = layout_of(s.windows, s.context, s.state_bytes, o.block_size);
    o.kv_blocks =
        (alone ? 64 : s.n_blocks) * layout.blocks_per_entry() + (alone ? 64 : s.n_units) * layout.blocks_per_unit();
    o.swap_blocks =
        alone ? 0
              : s.n_swap * layout.blocks_per_entry() + (s.n_swap > 0 ? s.n_units / 2 * layout.blocks_per_unit() : 0);
    if (!alone && s.n_tier > 0)
        o.tier_blocks = s.n_tier * layout.blocks_per_entry() + (s.n_units + 1) / 2 * layout.blocks_per_unit();
    o.checkpoint_interval = s.interval;
    o.context             = s.context;
    o.max_batch_tokens    = alone ? 512 : s.step_tokens;
    o.max_sequences       = alone ? 16 : s.sequences;
    o.prefix_cache        = !alone && s.cache;
    o.keep_preempted      = s.keep_preempted;
    o.preemption_mode     = s.preemption;
    o.watermark           = alone ? 0 : s.watermark;
    o.pipeline            = !alone && s.pipeline;
    o.step_seconds        = !alone && s.paced ? 8 * s.token_seconds : 0;
    o.drafts.on           = !alone && s.drafts > 0;
    o.drafts.most         = std::max(s.drafts, 1);
    o.drafts.always       = s.guesses != Guesses::paying;
    o.drafts.forced       = !alone;
    o.drafts.guesser      = [texts = sim.texts, how = s.guesses, end = sim.end](const Request&) {
        return SimGuesser(texts, how, *end);
    };
    o.clock = [clock = sim.clock] { return clock->now; };
    if (!alone && s.disk > 0 && s.n_tier > 0 && s.cache) {
        sim.disk        = disk ? std::move(disk) : std::make_shared<SimDisk>(s);
        o.kv_disk_bytes = s.disk;
        o.kv_files      = {[d = sim.disk] { return std::make_unique<SimFiles>(d); },
                           [d = sim.disk, most = s.disk_jobs] { return d->random.below(most + 1); }};
    }
    if (s.shuffled && !alone) {
        Random r(s.seed, Stream::free_blocks);
        for (BlockId i = 0; i < o.kv_blocks; i++) o.free_order.push_back(i);
        for (std::size_t i = o.free_order.size(); i > 1; i--)
            std::swap(o.free_order[i - 1], o.free_order[std::size_t(r.below(int(i)))]);
    }
    const auto make = [&](EngineOptions& options, ModelConfig& config) -> Result<std::unique_ptr<Executor>> {
        LayerConfig layer = config.layers.at(0);
        config.layers.clear();
        for (int window : s.windows) {
            layer.window = std::max(window, 0);
            config.layers.push_back(layer);
        }
        config.n_layers = int(config.layers.size());
        SimOptions own;
        options.layout      = layout;
        own.layout          = layout;
        own.lanes           = lanes_of(layout, s.windows);
        own.late_moves      = !alone && s.late_moves;
        own.reordered_moves = !alone && s.reordered_moves;
        own.seed            = s.seed;
        own.block_size      = options.block_size;
        own.n_blocks        = options.kv_blocks;
        own.n_swap          = options.host_blocks();
        own.vocab           = config.vocab_size;
        own.late            = !alone && s.late;
        own.best            = !alone && s.device_best;
        own.token_seconds   = s.token_seconds;
        own.block_seconds   = s.block_seconds;
        own.first_step      = sim.disk ? sim.disk->steps : left.steps;
        auto executor       = std::make_unique<SimExecutor>(std::move(own), sim.clock);
        sim.executor        = executor.get();
        return executor;
    };
    Result<Engine> engine = Engine::load(model_path(), o, {}, make, left.parked.get());
    if (!engine) throw std::runtime_error(engine.error().message);
    sim.engine.emplace(std::move(*engine));
    sim.executor->set_ends(sim.engine->tokenizer().end_tokens());
    *sim.end = sim.engine->tokenizer().end_tokens().front();
    return sim;
}

void constrain(Request& request, Pattern pattern, const Engine& engine,
               std::map<Pattern, std::shared_ptr<Constraint>>& compiled) {
    using Kind = ConstraintSpec::Kind;
    if (pattern == Pattern::none) return;
    std::shared_ptr<Constraint>& constraint = compiled[pattern];
    if (!constraint) {
        ConstraintSpec spec;
        switch (pattern) {
            case Pattern::none: break;
            case Pattern::word: spec.kind = Kind::regex, spec.text = "[a-z]{2,9}( [a-z]{2,9}){0,3}"; break;
            case Pattern::choice: spec.kind = Kind::choice, spec.choices = {"yes", "no", "nobody knows it yet"}; break;
            case Pattern::number: spec.kind = Kind::regex, spec.text = "-?[1-9][0-9]{0,5}(\\.[0-9]{1,4})?"; break;
            case Pattern::object:
                spec.kind   = Kind::json_schema;
                spec.schema = *json_parse(
                    R"({"type":"object","properties":{"name":{"enum":["left","right"]},"count":{"type":"integer"}},)"
                    R"("required":["name","count"]})");
                break;
        }
        Result<std::shared_ptr<Constraint>> made = compile_constraint(spec);
        if (!made) throw std::runtime_error(made.error().message);
        constraint = std::move(*made);
    }
    request.constraint = ConstraintState(constraint, engine.token_trie());
}

std::vector<Token> Oracle::prompt(int task) {
    const Task&        t = scenario_.tasks[std::size_t(task)];
    std::vector<Token> tokens;
    if (t.follows >= 0) {
        tokens                  = prompt(t.follows);
        const Expected& earlier = expected(t.follows);
        if (!earlier.answers.empty())
            tokens.insert(tokens.end(), earlier.answers[0].tokens.begin(), earlier.answers[0].tokens.end());
    }
    for (int i = 0; i < t.n_prompt; i++) {
        const std::uint64_t of = i < t.differs ? 0 : 1 + std::uint64_t(t.variant);
        tokens.push_back(Token(5 + mix(std::uint64_t(t.family) * 7919 + of * 104'729 + std::uint64_t(i) * 31) % 600));
    }
    tokens.resize(std::min(tokens.size(), std::size_t(scenario_.context - 2)));
    return tokens;
}

Request Oracle::request(int task) {
    const Task& t = scenario_.tasks[std::size_t(task)];
    Request     r;
    r.prompt               = prompt(task);
    r.sampling.temperature = t.sampled ? 0.9f : 0;
    if (t.sampled && t.sample_seed == 1) r.sampling.top_p = 0.9f, r.sampling.min_p = 0.01f;
    if (t.penalties) r.sampling.repetition_penalty = 1.3f, r.sampling.frequency_penalty = 0.4f;
    for (int i = 0; i < t.biases; i++) r.sampling.logit_bias.push_back({Token(5 + i * 83), i % 2 == 0 ? 2.f : -3.f});
    for (int i = 0; i < t.stops; i++) r.stop_tokens.push_back(Token(7 + i * 10));
    r.sampling.seed     = t.sample_seed;
    r.sampling.logprobs = t.logprobs;
    r.n                 = t.n;
    r.best_of           = t.best_of;
    r.beam_width        = t.beams;
    r.priority          = t.priority;
    if (t.salt == Task::no_cache) r.uses_cache = false;
    else if (t.salt > 0) r.cache_salt = cat("salt ", t.salt);
    r.pin             = t.pin;
    r.max_tokens      = t.max_tokens;
    r.min_tokens      = t.min_tokens;
    r.ignore_end      = t.ignore_end && t.pattern == Pattern::none;
    r.context_shift   = t.shifts;
    r.return_progress = t.progress;
    r.prompt_logprobs = t.prompt_logprobs;
    return r;
}

std::vector<Token> Oracle::text(int task) {
    std::vector<Token> tokens = prompt(task);
    if (const Expected& e = expected(task); !e.answers.empty())
        tokens.insert(tokens.end(), e.answers[0].tokens.begin(), e.answers[0].tokens.end());
    return tokens;
}

const Expected& Oracle::expected(int task) {
    if (const auto found = known_.find(task); found != known_.end()) return found->second;
    const Request r = request(task);
    Expected      e;
    if (r.pin) e = {};
    else if (withheld(r) || r.context_shift || r.sampling.logprobs >= 0 || r.prompt_logprobs >= 0 ||
             !r.stop_tokens.empty() || scenario_.tasks[std::size_t(task)].pattern != Pattern::none)
        e = by_engine(task, r);
    else e = by_hand(r);
    return known_.emplace(task, std::move(e)).first->second;
}

SimEngine& Oracle::alone() {
    if (!alone_) alone_ = make_engine(scenario_, true);
    return *alone_;
}

// Token by token, each from the text before it.
Expected Oracle::by_hand(const Request& r) {
    const Engine&            engine = *alone().engine;
    const std::vector<Token> ends   = engine.tokenizer().end_tokens();
    std::vector<float>       logits(std::size_t(engine.config().vocab_size));
    Sampler                  sampler(int(logits.size()));
    Text                     begin(lanes_);
    for (Token token : r.prompt) begin.append(token);
    Expected e;
    for (int stream = 0; stream < r.n; stream++) {
        Text               text   = begin;
        std::vector<Token> tokens = r.prompt;
        Answer&            answer = e.answers.emplace_back();
        while (answer.finish == FinishReason::none) {
            logits_of(text.state(), ends, logits);
            const int                    n     = int(answer.tokens.size());
            const std::span<const Token> never = n < r.min_tokens ? std::span(ends) : std::span<const Token>();
            const Token                  token = sampler.sample(logits, r.sampling, tokens, n, stream, never);
            answer.tokens.push_back(token);
            tokens.push_back(token);
            if (engine.tokenizer().is_end(token) && !r.ignore_end) answer.finish = FinishReason::stop;
            else if (int(answer.tokens.size()) >= r.max_tokens || int(tokens.size()) >= scenario_.context)
                answer.finish = FinishReason::length;
            text.append(token);
        }
    }
    return e;
}

Expected Oracle::by_engine(int task, const Request& request) {
    Engine&                                        engine = *alone().engine;
    Request                                        r      = request;
    std::map<Pattern, std::shared_ptr<Constraint>> compiled;
    constrain(r, scenario_.tasks[std::size_t(task)].pattern, engine, compiled);
    r.priority = 0;
    Expected e;
    e.answers.resize(std::size_t(r.n));
    if (Result<RequestId> id = engine.submit(std::move(r)); !id)
        throw std::runtime_error(cat("a request that cannot run alone: ", id.error().message));
    std::vector<Output> events;
    for (bool done = false; !done;) {
        engine.step(events);
        for (Output& event : events) {
            Answer& a = e.answers.at(std::size_t(event.index));
            a.tokens.insert(a.tokens.end(), event.tokens.begin(), event.tokens.end());
            a.logprobs.insert(a.logprobs.end(), event.logprobs.begin(), event.logprobs.end());
            if (!event.prompt_logprobs.empty()) e.prompt_logprobs = std::move(event.prompt_logprobs);
            a.finish  = event.finish;
            a.logprob = event.logprob;
            a.score   = event.score;
            done      = done || event.done;
        }
        events.clear();
    }
    return e;
}

bool may_outgrow(const Scenario& s, const Request& r, const Expected& alone, int pinned, bool shares) {
    std::size_t longest = 1;
    for (const Answer& a : alone.answers) longest = std::max(longest, a.tokens.size());
    if (r.beam_width > 0 || r.context_shift) longest = std::size_t(r.max_tokens);
    const int         n_tokens = std::min(int(r.prompt.size() + longest) + 1, s.context);
    const CacheLayout layout   = layout_of(s);
    const int         shared   = !shares || r.beam_width > 0 || r.context_shift
                                     ? 0
                                     : blocks_for(layout, int(r.prompt.size()) / s.block_size * s.block_size, s.block_size);
    const int         units    = blocks_for(layout, n_tokens, s.block_size) - shared;
    // Sequences of a request can share a state that each of them is about to follow with its own.
    return shared + (r.beam_width > 0 ? 2 : 1) * r.width() * units + (r.width() + 1) * layout.blocks_per_unit() >
           s.n_blocks * layout.blocks_per_entry() + s.n_units * layout.blocks_per_unit() - pinned;
}

} // namespace quire::simulation
