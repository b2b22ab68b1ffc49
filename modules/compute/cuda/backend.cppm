// quire.compute.cuda.backend: the NVIDIA GPU backend, on top of cuda/kernels.h. **Owns** the stream, device memory, the weights in device
// layout, and the captured CUDA graphs of decode steps.
module;

#include "../../../cuda/kernels.h"

export module quire.compute.cuda.backend;

import quire.compute.backend;
import quire.core.base;
import quire.model_file.quants;
import quire.core.recent;
import quire.paging.block;
import quire.schedule.request;
import quire.schedule.step_plan;
import quire.core.std;
import quire.core.tensor;

export namespace quire {

struct CudaOptions {
    int    device             = 0;
    double memory_utilization = 0.92;  // of the device's memory, for weights, workspaces and KV together
    bool   deterministic      = false; // the same bits in any batch and with any chunking, at the price of slow prompts
};

// Error: no such device, and why.
Result<std::unique_ptr<Backend>> make_cuda_backend(const CudaOptions& options);

} // namespace quire

module :private;

namespace quire {

// Rows of a decoding step, rounded up: each size is captured once.
static int rounded_rows(int n) {
    for (int size : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128})
        if (n <= size) return size;
    return (n + 31) / 32 * 32;
}

static int rounded_items(int n) {
    const int step = std::max(8, int(std::bit_floor(unsigned(n))) / 4);
    return (n + step - 1) / step * step;
}

// Of the buffer that sampling sends up: random numbers, then tasks, then edits.
static std::size_t sampling_bytes(std::size_t n_tasks, std::size_t n_uniforms, std::size_t n_edits) {
    return n_tasks * sizeof(cuda::SampleTask) + n_uniforms * sizeof(double) + n_edits * sizeof(cuda::LogitEdit);
}

constexpr int least_prompt = 1536; // rows from which on our kernel of prompts is faster than the library

// Steps that are kept captured, and what one takes of the device for each layer, about (measured on an H100).
constexpr std::size_t most_graphs = 128, graph_bytes_of_layer = std::size_t(64) << 10;

class CudaBackend final : public Backend {
public:
    CudaBackend(const CudaOptions& options, const cuda::DeviceInfo& info, cuda::Context* gpu)
        : options_(options), info_(info), gpu_(gpu),
          has_blas_(!options.deterministic && cuda::open_blas(*gpu) == nullptr) {}
    ~CudaBackend() override {
        cuda::use(*gpu_);
        cuda::synchronize(*gpu_);
        graphs_.each(forget_graph);
        cuda::destroy_tape(tape_);
        cuda::release(staging_);
        for (void* memory : owned_) cuda::release(memory);
        for (void* memory : owned_host_) cuda::release_host(memory);
        cuda::destroy_context(gpu_);
    }
    CudaBackend(const CudaBackend&)            = delete;
    CudaBackend& operator=(const CudaBackend&) = delete;

    std::string describe() const override {
        return cat(info_.name, ", compute ", info_.major, ".", info_.minor, ", ", info_.total >> 30, " GiB",
                   options_.deterministic ? ", deterministic" : "");
    }

    Result<Buffer>         allocate(std::size_t bytes) override;
    Result<Buffer>         allocate_host(std::size_t bytes) override;
    std::size_t            memory_available() const override;
    std::size_t            memory_for_cache() const override;
    std::size_t            memory_taken() const override { return taken_ + cuda::bytes_of(*gpu_); }
    DType                  activation_type() const override { return DType::F16; }
    Result<TensorView>     prepare(const TensorView& weight) override;
    Result<TensorView>     prepare_lookup(const TensorView& weight) override;
    void                   end_weights() override;
    Result<void>           prepare_steps(const StepLimits& limits) override;
    std::span<const float> to_host(const Tensor& tensor) override;

    StepShape begin_step(const StepPlan& plan) override;
    bool      replay_step() override;
    void      end_step() override;

    void embed(const TensorView& weight, const TensorView& positions, Tensor out) override;
    void norm(Tensor x, const TensorView& weight, const TensorView& bias, float eps, Tensor* residual,
              Tensor out) override;
    void matmul(Tensor x, std::span<const Projection> projections) override;
    void rope_and_store(Tensor q, Tensor k, Tensor v, const Rope& rope, const KvLayer& cache) override;
    void attention(Tensor q, const KvLayer& cache, const AttentionParams& params, Tensor out) override;
    void activate(Activation activation, Tensor x, const Tensor* up) override;
    void gated(Tensor x, const Projection& gate, const Projection& up) override;
    void add(Tensor x, Tensor y) override;
    void select_logit_rows(Tensor x, Tensor out) override;
    void choose_best(Tensor logits) override {
        flush();
        cuda::argmax(floats(logits), best_, logits.rows, logits.cols, *gpu_);
    }
    SamplingLimits sampling_limits() const override { return sampling_limits_; }
    void           sample(Tensor logits) override;
    StepResults    results() override;
    void           copy_blocks(std::span<const BlockCopy> copies, std::span<const KvLayer> from,
                               std::span<const KvLayer> to) override;

private:
    using Half = cuda::Half;
    static Half*               halves(const Tensor& t) { return static_cast<Half*>(t.data); }
    static float*              floats(const Tensor& t) { return static_cast<float*>(t.data); }
    static const cuda::Weight& weight_of(const TensorView& view) {
        return *static_cast<const cuda::Weight*>(view.data);
    }
    static const float* vector_of(const TensorView& view) {
        return view ? static_cast<const float*>(weight_of(view).data) : nullptr;
    }
    void* take(std::size_t bytes); // device memory that lives as long as the backend, or null
    void* take_weight(std::size_t bytes);
    bool  stage(const TensorView& view, const std::function<void(std::int64_t first, std::int64_t n)>& convert);
    void  tune();
    void  check_device(std::string_view what) {
        if (const char* error = cuda::last_error(*gpu_)) check(false, cat("CUDA, ", what, ": ", error));
    }

