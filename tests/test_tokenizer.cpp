// Tokenizers against vectors on which llama.cpp and the vocabulary's own library (HF tokenizers, sentencepiece) agree.
#include <catch2/catch_test_macros.hpp>

#include <nlohmann/json.hpp>

#include "process.h"
#include "reference.h"

import quire.core.base;
import quire.core.std;
import quire.core.unicode;
import quire.model_file.gguf;
import quire.model_file.gguf_writer;
import quire.serve.api.infill;
import quire.text.tokens.pattern;
import quire.text.tokens.pretokenizer;
import quire.text.tokens.tokenizer;

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
    for (std::string_view name : PreTokenizer::names()) {
        const Result<PreTokenizer> pre = PreTokenizer::named(name);
        REQUIRE(pre);
        for (int round = 0; round < 60; round++) {
            std::string text;
            // some of the parts alone, so that there are long words and runs of blanks, too
            const unsigned first = random() % parts.size(), few = 1 + random() % parts.size();
            for (unsigned n = random() % 300; n > 0; n--) text += parts[(first + random() % few) % parts.size()];
            const std::size_t        window = 8 + random() % 100;
            std::vector<std::size_t> ends;
            for (std::size_t at = 0, wide = window; at < text.size();) {
                const auto some = pre->split_begin(std::string_view(text).substr(at), wide);
                for (std::size_t end : some) ends.push_back(at + end);
                if (!some.empty()) at = ends.back();
                wide = some.empty() ? wide * 2 : window;
            }
            CAPTURE(text, window, std::string(name));
            REQUIRE(ends == pre->split(text));
        }
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
    GgufWriter               w;
    std::vector<std::string> tokens{"<s>"};
    for (int i = 0; i < 1 << 14; i++)
        tokens.push_back(std::to_string(i) + std::string(1024 - std::to_string(i).size(), 'x'));
    w.set("tokenizer.ggml.model", "llama");
    w.set("tokenizer.ggml.tokens", tokens);
    const std::string path = temporary();
    const auto        load = [&](std::int32_t type) {
        w.set("tokenizer.ggml.token_type", std::vector<std::int32_t>(tokens.size(), type));
        REQUIRE(w.write(path));
        const Result<Gguf> file = Gguf::open(path);
        REQUIRE(file);
        const Result<Tokenizer> tokenizer = Tokenizer::load(*file);
        return tokenizer ? std::string() : tokenizer.error().message;
    };
    CHECK(load(1) == "");
    CHECK(load(3) == path + ": the special tokens have 16777219 bytes together, more than 16777215");
    // One that is long would be compared with the text at each of its bytes.
    tokens = {"<s>", std::string(1025, 'x')};
    w.set("tokenizer.ggml.tokens", tokens);
    CHECK(load(1) == "");
    CHECK(load(3) == path + ": token 1 has 1025 bytes; one that is looked for at each place has at most 1024");
    w.set("tokenizer.ggml.model", "rwkv");
    CHECK(load(1) == path + ": token 1 has 1025 bytes; one that is looked for at each place has at most 1024");
    unlink(path.c_str());
}

namespace {

// The words of a text, joined by |.
std::string words(std::string_view pre, std::string_view text) {
    const Result<PreTokenizer> p = PreTokenizer::named(pre);
    REQUIRE(p);
    std::string out;
    std::size_t begin = 0;
    for (std::size_t end : p->split(text)) {
        out += cat(out.empty() ? "" : "|", text.substr(begin, end - begin));
        begin = end;
    }
    CHECK(begin == text.size());
    return out;
}

// The tokenizer of a vocabulary written to a file, or the reason why it is refused, without the file's name.
std::expected<Tokenizer, std::string> made(GgufWriter& w) {
    const std::string path = temporary();
    REQUIRE(w.write(path));
    const Result<Gguf> file = Gguf::open(path);
    REQUIRE(file);
    Result<Tokenizer> t = Tokenizer::load(*file);
    unlink(path.c_str());
    if (t) return std::move(*t);
    REQUIRE(t.error().message.starts_with(path + ": "));
    return std::unexpected(t.error().message.substr(path.size() + 2));
}

using Strings = std::vector<std::string>;
using Ids     = std::vector<Token>;

} // namespace

