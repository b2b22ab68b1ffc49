// quire.serve.endpoints: what each HTTP route does: validates and tokenizes the request, passes it to the service, and turns the
// tokens into a response or a stream of events. Runs on the connection's thread. Owns only its settings.
export module quire.serve.endpoints;

import quire.core.base;
import quire.tools.viz.block_view;
import quire.text.chat_template;
import quire.model_file.config;
import quire.engine.engine;
import quire.serve.gate;
import quire.serve.http;
import quire.core.json;
import quire.core.metrics;
import quire.serve.openai;
import quire.serve.pages;
import quire.schedule.request;
import quire.serve.service;
import quire.paging.snapshot;
import quire.core.std;
import quire.text.tokenizer;

export namespace quire {

struct EndpointOptions {
    ApiLimits                limits; // models, vocabulary and context are filled in
    std::vector<std::string> aliases;
    ChatForm                 form = ChatForm::plain;
    std::string              model_file;          // its name, without the folder
    std::vector<std::string> api_keys;            // any of them opens; none: everybody may
    std::vector<std::string> cors_origins;        // of pages that may use this server; "*": all
    double                   ping_seconds = 15;   // of silence in a stream, until a comment says that it goes on
    bool                     pages        = true; // the chat and the block pool for a browser
    // Without keys, on this machine alone: browsers that come under another name than the machine's own are refused, so that no web
    // page can have a browser come here by a name that it made lead to 127.0.0.1 (DNS rebinding).
    bool local_only = false;
    // That bodies may take together while they are parsed and tokenized.
    std::size_t working_bytes = std::size_t(512) << 20;
};

class Endpoints {
public:
    Endpoints(Service& service, EndpointOptions options);

    // Adds every route. The server must not outlive this.
    void add_to(HttpServer& server);

private:
    using Method = void (Endpoints::*)(HttpExchange&);

    void add(HttpServer& server, const char* method, const std::string& path, Method handler, bool open = false);
    bool may_enter(HttpExchange& e) const;
    bool is_listed(std::string_view origin) const;
    void allow_origin(HttpExchange& e) const;
    void allow_request(HttpExchange& e) const;
    std::optional<ApiFault> foreign(const HttpRequest& r) const;
    bool                    take_room(HttpExchange& e);
    bool                    hold(HttpExchange& e, std::size_t bytes) const;
    void                    too_much(HttpExchange& e) const;
    void                    refuse(HttpExchange& e, const ApiFault& fault) const;
    void                    refuse(HttpExchange& e, const Refusal& refusal, const std::string& param) const;
    void                    generate(HttpExchange& e, bool chat);
    Parsed<std::string>     render(const Conversation& conversation) const;

    std::vector<Token>         encode(std::string_view text, bool add_special, bool parse_special = true) const;
    std::vector<Token>         encode_inside(std::string_view text) const;
    std::vector<Token>         encode_rendered(const std::string& text, bool add_special) const;
    Parsed<std::vector<Token>> encode(const Prompt& prompt, bool add_special, const std::string& param) const;
    Parsed<std::vector<Token>> encode(const TextRequest& request) const;

    void completions(HttpExchange& e) { generate(e, false); }
    void chat(HttpExchange& e) { generate(e, true); }
    void models(HttpExchange& e);
    void model(HttpExchange& e);
    void embeddings(HttpExchange& e);
    void tokenize(HttpExchange& e);
    void detokenize(HttpExchange& e);
    void tokenizer_info(HttpExchange& e);
    void apply_template(HttpExchange& e);
    void health(HttpExchange& e);
    void metrics(HttpExchange& e);
    void props(HttpExchange& e);
    void blocks(HttpExchange& e);
    void block_events(HttpExchange& e);
    void version(HttpExchange& e);
    void pin(HttpExchange& e);
    void unpin(HttpExchange& e);
    void pins(HttpExchange& e);

    Parsed<void> check_size(std::size_t bytes, int completion, const std::string& param) const;
    Parsed<void> check_length(std::size_t tokens, int completion, int width, const std::string& param) const;
    Parsed<void> check_split(std::size_t bytes, const std::string& param) const;

    Service&          service_;
    EndpointOptions   options_;
    std::int64_t      started_;
    const HttpServer* server_        = nullptr;
    std::size_t       longest_token_ = 1; // bytes
    Gate              working_;

    std::set<std::string> paths_; // that have a route for OPTIONS
};

constexpr std::string_view quire_version = "0.1";

} // namespace quire

module :private;

namespace quire {

namespace {

std::int64_t unix_seconds() {
    return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
        .count();
}

double seconds_between(TimePoint a, TimePoint b) { return std::chrono::duration<double>(b - a).count(); }

// In time that depends on nothing but the key's length.
bool same_key(std::string_view key, std::string_view given) {
    volatile unsigned difference = unsigned(key.size() != given.size());
    for (std::size_t i = 0; i < key.size(); i++)
        difference = difference | unsigned(static_cast<unsigned char>(key[i]) ^
                                           static_cast<unsigned char>(i < given.size() ? given[i] : '\0'));
    return difference == 0;
}

std::string event(std::string_view data) { return cat("data: ", data, "\n\n"); }

void answer_json(HttpExchange& e, Json body) { e.response.body = json_dump(std::move(body)); }

// -- one request for text, while it is being answered

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
    bool                                       more_ = true, aborted_ = false, failed_ = false;
    std::unique_ptr<Ticket>                    ticket_;
};

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

} // namespace

// -- routes

Endpoints::Endpoints(Service& service, EndpointOptions options)
    : service_(service), options_(std::move(options)), started_(unix_seconds()), working_(options_.working_bytes) {
    options_.limits.models     = options_.aliases;
    options_.limits.vocab_size = service.config().vocab_size;
    options_.limits.context    = service.engine_options().context;
    for (Token id = 0; id < service.tokenizer().vocab_size(); id++)
        longest_token_ = std::max(longest_token_, service.tokenizer().bytes(id, true).size());
}

