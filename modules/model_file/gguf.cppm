// quire.model_file.gguf: reads GGUF files (format document: docs/gguf.md of the ggml project), v2 and v3, in one file or split.
// A file is validated once, here, before anything in it is used. Whatever the file says, parsing it takes no more memory than a
// small multiple of its size. **Owns** the mapping of the file.
export module quire.model_file.gguf;

import quire.core.base;
export import quire.core.tensor;
import quire.model_file.gguf_types;
import quire.model_file.mapped_file;

export namespace quire {

// Whether the file can be read and does not begin as a GGUF file does.
bool is_no_gguf(const std::string& path);

// One row of the tensor table. Its data is completely inside the mapping.
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

// A metadata pair as it stands in the file, to be written to another. The views point into the mapping.
struct GgufPair {
    std::string_view           key;
    GgufType                   type;
    std::span<const std::byte> value;
};

// A GGUF file, or all parts of a split one (NAME-00001-of-0000N.gguf), mapped read-only.
class Gguf {
public:
    // Error: one sentence naming the file, the place in it, and what is wrong.
    static Result<Gguf> open(const std::string& path);
    // Reads a file from its bytes in memory, which outlive the result. `name` is for messages.
    static Result<Gguf> parse(std::span<const std::byte> bytes, const std::string& name);

    Gguf(Gguf&&) noexcept;
    Gguf& operator=(Gguf&&) noexcept;
    ~Gguf();

    // The files that open(path) reads: `path`, or all parts where `path` is the name of a first part.
    static std::vector<std::string> files(const std::string& path);

    const std::string& path() const;
    std::uint32_t      version() const;
    std::size_t        file_bytes() const; // of all parts
    std::uint64_t      alignment() const;
    // Asks the system to read the whole file ahead; call it before using the tensors.
    void prefetch() const;
    // The part that MappedFile::torn() is true of, or MappedFile::changed(); "": none.
    std::string torn() const;
    std::string changed();

    std::span<const GgufTensor> tensors() const;                     // in file order
    const GgufTensor*           tensor(std::string_view name) const; // or nullptr

    std::span<const std::pair<std::string, GgufValue>> metadata() const;                 // in file order
    std::span<const GgufPair>                          pairs() const;                    // likewise
    const GgufValue*                                   find(std::string_view key) const; // or nullptr

    // A value of the named kind. Missing: the fallback, or an error when none is given.
    // A value of another kind is always an error. Integers of either signedness count as integers if in range.
    Result<std::int64_t>     integer(std::string_view key, std::optional<std::int64_t> fallback = {}) const;
    Result<double>           number(std::string_view key, std::optional<double> fallback = {}) const;
    Result<bool>             boolean(std::string_view key, std::optional<bool> fallback = {}) const;
    Result<std::string_view> text(std::string_view key, std::optional<std::string_view> fallback = {}) const;

private:
    struct Impl;
    explicit Gguf(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

} // namespace quire

module :private;

namespace quire {

using enum GgufType;

constexpr std::size_t header_bytes = 24;

bool is_no_gguf(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) return false;
    char magic[4] = {};
    file.read(magic, sizeof magic);
    return std::string_view(magic, sizeof magic) != "GGUF";
}

// Bytes of a scalar; 0 for strings and arrays.
constexpr std::array<std::size_t, n_gguf_types> scalar_bytes{1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
constexpr std::array<const char*, n_gguf_types> type_names{"uint8",  "int8",    "uint16", "int16",  "uint32",
                                                           "int32",  "float32", "bool",   "string", "array",
                                                           "uint64", "int64",   "float64"};

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
            set_error(cat(what, " wants ", n, " bytes where ", left(), " are left", of_the_file()));
            return nullptr;
        }
        const std::byte* at = bytes_.data() + at_;
        at_ += std::size_t(n);
        return at;
    }

    void set_error(std::string_view why) {
        if (!failed()) error_ = cat(name_, ": at byte ", at_, ": ", why);
    }
    // A file may have been cut off anywhere: the end of a message about bytes that are not there.
    std::string of_the_file() const { return cat(" of the file's ", bytes_.size(), ": an incomplete download?"); }
    bool        failed() const { return !error_.empty(); }
    const std::string& error() const { return error_; }
    std::size_t        at() const { return at_; }
    const std::byte*   here() const { return bytes_.data() + at_; }
    std::size_t        left() const { return bytes_.size() - at_; }

private:
    std::span<const std::byte> bytes_;
    const std::string&         name_;
    std::size_t                at_ = 0;
    std::string                error_;
};

