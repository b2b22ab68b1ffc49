// quire.tools.bench.paper.real_figures: the figures on this machine's engine, in real time. Rates come from a simulation on what the
// engine's steps were measured to cost, so that few runs find each system's knee. Owns nothing but the engine at hand.
export module quire.tools.bench.paper.real_figures;

import quire.core.base;
import quire.core.std;
import quire.engine.engine;
import quire.schedule.preemption;
import quire.schedule.reservation;
import quire.tools.bench.paper.cost_model;
import quire.tools.bench.paper.points;
export import quire.tools.bench.paper.real_run; // MeasuredCosts
import quire.tools.bench.paper.simulated_figures;
import quire.tools.bench.paper.simulation;
import quire.tools.bench.paper.trace_run;
import quire.tools.bench.paper.workload;

export namespace quire::paper {

struct RealSettings {
    std::string                             model, device = "auto", folder;
    std::uint32_t                           seed  = 1;
    double                                  scale = 1; // of the traces' lengths
    bool                                    again = false;
    std::function<void(const std::string&)> report;          // one line of progress
    std::function<std::vector<Point>()>     kernel_overhead; // Fig. 18a, on a GPU
};

// Measures each set that the folder does not have with the same settings, and stores it there. Error: the model cannot be run.
Result<void> measure_figures(const RealSettings& settings, std::span<const std::string_view> sets);

} // namespace quire::paper

module :private;

namespace quire::paper {

namespace {

// Seconds of a trace at scale 1, by what it is for. All sets together take less than 25 minutes on an H200: a run goes on for about 10 s
// after its trace with ShareGPT's requests, for 3 s with Alpaca's.
double seconds_of(std::string_view set, Workload workload) {
    const bool chats = workload == Workload::sharegpt || workload == Workload::chatbot;
    if (set == "beyond") return chats ? 11 : 5.5;
    if (set == "13") return chats ? 14 : 7; // shares of memory need a steady state
    if (set == "12") return chats ? 8 : 4;
    if (set == "17") return 6;
    if (set == "15") return chats ? 3 : 2.5;
    return chats ? 4 : 3;
}

class Session {
public:
    explicit Session(const RealSettings& settings) : settings_(settings) {}

    Result<void>   costs();
    Result<Points> make(std::string_view set);

private:
    Result<void> use(const RunOptions& options);
    Result<void> rates_near_knee(std::string panel, Workload workload, RunOptions options, std::vector<double> parts);
    Result<void> point(std::string panel, std::string series, std::string kind, double x, Workload workload,
                       double rate, RunOptions options, bool drain = true) {
        return point(std::move(panel), std::move(series), std::move(kind), x, workload, rate, std::move(options), drain,
                     seconds(workload));
    }
    Result<void> point(std::string panel, std::string series, std::string kind, double x, Workload workload,
                       double rate, RunOptions options, bool drain, double length);
    // Traces of seconds cannot have the backlog that half a second a token takes: here a rate is sustained up to three times the
    // latency of a sequence alone.
    double latency_limit() const { return 3 * (costs_.cost.step + costs_.cost.sequence + 500 * costs_.cost.kv); }
    Result<double> knee(Workload workload, const RunOptions& options) {
        return sustained_rate(workload, seconds(workload), options, costs_.cost, settings_.seed, latency_limit(), 0.03);
    }
    double seconds(Workload workload) const { return seconds_of(set_, workload) * settings_.scale; }

    Result<void> rates();
    Result<void> memory();
    Result<void> parallel_and_beams();
    Result<void> sharing();
    Result<void> prefixes();
    Result<void> chatbot();
    Result<void> block_sizes();
    Result<void> recovery();
    Result<void> beyond();

