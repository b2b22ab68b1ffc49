// OpenAI's API as values: parsing requests, refusing fields by name, the format of responses.
#include <catch2/catch_test_macros.hpp>

import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.schedule.request;
import quire.serve.api.answer;
import quire.serve.api.error;
import quire.serve.api.generation_request;
import quire.serve.api.limits;
import quire.serve.http.exchange;
import quire.serve.openai.embeddings;
import quire.serve.openai.request;
import quire.serve.openai.response;
import quire.serve.status.text_request;
import quire.text.calls.tool_calls;
import quire.text.templates.chat_template;

using namespace quire;

namespace {

ApiLimits limits() {
    ApiLimits l;
    l.models       = {"tiny", "other"};
    l.strict_model = true;
    l.vocab_size   = 100;
    l.context      = 64;
    return l;
}

Parsed<GenerationRequest> completion(const std::string& fields) {
    return parse_completion_request(R"({"prompt":"a")" + (fields.empty() ? "" : "," + fields) + "}", limits());
}
Parsed<GenerationRequest> chat(const std::string& fields) {
    return parse_chat_request(
        R"({"messages":[{"role":"user","content":"a"}])" + (fields.empty() ? "" : "," + fields) + "}", limits());
}

// The field that is wrong, or "fine".
std::string wrong_field(const Parsed<GenerationRequest>& r) { return r ? "fine" : r.error().param; }

Json json_of(const std::string& text) {
    Result<Json> json = json_parse(text);
    REQUIRE(json.has_value());
    return *json;
}

} // namespace

TEST_CASE("defaults, and null for each of them", "[openai]") {
    const auto plain = completion("");
    REQUIRE(plain.has_value());
    CHECK(plain->max_tokens == 16);
    CHECK(plain->request.n == 1);
    const SamplingParams& s = plain->request.sampling; // as in chat and in llama.cpp
    CHECK((s.temperature == 0.8f && s.top_k == 40 && s.top_p == 0.95f && s.min_p == 0.05f && s.repeat_last_n == 64));
    CHECK(plain->request.sampling.logprobs == -1);
    CHECK(plain->add_special_tokens);
    CHECK(!plain->has_seed);
    CHECK(!chat("")->max_tokens.has_value()); // the rest of the context
    for (const char* name : {"model",
                             "max_tokens",
                             "max_completion_tokens",
                             "temperature",
                             "top_p",
                             "top_k",
                             "min_p",
                             "n",
                             "best_of",
                             "stream",
                             "stream_options",
                             "stop",
                             "stop_token_ids",
                             "ignore_eos",
                             "min_tokens",
                             "bad_words",
                             "allowed_token_ids",
                             "presence_penalty",
                             "frequency_penalty",
                             "repetition_penalty",
                             "logit_bias",
                             "logprobs",
                             "top_logprobs",
                             "prompt_logprobs",
                             "seed",
                             "user",
                             "response_format",
                             "tools",
                             "tool_choice",
                             "priority",
                             "cache_salt",
                             "use_beam_search",
                             "length_penalty",
                             "early_stopping",
                             "suffix",
                             "echo",
                             "grammar",
                             "structured_outputs",
                             "n_probs",
                             "functions",
                             "function_call",
                             "parallel_tool_calls",
                             "reasoning_effort",
                             "verbosity",
                             "modalities",
                             "audio",
                             "prediction",
                             "store",
                             "metadata",
                             "service_tier",
                             "web_search_options",
                             "prompt_cache_key",
                             "safety_identifier",
                             "chat_template",
                             "chat_template_kwargs",
                             "add_generation_prompt",
                             "continue_final_message",
                             "add_special_tokens",
                             "guided_json",
                             "request_id",
                             "truncate_prompt_tokens",
                             "return_token_ids",
                             "cache_prompt",
                             "n_predict",
                             "id_slot",
                             "beam_width"}) {
        INFO(name);
        CHECK(wrong_field(completion(cat('"', name, "\":null"))) == "fine");
        CHECK(wrong_field(chat(cat('"', name, "\":null"))) == "fine");
    }
}