// A scalar of the file's type, widened.
template <class Wide>
Wide read_scalar(Reader& r, GgufType type, std::string_view what) {
    switch (type) {
        case u8: return Wide(r.scalar<std::uint8_t>(what));
        case i8: return Wide(r.scalar<std::int8_t>(what));
        case u16: return Wide(r.scalar<std::uint16_t>(what));
        case i16: return Wide(r.scalar<std::int16_t>(what));
        case u32: return Wide(r.scalar<std::uint32_t>(what));
        case i32: return Wide(r.scalar<std::int32_t>(what));
        case u64: return Wide(r.scalar<std::uint64_t>(what));
        case i64: return Wide(r.scalar<std::int64_t>(what));
        case f32: return Wide(r.scalar<float>(what));
        case f64: return Wide(r.scalar<double>(what));
        default: return Wide(r.scalar<std::uint8_t>(what)); // bool
    }
}

bool is_unsigned(GgufType t) { return t == u8 || t == u16 || t == u32 || t == u64; }
bool is_signed(GgufType t) { return t == i8 || t == i16 || t == i32 || t == i64; }
bool is_float(GgufType t) { return t == f32 || t == f64; }

GgufArray read_array(Reader& r, std::string_view what) {
    GgufArray array;
    array.type      = r.scalar<std::uint32_t>(what);
    const auto n    = r.scalar<std::uint64_t>(what);
    const auto type = GgufType(array.type);
    if (r.failed()) return array;
    if (array.type >= n_gguf_types) {
        r.set_error(cat(what, " is an array of unknown type ", array.type));
    } else if (type == GgufType::array) {
        r.set_error(cat(what, " is an array of arrays, which quire does not read"));
    } else if (n > r.left() / (type == string ? 8 : scalar_bytes[array.type])) { // a string has 8 bytes of length
        r.set_error(cat(what, " claims ", n, " elements of type ", type_names[array.type], " where ", r.left(),
                        " bytes are left", r.of_the_file()));
    }
    if (r.failed()) return array;
    const auto count = std::size_t(n);
    if (type == string) {
        array.strings.reserve(count);
        for (std::size_t i = 0; i < count && !r.failed(); i++) array.strings.push_back(r.string(what));
    } else if (is_unsigned(type)) {
        array.uints.resize(count);
        for (auto& v : array.uints) v = read_scalar<std::uint64_t>(r, type, what);
    } else if (is_signed(type)) {
        array.ints.resize(count);
        for (auto& v : array.ints) v = read_scalar<std::int64_t>(r, type, what);
    } else if (is_float(type)) {
        array.floats.resize(count);
        for (auto& v : array.floats) v = read_scalar<double>(r, type, what);
    } else {
        array.bools.resize(count);
        for (std::size_t i = 0; i < count; i++) array.bools[i] = read_scalar<std::uint8_t>(r, type, what) != 0;
    }
    return array;
}

GgufValue read_value(Reader& r, std::string_view what) {
    const auto number = r.scalar<std::uint32_t>(what);
    const auto type   = GgufType(number);
    if (r.failed()) return false;
    if (number >= n_gguf_types) {
        r.set_error(cat(what, " has unknown value type ", number));
        return false;
    }
    if (type == string) return r.string(what);
    if (type == GgufType::array) return read_array(r, what);
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
    MappedFile                                     mapping;
    std::uint32_t                                  version   = 0;
    std::uint64_t                                  alignment = 32;
    std::vector<std::pair<std::string, GgufValue>> metadata;
    std::vector<GgufPair>                          pairs;
    std::vector<GgufTensor>                        tensors;
};

const GgufValue* find_in(const Part& part, std::string_view key) {
    for (const auto& [k, v] : part.metadata)
        if (k == key) return &v;
    return nullptr;
}

