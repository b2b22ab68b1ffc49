// quire.text.tokens.pattern: the part of regular expressions in which pre-tokenizers are written, compiled once; it splits a text into
// matches and the texts between them, in practically linear time. **Owns** one compiled pattern.
//
// Known: characters and sets ([...], [^...], \p{L}, \p{Han}, \s, \S, \d, escapes, ranges, && for both of two sets), alternatives (the
// first that matches counts), ?, *, +, {n}, {m,n}, (?: ), (?i: ), (?= ) and (?! ) with one set in it, $ for the end of the text.
// A group is possessive: it gives back no character that it has matched. No pre-tokenizer needs more, and nothing can recurse without bound.
export module quire.text.tokens.pattern;

import quire.core.base;
import quire.core.unicode;
import quire.core.unicode_data;

export namespace quire {

// A text as characters. Positions are indices of characters; at[i] is the byte where the i-th one begins, at.back() the size.
struct Characters {
    std::vector<char32_t>    c; // U+FFFD for a byte that is not UTF-8
    std::vector<std::size_t> at;

    explicit Characters(std::string_view text);
};

// Digits in groups of three, counted from the right: expressions that ask this would look at all digits at each of them, so
// compile() knows these and splits in one pass.
inline constexpr std::string_view thousands_of_numbers = R"(\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N})))";
inline constexpr std::string_view thousands_of_digits  = R"(\d{1,3}(?=(?:\d{3})*(?!\d)))";
inline constexpr std::string_view thousands_of_words   = R"(\d{1,3}(?=(?:\d{3})*\b))"; // not where a word goes on

class Pattern {
public:
    // Error: the unknown part of the expression, and its place.
    static Result<Pattern> compile(std::string_view expression);

private:
    friend class Compiler;
    friend class Splitter;

    // A set of characters; with `also` the characters that are in both sets.
    struct Set {
        std::string                                name; // its text, to find it again
        std::vector<std::pair<char32_t, char32_t>> ranges;
        Categories                                 categories = 0;
        bool                                       space = false, han = false, outside = false;
        std::vector<Set>                           also, parts; // parts: sets within the set
        bool                                       contains(char32_t c) const;
        bool by_category() const; // has all or none of a category's characters above ASCII
    };
    struct Item;
    using Sequence = std::vector<Item>;
    struct Item {
        enum Kind : std::uint8_t { set, group, ahead, end } kind = set;
        bool                  refuse                             = false; // ahead: must not follow
        int                   index = 0, memo = -1;                       // of its set, of its memo
        std::uint32_t         least = 1, most = 1;
        std::vector<Sequence> alternatives; // group
    };
    static constexpr std::uint32_t unlimited = ~std::uint32_t(0);

    std::uint64_t sets_of(char32_t c) const;
    std::uint64_t first_of(const Sequence& sequence) const;

    std::string_view               thousands_; // one of the expressions above, or empty
    std::vector<Set>               sets_;
    std::vector<Sequence>          alternatives_;
    std::vector<std::uint64_t>     first_; // per alternative, sets of characters with which it can begin; 0: any
    std::array<std::uint64_t, 128> ascii_{};
    std::array<std::uint64_t, 32>  by_category_{};
    std::uint64_t                  space_sets_ = 0, ask_ = 0; // sets with \s; sets that are asked for each character
    std::size_t                    n_memos_ = 0;
};

// Splits one text after the other with a pattern, which must outlive it. **Owns** its notes about the text.
class Splitter {
public:
    using Ends = std::vector<std::size_t>;

    explicit Splitter(const Pattern& pattern) : pattern_(&pattern), memos_(pattern.n_memos_) {}

    // The rest that split() leaves of a text that goes on: the piece from `begin` on may change, but it goes at least to `sure`,
    // and nothing in between is a match.
    struct Rest {
        std::size_t begin = 0, sure = 0;
    };
    // Appends the ends of the pieces of [begin, end). `open`: more text follows behind `end`; only the pieces are
    // appended that do not depend on it.
    Rest split(const Characters& text, std::size_t begin, std::size_t end, bool open, Ends& ends);

    // To be called before the first split() of each text.
    void prepare(const Characters& text);

private:
    using Item     = Pattern::Item;
    using Sequence = Pattern::Sequence;
    // A note about a run of characters that an item took: where the run ends, and from which places in it no match goes on.
    struct Memo {
        std::uint32_t segment = 0;
        bool          touched = false;
        std::size_t   begin = 0, end = 0, failed = 0;
    };
    // A place that is none.
    static constexpr std::size_t none = ~std::size_t(0);

