// quire.tools.quantize.convert: a GGUF file in another mix of types. **Owns** the threads that work on it.
//
// Tensor by tensor, some whole rows at a time, so that memory is bounded by the rows in work, whatever the file's size.
export module quire.tools.quantize.convert;

import quire.core.base;
import quire.core.output_file;
import quire.core.thread_pool;
import quire.model_file.gguf;
import quire.model_file.gguf_types;
import quire.model_file.gguf_writer;
import quire.model_file.quants;
import quire.tools.quantize.defined;
import quire.tools.quantize.imatrix;
import quire.tools.quantize.mix;
import quire.tools.quantize.search;

export namespace quire {

struct ConvertOptions {
    std::string in, out;
    const Mix*  mix = nullptr;
    std::string imatrix;                  // a file, or ""
    bool        allow_requantize = false; // of tensors that are quantised already
    int         threads          = 1;
};

struct ConvertProgress {
    std::string_view tensor;
    DType            from, to;
    std::size_t      index = 0, n = 0; // of the tensors
    double           fraction = 0;     // of the bytes to be written
};

struct Converted {
    std::size_t   tensors = 0, without_importance = 0; // the latter: quantised by search although there is an imatrix
    std::uint64_t weights = 0, bytes_in = 0, bytes_out = 0; // of the tensors
    // By type: how many tensors have it.
    std::map<std::string, int> types;
};

// Error: one sentence; a former file at `out` stays.
Result<Converted> convert(const ConvertOptions& o, const std::function<void(const ConvertProgress&)>& progress);

} // namespace quire

module :private;

namespace quire {

// The first of the values of a key that may have one for each layer.
Result<std::int64_t> first_integer(const Gguf& file, const std::string& key, std::int64_t fallback) {
    if (const GgufValue* value = file.find(key))
        if (const auto* list = std::get_if<GgufArray>(value)) {
            if (!list->uints.empty()) return std::int64_t(list->uints[0]);
            if (!list->ints.empty()) return list->ints[0];
        }
    return file.integer(key, fallback);
}

Result<MixModel> describe(const Gguf& file) {
    MixModel   m;
    const auto architecture = file.text("general.architecture");
    if (!architecture) return std::unexpected(architecture.error());
    m.architecture = std::string(*architecture);
    for (auto [key, to] : {std::pair("block_count", &m.layers),
                           {"expert_count", &m.experts},
                           {"attention.head_count", &m.heads},
                           {"attention.head_count_kv", &m.kv_heads}}) {
        const auto value =
            first_integer(file, cat(m.architecture, ".", key), to == &m.kv_heads ? m.heads : std::int64_t(0));
        if (!value) return std::unexpected(value.error());
        *to = *value;
    }
    return m;
}

// Thrown to stop the conversion of a row. Thrown through the writer, it leaves the former file in place.
struct BadRow {
    Error error;
};

// One tensor on its way.
struct Work {
    const GgufTensor& tensor;
    DType             to;
    const float*      importance; // [cols × experts], or null

