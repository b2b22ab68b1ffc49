// bench model: prefill and decode of one sequence, like llama-bench.
import quire.core.base;
import quire.core.json;
import quire.tools.common.processes;

#include "commands.h"

namespace quire::bench {

// llama-bench's columns and the fraction of the limit: the bytes of weights and KV over --bandwidth, or the operations over --tflops.
// On a CPU --bandwidth is measured: the rate of the same threads in a plain sum over the weights.
int model(Arguments a) {
    Result<Work> work = work_of(a.model, a.engine.kv_type);
    if (!work) return complain(work.error());
    const int longest =
        a.depth + std::max(*std::max_element(a.pp.begin(), a.pp.end()), *std::max_element(a.tg.begin(), a.tg.end())) +
        8;
    Stopwatch     start;
    EngineOptions options = options_of(a, 1, longest);
    if (auto ok = read_processes(options); !ok) return complain(ok.error());
    Result<Engine> engine = Engine::load(a.model, options);
    if (!engine) return complain(engine.error());
    if (engine->follows()) return follow(*engine, "bench");
    std::fprintf(stderr, "%s; loaded in %.2f s\n", engine->describe().c_str(), start.seconds());
    if (!engine->tuning().empty()) std::fprintf(stderr, "%s\n", engine->tuning().c_str());
    if (a.explain) {
        std::printf("%s", engine->explain().c_str());
        return 0;
    }
    if (a.bandwidth <= 0 && !a.json) {
        a.bandwidth = engine->weight_bandwidth() / 1e9;
        if (a.bandwidth > 0)
            std::fprintf(stderr, "the same threads sum the weights at %.1f GB/s: the limit below\n", a.bandwidth);
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
        const double      moved     = prompt ? work->bytes_read(n) / n // bytes of a token
                                             : work->bytes_read(1) + context * work->kv_bytes_per_token;
        const double      flop      = 2 * work->active_parameters();
        const std::string limit =
            prompt ? limit_of(a, n / mean, work->bytes_read(n), flop * n) : limit_of(a, 1 / mean, moved, 0);
        const std::string name = std::filesystem::path(a.model).filename().string();
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
                        moved * mean / 1e9, flop * mean / 1e9, limit.c_str());
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

} // namespace quire::bench
