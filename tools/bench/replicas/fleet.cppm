// quire.tools.bench.replicas.fleet: many replicas behind a router, in simulated time: each has quire's own scheduler, block tables and
// prefix cache, and a cost model in the place of its device. Owns nothing between runs.
export module quire.tools.bench.replicas.fleet;

import quire.core.base;
import quire.paging.block_hash;
import quire.schedule.scheduler;
import quire.tools.bench.paper.cost_model;
import quire.tools.bench.replicas.chats;
import quire.tools.bench.replicas.router;

export namespace quire::replicas {

struct FleetOptions {
    Policy        policy      = Policy::kv_aware;
    int           n_replicas  = 8;
    int           n_slots     = 120'000; // of each KV pool, in tokens
    int           block_size  = 16;
    int           step_tokens = 2048;
    int           sequences   = 256;          // running at once on a replica
    double        seconds = 60, warm_up = 20; // rounds asked before the warm-up's end do not count
    ChatOptions   chats;                      // n_open: for each replica
    std::uint32_t seed = 1;
};

struct FleetResult {
    int    n_rounds  = 0;
    double hit       = 0;                     // of the prompts' tokens, found in a replica's cache
    double balance   = 0;                     // the busiest replica's computed tokens over the mean
    double ttft_mean = 0, ttft_p99 = 0;       // seconds
    double latency_mean = 0, latency_p99 = 0; // seconds a token of the answer, from the question to its end
};

// The measurements of a run.
class FleetMeter {
public:
    FleetMeter(int n_replicas, double warm_up) : warm_up_(warm_up), computed_(std::size_t(n_replicas), 0.0) {}
    void        first_token(const Round& round, double now);
    void        ended(const Round& round, int replica, int cached, double now);
    FleetResult result() const;

private:
    double              warm_up_, prompts_ = 0, cached_ = 0;
    std::vector<double> computed_, ttft_, latency_;
};

FleetResult simulate_fleet(const FleetOptions& options, const paper::CostModel& cost);

} // namespace quire::replicas

module :private;

namespace quire::replicas {

void FleetMeter::first_token(const Round& round, double now) {
    if (round.at >= warm_up_) ttft_.push_back(now - round.at);
}

void FleetMeter::ended(const Round& round, int replica, int cached, double now) {
    if (round.at < warm_up_) return;
    prompts_ += round.prompt;
    cached_ += cached;
    computed_[std::size_t(replica)] += round.prompt - cached + round.output;
    latency_.push_back((now - round.at) / round.output);
}

FleetResult FleetMeter::result() const {
    const auto mean = [](const std::vector<double>& v) {
        return v.empty() ? 0.0 : std::accumulate(v.begin(), v.end(), 0.0) / double(v.size());
    };
    const auto p99 = [](std::vector<double> v) {
        if (v.empty()) return 0.0;
        const auto at = v.begin() + std::ptrdiff_t(double(v.size() - 1) * 0.99);
        std::nth_element(v.begin(), at, v.end());
        return *at;
    };
    const double all = mean(computed_);
    return {int(latency_.size()),
            prompts_ > 0 ? cached_ / prompts_ : 0,
            all > 0 ? *std::ranges::max_element(computed_) / all : 0,
            mean(ttft_),
            p99(ttft_),
            mean(latency_),
            p99(latency_)};
}

class Fleet {
public:
    Fleet(const FleetOptions& options, const paper::CostModel& cost)
        : options_(options), cost_(cost), chats_(all_chats(options)),
          router_(options.policy, options.n_replicas, options.block_size, options.seed),
          meter_(options.n_replicas, options.warm_up) {
        for (int i = 0; i < options.n_replicas; i++)
            replicas_.push_back(std::make_unique<Replica>(scheduler_options(options)));
    }