void Endpoints::add(HttpServer& server, const char* method, const std::string& path, Method handler, bool open) {
    server.route(method, path, [this, handler, open, post = method == std::string_view("POST")](HttpExchange& e) {
        allow_origin(e);
        if (!open && !may_enter(e)) return;
        if (post && !take_room(e)) return;
        (this->*handler)(e);
    });
    if (options_.cors_origins.empty() || !paths_.insert(path).second) return;
    server.route("OPTIONS", path, [this](HttpExchange& e) { allow_request(e); });
}

namespace {

// The pages are open to all: what they show they ask the server for, with the user's key.
void add_pages(HttpServer& server) {
    for (const Page& page : pages())
        server.route("GET", std::string(page.path), [page](HttpExchange& e) {
            e.response.type = "text/html; charset=utf-8";
            e.response.body = page.html;
            e.response.headers.emplace_back("Content-Security-Policy", page.policy);
            e.response.headers.emplace_back("X-Content-Type-Options", "nosniff");
            e.response.headers.emplace_back("Referrer-Policy", "no-referrer");
            e.response.headers.emplace_back("Cache-Control", "no-cache");
        });
}

} // namespace

void Endpoints::add_to(HttpServer& server) {
    server_           = &server;
    using E           = Endpoints;
    const auto openai = [&](const char* method, const std::string& path, Method handler) {
        add(server, method, "/v1" + path, handler);
        add(server, method, path, handler); // as llama.cpp has them, too
    };
    openai("POST", "/completions", &E::completions);
    openai("POST", "/chat/completions", &E::chat);
    openai("POST", "/embeddings", &E::embeddings);
    openai("GET", "/models", &E::models);
    for (const std::string& alias : options_.aliases) add(server, "GET", "/v1/models/" + alias, &E::model);
    add(server, "GET", "/health", &E::health, true);
    add(server, "GET", "/v1/health", &E::health, true);
    for (const char* prefix : {"", "/v1"}) {
        add(server, "POST", cat(prefix, "/tokenize"), &E::tokenize);
        add(server, "POST", cat(prefix, "/detokenize"), &E::detokenize);
        add(server, "GET", cat(prefix, "/tokenizer_info"), &E::tokenizer_info);
    }
    add(server, "POST", "/apply-template", &E::apply_template);
    add(server, "GET", "/metrics", &E::metrics);
    add(server, "GET", "/props", &E::props);
    add(server, "GET", "/blocks", &E::blocks);
    add(server, "GET", "/blocks/events", &E::block_events);
    add(server, "GET", "/version", &E::version);
    add(server, "POST", "/pin", &E::pin);
    add(server, "POST", "/unpin", &E::unpin);
    add(server, "GET", "/pins", &E::pins);
    if (options_.pages) add_pages(server);
}

// -- who may come in, and with how much

bool Endpoints::is_listed(std::string_view origin) const {
    return std::ranges::any_of(options_.cors_origins, [&](const std::string& o) { return o == "*" || o == origin; });
}

void Endpoints::allow_origin(HttpExchange& e) const {
    if (options_.cors_origins.empty()) return;
    HttpFields& headers = e.response.headers;
    headers.emplace_back("Vary", "Origin");
    const std::string_view origin = e.request.header("origin");
    if (origin.empty() || !is_listed(origin)) return;
    headers.emplace_back("Access-Control-Allow-Origin", origin);
    headers.emplace_back("Access-Control-Expose-Headers", "X-Request-Id, Retry-After");
}

// A browser asks whether a page may send a request (preflight).
void Endpoints::allow_request(HttpExchange& e) const {
    allow_origin(e);
    const HttpRequest& r = e.request;
    if (!is_listed(r.header("origin")))
        return refuse(
            e, ApiFault{403, cat("--cors-origins does not name ", quote(r.header("origin"))), "", "forbidden_origin"});
    // What OpenAI's packages send; and whatever else is asked for, since a listed page may send anything.
    std::string names =
        "Authorization, Content-Type, X-Api-Key, X-Request-Id, Idempotency-Key, OpenAI-Organization, "
        "OpenAI-Project, OpenAI-Beta, X-Stainless-Arch, X-Stainless-Async, X-Stainless-Helper-Method, "
        "X-Stainless-Lang, X-Stainless-OS, X-Stainless-Package-Version, X-Stainless-Retry-Count, "
        "X-Stainless-Runtime, X-Stainless-Runtime-Version, X-Stainless-Timeout";
    const std::string_view asked = r.header("access-control-request-headers");
    const bool             plain = std::ranges::all_of(asked, [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
               c == ',' || c == ' ';
    });
    if (!asked.empty() && plain) names += cat(", ", asked);
    e.response.status = 204;
    e.response.headers.emplace_back("Access-Control-Allow-Methods", "GET, POST, OPTIONS");
    e.response.headers.emplace_back("Access-Control-Allow-Headers", names);
    e.response.headers.emplace_back("Access-Control-Max-Age", "600");
    if (r.header("access-control-request-private-network") == "true")
        e.response.headers.emplace_back("Access-Control-Allow-Private-Network", "true");
}

namespace {

std::string lower(std::string_view text) {
    std::string out(text);
    for (char& c : out)
        if (c >= 'A' && c <= 'Z') c = char(c - 'A' + 'a');
    return out;
}

// A Host header, port and all, that names the machine itself; none, as HTTP/1.0 may have it.
bool is_local_name(std::string_view host) {
    if (host.starts_with('[')) host = host.substr(0, host.find(']') + 1);
    else host = host.substr(0, host.find(':'));
    return host.empty() || host == "localhost" || host.ends_with(".localhost") || host == "[::1]" ||
           (host.starts_with("127.") && host.find_first_not_of("0123456789.") == std::string_view::npos);
}

// Whether an Origin ("https://name", "http://name:8080") is that of pages under this Host.
bool is_origin_of(const std::string& origin, std::string host) {
    const bool tls = origin.starts_with("https://");
    if (!tls && !origin.starts_with("http://")) return false;
    std::string name = origin.substr(tls ? 8 : 7);
    for (std::string* text : {&name, &host})
        if (const char* usual = tls ? ":443" : ":80"; text->ends_with(usual))
            text->resize(text->size() - std::strlen(usual));
    return name == host;
}

} // namespace

