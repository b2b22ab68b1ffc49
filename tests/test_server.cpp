// The program `server` as a process: every endpoint, every kind of error, streams, disconnects, queues, keys and shutdown.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <ctime>
#include <memory>
#include <optional>
#include <regex>
#include <set>
#include <sstream>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

#include "http_client.h"
#include "process.h"
#include "reference.h"
#include "server_process.h"

import quire.core.base;
import quire.model_file.gguf;
import quire.tools.bench.random_model;
import quire.core.std;
import quire.core.tensor;

#include "nan_model.h"

using namespace quire::testing;
using Json = nlohmann::json;

namespace {

// One for the tests that ask simple things.
Server& common() {
    static Server server;
    return server;
}

struct Stream {
    std::vector<Json>          chunks;
    std::map<int, std::string> texts, reasons; // of each answer
    bool                       done = false;
};

Stream parse_stream(const std::string& body) {
    Stream s;
    for (std::size_t at = 0; at < body.size();) {
        const auto        end  = body.find("\n\n", at);
        const std::string line = body.substr(at, end - at);
        at                     = end == std::string::npos ? body.size() : end + 2;
        if (line.starts_with(":")) continue;
        REQUIRE(line.starts_with("data: "));
        REQUIRE(!s.done);
        if (line == "data: [DONE]") {
            s.done = true;
            continue;
        }
        s.chunks.push_back(Json::parse(line.substr(6))); // throws on half a character
        const Json& chunk = s.chunks.back();
        if (!chunk.contains("choices")) continue;
        for (const Json& c : chunk["choices"]) {
            const int i = c["index"];
            if (c.contains("text")) s.texts[i] += c["text"].get<std::string>();
            if (c.contains("delta") && c["delta"].contains("content"))
                s.texts[i] += c["delta"]["content"].get<std::string>();
            if (!c["finish_reason"].is_null()) {
                CHECK(!s.reasons.contains(i));
                s.reasons[i] = c["finish_reason"];
            }
        }
    }
    return s;
}

Stream stream(const Server& server, const std::string& path, Json body) {
    body["stream"] = true;
    const Reply r  = server.post(path, body);
    INFO(body.dump() << r.body);
    REQUIRE(r.status == 200);
    CHECK(r.headers.at("content-type") == "text/event-stream");
    return parse_stream(r.body);
}

Json user(const std::string& text) { return Json::array({{{"role", "user"}, {"content", text}}}); }

const Json long_one{{"prompt", "Hello"}, {"max_tokens", 900}, {"ignore_eos", true}, {"temperature", 0}};

} // namespace

TEST_CASE("a chat and a completion", "[server]") {
    const Server& s = common();
    const Json    chat =
        s.ask("/v1/chat/completions", {{"model", "quire-14m-q8_0"}, {"messages", user("Hello")}, {"temperature", 0}});
    CHECK(chat["object"] == "chat.completion");
    CHECK(chat["id"].get<std::string>().starts_with("chatcmpl-"));
    CHECK(chat["model"] == "quire-14m-q8_0");
    CHECK(chat["choices"][0]["message"]["role"] == "assistant");
    CHECK(!chat["choices"][0]["message"]["content"].get<std::string>().empty());
    CHECK(chat["choices"][0]["finish_reason"] == "stop");
    const Json& usage = chat["usage"];
    CHECK(usage["total_tokens"] == usage["prompt_tokens"].get<int>() + usage["completion_tokens"].get<int>());
    const Json c = s.ask("/v1/completions", {{"prompt", "Hello"}, {"ignore_eos", true}});
    CHECK(c["object"] == "text_completion");
    CHECK(c["usage"]["completion_tokens"] == 16); // OpenAI's default
    CHECK(c["choices"][0]["finish_reason"] == "length");
    // Token ids are as good as the text they stand for.
    const Json ids  = s.ask("/tokenize", {{"prompt", "The sky is"}})["tokens"];
    const auto text = [&](const Json& prompt) {
        return s.ask("/v1/completions", {{"prompt", prompt}, {"temperature", 0}})["choices"][0]["text"];
    };
    CHECK(text(ids) == text("The sky is"));
    const Json both = s.ask("/v1/completions", {{"prompt", {"The sky is", "Hello"}}, {"temperature", 0}})["choices"];
    CHECK(both[0]["text"] == text("The sky is"));
    CHECK(both[1]["text"] == text("Hello"));
    CHECK(both[1]["index"] == 1);
}

TEST_CASE("streams say what whole answers say", "[server]") {
    const Server& s = common();
    for (const Json& more : {Json::object(), Json{{"n", 3}, {"temperature", 1}, {"seed", 7}},
                             Json{{"stop", {"you", "e e"}}, {"n", 2}, {"seed", 3}},
                             Json{{"use_beam_search", true}, {"beam_width", 3}, {"n", 2}, {"temperature", 0}},
                             Json{{"temperature", 1.5}, {"seed", 1}, {"min_tokens", 30}, {"ignore_eos", true}}}) {
        Json body{{"prompt", "Hello there"}, {"max_tokens", 40}, {"temperature", 0}};
        body.update(more);
        const Json   whole = s.ask("/v1/completions", body);
        const Stream parts = stream(s, "/v1/completions", body);
        INFO(body.dump());
        CHECK(parts.done);
        REQUIRE(parts.texts.size() == whole["choices"].size());
        for (const Json& c : whole["choices"]) {
            CHECK(Json(parts.texts.at(c["index"])) == c["text"]);
            CHECK(Json(parts.reasons.at(c["index"])) == c["finish_reason"]);
        }
        body.erase("prompt");
        body["messages"]     = user("Tell me about the sea.");
        const Json   message = s.ask("/v1/chat/completions", body);
        const Stream pieces  = stream(s, "/v1/chat/completions", body);
        for (const Json& c : message["choices"]) CHECK(Json(pieces.texts.at(c["index"])) == c["message"]["content"]);
    }
}

TEST_CASE("chunks of a stream", "[server]") {
    const Server& s    = common();
    const Stream  chat = stream(
        s, "/v1/chat/completions",
        {{"messages", user("Hello")}, {"n", 2}, {"max_tokens", 5}, {"stream_options", {{"include_usage", true}}}});
    std::map<int, int> firsts;
    for (const Json& chunk : chat.chunks) {
        CHECK(chunk["object"] == "chat.completion.chunk");
        CHECK(chunk["id"] == chat.chunks[0]["id"]);
        for (const Json& c : chunk["choices"])
            if (c["delta"].contains("role")) {
                CHECK(c["delta"] == Json{{"role", "assistant"}, {"content", ""}});
                firsts[c["index"]]++;
            }
    }
    CHECK(firsts == std::map<int, int>{{0, 1}, {1, 1}});
    CHECK(chat.chunks.back()["choices"].empty());
    CHECK(chat.chunks.back()["usage"]["completion_tokens"].get<int>() <= 10);
    CHECK(chat.chunks[0]["usage"].is_null());
    CHECK(!stream(s, "/v1/chat/completions", {{"messages", user("Hello")}, {"max_tokens", 2}})
               .chunks.back()
               .contains("usage"));
    const Stream running =
        stream(s, "/v1/completions",
               {{"prompt", "Hello"}, {"max_tokens", 3}, {"stream_options", {{"continuous_usage_stats", true}}}});
    for (const Json& chunk : running.chunks) CHECK(chunk["usage"]["prompt_tokens"] == 1);
    // Many bytes, few of which are a character: each chunk is JSON, so none was cut.
    Json bias = Json::object();
    for (int id = 3; id < 259; id++) bias[std::to_string(id)] = 100;
    const Json wild{{"prompt", "x"}, {"max_tokens", 60}, {"temperature", 5}, {"seed", 3}, {"logit_bias", bias}};
    const auto whole = s.ask("/v1/completions", wild)["choices"][0]["text"];
    CHECK(Json(stream(s, "/v1/completions", wild).texts.at(0)) == whole);
}

TEST_CASE("stop strings and tokens", "[server]") {
    const Server s({"--pipeline", GENERATE("off", "on")});
    Json         body      = long_one;
    body["max_tokens"]     = 40;
    body["prompt"]         = "Hello there";
    const std::string text = s.ask("/v1/completions", body)["choices"][0]["text"];
    REQUIRE(text.size() > 12);
    const std::string stop = text.substr(6, 5);
    body["stop"]           = stop;
    const Json cut         = s.ask("/v1/completions", body)["choices"][0];
    CHECK(cut["text"] == text.substr(0, text.find(stop)));
    CHECK(cut["finish_reason"] == "stop");
    CHECK(cut["stop_reason"] == stop);
    const Stream parts = stream(s, "/v1/completions", body);
    CHECK(Json(parts.texts.at(0)) == cut["text"]);
    body["include_stop_str_in_output"] = true;
    CHECK(s.ask("/v1/completions", body)["choices"][0]["text"] == text.substr(0, text.find(stop) + stop.size()));
    body.erase("stop");
    body["return_token_ids"]           = true;
    const Json ids                     = s.ask("/v1/completions", body)["choices"][0]["token_ids"];
    body["stop_token_ids"]             = Json::array({ids[3]});
    body["include_stop_str_in_output"] = false;
    const Json token                   = s.ask("/v1/completions", body)["choices"][0];
    CHECK(token["finish_reason"] == "stop");
    CHECK(token["stop_reason"] == ids[3]);
    CHECK(token["token_ids"].size() <= 4);
    body["min_tokens"] = 10;
    CHECK(s.ask("/v1/completions", body)["usage"]["completion_tokens"].get<int>() >= 10);
    // A stop string that one answer meets does not end the others, and their blocks come back.
    const Json several =
        s.ask("/v1/completions",
              {{"prompt", "Hello"}, {"n", 4}, {"seed", 1}, {"max_tokens", 60}, {"ignore_eos", true}, {"stop", "e"}});
    for (const Json& c : several["choices"]) CHECK(!has(c["text"], "e"));
    s.until_idle();
}

