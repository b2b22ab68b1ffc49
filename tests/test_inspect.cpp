// The program `inspect` as a process: what it answers to good files, bad files and wrong usage.
#include <catch2/catch_test_macros.hpp>

#include <nlohmann/json.hpp>

#include "process.h"
#include "pty.h"
#include "reference.h"

import quire.core.base;
import quire.core.std;
import quire.model_file.gguf_writer;

using namespace quire::testing;

namespace {

nlohmann::json answer(const std::vector<std::string>& arguments, const std::string& input = "") {
    const Finished f = run_program("inspect", arguments, input);
    INFO(f.err);
    REQUIRE(f.code == 0);
    REQUIRE(std::count(f.out.begin(), f.out.end(), '\n') == 1);
    return nlohmann::json::parse(f.out);
}

} // namespace

TEST_CASE("malformed files are refused in one sentence, by whatever command reads them", "[inspect]") {
    const std::string folder = reference("bad");
    std::ifstream     index(folder + "/index.json");
    const auto        list = nlohmann::json::parse(index);
    int               n    = 0;
    for (const auto& entry : list) {
        const std::string name = entry["file"], path = folder + "/" + name;
        if (!std::filesystem::is_regular_file(path)) continue;
        const bool reject = entry["verdict"] == "reject";
        for (const std::vector<std::string>& arguments : {std::vector<std::string>{"show", path},
                                                          {"generate", path, "--ids", "1,2,3", "-n", "4"},
                                                          {"tokenize", path}}) {
            const Finished f = run_program("inspect", arguments, "text");
            CAPTURE(name, arguments[0], f.err, f.out.substr(0, 200));
            if (reject) CHECK(f.code == 1);
            else CHECK((f.code == 0 || f.code == 1));
            if (f.code == 1) {
                CHECK(std::count(f.err.begin(), f.err.end(), '\n') == 1);
                CHECK(f.err.find(name) != std::string::npos); // where
                CHECK(f.out.empty());
            }
        }
        n++;
    }
    CHECK(n > 80);
    for (const std::string& path :
         {folder + "/directory.gguf", std::string("/nonexistent.gguf"), std::string("/dev/null")})
        CHECK(run_program("inspect", {"show", path}).code == 1);
    CHECK(run_program("inspect", {"show", folder + "/good.gguf"}).code == 0);
    CHECK(run_program("inspect", {"show", folder + "/good-bpe.gguf"}).code == 0);
}

TEST_CASE("show sums up a model", "[inspect]") {
    const auto show = answer({"show", reference("models/llama3-gqa-Q8_0.gguf")});
    CHECK(show["metadata"]["general.architecture"] == "llama");
    const auto& m = show["model"];
    CHECK(show["kv_bytes_per_token"]["f16"] ==
          2 * 2 * m["layers"].get<int>() * m["kv_heads"].get<int>() * m["head_dim"].get<int>());
    CHECK(show["tensors"].size() > 10);
    CHECK(show["tensors"][0].contains("dims"));
}

TEST_CASE("show on a terminal is for a person", "[inspect]") {
    Pty shown(QUIRE_BIN "/inspect", {"show", QUIRE_ROOT "/models/quire-14m-q8_0.gguf"});
    CHECK(shown.end() == 0);
    CHECK(shown.all.find("llama, 14 M parameters, Q8_0 14 MiB\r\ncontext 1024 of 1024 tokens fits") !=
          std::string::npos);
    CHECK(shown.all.find("name: quire 14M chat\r\n") != std::string::npos);
    CHECK(shown.all.find("tok/s") == std::string::npos);
    CHECK(shown.all.find("{\"") == std::string::npos);
    Pty json(QUIRE_BIN "/inspect", {"show", QUIRE_ROOT "/models/quire-14m-q8_0.gguf", "--json"});
    CHECK(json.end() == 0);
    CHECK(nlohmann::json::parse(json.all)["parameters"] == 14161536);
}

TEST_CASE("a file without a subcommand is shown", "[inspect]") {
    const std::string file    = reference("models/llama3-gqa-Q8_0.gguf");
    const auto        tensors = answer({"show", file})["tensors"];
    CHECK(answer({file})["tensors"] == tensors);
    CHECK(answer({file, "--json"})["tensors"] == tensors);
    CHECK(answer({"--json", file})["tensors"] == tensors);
    const Finished none = run_program("inspect", {"/nonexistent/model.gguf"});
    CHECK(none.code == 1);
    CHECK(none.err == "inspect: cannot open /nonexistent/model.gguf: No such file or directory\n");
    CHECK(run_program("inspect", {"-hf"}).err == "inspect: -hf needs a value\n");
    CHECK(run_program("inspect", {file, "--help"}).code == 0);
    CHECK(run_program("inspect", {"nosuch"}).code == 2); // neither a command nor a file
    Pty shown(QUIRE_BIN "/inspect", {QUIRE_ROOT "/models/quire-14m-q8_0.gguf"});
    CHECK(shown.end() == 0);
    CHECK(shown.all.find("name: quire 14M chat\r\n") != std::string::npos);
}

