// quire.constraint.formats.answer_grammar: the rules of a chat's answer: reasoning, then text, or calls of tools in the form in which the model writes
// them. Owns nothing.
//
// The arguments of a call follow the tool's schema from the mark on with which a call begins; before it any text goes. A control token
// stands in these texts as control_bytes() of its name, which no other text contains.
export module quire.constraint.formats.answer_grammar;

import quire.constraint.formats.json_scalars;
import quire.constraint.formats.json_schema;
import quire.constraint.formats.string_set;
import quire.constraint.grammar.grammar;
import quire.constraint.grammar.token_trie;
import quire.constraint.regex.parser;
import quire.constraint.regex.regex;
import quire.constraint.work;
import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.text.calls.call_marks;
import quire.text.calls.reasoning_form;
import quire.text.calls.tool_form;
import quire.text.calls.tool_parameter;

export namespace quire {

struct AnswerRules {
    CallForm      form;
    Json          tools        = Json::array(); // as OpenAI's field has them; none: the answer calls none
    bool          required     = false;         // the answer is a call
    bool          parallel     = true;          // more than one call
    bool          may_reason   = false;         // it may begin with the first mark of reasoning
    bool          in_reasoning = false;         // the prompt ends with that
    ReasoningForm reasoning{std::string(think_begin), std::string(think_end)};
    // `controls`: the marks, of answer_marks() and of calls and reasoning, that are control tokens of the vocabulary; `ends`: the control
    // tokens that end an answer.
    std::vector<std::string> controls, ends;
};

// The marks of calls and reasoning.
std::span<const std::string_view> answer_marks();

// `text`: an answer that is no call; none: any text. Error: a schema that is not supported, if the call is required or the tool is
// `strict`; in other cases arguments without a supported schema may be any object.
Result<GrammarSymbol> add_answer(Grammar& grammar, const AnswerRules& rules, std::optional<GrammarSymbol> text);

} // namespace quire

module :private;

namespace quire {

constexpr std::array<std::string_view, 24> all_marks{"<think>",
                                                     "</think>",
                                                     "<tool_call>",
                                                     "</tool_call>",
                                                     "[TOOL_CALLS]",
                                                     "[CALL_ID]",
                                                     "[ARGS]",
                                                     "<|python_tag|>",
                                                     "<arg_key>",
                                                     "</arg_key>",
                                                     "<arg_value>",
                                                     "</arg_value>",
                                                     "<｜tool▁calls▁begin｜>",
                                                     "<｜tool▁calls▁end｜>",
                                                     "<｜tool▁call▁begin｜>",
                                                     "<｜tool▁call▁end｜>",
                                                     "<｜tool▁sep｜>",
                                                     "<|channel|>",
                                                     "<|message|>",
                                                     "<|constrain|>",
                                                     "<|start|>",
                                                     "<|end|>",
                                                     "<|call|>",
                                                     "<|return|>"};

std::span<const std::string_view> answer_marks() { return all_marks; }

class AnswerBuilder {
public:
    AnswerBuilder(Grammar& g, const AnswerRules& rules) : g_(g), pool_(g.pool), rules_(rules) {}

    Result<GrammarSymbol> answer(std::optional<GrammarSymbol> text) {
        GrammarSymbol body;
        if (rules_.tools.empty()) {
            body = behind_final(text ? *text : any_text());
        } else {
            if (auto ok = read_tools(); !ok) return std::unexpected(ok.error());
            const Result<void> made = calls();
            if (!made) return std::unexpected(made.error());
            if (rules_.required) body = only_calls();
            else if (text) body = g_.add_rules({{behind_final(*text)}, {only_calls()}});
            else body = text_and_calls();
        }
        return behind_reasoning(body, !rules_.required && !text);
    }

private:
    using Rule  = std::vector<GrammarSymbol>;
    using Rules = std::vector<Rule>;

    struct Tool {
        std::string   name;
        const Json*   function = nullptr;
        bool          exact    = false; // its schema has to be supported
        GrammarSymbol arguments;        // as JSON; in the forms that have them so
    };
    // A mark, and the rest of the text that begins with it.
    struct Opening {
        std::string   mark;
        GrammarSymbol rest;
    };

    // -- parts