TEST_CASE("each wrong value is refused by the name of its field", "[openai]") {
    const std::pair<const char*, const char*> wrong[] = {
        {R"("n":0)", "n"},
        {R"("n":-1)", "n"},
        {R"("n":1000)", "n"},
        {R"("n":"1")", "n"},
        {R"("n":1.5)", "n"},
        {R"("n":true)", "n"},
        {R"("n":2,"best_of":1)", "best_of"},
        {R"("best_of":0)", "best_of"},
        {R"("max_tokens":-2)", "max_tokens"},
        {R"("max_tokens":"x")", "max_tokens"},
        {R"("max_tokens":99999999999)", "max_tokens"},
        {R"("max_tokens":18446744073709551615)", "max_tokens"},
        {R"("temperature":-0.1)", "temperature"},
        {R"("temperature":"hot")", "temperature"},
        {R"("temperature":[1])", "temperature"},
        {R"("top_p":0)", "top_p"},
        {R"("top_p":1.01)", "top_p"},
        {R"("top_p":-1)", "top_p"},
        {R"("top_k":-2)", "top_k"},
        {R"("min_p":1.5)", "min_p"},
        {R"("presence_penalty":2.1)", "presence_penalty"},
        {R"("frequency_penalty":-2.1)", "frequency_penalty"},
        {R"("repetition_penalty":0)", "repetition_penalty"},
        {R"("seed":"x")", "seed"},
        {R"("seed":1e300)", "seed"},
        {R"("stop":"")", "stop"},
        {R"("stop":["a",""])", "stop"},
        {R"("stop":[1])", "stop"},
        {R"("stop":5)", "stop"},
        {R"("stop_token_ids":[100])", "stop_token_ids"},
        {R"("stop_token_ids":[-1])", "stop_token_ids"},
        {R"("stop_token_ids":[2147483648])", "stop_token_ids"},
        {R"("stop_token_ids":["a"])", "stop_token_ids"},
        {R"("allowed_token_ids":[])", "allowed_token_ids"},
        {R"("allowed_token_ids":[1.5])", "allowed_token_ids"},
        {R"("bad_words":[""])", "bad_words"},
        {R"("min_tokens":17,"max_tokens":16)", "min_tokens"},
        {R"("min_tokens":-1)", "min_tokens"},
        {R"("logit_bias":{"100":1})", "logit_bias"},
        {R"("logit_bias":{"-1":1})", "logit_bias"},
        {R"("logit_bias":{"1":"x"})", "logit_bias"},
        {R"("logit_bias":{"1":1000001})", "logit_bias"},
        {R"("logit_bias":{"99999999999999999999":1})", "logit_bias"},
        {R"("logit_bias":[[1]])", "logit_bias"},
        {R"("logit_bias":"x")", "logit_bias"},
        {R"("stream":1)", "stream"},
        {R"("stream_options":{"include_usage":true})", "stream_options"},
        {R"("stream_options":{"continuous_usage_stats":true})", "stream_options"},
        {R"("stream":true,"stream_options":{"include_usage":1})", "stream_options"},
        {R"("stream":true,"stream_options":1)", "stream_options"},
        {R"("stream":true,"best_of":2)", "best_of"},
        {R"("stream":true,"prompt_logprobs":1)", "prompt_logprobs"},
        {R"("prompt_logprobs":-1)", "prompt_logprobs"},
        {R"("prompt_logprobs":1000)", "prompt_logprobs"},
        {R"("model":"gpt-4")", "model"},
        {R"("model":5)", "model"},
        {R"("use_beam_search":1)", "use_beam_search"},
        {R"("beam_width":2)", "beam_width"},
        {R"("length_penalty":2)", "length_penalty"},
        {R"("early_stopping":true)", "early_stopping"},
        {R"("use_beam_search":true,"early_stopping":"soon")", "early_stopping"},
        {R"("use_beam_search":true,"beam_width":1,"n":2)", "beam_width"},
        {R"("use_beam_search":true,"temperature":0.5)", "temperature"},
        {R"("use_beam_search":true,"top_k":5)", "top_k"},
        {R"("use_beam_search":true,"logit_bias":{"1":1})", "logit_bias"},
        {R"("priority":"high")", "priority"},
        {R"("cache_salt":1)", "cache_salt"},
        {R"("suffix":5)", "suffix"},
        {R"("tools":5)", "tools"},
        {R"("tools":{})", "tools"},
        {R"("tool_choice":"required")", "tool_choice"},
        {R"("functions":[{"name":"f"}])", "functions"},
        {R"("function_call":{"name":"f"})", "function_call"},
        {R"("n_probs":101)", "n_probs"},
        {R"("n_probs":-1)", "n_probs"},
        {R"("n_probs":true)", "n_probs"},
        {R"("response_format":{"type":"xml"})", "response_format"},
        {R"("response_format":"text")", "response_format"},
        {R"("response_format":{"type":"json_schema","json_schema":{}})", "response_format"},
        {R"("grammar":3)", "grammar"},
        {R"("guided_json":3)", "guided_json"},
        {R"("guided_choice":[])", "guided_choice"},
        {R"("guided_regex":"a","guided_choice":["b"])", "guided_choice"},
        {R"("structured_outputs":{"regex":3})", "structured_outputs.regex"},
        {R"("structured_outputs":{"colour":3})", "structured_outputs.colour"},
        {R"("structured_outputs":"a")", "structured_outputs"},
        {R"("chat_template":"{{x}}")", "chat_template"},
        {R"("mirostat":3)", "mirostat"},
        {R"("mirostat_tau":-1)", "mirostat_tau"},
        {R"("mirostat_eta":2)", "mirostat_eta"},
        {R"("typical_p":0)", "typical_p"},
        {R"("typical_p":1.5)", "typical_p"},
        {R"("top_n_sigma":"a")", "top_n_sigma"},
        {R"("xtc_probability":1.5)", "xtc_probability"},
        {R"("xtc_threshold":-0.1)", "xtc_threshold"},
        {R"("dynatemp_range":-1)", "dynatemp_range"},
        {R"("dynatemp_exponent":-1)", "dynatemp_exponent"},
        {R"("dry_multiplier":-1)", "dry_multiplier"},
        {R"("dry_base":0.5)", "dry_base"},
        {R"("dry_allowed_length":0)", "dry_allowed_length"},
        {R"("dry_penalty_last_n":-2)", "dry_penalty_last_n"},
        {R"("dry_sequence_breakers":[""])", "dry_sequence_breakers"},
        {R"("dry_sequence_breakers":["a text of more than forty bytes, as this one"])", "dry_sequence_breakers"},
        {R"("use_beam_search":true,"mirostat":2)", "mirostat"},
        {R"("use_beam_search":true,"typical_p":0.5)", "typical_p"},
        {R"("use_beam_search":true,"dry_multiplier":1)", "dry_multiplier"},
        {R"("n_keep":5)", "n_keep"},
        {R"("n_discard":5)", "n_discard"},
        {R"("speculative.n_max":-1)", "speculative.n_max"},
        {R"("speculative.n_min":-1)", "speculative.n_min"},
        {R"("reasoning_effort":"hard")", "reasoning_effort"},
        {R"("store":"true")", "store"},
        {R"("samplers":3)", "samplers"},
        {R"("samplers":[3])", "samplers"},
        {R"("samplers":["top_k","luck"])", "samplers"},
        {R"("samplers":["temperature","top_k"])", "samplers"},
        {R"("samplers":"tk")", "samplers"},
        {R"("post_sampling_probs":1)", "post_sampling_probs"},
        {R"("post_sampling_probs":true,"use_beam_search":true)", "post_sampling_probs"},
    };
    for (const auto& [fields, name] : wrong) {
        INFO(fields);
        CHECK(wrong_field(completion(fields)) == name);
        CHECK(wrong_field(chat(fields)) == name);
        if (const auto r = completion(fields); !r)
            CHECK(r.error().status == (std::string(fields) == R"("model":"gpt-4")" ? 404 : 400));
    }
    CHECK(wrong_field(completion(R"("logprobs":21)")) == "logprobs");
    CHECK(wrong_field(completion(R"("post_sampling_probs":true)")) ==
          "post_sampling_probs"); // its form has no place for it
    CHECK(chat(R"("post_sampling_probs":true,"n_probs":2)")->request.sampling.after_samplers);
    CHECK(wrong_field(completion(R"("logprobs":true)")) == "logprobs");
    CHECK(wrong_field(completion(R"("top_logprobs":1)")) == "top_logprobs");
    CHECK(wrong_field(chat(R"("logprobs":2)")) == "logprobs");
    CHECK(wrong_field(chat(R"("top_logprobs":2)")) == "top_logprobs");
    CHECK(wrong_field(chat(R"("logprobs":true,"top_logprobs":21)")) == "top_logprobs");
    CHECK(wrong_field(chat(R"("logprobs":false,"n_probs":2)")) == "n_probs");
    CHECK(wrong_field(chat(R"("echo":true)")) == "echo");
    CHECK(wrong_field(chat(R"("suffix":"x")")) == "suffix");
    CHECK(wrong_field(completion(R"("suffix":"x","echo":true)")) == "suffix");
    CHECK(wrong_field(chat(R"("chat_template":"rag")")) == "chat_template");
    ApiLimits named = limits();
    named.templates = {"default", "rag"};
    const auto rag = parse_chat_request(R"({"messages":[{"role":"user","content":"a"}],"chat_template":"rag"})", named);
    REQUIRE(rag.has_value());
    CHECK(rag->conversation.input.template_name == "rag");
    named.reasoning_effort = true;
    const auto effort =
        parse_chat_request(R"({"messages":[{"role":"user","content":"a"}],"reasoning_effort":"high"})", named);
    REQUIRE(effort.has_value());
    CHECK(effort->conversation.input.variables["reasoning_effort"] == "high");
    CHECK(completion(R"("tools":[{"type":"function"}])").error().message ==
          "tools is not supported here; only [] is accepted");
    for (
        const auto& [fields, name] : std::vector<std::pair<std::string, std::string>>{
            {R"("tools":[5])", "tools[0]"},
            {R"("tools":[{"type":"retrieval"}])", "tools[0].type"},
            {R"("tools":[{"type":"function","function":{}}])", "tools[0].function.name"},
            {R"("tools":[{"type":"function","function":{"name":"a b"}}])", "tools[0].function.name"},
            {R"("tools":[{"type":"function","function":{"name":"f","parameters":5}}])", "tools[0].function.parameters"},
            {R"("tools":[{"type":"function","function":{"name":"f","parameters":{"type":"string"}}}])",
             "tools[0].function.parameters"},
            {R"("tools":[{"type":"function","function":{"name":"f","strict":"yes"}}])", "tools[0].function.strict"},
            {R"("tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"must")", "tool_choice"},
            {R"("tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":{"type":"function"})",
             "tool_choice"},
            {R"("tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"some")", "tool_choice"},
            {R"("tools":[],"tool_choice":"required")", "tool_choice"},
            {R"("tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":{"type":"allowed_tools"})",
             "tool_choice"},
            {R"("tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":{"type":"allowed_tools","allowed_tools":
                 {"mode":"auto","tools":[{"type":"function","function":{"name":"g"}}]}})",
             "tool_choice"},
            {R"("tools":[],"parallel_tool_calls":1)", "parallel_tool_calls"},
        }) {
        INFO(fields);
        CHECK(wrong_field(chat(fields)) == name);
    }
    const auto offered = chat(
        R"("tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"auto","parallel_tool_calls":false)");
    REQUIRE(offered.has_value());
    CHECK(offered->tool_use.tools.size() == 1);
    CHECK(!offered->tool_use.parallel);
    CHECK(offered->conversation.input.tools.size() == 1);
    const auto allowed = chat(
        R"("tools":[{"type":"function","function":{"name":"f"}},{"type":"function","function":{"name":"g"}}],"tool_choice":
            {"type":"allowed_tools","allowed_tools":{"mode":"required","tools":[{"type":"function","function":{"name":"g"}}]}})");
    REQUIRE(allowed.has_value());
    CHECK(allowed->tool_use.tools.size() == 1);
    CHECK(allowed->tool_use.tools[0]["function"]["name"] == "g");
    CHECK(allowed->tool_use.required);
    CHECK(allowed->tool_use.parallel);
    std::string many;
    for (int i = 0; i < 65; i++) many += (i > 0 ? R"(,"s")" : R"("s")");
    CHECK(wrong_field(completion(R"("stop":[)" + many + "]")) == "stop");
    CHECK(wrong_field(completion(R"("stop":")" + std::string(513, 'a') + "\"")) == "stop");
}

