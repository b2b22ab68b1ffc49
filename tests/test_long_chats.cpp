// Reasoning budgets, conversations that are trimmed and answers that go on beyond the context, through the server.
#include <catch2/catch_test_macros.hpp>

#include <fstream>

#include "server_process.h"

using namespace quire::testing;
using Json = nlohmann::json;

namespace {

// A template with reasoning, whose prompts show how many messages they have.
std::string reasoning_template() {
    const std::string file = temporary();
    std::ofstream(file)
        << "{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}\n{% endfor -%}<|assistant|><think>\n";
    return file;
}

Json conversation(int turns, const std::string& system = "Be brief.") {
    Json messages = Json::array({{{"role", "system"}, {"content", system}}});
    for (int i = 0; i < turns; i++) {
        if (i > 0)
            messages.push_back({{"role", "assistant"}, {"content", "answer " + std::to_string(i) + ", at length"}});
        messages.push_back({{"role", "user"}, {"content", "question " + std::to_string(i) + " of many"}});
    }
    return messages;
}

} // namespace

TEST_CASE("a reasoning budget bounds what stands in <think>", "[server]") {
    const Server s({"--chat-template-file", reasoning_template(), "--reasoning-budget", "6"});
    Json         body{{"messages", conversation(1)}, {"max_tokens", 40}, {"temperature", 0}, {"ignore_eos", true}};
    const auto   message = [&] { return s.ask("/v1/chat/completions", body)["choices"][0]["message"]; };
    const Json   usual   = message();
    CHECK(usual["content"].get<std::string>().size() > 0);
    body["reasoning_budget"] = -1;
    const Json unbounded     = message();
    CHECK(unbounded["reasoning_content"].get<std::string>().starts_with(usual["reasoning_content"].get<std::string>()));
    body["reasoning_budget"] = 0;
    const Json none          = message();
    CHECK((!none.contains("reasoning_content") || none["reasoning_content"].is_null() ||
           none["reasoning_content"] == ""));
    body["thinking_budget_tokens"] = 3;
    body.erase("reasoning_budget");
    CHECK(message()["reasoning_content"].get<std::string>().size() <
          usual["reasoning_content"].get<std::string>().size());
}

TEST_CASE("a chat that is too long loses its oldest turns where that is asked for", "[server]") {
    const Server s({"-c", "128", "--trim-chats"});
    Json         body{{"messages", conversation(12)}, {"max_tokens", 8}, {"temperature", 0}};
    const Json   got = s.ask("/v1/chat/completions", body);
    CHECK(got["usage"]["prompt_tokens"].get<int>() <= 120);
    // Equal to the answer without the turns that were left out.
    bool found = false;
    for (std::size_t n = 1; n < 12 && !found; n++) {
        Json shorter = body;
        for (std::size_t i = 0; i < 2 * n; i++) shorter["messages"].erase(1);
        shorter["truncation"] = "disabled";
        const Reply r         = s.post("/v1/chat/completions", shorter);
        if (r.status != 200) continue;
        const Json whole = Json::parse(r.body);
        if (whole["usage"]["prompt_tokens"].get<int>() > 120) continue;
        found = true; // the first one that fits
        CHECK(whole["usage"]["prompt_tokens"] == got["usage"]["prompt_tokens"]);
        CHECK(whole["choices"][0]["message"]["content"] == got["choices"][0]["message"]["content"]);
    }
    CHECK(found);
    CHECK(has(s.log(), "trimmed_messages"));
    body["truncation"] = "disabled";
    const Reply whole  = s.post("/v1/chat/completions", body);
    CHECK(whole.status == 400);
    CHECK(has(whole.body, "context_length_exceeded"));
    // The last turn stays, and can be too long.
    std::string much;
    for (int i = 0; i < 200; i++) much += "word ";
    const Reply too_long = s.post("/v1/chat/completions", {{"messages",
                                                            {{{"role", "user"}, {"content", "a"}},
                                                             {{"role", "assistant"}, {"content", "b"}},
                                                             {{"role", "user"}, {"content", much}}}}});
    CHECK(too_long.status == 400);
    CHECK(has(too_long.body, "context_length_exceeded"));
}

TEST_CASE("with --context-shift answers are longer than the context", "[server]") {
    const Server s({"-c", "64", "--context-shift"});
    Json         body{{"prompt", "Once upon a time"}, {"max_tokens", 200}, {"temperature", 0}, {"ignore_eos", true}};
    const Json   got = s.ask("/v1/completions", body);
    CHECK(got["usage"]["completion_tokens"] == 200);
    CHECK(got["choices"][0]["finish_reason"] == "length");
    Json chat{{"messages", conversation(1)}, {"temperature", 0}, {"ignore_eos", true}};
    CHECK(s.ask("/v1/chat/completions", chat)["usage"]["completion_tokens"] == 64); // where nothing is asked for
    chat["max_tokens"] = 150;
    CHECK(s.ask("/v1/chat/completions", chat)["usage"]["completion_tokens"] == 150);
    body["n_keep"] = -1, body["n_discard"] = 5;
    CHECK(s.ask("/v1/completions", body)["usage"]["completion_tokens"] == 200);
}

TEST_CASE("requests choose llama.cpp's samplers", "[server]") {
    const Server s;
    const auto   text = [&](Json more) {
        Json body{{"prompt", "Once upon a time"},
                    {"max_tokens", 40},
                    {"temperature", 0.8},
                    {"seed", 5},
                    {"ignore_eos", true}};
        body.update(more);
        return s.ask("/v1/completions", body)["choices"][0]["text"].get<std::string>();
    };
    const std::string plain = text(Json::object());
    for (const Json& more :
         {Json{{"mirostat", 1}, {"mirostat_tau", 1}}, Json{{"mirostat", 2}, {"mirostat_tau", 1}},
          Json{{"typical_p", 0.2}}, Json{{"top_n_sigma", 0.5}}, Json{{"xtc_probability", 1}, {"xtc_threshold", 0.05}},
          Json{{"dynatemp_range", 0.9}, {"dynatemp_exponent", 3}},
          Json{{"dry_multiplier", 5},
               {"dry_allowed_length", 1},
               {"dry_penalty_last_n", -1},
               {"dry_sequence_breakers", {"."}}}}) {
        INFO(more.dump());
        const std::string one = text(more);
        CHECK(one != plain);
        CHECK(text(more) == one);
    }
    // DRY alone changes a greedy answer, which repeats itself sooner or later.
    const Json greedy{{"temperature", 0}, {"max_tokens", 300}};
    Json       dry = greedy;
    dry.update({{"dry_multiplier", 2}, {"dry_penalty_last_n", -1}, {"dry_sequence_breakers", "\n"}});
    CHECK(text(greedy) != text(dry));
}
