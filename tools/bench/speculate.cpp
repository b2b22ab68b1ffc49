// bench speculate: decoding with draft tokens beside plain decoding, by turns: guesses from the recorded answers, of which a given part is
// right; or n-grams, on a text; or those of a model: a draft model, a draft of EAGLE-3, the file's MTP layer.
#include <ctime>

import quire.core.base;
import quire.core.json;
import quire.decode.drafting;
import quire.decode.ngram_guesser;
import quire.engine.engine;

#include "commands.h"

namespace quire::bench {

// The guesses of the measurement at hand.
struct Guesses {
    bool                            on = false; // false: there are none, and the engine decodes as without draft tokens
    std::vector<std::vector<Token>> answers;    // recorded, by the requests' seeds; none: n-grams guess
    double                          acceptance = 1; // the part of the guessed tokens that is right
};

class BenchGuesser final : public TokenGuesser {
public:
    BenchGuesser(std::shared_ptr<const Guesses> all, const Request& r, NgramRange range)
        : all_(std::move(all)), ngrams_(range), index_(r.sampling.seed), n_prompt_(r.prompt.size()) {}

    void guess(std::span<const Token> text, int n, std::vector<Token>& guess) override {
        if (!all_->on) return;
        if (all_->answers.empty()) return ngrams_.guess(text, n, guess);
        const std::vector<Token>& answer = all_->answers[index_];
        for (std::size_t i = text.size() - n_prompt_; i < answer.size() && n > 0; i++, n--) {
            const bool right = std::uniform_real_distribution<double>()(random_) < all_->acceptance;
            guess.push_back(right ? answer[i] : answer[i] == 0 ? 1 : answer[i] - 1);
        }
    }

private:
    std::shared_ptr<const Guesses> all_;
    NgramGuesser                   ngrams_;
    std::size_t                    index_, n_prompt_;
    std::mt19937                   random_{1};
};

using Time = std::chrono::steady_clock::time_point;

// The time that this process has had on a processor, in place of the time of the day.
Time processor_time() {
    timespec t{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return Time(std::chrono::seconds(t.tv_sec) + std::chrono::nanoseconds(t.tv_nsec));
}

struct Decoded {
    std::vector<std::vector<Token>> answers;
    double                          rate     = 0; // tokens a second behind the first ones
    double                          per_step = 0; // tokens of a sequence
};

// `n`: the tokens of an answer; with `ends` an end token ends it before.
Result<Decoded> decode(Engine& engine, std::span<const std::vector<Token>> prompts, int n, bool ends,
                       bool guesses = true) {
    Decoded                          d;
    std::map<RequestId, std::size_t> index;
    d.answers.resize(prompts.size());
    for (std::size_t i = 0; i < prompts.size(); i++) {
        Request r;
        r.prompt               = prompts[i];
        r.max_tokens           = n;
        r.ignore_end           = !ends;
        r.sampling.temperature = 0;
        r.sampling.seed        = i;
        if (!guesses) r.most_drafts = 0;
        Result<RequestId> id = engine.submit(std::move(r));
        if (!id) return std::unexpected(id.error());
        index[*id] = i;
    }
    const auto          clock = engine.options().clock;
    const auto          now   = [&] { return clock ? clock() : std::chrono::steady_clock::now(); };
    std::optional<Time> since; // from the step on after which each answer has begun
    std::uint64_t       first_step = 0;
    std::size_t         first = 0, all = 0;
    std::vector<Output> events;
    for (bool busy = true; busy;) {
        busy = engine.step(events);
        for (const Output& e : events) {
            if (e.finish == FinishReason::failed || e.finish == FinishReason::refused)
                return fail("a request ended before its time: ", e.message);
            std::vector<Token>& answer = d.answers[index.at(e.id)];
            answer.insert(answer.end(), e.tokens.begin(), e.tokens.end());
        }
        events.clear();
        if (since || std::ranges::any_of(d.answers, [](const auto& a) { return a.empty(); })) continue;
        since      = now();
        first_step = engine.stats().steps;
        for (const auto& a : d.answers) first += a.size();
    }
    for (const auto& a : d.answers) all += a.size();
    if (!since || all == first) return fail("the answers end with their first tokens; nothing can be measured");
    d.rate     = double(all - first) / std::chrono::duration<double>(now() - *since).count();
    d.per_step = double(all - first) / double(engine.stats().steps - first_step) / double(prompts.size());
    return d;
}

// A row of the table.
struct Measured {
    std::string   what{};
    int           sequences = 0;
    double        plain = 0, drafts = 0, per_step = 0; // the first two in tokens a second
    std::uint64_t ran = 0, right = 0;                  // draft tokens
    std::size_t   differ = 0;                          // answers
};

void print(const Measured& m, bool json) {
    if (json)
        std::printf("%s\n", json_dump(Json{{"sequences", m.sequences},
                                           {"guesses", m.what},
                                           {"speed_plain", m.plain},
                                           {"speed_drafts", m.drafts},
                                           {"tokens_per_step", m.per_step},
                                           {"draft_n", m.ran},
                                           {"draft_n_accepted", m.right},
                                           {"answers_that_differ", m.differ}})
                                .c_str());
    else
        std::printf("| %9d | %7s | %9.2f | %10.2f | %5.3f | %13.2f | %6.3f | %6zu |\n", m.sequences, m.what.c_str(),
                    m.plain, m.drafts, m.drafts / m.plain, m.per_step, m.ran > 0 ? double(m.right) / double(m.ran) : 0,
                    m.differ);
    std::fflush(stdout);
}

double middle(std::vector<double> v) {
    std::ranges::sort(v);
    return v[v.size() / 2];
}

// Alternates decoding without guesses and with them, and which of the two comes first: a GPU at its power limit slows down with time.
Result<Measured> measure(Engine& engine, Guesses& guesses, std::span<const std::vector<Token>> prompts,
                         const SpeculateArguments& a) {
    const bool          ends = !a.texts.empty();
    std::vector<double> plain, drafts, per_step;
    Measured            m{.sequences = int(prompts.size())};
    const auto          before = engine.stats().memory;
    for (int round = 0; round < a.rounds; round++) {
        std::optional<Result<Decoded>> runs[2]; // without, with
        for (const int turn : {0, 1}) {
            guesses.on = turn != round % 2;
            runs[int(guesses.on)].emplace(decode(engine, prompts, a.n_tokens, ends, guesses.on));
        }
        const Result<Decoded>&without = *runs[0], &with = *runs[1];
        if (!without || !with) return std::unexpected(without ? with.error() : without.error());
        std::size_t differ = 0;
        for (std::size_t i = 0; i < prompts.size(); i++) differ += with->answers[i] != without->answers[i];
        m.differ = std::max(m.differ, differ);
        plain.push_back(without->rate);
        drafts.push_back(with->rate);
        per_step.push_back(with->per_step);
    }
    const EngineOptions o = engine.options();
    if (m.differ > 0 && (o.device == "cpu" || o.deterministic)) return fail("an answer with draft tokens differs");
    const auto after = engine.stats().memory;
    m.ran            = after.draft_tokens - before.draft_tokens;
    m.right          = after.accepted_tokens - before.accepted_tokens;
    m.plain = middle(plain), m.drafts = middle(drafts), m.per_step = middle(per_step);
    return m;
}

int speculate(const SpeculateArguments& a) {
    std::vector<std::string> texts;
    std::size_t              longest = 0; // in bytes: a text has at most so many tokens, and one at its beginning
    for (const std::string& path : a.texts) {
        std::ifstream file(path);
        texts.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
        longest = std::max(longest, texts.back().size() + 1);
    }
    auto          guesses = std::make_shared<Guesses>();
    const int     most    = *std::ranges::max_element(a.npl);
    EngineOptions o       = a.engine;
    o.max_sequences       = most;
    o.context             = (texts.empty() ? a.n_prompt : int(longest)) + a.n_tokens + 1;
    o.kv_blocks           = most * ((o.context + 15) / 16 + 1);
    o.swap_blocks         = 0;
    o.prefix_cache        = false;
    o.drafts.on           = true;
    if (a.processor_time) o.threads = 1, o.clock = processor_time;
    const bool by_model = o.drafts.by_model || o.drafts.by_eagle || o.drafts.by_mtp;
    if (!by_model)
        o.drafts.guesser = [guesses, range = o.drafts.ngram](const Request& r) {
            return BenchGuesser(guesses, r, range);
        };
    Result<Engine> engine = Engine::load(a.model, o);
    if (!engine) return complain(engine.error());
    std::fprintf(stderr, "%s\n", engine->describe().c_str());
    if (!a.json)
        std::printf(
            "| sequences | guesses | plain t/s | drafts t/s | ratio | tokens a step |  right | differ |\n"
            "| --------: | ------: | --------: | ---------: | ----: | ------------: | -----: | -----: |\n");
    const auto row = [&](std::string what, std::span<const std::vector<Token>> prompts) {
        Result<Measured> m = measure(*engine, *guesses, prompts, a);
        if (!m) return complain(m.error());
        m->what = std::move(what);
        print(*m, a.json);
        return 0;
    };
    for (int n : a.npl) {
        std::vector<std::vector<Token>> prompts;
        for (std::size_t t = 0; t < texts.size(); t++) {
            prompts.assign(std::size_t(n), engine->tokenizer().encode(texts[t]));
            if (prompts[0].empty()) return complain({ErrorKind::input, cat(a.texts[t], ": is empty")});
            if (const int code = row(cat("text ", t + 1), prompts); code != 0) return code;
        }
        if (!texts.empty()) continue;
        for (int i = 0; i < n; i++) prompts.push_back(random_prompt(*engine, a.n_prompt, unsigned(i)));
        if (by_model) {
            if (auto ok = decode(*engine, prompts, a.n_tokens, false); !ok)
                return complain(ok.error()); // fills the caches
            if (const int code = row("model", prompts); code != 0) return code;
            continue;
        }
        guesses->on                 = false;
        const Result<Decoded> first = decode(*engine, prompts, a.n_tokens, false); // also fills the caches
        if (!first) return complain(first.error());
        guesses->answers = first->answers;
        for (double acceptance : a.acceptance) {
            guesses->acceptance = acceptance;
            if (const int code = row(cat(acceptance), prompts); code != 0) return code;
        }
    }
    return 0;
}

} // namespace quire::bench
