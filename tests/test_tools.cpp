// Calls of tools in the text of answers: every form, cut everywhere, and what is no call.
#include <catch2/catch_test_macros.hpp>

import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.text.calls.call_marks;
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

void check(const CallForm& form, std::string_view text, const Whole& expected, bool reasoning = false) {
    AnswerFormat format{.form = form, .tools = tools(), .reasoning = reasoning};
    INFO(name_of(form.kind) << ": " << text);
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
          {"Sure é.", "", one});
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
          "x [TOOL_CALLS] [{\"name\": \"find\", \"arguments\": " + args + ", \"id\": \"123456789\"}]", {"x", "", one});
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
    for (const std::string space : {"", "\n"}) // behind arguments; a model may end a call as it ends a message
        check(ToolForm::harmony,
              " to=functions.find<|channel|>commentary <|constrain|> json<|message|>" + args + space +
                  "<|end|><|start|>assistant to=functions.add<|channel|>commentary <|constrain|> json<|message|>{}"
                  "<|call|>",
              {"", "", one + "add{};"});
    check(ToolForm::harmony, "<|channel|>final<|message|>Hi <b><|return|>", {"Hi <b>", "", ""});
}

TEST_CASE("what is no call is content, and nothing is lost", "[tools]") {
    for (const auto& [form, text] : std::vector<std::pair<ToolForm, std::string>>{
             {ToolForm::hermes, "a < b <tool <tool_call"},
             {ToolForm::hermes, "<tool_call>{\"name\": \"other\", \"arguments\": {}}</tool_call> é"},
             {ToolForm::hermes, "<tool_call>{\"name\": \"find\", \"arguments\": 5}</tool_call>"},
             {ToolForm::hermes, "<tool_call>{name: find}</tool_call>"},
             {ToolForm::hermes, "<tool_call></tool_call>"},
             {ToolForm::llama3, "{\"name\": \"find\"} and more"},
             {ToolForm::llama3, "It is {\"name\": \"add\", \"parameters\": {}}"},
             {ToolForm::mistral, "[TOOL_CALLS] []"},
             {ToolForm::mistral, "[TOOL_CALLS]find[ARGS]{\"a\": }"},
             {ToolForm::deepseek, "<｜tool▁calls▁begin｜>find"},
             {ToolForm::pythonic, "[1, 2, 3] is a list"},
             {ToolForm::pythonic, "[find(what=" + std::string(200, '[') + ")]"},
             {ToolForm::none, "<tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>"},
         })
        check(form, text, {text, "", ""});
}

TEST_CASE("a call that the end cuts off is neither a call nor text", "[tools]") {
    const std::string call = R"(<tool_call>{"name": "add", "arguments": {}}</tool_call>)";
    check(ToolForm::hermes, "Well: <tool_call>{\"name\": \"find\", \"arguments\": {}", {"Well:", "", ""});
    check(ToolForm::hermes, call + "\n<tool_call>{\"name\": \"fi", {"", "", "add{};"});
    check(ToolForm::hermes, "<tool_call>", {"", "", ""});
    check(ToolForm::qwen3_coder, "<function=find><parameter=what>x</function>", {"", "", ""});
    check(ToolForm::deepseek,
          "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>"
          "find<｜tool▁sep｜>{\"wh",
          {"", "", "add{};"});
    check(ToolForm::functionary, "<function=find>{</function>", {"", "", ""});
    check(ToolForm::harmony, "<|channel|>commentary to=functions.find <|constrain|>json", {"", "", ""});
}

