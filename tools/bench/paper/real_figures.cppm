// quire.tools.bench.paper.real_figures: the figures on this machine's engine, in real time. Rates come from a simulation with the
// measured cost of the engine's steps, so that few runs find each system's knee. **Owns** the engine at hand.
export module quire.tools.bench.paper.real_figures;

import quire.core.base;
export import quire.tools.bench.paper.real_run; // MeasuredCosts
import quire.tools.bench.paper.simulated_figures;
import quire.tools.bench.paper.simulation;
import quire.tools.bench.paper.trace_run;

export namespace quire::paper {

struct RealSettings {
    std::string                             model, device = "auto", folder;
    std::uint32_t                           seed  = 1;
    double                                  scale = 1; // of the traces' lengths
    bool                                    again = false;
    std::function<void(const std::string&)> report;          // one line of progress
    std::function<std::vector<Point>()>     kernel_overhead; // Fig. 18a, on a GPU
};

// Measures each set that the folder does not have with these settings, and stores it there. Error: the model cannot be run.
Result<void> measure_figures(const RealSettings& settings, std::span<const std::string_view> sets);
// Seconds that the sets take on an engine with these costs: traces, their last answers, loading the model again for other
// options. Not more than a first estimate: where a knee is not where it was expected, a rate or two are added.
double planned_seconds(const RealSettings& settings, const MeasuredCosts& costs,
                       std::span<const std::string_view> sets);

} // namespace quire::paper

module :private;

namespace quire::paper {

// Seconds of a trace at scale 1, by what it is for. A run goes on for about 10 s after its trace with ShareGPT's requests, for 3 s
// with Alpaca's: the longest answers. All sets together take less than 25 minutes on an H200.
double seconds_of(std::string_view set, Workload workload) {
    const bool chats = workload == Workload::sharegpt || workload == Workload::chatbot;
    if (set == "beyond") return chats ? 5 : 4;
    if (set == "13") return chats ? 14 : 7; // shares of memory need a steady state
    if (set == "12") return chats ? 8 : 4;
    if (set == "17") return 6;
    if (set == "15") return chats ? 9 : 5; // without the last answers
    return chats ? 4 : 3;
}

#define QUIRE_TRY(expression) \
    if (auto ok = (expression); !ok) return std::unexpected(ok.error())

bool same_engine(const RunOptions& a, const RunOptions& b) {
    const auto key = [](const RunOptions& o) {
        return std::tuple(o.system, o.n_slots, o.block_size, o.context, o.watermark, o.keep_preempted, o.step_tokens,
                          o.preemption, o.prefix_cache);
    };
    return key(a) == key(b);
}

std::string shown_time(double seconds) {
    char text[32];
    std::snprintf(text, sizeof text, seconds < 90 ? "%.0f s" : "%.1f min", seconds < 90 ? seconds : seconds / 60);
    return text;
}

class Session {
public:
    explicit Session(const RealSettings& settings) : settings_(settings) {}

    Result<void> costs() {
        QUIRE_TRY(use(run_options(System::quire)));
        if (auto there = load_costs(settings_.folder); there && there->machine == engine_->engine().describe()) {
            costs_ = *there;
            return {};
        }
        settings_.report("measuring what a step costs");
        Result<MeasuredCosts> costs = engine_->measure();
        if (!costs) return std::unexpected(costs.error());
        costs_ = *costs;
        return save_costs(settings_.folder, costs_);
    }

    Result<Points> make(std::string_view set) {
        set_    = set;
        points_ = {std::string(set), "measured", costs_.machine,
                   cat("seed ", settings_.seed, ", scale ", settings_.scale), settings_.seed};
        Stopwatch watch;
        QUIRE_TRY(run_set());
        points_.seconds = watch.seconds();
        return points_;
    }

    // Seconds that make() will take. Nothing is run.
    double plan(std::string_view set) {
        const double planned = std::exchange(planned_, 0);
        const auto   loaded  = loaded_;
        set_                 = set;
        points_              = {};
        planning_            = true;
        const bool ok        = run_set().has_value(); // an error comes again when the set is made
        planning_            = false;
        loaded_              = loaded;
        const double seconds = std::exchange(planned_, planned);
        return ok ? seconds : 0;
    }

