// quire.constraint.formats.gbnf: llama.cpp's grammars (GBNF) → rules and lexemes. Owns nothing.
//
// Rules that do not recur become expressions, whole parts of others too: the fewer lexemes there are, the less the recogniser does.
export module quire.constraint.formats.gbnf;

import quire.constraint.grammar.grammar;
import quire.constraint.regex.parser;
import quire.core.base;
import quire.core.unicode;

export namespace quire {

// Adds the rules of a text like `root ::= "yes" | "no"` and returns the symbol of `root`. Error: the fault and its line.
Result<GrammarSymbol> add_gbnf(Grammar& grammar, std::string_view text, const GrammarLimits& limits = {});

} // namespace quire

module :private;

namespace quire {

constexpr int           most_groups = 200;
constexpr std::uint32_t most_copies = 2000;

struct GbnfNode {
    enum class Kind : std::uint8_t { set, text, rule, cat, alt, repeat } kind;
    CharSet          set{};
    std::string      text{};
    int              rule = -1;
    std::vector<int> parts{};
    std::uint32_t    min = 0, max = 0;
};
using GbnfKind = GbnfNode::Kind;

class GbnfParser {
public:
    GbnfParser(std::string_view text, const GrammarLimits& limits) : text_(text), limits_(limits) {}

    std::vector<GbnfNode>                nodes;
    std::vector<int>                     bodies; // of each rule; -1: not defined
    std::vector<std::string>             names;
    std::unordered_map<std::string, int> rules;

    Result<void> parse() {
        if (!utf8_valid(text_)) return fail("the grammar is not valid UTF-8");
        for (blanks(true); at_ < text_.size(); blanks(true)) {
            const std::string name = word();
            if (name.empty()) return wrong("the name of a rule is expected");
            blanks(false);
            if (!take("::=")) return wrong("'::=' is expected");
            blanks(true);
            Result<int> body = alternatives(0);
            if (!body) return std::unexpected(body.error());
            const int rule = rule_of(name);
            int&      old  = bodies[std::size_t(rule)];
            if (old >= 0) { // as another alternative
                GbnfNode both{.kind = GbnfKind::alt};
                both.parts = {old, *body};
                old        = add(std::move(both));
            } else {
                old = *body;
            }
            if (nodes.size() > limits_.symbols * 4) return fail_with(ErrorKind::limit, "the grammar is too large");
        }
        if (!rules.contains("root")) return fail("the grammar has no rule named root");
        for (std::size_t r = 0; r < bodies.size(); r++)
            if (bodies[r] < 0)
                return fail("the grammar's line ",
                            std::count(text_.begin(), text_.begin() + std::ptrdiff_t(named_at_[r]), '\n') + 1,
                            ": the rule ", quote(names[r]), " is not defined");
        return {};
    }

private:
    std::unexpected<Error> wrong(std::string_view what) const {
        const auto before = text_.substr(0, std::min(at_, text_.size()));
        const auto line   = std::count(before.begin(), before.end(), '\n') + 1;
        const auto start  = before.rfind('\n');
        return fail("the grammar's line ", line, ", column ",
                    before.size() - (start == before.npos ? 0 : start + 1) + 1, ": ", what);
    }
    bool take(std::string_view s) {
        if (!text_.substr(at_).starts_with(s)) return false;
        at_ += s.size();
        return true;
    }
    char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
    void blanks(bool lines) {
        for (; at_ < text_.size(); at_++) {
            const char c = text_[at_];
            if (c == '#')
                while (at_ + 1 < text_.size() && text_[at_ + 1] != '\n' && text_[at_ + 1] != '\r') at_++;
            else if (c != ' ' && c != '\t' && !(lines && (c == '\n' || c == '\r'))) return;
        }
    }
    std::string word() {
        const std::size_t first = at_;
        const auto        is    = [](char c) { return is_alphanumeric(c) || c == '-' || c == '_'; };
        while (at_ < text_.size() && is(text_[at_])) at_++;
        return std::string(text_.substr(first, at_ - first));
    }
    int add(GbnfNode n) {
        nodes.push_back(std::move(n));
        return int(nodes.size()) - 1;
    }
    int rule_of(const std::string& name) {
        const auto [at, added] = rules.try_emplace(name, int(names.size()));
        if (added) {
            names.push_back(name);
            bodies.push_back(-1);
            named_at_.push_back(at_);
        }
        return at->second;
    }

