// quire.tools.bench.paper.agreement: the numbers of an independent simulator of the same systems, on the same traces and cost model, beside
// the numbers simulated here. Owns nothing.
export module quire.tools.bench.paper.agreement;

import quire.core.base;
import quire.tools.bench.paper.points;
import quire.tools.bench.paper.section;

export namespace quire::paper {

// One number of the other simulator, as it is printed: half a unit of its last digit is rounding.
struct Reference {
    std::string_view set, panel, series,
        kind;           // as a Point has them; kind "tokens", "reservation", …: a share of the slots in %
    double           x; // negative: any
    std::string_view value;
};

inline constexpr double agreed = 0.03; // relative

std::span<const Reference> references();
// How far the points are from it, relative and beyond the rounding; NaN: they have no such number.
double difference(const Points& points, const Reference& reference);
// The number of the points that a reference means; NaN: none.
double value_of(const Points& points, const Reference& reference);
// The numbers that agree, and why the rest does not. Nothing, unless the points are the other simulator's: seed 1, an hour.
std::optional<Section> agreement(const Sets& simulated);

} // namespace quire::paper

module :private;

namespace quire::paper {

// Python and numpy, seed 1, traces of an hour (175B: 15 minutes), the calibrated costs.
constexpr std::string_view all = "faster-transformer orca-max orca-pow2 orca-oracle quire", but_first = all.substr(19),
                           chat_rates = "0.2 0.4 0.6 0.8 1 1.2 1.6 1.8 2 2.2",
                           text_rates = "1 4 8 16 20 22 24 26 30 32";

// The references of some series at some x: all values of the first series, then those of the next.
struct References {
    std::string_view set, panel, kind, series, x, values;
};
constexpr References numbers[] = {
    {"13", "a", "batched", but_first, "-1", "7.00 9.75 13.37 32.94"},
    {"13", "b", "batched", but_first, "-1", "7.00 42.75 74.13 138.29"},
    {"13", "a", "tokens", but_first, "-1", "20.5 28.1 38.4 94.3"},
    {"13", "a", "reservation", "orca-max orca-pow2 orca-oracle", "-1", "13.6 18.7 25.8"},
    {"13", "a", "internal", "orca-max orca-pow2", "-1", "57.1 15.2"},
    {"13", "a", "other", but_first, "-1", "8.85 38.1 35.8 5.7"},
    {"13", "overloaded", "tokens", "quire", "-1", "97.0"},
    {"12", "a", "sustained", all, "0.5", "0.31 0.71 1.00 1.23 2.05"},
    {"12", "b", "sustained", all, "0.5", "0.17 0.35 0.49 0.64 1.35"},
    {"12", "c", "sustained", all, "0.5", "0.57 2.03 2.41 2.75 3.64"},
    {"12", "d", "sustained", all, "0.5", "1.65 4.38 17.7 24.0 30.8"},
    {"12", "e", "sustained", all, "0.5", "0.85 2.01 10.5 15.7 24.8"},
    {"12", "f", "sustained", all, "0.5", "1.62 12.1 25.6 25.6 25.9"},
    {"15", "Alpaca", "saved", "parallel", "2 4 6", "6.45 9.67 10.75"},
    {"15", "ShareGPT", "saved", "parallel", "2 4 6", "16.6 24.9 27.7"},
    {"16", "a", "sustained", "orca-oracle quire", "0.5", "24.0 45.0"},
    {"16", "b", "sustained", "orca-oracle quire", "0.5", "9.45 35.0"},
    {"17", "", "sustained", but_first, "0.5", "0.637 0.658 0.666 0.863"},
    {"12", "a", "latency", "faster-transformer", chat_rates, "0.247 5.80 13.0 28.0 32.2 46.9 71.8 81.3 87.8 97.3"},
    {"12", "a", "latency", "orca-max", chat_rates, "0.026 0.031 0.060 2.32 6.01 11.8 22.7 27.0 30.5 34.9"},
    {"12", "a", "latency", "orca-pow2", chat_rates, "0.026 0.028 0.032 0.066 0.418 4.70 12.8 15.8 19.1 22.7"},
    {"12", "a", "latency", "orca-oracle", chat_rates, "0.026 0.027 0.029 0.032 0.038 0.171 6.03 8.06 11.1 14.4"},
    {"12", "a", "latency", "quire", chat_rates, "0.026 0.028 0.029 0.030 0.032 0.034 0.042 0.051 0.282 1.93"},
    {"12", "d", "latency", "faster-transformer", text_rates, "0.248 119 347 815 1031 1152 1259 1378 1614 1720"},
    {"12", "d", "latency", "orca-max", text_rates, "0.026 0.085 81.9 272 363 413 458 508 601 644"},
    {"12", "d", "latency", "orca-pow2", text_rates, "0.026 0.028 0.031 0.061 12.5 25.3 36.1 48.3 71.8 82.9"},
    {"12", "d", "latency", "orca-oracle", text_rates, "0.026 0.028 0.031 0.039 0.046 0.061 0.284 8.05 25.5 33.9"},
    {"12", "d", "latency", "quire", text_rates, "0.026 0.028 0.031 0.040 0.046 0.051 0.055 0.061 0.095 4.22"},
};

std::span<const Reference> references() {
    static const std::vector<Reference> list = [] {
        std::vector<Reference> made;
        for (const References& r : numbers) {
            const std::vector<std::string_view> values = split(r.values);
            auto                                value  = values.begin();
            for (std::string_view series : split(r.series))
                for (std::string_view x : split(r.x))
                    made.push_back({r.set, r.panel, series, r.kind, to_number<double>(x).value_or(0), *value++});
        }
        return made;
    }();
    return list;
}

double value_of(const Points& points, const Reference& r) {
    const bool   share = r.kind == "tokens" || r.kind == "reservation" || r.kind == "internal" || r.kind == "other";
    const Point* p     = points.find(r.panel, r.series, share ? "batched" : r.kind, r.x);
    if (!p) return std::numeric_limits<double>::quiet_NaN();
    if (r.kind == "tokens") return 100 * p->result.tokens;
    if (r.kind == "reservation") return 100 * p->result.reservation;
    if (r.kind == "internal") return 100 * p->result.internal;
    if (r.kind == "other") return 100 * p->result.other;
    return r.kind == "saved" ? 100 * p->value : p->value;
}

double difference(const Points& points, const Reference& r) {
    const double value = to_number<double>(r.value).value_or(0), mine = value_of(points, r);
    if (!std::isfinite(mine)) return mine;
    const std::size_t point    = r.value.find('.');
    const double      rounding = 0.5 * std::pow(10, point == r.value.npos ? 0 : -double(r.value.size() - point - 1));
    return std::max(0.0, std::fabs(mine - value) - rounding) / value;
}

std::optional<Section> agreement(const Sets& simulated) {
    int                      n = 0;
    std::vector<std::string> other;
    for (const Reference& r : references()) {
        const auto set = simulated.find(r.set);
        if (set == simulated.end() || set->second.settings != "seed 1, scale 1, calibrated") continue;
        const double off = difference(set->second, r);
        if (std::isnan(off)) continue;
        n++;
        if (off <= agreed) continue;
        std::string what = cat("Fig. ", r.set,
                               r.panel.size() == 1 ? cat(" (", r.panel, ")")
                               : r.panel.empty()   ? std::string()
                                                   : cat(", ", r.panel),
                               ", ", shown_name(r.series));
        if (r.kind == "latency") what += cat(" at ", r.x, " requests/s");
        if (r.kind == "saved") what += cat(" ", r.x);
        other.push_back(cat(what, ": ", number(value_of(set->second, r), -3), ", there ", r.value));
    }
    if (n == 0) return std::nullopt;
    Section s{"Beside another simulator"};
    s.why.push_back(
        cat("The systems were also simulated by a program in Python that shares no code with quire: the same traces, "
            "the same cost model, a scheduler of its own. Of its ",
            n, " numbers (shares of memory, batches, sustained rates, latencies, blocks saved) ", n - int(other.size()),
            " are within 3 % of those here, beyond the rounding in which they are given",
            other.empty() ? "." : cat("; ", other.size(), " are not.")));
    if (other.empty()) return s;
    std::string list;
    for (const std::string& o : other) list += cat(list.empty() ? "" : "; ", o);
    s.why.push_back(list + ".");
    s.why.push_back(
        "Why. FasterTransformer: when a request of a batch is over, its KV is not read any more here, as the "
        "definition has it; the other program goes on reading it, so its batches take longer. With 175B and Alpaca the "
        "latency of FasterTransformer stays between 0.49 and 0.52 s/token from 1.6 to 2 requests/s in both programs; "
        "at which of these rates it passes 0.5 is chance. Steep curves: near the knee a rate that differs by less than "
        "1 % changes the latency by more than 3 %, while the sustained rates agree. Blocks saved: the other program "
        "averages over the first 3,000 requests of the data set, this one over those that arrive; its formula, over "
        "the requests that arrive here, gives 16.0 and 24.0 % too.");
    return s;
}

} // namespace quire::paper