// Without keys nothing tells a user's own requests from those that a web page has his browser send: why this one may be
// such a page's. Pages can send a POST without asking first when its body is text/plain, a form, or has no type.
std::optional<ApiFault> Endpoints::foreign(const HttpRequest& r) const {
    const std::string origin = lower(r.header("origin")), host = lower(r.header("host"));
    const bool        listed  = !options_.cors_origins.empty() && is_listed(r.header("origin"));
    const bool        browser = !origin.empty() || !r.header("sec-fetch-site").empty() ||
                         !r.header("accept-language").empty() || r.header("user-agent").starts_with("Mozilla/");
    const auto of_listed = [&](const std::string& o) { return o == "*" || is_origin_of(lower(o), host); };
    if (options_.local_only && r.remote != "unix" && browser && !is_local_name(host) &&
        !std::ranges::any_of(options_.cors_origins, of_listed))
        return ApiFault{403,
                        cat("this server is for its own machine, not for ", quote(host),
                            "; --cors-origins that names it, or --api-key, opens it to others"),
                        "", "forbidden_host"};
    if (listed) return std::nullopt;
    // Proxies tell the name under which browsers come; pages cannot tell it without asking first.
    const std::string_view named = r.header("x-forwarded-host");
    const std::string      front = lower(named.substr(0, named.find(',')));
    if (!origin.empty() && !is_origin_of(origin, host) && !(!front.empty() && is_origin_of(origin, front)))
        return ApiFault{403,
                        cat("a page of ", quote(origin), " may not use this server unless --cors-origins names it"), "",
                        "forbidden_origin"};
    const std::string_view site = r.header("sec-fetch-site");
    const bool             link = r.header("sec-fetch-mode") == "navigate" && r.header("sec-fetch-dest") == "document";
    if (origin.empty() && (site == "cross-site" || site == "same-site") && !(link && r.method == "GET"))
        return ApiFault{403, "a page of another origin may not use this server; --cors-origins names those that may",
                        "", "forbidden_origin"};
    if (r.method != "POST") return std::nullopt;
    const std::string type = lower(r.header("content-type")), kind = type.substr(0, type.find_first_of("; "));
    if (kind == "application/json" || kind.ends_with("+json")) return std::nullopt;
    // As curl -d and Python's urllib send it when told nothing; a browser's own says where it comes from.
    if (!browser && (kind.empty() || kind == "application/x-www-form-urlencoded")) return std::nullopt;
    return ApiFault{415, cat("the Content-Type is ", quote(type), "; it has to be application/json"), "", ""};
}

bool Endpoints::may_enter(HttpExchange& e) const {
    if (options_.api_keys.empty()) {
        const std::optional<ApiFault> fault = foreign(e.request);
        if (fault) refuse(e, *fault);
        return !fault;
    }
    std::string_view given = e.request.header("x-api-key");
    if (const std::string_view bearer = e.request.header("authorization");
        bearer.size() >= 7 && (bearer.starts_with("Bearer ") || bearer.starts_with("bearer ")))
        given = bearer.substr(7);
    bool known = false;
    for (const std::string& key : options_.api_keys) known |= same_key(key, given); // all of them, always
    if (known) return true;
    e.response.headers.emplace_back("WWW-Authenticate", "Bearer");
    refuse(e, ApiFault{401, "a valid API key is needed: Authorization: Bearer KEY", "", "invalid_api_key"});
    return false;
}

// Waits until a body can be parsed and tokenized beside the others. It takes 20 times its bytes at most (JSON values, copies,
// tokens), and the tokenizer 100 times those of the part that it is at, up to a MiB.
bool Endpoints::take_room(HttpExchange& e) {
    constexpr double  patience = 30; // seconds
    const std::size_t bytes    = e.request.body.size();
    const std::size_t room     = bytes * 20 + std::min(bytes, std::size_t(1) << 20) * 100;
    auto              pass     = working_.enter(room, patience, [&] { return e.peer->gone(); });
    if (pass) {
        e.held = std::make_shared<Gate::Pass>(std::move(*pass));
        return true;
    }
    if (e.peer->gone()) refuse(e, ApiFault{499, "the client has gone", "", ""});
    else too_much(e);
    return false;
}

void Endpoints::too_much(HttpExchange& e) const {
    e.response.headers.emplace_back("Retry-After", "1");
    refuse(e, ApiFault{503, "too many large requests at once", "", "no_room"});
}

// Counts what a request takes while it is answered; false: too much, and refused.
bool Endpoints::hold(HttpExchange& e, std::size_t bytes) const {
    if (e.peer->hold(bytes)) return true;
    too_much(e);
    return false;
}

void Endpoints::refuse(HttpExchange& e, const ApiFault& fault) const {
    e.response.status = fault.status;
    e.response.body   = error_body(fault);
    e.notes.emplace_back("error", fault.message);
}

void Endpoints::refuse(HttpExchange& e, const Refusal& refusal, const std::string& param) const {
    ApiFault fault{400, refusal.error.message, param, ""};
    switch (refusal.why) {
        case Refused::invalid: break;
        case Refused::full:
            fault = {429, refusal.error.message, "", "queue_full"};
            e.response.headers.emplace_back("Retry-After", "1");
            break;
        case Refused::draining: fault = {503, refusal.error.message, "", "shutting_down"}; break;
        case Refused::broken: fault = {500, refusal.error.message, "", ""}; break;
    }
    refuse(e, fault);
}

// -- text and tokens

std::vector<Token> Endpoints::encode(std::string_view text, bool add_special, bool parse_special) const {
    return service_.tokenizer().encode(text, {.add_special = add_special, .parse_special = parse_special});
}

static std::size_t text_bytes(const Prompt& prompt) {
    std::size_t bytes = 0;
    for (const PromptPart& part : prompt)
        if (const auto* text = std::get_if<std::string>(&part)) bytes += text->size();
    return bytes;
}

// Tokens of a text in the middle of another: behind an anchor, since some vocabularies put a space before a beginning.
std::vector<Token> Endpoints::encode_inside(std::string_view text) const {
    const std::string        anchor = "\n";
    const std::vector<Token> before = encode(anchor, false);
    std::vector<Token>       all    = encode(cat(anchor, text), false);
    if (all.size() < before.size() || !std::equal(before.begin(), before.end(), all.begin()))
        return encode(text, false);
    all.erase(all.begin(), all.begin() + std::ptrdiff_t(before.size()));
    return all;
}

