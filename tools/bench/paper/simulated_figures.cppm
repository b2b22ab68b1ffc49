// quire.tools.bench.paper.simulated_figures: which runs make up each figure in simulated time. Owns nothing.
export module quire.tools.bench.paper.simulated_figures;

import quire.core.base;
import quire.tools.bench.paper.cost_model;
export import quire.tools.bench.paper.points;
import quire.tools.bench.paper.simulation;
import quire.tools.bench.paper.trace_run;

export namespace quire::paper {

// The sets of points that `bench paper` makes, in order. Fig. 2 comes from the runs of Fig. 13.
inline constexpr std::array<std::string_view, 9> figure_sets{"13", "12", "14", "15", "16", "17", "18", "19", "beyond"};
inline constexpr double sustained_latency = 0.5; // seconds a token: a rate with less is sustained

struct SimulationSettings {
    std::uint32_t            seed             = 1;
    double                   scale            = 1; // of the traces' lengths: 1 is the paper's hour
    bool                     first_principles = false;
    std::optional<CostModel> measured         = {}; // of this machine's engine, in place of the paper's A100s
};

using Task = std::function<Result<std::vector<Point>>()>; // can run at the same time as the others

std::vector<Task> simulated_tasks(std::string_view set, const SimulationSettings& settings);

// The highest rate whose mean normalized latency is at most `latency`, to about `precision`.
Result<double> sustained_rate(Workload workload, double seconds, RunOptions options, const CostModel& cost,
                              std::uint32_t seed, double latency = sustained_latency, double precision = 0.012);
// The paper's vLLM, as far as the paper says: recomputation, whole prompts, nothing kept of preempted requests.
RunOptions run_options(System system, const PaperModel& model = opt_13b);
// quire's defaults: prompts in chunks, the blocks of preempted requests are found again.
RunOptions default_options();
// The paper's rules of admission and recovery, rules that differ from them in one point, and quire's defaults.
std::vector<std::pair<const char*, RunOptions>> admission_variants();
inline constexpr int                            n_open_chats = 24; // conversations that go on at a time

} // namespace quire::paper

module :private;

namespace quire::paper {

RunOptions run_options(System system, const PaperModel& model) {
    RunOptions o;
    o.system  = system;
    o.n_slots = model.n_slots;
    return o;
}

RunOptions default_options() {
    RunOptions o     = run_options(System::quire);
    o.step_tokens    = 2048;
    o.keep_preempted = true;
    o.prefix_cache   = true;
    o.watermark      = 0.04;
    return o;
}

std::vector<std::pair<const char*, RunOptions>> admission_variants() {
    std::vector<std::pair<const char*, RunOptions>> variants{{"the paper's", run_options(System::quire)}};
    const auto                                      with = [&](const char* name, auto change) {
        variants.emplace_back(name, run_options(System::quire));
        change(variants.back().second);
    };
    with("no watermark", [](RunOptions& o) { o.watermark = 0; });
    with("watermark 4 %", [](RunOptions& o) { o.watermark = 0.04; });
    with("watermark 10 %", [](RunOptions& o) { o.watermark = 0.1; });
    with("keeps what was preempted", [](RunOptions& o) { o.keep_preempted = true; });
    with("swap", [](RunOptions& o) { o.preemption = PreemptionMode::swap; });
    with("prompts in chunks of 512", [](RunOptions& o) { o.step_tokens = 512; });
    variants.emplace_back("quire's defaults", default_options());
    return variants;
}

CostModel cost_of(const SimulationSettings& s, const PaperModel& model, System system) {
    CostModel c = s.measured ? *s.measured : s.first_principles ? first_principles(model) : calibrated(model);
    // FasterTransformer is no Python program: nothing for each sequence was fitted to it.
    if (system == System::faster_transformer) c.sequence = 0;
    return c;
}

Result<double> sustained_rate(Workload workload, double seconds, RunOptions options, const CostModel& cost,
                              std::uint32_t seed, double latency, double precision) {
    options.give_up  = latency;
    const auto holds = [&](double rate) -> Result<bool> {
        const Trace               trace  = make_trace(workload, rate, seconds, seed);
        const Result<TraceResult> result = simulate(trace, options, cost);
        if (!result) return std::unexpected(result.error());
        return result->mean_latency <= latency;
    };
    double low = 0.05, high = 0;
    for (high = 2 * low; high < 4096; low = high, high *= 2) {
        const Result<bool> ok = holds(high);
        if (!ok) return std::unexpected(ok.error());
        if (!*ok) break;
    }
    while (high / low > 1 + precision) {
        const double       middle = std::sqrt(low * high);
        const Result<bool> ok     = holds(middle);
        if (!ok) return std::unexpected(ok.error());
        (*ok ? low : high) = middle;
    }
    return low;
}

// The runs of one set of figures.
class Plan {
public:
    Plan(const SimulationSettings& settings, std::vector<Task>& tasks) : settings_(settings), tasks_(tasks) {}

