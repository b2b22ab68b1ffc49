// quire.constraint.constraint: a compiled constraint of texts (Constraint, shared), and the state of one text under it (ConstraintState,
// a value that is copied where a sequence forks): which tokens may come next, as bits. **Owns** automata and masks.
export module quire.constraint.constraint;

import quire.constraint.forced_tokens;
import quire.constraint.grammar.grammar;
import quire.constraint.grammar.lexeme_masks;
import quire.constraint.grammar.mask_walk;
import quire.constraint.grammar.recogniser;
export import quire.constraint.grammar.token_trie;
import quire.constraint.memory;
export import quire.constraint.work;
import quire.core.base;
export import quire.schedule.token_filter;

export namespace quire {

// **Owns** the grammar with its automata, and masks that come again. Any thread may use it; one at a time works in it. Automata and masks grow
// with the texts. When they take more than the limits allow, they are forgotten, and the present texts make them again as they go on: no
// text fails because of another.
class Constraint final : public ConstraintMemory::Holder {
public:
    // The grammar is finish()ed.
    Constraint(Grammar grammar, const GrammarLimits& limits = {});
    ~Constraint() { leave(); }

private:
    friend class ConstraintState;
    bool        give_back() override;
    void        reset();
    std::size_t bytes() const;
    void        count(const Effort& effort);

    void use(const TokenTrie& trie);
    // Whole masks that took much work, such as masks of free text, where a lexeme may end anywhere.
    static constexpr std::size_t much_work = 16'384, most_whole_bytes = std::size_t(8) << 20;

    Machine                                                                machine_;
    LexemeMasks                                                            masks_;
    std::unordered_map<StateKey, std::vector<std::uint64_t>, StateKeyHash> whole_;
    std::size_t                                                            whole_bytes_ = 0;
    std::uint64_t                             epoch_ = 1; // how often the automata began anew
    std::shared_ptr<std::atomic<std::size_t>> state_bytes_ =
        std::make_shared<std::atomic<std::size_t>>(0); // that texts take
};

// One text under a constraint. Depends only on the accepted tokens.
class ConstraintState final : public TokenFilter {
public:
    ConstraintState(std::shared_ptr<Constraint> constraint, std::shared_ptr<const TokenTrie> tokens);

    void push(Token token) override {
        pushed_.push_back(token);
        ahead_ = {};
    }
    Result<bool>                      mask(std::span<std::uint64_t> bits, const Effort& effort) override;
    Result<void>                      mask(std::span<std::uint64_t> bits);
    std::size_t                       words() const override { return tokens_->words(); }
    Result<bool>                      prepare(bool forced, const Effort& effort) override;
    std::optional<std::vector<Token>> forced_tokens(const Effort& effort) override;
    const void*                       shared() const override { return constraint_.get(); }
    const TokenTrie&                  tokens() const { return *tokens_; }
    // Goes on by a token, or by bytes. False: not allowed, or too much work; the state is unchanged. An end token ends the text.
    bool accept(Token token);
    bool accept_bytes(std::string_view bytes);
    // Whether the text is complete as it is; whether an end token came. Tokens pushed since the last mask do not count.
    bool may_end() const { return may_end_; }
    bool ended() const { return ended_; }
    // The bytes that must come next, at most `most_forced`. None: ended early by `effort`.
    static constexpr std::size_t most_forced = 256;
    std::optional<std::string>   forced_bytes(const Effort& effort);
    std::string                  forced_bytes() { return forced_bytes({}).value_or(""); }
    // Index of the byte at which accept_bytes refused.
    std::size_t refused_at() const { return refused_at_; }
    // The rows that are kept of the text so far, for tests of bounds.
    std::size_t rows() const { return rows_.size(); }

private:
    // The bytes of a text; they are counted with its constraint, once for each copy.
    class Counted {
    public:
        Counted() = default;
        explicit Counted(std::shared_ptr<std::atomic<std::size_t>> sum) : sum_(std::move(sum)) {}
        Counted(const Counted& other) : sum_(other.sum_) { set(other.bytes_); }
        Counted(Counted&& other) noexcept : sum_(std::move(other.sum_)), bytes_(std::exchange(other.bytes_, 0)) {}
        Counted& operator=(Counted other) noexcept {
            std::swap(sum_, other.sum_);
            std::swap(bytes_, other.bytes_);
            return *this;
        }
        ~Counted() { set(0); }
        void set(std::size_t bytes) {
            if (sum_) *sum_ += bytes - bytes_; // modulo 2^64
            bytes_ = bytes;
        }

