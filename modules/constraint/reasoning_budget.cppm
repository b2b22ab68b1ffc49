// quire.constraint.reasoning_budget: the marks around a model's reasoning as tokens (ReasoningMarks, shared), and how much of its budget one
// text has used (ReasoningBudget, a value that is copied where a sequence forks). **Owns** the tables of the marks.
export module quire.constraint.reasoning_budget;

import quire.core.base;
export import quire.schedule.token_filter;
export import quire.text.tokens.tokenizer;

export namespace quire {

// **Owns** a table for each mark: which of its bytes a text ends with behind each token, whatever tokens spell it.
class ReasoningMarks {
public:
    ReasoningMarks(std::string_view begin, std::string_view end, const Tokenizer& tokenizer);

private:
    friend class ReasoningBudget;
    // A text ended with the first `matched` bytes of the mark: with how many it ends behind the token; all: the mark was there.
    struct Mark {
        std::size_t               bytes = 0;
        std::vector<std::uint8_t> next; // [matched × vocab]
    };
    Mark        mark_of(std::string_view text, const std::vector<std::string>& tokens) const;
    std::size_t step(const Mark& mark, std::size_t matched, Token token) const {
        return mark.next[matched * vocab_ + std::size_t(token)];
    }

    std::size_t              vocab_ = 0;
    Mark                     begin_, end_;
    std::vector<Token>       closing_; // the tokens that are forced
    std::vector<std::int8_t> open_;    // by token: bytes that its last character lacks; -n: it has only n bytes of one
};

// One answer. Depends on its tokens alone, until `stop` becomes true.
class ReasoningBudget final : public TokenForcer {
public:
    // `most`: tokens of reasoning. `begun`: the prompt ends with the mark that begins it. `stop`: another thread sets it, and the budget is used
    // up from the next token on; or null.
    ReasoningBudget(std::shared_ptr<const ReasoningMarks> marks, int most, bool begun,
                    std::shared_ptr<const std::atomic<bool>> stop = {});

    void accept(Token token) override;
    // The token that has to come next when the budget is used up: the tokens of the mark that ends reasoning, one after the other. No
    // character is cut: its other bytes come first.
    std::optional<Token> forced() const override;
    void                 forced_tokens(int n, std::vector<Token>& tokens) const override;
    int                  free_tokens() const override;

private:
    enum class State : std::uint8_t { outside, inside, closing };
    void begin();
    void check_budget();

    std::shared_ptr<const ReasoningMarks>    marks_;
    std::shared_ptr<const std::atomic<bool>> stop_;
    State                                    state_ = State::outside;
    int                                      most_ = 0, used_ = 0;
    std::size_t                              matched_ = 0; // bytes of the mark that is looked for
    std::size_t                              closed_  = 0; // tokens of the end mark that the text ends with
    int                                      open_    = 0; // bytes that the last character lacks
};

} // namespace quire

module :private;

namespace quire {

ReasoningMarks::ReasoningMarks(std::string_view begin, std::string_view end, const Tokenizer& tokenizer)
    : vocab_(std::size_t(tokenizer.vocab_size())), closing_(encode_inside(tokenizer, end)) {
    check(!begin.empty() && !end.empty() && std::max(begin.size(), end.size()) < 256,
          "a mark without bytes, or too long");
    std::vector<std::string> tokens;
    tokens.reserve(vocab_);
    for (Token t = 0; t < tokenizer.vocab_size(); t++) tokens.push_back(tokenizer.bytes(t, true));
    begin_ = mark_of(begin, tokens);
    end_   = mark_of(end, tokens);
    for (const std::string& bytes : tokens) {
        int n = 0; // bytes that continue a character, at the end
        while (n < std::min(int(bytes.size()), 3) && (bytes[bytes.size() - 1 - std::size_t(n)] & 0xc0) == 0x80) n++;
        if (n == int(bytes.size())) {
            open_.push_back(std::int8_t(-n));
            continue;
        }
        const auto lead = static_cast<unsigned char>(bytes[bytes.size() - 1 - std::size_t(n)]);
        const int  all  = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : lead >= 0xc0 ? 1 : 0;
        open_.push_back(std::int8_t(std::max(all - n, 0)));
    }
}

ReasoningMarks::Mark ReasoningMarks::mark_of(std::string_view text, const std::vector<std::string>& tokens) const {
    // after[m][b]: matched bytes behind m matched ones and byte b.
    std::vector<std::array<std::uint8_t, 256>> after(text.size());
    for (std::size_t m = 0; m < text.size(); m++)
        for (std::size_t b = 0; b < 256; b++) {
            const std::string seen = cat(text.substr(0, m), char(b));
            std::size_t       n    = std::min(seen.size(), text.size());
            while (!seen.ends_with(text.substr(0, n))) n--;
            after[m][b] = std::uint8_t(n);
        }
    Mark mark{text.size(), std::vector<std::uint8_t>(text.size() * vocab_)};
    for (std::size_t m = 0; m < text.size(); m++)
        for (std::size_t t = 0; t < vocab_; t++) {
            std::size_t matched = m;
            for (char c : tokens[t])
                if (matched < text.size()) matched = after[matched][static_cast<unsigned char>(c)];
            mark.next[m * vocab_ + t] = std::uint8_t(matched);
        }
    return mark;
}

ReasoningBudget::ReasoningBudget(std::shared_ptr<const ReasoningMarks> marks, int most, bool begun,
                                 std::shared_ptr<const std::atomic<bool>> stop)
    : marks_(std::move(marks)), stop_(std::move(stop)), most_(most) {
    if (begun) begin();
}

void ReasoningBudget::begin() {
    state_ = State::inside;
    used_ = open_ = 0;
    matched_ = closed_ = 0;
    check_budget();
}

void ReasoningBudget::check_budget() {
    if ((used_ >= most_ || (stop_ && *stop_)) && open_ == 0 && !marks_->closing_.empty()) state_ = State::closing;
}

void ReasoningBudget::accept(Token token) {
    const ReasoningMarks& m = *marks_;
    if (std::size_t(token) >= m.vocab_) return; // the model may have more tokens than its tokenizer
    if (state_ == State::outside) {
        matched_ = m.step(m.begin_, matched_, token);
        if (matched_ == m.begin_.bytes) begin();
        return;
    }
    if (state_ == State::closing && token != m.closing_[closed_]) { // it was not possible
        state_   = State::outside;
        matched_ = 0;
        return;
    }
    closed_  = token == m.closing_[closed_] ? closed_ + 1 : std::size_t(token == m.closing_[0]);
    matched_ = m.step(m.end_, matched_, token);
    if (matched_ == m.end_.bytes || closed_ == m.closing_.size()) {
        state_   = State::outside;
        matched_ = 0;
        return;
    }
    if (state_ == State::closing) return;
    used_++;
    const auto open = m.open_[std::size_t(token)];
    open_           = open >= 0 ? open : std::max(open_ + open, 0);
    check_budget();
}

std::optional<Token> ReasoningBudget::forced() const {
    if (state_ != State::closing) return std::nullopt;
    return marks_->closing_[closed_];
}

void ReasoningBudget::forced_tokens(int n, std::vector<Token>& tokens) const {
    if (state_ != State::closing) return;
    for (std::size_t i = closed_; i < marks_->closing_.size() && n > 0; i++, n--) tokens.push_back(marks_->closing_[i]);
}

int ReasoningBudget::free_tokens() const {
    if (state_ == State::closing || (stop_ && *stop_)) return 0;
    return state_ == State::outside ? most_ : std::max(most_ - used_ - 1, 0); // the mark that begins takes a token
}

} // namespace quire