    // Control tokens and ends in a text as they stand in answers: ends are no bytes of it.
    std::string spelled(std::string_view text) const {
        std::string out;
        while (!text.empty()) {
            std::string_view longest;
            bool             is_end = false;
            for (const auto* list : {&rules_.controls, &rules_.ends})
                for (const std::string& mark : *list)
                    if (text.starts_with(mark) && mark.size() > longest.size())
                        longest = mark, is_end = list == &rules_.ends;
            if (!longest.empty() && !is_end) out += control_bytes(longest);
            if (longest.empty()) out += text[0];
            text.remove_prefix(std::max<std::size_t>(longest.size(), 1));
        }
        return out;
    }
    RegexId literal(std::string_view text) { return pool_.literal(spelled(text)); }
    RegexId pattern(std::string_view text) {
        const Result<RegexId> made = parse_regex(pool_, text, TextSpelling::utf8, true);
        check(made.has_value(), "a pattern of quire's own");
        return *made;
    }
    RegexId join(std::initializer_list<RegexId> parts) {
        RegexId all = RegexPool::blank;
        for (const RegexId part : parts) all = pool_.concat(all, part);
        return all;
    }
    GrammarSymbol symbol(RegexId regex) { return g_.optional(regex); }
    RegexId       white() { return pattern("[ \\t\\r\\n]{0,4}"); }
    RegexId       any() { return pool_.repeat(pool_.bytes(ByteSet::range(0, 255)), 0, RegexPool::endless); }
    RegexId       some() { return pool_.repeat(pool_.bytes(ByteSet::range(0, 255)), 1, RegexPool::endless); }
    GrammarSymbol any_text() { return symbol(any()); }
    // Texts in which none of these stands.
    RegexId without(const std::vector<RegexId>& marks) {
        return marks.empty() ? any() : pool_.negate(join({any(), pool_.any_of(marks), any()}));
    }
    // Texts up to the first of these marks, which is `mark`.
    RegexId up_to(RegexId mark, const std::vector<RegexId>& marks) {
        return pool_.minus(join({any(), mark}), join({any(), pool_.any_of(marks), some()}));
    }
    RegexId up_to(std::string_view mark) { return up_to(literal(mark), {literal(mark)}); }

    // -- arguments

    Result<void> read_tools() {
        for (const Json& t : rules_.tools) {
            const Json& function = t["function"];
            const auto  strict   = function.find("strict");
            Tool&       tool     = tools_.emplace_back();
            tool.name            = function["name"].get<std::string>();
            tool.function        = &function;
            tool.exact           = rules_.required || (strict != function.end() && *strict == true);
        }
        return {};
    }
    Error in_tool(const Tool& tool, const Error& error) const {
        return {error.kind, cat("the parameters of the tool ", quote(tool.name), ": ", error.message)};
    }
    static Json parameters_of(const Tool& tool) {
        const auto at = tool.function->find("parameters");
        if (at == tool.function->end() || at->is_null()) // as OpenAI says: a function without parameters
            return Json{{"type", "object"}, {"properties", Json::object()}, {"additionalProperties", false}};
        Json schema    = *at;
        schema["type"] = "object";
        return schema;
    }
    Result<GrammarSymbol> json_arguments(const Tool& tool) {
        const Json            schema = parameters_of(tool);
        Result<GrammarSymbol> made   = fail_with(ErrorKind::limit, "it is nested too deep");
        try {
            made = add_json_schema(g_, schema);
        } catch (const WorkEnded& e) {
            if (e.why != WorkEnded::Why::depth) throw;
        }
        // A schema that cannot be used may leave rules behind; no rule leads to them.
        if (!made && !tool.exact) return add_json_schema(g_, Json{{"type", "object"}});
        return made ? made : std::unexpected(in_tool(tool, made.error()));
    }

    // How a value is written that is not plain JSON.
    enum class Spelling : std::uint8_t {
        tagged, // strings as they stand, all else as JSON, and then a mark
        python, // True, False and None, all else as JSON
    };
    // The texts before and behind a tagged value.
    struct Surroundings {
        struct Pair {
            RegexId open = RegexPool::blank, close = RegexPool::blank;
        };
        Pair text, other; // strings, all else
    };
    struct Values {
        const Tool&  tool;
        const Json   root;
        Spelling     spelling;
        Surroundings around;
        Rules        rules{};
    };