TEST_CASE("samplers have llama.cpp's names, and the server's defaults", "[openai]") {
    const auto set = completion(
        R"("typical_p":0.5,"top_n_sigma":1.5,"xtc_probability":0.25,"xtc_threshold":0.2,"dynatemp_range":0.5,)"
        R"("dynatemp_exponent":2,"mirostat":2,"mirostat_tau":4,"mirostat_eta":0.5,"dry_multiplier":0.75,"dry_base":2,)"
        R"("dry_allowed_length":3,"dry_penalty_last_n":-1,"dry_sequence_breakers":["\n","END"])");
    REQUIRE(set.has_value());
    const SamplingParams& s = set->request.sampling;
    CHECK((s.typical_p == 0.5f && s.top_n_sigma == 1.5f && s.xtc_probability == 0.25f && s.xtc_threshold == 0.2f));
    CHECK((s.dynatemp_range == 0.5f && s.dynatemp_exponent == 2));
    CHECK((s.mirostat == 2 && s.mirostat_tau == 4 && s.mirostat_eta == 0.5f));
    CHECK((s.dry.multiplier == 0.75f && s.dry.base == 2 && s.dry.allowed_length == 3 && s.dry.last_n == -1));
    CHECK(set->dry_breakers == std::vector<std::string>{"\n", "END"});
    ApiLimits defaults                          = limits();
    defaults.samplers.params.mirostat           = 1;
    defaults.samplers.params.dry.base           = 3;
    defaults.samplers.params.repetition_penalty = 1.5f;
    defaults.samplers.params.temperature        = 0.5f;
    defaults.samplers.dry_breakers              = {"x"};
    defaults.reasoning_budget                   = 7;
    const std::string hello                     = R"("messages":[{"role":"user","content":"a"}])";
    const auto        usual                     = parse_chat_request("{" + hello + "}", defaults);
    REQUIRE(usual.has_value());
    CHECK(usual->request.sampling.mirostat == 1);
    CHECK((usual->request.sampling.repetition_penalty == 1.5f && usual->request.sampling.temperature == 0.5f));
    CHECK(usual->request.sampling.dry.base == 3);
    CHECK(usual->dry_breakers == std::vector<std::string>{"x"});
    CHECK(usual->reasoning_budget == 7);
    CHECK(!usual->trim);
    // Beams take the model's own probabilities, whatever the server's defaults are.
    const auto beams = parse_chat_request("{" + hello + R"(,"use_beam_search":true})", defaults);
    REQUIRE(beams.has_value());
    CHECK(beams->reasoning_budget == -1);
    CHECK((beams->request.sampling.repetition_penalty == 1 && beams->request.sampling.top_k == 0));
    for (const char* name :
         {"reasoning_budget", "reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget"}) {
        const auto r = parse_chat_request(cat("{", hello, ",\"", name, "\":0}"), defaults);
        REQUIRE(r.has_value());
        CHECK(r->reasoning_budget == 0);
    }
    const auto trims = parse_chat_request("{" + hello + R"(,"truncation":"auto"})", defaults);
    REQUIRE(trims.has_value());
    CHECK(trims->trim);
    defaults.trim_chats = defaults.context_shift = true;
    const auto shifts =
        parse_chat_request("{" + hello + R"(,"truncation":"disabled","n_keep":-1,"n_discard":3})", defaults);
    REQUIRE(shifts.has_value());
    CHECK(!shifts->trim);
    CHECK(shifts->request.most_drafts == -1);
    CHECK(parse_chat_request("{" + hello + R"(,"speculative.n_max":0})", defaults)->request.most_drafts == 0);
    CHECK(shifts->request.least_drafts == -1);
    CHECK(parse_chat_request("{" + hello + R"(,"speculative.n_min":5})", defaults)->request.least_drafts == 5);
    CHECK(parse_chat_request("{" + hello + R"(,"speculative.n_min":5,"speculative.n_max":3})", defaults)
              ->request.least_drafts == 3);
    CHECK((shifts->request.context_shift && shifts->request.n_keep == -1 && shifts->request.n_discard == 3));
    CHECK(wrong_field(parse_chat_request("{" + hello + R"(,"truncation":"some"})", defaults)) == "truncation");
}

