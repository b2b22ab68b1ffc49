// quire.tools.quantize.imatrix: importance matrices as llama-imatrix writes them, as GGUF or in the older .dat form. **Owns** the values.
//
// For each matrix of a model, and each of its columns: the mean square of the inputs that the column was multiplied with over some text. An error in
// a column with large inputs does more harm.
export module quire.tools.quantize.imatrix;

import quire.core.base;
import quire.model_file.gguf;

export namespace quire {

struct Imatrix {
    // By tensor name: cols values for a matrix, cols × experts for a stack of them. Of each matrix the mean is 1.
    std::map<std::string, std::vector<float>, std::less<>> weights;
    std::string                                            dataset; // the text's name, or ""
    std::int64_t                                           chunks = 0;
};

// Error: not such a file, or one with values that cannot be.
Result<Imatrix> read_imatrix(const std::string& path);

} // namespace quire

module :private;

namespace quire {

// Scales each `cols` values to the mean 1; zeros mean that nothing is known.
Result<void> normalise(const std::string& path, std::string_view name, std::span<float> values, std::size_t cols) {
    for (float v : values)
        if (!std::isfinite(v) || v < 0)
            return fail(path, ": the values of ", quote(name), " have one of ", v, ", which is no mean square");
    for (std::size_t at = 0; at < values.size(); at += cols) {
        const std::span<float> some = values.subspan(at, cols);
        double                 sum  = 0;
        for (float v : some) sum += double(v);
        for (float& v : some) v = sum > 0 ? float(double(v) * double(cols) / sum) : 1;
    }
    return {};
}

// Tensors NAME.in_sum2 [cols × experts], sums of squares, and NAME.counts [1 × experts], of how many inputs.
Result<Imatrix> from_gguf(const std::string& path) {
    Result<Gguf> file = Gguf::open(path);
    if (!file) return std::unexpected(file.error());
    Imatrix out;
    for (const GgufTensor& sums : file->tensors()) {
        constexpr std::string_view suffix = ".in_sum2";
        if (!sums.name.ends_with(suffix)) continue;
        const std::string name   = sums.name.substr(0, sums.name.size() - suffix.size());
        const GgufTensor* counts = file->tensor(name + ".counts");
        const TensorView  view   = sums.view();
        if (counts == nullptr || counts->type != DType::F32 || sums.type != DType::F32 ||
            counts->view().rows * counts->view().cols != view.rows)
            return fail(path, ": the sums of ", quote(name), " have no counts of F32 that fit them");
        std::vector<float> values(std::size_t(view.rows * view.cols));
        std::memcpy(values.data(), view.data, values.size() * sizeof(float));
        if (auto ok = normalise(path, name, values, std::size_t(view.cols)); !ok) return std::unexpected(ok.error());
        out.weights.emplace(name, std::move(values));
    }
    if (out.weights.empty())
        return fail(path, " is a GGUF file without tensors NAME.in_sum2: not an importance matrix");
    if (const GgufValue* names = file->find("imatrix.datasets"))
        if (const auto* list = std::get_if<GgufArray>(names); list && !list->strings.empty())
            out.dataset = std::string(list->strings[0]);
    if (auto n = file->integer("imatrix.chunk_count", 0)) out.chunks = *n;
    return out;
}

// int32 number of entries, then of each: length and name, calls, number of values, values (float); at the end the number of chunks, and
// length and name of the text, or nothing.
Result<Imatrix> from_dat(const std::string& path, std::span<const char> bytes) {
    std::size_t at   = 0;
    const auto  left = [&] { return bytes.size() - at; };
    const auto  take = [&]() -> std::int64_t { // a number, or -1 at the end
        std::int32_t v = -1;
        if (left() < sizeof v) return -1;
        std::memcpy(&v, bytes.data() + at, sizeof v);
        at += sizeof v;
        return v;
    };
    const auto cut = [&] {
        return fail(path, ": at byte ", at, " of ", bytes.size(), ": not an importance matrix, or an incomplete one");
    };
    Imatrix            out;
    const std::int64_t n = take();
    if (n < 1) return cut();
    for (std::int64_t i = 0; i < n; i++) {
        const std::int64_t length = take();
        if (length < 1 || std::size_t(length) > left()) return cut();
        const std::string name(bytes.data() + at, std::size_t(length));
        at += std::size_t(length);
        take(); // calls divide all values alike
        const std::int64_t count = take();
        if (count < 1 || std::size_t(count) > left() / sizeof(float)) return cut();
        std::vector<float> values(static_cast<std::size_t>(count));
        std::memcpy(values.data(), bytes.data() + at, values.size() * sizeof(float));
        at += values.size() * sizeof(float);
        if (auto ok = normalise(path, name, values, values.size()); !ok) return std::unexpected(ok.error());
        out.weights.insert_or_assign(name, std::move(values));
    }
    out.chunks                = std::max(take(), std::int64_t(0));
    const std::int64_t length = take();
    if (length > 0 && std::size_t(length) <= left()) out.dataset.assign(bytes.data() + at, std::size_t(length));
    return out;
}

Result<Imatrix> read_imatrix(const std::string& path) {
    std::error_code error;
    if (!std::filesystem::is_regular_file(path, error))
        return fail_with(ErrorKind::system, "cannot open ", path, ": ",
                         error ? error.message() : std::string("it is not a regular file"));
    std::ifstream file(path, std::ios::binary);
    if (!file) return fail_with(ErrorKind::system, "cannot open ", path, ": it may not be read");
    char magic[4] = {};
    file.read(magic, sizeof magic);
    if (std::string_view(magic, sizeof magic) == "GGUF") return from_gguf(path);
    file.clear();
    file.seekg(0);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    return from_dat(path, bytes);
}

} // namespace quire
