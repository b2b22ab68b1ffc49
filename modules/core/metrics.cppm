// quire.core.metrics: counters and histograms that many threads update, and their text for Prometheus. Metrics with the same
// meaning as in vLLM have vLLM's names and buckets, others begin with `quire:`. Owns only numbers.
module;

#include <sys/resource.h>
#include <unistd.h>

export module quire.core.metrics;

import quire.core.base;
import quire.core.std;

export namespace quire {

// Counts of observations up to each bound. Any thread.
class Histogram {
public:
    explicit Histogram(std::vector<double> bounds);
    void observe(double value, std::uint64_t times = 1);

    const std::vector<double>& bounds() const { return bounds_; }
    std::vector<std::uint64_t> counts() const; // of each bucket, not cumulative; the last one is beyond all bounds
    double                     sum() const { return sum_.load(std::memory_order_relaxed); }

private:
    std::vector<double>                     bounds_;
    std::vector<std::atomic<std::uint64_t>> counts_;
    std::atomic<double>                     sum_ = 0;
};

// vLLM's buckets: time to the first token, between tokens, of whole requests; and 1, 2, 5, 10, … up to `most`.
std::vector<double> first_token_buckets();
std::vector<double> token_buckets();
std::vector<double> request_buckets();
std::vector<double> size_buckets(double most);

// Writes the text format (version 0.0.4), one family after another.
class MetricsText {
public:
    using Labels = std::vector<std::pair<std::string, std::string>>;
    explicit MetricsText(Labels common) : common_(std::move(common)) {}

    // HELP and TYPE come with the first sample of a name; samples of one name follow each other.
    void gauge(const std::string& name, const std::string& help, double value, const Labels& labels = {});
    void counter(const std::string& name, const std::string& help, double value, const Labels& labels = {});
    void histogram(const std::string& name, const std::string& help, const Histogram& values);

    std::string take() { return std::move(text_); }

private:
    void head(const std::string& name, const std::string& help, const char* type);
    void sample(const std::string& name, const Labels& labels, double value);

    Labels      common_;
    std::string text_, last_;
};

// The process_* families that Prometheus's own libraries have, without labels; of /proc.
std::string process_metrics();

} // namespace quire

module :private;

namespace quire {

Histogram::Histogram(std::vector<double> bounds) : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {}

void Histogram::observe(double value, std::uint64_t times) {
    if (times == 0 || std::isnan(value)) return;
    const auto at = std::size_t(std::ranges::lower_bound(bounds_, value) - bounds_.begin());
    counts_[at].fetch_add(times, std::memory_order_relaxed);
    sum_.fetch_add(value * double(times), std::memory_order_relaxed);
}

std::vector<std::uint64_t> Histogram::counts() const {
    std::vector<std::uint64_t> out;
    out.reserve(counts_.size());
    for (const auto& c : counts_) out.push_back(c.load(std::memory_order_relaxed));
    return out;
}

std::vector<double> first_token_buckets() {
    return {.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560};
}
std::vector<double> token_buckets() {
    return {.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80};
}
std::vector<double> request_buckets() {
    return {.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680};
}
std::vector<double> size_buckets(double most) {
    std::vector<double> out;
    for (std::int64_t power = 1; double(power) <= most; power *= 10)
        for (int factor : {1, 2, 5})
            if (double(factor * power) <= most) out.push_back(double(factor * power));
    return out;
}

void MetricsText::head(const std::string& name, const std::string& help, const char* type) {
    if (last_ == name) return;
    last_ = name;
    text_ += cat("# HELP ", name, ' ', help, "\n# TYPE ", name, ' ', type, '\n');
}

void MetricsText::sample(const std::string& name, const Labels& labels, double value) {
    text_ += name;
    char separator = '{';
    for (const Labels* list : std::initializer_list<const Labels*>{&common_, &labels})
        for (const auto& [key, text] : *list) {
            text_ += cat(std::exchange(separator, ','), key, "=\"");
            for (char c : text)
                if (c == '\n') text_ += "\\n";
                else if (c == '"' || c == '\\') text_ += cat('\\', c);
                else text_ += c;
            text_ += '"';
        }
    if (separator == ',') text_ += '}';
    char number[40];
    if (std::isinf(value)) std::snprintf(number, sizeof number, "%s", value > 0 ? "+Inf" : "-Inf");
    else if (std::isnan(value)) std::snprintf(number, sizeof number, "NaN");
    else if (std::trunc(value) == value && std::abs(value) < 1e15) std::snprintf(number, sizeof number, "%.1f", value);
    else std::snprintf(number, sizeof number, "%.9g", value);
    text_ += cat(' ', static_cast<const char*>(number), '\n');
}

void MetricsText::gauge(const std::string& name, const std::string& help, double value, const Labels& labels) {
    head(name, help, "gauge");
    sample(name, labels, value);
}

void MetricsText::counter(const std::string& name, const std::string& help, double value, const Labels& labels) {
    head(name, help, "counter");
    sample(name, labels, value);
}

std::string process_metrics() {
    // The fields of /proc/self/stat behind the program's name, which may have anything in it: the 3rd, 4th …
    std::ifstream file("/proc/self/stat");
    std::string   line;
    std::getline(file, line);
    std::istringstream       words(line.substr(std::min(line.rfind(')') + 2, line.size())));
    std::vector<std::string> fields(3);
    for (std::string word; std::getline(words, word, ' ');) fields.push_back(word);
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

    MetricsText t({});
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

void MetricsText::histogram(const std::string& name, const std::string& help, const Histogram& values) {
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

} // namespace quire