// Reads the fields behind a tensor's name.
void read_tensor_info(Reader& r, GgufTensor& t, std::uint64_t& offset) {
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
    const bool       ids  = t.name == "d2t" && DType(type) == DType::I64;
    const DTypeInfo* info = ids ? &dtype_info(DType::I64) : dtype_find(type);
    if (!info) return r.set_error(cat(what, " has type ", dtype_refusal(type)));
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
std::string place_tensors(Part& part, std::span<const std::uint64_t> offsets, std::uint64_t data_start) {
    const std::span<const std::byte> bytes = part.mapping.bytes();
    std::uint64_t                    end   = data_start; // of the last tensor: the file has to reach there
    std::string_view                 last;
    for (std::size_t i = 0; i < part.tensors.size(); i++) {
        GgufTensor&   t        = part.tensors[i];
        std::uint64_t this_end = 0;
        if (offsets[i] % part.alignment != 0)
            return cat("tensor ", quote(t.name), " is at offset ", offsets[i], ", not a multiple of the alignment ",
                       part.alignment);
        if (__builtin_add_overflow(data_start, offsets[i], &this_end) ||
            __builtin_add_overflow(this_end, std::uint64_t(t.bytes), &this_end))
            return cat("tensor ", quote(t.name), " has ", t.bytes, " bytes at offset ", offsets[i],
                       ", more than 64 bits can count");
        if (this_end > end) end = this_end, last = t.name;
    }
    if (end > bytes.size())
        return cat("its tensors need a file of ", end, " bytes, up to the end of ", quote(last), ", it has ",
                   bytes.size(), ": an incomplete download?");
    for (std::size_t i = 0; i < part.tensors.size(); i++) part.tensors[i].data = bytes.data() + data_start + offsets[i];
    std::vector<const GgufTensor*> order;
    order.reserve(part.tensors.size());
    for (const GgufTensor& t : part.tensors) order.push_back(&t);
    std::ranges::sort(order, {}, [](const GgufTensor* t) { return t->data; });
    for (std::size_t i = 1; i < order.size(); i++)
        if (order[i - 1]->data + order[i - 1]->bytes > order[i]->data)
            return cat("tensors ", quote(order[i - 1]->name), " and ", quote(order[i]->name), " overlap");
    return {};
}

// By its first bytes, the kind of file that people take for a model's: the end of a sentence, or "".
std::string_view likely_kind(std::span<const std::byte> bytes) {
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), std::min<std::size_t>(bytes.size(), 64));
    if (text.starts_with("version https://git-lfs"))
        return ", but as a pointer of Git LFS; `git lfs pull` fetches the file";
    if (text.starts_with("<")) return ", but as a page of HTML or XML, perhaps the error of a download";
    if (text.size() > 9 && text.substr(8, 2) == "{\"")
        return ", but as safetensors; llama.cpp's convert_hf_to_gguf.py makes GGUF of them";
    if (text.starts_with("PK\3\4")) return ", but as a ZIP archive or a file of PyTorch";
    for (const std::string_view old :
         {"tjgg", "fmgg", "lmgg"}) // "ggjt" and its like, as the words of a little-endian machine
        if (text.starts_with(old)) return ", but as GGML's older format, which llama.cpp no longer reads either";
    if (text.starts_with("\x1f\x8b") ||
        text.starts_with("\xfd"
                         "7zXZ") ||
        text.starts_with("\x28\xb5\x2f\xfd"))
        return ", but as a compressed file";
    return "";
}

