// Constraints that cost much: what they may take of stack, work and memory, and that nobody else pays for it.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include <pthread.h>

#include "reference.h"
#include "server_process.h"

import quire.constraint.compile;
import quire.constraint.formats.canonical_schema;
import quire.constraint.grammar.grammar;
import quire.constraint.memory;
import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.engine.engine;
import quire.schedule.request;
import quire.text.calls.tool_form;

using namespace quire;
using namespace quire::testing;
using Kind = ConstraintSpec::Kind;

namespace {

// Bytes as tokens, some words, an end token.
std::shared_ptr<const TokenTrie> bytes_and_words() {
    std::vector<std::string> all;
    for (int b = 0; b < 256; b++) all.emplace_back(1, char(b));
    for (const char* word : {"ab", "the ", "aaaa", "ing", "e a", "ou"}) all.emplace_back(word);
    all.emplace_back(); // the end
    return std::make_shared<const TokenTrie>(all, std::vector<Token>{Token(all.size() - 1)});
}

std::string times(int n, const std::string& text) {
    std::string out;
    for (int i = 0; i < n; i++) out += text;
    return out;
}

ConstraintSpec text_spec(Kind kind, std::string text) {
    ConstraintSpec spec{.kind = kind};
    spec.text = std::move(text);
    return spec;
}
ConstraintSpec schema_spec(const std::string& text) {
    ConstraintSpec spec{.kind = Kind::json_schema};
    spec.schema = *json_parse(text);
    return spec;
}

std::string patterns(int n) { // of which any two have texts in common
    std::string out = R"({"oneOf":[)";
    for (int i = 0; i < n; i++)
        out += cat(i > 0 ? "," : "", R"({"type":"string","pattern":")", ".*", char('a' + i), R"(.*"})");
    return out + "]}";
}
std::string lookaheads(int n) {
    std::string out;
    for (int i = 0; i < n; i++) out += cat("(?=.*", char('a' + i % 26), char('a' + i / 26), ")");
    return out + ".*";
}

// On a thread with the stack of the server's workers.
void on_small_stack(const std::function<void()>& body) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, std::size_t(1) << 20);
    pthread_t thread;
    REQUIRE(pthread_create(
                &thread, &attributes,
                [](void* b) -> void* {
                    (*static_cast<const std::function<void()>*>(b))();
                    return nullptr;
                },
                const_cast<std::function<void()>*>(&body)) == 0);
    pthread_join(thread, nullptr);
    pthread_attr_destroy(&attributes);
}

// The fault in it; "": its first masks are made.
std::string error_of(const ConstraintSpec& spec, const GrammarLimits& limits) {
    const auto made = compile_constraint(spec, limits);
    if (!made) return made.error().message;
    ConstraintState            state(*made, bytes_and_words());
    std::vector<std::uint64_t> bits(state.words());
    for (const char* text : {"", "a", "a"}) {
        if (!state.accept_bytes(text)) return "";
        if (auto ok = state.mask(bits); !ok) return ok.error().message;
    }
    return "";
}

} // namespace

TEST_CASE("no pattern, grammar or schema takes a worker's stack", "[grammar]") {
    std::string rules = "root ::= r0\n"; // groups within rules within rules
    for (int i = 0; i < 390; i++) rules += cat("r", i, " ::= ", times(100, "("), "r", i + 1, times(100, ")?"), "\n");
    std::string deep = "true";
    for (int i = 0; i < 60; i++) deep = cat(i % 2 > 0 ? R"({"not":)" : R"({"additionalProperties":)", deep, "}");
    std::vector<ConstraintSpec> all{
        text_spec(Kind::regex, times(3990, "a?")),
        text_spec(Kind::regex, times(1995, "a*b*")),
        text_spec(Kind::regex, times(780, "a?")),
        text_spec(Kind::regex, "a" + times(60000, "*")),
        text_spec(Kind::regex, times(9000, "(?=a)") + ".*"),
        text_spec(Kind::regex, times(190, "(") + "a" + times(190, ")?")),
        text_spec(Kind::regex, times(190, "(a|") + "b" + times(190, ")*")),
        text_spec(Kind::grammar, "root ::= " + times(3990, "\"a\"? ")),
        text_spec(Kind::grammar, "root ::= \"a\"" + times(60000, "*")),
        text_spec(Kind::grammar, "root ::= " + times(190, "(") + "\"a\" root" + times(190, ")?")),
        text_spec(Kind::grammar, rules + "r390 ::= \"a\""),
        schema_spec(cat(R"({"type":"string","pattern":"^)", times(3990, "a?"), "$\"}")),
        schema_spec(cat(R"({"type":"object","patternProperties":{"^)", times(3990, "a?"), R"($":true}})")),
        schema_spec(deep),
    };
    std::vector<std::string> errors;
    on_small_stack([&] {
        for (const ConstraintSpec& spec : all)
            errors.push_back(error_of(spec, {.compile_work = 2'000'000, .work = 4'000'000}));
    });
    REQUIRE(errors.size() == all.size());
    CHECK(has(errors[0], "nested too deep"));
    CHECK(has(errors[1], "nested too deep"));
    CHECK(has(errors[7], "nested too deep"));
    CHECK(has(errors[11], "at '#': pattern"));
    CHECK(has(errors[11], "nested too deep"));
}

