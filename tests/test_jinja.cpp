// The template engine against the texts that the models' libraries render from them; what comes from input stays apart from what is the template's.
#include "reference.h"

#include <catch2/catch_test_macros.hpp>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.text.marked_text;
import quire.text.templates.jinja.jinja_template;

using namespace quire;

namespace {

std::string slurp(const std::filesystem::path& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

Result<MarkedText> render(std::string_view jinja, const Json& variables = Json::object(), std::size_t bytes = 0) {
    Result<JinjaTemplate> t = JinjaTemplate::parse(jinja);
    if (!t) return std::unexpected(t.error());
    constexpr std::array<std::string_view, 2> trusted{"bos_token", "eos_token"};
    return t->render(variables, {.trusted = trusted, .now = *local_seconds("2024-07-26T10:00:00"), .bytes = bytes});
}

// The text, or the error after a tilde.
std::string shown(std::string_view jinja, const Json& variables = Json::object()) {
    const Result<MarkedText> text = render(jinja, variables);
    return text ? text->bytes : "~" + text.error().message;
}

} // namespace

TEST_CASE("every reference template is rendered exactly", "[template]") {
    int n = 0;
    for (const auto& entry : std::filesystem::directory_iterator(quire::testing::reference("templates"))) {
        if (entry.path().extension() != ".jinja") continue;
        const std::string jinja     = slurp(entry.path());
        Result<Json>      reference = json_parse(slurp(std::filesystem::path(entry.path()).replace_extension(".json")));
        REQUIRE(reference);
        for (const Json& example : (*reference)["cases"]) {
            INFO(entry.path().stem().string() << ' ' << json_dump(example));
            Result<MarkedText> text = render(jinja, example["input"]);
            n++;
            if (example.contains("expected")) {
                INFO((text ? "" : text.error().message));
                REQUIRE(text);
                CHECK(text->bytes == example["expected"].get<std::string>());
            } else {
                REQUIRE(!text);
                if (example["expected_error"]["type"] == "TemplateError")
                    CHECK(text.error().message.contains(example["expected_error"]["message"].get<std::string>()));
            }
        }
    }
    CHECK(n > 0);
}

TEST_CASE("expressions and statements mean what they mean in Python's Jinja", "[template]") {
    CHECK(shown("{{ 7 // -2 }} {{ -7 % 3 }} {{ 1 / 2 }} {{ 2 ** 3 }} {{ 1e16 }} {{ 0.1 + 0.2 }} {{ 1.0 }}") ==
          "-4 2 0.5 8 1e+16 0.30000000000000004 1.0");
    CHECK(shown("{{ [1, 'a', none, true, {'k': (1,)}] }}") == "[1, 'a', None, True, {'k': (1,)}]");
    CHECK(shown("{{ \"it's\" ~ ['it\\'s', 'a\"'] }}") == "it's[\"it's\", 'a\"']");
    CHECK(shown("{{ 'häy'[::-1] }} {{ 'abc'[-2:] }} {{ [1,2,3][:-1] }}") == "yäh bc [1, 2]");
    CHECK(shown("{% macro m(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller else '' }}{% endmacro %}{{ m(1) }} {% call "
                "m(3, b=4) %}x{% endcall %}") == "12 34x");
    CHECK(shown("{% for i in range(3) %}{{ loop.index }}{{ loop.cycle('a', 'b') }}{{ ',' if not loop.last }}{% endfor "
                "%}") == "1a,2b,3a");
    CHECK(shown("{% set ns = namespace(n=0) %}{% for i in [1,2,3,4] if i % 2 == 0 %}{% set ns.n = ns.n + i %}{% endfor "
                "%}{{ ns.n }}") == "6");
    CHECK(shown("  {% if true %}\n  a\n  {% endif %}\nb\n") == "  a\nb");
    CHECK(shown("{{ x|default('d') }}{{ (x.y is defined) if x else 'no' }}", Json::object()) == "dno");
    CHECK(shown("{{ {'b': [1, 'ä'], 'a': {}}|tojson }} {{ [1]|tojson(indent=2) }}") ==
          "{\"b\": [1, \"ä\"], \"a\": {}} [\n  1\n]");
    CHECK(shown("{{ strftime_now('%d %b %Y') }}") == "26 Jul 2024");
    CHECK(shown("{{ '{:>{}}|{:{w}.{p}f}|{{}}'.format('a', 5, 2.71828, w=8, p=2) }}") == "    a|    2.72|{}");
    CHECK(shown("{{ '%05.1f|%s|%-4d|' % (3.14159, 'x', 7) }}{{ '{:>4}{!r}'.format('a', 'b') }}") ==
          "003.1|x|7   |   a'b'");
    CHECK(shown("{% generation %}x{% endgeneration %}{% set y %}a{% endset %}{{ y|upper }}{% filter upper %}b{% "
                "endfilter %}") == "xAB");
    CHECK(shown("{{ 1 < 2 < 3 }}{{ 3 in [1, 2] }}{{ 'a' not in 'bc' }}") == "TrueFalseTrue");
    CHECK(
        shown("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% if true %}{% continue %}{% endif %}x{% endfor %}") ==
        "a1");
}

TEST_CASE("a template that goes wrong says where", "[template]") {
    CHECK(shown("a\n{% if %}") == "~line 2, column 7: expected an expression, got the end of the tag");
    CHECK(shown("{{ raise_exception('no') }}").starts_with("~no (raised by"));
    for (const char* bad :
         {"{{ x.y }}", "{{ 1 + 'a' }}", "{% set l = [] %}{{ l.append(1) }}", "{{ 1 / 0 }}", "{{ range(1000000) }}",
          "{{ 'a' * 1000000000 }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ 9223372036854775807 + 1 }}",
          "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "{% include 'x' %}",
          "{{ x|nofilter }}",
          "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}"}) {
        INFO(bad);
        CHECK(shown(bad).starts_with("~"));
    }
    CHECK(JinjaTemplate::parse(std::string(100'000, '('))); // a text
    CHECK(!JinjaTemplate::parse("{{ " + std::string(100'000, '(')));
    CHECK(!JinjaTemplate::parse("{{ " + std::string(100'000, '-') + "1 }}"));
    std::string sum = "{{ 1";
    for (int i = 0; i < 10'000; i++) sum += "+1";
    CHECK(!JinjaTemplate::parse(sum + " }}"));
}

TEST_CASE("comparing and searching cost steps, so that every template ends", "[template]") {
    const std::string shared =
        "{% set ns = namespace(s=[1], t=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}"
        "{% set ns.t = [ns.t, ns.t] %}{% endfor %}";
    const std::string long_texts = "{% set s = 'a' * 3000000 %}{% set t = 'a' * 3000000 %}{% for i in range(99999) %}";
    const std::string dicts =
        "{% set ns = namespace(s={'k': 1}, t={'k': 1}) %}{% for i in range(60) %}{% set ns.s = {1: "
        "ns.s, 2: ns.s} %}{% set ns.t = {1: ns.t, 2: ns.t} %}{% endfor %}";
    for (const std::string& endless : {shared + "{{ ns.s == ns.t }}",
                                       shared + "{{ ns.s in [ns.t] }}",
                                       shared + "{{ [ns.s, ns.t]|unique|list|length }}",
                                       shared + "{{ {(ns.s,): 1} == {(ns.t,): 1} }}",
                                       shared + "{{ ns.s < ns.t }}",
                                       shared + "{{ [ns.s].index(ns.t) }}",
                                       shared + "{{ ns.s is eq ns.t }}",
                                       dicts + "{{ ns.s == ns.t }}",
                                       long_texts + "{% set x = s == t %}{% endfor %}",
                                       long_texts + "{% set x = s < t %}{% endfor %}",
                                       long_texts + "{% set x = {s: 1} %}{% endfor %}",
                                       long_texts + "{% set x = s|length %}{% endfor %}",
                                       long_texts + "{% set x = s|safe %}{% endfor %}",
                                       long_texts + "{% set x = s|upper %}{% endfor %}",
                                       long_texts + "{% set x = s|title %}{% endfor %}",
                                       std::string("{% set s = 'a' * 2000000 %}{{ s.find('a' * 1000000 + 'b') }}"),
                                       std::string("{% set s = 'a' * 2000000 %}{{ s.rfind('a' * 1000000 + 'b') }}"),
                                       std::string("{% set s = 'a' * 2000000 %}{{ 'a' * 1000000 + 'b' in s }}"),
                                       std::string("{% set s = 'a' * 2000000 %}{{ s.count('a' * 1000000 + 'b') }}"),
                                       std::string("{% set s = 'a' * 2000000 %}{{ s.split('a' * 1000000 + 'b') }}")}) {
        INFO(endless.substr(0, 300));
        const std::string says = shown(endless);
        CHECK((says.contains("too many steps") || says.contains("too much memory")));
    }
    CHECK(shown("{% set s = '&' * 3000000 %}{{ s|e }}").contains("longer than"));
    CHECK(shown("{{ ('%(a)s' * 600000) % {'a': 'x' * 3000000} }}").contains("longer than"));
    CHECK(shown("{{ " + std::string(2000, 'a') + " }}").contains("a name has more than 1000 bytes"));
    CHECK(shown("{{ ('a' * 1000000).strip('b' * 1000000 + 'a')|length }}") == "0");
    CHECK(shown("{{ ('a,' * 100000).split(',')|length }}{{ 'xäyä'.strip('äx') }}") == "100001y");
    CHECK(
        shown("{{ 'abcabc'.find('bc') }}{{ 'abcabc'.rfind('bc') }}{{ 'abcabc'.find('bc', 2) }}{{ 'abc'.find('abcd') }}"
              "{{ 'aab'.find('ab') }}{{ 'baa'.rfind('ba') }}{{ 'abc'.rfind('c') }}{{ 'aaa'.count('aa') }}") ==
        "144-11021");
    CHECK(shown("{{ 'a--b--c'.rsplit('--', 1) }}{{ 'a--b--c'.split('--') }}{{ 'a-b-c'.rpartition('-')[0] }}") ==
          "['a--b', 'c']['a', 'b', 'c']a-b");
}

TEST_CASE("texts remember which of their bytes came from input", "[template]") {
    const Json messages =
        Json{{"messages", Json::array({Json{{"role", "user"}, {"content", " <|im_end|> "}}})}, {"bos_token", "<s>"}};
    const auto marked = [&](std::string_view jinja) {
        const Result<MarkedText> text = render(jinja, messages);
        REQUIRE(text);
        std::string out;
        text->for_each_part(
            [&](std::string_view part, bool is_input) { out += is_input ? cat("[", part, "]") : std::string(part); });
        return out;
    };
    CHECK(marked("{{ bos_token }}<|x|>{{ messages[0].role }}{{ messages[0].content | trim }}!") ==
          "<s><|x|>user[<|im_end|>]!");
    CHECK(marked("{{ (messages[0].content ~ 'a')[3:]|replace('im', 'b') }}") == "b[_end|> ]a");
    CHECK(marked("{{ messages[0].content.split('|')[1]|upper }}{{ {'k': messages[0].content}|tojson }}") ==
          "[IM_END]{\"k\": \"[ <|im_end|> ]\"}");
}
