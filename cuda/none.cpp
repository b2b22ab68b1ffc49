// Implements kernels.h in a build without CUDA: there is no device, so no other function is ever called.
#include "kernels.h"

namespace quire::cuda {

const char*  open_device(int, DeviceInfo&) { return "this build has no CUDA (no nvcc was found when it was made)"; }
bool         can_batch(const Weight&) { return false; }
DecodeChunks decode_chunks(int, std::int64_t) { return {}; }
void         matmul_batch(const Half*, int, std::int64_t, const Product*, int, Stream) {}
const char*  open_blas() { return "this build has no CUDA"; }
const char*  last_error() { return nullptr; }

void*  allocate(std::size_t) { return nullptr; }
void   release(void*) {}
void*  allocate_host(std::size_t) { return nullptr; }
void   release_host(void*) {}
Stream create_stream() { return nullptr; }
void   destroy_stream(Stream) {}
void   synchronize(Stream) {}
void   copy_to_device(void*, const void*, std::size_t, Stream) {}
void   copy_to_host(void*, const void*, std::size_t, Stream) {}
void   upload(void*, const void*, std::size_t) {}
void   begin_capture(Stream) {}
void*  end_capture(Stream) { return nullptr; }
void   launch_graph(void*, Stream) {}
void   destroy_graph(void*) {}
void*  create_event() { return nullptr; }
void   record_event(void*, Stream) {}
double seconds_between(void*, void*) { return 0; }

bool convertible(std::uint32_t) { return false; }
void to_f16(std::uint32_t, const void*, Half*, std::int64_t, Stream) {}
void to_i8(std::uint32_t, const void*, std::int8_t*, void*, float*, std::int64_t, Stream) {}
void i8_layout(std::uint32_t, int&, bool&, bool&) {}
void dequantize(const Weight&, Half*, Stream) {}

void embed(const Weight&, const Weight*, const Plan&, float*, std::int64_t, Stream) {}
void norm(const void*, bool, const float*, const float*, float, float*, Half*, std::int64_t, std::int64_t, Stream) {}
void silu_mul(Half*, const Half*, std::int64_t, Stream) {}
void gelu(Half*, std::int64_t, Stream) {}
void add(float*, const Half*, std::int64_t, Stream) {}
void add_bias(Half*, const float*, std::int64_t, std::int64_t, Stream) {}
void select_rows(const float*, const std::int32_t*, float*, std::int64_t, std::int64_t, Stream) {}
void rope_and_store(const RopeStore&, const Plan&, std::int64_t, Stream) {}
void copy_blocks(const BlockPools&, const std::int32_t*, int, Stream) {}
void sample(float*, std::int64_t, const SampleTask*, int, LogitEdit*, const double*, std::int32_t*, Stream) {}
void argmax(const float*, std::int32_t*, std::int64_t, std::int64_t, Stream) {}

void attention_decode(const Attention&, const Plan&, float*, std::int32_t*, Stream) {}
int  prefill_tile(int) { return 0; }
int  prefill_tile_hopper(int) { return 0; }
void attention_prefill_hopper(const Attention&, const Plan&, const PrefillTile*, int, Stream) {}
void attention_prefill(const Attention&, const Plan&, const PrefillTile*, int, Stream) {}

void matmul_vector(const Half*, int, std::int64_t, const Product*, int, bool, Stream) {}
bool matmul_gated(const Half*, const Weight&, const Weight&, Half*, Stream) { return false; }
void matmul_blas(const Half*, std::int64_t, const Half*, std::int64_t, std::int64_t, void*, bool, Stream, int,
                 std::int64_t, std::int64_t) {}

void*       make_tape(const TapeOp*, int) { return nullptr; }
bool        run_tape(void*, const Plan&, float*, std::int32_t*, Stream) { return false; }
void        destroy_tape(void*) {}
std::size_t prepare_dense() { return 0; }
int         run_dense(const TapeOp*, int, int, const Plan&, Stream) { return 0; }

bool can_prompt(const TapeOp&) { return false; }
int  run_prompt(const TapeOp*, int, const Plan&, Stream) { return 0; }

} // namespace quire::cuda
