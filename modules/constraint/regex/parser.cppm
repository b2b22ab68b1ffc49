// quire.constraint.regex.parser: patterns as ECMA-262 writes them → expressions over the bytes of UTF-8 texts, or of JSON strings.
// Owns nothing.
export module quire.constraint.regex.parser;

export import quire.constraint.regex.regex;
import quire.core.base;
import quire.core.unicode;

export namespace quire {

// A set of characters: ranges, first and last included.
using CharRange = std::pair<char32_t, char32_t>;
using CharSet   = std::vector<CharRange>;

// How a character is written in the text.
enum class TextSpelling : std::uint8_t {
    utf8,
    json, // within a JSON string, in its shortest form: \" \\ \b \f \n \r \t, \u00xx for other control characters, else UTF-8
};

// One character of the set. Surrogates are no characters.
RegexId character(RegexPool& pool, CharSet set, TextSpelling spelling);
// All characters outside the set.
CharSet all_but(CharSet set);
RegexId text_of(RegexPool& pool, std::string_view text, TextSpelling spelling);

// `whole`: the pattern describes a text from its beginning to its end; else it may match anywhere in it, as `pattern` of JSON Schema
// does. Error: a fault and its place, or an assertion that cannot be expressed: back references, and assertions other than ^ $ and lookahead
// in front of all the rest.
Result<RegexId> parse_regex(RegexPool& pool, std::string_view pattern, TextSpelling spelling, bool whole);

} // namespace quire

module :private;

namespace quire {

constexpr char32_t last_char = 0x10ffff;

void normalise(CharSet& set) {
    std::sort(set.begin(), set.end());
    CharSet out;
    for (CharRange r : set)
        if (!out.empty() && r.first <= out.back().second + 1) out.back().second = std::max(out.back().second, r.second);
        else out.push_back(r);
    set = std::move(out);
}

CharSet all_but(CharSet set) {
    normalise(set);
    CharSet  out;
    char32_t from = 0;
    for (CharRange r : set) {
        if (r.first > from) out.push_back({from, r.first - 1});
        from = r.second + 1;
    }
    if (from <= last_char) out.push_back({from, last_char});
    return out;
}

// first..last as UTF-8, all of them with the same number of bytes: ranges of each byte.
void utf8_ranges(RegexPool& pool, const std::string& first, const std::string& last, std::vector<RegexId>& out) {
    const auto  byte = [](const std::string& s, std::size_t i) { return int(static_cast<unsigned char>(s[i])); };
    const auto  n    = first.size();
    std::size_t same = 0;
    while (same < n && first[same] == last[same]) same++;
    if (same == n) return out.push_back(pool.literal(first));
    // first.. to the end of its first differing byte, whole bytes between, and up to last.
    const auto tail = [&](std::size_t from) {
        return pool.repeat(pool.bytes(ByteSet::range(0x80, 0xbf)), std::uint32_t(n - from), std::uint32_t(n - from));
    };
    const auto bounded = [&](auto& self, const std::string& bound, std::size_t i, bool low) -> RegexId {
        if (i == n) return RegexPool::blank;
        const int     b    = byte(bound, i);
        const RegexId here = pool.concat(pool.bytes(ByteSet::range(b, b)), self(self, bound, i + 1, low));
        const ByteSet rest = low ? ByteSet::range(b + 1, 0xbf) : ByteSet::range(0x80, b - 1);
        return pool.any_of({here, pool.concat(pool.bytes(rest), tail(i + 1))});
    };
    const RegexId prefix = pool.literal(first.substr(0, same));
    const int     a = byte(first, same), b = byte(last, same);
    const auto    one = [&](int c) { return pool.bytes(ByteSet::range(c, c)); };
    out.push_back(
        pool.concat(prefix, pool.any_of({pool.concat(one(a), bounded(bounded, first, same + 1, true)),
                                         pool.concat(pool.bytes(ByteSet::range(a + 1, b - 1)), tail(same + 1)),
                                         pool.concat(one(b), bounded(bounded, last, same + 1, false))})));
}

RegexId character(RegexPool& pool, CharSet set, TextSpelling spelling) {
    pool.spend(1 + set.size());
    normalise(set);
    std::vector<RegexId> parts;
    ByteSet              ascii;
    const auto           escaped = [&](char32_t c) {
        switch (c) {
            case '"': return std::string("\\\"");
            case '\\': return std::string("\\\\");
            case '\b': return std::string("\\b");
            case '\f': return std::string("\\f");
            case '\n': return std::string("\\n");
            case '\r': return std::string("\\r");
            case '\t': return std::string("\\t");
            default: {
                char text[8];
                std::snprintf(text, sizeof text, "\\u%04x", unsigned(c));
                return std::string(text);
            }
        }
    };
    for (auto [first, last] : set) {
        for (char32_t c = first; c < 0x80 && c <= last; c++)
            if (spelling == TextSpelling::json && (c < 0x20 || c == '"' || c == '\\'))
                parts.push_back(pool.literal(escaped(c)));
            else ascii.add(int(c));
        constexpr CharRange by_length[] = {{0x80, 0x7ff}, {0x800, 0xd7ff}, {0xe000, 0xffff}, {0x10000, last_char}};
        for (auto [from, to] : by_length)
            if (first <= to && last >= from)
                utf8_ranges(pool, utf8_encode(std::max(first, from)), utf8_encode(std::min(last, to)), parts);
    }
    parts.push_back(pool.bytes(ascii));
    return pool.any_of(std::move(parts));
}

RegexId text_of(RegexPool& pool, std::string_view text, TextSpelling spelling) {
    if (spelling == TextSpelling::utf8) return pool.literal(text);
    std::vector<RegexId> parts;
    for (std::size_t at = 0; at < text.size();) {
        const CodePoint c = utf8_next(text, at);
        parts.push_back(character(pool, {{c.value, c.value}}, spelling));
        at += std::size_t(c.bytes);
    }
    RegexId all = RegexPool::blank;
    for (std::size_t i = parts.size(); i-- > 0;) all = pool.concat(parts[i], all);
    return all;
}

// -- patterns

constexpr int           most_nesting = 200;
constexpr std::size_t   most_pattern = std::size_t(64) << 10;
constexpr std::uint32_t most_repeats = 100'000;

// A pattern's parts: a tree, in one vector.
struct PatternNode {
    enum class Kind : std::uint8_t { set, cat, alt, repeat, start, end, ahead, not_ahead } kind;
    CharSet          set;
    std::vector<int> parts;
    std::uint32_t    min = 0, max = 0;
};
using PatternKind = PatternNode::Kind;

class PatternParser {
public:
    explicit PatternParser(std::string_view text) : text_(text) {}