    bool        has(std::size_t i, int set) const { return (in_[i] >> set & 1) != 0; }
    std::size_t match(const Sequence& sequence, std::size_t k, std::size_t i);
    Rest split_thousands(const Characters& text, std::size_t begin, std::size_t end, bool open, Ends& ends) const;

    const Pattern*             pattern_;
    std::vector<std::uint64_t> in_; // per character of the text, the sets that contain it
    std::vector<Memo>          memos_;
    std::uint32_t              segment_ = 0;
    std::size_t                end_     = 0;     // of the segment
    bool                       touched_ = false; // a match depended on the text behind it
};

} // namespace quire

module :private;

namespace quire {

Characters::Characters(std::string_view text) {
    c.reserve(text.size());
    at.reserve(text.size() + 1);
    for (std::size_t i = 0; i < text.size();) {
        const CodePoint next = utf8_next(text, i);
        c.push_back(next.value);
        at.push_back(i);
        i += std::size_t(next.bytes);
    }
    at.push_back(text.size());
}

// -- compiling

bool is_han(char32_t c) {
    static constexpr std::array<std::pair<char32_t, char32_t>, 12> ranges{{{0x2e80, 0x2fd5},
                                                                           {0x3005, 0x3005},
                                                                           {0x3007, 0x3007},
                                                                           {0x3021, 0x3029},
                                                                           {0x3038, 0x303b},
                                                                           {0x3400, 0x4dbf},
                                                                           {0x4e00, 0x9fff},
                                                                           {0xf900, 0xfad9},
                                                                           {0x16fe2, 0x16ff1},
                                                                           {0x20000, 0x2ebe0},
                                                                           {0x2ebf0, 0x2fa1d},
                                                                           {0x30000, 0x323af}}};
    for (auto [low, high] : ranges)
        if (c >= low && c <= high) return true;
    return false;
}

bool Pattern::Set::contains(char32_t c) const {
    bool in = is_in(categories, c) || (space && is_white_space(c)) || (han && is_han(c));
    for (auto [low, high] : ranges) in = in || (c >= low && c <= high);
    for (const Set& part : parts) in = in || part.contains(c);
    if (in == outside) return false;
    for (const Set& set : also)
        if (!set.contains(c)) return false;
    return true;
}

bool Pattern::Set::by_category() const {
    if (han) return false;
    for (auto [low, high] : ranges)
        if (high >= 0x80) return false;
    for (const Set& set : also)
        if (!set.by_category()) return false;
    for (const Set& set : parts)
        if (!set.by_category()) return false;
    return true;
}

class Compiler {
public:
    Compiler(std::string_view expression, Pattern& pattern) : text_(expression), pattern_(pattern) {}

    std::string compile() {
        pattern_.alternatives_ = alternatives(0);
        if (error_.empty() && at_ < text_.size()) fail("an end of a group that has not begun");
        return error_;
    }

private:
    static constexpr int deepest = 8; // groups within groups

    bool more(char c) const { return at_ < text_.size() && text_[at_] == c; }
    bool eat(std::string_view what) {
        if (!text_.substr(at_).starts_with(what)) return false;
        at_ += what.size();
        return true;
    }
    void fail(std::string_view what) {
        if (error_.empty()) error_ = cat("at byte ", at_, ": ", what);
        at_ = text_.size();
    }
    char32_t character() {
        const CodePoint c = utf8_next(text_, at_);
        at_ += std::size_t(c.bytes);
        return c.value;
    }

    std::vector<Pattern::Sequence> alternatives(int depth) {
        std::vector<Pattern::Sequence> all(1);
        if (depth > deepest) fail("too many groups within each other");
        while (at_ < text_.size() && !more(')')) {
            if (eat("|")) all.emplace_back();
            else item(all.back(), depth);
        }
        return all;
    }

