// quire.serve.api.generate: the one way from a request of any API into the engine and back: checks what depends on the model, encodes the
// prompts, submits, and answers as a whole or as a stream. Owns nothing.
export module quire.serve.api.generate;

import quire.constraint.compile;
import quire.constraint.reasoning_budget;
import quire.core.base;
import quire.serve.api.access;
export import quire.serve.api.answer;
export import quire.serve.api.context;
export import quire.serve.api.error;
import quire.serve.api.generation;
export import quire.serve.api.generation_request;
import quire.serve.api.infill;
import quire.serve.api.request_token_cache;
import quire.serve.constraint_cache;
export import quire.serve.http.exchange;
import quire.text.calls.reasoning_form;
import quire.text.calls.tool_form;

export namespace quire {

struct EncodedPrompts {
    std::vector<std::vector<Token>> tokens;
    std::vector<std::string>        echoes;        // the text of each, where the response shows it
    PromptReasoning                 reasoning{};   // of the chat's answer, where the chat's text ends
    int                             n_trimmed = 0; // messages of the chat that were left out
};
// The prompts of a request, truncated where it asks for that. `param`: the field that an error names; `completion`: tokens asked
// for.
Parsed<EncodedPrompts> encode_prompts(const ApiContext& api, const GenerationRequest& r, const std::string& param,
                                      int completion);

// Makes the renderer that writes the response. `echoes`: as in EncodedPrompts.
using MakeRenderer = std::function<std::unique_ptr<AnswerRenderer>(
    const ResponseHead& head, const GenerationRequest& request, const std::vector<std::string>& echoes)>;

// Answers the request, or refuses it. `param`: the field with the prompt.
void generate(ApiContext& api, HttpExchange& e, Parsed<GenerationRequest> parsed, const std::string& param,
              const MakeRenderer& make_renderer);

} // namespace quire

module :private;