    void use_costs(const MeasuredCosts& costs) { costs_ = costs; }
    // Before the first set: the seconds of all that are to be made.
    void expect(double seconds) { expected_ = seconds, before_ = watch_.seconds(), planned_ = 0; }
    // The time since the start and an estimate of the time left.
    std::string progress() const {
        const double gone = watch_.seconds(), left = std::max(expected_ - planned_, 0.0);
        // The sets that have been run show how much slower than planned this machine is.
        return cat(shown_time(gone), ", about ", shown_time(left * (planned_ > 10 ? (gone - before_) / planned_ : 1)),
                   " left");
    }

private:
    Result<void> use(const RunOptions& options) {
        if (loaded_ && same_engine(options, *loaded_)) return {};
        planned_ += 2; // on an H200, when the file is in the page cache
        loaded_ = options;
        if (planning_) return {};
        engine_.reset(); // its memory first
        Result<EngineRun> engine = EngineRun::load(settings_.model, settings_.device, options);
        if (!engine) return std::unexpected(engine.error());
        engine_.emplace(std::move(*engine));
        return {};
    }

    // Runs at parts of the rate that the simulation expects to be sustained; the measured one is where a line through them, in the
    // logarithm of the latency, crosses the threshold.
    Result<void> rates_near_knee(std::string panel, Workload workload, RunOptions options, std::vector<double> parts) {
        const Result<double> expected = knee(workload, options);
        if (!expected) return std::unexpected(expected.error());
        const double                           limit = latency_limit();
        const std::string                      name(name_of(options.system));
        std::vector<std::pair<double, double>> curve;
        for (double part : parts) {
            QUIRE_TRY(point(panel, name, "latency", *expected * part, workload, *expected * part, options));
            curve.emplace_back(*expected * part, points_.points.back().value);
        }
        if (planning_) return {};
        const double planned = planned_;                                             // without the sets that follow
        for (int less = 0; less < 2 && curve.front().second > 1.3 * limit; less++) { // slower than expected
            const double rate = curve.front().first * 0.75;
            QUIRE_TRY(point(panel, name, "latency", rate, workload, rate, options));
            curve.emplace(curve.begin(), rate, points_.points.back().value);
        }
        for (int more = 0; more < 2 && curve.back().second < limit; more++) { // faster
            const double rate = curve.back().first * 1.25;
            QUIRE_TRY(point(panel, name, "latency", rate, workload, rate, options));
            curve.emplace_back(rate, points_.points.back().value);
        }
        planned_         = planned;
        double sustained = curve.back().second <= limit ? curve.back().first : 0;
        for (std::size_t i = 0; i + 1 < curve.size(); i++) {
            const auto [x0, y0] = curve[i];
            const auto [x1, y1] = curve[i + 1];
            if (y0 <= limit && y1 > limit) sustained = x0 + (x1 - x0) * std::log(limit / y0) / std::log(y1 / y0);
        }
        if (sustained == 0 && curve[0].second > 1.3 * limit) return {}; // not found
        if (sustained == 0) sustained = curve[0].first * limit / curve[0].second;
        points_.points.push_back({panel, name, "sustained", limit, sustained, {}});
        return {};
    }

    Result<void> point(std::string panel, std::string series, std::string kind, double x, Workload workload,
                       double rate, const RunOptions& options, bool drain = true) {
        return point(std::move(panel), std::move(series), std::move(kind), x, trace(workload, rate), options, drain);
    }
    Result<void> point(std::string panel, std::string series, std::string kind, double x, const Trace& trace,
                       RunOptions options, bool drain = true) {
        QUIRE_TRY(use(options));
        options.warm_up = trace.seconds / 4;
        // Until the longest answer is there; a step with a full batch takes half as long again.
        double last = trace.seconds;
        for (const Arrival& a : trace.requests)
            if (drain) last = std::max(last, a.at + 1.5 * alone() * a.lengths.output);
        planned_ += last;
        if (planning_) {
            points_.points.push_back({std::move(panel), std::move(series), std::move(kind), x, latency_limit(), {}});
            return {};
        }
        Result<TraceResult> result = engine_->run(trace, options, drain);
        if (!result) return std::unexpected(result.error());
        const double value = kind == "batched" ? result->batched
                             : kind == "saved" ? result->saved
                                               : result->mean_latency;
        settings_.report(cat("figure set ", set_, ": ", panel, panel.empty() ? "" : ", ", series, ", ",
                             double(trace.requests.size()) / trace.seconds, " requests/s: ", kind, " ", value, "; ",
                             progress()));
        points_.points.push_back({std::move(panel), std::move(series), std::move(kind), x, value, *result});
        return {};
    }