    void make(std::string_view set) {
        if (set == "12") rates();
        if (set == "13") memory();
        if (set == "14") parallel_and_beams();
        if (set == "15") sharing();
        if (set == "16") prefixes();
        if (set == "17") chatbot();
        if (set == "18") block_sizes();
        if (set == "19") recovery();
        if (set == "beyond") beyond();
    }

private:
    bool paper_costs() const { return !settings_.measured; }
    // A rate of the calibrated A100, as a part of its highest sustained rate, at this machine's cost of steps.
    double rate(Workload workload, double on_a100) {
        if (paper_costs() && !settings_.first_principles) return on_a100;
        double& factor = factors_[workload];
        if (factor == 0) {
            const Result<double> knee =
                sustained_rate(workload, 900 * settings_.scale, run_options(System::quire),
                               cost_of(settings_, opt_13b, System::quire), settings_.seed, sustained_latency, 0.03);
            factor = knee.value_or(1) / (workload == Workload::alpaca    ? 30.8
                                         : workload == Workload::chatbot ? 0.86
                                                                         : 2.05);
        }
        return on_a100 * factor;
    }
    double hour() const { return 3600 * settings_.scale; }
    double warm_up(double seconds) const { return seconds / 12; } // five minutes of an hour

    // One run at a rate; `kind` says which of its numbers is the value.
    static Result<Point> run(std::string panel, std::string series, std::string kind, double x, Workload workload,
                             double rate, double seconds, RunOptions options, const CostModel& cost,
                             std::uint32_t seed) {
        options.warm_up                  = seconds / 12;
        const Trace               trace  = make_trace(workload, rate, seconds, seed);
        const Result<TraceResult> result = simulate(trace, options, cost);
        if (!result) return std::unexpected(result.error());
        const double value = kind == "batched" ? result->batched
                             : kind == "saved" ? result->saved
                                               : result->mean_latency;
        return Point{std::move(panel), std::move(series), std::move(kind), x, value, *result};
    }

    void add(std::string panel, std::string series, std::string kind, double x, Workload workload, double rate,
             double seconds, const RunOptions& options, const CostModel& cost) {
        tasks_.push_back([=, seed = settings_.seed]() -> Result<std::vector<Point>> {
            Result<Point> p = run(panel, series, kind, x, workload, rate, seconds, options, cost, seed);
            if (!p) return std::unexpected(p.error());
            return std::vector{*p};
        });
    }

    // The sustained rate of a system, and its latencies at parts of it, or at fixed rates.
    void add_curve(std::string panel, std::string series, Workload workload, double seconds, const RunOptions& options,
                   const CostModel& cost, std::vector<double> rates = {},
                   std::vector<double> latencies = {sustained_latency}, double precision = 0.012) {
        tasks_.push_back([=, seed = settings_.seed]() -> Result<std::vector<Point>> {
            std::vector<Point> points;
            double             knee = 0;
            for (double latency : latencies) {
                const Result<double> rate = sustained_rate(workload, seconds, options, cost, seed, latency, precision);
                if (!rate) return std::unexpected(rate.error());
                points.push_back({panel, series, "sustained", latency, *rate, {}});
                if (latency == sustained_latency) knee = *rate;
            }
            std::vector<double> at = rates;
            if (at.empty())
                for (double part : {0.2, 0.5, 0.75, 0.9, 0.97, 1.04, 1.12}) at.push_back(knee * part);
            for (double rate : at) {
                RunOptions o = options;
                if (rates.empty()) o.give_up = 4; // far above the plot
                Result<Point> p = run(panel, series, "latency", rate, workload, rate, seconds, o, cost, seed);
                if (!p) return std::unexpected(p.error());
                points.push_back(std::move(*p)); // infinite if it was given up
            }
            return points;
        });
    }

