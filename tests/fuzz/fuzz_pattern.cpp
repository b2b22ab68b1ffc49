// Any text as a pattern, and any text split by it or by a pre-tokenizer: the pieces are in order and cover the text, and those found
// in windows are those of the whole. Input: a byte that chooses the pre-tokenizer, one for the window, the pattern, a NUL, the text.
#include <cstddef>
#include <cstdint>

import quire.core.base;
import quire.core.std;
import quire.text.tokens.pattern;
import quire.text.tokens.pretokenizer;

using namespace quire;

static void check_ends(const std::vector<std::size_t>& ends, std::size_t size) {
    std::size_t before = 0;
    for (std::size_t end : ends) {
        check(end > before, "a piece is empty or out of order");
        before = end;
    }
    check(before == size, "the pieces do not cover the text");
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size < 2) return 0;
    const std::string_view rest(reinterpret_cast<const char*>(data) + 2, size - 2);
    const std::size_t      nul  = std::min(rest.find('\0'), rest.size());
    const std::string_view text = rest.substr(std::min(nul + 1, rest.size()));

    if (const Result<Pattern> pattern = Pattern::compile(rest.substr(0, nul))) {
        const Characters         characters(text);
        std::vector<std::size_t> ends;
        Splitter                 splitter(*pattern);
        splitter.prepare(characters);
        splitter.split(characters, 0, characters.c.size(), false, ends);
        check_ends(ends, characters.c.size());
    }

    static const std::vector<PreTokenizer> all = [] {
        std::vector<PreTokenizer> out;
        for (std::string_view name : PreTokenizer::names()) out.push_back(*PreTokenizer::named(name));
        return out;
    }();
    const PreTokenizer&            pre   = all[data[0] % all.size()];
    const std::vector<std::size_t> whole = pre.split(text);
    check_ends(whole, text.size());
    std::vector<std::size_t> pieces;
    const std::size_t        window = 8 + data[1];
    for (std::size_t at = 0, wide = window; at < text.size();) {
        const std::vector<std::size_t> some = pre.split_begin(text.substr(at), wide);
        for (std::size_t end : some) pieces.push_back(at + end);
        if (!some.empty()) at = pieces.back();
        wide = some.empty() ? wide * 2 : window;
    }
    check(pieces == whole, "a window has other words than the whole text");
    return 0;
}
