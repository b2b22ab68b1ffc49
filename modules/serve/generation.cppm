// quire.serve.generation: one request for text while it is being answered: the engine's output → a response or a stream of events.
// **Owns** the request's handle; cancels what is left of it at the end.
export module quire.serve.generation;

import quire.core.base;
import quire.core.std;
import quire.engine.engine;
import quire.core.metrics;
import quire.schedule.request;
import quire.serve.api_error;
import quire.serve.http_exchange;
import quire.serve.openai_request;
import quire.serve.openai_response;
import quire.serve.service;
import quire.text.stop_strings;
import quire.text.tokenizer;

export namespace quire {

std::string event(std::string_view data) { return cat("data: ", data, "\n\n"); }

class Generation {
public:
    Generation(Service& service, GenerationRequest parsed, ResponseHead head, std::vector<std::vector<Token>> prompts,
               std::vector<std::string> prompt_texts);

    // The requests for the engine. The answers of prompt p are n p .. n p + n - 1.
    std::vector<Request> requests() const;
    void                 begin(std::unique_ptr<Ticket> ticket) { ticket_ = std::move(ticket); }
    Ticket&              ticket() { return *ticket_; }
    void                 abort() { aborted_ = true; }

    // Waits for the first news, at most so long. A fault: the engine would not have it.
    std::optional<ApiFault> first_news(double seconds);
    // To the end; a fault if the engine gave up, or the caller did (499).
    std::optional<ApiFault> whole(std::string& body);
    void                    stream(const HttpWrite& write, double ping_seconds);
    void                    count(HttpFields& notes);

private:
    struct Answer {
        AnswerText               text;
        bool                     begun = false, finished = false;
        std::size_t              offset = 0; // characters so far, for text_offset
        std::optional<TimePoint> first, last;
        std::string              reason;
    };

    Choice                       take(News& news);
    void                         take_prompt(const News& news, Choice& choice);
    void                         end_early(Answer& answer, Choice& choice, const std::string& stop_string);
    SpelledLogprob               spell(const TokenLogprob& logprob) const;
    std::vector<SpelledPosition> spell(std::span<const PositionLogprobs> positions, Answer& answer) const;
    std::vector<SpelledPosition> spell_prompt(std::size_t prompt) const;
    std::optional<ApiFault>      fault_of(const News& news);

