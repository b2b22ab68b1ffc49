// quire.tools.bench.paper.real_run: a trace on an engine, in real time; and the cost of its steps. **Owns** the engine of a run.
export module quire.tools.bench.paper.real_run;

import quire.core.base;
import quire.core.output_file;
export import quire.engine.engine;
export import quire.tools.bench.paper.cost_model;
import quire.tools.bench.paper.trace_run;

export namespace quire::paper {

// The cost of an engine's steps, from a few measured ones.
struct MeasuredCosts {
    CostModel   cost;
    std::string machine;
};

std::string           costs_file(const std::string& folder);
Result<void>          save_costs(const std::string& folder, const MeasuredCosts& costs);
Result<MeasuredCosts> load_costs(const std::string& folder);

class EngineRun {
public:
    // An engine for runs with these options (system, pool, block size, cache, preemption).
    static Result<EngineRun> load(const std::string& model, const std::string& device, const RunOptions& options);

    // Requests arrive by the clock; a chat whose rounds are kept continues with the answers that it got. Runs until every request has its
    // output or, if `drain` is false, until the last one has arrived: then the others are cancelled, and only averages over time are of
    // use: between warm_up and the end, of `saved`, too.
    Result<TraceResult> run(const Trace& trace, RunOptions options, bool drain = true);
    // A few seconds of decoding and of prompts.
    Result<MeasuredCosts> measure();
    // Seconds in which one block goes to the host pool or back, and in which a prompt of n tokens is computed.
    double         seconds_per_block() const { return engine_.stats().costs.seconds_per_block; }
    Result<double> prompt_seconds(int n);
    const Engine&  engine() const& { return engine_; }
    Engine         engine() && { return std::move(engine_); }

    explicit EngineRun(Engine engine) : engine_(std::move(engine)) {}

private:
    Result<double> decode_seconds(int n_sequences, int n_prompt);
    Result<void>   submit_random(int n_sequences, int n_prompt, int n_output);

    Engine                 engine_;
    std::vector<Output>    events_;
    std::vector<RequestId> submitted_;
    unsigned               seed_   = 0;
    std::uint32_t          n_runs_ = 0;
};

} // namespace quire::paper

module :private;

