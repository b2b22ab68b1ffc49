// Calls between marks of a template's own: found by rendering, read back, and constrained. Every template's call is written by the template
// itself, so nothing here says twice how it looks.
#include <catch2/catch_test_macros.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "reference.h"

import quire.constraint.compile;
import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.text.calls.call_marks;
import quire.text.calls.call_readers;
import quire.text.calls.reasoning_form;
import quire.text.calls.tool_calls;
import quire.text.calls.tool_form;
import quire.text.marked_text;
import quire.text.templates.chat_template;

using namespace quire;

namespace {

Json tools() {
    return Json::parse(R"([{"type": "function", "function": {"name": "find", "description": "Finds.", "parameters":
        {"type": "object", "properties": {"what": {"type": "string", "description": "What."},
        "many": {"type": "integer", "description": "How many.", "maximum": 9}}, "required": ["what", "many"],
        "additionalProperties": false}}}])");
}

const Json arguments{{"what", "a b"}, {"many", 2}};

std::optional<std::string> rendered(const ChatTemplate& t, int n_calls) {
    ChatInput input;
    input.tools                 = tools();
    input.add_generation_prompt = false;
    Json calls                  = Json::array();
    for (int i = 0; i < n_calls; i++)
        calls.push_back(Json{{"id", i == 0 ? "call54361" : "call09876"},
                             {"type", "function"},
                             {"function", {{"name", "find"}, {"arguments", arguments}}}});
    input.messages = {Json{{"role", "user"}, {"content", "Question"}}};
    if (n_calls == 0) input.messages.push_back(Json{{"role", "assistant"}, {"content", "Words9"}});
    else input.messages.push_back(Json{{"role", "assistant"}, {"content", nullptr}, {"tool_calls", calls}});
    Result<MarkedText> text = t.render(input, {.bos_token = "<s>", .eos_token = "</s>"});
    if (!text) return std::nullopt;
    return std::move(text->bytes);
}

std::string trimmed(std::string_view text) {
    text.remove_prefix(std::min(text.find_first_not_of(" \n"), text.size()));
    return std::string(text.substr(0, text.find_last_not_of(" \n") + 1));
}

struct Read {
    std::string           content;
    std::vector<ToolCall> calls;
};

Read read(const CallForm& form, std::string_view text, std::size_t step, bool in_pieces) {
    AnswerParser            parser({.form = form, .tools = tools(), .in_pieces = in_pieces});
    std::vector<AnswerPart> all;
    for (std::size_t at = 0; at < text.size(); at += step) append(all, parser.push(text.substr(at, step)));
    append(all, parser.finish());
    return {text_of(all), calls_of(all)};
}

bool accepts(const CallForm& form, std::string_view text, bool required) {
    ConstraintSpec spec;
    AnswerRules&   rules = spec.answer.emplace();
    rules.form           = form;
    rules.tools          = tools();
    rules.required       = required;
    const auto made      = compile_constraint(spec);
    REQUIRE(made);
    static const auto trie =
        std::make_shared<const TokenTrie>(std::vector<std::string>{"a", ""}, std::vector<Token>{1});
    ConstraintState state(*made, trie);
    return state.accept_bytes(text) && state.may_end();
}

// Checks that a template writes one call, or two, between the question and the end of the message.
void check_template(const ChatTemplate& t, const CallForm& form) {
    const auto content = rendered(t, 0), one = rendered(t, 1);
    REQUIRE(content);
    REQUIRE(one);
    for (int n : {1, 2}) {
        const auto text = rendered(t, n);
        if (n == 2 && (!text || (form.marks && !form.marks->several))) continue;
        std::string call = trimmed(differing_part(*text, *content));
        if (form.marks && !form.marks->trigger.empty() && call.contains(form.marks->trigger))
            call = call.substr(call.find(form.marks->trigger));
        INFO(call);
        for (const std::size_t step : {call.size(), std::size_t(1), std::size_t(5)})
            for (const bool in_pieces : {false, true}) {
                const Read parts = read(form, call, step, in_pieces);
                CHECK(trimmed(parts.content).empty());
                REQUIRE(parts.calls.size() == std::size_t(n));
                for (const ToolCall& c : parts.calls) {
                    CHECK(c.name == "find");
                    CHECK(Json::parse(c.arguments) == arguments);
                }
            }
        // The grammar wants the schema's order: as the conversation has it.
        CHECK(accepts(form, call, true));
        CHECK(accepts(form, call, false));
        if (form.marks && !form.marks->trigger.empty()) CHECK(accepts(form, "Let me see. " + call, false));
        std::string wrong = call;
        wrong.replace(wrong.find('2'), 1, "11");
        CHECK_FALSE(accepts(form, wrong, true));
        CHECK_FALSE(accepts(form, wrong, false));
        CHECK(accepts(form, "Just words, 1 < 2 and [3].", false));
    }
}

