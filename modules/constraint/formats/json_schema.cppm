// quire.constraint.formats.json_schema: JSON Schema (2020-12, and drafts 4 to 7) → a grammar of exactly the JSON texts that satisfy it.
// Owns nothing.
//
// A schema is a set of JSON values. Scalars become expressions, where intersection and complement are exact; arrays and objects
// become alternatives. The symbols of the grammar are sets of terms, so that `allOf`, references and recursion need nothing more.
// Where `not` and `oneOf` would need arrays or objects that no alternative can express, fewer texts are accepted, never more.
export module quire.constraint.formats.json_schema;

import quire.constraint.formats.schema_references;
import quire.constraint.formats.schema_sets;
import quire.constraint.formats.value_set;
export import quire.constraint.grammar.grammar;
import quire.constraint.regex.parser;
import quire.core.base;
export import quire.core.json;

export namespace quire {

struct SchemaOptions {
    // Members come in the order of `properties`, as the model was told them; else in any order.
    bool ordered = true;
    // Integers, and the numbers of an `enum`, are written as 12 only, not as 12.0 also, which a schema does not tell from it.
    bool plain_numbers = true;
    // Where a schema names members and says nothing about others (additionalProperties, patternProperties), there are no others: a
    // model does not invent members.
    bool          closed = true;
    GrammarLimits limits{};
};

// Adds the texts that satisfy a schema to a grammar; the schema is not needed any more afterwards. Error: a keyword that constrains and
// is not supported, by its name and place; a reference to nowhere; a limit.
Result<GrammarSymbol> add_json_schema(Grammar& grammar, const Json& schema, const SchemaOptions& options = {});

} // namespace quire

module :private;

namespace quire {

constexpr std::size_t most_classes = 64; // of keys that no schema names

class SchemaCompiler {
public:
    SchemaCompiler(const Json& schema, const SchemaOptions& options, Grammar& grammar)
        : root_(&schema), options_(options), g_(grammar), pool_(grammar.pool),
          sets_(schema, grammar.pool, options.limits, options.plain_numbers) {}

    Result<GrammarSymbol> compile() {
        sets_.references().read();
        pool_.spend(sets_.references().size() * 64);
        pool_.charge(sets_.references().size() * 256);
        if (auto ok = sets_.references().check_dialect(); !ok) return std::unexpected(ok.error());
        g_.use_json();
        const Result<GrammarSymbol> start = symbol_of({{root_, false}});
        if (!start) return start;
        while (!open_.empty()) {
            const auto [terms, symbol] = open_.back();
            open_.pop_back();
            if (auto ok = define(terms, symbol); !ok) return std::unexpected(ok.error());
            if (g_.symbols.size() > options_.limits.symbols || pool_.size() > options_.limits.expressions)
                return fail_with(ErrorKind::limit, "the schema needs more than ", options_.limits.symbols, " rules or ",
                                 options_.limits.expressions, " expressions");
        }
        return start;
    }

private:
    Result<GrammarSymbol> symbol_of(const Terms& terms) {
        if (const auto known = symbols_.find(terms); known != symbols_.end()) return known->second;
        Result<ValueSet> v = sets_.values(terms);
        if (!v) return std::unexpected(v.error());
        GrammarSymbol s;
        if (v->only_scalars()) {
            s = GrammarSymbol::lexeme(scalar_text(pool_, v->scalars));
        } else {
            s = g_.add_empty();
            open_.push_back({terms, s});
        }
        symbols_.emplace(terms, s);
        return s;
    }

    Result<void> define(const Terms& terms, GrammarSymbol symbol) {
        Result<ValueSet> v = sets_.values(terms);
        if (!v) return std::unexpected(v.error());
        std::vector<std::vector<GrammarSymbol>> rules;
        const RegexId                           scalars = scalar_text(pool_, v->scalars);
        if (!pool_.is_void(scalars)) rules.push_back({GrammarSymbol::lexeme(scalars)});
        for (const ArrayTerms& a : v->arrays) {
            Result<ArrayShape> shape = array_shape(a);
            if (!shape) return std::unexpected(shape.error());
            rules.push_back({g_.add_array(std::move(*shape))});
        }
        for (const ObjectTerms& o : v->objects)
            if (auto ok = add_object(o, rules); !ok) return ok;
        g_.symbols[symbol.index()].rules = std::move(rules);
        return {};
    }

    Result<ArrayShape> array_shape(const ArrayTerms& a) {
        ArrayShape  shape{.first = {}, .rest = {}, .min = a.min, .max = a.max};
        std::size_t n = 0;
        for (const Json* layer : a.layers) n = std::max(n, sets_.references().n_first(*layer));
        for (const auto& [at, terms] : a.at) n = std::max<std::size_t>(n, at + 1);
        n = std::min<std::size_t>(n, a.max);
        for (std::uint32_t i = 0; i <= n; i++) {
            Result<GrammarSymbol> s = symbol_of(sets_.element_terms(a, i));
            if (!s) return std::unexpected(s.error());
            if (i < n) shape.first.push_back(*s);
            else shape.rest = *s;
        }
        return shape;
    }

    RegexId key(RegexId name) {
        const RegexId quote = pool_.literal("\"");
        return pool_.concat(
            quote, pool_.concat(name, pool_.concat(pool_.literal("\":"), pool_.repeat(pool_.literal(" "), 0, 1))));
    }

