// quire.tools.bench.paper.section: the page's section about one figure, and the parts that the figures share: names and colours of the systems,
// curves of latency, sustained rates. Plain values, owns nothing.
export module quire.tools.bench.paper.section;

import quire.core.base;
import quire.tools.bench.paper.points;
import quire.tools.bench.paper.svg_plot;

export namespace quire::paper {

// The sets of one mode, by name.
using Sets = std::map<std::string, Points, std::less<>>;

struct Row {
    std::string what, paper;
    std::string simulated, measured; // "": no such run
};

struct Chart {
    std::string name, svg; // "fig12"
    std::string caption;
};

struct Section {
    std::string              title;
    std::string              claim{}, verdict{};
    std::vector<std::string> why{}; // paragraphs
    std::vector<Chart>       charts{};
    std::vector<Row>         rows{};
};

inline constexpr std::array<std::string_view, 5> order{"faster-transformer", "orca-max", "orca-pow2", "orca-oracle",
                                                       "quire"};

std::string shown_name(std::string_view series) {
    static const std::map<std::string_view, std::string> names{{"faster-transformer", "FasterTransformer"},
                                                               {"orca-max", "Orca (Max)"},
                                                               {"orca-pow2", "Orca (Pow2)"},
                                                               {"orca-oracle", "Orca (Oracle)"},
                                                               {"quire", "quire"}};
    const auto                                           found = names.find(series);
    return found == names.end() ? std::string(series) : found->second;
}

int colour_of(std::string_view series, int otherwise) {
    constexpr std::array<int, 5> colours{7, 1, 2, 3, 0};
    const auto                   at = std::ranges::find(order, series);
    return at == order.end() ? otherwise : colours[std::size_t(at - order.begin())];
}

// With so many digits behind the point; or, if negative, so many significant ones.
std::string number(double v, int digits = 2, const char* unit = "") {
    if (!std::isfinite(v)) return "";
    char text[48];
    std::snprintf(text, sizeof text, digits < 0 ? "%.*g%s" : "%.*f%s", std::abs(digits), v, unit);
    return text;
}

// One of two sets that may not be there.
struct Pair {
    const Points *simulated = nullptr, *measured = nullptr;