TEST_CASE("marks in the text of arguments are text", "[tools]") {
    check(ToolForm::hermes, R"(<tool_call>{"name": "find", "arguments": {"what": "</tool_call>"}}</tool_call>)",
          {"", "", R"(find{"what":"</tool_call>"};)"});
    check(
        ToolForm::qwen3_coder,
        "<tool_call>\n<function=find>\n<parameter=what>\n</parameter> and </function>, <parameter=many>\n</parameter>\n"
        "</function>\n</tool_call>",
        {"", "", R"(find{"what":"</parameter> and </function>, <parameter=many>"};)"});
    check(ToolForm::qwen3_coder,
          "<tool_call>\n<function=find>\n<parameter=what>\na\n</function>\n</tool_call>\nb\n</parameter>\n</function>\n"
          "</tool_call>",
          {"", "", R"(find{"what":"a\n</function>\n</tool_call>\nb"};)"});
    check(ToolForm::qwen3_coder,
          "<tool_call>\n<function=find>\n<parameter=what>\na\n</function>\n</tool_call>\nb\n</function>\n</tool_call>",
          {"", "", R"(find{"what":"a\n</function>\n</tool_call>\nb"};)"});
    // Another parameter within the text, which follows again: no call has one twice.
    for (const char* text : {"<parameter=many> a", "a\n<parameter=many>\n3", "<parameter=many>\n3\n</parameter>"}) {
        std::string quoted = text;
        for (std::size_t at = 0; (at = quoted.find('\n', at)) != std::string::npos; at += 2)
            quoted.replace(at, 1, "\\n");
        check(ToolForm::qwen3_coder,
              std::string("<tool_call>\n<function=find>\n<parameter=what>\n") + text +
                  "\n</parameter>\n<parameter=many>\n2\n</parameter>\n</function>\n</tool_call>",
              {"", "", "find{\"what\":\"" + quoted + "\",\"many\":2};"});
    }
    check(ToolForm::glm,
          "<tool_call>find\n<arg_key>what</arg_key>\n<arg_value></arg_value> </tool_call ></arg_value>\n</tool_call>",
          {"", "", R"(find{"what":"</arg_value> </tool_call >"};)"});
    const std::string open  = "<tool_call>find\n<arg_key>what</arg_key>\n<arg_value>",
                      close = "</arg_value>\n</tool_call>";
    const std::string next = "<tool_call>add\n</tool_call>", marks = "</arg_value></tool_call>";
    check(ToolForm::glm, open + "a" + marks + " b" + close, {"", "", R"(find{"what":"a</arg_value></tool_call> b"};)"});
    check(ToolForm::glm,
          open + "a" + marks + "</arg_value>\n<arg_key>many</arg_key>\n<arg_value>2" + close + "\n" + next,
          {"", "", R"(find{"what":"a</arg_value></tool_call>","many":2};add{};)"});
    check(ToolForm::glm, open + "a" + marks + "<tool_call>" + close + next,
          {"", "", R"(find{"what":"a</arg_value></tool_call><tool_call>"};add{};)"});
    check(ToolForm::glm, open + "</arg_value><arg_key>" + close, {"", "", R"(find{"what":"</arg_value><arg_key>"};)"});
    check(ToolForm::glm, open + "a" + close + "\nSo </arg_value>, then " + next,
          {"So </arg_value>, then", "", R"(find{"what":"a"};add{};)"});
}

TEST_CASE("answers of marks in any order are read alike, however they are cut", "[tools]") {
    const std::vector<std::string> coder{"<tool_call>\n<function=find>\n<parameter=what>\n",
                                         "\n</parameter>\n",
                                         "<parameter=many>\n",
                                         "\n</function>\n</tool_call>",
                                         "<function=add>\n</function>",
                                         "</tool_call>",
                                         "<function=",
                                         "a"};
    const std::vector<std::string> glm{"<tool_call>find<arg_key>what</arg_key><arg_value>",
                                       "</arg_value>",
                                       "</tool_call>",
                                       "<tool_call>add</tool_call>",
                                       "<arg_key>many</arg_key>\n<arg_value>",
                                       "2",
                                       "<",
                                       "<tool_call>a"};
    const CallForm                 marked(CallMarks{.arguments      = CallMarks::Arguments::tagged,
                                                    .call_open      = "<tool_call>",
                                                    .call_close     = "</tool_call>",
                                                    .several        = true,
                                                    .parameter_open = "<arg_key>",
                                                    .text           = {"</arg_key><arg_value>", "</arg_value>"},
                                                    .other          = {"</arg_key><arg_value>", "</arg_value>"},
                                                    .trigger        = "<tool_call>"});
    std::mt19937_64                random(7);
    for (const auto& [form, pieces] : std::vector<std::pair<CallForm, std::vector<std::string>>>{
             {ToolForm::qwen3_coder, coder}, {ToolForm::glm, glm}, {marked, glm}})
        for (int i = 0; i < 2000; i++) {
            std::string text = pieces[0];
            for (auto n = random() % 12; n > 0; n--) text += pieces[random() % pieces.size()];
            const AnswerFormat format{.form = form, .tools = tools()};
            const Whole        whole = parse(format, text, text.size(), text.size());
            AnswerParser       parser(format); // byte by byte
            Whole              bytes;
            for (char c : text) add(bytes, parser.push(std::string_view(&c, 1)));
            add(bytes, parser.finish());
            INFO(name_of(form.kind) << ": " << text);
            REQUIRE(bytes == whole);
        }
}