    Result<void> add_object(const ObjectTerms& o, std::vector<std::vector<GrammarSymbol>>& rules) {
        if (!o.breaches.empty()) return add_breaches(o, rules);
        ObjectShape shape{.members = {}, .others = {}, .min = o.min, .max = o.max, .ordered = options_.ordered};
        std::vector<RegexId>                  named;
        const std::vector<std::string>        names = sets_.names_of(o);
        const std::unordered_set<std::string> required(o.required.begin(), o.required.end());
        for (const std::string& name : names) {
            Result<Terms> terms = sets_.member_terms(o, name);
            if (!terms) return std::unexpected(terms.error());
            const RegexId text = text_of(pool_, name, TextSpelling::json);
            named.push_back(text);
            Result<GrammarSymbol> value = symbol_of(*terms);
            if (!value) return std::unexpected(value.error());
            shape.members.push_back({key(text), *value, required.contains(name)});
        }
        // All other keys, by the patterns that they match.
        struct Class {
            RegexId names;
            Terms   terms;
        };
        std::vector<RegexId> of_all = o.names;
        of_all.push_back(sets_.shapes().text);
        if (!named.empty()) of_all.push_back(pool_.negate(pool_.any_of(named)));
        std::vector<Class> classes{{pool_.all_of(of_all), {}}};
        for (const Json* layer : o.layers) {
            struct Split {
                Class one;
                bool  named;
            };
            std::vector<Split> split;
            for (Class& c : classes) split.push_back({std::move(c), false});
            if (const auto all = layer->find("patternProperties"); all != layer->end())
                for (const auto& [pattern, sub] : members(*all)) {
                    Result<RegexId> regex = sets_.pattern_of(*layer, pattern);
                    if (!regex) return std::unexpected(regex.error());
                    std::vector<Split> next;
                    for (Split& s : split) {
                        const RegexId in  = pool_.all_of({s.one.names, *regex});
                        const RegexId out = pool_.minus(s.one.names, *regex);
                        if (!pool_.is_void(in)) next.push_back({{in, both(s.one.terms, {{&sub, false}})}, true});
                        if (!pool_.is_void(out)) next.push_back({{out, s.one.terms}, s.named});
                    }
                    split = std::move(next);
                    if (split.size() > most_classes)
                        return sets_.references().wrong(*layer, "patternProperties",
                                                        "more patterns that match the same names than are supported");
                }
            const auto more = layer->find("additionalProperties");
            classes.clear();
            for (Split& s : split) {
                if (!s.named && more != layer->end() && !(more->is_boolean() && more->get<bool>()))
                    s.one.terms = both(s.one.terms, {{&*more, false}});
                classes.push_back(std::move(s.one));
            }
        }
        const auto speaks_of_others = [](const Json* layer) {
            return layer->contains("additionalProperties") || layer->contains("patternProperties");
        };
        if (options_.closed && !names.empty() && o.names.empty() && o.min <= names.size() &&
            !std::ranges::any_of(o.layers, speaks_of_others))
            classes.clear();
        for (const Class& c : classes) {
            if (pool_.is_void(c.names)) continue;
            Result<bool> empty = sets_.is_void(c.terms);
            if (!empty) return std::unexpected(empty.error());
            if (*empty) continue;
            Result<GrammarSymbol> value = symbol_of(c.terms);
            if (!value) return std::unexpected(value.error());
            shape.others.push_back({key(c.names), *value, false});
        }
        rules.push_back({g_.add_object(std::move(shape))});
        return {};
    }

    // One of the named members must break a schema's rule for members that the schema does not name.
    Result<void> add_breaches(ObjectTerms o, std::vector<std::vector<GrammarSymbol>>& rules) {
        const ObjectTerms::Breach      breach = o.breaches.back();
        const std::vector<std::string> names  = sets_.names_of(o);
        o.breaches.pop_back();
        for (const std::string& name : names) {
            const ObjectTerms own{.layers = {breach.schema}};
            Result<Terms>     terms = sets_.member_terms(own, name);
            if (!terms) return std::unexpected(terms.error());
            const auto props = breach.schema->find("properties");
            if (props != breach.schema->end() && props->contains(name)) continue;
            for (const Term& t : *terms) {
                const auto more = breach.schema->find("additionalProperties");
                if ((more != breach.schema->end() && t.schema == &*more) != breach.additional) continue;
                ObjectTerms with = o;
                if (std::ranges::find(with.required, name) == with.required.end()) with.required.push_back(name);
                with.members.push_back({name, {{t.schema, true}}});
                Result<bool> empty = sets_.is_void(with);
                if (!empty) return std::unexpected(empty.error());
                if (*empty) continue;
                if (rules.size() > most_alternatives)
                    return fail_with(ErrorKind::limit, "the schema has too many alternatives");
                if (auto ok = add_object(with, rules); !ok) return ok;
            }
        }
        return {};
    }

    const Json*                                  root_;
    SchemaOptions                                options_;
    Grammar&                                     g_;
    RegexPool&                                   pool_;
    SchemaSets                                   sets_;
    std::map<Terms, GrammarSymbol>               symbols_;
    std::vector<std::pair<Terms, GrammarSymbol>> open_; // not defined yet
};

Result<GrammarSymbol> add_json_schema(Grammar& grammar, const Json& schema, const SchemaOptions& options) {
    Result<GrammarSymbol> start = SchemaCompiler(schema, options, grammar).compile();
    if (start && grammar.pool.too_deep())
        return fail_with(ErrorKind::limit, "the schema's expressions are nested too deep");
    return start;
}

} // namespace quire
