// quire.constraint.formats.call_arguments: the arguments of a tool's call → rules, by the tool's schema, in the spellings of models: as JSON, with
// marks around each parameter, or as Python writes them. Owns nothing.
export module quire.constraint.formats.call_arguments;

import quire.constraint.formats.answer_texts;
import quire.constraint.formats.json_schema;
import quire.constraint.formats.string_set;
import quire.core.base;
import quire.text.calls.call_marks;
import quire.text.calls.tool_parameter;

export namespace quire {

struct CallableTool {
    std::string   name;
    const Json*   function = nullptr;
    bool          exact    = false; // its schema has to be supported
    GrammarSymbol arguments;        // as JSON; in the forms that have them so
};

// Error: a schema that is not supported, where the tool is `exact`; else the arguments may be any object.
Result<GrammarSymbol> json_arguments(const AnswerTexts& texts, const CallableTool& tool);
// Parameters one behind another, with the marks of `m`: before each parameter, around strings, and around other values.
Result<GrammarSymbol> tagged_parameters(const AnswerTexts& texts, const CallableTool& tool, const CallMarks& m);
// KEY=VALUE with commas between.
Result<GrammarSymbol> python_parameters(const AnswerTexts& texts, const CallableTool& tool);

} // namespace quire

module :private;

namespace quire {

class ArgumentBuilder : AnswerTexts {
public:
    explicit ArgumentBuilder(const AnswerTexts& texts) : AnswerTexts(texts) {}

    Result<GrammarSymbol> json_arguments(const CallableTool& tool) {
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

    Result<GrammarSymbol> tagged_parameters(const CallableTool& tool, const CallMarks& m) {
        const Json root = parameters_of(tool);
        const auto open = [&](const Parameter& p) { return join({literal(m.parameter_open), pool_.literal(p.name)}); };
        const auto value_of = [&](const Parameter& p) {
            const auto mark = [&](const std::string& text) { return literal(for_key(text, p.name)); };
            return value(tool, root, *p.schema, Spelling::tagged,
                         {.text  = {mark(m.text.open), mark(m.text.close)},
                          .other = {mark(m.other.open), mark(m.other.close)},
                          .wrap  = {mark(m.wrap.open), mark(m.wrap.close)}});
        };
        const RegexId between = join({white(), loose(m.parameter_separator), white()});
        return in_order(parameters(tool, root), white(), between, open, value_of);
    }

    Result<GrammarSymbol> python_parameters(const CallableTool& tool) {
        const Json root     = parameters_of(tool);
        const auto open     = [&](const Parameter& p) { return pool_.literal(cat(p.name, '=')); };
        const auto value_of = [&](const Parameter& p) {
            return value(tool, root, *p.schema, Spelling::python, Surroundings());
        };
        return in_order(parameters(tool, root), RegexPool::blank, pattern(", ?"), open, value_of);
    }

private:
    using Tool  = CallableTool;
    using Rule  = std::vector<GrammarSymbol>;
    using Rules = std::vector<Rule>;

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
        Pair wrap;        // strings, perhaps, within those
    };
    struct Values {
        const Tool&  tool;
        const Json   root;
        Spelling     spelling;
        Surroundings around;
        Rules        rules{};
    };

    void add_lexeme(Values& v, RegexId value, bool is_text) {
        const Surroundings::Pair &around = is_text ? v.around.text : v.around.other, &wrap = v.around.wrap;
        if (is_text && wrap.open != RegexPool::blank) { // a text that begins with its mark is read as wrapped
            const RegexId wrapped = pool_.minus(value, join({any(), wrap.close, any()}));
            value =
                pool_.any_of({pool_.minus(value, join({wrap.open, any()})), join({wrap.open, wrapped, wrap.close})});
        }
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
    // Parameters in the order of the list; a parameter that is not required may be left out. `open`: the text before the value of a parameter.
    Result<GrammarSymbol> in_order(const Result<std::vector<Parameter>>& list, RegexId before, RegexId between,
                                   const auto& open, const auto& value_of) {
        if (!list) return std::unexpected(list.error());
        // The rules from parameter i on, as the first parameter or behind another.
        GrammarSymbol first = g_.add_rules({{}}), behind = first;
        for (const Parameter& p : std::views::reverse(*list)) {
            const Result<GrammarSymbol> v = value_of(p);
            if (!v) return v;
            const auto with_this = [&](RegexId head) { return Rule{symbol(join({head, open(p)})), *v, behind}; };
            Rules      as_first{with_this(before)}, as_later{with_this(between)};
            if (!p.required) as_first.push_back({first}), as_later.push_back({behind});
            first  = g_.add_rules(std::move(as_first));
            behind = g_.add_rules(std::move(as_later));
        }
        return first;
    }
};

Result<GrammarSymbol> json_arguments(const AnswerTexts& texts, const CallableTool& tool) {
    return ArgumentBuilder(texts).json_arguments(tool);
}

Result<GrammarSymbol> tagged_parameters(const AnswerTexts& texts, const CallableTool& tool, const CallMarks& m) {
    return ArgumentBuilder(texts).tagged_parameters(tool, m);
}

Result<GrammarSymbol> python_parameters(const AnswerTexts& texts, const CallableTool& tool) {
    return ArgumentBuilder(texts).python_parameters(tool);
}

} // namespace quire