    void add_lexeme(Values& v, RegexId value, bool is_text) {
        const Surroundings::Pair& around = is_text ? v.around.text : v.around.other;
        v.rules.push_back({symbol(v.spelling == Spelling::tagged ? join({around.open, value, around.close}) : value)});
    }
    RegexId without_close(const Values& v) { return pool_.minus(any(), join({any(), v.around.text.close, any()})); }
    void    add_any_text(Values& v) { add_lexeme(v, without_close(v), true); }
    void    add_value(Values& v, const Json& value) {
        if (v.spelling == Spelling::tagged && value.is_string())
            add_lexeme(v, pool_.literal(value.get_ref<const std::string&>()), true);
        else if (v.spelling == Spelling::python && value.is_boolean())
            add_lexeme(v, pool_.literal(value.get<bool>() ? "True" : "False"), false);
        else if (v.spelling == Spelling::python && value.is_null()) add_lexeme(v, pool_.literal("None"), false);
        else add_lexeme(v, pool_.literal(json_dump(value)), false);
    }
    Result<void> add_json(Values& v, const Json& schema) {
        Json whole = schema;
        for (const char* defs : {"$defs", "definitions"})
            if (v.root.contains(defs) && !whole.contains(defs)) whole[defs] = v.root[defs];
        const Result<GrammarSymbol> made = add_json_schema(g_, whole);
        if (!made) return std::unexpected(made.error());
        if (v.spelling != Spelling::tagged) v.rules.push_back({*made});
        else v.rules.push_back({symbol(v.around.other.open), *made, symbol(v.around.other.close)});
        return {};
    }
    // A string as it stands.
    Result<void> add_string(Values& v, const Json& schema) {
        const Result<RegexId> allowed = strings_of(pool_, v.root, schema);
        if (!allowed) return std::unexpected(allowed.error());
        add_lexeme(v, pool_.all_of({without_close(v), *allowed}), true);
        return {};
    }
    // Adds all values that the schema allows. Error: a part of the schema that is not supported.
    Result<void> add_values(Values& v, const Json& schema, int depth) {
        static const std::set<std::string, std::less<>> notes{"title",    "description", "default",      "examples",
                                                              "$comment", "deprecated",  "x-order",      "nullable",
                                                              "$defs",    "definitions", "propertyOrder"};
        pool_.enter();
        if (depth > 16) return fail("references and alternatives are nested too deep");
        if (!schema.is_object()) return schema == Json(false) ? Result<void>() : add_json_like(v, Json::object());
        std::size_t constraining = 0;
        for (auto at = schema.begin(); at != schema.end(); ++at) constraining += !notes.contains(at.key());
        if (const Json* to = referred(v.root, schema); to && constraining == 1) return add_values(v, *to, depth + 1);
        for (const char* key : {"anyOf", "oneOf", "allOf"})
            if (const auto list = schema.find(key);
                list != schema.end() && list->is_array() && !list->empty() && constraining == 1) {
                if (key == std::string_view("allOf") && list->size() > 1) break;
                if (key == std::string_view("oneOf") && v.spelling == Spelling::tagged)
                    break; // a value that two schemas allow is not allowed
                for (const Json& one : *list)
                    if (auto ok = add_values(v, one, depth + 1); !ok) return ok;
                return {};
            }
        const JsonKinds kinds = kinds_of(v.root, schema);
        const bool      alone = constraining == (schema.contains("type") ? 2u : 1u);
        if (v.spelling == Spelling::tagged && !alone) return add_json_like(v, schema);
        if (const auto list = schema.find("enum"); list != schema.end() && list->is_array()) {
            for (const Json& one : *list)
                if (kinds.has(one)) add_value(v, one);
            return {};
        }
        if (const auto one = schema.find("const"); one != schema.end()) return add_value(v, *one), Result<void>();
        return add_json_like(v, schema);
    }
    // Where only `type` says which kinds of values there are.
    Result<void> add_json_like(Values& v, const Json& schema) {
        const JsonKinds kinds = kinds_of(v.root, schema);
        const bool      mixed = schema.contains("$ref") || schema.contains("anyOf") || schema.contains("oneOf") ||
                           schema.contains("allOf") || schema.contains("not") || schema.contains("if");
        Json rest = Json::array();
        if (kinds.has(JsonKind::string)) {
            if (v.spelling == Spelling::python) rest.push_back("string");
            else if (auto ok = add_string(v, schema); !ok) return ok;
        }
        if (v.spelling == Spelling::python && !mixed) {
            if (kinds.has(JsonKind::null)) add_value(v, nullptr);
            if (kinds.has(JsonKind::boolean)) add_value(v, true), add_value(v, false);
        } else {
            if (kinds.has(JsonKind::null)) rest.push_back("null");
            if (kinds.has(JsonKind::boolean)) rest.push_back("boolean");
        }
        if (kinds.has(JsonKind::number)) rest.push_back("number");
        else if (kinds.has(JsonKind::integer)) rest.push_back("integer");
        if (kinds.has(JsonKind::array)) rest.push_back("array");
        if (kinds.has(JsonKind::object)) rest.push_back("object");
        if (rest.empty()) return {};
        Json narrowed = schema;
        if (narrowed.contains("type") || !mixed) narrowed["type"] = std::move(rest);
        else narrowed = Json{{"allOf", Json::array({schema, Json{{"type", std::move(rest)}}})}};
        return add_json(v, narrowed);
    }
    // A value of the parameter, and its closing mark.
    Result<GrammarSymbol> value(const Tool& tool, const Json& root, const Json& schema, Spelling spelling,
                                const Surroundings& around) {
        Values       v{tool, root, spelling, around};
        Result<void> made = add_values(v, schema, 0);
        if (!made && tool.exact) return std::unexpected(in_tool(tool, made.error()));
        if (!made) {
            v.rules.clear();
            if (spelling == Spelling::tagged) add_any_text(v);
            else if (auto ok = add_json(v, Json::object()); !ok) return std::unexpected(ok.error());
        }
        return g_.add_rules(std::move(v.rules));
    }
    struct Parameter {
        std::string name;
        const Json* schema;
        bool        required;
    };
    // In the order of the schema. `root` is as parameters_of() has it.
    Result<std::vector<Parameter>> parameters(const Tool& tool, const Json& root) const {
        std::vector<Parameter> out;
        const auto             properties = root.find("properties"), needed = root.find("required");
        if (properties != root.end() && properties->is_object())
            for (auto at = properties->begin(); at != properties->end(); ++at)
                out.push_back({at.key(), &at.value(),
                               needed != root.end() && needed->is_array() &&
                                   std::ranges::find(*needed, Json(at.key())) != needed->end()});
        for (const char* key : {"$ref", "anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "minProperties",
                                "maxProperties", "propertyNames", "dependentRequired", "dependentSchemas"})
            if (tool.exact && root.contains(key))
                return std::unexpected(
                    in_tool(tool, Error{ErrorKind::input, cat(key, " is not supported in this form of calls")}));
        return out;
    }

