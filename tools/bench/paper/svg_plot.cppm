// quire.tools.bench.paper.svg_plot: line and bar charts as SVG, in colours for light and dark pages. Owns nothing.
export module quire.tools.bench.paper.svg_plot;

import quire.core.base;

export namespace quire::paper {

struct Line {
    std::string                            name;
    std::vector<std::pair<double, double>> points; // by x; an infinite y: above the chart
    int  colour = 0; // which of the chart's colours; a system has one colour in all charts
    bool dashed = false;
};

struct LinePanel {
    std::string       title, x_label, y_label;
    std::vector<Line> lines;
    double            y_most = 0; // the axis ends there, lines leave the chart; 0: all of them are shown
    bool              log_x = false, log_y = false;
    bool              from_zero = true; // the axis of x, if not logarithmic
};

// Bars in groups; the bars of a group stand side by side, or on top of one another.
struct BarPanel {
    std::string                      title, y_label;
    std::vector<std::string>         groups, parts;
    std::vector<std::vector<double>> values;  // [group][part]; NaN: none
    std::vector<int>                 colours; // of the parts; empty: 0, 1, 2, …
    bool                             stacked = false;
};

// Panels in rows of `columns`, with one legend below.
std::string line_chart(std::span<const LinePanel> panels, int columns);
std::string bar_chart(std::span<const BarPanel> panels, int columns);

// A few round numbers that cover [low, high].
std::vector<double> round_ticks(double low, double high, int about);
// The ticks of a logarithmic axis: powers of two, or 1, 2, 5, 10, … and, of many decades, powers of ten; low > 0.
std::vector<double> log_ticks(double low, double high, bool of_two);
std::string         escape_xml(std::string_view text);

} // namespace quire::paper

module :private;

namespace quire::paper {

constexpr double width = 320, height = 230, left = 52, right = 16, top = 26, bottom = 40;

// One colour each for light and dark pages (after P. Tol's and Okabe and Ito's palettes).
constexpr std::array<std::pair<const char*, const char*>, 10> colours{{{"#0068b5", "#5ab4ff"},
                                                                       {"#c7413b", "#ff8379"},
                                                                       {"#8a5a00", "#e6ab3c"},
                                                                       {"#2d8a3e", "#6fd08c"},
                                                                       {"#7d4fa8", "#c79cf2"},
                                                                       {"#00808a", "#4fd3dc"},
                                                                       {"#b0447f", "#ff8fc8"},
                                                                       {"#6b7280", "#a5adba"},
                                                                       {"#3f6212", "#b3d15b"},
                                                                       {"#9a3412", "#ffb27d"}}};

std::string escape_xml(std::string_view text) {
    std::string out;
    for (char c : text)
        if (c == '<') out += "&lt;";
        else if (c == '&') out += "&amp;";
        else if (c == '>') out += "&gt;";
        else if (c == '"') out += "&quot;";
        else out += c;
    return out;
}

std::string shown(double v) {
    char         text[32];
    const double size = std::fabs(v);
    std::snprintf(text, sizeof text, size >= 1000 ? "%.0f" : size < 0.1 ? "%.2g" : "%.4g", v + 0.0); // no -0
    return text;
}

std::string at(double v) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f", v);
    return text;
}