TEST_CASE("calls with a mark left out, and values as Python writes them", "[tools]") {
    check(ToolForm::qwen3_coder, "<function=add>\n</function>\n</tool_call>", {"", "", "add{};"});
    check(ToolForm::qwen3_coder,
          "<tool_call>\n<function=find>\n<parameter=what>\nx\n<parameter=many>\n2\n</function>\n</tool_call>",
          {"", "", R"(find{"what":"x","many":2};)"});
    check(ToolForm::qwen3_coder,
          "<tool_call>\n<function=find>\n<parameter=what>\nx\n</function>\n</tool_call>\n<tool_call>\n<function=find>\n"
          "<parameter=what>\ny\n</parameter>\n</function>\n</tool_call>",
          {"", "", R"(find{"what":"x"};find{"what":"y"};)"});
    check(ToolForm::glm, "<tool_call>find<arg_key>what</arg_key><arg_value>x</tool_call>",
          {"", "", R"(find{"what":"x"};)"});
    check(ToolForm::glm,
          "<tool_call>find<arg_key>what</arg_key><arg_value>x</tool_call>\n<tool_call>find<arg_key>what</arg_key>"
          "<arg_value>y</arg_value></tool_call>",
          {"", "", R"(find{"what":"x"};find{"what":"y"};)"});
    const CallForm section(CallMarks{.arguments      = CallMarks::Arguments::tagged,
                                     .section_open   = "<calls>\n",
                                     .call_open      = "<invoke name=\"",
                                     .name_close     = "\">\n",
                                     .call_close     = "</invoke>\n",
                                     .section_close  = "</calls>",
                                     .several        = true,
                                     .parameter_open = "<parameter name=\"",
                                     .text           = {"\">", "</parameter>\n"},
                                     .other          = {"\">", "</parameter>\n"},
                                     .trigger        = "<calls>"});
    check(
        section,
        "<calls>\n<invoke name=\"find\">\n<parameter name=\"what\">a</parameter>\n</invoke>\nb</parameter>\n</invoke>\n"
        "<invoke name=\"find\">\n<parameter name=\"many\">2</parameter>\n</invoke>\n</calls>",
        {"", "", R"(find{"what":"a</parameter>\n</invoke>\nb"};find{"many":2};)"});
    check(section, "<calls>\n<invoke name=\"find\">\n<parameter name=\"what\">a</invoke>\n</calls>",
          {"", "", R"(find{"what":"a"};)"});
    check(ToolForm::harmony,
          " to=functions.find<|channel|>commentary <|constrain|>json<|message|>{\"what\": \"x\"}<|call|>",
          {"", "", R"(find{"what":"x"};)"});
    check(ToolForm::harmony, "to be<|channel|>final<|message|>, or", {"to be, or", "", ""});
}