    // Parameters one behind another, with the marks of `m`: before each parameter, around strings, and around other values.
    Result<GrammarSymbol> tagged_parameters(const Tool& tool, const CallMarks& m) {
        const Json                           root = parameters_of(tool);
        const Result<std::vector<Parameter>> list = parameters(tool, root);
        if (!list) return std::unexpected(list.error());
        const RegexId between = join({white(), loose(m.parameter_separator), white()});
        // The rules from parameter i on, as the first parameter or behind another.
        GrammarSymbol first = g_.add_rules({{}}), behind = first;
        for (const Parameter& p : std::views::reverse(*list)) {
            const auto spelled_for = [&](const std::string& mark) {
                std::string out;
                for (const char c : mark) out += c == key_mark ? p.name : std::string(1, c);
                return literal(out);
            };
            const Surroundings          around{{spelled_for(m.text.open), spelled_for(m.text.close)},
                                               {spelled_for(m.other.open), spelled_for(m.other.close)}};
            const Result<GrammarSymbol> v = value(tool, root, *p.schema, Spelling::tagged, around);
            if (!v) return v;
            const auto with_this = [&](RegexId before) {
                return Rule{symbol(join({before, literal(m.parameter_open), pool_.literal(p.name)})), *v, behind};
            };
            Rules as_first{with_this(white())}, as_later{with_this(between)};
            if (!p.required) as_first.push_back({first}), as_later.push_back({behind});
            const GrammarSymbol next_first = g_.add_rules(std::move(as_first));
            behind                         = g_.add_rules(std::move(as_later));
            first                          = next_first;
        }
        return first;
    }
    // Tagged parameters whose values all stand in one way: `open` KEY `middle` VALUE `close`.
    Result<GrammarSymbol> tagged_parameters(const Tool& tool, std::string_view open, std::string_view middle,
                                            std::string_view close) {
        CallMarks m;
        m.parameter_open = open;
        m.text = m.other = {std::string(middle), std::string(close)};
        return tagged_parameters(tool, m);
    }

