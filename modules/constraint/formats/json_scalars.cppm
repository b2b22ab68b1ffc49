// quire.constraint.formats.json_scalars: numbers and strings of JSON as expressions: their shapes, ranges, multiples, formats. Owns nothing.
export module quire.constraint.formats.json_scalars;

import quire.constraint.regex.parser;
export import quire.constraint.regex.regex;
import quire.core.base;
export import quire.core.json;

export namespace quire {

// A number as it is written, without an exponent.
struct Decimal {
    bool      negative = false;
    Magnitude magnitude;

    bool        is_zero() const { return magnitude.whole == "0" && magnitude.fraction.empty(); }
    std::string text() const; // as JSON
};
// Of a JSON number.
Decimal decimal_of(const Json& number);

struct NumberRange {
    std::optional<Decimal> low, high;
    bool                   with_low = true, with_high = true;
};

// The shapes from which all others are cut. A string is the text between its quotes.
struct JsonShapes {
    RegexId magnitude;    // 12, 0.5
    RegexId plain_number; // without an exponent
    RegexId exponent;     // of a number
    RegexId growth;       // of a number, not below 0; `nothing` where numbers are written plainly
    RegexId number;
    RegexId integer;        // "-?12", and with `point_zero` 12.0 also
    RegexId plain_integer;  // an integer without the form 12.0, and without -0
    RegexId character;      // of a string, in its shortest form
    RegexId any_character;  // with every escape that JSON has
    RegexId text, any_text; // any number of these

    // plain_numbers: integers have no exponents.
    static JsonShapes make(RegexPool& pool, bool point_zero, bool plain_numbers);
};

RegexId number_in(RegexPool& pool, const JsonShapes& shapes, const NumberRange& range);
// All spellings of one number without an exponent.
RegexId number_text(RegexPool& pool, const Decimal& number);
// Error: a divisor that is not above 0, or with too many digits.
Result<RegexId> number_multiple(RegexPool& pool, const JsonShapes& shapes, const Json& divisor);

// The strings of a format; none: it is not one that JSON Schema defines, and asks for nothing. Error: it cannot be expressed.
Result<std::optional<RegexId>> string_format(RegexPool& pool, std::string_view name);

} // namespace quire

module :private;

