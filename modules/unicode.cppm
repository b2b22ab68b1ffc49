// quire.unicode: UTF-8 step by step, and the character classes that pre-tokenizers ask for (utf8proc's tables).
export module quire.unicode;

import quire.std;

export namespace quire {

struct CodePoint {
    char32_t value = 0;   // U+FFFD when the bytes are not UTF-8
    int      bytes = 1;   // consumed, at least 1
    bool     valid = true;
};

// The character at text[at]; at < text.size(). Overlong forms, surrogates and values above U+10FFFF are invalid.
CodePoint   utf8_next(std::string_view text, std::size_t at);
std::string utf8_encode(char32_t c);
bool        utf8_valid(std::string_view text);
// `text` with each maximal invalid part replaced by U+FFFD, as browsers do.
std::string utf8_repair(std::string_view text);
// Bytes at the end of `text` that are the beginning of a character and could still become valid: 0..3.
int utf8_incomplete(std::string_view text);

bool is_letter(char32_t c);  // general category L*
bool is_mark(char32_t c);    // M*
bool is_number(char32_t c);  // N*
bool is_space(char32_t c);   // \s of the pre-tokenizers' regular expressions (White_Space)

} // namespace quire