    // KEY=VALUE with commas between.
    Result<GrammarSymbol> python_parameters(const Tool& tool) {
        const Json                           root = parameters_of(tool);
        const Result<std::vector<Parameter>> list = parameters(tool, root);
        if (!list) return std::unexpected(list.error());
        // The rules from parameter i on, as the first parameter or behind another.
        GrammarSymbol first = g_.add_rules({{}}), behind = first;
        for (const Parameter& p : std::views::reverse(*list)) {
            const Result<GrammarSymbol> v = value(tool, root, *p.schema, Spelling::python, Surroundings());
            if (!v) return v;
            const RegexId key       = pool_.literal(cat(p.name, '='));
            const auto    with_this = [&](RegexId before) { return Rule{symbol(join({before, key})), *v, behind}; };
            Rules         as_first{with_this(RegexPool::blank)}, as_later{with_this(pattern(", ?"))};
            if (!p.required) as_first.push_back({first}), as_later.push_back({behind});
            const GrammarSymbol next_first = g_.add_rules(std::move(as_first));
            behind                         = g_.add_rules(std::move(as_later));
            first                          = next_first;
        }
        return first;
    }

    // -- forms

    // {"name": "NAME", "arguments": {…}}
    GrammarSymbol call_object(const Tool& tool, std::string_view key) {
        return g_.add_rules(
            {{symbol(join({object_head(tool, "[ \\t\\r\\n]{0,8}"), pattern(cat(", ?\"", key, "\": ?"))})),
              tool.arguments, symbol(pattern("[ \\t\\r\\n]{0,8}\\}"))}});
    }
    RegexId object_head(const Tool& tool, std::string_view space) {
        return join(
            {pattern(cat("\\{", space, "\"name\"", space, ":", space)), pool_.literal(cat('"', tool.name, '"'))});
    }
    // One or more, with a separator between them.
    GrammarSymbol list_of(GrammarSymbol one, RegexId separator) {
        if (!rules_.parallel) return one;
        const GrammarSymbol list       = g_.add_empty();
        g_.symbols[list.index()].rules = {{one}, {list, symbol(separator), one}};
        return list;
    }

