// quire.serve.api.context: the objects that the handlers of all routes share, of the server and of one model. **Owns** the settings of the API,
// the chat template, the cache of compiled constraints, the settings of the requests that run, and the stored responses.
module;

#include <ctime>

export module quire.serve.api.context;

import quire.constraint.compile;
import quire.constraint.memory;
import quire.core.base;
export import quire.core.json;
import quire.schedule.request_check;
export import quire.serve.api.error;
export import quire.serve.api.generation_settings;
export import quire.serve.api.limits;
export import quire.serve.api.prompt_encoder;
import quire.serve.api.request_token_cache;
import quire.serve.constraint_cache;
export import quire.serve.http.exchange;
import quire.serve.http.server;
export import quire.serve.response_store;
export import quire.serve.service;
export import quire.serve.slots;
import quire.text.calls.reasoning_form;
import quire.text.calls.tool_form;
export import quire.text.templates.chat_template;
export import quire.text.tokens.fill_in_middle;

export namespace quire {

constexpr std::size_t longest_message = 1024; // bytes of an error's text

// A description of the model's file, for clients that ask.
struct ModelFacts {
    std::uint64_t bytes = 0, parameters = 0;
    std::string   type; // of most of its weights
};

struct EndpointOptions {
    ApiLimits                limits; // models, vocabulary and context are filled in
    std::vector<std::string> aliases;
    ChatTemplate             chat_template;
    CallForm                 tool_form;      // of the template, or as the user says; none, other: the template's are
                                             // not known, and tools are described in messages
    ReasoningForm            reasoning;      // likewise; the text between its marks is split off
    bool                     reasons = true; // false: it stays in the content
    MiddleMarks              middle;         // of the vocabulary; those without a key in the file are filled in
    std::string              now;            // of the templates' clock; "": the machine's
    std::string              model_file;     // its name, without the folder
    ModelFacts               model;
    std::vector<std::string> api_keys;            // a request needs one of them; none: every request may enter
    std::vector<std::string> cors_origins;        // of pages that may use this server; "*": all
    double                   ping_seconds = 15;   // of silence in a stream, until a comment keeps it alive
    bool                     pages        = true; // the chat and the block pool for a browser
    bool                     slots        = true; // GET /slots answers
    SlotOptions              saved_slots;         // number, context and model are filled in
    // For a server without keys that only this machine can reach: browsers that use another name than the machine's own are
    // refused. A web page could have made its own name lead to 127.0.0.1 (DNS rebinding).
    bool local_only = false;
    // Memory for all bodies that are being parsed and tokenized; constraints have half as much beside it, at least 64 MiB.
    std::size_t working_bytes = std::size_t(512) << 20;
    std::size_t stored_bytes  = std::size_t(64) << 20; // of responses that later ones continue; 0: none
    // The endpoints of KV events, and of past KV events; "": none.
    std::string kv_events, kv_replay;
};

// The answers whose reasoning another request may end, by the id in their responses. Any thread. An owner is the API key of a request; an
// owner's answers are unknown to every other.
class ReasoningControls {
public:
    // Null: the owner has an answer with this id that is running. The answer is forgotten with the result.
    std::shared_ptr<std::atomic<bool>> add(const std::string& owner, const std::string& id);
    // False: the owner has no such answer that runs.
    bool stop(const std::string& owner, const std::string& id);

private:
    using Key = std::pair<std::string, std::string>; // owner and id
    std::mutex                                      mutex_;
    std::map<Key, std::weak_ptr<std::atomic<bool>>> stops_;
};

// Each makes the response an error, in the form of the API that the path belongs to.
void refuse(HttpExchange& e, const ApiError& error);
void refuse_too_large(HttpExchange& e);
// Counts the memory of a request while it is answered; false: too much, and the request is refused.
bool count_memory(HttpExchange& e, std::size_t bytes);

// The objects that all models of a server share.
struct SharedContext {
    explicit SharedContext(std::size_t stored_bytes);

    ResponseStore                  stored;
    std::int64_t                   started; // Unix time in seconds
    const HttpServer*              server = nullptr;
    std::string                    openapi;           // the text of /openapi.json
    std::function<std::uint64_t()> dropped_log_lines; // for the metrics; none: there is no log
};

// The objects of one model.
struct ApiContext {
    ApiContext(Service& service, EndpointOptions options, SharedContext& shared);

    SharedContext&    shared;
    Service&          service;
    EndpointOptions   options;
    PromptEncoder     encoder;
    ConstraintCache   constraints;
    RequestTokenCache request_tokens;
    RunningSettings   running;
    ReasoningControls reasoning;
    Slots             slots;
    AnswerRules       rules; // of answers to chats, without the request's own rules

    // The model's name in the response to a request that named it `asked` ("": not named).
    std::string model_name(const std::string& asked) const { return asked.empty() ? options.aliases[0] : asked; }
    // The adapter whose name, perhaps with the tag ":latest", stands in place of the model's; nothing: none has it.
    std::optional<std::vector<AdapterUse>> adapters_of(const std::string& asked) const;
    bool count_memory(HttpExchange& e, std::size_t bytes) const { return quire::count_memory(e, bytes); }
    void refuse(HttpExchange& e, const ApiError& error) const { quire::refuse(e, error); }
    // `param`: the field with the prompt; `completion`: tokens asked for.
    void refuse(HttpExchange& e, const Refusal& refusal, const std::string& param, int completion = 0) const;
};

// A model's name without the tag ":latest", which Ollama's clients add.
std::string  without_latest(const std::string& name);
std::int64_t unix_seconds();
// A time since 1970 as RFC 3339 writes it.
std::string time_text(std::int64_t microseconds);
void        answer_json(HttpExchange& e, Json body);

} // namespace quire