    void item(Pattern::Sequence& out, int depth) {
        Pattern::Item item;
        if (eat("(?i:")) {
            const bool before = std::exchange(any_case_, true);
            group(item, depth);
            any_case_ = before;
        } else if (eat("(?=") || eat("(?!")) {
            item.kind   = Pattern::Item::ahead;
            item.refuse = text_[at_ - 1] == '!';
            item.index  = set();
            if (!eat(")")) return fail("more than one set to look ahead for");
            out.push_back(std::move(item));
            return;
        } else if (eat("(?:") || eat("(")) group(item, depth);
        else if (eat("$")) item.kind = Pattern::Item::end;
        else item.index = set();
        repeat(item);
        if (item.kind == Pattern::Item::set && item.most == Pattern::unlimited) item.memo = int(pattern_.n_memos_++);
        out.push_back(std::move(item));
    }

    void group(Pattern::Item& item, int depth) {
        item.kind         = Pattern::Item::group;
        item.alternatives = alternatives(depth + 1);
        if (!eat(")")) fail("a group without an end");
    }

    void repeat(Pattern::Item& item) {
        if (eat("?")) item.least = 0;
        else if (eat("*")) item.least = 0, item.most = Pattern::unlimited;
        else if (eat("+")) item.most = Pattern::unlimited;
        else if (eat("{")) {
            item.least = item.most = number();
            if (eat(",")) item.most = number();
            if (!eat("}") || item.most < item.least || item.most == 0) fail("not a number of times");
        }
        if (more('?') || more('*')) fail("a lazy or doubled repetition");
        eat("+"); // possessive: as good as greedy where nothing is given back
    }

    std::uint32_t number() {
        std::uint32_t n = 0;
        while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9' && n < 10000)
            n = n * 10 + std::uint32_t(text_[at_++] - '0');
        return n;
    }

    // One character, an escape or [...]: the index of its set.
    int set() {
        const std::size_t begin = at_;
        Pattern::Set      set;
        if (at_ >= text_.size()) return fail("nothing where a character should be"), 0;
        if (eat("[")) bracket(set, 0);
        else if (more('\\')) escape(set);
        else if (std::string_view("*+?{").contains(text_[at_])) fail("a repetition of nothing");
        else add(set, character());
        set.name = cat(text_.substr(begin, at_ - begin), any_case_ ? " in any case" : "");
        for (std::size_t i = 0; i < pattern_.sets_.size(); i++)
            if (pattern_.sets_[i].name == set.name) return int(i);
        if (pattern_.sets_.size() == 64) return fail("more than 64 different sets"), 0;
        pattern_.sets_.push_back(std::move(set));
        return int(pattern_.sets_.size()) - 1;
    }

    void add(Pattern::Set& set, char32_t c) {
        set.ranges.emplace_back(c, c);
        if (!any_case_) return;
        if (c >= 'a' && c <= 'z') set.ranges.emplace_back(c - 32, c - 32);
        if (c >= 'A' && c <= 'Z') set.ranges.emplace_back(c + 32, c + 32);
        if (c == 's' || c == 'S') set.ranges.emplace_back(0x17f, 0x17f);   // ſ
        if (c == 'k' || c == 'K') set.ranges.emplace_back(0x212a, 0x212a); // the Kelvin sign
    }

    // \p{...}, \s, \S, \d, \n, \r, \t or a character with a backslash. The character, where it is one that may begin a range.
    std::optional<char32_t> escape(Pattern::Set& set) {
        at_++;
        if (at_ >= text_.size()) return fail("a backslash at the end"), std::nullopt;
        if (eat("p{")) {
            const std::size_t      end  = std::min(text_.find('}', at_), text_.size());
            const std::string_view name = text_.substr(at_, end - at_);
            if (name == "Han") set.han = true;
            else if (const Categories c = categories_named(name)) set.categories |= c;
            else fail("a property that is not known");
            at_ = std::min(end + 1, text_.size());
            return {};
        }
        const char32_t c = character();
        switch (c) {
            case 's': set.space = true; return {};
            case 'd': set.categories |= categories_named("Nd"); return {};
            case 'S': {
                Pattern::Set other;
                other.space   = true;
                other.outside = true;
                set.parts.push_back(std::move(other));
                return {};
            }
            case 'n': return set.ranges.emplace_back(U'\n', U'\n'), U'\n';
            case 'r': return set.ranges.emplace_back(U'\r', U'\r'), U'\r';
            case 't': return set.ranges.emplace_back(U'\t', U'\t'), U'\t';
            default: break;
        }
        if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9'))
            return fail("an escape that is not known"), std::nullopt;
        add(set, c);
        return c;
    }