    // A text of CallMarks, with the freedom that its reader allows.
    RegexId loose(std::string_view mark, std::string_view key = {}) {
        RegexId     all = RegexPool::blank;
        std::string fixed;
        const auto  add = [&](RegexId more) {
            if (!fixed.empty()) all = pool_.concat(all, literal(std::exchange(fixed, "")));
            all = pool_.concat(all, more);
        };
        for (std::size_t i = 0; i < mark.size(); i++) {
            const char c        = mark[i];
            const bool is_white = std::string_view(" \t\r\n").contains(c);
            if (is_white && i > 0 && std::string_view(" \t\r\n").contains(mark[i - 1])) continue;
            if (is_white || (loose_before(mark, i) && !std::string_view(" \t\r\n").contains(mark[i - 1])))
                add(pattern("[ \\t\\r\\n]{0,16}"));
            if (is_white) continue;
            if (c == id_mark) add(pattern("[a-zA-Z0-9_.-]{1,64}"));
            else if (c == index_mark) add(pattern("[0-9]{1,4}"));
            else if (c == key_mark) fixed += key;
            else fixed += c;
        }
        add(RegexPool::blank);
        return all;
    }
    // Calls as CallMarks says.
    Result<void> marked_calls() {
        const CallMarks&  m     = *rules_.form.marks;
        const std::string begin = cat(m.section_open, m.call_open), mark = m.trigger;
        const std::size_t at = begin.find_first_not_of(" \t\r\n");
        const std::string rest =
            at == std::string::npos ? std::string() : begin.substr(at + mark.size()); // behind the mark
        Rules each;
        for (const Tool& t : tools_) {
            GrammarSymbol arguments = t.arguments;
            if (m.arguments != CallMarks::Arguments::json) {
                const Result<GrammarSymbol> list =
                    m.arguments == CallMarks::Arguments::python ? python_parameters(t) : tagged_parameters(t, m);
                if (!list) return std::unexpected(list.error());
                arguments = *list;
            }
            each.push_back(
                {symbol(join({pool_.literal(t.name), loose(m.name_close)})), arguments, symbol(loose(m.call_close))});
            if (mark.empty()) heads_.push_back(join({loose(rest), pool_.literal(t.name), loose(m.name_close)}));
        }
        const GrammarSymbol call    = g_.add_rules(std::move(each));
        const bool          section = mark.empty() || !m.section_open.empty() || !m.section_close.empty() ||
                             m.separator.find_first_not_of(" \t\r\n") != std::string::npos;
        const GrammarSymbol list  = section && m.several ? list_of(call, loose(cat(m.separator, m.call_open))) : call;
        const GrammarSymbol whole = g_.add_rules({{symbol(loose(rest)), list, symbol(loose(m.section_close))}});
        if (mark.empty()) first_ = whole;
        else openings_.push_back({mark, whole});
        return {};
    }