    CudaOptions                      options_;
    cuda::DeviceInfo                 info_;
    cuda::Context*                   gpu_;
    bool                             has_blas_, has_dense_ = false;
    std::vector<void*>               owned_, owned_host_;
    std::deque<cuda::Weight>         weights_;     // what prepared views point to
    std::vector<const cuda::Weight*> multiplied_;  // of these, the matrices that are not only looked up
    std::map<const float*, float*>   frequencies_; // of RoPE, on the device
    std::size_t                      taken_      = 0;
    std::byte*                       arena_      = nullptr; // for weights to come
    std::size_t                      arena_left_ = 0;
    void* staging_ = nullptr; // while weights come: raw blocks on their way into another form

    // The step: one pinned buffer, sent up in one copy. Regions stand at fixed places, so that graphs can name them.
    StepLimits    limits_;
    std::int32_t *host_ = nullptr, *device_ = nullptr;
    std::size_t   at_positions_ = 0, at_slots_ = 0, at_rows_ = 0, at_starts_ = 0, at_items_ = 0, at_tiles_ = 0,
                at_tables_ = 0, plan_ints_ = 0;
    const StepPlan* plan_ = nullptr;
    cuda::Plan      on_device_;
    StepShape       shape_;
    int             n_tiles_   = 0;
    bool            capturing_ = false;
    bool            alone_     = false;              // on the device, in this step
    using GraphKey             = std::array<int, 4>; // rows, items, short items, alone
    GraphKey    graph_key() const { return {shape_.tokens, on_device_.items.n, on_device_.items.n_short, alone_}; }
    static void forget_graph(void*& graph) {
        if (graph != nullptr) cuda::destroy_graph(graph);
    }
    Recent<GraphKey, void*> graphs_{most_graphs}; // executable; null: the shape came once, and ran as it was
    // Steps of one token: what the first one was told becomes one kernel, where the GPU has that.
    enum class Telling : std::uint8_t { not_yet, now, done };
    Telling                   telling_ = Telling::not_yet;
    std::vector<cuda::TapeOp> told_;
    void*                     tape_        = nullptr;
    const float*              tape_logits_ = nullptr;
    bool                      one_token() const {
        return shape_.tokens == 1 && shape_.logit_rows == 1 && n_tiles_ == 0 && !options_.deterministic;
    }
    void tell(const cuda::TapeOp& op) {
        if (telling_ == Telling::now) told_.push_back(op);
    }
    // Norms, products and rotations that have not begun yet.
    std::vector<cuda::TapeOp> queue_;
    void                      submit(const cuda::TapeOp& op);
    void                      flush();
    void                      run(const cuda::TapeOp& op);
    void                      multiply(const cuda::TapeOp& op);
    void                      multiply_rows(const cuda::TapeOp& op, std::span<const cuda::Product> products, int most);
    int                       run_prompt(std::span<const cuda::TapeOp> ops);
    float*                    partial_ = nullptr;
    std::int32_t*             tickets_ = nullptr;
    std::int32_t*             best_ = nullptr; // of each logit row; pinned, so that kernels write it there themselves
    Half*                     dequantized_      = nullptr;
    std::int64_t              dequantized_size_ = 0;
    float*                    logits_           = nullptr; // pinned
    std::size_t               logits_size_      = 0;
    // Sampling: tasks, draws and edits go up in one copy, answers come back with the best tokens.
    SamplingLimits sampling_limits_;
    std::byte *    host_sampling_ = nullptr, *sampling_ = nullptr;
    TokenLogprob * host_answers_ = nullptr, *answers_ = nullptr;
    std::size_t    n_answers_ = 0;
    // Block moves
    std::int32_t *host_pairs_ = nullptr, *pairs_ = nullptr;
    const void**  pool_pointers_[2] = {nullptr, nullptr}; // device arrays of K and V bases: device pool, swap pool
    bool          pools_sent_[2]    = {false, false};
    std::size_t   n_pairs_          = 0;
};

Result<std::unique_ptr<Backend>> make_cuda_backend(const CudaOptions& options) {
    cuda::DeviceInfo info;
    const char*      why = cuda::open_device(options.device, info);
    cuda::Context*   gpu = why == nullptr ? cuda::create_context(options.device, why) : nullptr;
    if (gpu == nullptr) return fail_with(ErrorKind::system, "no GPU to run on: ", why);
    return std::make_unique<CudaBackend>(options, info, gpu);
}

// -- memory

Result<Buffer> CudaBackend::allocate(std::size_t bytes) {
    cuda::use(*gpu_);
    void* data = cuda::allocate(*gpu_, bytes);
    if (data == nullptr) return fail_with(ErrorKind::system, "the GPU has no ", bytes >> 20, " MiB of memory left");
    taken_ += bytes;
    return Buffer(data, bytes, [](void* p, std::size_t) { cuda::release(p); });
}

Result<Buffer> CudaBackend::allocate_host(std::size_t bytes) {
    void* data = cuda::allocate_host(bytes);
    if (data == nullptr) return fail_with(ErrorKind::system, "cannot pin ", bytes >> 20, " MiB of memory");
    return Buffer(data, bytes, [](void* p, std::size_t) { cuda::release_host(p); });
}

// Weights stand one after another, so that those of one input can be multiplied at once.
void* CudaBackend::take_weight(std::size_t bytes) {
    const std::size_t most = info_.total / 256; // half a GiB on a large device
    bytes                  = (bytes + 255) / 256 * 256;
    if (bytes > most / 2) return take(bytes);
    if (arena_left_ < bytes) {
        const std::size_t chunk =
            std::min(most, std::max({4 * bytes, taken_, std::size_t(16) << 20})); // more as there are more
        arena_      = static_cast<std::byte*>(take(chunk));
        arena_left_ = arena_ != nullptr ? chunk : 0;
        if (arena_ == nullptr) return nullptr;
    }
    arena_left_ -= bytes;
    return std::exchange(arena_, arena_ + bytes);
}

void* CudaBackend::take(std::size_t bytes) {
    void* memory = cuda::allocate(*gpu_, bytes);
    if (memory != nullptr) {
        owned_.push_back(memory);
        taken_ += bytes;
    }
    return memory;
}

std::size_t CudaBackend::memory_available() const {
    cuda::DeviceInfo now;
    return cuda::open_device(options_.device, now) == nullptr ? now.free : 0;
}

