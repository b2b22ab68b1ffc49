// quire.model_file.gguf_writer: collects metadata and tensors and writes them as one GGUF file; for tests and tools.
// **Owns** what it has collected.
export module quire.model_file.gguf_writer;

import quire.core.base;
import quire.core.output_file;
import quire.core.tensor;
import quire.model_file.gguf_types;

export namespace quire {

// Writes version 3 of the format, which Gguf::open() reads.
class GgufWriter {
public:
    // T: bool, an integer, float, double, std::string, or a std::vector of one of these. A later value of a key
    // replaces the former. "general.alignment" is write()'s.
    template <class T>
    void set(std::string key, const T& value);
    void set(std::string key, const char* value) { set(std::move(key), std::string(value)); }
    // A value as it stands in a file (Gguf::pairs()).
    void set_bytes(std::string key, GgufType type, std::vector<std::byte> bytes);

    // dims[0] is the contiguous one; data holds exactly the bytes that type and dims ask for, copied.
    void add_tensor(std::string name, DType type, std::vector<std::int64_t> dims, std::span<const std::byte> data);
    // As above, the bytes made while the file is written: fill(piece, offset of the piece in the tensor), piece after piece,
    // each of whole rows.
    using Fill = std::function<void(std::span<std::byte> piece, std::uint64_t offset)>;
    void add_tensor(std::string name, DType type, std::vector<std::int64_t> dims, Fill fill);

    // `alignment` is a power of two from 8 on. Error: the file cannot be written; an older file of this name stays.
    Result<void> write(const std::string& path, std::uint32_t alignment = 32) const;

private:
    struct Pair {
        std::string            key;
        GgufType               type;
        std::vector<std::byte> bytes; // the value as it stands in the file
    };
    struct Tensor {
        std::string               name;
        DType                     type;
        std::vector<std::int64_t> dims;
        std::vector<std::byte>    data;
        Fill                      fill;      // instead of data
        std::uint64_t             bytes = 0; // of either
    };
    static std::uint64_t bytes_of(DType type, const std::vector<std::int64_t>& dims);

    std::vector<Pair>   pairs_;
    std::vector<Tensor> tensors_;
};

// -- bodies that importers must see

inline void gguf_put(std::vector<std::byte>& out, const void* data, std::size_t n) {
    const auto* bytes = static_cast<const std::byte*>(data);
    out.insert(out.end(), bytes, bytes + n);
}

// Appends a value as it stands in a file: little-endian, like every machine that quire runs on.
template <class T>
void gguf_put(std::vector<std::byte>& out, const T& value) {
    if constexpr (std::same_as<T, std::string>) {
        gguf_put(out, std::uint64_t(value.size()));
        gguf_put(out, value.data(), value.size());
    } else if constexpr (gguf_type<T>() == GgufType::array) {
        gguf_put(out, std::uint32_t(gguf_type<typename T::value_type>()));
        gguf_put(out, std::uint64_t(value.size()));
        for (typename T::value_type v : value) gguf_put(out, v);
    } else {
        gguf_put(out, &value, sizeof value);
    }
}

template <class T>
void GgufWriter::set(std::string key, const T& value) {
    std::vector<std::byte> bytes;
    gguf_put(bytes, value);
    set_bytes(std::move(key), gguf_type<T>(), std::move(bytes));
}

} // namespace quire

module :private;

namespace quire {

static_assert(std::endian::native == std::endian::little);

void GgufWriter::set_bytes(std::string key, GgufType type, std::vector<std::byte> bytes) {
    check(key != "general.alignment", "the alignment is an argument of write()");
    const auto at = std::ranges::find_if(pairs_, [&](const Pair& p) { return p.key == key; });
    if (at == pairs_.end()) pairs_.push_back({std::move(key), type, std::move(bytes)});
    else *at = {std::move(key), type, std::move(bytes)};
}

std::uint64_t GgufWriter::bytes_of(DType type, const std::vector<std::int64_t>& dims) {
    check(!dims.empty() && dims.size() <= 4, "a tensor of no or too many dimensions");
    std::uint64_t bytes = row_bytes(type, dims[0]);
    for (std::size_t i = 1; i < dims.size(); i++) bytes *= std::uint64_t(dims[i]);
    return bytes;
}

void GgufWriter::add_tensor(std::string name, DType type, std::vector<std::int64_t> dims,
                            std::span<const std::byte> data) {
    check(data.size() == bytes_of(type, dims), "a tensor whose bytes are not those of its shape");
    tensors_.push_back({std::move(name), type, std::move(dims), {data.begin(), data.end()}, {}, data.size()});
}

void GgufWriter::add_tensor(std::string name, DType type, std::vector<std::int64_t> dims, Fill fill) {
    const std::uint64_t bytes = bytes_of(type, dims);
    tensors_.push_back({std::move(name), type, std::move(dims), {}, std::move(fill), bytes});
}

// header | pairs | tensor infos | padding | tensor 0 | padding | tensor 1 | ...; offsets count from tensor 0
Result<void> GgufWriter::write(const std::string& path, std::uint32_t alignment) const {
    check(std::has_single_bit(alignment) && alignment >= least_gguf_alignment, "an alignment that no file has");
    const auto padded = [&](std::uint64_t n) { return (n + alignment - 1) & ~(std::uint64_t(alignment) - 1); };

    std::vector<std::byte> out;
    gguf_put(out, "GGUF", 4);
    gguf_put(out, std::uint32_t(3));
    gguf_put(out, std::uint64_t(tensors_.size()));
    gguf_put(out, std::uint64_t(pairs_.size() + 1));
    gguf_put(out, std::string("general.alignment"));
    gguf_put(out, std::uint32_t(GgufType::u32));
    gguf_put(out, alignment);
    for (const Pair& p : pairs_) {
        gguf_put(out, p.key);
        gguf_put(out, std::uint32_t(p.type));
        gguf_put(out, p.bytes.data(), p.bytes.size());
    }
    std::uint64_t offset = 0;
    for (const Tensor& t : tensors_) {
        gguf_put(out, t.name);
        gguf_put(out, std::uint32_t(t.dims.size()));
        for (std::int64_t d : t.dims) gguf_put(out, d);
        gguf_put(out, std::uint32_t(t.type));
        gguf_put(out, offset);
        offset += padded(t.bytes);
    }
    OutputFile    file(path);
    std::uint64_t at    = 0;
    const auto    write = [&](std::span<const std::byte> bytes) {
        file.write(bytes);
        at += bytes.size();
    };
    const auto pad = [&] {
        const std::vector<std::byte> zeros(static_cast<std::size_t>(padded(at) - at));
        write(zeros);
    };
    write(out);
    std::vector<std::byte> piece;
    for (const Tensor& t : tensors_) {
        pad();
        write(t.data);
        const std::uint64_t row  = row_bytes(t.type, t.dims[0]),
                            most = std::max((std::uint64_t(16) << 20) / row, std::uint64_t(1)) * row;
        for (std::uint64_t done = 0; t.fill && done < t.bytes && file.good(); done += piece.size()) {
            piece.resize(std::size_t(std::min(most, t.bytes - done)));
            t.fill(piece, done);
            write(piece);
        }
    }
    return file.finish();
}

} // namespace quire
