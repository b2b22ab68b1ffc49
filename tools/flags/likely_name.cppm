// quire.tools.flags.likely_name: which of some names a mistyped one was probably meant to be. Owns nothing.
export module quire.tools.flags.likely_name;

import quire.core.base;

export namespace quire {

struct KnownName {
    std::string name;
    std::string meant; // the name to use in its place; mostly the same one
};

// `meant` of the known name that is nearest to the typed one, counted in letters that are wrong, missing, too many or in the wrong order; of
// equally near ones the first. "": none is near. Dashes in front, the case, and _ in place of - make no difference.
std::string likely_name(std::string_view typed, std::span<const KnownName> known);

// The end of a sentence about a mistyped name; "" where `meant` is.
std::string did_you_mean(std::string_view meant);

} // namespace quire

module :private;

namespace quire {

std::string plain_name(std::string_view name) {
    std::string plain;
    for (const char c : name.substr(std::min(name.find_first_not_of('-'), name.size())))
        plain += c == '_' ? '-' : char(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
    return plain;
}

// The letters to change, to leave out, to add, or to exchange with the next one, until `a` is `b`.
int letters_apart(std::string_view a, std::string_view b) {
    const std::size_t n = b.size() + 1;
    std::vector<int>  two_before(n), before(n),
        row(n); // for the first letters of `a`, and of `b` as many as the index says
    for (std::size_t j = 0; j < n; j++) row[j] = int(j);
    for (std::size_t i = 1; i <= a.size(); i++) {
        two_before.swap(before);
        before.swap(row);
        row[0] = int(i);
        for (std::size_t j = 1; j < n; j++) {
            row[j] = std::min({before[j] + 1, row[j - 1] + 1, before[j - 1] + int(a[i - 1] != b[j - 1])});
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                row[j] = std::min(row[j], two_before[j - 2] + 1);
        }
    }
    return row[n - 1];
}

std::string likely_name(std::string_view typed, std::span<const KnownName> known) {
    constexpr std::size_t longest = 64; // a longer word is no name
    const std::string     wanted  = plain_name(typed);
    if (wanted.size() < 3 || wanted.size() > longest) return {};
    int         least = wanted.size() < 6 ? 2 : wanted.size() < 10 ? 3 : 4; // as many are too many
    std::string best;
    for (const KnownName& one : known) {
        const std::string name = plain_name(one.name);
        if (name.size() < 3) continue;
        const int apart = letters_apart(wanted, name);
        if (apart < least) least = apart, best = one.meant;
    }
    return best;
}

std::string did_you_mean(std::string_view meant) { return meant.empty() ? "" : cat("; did you mean ", meant, "?"); }

} // namespace quire