    void rates() {
        struct Panel {
            const char*       name;
            const PaperModel* model;
            Workload          workload;
        };
        for (const Panel& p : {Panel{"d", &opt_13b, Workload::alpaca}, Panel{"e", &opt_66b, Workload::alpaca},
                               Panel{"f", &opt_175b, Workload::alpaca}, Panel{"a", &opt_13b, Workload::sharegpt},
                               Panel{"b", &opt_66b, Workload::sharegpt}, Panel{"c", &opt_175b, Workload::sharegpt}}) {
            if (!paper_costs() && p.model != &opt_13b) continue; // one engine was measured
            for (System system : systems) {
                std::vector<double> grid, latencies{sustained_latency};
                if (paper_costs() && p.model == &opt_13b) {
                    grid      = p.workload == Workload::sharegpt
                                    ? std::vector{0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.6, 1.8, 2.0, 2.2}
                                    : std::vector<double>{1, 4, 8, 16, 20, 22, 24, 26, 30, 32};
                    latencies = {sustained_latency, 0.2, 1.0};
                }
                add_curve(p.name, std::string(name_of(system)), p.workload, p.model == &opt_175b ? hour() / 4 : hour(),
                          run_options(system, *p.model), cost_of(settings_, *p.model, system), grid, latencies);
            }
        }
    }

    // Fig. 2 and 13: at the paper's rates; with other costs at the rate that quire just sustains.
    void memory() {
        for (auto [panel, workload, fixed] :
             {std::tuple("a", Workload::sharegpt, 2.0), std::tuple("b", Workload::alpaca, 30.0)})
            for (System system : systems) {
                if (system == System::faster_transformer) continue;
                const RunOptions o    = run_options(system);
                const CostModel  cost = cost_of(settings_, opt_13b, system);
                const auto       name = std::string(name_of(system));
                if (paper_costs()) {
                    add(panel, name, "batched", fixed, workload, fixed, hour(), o, cost);
                    if (workload == Workload::sharegpt && system == System::quire)
                        add("overloaded", name, "batched", 2 * fixed, workload, 2 * fixed, hour() / 2, o, cost);
                    continue;
                }
                tasks_.push_back([=, panel = std::string(panel), workload = workload,
                                  s = settings_]() -> Result<std::vector<Point>> {
                    const double         seconds = 600 * s.scale;
                    const Result<double> rate    = sustained_rate(workload, seconds, run_options(System::quire),
                                                                  cost_of(s, opt_13b, System::quire), s.seed);
                    if (!rate) return std::unexpected(rate.error());
                    Result<Point> p = run(panel, name, "batched", *rate, workload, *rate, seconds, o, cost, s.seed);
                    if (!p) return std::unexpected(p.error());
                    return std::vector{*p};
                });
            }
    }

    void parallel_and_beams() {
        for (bool beams : {true, false})
            for (int n : {6, 4, 2})
                for (System system : systems) {
                    if (system == System::faster_transformer) continue;
                    RunOptions o                         = run_options(system);
                    (beams ? o.beam_width : o.n_answers) = n;
                    add_curve(cat(beams ? "beam " : "parallel ", n), std::string(name_of(system)), Workload::alpaca,
                              hour() / 12, o, cost_of(settings_, opt_13b, system), {}, {sustained_latency}, 0.03);
                }
    }

    void sharing() {
        for (Workload workload : {Workload::sharegpt, Workload::alpaca})
            for (bool beams : {true, false})
                for (int n : {6, 4, 2}) {
                    RunOptions o                         = run_options(System::quire);
                    (beams ? o.beam_width : o.n_answers) = n;
                    const double at = rate(workload, workload == Workload::alpaca ? 30 : 2) / n / 1.5;
                    add(std::string(name_of(workload)), beams ? "beam" : "parallel", "saved", n, workload, at,
                        hour() / 2, o, cost_of(settings_, opt_13b, System::quire));
                }
    }

    void prefixes() {
        for (Workload workload : {Workload::five_shot, Workload::one_shot})
            for (System system : systems) {
                if (system == System::faster_transformer) continue;
                RunOptions o   = run_options(system);
                o.prefix_cache = system == System::quire;
                add_curve(workload == Workload::one_shot ? "a" : "b", std::string(name_of(system)), workload, hour(), o,
                          cost_of(settings_, opt_13b, system));
            }
    }

    void chatbot() {
        for (System system : systems)
            if (system != System::faster_transformer)
                add_curve("", std::string(name_of(system)), Workload::chatbot, hour(), run_options(system),
                          cost_of(settings_, opt_13b, system));
    }

