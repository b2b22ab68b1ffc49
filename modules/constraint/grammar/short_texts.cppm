// quire.constraint.grammar.short_texts: maps an expression to a simpler one that allows the same next few bytes. Expressions with the same short
// texts get one simpler expression, so that a vocabulary's mask is found once for all of them. **Owns** the simpler expressions that it
// found; the pool is another's.
export module quire.constraint.grammar.short_texts;

import quire.constraint.regex.regex;
import quire.core.base;

export namespace quire {

class ShortTexts {
public:
    // plain_character: one character of plain text (see TokenTrie::plain).
    ShortTexts(RegexPool& pool, RegexId plain_character) : pool_(pool), plain_(plain_character) {}

    // How much plain text may follow: up to `least` characters in any case, more than `most` never.
    struct PlainRun {
        std::uint32_t least = 0, most = RegexPool::endless;
    };
    PlainRun plain_run(RegexId a);
    // An expression with the texts of `a` of at most `most` bytes, with their ends, but without the counts of repetitions that so few bytes
    // cannot exhaust.
    RegexId relaxed(RegexId a, std::uint32_t most);

    std::size_t bytes() const; // that the results take
    // Forgets the results.
    void reset();

private:
    using Kind = RegexPool::Kind;
    // Of an intersection, counts are dropped only where its texts can be completed by this many bytes from anywhere.
    static constexpr std::uint32_t most_completion = 16;
    static constexpr std::size_t   most_states     = 512;
    static constexpr std::size_t   most_searched   = 16'000;

    struct How {
        std::uint32_t most;     // bytes: counts that they cannot exhaust are dropped
        bool          counting; // within an intersection: minimum counts stay
        auto          operator<=>(const How&) const = default;
    };
    RegexId                      relax(RegexId a, How how);
    RegexId                      find_relaxed(RegexId a, How how);
    std::optional<std::uint32_t> completion(RegexId a);
    std::uint32_t                shortest(RegexId a);

    RegexPool&                                 pool_;
    RegexId                                    plain_;
    std::unordered_map<RegexId, bool>          covers_plain_;
    std::map<std::pair<RegexId, How>, RegexId> relaxed_;
    std::unordered_map<RegexId, std::uint32_t> completions_; // of states that were searched
    std::unordered_map<RegexId, std::uint32_t> shortest_;
    std::size_t                                budget_ = most_searched; // derivatives of searches
};

} // namespace quire

module :private;

