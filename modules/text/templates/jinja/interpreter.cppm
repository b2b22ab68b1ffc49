// quire.text.templates.jinja.interpreter: runs a parsed template. **Owns** the scopes of one rendering.
export module quire.text.templates.jinja.interpreter;

import quire.core.base;
import quire.text.templates.jinja.access;
import quire.text.templates.jinja.ast;
import quire.text.templates.jinja.filters;
import quire.text.templates.jinja.globals;
import quire.text.templates.jinja.tests;
import quire.text.templates.jinja.value_text;

export namespace quire::jinja {

// Names as in one {% for %} or macro; a name that is not here is sought in the parent.
struct Scope {
    Scope*                             parent = nullptr;
    std::vector<std::pair<int, Value>> variables;

    const Value* find(Budget& budget, int id) const;
    void         set(int id, Value value);
};

class Interpreter {
public:
    // Both outlive it.
    Interpreter(const Program& program, Runtime& runtime);

    void set(std::string_view name, Value value); // a variable of the template
    // Throws Fault; position() is where.
    MarkedText    run();
    std::uint32_t position() const { return position_; }

    Value call_macro(const Node& node, Scope* closure, const Arguments& arguments);
    Value call_loop(const Node& node, Scope* closure, const Value& list, int depth);

private:
    enum class Flow { on, loop_break, loop_continue };

    struct Level { // one more level of recursion
        explicit Level(Interpreter& i) : interpreter(i) {
            if (++i.depth_ > deepest) fault("the template runs nested deeper than ", deepest);
            i.runtime_.budget.step();
        }
        ~Level() { interpreter.depth_--; }
        Interpreter& interpreter;
    };
    static constexpr int deepest = 1000;

    Scope* new_scope(Scope* parent);

    Flow       execute(const Body& body, Scope* scope);
    Flow       execute(const Node& node, Scope* scope);
    Flow       branch(const Node& node, Scope* scope);
    void       loop(const Node& node, Scope* scope, const Value& list, int depth);
    void       assign(const Node& target, Value value, Scope* scope);
    MarkedText captured(const Body& body, Scope* scope);
    Value      call_block(const Node& node, Scope* scope);
    void       output(const Value& value);

    Value     evaluate(const Node& node, Scope* scope);
    Value     operation(const Node& node, Scope* scope);
    Value     collection(const Node& node, Scope* scope);
    Value     name(const Node& node, Scope* scope);
    Value     call(const Node& node, Scope* scope, Value caller = {});
    Value     compare(const Node& node, Scope* scope);
    Value     slice(const Node& node, Scope* scope);
    Value     filter(const Node& node, Scope* scope, const Value* input);
    Value     test(const Node& node, Scope* scope);
    Arguments arguments(const Node& node, Scope* scope);

    const Program&                      program_;
    Runtime&                            runtime_;
    std::vector<std::unique_ptr<Scope>> scopes_;
    Scope*                              root_ = nullptr;
    MarkedText                          text_;
    MarkedText*                         out_      = &text_;
    std::uint32_t                       position_ = 0;
    int                                 depth_    = 0;
    int loop_id_, caller_id_, varargs_id_, kwargs_id_; // -1: the template does not name it
};

} // namespace quire::jinja

module :private;