namespace quire::paper {

std::string costs_file(const std::string& folder) { return cat(folder, "/measured-costs.json"); }

Result<void> save_costs(const std::string& folder, const MeasuredCosts& costs) {
    return write_file(costs_file(folder),
                      json_dump(Json{{"machine", costs.machine}, {"cost", to_json(costs.cost)}}) + "\n");
}

Result<MeasuredCosts> load_costs(const std::string& folder) {
    const std::string path = costs_file(folder);
    std::ifstream     file(path);
    std::string       text;
    if (!file || !std::getline(file, text)) return fail(path, ": not there; `bench paper --real` makes it");
    const Result<Json> json = json_parse(text);
    if (!json || !json->is_object() || !json->contains("cost") || !json->contains("machine") ||
        !(*json)["machine"].is_string())
        return fail(path, " is not a file of measured costs");
    Result<CostModel> cost = cost_from_json((*json)["cost"]);
    if (!cost) return fail(path, ": ", cost.error().message);
    return MeasuredCosts{*cost, (*json)["machine"].get<std::string>()};
}

Result<EngineRun> EngineRun::load(const std::string& model, const std::string& device, const RunOptions& options) {
    EngineOptions o;
    o.device              = device;
    o.reservations        = reservations_of(options.system);
    o.block_size          = options.block_size;
    o.kv_blocks           = options.n_blocks();
    o.context             = options.context;
    o.max_sequences       = 256;
    o.max_batch_tokens    = options.step_tokens < 1 << 20 ? std::max(options.step_tokens, o.max_sequences) : 0;
    o.prefix_cache        = options.prefix_cache;
    o.preemption_mode     = options.preemption;
    o.swap_blocks         = options.preemption == PreemptionMode::recompute ? 0 : -1;
    o.watermark           = options.watermark;
    o.keep_preempted      = options.keep_preempted;
    Result<Engine> engine = Engine::load(model, o);
    if (!engine) return std::unexpected(engine.error());
    return EngineRun(std::move(*engine));
}

Result<TraceResult> EngineRun::run(const Trace& trace, RunOptions options, bool drain) {
    options.texts                                         = ++n_runs_; // the cache still has the texts of the last run
    const int                                  vocabulary = engine_.config().vocab_size;
    std::unordered_map<RequestId, std::size_t> index;
    if (trace.prefix > 0 && options.prefix_cache) {
        Request pin;
        for (int i = 0; i < trace.prefix; i++) pin.prompt.push_back(token_at({}, 0, trace, options, i, vocabulary));
        pin.pin                    = true;
        const Result<RequestId> id = engine_.submit(std::move(pin));
        if (!id) return std::unexpected(id.error());
        submitted_.assign(1, *id);
        while (engine_.step(events_)) {}
        events_.clear();
    }
    const EngineStats                    before  = engine_.stats();
    SharingStats                         sharing = before.memory.sharing; // until the averages begin
    std::map<std::pair<int, int>, Token> answered;                        // in each conversation, by position
    std::unordered_map<RequestId, int>   ends; // of a chat's request: the position of its next token
    TraceMeter                           meter(trace, options);
    std::size_t                          n_arrived = 0;
    std::vector<std::size_t>             over; // requests whose answers are not returned yet
    double                               cached = 0, now = 0;
    Stopwatch                            clock;
    while (meter.n_ended() < int(trace.requests.size())) {
        for (; n_arrived < trace.requests.size() && trace.requests[n_arrived].at <= now; n_arrived++) {
            const Arrival& a       = trace.requests[n_arrived];
            Request        request = request_of(a, n_arrived, trace, options, vocabulary);
            if (options.keep_rounds) {
                int position = prompt_begin(a, options);
                for (Token& token : request.prompt)
                    if (const auto said = answered.find({a.lengths.conversation, position++}); said != answered.end())
                        token = said->second;
            }
            Result<RequestId> id = engine_.submit(std::move(request));
            if (!id) return std::unexpected(id.error());
            index.emplace(*id, n_arrived);
        }
        if (!drain && now >= trace.seconds) break;
        const bool   busy  = engine_.step(events_);
        const double after = clock.seconds();
        meter.step(now, after - now, engine_.stats().running, engine_.slot_use());
        if (!drain && now < options.warm_up) sharing = engine_.stats().memory.sharing;
        now = after;
        for (const Output& o : events_) {
            if (options.keep_rounds) {
                const Arrival& a = trace.requests[index.at(o.id)];
                int&           position =
                    ends.try_emplace(o.id, prompt_begin(a, options) + prompt_length(a, options)).first->second;
                for (Token token : o.tokens) answered[{a.lengths.conversation, position++}] = token;
            }
            if (o.done) {
                if (o.finish == FinishReason::failed || o.finish == FinishReason::refused)
                    return fail_with(ErrorKind::system, o.message);
                cached += o.cached_tokens;
                over.push_back(index.at(o.id));
                index.erase(o.id);
            }
        }
        events_.clear();
        if (options.system != System::faster_transformer || engine_.stats().running == 0) {
            for (std::size_t i : over) meter.ended(i, now);
            over.clear();
        }
        if (!busy && n_arrived < trace.requests.size()) {
            const double wait = trace.requests[n_arrived].at - clock.seconds();
            if (wait > 0) std::this_thread::sleep_for(std::chrono::duration<double>(wait));
            now = clock.seconds();
        }
    }
    const EngineStats& after = engine_.stats();
    for (const auto& [id, i] : index) engine_.cancel(id);
    for (RequestId id : std::exchange(submitted_, {})) engine_.cancel(id);
    while (engine_.step(events_)) {}
    events_.clear();
    TraceResult  r    = meter.result();
    const double n    = std::max(r.n_requests, 1);
    r.gave_up         = !drain && meter.n_ended() < int(trace.requests.size());
    r.preemptions     = double(after.preemptions - before.preemptions) / n;
    r.recomputed      = double(after.memory.recomputed_tokens - before.memory.recomputed_tokens) / n;
    r.cached          = cached / n;
    SharingStats mine = after.memory.sharing;
    mine.without -= sharing.without;
    mine.with -= sharing.with;
    r.saved = mine.saved();
    return r;
}

Result<void> EngineRun::submit_random(int n_sequences, int n_prompt, int n_output) {
    std::mt19937 random(++seed_);
    const int    vocabulary = engine_.config().vocab_size;
    for (int i = 0; i < n_sequences; i++) {
        Request r;
        for (int k = 0; k < n_prompt; k++) r.prompt.push_back(Token(random() % unsigned(vocabulary)));
        r.max_tokens           = n_output;
        r.ignore_end           = true;
        r.sampling.temperature = 0;
        Result<RequestId> id   = engine_.submit(std::move(r));
        if (!id) return std::unexpected(id.error());
        submitted_.push_back(*id);
    }
    return {};
}

// One step of n sequences with about n_prompt tokens each.
Result<double> EngineRun::decode_seconds(int n_sequences, int n_prompt) {
    if (auto ok = submit_random(n_sequences, n_prompt, 1000); !ok) return std::unexpected(ok.error());
    std::set<RequestId> begun;
    while (int(begun.size()) < n_sequences && engine_.step(events_)) {
        for (const Output& e : events_) begun.insert(e.id);
        events_.clear();
    }
    constexpr int n_steps = 10;
    for (int i = 0; i < 3; i++) engine_.step(events_);
    Stopwatch watch;
    for (int i = 0; i < n_steps; i++) engine_.step(events_);
    const double seconds = watch.seconds() / n_steps;
    for (RequestId id : std::exchange(submitted_, {})) engine_.cancel(id);
    while (engine_.step(events_)) {}
    events_.clear();
    return seconds;
}

Result<double> EngineRun::prompt_seconds(int n) {
    double least = std::numeric_limits<double>::infinity();
    for (int i = 0; i < 3; i++) {
        if (auto ok = submit_random(1, n, 1); !ok) return std::unexpected(ok.error());
        Stopwatch watch;
        while (engine_.step(events_)) {}
        least = std::min(least, watch.seconds());
        submitted_.clear();
        events_.clear();
    }
    return least;
}

Result<MeasuredCosts> EngineRun::measure() {
    const int                 context = engine_.options().context;
    std::vector<MeasuredStep> steps;
    for (auto [n, prompt] :
         {std::pair(1, 64), std::pair(1, 1000), std::pair(8, 64), std::pair(8, 1000), std::pair(32, 64),
          std::pair(32, 400), std::pair(64, 64), std::pair(64, 200), std::pair(128, 32), std::pair(128, 100)}) {
        if (n * (prompt + 32) > engine_.options().kv_blocks * engine_.options().block_size || prompt >= context / 2)
            continue;
        const Result<double> seconds = decode_seconds(n, prompt);
        if (!seconds) return std::unexpected(seconds.error());
        steps.push_back({0, n, double(n) * (prompt + 10), *seconds});
    }
    for (int n : {200, 500, 1000, 2000}) {
        if (n >= context) break;
        const Result<double> seconds = prompt_seconds(n);
        if (!seconds) return std::unexpected(seconds.error());
        steps.push_back({n, 1, 0, *seconds});
    }
    return MeasuredCosts{fit(steps), engine_.describe()};
}

} // namespace quire::paper
