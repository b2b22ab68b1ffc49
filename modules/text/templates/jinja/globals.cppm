// quire.text.templates.jinja.globals: the functions that every template can call: range, dict, namespace, cycler, joiner, and the functions that
// transformers adds, raise_exception and strftime_now. Owns nothing.
module;

#include <ctime>

export module quire.text.templates.jinja.globals;

import quire.core.base;
import quire.text.templates.jinja.access;
import quire.text.templates.jinja.value_text;

export namespace quire::jinja {

struct Function : Object {
    using Body = Value (*)(Runtime& runtime, const Arguments& arguments);
    Body body;
    explicit Function(Body b) : body(b) {}
    std::string_view type_name() const override { return "function"; }
    bool             callable() const override { return true; }
    Value            call(Runtime& runtime, const Arguments& arguments) override { return body(runtime, arguments); }
};

struct Global {
    std::string_view name;
    Function::Body   body;
};

std::span<const Global> globals();

} // namespace quire::jinja

module :private;

namespace quire::jinja {

struct Cycler : Object {
    std::vector<Value> items;
    std::size_t        at = 0;
    std::string_view   type_name() const override { return "Cycler"; }
    struct Method : Object {
        Cycler& cycler;
        bool    resets;
        Method(Cycler& c, bool r) : cycler(c), resets(r) {}
        std::string_view type_name() const override { return "method"; }
        bool             callable() const override { return true; }
        Value            call(Runtime&, const Arguments&) override {
            const std::size_t now = cycler.at;
            cycler.at             = resets ? 0 : (now + 1) % cycler.items.size();
            return resets ? Value(None{}) : cycler.items[now];
        }
    };
    std::optional<Value> attribute(Runtime& runtime, std::string_view name) override {
        if (name == "current") return items[at];
        if (name == "next" || name == "reset") return Value(runtime.make<Method>(*this, name == "reset"));
        return std::nullopt;
    }
};

struct Joiner : Object {
    Value separator;
    bool  used = false;
    explicit Joiner(Value s) : separator(std::move(s)) {}
    std::string_view type_name() const override { return "Joiner"; }
    bool             callable() const override { return true; }
    Value call(Runtime&, const Arguments&) override { return std::exchange(used, true) ? separator : Value(""); }
};

Value range(Runtime& runtime, const Arguments& a) {
    if (a.positional.empty() || a.positional.size() > 3 || !a.named.empty()) fault("range expected 1 to 3 arguments");
    std::array<std::int64_t, 3> n{0, 0, 1};
    for (std::size_t i = 0; i < a.positional.size(); i++) {
        must_be_defined(a.positional[i]);
        if (!a.positional[i].integer())
            fault("'", type_name(a.positional[i]), "' object cannot be interpreted as an integer");
        n[a.positional.size() == 1 ? 1 : i] = *a.positional[i].integer();
    }
    const auto [begin, end, step] = n;
    if (step == 0) fault("range() arg 3 must not be zero");
    constexpr std::uint64_t most  = 100'000;
    const bool              empty = step > 0 ? begin >= end : begin <= end;
    const std::uint64_t     span  = empty      ? 0
                                    : step > 0 ? std::uint64_t(end) - std::uint64_t(begin)
                                               : std::uint64_t(begin) - std::uint64_t(end);
    const std::uint64_t     by    = step > 0 ? std::uint64_t(step) : 0 - std::uint64_t(step);
    const std::uint64_t     size  = span / by + (span % by ? 1 : 0);
    if (size > most) fault("Range too big. The sandbox blocks ranges larger than MAX_RANGE (", most, ").");
    runtime.budget.list(size);
    std::vector<Value> items;
    for (std::uint64_t i = 0; i < size; i++)
        items.emplace_back(std::int64_t(std::uint64_t(begin) + i * std::uint64_t(step)));
    return make_list(runtime, std::move(items), List::Form::range);
}

Dict dict_of(Runtime& runtime, const Arguments& a) {
    Dict out;
    if (a.positional.size() > 1) fault("dict expected at most 1 argument, got ", a.positional.size());
    if (!a.positional.empty()) {
        const Value& from = a.positional[0];
        if (const Dict* d = from.dict()) {
            for (const auto& [key, value] : d->items) out.set(runtime.budget, key, value);
        } else {
            for (const Value& item : iterate(runtime, from)) {
                std::vector<Value> pair = iterate(runtime, item);
                if (pair.size() != 2) fault("a dict is made of pairs, not of ", pair.size(), " items");
                out.set(runtime.budget, std::move(pair[0]), std::move(pair[1]));
            }
        }
    }
    for (const auto& [name, value] : a.named) out.set(runtime.budget, Value(std::string_view(name)), value);
    return out;
}

Value strftime_now(Runtime& runtime, const Arguments& a) {
    if (a.positional.size() != 1 || !a.positional[0].text()) fault("strftime_now() takes one text");
    const std::string format = a.positional[0].text()->bytes + " "; // never empty, so that 0 means that it did not fit
    const std::time_t now    = runtime.now;
    std::tm           parts{};
    gmtime_r(&now, &parts);
    std::string out(4096, '\0');
    out.resize(format.contains('\0')
                   ? 0
                   : std::strftime(out.data(), out.size(), format.c_str(), &parts)); // NOLINT: the template's format
    if (out.empty()) fault("the date's format is too long");
    out.pop_back();
    return Value(std::string_view(out));
}

constexpr std::array all_globals{
    Global{"range", range},
    Global{"dict", [](Runtime& runtime, const Arguments& a) { return make_dict(runtime, dict_of(runtime, a)); }},
    Global{"namespace",
           [](Runtime& runtime, const Arguments& a) {
               auto* made = runtime.make<Namespace>();
               for (const auto& [key, value] : dict_of(runtime, a).items) {
                   if (!key.text()) fault("a namespace's names are texts");
                   made->set(runtime.budget, key.text()->bytes, value);
               }
               return Value(made);
           }},
    Global{"raise_exception",
           [](Runtime& runtime, const Arguments& a) -> Value {
               const Value* message = a.get(0, "message");
               if (!message) fault("raise_exception() needs a message");
               throw Fault{to_str(runtime, *message).bytes, true};
           }},
    Global{"strftime_now", strftime_now},
    Global{"cycler",
           [](Runtime& runtime, const Arguments& a) {
               if (a.positional.empty()) fault("at least one item has to be provided");
               auto* made  = runtime.make<Cycler>();
               made->items = a.positional;
               return Value(made);
           }},
    Global{"joiner",
           [](Runtime& runtime, const Arguments& a) {
               return Value(runtime.make<Joiner>(a.get(0, "sep") ? *a.get(0, "sep") : Value(", ")));
           }},
};

std::span<const Global> globals() { return all_globals; }

} // namespace quire::jinja
