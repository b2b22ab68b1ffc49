// quire.tools.bench.paper.trace_run: one run of a system on a trace: its options, and its measurements, whether the steps run on a
// device or on a cost model. **Owns** the sums while it runs.
export module quire.tools.bench.paper.trace_run;

export import quire.baseline.systems;
import quire.core.base;
import quire.core.json;
export import quire.schedule.preemption;
import quire.schedule.reservation;
export import quire.tools.bench.paper.workload;

export namespace quire::paper {

struct RunOptions {
    System         system         = System::quire;
    int            n_slots        = 15728; // of the KV pool, in tokens
    int            block_size     = 16;
    int            context        = 2048;
    int            n_answers      = 1; // parallel sampling
    int            beam_width     = 0; // beam search in its place
    double         watermark      = 0.01;
    bool           keep_preempted = false;   // tokens that are still in its blocks are not computed again
    int            step_tokens    = 1 << 20; // most tokens of a step: prompts are cut there
    PreemptionMode preemption     = PreemptionMode::recompute;
    bool           prefix_cache   = false;
    bool           keep_rounds    = false; // chats: prompts begin at multiples of 512 tokens of the conversation
    double         urgent         = 0;     // this part of the requests has a better priority
    double         warm_up        = 0;     // seconds that the averages leave out
    std::uint32_t  texts          = 0;     // runs with another number have other texts: they find nothing in the cache
    // Ends the run as soon as the mean normalized latency is certain to be more; seconds a token.
    double give_up = std::numeric_limits<double>::infinity();

    int n_blocks() const { return n_slots / block_size; }
};

// Averages over time are taken between warm_up and the last arrival.
struct TraceResult {
    int    n_requests   = 0;
    double mean_latency = 0, median_latency = 0;                 // normalized: (end - arrival) / output tokens
    double urgent_latency = 0;                                   // of the urgent ones; 0: there are none
    double batched        = 0;                                   // requests that run
    double tokens = 0, reservation = 0, internal = 0, other = 0; // fractions of the pool's slots, as MemoryUse
    double preemptions = 0;                                      // for each request
    double recomputed = 0, cached = 0; // tokens for each request: computed again; prompt tokens found in the cache
    double saved   = 0;                // by sharing: fraction of the blocks
    double seconds = 0;                // until the last one ended
    double steps   = 0;
    bool   gave_up = false;
};

Json        to_json(const TraceResult& result);
TraceResult result_from_json(const Json& json); // missing members stay 0

// The request of one arrival; `index`: which of the trace.
Request request_of(const Arrival& arrival, std::size_t index, const Trace& trace, const RunOptions& options,
                   int vocabulary);
// The token that stands at a position of that request's text, of chats also in the answer.
Token token_at(const Arrival& arrival, std::size_t index, const Trace& trace, const RunOptions& options, int position,
               int vocabulary);

// Of a chat: where its prompt begins in the conversation, and how long it is (of any request, without the shared prefix).
int prompt_begin(const Arrival& arrival, const RunOptions& options);
int prompt_length(const Arrival& arrival, const RunOptions& options);

class TraceMeter {
public:
    TraceMeter(const Trace& trace, const RunOptions& options);

    // The state during [at, at + seconds).
    void step(double at, double seconds, int n_running, const MemoryUse& use);
    void ended(std::size_t index, double at);
    // Whether the run goes on in vain (RunOptions::give_up).
    bool        hopeless(double now, std::size_t n_arrived) const;
    int         n_ended() const { return n_ended_; }
    TraceResult result() const;

private:
    const Trace&          trace_;
    const RunOptions&     options_;
    std::vector<double>   latency_; // of each request; negative: not ended
    double                sum_ = 0, seconds_ = 0, last_ = 0, steps_ = 0;
    int                   n_ended_ = 0;
    std::array<double, 5> sums_{};
};

} // namespace quire::paper

module :private;