// A text that cannot fit, however it is split, is not worth the time to split it. `completion`: tokens asked for.
Parsed<void> Endpoints::check_size(std::size_t bytes, int completion, const std::string& param) const {
    const int  context = options_.limits.context;
    const auto tokens  = std::int64_t(bytes / longest_token_);
    if (tokens <= context) return {};
    return std::unexpected(context_overflow(context, tokens, completion, param, true));
}

// The prompt, and one token where any is to come, have room in the context and in the pool; what goes beyond is cut.
// `width`: of the answers, each has a block of its own.
Parsed<void> Endpoints::check_length(std::size_t tokens, int completion, int width, const std::string& param) const {
    const EngineOptions& o    = service_.engine_options();
    const auto           pool = std::int64_t(std::max(o.kv_blocks - width + 1, 0)) * o.block_size;
    const std::int64_t   room = std::min<std::int64_t>(o.context, pool);
    if (std::int64_t(tokens) + (completion > 0 ? 1 : 0) <= room) return {};
    ApiFault fault = context_overflow(room, std::int64_t(tokens), completion, param);
    if (room < o.context)
        fault.message += cat(" (The context is ", o.context, ", but the KV pool has ", o.kv_blocks, " blocks of ",
                             o.block_size, " tokens.)");
    return std::unexpected(std::move(fault));
}

// A text that is split to be looked at, or to be shortened, may be longer than the context, but not without end.
Parsed<void> Endpoints::check_split(std::size_t bytes, const std::string& param) const {
    const std::size_t most = std::max(std::size_t(1) << 20, std::size_t(options_.limits.context) * 16);
    if (bytes <= most) return {};
    return std::unexpected(ApiFault{400,
                                    cat(param, " has ", bytes, " bytes; for a context of ", options_.limits.context,
                                        " tokens texts of ", most, " are split"),
                                    param, "context_length_exceeded"});
}

// A template may have written BOS itself; it must be there once.
std::vector<Token> Endpoints::encode_rendered(const std::string& text, bool add_special) const {
    const Tokenizer&   t   = service_.tokenizer();
    std::vector<Token> ids = encode(text, add_special);
    if (t.adds_bos() && t.bos() >= 0 && (ids.empty() || ids[0] != t.bos())) ids.insert(ids.begin(), t.bos());
    return ids;
}

Parsed<std::vector<Token>> Endpoints::encode(const Prompt& prompt, bool add_special, const std::string& param) const {
    std::vector<Token> ids;
    for (std::size_t i = 0; i < prompt.size(); i++) {
        if (const auto* tokens = std::get_if<std::vector<Token>>(&prompt[i])) {
            ids.insert(ids.end(), tokens->begin(), tokens->end());
            continue;
        }
        const auto&              text  = std::get<std::string>(prompt[i]);
        const std::vector<Token> piece = i == 0 ? encode(text, add_special) : encode_inside(text);
        ids.insert(ids.end(), piece.begin(), piece.end());
    }
    if (ids.empty()) return std::unexpected(ApiFault{400, cat(param, " has no tokens in it"), param, ""});
    return ids;
}

Parsed<std::string> Endpoints::render(const Conversation& conversation) const {
    const Tokenizer& t = service_.tokenizer();
    ChatVariables    v;
    if (t.bos() >= 0) v.bos_token = t.piece(t.bos());
    if (t.eos() >= 0) v.eos_token = t.piece(t.eos());
    std::vector<ChatMessage> messages = conversation.messages;
    std::string              begun; // of the answer
    v.add_generation_prompt = conversation.add_generation_prompt || conversation.continue_final;
    if (conversation.continue_final) {
        begun = std::move(messages.back().content);
        messages.pop_back();
    }
    if (!chat_form_has_system(options_.form) && messages.size() > 1 && messages[0].role == "system") {
        // Where a form has no place for it, it stands before the first message.
        messages[1].content = cat(messages[0].content, "\n\n", messages[1].content);
        messages.erase(messages.begin());
    }
    Result<std::string> text = chat_render(options_.form, messages, v);
    if (!text) return std::unexpected(ApiFault{400, text.error().message, "messages", ""});
    return *text + begun;
}

Parsed<std::vector<Token>> Endpoints::encode(const TextRequest& request) const {
    if (!request.conversation) {
        const std::string_view text = request.text ? std::string_view(*request.text) : std::string_view();
        if (auto ok = check_split(text.size(), "prompt"); !ok) return std::unexpected(ok.error());
        return encode(text, request.add_special, request.parse_special);
    }
    Parsed<std::string> text = render(*request.conversation);
    if (!text) return std::unexpected(text.error());
    if (auto ok = check_split(text->size(), "messages"); !ok) return std::unexpected(ok.error());
    return encode_rendered(*text, request.add_special);
}

// -- completions and chats

