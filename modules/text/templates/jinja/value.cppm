// quire.text.templates.jinja.value: the values that a template computes with, as Python's: text, numbers, lists, dicts. Every text knows which of
// its bytes came from input. A value **owns** its content together with its copies, except objects, which the Runtime owns.
export module quire.text.templates.jinja.value;

import quire.core.base;
import quire.core.json;
import quire.core.unicode;
import quire.core.unicode_data;
export import quire.text.marked_text;

export namespace quire::jinja {

// Thrown where a template cannot go on; rendering turns it into an Error with line and column.
struct Fault {
    std::string message;
    bool        refused = false; // by raise_exception(): the template's own words
};
template <class... Parts>
[[noreturn]] void fault(const Parts&... parts) {
    throw Fault{cat(parts...)};
}

inline constexpr int deepest = 100; // lists and dicts in one another

// The limits of one rendering.
struct Budget {
    std::int64_t steps     = 1'000'000;   // evaluated nodes, items and characters looked at
    std::size_t  bytes     = 256uz << 20; // of all texts and lists together
    std::size_t  longest   = 4uz << 20;   // of one text or of the output, in bytes
    std::size_t  items     = 1'000'000;   // of one list
    int          recursion = 64;          // macros in one another

    void step(std::int64_t n = 1) {
        if ((steps -= n) < 0) fault("the template takes too many steps");
    }
    // While so many bytes are looked at.
    void look(std::size_t n) { step(std::int64_t(n / 256)); }
    // While each of so many bytes is looked up in a table.
    void look_up(std::size_t n) { step(std::int64_t(n / 32)); }
    // While a text is taken apart: it has so many pieces by now.
    void piece(std::size_t n) {
        if (n > items) fault("a list becomes longer than ", items, " items");
        if (n % 8 == 0) step();
    }
    // While a text is made: it has so many bytes by now.
    void growing(std::size_t n) const {
        if (n > longest) fault("a text becomes longer than ", longest, " bytes");
    }
    // Before a text of so many bytes is made.
    void text(std::size_t n);
    void list(std::size_t n);
};

struct Text : MarkedText {
    bool safe = false; // made by `safe` or `escape`: another text that is added to it is escaped
};

struct List;
struct Dict;
struct Value;

struct Runtime;
struct Arguments;

// A value that is compared by identity: namespaces, macros, functions, the loop variable.
struct Object {
    virtual ~Object()                          = default;
    virtual std::string_view type_name() const = 0;
    virtual bool             callable() const { return false; }
    // Nothing when it has none of that name.
    virtual std::optional<Value> attribute(Runtime& runtime, std::string_view name);
    virtual Value                call(Runtime& runtime, const Arguments& arguments);
};

struct None {};
struct Undefined {
    std::shared_ptr<const std::string> why; // the error of its use
};

using TextRef = std::shared_ptr<const Text>;
using ListRef = std::shared_ptr<const List>;
using DictRef = std::shared_ptr<const Dict>;

struct Value {
    std::variant<Undefined, None, bool, std::int64_t, double, TextRef, ListRef, DictRef, Object*> data;

    Value() = default;
    Value(None n) : data(n) {}
    Value(Undefined u) : data(std::move(u)) {}
    Value(bool b) : data(b) {}
    Value(std::int64_t i) : data(i) {}
    Value(double d) : data(d) {}
    Value(TextRef t) : data(std::move(t)) {}
    Value(ListRef l) : data(std::move(l)) {}
    Value(DictRef d) : data(std::move(d)) {}
    Value(Object* o) : data(o) {}
    Value(Text t) : data(std::make_shared<const Text>(std::move(t))) {}
    Value(MarkedText t) : data(std::make_shared<const Text>(Text{std::move(t), false})) {}
    Value(std::string_view text, bool is_input = false);
    Value(const char* text) : Value(std::string_view(text)) {}
    Value(const void*) = delete;

