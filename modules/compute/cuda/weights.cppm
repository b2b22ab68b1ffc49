// quire.compute.cuda.weights: the weights of a file in the layouts of the GPU's kernels. **Owns** them, and device memory that lives
// as long as the backend.
module;

#include "../../../cuda/kernels.h"

export module quire.compute.cuda.weights;

export import quire.compute.program;
import quire.core.base;
export import quire.core.tensor;
import quire.model_file.quants;
import quire.model_file.quants.lattices;

export namespace quire {

// Memory on the device, released together.
class DeviceMemory {
public:
    explicit DeviceMemory(cuda::Context& gpu) : gpu_(gpu) {}
    DeviceMemory(const DeviceMemory&)            = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;
    ~DeviceMemory() {
        for (void* memory : owned_) cuda::release(memory);
    }
    void*       take(std::size_t bytes);                      // zeroed; null: there is not enough
    void        count(std::size_t bytes) { taken_ += bytes; } // memory that something else owns
    std::size_t taken() const { return taken_; }              // bytes

private:
    cuda::Context&     gpu_;
    std::vector<void*> owned_;
    std::size_t        taken_ = 0;
};

class DeviceWeights {
public:
    // total: bytes of the device's memory.
    DeviceWeights(cuda::Context& gpu, DeviceMemory& memory, std::size_t total)
        : gpu_(gpu), memory_(memory), total_(total) {}
    DeviceWeights(const DeviceWeights&)            = delete;
    DeviceWeights& operator=(const DeviceWeights&) = delete;
    ~DeviceWeights() { cuda::release(staging_); }

    // Error: there is no memory for it.
    Result<WeightHandle> prepare(const TensorView& view);
    // In float32, whatever the view's type: a small matrix whose precision matters.
    Result<WeightHandle> prepare_f32(const TensorView& view);
    // After the last one: gives back what only prepare() needed.
    void end();

    const cuda::Weight& of(const WeightHandle& weight) const { return weights_[std::size_t(weight.number)]; }
    cuda::Weight&       of(const WeightHandle& weight) { return weights_[std::size_t(weight.number)]; }
    // A vector; null for an empty handle.
    const float* vector(const WeightHandle& weight) const {
        return weight ? static_cast<const float*>(of(weight).data) : nullptr;
    }

private:
    using Half = cuda::Half;
    void*                      take_weight(std::size_t bytes);
    Result<const std::int8_t*> points_of(DType type);
    bool stage(const TensorView& view, const std::function<void(std::int64_t first, std::int64_t n)>& convert);

    cuda::Context&                gpu_;
    DeviceMemory&                 memory_;
    std::size_t                   total_;
    std::deque<cuda::Weight>      weights_;              // by WeightHandle::number
    std::byte*                    arena_      = nullptr; // for weights to come
    std::size_t                   arena_left_ = 0;
    void*                         staging_ = nullptr; // while weights come: raw blocks on their way into another form
    std::map<DType, std::int8_t*> points_;            // the lattices of types that came, on the device
};

} // namespace quire

module :private;

