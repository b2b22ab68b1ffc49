// Draft tokens: whatever is guessed, every token, log-probability and finish reason is that of decoding one token a step; n-grams as guesses;
// how many drafts a step gets; the pace and the memory of a draft model.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "../cuda/kernels.h"
#include "reference.h"

import quire.compute.memory;
import quire.constraint.compile;
import quire.core.base;
import quire.core.std;
import quire.decode.drafting;
import quire.decode.ngram_guesser;
import quire.engine.engine;
import quire.engine.load_estimate;
import quire.engine.step_pace;
import quire.schedule.request;
import quire.schedule.sequence;

#include "cuda_tools.h"
#include "engine_tools.h"
#include "process.h"
#include "schedule_tools.h"

using namespace quire;
using namespace quire::testing;

namespace {

enum class Guesses { right, wrong, mixed, end_tokens };

// Guesses what follows in one of the texts that it knows.
class KnownTexts final : public TokenGuesser {
public:
    KnownTexts(std::shared_ptr<const std::vector<std::vector<Token>>> texts, Guesses how, Token end)
        : texts_(std::move(texts)), how_(how), end_(end) {}

    void guess(std::span<const Token> text, int n, std::vector<Token>& guess) override {
        for (const std::vector<Token>& known : *texts_) {
            if (known.size() <= text.size() || !std::ranges::equal(text, std::span(known).first(text.size()))) continue;
            for (std::size_t i = text.size(); i < known.size() && int(guess.size()) < n; i++) {
                const bool wrong = how_ == Guesses::wrong || (how_ == Guesses::mixed && (i * 7 + text.size()) % 3 == 0);
                guess.push_back(how_ == Guesses::end_tokens ? end_ : wrong ? (known[i] + 1) % 600 : known[i]);
            }
            return;
        }
    }

private:
    std::shared_ptr<const std::vector<std::vector<Token>>> texts_;
    Guesses                                                how_;
    Token                                                  end_;
};

// Each prompt with each of its answers.
std::vector<std::vector<Token>> texts_of(const std::vector<Task>& tasks, const std::vector<Answers>& answers) {
    std::vector<std::vector<Token>> texts;
    for (std::size_t i = 0; i < tasks.size(); i++)
        for (const auto& [index, answer] : answers[i].by_index) {
            std::vector<Token>& text = texts.emplace_back(tasks[i].request.prompt);
            text.insert(text.end(), answer.tokens.begin(), answer.tokens.end());
        }
    return texts;
}

std::string model(const char* name) { return std::string(QUIRE_ROOT "/tests/data/models/") + name; }

EngineOptions roomy_options() {
    EngineOptions o;
    o.threads          = 1;
    o.block_size       = 4;
    o.kv_blocks        = 400;
    o.context          = 96;
    o.max_batch_tokens = 64;
    return o;
}

std::shared_ptr<Constraint> number_constraint() {
    ConstraintSpec spec{.kind = ConstraintSpec::Kind::regex, .text = "-?[1-9][0-9]{0,9}(\\.[0-9]{1,4})?"};
    return *compile_constraint(spec);
}

// Requests of many methods, which come while others run.
std::vector<Task> many_requests(const Engine& engine, const std::shared_ptr<Constraint>& number) {
    std::vector<Task> tasks;
    const auto        add = [&](Request r, int at) { tasks.push_back({.request = std::move(r), .submit_at = at}); };
    for (int i = 0; i < 3; i++) {
        Request r       = greedy(prompt_of(9 + 20 * i, i), 20);
        r.return_logits = i == 0;
        add(r, i);
        r                             = sampled(prompt_of(13 + i, 3), 18, std::uint64_t(i));
        r.sampling.repetition_penalty = 1.3f;
        r.sampling.frequency_penalty  = 0.4f;
        r.sampling.logit_bias         = {{7, 2.f}, {11, -3.f}};
        r.ignore_end                  = false;
        add(r, 2 * i);
    }
    Request several = sampled(prompt_of(10, 8), 8, 5);
    several.n       = 2;
    add(several, 1);
    several.best_of           = 3;
    several.sampling.logprobs = 1;
    add(several, 2);
    add(beam(prompt_of(10, 4), 8, 2), 3);
    Request mirostat           = sampled(prompt_of(15, 2), 16, 9);
    mirostat.sampling.mirostat = 2;
    mirostat.min_tokens        = 5;
    add(mirostat, 4);
    Request dry                 = sampled(prompt_of(30, 6), 16, 2);
    dry.sampling.dry.multiplier = 0.8f;
    add(dry, 0);
    for (bool logprobs : {false, true}) {
        Request r    = sampled(prompt_of(12, 1), 16, 4);
        r.constraint = ConstraintState(number, engine.token_trie());
        r.ignore_end = false;
        if (!logprobs) r.sampling.logprobs = -1;
        add(r, logprobs);
    }
    return tasks;
}

void check_two_rounds(Engine& engine, const std::vector<Task>& tasks, const std::vector<Answers>& expected) {
    for (int round = 0; round < 2; round++) { // the second one finds the first one's blocks
        const std::vector<Answers> got = run_all(engine, tasks);
        for (std::size_t i = 0; i < tasks.size(); i++) {
            INFO("round " << round << ", request " << i << ": " << got[i].message);
            CHECK(identical(got[i], expected[i]));
        }
        engine.check_invariants();
    }
}

} // namespace