    Result<int> alternatives(int depth) {
        if (depth > most_groups) return wrong("groups are nested too deep");
        GbnfNode all{.kind = GbnfKind::alt};
        while (true) {
            Result<int> one = sequence(depth);
            if (!one) return one;
            all.parts.push_back(*one);
            // An alternative may begin on the next line.
            const std::size_t here = at_;
            blanks(true);
            if (!take("|")) {
                if (depth == 0) at_ = here;
                return all.parts.size() == 1 ? all.parts[0] : add(std::move(all));
            }
            blanks(true);
        }
    }

    Result<int> sequence(int depth) {
        GbnfNode row{.kind = GbnfKind::cat};
        while (at_ < text_.size()) {
            const char c = peek();
            GbnfNode   one{.kind = GbnfKind::text};
            int        made = -1;
            if (c == '"') {
                at_++;
                while (!take("\"")) {
                    if (at_ >= text_.size() || peek() == '\n') return wrong("a text without its closing quote");
                    Result<char32_t> next = letter();
                    if (!next) return std::unexpected(next.error());
                    one.text += utf8_encode(*next);
                }
            } else if (c == '[') {
                at_++;
                one.kind           = GbnfKind::set;
                const bool negated = take("^");
                while (!take("]")) {
                    if (at_ >= text_.size()) return wrong("'[' without ']'");
                    Result<char32_t> first = letter();
                    if (!first) return std::unexpected(first.error());
                    char32_t last = *first;
                    if (peek() == '-' && at_ + 1 < text_.size() && text_[at_ + 1] != ']') {
                        at_++;
                        Result<char32_t> to = letter();
                        if (!to) return std::unexpected(to.error());
                        last = *to;
                        if (last < *first) return wrong("a range that ends before it begins");
                    }
                    one.set.push_back({*first, last});
                }
                if (negated) one.set = all_but(std::move(one.set));
            } else if (c == '.') {
                at_++;
                one.kind = GbnfKind::set;
                one.set  = all_but({});
            } else if (c == '(') {
                at_++;
                blanks(true);
                Result<int> inner = alternatives(depth + 1);
                if (!inner) return inner;
                if (!take(")")) return wrong("'(' without ')'");
                made = *inner;
            } else if (c == '<' || c == '!') {
                return wrong("tokens in a grammar are not supported");
            } else {
                const std::size_t here = at_;
                const std::string name = word();
                if (name.empty()) break;
                const std::size_t behind = at_;
                blanks(false);
                if (text_.substr(at_).starts_with("::=")) { // the next rule
                    at_ = here;
                    break;
                }
                at_      = behind;
                one.kind = GbnfKind::rule;
                one.rule = rule_of(name);
            }
            if (made < 0) made = add(std::move(one));
            Result<int> repeated = quantified(made);
            if (!repeated) return repeated;
            row.parts.push_back(*repeated);
            blanks(depth > 0);
        }
        return row.parts.size() == 1 ? row.parts[0] : add(std::move(row));
    }

    Result<int> quantified(int made) {
        while (true) {
            blanks(false);
            std::uint32_t min = 0, max = RegexPool::endless;
            if (take("*")) {
            } else if (take("+")) min = 1;
            else if (take("?")) max = 1;
            else if (take("{")) {
                const auto number = [&](std::uint32_t& n) {
                    const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), n);
                    if (error != std::errc{}) return false;
                    at_ = std::size_t(end - text_.data());
                    return true;
                };
                blanks(false);
                const bool has_min = number(min);
                max                = min;
                blanks(false);
                if (take(",")) {
                    blanks(false);
                    if (!number(max)) max = RegexPool::endless;
                } else if (!has_min) return wrong("a number is expected in {}");
                blanks(false);
                if (!take("}")) return wrong("'}' is expected");
                if (min > max) return wrong("a count whose most is below its least");
                if (min > most_copies || (max != RegexPool::endless && max > most_copies))
                    return wrong("a count beyond 2000");
            } else return made;
            GbnfNode n{.kind = GbnfKind::repeat};
            n.parts = {made};
            n.min   = min;
            n.max   = max;
            made    = add(std::move(n));
        }
    }

    // A character, escaped or not.
    Result<char32_t> letter() {
        if (!take("\\")) {
            const CodePoint c = utf8_next(text_, at_);
            at_ += std::size_t(c.bytes);
            return c.value;
        }
        const char c = peek();
        at_++;
        const auto hex = [&](std::size_t n) -> Result<char32_t> {
            unsigned value = 0;
            if (at_ + n > text_.size()) return wrong("an escape without its digits");
            const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + at_ + n, value, 16);
            if (error != std::errc{} || end != text_.data() + at_ + n || value > 0x10ffff ||
                (value >= 0xd800 && value < 0xe000))
                return wrong("an escape that is no character");
            at_ += n;
            return char32_t(value);
        };
        switch (c) {
            case 'x': return hex(2);
            case 'u': return hex(4);
            case 'U': return hex(8);
            case 't': return U'\t';
            case 'r': return U'\r';
            case 'n': return U'\n';
            case '\\':
            case '"':
            case '[':
            case ']':
            case '-':
            case '^':
            case '/':
            case '.': return char32_t(c);
            default: return wrong("an unknown escape");
        }
    }

    std::string_view         text_;
    std::size_t              at_ = 0;
    const GrammarLimits&     limits_;
    std::vector<std::size_t> named_at_; // byte behind each rule's first use
};

