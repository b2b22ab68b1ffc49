// Calls of tools in the text of answers: every form, cut everywhere, and what is no call.
#include <catch2/catch_test_macros.hpp>

import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.text.calls.call_readers;
import quire.text.calls.tool_calls;
import quire.text.calls.tool_form;

using namespace quire;

namespace {

Json tools() {
    return Json::parse(R"([{"type":"function","function":{"name":"find","parameters":{"type":"object","properties":
        {"what":{"type":"string"},"many":{"type":"integer"}}}}},{"type":"function","function":{"name":"add"}}])");
}

struct Whole {
    std::string content, reasoning, calls;
    bool        operator==(const Whole&) const = default;
};

void add(Whole& to, const std::vector<AnswerPart>& parts) {
    to.content += text_of(parts);
    to.reasoning += text_of(parts, AnswerPart::Kind::reasoning);
    for (const ToolCall& call : calls_of(parts)) to.calls += cat(call.name, call.arguments, ';');
}

Whole parse(const AnswerFormat& format, std::string_view text, std::size_t cut, std::size_t again) {
    AnswerParser parser(format);
    Whole        out;
    add(out, parser.push(text.substr(0, cut)));
    add(out, parser.push(text.substr(cut, again - cut)));
    add(out, parser.push(text.substr(again)));
    add(out, parser.finish());
    return out;
}

void check(ToolForm form, std::string_view text, const Whole& expected, bool reasoning = false) {
    AnswerFormat format{.form = form, .tools = tools(), .reasoning = reasoning};
    INFO(name_of(form) << ": " << text);
    const Whole whole = parse(format, text, text.size(), text.size());
    CHECK(whole.content == expected.content);
    CHECK(whole.reasoning == expected.reasoning);
    CHECK(whole.calls == expected.calls);
    for (std::size_t cut = 0; cut <= text.size(); cut++)
        for (std::size_t again = cut; again <= text.size(); again += 7)
            if (parse(format, text, cut, again) != whole) FAIL_CHECK("differs when cut at " << cut << ", " << again);
    AnswerParser parser(format); // byte by byte
    Whole        bytes;
    for (char c : text) add(bytes, parser.push(std::string_view(&c, 1)));
    add(bytes, parser.finish());
    CHECK(bytes == whole);
}

const std::string one = R"(find{"what":"é}\"","many":2};)";

} // namespace

TEST_CASE("calls in each form, cut anywhere", "[tools]") {
    const std::string args = R"({"what": "é}\"", "many": 2})";
    check(ToolForm::hermes, "Sure é.\n<tool_call>\n{\"name\": \"find\", \"arguments\": " + args + "}\n</tool_call>",
          {"Sure é.\n", "", one});
    check(ToolForm::hermes,
          "<tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>\n<tool_call>\n{\"name\": \"find\", "
          "\"arguments\": " +
              args + "}\n</tool_call>\nDone",
          {"Done", "", "add{};" + one});
    check(ToolForm::hermes, "<tool_call>{\"name\": \"add\", \"arguments\": {}}", {"", "", "add{};"}); // ended there
    check(ToolForm::llama3, "{\"name\": \"find\", \"parameters\": " + args + "}", {"", "", one});
    check(ToolForm::llama3,
          "<|python_tag|>{\"name\": \"add\", \"parameters\": {}}; {\"name\": \"find\", \"parameters\": " + args + "}",
          {"", "", "add{};" + one});
    check(ToolForm::json, "{\"name\": \"find\", \"arguments\": " + args + "}", {"", "", one});
    check(ToolForm::mistral,
          "x [TOOL_CALLS] [{\"name\": \"find\", \"arguments\": " + args + ", \"id\": \"123456789\"}]", {"x ", "", one});
    check(ToolForm::mistral, "[TOOL_CALLS]find[ARGS]" + args + "[TOOL_CALLS]add[CALL_ID]a12345678[ARGS]{}",
          {"", "", one + "add{};"});
    check(ToolForm::qwen3_coder,
          "<tool_call>\n<function=find>\n<parameter=what>\né}\"\n</parameter>\n<parameter=many>\n2\n</parameter>\n"
          "</function>\n</tool_call>",
          {"", "", one});
    check(ToolForm::glm,
          "<tool_call>find\n<arg_key>what</arg_key>\n<arg_value>é}\"</arg_value>\n<arg_key>many</arg_key>\n"
          "<arg_value>2</arg_value>\n</tool_call>",
          {"", "", one});
    check(
        ToolForm::deepseek,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n" + args +
            "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        {"", "", one + "add{};"});
    check(ToolForm::functionary, "<function=find>" + args + "</function>", {"", "", one});
    check(ToolForm::pythonic, "[find(what='é}\"', many=2), add()]", {"", "", one + "add{};"});
    check(ToolForm::pythonic, "[add(a=[1, {'b': None}], c=True, d=-1.5)]",
          {"", "", R"(add{"a":[1,{"b":null}],"c":true,"d":-1.5};)"});
    check(ToolForm::harmony,
          "<|channel|>analysis<|message|>Hm é<|end|><|start|>assistant<|channel|>commentary to=functions.find "
          "<|constrain|>json<|message|>" +
              args + "<|call|>",
          {"", "Hm é", one});
    check(ToolForm::harmony, "<|channel|>final<|message|>Hi <b><|return|>", {"Hi <b>", "", ""});
}

