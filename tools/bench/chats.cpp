// bench chats: users whose chats go on in rounds and have more K and V than the device's pool, with and without the tiers behind it: what is
// found in a cache, how long the first token takes, how many tokens run in a second.

import quire.core.base;
import quire.core.json;
import quire.core.output_file;
import quire.engine.engine;
import quire.tools.bench.paper.svg_plot;
import quire.tools.bench.replicas.chats;
import quire.tools.common.engine_flags;
import quire.tools.flags.cli;

#include "commands.h"

namespace quire::bench {

using replicas::ChatOptions;
using replicas::Chats;
using replicas::Round;

void add_chats_flags(CLI::App* c, ChatsArguments& a) {
    c->add_option("-m,--model,FILE", a.model, "GGUF file")->required();
    add_device_flags(*c, a.engine);
    add_number(*c, "-t,--threads", a.engine.threads, 0, 1024, "threads; 0: one per physical core");
    c->add_option("--working-set", a.sizes, "tokens of all open chats, as multiples of the device's pool")
        ->delimiter(',')
        ->allow_extra_args(false) // the word behind it may be the file
        ->check(within(0.1, 1000.0))
        ->capture_default_str();
    add_number(*c, "--pool", a.pool, 256, 1 << 28, "tokens that the device's pool has room for");
    add_number(*c, "--host", a.host, 0.1, 1000, "room in host memory, as a multiple of the device's pool");
    add_number(*c, "--at-once", a.at_once, 1, 4096, "questions that are answered at a time");
    add_number(*c, "--rounds", a.rounds, 1, 1000, "questions of each user that count, after the first one");
    add_number(*c, "--scale", a.scale, 0.01, 10, "of the lengths of questions and answers");
    add_number(*c, "--seed", a.seed, 0, 1 << 30);
    c->add_option("--kv-dir", a.directory, "directory for files, which is not there yet; it is deleted at the end")
        ->required();
    c->add_option("--svg", a.svg, "file for a plot of the table");
    c->add_option("--questions", a.questions,
                  "file for the questions in the order asked, so that another program can ask them "
                  "(tests/device/vllm_chats.py): JSON lines");
    c->add_flag("--json", a.json, "print JSON instead of a Markdown table");
}

namespace {

enum class Tiers : std::uint8_t { none, host, disk };
constexpr std::array<const char*, 3> tier_names{"none", "host", "host + disk"};

struct Measured {
    int                 users       = 0;
    double              working_set = 0;                      // in pools
    double              seconds = 0, prompt = 0, tokens = 0;  // tokens: of prompts and answers
    double              cached = 0, on_host = 0, on_disk = 0; // tokens of the prompts
    std::vector<double> first;                                // seconds to the first token of an answer, in order

