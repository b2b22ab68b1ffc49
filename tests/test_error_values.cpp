// The values of a client do not come back at length: neither in an error nor in the log, whatever was wrong and where.
#include <catch2/catch_test_macros.hpp>

#include <nlohmann/json.hpp>

#include "server_process.h"

import quire.core.base;
import quire.core.json;
import quire.core.std;

using namespace quire;
using namespace quire::testing;
using Plain = nlohmann::json;

namespace {

Plain list(const Plain& one) { return Plain::array({one}); }

} // namespace

TEST_CASE("values are cut where a character ends", "[base]") {
    CHECK(quote("abc") == "'abc'");
    CHECK(quote(std::string(64, 'a')) == "'" + std::string(64, 'a') + "'");
    CHECK(quote(std::string(65, 'a')) == "'" + std::string(64, 'a') + "…'");
    CHECK(quote("a\xc3\xa9z", 2) == "'a…'"); // é does not fit
    CHECK(quote("a\xc3\xa9z", 3) == "'aé…'");
    CHECK(quote("日本 ü €😀") == "'日本 ü €😀'");
    CHECK(quote("a\u202eb\u200bc\xc2\x85") == "'a\\xe2\\x80\\xaeb\\xe2\\x80\\x8bc\\xc2\\x85'"); // order, place, control
    CHECK(quote("\xc0\xaf\xed\xa0\x80\xf4\x90\x80\x80\xe2\x82", 99) ==
          "'\\xc0\\xaf\\xed\\xa0\\x80\\xf4\\x90\\x80\\x80\\xe2\\x82'"); // too long, surrogate, too large, cut
    CHECK(cut_short("a\xc3\xa9z", 2) == "a…");
    CHECK(cut_short("a\xc3\xa9z", 4) == "a\xc3\xa9z");
    CHECK(cut_short("\xf0\x9f\x98\x80\xf0\x9f\x98\x80", 7) == "\xf0\x9f\x98\x80…");
    CHECK(cut_short(std::string(100, '\x80'), 64) == std::string(64, '\x80') + "…"); // no UTF-8
    CHECK(cut_short("", 0).empty());
}

TEST_CASE("where a text is no JSON is said in words of quire's own", "[json]") {
    const auto why = [](const std::string& text) { return json_parse(text).error().message; };
    CHECK(why("") == "not valid JSON: line 1, column 1: the text ends there");
    CHECK(why("{\"a\": 1,") == "not valid JSON: line 1, column 8: the text ends there");
    CHECK(why("{\"a\":\n 1 x}") == "not valid JSON: line 2, column 4: 'x' cannot stand there");
    CHECK(why("{\"a\": 1e999}") == "not valid JSON: line 1, column 11: the number there is too large");
    CHECK(why("\"secret\xff\"") == "not valid JSON: line 1, column 8: a byte there is not UTF-8");
    CHECK(why("\"secret\xc3\"") == "not valid JSON: line 1, column 9: a byte there is not UTF-8");
    CHECK(why("\"secret\xed\xa0\x80\"").ends_with("a byte there is not UTF-8")); // half a surrogate pair
    CHECK(why("\"secret\n\"") == "not valid JSON: line 1, column 8: '\\x0a' cannot stand there");
    CHECK(why("\"secret\\q\"") == "not valid JSON: line 1, column 9: 'q' cannot stand there");
    for (const std::string& text : {std::string("{\"a\" \"secret\"}"), std::string("[\"secret\", secret]"),
                                    std::string("\"secret\" \"secret\""), std::string("\"secret")})
        CHECK_FALSE(has(why(text), "secret"));
}

