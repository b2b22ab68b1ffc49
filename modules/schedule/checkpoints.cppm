// quire.schedule.checkpoints: after which tokens the recurrent state of a sequence is kept for others, in the prefix cache. Plain values, owns
// nothing.
export module quire.schedule.checkpoints;

import quire.core.base;
import quire.schedule.request;

export namespace quire {

// A checkpoint is a state that stays in the prefix cache. It takes as much memory as the K and V of many tokens. A prompt that begins alike is
// computed from the last checkpoint on. So there is one every `interval` tokens, one near the end of a prompt, and one near the end of an answer:
// the next turn of a chat begins with both. These two are left out close behind another one; a pinned prompt has one at its end in any case. All
// stand at the ends of blocks.
struct Checkpoints {
    int interval   = 0; // a multiple of block_size; 0: none is kept
    int block_size = 16;
    // Tokens at the end of a prompt that the next turn may not repeat: chat templates end a prompt with an opened thought, and leave it out where
    // the answer is history. The checkpoint stands before them.
    int tail = 8;

    // Whether the state after the first n tokens of a request's sequence is kept.
    bool wanted(int n, const Request& request) const {
        if (interval == 0 || n == 0 || n % block_size != 0) return false;
        return n % interval == 0 || (n == last_of(request) && (request.pin || n % interval >= interval / 8));
    }
    // Whether the state after the first n tokens of a request's sequence is to be a checkpoint if the answer ends before the next such n.
    bool may_end(int n, const Request& request) const {
        return has_end(request) && n % block_size == 0 && n >= int(request.prompt.size()) &&
               n - last_until(n, request) >= std::max(interval / 8, 1);
    }
    // Whether an answer gets a checkpoint at its end, if it is long enough: where a prompt has one answer.
    bool has_end(const Request& request) const {
        return interval > 0 && request.generates() && request.beam_width == 0 && request.width() == 1;
    }
    // The first wanted number of tokens behind `from`, up to `end`; else `end`.
    int next(int from, int end, const Request& request) const;

private:
    // The checkpoint near the end of the prompt, if it is wanted.
    int last_of(const Request& request) const {
        const int n = int(request.prompt.size()) - (request.pin ? 0 : tail);
        return std::max(n, 0) / block_size * block_size;
    }
    // The last wanted number of tokens up to n; 0: there is none.
    int last_until(int n, const Request& request) const {
        const int multiple = n / interval * interval, last = last_of(request);
        return last <= n && wanted(last, request) ? std::max(multiple, last) : multiple;
    }
};

// The interval with which the checkpoints of a text take as much memory as its K and V, in whole blocks of tokens. At least 512 tokens, because
// a prompt's chunk ends at each; at most 4,096, and these where a model has no K and V. `state_bytes`: of a state; `token_bytes`: of the K and V
// of a token. 0: there is no state.
int checkpoint_interval(std::size_t state_bytes, std::size_t token_bytes, int block_size);

} // namespace quire

module :private;

namespace quire {

int Checkpoints::next(int from, int end, const Request& request) const {
    if (interval == 0) return end;
    const int multiple = (from / interval + 1) * interval, last = last_of(request);
    int       first = std::min(end, multiple);
    if (last > from && last < first && wanted(last, request)) first = last;
    return first;
}

int checkpoint_interval(std::size_t state_bytes, std::size_t token_bytes, int block_size) {
    constexpr std::size_t least = 512, most = 4096;
    if (state_bytes == 0) return 0;
    const std::size_t n =
        token_bytes == 0 ? most : std::clamp((state_bytes + token_bytes - 1) / token_bytes, least, most);
    return int((n + std::size_t(block_size) - 1) / std::size_t(block_size)) * block_size;
}

} // namespace quire
