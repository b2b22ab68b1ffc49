// quire.schedule.checkpoints: after which tokens the recurrent state of a sequence is kept for others, in the prefix cache. Plain values, owns
// nothing.
export module quire.schedule.checkpoints;

import quire.core.base;
import quire.schedule.request;

export namespace quire {

// A checkpoint is a state that stays in the prefix cache. It takes as much memory as the K and V of many tokens. A prompt that begins alike is
// computed from the last checkpoint on. So there is one every `interval` tokens, and one at the end of a prompt, which the next turn of a chat
// begins with, if that is not close behind another one; a pinned prompt has one in any case. All stand at the ends of blocks.
struct Checkpoints {
    int interval   = 0; // a multiple of block_size; 0: none is kept
    int block_size = 16;

    // Whether the state after the first n tokens of a request's sequence is kept.
    bool wanted(int n, const Request& request) const {
        if (interval == 0 || n == 0 || n % block_size != 0) return false;
        return n % interval == 0 || (n == last_of(request) && (request.pin || n % interval >= interval / 8));
    }
    // The first wanted number of tokens behind `from`, up to `end`; else `end`.
    int next(int from, int end, const Request& request) const;

private:
    int last_of(const Request& request) const { return int(request.prompt.size()) / block_size * block_size; }
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