    template <class T>
    const T* get() const {
        return std::get_if<T>(&data);
    }
    bool        undefined() const { return get<Undefined>(); }
    bool        none() const { return get<None>(); }
    const Text* text() const { return get<TextRef>() ? get<TextRef>()->get() : nullptr; }
    const List* list() const { return get<ListRef>() ? get<ListRef>()->get() : nullptr; }
    const Dict* dict() const { return get<DictRef>() ? get<DictRef>()->get() : nullptr; }
    Object*     object() const { return get<Object*>() ? *get<Object*>() : nullptr; }
    // bool counts as a number, as in Python.
    std::optional<std::int64_t> integer() const;
    std::optional<double>       number() const;
};

// Everything that is walked through item by item.
struct List {
    enum class Form { list, tuple, range, iterator, dict_keys, dict_values, dict_items };
    std::vector<Value>  items;
    Form                form  = Form::list;
    int                 depth = 1; // of lists and dicts in one another
    mutable std::size_t taken = 0; // items that an iterator has given away

    bool indexed() const { return form == Form::list || form == Form::tuple || form == Form::range; }
};

struct Dict {
    std::vector<std::pair<Value, Value>>              items; // in the order of insertion
    std::unordered_map<std::string_view, std::size_t> texts; // keys that are texts → place
    int                                               depth = 1;

    const Value* find(std::string_view key) const;
    const Value* find(Budget& budget, const Value& key) const;
    void         add(Value key, Value value); // a key that is not there
    void         set(Budget& budget, Value key, Value value);
};

struct Namespace : Object {
    std::vector<std::pair<std::string, Value>> items;
    std::string_view                           type_name() const override { return "Namespace"; }
    std::optional<Value>                       attribute(Runtime& runtime, std::string_view name) override;
    void set(Budget& budget, std::string_view name, Value value); // error: a name with an underscore in front
};

// The memory and the limits of one rendering. Objects live as long as it does, so that they may refer to each other.
struct Runtime {
    Budget                               budget;
    std::vector<std::unique_ptr<Object>> objects;
    std::int64_t                         now = 0; // seconds since 1970, in local time as if it were UTC

    template <class T, class... Arguments>
    T* make(Arguments&&... arguments) {
        auto made = std::make_unique<T>(std::forward<Arguments>(arguments)...);
        T*   raw  = made.get();
        objects.push_back(std::move(made));
        return raw;
    }
};

// Arguments of a call, filter or test.
struct Arguments {
    std::vector<Value>                         positional;
    std::vector<std::pair<std::string, Value>> named;

    // By place or name; null where it was not given.
    const Value* get(std::size_t place, std::string_view name) const;
    // Error when something else was given than these.
    void only(std::string_view function, std::initializer_list<std::string_view> names) const;
};

Value undefined(std::string why);
Value make_list(Runtime& runtime, std::vector<Value> items, List::Form form = List::Form::list);
Value make_dict(Runtime& runtime, Dict dict); // checks the limits
// As the JSON says, with every text marked as input; the roles of messages are the template's territory, so `role` is not marked.
Value from_json(const Json& json, bool is_input);

std::string_view type_name(const Value& value);
bool             truth(const Value& value);
// Each pair that is compared is a step: values that share their items are compared as often as they occur.
bool equal(Budget& budget, const Value& a, const Value& b, int depth = 0);
// Before, equal or after: negative, 0, positive. Error: types without an order. `op`: for the message.
int order(Budget& budget, const Value& a, const Value& b, std::string_view op);
// The items of anything that Python can iterate. Error: not iterable.
std::vector<Value> iterate(Runtime& runtime, const Value& value);
bool               iterable(const Value& value);
bool               contains(Runtime& runtime, const Value& container, const Value& item);
std::size_t        length(Budget& budget, const Value& value);

// Where `what` begins in `text`, at `from` or behind it, or with rfind() at `from` or before it; npos: nowhere. The budget pays for the
// bytes that are compared, which may be many more than the text has.
std::size_t find(Budget& budget, std::string_view text, std::string_view what, std::size_t from = 0);
std::size_t rfind(Budget& budget, std::string_view text, std::string_view what,
                  std::size_t from = std::string_view::npos);

// Characters, not bytes.
std::size_t count_characters(std::string_view text);
bool        is_blank(char32_t c); // characters that Python's str.strip() removes

} // namespace quire::jinja

