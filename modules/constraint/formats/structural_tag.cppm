// quire.constraint.formats.structural_tag: free text with tagged parts that follow schemas (vLLM's and xgrammar's structural tags) → rules.
// Owns nothing.
export module quire.constraint.formats.structural_tag;

import quire.constraint.formats.gbnf;
import quire.constraint.formats.json_schema;
import quire.constraint.regex.parser;
import quire.core.base;

export namespace quire {

// {"triggers": [...], "structures": [{"begin", "schema", "end"}]}, or {"type": "structural_tag", "format": {...}} with formats
// const_string, json_schema, regex, grammar, any_text, sequence, or, tag, triggered_tags, tags_with_separator.
Result<GrammarSymbol> add_structural_tag(Grammar& grammar, const Json& tag);

} // namespace quire

module :private;

namespace quire {

constexpr int most_formats = 64;

class TagBuilder {
public:
    explicit TagBuilder(Grammar& g) : g_(g) {}

    // {"begin", "schema" or "content", "end"}: as rules, with the end unless it is left out.
    Result<GrammarSymbol> tag(const Json& t, int depth) {
        if (!t.is_object() || !text(t, "begin") || !text(t, "end"))
            return fail("a tag of structural_tag needs \"begin\" and \"end\", both texts");
        const auto            schema = t.find("schema"), content = t.find("content");
        Result<GrammarSymbol> inside = schema != t.end()    ? add_json_schema(g_, *schema)
                                       : content != t.end() ? format(*content, depth + 1, *text(t, "end"))
                                                            : add_json_schema(g_, Json(true));
        if (!inside) return inside;
        return g_.add_rules({{literal(*text(t, "begin")), *inside, literal(*text(t, "end"))}});
    }

    // Free text in which a trigger begins one of the tags.
    Result<GrammarSymbol> triggered(const Json& triggers, const Json& tags, bool at_least_one, bool only_one,
                                    int depth) {
        if (!triggers.is_array() || triggers.empty() || !tags.is_array() || tags.empty())
            return fail("structural_tag needs \"triggers\" and tags, neither of them empty");
        std::vector<std::string> marks;
        for (const Json& t : triggers) {
            if (!t.is_string() || t.get_ref<const std::string&>().empty())
                return fail("a trigger of structural_tag is not a text");
            marks.push_back(t.get<std::string>());
        }
        std::vector<std::vector<GrammarSymbol>> any;
        for (const Json& t : tags) {
            Result<GrammarSymbol> one = tag(t, depth);
            if (!one) return one;
            if (!std::ranges::any_of(marks, [&](const std::string& m) { return text(t, "begin")->starts_with(m); }))
                return fail("structural_tag: ", quote(*text(t, "begin")), " begins with none of the triggers");
            any.push_back({*one});
        }
        const GrammarSymbol free = without(marks), one = g_.add_rules(std::move(any));
        if (only_one) {
            if (at_least_one) return one;
            return g_.add_rules({{free}, {free, one}});
        }
        const GrammarSymbol more       = g_.add_empty(); // tags, with text behind each
        g_.symbols[more.index()].rules = {{}, {more, one, free}};
        if (at_least_one) return g_.add_rules({{one, free, more}});
        return g_.add_rules({{free, more}});
    }