    std::vector<PatternNode> nodes;

    Result<int> parse() {
        if (text_.size() > most_pattern)
            return fail("a pattern of ", text_.size(), " bytes; ", most_pattern, " are allowed");
        if (!utf8_valid(text_)) return fail("a pattern is not valid UTF-8");
        Result<int> all = alternatives(0);
        if (all && at_ < text_.size()) return wrong("')' without '('");
        return all;
    }

private:
    std::unexpected<Error> wrong(std::string_view what) const {
        return fail("pattern ", quote(text_), ": ", what, " at byte ", std::min(at_, text_.size()));
    }
    bool more() const { return at_ < text_.size(); }
    bool sees(char c) const { return more() && text_[at_] == c; }
    bool take(std::string_view s) {
        if (!text_.substr(at_).starts_with(s)) return false;
        at_ += s.size();
        return true;
    }
    int add(PatternNode n) {
        nodes.push_back(std::move(n));
        return int(nodes.size()) - 1;
    }

    Result<int> alternatives(int depth) {
        if (depth > most_nesting) return wrong("groups nested too deep");
        PatternNode all{PatternKind::alt, {}, {}};
        do {
            PatternNode row{PatternKind::cat, {}, {}};
            while (more() && !sees('|') && !sees(')')) {
                Result<int> one = piece(depth);
                if (!one) return one;
                row.parts.push_back(*one);
            }
            all.parts.push_back(add(std::move(row)));
        } while (take("|"));
        return all.parts.size() == 1 ? all.parts[0] : add(std::move(all));
    }