    Trace trace(Workload workload, double rate) const {
        return make_trace(workload, rate, seconds(workload), settings_.seed);
    }
    // Seconds that a sequence alone takes for a token.
    double alone() const { return costs_.cost.step + costs_.cost.sequence + 500 * costs_.cost.kv; }
    // Traces of seconds cannot have the backlog that half a second a token takes: here a rate is sustained up to three times the
    // latency of a sequence alone.
    double         latency_limit() const { return 3 * alone(); }
    Result<double> knee(Workload workload, const RunOptions& o) {
        const std::string key = cat(int(workload), " ", seconds(workload), " ", name_of(o.system), " ", o.n_answers,
                                    " ", o.beam_width, " ", o.prefix_cache, " ", o.block_size, " ", o.watermark);
        if (const auto found = knees_.find(key); found != knees_.end()) return found->second;
        const Result<double> rate =
            sustained_rate(workload, seconds(workload), o, costs_.cost, settings_.seed, latency_limit(), 0.03);
        if (rate) knees_[key] = *rate;
        return rate;
    }

    double seconds(Workload workload) const { return seconds_of(set_, workload) * settings_.scale; }

    Result<void> rates() {
        for (System system : systems)
            for (auto [panel, workload] : {std::pair("a", Workload::sharegpt), std::pair("d", Workload::alpaca)})
                QUIRE_TRY(
                    rates_near_knee(panel, workload, run_options(system),
                                    system == System::quire ? std::vector{0.6, 0.95, 1.15} : std::vector{0.7, 1.1}));
        return {};
    }

    Result<void> memory() {
        for (System system : systems)
            for (auto [panel, workload] : {std::pair("a", Workload::sharegpt), std::pair("b", Workload::alpaca)}) {
                if (system == System::faster_transformer) continue;
                const Result<double> rate = knee(workload, run_options(System::quire));
                if (!rate) return std::unexpected(rate.error());
                QUIRE_TRY(point(panel, std::string(name_of(system)), "batched", *rate, workload, *rate,
                                run_options(system), false));
            }
        return {};
    }

    Result<void> parallel_and_beams() {
        for (System system : {System::quire, System::orca_oracle})
            for (bool beams : {false, true})
                for (int n : {2, 4, 6}) {
                    RunOptions o                         = run_options(system);
                    (beams ? o.beam_width : o.n_answers) = n;
                    QUIRE_TRY(rates_near_knee(cat(beams ? "beam " : "parallel ", n), Workload::alpaca, o, {0.8, 1.1}));
                }
        return {};
    }

    Result<void> sharing() {
        for (Workload workload : {Workload::alpaca, Workload::sharegpt})
            for (bool beams : {false, true})
                for (int n : {2, 4, 6}) {
                    RunOptions o                         = run_options(System::quire);
                    (beams ? o.beam_width : o.n_answers) = n;
                    const Result<double> rate            = knee(workload, o);
                    if (!rate) return std::unexpected(rate.error());
                    QUIRE_TRY(point(std::string(name_of(workload)), beams ? "beam" : "parallel", "saved", n, workload,
                                    *rate * 0.6, o, false));
                }
        return {};
    }

    Result<void> prefixes() {
        for (System system : {System::quire, System::orca_oracle})
            for (auto [panel, workload] : {std::pair("a", Workload::one_shot), std::pair("b", Workload::five_shot)}) {
                RunOptions o   = run_options(system);
                o.prefix_cache = system == System::quire;
                QUIRE_TRY(rates_near_knee(panel, workload, o, {0.8, 1.1}));
            }
        return {};
    }

