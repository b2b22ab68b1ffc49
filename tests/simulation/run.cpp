// Drives an engine through a scenario and compares every token with that of the request alone.
#include <cstdlib>
#include <stdexcept>

#include "run.h"
#include "world.h"

import quire.paging.snapshot;

namespace quire::simulation {

namespace {

// A request on its way.
struct Live {
    int                           task = 0;
    Request                       request;
    RequestId                     id      = 0;
    int                           arrived = 0;
    std::vector<Answer>           answers;
    std::vector<PositionLogprobs> prompt_logprobs;
    std::set<int>                 cancelled; // answers, as asked for
    bool                          cancel_asked = false, done = false;
};

bool same(const std::vector<PositionLogprobs>& a, const std::vector<PositionLogprobs>& b) {
    const auto one = [](const TokenLogprob& x, const TokenLogprob& y) {
        return x.token == y.token && x.logprob == y.logprob;
    };
    return std::ranges::equal(a, b, [&](const PositionLogprobs& x, const PositionLogprobs& y) {
        return one(x.chosen, y.chosen) && std::ranges::equal(x.top, y.top, one);
    });
}

std::string text_of(std::span<const Token> tokens) {
    std::string out;
    for (Token t : tokens) out += cat(" ", t);
    return out;
}

class Run {
public:
    Run(const Scenario& scenario, bool trace)
        : s_(scenario), trace_(trace), mover_(scenario.seed, Stream::mover), mixer_(scenario.seed, Stream::mixer),
          oracle_(scenario) {}
    Verdict run();

private:
    void        submit(int task);
    void        hand_over(Live& live);
    void        restart();
    void        leave();
    void        give_again();
    void        mix_files();
    void        move_cache();
    void        end_move(const Output& event);
    void        cancel(int step);
    void        set_troubles(int step);
    bool        step();
    void        take(Output& event);
    void        end(Live& live);
    void        overwrite_free_blocks();
    void        count_reached();
    bool        may_outgrow(const Live& live, bool shares = false);
    std::size_t n_tasks() const {
        return std::size_t(std::ranges::count_if(s_.tasks, [](const Task& t) { return t.on; }));
    }
    bool all_over() const {
        return live_.size() == n_tasks() && std::ranges::all_of(live_, [](const auto& l) { return l->done; });
    }
    [[noreturn]] void wrong(const std::string& what) const {
        throw std::runtime_error(cat("step ", step_, ": ", what));
    }
    [[noreturn]] void wrong(const Live& live, const std::string& what) const {
        wrong(cat("request ", live.task, " ", what));
    }