std::size_t CudaBackend::memory_for_cache() const {
    const std::size_t left    = memory_available();
    const std::size_t layers  = multiplied_.size() / 6 + 1; // at most: each has six matrices, or seven
    const auto        reserve = std::size_t(double(info_.total) * (1 - options_.memory_utilization)) +
                         most_graphs * graph_bytes_of_layer * layers;
    return left > reserve ? left - reserve : 0;
}

// Sends raw blocks up, some at a time, and has each lot made into what `convert` makes of elements first .. first + n - 1.
// False: there is no memory for them.
bool CudaBackend::stage(const TensorView&                                              view,
                        const std::function<void(std::int64_t first, std::int64_t n)>& convert) {
    constexpr std::size_t room = std::size_t(64) << 20;
    if (staging_ == nullptr) staging_ = cuda::allocate(*gpu_, room);
    if (staging_ == nullptr) return false;
    const DTypeInfo&   info = dtype_info(view.type);
    const std::int64_t all = view.rows * view.cols, most = std::int64_t(room) / info.bytes * info.items;
    for (std::int64_t first = 0; first < all; first += most) {
        const std::int64_t n = std::min(most, all - first);
        cuda::upload(staging_, static_cast<const std::byte*>(view.data) + row_bytes(view.type, first),
                     row_bytes(view.type, n), *gpu_);
        convert(first, n);
        cuda::synchronize(*gpu_); // the room is used again
    }
    return true;
}

void CudaBackend::end_weights() {
    cuda::release(std::exchange(staging_, nullptr));
    cuda::end_uploads(*gpu_);
}

Result<TensorView> CudaBackend::prepare(const TensorView& view) {
    const Result<TensorView> ready = prepare_lookup(view);
    if (!ready) return ready;
    const cuda::Weight& w = weight_of(*ready);
    if (w.form == cuda::WeightForm::i8 || w.form == cuda::WeightForm::q4_k)
        dequantized_size_ = std::max(dequantized_size_, w.rows * w.cols);
    if (cuda::is_regular(w)) multiplied_.push_back(&w);
    return ready;
}

Result<TensorView> CudaBackend::prepare_lookup(const TensorView& view) {
    cuda::use(*gpu_);
    const std::int64_t n         = view.rows * view.cols;
    const std::size_t  bytes     = row_bytes(view.type, view.cols) * std::size_t(view.rows);
    const auto         no_memory = [&] {
        return fail_with(ErrorKind::system, "the GPU has no memory left for a matrix of ", view.rows, " × ", view.cols);
    };
    cuda::Weight w;
    w.rows          = view.rows;
    w.cols          = view.cols;
    const auto type = std::uint32_t(view.type);
    if (view.rows == 1 && view.type == DType::F32) {
        w.form     = cuda::WeightForm::f32;
        void* data = take_weight(bytes);
        if (!data) return no_memory();
        cuda::upload(data, view.data, bytes, *gpu_);
        w.data = data;
    } else if (view.type == DType::F16 || view.type == DType::Q4_K) {
        w.form     = view.type == DType::F16 ? cuda::WeightForm::f16 : cuda::WeightForm::q4_k;
        void* data = take_weight(bytes);
        if (!data) return no_memory();
        cuda::upload(data, view.data, bytes, *gpu_);
        w.data = data;
    } else if (view.type == DType::F32 || view.type == DType::BF16) {
        w.form     = cuda::WeightForm::f16;
        auto* data = static_cast<Half*>(take_weight(std::size_t(n) * 2));
        if (!data || !stage(view, [&](std::int64_t first, std::int64_t some) {
                cuda::to_f16(type, staging_, data + first, some, *gpu_);
            }))
            return no_memory();
        w.data = data;
    } else if (cuda::convertible(type)) {
        w.form        = cuda::WeightForm::i8;
        bool has_mins = false;
        cuda::i8_layout(type, w.group, w.float_scales, has_mins);
        const auto        groups     = std::size_t(n / w.group);
        const std::size_t scale_size = w.float_scales ? 4 : 2;
        auto*             q          = static_cast<std::int8_t*>(take(std::size_t(n)));
        auto*             scales     = static_cast<std::byte*>(take(groups * scale_size));
        auto*             mins       = static_cast<float*>(has_mins ? take(groups * 4) : nullptr);
        if (!q || !scales || (has_mins && !mins) || !stage(view, [&](std::int64_t first, std::int64_t some) {
                const std::int64_t group = first / w.group;
                cuda::to_i8(type, staging_, q + first, scales + std::size_t(group) * scale_size,
                            mins ? mins + group : nullptr, some, *gpu_);
            }))
            return no_memory();
        w.data   = q;
        w.scales = scales;
        w.mins   = mins;
    } else { // a rare type: as halves, by way of the CPU's reference
        w.form = cuda::WeightForm::f16;
        std::vector<float> row(static_cast<std::size_t>(view.cols));
        std::vector<Half>  all(static_cast<std::size_t>(n));
        for (std::int64_t r = 0; r < view.rows; r++) {
            dequantize(view.type,
                       static_cast<const std::byte*>(view.data) + std::size_t(r) * row_bytes(view.type, view.cols),
                       row.data(), view.cols);
            for (std::int64_t c = 0; c < view.cols; c++)
                all[std::size_t(r * view.cols + c)] = f32_to_f16(row[std::size_t(c)]);
        }
        void* data = take_weight(std::size_t(n) * 2);
        if (!data) return no_memory();
        cuda::upload(data, all.data(), std::size_t(n) * 2, *gpu_);
        w.data = data;
    }
    if (const char* error = cuda::last_error(*gpu_)) return fail_with(ErrorKind::system, "CUDA: ", error);
    weights_.push_back(w);
    return TensorView{view.type, view.rows, view.cols, &weights_.back()};
}

