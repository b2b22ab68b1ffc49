// bench throughput: many requests of different lengths, without a server.
import quire.baseline.systems;
import quire.core.base;
import quire.core.json;
import quire.engine.engine;

#include "commands.h"

namespace quire::bench {

// Submits all requests at once. Their lengths come from a file of JSON lines {"prompt": n, "output": n}, or are drawn so that they
// resemble ShareGPT's (mean 162 in, 340 out).
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
        // Log-normal lengths, cut at 1024 (the paper cuts at 2048 in all) and shifted until they have the wanted mean.
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
    EngineOptions o       = a.engine;
    o.max_sequences       = a.max_sequences;
    o.max_batch_tokens    = a.batch_tokens > 0 ? std::max(a.batch_tokens, a.max_sequences) : 0;
    o.context             = 2048;
    o.kv_blocks           = a.kv_blocks;
    o.reservations        = reservations_of(find_system(a.system).value_or(System::quire));
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
    for (double next = 10; engine->step(events); events.clear()) {
        if (watch.seconds() < next) continue;
        next += 10;
        const EngineStats now = engine->stats();
        std::fprintf(stderr, "%.0f s: %llu steps, the last of %d tokens; %d requests run, %d wait\n", watch.seconds(),
                     static_cast<unsigned long long>(now.steps), now.step_tokens, now.running, now.waiting);
    }
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
            "output tokens/s\n%llu steps, %llu of them planned ahead, %llu preemptions, %.1f %% of the time no step "
            "under way\n",
            lengths.size(), n_in / double(lengths.size()), n_out / double(lengths.size()), s,
            double(lengths.size()) / s, (n_in + n_out) / s, n_out / s, static_cast<unsigned long long>(stats.steps),
            static_cast<unsigned long long>(stats.planned_ahead), static_cast<unsigned long long>(stats.preemptions),
            100 * (1 - stats.compute_seconds / s));
    std::fflush(stdout); // before the engine gives back its memory, which takes a while
    return 0;
}

} // namespace quire::bench
