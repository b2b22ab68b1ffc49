// quire.tools.viz.block_view: a snapshot of the KV memory, or a recorded run, as text for a terminal, as JSON, or as an HTML page.
// Owns nothing.
module;

#include "block_view_html.h" // made by CMake from block_view.html

export module quire.tools.viz.block_view;

import quire.core.base;
import quire.paging.block;
import quire.paging.cache_layout;
import quire.serve.status.snapshot_json;

export namespace quire {

// Reads the JSON of docs/block-viz.md.
Result<Snapshot> snapshot_from_json(const Json& json);

// A recorded run as a file: JSON lines, a header and one snapshot each.
std::string to_jsonl(const Trace& trace);
// Reads such a file, or one snapshot alone. Error: the line, and its fault.
Result<Trace> parse_trace(std::string_view text);

// For a terminal: block tables, the pool as a map, the sums. `color`: with ANSI colours, one for each request.
std::string to_text(const Snapshot& snapshot, bool color);
// The meaning of the signs in to_text(): shown once, before all snapshots.
std::string text_legend();

// One self-contained page that plays the run.
std::string to_html(const Trace& trace);

} // namespace quire

module :private;

namespace quire {

// Reads fields of one object; the first fault is kept.
class Fields {
public:
    Fields(const Json& object, std::string where) : object_(object), where_(std::move(where)) {
        if (!object.is_object()) complain("is not an object");
    }

    std::int64_t number(const char* key, std::int64_t low, std::int64_t high,
                        std::optional<std::int64_t> fallback = {}) {
        const Json* value = find(key, fallback.has_value());
        if (!value) return fallback.value_or(low);
        if (!value->is_number_integer() || (value->is_number_unsigned() && value->get<std::uint64_t>() > INT64_MAX_) ||
            value->get<std::int64_t>() < low || value->get<std::int64_t>() > high) {
            complain(cat("has a ", key, " that is not a whole number in ", low, "..", high));
            return low;
        }
        return value->get<std::int64_t>();
    }

    std::string text(const char* key) {
        const Json* value = find(key, true);
        if (!value) return "";
        if (!value->is_string()) complain(cat("has a ", key, " that is not a string"));
        else return value->get<std::string>();
        return "";
    }

    bool flag(const char* key) {
        const Json* value = find(key, true);
        if (value && !value->is_boolean()) complain(cat("has a ", key, " that is neither true nor false"));
        return value && value->is_boolean() && value->get<bool>();
    }

    // Elements of an array, at most `most`; none where it is missing and may be.
    const Json& array(const char* key, std::size_t most, bool optional = false) {
        static const Json none  = Json::array();
        const Json*       value = find(key, optional);
        if (!value) return none;
        if (!value->is_array() || value->size() > most) {
            complain(cat("has ", key, " that are no array of at most ", most));
            return none;
        }
        return *value;
    }

    template <std::size_t N>
    std::size_t one_of(const char* key, const std::string_view (&names)[N]) {
        const std::string name = text(key);
        for (std::size_t i = 0; i < N; i++)
            if (names[i] == name) return i;
        complain(cat("has the unknown ", key, " ", quote(name)));
        return 0;
    }

    void complain(const std::string& what) {
        if (fault_.empty()) fault_ = cat(where_, " ", what);
    }
    const std::string& fault() const { return fault_; }

private:
    static constexpr std::uint64_t INT64_MAX_ = std::uint64_t(std::numeric_limits<std::int64_t>::max());

    const Json* find(const char* key, bool optional) {
        if (!object_.is_object()) return nullptr;
        const auto at = object_.find(key);
        if (at != object_.end()) return &*at;
        if (!optional) complain(cat("has no ", key));
        return nullptr;
    }