TEST_CASE("a tool whose schema is nested too deep may have any arguments, unless a call is required", "[grammar]") {
    ConstraintSpec spec{.kind = Kind::any};
    AnswerRules&   rules = spec.answer.emplace();
    rules.form           = {ToolForm::hermes};
    rules.tools =
        *json_parse(cat(R"([{"type":"function","function":{"name":"f","parameters":{"properties":{"x":{"pattern":"^)",
                        times(3990, "a?"), R"($"}}}}}])"));
    CHECK(error_of(spec, {}) == "");
    rules.required = true;
    CHECK(has(error_of(spec, {}), "nested too deep"));
}

TEST_CASE("work on a constraint ends at a bound, whatever takes it", "[grammar]") {
    const GrammarLimits limits{.compile_work = 1'000'000, .work = 1'000'000, .bytes = std::size_t(8) << 20};
    const std::size_t   before = ConstraintMemory::all().bytes();
    for (const ConstraintSpec& spec :
         {text_spec(Kind::grammar, "root ::= (((\"a\"{0,999}){0,999}){0,999}){0,999}"),
          text_spec(Kind::grammar, "root ::= ((\"a\"{0,999}){0,999}){0,999}"), text_spec(Kind::regex, lookaheads(60)),
          text_spec(Kind::regex, times(20, "(") + "a" + times(20, "{0,99}b?)")), schema_spec(patterns(24))}) {
        const std::string error = error_of(spec, limits);
        INFO(error);
        CHECK((has(error, "more work") || has(error, "more memory")));
        CHECK(ConstraintMemory::all().bytes() == before); // all that they took is given back
    }
}

TEST_CASE("a random walk that comes to no mask is reported", "[inspect]") {
    const Json     line{{"id", 1},
                        {"schema", {{"type", "string"}, {"pattern", cat("^", lookaheads(60), "$")}}},
                        {"tests", Json::array()}};
    const Finished f = run_program("inspect",
                                   {"constrain", QUIRE_ROOT "/tests/data/tokenizers/ggml-vocab-llama-spm.gguf",
                                    "--schema-tests", "-", "--walks", "1"},
                                   line.dump() + "\n");
    INFO(f.err);
    REQUIRE(f.code == 0);
    const Json answer = Json::parse(f.out);
    CHECK(answer["walks"].empty());
    CHECK(has(answer["error"].dump(), "a walk fails behind"));
    CHECK(has(answer["error"].dump(), "more work for one token"));
}

TEST_CASE("a constraint whose automata are full begins them anew: the same masks", "[grammar]") {
    const auto      spec  = text_spec(Kind::regex, "(?:[a-z ]*[aeiou ][a-z ]{9})*|X(?:b|c)");
    const auto      roomy = *compile_constraint(spec), tight = *compile_constraint(spec, {.lexer_states = 400});
    const auto      trie = bytes_and_words();
    std::mt19937_64 random(5);
    std::vector<ConstraintState> a(3, ConstraintState(roomy, trie)), b(3, ConstraintState(tight, trie));
    std::vector<std::uint64_t>   want(a[0].words()), got(a[0].words());
    for (int i = 0; i < 240; i++) { // three texts in turn
        const auto n = std::size_t(i % 3);
        REQUIRE(a[n].mask(want).has_value());
        const auto made = b[n].mask(got);
        INFO((made ? "" : made.error().message));
        REQUIRE(made.has_value());
        REQUIRE(want == got);
        std::vector<Token> any;
        for (Token t = 0; t < trie->vocab_size(); t++)
            if ((want[std::size_t(t) / 64] >> (t % 64) & 1) != 0 && trie->bytes(t) != "X" && !trie->bytes(t).empty())
                any.push_back(t);
        REQUIRE(!any.empty());
        const Token t = any[random() % any.size()];
        a[n].push(t), b[n].push(t);
        if (i == 100) a[2] = a[0], b[2] = b[0]; // a fork
    }
}