namespace quire {

std::size_t ShortTexts::bytes() const {
    constexpr std::size_t entry = 64; // of a map, with its node
    return entry * (covers_plain_.size() + relaxed_.size() + completions_.size() + shortest_.size());
}

void ShortTexts::reset() {
    covers_plain_ = {}, relaxed_ = {}, completions_ = {}, shortest_ = {};
    budget_ = most_searched;
}

RegexId ShortTexts::relaxed(RegexId a, std::uint32_t most) { return relax(a, {most, false}); }

RegexId ShortTexts::relax(RegexId a, How how) {
    pool_.enter();
    const auto known = relaxed_.find({a, how});
    if (known != relaxed_.end()) return known->second;
    const RegexId found = find_relaxed(a, how);
    relaxed_.emplace(std::pair{a, how}, found);
    return found;
}

RegexId ShortTexts::find_relaxed(RegexId a, How how) {
    const RegexPool::View v = pool_.view(a);
    switch (v.kind) {
        case Kind::concat: { // a chain to the right, as long as the text of a name
            std::vector<RegexId> parts;
            bool                 same = true;
            RegexId              rest = a;
            for (; pool_.view(rest).kind == Kind::concat; rest = pool_.view(rest).b) {
                parts.push_back(relax(pool_.view(rest).a, how));
                same = same && parts.back() == pool_.view(rest).a;
            }
            parts.push_back(relax(rest, how));
            if (same && parts.back() == rest) return a;
            RegexId all = RegexPool::blank;
            for (std::size_t i = parts.size(); i-- > 0;) all = pool_.concat(parts[i], all);
            return all;
        }
        case Kind::repeat: {
            const std::uint32_t most = how.most / std::max(shortest(v.a), 1u);
            const std::uint32_t max  = v.c > most ? RegexPool::endless : v.c;
            const std::uint32_t min  = how.counting || pool_.nullable(v.a) ? v.b : std::min(v.b, most + 1);
            return min == v.b && max == v.c ? a : pool_.repeat(v.a, min, max);
        }
        case Kind::any_of:
        case Kind::all_of: {
            // The texts of an intersection depend on the texts with which all its parts can still be completed.
            const bool           any   = v.kind == Kind::any_of;
            const How            inner = any || how.counting ? how : How{how.most + most_completion, true};
            std::vector<RegexId> parts;
            bool                 same = true;
            const std::vector    list(v.list.begin(), v.list.end());
            for (RegexId part : list) {
                parts.push_back(relax(part, inner));
                same = same && parts.back() == part;
            }
            if (same) return a;
            const RegexId wide = any ? pool_.any_of(std::move(parts)) : pool_.all_of(std::move(parts));
            if (any || how.counting) return wide;
            const auto longest = completion(wide);
            return longest && *longest <= most_completion ? wide : a;
        }
        default: return a;
    }
}

// No text of it has fewer bytes.
std::uint32_t ShortTexts::shortest(RegexId a) {
    const RegexPool::View v = pool_.view(a);
    if (v.kind == Kind::nothing || pool_.nullable(a)) return 0;
    if (v.kind == Kind::bytes) return 1;
    pool_.enter();
    if (const auto known = shortest_.find(a); known != shortest_.end()) return known->second;
    constexpr std::uint64_t most  = 255;
    std::uint64_t           found = 1;
    if (v.kind == Kind::repeat) {
        found = std::uint64_t(v.b) * shortest(v.a);
    } else if (v.kind == Kind::concat) {
        found = shortest(v.a);
        for (RegexId rest = v.b; found < most; rest = pool_.view(rest).b) {
            const bool more = pool_.view(rest).kind == Kind::concat;
            found += shortest(more ? pool_.view(rest).a : rest);
            if (!more) break;
        }
    } else if (v.kind == Kind::any_of) {
        found = most;
        for (RegexId part : v.list) found = std::min<std::uint64_t>(found, shortest(part));
    }
    return shortest_[a] = std::uint32_t(std::min(found, most));
}

// Bytes with which a text can be brought to an end, from wherever it can be at all. Nothing: too many states to look at.
std::optional<std::uint32_t> ShortTexts::completion(RegexId a) {
    if (const auto known = completions_.find(a); known != completions_.end()) return known->second;
    std::vector<RegexId>                       states{a};
    std::unordered_map<RegexId, std::uint32_t> index{{a, 0}};
    std::vector<std::vector<std::uint32_t>>    before(1); // of each state: the states that lead to it
    // The steps of an interrupted search do not count, because the search runs again.
    std::size_t used = 0;
    const auto  over = [&]() -> std::optional<std::uint32_t> {
        budget_ -= used;
        return {};
    };
    for (std::uint32_t s = 0; s < states.size(); s++)
        for (int c = 0; c < pool_.n_classes(); c++) {
            if (used == budget_) return over();
            used++;
            const RegexId to = pool_.derive(states[s], pool_.byte_of(c));
            if (to == RegexPool::nothing) continue;
            const auto [at, added] = index.emplace(to, std::uint32_t(states.size()));
            if (added) states.push_back(to), before.emplace_back();
            if (states.size() > most_states) return over();
            if (before[at->second].empty() || before[at->second].back() != s) before[at->second].push_back(s);
        }
    std::vector<std::uint32_t> way, distance(states.size(), RegexPool::endless);
    for (std::uint32_t s = 0; s < states.size(); s++)
        if (pool_.nullable(states[s])) distance[s] = 0, way.push_back(s);
    std::uint32_t longest = 0;
    for (std::size_t i = 0; i < way.size(); i++) {
        longest = distance[way[i]]; // in ascending order
        for (std::uint32_t s : before[way[i]])
            if (distance[s] == RegexPool::endless) distance[s] = longest + 1, way.push_back(s);
    }
    budget_ -= used;
    for (RegexId s : states) completions_.emplace(s, longest);
    return longest;
}

ShortTexts::PlainRun ShortTexts::plain_run(RegexId a) {
    pool_.enter();
    const ByteSet first = pool_.first_bytes(a), plain = pool_.first_bytes(plain_);
    bool          none = true;
    for (std::size_t w = 0; w < 4; w++) none = none && (first.words[w] & plain.words[w]) == 0;
    if (none) return {0, 0};
    const RegexPool::View v = pool_.view(a);
    switch (v.kind) {
        case Kind::concat: {
            if (pool_.view(v.a).kind != Kind::repeat) return {};
            PlainRun run = plain_run(v.a);
            if (plain_run(v.b).most != 0) run.most = RegexPool::endless;
            return run;
        }
        case Kind::repeat: {
            auto known = covers_plain_.find(v.a);
            if (known == covers_plain_.end())
                known = covers_plain_.emplace(v.a, pool_.is_void(pool_.minus(plain_, v.a))).first;
            if (!known->second) return {};
            return {v.c, pool_.is_unit(v.a) ? v.c : RegexPool::endless};
        }
        case Kind::any_of:
        case Kind::all_of: {
            const std::vector list(v.list.begin(), v.list.end());
            if (list.size() > 8) return {};
            const bool any = v.kind == Kind::any_of;
            PlainRun   all = any ? PlainRun{0, 0} : PlainRun{RegexPool::endless, RegexPool::endless};
            for (RegexId part : list) {
                const PlainRun one = plain_run(part);
                all.most           = any ? std::max(all.most, one.most) : std::min(all.most, one.most);
                if (any) all.least = std::max(all.least, one.least);
                else all.least = pool_.view(part).kind == Kind::repeat ? std::min(all.least, one.least) : 0;
            }
            return all;
        }
        default: return {};
    }
}

} // namespace quire