module :private;

namespace quire {

SlotOptions complete(SlotOptions slots, const Service& service) {
    slots.n       = service.engine_options().max_sequences;
    slots.context = service.engine_options().context;
    slots.model   = service.engine().model_hash();
    return slots;
}

SharedContext::SharedContext(std::size_t stored_bytes) : stored(stored_bytes), started(unix_seconds()) {}

ApiContext::ApiContext(Service& the_service, EndpointOptions the_options, SharedContext& the_shared)
    : shared(the_shared), service(the_service), options(std::move(the_options)),
      encoder(service.tokenizer(), service.engine_options(), options.chat_template, options.now,
              options.tool_form == ToolForm::none || options.tool_form == ToolForm::other),
      request_tokens(service.tokenizer()), slots(complete(options.saved_slots, service)) {
    options.limits.models = options.aliases;
    for (const AdapterOption& adapter : service.engine_options().adapters)
        if (std::ranges::find(options.limits.models, adapter.name) == options.limits.models.end())
            options.limits.models.push_back(adapter.name);
    options.limits.templates        = options.chat_template.names();
    options.limits.reasoning_effort = options.chat_template.uses("reasoning_effort");
    options.limits.vocab_size       = service.config().vocab_size;
    options.limits.context          = service.engine_options().context;
    options.limits.slots            = slots.on() ? slots.n() : 0;
    options.middle                  = complete_middle_marks(options.middle, service.tokenizer());
    if (options.tool_form == ToolForm::none || options.tool_form == ToolForm::other)
        options.tool_form = ToolForm::hermes;
    rules.form      = options.tool_form;
    rules.reasoning = options.reasoning;
    find_controls(service.tokenizer(), rules);
    ConstraintMemory::all().limit(std::max(options.working_bytes / 2, std::size_t(64) << 20));
}

std::optional<std::vector<AdapterUse>> ApiContext::adapters_of(const std::string& asked) const {
    const std::vector<AdapterOption>& all  = service.engine_options().adapters;
    const std::string                 bare = without_latest(asked);
    for (const std::string* name : {&asked, &bare}) { // as ModelPool finds the model: the exact name goes first
        if (std::ranges::find(options.aliases, *name) != options.aliases.end()) return std::nullopt;
        const auto at = std::ranges::find(all, *name, &AdapterOption::name);
        if (at != all.end()) return std::vector{AdapterUse{int(at - all.begin()), at->scale}};
    }
    return std::nullopt;
}

std::shared_ptr<std::atomic<bool>> ReasoningControls::add(const std::string& owner, const std::string& id) {
    const std::scoped_lock lock(mutex_);
    std::erase_if(stops_, [](const auto& one) { return one.second.expired(); });
    auto stop = std::make_shared<std::atomic<bool>>(false);
    return stops_.try_emplace(Key(owner, id), stop).second ? stop : nullptr;
}

bool ReasoningControls::stop(const std::string& owner, const std::string& id) {
    const std::scoped_lock lock(mutex_);
    const auto             at   = stops_.find(Key(owner, id));
    const auto             stop = at == stops_.end() ? nullptr : at->second.lock();
    if (stop) *stop = true;
    return stop != nullptr;
}

bool count_memory(HttpExchange& e, std::size_t bytes) {
    if (e.peer->count_memory(bytes)) return true;
    refuse_too_large(e);
    return false;
}

void refuse_too_large(HttpExchange& e) {
    e.response.headers.emplace_back("Retry-After", "1");
    refuse(e, ApiError{503, "too many large requests at once", "", "no_room"});
}

void refuse(HttpExchange& e, const ApiError& why) {
    // A message's values are cut where it is made. This limit holds for every message.
    ApiError error    = why;
    error.message     = cut_short(error.message, longest_message);
    error.param       = cut_short(error.param, 128);
    e.response.status = error.status;
    e.response.body   = error_body(error, error_form(e.request.path));
    e.notes.emplace_back("error", error.message);
}

void ApiContext::refuse(HttpExchange& e, const Refusal& refusal, const std::string& param, int completion) const {
    ApiError error{400, refusal.error.message, param, ""};
    switch (refusal.why) {
        case Refused::invalid: {
            if (refusal.error.kind != ErrorKind::limit || refusal.n_tokens == 0) break;
            // In OpenAI's words where it is the context; of the pool they say nothing.
            const ApiError overflow =
                context_overflow(options.limits.context, std::int64_t(refusal.n_tokens), completion, param);
            error.code = overflow.code;
            if (std::int64_t(refusal.n_tokens) > longest_prompt(options.limits.context, completion > 0))
                error = overflow;
            break;
        }
        case Refused::full:
            error = {429, refusal.error.message, "", "queue_full"};
            e.response.headers.emplace_back("Retry-After", "1");
            break;
        case Refused::draining: error = {503, refusal.error.message, "", "shutting_down"}; break;
        case Refused::broken: error = engine_failed(refusal.error.message); break;
    }
    quire::refuse(e, error);
}

std::string without_latest(const std::string& name) {
    constexpr std::string_view tag = ":latest";
    return name.substr(0, name.size() - (name.ends_with(tag) ? tag.size() : 0));
}

std::int64_t unix_seconds() {
    return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
        .count();
}

std::string time_text(std::int64_t microseconds) {
    const std::time_t seconds = std::time_t(microseconds / 1'000'000);
    std::tm           parts{};
    gmtime_r(&seconds, &parts);
    char date[32], text[48];
    std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%S", &parts);
    std::snprintf(text, sizeof text, "%s.%06dZ", date, int(microseconds % 1'000'000));
    return text;
}

void answer_json(HttpExchange& e, Json body) { e.response.body = json_dump(std::move(body)); }

} // namespace quire