    const RealSettings&      settings_;
    MeasuredCosts            costs_;
    std::optional<EngineRun> engine_;
    RunOptions               loaded_; // what it was loaded for
    std::string_view         set_;
    Points                   points_;
};

#define QUIRE_TRY(expression) \
    if (auto ok = (expression); !ok) return std::unexpected(ok.error())

bool same_engine(const RunOptions& a, const RunOptions& b) {
    const auto key = [](const RunOptions& o) {
        return std::tuple(o.system, o.n_slots, o.block_size, o.context, o.watermark, o.keep_preempted, o.step_tokens,
                          o.preemption, o.prefix_cache);
    };
    return key(a) == key(b);
}

Result<void> Session::use(const RunOptions& options) {
    if (engine_ && same_engine(options, loaded_)) return {};
    engine_.reset(); // its memory first
    Result<EngineRun> engine = EngineRun::load(settings_.model, settings_.device, options);
    if (!engine) return std::unexpected(engine.error());
    engine_.emplace(std::move(*engine));
    loaded_ = options;
    return {};
}

Result<void> Session::costs() {
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

Result<void> Session::point(std::string panel, std::string series, std::string kind, double x, Workload workload,
                            double rate, RunOptions options, bool drain, double length) {
    QUIRE_TRY(use(options));
    options.warm_up            = length / 4;
    const Trace         trace  = make_trace(workload, rate, length, settings_.seed);
    Result<TraceResult> result = engine_->run(trace, options, drain);
    if (!result) return std::unexpected(result.error());
    const double value = kind == "batched" ? result->batched : kind == "saved" ? result->saved : result->mean_latency;
    settings_.report(cat("figure set ", set_, ": ", panel, panel.empty() ? "" : ", ", series, ", ", rate,
                         " requests/s: ", kind, " ", value));
    points_.points.push_back({std::move(panel), std::move(series), std::move(kind), x, value, *result});
    return {};
}

// Runs at parts of the rate that the simulation expects to be sustained; the measured one is where a line through them, in the
// logarithm of the latency, crosses the threshold.
Result<void> Session::rates_near_knee(std::string panel, Workload workload, RunOptions options,
                                      std::vector<double> parts) {
    const Result<double> expected = knee(workload, options);
    if (!expected) return std::unexpected(expected.error());
    const double                           limit = latency_limit();
    const std::string                      name(name_of(options.system));
    std::vector<std::pair<double, double>> curve;
    for (double part : parts) {
        QUIRE_TRY(point(panel, name, "latency", *expected * part, workload, *expected * part, options));
        curve.emplace_back(*expected * part, points_.points.back().value);
    }
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

Result<void> Session::rates() {
    for (System system : systems)
        for (auto [panel, workload] : {std::pair("a", Workload::sharegpt), std::pair("d", Workload::alpaca)})
            QUIRE_TRY(rates_near_knee(panel, workload, run_options(system),
                                      system == System::quire ? std::vector{0.6, 0.95, 1.15} : std::vector{0.7, 1.1}));
    return {};
}

Result<void> Session::memory() {
    for (System system : systems)
        for (auto [panel, workload] : {std::pair("a", Workload::sharegpt), std::pair("b", Workload::alpaca)}) {
            if (system == System::faster_transformer) continue;
            const Result<double> rate = knee(workload, run_options(System::quire));
            if (!rate) return std::unexpected(rate.error());
            QUIRE_TRY(point(panel, std::string(name_of(system)), "batched", *rate, workload, *rate, run_options(system),
                            false));
        }
    return {};
}

Result<void> Session::parallel_and_beams() {
    for (System system : {System::quire, System::orca_oracle})
        for (bool beams : {false, true})
            for (int n : {2, 4, 6}) {
                RunOptions o                         = run_options(system);
                (beams ? o.beam_width : o.n_answers) = n;
                QUIRE_TRY(rates_near_knee(cat(beams ? "beam " : "parallel ", n), Workload::alpaca, o, {0.8, 1.1}));
            }
    return {};
}

Result<void> Session::sharing() {
    for (Workload workload : {Workload::alpaca, Workload::sharegpt})
        for (bool beams : {false, true})
            for (int n : {2, 4, 6}) {
                RunOptions o                         = run_options(System::quire);
                (beams ? o.beam_width : o.n_answers) = n;
                const Result<double> rate            = knee(workload, o);
                if (!rate) return std::unexpected(rate.error());
                QUIRE_TRY(point(std::string(name_of(workload)), beams ? "beam" : "parallel", "saved", n, workload,
                                *rate * 0.6, o));
            }
    return {};
}

Result<void> Session::prefixes() {
    for (System system : {System::quire, System::orca_oracle})
        for (auto [panel, workload] : {std::pair("a", Workload::one_shot), std::pair("b", Workload::five_shot)}) {
            RunOptions o   = run_options(system);
            o.prefix_cache = system == System::quire;
            QUIRE_TRY(rates_near_knee(panel, workload, o, {0.8, 1.1}));
        }
    return {};
}

Result<void> Session::chatbot() {
    for (System system : {System::quire, System::orca_oracle, System::orca_max})
        QUIRE_TRY(rates_near_knee("", Workload::chatbot, run_options(system), {0.8, 1.1}));
    return {};
}

Result<void> Session::block_sizes() {
    if (settings_.kernel_overhead) {
        engine_.reset();
        for (Point& p : settings_.kernel_overhead()) points_.points.push_back(std::move(p));
    }
    std::map<Workload, double> rate;
    for (Workload workload : {Workload::sharegpt, Workload::alpaca}) {
        const Result<double> at = knee(workload, run_options(System::quire));
        if (!at) return std::unexpected(at.error());
        rate[workload] = *at * 0.9;
    }
    for (int size : {1, 4, 8, 16, 32, 64, 128, 256})
        for (Workload workload : {Workload::sharegpt, Workload::alpaca}) {
            RunOptions o = run_options(System::quire);
            o.block_size = size;
            QUIRE_TRY(point("b", std::string(name_of(workload)), "latency", size, workload, rate[workload], o));
        }
    return {};
}

Result<void> Session::recovery() {
    const Result<double> rate = knee(Workload::sharegpt, run_options(System::quire));
    if (!rate) return std::unexpected(rate.error());
    for (int size : {1, 16, 64, 256})
        for (PreemptionMode mode : {PreemptionMode::swap, PreemptionMode::recompute}) {
            const bool  swaps  = mode == PreemptionMode::swap;
            const char* series = swaps ? "swap" : "recompute";
            RunOptions  o      = run_options(System::quire);
            o.block_size       = size;
            o.preemption       = mode;
            QUIRE_TRY(use(o));
            const Result<double> again = engine_->prompt_seconds(256);
            if (!again) return std::unexpected(again.error());
            const double both_ways = 2 * std::ceil(256.0 / size) * engine_->seconds_per_block();
            points_.points.push_back(
                {"a", series, "milliseconds", double(size), 1e3 * (swaps ? both_ways : *again), {}});
            QUIRE_TRY(point("b", series, "latency", size, Workload::sharegpt, *rate, o));
        }
    return {};
}

// quire as it is by default, and with the paper's rules, at fixed rates; on a slower machine at as many times the knee.
Result<void> Session::beyond() {
    const Result<double> chat        = knee(Workload::sharegpt, run_options(System::quire)),
                         short_texts = knee(Workload::alpaca, run_options(System::quire));
    if (!chat || !short_texts) return std::unexpected((chat ? short_texts : chat).error());
    const bool fixed = *chat > 5 && *chat < 20;
    for (bool defaults : {true, false}) {
        RunOptions o = run_options(System::quire);
        if (defaults) o = default_options();
        const char* series = defaults ? "quire" : "the paper's rules";
        // Below these rates no pool is full, and the rules make no difference.
        for (double rate : {4.0, 6.0, 8.0, 10.0, 12.0}) {
            if (!defaults && rate < 8) continue;
            QUIRE_TRY(point("ShareGPT, 983 blocks", series, "latency", fixed ? rate : rate / 10 * *chat,
                            Workload::sharegpt, fixed ? rate : rate / 10 * *chat, o));
        }
        for (double rate : {60.0, 120.0, 180.0, 240.0, 300.0}) {
            if (!defaults && rate < 180) continue;
            QUIRE_TRY(point("Alpaca, 983 blocks", series, "latency", fixed ? rate : rate / 200 * *short_texts,
                            Workload::alpaca, fixed ? rate : rate / 200 * *short_texts, o));
        }
    }
    // The highest rate but one for a minute: long enough that a backlog would show.
    const double minute = 60 * settings_.scale, chats = fixed ? 12 : 1.2 * *chat,
                 texts = fixed ? 240 : 1.2 * *short_texts;
    QUIRE_TRY(point("a minute, ShareGPT, 983 blocks", "quire", "latency", chats, Workload::sharegpt, chats,
                    default_options(), true, minute));
    return point("a minute, Alpaca, 983 blocks", "quire", "latency", texts, Workload::alpaca, texts, default_options(),
                 true, minute);
}

Result<Points> Session::make(std::string_view set) {
    set_    = set;
    points_ = {std::string(set),
               "measured",
               costs_.machine,
               cat("seed ", settings_.seed, ", scale ", settings_.scale),
               settings_.seed,
               0,
               {}};
    Stopwatch watch;
    if (set == "12") QUIRE_TRY(rates());
    if (set == "13") QUIRE_TRY(memory());
    if (set == "14") QUIRE_TRY(parallel_and_beams());
    if (set == "15") QUIRE_TRY(sharing());
    if (set == "16") QUIRE_TRY(prefixes());
    if (set == "17") QUIRE_TRY(chatbot());
    if (set == "18") QUIRE_TRY(block_sizes());
    if (set == "19") QUIRE_TRY(recovery());
    if (set == "beyond") QUIRE_TRY(beyond());
    points_.seconds = watch.seconds();
    return points_;
}

} // namespace

Result<void> measure_figures(const RealSettings& settings, std::span<const std::string_view> sets) {
    Session session(settings);
    QUIRE_TRY(session.costs());
    Stopwatch watch;
    for (std::string_view set : sets) {
        const auto there = load(settings.folder, "measured", set);
        if (there && there->settings == cat("seed ", settings.seed, ", scale ", settings.scale) && !settings.again) {
            settings.report(cat("figure set ", set, ": is there"));
            continue;
        }
        Result<Points> points = session.make(set);
        if (!points) return std::unexpected(points.error());
        QUIRE_TRY(save(settings.folder, *points));
        settings.report(
            cat("figure set ", set, ": done after ", int(points->seconds), " s, ", int(watch.seconds()), " s in all"));
    }
    return {};
}

} // namespace quire::paper
