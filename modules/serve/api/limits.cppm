// quire.serve.api.limits: what a request may ask for. Owns nothing.
export module quire.serve.api.limits;

export import quire.core.json;
import quire.core.std;
import quire.engine.sampling_defaults;

export namespace quire {

struct ApiLimits {
    std::vector<std::string> models;            // names that a request may use; the first is the one in responses
    bool                     any_model = false; // a request may use any name, and its response repeats it
    std::vector<std::string> templates;         // names of chat templates that a request may choose
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
    SamplerChoice            samplers;                 // where a request says nothing
    int                      reasoning_budget = -1;    // tokens; -1: none
    bool                     trim_chats       = false; // unless a request says otherwise
    bool                     context_shift    = false;
    JsonLimits               json;
};

} // namespace quire
