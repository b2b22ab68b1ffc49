// quire.gguf: reads and writes GGUF files (format document: docs/gguf.md of the ggml project), v2 and v3.
// Everything a file claims is checked once, here, before it is used. **Owns** the mapping of the file.
export module quire.gguf;

import quire.base;
import quire.std;
import quire.tensor;

export namespace quire {

// One row of the tensor table. The data is inside the mapping, checked to be all there.
struct GgufTensor {
    std::string                 name;
    DType                       type = DType::F32;
    int                         n_dims = 1;
    std::array<std::int64_t, 4> dims{1, 1, 1, 1};  // dims[0] is the contiguous one
    std::size_t                 bytes = 0;
    const std::byte*            data = nullptr;

    // As a matrix: cols = dims[0], rows = the product of the others.
    TensorView view() const;
};

// A metadata value: the scalar types widened, arrays kept flat.
// (uint8..uint64 → uint64_t, int8..int64 → int64_t, float32/64 → double)
struct GgufArray;
using GgufValue = std::variant<std::uint64_t, std::int64_t, double, bool, std::string_view, GgufArray>;

// An array of scalars or of strings (an array of arrays is refused). The views point into the mapping.
struct GgufArray {
    std::uint32_t                 type = 0;   // the element type's number in the format document
    std::vector<std::uint64_t>    uints;      // exactly one of these vectors is used, by the element type
    std::vector<std::int64_t>     ints;
    std::vector<double>           floats;
    std::vector<bool>             bools;
    std::vector<std::string_view> strings;

    std::size_t size() const;
};

// A GGUF file, or all parts of a split one (NAME-00001-of-0000N.gguf), mapped read-only.
class Gguf {
public:
    // Error: one sentence naming the file, the place in it, and what is wrong.
    static Result<Gguf> open(const std::string& path);

    Gguf(Gguf&&) noexcept;
    Gguf& operator=(Gguf&&) noexcept;
    ~Gguf();

    const std::string& path() const;
    std::uint32_t      version() const;
    std::size_t        file_bytes() const;  // of all parts
    std::uint64_t      alignment() const;

    std::span<const GgufTensor> tensors() const;                    // in file order
    const GgufTensor*           tensor(std::string_view name) const;  // or nullptr

    std::span<const std::pair<std::string, GgufValue>> metadata() const;  // in file order
    const GgufValue*                                   find(std::string_view key) const;  // or nullptr

    // A value of the named kind. Missing: the fallback, or an error when none is given.
    // A value of another kind is an error always. Integers of either signedness count as integers if in range.
    Result<std::int64_t>     integer(std::string_view key, std::optional<std::int64_t> fallback = {}) const;
    Result<double>           number(std::string_view key, std::optional<double> fallback = {}) const;
    Result<bool>             boolean(std::string_view key, std::optional<bool> fallback = {}) const;
    Result<std::string_view> text(std::string_view key, std::optional<std::string_view> fallback = {}) const;

private:
    struct Impl;
    explicit Gguf(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

// Collects metadata and tensors, then writes a version 3 file. Enough for tests and tools.
class GgufWriter {
public:
    void set(std::string key, std::uint32_t value);
    void set(std::string key, std::int32_t value);
    void set(std::string key, std::uint64_t value);
    void set(std::string key, float value);
    void set(std::string key, bool value);
    void set(std::string key, std::string value);
    void set(std::string key, const char* value);
    void set(std::string key, std::vector<std::string> value);
    void set(std::string key, std::vector<float> value);
    void set(std::string key, std::vector<std::int32_t> value);
    // dims[0] is the contiguous one; data holds exactly the bytes that type and dims ask for, copied.
    void add_tensor(std::string name, DType type, std::vector<std::int64_t> dims, std::span<const std::byte> data);

    Result<void> write(const std::string& path, std::uint32_t alignment = 32) const;

private:
    struct Pair {
        std::string            key;
        std::uint32_t          type;
        std::vector<std::byte> bytes;  // the value as it stands in the file
    };
    struct Tensor {
        std::string               name;
        DType                     type;
        std::vector<std::int64_t> dims;
        std::vector<std::byte>    data;
    };
    std::vector<Pair>   pairs_;
    std::vector<Tensor> tensors_;
};

} // namespace quire