TEST_CASE("show breaks lines at the words of a narrow terminal", "[inspect]") {
    const std::string file = temporary(); // a short name, since a terminal cuts one that is wider than it is
    std::filesystem::copy_file(QUIRE_ROOT "/models/quire-14m-q8_0.gguf", file,
                               std::filesystem::copy_options::overwrite_existing);
    for (const std::vector<std::string>& words : {std::vector<std::string>{"show", file},
                                                  {"show", "/nonexistent/model.gguf"},
                                                  {"show", "--nonsense-that-is-no-flag-of-any", "file.gguf"}}) {
        Pty shown(QUIRE_BIN "/inspect", words, 40);
        if (shown.child < 0) return;
        shown.end();
        CHECK(shown.all.size() > 60);
        CHECK(wide_line(shown.all, 40).empty());
    }
}

TEST_CASE("generate and logits answer with the reference's tokens", "[inspect]") {
    std::ifstream     file(reference("logits/llama3-gqa/expected.Q8_0.json"));
    const auto        typed = nlohmann::json::parse(file);
    std::ifstream     plain_file(reference("logits/llama3-gqa/expected.json"));
    const auto        plain  = nlohmann::json::parse(plain_file);
    const std::string model  = reference("models/llama3-gqa-Q8_0.gguf");
    const auto&       prompt = plain["prompts"][1];
    std::string       ids;
    for (int id : prompt["tokens"]) ids += (ids.empty() ? "" : ",") + std::to_string(id);
    const auto& expected = typed["prompts"][1];
    const auto  got      = answer({"generate", model, "--ids", ids, "-n", "48", "--ignore-eos", "--kv-type", "f32"});
    const auto  robust   = expected["n_robust"].get<std::size_t>();
    CHECK(got["ids"].size() == 48);
    CHECK(got["logprobs"].size() == 48);
    for (std::size_t i = 0; i < robust; i++) CHECK(got["ids"][i] == expected["greedy"][i]);

    const std::string raw = temporary();
    const auto        logits =
        answer({"logits", model, "--ids", ids, "--top", "5", "--all", "--raw", raw, "--block-size", "3"});
    CHECK(logits["top"].size() == 5);
    CHECK(logits["top1"].size() == prompt["tokens"].size());
    CHECK(logits["logprobs"].size() == prompt["tokens"].size() - 1);
    CHECK(logits["top1"].back() == logits["top"][0]["id"]);
    CHECK(slurp(raw).size() == 4 * plain["n_vocab"].get<std::size_t>());
    std::filesystem::remove(raw);
}

TEST_CASE("text goes to ids and back", "[inspect]") {
    const std::string model = reference("models/llama3-gqa-Q8_0.gguf"), text = "Hello, wörld \xf0\x9f\x99\x82 1234";
    const auto        ids = answer({"tokenize", model}, text);
    REQUIRE(ids["ids"].size() == ids["pieces"].size());
    std::string list;
    for (int id : ids["ids"]) list += (list.empty() ? "" : ",") + std::to_string(id);
    CHECK(answer({"detokenize", model, "--ids", list})["text"] == text);
    const auto with_bos = answer({"tokenize", model, "--bos"}, text);
    CHECK(with_bos["ids"].size() == ids["ids"].size() + 1);
    const Finished lines = run_program("inspect", {"tokenize", model, "--json-lines"}, "\"Hello\"\n\" w\\u00f6rld\"\n");
    REQUIRE(lines.code == 0);
    const std::size_t end = lines.out.find('\n');
    CHECK(nlohmann::json::parse(lines.out.substr(0, end)) == answer({"tokenize", model}, "Hello"));
    CHECK(nlohmann::json::parse(lines.out.substr(end + 1)) == answer({"tokenize", model}, " w\u00f6rld"));
    CHECK(run_program("inspect", {"tokenize", model, "--json-lines"}, "1\n").err ==
          "inspect: line 1 is no JSON string\n");
    const std::string broken("\xff\x00\xc3", 3); // bytes that are no text
    list.clear();
    for (int id : answer({"tokenize", model}, broken)["ids"]) list += (list.empty() ? "" : ",") + std::to_string(id);
    CHECK(answer({"detokenize", model, "--ids", list})["hex"] == "ff00c3");
}