    Result<void> chatbot() {
        // The simulation expects more of Orca's systems than they bear: a few long prompts at once.
        for (System system : {System::quire, System::orca_oracle, System::orca_max})
            QUIRE_TRY(rates_near_knee("", Workload::chatbot, run_options(system),
                                      system == System::quire ? std::vector{0.8, 1.1} : std::vector{0.6, 0.8}));
        return {};
    }

    Result<void> block_sizes() {
        if (settings_.kernel_overhead) {
            planned_ += 4;
            loaded_.reset();
        }
        if (settings_.kernel_overhead && !planning_) {
            engine_.reset();
            for (Point& p : settings_.kernel_overhead()) points_.points.push_back(std::move(p));
        }
        std::map<Workload, double> rate;
        for (Workload workload : {Workload::sharegpt, Workload::alpaca}) {
            const Result<double> at = knee(workload, run_options(System::quire));
            if (!at) return std::unexpected(at.error());
            rate[workload] = *at * 0.9;
        }
        for (int size : {1, 4, 16, 64, 128, 256})
            for (Workload workload : {Workload::sharegpt, Workload::alpaca}) {
                RunOptions o = run_options(System::quire);
                o.block_size = size;
                QUIRE_TRY(point("b", std::string(name_of(workload)), "latency", size, workload, rate[workload], o));
            }
        return {};
    }

    Result<void> recovery() {
        const Result<double> rate = knee(Workload::sharegpt, run_options(System::quire));
        if (!rate) return std::unexpected(rate.error());
        for (int size : {1, 8, 16, 64, 256})
            for (PreemptionMode mode : {PreemptionMode::swap, PreemptionMode::recompute}) {
                const bool  swaps  = mode == PreemptionMode::swap;
                const char* series = swaps ? "swap" : "recompute";
                RunOptions  o      = run_options(System::quire);
                o.block_size       = size;
                o.preemption       = mode;
                QUIRE_TRY(use(o));
                planned_ += 2; // a host pool in pinned memory takes longer to make; the prompts
                if (!planning_) {
                    const Result<double> again = engine_->prompt_seconds(256);
                    if (!again) return std::unexpected(again.error());
                    const double both_ways = 2 * std::ceil(256.0 / size) * engine_->seconds_per_block();
                    points_.points.push_back(
                        {"a", series, "milliseconds", double(size), 1e3 * (swaps ? both_ways : *again), {}});
                }
                if (size == 1 || size == 16 || size == 256)
                    QUIRE_TRY(point("b", series, "latency", size, Workload::sharegpt, *rate, o));
            }
        return {};
    }

    // quire as it is by default, at fixed rates; on a slower machine at as many times the knee. The highest rate but one, of ShareGPT
    // the highest, for half a minute: long enough that a backlog would show.
    Result<void> goal_rates() {
        const Result<double> chat        = knee(Workload::sharegpt, run_options(System::quire)),
                             short_texts = knee(Workload::alpaca, run_options(System::quire));
        if (!chat || !short_texts) return std::unexpected((chat ? short_texts : chat).error());
        const bool fixed = *chat > 10 && *chat < 60; // a GPU like an H200
        for (auto [workload, rates, unit, longest] :
             {std::tuple(Workload::sharegpt, std::array{4.0, 6.0, 8.0, 10.0, 12.0}, fixed ? 1 : *chat / 10, 12.0),
              std::tuple(Workload::alpaca, std::array{60.0, 120.0, 180.0, 240.0, 300.0}, fixed ? 1 : *short_texts / 200,
                         240.0)})
            for (double on_h200 : rates) {
                const double rate   = on_h200 * unit;
                const double length = on_h200 == longest ? 30 * settings_.scale : seconds(workload);
                QUIRE_TRY(point(cat(name_of(workload), ", 983 blocks"), "quire", "latency", rate,
                                make_trace(workload, rate, length, settings_.seed), default_options()));
            }
        return {};
    }

