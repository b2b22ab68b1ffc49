// quire.text.templates.jinja.ast: a parsed template: statements and expressions as a tree. **Owns** its nodes and the names in them.
export module quire.text.templates.jinja.ast;

import quire.core.base;
export import quire.text.templates.jinja.value;

export namespace quire::jinja {

// The kinds of nodes, each with the fields that it uses; `kids` in brackets.
enum class NodeKind {
    // expressions
    constant,  // value
    name,      // id
    attribute, // text [object]
    item,      // [object, key]
    slice,     // [object, begin, end, step], absent parts null
    call,      // [function, positional...], named; star: *args, star_named: **kwargs
    filter,    // text [value, positional...], named; the value is null in a filter block
    test,      // text [value, positional...], named; negated
    list,
    tuple, // [items...]
    dict,  // [key, value, key, value...]
    negate,
    plus,
    logical_not,
    logical_and,
    logical_or,
    add,
    subtract,
    multiply,
    divide,
    floor_divide,
    modulo,
    power,       // [left, right]
    concat,      // [parts...]
    compare,     // [first, second...], operators
    conditional, // [condition, yes, no or null]
    // statements
    data,         // value
    output,       // [expression]
    branch,       // [condition...] with as many bodies, or one more: else
    loop,         // [target, list, filter or null], bodies {body, else}; recursive
    assign,       // [target, value]
    capture,      // [target, filter chain or null], bodies {body}: {% set x %}...{% endset %}
    macro,        // id, parameters, [defaults...] of the last parameters, bodies {body}
    call_block,   // [call], parameters, defaults in `named`'s place, bodies {body}
    filter_block, // [filter chain], bodies {body}
    scope,        // [target, value, target, value...], bodies {body}: {% with %}
    group,        // bodies {body}: {% generation %}
    loop_break,
    loop_continue,
};

struct Node;
using NodePtr = std::unique_ptr<Node>;
using Body    = std::vector<NodePtr>;

struct Node {
    NodeKind                                     kind   = NodeKind::constant;
    std::uint32_t                                offset = 0;
    int                                          depth  = 1; // of nodes in one another
    int                                          id     = -1;
    Value                                        value;
    std::string                                  text;
    std::vector<NodePtr>                         kids;
    std::vector<Body>                            bodies;
    std::vector<std::pair<std::string, NodePtr>> named;
    std::vector<std::string>                     operators;
    std::vector<int>                             parameters;
    NodePtr                                      star, star_named;
    bool                                         negated = false, recursive = false;
    bool uses_caller = false, uses_varargs = false, uses_kwargs = false; // of a macro
};

struct Program {
    std::string                          source; // normalised
    Body                                 body;
    std::vector<std::string>             names; // id → name
    std::unordered_map<std::string, int> ids;

    int id(std::string_view name) {
        auto [at, fresh] = ids.emplace(std::string(name), int(names.size()));
        if (fresh) names.emplace_back(name);
        return at->second;
    }
};

} // namespace quire::jinja
