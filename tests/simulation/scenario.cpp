// Seeds to scenarios, scenarios to text.
#include <charconv>
#include <string>

#include "hashes.h"
#include "scenario.h"

namespace quire::simulation {

Random::Random(std::uint64_t seed, Stream name)
    : state_(mix(seed * 0x9e3779b97f4a7c15ull + mix(std::uint64_t(name) + 1))) {}

std::uint64_t Random::next() { return mix(state_ += 0x9e3779b97f4a7c15ull); }

namespace {

// Layers of one to four groups, alike or not: entries of several blocks, blocks of several layers.
std::vector<int> some_windows(Random& r, int block_size) {
    std::vector<int> windows;
    const int        n_groups = r.one_in(3) ? 1 : r.between(2, 4);
    bool             whole    = !r.one_in(3); // a group that sees all
    for (int g = 0; g < n_groups; g++) {
        const int window = std::exchange(whole, false) ? 0 : 1 + r.below(6 * block_size);
        for (int n = r.one_in(2) ? 1 : r.between(1, 3); n > 0; n--) windows.push_back(window);
    }
    for (std::size_t i = windows.size(); i > 1; i--) std::swap(windows[i - 1], windows[std::size_t(r.below(int(i)))]);
    return windows;
}

// One model in three has layers with a recurrent state; some have no others.
void add_states(Scenario& s) {
    Random r(s.seed, Stream::states);
    if (!r.one_in(3)) return;
    if (r.one_in(4)) s.windows.clear();
    for (int n = r.between(1, 3); n > 0; n--)
        s.windows.insert(s.windows.begin() + r.below(int(s.windows.size()) + 1), recurrent);
    s.state_bytes = r.between(1, r.one_in(2) ? 200 : 2000);
    s.n_units     = r.one_in(3) ? r.between(1, 3) : r.between(2, 3 * s.sequences);
    s.interval    = s.block_size * r.between(1, r.one_in(2) ? 2 : 8);
}

Task make_task(Random& r, const Scenario& s, int i, int busy) {
    Task t;
    t.at     = r.one_in(3) ? r.below(busy) : r.below(std::max(busy / 4, 1));
    t.family = r.below(2);
    t.n_prompt =
        r.one_in(4) ? r.between(1, s.context - 2) : r.between(1, std::min(s.context - 2, 6 * s.block_size + 3));
    if (r.one_in(3)) t.n_prompt = std::min(s.context - 2, r.between(1, 4) * s.block_size); // ends with a block
    if (r.one_in(2)) t.differs = r.below(t.n_prompt + 1), t.variant = r.below(3);
    if (i > 0 && r.one_in(5)) {
        t.follows  = r.below(i);
        t.n_prompt = r.between(1, 6);
    }
    t.max_tokens = r.one_in(4) ? r.between(1, s.context) : r.between(1, 12);
    t.priority   = r.one_in(4) ? r.between(-2, 2) : 0;
    t.salt       = r.one_in(6) ? r.between(1, Task::no_cache) : 0;
    t.ignore_end = r.one_in(2);
    t.sampled    = r.one_in(2);
    t.penalties  = r.one_in(6);
    // Few seeds: equal requests come again.
    t.sample_seed = std::uint64_t(r.below(3));
    if (r.one_in(6)) t.min_tokens = r.below(t.max_tokens + 1);
    if (r.one_in(8)) t.logprobs = r.below(3);
    if (r.one_in(12)) t.prompt_logprobs = r.below(3);
    t.progress = r.one_in(8);
    switch (r.below(10)) {
        case 0: t.n = r.between(2, 4); break;
        case 1: t.n = r.between(1, 2), t.best_of = t.n + r.between(0, 2); break;
        case 2:
        case 3: t.beams = r.between(2, 4), t.n = r.between(1, t.beams); break;
        case 4: t.pattern = Pattern(r.between(1, 4)), t.min_tokens = 0; break;
        case 5:
            if (r.one_in(2)) t.pin = true;
            break;
        default: break;
    }
    if (t.n == 1 && t.beams == 0 && t.best_of == 0 && r.one_in(8)) t.shifts = true;
    t.n       = std::min(t.n, s.sequences);
    t.best_of = std::min(t.best_of, s.sequences);
    t.beams   = std::min(t.beams, s.sequences);
    if (t.beams > 0) t.min_tokens = 0; // the API refuses both together
    if (t.pin) t.n = 1, t.best_of = t.beams = 0, t.prompt_logprobs = -1;
    if (r.one_in(6) || t.pin) t.cancel_after = r.below(busy);
    if (r.one_in(6) && t.n > 1) t.cancel_answer = r.below(t.n), t.cancel_answer_after = r.below(busy);
    return t;
}

} // namespace

Scenario make_scenario(std::uint64_t seed) {
    Random   r(seed, Stream::scenario);
    Scenario s;
    s.seed            = seed;
    const int sizes[] = {1, 2, 2, 3, 4, 4, 5, 8, 16};
    s.block_size      = sizes[r.below(9)];
    s.context         = r.between(4, 12) * s.block_size + r.below(s.block_size) + 4;
    const int whole   = (s.context + s.block_size - 1) / s.block_size; // blocks of the longest sequence
    s.n_blocks        = r.one_in(3) ? r.between(4, whole + 2) : r.between(whole, 4 * whole);
    s.n_swap          = r.one_in(3) ? 0 : r.between(1, s.n_blocks);
    s.sequences       = r.between(1, 10);
    s.step_tokens     = s.sequences + r.below(r.one_in(2) ? 8 : 48);
    s.windows         = some_windows(r, s.block_size);
    s.cache           = !r.one_in(5);
    s.keep_preempted  = !r.one_in(3);
    s.pipeline        = r.one_in(2);
    s.shuffled        = r.one_in(2);
    s.device_best     = r.one_in(2);
    s.late            = r.one_in(2);
    s.late_moves      = r.one_in(2);
    s.paced           = r.one_in(6);
    s.preemption      = PreemptionMode(r.below(3));
    s.watermark       = r.one_in(3) ? 0 : 0.01 * r.between(1, 25);
    s.token_seconds   = 1e-4 * r.between(1, 30);
    s.block_seconds   = 1e-4 * r.between(1, 30);
    add_states(s);
    Random tier(seed, Stream::tier);
    if (tier.one_in(2)) s.n_tier = tier.between(1, tier.one_in(2) ? 4 : 3 * s.n_blocks);
    Random guesser(seed, Stream::guesser);
    if (guesser.one_in(3)) s.drafts = guesser.between(1, 7), s.guesses = Guesses(guesser.below(4));
    const int n    = r.between(2, 14);
    const int busy = r.between(4, 60);
    Random    disk(seed, Stream::disk);
    if (s.n_tier > 0 && disk.one_in(2)) {
        s.disk      = disk.between(1, disk.one_in(3) ? 20 : 200) * 1000;
        s.disk_jobs = disk.between(1, 8);
        if (disk.one_in(2)) s.disk_trouble = disk.between(2, 16);
        if (disk.one_in(2)) s.restart = disk.below(2 * busy);
    }
    if (Random leaver(seed, Stream::leaver); s.n_tier > 0 && s.disk == 0 && s.cache && leaver.one_in(2))
        s.leave = leaver.below(2 * busy);
    for (int i = 0; i < n; i++) s.tasks.push_back(make_task(r, s, i, busy));
    if (r.one_in(5)) s.faults.push_back({r.below(busy), FaultKind::not_finite});
    if (r.one_in(12)) s.faults.push_back({r.below(busy), FaultKind(r.between(1, 3))});
    Random moves(seed, Stream::moves);
    s.reordered_moves = moves.one_in(2);
    if (moves.one_in(2))
        for (Fault& f : s.faults)
            if (f.kind == FaultKind::move) f.kind = FaultKind::torn_move;
    if (s.disk > 0 && moves.one_in(2)) s.cache_moves = moves.between(1, 6);
    return s;
}

Scenario make_drafted(std::uint64_t seed) {
    Random   r(seed, Stream::drafted);
    Scenario s = make_scenario(seed);
    s.drafts   = r.between(1, 7);
    s.guesses  = Guesses(seed % kinds_of_guesses);
    for (Task& t : s.tasks) {
        if (r.one_in(4) && t.beams == 0) t.biases = r.between(1, 8);
        if (r.one_in(4) && t.beams == 0) t.stops = r.between(1, 60);
        if (r.one_in(4) && t.beams == 0 && t.pattern == Pattern::none && !t.pin) {
            t.pattern    = Pattern(r.between(1, 4));
            t.min_tokens = 0;
        }
    }
    return s;
}

std::string describe(const Scenario& s) {
    const Scenario d;
    std::string    out = cat("engine: blocks of ", s.block_size, ", ", s.n_blocks, " of them, ", s.n_swap, " to swap, ",
                             s.n_tier, " to keep in host memory; context ", s.context, ", ", s.step_tokens,
                             " tokens in a step, ", s.sequences, " sequences; windows");
    for (int w : s.windows) out += w == recurrent ? std::string(" state") : cat(" ", w);
    if (s.n_units > 0)
        out += cat("; states of ", s.state_bytes, " bytes a layer, room for ", s.n_units, ", one kept every ",
                   s.interval, " tokens");
    out += cat("; ",
               s.preemption == PreemptionMode::swap        ? "swaps"
               : s.preemption == PreemptionMode::recompute ? "recomputes"
                                                           : "swaps or recomputes",
               "; watermark ", s.watermark);
    const auto flag = [&](bool on, const char* name) { out += on ? cat("; ", name) : std::string(); };
    if (s.disk > 0)
        out += cat("; ", s.disk, " bytes of files, up to ", s.disk_jobs, " jobs a step, one in ", s.disk_trouble,
                   " writes fails");
    if (s.cache_moves > 0) out += cat("; ", s.cache_moves, " requests that move the cache");
    if (s.leave >= 0) out += cat("; leaves after step ", s.leave, " and comes back");
    if (s.restart >= 0) out += cat("; killed before step ", s.restart);
    flag(!s.cache, "no prefix cache");
    flag(!s.keep_preempted, "preempted blocks leave the cache");
    flag(s.pipeline, "pipelined");
    flag(s.shuffled, "blocks in another order");
    flag(s.device_best, "the device finds the best token");
    flag(s.late, "computed late");
    flag(s.late_moves, "moved late");
    flag(s.reordered_moves, "moved in any order");
    flag(!s.scribbles, "free blocks stay as they are");
    flag(s.paced, "chunks by time");
    const char* guesses[] = {"right",  "wrong",      "right or wrong", "right or wrong, where it pays",
                             "random", "adversarial"};
    if (s.drafts > 0) out += cat("; ", s.drafts, " draft tokens, ", guesses[int(s.guesses)]);
    if (s.no_memory > 0)
        out += cat("; behind the server each allocation number ", s.no_memory, " of a thread finds no memory");
    out += cat("; ", s.token_seconds, " s a token, ", s.block_seconds, " s a block\n");
    for (std::size_t i = 0; i < s.tasks.size(); i++) {
        const Task& t = s.tasks[i];
        const Task  u;
        if (!t.on) continue;
        out += cat("request ", i, " at step ", t.at, ": ");
        if (t.follows >= 0) out += cat("follows ", t.follows, ", ");
        out += cat(t.n_prompt, " tokens of family ", t.family);
        if (t.differs < t.n_prompt) out += cat(", of variant ", t.variant, " from ", t.differs);
        out += cat("; ", t.pin ? "pinned" : cat("max ", t.max_tokens));
        const auto number = [&](int v, int usual, const char* name) {
            if (v != usual) out += cat("; ", name, " ", v);
        };
        number(t.min_tokens, u.min_tokens, "min");
        number(t.n, u.n, "n");
        number(t.best_of, u.best_of, "best of");
        number(t.beams, u.beams, "beams");
        number(t.priority, u.priority, "priority");
        number(t.salt, u.salt, "salt");
        number(t.logprobs, u.logprobs, "logprobs");
        number(t.prompt_logprobs, u.prompt_logprobs, "prompt logprobs");
        number(int(t.pattern), 0, "constraint");
        number(t.biases, 0, "biases");
        number(t.stops, 0, "tokens that end it");
        flag(t.sampled, "sampled");
        if (t.sampled) number(int(t.sample_seed), -1, "seed");
        flag(t.penalties, "penalties");
        flag(t.ignore_end, "ignores the end");
        flag(t.shifts, "context shift");
        flag(t.progress, "progress");
        number(t.cancel_after, u.cancel_after, "cancelled after");
        if (t.cancel_answer >= 0) out += cat("; answer ", t.cancel_answer, " cancelled after ", t.cancel_answer_after);
        out += '\n';
    }
    const char* kinds[] = {"a row that is not finite", "a failing move", "a failing launch", "failing results",
                           "a move that fails in the middle"};
    for (const Fault& f : s.faults) out += cat("fault from step ", f.at, ": ", kinds[int(f.kind)], "\n");
    return out;
}

namespace {

using Value = std::variant<int*, bool*>;

// The numbers of a scenario by name, with what each is where it is simplest.
struct Number {
    const char* name;
    Value       value;
    int         simplest;
};

std::vector<Number> numbers_of(Scenario& s) {
    return {{"pipeline", &s.pipeline, 0},
            {"shuffled", &s.shuffled, 0},
            {"late", &s.late, 0},
            {"late_moves", &s.late_moves, 0},
            {"reordered_moves", &s.reordered_moves, 0},
            {"cache_moves", &s.cache_moves, 0},
            {"device_best", &s.device_best, 0},
            {"paced", &s.paced, 0},
            {"scribbles", &s.scribbles, 1},
            {"cache", &s.cache, 0},
            {"drafts", &s.drafts, 0},
            {"no_memory", &s.no_memory, 0},
            {"crash", &s.crash, 0},
            {"units", &s.n_units, s.n_units},
            {"interval", &s.interval, s.interval},
            {"keep_preempted", &s.keep_preempted, 1},
            {"swap", &s.n_swap, 0},
            {"restart", &s.restart, -1},
            {"leave", &s.leave, -1},
            {"disk_trouble", &s.disk_trouble, 0},
            {"disk_jobs", &s.disk_jobs, 8},
            {"disk", &s.disk, 0},
            {"tier", &s.n_tier, 0},
            {"block", &s.block_size, s.block_size},
            {"blocks", &s.n_blocks, s.n_blocks},
            {"step_tokens", &s.step_tokens, 64},
            {"sequences", &s.sequences, s.sequences},
            {"context", &s.context, s.context}};
}

std::vector<Number> numbers_of(Task& t) {
    return {{"on", &t.on, 0},
            {"sampled", &t.sampled, 0},
            {"penalties", &t.penalties, 0},
            {"shifts", &t.shifts, 0},
            {"progress", &t.progress, 0},
            {"pin", &t.pin, 0},
            {"cancel", &t.cancel_after, -1},
            {"cancel_answer", &t.cancel_answer, -1},
            {"logprobs", &t.logprobs, -1},
            {"prompt_logprobs", &t.prompt_logprobs, -1},
            {"priority", &t.priority, 0},
            {"salt", &t.salt, 0},
            {"biases", &t.biases, 0},
            {"stops", &t.stops, 0},
            {"min", &t.min_tokens, 0},
            {"beams", &t.beams, 0},
            {"best_of", &t.best_of, 0},
            {"n", &t.n, 1},
            {"follows", &t.follows, -1},
            {"ignore_end", &t.ignore_end, 1},
            {"differs", &t.differs, 1000},
            {"family", &t.family, 0},
            {"max", &t.max_tokens, 1},
            {"prompt", &t.n_prompt, 1},
            {"at", &t.at, 0}};
}

int  get(const Value& v) { return std::holds_alternative<int*>(v) ? *std::get<int*>(v) : int(*std::get<bool*>(v)); }
void set(const Value& v, int to) {
    if (std::holds_alternative<int*>(v)) *std::get<int*>(v) = to;
    else *std::get<bool*>(v) = to != 0;
}

} // namespace

bool change(Scenario& s, const std::string& how) {
    const std::size_t equals = how.find('=');
    if (equals == std::string::npos) return false;
    const std::string name = how.substr(0, equals), value = how.substr(equals + 1);
    if (name == "only") {
        for (Task& t : s.tasks) t.on = false;
        std::istringstream list(value);
        for (std::string one; std::getline(list, one, ',');) {
            const auto i = std::size_t(std::strtol(one.c_str(), nullptr, 10));
            if (i >= s.tasks.size()) return false;
            s.tasks[i].on = true;
        }
        return true;
    }
    int               to   = 0;
    const char* const last = value.data() + value.size();
    if (const auto [end, error] = std::from_chars(value.data(), last, to); error != std::errc() || end != last)
        return false;
    if (name == "faults") {
        s.faults.resize(std::min(s.faults.size(), std::size_t(to)));
        return true;
    }
    const auto in = [&](const std::vector<Number>& numbers, const std::string& which) {
        for (const Number& n : numbers)
            if (which == n.name) {
                set(n.value, to);
                return true;
            }
        return false;
    };
    const std::size_t dot = name.find('.');
    if (dot == std::string::npos) return in(numbers_of(s), name);
    const auto i = std::size_t(std::strtol(name.c_str(), nullptr, 10));
    return i < s.tasks.size() && in(numbers_of(s.tasks[i]), name.substr(dot + 1));
}

std::vector<std::string> simpler(const Scenario& scenario) {
    Scenario                 s = scenario;
    std::vector<std::string> all;
    for (std::size_t n = 0; n < s.faults.size(); n++) all.push_back(cat("faults=", n));
    for (std::size_t i = 0; i < s.tasks.size(); i++)
        if (s.tasks[i].on) all.push_back(cat(i, ".on=0"));
    for (const Number& n : numbers_of(s))
        if (get(n.value) != n.simplest) all.push_back(cat(n.name, "=", n.simplest));
    for (std::size_t i = 0; i < s.tasks.size(); i++) {
        if (!s.tasks[i].on) continue;
        for (const Number& n : numbers_of(s.tasks[i])) {
            const int now = get(n.value);
            if (now == n.simplest || n.name == std::string_view("on")) continue;
            all.push_back(cat(i, ".", n.name, "=", n.simplest));
            const int half = n.simplest + (now - n.simplest) / 2;
            if (half != now && half != n.simplest && n.name != std::string_view("follows"))
                all.push_back(cat(i, ".", n.name, "=", half));
            const int less = now - (now > n.simplest ? 1 : -1);
            if (less != half && less != n.simplest && n.name != std::string_view("follows"))
                all.push_back(cat(i, ".", n.name, "=", less));
        }
    }
    return all;
}

} // namespace quire::simulation
