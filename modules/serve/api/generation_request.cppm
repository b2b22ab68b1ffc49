// quire.serve.api.generation_request: a request for text as the APIs' parsers make it: a prompt or a chat, and what is asked of its answers.
// Owns nothing.
export module quire.serve.api.generation_request;

import quire.constraint.compile;
import quire.core.base;
export import quire.core.json;
export import quire.schedule.request;
export import quire.schedule.request_check; // longest_prompt
export import quire.text.templates.chat_template;

export namespace quire {

// Text and token ids in a row; the ids stand for themselves.
using PromptPart = std::variant<std::string, std::vector<Token>>;
using Prompt     = std::vector<PromptPart>;

// A conversation, and how it becomes a prompt.
struct Conversation {
    ChatInput input;
    bool      continue_final = false; // the last message is the beginning of the answer
};

// The tools of a chat.
struct ToolUse {
    Json tools    = Json::array(); // that the answer may call; none: no calls are looked for in it
    bool parallel = true;          // more than one call in an answer
    bool required = false;         // the answer has to be a call
};

// The constraint that the text has to satisfy.
struct ConstraintField {
    ConstraintSpec spec;
    std::string    param; // the field that it came from
};

// The surroundings of a text that the answer is to continue, beside the text before it.
struct Infill {
    std::string                                      suffix; // behind the gap
    std::vector<std::pair<std::string, std::string>> files;  // others: their names and texts
    bool trim = false; // what does not fit the context is left out, else it is an error
};

// A request for text, of any API.
struct GenerationRequest {
    bool                                       chat = false;
    std::vector<Prompt>                        prompts; // of completions
    std::optional<Infill>                      infill;  // of them: the answer stands before a suffix
    Conversation                               conversation;
    ToolUse                                    tool_use; // of chats
    bool                                       add_special_tokens = true;
    Request                                    request;    // all but the prompt and max_tokens
    std::optional<int>                         max_tokens; // 0: nothing is generated; absent: up to the context
    bool                                       has_seed = false;
    std::vector<std::string>                   stop, bad_words;
    std::vector<std::string>                   dry_breakers;
    int                                        reasoning_budget  = -1;    // of chats, in tokens; -1: none
    bool                                       reasoning_control = false; // another request may end the reasoning
    bool                                       trim     = false; // a chat that is too long loses its oldest messages
    bool                                       has_keep = false; // the request says how much a context shift keeps
    std::vector<std::pair<std::string, float>> text_bias;        // logit_bias of all tokens of a text
    bool                                       include_stop = false, skip_special_tokens = true;
    bool                                       stream = false, include_usage = false, continuous_usage = false;
    bool               echo = false, logprobs = false, return_token_ids = false, tokens_as_ids = false;
    int                prompt_logprobs = -1; // as the field asks, in vLLM's shape
    int                truncate_prompt = 0;  // keep so many last tokens; -1: as many as the context holds; 0: all
    bool               cache_prompt    = true;
    std::optional<int> slot;  // of llama.cpp, that the request names
    std::string        id;    // request_id, if it is a plain word
    std::string        model; // the name that was asked for, where the response repeats it
    bool               timings_per_token = false;
    bool               show_prompt       = false; // the response holds the text of the prompts
    bool               verbose           = false; // likewise, and the settings
    std::vector<std::string>
        response_fields; // of llama.cpp's completions: those of the response, as PATH/TO/FIELD; none: all
    std::optional<ConstraintField> constraint; // of the text
    std::vector<std::string>       unknown;    // unknown fields, for the log
};

// The tokens that a shortened prompt leaves to its answer at least. A longer answer ends at the end of the context.
int answer_reserve(const GenerationRequest& from, int context);
// Sets max_tokens and min_tokens of `request`, which has its prompt, to the numbers of `from`, or to the room that the context has.
void limit_tokens(const GenerationRequest& from, int context, Request& request);

} // namespace quire

module :private;

namespace quire {

int answer_reserve(const GenerationRequest& from, int context) {
    return std::max(std::min(from.max_tokens.value_or(context), context / 4), 1);
}

void limit_tokens(const GenerationRequest& from, int context, Request& request) {
    const int prompt   = std::min(int(request.prompt.size()), longest_prompt(context, true));
    request.max_tokens = from.max_tokens.value_or(context);
    if (!request.can_shift())
        request.max_tokens = std::min(request.max_tokens, context - prompt); // room for at least 1
    request.min_tokens = std::min(request.min_tokens, request.max_tokens);
}

} // namespace quire