namespace quire {

Decimal decimal_of(const Json& number) {
    std::string text;
    if (number.is_number_unsigned()) text = std::to_string(number.get<std::uint64_t>());
    else if (number.is_number_integer()) text = std::to_string(number.get<std::int64_t>());
    else {
        char buffer[64];
        auto [end, error] = std::to_chars(buffer, buffer + sizeof buffer, number.get<double>());
        text.assign(buffer, end);
    }
    Decimal d;
    if (text.starts_with('-')) d.negative = true, text.erase(0, 1);
    int exponent = 0;
    if (const auto e = text.find('e'); e != std::string::npos) {
        const bool plus = e + 1 < text.size() && text[e + 1] == '+';
        (void)std::from_chars(text.data() + e + 1 + plus, text.data() + text.size(), exponent);
        text.resize(e);
    }
    const auto  point  = std::min(text.find('.'), text.size());
    std::string digits = text.substr(0, point) + (point < text.size() ? text.substr(point + 1) : "");
    int         whole  = int(point) + exponent;
    if (whole <= 0) digits.insert(0, std::size_t(1 - whole), '0'), whole = 1;
    if (std::size_t(whole) > digits.size()) digits.append(std::size_t(whole) - digits.size(), '0');
    d.magnitude.whole    = digits.substr(0, std::size_t(whole));
    d.magnitude.fraction = digits.substr(std::size_t(whole));
    while (d.magnitude.whole.size() > 1 && d.magnitude.whole[0] == '0') d.magnitude.whole.erase(0, 1);
    while (!d.magnitude.fraction.empty() && d.magnitude.fraction.back() == '0') d.magnitude.fraction.pop_back();
    return d;
}

std::string Decimal::text() const {
    return cat(negative && !is_zero() ? "-" : "", magnitude.whole, magnitude.fraction.empty() ? "" : ".",
               magnitude.fraction);
}

// Of multipleOf, in units of its last digit: each rest is a state of the lexer.
constexpr std::uint64_t most_divisor = 20'000;
constexpr std::size_t   most_places  = 9;

RegexId fixed(RegexPool& pool, std::string_view pattern) {
    const Result<RegexId> made = parse_regex(pool, pattern, TextSpelling::utf8, true);
    check(made.has_value(), "a pattern of quire's own");
    return *made;
}

JsonShapes JsonShapes::make(RegexPool& pool, bool point_zero, bool plain_numbers) {
    JsonShapes s{};
    s.magnitude    = fixed(pool, "(0|[1-9][0-9]*)(\\.[0-9]+)?");
    s.plain_number = fixed(pool, "-?(0|[1-9][0-9]*)(\\.[0-9]+)?");
    s.exponent     = fixed(pool, plain_numbers ? "[eE][+-]?[0-9]{1,2}" : "[eE][+-]?[0-9]{1,3}");
    s.growth       = plain_numbers ? RegexPool::nothing : fixed(pool, "[eE][+]?[0-9]{1,3}");
    s.number       = pool.concat(s.plain_number, pool.repeat(s.exponent, 0, 1));
    s.integer      = fixed(pool, point_zero ? "-?(0|[1-9][0-9]*)(\\.0+)?" : "-?(0|[1-9][0-9]*)");
    if (point_zero) s.integer = pool.concat(s.integer, pool.repeat(s.growth, 0, 1));
    s.plain_integer = fixed(pool, "0|-?[1-9][0-9]*");
    s.character     = quire::character(pool, all_but({}), TextSpelling::json);
    s.any_character = pool.any_of({s.character, fixed(pool,
                                                      "\\\\([\"\\\\/"
                                                      "bfnrt]|u([0-9a-cA-Ce-fE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}"
                                                      "|[dD][89abAB][0-9a-fA-F]{2}\\\\u[dD][c-fC-F][0-9a-fA-F]{2}))")});
    s.text          = pool.repeat(s.character, 0, RegexPool::endless);
    s.any_text      = pool.repeat(s.any_character, 0, RegexPool::endless);
    return s;
}

RegexId number_in(RegexPool& pool, const JsonShapes& shapes, const NumberRange& range) {
    const Decimal                zero;
    std::vector<RegexId>         positive{shapes.magnitude}, negative{shapes.magnitude};
    const std::optional<Decimal>&low = range.low, &high = range.high;
    const auto above = [](const std::optional<Decimal>& d) { return d && !d->negative && !d->is_zero(); };
    const auto below = [](const std::optional<Decimal>& d) { return d && d->negative && !d->is_zero(); };
    if (low && !below(low)) { // the positive ones from low on; of the negative ones -0
        positive.push_back(pool.at_least(low->magnitude, range.with_low));
        negative.push_back(above(low) ? RegexPool::nothing : pool.at_most(zero.magnitude, range.with_low));
    } else if (low) negative.push_back(pool.at_most(low->magnitude, range.with_low));
    if (high && !above(high)) {
        negative.push_back(pool.at_least(high->magnitude, range.with_high));
        positive.push_back(below(high) ? RegexPool::nothing : pool.at_most(zero.magnitude, range.with_high));
    } else if (high) positive.push_back(pool.at_most(high->magnitude, range.with_high));
    const RegexId        minus = pool.literal("-");
    std::vector<RegexId> all{pool.all_of(positive), pool.concat(minus, pool.all_of(negative))};
    // With an exponent only where the sign alone decides.
    const RegexId exponent = shapes.exponent;
    const RegexId some     = pool.all_of({shapes.magnitude, pool.at_least(zero.magnitude, false)});
    if (!high && !above(low)) all.push_back(pool.concat(some, exponent));
    if (!low && !below(high)) all.push_back(pool.concat(minus, pool.concat(some, exponent)));
    return pool.any_of(std::move(all));
}

RegexId number_text(RegexPool& pool, const Decimal& number) {
    const RegexId zero = pool.literal("0"), zeros = pool.repeat(zero, 0, RegexPool::endless);
    const RegexId more = number.magnitude.fraction.empty()
                             ? pool.repeat(pool.concat(pool.literal("."), pool.concat(zero, zeros)), 0, 1)
                             : zeros;
    const RegexId text = pool.concat(pool.literal(number.text()), more);
    return number.is_zero() ? pool.any_of({text, pool.concat(pool.literal("-"), text)}) : text;
}

Result<RegexId> number_multiple(RegexPool& pool, const JsonShapes& shapes, const Json& divisor) {
    const Decimal     d      = decimal_of(divisor);
    const std::string digits = d.magnitude.whole + d.magnitude.fraction;
    std::uint64_t     value  = 0;
    if (d.negative || d.is_zero()) return fail("multipleOf ", json_dump(divisor), " is not above 0");
    (void)std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (d.magnitude.fraction.size() > most_places)
        return fail("multipleOf ", json_dump(divisor), " has more than ", most_places, " digits behind the point");
    if (digits.size() > 18 || value > most_divisor)
        return fail("multipleOf ", json_dump(divisor), " is more than ", most_divisor,
                    d.magnitude.fraction.empty() ? "" : " units of its last digit");
    const RegexId multiple = pool.all_of({shapes.magnitude, pool.multiple_of(value, int(d.magnitude.fraction.size()))});
    return pool.concat(pool.repeat(pool.literal("-"), 0, 1), pool.concat(multiple, pool.repeat(shapes.growth, 0, 1)));
}

// RFC 3339, 5321, 1123, 2673, 4291, 4122, 3986, 6901, and ISO 8601 as RFC 3339 quotes it.
constexpr std::string_view format_date =
    "(?!0000)([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|"
    "2[0-8]))|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)";
constexpr std::string_view format_time =
    "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]+)?([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])";
// A leap second is at 23:59:60 UTC: of another place's time, an hour and a minute that the offset leads there from.
constexpr std::string_view leap_second = ":60(\\.[0-9]+)?";
RegexId                    leap_seconds(RegexPool& pool) {
    const auto two   = [](int n) { return cat(n < 10 ? "0" : "", n); };
    const auto times = [&](std::string_view sign, int n, const auto& local, bool hours) {
        std::string all;
        for (int i = 0; i < n; i++)
            if (const int l = local(i); l >= 0)
                all += hours ? cat(all.empty() ? "" : "|", two(l), ":[0-9]{2}", leap_second, sign, two(i), ":[0-9]{2}")
                                                : cat(all.empty() ? "" : "|", "[0-9]{2}:", two(l), leap_second, sign, "[0-9]{2}:", two(i));
        return fixed(pool, all);
    };
    const auto before = [&](std::string_view sign, const auto& hour, const auto& minute) {
        return pool.all_of({times(sign, 24, hour, true), times(sign, 60, minute, false)});
    };
    return pool.any_of({fixed(pool, cat("23:59", leap_second, "[Zz]")),
                                           before(
                            "-", [](int h) { return 23 - h; }, [](int m) { return 59 - m; }),
                                           before(
                            "[+]", [](int h) { return h; }, [](int m) { return m - 1; }), // -1: the hour before
                                           before("[+]", [](int h) { return (h + 23) % 24; }, [](int m) { return m == 0 ? 59 : -1; })});
}
constexpr std::string_view format_ipv4 =
    "((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\\.){3}(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
constexpr std::string_view pchar = "([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})";

// Eight groups of hexadecimal digits, one run of zeros shortened, the last two perhaps as IPv4.
std::string format_ipv6() {
    const std::string g = "[0-9A-Fa-f]{1,4}", last = cat("(", g, ":", g, "|", format_ipv4, ")");
    std::string       all = cat("((", g, ":){6}", last);
    for (int before = 0; before <= 7; before++) {
        const std::string left = before == 0 ? "" : cat("(", g, "(:", g, "){0,", before - 1, "})?");
        if (before <= 5) all += cat("|", left, "::(", g, ":){", 5 - before, "}", last);
        if (before == 6) all += cat("|", left, "::", g);
        if (before == 7) all += cat("|", left, "::");
    }
    return all + ")";
}

std::string format_uri(bool reference, bool iri) {
    const std::string p = iri ? cat("(", pchar, "|[^\\x00-\\x7f])") : std::string(pchar);
    const std::string host =
        cat("(\\[([0-9A-Fa-f:.]+|v[0-9A-Fa-f]+\\.[A-Za-z0-9._~!$&'()*+,;=:-]+)\\]|([A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-"
            "Fa-f]{2}",
            iri ? "|[^\\x00-\\x7f]" : "", ")*)");
    const std::string user =
        cat("(([A-Za-z0-9._~!$&'()*+,;=:-]|%[0-9A-Fa-f]{2}", iri ? "|[^\\x00-\\x7f]" : "", ")*@)?");
    const std::string authority = cat("//", user, host, "(:[0-9]*)?(/", p, "*)*");
    const std::string rest      = cat("(\\?(", p, "|[/?])*)?(#(", p, "|[/?])*)?");
    std::string       full =
        cat("[A-Za-z][A-Za-z0-9+.-]*:(", authority, "|/(", p, "+(/", p, "*)*)?|", p, "+(/", p, "*)*|)", rest);
    if (!reference) return full;
    const std::string no_colon = cat("([A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2}", iri ? "|[^\\x00-\\x7f]" : "", ")");
    return cat("(", full, "|(", authority, "|/(", p, "+(/", p, "*)*)?|", no_colon, "+(/", p, "*)*|)", rest, ")");
}

Result<std::optional<RegexId>> string_format(RegexPool& pool, std::string_view name) {
    const auto whole = [&](std::string_view pattern) -> Result<std::optional<RegexId>> {
        Result<RegexId> made = parse_regex(pool, pattern, TextSpelling::json, true);
        if (!made) return std::unexpected(made.error());
        return *made;
    };
    const std::string label = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?";
    // Two hyphens in the third and fourth place mark a label of another script (RFC 5891); its content is not checked.
    const std::string host = cat("(?!(.*\\.)?([^xX].|[xX][^nN])--)(?=.{1,253}$)", label, "(\\.", label, ")*");
    const std::string atom = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+";
    if (name == "date") return whole(format_date);
    if (name == "time" || name == "date-time") {
        const RegexId time = pool.any_of({fixed(pool, format_time), leap_seconds(pool)});
        return name == "time" ? time : pool.concat(fixed(pool, cat(format_date, "[Tt]")), time);
    }
    if (name == "duration")
        return whole(
            "P([0-9]+W|([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)(T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M(["
            "0-9]+S)?|[0-9]+S))?|T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S))");
    if (name == "email")
        return whole(cat("(", atom, "(\\.", atom, ")*|\"([ !#-\\[\\]-~]|\\\\[ -~])*\")@(", label, "(\\.", label,
                         ")*|\\[", format_ipv4, "\\]|\\[IPv6:", format_ipv6(), "\\])"));
    if (name == "hostname") return whole(host);
    if (name == "ipv4") return whole(format_ipv4);
    if (name == "ipv6") return whole(format_ipv6());
    if (name == "uuid") return whole("[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}");
    if (name == "uri") return whole(format_uri(false, false));
    if (name == "uri-reference") return whole(format_uri(true, false));
    if (name == "iri") return whole(format_uri(false, true));
    if (name == "iri-reference") return whole(format_uri(true, true));
    if (name == "json-pointer") return whole("(/([^/~]|~[01])*)*");
    if (name == "relative-json-pointer") return whole("(0|[1-9][0-9]*)(#|(/([^/~]|~[01])*)*)");
    if (name == "uri-template")
        return whole(
            "([^\\x00-\\x20\"'<>\\\\^`{|}%]|%[0-9A-Fa-f]{2}|\\{[+#./"
            ";?&]?[A-Za-z0-9_.%]+(:[1-9][0-9]{0,3}|\\*)?(,[A-Za-z0-9_.%]+(:[1-9][0-9]{0,3}|\\*)?)*\\})*");
    if (name == "regex" || name == "idn-email" || name == "idn-hostname")
        return fail("the format ", quote(name), " is not supported");
    return std::optional<RegexId>();
}

} // namespace quire
