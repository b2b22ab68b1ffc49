// The grammar of a chat's answer: in every form of calls, random texts that it allows are calls that the reader finds and the tool's
// schema accepts; and what it refuses.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators_range.hpp>
#include <random>
#include <string>

import quire.constraint.compile;
import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.text.calls.call_marks;
import quire.text.calls.call_readers;
import quire.text.calls.tool_calls;
import quire.text.calls.tool_form;

using namespace quire;

namespace {

// Between marks of a template's own.
CallForm marked(CallMarks marks) {
    marks.trigger = trigger_of(marks, "");
    return CallForm(std::move(marks));
}

const std::vector<CallForm> forms{
    ToolForm::hermes,
    ToolForm::llama3,
    ToolForm::mistral,
    ToolForm::qwen3_coder,
    ToolForm::glm,
    ToolForm::deepseek,
    ToolForm::functionary,
    ToolForm::pythonic,
    ToolForm::harmony,
    ToolForm::json,
    marked({.section_open  = "<CALLS>[",
            .call_open     = "{\"tool\": \"",
            .name_close    = "\", \"input\": ",
            .call_close    = "}",
            .separator     = ", ",
            .section_close = "]</CALLS>",
            .several       = true}),
    marked({.call_open = "<|call|>f.", .name_close = ":\x02<|with|>", .call_close = "<|called|>"}),
    marked({.name_close = "\n"}),
    marked({.arguments      = CallMarks::Arguments::tagged,
            .call_open      = "<do name=\"",
            .name_close     = "\">\n",
            .call_close     = "\n</do>",
            .parameter_open = "<p name=\"",
            .text           = {"\" string=\"true\">", "</p>"},
            .other          = {"\" string=\"false\">", "</p>"}}),
    marked({.arguments           = CallMarks::Arguments::tagged,
            .call_open           = "<|tc>do:",
            .name_close          = "{",
            .call_close          = "}<tc|>",
            .parameter_separator = ",",
            .text                = {":<|q|>", "<|q|>"},
            .other               = {":", ""}}),
    marked({.arguments     = CallMarks::Arguments::python,
            .section_open  = "<py>[",
            .name_close    = "(",
            .call_close    = ")",
            .separator     = ", ",
            .section_close = "]</py>",
            .several       = true})};

Json tools() {
    return Json::parse(R"json([
        {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {
            "what": {"type": "string", "maxLength": 6}, "many": {"type": "integer", "minimum": 1, "maximum": 99},
            "kind": {"enum": ["a", "b c", 3, null]}, "deep": {"$ref": "#/$defs/deep"},
            "maybe": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}}, "required": ["what", "many"],
            "additionalProperties": false, "$defs": {"deep": {"type": "array", "items": {"type": "integer", "maximum": 999, "minimum": -5},
            "maxItems": 2}}}}},
        {"type": "function", "function": {"name": "get.time-2", "parameters": {"type": "object", "properties": {
            "zone": {"type": "string", "pattern": "^[A-Z]{3}$"},
            "tone": {"type": "string", "anyOf": [{"enum": ["soft", "loud"]}, {"pattern": "^x[0-9]$"}], "not": {"const": "x7"}},
            "size": {"oneOf": [{"type": "string", "maxLength": 3, "pattern": "^[a-z]*$"}, {"const": "ab"}, {"type": "integer",
            "minimum": 0, "maximum": 9}]},
            "mark": {"$ref": "#/$defs/mark", "maxLength": 2}}, "required": ["zone"], "additionalProperties": false,
            "$defs": {"mark": {"type": ["string", "integer"], "if": {"type": "string"}, "then": {"pattern": "^[mn]+$"},
            "else": {"minimum": 5, "maximum": 7}}}}}},
        {"type": "function", "function": {"name": "stop"}}])json");
}

// Bytes of plain text, and the marks, some of them as control tokens.
struct TokenTexts {
    explicit TokenTexts(bool with_controls) {
        std::vector<std::string> all;
        for (int b = 0x20; b < 0x7f; b++) all.emplace_back(1, char(b));
        for (const char* more : {"\n", "é", "\xef\xbd\x9c", "\xe2\x96\x81"}) all.emplace_back(more);
        for (const std::string_view mark : answer_marks()) {
            if (with_controls) controls.emplace_back(mark);
            if (with_controls) all.push_back(control_bytes(mark));
            else all.emplace_back(mark);
        }
        all.emplace_back();
        end  = Token(all.size() - 1);
        trie = std::make_shared<const TokenTrie>(all, std::vector<Token>{end});
    }
    std::vector<std::string>         controls;
    std::shared_ptr<const TokenTrie> trie;
    Token                            end = 0;
};

const TokenTexts& vocabulary(bool with_controls) {
    static const TokenTexts plain(false), controls(true);
    return with_controls ? controls : plain;
}

ConstraintSpec spec_of(const CallForm& form, bool required, bool controls) {
    ConstraintSpec spec;
    AnswerRules&   rules = spec.answer.emplace();
    rules.form           = form;
    rules.tools          = tools();
    rules.required       = required;
    rules.controls       = vocabulary(controls).controls;
    return spec;
}