std::string with_call(const std::string& open, const std::string& call, const std::string& separator,
                      const std::string& close) {
    return "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|{{ m.role }}|>\n{{ "
           "m.content or '' }}"
           "{% if m.tool_calls %}" +
           open + "{% for c in m.tool_calls %}{% set f = c.function %}" + call + "{% if not loop.last %}" + separator +
           "{% endif %}{% endfor %}" + close + "{% endif %}<|over|>\n{% endfor %}";
}

} // namespace

TEST_CASE("calls between other marks: found, read, constrained", "[tools]") {
    const std::string args   = "{{ f.arguments | tojson }}";
    const auto        tagged = [](const std::string& open, const std::string& between, const std::string& each) {
        return open + "{% for k, v in f.arguments.items() %}" + each + "{% if not loop.last %}" + between +
               "{% endif %}{% endfor %}";
    };
    const std::vector<std::array<std::string, 4>> forms{
        {"", "<call>\n{\"name\": \"{{ f.name }}\", \"arguments\": " + args + "}\n</call>", "\n", ""},
        {"<TOOLS>[", "{\"name\": \"{{ f.name }}\", \"arguments\": " + args + "}", ", ", "]</TOOLS>"},
        {"", "<|act|>{\"function\": \"{{ f.name }}\", \"args\": " + args + "}<|/act|>", "", ""},
        {"<|acts|>[\n    ", "{\"call_id\": \"{{ loop.index0 }}\", \"tool\": \"{{ f.name }}\", \"input\": " + args + "}",
         ",\n    ", "\n]<|/acts|>"},
        {"[ACTIONS] [", "{\"name\": \"{{ f.name }}\", \"arguments\": " + args + ", \"id\": \"{{ c.id }}\"}", ", ", "]"},
        {"", "[ACT]{{ f.name }}[WITH]" + args, "", ""},
        {"<|calls|>", "<|call|>functions.{{ f.name }}:{{ loop.index0 }}<|with|>" + args + "<|called|>", "",
         "<|/calls|>"},
        {"<|calls|>", "<|call|>{{ c.id }}<|name|>{{ f.name }}<|with|>" + args + "<|called|>", "\n", "<|/calls|>"},
        {"", "<fn={{ f.name }}>" + args + "</fn>", "\n", ""},
        {" functools[", "{\"name\": \"{{ f.name }}\", \"arguments\": " + args + "}", ", ", "]"},
        {"", "{\"function\": \"{{ f.name }}\", \"args\": " + args + "}", "; ", ""},
        {"[", "{\"function\": \"{{ f.name }}\", \"args\": " + args + "}", ", ", "]"},
        {"", "{{ f.name }}\n" + args, "", ""},
        {"",
         tagged("<x:call>\n<function={{ f.name }}>", "", "\n<arg={{ k }}>{{ v }}</arg>") + "\n</function>\n</x:call>",
         "\n", ""},
        {"<x:calls>\n",
         tagged("<invoke name=\"{{ f.name }}\">\n", "", "<parameter name=\"{{ k }}\">{{ v }}</parameter>\n") +
             "</invoke>\n",
         "", "</x:calls>"},
        {"<calls>",
         tagged("<do name=\"{{ f.name }}\">", "\n",
                "<p name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">{{ v }}</p>") +
             "</do>",
         "", "</calls>"},
        {"",
         tagged("<|tc|>do:{{ f.name }}{{ '{' }}", ",",
                "{{ k }}:{% if v is string %}<|q|>{{ v }}<|q|>{% else %}{{ v }}{% endif %}") +
             "}<tc|>",
         "", ""},
        {"", tagged("<t>{{ f.name }}", "", "\n<{{ k }}>{{ v }}</{{ k }}>") + "\n</t>", "\n", ""},
        {"<|tc|>[",
         tagged("{{ f.name }}(", ", ", "{{ k }}={% if v is string %}\"{{ v }}\"{% else %}{{ v }}{% endif %}") + ")",
         ", ", "]<|/tc|>"},
        {"",
         tagged("<py>{{ f.name }}(", ", ", "{{ k }}={% if v is string %}\"{{ v }}\"{% else %}{{ v }}{% endif %}") +
             ")</py>",
         "\n", ""},
    };
    for (const auto& [open, call, separator, close] : forms) {
        const auto t = ChatTemplate::parse(with_call(open, call, separator, close), "of a test");
        REQUIRE(t);
        const CallForm form = call_form(*t);
        INFO(open << call << close << "\n" << name_of(form.kind) << " " << example_of(form));
        CHECK(form.kind == ToolForm::marked);
        check_template(*t, form);
    }
}

TEST_CASE("a value may stand in marks that the template writes around some values", "[tools]") {
    const auto t = ChatTemplate::parse(
        with_call(
            "",
            "<f n=\"{{ f.name }}\">{% for k, v in f.arguments.items() %}<p n=\"{{ k }}\">"
            "{% if v is string and '<' in v %}<![CDATA[{{ v }}]]>{% else %}{{ v }}{% endif %}</p>{% endfor %}</f>",
            "\n", ""),
        "of a test");
    REQUIRE(t);
    const CallForm form = call_form(*t);
    REQUIRE(form.kind == ToolForm::marked);
    CHECK(form.marks->wrap == CallMarks::Value{"<![CDATA[", "]]>"});
    check_template(*t, form);
    const auto call = [](const std::string& value) {
        return "<f n=\"find\"><p n=\"what\">" + value + "</p><p n=\"many\">2</p></f>";
    };
    for (const auto& [written, value] : std::vector<std::pair<std::string, std::string>>{
             {"<![CDATA[a <\n& b]]>", "a <\n& b"},
             {"<![CDATA[</p>]]]>", "</p>]"},
             {"<![CDATA[]]>", ""},
             {"a < b]]>", "a < b]]>"},
             {"<![CDAT", "<![CDAT"},
         })
        for (const std::size_t step : {std::size_t(1), std::size_t(5), std::size_t(1000)}) {
            const Read parts = read(form, call(written), step, false);
            INFO(written << " " << step);
            CHECK(parts.content == "");
            REQUIRE(parts.calls.size() == 1);
            CHECK(Json::parse(parts.calls[0].arguments) == Json{{"what", value}, {"many", 2}});
        }
    CHECK(accepts(form, call("<![CDATA[a <\n& b]]>"), true));
    CHECK(accepts(form, call("a < b"), true));
    CHECK_FALSE(accepts(form, call("<![CDATA[a < b"), true)); // it would be read as one that is not closed
}

TEST_CASE("a header that says whom an answer is for is none of it", "[tools]") {
    const auto t = ChatTemplate::parse(
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|start|>{{ m.role }}"
        "{% if m.tool_calls %}{% for c in m.tool_calls %} to={{ c.function.name }}<|message|><calls>"
        "<do name=\"{{ c.function.name }}\">{% for k, v in c.function.arguments.items() %}<p n=\"{{ k }}\">{{ v }}</p>"
        "{% endfor %}</do></calls>{% endfor %}{% else %}{% if m.role == 'assistant' %} to=user{% endif %}<|message|>"
        "{{ m.content }}{% endif %}<|eot|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        "of a test");
    REQUIRE(t);
    const CallForm form = call_form(*t);
    REQUIRE(form.element);
    CHECK(form.element->begin_mark() == "to=user<|message|>");
    for (const std::size_t step : {std::size_t(1), std::size_t(5), std::size_t(1000)}) {
        const Read call = read(form,
                               " to=find<|message|><calls><do name=\"find\"><p n=\"what\">a b</p><p n=\"many\">2</p>"
                               "</do></calls>",
                               step, false);
        CHECK(call.content == "");
        REQUIRE(call.calls.size() == 1);
        CHECK(Json::parse(call.calls[0].arguments) == arguments);
        CHECK(read(form, " to=user<|message|>to=you", step, false).content == "to=you");
        CHECK(read(form, "to=other<|message|>Hi", step, false).content == "to=other<|message|>Hi");
    }
    AnswerParser            parser({.form = form, .tools = {}}); // without tools, and at once
    std::vector<AnswerPart> all = parser.push(" to=user<|message|>");
    append(all, parser.push("to"));
    append(all, parser.push(" be"));
    CHECK(text_of(all) == "to be");
}

TEST_CASE("the calls that published templates write are read as calls", "[tools]") {
    int         n    = 0;
    const char* more = std::getenv("QUIRE_TEMPLATES"); // a folder with others
    for (const auto& folder : {quire::testing::reference("templates"), std::string(more ? more : "")}) {
        if (folder.empty()) continue;
        for (const auto& entry : std::filesystem::directory_iterator(folder)) {
            if (entry.path().extension() != ".jinja") continue;
            std::ifstream     in(entry.path());
            std::stringstream source;
            source << in.rdbuf();
            const auto t = ChatTemplate::parse(source.str(), "of a test");
            if (!t) continue;
            const CallForm form = call_form(*t);
            INFO(entry.path().filename().string() << " " << name_of(form.kind) << " " << example_of(form));
            CHECK(form.kind != ToolForm::other);
            if (form.kind == ToolForm::none || form.kind == ToolForm::harmony) continue;
            const auto text = rendered(*t, 1);
            if (!text || !text->contains("a b")) continue; // in words only
            n++;
            check_template(*t, form);
        }
    }
    CHECK(n >= 5);
}

TEST_CASE("marks of reasoning are the template's", "[tools]") {
    const auto form = [](const std::string& source) {
        const ReasoningForm f = reasoning_form(ChatTemplate::parse(source, "of a test").value());
        return f.begin + " " + f.end;
    };
    const auto message = [](const std::string& reasoning) {
        return "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}" + reasoning +
               "{% endif %}{{ m.content }}{% endfor %}";
    };
    CHECK(form(message("<think>\n{{ m.reasoning_content }}\n</think>\n")) == "<think> </think>");
    CHECK(form(message("<x:think>{{ m.reasoning_content }}</x:think>")) == "<x:think> </x:think>");
    CHECK(form(message("<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>")) ==
          "<|START_THINKING|> <|END_THINKING|>");
    CHECK(form(message("[THINK]{{ m.reasoning_content }}[/THINK]")) == "[THINK] [/THINK]");
    CHECK(form(message("<|channel>thought\n{{ m.reasoning_content }}<channel|>")) == "<|channel>thought <channel|>");
    CHECK(form("{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}<think>") ==
          "<think> </think>");
    CHECK(form(message("")) == " ");
    CHECK(form("Reason in <x:think></x:think>." + message("<x:think>{{ m.reasoning_content }}</x:think>")) ==
          "<x:think> </x:think>");
    CHECK(form("{% for m in messages %}{{ m.role }}<|m|>{% if m.reasoning_content %}{{ m.reasoning_content }}<|e|>{% "
               "endif %}{{ m.content }}{% endfor %}") == " ");

    AnswerParser parser({.form = ToolForm::none, .tools = {}, .reasoning = true, .marks = {"<x:think>", "</x:think>"}});
    std::vector<AnswerPart> all = parser.push("<x:think>Hm.</x:thi");
    append(all, parser.push("nk>Yes <think>"));
    append(all, parser.finish());
    CHECK(text_of(all, AnswerPart::Kind::reasoning) == "Hm.");
    CHECK(text_of(all) == "Yes <think>");
}

TEST_CASE("templates that want the text of arguments, or no content, get it", "[template]") {
    const auto say = [](const std::string& source, Json content) {
        ChatInput input;
        input.messages = {
            Json{{"role", "user"}, {"content", "Hi"}},
            Json{{"role", "assistant"},
                 {"content", std::move(content)},
                 {"tool_calls", Json::array({Json{{"id", "a"},
                                                  {"type", "function"},
                                                  {"function", {{"name", "find"}, {"arguments", arguments}}}}})}}};
        const auto text = ChatTemplate::parse(source, "of a test").value().render(input, {});
        return text ? text->bytes : text.error().message;
    };
    const std::string as_text = R"({"what":"a b","many":2})";
    CHECK(say("{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% "
              "endfor %}{% endfor %}",
              "") == "find" + as_text);
    CHECK(say("{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}{% endfor "
              "%}",
              "") == as_text);
    CHECK(say("{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor "
              "%}{% endfor %}",
              "") == R"({"what": "a b", "many": 2})");
    CHECK(say("{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}{{ c.function.name }}{{ "
              "c.function.arguments | tojson }}{% "
              "endfor %}{% endif %}{% endfor %}",
              "") == R"(find{"what": "a b", "many": 2})");
}
