// The routes of `server` that make text, and their streams; the errors of requests.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include <map>
#include <string>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

#include "http_client.h"
#include "process.h"
#include "server_process.h"

using namespace quire::testing;
using Json = nlohmann::json;

namespace {

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
            if (c.contains("delta") && c["delta"].contains("content") && c["delta"]["content"].is_string())
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

TEST_CASE("biases of texts are those of their tokens, of a limited number", "[server]") {
    const Server& s    = common();
    const Json    body = {{"prompt", "Hello"}, {"max_tokens", 8}, {"temperature", 0}, {"ignore_eos", true}};
    const auto    with = [&](const Json& bias) {
        Json biased          = body;
        biased["logit_bias"] = bias;
        return s.post("/v1/completions", biased);
    };
    const auto text = [](const Reply& r) { return Json::parse(r.body)["choices"][0]["text"]; };
    Json       ids = Json::array(), texts = Json::array(), many = Json::array(); // every bias three times
    for (int i = 0; i < 3; i++)
        for (const int id : {300, 301, 302}) {
            ids.push_back({id, 2.5});
            texts.push_back({s.ask("/detokenize", {{"tokens", {id}}})["content"], 2.5});
        }
    CHECK(text(with(texts)) == text(with(ids)));
    // Texts of the same few tokens.
    for (int i = 0; i < 1024; i++) many.push_back({std::string(500, 'a'), 0.001});
    CHECK(with(many).status == 200);
    // Texts of many different tokens.
    many = Json::array();
    for (int id = 300; id < 1500; id += 2)
        many.push_back({s.ask("/detokenize", {{"tokens", {id, id + 1}}})["content"], 1});
    const Reply refused = with(many);
    CHECK(refused.status == 400);
    CHECK(has(refused.body, "more than 1024 different tokens"));
    CHECK(Json::parse(refused.body)["error"]["param"] == "logit_bias");
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
                CHECK(c["delta"] == Json{{"role", "assistant"}, {"content", nullptr}});
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
        CHECK(e["n_ctx"] == 64);
        CHECK(e["n_prompt_tokens"].get<int>() > 0);
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

TEST_CASE("a seed that was drawn can be sent back, by JavaScript too", "[server]") {
    const auto seed = [](const Json& given) {
        Json body{{"prompt", "Hello"}, {"n_predict", 1}};
        if (!given.is_null()) body["seed"] = given;
        return common().ask("/completion", body)["generation_settings"]["seed"];
    };
    for (int i = 0; i < 10; i++) CHECK(seed(nullptr).get<std::uint64_t>() < std::uint64_t(1) << 53);
    CHECK(seed(nullptr) != seed(nullptr));
    CHECK(seed(std::numeric_limits<std::uint64_t>::max()) == std::numeric_limits<std::uint64_t>::max());
    CHECK(seed(std::uint64_t(1) << 63) == std::uint64_t(1) << 63);
    CHECK(seed(-5) == std::uint64_t(-5));
    CHECK(common().client().post("/completion", R"({"prompt":"a","seed":18446744073709551616})").status == 400);
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
    for (const char* path : {"/v1/models/quire-14m-q8_0", "/models/quire-14m-q8_0", "/v1/models/quire%2D14m-q8_0"}) {
        CHECK(s.ask_get(path)["id"] == "quire-14m-q8_0");
        CHECK(s.ask_get(path)["status"]["value"] == "loaded");
    }
    CHECK(s.get("/v1/models/gpt-4").status == 404);
    CHECK(models["has_more"] == false);
    CHECK(models["data"][0]["type"] == "model"); // Anthropic's members
    CHECK(models["data"][0]["display_name"] == "quire-14m-q8_0");
    CHECK(models["data"][0]["created_at"].get<std::string>().ends_with("Z"));
    CHECK(Json::parse(s.get("/version").body).contains("version"));
    const Json props = Json::parse(s.get("/props").body);
    CHECK(props["total_slots"] == 64);
    CHECK(props["model_path"] == "quire-14m-q8_0.gguf");
    const Json blocks = Json::parse(s.get("/blocks").body);
    CHECK(blocks["block_size"] == 16);
    CHECK(blocks["context"] == 1024);
    CHECK(blocks["blocks"].size() == blocks["totals"]["blocks"]);

    const Json tokens = s.ask("/tokenize", {{"prompt", "Hello world"}});
    CHECK(tokens["count"] == tokens["tokens"].size());
    CHECK(tokens["max_model_len"] == 1024);
    const Json text = s.ask("/detokenize", {{"tokens", tokens["tokens"]}});
    CHECK(text["prompt"] == "Hello world");
    CHECK(text["content"] == "Hello world");
    Json decimals = Json::array();
    for (const Json& id : tokens["tokens"]) decimals.push_back(id.get<double>());
    CHECK(s.ask("/detokenize", {{"tokens", decimals}}) == text);
    CHECK(s.post("/detokenize", {{"tokens", {1.5}}}).status == 400);
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
    const Reply newer = s.client().call("GET /v1/models HTTP/2.0\r\nHost: x\r\n\r\n");
    fault(newer, 505, nullptr);
    CHECK(Json::parse(newer.body)["error"]["type"] == "invalid_request_error");
    for (const char* body : {"", "{", "[]", "nonsense", "{\"prompt\":1e999}"})
        fault(s.client().post("/v1/completions", body), 400, nullptr);
    fault(s.client().post("/v1/completions", std::string(50000, '[')), 400, nullptr);
    fault(s.post("/v1/completions", {{"prompt", "a"}, {"n", 0}}), 400, "n");
    fault(s.post("/v1/completions", {{"prompt", "a"}, {"n", 100}}), 400, "n"); // more than run at once
    fault(s.post("/v1/completions", {{"prompt", "a"}, {"n", 1}, {"best_of", 100}}), 400, "best_of");
    fault(s.post("/v1/completions", {{"prompt", ""}}), 400, "prompt");
    fault(s.post("/v1/completions", {{"prompt", {8192}}}), 400, "prompt");
    fault(s.post("/v1/completions", {{"prompt", "a"}, {"model", 4}}), 400, "model");
    fault(s.post("/v1/chat/completions", {{"messages", Json::array()}}), 400, "messages");
    std::string large;
    for (int i = 0; i < 2000; i++) large += "word ";
    fault(s.post("/v1/completions", {{"prompt", large}}), 400, "prompt");
    fault(s.post("/v1/completions", {{"prompt", large}, {"stream", true}}), 400, "prompt");
    fault(s.post("/v1/chat/completions", {{"messages", user(large)}}), 400, "messages");
    fault(s.post("/v1/completions", {{"prompt", std::string(8 << 20, 'a')}}), 400, "prompt");
    fault(s.post("/v1/chat/completions", {{"messages", user(std::string(8 << 20, 'a'))}}), 400, "messages");
    for (const char* field : {"prompt", "content"})
        fault(s.post("/tokenize", {{field, std::string(8 << 20, 'a')}}), 400, field);
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
