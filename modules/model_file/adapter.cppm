// quire.model_file.adapter: LoRA adapters (Hu et al. 2021, section 4.1) in GGUF files as llama.cpp writes them: for some matrices W of a model
// two small ones, so that x · (W + alpha / rank · B · A)ᵀ takes the place of x · Wᵀ. Each adapter **owns** its file.
export module quire.model_file.adapter;

import quire.core.base;
import quire.core.hash;
export import quire.core.tensor;
export import quire.model_file.gguf;

export namespace quire {

// The two matrices that an adapter adds to one tensor of the model.
struct AdaptedTensor {
    std::string name; // of the tensor
    TensorView  base; // the tensor in the model's file
    TensorView  a;    // [rank × in]; of the embedding: a row for each token, [vocab × rank]
    TensorView  b;    // [out × rank]
    bool        embedding = false;
};

struct Adapter {
    Gguf                       file;
    std::vector<AdaptedTensor> tensors;
    float                      alpha = 0; // 0: the scale is 1
    std::uint64_t              hash  = 0; // of the numbers above

    // The factor of b · a.
    float scale_of(const AdaptedTensor& tensor) const { return alpha != 0 ? alpha / float(tensor.b.cols) : 1.0f; }
};

// Reads an adapter for a model. Error: one sentence with the file and what is wrong with it, or why it does not belong to the model. Tensors of
// the model that no adapter can change are found later: check_adapters() (quire.compute.model).
Result<Adapter> read_adapter(const std::string& path, const Gguf& model);

} // namespace quire

module :private;

namespace quire {

constexpr std::int64_t largest_rank = 4096;

// Error: the file is no LoRA adapter, or one for another family of models.
Result<void> check_kind(const Gguf& file, const Gguf& model) {
    struct Wanted {
        const char *key, *value, *otherwise;
    };
    for (const Wanted& w : {Wanted{"general.type", "adapter", "a model, not an adapter"},
                            Wanted{"adapter.type", "lora", "an adapter of another kind than LoRA"}}) {
        const Result<std::string_view> text = file.text(w.key, "");
        if (!text) return std::unexpected(text.error());
        if (*text != w.value) return fail(file.path(), ": it is ", w.otherwise, " (", w.key, " is ", quote(*text), ")");
    }
    if (file.find("adapter.alora.invocation_tokens"))
        return fail(file.path(), ": it works from a phrase in the text on (aLoRA), which quire does not do");
    const Result<std::string_view> mine = file.text("general.architecture"), its = model.text("general.architecture");
    if (!mine) return std::unexpected(mine.error());
    if (!its) return std::unexpected(its.error());
    if (*mine != *its)
        return fail(file.path(), ": it is an adapter for models of the architecture ", quote(*mine), ", not ",
                    quote(*its));
    return {};
}

std::string size_of(const GgufTensor& t) { return cat("[", t.view().rows, " × ", t.dims[0], "]"); }

// Error: the shapes of the two matrices do not fit each other or the tensor.
Result<AdaptedTensor> bind_pair(const Gguf& file, const Gguf& model, const std::string& name, const GgufTensor* a,
                                const GgufTensor* b) {
    if (!a || !b) return fail(file.path(), ": tensor ", name, a ? ".lora_b" : ".lora_a", " is missing");
    const GgufTensor* base = model.tensor(name);
    if (!base) return fail(file.path(), ": the model has no tensor ", name, ", which the adapter changes");
    AdaptedTensor t{name, base->view(), a->view(), b->view(), name == "token_embd.weight"};
    if (base->n_dims > 2 || a->n_dims > 2 || b->n_dims > 2)
        return fail(file.path(), ": it changes tensor ", name,
                    ", which is a stack of matrices (of experts, or of heads); "
                    "quire adapts single matrices");
    const std::int64_t in = t.embedding ? t.a.rows : t.a.cols, rank = t.embedding ? t.a.cols : t.a.rows;
    if (in != (t.embedding ? t.base.rows : t.base.cols) || t.b.rows != (t.embedding ? t.base.cols : t.base.rows) ||
        rank != t.b.cols)
        return fail(file.path(), ": ", a->name, " is ", size_of(*a), " and ", b->name, " is ", size_of(*b),
                    ", which do not fit the model's tensor of ", size_of(*base));
    if (rank > largest_rank)
        return fail(file.path(), ": ", a->name, " has the rank ", rank, "; at most ", largest_rank, " is possible");
    return t;
}

Result<Adapter> read_adapter(const std::string& path, const Gguf& model) {
    Result<Gguf> opened = Gguf::open(path);
    if (!opened) return std::unexpected(opened.error());
    Adapter adapter{std::move(*opened), {}};
    if (auto ok = check_kind(adapter.file, model); !ok) return std::unexpected(ok.error());
    const Result<double> alpha = adapter.file.number("adapter.lora.alpha", 0.0);
    if (!alpha) return std::unexpected(alpha.error());
    if (!std::isfinite(*alpha) || std::abs(*alpha) > 1e9)
        return fail(path, ": adapter.lora.alpha is ", *alpha, ", not a number that can be used");
    adapter.alpha = float(*alpha);
    adapter.hash  = hash_bytes(&adapter.alpha, sizeof adapter.alpha);

    struct Pair {
        const GgufTensor *a = nullptr, *b = nullptr;
    };
    std::map<std::string, Pair> pairs;
    for (const GgufTensor& t : adapter.file.tensors()) {
        const std::string_view name = t.name, suffix = name.substr(name.size() - std::min<std::size_t>(name.size(), 7));
        if (suffix != ".lora_a" && suffix != ".lora_b")
            return fail(path, ": tensor ", cut_short(t.name), " is no half of a LoRA pair (NAME.lora_a, NAME.lora_b)");
        Pair& pair                              = pairs[std::string(name.substr(0, name.size() - suffix.size()))];
        (suffix == ".lora_a" ? pair.a : pair.b) = &t;
    }
    if (pairs.empty()) return fail(path, ": the adapter has no tensors");
    for (const auto& [name, pair] : pairs) {
        Result<AdaptedTensor> tensor = bind_pair(adapter.file, model, name, pair.a, pair.b);
        if (!tensor) return std::unexpected(tensor.error());
        for (const GgufTensor* half : {pair.a, pair.b}) {
            adapter.hash = hash_bytes(half->name, adapter.hash);
            adapter.hash = hash_bytes(&half->type, sizeof half->type, adapter.hash);
            adapter.hash = hash_bytes(half->data, half->bytes, adapter.hash);
        }
        adapter.tensors.push_back(std::move(*tensor));
    }
    return adapter;
}

} // namespace quire