class GbnfBuilder {
public:
    GbnfBuilder(Grammar& g, const GbnfParser& p, const GrammarLimits& limits) : g_(g), p_(p), limits_(limits) {
        find_regular();
        symbols_.resize(p.bodies.size());
        regexes_.resize(p.bodies.size());
    }

    Result<GrammarSymbol> build() {
        const int             root = p_.rules.at("root");
        Result<GrammarSymbol> s    = rule_symbol(root);
        if (!s) return s;
        while (!open_.empty()) {
            const int r = open_.back();
            open_.pop_back();
            Result<std::vector<std::vector<GrammarSymbol>>> rules = rules_of(p_.bodies[std::size_t(r)], 0);
            if (!rules) return std::unexpected(rules.error());
            g_.symbols[symbols_[std::size_t(r)]->index()].rules = std::move(*rules);
            if (g_.symbols.size() > limits_.symbols || g_.pool.size() > limits_.expressions)
                return fail_with(ErrorKind::limit, "the grammar needs more than ", limits_.symbols, " rules or ",
                                 limits_.expressions, " expressions");
        }
        return s;
    }

private:
    static constexpr int most_depth = 400; // of rules within rules

    const GbnfNode& at(int id) const { return p_.nodes[std::size_t(id)]; }

    // A rule is regular where no rule that it uses, however far away, can come back to itself.
    void find_regular() {
        const std::size_t             n = p_.bodies.size();
        std::vector<std::vector<int>> uses(n), used_by(n);
        std::vector<int>              open(n);
        for (std::size_t r = 0; r < n; r++) {
            std::vector<int> work{p_.bodies[r]};
            while (!work.empty()) {
                const GbnfNode& node = at(work.back());
                work.pop_back();
                if (node.kind == GbnfKind::rule) uses[r].push_back(node.rule);
                work.insert(work.end(), node.parts.begin(), node.parts.end());
            }
            open[r] = int(uses[r].size());
            for (int u : uses[r]) used_by[std::size_t(u)].push_back(int(r));
        }
        regular_.assign(n, false);
        std::vector<int> ready;
        for (std::size_t r = 0; r < n; r++)
            if (open[r] == 0) ready.push_back(int(r));
        std::vector<int> depth(n, 1);
        while (!ready.empty()) {
            const int r = ready.back();
            ready.pop_back();
            regular_[std::size_t(r)] = depth[std::size_t(r)] < most_depth;
            for (int user : used_by[std::size_t(r)]) {
                depth[std::size_t(user)] = std::max(depth[std::size_t(user)], depth[std::size_t(r)] + 1);
                if (--open[std::size_t(user)] == 0) ready.push_back(user);
            }
        }
    }

    bool is_regular(int id) const {
        g_.pool.enter();
        const GbnfNode& n = at(id);
        if (n.kind == GbnfKind::rule) return regular_[std::size_t(n.rule)];
        return std::ranges::all_of(n.parts, [&](int p) { return is_regular(p); });
    }

    RegexId regex_of(int id) {
        g_.pool.enter();
        const GbnfNode& n = at(id);
        switch (n.kind) {
            case GbnfKind::set: return character(g_.pool, n.set, TextSpelling::utf8);
            case GbnfKind::text: return g_.pool.literal(n.text);
            case GbnfKind::rule: {
                std::optional<RegexId>& known = regexes_[std::size_t(n.rule)];
                if (!known) known = regex_of(p_.bodies[std::size_t(n.rule)]);
                return *known;
            }
            case GbnfKind::cat: {
                RegexId all = RegexPool::blank;
                for (std::size_t i = n.parts.size(); i-- > 0;) all = g_.pool.concat(regex_of(n.parts[i]), all);
                return all;
            }
            case GbnfKind::alt: {
                std::vector<RegexId> all;
                for (int p : n.parts) all.push_back(regex_of(p));
                return g_.pool.any_of(std::move(all));
            }
            case GbnfKind::repeat: return g_.pool.repeat(regex_of(n.parts[0]), n.min, n.max);
        }
        return RegexPool::nothing;
    }