namespace quire {

Parsed<std::vector<Token>> encode_infill(const ApiContext& api, const GenerationRequest& r, const Prompt& prompt,
                                         int completion) {
    const Infill& infill = *r.infill;
    std::size_t   bytes  = text_bytes(prompt) + infill.suffix.size();
    for (const auto& [name, text] : infill.files) bytes += name.size() + text.size();
    const auto ok = infill.trim ? api.encoder.check_split(bytes, "input_prefix")
                                : api.encoder.check_size(bytes, completion, "prompt");
    if (!ok) return std::unexpected(ok.error());
    const int context = api.options.limits.context;
    return infill_tokens(api.service.tokenizer(), api.options.middle, infill, prompt,
                         infill.trim ? context - answer_reserve(r, context) : 0);
}

Parsed<EncodedPrompts> encode_prompts(const ApiContext& api, const GenerationRequest& r, const std::string& param,
                                      int completion) {
    const auto check = [&](std::size_t bytes) {
        return r.truncate_prompt == 0 && !r.infill ? api.encoder.check_size(bytes, completion, param)
                                                   : api.encoder.check_split(bytes, param);
    };
    EncodedPrompts out;
    if (r.chat) {
        const Conversation*  chat = &r.conversation;
        Parsed<Conversation> trimmed;
        if (r.trim) {
            const int reserve = answer_reserve(r, api.options.limits.context);
            trimmed           = api.encoder.trim(r.conversation, r.add_special_tokens, reserve);
            if (!trimmed) return std::unexpected(trimmed.error());
            chat          = &*trimmed;
            out.n_trimmed = int(r.conversation.input.messages.size() - chat->input.messages.size());
        }
        Parsed<MarkedText> text = api.encoder.render(*chat);
        if (!text) return std::unexpected(text.error());
        if (auto ok = check(text->bytes.size()); !ok) return std::unexpected(ok.error());
        out.tokens.push_back(api.encoder.encode_rendered(*text, r.add_special_tokens));
        const std::string_view bytes = text->bytes;
        const std::size_t      begun =
            chat->continue_final ? chat->input.messages.back()["content"].get_ref<const std::string&>().size() : 0;
        out.reasoning = prompt_reasoning(api.options.reasoning, bytes.substr(0, bytes.size() - begun),
                                         bytes.substr(bytes.size() - begun));
        out.echoes.push_back(r.show_prompt ? text->bytes : "");
    }
    if (r.infill && !api.options.middle.usable())
        return std::unexpected(no_middle_marks(r.infill->trim ? "" : "suffix"));
    for (const Prompt& prompt : r.prompts) {
        if (auto ok = check(text_bytes(prompt)); !ok) return std::unexpected(ok.error());
        Parsed<std::vector<Token>> ids = r.infill ? encode_infill(api, r, prompt, completion)
                                                  : api.encoder.encode(prompt, r.add_special_tokens, param);
        if (!ids) return std::unexpected(ids.error());
        const bool plain = prompt.size() == 1 && std::holds_alternative<std::string>(prompt[0]);
        out.echoes.push_back(!r.echo && !r.show_prompt ? ""
                             : plain                   ? std::get<std::string>(prompt[0])
                                                       : api.service.tokenizer().decode(*ids));
        out.tokens.push_back(std::move(*ids));
    }
    if (r.truncate_prompt == 0) return out;
    const int  most = longest_prompt(api.options.limits.context, r.max_tokens != 0);
    const auto keep = std::size_t(r.truncate_prompt > 0 ? r.truncate_prompt : most);
    for (std::size_t i = 0; i < out.tokens.size(); i++) {
        std::vector<Token>& ids = out.tokens[i];
        if (ids.size() <= keep) continue;
        ids.erase(ids.begin(), ids.end() - std::ptrdiff_t(keep));
        if (r.echo || r.show_prompt) out.echoes[i] = api.service.tokenizer().decode(ids);
    }
    return out;
}

// Whether reasoning is split from answers.
bool reasons(const ApiContext& api) { return api.options.reasons && api.options.reasoning; }

// Whether the request, or the server's default, switches reasoning off by one of the variables that templates know for that.
bool reasoning_off(const ApiContext& api, const Conversation& chat) {
    const auto set_to = [&](const char* name, const Json& value) {
        return api.options.chat_template.variable(chat.input, name) == value;
    };
    return set_to("enable_thinking", false) || set_to("thinking", false) || set_to("reasoning_effort", "none");
}

// A chat's constraint holds for the text behind the reasoning, and calls of tools follow their schemas. If the prompt has ended the
// reasoning, or the request allows none, the answer does not begin with reasoning.
void constrain_answer(const ApiContext& api, GenerationRequest& r, PromptReasoning reasoning) {
    const bool marked = reasons(api) || api.options.tool_form == ToolForm::harmony;
    if (r.tool_use.tools.empty() && !(r.constraint && marked)) return;
    if (!r.constraint) r.constraint.emplace().param = "tools";
    AnswerRules& rules = r.constraint->spec.answer.emplace(api.rules);
    rules.tools        = r.tool_use.tools;
    rules.required     = r.tool_use.required;
    rules.parallel     = r.tool_use.parallel;
    rules.in_reasoning = reasons(api) && reasoning == PromptReasoning::open;
    rules.may_reason   = reasons(api) && reasoning == PromptReasoning::unsaid && r.reasoning_budget != 0;
}

// Adds the biases of whole texts to those of tokens, and those of one token up: a sampler applies each of them to each row of logits.
std::optional<ApiError> add_text_biases(const ApiContext& api, GenerationRequest& r) {
    const auto                             most = std::size_t(api.options.limits.logit_bias);
    std::vector<std::pair<Token, float>>   sums;
    std::unordered_map<Token, std::size_t> places;
    const auto                             add = [&](Token token, float bias) {
        const auto [at, first] = places.try_emplace(token, sums.size());
        if (first) sums.emplace_back(token, bias);
        else sums[at->second].second += bias;
    };
    for (const auto& [token, bias] : r.request.sampling.logit_bias) add(token, bias);
    for (const auto& [text, bias] : r.text_bias) {
        for (Token token : api.encoder.encode_inside(text)) add(token, bias);
        if (sums.size() > most)
            return ApiError{
                400,
                cat("the texts of logit_bias have more than ", most, " different tokens, the most that are allowed"),
                "logit_bias", ""};
    }
    r.request.sampling.logit_bias = std::move(sums);
    return std::nullopt;
}

// The bytes that the log-probabilities of the answers to these requests, which differ in their prompts, hold at once in any case: all of
// them until a whole response is written, of a stream the log-probabilities of one piece. `to_end`: no answer ends before max_tokens.
std::size_t least_bytes(std::span<const Request> requests, bool stream, bool to_end) {
    std::size_t sum = 0, largest = 0;
    for (const Request& q : requests) {
        const auto entries = [](int most) { return most < 0 ? 0 : std::size_t(most) + 1; };
        const auto prompt  = q.prompt.size() * entries(q.prompt_logprobs) * logprob_bytes;
        const auto answer  = entries(q.sampling.logprobs) * logprob_bytes;
        const int  tokens  = to_end ? q.max_tokens : q.min_tokens;
        largest            = std::max({largest, prompt, stream ? answer * Generation::slice : 0});
        sum += (prompt + std::size_t(std::max(tokens, 0)) * answer) * std::size_t(q.n);
    }
    return stream ? largest : sum;
}

void generate(ApiContext& api, HttpExchange& e, Parsed<GenerationRequest> parsed, const std::string& param,
              const MakeRenderer& make_renderer) {
    const std::size_t body_bytes = std::exchange(e.request.body, {}).size();
    if (!parsed) return api.refuse(e, parsed.error());
    GenerationRequest& r = *parsed;
    for (const std::string& name : r.unknown) e.notes.emplace_back("unknown_field", name);
    const int completion = r.max_tokens.value_or(1); // tokens asked for

    Parsed<EncodedPrompts> encoded = encode_prompts(api, r, param, completion);
    if (!encoded) return api.refuse(e, encoded.error());
    auto& [prompts, texts, reasoning, n_trimmed] = *encoded;
    if (n_trimmed > 0) e.notes.emplace_back("trimmed_messages", cat(n_trimmed));

    std::size_t held = 0; // 16 bytes a token: here and in the engine, as ids and in tables
    for (std::size_t i = 0; i < prompts.size(); i++) held += prompts[i].size() * 16 + texts[i].size();
    if (!r.tool_use.tools.empty() || r.constraint) held += body_bytes; // schemas are kept until the answer is complete
    if (!r.stream) { // a whole response has all answers beside their prompts and settings
        constexpr std::size_t answer = 2048, settings = 16384;
        for (const std::string& text : texts)
            held += std::size_t(r.request.n) * (answer + (r.show_prompt ? settings + 2 * text.size() : 0));
    }
    if (!api.count_memory(e, held)) return;

    Request& q = r.request;
    // Of 53 bits, which a number of JavaScript holds: clients send it back.
    if (!r.has_seed) q.sampling.seed = (std::random_device{}() + (std::uint64_t(std::random_device{}()) << 32)) >> 11;
    for (const std::string& word : r.bad_words)
        for (const std::string& variant : {word, " " + word}) {
            std::vector<Token> ids = api.encoder.encode_inside(variant);
            if (!ids.empty()) q.sampling.bad_words.push_back(std::move(ids));
        }
    if (const auto error = add_text_biases(api, r)) return api.refuse(e, *error);
    q.max_tokens = completion;
    if (const auto fault = api.service.engine().find_fault(q)) // before a constraint is compiled
        return api.refuse(e, ApiError{400, fault->error.message, std::string(fault->field), ""});
    // Whatever the template writes: an answer that is to have no reasoning ends its reasoning at once.
    if (r.chat && r.reasoning_budget < 0 && q.beam_width == 0 && reasoning != PromptReasoning::closed &&
        reasoning_off(api, r.conversation))
        r.reasoning_budget = 0;
    const bool asked = r.constraint || r.tool_use.required; // of the text, beside the form of calls
    if (r.chat) constrain_answer(api, r, reasoning);
    // A constrained text has reasoning only where its grammar says so; marks of it elsewhere are a part of that text.
    const bool may_reason = !asked || !r.constraint->spec.answer || r.constraint->spec.answer->may_reason ||
                            r.constraint->spec.answer->in_reasoning;
    if (r.constraint) {
        const auto gone = std::make_shared<std::atomic<bool>>(false);
        e.peer->when_gone([gone] { *gone = true; });
        Result<ConstraintState> begun =
            api.constraints.begin(r.constraint->spec, api.service.engine().token_trie(), *gone);
        e.peer->when_gone({});
        if (!begun)
            return api.refuse(
                e, ApiError{400, cat(r.constraint->param, ": ", begun.error().message), r.constraint->param, ""});
        q.constraint = std::move(*begun);
    }
    if (q.sampling.dry.on()) q.sampling.dry.breakers = api.request_tokens.breakers(r.dry_breakers);
    if ((r.reasoning_budget >= 0 || r.reasoning_control) && api.options.reasoning && may_reason) {
        const int most = r.reasoning_budget >= 0 ? r.reasoning_budget : std::numeric_limits<int>::max();
        std::shared_ptr<std::atomic<bool>> stop;
        const std::string                  id = r.id.empty() ? e.request.id : r.id;
        if (r.reasoning_control && !(stop = api.reasoning.add(std::string(given_key(e.request)), id)))
            return api.refuse(e, ApiError{400, "an answer with this request_id is running", "request_id", ""});
        q.reasoning = ReasoningBudget(api.request_tokens.reasoning_marks(api.options.reasoning), most,
                                      reasoning == PromptReasoning::open, std::move(stop));
    }
    if (q.context_shift && r.chat && !r.has_keep)
        q.n_keep = api.encoder.n_before_turns(r.conversation, r.add_special_tokens).value_or(0);
    q.uses_cache = r.cache_prompt;
    if (!q.adapters) q.adapters = api.adapters_of(r.model);
    q.prompt_logprobs = r.prompt_logprobs;
    if (r.echo && r.logprobs) q.prompt_logprobs = std::max(q.prompt_logprobs, q.sampling.logprobs);

    ResponseHead head;
    head.chat              = r.chat;
    head.id                = r.id.empty() ? e.request.id : r.id;
    head.model             = api.model_name(r.model);
    head.created           = unix_seconds();
    head.logprobs          = r.logprobs;
    head.after_samplers    = q.sampling.after_samplers;
    head.token_ids         = r.return_token_ids;
    head.prompt_logprobs   = r.prompt_logprobs >= 0;
    head.tokens_as_ids     = r.tokens_as_ids;
    head.include_usage     = r.include_usage;
    head.continuous_usage  = r.continuous_usage;
    head.timings_per_token = r.timings_per_token;
    Slots::Use use;
    // A slot's text is found again with the adapters of a request that names none.
    if (q.adapters) api.slots.leave(r.slot.value_or(-1));
    else if (r.cache_prompt && prompts.size() == 1) use = api.slots.begin(r.slot, prompts[0], q.cache_salt);
    head.slot = use.slot;
    if (r.verbose) head.verbose = {{"prompt", texts[0]}, {"generation_settings", settings_json(r)}};

    AnswerFormat format;
    if (r.chat) {
        if (!r.tool_use.tools.empty() || api.options.tool_form == ToolForm::harmony || api.options.tool_form.element)
            format.form = api.options.tool_form;
        format.one_call     = !r.tool_use.parallel;
        format.tools        = std::move(r.tool_use.tools);
        format.reasoning    = reasons(api) && may_reason;
        format.marks        = api.options.reasoning;
        format.in_reasoning = format.reasoning && reasoning == PromptReasoning::open;
        format.in_pieces    = r.constraint && r.constraint->spec.answer;
        head.short_call_ids = format.form == ToolForm::mistral;
    }
    const bool stream = r.stream;
    // A chat's answer may have parts without log-probabilities.
    const bool to_end =
        !r.chat && q.ignore_end && q.stop_tokens.empty() && r.stop.empty() && !q.constraint && q.beam_width == 0;
    Json       settings = settings_json(r);
    auto       renderer = make_renderer(head, r, texts);
    const auto type     = std::string(renderer->type());
    auto generation = std::make_shared<Generation>(api.service, std::move(r), std::move(head), std::move(texts), format,
                                                   std::move(renderer));
    if (use.slot >= 0) generation->listen([&api, use](std::span<const Token> tokens) { api.slots.add(use, tokens); });
    std::vector<Request> requests = generation->requests(std::move(prompts));
    const std::size_t    certain  = least_bytes(requests, stream, to_end);
    if (!e.peer->count_memory(held + certain)) {
        e.response.headers.emplace_back("Retry-After", "1");
        return api.refuse(e, answers_too_large());
    }
    auto handle = api.service.submit(std::move(requests));
    if (!handle) return api.refuse(e, handle.error(), param, completion);
    e.peer->when_gone((*handle)->when_gone());
    const std::shared_ptr<void> listed = api.running.add((*handle)->ids(), std::move(settings));
    generation->begin(std::move(*handle));
    e.held.reset(); // generating takes long, and little memory
    if (!stream) {
        const auto count = [&](std::size_t bytes) { return e.peer->count_memory(held + std::max(certain, bytes)); };
        std::optional<ApiError> error = generation->respond(e.response.body, count);
        generation->record(e.notes);
        if (error && error->status == 503) e.response.headers.emplace_back("Retry-After", "1");
        if (error) api.refuse(e, *error);
        return;
    }
    // As long as nothing has been sent, an error can have its own status.
    if (auto error = generation->wait_for_first(api.options.ping_seconds)) {
        generation->record(e.notes);
        return api.refuse(e, *error);
    }
    e.response.type = type;
    e.response.headers.emplace_back("Cache-Control", "no-cache");
    e.response.headers.emplace_back("X-Accel-Buffering", "no");
    e.response.stream = [&api, generation, listed, &e](const HttpWrite& write) {
        try {
            generation->stream(write, api.options.ping_seconds);
        } catch (const std::bad_alloc&) {
            generation->abort();
            write(generation->out_of_memory());
        }
        generation->record(e.notes);
    };
}

} // namespace quire
