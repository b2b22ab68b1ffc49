// quire.tools.bench.paper.simulation: a trace on quire's own scheduler, block tables and decoding methods, with a cost model in the
// place of the device: the model gives the time of a step. **Owns** the scheduler of a run.
export module quire.tools.bench.paper.simulation;

import quire.core.base;
import quire.decode.decoder;
import quire.decode.pooling;
import quire.schedule.scheduler;
import quire.tools.bench.paper.cost_model;
import quire.tools.bench.paper.trace_run;

export namespace quire::paper {

// Runs until every request has its whole output, or it gives up. Error: a request that can never run.
Result<TraceResult> simulate(const Trace& trace, const RunOptions& options, const CostModel& cost);

} // namespace quire::paper

module :private;

namespace quire::paper {

constexpr int most_sequences = 4096, vocabulary = 32000;

// The results that a model would give: for each row the most likely tokens, their probabilities p, p·(1 - p), p·(1 - p)², … with p drawn evenly from
// (0, 1), and tokens drawn for parallel samples. Which beams survive depends on nothing else.
class MadeUpModel {
public:
    StepResults results(const StepPlan& plan) {
        best_.assign(plan.logit_rows.size(), 7);
        sampled_.clear();
        for (const SamplingTask& task : plan.sampling.tasks) {
            for (int i = 0; i < task.n_uniforms; i++) sampled_.push_back({token(), -1});
            const double p = 0.001 + 0.998 * std::uniform_real_distribution<double>(0, 1)(random_);
            for (int i = 0; i < task.n_top; i++)
                sampled_.push_back({300 + i, float(std::log(p) + i * std::log(1 - p))});
        }
        return {best_, sampled_, {}, {}};
    }

private:
    Token token() { return 300 + Token(random_() % (vocabulary - 300)); }

    std::mt19937              random_{20230923};
    std::vector<Token>        best_;
    std::vector<TokenLogprob> sampled_;
};

class Simulation {
public:
    Simulation(const Trace& trace, const RunOptions& options, const CostModel& cost)
        : trace_(trace), options_(options), cost_(cost), scheduler_(scheduler_options(options)),
          decoder_(scheduler_, {}, vocabulary, Pooler()), meter_(trace, options) {
        if (cost.link_token > 0 && cost.token > 0)
            scheduler_.set_costs({cost.swap_seconds(options.block_size), cost.token});
    }