TEST_CASE("log-probabilities in both shapes", "[server]") {
    const Server&     s = common();
    const Json        c = s.ask("/v1/completions", {{"prompt", "Hello there"},
                                                    {"max_tokens", 3},
                                                    {"logprobs", 2},
                                                    {"echo", true},
                                                    {"temperature", 0},
                                                    {"ignore_eos", true}})["choices"][0];
    const Json&       l = c["logprobs"];
    const std::size_t n = l["tokens"].size();
    CHECK(l["token_logprobs"].size() == n);
    CHECK(l["top_logprobs"].size() == n);
    CHECK(l["text_offset"].size() == n);
    CHECK(l["token_logprobs"][0].is_null());
    CHECK(l["top_logprobs"][0].is_null());
    std::string joined;
    for (std::size_t i = 0; i < n; i++) {
        CHECK(l["text_offset"][i] == joined.size());
        joined += l["tokens"][i].get<std::string>();
        if (i > 0) {
            CHECK(l["token_logprobs"][i].get<double>() <= 0);
            CHECK(l["top_logprobs"][i].size() >= 2);
            CHECK(l["top_logprobs"][i].contains(l["tokens"][i].get<std::string>()));
        }
    }
    CHECK(Json(joined) == c["text"]);
    CHECK(c["text"].get<std::string>().starts_with("Hello there"));
    // llama.cpp's name for the same.
    const Json probs =
        s.ask("/v1/completions", {{"prompt", "Hello"}, {"max_tokens", 2}, {"n_probs", 2}, {"temperature", 0}});
    CHECK(probs["choices"][0]["logprobs"]["top_logprobs"][0].size() == 2);
    const Json of_chat = s.ask("/v1/chat/completions",
                               {{"messages", user("Hello")}, {"max_tokens", 2}, {"n_probs", 3}, {"temperature", 0}});
    CHECK(of_chat["choices"][0]["logprobs"]["content"][0]["top_logprobs"].size() == 3);
    // The prompt alone: what lm_eval asks for.
    const Json alone =
        s.ask("/v1/completions", {{"prompt", "Hello there"}, {"max_tokens", 0}, {"logprobs", 1}, {"echo", true}});
    CHECK(alone["choices"][0]["text"] == "Hello there");
    CHECK(alone["usage"]["completion_tokens"] == 0);
    for (std::size_t i = 1; i < alone["choices"][0]["logprobs"]["tokens"].size(); i++)
        CHECK(alone["choices"][0]["logprobs"]["token_logprobs"][i] == l["token_logprobs"][i]);
    const Json chat = s.ask(
        "/v1/chat/completions",
        {{"messages", user("Hello")}, {"max_tokens", 3}, {"logprobs", true}, {"top_logprobs", 4}, {"temperature", 0}});
    const Json content = chat["choices"][0]["logprobs"]["content"];
    CHECK(content.size() == chat["usage"]["completion_tokens"]);
    CHECK(content[0]["top_logprobs"].size() == 4);
    CHECK(content[0]["top_logprobs"][0]["token"] == content[0]["token"]); // greedy
    const Json vllm =
        s.ask("/v1/completions",
              {{"prompt", "Hello there"}, {"max_tokens", 1}, {"prompt_logprobs", 1}})["choices"][0]["prompt_logprobs"];
    CHECK(vllm[0].is_null());
    CHECK(vllm[1].is_object());
}

TEST_CASE("max_tokens 0 rates the prompt of every answer and generates nothing", "[server]") {
    const Server& s = common();
    const Json    one =
        s.ask("/v1/completions", {{"prompt", "Hello there"}, {"max_tokens", 1}, {"logprobs", 1}, {"echo", true}});
    const Json rated = one["choices"][0]["logprobs"]["token_logprobs"];
    for (const Json& more :
         {Json::object(), Json{{"n", 3}}, Json{{"best_of", 3}}, Json{{"n", 2}, {"use_beam_search", true}}}) {
        Json body{{"prompt", {"Hello there", "Hello"}}, {"max_tokens", 0}, {"logprobs", 1}, {"echo", true}};
        body.update(more);
        const double generated = s.metric("vllm:generation_tokens_total");
        const Json   answer    = s.ask("/v1/completions", body);
        INFO(answer.dump());
        CHECK(s.metric("vllm:generation_tokens_total") == generated);
        CHECK(answer["usage"]["completion_tokens"] == 0);
        const std::size_t n = body.value("n", 1);
        REQUIRE(answer["choices"].size() == 2 * n);
        for (std::size_t i = 0; i < 2 * n; i++) {
            const Json& c = answer["choices"][i];
            CHECK(c["text"] == (i < n ? "Hello there" : "Hello"));
            CHECK(c["finish_reason"] == "length");
            if (i >= n) continue;
            REQUIRE(c["logprobs"]["token_logprobs"].size() + 1 == rated.size());
            for (std::size_t k = 0; k + 1 < rated.size(); k++) CHECK(c["logprobs"]["token_logprobs"][k] == rated[k]);
        }
        if (body.contains("best_of")) continue; // is not streamed
        const Stream parts = stream(s, "/v1/completions", body);
        for (std::size_t i = 0; i < 2 * n; i++) {
            CHECK(parts.texts.at(int(i)) == (i < n ? "Hello there" : "Hello"));
            CHECK(parts.reasons.at(int(i)) == "length");
        }
    }
    for (const char* name : {"max_tokens", "max_completion_tokens", "n_predict"}) {
        const Json chat = s.ask("/v1/chat/completions", {{"messages", user("Hello")}, {name, 0}});
        CHECK(chat["usage"]["completion_tokens"] == 0);
        CHECK(chat["choices"][0]["message"]["content"] == "");
        CHECK(chat["choices"][0]["finish_reason"] == "length");
        CHECK(stream(s, "/v1/chat/completions", {{"messages", user("Hello")}, {name, 0}}).reasons.at(0) == "length");
    }
}

TEST_CASE("a prompt that does not fit is refused in OpenAI's words, one that just fits is not", "[server]") {
    const Server s({"-c", "64"});
    const auto   ids = [](int n) {
        Json list = Json::array();
        for (int i = 0; i < n; i++) list.push_back(300 + i);
        return list;
    };
    const auto refused = [&](const std::string& path, const Json& body, const std::string& param,
                             const std::string& sum) {
        const Reply r = s.post(path, body);
        INFO(path << ' ' << r.body);
        CHECK(r.status == 400);
        const Json e = Json::parse(r.body)["error"];
        CHECK(e["code"] == "context_length_exceeded");
        CHECK(e["type"] == "invalid_request_error");
        CHECK(e["param"] == param);
        CHECK(has(e["message"], "This model's maximum context length is 64 tokens. However, you requested " + sum));
    };
    refused("/v1/completions", {{"prompt", ids(64)}, {"max_tokens", 5}}, "prompt",
            "69 tokens (64 in the prompt, 5 in the completion). Please reduce the length of the prompt or completion.");
    refused("/v1/completions", {{"prompt", ids(65)}, {"max_tokens", 0}}, "prompt", "65 tokens");
    refused("/v1/completions", {{"prompt", {ids(3), ids(70)}}, {"stream", true}}, "prompt", "86 tokens");
    std::string text;
    for (int i = 0; i < 100; i++) text += "word ";
    for (const bool streamed : {false, true})
        refused("/v1/chat/completions", {{"messages", user(text)}, {"max_tokens", 7}, {"stream", streamed}}, "messages",
                "11"); // …
    refused("/v1/chat/completions", {{"messages", user(std::string(1 << 20, 'a'))}}, "messages", "");
    refused("/v1/embeddings", {{"input", ids(65)}}, "input", "65 tokens");
    refused("/v1/embeddings", {{"input", {text, "a"}}}, "input", "10");
    refused("/pin", {{"prompt", text}}, "prompt", "10");

    const Json full =
        s.ask("/v1/completions", {{"prompt", ids(64)}, {"max_tokens", 0}, {"echo", true}, {"logprobs", 1}});
    CHECK(full["usage"]["prompt_tokens"] == 64);
    CHECK(full["choices"][0]["logprobs"]["token_logprobs"].size() == 64);
    CHECK(s.ask("/v1/embeddings", {{"input", ids(64)}})["usage"]["prompt_tokens"] == 64);
    CHECK(s.ask("/v1/completions",
                {{"prompt", ids(63)}, {"max_tokens", 5}, {"ignore_eos", true}})["usage"]["completion_tokens"] == 1);
    // A pool smaller than the context counts the same.
    const Server small({"-c", "64", "--kv-blocks", "3", "--block-size", "16"});
    const Json   e = Json::parse(small.post("/v1/completions", {{"prompt", ids(48)}}).body)["error"];
    CHECK(e["code"] == "context_length_exceeded");
    CHECK(has(e["message"], "the prompt has 48 tokens and needs 4 blocks of 16 with the token to generate"));
    CHECK(small.ask("/v1/embeddings", {{"input", ids(48)}})["usage"]["prompt_tokens"] == 48);
    CHECK(small.post("/v1/completions", {{"prompt", ids(31)}, {"n", 2}, {"max_tokens", 1}}).status == 200);
    CHECK(small.post("/v1/completions", {{"prompt", ids(32)}, {"n", 2}, {"max_tokens", 1}}).status == 400);
}