// Has the library's algorithms tried for the products that it will be asked for: those of each shape, and of neighbours
// of one shape together (multiply()).
void CudaBackend::tune() {
    std::set<std::array<std::int64_t, 3>> done; // rows, cols, matrices
    const auto is_f16 = [](const cuda::Weight& w) { return w.form == cuda::WeightForm::f16; };
    const auto tune   = [&](const cuda::Weight& w, int count, std::int64_t stride) {
        if (!done.insert({w.rows, w.cols, count}).second) return;
        const bool  logits = w.rows == limits_.vocab_size;
        const Half* values = static_cast<const Half*>(w.data);
        if (!is_f16(w)) {
            cuda::dequantize(w, dequantized_, *gpu_);
            values = dequantized_;
        }
        const cuda::BlasShape shape{w.rows, w.cols, logits, count, stride, 0};
        // Fewer rows, and many, have kernels of our own.
        cuda::TapeOp op;
        op.kind       = cuda::TapeOp::products;
        op.cols       = w.cols;
        op.product[0] = {w};
        op.n_products = 1;
        int least = 1, most = logits ? limits_.max_logit_rows : limits_.max_tokens;
        if (!logits && is_f16(w) && has_dense_) least = cuda::most_dense_rows + 1;
        if (!is_f16(w) && cuda::can_batch(*gpu_, w)) least = cuda::most_batch_rows + 1;
        if (!logits && cuda::can_prompt(*gpu_, op)) most = std::min(most, least_prompt - 1);
        cuda::tune_blas(shape, values, least, most, *gpu_);
    };
    const auto apart = [&](std::size_t i) { // of a matrix and the next, where they may go together; else 0
        if (i + 1 >= multiplied_.size()) return std::ptrdiff_t(0);
        const cuda::Weight &a = *multiplied_[i], &b = *multiplied_[i + 1];
        const bool          alike = is_f16(a) && is_f16(b) && a.rows == b.rows && a.cols == b.cols;
        return alike ? static_cast<const Half*>(b.data) - static_cast<const Half*>(a.data) : 0;
    };
    for (std::size_t i = 0; i < multiplied_.size(); i++) {
        tune(*multiplied_[i], 1, 0);
        if (apart(i) <= 0 || (i > 0 && apart(i - 1) == apart(i))) continue;
        tune(*multiplied_[i], apart(i + 1) == apart(i) ? 3 : 2, apart(i));
    }
}

Result<void> CudaBackend::prepare_steps(const StepLimits& l) {
    limits_ = l;
    cuda::use(*gpu_);
    if (l.n_heads > 65535) return fail_with(ErrorKind::input, "the GPU's kernels know 65535 heads, not ", l.n_heads);
    has_dense_         = !options_.deterministic && cuda::prepare_dense(*gpu_) > 0;
    limits_.max_tokens = std::max(l.max_tokens, 8);
    const auto T = std::size_t(limits_.max_tokens), S = std::size_t(l.max_sequences) + 1,
               L = std::size_t(l.max_logit_rows);
    // In deterministic steps every token is an item; else one token of each sequence.
    const std::size_t chunks = std::size_t(l.context) / cuda::attention_chunk + 2;
    const std::size_t items  = options_.deterministic
                                   ? std::size_t(rounded_items(int(T * chunks)))
                                   : 2 * std::size_t(rounded_items(int(S * chunks))); // long and short
    const std::size_t tables = S * (std::size_t(l.max_blocks_per_sequence) + 1);
    at_positions_            = T;
    at_slots_                = 2 * T;
    at_rows_                 = 3 * T;
    at_starts_               = at_rows_ + std::max(L, T);
    at_items_                = at_starts_ + S;
    at_tiles_                = at_items_ + items * sizeof(cuda::DecodeItem) / 4;
    at_tables_               = at_tiles_ + T * 3;
    plan_ints_               = at_tables_ + tables;
    host_                    = static_cast<std::int32_t*>(cuda::allocate_host(plan_ints_ * 4));
    device_                  = static_cast<std::int32_t*>(take(plan_ints_ * 4));
    partial_         = static_cast<float*>(take(items * std::size_t(l.n_heads) * std::size_t(l.head_dim + 2) * 4));
    tickets_         = static_cast<std::int32_t*>(take(T * std::size_t(l.n_heads) * 4));
    logits_size_     = std::max(L, std::size_t(rounded_rows(int(L)))) * std::size_t(l.vocab_size);
    logits_          = static_cast<float*>(cuda::allocate_host(logits_size_ * 4));
    best_            = static_cast<std::int32_t*>(cuda::allocate_host((std::max(L, T) + 64) * 4));
    const int rows   = int(std::max(L, T));
    sampling_limits_ = {rows, 65536, 16 * rows, 128 * rows, std::min(cuda::most_top, l.vocab_size)};
    const std::size_t request =
        sampling_bytes(std::size_t(rows), std::size_t(sampling_limits_.uniforms), std::size_t(sampling_limits_.edits));
    const std::size_t reply = std::size_t(sampling_limits_.results) * sizeof(TokenLogprob);
    host_sampling_          = static_cast<std::byte*>(cuda::allocate_host(request));
    sampling_               = static_cast<std::byte*>(take(request));
    host_answers_           = static_cast<TokenLogprob*>(cuda::allocate_host(reply));
    answers_                = static_cast<TokenLogprob*>(take(reply));
    n_pairs_                = 4096;
    host_pairs_             = static_cast<std::int32_t*>(cuda::allocate_host(n_pairs_ * 8));
    pairs_                  = static_cast<std::int32_t*>(take(n_pairs_ * 8));
    for (auto& pointers : pool_pointers_)
        pointers = static_cast<const void**>(take(std::size_t(l.n_layers) * 2 * sizeof(void*)));
    if (dequantized_size_ > 0) dequantized_ = static_cast<Half*>(take(std::size_t(dequantized_size_) * 2));
    for (void* memory :
         {static_cast<void*>(host_), static_cast<void*>(logits_), static_cast<void*>(host_pairs_),
          static_cast<void*>(best_), static_cast<void*>(host_sampling_), static_cast<void*>(host_answers_)})
        if (memory != nullptr) owned_host_.push_back(memory);
    if (!host_ || !device_ || !partial_ || !tickets_ || !logits_ || !host_pairs_ || !best_ || !pairs_ ||
        !host_sampling_ || !sampling_ || !host_answers_ || !answers_ || !pool_pointers_[1] ||
        (dequantized_size_ > 0 && !dequantized_))
        return fail_with(ErrorKind::system, "the GPU has no memory left for the workspaces of a step");
    on_device_.tokens       = device_;
    on_device_.positions    = device_ + at_positions_;
    on_device_.slots        = device_ + at_slots_;
    on_device_.logit_rows   = device_ + at_rows_;
    on_device_.table_start  = device_ + at_starts_;
    on_device_.block_tables = device_ + at_tables_;
    on_device_.items.list   = reinterpret_cast<const cuda::DecodeItem*>(device_ + at_items_);
    if (has_blas_) tune();
    if (const char* error = cuda::last_error(*gpu_)) return fail_with(ErrorKind::system, "CUDA: ", error);
    return {};
}