    const Scenario&                                s_;
    bool                                           trace_;
    Random                                         mover_, mixer_;
    int                                            n_moves_ = 0;
    Oracle                                         oracle_;
    SimEngine                                      sim_;
    std::vector<std::unique_ptr<Live>>             live_;
    std::map<Pattern, std::shared_ptr<Constraint>> compiled_;
    std::map<RequestId, const Live*>               moves_; // requests that only move what the cache has of a text
    std::vector<Output>                            events_;
    std::vector<std::pair<const Live*, int>>       ending_; // cancelled before this step; which answer, or -1
    Reached                                        reached_;
    std::size_t                                    next_fault_ = 0;
    int                                            step_ = 0, n_failed_ = 0, pinned_blocks_ = 0;
    bool                                           restarted_ = false; // after a failure of the device
    bool                                           broke_     = false; // the device failed, as it was told
    bool                                           left_      = false; // the model has left, and is back
};

void Run::submit(int task) {
    auto  live = std::make_unique<Live>();
    Live& l    = *live;
    l.task     = task;
    l.arrived  = step_;
    l.request  = oracle_.request(task);
    sim_.texts->push_back(oracle_.text(task)); // before the engine has it
    live_.push_back(std::move(live));
    hand_over(l);
}

void Run::hand_over(Live& l) {
    Request r = l.request;
    constrain(r, s_.tasks[std::size_t(l.task)].pattern, *sim_.engine, compiled_);
    l.answers.assign(std::size_t(r.n), {});
    if (r.pin) pinned_blocks_ += blocks_for(layout_of(s_), int(r.prompt.size()), s_.block_size);
    Result<RequestId> id = sim_.engine->submit(std::move(r));
    if (id) {
        l.id = *id;
        reached_["requests"]++;
        return;
    }
    if (!may_outgrow(l)) wrong(l, cat("was refused: ", id.error().message));
    l.done = true;
    reached_["refused at once"]++;
}

// Kills the engine. The next one has its files, if there are some, and gets its requests once more.
void Run::restart() {
    count_reached();
    reached_["restarts"]++;
    if (sim_.disk) {
        sim_.disk->steps = sim_.executor->steps();
        if (sim_.disk->random.one_in(2)) sim_.disk->lose_power();
    }
    if (sim_.disk && mixer_.one_in(2)) mix_files();
    const std::shared_ptr<SimDisk> disk  = sim_.disk;
    const std::shared_ptr<Texts>   texts = sim_.texts;
    sim_                                 = {}; // before the next one opens the files
    sim_                                 = make_engine(s_, false, disk);
    *sim_.texts                          = *texts;
    sim_.executor->trace                 = trace_;
    give_again();
}

// The next engine gets the requests that are not over.
void Run::give_again() {
    compiled_.clear();
    events_.clear();
    ending_.clear();
    moves_.clear();
    pinned_blocks_ = n_failed_ = 0;
    for (auto& l : live_) {
        l->id           = 0;
        l->cancel_asked = l->done && l->cancel_asked;
        l->cancelled.clear();
        l->prompt_logprobs.clear();
        if (!l->done) hand_over(*l);
    }
}

// Every request is over. The next engine begins with what this one has in host memory.
void Run::leave() {
    count_reached();
    reached_["models that left and came back"]++;
    Left left;
    try {
        left.parked = sim_.engine->park(std::size_t(1) << 30);
    } catch (const std::exception&) { // the moves failed: it leaves without its cache
        reached_["moves of a leaving model failed"]++;
    }
    left.steps                         = sim_.executor->steps();
    const std::shared_ptr<Texts> texts = sim_.texts;
    sim_                               = make_engine(s_, false, {}, left);
    *sim_.texts                        = *texts;
    sim_.executor->trace               = trace_;
    reached_["blocks of a model that came back"] += std::uint64_t(sim_.engine->n_taken());
    sim_.engine->check_invariants();
    give_again();
}

// Some files are those of another process with a directory of its own, which has read some of the prompts. They have the numbers that they had
// there.
void Run::mix_files() {
    const auto disk  = std::make_shared<SimDisk>(s_);
    SimEngine  other = make_engine(s_, false, disk);
    *other.texts     = *sim_.texts;
    for (const auto& l : live_) {
        if (mixer_.one_in(2)) continue;
        Request r;
        r.prompt     = l->request.prompt;
        r.cache_salt = l->request.cache_salt;
        r.max_tokens = 1;
        (void)other.engine->submit(std::move(r));
    }
    std::vector<Output> events;
    for (int i = 0; i < 300 && other.engine->step(events); i++) events.clear();
    // The numbers of its steps stand in its files.
    sim_.disk->steps = std::max(sim_.disk->steps, other.executor->steps());
    other            = {};
    for (auto& [number, bytes] : disk->files) {
        if (mixer_.one_in(2)) continue;
        sim_.disk->files[number] = std::move(bytes);
        reached_["segments of another directory"]++;
    }
}

// The text of a request, as far as it is known, goes to the files or comes from them.
void Run::move_cache() {
    if (live_.empty() || !sim_.disk || n_moves_ >= s_.cache_moves || !mover_.one_in(4)) return;
    const Live& l = *live_[std::size_t(mover_.below(int(live_.size())))];
    Request     r;
    r.prompt     = l.request.prompt;
    r.cache_salt = l.request.cache_salt;
    r.cache_move = mover_.one_in(2) ? CacheMove::save : CacheMove::load;
    if (!l.answers.empty()) r.prompt.insert(r.prompt.end(), l.answers[0].tokens.begin(), l.answers[0].tokens.end());
    if (int(r.prompt.size()) >= s_.context) return;
    n_moves_++;
    reached_[r.cache_move == CacheMove::save ? "texts saved to files" : "texts loaded from files"]++;
    const Result<RequestId> id = sim_.engine->submit(std::move(r));
    if (!id) { // as its request
        if (!may_outgrow(l)) wrong(l, cat("was not moved: ", id.error().message));
        return;
    }
    moves_[*id] = &l;
    if (mover_.one_in(4)) sim_.engine->cancel(*id);
}

void Run::end_move(const Output& event) {
    const bool not_taken = event.finish == FinishReason::failed && !event.message.empty(); // there is no room
    reached_["texts that files did not take"] += not_taken;
    if (!event.done || (event.finish != FinishReason::stop && !not_taken) || !event.tokens.empty() ||
        event.cached_tokens < 0 || event.cached_tokens > event.prompt_tokens ||
        event.cached_tokens % s_.block_size != 0)
        wrong(*moves_[event.id], "was moved, and has an output that cannot be");
    moves_.erase(event.id);
}

bool Run::may_outgrow(const Live& l, bool shares) {
    return simulation::may_outgrow(s_, l.request, oracle_.expected(l.task), pinned_blocks_, shares);
}

void Run::cancel(int step) {
    for (auto& l : live_) {
        const Task& t = s_.tasks[std::size_t(l->task)];
        if (l->id == 0) continue;
        if (t.cancel_after >= 0 && step == l->arrived + t.cancel_after) {
            if (trace_) std::printf("%d: cancels %d\n", step_, l->task);
            reached_[l->done ? "cancelled when over" : "cancelled"]++;
            l->cancel_asked = true;
            ending_.push_back({l.get(), -1});
            sim_.engine->cancel(l->id);
        }
        if (t.cancel_answer >= 0 && step == l->arrived + t.cancel_answer_after && !l->done) {
            reached_["answers cancelled"]++;
            l->cancelled.insert(t.cancel_answer);
            ending_.push_back({l.get(), t.cancel_answer});
            sim_.engine->cancel(l->id, t.cancel_answer);
        }
    }
}

void Run::set_troubles(int step) {
    Trouble& trouble = sim_.executor->trouble;
    for (; next_fault_ < s_.faults.size() && s_.faults[next_fault_].at <= step; next_fault_++)
        switch (s_.faults[next_fault_].kind) {
            case FaultKind::not_finite: trouble.not_finite = true; break;
            case FaultKind::move: trouble.move = true; break;
            case FaultKind::torn_move: trouble.torn_move = true; break;
            case FaultKind::launch: trouble.launch = true; break;
            case FaultKind::results: trouble.results = true; break;
        }
}

// False: the engine is idle.
bool Run::step() {
    const Trouble before = sim_.executor->trouble;
    bool          busy   = false;
    try {
        busy = sim_.engine->step(events_);
    } catch (const std::exception& e) {
        const Trouble& now = sim_.executor->trouble;
        if (before.move == now.move && before.torn_move == now.torn_move && before.launch == now.launch &&
            before.results == now.results)
            wrong(cat("the engine failed: ", e.what()));
        reached_[before.move != now.move             ? "moves failed"
                 : before.torn_move != now.torn_move ? "moves torn"
                 : before.launch != now.launch       ? "launches failed"
                                                     : "results failed"]++;
        broke_ = true;
        return false;
    }
    if (!sim_.executor->broken().empty()) wrong(sim_.executor->broken());
    for (Output& event : events_) take(event);
    events_.clear();
    for (const auto& [live, answer] : std::exchange(ending_, {}))
        if (answer < 0 ? !live->done : live->answers[std::size_t(answer)].finish == FinishReason::none)
            wrong(*live, cat("was cancelled, and goes on", answer < 0 ? "" : cat(" with answer ", answer)));
    sim_.engine->check_invariants();
    if (s_.scribbles) overwrite_free_blocks();
    return busy;
}

void Run::take(Output& event) {
    if (moves_.contains(event.id)) return end_move(event);
    const auto at = std::ranges::find_if(live_, [&](const auto& l) { return l->id == event.id; });
    if (at == live_.end()) wrong(cat("an output of a request that nobody made: ", event.id));
    Live& l = **at;
    if (trace_)
        std::printf("%d: request %d answer %d:%s%s\n", step_, l.task, event.index, text_of(event.tokens).c_str(),
                    event.finish != FinishReason::none
                        ? cat(" finish ", int(event.finish), event.done ? ", done" : "").c_str()
                        : "");
    if (l.done) wrong(l, "goes on after its end");
    if (event.index < 0 || event.index >= int(l.answers.size())) wrong(l, cat("has an answer ", event.index));
    Answer&         a = l.answers[std::size_t(event.index)];
    const Expected& e = oracle_.expected(l.task);
    if (a.finish != FinishReason::none) wrong(l, cat("goes on with answer ", event.index, ", which has ended"));
    a.tokens.insert(a.tokens.end(), event.tokens.begin(), event.tokens.end());
    a.logprobs.insert(a.logprobs.end(), event.logprobs.begin(), event.logprobs.end());
    if (!event.prompt_logprobs.empty()) l.prompt_logprobs = std::move(event.prompt_logprobs);
    a.finish  = event.finish;
    a.logprob = event.logprob;
    a.score   = event.score;
    if (event.cached_tokens > 0) reached_["cache hits"]++;
    // A shift where the pool is full is another one than where the context is.
    if (!l.request.pin && !withheld(l.request) && !(l.request.context_shift && may_outgrow(l))) {
        const std::vector<Token>& all = e.answers[std::size_t(event.index)].tokens;
        if (a.tokens.size() > all.size() || !std::equal(a.tokens.begin(), a.tokens.end(), all.begin()))
            wrong(l, cat("answers", text_of(a.tokens), " where alone it answers", text_of(all), " (answer ",
                         event.index, ")"));
    }
    if (event.finish == FinishReason::none) {
        if (event.done) wrong(l, "is over without a reason");
        return;
    }
    // Why the answer ended.
    switch (event.finish) {
        case FinishReason::none: break;
        case FinishReason::cancelled:
            if (!l.cancel_asked && !l.cancelled.contains(event.index)) wrong(l, "was cancelled by nobody");
            break;
        case FinishReason::failed:
            n_failed_ += event.done;
            reached_["rows that are not finite"] += event.done;
            if (n_failed_ > sim_.executor->n_not_finite) wrong(l, cat("failed: ", event.message));
            break;
        case FinishReason::unmet: wrong(l, cat("met no constraint: ", event.message));
        case FinishReason::refused:
            if (!may_outgrow(l)) wrong(l, cat("was refused: ", event.message));
            reached_["refused later"] += event.done;
            break;
        case FinishReason::stop:
        case FinishReason::length: {
            if (l.request.pin) {
                if (event.finish != FinishReason::stop && !may_outgrow(l)) wrong(l, "was not pinned");
                reached_["pins"] += event.finish == FinishReason::stop;
                break;
            }
            const Answer& want = e.answers[std::size_t(event.index)];
            const bool    all = a.tokens == want.tokens && a.finish == want.finish && same(a.logprobs, want.logprobs) &&
                             a.logprob == want.logprob && a.score == want.score;
            if (all) break;
            if (event.finish != FinishReason::length && !withheld(l.request) && !l.request.context_shift)
                wrong(l, cat("ended with reason ", int(event.finish), " where alone with ", int(want.finish)));
            if (!may_outgrow(l, true))
                wrong(l, cat("answers", text_of(a.tokens), " (reason ", int(a.finish), ", score ", a.score,
                             ") where alone it answers", text_of(want.tokens), " (reason ", int(want.finish),
                             ", score ", want.score, ", answer ", event.index, ")"));
            reached_["outgrew the pool"]++;
        }
    }
    if (event.done) end(l);
}

void Run::end(Live& l) {
    l.done = true;
    for (const Answer& a : l.answers)
        if (a.finish == FinishReason::none) wrong(l, "is over with an answer that is not");
    const bool whole = std::ranges::all_of(
        l.answers, [](const Answer& a) { return a.finish == FinishReason::stop || a.finish == FinishReason::length; });
    if (whole && !l.request.pin) {
        reached_["complete answers"]++;
        if (l.request.beam_width > 0) reached_["beam searches"]++;
        else if (withheld(l.request)) reached_["best of several"]++;
        if (s_.tasks[std::size_t(l.task)].pattern != Pattern::none) reached_["constraints"]++;
        if (!same(l.prompt_logprobs, oracle_.expected(l.task).prompt_logprobs) && !may_outgrow(l))
            wrong(l, "has other log-probabilities of its prompt than alone");
    }
}

// Blocks that are in no table and not in the cache: whoever reads them now is wrong.
void Run::overwrite_free_blocks() {
    const Snapshot snapshot = sim_.engine->snapshot();
    for (std::size_t i = 0; i < snapshot.blocks.size(); i++)
        if (snapshot.blocks[i].ref_count == 0 && !snapshot.blocks[i].cached && snapshot.blocks[i].filled == 0)
            sim_.executor->scribble(BlockId(i));
}

void Run::count_reached() {
    const EngineStats stats = sim_.engine->stats();
    reached_["steps"] += stats.steps;
    reached_["steps planned ahead"] += stats.planned_ahead;
    reached_["preemptions"] += stats.preemptions;
    reached_["priority preemptions"] += stats.memory.priority_preemptions;
    reached_["recomputations"] += stats.memory.recomputations;
    reached_["swaps out"] += stats.memory.swaps_out;
    reached_["swaps in"] += stats.memory.swaps_in;
    reached_["forks"] += stats.memory.forks;
    reached_["copied blocks"] += stats.memory.copied_blocks;
    reached_["blocks released behind windows"] += stats.memory.released_blocks;
    reached_["draft tokens that were right"] += stats.memory.accepted_tokens;
    reached_["draft tokens that were wrong"] += stats.memory.draft_tokens - stats.memory.accepted_tokens;
    if (layout_of(s_).keeps_state()) reached_["draft tokens behind a state"] += stats.memory.draft_tokens;
    reached_["context shifts"] += stats.memory.context_shifts;
    reached_["states kept"] += stats.memory.checkpoints;
    reached_["states not written in place"] += std::uint64_t(sim_.executor->n_states_kept);
    if (layout_of(s_).keeps_state()) reached_["tokens found behind a kept state"] += stats.cached_tokens;
    reached_["cached tokens"] += stats.cached_tokens;
    reached_["tokens found in host memory"] += stats.loaded_tokens;
    reached_["blocks moved to host memory"] += stats.host.stored;
    reached_["blocks moved back from host memory"] += stats.host.loaded;
    reached_["blocks that host memory had no room for"] += stats.host.dropped;
    if (layout_of(s_).keeps_state()) reached_["tokens found in host memory behind a kept state"] += stats.loaded_tokens;
    reached_["tokens found in files"] += stats.disk_tokens;
    if (layout_of(s_).keeps_state()) reached_["tokens found in files behind a kept state"] += stats.disk_tokens;
    reached_["units written to files"] += stats.disk.written;
    reached_["units read from files"] += stats.disk.read;
    reached_["units in files that were damaged"] += stats.disk.damaged;
    reached_["units that the disk did not take"] += stats.disk.refused;
    reached_["segments given up"] += stats.disk.segments_gone;
    reached_["units written once more"] += stats.disk.kept;
    reached_["moves made before they were awaited"] += std::uint64_t(sim_.executor->n_early_moves);
    reached_["slots shared in a step"] += std::uint64_t(sim_.executor->n_same_step);
    reached_[cat("layouts of ", layout_of(s_).groups.size(), " groups")]++;
}

Verdict Run::run() {
    Verdict verdict;
    try {
        sim_                 = make_engine(s_, false);
        sim_.executor->trace = trace_;
        // Twice what all tokens would take one by one, computed anew for each of them.
        int most_steps = 2000;
        for (const Task& t : s_.tasks)
            most_steps = std::max(most_steps, t.at) + 4 * s_.context * (1 + std::max({t.n, t.best_of, t.beams}));
        bool             busy = true;
        std::vector<int> waiting; // for a model that leaves
        for (step_ = 0; (busy || !all_over()) && !broke_; step_++) {
            if (step_ > most_steps) wrong("it does not end");
            const bool leaves = s_.leave >= 0 && step_ >= s_.leave && !left_;
            if (leaves && !busy && std::ranges::all_of(live_, [](const auto& l) { return l->done; }))
                leave(), left_ = true;
            for (std::size_t i = 0; i < s_.tasks.size(); i++)
                if (s_.tasks[i].on && s_.tasks[i].at == step_) waiting.push_back(int(i));
            if (!leaves || left_)
                for (int task : std::exchange(waiting, {})) submit(task);
            if (step_ == s_.restart) restart();
            cancel(step_);
            move_cache();
            set_troubles(step_);
            if (trace_) std::printf("%d\n", step_);
            busy = step();
            if (broke_ && sim_.disk && !restarted_) { // the next process gets what the failed one has written
                broke_ = false;
                busy = restarted_ = true;
                reached_["restarts after a failure"]++;
                restart();
            }
            if (live_.size() < n_tasks() || busy || broke_) continue;
            for (const auto& l : live_)
                if (!l->done) wrong(*l, "is lost: the engine is idle");
        }
        for (; !moves_.empty() && !broke_; step_++) { // what still moves ends
            if (step_ > most_steps) wrong("what moves does not end");
            step();
        }
        if (!broke_) { // what is pinned goes, and nothing is left
            for (const auto& l : live_)
                if (l->request.pin && l->id != 0 && !l->cancel_asked) sim_.engine->cancel(l->id);
            for (int i = 0; i < 3; i++, step_++) step();
            const EngineStats stats = sim_.engine->stats();
            if (stats.running + stats.waiting + stats.blocks_used + stats.swap_used + stats.blocks_pinned > 0)
                wrong(cat("something is left: ", stats.running, " running, ", stats.waiting, " waiting, ",
                          stats.blocks_used, " blocks, ", stats.swap_used, " swap blocks, ", stats.blocks_pinned,
                          " pinned"));
        }
        count_reached();
    } catch (const std::exception& e) {
        verdict.wrong = e.what();
    }
    verdict.reached = std::move(reached_);
    return verdict;
}

} // namespace

Verdict run(const Scenario& scenario, bool trace) {
    if (scenario.crash == 1) std::abort();
    return Run(scenario, trace).run();
}

} // namespace quire::simulation
