// quire.text.tokens.byte_trie: many texts in a tree of their bytes, to find the ones with which a place begins. **Owns** the tree.
export module quire.text.tokens.byte_trie;

import quire.core.base;

export namespace quire {

class ByteTrie {
public:
    using Node = std::uint32_t;

    static constexpr Node        root = 0, none = ~Node(0);
    static constexpr std::size_t most_bytes = (std::size_t(1) << 31) - 1; // of all texts together

    ByteTrie() : nodes_(1) { first_.fill(none); }
    // Empty texts are left out; of equal ones the first counts. The texts are not kept.
    explicit ByteTrie(std::vector<std::pair<std::string_view, Token>> texts);

    Node child(Node node, char byte) const {
        const auto b = static_cast<unsigned char>(byte);
        if (node == root) return first_[b];
        for (Node c = nodes_[node].children, end = c + nodes_[node].n; c < end; c++)
            if (nodes_[c].byte == b) return c;
        return none;
    }
    Token id(Node node) const { return nodes_[node].id; } // of the text that ends here, or -1

    // The longest text that begins at text[at]: its id and length, or -1 and 0.
    std::pair<Token, std::size_t> longest(std::string_view text, std::size_t at) const {
        std::pair<Token, std::size_t> best{-1, 0};
        Node                          node = root;
        for (std::size_t i = at; i < text.size() && (node = child(node, text[i])) != none; i++)
            if (id(node) >= 0) best = {id(node), i + 1 - at};
        return best;
    }

private:
    struct Child {
        Token         id       = -1;
        Node          children = 0; // the first; they lie side by side
        std::uint16_t n        = 0;
        std::uint8_t  byte     = 0;
    };
    std::vector<Child>    nodes_;
    std::array<Node, 256> first_{}; // the root's children by byte
};

} // namespace quire

module :private;

namespace quire {

ByteTrie::ByteTrie(std::vector<std::pair<std::string_view, Token>> texts) : ByteTrie() {
    std::erase_if(texts, [](const auto& t) { return t.first.empty(); });
    std::stable_sort(texts.begin(), texts.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    struct Part {
        std::size_t begin, end, depth; // texts that are equal in their first `depth` bytes
        Node        node;
    };
    std::vector<Part> parts{{0, texts.size(), 0, root}};
    for (std::size_t next = 0; next < parts.size(); next++) { // level by level, so that children lie side by side
        auto [begin, end, depth, node] = parts[next];
        if (begin < end && texts[begin].first.size() == depth) nodes_[node].id = texts[begin].second;
        while (begin < end && texts[begin].first.size() == depth) begin++;
        nodes_[node].children = Node(nodes_.size());
        while (begin < end) {
            std::size_t last = begin;
            const char  byte = texts[begin].first[depth];
            while (last < end && texts[last].first[depth] == byte) last++;
            Child child;
            child.byte = static_cast<unsigned char>(byte);
            nodes_[node].n++;
            parts.push_back({begin, last, depth + 1, Node(nodes_.size())});
            nodes_.push_back(child);
            begin = last;
        }
        if (next > 4096 && next * 2 > parts.size()) { // finished parts need no room
            parts.erase(parts.begin(), parts.begin() + std::ptrdiff_t(next) + 1);
            next = ~std::size_t(0);
        }
    }
    for (Node c = nodes_[root].children, end = c + nodes_[root].n; c < end; c++) first_[nodes_[c].byte] = c;
}

} // namespace quire
