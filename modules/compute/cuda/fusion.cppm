// quire.compute.cuda.fusion: the fusion pass: which kernels run a program's operations, for each kind of step. Plain functions, no
// GPU needed; owns nothing.
module;

#include "../../../cuda/kernels.h"
#include "../../../cuda/ranks.h"

export module quire.compute.cuda.fusion;

import quire.compute.program;
import quire.core.base;
import quire.core.std;

export namespace quire {

// An operation with device addresses. What the fused kernels take is in `device`; the rest only plain kernels know.
struct LoweredOperation {
    cuda::Operation     device;          // rows: of one row of the step
    bool                known   = true;  // `device` says all of it
    bool                fusible = false; // the layer kernel or the prefill GEMM may run it: whole rows, one per token
    bool                logit_rows = false;     // its rows are logit rows
    const float*        norm_bias  = nullptr;   // LayerNorm's
    cuda::HeadGemm      heads;                  // HeadGemm
    int                 items     = 0;          // of attention: the step's list of split-KV items for its window
    const cuda::Weight* positions = nullptr;    // Embed's, learned
    cuda::Route         route;                  // Route
    cuda::ExpertGemm    experts;                // ExpertGatedGemm, ExpertCombineGemm
    bool grouped = false, fp16_experts = false; // these three: the weights can be multiplied in tiles; are fp16
    cuda::Parts     parts;                      // AllReduce
    cuda::AllReduce reduce;                     // AllReduce; AllGather: `out`. Arrays of the other ranks are filled in later
    bool            f32 = false;                // AllGather, TakeColumns: of float32, else of fp16
};

// Steps whose operations run in different kernels.
enum class StepKind : std::uint8_t {
    one_token, // of one sequence, with its logits
    few_rows,  // up to max_layer_kernel_rows
    some_rows,
    many_rows, // min_prefill_rows and more: prompts
};

enum class FusedKernel : std::uint8_t {
    none,              // the operation's plain kernel
    layer_kernel,      // persistent: GEMMs with their norms, SwiGLU, RoPE and KV store, between two attentions
    prefill_gemm,      // a GEMM with SwiGLU, or with RoPE and KV store, as its epilogue
    decode_megakernel, // persistent: the whole program but Argmax
    all_reduce_norm,   // what the ranks add up, and the norm that follows
};

// Operations [first, first + n) in one launch.
struct FusionGroup {
    FusedKernel kernel = FusedKernel::none;
    int         first = 0, n = 1;
};

// From how many rows on a prompt's GEMMs are faster in our kernel than in the library.
inline constexpr int min_prefill_rows = 1536;

// How many operations, from the first one on, a kernel runs in one launch; 0: none.
using KernelMatch = std::function<int(std::span<const cuda::Operation> operations)>;

// Groups for a kind of step; `match` is the kernel's, of few_rows or many_rows. Every operation is in one group, in order.
// The layer kernel is tried at the first operation of a run of fusible ones that is no norm; the prefill GEMM at each.
std::vector<FusionGroup> fuse(std::span<const LoweredOperation> operations, FusedKernel kernel,
                              const KernelMatch& match);

// "layer kernel" ...
std::string_view name_of(FusedKernel kernel);

} // namespace quire

module :private;

namespace quire {

std::string_view name_of(FusedKernel kernel) {
    constexpr std::array<std::string_view, 5> names{"", "layer kernel", "prefill GEMM", "decode megakernel",
                                                    "all-reduce and norm"};
    return names[std::size_t(kernel)];
}

std::vector<FusionGroup> fuse(std::span<const LoweredOperation> operations, FusedKernel kernel,
                              const KernelMatch& match) {
    std::vector<cuda::Operation> device;
    for (const LoweredOperation& o : operations) device.push_back(o.device);
    std::vector<FusionGroup> groups;
    const int                n = int(operations.size());
    for (int begin = 0; begin < n;) {
        int end = begin; // of a run of fusible operations
        while (end < n && operations[std::size_t(end)].fusible) end++;
        bool tried = false;
        for (int i = begin; i < end;) {
            const bool norm = device[std::size_t(i)].kind == cuda::Operation::norm;
            int        some = 0;
            if (kernel == FusedKernel::prefill_gemm || (!norm && !tried)) {
                some  = match(std::span(device).subspan(std::size_t(i), std::size_t(end - i)));
                tried = true;
                check(some <= end - i, "a kernel that runs more operations than there are");
            }
            groups.push_back({some > 0 ? kernel : FusedKernel::none, i, std::max(some, 1)});
            i += groups.back().n;
        }
        if (end < n) groups.push_back({FusedKernel::none, end, 1});
        begin = end + 1;
    }
    return groups;
}

} // namespace quire
