// quire.text.templates.jinja.tests: the tests that can stand after `is`. Owns nothing.
export module quire.text.templates.jinja.tests;

import quire.core.base;
import quire.text.templates.jinja.access;
export import quire.text.templates.jinja.value;
import quire.text.templates.jinja.value_text;

export namespace quire::jinja {

bool is_test(std::string_view name);
// Error: unknown, or arguments that it does not take. `is_filter` answers the test of that name.
bool apply_test(Runtime& runtime, std::string_view name, const Value& value, const Arguments& arguments,
                bool (*is_filter)(std::string_view));

} // namespace quire::jinja

module :private;

namespace quire::jinja {

constexpr std::array<std::string_view, 38> test_names{
    "defined",     "undefined", "none",     "boolean",  "true", "false",    "integer",     "float", "number", "string",
    "mapping",     "iterable",  "sequence", "callable", "odd",  "even",     "divisibleby", "lower", "upper",  "eq",
    "equalto",     "==",        "ne",       "!=",       "lt",   "lessthan", "<",           "le",    "<=",     "gt",
    "greaterthan", ">",         "ge",       ">=",       "in",   "sameas",   "escaped",     "filter"};

bool is_test(std::string_view name) {
    return name == "test" || std::ranges::find(test_names, name) != test_names.end();
}

std::int64_t whole(const Value& v) {
    must_be_defined(v);
    if (!v.integer()) fault("a test needs an int, not ", type_name(v));
    return *v.integer();
}

bool apply_test(Runtime& runtime, std::string_view name, const Value& v, const Arguments& a,
                bool (*is_filter)(std::string_view)) {
    runtime.budget.step();
    auto other = [&]() -> const Value& {
        if (a.positional.size() != 1) fault("the test '", name, "' takes one argument");
        return a.positional[0];
    };
    if (name == "defined") return !v.undefined();
    if (name == "undefined") return v.undefined();
    if (name == "none") return v.none();
    if (name == "boolean") return v.get<bool>() != nullptr;
    if (name == "true" || name == "false") return v.get<bool>() && *v.get<bool>() == (name == "true");
    if (name == "integer") return v.get<std::int64_t>() != nullptr;
    if (name == "float") return v.get<double>() != nullptr;
    if (name == "number") return v.number().has_value();
    if (name == "string") return v.text() != nullptr;
    if (name == "mapping") return v.dict() != nullptr;
    if (name == "iterable") return iterable(v);
    if (name == "sequence") return v.undefined() || v.text() || v.dict() || (v.list() && v.list()->indexed());
    if (name == "callable") return v.undefined() || (v.object() && v.object()->callable());
    if (name == "odd" || name == "even" || name == "divisibleby") {
        const std::int64_t by = name == "divisibleby" ? whole(other()) : 2;
        if (by == 0) fault("integer division or modulo by zero");
        const bool divides = by == -1 || whole(v) % by == 0;
        return divides != (name == "odd");
    }
    if (name == "lower" || name == "upper") {
        const Value same =
            call_method(runtime, Value(as_text(runtime, v)), name == "lower" ? "islower" : "isupper", {});
        return truth(same);
    }
    if (name == "eq" || name == "equalto" || name == "==") return equal(runtime.budget, v, other());
    if (name == "ne" || name == "!=") return !equal(runtime.budget, v, other());
    if (name == "lt" || name == "lessthan" || name == "<") return order(runtime.budget, v, other(), "<") < 0;
    if (name == "le" || name == "<=") return order(runtime.budget, v, other(), "<=") <= 0;
    if (name == "gt" || name == "greaterthan" || name == ">")
        return order(runtime.budget, v, other(), ">") == 1 || (v.text() && order(runtime.budget, v, other(), ">") > 0);
    if (name == "ge" || name == ">=") {
        const int o = order(runtime.budget, v, other(), ">=");
        return o >= 0 && !(o == 2 && v.number());
    }
    if (name == "in") return contains(runtime, other(), v);
    if (name == "sameas") {
        const Value& o = other();
        if (v.data.index() != o.data.index()) return false;
        if (v.text() || v.list() || v.dict())
            return (v.text() && v.text() == o.text()) || (v.list() && v.list() == o.list()) ||
                   (v.dict() && v.dict() == o.dict());
        return equal(runtime.budget, v, o);
    }
    if (name == "escaped") return v.text() && v.text()->safe;
    if (name == "filter") return is_filter(to_str(runtime, v).bytes);
    if (name == "test") return is_test(to_str(runtime, v).bytes);
    fault("no test named ", quote(name));
}

} // namespace quire::jinja
