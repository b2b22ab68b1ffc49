// quire.tools.bench.replicas.measured: the chats and the router of `fleet` in real time, before engines of this process that share its
// processor. **Owns** the engines of a run and a thread for each.
export module quire.tools.bench.replicas.measured;

import quire.core.base;
import quire.core.thread_pool;
import quire.tools.bench.paper.real_run;
import quire.tools.bench.replicas.chats;
import quire.tools.bench.replicas.fleet;
import quire.tools.bench.replicas.router;

export namespace quire::replicas {

class MeasuredFleet {
public:
    // Fills in the model's values: options.chats.context and vocabulary. Error: the model cannot be run.
    static Result<MeasuredFleet> load(const std::string& model, const std::string& device, FleetOptions& options);

    // The cost of a step on one engine while the others are idle.
    Result<paper::CostModel> costs();
    Result<FleetResult>      run(const FleetOptions& options);

private:
    std::vector<Engine> engines_;
};

} // namespace quire::replicas

module :private;

namespace quire::replicas {

using Seconds = std::chrono::duration<double>;

// The messages between the engines' threads and the router's thread.
struct Mailbox {
    struct Answer {
        int    replica = 0;
        Output output;
    };
    std::mutex                                            mutex;
    std::condition_variable_any                           to_router, to_engines;
    std::vector<Answer>                                   answers;
    std::vector<std::pair<int, std::vector<CacheChange>>> changes;
    std::vector<char>                                     has_work; // of each engine
};

void serve(Engine& engine, int replica, Mailbox& mail, const std::stop_token& stop) {
    std::vector<Output> outputs;
    while (!stop.stop_requested()) {
        const bool       more    = engine.step(outputs);
        auto             changes = engine.take_cache_changes();
        std::unique_lock lock(mail.mutex);
        for (Output& o : outputs) mail.answers.push_back({replica, std::move(o)});
        if (!changes.empty()) mail.changes.emplace_back(replica, std::move(changes));
        if (!outputs.empty()) mail.to_router.notify_one();
        outputs.clear();
        if (more) continue;
        char& work = mail.has_work[std::size_t(replica)];
        mail.to_engines.wait(lock, stop, [&] { return work != 0; });
        work = 0;
    }
}

struct Running {
    Round              round;
    Router::Choice     choice;
    std::vector<Token> text; // the prompt, and the answer as it comes
    bool               begun = false;
};

Result<MeasuredFleet> MeasuredFleet::load(const std::string& model, const std::string& device, FleetOptions& options) {
    MeasuredFleet fleet;
    for (int i = 0; i < options.n_replicas; i++) {
        EngineOptions o;
        o.device              = device;
        o.block_size          = options.block_size;
        o.kv_blocks           = options.n_slots / options.block_size;
        o.max_sequences       = options.sequences;
        o.max_batch_tokens    = std::max(options.step_tokens, options.sequences);
        o.threads             = std::max(1, physical_cores() / options.n_replicas);
        o.swap_blocks         = 0;
        Result<Engine> engine = Engine::load(model, o);
        if (!engine) return std::unexpected(engine.error());
        engine->log_cache(true);
        options.chats.context    = std::min(options.chats.context, engine->options().context);
        options.chats.vocabulary = engine->config().vocab_size;
        fleet.engines_.push_back(std::move(*engine));
    }
    return fleet;
}

Result<paper::CostModel> MeasuredFleet::costs() {
    paper::EngineRun             run(std::move(engines_[0]));
    Result<paper::MeasuredCosts> costs = run.measure();
    engines_[0]                        = std::move(run).engine();
    if (!costs) return std::unexpected(costs.error());
    return costs->cost;
}

Result<FleetResult> MeasuredFleet::run(const FleetOptions& options) {
    ChatOptions chat_options = options.chats;
    chat_options.n_open *= options.n_replicas;
    chat_options.seed = options.seed;
    Chats      chats(chat_options);
    Router     router(options.policy, options.n_replicas, options.block_size, options.seed);
    FleetMeter meter(options.n_replicas, options.warm_up);
    Mailbox    mail;
    mail.has_work.assign(engines_.size(), 1);
    for (Engine& engine : engines_) (void)engine.take_cache_changes();
    const auto earlier = [](const Round& a, const Round& b) { return a.at > b.at; };
    std::priority_queue<Round, std::vector<Round>, decltype(earlier)> questions(earlier);
    for (const Round& round : chats.first()) questions.push(round);
    std::map<std::pair<int, RequestId>, Running>          running;
    std::unordered_map<std::uint64_t, std::vector<Token>> said; // of each conversation
    std::vector<std::jthread>                             threads;
    for (std::size_t i = 0; i < engines_.size(); i++)
        threads.emplace_back([&, i](const std::stop_token& stop) { serve(engines_[i], int(i), mail, stop); });

    const auto           start = std::chrono::steady_clock::now();
    const auto           clock = [&] { return Seconds(std::chrono::steady_clock::now() - start).count(); };
    std::optional<Error> error;
    std::stop_source     never;
    while (clock() < options.seconds && !error) {
        std::vector<Mailbox::Answer>                          answers;
        std::vector<std::pair<int, std::vector<CacheChange>>> changes;
        {
            std::unique_lock lock(mail.mutex);
            const double until = std::min(questions.empty() ? options.seconds : questions.top().at, options.seconds);
            mail.to_router.wait_until(lock, never.get_token(),
                                      start + std::chrono::duration_cast<std::chrono::nanoseconds>(Seconds(until)),
                                      [&] { return !mail.answers.empty(); });
            answers.swap(mail.answers);
            changes.swap(mail.changes);
        }
        for (const auto& [replica, of] : changes) router.events(replica, of);
        const double now = clock();
        for (Mailbox::Answer& a : answers) {
            const auto at = running.find({a.replica, a.output.id});
            if (at == running.end()) continue;
            Running& r = at->second;
            if (a.output.finish == FinishReason::failed) error = Error{ErrorKind::system, a.output.message};
            if (!r.begun && !a.output.tokens.empty()) {
                r.begun = true;
                router.first_token(r.choice);
                meter.first_token(r.round, now);
            }
            r.text.insert(r.text.end(), a.output.tokens.begin(), a.output.tokens.end());
            if (!a.output.done) continue;
            meter.ended(r.round, a.replica, a.output.cached_tokens, now);
            router.ended(r.choice);
            said[r.round.text] = std::move(r.text);
            questions.push(chats.next(r.round, now));
            running.erase(at);
        }
        for (; !questions.empty() && questions.top().at <= now; questions.pop()) {
            const Round        round = questions.top();
            std::vector<Token> text  = std::move(said[round.text]); // empty: it begins, maybe in the middle
            for (int i = int(text.size()); i < round.prompt; i++) text.push_back(chats.token_at(round.text, i));
            Request r;
            r.prompt                    = text;
            r.max_tokens                = round.output;
            r.ignore_end                = true;
            r.sampling.temperature      = 0;
            const Router::Choice choice = router.choose(text);
            // No thread takes the engine's answers before they are expected.
            std::scoped_lock        lock(mail.mutex);
            const Result<RequestId> id = engines_[std::size_t(choice.replica)].submit(std::move(r));
            if (!id) {
                error = id.error();
                break;
            }
            running.emplace(std::pair(choice.replica, *id), Running{round, choice, std::move(text), false});
            mail.has_work[std::size_t(choice.replica)] = 1;
            mail.to_engines.notify_all();
        }
    }
    for (std::jthread& t : threads) t.request_stop();
    threads.clear();
    for (const auto& [key, r] : running) engines_[std::size_t(key.first)].cancel(key.second);
    std::vector<Output> rest;
    for (Engine& engine : engines_)
        while (engine.step(rest)) rest.clear();
    if (error) return std::unexpected(*error);
    return meter.result();
}

} // namespace quire::replicas
