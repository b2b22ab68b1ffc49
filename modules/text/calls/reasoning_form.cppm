// quire.text.calls.reasoning_form: with which marks a chat template surrounds the reasoning of an answer, found by rendering one that has some.
// Owns nothing.
export module quire.text.calls.reasoning_form;

import quire.core.base;
import quire.text.calls.call_marks;
export import quire.text.templates.chat_template;

export namespace quire {

// The marks; both empty: the template knows no reasoning.
struct ReasoningForm {
    std::string begin, end;
    explicit    operator bool() const { return !end.empty(); }
    bool        operator==(const ReasoningForm&) const = default;
};

constexpr std::string_view think_begin = "<think>", think_end = "</think>";

// Harmony's channels are no marks of this kind.
ReasoningForm reasoning_form(const ChatTemplate& chat_template);

// How far the reasoning of an answer has come where its prompt ends.
enum class PromptReasoning : std::uint8_t {
    unsaid, // the prompt has none of the marks at its end: the answer begins with reasoning, or does not
    open,   // the answer begins within its reasoning
    closed, // its reasoning is over, or was never to come
};
// `prompt`: as the template renders it, and behind it `begun`, the beginning of the answer.
PromptReasoning prompt_reasoning(const ReasoningForm& form, std::string_view prompt, std::string_view begun = "");

} // namespace quire

module :private;

namespace quire {

std::optional<std::string> rendered(const ChatTemplate& t, bool with_call) {
    ChatInput input;
    input.add_generation_prompt = false;
    input.variables             = Json{{"enable_thinking", true}, {"thinking", true}};
    const std::string thought(probe::thought);
    Json              answer{{"role", "assistant"},          {"content", with_call ? "" : std::string(probe::text)},
                             {"reasoning_content", thought}, {"reasoning", thought},
                             {"thinking", thought},          {"tool_plan", thought}};
    if (with_call) {
        const std::string name(probe::tool);
        answer["tool_calls"] = Json::array({Json{{"id", std::string(probe::id)},
                                                 {"type", "function"},
                                                 {"function", {{"name", name}, {"arguments", Json::object()}}}}});
        input.tools          = Json::array({Json{{"type", "function"},
                                                 {"function",
                                                  {{"name", name},
                                                   {"description", "Does nothing."},
                                                   {"parameters", {{"type", "object"}, {"properties", Json::object()}}}}}}});
    }
    input.messages          = {Json{{"role", "user"}, {"content", std::string(probe::question)}}, std::move(answer)};
    Result<MarkedText> text = t.render(input, {.bos_token = "<s>", .eos_token = "</s>"});
    if (!text) return std::nullopt;
    return std::move(text->bytes);
}

// The mark that the text ends with.
std::string_view last_mark(std::string_view text) {
    text                    = text.substr(0, text.find_last_not_of(white_space) + 1);
    const std::size_t begin = text.find_last_of("<[");
    if (begin == std::string_view::npos || text.size() - begin > 64) return {};
    return text.substr(begin);
}

std::string_view first_mark(std::string_view text) {
    text.remove_prefix(std::min(text.find_first_not_of(white_space), text.size()));
    if (text.empty() || (text[0] != '<' && text[0] != '[')) return {};
    const std::size_t end = text.find(text[0] == '<' ? '>' : ']');
    return end == std::string_view::npos || end > 64 ? std::string_view() : text.substr(0, end + 1);
}

ReasoningForm reasoning_form(const ChatTemplate& chat_template) {
    const std::string_view source = chat_template.source();
    if (source.contains("<|channel|>") && source.contains("<|message|>")) return {};
    for (const bool with_call : {false, true}) {
        const std::optional<std::string> text = rendered(chat_template, with_call);
        const std::size_t                at   = text ? text->find(probe::thought) : std::string::npos;
        if (at == std::string::npos) continue;
        const std::size_t question = text->rfind(probe::question, at);
        if (question == std::string::npos) continue;
        if (const auto element = element_between(std::string_view(*text).substr(0, at),
                                                 std::string_view(*text).substr(at + probe::thought.size())))
            return {element->begin_mark(), element->end_mark()};
        const auto begin = last_mark(std::string_view(*text).substr(0, at));
        const auto end   = first_mark(std::string_view(*text).substr(at + probe::thought.size()));
        // A mark that stands before other texts, too, says nothing. Instructions before the question may name it.
        if (!begin.empty() && !end.empty() && begin != end && text->find(begin, question) == text->rfind(begin) &&
            begin != last_mark(std::string_view(*text).substr(0, question)))
            return {std::string(begin), std::string(end)};
    }
    if (source.contains(think_begin)) return {std::string(think_begin), std::string(think_end)};
    if (source.contains("[THINK]")) return {"[THINK]", "[/THINK]"};
    return {};
}

PromptReasoning prompt_reasoning(const ReasoningForm& form, std::string_view prompt, std::string_view begun) {
    if (!form) return PromptReasoning::unsaid;
    prompt               = prompt.substr(0, prompt.find_last_not_of(white_space) + 1);
    PromptReasoning said = prompt.ends_with(form.begin) ? PromptReasoning::open
                           : prompt.ends_with(form.end) ? PromptReasoning::closed
                                                        : PromptReasoning::unsaid;
    // A text that has begun without reasoning has none before it any more.
    const std::size_t first = begun.find_first_not_of(white_space);
    if (first == std::string_view::npos) return said;
    const std::string_view text = begun.substr(first);
    if (said == PromptReasoning::unsaid && text.starts_with(form.begin)) said = PromptReasoning::open;
    else if (said == PromptReasoning::unsaid) return PromptReasoning::closed;
    return text.contains(form.end) ? PromptReasoning::closed : said;
}

} // namespace quire