namespace quire::paper {

// The fields of a result by name.
template <class R, class Body>
void each_field(R& r, const Body& body) {
    body("mean_latency", r.mean_latency);
    body("median_latency", r.median_latency);
    body("urgent_latency", r.urgent_latency);
    body("batched", r.batched);
    body("tokens", r.tokens);
    body("reservation", r.reservation);
    body("internal", r.internal);
    body("other", r.other);
    body("preemptions", r.preemptions);
    body("recomputed", r.recomputed);
    body("cached", r.cached);
    body("saved", r.saved);
    body("seconds", r.seconds);
    body("steps", r.steps);
}

Json to_json(const TraceResult& result) {
    Json json{{"n_requests", result.n_requests}};
    if (result.gave_up) json["gave_up"] = true;
    each_field(result, [&](const char* name, double value) { json[name] = value; });
    return json;
}

TraceResult result_from_json(const Json& json) {
    TraceResult result;
    result.n_requests = json.value("n_requests", 0);
    result.gave_up    = json.value("gave_up", false);
    each_field(result, [&](const char* name, double& value) { value = json.value(name, 0.0); });
    return result;
}

int prompt_begin(const Arrival& a, const RunOptions& options) {
    const Lengths& l     = a.lengths;
    const int      begin = std::max(l.history - 1024, 0); // of the earlier rounds; the row's prompt is cut already
    return options.keep_rounds ? (begin + 511) / 512 * 512 : begin;
}

int prompt_length(const Arrival& a, const RunOptions& options) {
    const Lengths& l = a.lengths;
    if (l.conversation < 0 || !options.keep_rounds) return l.prompt;
    // The query is the part of the prompt beyond the history; a part of a cut prompt is history.
    const int query = std::max(l.prompt - std::min(l.history, 1024), 16);
    return std::max(l.history + query - prompt_begin(a, options), 1);
}

Token token_at(const Arrival& a, std::size_t index, const Trace& trace, const RunOptions& options, int position,
               int vocabulary) {
    if (position < trace.prefix) return 300 + position % std::max(1, vocabulary - 300);
    std::uint64_t x = index;
    if (a.lengths.conversation >= 0) {
        x        = std::uint64_t(a.lengths.conversation) + (std::uint64_t(1) << 31);
        position = position + prompt_begin(a, options);
    }
    x += std::uint64_t(options.texts) << 32;
    x = (x * 0x9e3779b97f4a7c15u + std::uint64_t(position)) * 0xd6e8feb86659fd93u;
    return 300 + Token((x >> 32) % std::uint64_t(std::max(1, vocabulary - 300)));
}

Request request_of(const Arrival& a, std::size_t index, const Trace& trace, const RunOptions& options, int vocabulary) {
    Request   r;
    const int n = trace.prefix + prompt_length(a, options);
    r.prompt.resize(std::size_t(n));
    for (int i = 0; i < n; i++) r.prompt[std::size_t(i)] = token_at(a, index, trace, options, i, vocabulary);
    r.max_tokens           = a.lengths.output;
    r.ignore_end           = true;
    r.n                    = std::max(options.n_answers, options.beam_width);
    r.beam_width           = options.beam_width;
    r.sampling.temperature = options.n_answers > 1 ? 1 : 0;
    r.sampling.seed        = index;
    if (options.urgent > 0 && double(index * 7919 % 1000) < 1000 * options.urgent) r.priority = -1;
    return r;
}

TraceMeter::TraceMeter(const Trace& trace, const RunOptions& options)
    : trace_(trace), options_(options), latency_(trace.requests.size(), -1.0) {}

void TraceMeter::step(double at, double seconds, int n_running, const MemoryUse& use) {
    steps_++;
    if (at < options_.warm_up || at >= trace_.seconds) return;
    seconds_ += seconds;
    const double values[] = {double(n_running), double(use.tokens), double(use.reservation), double(use.internal),
                             double(use.other)};
    for (std::size_t i = 0; i < sums_.size(); i++) sums_[i] += seconds * values[i];
}

void TraceMeter::ended(std::size_t index, double at) {
    const Arrival& a = trace_.requests[index];
    latency_[index]  = (at - a.at) / a.lengths.output;
    sum_ += latency_[index];
    n_ended_++;
    last_ = std::max(last_, at);
}

bool TraceMeter::hopeless(double now, std::size_t n_arrived) const {
    const double most = options_.give_up * double(latency_.size());
    if (sum_ > most) return true;
    if (!std::isfinite(most)) return false;
    double sum = sum_; // and the waiting time so far of requests that wait
    for (std::size_t i = 0; i < n_arrived; i++)
        if (latency_[i] < 0) sum += (now - trace_.requests[i].at) / trace_.requests[i].lengths.output;
    return sum > most;
}

TraceResult TraceMeter::result() const {
    TraceResult         r;
    std::vector<double> all, urgent;
    for (std::size_t i = 0; i < latency_.size(); i++) {
        if (latency_[i] < 0) continue;
        all.push_back(latency_[i]);
        if (options_.urgent > 0 && double(i * 7919 % 1000) < 1000 * options_.urgent) urgent.push_back(latency_[i]);
    }
    const auto mean = [](const std::vector<double>& v) {
        return v.empty() ? 0 : std::accumulate(v.begin(), v.end(), 0.0) / double(v.size());
    };
    r.n_requests     = int(all.size());
    r.mean_latency   = mean(all);
    r.urgent_latency = mean(urgent);
    if (!all.empty()) {
        std::nth_element(all.begin(), all.begin() + std::ptrdiff_t(all.size() / 2), all.end());
        r.median_latency = all[all.size() / 2];
    }
    const double slots = double(options_.n_slots), time = std::max(seconds_, 1e-9);
    r.batched     = sums_[0] / time;
    r.tokens      = sums_[1] / time / slots;
    r.reservation = sums_[2] / time / slots;
    r.internal    = sums_[3] / time / slots;
    r.other       = 1 - r.tokens - r.reservation - r.internal;
    r.seconds     = last_;
    r.steps       = steps_;
    return r;
}

} // namespace quire::paper