TEST_CASE("a conversation without any token is refused", "[server]") {
    // A form that adds nothing to an empty answer to go on with, and a model without a token for the beginning.
    const Server server({"--chat-template", "zephyr"}, QUIRE_ROOT "/tests/data/models/gpt2-F32.gguf");
    const Json   messages = Json::array({{{"role", "assistant"}, {"content", ""}}});
    for (const Json& body : {Json{{"messages", messages}}, Json{{"messages", messages}, {"stream", true}},
                             Json{{"messages", messages}, {"max_tokens", 0}}}) {
        const Reply r = server.post("/v1/chat/completions", body);
        INFO(body.dump() << ": " << r.body);
        CHECK(r.status == 400);
        CHECK(has(r.body, "the prompt has no tokens"));
    }
    CHECK(server.get("/health").status == 200);
}

TEST_CASE("what leaves no token to draw is refused", "[server]") {
    const auto param = [](const Json& more) {
        Json body{{"prompt", "Hello"}, {"max_tokens", 2}};
        body.update(more);
        const Reply r = common().post("/v1/completions", body);
        INFO(r.body);
        CHECK(r.status == 400);
        return Json::parse(r.body)["error"].value("param", "");
    };
    const Json never{{300, false}, {301, false}};
    CHECK(param({{"allowed_token_ids", {300, 301}}, {"logit_bias", never}}) == "allowed_token_ids");
    CHECK(param({{"allowed_token_ids", {300}}, {"logit_bias", {{"300", -100}}}}) == "allowed_token_ids");
    CHECK(param({{"allowed_token_ids", {300}}, {"stop_token_ids", {300}}, {"min_tokens", 1}}) == "allowed_token_ids");
    const Json sea = common().ask("/tokenize", {{"content", " sea"}})["tokens"];
    CHECK(param({{"allowed_token_ids", sea}, {"bad_words", {"sea"}}}) == "allowed_token_ids");
    CHECK(common().ask("/v1/completions", {{"prompt", "Hello"},
                                           {"allowed_token_ids", {300, 301, 302}},
                                           {"logit_bias", never},
                                           {"return_token_ids", true},
                                           {"max_tokens", 1}})["choices"][0]["token_ids"] == Json::array({302}));
}

TEST_CASE("sampling: seeds, biases, words", "[server]") {
    const Server&     s = common();
    Json              body{{"prompt", "Hello"}, {"max_tokens", 20}, {"temperature", 1.5}, {"top_k", 0},
                           {"top_p", 1},        {"min_p", 0},       {"seed", 42},         {"ignore_eos", true}};
    const auto        text  = [&] { return s.ask("/v1/completions", body)["choices"][0]["text"].get<std::string>(); };
    const std::string first = text();
    CHECK(text() == first);
    body["cache_prompt"] = false;
    CHECK(text() == first);
    body["seed"] = 43;
    CHECK(text() != first);
    body["n"]                = 2;
    const std::string second = s.ask("/v1/completions", body)["choices"][1]["text"];
    body["n"]                = 1;
    body["seed"]             = 44; // the second of seed 43
    CHECK(text() == second);
    const Json ids     = s.ask("/tokenize", {{"content", " sea"}})["tokens"];
    body["logit_bias"] = {{std::to_string(ids[0].get<int>()), 100}};
    CHECK(has(text(), "sea sea sea"));
    body["bad_words"] = {"sea"};
    CHECK(!has(text(), " sea"));
    body.erase("logit_bias");
    body.erase("bad_words");
    body["allowed_token_ids"] = Json::array({ids[0]});
    CHECK(has(text(), "sea sea sea"));
}

TEST_CASE("the prefix cache, salts and pins", "[server]") {
    const Server server({"--block-size", "4"});
    std::string  prompt = "A prefix that many requests have in common, long enough for some blocks";
    const auto   cached = [&](const Json& more = Json::object()) {
        Json body{{"prompt", prompt}, {"max_tokens", 1}};
        body.update(more);
        return server.ask("/v1/completions", body)["usage"]["prompt_tokens_details"]["cached_tokens"].get<int>();
    };
    CHECK(cached() == 0);
    CHECK(cached() >= 8);
    CHECK(cached({{"cache_salt", "mine"}}) == 0);
    CHECK(cached({{"cache_salt", "mine"}}) >= 8);
    CHECK(cached({{"cache_prompt", false}}) == 0);
    const Json pin = server.ask("/pin", {{"prompt", prompt}});
    CHECK(pin["tokens"].get<int>() > 10);
    CHECK(server.metric("quire:kv_blocks_pinned") == pin["blocks"].get<int>());
    CHECK(Json::parse(server.get("/pins").body)["data"][0]["id"] == pin["id"]);
    CHECK(server.ask("/unpin", {{"id", pin["id"]}})["deleted"] == true);
    CHECK(server.post("/unpin", {{"id", pin["id"]}}).status == 404);
    while (server.metric("quire:kv_blocks_pinned") > 0) nap();
    CHECK(server.metric("vllm:prefix_cache_hits_total") > 0);
}

TEST_CASE("the other endpoints", "[server]") {
    const Server& s = common();
    CHECK(s.get("/health").body == R"({"status":"ok"})");
    CHECK(s.get("/v1/health").status == 200);
    const Json models = Json::parse(s.get("/v1/models").body);
    CHECK(models["object"] == "list");
    CHECK(models["data"][0]["id"] == "quire-14m-q8_0");
    CHECK(models["data"][0]["max_model_len"] == 1024);
    CHECK(Json::parse(s.get("/v1/models/quire-14m-q8_0").body)["id"] == "quire-14m-q8_0");
    CHECK(s.get("/v1/models/gpt-4").status == 404);
    CHECK(Json::parse(s.get("/version").body).contains("version"));
    const Json props = Json::parse(s.get("/props").body);
    CHECK(props["total_slots"] == 64);
    CHECK(props["model_path"] == "quire-14m-q8_0.gguf");
    const Json blocks = Json::parse(s.get("/blocks").body);
    CHECK(blocks["block_size"] == 16);
    CHECK(blocks["blocks"].size() == blocks["totals"]["blocks"]);

    const Json tokens = s.ask("/tokenize", {{"prompt", "Hello world"}});
    CHECK(tokens["count"] == tokens["tokens"].size());
    CHECK(tokens["max_model_len"] == 1024);
    const Json text = s.ask("/detokenize", {{"tokens", tokens["tokens"]}});
    CHECK(text["prompt"] == "Hello world");
    CHECK(text["content"] == "Hello world");
    CHECK(s.ask("/tokenize", {{"content", "Hello"}, {"with_pieces", true}})["tokens"][0]["piece"] == "Hello");
    CHECK(s.ask("/tokenize", {{"prompt", "Hello"}, {"return_token_strs", true}})["token_strs"].size() == 1);
    CHECK(s.ask("/tokenize", {{"messages", user("Hello")}})["count"].get<int>() > 3);
    CHECK(has(s.ask("/apply-template", {{"messages", user("Hello")}})["prompt"], "<|im_start|>user\nHello<|im_end|>"));

    const Json e = s.ask("/v1/embeddings", {{"input", {"Hello", "Hello", "The sea"}}});
    CHECK(e["data"].size() == 3);
    CHECK(e["data"][0]["embedding"] == e["data"][1]["embedding"]);
    CHECK(e["data"][0]["embedding"] != e["data"][2]["embedding"]);
    double squares = 0;
    for (const Json& v : e["data"][2]["embedding"]) squares += v.get<double>() * v.get<double>();
    CHECK(std::abs(squares - 1) < 1e-4);
    CHECK(e["usage"]["prompt_tokens"] == e["usage"]["total_tokens"]);
    CHECK(s.ask("/v1/embeddings", {{"input", "Hello"}, {"encoding_format", "base64"}})["data"][0]["embedding"]
              .is_string());
    CHECK(Json::parse(s.post("/v1/embeddings", {{"input", "a"}, {"dimensions", 5}}).body)["error"]["param"] ==
          "dimensions");
}

