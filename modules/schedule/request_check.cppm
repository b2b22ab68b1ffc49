// quire.schedule.request_check: whether a request can ever run, with the model and the memory there are, and if not, why, with the numbers.
// Owns nothing.
export module quire.schedule.request_check;

import quire.core.base;
import quire.paging.cache_layout;
import quire.schedule.request;

export namespace quire {

struct RequestBounds {
    int                    context = 0, max_sequences = 0, n_blocks = 0, block_size = 0;
    CacheLayout            layout     = {};
    int                    vocab_size = 0; // 0: unknown, then token ids are not checked
    std::span<const Token> end_tokens = {};
};

// The most tokens of a prompt: the context also has the first token to generate.
constexpr int longest_prompt(int context, bool generates) { return context - int(generates); }

// A field of a request, by its name in the APIs, and why it cannot be had.
struct FieldFault {
    std::string_view field;
    Error            error;
};

// Why the request cannot run with any prompt: it needs more sequences at once than can run; or its allowed tokens, biases, bad words and
// min_tokens leave no token to draw.
std::optional<FieldFault> find_fault(const Request& request, const RequestBounds& bounds);
// Error: why the request can never run.
Result<void> check_request(const Request& request, const RequestBounds& bounds);
// The sentence about a request that needs more than the `available` blocks, while the other blocks are pinned.
std::string too_large(const Request& request, const RequestBounds& bounds, int available);
// Recurrent states that the request's sequences hold at once, in a model that has them. Each sequence has its own. Forks read the state that
// they share while each writes its own: once, where they begin together; of beams, up to one of two is a fork in each step. A sequence whose
// tokens may run again keeps the state before them.
int states_needed(const Request& request);

} // namespace quire

module :private;

