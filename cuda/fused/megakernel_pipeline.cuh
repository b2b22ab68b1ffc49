// The decode megakernel's weight pipeline.
#pragma once

#include "../gemm/gemv.cuh"
#include "../ptx/tma.cuh"
#include "../warp.cuh"
#include "megakernel_program.cuh"

namespace quire::cuda::megakernel {

#if __CUDA_ARCH__ >= 900

namespace {

constexpr int herald      = 14; // the warp that speaks with the other blocks
constexpr int producer    = 15; // the warp that fills the ring
constexpr int most_stages = 16; // in the ring
constexpr int slots       = 8;  // operations that a block knows

// The threads that take part in the operations: all but the producer's.
struct Team {
    static __device__ void          sync() { asm volatile("bar.sync 1, %0;" ::"n"(warps * 32) : "memory"); }
    static __device__ constexpr int size() { return warps * 32; }
};

// The products that a block computes: pairs of rows, about the same number each. What it takes of a product are neighbouring
// rows: of gate and of up the same ones, of others those of its range that are there.
struct Rows {
    const Projection* product;
    std::int64_t      first;      // of the product
    int               begin, end; // among the block's

    __device__ Rows(const Op& op, int which) : product(&op.all.projection[which]) {
        if (op.gated) {
            first = op.first_pair, begin = which * op.pairs, end = begin + op.pairs;
            if (which == 2) begin = end = 0;
            return;
        }
        const int from = op.first_pair * 2, low = max(op.all.first_row[which], from),
                  high = min(op.all.first_row[which + 1], from + op.pairs * 2);
        first = low - op.all.first_row[which], begin = low - from, end = max(high, low) - from;
    }
};

// Stages lie one after another in a ring of bytes, each in one piece: one that does not fit before the end is at the beginning. All
// warps count them for themselves.
struct Ring {
    unsigned char* memory;
    int            bytes;
    std::uint64_t *full, *empty; // [most_stages]
    int            at    = 0;
    unsigned       place = 0, parity = 0; // among the stages; of its round

    // The next stage has come.
    __device__ void wait() const { mbarrier_wait(full + place, parity); }
    // This thread is done with it.
    __device__ void release() const { mbarrier_arrive(empty + place); }
    // The next stage's beginning.
    __device__ int  begin(int n_bytes) const { return at + n_bytes > bytes ? 0 : at; }
    __device__ void pass(int n_bytes) {
        at = begin(n_bytes) + n_bytes;
        if (++place == most_stages) place = 0, parity ^= 1;
    }
};

// The operations that the producer has read: each has a slot until all are done with it.
struct Slots {
    Op*            ops;
    std::uint64_t *known, *done; // [slots]