TEST_CASE("objects in the values of marked calls, and an element around the text", "[tools]") {
    const CallForm objects(CallMarks{.arguments           = CallMarks::Arguments::tagged,
                                     .call_open           = "<|t>call:",
                                     .name_close          = "{",
                                     .call_close          = "}<t|>",
                                     .several             = true,
                                     .parameter_separator = ",",
                                     .text                = {":<|q|>", "<|q|>"},
                                     .other               = {":", ""},
                                     .trigger             = "<|t>"});
    check(objects, "a<|t>call:add{x y:{k 1:[1, <|q|>}<t|>,<|q|>],n:null},z:<|q|>e<|q|>}<t|>b",
          {"ab", "", R"(add{"x y":{"k 1":[1,"}<t|>,"],"n":null},"z":"e"};)"});
    CallForm element(CallMarks{.arguments      = CallMarks::Arguments::tagged,
                               .section_open   = "<|o|>tools<|s|>",
                               .call_open      = "<|o|>call tool=\"",
                               .name_close     = "\"<|s|>",
                               .call_close     = "<|c|>call<|s|>",
                               .section_close  = "<|c|>tools<|s|>",
                               .several        = true,
                               .parameter_open = "<|o|>arg key=\"",
                               .text           = {"\" type=\"string\"<|s|>", "<|c|>arg<|s|>"},
                               .other          = {"\" type=\"number\"<|s|>", "<|c|>arg<|s|>"},
                               .trigger        = "<|o|>tools<|s|>"});
    element.element = ElementMarks{"<|o|>", "<|c|>", "response", "<|s|>"};
    check(element, "<|o|>response<|s|>Hi<|c|>response<|s|><|c|>message<|s|>", {"Hi", "", ""});
    check(element,
          "<|o|>response<|s|>Hi<|c|>response<|s|><|o|>tools<|s|><|o|>call tool=\"find\"<|s|><|o|>arg key=\"what\" "
          "type=\"string\"<|s|><|c|>arg<|s|>!<|c|>arg<|s|><|c|>call<|s|><|o|>call tool=\"add\"<|s|><|o|>arg key=\"a\" "
          "type=\"array\"<|s|>[1]<|c|>arg<|s|><|c|>call<|s|><|c|>tools<|s|><|c|>message<|s|>",
          {"Hi", "", R"(find{"what":"<|c|>arg<|s|>!"};add{"a":[1]};)"});
}

TEST_CASE("reading a long value costs a multiple of its length, not the square", "[tools]") {
    for (const auto& [form, begin, end] :
         {std::tuple(ToolForm::glm, "<tool_call>find<arg_key>what</arg_key><arg_value>", "</arg_value></tool_call>"),
          std::tuple(ToolForm::hermes, "<tool_call>{\"name\":\"find\",\"arguments\":{\"what\":\"", "\"}}</tool_call>"),
          std::tuple(ToolForm::qwen3_coder, "<tool_call>\n<function=find>\n<parameter=what>\n",
                     "\n</parameter>\n</function>\n</tool_call>")}) {
        AnswerParser parser({.form = form, .tools = tools()});
        std::string  text;
        Whole        out;
        add(out, parser.push(begin));
        for (int i = 0; i < 10'000; i++) { // each piece could be the end of a call
            const std::string_view piece = i % 2 ? "<a>" : "</b>";
            text += piece;
            add(out, parser.push(piece));
        }
        add(out, parser.push(end));
        CHECK(parser.n_read() < 80 * text.size());
        add(out, parser.finish());
        CHECK(out.calls == cat(R"(find{"what":")", text, "\"};"));
        CHECK(out.content.empty());
    }
}

TEST_CASE("a wrong call does not hide the next one", "[tools]") {
    check(ToolForm::hermes, "<tool_call>{}</tool_call><tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>",
          {"<tool_call>{}</tool_call>", "", "add{};"});
}

TEST_CASE("reasoning is split off", "[tools]") {
    check(ToolForm::none, "\n<think>\nHm é.\n</think>\n\nYes <think> é", {"Yes <think> é", "Hm é.", ""}, true);
    check(ToolForm::none, "No <think>a</think>", {"No <think>a</think>", "", ""}, true);
    check(ToolForm::none, "<think>cut off", {"", "cut off", ""}, true);
    check(ToolForm::none, "\n</think>\n\nYes </think>", {"Yes </think>", "", ""}, true); // says that it has none
    check(ToolForm::none, "</thin air", {"</thin air", "", ""}, true);
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
        CHECK(text_of(all) == "Well.");
        CHECK(said == calls);
        CHECK(parser.cut() == cut);
    }
}
