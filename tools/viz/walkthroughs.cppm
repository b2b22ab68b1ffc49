// quire.tools.viz.walkthroughs: runs of an engine recorded step by step, among them the worked examples of the paper and of a lesson
// on block pools, with a real model. Owns nothing.
export module quire.tools.viz.walkthroughs;

import quire.core.base;
import quire.engine.engine;
import quire.schedule.scheduler;

export namespace quire {

// Steps the engine until nothing is left to do, or `most_steps` were made, and keeps the memory after each step.
// `label(i, snapshot)` names the i-th step, from 0. The events are appended to `out` if it is not null.
Trace record(Engine& engine, const std::function<std::string(int, const Snapshot&)>& label = {},
             std::vector<Output>* out = nullptr, int most_steps = 10'000);

struct Walkthrough {
    std::string_view name, title;
};

// The names of the walk-throughs: "fig6", "fig8", "fig9", "lesson", "swap".
std::span<const Walkthrough> walkthroughs();

// Plays one of them with the model of that file. Error: the file cannot be used, or there is none of that name.
Result<Trace> play(std::string_view name, const std::string& model);

} // namespace quire

module :private;

namespace quire {

Trace record(Engine& engine, const std::function<std::string(int, const Snapshot&)>& label, std::vector<Output>* out,
             int most_steps) {
    Trace               trace;
    std::vector<Output> events;
    engine.log_events(true);
    for (int i = 0; i < most_steps && engine.step(out ? *out : events); i++) {
        Snapshot snapshot = engine.snapshot(true);
        if (label) snapshot.label = label(i, snapshot);
        trace.steps.push_back(std::move(snapshot));
        events.clear();
    }
    engine.log_events(false);
    return trace;
}

constexpr std::string_view address =
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, "
    "and dedicated to the proposition that all men are created equal. Now we are engaged in a great civil war, testing "
    "whether that nation, or any nation so conceived and so dedicated, can long endure.";

constexpr Walkthrough all[] = {
    {"fig6", "One request: blocks are taken as tokens come (the paper, Fig. 6)"},
    {"fig8", "Two samples of one prompt: shared blocks, copied on write (the paper, Fig. 8)"},
    {"fig9", "Beam search: beams fork and die (the paper, Fig. 9)"},
    {"lesson", "A pool of 64 blocks, a prompt of 64 tokens and four beams (a lesson's exercise)"},
    {"swap", "More requests than blocks: one is swapped out and comes back (the paper, section 4.5)"},
};

EngineOptions pool(int n_blocks, int block_size, std::vector<BlockId> first = {}) {
    EngineOptions o;
    o.block_size   = block_size;
    o.kv_blocks    = n_blocks;
    o.context      = std::min(n_blocks * block_size, 1024);
    o.prefix_cache = false; // so that a block in no table is free, as in the documents
    o.watermark    = 0;
    o.free_order   = std::move(first);
    for (BlockId b = 0; b < n_blocks && !o.free_order.empty(); b++)
        if (std::ranges::find(o.free_order, b) == o.free_order.end()) o.free_order.push_back(b);
    return o;
}

Request ask(const Engine& engine, std::string_view text, int n_prompt, int n_tokens) {
    Request r;
    r.prompt = engine.tokenizer().encode(text, {.add_special = false, .parse_special = false});
    while (int(r.prompt.size()) < n_prompt) r.prompt.insert(r.prompt.end(), r.prompt.begin(), r.prompt.end());
    r.prompt.resize(std::size_t(n_prompt));
    r.max_tokens           = n_tokens;
    r.ignore_end           = true;
    r.sampling.temperature = 0;
    return r;
}

void submit(Engine& engine, Request request) {
    const Result<RequestId> id = engine.submit(std::move(request));
    check(id.has_value(), "a walk-through's request does not fit its pool");
}

// The first `n` tokens that follow the first `n_prompt` of the text, or of another text.
std::vector<Token> continuation(const Engine& engine, std::string_view text, int n_prompt, int n) {
    const auto ids = engine.tokenizer().encode(text, {.add_special = false, .parse_special = false});
    check(int(ids.size()) >= n_prompt + n, "a walk-through's text has too few tokens");
    return {ids.begin() + n_prompt, ids.begin() + n_prompt + n};
}

// The answers are given by the figures, not sampled: the texts are not the model's, but the engine handles the blocks. All answers have one
// length; there is one for each sequence.
void answer_with(Engine& engine, std::vector<std::vector<Token>> answers) {
    engine.decode_with([answers = std::move(answers)](Scheduler& scheduler, std::span<const Scheduled> items,
                                                      std::span<const float>, std::vector<Output>&) {
        SequenceGroup& group = *items[0].group;
        group.prompt_done    = true;
        std::vector<Sequence*> sequences;
        for (const Scheduled& item : items) sequences.push_back(item.sequence);
        const std::size_t n = std::size_t(group.n_generated(*sequences[0]));
        while (sequences.size() < answers.size()) sequences.push_back(&scheduler.fork(group, *sequences[0]));
        for (std::size_t i = 0; i < sequences.size(); i++) scheduler.append(*sequences[i], answers[i][n]);
        if (n + 1 < answers[0].size()) return;
        while (!group.sequences.empty()) scheduler.free(group, *group.sequences.back(), FinishReason::length);
        scheduler.remove(group.id);
    });
}

using Labels = std::vector<std::string>;

std::function<std::string(int, const Snapshot&)> from(Labels labels) {
    return [labels = std::move(labels)](int i, const Snapshot&) {
        return i < int(labels.size()) ? labels[std::size_t(i)] : std::string();
    };
}

Trace fig6(Engine& engine) {
    submit(engine, ask(engine, address, 7, 4));
    answer_with(engine, {continuation(engine, address, 7, 4)});
    return record(engine,
                  from({"Prefill: the 7 tokens of the prompt take two blocks of 4; the second has one slot left.",
                        "The first generated token goes into that slot: no block is taken.",
                        "Both blocks are full: the next token takes a third one, wherever it is.",
                        "The request is over; its blocks are free at once."}));
}

Trace fig8(Engine& engine) {
    Request r              = ask(engine, address, 7, 4);
    r.n                    = 2;
    r.sampling.temperature = 1;
    submit(engine, r);
    answer_with(engine, {continuation(engine, address, 7, 4), continuation(engine, " mothers brought forth", 0, 4)});
    return record(engine, from({"The prompt is computed once. Two samples map its two blocks: reference counts 2.",
                                "Sample 1 writes first: the last block is shared, so it is copied and sample 1 goes on "
                                "in the copy. Sample 2 is then alone with the old block and writes in place.",
                                "Each sample takes blocks of its own now; the full first block stays shared.",
                                "Both are over; all blocks are free."}));
}

// The tree of the figure is given, not found: a search would decide which beams go on, but the blocks are handled in one way.
Trace fig9(Engine& engine) {
    Request r    = ask(engine, address, 4, 20);
    r.beam_width = r.n = 4;
    submit(engine, r);
    const std::size_t vocab  = std::size_t(engine.config().vocab_size);
    const auto        choose = [vocab](std::span<const float> row, int rank, Token last) {
        // The rank-th best token but `last`: a small model doubles words.
        std::vector<Token> ids(vocab);
        std::iota(ids.begin(), ids.end(), 0);
        ids.erase(ids.begin() + last);
        std::nth_element(ids.begin(), ids.begin() + rank, ids.end(),
                                [&](Token a, Token b) { return row[std::size_t(a)] > row[std::size_t(b)]; });
        return ids[std::size_t(rank)];
    };
    engine.decode_with([choose, vocab](Scheduler& scheduler, std::span<const Scheduled> items,
                                       std::span<const float> logits, std::vector<Output>&) {
        SequenceGroup& group = *items[0].group;
        group.prompt_done    = true;
        std::vector<std::pair<Sequence*, std::span<const float>>> beams;
        for (const Scheduled& item : items)
            beams.emplace_back(item.sequence, logits.subspan(std::size_t(item.first_logit_row) * vocab, vocab));
        const int n = int(beams[0].first->tokens.size());
        // Which beam each one of the next step comes from, where that is not itself.
        std::vector<std::size_t> parents(beams.size());
        std::iota(parents.begin(), parents.end(), 0u);
        if (n == 4) parents = {0, 0};             // after the prompt: a main line and beam 3
        else if (n == 12) parents = {0, 0, 0, 1}; // the main line becomes beams 0 to 2
        else if (n == 16) parents = {1, 1, 2, 2}; // beams 0 and 3 die
        std::vector<int> children(beams.size(), 0);
        for (std::size_t parent : parents) children[parent]++;
        for (std::size_t i = 0; i < beams.size(); i++)
            if (children[i] == 0) scheduler.free(group, *beams[i].first, FinishReason::none);
        std::vector<Sequence*> next;
        for (std::size_t parent : parents) {
            const bool first = std::ranges::find(next, beams[parent].first) == next.end();
            next.push_back(first ? beams[parent].first : &scheduler.fork(group, *beams[parent].first));
        }
        std::vector<int> rank(beams.size(), 0);
        for (std::size_t i = 0; i < next.size(); i++) {
            scheduler.append(*next[i], choose(beams[parents[i]].second, rank[parents[i]]++, next[i]->tokens.back()));
            auto at = std::find_if(group.sequences.begin(), group.sequences.end(),
                                   [&](const auto& s) { return s.get() == next[i]; });
            std::swap(*at, group.sequences[i]);
            next[i]->index = int(i);
        }
        if (n == 18)
            while (!group.sequences.empty()) scheduler.free(group, *group.sequences.back(), FinishReason::length);
        if (group.sequences.empty()) scheduler.remove(group.id);
    });
    Trace trace = record(engine, [](int i, const Snapshot&) -> std::string {
        switch (i) {
            case 0: return "The prompt fills block 0. Two beams go on from it.";
            case 1: return "At the end of a block nothing is copied: each beam takes a block of its own.";
            case 8: return "The main line forks into beams 1, 2 and 3. Beam 4 shares only the prompt with them.";
            case 9: return "Four beams, a last block each: 5, 6, 7 and 8.";
            case 12:
                return "Beams 2 and 3 have two children each, beams 1 and 4 none: theirs are given back, and blocks 2, "
                       "4, 5 and 8 are free.";
            case 13: return "The four survivors share 0, 1, 3, and 6 or 7; each takes a new block: 9 to 12.";
            default: return "";
        }
    });
    engine.decode_with({});
    return trace;
}

Trace lesson(Engine& engine) {
    Request r              = ask(engine, address, 64, 20);
    r.n                    = 4;
    r.sampling.temperature = 1;
    r.sampling.seed        = 3;
    submit(engine, r);
    return record(engine, [](int i, const Snapshot& s) -> std::string {
        const MemoryTotals t = totals(s);
        switch (i) {
            case 0: return "64 tokens fill 4 blocks; four beams share them: 4 blocks used, reference counts 4.";
            case 1: return "At the boundary each beam takes a block of its own: 8 used, and nothing is copied.";
            case 10:
                return cat("Ten tokens per beam later it is still ", t.used,
                           " blocks; without sharing it would be 20.");
            case 17: return cat("The 17th token of each beam takes its second block: ", t.used, " used.");
            default: return "";
        }
    });
}

Trace swap(Engine& engine) {
    submit(engine, ask(engine, address, 12, 17));
    submit(engine, ask(engine, address.substr(56), 10, 12));
    return record(engine, [](int, const Snapshot& s) -> std::string {
        bool out = false, in = false;
        for (const MemoryEvent& e : s.events) {
            out = out || e.kind == MemoryEventKind::swap_out;
            in  = in || e.kind == MemoryEventKind::swap_in;
        }
        if (out)
            return "No block is left for the older request's next token: the younger one gives up all its blocks, "
                   "which are copied to the swap pool.";
        if (in) return "The older one is over, and the younger one comes back, to other blocks than before.";
        return "";
    });
}

std::span<const Walkthrough> walkthroughs() { return all; }

Result<Trace> play(std::string_view name, const std::string& model) {
    const auto found = std::ranges::find_if(all, [&](const Walkthrough& w) { return w.name == name; });
    if (found == std::end(all)) return fail("there is no walk-through ", quote(name));
    EngineOptions o;
    if (name == "fig6" || name == "fig8") o = pool(8, 4, {7, 1, 3});
    else if (name == "fig9") o = pool(16, 4);
    else if (name == "lesson") o = pool(64, 16);
    else o = pool(8, 4);
    if (name == "swap") o.preemption_mode = PreemptionMode::swap;
    o.pipeline            = false; // between steps nothing is to be under way
    Result<Engine> engine = Engine::load(model, o);
    if (!engine) return std::unexpected(engine.error());
    Trace trace = name == "fig6"     ? fig6(*engine)
                  : name == "fig8"   ? fig8(*engine)
                  : name == "fig9"   ? fig9(*engine)
                  : name == "lesson" ? lesson(*engine)
                                     : swap(*engine);
    trace.title = found->title;
    trace.model = model.substr(model.rfind('/') + 1);
    return trace;
}

} // namespace quire
