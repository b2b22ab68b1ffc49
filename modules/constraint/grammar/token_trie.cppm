// quire.constraint.grammar.token_trie: the tokens of a vocabulary as a tree of their bytes, made once for a model. **Owns** the trees.
export module quire.constraint.grammar.token_trie;

import quire.constraint.regex.parser;
export import quire.constraint.regex.regex;
import quire.core.base;
import quire.core.unicode;
import quire.text.tokens.tokenizer;

export namespace quire {

// How a control token stands in a text: between bytes that are not in UTF-8.
std::string    control_bytes(std::string_view name);
constexpr char control_begins = '\xff', control_ends = '\xfe';

// A tree in the order of a walk: to step over a node and all below it is one addition.
struct TokenTree {
    struct Node {
        std::uint32_t size  = 1;  // nodes of the subtree, this one included
        Token         token = -1; // that ends here: the first of several with these bytes
        std::uint8_t  byte  = 0;
        std::uint8_t  depth = 0; // from 1
    };
    std::vector<Node> nodes;
};

class TokenTrie {
public:
    // Of each token its bytes; empty: it cannot be part of a text (control tokens). `ends`: the tokens that end a text.
    // Tokens longer than 255 bytes are left out. `tokenizer`: makes these tokens of texts, and is there as long as the trie; null: there is none.
    TokenTrie(const std::vector<std::string>& bytes, std::vector<Token> ends, const Tokenizer* tokenizer = nullptr);

    // No other trie of this process has or had it.
    std::uint64_t id() const { return id_; }

    const Tokenizer* tokenizer() const { return tokenizer_; }

    int         vocab_size() const { return int(next_same_.size()); }
    std::size_t words() const { return (next_same_.size() + 63) / 64; }
    // The tokens of at most short_bytes, and the longer ones, of at most long_bytes.
    static constexpr std::uint32_t short_bytes = 32, long_bytes = 255;
    const TokenTree&               short_ones() const { return short_; }
    const TokenTree&               long_ones() const { return long_; }
    std::uint32_t                  longest() const { return longest_; } // in bytes
    const std::vector<Token>&      ends() const { return ends_; }
    std::string_view               bytes(Token t) const {
        return std::string_view(text_).substr(first_[std::size_t(t)],
                                                            first_[std::size_t(t) + 1] - first_[std::size_t(t)]);
    }
    // The next token with the same bytes, or -1.
    inline Token next_same(Token t) const { return next_same_[std::size_t(t)]; }
    // Sets or clears the bits of the token `t` and of all tokens with the same bytes.
    inline void allow(Token t, std::span<std::uint64_t> bits) const {
        for (; t >= 0; t = next_same(t)) bits[std::size_t(t) / 64] |= std::uint64_t(1) << (t % 64);
    }
    inline void forbid(Token t, std::span<std::uint64_t> bits) const {
        for (; t >= 0; t = next_same(t)) bits[std::size_t(t) / 64] &= ~(std::uint64_t(1) << (t % 64));
    }

    // Whether some token begins with these bytes and goes on.
    bool has_longer(std::string_view bytes) const;

    // Plain text can stand in a JSON string as it is: whole UTF-8 characters but quotes, backslashes and control
    // characters. The short tokens that are plain text of at most so many characters, as bits.
    std::span<const std::uint64_t> plain(std::uint32_t most_chars) const {
        return std::span(plain_).subspan(std::min(most_chars, short_bytes) * words(), words());
    }
    // All other short tokens; for each node of their tree the node with these bytes in short_ones().
    const TokenTree&               not_plain() const { return not_plain_; }
    std::span<const std::uint32_t> places() const { return places_; }
    // One such character.
    static RegexId plain_character(RegexPool& pool);

private:
    TokenTree build(const std::vector<Token>& sorted) const;

    static std::uint64_t next_id();

    std::uint64_t              id_ = next_id();
    const Tokenizer*           tokenizer_;
    std::string                text_; // of all tokens
    std::vector<std::uint32_t> first_;
    std::vector<Token>         next_same_, ends_;
    TokenTree                  short_, long_, not_plain_;
    std::uint32_t              longest_ = 0;
    std::vector<std::uint32_t> places_;
    std::vector<std::uint64_t> plain_; // [short_bytes + 1][words()]
};

} // namespace quire

module :private;