std::span<const float> CudaBackend::to_host(const Tensor& t) {
    const auto n = std::size_t(t.rows * t.cols);
    check(t.type == DType::F32 && n <= logits_size_, "to_host: not the logits");
    cuda::copy_to_host(logits_, t.data, n * 4, *gpu_);
    cuda::synchronize(*gpu_);
    check_device("a step");
    return {logits_, n};
}

// -- the step

StepShape CudaBackend::begin_step(const StepPlan& plan) {
    cuda::use(*gpu_);
    alone_             = cuda::begin_launches(*gpu_);
    plan_              = &plan;
    const int T        = plan.n_tokens();
    bool      decoding = !options_.deterministic && T == plan.n_seqs() && plan.logit_rows.size() == plan.tokens.size();
    shape_             = {T, int(plan.logit_rows.size())};
    if (decoding && rounded_rows(T) <= limits_.max_tokens && rounded_rows(T) <= limits_.max_logit_rows)
        shape_.tokens = shape_.logit_rows = rounded_rows(T);
    else decoding = false;
    check(shape_.tokens <= limits_.max_tokens && plan.n_seqs() <= limits_.max_sequences,
          "a step larger than announced");
    check(at_tables_ + plan.block_tables.size() <= plan_ints_, "more block tables than announced");

    const auto put = [&](std::size_t at, const std::vector<std::int32_t>& values) {
        std::copy(values.begin(), values.end(), host_ + at);
    };
    put(0, plan.tokens);
    put(at_positions_, plan.positions);
    put(at_slots_, plan.slots);
    put(at_rows_, plan.logit_rows);
    std::copy_n(plan.table_start.begin(), plan.n_seqs(), host_ + at_starts_);
    put(at_tables_, plan.block_tables);
    for (int t = T; t < shape_.tokens; t++) {
        host_[t] = host_[at_positions_ + std::size_t(t)] = 0;
        host_[at_slots_ + std::size_t(t)]                = -1;
    }
    for (int l = int(plan.logit_rows.size()); l < shape_.logit_rows; l++) host_[at_rows_ + std::size_t(l)] = 0;

    n_tiles_           = 0;
    int        n_items = 0;
    const auto item    = [&](const cuda::DecodeItem& i) {
        std::memcpy(host_ + at_items_ + std::size_t(n_items++) * sizeof i / 4, &i, sizeof i);
    };
    const int  tile      = cuda::prefill_tile(*gpu_, limits_.head_dim);
    const auto seen_from = [&](int row) { // by the token of a row
        return limits_.window > 0 ? std::max(0, plan.positions[std::size_t(row)] - limits_.window + 1) : 0;
    };
    const auto single = [&](int s) { // a sequence of one query
        return plan.token_start[std::size_t(s) + 1] - plan.token_start[std::size_t(s)] == 1;
    };
    cuda::DecodeChunks chunks;
    if (!options_.deterministic) {
        std::int64_t work = 0;
        for (int s = 0; s < plan.n_seqs(); s++)
            if (const int row = plan.token_start[std::size_t(s)]; single(s))
                work += plan.positions[std::size_t(row)] + 1 - seen_from(row);
        chunks = cuda::decode_chunks(*gpu_, limits_.head_dim, work * limits_.n_kv_heads);
    }
    const auto one_query = [&](int row, int s, int chunk) {
        const int begin = seen_from(row), end = plan.positions[std::size_t(row)] + 1,
                  old = plan.positions[std::size_t(plan.token_start[std::size_t(s)])];
        // The same chunks whatever the step, or of equal length.
        const bool fixed = options_.deterministic;
        const int  from  = fixed ? begin / chunk * chunk : begin;
        const auto [n, length] =
            fixed ? cuda::Chunks{(end - from + chunk - 1) / chunk, chunk} : cuda::chunks_of(end - from, chunk);
        for (int c = 0; c < n; c++)
            item({row, plan.table_start[std::size_t(s)], std::max(begin, from + c * length),
                  std::min(end, from + (c + 1) * length), n, c, old});
    };
    for (int s = 0; s < plan.n_seqs(); s++) {
        const int first = plan.token_start[std::size_t(s)], end = plan.token_start[std::size_t(s) + 1];
        if (tile > 0 && (single(s) || options_.deterministic)) {
            for (int row = first; row < end; row++) one_query(row, s, chunks.length);
            continue;
        }
        for (int row = first; row < end; row += std::max(tile, 16)) {
            std::int32_t* to = host_ + at_tiles_ + std::size_t(n_tiles_++) * 3;
            to[0] = s, to[1] = row, to[2] = std::min(std::max(tile, 16), end - row);
        }
    }
    const auto round_up = [&](int from) { // so many from there on that a graph may be there for them
        const int n = decoding ? rounded_items(n_items - from) : n_items - from;
        while (n_items - from < n) item({});
        return n;
    };
    cuda::DecodeItems& items = on_device_.items;
    items.n                  = round_up(0);
    items.n_short            = 0;
    if (chunks.short_length > 0 && tile > 0) {
        for (int s = 0; s < plan.n_seqs(); s++)
            if (single(s)) one_query(plan.token_start[std::size_t(s)], s, chunks.short_length);
        items.n_short = round_up(items.n);
    }
    cuda::copy_to_device(device_, host_, (at_tables_ + plan.block_tables.size()) * 4, *gpu_);
    capturing_ = decoding && n_tiles_ == 0;
    return shape_;
}

// Sequences longer than this are better served by kernels that have the whole shared memory for attention.
constexpr int most_tape_items = 512;

