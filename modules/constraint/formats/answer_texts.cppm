// quire.constraint.formats.answer_texts: expressions for the texts of an answer. A control token stands in these texts as control_bytes()
// of its name, which no other text contains. Owns nothing.
export module quire.constraint.formats.answer_texts;

import quire.constraint.grammar.grammar;
import quire.constraint.grammar.token_trie;
import quire.constraint.regex.parser;
import quire.core.base;
import quire.text.calls.call_marks;

export namespace quire {

// Makes expressions in the pool of a grammar. `controls`: the marks that are control tokens of the vocabulary; `ends`: the control tokens
// that end an answer. The grammar and both lists must outlive it.
class AnswerTexts {
public:
    AnswerTexts(Grammar& g, const std::vector<std::string>& controls, const std::vector<std::string>& ends)
        : g_(g), pool_(g.pool), controls_(controls), ends_(ends) {}

    // Control tokens and ends in a text as they stand in answers: ends are no bytes of it.
    std::string spelled(std::string_view text) const {
        std::string out;
        while (!text.empty()) {
            std::string_view longest;
            bool             is_end = false;
            for (const auto* list : {&controls_, &ends_})
                for (const std::string& mark : *list)
                    if (text.starts_with(mark) && mark.size() > longest.size()) longest = mark, is_end = list == &ends_;
            if (!longest.empty() && !is_end) out += control_bytes(longest);
            if (longest.empty()) out += text[0];
            text.remove_prefix(std::max<std::size_t>(longest.size(), 1));
        }
        return out;
    }
    RegexId literal(std::string_view text) { return pool_.literal(spelled(text)); }
    RegexId pattern(std::string_view text) {
        const Result<RegexId> made = parse_regex(pool_, text, TextSpelling::utf8, true);
        check(made.has_value(), "a pattern of quire's own");
        return *made;
    }
    RegexId join(std::initializer_list<RegexId> parts) {
        RegexId all = RegexPool::blank;
        for (const RegexId part : parts) all = pool_.concat(all, part);
        return all;
    }
    GrammarSymbol symbol(RegexId regex) { return g_.optional(regex); }
    RegexId       white() { return pattern("[ \\t\\r\\n]{0,4}"); }
    RegexId       any() { return pool_.repeat(pool_.bytes(ByteSet::range(0, 255)), 0, RegexPool::endless); }
    RegexId       some() { return pool_.repeat(pool_.bytes(ByteSet::range(0, 255)), 1, RegexPool::endless); }
    GrammarSymbol any_text() { return symbol(any()); }
    // Texts in which none of these stands.
    RegexId without(const std::vector<RegexId>& marks) {
        return marks.empty() ? any() : pool_.negate(join({any(), pool_.any_of(marks), any()}));
    }
    // Texts up to the first of these marks, which is `mark`.
    RegexId up_to(RegexId mark, const std::vector<RegexId>& marks) {
        return pool_.minus(join({any(), mark}), join({any(), pool_.any_of(marks), some()}));
    }
    RegexId up_to(std::string_view mark) { return up_to(literal(mark), {literal(mark)}); }
    RegexId any_of(std::initializer_list<std::string_view> texts) {
        std::vector<RegexId> all;
        for (const std::string_view text : texts) all.push_back(literal(text));
        return pool_.any_of(std::move(all));
    }
    // A text of CallMarks, with the freedom that its reader allows.
    RegexId loose(std::string_view mark, std::string_view key = {}) {
        RegexId     all = RegexPool::blank;
        std::string fixed;
        const auto  add = [&](RegexId more) {
            if (!fixed.empty()) all = pool_.concat(all, literal(std::exchange(fixed, "")));
            all = pool_.concat(all, more);
        };
        for (std::size_t i = 0; i < mark.size(); i++) {
            const char c        = mark[i];
            const bool is_white = white_space.contains(c);
            if (is_white && i > 0 && white_space.contains(mark[i - 1])) continue;
            if (is_white || (loose_before(mark, i) && !white_space.contains(mark[i - 1])))
                add(pattern("[ \\t\\r\\n]{0,16}"));
            if (is_white) continue;
            if (c == id_mark) add(pattern("[a-zA-Z0-9_.-]{1,64}"));
            else if (c == index_mark) add(pattern("[0-9]{1,4}"));
            else if (c == key_mark) fixed += key;
            else fixed += c;
        }
        add(RegexPool::blank);
        return all;
    }

protected:
    Grammar&                        g_;
    RegexPool&                      pool_;
    const std::vector<std::string>& controls_;
    const std::vector<std::string>& ends_;
};

} // namespace quire