TEST_CASE("draft tokens change no token, no log-probability and no finish reason") {
    const auto [file, how] = GENERATE(table<const char*, Guesses>({{"llama3-gqa-Q8_0.gguf", Guesses::right},
                                                                   {"llama3-gqa-Q8_0.gguf", Guesses::mixed},
                                                                   {"llama3-gqa-Q8_0.gguf", Guesses::wrong},
                                                                   {"llama3-gqa-Q8_0.gguf", Guesses::end_tokens},
                                                                   {"mistral-swa-Q8_0.gguf", Guesses::mixed},
                                                                   {"gemma4-Q8_0.gguf", Guesses::mixed},
                                                                   {"deepseek2-Q8_0.gguf", Guesses::mixed},
                                                                   {"qwen3moe-Q8_0.gguf", Guesses::mixed},
                                                                   {"qwen35-k-Q4_K_M.gguf", Guesses::right},
                                                                   {"qwen35-k-Q4_K_M.gguf", Guesses::mixed},
                                                                   {"nemotron_h-Q8_0.gguf", Guesses::mixed}}));
    INFO(file << ", guesses of kind " << int(how));
    EngineOptions        o      = roomy_options();
    const auto           number = number_constraint();
    auto                 texts  = std::make_shared<std::vector<std::vector<Token>>>();
    std::vector<Answers> expected;
    Token                end = 0;
    {
        Engine     plain = load(model(file), o);
        const auto tasks = many_requests(plain, number);
        expected         = run_all(plain, tasks);
        end              = plain.tokenizer().end_tokens().front();
        *texts           = texts_of(tasks, expected);
        CHECK(plain.stats().memory.draft_tokens == 0);
    }
    o.drafts.on        = true;
    o.drafts.most      = 5;
    o.drafts.always    = true;
    o.drafts.guesser   = [&](const Request&) { return KnownTexts(texts, how, end); };
    const bool crowded = GENERATE(false, true);
    if (crowded) { // requests are preempted, computed again or swapped
        o.max_batch_tokens = 20;
        o.kv_blocks        = file == std::string("llama3-gqa-Q8_0.gguf") ? 60 : 90;
        o.swap_blocks      = how == Guesses::right ? 0 : 60;
        o.pipeline         = how == Guesses::mixed;
    }
    Engine     engine = load(model(file), o);
    const auto tasks  = many_requests(engine, number);
    check_two_rounds(engine, tasks, expected);
    const auto stats = engine.stats().memory;
    CHECK(stats.draft_tokens > 0);
    std::uint64_t accepted = 0, before = stats.drafts;
    for (const std::uint64_t n : stats.accepted_at) {
        CHECK(n <= before); // behind a wrong one none counts
        accepted += before = n;
    }
    CHECK(accepted == stats.accepted_tokens);
    CHECK((stats.accepted_at[4] > 0) == (how == Guesses::right));
    CHECK(stats.accepted_at[5] == 0); // five at most
    if (how == Guesses::wrong) CHECK(stats.accepted_tokens == 0);
    if (how == Guesses::right) CHECK(stats.accepted_tokens > stats.draft_tokens / 2);
    if (how == Guesses::mixed) CHECK((stats.accepted_tokens > 0 && stats.accepted_tokens < stats.draft_tokens));
}

TEST_CASE("a draft model changes no token, no log-probability and no finish reason") {
    const auto [file, draft] =
        GENERATE(table<const char*, const char*>({{"llama3-gqa-Q8_0.gguf", "llama3-gqa-Q8_0.gguf"},
                                                  {"llama3-gqa-Q8_0.gguf", "llama3-gqa-F16.gguf"},
                                                  {"gemma4-Q8_0.gguf", "mistral-swa-Q8_0.gguf"},
                                                  {"qwen35-k-Q4_K_M.gguf", "qwen2-Q4_0.gguf"}}));
    INFO(file << " with guesses of " << draft);
    EngineOptions        o      = roomy_options();
    const auto           number = number_constraint();
    std::vector<Answers> expected;
    {
        Engine plain = load(model(file), o);
        expected     = run_all(plain, many_requests(plain, number));
    }
    o.drafts           = {.on = true, .most = 5, .always = true, .by_model = true, .model = model(draft)};
    const bool crowded = GENERATE(false, true);
    if (crowded) { // requests are preempted; the draft model's pool is too small for all of them, and computes prompts in pieces
        o.max_batch_tokens = 20;
        o.kv_blocks        = 60;
        o.swap_blocks      = 30;
    }
    Engine     engine = load(model(file), o);
    const auto tasks  = many_requests(engine, number);
    check_two_rounds(engine, tasks, expected);
    const auto stats = engine.stats().memory;
    CHECK(stats.draft_tokens > 0);
    if (file == std::string(draft)) CHECK(stats.accepted_tokens > stats.draft_tokens / 2);
}