// The first step of a shape runs as it is (kernels are loaded then), the second is captured.
bool CudaBackend::replay_step() {
    if (!capturing_) return false;
    if (one_token()) {
        if (telling_ == Telling::not_yet) telling_ = Telling::now;
        if (tape_ != nullptr && on_device_.items.n * limits_.n_kv_heads <= most_tape_items &&
            cuda::run_tape(tape_, on_device_, partial_, tickets_, *gpu_)) {
            cuda::argmax(tape_logits_, best_, 1, limits_.vocab_size, *gpu_);
            capturing_ = false;
            cuda::end_launches(*gpu_);
            return true;
        }
    }
    void** const graph = graphs_.find(graph_key());
    if (graph != nullptr && *graph != nullptr) {
        cuda::launch_graph(*graph, *gpu_);
        capturing_ = false;
        cuda::end_launches(*gpu_);
        return true;
    }
    if (graph != nullptr) {
        cuda::begin_capture(*gpu_);
    } else {
        graphs_.add(graph_key(), nullptr, forget_graph);
        capturing_ = false;
    }
    return false;
}

void CudaBackend::end_step() {
    flush();
    if (telling_ == Telling::now) {
        telling_ = Telling::done;
        if (!told_.empty()) tape_logits_ = static_cast<const float*>(told_.back().product[0].out);
        tape_ = cuda::make_tape(told_.data(), int(told_.size()), *gpu_);
        told_ = {};
    }
    if (std::exchange(capturing_, false)) {
        void* graph = cuda::end_capture(*gpu_);
        if (graph == nullptr) check_device("a step that is captured");
        *graphs_.find(graph_key()) = graph;
        cuda::launch_graph(graph, *gpu_);
    }
    cuda::end_launches(*gpu_);
}

// -- sampling

void CudaBackend::sample(Tensor logits) {
    const SamplingPlan& sampling = plan_->sampling;
    check(int(sampling.tasks.size()) <= sampling_limits_.tasks &&
              int(sampling.edits.size()) <= sampling_limits_.edits &&
              int(sampling.uniforms.size()) <= sampling_limits_.uniforms,
          "more to sample than announced");
    const std::size_t at_tasks = sampling.uniforms.size() * sizeof(double),
                      at_edits = sampling_bytes(sampling.tasks.size(), sampling.uniforms.size(), 0);
    std::memcpy(host_sampling_, sampling.uniforms.data(), at_tasks);
    auto* tasks = reinterpret_cast<cuda::SampleTask*>(host_sampling_ + at_tasks);
    n_answers_  = 0;
    for (const SamplingTask& t : sampling.tasks) {
        *tasks++ = {
            t.row,   t.chosen,           t.first_edit, t.n_edits, t.first_uniform, t.chosen >= 0 ? 1 : t.n_uniforms,
            t.n_top, 2 * t.first_result, t.logprobs,   t.top_k,   t.temperature,   t.top_p,
            t.min_p, t.only_edited};
        n_answers_ = std::max(n_answers_, std::size_t(t.first_result + t.n_results()));
    }
    auto* edits = reinterpret_cast<cuda::LogitEdit*>(host_sampling_ + at_edits);
    for (const LogitEdit& e : sampling.edits) *edits++ = {e.token, e.divide, e.subtract, e.add};
    cuda::copy_to_device(sampling_, host_sampling_, at_edits + sampling.edits.size() * sizeof(cuda::LogitEdit), *gpu_);
    cuda::sample(floats(logits), logits.cols, reinterpret_cast<const cuda::SampleTask*>(sampling_ + at_tasks),
                 int(sampling.tasks.size()), reinterpret_cast<cuda::LogitEdit*>(sampling_ + at_edits),
                 reinterpret_cast<const double*>(sampling_), reinterpret_cast<std::int32_t*>(answers_), *gpu_);
}

StepResults CudaBackend::results() {
    const auto n = std::size_t(shape_.logit_rows);
    if (n_answers_ > 0) cuda::copy_to_host(host_answers_, answers_, n_answers_ * sizeof(TokenLogprob), *gpu_);
    cuda::synchronize(*gpu_);
    check_device("a step");
    return {{best_, n}, {host_answers_, std::exchange(n_answers_, 0)}, {}, {}};
}

// -- the operations

void CudaBackend::embed(const TensorView& weight, const TensorView& positions, Tensor out) {
    cuda::TapeOp op;
    op.weight   = weight_of(weight);
    op.residual = floats(out);
    if (positions) telling_ = Telling::done; // not for a tape
    tell(op);
    cuda::embed(weight_of(weight), positions ? &weight_of(positions) : nullptr, on_device_, floats(out), out.rows,
                *gpu_);
}

void CudaBackend::norm(Tensor x, const TensorView& weight, const TensorView& bias, float eps, Tensor* residual,
                       Tensor out) {
    check(out.type == DType::F16, "norm: the result is for a product");
    if (bias) { // LayerNorm
        telling_ = Telling::done;
        flush();
        cuda::norm(x.data, x.type == DType::F32, vector_of(weight), vector_of(bias), eps,
                   residual ? floats(*residual) : nullptr, halves(out), x.rows, x.cols, *gpu_);
        return;
    }
    cuda::TapeOp op;
    op.kind        = cuda::TapeOp::norm;
    op.x           = x.data;
    op.x_is_float  = x.type == DType::F32;
    op.residual    = residual ? floats(*residual) : nullptr;
    op.norm_weight = vector_of(weight);
    op.eps         = eps;
    op.out         = out.data;
    op.rows        = x.rows;
    op.cols        = x.cols;
    submit(op);
}

void CudaBackend::matmul(Tensor x, std::span<const Projection> projections) {
    cuda::TapeOp op;
    op.kind = cuda::TapeOp::products;
    op.x    = x.data;
    op.rows = x.rows;
    op.cols = x.cols;
    for (const Projection& p : projections)
        op.product[op.n_products++] = {weight_of(*p.weight), p.bias ? vector_of(*p.bias) : nullptr, p.out.data,
                                       p.out.type == DType::F32};
    submit(op);
}

void CudaBackend::gated(Tensor x, const Projection& gate, const Projection& up) {
    cuda::TapeOp op;
    op.kind       = cuda::TapeOp::gated;
    op.x          = x.data;
    op.rows       = x.rows;
    op.cols       = x.cols;
    op.product[0] = {weight_of(*gate.weight), nullptr, gate.out.data, false};
    op.product[1] = {weight_of(*up.weight), nullptr, up.out.data, false};
    op.n_products = 2;
    submit(op);
}