namespace quire::jinja {

const Value* Scope::find(Budget& budget, int id) const {
    for (const Scope* s = this; s; s = s->parent) {
        budget.step(std::int64_t(s->variables.size() / 64));
        for (const auto& [i, v] : s->variables)
            if (i == id) return &v;
    }
    return nullptr;
}

void Scope::set(int id, Value value) {
    for (auto& [i, v] : variables)
        if (i == id) {
            v = std::move(value);
            return;
        }
    variables.emplace_back(id, std::move(value));
}

// -- objects of a running template

struct Macro : Object {
    Interpreter& interpreter;
    const Node&  node;
    Scope*       closure;
    Macro(Interpreter& i, const Node& n, Scope* s) : interpreter(i), node(n), closure(s) {}
    std::string_view type_name() const override { return "Macro"; }
    bool             callable() const override { return true; }
    Value            call(Runtime&, const Arguments& arguments) override {
        return interpreter.call_macro(node, closure, arguments);
    }
    std::optional<Value> attribute(Runtime&, std::string_view name) override {
        return name == "name" ? std::optional(Value(std::string_view(node.text))) : std::nullopt;
    }
};

struct Loop;

struct LoopMethod : Object {
    Loop&       loop;
    std::string name;
    LoopMethod(Loop& l, std::string_view n) : loop(l), name(n) {}
    std::string_view type_name() const override { return "method"; }
    bool             callable() const override { return true; }
    Value            call(Runtime& runtime, const Arguments& arguments) override;
};

struct Loop : Object {
    Interpreter&       interpreter;
    const Node&        node;
    Scope*             closure;
    std::vector<Value> items;
    std::size_t        at    = 0;
    int                depth = 0;
    std::vector<Value> last_changed;
    bool               changed_once = false;