    void bracket(Pattern::Set& set, int depth) {
        if (depth > deepest) fail("too many sets within each other");
        set.outside = eat("^");
        while (at_ < text_.size() && !more(']')) {
            if (eat("&&[")) {
                bracket(set.also.emplace_back(), depth + 1);
                continue;
            }
            std::optional<char32_t> first;
            if (more('\\')) first = escape(set);
            else add(set, *(first = character()));
            if (!first || !more('-') || text_.substr(at_).starts_with("-]")) continue;
            at_++;
            if (at_ >= text_.size()) break;
            char32_t last = 0;
            if (more('\\')) {
                Pattern::Set scratch;
                last = escape(scratch).value_or(0);
            } else last = character();
            if (last < *first) fail("a range that ends before it begins");
            set.ranges.emplace_back(*first, last);
        }
        if (!eat("]")) fail("a set without an end");
    }

    std::string_view text_;
    Pattern&         pattern_;
    std::size_t      at_       = 0;
    bool             any_case_ = false;
    std::string      error_;
};

Result<Pattern> Pattern::compile(std::string_view expression) {
    Pattern p;
    for (std::string_view known : {thousands_of_numbers, thousands_of_digits, thousands_of_words})
        if (expression == known) return p.thousands_ = known, p;
    if (const std::string error = Compiler(expression, p).compile(); !error.empty())
        return fail("the pattern ", quote(expression), " is not understood ", error);

    for (std::size_t i = 0; i < p.sets_.size(); i++) {
        const Set&          set = p.sets_[i];
        const std::uint64_t bit = std::uint64_t(1) << i;
        for (char32_t c = 0; c < 128; c++) p.ascii_[c] |= set.contains(c) ? bit : 0;
        if (!set.by_category()) {
            p.ask_ |= bit;
            continue;
        }
        // any character above ASCII stands for its category: of a category with spaces, all are spaces
        static constexpr std::array<char32_t, 30> samples{0x378,  0xc0,   0xe0,   0x1c5, 0x2b0,  0x5d0,  0x300,  0x903,
                                                          0x488,  0x660,  0x16ee, 0xb2,  0x203f, 0x2010, 0x201a, 0x2046,
                                                          0x2018, 0x2019, 0x2020, 0xb1,  0xa3,   0xa8,   0xa6,   0xa0,
                                                          0x2028, 0x2029, 0x80,   0xad,  0xd800, 0xe000};
        for (std::size_t c = 0; c < samples.size(); c++) p.by_category_[c] |= set.contains(samples[c]) ? bit : 0;
        if (set.contains(0x85)) p.space_sets_ |= bit; // the one space in a category of others
    }
    for (const Sequence& s : p.alternatives_) p.first_.push_back(p.first_of(s));
    return p;
}

// Sets one of which contains the first character of any match; 0 if that cannot be said.
std::uint64_t Pattern::first_of(const Sequence& sequence) const {
    std::uint64_t first = 0;
    for (const Item& item : sequence) {
        if (item.kind == Item::group) {
            for (const Sequence& s : item.alternatives) {
                const std::uint64_t one = first_of(s);
                if (one == 0) return 0;
                first |= one;
            }
        } else if (item.kind == Item::set) first |= std::uint64_t(1) << item.index;
        else return 0;
        if (item.least > 0) return first;
    }
    return 0;
}

// -- matching

std::uint64_t Pattern::sets_of(char32_t c) const {
    if (c < 128) return ascii_[c];
    std::uint64_t sets = c == 0x85 ? space_sets_ : by_category_[std::size_t(general_category(c))];
    for (std::uint64_t rest = ask_; rest != 0; rest &= rest - 1)
        if (sets_[std::size_t(std::countr_zero(rest))].contains(c)) sets |= rest & -rest;
    return sets;
}

void Splitter::prepare(const Characters& text) {
    in_.resize(text.c.size());
    if (pattern_->thousands_.empty())
        for (std::size_t i = 0; i < text.c.size(); i++) in_[i] = pattern_->sets_of(text.c[i]);
}

// Where a match of sequence[k..] that begins at i ends, or none.
std::size_t Splitter::match(const Sequence& sequence, std::size_t k, std::size_t i) {
    for (; k < sequence.size(); k++) {
        const Item& item = sequence[k];
        switch (item.kind) {
            case Item::end:
            case Item::ahead:
                if (i == end_) touched_ = true;
                if (item.kind == Item::end ? i != end_ : (i < end_ && has(i, item.index)) == item.refuse) return none;
                break;
            case Item::group:
                for (std::uint32_t n = 0; n < item.most; n++) {
                    std::size_t end = none;
                    for (const Sequence& s : item.alternatives)
                        if ((end = match(s, 0, i)) != none) break;
                    if (end == none || end == i) {
                        if (n < item.least) return none;
                        break;
                    }
                    i = end;
                }
                break;
            case Item::set: {
                Memo*       memo = item.memo >= 0 ? &memos_[std::size_t(item.memo)] : nullptr;
                std::size_t end  = i;
                if (memo && memo->segment == segment_ && memo->begin <= i && i < memo->end) end = memo->end;
                else {
                    const std::size_t most = item.most < end_ - i ? i + item.most : end_;
                    while (end < most && has(end, item.index)) end++;
                    if (memo) *memo = {segment_, false, i, end, end + 1};
                }
                if (end == end_ && end - i < item.most) touched_ = true;
                if (end - i < item.least) return none;
                if (k + 1 == sequence.size()) return end;
                const std::size_t shortest = i + item.least;
                if (end == shortest) {
                    i = end;
                    break;
                }
                // give back one by one, but not to places from where it is known to fail
                std::size_t last = end;
                if (memo && memo->failed <= end) {
                    touched_ |= memo->touched;
                    last = memo->failed - 1;
                    if (memo->failed <= shortest) return none;
                }
                for (std::size_t n = last + 1; n-- > shortest;)
                    if (const std::size_t found = match(sequence, k + 1, n); found != none) return found;
                if (memo && memo->segment == segment_ && memo->end == end) {
                    memo->failed = std::min(memo->failed, shortest);
                    memo->touched |= touched_;
                }
                return none;
            }
        }
    }
    return i;
}

Splitter::Rest Splitter::split(const Characters& text, std::size_t begin, std::size_t end, bool open, Ends& ends) {
    if (!pattern_->thousands_.empty()) return split_thousands(text, begin, end, open, ends);
    end_ = end;
    segment_++;
    if (segment_ == 0) { // after 2^32 of them: none may look like one of the first round
        std::ranges::fill(memos_, Memo{});
        segment_ = 1;
    }
    const std::vector<Sequence>&      alternatives = pattern_->alternatives_;
    const std::vector<std::uint64_t>& first        = pattern_->first_;
    std::size_t                       piece        = begin;
    for (std::size_t i = begin; i < end;) {
        std::size_t found = none;
        touched_          = false;
        for (std::size_t a = 0; a < alternatives.size(); a++) {
            if (first[a] != 0 && (in_[i] & first[a]) == 0) continue;
            found = match(alternatives[a], 0, i);
            if (found != none && found > i) break;
            found = none;
        }
        if (open && touched_) return {piece, i};
        if (found == none) {
            i++;
            continue;
        }
        if (i > piece) ends.push_back(i);
        ends.push_back(found);
        piece = i = found;
    }
    if (open) return {piece, end};
    if (end > piece) ends.push_back(end);
    return {end, end};
}

Splitter::Rest Splitter::split_thousands(const Characters& text, std::size_t begin, std::size_t end, bool open,
                                         Ends& ends) const {
    static const Categories numbers = categories_named("N"), digits = categories_named("Nd"),
                            word = categories_named("L") | categories_named("M") | numbers | categories_named("Pc");
    const Categories wanted      = pattern_->thousands_ == thousands_of_numbers ? numbers : digits;
    std::size_t      piece       = begin;
    for (std::size_t i = begin; i < end;) {
        if (!is_in(wanted, text.c[i])) {
            i++;
            continue;
        }
        std::size_t last = i;
        while (last < end && is_in(wanted, text.c[last])) last++;
        if (open && last == end) return {piece, i};
        if (pattern_->thousands_ == thousands_of_words && last < end && is_in(word, text.c[last])) {
            i = last;
            continue;
        }
        if (i > piece) ends.push_back(i);
        for (std::size_t rest = (last - i) % 3; i < last; rest = 0) ends.push_back(i += rest > 0 ? rest : 3);
        piece = i;
    }
    if (open) return {piece, end};
    if (end > piece) ends.push_back(end);
    return {end, end};
}

} // namespace quire