namespace quire {

void* DeviceMemory::take(std::size_t bytes) {
    void* memory = cuda::allocate(gpu_, bytes);
    if (memory != nullptr) {
        owned_.push_back(memory);
        taken_ += bytes;
    }
    return memory;
}

// Weights stand one after another, so that those of one input can be multiplied at once.
void* DeviceWeights::take_weight(std::size_t bytes) {
    const std::size_t most = total_ / 256; // half a GiB on a large device
    bytes                  = (bytes + 255) / 256 * 256;
    if (bytes > most / 2) return memory_.take(bytes);
    if (arena_left_ < bytes) {
        const std::size_t chunk =
            std::min(most, std::max({4 * bytes, memory_.taken(), std::size_t(16) << 20})); // more as there are more
        arena_      = static_cast<std::byte*>(memory_.take(chunk));
        arena_left_ = arena_ != nullptr ? chunk : 0;
        if (arena_ == nullptr) return nullptr;
    }
    arena_left_ -= bytes;
    return std::exchange(arena_, arena_ + bytes);
}

// Sends raw blocks up, some at a time, and has each lot made into what `convert` makes of elements first .. first + n - 1.
// False: there is no memory for them.
bool DeviceWeights::stage(const TensorView&                                              view,
                          const std::function<void(std::int64_t first, std::int64_t n)>& convert) {
    constexpr std::size_t room = std::size_t(64) << 20;
    if (staging_ == nullptr) staging_ = cuda::allocate(gpu_, room);
    if (staging_ == nullptr) return false;
    const DTypeInfo&   info = dtype_info(view.type);
    const std::int64_t all = view.rows * view.cols, most = std::int64_t(room) / info.bytes * info.items;
    for (std::int64_t first = 0; first < all; first += most) {
        const std::int64_t n = std::min(most, all - first);
        cuda::upload(staging_, static_cast<const std::byte*>(view.data) + row_bytes(view.type, first),
                     row_bytes(view.type, n), gpu_);
        convert(first, n);
        cuda::synchronize(gpu_); // the room is used again
    }
    return true;
}

// Null for a type without a lattice. Error: there is no memory.
Result<const std::int8_t*> DeviceWeights::points_of(DType type) {
    const auto bytes = type == DType::IQ2_XS    ? std::as_bytes(std::span(iq2_xs_lattice))
                       : type == DType::IQ3_XXS ? std::as_bytes(std::span(iq3_xxs_lattice))
                                                : std::span<const std::byte>();
    if (bytes.empty()) return nullptr;
    std::int8_t*& points = points_[type];
    if (points == nullptr) {
        points = static_cast<std::int8_t*>(take_weight(bytes.size()));
        if (points == nullptr) return fail_with(ErrorKind::system, "the GPU has no memory left for a table");
        cuda::upload(points, bytes.data(), bytes.size(), gpu_);
    }
    return points;
}

void DeviceWeights::end() {
    cuda::release(std::exchange(staging_, nullptr));
    cuda::end_uploads(gpu_);
}

Result<WeightHandle> DeviceWeights::prepare_f32(const TensorView& view) {
    const auto         n = std::size_t(view.rows * view.cols);
    std::vector<float> values(n);
    dequantize(view.type, view.data, values.data(), std::int64_t(n));
    void* data = take_weight(n * 4);
    if (data == nullptr)
        return fail_with(ErrorKind::system, "the GPU has no memory left for a matrix of ", view.rows, " × ", view.cols);
    cuda::upload(data, values.data(), n * 4, gpu_);
    if (const char* error = cuda::last_error(gpu_)) return fail_with(ErrorKind::system, "CUDA: ", error);
    cuda::Weight w;
    w.form = cuda::WeightForm::f32, w.rows = view.rows, w.cols = view.cols, w.data = data;
    weights_.push_back(w);
    return WeightHandle{DType::F32, view.rows, view.cols, int(weights_.size()) - 1};
}

Result<WeightHandle> DeviceWeights::prepare(const TensorView& view) {
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
        cuda::upload(data, view.data, bytes, gpu_);
        w.data = data;
    } else if (view.type == DType::F16 || view.type == DType::Q4_K) {
        w.form     = view.type == DType::F16 ? cuda::WeightForm::f16 : cuda::WeightForm::q4_k;
        void* data = take_weight(bytes);
        if (!data) return no_memory();
        cuda::upload(data, view.data, bytes, gpu_);
        w.data = data;
    } else if (view.type == DType::F32 || view.type == DType::BF16) {
        w.form     = cuda::WeightForm::f16;
        auto* data = static_cast<Half*>(take_weight(std::size_t(n) * 2));
        if (!data || !stage(view, [&](std::int64_t first, std::int64_t some) {
                cuda::to_f16(type, staging_, data + first, some, gpu_);
            }))
            return no_memory();
        w.data = data;
    } else if (cuda::convertible(type)) {
        w.form        = cuda::WeightForm::i8;
        bool has_mins = false;
        cuda::i8_layout(type, w.group, w.float_scales, has_mins);
        const auto        groups     = std::size_t(n / w.group);
        const std::size_t scale_size = w.float_scales ? 4 : 2;
        const auto        points     = points_of(view.type);
        if (!points) return std::unexpected(points.error());
        auto* q      = static_cast<std::int8_t*>(memory_.take(std::size_t(n)));
        auto* scales = static_cast<std::byte*>(memory_.take(groups * scale_size));
        auto* mins   = static_cast<float*>(has_mins ? memory_.take(groups * 4) : nullptr);
        if (!q || !scales || (has_mins && !mins) || !stage(view, [&](std::int64_t first, std::int64_t some) {
                const std::int64_t group = first / w.group;
                cuda::to_i8(type, staging_, *points, q + first, scales + std::size_t(group) * scale_size,
                            mins ? mins + group : nullptr, some, gpu_);
            }))
            return no_memory();
        w.data   = q;
        w.scales = scales;
        w.mins   = mins;
    } else { // a rare type: as fp16, by way of the CPU's reference
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
        cuda::upload(data, all.data(), std::size_t(n) * 2, gpu_);
        w.data = data;
    }
    if (w.form == cuda::WeightForm::i8 || w.form == cuda::WeightForm::q4_k)
        w.scale_exponent = cuda::scale_exponent_of(w, gpu_);
    if (const char* error = cuda::last_error(gpu_)) return fail_with(ErrorKind::system, "CUDA: ", error);
    weights_.push_back(w);
    return WeightHandle{view.type, view.rows, view.cols, int(weights_.size()) - 1};
}

} // namespace quire