    const Json& object_;
    std::string where_, fault_;
};

constexpr std::int64_t most_blocks = 1 << 20, most_sequences = 1 << 16, most_events = 1 << 20, most_tokens = 1 << 30;
constexpr std::size_t  most_steps = 100'000;

Result<Snapshot> snapshot_from_json(const Json& json) {
    Snapshot s;
    Fields   f(json, "the snapshot");
    s.step          = std::uint64_t(f.number("step", 0, std::numeric_limits<std::int64_t>::max(), 0));
    s.label         = f.text("label");
    s.block_size    = int(f.number("block_size", 1, 65536));
    s.context       = int(f.number("context", 0, most_tokens, 0));
    s.n_swap_blocks = int(f.number("swap_blocks", 0, most_blocks, 0));
    s.n_swap_used   = int(f.number("swap_used", 0, s.n_swap_blocks, 0));
    s.n_host_cached = int(f.number("host_cached", 0, s.n_swap_blocks, 0));
    s.n_in_files    = int(f.number("in_files", 0, std::numeric_limits<int>::max(), 0));
    if (!f.fault().empty()) return fail(f.fault());
    for (const Json& block : f.array("blocks", std::size_t(most_blocks))) {
        Fields     b(block, cat("block ", s.blocks.size()));
        BlockView& v           = s.blocks.emplace_back();
        v.ref_count            = int(b.number("refs", 0, most_sequences));
        v.filled               = int(b.number("filled", 0, s.block_size));
        v.pinned               = b.flag("pinned");
        v.group                = int(b.number("group", 0, most_cache_groups - 1, 0));
        v.state                = b.flag("state");
        v.first                = BlockId(b.number("first", -1, most_blocks, -1));
        const std::string hash = b.text("hash");
        if (!hash.empty()) {
            const auto number = to_number<std::uint64_t>(hash, 16);
            v.cached          = true;
            v.hash            = number.value_or(0);
            if (!number) b.complain("has a hash that is not hexadecimal");
        }
        if (!b.fault().empty()) return fail(b.fault());
    }
    for (const BlockView& v : s.blocks)
        if (v.first >= BlockId(s.blocks.size()))
            f.complain(cat("has a block behind one that is not of ", s.blocks.size()));
    if (!f.fault().empty()) return fail(f.fault());
    for (const Json& sequence : f.array("sequences", std::size_t(most_sequences))) {
        Fields        q(sequence, cat("sequence ", s.sequences.size()));
        SequenceView& v       = s.sequences.emplace_back();
        v.request             = RequestId(q.number("request", 0, std::numeric_limits<std::int64_t>::max()));
        v.index               = int(q.number("index", 0, most_sequences, 0));
        v.status              = ViewStatus(q.one_of("status", status_names));
        v.n_tokens            = int(q.number("tokens", 0, most_tokens));
        v.n_prompt            = int(q.number("prompt", 0, v.n_tokens));
        v.n_computed          = int(q.number("computed", 0, v.n_tokens));
        v.n_released          = int(q.number("released", 0, most_blocks, 0));
        const int  n          = v.status == ViewStatus::swapped ? s.n_swap_blocks : int(s.blocks.size());
        const auto read_table = [&](Fields& from, std::vector<BlockId>& to) {
            for (const Json& block : from.array("blocks", std::size_t(most_blocks))) {
                const bool is_id =
                    block.is_number_integer() && block.get<std::int64_t>() >= 0 && block.get<std::int64_t>() < n;
                if (!is_id) q.complain(cat("maps a block that is not one of ", n));
                to.push_back(is_id ? block.get<BlockId>() : 0);
            }
        };
        read_table(q, v.blocks);
        for (const Json& table : q.array("other_groups", std::size_t(most_cache_groups), true)) {
            Fields               t(table, cat("a table of sequence ", s.sequences.size() - 1));
            SequenceView::Table& other = v.other_groups.emplace_back();
            other.n_released           = int(t.number("released", 0, most_blocks, 0));
            read_table(t, other.blocks);
            if (!t.fault().empty()) return fail(t.fault());
        }
        if (const auto state = sequence.find("state"); state != sequence.end()) {
            Fields t(*state, cat("the state of sequence ", s.sequences.size() - 1));
            v.n_in_state = int(t.number("tokens", 0, v.n_tokens));
            read_table(t, v.state);
            if (!t.fault().empty()) return fail(t.fault());
        }
        for (const Json& text : q.array("texts", std::size_t(most_blocks), true)) {
            if (!text.is_string()) q.complain("has a text that is not a string");
            v.texts.push_back(text.is_string() ? text.get<std::string>() : "");
        }
        if (!q.fault().empty()) return fail(q.fault());
    }
    for (const Json& event : f.array("events", std::size_t(most_events), true)) {
        Fields       e(event, cat("event ", s.events.size()));
        MemoryEvent& v          = s.events.emplace_back();
        v.kind                  = MemoryEventKind(e.one_of("kind", event_names));
        v.request               = RequestId(e.number("request", 0, std::numeric_limits<std::int64_t>::max(), 0));
        v.index                 = int(e.number("index", 0, most_sequences, 0));
        const std::int64_t most = std::max<std::int64_t>(std::ssize(s.blocks), s.n_swap_blocks) - 1;
        v.from                  = BlockId(e.number("from", -1, most, -1));
        v.to                    = BlockId(e.number("to", -1, most, -1));
        if (!e.fault().empty()) return fail(e.fault());
    }
    if (!f.fault().empty()) return fail(f.fault());
    return s;
}

std::string to_jsonl(const Trace& trace) {
    std::string out = json_dump(Json{{"quire_trace", 1}, {"model", trace.model}, {"title", trace.title}}) + "\n";
    for (const Snapshot& s : trace.steps) out += json_dump(to_json(s)) + "\n";
    return out;
}

Result<Trace> parse_trace(std::string_view text) {
    Trace       trace;
    std::size_t line = 0;
    for (std::string_view one : split(text, '\n')) {
        line++;
        if (one.find_first_not_of(" \t\r") == std::string_view::npos) continue;
        Result<Json> json = json_parse(one, {.bytes = std::size_t(256) << 20, .depth = 8});
        if (!json) return fail("line ", line, ": ", json.error().message);
        if (json->is_object() && json->contains("quire_trace")) {
            Fields header(*json, "the header");
            header.number("quire_trace", 1, 1);
            trace.model = header.text("model");
            trace.title = header.text("title");
            if (!header.fault().empty()) return fail("line ", line, ": ", header.fault());
            continue;
        }
        if (trace.steps.size() >= most_steps) return fail("line ", line, ": more than ", most_steps, " steps");
        Result<Snapshot> snapshot = snapshot_from_json(*json);
        if (!snapshot) return fail("line ", line, ": ", snapshot.error().message);
        trace.steps.push_back(std::move(*snapshot));
    }
    if (trace.steps.empty()) return fail("there is no snapshot in it");
    return trace;
}

// -- text

class Painter {
public:
    explicit Painter(bool color) : color_(color) {}
    std::string request(RequestId id, const std::string& text) const {
        constexpr int hues[] = {39, 214, 42, 175, 202, 81, 141, 148};
        return color_ ? cat("\x1b[38;5;", hues[(id + 7) % 8], "m", text, "\x1b[0m") : text;
    }
    std::string dim(const std::string& text) const { return color_ ? cat("\x1b[2m", text, "\x1b[0m") : text; }
    std::string bold(const std::string& text) const { return color_ ? cat("\x1b[1m", text, "\x1b[0m") : text; }

private:
    bool color_;
};

std::string percent(double fraction) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f %%", 100 * fraction);
    return text;
}

