// quire.text.tokens.pretokenizer: splits text into the words across which byte pair encoding never merges, as `tokenizer.ggml.pre` says.
// A pre-tokenizer is one line in the table below: patterns, each applied within the pieces of the one before it. The patterns come
// from the models' own tokenizer.json, the names from llama.cpp's converter. **Owns** the compiled patterns of one file.
export module quire.text.tokens.pretokenizer;

import quire.core.base;
import quire.text.tokens.pattern;

export namespace quire {

// How the words of a pre-tokenizer are spelled in the vocabulary.
enum class Spelling : std::uint8_t {
    bytes,      // GPT-2's: each byte is a printable character
    text,       // as they are, with ▁ for a space; a character without a token becomes the tokens of its bytes
    text_begun, // so, and a line begins with a space even where it has none
    words,      // as they are, without the white space between
};

class PreTokenizer {
public:
    // By `tokenizer.ggml.pre`. Error: that it is not known, and the nearest name that is.
    static Result<PreTokenizer> named(std::string_view name);
    // All names, in the table's order.
    static std::vector<std::string_view> names();

    Spelling spelling          = Spelling::bytes;
    bool     whole_words_first = false; // a word that is a token needs no merges
    bool     adds_bos          = false; // where the file does not say

    // The ends of the words, in bytes, ascending; the last is text.size(). Bytes that are not UTF-8 count as symbols.
    std::vector<std::size_t> split(std::string_view text) const;
    // The first of these, found by looking at some `window` bytes: memory is bound by that, not by the text. Empty only when
    // the text is or when no word ends for certain within the window.
    std::vector<std::size_t> split_begin(std::string_view text, std::size_t window) const;

private:
    std::vector<std::size_t> split(std::string_view text, bool open) const;
    std::vector<Pattern>     patterns_;
};

} // namespace quire

module :private;

