// quire.serve.api.limits: what a request may ask for. Owns nothing.
export module quire.serve.api.limits;

export import quire.core.json;
import quire.core.std;
import quire.engine.sampling_defaults;

export namespace quire {

struct ApiLimits {
    std::vector<std::string> models; // the model's names; the first is in responses to requests that name none
    bool                     strict_model = false;     // a request may use these names only, not any
    std::vector<std::string> templates;                // names of chat templates that a request may choose
    bool                     reasoning_effort = false; // the template asks for it
    int                      vocab_size       = 0;
    int                      context          = 0;
    int                      n = 128, best_of = 128; // answers; beams
    int                      max_tokens     = 0;     // that a request may ask for; 0: any number, cut at the context
    int                      default_tokens = -1;   // where a request sets none; -1: OpenAI's 16, for chats the context
    int                      stops          = 64;   // strings; as many bad words
    int                      stop_bytes     = 512;  // of each
    int                      prompts        = 1024; // of one request
    int                      messages       = 4096;
    int                      logprobs       = 20;
    int                      logit_bias     = 1024;    // entries
    int                      probs          = 100;     // n_probs, llama.cpp's name for log-probabilities
    SamplerChoice            samplers;                 // where a request says nothing
    std::int64_t             seed             = -1;    // likewise; -1: a new one for each request
    int                      reasoning_budget = -1;    // tokens; -1: none
    bool                     trim_chats       = false; // unless a request says otherwise
    bool                     context_shift    = false;
    int                      slots            = 0;     // that a request may name; 0: none is saved, so any number goes
    bool                     verbose          = false; // unless a request says otherwise
    JsonLimits               json;
};

} // namespace quire
