// quire.engine.eagle_draft: puts the layer of an EAGLE-3 draft, which is a file of its own, behind the layers of the model that it guesses for.
// quire.engine.mtp_guesses drives it. Owns nothing.
export module quire.engine.eagle_draft;

import quire.compute.kv_cache;
import quire.core.base;
export import quire.decode.drafting; // DraftOptions
import quire.engine.draft_model;
export import quire.model_file.config;
export import quire.model_file.gguf;
export import quire.model_file.weights;
export import quire.text.tokens.tokenizer;

export namespace quire {

// The file of the options, if it is a draft of EAGLE-3; then by_eagle is set in place of by_model. Error: it cannot be read; or it is no such
// draft, where by_eagle is set.
Result<std::optional<Gguf>> open_eagle_draft(DraftOptions& options);

// Adds the draft's layer to the model's config, and its tensors to the model's. `draft` outlives both. Error: what is wrong with the draft's file,
// or why it is not one of this model.
Result<void> add_eagle_draft(const Gguf& draft, const Tokenizer& tokenizer, ModelConfig& config, ModelTensors& tensors);

} // namespace quire

module :private;

namespace quire {

Result<std::optional<Gguf>> open_eagle_draft(DraftOptions& o) {
    if (!o.by_model && !o.by_eagle) return std::optional<Gguf>();
    Result<Gguf> file = Gguf::open(o.model);
    if (!file) return std::unexpected(file.error());
    const bool is_one = is_eagle_draft(*file);
    if (o.by_eagle && !is_one) return fail(o.model, ": it is no draft of EAGLE-3; --spec draft takes a model");
    o.by_eagle = is_one;
    o.by_model = !is_one;
    return is_one ? std::optional<Gguf>(std::move(*file)) : std::nullopt;
}

Result<void> add_eagle_draft(const Gguf& file, const Tokenizer& tokenizer, ModelConfig& config, ModelTensors& tensors) {
    const std::string&  path  = file.path();
    Result<ModelConfig> draft = read_eagle_config(file);
    if (!draft) return std::unexpected(draft.error());
    const EagleConfig& e = *draft->eagle;
    if (e.target_hidden_size != config.hidden_size)
        return fail(path, ": it guesses for a model with a hidden size (target_hidden_size) of ", e.target_hidden_size,
                    ", not of ", config.hidden_size);
    for (int layer : e.target_layers)
        if (layer > config.n_layers)
            return fail(path, ": it reads layer ", layer, " of its model (target_layers), which has only ",
                        config.n_layers);
    if (config.family->encoder) return fail(path, ": the model embeds texts; there are no tokens to guess");
    if (config.latent)
        return fail(path, ": quire does not run a draft of EAGLE-3 for a model with latent attention (",
                    config.architecture_name, ")");
    if (cache_shapes(config) >= most_cache_groups)
        return fail(path, ": the model's layers have too many shapes of K and V for one more layer");
    Result<Tokenizer> mine = Tokenizer::load(file);
    if (!mine) return std::unexpected(mine.error());
    if (auto ok = check_vocabulary(path, *mine, tokenizer); !ok) return ok;
    Result<EagleTensors> bound = bind_eagle_tensors(file, *draft, config);
    if (!bound) return std::unexpected(bound.error());
    draft->vocab_size = config.vocab_size;
    config.layers.push_back(draft->layers[0]);
    config.draft  = std::make_shared<const ModelConfig>(std::move(*draft));
    tensors.eagle = std::move(*bound);
    return {};
}

} // namespace quire
