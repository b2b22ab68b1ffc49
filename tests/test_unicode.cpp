#include <catch2/catch_test_macros.hpp>

import quire.core.std;
import quire.core.unicode;
import quire.core.unicode_data;

using namespace quire;

TEST_CASE("every code point survives encoding and decoding", "[unicode]") {
    for (char32_t c = 0; c < 0x110000; c++) {
        if (c >= 0xd800 && c < 0xe000) continue; // surrogates are no characters
        const std::string text = utf8_encode(c);
        const CodePoint   back = utf8_next(text, 0);
        REQUIRE((back.valid && back.value == c && std::size_t(back.bytes) == text.size()));
    }
}

TEST_CASE("what is not UTF-8 is seen and replaced, one mark per broken beginning", "[unicode]") {
    CHECK(utf8_repair("abc") == "abc");
    CHECK(utf8_repair("\xff") == "\xef\xbf\xbd");
    CHECK(utf8_repair("a\xe2\x82z") == "a\xef\xbf\xbdz");                         // cut in the middle: one
    CHECK(utf8_repair("\xc0\x80") == "\xef\xbf\xbd\xef\xbf\xbd");                 // overlong
    CHECK(utf8_repair("\xed\xa0\x80") == "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"); // a surrogate
    CHECK(utf8_repair("\xf4\x90\x80\x80") == "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"); // beyond U+10FFFF
    CHECK_FALSE(utf8_valid("\xf0\x9f\x99"));
    CHECK(utf8_valid("\xf0\x9f\x99\x82"));
}

TEST_CASE("an unfinished character at the end is counted, a broken one is not", "[unicode]") {
    CHECK(utf8_incomplete("") == 0);
    CHECK(utf8_incomplete("a") == 0);
    CHECK(utf8_incomplete("a\xc3") == 1);
    CHECK(utf8_incomplete("\xe2\x82") == 2);
    CHECK(utf8_incomplete("\xf0\x9f\x99") == 3);
    CHECK(utf8_incomplete("\xf0\x9f\x99\x82") == 0);
    CHECK(utf8_incomplete("\xed\xa0") == 0); // would be a surrogate
    CHECK(utf8_incomplete("\x80\x80") == 0);
    CHECK(utf8_incomplete("\xff") == 0);
}

TEST_CASE("characters have the classes of the Unicode database", "[unicode]") {
    const auto is = [](char32_t c, std::string_view name) { return is_in(categories_named(name), c); };
    CHECK(is(U'é', "L"));
    CHECK(is(U'é', "Ll"));
    CHECK_FALSE(is(U'é', "Lu"));
    CHECK(is(U'漢', "Lo"));
    CHECK(is(U'7', "Nd"));
    CHECK(is(U'½', "No"));
    CHECK(is(0x301, "M"));
    CHECK(is(U'!', "P"));
    CHECK(is(U'+', "Sm"));
    for (char32_t c : {U' ', U'\n', U'\t', char32_t(0x85), char32_t(0xa0), char32_t(0x2003), char32_t(0x3000)})
        CHECK(is_white_space(c));
    CHECK_FALSE(is_white_space(0x200b)); // zero width space is none
    CHECK(is(0x7fffffff, "Cn"));
}
