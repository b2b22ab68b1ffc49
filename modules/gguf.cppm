// quire.gguf: reads and writes GGUF files (format document: docs/gguf.md of the ggml project), v2 and v3.
// Everything a file claims is checked once, here, before it is used. **Owns** the mapping of the file.
module;

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>

export module quire.gguf;

import quire.base;
import quire.std;
import quire.tensor;

export namespace quire {

// One row of the tensor table. The data is inside the mapping, checked to be all there.
struct GgufTensor {
    std::string                 name;
    DType                       type   = DType::F32;
    int                         n_dims = 1;
    std::array<std::int64_t, 4> dims{1, 1, 1, 1}; // dims[0] is the contiguous one
    std::size_t                 bytes = 0;
    const std::byte*            data  = nullptr;

    // As a matrix: cols = dims[0], rows = the product of the others.
    TensorView view() const;
};

// A metadata value: the scalar types widened, arrays kept flat.
// (uint8..uint64 → uint64_t, int8..int64 → int64_t, float32/64 → double)
struct GgufArray;
using GgufValue = std::variant<std::uint64_t, std::int64_t, double, bool, std::string_view, GgufArray>;

// An array of scalars or of strings (an array of arrays is refused). The views point into the mapping.
struct GgufArray {
    std::uint32_t                 type = 0; // the element type's number in the format document
    std::vector<std::uint64_t>    uints;    // exactly one of these vectors is used, by the element type
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
    // The same of a file that is in memory already; `name` is for messages.
    static Result<Gguf> parse(std::span<const std::byte> bytes, const std::string& name);

    Gguf(Gguf&&) noexcept;
    Gguf& operator=(Gguf&&) noexcept;
    ~Gguf();

    const std::string& path() const;
    std::uint32_t      version() const;
    std::size_t        file_bytes() const; // of all parts
    std::uint64_t      alignment() const;

    std::span<const GgufTensor> tensors() const;                     // in file order
    const GgufTensor*           tensor(std::string_view name) const; // or nullptr

    std::span<const std::pair<std::string, GgufValue>> metadata() const;                 // in file order
    const GgufValue*                                   find(std::string_view key) const; // or nullptr

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
    void set(std::string key, const std::string& value);
    void set(std::string key, const char* value);
    void set(std::string key, const std::vector<std::string>& value);
    void set(std::string key, const std::vector<float>& value);
    void set(std::string key, const std::vector<std::int32_t>& value);
    // dims[0] is the contiguous one; data holds exactly the bytes that type and dims ask for, copied.
    void add_tensor(std::string name, DType type, std::vector<std::int64_t> dims, std::span<const std::byte> data);

    Result<void> write(const std::string& path, std::uint32_t alignment = 32) const;

private:
    struct Pair {
        std::string            key;
        std::uint32_t          type;
        std::vector<std::byte> bytes; // the value as it stands in the file
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

module :private;

namespace quire {

// The value types of the format document.
enum : std::uint32_t {
    t_u8,
    t_i8,
    t_u16,
    t_i16,
    t_u32,
    t_i32,
    t_f32,
    t_bool,
    t_string,
    t_array,
    t_u64,
    t_i64,
    t_f64,
    n_types
};

// Bytes of a scalar; 0 for strings and arrays.
constexpr std::array<std::size_t, n_types> scalar_bytes{1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
constexpr std::array<const char*, n_types> type_names{"uint8",  "int8",    "uint16", "int16",  "uint32",
                                                      "int32",  "float32", "bool",   "string", "array",
                                                      "uint64", "int64",   "float64"};

// A file in memory, read-only.
class Mapping {
public:
    Mapping() = default;
    Mapping(const void* data, std::size_t bytes) : data_(static_cast<const std::byte*>(data)), bytes_(bytes) {}
    Mapping(Mapping&& o) noexcept : data_(std::exchange(o.data_, nullptr)), bytes_(std::exchange(o.bytes_, 0)) {}
    Mapping& operator=(Mapping&& o) noexcept {
        std::swap(data_, o.data_);
        std::swap(bytes_, o.bytes_);
        return *this;
    }
    ~Mapping() {
        if (data_) munmap(const_cast<std::byte*>(data_), bytes_);
    }
    std::span<const std::byte> bytes() const { return {data_, bytes_}; }

private:
    const std::byte* data_  = nullptr;
    std::size_t      bytes_ = 0;
};

Result<Mapping> map_file(const std::string& path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); // a pipe would block here otherwise
    if (fd < 0) return fail_with(ErrorKind::system, "cannot open ", path, ": ", std::strerror(errno));
    struct stat info{};
    void*       data = MAP_FAILED;
    std::string why;
    if (fstat(fd, &info) != 0) why = std::strerror(errno);
    else if (!S_ISREG(info.st_mode))
        why = S_ISDIR(info.st_mode) ? "it is a directory, not a GGUF file" : "it is not a regular file";
    else if (info.st_size < 24) why = cat("it has ", info.st_size, " bytes; a GGUF header alone has 24");
    else if ((data = mmap(nullptr, std::size_t(info.st_size), PROT_READ, MAP_SHARED, fd, 0)) == MAP_FAILED)
        why = std::strerror(errno);
    close(fd);
    if (data == MAP_FAILED) return fail("cannot use ", path, ": ", why);
    return Mapping(data, std::size_t(info.st_size));
}

// Reads the header front to back. Every read is checked against what is left; after a failure `error` says where and
// all further reads give zeros.
class Reader {
public:
    Reader(std::span<const std::byte> bytes, const std::string& name) : bytes_(bytes), name_(name) {}