    Result<int> piece(int depth) {
        Result<int> one = atom(depth);
        if (!one) return one;
        while (more()) {
            std::uint32_t min = 0, max = RegexPool::endless;
            if (take("*")) {
            } else if (take("+")) min = 1;
            else if (take("?")) max = 1;
            else if (sees('{') && counted(min, max)) {
                if (min > max) return wrong("a count whose most is below its least");
                if (min > most_repeats || (max != RegexPool::endless && max > most_repeats))
                    return wrong("a count beyond 100000");
            } else break;
            (void)take("?"); // lazy or not: the set of matching texts does not change
            if (sees('+')) return wrong("a possessive quantifier");
            const PatternKind kind = nodes[std::size_t(*one)].kind;
            if (kind == PatternKind::start || kind == PatternKind::end || kind == PatternKind::ahead ||
                kind == PatternKind::not_ahead)
                return wrong("a quantifier behind an assertion");
            one = add({PatternKind::repeat, {}, {*one}, min, max});
        }
        return one;
    }

    // {2} {2,} {2,3}; anything else is text.
    bool counted(std::uint32_t& min, std::uint32_t& max) {
        std::size_t at     = at_ + 1;
        const auto  number = [&](std::uint32_t& n) {
            const std::size_t first = at;
            std::uint64_t     value = 0;
            while (at < text_.size() && text_[at] >= '0' && text_[at] <= '9')
                value = std::min<std::uint64_t>(value * 10 + std::uint64_t(text_[at++] - '0'), most_repeats + 1);
            n = std::uint32_t(value);
            return at > first;
        };
        if (!number(min)) return false;
        max = min;
        if (at < text_.size() && text_[at] == ',') {
            at++;
            if (!number(max)) max = RegexPool::endless;
        }
        if (at >= text_.size() || text_[at] != '}') return false;
        at_ = at + 1;
        return true;
    }

    Result<int> atom(int depth) {
        if (take("^") || take("\\A")) return add({PatternKind::start, {}, {}});
        if (take("$") || take("\\Z") || take("\\z")) return add({PatternKind::end, {}, {}});
        if (take("(")) return group(depth);
        if (take("[")) return bracket();
        if (take(".")) return add({PatternKind::set, all_but({{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}}), {}});
        if (take("\\")) {
            CharSet set;
            if (auto ok = escape(set, false); !ok) return std::unexpected(ok.error());
            return add({PatternKind::set, std::move(set), {}});
        }
        if (sees('*') || sees('+') || sees('?')) return wrong("a quantifier without anything before it");
        const CodePoint c = utf8_next(text_, at_);
        at_ += std::size_t(c.bytes);
        return add({PatternKind::set, {{c.value, c.value}}, {}});
    }

    Result<int> group(int depth) {
        std::optional<PatternKind> assertion;
        if (take("?:")) {
        } else if (take("?=")) assertion = PatternKind::ahead;
        else if (take("?!")) assertion = PatternKind::not_ahead;
        else if (take("?<=") || take("?<!")) return wrong("a lookbehind, which is not supported,");
        else if (take("?P<") || take("?<")) {
            while (more() && !sees('>')) at_++;
            if (!take(">")) return wrong("a group's name without an end");
        } else if (sees('?')) return wrong("a group of unknown kind");
        Result<int> inner = alternatives(depth + 1);
        if (!inner) return inner;
        if (!take(")")) return wrong("'(' without ')'");
        return assertion ? add({*assertion, {}, {*inner}}) : inner;
    }

    static int hex(char c) {
        return c >= '0' && c <= '9'   ? c - '0'
               : c >= 'a' && c <= 'f' ? c - 'a' + 10
               : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                      : -1;
    }
    bool digits(std::size_t n, char32_t& value) {
        value = 0;
        for (std::size_t i = 0; i < n; i++) {
            if (at_ + i >= text_.size() || hex(text_[at_ + i]) < 0) return false;
            value = value * 16 + char32_t(hex(text_[at_ + i]));
        }
        at_ += n;
        return true;
    }