TEST_CASE("what changes nothing is accepted", "[openai]") {
    for (const char* fields :
         {R"("user":"u","metadata":{"a":1},"parallel_tool_calls":true,"service_tier":"auto","store":false)",
          R"("response_format":{"type":"text"})",
          R"("tool_choice":"none")",
          R"("suffix":"")",
          R"("model":"other")",
          R"("typical_p":1.0,"mirostat":0,"dry_multiplier":0,"samplers":null,"id_slot":-1)",
          R"("id_slot":3,"logit_bias":{"5":-1000})",
          R"("samplers":["penalties","dry","top_n_sigma","top_k","typ_p","top_p","min_p","xtc","temperature"])",
          R"("samplers":["top_k","typical_p","temperature"])",
          R"("samplers":"edskypmxt")",
          R"("n":1.0)",
          R"("top_k":-1)",
          R"("seed":-1)",
          R"("temperature":0)",
          R"("max_tokens":-1)",
          R"("max_tokens":0)",
          R"("chat_template_kwargs":{})",
          R"("tools":[])",
          R"("tools":[],"tool_choice":"none")",
          R"("tools":[],"tool_choice":"auto")",
          R"("tool_choice":"auto")",
          R"("store":true,"reasoning_effort":"low","verbosity":"low")",
          R"("reasoning_effort":"high","verbosity":"high")",
          R"("functions":[],"function_call":"none")",
          R"("stream_options":{})",
          R"("stream_options":{"include_usage":false})",
          R"("stream":false,"stream_options":{"include_usage":null})",
          R"("stream":true,"stream_options":{"include_usage":true,"include_obfuscation":false})",
          R"("modalities":["text"],"verbosity":"medium","reasoning_effort":"medium","include_reasoning":false)",
          R"("store":false,"metadata":{},"prediction":null,"audio":null,"web_search_options":null)",
          R"("logit_bias":{},"bad_words":[],"stop":[],"stop_token_ids":[],"use_beam_search":true)",
          R"("logit_bias":[],"n_probs":0,"top_logprobs":0,"logprobs":null,"grammar":"","samplers":null)"}) {
        INFO(fields);
        CHECK(wrong_field(completion(fields)) == "fine");
        CHECK(wrong_field(chat(fields)) == "fine");
    }
    CHECK(completion(R"("colour":"red","n":1)")->unknown == std::vector<std::string>{"colour"});
    CHECK(completion(R"("max_tokens":-1)")->max_tokens == std::nullopt);
    CHECK(completion(R"("max_tokens":0)")->max_tokens == 0);
    CHECK(chat(R"("max_completion_tokens":5,"max_tokens":7)")->max_tokens == 5);
    CHECK(completion(R"("n_predict":9)")->max_tokens == 9);
    CHECK(completion(R"("stop":"x")")->stop == std::vector<std::string>{"x"});
    const auto bias = completion(R"("logit_bias":{"3":-100,"cat":5})");
    CHECK(bias->request.sampling.logit_bias == std::vector<std::pair<Token, float>>{{3, -100.0f}});
    CHECK(bias->text_bias == std::vector<std::pair<std::string, float>>{{"cat", 5.0f}});
    CHECK(std::isinf(completion(R"("logit_bias":[[3,false]])")->request.sampling.logit_bias[0].second));
    CHECK(completion(R"("n_probs":3)")->request.sampling.logprobs == 3);
    CHECK(completion(R"("n_probs":100)")->request.sampling.logprobs == 100);
    const auto            few = completion(R"("samplers":["top_k"],"top_k":7,"presence_penalty":1,"dynatemp_range":1)");
    const SamplingParams& s   = few->request.sampling; // as the model says, within the best seven
    CHECK((s.top_k == 7 && s.temperature == 1 && s.top_p == 1 && s.min_p == 0 && s.presence_penalty == 0));
    CHECK(s.dynatemp_range == 0);
    const auto none = completion(R"("samplers":[])");
    CHECK((none->request.sampling.top_k == 0 && none->request.sampling.temperature == 1));
    ApiLimits seeded = limits();
    seeded.seed      = 5;
    CHECK(parse_completion_request(R"({"prompt":"a"})", seeded)->request.sampling.seed == 5);
    CHECK(parse_completion_request(R"({"prompt":"a","seed":6})", seeded)->request.sampling.seed == 6);
    CHECK(!parse_completion_request(R"({"prompt":"a","seed":-1})", seeded)->has_seed);
    CHECK(chat(R"("n_probs":3)")->logprobs);
    CHECK(chat(R"("n_probs":3)")->request.sampling.logprobs == 3);
    CHECK(chat(R"("n_probs":3,"logprobs":true,"top_logprobs":2)")->request.sampling.logprobs == 2);
    CHECK(completion(R"("request_id":"My-1_2.3:4")")->id == "My-1_2.3:4");
    for (const char* odd : {"", "two words", "a\\r\\nb", "\\u0000", "a/b", "é", "a\\\"b"})
        CHECK(completion(cat(R"("request_id":")", odd, '"'))->id.empty());
    CHECK(completion(R"("request_id":")" + std::string(129, 'a') + "\"")->id.empty());
    CHECK(completion(R"("use_beam_search":true,"best_of":4,"n":2)")->request.beam_width == 4);
    CHECK(completion(R"("use_beam_search":true,"n":3)")->request.beam_width == 3);
    CHECK(chat(R"("use_beam_search":true,"beam_width":5,"early_stopping":"never","length_penalty":0.5)")
              ->request.beam_width == 5);
}

TEST_CASE("prompts in every form", "[openai]") {
    const auto prompts = [](const std::string& prompt) {
        return parse_completion_request(R"({"prompt":)" + prompt + "}", limits());
    };
    using Ids = std::vector<Token>;
    CHECK(prompts(R"("a")")->prompts == std::vector<Prompt>{{"a"}});
    CHECK(prompts(R"(["a","b"])")->prompts == std::vector<Prompt>{{"a"}, {"b"}});
    CHECK(prompts("[1,2]")->prompts == std::vector<Prompt>{{Ids{1, 2}}});
    CHECK(prompts("[[1,2],[3]]")->prompts == std::vector<Prompt>{{Ids{1, 2}}, {Ids{3}}});
    CHECK(prompts(R"([1,"a",2])")->prompts == std::vector<Prompt>{{Ids{1}, "a", Ids{2}}});
    CHECK(prompts(R"(["a",[1]])")->prompts == std::vector<Prompt>{{"a"}, {Ids{1}}});
    for (const char* bad : {"[]", "[[]]", "{}", "5", "true", "[100]", "[-1]", "[1.5]", "[[1],[100]]", "[null]",
                            "[[[1]]]", "[2147483648]", R"([["a"],{}])"}) {
        INFO(bad);
        CHECK(wrong_field(prompts(bad)) == "prompt");
    }
    CHECK(wrong_field(parse_completion_request("{}", limits())) == "prompt");
    std::string many = "[";
    for (int i = 0; i < 1025; i++) many += i > 0 ? R"(,"a")" : R"("a")";
    CHECK(wrong_field(prompts(many + "]")) == "prompt");
}

TEST_CASE("conversations", "[openai]") {
    const auto talk = [](const std::string& messages, const std::string& more = "") {
        return parse_chat_request(R"({"messages":)" + messages + more + "}", limits());
    };
    const auto parts = talk(
        R"([{"role":"developer","content":"s"},{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}])");
    REQUIRE(parts.has_value());
    CHECK(parts->conversation.input.messages[0]["role"] == "developer");
    CHECK(parts->conversation.input.messages[1]["content"].size() == 2);
    for (const char* bad :
         {"[]", "{}", "5", R"(["a"])", R"([{"content":"a"}])", R"([{"role":"user"}])",
          R"([{"role":"user","content":null}])", R"([{"role":"user","content":5}])",
          R"([{"role":"robot","content":"a"}])", R"([{"role":5,"content":"a"}])",
          R"([{"role":"user","content":[{"type":"image_url","image_url":{"url":"file:///etc/passwd"}}]}])",
          R"([{"role":"user","content":["a"]}])", R"([{"role":"system"}])",
          R"([{"role":"assistant","content":"a"},{"role":"assistant","content":"b"}])"}) {
        INFO(bad);
        CHECK(wrong_field(talk(bad)) == "messages");
    }
    const auto tools = talk(
        R"([{"role":"user","content":"a"},{"role":"assistant","content":null,"tool_calls":[{"id":"x","type":"function",)"
        R"("function":{"name":"f","arguments":"{\"a\":1}"}}]},{"role":"tool","content":"1","tool_call_id":"x"}])",
        R"(,"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"none","chat_template_kwargs":{"x":1},"enable_thinking":false)");
    REQUIRE(tools.has_value());
    CHECK(tools->conversation.input.messages.size() == 3);
    CHECK(tools->conversation.input.messages[1]["tool_calls"][0]["function"]["arguments"]["a"] == 1);
    CHECK(tools->tool_use.tools.empty()); // of the choice none
    const std::string call = R"({"id":"x","type":"function","function":{"name":"f","arguments":"{}"}})";
    for (const std::string& bad : {
             R"({"role":"tool","content":"1","tool_call_id":"x"})" + std::string(),
             R"({"role":"assistant","tool_calls":[)" + call + "]}",
             R"({"role":"assistant","tool_calls":[)" + call + R"(]},{"role":"user","content":"b"})",
             R"({"role":"assistant","tool_calls":[)" + call + R"(]},{"role":"tool","content":"1"})",
             R"({"role":"assistant","tool_calls":[)" + call + R"(]},{"role":"tool","content":"1","tool_call_id":"y"})",
             std::string(R"({"role":"assistant","tool_calls":[5]})"),
             std::string(R"({"role":"assistant","tool_calls":[{"id":"x","type":"function"}]})"),
             std::string(R"({"role":"assistant","tool_calls":[{"id":"x","type":"function",)") +
                 R"("function":{"name":"f","arguments":"[1]"}}]})",
             std::string(R"({"role":"assistant","tool_calls":[{"id":"x","type":"function",)") +
                 R"("function":{"name":"f","arguments":{}}}]})",
             R"({"role":"user","content":"a","tool_calls":[)" + call + "]}",
         }) {
        INFO(bad);
        CHECK(wrong_field(talk(R"([{"role":"user","content":"a"},)" + bad + "]")) == "messages");
    }
    for (const char* empty :
         {R"("content":null,"tool_calls":[])", R"("content":null,"tool_calls":null)", R"("refusal":null)"}) {
        const auto said = talk(cat(R"([{"role":"user","content":"a"},{"role":"assistant",)", empty,
                                   R"(},{"role":"user","content":"b"}])"));
        INFO(empty);
        REQUIRE(said.has_value());
        CHECK(said->conversation.input.messages[1]["content"] == "");
    }
    CHECK(tools->conversation.input.tools.size() == 1);
    CHECK(json_dump(tools->conversation.input.variables) == R"({"x":1,"enable_thinking":false})");
    const std::string begun = R"([{"role":"user","content":"a"},{"role":"assistant","content":"b"}])";
    CHECK(talk(begun)->conversation.continue_final);
    CHECK(!talk(begun, R"(,"add_generation_prompt":true)")->conversation.continue_final);
    const auto in_parts = talk(R"([{"role":"user","content":"a"},
        {"role":"assistant","content":[{"type":"text","text":"b"},{"type":"text","text":"c"}]}])");
    CHECK(in_parts->conversation.continue_final);
    CHECK(in_parts->conversation.input.messages[1]["content"] == "b\n\nc"); // as in llama.cpp
    CHECK(wrong_field(talk(begun, R"(,"add_generation_prompt":true,"continue_final_message":true)")) ==
          "continue_final_message");
    CHECK(wrong_field(talk(R"([{"role":"user","content":"a"}])", R"(,"continue_final_message":true)")) ==
          "continue_final_message");
}