TEST_CASE("an error repeats at most a few bytes of a request, and the log no more", "[server]") {
    const Server      s({"--log-json"});
    const std::string word = "needle ", many = [&] {
        std::string text;
        for (int i = 0; i < 20'000; i++) text += word;
        return text;
    }();
    const auto count = [&](const std::string& text) {
        int n = 0;
        for (std::size_t at = 0; (at = text.find("needle", at)) != std::string::npos; at++) n++;
        return n;
    };
    std::size_t read  = 0;
    const auto  check = [&](const Reply& r, const std::string& what) {
        INFO(what << ": " << r.body.substr(0, 3000));
        CHECK((r.status >= 400 && r.status < 500));
        CHECK(r.body.size() < 2500);
        CHECK(count(r.body) <= 40);
        while (s.log().find('\n', read) == std::string::npos) nap();
        const std::string log = s.log();
        CHECK(log.size() - read < 2500);
        CHECK(count(log.substr(read)) <= 80);
        read = log.size();
    };
    const Plain hello = Plain::array({{{"role", "user"}, {"content", "a"}}});
    // Bytes that are no UTF-8, and other texts that are no JSON.
    for (const char* end : {"\xff\"}", "\xc3\"}", "\\q\"}", "\n\"}", "\" \"", "\"", "", "\"}}"})
        for (const char* path : {"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses",
                                 "/completion", "/tokenize", "/v1/embeddings"})
            check(s.client().post(path, "{\"prompt\": \"" + many + end), std::string(path) + end);
    const auto chat = [&](const Plain& more) {
        Plain body{{"messages", hello}, {"max_tokens", 1}};
        body.update(more);
        check(s.post("/v1/chat/completions", body), more.dump().substr(0, 60));
    };
    chat({{"model", many}});
    chat({{"messages", list({{"role", many}, {"content", "a"}})}});
    chat({{"temperature", many}});
    chat({{"max_tokens", many}});
    chat({{"logit_bias", {{many, 1}}}});
    chat({{"logit_bias", {{"99999999999999999999" + many, 1}}}});
    chat({{"truncation", many.substr(0, 60)}});
    chat({{"chat_template", many}});
    chat({{"response_format", {{"type", many}}}});
    chat({{"structured_outputs", {{many, 1}}}});
    chat({{"structured_outputs", {{"regex", "(" + many}}}});
    chat({{"structured_outputs", {{"json", "{\"a\": \"" + many}}}});
    chat({{"grammar", "root ::= " + many}});
    chat({{"json_schema", {{"$ref", many}}}});
    chat({{"json_schema", {{"type", many}}}});
    chat({{"json_schema", {{many, {{"type", 3}}}, {"type", {{"needle", many}}}}}});
    chat({{"tools", list({{"type", many}})}});
    chat({{"tools", list({{"type", "function"}, {"function", {{"name", many}}}})}});
    chat({{"tools", list({{"type", "function"},
                          {"function", {{"name", std::string(200, 'n')}, {"parameters", {{"type", many}}}}}})}});
    chat({{"tools", list({{"type", "function"}, {"function", {{"name", "f"}}}})},
          {"tool_choice", {{"type", "function"}, {"function", {{"name", many}}}}}});
    Plain calls = Plain::array();
    for (int i = 0; i < 50; i++)
        calls.push_back({{"id", many + std::to_string(i)},
                         {"type", "function"},
                         {"function", {{"name", "f"}, {"arguments", "{}"}}}});
    chat({{"messages", {hello[0], {{"role", "assistant"}, {"content", ""}, {"tool_calls", calls}}, hello[0]}}});
    chat({{"reasoning_effort", many}});
    const auto other = [&](const std::string& path, const Plain& body) { check(s.post(path, body), path); };
    other("/v1/responses", {{"input", list({{"type", many}})}});
    other("/v1/responses", {{"input", list({{"type", "function_call_output"}, {"call_id", many}, {"output", "a"}})}});
    other("/v1/responses",
          {{"input", list({{"type", "function_call"}, {"call_id", many}, {"name", "f"}, {"arguments", "{}"}})}});
    other("/v1/messages",
          {{"max_tokens", 1}, {"messages", list({{"role", "user"}, {"content", list({{"type", many}})}})}});
    other(
        "/v1/messages",
        {{"max_tokens", 1},
         {"messages",
          Plain::array({hello[0],
                        {{"role", "assistant"},
                         {"content",
                          list({{"type", "tool_use"}, {"id", many}, {"name", "f"}, {"input", Plain::object()}})}}})}});
    other("/v1/embeddings", {{"input", "a"}, {"encoding_format", "needle needle"}});
    other("/unpin", {{"id", "needle needle"}});
    // A template's own words, headers and addresses.
    const Server strict({"--chat-template-file", [] {
                             const std::string path = temporary();
                             std::ofstream(path) << "{{ raise_exception(messages[0].content) }}";
                             return path;
                         }()});
    const Reply  refused =
        strict.post("/v1/chat/completions", {{"messages", list({{"role", "user"}, {"content", many}})}});
    CHECK(refused.status == 400);
    CHECK(refused.body.size() < 2500);
    std::string path = "/needle";
    for (int i = 0; i < 500; i++) path += "/needle";
    check(s.get(path), "a path");
    check(s.post("/v1/completions", {{"prompt", 1}}, "Content-Type: text/" + many.substr(0, 4000) + "\r\n"), "a type");
    check(s.get("/v1/models", "Origin: http://" + many.substr(0, 4000) + "\r\n"), "an origin");
    check(s.get(path, "Host: " + many.substr(0, 4000) + "\r\nAccept-Language: en\r\n"), "a host");
}
