// A vocabulary of any model with any tokens, scores, types, merges and character map, and any text: ids are in range, the streamed
// text is valid UTF-8, and what is no vocabulary is refused. Input: a byte for the model, one for flags, then items that end with a
// NUL: tokens (first byte: the type), an empty one, merges, an empty one, the character map as hexadecimal digits, the text.
#include <unistd.h>
#include <cstddef>
#include <cstdint>

import quire.core.base;
import quire.core.std;
import quire.core.unicode;
import quire.model_file.gguf;
import quire.model_file.gguf_writer;
import quire.text.tokens.pretokenizer;
import quire.text.tokens.tokenizer;

using namespace quire;

// In memory, so that no disk is worn.
static const std::string& path() {
    static const std::string p = cat("/dev/shm/fuzz_vocabulary.", getpid(), ".gguf");
    return p;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size < 3 || size > 4096) return 0;
    constexpr std::array models{"llama", "gpt2", "bert", "t5", "rwkv", "gemma4", "whitespace"};
    const std::string    model = models[data[0] % models.size()];
    const std::uint8_t   flags = data[1];
    std::string_view     rest(reinterpret_cast<const char*>(data) + 2, size - 2);
    const auto           take = [&] {
        const std::size_t      end  = std::min(rest.find('\0'), rest.size());
        const std::string_view item = rest.substr(0, end);
        rest.remove_prefix(std::min(end + 1, rest.size()));
        return item;
    };
    std::vector<std::string>  tokens, merges;
    std::vector<std::int32_t> types;
    std::vector<float>        scores;
    for (std::string_view item = take(); !item.empty(); item = take()) {
        types.push_back(item[0] & 7);
        scores.push_back(float((item[0] >> 3 & 15) - 12));
        tokens.emplace_back(item.substr(1));
    }
    for (std::string_view item = take(); !item.empty(); item = take()) merges.emplace_back(item);
    std::vector<std::uint8_t> map;
    const std::string_view    digits = take();
    for (std::size_t i = 0; i + 1 < digits.size(); i += 2) {
        const auto digit = [](char c) { return std::uint8_t(c >= 'a' ? c - 'a' + 10 : c - '0'); };
        map.push_back(std::uint8_t(digit(digits[i]) << 4 | (digit(digits[i + 1]) & 15)));
    }

    GgufWriter w;
    w.set("tokenizer.ggml.model", model);
    const std::vector<std::string_view> names = PreTokenizer::names();
    if (model == "gpt2") w.set("tokenizer.ggml.pre", std::string(names[flags % names.size()]));
    w.set("tokenizer.ggml.tokens", tokens);
    if (flags & 1) w.set("tokenizer.ggml.token_type", types);
    if (flags & 2) w.set("tokenizer.ggml.scores", scores);
    w.set("tokenizer.ggml.merges", merges);
    if (!map.empty()) w.set("tokenizer.ggml.precompiled_charsmap", map);
    w.set("tokenizer.ggml.add_space_prefix", (flags & 4) != 0);
    w.set("tokenizer.ggml.remove_extra_whitespaces", (flags & 8) != 0);
    w.set("tokenizer.ggml.normalizer.lowercase", (flags & 16) != 0);
    w.set("tokenizer.ggml.unknown_token_id", std::uint32_t(flags >> 6));
    w.set("tokenizer.ggml.bos_token_id", std::uint32_t(flags >> 5 & 1));
    if (!w.write(path())) return 0;
    const Result<Gguf> file = Gguf::open(path());
    check(file.has_value(), "what the writer wrote cannot be read");
    const Result<Tokenizer> t = Tokenizer::load(*file);
    if (!t) return 0;
    for (bool special : {false, true}) {
        const std::vector<Token> ids = t->encode(rest, {.add_special = special, .parse_special = special});
        Detokenizer              stream(*t, true, special);
        for (Token id : ids) {
            check(id >= 0 && id < t->vocab_size(), "an id outside the vocabulary");
            check(utf8_valid(stream.push(id)), "half a character was streamed");
        }
        check(utf8_valid(stream.finish()), "half a character at the end");
        (void)t->decode(ids);
    }
    return 0;
}