Result<Part> read_part(MappedFile mapping, const std::string& name) {
    Part part;
    part.mapping = std::move(mapping);
    Reader r(part.mapping.bytes(), name);

    const auto magic = r.scalar<std::uint32_t>("the magic number");
    if (!r.failed() && magic != 0x46554747)
        return fail(name, ": not a GGUF file: it does not begin with 'GGUF'", likely_kind(part.mapping.bytes()));
    part.version = r.scalar<std::uint32_t>("the version");
    if (!r.failed() && part.version != 2 && part.version != 3)
        return fail(name, ": GGUF version ", part.version, " is not one of 2, 3",
                    part.version << 16 == 0 ? "; it may be a big-endian file" : "");
    const auto n_tensors = r.scalar<std::uint64_t>("the number of tensors");
    const auto n_pairs   = r.scalar<std::uint64_t>("the number of metadata pairs");
    if (r.failed()) return fail(r.error());
    // The smallest pair has 13 bytes, the smallest tensor info 32: a count that cannot be true is not used.
    if (n_pairs > r.left() / 13)
        return fail(name, ": the header claims ", n_pairs, " metadata pairs in ", r.left(), " bytes", r.of_the_file());
    if (n_tensors > r.left() / 32)
        return fail(name, ": the header claims ", n_tensors, " tensors in ", r.left(), " bytes", r.of_the_file());

    // The lists grow with the entries that are read, not with the number that the header claims. The views in `seen` point into the file.
    std::unordered_set<std::string_view> seen;
    for (std::uint64_t i = 0; i < n_pairs && !r.failed(); i++) {
        const std::size_t      at  = r.at();
        const std::string_view key = r.string("a metadata key");
        if (r.failed()) break;
        if (!seen.insert(key).second)
            return fail(name, ": at byte ", at, ": metadata key ", quote(key), " is there twice");
        const std::byte* const type = r.here();
        part.metadata.emplace_back(key, read_value(r, cat("metadata ", quote(key))));
        if (r.failed()) break;
        const std::byte* const value = type + sizeof(GgufType);
        GgufPair&              pair  = part.pairs.emplace_back(GgufPair{key, {}, {value, r.here()}});
        std::memcpy(&pair.type, type, sizeof pair.type);
    }
    if (r.failed()) return fail(r.error());

    if (const GgufValue* value = find_in(part, "general.alignment")) {
        const auto* n = std::get_if<std::uint64_t>(value);
        if (!n || *n < least_gguf_alignment || !std::has_single_bit(*n)) // or floats would stand between two words
            return fail(name, ": general.alignment is ", n ? std::to_string(*n) : kind_name(*value),
                        ", not a power of two that is a multiple of ", least_gguf_alignment);
        part.alignment = *n;
    }

    seen.clear();
    std::vector<std::uint64_t> offsets;
    for (std::uint64_t i = 0; i < n_tensors && !r.failed(); i++) {
        const std::size_t      at          = r.at();
        const std::string_view tensor_name = r.string("a tensor's name");
        if (r.failed()) break;
        if (!seen.insert(tensor_name).second)
            return fail(name, ": at byte ", at, ": tensor ", quote(tensor_name), " is there twice");
        read_tensor_info(r, part.tensors.emplace_back(GgufTensor{.name = std::string(tensor_name)}),
                         offsets.emplace_back());
    }
    if (r.failed()) return fail(r.error());
    if (part.tensors.empty()) return part;

    // The data part begins at the next multiple of the alignment.
    const std::uint64_t padding = (part.alignment - r.at() % part.alignment) % part.alignment;
    if (std::string why = place_tensors(part, offsets, r.at() + padding); !why.empty()) return fail(name, ": ", why);
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

    static Result<Gguf> assemble(const std::string& path, std::vector<Part> parts, std::int64_t n_tensors);
};

