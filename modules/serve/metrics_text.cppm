// quire.serve.metrics_text: metrics as text for Prometheus. Owns nothing.
module;

#include <sys/resource.h>
#include <unistd.h>

export module quire.serve.metrics_text;

import quire.core.base;
import quire.core.metrics;
import quire.core.std;

export namespace quire {

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