    // Behind a backslash.
    Result<void> escape(CharSet& set, bool in_bracket) {
        if (!more()) return wrong("a backslash at the end");
        const CharSet   digit = {{'0', '9'}};
        const CharSet   word  = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
        const CharSet   space = {{'\t', '\r'},     {' ', ' '},       {0xa0, 0xa0},     {0x1680, 0x1680},
                                 {0x2000, 0x200a}, {0x2028, 0x2029}, {0x202f, 0x202f}, {0x205f, 0x205f},
                                 {0x3000, 0x3000}, {0xfeff, 0xfeff}};
        const CodePoint c     = utf8_next(text_, at_);
        at_ += std::size_t(c.bytes);
        char32_t value = c.value;
        switch (c.value) {
            case 'd': set = digit; return {};
            case 'D': set = all_but(digit); return {};
            case 'w': set = word; return {};
            case 'W': set = all_but(word); return {};
            case 's': set = space; return {};
            case 'S': set = all_but(space); return {};
            case 't': value = '\t'; break;
            case 'n': value = '\n'; break;
            case 'r': value = '\r'; break;
            case 'f': value = '\f'; break;
            case 'v': value = '\v'; break;
            case 'a': value = 7; break;
            case '0': value = 0; break;
            case 'b':
                if (!in_bracket) return wrong("a word boundary, which is not supported,");
                value = '\b';
                break;
            case 'B': return wrong("a word boundary, which is not supported,");
            case 'c':
                if (!more() || !((text_[at_] >= 'a' && text_[at_] <= 'z') || (text_[at_] >= 'A' && text_[at_] <= 'Z')))
                    return wrong("\\c without a letter");
                value = char32_t(text_[at_++] & 31);
                break;
            case 'x':
                if (!digits(2, value)) return wrong("\\x without two hexadecimal digits");
                break;
            case 'u':
                if (take("{")) {
                    value = 0;
                    for (; more() && hex(text_[at_]) >= 0 && value <= last_char; at_++)
                        value = value * 16 + char32_t(hex(text_[at_]));
                    if (!take("}") || value > last_char) return wrong("\\u{…} that is no character");
                } else if (!digits(4, value)) return wrong("\\u without four hexadecimal digits");
                if (char32_t low = 0; value >= 0xd800 && value < 0xdc00 && take("\\u") && digits(4, low))
                    value = 0x10000 + ((value - 0xd800) << 10) + (low - 0xdc00);
                break;
            case 'p':
            case 'P': return wrong("a class of Unicode characters, which is not supported,");
            default:
                if (c.value >= '1' && c.value <= '9') return wrong("a back reference, which is not supported,");
                if (c.value == 'k' || c.value == 'G') return wrong("an escape that is not supported");
        }
        set = {{value, value}};
        return {};
    }

    Result<int> bracket() {
        const bool negated = take("^");
        CharSet    all;
        for (bool first = true; !sees(']') || (first && false); first = false) {
            if (!more()) return wrong("'[' without ']'");
            CharSet from;
            if (auto ok = member(from); !ok) return std::unexpected(ok.error());
            const bool one = from.size() == 1 && from[0].first == from[0].second;
            if (sees('-') && at_ + 1 < text_.size() && text_[at_ + 1] != ']') {
                const std::size_t dash = at_++;
                CharSet           to;
                if (auto ok = member(to); !ok) return std::unexpected(ok.error());
                if (one && to.size() == 1 && to[0].first == to[0].second) {
                    if (to[0].first < from[0].first) return wrong("a range that ends before it begins");
                    from[0].second = to[0].first;
                } else { // a class beside it: the dash is text
                    (void)dash;
                    from.insert(from.end(), to.begin(), to.end());
                    from.push_back({'-', '-'});
                }
            }
            all.insert(all.end(), from.begin(), from.end());
        }
        at_++;
        normalise(all);
        return add({PatternKind::set, negated ? all_but(std::move(all)) : std::move(all), {}});
    }

    Result<void> member(CharSet& set) {
        if (take("\\")) return escape(set, true);
        const CodePoint c = utf8_next(text_, at_);
        at_ += std::size_t(c.bytes);
        set = {{c.value, c.value}};
        return {};
    }

