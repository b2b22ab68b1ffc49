// Implements kernels.h in a build without CUDA: there is no device, so no other function is ever called.
#include "adapters.h"
#include "guesses.h"
#include "kernels.h"
#include "ranks/ranks.h"

namespace quire::cuda {

int         n_devices() { return 0; }
const char* open_device(int, DeviceInfo&) { return "this build has no CUDA (no nvcc was found when it was made)"; }
Context*    create_context(int index, const char*& why) {
    DeviceInfo info;
    why = open_device(index, info);
    return nullptr;
}
void         destroy_context(Context*) {}
std::size_t  bytes_of(const Context&) { return 0; }
void         use(Context&) {}
bool         begin_launches(Context&) { return false; }
void         end_launches(Context&) {}
bool         is_regular(const Weight&) { return false; }
bool         can_skinny_gemm(const Context&, const Weight&) { return false; }
bool         can_layer_gemm(const Context&, const Weight&) { return false; }
int          most_splits(const Context&) { return 0; }
SplitLengths split_lengths(const Context&, int, int, std::int64_t, bool) { return {}; }
int          shared_tile_rows(int, int) { return 0; }
int          shared_split_length(const Context&, std::int64_t) { return 0; }
bool         one_warp_each(const Context&, int, int, int, int, std::int64_t, int, bool) { return false; }
void         skinny_gemm(const Half*, int, std::int64_t, const Projection*, int, Context&) {}
const char*  open_cublaslt(Context&) { return "this build has no CUDA"; }
const char*  last_error(Context&) { return nullptr; }

void*  allocate(Context&, std::size_t) { return nullptr; }
void   release(void*) {}
void*  allocate_host(std::size_t) { return nullptr; }
void   release_host(void*) {}
void   synchronize(Context&) {}
bool   is_idle(Context&) { return true; }
void   copy_to_device(void*, const void*, std::size_t, Context&) {}
void   copy_to_device_beside(void*, const void*, std::size_t, Context&) {}
void   copy_to_host(void*, const void*, std::size_t, Context&) {}
void   upload(void*, const void*, std::size_t, Context&) {}
void   end_uploads(Context&) {}
void   begin_capture(Context&) {}
void*  end_capture(Context&) { return nullptr; }
void   launch_graph(void*, Context&) {}
void   destroy_graph(void*) {}
void*  create_event() { return nullptr; }
void   destroy_event(void*) {}
void   record_event(void*, Context&) {}
double seconds_between(void*, void*) { return 0; }

bool convertible(std::uint32_t) { return false; }
void to_f16(std::uint32_t, const void*, Half*, std::int64_t, Context&) {}
void to_i8(std::uint32_t, const void*, const std::int8_t*, std::int8_t*, void*, float*, std::int64_t, Context&) {}
void i8_layout(std::uint32_t, int&, bool&, bool&) {}
int  scale_exponent_of(const Weight&, Context&) { return 0; }
void dequantize(const Weight&, Half*, Context&) {}

void        embed(const Weight&, const Weight*, float, int, const Plan&, float*, std::int64_t, Context&) {}
void        norm(const void*, bool, Bias, NormKind, const float*, const float*, float, float*, Half*, std::int64_t,
                 std::int64_t, Context&, int, const Fp8Matrix&, const NormBeside&) {}
void        gate(Activation, Half*, const void*, bool, std::int64_t, Context&) {}
void        causal_conv(const CausalConv&, const States&, Context&) {}
void        recurrence(const Recurrence&, const States&, Context&) {}
std::size_t recurrence_chunks_bytes(int, int, int, int) { return 0; }
void        lora_add(const LoraAdd&, const LoraStep&, std::int64_t, Context&) {}
void        carry(const Carry&, const CarryStep&, std::int64_t, Context&) {}
void        put_columns(const void*, bool, std::int64_t, std::int64_t, void*, bool, std::int64_t, Context&) {}
void gather_columns(const float*, std::int64_t, std::int64_t, const std::int32_t*, float*, std::int64_t, Context&) {}
void activate(Activation, Half*, const Half*, std::int64_t, Context&) {}
void activate_biased(Activation, Half*, Bias, std::int64_t, std::int64_t, Context&) {}
void soft_cap(float*, float, std::int64_t, Context&) {}
void activate_times(Activation, Half*, std::int64_t, std::int64_t, const float*, std::int64_t, Context&) {}
void add(void*, bool, const Half*, float, std::int64_t, Context&) {}
void scale_by_position(Half*, std::int64_t, std::int64_t, float, int, int, const Plan&, Context&) {}
void add_bias(void*, bool, const float*, float, std::int64_t, std::int64_t, Context&) {}
void select_rows(const float*, const std::int32_t*, float*, std::int64_t, std::int64_t, Context&) {}
void rope_and_store(const RopeStore&, const Plan&, std::int64_t, Context&) {}
void copy_blocks(const BlockPools&, const std::int32_t*, int, Context&) {}
void sample(float*, std::int64_t, const SampleTask*, int, LogitEdit*, const double*, const std::uint32_t*,
            std::int32_t*, Context&) {}
void argmax(const float*, std::int32_t*, std::int64_t, std::int64_t, Context&) {}

void attention_decode(const Attention&, const Plan&, float*, std::int32_t*, Context&) {}
int  prefill_tile(const Context&, int, int) { return 0; }
int  prefill_tile_sm90(const Context&, int) { return 0; }
void attention_prefill_sm90(const Attention&, const Plan&, const PrefillTile*, int, Context&) {}
void unpack_codes(const Attention&, const Plan&, const UnpackedBlocks*, int, int, Half*, Half*, Context&) {}
void attention_prefill(const Attention&, const Plan&, const PrefillTile*, int, Context&) {}

void gemm_plain(const Half*, std::int64_t, std::int64_t, const Projection*, int, Context&) {}
void gemv(const Half*, int, std::int64_t, const Projection*, int, bool, Context&) {}
bool gemv_gated(const Half*, const Projection&, const Projection&, Activation, Context&) { return false; }
bool is_regular(const HeadGemm&) { return false; }
void head_gemm(const HeadGemm&, std::int64_t, Context&) {}
bool tune_cublaslt(const CublasltShape&, const Half*, std::int64_t, std::int64_t, Context&) { return false; }
bool cublaslt_gemm(const Half*, std::int64_t, const Half*, const CublasltShape&, void*, Context&) { return false; }

int  expert_tile(std::int64_t, int, int, bool, bool) { return 0; }
void route(const Route&, std::int64_t, const std::int32_t*, int, const ExpertWorkspace&, Context&) {}
bool can_group(const Weight&, int) { return false; }
bool can_group_sm90(const ExpertGemm&, const Context&) { return false; }
void expert_gated(const ExpertGemm&, std::int64_t, int, const ExpertWorkspace&, Context&) {}
void expert_combine(const ExpertGemm&, std::int64_t, int, const ExpertWorkspace&, Context&) {}
void gate_rows(Half*, std::int64_t, std::int64_t, const Half*, std::int64_t, const float*, Context&) {}

void announce_ranks() {}
bool make_nccl_id(NcclId&) { return false; }
bool connect_ranks_by_nccl(Context* const*, int, int, int, const NcclId&, double, Rank**, const char*& why) {
    why = "this build has no CUDA";
    return false;
}
const char* nccl_failure(const Rank&) { return nullptr; }
void        leave_nccl(Rank&) {}
bool        connect_ranks(Context* const*, int, std::size_t, double, Rank**, const char*& why) {
    why = "this build has no CUDA";
    return false;
}
void destroy_rank(Rank*) {}
bool lost_a_rank(const Rank&) { return false; }
int  nccl_version(const Rank&) { return 0; }
void join_nccl(Rank&, Context&) {}
void all_reduce(const AllReduce&, std::int64_t, std::int64_t, Rank&, Context&) {}
void all_gather(const void*, const RankColumns&, const RankArrays&, std::int64_t, std::int64_t, int, Rank&, Context&) {}
void take_columns(const void*, std::int64_t, std::int64_t, void*, std::int64_t, std::int64_t, int, Context&) {}
void sum_parts(const Parts&, void*, bool, std::int64_t, Context&) {}
void embed_part(const Weight&, std::int32_t, const Weight*, float, int, const Plan&, float*, std::int64_t, Context&) {}

void*       make_decode_megakernel(const Operation*, int, Context&) { return nullptr; }
int         megakernel_splits(const Context&, int, int) { return 1; }
bool        run_decode_megakernel(void*, const Plan&, float*, std::int32_t*, Context&) { return false; }
void        destroy_decode_megakernel(void*) {}
std::size_t prepare_layer_kernel(Context&) { return 0; }
int         match_layer_kernel(const Operation*, int, int, const Context&) { return 0; }
int         run_layer_kernel(const Operation*, int, int, const Plan&, Context&) { return 0; }

int  match_prefill_gemm(const Operation*, int, const Context&) { return 0; }
int  run_prefill_gemm(const Operation*, int, const Plan&, Context&) { return 0; }
bool has_fp8_gemm(const Context&) { return false; }
void weight_to_fp8(const Half*, std::int64_t, std::int64_t, const Fp8Matrix&, Context&) {}
void rows_to_fp8(const Half*, std::int64_t, std::int64_t, const Fp8Matrix&, Context&) {}
int  run_fp8_gemm(const Operation*, int, const Fp8Matrix&, const Plan&, Context&) { return 0; }

} // namespace quire::cuda
