// quire.serve.api.generation: one request for text while it is answered: outputs → a response, or a stream of events, as its API's
// renderer writes them. **Owns** the request's handle, the text of its answers, and the renderer. On one thread.
export module quire.serve.api.generation;

import quire.core.base;
import quire.core.metrics;
import quire.serve.api.answer;
import quire.serve.api.generation_request;
import quire.serve.http.exchange;
import quire.serve.service;
import quire.text.calls.tool_form;
import quire.text.tokens.stop_strings;

export namespace quire {

class Generation {
public:
    // `echoes`: the text of each prompt, where the response repeats it.
    // `format`: the parts into which a chat's answers are split.
    Generation(Service& service, GenerationRequest parsed, ResponseHead head, std::vector<std::string> echoes,
               const AnswerFormat& format, std::unique_ptr<AnswerRenderer> renderer);

    // The requests for the engine; the prompts move into them. The answers of prompt p are n p .. n p + n - 1.
    std::vector<Request> requests(std::vector<std::vector<Token>> prompts);
    void                 begin(std::unique_ptr<RequestHandle> handle) { handle_ = std::move(handle); }
    void                 abort() { aborted_ = true; }
    // `hear` gets the tokens of the first answer as they come.
    void listen(std::function<void(std::span<const Token>)> hear) { hear_ = std::move(hear); }

    // Waits for the first output, at most so long. An error: the engine refused the request.
    std::optional<ApiError> wait_for_first(double seconds);
    // Waits for the end and renders the response. `count` is told the bytes that the answers hold so far; false: they are too many. An error:
    // they were, the engine gave up, or the client did (499).
    std::optional<ApiError> respond(std::string& body, const std::function<bool(std::size_t)>& count);
    // Tokens of an answer that a stream renders at once, where they have log-probabilities.
    static constexpr std::size_t slice = 64;
    // Writes each piece of output as an event as soon as it comes.
    void stream(const HttpWrite& write, double ping_seconds);
    // The last event of a stream for which there is no memory.
    std::string_view out_of_memory() const { return renderer_->out_of_memory(); }
    // Adds the request to the metrics, and its line of the log to `notes`. Once, at the end.
    void record(HttpFields& notes);

private:
    struct PromptState {
        int   n_tokens = 0, cached = 0, loaded = 0, from_disk = 0, preempted = 0, drafted = 0, accepted = 0;
        Token first = -1;
        std::vector<Token>            tokens; // only where the response returns them
        std::string                   echo;
        std::vector<PositionLogprobs> logprobs;      // come with the first answer
        bool                          begun = false; // progress of it was told
        TimePoint                     first_run{};
    };
    struct Answer {
        AnswerText               text;
        AnswerParser             parser;
        int                      n_calls = 0, n_reasoning = 0; // tokens of reasoning
        bool                     begun = false, finished = false;
        std::size_t              offset = 0; // characters so far, for text_offset
        std::optional<TimePoint> first, last;
        std::string              reason;
        // Of tokens whose text, if they have any, is still to come; see AnswerRenderer::logprobs_of_text().
        std::vector<SpelledPosition> unsaid;
    };

    Answer&                      answer_of(const Output& output);
    PromptState&                 prompt_of(const Output& output) { return prompts_[handle_->prompt_of(output)]; }
    Choice                       add(Output& output);
    void                         add_prompt(const Output& output, Choice& choice);
    static void                  say(Choice& choice, Answer& answer, std::vector<AnswerPart> parts);
    SpelledLogprob               spell(const TokenLogprob& logprob) const;
    std::vector<SpelledPosition> spell(std::span<const PositionLogprobs> positions, Answer& answer) const;
    std::vector<SpelledPosition> spell_prompt(const PromptState& prompt) const;
    Timings                      timings(const PromptState& prompt, const Answer& answer) const;
    std::optional<ApiError>      error_of(const Output& output);
    bool                         finished() const;