TEST_CASE("wrong usage exits with 2, unusable input with 1", "[inspect]") {
    const std::string model = reference("models/llama3-gqa-Q8_0.gguf");
    for (const std::vector<std::string>& arguments : {std::vector<std::string>{},
                                                      {"nosuch"},
                                                      {"show"},
                                                      {"generate", model},
                                                      {"generate", model, "--ids", "1", "-n", "0"},
                                                      {"logits", model, "--ids", "1", "--kv-type", "f8"},
                                                      {"logits", model, "--ids", "1", "--block-size", "257"},
                                                      {"generate", model, "--ids", "1,x"},
                                                      {"logits", model, "--ids", "1,,2"},
                                                      {"constrain", model, "--regex", "("},
                                                      {"template"},
                                                      {"tool-calls"},
                                                      {"tool-calls", model, "--tool-format", "nosuch"}})
        CHECK(run_program("inspect", arguments).code == 2);
    for (const std::vector<std::string>& arguments : {std::vector<std::string>{"generate", model, "--ids", "1,999999"},
                                                      {"generate", model, "--ids=-1"},
                                                      {"detokenize", model, "--ids", "99999999"}})
        CHECK(run_program("inspect", arguments).code == 1);
    CHECK(run_program("inspect", {"--help"}).code == 0);
}

TEST_CASE("generate --beam answers with all beams, best first", "[inspect]") {
    const auto out = answer({"generate", reference("models/llama3-gqa-F16.gguf"), "--ids", "700,352,210,640,380", "-n",
                             "32", "--beam", "4", "--kv-type", "f32"});
    REQUIRE(out["beams"].size() == 4);
    CHECK(std::abs(out["beams"][0]["logprob"].get<double>() - -9.30445) < 1e-3);
    CHECK(out["beams"][0]["ids"].size() == 32);
    for (std::size_t i = 1; i < 4; i++) CHECK(out["beams"][i]["logprob"] <= out["beams"][i - 1]["logprob"]);
}

TEST_CASE("template renders the file's templates by their names", "[inspect]") {
    quire::GgufWriter w;
    w.set("general.architecture", "llama");
    w.set("tokenizer.chat_template", "plain");
    w.set("tokenizer.chat_template.tool_use", "tools");
    w.set("tokenizer.chat_template.rag", "rag {{ messages[0].content }}");
    const std::string path = temporary();
    REQUIRE(w.write(path));
    const std::string hi = R"({"messages": [{"role": "user", "content": "Hi"}]})";
    CHECK(answer({"template", path}, hi)["text"] == "plain");
    CHECK(answer({"template", path}, R"({"tools": [1]})")["text"] == "tools");
    CHECK(answer({"template", path, "--name", "default"}, R"({"tools": [1]})")["text"] == "plain");
    CHECK(answer({"template", path, "--name", "rag"}, hi)["text"] == "rag Hi");
    CHECK(answer({"template", path, "--name", "rag"}, hi)["input"] == nlohmann::json::parse("[[4, 6]]"));
    const Finished gone = run_program("inspect", {"template", path, "--name", "gone"}, hi);
    CHECK(gone.code == 1);
    CHECK(gone.err == "inspect: " + path + ": there is no chat template 'gone'\n");
    unlink(path.c_str());
}

TEST_CASE("tool-calls reads recorded answers, whole and in deltas", "[inspect]") {
    const std::string model = reference("models/llama3-gqa-Q8_0.gguf");
    const auto        read  = [&](const std::string& line) {
        return answer({"tool-calls", model, "--tool-format", "hermes"}, line);
    };
    const auto said = read(
        R"({"tools": [{"function": {"name": "add"}}], "tokens": [["Hi", " "], ["<tool_call>{\"name\": \"add\","], [" \"arguments\": {\"n\": 1}}</tool_", "call>"]]})");
    const auto call = nlohmann::json::parse(R"({"index": 0, "name": "add", "arguments": "{\"n\":1}"})");
    CHECK(said["whole"] == nlohmann::json{{"content", "Hi"}, {"tool_calls", {call}}});
    CHECK(said["deltas"] ==
          nlohmann::json{
              {{"content", "Hi"}}, nlohmann::json::object(), {{"tool_calls", {call}}}, nlohmann::json::object()});
    const auto ids = answer({"tokenize", model}, "Hello")["ids"];
    CHECK(read(nlohmann::json{{"tokens", {ids}}}.dump())["whole"] == nlohmann::json{{"content", "Hello"}});
    for (const char* line : {"{}", "[]", R"({"tokens": [1]})", R"({"tokens": [[-1]]})", R"({"tokens": [[null]]})",
                             R"({"tokens": [], "tools": [{}]})", R"({"tokens": [], "prompt": 1})"}) {
        INFO(line);
        const Finished wrong = run_program("inspect", {"tool-calls", model, "--tool-format", "hermes"}, line);
        CHECK(wrong.code == 1);
        CHECK(wrong.err.starts_with("inspect: line 1: "));
    }
}