    Result<void> beyond() {
        QUIRE_TRY(goal_rates());
        // The contribution of each rule of admission, at a rate that fills the pool.
        std::map<Workload, double> full;
        for (Workload workload : {Workload::sharegpt, Workload::alpaca}) {
            const Result<double> rate = knee(workload, run_options(System::quire));
            if (!rate) return std::unexpected(rate.error());
            full[workload] = 1.15 * *rate;
        }
        // Without two that only show how much the watermark matters: the whole run has 25 minutes.
        for (const auto& [name, options] : admission_variants())
            for (const auto& [workload, rate] : full) {
                if (options.watermark == 0 || options.watermark == 0.1) continue;
                QUIRE_TRY(point(cat("admission, ", name_of(workload)), name, "latency", rate, workload, rate, options));
            }
        // A fifth of the requests is urgent; that none is, has been run above.
        const double rate = full[Workload::sharegpt];
        if (const Point* none = points_.find("admission, ShareGPT", "the paper's", "latency")) {
            Point copy  = *none;
            copy.panel  = "priorities";
            copy.series = "all, none urgent";
            points_.points.push_back(std::move(copy));
        }
        RunOptions urgent = run_options(System::quire);
        urgent.urgent     = 0.2;
        QUIRE_TRY(point("priorities", "all, a fifth urgent", "latency", rate, Workload::sharegpt, rate, urgent));
        const Point all = points_.points.back();
        points_.points.push_back(
            {"priorities", "the urgent fifth", "latency", rate, all.result.urgent_latency, all.result});
        // Chats whose rounds come in order, cut at multiples of 512, without and with the prefix cache.
        const Result<double> chats = knee(Workload::chatbot, run_options(System::quire));
        if (!chats) return std::unexpected(chats.error());
        const Trace rounds = make_chat_trace(*chats, 2 * seconds(Workload::chatbot), settings_.seed, n_open_chats);
        for (bool cache : {false, true}) {
            RunOptions o   = run_options(System::quire);
            o.prefix_cache = cache;
            o.keep_rounds  = true;
            QUIRE_TRY(point("chatbot", cache ? "cut at multiples of 512, cache" : "cut at multiples of 512", "latency",
                            *chats, rounds, o));
        }
        return {};
    }

    Result<void> run_set() {
        if (set_ == "12") return rates();
        if (set_ == "13") return memory();
        if (set_ == "14") return parallel_and_beams();
        if (set_ == "15") return sharing();
        if (set_ == "16") return prefixes();
        if (set_ == "17") return chatbot();
        if (set_ == "18") return block_sizes();
        if (set_ == "19") return recovery();
        return beyond();
    }

    const RealSettings&           settings_;
    MeasuredCosts                 costs_;
    std::optional<EngineRun>      engine_;
    std::optional<RunOptions>     loaded_; // the options of the loaded engine, if one is
    std::string_view              set_;
    Points                        points_;
    std::map<std::string, double> knees_;
    // For the estimate of the time left, in seconds.
    bool      planning_ = false;
    double    planned_  = 0; // of the sets that have been run
    double    expected_ = 0; // planned of all
    double    before_   = 0; // until the first set began
    Stopwatch watch_;
};

double planned_seconds(const RealSettings& settings, const MeasuredCosts& costs,
                       std::span<const std::string_view> sets) {
    Session session(settings);
    session.use_costs(costs);
    double seconds = 0;
    for (std::string_view set : sets) seconds += session.plan(set);
    return seconds;
}

Result<void> measure_figures(const RealSettings& settings, std::span<const std::string_view> sets) {
    std::vector<std::string_view> missing;
    for (std::string_view set : sets) {
        const auto there = load(settings.folder, "measured", set);
        if (there && there->settings == cat("seed ", settings.seed, ", scale ", settings.scale) && !settings.again)
            settings.report(cat("figure set ", set, ": is there"));
        else missing.push_back(set);
    }
    if (missing.empty()) return {};
    Session session(settings);
    QUIRE_TRY(session.costs());
    double seconds = 0;
    for (std::string_view set : missing) seconds += session.plan(set);
    session.expect(seconds);
    settings.report(cat("planned: about ", shown_time(seconds)));
    for (std::string_view set : missing) {
        Result<Points> points = session.make(set);
        if (!points) return std::unexpected(points.error());
        QUIRE_TRY(save(settings.folder, *points));
        settings.report(
            cat("figure set ", set, ": done after ", shown_time(points->seconds), "; ", session.progress()));
    }
    return {};
}

} // namespace quire::paper
