// quire.compute.cuda.fusion: the fusion pass: which kernels run a program's operations, for each kind of step. Plain functions, no
// GPU needed; owns nothing.
module;

#include "../../../cuda/adapters.h"
#include "../../../cuda/guesses.h"
#include "../../../cuda/kernels.h"
#include "../../../cuda/ranks/ranks.h"

export module quire.compute.cuda.fusion;

export import quire.compute.program;
import quire.core.base;

export namespace quire {

// An operation with device addresses. What the fused kernels take is in `device`; the rest only plain kernels know.
struct LoweredOperation {
    cuda::Operation     device;          // rows: of one row of the step
    bool                known   = true;  // `device` says all of it
    bool                fusible = false; // the layer kernel or the prefill GEMM may run it: whole rows, one per token
    bool                logit_rows   = false;   // its rows are logit rows
    const float*        norm_bias    = nullptr; // LayerNorm's
    int                 norm_weights = 1;       // Norm: that its rows take in turn
    cuda::Bias          x_bias;                 // Norm, Activate: what the GEMM before has left to it
    cuda::HeadGemm      heads;                  // HeadGemm
    cuda::CausalConv    conv;                   // CausalConv
    cuda::Recurrence    recurrence;             // Recurrence
    int                 items     = 0;          // of attention: the step's lists for its kind
    int                 tables    = 0;          // RopeAndStore, attention: which of the step's block tables
    const cuda::Weight* positions = nullptr;    // Embed's, learned
    cuda::Route         route;                  // Route
    cuda::ExpertGemm    experts;                // ExpertGatedGemm, ExpertCombineGemm
    bool grouped = false, fp16_experts = false; // these three: the weights can be multiplied in tiles; are fp16
    bool wgmma_experts = false;                 // in tiles by wgmma
    cuda::LoraAdd       lora;                   // LoraAdd; quire.compute.cuda.adapters fills it in
    cuda::Carry         carry;                  // Carry
    cuda::Parts         parts;                  // AllReduce
    cuda::AllReduce     reduce;        // AllReduce; AllGather: `out`. Arrays of the other ranks are filled in later
    cuda::RankColumns   columns;       // AllGather; filled in later
    bool                f32   = false; // AllGather, TakeColumns, PutColumns (the result), Add: of float32, else of fp16
    const float*        times = nullptr;      // Activate's
    const std::int32_t* columns_of = nullptr; // ScatterColumns: of x, for each column of the result
};

// Steps whose operations run in different kernels.
enum class StepKind : std::uint8_t {
    one_token, // of one sequence, with its logits
    few_rows,  // up to max_layer_kernel_rows
    some_rows, // up to max_quantised_layer_rows
    more_rows,
    many_rows, // min_prefill_rows and more: prompts
};

enum class FusedKernel : std::uint8_t {
    none,              // the operation's plain kernel
    layer_kernel,      // persistent: GEMMs with their norms, SwiGLU, RoPE and KV store, between two attentions
    prefill_gemm,      // a GEMM with SwiGLU, or with RoPE and KV store, as its epilogue
    decode_megakernel, // persistent: the whole program but Argmax
    bias_in_next,      // a GEMM, and the operation that adds its biases where the library's kernel does not
    norm_in_fp8,       // a norm that makes e4m3 of its result, and the prefill_gemm that reads it
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

// Joins a GEMM with biases and the operation after it where that one is the only reader of the results and can add them, so that
// no kernel has to read and write the results for the biases alone. Both have to be alone in their groups.
void pass_biases_on(std::vector<FusionGroup>& groups, const Program& program,
                    std::span<const LoweredOperation> operations);

// Joins a norm and the prefill GEMM after it where no other operation reads the norm's result and `in_fp8` says of the GEMM that it multiplies
// in e4m3.
void join_norms(std::vector<FusionGroup>& groups, const Program& program, std::span<const LoweredOperation> operations,
                const std::function<bool(const cuda::Operation&)>& in_fp8);

// "layer kernel" ...
std::string_view name_of(FusedKernel kernel);

} // namespace quire

module :private;

namespace quire {

std::string_view name_of(FusedKernel kernel) {
    constexpr std::array<std::string_view, 6> names{
        "", "layer kernel", "prefill GEMM", "decode megakernel", "GEMM, bias in next", "norm and GEMM in fp8"};
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

// Whether no operation from `at` on reads what stands in `id` now.
static bool is_read_no_more(const Program& program, std::size_t at, ValueId id) {
    for (; at < program.operations.size(); at++) {
        const ValueAccess access = access_of(program.operations[at]);
        if (std::ranges::find(access.reads, id) != access.reads.end()) return false;
        if (std::ranges::find(access.writes, id) != access.writes.end()) return true;
    }
    return true;
}

// Whether operation i + 1 can add the biases of the GEMM before it.
static bool takes_biases(const Program& program, std::size_t i, const LoweredOperation& next_lowered) {
    const auto* gemm = std::get_if<Gemm>(&program.operations[i]);
    if (!gemm || !std::ranges::any_of(gemm->projections, [](const Projection& p) { return bool(p.bias); }))
        return false;
    const ValueId    out  = gemm->projections[0].out;
    const Operation& next = program.operations[i + 1];
    if (const auto* store = std::get_if<RopeAndStore>(&next))
        return cuda::can_add_biases(next_lowered.device.rope) && gemm->projections.size() == 3 && gemm->scale == 1 &&
               store->q == out && store->k == gemm->projections[1].out && store->v == gemm->projections[2].out &&
               is_read_no_more(program, i + 2, store->k) && is_read_no_more(program, i + 2, store->v);
    if (gemm->projections.size() != 1 || program[out].f32) return false;
    if (const auto* activate = std::get_if<Activate>(&next))
        return activate->x == out && program[out].cols % 8 == 0 && activate->times == none;
    if (const auto* norm = std::get_if<Norm>(&next))
        return norm->x == out && norm->residual != out && norm->group == program[out].cols &&
               (norm->out == out || is_read_no_more(program, i + 2, out));
    return false;
}

void pass_biases_on(std::vector<FusionGroup>& groups, const Program& program,
                    std::span<const LoweredOperation> operations) {
    const auto               alone = [](const FusionGroup& g) { return g.kernel == FusedKernel::none && g.n == 1; };
    std::vector<FusionGroup> joined;
    for (std::size_t g = 0; g < groups.size(); g++) {
        joined.push_back(groups[g]);
        const auto i = std::size_t(groups[g].first);
        if (g + 1 == groups.size() || !alone(groups[g]) || !alone(groups[g + 1]) ||
            !takes_biases(program, i, operations[i + 1]))
            continue;
        joined.back() = {FusedKernel::bias_in_next, int(i), 2};
        g++;
    }
    groups = std::move(joined);
}

void join_norms(std::vector<FusionGroup>& groups, const Program& program, std::span<const LoweredOperation> operations,
                const std::function<bool(const cuda::Operation&)>& in_fp8) {
    std::vector<FusionGroup> joined;
    for (const FusionGroup& group : groups) {
        const auto  i    = std::size_t(group.first);
        const auto* norm = joined.empty() || joined.back().n > 1 || joined.back().kernel != FusedKernel::none
                               ? nullptr
                               : std::get_if<Norm>(&program.operations[i - 1]);
        if (group.kernel == FusedKernel::prefill_gemm && norm && in_fp8(operations[i].device) &&
            operations[i].device.x == operations[i - 1].device.out &&
            operations[i].device.cols == operations[i - 1].device.cols && // a norm of whole rows
            is_read_no_more(program, i + 1, norm->out))
            joined.back() = {FusedKernel::norm_in_fp8, int(i) - 1, group.n + 1};
        else joined.push_back(group);
    }
    groups = std::move(joined);
}

} // namespace quire