    Service&                                   service_;
    GenerationRequest                          parsed_;
    ResponseHead                               head_;
    std::vector<std::vector<Token>>            prompts_;
    std::vector<std::string>                   prompt_texts_; // to be echoed
    TextOptions                                text_;
    std::vector<Answer>                        answers_;
    std::vector<int>                           cached_, preempted_; // of each prompt
    std::vector<std::vector<PositionLogprobs>> rated_; // its log-probabilities, which come with the first answer
    std::vector<TimePoint>                     first_run_;
    Usage                                      usage_;
    std::vector<News>                          early_; // came before a stream began

} // namespace quire

module : private;

namespace quire {

namespace {

double seconds_between(TimePoint a, TimePoint b) { return std::chrono::duration<double>(b - a).count(); }

} // namespace

bool                    more_ = true, aborted_ = false, failed_ = false;
std::unique_ptr<Ticket> ticket_;
}; // namespace quire

Generation::Generation(Service& service, GenerationRequest parsed, ResponseHead head,
                       std::vector<std::vector<Token>> prompts, std::vector<std::string> prompt_texts)
    : service_(service), parsed_(std::move(parsed)), head_(std::move(head)), prompts_(std::move(prompts)),
      prompt_texts_(std::move(prompt_texts)) {
    text_.stop         = parsed_.stop;
    text_.include_stop = parsed_.include_stop;
    text_.skip_special = parsed_.skip_special_tokens;
    text_.min_tokens   = parsed_.request.min_tokens;
    for (std::size_t i = 0; i < prompts_.size() * std::size_t(parsed_.request.n); i++)
        answers_.push_back({AnswerText(service.tokenizer(), text_), false, false, 0, {}, {}, {}});
    cached_.resize(prompts_.size());
    preempted_.resize(prompts_.size());
    rated_.resize(prompts_.size());
    first_run_.resize(prompts_.size());
    for (const auto& prompt : prompts_) usage_.prompt_tokens += int(prompt.size());
}

std::vector<Request> Generation::requests() const {
    std::vector<Request> requests;
    const int            context = service_.engine_options().context;
    for (const std::vector<Token>& prompt : prompts_) {
        Request r      = parsed_.request;
        r.prompt       = prompt;
        const int room = context - int(std::min<std::size_t>(prompt.size(), std::size_t(context) - 1)); // at least 1
        r.max_tokens   = std::min(parsed_.max_tokens.value_or(context), room);
        r.min_tokens   = std::min(r.min_tokens, r.max_tokens);
        requests.push_back(std::move(r));
    }
    return requests;
}

std::optional<ApiFault> Generation::fault_of(const News& news) {
    if (news.finish == FinishReason::refused) {
        failed_ = true;
        return ApiFault{503, news.message, "", "no_room"};
    }
    if (news.finish == FinishReason::failed) {
        failed_ = true;
        return ApiFault{500, news.message, "", "model_failed"};
    }
    const Answer& a = answers_[std::size_t(news.prompt) * std::size_t(parsed_.request.n) + std::size_t(news.index)];
    if (news.finish == FinishReason::cancelled && !a.finished)
        return ApiFault{503, "the server is shutting down", "", "shutting_down"};
    return std::nullopt;
}

std::optional<ApiFault> Generation::first_news(double seconds) {
    more_ = ticket_->wait(seconds, early_);
    for (const News& n : early_)
        if (auto fault = fault_of(n)) return fault;
    return std::nullopt;
}

SpelledLogprob Generation::spell(const TokenLogprob& l) const {
    return {l.token, service_.tokenizer().bytes(l.token, true), l.logprob};
}

std::vector<SpelledPosition> Generation::spell(std::span<const PositionLogprobs> positions, Answer& answer) const {
    std::vector<SpelledPosition> out;
    for (const PositionLogprobs& p : positions) {
        SpelledPosition& s = out.emplace_back();
        s.chosen           = spell(p.chosen);
        for (const TokenLogprob& t : p.top) s.top.push_back(spell(t));
        s.offset = answer.offset;
        answer.offset += count_characters(service_.tokenizer().bytes(p.chosen.token, !parsed_.skip_special_tokens));
    }
    return out;
}

// The first token of a prompt has nothing before it that could tell its probability.
std::vector<SpelledPosition> Generation::spell_prompt(std::size_t prompt) const {
    std::vector<SpelledPosition> out(1);
    const std::vector<Token>&    ids = prompts_[prompt];
    out[0].token                     = spell(TokenLogprob{ids[0], 0});
    const auto  shown                = [&](Token t) { return count_characters(service_.tokenizer().bytes(t, false)); };
    std::size_t offset               = shown(ids[0]);
    for (const PositionLogprobs& p : rated_[prompt]) {
        SpelledPosition& s = out.emplace_back();
        s.chosen           = spell(p.chosen);
        for (const TokenLogprob& t : p.top) s.top.push_back(spell(t));
        s.offset = offset;
        offset += shown(p.chosen.token);
    }
    return out;
}

// What an answer begins with: the prompt itself, if it is to be echoed.
void Generation::take_prompt(const News& news, Choice& choice) {
    const auto p      = std::size_t(news.prompt);
    Answer&    answer = answers_[p * std::size_t(parsed_.request.n) + std::size_t(news.index)];
    answer.begun      = true;
    if (head_.token_ids) choice.prompt_token_ids = prompts_[p];
    if (head_.prompt_logprobs) choice.prompt_logprobs = spell_prompt(p);
    if (!parsed_.echo) return;
    choice.text   = prompt_texts_[p];
    answer.offset = count_characters(choice.text);
    if (!parsed_.logprobs) return;
    choice.logprobs = spell_prompt(p);
    // As many best ones as were asked for, of the prompt as of the answer.
    for (SpelledPosition& s : choice.logprobs)
        s.top.resize(std::min(s.top.size(), std::size_t(std::max(parsed_.request.sampling.logprobs, 0))));
}

// What is new of one answer.
Choice Generation::take(News& news) {
    const auto p = std::size_t(news.prompt), n = std::size_t(parsed_.request.n);
    Answer&    answer = answers_[p * n + std::size_t(news.index)];
    Choice     choice;
    choice.index = int(p * n) + news.index;
    if (answer.finished) return choice;
    usage_.cached_tokens += news.cached_tokens - cached_[p];
    cached_[p]    = news.cached_tokens;
    preempted_[p] = news.n_preempted;
    first_run_[p] = news.first_run;
    if (!news.prompt_logprobs.empty()) rated_[p] = std::move(news.prompt_logprobs);
    if (!answer.begun) take_prompt(news, choice);
    std::size_t used = 0;
    while (used < news.tokens.size() && !answer.text.over()) {
        const Token token = news.tokens[used];
        const bool  last  = used + 1 == news.tokens.size() && news.finish == FinishReason::stop;
        const bool  is_stop =
            last && std::ranges::find(parsed_.request.stop_tokens, token) != parsed_.request.stop_tokens.end();
        if (is_stop) choice.stop_token = token;
        answer.text.push(token, last);
        used++;
    }
    usage_.completion_tokens += int(used);
    if (used > 0) {
        if (!answer.first) answer.first = news.times[0];
        for (std::size_t i = 0; i < used; i++) {
            if (answer.last) service_.metrics.between_tokens.observe(seconds_between(*answer.last, news.times[i]));
            answer.last = news.times[i];
        }
    }
    if (parsed_.logprobs) {
        auto fresh = spell(std::span(news.logprobs).first(std::min(used, news.logprobs.size())), answer);
        std::move(fresh.begin(), fresh.end(), std::back_inserter(choice.logprobs));
    }
    if (head_.token_ids) choice.token_ids.assign(news.tokens.begin(), news.tokens.begin() + std::ptrdiff_t(used));
    const bool at_stop_string = !answer.text.stop_string().empty();
    if (at_stop_string || news.finish != FinishReason::none) {
        answer.text.finish();
        answer.finished    = true;
        choice.stop_string = answer.text.stop_string();
        if (at_stop_string) choice.stop_token = -1;
        choice.finish_reason = at_stop_string || news.finish == FinishReason::stop ? "stop" : "length";
        answer.reason        = choice.finish_reason;
        if (at_stop_string && news.finish == FinishReason::none) ticket_->cancel(news.prompt, news.index);
    }
    choice.text += answer.text.take();
    return choice;
}

std::optional<ApiFault> Generation::whole(std::string& body) {
    std::vector<Choice> choices(answers_.size());
    std::vector<News>   news = std::move(early_);
    const auto          add = [](auto& to, auto& from) { std::move(from.begin(), from.end(), std::back_inserter(to)); };
    while (true) {
        for (News& n : news) {
            if (auto fault = fault_of(n)) return aborted_ = true, fault;
            Choice  part = take(n);
            Choice& c    = choices[std::size_t(part.index)];
            c.index      = part.index;
            c.text += part.text;
            add(c.logprobs, part.logprobs);
            add(c.token_ids, part.token_ids);
            add(c.prompt_token_ids, part.prompt_token_ids);
            add(c.prompt_logprobs, part.prompt_logprobs);
            if (part.finish_reason.empty()) continue;
            c.finish_reason = part.finish_reason;
            c.stop_string   = part.stop_string;
            c.stop_token    = part.stop_token;
        }
        if (std::ranges::all_of(answers_, [](const Answer& a) { return a.finished; })) break;
        if (!more_) return aborted_ = true, ApiFault{499, "the client has gone", "", ""};
        more_ = ticket_->wait(1, news);
    }
    for (std::size_t i = 0; i < choices.size(); i++) choices[i].index = int(i);
    body = render_response(head_, choices, usage_);
    return std::nullopt;
}

void Generation::stream(const HttpWrite& write, double ping_seconds) {
    std::vector<News> news = std::move(early_);
    bool              open = true;
    while (open) {
        std::string out;
        for (News& n : news) {
            if (auto fault = fault_of(n)) {
                aborted_ = true;
                out += event(error_body(*fault));
                write(out + event("[DONE]"));
                return;
            }
            const Answer& answer =
                answers_[std::size_t(n.prompt) * std::size_t(parsed_.request.n) + std::size_t(n.index)];
            const bool first = !answer.begun;
            if (answer.finished) continue;
            const Choice c = take(n);
            if (first && head_.chat) out += event(render_first_chunk(head_, c, usage_));
            if (!c.text.empty() || !c.logprobs.empty() || !c.token_ids.empty() || !c.finish_reason.empty())
                out += event(render_chunk(head_, c, usage_));
        }
        const bool over = std::ranges::all_of(answers_, [](const Answer& a) { return a.finished; });
        if (over && head_.include_usage) out += event(render_usage_chunk(head_, usage_));
        if (over) out += event("[DONE]");
        if (!out.empty()) open = write(out);
        if (over) return;
        if (!more_) break;
        more_ = ticket_->wait(ping_seconds, news);
        if (more_ && news.empty()) open = write(":\n\n");
    }
    aborted_ = true;
}

// What the request came to, for the metrics and the log.
void Generation::count(HttpFields& notes) {
    ServiceMetrics& m     = service_.metrics;
    int             most  = 0;
    double          first = 0, rate_tokens = 0, rate_seconds = 0;
    std::string     reason = failed_ ? "error" : aborted_ ? "abort" : "";
    const TimePoint start  = ticket_->submitted();
    for (std::size_t i = 0; i < answers_.size(); i++) {
        const Answer&     a = answers_[i];
        const std::size_t p = i / std::size_t(parsed_.request.n);
        (a.reason == "stop" ? m.stopped : a.reason == "length" ? m.cut : failed_ ? m.failed : m.aborted)++;
        if (reason.empty()) reason = a.reason;
        most = std::max(most, a.text.n_tokens());
        m.generation_tokens.observe(a.text.n_tokens());
        if (!a.first || !a.last) continue;
        if (i == 0) first = seconds_between(start, *a.first);
        m.first_token.observe(seconds_between(start, *a.first));
        m.whole.observe(seconds_between(start, *a.last));
        m.queued.observe(std::max(seconds_between(start, first_run_[p]), 0.0));
        m.prefill.observe(std::max(seconds_between(first_run_[p], *a.first), 0.0));
        m.decode.observe(seconds_between(*a.first, *a.last));
        m.inference.observe(std::max(seconds_between(first_run_[p], *a.last), 0.0));
        if (a.text.n_tokens() > 1) {
            m.per_token.observe(seconds_between(*a.first, *a.last) / (a.text.n_tokens() - 1));
            rate_tokens += a.text.n_tokens() - 1;
            rate_seconds = std::max(rate_seconds, seconds_between(*a.first, *a.last));
        }
    }
    for (std::size_t p = 0; p < prompts_.size(); p++) {
        m.prompt_tokens.observe(double(prompts_[p].size()));
        m.computed_prompt_tokens.observe(double(int(prompts_[p].size()) - cached_[p]));
    }
    m.max_generation_tokens.observe(most);
    m.n.observe(parsed_.request.n);
    if (parsed_.max_tokens) m.max_tokens.observe(*parsed_.max_tokens);
    m.prompt += std::uint64_t(usage_.prompt_tokens);
    m.cached += std::uint64_t(usage_.cached_tokens);
    m.generated += std::uint64_t(usage_.completion_tokens);
    const auto number = [](double v) {
        char text[32];
        std::snprintf(text, sizeof text, "%.4g", v);
        return std::string(text);
    };
    notes.emplace_back("prompt_tokens", cat(usage_.prompt_tokens));
    notes.emplace_back("cached_tokens", cat(usage_.cached_tokens));
    notes.emplace_back("tokens", cat(usage_.completion_tokens));
    notes.emplace_back("ttft", number(first));
    notes.emplace_back("rate", number(rate_seconds > 0 ? rate_tokens / rate_seconds : 0));
    notes.emplace_back("finish", reason);
    if (const int n = std::accumulate(preempted_.begin(), preempted_.end(), 0)) notes.emplace_back("preempted", cat(n));
}

} // namespace quire
