// quire.schedule.request_check: whether a request can ever run with the memory there is, and if not, why, with the numbers. Owns nothing.
export module quire.schedule.request_check;

import quire.core.base;
import quire.core.std;
import quire.paging.cache_layout;
import quire.schedule.request;

export namespace quire {

struct RequestBounds {
    int         context = 0, max_sequences = 0, n_blocks = 0, block_size = 0;
    CacheLayout layout = {};
};

// Error: why the request can never run.
Result<void> check_request(const Request& request, const RequestBounds& bounds);
// The sentence about a request that needs more than the `available` blocks, the others being pinned.
std::string too_large(const Request& request, const RequestBounds& bounds, int available);

} // namespace quire

module :private;

namespace quire {

// The full blocks of the prompt are shared; each sequence then needs a block of its own for its first token. A pinned prompt is kept
// whole.
int blocks_needed(const Request& request, const RequestBounds& b) {
    const int n = int(request.prompt.size());
    return b.layout.blocks_at_once(n + (request.generates() ? 1 : 0), b.block_size, request.pin) +
           (request.generates() ? request.width() - 1 : 0) * b.layout.blocks_per_entry();
}

std::string too_large(const Request& request, const RequestBounds& b, int available) {
    const int width  = request.generates() ? request.width() : 0;
    const int layers = b.layout.groups.size() > 1 ? b.layout.layers_per_block : 0; // else a block holds all of them
    return cat("the prompt has ", request.prompt.size(), " tokens and needs ", blocks_needed(request, b), " blocks of ",
               b.block_size, layers > 0 ? cat(" tokens in ", layers, layers > 1 ? " layers" : " layer") : "",
               width > 1    ? cat(" with the first token of ", width, " sequences")
               : width == 1 ? std::string(" with the token to generate")
                            : std::string(),
               "; the whole pool has ", b.n_blocks,
               available < b.n_blocks ? cat(", ", b.n_blocks - available, " of them pinned") : "");
}

Result<void> check_request(const Request& request, const RequestBounds& b) {
    const auto n = request.prompt.size();
    if (n == 0) return fail("the prompt has no tokens; at least one is needed");
    if (n + std::size_t(request.generates()) > std::size_t(b.context))
        return fail_with(ErrorKind::limit, "the prompt has ", n, " tokens; ",
                         request.generates() ? "with the one to generate " : "", "that is more than the context of ",
                         b.context);
    if (request.width() > b.max_sequences)
        return fail_with(ErrorKind::limit, "the request needs ", request.width(), " sequences at once; ",
                         b.max_sequences, " can run");
    if (blocks_needed(request, b) > b.n_blocks) return fail_with(ErrorKind::limit, too_large(request, b, b.n_blocks));
    return {};
}

} // namespace quire
