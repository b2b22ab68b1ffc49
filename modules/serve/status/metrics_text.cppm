// quire.serve.status.metrics_text: the server's metrics as text for Prometheus. Metrics with the same meaning as in vLLM have vLLM's names
// and buckets, others begin with `quire:`. Owns nothing.
module;

#include <sys/resource.h>
#include <unistd.h>

export module quire.serve.status.metrics_text;

import quire.core.base;
import quire.core.metrics;
import quire.schedule.scheduler;
import quire.serve.http.server;
import quire.serve.service;

export namespace quire {

// A loaded model; `name`: the metrics' label model_name.
struct MeasuredModel {
    Service*    service;
    std::string name;
};

// All families: of each service, its engine and KV memory, of the HTTP server and the process. `dropped_log_lines`: lines that no reader took
// in time.
std::string metrics_text(std::span<const MeasuredModel> models, const HttpServer& server,
                         std::uint64_t dropped_log_lines);

} // namespace quire

module :private;

namespace quire {

// As vLLM names it.
std::string dtype_label(KvTypes types) {
    return types == DType::F16    ? "float16"
           : types == DType::BF16 ? "bfloat16"
           : types == DType::F32  ? "float32"
                                  : name_of(types);
}

// Writes the text format (version 0.0.4), one family after another.
class MetricsText {
public:
    using Labels = std::vector<std::pair<std::string, std::string>>;
    explicit MetricsText(Labels common = {}) : common_(std::move(common)) {}

    // Of all samples to come.
    void label(Labels common) { common_ = std::move(common); }

    // A family stands where its first sample came, with that one's HELP; later samples join it.
    void gauge(const std::string& name, const std::string& help, double value, const Labels& labels = {}) {
        head(name, help, "gauge");
        sample(name, labels, value);
    }

    void counter(const std::string& name, const std::string& help, double value, const Labels& labels = {}) {
        head(name, help, "counter");
        sample(name, labels, value);
    }

    void histogram(const std::string& name, const std::string& help, const Histogram& values) {
        head(name, help, "histogram");
        const std::vector<std::uint64_t> counts = values.counts();
        std::uint64_t                    total  = 0;
        for (std::size_t i = 0; i < counts.size(); i++) {
            total += counts[i];
            std::string bound = "+Inf";
            if (i < values.bounds().size()) {
                bound = cat(values.bounds()[i]);
                if (bound.find_first_of(".e") == std::string::npos) bound += ".0";
            }
            sample(name + "_bucket", {{"le", bound}}, double(total));
        }
        sample(name + "_count", {}, double(total));
        sample(name + "_sum", {}, values.sum());
    }

    std::string take() {
        std::string all;
        for (const std::string& family : families_) all += family;
        return all;
    }

private:
    void head(const std::string& name, const std::string& help, const char* type) {
        const auto [at, is_new] = places_.try_emplace(name, families_.size());
        place_                  = at->second;
        if (is_new) families_.push_back(cat("# HELP ", name, ' ', help, "\n# TYPE ", name, ' ', type, '\n'));
    }

    void sample(const std::string& name, const Labels& labels, double value) {
        std::string& out = families_[place_];
        out += name;
        char separator = '{';
        for (const Labels* list : std::initializer_list<const Labels*>{&common_, &labels})
            for (const auto& [key, text] : *list) {
                out += cat(std::exchange(separator, ','), key, "=\"");
                for (char c : text)
                    if (c == '\n') out += "\\n";
                    else if (c == '"' || c == '\\') out += cat('\\', c);
                    else out += c;
                out += '"';
            }
        if (separator == ',') out += '}';
        char number[40];
        if (std::isinf(value)) std::snprintf(number, sizeof number, "%s", value > 0 ? "+Inf" : "-Inf");
        else if (std::isnan(value)) std::snprintf(number, sizeof number, "NaN");
        else if (std::trunc(value) == value && std::abs(value) < 1e15)
            std::snprintf(number, sizeof number, "%.1f", value);
        else std::snprintf(number, sizeof number, "%.9g", value);
        out += cat(' ', static_cast<const char*>(number), '\n');
    }