    Result<GrammarSymbol> rule_symbol(int rule) {
        std::optional<GrammarSymbol>& known = symbols_[std::size_t(rule)];
        if (!known) {
            if (regular_[std::size_t(rule)]) {
                known = g_.optional(regex_of(p_.bodies[std::size_t(rule)]));
            } else {
                known = g_.add_empty();
                open_.push_back(rule);
            }
        }
        return *known;
    }

    Result<std::vector<std::vector<GrammarSymbol>>> rules_of(int id, int depth) {
        const GbnfNode&                         n = at(id);
        std::vector<std::vector<GrammarSymbol>> rules;
        if (n.kind != GbnfKind::alt) {
            Result<std::vector<GrammarSymbol>> row = row_of(id, depth);
            if (!row) return std::unexpected(row.error());
            rules.push_back(std::move(*row));
            return rules;
        }
        for (int p : n.parts) {
            Result<std::vector<GrammarSymbol>> row = row_of(p, depth);
            if (!row) return std::unexpected(row.error());
            rules.push_back(std::move(*row));
        }
        return rules;
    }

    // A sequence; neighbours that are regular make one lexeme.
    Result<std::vector<GrammarSymbol>> row_of(int id, int depth) {
        const GbnfNode&            n     = at(id);
        const std::vector<int>     parts = n.kind == GbnfKind::cat ? n.parts : std::vector<int>{id};
        std::vector<GrammarSymbol> row;
        std::vector<RegexId>       lexemes;
        const auto                 flush = [&] {
            RegexId all = RegexPool::blank;
            for (std::size_t i = lexemes.size(); i-- > 0;) all = g_.pool.concat(lexemes[i], all);
            if (all != RegexPool::blank) row.push_back(g_.optional(all));
            lexemes.clear();
        };
        for (int p : parts) {
            if (is_regular(p)) {
                lexemes.push_back(regex_of(p));
                continue;
            }
            flush();
            Result<GrammarSymbol> s = symbol_of(p, depth);
            if (!s) return std::unexpected(s.error());
            row.push_back(*s);
        }
        flush();
        return row;
    }

    Result<GrammarSymbol> symbol_of(int id, int depth) {
        g_.pool.enter();
        const GbnfNode& n = at(id);
        if (depth > most_groups) return fail_with(ErrorKind::limit, "the grammar's groups are nested too deep");
        if (n.kind == GbnfKind::rule) return rule_symbol(n.rule);
        if (n.kind != GbnfKind::repeat) {
            Result<std::vector<std::vector<GrammarSymbol>>> rules = rules_of(id, depth + 1);
            return rules ? Result<GrammarSymbol>(g_.add_rules(std::move(*rules))) : std::unexpected(rules.error());
        }
        Result<GrammarSymbol> one = symbol_of(n.parts[0], depth + 1);
        if (!one) return one;
        g_.pool.spend(n.min);
        std::vector<GrammarSymbol> row(n.min, *one);
        if (n.max == RegexPool::endless) {
            const GrammarSymbol more       = g_.add_empty();
            g_.symbols[more.index()].rules = {{}, {more, *one}};
            row.push_back(more);
        } else {
            std::optional<GrammarSymbol> more;
            for (std::uint32_t i = n.min; i < n.max; i++)
                more = more ? g_.add_rules({{}, {*one, *more}}) : g_.add_rules({{}, {*one}});
            if (more) row.push_back(*more);
        }
        if (g_.symbols.size() > limits_.symbols)
            return fail_with(ErrorKind::limit, "the grammar needs more than ", limits_.symbols, " rules");
        return g_.add_rules({std::move(row)});
    }

    Grammar&                                  g_;
    const GbnfParser&                         p_;
    const GrammarLimits&                      limits_;
    std::vector<bool>                         regular_;
    std::vector<std::optional<GrammarSymbol>> symbols_;
    std::vector<std::optional<RegexId>>       regexes_;
    std::vector<int>                          open_;
};

Result<GrammarSymbol> add_gbnf(Grammar& grammar, std::string_view text, const GrammarLimits& limits) {
    GbnfParser parser(text, limits);
    if (auto ok = parser.parse(); !ok) return std::unexpected(ok.error());
    Result<GrammarSymbol> root = GbnfBuilder(grammar, parser, limits).build();
    if (root && grammar.pool.too_deep())
        return fail_with(ErrorKind::limit, "the grammar's expressions are nested too deep");
    return root;
}

} // namespace quire