std::shared_ptr<Constraint> compiled(const ConstraintSpec& spec) {
    auto made = compile_constraint(spec);
    INFO((made ? "" : made.error().message));
    REQUIRE(made);
    return *made;
}

// As the detokenizer writes it.
std::string shown(std::string_view bytes) {
    std::string out;
    for (const char c : bytes)
        if (c != '\xff' && c != '\xfe') out += c;
    return out;
}

// A text that ends; none: it did not within so many tokens.
std::optional<std::string> walk(const std::shared_ptr<Constraint>& c, const TokenTexts& v, std::mt19937& random) {
    ConstraintState            state(c, v.trie);
    std::vector<std::uint64_t> bits(state.words());
    std::string                text;
    for (int i = 0; i < 600; i++) {
        const auto ok = state.mask(bits);
        INFO(shown(text));
        REQUIRE(ok);
        std::vector<Token> allowed, closing;
        for (Token t = 0; t <= v.end; t++) {
            if (!(bits[std::size_t(t) / 64] >> (t % 64) & 1)) continue;
            allowed.push_back(t);
            const std::string_view bytes = v.trie->bytes(t);
            if (t == v.end || bytes.size() > 3 || std::string_view("\"'}])>/<\n").contains(bytes[0]))
                closing.push_back(t);
        }
        const auto& from = i > 60 && !closing.empty() && random() % 4 != 0 ? closing : allowed;
        const Token t    = from[random() % from.size()];
        if (t == v.end) return text;
        text += v.trie->bytes(t);
        REQUIRE(state.accept(t));
    }
    return std::nullopt;
}

struct Read {
    std::string           content;
    std::vector<ToolCall> calls;
};

Read read(const CallForm& form, std::string_view text) {
    AnswerParser            parser({.form = form, .tools = tools()});
    std::vector<AnswerPart> all = parser.push(text);
    append(all, parser.finish());
    return {text_of(all), calls_of(all)};
}

bool satisfies(const std::string& arguments, const std::string& name) {
    for (const Json& tool : tools()) {
        const Json& function = tool["function"];
        if (function["name"] != name) continue;
        if (!function.contains("parameters")) return arguments == "{}";
        const auto c =
            compile_schema(function["parameters"], {.ordered = false, .plain_numbers = false, .closed = false});
        ConstraintState state(*c, vocabulary(false).trie);
        return state.accept_bytes(arguments) && state.may_end();
    }
    return false;
}

bool accepts(const ConstraintSpec& spec, std::string_view text, bool controls = false) {
    ConstraintState state(compiled(spec), vocabulary(controls).trie);
    return state.accept_bytes(text) && state.may_end();
}

} // namespace

TEST_CASE("a required call is one that the reader finds and the schema accepts", "[tools]") {
    const CallForm   form     = GENERATE(from_range(forms));
    const bool       controls = GENERATE(false, true);
    const TokenTexts v        = vocabulary(controls);
    const auto       c        = compiled(spec_of(form, true, controls));
    std::mt19937     random(7);
    int              ended = 0;
    for (int i = 0; i < 30; i++) {
        const auto text = walk(c, v, random);
        if (!text) continue;
        ended++;
        const Read parts = read(form, shown(*text));
        INFO(name_of(form.kind) << ": " << shown(*text));
        CHECK(parts.content.find_first_not_of(" \t\r\n") == std::string::npos);
        REQUIRE(!parts.calls.empty());
        // The answer in pieces, as they come.
        AnswerParser            parser({.form = form, .tools = tools(), .in_pieces = true});
        std::vector<AnswerPart> all;
        for (const char byte : shown(*text)) append(all, parser.push({&byte, 1}));
        append(all, parser.finish());
        const std::vector<ToolCall> pieces = calls_of(all);
        REQUIRE(pieces.size() == parts.calls.size());
        for (std::size_t k = 0; k < pieces.size(); k++) {
            CHECK(pieces[k].name == parts.calls[k].name);
            CHECK(Json::parse(pieces[k].arguments) == Json::parse(parts.calls[k].arguments));
        }
        for (const ToolCall& call : parts.calls) {
            INFO(call.name << call.arguments);
            CHECK(satisfies(call.arguments, call.name));
        }
    }
    CHECK(ended >= 15);
}

