// Copies of model files with another architecture, other keys and other tensors.
// Include after the imports of quire.core.base, quire.model_file.gguf, quire.model_file.gguf_writer, quire.model_file.quants, quire.core.std and
// quire.core.tensor.
#pragma once

#include "process.h"

namespace quire::testing {

struct ModelEdit {
    std::string                                                 architecture = {}; // empty: as in the file
    std::set<std::string>                                       without      = {}; // keys without architecture; tensors
    std::function<void(GgufWriter&, const std::string& prefix)> keys         = {};
    std::function<void(GgufWriter&, const Gguf&)>               tensors      = {}; // that the copy has besides
    std::function<bool(const std::string& tensor)>              drops        = {};
};

// The path of the copy, which goes with the process.
inline std::string edited(const std::string& path, const ModelEdit& edit) {
    Result<Gguf> file = Gguf::open(path);
    if (!file) throw std::runtime_error(file.error().message);
    const std::string old = std::string(*file->text("general.architecture")),
                      now = edit.architecture.empty() ? old : edit.architecture;
    GgufWriter w;
    for (const GgufPair& pair : file->pairs()) {
        std::string key(pair.key);
        if (key == "general.alignment" || key.starts_with("split.")) continue;
        if (key.starts_with(old + ".")) {
            const std::string name = key.substr(old.size() + 1);
            if (edit.without.contains(name)) continue;
            key = now + "." + name;
        }
        w.set_bytes(key, pair.type, {pair.value.begin(), pair.value.end()});
    }
    w.set("general.architecture", now);
    if (edit.keys) edit.keys(w, now + ".");
    for (const GgufTensor& t : file->tensors())
        if (!edit.without.contains(t.name) && (!edit.drops || !edit.drops(t.name)))
            w.add_tensor(t.name, t.type, {t.dims.begin(), t.dims.begin() + t.n_dims}, {t.data, t.bytes});
    if (edit.tensors) edit.tensors(w, *file);
    std::string copy = temporary();
    if (auto ok = w.write(copy); !ok) throw std::runtime_error(ok.error().message);
    return copy;
}

// The numbers of a tensor, row by row.
inline std::vector<float> numbers_of(const Gguf& file, const std::string& name) {
    const GgufTensor* t = file.tensor(name);
    if (!t) throw std::runtime_error("no tensor " + name);
    const TensorView   view = t->view();
    std::vector<float> out(std::size_t(view.rows * view.cols));
    dequantize(view.type, view.data, out.data(), std::int64_t(out.size()));
    return out;
}

inline void add_floats(GgufWriter& w, const std::string& name, std::vector<std::int64_t> dims,
                       std::span<const float> values) {
    w.add_tensor(name, DType::F32, std::move(dims), std::as_bytes(values));
}

} // namespace quire::testing