module :private;

namespace quire::jinja {

void Budget::text(std::size_t n) {
    growing(n);
    if (n > bytes) fault("the template's texts need too much memory");
    bytes -= n;
    look(n);
}

void Budget::list(std::size_t n) {
    if (n > items) fault("a list becomes longer than ", items, " items");
    const std::size_t size = n * sizeof(Value);
    if (size > bytes) fault("the template's lists need too much memory");
    bytes -= size;
    step(std::int64_t(n / 16));
}

Value::Value(std::string_view text, bool is_input) {
    Text t;
    t.append(text, is_input);
    data = std::make_shared<const Text>(std::move(t));
}

std::optional<std::int64_t> Value::integer() const {
    if (const auto* i = get<std::int64_t>()) return *i;
    if (const auto* b = get<bool>()) return *b ? 1 : 0;
    return std::nullopt;
}

std::optional<double> Value::number() const {
    if (const auto* d = get<double>()) return *d;
    if (const auto i = integer()) return double(*i);
    return std::nullopt;
}

const Value* Dict::find(std::string_view key) const {
    const auto at = texts.find(key);
    return at == texts.end() ? nullptr : &items[at->second].second;
}

const Value* Dict::find(Budget& budget, const Value& key) const {
    if (const Text* t = key.text()) {
        budget.look(t->bytes.size());
        return find(std::string_view(t->bytes));
    }
    for (const auto& [k, v] : items)
        if (!k.text() && equal(budget, k, key)) return &v;
    return nullptr;
}

int depth_of(const Value& v) { return v.list() ? v.list()->depth : v.dict() ? v.dict()->depth : 0; }

void Dict::add(Value key, Value value) {
    depth = std::max({depth, depth_of(value) + 1, depth_of(key) + 1});
    if (const Text* t = key.text()) texts.emplace(t->bytes, items.size());
    items.emplace_back(std::move(key), std::move(value));
}

void Dict::set(Budget& budget, Value key, Value value) {
    budget.step();
    if (key.dict() || (key.list() && key.list()->form != List::Form::tuple) || key.undefined())
        fault("unhashable type: '", type_name(key), "'");
    Value* const old = const_cast<Value*>(find(budget, key)); // NOLINT: the dict itself is not const here
    if (!old) return add(std::move(key), std::move(value));
    depth = std::max(depth, depth_of(value) + 1);
    *old  = std::move(value);
}

std::optional<Value> Object::attribute(Runtime&, std::string_view) { return std::nullopt; }
Value                Object::call(Runtime&, const Arguments&) { fault("'", type_name(), "' object is not callable"); }

std::optional<Value> Namespace::attribute(Runtime& runtime, std::string_view name) {
    runtime.budget.step(std::int64_t(items.size() / 64));
    for (const auto& [n, v] : items)
        if (n == name) return v;
    return std::nullopt;
}

void Namespace::set(Budget& budget, std::string_view name, Value value) {
    budget.step(std::int64_t(items.size() / 64));
    if (name.starts_with('_'))
        fault("a namespace cannot have the attribute ", quote(name), ": its name begins with an underscore");
    for (auto& [n, v] : items)
        if (n == name) {
            v = std::move(value);
            return;
        }
    items.emplace_back(name, std::move(value));
}

const Value* Arguments::get(std::size_t place, std::string_view name) const {
    if (place < positional.size()) return &positional[place];
    for (const auto& [n, v] : named)
        if (n == name) return &v;
    return nullptr;
}

void Arguments::only(std::string_view function, std::initializer_list<std::string_view> names) const {
    if (positional.size() > names.size())
        fault(function, "() takes at most ", names.size(), " arguments (", positional.size(), " given)");
    for (const auto& [n, v] : named) {
        const auto* at = std::find(names.begin(), names.end(), std::string_view(n));
        if (at == names.end()) fault(function, "() got an unexpected keyword argument '", n, "'");
        if (std::size_t(at - names.begin()) < positional.size())
            fault(function, "() got multiple values for argument '", n, "'");
    }
}

Value undefined(std::string why) { return Undefined{std::make_shared<const std::string>(std::move(why))}; }

Value make_list(Runtime& runtime, std::vector<Value> items, List::Form form) {
    runtime.budget.list(items.size());
    List list;
    for (const Value& v : items) list.depth = std::max(list.depth, depth_of(v) + 1);
    if (list.depth > deepest) fault("lists are nested deeper than ", deepest);
    list.items = std::move(items);
    list.form  = form;
    return std::make_shared<const List>(std::move(list));
}

Value make_dict(Runtime& runtime, Dict dict) {
    runtime.budget.list(dict.items.size() * 4);
    if (dict.depth > deepest) fault("dicts are nested deeper than ", deepest);
    return std::make_shared<const Dict>(std::move(dict));
}

bool is_known_role(const Json& json) {
    constexpr std::array<std::string_view, 8> known{"system",    "user",     "assistant", "tool",
                                                    "developer", "function", "ipython",   "model"};
    return json.is_string() &&
           std::ranges::find(known, std::string_view(json.get_ref<const std::string&>())) != known.end();
}

Value from_json(const Json& json, bool is_input) {
    if (json.is_boolean()) return json.get<bool>();
    if (json.is_number_unsigned() &&
        json.get<std::uint64_t>() > std::uint64_t(std::numeric_limits<std::int64_t>::max()))
        fault("the number ", json.get<std::uint64_t>(), " has more than 63 bits");
    if (json.is_number_integer()) return json.get<std::int64_t>();
    if (json.is_number_float()) return json.get<double>();
    if (json.is_string()) return Value(std::string_view(json.get_ref<const std::string&>()), is_input);
    if (json.is_array()) {
        List list;
        list.items.reserve(json.size());
        for (const Json& item : json) {
            list.items.push_back(from_json(item, is_input));
            list.depth = std::max(list.depth, depth_of(list.items.back()) + 1);
        }
        return std::make_shared<const List>(std::move(list));
    }
    if (json.is_object()) {
        Dict dict;
        for (const auto& [key, value] : json.get_ref<const Json::object_t&>())
            dict.add(Value(std::string_view(key), is_input),
                     from_json(value, is_input && !(key == "role" && is_known_role(value))));
        return std::make_shared<const Dict>(std::move(dict));
    }
    return None{};
}

std::string_view type_name(const Value& v) {
    switch (v.data.index()) {
        case 0: return "Undefined";
        case 1: return "NoneType";
        case 2: return "bool";
        case 3: return "int";
        case 4: return "float";
        case 5: return "str";
        case 6: break;
        case 7: return "dict";
        default: return v.object()->type_name();
    }
    switch (v.list()->form) {
        case List::Form::list: return "list";
        case List::Form::tuple: return "tuple";
        case List::Form::range: return "range";
        case List::Form::iterator: return "generator";
        case List::Form::dict_keys: return "dict_keys";
        case List::Form::dict_values: return "dict_values";
        case List::Form::dict_items: return "dict_items";
    }
    return "list";
}

bool truth(const Value& v) {
    if (const auto* b = v.get<bool>()) return *b;
    if (const auto* i = v.get<std::int64_t>()) return *i != 0;
    if (const auto* d = v.get<double>()) return *d != 0;
    if (const Text* t = v.text()) return !t->bytes.empty();
    if (const List* l = v.list()) return l->form == List::Form::iterator || !l->items.empty();
    if (const Dict* d = v.dict()) return !d->items.empty();
    return v.object() != nullptr;
}

// A double and an integer are compared exactly: not every 64-bit integer is a double.
int order_numbers(const Value& a, const Value& b, bool& unordered) {
    unordered = false;
    if (a.integer() && b.integer()) return *a.integer() < *b.integer() ? -1 : *a.integer() > *b.integer();
    const double x = *a.number(), y = *b.number();
    unordered = std::isnan(x) || std::isnan(y);
    return x < y ? -1 : x > y;
}

bool equal(Budget& budget, const Value& a, const Value& b, int depth) {
    budget.step();
    if (depth > deepest) fault("values are nested too deep to be compared");
    if (a.number() && b.number()) {
        bool      unordered = false;
        const int o         = order_numbers(a, b, unordered);
        return o == 0 && !unordered;
    }
    if (a.data.index() != b.data.index()) return false;
    if (const Text *t = a.text(), *u = b.text(); t) {
        if (t->bytes.size() != u->bytes.size()) return false;
        budget.look(t->bytes.size());
        return t->bytes == u->bytes;
    }
    if (const List* l = a.list()) {
        const List* m = b.list();
        if (l == m) return true;
        if (l->form != m->form || !l->indexed() || l->items.size() != m->items.size()) return false;
        for (std::size_t i = 0; i < l->items.size(); i++)
            if (!equal(budget, l->items[i], m->items[i], depth + 1)) return false;
        return true;
    }
    if (const Dict* d = a.dict()) {
        const Dict* e = b.dict();
        if (d->items.size() != e->items.size()) return false;
        for (const auto& [k, v] : d->items) {
            const Value* other = e->find(budget, k);
            if (!other || !equal(budget, v, *other, depth + 1)) return false;
        }
        return true;
    }
    if (a.object()) return a.object() == b.object();
    return true; // both undefined, or both None
}

int order(Budget& budget, const Value& a, const Value& b, std::string_view op) {
    if (a.number() && b.number()) {
        bool      unordered = false;
        const int o         = order_numbers(a, b, unordered);
        return unordered ? 2 : o; // NaN: neither below nor equal
    }
    if (a.text() && b.text()) {
        budget.look(std::min(a.text()->bytes.size(), b.text()->bytes.size()));
        return a.text()->bytes.compare(b.text()->bytes);
    }
    if (const List *l = a.list(), *m = b.list();
        l && m && l->form == m->form && l->indexed() && l->form != List::Form::range) {
        for (std::size_t i = 0; i < std::min(l->items.size(), m->items.size()); i++)
            if (!equal(budget, l->items[i], m->items[i])) return order(budget, l->items[i], m->items[i], op);
        return l->items.size() < m->items.size() ? -1 : l->items.size() > m->items.size();
    }
    for (const Value* v : {&a, &b})
        if (const auto* u = v->get<Undefined>()) fault(u->why ? *u->why : "a value is undefined");
    fault("'", op, "' not supported between instances of '", type_name(a), "' and '", type_name(b), "'");
}

bool iterable(const Value& v) { return v.text() || v.list() || v.dict() || v.undefined(); }

std::vector<Value> iterate(Runtime& runtime, const Value& v) {
    std::vector<Value> out;
    if (const List* l = v.list()) {
        runtime.budget.list(l->items.size() - l->taken);
        out.assign(l->items.begin() + std::ptrdiff_t(l->taken), l->items.end());
        if (l->form == List::Form::iterator) l->taken = l->items.size();
    } else if (const Dict* d = v.dict()) {
        runtime.budget.list(d->items.size());
        for (const auto& [key, value] : d->items) out.push_back(key);
    } else if (const Text* t = v.text()) {
        runtime.budget.list(t->bytes.size() * 4);
        for (std::size_t at = 0, n; at < t->bytes.size(); at += n) {
            n = std::size_t(utf8_next(t->bytes, at).bytes);
            out.emplace_back(t->slice(at, at + n));
        }
    } else if (!v.undefined()) {
        fault("'", type_name(v), "' object is not iterable");
    }
    return out;
}

bool contains(Runtime& runtime, const Value& container, const Value& item) {
    if (const Text* t = container.text()) {
        if (!item.text()) fault("'in <string>' requires string as left operand, not ", type_name(item));
        return find(runtime.budget, t->bytes, item.text()->bytes) != std::string_view::npos;
    }
    if (const Dict* d = container.dict()) return d->find(runtime.budget, item) != nullptr;
    if (const List* l = container.list())
        return std::ranges::any_of(l->items, [&](const Value& v) { return equal(runtime.budget, v, item); });
    if (container.undefined()) return false;
    fault("argument of type '", type_name(container), "' is not iterable");
}

std::size_t length(Budget& budget, const Value& v) {
    if (const Text* t = v.text()) {
        budget.look(t->bytes.size());
        return count_characters(t->bytes);
    }
    if (const List* l = v.list(); l && l->form != List::Form::iterator) return l->items.size();
    if (const Dict* d = v.dict()) return d->items.size();
    if (v.undefined()) return 0;
    fault("object of type '", type_name(v), "' has no len()");
}

// One or many comparisons with beginnings of `what`, which the budget pays for before they become many.
class Comparisons {
public:
    Comparisons(Budget& budget, std::string_view what) : budget_(budget), what_(what) {}
    Comparisons(const Comparisons&)            = delete;
    Comparisons& operator=(const Comparisons&) = delete;

