// bench replicas: many servers behind a router, by policy: how much of the prompts is found in a cache, how even the work is, how long
// users wait. In simulated time on quire's own scheduler and prefix cache, or measured on engines of this process.

import quire.core.base;
import quire.core.output_file;
import quire.core.thread_pool;
import quire.tools.bench.paper.real_run;
import quire.tools.bench.paper.svg_plot;
import quire.tools.bench.replicas.fleet;
import quire.tools.bench.replicas.measured;
import quire.tools.bench.replicas.router;
import quire.tools.common.engine_flags;
import quire.tools.flags.cli;

#include "commands.h"

namespace quire::bench {

using namespace quire::replicas;

void add_replicas_flags(CLI::App* c, ReplicasArguments& a) {
    c->add_option("--replicas", a.replicas, "numbers of servers")
        ->delimiter(',')
        ->check(within(1, 10'000))
        ->capture_default_str();
    c->add_option("--policy", a.policies, "random, round-robin, least-loaded, kv-aware")
        ->delimiter(',')
        ->check(CLI::IsMember({"random", "round-robin", "least-loaded", "kv-aware"}))
        ->capture_default_str();
    add_number(*c, "--chats", a.chats, 1, 100'000, "open for each server");
    add_number(*c, "--think", a.think, 0.001, 1e4, "seconds from an answer to the next question, in the mean");
    add_number(*c, "--seconds", a.seconds, 0.1, 1e5, "length; the first third does not count");
    add_number(*c, "--slots", a.slots, 1024, 1 << 28, "KV slots of a server, in tokens");
    add_number(*c, "--scale", a.scale, 0.01, 10, "of the lengths of questions and answers");
    c->add_option("--costs", a.costs,
                  "folder of `bench paper --real` whose measured-costs.json says what a step takes; "
                  "default: the OPT-13B shape on an H200");
    add_number(*c, "--seed", a.seed, 0, 1 << 30);
    c->add_option("-m,--model", a.model,
                  "measure, too: as many engines of this GGUF file in real time, and simulate what their steps cost");
    c->add_option("--device", a.device, "with -m")
        ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
        ->capture_default_str();
    c->add_option("-t,--threads", a.threads, "threads of the simulation; 0: one per physical core")
        ->check(within(0, 1024));
    c->add_option("--json", a.json, "file for all results");
    c->add_option("--svg", a.svg, "file for a plot of them");
}

namespace {

// Measured by `bench paper --real` on an H200 with the OPT-13B shape.
constexpr paper::CostModel h200_13b{
    .step = 6.94e-3, .token = 3.25e-5, .kv = 2.29e-7, .sequence = 1.53e-5, .paged = 1, .copy_token = 4.6e-7};

struct Row {
    int         n_replicas = 0;
    Policy      policy     = Policy::random;
    bool        measured   = false;
    FleetResult result;
};

FleetOptions options_for(const ReplicasArguments& a, int n_replicas, Policy policy) {
    FleetOptions o;
    o.policy       = policy;
    o.n_replicas   = n_replicas;
    o.n_slots      = a.slots;
    o.seconds      = a.seconds;
    o.warm_up      = a.seconds / 3;
    o.seed         = std::uint32_t(a.seed);
    o.chats.n_open = a.chats;
    o.chats.think  = a.think;
    o.chats.scale  = a.scale;
    return o;
}

void print(const Row& r) {
    std::printf("| %8d | %-12s | %-9s | %8d | %8.1f %% | %7.2f | %9.0f | %9.0f | %9.1f | %9.1f |\n", r.n_replicas,
                std::string(name_of(r.policy)).c_str(), r.measured ? "measured" : "simulated", r.result.n_rounds,
                100 * r.result.hit, r.result.balance, 1e3 * r.result.ttft_mean, 1e3 * r.result.ttft_p99,
                1e3 * r.result.latency_mean, 1e3 * r.result.latency_p99);
    std::fflush(stdout);
}

Json to_json(const Row& r) {
    const FleetResult& f = r.result;
    return {{"replicas", r.n_replicas},
            {"policy", name_of(r.policy)},
            {"measured", r.measured},
            {"rounds", f.n_rounds},
            {"hit", f.hit},
            {"balance", f.balance},
            {"ttft_mean", f.ttft_mean},
            {"ttft_p99", f.ttft_p99},
            {"latency_mean", f.latency_mean},
            {"latency_p99", f.latency_p99}};
}

std::string plot(std::span<const Row> rows) {
    struct Panel {
        const char* title;
        double (*value)(const FleetResult&);
    };
    constexpr std::array<Panel, 3> panels{
        Panel{"found in a cache, % of the prompts", [](const FleetResult& f) { return 100 * f.hit; }},
        Panel{"TTFT, p99, ms", [](const FleetResult& f) { return 1e3 * f.ttft_p99; }},
        Panel{"busiest server over the mean", [](const FleetResult& f) { return f.balance; }}};
    std::vector<paper::LinePanel> out;
    for (const Panel& panel : panels) {
        paper::LinePanel to{.title = panel.title, .x_label = "servers", .y_label = "", .lines = {}};
        to.log_x = true;
        for (int policy = 0; policy < 4; policy++) {
            paper::Line line{.name = std::string(name_of(Policy(policy))), .points = {}, .colour = policy};
            for (const Row& r : rows)
                if (r.policy == Policy(policy) && !r.measured)
                    line.points.emplace_back(r.n_replicas, panel.value(r.result));
            if (!line.points.empty()) to.lines.push_back(std::move(line));
        }
        out.push_back(std::move(to));
    }
    return paper::line_chart(out, 3);
}

} // namespace

int replicas(const ReplicasArguments& a) {
    for (const std::string& output : {a.json, a.svg})
        if (auto ok = check_not_input(output, Gguf::files(a.model)); !ok) return complain(ok.error());
    paper::CostModel cost = h200_13b;
    if (!a.costs.empty()) {
        const Result<paper::MeasuredCosts> costs = paper::load_costs(a.costs);
        if (!costs) return complain(costs.error());
        cost = costs->cost;
    }
    std::vector<Row> rows;
    for (int n : a.replicas)
        for (const std::string& policy : a.policies) rows.push_back({n, *policy_named(policy), false, {}});
    std::printf(
        "|  servers | policy       |           |   rounds |  in cache | busiest |  TTFT, ms |       p99 | ms/token  "
        "|       p99 |\n| -------: | ------------ | --------- | -------: | --------: | ------: | --------: | "
        "--------: | --------: | --------: |\n");
    if (!a.model.empty()) {
        std::vector<Row> measured;
        for (const Row& r : rows) {
            FleetOptions          o     = options_for(a, r.n_replicas, r.policy);
            Result<MeasuredFleet> fleet = MeasuredFleet::load(a.model, a.device, o); // anew: with empty caches
            if (!fleet) return complain(fleet.error());
            const Result<paper::CostModel> costs  = fleet->costs();
            const Result<FleetResult>      result = costs ? fleet->run(o) : std::unexpected(costs.error());
            if (!result) return complain(result.error());
            measured.push_back({r.n_replicas, r.policy, true, *result});
            measured.push_back({r.n_replicas, r.policy, false, simulate_fleet(o, *costs)});
            print(measured[measured.size() - 2]);
            print(measured.back());
        }
        rows = std::move(measured);
    } else {
        std::vector<bool> done(rows.size(), false);
        std::size_t       n_printed = 0;
        std::mutex        mutex;
        ThreadPool        pool(a.threads > 0 ? a.threads : physical_cores());
        pool.run(int(rows.size()), [&](int i, int) {
            Row&              row    = rows[std::size_t(i)];
            const FleetResult result = simulate_fleet(options_for(a, row.n_replicas, row.policy), cost);
            std::scoped_lock  lock(mutex);
            row.result           = result;
            done[std::size_t(i)] = true;
            while (n_printed < rows.size() && done[n_printed]) print(rows[n_printed++]);
        });
    }
    if (!a.json.empty()) {
        Json all = Json::array();
        for (const Row& r : rows) all.push_back(to_json(r));
        const Json whole{{"seed", a.seed},   {"chats", a.chats}, {"think", a.think}, {"seconds", a.seconds},
                         {"slots", a.slots}, {"scale", a.scale}, {"rows", all}};
        if (auto ok = write_file(a.json, json_dump(whole) + "\n"); !ok) return complain(ok.error());
    }
    if (!a.svg.empty())
        if (auto ok = write_file(a.svg, plot(rows)); !ok) return complain(ok.error());
    return 0;
}

} // namespace quire::bench
