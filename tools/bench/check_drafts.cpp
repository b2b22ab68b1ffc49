// bench speculate --check: random requests of all methods, answered with draft tokens and without: every token, log-probability and finish reason
// has to be the same, whatever was guessed, preempted or found in the cache.
import quire.constraint.compile;
import quire.core.base;
import quire.core.json;
import quire.decode.drafting;
import quire.decode.ngram_guesser;
import quire.engine.engine;
import quire.schedule.request;

#include "commands.h"

namespace quire::bench {

namespace {

constexpr std::array<std::string_view, 6> kinds{"right", "wrong", "mixed", "random", "adversarial", "n-grams"};
constexpr int n_together = 12;   // most requests of one kind of guesses that run beside one another
constexpr int n_large    = 1000; // requests, of which some have to be preempted, and some to find a prefix

// One answer of a request, as it came.
struct Answered {
    std::vector<Token>            tokens;
    std::vector<PositionLogprobs> logprobs;
    FinishReason                  finish = FinishReason::none;
    double                        score  = 0;
};
using Answers = std::vector<Answered>;

struct Asked {
    Request              request;
    std::optional<Token> stop; // an answer with this token is cancelled there, as the server does behind a stop string
};

// All that guessers know: each request by the seed of its random numbers.
struct Known {
    std::map<std::uint64_t, std::vector<std::vector<Token>>> texts; // prompt and answer, of each of its answers
    std::size_t                                              kind = 0;
    Token                                                    end = 0, vocab = 1;
};

class CheckGuesser final : public TokenGuesser {
public:
    CheckGuesser(std::shared_ptr<const Known> known, const Request& r, NgramRange range)
        : known_(std::move(known)), ngrams_(range), seed_(r.sampling.seed), random_(unsigned(r.sampling.seed)) {}

    void guess(std::span<const Token> text, int n, std::vector<Token>& guess) override {
        const std::string_view kind = kinds[known_->kind];
        if (kind == "n-grams") return ngrams_.guess(text, n, guess);
        const auto                at    = known_->texts.find(seed_);
        const std::vector<Token>* right = nullptr;
        for (std::size_t i = 0; at != known_->texts.end() && i < at->second.size() && !right; i++)
            if (const auto& one = at->second[i];
                one.size() > text.size() && std::ranges::equal(text, std::span(one).first(text.size())))
                right = &one;
        const unsigned way = random_();
        for (int i = 0; i < n; i++) {
            const std::size_t place = text.size() + std::size_t(i);
            const Token       good  = right && place < right->size() ? (*right)[place] : any(),
                        bad         = (good + 1) % known_->vocab;
            if (kind == "right") guess.push_back(good);
            else if (kind == "wrong") guess.push_back(bad);
            else if (kind == "mixed") guess.push_back(random_() % 4 == 0 ? bad : good);
            else if (kind == "random") guess.push_back(any());
            else if (way % 4 == 0) guess.push_back(i + 1 < n ? good : bad);
            else if (way % 4 == 1) guess.push_back(i + 1 < n ? good : known_->end);
            else guess.push_back(way % 4 == 2 ? known_->end : text.back());
        }
    }

private:
    Token any() { return Token(random_() % unsigned(known_->vocab)); }

    std::shared_ptr<const Known> known_;
    NgramGuesser                 ngrams_;
    std::uint64_t                seed_;
    std::mt19937                 random_;
};

std::vector<std::shared_ptr<Constraint>> some_constraints() {
    std::vector<std::shared_ptr<Constraint>> all;
    for (const char* regex : {"-?[1-9][0-9]{0,9}(\\.[0-9]{1,4})?", "[a-z]{2,9}( [a-z]{2,9}){0,3}"})
        all.push_back(*compile_constraint({.kind = ConstraintSpec::Kind::regex, .text = regex}));
    for (
        const char* schema :
        {R"({"type":"object","properties":{"name":{"enum":["left","right"]},"count":{"type":"integer"}},"required":["name","count"]})",
         R"({"type":"array","items":{"type":"object","properties":{"temperature_in_degrees":{"type":"integer"},"weather_description":{"enum":["sunny","rainy"]}},"required":["temperature_in_degrees","weather_description"],"additionalProperties":false},"minItems":1,"maxItems":2})"}) {
        ConstraintSpec spec{.kind = ConstraintSpec::Kind::json_schema};
        spec.schema = *json_parse(schema);
        all.push_back(*compile_constraint(spec));
    }
    return all;
}

class Requests {
public:
    Requests(const Engine& engine, unsigned seed)
        : engine_(engine), constraints_(some_constraints()), random_(seed), vocab_(engine.config().vocab_size) {}