// Norms, products and rotations of some tokens wait for those that follow, up to the next attention.
void CudaBackend::submit(const cuda::TapeOp& op) {
    tell(op);
    if (op.rows == shape_.tokens && op.rows > 1 && !options_.deterministic) {
        queue_.push_back(op);
        return;
    }
    flush();
    run(op);
}

// Runs what waits, as one kernel or a few where that can be.
void CudaBackend::flush() {
    std::span<const cuda::TapeOp> ops = queue_;
    for (; !ops.empty() && ops[0].kind == cuda::TapeOp::norm; ops = ops.subspan(1)) run(ops[0]);
    int done = cuda::run_dense(ops.data(), int(ops.size()), shape_.tokens, on_device_, *gpu_);
    for (ops = ops.subspan(std::size_t(done)); !ops.empty(); ops = ops.subspan(std::size_t(done))) {
        done = run_prompt(ops);
        if (done == 0) run(ops[0]), done = 1;
    }
    queue_.clear();
}

void CudaBackend::run(const cuda::TapeOp& op) {
    const auto* x    = static_cast<const Half*>(op.x);
    auto*       gate = static_cast<Half*>(op.product[0].out);
    if (op.kind == cuda::TapeOp::norm) {
        cuda::norm(op.x, op.x_is_float, op.norm_weight, nullptr, op.eps, op.residual, static_cast<Half*>(op.out),
                   op.rows, op.cols, *gpu_);
    } else if (op.kind == cuda::TapeOp::rope_and_store) {
        cuda::rope_and_store(op.rope, on_device_, op.rows, *gpu_);
    } else if (op.kind == cuda::TapeOp::products) {
        multiply(op);
    } else if (op.rows != 1 || options_.deterministic ||
               !cuda::matmul_gated(x, op.product[0].weight, op.product[1].weight, gate, *gpu_)) {
        multiply(op);
        cuda::silu_mul(gate, static_cast<const Half*>(op.product[1].out), op.rows * op.product[0].weight.rows, *gpu_);
    }
}

// Products with the rows of a prompt, and what follows them, as one kernel; returns how many operations that were, 0 where it
// cannot, or where there are too few rows.
int CudaBackend::run_prompt(std::span<const cuda::TapeOp> ops) {
    if (ops[0].rows < least_prompt || options_.deterministic || !cuda::can_prompt(*gpu_, ops[0])) return 0;
    const std::size_t           n = std::min<std::size_t>(ops.size(), 2);
    std::array<cuda::TapeOp, 2> with_halves;
    std::copy_n(ops.begin(), n, with_halves.begin());
    std::int64_t used = 0;
    for (int i = 0; i < ops[0].n_products; i++) {
        cuda::Weight& w = with_halves[0].product[i].weight;
        if (w.form == cuda::WeightForm::f16) continue;
        if (used + w.rows * w.cols > dequantized_size_) return 0;
        cuda::dequantize(w, dequantized_ + used, *gpu_);
        w.data = dequantized_ + used, w.form = cuda::WeightForm::f16;
        used += w.rows * w.cols;
    }
    return cuda::run_prompt(with_halves.data(), int(n), on_device_, *gpu_);
}

void CudaBackend::multiply(const cuda::TapeOp& op) {
    const auto*                          x = static_cast<const Half*>(op.x);
    const std::span<const cuda::Product> products(op.product, std::size_t(op.n_products));
    if (!std::ranges::all_of(products, [](const cuda::Product& p) { return cuda::is_regular(p.weight); })) {
        cuda::matmul_plain(x, op.rows, op.cols, op.product, op.n_products, *gpu_);
        return;
    }
    const auto is_f16 = [](const cuda::Product& p) { return p.weight.form == cuda::WeightForm::f16; };
    const bool batch  = !options_.deterministic && std::ranges::all_of(products, [&](const cuda::Product& p) {
        return cuda::can_batch(*gpu_, p.weight);
    });
    const bool blas   = has_blas_ && !options_.deterministic && is_f16(products[0]);
    const int  vector = options_.deterministic ? cuda::most_vector_rows : batch ? 1 : blas ? 4 : cuda::most_vector_rows;
    if (batch && op.rows > vector && op.rows <= (blas ? 7 : cuda::most_batch_rows)) { // the library is better from 8 on
        cuda::matmul_batch(x, int(op.rows), op.cols, op.product, op.n_products, *gpu_);
        return;
    }
    if (op.rows <= vector || !has_blas_) {
        multiply_rows(op, products, vector);
        return;
    }
    for (std::size_t i = 0, count = 1; i < products.size(); i += count) {
        const cuda::Product& p = products[i];
        // Neighbours of one shape, weights and results as far from one another, are one product.
        std::int64_t weight_stride = 0, out_stride = 0;
        for (count = 1; is_f16(p) && i + count < products.size(); count++) {
            const cuda::Product &before = products[i + count - 1], &next = products[i + count];
            const std::int64_t   apart =
                static_cast<const Half*>(next.weight.data) - static_cast<const Half*>(before.weight.data);
            const std::int64_t out_apart = static_cast<const Half*>(next.out) - static_cast<const Half*>(before.out);
            if (!is_f16(next) || next.weight.rows != p.weight.rows || next.out_is_float || p.out_is_float ||
                apart <= 0 || out_apart <= 0 || (count > 1 && (apart != weight_stride || out_apart != out_stride)))
                break;
            weight_stride = apart;
            out_stride    = out_apart;
        }
        const Half* values = static_cast<const Half*>(p.weight.data);
        if (!is_f16(p)) {
            cuda::dequantize(p.weight, dequantized_, *gpu_);
            values = dequantized_;
        }
        const std::span<const cuda::Product> some = products.subspan(i, count);
        if (!cuda::matmul_blas(x, op.rows, values,
                               {p.weight.rows, p.weight.cols, p.out_is_float, int(count), weight_stride, out_stride},
                               p.out, *gpu_)) {
            multiply_rows(op, some, cuda::most_vector_rows);
            continue;
        }
        for (const cuda::Product& each : some)
            if (each.bias) cuda::add_bias(static_cast<Half*>(each.out), each.bias, op.rows, each.weight.rows, *gpu_);
    }
}

