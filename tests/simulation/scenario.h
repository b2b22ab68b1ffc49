// The scenario of one run, as a plain value made from a seed: the engine's options, the requests, the faults. Printed, and made smaller
// where it fails.
#pragma once

import quire.core.base;
import quire.core.std;
import quire.schedule.preemption;

namespace quire::simulation {

enum class Pattern : std::uint8_t { none, word, choice, number, object }; // of a constraint

// One request.
struct Task {
    static constexpr int no_cache = 3;

    bool on = true; // false: it never comes; others may follow it nevertheless
    int  at = 0;    // the step before which it arrives
    // Its prompt: tokens of a family, from `differs` on those of a variant. Behind another task's prompt and answer where it follows one.
    int           follows = -1;
    int           family = 0, n_prompt = 8, differs = 1000, variant = 0;
    int           max_tokens = 8, min_tokens = 0;
    int           n = 1, best_of = 0, beams = 0;
    int           priority   = 0;
    int           salt       = 0; // 0: none; no_cache: it does not use the prefix cache
    bool          pin        = false;
    bool          sampled    = false; // not greedy
    bool          penalties  = false;
    bool          ignore_end = false;
    bool          shifts     = false;
    bool          progress   = false;
    int           biases = 0, stops = 0; // tokens that get a bias; tokens that end the answer
    int           logprobs = -1, prompt_logprobs = -1;
    Pattern       pattern       = Pattern::none;
    std::uint64_t sample_seed   = 0;
    int           cancel_after  = -1; // steps after its arrival
    int           cancel_answer = -1, cancel_answer_after = 0;
};

// The kinds of draft tokens, which run before their sequence has them.
// `paying`: mixed, and only as many as save time. `adversarial`: right but for the last one, end tokens, or one token again and again.
enum class Guesses : std::uint8_t { right, wrong, mixed, paying, random, adversarial };
constexpr int kinds_of_guesses = 6;

enum class FaultKind : std::uint8_t {
    not_finite, // a row of logits is NaN
    move,       // moving blocks fails before the first one
    launch,     // the device fails as a step begins
    results,    // or as it ends
    torn_move,  // moving blocks fails in the middle of one
};

struct Fault {
    int       at   = 0; // at the first chance from this step on
    FaultKind kind = FaultKind::not_finite;
};

struct Scenario {
    std::uint64_t seed       = 0;
    int           block_size = 4, n_blocks = 16, n_swap = 8;
    int           n_tier       = 0;  // room in host memory for what leaves the prefix cache, in entries as n_blocks
    int           disk         = 0;  // bytes of files behind it
    int           disk_jobs    = 1;  // most reads and writes of a step
    int           disk_trouble = 0;  // one in so many writes fails, some of them in the middle; 0: none
    int           cache_moves  = 0;  // requests that only move what the cache has to the files, or back
    int           restart      = -1; // the step before which the engine is killed, and starts again with these files
    int           leave = -1; // from this step on no request begins; when all are over the model leaves, and comes back
    int           context = 64, step_tokens = 16, sequences = 8;
    std::vector<int> windows{0};                     // of the model's layers; `recurrent` of those with a state
    int  state_bytes = 0, n_units = 0, interval = 0; // of a layer's state; room for states; between checkpoints
    bool cache = true, keep_preempted = true, pipeline = false, shuffled = false;
    bool device_best     = false; // the device says which token is the most likely
    bool late_moves      = false; // blocks are moved when somebody waits for that, not when it is asked for
    bool reordered_moves = false; // the moves of one list are made in any order, some before somebody waits for them
    bool late            = false; // a step is computed when its results are asked for, not when it is launched
    bool scribbles       = true;  // what is in no table is overwritten after each step
    bool paced           = false; // chunks by the time of a step
    PreemptionMode preemption    = PreemptionMode::automatic;
    double         watermark     = 0.04;
    double         token_seconds = 1e-3, block_seconds = 1e-4; // that the device takes
    int no_memory = 0; // behind the server each so many-th allocation of a thread finds none; 0, as seeds have it: none
    int crash     = 0; // for tests of the simulator: 1: the engine's part ends its process, 2: that behind the server
    int drafts    = 0; // tokens that are guessed for a sequence in a step
    Guesses            guesses = Guesses::mixed;
    std::vector<Task>  tasks;
    std::vector<Fault> faults;
};

Scenario make_scenario(std::uint64_t seed);
// The scenario of the seed with draft tokens in any case, of each kind by turns, and with biases and tokens that end answers.
Scenario    make_drafted(std::uint64_t seed);
std::string describe(const Scenario& scenario);

// A change of one number, such as `cache=0`, `3.n=1` (of request 3), `faults=0` or `only=0,3` (the requests that come). False: there is
// no such number.
bool change(Scenario& scenario, const std::string& how);
// The changes that could make a scenario simpler, one by one.
std::vector<std::string> simpler(const Scenario& scenario);

// The streams of random numbers, each named by its decisions. The numbers are part of every scenario: another number is another scenario of each seed.
enum class Stream : std::uint64_t {
    scenario    = 0,
    free_blocks = 1, // their order
    states      = 2,
    tier        = 3,
    guesser     = 4,
    trouble     = 5, // of the disk while the scenario runs
    moves       = 6,
    move_order  = 7,
    mover       = 8, // of the cache
    disk        = 9,
    drafted     = 10,
    mixer       = 11,
    leaver      = 12,
};

// A stream of random numbers; of several with the same seed and different names none tells of another.
class Random {
public:
    Random(std::uint64_t seed, Stream name);
    std::uint64_t next();
    int           below(int n) { return int(next() % std::uint64_t(n)); }
    int           between(int least, int most) { return least + below(most - least + 1); }
    bool          one_in(int n) { return below(n) == 0; }

private:
    std::uint64_t state_;
};

} // namespace quire::simulation