    Loop(Interpreter& i, const Node& n, Scope* s) : interpreter(i), node(n), closure(s) {}
    std::string_view type_name() const override { return "LoopContext"; }
    bool             callable() const override { return node.recursive; }
    Value            call(Runtime&, const Arguments& arguments) override {
        if (!node.recursive) fault("The loop must have the 'recursive' marker to be called recursively.");
        if (arguments.positional.empty()) fault("loop() needs a list");
        return interpreter.call_loop(node, closure, arguments.positional[0], depth + 1);
    }
    std::optional<Value> attribute(Runtime& runtime, std::string_view name) override {
        const auto i = std::int64_t(at), n = std::int64_t(items.size());
        if (name == "index") return Value(i + 1);
        if (name == "index0") return Value(i);
        if (name == "revindex") return Value(n - i);
        if (name == "revindex0") return Value(n - i - 1);
        if (name == "first") return Value(i == 0);
        if (name == "last") return Value(i + 1 == n);
        if (name == "length") return Value(n);
        if (name == "depth") return Value(std::int64_t(depth + 1));
        if (name == "depth0") return Value(std::int64_t(depth));
        if (name == "previtem") return at > 0 ? items[at - 1] : undefined("there is no previous item");
        if (name == "nextitem") return at + 1 < items.size() ? items[at + 1] : undefined("there is no next item");
        if (name == "cycle" || name == "changed") return Value(runtime.make<LoopMethod>(*this, name));
        return std::nullopt;
    }
};

Value LoopMethod::call(Runtime& runtime, const Arguments& a) {
    if (name == "cycle") {
        if (a.positional.empty()) fault("no items for cycling given");
        return a.positional[loop.at % a.positional.size()];
    }
    bool same = loop.changed_once && loop.last_changed.size() == a.positional.size();
    for (std::size_t i = 0; same && i < a.positional.size(); i++)
        same = equal(runtime.budget, a.positional[i], loop.last_changed[i]);
    loop.changed_once = true;
    loop.last_changed = a.positional;
    return !same;
}

// -- running

Interpreter::Interpreter(const Program& program, Runtime& runtime) : program_(program), runtime_(runtime) {
    auto id = [&](const char* n) {
        const auto at = program.ids.find(n);
        return at == program.ids.end() ? -1 : at->second;
    };
    loop_id_ = id("loop"), caller_id_ = id("caller"), varargs_id_ = id("varargs"), kwargs_id_ = id("kwargs");
    root_ = new_scope(nullptr);
    for (const Global& g : globals())
        if (program.ids.contains(std::string(g.name))) set(g.name, Value(runtime.make<Function>(g.body)));
}

void Interpreter::set(std::string_view name, Value value) {
    if (const auto at = program_.ids.find(std::string(name)); at != program_.ids.end())
        root_->set(at->second, std::move(value));
}

Scope* Interpreter::new_scope(Scope* parent) {
    scopes_.push_back(std::make_unique<Scope>());
    scopes_.back()->parent = parent;
    return scopes_.back().get();
}

MarkedText Interpreter::run() {
    (void)execute(program_.body, new_scope(root_));
    return std::move(text_);
}

void Interpreter::output(const Value& v) {
    append_str(runtime_, *out_, v);
    if (out_->bytes.size() > runtime_.budget.longest)
        fault("the output becomes longer than ", runtime_.budget.longest, " bytes");
}

Interpreter::Flow Interpreter::execute(const Body& body, Scope* scope) {
    for (const NodePtr& node : body)
        if (const Flow flow = execute(*node, scope); flow != Flow::on) return flow;
    return Flow::on;
}

Interpreter::Flow Interpreter::execute(const Node& n, Scope* scope) {
    const Level level(*this);
    position_ = n.offset;
    switch (n.kind) {
        case NodeKind::data:
        case NodeKind::constant: output(n.value); break;
        case NodeKind::output: output(evaluate(*n.kids[0], scope)); break;
        case NodeKind::branch: return branch(n, scope);
        case NodeKind::loop: loop(n, scope, evaluate(*n.kids[1], scope), 0); break;
        case NodeKind::assign: assign(*n.kids[0], evaluate(*n.kids[1], scope), scope); break;
        case NodeKind::capture: {
            Value v(captured(n.bodies[0], new_scope(scope)));
            assign(*n.kids[0], n.kids[1] ? filter(*n.kids[1], scope, &v) : v, scope);
            break;
        }
        case NodeKind::macro: scope->set(n.id, Value(runtime_.make<Macro>(*this, n, scope))); break;
        case NodeKind::call_block: output(call_block(n, scope)); break;
        case NodeKind::filter_block: {
            const Value v(captured(n.bodies[0], new_scope(scope)));
            output(filter(*n.kids[0], scope, &v));
            break;
        }
        case NodeKind::scope: {
            Scope* inner = new_scope(scope);
            for (std::size_t i = 0; i < n.kids.size(); i += 2)
                assign(*n.kids[i], evaluate(*n.kids[i + 1], scope), inner);
            return execute(n.bodies[0], inner);
        }
        case NodeKind::group: return execute(n.bodies[0], new_scope(scope));
        case NodeKind::loop_break: return Flow::loop_break;
        case NodeKind::loop_continue: return Flow::loop_continue;
        default: output(evaluate(n, scope));
    }
    return Flow::on;
}

Interpreter::Flow Interpreter::branch(const Node& n, Scope* scope) {
    for (std::size_t i = 0; i < n.kids.size(); i++)
        if (truth(evaluate(*n.kids[i], scope))) return execute(n.bodies[i], scope);
    return n.bodies.size() > n.kids.size() ? execute(n.bodies.back(), scope) : Flow::on;
}

void Interpreter::loop(const Node& n, Scope* scope, const Value& list, int depth) {
    position_    = n.offset;
    auto* state  = runtime_.make<Loop>(*this, n, scope);
    state->items = iterate(runtime_, list);
    state->depth = depth;
    Scope* inner = new_scope(scope);
    if (n.kids[2]) {
        std::vector<Value> kept;
        for (const Value& item : state->items) {
            inner->variables.clear();
            assign(*n.kids[0], item, inner);
            if (truth(evaluate(*n.kids[2], inner))) kept.push_back(item);
        }
        state->items = std::move(kept);
    }
    if (state->items.empty()) {
        if (n.bodies.size() > 1) (void)execute(n.bodies[1], new_scope(scope));
        return;
    }
    for (state->at = 0; state->at < state->items.size(); state->at++) {
        runtime_.budget.step();
        inner->variables.clear();
        if (loop_id_ >= 0) inner->set(loop_id_, Value(state));
        assign(*n.kids[0], state->items[state->at], inner);
        if (execute(n.bodies[0], inner) == Flow::loop_break) break;
    }
}

Value Interpreter::call_loop(const Node& n, Scope* closure, const Value& list, int depth) {
    const Level level(*this);
    if (depth > 64) fault("a loop calls itself deeper than 64");
    MarkedText  made;
    MarkedText* outer = std::exchange(out_, &made);
    loop(n, closure, list, depth);
    out_ = outer;
    runtime_.budget.text(made.bytes.size());
    return made;
}

void Interpreter::assign(const Node& target, Value value, Scope* scope) {
    position_ = target.offset;
    if (target.kind == NodeKind::name) return scope->set(target.id, std::move(value));
    if (target.kind == NodeKind::attribute) {
        const Value object = name(*target.kids[0], scope);
        auto*       ns     = dynamic_cast<Namespace*>(object.object());
        if (!ns) fault("cannot assign attribute on non-namespace object");
        return ns->set(runtime_.budget, target.text, std::move(value));
    }
    must_be_defined(value);
    std::vector<Value> items = iterate(runtime_, value);
    if (items.size() != target.kids.size())
        fault(items.size() < target.kids.size() ? "not enough" : "too many", " values to unpack (expected ",
              target.kids.size(), ", got ", items.size(), ")");
    for (std::size_t i = 0; i < items.size(); i++) assign(*target.kids[i], std::move(items[i]), scope);
}

MarkedText Interpreter::captured(const Body& body, Scope* scope) {
    MarkedText  made;
    MarkedText* outer = std::exchange(out_, &made);
    (void)execute(body, scope);
    out_ = outer;
    runtime_.budget.text(made.bytes.size());
    return made;
}

Value Interpreter::call_block(const Node& n, Scope* scope) {
    return call(*n.kids[0], scope, Value(runtime_.make<Macro>(*this, n, scope)));
}

Value Interpreter::call_macro(const Node& n, Scope* closure, const Arguments& a) {
    const Level level(*this);
    if (--runtime_.budget.recursion < 0) fault("macros call each other deeper than 64");
    Scope*                                     scope = new_scope(closure);
    std::vector<std::pair<std::string, Value>> left  = a.named;
    auto                                       take  = [&](std::string_view name) -> std::optional<Value> {
        runtime_.budget.step(std::int64_t(left.size() / 64));
        for (auto at = left.begin(); at != left.end(); ++at)
            if (at->first == name) {
                Value v = std::move(at->second);
                left.erase(at);
                return v;
            }
        return std::nullopt;
    };
    const std::size_t                 required = n.parameters.size() - n.named.size();
    std::vector<std::optional<Value>> given;
    for (std::size_t i = 0; i < n.parameters.size(); i++) {
        const std::string&   name  = program_.names[std::size_t(n.parameters[i])];
        std::optional<Value> named = take(name);
        if (named && i < a.positional.size()) fault("macro '", n.text, "' got two values for '", name, "'");
        given.push_back(i < a.positional.size() ? std::optional(a.positional[i]) : std::move(named));
    }
    if (n.uses_caller && caller_id_ >= 0 && std::ranges::find(n.parameters, caller_id_) == n.parameters.end())
        scope->set(caller_id_, take("caller").value_or(undefined("No caller defined")));
    for (std::size_t i = 0; i < n.parameters.size(); i++) {
        const std::string& name = program_.names[std::size_t(n.parameters[i])];
        Value              v;
        if (given[i]) v = *given[i];
        else if (i >= required) v = evaluate(*n.named[i - required].second, scope);
        else v = undefined(cat("parameter '", name, "' was not provided"));
        scope->set(n.parameters[i], std::move(v));
    }
    if (n.uses_kwargs && kwargs_id_ >= 0) {
        Dict rest;
        for (auto& [name, value] : left) rest.set(runtime_.budget, Value(std::string_view(name)), std::move(value));
        scope->set(kwargs_id_, make_dict(runtime_, std::move(rest)));
    } else if (!left.empty()) {
        fault("macro '", n.text, "' takes no keyword argument '", left[0].first, "'");
    }
    if (n.uses_varargs && varargs_id_ >= 0) {
        std::vector<Value> rest;
        for (std::size_t i = n.parameters.size(); i < a.positional.size(); i++) rest.push_back(a.positional[i]);
        scope->set(varargs_id_, make_list(runtime_, std::move(rest), List::Form::tuple));
    } else if (a.positional.size() > n.parameters.size()) {
        fault("macro '", n.text, "' takes not more than ", n.parameters.size(), " argument(s)");
    }
    MarkedText made = captured(n.bodies[0], scope);
    runtime_.budget.recursion++;
    return made;
}

// -- expressions

Value Interpreter::evaluate(const Node& n, Scope* scope) {
    const Level level(*this);
    switch (n.kind) {
        case NodeKind::constant: return n.value;
        case NodeKind::name: return name(n, scope);
        case NodeKind::attribute: {
            const Value object = evaluate(*n.kids[0], scope);
            position_          = n.offset;
            return get_attribute(runtime_, object, n.text);
        }
        case NodeKind::item: {
            const Value object = evaluate(*n.kids[0], scope), key = evaluate(*n.kids[1], scope);
            position_ = n.offset;
            return get_item(runtime_, object, key);
        }
        case NodeKind::slice: return slice(n, scope);
        case NodeKind::call: return call(n, scope);
        case NodeKind::filter: return filter(n, scope, nullptr);
        case NodeKind::test: return test(n, scope);
        case NodeKind::list:
        case NodeKind::tuple:
        case NodeKind::dict: return collection(n, scope);
        case NodeKind::logical_not: return !truth(evaluate(*n.kids[0], scope));
        case NodeKind::logical_and: {
            Value left = evaluate(*n.kids[0], scope);
            return truth(left) ? evaluate(*n.kids[1], scope) : left;
        }
        case NodeKind::logical_or: {
            Value left = evaluate(*n.kids[0], scope);
            return truth(left) ? left : evaluate(*n.kids[1], scope);
        }
        case NodeKind::compare: return compare(n, scope);
        case NodeKind::conditional:
            if (truth(evaluate(*n.kids[0], scope))) return evaluate(*n.kids[1], scope);
            if (n.kids[2]) return evaluate(*n.kids[2], scope);
            return undefined("the inline if-expression evaluated to false and no else section was defined.");
        default: return operation(n, scope);
    }
}

Value Interpreter::name(const Node& n, Scope* scope) {
    if (const Value* v = scope->find(runtime_.budget, n.id)) return *v;
    return undefined(cat("'", program_.names[std::size_t(n.id)], "' is undefined"));
}

Value Interpreter::operation(const Node& n, Scope* scope) {
    if (n.kind == NodeKind::concat) {
        MarkedText out;
        for (const NodePtr& kid : n.kids) {
            append_str(runtime_, out, evaluate(*kid, scope));
            runtime_.budget.growing(out.bytes.size());
        }
        position_ = n.offset;
        runtime_.budget.text(out.bytes.size());
        return out;
    }
    const Value left = evaluate(*n.kids[0], scope);
    if (n.kind == NodeKind::negate || n.kind == NodeKind::plus) {
        position_       = n.offset;
        const Value out = negate(left);
        return n.kind == NodeKind::negate ? out : left.get<bool>() ? Value(*left.integer()) : left;
    }
    const Value right = evaluate(*n.kids[1], scope);
    position_         = n.offset;
    return arithmetic(runtime_, n.kind, left, right);
}

Value Interpreter::collection(const Node& n, Scope* scope) {
    if (n.kind == NodeKind::dict) {
        Dict made;
        for (std::size_t i = 0; i < n.kids.size(); i += 2) {
            Value key = evaluate(*n.kids[i], scope);
            made.set(runtime_.budget, std::move(key), evaluate(*n.kids[i + 1], scope));
        }
        return make_dict(runtime_, std::move(made));
    }
    std::vector<Value> items;
    for (const NodePtr& kid : n.kids) items.push_back(evaluate(*kid, scope));
    return make_list(runtime_, std::move(items), n.kind == NodeKind::list ? List::Form::list : List::Form::tuple);
}

Value Interpreter::slice(const Node& n, Scope* scope) {
    const Value object = evaluate(*n.kids[0], scope);
    Value       bounds[3]{None{}, None{}, None{}};
    for (std::size_t i = 0; i < 3; i++)
        if (n.kids[i + 1]) bounds[i] = evaluate(*n.kids[i + 1], scope);
    position_ = n.offset;
    return get_slice(runtime_, object, bounds[0], bounds[1], bounds[2]);
}

Arguments Interpreter::arguments(const Node& n, Scope* scope) {
    Arguments a;
    for (std::size_t i = 1; i < n.kids.size(); i++) a.positional.push_back(evaluate(*n.kids[i], scope));
    for (const auto& [name, value] : n.named) a.named.emplace_back(name, evaluate(*value, scope));
    if (n.star)
        for (Value& v : iterate(runtime_, evaluate(*n.star, scope))) a.positional.push_back(std::move(v));
    if (n.star_named) {
        const Value more = evaluate(*n.star_named, scope);
        if (!more.dict()) fault("argument after ** must be a mapping, not ", type_name(more));
        for (const auto& [key, value] : more.dict()->items) {
            if (!key.text()) fault("keywords must be strings");
            runtime_.budget.step();
            runtime_.budget.look(key.text()->bytes.size());
            a.named.emplace_back(key.text()->bytes, value);
        }
    }
    return a;
}

Value Interpreter::call(const Node& n, Scope* scope, Value caller) {
    const Node& function = *n.kids[0];
    Value       callee, self;
    if (function.kind == NodeKind::attribute) {
        self      = evaluate(*function.kids[0], scope);
        position_ = function.offset;
        if (!has_method(self, function.text)) callee = get_attribute(runtime_, self, function.text), self = Value();
    } else {
        callee = evaluate(function, scope);
    }
    Arguments a = arguments(n, scope);
    if (caller.object()) a.named.emplace_back("caller", std::move(caller));
    position_ = n.offset;
    if (!self.undefined()) return call_method(runtime_, self, function.text, a);
    must_be_defined(callee);
    if (!callee.object()) fault("'", type_name(callee), "' object is not callable");
    return callee.object()->call(runtime_, a);
}

Value Interpreter::compare(const Node& n, Scope* scope) {
    Value left = evaluate(*n.kids[0], scope);
    for (std::size_t i = 0; i < n.operators.size(); i++) {
        const std::string& op    = n.operators[i];
        Value              right = evaluate(*n.kids[i + 1], scope);
        position_                = n.offset;
        bool ok                  = false;
        if (op == "==" || op == "!=") ok = equal(runtime_.budget, left, right) == (op == "==");
        else if (op == "in" || op == "not in") ok = contains(runtime_, right, left) == (op == "in");
        else {
            const int  o       = order(runtime_.budget, left, right, op);
            const bool numbers = left.number() && right.number();
            if (op == "<") ok = o < 0;
            else if (op == "<=") ok = o <= 0;
            else if (op == ">") ok = numbers ? o == 1 : o > 0;
            else ok = numbers ? o == 0 || o == 1 : o >= 0;
        }
        if (!ok) return false;
        left = std::move(right);
    }
    return true;
}

// `input`: the text that a filter block or a set block captured; the innermost filter of the chain gets it.
Value Interpreter::filter(const Node& n, Scope* scope, const Value* input) {
    const Level     level(*this);
    const Value     v = !n.kids[0]                            ? (input ? *input : Value())
                        : n.kids[0]->kind == NodeKind::filter ? filter(*n.kids[0], scope, input)
                                                              : evaluate(*n.kids[0], scope);
    const Arguments a = arguments(n, scope);
    position_         = n.offset;
    return apply_filter(runtime_, n.text, v, a);
}

Value Interpreter::test(const Node& n, Scope* scope) {
    const Value     v = evaluate(*n.kids[0], scope);
    const Arguments a = arguments(n, scope);
    position_         = n.offset;
    return apply_test(runtime_, n.text, v, a, is_filter) != n.negated;
}

} // namespace quire::jinja
