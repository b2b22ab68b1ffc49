// Any bytes as a vocabulary file, and any bytes as a text for a real vocabulary: token ids are in range, and streamed
// text is valid UTF-8. QUIRE_VOCABULARY names the GGUF file; by default one in tests/data.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

import quire.core.base;
import quire.core.std;
import quire.core.unicode;
import quire.model_file.gguf;
import quire.text.tokens.tokenizer;

using namespace quire;

const Tokenizer& real_vocabulary() {
    static const Tokenizer tokenizer = [] {
        const char*  path = std::getenv("QUIRE_VOCABULARY");
        Result<Gguf> file = Gguf::open(path ? path : QUIRE_ROOT "/tests/data/tokenizers/ggml-vocab-llama-spm.gguf");
        check(file.has_value(), "no vocabulary to fuzz with");
        return std::move(*Tokenizer::load(*file));
    }();
    return tokenizer;
}

void exercise(const Tokenizer& t, std::string_view text) {
    for (bool special : {false, true}) {
        const auto  ids = t.encode(text, {.add_special = special, .parse_special = special});
        Detokenizer stream(t, true, special);
        for (Token id : ids) {
            check(id >= 0 && id < t.vocab_size(), "an id outside the vocabulary");
            check(utf8_valid(stream.push(id)), "half a character was streamed");
        }
        check(utf8_valid(stream.finish()), "half a character at the end");
        (void)t.decode(ids);
    }
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::span<const std::uint8_t> bytes(data, size);
    const std::string_view              text(reinterpret_cast<const char*>(data), size);
    exercise(real_vocabulary(), text);
    if (Result<Gguf> file = Gguf::parse(std::as_bytes(bytes), "fuzz"))
        if (Result<Tokenizer> t = Tokenizer::load(*file)) exercise(*t, text.substr(0, 4096));
    return 0;
}