    // Whether it stands at the beginning of `text`, which is not shorter. `passed`: bytes that were looked at before that place.
    bool holds(std::string_view text, std::size_t passed) {
        const auto same = std::size_t(std::mismatch(what_.begin(), what_.end(), text.begin()).first - what_.begin());
        looked_ += passed + same + 16;
        if (looked_ >= 65536) budget_.look(std::exchange(looked_, 0));
        return same == what_.size();
    }
    std::size_t end(std::size_t found, std::size_t passed) {
        budget_.look(looked_ + passed);
        return found;
    }

private:
    Budget&          budget_;
    std::string_view what_;
    std::size_t      looked_ = 0; // not paid for yet
};

std::size_t find(Budget& budget, std::string_view text, std::string_view what, std::size_t from) {
    if (what.empty() || from > text.size() || what.size() > text.size() - from) return text.find(what, from);
    const std::string_view beginnings = text.substr(0, text.size() - what.size() + 1);
    Comparisons            comparisons(budget, what);
    for (std::size_t at = from;; at++) {
        const std::size_t next = beginnings.find(what[0], at);
        if (next == std::string_view::npos) return comparisons.end(next, beginnings.size() - at);
        if (comparisons.holds(text.substr(next), next - at)) return comparisons.end(next, 0);
        at = next;
    }
}

std::size_t rfind(Budget& budget, std::string_view text, std::string_view what, std::size_t from) {
    if (what.empty() || what.size() > text.size()) return text.rfind(what, from);
    Comparisons comparisons(budget, what);
    for (std::size_t at = std::min(from, text.size() - what.size());; at--) {
        const std::size_t next = text.rfind(what[0], at);
        if (next == std::string_view::npos) return comparisons.end(next, at);
        if (comparisons.holds(text.substr(next), at - next)) return comparisons.end(next, 0);
        if (next == 0) return comparisons.end(std::string_view::npos, 0);
        at = next;
    }
}

std::size_t count_characters(std::string_view text) {
    return std::size_t(
        std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

bool is_blank(char32_t c) { return (c >= 9 && c <= 13) || (c >= 28 && c <= 32) || (c > 127 && is_white_space(c)); }

} // namespace quire::jinja