Gguf::Gguf(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Gguf::Gguf(Gguf&&) noexcept            = default;
Gguf& Gguf::operator=(Gguf&&) noexcept = default;
Gguf::~Gguf()                          = default;

// "x-00002-of-00003.gguf" for part 1 (counting from 0) of "x-00001-of-00003.gguf"; "" if the name is not of that form.
std::string sibling(const std::string& path, std::int64_t part, std::int64_t count) {
    char mine[32], other[32];
    std::snprintf(mine, sizeof mine, "-%05d-of-%05d.gguf", 1, int(count));
    std::snprintf(other, sizeof other, "-%05d-of-%05d.gguf", int(part + 1), int(count));
    return path.ends_with(mine) ? path.substr(0, path.size() - std::strlen(mine)) + other : std::string();
}

// A part's statements about the whole: its own number from 0, the number of parts, and the number of tensors in all.
struct Split {
    std::int64_t no = 0, count = 1, tensors = 0;
};

Result<Split> read_split(const Part& part, const std::string& name) {
    constexpr std::int64_t most_parts = 99'999; // what five digits of a name can count
    std::string            wrong;
    auto                   number = [&](std::string_view key, std::int64_t fallback, std::int64_t most) {
        const GgufValue* value = find_in(part, key);
        if (!value) return fallback;
        const auto* u = std::get_if<std::uint64_t>(value);
        const auto* i = std::get_if<std::int64_t>(value);
        if (!u && !i) wrong = cat(key, " is ", kind_name(*value), ", not an integer");
        else if (u ? *u > std::uint64_t(most) : *i < 0 || *i > most)
            wrong = cat(key, " is ", u ? std::to_string(*u) : std::to_string(*i), ", not in 0..", most);
        else return u ? std::int64_t(*u) : *i;
        return fallback;
    };
    Split split;
    split.no      = number("split.no", 0, most_parts);
    split.count   = std::max<std::int64_t>(number("split.count", 1, most_parts), 1);
    split.tensors = number("split.tensors.count", -1, std::numeric_limits<std::int32_t>::max());
    if (!wrong.empty()) return fail(name, ": ", wrong);
    return split;
}

Result<Gguf> Gguf::parse(std::span<const std::byte> bytes, const std::string& name) {
    Result<Part> part = read_part(MappedFile(bytes), name);
    if (!part) return std::unexpected(part.error());
    const Result<Split> split = read_split(*part, name);
    if (!split) return std::unexpected(split.error());
    if (split->count > 1) return fail(name, ": this is one of ", split->count, " parts, which cannot be read alone");
    std::vector<Part> parts;
    parts.push_back(std::move(*part));
    return Impl::assemble(name, std::move(parts), -1);
}

Result<Gguf> Gguf::open(const std::string& path) {
    std::vector<Part> parts;
    Split             whole; // as the first part says
    for (std::int64_t i = 0; i < whole.count; i++) {
        const std::string  name    = i == 0 ? path : sibling(path, i, whole.count);
        Result<MappedFile> mapping = MappedFile::open(name, header_bytes);
        if (!mapping) return std::unexpected(mapping.error());
        Result<Part> part = read_part(std::move(*mapping), name);
        if (!part) return std::unexpected(part.error());
        const Result<Split> split = read_split(*part, name);
        if (!split) return std::unexpected(split.error());
        if (i == 0) {
            whole = *split;
            if (whole.count > 1 && whole.no != 0)
                return fail(path, ": this is part ", whole.no + 1, " of ", whole.count,
                            "; open the first part instead");
            if (whole.count > 1 && sibling(path, 0, whole.count).empty())
                return fail(path, ": split.count is ", whole.count,
                            ", but the name does not end in -00001-of- and that number, so the others cannot be found");
        } else if (split->no != i || split->count != whole.count) {
            return fail(name, ": it says that it is part ", split->no + 1, " of ", split->count, " where part ", i + 1,
                        " of ", whole.count, " belongs");
        }
        parts.push_back(std::move(*part));
    }
    return Impl::assemble(path, std::move(parts), whole.count > 1 ? whole.tensors : -1);
}

// `n_tensors`: how many the parts have to have together, or -1.
Result<Gguf> Gguf::Impl::assemble(const std::string& path, std::vector<Part> parts, std::int64_t n_tensors) {
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
    if (n_tensors >= 0 && n_tensors != std::int64_t(impl->tensors.size()))
        return fail(path, ": split.tensors.count is ", n_tensors, ", the parts have ", impl->tensors.size());
    for (const auto& [key, value] : impl->parts[0].metadata) impl->index.emplace(key, &value);
    return Gguf(std::move(impl));
}

std::vector<std::string> Gguf::files(const std::string& path) {
    constexpr std::size_t    digits = 5;
    constexpr auto           tail   = std::string_view("00001-of-00001.gguf").size();
    std::vector<std::string> out{path};
    if (path.size() < tail) return out;
    std::int64_t count = 0;
    for (char c : std::string_view(path).substr(path.size() - tail + 9, digits))
        if (c < '0' || c > '9') return out;
        else count = count * 10 + (c - '0');
    if (sibling(path, 0, count) != path) return out;
    for (std::int64_t i = 1; i < count; i++) out.push_back(sibling(path, i, count));
    return out;
}

const std::string& Gguf::path() const { return impl_->path; }
std::uint32_t      Gguf::version() const { return impl_->parts[0].version; }
std::size_t        Gguf::file_bytes() const { return impl_->bytes; }
std::uint64_t      Gguf::alignment() const { return impl_->parts[0].alignment; }
std::string        Gguf::torn() const {
    for (const Part& part : impl_->parts)
        if (part.mapping.torn()) return part.mapping.path();
    return {};
}
std::string Gguf::changed() {
    std::string path;
    for (Part& part : impl_->parts)
        if (part.mapping.changed()) path = part.mapping.path();
    return path;
}
void Gguf::prefetch() const {
    for (const Part& part : impl_->parts) part.mapping.prefetch();
}

std::span<const GgufTensor> Gguf::tensors() const { return impl_->tensors; }

const GgufTensor* Gguf::tensor(std::string_view name) const {
    auto at = impl_->tensor_index.find(name);
    return at == impl_->tensor_index.end() ? nullptr : &impl_->tensors[at->second];
}

std::span<const std::pair<std::string, GgufValue>> Gguf::metadata() const { return impl_->parts[0].metadata; }

std::span<const GgufPair> Gguf::pairs() const { return impl_->parts[0].pairs; }

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

} // namespace quire