std::string describe(const MemoryEvent& e) {
    const std::string who = cat("request ", e.request);
    switch (e.kind) {
        case MemoryEventKind::admit: return who + " admitted";
        case MemoryEventKind::fork: return cat(who, " forked: answer ", e.index + 1);
        case MemoryEventKind::copy: return cat("copy on write: block ", e.from, " → ", e.to);
        case MemoryEventKind::swap_out:
            return e.from < 0 ? who + " swapped out" : cat("block ", e.from, " → host ", e.to);
        case MemoryEventKind::swap_in:
            return e.from < 0 ? who + " swapped in" : cat("host ", e.from, " → block ", e.to);
        case MemoryEventKind::recompute: return who + " gave up its blocks, to be computed again";
        case MemoryEventKind::evict: return cat("block ", e.from, " evicted from the cache");
        case MemoryEventKind::free: return who + " left";
        case MemoryEventKind::finish: return cat(who, ": answer ", e.index + 1, " ended");
        case MemoryEventKind::pin: return who + " pinned";
    }
    return "";
}

bool begins_character(char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; } // in UTF-8

// Lines of at most 80 columns, broken between words, indented by two; a character is a column.
std::string wrap(const std::string& text) {
    std::string out;
    std::size_t column = 80;
    for (std::string_view word : split(text)) {
        if (word.empty()) continue;
        const auto wide   = std::size_t(std::ranges::count_if(word, begins_character));
        const bool breaks = column + 1 + wide > 80;
        if (breaks) out += out.empty() ? "  " : "\n  ";
        else out += ' ';
        column = breaks ? 2 + wide : column + 1 + wide;
        out += word;
    }
    return out + "\n";
}

