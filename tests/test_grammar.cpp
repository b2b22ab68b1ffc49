// Grammars: expressions and their derivatives, JSON Schema, GBNF, structural tags; masks over a small vocabulary.
#include <catch2/catch_test_macros.hpp>
#include <string>

import quire.constraint.compile;
import quire.constraint.grammar.grammar;
import quire.constraint.regex.parser;
import quire.constraint.regex.regex;
import quire.core.base;
import quire.core.json;
import quire.core.std;

using namespace quire;
using Kind = ConstraintSpec::Kind;

namespace {

// Bytes as tokens, some words, an end token.
std::shared_ptr<const TokenTrie> bytes_and_words() {
    static const auto trie = [] {
        std::vector<std::string> all;
        for (int b = 0; b < 256; b++) all.emplace_back(1, char(b));
        for (const char* word :
             {"{\"", "\":", "name", "\",\"", "true", "false", "12", "123", "abc", " a", "\"}", "ab", "ab"})
            all.emplace_back(word);
        all.emplace_back(); // the end
        return std::make_shared<const TokenTrie>(all, std::vector<Token>{Token(all.size() - 1)});
    }();
    return trie;
}

// Most of these are plain text, so that masks of names are made from those of any text.
std::shared_ptr<const TokenTrie> letters() {
    static const auto trie = [] {
        std::vector<std::string> all;
        for (int b = 0; b < 256; b++) all.emplace_back(1, char(b));
        for (char a = 'a'; a <= 'l'; a++)
            for (char b = 'a'; b <= 'l'; b++)
                for (const char* rest : {"", "c", "cd", "\"", "\":", "\":\"", "\",\"ab"})
                    all.push_back(std::string{a, b} + rest);
        all.emplace_back(40, 'a');
        all.push_back(std::string(33, 'b') + "\"");
        all.emplace_back("\u00e9t\u00e9");
        all.emplace_back("{\"");
        all.emplace_back(); // the end
        return std::make_shared<const TokenTrie>(all, std::vector<Token>{Token(all.size() - 1)});
    }();
    return trie;
}

std::shared_ptr<Constraint> compiled(const ConstraintSpec& spec) {
    Result<std::shared_ptr<Constraint>> made = compile_constraint(spec);
    INFO((made ? std::string() : made.error().message));
    REQUIRE(made);
    return *made;
}

ConstraintSpec schema(const char* text, bool ordered = true) {
    ConstraintSpec spec{.kind = Kind::json_schema};
    spec.schema  = *json_parse(text);
    spec.ordered = ordered;
    return spec;
}
ConstraintSpec text_spec(Kind kind, std::string text) {
    ConstraintSpec spec{.kind = kind};
    spec.text = std::move(text);
    return spec;
}

bool accepts(const std::shared_ptr<Constraint>& c, std::string_view text) {
    ConstraintState state(c, bytes_and_words());
    return state.accept_bytes(text) && state.may_end();
}
bool accepts(const ConstraintSpec& spec, std::string_view text) { return accepts(compiled(spec), text); }

std::string error_of(const ConstraintSpec& spec) {
    const Result<std::shared_ptr<Constraint>> made = compile_constraint(spec);
    return made ? "" : made.error().message;
}

bool says(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

} // namespace

TEST_CASE("expressions match whole texts", "[grammar]") {
    const auto matches = [](const char* pattern, std::string_view text) {
        return accepts(text_spec(Kind::regex, pattern), text);
    };
    CHECK(matches("a+b?", "aab"));
    CHECK_FALSE(matches("a+b?", "b"));
    CHECK(matches("[0-9]{2,3}", "123"));
    CHECK_FALSE(matches("[0-9]{2,3}", "1234"));
    CHECK(matches("(yes|no)", "no"));
    CHECK(matches("[^a-c]é.", "dé\xf0\x9f\x98\x80"));
    CHECK_FALSE(matches("[^a-c]", "b"));
    CHECK_FALSE(matches(".", "\n"));
    CHECK(matches("\\d{3}-\\d{4}", "555-1234"));
    CHECK(matches("(?=.*[0-9])[a-z0-9]+", "ab1"));
    CHECK_FALSE(matches("(?=.*[0-9])[a-z0-9]+", "abc"));
    CHECK_FALSE(matches("(?!ab)[a-z]+", "abc"));
    CHECK(matches("", ""));
    CHECK(matches("a*", ""));
}

TEST_CASE("a pattern that cannot be used says where", "[grammar]") {
    CHECK(says(error_of(text_spec(Kind::regex, "a(b")), "'(' without ')' at byte 3"));
    CHECK(says(error_of(text_spec(Kind::regex, "*a")), "a quantifier without anything before it at byte 0"));
    CHECK(says(error_of(text_spec(Kind::regex, "(a)\\1")), "a back reference"));
    CHECK(says(error_of(text_spec(Kind::regex, "[b-a]")), "ends before it begins"));
    CHECK(says(error_of(text_spec(Kind::regex, "a\\b")), "a word boundary"));
    CHECK(says(error_of(text_spec(Kind::regex, "[^\\x00-\\u{10ffff}]")), "cannot be met"));
    CHECK(says(error_of(text_spec(Kind::regex, std::string(1000, '('))), "nested too deep"));
}

TEST_CASE("an intersection without texts is found empty", "[grammar]") {
    RegexPool  pool;
    const auto parse = [&](const char* p) { return *parse_regex(pool, p, TextSpelling::utf8, true); };
    CHECK(pool.is_void(pool.all_of({parse("a+"), parse("b+")})));
    CHECK_FALSE(pool.is_void(pool.all_of({parse("a*b"), parse("a*")})) == false);
    CHECK_FALSE(pool.is_void(pool.all_of({parse("[a-z]{40}"), parse(".*q.*")})));
    CHECK(pool.is_void(pool.minus(parse("ab|ac"), parse("a[bc]"))));
}

TEST_CASE("members come in the order of the schema, or in any", "[grammar]") {
    const char* text =
        R"({"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"boolean"}},"required":["a"],"additionalProperties":false})";
    CHECK(accepts(schema(text), R"({"a":1})"));
    CHECK(accepts(schema(text), R"({"a": 1, "b": true})"));
    CHECK_FALSE(accepts(schema(text), R"({"b":true,"a":1})"));
    CHECK(accepts(schema(text, false), R"({"b":true,"a":1})"));
    CHECK_FALSE(accepts(schema(text, false), R"({"b":true})"));
    CHECK_FALSE(accepts(schema(text, false), R"({"a":1,"a":1})"));
    CHECK_FALSE(accepts(schema(text), R"({"a":1,"c":1})"));
    CHECK_FALSE(accepts(schema(text), R"({"a":"1"})"));
}

