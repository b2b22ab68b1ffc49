// quire.schedule.context_limit: when a sequence ends, and which tokens a sequence that fills the context forgets so that it can go on. The
// tokens that are left have new positions, so their KV is computed again. Owns nothing.
export module quire.schedule.context_limit;

import quire.core.base;
import quire.schedule.sequence;

export namespace quire {

struct ContextLimit {
    int  context = 0;    // the longest sequence in tokens
    bool shifts  = true; // false: no sequence forgets tokens, whatever its request says

    // Why a sequence ends with its last token, or `none`; `is_end`: the last token is an end token.
    FinishReason ending(const SequenceGroup& group, const Sequence& sequence, bool is_end) const;
    // Whether a sequence ends because of its length once it has n_more more tokens.
    bool ends_by_length(const SequenceGroup& group, const Sequence& sequence, int n_more) const;
    // Whether a token can be appended that is not sampled: the group has one sequence, far from the end of the context.
    bool can_force(const SequenceGroup& group, const Sequence& sequence) const {
        return group.request.width() == 1 && int(sequence.tokens.size()) + 1 < context;
    }
    // Whether a sequence of the request can forget some of its n_tokens tokens; whether it has to, before it goes on.
    bool can_shift(const Request& request, int n_tokens) const;
    bool must_shift(const Request& request, int n_tokens) const {
        return n_tokens >= context && can_shift(request, n_tokens);
    }
    // All sequences of a group forget tokens. They have no blocks.
    void forget_tokens(SequenceGroup& group) const;
};

} // namespace quire

module :private;

namespace quire {

// Leading tokens that are not forgotten.
int n_kept(const Request& request, int context) {
    const int prompt = int(request.prompt.size());
    return std::min({request.n_keep < 0 ? prompt : request.n_keep, prompt, context / 2});
}

// Tokens that a sequence of n_tokens tokens forgets; 0 or less: it does not shift, or there is nothing to forget.
int n_discarded(const Request& request, int n_tokens, int context) {
    if (!request.can_shift()) return 0;
    const int rest = n_tokens - n_kept(request, context);
    return request.n_discard > 0 ? std::min(request.n_discard, rest - 1) : rest / 2;
}

bool ContextLimit::can_shift(const Request& request, int n_tokens) const {
    return shifts && n_discarded(request, n_tokens, context) > 0;
}

FinishReason ContextLimit::ending(const SequenceGroup& group, const Sequence& sequence, bool is_end) const {
    const Request& r = group.request;
    if ((is_end && !r.ignore_end) || std::ranges::find(r.stop_tokens, sequence.tokens.back()) != r.stop_tokens.end())
        return FinishReason::stop;
    return ends_by_length(group, sequence, 0) ? FinishReason::length : FinishReason::none;
}

bool ContextLimit::ends_by_length(const SequenceGroup& group, const Sequence& sequence, int n_more) const {
    const int n_tokens = int(sequence.tokens.size()) + n_more;
    return group.n_generated(sequence) + n_more >= group.request.max_tokens ||
           (n_tokens >= context && !must_shift(group.request, n_tokens));
}

void ContextLimit::forget_tokens(SequenceGroup& group) const {
    const int kept = n_kept(group.request, context);
    for (auto& s : group.sequences) {
        const int n = std::max(n_discarded(group.request, int(s->tokens.size()), context), 0);
        s->tokens.erase(s->tokens.begin() + kept, s->tokens.begin() + kept + n);
        s->n_dropped += n;
        s->n_kept = kept;
    }
}

} // namespace quire
