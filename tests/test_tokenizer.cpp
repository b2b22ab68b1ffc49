// Tokenizers against vectors on which llama.cpp and the vocabulary's own library (HF tokenizers, sentencepiece) agree.
#include <catch2/catch_test_macros.hpp>

#include <nlohmann/json.hpp>

#include "process.h"
#include "reference.h"

import quire.core.base;
import quire.model_file.gguf;
import quire.model_file.gguf_writer;
import quire.text.pretokenizer;
import quire.core.std;
import quire.text.tokenizer;
import quire.core.unicode;

using namespace quire;
using namespace quire::testing;

namespace {

constexpr const char* all_names[] = {"llama-spm", "phi-3",  "llama-bpe", "gpt-2",
                                     "qwen2",     "falcon", "starcoder", "deepseek-coder"};

// The others have no token for some bytes that UTF-8 never contains: those are lost, as in their own libraries.
bool has_all_bytes(std::string_view name) {
    return name != "falcon" && name != "starcoder" && name != "deepseek-coder";
}

// A vocabulary by name, unpacked where it is compressed; nothing where only a part of the reference data is there.
std::optional<Tokenizer> vocabulary(const std::string& name) {
    const std::string folder = reference("tokenizers");
    std::string       path   = folder + "/ggml-vocab-" + name + ".gguf";
    std::string       unpacked;
    if (!std::filesystem::exists(path)) {
        if (!std::filesystem::exists(path + ".gz")) return {};
        unpacked = temporary();
        REQUIRE(std::system(("gzip -dc '" + path + ".gz' > " + unpacked).c_str()) == 0);
        path = unpacked;
    }
    std::optional<Tokenizer> result;
    {
        Result<Gguf> file = Gguf::open(path);
        REQUIRE(file);
        Result<Tokenizer> tokenizer = Tokenizer::load(*file);
        INFO((tokenizer ? "" : tokenizer.error().message));
        REQUIRE(tokenizer);
        result = std::move(*tokenizer);
    }
    if (!unpacked.empty()) std::filesystem::remove(unpacked);
    return result;
}

std::string from_hex(const std::string& hex) {
    std::string out;
    for (std::size_t i = 0; i + 1 < hex.size(); i += 2) out += char(std::stoi(hex.substr(i, 2), nullptr, 16));
    return out;
}

nlohmann::json read_json(const std::string& path) {
    std::ifstream file(path);
    return nlohmann::json::parse(file);
}

std::vector<std::string> split(const std::string& text, const std::string& mark) {
    std::vector<std::string> parts;
    std::size_t              at = 0;
    for (std::size_t end; (end = text.find(mark, at)) != std::string::npos; at = end + mark.size())
        parts.push_back(text.substr(at, end - at));
    parts.push_back(text.substr(at));
    return parts;
}

constexpr EncodeOptions plain{.add_special = false, .parse_special = false};
constexpr EncodeOptions parsed{.add_special = false, .parse_special = true};

} // namespace

TEST_CASE("every vector encodes and decodes exactly", "[tokenizer]") {
    int n_vocabularies = 0;
    for (const std::string name : all_names) {
        auto t = vocabulary(name);
        if (!t) continue;
        n_vocabularies++;
        CAPTURE(name);
        const std::string base    = reference("tokenizers") + "/ggml-vocab-" + name + ".gguf";
        const auto        texts   = split(slurp(base + ".inp"), "\n__ggml_vocab_test__\n");
        const auto        answers = split(slurp(base + ".out"), "\n");
        REQUIRE(answers.size() >= texts.size());
        for (std::size_t i = 0; i < texts.size(); i++) {
            std::vector<Token> want;
            std::istringstream in(answers[i]);
            for (Token id; in >> id;) want.push_back(id);
            CAPTURE(i, texts[i]);
            CHECK(t->encode(texts[i], plain) == want);
        }
        const auto cases = read_json(reference("tokenizers") + "/" + name + ".cases.json");
        for (const auto& c : cases["encode"]) {
            CAPTURE(c["text"].get<std::string>());
            CHECK(t->encode(c["text"].get<std::string>(), plain) == c["ids"].get<std::vector<Token>>());
        }
        for (const auto& c : cases["parse_special"]) {
            CAPTURE(c["text"].get<std::string>());
            CHECK(t->encode(c["text"].get<std::string>(), parsed) == c["ids"].get<std::vector<Token>>());
        }
        for (const auto& c : cases["decode"]) {
            CAPTURE(c.dump());
            CHECK(t->decode(c["ids"].get<std::vector<Token>>()) == from_hex(c["hex"]));
        }
        for (const auto& c : cases["invalid_utf8"]) {
            const std::string bytes = from_hex(c.contains("hex") ? c["hex"].get<std::string>() : std::string());
            const auto        ids   = t->encode(bytes, plain);
            if (has_all_bytes(name)) CHECK(t->decode(ids) == bytes);
        }
    }
    CHECK(n_vocabularies >= 2);
}

