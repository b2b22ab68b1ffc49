// quire.tools.bench.paper.points: the points of a figure, kept in a file so that a run can go on where it was stopped, and so that the
// page can be made again. Plain values, owns nothing.
export module quire.tools.bench.paper.points;

import quire.core.base;
import quire.core.json;
import quire.core.output_file;
import quire.tools.bench.paper.trace_run;

export namespace quire::paper {

struct Point {
    std::string panel, series; // "a"; "orca-max"
    std::string kind;          // the kind of value: "latency", "sustained", "saved", …
    double      x = 0, value = 0;
    TraceResult result = {};
};

// One figure, simulated or measured.
struct Points {
    std::string        figure, mode; // "12"; "simulated" or "measured"
    std::string        machine;      // the device, or the cost model
    std::string        settings;     // sets with equal settings are comparable: seed, scale, shape
    std::uint32_t      seed    = 1;
    double             seconds = 0; // that it took
    std::vector<Point> points  = {};

    // The value of the point with that panel, series, kind and x (any, if negative); NaN: there is none.
    double       value(std::string_view panel, std::string_view series, std::string_view kind, double x = -1) const;
    const Point* find(std::string_view panel, std::string_view series, std::string_view kind, double x = -1) const;
};

std::string  file_of(const std::string& folder, std::string_view mode, std::string_view figure);
Result<void> save(const std::string& folder, const Points& points);
// Nothing: there is no such file, or not one of this program's.
std::optional<Points> load(const std::string& folder, std::string_view mode, std::string_view figure);

} // namespace quire::paper

module :private;

namespace quire::paper {

const Point* Points::find(std::string_view panel, std::string_view series, std::string_view kind, double x) const {
    for (const Point& p : points)
        if (p.panel == panel && p.series == series && p.kind == kind && (x < 0 || std::fabs(p.x - x) < 1e-9)) return &p;
    return nullptr;
}

double Points::value(std::string_view panel, std::string_view series, std::string_view kind, double x) const {
    const Point* p = find(panel, series, kind, x);
    return p ? p->value : std::numeric_limits<double>::quiet_NaN();
}

std::string file_of(const std::string& folder, std::string_view mode, std::string_view figure) {
    return cat(folder, "/", mode, "-", figure, ".json");
}

// A number that JSON can hold: infinity, of a run that was given up, is null.
Json number(double v) { return std::isfinite(v) ? Json(v) : Json(); }

Result<void> save(const std::string& folder, const Points& p) {
    Json points = Json::array();
    for (const Point& point : p.points) {
        Json json{{"panel", point.panel},
                  {"series", point.series},
                  {"kind", point.kind},
                  {"x", point.x},
                  {"value", number(point.value)}};
        if (point.result.n_requests > 0) {
            json["run"]                 = to_json(point.result);
            json["run"]["mean_latency"] = number(point.result.mean_latency);
        }
        points.push_back(std::move(json));
    }
    // A line for each point.
    std::string text =
        cat("{\"figure\": ", json_dump(Json(p.figure)), ", \"mode\": ", json_dump(Json(p.mode)),
            ",\n \"machine\": ", json_dump(Json(p.machine)), ",\n \"settings\": ", json_dump(Json(p.settings)),
            ", \"seed\": ", p.seed, ", \"seconds\": ", p.seconds, ",\n \"points\": [");
    for (std::size_t i = 0; i < points.size(); i++) text += cat(i == 0 ? "\n" : ",\n", json_dump(points[i]));
    return write_file(file_of(folder, p.mode, p.figure), text + "\n]}\n");
}

std::optional<Points> load(const std::string& folder, std::string_view mode, std::string_view figure) {
    std::ifstream file(file_of(folder, mode, figure));
    if (!file) return std::nullopt;
    std::string text;
    for (std::string line; std::getline(file, line);) text += line + "\n";
    const Result<Json> json = json_parse(text);
    if (!json || !json->is_object() || !json->contains("points") || !(*json)["points"].is_array()) return std::nullopt;
    Points p;
    try {
        p.figure   = json->value("figure", "");
        p.mode     = json->value("mode", "");
        p.machine  = json->value("machine", "");
        p.settings = json->value("settings", "");
        p.seed     = json->value("seed", 1u);
        p.seconds  = json->value("seconds", 0.0);
        for (const Json& j : (*json)["points"]) {
            const auto value = [](const Json& of, const char* name) {
                return of.contains(name) && of[name].is_number() ? of[name].get<double>()
                                                                 : std::numeric_limits<double>::infinity();
            };
            Point& point = p.points.emplace_back();
            point.panel  = j.value("panel", "");
            point.series = j.value("series", "");
            point.kind   = j.value("kind", "");
            point.x      = j.value("x", 0.0);
            point.value  = value(j, "value");
            if (!j.contains("run")) continue;
            Json         run          = j["run"];
            const double latency      = value(run, "mean_latency");
            run["mean_latency"]       = 0.0;
            point.result              = result_from_json(run);
            point.result.mean_latency = latency;
        }
    } catch (const std::exception&) { // a field of another type
        return std::nullopt;
    }
    return p;
}

} // namespace quire::paper
