// bench compare: quire and llama.cpp on the CPU, alternating, each run in a process of its own.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cstdio>

import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.core.thread_pool;

#include "commands.h"

namespace quire::bench {

namespace {

struct Ran {
    std::string out;
    double      seconds = 0;
    double      peak_mb = 0; // of resident memory
};

// A program's standard output; its standard error is dropped.
Result<Ran> run_program(std::vector<std::string> words) {
    int pipe_ends[2];
    if (pipe(pipe_ends) != 0) return fail("no pipe to be had");
    std::vector<char*> argv;
    for (std::string& w : words) argv.push_back(w.data());
    argv.push_back(nullptr);
    Stopwatch   watch;
    const pid_t child = fork();
    if (child < 0) return fail("cannot start ", words[0]);
    if (child == 0) {
        dup2(pipe_ends[1], 1);
        close(pipe_ends[0]);
        if (!std::freopen("/dev/null", "w", stderr)) _exit(127);
        execv(argv[0], argv.data());
        _exit(127);
    }
    close(pipe_ends[1]);
    Ran  ran;
    char buffer[4096];
    for (ssize_t n; (n = read(pipe_ends[0], buffer, sizeof buffer)) > 0;) ran.out.append(buffer, std::size_t(n));
    close(pipe_ends[0]);
    int    status = 0;
    rusage usage{};
    wait4(child, &status, 0, &usage);
    ran.seconds = watch.seconds();
    ran.peak_mb = double(usage.ru_maxrss) / 1024;
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) return fail(words[0], " ended without a result");
    return ran;
}

// What both were measured at: name → the values of the rounds.
struct Sides {
    std::vector<double> ours, theirs;
};

} // namespace

int compare(const Arguments& a) {
    const std::string self    = std::filesystem::read_symlink("/proc/self/exe").string();
    const std::string threads = cat(a.threads > 0 ? a.threads : physical_cores());
    const auto        list    = [](const std::vector<int>& values) {
        std::string text;
        for (int v : values) text += cat(text.empty() ? "" : ",", v);
        return text;
    };
    const int   most          = *std::max_element(a.npl.begin(), a.npl.end());
    std::string batched_bench = a.llama_batched_bench;
    if (batched_bench.empty())
        batched_bench = (std::filesystem::path(a.llama_bench).parent_path() / "llama-batched-bench").string();
    const bool batches = most > 0 && std::filesystem::exists(batched_bench);
    if (most > 0 && !batches) std::fprintf(stderr, "bench: without %s no batches\n", batched_bench.c_str());

    std::vector<std::string>     order;
    std::map<std::string, Sides> table;
    const auto                   note = [&](const std::string& name, bool ours, double value) {
        if (!table.contains(name)) order.push_back(name);
        (ours ? table[name].ours : table[name].theirs).push_back(value);
    };
    // One object a line (of an array or not), by name of the test.
    const auto read = [&](const std::string& text, bool ours) {
        std::istringstream lines(text);
        for (std::string line; std::getline(lines, line);) {
            Result<Json> json = json_parse(line);
            if (!json) continue;
            for (const Json& j : json->is_array() ? *json : Json::array({*json})) {
                if (!j.is_object()) continue;
                if (j.contains("pl")) note(cat("tg, batch ", j["pl"].get<int>()), ours, j["speed_tg"].get<double>());
                else if (j.contains("test")) note(j["test"].get<std::string>(), ours, j["avg_ts"].get<double>());
                else if (j.contains("n_gen"))
                    note(j["n_gen"].get<int>() > 0 ? cat("tg", j["n_gen"].get<int>())
                                                   : cat("pp", j["n_prompt"].get<int>()),
                         ours, j["avg_ts"].get<double>());
            }
        }
    };
    const std::vector<std::string> isa =
        a.isa.empty() ? std::vector<std::string>{} : std::vector<std::string>{"--isa", a.isa};
    const std::vector<std::string> common{"-m", a.model, "-t", threads},
        rates{"-p", list(a.pp), "-n", list(a.tg), "-r", cat(a.repetitions)},
        start{"-p", "16", "-n", "0", "-r", "1", "--no-warmup"},
        batch{"-npp", cat(a.npp), "-ntg", cat(a.ntg), "-npl", list(a.npl)};
    const auto words = [](std::initializer_list<std::vector<std::string>> parts) {
        std::vector<std::string> all;
        for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
        return all;
    };
    for (int round = 0; round < a.rounds; round++)
        for (bool ours : {false, true}) {
            const auto go = [&](std::vector<std::string> command) {
                std::fprintf(stderr, "\rround %d, %s   ", round + 1, ours ? "quire" : "llama.cpp");
                return run_program(std::move(command));
            };
            auto cold = go(ours ? words({{self, "model", "--device", "cpu"}, isa, common, start, {"--json"}})
                                : words({{a.llama_bench}, common, start, {"-o", "jsonl"}}));
            if (!cold) return complain(cold.error());
            note("process start to 16 tokens read, s", ours, cold->seconds);
            auto speed = go(ours ? words({{self, "model", "--device", "cpu"}, isa, common, rates, {"--json"}})
                                 : words({{a.llama_bench}, common, rates, {"-o", "jsonl"}}));
            if (!speed) return complain(speed.error());
            read(speed->out, ours);
            note("peak memory, MB", ours, speed->peak_mb);
            if (!batches) continue;
            auto many = go(ours ? words({{self, "batched", "--device", "cpu"},
                                         isa,
                                         common,
                                         {"--npp", cat(a.npp), "--ntg", cat(a.ntg), "--npl", list(a.npl), "--json"}})
                                : words({{batched_bench, "-m", a.model, "-t", threads, "-c",
                                          cat(most * (a.npp + a.ntg + 8)), "--output-format", "jsonl"},
                                         batch}));
            if (!many) return complain(many.error());
            read(many->out, ours);
        }
    std::fprintf(stderr, "\n");
    const auto middle = [](std::vector<double> v) {
        std::sort(v.begin(), v.end());
        return v.empty() ? 0.0 : (v[(v.size() - 1) / 2] + v[v.size() / 2]) / 2;
    };
    std::printf("| %s, %s threads | quire | llama.cpp | ratio | of the rounds |\n| --- | ---: | ---: | ---: | ---: |\n",
                std::filesystem::path(a.model).filename().c_str(), threads.c_str());
    for (const std::string& name : order) {
        const Sides& s = table[name];
        if (s.ours.size() != s.theirs.size()) continue;
        std::vector<double> ratios;
        for (std::size_t i = 0; i < s.ours.size(); i++) ratios.push_back(s.ours[i] / s.theirs[i]);
        std::printf("| %s | %.4g | %.4g | %.2f | %.2f to %.2f |\n", name.c_str(), middle(s.ours), middle(s.theirs),
                    middle(ratios), *std::min_element(ratios.begin(), ratios.end()),
                    *std::max_element(ratios.begin(), ratios.end()));
    }
    return 0;
}

} // namespace quire::bench