TEST_CASE("faults have OpenAI's shape", "[server]") {
    const Server& s     = common();
    const auto    fault = [&](const Reply& r, int status, const Json& param) {
        INFO(r.body);
        CHECK(r.status == status);
        const Json e = Json::parse(r.body)["error"];
        CHECK(e["message"].is_string());
        CHECK(e["type"].is_string());
        CHECK(e.contains("code"));
        CHECK(e["param"] == param);
        CHECK(r.headers.contains("x-request-id"));
    };
    fault(s.get("/v1/nothing"), 404, nullptr);
    fault(s.get("/v1/completions"), 405, nullptr);
    for (const char* body : {"", "{", "[]", "nonsense", "{\"prompt\":1e999}"})
        fault(s.client().post("/v1/completions", body), 400, nullptr);
    fault(s.client().post("/v1/completions", std::string(50000, '[')), 400, nullptr);
    fault(s.post("/v1/completions", {{"prompt", "a"}, {"n", 0}}), 400, "n");
    fault(s.post("/v1/completions", {{"prompt", "a"}, {"n", 100}}), 400, "n"); // more than run at once
    fault(s.post("/v1/completions", {{"prompt", "a"}, {"n", 1}, {"best_of", 100}}), 400, "best_of");
    fault(s.post("/v1/completions", {{"prompt", ""}}), 400, "prompt");
    fault(s.post("/v1/completions", {{"prompt", {8192}}}), 400, "prompt");
    fault(s.post("/v1/completions", {{"prompt", "a"}, {"model", "gpt-4"}}), 404, "model");
    fault(s.post("/v1/chat/completions", {{"messages", Json::array()}}), 400, "messages");
    std::string large;
    for (int i = 0; i < 2000; i++) large += "word ";
    fault(s.post("/v1/completions", {{"prompt", large}}), 400, "prompt");
    fault(s.post("/v1/completions", {{"prompt", large}, {"stream", true}}), 400, "prompt");
    fault(s.post("/v1/chat/completions", {{"messages", user(large)}}), 400, "messages");
    fault(s.post("/v1/completions", {{"prompt", std::string(8 << 20, 'a')}}), 400, "prompt");
    fault(s.post("/v1/chat/completions", {{"messages", user(std::string(8 << 20, 'a'))}}), 400, "messages");
    fault(s.client().post("/v1/completions", std::string(17 << 20, ' ')), 413, nullptr);
    CHECK(s.ask("/v1/completions", {{"prompt", large}, {"truncate_prompt_tokens", 10}})["usage"]["prompt_tokens"] ==
          10);
    fault(s.post("/v1/completions", {{"prompt", "a"}, {"response_format", {{"type", "xml"}}}}), 400, "response_format");
    CHECK(s.post("/v1/completions", {{"prompt", "a"}, {"max_tokens", 1}, {"no_such_field", 1}}).status == 200);
    while (!has(s.log(), "no_such_field")) nap(); // it is written behind the answer
    CHECK(s.get("/health").status == 200);
}

TEST_CASE("texts under load are those got alone", "[server]") {
    // A pool for a few of them: the others wait, are swapped or computed again.
    const Server server({"--kv-blocks", "24", "--block-size", "8", "-c", "128", "--parallel", "16", "-t", "2",
                         "--pipeline", GENERATE("off", "on")});
    std::vector<std::string> alone;
    const auto               body = [](int i) {
        return Json{{"prompt", "Number " + std::to_string(i) + ":"},
                                  {"max_tokens", 40},
                                  {"temperature", 0},
                                  {"ignore_eos", true},
                                  {"n", i % 3 == 0 ? 2 : 1}};
    };
    constexpr int n = 24;
    for (int i = 0; i < n; i++) alone.push_back(server.ask("/v1/completions", body(i))["choices"].dump());
    std::vector<std::string> together(n);
    std::vector<std::thread> clients;
    for (int i = 0; i < n; i++)
        clients.emplace_back([&, i] {
            Json b = body(i);
            if (i % 2 == 0) {
                together[std::size_t(i)] = Json::parse(server.post("/v1/completions", b).body)["choices"].dump();
                return;
            }
            b["stream"]              = true;
            std::string text         = server.post("/v1/completions", b).body;
            together[std::size_t(i)] = std::move(text);
        });
    for (std::thread& c : clients) c.join();
    for (int i = 0; i < n; i++) {
        if (i % 2 == 0) {
            CHECK(together[std::size_t(i)] == alone[std::size_t(i)]);
            continue;
        }
        const Stream parts = parse_stream(together[std::size_t(i)]);
        for (const Json& c : Json::parse(alone[std::size_t(i)])) CHECK(Json(parts.texts.at(c["index"])) == c["text"]);
    }
    CHECK(server.metric("vllm:num_preemptions_total") > 0);
    server.until_idle();
}