TEST_CASE("bodies that are no requests", "[openai]") {
    std::string deep(100'000, '['), object;
    for (int i = 0; i < 1000; i++) object += R"({"a":)";
    for (const std::string& text :
         {std::string(), std::string("{"), std::string("[]"), std::string("null"), std::string("\"a\""),
          std::string(R"({"prompt":NaN})"), std::string(R"({"prompt":1e400})"), deep, object, std::string("\xff\xfe"),
          std::string("{\"prompt\":\"\xc3\"}"), std::string("{\"a\"\0:1}", 8)})
        for (const auto& r : {parse_completion_request(text, limits()), parse_chat_request(text, limits())}) {
            REQUIRE(!r.has_value());
            CHECK(r.error().status == 400);
        }
    ApiLimits few   = limits();
    few.json.values = 10;
    CHECK(!parse_completion_request(R"({"prompt":[1,2,3,4,5,6,7,8,9,10]})", few));
    CHECK(!parse_embedding_request(R"({"input":[]})", limits()));
    CHECK(!parse_embedding_request(R"({"input":"a","encoding_format":"binary"})", limits()));
    CHECK(!parse_detokenize_request(R"({"tokens":[100]})", limits()));
    CHECK(!parse_text_request(R"({"prompt":"a","content":"b"})", limits()));
    CHECK(!parse_id_request("{}", limits()));
}

TEST_CASE("a prompt too long is said in OpenAI's words", "[openai]") {
    const ApiError f = context_overflow(64, 60, 16, "messages");
    CHECK(f.status == 400);
    CHECK(
        f.message ==
        "This model's maximum context length is 64 tokens. However, you requested 76 tokens (60 in the messages, 16 in "
        "the completion). Please reduce the length of the messages or completion. (context_length_exceeded)");
    CHECK(f.param == "messages");
    CHECK(f.code == "context_length_exceeded");
    CHECK(json_of(error_body(f))["error"]["type"] == "invalid_request_error");
    CHECK(context_overflow(64, 2'000'000'000, 2'000'000'000, "prompt", true)
              .message.find("requested 4000000000 tokens (2000000000 in the prompt, ") != std::string::npos);
    CHECK(context_overflow(64, 65, 0, "input")
              .message.ends_with("Please reduce the length of the input. (context_length_exceeded)"));
}

TEST_CASE("responses have OpenAI's shapes", "[openai]") {
    ResponseHead head;
    head.id       = "cmpl-1";
    head.model    = "tiny";
    head.created  = 5;
    head.logprobs = true;
    Choice choice;
    choice.parts         = {{AnswerPart::Kind::content, "ab", {}}};
    choice.finish_reason = "stop";
    choice.stop_string   = "END";
    SpelledPosition first, second;
    first.token     = {1, "x", 0};
    second.chosen   = SpelledLogprob{2, "\xe2\x82", -std::numeric_limits<float>::infinity()};
    second.top      = {{3, "y", -0.5f}};
    second.offset   = 1;
    choice.logprobs = {first, second};
    const Usage usage{3, 2, 1};

    const Json legacy = json_of(render_response(head, std::array{choice}, usage));
    CHECK(legacy["object"] == "text_completion");
    CHECK(
        legacy["usage"] ==
        json_of(
            R"({"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,"prompt_tokens_details":{"cached_tokens":1}})"));
    const Json& c = legacy["choices"][0];
    CHECK(c["text"] == "ab");
    CHECK(c["finish_reason"] == "stop");
    CHECK(c["stop_reason"] == "END");
    CHECK(c["logprobs"]["tokens"] == json_of(R"(["x","bytes:\\xe2\\x82"])"));
    CHECK(c["logprobs"]["token_logprobs"] == json_of("[null,-9999.0]"));
    CHECK(c["logprobs"]["top_logprobs"] == json_of(R"([null,{"y":-0.5,"bytes:\\xe2\\x82":-9999.0}])"));
    CHECK(c["logprobs"]["text_offset"] == json_of("[0,1]"));

    head.chat          = true;
    const Json message = json_of(render_response(head, std::array{choice}, usage));
    CHECK(message["object"] == "chat.completion");
    CHECK(message["choices"][0]["message"]["role"] == "assistant");
    CHECK(message["choices"][0]["message"]["content"] == "ab");
    const Json& content = message["choices"][0]["logprobs"]["content"];
    REQUIRE(content.size() == 1);
    CHECK(content[0]["bytes"] == json_of("[226,130]"));
    CHECK(content[0]["top_logprobs"][0]["token"] == "y");

    head.include_usage = true;
    const Json begin   = json_of(render_first_chunk(head, choice, usage));
    CHECK(begin["object"] == "chat.completion.chunk");
    CHECK(begin["choices"][0]["delta"] == json_of(R"({"role":"assistant","content":null})"));
    CHECK(begin["usage"].is_null());
    CHECK(json_of(render_chunk(head, choice, usage))["choices"][0]["delta"]["content"] == "ab");
    const Json last = json_of(render_usage_chunk(head, usage));
    CHECK(last["choices"].empty());
    CHECK(last["usage"]["total_tokens"] == 5);

    const Json error = json_of(error_body({429, "full", "", "queue_full"}));
    CHECK(error ==
          json_of(R"({"error":{"message":"full","type":"rate_limit_error","param":null,"code":"queue_full"}})"));

    const std::vector<float> v{1, -2, 0.5f, 3};
    const Json embeddings = json_of(render_embeddings("tiny", std::array{v, std::vector<float>{1}}, true, 2));
    CHECK(embeddings["data"][0]["embedding"] == "AACAPwAAAMAAAAA/AABAQA==");
    CHECK(embeddings["data"][1]["embedding"] == "AACAPw==");
}

TEST_CASE("a chunk with nothing but text has the bytes of its JSON", "[openai]") {
    using Kind = AnswerPart::Kind;
    for (const bool chat : {false, true})
        for (const bool include_usage : {false, true})
            for (const bool continuous_usage : {false, true})
                for (const bool token_ids : {false, true}) {
                    ResponseHead head;
                    head.id               = R"("index":0)";
                    head.model            = R"(a "x" \ model)";
                    head.created          = 5;
                    head.chat             = chat;
                    head.include_usage    = include_usage;
                    head.continuous_usage = continuous_usage;
                    head.token_ids        = token_ids;
                    const auto stream     = openai_renderer(head);
                    head.id               = cat(chat ? "chatcmpl-" : "cmpl-", head.id);
                    for (const char* text : {"a", " b\n", "\"\\", "\x01\x1f\x7f", "\xe2\x82\xac", "\xe2\x82", "x"})
                        for (const Kind kind : {Kind::content, Kind::reasoning})
                            for (const int index : {0, 1, 12}) {
                                if (!chat && kind == Kind::reasoning) continue;
                                Choice c;
                                c.index = index;
                                append(c.parts, kind, text);
                                for (const Usage& usage : {Usage{3, 2, 1}, Usage{3, 12, 1, 4}, Usage{40, 13, 32, 5, 16},
                                                           Usage{40, 14, 32, 5, 32, 16}})
                                    CHECK(stream->piece(c, usage) == event(render_chunk(head, c, usage)));
                            }
                }
    for (const char* text : {"", "a", "\xff", "\"", "\xf0\x9f\x98\x80"})
        CHECK(json_quoted(text) == json_dump(Json(text)));
}

TEST_CASE("rates of an answer are of the tokens behind its first one", "[openai]") {
    const auto of = [](int n, double ms) {
        Timings t;
        t.prompt_tokens = 10, t.cached_tokens = 4, t.prompt_ms = 12;
        t.generated_tokens = n, t.generated_ms = ms;
        return timings_json(t);
    };
    const Json t = of(11, 500);
    CHECK((t["predicted_n"] == 11 && t["predicted_ms"] == 500));
    CHECK((t["predicted_per_token_ms"] == 50 && t["predicted_per_second"] == 20)); // 10 tokens in that time
    CHECK((t["prompt_n"] == 6 && t["cache_n"] == 4 && t["prompt_per_token_ms"] == 2 && t["prompt_per_second"] == 500));
    for (const Json& none : {of(0, 0), of(1, 0)})
        CHECK((none["predicted_per_token_ms"] == 0 && none["predicted_per_second"] == 0));
    CHECK((of(2, 5)["predicted_per_token_ms"] == 5 && of(2, 5)["predicted_per_second"] == 200));
}