TEST_CASE("a mask that is interrupted changes nothing, and comes again", "[grammar]") {
    const auto                 spec = schema_spec(patterns(8));
    const auto                 trie = bytes_and_words();
    ConstraintState            calm(*compile_constraint(spec), trie), hasty(*compile_constraint(spec), trie);
    std::vector<std::uint64_t> want(calm.words()), got(calm.words());
    const std::atomic<bool>    stop = true;
    for (const char c : std::string("\"abz ")) {
        REQUIRE(calm.mask(want).has_value());
        for (const Effort& effort :
             {Effort{.stop = &stop}, Effort{.until = std::chrono::steady_clock::now() - std::chrono::seconds(1)}}) {
            const auto made = hasty.mask(got, effort); // small ones are done before anybody looks
            REQUIRE(made.has_value());
            if (*made) CHECK(want == got);
        }
        REQUIRE(hasty.prepare(false, {}).has_value());
        REQUIRE(hasty.mask(got).has_value());
        CHECK(want == got);
        CHECK(calm.accept_bytes({&c, 1}));
        CHECK(hasty.accept_bytes({&c, 1}));
    }
}

TEST_CASE("all constraints together have one budget of memory", "[grammar]") {
    ConstraintMemory& memory = ConstraintMemory::all();
    const std::size_t limit  = memory.limit();
    const auto        trie   = bytes_and_words();
    memory.limit(std::size_t(4) << 20);
    std::vector<ConstraintState> states;
    std::vector<std::uint64_t>   bits(trie->words());
    for (int i = 0; i < 12; i++) {
        const auto made = compile_constraint(text_spec(Kind::regex, cat("[ab", char('c' + i), "]*", lookaheads(8))));
        REQUIRE(made.has_value());
        ConstraintState& state = states.emplace_back(*made, trie);
        CHECK(state.mask(bits).has_value());
        CHECK(memory.bytes() < std::size_t(8) << 20); // each may take its share beyond it
    }
    for (ConstraintState& state : states) {
        CHECK(state.accept_bytes("ab")); // states that gave memory back go on
        CHECK(state.mask(bits).has_value());
    }
    memory.limit(limit);
}