void Endpoints::generate(HttpExchange& e, bool chat) {
    Parsed<GenerationRequest> parsed = chat ? parse_chat_request(e.request.body, options_.limits)
                                            : parse_completion_request(e.request.body, options_.limits);
    e.request.body                   = {};
    if (!parsed) return refuse(e, parsed.error());
    GenerationRequest& r = *parsed;
    for (const std::string& name : r.unknown) e.notes.emplace_back("unknown_field", name);
    const std::string param      = chat ? "messages" : "prompt";
    const int         completion = r.max_tokens.value_or(1); // tokens asked for
    const auto        check      = [&](std::size_t bytes) {
        return r.truncate_prompt == 0 ? check_size(bytes, completion, param) : check_split(bytes, param);
    };

    std::vector<std::vector<Token>> prompts;
    std::vector<std::string>        texts;
    if (chat) {
        Parsed<std::string> text = render(r.conversation);
        if (!text) return refuse(e, text.error());
        if (auto ok = check(text->size()); !ok) return refuse(e, ok.error());
        prompts.push_back(encode_rendered(*text, r.add_special_tokens));
        texts.emplace_back();
    }
    for (const Prompt& prompt : r.prompts) {
        if (auto ok = check(text_bytes(prompt)); !ok) return refuse(e, ok.error());
        Parsed<std::vector<Token>> ids = encode(prompt, r.add_special_tokens, param);
        if (!ids) return refuse(e, ids.error());
        const bool plain = prompt.size() == 1 && std::holds_alternative<std::string>(prompt[0]);
        texts.push_back(!r.echo ? "" : plain ? std::get<std::string>(prompt[0]) : service_.tokenizer().decode(*ids));
        prompts.push_back(std::move(*ids));
    }
    if (r.truncate_prompt != 0) {
        const int  most = options_.limits.context - (r.max_tokens == 0 ? 0 : 1);
        const auto keep = std::size_t(r.truncate_prompt > 0 ? r.truncate_prompt : most);
        for (std::size_t i = 0; i < prompts.size(); i++)
            if (prompts[i].size() > keep) {
                prompts[i].erase(prompts[i].begin(), prompts[i].end() - std::ptrdiff_t(keep));
                if (r.echo) texts[i] = service_.tokenizer().decode(prompts[i]);
            }
    }

    std::size_t held = 0; // 16 bytes a token: here and in the engine, as ids and in tables
    for (std::size_t i = 0; i < prompts.size(); i++) held += prompts[i].size() * 16 + texts[i].size();
    if (!hold(e, held)) return;

    Request& q = r.request;
    if (const int most = service_.engine_options().max_sequences; q.width() > most)
        return refuse(e, ApiFault{400, cat("the request needs ", q.width(), " sequences at once; ", most, " can run"),
                                  q.beam_width > q.n ? "beam_width"
                                  : q.best_of > q.n  ? "best_of"
                                                     : "n",
                                  ""});
    if (!r.has_seed) q.sampling.seed = std::random_device{}() + (std::uint64_t(std::random_device{}()) << 32);
    for (const std::string& word : r.bad_words)
        for (const std::string& variant : {word, " " + word}) {
            std::vector<Token> ids = encode_inside(variant);
            if (!ids.empty()) q.sampling.bad_words.push_back(std::move(ids));
        }
    for (const auto& [text, bias] : r.text_bias)
        for (Token id : encode_inside(text)) q.sampling.logit_bias.emplace_back(id, bias);
    if (completion > 0 && q.beam_width == 0 && !service_.engine().can_draw(q))
        return refuse(e, ApiFault{400, "allowed_token_ids, logit_bias, bad_words and min_tokens leave no token to draw",
                                  !q.sampling.allowed_tokens.empty() ? "allowed_token_ids"
                                  : !q.sampling.logit_bias.empty()   ? "logit_bias"
                                                                     : "bad_words",
                                  ""});
    if (!r.cache_prompt) q.cache_salt = cat(q.cache_salt, '\0', e.request.id, '\0', q.sampling.seed);
    q.prompt_logprobs = r.prompt_logprobs;
    if (r.echo && r.logprobs) q.prompt_logprobs = std::max(q.prompt_logprobs, q.sampling.logprobs);

    ResponseHead head;
    head.chat             = chat;
    head.id               = cat(chat ? "chatcmpl-" : "cmpl-", r.id.empty() ? e.request.id : r.id);
    head.model            = options_.aliases[0];
    head.created          = unix_seconds();
    head.logprobs         = r.logprobs;
    head.token_ids        = r.return_token_ids;
    head.prompt_logprobs  = r.prompt_logprobs >= 0;
    head.tokens_as_ids    = r.tokens_as_ids;
    head.include_usage    = r.include_usage;
    head.continuous_usage = r.continuous_usage;

    const bool stream = r.stream;
    auto       generation =
        std::make_shared<Generation>(service_, std::move(r), std::move(head), std::move(prompts), std::move(texts));
    std::vector<Request> requests = generation->requests();
    for (const Request& request : requests)
        if (auto ok = check_length(request.prompt.size(), completion, request.width(), param); !ok)
            return refuse(e, ok.error());
    auto ticket = service_.submit(std::move(requests));
    if (!ticket) return refuse(e, ticket.error(), param);
    e.peer->when_gone((*ticket)->when_gone());
    generation->begin(std::move(*ticket));
    e.held.reset(); // what comes now takes long and little
    if (!stream) {
        std::optional<ApiFault> fault = generation->whole(e.response.body);
        generation->count(e.notes);
        if (fault) refuse(e, *fault);
        return;
    }
    // As long as nothing has come, a fault has a status of its own.
    if (auto fault = generation->first_news(options_.ping_seconds)) {
        generation->count(e.notes);
        return refuse(e, *fault);
    }
    e.response.type = "text/event-stream";
    e.response.headers.emplace_back("Cache-Control", "no-cache");
    e.response.headers.emplace_back("X-Accel-Buffering", "no");
    e.response.stream = [this, generation, &e](const HttpWrite& write) {
        try {
            generation->stream(write, options_.ping_seconds);
        } catch (const std::bad_alloc&) {
            generation->abort();
            write(
                "data: {\"error\":{\"message\":\"there is no memory for this request "
                "now\",\"type\":\"unavailable_error\","
                "\"param\":null,\"code\":null}}\n\ndata: [DONE]\n\n");
        }
        generation->count(e.notes);
    };
}

// -- the other endpoints

void Endpoints::models(HttpExchange& e) {
    const ModelConfig& c    = service_.config();
    Json               data = Json::array();
    for (const std::string& alias : options_.aliases)
        data.push_back({{"id", alias},
                        {"object", "model"},
                        {"created", started_},
                        {"owned_by", "quire"},
                        {"root", options_.aliases[0]},
                        {"parent", nullptr},
                        {"max_model_len", options_.limits.context},
                        {"permission", Json::array()},
                        {"meta",
                         {{"architecture", c.architecture_name},
                          {"n_vocab", c.vocab_size},
                          {"n_ctx", options_.limits.context},
                          {"n_ctx_train", c.context_length},
                          {"n_embd", c.hidden_size},
                          {"n_layer", c.n_layers}}}});
    if (e.request.path.ends_with("/models")) answer_json(e, Json{{"object", "list"}, {"data", std::move(data)}});
}

void Endpoints::model(HttpExchange& e) {
    const std::string id = e.request.path.substr(std::string_view("/v1/models/").size());
    answer_json(e, Json{{"id", id},
                        {"object", "model"},
                        {"created", started_},
                        {"owned_by", "quire"},
                        {"root", options_.aliases[0]},
                        {"parent", nullptr},
                        {"max_model_len", options_.limits.context}});
}