    std::string_view text_;
    std::size_t      at_ = 0;
};

// The tree → an expression. Where a part is the first or the last of the whole pattern it can hold ^ or $.
class PatternBuilder {
public:
    PatternBuilder(RegexPool& pool, const std::vector<PatternNode>& nodes, std::string_view text, TextSpelling spelling)
        : pool_(pool), nodes_(nodes), text_(text), spelling_(spelling) {
        any_ = pool.repeat(character(pool, {{0, last_char}}, spelling), 0, RegexPool::endless);
    }

    // left: texts that may stand before; right: texts that may follow, up to the end of all.
    Result<RegexId> whole(int id, bool left_open, bool right_open) {
        pool_.enter();
        if (++steps_ > most_steps) return fail("pattern ", quote(text_), " has too many alternatives with anchors");
        const PatternNode& n = at(id);
        if (n.kind == PatternKind::alt) {
            std::vector<RegexId> all;
            for (int p : n.parts) {
                Result<RegexId> one = whole(p, left_open, right_open);
                if (!one) return one;
                all.push_back(*one);
            }
            return pool_.any_of(std::move(all));
        }
        std::vector<int> row = n.kind == PatternKind::cat ? n.parts : std::vector<int>{id};
        return sequence(std::move(row), left_open, right_open);
    }

private:
    static constexpr int most_steps = 10000;

    const PatternNode& at(int id) const { return nodes_[std::size_t(id)]; }
    bool               anchored(int id) const {
        pool_.enter();
        const PatternNode& n = at(id);
        if (n.kind == PatternKind::start || n.kind == PatternKind::end || n.kind == PatternKind::ahead ||
            n.kind == PatternKind::not_ahead)
            return true;
        return std::ranges::any_of(n.parts, [&](int p) { return anchored(p); });
    }

    Result<RegexId> sequence(std::vector<int> row, bool left_open, bool right_open) {
        pool_.enter();
        pool_.spend(row.size());
        const auto first = std::ranges::find_if(row, [&](int p) { return at(p).kind != PatternKind::start; });
        if (first != row.begin()) left_open = false;
        row.erase(row.begin(), first);
        while (!row.empty() && at(row.back()).kind == PatternKind::end) {
            right_open = false;
            row.pop_back();
        }
        // A group with anchors, or a lookahead: each of its alternatives makes a sequence of its own.
        for (std::size_t i = 0; i < row.size(); i++) {
            if (!anchored(row[i])) continue;
            const PatternNode& n = at(row[i]);
            if (n.kind == PatternKind::ahead || n.kind == PatternKind::not_ahead) {
                if (++steps_ > most_steps) return fail("pattern ", quote(text_), " has too many assertions");
                std::vector<int> before(row.begin(), row.begin() + std::ptrdiff_t(i)),
                    after(row.begin() + std::ptrdiff_t(i) + 1, row.end());
                if (std::ranges::any_of(before, [&](int p) { return anchored(p); })) break;
                Result<RegexId> head = plain(before);
                Result<RegexId> rest = head ? sequence(after, false, right_open) : head;
                Result<RegexId> seen = rest ? whole(n.parts[0], false, true) : rest;
                if (!seen) return seen;
                const RegexId then =
                    n.kind == PatternKind::ahead ? pool_.all_of({*rest, *seen}) : pool_.minus(*rest, *seen);
                return pool_.concat(left_open ? any_ : RegexPool::blank, pool_.concat(*head, then));
            }
            if (n.kind == PatternKind::alt || n.kind == PatternKind::cat) {
                std::vector<RegexId>   all;
                const std::vector<int> choices = n.kind == PatternKind::alt ? n.parts : std::vector<int>{row[i]};
                for (int choice : choices) {
                    std::vector<int> one(row.begin(), row.begin() + std::ptrdiff_t(i));
                    if (at(choice).kind == PatternKind::cat)
                        one.insert(one.end(), at(choice).parts.begin(), at(choice).parts.end());
                    else one.push_back(choice);
                    one.insert(one.end(), row.begin() + std::ptrdiff_t(i) + 1, row.end());
                    if (++steps_ > most_steps)
                        return fail("pattern ", quote(text_), " has too many alternatives with anchors");
                    Result<RegexId> made = sequence(std::move(one), left_open, right_open);
                    if (!made) return made;
                    all.push_back(*made);
                }
                return pool_.any_of(std::move(all));
            }
            if (n.kind == PatternKind::repeat && n.min == 0 && n.max == 1) { // ($|…)?
                std::vector<int> without = row, with = row;
                without.erase(without.begin() + std::ptrdiff_t(i));
                with[i] = n.parts[0];
                if (++steps_ > most_steps) return fail("pattern ", quote(text_), " has too many optional anchors");
                Result<RegexId> one = sequence(std::move(without), left_open, right_open);
                Result<RegexId> two = one ? sequence(std::move(with), left_open, right_open) : one;
                return two ? pool_.any_of({*one, *two}) : two;
            }
            // An expression before ^ or behind $: no text matches, unless this expression can be empty.
            if (n.kind == PatternKind::start || n.kind == PatternKind::end) {
                const bool             is_start = n.kind == PatternKind::start;
                const std::vector<int> outside(is_start ? row.begin() : row.begin() + std::ptrdiff_t(i) + 1,
                                               is_start ? row.begin() + std::ptrdiff_t(i) : row.end());
                if (std::ranges::any_of(outside, [&](int p) { return anchored(p); })) break;
                Result<RegexId> other = plain(outside);
                if (!other) return other;
                if (!pool_.nullable(*other)) return RegexPool::nothing;
                std::vector<int> inside(is_start ? row.begin() + std::ptrdiff_t(i) + 1 : row.begin(),
                                        is_start ? row.end() : row.begin() + std::ptrdiff_t(i));
                return sequence(std::move(inside), is_start ? false : left_open, is_start ? right_open : false);
            }
            break;
        }
        Result<RegexId> body = plain(row);
        if (!body) return body;
        return pool_.concat(left_open ? any_ : RegexPool::blank,
                            pool_.concat(*body, right_open ? any_ : RegexPool::blank));
    }

