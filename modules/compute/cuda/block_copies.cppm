// quire.compute.cuda.block_copies: copies of whole KV blocks, within a pool or between the device's pool and the host pool. **Owns** the pinned
// list of pairs; its place on the device is the backend's.
module;

#include "../../../cuda/kernels.h"

export module quire.compute.cuda.block_copies;

import quire.compute.backend;
import quire.compute.cuda.pinned_memory;
import quire.compute.cuda.weights;
import quire.core.base;

export namespace quire {

class BlockCopies {
public:
    explicit BlockCopies(cuda::Context& gpu) : gpu_(gpu) {}

    // False: there is not enough memory.
    bool prepare(int n_layers, DeviceMemory& memory, PinnedMemory& pinned);
    // Launches the first copies, as many as have room in the list, and returns their number.
    std::size_t run(std::span<const BlockCopy> copies, std::span<const BlockArray> from,
                    std::span<const BlockArray> to);
    // The device has run all copies: their room is free again.
    void forget() { n_used_ = 0; }

private:
    static constexpr std::size_t most = 4096; // pairs in the list

    cuda::Context& gpu_;
    std::int32_t * host_pairs_ = nullptr, *pairs_ = nullptr;
    const void**   pool_pointers_[2] = {nullptr, nullptr}; // where the arrays of each pool begin: device's, host
    bool           pools_sent_[2]    = {false, false};
    std::size_t    n_pointers_       = 0; // that each has room for
    std::size_t    n_used_           = 0; // by copies that may not be done
};

} // namespace quire

module :private;

namespace quire {

bool BlockCopies::prepare(int n_layers, DeviceMemory& memory, PinnedMemory& pinned) {
    host_pairs_ = static_cast<std::int32_t*>(pinned.take(most * 8));
    pairs_      = static_cast<std::int32_t*>(memory.take(most * 8));
    n_pointers_ = std::size_t(std::max(2 * n_layers, most_block_pieces));
    for (auto& pointers : pool_pointers_)
        pointers = static_cast<const void**>(memory.take(n_pointers_ * sizeof(void*)));
    return host_pairs_ && pairs_ && pool_pointers_[0] && pool_pointers_[1];
}

// The host does not wait for the kernels of the copies: the upload of the next step's plan stands in the stream between them and the step, and
// no kernel begins early across an upload. So K and V that a plan calls readable are there.
std::size_t BlockCopies::run(std::span<const BlockCopy> copies, std::span<const BlockArray> from,
                             std::span<const BlockArray> to) {
    const auto pointers = [&](std::span<const BlockArray> arrays) { // where a pool's arrays begin, sent up once
        const void** there = pool_pointers_[arrays[0].on_host];
        auto&        sent  = pools_sent_[arrays[0].on_host];
        if (!sent) {
            std::vector<const void*> bases;
            for (const BlockArray& array : arrays) bases.push_back(array.data);
            check(bases.size() <= n_pointers_, "a pool of more arrays than announced");
            cuda::upload(static_cast<void*>(there), static_cast<const void*>(bases.data()),
                         bases.size() * sizeof(void*), gpu_);
            sent = true;
        }
        return there;
    };
    cuda::BlockPools pools;
    pools.from     = pointers(from);
    pools.to       = const_cast<void* const*>(pointers(to));
    pools.n_arrays = int(from.size());
    pools.bytes    = from[0].bytes;
    pools.stride   = from[0].stride;
    // A launch runs its copies in no order: a list in which a target was a source before is cut there.
    std::size_t done = 0;
    while (done < copies.size() && n_used_ < most) {
        std::int32_t* const host = host_pairs_ + 2 * n_used_;
        std::size_t         n    = 0;
        for (; done + n < copies.size() && n_used_ + n < most; n++) {
            const BlockCopy& next  = copies[done + n];
            const auto       other = [&](const BlockCopy& earlier) {
                return earlier.from == next.to || earlier.to == next.from || earlier.to == next.to;
            };
            if (from.data() == to.data() && std::ranges::any_of(copies.subspan(done, n), other)) break;
            host[2 * n]     = next.from;
            host[2 * n + 1] = next.to;
        }
        std::int32_t* const pairs = pairs_ + 2 * n_used_;
        cuda::copy_to_device(pairs, host, n * 8, gpu_);
        cuda::copy_blocks(pools, pairs, int(n), gpu_);
        n_used_ += n;
        done += n;
    }
    return done;
}

} // namespace quire
