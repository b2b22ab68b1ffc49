// quire.text.pretokenizer: splits text into the words across which byte-level BPE never merges.
// Each vocabulary was trained with certain regular expressions; here each of them is a scanner that passes once over
// the characters. Owns nothing.
export module quire.text.pretokenizer;

import quire.core.base;
import quire.core.std;
import quire.core.unicode;

export namespace quire {

enum class PreTokenizer : std::uint8_t { standard, gpt2, llama3, qwen2, falcon, starcoder, deepseek_coder };

// By `tokenizer.ggml.pre`; nothing for a name that is not known.
std::optional<PreTokenizer> pre_tokenizer_named(std::string_view name);
// The known names, for a message.
std::string pre_tokenizer_names();

// The ends of the words, in bytes, ascending; the last is text.size(). Bytes that are not UTF-8 count as symbols.
std::vector<std::size_t> pre_tokenize(PreTokenizer kind, std::string_view text);

// The first of these, found by looking at some `window` bytes: memory is bound by that, not by the text. Empty only when the text
// is or when no word ends for certain within the window.
std::vector<std::size_t> pre_tokenize_begin(PreTokenizer kind, std::string_view text, std::size_t window);

} // namespace quire

module :private;

namespace quire {

struct Name {
    std::string_view name;
    PreTokenizer     kind;
};
constexpr std::array names{
    Name{"default", PreTokenizer::standard},
    Name{"gpt-2", PreTokenizer::gpt2},
    Name{"gpt2", PreTokenizer::gpt2},
    Name{"phi-2", PreTokenizer::gpt2},
    Name{"mpt", PreTokenizer::gpt2},
    Name{"olmo", PreTokenizer::gpt2},
    Name{"jina-es", PreTokenizer::gpt2},
    Name{"jina-de", PreTokenizer::gpt2},
    Name{"llama-bpe", PreTokenizer::llama3},
    Name{"llama3", PreTokenizer::llama3},
    Name{"llama-v3", PreTokenizer::llama3},
    Name{"falcon3", PreTokenizer::llama3},
    Name{"dbrx", PreTokenizer::llama3},
    Name{"smaug-bpe", PreTokenizer::llama3},
    Name{"qwen2", PreTokenizer::qwen2},
    Name{"deepseek-r1-qwen", PreTokenizer::qwen2},
    Name{"stablelm2", PreTokenizer::qwen2},
    Name{"falcon", PreTokenizer::falcon},
    Name{"starcoder", PreTokenizer::starcoder},
    Name{"refact", PreTokenizer::starcoder},
    Name{"command-r", PreTokenizer::starcoder},
    Name{"smollm", PreTokenizer::starcoder},
    Name{"codeshell", PreTokenizer::starcoder},
    Name{"deepseek-coder", PreTokenizer::deepseek_coder},
};

std::optional<PreTokenizer> pre_tokenizer_named(std::string_view name) {
    for (const Name& n : names)
        if (n.name == name) return n.kind;
    return {};
}

std::string pre_tokenizer_names() {
    std::string list;
    for (const Name& n : names) list += cat(list.empty() ? "" : ", ", n.name);
    return list;
}

// The text as characters. Positions below are indices of characters; `at` leads back to bytes.
struct Characters {
    std::vector<char32_t>    c;
    std::vector<CharClass>   kind;
    std::vector<std::size_t> at; // one more than characters