TEST_CASE("pre-tokenizers split as their patterns say", "[tokenizer]") {
    CHECK(words("gpt-2", "I'll  go 12ab!?\n\n x") == "I|'ll| | go| 12|ab|!?|\n\n| x");
    CHECK(words("llama-bpe", "I'LL go 12345ab") == "I|'LL| go| |123|45|ab");
    CHECK(words("qwen2", "a 12 é") == "a| |1|2| é");
    CHECK(words("qwen35", "ก็ a") == "ก็| a");
    CHECK(words("tekken", "HelloWorld ABCdef 12") == "Hello|World| ABCdef| |1|2");
    CHECK(words("tekken", "ÀBçd") == "ÀBçd");
    CHECK(words("tekken", "éÀ") == "é|À"); // é is a small letter, ASCII or not
    CHECK(words("gpt-4o", "don't DON'T 1234/\n") == "don't| DON'T| |123|4|/\n");
    CHECK(words("kimi-k2", "漢字かな abc") == "漢字|かな| abc");
    CHECK(words("deepseek-v3", "漢字kana 1234 !x") == "漢字|kana| |123|4| !|x");
    CHECK(words("deepseek-llm", "ab  12 漢   ") == "ab|  |12| |漢|   ");
    CHECK(words("afmoe", "1234567 a12") == "1|234|567| a|12");
    CHECK(words("superbpe", "ab 12345 c") == "ab |12|345| c");
    CHECK(words("tiny_aya", "12345 1234ab") == "12|345| |123|4|ab");
    CHECK(words("bloom", "Hi, you(x)") == "Hi|,| you|(|x|)");
    CHECK(words("chameleon", "IMGIMGABZ a\t1.") == "IMGIMGABZ| a|\t|1|.");
    CHECK(words("exaone-moe", "a b c de 12") == "a b c de| |1|2");
    CHECK(words("jais-2", "a" + std::string(11, ' ') + "b") == "a|        |  | b");
    CHECK(words("gemma4", "a b\n\nc") == "a b|\n\n|c");
    CHECK(words("bailingmoe", "it'S \n\n x") == "it|'S| \n\n| x");
    const auto unknown = PreTokenizer::named("qwen-2");
    REQUIRE_FALSE(unknown);
    CHECK(unknown.error().message == "tokenizer.ggml.pre is 'qwen-2', which is not known; the nearest that is: qwen2");
}

TEST_CASE("a pattern that is not understood is refused with its place", "[tokenizer]") {
    for (const auto* expression : {"(a", "a)", "[a", "\\q", "a{3,1}", "*", "\\p{Xy}", "(?=ab)", "a+?", "\\"}) {
        CAPTURE(expression);
        CHECK_FALSE(Pattern::compile(expression));
    }
    CHECK_FALSE(Pattern::compile(std::string(1000, '(')));
    CHECK_FALSE(Pattern::compile(std::string(1000, '[')));
}

