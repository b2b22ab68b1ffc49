// Any text as a JSON Schema, grammar, regular expression or structural tag, and any text under it: a mask has exactly the tokens that
// are accepted. Input: a byte that chooses what it is, the constraint, a NUL, bytes that choose among the allowed tokens.
#include <cstddef>
#include <cstdint>

import quire.constraint.compile;
import quire.core.base;
import quire.core.json;
import quire.core.std;

using namespace quire;
using Kind = ConstraintSpec::Kind;

static std::shared_ptr<const TokenTrie> small_vocabulary() {
    std::vector<std::string> all;
    for (int b = 0; b < 256; b++) all.emplace_back(1, char(b));
    for (const char* word : {"ab", "abc", "\":", "\",\"", "{\"", "\"}", "12", "1.0", "true", "]]", "aaaaaaaaaaaaaaaa"})
        all.emplace_back(word);
    all.emplace_back(40, 'a');
    all.emplace_back(); // the end
    return std::make_shared<const TokenTrie>(all, std::vector<Token>{Token(all.size() - 1)});
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size < 2) return 0;
    static const auto      trie = small_vocabulary();
    const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
    const std::size_t      nul     = std::min(rest.find('\0'), rest.size());
    const std::string_view choices = rest.substr(std::min(nul + 1, rest.size()));

    ConstraintSpec spec;
    spec.kind    = std::array{Kind::json_schema, Kind::grammar, Kind::regex, Kind::structural_tag}[data[0] % 4];
    spec.ordered = (data[0] & 4) == 0;
    spec.text    = std::string(rest.substr(0, nul));
    if (spec.kind == Kind::json_schema || spec.kind == Kind::structural_tag) {
        Result<Json> json = json_parse(spec.text, schema_json_limits);
        if (!json) return 0;
        spec.schema = std::move(*json);
    }
    const Result<std::shared_ptr<Constraint>> made = compile_constraint(spec);
    if (!made) {
        check(!made.error().message.empty(), "an error without a message");
        return 0;
    }
    ConstraintState            state(*made, trie);
    std::vector<std::uint64_t> bits(state.words());
    for (std::size_t i = 0; i < std::min<std::size_t>(choices.size(), 24) && !state.ended(); i++) {
        if (!state.mask(bits)) return 0;
        std::vector<Token> allowed;
        for (Token t = 0; t < trie->vocab_size(); t++) {
            const bool      bit  = (bits[std::size_t(t) / 64] >> (t % 64) & 1) != 0;
            ConstraintState next = state;
            check(bit == next.accept(t), "a mask and a state disagree");
            if (bit) allowed.push_back(t);
        }
        check(!allowed.empty() && state.accept(allowed[static_cast<unsigned char>(choices[i]) % allowed.size()]),
              "an allowed token is refused");
    }
    return 0;
}
