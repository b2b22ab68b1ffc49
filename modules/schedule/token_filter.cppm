// quire.schedule.token_filter: interfaces: TokenFilter says which tokens may come next in a text, TokenForcer which token has to come,
// TokenGuesser which tokens are likely to come. The scheduler copies them where a sequence forks, and tells the first two each token; the
// decoder asks them. Owns nothing.
export module quire.schedule.token_filter;

import quire.core.base;

export namespace quire {

// The conditions that end a piece of work early.
struct Effort {
    using Time                    = std::chrono::steady_clock::time_point;
    const std::atomic<bool>* stop = nullptr; // when it becomes true
    // The work ends at this time. With a time the work waits for no other thread, and frees nothing large.
    std::optional<Time> until{};
};

// Restricts the tokens of one text. Depends only on the tokens of that text.
class TokenFilter {
public:
    virtual ~TokenFilter() = default;

    // The text goes on by a token that mask() allowed. The filter reads the token when it makes the next mask, while a step runs.
    virtual void push(Token token) = 0;
    // One bit for each token of the vocabulary, in `words()` words: whether the token may come next. End tokens may come where the text may
    // end. Error: no token may come, or a limit is exceeded; then all bits are 0. False: ended early by `effort`; the next call goes on.
    virtual Result<bool> mask(std::span<std::uint64_t> bits, const Effort& effort) = 0;
    virtual std::size_t  words() const                                             = 0;
    // Makes the next mask in advance; with `forced` the forced_tokens(), and the mask only if there are none. The next call of mask() or
    // forced_tokens() finds the result, or the error. Returns as mask() does.
    virtual Result<bool> prepare(bool forced, const Effort& effort) = 0;
    // The tokens for which there is no choice. None: ended early by `effort`.
    virtual std::optional<std::vector<Token>> forced_tokens(const Effort& effort) = 0;
    // Filters with the same address work in one object, so that one waits for the other.
    virtual const void* shared() const = 0;
};

// Gives the next token of one text at some places. Depends only on the tokens of that text.
class TokenForcer {
public:
    virtual ~TokenForcer() = default;

    // The next token of the text.
    virtual void accept(Token token) = 0;
    // The token that has to come next; none: any may.
    virtual std::optional<Token> forced() const = 0;
    // Appends to `tokens` that token and the tokens that have to follow it, at most n.
    virtual void forced_tokens(int n, std::vector<Token>& tokens) const = 0;
    // After so many more tokens, whatever they are, none has to come yet. Another thread may end that earlier.
    virtual int free_tokens() const = 0;
};

// Guesses the next tokens of one text. A wrong guess costs time and changes nothing.
class TokenGuesser {
public:
    virtual ~TokenGuesser() = default;

    // Appends to `guess` at most n tokens of the vocabulary that may follow `text`, the prompt and the answer so far. The text grows from call to call; where a
    // full context has made its sequence forget tokens it is shorter, or another one.
    virtual void guess(std::span<const Token> text, int n, std::vector<Token>& guess) = 0;
};

} // namespace quire