    void block_sizes() {
        for (Workload workload : {Workload::sharegpt, Workload::alpaca})
            for (int size : {1, 2, 4, 8, 16, 32, 64, 128, 256}) {
                RunOptions o = run_options(System::quire);
                o.block_size = size;
                add("b", std::string(name_of(workload)), "latency", size, workload,
                    rate(workload, workload == Workload::sharegpt ? 1.9 : 28), hour() / 2, o,
                    cost_of(settings_, opt_13b, System::quire));
            }
    }

    void recovery() {
        for (PreemptionMode mode : {PreemptionMode::recompute, PreemptionMode::swap})
            for (int size : {1, 2, 4, 8, 16, 32, 64, 128, 256}) {
                const CostModel cost   = cost_of(settings_, opt_13b, System::quire);
                const bool      swaps  = mode == PreemptionMode::swap;
                const char*     series = swaps ? "swap" : "recompute";
                // (a): 256 tokens.
                const double once = cost.swap_seconds(size) * std::ceil(256.0 / size);
                tasks_.push_back([=] {
                    return std::vector{Point{
                        "a", series, "milliseconds", double(size), 1e3 * (swaps ? 2 * once : cost.token * 256), {}}};
                });
                RunOptions o = run_options(System::quire);
                o.block_size = size;
                o.preemption = mode;
                add("b", series, "latency", size, Workload::sharegpt, rate(Workload::sharegpt, 2), hour() / 2, o, cost);
            }
    }

    void beyond();

    const SimulationSettings&  settings_;
    std::vector<Task>&         tasks_;
    std::map<Workload, double> factors_; // of rate()
};

// Methods that came after the paper, and the contribution of each rule of admission.
void Plan::beyond() {
    const auto       quire_costs = cost_of(settings_, opt_13b, System::quire);
    const RunOptions paper       = run_options(System::quire);
    for (const auto& [name, options] : admission_variants())
        for (auto [workload, rates] : {std::pair(Workload::sharegpt, std::array{1.7, 1.9, 2.0, 2.1, 2.2}),
                                       std::pair(Workload::alpaca, std::array{24.0, 28.0, 30.0, 31.0, 32.0})})
            for (double on_a100 : rates) {
                const double at = rate(workload, on_a100);
                add(cat("admission, ", name_of(workload)), name, "latency", at, workload, at, hour() / 3, options,
                    quire_costs);
            }
    // Chats whose rounds come in order: with and without the cache, cut to the last 1024 tokens, or at multiples of 512.
    for (bool cache : {false, true})
        for (bool keep : {false, true}) {
            RunOptions o    = paper;
            o.prefix_cache  = cache;
            o.keep_rounds   = keep;
            const auto name = cat(keep ? "cut at multiples of 512" : "cut to the last 1024", cache ? ", cache" : "");
            for (double on_a100 : {0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2})
                tasks_.push_back([=, rate = rate(Workload::chatbot, on_a100), seconds = hour() / 2,
                                  seed = settings_.seed]() -> Result<std::vector<Point>> {
                    RunOptions mine    = o;
                    mine.warm_up       = seconds / 12;
                    const Trace trace  = make_chat_trace(rate, seconds, seed, n_open_chats);
                    const auto  result = simulate(trace, mine, quire_costs);
                    if (!result) return std::unexpected(result.error());
                    return std::vector{Point{"chatbot", name, "latency", rate, result->mean_latency, *result}};
                });
        }
    // A fifth of the requests is urgent.
    for (double on_a100 : {1.6, 1.8, 2.0, 2.2})
        for (bool urgent : {false, true})
            tasks_.push_back([=, rate = rate(Workload::sharegpt, on_a100), seconds = hour() / 2,
                              seed = settings_.seed]() -> Result<std::vector<Point>> {
                RunOptions o    = paper;
                o.urgent        = urgent ? 0.2 : 0;
                Result<Point> p = run("priorities", urgent ? "all, a fifth urgent" : "all, none urgent", "latency",
                                      rate, Workload::sharegpt, rate, seconds, o, quire_costs, seed);
                if (!p) return std::unexpected(p.error());
                std::vector<Point> points{*p};
                if (urgent)
                    points.push_back(
                        {"priorities", "the urgent fifth", "latency", rate, p->result.urgent_latency, p->result});
                return points;
            });
}

std::vector<Task> simulated_tasks(std::string_view set, const SimulationSettings& settings) {
    std::vector<Task> tasks;
    Plan(settings, tasks).make(set);
    return tasks;
}

} // namespace quire::paper
