// quire.tools.bench.load_report: for measuring a server: arrival times, request bodies, and the table of `vllm bench serve` with its
// definitions. Plain values. Owns nothing.
export module quire.tools.bench.load_report;

import quire.core.base;
import quire.core.json;
import quire.tools.bench.stream_reader;

export namespace quire {

// Seconds at which n requests arrive: a Poisson process of `rate` requests a second at burstiness 1, else gaps of a gamma
// distribution of that shape. They are scaled to take n / rate seconds in total. An infinite rate: all at once.
std::vector<double> arrival_times(int n, double rate, double burstiness, std::uint64_t seed);

// One request before it becomes JSON: a text, or a number of random token ids (words for chats).
struct LoadPrompt {
    Json text; // a string, token ids, messages; null: random
    int  n_prompt = 1024, n_output = 128;
};

struct WorkloadOptions {
    std::string   model;
    bool          chat = false, ignore_eos = false;
    double        temperature = 0;
    int           first_id = 259, end_id = 1000; // random ids are from [first, end)
    int           prefix = 0;                    // number of ids at the beginning that all random prompts share
    Json          extra  = Json::object();       // members of every body
    std::uint64_t seed   = 0;
};

// n lengths, each in [(1 - ratio) x, (1 + ratio) x], at least 1.
std::vector<LoadPrompt> random_prompts(int n, int n_prompt, int n_output, double ratio, std::uint64_t seed);

// JSON lines {"prompt": text, ids or a length} or {"messages": […]}, each with "output_tokens" (or "output"), where it is
// missing `n_output`. Returns n; repeats the file if it has fewer. Error: the first invalid line.
Result<std::vector<LoadPrompt>> read_prompts(std::istream& in, const std::string& name, int n, int n_output);

std::vector<std::string> request_bodies(std::span<const LoadPrompt> prompts, const WorkloadOptions& options);

// The limits for an answer to count as good, in milliseconds.
struct Goodput {
    std::optional<double> ttft, tpot, e2el;
    bool                  asked() const { return ttft || tpot || e2el; }
};
// Parses "ttft:500", "tpot:50", "e2el:2000". Error: the first invalid one.
Result<Goodput> parse_goodput(std::span<const std::string> pairs);

struct ReportOptions {
    Goodput             goodput;
    std::vector<double> percentiles     = {99};
    int                 max_concurrency = 0; // as configured; 0: none
    double              request_rate    = std::numeric_limits<double>::infinity();
};

// Mean, median, standard deviation and percentiles of a quantity, in milliseconds; zeros if there are no values.
struct Spread {
    double              mean = 0, median = 0, deviation = 0;
    std::vector<double> percentiles;
};
Spread spread(std::vector<double> seconds, std::span<const double> percentiles);

struct LoadReport {
    int                      completed = 0, failed = 0, good = 0, peak_concurrent = 0;
    std::int64_t             input_tokens = 0, output_tokens = 0;
    double                   duration = 0, peak_output_rate = 0; // seconds; pieces of text in the busiest second
    Spread                   ttft, tpot, itl, e2el;
    std::vector<std::string> errors; // different ones
};

// For the requests that were sent. The duration ends with the last answer.
LoadReport  load_report(std::span<const LoadResult> results, const ReportOptions& options);
std::string render_table(const LoadReport& report, const ReportOptions& options);
// JSON with vLLM's keys, including the keys of single requests.
Json render_json(const LoadReport& report, const ReportOptions& options, std::span<const LoadResult> results);

} // namespace quire

module :private;