    Labels                             common_;
    std::vector<std::string>           families_;
    std::map<std::string, std::size_t> places_;    // of each name in it
    std::size_t                        place_ = 0; // of the family that is written
};

// The process_* families of Prometheus's own libraries, from /proc; without labels.
std::string process_metrics() {
    // The fields of /proc/self/stat behind the program's name, which may have anything in it: the 3rd, 4th …
    std::ifstream file("/proc/self/stat");
    std::string   line;
    std::getline(file, line);
    std::vector<std::string> fields(3);
    for (std::string_view word : split(std::string_view(line).substr(std::min(line.rfind(')') + 2, line.size()))))
        fields.emplace_back(word);
    fields.resize(std::max<std::size_t>(fields.size(), 25), "0");
    const auto   number = [&](std::size_t n) { return std::strtod(fields[n].c_str(), nullptr); }; // as proc(5) counts
    const double ticks = double(sysconf(_SC_CLK_TCK)), page = double(sysconf(_SC_PAGESIZE));

    double        booted = 0;
    std::ifstream system("/proc/stat");
    while (std::getline(system, line))
        if (line.starts_with("btime ")) booted = std::strtod(line.c_str() + 6, nullptr);
    int             open = 0;
    std::error_code error;
    for (std::filesystem::directory_iterator at("/proc/self/fd", error), end; !error && at != end; at.increment(error))
        open++;
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);

    MetricsText t;
    t.counter("process_cpu_seconds_total", "Total user and system CPU time spent in seconds.",
              (number(14) + number(15)) / ticks);
    t.gauge("process_open_fds", "Number of open file descriptors.", open - 1); // but for the one that counts
    t.gauge("process_max_fds", "Maximum number of open file descriptors.", double(limit.rlim_cur));
    t.gauge("process_resident_memory_bytes", "Resident memory size in bytes.", number(24) * page);
    t.gauge("process_virtual_memory_bytes", "Virtual memory size in bytes.", number(23));
    t.gauge("process_start_time_seconds", "Start time of the process since unix epoch in seconds.",
            booted + number(22) / ticks);
    return t.take();
}

// A sample for each place that a guess has in its step: 0 is the first one. Tokens that a constraint forces may stand behind `most`.
void write_accepted_at(MetricsText& t, const std::string& name, const SchedulerStats& stats, int most) {
    for (int i = 0; i < most_drafts; i++)
        if (const std::uint64_t n = stats.accepted_at[std::size_t(i)]; i < most || n > 0)
            t.counter(name, "Guessed tokens that were right, by their place in the step.", double(n),
                      {{"position", cat(i)}});
}