TEST_CASE("keywords of JSON Schema", "[grammar]") {
    struct Row {
        const char*              schema;
        std::vector<const char*> valid, invalid;
    };
    const Row rows[] = {
        {R"({"type":"integer","minimum":-3,"exclusiveMaximum":120})",
         {"-3", "0", "119", "7.0"},
         {"-4", "120", "1.5", "007"}},
        {R"({"type":"number","minimum":0.5,"maximum":10})",
         {"0.5", "9.99", "10", "10.0"},
         {"0.4", "10.01", "-1", "1e1"}},
        {R"({"type":"number","exclusiveMinimum":0})", {"0.1", "1e-3", "5"}, {"0", "-1", "-0.5", "0.0"}},
        {R"({"type":"integer","multipleOf":7})", {"0", "21", "-14"}, {"8", "22"}},
        {R"({"multipleOf":0.01})", {"4.35", "1", "\"x\""}, {"4.355"}},
        {R"({"type":"string","minLength":2,"maxLength":3})",
         {R"("ab")", R"("a\n")", "\"\xc3\xa9\xc3\xa9\""},
         {R"("a")", R"("abcd")"}},
        {R"({"type":"string","pattern":"^a.c$"})", {R"("abc")", R"("a\"c")"}, {R"("abcd")", R"("ac")"}},
        {R"({"type":"string","pattern":"b"})", {R"("abc")", R"("b")"}, {R"("ac")"}},
        {R"({"enum":[1,"x",null,[1,2],{"k":true}]})",
         {"1", "1.0", R"("x")", "null", "[1,2]", R"({"k":true})"},
         {"2", R"("y")", "[1]", "{}"}},
        {R"({"const":{"a":[]}})", {R"({"a":[]})"}, {R"({"a":[1]})", "{}"}},
        {R"({"type":["null","boolean"]})", {"null", "true"}, {"0", R"("true")"}},
        {R"({"type":"array","items":{"type":"integer"},"minItems":1,"maxItems":2})",
         {"[1]", "[1, 2]"},
         {"[]", "[1,2,3]", R"(["a"])"}},
        {R"({"prefixItems":[{"type":"string"},{"type":"integer"}],"items":false})",
         {R"(["a",1])", R"(["a"])", "[]"},
         {R"([1])", R"(["a",1,2])"}},
        {R"({"type":"object","patternProperties":{"^x-":{"type":"integer"}},"additionalProperties":false})",
         {"{}", R"({"x-a":1,"x-b":2})"},
         {R"({"x-a":"1"})", R"({"y":1})"}},
        {R"({"type":"object","additionalProperties":{"type":"boolean"},"minProperties":1,"maxProperties":2})",
         {R"({"a":true})"},
         {"{}", R"({"a":1})", R"({"a":true,"b":true,"c":true})"}},
        {R"({"type":"object","propertyNames":{"maxLength":2}})", {R"({"ab":1})", "{}"}, {R"({"abc":1})"}},
        {R"({"anyOf":[{"type":"integer"},{"type":"string"}]})", {"3", R"("s")"}, {"null", "[]"}},
        {R"({"allOf":[{"minimum":2},{"maximum":4}],"type":"integer"})", {"3"}, {"1", "5"}},
        {R"({"oneOf":[{"multipleOf":3,"type":"integer"},{"multipleOf":5,"type":"integer"}]})",
         {"3", "5"},
         {"15", "0", "7"}},
        {R"({"oneOf":[{"required":["a"]},{"required":["b"]}],"type":"object"})",
         {R"({"a":1})", R"({"b":1})"},
         {R"({"a":1,"b":1})", "{}"}},
        {R"({"not":{"type":"string"}})", {"1", "null", "{}"}, {R"("s")"}},
        {R"({"type":"integer","not":{"enum":[1,2]}})", {"3"}, {"1", "2", "2.0"}},
        {R"({"type":"object","properties":{"k":{"enum":["a","b"]},"v":{}},"required":["k"],"if":{"properties":{"k":{"const":"a"}}},"then":{"required":["v"]}})",
         {R"({"k":"a","v":1})", R"({"k":"b"})"},
         {R"({"k":"a"})"}},
        {R"({"type":"object","dependentRequired":{"a":["b"]},"properties":{"a":{},"b":{}}})",
         {R"({"a":1,"b":1})", R"({"b":1})", "{}"},
         {R"({"a":1})"}},
        {R"({"$ref":"#/$defs/list","$defs":{"list":{"type":"object","properties":{"next":{"$ref":"#/$defs/list"}},"additionalProperties":false}}})",
         {"{}", R"({"next":{"next":{}}})"},
         {R"({"next":1})", R"({"x":1})"}},
        {R"({"type":"string","format":"date"})",
         {R"("2024-02-29")"},
         {R"("2023-02-29")", R"("2024-13-01")", R"("0000-01-01")"}},
        {R"({"type":"string","format":"ipv6"})",
         {R"("::1")", R"("1:2:3:4:5:6:7:8")", R"("::ffff:1.2.3.4")"},
         {R"("1::2::3")", R"("12345::")"}},
        {R"({"type":"string","format":"uuid"})", {R"("2eb8aa08-aa98-11ea-b4aa-73b441d16380")"}, {R"("2eb8aa08")"}},
        {R"({"type":"string","format":"colour"})", {R"("red")"}, {"1"}},
        {"true", {"1", "[{}]", R"({"a":{"b":[null]}})"}, {"", "01", "{a:1}", "[1,]"}},
    };
    for (const Row& row : rows) {
        ConstraintSpec spec = schema(row.schema, false);
        spec.plain_numbers  = false;
        const auto c        = compiled(spec);
        for (const char* text : row.valid) {
            INFO(row.schema << "  " << text);
            CHECK(accepts(c, text));
        }
        for (const char* text : row.invalid) {
            INFO(row.schema << "  " << text);
            CHECK_FALSE(accepts(c, text));
        }
    }
}

TEST_CASE("formats of JSON Schema at their edges", "[grammar]") {
    const auto holds = [](const char* format, std::string_view text) {
        return accepts(schema(cat(R"({"type":"string","format":")", format, "\"}").c_str()), text);
    };
    CHECK(holds("time", "\"23:59:60Z\""));
    CHECK(holds("time", "\"01:29:60.5+01:30\"")); // leap seconds, where it is another time
    CHECK(holds("time", "\"15:59:60-08:00\""));
    CHECK(holds("time", "\"07:59:60+08:00\""));
    CHECK_FALSE(holds("time", "\"23:59:60+01:00\""));
    CHECK_FALSE(holds("time", "\"23:59:60-01:00\""));
    CHECK_FALSE(holds("time", "\"01:29:60+01:29\""));
    CHECK(holds("date-time", "\"1998-12-31T15:59:60.123-08:00\""));
    CHECK_FALSE(holds("date-time", "\"1998-12-31T15:58:60-08:00\""));
    CHECK(holds("email", R"("\"joe bloggs\"@example.com")"));
    CHECK(holds("email", R"("joe@[127.0.0.1]")"));
    CHECK(holds("email", R"("joe@[IPv6:::1]")"));
    CHECK_FALSE(holds("email", R"("joe bloggs@example.com")"));
    CHECK_FALSE(holds("email", R"("joe@[127.0.0.300]")"));
    CHECK(holds("hostname", R"("xn--4gbwdl.xn--wgbh1c")"));
    CHECK_FALSE(holds("hostname", R"("ab--cd.org")"));
    CHECK(holds("iri-reference", "\"\u00e2\u03c0\u03c0\""));
    CHECK_FALSE(holds("uri-reference", "\"\u00e2\u03c0\u03c0\""));
    const char* base64 = R"({"$schema":"http://json-schema.org/draft-07/schema#","contentEncoding":"base64"})";
    CHECK(accepts(schema(base64), R"("eyJmb28iOiAiYmFyIn0=")"));
    CHECK_FALSE(accepts(schema(base64), R"("eyJmb28iOi%iYmFyIn0K")"));
    CHECK(accepts(schema(R"({"contentEncoding":"base64"})"), R"("%")")); // an annotation since draft 2019-09
}

TEST_CASE("what stands in an unknown keyword has no identifier", "[grammar]") {
    const ConstraintSpec spec = schema(R"({"$defs":{"a":{"any":[{"$id":"https://h/x","type":"null"}]},
        "b":{"$id":"https://h/x","type":"string"}},"$ref":"https://h/x"})");
    CHECK(accepts(spec, "\"s\""));
    CHECK_FALSE(accepts(spec, "null"));
    // Unless nothing else has it, as where schemas are kept in a member of one's own.
    CHECK(accepts(schema(R"({"components":{"a":{"$anchor":"a","type":"null"}},"$ref":"#a"})"), "null"));
    CHECK(says(error_of(schema(R"({"$schema":"https://example.com/dialect"})")),
               "$schema: 'https://example.com/dialect'"));
}

TEST_CASE("integers are generated as such, and checked by their value", "[grammar]") {
    ConstraintSpec spec = schema(R"({"items":{"anyOf":[{"type":"integer","minimum":5},{"enum":[2,-1.50]}]}})");
    CHECK(accepts(spec, "[12,2,-1.5]"));
    CHECK_FALSE(accepts(spec, "[12.0]"));
    CHECK_FALSE(accepts(spec, "[2.0]"));
    CHECK_FALSE(accepts(spec, "[-1.50]"));
    spec.plain_numbers = false;
    CHECK(accepts(spec, "[12.0,2.00,-1.50]"));
    CHECK_FALSE(accepts(spec, "[12.5]"));
    CHECK_FALSE(accepts(spec, "[2.01]"));
    ConstraintSpec numbers =
        schema(R"({"items":[{"type":"integer","multipleOf":0.5},{"type":"number"},{"enum":[0,7.5]}]})");
    CHECK_FALSE(accepts(numbers, "[1e+308]"));
    numbers.plain_numbers = false;
    CHECK(accepts(numbers, "[1e+308,1.5e-300,-0.00]"));
    CHECK(accepts(numbers, "[12345678910111213141516171819202122232425262728293031,0,7.500]"));
    CHECK_FALSE(accepts(numbers, "[1e-3]"));
    CHECK_FALSE(accepts(numbers, "[1,1,-7.5]"));
    // A number that is no integer is not written as one in another way.
    const ConstraintSpec without = schema(R"({"type":"number","not":{"anyOf":[{"type":"integer"},{"const":2.5}]}})");
    CHECK(accepts(without, "12.5"));
    CHECK_FALSE(accepts(without, "12.0"));
    CHECK_FALSE(accepts(without, "2.50"));
}

TEST_CASE("a schema may come again within what it looks ahead for", "[grammar]") {
    const auto expression = schema(
        R"({"$ref":"#/$defs/e","$defs":{"e":{"oneOf":[{"type":"number"},{"type":"array","items":{"$ref":"#/$defs/e"},"minItems":1},{"type":"array","maxItems":0}]}}})");
    CHECK(accepts(expression, "[1,[2,[]]]"));
    CHECK_FALSE(accepts(expression, "[1,[true]]"));
    CHECK(says(error_of(schema(R"({"anyOf":[{"$ref":"#"},{"type":"null"}]})")), "refers to itself"));
}

TEST_CASE("of the empty text alone the mask is the end", "[grammar]") {
    ConstraintState            state(compiled(text_spec(Kind::grammar, "root ::= \"\"")), bytes_and_words());
    std::vector<std::uint64_t> bits(state.words());
    REQUIRE(state.mask(bits));
    CHECK((bits.back() & bits.back() - 1) == 0);
    CHECK(state.forced_bytes().empty());
    CHECK_FALSE(state.accept_bytes("a"));
    CHECK(state.accept(bytes_and_words()->ends()[0]));
}

TEST_CASE("a schema that cannot be met or is not supported is refused by name", "[grammar]") {
    CHECK(says(error_of(schema(R"({"type":"array","uniqueItems":true})")), "uniqueItems"));
    CHECK(says(error_of(schema(R"({"properties":{"a":{"contains":{}}}})")), "'#/properties/a': contains"));
    CHECK(says(error_of(schema(R"({"$ref":"#/nowhere"})")), "'#/nowhere' is not in this document"));
    CHECK(says(error_of(schema(R"({"$ref":"#"})")), "refers to itself"));
    std::string chain; // of schemas that are all different
    for (int i = 0; i < 41; i++) chain += cat(R"("d)", i, R"(":{"anyOf":[{"$ref":"#/$defs/d)", i + 1, R"("}]},)");
    const std::string deep = R"({"$ref":"#/$defs/d0","$defs":{)" + chain + R"("d41":{"type":"null"}}})";
    CHECK(says(error_of(schema(deep.c_str())), "more than 64 schemas stand in one another"));
    CHECK(says(error_of(schema("false")), "cannot be met"));
    CHECK(says(error_of(schema(R"({"not":{"oneOf":[{}],"propertyNames":{"type":["integer","boolean"]}}})")),
               "no text that can be generated satisfies it"));
    CHECK(says(error_of(schema(R"({"type":"integer","minimum":2,"maximum":1})")), "cannot be met"));
    CHECK(says(error_of(schema(R"({"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]})")),
               "cannot be met"));
    CHECK(says(error_of(schema(R"({"type":"text"})")), "is not a type"));
    CHECK(says(error_of(schema(R"({"pattern":"("})")), "pattern"));
    CHECK(says(error_of(text_spec(Kind::regex, std::string(300'000, 'a'))), "bytes"));
    CHECK(says(error_of(schema(R"({"multipleOf":30000})")), "multipleOf 30000 is more than 20000"));
    CHECK(says(error_of(schema(R"({"multipleOf":1e300})")), "multipleOf 1e+300 is more than 20000"));
    CHECK(says(error_of(schema(R"({"multipleOf":2.0001})")),
               "multipleOf 2.0001 is more than 20000 units of its last digit"));
    CHECK(says(error_of(schema(R"({"multipleOf":1e-10})")), "has more than 9 digits behind the point"));
    CHECK(says(error_of(schema(
                   R"({"$schema":"http://json-schema.org/draft-07/schema#","contentMediaType":"application/json"})")),
               "contentMediaType: is not supported in draft 7"));
}

TEST_CASE("grammars of llama.cpp", "[grammar]") {
    const ConstraintSpec json = text_spec(Kind::grammar, R"(
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws  # a comment
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
)");
    const auto           c    = compiled(json);
    CHECK(accepts(c, "{\"a\": [1, -2.5e3, \"x\\n\"], \"b\":\n  {}}"));
    CHECK_FALSE(accepts(c, R"({"a":1,})"));
    CHECK_FALSE(accepts(c, "[1]"));
    const auto left =
        compiled(text_spec(Kind::grammar, "root ::= e\ne ::= e \"+\" t | t\nt ::= \"(\" e \")\" | [0-9]+"));
    CHECK(accepts(left, "1+(2+3)+4"));
    CHECK_FALSE(accepts(left, "1+(2+3"));
    CHECK(accepts(text_spec(Kind::grammar, "root ::= \"a\" root \"b\" | \"\""), "aaabbb"));
    CHECK_FALSE(accepts(text_spec(Kind::grammar, "root ::= \"a\" root \"b\" | \"\""), "aabbb"));
    CHECK(says(error_of(text_spec(Kind::grammar, "root ::= x")), "the rule 'x' is not defined"));
    CHECK(says(error_of(text_spec(Kind::grammar, "a ::= \"b\"")), "no rule named root"));
    CHECK(says(error_of(text_spec(Kind::grammar, "root ::= \"a")), "line 1"));
    CHECK(says(error_of(text_spec(Kind::grammar, "root ::= root \"a\"")), "cannot be met"));
    CHECK(says(error_of(text_spec(Kind::grammar, "root ::= a\na ::= b")), "line 2: the rule 'b' is not defined"));
    CHECK(says(error_of(text_spec(Kind::grammar, "root ::= \"\\uD800\"")), "no character"));
}

TEST_CASE("rules that come back to themselves without a byte, or end very deep, need no stack", "[grammar]") {
    const auto cycle = compiled(text_spec(Kind::grammar, "root ::= s\ns ::= s s | \"a\" | \"\""));
    CHECK(accepts(cycle, ""));
    CHECK(accepts(cycle, "aaaaaaaa"));
    CHECK_FALSE(accepts(cycle, "aab"));
    const auto right = compiled(text_spec(Kind::grammar, "root ::= \"a\" root \"b\" | \"a\" root | \"c\""));
    CHECK(accepts(right, std::string(20'000, 'a') + "c"));
    CHECK_FALSE(accepts(right, "aacbbb"));
}

TEST_CASE("a grammar whose names end anywhere takes bounded work for a mask", "[grammar]") {
    std::vector<std::string> words;
    for (int i = 0; i < 20'000; i++) {
        std::string word;
        for (int n = i + 26; n > 0; n /= 26) word += char('a' + n % 26);
        words.push_back(word + word);
    }
    words.emplace_back(); // the end
    const auto      trie = std::make_shared<const TokenTrie>(words, std::vector<Token>{Token(words.size() - 1)});
    const auto      c    = compiled(text_spec(Kind::grammar, R"gbnf(root ::= expression
expression ::= term ws (("+"|"-") ws term)*
term ::= factor ws (("*"|"/") ws factor)*
factor ::= number | variable | "(" expression ")" | function-call
number ::= [0-9]+
variable ::= [a-zA-Z_][a-zA-Z0-9_]*
function-call ::= variable ws "(" (expression ("," ws expression)*)? ")"
ws ::= [ \t\n\r]?)gbnf"));
    ConstraintState state(c, trie);
    std::vector<std::uint64_t> bits(state.words());
    for (const char* part : {"f(g(x),h", "(y", ",z", "))+foo"}) {
        REQUIRE(state.accept_bytes(part));
        CHECK(state.mask(bits));
    }
}

TEST_CASE("tags in free text follow their schemas", "[grammar]") {
    ConstraintSpec spec{.kind = Kind::structural_tag};
    spec.schema = *json_parse(
        R"({"triggers":["<f="],"structures":[{"begin":"<f=go>","schema":{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"]},"end":"</f>"}]})");
    const auto c = compiled(spec);
    CHECK(accepts(c, "hello < world"));
    CHECK(accepts(c, "so: <f=go>{\"n\":1}</f> and <<f=go>{\"n\":2}</f>"));
    CHECK_FALSE(accepts(c, "so: <f=stop>"));
    CHECK_FALSE(accepts(c, "<f=go>{\"n\":\"x\"}</f>"));
    CHECK_FALSE(accepts(c, "<f=go>{\"n\":1}"));
}

// Along random texts under the mask.
void check_masks(const std::shared_ptr<const TokenTrie>& trie, const ConstraintSpec& spec, int n_texts, int n_steps) {
    const auto      end = trie->ends()[0];
    const auto      c   = compiled(spec);
    std::mt19937_64 random(7);
    for (int text = 0; text < n_texts; text++) {
        ConstraintState            state(c, trie);
        std::vector<std::uint64_t> bits(state.words());
        for (int step = 0; step < n_steps && !state.ended(); step++) {
            const Result<void> made = state.mask(bits);
            INFO(spec.schema.dump() << "  " << text << "  " << (made ? "" : made.error().message));
            REQUIRE(made);
            std::vector<Token> allowed;
            for (Token t = 0; t < trie->vocab_size(); t++) {
                const bool      bit  = (bits[std::size_t(t) / 64] >> (t % 64) & 1) != 0;
                ConstraintState next = state;
                const bool      goes =
                    t == end ? state.may_end() : next.accept_bytes(trie->bytes(t)) && !trie->bytes(t).empty();
                INFO("token " << t << " after " << step << " tokens");
                CHECK(bit == goes);
                if (bit) allowed.push_back(t);
            }
            REQUIRE(state.accept(allowed[random() % allowed.size()]));
        }
    }
}

TEST_CASE("a mask has exactly the tokens whose bytes are accepted", "[grammar]") {
    const ConstraintSpec specs[] = {
        schema(
            R"({"type":"object","properties":{"name":{"type":"string","maxLength":6},"n":{"type":"integer","minimum":5}},"required":["name"]})"),
        schema("true"),
        schema(R"({"enum":["true","abc",true,12,123]})"),
        text_spec(Kind::regex, "(ab|abc)* a{2,4}"),
        text_spec(Kind::grammar, "root ::= \"ab\" root | [0-9]+ | root \"abc\""),
        text_spec(Kind::grammar, "root ::= e\ne ::= t (\"ab\" t)*\nt ::= [a-c]+ | [a-c]+ \"12\" e | \"{\" e \"}\""),
    };
    for (const ConstraintSpec& spec : specs) check_masks(bytes_and_words(), spec, 20, 40);
}

TEST_CASE("every digit of a multiple leads to one, also within bounds", "[grammar]") {
    const auto begins = [](const char* text, std::string_view number) {
        ConstraintState state(compiled(schema(text)), bytes_and_words());
        return state.accept_bytes(number);
    };
    CHECK(begins(R"({"type":"number","multipleOf":19.997})", "-439.934"));
    CHECK_FALSE(begins(R"({"type":"number","multipleOf":19.997})", "-424."));
    CHECK(begins(R"({"type":"number","multipleOf":0.19997})", "424.13637"));
    CHECK_FALSE(begins(R"({"type":"number","multipleOf":0.19997})", "424.0"));
    CHECK(begins(R"({"type":"number","multipleOf":19997,"minimum":-1000,"maximum":1000})", "0.0"));
    CHECK_FALSE(begins(R"({"type":"number","multipleOf":19997,"minimum":-1000,"maximum":1000})", "1"));
    CHECK(begins(R"({"type":"integer","multipleOf":19997,"maximum":19998})", "1"));
    CHECK_FALSE(begins(R"({"type":"integer","multipleOf":19997,"maximum":19996})", "1"));
    std::mt19937_64 random(7);
    for (const char* text : {R"({"type":"number","multipleOf":19.997})", R"({"type":"number","multipleOf":0.19997})",
                             R"({"type":"number","multipleOf":0.000019997,"maximum":3})",
                             R"({"type":"number","multipleOf":19997,"minimum":-1000,"maximum":1000})",
                             R"({"type":"number","multipleOf":19.997,"minimum":-1000,"maximum":1000.5})"}) {
        const auto c = compiled(schema(text));
        for (int walk = 0; walk < 40; walk++) {
            ConstraintState            state(c, bytes_and_words());
            std::vector<std::uint64_t> bits(state.words());
            for (int step = 0; step < 30 && !state.ended(); step++) {
                const Result<void> made = state.mask(bits);
                INFO(text << "  " << step << "  " << (made ? "" : made.error().message));
                REQUIRE(made);
                std::vector<Token> allowed;
                for (Token t = 0; t < bytes_and_words()->vocab_size(); t++)
                    if ((bits[std::size_t(t) / 64] >> (t % 64) & 1) != 0) allowed.push_back(t);
                REQUIRE(state.accept(allowed[random() % allowed.size()]));
            }
        }
    }
}

TEST_CASE("masks of names and of counted text are exact too", "[grammar]") {
    const char* const names =
        R"({"type":"object","properties":{"ab":{},"abc":{"type":"string"},"abab":{}},"patternProperties":{"^k.l":{"type":"null"}},"additionalProperties":{"type":"string","minLength":2,"maxLength":5},"minProperties":2})";
    const ConstraintSpec specs[] = {
        schema(names),
        schema(names, false),
        schema(R"({"anyOf":[{"type":"string","maxLength":34},{"type":"string","minLength":3,"pattern":"^[a-f]*$"}]})"),
        schema(R"({"type":"string","not":{"enum":["abc","abcd"]}})"),
        text_spec(Kind::regex, "[^x]*k"),
        // Counts that a token cannot exhaust, and such as it can.
        schema(R"({"type":"string","maxLength":70,"pattern":"^([a-c]+ ){0,40}[a-c]+$"})"),
        schema(R"({"type":"string","minLength":4,"maxLength":500,"pattern":"^([a-c]+ ){0,3}[a-c]+$"})"),
        schema(R"({"type":"string","maxLength":60,"pattern":"^[a-l]+(ab){3}$"})"),
        schema(R"({"type":"object","patternProperties":{"[a-d]{6}":{"type":"null"}}})"),
    };
    for (const ConstraintSpec& spec : specs) check_masks(letters(), spec, 6, 24);
}

TEST_CASE("a copy of a state goes its own way", "[grammar]") {
    const auto      c = compiled(text_spec(Kind::regex, "a(b|c)d"));
    ConstraintState one(c, bytes_and_words());
    REQUIRE(one.accept_bytes("a"));
    ConstraintState two = one;
    REQUIRE(one.accept_bytes("b"));
    CHECK(two.accept_bytes("c"));
    CHECK_FALSE(one.accept_bytes("c"));
    CHECK(one.forced_bytes() == "d");
    CHECK_FALSE(one.accept_bytes("x"));
    CHECK(one.accept_bytes("d"));
    CHECK(one.may_end());
    CHECK(two.forced_bytes() == "d");
}

TEST_CASE("states that are made for a mask count as work", "[grammar]") {
    const auto mask_with = [](std::size_t work) { // the tree of letters() itself has some 1,500 nodes
        Grammar              g;
        std::vector<RegexId> all;
        for (char c = 'a'; c < 'i'; c++) {
            const Result<RegexId> part = parse_regex(g.pool, cat(c, ".*", char(c + 3)), TextSpelling::utf8, false);
            REQUIRE(part);
            all.push_back(*part);
        }
        g.start = g.add_rules({{GrammarSymbol::lexeme(g.pool.all_of(all))}});
        REQUIRE(g.finish());
        ConstraintState state(std::make_shared<Constraint>(std::move(g), GrammarLimits{.work = work}), letters());
        std::vector<std::uint64_t> bits(state.words());
        return state.mask(bits);
    };
    CHECK(mask_with(2'000'000));
    const Result<void> refused = mask_with(10'000);
    REQUIRE_FALSE(refused);
    CHECK(refused.error().message.find("more work for one token than is allowed") != std::string::npos);
}

TEST_CASE("long texts keep few rows", "[grammar]") {
    const auto      c = compiled(schema(R"({"type":"array","items":{"type":"array","items":{"type":"integer"}}})"));
    ConstraintState state(c, bytes_and_words());
    REQUIRE(state.accept_bytes("[[1"));
    for (int i = 0; i < 20000; i++) REQUIRE(state.accept_bytes(i % 100 == 99 ? "],[7" : ",12"));
    CHECK(state.rows() < 5000);
    CHECK(state.accept_bytes("]]"));
    CHECK(state.may_end());
}
