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

// An operation with device addresses. The inputs of fused kernels are in `device`; only plain kernels know the rest.
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
    decode_megakernel, // persistent: all up to the logits, but the keys of a layer that guesses
    bias_in_next,      // a GEMM, and the operation that adds its biases where the library's kernel does not
    norm_in_fp8,       // a norm that makes e4m3 of its result, and the prefill_gemm that reads it
    joined_gemvs,      // two GEMMs of one input, of a step with one row
    norm_beside,       // a norm, and operations before or after it on the same rows
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

// These join groups of single operations that have no fused kernel.
// A GEMM with biases and the operation after it, where that one is the only reader of the results and can add them, so that no kernel has to
// read and write the results for the biases alone.
void pass_biases_on(std::vector<FusionGroup>& groups, const Program& program,
                    std::span<const LoweredOperation> operations);
// Two GEMMs of one input, all of whose weights are regular.
void join_gemvs(std::vector<FusionGroup>& groups, const Program& program, std::span<const LoweredOperation> operations);
// A norm with what NormBeside says, where no other operation reads what is between: a norm before it; a GateRows and an Add to its residual, or
// the Add alone; a Gate after it.
void join_beside_norms(std::vector<FusionGroup>& groups, const Program& program);
// Of such a group: its norm, with all that the kernel needs.
struct NormCall {
    std::size_t      norm       = 0; // the operation
    void*            out        = nullptr;
    const void*      x          = nullptr;
    bool             x_is_float = false;
    cuda::NormBeside beside;
};
NormCall norm_call(const FusionGroup& group, const Program& program, std::span<const LoweredOperation> operations);

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
    constexpr std::array<std::string_view, 8> names{"",
                                                    "layer kernel",
                                                    "prefill GEMM",
                                                    "decode megakernel",
                                                    "GEMM, bias in next",
                                                    "norm and GEMM in fp8",
                                                    "joined GEMVs",
                                                    "norm with neighbours"};
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

// Joins as many single operations as `fits` says, from operation i on: at most `n`, all of which run in the same steps; less than 2: none.
static void join(std::vector<FusionGroup>& groups, const Program& program, FusedKernel kernel,
                 const std::function<int(std::size_t i, int n)>& fits) {
    const auto alone  = [](const FusionGroup& g) { return g.kernel == FusedKernel::none && g.n == 1; };
    const auto begins = [&](const FusionGroup& g) {
        const auto first = std::size_t(g.first);
        return first == program.keys || first == program.head || first == program.guesses;
    };
    std::vector<FusionGroup> joined;
    for (std::size_t g = 0; g < groups.size(); g++) {
        joined.push_back(groups[g]);
        int n = 0;
        while (g + std::size_t(n) < groups.size() && alone(groups[g + std::size_t(n)]) &&
               (n == 0 || !begins(groups[g + std::size_t(n)])))
            n++;
        if (const int some = n > 1 ? fits(std::size_t(groups[g].first), n) : 0; some > 1) {
            joined.back() = {kernel, groups[g].first, some};
            g += std::size_t(some) - 1;
        }
    }
    groups = std::move(joined);
}

void pass_biases_on(std::vector<FusionGroup>& groups, const Program& program,
                    std::span<const LoweredOperation> operations) {
    join(groups, program, FusedKernel::bias_in_next,
         [&](std::size_t i, int) { return takes_biases(program, i, operations[i + 1]) ? 2 : 0; });
}

void join_gemvs(std::vector<FusionGroup>& groups, const Program& program,
                std::span<const LoweredOperation> operations) {
    join(groups, program, FusedKernel::joined_gemvs, [&](std::size_t i, int) {
        const auto *a = std::get_if<Gemm>(&program.operations[i]), *b = std::get_if<Gemm>(&program.operations[i + 1]);
        const auto  regular = [&](std::size_t k) {
            const cuda::Operation& op = operations[k].device;
            return std::ranges::all_of(std::span(op.projection).first(std::size_t(op.n_projections)),
                                        [](const cuda::Projection& p) { return cuda::is_regular(p.weight); });
        };
        return a && b && a->x == b->x && regular(i) && regular(i + 1) ? 2 : 0;
    });
}

static bool can_norm_beside(const Norm& norm) {
    return norm.kind == NormKind::rms && cuda::can_norm_beside(cuda::NormKind::rms, norm.group);
}

// How many operations from i on, up to n, are a norm with its neighbours.
static int norm_with_neighbours(const Program& program, std::size_t i, int n) {
    const std::vector<Operation>& ops = program.operations;
    const auto no_more = [&](std::size_t after, ValueId id) { return is_read_no_more(program, after, id); };
    if (const auto* first = std::get_if<Norm>(&ops[i])) {
        if (!can_norm_beside(*first) || first->residual != none || program[first->out].logit_rows) return 0;
        if (const auto* gate = std::get_if<Gate>(&ops[i + 1]))
            return gate->x == first->out && gate->activation == Activation::silu && no_more(i + 2, first->out) ? 2 : 0;
        const auto* second = std::get_if<Norm>(&ops[i + 1]);
        return second && second->x == first->out && second->residual != first->out && can_norm_beside(*second) &&
                       first->weight && first->group == program[first->x].cols && second->group == first->group &&
                       (second->out == first->out || no_more(i + 2, first->out))
                   ? 2
                   : 0;
    }
    const auto* gated = std::get_if<GateRows>(&ops[i]);
    if (gated && n < 3) return 0;
    const std::size_t at   = gated ? i + 1 : i;
    const auto*       add  = std::get_if<Add>(&ops[at]);
    const auto*       norm = add ? std::get_if<Norm>(&ops[at + 1]) : nullptr;
    if (!norm || add->scale != 1 || !program[add->residual].f32 || program[add->residual].logit_rows ||
        norm->residual != add->residual ||
        (gated && (gated->x != add->x || program[gated->gate].cols != norm->group)) || norm->x == add->x ||
        norm->group != program[norm->residual].cols || !can_norm_beside(*norm) ||
        (norm->out != add->x && !no_more(at + 2, add->x)))
        return 0;
    return int(at + 2 - i);
}

void join_beside_norms(std::vector<FusionGroup>& groups, const Program& program) {
    join(groups, program, FusedKernel::norm_beside,
         [&](std::size_t i, int n) { return norm_with_neighbours(program, i, n); });
}

NormCall norm_call(const FusionGroup& group, const Program& program, std::span<const LoweredOperation> operations) {
    NormCall call;
    for (std::size_t i = std::size_t(group.first); i < std::size_t(group.first + group.n); i++) {
        const cuda::Operation& op   = operations[i].device;
        const Operation&       what = program.operations[i];
        if (std::holds_alternative<Norm>(what)) {
            if (call.x == nullptr) call.x = op.x, call.x_is_float = op.x_is_float;
            else
                call.beside.first_weight = operations[call.norm].device.norm_weight,
                call.beside.first_eps    = operations[call.norm].device.eps;
            call.norm = i, call.out = op.out;
        } else if (std::holds_alternative<Gate>(what)) {
            call.out = op.out, call.beside.gates = true;
        } else if (std::holds_alternative<GateRows>(what)) {
            call.beside.gate = static_cast<const cuda::Half*>(op.x), call.beside.gate_weight = op.norm_weight;
        } else call.beside.more = static_cast<const cuda::Half*>(op.x);
    }
    return call;
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