    private:
        std::shared_ptr<std::atomic<std::size_t>> sum_;
        std::size_t                               bytes_ = 0;
    };
    // The results of prepare().
    struct Ahead {
        std::optional<std::string>                                forced;
        std::shared_ptr<const Result<std::vector<std::uint64_t>>> mask;
    };

    template <class Body>
    Result<bool> work(const Effort& effort, const Body& body);
    void         begin_again();
    void         read_pushed();
    bool         go_on(std::string_view bytes);
    bool         take(Token token);
    void         make_mask(std::span<std::uint64_t> bits);
    std::string  find_forced();

    std::shared_ptr<Constraint>      constraint_;
    std::shared_ptr<const TokenTrie> tokens_;
    Rows                             rows_;
    std::vector<Thread>              threads_;
    std::string                      text_; // so far: when the automata begin anew, the text goes through them again
    bool                             may_end_ = false, ended_ = false;
    std::vector<Token>               pushed_;    // not read yet
    std::uint64_t                    epoch_ = 0; // of the automata of rows and threads; 0: none yet
    Ahead                            ahead_;
    Counted                          counted_;
    std::size_t                      refused_at_ = 0, compact_at_ = 4096;
};

} // namespace quire

module :private;

namespace quire {

// Of a mutex; one that does not wait may have none.
class Lock {
public:
    Lock(std::mutex& mutex, bool waits) : mutex_(mutex), has_(!waits && mutex.try_lock()) {
        if (!waits) return;
        mutex.lock();
        has_ = true;
    }
    ~Lock() {
        if (has_) mutex_.unlock();
    }
    Lock(const Lock&)               = delete;
    Lock&    operator=(const Lock&) = delete;
    explicit operator bool() const { return has_; }

private:
    std::mutex& mutex_;
    bool        has_;
};

Constraint::Constraint(Grammar grammar, const GrammarLimits& limits)
    : machine_(std::move(grammar), limits), masks_(machine_) {
    used();
    holds(bytes());
    join();
}

// Without the texts.
std::size_t Constraint::bytes() const { return machine_.bytes() + masks_.bytes() + whole_bytes_; }

// Under the lock.
void Constraint::reset() {
    epoch_++;
    masks_.reset();
    whole_       = {};
    whole_bytes_ = 0;
    machine_.reset();
    holds(bytes() + *state_bytes_);
}

bool Constraint::give_back() {
    const Lock lock(machine_.mutex(), false);
    if (!lock) return false;
    reset();
    return true;
}

// Under the lock, while work goes on.
void Constraint::count(const Effort& effort) {
    using Why                = WorkEnded::Why;
    ConstraintMemory& memory = ConstraintMemory::all();
    const std::size_t own    = bytes();
    holds(own + *state_bytes_);
    if (own > machine_.limits().bytes) throw WorkEnded{Why::memory};
    if (!memory.over()) return;
    if (effort.until) {
        if (own <= memory.share()) return; // others make room
        throw WorkEnded{Why::interrupted};
    }
    if (!memory.make_room(*this, own)) throw WorkEnded{Why::memory};
}

void Constraint::use(const TokenTrie& trie) {
    if (!masks_.use(trie)) return;
    whole_.clear();
    whole_bytes_ = 0;
}

// -- the state of a text

ConstraintState::ConstraintState(std::shared_ptr<Constraint> constraint, std::shared_ptr<const TokenTrie> tokens)
    : constraint_(std::move(constraint)), tokens_(std::move(tokens)), counted_(constraint_->state_bytes_) {
    (void)work({}, [] {}); // where that takes too much, the first mask says so
}

std::string sentence(WorkEnded::Why why, const GrammarLimits& limits) {
    using Why = WorkEnded::Why;
    if (why == Why::depth) return "the constraint's expressions are nested too deep";
    if (why == Why::memory)
        return cat("the constraint takes more memory than is allowed (", limits.bytes >> 20, " MiB, ",
                   limits.lexer_states, " lexer states, ", limits.items, " items for one token, ", limits.kept_items,
                   " for a text)");
    return cat("the constraint takes more work for one token than is allowed (", limits.work, " steps, ", limits.rows,
               " rows)");
}

// Runs `body` with the automata of this state. If `body` throws, the rows that it began are forgotten. False: ended early by `effort`.
template <class Body>
Result<bool> ConstraintState::work(const Effort& effort, const Body& body) {
    Constraint& c = *constraint_;
    const Lock  lock(c.machine_.mutex(), !effort.until);
    if (!lock) return false;
    c.used();
    for (bool again = false;; again = true) {
        WorkBudget             budget(c.machine_.limits().work, effort, [&] { c.count(effort); });
        const RegexPool::Under under(c.machine_.pool(), budget);
        const bool             fresh = c.machine_.lexer().size() <= 2; // no text has added states
        std::string            why;
        try {
            if (epoch_ != c.epoch_) {
                budget.allow(text_.size() * 4096); // this work was counted before
                begin_again();
            }
            body();
            rows_.shrink();
            counted_.set(rows_.bytes() + text_.capacity());
            c.holds(c.bytes() + *c.state_bytes_);
            return true;
        } catch (const WorkEnded& e) {
            rows_.shrink();
            if (e.why == WorkEnded::Why::interrupted || (e.why == WorkEnded::Why::memory && effort.until)) return false;
            why = sentence(e.why, c.machine_.limits());
            if (e.why != WorkEnded::Why::memory) return fail_with(ErrorKind::limit, why);
        } catch (const std::bad_alloc&) {
            if (effort.until) return false;
            why = "there is no memory for the constraint";
        }
        // Others may have filled the automata: once more with empty ones.
        c.reset();
        if (again || fresh) return fail_with(ErrorKind::limit, why);
    }
}

// From the beginning, in automata that know nothing of the text.
void ConstraintState::begin_again() {
    Machine&            m = constraint_->machine_;
    Rows                rows;
    std::vector<Thread> threads = rows.begin(m), next;
    bool                ends    = rows.ends(0);
    std::size_t         compact = 4096;
    for (char c : text_) {
        rows.step(m, threads, static_cast<unsigned char>(c), next, ends);
        if (next.empty() && !ends)
            throw WorkEnded{WorkEnded::Why::work}; // the search for void expressions ended early this time
        std::swap(threads, next);
        if (rows.items() <= compact) continue;
        rows.compact(threads);
        compact = std::max<std::size_t>(4096, 2 * rows.items());
    }
    rows_       = std::move(rows);
    threads_    = std::move(threads);
    compact_at_ = compact;
    may_end_    = ends;
    epoch_      = constraint_->epoch_;
    if (ended_) threads_.clear();
}

// One step for as many bytes, or as it was. The rows before it are needed where it fails: only then they cannot be forgotten.
bool ConstraintState::go_on(std::string_view bytes) {
    Machine&            m       = constraint_->machine_;
    const std::size_t   n_rows  = rows_.size();
    std::vector<Thread> threads = threads_, next;
    bool                ends    = may_end_;
    try {
        text_.reserve(text_.size() + bytes.size());
        for (std::size_t i = 0; i < bytes.size(); i++) {
            rows_.step(m, threads, static_cast<unsigned char>(bytes[i]), next, ends);
            if (next.empty() && !ends) {
                rows_.cut(n_rows);
                refused_at_ = i;
                return false;
            }
            std::swap(threads, next);
        }
        if (rows_.items() > compact_at_) {
            rows_.compact(threads);
            compact_at_ = std::max<std::size_t>(4096, 2 * rows_.items());
            if (rows_.items() > m.limits().kept_items) throw WorkEnded{WorkEnded::Why::memory};
        }
    } catch (...) {
        rows_.abandon(n_rows);
        throw;
    }
    threads_ = std::move(threads);
    may_end_ = ends;
    text_ += bytes;
    ahead_ = {};
    return true;
}

bool ConstraintState::take(Token token) {
    if (ended_) return false;
    if (std::ranges::find(tokens_->ends(), token) != tokens_->ends().end()) {
        if (!may_end_) return false;
        ended_ = true;
        threads_.clear();
        ahead_ = {};
        return true;
    }
    const std::string_view bytes = token >= 0 && token < tokens_->vocab_size() ? tokens_->bytes(token) : "";
    return !bytes.empty() && go_on(bytes);
}

void ConstraintState::read_pushed() {
    while (!pushed_.empty()) {
        (void)take(pushed_.front());
        pushed_.erase(pushed_.begin());
    }
}

void ConstraintState::make_mask(std::span<std::uint64_t> bits) {
    Constraint& c = *constraint_;
    Machine&    m = c.machine_;
    std::ranges::fill(bits, 0);
    const auto end = [&] {
        for (Token t : tokens_->ends()) bits[std::size_t(t) / 64] |= std::uint64_t(1) << (t % 64);
    };
    if (ended_) return end();
    c.use(*tokens_);
    const std::size_t n_rows = rows_.size(), before = m.pool().budget()->spent();
    try {
        StateKey key;
        key.add(may_end_);
        for (const Thread& t : threads_) {
            const StateKey row = rows_.key(t.row);
            key.add(row.a), key.add(row.b), key.add(std::uint64_t(t.state));
        }
        if (const auto known = c.whole_.find(key); known != c.whole_.end()) {
            std::ranges::copy(known->second, bits.begin());
            return;
        }
        MaskWalk walk(m, rows_, *tokens_, bits);
        // The mask of one lexeme does not depend on other lexemes: a mask is the union of the lexemes' masks.
        std::vector<std::uint64_t>      used; // masks
        std::vector<GrammarLexer::Pair> pairs;
        for (const Thread& t : threads_) {
            const auto of_thread = m.lexer().pairs(t.state);
            pairs.assign(of_thread.begin(), of_thread.end());
            for (const GrammarLexer::Pair& p : pairs)
                for (const bool long_ones : {false, true}) {
                    const RegexId             left = c.masks_.relaxed(*tokens_, p.left, long_ones);
                    const LexemeMasks::Shared mask = c.masks_.mask_of(*tokens_, left, long_ones);
                    m.pool().spend(1 + used.size() / 8);
                    if (std::ranges::find(used, LexemeMasks::key_of(left, long_ones)) == used.end()) {
                        for (std::size_t w = 0; w < mask->bits.size(); w++) bits[w] |= mask->bits[w];
                        for (Token token : mask->tokens) tokens_->allow(token, bits);
                        m.pool().spend(1 + mask->bits.size() / 16 + mask->tokens.size());
                        used.push_back(LexemeMasks::key_of(left, long_ones));
                    }
                    for (const auto& exit : mask->exits) walk.exit(*exit.tree, exit.node, t.row, p.lexeme, exit.left);
                }
        }
        rows_.cut(n_rows);
        if (may_end_) end();
        if (m.pool().budget()->spent() - before > Constraint::much_work) {
            const std::size_t bytes = bits.size_bytes() + 96;
            if (c.whole_bytes_ + bytes > Constraint::most_whole_bytes) c.whole_ = {}, c.whole_bytes_ = 0;
            if (c.whole_.emplace(key, std::vector<std::uint64_t>(bits.begin(), bits.end())).second)
                c.whole_bytes_ += bytes;
        }
    } catch (...) {
        rows_.abandon(n_rows);
        throw;
    }
}

Result<bool> ConstraintState::mask(std::span<std::uint64_t> bits, const Effort& effort) {
    if (ahead_.mask) {
        const Result<std::vector<std::uint64_t>>& made = *ahead_.mask;
        std::ranges::fill(bits, 0);
        if (!made) return std::unexpected(made.error());
        std::ranges::copy(*made, bits.begin());
        return true;
    }
    Result<bool> made = work(effort, [&] {
        read_pushed();
        make_mask(bits);
    });
    if (!made || !*made) {
        std::ranges::fill(bits, 0);
        return made;
    }
    if (std::ranges::all_of(bits, [](std::uint64_t w) { return w == 0; }))
        return fail("no token of the vocabulary can go on with the text that the constraint asks for");
    return true;
}

Result<void> ConstraintState::mask(std::span<std::uint64_t> bits) {
    if (Result<bool> made = mask(bits, {}); !made) return std::unexpected(made.error());
    return {};
}

Result<bool> ConstraintState::prepare(bool forced, const Effort& effort) {
    if (forced) {
        ahead_.forced = forced_bytes(effort);
        if (!ahead_.forced || !ahead_.forced->empty()) return ahead_.forced.has_value();
    }
    std::vector<std::uint64_t> bits(words());
    Result<bool>               made = mask(bits, effort);
    if (made && !*made) return false;
    ahead_.mask = std::make_shared<const Result<std::vector<std::uint64_t>>>(
        made ? Result<std::vector<std::uint64_t>>(std::move(bits)) : std::unexpected(made.error()));
    return made;
}

bool ConstraintState::accept(Token token) {
    bool went = false;
    return work({},
                [&] {
                    read_pushed();
                    went = take(token);
                }) &&
           went;
}

bool ConstraintState::accept_bytes(std::string_view bytes) {
    bool went = false;
    return work({},
                [&] {
                    read_pushed();
                    went = ended_ ? bytes.empty() : go_on(bytes);
                }) &&
           went;
}

std::string ConstraintState::find_forced() {
    std::string         forced;
    Machine&            m       = constraint_->machine_;
    const std::size_t   n_rows  = rows_.size();
    std::vector<Thread> threads = threads_, next;
    bool                ends    = may_end_;
    try {
        while (!ends && !ended_ && forced.size() < most_forced) {
            int only = -1;
            m.pool().spend(64);
            for (int b = 0; b < 256 && only != -2; b++)
                for (const Thread& t : threads)
                    if (m.lexer().step(t.state, b) != GrammarLexer::dead) {
                        only = only == -1 ? b : -2;
                        break;
                    }
            if (only < 0) break;
            rows_.step(m, threads, only, next, ends);
            if (next.empty() && !ends) break;
            std::swap(threads, next);
            forced += char(only);
        }
    } catch (...) {
        rows_.abandon(n_rows);
        throw;
    }
    rows_.cut(n_rows);
    return forced;
}

// Where it takes too much nothing is forced: the mask will say so.
std::optional<std::string> ConstraintState::forced_bytes(const Effort& effort) {
    if (ahead_.forced) return ahead_.forced;
    std::string        forced;
    const Result<bool> found = work(effort, [&] {
        read_pushed();
        forced = find_forced();
    });
    if (found && !*found) return std::nullopt;
    return forced;
}

std::optional<std::vector<Token>> ConstraintState::forced_tokens(const Effort& effort) {
    const std::optional<std::string> forced = forced_bytes(effort);
    if (!forced) return std::nullopt;
    return tokens_of_forced(*forced, *tokens_);
}

} // namespace quire