    Result<GrammarSymbol> format(const Json& f, int depth, std::string_view end = {}) {
        g_.pool.enter();
        if (depth > most_formats) return fail("structural_tag is nested too deep");
        const std::string* type = text(f, "type");
        if (!type) return fail("a format of structural_tag has no \"type\"");
        const auto need = [&](const char* key) -> Result<const Json*> {
            const auto at = f.find(key);
            if (at == f.end()) return fail("structural_tag: ", quote(*type), " needs ", quote(key));
            return &*at;
        };
        if (*type == "const_string") {
            if (!text(f, "value")) return fail("structural_tag: 'const_string' needs a text as \"value\"");
            return literal(*text(f, "value"));
        }
        if (*type == "json_schema") {
            Result<const Json*> schema = need("json_schema");
            return schema ? add_json_schema(g_, **schema) : std::unexpected(schema.error());
        }
        if (*type == "regex") {
            if (!text(f, "pattern")) return fail("structural_tag: 'regex' needs a text as \"pattern\"");
            Result<RegexId> regex = parse_regex(g_.pool, *text(f, "pattern"), TextSpelling::utf8, true);
            return regex ? Result<GrammarSymbol>(g_.optional(*regex)) : std::unexpected(regex.error());
        }
        if (*type == "grammar") {
            if (!text(f, "grammar")) return fail("structural_tag: 'grammar' needs a text as \"grammar\"");
            return add_gbnf(g_, *text(f, "grammar"));
        }
        if (*type == "any_text") return end.empty() ? without({}) : without({std::string(end)});
        if (*type == "tag") return tag(f, depth);
        if (*type == "sequence" || *type == "or") {
            Result<const Json*> list = need("elements");
            if (!list) return std::unexpected(list.error());
            if (!(*list)->is_array() || (*list)->empty()) return fail("structural_tag: \"elements\" is not a list");
            std::vector<std::vector<GrammarSymbol>> rules;
            for (const Json& element : **list) {
                Result<GrammarSymbol> one = format(element, depth + 1, end);
                if (!one) return one;
                if (*type == "or" || rules.empty()) rules.push_back({*one});
                else rules[0].push_back(*one);
            }
            return g_.add_rules(std::move(rules));
        }
        if (*type == "triggered_tags") {
            Result<const Json*> triggers = need("triggers"), tags = need("tags");
            if (!triggers || !tags) return std::unexpected(!triggers ? triggers.error() : tags.error());
            return triggered(**triggers, **tags, flag(f, "at_least_one"), flag(f, "stop_after_first"), depth + 1);
        }
        if (*type == "tags_with_separator") {
            Result<const Json*> tags = need("tags");
            if (!tags) return std::unexpected(tags.error());
            if (!(*tags)->is_array() || (*tags)->empty() || !text(f, "separator"))
                return fail("structural_tag: 'tags_with_separator' needs tags and a text as \"separator\"");
            std::vector<std::vector<GrammarSymbol>> any;
            for (const Json& t : **tags) {
                Result<GrammarSymbol> one = tag(t, depth + 1);
                if (!one) return one;
                any.push_back({*one});
            }
            const GrammarSymbol one = g_.add_rules(std::move(any));
            if (flag(f, "stop_after_first")) return flag(f, "at_least_one") ? one : g_.add_rules({{}, {one}});
            const GrammarSymbol list       = g_.add_empty();
            g_.symbols[list.index()].rules = {{one}, {list, literal(*text(f, "separator")), one}};
            return flag(f, "at_least_one") ? list : g_.add_rules({{}, {list}});
        }
        return fail("structural_tag: the format ", quote(*type), " is not supported");
    }

private:
    static const std::string* text(const Json& object, const char* key) {
        if (!object.is_object()) return nullptr;
        const auto at = object.find(key);
        return at != object.end() && at->is_string() ? &at->get_ref<const std::string&>() : nullptr;
    }
    static bool flag(const Json& object, const char* key) {
        const auto at = object.find(key);
        return at != object.end() && at->is_boolean() && at->get<bool>();
    }
    GrammarSymbol literal(std::string_view s) { return g_.optional(g_.pool.literal(s)); }
    // Any text in which none of these stands.
    GrammarSymbol without(const std::vector<std::string>& marks) {
        const RegexId        any = g_.pool.repeat(g_.pool.bytes(ByteSet::range(0, 0xfd)), 0, RegexPool::endless);
        std::vector<RegexId> all;
        for (const std::string& m : marks) all.push_back(g_.pool.literal(m));
        if (all.empty()) return g_.optional(any);
        return g_.optional(g_.pool.negate(g_.pool.concat(any, g_.pool.concat(g_.pool.any_of(all), any))));
    }

    Grammar& g_;
};

Result<GrammarSymbol> add_structural_tag(Grammar& grammar, const Json& tag) {
    if (!tag.is_object()) return fail("structural_tag is not an object");
    TagBuilder builder(grammar);
    if (const auto format = tag.find("format"); format != tag.end()) return builder.format(*format, 0);
    const auto triggers = tag.find("triggers"), structures = tag.find("structures");
    if (triggers == tag.end() || structures == tag.end())
        return fail("structural_tag needs \"format\", or \"triggers\" and \"structures\"");
    return builder.triggered(*triggers, *structures, false, false, 0);
}

} // namespace quire