std::vector<double> round_ticks(double low, double high, int about) {
    const double rough = std::max(high - low, 1e-12) / about,
                 power = std::pow(10, std::floor(std::log(rough) / std::log(10.0)));
    double step        = 10 * power;
    for (double factor : {1.0, 2.0, 5.0})
        if (factor * power >= rough) {
            step = factor * power;
            break;
        }
    std::vector<double> ticks;
    for (double k = std::ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push_back(k * step);
    return ticks;
}

std::vector<double> log_ticks(double low, double high, bool of_two) {
    std::vector<double> ticks;
    const auto          add = [&](double v) {
        if (v >= low * 0.9999 && v <= high * 1.0001) ticks.push_back(v);
    };
    const bool wide = high / low > 500;
    for (int power = -40; power <= 40; power++)
        if (of_two) add(std::ldexp(1, power));
        else
            for (double factor : {1.0, 2.0, 5.0})
                if (factor == 1 || !wide) add(factor * std::pow(10, power));
    return ticks;
}

std::string style() {
    std::string light, dark;
    for (std::size_t i = 0; i < colours.size(); i++) {
        light += cat(".s", i, "{stroke:", colours[i].first, "}.f", i, "{fill:", colours[i].first, "}");
        dark += cat(".s", i, "{stroke:", colours[i].second, "}.f", i, "{fill:", colours[i].second, "}");
    }
    return cat(
        "<style>text{font:11px "
        "sans-serif;fill:#1f2328}.t{font-weight:bold}.a{stroke:#59636e;fill:none}.g{stroke:#d1d9e0;fill:none}",
        ".l{fill:none;stroke-width:1.8}.d{stroke-dasharray:5 3}", light,
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.a{stroke:#9198a1}.g{stroke:#3d444d}", dark, "}</style>");
}

// The frame of one panel and the way from values to places in it.
struct Frame {
    double x = 0, y = 0; // of the panel's corner
    double x_low = 0, x_high = 1, y_low = 0, y_high = 1;
    bool   log_x = false, log_y = false;

    static double part(double v, double low, double high, bool log) {
        return log ? std::log(v / low) / std::log(high / low) : (v - low) / (high - low);
    }
    double across(double v) const { return x + left + (width - left - right) * part(v, x_low, x_high, log_x); }
    double up(double v) const { return y + height - bottom - (height - top - bottom) * part(v, y_low, y_high, log_y); }

    std::string draw(const std::string& title, const std::string& x_label, const std::string& y_label) const {
        std::string out =
            cat("<text class=\"t\" x=\"", at(x + left), "\" y=\"", at(y + 15), "\">", escape_xml(title), "</text>");
        for (double v : log_y ? log_ticks(y_low, y_high, false) : round_ticks(y_low, y_high, 5))
            out += cat("<path class=\"g\" d=\"M", at(x + left), " ", at(up(v)), "H", at(x + width - right),
                       "\"/><text x=\"", at(x + left - 5), "\" y=\"", at(up(v) + 4), "\" text-anchor=\"end\">",
                       shown(v), "</text>");
        if (!x_label.empty())
            for (double v : log_x ? log_ticks(x_low, x_high, true) : round_ticks(x_low, x_high, 6))
                out += cat("<path class=\"a\" d=\"M", at(across(v)), " ", at(y + height - bottom), "v4\"/><text x=\"",
                           at(across(v)), "\" y=\"", at(y + height - bottom + 16), "\" text-anchor=\"middle\">",
                           shown(v), "</text>");
        out += cat("<path class=\"a\" d=\"M", at(x + left), " ", at(y + top), "V", at(y + height - bottom), "H",
                   at(x + width - right), "\"/>");
        out += cat("<text x=\"", at(x + (left + width - right) / 2), "\" y=\"", at(y + height - 7),
                   "\" text-anchor=\"middle\">", escape_xml(x_label), "</text>");
        out += cat("<text transform=\"translate(", at(x + 11), " ", at(y + (top + height - bottom) / 2),
                   ") rotate(-90)\" text-anchor=\"middle\">", escape_xml(y_label), "</text>");
        return out;
    }
};

std::string document(std::size_t n_panels, int columns, const std::string& body,
                     const std::vector<std::pair<std::string, int>>& legend) {
    const int    n     = std::min(int(n_panels), columns);
    const int    rows  = (int(n_panels) + columns - 1) / columns;
    const double whole = n * width;
    std::string  keys;
    double       x = 10, y = rows * height + 16;
    for (const auto& [name, colour] : legend) {
        const double length = 30 + 6.3 * double(name.size());
        if (x + length > whole && x > 10) x = 10, y += 17;
        keys += cat("<rect class=\"f", colour, "\" x=\"", at(x), "\" y=\"", at(y - 9),
                    "\" width=\"12\" height=\"10\"/><text x=\"", at(x + 17), "\" y=\"", at(y), "\">", escape_xml(name),
                    "</text>");
        x += length;
    }
    return cat("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 ", at(whole), " ", at(y + 8), "\" width=\"",
               at(whole), "\" height=\"", at(y + 8), "\">", style(), body, keys, "</svg>\n");
}

std::string line_chart(std::span<const LinePanel> panels, int columns) {
    std::string                              body;
    std::vector<std::pair<std::string, int>> legend;
    for (std::size_t i = 0; i < panels.size(); i++) {
        const LinePanel& p = panels[i];
        Frame            f;
        f.x = double(int(i) % columns) * width, f.y = double(int(i) / columns) * height;
        f.log_x = p.log_x, f.log_y = p.log_y;
        f.x_low = f.y_low = std::numeric_limits<double>::infinity();
        f.x_high = f.y_high = 0;
        for (const Line& line : p.lines)
            for (auto [x, y] : line.points) {
                if (!std::isfinite(y)) continue;
                if (p.y_most <= 0 || y <= p.y_most) f.x_high = std::max(f.x_high, x);
                f.x_low = std::min(f.x_low, x), f.y_low = std::min(f.y_low, y), f.y_high = std::max(f.y_high, y);
            }
        if (f.x_high <= 0) continue;
        if (!p.log_x && p.from_zero) f.x_low = 0, f.x_high *= 1.05;
        if (!p.log_y) f.y_low = 0, f.y_high *= 1.05;
        if (p.y_most > 0) f.y_high = std::min(p.y_most, f.y_high);
        if (f.y_high <= f.y_low) f.y_high = f.y_low + 1;
        if (f.x_high <= f.x_low) f.x_high = f.x_low + 1;
        body += f.draw(p.title, p.x_label, p.y_label);
        // In a page with several charts an id means one rectangle for all of them.
        const std::string id = cat("c", int(f.x), "-", int(f.y));
        body += cat("<clipPath id=\"", id, "\"><rect x=\"", at(f.x + left), "\" y=\"", at(f.y + top), "\" width=\"",
                    at(width - left - right), "\" height=\"", at(height - top - bottom),
                    "\"/></clipPath><g clip-path=\"url(#", id, ")\">");
        for (const Line& line : p.lines) {
            std::string path;
            for (auto [x, y] : line.points) {
                const double shown = std::isinf(y) ? 10 * f.y_high : y;
                if (!std::isnan(y))
                    path += cat(path.empty() ? "M" : "L", at(f.across(x)), " ", at(std::max(f.up(shown), -9999.0)));
            }
            body += cat("<path class=\"l s", line.colour, line.dashed ? " d" : "", "\" d=\"", path, "\"><title>",
                        escape_xml(line.name), "</title></path>");
            if (std::ranges::find(legend, std::pair(line.name, line.colour)) == legend.end())
                legend.emplace_back(line.name, line.colour);
        }
        body += "</g>";
    }
    return document(panels.size(), columns, body, legend);
}

std::string bar_chart(std::span<const BarPanel> panels, int columns) {
    std::string                              body;
    std::vector<std::pair<std::string, int>> legend;
    for (std::size_t i = 0; i < panels.size(); i++) {
        const BarPanel& p = panels[i];
        Frame           f;
        f.x = double(int(i) % columns) * width, f.y = double(int(i) / columns) * height;
        f.y_high = 0;
        for (const auto& group : p.values) {
            double sum = 0;
            for (double v : group)
                if (std::isfinite(v)) sum = p.stacked ? sum + v : std::max(sum, v);
            f.y_high = std::max(f.y_high, sum);
        }
        f.y_high = f.y_high > 0 ? f.y_high * 1.1 : 1;
        f.x_high = double(p.groups.size());
        body += f.draw(p.title, "", p.y_label);
        const double slot = (width - left - right) / std::max<double>(1, double(p.groups.size()));
        for (std::size_t g = 0; g < p.groups.size(); g++) {
            const double one  = p.stacked ? slot * 0.6 : slot * 0.84 / double(p.parts.size());
            double       base = 0;
            for (std::size_t part = 0; part < p.parts.size(); part++) {
                const double v = p.values[g][part];
                if (!std::isfinite(v) || v <= 0) continue;
                const int    colour = p.colours.empty() ? int(part) : p.colours[part];
                const double x      = f.across(double(g)) + (p.stacked ? slot * 0.2 : slot * 0.08 + one * double(part));
                body += cat("<rect class=\"f", colour, "\" x=\"", at(x), "\" y=\"", at(f.up(base + v)), "\" width=\"",
                            at(one * 0.94), "\" height=\"", at(f.up(base) - f.up(base + v)), "\"><title>",
                            escape_xml(cat(p.groups[g], ", ", p.parts[part], ": ", shown(v))), "</title></rect>");
                if (p.stacked) base += v;
                if (std::ranges::find(legend, std::pair(p.parts[part], colour)) == legend.end())
                    legend.emplace_back(p.parts[part], colour);
            }
            // "Orca (Max)" on two lines: side by side such names would overlap.
            const std::size_t cut    = std::min(p.groups[g].find(" ("), p.groups[g].size());
            const auto        middle = [&](std::string_view text, double below) {
                return cat("<text x=\"", at(f.across(double(g)) + slot / 2), "\" y=\"",
                                  at(f.y + height - bottom + below), "\" text-anchor=\"middle\">", escape_xml(text),
                                  "</text>");
            };
            body += middle(std::string_view(p.groups[g]).substr(0, cut), 16);
            if (cut < p.groups[g].size()) body += middle(std::string_view(p.groups[g]).substr(cut + 1), 29);
        }
    }
    return document(panels.size(), columns, body, legend);
}

} // namespace quire::paper