TEST_CASE("schemas that say the same have the same canonical text", "[grammar]") {
    const auto text = [](const char* schema, bool ordered = true) {
        return canonical_schema(*json_parse(schema), ordered);
    };
    const auto plain =
        text(R"({"type":"object","properties":{"a":{"type":"integer","minimum":1},"b":{}},"required":["a"]})");
    CHECK(
        text(
            R"({"description":"x","type":"object","title":"t","properties":{"a":{"minimum":1,"$comment":"c","type":"integer"},"b":{"examples":[1]}},"required":["a"]})") ==
        plain);
    CHECK(text(R"({"type":"object","properties":{"b":{},"a":{"type":"integer","minimum":1}},"required":["a"]})") !=
          plain);
    CHECK(
        text(R"({"required":["a"],"properties":{"b":{},"a":{"minimum":1,"type":"integer"}},"type":"object"})", false) ==
        text(R"({"type":"object","properties":{"a":{"type":"integer","minimum":1},"b":{}},"required":["a"]})", false));
    // Members of these names are no annotations, nor are values.
    CHECK(text(R"({"properties":{"title":{}}})") != text(R"({"properties":{}})"));
    CHECK(text(R"({"const":{"title":"a"}})") != text(R"({"const":{"title":"b"}})"));
    CHECK(text(R"({"examples":[{"type":"null"}],"$ref":"#/examples/0"})") !=
          text(R"({"examples":[{}],"$ref":"#/examples/0"})"));
}

TEST_CASE("sequences whose masks come late have the same tokens", "[engine]") {
    EngineOptions options;
    options.threads       = 1;
    options.device        = "cpu";
    options.block_size    = 4;
    options.kv_blocks     = GENERATE(128, 34);
    options.max_sequences = 6;
    options.pipeline      = GENERATE(false, true);
    Result<Engine> engine = Engine::load(reference("models/llama3-gqa-Q8_0.gguf"), options);
    REQUIRE(engine.has_value());
    const auto spec = schema_spec(
        R"({"type":"object","properties":{"a":{"type":"array","items":{"type":"integer","maximum":99,"minimum":0},"maxItems":6},"b":{"enum":["x","y"]}},"required":["a","b"],"additionalProperties":false})");
    const auto constraint = *compile_constraint(spec);
    const auto run        = [&](const std::shared_ptr<Constraint>& made) {
        std::map<std::pair<RequestId, int>, std::vector<Token>> answers;
        RequestId                                               first = 0;
        for (int i = 0; i < 5; i++) {
            Request r;
            for (int t = 0; t < 8 + i % 2; t++) r.prompt.push_back(Token(5 + i + t)); // whole blocks, or not
            r.sampling.temperature = i == 0 ? 0 : 1;
            r.sampling.seed        = std::uint64_t(i);
            r.max_tokens           = 40;
            if (i == 3) r.n = 2;
            if (i != 4) r.constraint = ConstraintState(made, engine->token_trie());
            const auto id = engine->submit(std::move(r));
            REQUIRE(id.has_value());
            if (i == 0) first = *id;
        }
        std::vector<Output> out;
        while (engine->step(out)) engine->check_invariants();
        for (const Output& o : out) {
            CHECK(o.message == "");
            auto& a = answers[{o.id - first, o.index}];
            a.insert(a.end(), o.tokens.begin(), o.tokens.end());
        }
        return answers;
    };
    const auto want = run(constraint);
    // Another thread is at work in the constraint nearly all the time: no mask is made within a step.
    std::atomic<bool> over = false;
    std::thread       other([&] {
        ConstraintState            state(constraint, engine->token_trie());
        std::vector<std::uint64_t> bits(state.words());
        while (!over) (void)state.mask(bits);
    });
    const auto        got = run(constraint);
    over                  = true;
    other.join();
    CHECK(got == want);
}

TEST_CASE("bombs over HTTP: 400 for them, an answer for everybody else, an end at SIGTERM", "[server]") {
    Server     s({"-t", "1", "--parallel", "4", "--drain-timeout", "1"});
    const auto with = [](Json outputs, int max_tokens = 3) {
        return Json{{"prompt", "a"}, {"max_tokens", max_tokens}, {"structured_outputs", std::move(outputs)}};
    };
    const std::string many      = times(3990, "a?");
    Client            neighbour = s.client();
    neighbour.send(
        Client::request("/v1/completions", Json{{"prompt", "a"}, {"max_tokens", 300}, {"ignore_eos", true}}.dump()));
    for (const Json& body :
         {with({{"regex", many}}), Json{{"prompt", "a"}, {"max_tokens", 3}, {"guided_regex", many}},
          with({{"regex", times(1995, "a*b*")}}), with({{"grammar", "root ::= " + times(3990, "\"a\"? ")}}),
          with({{"json", {{"type", "object"}, {"properties", {{"x", {{"pattern", many}}}}}, {"required", {"x"}}}}}),
          with({{"grammar", "root ::= (((\"a\"{0,999}){0,999}){0,999}){0,999}"}})}) {
        const Reply r = s.post("/v1/completions", body);
        INFO(r.body);
        REQUIRE(s.running());
        CHECK(r.status == 400);
        CHECK(Json::parse(r.body)["error"]["type"] == "invalid_request_error");
        CHECK(!Json::parse(r.body)["error"]["param"].is_null());
    }
    // In the middle of a text: what was sent before is not lost, and the error has no other status where nothing was.
    const std::string late = "[b-z]{2}" + times(20, "(") + "a" + times(20, "{0,99}b?)");
    const Reply       r    = s.post("/v1/completions", with({{"regex", late}}, 100));
    INFO(r.body);
    CHECK((r.status == 400 || r.status == 200));
    CHECK(neighbour.reply().status == 200);
    CHECK(s.get("/health").status == 200);
    Client last = s.client();
    last.send(Client::request("/v1/completions", with({{"regex", late}}, 100).dump()));
    while (s.metric("vllm:num_requests_running") == 0 && !last.more(0.01)) {}
    s.signal(SIGTERM);
    CHECK(s.wait() == 0);
}
