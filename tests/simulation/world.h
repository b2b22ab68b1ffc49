// Engines on the simulated device, the requests of a scenario, and what each of them answers alone.
#pragma once

#include "scenario.h"
#include "sim_executor.h"
#include "sim_files.h"

import quire.constraint.compile;
import quire.engine.engine;
import quire.schedule.request;

namespace quire::simulation {

// The texts that requests will have, for guesses.
using Texts = std::vector<std::vector<Token>>;

struct SimEngine {
    std::shared_ptr<Clock>   clock    = std::make_shared<Clock>();
    std::shared_ptr<Texts>   texts    = std::make_shared<Texts>(); // of the requests so far
    std::shared_ptr<Token>   end      = std::make_shared<Token>(); // an end token
    SimExecutor*             executor = nullptr;                   // the engine's
    std::shared_ptr<SimDisk> disk;                                 // of an engine with files
    std::optional<Engine>    engine;
};

// An engine without files leaves these to the next one.
struct Left {
    std::shared_ptr<const ParkedCache> parked;
    decltype(SimDisk::steps)           steps = 0; // that it has run
};

inline CacheLayout layout_of(const Scenario& s) { return layout_of(s.windows, s.context, s.state_bytes, s.block_size); }

const std::string& model_path(); // of its tokenizer

// `alone`: with memory for everything, no faults and no cache, blocks that hold whole sequences, and every order as it is simplest.
// `disk`, `left`: of an earlier engine; null: an empty one, where the scenario has files.
SimEngine make_engine(const Scenario& scenario, bool alone, std::shared_ptr<SimDisk> disk = {}, const Left& left = {});

struct Answer {
    std::vector<Token>            tokens;
    FinishReason                  finish  = FinishReason::none;
    double                        logprob = 0, score = 0;
    std::vector<PositionLogprobs> logprobs;
};

struct Expected {
    std::vector<Answer>           answers;
    std::vector<PositionLogprobs> prompt_logprobs;
};

// Answers that are compared with one another are given when all are there.
inline bool withheld(const Request& r) { return r.beam_width > 0 || r.best_of > r.n; }

// Whether the pool can be too small for a request, beside the blocks that are pinned.
// `shares`: the answers share the whole blocks of the prompt, as they do once it is read.
bool may_outgrow(const Scenario& scenario, const Request& request, const Expected& alone, int pinned,
                 bool shares = false);

// **Owns** what it has found out about a scenario's tasks.
class Oracle {
public:
    explicit Oracle(const Scenario& scenario)
        : scenario_(scenario), lanes_(lanes_of(layout_of(scenario), scenario.windows)) {}

    std::vector<Token> prompt(int task);
    // Everything but what belongs to one engine: the constraint.
    Request         request(int task);
    const Expected& expected(int task);
    // The prompt and the first answer.
    std::vector<Token> text(int task);

private:
    Expected by_hand(const Request& request);
    Expected by_engine(int task, const Request& request);

    const Scenario&          scenario_;
    std::vector<Lane>        lanes_;
    std::map<int, Expected>  known_;
    std::optional<SimEngine> alone_;
    SimEngine&               alone();
};

// Puts the task's constraint into a request for this engine.
void constrain(Request& request, Pattern pattern, const Engine& engine,
               std::map<Pattern, std::shared_ptr<Constraint>>& compiled);

} // namespace quire::simulation