TEST_CASE("free text is free, and a call in it follows its schema", "[tools]") {
    const ConstraintSpec hermes = spec_of(ToolForm::hermes, false, false);
    const std::string    begin = "Let me see.\n<tool_call>\n", end = "\n</tool_call>";
    CHECK(accepts(hermes, ""));
    CHECK(accepts(hermes, "Just text {\"name\": \"none\"} <tool> \xc3\xa9"));
    CHECK(accepts(hermes, begin + R"({"name": "stop", "arguments": {}})" + end));
    CHECK(accepts(hermes, begin + R"({"name": "find", "arguments": {"what": "x", "many": 5}})" + end + " and more"));
    CHECK(accepts(hermes, begin + R"({"name": "stop", "arguments": {}})" + end + "\n<tool_call>\n" +
                              R"({"name": "get.time-2", "arguments": {"zone": "CET"}})" + end));
    CHECK_FALSE(accepts(hermes, begin + R"({"name": "other", "arguments": {}})" + end));
    CHECK_FALSE(accepts(hermes, begin + R"({"name": "find", "arguments": {"what": "x", "many": 100}})" + end));
    CHECK_FALSE(accepts(hermes, begin + R"({"name": "stop", "arguments": {}})"));
    CHECK_FALSE(accepts(hermes, begin + "What was I saying?"));

    const ConstraintSpec llama = spec_of(ToolForm::llama3, false, false);
    CHECK(accepts(llama, R"({"result": 5})")); // no tool's name: it is text
    CHECK(accepts(llama, R"({"name": "Ann", "parameters": 5})"));
    CHECK(accepts(llama, R"({"name": "stop", "parameters": {}})"));
    CHECK_FALSE(accepts(llama, R"({"name": "stop", "parameters": {"x": 1}})"));
    CHECK(accepts(llama, R"(I say {"name": "stop", "parameters": 1})")); // not at the beginning

    const ConstraintSpec python = spec_of(ToolForm::pythonic, false, false);
    CHECK(accepts(python, R"([find(what="a", many=3, maybe=None), stop()])"));
    CHECK(accepts(python, "[1, 2, 3] is a list"));
    CHECK_FALSE(accepts(python, R"([find(what="a", many=0)])"));
    CHECK_FALSE(accepts(python, R"([find(many=3, what="a")])"));
}

TEST_CASE("reasoning stands before what was asked for", "[tools]") {
    ConstraintSpec spec{.kind = ConstraintSpec::Kind::json_schema};
    spec.schema        = Json{{"type", "integer"}};
    AnswerRules& rules = spec.answer.emplace();
    CHECK(accepts(spec, "5"));
    CHECK_FALSE(accepts(spec, "<think>x</think>5"));
    rules.may_reason = true;
    CHECK(accepts(spec, "5"));
    CHECK(accepts(spec, "<think>\nx <tool_call> 6\n</think>\n\n5"));
    CHECK_FALSE(accepts(spec, "<think>x"));
    CHECK_FALSE(accepts(spec, "<think>x</think>y"));
    rules.in_reasoning = true;
    CHECK(accepts(spec, "so</think>\n\n5"));
    CHECK_FALSE(accepts(spec, "5"));
    rules.form = ToolForm::harmony; // has channels of its own
    CHECK(accepts(spec, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>5"));
    CHECK_FALSE(
        accepts(spec, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>x"));

    ConstraintSpec calls       = spec_of(ToolForm::hermes, false, false);
    calls.answer->in_reasoning = true;
    CHECK(accepts(calls, "thinking of <tool_call> only"));
    CHECK_FALSE(accepts(calls, "thinking</think><tool_call>x"));
    CHECK(accepts(calls, "thinking</think>\n\n<tool_call>\n{\"name\": \"stop\", \"arguments\": {}}\n</tool_call>"));
    calls.answer->required = true;
    CHECK_FALSE(accepts(calls, "thinking"));
    CHECK_FALSE(accepts(calls, "thinking</think>no"));
}

TEST_CASE("a string that is written without quotes is of the set that its schema allows", "[tools]") {
    ConstraintSpec spec = spec_of(ToolForm::qwen3_coder, true, false);
    const auto     call = [&](const std::string& name, const std::string& value) {
        return accepts(spec, cat("<tool_call>\n<function=get.time-2>\n<parameter=zone>\nUTC\n</parameter>\n<parameter=",
                                     name, ">\n", value, "\n</parameter>\n</function>\n</tool_call>"));
    };
    CHECK(call("tone", "loud"));
    CHECK(call("tone", "x3"));
    for (const char* wrong : {"x7", "quiet", "\"loud\"", "x33"}) CHECK(!call("tone", wrong));
    CHECK(call("size", "abc"));
    CHECK(call("size", "7"));
    for (const char* wrong : {"12", "ab", "abcd"}) CHECK(!call("size", wrong));
    CHECK(call("mark", "mn"));
    CHECK(call("mark", "6"));
    for (const char* wrong : {"mnm", "a", "8", "\"m\""}) CHECK(!call("mark", wrong));
}

TEST_CASE("a schema that is not supported", "[tools]") {
    ConstraintSpec spec       = spec_of(ToolForm::hermes, false, false);
    Json&          parameters = spec.answer->tools[0]["function"]["parameters"];
    parameters                = Json{{"type", "array"}, {"uniqueItems", true}};
    // Any object, where no exactness was asked for.
    CHECK(accepts(spec, "<tool_call>{\"name\": \"find\", \"arguments\": {\"x\": [1, 1]}}</tool_call>"));
    const auto refused = [&](ConstraintSpec s) {
        const auto made = compile_constraint(s);
        return !made && made.error().message.contains("find") && made.error().message.contains("uniqueItems");
    };
    ConstraintSpec strict                         = spec;
    strict.answer->tools[0]["function"]["strict"] = true;
    CHECK(refused(strict));
    spec.answer->required = true;
    CHECK(refused(spec));
}
