// bench: measures how fast the parts of quire are on this machine.
// Exit codes: 0, 1 (something cannot be measured: one line on stderr), 2 (wrong usage).
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include "../cuda/kernels.h"

import quire.core.base;
import quire.paging.block;
import quire.paging.block_manager;
import quire.model_file.config;
import quire.engine.engine;
import quire.tools.common.foreign_flags;
import quire.model_file.gguf;
import quire.core.json;
import quire.compute.kv_cache;
import quire.tools.bench.load_client;
import quire.tools.bench.load_report;
import quire.core.output_file;
import quire.paging.block_hash;
import quire.tools.bench.random_model;
import quire.schedule.request;
import quire.schedule.step_plan;
import quire.schedule.scheduler;
import quire.core.std;
import quire.core.tensor;
import quire.core.thread_pool;

using namespace quire;

namespace {

// One line of a table: what was measured, and the spread over the repetitions.
struct Line {
    std::string         name, unit;
    std::vector<double> samples;

    double median() const { return at(0.5); }
    double at(double quantile) const {
        std::vector<double> sorted = samples;
        std::sort(sorted.begin(), sorted.end());
        return sorted[std::size_t(quantile * double(sorted.size() - 1))];
    }
};

void print(const std::vector<Line>& lines, bool json) {
    if (json) {
        Json out = Json::array();
        for (const Line& l : lines)
            out.push_back(
                Json{{"name", l.name}, {"unit", l.unit}, {"median", l.median()}, {"min", l.at(0)}, {"max", l.at(1)}});
        std::printf("%s\n", json_dump(out).c_str());
        return;
    }
    std::printf("| %-58s | %9s | %9s | %9s | unit |\n| %s | --------: | --------: | --------: | --- |\n", "", "median",
                "min", "max", std::string(58, '-').c_str());
    for (const Line& l : lines)
        std::printf("| %-58s | %9.4g | %9.4g | %9.4g | %s |\n", l.name.c_str(), l.median(), l.at(0), l.at(1),
                    l.unit.c_str());
}

// -- bookkeeping: the scheduler and the block manager without any model

// 256 decoding sequences of some hundred tokens and a queue behind them.
Line steps(int n_running, int n_waiting, int repetitions) {
    SchedulerOptions o;
    o.block_size       = 16;
    o.context          = 4096;
    o.max_sequences    = n_running;
    o.max_batch_tokens = 1 << 20; // all prompts in the first step
    o.max_logit_rows   = n_running;
    o.n_blocks         = n_running * 128;
    Scheduler    scheduler(o);
    StepPlan     plan;
    std::mt19937 random(1);
    auto         request = [&] {
        Request r;
        for (int i = 0; i < 500; i++) r.prompt.push_back(int(random() % 32000));
        r.max_tokens = 3000;
        return r;
    };
    for (int i = 0; i < n_running + n_waiting; i++) scheduler.add(RequestId(i) + 1, request());
    const auto step = [&] {
        const auto items = scheduler.schedule(plan);
        scheduler.commit();
        for (const Scheduled& item : items) {
            item.group->prompt_done = true;
            scheduler.append(*item.sequence, Token(random() % 32000));
        }
    };
    for (int i = 0; i < 20; i++) step();
    check(scheduler.n_running() == n_running && scheduler.n_waiting() == n_waiting, "the load is not the one wanted");
    Line line{cat("one step, ", n_running, " running, ", n_waiting, " waiting"), "µs", {}};
    for (int i = 0; i < repetitions; i++) {
        Stopwatch     watch;
        constexpr int n = 16; // over which every sequence gets its share of new blocks
        for (int k = 0; k < n; k++) step();
        line.samples.push_back(watch.seconds() * 1e6 / n);
    }
    return line;
}

// Millions of operations per second of `operation`, which does `n` of them.
Line rate(std::string name, int repetitions, int n, const std::function<void()>& operation) {
    Line line{std::move(name), "M/s", {}};
    operation(); // warm
    for (int i = 0; i < repetitions; i++) {
        Stopwatch watch;
        operation();
        line.samples.push_back(n / watch.seconds() / 1e6);
    }
    return line;
}

int blocks(int repetitions, bool json) {
    std::vector<Line> lines;
    for (int waiting : {0, 100, 10'000}) lines.push_back(steps(256, waiting, repetitions));
    lines.push_back(steps(1, 0, repetitions));

    constexpr int      n = 4096, size = 16;
    BlockManager       m({n, size, n, {}});
    std::vector<Token> tokens(n * size);
    std::mt19937       random(2);
    for (Token& t : tokens) t = int(random() % 32000);
    BlockMoves moves;
    lines.push_back(rate("take and give back a block", repetitions, n, [&] {
        const TableId t = m.open_table();
        for (int i = 0; i < n; i++) m.allocate_slots(t, i * size, size);
        m.close_table(t);
    }));
    lines.push_back(rate("append a token", repetitions, n * size, [&] {
        const TableId t = m.open_table();
        for (int i = 0; i < n * size; i++) m.allocate_slots(t, i, 1);
        m.close_table(t);
    }));
    lines.push_back(rate("fork a table of 64 blocks and drop it", repetitions, 10'000, [&] {
        const TableId t = m.open_table();
        m.allocate_slots(t, 0, 64 * size);
        for (int i = 0; i < 10'000; i++) m.close_table(m.fork_table(t));
        m.close_table(t);
    }));
    const TableId cached = m.open_table();
    m.allocate(cached, tokens);
    m.will_write({cached, 0, n * size});
    m.take_moves(moves);
    m.commit();
    lines.push_back(rate("find a block by its hash, tokens compared", repetitions, n,
                         [&] { m.blocks_to_allocate({}, std::span(tokens).first(tokens.size() - 1)); }));
    lines.push_back(rate("hash a block of 16 tokens", repetitions, n, [&] {
        std::optional<BlockHash> parent;
        for (int i = 0; i < n; i++)
            parent =
                chain_hash(parent, std::span(tokens).subspan(std::size_t(i) * std::size_t(size), std::size_t(size)));
        check(parent != 0, "a hash of zero"); // or the loop would be left out
    }));
    m.close_table(cached);
    print(lines, json);
    return 0;
}

// -- whole models

struct Arguments {
    double           gpu_memory_utilization = 0.92;
    std::string      model, device = "auto", shape = "llama-1b", type = "f16", out, lengths, only, isa;
    std::vector<int> pp{512}, tg{128}, npl{1, 8, 32};
    int repetitions = 5, threads = 0, depth = 0, kv_blocks = 0, batch_tokens = 0, layers = 0, n_requests = 1000,
        max_sequences       = 256;
    int                 npp = 512, ntg = 128;
    double              bandwidth = 0, tflops = 0;
    bool                json = false, no_warmup = false, prompt_shared = false;
    std::optional<bool> pipeline;
    // compare
    std::string llama_bench, llama_batched_bench;
    int         rounds = 3;
};

int complain(const Error& error) {
    std::fprintf(stderr, "bench: %s\n", error.message.c_str());
    return 1;
}

// What a step has to move and to multiply at least.
struct Work {
    double weight_bytes = 0, parameters = 0, kv_bytes_per_token = 0;
};

Result<Work> work_of(const std::string& path) {
    Result<Gguf> file = Gguf::open(path);
    if (!file) return std::unexpected(file.error());
    Result<ModelConfig> config = read_config(*file);
    if (!config) return std::unexpected(config.error());
    Work work;
    for (const GgufTensor& t : file->tensors()) {
        if (t.name == "token_embd.weight" && file->tensor("output.weight")) continue; // one row a token
        work.weight_bytes += double(t.bytes);
        work.parameters += double(t.view().rows * t.view().cols);
    }
    work.kv_bytes_per_token = double(KvCache::bytes_per_token(*config, DType::F16));
    return work;
}

std::vector<Token> random_prompt(const Engine& engine, int n, unsigned seed) {
    std::mt19937       random(seed);
    std::vector<Token> prompt(static_cast<std::size_t>(n));
    for (Token& t : prompt) t = 259 + int(random() % unsigned(std::max(1, engine.config().vocab_size - 259)));
    for (Token& t : prompt) t = std::min(t, engine.config().vocab_size - 1);
    return prompt;
}

struct Timed {
    double prefill = 0, decode = 0; // seconds
    int    steps = 0;               // of decoding
};

// Tokens that the first of some sequences may have before the last one's prompt is read.
int head_start(int n_sequences, int n_prompt, int step_tokens) {
    return n_sequences > 1 ? int(std::int64_t(n_sequences) * n_prompt / step_tokens) + 2 : 0;
}
// .. of a step, as the engine will choose them.
int step_tokens(const Arguments& a) {
    cuda::DeviceInfo info;
    if (a.batch_tokens > 0) return a.batch_tokens;
    return a.device != "cpu" && cuda::open_device(0, info) == nullptr ? 2048 : 256;
}

// n_sequences prompts of n_prompt tokens at once, or one prompt that often, then n_tokens from each, all of them running to the
// end: the two parts timed apart.
Result<Timed> run_batch(Engine& engine, int n_sequences, int n_prompt, int n_tokens, unsigned seed,
                        bool shared = false) {
    std::vector<RequestId> ids;
    for (int i = 0; i < n_sequences; i++) {
        Request r;
        r.prompt = random_prompt(engine, std::max(n_prompt, 1), seed * 1000 + (shared ? 0 : unsigned(i)));
        r.max_tokens =
            n_tokens + 1 + (n_tokens > 0 ? head_start(n_sequences, n_prompt, engine.options().max_batch_tokens) : 0);
        r.ignore_end           = true;
        r.sampling.temperature = 0;
        Result<RequestId> id   = engine.submit(std::move(r));
        if (!id) return std::unexpected(id.error());
        ids.push_back(*id);
    }
    Timed               timed;
    std::vector<Output> events;
    std::set<RequestId> begun; // that have their first token
    Stopwatch           watch;
    while (int(begun.size()) < n_sequences && engine.step(events)) {
        for (const Output& e : events) begun.insert(e.id);
        events.clear();
    }
    timed.prefill = watch.seconds();
    watch.restart();
    for (std::size_t left = std::size_t(n_sequences) * std::size_t(n_tokens); left > 0 && engine.step(events);) {
        timed.steps++;
        for (const Output& e : events) left -= std::min(left, e.tokens.size());
        events.clear();
    }
    timed.decode = watch.seconds();
    for (RequestId id : ids) engine.cancel(id);
    while (engine.step(events)) events.clear();
    return timed;
}

EngineOptions options_of(const Arguments& a, int n_sequences, int n_tokens) {
    EngineOptions o;
    o.device                 = a.device;
    o.gpu_memory_utilization = a.gpu_memory_utilization;
    o.threads                = a.threads;
    o.isa                    = a.isa;
    o.prefix_cache           = false;
    o.max_sequences          = n_sequences;
    o.context                = n_tokens;
    o.max_batch_tokens       = a.batch_tokens > 0 ? std::max(a.batch_tokens, n_sequences) : 0;
    o.kv_blocks              = a.kv_blocks > 0 ? a.kv_blocks : n_sequences * ((n_tokens + 15) / 16 + 1);
    o.swap_blocks            = 0;
    o.pipeline               = a.pipeline;
    return o;
}

// GB/s at which `threads` cores read the mapped file, the best of some passes: what decoding can reach at most.
double read_bandwidth(const std::string& path, int threads) {
    Result<Gguf> file = Gguf::open(path);
    if (!file || file->tensors().empty()) return 0;
    std::span<const std::byte> bytes;
    for (const GgufTensor& t : file->tensors()) // a part in one piece
        if (t.bytes > bytes.size()) bytes = {static_cast<const std::byte*>(t.view().data), t.bytes};
    if (bytes.size() < (std::size_t(32) << 20)) return 0; // would measure a cache
    double            best = 0;
    std::atomic<long> sink = 0; // or nothing is read
    for (int pass = 0; pass < 6; pass++) {
        Stopwatch                watch;
        std::vector<std::thread> workers;
        const std::size_t        part = bytes.size() / std::size_t(threads) / 64 * 64;
        for (int i = 0; i < threads; i++)
            workers.emplace_back([&, i] {
                const std::byte* at      = bytes.data() + std::size_t(i) * part;
                long             sum[32] = {}, words[32];
                for (std::size_t k = 0; k + sizeof words <= part; k += sizeof words) {
                    std::memcpy(words, at + k, sizeof words);
                    for (int j = 0; j < 32; j++) sum[j] ^= words[j];
                }
                for (long v : sum) sink += v;
            });
        for (std::thread& w : workers) w.join();
        best = std::max(best, double(part) * threads / watch.seconds() / 1e9);
    }
    return best;
}

std::string limit_of(const Arguments& a, double seconds, double bytes, double flop) {
    if (a.bandwidth <= 0 && a.tflops <= 0) return "";
    const double least =
        std::max(a.bandwidth > 0 ? bytes / (a.bandwidth * 1e9) : 0, a.tflops > 0 ? flop / (a.tflops * 1e12) : 0);
    char text[32];
    std::snprintf(text, sizeof text, "%.0f %%", 100 * least / seconds);
    return text;
}

// llama-bench's columns, and the fraction of the limit: bytes of weights and KV over the bandwidth, or operations.
int model(Arguments a) {
    Result<Work> work = work_of(a.model);
    if (!work) return complain(work.error());
    const int longest =
        a.depth + std::max(*std::max_element(a.pp.begin(), a.pp.end()), *std::max_element(a.tg.begin(), a.tg.end())) +
        8;
    Stopwatch      start;
    Result<Engine> engine = Engine::load(a.model, options_of(a, 1, longest));
    if (!engine) return complain(engine.error());
    std::fprintf(stderr, "%s; loaded in %.2f s\n", engine->describe().c_str(), start.seconds());
    if (a.bandwidth <= 0 && !a.json && engine->describe().starts_with("cpu")) {
        a.bandwidth = read_bandwidth(a.model, a.threads > 0 ? a.threads : physical_cores());
        if (a.bandwidth > 0) std::fprintf(stderr, "reads %.1f GB/s\n", a.bandwidth);
    }
    Json out = Json::array();
    if (!a.json)
        std::printf(
            "| model | size | params | test | t/s | GB/s | GFLOP/s | of the limit |\n"
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n");
    const auto measure = [&](bool prompt, int n) -> Result<void> {
        std::vector<double> rates, seconds;
        for (int i = a.no_warmup ? 0 : -1; i < a.repetitions; i++) { // the first one warms up, with a few tokens
            Result<Timed> timed =
                prompt ? run_batch(*engine, 1, n, 0, unsigned(i + 2))
                       : run_batch(*engine, 1, std::max(1, a.depth), i < 0 ? std::min(n, 8) : n, unsigned(i + 2));
            if (!timed) return std::unexpected(timed.error());
            const double s = prompt ? timed->prefill : timed->decode * n / std::max(1, timed->steps);
            if (i >= 0) rates.push_back(n / s), seconds.push_back(s / n);
        }
        double mean = 0, squares = 0;
        for (double r : rates) mean += r / double(rates.size());
        for (double r : rates) squares += (r - mean) * (r - mean);
        const double      deviation = rates.size() > 1 ? std::sqrt(squares / double(rates.size() - 1)) : 0;
        const std::string test      = cat(prompt ? "pp" : "tg", n, a.depth > 0 && !prompt ? cat(" @ d", a.depth) : "");
        const double      context   = a.depth + n / 2.0;
        const double      moved     = prompt ? work->weight_bytes / n // bytes of a token
                                             : work->weight_bytes + context * work->kv_bytes_per_token;
        const std::string limit     = prompt ? limit_of(a, n / mean, work->weight_bytes, 2 * work->parameters * n)
                                             : limit_of(a, 1 / mean, moved, 0);
        const std::string name      = std::filesystem::path(a.model).filename().string();
        if (a.json)
            out.push_back(Json{{"model_filename", a.model},
                               {"model_size", work->weight_bytes},
                               {"model_n_params", work->parameters},
                               {"test", test},
                               {"avg_ts", mean},
                               {"stddev_ts", deviation},
                               {"samples_ts", rates}});
        else
            std::printf("| %s | %.2f GiB | %.2f B | %s | %.2f ± %.2f | %.1f | %.0f | %s |\n", name.c_str(),
                        work->weight_bytes / double(1 << 30), work->parameters / 1e9, test.c_str(), mean, deviation,
                        moved * mean / 1e9, 2 * work->parameters * mean / 1e9, limit.c_str());
        std::fflush(stdout);
        return {};
    };
    for (int n : a.pp)
        if (n > 0)
            if (auto ok = measure(true, n); !ok) return complain(ok.error());
    for (int n : a.tg)
        if (n > 0)
            if (auto ok = measure(false, n); !ok) return complain(ok.error());
    if (a.json) std::printf("%s\n", json_dump(out).c_str());
    return 0;
}

// llama-batched-bench's columns.
int batched(const Arguments& a) {
    Result<Work> work = work_of(a.model);
    if (!work) return complain(work.error());
    const int     most    = *std::max_element(a.npl.begin(), a.npl.end());
    EngineOptions options = options_of(a, most, a.npp + a.ntg + 8 + head_start(most, a.npp, step_tokens(a)));
    options.prefix_cache  = a.prompt_shared;
    Result<Engine> engine = Engine::load(a.model, options);
    if (!engine) return complain(engine.error());
    std::fprintf(stderr, "%s\n", engine->describe().c_str());
    if (!a.json)
        std::printf(
            "|    PP |    TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s | of "
            "the limit |\n"
            "| ----: | ----: | ---: | -----: | -------: | -------: | -------: | -------: | -------: | -------: | "
            "-----------: |\n");
    for (int n : a.npl) {
        if (Result<Timed> warm = run_batch(*engine, n, a.npp, std::min(a.ntg, 4), 1, a.prompt_shared); !warm)
            return complain(warm.error());
        Result<Timed> t = run_batch(*engine, n, a.npp, a.ntg, 2, a.prompt_shared);
        if (!t) return complain(t.error());
        const double s_pp = double(n) * a.npp / t->prefill, s_tg = double(n) * a.ntg / t->decode,
                     all   = t->prefill + t->decode;
        const double bytes = work->weight_bytes + double(n) * (a.npp + a.ntg / 2.0) * work->kv_bytes_per_token;
        if (a.json)
            std::printf("%s\n", json_dump(Json{{"pp", a.npp},
                                               {"tg", a.ntg},
                                               {"pl", n},
                                               {"t_pp", t->prefill},
                                               {"speed_pp", s_pp},
                                               {"t_tg", t->decode},
                                               {"speed_tg", s_tg}})
                                    .c_str());
        else
            std::printf("| %5d | %5d | %4d | %6d | %8.3f | %8.2f | %8.3f | %8.2f | %8.3f | %8.2f | %12s |\n", a.npp,
                        a.ntg, n, n * (a.npp + a.ntg), t->prefill, s_pp, t->decode, s_tg, all,
                        n * double(a.npp + a.ntg) / all,
                        limit_of(a, n / s_tg, bytes, 2 * work->parameters * n).c_str());
        std::fflush(stdout);
    }
    return 0;
}

// -- beside llama.cpp: both programs by turns, each in a process of its own

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

// N requests at once, of lengths from a file of JSON lines {"prompt": n, "output": n}, or drawn so that they resemble
// ShareGPT's (mean 162 in, 340 out).
int throughput(const Arguments& a) {
    std::vector<std::pair<int, int>> lengths;
    if (!a.lengths.empty()) {
        std::ifstream file(a.lengths);
        for (std::string line; std::getline(file, line) && int(lengths.size()) < a.n_requests;) {
            Result<Json> json = json_parse(line);
            if (!json || !json->is_object() || !json->value("prompt", Json()).is_number_integer() ||
                !json->value("output", Json()).is_number_integer())
                return complain({ErrorKind::input, cat(a.lengths, ": line ", lengths.size() + 1,
                                                       " is not {\"prompt\": n, \"output\": n}")});
            lengths.emplace_back(std::clamp((*json)["prompt"].get<int>(), 1, 4096),
                                 std::clamp((*json)["output"].get<int>(), 1, 4096));
        }
        if (lengths.empty()) return complain({ErrorKind::input, cat(a.lengths, " holds no lengths")});
    } else {
        // Logarithms of the lengths are about normal; cut at 1024, as the paper's are at 2048 in all, and shifted until the
        // mean is the wanted one.
        std::mt19937 random(20261121);
        const auto   draw = [&](double mean, double deviation) {
            std::normal_distribution<double> normal(0, deviation);
            std::vector<double>              logs(static_cast<std::size_t>(a.n_requests));
            for (double& x : logs) x = normal(random);
            std::vector<int> drawn(logs.size());
            for (double low = 0, high = 10; high - low > 1e-6;) {
                const double shift = (low + high) / 2;
                double       sum   = 0;
                for (std::size_t i = 0; i < logs.size(); i++)
                    sum += drawn[i] = std::clamp(int(std::exp(logs[i] + shift)), 4, 1024);
                (sum < mean * double(logs.size()) ? low : high) = shift;
            }
            return drawn;
        };
        const std::vector<int> in = draw(162, 1.25), out = draw(340, 1.05);
        for (std::size_t i = 0; i < in.size(); i++) lengths.emplace_back(in[i], out[i]);
    }
    EngineOptions o;
    o.device              = a.device;
    o.threads             = a.threads;
    o.isa                 = a.isa;
    o.max_sequences       = a.max_sequences;
    o.max_batch_tokens    = std::max(step_tokens(a), a.max_sequences);
    o.context             = 2048;
    o.kv_blocks           = a.kv_blocks;
    o.pipeline            = a.pipeline;
    Result<Engine> engine = Engine::load(a.model, o);
    if (!engine) return complain(engine.error());
    std::fprintf(stderr, "%s\n", engine->describe().c_str());
    double n_in = 0, n_out = 0;
    for (std::size_t i = 0; i < lengths.size(); i++) {
        Request r;
        r.prompt               = random_prompt(*engine, lengths[i].first, unsigned(i));
        r.max_tokens           = lengths[i].second;
        r.ignore_end           = true;
        r.sampling.temperature = 0;
        n_in += lengths[i].first, n_out += lengths[i].second;
        if (Result<RequestId> id = engine->submit(std::move(r)); !id) return complain(id.error());
    }
    std::vector<Output> events;
    Stopwatch           watch;
    while (engine->step(events)) events.clear();
    const double      s     = watch.seconds();
    const EngineStats stats = engine->stats();
    if (a.json)
        std::printf("%s\n", json_dump(Json{{"elapsed_time", s},
                                           {"num_requests", lengths.size()},
                                           {"total_num_tokens", n_in + n_out},
                                           {"requests_per_second", double(lengths.size()) / s},
                                           {"tokens_per_second", (n_in + n_out) / s},
                                           {"preemptions", stats.preemptions}})
                                .c_str());
    else
        std::printf(
            "%zu requests, mean %.0f in, %.0f out: %.2f s\nThroughput: %.2f requests/s, %.2f total tokens/s, %.2f "
            "output "
            "tokens/s\n%llu steps, %llu of them planned ahead, %llu preemptions, %.1f %% of the time no step under "
            "way\n",
            lengths.size(), n_in / double(lengths.size()), n_out / double(lengths.size()), s,
            double(lengths.size()) / s, (n_in + n_out) / s, n_out / s, static_cast<unsigned long long>(stats.steps),
            static_cast<unsigned long long>(stats.planned_ahead), static_cast<unsigned long long>(stats.preemptions),
            100 * (1 - stats.compute_seconds / s));
    return 0;
}

// -- single kernels of the GPU: bytes or operations over the time of a launch, weights and caches larger than the L2

class Gpu {
public:
    Gpu() {
        const char* why = nullptr;
        context_        = cuda::create_context(0, why);
        check(context_ != nullptr, cat("no GPU to measure on: ", why != nullptr ? why : ""));
        cuda::open_cublaslt(*context_);
        cuda::prepare_layer_kernel(*context_);
        begin_ = cuda::create_event(), end_ = cuda::create_event();
    }
    Gpu(const Gpu&)            = delete;
    Gpu& operator=(const Gpu&) = delete;
    ~Gpu() {
        clear();
        cuda::destroy_event(begin_), cuda::destroy_event(end_);
        cuda::destroy_context(context_);
    }
    cuda::Context& context() { return *context_; }
    // Random halves of about one seventieth.
    void* halves(std::size_t n) {
        static const std::vector<std::uint16_t> pattern = [] {
            std::vector<std::uint16_t>      made((std::size_t(4) << 20) | 1);
            std::mt19937                    random(1);
            std::normal_distribution<float> normal(0, 1.0f / 70);
            for (auto& h : made) h = f32_to_f16(normal(random));
            return made;
        }();
        auto* to = static_cast<std::uint16_t*>(cuda::allocate(*context_, n * 2));
        check(to != nullptr, "the GPU's memory is full");
        for (std::size_t at = 0; at < n; at += pattern.size())
            cuda::upload(to + at, pattern.data(), std::min(pattern.size(), n - at) * 2, *context_);
        return memory_.emplace_back(to);
    }
    void* ints(const std::vector<std::int32_t>& values) {
        void* to = cuda::allocate(*context_, values.size() * 4);
        cuda::upload(to, values.data(), values.size() * 4, *context_);
        return memory_.emplace_back(to);
    }
    void* zeros(std::size_t bytes) { return memory_.emplace_back(cuda::allocate(*context_, bytes)); }
    void  clear() {
        for (void* m : memory_) cuda::release(m);
        memory_.clear();
    }
    // Median seconds of one launch; `launch` gets the number of the repetition.
    double seconds(const std::function<void(int)>& launch, int each = 10) {
        std::vector<double> samples;
        for (int i = 0; i < 3; i++) launch(i);
        for (int round = 0; round < 9; round++) {
            cuda::record_event(begin_, *context_);
            for (int i = 0; i < each; i++) launch(round * each + i);
            cuda::record_event(end_, *context_);
            samples.push_back(cuda::seconds_between(begin_, end_) / each);
        }
        if (const char* error = cuda::last_error(*context_)) std::fprintf(stderr, "bench: CUDA: %s\n", error);
        std::sort(samples.begin(), samples.end());
        return samples[samples.size() / 2];
    }

private:
    cuda::Context*     context_;
    void *             begin_, *end_;
    std::vector<void*> memory_;
};

void kernel_line(const std::string& kernel, const std::string& shape, double seconds, double bytes, double flop,
                 const Arguments& a) {
    const double of = std::max(bytes / seconds / ((a.bandwidth > 0 ? a.bandwidth : 4300) * 1e9),
                               flop / seconds / ((a.tflops > 0 ? a.tflops : 790) * 1e12));
    std::printf("| %-18s | %-28s | %9.1f | %6.2f | %7.1f | %5.0f %% |\n", kernel.c_str(), shape.c_str(), seconds * 1e6,
                bytes / seconds / 1e12, flop / seconds / 1e12, 100 * of);
    std::fflush(stdout);
}

// What stands between two attentions of a layer of the 13 B shape, as one kernel.
void dense_kernels(Gpu& gpu, const Arguments& a) {
    if (!std::string_view("dense").starts_with(a.only)) return;
    constexpr std::int64_t hidden = 5120, ff = 13824, most = cuda::max_layer_kernel_rows;
    const auto halves   = [&](std::int64_t n) { return static_cast<cuda::Half*>(gpu.halves(std::size_t(n))); };
    auto *     attended = halves(most * hidden), *delta = halves(most * hidden), *normed = halves(most * hidden),
         *gate = halves(most * ff), *up = halves(most * ff), *q = halves(most * hidden), *k = halves(most * hidden),
         *v        = halves(most * hidden);
    auto *residual = static_cast<float*>(gpu.zeros(most * hidden * 4)),
         *norm     = static_cast<float*>(gpu.zeros(hidden * 4));
    struct Layer {
        cuda::Projection o, gate, up, down, q, k, v;
    };
    const auto product = [&](std::int64_t rows, std::int64_t cols, cuda::Half* out) {
        cuda::Projection p;
        p.weight.rows = rows, p.weight.cols = cols, p.weight.data = halves(rows * cols), p.out = out;
        return p;
    };
    std::vector<Layer> layers;
    for (int i = 0; i < 4; i++)
        layers.push_back({product(hidden, hidden, delta), product(ff, hidden, gate), product(ff, hidden, up),
                          product(hidden, ff, delta), product(hidden, hidden, q), product(hidden, hidden, k),
                          product(hidden, hidden, v)});
    const double weights = double(4 * hidden * hidden + 3 * hidden * ff);
    for (int n : {4, 8, 16, 32, 64, 128}) {
        const auto run = [&](const Layer& l) {
            cuda::Operation ops[6];
            const auto      products = [&](cuda::Operation& op, const void* x,
                                      std::initializer_list<cuda::Projection> list) {
                op.kind = cuda::Operation::gemm, op.x = x, op.rows = n, op.cols = list.begin()->weight.cols;
                for (const cuda::Projection& p : list) op.projection[op.n_projections++] = p;
            };
            for (cuda::Operation* op : {&ops[1], &ops[4]}) {
                op->kind = cuda::Operation::norm, op->x = delta, op->residual = residual, op->norm_weight = norm;
                op->eps = 1e-5f, op->out = normed, op->rows = n, op->cols = hidden;
            }
            products(ops[0], attended, {l.o});
            products(ops[2], normed, {l.gate, l.up});
            ops[2].kind = cuda::Operation::gated_gemm;
            products(ops[3], gate, {l.down});
            products(ops[5], normed, {l.q, l.k, l.v});
            return cuda::run_layer_kernel(ops, 6, n, {}, gpu.context());
        };
        if (run(layers[0]) == 0) break;
        const double s = gpu.seconds([&](int i) { run(layers[std::size_t(i) % layers.size()]); });
        kernel_line("dense f16", cat(n, " rows, a layer of 13 B"), s, weights * 2, 2 * n * weights, a);
    }
    gpu.clear();
}

// The products of a layer of the 13 B shape with a prompt's rows, by our kernel and by cuBLASLt: for some tenths of a second,
// so that the card is as warm as in use.
void prompt_kernels(Gpu& gpu, const Arguments& a) {
    if (!std::string_view("prompt").starts_with(a.only)) return;
    constexpr std::int64_t hidden = 5120, ff = 13824, most = 2048;
    constexpr int          n_layers = 4;
    const auto halves = [&](std::int64_t n) { return static_cast<cuda::Half*>(gpu.halves(std::size_t(n))); };
    auto *     x = halves(most * hidden), *wide = halves(most * ff), *gate = halves(2 * most * ff),
         *qkv = halves(3 * most * hidden), *delta = halves(most * hidden);
    struct Products {
        const char*       name;
        std::int64_t      rows, cols;
        int               n;
        bool              gated;
        const cuda::Half* x;
        cuda::Half *      out, *weight[n_layers] = {};
    };
    Products all[] = {{"q, k, v", hidden, hidden, 3, false, x, qkv},
                      {"o", hidden, hidden, 1, false, x, delta},
                      {"gate, up, SwiGLU", ff, hidden, 2, true, x, gate},
                      {"down", hidden, ff, 1, false, wide, delta}};
    for (Products& p : all)
        for (auto& w : p.weight) w = halves(p.rows * p.cols * p.n);
    std::set<std::pair<std::int64_t, std::int64_t>> tuned; // rows of a matrix, of x
    for (std::int64_t n : {256, 512, 1024, 2048}) {
        const auto ours = [&](const Products& p, int layer) {
            cuda::Operation op;
            op.kind = p.gated ? cuda::Operation::gated_gemm : cuda::Operation::gemm;
            op.x = p.x, op.rows = n, op.cols = p.cols, op.n_projections = p.n;
            for (int i = 0; i < p.n; i++) {
                op.projection[i].weight.rows = p.rows, op.projection[i].weight.cols = p.cols;
                op.projection[i].weight.data = p.weight[layer] + i * p.rows * p.cols;
                op.projection[i].out         = p.out + i * n * p.rows;
            }
            return cuda::match_prefill_gemm(&op, 1, gpu.context()) > 0 &&
                   cuda::run_prefill_gemm(&op, 1, {}, gpu.context()) == 1;
        };
        const auto theirs = [&](const Products& p, int layer) {
            const cuda::CublasltShape shape{p.rows, p.cols, false, p.n, p.rows * p.cols, n * p.rows};
            if (tuned.insert({p.rows, n}).second) cuda::tune_cublaslt(shape, p.weight[layer], n, n, gpu.context());
            const bool ran = cuda::cublaslt_gemm(p.x, n, p.weight[layer], shape, p.out, gpu.context());
            if (p.gated) cuda::silu_mul(p.out, p.out + n * p.rows, n * p.rows, gpu.context());
            return ran;
        };
        const auto line = [&](const char* kernel, const std::string& what, double weights, const auto& multiply) {
            if (!multiply(0)) return;
            const double s = gpu.seconds([&](int i) { multiply(i % n_layers); }, n == most ? 60 : 20);
            kernel_line(cat(kernel, " f16"), cat(n, " rows, ", what), s, weights * 2, 2 * double(n) * weights, a);
        };
        const auto each = [&](const char* kernel, const auto& multiply) {
            double total = 0;
            for (const Products& p : all) {
                const double weights = double(p.rows * p.cols * p.n);
                total += weights;
                line(kernel, p.name, weights, [&](int layer) { return multiply(p, layer); });
            }
            line(kernel, "a layer of 13 B", total, [&](int layer) {
                return std::ranges::all_of(all, [&](const Products& p) { return multiply(p, layer); });
            });
        };
        each("prompt", ours);
        each("prompt, cuBLASLt", theirs);
    }
    gpu.clear();
}

// The kernels that move a step's activations, blocks and logits, by the bytes that they cannot do without.
void small_kernels(Gpu& gpu, const Arguments& a) {
    const auto wanted = [&](std::string_view name) { return name.starts_with(a.only); };
    const auto halves = [&](std::size_t n) { return static_cast<cuda::Half*>(gpu.halves(n)); };
    const auto floats = [&](std::size_t n) { return static_cast<float*>(gpu.zeros(n * 4)); };
    const auto line   = [&](const char* name, const std::string& shape, double bytes,
                          const std::function<void()>& launch) {
        if (wanted(name)) kernel_line(name, shape, gpu.seconds([&](int) { launch(); }), bytes, 0, a);
        gpu.clear();
    };
    constexpr std::size_t hidden = 5120, ff = 13824, heads = 40, D = 128, vocab = 32000, block = 16;
    for (const std::size_t T : {std::size_t(8), std::size_t(64), std::size_t(2048)}) {
        const auto n = std::int64_t(T);
        if (wanted("norm")) {
            auto *x = halves(T * hidden), *out = halves(T * hidden);
            auto *residual = floats(T * hidden), *weight = floats(hidden);
            line("norm", cat(T, " × ", hidden), double(T * hidden) * 12, [&] {
                cuda::norm(x, false, weight, nullptr, 1e-5f, residual, out, n, std::int64_t(hidden), gpu.context());
            });
        }
        if (wanted("swiglu")) {
            auto *gate = halves(T * ff), *up = halves(T * ff);
            line("swiglu", cat(T, " × ", ff), double(T * ff) * 6,
                 [&] { cuda::silu_mul(gate, up, std::int64_t(T * ff), gpu.context()); });
        }
        if (wanted("rope + store")) {
            std::vector<std::int32_t> numbers(T);
            std::iota(numbers.begin(), numbers.end(), 0);
            cuda::Plan plan;
            plan.positions = plan.slots = static_cast<std::int32_t*>(gpu.ints(numbers));
            cuda::RopeStore r;
            r.q = halves(T * hidden), r.k = halves(T * hidden), r.v = halves(T * hidden);
            r.cache_k = halves((T + block) * hidden), r.cache_v = halves((T + block) * hidden);
            r.inv_freq = floats(D / 2), r.n_pairs = int(D / 2), r.n_heads = r.n_kv_heads = int(heads);
            r.head_dim = int(D), r.block_size = int(block);
            line("rope + store", cat(T, ", heads ", heads), double(T * hidden) * 12,
                 [&] { cuda::rope_and_store(r, plan, n, gpu.context()); });
        }
    }
    if (wanted("copy blocks")) { // of 40 layers
        constexpr std::size_t    n_arrays = 80, n_copies = 16, bytes = block * hidden * 2;
        std::vector<const void*> arrays;
        for (std::size_t i = 0; i < n_arrays; i++) arrays.push_back(gpu.zeros(2 * n_copies * bytes));
        void* bases = gpu.zeros(n_arrays * sizeof(void*));
        cuda::upload(bases, static_cast<const void*>(arrays.data()), n_arrays * sizeof(void*), gpu.context());
        std::vector<std::int32_t> pairs;
        for (int i = 0; i < int(n_copies); i++) pairs.insert(pairs.end(), {i, int(n_copies) + i});
        const auto*      list = static_cast<std::int32_t*>(gpu.ints(pairs));
        cuda::BlockPools pools;
        pools.from = static_cast<const void**>(bases), pools.to = static_cast<void**>(bases);
        pools.n_arrays = int(n_arrays), pools.block_bytes = bytes;
        line("copy blocks", cat(n_copies, " of 40 layers"), double(n_copies * n_arrays * bytes) * 2,
             [&] { cuda::copy_blocks(pools, list, int(n_copies), gpu.context()); });
    }
    constexpr std::size_t rows = 64;
    if (wanted("argmax")) {
        auto* logits = floats(rows * vocab);
        auto* best   = static_cast<std::int32_t*>(gpu.zeros(rows * 4));
        line("argmax", cat(rows, " × ", vocab), double(rows * vocab) * 4,
             [&] { cuda::argmax(logits, best, std::int64_t(rows), std::int64_t(vocab), gpu.context()); });
    }
    if (wanted("sample")) {
        std::mt19937                    random(1);
        std::normal_distribution<float> normal(0, 3);
        std::vector<float>              values(rows * vocab);
        for (float& v : values) v = normal(random);
        auto* logits = floats(rows * vocab);
        cuda::upload(logits, values.data(), values.size() * 4, gpu.context());
        std::vector<cuda::SampleTask> tasks(rows);
        std::vector<double>           draws(rows);
        for (std::size_t i = 0; i < rows; i++) {
            cuda::SampleTask& t = tasks[i];
            t.row = t.first_draw = int(i), t.first_out = int(2 * i), t.n_draws = 1;
            t.temperature = 0.8f, t.top_k = 40, t.top_p = 0.95f;
            draws[i] = double(random()) / 4294967296.0;
        }
        auto* list    = static_cast<cuda::SampleTask*>(gpu.zeros(rows * sizeof(cuda::SampleTask)));
        auto* numbers = static_cast<double*>(gpu.zeros(rows * 8));
        cuda::upload(list, tasks.data(), rows * sizeof(cuda::SampleTask), gpu.context());
        cuda::upload(numbers, draws.data(), rows * 8, gpu.context());
        auto* answers = static_cast<std::int32_t*>(gpu.zeros(rows * 16));
        line("sample", cat(rows, " × ", vocab, ", top_k 40"), double(rows * vocab) * 4, [&] {
            cuda::sample(logits, std::int64_t(vocab), list, int(rows), nullptr, numbers, answers, gpu.context());
        });
    }
}

int kernels(const Arguments& a) {
    cuda::DeviceInfo info;
    if (const char* why = cuda::open_device(0, info))
        return complain({ErrorKind::system, cat("no GPU to measure: ", why)});
    std::printf(
        "%s\n\n| kernel | shape | µs | TB/s | TFLOP/s | of the limit |\n| --- | --- | ---: | ---: | ---: | ---: |\n",
        info.name);
    Gpu        gpu;
    const auto wanted = [&](std::initializer_list<std::string_view> names) {
        return std::ranges::any_of(names, [&](std::string_view name) { return name.starts_with(a.only); });
    };
    struct Matrix {
        int rows, cols;
    };
    for (const auto& [form, name, bits] :
         {std::tuple(cuda::WeightForm::f16, "f16", 16.0), std::tuple(cuda::WeightForm::i8, "q8_0", 8.5),
          std::tuple(cuda::WeightForm::q4_k, "q4_k", 4.5)})
        for (auto [rows, cols] :
             {Matrix{5120, 5120}, Matrix{15360, 5120}, Matrix{13824, 5120}, Matrix{5120, 13824}, Matrix{32000, 5120}})
            for (int n : {1, 2, 4, 8, 16, 32, 64}) {
                if (n > 1 && rows != 13824 && (rows != 5120 || n == 2 || n == 4)) continue;
                if (!wanted({"vector", "batch", "cuBLASLt"}) || (a.only == "vector" && n > cuda::max_gemv_rows))
                    continue;
                const double              bytes  = double(rows) * cols * bits / 8;
                const int                 copies = std::max(1, int(400e6 / bytes)); // more than the L2 holds
                cuda::Weight              w;
                std::vector<cuda::Weight> all;
                for (int i = 0; i < copies; i++) {
                    w.form = form, w.rows = rows, w.cols = cols;
                    w.data = gpu.halves(std::size_t(bytes / 2) + 64);
                    w.scales =
                        form == cuda::WeightForm::i8 ? gpu.halves(std::size_t(rows) * std::size_t(cols) / 32) : nullptr;
                    all.push_back(w);
                }
                auto *x         = static_cast<cuda::Half*>(gpu.halves(std::size_t(64) * std::size_t(cols))),
                     *out       = static_cast<cuda::Half*>(gpu.halves(std::size_t(64) * std::size_t(rows)));
                const auto line = [&](const char* kernel, const auto& product) {
                    if (!std::string_view(kernel).starts_with(a.only)) return;
                    const double s = gpu.seconds([&](int i) { product(all[std::size_t(i % copies)]); });
                    kernel_line(cat(kernel, " ", name), cat(n, " × ", cols, " → ", rows), s, bytes,
                                2.0 * n * double(rows) * double(cols), a);
                };
                const auto products = [&](const cuda::Weight& weight, auto multiply) {
                    const cuda::Projection p{weight, nullptr, out, false};
                    multiply(&p);
                };
                if (n <= cuda::max_gemv_rows)
                    line("vector", [&](const cuda::Weight& weight) {
                        products(weight, [&](const cuda::Projection* p) {
                            cuda::gemv(x, n, cols, p, 1, false, gpu.context());
                        });
                    });
                if (n > 1)
                    line("batch", [&](const cuda::Weight& weight) {
                        products(weight, [&](const cuda::Projection* p) {
                            cuda::skinny_gemm(x, n, cols, p, 1, gpu.context());
                        });
                    });
                if (n > 4 && form == cuda::WeightForm::f16) {
                    const cuda::CublasltShape shape{rows, cols};
                    const auto                values = [](const cuda::Weight& weight) {
                        return static_cast<const cuda::Half*>(weight.data);
                    };
                    cuda::tune_cublaslt(shape, values(w), n, n, gpu.context());
                    line("cuBLASLt", [&](const cuda::Weight& weight) {
                        cuda::cublaslt_gemm(x, n, values(weight), shape, out, gpu.context());
                    });
                }
                gpu.clear();
            }
    struct Shape {
        int sequences, context, heads, kv_heads;
    };
    constexpr int D = 128, block = 16;
    for (auto [S, L, H, K] :
         {Shape{1, 4096, 40, 40}, Shape{1, 16384, 40, 40}, Shape{8, 1024, 40, 40}, Shape{32, 1024, 40, 40},
          Shape{64, 512, 40, 40}, Shape{128, 1024, 40, 40}, Shape{8, 4096, 32, 8}, Shape{64, 2048, 32, 8},
          Shape{128, 4096, 32, 8}, Shape{256, 1024, 32, 8}})
        for (int size : {block, L}) { // paged; and contiguous, as one block a sequence
            if (!wanted({"decode"})) continue;
            const int                 per = L / size;
            std::vector<std::int32_t> table, starts, positions, items, short_items;
            std::mt19937              random(3);
            for (int i = 0; i < S * per; i++) table.push_back(i);
            std::shuffle(table.begin(), table.end(), random);
            for (int s = 0; s < S; s++) {
                starts.push_back(s * per);
                positions.push_back(L - 1);
                const auto lengths = cuda::split_lengths(gpu.context(), D, std::int64_t(S) * L * K);
                const auto cut     = [&](int chunk, std::vector<std::int32_t>& to) {
                    const auto [chunks, length] = cuda::splits_of(L, chunk);
                    for (int c = 0; c < chunks; c++)
                        to.insert(to.end(), {s, s * per, c * length, std::min(L, (c + 1) * length), chunks, c, 0});
                };
                cut(lengths.length, items);
                if (lengths.short_length > 0) cut(lengths.short_length, short_items);
            }
            const int n_items = int(items.size() / 7);
            items.insert(items.end(), short_items.begin(), short_items.end());
            cuda::Plan plan;
            plan.block_tables = static_cast<std::int32_t*>(gpu.ints(table));
            plan.table_start  = static_cast<std::int32_t*>(gpu.ints(starts));
            plan.positions    = static_cast<std::int32_t*>(gpu.ints(positions));
            plan.items = {static_cast<cuda::SplitKvItem*>(gpu.ints(items)), n_items, int(short_items.size() / 7)};
            const std::size_t            n      = std::size_t(S) * std::size_t(L) * std::size_t(K) * D;
            const double                 bytes  = double(n) * 4;
            const int                    copies = std::max(1, int(400e6 / bytes));
            std::vector<cuda::Attention> all;
            for (int i = 0; i < copies; i++) {
                cuda::Attention t;
                t.q       = static_cast<cuda::Half*>(gpu.halves(std::size_t(S) * std::size_t(H) * D));
                t.out     = static_cast<cuda::Half*>(gpu.zeros(std::size_t(S) * std::size_t(H) * D * 2));
                t.cache_k = static_cast<cuda::Half*>(gpu.halves(n));
                t.cache_v = static_cast<cuda::Half*>(gpu.halves(n));
                t.n_heads = H, t.n_kv_heads = K, t.head_dim = D, t.block_size = size, t.scale = 0.088f;
                all.push_back(t);
            }
            auto*        partial = static_cast<float*>(gpu.zeros(items.size() / 7 * std::size_t(H) * (D + 2) * 4));
            auto*        tickets = static_cast<std::int32_t*>(gpu.zeros(std::size_t(S) * std::size_t(H) * 4));
            const double s       = gpu.seconds([&](int i) {
                cuda::attention_decode(all[std::size_t(i % copies)], plan, partial, tickets, gpu.context());
            });
            kernel_line(size == block ? "decode paged 16" : "decode contiguous",
                        cat(S, " × ", L, ", heads ", H, "/", K), s, bytes, 0, a);
            gpu.clear();
        }
    for (int L : {2048, 8192}) {
        if (!wanted({"prefill"})) continue;
        const int                 H = 40;
        std::vector<std::int32_t> table, positions, tiles;
        for (int i = 0; i < L / block; i++) table.push_back(i);
        for (int i = 0; i < L; i++) positions.push_back(i);
        const int tile = cuda::prefill_tile(gpu.context(), D);
        for (int row = 0; row < L; row += tile) tiles.insert(tiles.end(), {0, row, std::min(tile, L - row)});
        cuda::Plan plan;
        plan.block_tables      = static_cast<std::int32_t*>(gpu.ints(table));
        plan.table_start       = static_cast<std::int32_t*>(gpu.ints({0}));
        plan.positions         = static_cast<std::int32_t*>(gpu.ints(positions));
        const auto*       list = static_cast<cuda::PrefillTile*>(gpu.ints(tiles));
        const std::size_t n    = std::size_t(L) * H * D;
        cuda::Attention   t;
        t.q = static_cast<cuda::Half*>(gpu.halves(n)), t.cache_k = static_cast<cuda::Half*>(gpu.halves(n));
        t.cache_v = static_cast<cuda::Half*>(gpu.halves(n)), t.out = static_cast<cuda::Half*>(gpu.zeros(n * 2));
        t.n_heads = t.n_kv_heads = H, t.head_dim = D, t.block_size = block, t.scale = 0.088f;
        const double s =
            gpu.seconds([&](int) { cuda::attention_prefill(t, plan, list, int(tiles.size() / 3), gpu.context()); });
        kernel_line("prefill causal", cat(L, ", heads ", H), s, 0, 2.0 * L * L * H * D, a);
        gpu.clear();
    }
    prompt_kernels(gpu, a);
    dense_kernels(gpu, a);
    small_kernels(gpu, a);
    return 0;
}

int make_model(const Arguments& a) {
    const auto shape = std::ranges::find_if(model_shapes(), [&](const ModelShape& s) { return s.name == a.shape; });
    if (shape == model_shapes().end()) return complain({ErrorKind::input, cat("there is no shape ", quote(a.shape))});
    std::string upper = a.type;
    for (char& c : upper)
        if (c >= 'a' && c <= 'z') c = char(c - 'a' + 'A');
    const auto type = std::ranges::find_if(dtype_table, [&](const DTypeInfo& t) { return t.name == upper; });
    if (type == dtype_table.end()) return complain({ErrorKind::input, cat("there is no type ", quote(a.type))});
    ModelShape wanted = *shape;
    if (a.layers > 0) wanted.n_layers = a.layers;
    int  shown = -1;
    auto ok    = write_random_model(a.out, wanted, type->type, [&](double fraction) {
        if (const int percent = int(fraction * 100); percent / 10 != shown) {
            shown = percent / 10;
            std::fprintf(stderr, "\r%3d %%", percent);
        }
    });
    std::fprintf(stderr, "\n");
    return ok ? 0 : complain(ok.error());
}

// -- a server under load, in the words of `vllm bench serve`

struct ServeArguments {
    std::string              base_url = "http://127.0.0.1:8080", endpoint = "/v1/completions", api_key, model, dataset;
    std::string              extra_body;
    std::vector<std::string> goodput;
    int           n_prompts = 1000, n_input = 1024, n_output = 128, prefix = 0, vocabulary = 1000, n_warmups = 0;
    double        range_ratio = 0, burstiness = 1, temperature = 0, timeout = 3600, duration = 0;
    std::uint64_t seed       = 0;
    bool          ignore_eos = false, check = false, json = false;
    ReportOptions report;
};

// The first model that the server offers.
Result<std::string> first_model(const ServeArguments& a) {
    Result<LoadTarget> target = load_target(a.base_url, "/v1/models", a.api_key);
    if (!target) return std::unexpected(target.error());
    Result<std::string> text = fetch(*target);
    if (!text) return fail_with(ErrorKind::system, a.base_url, "/v1/models: ", text.error().message);
    const Result<Json> json = json_parse(*text);
    if (json && json->is_object() && json->contains("data") && (*json)["data"].is_array() && !(*json)["data"].empty() &&
        (*json)["data"][0].is_object() && (*json)["data"][0].contains("id") && (*json)["data"][0]["id"].is_string())
        return (*json)["data"][0]["id"].get<std::string>();
    return fail_with(ErrorKind::system, a.base_url, "/v1/models names no model");
}

Result<std::vector<std::string>> workload(const ServeArguments& a, bool chat) {
    WorkloadOptions o;
    o.model       = a.model;
    o.chat        = chat;
    o.ignore_eos  = a.ignore_eos;
    o.temperature = a.temperature;
    o.end_id      = a.vocabulary;
    o.first_id    = std::min(o.first_id, a.vocabulary - 1);
    o.prefix      = a.prefix;
    o.seed        = a.seed;
    if (!a.extra_body.empty()) {
        Result<Json> extra = json_parse(a.extra_body);
        if (!extra || !extra->is_object()) return fail("--extra-body is no JSON object");
        o.extra = std::move(*extra);
    }
    if (a.dataset.empty())
        return request_bodies(random_prompts(a.n_prompts, a.n_input, a.n_output, a.range_ratio, a.seed), o);
    std::ifstream file(a.dataset);
    if (!file) return fail_with(ErrorKind::system, "cannot open ", quote(a.dataset));
    Result<std::vector<LoadPrompt>> prompts = read_prompts(file, a.dataset, a.n_prompts, a.n_output);
    if (!prompts) return std::unexpected(prompts.error());
    return request_bodies(*prompts, o);
}

// The text of each different request when it runs alone.
Result<std::map<std::string_view, std::string>> texts_alone(const LoadTarget&               target,
                                                            const std::vector<std::string>& bodies, double timeout) {
    std::map<std::string_view, std::string> texts;
    for (const std::string& body : bodies) texts.emplace(body, "");
    std::vector<LoadRequest> requests;
    for (const auto& [body, text] : texts) requests.push_back({body, 0});
    LoadOptions options;
    options.max_concurrency                 = 1;
    options.request_seconds                 = timeout;
    Result<std::vector<LoadResult>> answers = run_load(target, requests, options);
    if (!answers) return std::unexpected(answers.error());
    for (std::size_t i = 0; i < requests.size(); i++) {
        if (!(*answers)[i].error.empty()) return fail_with(ErrorKind::system, (*answers)[i].error);
        texts[requests[i].body] = (*answers)[i].text;
    }
    return texts;
}

int serve(ServeArguments a) {
    Result<LoadTarget> target = load_target(a.base_url, a.endpoint, a.api_key);
    if (!target) return complain(target.error());
    Result<Goodput> goodput = parse_goodput(a.goodput);
    if (!goodput) return complain(goodput.error());
    a.report.goodput = *goodput;
    if (a.model.empty()) {
        Result<std::string> model = first_model(a);
        if (!model) return complain(model.error());
        a.model = *model;
    }
    Result<std::vector<std::string>> bodies = workload(a, a.endpoint.find("chat") != std::string::npos);
    if (!bodies) return complain(bodies.error());

    // One alone shows whether the server takes such requests at all.
    std::vector<LoadRequest>        warm(std::size_t(std::max(a.n_warmups, 1)), LoadRequest{(*bodies)[0], 0});
    LoadOptions                     options{a.report.max_concurrency, a.timeout, 0, {}};
    Result<std::vector<LoadResult>> first = run_load(*target, warm, options);
    if (!first) return complain(first.error());
    if (const std::string& why = (*first)[0].error; !why.empty())
        return complain({ErrorKind::system, cat(target->path, ": ", why)});
    std::map<std::string_view, std::string> alone;
    if (a.check) {
        Result<std::map<std::string_view, std::string>> texts = texts_alone(*target, *bodies, a.timeout);
        if (!texts) return complain(texts.error());
        alone = std::move(*texts);
    }

    const std::vector<double> times = arrival_times(int(bodies->size()), a.report.request_rate, a.burstiness, a.seed);
    std::vector<LoadRequest>  requests;
    for (std::size_t i = 0; i < bodies->size(); i++) requests.push_back({(*bodies)[i], times[i]});
    options.stop_after                      = a.duration;
    Result<std::vector<LoadResult>> results = run_load(*target, requests, options);
    if (!results) return complain(results.error());
    int n_different = 0;
    for (std::size_t i = 0; a.check && i < results->size(); i++)
        n_different += (*results)[i].error.empty() && (*results)[i].text != alone[requests[i].body];
    std::erase_if(*results, [](const LoadResult& r) { return r.end == 0; }); // not sent before the time was over

    const LoadReport report = load_report(*results, a.report);
    if (a.json) {
        Json out = render_json(report, a.report, *results);
        if (a.check) out["different_texts"] = n_different;
        std::printf("%s\n", json_dump(out).c_str());
    } else {
        std::printf("%s", render_table(report, a.report).c_str());
        if (a.check) std::printf("Texts other than those got alone: %d of %d\n", n_different, report.completed);
    }
    for (const std::string& error : report.errors) std::fprintf(stderr, "bench: %s\n", error.c_str());
    return report.completed == 0 || (a.check && (report.failed > 0 || n_different > 0)) ? 1 : 0;
}

void add_serve_flags(CLI::App* c, ServeArguments& a) {
    const CLI::Range positive(1, 1 << 24);
    c->add_option("--base-url", a.base_url)->capture_default_str();
    c->add_option("--endpoint", a.endpoint, "/v1/completions or /v1/chat/completions")->capture_default_str();
    c->add_option("--api-key", a.api_key)->envname("OPENAI_API_KEY");
    c->add_option("--model", a.model, "name of the model; default: the server's first");
    c->add_option("--num-prompts", a.n_prompts)->check(positive)->capture_default_str();
    c->add_option("--request-rate", a.report.request_rate, "requests per second; inf: all at once")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    c->add_option("--burstiness", a.burstiness,
                  "1: a Poisson process; otherwise gamma-distributed; smaller values: in bursts")
        ->check(CLI::Range(1e-3, 1e6).description("FLOAT in [0.001 - 1000000]"))
        ->capture_default_str();
    c->add_option("--max-concurrency", a.report.max_concurrency, "most requests at once")->check(positive);
    c->add_option("--dataset-path", a.dataset,
                  "JSON lines {\"prompt\": text, ids or a length} or {\"messages\": […]}, with \"output_tokens\"");
    c->add_option("--random-input-len,--input-len", a.n_input)->check(positive)->capture_default_str();
    c->add_option("--random-output-len,--output-len", a.n_output)->check(positive)->capture_default_str();
    c->add_option("--random-range-ratio", a.range_ratio, "lengths vary by this fraction")
        ->check(CLI::Range(0.0, 1.0))
        ->capture_default_str();
    c->add_option("--random-prefix-len", a.prefix, "tokens of a prefix shared by all prompts")
        ->check(CLI::Range(0, 1 << 24));
    c->add_option("--random-vocab", a.vocabulary, "random token ids are below this")
        ->check(positive)
        ->capture_default_str();
    c->add_option("--temperature", a.temperature)->check(CLI::Range(0.0, 2.0))->capture_default_str();
    c->add_flag("--ignore-eos", a.ignore_eos);
    c->add_option("--extra-body", a.extra_body, "JSON object whose members are added to every request");
    c->add_option("--num-warmups", a.n_warmups, "requests sent before the measurement; at least one is sent")
        ->check(CLI::Range(0, 1 << 20));
    c->add_option("--seed", a.seed);
    c->add_option("--goodput", a.goodput, "ttft:MS tpot:MS e2el:MS: latency limits of a good answer")->delimiter(' ');
    c->add_option("--metric-percentiles", a.report.percentiles)->delimiter(',')->check(CLI::Range(0.0, 100.0));
    c->add_option("--timeout", a.timeout, "seconds after which an answer counts as failed")->capture_default_str();
    c->add_option("--duration", a.duration, "seconds after which no more requests are sent; 0: send all");
    c->add_flag("--check", a.check,
                "first send every different request alone, then compare all texts with that answer");
    c->add_flag("--json", a.json, "print JSON with vLLM's keys instead of the table");
}

int run(int argc, char** argv) {
    CLI::App app{"Measures the parts of quire on this machine."};
    app.require_subcommand(1);
    int       repetitions = 20;
    bool      json        = false;
    CLI::App* blocks_command =
        app.add_subcommand("blocks", "scheduler, block tables and prefix cache, without a model");
    blocks_command->add_option("-r,--repetitions", repetitions, "repetitions of each line")
        ->check(CLI::Range(1, 10'000))
        ->capture_default_str();
    blocks_command->add_flag("--json", json, "print JSON instead of a Markdown table");
    Arguments  a;
    const auto model_options = [&](CLI::App* c) {
        c->add_option("-m,--model", a.model, "GGUF file")->required();
        c->add_option("--device", a.device)->check(CLI::IsMember({"auto", "cpu", "cuda"}))->capture_default_str();
        c->add_option("-t,--threads", a.threads, "threads; 0: one per physical core")->check(CLI::Range(0, 1024));
        c->add_option("--isa", a.isa, "instruction set; default: the best this CPU has")
            ->check(CLI::IsMember({"plain", "avx2", "avxvnni", "avx512"}));
        c->add_option("--gpu-memory-utilization", a.gpu_memory_utilization,
                      "fraction of the GPU's memory for weights and KV together")
            ->check(CLI::Range(0.01, 1.0))
            ->capture_default_str();
        c->add_option("-b,--batch-size", a.batch_tokens, "most tokens in a step; 0: 2048 on a GPU, 256 on a CPU")
            ->check(CLI::Range(0, 1 << 20));
        c->add_option("--kv-blocks", a.kv_blocks, "number of KV blocks; 0: as many as needed")
            ->check(CLI::Range(0, 1 << 24));
        c->add_option("--pipeline", a.pipeline,
                      "on or off: start the next step before the last one's outputs are processed");
        c->add_option("--bandwidth", a.bandwidth,
                      "this machine's memory bandwidth in GB/s, to print the fraction of the limit");
        c->add_option("--tflops", a.tflops, "this machine's TFLOP/s, to print the fraction of the limit");
        c->add_flag("--json", a.json);
        return c;
    };
    CLI::App* model_command =
        model_options(app.add_subcommand("model", "prefill and decode of one sequence, like llama-bench"));
    model_command->add_option("-p,--n-prompt", a.pp)->delimiter(',')->check(CLI::Range(0, 1 << 20));
    model_command->add_option("-n,--n-gen", a.tg)->delimiter(',')->check(CLI::Range(0, 1 << 20));
    model_command->add_option("-d,--n-depth", a.depth, "tokens of context before the generated ones")
        ->check(CLI::Range(0, 1 << 20));
    model_command->add_option("-r,--repetitions", a.repetitions)->check(CLI::Range(1, 1000))->capture_default_str();
    model_command->add_flag("--no-warmup", a.no_warmup);
    CLI::App* batched_command =
        model_options(app.add_subcommand("batched", "many sequences at once, like llama-batched-bench"));
    batched_command->add_option("--npp", a.npp, "tokens in each prompt")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    batched_command->add_option("--ntg", a.ntg, "tokens generated for each sequence")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    batched_command->add_flag("--pps", a.prompt_shared, "one prompt, shared by all sequences");
    batched_command->add_option("--npl", a.npl, "numbers of sequences")->delimiter(',')->check(CLI::Range(1, 4096));
    Arguments side; // sizes at which both have been measured three times after about two minutes
    side.repetitions = 1, side.npp = 8, side.ntg = 16, side.npl = {8, 32};
    CLI::App* compare_command =
        app.add_subcommand("compare", "quire and llama.cpp on the CPU, alternating, with the range of the ratios");
    compare_command->add_option("-m,--model", side.model, "GGUF file")->required()->check(CLI::ExistingFile);
    compare_command->add_option("--llama-bench", side.llama_bench, "path of llama-bench")
        ->required()
        ->check(CLI::ExistingFile);
    compare_command
        ->add_option("--llama-batched-bench", side.llama_batched_bench,
                     "path of llama-batched-bench; default: next to llama-bench")
        ->check(CLI::ExistingFile);
    compare_command->add_option("-t,--threads", side.threads, "threads; 0: one per physical core")
        ->check(CLI::Range(0, 1024));
    compare_command->add_option("--isa", side.isa, "instruction set; default: the best this CPU has")
        ->check(CLI::IsMember({"plain", "avx2", "avxvnni", "avx512"}));
    compare_command->add_option("-p,--n-prompt", side.pp)->delimiter(',')->check(CLI::Range(1, 1 << 20));
    compare_command->add_option("-n,--n-gen", side.tg)->delimiter(',')->check(CLI::Range(1, 1 << 20));
    compare_command->add_option("-r,--repetitions", side.repetitions, "repetitions of each test in a round")
        ->check(CLI::Range(1, 1000))
        ->capture_default_str();
    compare_command->add_option("--npp", side.npp, "tokens in each prompt of a batch")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    compare_command->add_option("--ntg", side.ntg, "tokens generated for each sequence of a batch")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    compare_command->add_option("--npl", side.npl, "numbers of sequences; 0: no batches")
        ->delimiter(',')
        ->check(CLI::Range(0, 4096));
    compare_command->add_option("--rounds", side.rounds)->check(CLI::Range(1, 100))->capture_default_str();
    CLI::App* throughput_command =
        model_options(app.add_subcommand("throughput", "many requests of different lengths, without a server"));
    throughput_command->add_option("--requests", a.n_requests)->check(CLI::Range(1, 1'000'000))->capture_default_str();
    throughput_command->add_option("--lengths", a.lengths, "JSON lines {\"prompt\": n, \"output\": n}");
    throughput_command->add_option("--max-sequences", a.max_sequences)
        ->check(CLI::Range(1, 4096))
        ->capture_default_str();
    CLI::App* kernel_command = app.add_subcommand("kernel", "single GPU kernels");
    kernel_command->add_option(
        "--only", a.only,
        "lines whose kernel begins so: vector, batch, cuBLASLt, decode, prefill, norm, swiglu, rope, copy, "
        "argmax, sample");
    kernel_command->add_option("--bandwidth", a.bandwidth, "memory bandwidth in GB/s; default 4300");
    kernel_command->add_option("--tflops", a.tflops, "TFLOP/s; default 790");
    CLI::App* make_command = app.add_subcommand("make-model", "write a model file with random weights");
    make_command->add_option("--shape", a.shape, "tiny, llama-1b, llama-3b, llama3-3b, llama-7b, llama3-8b, llama-13b")
        ->capture_default_str();
    make_command->add_option("--type", a.type, "f32, f16, bf16, q4_0, q8_0, q4_k, q5_k, q6_k")->capture_default_str();
    make_command->add_option("--layers", a.layers, "number of layers; default: the shape's")
        ->check(CLI::Range(1, 1000));
    make_command->add_option("-o,--out", a.out, "GGUF file")->required();
    ServeArguments serving;
    CLI::App*      serve_command = app.add_subcommand("serve", "a server under load, like `vllm bench serve`");
    add_serve_flags(serve_command, serving);
    const OwnFlag own = [&](const std::string& name) -> std::optional<bool> {
        for (const CLI::App* c :
             app.get_subcommands([&](const CLI::App* c) { return argc > 1 && c->check_name(argv[1]); }))
            if (const CLI::Option* option = c->get_option_no_throw(name)) return option->get_items_expected_min() > 0;
        const CLI::Option* option = app.get_option_no_throw(name);
        return option ? std::optional(option->get_items_expected_min() > 0) : std::nullopt;
    };
    const std::vector<std::string> typed(argv + 1, argv + argc);
    Result<TranslatedFlags>        flags = translate_flags(Program::bench, typed, own);
    if (!flags) {
        std::fprintf(stderr, "bench: %s\n", flags.error().message.c_str());
        return 2;
    }
    try {
        app.parse(std::vector<std::string>(flags->words.rbegin(), flags->words.rend()));
    } catch (const CLI::ParseError& e) {
        return app.exit(e) == 0 ? 0 : 2;
    }
    if (!flags->note.empty()) std::fprintf(stderr, "bench: %s\n", flags->note.c_str());
    if (model_command->parsed()) return model(a);
    if (batched_command->parsed()) return batched(a);
    if (compare_command->parsed()) return compare(side);
    if (throughput_command->parsed()) return throughput(a);
    if (kernel_command->parsed()) return kernels(a);
    if (serve_command->parsed()) return serve(std::move(serving));
    if (make_command->parsed()) return make_model(a);
    return blocks(repetitions, json);
}

} // namespace

int main(int argc, char** argv) {
    const int  code = run(argc, argv);
    const auto ok   = flush_output();
    return ok ? code : complain(ok.error());
}