TEST_CASE("an MTP layer changes no token, no log-probability and no finish reason") {
    EngineOptions o      = roomy_options();
    const auto    number = number_constraint();
    std::string   path   = QUIRE_ROOT "/tests/data/mtp/tiny-mtp-F16.gguf";
    if (GENERATE(false, true)) { // experts, no recurrent state
        if (!has_reference("models/glm4moe-mtp-F16.gguf")) return;
        path = reference("models/glm4moe-mtp-F16.gguf");
    }
    std::vector<Answers> expected;
    {
        Engine plain = load(path, o);
        expected     = run_all(plain, many_requests(plain, number));
    }
    o.drafts           = {.on = true, .most = GENERATE(1, 4), .always = true, .by_mtp = true};
    const bool crowded = GENERATE(false, true);
    if (crowded) { // requests are preempted, computed again or swapped
        o.max_batch_tokens = 20;
        o.kv_blocks        = 20;
        o.max_sequences    = 8;
        o.swap_blocks      = o.drafts.most == 1 ? 0 : 60;
        o.pipeline         = o.drafts.most == 1;
    }
    Engine     engine = load(path, o);
    const auto tasks  = many_requests(engine, number);
    check_two_rounds(engine, tasks, expected);
    const auto stats = engine.stats().memory;
    CHECK(stats.accepted_tokens < stats.draft_tokens);
    CHECK((engine.stats().preemptions > 0) == crowded);
    if (path.contains("tiny")) CHECK(stats.accepted_tokens > 0);
}

TEST_CASE("a draft of EAGLE-3 changes no token, no log-probability and no finish reason") {
    const std::string folder = QUIRE_ROOT "/tests/data/eagle/", target = folder + "tiny-target-F16.gguf";
    const std::string kind    = GENERATE("small", "wide", "shared");
    EngineOptions     o       = roomy_options();
    const bool        crowded = GENERATE(false, true);
    INFO(kind << (crowded ? ", crowded" : ""));
    const auto           number = number_constraint();
    std::vector<Answers> expected;
    {
        Engine plain = load(target, o);
        expected     = run_all(plain, many_requests(plain, number));
    }
    o.drafts = {.on       = true,
                .most     = kind == "wide" ? 1 : 4,
                .always   = true,
                .by_model = true,
                .model    = folder + "tiny-eagle-" + kind + "-F16.gguf"};
    if (crowded) { // requests are preempted, computed again or swapped
        o.max_batch_tokens = 20;
        o.kv_blocks        = 20;
        o.max_sequences    = 8;
        o.swap_blocks      = kind == "small" ? 0 : 60;
        o.pipeline         = kind == "wide";
    }
    Engine     engine = load(target, o);
    const auto tasks  = many_requests(engine, number);
    check_two_rounds(engine, tasks, expected);
    const auto stats = engine.stats().memory;
    CHECK(stats.accepted_tokens > stats.draft_tokens / 20);
    CHECK(stats.accepted_tokens < stats.draft_tokens);
    CHECK((engine.stats().preemptions > 0) == crowded);
}

TEST_CASE("a draft model that is the model itself guesses every token, also where tokens are drawn") {
    EngineOptions o = small_blocks(false, 200, 4);
    o.drafts        = {.on = true, .most = 4, .always = true, .by_model = true, .model = model("llama3-gqa-Q8_0.gguf")};
    Engine            engine = load(model("llama3-gqa-Q8_0.gguf"), o);
    std::vector<Task> tasks;
    for (int i = 0; i < 4; i++) {
        tasks.push_back({.request = greedy(prompt_of(9 + 5 * i, i), 21), .submit_at = 0});
        tasks.push_back({.request = sampled(prompt_of(8 + i, 4), 21, std::uint64_t(i)), .submit_at = i});
    }
    run_all(engine, tasks);
    const auto stats = engine.stats().memory;
    CHECK(stats.draft_tokens == stats.accepted_tokens);
    CHECK(stats.draft_tokens > 8 * 12); // of at most 16 each: five tokens a step behind the first one
    CHECK(stats.accepted_at[0] == stats.drafts);
}