TEST_CASE("a detokenizer's pieces are valid UTF-8 and add up to the text, however it is cut", "[tokenizer]") {
    std::mt19937 random(11);
    for (const std::string name : all_names) {
        auto t = vocabulary(name);
        if (!t) continue;
        CAPTURE(name);
        for (int round = 0; round < 300; round++) {
            std::string bytes;
            for (unsigned n = random() % 24; n > 0; n--)
                if (random() % 3)
                    bytes += utf8_encode(std::array<char32_t, 5>{U'a', U'é', U'漢', U'🙂', U' '}[random() % 5]);
                else bytes += char(random());
            const auto  ids = t->encode(bytes, plain);
            Detokenizer stream(*t, true);
            std::string text;
            for (Token id : ids) {
                const std::string piece = stream.push(id);
                REQUIRE(utf8_valid(piece));
                text += piece;
            }
            text += stream.finish();
            REQUIRE(utf8_valid(text));
            if (has_all_bytes(name)) CHECK(text == utf8_repair(bytes));
        }
        // any ids at all, also ones beyond the vocabulary
        Detokenizer stream(*t);
        for (int i = 0; i < 5000; i++)
            REQUIRE(utf8_valid(stream.push(Token(random() % unsigned(t->vocab_size() + 100)) - 50)));
    }
}

TEST_CASE("ten megabytes of one letter, or of spaces, are tokenized", "[tokenizer]") {
    for (const std::string name : {"llama-spm", "gpt-2"}) {
        auto t = vocabulary(name);
        if (!t) continue;
        CAPTURE(name);
        for (char c : {'a', ' '}) {
            const std::string text(10'000'000, c);
            const auto        ids = t->encode(text, parsed);
            CHECK(ids.size() <= text.size());
            CHECK(t->decode(ids) == text);
        }
    }
}

TEST_CASE("words that are looked for in windows are those of the whole text", "[tokenizer]") {
    constexpr std::array<std::string_view, 27> parts{
        "a",    "bc", " ",  "  ", "\n", "\r\n", "\t", "'", "'s", "'ll", "'RE",  "1",    "23",
        "4567", "!",  "?!", "$",  "`",  "漢",   "字", "é", "🙂", "½",   "\xff", "\xe6", "\x80\x80\x80\x80\x80",
        "٣"};
    std::mt19937 random(5);
    for (const PreTokenizer kind :
         {PreTokenizer::standard, PreTokenizer::gpt2, PreTokenizer::llama3, PreTokenizer::qwen2, PreTokenizer::falcon,
          PreTokenizer::starcoder, PreTokenizer::deepseek_coder})
        for (int round = 0; round < 400; round++) {
            std::string text;
            // some of the parts alone, so that there are long words and runs of blanks, too
            const unsigned first = random() % parts.size(), few = 1 + random() % parts.size();
            for (unsigned n = random() % 300; n > 0; n--) text += parts[(first + random() % few) % parts.size()];
            const std::size_t        window = 8 + random() % 100;
            std::vector<std::size_t> ends;
            for (std::size_t at = 0, wide = window; at < text.size();) {
                const auto some = pre_tokenize_begin(kind, std::string_view(text).substr(at), wide);
                for (std::size_t end : some) ends.push_back(at + end);
                if (!some.empty()) at = ends.back();
                wide = some.empty() ? wide * 2 : window;
            }
            CAPTURE(text, window, int(kind));
            REQUIRE(ends == pre_tokenize(kind, text));
        }
}

TEST_CASE("special tokens in a text are found only where they may be", "[tokenizer]") {
    auto t = vocabulary("llama-spm");
    REQUIRE(t);
    CHECK(t->encode("</s>", parsed) == std::vector<Token>{2});
    CHECK(t->encode("</s>", plain).size() > 1);
    CHECK(t->decode(t->encode("</s>", plain)) == "</s>");
    CHECK(t->encode("", {.add_special = true}) == std::vector<Token>{1});
    CHECK(t->adds_bos());
    CHECK(t->is_end(2));
    CHECK_FALSE(t->is_end(1));
    CHECK_FALSE(t->is_end(-1));
    CHECK_FALSE(t->is_end(1 << 30));
    CHECK(t->bytes(1 << 30).empty());
    CHECK(t->bytes(2).empty());
    CHECK(t->bytes(2, true) == "</s>");
    CHECK(t->find("</s>") == 2);
}

TEST_CASE("special tokens of more text than can be searched for are refused", "[tokenizer]") {
    GgufWriter w;
    w.set("tokenizer.ggml.model", "llama");
    w.set("tokenizer.ggml.tokens", std::vector<std::string>{"<s>", std::string(std::size_t(1) << 24, 'x')});
    const std::string path = temporary();
    const auto        load = [&](std::int32_t type) {
        w.set("tokenizer.ggml.token_type", std::vector<std::int32_t>{3, type});
        REQUIRE(w.write(path));
        const Result<Gguf> file = Gguf::open(path);
        REQUIRE(file);
        const Result<Tokenizer> tokenizer = Tokenizer::load(*file);
        return tokenizer ? std::string() : tokenizer.error().message;
    };
    CHECK(load(1) == "");
    CHECK(load(3) == path + ": the special tokens have 16777219 bytes together, more than 16777215");
    unlink(path.c_str());
}