// By the kernels for few rows, `most` of them at a time.
void CudaBackend::multiply_rows(const cuda::TapeOp& op, std::span<const cuda::Product> products, int most) {
    const auto* x = static_cast<const Half*>(op.x);
    for (std::int64_t row = 0; row < op.rows; row += most) {
        cuda::Product some[cuda::most_products];
        int           n = 0;
        for (cuda::Product p : products) {
            p.out     = static_cast<std::byte*>(p.out) + row * p.weight.rows * (p.out_is_float ? 4 : 2);
            some[n++] = p;
        }
        cuda::matmul_vector(x + row * op.cols, int(std::min<std::int64_t>(most, op.rows - row)), op.cols, some, n,
                            options_.deterministic, *gpu_);
    }
}

void CudaBackend::rope_and_store(Tensor q, Tensor k, Tensor v, const Rope& rope, const KvLayer& cache) {
    float*& frequencies = frequencies_[rope.inv_freq.data()];
    if (frequencies == nullptr && !rope.inv_freq.empty()) { // the first step of a model
        frequencies = static_cast<float*>(take(rope.inv_freq.size_bytes()));
        check(frequencies != nullptr, "no memory for the frequencies of RoPE");
        cuda::upload(frequencies, rope.inv_freq.data(), rope.inv_freq.size_bytes(), *gpu_);
    }
    cuda::RopeStore args;
    args.q          = halves(q);
    args.k          = halves(k);
    args.v          = halves(v);
    args.cache_k    = static_cast<Half*>(cache.k);
    args.cache_v    = static_cast<Half*>(cache.v);
    args.inv_freq   = frequencies;
    args.half       = int(rope.inv_freq.size());
    args.n_heads    = int(q.cols / cache.head_dim);
    args.n_kv_heads = cache.n_kv_heads;
    args.head_dim   = cache.head_dim;
    args.block_size = cache.block_size;
    args.scale      = rope.scale;
    args.halves     = rope.halves;
    cuda::TapeOp op;
    op.kind = cuda::TapeOp::rope_and_store;
    op.rope = args;
    op.rows = q.rows;
    submit(op);
}

void CudaBackend::attention(Tensor q, const KvLayer& cache, const AttentionParams& params, Tensor out) {
    flush();
    cuda::Attention args;
    args.q          = halves(q);
    args.out        = halves(out);
    args.cache_k    = static_cast<const Half*>(cache.k);
    args.cache_v    = static_cast<const Half*>(cache.v);
    args.n_heads    = params.n_heads;
    args.n_kv_heads = cache.n_kv_heads;
    args.head_dim   = cache.head_dim;
    args.block_size = cache.block_size;
    args.scale      = params.scale;
    args.window     = params.window;
    cuda::TapeOp op;
    op.kind   = cuda::TapeOp::attention;
    op.attend = args;
    tell(op);
    cuda::attention_decode(args, on_device_, partial_, tickets_, *gpu_);
    cuda::attention_prefill(args, on_device_, reinterpret_cast<const cuda::PrefillTile*>(device_ + at_tiles_), n_tiles_,
                            *gpu_);
}

void CudaBackend::activate(Activation activation, Tensor x, const Tensor* up) {
    if (telling_ == Telling::now) telling_ = Telling::done; // not for a tape
    flush();
    if (activation == Activation::silu) cuda::silu_mul(halves(x), halves(*up), x.rows * x.cols, *gpu_);
    else cuda::gelu(halves(x), x.rows * x.cols, *gpu_);
}

void CudaBackend::add(Tensor x, Tensor y) {
    cuda::TapeOp op;
    op.kind     = cuda::TapeOp::add;
    op.residual = floats(x);
    op.x        = y.data;
    tell(op);
    flush();
    cuda::add(floats(x), halves(y), x.rows * x.cols, *gpu_);
}

void CudaBackend::select_logit_rows(Tensor x, Tensor out) {
    cuda::TapeOp op;
    op.kind     = cuda::TapeOp::select;
    op.x        = x.data;
    op.residual = floats(out);
    tell(op);
    flush();
    cuda::select_rows(floats(x), on_device_.logit_rows, floats(out), out.rows, x.cols, *gpu_);
}

void CudaBackend::copy_blocks(std::span<const BlockCopy> copies, std::span<const KvLayer> from,
                              std::span<const KvLayer> to) {
    if (copies.empty()) return;
    cuda::use(*gpu_);
    const auto pointers = [&](std::span<const KvLayer> layers) { // the bases of a pool's arrays, sent up once
        const void** there = pool_pointers_[layers[0].on_host];
        auto&        sent  = pools_sent_[layers[0].on_host];
        if (!sent) {
            std::vector<const void*> bases;
            for (const KvLayer& layer : layers) bases.insert(bases.end(), {layer.k, layer.v});
            cuda::upload(static_cast<void*>(there), static_cast<const void*>(bases.data()),
                         bases.size() * sizeof(void*), *gpu_);
            sent = true;
        }
        return there;
    };
    cuda::BlockPools pools;
    pools.from        = pointers(from);
    pools.to          = const_cast<void* const*>(pointers(to));
    pools.n_arrays    = int(from.size() * 2);
    pools.block_bytes = from[0].block_bytes();
    // A launch runs its copies in no order: a list in which a target was a source before is cut there.
    for (std::size_t done = 0; done < copies.size();) {
        std::size_t n = 0;
        for (; done + n < copies.size() && n < n_pairs_; n++) {
            const BlockCopy& next  = copies[done + n];
            const auto       other = [&](const BlockCopy& earlier) {
                return earlier.from == next.to || earlier.to == next.from || earlier.to == next.to;
            };
            if (from.data() == to.data() && std::ranges::any_of(copies.subspan(done, n), other)) break;
            host_pairs_[2 * n]     = next.from;
            host_pairs_[2 * n + 1] = next.to;
        }
        cuda::copy_to_device(pairs_, host_pairs_, n * 8, *gpu_);
        cuda::copy_blocks(pools, pairs_, int(n), *gpu_);
        cuda::synchronize(*gpu_); // the pairs' memory is used again; moves are rare
        done += n;
    }
    check_device("block moves");
}

} // namespace quire