    // Rows first .. first + n - 1; `row` [cols] is room. Error: a value that the type cannot stand for.
    Result<void> rows(std::int64_t first, std::int64_t n, float* row, std::byte* out) const;
};

// The largest value that scales of fp16 and levels can certainly stand for.
float largest_value(DType type) {
    return type == DType::F32 || type == DType::BF16 || type == DType::MXFP4 ? std::numeric_limits<float>::max()
                                                                             : 65504.0f;
}

Result<void> Work::rows(std::int64_t first, std::int64_t n, float* row, std::byte* out) const {
    const std::int64_t cols   = tensor.dims[0];
    const std::size_t  stride = row_bytes(tensor.type, cols), to_stride = row_bytes(to, cols);
    const float        most = largest_value(to);
    for (std::int64_t r = first; r < first + n; r++, out += to_stride) {
        const std::byte* from = tensor.data + std::size_t(r) * stride;
        if (tensor.type == to) {
            std::memcpy(out, from, stride);
            continue;
        }
        dequantize(tensor.type, from, row, cols);
        for (std::int64_t c = 0; c < cols; c++)
            if (!(std::abs(row[c]) <= most))
                return fail("tensor ", quote(tensor.name), " has the value ", row[c], " in row ", r, ", column ", c,
                            ", which ", dtype_info(to).name, " cannot hold");
        const float* weights = importance ? importance + r / tensor.dims[1] * cols : nullptr;
        if ((weights != nullptr && has_search(to)) || !has_defined_quantisation(to))
            quantize_search(to, row, weights, out, cols);
        else quantize_defined(to, row, out, cols);
    }
    return {};
}

Result<Converted> convert(const ConvertOptions& o, const std::function<void(const ConvertProgress&)>& progress) {
    Result<Gguf> in = Gguf::open(o.in);
    if (!in) return std::unexpected(in.error());
    std::vector<std::string> inputs = Gguf::files(o.in);
    inputs.push_back(o.imatrix);
    if (const Result<void> ok = check_not_input(o.out, inputs); !ok) return std::unexpected(ok.error());
    Imatrix imatrix;
    if (!o.imatrix.empty()) {
        Result<Imatrix> read = read_imatrix(o.imatrix);
        if (!read) return std::unexpected(read.error());
        imatrix = std::move(*read);
    }
    Result<MixModel> model = describe(*in);
    if (!model) return std::unexpected(model.error());
    model->has_imatrix = !imatrix.weights.empty();

    std::vector<MixTensor> tensors;
    for (const GgufTensor& t : in->tensors()) tensors.push_back({t.name, t.type, t.dims});
    if (tensors.empty()) return fail(o.in, " has no tensors");
    const Result<std::vector<DType>> types = types_of(*o.mix, *model, tensors);
    if (!types) return fail_with(types.error().kind, o.in, ": ", types.error().message);

    GgufWriter writer;
    for (const GgufPair& pair : in->pairs())
        if (pair.key != "general.alignment" && !pair.key.starts_with("split."))
            writer.set_bytes(std::string(pair.key), pair.type, {pair.value.begin(), pair.value.end()});
    writer.set("general.quantization_version", std::uint32_t(2));
    writer.set("general.file_type", o.mix->file_type);
    if (model->has_imatrix) {
        writer.set("quantize.imatrix.file", std::filesystem::path(o.imatrix).filename().string());
        if (!imatrix.dataset.empty()) writer.set("quantize.imatrix.dataset", imatrix.dataset);
        writer.set("quantize.imatrix.entries_count", std::uint32_t(imatrix.weights.size()));
        writer.set("quantize.imatrix.chunks_count", std::uint32_t(imatrix.chunks));
    }

    Converted                       done;
    ThreadPool                      pool(o.threads);
    std::vector<std::vector<float>> room(static_cast<std::size_t>(pool.n_threads()));
    std::uint64_t                   written = 0, all = 0;
    for (std::size_t i = 0; i < tensors.size(); i++)
        all += row_bytes((*types)[i], tensors[i].dims[0]) * std::uint64_t(in->tensors()[i].view().rows);

    for (std::size_t i = 0; i < tensors.size(); i++) {
        const GgufTensor&  t    = in->tensors()[i];
        const DType        to   = (*types)[i];
        const std::int64_t cols = t.dims[0], n_rows = t.view().rows;
        const bool         changes = t.type != to;
        if (changes && dtype_info(t.type).items > 1 && !o.allow_requantize)
            return fail(o.in, ": tensor ", quote(t.name), " is ", dtype_info(t.type).name,
                        " already; a quantised file is quantised again only with --allow-requantize");
        const float* importance = nullptr;
        if (const auto found = imatrix.weights.find(t.name); changes && found != imatrix.weights.end()) {
            if (found->second.size() == std::size_t(cols * t.dims[2])) importance = found->second.data();
            else if (t.name != "token_embd.weight")
                return fail(o.imatrix, " has ", found->second.size(), " values for ", quote(t.name), ", whose ",
                            t.dims[2], " × ", cols, " columns need ", cols * t.dims[2], ": it is of another model");
        }
        if (changes && importance == nullptr && needs_imatrix(*o.mix, t.name, to))
            return fail(o.mix->name, " needs an importance matrix (--imatrix) with values for ", quote(t.name),
                        ": without, the result would be of no use");
        done.tensors++;
        done.without_importance += model->has_imatrix && importance == nullptr && changes && has_search(to);
        done.weights += std::uint64_t(n_rows * cols);
        done.bytes_in += t.bytes;
        done.types[dtype_info(to).name]++;
        const Work work{t, to, importance};
        writer.add_tensor(t.name, to, {t.dims.begin(), t.dims.begin() + t.n_dims},
                          [&, work, i, cols, to](std::span<std::byte> piece, std::uint64_t offset) {
                              const std::size_t stride = row_bytes(to, cols);
                              const auto first = std::int64_t(offset / stride), n = std::int64_t(piece.size() / stride);
                              const std::int64_t together = std::max(std::int64_t(1), 8192 / cols); // rows of one item
                              std::mutex         mutex;
                              std::optional<Error> error;
                              pool.run(int((n + together - 1) / together), [&](int item, int thread) {
                                  std::vector<float>& row  = room[std::size_t(thread)];
                                  const std::int64_t  from = item * together;
                                  row.resize(std::size_t(cols));
                                  auto ok = work.rows(first + from, std::min(together, n - from), row.data(),
                                                      piece.data() + std::size_t(from) * stride);
                                  if (ok) return;
                                  const std::lock_guard lock(mutex);
                                  if (!error) error = ok.error();
                              });
                              if (error) throw BadRow{*error};
                              const bool last = written + piece.size() == all;
                              if (!in->torn().empty() || (last && !in->changed().empty()))
                                  throw BadRow{{ErrorKind::system, "it was changed in place while it was read"}};
                              written += piece.size();
                              if (progress)
                                  progress({work.tensor.name, work.tensor.type, to, i, tensors.size(),
                                            double(written) / double(all)});
                          });
    }
    try {
        const Result<void> ok = writer.write(o.out, std::uint32_t(in->alignment()));
        if (!ok) return std::unexpected(ok.error());
    } catch (const BadRow& bad) {
        return fail_with(bad.error.kind, o.in, ": ", bad.error.message);
    }
    done.bytes_out = written;
    return done;
}

} // namespace quire