void Endpoints::embeddings(HttpExchange& e) {
    Parsed<EmbeddingRequest> parsed = parse_embedding_request(e.request.body, options_.limits);
    e.request.body                  = {};
    if (!parsed) return refuse(e, parsed.error());
    const int hidden = service_.config().hidden_size;
    if (const int wanted = parsed->dimensions.value_or(hidden); wanted != hidden)
        return refuse(e, ApiFault{400, cat("dimensions is ", wanted, "; the embeddings of this model have ", hidden),
                                  "dimensions", ""});
    std::vector<Request> requests;
    int                  n_tokens = 0;
    for (const Prompt& input : parsed->inputs) {
        if (auto ok = check_size(text_bytes(input), 0, "input"); !ok) return refuse(e, ok.error());
        Parsed<std::vector<Token>> ids = encode(input, parsed->add_special_tokens, "input");
        if (!ids) return refuse(e, ids.error());
        n_tokens += int(ids->size());
        Request& q   = requests.emplace_back();
        q.prompt     = std::move(*ids);
        q.embed      = true;
        q.cache_salt = parsed->cache_salt;
        if (auto ok = check_length(q.prompt.size(), 0, 1, "input"); !ok) return refuse(e, ok.error());
    }
    if (!hold(e, std::size_t(n_tokens) * 16 + requests.size() * std::size_t(hidden) * sizeof(float))) return;
    std::vector<std::vector<float>> vectors(requests.size());
    auto                            ticket = service_.submit(std::move(requests));
    if (!ticket) return refuse(e, ticket.error(), "input");
    e.peer->when_gone((*ticket)->when_gone());
    e.held.reset();
    std::vector<News> news;
    while ((*ticket)->wait(1, news))
        for (News& n : news) {
            if (n.finish == FinishReason::failed) return refuse(e, ApiFault{500, n.message, "", "model_failed"});
            if (n.finish != FinishReason::stop)
                return refuse(e, ApiFault{503, n.message.empty() ? "the server is shutting down" : n.message, "", ""});
            vectors[std::size_t(n.prompt)] = std::move(n.embedding);
        }
    if ((*ticket)->gone()) return refuse(e, ApiFault{499, "the client has gone", "", ""});
    service_.metrics.prompt += std::uint64_t(n_tokens);
    e.notes.emplace_back("prompt_tokens", cat(n_tokens));
    e.response.body = render_embeddings(options_.aliases[0], vectors, parsed->base64, n_tokens);
}

void Endpoints::tokenize(HttpExchange& e) {
    Parsed<TextRequest> parsed = parse_text_request(e.request.body, options_.limits);
    if (!parsed) return refuse(e, parsed.error());
    Parsed<std::vector<Token>> ids = encode(*parsed);
    if (!ids) return refuse(e, ids.error());
    // Written as it comes: as JSON values the tokens of a long text would take many times their room.
    const auto list = [&](std::string_view name, const auto& write) {
        std::string& out = e.response.body;
        out += cat(",\"", name, "\":[");
        for (std::size_t i = 0; i < ids->size(); i++) {
            if (i > 0) out += ',';
            write(out, (*ids)[i]);
        }
        out += ']';
    };
    e.response.body = cat("{\"count\":", ids->size(), ",\"max_model_len\":", options_.limits.context);
    if (parsed->with_pieces)
        list("tokens", [&](std::string& out, Token id) {
            const std::string piece = service_.tokenizer().bytes(id, true);
            Detokenizer       whole(service_.tokenizer(), false, true);
            const std::string text  = whole.push(id);
            Json              shown = text == piece ? Json(piece) : Json::array();
            if (text != piece)
                for (char c : piece) shown.push_back(int(static_cast<unsigned char>(c)));
            out += json_dump(Json{{"id", id}, {"piece", std::move(shown)}});
        });
    else list("tokens", [](std::string& out, Token id) { out += cat(id); });
    if (parsed->token_strings)
        list("token_strs",
             [&](std::string& out, Token id) { out += json_dump(Json(std::string(service_.tokenizer().piece(id)))); });
    e.response.body += '}';
}

void Endpoints::detokenize(HttpExchange& e) {
    Parsed<std::vector<Token>> ids = parse_detokenize_request(e.request.body, options_.limits);
    if (!ids) return refuse(e, ids.error());
    const auto most = std::max(std::size_t(1) << 16, std::size_t(options_.limits.context));
    if (ids->size() > most)
        return refuse(e, ApiFault{400, cat("tokens has ", ids->size(), " ids; ", most, " are turned into text at once"),
                                  "tokens", "context_length_exceeded"});
    const std::string text = json_dump(Json(service_.tokenizer().decode(*ids, true)));
    e.response.body        = cat("{\"prompt\":", text, ",\"content\":", text, '}');
}

void Endpoints::apply_template(HttpExchange& e) {
    Parsed<TextRequest> parsed = parse_text_request(e.request.body, options_.limits);
    if (!parsed) return refuse(e, parsed.error());
    const auto& conversation = parsed->conversation;
    if (!conversation) return refuse(e, ApiFault{400, "messages is missing", "messages", ""});
    Parsed<std::string> text = render(*conversation);
    if (!text) return refuse(e, text.error());
    answer_json(e, Json{{"prompt", *text}});
}

void Endpoints::health(HttpExchange& e) {
    const bool well   = service_.healthy() && !service_.draining();
    e.response.status = well ? 200 : 503;
    answer_json(
        e, well
               ? Json{{"status", "ok"}}
               : Json::parse(error_body(ApiFault{
                     503, service_.draining() ? "the server is shutting down" : "the engine takes no steps", "", ""})));
}