    Service&                                    service_;
    GenerationRequest                           parsed_;
    ResponseHead                                head_;
    std::vector<PromptState>                    prompts_;
    TextOptions                                 text_;
    std::vector<Answer>                         answers_;
    Usage                                       usage_;
    std::vector<Output>                         first_; // what wait_for_first() got
    bool                                        more_ = true, aborted_ = false, failed_ = false;
    std::unique_ptr<AnswerRenderer>             renderer_;
    std::unique_ptr<RequestHandle>              handle_;
    std::function<void(std::span<const Token>)> hear_; // see listen()
};

} // namespace quire

module :private;

namespace quire {

double seconds_between(TimePoint a, TimePoint b) { return std::chrono::duration<double>(b - a).count(); }

Generation::Generation(Service& service, GenerationRequest parsed, ResponseHead head, std::vector<std::string> echoes,
                       const AnswerFormat& format, std::unique_ptr<AnswerRenderer> renderer)
    : service_(service), parsed_(std::move(parsed)), head_(std::move(head)), renderer_(std::move(renderer)) {
    text_.stop         = parsed_.stop;
    text_.include_stop = parsed_.include_stop;
    text_.skip_special = parsed_.skip_special_tokens;
    // The marks of calls and of reasoning may be control tokens.
    if (format.form == ToolForm::mistral || format.form == ToolForm::deepseek || format.form == ToolForm::harmony ||
        (parsed_.constraint && parsed_.constraint->spec.answer && !parsed_.constraint->spec.answer->controls.empty()))
        text_.skip_special = false;
    text_.min_tokens = parsed_.request.min_tokens;
    for (std::string& echo : echoes) prompts_.emplace_back().echo = std::move(echo);
    for (std::size_t i = 0; i < prompts_.size() * std::size_t(parsed_.request.n); i++)
        answers_.push_back(
            {AnswerText(service.tokenizer(), text_), AnswerParser(format), 0, 0, false, false, 0, {}, {}, {}, {}});
}

std::vector<Request> Generation::requests(std::vector<std::vector<Token>> prompts) {
    std::vector<Request> requests;
    for (std::size_t p = 0; p < prompts.size(); p++) {
        PromptState& state = prompts_[p];
        state.n_tokens     = int(prompts[p].size());
        if (!prompts[p].empty()) state.first = prompts[p][0]; // the engine refuses an empty one
        if (head_.token_ids) state.tokens = prompts[p];
        usage_.prompt_tokens += state.n_tokens;
        Request& r = requests.emplace_back(parsed_.request);
        r.prompt   = std::move(prompts[p]);
        limit_tokens(parsed_, service_.engine_options().context, r);
    }
    return requests;
}

Generation::Answer& Generation::answer_of(const Output& output) {
    return answers_[handle_->prompt_of(output) * std::size_t(parsed_.request.n) + std::size_t(output.index)];
}

bool Generation::finished() const {
    return std::ranges::all_of(answers_, [](const Answer& a) { return a.finished; });
}

std::optional<ApiError> Generation::error_of(const Output& output) {
    if (output.finish == FinishReason::refused) {
        failed_ = true;
        return ApiError{503, output.message, "", "no_room"};
    }
    if (output.finish == FinishReason::unmet) {
        failed_                 = true;
        const std::string param = parsed_.constraint ? parsed_.constraint->param : "";
        return ApiError{400, param.empty() ? output.message : cat(param, ": ", output.message), param, "unmet"};
    }
    if (output.finish == FinishReason::failed) {
        failed_ = true;
        return service_.failure().empty() ? model_failed(output.message) : engine_failed(output.message);
    }
    if (output.finish == FinishReason::cancelled && !answer_of(output).finished)
        return ApiError{503, "the server is shutting down", "", "shutting_down"};
    return std::nullopt;
}

std::optional<ApiError> Generation::wait_for_first(double seconds) {
    more_ = handle_->wait(seconds, first_);
    for (const Output& output : first_) {
        if (auto error = error_of(output)) return error;
        if (!output.tokens.empty()) break; // the answer begins, whatever comes behind
    }
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

// The first token of a prompt has no probability: nothing stands before it.
std::vector<SpelledPosition> Generation::spell_prompt(const PromptState& prompt) const {
    std::vector<SpelledPosition> out(1);
    out[0].token       = spell(TokenLogprob{prompt.first, 0});
    const auto  shown  = [&](Token t) { return count_characters(service_.tokenizer().bytes(t, false)); };
    std::size_t offset = shown(prompt.first);
    for (const PositionLogprobs& p : prompt.logprobs) {
        SpelledPosition& s = out.emplace_back();
        s.chosen           = spell(p.chosen);
        for (const TokenLogprob& t : p.top) s.top.push_back(spell(t));
        s.offset = offset;
        offset += shown(p.chosen.token);
    }
    return out;
}

// Of a prompt that is being computed.
Timings timings_of(const PromptProgress& p) {
    Timings t;
    t.prompt_tokens = p.computed;
    t.cached_tokens = p.cached;
    t.prompt_ms     = p.ms;
    return t;
}

Timings Generation::timings(const PromptState& prompt, const Answer& answer) const {
    Timings t;
    t.prompt_tokens    = prompt.n_tokens;
    t.cached_tokens    = prompt.cached;
    t.generated_tokens = answer.text.n_tokens();
    t.draft_tokens     = prompt.drafted;
    t.accepted_tokens  = prompt.accepted;
    if (!answer.first || !answer.last) return t;
    t.prompt_ms    = std::max(seconds_between(prompt.first_run, *answer.first), 0.0) * 1e3;
    t.generated_ms = seconds_between(*answer.first, *answer.last) * 1e3;
    return t;
}

// The beginning of an answer: the prompt itself, if it is to be echoed.
void Generation::add_prompt(const Output& output, Choice& choice) {
    const PromptState& prompt = prompt_of(output);
    Answer&            answer = answer_of(output);
    answer.begun              = true;
    if (head_.token_ids) choice.prompt_token_ids = prompt.tokens;
    if (head_.prompt_logprobs) choice.prompt_logprobs = spell_prompt(prompt);
    if (!parsed_.echo) return;
    append(choice.parts, AnswerPart::Kind::content, prompt.echo);
    answer.offset = count_characters(prompt.echo);
    if (!parsed_.logprobs) return;
    choice.logprobs = spell_prompt(prompt);
    // The prompt gets as many alternatives per token as the answer.
    for (SpelledPosition& s : choice.logprobs)
        s.top.resize(std::min(s.top.size(), std::size_t(std::max(parsed_.request.sampling.logprobs, 0))));
}

// Adds parts to the piece; if they have text, also the log-probabilities of its tokens. Those of marks, reasoning and calls go.
void Generation::say(Choice& choice, Answer& answer, std::vector<AnswerPart> parts) {
    const auto text = std::ranges::find(parts, AnswerPart::Kind::content, &AnswerPart::kind);
    if (text != parts.end()) {
        const auto blank = [](char c) { return std::string_view(" \t\r\n").contains(c); };
        auto       from  = answer.unsaid.begin();
        // White space in front of the text that is none of it.
        while (from != answer.unsaid.end() && !blank(text->text[0]) && std::ranges::all_of(from->chosen->bytes, blank))
            ++from;
        std::move(from, answer.unsaid.end(), std::back_inserter(choice.logprobs));
    }
    if (!parts.empty()) answer.unsaid.clear();
    append(choice.parts, std::move(parts));
}

// Adds the output to its answer. Returns what the client has not got yet of it.
Choice Generation::add(Output& output) {
    const bool   of_text = parsed_.logprobs && renderer_->logprobs_of_text();
    PromptState& prompt  = prompt_of(output);
    Answer&      answer  = answer_of(output);
    Choice       choice;
    choice.index         = int(&answer - answers_.data());
    choice.prompt_tokens = prompt.n_tokens;
    if (answer.finished) return choice;
    usage_.cached_tokens += output.cached_tokens - prompt.cached;
    usage_.loaded_tokens += output.loaded_tokens - prompt.loaded;
    prompt.cached = output.cached_tokens;
    prompt.loaded = output.loaded_tokens;
    usage_.disk_tokens += output.disk_tokens - prompt.from_disk;
    prompt.from_disk = output.disk_tokens;
    prompt.preempted = output.n_preempted;
    usage_.draft_tokens += output.draft_tokens - prompt.drafted;
    usage_.accepted_tokens += output.accepted_tokens - prompt.accepted;
    prompt.drafted   = output.draft_tokens;
    prompt.accepted  = output.accepted_tokens;
    prompt.first_run = output.first_run;
    if (output.computed_tokens > 0)
        choice.progress = {prompt.n_tokens, prompt.cached, output.computed_tokens,
                           std::max(seconds_between(output.first_run, std::chrono::steady_clock::now()), 0.0) * 1e3};
    // Only progress so far: the answer has not begun.
    if (output.tokens.empty() && output.finish == FinishReason::none && output.prompt_logprobs.empty()) {
        if (choice.progress && head_.timings_per_token) choice.timings = timings_of(*choice.progress);
        return choice;
    }
    choice.first = !answer.begun;
    if (!output.prompt_logprobs.empty()) prompt.logprobs = std::move(output.prompt_logprobs);
    if (!answer.begun) add_prompt(output, choice);
    choice.first_call = answer.n_calls;
    std::size_t used  = 0;
    while (used < output.tokens.size() && !answer.text.over()) {
        const Token token = output.tokens[used];
        const bool  last  = used + 1 == output.tokens.size() && output.finish == FinishReason::stop;
        const bool  is_stop =
            last && std::ranges::find(parsed_.request.stop_tokens, token) != parsed_.request.stop_tokens.end();
        if (is_stop) choice.stop_token = token;
        answer.text.push(token, last);
        if (of_text && used < output.logprobs.size())
            answer.unsaid.push_back(std::move(spell(std::span(output.logprobs).subspan(used, 1), answer)[0]));
        used++;
        if (!head_.chat) continue;
        const bool reasoned = answer.parser.in_reasoning();
        say(choice, answer, answer.parser.push(answer.text.take()));
        if (reasoned || answer.parser.in_reasoning()) answer.unsaid.clear(); // of the reasoning or of its marks
        if (!answer.parser.in_reasoning()) continue;
        usage_.reasoning_tokens += answer.text.n_tokens() - answer.n_reasoning;
        answer.n_reasoning = answer.text.n_tokens();
    }
    usage_.completion_tokens += int(used);
    if (hear_ && choice.index == 0) hear_(std::span(output.tokens).first(used));
    if (used > 0) {
        if (!answer.first) answer.first = output.times[0];
        for (std::size_t i = 0; i < used; i++) {
            if (answer.last) service_.metrics.between_tokens.observe(seconds_between(*answer.last, output.times[i]));
            answer.last = output.times[i];
        }
    }
    if (parsed_.logprobs && !of_text) {
        auto fresh = spell(std::span(output.logprobs).first(std::min(used, output.logprobs.size())), answer);
        std::move(fresh.begin(), fresh.end(), std::back_inserter(choice.logprobs));
    }
    if (head_.token_ids) {
        choice.token_ids = std::move(output.tokens);
        choice.token_ids.resize(used);
    }
    const bool at_stop_string = !answer.text.stop_string().empty();
    if (at_stop_string || output.finish != FinishReason::none) {
        answer.text.finish();
        answer.finished    = true;
        choice.stop_string = answer.text.stop_string();
        if (at_stop_string) choice.stop_token = -1;
        choice.finish_reason = at_stop_string || output.finish == FinishReason::stop ? "stop" : "length";
        answer.reason        = choice.finish_reason;
        if (at_stop_string && output.finish == FinishReason::none) handle_->cancel(output.id, output.index);
    }
    choice.n_tokens = answer.text.n_tokens();
    if (answer.finished || head_.timings_per_token) choice.timings = timings(prompt, answer);
    if (!head_.chat) {
        append(choice.parts, AnswerPart::Kind::content, answer.text.take());
        return choice;
    }
    std::vector<AnswerPart> parts = answer.parser.push(answer.text.take());
    if (answer.finished) {
        std::vector<AnswerPart> rest = answer.parser.finish();
        std::move(rest.begin(), rest.end(), std::back_inserter(parts));
        // Where a call is required, there is no text: this is the beginning of a mark.
        if (parsed_.constraint && parsed_.constraint->spec.answer && parsed_.constraint->spec.answer->required)
            std::erase_if(parts, [](const AnswerPart& part) { return part.kind == AnswerPart::Kind::content; });
    }
    say(choice, answer, std::move(parts));
    answer.n_calls += int(std::ranges::count_if(
        choice.parts, [](const AnswerPart& p) { return p.kind == AnswerPart::Kind::call && !p.call.more; }));
    if (answer.n_calls > 0 && choice.finish_reason == "stop" && !answer.parser.cut())
        choice.finish_reason = "tool_calls";
    return choice;
}

std::optional<ApiError> Generation::respond(std::string& body, const std::function<bool(std::size_t)>& count) {
    std::vector<Choice> choices(answers_.size());
    std::size_t         held    = 0;
    std::vector<Output> outputs = std::move(first_);
    for (std::size_t i = 0; i < choices.size(); i++) choices[i].index = int(i);
    while (true) {
        for (Output& output : outputs) {
            if (auto error = error_of(output)) return aborted_ = true, error;
            Choice  piece = add(output);
            Choice& whole = choices[std::size_t(piece.index)];
            held += held_bytes(piece);
            append(whole, std::move(piece));
            if (!count(held)) return aborted_ = true, answers_too_large();
        }
        if (finished()) break;
        if (!more_) return aborted_ = true, ApiError{499, "the client has gone", "", ""};
        more_ = handle_->wait(1, outputs);
    }
    body = renderer_->response(std::move(choices), usage_);
    return std::nullopt;
}

// Cuts an output of many tokens into several, so that their log-probabilities are not rendered all at once. The last one has the end.
std::vector<Output> in_slices(std::vector<Output> outputs, std::size_t most) {
    std::vector<Output> out;
    for (Output& o : outputs) {
        while (o.tokens.size() > most && o.tokens.size() == o.logprobs.size()) {
            Output part;
            part.prompt_logprobs = std::exchange(o.prompt_logprobs, {});
            const auto take      = [&](auto& to, auto& from) {
                const auto end = from.begin() + std::ptrdiff_t(std::min(most, from.size()));
                std::move(from.begin(), end, std::back_inserter(to));
                from.erase(from.begin(), end);
            };
            take(part.tokens, o.tokens);
            take(part.logprobs, o.logprobs);
            take(part.times, o.times);
            part.id              = o.id;
            part.index           = o.index;
            part.prompt_tokens   = o.prompt_tokens;
            part.cached_tokens   = o.cached_tokens;
            part.loaded_tokens   = o.loaded_tokens;
            part.disk_tokens     = o.disk_tokens;
            part.computed_tokens = std::exchange(o.computed_tokens, 0);
            part.draft_tokens    = o.draft_tokens;
            part.accepted_tokens = o.accepted_tokens;
            part.n_preempted     = o.n_preempted;
            part.first_run       = o.first_run;
            out.push_back(std::move(part));
        }
        out.push_back(std::move(o));
    }
    return out;
}

void Generation::stream(const HttpWrite& write, double ping_seconds) {
    constexpr std::size_t most_text = std::size_t(1) << 20; // that is rendered before it is written
    std::vector<Output>   outputs   = in_slices(std::move(first_), slice);
    bool                  open = true, begun = false;
    while (open) {
        std::string out;
        const auto  begin = [&] {
            if (!std::exchange(begun, true)) out += renderer_->begin(usage_);
        };
        for (Output& output : outputs) {
            if (auto error = error_of(output)) {
                aborted_ = true;
                begin();
                write(out + renderer_->failure(*error));
                return;
            }
            if (answer_of(output).finished) continue;
            Choice c = add(output);
            begin();
            // The first report says what the cache had, as in llama.cpp, before the first one of a step.
            if (c.progress && !std::exchange(prompt_of(output).begun, true)) {
                Choice cached;
                cached.index         = c.index;
                cached.prompt_tokens = c.prompt_tokens;
                cached.progress      = {c.progress->total, c.progress->cached, c.progress->cached, 0};
                if (head_.timings_per_token) cached.timings = timings_of(*cached.progress);
                out += renderer_->piece(std::move(cached), usage_);
            }
            out += renderer_->piece(std::move(c), usage_);
            if (out.size() < most_text) continue;
            open = write(std::exchange(out, {}));
            if (!open) break;
        }
        if (!open) break;
        const bool over = finished();
        if (over) out += renderer_->end(usage_);
        if (!out.empty()) open = write(out);
        if (over) return;
        if (!more_) break;
        more_   = handle_->wait(ping_seconds, outputs);
        outputs = in_slices(std::move(outputs), slice);
        if (!more_ || !outputs.empty()) continue;
        out.clear();
        begin();
        open = write(out + renderer_->ping());
    }
    aborted_ = true;
}

void Generation::record(HttpFields& notes) {
    ServiceMetrics& m     = service_.metrics;
    int             most  = 0;
    double          first = 0, rate_tokens = 0, rate_seconds = 0;
    std::string     reason = failed_ ? "error" : aborted_ ? "abort" : "";
    const TimePoint start  = handle_->submitted();
    for (std::size_t i = 0; i < answers_.size(); i++) {
        const Answer&      a      = answers_[i];
        const PromptState& prompt = prompts_[i / std::size_t(parsed_.request.n)];
        (a.reason == "stop" ? m.stopped : a.reason == "length" ? m.cut : failed_ ? m.failed : m.aborted)++;
        if (reason.empty()) reason = a.reason;
        most = std::max(most, a.text.n_tokens());
        m.generation_tokens.observe(a.text.n_tokens());
        if (!a.first || !a.last) continue;
        if (i == 0) first = seconds_between(start, *a.first);
        m.first_token.observe(seconds_between(start, *a.first));
        m.whole.observe(seconds_between(start, *a.last));
        m.queued.observe(std::max(seconds_between(start, prompt.first_run), 0.0));
        m.prefill.observe(std::max(seconds_between(prompt.first_run, *a.first), 0.0));
        m.decode.observe(seconds_between(*a.first, *a.last));
        m.inference.observe(std::max(seconds_between(prompt.first_run, *a.last), 0.0));
        if (a.text.n_tokens() > 1) {
            m.per_token.observe(seconds_between(*a.first, *a.last) / (a.text.n_tokens() - 1));
            rate_tokens += a.text.n_tokens() - 1;
            rate_seconds = std::max(rate_seconds, seconds_between(*a.first, *a.last));
        }
    }
    int preempted = 0, longest_prompt = 0;
    for (const PromptState& prompt : prompts_) {
        m.prompt_tokens.observe(prompt.n_tokens);
        m.computed_prompt_tokens.observe(prompt.n_tokens - prompt.cached);
        preempted += prompt.preempted;
        longest_prompt = std::max(longest_prompt, prompt.n_tokens);
    }
    m.max_generation_tokens.observe(most);
    for (int seen = m.longest, length = longest_prompt + most;
         length > seen && !m.longest.compare_exchange_weak(seen, length);) {}
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
    if (preempted > 0) notes.emplace_back("preempted", cat(preempted));
}

} // namespace quire