    Result<RegexId> plain(const std::vector<int>& row) {
        RegexId all = RegexPool::blank;
        for (std::size_t i = row.size(); i-- > 0;) {
            Result<RegexId> one = plain(row[i]);
            if (!one) return one;
            all = pool_.concat(*one, all);
        }
        return all;
    }

    Result<RegexId> plain(int id) {
        pool_.enter();
        const PatternNode& n = at(id);
        switch (n.kind) {
            case PatternKind::set: return character(pool_, n.set, spelling_);
            case PatternKind::cat: return plain(n.parts);
            case PatternKind::alt: {
                std::vector<RegexId> all;
                for (int p : n.parts) {
                    Result<RegexId> one = plain(p);
                    if (!one) return one;
                    all.push_back(*one);
                }
                return pool_.any_of(std::move(all));
            }
            case PatternKind::repeat: {
                Result<RegexId> one = plain(n.parts[0]);
                return one ? Result<RegexId>(pool_.repeat(*one, n.min, n.max)) : one;
            }
            default:
                return fail("pattern ", quote(text_), ": ^, $ or a lookahead within a repeated part is not supported");
        }
    }

    RegexPool&                      pool_;
    const std::vector<PatternNode>& nodes_;
    std::string_view                text_;
    TextSpelling                    spelling_;
    RegexId                         any_   = RegexPool::nothing;
    int                             steps_ = 0;
};

Result<RegexId> parse_regex(RegexPool& pool, std::string_view pattern, TextSpelling spelling, bool whole) {
    PatternParser parser(pattern);
    Result<int>   root = parser.parse();
    if (!root) return std::unexpected(root.error());
    const auto too_deep = [&] { return fail("pattern ", quote(pattern), " is nested too deep"); };
    try {
        Result<RegexId> made = PatternBuilder(pool, parser.nodes, pattern, spelling).whole(*root, !whole, !whole);
        if (made && pool.too_deep()) return too_deep();
        return made;
    } catch (const WorkEnded& e) {
        if (e.why != WorkEnded::Why::depth) throw;
        return too_deep();
    }
}

} // namespace quire