    // The time within which that share of the answers began.
    double first_at(double share) const {
        return first[std::size_t(std::max(std::ceil(share * double(first.size())) - 1, 0.0))];
    }
};

ChatOptions chats_of(const ChatsArguments& a, const Engine& engine, int users) {
    return {.n_open     = users,
            .think      = 1e-9, // the next question waits for the other users
            .context    = engine.options().context / 2,
            .vocabulary = engine.config().vocab_size,
            .scale      = a.scale,
            .seed       = std::uint32_t(a.seed)};
}

// As many users as make up the working set, counted at their first questions.
int users_for(const ChatsArguments& a, const Engine& engine, double pools, double& working_set) {
    for (int users = 1;; users += std::max(1, users / 20)) {
        double tokens = 0;
        for (const Round& r : Chats(chats_of(a, engine, users)).first()) tokens += r.prompt + r.output;
        working_set = tokens / a.pool;
        if (working_set >= pools) return users;
    }
}

// Appends each question to `asked`: a JSON line with the number of its conversation, and the tokens of prompt and answer.
Result<Measured> run(const ChatsArguments& a, double pools, Tiers tiers, std::string& asked) {
    EngineOptions o = a.engine;
    o.kv_blocks     = a.pool / o.block_size;
    o.context       = a.pool / 2;
    o.max_sequences = a.at_once;
    o.swap_blocks   = 0;
    o.kv_host_bytes = 0;
    if (tiers != Tiers::none) {
        Result<Engine> probe = Engine::load(a.model, o); // for the bytes of a block
        if (!probe) return std::unexpected(probe.error());
        const double pool = o.kv_blocks * double(probe->block_bytes());
        o.kv_host_bytes   = std::int64_t(a.host * pool);
        // The files have room for all, also for what the chats say in their rounds.
        o.kv_disk_bytes = std::max(o.kv_disk_bytes, std::int64_t(4 * pools * a.rounds * pool));
    }
    if (tiers == Tiers::disk) o.kv_dir = a.directory;
    Result<Engine> engine = Engine::load(a.model, o);
    if (!engine) return std::unexpected(engine.error());

    Measured m;
    m.users = users_for(a, *engine, pools, m.working_set);
    Chats             chats(chats_of(a, *engine, m.users));
    std::deque<Round> questions;
    for (const Round& r : chats.first()) questions.push_back(r);
    struct Running {
        Round              round;
        std::vector<Token> text; // the prompt, and the answer as it comes
        double             asked = 0, begun = -1;
        bool               counts = false;
    };
    std::map<RequestId, Running>                          running;
    std::unordered_map<std::uint64_t, std::vector<Token>> said; // of each conversation
    std::vector<Output>                                   events;
    const Stopwatch                                       watch;
    const int n_warm = m.users, n_all = m.users * (1 + a.rounds); // the first question of each user finds nothing
    int       n_asked = 0, n_answered = 0;
    double    begin = 0;
    while (n_answered < n_all) {
        while (int(running.size()) < a.at_once && !questions.empty() && n_asked < n_all) {
            const Round        round = questions.front();
            std::vector<Token> text  = std::move(said[round.text]); // empty: it begins, maybe in the middle
            questions.pop_front();
            asked += json_dump(Json{{"working_set", m.working_set},
                                    {"counts", n_asked >= n_warm},
                                    {"text", round.text},
                                    {"prompt", round.prompt},
                                    {"output", round.output}}) +
                     "\n";
            for (int i = int(text.size()); i < round.prompt; i++) text.push_back(chats.token_at(round.text, i));
            Request r;
            r.prompt               = text;
            r.max_tokens           = round.output;
            r.ignore_end           = true;
            r.sampling.temperature = 0;
            Result<RequestId> id   = engine->submit(std::move(r));
            if (!id) return std::unexpected(id.error());
            running[*id] = {round, std::move(text), watch.seconds(), -1, n_asked++ >= n_warm};
        }
        engine->step(events);
        for (Output& e : events) {
            Running& r = running.at(e.id);
            if (r.begun < 0 && !e.tokens.empty()) r.begun = watch.seconds();
            r.text.insert(r.text.end(), e.tokens.begin(), e.tokens.end());
            if (!e.done) continue;
            if (e.finish == FinishReason::failed) return std::unexpected(Error{ErrorKind::system, e.message});
            if (++n_answered == n_warm) begin = watch.seconds();
            if (r.counts) {
                m.prompt += r.round.prompt;
                m.tokens += double(r.text.size());
                m.cached += e.cached_tokens;
                m.on_host += e.loaded_tokens - e.disk_tokens;
                m.on_disk += e.disk_tokens;
                m.first.push_back(r.begun - r.asked);
            }
            said[r.round.text] = std::move(r.text);
            questions.push_back(chats.next(r.round, 0));
            running.erase(e.id);
        }
        events.clear();
    }
    m.seconds = watch.seconds() - begin;
    std::ranges::sort(m.first);
    return m;
}

std::string plot(const Json& rows) {
    struct Panel {
        const char *title, *key;
        double      times;
    };
    std::vector<paper::LinePanel> panels;
    for (const Panel& panel : {Panel{"found in a cache, % of the prompts", "cached_share", 100},
                               Panel{"TTFT, mean, ms", "ttft_mean", 1e3}, Panel{"tok/s", "tokens_per_second", 1}}) {
        paper::LinePanel to{.title = panel.title, .x_label = "working set, pools", .y_label = "", .lines = {}};
        to.log_x = true;
        for (std::size_t tiers = 0; tiers < tier_names.size(); tiers++) {
            paper::Line line{.name = tier_names[tiers], .points = {}, .colour = int(tiers)};
            for (const Json& row : rows)
                if (row["tiers"] == tier_names[tiers])
                    line.points.emplace_back(row["working_set"].get<double>(),
                                             panel.times * row[panel.key].get<double>());
            to.lines.push_back(std::move(line));
        }
        panels.push_back(std::move(to));
    }
    return paper::line_chart(panels, 3);
}

} // namespace

int chats(const ChatsArguments& a) {
    if (std::filesystem::exists(a.directory))
        return complain({ErrorKind::input, cat("--kv-dir: ", a.directory, " is there already")});
    Json        rows = Json::array();
    std::string questions;
    if (!a.json)
        std::printf(
            "| working set | users | tiers       | in cache | of it host | of it disk | TTFT, mean, ms |   p99 | "
            "tok/s |\n| ----------: | ----: | ----------- | -------: | ---------: | ---------: | -------------: | "
            "----: | ----: |\n");
    for (const double pools : a.sizes)
        for (const Tiers tiers : {Tiers::none, Tiers::host, Tiers::disk}) {
            std::string            asked;
            const Result<Measured> m = run(a, pools, tiers, asked);
            std::error_code        gone;
            std::filesystem::remove_all(a.directory, gone);
            if (!m) return complain(m.error());
            const char* const name = tier_names[std::size_t(tiers)];
            double            sum  = 0;
            if (tiers == Tiers::none) questions += asked;
            for (double s : m->first) sum += s;
            const double mean = sum / double(m->first.size());
            rows.push_back({{"working_set", m->working_set},
                            {"users", m->users},
                            {"tiers", name},
                            {"prompt_tokens", m->prompt},
                            {"cached_tokens", m->cached},
                            {"cached_share", m->cached / m->prompt},
                            {"host_tokens", m->on_host},
                            {"disk_tokens", m->on_disk},
                            {"ttft_mean", mean},
                            {"ttft_p99", m->first_at(0.99)},
                            {"tokens_per_second", m->tokens / m->seconds}});
            if (a.json) continue;
            std::printf("| %9.1f × | %5d | %-11s | %6.1f %% | %8.1f %% | %8.1f %% | %14.0f | %5.0f | %5.0f |\n",
                        m->working_set, m->users, name, 100 * m->cached / m->prompt, 100 * m->on_host / m->prompt,
                        100 * m->on_disk / m->prompt, 1e3 * mean, 1e3 * m->first_at(0.99), m->tokens / m->seconds);
            std::fflush(stdout);
        }
    if (a.json) std::printf("%s\n", json_dump(rows).c_str());
    if (!a.svg.empty())
        if (auto ok = write_file(a.svg, plot(rows)); !ok) return complain(ok.error());
    if (!a.questions.empty())
        if (auto ok = write_file(a.questions, questions); !ok) return complain(ok.error());
    return 0;
}

} // namespace quire::bench
