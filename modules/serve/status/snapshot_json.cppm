// quire.serve.status.snapshot_json: a snapshot of the KV memory as JSON (docs/block-viz.md). Owns nothing.
export module quire.serve.status.snapshot_json;

import quire.core.base;
export import quire.core.json;
import quire.paging.block;
export import quire.paging.snapshot;

export namespace quire {

// The names of MemoryEventKind and ViewStatus.
constexpr std::string_view event_names[]  = {"admit",     "fork",  "copy", "swap_out", "swap_in",
                                             "recompute", "evict", "free", "finish",   "pin"};
constexpr std::string_view status_names[] = {"waiting", "running", "swapped", "preempted", "pinned"};

std::string hex(std::uint64_t value);

// The JSON of docs/block-viz.md.
Json to_json(const Snapshot& snapshot);
// to_json() with `changed` in place of `blocks`: the blocks that differ from `before`, each with its `id`. The `texts` of a sequence lack
// the first `texts_kept`, which `before` has.
Json changes_to_json(const Snapshot& before, const Snapshot& snapshot);

} // namespace quire

module :private;

namespace quire {

std::string hex(std::uint64_t value) {
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
    return text;
}

Json to_json(const BlockView& b) {
    Json block{{"refs", b.ref_count}, {"filled", b.filled}};
    if (b.pinned) block["pinned"] = true;
    if (b.cached) block["hash"] = hex(b.hash);
    if (b.group > 0) block["group"] = b.group;
    if (b.state) block["state"] = true;
    if (b.first >= 0) block["first"] = b.first;
    return block;
}

// The members of to_json(), without `blocks`.
Json without_blocks(const Snapshot& s) {
    const MemoryTotals t         = totals(s);
    Json               sequences = Json::array(), events = Json::array();
    for (const SequenceView& q : s.sequences) {
        Json sequence{{"request", q.request}, {"index", q.index},     {"status", status_names[std::size_t(q.status)]},
                      {"prompt", q.n_prompt}, {"tokens", q.n_tokens}, {"computed", q.n_computed},
                      {"blocks", q.blocks}};
        if (q.n_released > 0) sequence["released"] = q.n_released;
        for (const SequenceView::Table& table : q.other_groups)
            sequence["other_groups"].push_back({{"released", table.n_released}, {"blocks", table.blocks}});
        if (!q.state.empty()) sequence["state"] = {{"tokens", q.n_in_state}, {"blocks", q.state}};
        if (!q.texts.empty()) sequence["texts"] = q.texts;
        sequences.push_back(std::move(sequence));
    }
    for (const MemoryEvent& e : s.events) {
        Json event{{"kind", event_names[std::size_t(e.kind)]}};
        if (e.request > 0) event["request"] = e.request;
        if (e.request > 0) event["index"] = e.index;
        if (e.from >= 0) event["from"] = e.from;
        if (e.to >= 0) event["to"] = e.to;
        events.push_back(std::move(event));
    }
    return Json{{"step", s.step},
                {"label", s.label},
                {"block_size", s.block_size},
                {"context", s.context},
                {"swap_blocks", s.n_swap_blocks},
                {"swap_used", s.n_swap_used},
                {"host_cached", s.n_host_cached},
                {"in_files", s.n_in_files},
                {"totals",
                 {{"blocks", s.blocks.size()},
                  {"used", t.used},
                  {"cached", t.cached},
                  {"free", t.free},
                  {"pinned", t.pinned},
                  {"shared", t.shared},
                  {"internal_waste", t.waste},
                  {"saved_by_sharing", t.saved}}},
                {"sequences", std::move(sequences)},
                {"events", std::move(events)}};
}

Json to_json(const Snapshot& s) {
    Json blocks = Json::array();
    for (const BlockView& b : s.blocks) blocks.push_back(to_json(b));
    Json json      = without_blocks(s);
    json["blocks"] = std::move(blocks);
    return json;
}

Json changes_to_json(const Snapshot& before, const Snapshot& s) {
    Json changed = Json::array();
    for (std::size_t i = 0; i < s.blocks.size(); i++) {
        if (i < before.blocks.size() && before.blocks[i] == s.blocks[i]) continue;
        Json block  = to_json(s.blocks[i]);
        block["id"] = i;
        changed.push_back(std::move(block));
    }
    Json json       = without_blocks(s);
    json["changed"] = std::move(changed);
    std::map<std::pair<RequestId, int>, const std::vector<std::string>*> texts;
    for (const SequenceView& q : before.sequences)
        if (!q.texts.empty()) texts[{q.request, q.index}] = &q.texts;
    for (std::size_t i = 0; i < s.sequences.size() && !texts.empty(); i++) {
        const SequenceView& q  = s.sequences[i];
        const auto          at = texts.find({q.request, q.index});
        if (at == texts.end() || q.texts.empty()) continue;
        std::size_t kept = 0;
        while (kept < std::min(q.texts.size(), at->second->size()) && q.texts[kept] == (*at->second)[kept]) kept++;
        json["sequences"][i]["texts"]      = std::vector(q.texts.begin() + std::ptrdiff_t(kept), q.texts.end());
        json["sequences"][i]["texts_kept"] = kept;
    }
    return json;
}

} // namespace quire