    bool   any() const { return simulated || measured; }
    double value(bool real, std::string_view panel, std::string_view series, std::string_view kind,
                 double x = -1) const {
        const Points* set = real ? measured : simulated;
        return set ? set->value(panel, series, kind, x) : std::numeric_limits<double>::quiet_NaN();
    }
    double ratio(bool real, std::string_view panel, std::string_view series,
                 std::string_view kind = "sustained") const {
        return value(real, panel, "quire", kind) / value(real, panel, series, kind);
    }
    Row row(std::string what, std::string paper, const std::function<std::string(bool real)>& cell) const {
        return {std::move(what), std::move(paper), simulated ? cell(false) : "", measured ? cell(true) : ""};
    }
};

// How a ratio stands to the least that the paper claims.
std::string verdict_of(double ratio, double claimed) {
    if (!std::isfinite(ratio)) return "not run";
    if (ratio >= 0.95 * claimed) return "holds";
    if (ratio >= 1.05) return "holds weaker";
    return "does not follow from memory alone";
}

// The verdict of each mode that there is.
std::string verdicts(const Pair& sets, const std::function<std::string(bool real)>& of) {
    if (sets.simulated && sets.measured) return cat("Simulated: ", of(false), ". Measured: ", of(true));
    return of(!sets.simulated);
}

std::vector<std::string> panels_of(const Points& set, std::string_view kind) {
    std::vector<std::string> panels;
    for (const Point& p : set.points)
        if (p.kind == kind && std::ranges::find(panels, p.panel) == panels.end()) panels.push_back(p.panel);
    return panels;
}

// The lines of a panel: the systems in the paper's order, then others as they come.
std::vector<Line> lines_of(const Points& set, std::string_view panel, std::string_view kind) {
    std::vector<std::string> series(order.begin(), order.end());
    for (const Point& p : set.points)
        if (p.panel == panel && std::ranges::find(series, p.series) == series.end()) series.push_back(p.series);
    std::vector<Line> lines;
    int               n_others = 0;
    for (const std::string& name : series) {
        Line line{shown_name(name), {}, 0, false};
        for (const Point& p : set.points)
            if (p.panel == panel && p.series == name && p.kind == kind) line.points.emplace_back(p.x, p.value);
        if (line.points.empty()) continue;
        std::ranges::sort(line.points);
        line.colour = colour_of(name, n_others++ % 10);
        lines.push_back(std::move(line));
    }
    return lines;
}

// A panel for each title that has points of that kind. A series has one colour in all of them, and none that another one has.
std::string latency_chart(const Points& set, const std::vector<std::pair<std::string, std::string>>& titles,
                          std::string x_label, double y_most) {
    std::vector<LinePanel>   panels;
    std::vector<std::string> others; // series that are no system
    for (const auto& [panel, title] : titles) {
        LinePanel p{title,  x_label, "s/token", lines_of(set, panel, "latency"),
                    y_most, false,   false,     !panel.contains(',') && panel != "chatbot" && panel != "priorities"};
        for (Line& line : p.lines) {
            if (std::ranges::any_of(order, [&](auto system) { return shown_name(system) == line.name; })) continue;
            const auto found = std::ranges::find(others, line.name);
            line.colour      = int(found - others.begin() + 1) % 10; // 0 is quire's
            if (found == others.end()) others.push_back(line.name);
        }
        if (!p.lines.empty()) panels.push_back(std::move(p));
    }
    return line_chart(panels, 3);
}

// Whether there is a curve to draw: a series with two rates.
bool has_curve(const Points& set, const std::vector<std::pair<std::string, std::string>>& titles) {
    return std::ranges::any_of(titles, [&](const auto& t) {
        return std::ranges::any_of(lines_of(set, t.first, "latency"),
                                   [](const Line& line) { return line.points.size() > 1; });
    });
}

void add_latency_charts(Section& s, const Pair& sets, const std::string& name,
                        const std::vector<std::pair<std::string, std::string>>& titles, const std::string& x_label,
                        double y_most = 1) {
    if (sets.simulated && has_curve(*sets.simulated, titles))
        s.charts.push_back({name, latency_chart(*sets.simulated, titles, x_label, y_most),
                            cat("Simulated, ", sets.simulated->machine)});
    if (!sets.measured || !has_curve(*sets.measured, titles)) return;
    double least = y_most; // a faster machine has its knee at a lower latency
    for (const Point& p : sets.measured->points)
        if (p.kind == "latency" && p.value > 0) least = std::min(least, p.value);
    s.charts.push_back({name + "-measured",
                        latency_chart(*sets.measured, titles, x_label, std::min(y_most, 10 * least)),
                        cat("Measured, ", sets.measured->machine.substr(0, sets.measured->machine.find(',')))});
}

// Sustained rates and their ratios.
void add_rates(Section& s, const Pair& sets, const std::string& panel, const std::string& what,
               const std::vector<std::pair<std::string_view, std::string>>& claims) {
    for (std::string_view system : order) {
        const auto rate = [&](bool real) { return number(sets.value(real, panel, system, "sustained"), -3); };
        const Row  row  = sets.row(cat(what, ", ", shown_name(system), ", requests/s"), "", rate);
        if (!row.simulated.empty() || !row.measured.empty()) s.rows.push_back(row);
    }
    for (const auto& [system, claim] : claims)
        s.rows.push_back(sets.row(cat(what, ", quire over ", shown_name(system)), claim,
                                  [&](bool real) { return number(sets.ratio(real, panel, system), 2, "×"); }));
}

} // namespace quire::paper
