// quire.text.marked_text: a text that knows which of its bytes came from input, so that input never becomes a special token.
// Owns nothing but the text.
export module quire.text.marked_text;

import quire.core.std;

export namespace quire {

// Bytes [begin, end) of a text.
struct TextSpan {
    std::size_t begin = 0, end = 0;
};

// The text that a chat template renders: literals of the template, and input from messages, tools or documents.
struct MarkedText {
    std::string           bytes;
    std::vector<TextSpan> input; // ascending, not empty, not touching each other

    void append(std::string_view text, bool is_input);
    void append(const MarkedText& text) { append(text, 0, text.bytes.size()); }
    // Bytes [begin, end) of `text`, marked as they are there.
    void       append(const MarkedText& text, std::size_t begin, std::size_t end);
    MarkedText slice(std::size_t begin, std::size_t end) const;

    // Calls f(text, is_input) for the parts in order; neighbours differ in is_input.
    template <class F>
    void for_each_part(const F& f) const {
        const std::string_view all = bytes;
        std::size_t            at  = 0;
        for (const TextSpan& s : input) {
            if (s.begin > at) f(all.substr(at, s.begin - at), false);
            f(all.substr(s.begin, s.end - s.begin), true);
            at = s.end;
        }
        if (at < all.size()) f(all.substr(at), false);
    }
};

} // namespace quire

module :private;

namespace quire {

void MarkedText::append(std::string_view text, bool is_input) {
    if (text.empty()) return;
    if (is_input) {
        if (!input.empty() && input.back().end == bytes.size()) input.back().end += text.size();
        else input.push_back({bytes.size(), bytes.size() + text.size()});
    }
    bytes += text;
}

void MarkedText::append(const MarkedText& text, std::size_t begin, std::size_t end) {
    const std::string_view all  = text.bytes;
    auto                   span = std::lower_bound(text.input.begin(), text.input.end(), begin,
                                                   [](const TextSpan& s, std::size_t at) { return s.end <= at; });
    while (begin < end) {
        const bool        inside = span != text.input.end() && span->begin <= begin;
        const std::size_t stop   = span == text.input.end() ? end : std::min(end, inside ? span->end : span->begin);
        append(all.substr(begin, stop - begin), inside);
        if (inside) ++span;
        begin = stop;
    }
}

MarkedText MarkedText::slice(std::size_t begin, std::size_t end) const {
    MarkedText out;
    out.append(*this, begin, end);
    return out;
}

} // namespace quire