TEST_CASE("what is no call is content, and nothing is lost", "[tools]") {
    for (const auto& [form, text] : std::vector<std::pair<ToolForm, std::string>>{
             {ToolForm::hermes, "a < b <tool <tool_call"},
             {ToolForm::hermes, "<tool_call>{\"name\": \"find\", \"arguments\": {}"},
             {ToolForm::hermes, "<tool_call>{\"name\": \"other\", \"arguments\": {}}</tool_call> é"},
             {ToolForm::hermes, "<tool_call>{\"name\": \"find\", \"arguments\": 5}</tool_call>"},
             {ToolForm::hermes, "<tool_call>{name: find}</tool_call>"},
             {ToolForm::hermes, "<tool_call></tool_call>"},
             {ToolForm::llama3, "{\"name\": \"find\"} and more"},
             {ToolForm::llama3, "It is {\"name\": \"add\", \"parameters\": {}}"},
             {ToolForm::mistral, "[TOOL_CALLS] []"},
             {ToolForm::mistral, "[TOOL_CALLS]find[ARGS]{\"a\": }"},
             {ToolForm::qwen3_coder, "<function=find><parameter=what>x</function>"},
             {ToolForm::deepseek, "<｜tool▁calls▁begin｜>find"},
             {ToolForm::functionary, "<function=find>{</function>"},
             {ToolForm::pythonic, "[1, 2, 3] is a list"},
             {ToolForm::pythonic, "[find(what=" + std::string(200, '[') + ")]"},
             {ToolForm::none, "<tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>"},
         })
        check(form, text, {text, "", ""});
}

TEST_CASE("a wrong call does not hide the next one", "[tools]") {
    check(ToolForm::hermes, "<tool_call>{}</tool_call><tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>",
          {"<tool_call>{}</tool_call>", "", "add{};"});
}

TEST_CASE("reasoning is split off", "[tools]") {
    check(ToolForm::none, "\n<think>\nHm é.\n</think>\n\nYes <think> é", {"Yes <think> é", "Hm é.", ""}, true);
    check(ToolForm::none, "No <think>a</think>", {"No <think>a</think>", "", ""}, true);
    check(ToolForm::none, "<think>cut off", {"", "cut off", ""}, true);
    check(ToolForm::hermes, "<think>x</think>\n\n<tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>",
          {"", "x", "add{};"}, true);
    AnswerParser parser({.form = ToolForm::none, .tools = {}, .reasoning = true, .in_reasoning = true});
    Whole        out;
    add(out, parser.push("so</thi"));
    add(out, parser.push("nk>it is"));
    add(out, parser.finish());
    CHECK(out == Whole{"it is", "so", ""});
}

TEST_CASE("without parallel calls the first one is the last", "[tools]") {
    AnswerParser parser({.form = ToolForm::pythonic, .tools = tools(), .one_call = true});
    Whole        out;
    add(out, parser.push("[add(), find()] and"));
    add(out, parser.finish());
    CHECK(out == Whole{"", "", "add{};"});
}

TEST_CASE("a constrained answer that ends within a call says so, and shows none of its mark", "[tools]") {
    for (const auto& [text, calls, cut] : std::vector<std::tuple<std::string, std::string, bool>>{
             {"<tool_call>", "", true},
             {"<tool_call>\n{\"name\": \"fi", "", true},
             {"<tool_call>\n{\"name\": \"find\", \"arguments\": {\"what\": \"a", "find{\"what\":\"a;", true},
             {"<tool_call>\n{\"name\": \"add\", \"arguments\": {}}\n</tool_", "add{};", false}}) {
        INFO(text);
        AnswerParser            parser({.form = ToolForm::hermes, .tools = tools(), .in_pieces = true});
        std::vector<AnswerPart> all = parser.push("Well. " + text);
        append(all, parser.finish());
        std::string said;
        for (const ToolCall& call : calls_of(all)) said += cat(call.name, call.arguments, ';');
        CHECK(text_of(all) == "Well. ");
        CHECK(said == calls);
        CHECK(parser.cut() == cut);
    }
}
