// The flags of llama.cpp and vLLM that docs/flags.md names: each program takes each of them as the table says. The programs get a model that
// is not there, which they say once the command line is right.
#include <catch2/catch_test_macros.hpp>

#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "process.h"

import quire.core.base;
import quire.core.version;
import quire.tools.common.flag_sources;
import quire.tools.common.foreign_flags;
import quire.tools.flags.likely_name;

using namespace quire::testing;

namespace {

struct Row {
    std::string              section;
    std::vector<std::string> flags; // as typed, with the name of a value
    std::string              here, note;
};

// The texts between backticks. (Another name than std::quoted(), which a call with a std::string would find, too.)
std::vector<std::string> flags_in(const std::string& cell) {
    std::vector<std::string> out;
    for (std::size_t at = cell.find('`'); at != std::string::npos;) {
        const std::size_t end = cell.find('`', at + 1);
        out.push_back(cell.substr(at + 1, end - at - 1));
        at = cell.find('`', end + 1);
    }
    return out;
}

std::vector<Row> rows() {
    std::vector<Row>  out;
    std::stringstream file(slurp(QUIRE_ROOT "/docs/flags.md"));
    std::string       section;
    for (std::string line; std::getline(file, line);) {
        if (line.starts_with("## ")) section = line.substr(3);
        if (!line.starts_with("| `")) continue;
        std::vector<std::string> cells;
        std::stringstream        row(line.substr(1));
        for (std::string cell; std::getline(row, cell, '|');) cells.push_back(cell);
        REQUIRE(cells.size() >= 3);
        out.push_back({section, flags_in(cells[0]), cells[1], cells[2]});
    }
    return out;
}

std::string file_with(const std::string& text) {
    const std::string path = temporary();
    std::ofstream(path) << text;
    return path;
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// The values to try behind a flag; "": none.
std::vector<std::string> values_of(const std::string& name) {
    static const std::map<std::string, std::string> known{
        {"--grammar-file", file_with("root ::= \"a\"\n")},
        {"-jf", file_with("{}")},
        {"-f", file_with("Hello")},
        {"--chat-template-file", file_with("{{ messages[0].content }}")},
        {"--api-key-file", file_with("key")},
        {"--chat-template", "chatml"},
        {"--chat-template-kwargs", "{}"},
        {"--default-chat-template-kwargs", "{}"},
        {"--reasoning-format", "none"},
        {"--reasoning", "off"},
        {"-rea", "on"},
        {"--color", "on"},
        {"-ctk", "f16"},
        {"-ctv", "f16"},
        {"--kv-cache-dtype", "auto"},
        {"--scheduling-policy priority", ""},
        {"--host", "127.0.0.1"},
        {"-dev", "none"},
        {"--samplers", "top_k"},
        {"--rope-scale", "2"},
        {"--rope-freq-scale", "2"},
        {"--dtype", "bfloat16"},
        {"--lora-scaled", "f:0.5"},
        {"--lora-modules", "name=f"},
        {"--quantization", "awq"},
        {"--pipeline-parallel-size", "2"},
        {"--gpu-memory-utilization", "0.5"},
        {"--spec-type", "ngram-simple"},
        {"--speculative-config", R"({"method": "ngram", "num_speculative_tokens": 4})"},
    };
    const auto at = known.find(name);
    return at == known.end() ? std::vector<std::string>{"", "1"} : std::vector<std::string>{at->second};
}

std::vector<std::string> spelled_out(const std::string& name) {
    if (name == "--rope-*") return {"--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale"};
    if (name == "--yarn-*") return {"--yarn-orig-ctx", "--yarn-ext-factor", "--yarn-attn-factor"};
    return {name};
}

const std::string nowhere = "/nonexistent/model.gguf";

bool is_accepted(const std::string& program, const std::string& flag, std::string& said) {
    for (const std::string& value : values_of(flag)) {
        std::vector<std::string> arguments;
        if (flag != "-m" && flag != "--model") arguments = {"-m", nowhere};
        arguments.push_back(flag);
        if (!value.empty()) arguments.push_back(flag == "-m" || flag == "--model" ? nowhere : value);
        if (flag == "-m" && value.empty()) continue;
        const Finished f = run_program(program, arguments);
        said += f.err;
        if (f.code == 1 && has(f.err, nowhere)) return true;
        CHECK(f.code == 2); // wrong usage, and nothing else
    }
    return false;
}

} // namespace

TEST_CASE("the flags of docs/flags.md are taken as it says", "[flags]") {
    const std::vector<Row> table = rows();
    CHECK(table.size() > 80);
    std::size_t n = 0;
    for (const Row& row : table) {
        if (row.section == "Benchmarks") continue;
        for (const std::string& program : {std::string("chat"), std::string("server")}) {
            const std::string other = program == "chat" ? "`server" : "`chat";
            const bool        of_other =
                (program == "chat" && row.section.starts_with("vLLM")) || has(row.here, other) ||
                (has(row.note, other) && !has(row.note, "in `server`") && !has(row.note, "`" + program + "`"));
            if (of_other) continue;
            const bool refused = row.here == " – ", maybe = has(row.here, "field") ||
                                                            has(row.note, "`" + program + "` fields") ||
                                                            (has(row.note, "field") && program == "server");
            for (const std::string& flag : row.flags) {
                if (!flag.starts_with("-")) continue;
                for (const std::string& name : spelled_out(flag.substr(0, flag.find(' ')))) {
                    if (program == "chat" && name == "--grammar") continue;            // it has one of its own
                    if (name == "-hf" || name == "-hff" || name == "-mu") continue;    // without -m: test_hub.cpp
                    if (name == "--models-dir" || name == "--models-preset") continue; // likewise: test_models.cpp
                    if (name == "-cl" || name == "--cache-list") continue;             // needs no model
                    std::string said;
                    const bool  accepted = is_accepted(program, name, said);
                    INFO(program << ' ' << name << ": " << said);
                    CHECK((maybe || accepted == !refused));
                    if (!accepted) CHECK(has(said, name)); // by name
                    if (accepted && (row.here == " always on " || row.here == " not needed "))
                        CHECK(has(said, "ignored: " + name));
                    n++;
                }
            }
        }
    }
    CHECK(n > 150);
}

TEST_CASE("an error of a flag is one sentence with the flag and what it takes", "[flags]") {
    const std::string object = " is not a JSON object, such as {\"enable_thinking\": false}\n";
    for (const auto& [program, words, says] :
         std::vector<std::tuple<std::string, std::vector<std::string>, std::string>>{
             {"chat",
              {"--now", "yesterday"},
              "--now: 'yesterday' is not a date and time, such as 2024-07-26T10:00:00\n"},
             {"server", {"--now", "12:00"}, "--now: '12:00' is not a date and time, such as 2024-07-26T10:00:00\n"},
             {"inspect",
              {"template", nowhere, "--now", "x"},
              "--now: 'x' is not a date and time, such as 2024-07-26T10:00:00\n"},
             {"chat", {"--chat-template-kwargs", "{"}, "--chat-template-kwargs: '{'" + object},
             {"server", {"--default-chat-template-kwargs", "[]"}, "--chat-template-kwargs: '[]'" + object},
             {"chat", {"--spec-draft-n-max", "-1"}, "--spec-draft-n-max: '-1' is not a number that is 0 or more\n"},
             {"server", {"--draft-max", "x"}, "--spec-draft-n-max: 'x' is not a number that is 0 or more\n"},
             {"server",
              {"--spec-type", "draft-mtp,ngram-mod"},
              "--spec-type: quire guesses tokens in one way at a time, by n-grams, a draft model, a draft of EAGLE-3 "
              "or the model's MTP layer: --spec ngram, draft, eagle3 or mtp\n"},
             {"bench", {"speculate", "-k", "20"}, "--spec-draft-n-max: '20' is not a number that is in 1..15\n"},
             {"chat", {"--threads", "1.5"}, "--threads: '1.5' is no whole number that this flag takes\n"},
             {"bench", {"model", "--tflops", "x"}, "--tflops: 'x' is not a number\n"},
             {"bench", {"serve", "--timeout", "-1"}, "--timeout: '-1' is not a number that is 0 or more\n"},
             {"bench", {"serve", "--request-rate", "0"}, "--request-rate: '0' is not a number that is above 0\n"},
             {"quantize", {"a", "b", "Q8_0", "-t", "5000"}, "--threads: '5000' is not a number that is in 0..1024\n"},
             {"block-viz", {"--beam", "-1"}, "--beam: '-1' is not a number that is in 0..1024\n"}}) {
        const Finished f = run_program(program, words);
        CHECK(f.code == 2);
        CHECK((program == "server" ? f.err.ends_with("Z error server: " + says) : f.err == program + ": " + says));
    }
}

TEST_CASE("--help writes all ranges alike", "[flags]") {
    std::vector<std::vector<std::string>> all{{"chat"}, {"server"}, {"quantize"}, {"block-viz"}};
    for (const char* one :
         {"show", "tokenize", "detokenize", "logits", "generate", "template", "tool-calls", "constrain"})
        all.push_back({"inspect", one});
    for (const char* one : {"blocks", "windows", "model", "batched", "compare", "throughput", "kernel", "make-model",
                            "quality", "speculate", "serve", "replicas", "chats", "paper"})
        all.push_back({"bench", one});
    for (std::vector<std::string> words : all) {
        const std::string program = words[0];
        words.erase(words.begin());
        words.emplace_back("--help");
        const Finished f = run_program(program, words);
        INFO(f.out);
        CHECK(f.code == 0);
        CHECK(!has(f.out, " in [")); // CLI11's own
        CHECK(!has(f.out, "POSITIVE"));
    }
}

TEST_CASE("flags come from the environment and from a file; what is typed counts", "[flags]") {
    const auto run = [](const std::string& file, std::vector<std::string> typed,
                        const std::vector<std::pair<const char*, const char*>>& variables) {
        for (const auto& [name, value] : variables) setenv(name, value, 1);
        if (!file.empty()) typed.insert(typed.end(), {"--config", file_with(file)});
        const Finished f = run_program("server", typed);
        for (const auto& [name, value] : variables) unsetenv(name);
        return f;
    };
    const std::string a = "/nonexistent/a.gguf", b = "/nonexistent/b.gguf";
    CHECK(has(run("model = " + a + "\n", {}, {}).err, a));
    CHECK(has(run("", {}, {{"QUIRE_MODEL", a.c_str()}}).err, a));
    CHECK(has(run("", {}, {{"LLAMA_ARG_MODEL", a.c_str()}}).err, a));
    CHECK(has(run("-m " + a, {}, {{"QUIRE_MODEL", b.c_str()}}).err, b));
    CHECK(has(run("m: \"" + a + "\"", {"-m", b}, {{"QUIRE_MODEL", a.c_str()}}).err, b));
    const Finished many = run("# a comment\n; another\n\n  model=" + a +
                                  "\nparallel 3\nno-pages\nlog-json = off\nn-gpu-layers = 99\nseed = -1\n",
                              {}, {{"LLAMA_ARG_N_PARALLEL", "2"}, {"LLAMA_ARG_JINJA", "1"}, {"QUIRE_NOTHING", "x"}});
    INFO(many.err);
    CHECK(many.code == 1);
    CHECK(has(many.err, a));
    CHECK(has(many.err, "ignored: --n-gpu-layers, --jinja\n"));
    for (const auto& [file, says] : {std::pair("colour = red", "line 1: there is no flag '--colour'"),
                                     {"\nport =", "line 2: --port needs a value"},
                                     {"config = x", "line 1: --config cannot stand in a file"},
                                     {"no-pages = perhaps", "line 1: --no-pages takes no value but 1, true, on, yes"},
                                     {"m = x\nport = 99999", "line 2: --port: '99999' is not a number"},
                                     {"mmproj = x", "line 1: --mmproj"}}) {
        const Finished f = run(file, {}, {});
        INFO(f.err);
        CHECK(f.code == 2);
        CHECK(has(f.err, says));
    }
    CHECK(run("", {"--config", "/nonexistent/file"}, {}).code == 2);
    // An error names the variable that gave the value, also where a typed value would count.
    for (
        const auto& [name, value, says] :
        {std::tuple("QUIRE_PORT", "x", "Z error server: QUIRE_PORT: --port: 'x' is not a number that is in 0..65535\n"),
         {"LLAMA_ARG_CTX_SIZE", "-4", "Z error server: LLAMA_ARG_CTX_SIZE: --ctx-size: '-4' is not a number"},
         {"QUIRE_NO_LOG", "maybe",
          "Z error server: QUIRE_NO_LOG: --no-log takes no value but 1, true, on, yes or 0, false, off, no; 'maybe' is "
          "none\n"}}) {
        const Finished f = run("", {"-m", a, "--port", "8080"}, {{name, value}});
        INFO(f.err);
        CHECK(f.code == 2);
        CHECK(has(f.err, says));
    }
    CHECK(has(run("", {"-m", a, "--port", "y"}, {{"QUIRE_PORT", "1"}}).err, "Z error server: --port: 'y'"));
    CHECK(has(run("", {}, {{"QUIRE_NO_LOG", "No"}, {"QUIRE_MODEL", a.c_str()}}).err, a));
    // The file may be named by a variable, too.
    const std::string named = file_with("model = " + a + "\n"), other = file_with("model = " + b + "\n");
    CHECK(has(run("", {}, {{"QUIRE_CONFIG", named.c_str()}}).err, a));
    CHECK(has(run("", {"--config", other}, {{"QUIRE_CONFIG", named.c_str()}}).err, b));
    CHECK(has(run("", {}, {{"QUIRE_CONFIG", "/nonexistent/file"}}).err,
              "Z error server: QUIRE_CONFIG: cannot read '/nonexistent/file'"));
}

TEST_CASE("an empty value is a value, not the word behind it", "[flags]") {
    const auto run = [](const char* name, const std::string& program, std::vector<std::string> typed) {
        setenv(name, "", 1);
        const Finished f = run_program(program, std::move(typed));
        unsetenv(name);
        return f.err;
    };
    const std::string none = "/nonexistent/a.gguf";
    CHECK(has(run("LLAMA_API_KEY", "server", {"--no-pages", "-m", none}), "--api-key is empty"));
    CHECK(has(run("QUIRE_PREDICT", "chat", {"-st", "-p", "x", "-m", none}),
              "QUIRE_PREDICT: --predict: '' is not a number"));
    CHECK(has(run_program("server", {"--api-key=", "--no-pages", "-m", none}).err, "--api-key is empty"));
    CHECK(has(run_program("chat", {"--ctx-size=", "-st", "-m", none}).err, "--ctx-size: '' is not a number"));
}

TEST_CASE("a flag without a value is refused, not off", "[flags]") {
    const std::string model = QUIRE_ROOT "/models/quire-14m-q8_0.gguf";
    for (const std::string flag : {"--kv-key", "--api-key-file", "--tls-cert", "--tls-key", "--unix", "--log-file",
                                   "--now", "--chat-template-file", "--chat-template-kwargs", "--models-dir"}) {
        const Finished f = run_program("server", {"-m", nowhere, flag, ""});
        CHECK(f.code == 2);
        CHECK(f.err.ends_with("Z error server: " + flag + " needs a value\n"));
    }
    for (const std::string flag : {"--kv-key", "--regex", "--schema", "--grammar", "--chat-template-file", "--now",
                                   "--chat-template-kwargs", "--model", "--hf-repo"}) {
        const Finished f = run_program("chat", {flag + "=", "-st", "-p", "x"});
        CHECK(f.code == 2);
        CHECK(f.err == "chat: " + flag + " needs a value\n");
    }
    const Finished text = run_program("inspect", {"constrain", model, "--regex", ""});
    CHECK(text.code == 2);
    CHECK(text.err == "inspect: --regex needs a value\n");
    // An empty text says something, or nothing is what it stands for.
    for (const std::string flag : {"-p", "-sys", "--chat-template", "--hf-token"}) {
        const Finished f = run_program("chat", {"-m", nowhere, "-st", flag, ""});
        CAPTURE(flag, f.err);
        CHECK(f.code == 1);
    }
    // An empty variable is one that is not set, also beside a file.
    for (const char* name : {"QUIRE_KV_KEY", "LLAMA_ARG_SSL_CERT_FILE", "QUIRE_ALIAS"}) {
        setenv(name, "", 1);
        const Finished f = run_program("server", {"-m", nowhere});
        unsetenv(name);
        CAPTURE(name, f.err);
        CHECK(f.code == 1);
    }
    setenv("QUIRE_MODELS_DIR", "", 1);
    CHECK(has(run_program("server", {"--config", file_with("models-dir = /nonexistent/d")}).err, "/nonexistent/d"));
    unsetenv("QUIRE_MODELS_DIR");
}

TEST_CASE("off switches off what is on by default", "[flags]") {
    const auto words = [](const std::string& line) {
        std::vector<std::string> given;
        const quire::OwnFlag     own{[](const std::string& name) -> std::optional<bool> {
            constexpr std::string_view flags[] = {"--slots", "--no-slots", "--no-pages", "--no-prefix-cache", "--trim"};
            return std::ranges::find(flags, name) != std::end(flags) ? std::optional(false) : std::nullopt;
        }};
        CHECK(quire::add_words_of_line(line, "", quire::Program::server, own, given).has_value());
        return given;
    };
    using Words = std::vector<std::string>;
    CHECK(words("slots = off") == Words{"--no-slots"});
    CHECK(words("slots = on") == Words{"--slots"});
    CHECK(words("no-slots = 0").empty());
    CHECK(words("webui = false") == Words{"--no-webui"}); // renamed later
    CHECK(words("cache-prompt = no") == Words{"--no-cache-prompt"});
    CHECK(words("trim = no").empty());               // off already
    CHECK(words("ngl = 99") == Words{"-ngl", "99"}); // llama.cpp's short names
}

TEST_CASE("a typed model takes the place of one in a variable, a typed flag that of its opposite", "[flags]") {
    const std::string a = "/nonexistent/a.gguf", b = "/nonexistent/b.gguf";
    setenv("LLAMA_ARG_MODEL", a.c_str(), 1);
    setenv("QUIRE_PROMPT", "x", 1);
    setenv("QUIRE_NO_SHOW_TIMINGS", "1", 1);
    for (const std::vector<std::string>& typed : {std::vector<std::string>{b, "-st", "-f", QUIRE_ROOT "/README.md"},
                                                  {"-st", "--show-timings", "-m", b},
                                                  {"-st", "-hf", "user/none", "--offline"}}) {
        const Finished f = run_program("chat", typed);
        INFO(f.err);
        CHECK(f.code == 1);
        CHECK(has(f.err, typed[0] == "-st" && typed[1] == "-hf" ? "none" : "b.gguf"));
        CHECK(!has(f.err, "exclude"));
    }
    for (const char* name : {"LLAMA_ARG_MODEL", "QUIRE_PROMPT", "QUIRE_NO_SHOW_TIMINGS"}) unsetenv(name);
}

TEST_CASE("the flags that mean the opposite of the default do what they say", "[flags]") {
    for (const char* flag : {"--log-disable", "--disable-log-requests", "--async-scheduling"})
        CHECK_FALSE(has(run_program("server", {"-m", nowhere, flag}).err, "ignored"));
    CHECK_FALSE(has(run_program("chat", {"-m", nowhere, "--no-perf"}).err, "ignored"));
}

TEST_CASE("a flag that a program has itself is not taken for another program's", "[flags]") {
    const auto translated = [](quire::Program program, const std::vector<std::string>& words) {
        const quire::OwnFlag own{[&](const std::string& name) {
            const bool is_own =
                name == "--device" || (program == quire::Program::server && name == "--reasoning-format");
            return is_own ? std::optional(true) : std::nullopt;
        }};
        const auto           flags = quire::translate_flags(program, words, own);
        REQUIRE(flags.has_value());
        return *flags;
    };
    using Words = std::vector<std::string>;
    for (const char* form : {"none", "auto", "deepseek"}) {
        const Words typed{"--reasoning-format", form};
        CHECK(translated(quire::Program::server, typed).words == typed);
        CHECK(translated(quire::Program::server, typed).note.empty());
        CHECK(translated(quire::Program::server, {quire::cat(typed[0], "=", form)}).note.empty());
        CHECK(translated(quire::Program::chat, typed).words.empty());
        CHECK(has(translated(quire::Program::chat, typed).note, typed[0]));
    }
    CHECK(translated(quire::Program::chat, {"-dev", "cpu"}).words == Words{"--device", "cpu"});
    CHECK(translated(quire::Program::chat, {"-dev", "none"}).words == Words{"--device", "cpu"});
    CHECK(translated(quire::Program::chat, {"-dev", "CUDA0"}).words.empty());
}

TEST_CASE("every program says its version", "[flags]") {
    for (const char* program : {"chat", "server", "inspect", "bench", "quantize", "block-viz"}) {
        const Finished f = run_program(program, {"--version"});
        CAPTURE(program, f.err);
        CHECK(f.code == 0);
        CHECK(f.out == quire::cat("quire ", quire::quire_version, "\n"));
    }
}

TEST_CASE("block-viz without a model says where it looks for one", "[flags]") {
    const std::filesystem::path alone = temporary();
    std::filesystem::remove(alone);
    std::filesystem::create_directories(alone);
    std::filesystem::copy_file(QUIRE_BIN "/block-viz", alone / "block-viz");
    const Finished f = run_program("block-viz", {"--demo"}, "", alone.string());
    CHECK(f.code == 1);
    CHECK(f.err == quire::cat("block-viz: no model: name one with -m FILE.gguf or put quire-14m-q8_0.gguf into ",
                              (alone / "models").string(), "\n"));
    std::filesystem::remove_all(alone);
}

TEST_CASE("numbers of draft tokens as llama.cpp and vLLM write them", "[flags]") {
    const auto run = [](std::vector<std::string> words) {
        words.insert(words.begin(), {"-m", QUIRE_ROOT "/models/quire-14m-q8_0.gguf", "--device", "cpu", "--tune", "off",
                                     "-p", "Once", "-st", "-n", "1", "--temp", "0"});
        return run_program("chat", words);
    };
    const auto config = [&](const std::string& more) {
        return run({"--speculative-config", R"({"method": "ngram", "num_speculative_tokens": )" + more + "}"});
    };
    const std::string note = ": a step checks at most 15 guessed tokens of a sequence; so many are taken\n";
    for (const std::string flag : {"--spec-draft-n-max", "--draft-max", "--draft"}) {
        const Finished f = run({flag, "16"});
        CHECK(f.code == 0);
        CHECK(has(f.err, "chat: --spec-draft-n-max" + note));
        CHECK_FALSE(has(run({flag, "15"}).err, note));
    }
    CHECK(run({"--spec-draft-n-max", "x"}).code == 2);
    for (const std::string flag : {"--spec-draft-n-max", "--draft-max", "--draft"}) // 0: the file is not opened
        CHECK(run({"-md", "/none.gguf", flag, "0"}).code == 0);
    for (const std::string flag : {"--spec-draft-n-min", "--draft-min"})
        CHECK(run({"--spec", "ngram", flag, "0"}).code == 0);
    const Finished high = run({"--spec", "ngram", "--draft-max", "64", "--draft-min", "48"});
    CHECK(high.code == 0);
    CHECK(has(high.err, "chat: --spec-draft-n-min" + note));
    for (const std::string flag : {"-td", "--spec-draft-device", "--draft-p-split", "--spec-ngram-mod-n-match",
                                   "--spec-ngram-size-n", "-ncmoed"}) {
        const Finished f = run({"--spec", "ngram", flag, "2"});
        CAPTURE(flag, f.err);
        CHECK(f.code == 0);
        CHECK(has(f.err, "not needed here, and ignored: " + flag));
    }
    CHECK(run({"--spec-synth-len", "2"}).code == 2);
    CHECK(run({"-md", "/none.gguf", "--spec", "none"}).code == 0);
    for (const std::vector<std::string>& unread :
         {std::vector<std::string>{"--spec", "ngram", "-md", "/none.gguf"}, {"--spec-default", "-md", "/none.gguf"}}) {
        const Finished f = run(unread);
        CHECK(f.code == 1);
        CHECK(has(f.err, "chat: --spec-draft-model needs --spec draft or eagle3"));
    }
    CHECK(has(config("16").err, "chat: num_speculative_tokens of --speculative-config" + note));
    CHECK(config("16").code == 0);
    for (const char* more :
         {R"(4, "prompt_lookup_max": 1)", R"(4, "prompt_lookup_min": 5)", R"(4, "draft_tensor_parallel_size": 1)",
          R"(4, "model": "[ngram]")", R"(4, "prompt_lookup_max": 5, "prompt_lookup_min": 2)"}) {
        const Finished f = config(more);
        CAPTURE(more, f.err);
        CHECK(f.code == 0);
    }
    CHECK(has(config(R"(4, "draft_tensor_parallel_size": 2)").err, "draft_tensor_parallel_size"));
    CHECK(config(R"(4, "prompt_lookup_max": 2, "prompt_lookup_min": 5)").code != 0);
    CHECK(has(config(R"(4, "model": "/none.gguf")").err,
              R"(only the methods "draft_model" and "eagle3" have a "model")"));
    // One token, as the model in question has one MTP layer.
    const Finished mtp =
        run({"-m", QUIRE_ROOT "/tests/data/mtp/tiny-mtp-F16.gguf", "--speculative-config", R"({"method": "mtp"})"});
    CAPTURE(mtp.err);
    CHECK(mtp.code == 0);
    CHECK(run({"--kv-cache-dtype", "int8_per_token_head"}).code == 0);
}

TEST_CASE("a number of bytes has a unit, a bound and no sign", "[flags]") {
    CHECK(has(run_program("server", {"--models-memory", "-1"}).err, "--models-memory: '-1' is"));
    CHECK(has(run_program("server", {"--response-store", "8Q"}).err, "--response-store: '8Q' is"));
    CHECK(has(run_program("server", {"--kv-disk-bytes", "0"}).err, "--kv-disk-bytes: '0' is"));
    for (const std::string bytes : {"0", "65536", "64k", "8G", "1.5GiB", "512MB", "1P"})
        CHECK(run_program("server", {"--kv-host-bytes", bytes, "-m", nowhere}).code == 1);
    for (const std::string flag : {"--max-body", "--max-buffered", "--max-working", "--max-header-bytes"}) {
        for (const std::string bytes : {"65536", "64k", "1.5MiB"})
            CHECK(run_program("server", {flag, bytes, "-m", nowhere}).code == 1);
        CHECK(has(run_program("server", {flag, "2T"}).err, flag + ": '2T' is not a number of bytes from "));
    }
    CHECK(has(run_program("server", {"--max-header-bytes", "17M"}).err, "from 64 to 16M, such as"));
}

TEST_CASE("wrong usage of any program is one sentence with the wrong word in it", "[flags]") {
    for (const auto& [program, words, word] :
         std::vector<std::tuple<std::string, std::vector<std::string>, std::string>>{
             {"bench", {"--nonsense"}, "--nonsense"},
             {"bench", {"nonsense"}, "nonsense"},
             {"bench", {}, "--help"},
             {"bench", {"make-model", "--nonsense"}, "--nonsense"},
             {"inspect", {"nonsense"}, "nonsense"},
             {"inspect", {"show"}, "show takes a MODEL"},
             {"bench", {"nonsense"}, "there is no command 'nonsense'; --help lists them"},
             {"bench", {"make-model", "one"}, "'one' is one word too many; the usage is bench make-model [OPTIONS]"},
             {"chat", {"one", "two"}, "'two' is one word too many; the usage is chat [OPTIONS] [FILE]"},
             {"server", {"one", "two"}, "'two' is one word too many; the usage is server [OPTIONS] [FILE]"},
             {"inspect", {"show", "a", "b"}, "'b' is one word too many; the usage is inspect show [OPTIONS] ["},
             {"quantize",
              {"a", "b", "q8_0", "c"},
              "'c' is one word too many; the usage is quantize [OPTIONS] IN OUT TYPE"},
             {"quantize", {"--nonsense"}, "there is no flag --nonsense; --help lists them"},
             {"quantize", {"-hf", "user/model"}, "there is no flag -hf; --help lists them"},
             {"quantize", {"in", "out", "q8_0", "-th"}, "there is no flag -th"},
             {"block-viz", {"-hf", "user/model"}, "there is no flag -hf; --help lists them"},
             {"block-viz", {"-ph"}, "there is no flag -ph"},
             {"block-viz", {"-p", "-hf", "-hg"}, "there is no flag -hg"}, // -hf is what the prompt says
             {"quantize", {"in.gguf", "out.gguf"}, "TYPE"},
             {"block-viz", {"--nonsense"}, "--nonsense"},
             {"block-viz", {}, "--trace"},
             {"server", {"--speculative-config", "{}"}, "server: --speculative-config: it names no method"}}) {
        const Finished f = run_program(program, words);
        CAPTURE(program, f.err);
        CHECK(f.code == 2);
        CHECK((program == "server" ? has(f.err, "Z error server: ") : f.err.starts_with(program + ": ")));
        CHECK(has(f.err, word));
        CHECK(std::ranges::count(f.err, '\n') == 1);
    }
}

TEST_CASE("of a mistyped flag or command is said what was probably meant", "[flags]") {
    for (const auto& [program, words, meant] :
         std::vector<std::tuple<std::string, std::vector<std::string>, std::string>>{
             {"chat", {"--temprature", "0.5"}, "--temp"}, // of llama.cpp's --temperature
             {"server", {"--temprature=0.5"}, "--temp"},
             {"chat", {"-temp", "0.5"}, "--temp"},
             {"server", {"--ctx_size", "512"}, "--ctx-size"},
             {"server", {"--prot", "8080"}, "--port"},
             {"server", {"--n-gpu-layer", "9"}, "--n-gpu-layers"}, // not needed, but no error
             {"bench", {"modle"}, "model"},
             {"bench", {"model", "--n-promt", "9"}, "--n-prompt"},
             {"bench", {"serve", "--base-ulr", "x"}, "--base-url"},
             {"bench", {"compare", "--llama-bnech=x"}, "--llama-bench"},
             {"inspect", {"tokenise"}, "tokenize"},
             {"inspect", {"show", "f.gguf", "--jsno"}, "--json"},
             {"inspect", {"constrain", "f.gguf", "--regx", "a"}, "--regex"},
             {"quantize", {"in", "out", "Q8_0", "--imatrx", "f"}, "--imatrix"},
             {"block-viz", {"--kv-block", "9"}, "--kv-blocks"}}) {
        const Finished f = run_program(program, words);
        CAPTURE(program, words, f.err);
        CHECK(f.code == 2);
        CHECK(f.err.ends_with("; did you mean " + meant + "?\n"));
        CHECK(std::ranges::count(f.err, '\n') == 1);
    }
    for (const std::string program : {"chat", "server", "bench", "inspect", "quantize", "block-viz"}) {
        CHECK_FALSE(has(run_program(program, {"--nonsense"}).err, "did you mean"));
        CHECK_FALSE(has(run_program(program, {"--x"}).err, "did you mean"));
    }
    CHECK(has(run_program("server", {"--config", file_with("ctx-szie = 9")}).err,
              "line 1: there is no flag '--ctx-szie'; did you mean --ctx-size?\n"));
}

TEST_CASE("the likely name is the nearest one", "[flags]") {
    using quire::KnownName;
    const std::vector<KnownName> known{
        {"--port", "--port"}, {"--top-k", "--top-k"}, {"--top-p", "--top-p"}, {"--temperature", "--temp"}};
    const auto likely = [&](std::string_view typed) { return quire::likely_name(typed, known); };
    CHECK(likely("--prot") == "--port"); // two letters in the wrong order are one fault
    CHECK(likely("--TOP_P") == "--top-p");
    CHECK(likely("--top") == "");   // two letters of three
    CHECK(likely("--tpo-x") == ""); // two faults in five letters
    CHECK(likely("--temprature") == "--temp");
    CHECK(likely("--tmperatrue") == "--temp");
    CHECK(likely("--nonsense") == "");
    CHECK(likely("--") == "");
    CHECK(likely("--" + std::string(1000, 't')) == "");
    CHECK(quire::likely_name("--port", {}) == "");
}

TEST_CASE("a variable QUIRE_... that names no flag is said, one of other programs is not", "[flags]") {
    const auto said = [](const std::string& program, const std::vector<std::string>& variables) {
        for (const std::string& name : variables) setenv(name.c_str(), "off", 1);
        const Finished f = run_program(program, {"-m", nowhere});
        for (const std::string& name : variables) unsetenv(name.c_str());
        INFO(f.err);
        CHECK(f.code == 1);
        CHECK(has(f.err, nowhere));
        CHECK(has(f.err, "there is no flag for ") ==
              has(f.err, program == "server" ? "Z warning server: there" : "chat: warning: there")); // or neither
        const std::size_t at = f.err.find("there is no flag for ");
        return at == std::string::npos ? std::string() : f.err.substr(at, f.err.find('\n', at) - at);
    };
    const std::string end = " in the environment", begin = "there is no flag for ";
    for (const std::string program : {"chat", "server"}) {
        CHECK(said(program, {}) == "");
        CHECK(said(program, {"LLAMA_ARG_NONSENSE", "LLAMA_ARG_CTX_SZIE", "QUIRES"}) == "");
        CHECK(said(program, {"QUIRE_CTX_SZIE"}) == begin + "QUIRE_CTX_SZIE (did you mean QUIRE_CTX_SIZE?)" + end);
    }
    CHECK(said("server", {"QUIRE_PROT", "QUIRE_NOTHING"}) ==
          begin + "QUIRE_NOTHING, QUIRE_PROT (did you mean QUIRE_PORT?)" + end);
    CHECK(said("chat", {"QUIRE_NOTHING"}) == ""); // it may be the server's
    // The sentence is a line of the log.
    setenv("QUIRE_PROT", "1", 1);
    const Finished json = run_program("server", {"-m", nowhere, "--log-json"});
    unsetenv("QUIRE_PROT");
    CHECK(has(json.err, R"("level":"warning","message":"there is no flag for QUIRE_PROT)"));
    // No flag of the one program is an unknown variable of the other one.
    const auto variables_of = [](const std::string& program) {
        std::vector<std::string> names;
        std::stringstream        help(run_program(program, {"--help"}).out);
        for (std::string line; std::getline(help, line);) {
            const std::size_t first = line.find_first_not_of(' ');
            if (first == std::string::npos || first == 0 || line[first] != '-') continue;
            std::stringstream flags(line.substr(first, line.find(' ', first) - first));
            for (std::string flag; std::getline(flags, flag, ',');) {
                if (!flag.starts_with("--") || flag == "--help" || flag == "--version" || flag == "--config") continue;
                std::string name = "QUIRE_";
                for (const char c : flag.substr(2, flag.find_first_of("{=") - 2))
                    name += c == '-' ? '_' : char(std::toupper(c));
                names.push_back(name);
            }
        }
        return names;
    };
    const std::vector<std::string> of_chat = variables_of("chat"), of_server = variables_of("server");
    CHECK(of_chat.size() > 40);
    const auto unknown = [](const std::string& program, const std::vector<std::string>& all,
                            const std::vector<std::string>& own) {
        std::string found;
        for (const std::string& name : all) {
            if (std::ranges::find(own, name) != own.end()) continue;
            setenv(name.c_str(), "off", 1);
            const Finished f = run_program(program, {"-m", nowhere});
            unsetenv(name.c_str());
            if (has(f.err, "there is no flag")) found += name + ' ';
        }
        return found;
    };
    CHECK(unknown("server", of_chat, of_server) == "");
    CHECK(unknown("chat", of_server, of_chat) == "");
}

TEST_CASE("bench takes the file of a model without -m", "[flags]") {
    const std::string model = QUIRE_ROOT "/models/quire-14m-q8_0.gguf";
    for (const std::vector<std::string>& words :
         {std::vector<std::string>{"model", model, "-p", "4", "-n", "2", "-r", "1"},
          {"model", "-r", "1", "-n", "2", "-p", "4,8", model}, // a list is one word
          {"batched", "--npp", "4", "--ntg", "2", "--npl", "1,2", model}}) {
        const Finished f = run_program("bench", words);
        CAPTURE(words, f.err);
        CHECK(f.code == 0);
        CHECK(has(f.out, words[0] == "model" ? "quire-14m-q8_0.gguf" : "|"));
    }
    for (const std::string command : {"model", "batched", "throughput", "quality"}) {
        CHECK(run_program("bench", {command, nowhere}).err ==
              "bench: there is no file '" + nowhere + "'; -hf USER/MODEL fetches a model\n");
        CHECK(has(run_program("bench", {command}).err, "name a model with -m FILE"));
        CHECK(run_program("bench", {command, model, "-m", model}).code == 2);
    }
    CHECK(has(run_program("bench", {"speculate", nowhere}).err, nowhere));
}

TEST_CASE("a key that every user can read is said, and taken", "[flags]") {
    const std::string model = QUIRE_ROOT "/models/quire-14m-q8_0.gguf", folder = temporary() + "-kv",
                      key = file_with(std::string(40, 'k'));
    const auto said       = [&](mode_t mode) {
        REQUIRE(chmod(key.c_str(), mode) == 0);
        const Finished f = run_program("chat", {"-m", model, "--device", "cpu", "--kv-dir", folder, "--kv-key", key,
                                                "-st", "-p", "Hello", "-n", "2"});
        CHECK(f.code == 0);
        return f.err;
    };
    const std::string open = "chat: warning: every user of this machine can read the key " + key;
    CHECK(has(said(0644), open));
    CHECK_FALSE(has(said(0640), open)); // as secrets with an fsGroup
    CHECK_FALSE(has(said(0400), open));
    std::filesystem::remove_all(folder);
}

TEST_CASE("a file that cannot be read is named with the reason", "[flags]") {
    const std::string model = QUIRE_ROOT "/models/quire-14m-q8_0.gguf";
    for (const std::string flag : {"--schema", "-f", "--config", "--chat-template-file"}) {
        CHECK(has(run_program("chat", {"-m", model, flag, "/none"}).err, "chat: cannot read '/none': no such file\n"));
        CHECK(has(run_program("chat", {"-m", model, flag, "/"}).err, "chat: cannot read '/': it is a directory\n"));
    }
    CHECK(has(run_program("server", {"--config", "/dev/zero"}).err, "'/dev/zero': it is no regular file\n"));
    CHECK(has(run_program("server", {"--config", "/dev/null", "-m", nowhere}).err, nowhere));
    CHECK(
        has(run_program("chat", {"-m", model, "--grammar", "/dev/zero"}).err, "'/dev/zero': it is no regular file\n"));
    // A pipe is read to its end, as from a shell's <(...).
    const std::string pipe = temporary() + ".pipe";
    REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
    std::thread writes([&] { std::ofstream(pipe) << "port = none\n"; });
    CHECK(has(run_program("server", {"--config", pipe}).err, "line 1: --port: 'none' is not a number"));
    writes.join();
    unlink(pipe.c_str());
}

TEST_CASE("flags of the KV files that can mean nothing are refused by name", "[flags]") {
    const std::string model = QUIRE_ROOT "/models/quire-14m-q8_0.gguf", folder = temporary() + "-kv";
    const Finished    none = run_program("server", {"-m", model, "--kv-dir", ""});
    CHECK(none.code == 2);
    CHECK(has(none.err, "--kv-dir: a directory is missing"));
    const Finished key =
        run_program("server", {"-m", model, "--device", "cpu", "--kv-dir", folder, "--kv-key", "/tmp"});
    CHECK(key.code == 1);
    CHECK(has(key.err, "the key /tmp is a directory: it has to be a file\n"));
    const Finished endless =
        run_program("server", {"-m", model, "--device", "cpu", "--kv-dir", folder, "--kv-key", "/dev/zero"});
    CHECK(endless.code == 1);
    CHECK(has(endless.err, "the key /dev/zero is a device: it has to be a file\n"));
    const Finished large =
        run_program("server", {"-m", model, "--device", "cpu", "--kv-dir", folder, "--kv-key", model});
    CHECK(large.code == 1);
    CHECK(has(large.err, " has more than 64 KiB"));
    const Finished file = run_program("chat", {"-m", model, "--device", "cpu", "--kv-dir", model, "-st", "-p", "x"});
    CHECK(file.code == 1);
    CHECK(has(file.err, model + " is no directory\n"));
    const Finished small =
        run_program("server", {"-m", model, "--device", "cpu", "--kv-dir", folder, "--kv-disk-bytes", "1000"});
    CHECK(small.code == 1);
    CHECK(has(small.err, "--kv-disk-bytes 1000 is too little for " + folder + ": one block of K and V has "));
    std::filesystem::remove_all(folder);
}