void Endpoints::props(HttpExchange& e) {
    const EngineOptions& o = service_.engine_options();
    const Tokenizer&     t = service_.tokenizer();
    const ApiLimits&     l = options_.limits;
    answer_json(e, Json{{"default_generation_settings",
                         {{"n_ctx", o.context},
                          {"params",
                           {{"temperature", l.temperature},
                            {"top_p", l.top_p},
                            {"top_k", l.top_k},
                            {"min_p", l.min_p},
                            {"n_predict", l.default_tokens}}}}},
                        {"total_slots", o.max_sequences},
                        {"model_alias", options_.aliases[0]},
                        {"model_path", options_.model_file},
                        {"chat_template", service_.engine().chat_template()},
                        {"chat_form", chat_form_name(options_.form)},
                        {"modalities", {{"vision", false}, {"audio", false}}},
                        {"build_info", cat("quire ", quire_version)},
                        {"bos_token", t.bos() >= 0 ? Json(std::string(t.piece(t.bos()))) : Json()},
                        {"eos_token", t.eos() >= 0 ? Json(std::string(t.piece(t.eos()))) : Json()},
                        {"engine",
                         {{"device", o.device},
                          {"description", service_.engine().describe()},
                          {"block_size", o.block_size},
                          {"kv_blocks", o.kv_blocks},
                          {"swap_blocks", o.swap_blocks},
                          {"prefix_cache", o.prefix_cache}}}});
}

// What a client needs to tokenise by /tokenize, as vLLM has it.
void Endpoints::tokenizer_info(HttpExchange& e) {
    const Tokenizer& t     = service_.tokenizer();
    const auto       piece = [&](Token id) { return id >= 0 ? Json(std::string(t.piece(id))) : Json(); };
    answer_json(e, Json{{"tokenizer_class", "quire"},
                        {"bos_token", piece(t.bos())},
                        {"eos_token", piece(t.eos())},
                        {"chat_template", service_.engine().chat_template()},
                        {"model_max_length", service_.engine_options().context},
                        {"vocab_size", t.vocab_size()}});
}

void Endpoints::version(HttpExchange& e) { answer_json(e, Json{{"version", quire_version}}); }

void Endpoints::blocks(HttpExchange& e) {
    const std::shared_ptr<const Snapshot> s = service_.snapshot();
    if (!s) return refuse(e, ApiFault{503, "the engine takes no steps", "", ""});
    answer_json(e, to_json(*s));
}

// With ?changes=1 an event after the first holds only the blocks that changed: of a large pool they are few.
void Endpoints::block_events(HttpExchange& e) {
    const bool changes = std::ranges::find(e.request.query, std::pair<std::string, std::string>("changes", "1")) !=
                         e.request.query.end();
    if (!service_.listen()) return refuse(e, ApiFault{503, "too many listen to the block events", "", ""});
    const std::shared_ptr<void> listening(nullptr, [this](void*) { service_.unlisten(); });
    e.response.type = "text/event-stream";
    e.response.headers.emplace_back("Cache-Control", "no-cache");
    e.response.stream = [this, &e, listening, changes](const HttpWrite& write) {
        std::shared_ptr<const Snapshot> before;
        std::uint64_t                   serial = 0;
        double                          silent = 0;
        for (bool open = true; open && !e.peer->gone() && !service_.draining();) {
            const std::shared_ptr<const Snapshot> s = service_.next_snapshot(serial, 0.5);
            silent                                  = s ? 0 : silent + 0.5;
            if (s) open = write(event(json_dump(before ? changes_to_json(*before, *s) : to_json(*s))));
            else if (silent >= options_.ping_seconds) open = write(":\n\n"), silent = 0;
            if (s && changes) before = s;
        }
    };
}

void Endpoints::pin(HttpExchange& e) {
    Parsed<TextRequest> parsed = parse_text_request(e.request.body, options_.limits);
    if (!parsed) return refuse(e, parsed.error());
    if (auto& conversation = parsed->conversation) conversation->add_generation_prompt = false;
    Parsed<std::vector<Token>> ids = encode(*parsed);
    if (!ids) return refuse(e, ids.error());
    const std::string param = parsed->conversation ? "messages" : "prompt";
    if (auto ok = check_length(ids->size(), 0, 1, param); !ok) return refuse(e, ok.error());
    if (!hold(e, ids->size() * 16)) return;
    parsed->text = {};
    e.held.reset();
    const auto pin = service_.pin(std::move(*ids), parsed->cache_salt);
    if (!pin) return refuse(e, pin.error(), param);
    answer_json(e, Json{{"id", pin->id}, {"object", "pin"}, {"tokens", pin->n_tokens}, {"blocks", pin->n_blocks}});
}

void Endpoints::unpin(HttpExchange& e) {
    Parsed<std::string> id = parse_id_request(e.request.body, options_.limits);
    if (!id) return refuse(e, id.error());
    if (!service_.unpin(*id)) return refuse(e, ApiFault{404, cat("there is no pin ", quote(*id)), "id", ""});
    answer_json(e, Json{{"id", *id}, {"object", "pin"}, {"deleted", true}});
}

void Endpoints::pins(HttpExchange& e) {
    Json data = Json::array();
    for (const Pin& p : service_.pins())
        data.push_back({{"id", p.id}, {"object", "pin"}, {"tokens", p.n_tokens}, {"blocks", p.n_blocks}});
    answer_json(e, Json{{"object", "list"}, {"data", std::move(data)}});
}