    Result<void> calls() {
        switch (rules_.form.kind) {
            case ToolForm::hermes:
            case ToolForm::llama3:
            case ToolForm::json:
            case ToolForm::mistral:
            case ToolForm::deepseek:
            case ToolForm::functionary:
            case ToolForm::harmony:
            case ToolForm::marked:
                if (rules_.form.marks && rules_.form.marks->arguments != CallMarks::Arguments::json) break;
                for (Tool& tool : tools_) {
                    const Result<GrammarSymbol> made = json_arguments(tool);
                    if (!made) return std::unexpected(made.error());
                    tool.arguments = *made;
                }
                break;
            default: break;
        }
        const auto each = [&](const auto& make) {
            Rules all;
            for (const Tool& tool : tools_) all.push_back(make(tool));
            return g_.add_rules(std::move(all));
        };
        const auto lit = [&](std::string_view text) { return symbol(literal(text)); };
        switch (rules_.form.kind) {
            case ToolForm::hermes:
                openings_.push_back({"<tool_call>", each([&](const Tool& t) {
                                         return Rule{symbol(white()), call_object(t, "arguments"),
                                                     symbol(join({white(), literal("</tool_call>")}))};
                                     })});
                return {};
            case ToolForm::llama3:
            case ToolForm::json: {
                const std::string_view key = rules_.form.kind == ToolForm::llama3 ? "parameters" : "arguments";
                first_ = list_of(each([&](const Tool& t) { return Rule{call_object(t, key)}; }), pattern("; ?"));
                for (const Tool& t : tools_) heads_.push_back(object_head(t, "[ \\t\\r\\n]*"));
                tag_ = "<|python_tag|>";
                return {};
            }
            case ToolForm::mistral: {
                const GrammarSymbol object = each([&](const Tool& t) {
                    const RegexId id = join({pattern(", ?\"id\": ?\"[a-zA-Z0-9]{9}\"")});
                    return Rule{symbol(join({object_head(t, " ?"), pattern(", ?\"arguments\": ?")})), t.arguments,
                                symbol(join({pool_.repeat(id, 0, 1), pool_.literal("}")}))};
                });
                const GrammarSymbol named  = each([&](const Tool& t) {
                    return Rule{symbol(join({pool_.literal(t.name), pool_.repeat(literal("[ARGS]"), 0, 1)})),
                                t.arguments};
                });
                openings_.push_back(
                    {"[TOOL_CALLS]",
                     g_.add_rules({{symbol(pattern(" ?\\[")), list_of(object, pattern(", ?")), lit("]")}, {named}})});
                return {};
            }
            case ToolForm::deepseek: {
                const GrammarSymbol one = each([&](const Tool& t) {
                    const RegexId name = pool_.literal(t.name);
                    const RegexId old  = join({literal("function<｜tool▁sep｜>"), name, pool_.literal("\n```json\n")});
                    return Rule{g_.add_rules(
                        {{symbol(join({literal("<｜tool▁call▁begin｜>"), old})), t.arguments,
                          lit("\n```<｜tool▁call▁end｜>")},
                         {symbol(join({literal("<｜tool▁call▁begin｜>"), name, literal("<｜tool▁sep｜>")})),
                          t.arguments, lit("<｜tool▁call▁end｜>")}})};
                });
                openings_.push_back({"<｜tool▁calls▁begin｜>",
                                     g_.add_rules({{list_of(one, pattern("\\n?")), lit("<｜tool▁calls▁end｜>")}})});
                return {};
            }
            case ToolForm::functionary:
                openings_.push_back({"<function=", each([&](const Tool& t) {
                                         return Rule{symbol(pool_.literal(cat(t.name, '>'))), t.arguments,
                                                     lit("</function>")};
                                     })});
                return {};
            case ToolForm::qwen3_coder: {
                Rules bare, wrapped;
                for (const Tool& t : tools_) {
                    const Result<GrammarSymbol> all = tagged_parameters(t, "<parameter=", ">\n", "\n</parameter>");
                    if (!all) return std::unexpected(all.error());
                    const RegexId end = join({white(), literal("</function>")});
                    bare.push_back({symbol(pool_.literal(cat(t.name, '>'))), *all, symbol(end)});
                    wrapped.push_back({symbol(join({white(), pool_.literal(cat("<function=", t.name, '>'))})), *all,
                                       symbol(join({end, white(), literal("</tool_call>")}))});
                }
                openings_.push_back({"<tool_call>", g_.add_rules(std::move(wrapped))});
                openings_.push_back({"<function=", g_.add_rules(std::move(bare))});
                return {};
            }
            case ToolForm::glm: {
                Rules all;
                for (const Tool& t : tools_) {
                    const Result<GrammarSymbol> list =
                        tagged_parameters(t, "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>");
                    if (!list) return std::unexpected(list.error());
                    all.push_back({symbol(join({pattern("\\n?"), pool_.literal(t.name), pattern("\\n?")})), *list,
                                   symbol(join({white(), literal("</tool_call>")}))});
                }
                openings_.push_back({"<tool_call>", g_.add_rules(std::move(all))});
                return {};
            }
            case ToolForm::pythonic: {
                Rules all;
                for (const Tool& t : tools_) {
                    const Result<GrammarSymbol> list = python_parameters(t);
                    if (!list) return std::unexpected(list.error());
                    all.push_back({symbol(pool_.literal(cat(t.name, '('))), *list, symbol(pool_.literal(")"))});
                    heads_.push_back(join({pattern("\\[[ \\t\\r\\n]*"), pool_.literal(cat(t.name, '('))}));
                }
                first_ =
                    g_.add_rules({{symbol(pool_.literal("[")), list_of(g_.add_rules(std::move(all)), pattern(", ?")),
                                   symbol(pool_.literal("]"))}});
                return {};
            }
            case ToolForm::harmony: {
                const RegexId format =
                    join({pool_.repeat(any_of({" <|constrain|>json", "<|constrain|>json", " json"}), 0, 1),
                          literal("<|message|>")});
                const RegexId channel = pool_.repeat(literal("<|channel|>commentary"), 0, 1);
                const auto    rest    = [&](RegexId head) {
                    return each([&](const Tool& t) {
                        return Rule{symbol(join({pool_.literal(t.name), head})), t.arguments, lit("<|call|>")};
                    });
                };
                openings_.push_back({"<|channel|>commentary to=functions.", rest(format)});
                openings_.push_back({"<|start|>assistant to=functions.", rest(join({channel, format}))});
                return {};
            }
            case ToolForm::marked: return marked_calls();
            case ToolForm::none:
            case ToolForm::other: break;
        }
        return fail("the form of calls of tools is not known");
    }
    RegexId any_of(std::initializer_list<std::string_view> texts) {
        std::vector<RegexId> all;
        for (const std::string_view text : texts) all.push_back(literal(text));
        return pool_.any_of(std::move(all));
    }

    // -- the answer

