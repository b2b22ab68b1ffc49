// bench paper: makes the paper's figures again, in simulated time on any machine or in real time on this one's engine.

import quire.core.base;
import quire.core.output_file;
import quire.core.thread_pool;
import quire.tools.bench.paper.page;
import quire.tools.bench.paper.real_figures;
import quire.tools.bench.paper.simulated_figures;
import quire.tools.bench.random_model;
import quire.tools.common.engine_flags;
import quire.tools.flags.cli;

#include "commands.h"

namespace quire::bench {

using namespace quire::paper;

void add_paper_flags(CLI::App* c, PaperArguments& a) {
    c->add_option("--figure", a.figures, "2, 12 to 19, beyond (what came after the paper), or all")
        ->delimiter(',')
        ->check(CLI::IsMember({"2", "12", "13", "14", "15", "16", "17", "18", "19", "beyond", "all"}))
        ->capture_default_str();
    CLI::Option* simulate = c->add_flag("--simulate", a.simulate, "in simulated time, on a cost model; the default");
    c->add_flag("--real", a.real, "on the engine: the OPT-13B shape with random weights and 15,728 KV slots")
        ->excludes(simulate);
    c->add_option("--out", a.out, "folder for the points and the page")->capture_default_str();
    c->add_option("--page", a.page, "where to write the page; default: paper.md in the folder");
    c->add_flag("--html", a.html, "write a self-contained HTML page, too");
    c->add_flag("--again", a.again, "make figures that the folder has already");
    add_number(*c, "--seed", a.seed, 0, 1 << 30, "of the traces");
    add_number(*c, "--scale", a.scale, 0.001, 10,
               "length of the traces; 1: the paper's hour, or what fits into 25 minutes of real time");
    c->add_option("--cost", a.cost,
                  "simulate on: calibrated (to the paper's Fig. 13), first-principles, or measured (--real's)")
        ->check(CLI::IsMember({"calibrated", "first-principles", "measured"}))
        ->capture_default_str();
    c->add_option("--threads", a.threads, "threads; 0: one per physical core")->check(within(0, 1024));
    c->add_option("-m,--model", a.model,
                  "--real: GGUF file; default: opt-13b.gguf in the folder, made if it is not there");
    c->add_option("--shape", a.shape, "--real: shape of the model that is made")->capture_default_str();
    c->add_option("--device", a.device, "--real")->check(CLI::IsMember({"auto", "cpu", "cuda"}))->capture_default_str();
}

namespace {

std::string minutes(double seconds) {
    char text[32];
    std::snprintf(text, sizeof text, seconds < 90 ? "%.0f s" : "%.1f min", seconds < 90 ? seconds : seconds / 60);
    return text;
}

// Runs the tasks on some threads; reports progress on standard error.
Result<std::vector<Point>> run_tasks(std::string_view set, const std::vector<Task>& tasks, int n_threads) {
    std::vector<std::vector<Point>> parts(tasks.size());
    std::optional<Error>            error;
    std::mutex                      mutex;
    std::size_t                     n_done = 0;
    Stopwatch                       watch, last; // last: since the last line
    ThreadPool                      pool(n_threads);
    pool.run(int(tasks.size()), [&](int i, int) {
        {
            std::scoped_lock lock(mutex);
            if (error) return;
        }
        Result<std::vector<Point>> points = tasks[std::size_t(i)]();
        std::scoped_lock           lock(mutex);
        n_done++;
        if (points) parts[std::size_t(i)] = std::move(*points);
        else error = points.error();
        if (n_done < tasks.size() && last.seconds() < 1) return;
        last.restart();
        std::fprintf(stderr, "\rfigure set %.*s: %zu of %zu runs, %s, about %s left   ", int(set.size()), set.data(),
                     n_done, tasks.size(), minutes(watch.seconds()).c_str(),
                     minutes(watch.seconds() / double(n_done) * double(tasks.size() - n_done)).c_str());
    });
    std::fprintf(stderr, "\n");
    if (error) return std::unexpected(*error);
    std::vector<Point> all;
    for (auto& part : parts)
        for (Point& point : part) all.push_back(std::move(point));
    return all;
}

// The sets of points that the figures need.
std::vector<std::string_view> sets_of(const std::vector<std::string>& figures) {
    std::vector<std::string_view> sets;
    for (std::string_view set : figure_sets)
        if (std::ranges::any_of(
                figures, [&](const std::string& f) { return f == "all" || f == set || (f == "2" && set == "13"); }))
            sets.push_back(set);
    return sets;
}

int simulate_all(const PaperArguments& a, std::span<const std::string_view> sets) {
    SimulationSettings settings;
    settings.seed             = std::uint32_t(a.seed);
    settings.scale            = a.scale;
    settings.first_principles = a.cost == "first-principles";
    std::string       machine = cat("the paper's A100s, ", a.cost);
    const std::string mode    = a.cost == "calibrated" ? "simulated" : cat("simulated-", a.cost);
    if (a.cost == "measured") {
        Result<MeasuredCosts> costs = load_costs(a.out);
        if (!costs) return complain(costs.error());
        settings.measured = costs->cost;
        machine           = costs->machine;
    }
    const std::string described = cat("seed ", a.seed, ", scale ", a.scale, ", ", a.cost);
    for (std::string_view set : sets) {
        if (const auto there = load(a.out, mode, set); there && there->settings == described && !a.again) {
            std::fprintf(stderr, "figure set %.*s: is there\n", int(set.size()), set.data());
            continue;
        }
        Stopwatch                  watch;
        Result<std::vector<Point>> points =
            run_tasks(set, simulated_tasks(set, settings), a.threads > 0 ? a.threads : physical_cores());
        if (!points) return complain(points.error());
        const Points made{std::string(set),  mode, machine, described, settings.seed, watch.seconds(),
                          std::move(*points)};
        if (auto ok = save(a.out, made); !ok) return complain(ok.error());
    }
    return 0;
}

int measure_all(PaperArguments a, std::span<const std::string_view> sets) {
    if (a.model.empty()) {
        a.model = cat(a.out, "/", a.shape, ".gguf");
        if (!std::filesystem::exists(a.model)) {
            std::fprintf(stderr, "making %s\n", a.model.c_str());
            Arguments make;
            make.shape = a.shape, make.type = "f16", make.out = a.model;
            if (const int code = make_model(make); code != 0) return code;
        }
    }
    RealSettings settings;
    settings.model           = a.model;
    settings.device          = a.device;
    settings.seed            = std::uint32_t(a.seed);
    settings.scale           = a.scale;
    settings.folder          = a.out;
    settings.again           = a.again;
    settings.report          = [](const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); };
    settings.kernel_overhead = [] {
        std::vector<Point> points;
        for (const PagedOverhead& o : paged_overhead())
            points.push_back({"a",
                              cat("batch ", o.sequences, ", blocks of ", o.block_size),
                              "overhead",
                              double(o.context),
                              o.factor,
                              {}});
        return points;
    };
    if (auto ok = measure_figures(settings, sets); !ok) return complain(ok.error());
    return 0;
}

} // namespace

int paper(PaperArguments a) {
    if (!a.page.empty() && std::filesystem::path(a.page).extension() != ".md")
        return complain({ErrorKind::input, cat("--page ", a.page, ": the page is a file that ends in .md")});
    const std::vector<std::string_view> sets = sets_of(a.figures);
    std::error_code                     failed;
    std::filesystem::create_directories(a.out, failed);
    if (failed) return complain({ErrorKind::system, cat(a.out, ": ", failed.message())});
    if (const int code = a.real ? measure_all(a, sets) : simulate_all(a, sets); code != 0) return code;
    const std::string page = a.page.empty() ? cat(a.out, "/paper.md") : a.page;
    Result<void>      ok   = write_page(a.out, page, a.html);
    if (!ok) return complain(ok.error());
    std::fprintf(stderr, "%s\n", page.c_str());
    return 0;
}

} // namespace quire::bench