void Endpoints::metrics(HttpExchange& e) {
    const ServiceMetrics& m = service_.metrics;
    const EngineStats     s = service_.stats();
    const EngineOptions&  o = service_.engine_options();
    MetricsText           t({{"model_name", options_.aliases[0]}, {"engine", "0"}});
    const double          block_bytes = double(service_.engine().block_bytes());
    const auto            d           = [](auto v) { return double(v); };

    t.gauge("vllm:num_requests_running", "Requests in the running batch.", s.running);
    t.gauge("vllm:num_requests_waiting", "Requests that wait to run.",
            std::max(service_.in_flight() - s.running, s.waiting));
    t.gauge("vllm:num_requests_waiting_by_reason", "Requests that wait, by reason.", s.swapped,
            {{"reason", "swapped"}});
    t.gauge("vllm:num_requests_waiting_by_reason", "",
            std::max(std::max(service_.in_flight() - s.running, s.waiting) - s.swapped, 0), {{"reason", "capacity"}});
    t.gauge("vllm:kv_cache_usage_perc", "KV blocks in use, 1 is all of them.", d(s.blocks_used) / o.kv_blocks);
    t.counter("vllm:prefix_cache_queries_total", "Prompt tokens looked for in the prefix cache.",
              d(s.cached_tokens + s.prefill_tokens));
    t.counter("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", d(s.cached_tokens));
    t.counter("vllm:num_preemptions_total", "Times a request had to give up its blocks.", d(s.preemptions));
    t.counter("vllm:prompt_tokens_total", "Prompt tokens of the requests that are over.", d(m.prompt.load()));
    t.counter("vllm:prompt_tokens_cached_total", "Of these found in the cache.", d(m.cached.load()));
    t.counter("vllm:generation_tokens_total", "Tokens generated.", d(m.generated.load()));
    for (const auto& [reason, n] : {std::pair{"stop", m.stopped.load()}, std::pair{"length", m.cut.load()},
                                    std::pair{"abort", m.aborted.load()}, std::pair{"error", m.failed.load()}})
        t.counter("vllm:request_success_total", "Answers that are over, by reason.", d(n),
                  {{"finished_reason", reason}});
    t.histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", m.first_token);
    t.histogram("vllm:inter_token_latency_seconds", "Between two tokens of an answer.", m.between_tokens);
    t.histogram("vllm:request_time_per_output_token_seconds", "Mean of a request, without the first token.",
                m.per_token);
    t.histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", m.whole);
    t.histogram("vllm:request_queue_time_seconds", "Waiting to run.", m.queued);
    t.histogram("vllm:request_inference_time_seconds", "Running.", m.inference);
    t.histogram("vllm:request_prefill_time_seconds", "From the first step to the first token.", m.prefill);
    t.histogram("vllm:request_decode_time_seconds", "From the first token to the last.", m.decode);
    t.histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", m.prompt_tokens);
    t.histogram("vllm:request_generation_tokens", "Tokens of an answer.", m.generation_tokens);
    t.histogram("vllm:request_max_num_generation_tokens", "Tokens of the longest answer of a request.",
                m.max_generation_tokens);
    t.histogram("vllm:request_params_n", "The n of requests.", m.n);
    t.histogram("vllm:request_params_max_tokens", "The max_tokens of requests.", m.max_tokens);
    t.histogram("vllm:request_prefill_kv_computed_tokens", "Prompt tokens that were not in the cache.",
                m.computed_prompt_tokens);
    t.histogram("vllm:iteration_tokens_total", "Tokens of one step.", m.step_tokens);

    if (const std::shared_ptr<const Snapshot> snapshot = service_.snapshot(1)) {
        const MemoryTotals totals = quire::totals(*snapshot);
        t.gauge("quire:internal_waste_ratio", "Slots of used blocks that hold nothing, of all of them.", totals.waste);
        t.gauge("quire:shared_saving_ratio", "Blocks saved by sharing at this moment, of the blocks without it.",
                totals.saved);
        t.gauge("quire:kv_blocks_shared", "Blocks in more than one table.", totals.shared);
    }
    t.gauge("quire:kv_blocks", "Blocks of the pool.", o.kv_blocks);
    t.gauge("quire:kv_blocks_used", "Blocks that somebody holds.", s.blocks_used);
    t.gauge("quire:kv_blocks_cached", "Blocks that nobody holds and that can be found again.", s.blocks_cached);
    t.gauge("quire:kv_blocks_free", "Blocks that nobody holds and that hold nothing.",
            o.kv_blocks - s.blocks_used - s.blocks_cached);
    t.gauge("quire:kv_blocks_pinned", "Blocks of pinned prefixes.", s.blocks_pinned);
    t.gauge("quire:swap_blocks", "Blocks of the swap pool.", o.swap_blocks);
    t.gauge("quire:swap_blocks_used", "Blocks swapped out.", s.swap_used);
    t.gauge("quire:sharing_saved_ratio", "Blocks saved by sharing since the start, of the blocks without it.",
            s.memory.sharing.saved());
    t.counter("quire:copy_on_write_copies_total", "Blocks copied because one of their owners wrote.",
              d(s.memory.copied_blocks));
    t.counter("quire:forks_total", "Sequences that began as another's fork.", d(s.memory.forks));
    t.counter("quire:swaps_out_total", "Requests swapped out.", d(s.memory.swaps_out));
    t.counter("quire:swaps_in_total", "Requests swapped in.", d(s.memory.swaps_in));
    t.counter("quire:swap_out_bytes_total", "Bytes swapped out.", d(s.swapped_out) * block_bytes);
    t.counter("quire:swap_in_bytes_total", "Bytes swapped in.", d(s.swapped_in) * block_bytes);
    t.counter("quire:recomputations_total", "Requests that came back by computing their KV again.",
              d(s.memory.recomputations));
    t.counter("quire:recomputed_tokens_total", "Tokens whose KV was given up for that.", d(s.memory.recomputed_tokens));
    t.counter("quire:displacements_total", "Requests displaced by others of higher priority.",
              d(s.memory.priority_preemptions));
    t.counter("quire:steps_total", "Steps of the engine.", d(s.steps));
    t.counter("quire:requests_refused_total", "Requests that did not enter the queue, by reason.",
              d(m.refused_full.load()), {{"reason", "queue_full"}});
    t.counter("quire:requests_refused_total", "", d(m.refused_draining.load()), {{"reason", "shutting_down"}});
    t.counter("quire:requests_refused_total", "", d(m.refused_invalid.load()), {{"reason", "invalid"}});
    t.gauge("quire:http_connections", "Open connections.", server_->n_connections());
    t.gauge("quire:http_threads", "Threads that answer requests.", server_->n_threads());
    t.gauge("vllm:cache_config_info", "The settings of the KV cache.", 1,
            {{"block_size", cat(o.block_size)},
             {"cache_dtype", o.kv_type == KvType::f32 ? "float32" : "float16"},
             {"enable_prefix_caching", o.prefix_cache ? "True" : "False"},
             {"gpu_memory_utilization", cat(o.gpu_memory_utilization)},
             {"num_cpu_blocks", cat(o.swap_blocks)},
             {"num_gpu_blocks", cat(o.kv_blocks)},
             {"sliding_window", "None"}});
    e.response.type = "text/plain; version=0.0.4; charset=utf-8";
    e.response.body = t.take() + process_metrics();
}

} // namespace quire
