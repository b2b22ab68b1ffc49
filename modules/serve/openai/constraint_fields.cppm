// quire.serve.openai.constraint_fields: the fields of a request that constrain its text: OpenAI's response_format, vLLM's structured_outputs and
// guided_*, llama.cpp's grammar and json_schema. Owns nothing.
export module quire.serve.openai.constraint_fields;

import quire.constraint.compile;
import quire.core.base;
import quire.serve.api.generation_request;
import quire.serve.api.json_fields;

export namespace quire {

// None: any text will do. A field that is wrong, or a second one, sets an error.
std::optional<ConstraintField> parse_constraint(JsonFields& f);

} // namespace quire

module :private;

namespace quire {

class ConstraintReader {
public:
    explicit ConstraintReader(JsonFields& f) : f_(f) {}

    std::optional<ConstraintField> found;
    bool                           closed = true;

    void schema(const std::string& param, const Json& value) {
        ConstraintSpec spec{.kind = ConstraintSpec::Kind::json_schema};
        if (value.is_string()) { // vLLM takes the text of a schema also
            Result<Json> parsed = json_parse(value.get_ref<const std::string&>(), schema_json_limits);
            if (!parsed) return f_.fail(param, cat(param, " is no JSON Schema: ", parsed.error().message));
            spec.schema = std::move(*parsed);
        } else {
            spec.schema = value;
        }
        if (!spec.schema.is_object() && !spec.schema.is_boolean())
            return f_.fail(param, cat(param, " is ", type_name(spec.schema), "; it has to be a JSON Schema"));
        add(param, std::move(spec));
    }
    void text(const std::string& param, const Json& value, ConstraintSpec::Kind kind) {
        if (!value.is_string()) return f_.fail(param, cat(param, " is ", type_name(value), "; it has to be a string"));
        ConstraintSpec spec{.kind = kind};
        spec.text = value.get<std::string>();
        add(param, std::move(spec));
    }
    void choice(const std::string& param, const Json& value) {
        ConstraintSpec spec{.kind = ConstraintSpec::Kind::choice};
        if (!value.is_array() || value.empty() ||
            !std::ranges::all_of(value, [](const Json& c) { return c.is_string(); }))
            return f_.fail(param, cat(param, " has to be a list of strings, at least one"));
        for (const Json& c : value) spec.choices.push_back(c.get<std::string>());
        add(param, std::move(spec));
    }
    void tag(const std::string& param, const Json& value) {
        ConstraintSpec spec{.kind = ConstraintSpec::Kind::structural_tag};
        if (value.is_string()) {
            Result<Json> parsed = json_parse(value.get_ref<const std::string&>(), schema_json_limits);
            if (!parsed) return f_.fail(param, cat(param, ": ", parsed.error().message));
            spec.schema = std::move(*parsed);
        } else {
            spec.schema = value;
        }
        add(param, std::move(spec));
    }
    void object(const std::string& param) { add(param, {.kind = ConstraintSpec::Kind::json_object}); }

    void response_format(const Json& v) {
        const std::string param = "response_format";
        const auto        type  = v.is_object() ? v.find("type") : v.end();
        if (!v.is_object() || type == v.end() || !type->is_string())
            return f_.fail(param, "response_format has to be an object with a type");
        const auto& name = type->get_ref<const std::string&>();
        if (name == "text") return;
        if (name == "json_object") {
            const auto own = v.find("schema"); // llama.cpp
            return own != v.end() && !own->empty() ? schema(param, *own) : object(param);
        }
        if (name == "structural_tag") return tag(param, v);
        if (name != "json_schema")
            return f_.fail(param, cat("response_format has the type ", quote(name),
                                      "; text, json_object, json_schema and structural_tag are known"));
        const auto given = v.find("json_schema");
        if (given == v.end() || !given->is_object() || !given->contains("schema"))
            return f_.fail(param, "response_format of type json_schema needs json_schema.schema");
        schema(param, (*given)["schema"]);
    }

    void structured_outputs(const Json& v) {
        if (!v.is_object()) return f_.fail("structured_outputs", "structured_outputs has to be an object");
        for (auto at = v.begin(); at != v.end(); ++at) {
            const std::string& key   = at.key();
            const Json&        value = at.value();
            const std::string  param = cat("structured_outputs.", cut_short(key));
            if (value.is_null()) continue;
            if (key == "json") schema(param, value);
            else if (key == "regex") text(param, value, ConstraintSpec::Kind::regex);
            else if (key == "grammar") text(param, value, ConstraintSpec::Kind::grammar);
            else if (key == "choice") choice(param, value);
            else if (key == "structural_tag") tag(param, value);
            else if (key == "json_object" && value.is_boolean()) {
                if (value.get<bool>()) object(param);
            } else if (key == "disable_additional_properties" && value.is_boolean()) {
                closed = value.get<bool>();
            } else if (key == "disable_any_whitespace" || key == "disable_fallback" ||
                       (key == "whitespace_pattern" && value == "")) {
                // White space is at most a blank here in any case.
            } else return f_.fail(param, cat(param, " is not supported"));
        }
    }

private:
    void add(const std::string& param, ConstraintSpec spec) {
        if (found) return f_.fail(param, cat(found->param, " and ", param, " exclude each other"));
        found = ConstraintField{std::move(spec), param};
    }

    JsonFields& f_;
};

std::optional<ConstraintField> parse_constraint(JsonFields& f) {
    using Kind = ConstraintSpec::Kind;
    ConstraintReader read(f);
    for (const char* name : {"response_format", "structured_outputs"}) f.describe(name, R"({"type":"object"})");
    for (const char* name : {"guided_json", "json_schema"})
        f.describe(name, R"({"type":["object","boolean","string"]})");
    for (const char* name : {"guided_regex", "guided_grammar", "grammar"}) f.describe(name, R"({"type":"string"})");
    f.describe("guided_choice", R"({"type":"array","minItems":1,"items":{"type":"string"}})");
    if (const Json* v = f.find("response_format")) read.response_format(*v);
    if (const Json* v = f.find("structured_outputs")) read.structured_outputs(*v);
    if (const Json* v = f.find("guided_json")) read.schema("guided_json", *v);
    if (const Json* v = f.find("guided_regex")) read.text("guided_regex", *v, Kind::regex);
    if (const Json* v = f.find("guided_choice")) read.choice("guided_choice", *v);
    if (const Json* v = f.find("guided_grammar")) read.text("guided_grammar", *v, Kind::grammar);
    if (const Json* v = f.find("grammar"); v && *v != "") read.text("grammar", *v, Kind::grammar);
    if (const Json* v = f.find("json_schema"); v && !(v->is_object() && v->empty())) read.schema("json_schema", *v);
    const std::string order = f.choice("key_order", {"declared", "any"}, "declared");
    if (read.found) read.found->spec.ordered = order != "any";
    if (read.found) read.found->spec.closed = read.closed;
    return std::move(read.found);
}

} // namespace quire