TEST_CASE("a long text without an end of a word is split in a moment by every pre-tokenizer", "[tokenizer]") {
    for (std::string_view name : PreTokenizer::names()) {
        const Result<PreTokenizer> pre = PreTokenizer::named(name);
        REQUIRE(pre);
        for (std::string_view part : {" ", "a", "A", "1", "!", "é", "🙂", "\n", " \r"}) {
            std::string text;
            while (text.size() < 100'000) text += part;
            CAPTURE(std::string(name), std::string(part));
            CHECK(pre->split(text).back() == text.size());
            text += "x";
            CHECK(pre->split(text).back() == text.size());
        }
    }
}

TEST_CASE("word pieces: cleaned words, the longest tokens, unknown words as one", "[tokenizer]") {
    GgufWriter w;
    w.set("tokenizer.ggml.model", "bert");
    w.set("tokenizer.ggml.tokens",
          Strings{"[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁un", "aff", "able", "▁able", "▁,", "▁漢", "▁e", "[MASK]"});
    w.set("tokenizer.ggml.token_type", std::vector<std::int32_t>{3, 2, 3, 3, 1, 1, 1, 1, 1, 1, 1, 3});
    auto t = made(w);
    REQUIRE(t);
    CHECK(t->encode("Unaffable, able漢") == Ids{2, 4, 5, 6, 8, 7, 9, 3});
    CHECK(t->encode("unaffablex ABLE\u0301", {.add_special = false}) == Ids{1, 7});
    CHECK(t->encode("É\xc3\xa9 \xff", {.add_special = false}) == Ids{1});
    CHECK(t->encode("é", {.add_special = false}) == Ids{10});
    CHECK(t->encode(std::string(101, 'e') + " able", {.add_special = false}) == Ids{1, 7});
    CHECK(t->encode("", {}) == Ids{2, 3});
    CHECK(t->decode(t->encode("unaffable , able")) == "unaffable, able");
    w.set("tokenizer.ggml.normalizer.lowercase", false);
    t = made(w);
    REQUIRE(t);
    CHECK(t->encode("able Able é", {.add_special = false}) == Ids{7, 1, 1});
}

TEST_CASE("unigram: the split with the highest score, unknown characters as one, damaged maps refused", "[tokenizer]") {
    GgufWriter w;
    w.set("tokenizer.ggml.model", "t5");
    w.set("tokenizer.ggml.tokens", Strings{"<pad>", "</s>", "<unk>", "▁", "▁a", "b", "ab", "▁ab", "c"});
    w.set("tokenizer.ggml.token_type", std::vector<std::int32_t>{3, 3, 2, 1, 1, 1, 1, 1, 1});
    w.set("tokenizer.ggml.scores", std::vector<float>{0, 0, 0, -2, -3, -3, -1, -4, -2});
    w.set("tokenizer.ggml.add_space_prefix", true);
    w.set("tokenizer.ggml.remove_extra_whitespaces", true);
    auto t = made(w);
    REQUIRE(t);
    CHECK(t->encode("ab") == Ids{3, 6, 1});
    CHECK(t->encode("  ab   abc ", {.add_special = false}) == Ids{3, 6, 3, 6, 8});
    CHECK(t->encode("xyz c", {.add_special = false}) == Ids{3, 2, 3, 8});
    CHECK(t->encode("   ", {.add_special = false}).empty());
    CHECK(t->decode(Ids{3, 6, 4}) == "ab a");
    std::string long_text;
    for (int i = 0; i < 100'000; i++) long_text += "ab ";
    CHECK(t->encode(long_text, {.add_special = false}).size() == 200'000);

    for (const std::vector<std::uint8_t>& map :
         {std::vector<std::uint8_t>{1, 2}, {255, 255, 255, 255, 0}, {4, 0, 0, 0, 1, 2, 3, 4}, {0, 0, 0, 0, 'x'}}) {
        w.set("tokenizer.ggml.precompiled_charsmap", map);
        CHECK_FALSE(made(w));
    }
    std::vector<std::uint8_t> longest(4 + 64 + 1, 'x'); // a table of no units, and one replacement
    std::fill_n(longest.begin(), 4, std::uint8_t(0));
    longest.back() = 0;
    w.set("tokenizer.ggml.precompiled_charsmap", longest);
    CHECK(made(w));
    longest.insert(longest.begin() + 4, 'x');
    w.set("tokenizer.ggml.precompiled_charsmap", longest);
    CHECK_FALSE(made(w));
    std::vector<std::uint8_t> cyclic(4 + 1024 * 4 + 1, 0xff); // each unit leads to another one
    cyclic[0] = 0, cyclic[1] = 16, cyclic[2] = cyclic[3] = cyclic.back() = 0;
    w.set("tokenizer.ggml.precompiled_charsmap", cyclic);
    t = made(w);
    REQUIRE(t);
    CHECK(t->encode("ab", {.add_special = false}) == Ids{3, 6});
    w.set("tokenizer.ggml.scores", std::vector<float>{0, 0, 0, -2, -3, -3, std::nanf(""), -4, -2});
    CHECK(made(w).error() == "tokenizer.ggml.scores[6] is not a finite number");
}

TEST_CASE("rwkv: the longest token at each place, spelled with escapes", "[tokenizer]") {
    GgufWriter w;
    w.set("tokenizer.ggml.model", "rwkv");
    w.set("tokenizer.ggml.tokens", Strings{"a", "ab", "\\n", "\\xff", "\\\\", "abcd", "c"});
    auto t = made(w);
    REQUIRE(t);
    CHECK(t->encode("abc\n\\\xff"
                    "ab") == Ids{1, 6, 2, 4, 3, 1});
    CHECK(t->decode(Ids{1, 6, 2, 4, 3}) == "abc\n\\\xff");
}

TEST_CASE("byte pairs of characters: spaces as marks, bytes for what has no token", "[tokenizer]") {
    GgufWriter w;
    w.set("tokenizer.ggml.model", "gemma4");
    w.set("tokenizer.ggml.tokens", Strings{"<bos>", "a", "▁", "▁a", "<0xC3>", "<0xA9>", "\n\n", "\n"});
    w.set("tokenizer.ggml.token_type", std::vector<std::int32_t>{3, 1, 1, 1, 6, 6, 1, 1});
    w.set("tokenizer.ggml.merges", Strings{"▁ a"});
    w.set("tokenizer.ggml.bos_token_id", std::uint32_t(0));
    auto t = made(w);
    REQUIRE(t);
    CHECK(t->encode("a a\n\né") == Ids{0, 1, 3, 6, 4, 5});
    CHECK(t->decode(Ids{0, 1, 3, 6, 4, 5}) == "a a\n\né");
}

TEST_CASE("byte pairs of words: white space is left out", "[tokenizer]") {
    GgufWriter w;
    w.set("tokenizer.ggml.model", "whitespace");
    w.set("tokenizer.ggml.pre", "whitespace");
    w.set("tokenizer.ggml.tokens", Strings{"<unk>", "a", "b", "ab", "i", "\u0307", "漢"});
    w.set("tokenizer.ggml.token_type", std::vector<std::int32_t>{2, 1, 1, 1, 1, 1, 1});
    w.set("tokenizer.ggml.merges", Strings{"a b"});
    w.set("tokenizer.ggml.unknown_token_id", std::uint32_t(0));
    auto t = made(w);
    REQUIRE(t);
    CHECK(t->encode("ab a\u3000b\n漢") == Ids{3, 1, 2, 6});
    CHECK(t->encode("A") == Ids{0});
    w.set("tokenizer.ggml.normalizer.lowercase", true);
    t = made(w);
    REQUIRE(t);
    CHECK(t->encode("A İ") == Ids{1, 4, 5});
}

TEST_CASE("ends are found by their spelling; what only looks so in another model is not", "[tokenizer]") {
    GgufWriter w;
    w.set("tokenizer.ggml.model", "gpt2");
    w.set("tokenizer.ggml.merges", Strings{});
    w.set("tokenizer.ggml.tokens", Strings{"a", "<|im_end|>", "<|end|>", "<|fim_pad|>", "<eos>"});
    auto t = made(w);
    REQUIRE(t);
    CHECK(t->end_tokens() == Ids{1, 2, 3, 4});
    CHECK(t->type(1) == TokenType::control);
    w.set("tokenizer.ggml.tokens", Strings{"a", "<|return|>", "<|end|>", "<|call|>", "<|channel|>"});
    t = made(w);
    REQUIRE(t);
    CHECK(t->end_tokens() == Ids{1, 3});
    CHECK(t->decode(Ids{4}) == "<|channel|>");
}

TEST_CASE("blanks beside a special token belong to it where its model says so", "[tokenizer]") {
    GgufWriter w;
    w.set("general.name", "Phi-3 mini");
    w.set("tokenizer.ggml.model", "llama");
    w.set("tokenizer.ggml.tokens", Strings{"<unk>", "<s>", "</s>", "▁", "a", "<|user|>"});
    w.set("tokenizer.ggml.token_type", std::vector<std::int32_t>{2, 3, 3, 1, 1, 3});
    w.set("tokenizer.ggml.add_space_prefix", false);
    auto t = made(w);
    REQUIRE(t);
    CHECK(t->encode("a<|user|>\n a") == Ids{1, 4, 5, 4});
    CHECK(t->encode("<s> a", {.add_special = false}) == Ids{1, 3, 4});
}

TEST_CASE("what is not known of a tokenizer is refused by name", "[tokenizer]") {
    GgufWriter w;
    w.set("tokenizer.ggml.tokens", Strings{"a"});
    w.set("tokenizer.ggml.model", "plamo2");
    CHECK(made(w).error() ==
          "tokenizer.ggml.model is 'plamo2', not one of llama, gpt2, whitespace, gemma4, bert, t5, rwkv");
    w.set("tokenizer.ggml.model", "gpt2");
    CHECK(made(w).error() == "tokenizer.ggml.merges is missing, byte pair encoding needs it");
    w.set("tokenizer.ggml.pre", "lama-bpe");
    CHECK(made(w).error() == "tokenizer.ggml.pre is 'lama-bpe', which is not known; the nearest that is: llama-bpe");
    w.set("tokenizer.ggml.model", "bert");
    CHECK(made(w).error() == "tokenizer.ggml.unknown_token_id is missing, a vocabulary of word pieces needs it");
}

TEST_CASE("a prompt to fill in the middle has the file's marks around its texts", "[tokenizer]") {
    GgufWriter w;
    w.set("tokenizer.ggml.model", "gpt2");
    w.set("tokenizer.ggml.merges", Strings{});
    w.set("tokenizer.ggml.tokens", Strings{"a",
                                           "b",
                                           "c",
                                           "d",
                                           "Ċ",
                                           "<fim_prefix>",
                                           "<x>",
                                           "<fim_middle>",
                                           "<|file_sep|>",
                                           "<REPO>",
                                           "e",
                                           "f",
                                           "i",
                                           "l",
                                           "r",
                                           "p",
                                           "o",
                                           "s",
                                           "t",
                                           "y"});
    w.set("tokenizer.ggml.token_type",
          std::vector<std::int32_t>{1, 1, 1, 1, 1, 3, 3, 3, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1});
    w.set("tokenizer.ggml.fim_suf_token_id", 6u);
    w.set("tokenizer.ggml.fim_mid_token_id", 1000u); // none of its vocabulary: the spelling decides
    const std::string path = temporary();
    REQUIRE(w.write(path));
    const Result<Gguf> file = Gguf::open(path);
    REQUIRE(file);
    const auto named = named_middle_marks(*file);
    REQUIRE(named);
    const auto t = Tokenizer::load(*file);
    REQUIRE(t);
    const MiddleMarks m = complete_middle_marks(*named, *t);
    CHECK(Ids{m.prefix, m.suffix, m.middle, m.repository, m.file} == Ids{5, 6, 7, 9, 8});
    CHECK(m.usable());

    Infill in{.suffix = "cd", .files = {}, .trim = true};
    CHECK(infill_tokens(*t, m, in, {std::string("ab")}, 0) == Ids{5, 0, 1, 6, 2, 3, 7});
    CHECK(infill_tokens(*t, m, in, {std::string("ab"), Ids{3}}, 7) == Ids{5, 0, 1, 3, 6, 2, 7}); // without the far end
    CHECK(infill_tokens(*t, m, in, {std::string("ababab")}, 7) == Ids{5, 1, 0, 1, 6, 2, 7}); // and the far beginning
    CHECK(infill_tokens(*t, m, in, {std::string("ab")}, 3) == Ids{5, 6, 7});
    in.suffix = "";
    in.files  = {{"a", "b"}, {"b", "c"}};
    const Ids head{9, 14, 10, 15, 16, 17, 12, 18, 16, 14, 19, 4}, last{8, 11, 12, 13, 10, 4, 5, 0, 6, 7};
    Ids       both = head, one = head; // of the other files
    for (Token id : Ids{8, 0, 4, 1, 8, 1, 4, 2}) both.push_back(id);
    for (Token id : Ids{8, 1, 4, 2}) one.push_back(id);
    for (Ids* ids : {&both, &one}) ids->insert(ids->end(), last.begin(), last.end());
    CHECK(infill_tokens(*t, m, in, {std::string("a")}, 0) == both);
    CHECK(infill_tokens(*t, m, in, {std::string("a")}, int(both.size()) - 1) == one);
    unlink(path.c_str());
}
