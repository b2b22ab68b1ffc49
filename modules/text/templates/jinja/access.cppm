// quire.text.templates.jinja.access: x.name, x[key], x[a:b:c], methods of lists and dicts, arithmetic. A method that would change its value is refused, as in
// Jinja's immutable sandbox. Owns nothing.
export module quire.text.templates.jinja.access;

import quire.core.base;
import quire.core.unicode;
export import quire.text.marked_text;
import quire.text.templates.jinja.ast;
import quire.text.templates.jinja.text_format;
import quire.text.templates.jinja.text_methods;
export import quire.text.templates.jinja.value;
import quire.text.templates.jinja.value_text;

export namespace quire::jinja {

// `"x".upper` before it is called.
struct BoundMethod : Object {
    Value       self;
    std::string name;
    BoundMethod(Value s, std::string_view n) : self(std::move(s)), name(n) {}
    std::string_view type_name() const override { return "method"; }
    bool             callable() const override { return true; }
    Value            call(Runtime& runtime, const Arguments& arguments) override;
};

bool  has_method(const Value& self, std::string_view name);
Value call_method(Runtime& runtime, const Value& self, std::string_view name, const Arguments& arguments);

// x.name: Python's attribute of that name, else the item of that name; undefined when there is neither.
Value get_attribute(Runtime& runtime, const Value& object, std::string_view name);
// x[key]: the item, then the attribute.
Value get_item(Runtime& runtime, const Value& object, const Value& key);
// "a.b.0", as the filters' `attribute` has it.
Value get_path(Runtime& runtime, Value object, const Value& path);
Value get_slice(Runtime& runtime, const Value& object, const Value& begin, const Value& end, const Value& step);

Value arithmetic(Runtime& runtime, NodeKind op, const Value& left, const Value& right);
Value negate(const Value& value);

// Where a value is used that must be there.
void must_be_defined(const Value& value);

MarkedText escape_html(Runtime& runtime, const Text& text);

} // namespace quire::jinja

module :private;