    template <class T>
    T scalar(std::string_view what) {
        T value{};
        if (const std::byte* at = take(sizeof(T), what)) std::memcpy(&value, at, sizeof(T));
        return value;
    }

    std::string_view string(std::string_view what) {
        const auto       n  = scalar<std::uint64_t>(what);
        const std::byte* at = take(n, what);
        return at ? std::string_view(reinterpret_cast<const char*>(at), std::size_t(n)) : std::string_view();
    }

    // n bytes, or null
    const std::byte* take(std::uint64_t n, std::string_view what) {
        if (failed()) return nullptr;
        if (n > left()) {
            set_error(cat(what, " wants ", n, " bytes where ", left(), " are left"));
            return nullptr;
        }
        const std::byte* at = bytes_.data() + at_;
        at_ += std::size_t(n);
        return at;
    }

    void set_error(std::string_view why) {
        if (!failed()) error_ = cat(name_, ": at byte ", at_, ": ", why);
    }
    bool               failed() const { return !error_.empty(); }
    const std::string& error() const { return error_; }
    std::size_t        at() const { return at_; }
    std::size_t        left() const { return bytes_.size() - at_; }

private:
    std::span<const std::byte> bytes_;
    const std::string&         name_;
    std::size_t                at_ = 0;
    std::string                error_;
};

template <class Wide>
Wide read_scalar(Reader& r, std::uint32_t type, std::string_view what) {
    switch (type) {
        case t_u8: return Wide(r.scalar<std::uint8_t>(what));
        case t_i8: return Wide(r.scalar<std::int8_t>(what));
        case t_u16: return Wide(r.scalar<std::uint16_t>(what));
        case t_i16: return Wide(r.scalar<std::int16_t>(what));
        case t_u32: return Wide(r.scalar<std::uint32_t>(what));
        case t_i32: return Wide(r.scalar<std::int32_t>(what));
        case t_u64: return Wide(r.scalar<std::uint64_t>(what));
        case t_i64: return Wide(r.scalar<std::int64_t>(what));
        case t_f32: return Wide(r.scalar<float>(what));
        case t_f64: return Wide(r.scalar<double>(what));
        default: return Wide(r.scalar<std::uint8_t>(what)); // bool
    }
}

bool is_unsigned(std::uint32_t type) { return type == t_u8 || type == t_u16 || type == t_u32 || type == t_u64; }
bool is_signed(std::uint32_t type) { return type == t_i8 || type == t_i16 || type == t_i32 || type == t_i64; }
bool is_float(std::uint32_t type) { return type == t_f32 || type == t_f64; }

GgufArray read_array(Reader& r, std::string_view what) {
    GgufArray array;
    array.type   = r.scalar<std::uint32_t>(what);
    const auto n = r.scalar<std::uint64_t>(what);
    if (r.failed()) return array;
    if (array.type >= n_types) {
        r.set_error(cat(what, " is an array of unknown type ", array.type));
    } else if (array.type == t_array) {
        r.set_error(cat(what, " is an array of arrays, which quire does not read"));
    } else if (n > r.left() / std::max<std::size_t>(scalar_bytes[array.type], 8 * (array.type == t_string))) {
        // a string takes at least its 8 bytes of length
        r.set_error(
            cat(what, " claims ", n, " elements of ", type_names[array.type], " where ", r.left(), " bytes are left"));
    }
    if (r.failed()) return array;
    const auto count = std::size_t(n);
    if (array.type == t_string) {
        array.strings.reserve(count);
        for (std::size_t i = 0; i < count && !r.failed(); i++) array.strings.push_back(r.string(what));
    } else if (is_unsigned(array.type)) {
        array.uints.resize(count);
        for (auto& v : array.uints) v = read_scalar<std::uint64_t>(r, array.type, what);
    } else if (is_signed(array.type)) {
        array.ints.resize(count);
        for (auto& v : array.ints) v = read_scalar<std::int64_t>(r, array.type, what);
    } else if (is_float(array.type)) {
        array.floats.resize(count);
        for (auto& v : array.floats) v = read_scalar<double>(r, array.type, what);
    } else {
        array.bools.resize(count);
        for (std::size_t i = 0; i < count; i++) array.bools[i] = read_scalar<std::uint8_t>(r, array.type, what) != 0;
    }
    return array;
}

GgufValue read_value(Reader& r, std::string_view what) {
    const auto type = r.scalar<std::uint32_t>(what);
    if (r.failed()) return false;
    if (type >= n_types) {
        r.set_error(cat(what, " has unknown value type ", type));
        return false;
    }
    if (type == t_string) return r.string(what);
    if (type == t_array) return read_array(r, what);
    if (is_unsigned(type)) return read_scalar<std::uint64_t>(r, type, what);
    if (is_signed(type)) return read_scalar<std::int64_t>(r, type, what);
    if (is_float(type)) return read_scalar<double>(r, type, what);
    return read_scalar<std::uint8_t>(r, type, what) != 0;
}

const char* kind_name(const GgufValue& value) {
    constexpr std::array names{
        "an unsigned integer", "an integer", "a floating-point number", "a bool", "a string", "an array"};
    return names[value.index()];
}

// -- one file

struct Part {
    Mapping                                        mapping;
    std::uint32_t                                  version   = 0;
    std::uint64_t                                  alignment = 32;
    std::vector<std::pair<std::string, GgufValue>> metadata;
    std::vector<GgufTensor>                        tensors;
};

const GgufValue* find_in(const Part& part, std::string_view key) {
    for (const auto& [k, v] : part.metadata)
        if (k == key) return &v;
    return nullptr;
}

void read_tensor_info(Reader& r, GgufTensor& t, std::uint64_t& offset) {
    t.name                   = std::string(r.string("a tensor's name"));
    const std::string what   = cat("tensor ", quote(t.name));
    const auto        n_dims = r.scalar<std::uint32_t>(what);
    if (r.failed()) return;
    if (n_dims < 1 || n_dims > 4) return r.set_error(cat(what, " has ", n_dims, " dimensions; 1 to 4 are possible"));
    t.n_dims              = int(n_dims);
    std::int64_t elements = 1;
    for (std::size_t i = 0; i < n_dims; i++) {
        t.dims[i] = r.scalar<std::int64_t>(what);
        if (r.failed()) return;
        if (t.dims[i] < 1) return r.set_error(cat(what, " has dimension ", i, " of size ", t.dims[i]));
        if (__builtin_mul_overflow(elements, t.dims[i], &elements))
            return r.set_error(cat(what, " has more elements than 63 bits can count"));
    }
    const auto type = r.scalar<std::uint32_t>(what);
    offset          = r.scalar<std::uint64_t>(what);
    if (r.failed()) return;
    const DTypeInfo* info = dtype_find(type);
    if (!info)
        return r.set_error(cat(what, " has type ", std::int64_t(std::int32_t(type)), ", which quire does not know"));
    t.type = info->type;
    if (t.dims[0] % info->items != 0)
        return r.set_error(cat(what, " has rows of ", t.dims[0], " elements, not a multiple of the ", info->items,
                               " of a ", info->name, " block"));
    std::int64_t bytes = 0;
    if (__builtin_mul_overflow(elements / info->items, std::int64_t(info->bytes), &bytes))
        return r.set_error(cat(what, " has more bytes than 63 bits can count"));
    t.bytes = std::size_t(bytes);
}

// Places every tensor in the data part and checks that none reaches past its end or into another.
std::string place_tensors(Part& part, std::span<const std::uint64_t> offsets, std::size_t data_start) {
    const std::span<const std::byte> bytes = part.mapping.bytes();
    const std::uint64_t              size  = bytes.size() - data_start;
    for (std::size_t i = 0; i < part.tensors.size(); i++) {
        GgufTensor& t = part.tensors[i];
        if (offsets[i] % part.alignment != 0)
            return cat("tensor ", quote(t.name), " is at offset ", offsets[i], ", not a multiple of the alignment ",
                       part.alignment);
        if (offsets[i] > size || t.bytes > size - offsets[i])
            return cat("tensor ", quote(t.name), " has ", t.bytes, " bytes at offset ", offsets[i],
                       " of a data part of ", size, " bytes");
        t.data = bytes.data() + data_start + offsets[i];
    }
    std::vector<const GgufTensor*> order;
    order.reserve(part.tensors.size());
    for (const GgufTensor& t : part.tensors) order.push_back(&t);
    std::ranges::sort(order, {}, [](const GgufTensor* t) { return t->data; });
    for (std::size_t i = 1; i < order.size(); i++)
        if (order[i - 1]->data + order[i - 1]->bytes > order[i]->data)
            return cat("tensors ", quote(order[i - 1]->name), " and ", quote(order[i]->name), " overlap");
    return {};
}

Result<Part> read_part(Mapping mapping, const std::string& name) {
    Part part;
    part.mapping = std::move(mapping);
    Reader r(part.mapping.bytes(), name);

    const auto magic = r.scalar<std::uint32_t>("the magic number");
    if (!r.failed() && magic != 0x46554747) return fail(name, ": not a GGUF file: it does not begin with 'GGUF'");
    part.version = r.scalar<std::uint32_t>("the version");
    if (!r.failed() && part.version != 2 && part.version != 3)
        return fail(name, ": GGUF version ", part.version, " is not one of 2, 3");
    const auto n_tensors = r.scalar<std::uint64_t>("the number of tensors");
    const auto n_pairs   = r.scalar<std::uint64_t>("the number of metadata pairs");
    if (r.failed()) return fail(r.error());
    // The smallest pair has 13 bytes, the smallest tensor info 32: a count that cannot be true is not used.
    if (n_pairs > r.left() / 13)
        return fail(name, ": the header claims ", n_pairs, " metadata pairs in ", r.left(), " bytes");
    if (n_tensors > r.left() / 32)
        return fail(name, ": the header claims ", n_tensors, " tensors in ", r.left(), " bytes");

    std::unordered_set<std::string_view> seen;
    part.metadata.reserve(std::size_t(n_pairs));
    for (std::uint64_t i = 0; i < n_pairs && !r.failed(); i++) {
        const std::string_view key = r.string("a metadata key");
        if (r.failed()) break;
        if (!seen.insert(key).second) return fail(name, ": metadata key ", quote(key), " is there twice");
        part.metadata.emplace_back(key, read_value(r, cat("metadata ", quote(key))));
    }
    if (r.failed()) return fail(r.error());

    if (const GgufValue* value = find_in(part, "general.alignment")) {
        const auto* n = std::get_if<std::uint64_t>(value);
        if (!n || !std::has_single_bit(*n))
            return fail(name, ": general.alignment is ", n ? std::to_string(*n) : kind_name(*value),
                        ", not a power of two");
        part.alignment = *n;
    }

    seen.clear();
    std::vector<std::uint64_t> offsets(static_cast<std::size_t>(n_tensors));
    part.tensors.resize(std::size_t(n_tensors)); // the names do not move from here on
    for (std::size_t i = 0; i < part.tensors.size() && !r.failed(); i++) {
        read_tensor_info(r, part.tensors[i], offsets[i]);
        if (!r.failed() && !seen.insert(part.tensors[i].name).second)
            return fail(name, ": tensor ", quote(part.tensors[i].name), " is there twice");
    }
    if (r.failed()) return fail(r.error());
    if (part.tensors.empty()) return part;

    // The data part begins at the next multiple of the alignment.
    const std::uint64_t padding = (part.alignment - r.at() % part.alignment) % part.alignment;
    if (padding > r.left())
        return fail(name, ": the tensor data would begin at byte ", r.at() + padding, ", the file has ",
                    part.mapping.bytes().size());
    if (std::string why = place_tensors(part, offsets, r.at() + std::size_t(padding)); !why.empty())
        return fail(name, ": ", why);
    return part;
}

// -- the whole file

struct Gguf::Impl {
    std::string                                            path;
    std::vector<Part>                                      parts; // the metadata is that of the first
    std::vector<GgufTensor>                                tensors;
    std::unordered_map<std::string_view, std::size_t>      tensor_index;
    std::unordered_map<std::string_view, const GgufValue*> index;
    std::size_t                                            bytes = 0;