// The families of one model, whose labels the writer has.
void write_model(MetricsText& t, Service& service) {
    const ServiceMetrics& m           = service.metrics;
    const EngineStats     s           = service.stats();
    const EngineOptions&  o           = service.engine_options();
    const double          block_bytes = double(service.engine().block_bytes());
    const auto            d           = [](auto v) { return double(v); };

    t.gauge("vllm:num_requests_running", "Requests in the running batch.", s.running);
    t.gauge("vllm:num_requests_waiting", "Requests that wait to run.",
            std::max(service.in_flight() - s.running, s.waiting));
    t.gauge("vllm:num_requests_waiting_by_reason", "Requests that wait, by reason.", s.swapped,
            {{"reason", "swapped"}});
    t.gauge("vllm:num_requests_waiting_by_reason", "",
            std::max(std::max(service.in_flight() - s.running, s.waiting) - s.swapped, 0), {{"reason", "capacity"}});
    t.gauge("vllm:kv_cache_usage_perc", "KV blocks in use, 1 is all of them.", d(s.blocks_used) / o.kv_blocks);
    t.counter("vllm:prefix_cache_queries_total", "Prompt tokens looked for in the prefix cache.",
              d(s.cached_tokens + s.prefill_tokens));
    t.counter("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", d(s.cached_tokens));
    t.counter("quire:kv_device_hits_total", "Prompt tokens found in the pool of the device.",
              d(s.cached_tokens - s.loaded_tokens));
    t.counter("quire:kv_host_hits_total", "Prompt tokens found in host memory.", d(s.loaded_tokens - s.disk_tokens));
    t.counter("quire:kv_disk_hits_total", "Prompt tokens that the files of --kv-dir had.", d(s.disk_tokens));
    t.counter("quire:kv_disk_records_written_total", "Units of the prefix cache written to files.", d(s.disk.written));
    t.counter("quire:kv_disk_records_read_total", "Units read from files.", d(s.disk.read));
    t.counter("quire:kv_disk_records_damaged_total", "Units and ends of files that were dropped as damaged.",
              d(s.disk.damaged));
    t.counter("quire:kv_disk_records_refused_total", "Units that a full disk did not take.", d(s.disk.refused));
    t.gauge("quire:kv_disk_bytes", "Bytes of the files.", d(s.disk_bytes));
    t.counter("vllm:num_preemptions_total", "Times a request had to give up its blocks.", d(s.preemptions));
    if (o.drafts.on) {
        t.counter("vllm:spec_decode_num_drafts_total", "Steps of sequences that checked guessed tokens.",
                  d(s.memory.drafts));
        t.counter("vllm:spec_decode_num_draft_tokens_total", "Guessed tokens that were checked.",
                  d(s.memory.draft_tokens));
        t.counter("vllm:spec_decode_num_accepted_tokens_total", "Of these, tokens that were right.",
                  d(s.memory.accepted_tokens));
        write_accepted_at(t, "vllm:spec_decode_num_accepted_tokens_per_pos_total", s.memory, o.drafts.most);
    }
    t.counter("vllm:prompt_tokens_total", "Prompt tokens of the requests that are over.", d(m.prompt.load()));
    t.counter("vllm:prompt_tokens_cached_total", "Of these found in the cache.", d(m.cached.load()));
    t.counter("vllm:generation_tokens_total", "Tokens generated.", d(m.generated.load()));
    for (const auto& [reason, n] : {std::pair{"stop", m.stopped.load()}, std::pair{"length", m.cut.load()},
                                    std::pair{"abort", m.aborted.load()}, std::pair{"error", m.failed.load()}})
        t.counter("vllm:request_success_total", "Answers that are over, by reason.", d(n),
                  {{"finished_reason", reason}});
    t.histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", m.first_token);
    t.histogram("vllm:inter_token_latency_seconds", "Between two tokens of an answer.", m.between_tokens);
    t.histogram("vllm:request_time_per_output_token_seconds", "Mean of a request, without the first token.",
                m.per_token);
    t.histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", m.whole);
    t.histogram("vllm:request_queue_time_seconds", "Waiting to run.", m.queued);
    t.histogram("vllm:request_inference_time_seconds", "Running.", m.inference);
    t.histogram("vllm:request_prefill_time_seconds", "From the first step to the first token.", m.prefill);
    t.histogram("vllm:request_decode_time_seconds", "From the first token to the last.", m.decode);
    t.histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", m.prompt_tokens);
    t.histogram("vllm:request_generation_tokens", "Tokens of an answer.", m.generation_tokens);
    t.histogram("vllm:request_max_num_generation_tokens", "Tokens of the longest answer of a request.",
                m.max_generation_tokens);
    t.histogram("vllm:request_params_n", "The n of requests.", m.n);
    t.histogram("vllm:request_params_max_tokens", "The max_tokens of requests.", m.max_tokens);
    t.histogram("vllm:request_prefill_kv_computed_tokens", "Prompt tokens that were not in the cache.",
                m.computed_prompt_tokens);
    t.histogram("vllm:iteration_tokens_total", "Tokens of one step.", m.step_tokens);

    if (const std::shared_ptr<const Snapshot> snapshot = service.snapshot(1)) {
        const MemoryTotals totals = quire::totals(*snapshot);
        t.gauge("quire:internal_waste_ratio", "Slots of used blocks that hold nothing, of all of them.", totals.waste);
        t.gauge("quire:shared_saving_ratio", "Blocks saved by sharing at this moment, of the blocks without it.",
                totals.saved);
        t.gauge("quire:kv_blocks_shared", "Blocks in more than one table.", totals.shared);
    }
    t.gauge("quire:kv_blocks", "Blocks of the pool.", o.kv_blocks);
    t.gauge("quire:kv_blocks_used", "Blocks that somebody holds.", s.blocks_used);
    t.gauge("quire:kv_blocks_cached", "Blocks that nobody holds and that can be found again.", s.blocks_cached);
    t.gauge("quire:kv_blocks_free", "Blocks that nobody holds and that hold nothing.",
            o.kv_blocks - s.blocks_used - s.blocks_cached);
    t.gauge("quire:kv_blocks_pinned", "Blocks of pinned prefixes.", s.blocks_pinned);
    t.gauge("quire:swap_blocks", "Blocks of the swap pool.", o.swap_blocks);
    t.gauge("quire:swap_blocks_used", "Blocks swapped out.", s.swap_used);
    t.gauge("quire:kv_host_blocks", "Blocks of host memory for what leaves the prefix cache.", o.tier_blocks);
    t.gauge("quire:kv_host_blocks_cached", "Blocks of the prefix cache in host memory.", s.host_cached);
    t.counter("quire:kv_host_blocks_stored_total", "Blocks moved from the prefix cache to host memory.",
              d(s.host.stored));
    t.counter("quire:kv_host_blocks_loaded_total", "Blocks moved back to the prefix cache.", d(s.host.loaded));
    t.counter("quire:kv_host_blocks_dropped_total", "Blocks that host memory had no more room for.", d(s.host.dropped));
    t.gauge("quire:sharing_saved_ratio", "Blocks saved by sharing since the start, of the blocks without it.",
            s.memory.sharing.saved());
    t.counter("quire:copy_on_write_copies_total", "Blocks copied because one of their owners wrote.",
              d(s.memory.copied_blocks));
    t.counter("quire:forks_total", "Sequences that began as another's fork.", d(s.memory.forks));
    t.counter("quire:swaps_out_total", "Requests swapped out.", d(s.memory.swaps_out));
    t.counter("quire:swaps_in_total", "Requests swapped in.", d(s.memory.swaps_in));
    t.counter("quire:swap_out_bytes_total", "Bytes swapped out.", d(s.swapped_out) * block_bytes);
    t.counter("quire:swap_in_bytes_total", "Bytes swapped in.", d(s.swapped_in) * block_bytes);
    t.counter("quire:recomputations_total", "Requests that came back by computing their KV again.",
              d(s.memory.recomputations));
    t.counter("quire:recomputed_tokens_total", "Tokens whose KV was given up for that.", d(s.memory.recomputed_tokens));
    t.counter("quire:displacements_total", "Requests displaced by others of higher priority.",
              d(s.memory.priority_preemptions));
    t.counter("quire:steps_total", "Steps of the engine.", d(s.steps));
    t.counter("quire:requests_refused_total", "Requests that did not enter the queue, by reason.",
              d(m.refused_full.load()), {{"reason", "queue_full"}});
    t.counter("quire:requests_refused_total", "", d(m.refused_draining.load()), {{"reason", "shutting_down"}});
    t.counter("quire:requests_refused_total", "", d(m.refused_invalid.load()), {{"reason", "invalid"}});
    // Consumers multiply num_gpu_blocks by block_size. With several cache groups a block of the pool holds a part of the layers only.
    const int tokens = o.layout.longest(o.kv_blocks, o.block_size, o.kv_blocks * o.block_size);
    t.gauge("vllm:cache_config_info", "The settings of the KV cache.", 1,
            {{"block_size", cat(o.block_size)},
             {"cache_dtype", dtype_label(o.kv_type)},
             {"enable_prefix_caching", o.prefix_cache ? "True" : "False"},
             {"gpu_memory_utilization", cat(o.gpu_memory_utilization)},
             {"num_cpu_blocks", cat(o.swap_blocks)},
             {"num_gpu_blocks", cat(tokens / o.block_size)},
             {"sliding_window", "None"}});
}