namespace quire::jinja {

void must_be_defined(const Value& v) {
    if (const auto* u = v.get<Undefined>()) fault(u->why ? *u->why : "a value is undefined");
}

constexpr std::array<std::string_view, 8> changing_list{"append", "clear", "pop",    "reverse",
                                                        "insert", "sort",  "extend", "remove"};
constexpr std::array<std::string_view, 5> changing_dict{"clear", "pop", "popitem", "setdefault", "update"};

template <std::size_t n>
bool among(const std::array<std::string_view, n>& names, std::string_view name) {
    return std::ranges::find(names, name) != names.end();
}

bool has_method(const Value& v, std::string_view name) {
    if (v.text()) return is_text_method(name);
    if (v.dict()) return name == "items" || name == "keys" || name == "values" || name == "get" || name == "copy";
    if (const List* l = v.list()) {
        if (l->form == List::Form::list && name == "copy") return true;
        return l->indexed() && (name == "index" || name == "count");
    }
    return false;
}

Value call_method(Runtime& runtime, const Value& self, std::string_view name, const Arguments& a) {
    if (const auto* t = self.get<TextRef>()) return call_text_method(runtime, *t, name, a);
    if (const Dict* d = self.dict()) {
        if (name == "get") {
            a.only("get", {"key", "default"});
            if (a.positional.empty()) fault("get expected at least 1 argument, got 0");
            const Value* found = d->find(runtime.budget, a.positional[0]);
            if (found) return *found;
            return a.positional.size() > 1 ? a.positional[1] : Value(None{});
        }
        a.only(name, {});
        if (name == "copy") return self;
        std::vector<Value> out;
        for (const auto& [key, value] : d->items) {
            if (name == "keys") out.push_back(key);
            else if (name == "values") out.push_back(value);
            else out.push_back(make_list(runtime, {key, value}, List::Form::tuple));
        }
        return make_list(runtime, std::move(out),
                         name == "keys"     ? List::Form::dict_keys
                         : name == "values" ? List::Form::dict_values
                                            : List::Form::dict_items);
    }
    if (const List* l = self.list()) {
        if (name == "copy") return self;
        a.only(name, {"value"});
        if (a.positional.empty()) fault(name, "() takes exactly one argument (0 given)");
        std::int64_t n = 0;
        for (std::size_t i = 0; i < l->items.size(); i++) {
            if (!equal(runtime.budget, l->items[i], a.positional[0])) continue;
            if (name == "index") return std::int64_t(i);
            n++;
        }
        if (name == "index") fault("the value is not in the list");
        return n;
    }
    fault("'", type_name(self), " object' has no attribute '", name, "'");
}

Value BoundMethod::call(Runtime& runtime, const Arguments& arguments) {
    return call_method(runtime, self, name, arguments);
}

Value missing(const Value& object, std::string_view name) {
    return undefined(object.none() ? cat("'None' has no attribute '", name, "'")
                                   : cat("'", type_name(object), " object' has no attribute '", name, "'"));
}

// The attribute, or nothing.
std::optional<Value> attribute_of(Runtime& runtime, const Value& object, std::string_view name) {
    const bool changing = (object.list() && object.list()->form == List::Form::list && among(changing_list, name)) ||
                          (object.dict() && among(changing_dict, name));
    if (changing || (name.starts_with('_') && !object.dict() && !dynamic_cast<Namespace*>(object.object())))
        return undefined(cat("access to attribute '", name, "' of '", type_name(object), "' object is unsafe."));
    if (has_method(object, name)) return Value(runtime.make<BoundMethod>(object, name));
    return object.object() ? object.object()->attribute(runtime, name) : std::nullopt;
}

Value get_attribute(Runtime& runtime, const Value& object, std::string_view name) {
    must_be_defined(object);
    runtime.budget.step();
    runtime.budget.look(name.size());
    if (auto v = attribute_of(runtime, object, name)) return *v;
    if (const Dict* d = object.dict())
        if (const Value* v = d->find(name)) return *v;
    return missing(object, name);
}

Value get_item(Runtime& runtime, const Value& object, const Value& key) {
    must_be_defined(object);
    runtime.budget.step();
    if (const Dict* d = object.dict()) {
        if (const Value* v = d->find(runtime.budget, key)) return *v;
    } else if (const auto index = key.integer();
               index && (object.text() || (object.list() && object.list()->indexed()))) {
        const auto         n = std::int64_t(length(runtime.budget, object));
        const std::int64_t i = *index < 0 ? *index + n : *index;
        if (i < 0 || i >= n) return undefined(cat(type_name(object), " object has no element ", *index));
        if (const List* l = object.list()) return l->items[std::size_t(i)];
        runtime.budget.text(object.text()->bytes.size());
        const TextSpan s = characters(object.text()->bytes, std::size_t(i), std::size_t(i) + 1);
        return object.text()->slice(s.begin, s.end);
    }
    if (const Text* name = key.text()) {
        runtime.budget.look(name->bytes.size());
        if (auto v = attribute_of(runtime, object, name->bytes)) return *v;
        return missing(object, name->bytes);
    }
    std::string shown = to_str(runtime, key).bytes;
    return undefined(cat(type_name(object), " object has no element ", shown));
}

Value get_path(Runtime& runtime, Value object, const Value& path) {
    if (!path.text()) return get_item(runtime, object, path);
    for (std::string_view part : split(path.text()->bytes, '.')) {
        const auto index = to_number<std::int64_t>(part);
        object           = get_item(runtime, object, index ? Value(*index) : Value(part));
    }
    return object;
}

Value get_slice(Runtime& runtime, const Value& object, const Value& begin, const Value& end, const Value& step) {
    must_be_defined(object);
    if (!object.text() && !(object.list() && object.list()->indexed()))
        return undefined(cat(type_name(object), " object cannot be sliced"));
    for (const Value* v : {&begin, &end, &step}) {
        must_be_defined(*v);
        if (!v->none() && !v->integer()) return undefined("slice indices must be integers or None");
    }
    const auto         n  = std::int64_t(length(runtime.budget, object));
    const std::int64_t by = step.integer().value_or(1);
    if (by == 0) fault("slice step cannot be zero");
    auto bound = [&](const Value& v, std::int64_t fallback) {
        if (!v.integer()) return fallback;
        const std::int64_t i = *v.integer() < 0 ? *v.integer() + n : *v.integer();
        return by > 0 ? std::clamp<std::int64_t>(i, 0, n) : std::clamp<std::int64_t>(i, -1, n - 1);
    };
    const std::int64_t from = bound(begin, by > 0 ? 0 : n - 1), to = bound(end, by > 0 ? n : -1);
    if (const Text* t = object.text()) {
        runtime.budget.text(t->bytes.size());
        if (by == 1) {
            const TextSpan s = characters(t->bytes, std::size_t(from), std::size_t(std::max(from, to)));
            return t->slice(s.begin, s.end);
        }
        runtime.budget.look_up(t->bytes.size());
        std::vector<std::size_t> starts;
        for (std::size_t at = 0; at < t->bytes.size(); at += std::size_t(utf8_next(t->bytes, at).bytes))
            starts.push_back(at);
        starts.push_back(t->bytes.size());
        MarkedText out;
        for (std::int64_t i = from; by > 0 ? i < to : i > to;) {
            out.append(*t, starts[std::size_t(i)], starts[std::size_t(i) + 1]);
            if (by > n || by < -n) break;
            i += by;
        }
        return out;
    }
    std::vector<Value> out;
    for (std::int64_t i = from; by > 0 ? i < to : i > to;) {
        out.push_back(object.list()->items[std::size_t(i)]);
        if (by > n || by < -n) break;
        i += by;
    }
    return make_list(runtime, std::move(out), object.list()->form);
}

// -- arithmetic

MarkedText escape_html(Runtime& runtime, const Text& text) {
    MarkedText out;
    text.for_each_part([&](std::string_view part, bool is_input) {
        std::string made;
        for (char c : part) {
            if (c == '&') made += "&amp;";
            else if (c == '<') made += "&lt;";
            else if (c == '>') made += "&gt;";
            else if (c == '"') made += "&#34;";
            else if (c == '\'') made += "&#39;";
            else made += c;
        }
        out.append(made, is_input);
    });
    runtime.budget.text(out.bytes.size());
    return out;
}

Value add_texts(Runtime& runtime, const Text& a, const Text& b) {
    runtime.budget.text(a.bytes.size() + b.bytes.size());
    Text out;
    out.safe = a.safe || b.safe;
    out.bytes.reserve(a.bytes.size() + b.bytes.size());
    if (out.safe && !a.safe) out.append(escape_html(runtime, a));
    else out.append(a);
    if (out.safe && !b.safe) out.append(escape_html(runtime, b));
    else out.append(b);
    runtime.budget.growing(out.bytes.size());
    return out;
}

Value repeat(Runtime& runtime, const Value& what, std::int64_t times) {
    times                  = std::max<std::int64_t>(times, 0);
    const std::size_t size = what.text() ? what.text()->bytes.size() : what.list()->items.size();
    if (size == 0 || times == 0) times = 0;
    if (std::uint64_t(times) > runtime.budget.longest) fault("a text or list is repeated too often");
    if (const Text* t = what.text()) {
        runtime.budget.text(size * std::size_t(times));
        MarkedText out;
        for (std::int64_t i = 0; i < times; i++) out.append(*t);
        return out;
    }
    runtime.budget.list(size * std::size_t(times));
    std::vector<Value> out;
    for (std::int64_t i = 0; i < times; i++)
        out.insert(out.end(), what.list()->items.begin(), what.list()->items.end());
    return make_list(runtime, std::move(out), what.list()->form);
}

Value integer_power(std::int64_t base, std::int64_t exponent) {
    if (exponent < 0) {
        if (base == 0) fault("0 cannot be raised to a negative power");
        return std::pow(double(base), double(exponent));
    }
    std::int64_t out = 1;
    for (; exponent > 0; exponent >>= 1) {
        if ((exponent & 1) && __builtin_mul_overflow(out, base, &out)) fault("an integer has more than 64 bits");
        if (exponent > 1 && __builtin_mul_overflow(base, base, &base)) fault("an integer has more than 64 bits");
    }
    return out;
}

[[noreturn]] void wrong_operands(std::string_view op, const Value& a, const Value& b) {
    must_be_defined(a);
    must_be_defined(b);
    fault("unsupported operand type(s) for ", op, ": '", type_name(a), "' and '", type_name(b), "'");
}

Value integers(NodeKind op, std::int64_t x, std::int64_t y) {
    std::int64_t out      = 0;
    bool         overflow = false;
    switch (op) {
        case NodeKind::add: overflow = __builtin_add_overflow(x, y, &out); break;
        case NodeKind::subtract: overflow = __builtin_sub_overflow(x, y, &out); break;
        case NodeKind::multiply: overflow = __builtin_mul_overflow(x, y, &out); break;
        case NodeKind::power: return integer_power(x, y);
        default:
            if (y == 0) fault(op == NodeKind::divide ? "division by zero" : "integer division or modulo by zero");
            if (op == NodeKind::divide) return double(x) / double(y);
            if (y == -1) { // the smallest integer has no opposite
                if (op == NodeKind::modulo) return std::int64_t(0);
                overflow = __builtin_sub_overflow(std::int64_t(0), x, &out);
                break;
            }
            const std::int64_t quotient = x / y, rest = x % y;
            const bool         down = rest != 0 && (rest < 0) != (y < 0); // Python rounds down
            out                     = op == NodeKind::modulo ? rest + (down ? y : 0) : quotient - (down ? 1 : 0);
    }
    if (overflow) fault("an integer has more than 64 bits");
    return out;
}

Value reals(NodeKind op, double x, double y) {
    switch (op) {
        case NodeKind::add: return x + y;
        case NodeKind::subtract: return x - y;
        case NodeKind::multiply: return x * y;
        case NodeKind::power:
            if (x == 0 && y < 0) fault("0.0 cannot be raised to a negative power");
            if (x < 0 && y != std::floor(y)) fault("the power would be a complex number");
            return std::pow(x, y);
        default: break;
    }
    if (y == 0) fault("float division by zero");
    if (op == NodeKind::divide) return x / y;
    double rest = std::fmod(x, y);
    if (rest != 0 && (rest < 0) != (y < 0)) rest += y;
    if (op == NodeKind::modulo) return rest == 0 ? std::copysign(0.0, y) : rest;
    return std::floor((x - rest) / y + 0.5);
}

Value arithmetic(Runtime& runtime, NodeKind op, const Value& a, const Value& b) {
    runtime.budget.step();
    const std::string_view name = op == NodeKind::add            ? "+"
                                  : op == NodeKind::subtract     ? "-"
                                  : op == NodeKind::multiply     ? "*"
                                  : op == NodeKind::divide       ? "/"
                                  : op == NodeKind::floor_divide ? "//"
                                  : op == NodeKind::modulo       ? "%"
                                                                 : "** or pow()";
    if (op == NodeKind::add && a.text() && b.text()) return add_texts(runtime, *a.text(), *b.text());
    if (op == NodeKind::add && a.text() && !b.undefined())
        fault("can only concatenate str (not \"", type_name(b), "\") to str");
    if (op == NodeKind::add && a.list() && b.list() && a.list()->form == b.list()->form && a.list()->indexed() &&
        a.list()->form != List::Form::range) {
        runtime.budget.list(a.list()->items.size() + b.list()->items.size());
        std::vector<Value> out = a.list()->items;
        out.insert(out.end(), b.list()->items.begin(), b.list()->items.end());
        return make_list(runtime, std::move(out), a.list()->form);
    }
    if (op == NodeKind::modulo && a.text()) return format_percent(runtime, *a.text(), b);
    if (op == NodeKind::multiply) {
        auto many = [](const Value& v) {
            return v.text() || (v.list() && v.list()->indexed() && v.list()->form != List::Form::range);
        };
        if (many(a) && b.integer()) return repeat(runtime, a, *b.integer());
        if (many(b) && a.integer()) return repeat(runtime, b, *a.integer());
    }
    if (a.integer() && b.integer()) return integers(op, *a.integer(), *b.integer());
    if (a.number() && b.number()) return reals(op, *a.number(), *b.number());
    wrong_operands(name, a, b);
}

Value negate(const Value& v) {
    if (const auto i = v.integer()) {
        if (*i == std::numeric_limits<std::int64_t>::min()) fault("an integer has more than 64 bits");
        return -*i;
    }
    if (const auto d = v.number()) return -*d;
    must_be_defined(v);
    fault("bad operand type for unary -: '", type_name(v), "'");
}

} // namespace quire::jinja