    static Result<Gguf> assemble(const std::string& path, std::vector<Part> parts);
};

Gguf::Gguf(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Gguf::Gguf(Gguf&&) noexcept            = default;
Gguf& Gguf::operator=(Gguf&&) noexcept = default;
Gguf::~Gguf()                          = default;

// "x-00002-of-00003.gguf" for part 1 (counting from 0) of "x-00001-of-00003.gguf"; "" if the name is not of that form.
std::string sibling(const std::string& path, std::uint64_t part, std::uint64_t count) {
    char mine[32], other[32];
    std::snprintf(mine, sizeof mine, "-%05u-of-%05u.gguf", 1u, unsigned(count));
    std::snprintf(other, sizeof other, "-%05u-of-%05u.gguf", unsigned(part + 1), unsigned(count));
    return path.ends_with(mine) ? path.substr(0, path.size() - std::strlen(mine)) + other : std::string();
}

// An unsigned value, or the fallback; a part that says something else than it should is an error of its own.
std::int64_t uint_in(const Part& part, std::string_view key, std::int64_t fallback) {
    const GgufValue* value = find_in(part, key);
    if (!value) return fallback;
    if (const auto* u = std::get_if<std::uint64_t>(value)) return std::int64_t(*u);
    if (const auto* i = std::get_if<std::int64_t>(value)) return *i;
    return -1;
}

Result<Gguf> Gguf::parse(std::span<const std::byte> bytes, const std::string& name) {
    // A private copy in a mapping of its own, so that one kind of owner is enough.
    void* copy = mmap(nullptr, std::max<std::size_t>(bytes.size(), 1), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED) return fail_with(ErrorKind::system, name, ": no memory for ", bytes.size(), " bytes");
    std::ranges::copy(bytes, static_cast<std::byte*>(copy));
    Result<Part> part = read_part(Mapping(copy, std::max<std::size_t>(bytes.size(), 1)), name);
    if (!part) return std::unexpected(part.error());
    std::vector<Part> parts;
    parts.push_back(std::move(*part));
    return Impl::assemble(name, std::move(parts));
}

Result<Gguf> Gguf::open(const std::string& path) {
    std::vector<Part> parts;
    std::int64_t      count = 1;
    for (std::int64_t i = 0; i < count; i++) {
        const std::string name = i == 0 ? path : sibling(path, std::uint64_t(i), std::uint64_t(count));
        if (name.empty())
            return fail(path, ": split.count is ", count, ", but the name does not end in -00001-of-", count,
                        ".gguf: open the first part");
        Result<Mapping> mapping = map_file(name);
        if (!mapping) return std::unexpected(mapping.error());
        Result<Part> part = read_part(std::move(*mapping), name);
        if (!part) return std::unexpected(part.error());
        if (i == 0) count = std::max<std::int64_t>(uint_in(*part, "split.count", 1), 1);
        if (count > 99'999) return fail(name, ": split.count is ", count, "; at most 99999 parts are possible");
        if (count > 1 && (uint_in(*part, "split.no", -1) != i || uint_in(*part, "split.count", -1) != count))
            return fail(name, ": it says that it is part ", uint_in(*part, "split.no", -1) + 1, " of ",
                        uint_in(*part, "split.count", -1), " where part ", i + 1, " of ", count, " belongs");
        parts.push_back(std::move(*part));
    }
    return Impl::assemble(path, std::move(parts));
}

Result<Gguf> Gguf::Impl::assemble(const std::string& path, std::vector<Part> parts) {
    auto impl   = std::make_unique<Impl>();
    impl->path  = path;
    impl->parts = std::move(parts);
    for (Part& part : impl->parts) {
        impl->bytes += part.mapping.bytes().size();
        for (GgufTensor& t : part.tensors) impl->tensors.push_back(std::move(t));
    }
    for (std::size_t i = 0; i < impl->tensors.size(); i++)
        if (!impl->tensor_index.emplace(impl->tensors[i].name, i).second)
            return fail(path, ": tensor ", quote(impl->tensors[i].name), " is in two parts");
    const std::int64_t total = uint_in(impl->parts[0], "split.tensors.count", std::int64_t(impl->tensors.size()));
    if (impl->parts.size() > 1 && total != std::int64_t(impl->tensors.size()))
        return fail(path, ": split.tensors.count is ", total, ", the parts have ", impl->tensors.size());
    for (const auto& [key, value] : impl->parts[0].metadata) impl->index.emplace(key, &value);
    return Gguf(std::move(impl));
}

const std::string& Gguf::path() const { return impl_->path; }
std::uint32_t      Gguf::version() const { return impl_->parts[0].version; }
std::size_t        Gguf::file_bytes() const { return impl_->bytes; }
std::uint64_t      Gguf::alignment() const { return impl_->parts[0].alignment; }

std::span<const GgufTensor> Gguf::tensors() const { return impl_->tensors; }

const GgufTensor* Gguf::tensor(std::string_view name) const {
    auto at = impl_->tensor_index.find(name);
    return at == impl_->tensor_index.end() ? nullptr : &impl_->tensors[at->second];
}

std::span<const std::pair<std::string, GgufValue>> Gguf::metadata() const { return impl_->parts[0].metadata; }

const GgufValue* Gguf::find(std::string_view key) const {
    auto at = impl_->index.find(key);
    return at == impl_->index.end() ? nullptr : at->second;
}

std::unexpected<Error> missing(const Gguf& file, std::string_view key) {
    return fail(file.path(), ": the required key ", key, " is missing");
}

std::unexpected<Error> wrong_kind(const Gguf& file, std::string_view key, const GgufValue& value,
                                  std::string_view wanted) {
    return fail(file.path(), ": ", key, " is ", kind_name(value), ", not ", wanted);
}

Result<std::int64_t> Gguf::integer(std::string_view key, std::optional<std::int64_t> fallback) const {
    const GgufValue* value = find(key);
    if (!value) return fallback ? Result<std::int64_t>(*fallback) : missing(*this, key);
    if (const auto* i = std::get_if<std::int64_t>(value)) return *i;
    const auto* u = std::get_if<std::uint64_t>(value);
    if (!u) return wrong_kind(*this, key, *value, "an integer");
    if (*u > std::uint64_t(std::numeric_limits<std::int64_t>::max()))
        return fail(path(), ": ", key, " is ", *u, ", which is out of range");
    return std::int64_t(*u);
}

Result<double> Gguf::number(std::string_view key, std::optional<double> fallback) const {
    const GgufValue* value = find(key);
    if (!value) return fallback ? Result<double>(*fallback) : missing(*this, key);
    if (const auto* d = std::get_if<double>(value)) return *d;
    if (const auto* i = std::get_if<std::int64_t>(value)) return double(*i);
    if (const auto* u = std::get_if<std::uint64_t>(value)) return double(*u);
    return wrong_kind(*this, key, *value, "a number");
}

Result<bool> Gguf::boolean(std::string_view key, std::optional<bool> fallback) const {
    const GgufValue* value = find(key);
    if (!value) return fallback ? Result<bool>(*fallback) : missing(*this, key);
    if (const auto* b = std::get_if<bool>(value)) return *b;
    return wrong_kind(*this, key, *value, "a bool");
}

Result<std::string_view> Gguf::text(std::string_view key, std::optional<std::string_view> fallback) const {
    const GgufValue* value = find(key);
    if (!value) return fallback ? Result<std::string_view>(*fallback) : missing(*this, key);
    if (const auto* s = std::get_if<std::string_view>(value)) return *s;
    return wrong_kind(*this, key, *value, "a string");
}

TensorView GgufTensor::view() const { return {type, dims[1] * dims[2] * dims[3], dims[0], data}; }

std::size_t GgufArray::size() const {
    return uints.size() + ints.size() + floats.size() + bools.size() + strings.size();
}

// -- the writer

template <class T>
void put(std::vector<std::byte>& out, const T& value) {
    const auto* bytes = reinterpret_cast<const std::byte*>(&value);
    out.insert(out.end(), bytes, bytes + sizeof value);
}

void put(std::vector<std::byte>& out, const std::string& text) {
    put(out, std::uint64_t(text.size()));
    const auto* bytes = reinterpret_cast<const std::byte*>(text.data());
    out.insert(out.end(), bytes, bytes + text.size());
}

template <class T>
std::vector<std::byte> bytes_of(const T& value) {
    std::vector<std::byte> out;
    put(out, value);
    return out;
}

template <class T>
std::vector<std::byte> array_bytes(std::uint32_t type, const std::vector<T>& values) {
    std::vector<std::byte> out = bytes_of(type);
    put(out, std::uint64_t(values.size()));
    for (const T& v : values) put(out, v);
    return out;
}

void GgufWriter::set(std::string key, std::uint32_t v) { pairs_.push_back({std::move(key), t_u32, bytes_of(v)}); }
void GgufWriter::set(std::string key, std::int32_t v) { pairs_.push_back({std::move(key), t_i32, bytes_of(v)}); }
void GgufWriter::set(std::string key, std::uint64_t v) { pairs_.push_back({std::move(key), t_u64, bytes_of(v)}); }
void GgufWriter::set(std::string key, float v) { pairs_.push_back({std::move(key), t_f32, bytes_of(v)}); }
void GgufWriter::set(std::string key, bool v) { pairs_.push_back({std::move(key), t_bool, bytes_of(std::uint8_t(v))}); }
void GgufWriter::set(std::string key, const std::string& v) {
    pairs_.push_back({std::move(key), t_string, bytes_of(v)});
}
void GgufWriter::set(std::string key, const char* v) { set(std::move(key), std::string(v)); }
void GgufWriter::set(std::string key, const std::vector<std::string>& v) {
    pairs_.push_back({std::move(key), t_array, array_bytes(t_string, v)});
}
void GgufWriter::set(std::string key, const std::vector<float>& v) {
    pairs_.push_back({std::move(key), t_array, array_bytes(t_f32, v)});
}
void GgufWriter::set(std::string key, const std::vector<std::int32_t>& v) {
    pairs_.push_back({std::move(key), t_array, array_bytes(t_i32, v)});
}

void GgufWriter::add_tensor(std::string name, DType type, std::vector<std::int64_t> dims,
                            std::span<const std::byte> data) {
    std::int64_t rows = 1;
    for (std::size_t i = 1; i < dims.size(); i++) rows *= dims[i];
    check(!dims.empty() && dims.size() <= 4 && data.size() == row_bytes(type, dims[0]) * std::size_t(rows),
          "a tensor whose bytes are not those of its shape");
    tensors_.push_back({std::move(name), type, std::move(dims), {data.begin(), data.end()}});
}

Result<void> GgufWriter::write(const std::string& path, std::uint32_t alignment) const {
    std::vector<std::byte> out = bytes_of(std::uint32_t(0x46554747));
    put(out, std::uint32_t(3));
    put(out, std::uint64_t(tensors_.size()));
    put(out, std::uint64_t(pairs_.size() + 1));
    put(out, std::string("general.alignment"));
    put(out, std::uint32_t(t_u32));
    put(out, alignment);
    for (const Pair& p : pairs_) {
        put(out, p.key);
        put(out, p.type);
        out.insert(out.end(), p.bytes.begin(), p.bytes.end());
    }
    std::uint64_t offset = 0;
    auto          padded = [&](std::uint64_t n) { return (n + alignment - 1) / alignment * alignment; };
    for (const Tensor& t : tensors_) {
        put(out, t.name);
        put(out, std::uint32_t(t.dims.size()));
        for (std::int64_t d : t.dims) put(out, d);
        put(out, std::uint32_t(t.type));
        put(out, offset);
        offset += padded(t.data.size());
    }
    for (const Tensor& t : tensors_) {
        out.resize(padded(out.size()));
        out.insert(out.end(), t.data.begin(), t.data.end());
    }
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(out.data()), std::ptrdiff_t(out.size()));
    file.flush();
    if (!file) return fail_with(ErrorKind::system, "cannot write ", path);
    return {};
}

} // namespace quire
