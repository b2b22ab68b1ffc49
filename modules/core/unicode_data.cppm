// quire.core.unicode_data: what the Unicode database says of a character: category, lower case, decomposition (utf8proc's tables). Owns
// nothing.
module;

#include <utf8proc.h>
#include <cstdlib>

export module quire.core.unicode_data;

import quire.core.std;

export namespace quire {

// General categories by their two-letter names; Cn: not assigned.
enum class Category : std::uint8_t {
    Cn,
    Lu,
    Ll,
    Lt,
    Lm,
    Lo,
    Mn,
    Mc,
    Me,
    Nd,
    Nl,
    No,
    Pc,
    Pd,
    Ps,
    Pe,
    Pi,
    Pf,
    Po,
    Sm,
    Sc,
    Sk,
    So,
    Zs,
    Zl,
    Zp,
    Cc,
    Cf,
    Cs,
    Co,
};

Category general_category(char32_t c); // Cn above U+10FFFF
bool     is_white_space(char32_t c);   // the property White_Space

// A set of categories: bit 1 << Category.
using Categories = std::uint32_t;
// "L", "Lu", "M" ...: the categories whose names begin so; 0 for a name that is none.
Categories  categories_named(std::string_view name);
inline bool is_in(Categories set, char32_t c) { return (set >> int(general_category(c)) & 1) != 0; }

// The full canonical decomposition (NFD) of one character, appended to `out`; without it, the character itself.
void append_decomposed(char32_t c, std::u32string& out);
// Sorts combining characters behind each base by their class, as NFD wants it.
void order_marks(std::u32string& text);

} // namespace quire

module :private;

namespace quire {

// The categories of all characters, asked of utf8proc once.
const std::vector<Category>& category_table() {
    static const std::vector<Category> table = [] {
        std::vector<Category> t(0x110000);
        for (std::size_t c = 0; c < t.size(); c++) t[c] = Category(utf8proc_category(utf8proc_int32_t(c)));
        return t;
    }();
    return table;
}

static_assert(int(Category::Lu) == UTF8PROC_CATEGORY_LU && int(Category::Mn) == UTF8PROC_CATEGORY_MN &&
              int(Category::Nd) == UTF8PROC_CATEGORY_ND && int(Category::Pc) == UTF8PROC_CATEGORY_PC &&
              int(Category::Sm) == UTF8PROC_CATEGORY_SM && int(Category::Zs) == UTF8PROC_CATEGORY_ZS &&
              int(Category::Co) == UTF8PROC_CATEGORY_CO && int(Category::Cn) == UTF8PROC_CATEGORY_CN);

Category general_category(char32_t c) { return c < 0x110000 ? category_table()[c] : Category::Cn; }

bool is_white_space(char32_t c) {
    if (c < 0x80) return c == ' ' || (c >= 9 && c <= 13);
    const Category category = general_category(c);
    return c == 0x85 || (category >= Category::Zs && category <= Category::Zp);
}

Categories categories_named(std::string_view name) {
    static constexpr std::string_view names = "CnLuLlLtLmLoMnMcMeNdNlNoPcPdPsPePiPfPoSmScSkSoZsZlZpCcCfCsCo";
    Categories                        set   = 0;
    if (name.empty() || name.size() > 2) return 0;
    for (std::size_t i = 0; i < names.size(); i += 2)
        if (names.substr(i, 2).starts_with(name)) set |= 1u << (i / 2);
    return set;
}

void append_decomposed(char32_t c, std::u32string& out) {
    std::array<utf8proc_int32_t, 32> parts{}; // the longest canonical decomposition has 4 characters
    int                              boundary = 0;
    const utf8proc_ssize_t           n        = c < 0x80 || c >= 0x110000 ? 0
                                                                          : utf8proc_decompose_char(utf8proc_int32_t(c), parts.data(),
                                                                                                    utf8proc_ssize_t(parts.size()),
                                                                                                    UTF8PROC_DECOMPOSE, &boundary);
    if (n <= 0 || n > utf8proc_ssize_t(parts.size())) out += c;
    else
        for (utf8proc_ssize_t i = 0; i < n; i++) out += char32_t(parts[std::size_t(i)]);
}

void order_marks(std::u32string& text) {
    auto order = [](char32_t c) {
        return c < 0x300 || c >= 0x110000 ? 0 : int(utf8proc_get_property(utf8proc_int32_t(c))->combining_class);
    };
    for (std::size_t i = 0; i < text.size();) {
        std::size_t end = i;
        while (end < text.size() && order(text[end]) != 0) end++;
        if (end - i > 1)
            std::stable_sort(text.begin() + std::ptrdiff_t(i), text.begin() + std::ptrdiff_t(end),
                             [&](char32_t a, char32_t b) { return order(a) < order(b); });
        i = end + 1;
    }
}

} // namespace quire
