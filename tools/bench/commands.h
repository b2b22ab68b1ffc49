// Shared by bench's subcommands. To be included last, below the imports.
#pragma once

import quire.core.base;
import quire.core.polymorphic;
import quire.core.std;
import quire.engine.engine;
import quire.schedule.token_filter;
import quire.tools.bench.load_report;
import quire.tools.common.constraint_flags;

namespace CLI {
class App;
}

namespace quire::bench {

struct Arguments {
    EngineOptions    engine; // what the flags say of it
    std::string      model, shape = "llama-1b", type = "f16", out, lengths, only, system = "quire", vocabulary;
    std::vector<int> pp{512}, tg{128}, npl{1, 8, 32};
    bool             counts = false; // make-model
    bool             eagle  = false; // likewise, as what follows
    int              mtp    = 0;
    int repetitions = 5, depth = 0, kv_blocks = 0, batch_tokens = 0, layers = 0, n_requests = 1000, max_sequences = 0;
    int npp = 512, ntg = 128;
    double bandwidth = 0, tflops = 0;
    bool   json = false, no_warmup = false, prompt_shared = false, explain = false;
    // compare
    std::string llama_bench, llama_batched_bench;
    int         rounds = 3;
    // batched
    ConstraintFlags constraint;
    bool            no_fast_forward = false;
};

struct QualityArguments {
    EngineOptions engine;
    std::string   model, text, against, reference = "f32"; // text: a file; empty: ours. reference: a type of K and V
    int           tokens = 4096, window = 512;
    bool          json = false;
};

struct SpeculateArguments {
    EngineOptions            engine;
    std::string              model;
    std::vector<std::string> texts; // files with prompts; none: random prompts, and guesses from the recorded answers
    std::vector<double>      acceptance{0.8, 0};
    std::vector<int>         npl{1};
    int                      n_prompt = 64, n_tokens = 128, rounds = 3, check = 0;
    bool                     processor_time = false, json = false;
};

struct ServeArguments {
    std::string              base_url = "http://127.0.0.1:8080", endpoint = "/v1/completions", api_key, model, dataset;
    std::string              extra_body;
    std::vector<std::string> goodput;
    int           n_prompts = 1000, n_input = 1024, n_output = 128, prefix = 0, vocabulary = 1000, n_warmups = 0;
    double        range_ratio = 0, burstiness = 1, temperature = 0, timeout = 3600, duration = 0;
    std::uint64_t seed       = 0;
    bool          ignore_eos = false, check = false, json = false;
    ReportOptions report;
};

struct ReplicasArguments {
    std::vector<int>         replicas{8, 32, 128};
    std::vector<std::string> policies{"random", "round-robin", "least-loaded", "kv-aware"};
    int                      chats = 100, slots = 120'000, seed = 1, threads = 0;
    double                   think = 10, seconds = 60, scale = 1;
    std::string              costs, model, device            = "auto", json, svg;
};

struct ChatsArguments {
    EngineOptions       engine;
    std::string         model, directory, svg, questions;
    std::vector<double> sizes{0.5, 1, 2, 5, 10, 20};
    int                 pool = 4096, at_once = 4, rounds = 2, seed = 1;
    double              host = 4, scale = 0.25;
    bool                json = false;
};

struct PaperArguments {
    std::vector<std::string> figures{"all"};
    std::string              out = "paper", page, cost = "calibrated", model, shape = "opt-13b", device = "auto";
    bool                     simulate = false, real = false, html = false, again = false;
    int                      seed = 1, threads = 0;
    double                   scale = 1;
};

// -- the subcommands: each returns the exit code

int  blocks(int repetitions, bool json);
int  windows(bool json);
int  model(Arguments a);
int  batched(const Arguments& a);
int  compare(const Arguments& a);
int  throughput(const Arguments& a);
int  kernels(const Arguments& a);
int  make_model(const Arguments& a);
int  quality(const QualityArguments& a);
int  speculate(const SpeculateArguments& a);
int  check_drafts(const SpeculateArguments& a);
int  serve(ServeArguments a);
void add_serve_flags(CLI::App* c, ServeArguments& a);
int  replicas(const ReplicasArguments& a);
void add_replicas_flags(CLI::App* c, ReplicasArguments& a);
int  chats(const ChatsArguments& a);
void add_chats_flags(CLI::App* c, ChatsArguments& a);
int  paper(PaperArguments a);
void add_paper_flags(CLI::App* c, PaperArguments& a);

// -- kernel.cpp

// How much longer attention takes over blocks of that many tokens than over one block a sequence; as a factor.
struct PagedOverhead {
    int    sequences = 0, context = 0, block_size = 0;
    double factor = 1;
};

// Of the 13B shape; empty: there is no GPU.
std::vector<PagedOverhead> paged_overhead();

// -- run_batch.cpp

int complain(const Error& error, int code = 1); // returns the exit code

// The least that a step has to read and to multiply, two operations a parameter and token. Of a mixture of experts a step of n tokens
// reads the experts that some token chose, if all are equally likely, and a token multiplies with the experts that it chose.
struct Work {
    double weight_bytes = 0, parameters = 0, kv_bytes_per_token = 0; // with all experts
    double expert_bytes = 0, expert_parameters = 0;                  // contained in these
    double used = 1;                                                 // of the experts, by a token

    double bytes_read(double n_tokens) const { return weight_bytes - expert_bytes * std::pow(1 - used, n_tokens); }
    double active_parameters() const { return parameters - expert_parameters * (1 - used); }
};

Result<Work>       work_of(const std::string& path, KvTypes types);
std::vector<Token> random_prompt(const Engine& engine, int n, unsigned seed);

struct Timed {
    double prefill = 0, decode = 0; // seconds
    double tokens = 0;              // made in `decode`
    int    steps  = 0;              // of decoding
};

int           head_start(int n_sequences, int n_prompt, int step_tokens);
int           step_tokens(const Arguments& a);
Result<Timed> run_batch(Engine& engine, int n_sequences, int n_prompt, int n_tokens, unsigned seed, bool shared = false,
                        const Polymorphic<TokenFilter>* sampled = nullptr);
EngineOptions options_of(const Arguments& a, int n_sequences, int n_tokens);
std::string   limit_of(const Arguments& a, double seconds, double bytes, double flop);

} // namespace quire::bench