namespace quire {

// -- the table

constexpr std::string_view gpt2 = R"re('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)re";
constexpr std::string_view llama3 =
    R"re((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n)re"
    R"re(]*|\s*[\r\n]+|\s+(?!\S)|\s+)re";
constexpr std::string_view qwen2 =
    R"re((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s)re"
    R"re(*[\r\n]+|\s+(?!\S)|\s+)re";
constexpr std::string_view ufakzeka =
    R"re([^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)re";
constexpr std::string_view minicpm5 =
    R"re((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\)re"
    R"re(s*[\r\n]+|\s+(?!\S)|\s+)re";
constexpr std::string_view qwen35 =
    R"re((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N})re"
    R"re(]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)re";
constexpr std::string_view jais2 =
    R"re((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n)re"
    R"re(]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16})re"
    R"re((?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1})re";
constexpr std::string_view gpt4o =
    R"re([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'r)re"
    R"re(e|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\)re"
    R"re(p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+)re"
    R"re((?!\S)|\s+)re";
constexpr std::string_view tekken =
    R"re([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L})re"
    R"re(\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N})re"
    R"re(]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)re";
constexpr std::string_view youtu =
    R"re([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'r)re"
    R"re(e|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\)re"
    R"re(p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)re"
    R"re()|\s+)re";
constexpr std::string_view kimi =
    R"re([\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p)re"
    R"re({Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{L)re"
    R"re(m}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'l)re"
    R"re(l|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)re";
constexpr std::string_view bailing =
    R"re('(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\)re"
    R"re(n]|\s+(?!\S)|\s+)re";
constexpr std::string_view seed =
    R"re((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s)re"
    R"re(*[\r\n]+|\s+(?!\S)|\s+)re";
constexpr std::string_view exaone_moe =
    R"re((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}(?:[\p{L}\p{M}]| \p{L})*+|\p{N}| ?[^)re"
    R"re(\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+)re";
constexpr std::string_view deepseek3 =
    R"re([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[)re"
    R"re(\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)re";
constexpr std::string_view spark =
    R"re([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[)re"
    R"re(\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+)re";
constexpr std::string_view deepseek_letters =
    R"re(\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ)re"
    R"re(ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛ)re"
    R"re(Ꜣ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+)re";
constexpr std::string_view deepseek_symbols = R"re(\s?[!-/:-~！-／：-～‘-‟　-。]+)re";
constexpr std::string_view deepseek_cjk     = R"re([一-龥ࠀ-一가-퟿]+)re";
constexpr std::string_view cjk_and_kana     = R"re([一-龥぀-ゟ゠-ヿ]+)re";
constexpr std::string_view asian_scripts =
    R"re([一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+)re";
constexpr std::string_view youtu_scripts =
    R"re([가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+)re";
constexpr std::string_view bloom  = R"re( ?[^(\s|.,!?…。，、।۔،)]+)re";
constexpr std::string_view number = R"(\p{N})", numbers = R"(\p{N}+)", three_numbers = R"(\p{N}{1,3})",
                           three_digits = "[0-9][0-9][0-9]", line_break = R"([\r\n])", lines = R"([^\n]+|[\n]+)",
                           punctuation = R"([\p{P}\$\+<=>\^~\|]+)", falcon_punctuation = R"([\p{P}\$\+<=>\^~\|`]+)",
                           words_with_space = R"([\n]+|[ ▁][^ ▁\n]*|[^ ▁\n]+)";

enum PreTokenizerFlags : std::uint8_t { no_flags = 0, whole_first = 1, bos = 2 };

struct PreTokenizerRow {
    std::string_view                names; // separated by spaces
    std::array<std::string_view, 6> patterns;
    int                             flags    = no_flags;
    Spelling                        spelling = Spelling::bytes;
};

constexpr std::array pre_tokenizers{
    PreTokenizerRow{"default", {punctuation, gpt2, numbers, three_digits}},
    PreTokenizerRow{"gpt-2 gpt2 phi-2 mpt olmo jais trillion granite-docling jina-es jina-de jina-v1-en jina-v2-es "
                    "jina-v2-de jina-v2-code roberta-bpe gigachat a.x-4.0 mellum modern-bert exaone4",
                    {gpt2}},
    PreTokenizerRow{
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", {llama3}, whole_first | bos},
    PreTokenizerRow{"dbrx smaug-bpe chatglm-bpe", {llama3}},
    PreTokenizerRow{"glm4 glm5", {llama3}, whole_first},
    PreTokenizerRow{"qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", {qwen2}},
    PreTokenizerRow{"qwen35", {qwen35}},
    PreTokenizerRow{"ufakzeka", {ufakzeka}},
    PreTokenizerRow{"laguna", {lines, qwen2}},
    PreTokenizerRow{"minicpm5", {three_numbers, minicpm5}, whole_first},
    PreTokenizerRow{"jais-2", {jais2}},
    PreTokenizerRow{"falcon", {falcon_punctuation, gpt2, three_digits}},
    PreTokenizerRow{"starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", {number, gpt2}},
    PreTokenizerRow{"deepseek-llm", {line_break, deepseek_letters, deepseek_symbols, R"(\s+$)", deepseek_cjk, numbers}},
    PreTokenizerRow{"deepseek-coder", {line_break, R"(\s?\p{L}+)", R"(\s?\p{P}+)", deepseek_cjk, number}},
    PreTokenizerRow{"deepseek-v3 hunyuan-dense joyai-llm hy_v4", {three_numbers, cjk_and_kana, deepseek3}},
    PreTokenizerRow{"spark2_5", {three_numbers, cjk_and_kana, spark, number}},
    PreTokenizerRow{"youtu", {youtu_scripts, youtu}, whole_first},
    PreTokenizerRow{"poro-chat bloom gpt3-finnish", {bloom}},
    PreTokenizerRow{"viking", {bloom, number}},
    PreTokenizerRow{"tekken", {tekken}, whole_first | bos},
    PreTokenizerRow{"gpt-4o llama4 kanana2 talkie minimax-m2", {gpt4o}},
    PreTokenizerRow{"granite-embed-multi-97m", {gpt4o}, whole_first},
    PreTokenizerRow{"tiny_aya cohere2moe", {thousands_of_words, gpt4o}},
    PreTokenizerRow{"superbpe", {numbers, thousands_of_digits}},
    PreTokenizerRow{"kimi-k2", {kimi}},
    PreTokenizerRow{"bailingmoe bailingmoe2 llada-moe", {bailing}},
    PreTokenizerRow{"seed-coder", {seed}},
    PreTokenizerRow{"afmoe", {thousands_of_numbers, asian_scripts, deepseek3}},
    PreTokenizerRow{"exaone-moe", {exaone_moe}},
    PreTokenizerRow{
        "chameleon",
        {"<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", R"([\t\n]|    |  )", number, R"([\p{P}!-/:-@\[-`{-~])", gpt2},
        bos},
    PreTokenizerRow{"gemma4 granite-embed-multi-311m", {lines}, bos, Spelling::text},
    PreTokenizerRow{"sarvam-moe", {lines}, no_flags, Spelling::text},
    PreTokenizerRow{"mmbert", {words_with_space}, no_flags, Spelling::text_begun},
    PreTokenizerRow{"whitespace", {R"(\S+)"}, no_flags, Spelling::words},
};

std::vector<std::string_view> PreTokenizer::names() {
    std::vector<std::string_view> all;
    for (const PreTokenizerRow& row : pre_tokenizers)
        for (std::string_view name : quire::split(row.names)) all.push_back(name);
    return all;
}

// Characters to change, leave out or put in to make one name of the other.
std::size_t edit_distance(std::string_view a, std::string_view b) {
    std::vector<std::size_t> row(b.size() + 1);
    for (std::size_t j = 0; j <= b.size(); j++) row[j] = j;
    for (std::size_t i = 0; i < a.size(); i++) {
        std::size_t diagonal = std::exchange(row[0], i + 1);
        for (std::size_t j = 0; j < b.size(); j++)
            diagonal = std::exchange(row[j + 1], std::min({diagonal + (a[i] != b[j]), row[j] + 1, row[j + 1] + 1}));
    }
    return row.back();
}

Result<PreTokenizer> PreTokenizer::named(std::string_view name) {
    const PreTokenizerRow* found = nullptr;
    for (const PreTokenizerRow& row : pre_tokenizers)
        if (std::ranges::any_of(quire::split(row.names), [&](std::string_view known) { return known == name; }))
            found = &row;
    if (!found) {
        std::string_view nearest = "default";
        std::size_t      least   = ~std::size_t(0);
        for (std::string_view known : names())
            if (const std::size_t d = edit_distance(name.substr(0, 64), known); d < least) nearest = known, least = d;
        return fail("tokenizer.ggml.pre is ", quote(name), ", which is not known; the nearest that is: ", nearest);
    }
    PreTokenizer p;
    p.spelling          = found->spelling;
    p.whole_words_first = (found->flags & whole_first) != 0;
    p.adds_bos          = (found->flags & bos) != 0;
    for (std::string_view expression : found->patterns) {
        if (expression.empty()) break;
        Result<Pattern> pattern = Pattern::compile(expression);
        if (!pattern) return std::unexpected(pattern.error());
        p.patterns_.push_back(std::move(*pattern));
    }
    return p;
}

// -- splitting

std::vector<std::size_t> PreTokenizer::split(std::string_view text) const { return split(text, false); }

std::vector<std::size_t> PreTokenizer::split_begin(std::string_view text, std::size_t window) const {
    if (text.size() <= window) return split(text, false);
    return split(text.substr(0, window), true);
}

// `open`: more text follows. Of the last piece of each pattern it is then not known where it ends, but its beginning is, and the
// next pattern may find whole words in that.
std::vector<std::size_t> PreTokenizer::split(std::string_view text, bool open) const {
    if (text.empty()) return {};
    const Characters         t(text);
    std::vector<std::size_t> ends, next;
    // the last three may be pieces of a character that the window cuts
    Splitter::Rest rest{0, t.c.size() - (open ? std::min<std::size_t>(t.c.size(), 3) : 0)};
    if (!open) ends.push_back(t.c.size());
    for (const Pattern& pattern : patterns_) {
        Splitter splitter(pattern);
        splitter.prepare(t);
        next.clear();
        std::size_t begin = 0;
        for (std::size_t end : ends) {
            splitter.split(t, begin, end, false, next);
            begin = end;
        }
        if (open) rest = splitter.split(t, rest.begin, rest.sure, true, next);
        ends.swap(next);
    }
    for (std::size_t& end : ends) end = t.at[end];
    return ends;
}

} // namespace quire