    // `prompt`: what it begins with.
    Asked make(std::vector<Token> prompt, std::uint64_t seed) {
        Asked    asked;
        Request& r = asked.request;
        r.prompt   = std::move(prompt);
        for (int n = between(1, 30); n > 0; n--) r.prompt.push_back(any());
        r.max_tokens        = between(1, 24);
        r.ignore_end        = one_in(2);
        SamplingParams& how = r.sampling;
        how.seed            = seed;
        how.temperature     = one_in(2) ? 0 : 0.1f * float(between(5, 14));
        if (one_in(3)) how.top_k = between(2, 60);
        if (one_in(3)) how.top_p = 0.9f;
        if (one_in(4)) how.min_p = 0.02f;
        if (one_in(4)) how.repetition_penalty = 1.3f, how.frequency_penalty = 0.4f;
        if (one_in(6)) how.presence_penalty = 0.7f, how.repeat_last_n = 8;
        if (one_in(8)) how.dry.multiplier = 0.8f;
        if (one_in(10)) how.mirostat = between(1, 2);
        if (one_in(3)) how.logprobs = between(0, 3);
        if (one_in(4))
            for (int n = between(1, 5); n > 0; n--) how.logit_bias.push_back({any(), one_in(2) ? 3.f : -4.f});
        if (one_in(8)) how.bad_words = {{any()}, {any(), any()}};
        if (one_in(6)) r.prompt_logprobs = between(0, 2);
        if (one_in(4))
            for (int n = between(1, 30); n > 0; n--) r.stop_tokens.push_back(any());
        if (one_in(6)) r.min_tokens = between(0, r.max_tokens);
        switch (between(0, 7)) {
            case 0: r.n = between(2, 3); break;
            case 1: r.best_of = between(2, 3); break;
            case 2:
            case 3:
                r.constraint = ConstraintState(constraints_[random_() % constraints_.size()], engine_.token_trie());
                r.ignore_end = false;
                r.min_tokens = 0;
                r.max_tokens = between(8, 48);
                r.stop_tokens.clear();
                break;
            case 4: r.beam_width = r.n = 2, r.min_tokens = 0; break;
            default: break;
        }
        if (one_in(4) && r.best_of == 0 && r.beam_width == 0) asked.stop = any();
        return asked;
    }
    bool one_in(int n) { return random_() % unsigned(n) == 0; }

private:
    int   between(int least, int most) { return least + int(random_() % unsigned(most - least + 1)); }
    Token any() { return Token(random_() % unsigned(vocab_)); }