// The last characters of a text, `most` of them.
std::string end_of(const std::string& text, std::size_t most) {
    std::size_t at = text.size(), n = 0;
    while (at > 0 && n + 1 < most) n += begins_character(text[--at]);
    return at == 0 ? text : cat("…", text.substr(at));
}

// A text of a model: nothing in it moves the cursor.
std::string on_one_line(std::string text) {
    for (char& c : text)
        if (static_cast<unsigned char>(c) < 32 || c == 127) c = ' ';
    return text;
}

std::string to_text(const Snapshot& s, bool color) {
    const Painter      paint(color);
    const MemoryTotals t = totals(s);
    std::string        out;
    out += paint.bold(cat("step ", s.step)) + "\n";
    if (!s.label.empty()) out += wrap(s.label);
    if (!s.events.empty()) {
        std::string line;
        for (const MemoryEvent& e : s.events) line += (line.empty() ? "[" : "; ") + describe(e);
        out += wrap(line + "]");
    }
    if (!s.sequences.empty()) out += "\n";
    // Block tables: logical block i is the i-th entry; filled slots in brackets where a block is not full.
    constexpr std::size_t  shown = 64;
    std::vector<RequestId> first_owner(s.blocks.size(), 0);
    for (const SequenceView& q : s.sequences) {
        const std::string name =
            cat("  request ", q.request, ".", q.index + 1, q.request < 10 ? " " : "", " ",
                status_names[std::size_t(q.status)], "  ", q.n_prompt, "+", q.n_tokens - q.n_prompt, " tokens");
        out += paint.request(q.request, name);
        out += std::string(name.size() < 38 ? 38 - name.size() : 1, ' ');
        if (q.blocks.empty()) out += "no blocks";
        const auto draw = [&](int n_released, const std::vector<BlockId>& blocks) {
            if (n_released > 0) out += cat("(", n_released, " released) ");
            for (std::size_t i = 0; i < blocks.size() && i < shown; i++) {
                const BlockId id     = blocks[i];
                const int     filled = std::clamp(q.n_computed - (n_released + int(i)) * s.block_size, 0, s.block_size);
                if (i > 0) out += " ";
                if (q.status == ViewStatus::swapped) {
                    out += cat("host:", id);
                    continue;
                }
                const BlockView& b = s.blocks[std::size_t(id)];
                out += cat(id, "[", filled, filled < s.block_size ? cat("/", s.block_size) : "", "]");
                if (b.ref_count > 1) out += cat("×", b.ref_count);
                if (b.pinned) out += "◆";
                if (b.cached) out += paint.dim("#" + hex(b.hash).substr(0, 4));
                if (first_owner[std::size_t(id)] == 0) first_owner[std::size_t(id)] = q.request;
            }
            if (blocks.size() > shown) out += cat(" … and ", blocks.size() - shown, " more");
            out += "\n";
        };
        draw(q.n_released, q.blocks);
        for (std::size_t g = 0; g < q.other_groups.size(); g++) {
            out += cat("    group ", g + 1, std::string(27, ' '));
            draw(q.other_groups[g].n_released, q.other_groups[g].blocks);
        }
        if (!q.state.empty()) {
            const bool host = q.status == ViewStatus::swapped;
            out += cat("    state of ", q.n_in_state, " tokens in ", q.state.size(),
                       q.state.size() > 1 ? " blocks from " : " block, ", host ? "host:" : "", q.state[0]);
            if (!host) {
                const BlockView& b = s.blocks[std::size_t(q.state[0])];
                if (b.ref_count > 1) out += cat("×", b.ref_count);
                if (b.cached) out += paint.dim("#" + hex(b.hash).substr(0, 4));
                for (const BlockId id : q.state)
                    if (first_owner[std::size_t(id)] == 0) first_owner[std::size_t(id)] = q.request;
            }
            out += "\n";
        }
        // Below the blocks: the end of the text in them, which is new.
        std::string texts;
        for (std::size_t i = 0; i < q.texts.size(); i++) texts += cat(i > 0 ? " |" : "", on_one_line(q.texts[i]));
        if (!texts.empty()) out += cat("    ", end_of(texts, 76), "\n");
    }
    for (std::size_t id = 0; id < s.blocks.size(); id++) // further blocks of an entry are in no table
        if (const BlockId first = s.blocks[id].first; first >= 0 && first_owner[id] == 0)
            first_owner[id] = first_owner[std::size_t(first)];
    // The pool: how many tables map each block, so many blocks to a character that it stays readable.
    const std::size_t n = s.blocks.size(), each = (n + 4095) / 4096, columns = 80;
    out += cat("  pool of ", n, " blocks of ", s.block_size, each > 1 ? cat("; a character is ", each, " blocks") : "",
               "\n");
    for (std::size_t begin = 0; begin < n; begin += columns * each) {
        std::string row;
        for (std::size_t at = begin; at < std::min(n, begin + columns * each); at += each) {
            // Of several blocks the most telling one.
            std::size_t best = at;
            for (std::size_t i = at; i < std::min(n, at + each); i++)
                if (s.blocks[i].ref_count > s.blocks[best].ref_count ||
                    (s.blocks[best].ref_count == 0 && s.blocks[i].cached))
                    best = i;
            const BlockView&  b = s.blocks[best];
            const std::string c = b.ref_count > 9   ? "*"
                                  : b.ref_count > 0 ? std::to_string(b.ref_count)
                                  : b.cached        ? "#"
                                                    : "·";
            row += b.ref_count > 0 ? paint.request(first_owner[best], c) : paint.dim(c);
        }
        out += cat("  ", std::string(6 - std::min<std::size_t>(6, std::to_string(begin).size()), ' '), begin, " ", row,
                   "\n");
    }
    out += cat("  used ", t.used, "  cached ", t.cached, "  free ", t.free, t.pinned ? cat("  pinned ", t.pinned) : "",
               "  internal waste ", percent(t.waste), "  saved by sharing ", percent(t.saved),
               s.n_swap_used ? cat("  swapped ", s.n_swap_used, " of ", s.n_swap_blocks) : "",
               s.n_host_cached ? cat("  in host memory ", s.n_host_cached) : "",
               s.n_in_files ? cat("  in files ", s.n_in_files) : "", "\n");
    return out;
}

std::string text_legend() {
    return "In the tables: 7[4]: physical block 7, 4 slots filled; 3[1/4]: 1 of 4; ×2: two\n"
           "tables map it; ◆: pinned; #8a1b: its hash begins so. Below, the text in the\n"
           "blocks. In the pool, for each block: 1-9: so many tables map it (*: more);\n"
           "#: free, but found by its hash; ·: free.\n";
}

// -- HTML

std::string to_html(const Trace& trace) {
    Json steps = Json::array();
    for (const Snapshot& s : trace.steps) steps.push_back(to_json(s));
    std::string data = json_dump(Json{{"model", trace.model}, {"title", trace.title}, {"steps", std::move(steps)}});
    // Inside <script> a text must not be able to close it.
    std::string safe;
    safe.reserve(data.size());
    for (char c : data) {
        if (c == '<') safe += "\\u003c";
        else safe += c;
    }
    constexpr std::string_view page = block_view_html, place = "@TRACE@";
    const std::size_t          at = page.find(place);
    return cat(page.substr(0, at), safe, page.substr(at + place.size()));
}

} // namespace quire