TEST_CASE("an engine at rest has counted the draft tokens of its last step") {
    EngineOptions o = small_blocks(GENERATE(false, true), 200, 4);
    o.drafts        = {.on = true, .most = 4, .always = true, .by_model = true, .model = model("llama3-gqa-Q8_0.gguf")};
    Engine engine   = load(model("llama3-gqa-Q8_0.gguf"), o);
    value_of(engine.submit(greedy(prompt_of(9), 21)));
    std::vector<Output> events;
    while (engine.step(events)) {}
    REQUIRE(events.back().done);
    const auto stats = engine.stats().memory;
    CHECK(stats.accepted_tokens == 16); // of five tokens in each of four steps behind the first one
    CHECK(int(stats.accepted_tokens) == events.back().accepted_tokens);
    CHECK(int(stats.draft_tokens) == events.back().draft_tokens);
}

TEST_CASE("a request without drafts has none, and one with fewer has no more") {
    EngineOptions o = small_blocks(false, 200, 4);
    o.drafts        = {.on = true, .most = 4, .always = true, .by_model = true, .model = model("llama3-gqa-Q8_0.gguf")};
    Engine  engine  = load(model("llama3-gqa-Q8_0.gguf"), o);
    Request r       = greedy(prompt_of(9), 21);
    r.most_drafts   = 0;
    const Answers plain = run_one(engine, r);
    CHECK(engine.stats().memory.draft_tokens == 0);
    const auto before = engine.stats().steps;
    r.most_drafts     = 1;
    CHECK(identical(run_one(engine, r), plain));
    const auto drafts =
        engine.stats().memory.draft_tokens; // one a step at most, and the first token comes with the prompt
    CHECK((drafts > 6 && drafts <= 10));
    CHECK(engine.stats().steps - before >= 11);
}

// Guesses wrong, and counts how often.
class CountedWrong final : public TokenGuesser {
public:
    explicit CountedWrong(std::shared_ptr<int> n) : n_(std::move(n)) {}
    void guess(std::span<const Token>, int n, std::vector<Token>& guess) override {
        (*n_)++;
        guess.assign(std::size_t(n), 1);
    }

private:
    std::shared_ptr<int> n_;
};

TEST_CASE("where no guess of many sequences pays, seven of eight steps ask for none") {
    for (int n_sequences : {4, 24}) {
        EngineOptions o = small_blocks(GENERATE(false, true), 1000, 4);
        o.context       = 128;
        o.max_sequences = n_sequences;
        int fewest      = std::numeric_limits<int>::max(); // a slow first step on a busy machine misleads the costs
        for (int run = 0; run < 3; run++) {
            const auto calls = std::make_shared<int>(0);
            o.drafts         = {.on = true, .most = 4, .guesser = [=](const Request&) -> Polymorphic<TokenGuesser> {
                            return CountedWrong(calls);
                        }};
            Engine            engine = load(model("llama3-gqa-Q8_0.gguf"), o);
            std::vector<Task> tasks;
            for (int i = 0; i < n_sequences; i++) tasks.push_back({.request = greedy(prompt_of(9, i), 80)});
            (void)run_all(engine, tasks);
            CHECK(*calls < 80 * n_sequences);
            fewest = std::min(fewest, *calls);
        }
        CAPTURE(n_sequences, fewest);
        CHECK((n_sequences < 16) == (fewest > 60 * n_sequences));
        CHECK((n_sequences < 16 || fewest < 50 * n_sequences));
    }
}

TEST_CASE("fewer guessed tokens than a request's least do not run") {
    EngineOptions o = small_blocks(false, 200, 4);
    o.drafts        = {.on = true, .most = 4, .always = true, .by_model = true, .model = model("llama3-gqa-Q8_0.gguf")};
    Engine     engine = load(model("llama3-gqa-Q8_0.gguf"), o);
    const auto drafts = [&](int most_tokens, int least) {
        const auto before = engine.stats().memory.draft_tokens;
        Request    r      = greedy(prompt_of(9), most_tokens);
        r.least_drafts    = least;
        run_one(engine, r);
        return engine.stats().memory.draft_tokens - before;
    };
    // Behind the first token five more are made: a step with four guesses makes them.
    CHECK(drafts(6, -1) == 4);
    CHECK(drafts(6, 0) == 4);
    CHECK(drafts(6, 4) == 4);
    CHECK(drafts(6, 100) == 4); // the server's most
    // Behind the first token three more: two guesses at most, then none.
    CHECK(drafts(4, -1) == 2);
    CHECK(drafts(4, 3) == 0);
}

TEST_CASE("a draft model has the vocabulary of the model, and no state") {
    const auto error_of = [](const char* file, const char* draft) {
        EngineOptions o;
        o.context   = 32;
        o.drafts    = {.on = true, .by_model = true, .model = draft[0] == '\0' ? "" : model(draft)};
        auto engine = Engine::load(model(file), o);
        return engine ? std::string() : engine.error().message;
    };
    CHECK(error_of("llama3-gqa-Q8_0.gguf", "") == "guesses of a draft model need its file: --spec-draft-model");
    CHECK(error_of("llama3-gqa-Q8_0.gguf", "none.gguf").contains("none.gguf"));
    EngineOptions unread;
    unread.drafts = {.on = true, .model = "none.gguf"};
    CHECK(Engine::load(model("llama3-gqa-Q8_0.gguf"), unread)
              .error()
              .message.starts_with("--spec-draft-model needs --spec draft or eagle3"));
    CHECK(error_of("llama3-gqa-Q8_0.gguf", "gemma2-Q8_0.gguf")
              .contains("a draft model needs the vocabulary of the model"));
    CHECK(error_of("qwen35-k-Q4_K_M.gguf", "qwen35-k-Q4_K_M.gguf").contains("a recurrent state cannot"));
}