    __device__ const Op& wait(int op) const {
        mbarrier_wait(known + op % slots, unsigned(op / slots) & 1);
        return ops[op % slots];
    }
};

// Fills the ring with the weights of all operations, by one warp. `exchanged`, `cleared`: where halves for other blocks are in this
// step and in the next, from where the tape says. before(op): what else there is to be asked for.
template <class Before>
__device__ void produce(const Op* tape, int n_ops, const Slots& all, Ring ring, std::int64_t exchanged,
                        std::int64_t cleared, bool odd, const Before& before) {
    constexpr int words = int(sizeof(Op) / 4), each = (words + 31) / 32;
    const int     lane   = int(threadIdx.x % 32);
    const auto    policy = l2_evict_first();
    unsigned      next[each];
    const auto    read = [&](int op) {
#pragma unroll
        for (int w = 0; w < each; w++)
            if (op < n_ops && lane + 32 * w < words)
                next[w] = reinterpret_cast<const unsigned*>(tape + op)[lane + 32 * w];
    };
    read(0);
    // Bytes are numbered through, rounds of the ring and gaps at its end included: where the ring's next stage begins, and, of lane
    // n, where the stage at place n does. `in_use`: how many may still be used, from place `oldest` on.
    int      head = 0, start = 0, oldest = 0, in_use = 0;
    unsigned oldest_parity = 0;
    for (int op = 0; op < n_ops; op++) {
        if (op >= slots) mbarrier_wait(all.done + op % slots, unsigned(op / slots - 1) & 1);
#pragma unroll
        for (int w = 0; w < each; w++)
            if (lane + 32 * w < words) reinterpret_cast<unsigned*>(all.ops + op % slots)[lane + 32 * w] = next[w];
        __syncwarp();
        Op& from = all.ops[op % slots];
        if (lane == 0) {
            const auto find = [&](auto& p) {
                if (p) p += exchanged;
            };
            find(from.add), find(from.x), find(from.q), find(from.k), find(from.v), find(from.attended);
            for (int k = 0; k < from.all.n; k++)
                if (Projection& to = from.all.projection[k]; to.out && !to.out_is_float)
                    to.out = static_cast<Half*>(to.out) + exchanged;
            from.cleared += cleared / 8;
            from.next_claims = from.claims + int(!odd);
            from.claims += int(odd);
        }
        if (lane == 0 && !from.attends) {
            const auto until  = [&](unsigned blocks) { return int(unsigned(from.n_pairs) * blocks / gridDim.x); };
            const bool claims = from.n_claimable > 0;
            from.pairs        = claims ? from.own * from.rows : until(blockIdx.x + 1) - until(blockIdx.x);
            from.first_pair   = claims ? int(blockIdx.x) * from.pairs : until(blockIdx.x);
            from.stages       = (2 * from.pairs + from.rows - 1) / from.rows;
        }
        __syncwarp();
        mbarrier_arrive(all.known + op % slots);
        read(op + 1);
        before(from);
        if (from.attends) continue;
        // A lane copies one part of one product's rows.
        const int part = lane % 3, n_bytes = from.rows * from.row_bytes, bytes = from.part_bytes[part],
                  part_at = from.rows * (part == 0   ? 0
                                         : part == 1 ? from.part_bytes[0]
                                                     : from.row_bytes - bytes);
        const Rows    mine(from, min(lane / 3, 2));
        const bool    copies    = lane < 9 && part < from.n_parts && lane / 3 < from.all.n;
        const Weight& w         = mine.product->weight;
        const auto*   data      = static_cast<const unsigned char*>(part == 0 ? w.data : part == 1 ? w.scales : w.mins);
        const auto    have_room = [&](int stage_bytes) {
            const int skipped = ring.begin(stage_bytes) != ring.at ? ring.bytes - ring.at : 0;
            while (in_use > 0 && (in_use == most_stages ||
                                  head + skipped + stage_bytes - __shfl_sync(~0u, start, oldest) > ring.bytes)) {
                mbarrier_wait(ring.empty + oldest, oldest_parity);
                in_use--;
                if (++oldest == most_stages) oldest = 0, oldest_parity ^= 1;
            }
        };
        // A stage of some rows, of which this lane brings n from row `first` of its product on.
        const auto bring = [&](int stage_bytes, int rows, int to, std::int64_t first, int n) {
            const int at = ring.begin(stage_bytes);
            have_room(stage_bytes);
            if (at != ring.at) head += ring.bytes - ring.at;
            if (lane == 0) mbarrier_arrive_expect_tx(ring.full + ring.place, unsigned(rows * from.row_bytes));
            __syncwarp();
            if (copies && n > 0)
                tma_copy_bulk(ring.memory + at + part_at + to * bytes, data + first * bytes, unsigned(n * bytes),
                              ring.full + ring.place, policy);
            if (lane == int(ring.place)) start = head;
            head += stage_bytes, in_use++;
            ring.pass(stage_bytes);
        };
        for (int stage = 0, done = 0; stage < from.stages; stage++, done += from.rows) {
            const int rows = min(from.rows, 2 * from.pairs - done), low = max(done, mine.begin),
                      high = min(done + rows, mine.end);
            bring(n_bytes, rows, low - done, mine.first + low - mine.begin, high - low);
        }
        for (int n = 0; from.n_claimable > 0; n++) {
            int chunk = from.n_claimable;
            have_room(n_bytes); // who claims early takes it from somebody quicker
            if (lane == 0 && n < most_claims) chunk = int(atomicAdd(from.claims, 1u));
            chunk            = __shfl_sync(~0u, chunk, 0);
            const bool there = chunk < from.n_claimable;
            const int  first = (from.own * int(gridDim.x) + chunk) * from.rows,
                      rows   = min(from.rows, from.n_pairs - first);
            if (lane == 0) from.claimed[n] = there ? first : -1, from.n_claimed = n;
            if (!there) { // a stage of nothing says so
                bring(0, 0, 0, 0, 0);
                break;
            }
            for (int which = 0; which < 2; which++) bring(n_bytes, rows, 0, first, lane / 3 == which ? rows : 0);
        }
    }
}

} // namespace

#endif

} // namespace quire::cuda::megakernel