    FleetResult run() {
        for (const Round& round : chats_.first()) add(round.at, -1, round);
        while (!events_.empty() && events_.top().at < options_.seconds) {
            const Event e = events_.top();
            events_.pop();
            if (e.replica < 0) ask(e.round);
            else end_step(e.replica, e.at);
        }
        return meter_.result();
    }


private:
    struct Replica {
        explicit Replica(const SchedulerOptions& options) : scheduler(options) { scheduler.log_cache(true); }
        Scheduler                                  scheduler;
        StepPlan                                   plan;
        std::span<const Scheduled>                 items;        // of the step under way
        bool                                       busy = false; // a step is under way
        std::vector<std::pair<RequestId, Request>> inbox;        // came since it began
    };
    struct Running {
        Round          round;
        Router::Choice choice;
    };
    struct Event { // a step's end, or (replica < 0) a question
        double        at      = 0;
        std::uint64_t number  = 0; // events of one time come in their order
        int           replica = -1;
        Round         round;
        bool          operator>(const Event& o) const { return std::tie(at, number) > std::tie(o.at, o.number); }
    };

    static ChatOptions all_chats(const FleetOptions& o) {
        ChatOptions chats = o.chats;
        chats.n_open *= o.n_replicas;
        chats.seed = o.seed;
        return chats;
    }
    static SchedulerOptions scheduler_options(const FleetOptions& o) {
        SchedulerOptions s;
        s.n_blocks         = o.n_slots / o.block_size;
        s.block_size       = o.block_size;
        s.context          = o.chats.context;
        s.max_batch_tokens = std::max(o.step_tokens, o.sequences);
        s.max_sequences    = o.sequences;
        s.max_logit_rows   = o.sequences;
        return s;
    }
    void add(double at, int replica, const Round& round) { events_.push({at, n_events_++, replica, round}); }
    void ask(const Round& round) {
        Request r;
        for (int i = 0; i < round.prompt; i++) r.prompt.push_back(chats_.token_at(round.text, i));
        r.max_tokens                = round.output;
        r.ignore_end                = true;
        r.sampling.temperature      = 0;
        const Router::Choice choice = router_.choose(r.prompt);
        const RequestId      id     = ++last_id_;
        Replica&             to     = *replicas_[std::size_t(choice.replica)];
        running_.emplace(id, Running{round, choice});
        to.inbox.emplace_back(id, std::move(r));
        if (!to.busy) begin_step(choice.replica, round.at);
    }

    void begin_step(int replica, double now) {
        Replica& r = *replicas_[std::size_t(replica)];
        for (auto& [id, request] : r.inbox) r.scheduler.add(id, std::move(request));
        r.inbox.clear();
        r.busy = !r.scheduler.idle();
        if (!r.busy) return;
        r.items = r.scheduler.schedule(r.plan);
        add(now + cost_.seconds(r.plan, options_.block_size, true), replica, {});
    }

    void end_step(int replica, double now) {
        Replica& r = *replicas_[std::size_t(replica)];
        r.scheduler.commit();
        std::vector<RequestId> over;
        for (const Scheduled& item : r.items) {
            if (!item.samples) continue;
            SequenceGroup& group = *item.group;
            Sequence&      s     = *item.sequence;
            Running&       mine  = running_.at(group.id);
            if (!group.prompt_done) {
                group.prompt_done = true;
                router_.first_token(mine.choice);
                meter_.first_token(mine.round, now);
            }
            r.scheduler.append(s, chats_.token_at(mine.round.text, int(s.tokens.size())));
            if (r.scheduler.ending(group, s, false) == FinishReason::none) continue;
            meter_.ended(mine.round, replica, group.n_cached, now);
            r.scheduler.free(group, s, FinishReason::length);
            over.push_back(group.id);
        }
        router_.events(replica, r.scheduler.take_cache_changes());
        for (RequestId id : over) {
            r.scheduler.remove(id);
            const Running mine = running_.at(id);
            running_.erase(id);
            router_.ended(mine.choice);
            const Round next = chats_.next(mine.round, now);
            add(next.at, -1, next);
        }
        check(r.scheduler.take_ended().empty(), "a chat that its replica cannot hold");
        begin_step(replica, now);
    }

    const FleetOptions&                                                 options_;
    const paper::CostModel&                                             cost_;
    Chats                                                               chats_;
    Router                                                              router_;
    FleetMeter                                                          meter_;
    std::vector<std::unique_ptr<Replica>>                               replicas_;
    std::unordered_map<RequestId, Running>                              running_;
    std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events_;
    std::uint64_t                                                       n_events_ = 0;
    RequestId                                                           last_id_  = 0;
};

FleetResult simulate_fleet(const FleetOptions& options, const paper::CostModel& cost) {
    return std::make_unique<Fleet>(options, cost)->run();
}

} // namespace quire::replicas