TEST_CASE("GPU, deterministic: draft tokens change no token, no log-probability and no finish reason", "[cuda]") {
    if (no_gpu()) return;
    const auto number = number_constraint();
    for (const char* file : {"llama3-gqa-Q8_0.gguf", "mistral-swa-Q8_0.gguf", "gemma2-Q8_0.gguf", "deepseek2-Q8_0.gguf",
                             "qwen3moe-Q8_0.gguf", "qwen35-k-Q4_K_M.gguf"})
        for (const Guesses how : {Guesses::right, Guesses::mixed, Guesses::wrong}) {
            CAPTURE(file, int(how));
            EngineOptions o;
            o.device                   = "cuda";
            o.deterministic            = true;
            o.kv_blocks                = 400;
            o.context                  = 400;
            auto                 texts = std::make_shared<std::vector<std::vector<Token>>>();
            std::vector<Task>    tasks;
            std::vector<Answers> expected;
            {
                Engine plain = load(model(file), o);
                tasks        = many_requests(plain, number);
                for (int i = 0; i < 8; i++) {
                    Request r           = greedy(prompt_of(9 + 40 * i, i), 24);
                    r.sampling.logprobs = -1;
                    tasks.push_back({.request = r, .submit_at = i});
                }
                expected = run_all(plain, tasks);
                *texts   = texts_of(tasks, expected);
            }
            o.drafts      = {.on = true, .most = 5, .always = true, .guesser = [&](const Request&) {
                            return KnownTexts(texts, how, 0);
                        }};
            Engine engine = load(model(file), o);
            for (int round = 0; round < 2; round++) { // the second one finds the first one's blocks
                const std::vector<Answers> got = run_all(engine, tasks);
                for (std::size_t i = 0; i < tasks.size(); i++) CHECK(identical(got[i], expected[i]));
            }
            const auto stats = engine.stats().memory;
            CHECK(stats.draft_tokens > 0);
            if (how == Guesses::right) CHECK(stats.accepted_tokens > stats.draft_tokens / 2);
        }
}

TEST_CASE("GPU, deterministic: a layer that guesses changes no token, no log-probability and no finish reason",
          "[cuda]") {
    if (no_gpu()) return;
    const auto        number = number_constraint();
    const std::string folder = QUIRE_ROOT "/tests/data/";
    for (const std::string draft : {"", "small", "wide", "shared"}) {
        const std::string path = folder + (draft.empty() ? "mtp/tiny-mtp-F16.gguf" : "eagle/tiny-target-F16.gguf");
        EngineOptions     o;
        o.device                        = "cuda";
        o.deterministic                 = true;
        o.kv_blocks                     = 400;
        o.context                       = 96;
        const std::vector<Answers> want = [&] {
            Engine plain = load(path, o);
            return run_all(plain, many_requests(plain, number));
        }();
        for (const bool crowded : {false, true}) { // requests are preempted, computed again or swapped
            CAPTURE(draft, crowded);
            o.drafts = {.on       = true,
                        .most     = draft == "wide" ? 1 : 4,
                        .always   = true,
                        .by_model = !draft.empty(),
                        .model    = draft.empty() ? "" : folder + "eagle/tiny-eagle-" + draft + "-F16.gguf",
                        .by_mtp   = draft.empty()};
            if (crowded) {
                o.max_batch_tokens = 40;
                o.kv_blocks        = 12;
                o.max_sequences    = 8;
                o.swap_blocks      = draft == "small" ? 0 : 60;
            }
            Engine engine = load(path, o);
            check_two_rounds(engine, many_requests(engine, number), want);
            const auto stats = engine.stats().memory;
            CHECK(stats.draft_tokens > 0);
            CHECK(stats.accepted_tokens < stats.draft_tokens);
        }
    }
}