    bool is(std::size_t i, int classes) const { return (kind[i] & classes) != 0; }
    bool newline(std::size_t i) const { return c[i] == '\r' || c[i] == '\n'; }
    // [^\s\p{L}\p{N}]
    bool symbol(std::size_t i) const { return !is(i, class_space | class_letter | class_number); }
    // The first index from i on, before end, that is of none of these classes.
    std::size_t run(std::size_t i, std::size_t end, int classes) const {
        while (i < end && is(i, classes)) i++;
        return i;
    }
};

Characters decode(std::string_view text) {
    Characters t;
    t.c.reserve(text.size());
    t.kind.reserve(text.size());
    t.at.reserve(text.size() + 1);
    for (std::size_t at = 0; at < text.size();) {
        const CodePoint c = utf8_next(text, at);
        t.c.push_back(c.value);
        t.kind.push_back(char_class(c.value));
        t.at.push_back(at);
        at += std::size_t(c.bytes);
    }
    t.at.push_back(text.size());
    return t;
}

// A scanner appends the ends of the words in [begin, end).
using Ends    = std::vector<std::size_t>;
using Scanner = void (*)(const Characters& t, std::size_t begin, std::size_t end, Ends& ends);

// 's|'t|'re|'ve|'m|'ll|'d, in lower case or in any: its length, or 0
std::size_t contraction(const Characters& t, std::size_t i, std::size_t end, bool any_case) {
    if (t.c[i] != '\'' || i + 1 >= end) return 0;
    auto lower       = [&](std::size_t j) { return any_case && t.c[j] >= 'A' && t.c[j] <= 'Z' ? t.c[j] + 32 : t.c[j]; };
    const char32_t a = lower(i + 1);
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    if (i + 2 >= end) return 0;
    const char32_t b = lower(i + 2);
    return (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
}

// \s+(?!\S)|\s+ : all of the space at the end of the text, else all but its last character, else that one
std::size_t space_end(const Characters& t, std::size_t i, std::size_t end) {
    const std::size_t k = t.run(i, end, class_space);
    return k == end || k - i == 1 ? k : k - 1;
}

// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
void scan_gpt2(const Characters& t, std::size_t begin, std::size_t end, Ends& ends) {
    for (std::size_t i = begin; i < end; ends.push_back(i)) {
        if (std::size_t n = contraction(t, i, end, false)) {
            i += n;
            continue;
        }
        std::size_t j = i + (t.c[i] == ' ' && i + 1 < end && !t.is(i + 1, class_space));
        if (t.is(j, class_letter)) i = t.run(j, end, class_letter);
        else if (t.is(j, class_number)) i = t.run(j, end, class_number);
        else if (t.symbol(j)) {
            for (i = j; i < end && t.symbol(i);) i++;
        } else i = space_end(t, i, end);
    }
}

// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,digits}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
template <std::size_t digits>
void scan_llama3(const Characters& t, std::size_t begin, std::size_t end, Ends& ends) {
    for (std::size_t i = begin; i < end; ends.push_back(i)) {
        if (std::size_t n = contraction(t, i, end, true)) {
            i += n;
        } else if (t.is(i, class_letter)) {
            i = t.run(i, end, class_letter);
        } else if (!t.newline(i) && !t.is(i, class_number) && i + 1 < end && t.is(i + 1, class_letter)) {
            i = t.run(i + 1, end, class_letter);
        } else if (t.is(i, class_number)) {
            i = t.run(i, std::min(end, i + digits), class_number);
        } else if (std::size_t j = i + (t.c[i] == ' '); j < end && t.symbol(j)) {
            while (j < end && t.symbol(j)) j++;
            while (j < end && t.newline(j)) j++;
            i = j;
        } else {
            const std::size_t k    = t.run(i, end, class_space);
            std::size_t       last = k; // behind the last line break of the run
            while (last > i && !t.newline(last - 1)) last--;
            i = last > i ? last : space_end(t, i, end);
        }
    }
}

// Words are the runs for which `in` holds and the runs for which it does not.
template <class In>
void scan_runs(std::size_t begin, std::size_t end, Ends& ends, const In& in) {
    for (std::size_t i = begin; i < end; ends.push_back(i)) {
        const bool inside = in(i);
        while (i < end && in(i) == inside) i++;
    }
}

// \p{N} : each number a word of its own, and what is between
void scan_single_numbers(const Characters& t, std::size_t begin, std::size_t end, Ends& ends) {
    for (std::size_t i = begin; i < end; ends.push_back(i)) {
        if (t.is(i, class_number)) {
            i++;
            continue;
        }
        while (i < end && !t.is(i, class_number)) i++;
    }
}

// [\p{P}\$\+<=>\^~\|`]+ (the backquote in falcon's only)
template <bool backquote>
void scan_punctuation(const Characters& t, std::size_t begin, std::size_t end, Ends& ends) {
    scan_runs(begin, end, ends, [&](std::size_t i) {
        return t.is(i, class_punctuation) ||
               (t.c[i] < 128 && t.c[i] != 0 && std::string_view("$+<=>^~|").contains(char(t.c[i]))) ||
               (backquote && t.c[i] == '`');
    });
}

// \p{N}+
void scan_numbers(const Characters& t, std::size_t begin, std::size_t end, Ends& ends) {
    scan_runs(begin, end, ends, [&](std::size_t i) { return t.is(i, class_number); });
}

// [0-9][0-9][0-9]
void scan_digit_triples(const Characters& t, std::size_t begin, std::size_t end, Ends& ends) {
    auto triple = [&](std::size_t i) {
        if (i + 3 > end) return false;
        for (std::size_t j = i; j < i + 3; j++)
            if (t.c[j] < '0' || t.c[j] > '9') return false;
        return true;
    };
    for (std::size_t i = begin; i < end; ends.push_back(i)) {
        if (triple(i)) {
            i += 3;
            continue;
        }
        while (i < end && !triple(i)) i++;
    }
}

// [\r\n]
void scan_line_breaks(const Characters& t, std::size_t begin, std::size_t end, Ends& ends) {
    for (std::size_t i = begin; i < end; ends.push_back(i)) {
        if (t.newline(i)) {
            i++;
            continue;
        }
        while (i < end && !t.newline(i)) i++;
    }
}

// \s?CLASS+, and what is between
template <CharClass wanted>
void scan_with_space(const Characters& t, std::size_t begin, std::size_t end, Ends& ends) {
    auto starts = [&](std::size_t i) {
        return t.is(i, wanted) || (t.is(i, class_space) && i + 1 < end && t.is(i + 1, wanted));
    };
    for (std::size_t i = begin; i < end; ends.push_back(i)) {
        if (starts(i)) {
            i = t.run(i + 1, end, wanted);
            continue;
        }
        while (i < end && !starts(i)) i++;
    }
}

// [一-龥ࠀ-一가-퟿]+
void scan_cjk(const Characters& t, std::size_t begin, std::size_t end, Ends& ends) {
    scan_runs(begin, end, ends, [&](std::size_t i) {
        return (t.c[i] >= 0x800 && t.c[i] <= 0x9fa5) || (t.c[i] >= 0xac00 && t.c[i] <= 0xd7ff);
    });
}

// Scanners one after another, each within the words of the one before.
std::span<const Scanner> scanners_of(PreTokenizer kind) {
    static constexpr std::array<Scanner, 1> gpt2{scan_gpt2}, llama3{scan_llama3<3>}, qwen2{scan_llama3<1>};
    static constexpr std::array<Scanner, 2> starcoder{scan_single_numbers, scan_gpt2};
    static constexpr std::array<Scanner, 3> falcon{scan_punctuation<true>, scan_gpt2, scan_digit_triples};
    static constexpr std::array<Scanner, 4> standard{scan_punctuation<false>, scan_gpt2, scan_numbers,
                                                     scan_digit_triples};
    static constexpr std::array<Scanner, 5> deepseek{scan_line_breaks, scan_with_space<class_letter>,
                                                     scan_with_space<class_punctuation>, scan_cjk, scan_single_numbers};
    switch (kind) {
        case PreTokenizer::gpt2: return gpt2;
        case PreTokenizer::llama3: return llama3;
        case PreTokenizer::qwen2: return qwen2;
        case PreTokenizer::starcoder: return starcoder;
        case PreTokenizer::falcon: return falcon;
        case PreTokenizer::deepseek_coder: return deepseek;
        case PreTokenizer::standard: break;
    }
    return standard;
}

std::vector<std::size_t> pre_tokenize(PreTokenizer kind, std::string_view text) {
    if (text.empty()) return {};
    const Characters t = decode(text);
    Ends             ends{t.c.size()}, next;
    for (Scanner scan : scanners_of(kind)) {
        next.clear();
        std::size_t begin = 0;
        for (std::size_t end : ends) {
            scan(t, begin, end, next);
            begin = end;
        }
        ends.swap(next);
    }
    for (std::size_t& end : ends) end = t.at[end];
    return ends;
}

std::vector<std::size_t> pre_tokenize_begin(PreTokenizer kind, std::string_view text, std::size_t window) {
    if (text.size() <= window) return pre_tokenize(kind, text);
    std::size_t cut = window; // not within a character, which has no more than three bytes behind its first
    while (cut > 0 && window - cut < 3 && (static_cast<unsigned char>(text[cut]) & 0xc0) == 0x80) cut--;
    Ends ends = pre_tokenize(kind, text.substr(0, cut));
    // What follows can make the last word longer and change those before it: a line break behind blanks joins them with the line
    // breaks before them, a letter makes "'l" a contraction. No scanner looks further, and none looks back behind a word's begin.
    constexpr std::size_t uncertain = 4;
    ends.resize(ends.size() > uncertain ? ends.size() - uncertain : 0);
    return ends;
}

} // namespace quire