namespace quire {

constexpr int width = 50;

// A distribution of the standard library may differ from machine to machine, but one machine repeats itself.
int between(std::mt19937_64& random, int least, int most) {
    return least + int(random() % std::uint64_t(std::max(most - least, 0) + 1));
}

std::string words(int n, std::mt19937_64& random) {
    // Each a token of its own in most vocabularies.
    static const std::vector<std::string_view> list = split(
        "the of and to in is that it was for on are as with his they at be this have from or one had by word but not "
        "what all");
    std::string out;
    for (int i = 0; i < n; i++)
        out += cat(i > 0 ? " " : "", list[std::size_t(between(random, 0, int(list.size()) - 1))]);
    return out;
}

std::string row(const std::string& label, const std::string& value) {
    const auto pad = [](std::size_t wanted, std::size_t n) { return std::string(wanted > n ? wanted - n : 0, ' '); };
    return cat(label, pad(40, label.size()), " ", value, pad(10, value.size()), "\n");
}
std::string measured(const std::string& label, double value) {
    char text[64];
    std::snprintf(text, sizeof text, "%.2f", value);
    return row(label, text);
}
std::string counted(const std::string& label, std::int64_t value) { return row(label, std::to_string(value)); }

std::string ruler(std::string_view title, char c) {
    const std::size_t rest = std::size_t(width) - title.size();
    return cat(std::string(rest / 2, c), title, std::string(rest - rest / 2, c), "\n");
}

double tpot_of(const LoadResult& r) {
    return r.output_tokens > 1 && !r.times.empty() ? (r.times.back() - r.times[0]) / (r.output_tokens - 1) : 0;
}
double ttft_of(const LoadResult& r) { return (r.times.empty() ? r.end : r.times[0]) - r.sent; }
double e2el_of(const LoadResult& r) { return (r.times.empty() ? r.end : r.times.back()) - r.sent; }

bool is_good(const LoadResult& r, const Goodput& g) {
    return (!g.ttft || ttft_of(r) * 1000 <= *g.ttft) && (!g.tpot || tpot_of(r) * 1000 <= *g.tpot) &&
           (!g.e2el || e2el_of(r) * 1000 <= *g.e2el);
}

// The most that were under way at once; one that ends when another begins makes place for it.
int peak_of(std::span<const LoadResult> results) {
    std::vector<std::pair<double, int>> changes;
    for (const LoadResult& r : results) {
        if (!r.error.empty()) continue;
        changes.emplace_back(r.sent, 1);
        changes.emplace_back(r.end, -1);
    }
    std::ranges::sort(changes);
    int now = 0, most = 0;
    for (const auto& [time, change] : changes) most = std::max(most, now += change);
    return most;
}

double fullest_second(std::span<const LoadResult> results) {
    std::map<int, int> pieces;
    int                most = 0;
    for (const LoadResult& r : results)
        if (r.error.empty())
            for (double t : r.times) most = std::max(most, ++pieces[int(t)]);
    return most;
}

struct Quantity {
    const char *  key, *name, *title;
    const Spread* values;
};
std::array<Quantity, 4> quantities(const LoadReport& r) {
    return {{{"ttft", "TTFT", "Time to First Token", &r.ttft},
             {"tpot", "TPOT", "Time per Output Token (excl. 1st token)", &r.tpot},
             {"itl", "ITL", "Inter-token Latency", &r.itl},
             {"e2el", "E2EL", "End-to-end Latency", &r.e2el}}};
}

double per_second(double n, const LoadReport& r) { return r.duration > 0 ? n / r.duration : 0; }

std::vector<double> arrival_times(int n, double rate, double burstiness, std::uint64_t seed) {
    std::vector<double> times(std::size_t(n), 0.0);
    if (std::isinf(rate) || n == 0) return times;
    std::mt19937_64                 random(seed);
    std::gamma_distribution<double> gap(burstiness, 1 / (rate * burstiness));
    double                          t = 0;
    for (double& time : times) time = t += gap(random);
    if (t > 0)
        for (double& time : times) time *= n / rate / t;
    return times;
}

std::vector<LoadPrompt> random_prompts(int n, int n_prompt, int n_output, double ratio, std::uint64_t seed) {
    std::mt19937_64         random(seed);
    std::vector<LoadPrompt> prompts;
    const auto              around = [&](int x) {
        return std::max(1, between(random, int(std::ceil(x * (1 - ratio))), int(std::floor(x * (1 + ratio)))));
    };
    for (int i = 0; i < n; i++) {
        const int in = around(n_prompt);
        prompts.push_back({Json(), in, around(n_output)});
    }
    return prompts;
}

Result<std::vector<LoadPrompt>> read_prompts(std::istream& in, const std::string& name, int n, int n_output) {
    std::vector<LoadPrompt> prompts;
    int                     line_number = 0;
    for (std::string line; std::getline(in, line) && int(prompts.size()) < n;) {
        line_number++;
        if (line.find_first_not_of(" \r\t") == std::string::npos) continue;
        const auto   bad  = [&](std::string_view why) { return fail(name, ": line ", line_number, ": ", why); };
        Result<Json> json = json_parse(line);
        if (!json) return bad(json.error().message);
        if (!json->is_object()) return bad("no object");
        LoadPrompt p;
        p.n_output = n_output;
        for (const char* key : {"output_tokens", "output"})
            if (const auto at = json->find(key); at != json->end()) {
                if (!at->is_number_integer() || at->get<std::int64_t>() < 1 || at->get<std::int64_t>() > 1 << 24)
                    return bad(cat(key, " is no number of tokens"));
                p.n_output = at->get<int>();
            }
        const auto messages = json->find("messages"), prompt = json->find("prompt");
        if (messages != json->end() && messages->is_array()) p.text = *messages;
        else if (prompt == json->end()) return bad("neither prompt nor messages");
        else if (prompt->is_string() || prompt->is_array()) p.text = *prompt;
        else if (prompt->is_number_integer() && *prompt > 0 && *prompt <= 1 << 24) p.n_prompt = prompt->get<int>();
        else return bad("prompt is neither text, ids nor a length");
        prompts.push_back(std::move(p));
    }
    if (prompts.empty()) return fail(name, " has no prompts");
    for (std::size_t i = 0; int(prompts.size()) < n; i++) prompts.push_back(prompts[i]);
    return prompts;
}

std::vector<std::string> request_bodies(std::span<const LoadPrompt> prompts, const WorkloadOptions& o) {
    std::mt19937_64          random(o.seed);
    std::vector<std::string> bodies;
    const auto               ids = [&](int n) {
        Json list = Json::array();
        for (int i = 0; i < n; i++) list.push_back(between(random, o.first_id, o.end_id - 1));
        return list;
    };
    const Json        prefix      = o.chat ? Json() : ids(o.prefix);
    const std::string prefix_text = o.chat && o.prefix > 0 ? words(o.prefix, random) + " " : "";
    for (const LoadPrompt& p : prompts) {
        Json body = Json::object();
        if (!o.model.empty()) body["model"] = o.model;
        if (o.chat) {
            Json       text     = p.text.is_null() ? Json(prefix_text + words(p.n_prompt, random)) : p.text;
            const bool messages = text.is_array() && !text.empty() && text[0].is_object();
            body["messages"]    = messages ? text : Json::array({Json{{"role", "user"}, {"content", text}}});
        } else {
            body["prompt"] = p.text;
            if (p.text.is_null()) {
                body["prompt"] = prefix;
                for (const Json& id : ids(p.n_prompt)) body["prompt"].push_back(id);
            }
        }
        body[o.chat ? "max_completion_tokens" : "max_tokens"] = p.n_output;
        body["temperature"]                                   = o.temperature;
        body["stream"]                                        = true;
        body["stream_options"]                                = Json{{"include_usage", true}};
        if (o.ignore_eos) body["ignore_eos"] = true;
        for (auto at = o.extra.begin(); at != o.extra.end(); ++at) body[at.key()] = at.value();
        bodies.push_back(json_dump(body));
    }
    return bodies;
}

Result<Goodput> parse_goodput(std::span<const std::string> pairs) {
    Goodput g;
    for (const std::string& pair : pairs) {
        const std::size_t colon = std::min(pair.find(':'), pair.size());
        const std::string name  = pair.substr(0, colon);
        const double      value = to_number<double>(pair.substr(std::min(colon + 1, pair.size()))).value_or(-1);
        auto* member = name == "ttft" ? &g.ttft : name == "tpot" ? &g.tpot : name == "e2el" ? &g.e2el : nullptr;
        if (!(value >= 0) || !member) return fail("--goodput ", quote(pair), " is not ttft:MS, tpot:MS or e2el:MS");
        *member = value;
    }
    return g;
}

Spread spread(std::vector<double> values, std::span<const double> percentiles) {
    Spread s;
    s.percentiles.resize(percentiles.size());
    if (values.empty()) return s;
    std::ranges::sort(values);
    const auto at = [&](double p) { // between two neighbours on a straight line
        const double place = p / 100 * double(values.size() - 1);
        const auto   low   = std::size_t(place);
        const auto   high  = std::min(low + 1, values.size() - 1);
        return 1000 * (values[low] + (values[high] - values[low]) * (place - double(low)));
    };
    const double n      = double(values.size());
    const double mean   = std::accumulate(values.begin(), values.end(), 0.0) / n;
    double       square = 0;
    for (double v : values) square += (v - mean) * (v - mean);
    s.mean      = 1000 * mean;
    s.median    = at(50);
    s.deviation = 1000 * std::sqrt(square / n);
    for (std::size_t i = 0; i < percentiles.size(); i++) s.percentiles[i] = at(percentiles[i]);
    return s;
}

LoadReport load_report(std::span<const LoadResult> results, const ReportOptions& options) {
    LoadReport            report;
    std::vector<double>   ttft, tpot, itl, e2el;
    std::set<std::string> errors;
    for (const LoadResult& r : results) {
        report.duration = std::max(report.duration, r.end);
        if (!r.error.empty()) {
            report.failed++;
            if (errors.size() < 10) errors.insert(r.error);
            continue;
        }
        report.completed++;
        report.input_tokens += r.prompt_tokens;
        report.output_tokens += r.output_tokens;
        ttft.push_back(ttft_of(r));
        e2el.push_back(e2el_of(r));
        if (r.output_tokens > 1) tpot.push_back(tpot_of(r));
        for (std::size_t i = 1; i < r.times.size(); i++) itl.push_back(r.times[i] - r.times[i - 1]);
        report.good += is_good(r, options.goodput);
    }
    report.ttft             = spread(std::move(ttft), options.percentiles);
    report.tpot             = spread(std::move(tpot), options.percentiles);
    report.itl              = spread(std::move(itl), options.percentiles);
    report.e2el             = spread(std::move(e2el), options.percentiles);
    report.peak_concurrent  = peak_of(results);
    report.peak_output_rate = fullest_second(results);
    report.errors.assign(errors.begin(), errors.end());
    return report;
}

std::string render_table(const LoadReport& r, const ReportOptions& o) {
    std::string out = ruler(" Serving Benchmark Result ", '=');
    out += counted("Successful requests:", r.completed);
    out += counted("Failed requests:", r.failed);
    if (o.max_concurrency > 0) out += counted("Maximum request concurrency:", o.max_concurrency);
    if (!std::isinf(o.request_rate)) out += measured("Request rate configured (RPS):", o.request_rate);
    out += measured("Benchmark duration (s):", r.duration);
    out += counted("Total input tokens:", r.input_tokens);
    out += counted("Total generated tokens:", r.output_tokens);
    out += measured("Request throughput (req/s):", per_second(r.completed, r));
    if (o.goodput.asked()) out += measured("Request goodput (req/s):", per_second(r.good, r));
    out += measured("Output token throughput (tok/s):", per_second(double(r.output_tokens), r));
    out += measured("Peak output token throughput (tok/s):", r.peak_output_rate);
    out += measured("Peak concurrent requests:", double(r.peak_concurrent));
    out += measured("Total token throughput (tok/s):", per_second(double(r.input_tokens + r.output_tokens), r));
    for (const Quantity& q : quantities(r)) {
        out += ruler(q.title, '-');
        out += measured(cat("Mean ", q.name, " (ms):"), q.values->mean);
        out += measured(cat("Median ", q.name, " (ms):"), q.values->median);
        for (std::size_t i = 0; i < o.percentiles.size(); i++)
            out += measured(cat("P", o.percentiles[i], " ", q.name, " (ms):"), q.values->percentiles[i]);
    }
    return out + std::string(width, '=') + "\n";
}

Json render_json(const LoadReport& r, const ReportOptions& o, std::span<const LoadResult> results) {
    Json out{{"duration", r.duration},
             {"completed", r.completed},
             {"failed", r.failed},
             {"total_input_tokens", r.input_tokens},
             {"total_output_tokens", r.output_tokens},
             {"request_throughput", per_second(r.completed, r)},
             {"request_goodput", o.goodput.asked() ? Json(per_second(r.good, r)) : Json()},
             {"output_throughput", per_second(double(r.output_tokens), r)},
             {"total_token_throughput", per_second(double(r.input_tokens + r.output_tokens), r)},
             {"max_output_tokens_per_s", r.peak_output_rate},
             {"max_concurrent_requests", r.peak_concurrent}};
    for (const Quantity& q : quantities(r)) {
        out[cat("mean_", q.key, "_ms")]   = q.values->mean;
        out[cat("median_", q.key, "_ms")] = q.values->median;
        out[cat("std_", q.key, "_ms")]    = q.values->deviation;
        for (std::size_t i = 0; i < o.percentiles.size(); i++)
            out[cat("p", o.percentiles[i], "_", q.key, "_ms")] = q.values->percentiles[i];
    }
    for (const char* key : {"input_lens", "output_lens", "start_times", "ttfts", "itls", "latencies", "errors"})
        out[key] = Json::array();
    for (const LoadResult& one : results) {
        const bool ok = one.error.empty();
        out["input_lens"].push_back(one.prompt_tokens);
        out["output_lens"].push_back(ok ? one.output_tokens : 0);
        out["start_times"].push_back(one.sent);
        out["ttfts"].push_back(ok ? ttft_of(one) : 0);
        out["latencies"].push_back(ok ? e2el_of(one) : 0);
        out["errors"].push_back(one.error);
        Json gaps = Json::array();
        for (std::size_t i = 1; i < one.times.size(); i++) gaps.push_back(one.times[i] - one.times[i - 1]);
        out["itls"].push_back(std::move(gaps));
    }
    return out;
}

} // namespace quire