namespace quire {

bool goes_on(const TokenTree& tree, std::string_view bytes) {
    std::size_t n = 0, end = tree.nodes.size(), size = 2;
    for (char c : bytes) {
        while (n < end && tree.nodes[n].byte != static_cast<unsigned char>(c)) n += tree.nodes[n].size;
        if (n >= end) return false;
        size = tree.nodes[n].size;
        end  = n + size;
        n++;
    }
    return size > 1;
}

bool TokenTrie::has_longer(std::string_view bytes) const { return goes_on(short_, bytes) || goes_on(long_, bytes); }

// Characters of a plain text, -1: it is none.
int plain_characters(std::string_view text) {
    int n = 0;
    for (std::size_t at = 0; at < text.size(); n++) {
        const CodePoint c = utf8_next(text, at);
        if (!c.valid || c.value < 0x20 || c.value == '"' || c.value == '\\' || c.value == 0x7f) return -1;
        at += std::size_t(c.bytes);
    }
    return n;
}

RegexId TokenTrie::plain_character(RegexPool& pool) {
    return character(pool, all_but({{0, 0x1f}, {'"', '"'}, {'\\', '\\'}, {0x7f, 0x7f}}), TextSpelling::utf8);
}

std::string control_bytes(std::string_view name) { return cat(control_begins, name, control_ends); }

std::uint64_t TokenTrie::next_id() {
    static std::atomic<std::uint64_t> last = 0;
    return ++last;
}

TokenTrie::TokenTrie(const std::vector<std::string>& bytes, std::vector<Token> ends, const Tokenizer* tokenizer)
    : tokenizer_(tokenizer), next_same_(bytes.size(), -1), ends_(std::move(ends)) {
    for (const std::string& b : bytes) {
        first_.push_back(std::uint32_t(text_.size()));
        if (b.size() <= long_bytes) text_ += b;
    }
    first_.push_back(std::uint32_t(text_.size()));
    std::vector<Token> sorted;
    for (Token t = 0; t < Token(bytes.size()); t++)
        if (!this->bytes(t).empty() && std::ranges::find(ends_, t) == ends_.end()) sorted.push_back(t);
    std::sort(sorted.begin(), sorted.end(), [&](Token a, Token b) {
        const auto ta = this->bytes(a), tb = this->bytes(b);
        return ta != tb ? ta < tb : a < b;
    });
    std::vector<Token> first; // of several tokens with the same bytes
    for (Token t : sorted)
        if (!first.empty() && this->bytes(first.back()) == this->bytes(t)) {
            Token last = first.back();
            while (next_same_[std::size_t(last)] >= 0) last = next_same_[std::size_t(last)];
            next_same_[std::size_t(last)] = t;
        } else {
            first.push_back(t);
        }
    std::vector<Token> few, many; // bytes
    for (Token t : first) (this->bytes(t).size() <= short_bytes ? few : many).push_back(t);
    short_ = build(few);
    long_  = build(many);
    for (Token t : first) longest_ = std::max(longest_, std::uint32_t(this->bytes(t).size()));
    plain_.resize((short_bytes + 1) * words());
    std::vector<Token> others;
    for (Token t : few) {
        const int n = plain_characters(this->bytes(t));
        if (n < 0) others.push_back(t);
        else
            for (Token same = t; same >= 0; same = next_same(same))
                plain_[std::size_t(n) * words() + std::size_t(same) / 64] |= std::uint64_t(1) << (same % 64);
    }
    for (std::size_t i = words(); i < plain_.size(); i++) plain_[i] |= plain_[i - words()];
    not_plain_ = build(others);
    // Both trees are in the order of bytes: one walk over both.
    std::array<std::uint32_t, short_bytes + 2> next{}; // in short_, of each depth
    for (const TokenTree::Node& node : not_plain_.nodes) {
        std::uint32_t at = next[node.depth];
        while (short_.nodes[at].byte != node.byte) at += short_.nodes[at].size;
        places_.push_back(at);
        next[node.depth]      = at + short_.nodes[at].size;
        next[node.depth + 1u] = at + 1;
    }
}

TokenTree TokenTrie::build(const std::vector<Token>& sorted) const {
    TokenTree                  tree;
    std::vector<std::uint32_t> way; // nodes of the last token
    std::string_view           last;
    const auto                 leave = [&](std::size_t depth) {
        for (; way.size() > depth; way.pop_back())
            tree.nodes[way.back()].size = std::uint32_t(tree.nodes.size()) - way.back();
    };
    for (Token t : sorted) {
        const std::string_view text = bytes(t);
        std::size_t            same = 0;
        while (same < last.size() && same < text.size() && last[same] == text[same]) same++;
        leave(same);
        for (std::size_t i = same; i < text.size(); i++) {
            way.push_back(std::uint32_t(tree.nodes.size()));
            tree.nodes.push_back({1, -1, static_cast<unsigned char>(text[i]), std::uint8_t(i + 1)});
        }
        tree.nodes.back().token = t;
        last                    = text;
    }
    leave(0);
    return tree;
}

} // namespace quire
