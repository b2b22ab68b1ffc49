// quire.schedule.context_shift: a sequence that fills the context forgets tokens behind the first ones and goes on: what is left has new
// positions, so its KV is computed again. Owns nothing.
export module quire.schedule.context_shift;

import quire.core.base;
import quire.core.std;
import quire.schedule.request;
import quire.schedule.sequence;

export namespace quire {

// Tokens that a sequence of the request with so many of them forgets; 0: it does not shift, or there is nothing to forget.
int n_discarded(const Request& request, int n_tokens, int context);

// Takes them out of all sequences of a group, which have no blocks.
void forget_tokens(SequenceGroup& group, int context);

} // namespace quire

module :private;

namespace quire {

int n_kept(const Request& request, int context) {
    const int prompt = int(request.prompt.size());
    return std::min({request.n_keep < 0 ? prompt : request.n_keep, prompt, context / 2});
}

int n_discarded(const Request& request, int n_tokens, int context) {
    if (!request.can_shift()) return 0;
    const int rest = n_tokens - n_kept(request, context);
    return request.n_discard > 0 ? std::min(request.n_discard, rest - 1) : rest / 2;
}

void forget_tokens(SequenceGroup& group, int context) {
    const int kept = n_kept(group.request, context);
    for (auto& s : group.sequences) {
        const int n = std::max(n_discarded(group.request, int(s->tokens.size()), context), 0);
        s->tokens.erase(s->tokens.begin() + kept, s->tokens.begin() + kept + n);
        s->n_dropped += n;
        s->n_kept = kept;
    }
}

} // namespace quire