// The families of llama-server for one model, under its names.
void write_llama_cpp(MetricsText& t, Service& service) {
    const ServiceMetrics& m      = service.metrics;
    const EngineStats     s      = service.stats();
    const auto            d      = [](auto v) { return double(v); };
    const auto            rate   = [](double n, double of) { return of > 0 ? n / of : 0; };
    const double          cached = d(m.cached.load()), computed = d(m.prompt.load()) - cached;
    const double          made    = d(m.generated.load());
    const double          reading = m.prefill.sum(), writing = m.decode.sum();
    const auto            counter = [&](const char* name, const char* help, double v) {
        t.counter(cat("llamacpp:", name), help, v);
    };
    const auto gauge = [&](const char* name, const char* help, double v) { t.gauge(cat("llamacpp:", name), help, v); };
    counter("prompt_tokens_total", "Prompt tokens that were computed.", computed);
    counter("prompt_tokens_cached_total", "Prompt tokens found in the cache.", cached);
    counter("prompt_seconds_total", "Seconds from the first steps to the first tokens of requests.", reading);
    counter("tokens_predicted_total", "Tokens generated.", made);
    counter("tokens_predicted_seconds_total", "Seconds from the first tokens to the last of requests.", writing);
    counter("n_decode_total", "Steps of the engine.", d(s.steps));
    counter("n_tokens_max", "Tokens of the longest prompt with its answer.", m.longest);
    counter("spec_decode_num_drafts_total", "Steps of sequences that checked guessed tokens.", d(s.memory.drafts));
    counter("spec_decode_num_draft_tokens_total", "Guessed tokens that were checked.", d(s.memory.draft_tokens));
    counter("spec_decode_num_accepted_tokens_total", "Of these, tokens that were right.", d(s.memory.accepted_tokens));
    write_accepted_at(t, "llamacpp:spec_decode_num_accepted_tokens_per_pos_total", s.memory,
                      service.engine_options().drafts.most);
    gauge("prompt_tokens_seconds", "Prompt tokens that a request computes in a second, on average.",
          rate(computed, reading));
    gauge("predicted_tokens_seconds", "Tokens that a request generates in a second, on average.", rate(made, writing));
    gauge("requests_processing", "Requests in the running batch.", s.running);
    gauge("requests_deferred", "Requests that wait to run.", std::max(service.in_flight() - s.running, s.waiting));
    gauge("n_busy_slots_per_decode", "Tokens generated in a step, on average.", rate(made, d(s.steps)));
}

std::string metrics_text(std::span<const MeasuredModel> models, const HttpServer& server,
                         std::uint64_t dropped_log_lines) {
    MetricsText t;
    for (const MeasuredModel& model : models) {
        t.label({{"model_name", model.name}, {"engine", "0"}});
        write_model(t, *model.service);
    }
    if (models.size() != 1) t.label({});
    t.gauge("quire:http_connections", "Open connections.", server.n_connections());
    t.gauge("quire:http_threads", "Threads that answer requests.", server.n_threads());
    t.counter("quire:dropped_log_lines_total", "Lines of the log that were dropped because nobody read them in time.",
              double(dropped_log_lines));
    for (const MeasuredModel& model : models) { // of one model without labels, as llama-server writes them
        t.label(models.size() == 1 ? MetricsText::Labels() : MetricsText::Labels{{"model_name", model.name}});
        write_llama_cpp(t, *model.service);
    }
    return t.take() + process_metrics();
}

} // namespace quire