    const Engine&                            engine_;
    std::vector<std::shared_ptr<Constraint>> constraints_;
    std::mt19937                             random_;
    int                                      vocab_;
};

// Hands the requests in, a few before each step, and runs them to their ends. `priorities`: some requests take the place of others that run.
Result<std::vector<Answers>> answers_of(Engine& engine, std::span<const Asked> asked, bool priorities = false) {
    std::vector<Answers>             all(asked.size());
    std::map<RequestId, std::size_t> index;
    std::vector<Output>              events;
    std::size_t                      n = 0;
    for (bool busy = true; busy || n < asked.size();) {
        for (int i = 0; i < 2 && n < asked.size(); i++, n++) {
            Request request = asked[n].request;
            if (priorities) request.priority = int(request.sampling.seed % 3);
            const Result<RequestId> id = engine.submit(std::move(request));
            if (!id) return std::unexpected(id.error());
            index[*id] = n;
            all[n].resize(std::size_t(asked[n].request.n));
        }
        busy = engine.step(events);
        for (Output& e : events) {
            const std::size_t which = index.at(e.id);
            if (e.finish == FinishReason::failed || e.finish == FinishReason::refused)
                return fail("request ", which, ": ", e.message);
            Answered& a = all[which][std::size_t(e.index)];
            if (a.finish == FinishReason::cancelled) continue; // behind its stop
            a.tokens.insert(a.tokens.end(), e.tokens.begin(), e.tokens.end());
            for (PositionLogprobs& p : e.logprobs) a.logprobs.push_back(std::move(p));
            a.finish = e.finish;
            a.score  = e.score;
            if (!asked[which].stop || std::ranges::find(a.tokens, *asked[which].stop) == a.tokens.end()) continue;
            const auto end = std::size_t(std::ranges::find(a.tokens, *asked[which].stop) - a.tokens.begin()) + 1;
            a.tokens.resize(end);
            a.logprobs.resize(std::min(a.logprobs.size(), end));
            a.finish = FinishReason::cancelled;
            engine.cancel(e.id, e.index);
        }
        events.clear();
    }
    return all;
}

bool equal(const PositionLogprobs& a, const PositionLogprobs& b) {
    const auto one = [](const TokenLogprob& x, const TokenLogprob& y) {
        return x.token == y.token && std::bit_cast<std::uint32_t>(x.logprob) == std::bit_cast<std::uint32_t>(y.logprob);
    };
    return one(a.chosen, b.chosen) && std::ranges::equal(a.top, b.top, one);
}

bool equal(const Answers& a, const Answers& b) {
    return std::ranges::equal(a, b, [](const Answered& x, const Answered& y) {
        return x.tokens == y.tokens && x.finish == y.finish && x.score == y.score &&
               std::ranges::equal(x.logprobs, y.logprobs,
                                  [](const PositionLogprobs& p, const PositionLogprobs& q) { return equal(p, q); });
    });
}

} // namespace

int check_drafts(const SpeculateArguments& a) {
    auto          known = std::make_shared<Known>();
    EngineOptions o     = a.engine;
    o.max_sequences     = 16;
    o.context           = 200;
    o.block_size        = 8;
    o.kv_blocks         = 16 * 25;
    o.swap_blocks       = 0;
    o.prefix_cache      = false;
    o.drafts.on = o.drafts.forced = false;
    Result<Engine> plain          = Engine::load(a.model, o);
    if (!plain) return complain(plain.error());
    // Requests are preempted: for blocks, and by more urgent ones for a sequence, since a model with recurrent states has blocks for two states
    // of each sequence. No request may outgrow the pool: the largest one, of 157 tokens or of three answers behind a prompt, takes 25 blocks.
    o.kv_blocks           = 36;
    o.max_sequences       = 8;
    o.swap_blocks         = 16;
    o.max_batch_tokens    = 64;
    o.prefix_cache        = true;
    o.checkpoint_interval = 16; // less than a prompt, which could find no state else
    o.drafts.on = o.drafts.forced = o.drafts.always = true;
    o.drafts.guesser = [known, range = o.drafts.ngram](const Request& r) { return CheckGuesser(known, r, range); };
    Result<Engine> drafted = Engine::load(a.model, o);
    if (!drafted) return complain(drafted.error());
    known->vocab = plain->config().vocab_size;
    if (const auto ends = plain->tokenizer().end_tokens(); !ends.empty()) known->end = ends.front();

    struct Row {
        int           requests = 0, differ = 0;
        std::uint64_t ran = 0, right = 0, cached = 0, preempted = 0;
    };
    const DraftOptions            drafts = drafted->options().drafts;
    const std::string_view        model  = drafts.by_mtp     ? "mtp"
                                           : drafts.by_eagle ? "eagle3"
                                           : drafts.by_model ? "draft"
                                                             : ""; // that guesses in place of all kinds
    const std::size_t             n_rows = model.empty() ? kinds.size() : 1;
    std::array<Row, kinds.size()> rows{};
    Requests                      requests(*plain, 1);
    const Token                   begin = plain->tokenizer().bos() >= 0 ? plain->tokenizer().bos() : 0;
    std::uint64_t                 seed  = 0;
    // Each kind of guesses takes its turn in every round, with four times as many requests as run together: all have equal shares of the requests.
    const auto round_up = [](int n, int of) { return (n + of - 1) / of; };
    const int  rounds   = round_up(a.check, 4 * int(n_rows) * n_together),
              together  = round_up(a.check, 4 * int(n_rows) * rounds);
    for (int turn = 0; turn < rounds * int(n_rows); turn++, known->kind = std::size_t(turn) % n_rows) {
        // A text, others, the text once more, and what goes on behind its answers, the last ones first, because a small pool forgets the older
        // ones: the later ones find blocks that draft tokens were written to.
        Row&               row = rows[known->kind];
        std::vector<Asked> first, other, next;
        for (int i = 0; i < together; i++) first.push_back(requests.make({begin}, seed++));
        for (int i = 0; i < together; i++) other.push_back(requests.make({begin}, seed++));
        const auto before = drafted->stats();
        const auto ask    = [&](const std::vector<Asked>& asked) -> Result<std::vector<Answers>> {
            Result<std::vector<Answers>> want = answers_of(*plain, asked);
            if (!want) return want;
            for (std::size_t i = 0; i < asked.size(); i++)
                for (const Answered& one : (*want)[i]) {
                    auto& text = known->texts[asked[i].request.sampling.seed].emplace_back(asked[i].request.prompt);
                    text.insert(text.end(), one.tokens.begin(), one.tokens.end());
                }
            const Result<std::vector<Answers>> got = answers_of(*drafted, asked, true);
            if (!got) return got;
            for (std::size_t i = 0; i < asked.size(); i++) row.differ += !equal((*want)[i], (*got)[i]);
            row.requests += int(asked.size());
            return want;
        };
        Result<std::vector<Answers>> answers = ask(first);
        for (std::size_t i = 0; answers && i < first.size(); i++) {
            std::vector<Token> prompt = first[i].request.prompt;
            const auto&        tokens = (*answers)[i][0].tokens;
            prompt.insert(prompt.end(), tokens.begin(), tokens.end());
            next.push_back(requests.make(std::move(prompt), seed++));
        }
        std::ranges::reverse(next);
        if (answers) answers = ask(other);
        if (answers) answers = ask(first);
        if (answers) answers = ask(next);
        if (!answers) return complain(answers.error());
        const auto after = drafted->stats();
        row.ran += after.memory.draft_tokens - before.memory.draft_tokens;
        row.right += after.memory.accepted_tokens - before.memory.accepted_tokens;
        row.cached += after.cached_tokens - before.cached_tokens;
        row.preempted += after.preemptions - before.preemptions;
        known->texts.clear();
    }
    Row all;
    if (!a.json)
        std::printf(
            "| guesses | requests | draft tokens | right | tokens found in the cache | preemptions | differ |\n"
            "| :------ | -------: | -----------: | ----: | ------------------------: | ----------: | -----: |\n");
    for (std::size_t i = 0; i < n_rows; i++) {
        const Row&             r    = rows[i];
        const std::string_view name = model.empty() ? kinds[i] : model;
        all.requests += r.requests, all.differ += r.differ, all.cached += r.cached, all.preempted += r.preempted;
        if (a.json)
            std::printf("%s\n", json_dump(Json{{"guesses", name},
                                               {"requests", r.requests},
                                               {"draft_n", r.ran},
                                               {"draft_n_accepted", r.right},
                                               {"cached_tokens", r.cached},
                                               {"preemptions", r.preempted},
                                               {"requests_that_differ", r.differ}})
                                    .c_str());
        else
            std::printf("| %s | %d | %llu | %llu | %llu | %llu | %d |\n", std::string(name).c_str(), r.requests,
                        static_cast<unsigned long long>(r.ran), static_cast<unsigned long long>(r.right),
                        static_cast<unsigned long long>(r.cached), static_cast<unsigned long long>(r.preempted),
                        r.differ);
    }
    const bool exact = a.engine.device == "cpu" || drafted->options().device == "cpu" || a.engine.deterministic;
    if (all.differ > 0 && exact)
        return complain({ErrorKind::input, cat(all.differ, " requests are answered differently")});
    const auto lacks = [&](const char* what) {
        return complain({ErrorKind::input, cat("of ", all.requests, " requests none ", what,
                                               ", so that the run says little about draft tokens")});
    };
    if (all.requests >= n_large && all.preempted == 0) return lacks("was preempted");
    if (all.requests >= n_large && all.cached == 0) return lacks("found a prefix in the cache");
    return 0;
}

} // namespace quire::bench