TEST_CASE("a client that leaves is cancelled, and its blocks are free again", "[server]") {
    const Server server({"--parallel", "2", "-c", "1024", "--pipeline", GENERATE("off", "on")});
    SECTION("while streaming") {
        Client c    = server.client();
        Json   b    = long_one;
        b["stream"] = true;
        c.send(Client::request("/v1/completions", b.dump()));
        CHECK(c.head().status == 200);
        CHECK(!c.chunk().empty());
    }
    SECTION("before anything has come, some of them queued") {
        std::vector<Client> clients;
        for (int i = 0; i < 6; i++) {
            clients.push_back(server.client());
            clients.back().send(Client::request("/v1/completions", long_one.dump()));
        }
        while (server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") < 6) nap();
    }
    SECTION("in the middle of its request") {
        Client c = server.client();
        c.send(Client::request("/v1/completions", long_one.dump()).substr(0, 150));
    }
    SECTION("without reading") {
        Client c    = server.client();
        Json   b    = long_one;
        b["stream"] = true;
        b["n"]      = 2;
        c.send(Client::request("/v1/completions", b.dump()));
    }
    server.until_idle();
    CHECK(server.metric("vllm:generation_tokens_total") < 1800); // nobody ran to the end for nobody
    CHECK(server.ask("/v1/completions", {{"prompt", "Hello"}})["choices"].size() == 1);
}

TEST_CASE("a client that does not read is disconnected and delays no other", "[server]") {
    const Server server({"--write-timeout", "0.5", "--parallel", "16"});
    Client       deaf = server.client();
    Json         body = long_one;
    body["stream"]    = true;
    body["n"]         = 8;
    body["logprobs"]  = 20; // more than all buffers on the way hold
    deaf.send(Client::request("/v1/completions", body.dump()));
    for (int i = 0; i < 5; i++)
        CHECK(server.ask(
                  "/v1/completions",
                  {{"prompt", "Hello"}, {"max_tokens", 5}, {"ignore_eos", true}})["usage"]["completion_tokens"] == 5);
    server.until_idle();
    while (server.metric("quire:http_threads") > 4) nap(); // its own has gone on
    const std::string rest = deaf.rest();
    CHECK(!has(rest, "[DONE]"));
}

TEST_CASE("a full queue says so", "[server]") {
    const Server        server({"--parallel", "1", "--max-queue", "2"});
    std::vector<Client> clients;
    for (int i = 0; i < 3; i++) {
        clients.push_back(server.client());
        clients.back().send(Client::request("/v1/completions", long_one.dump()));
        while (server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") < i + 1) nap();
    }
    const Reply r = server.post("/v1/completions", long_one);
    CHECK(r.status == 429);
    CHECK(std::stoi(r.headers.at("retry-after")) >= 1);
    CHECK(Json::parse(r.body)["error"]["code"] == "queue_full");
    CHECK(server.metric("quire:requests_refused_total") == 1);
    CHECK(server.get("/health").status == 200);
    clients.clear();
    server.until_idle();
    CHECK(server.post("/v1/completions", {{"prompt", "Hello"}}).status == 200);
}

TEST_CASE("keys", "[server]") {
    const std::string file = temporary();
    std::ofstream(file) << "key-from-file\n\nanother%20key\n";
    const Server s({"--api-key", "secret-one,secret-two", "--api-key-file", file});
    unlink(file.c_str());
    const auto status = [&](const std::string& headers, const std::string& path = "/v1/models") {
        return s.get(path, headers).status;
    };
    CHECK(status("") == 401);
    for (const char* wrong :
         {"Authorization: Bearer wrong\r\n", "Authorization: Bearer \r\n", "Authorization: secret-one\r\n",
          "Authorization: Bearer secret-on\r\n", "Authorization: Bearer secret-onee\r\n", "X-Api-Key: \r\n",
          "Authorization: Bearer another key\r\n", "Authorization: Basic secret-one\r\n"})
        CHECK(status(wrong) == 401);
    for (const char* right : {"Authorization: Bearer secret-one\r\n", "Authorization: Bearer secret-two\r\n",
                              "X-Api-Key: key-from-file\r\n", "Authorization: Bearer another%20key\r\n"})
        CHECK(status(right) == 200);
    for (const char* path : {"/metrics", "/props", "/blocks", "/blocks/events", "/pins"})
        CHECK(status("", path) == 401);
    CHECK(status("", "/health") == 200);
    const Json e = Json::parse(s.post("/v1/completions", {{"prompt", "a"}}).body)["error"];
    CHECK(e["code"] == "invalid_api_key");
    for (const char* key : {"secret-one", "secret-two", "key-from-file", "secret-onee", "wrong"})
        CHECK(!has(s.log() + s.errors(), key));
    const Finished f = run_program("server", {"--api-key", ""});
    CHECK(f.code == 1); // an empty key is no key, not an open door
}

TEST_CASE("without a key, a server for its own machine answers browsers under its own names only", "[server]") {
    const auto status = [](const std::string& host) {
        return common()
            .client()
            .call("GET /v1/models HTTP/1.1\r\nHost: " + host + "\r\nUser-Agent: Mozilla/5.0\r\n\r\n")
            .status;
    };
    for (const char* own : {"localhost", "localhost:8080", "127.0.0.1:1", "[::1]:8080", "a.localhost", ""})
        CHECK(status(own) == 200);
    for (const char* other : {"evil.example", "127.evil.example:8080", "localhost.evil.example", "[::2]"})
        CHECK(status(other) == 403);
    CHECK(common().client().call("GET /v1/models HTTP/1.1\r\nHost: a\r\nOrigin: http://evil.example\r\n\r\n").status ==
          403);
    CHECK(common().client().call("GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n").status == 200); // no browser
    const Server keyed({"--api-key", "k"}); // a key is enough
    CHECK(keyed.client().call("GET /v1/models HTTP/1.1\r\nHost: box.example\r\nX-Api-Key: k\r\n\r\n").status == 200);
}

TEST_CASE("without a key, pages of other origins cannot do anything", "[server]") {
    const auto post = [](const std::string& path, const std::string& headers, const Server& s = common()) {
        const std::string body =
            R"({"prompt":"a page's words","max_tokens":1,"messages":[{"role":"user","content":"a"}]})";
        return s.client()
            .call("POST " + path + " HTTP/1.1\r\nHost: 127.0.0.1:8080\r\n" + headers +
                  "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body)
            .status;
    };
    const std::string json = "Content-Type: application/json\r\n", text = "Content-Type: text/plain;charset=UTF-8\r\n",
                      form = "Content-Type: application/x-www-form-urlencoded\r\n";
    for (const char* path : {"/v1/completions", "/completions", "/v1/chat/completions", "/pin", "/unpin", "/tokenize",
                             "/v1/tokenize", "/detokenize", "/v1/embeddings", "/apply-template"}) {
        INFO(path);
        for (const std::string& type : {json, text, form, std::string()}) {
            CHECK(post(path, type + "Origin: http://evil.example\r\n") == 403);
            CHECK(post(path, type + "Origin: null\r\n") == 403);
            CHECK(post(path, type + "Origin: http://127.0.0.1:9090\r\n") == 403); // another port
            CHECK(post(path, type + "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: no-cors\r\n") == 403);
        }
        // Were there a browser that sends no Origin: what a page can send without asking is not JSON.
        CHECK(post(path, text) == 415);
        CHECK(post(path, "Content-Type: multipart/form-data; boundary=x\r\n") == 415);
        CHECK(post(path, form + "User-Agent: Mozilla/5.0\r\n") == 415);
        CHECK(post(path, "User-Agent: Mozilla/5.0\r\n") == 415);
    }
    CHECK(Json::parse(common().get("/pins").body)["data"].empty());
    // Its own pages, and programs as they are: curl -d, urllib, requests.
    CHECK(post("/tokenize", json + "Origin: http://127.0.0.1:8080\r\nSec-Fetch-Site: same-origin\r\n") ==
          400);                                                                        // two texts
    CHECK(post("/v1/completions", json + "Origin: http://127.0.0.1:8080\r\n") == 400); // likewise
    CHECK(post("/v1/embeddings", json) == 400);                                        // no input
    for (const std::string& type :
         {json, form, std::string(), std::string("Content-Type: application/vnd.api+json\r\n")})
        CHECK(common()
                  .client()
                  .call("POST /tokenize HTTP/1.1\r\nHost: localhost\r\n" + type +
                        "Content-Length: 14\r\n\r\n{\"prompt\":\"a\"}")
                  .status == 200);
    // A link is followed, a picture or a script is not.
    const auto get = [](const std::string& headers) { return common().get("/metrics", headers).status; };
    CHECK(get("Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: document\r\n") ==
          403); // Host: x
    const auto local = [](const std::string& headers) {
        return common().client().call("GET /metrics HTTP/1.1\r\nHost: localhost\r\n" + headers + "\r\n").status;
    };
    CHECK(local("Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: document\r\n") == 200);
    CHECK(local("Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: iframe\r\n") == 403);
    CHECK(local("Sec-Fetch-Site: same-site\r\nSec-Fetch-Mode: no-cors\r\n") == 403);
    CHECK(local("Sec-Fetch-Site: same-origin\r\nSec-Fetch-Mode: cors\r\n") == 200);
    // The host of the target counts, not that of the header.
    CHECK(common()
              .client()
              .call("GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost\r\nUser-Agent: Mozilla/5.0\r\n\r\n")
              .status == 403);
    // Behind a proxy: what browsers see is named, or sent by the proxy.
    const Server named({"--cors-origins", "https://chat.example/"});
    const auto   through = [&](const std::string& headers) {
        return named.client().call("GET /v1/models HTTP/1.1\r\n" + headers + "User-Agent: Mozilla/5.0\r\n\r\n").status;
    };
    CHECK(through("Host: chat.example\r\nOrigin: https://chat.example\r\n") == 200);
    CHECK(through("Host: chat.example\r\n") == 200);
    CHECK(through("Host: 127.0.0.1:8080\r\nOrigin: https://chat.example\r\n") == 200);
    CHECK(through("Host: evil.example\r\n") == 403);
    CHECK(post("/tokenize", json + "Origin: https://other.example\r\nX-Forwarded-Host: other.example, inner\r\n") ==
          400);
    CHECK(post("/tokenize", json + "Origin: https://evil.example\r\nX-Forwarded-Host: other.example\r\n") == 403);
    CHECK(post("/tokenize", json + "Origin: https://anybody.example\r\n", Server({"--cors-origins", "*"})) == 400);
}

TEST_CASE("CORS is off unless asked for", "[server]") {
    CHECK(!common().get("/health", "Origin: http://evil\r\n").headers.contains("access-control-allow-origin"));
    CHECK(common().client().call("OPTIONS /v1/completions HTTP/1.1\r\nHost: x\r\nOrigin: http://evil\r\n\r\n").status ==
          405);
    const Server s({"--cors-origins", "http://good,http://better", "--api-key", "k"});
    CHECK(s.get("/health", "Origin: http://good\r\n").headers.at("access-control-allow-origin") == "http://good");
    CHECK(!s.get("/health", "Origin: http://evil\r\n").headers.contains("access-control-allow-origin"));
    const Reply r =
        s.client().call("OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: x\r\nOrigin: http://better\r\n\r\n");
    CHECK(r.status == 204);
    for (const char* name : {"Authorization", "X-Api-Key", "X-Stainless-OS", "X-Stainless-Retry-Count", "Content-Type"})
        CHECK(has(r.headers.at("access-control-allow-headers"), name));
    // Every route, and whatever a listed page asks for.
    for (const char* path : {"/pin", "/v1/tokenize", "/v1/models", "/pins"}) {
        const Reply asked = s.client().call("OPTIONS " + std::string(path) +
                                            " HTTP/1.1\r\nHost: x\r\nOrigin: http://good\r\n"
                                            "Access-Control-Request-Headers: x-of-tomorrow,x-other\r\n\r\n");
        CHECK(asked.status == 204);
        CHECK(asked.headers.at("access-control-allow-origin") == "http://good");
        CHECK(has(asked.headers.at("access-control-allow-headers"), "x-of-tomorrow,x-other"));
        CHECK(s.client()
                  .call("OPTIONS " + std::string(path) + " HTTP/1.1\r\nHost: x\r\nOrigin: http://evil\r\n\r\n")
                  .status == 403);
    }
    CHECK(has(s.get("/v1/models", "Origin: http://good\r\n").headers.at("access-control-expose-headers"),
              "X-Request-Id"));
}

TEST_CASE("the log, the ids and the metrics", "[server]") {
    const Server s({"--log-json"});
    const Reply  r = s.post("/v1/completions", {{"prompt", "Hello"}, {"max_tokens", 5}, {"ignore_eos", true}},
                            "X-Request-Id: abc-1\r\n");
    CHECK(r.headers.at("x-request-id") == "abc-1");
    CHECK(Json::parse(r.body)["id"] == "cmpl-abc-1");
    // Nothing else comes back or stands in the log as it came, whatever becomes of the request.
    for (const char* odd : {"two words", "a\tb", "a/b", "<b>", "a\"b", "\xc3\xa9", "a;b=c", "{}"}) {
        const std::string header = "X-Request-Id: " + std::string(odd) + "\r\n";
        for (const Reply& reply :
             {s.post("/v1/completions", {{"prompt", "a"}, {"max_tokens", 1}}, header), s.get("/health", header),
              s.post("/v1/completions", {{"n", 0}}, header), s.get("/nothing", header),
              s.get("/v1/completions", header), s.get("/metrics", header), s.get("/", header)}) {
            CHECK(reply.headers.at("x-request-id").size() == 16); // made up
            CHECK(reply.headers.at("x-request-id").find_first_not_of("0123456789abcdef") == std::string::npos);
        }
        if (odd[0] == '\xc3') continue; // no text of JSON
        const Reply of_field = s.post("/v1/completions", {{"prompt", "a"}, {"max_tokens", 1}, {"request_id", odd}},
                                      "X-Request-Id: abc-2\r\n");
        CHECK(of_field.status == 200);
        CHECK(Json::parse(of_field.body)["id"] == "cmpl-abc-2");
    }
    CHECK(Json::parse(
              s.post("/v1/chat/completions", {{"messages", user("a")}, {"max_tokens", 1}, {"request_id", "mine.1"}})
                  .body)["id"] == "chatcmpl-mine.1");
    for (const char* path : {"/nothing", "/health", "/v1/completions"})
        CHECK(s.get(path, "X-Request-Id: plain_1.a:b-c\r\n").headers.at("x-request-id") == "plain_1.a:b-c");
    while (!has(s.log(), "\n")) nap();
    const Json line = Json::parse(s.log().substr(0, s.log().find('\n')));
    CHECK(line["id"] == "abc-1");
    CHECK(line["status"] == 200);
    CHECK(line["tokens"] == 5);
    CHECK(line["prompt_tokens"] == 1);
    CHECK(line["finish"] == "length");
    for (const char* key : {"ttft", "rate", "cached_tokens", "seconds", "method", "path", "remote"})
        CHECK(line.contains(key));

    const Reply m = s.get("/metrics");
    CHECK(m.headers.at("content-type") == "text/plain; version=0.0.4; charset=utf-8");
    CHECK(s.metric("vllm:generation_tokens_total") >= 5);
    CHECK(s.metric("vllm:time_to_first_token_seconds_count") >= 1);
    CHECK(s.metric("vllm:inter_token_latency_seconds_count") == 4);
    const auto plain = [&](const std::string& name) {
        const auto at = m.body.find("\n" + name + " ");
        REQUIRE(at != std::string::npos);
        return std::strtod(m.body.c_str() + at + name.size() + 2, nullptr);
    };
    CHECK(plain("process_resident_memory_bytes") > 1e7);
    CHECK(plain("process_virtual_memory_bytes") > plain("process_resident_memory_bytes"));
    CHECK(plain("process_cpu_seconds_total") > 0);
    CHECK(plain("process_open_fds") > 5);
    CHECK(plain("process_max_fds") >= 1024);
    CHECK(std::abs(plain("process_start_time_seconds") - double(std::time(nullptr))) < 600);
    CHECK(s.metric("vllm:cache_config_info") == 1);
    for (const char* label :
         {"block_size=\"16\"", "num_gpu_blocks=\"", "gpu_memory_utilization=\"0.92\"", "cache_dtype=\"float16\""})
        CHECK(has(m.body.substr(m.body.find("\nvllm:cache_config_info{"), 400), label));
    std::set<std::string> typed;
    for (std::size_t at = 0; at < m.body.size();) {
        const std::string row = m.body.substr(at, m.body.find('\n', at) - at);
        at += row.size() + 1;
        if (row.starts_with("# TYPE ")) {
            CHECK(typed.insert(row.substr(7, row.rfind(' ') - 7)).second); // each family once
            CHECK((row.ends_with(" gauge") ? row.find("_total ") : std::string::npos) == std::string::npos);
        } else if (!row.starts_with("#")) {
            CHECK((row.find('{') != std::string::npos ||
                   row.starts_with("process_"))); // as Prometheus's libraries have them
            char* end = nullptr;
            (void)std::strtod(row.c_str() + row.rfind(' ') + 1, &end);
            CHECK(*end == '\0');
            CHECK(!has(row, "nan"));
        }
    }
}

TEST_CASE("a line of the log is one line, and its values are told apart", "[server]") {
    const Server s;
    s.post("/v1/completions",
           {{"prompt", "a"}, {"max_tokens", 1}, {"x status=500\n\x1b[2J\" y", 1}, {"z=\xc2\x9b", 1}});
    while (!has(s.log(), "\n")) nap();
    CHECK(has(s.log(), R"( unknown_field="x status=500??[2J\" y" unknown_field=z=?? )"));
}

TEST_CASE("the KV memory can be watched", "[server]") {
    const Server s({"--parallel", "2"});
    Client       watcher = s.client();
    watcher.send("GET /blocks/events HTTP/1.1\r\nHost: x\r\n\r\n");
    CHECK(watcher.head().headers.at("content-type") == "text/event-stream");
    const Json first = Json::parse(watcher.chunk().substr(6));
    CHECK(first["totals"]["used"] == 0);
    Client busy = s.client();
    busy.send(Client::request("/v1/completions", long_one.dump()));
    for (Json at = first; at["totals"]["used"] == 0;) at = Json::parse(watcher.chunk().substr(6));
    busy.hang_up();
    for (Json at = Json::parse(watcher.chunk().substr(6)); at["totals"]["used"] != 0;)
        at = Json::parse(watcher.chunk().substr(6));
}

TEST_CASE("texts are split within limits", "[server]") {
    const auto tokenize = [](const char* path, std::size_t bytes) {
        return common().post(path, {{"prompt", std::string(bytes, 'a')}});
    };
    CHECK(tokenize("/tokenize", 1 << 20).status == 200);
    for (const char* path : {"/tokenize", "/pin"}) {
        const Reply r = tokenize(path, (1 << 20) + 1);
        CHECK(r.status == 400);
        CHECK(Json::parse(r.body)["error"]["code"] == "context_length_exceeded");
    }
    const Json shortened{{"prompt", std::string(2 << 20, 'a')}, {"truncate_prompt_tokens", 5}};
    CHECK(Json::parse(common().post("/v1/completions", shortened).body)["error"]["code"] == "context_length_exceeded");
    // Parts that are each short enough.
    const Json parts{{"prompt", {std::string(20000, 'a'), 300, std::string(20000, 'b')}}};
    CHECK(Json::parse(common().post("/v1/completions", parts).body)["error"]["code"] == "context_length_exceeded");
    CHECK(common().post("/v1/embeddings", {{"input", std::string(1 << 20, 'a')}}).status == 400);
    CHECK(common().post("/detokenize", {{"tokens", std::vector<int>(1 << 16, 300)}}).status == 200);
    CHECK(common().post("/detokenize", {{"tokens", std::vector<int>((1 << 16) + 1, 300)}}).status == 400);
    const Json pieces = common().ask(
        "/tokenize", {{"content", "Hi \"é\xf0\x9f\x99\x82"}, {"with_pieces", true}, {"return_token_strs", true}});
    CHECK(pieces["tokens"].size() == pieces["count"]);
    CHECK(pieces["token_strs"].size() == pieces["count"]);
    CHECK(pieces["tokens"][0].contains("piece"));
}

TEST_CASE("a request without memory is a 503 and affects no other", "[server]") {
    Server     server({"-t", "2", "--kv-blocks", "128", "--swap-blocks", "0"});
    const auto kib = [&](const char* name) {
        const std::string status = slurp("/proc/" + std::to_string(server.pid()) + "/status");
        return std::strtoull(status.c_str() + status.find(name) + std::strlen(name), nullptr, 10);
    };
    if (kib("VmSize:") > 1ull << 30) SKIP("a sanitizer takes terabytes of address space");
    const Json neighbour{{"prompt", "Once upon a time"}, {"max_tokens", 60}, {"ignore_eos", true}, {"temperature", 0}};
    const std::string expected = server.ask("/v1/completions", neighbour)["choices"][0]["text"];
    const std::size_t size     = (16 << 20) - 200;
    const std::string many(size / 2, 'a');
    std::string       words, ids = "1";
    while (words.size() < size / 2) words += "so much ";
    for (int i = 0; i < 1'000'000; i++) ids += ",300";
    const std::vector<std::pair<std::string, std::string>> attacks{
        {"/tokenize", Json{{"prompt", many + many}}.dump()},
        {"/tokenize", Json{{"prompt", std::string(1 << 20, 'a')}, {"with_pieces", true}}.dump()},
        {"/v1/completions", Json{{"prompt", words + words}}.dump()},
        {"/v1/completions", "{\"prompt\":[" + ids + "]}"},
        {"/v1/chat/completions", Json{{"messages", {{{"role", "user"}, {"content", words + words}}}}}.dump()},
        {"/detokenize", "{\"tokens\":[" + ids + "]}"},
        {"/v1/embeddings", Json{{"input", words + words}}.dump()},
        {"/apply-template", Json{{"messages", {{{"role", "user"}, {"content", words + words}}}}}.dump()}};
    // As `ulimit -v` would have it: so much beside what it has when nobody asks.
    int refused = 0;
    for (const unsigned room : {160u, 48u}) {
        const rlimit limit{(kib("VmSize:") << 10) + (std::size_t(room) << 20), RLIM_INFINITY};
        REQUIRE(prlimit(server.pid(), RLIMIT_AS, &limit, nullptr) == 0);
        for (const auto& [path, body] : attacks) {
            std::vector<std::thread> threads;
            std::atomic<int>         unavailable = 0, other = 0;
            std::atomic<bool>        over = false;
            std::thread              well([&] {
                do {
                    const Reply r = server.post("/v1/completions", neighbour);
                    if (r.status != 200 || Json::parse(r.body)["choices"][0]["text"] != expected) other++;
                } while (!over);
            });
            for (int i = 0; i < 6; i++)
                threads.emplace_back([&] {
                    const int status = server.client().post(path, body).status;
                    if (status == 503) unavailable++;
                    else if (status != 400 && status != 200) other++;
                });
            for (std::thread& t : threads) t.join();
            over = true;
            well.join();
            INFO(path << ' ' << body.size() << ' ' << room);
            CHECK(other == 0);
            REQUIRE(server.running());
            refused += unavailable;
        }
    }
    CHECK(refused > 0);
    const rlimit none{RLIM_INFINITY, RLIM_INFINITY};
    REQUIRE(prlimit(server.pid(), RLIMIT_AS, &none, nullptr) == 0);
    CHECK(server.post("/tokenize", {{"prompt", std::string(1 << 20, 'a')}}).status == 200);
    CHECK(kib("VmHWM:") < 600 << 10); // it was 5 GiB
    server.until_idle();
    server.signal(SIGTERM);
    CHECK(server.wait() == 0);
}

TEST_CASE("silence in a stream is broken by comments", "[server]") {
    const Server server({"--parallel", "1", "--sse-ping-interval", "0.05"});
    Client       first = server.client(), second = server.client();
    first.send(Client::request("/v1/completions", long_one.dump()));
    while (server.metric("vllm:num_requests_running") < 1) nap();
    Json body      = long_one;
    body["stream"] = true;
    second.send(Client::request("/v1/completions", body.dump()));
    CHECK(second.head().status == 200);
    CHECK(second.chunk() == ":\n\n");
}

TEST_CASE("a signal ends it: what runs goes on, nothing new comes in", "[server]") {
    const int which = GENERATE(SIGTERM, SIGINT, SIGHUP);
    Server    server({"--parallel", "2", "--drain-timeout", "600"});
    Client    running = server.client();
    running.send(Client::request("/v1/completions", long_one.dump()));
    while (server.metric("vllm:num_requests_running") < 1) nap();
    server.signal(which);
    while (server.get("/health").status == 200) nap();
    const Reply refused = server.post("/v1/completions", {{"prompt", "Hello"}});
    if (refused.status != 0) CHECK(refused.status == 503); // unless it has ended meanwhile
    server.signal(SIGHUP);                                 // whoever hangs up does so more than once
    const Reply r = running.reply();
    CHECK(r.status == 200);
    CHECK(Json::parse(r.body)["usage"]["completion_tokens"] == 900);
    CHECK(server.wait() == 0);
}

TEST_CASE("under nohup a server outlives its terminal", "[server]") {
    const auto before = std::signal(SIGHUP, SIG_IGN); // its child inherits that
    Server     server({"--drain-timeout", "600"});
    std::signal(SIGHUP, before);
    Client running = server.client();
    running.send(Client::request("/v1/completions", long_one.dump()));
    while (server.metric("vllm:num_requests_running") < 1) nap();
    server.signal(SIGHUP);
    server.signal(SIGTERM); // the first that counts; were it the second, the answer would be cut
    CHECK(Json::parse(running.reply().body)["usage"]["completion_tokens"] == 900);
    CHECK(server.wait() == 0);
}

TEST_CASE("responses that are not streamed say that the server shuts down", "[server]") {
    Server server({"--drain-timeout", "0"});
    Client running = server.client();
    Json   body    = long_one;
    body.update({{"best_of", 3}, {"temperature", 1.5}});
    running.send(Client::request("/v1/completions", body.dump()));
    while (server.metric("vllm:num_requests_running") < 1) nap();
    server.signal(SIGTERM);
    const Reply r = running.reply();
    CHECK(r.status == 503);
    CHECK(Json::parse(r.body)["error"]["code"] == "shutting_down");
    CHECK(server.wait() == 0);
}

TEST_CASE("a drain does not wait for ever, a second signal not at all", "[server]") {
    Server server({"--drain-timeout", "0"});
    Client running = server.client();
    Json   body    = long_one;
    body["stream"] = true;
    running.send(Client::request("/v1/completions", body.dump()));
    CHECK(running.head().status == 200);
    CHECK(!running.chunk().empty());
    SECTION("in time") {
        server.signal(SIGINT);
        CHECK(has(running.rest(), "shutting down")); // an event of its own, behind the tokens
        CHECK(server.wait() == 0);
    }
    SECTION("at once") {
        Server patient({"--drain-timeout", "600"});
        Client long_running = patient.client();
        Json   many         = long_one;
        many["n"]           = 32;
        long_running.send(Client::request("/v1/completions", many.dump()));
        while (patient.metric("vllm:num_requests_running") < 1) nap();
        patient.signal(SIGTERM);
        while (patient.get("/health").status == 200) nap();
        patient.signal(SIGTERM);
        CHECK(patient.wait() == 1);
    }
}

TEST_CASE("the pages are whole, open to all, and fetch from nobody else", "[server]") {
    const Server s({"--api-key", "secret"});
    for (const char* path : {"/", "/blocks.html", "/?utm=1"}) {
        const Reply page = s.get(path);
        INFO(path);
        CHECK(page.status == 200); // without the key
        CHECK(page.headers.at("content-type") == "text/html; charset=utf-8");
        CHECK(page.headers.at("content-length") == std::to_string(page.body.size()));
        CHECK(page.headers.at("x-content-type-options") == "nosniff");
        CHECK(page.body.starts_with("<!doctype html>"));
        CHECK(page.body.ends_with("</html>\n"));
        const std::string& policy = page.headers.at("content-security-policy");
        CHECK(has(policy, "default-src 'none'; script-src 'sha256-"));
        CHECK(has(policy, "; connect-src 'self';"));
        CHECK(!has(policy, "unsafe"));
        // One script and one style, named in the policy by their hashes; no handler or style that it would refuse.
        for (const char* tag : {"<script", "<style"})
            CHECK(page.body.find(tag) == page.body.rfind(std::string(tag) + ">"));
        for (const char* part :
             {" style=\"", " onclick=\"", " onload=\"", "innerHTML =", ".js@", ".css@", "@ICON@", "@import"})
            CHECK(!has(page.body, part));
        // The one address is SVG's name; what begins one is compared with, not fetched.
        for (std::size_t at = 0; (at = page.body.find("://", at)) != std::string::npos; at++) {
            const std::string address = page.body.substr(at - 5, 32);
            INFO(address);
            CHECK((has(address, "://www.w3.org/2000/svg") || has(address, "http://\"") || has(address, "https://\"")));
        }
        const std::string head = s.client().call("HEAD " + std::string(path) + " HTTP/1.0\r\n\r\n").body;
        CHECK(head.empty());
    }
    CHECK(s.get("/props").status == 401);
    CHECK(s.get("/blocks/events?changes=1").status == 401);
    CHECK(s.client().post("/v1/chat/completions", "{}").status == 401);
    const Server bare({"--no-pages"});
    CHECK(bare.get("/").status == 404);
    CHECK(bare.get("/blocks.html").status == 404);
    CHECK(bare.get("/blocks").status == 200);
}

TEST_CASE("the changes of the blocks add up to the blocks", "[server]") {
    const Server s({"--kv-blocks", "80", "--swap-blocks", "40"});
    Client       watcher = s.client();
    watcher.send("GET /blocks/events?changes=1 HTTP/1.1\r\nHost: x\r\n\r\n");
    REQUIRE(watcher.head().status == 200);
    const auto next   = [&] { return Json::parse(watcher.chunk().substr(6)); };
    Json       blocks = next().at("blocks");
    CHECK(blocks.size() == 80);
    Json many          = long_one;
    many["n"]          = 3;
    many["max_tokens"] = 300;
    std::thread asks([&] { s.ask("/v1/completions", many); });
    bool        used = false;
    for (bool over = false; !over;) {
        const Json e = next();
        CHECK(!e.contains("blocks"));
        for (Json b : e.at("changed")) {
            const std::size_t id = b.at("id");
            b.erase("id");
            CHECK(blocks.at(id) != b); // only what did change
            blocks[id] = b;
        }
        int n = 0;
        for (const Json& b : blocks) n += b["refs"] > 0;
        CHECK(n == e["totals"]["used"]);
        over = used && n == 0;
        used |= n > 0;
    }
    asks.join();
    CHECK(blocks == Json::parse(s.get("/blocks").body)["blocks"]);
}

TEST_CASE("the block pool is looked at ten times a second at most, whoever asks how often", "[server]") {
    const Server s({"--kv-blocks", "80"});
    const auto   start = std::chrono::steady_clock::now();
    for (int i = 0; i < 12; i++) CHECK(s.get("/blocks").status == 200);
    CHECK(std::chrono::steady_clock::now() - start >= std::chrono::seconds(1));
}

TEST_CASE("a Unix socket, and names of the model", "[server]") {
    const std::string path = temporary() + ".sock";
    {
        Server server({"--unix", path, "--alias", "one,two", "--port", "8080"});
        Client c(path);
        REQUIRE(c.connected());
        CHECK(Json::parse(c.get("/v1/models").body)["data"].size() == 2);
        CHECK(c.post("/v1/completions", R"({"prompt":"a","model":"two","max_tokens":1})").status == 200);
        server.signal(SIGTERM);
        CHECK(server.wait() == 0);
    }
    CHECK(access(path.c_str(), F_OK) != 0); // gone with it
}

TEST_CASE("flags of llama.cpp and vLLM are ignored with a line, or refused by name", "[server]") {
    const Finished ignored = run_program(
        "server", {"-m", "/none.gguf", "-ngl", "99", "-fa", "on", "-cb", "--jinja", "--metrics", "-np", "2", "-ctk",
                   "f16", "--mlock", "--enforce-eager", "--enable-chunked-prefill", "--no-webui", "-to", "60"});
    CHECK(ignored.code == 1);
    CHECK(ignored.err.starts_with(
        "server: without a meaning here, and ignored: -ngl, -fa, -cb, --jinja, --metrics, --mlock, "
        "--enforce-eager, --enable-chunked-prefill\nserver: "));
    CHECK(std::ranges::count(ignored.err, '\n') == 2);
    for (const std::vector<std::string>& refused : std::vector<std::vector<std::string>>{
             {"-hf", "x/y"}, {"--model-draft", "m"}, {"--reuse-port"}, {"-nglx"}, {"--lora", "f"}}) {
        const Finished f = run_program("server", refused);
        CAPTURE(f.err);
        CHECK(f.code == 2);
        CHECK(std::ranges::count(f.err, '\n') == 1);
        CHECK(f.err.find(refused[0]) != std::string::npos);
    }
    for (const std::vector<std::string>& refused :
         std::vector<std::vector<std::string>>{{"--quantization", "awq"},
                                               {"--pipeline-parallel-size", "2"},
                                               {"--tokenizer", "x"},
                                               {"--enable-lora"},
                                               {"--speculative-config", "{}"},
                                               {"--enable-auto-tool-choice"}}) {
        const Finished f = run_program("server", refused);
        CAPTURE(f.err);
        CHECK(f.code == 2);
        CHECK(f.err.starts_with("server: " + refused[0] + ": "));
    }
    const Finished bench =
        run_program("bench", {"model", "-m", "/none.gguf", "-ngl", "99", "-fa", "1", "-mmp", "0", "-p", "8"});
    CHECK(bench.code == 1);
    CHECK(bench.err.starts_with("bench: without a meaning here, and ignored: -ngl, -fa, -mmp\n"));
    CHECK(run_program("bench", {"model", "-hf", "x"}).code == 2);
}

TEST_CASE("wrong usage is one line", "[server]") {
    for (const auto& [arguments, code] :
         std::vector<std::pair<std::vector<std::string>, int>>{{{"--nonsense"}, 2},
                                                               {{"--port", "99999"}, 2},
                                                               {{"--parallel", "0"}, 2},
                                                               {{"-m", shipped, "--chat-template", "none"}, 2},
                                                               {{"-m", "/nonexistent.gguf"}, 1},
                                                               {{"-m", shipped, "--host", "256.1.1.1"}, 1},
                                                               {{"-m", shipped, "--api-key-file", "/nonexistent"}, 1},
                                                               {{"-m", shipped, "--tls-cert", "/nonexistent"}, 1},
                                                               {{"-m", shipped, "--unix", "/nonexistent/x"}, 1}}) {
        const Finished f = run_program("server", arguments);
        INFO(f.err);
        CHECK(f.code == code);
        CHECK(has(f.err, "server: "));
    }
}

TEST_CASE("a model whose numbers are not finite: an error for that request alone", "[server][nan]") {
    const NanModel model("token_embd.weight", 7); // the embedding of token 7
    const Server   s({"-t", "1", "--parallel", "8"}, model.path());
    const auto     is_fault = [](const Json& body) {
        const Json& e = body.at("error");
        CHECK(e["code"] == "model_failed");
        CHECK(e["type"] == "server_error");
        CHECK(has(e["message"], "not finite"));
    };
    Client     neighbour = s.client();
    const Json good{{"prompt", {5, 6, 8}},
                    {"max_tokens", 200},
                    {"ignore_eos", true},
                    {"temperature", 0},
                    {"logit_bias", {{"7", -100}}}};
    neighbour.send(Client::request("/v1/completions", good.dump()));
    for (const Json& how :
         {Json::object(), Json{{"temperature", 0}}, Json{{"n", 3}}, Json{{"n", 1}, {"best_of", 3}},
          Json{{"use_beam_search", true}, {"n", 2}}, Json{{"logprobs", 2}}, Json{{"echo", true}, {"logprobs", 1}}}) {
        Json body{{"prompt", {5, 6, 7}}, {"max_tokens", 4}};
        body.update(how);
        const Reply r = s.post("/v1/completions", body);
        INFO(how.dump() << r.body);
        CHECK(r.status == 500);
        is_fault(Json::parse(r.body));
        if (how.contains("best_of") || how.contains("use_beam_search")) continue; // no streams
        body["stream"] = true;                                                    // nothing has been said yet: a status
        CHECK(s.post("/v1/completions", body).status == 500);
    }
    const Reply embedding = s.post("/v1/embeddings", {{"input", {5, 6, 7}}});
    CHECK(embedding.status == 500);
    is_fault(Json::parse(embedding.body));
    // A stream that has begun ends with an event: with this seed 7 is drawn behind 124 others.
    Json begun{{"prompt", {5, 6}}, {"max_tokens", 240}, {"ignore_eos", true}, {"temperature", 1},
               {"seed", 117},      {"top_k", 0},        {"top_p", 1},         {"min_p", 0}};
    begun["allowed_token_ids"] = Json::array({7});
    for (int token = 20; token < 70; token++) begun["allowed_token_ids"].push_back(token);
    begun["stream"] = true;
    bool has_begun  = false;
    for (int tries = 0; tries < 100 && !has_begun;
         tries++) { // a busy machine may have said nothing before all 124 are there
        const Reply r = s.post("/v1/completions", begun);
        if (r.status == 500) {
            is_fault(Json::parse(r.body));
            continue;
        }
        has_begun = true;
        CHECK(r.status == 200);
        CHECK(has(r.body, "\"model_failed\""));
        CHECK(has(r.body, "not finite"));
        CHECK(has(r.body, "data: [DONE]"));
    }
    CHECK(has_begun);

    const Reply whole = neighbour.reply();
    CHECK(whole.status == 200);
    CHECK(Json::parse(whole.body)["usage"]["completion_tokens"] == 200);
    CHECK(Json::parse(whole.body)["choices"] == s.ask("/v1/completions", good)["choices"]);
}

TEST_CASE("numbers of the help are plain", "[server]") {
    std::vector<std::pair<std::string, std::vector<std::string>>> all{
        {"server", {"-h"}}, {"chat", {"-h"}}, {"block-viz", {"-h"}}};
    for (const char* command : {"logits", "generate", "show", "tokenize"}) all.push_back({"inspect", {command, "-h"}});
    for (const char* command : {"model", "batched", "serve", "throughput", "make-model", "compare"})
        all.push_back({"bench", {command, "-h"}});
    for (const auto& [tool, arguments] : all) {
        const Finished f = run_program(tool, arguments);
        INFO(tool << ' ' << arguments[0] << f.out);
        CHECK(f.code == 0);
        CHECK(!std::regex_search(f.out, std::regex("[0-9]e[+-]?[0-9]"))); // 1e+06
    }
}

TEST_CASE("the documents' load runs on the model that ships", "[server]") {
    const std::string page  = slurp(QUIRE_ROOT "/docs/server-load.md");
    const std::size_t start = page.find("    ./bench serve ") + 12;
    REQUIRE(start > 12);
    std::istringstream       line(page.substr(start, page.find('\n', start) - start));
    std::vector<std::string> arguments;
    for (std::string word; line >> word;) {
        const std::string before = arguments.empty() ? "" : arguments.back();
        if (before == "--num-prompts") word = "3";
        arguments.push_back(word);
    }
    arguments.insert(arguments.end(), {"--base-url", "http://127.0.0.1:" + std::to_string(common().port())});
    const Finished f = run_program("bench", arguments);
    INFO(f.err << f.out);
    CHECK(f.code == 0);
    CHECK(std::regex_search(f.out, std::regex("Successful requests: +3 *\n")));
}
