// quire.serve.models.model_card: what a server says about a model that it has not loaded: facts from the file's metadata. Owns nothing.
export module quire.serve.models.model_card;

import quire.core.base;
export import quire.engine.sampling_defaults;
import quire.model_file.config;
import quire.model_file.gguf;
import quire.serve.api.context;
import quire.text.calls.reasoning_form;

export namespace quire {

struct ModelCard {
    std::string architecture, file; // the file's name, without the folder
    ModelFacts  facts;
    int         context = 0, trained = 0; // tokens of the longest sequence; the length that the model was trained for
    int         vocab_size = 0, hidden_size = 0, n_layers = 0, n_heads = 0, n_kv_heads = 0;
    bool        encodes = false, reasons = false; // it embeds texts; its template has marks of reasoning
    std::string chat_template;                    // its source
    SamplingParams sampling;                      // of a request that says nothing
};

// Of a loaded model.
ModelCard card_of(const ApiContext& api);
// From the file at `path`, without its weights. `context`: as asked for; 0: the model's. Error: why the file cannot be run.
Result<ModelCard> read_card(const std::string& path, int context, SamplerChoice sampling,
                            const std::function<bool(const std::string& flag)>& given);

} // namespace quire

module :private;

namespace quire {

void take_config(ModelCard& card, const ModelConfig& c) {
    card.architecture = c.architecture_name;
    card.trained      = c.context_length;
    card.vocab_size   = c.vocab_size;
    card.hidden_size  = c.hidden_size;
    card.n_layers     = c.n_layers;
    card.n_heads      = c.n_heads;
    card.n_kv_heads   = c.n_kv_heads;
    card.encodes      = c.family->encoder;
}

ModelCard card_of(const ApiContext& api) {
    ModelCard card;
    take_config(card, api.service.config());
    card.file          = api.options.model_file;
    card.facts         = api.options.model;
    card.context       = api.options.limits.context;
    card.reasons       = bool(api.options.reasoning);
    card.chat_template = api.options.chat_template.source();
    card.sampling      = api.options.limits.samplers.params;
    return card;
}

Result<ModelCard> read_card(const std::string& path, int context, SamplerChoice sampling,
                            const std::function<bool(const std::string& flag)>& given) {
    const Result<Gguf> file = Gguf::open(path);
    if (!file) return std::unexpected(file.error());
    const Result<ModelConfig> config = read_config(*file);
    if (!config) return std::unexpected(config.error());
    ModelCard card;
    take_config(card, *config);
    card.file    = std::filesystem::path(path).filename().string();
    card.context = context > 0 ? context : config->context_length;
    std::map<DType, std::size_t> types;
    for (const GgufTensor& t : file->tensors()) {
        types[t.type] += t.bytes;
        card.facts.bytes += t.bytes;
        card.facts.parameters += std::uint64_t(t.view().rows * t.view().cols);
    }
    const auto most = std::ranges::max_element(types, std::less<>(), &std::pair<const DType, std::size_t>::second);
    if (most != types.end()) card.facts.type = dtype_info(most->first).name;
    if (const Result<ChatTemplate> chosen = ChatTemplate::choose(*file, "", "")) {
        card.chat_template = chosen->source();
        card.reasons       = bool(reasoning_form(*chosen));
    }
    (void)take_file_sampling(*file, given, sampling);
    card.sampling = sampling.params;
    return card;
}

} // namespace quire