namespace quire {

// The full blocks of the prompt are shared; each sequence then needs a block of its own for its first token. A pinned prompt is kept
// whole.
int blocks_needed(const Request& request, const RequestBounds& b) {
    const int n = int(request.prompt.size());
    return b.layout.blocks_at_once(n + (request.generates() ? 1 : 0), b.block_size, request.pin) +
           (request.generates() ? request.width() - 1 : 0) * b.layout.blocks_per_entry() +
           (states_needed(request) - 1) * b.layout.blocks_per_unit();
}

int states_needed(const Request& request) {
    const int width = request.generates() ? request.width() : 1;
    if (request.constraint) return 2 * width;
    if (request.beam_width > 1) return width + width / 2;
    return width > 1 ? width + 1 : 1;
}

std::string too_large(const Request& request, const RequestBounds& b, int available) {
    const int width = request.generates() ? request.width() : 0;
    // Where a block has neither all layers nor a fixed number of them, it has no size in tokens.
    const int layers =
        b.layout.groups.size() > 1 && b.layout.block_bytes == 0 ? b.layout.groups[0].layers_per_block : 0;
    return cat("the prompt has ", request.prompt.size(), " tokens and needs ", blocks_needed(request, b), " blocks of ",
               b.block_size, layers > 0 ? cat(" tokens in ", layers, layers > 1 ? " layers" : " layer") : "",
               width > 1    ? cat(" with the first token of ", width, " sequences")
               : width == 1 ? std::string(" with the token to generate")
                            : std::string(),
               "; the whole pool has ", b.n_blocks,
               available < b.n_blocks ? cat(", ", b.n_blocks - available, " of them pinned") : "");
}

// Whether the request leaves a first token to draw. A bias of -100 counts as a ban, as in OpenAI's API.
bool can_draw(const Request& request, const RequestBounds& b) {
    if (b.vocab_size == 0 || !request.generates() || request.beam_width > 0) return true;
    constexpr float                  never = -100;
    std::unordered_map<Token, float> biases;
    for (auto [token, bias] : request.sampling.logit_bias) biases[token] += bias;
    for (const std::vector<Token>& word : request.sampling.bad_words)
        if (word.size() == 1) biases[word[0]] = never;
    const auto has = [](std::span<const Token> tokens, Token t) {
        return std::ranges::find(tokens, t) != tokens.end();
    };
    const auto possible = [&](Token t) {
        const auto bias = biases.find(t);
        return (bias == biases.end() || bias->second > never) &&
               (request.min_tokens <= 0 || (!has(b.end_tokens, t) && !has(request.stop_tokens, t)));
    };
    const std::vector<Token>& allowed = request.sampling.allowed_tokens;
    return allowed.empty() ? std::ranges::any_of(std::views::iota(0, b.vocab_size), possible)
                           : std::ranges::any_of(allowed, possible);
}

std::optional<FieldFault> find_fault(const Request& r, const RequestBounds& b) {
    if (r.width() > b.max_sequences)
        return FieldFault{r.beam_width > r.n ? "beam_width"
                          : r.best_of > r.n  ? "best_of"
                                             : "n",
                          {ErrorKind::limit,
                           cat("the request needs ", r.width(), " sequences at once; ", b.max_sequences, " can run")}};
    if (!can_draw(r, b))
        return FieldFault{
            !r.sampling.allowed_tokens.empty() ? "allowed_token_ids"
            : !r.sampling.logit_bias.empty()   ? "logit_bias"
                                               : "bad_words",
            {ErrorKind::input, "allowed_token_ids, logit_bias, bad_words and min_tokens leave no token to draw"}};
    return std::nullopt;
}

// Whether every token of a request is one of the vocabulary.
Result<void> check_tokens(const Request& request, int vocab) {
    const auto known = [&](Token token) { return token >= 0 && token < vocab; };
    for (std::size_t i = 0; i < request.prompt.size(); i++)
        if (!known(request.prompt[i]))
            return fail("token ", request.prompt[i], " at position ", i, " of the prompt is outside the vocabulary of ",
                        vocab);
    for (Token token : request.sampling.allowed_tokens)
        if (!known(token)) return fail("token ", token, " of allowed_token_ids is outside the vocabulary of ", vocab);
    for (Token token : request.stop_tokens)
        if (!known(token)) return fail("token ", token, " of stop_token_ids is outside the vocabulary of ", vocab);
    for (const std::vector<Token>& word : request.sampling.bad_words)
        if (word.empty() || !std::ranges::all_of(word, known))
            return fail("bad_words has an empty word, or a token outside the vocabulary of ", vocab);
    for (auto [token, bias] : request.sampling.logit_bias)
        if (!known(token)) return fail("token ", token, " of logit_bias is outside the vocabulary of ", vocab);
    return {};
}

// Whether the numbers of a request agree with one another.
Result<void> check_numbers(const Request& r) {
    if (r.max_tokens < 0) return fail("max_tokens is ", r.max_tokens);
    if (r.n < 1) return fail("n is ", r.n, "; at least 1 answer is needed");
    if (r.best_of != 0 && r.best_of < r.n)
        return fail("best_of is ", r.best_of, ", less than the ", r.n, " answers wanted");
    if (r.beam_width < 0) return fail("beam_width is ", r.beam_width);
    if (r.beam_width > 0 && r.beam_width < r.n)
        return fail("beam_width is ", r.beam_width, ", less than the ", r.n, " answers wanted");
    if (r.beam_width > 0 && r.sampling.after_samplers)
        return fail("beams have no samplers, and no probabilities after them");
    if (r.beam_width > 0 && r.best_of > 0) return fail("best_of and beam search exclude each other");
    if (!std::isfinite(r.length_penalty)) return fail("length_penalty is not a finite number");
    if ((r.pin || r.embed) && (r.n > 1 || r.best_of > 1 || r.beam_width > 0))
        return fail("a prompt to pin or to embed has one sequence");
    if (r.min_tokens < 0 || r.min_tokens > r.max_tokens)
        return fail("min_tokens is ", r.min_tokens, ", not in 0 .. max_tokens, which is ", r.max_tokens);
    return {};
}

Result<void> check_request(const Request& request, const RequestBounds& b) {
    if (b.vocab_size > 0)
        if (auto ok = check_tokens(request, b.vocab_size); !ok) return ok;
    if (auto ok = check_numbers(request); !ok) return ok;
    if (auto fault = find_fault(request, b)) return std::unexpected(std::move(fault->error));
    const auto n = request.prompt.size();
    if (n == 0) return fail("the prompt has no tokens; at least one is needed");
    if (n > std::size_t(longest_prompt(b.context, request.generates())))
        return fail_with(ErrorKind::limit, "the prompt has ", n, " tokens; ",
                         request.generates() ? "with the one to generate " : "", "that is more than the context of ",
                         b.context);
    if (blocks_needed(request, b) > b.n_blocks) return fail_with(ErrorKind::limit, too_large(request, b, b.n_blocks));
    return {};
}

} // namespace quire
