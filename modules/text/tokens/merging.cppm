// quire.text.tokens.merging: merges neighbouring pieces of a text, the best pair first, as byte pair encoding does. Owns nothing.
export module quire.text.tokens.merging;

import quire.core.base;

export namespace quire {

// A run of bytes on its way to being one token, in a list of its neighbours.
struct Symbol {
    std::uint32_t start, bytes; // bytes 0: merged into the one before it
    std::int32_t  prev, next;
    Token         id;
};

// A pair that may still be merged. Smaller orders first, the leftmost of equals.
struct Candidate {
    double        order; // a score or a rank
    std::int32_t  left, right;
    std::uint32_t bytes; // of both when the entry was made: one of them has changed if they differ now
    Token         id;
};

// The memory of merge_all(), used again for the next word.
struct Merging {
    std::vector<Symbol>    symbols;
    std::vector<Candidate> heap;
    std::string            text;
};

// No token is sought in more bytes than these at once: merging takes some 90 times their room.
inline constexpr std::size_t longest_run = std::size_t(1) << 20;

// Merges two neighbours as long as a merge is known, the best first and the leftmost of equals: the queue holds one
// entry per pair that ever came to be neighbours, so the work is n log n however long the text is.
// best(left, right) → {order, id}: the merge of the two; id -1: none.
template <class Best>
void merge_all(Merging& m, const Best& best) {
    auto& [symbols, heap, text] = m;
    for (std::size_t i = 0; i < symbols.size(); i++) {
        symbols[i].prev = std::int32_t(i) - 1;
        symbols[i].next = i + 1 < symbols.size() ? std::int32_t(i) + 1 : -1;
    }
    auto later = [](const Candidate& a, const Candidate& b) {
        return a.order != b.order ? a.order > b.order : a.left > b.left;
    };
    heap.clear();
    auto offer = [&](std::int32_t left, std::int32_t right) {
        if (left < 0 || right < 0) return;
        const Symbol &a = symbols[std::size_t(left)], &b = symbols[std::size_t(right)];
        auto [order, id] = best(a, b);
        if (id < 0) return;
        heap.push_back({order, left, right, a.bytes + b.bytes, id});
        std::push_heap(heap.begin(), heap.end(), later);
    };
    for (std::size_t i = 1; i < symbols.size(); i++) offer(std::int32_t(i) - 1, std::int32_t(i));
    while (!heap.empty()) {
        std::pop_heap(heap.begin(), heap.end(), later);
        const Candidate e = heap.back();
        heap.pop_back();
        Symbol &a = symbols[std::size_t(e.left)], &b = symbols[std::size_t(e.right)];
        if (a.bytes == 0 || b.bytes == 0 || a.next != e.right || a.bytes + b.bytes != e.bytes) continue;
        a.bytes = e.bytes;
        a.id    = e.id;
        a.next  = b.next;
        b.bytes = 0;
        if (a.next >= 0) symbols[std::size_t(a.next)].prev = e.left;
        offer(a.prev, e.left);
        offer(e.left, a.next);
    }
}

} // namespace quire