    // One call or more, and nothing else.
    GrammarSymbol only_calls() {
        Rules one;
        for (const Opening& o : openings_) {
            if (o.mark.starts_with("<|start|>")) continue; // of a second message
            one.push_back({symbol(literal(o.mark)), o.rest});
        }
        const bool lists = one.empty(); // `first_` is a list of calls itself
        if (first_) {
            one.push_back({*first_});
            if (!tag_.empty()) one.push_back({symbol(literal(tag_)), *first_});
        }
        const GrammarSymbol call = g_.add_rules(std::move(one));
        if (lists || !rules_.parallel || rules_.form == ToolForm::harmony) return call;
        const GrammarSymbol all       = g_.add_empty();
        g_.symbols[all.index()].rules = {{call}, {all, symbol(pattern("\\n?")), call}};
        return all;
    }
    // Any text, and calls where their marks stand.
    GrammarSymbol text_and_calls() {
        std::vector<RegexId> marks, refused;
        for (const Opening& o : openings_) marks.push_back(literal(o.mark));
        // A text that begins like a call has to be a call.
        RegexId no_head = any();
        if (!heads_.empty()) {
            const RegexId head = pool_.any_of(heads_);
            refused.push_back(join({pattern("[ \\t\\r\\n]*"), head, any()}));
            if (!tag_.empty()) refused.push_back(join({any(), literal(tag_), pattern("[ \\t\\r\\n]*"), head, any()}));
            no_head = pool_.negate(pool_.any_of(refused));
        }
        const GrammarSymbol text = g_.add_empty();
        Rules               rules{{symbol(pool_.all_of({without(marks), no_head}))}};
        for (std::size_t i = 0; i < openings_.size(); i++) {
            Rule call{symbol(pool_.all_of({up_to(marks[i], marks), no_head})), openings_[i].rest};
            call.push_back(rules_.parallel && rules_.form != ToolForm::harmony ? text : symbol(white()));
            rules.push_back(std::move(call));
        }
        if (first_) {
            rules.push_back({symbol(white()), *first_, symbol(white())});
            if (!tag_.empty()) rules.push_back({symbol(up_to(tag_)), *first_, symbol(white())});
        }
        g_.symbols[text.index()].rules = std::move(rules);
        return text;
    }
    // Harmony says which channel a text is for.
    GrammarSymbol behind_final(GrammarSymbol text) {
        if (rules_.form != ToolForm::harmony) return text;
        return g_.add_rules({{symbol(literal("<|channel|>final<|message|>")), text}, {text}});
    }
    // `open`: the answer may end in its reasoning.
    GrammarSymbol behind_reasoning(GrammarSymbol body, bool open) {
        if (rules_.form == ToolForm::harmony) {
            const GrammarSymbol before = g_.add_empty(); // messages of analysis
            const RegexId       marks =
                any_of({"<|channel|>", "<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"});
            const GrammarSymbol end = symbol(join({up_to(literal("<|end|>"), {marks}), literal("<|start|>assistant")}));
            g_.symbols[before.index()].rules = {{}, {before, symbol(literal("<|channel|>analysis<|message|>")), end}};
            return g_.add_rules({{before, body}});
        }
        if (!rules_.may_reason && !rules_.in_reasoning) return body;
        const RegexId begin = rules_.in_reasoning ? RegexPool::blank : join({white(), literal(rules_.reasoning.begin)});
        Rules         rules{{symbol(join({begin, up_to(rules_.reasoning.end), white()})), body}};
        if (open) rules.push_back({symbol(join({begin, without({literal(rules_.reasoning.end)})}))});
        if (!rules_.in_reasoning) rules.push_back({body});
        return g_.add_rules(std::move(rules));
    }

    Grammar&             g_;
    RegexPool&           pool_;
    const AnswerRules&   rules_;
    std::vector<Tool>    tools_;
    std::vector<Opening> openings_;
    // Calls that are recognised only at the beginning of the answer; their beginnings; and a mark that may stand before them.
    std::optional<GrammarSymbol> first_;
    std::vector<RegexId>         heads_;
    std::string                  tag_;
};

Result<GrammarSymbol> add_answer(Grammar& grammar, const AnswerRules& rules, std::optional<GrammarSymbol> text) {
    return AnswerBuilder(grammar, rules).answer(text);
}

} // namespace quire