TEST_CASE("the blocks of an answer with drafts are found as those of an answer without") {
    EngineOptions o      = small_blocks(false, 100, 4);
    Engine        plain  = load(model("llama3-gqa-Q8_0.gguf"), o);
    const Request first  = greedy(prompt_of(10), 23);
    const Answers want   = run_one(plain, first);
    auto          texts  = std::make_shared<std::vector<std::vector<Token>>>(1, first.prompt);
    const auto&   tokens = want.by_index.at(0).tokens;
    texts->front().insert(texts->front().end(), tokens.begin(), tokens.end());

    o.drafts       = {.on = true, .most = 7, .always = true, .guesser = [&](const Request&) {
                    return KnownTexts(texts, Guesses::mixed, 0);
                }};
    Engine drafted = load(model("llama3-gqa-Q8_0.gguf"), o);
    CHECK(identical(run_one(drafted, first), want));
    CHECK(drafted.stats().memory.accepted_tokens > 0);
    Request next         = first; // the next turn
    next.prompt          = texts->front();
    const Answers before = run_one(plain, next), after = run_one(drafted, next);
    CHECK(identical(after, before));
    CHECK(after.cached_tokens == before.cached_tokens);
    CHECK(after.cached_tokens == 32);
}

TEST_CASE("n-grams: what followed the last tokens where they occurred before") {
    NgramGuesser       guesser({.least = 2, .most = 3});
    std::vector<Token> text{1, 2, 3, 4, 5, 6, 2, 3, 9, 9, 1, 2, 3};
    const auto         guess = [&](int n) {
        std::vector<Token> out;
        guesser.guess(text, n, out);
        return out;
    };
    CHECK(guess(3) == std::vector<Token>{4, 5, 6}); // three tokens are alike there
    text = {1, 2, 3, 4, 5, 6, 2, 3, 9, 9, 1, 2, 3, 7, 2, 3};
    CHECK(guess(2) == std::vector<Token>{7, 2}); // two, the last time
    text.push_back(100);
    CHECK(guess(5).empty());
    text = {8, 8, 8}; // another text, shorter: what it knew is of no use
    CHECK(guess(4) == std::vector<Token>{8, 8, 8, 8});
    guesser = NgramGuesser({.least = 1, .most = 2});
    text    = {5, 6, 7, 5, 6};
    CHECK(guess(7) == std::vector<Token>{7, 5, 6, 7, 5, 6, 7}); // goes on in itself
    text.clear();
    for (int i = 0; i < 20'000; i++) text.push_back(i % 5000);
    CHECK(guess(3) == std::vector<Token>{0, 1, 2});
}

TEST_CASE("the cost of steps lies on lines between what was measured") {
    StepCost cost;
    CHECK(cost.of(3) == 0);
    cost.add_trial(1, 2);
    cost.add_trial(1, 1);
    CHECK(cost.of(5) == 1);
    cost.add_trial(4, 4);
    CHECK(cost.of(2) == 2);
    CHECK(cost.of(6) == 6);
    cost.add(4, 1, 400); // a single slow step
    CHECK(cost.of(4) < 4.3);
    CHECK(cost.of(1) == 1);
}

TEST_CASE("long texts lengthen steps of any number of rows, draft tokens those of their number") {
    StepCost cost;
    cost.add_trial(64, 5);
    cost.add_trial(128, 6);
    for (int i = 0; i < 100; i++) cost.add(64, 0, 7); // 64 sequences that have become long
    CHECK(std::abs(cost.of(64) - 7) < 0.01);
    CHECK(std::abs(cost.of(128) - 8) < 0.01); // more rows never look cheaper than fewer
    for (int i = 0; i < 100; i++) cost.add(128, 64, 9);
    CHECK(std::abs(cost.of(128) - 9) < 0.01);
    CHECK(std::abs(cost.of(64) - 7) < 0.01);
    for (int i = 0; i < 100; i++) cost.add(64, 0, 0.001); // far below the trials
    CHECK(cost.of(64) > 0);
    CHECK(cost.of(1) > 0);
}

// Guesses the same token again and again.
class OneToken final : public TokenGuesser {
public:
    explicit OneToken(Token token) : token_(token) {}
    void guess(std::span<const Token>, int n, std::vector<Token>& guess) override {
        guess.assign(std::size_t(n), token_);
    }

private:
    Token token_;
};

TEST_CASE("the first guesses of many sequences do not run; those behind them run where they were right") {
    const int n_sequences = GENERATE(15, 16);
    for (const Token next : {7, 8}) {
        CAPTURE(n_sequences, next);
        Drafting drafting({.on = true, .most = 2, .guesser = [](const Request&) { return OneToken(7); }});
        drafting.cost().add_trial(n_sequences, 1);
        drafting.cost().add_trial(2 * n_sequences, 1.4); // pays where 6 of 10 are right, not where 3 are
        std::vector<std::unique_ptr<SequenceGroup>> running;
        for (int i = 0; i < n_sequences; i++) {
            SequenceGroup& group = *running.emplace_back(std::make_unique<SequenceGroup>());
            group.request        = greedy({1, 2}, 90);
            group.prompt_done    = true;
            group.sequences.push_back(std::make_unique<Sequence>());
            group.sequences[0]->tokens = {1, 2};
        }
        CHECK(drafting.choose(running, 100, 1000) == (n_sequences < 16));
        for (const auto& group : running) {
            Sequence& s = *group->sequences[0];
            CHECK(s.guess.size() == 2);
            s.tokens.push_back(next);
            judge_guess(s, 2);
        }
        CHECK(drafting.choose(running, 100, 1000) == (next == 7));
    }
}

TEST_CASE("of many sequences the lucky ones are not taken for better ones") {
    const bool differ = GENERATE(false, true);
    Drafting   drafting({.on = true, .most = 1, .guesser = [](const Request&) { return OneToken(7); }});
    drafting.cost().add_trial(32, 1);
    drafting.cost().add_trial(64, 1.5); // pays where 6 of 10 are right, not where 5 are
    std::vector<std::unique_ptr<SequenceGroup>> running;
    for (int i = 0; i < 32; i++) {
        SequenceGroup& group = *running.emplace_back(std::make_unique<SequenceGroup>());
        group.request        = greedy({1, 2}, 90);
        group.prompt_done    = true;
        Sequence& s          = *group.sequences.emplace_back(std::make_unique<Sequence>());
        s.tokens             = {1, 2};
        s.n_judged           = 20;
        s.hits               = differ ? (i < 16 ? 0.05 : 0.95) : (i < 16 ? 0.4 : 0.6); // by chance, of one in two
    }
    CHECK(drafting.choose(running, 100, 1000) == differ);
    int n = 0;
    for (const auto& group : running) n += group->sequences[0]->n_drafts;
    CHECK(n == (differ ? 16 : 0));
}

TEST_CASE("bench speculate measures decoding with draft tokens and without") {
    const std::string        file = model("llama3-gqa-Q8_0.gguf");
    std::vector<std::string> words{"speculate", "-m",       file, "--device", "cpu", "-t",
                                   "1",         "--rounds", "1",  "-n",       "16",  "--json"};
    const auto               text = GENERATE(false, true);
    for (const char* word :
         text ? std::array{"--text", QUIRE_ROOT "/tests/data/README.md"} : std::array{"--npl", "1,3"})
        words.emplace_back(word);
    const Finished f = run_program("bench", words);
    INFO(f.err);
    CHECK(f.code == 0);
    CHECK(std::ranges::count_if(f.out, [](char c) { return c == '\n'; }) ==
          (text ? 1 : 4)); // two rates of acceptance each
    CHECK(f.out.contains(text ? "\"guesses\":\"text 1\"" : "\"sequences\":3"));
}

TEST_CASE("bench speculate measures the guesses of a model beside none") {
    const std::string file = model("llama3-gqa-Q8_0.gguf");
    const Finished    f = run_program("bench", {"speculate", "-m", file, "--device", "cpu", "-t", "1", "--rounds", "1",
                                                "-n", "16", "--spec", "draft", "--spec-draft-model", file, "--json"});
    INFO(f.out << f.err);
    CHECK(f.code == 0);
    CHECK(f.out.contains("\"guesses\":\"model\""));
    CHECK(f.out.contains("\"answers_that_differ\":0"));
}

TEST_CASE("a draft model reads a long prompt in pieces, while other texts get guesses") {
    EngineOptions o = small_blocks(false, 200, 4);
    o.step_seconds  = 1e-9; // prompts in pieces of 8 tokens, in both models
    const std::vector<Task>    tasks{{.request = greedy(prompt_of(5, 3), 60), .submit_at = 0},
                                     {.request = greedy(prompt_of(90, 1), 40), .submit_at = 2}};
    Engine                     plain    = load(model("llama3-gqa-Q8_0.gguf"), o);
    const std::vector<Answers> expected = run_all(plain, tasks);
    o.drafts = {.on = true, .most = 2, .always = true, .by_model = true, .model = model("llama3-gqa-Q8_0.gguf")};
    Engine                      engine = load(model("llama3-gqa-Q8_0.gguf"), o);
    std::map<RequestId, Answer> answers;
    std::vector<RequestId>      ids;
    std::vector<Output>         events;
    int without = 0, with = 0; // guesses: steps of the second request; steps of the first one meanwhile
    for (int step = 0; step < 200; step++) {
        for (const Task& t : tasks)
            if (t.submit_at == step) ids.push_back(value_of(engine.submit(t.request)));
        engine.step(events);
        std::set<RequestId> seen;
        int                 first = 0;
        for (const Output& e : events) {
            Answer& a = answers[e.id];
            a.tokens.insert(a.tokens.end(), e.tokens.begin(), e.tokens.end());
            if (e.id == ids[0]) first += int(e.tokens.size());
            else if (e.draft_tokens == 0) without++, with += first > 1;
        }
        events.clear();
    }
    for (std::size_t i = 0; i < 2; i++) CHECK(answers[ids[i]].tokens == expected[i].by_index.at(0).tokens);
    CHECK(without >= 90 / 8); // a token a step, until the draft model has read the prompt
    CHECK(without <= 90 / 8 + 3);
    CHECK(with >= without - 1);
}

TEST_CASE("the pace of steps: twice as many tokens while there is time, eight at least") {
    StepPace pace(100);
    CHECK(pace.tokens() == 100);
    pace.set(1);
    CHECK(pace.tokens() == 8);
    pace.ran(8, 0.001);
    CHECK(pace.tokens() == 16);
    pace.ran(10, 9); // no full step
    CHECK(pace.tokens() == 16);
    pace.ran(16, 0.1);
    pace.ran(32, 0.1);
    CHECK(pace.tokens() == 64);
    pace.ran(64, 2);
    CHECK(pace.tokens() == 32);
    pace.ran(32, 100);
    CHECK(pace.tokens() == 8);
    pace.set(0);
    CHECK(pace.tokens() == 100);
}

TEST_CASE("the estimate of a load counts the draft model") {
    EngineOptions o{.device = "cpu"};
    const auto    alone = value_of(estimate_load(model("llama3-gqa-Q8_0.gguf"), o));
    o.drafts            = {.on = true, .by_model = true, .model = model("llama3-gqa-F16.gguf")};
    const auto both     = value_of(estimate_load(model("llama3-gqa-Q8_0.gguf"), o));
    CHECK(alone.draft_bytes == 0);
    CHECK(both.weight_bytes == alone.weight_bytes);
    CHECK(both.draft_bytes > alone.weight_bytes); // in 16 bits
    CHECK(both.all_weight_bytes() == both.weight_bytes + both.draft_bytes);
    CHECK(both.kv_bytes_per_token == 2 * alone.kv_bytes_per_token);
    CHECK(describe(both).contains("draft model"));
    CHECK_FALSE(describe(alone).contains("draft model"));
    o.drafts.model = model("none.gguf");
    CHECK(estimate_load(model("llama3-gqa-Q8_0.gguf"), o).error().message.contains("none.gguf"));

    // Both pools have to fit: neither alone asks for too much.
    o.drafts.model          = model("llama3-gqa-F16.gguf");
    o.context               = 64;
    const std::size_t block = 16 * alone.kv_bytes_per_token;
    o.swap_blocks           = 0;
    o.kv_blocks             = int(available_memory() / 10 * 6 / (block + 8 * 16 + 512));
    const auto refused      = Engine::load(model("llama3-gqa-Q8_0.gguf"), o);
    REQUIRE_FALSE(refused.has_value());
    CHECK(refused.error().message.contains("for another model"));
}

TEST_CASE("bench speculate --check: guesses of no kind change an answer") {
    const bool     hybrid = GENERATE(false, true);
    const Finished f =
        run_program("bench", {"speculate", "-m", model(hybrid ? "qwen35-k-Q4_K_M.gguf" : "llama3-gqa-Q8_0.gguf"),
                              "--device", "cpu", "-t", "1", "-k", "4", "--check", "288", "--json"});
    INFO(f.out << f.err);
    CHECK(f.code == 0);
    std::istringstream lines(f.out);
    int                n_kinds = 0, n_preempted = 0, n_cached = 0;
    for (std::string line; std::getline(lines, line); n_kinds++) {
        CHECK_FALSE(line.contains("\"requests\":0"));
        if (!hybrid) CHECK_FALSE(line.contains("\"draft_n\":0"));
        n_preempted += !line.contains("\"preemptions\":0");
        n_cached += !line.contains("\"cached_tokens\":0");
    }
    CHECK(n_kinds == 6);
    CHECK(n_preempted > 0);
    CHECK(n_cached > 0); // of a hybrid, with the recurrent state there
}

TEST_CASE("bench speculate --check: all kinds of guesses have equal shares of few requests, too") {
    for (const auto& [asked, each] : {std::pair("1", 4), {"100", 20}}) { // rounded up
        const Finished f = run_program("bench", {"speculate", "-m", model("llama3-gqa-Q8_0.gguf"), "--device", "cpu",
                                                 "-t", "1", "-k", "4", "--check", asked, "--json"});
        INFO(f.out << f.err);
        CHECK(f.code == 0);
        std::istringstream lines(f.out);
        int                n_kinds = 0;
        for (std::string line; std::getline(lines, line); n_kinds++)
            CHECK(line.contains("\"requests\":" + std::to_string(each) + ","));
        CHECK(n_kinds == 6);
    }
}

TEST_CASE("bench speculate --check names the guesses of a layer behind the model") {
    const Finished f =
        run_program("bench", {"speculate", "-m", QUIRE_ROOT "/tests/data/mtp/tiny-mtp-F16.gguf", "--device", "cpu",
                              "-t", "1", "-k", "4", "--spec", "mtp", "--check", "48", "--json"});
    INFO(f.out << f.err);
    CHECK(f.code == 0);
    CHECK(std::ranges::count_if(f.out, [](char c) { return c == '\n'; }) == 1);
    CHECK(f.out.contains("\"guesses\":\"mtp\""));
}