    Result<TraceResult> run() {
        const bool      one_each  = options_.n_answers == 1 && options_.beam_width == 0;
        const RequestId pin_id    = trace_.requests.size() + 1;
        std::size_t     n_arrived = 0;
        double          now       = 0;
        if (shares_prefix()) { // computed once, before the first request
            Request pin;
            for (int i = 0; i < trace_.prefix; i++)
                pin.prompt.push_back(token_at({}, 0, trace_, options_, i, vocabulary));
            pin.pin = true;
            scheduler_.add(pin_id, pin);
            const auto items = scheduler_.schedule(plan_);
            scheduler_.commit();
            decoder_.deliver(items, model_.results(plan_), outputs_);
            outputs_.clear();
        }
        SamplingLimits unlimited;
        unlimited.tasks = unlimited.edits = unlimited.uniforms = unlimited.results = unlimited.top = 1 << 20;
        bool gave_up                                                                               = false;
        for (int n_steps = 1; meter_.n_ended() < int(trace_.requests.size()); n_steps++) {
            if (scheduler_.idle() && n_arrived < trace_.requests.size())
                now = std::max(now, trace_.requests[n_arrived].at);
            for (; n_arrived < trace_.requests.size() && trace_.requests[n_arrived].at <= now; n_arrived++) {
                Request r = request_of(trace_.requests[n_arrived], n_arrived, trace_, options_, vocabulary);
                if (auto ok = scheduler_.check_request(r); !ok) return std::unexpected(ok.error());
                scheduler_.add(RequestId(n_arrived + 1), std::move(r));
            }
            const std::span<const Scheduled> items = scheduler_.schedule(plan_);
            const double seconds = cost_.seconds(plan_, options_.block_size, options_.system == System::quire);
            meter_.step(now, seconds, scheduler_.n_running(), scheduler_.memory_use());
            now += seconds;
            if (!one_each) decoder_.plan_sampling(items, unlimited, plan_);
            scheduler_.commit();
            one_each ? deliver_one_each(items) : deliver(items);
            for (const Ended& e : scheduler_.take_ended()) {
                if (!e.message.empty()) return fail_with(ErrorKind::limit, e.message);
                decoder_.finish(e.id, e.finish, e.message, outputs_);
                outputs_.clear();
                over_.push_back(std::size_t(e.id - 1));
            }
            // Request-level batching returns the answers of a batch together.
            if (options_.system != System::faster_transformer || scheduler_.n_running() == 0) {
                for (std::size_t index : over_) meter_.ended(index, now);
                over_.clear();
            }
            if (n_steps % 2048 == 0 && meter_.hopeless(now, n_arrived)) {
                gave_up = true;
                break;
            }
        }
        TraceResult           r     = meter_.result();
        const SchedulerStats& stats = scheduler_.stats();
        const double          n     = std::max(r.n_requests, 1);
        r.gave_up                   = gave_up;
        r.preemptions               = double(stats.preemptions) / n;
        r.recomputed                = double(stats.recomputed_tokens) / n;
        r.cached                    = n_cached_ / n;
        r.saved                     = stats.sharing.saved();
        if (gave_up) r.mean_latency = std::numeric_limits<double>::infinity();
        return r;
    }


private:
    static SchedulerOptions scheduler_options(const RunOptions& o) {
        SchedulerOptions s;
        s.reservations     = reservations_of(o.system);
        s.n_blocks         = o.n_blocks();
        s.block_size       = o.block_size;
        s.context          = o.context;
        s.max_sequences    = std::min(most_sequences, o.step_tokens);
        s.max_batch_tokens = o.step_tokens;
        s.max_logit_rows   = s.max_sequences;
        s.prefix_cache     = o.prefix_cache;
        s.n_swap           = o.preemption == PreemptionMode::recompute ? 0 : o.n_blocks();
        s.preemption_mode  = o.preemption;
        s.watermark        = o.watermark;
        s.keep_preempted   = o.keep_preempted;
        return s;
    }
    bool shares_prefix() const { return trace_.prefix > 0 && options_.prefix_cache; }

    void deliver(std::span<const Scheduled> items) {
        decoder_.deliver(items, model_.results(plan_), outputs_);
        for (const Output& o : outputs_)
            if (o.done) over_.push_back(std::size_t(o.id - 1));
        outputs_.clear();
    }

    // One answer for each request, of arbitrary tokens: the work of Decoder without the outputs.
    void deliver_one_each(std::span<const Scheduled> items) {
        const std::size_t before = over_.size();
        for (const Scheduled& item : items) {
            if (!item.samples) continue;
            SequenceGroup&    group = *item.group;
            Sequence&         s     = *item.sequence;
            const std::size_t index = std::size_t(group.id - 1);
            group.prompt_done       = true;
            const Arrival& a        = trace_.requests[index];
            scheduler_.append(s, a.lengths.conversation < 0
                                     ? 7
                                     : token_at(a, index, trace_, options_, int(s.tokens.size()), vocabulary));
            if (scheduler_.ending(group, s, false) == FinishReason::none) continue;
            n_cached_ += group.n_cached;
            scheduler_.free(group, s, FinishReason::length);
            over_.push_back(index);
        }
        for (std::size_t i = before; i < over_.size(); i++) scheduler_.remove(over_[i] + 1);
    }

    const Trace&        trace_;
    const RunOptions&   options_;
    const CostModel&    cost_;
    Scheduler           scheduler_;
    Decoder             decoder_;
    TraceMeter          meter_;
    MadeUpModel         model_;
    StepPlan            plan_;
    std::vector<Output> outputs_;
    std::vector<std::size_t>
           over_; // requests, by index in the trace, that ended and whose answers are not returned yet
    double n_cached_ = 0;
};

Result<TraceResult> simulate(const Trace& trace, const RunOptions& options, const CostModel& cost) {
    return std::make_unique<Simulation>(trace, options, cost)->run();
}

} // namespace quire::paper
