// quire.engine.load_estimate: estimates, before the weights are read, how a model file runs on this machine: size, types, how much context
// fits. Owns nothing.
export module quire.engine.load_estimate;

import quire.compute.cpu.backend;
import quire.compute.cuda.backend;
import quire.compute.kv_cache;
import quire.core.base;
import quire.engine.options;
export import quire.model_file.gguf;
import quire.schedule.checkpoints;
import quire.text.calls.reasoning_form;
import quire.text.calls.tool_form;

export namespace quire {

struct LoadEstimate {
    std::string family;
    // Elements of all tensors; elements that one token reads (of a mixture of experts: those of the chosen experts).
    std::int64_t                               parameters = 0, active_parameters = 0;
    std::vector<std::pair<DType, std::size_t>> types; // with the bytes of each type, the largest first
    std::size_t                                weight_bytes = 0, active_bytes = 0; // all; read for one token
    std::size_t                                kv_bytes_per_token = 0;             // of all models that run
    // Of these, what the draft model needs beside the model; 0: there is none.
    std::size_t              draft_bytes = 0, draft_kv_bytes_per_token = 0;
    std::size_t              all_weight_bytes() const { return weight_bytes + draft_bytes; }
    std::size_t              state_bytes         = 0; // of a sequence's recurrent state
    int                      checkpoint_interval = 0; // tokens between two that stay in the prefix cache
    std::string              device;                  // "cpu" or "cuda"
    std::size_t              memory    = 0;           // bytes of the device for weights and KV cache
    bool                     fits      = false;
    std::int64_t             context   = 0; // tokens whose KV fits beside the weights, at most the trained length
    int                      trained   = 0;
    double                   bandwidth = 0; // bytes a second, measured
    std::vector<std::string> unknown;       // keys of the file that quire does not read
    std::string              chat_template; // the names of the file's; "": it has none; or why it cannot be used
    bool                     chat_template_fails = false;
    bool                     answers             = true; // not a model of embeddings
    CallForm                 tools;                      // how the template writes calls
    ReasoningForm            reasoning;                  // the template's marks of reasoning
};

// `options`: device, threads, KV type and draft model. Takes a fraction of a second. Error: no such device, or a draft model's file that cannot
// be read.
Result<LoadEstimate> estimate_load(const Gguf& file, const ModelConfig& config, const EngineOptions& options);

// estimate_load() for the file at `path`. Error: why the file cannot be run.
Result<LoadEstimate> estimate_load(const std::string& path, const EngineOptions& options);

// A few lines for a person.
std::string describe(const LoadEstimate& estimate);

} // namespace quire

module :private;

namespace quire {

// Whether no module reads this key of the model.
static bool is_unknown(std::string_view key, std::string_view prefix) {
    static constexpr std::string_view known =
        " context_length embedding_length block_count feed_forward_length vocab_size attention.head_count"
        " attention.head_count_kv attention.key_length attention.value_length attention.key_length_mla"
        " attention.value_length_mla attention.layer_norm_epsilon attention.layer_norm_rms_epsilon"
        " attention.sliding_window attention.sliding_window_pattern attention.scale attention.causal"
        " attention.kv_lora_rank attention.q_lora_rank attn_logit_softcapping final_logit_softcapping"
        " rope.dimension_count rope.freq_base rope.freq_base_swa rope.scale_linear rope.scaling.type"
        " rope.scaling.factor rope.scaling.attn_factor rope.scaling.original_context_length"
        " rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.yarn_log_multiplier"
        " rope.scaling.yarn_attn_factor rope.scaling.yarn_ext_factor"
        " rope.scaling.finetuned embedding_scale residual_scale logit_scale expert_count expert_used_count"
        " expert_feed_forward_length expert_shared_feed_forward_length expert_shared_count expert_weights_norm"
        " expert_weights_scale expert_gating_func expert_group_count leading_dense_block_count pooling_type"
        " token_type_count classifier.output_labels position_offset do_layer_norm_before use_parallel_residual"
        " tensor_data_layout expert_group_used_count nextn_predict_layers interleave_moe_layer_step"
        " attention.temperature_scale attention.key_length_swa attention.value_length_swa rope.dimension_count_swa"
        " attention.shared_kv_layers embedding_length_per_layer_input attention.recurrent_layers"
        " full_attention_interval ssm.conv_kernel ssm.state_size ssm.group_count ssm.time_step_rank ssm.inner_size"
        " shortconv.l_cache rope.dimension_sections attention.temperature_length moe_latent_size ";
    if (!key.starts_with(prefix)) return false;
    key.remove_prefix(prefix.size());
    return known.find(cat(" ", key, " ")) == known.npos;
}

// A draft model runs beside the model, and its blocks have room for as many tokens.
static Result<void> add_draft_model(LoadEstimate& estimate, const EngineOptions& o) {
    if (!o.drafts.on || !(o.drafts.by_model || o.drafts.by_eagle)) return {};
    const Result<Gguf> file = Gguf::open(o.drafts.model);
    if (!file) return std::unexpected(file.error());
    const Result<ModelConfig> config = is_eagle_draft(*file) ? read_eagle_config(*file) : read_config(*file);
    if (!config) return std::unexpected(config.error());
    for (const GgufTensor& t : file->tensors()) estimate.draft_bytes += t.bytes;
    estimate.draft_kv_bytes_per_token = KvCache::bytes_per_token(*config, o.kv_type);
    estimate.kv_bytes_per_token += estimate.draft_kv_bytes_per_token;
    return {};
}

Result<LoadEstimate> estimate_load(const Gguf& file, const ModelConfig& c, const EngineOptions& o) {
    LoadEstimate                 estimate;
    std::map<DType, std::size_t> types;
    const bool                   tied   = file.tensor("output.weight") == nullptr;
    const double                 part   = c.experts.n > 0 ? double(c.experts.used) / double(c.experts.n) : 1;
    double                       active = 0, active_bytes = 0;
    const auto is_of = [](const GgufTensor& t, int layer) { return t.name.starts_with(cat("blk.", layer, ".")); };
    for (const GgufTensor& t : file.tensors()) {
        bool is_left = false; // not loaded
        for (int i = c.n_layers + int(c.mtp); i < c.n_layers + c.n_extra_layers; i++) is_left = is_left || is_of(t, i);
        if (is_left) continue;
        const std::int64_t n = t.view().rows * t.view().cols;
        types[t.type] += t.bytes;
        estimate.parameters += n;
        estimate.weight_bytes += t.bytes;
        const bool guesses = c.mtp && is_of(t, c.n_layers); // not each token reads it
        const bool lookup  = (t.name == "token_embd.weight" && !tied) || t.name == "position_embd.weight" ||
                            t.name == "per_layer_token_embd.weight";
        const double used = lookup || guesses ? 0 : t.name.find("_exps.") != std::string::npos ? part : 1;
        active += used * double(n);
        active_bytes += used * double(t.bytes);
    }
    estimate.family            = c.architecture_name;
    estimate.active_parameters = std::int64_t(active);
    estimate.active_bytes      = std::size_t(active_bytes);
    estimate.types.assign(types.begin(), types.end());
    std::ranges::sort(estimate.types, std::greater<>(), &std::pair<DType, std::size_t>::second);
    estimate.kv_bytes_per_token = KvCache::bytes_per_token(c, o.kv_type);
    estimate.state_bytes        = KvCache::state_bytes(c);
    estimate.trained            = c.context_length;
    if (auto ok = add_draft_model(estimate, o); !ok) return std::unexpected(ok.error());
    for (const auto& [key, value] : file.metadata())
        if (is_unknown(key, c.architecture_name + ".")) estimate.unknown.push_back(key);

    estimate.answers = !c.family->encoder && !file.find(c.architecture_name + ".pooling_type");
    if (const Result<ChatTemplate> chat_template = ChatTemplate::choose(file, "", ""); !chat_template) {
        estimate.chat_template       = chat_template.error().message;
        estimate.chat_template_fails = true;
    } else if (!chat_template->is_fallback()) {
        for (const std::string& name : chat_template->names())
            estimate.chat_template += cat(estimate.chat_template.empty() ? "" : ", ", name);
        estimate.tools     = call_form(*chat_template);
        estimate.reasoning = reasoning_form(*chat_template);
    }

    Result<std::unique_ptr<Backend>> backend = make_cpu_backend(o.threads, o.isa);
    if (o.device == "cuda" || (o.device == "auto" && gpu_has(o.kv_type) && o.isa.empty())) {
        if (o.tensor_parallel > 1) announce_cuda_ranks();
        Result<std::unique_ptr<Backend>> gpu = make_cuda_backend({});
        if (!gpu && o.device == "cuda") return std::unexpected(gpu.error());
        if (gpu) backend = std::move(gpu), estimate.device = "cuda";
    }
    if (!backend) return std::unexpected(backend.error());
    if (estimate.device.empty()) estimate.device = "cpu";
    // On the CPU the file's cached pages count as free memory, and the weights are computed from them.
    estimate.memory = std::size_t(double((*backend)->memory_available()) *
                                  (estimate.device == "cuda" ? o.gpu_memory_utilization : 1));
    const auto gpus = std::size_t(estimate.device == "cuda" ? std::max(o.tensor_parallel, 1) : 1); // all alike
    estimate.memory *= gpus;
    estimate.fits          = estimate.all_weight_bytes() < estimate.memory;
    const std::size_t left = estimate.fits ? estimate.memory - estimate.all_weight_bytes() : 0,
                      kv   = left - std::min(left, estimate.state_bytes);
    estimate.context = std::min<std::int64_t>(std::int64_t(kv / std::max<std::size_t>(estimate.kv_bytes_per_token, 1)),
                                              c.context_length);
    estimate.checkpoint_interval = checkpoint_interval(
        estimate.state_bytes, (estimate.device == "cpu" ? 4 : 1) * estimate.kv_bytes_per_token, o.block_size);
    estimate.bandwidth = (*backend)->read_bandwidth() * double(gpus);
    return estimate;
}

Result<LoadEstimate> estimate_load(const std::string& path, const EngineOptions& options) {
    const Result<Gguf> file = Gguf::open(path);
    if (!file) return std::unexpected(file.error());
    const Result<ModelConfig> config = read_config(*file, options.drafts.by_mtp);
    if (!config) return std::unexpected(config.error());
    return estimate_load(*file, *config, options);
}

static std::string amount(double n, std::span<const std::string_view> units, double step) {
    std::size_t unit = 0;
    while (n >= step && unit + 1 < units.size()) n /= step, unit++;
    char text[32];
    std::snprintf(text, sizeof text, n < 10 && unit > 0 ? "%.1f" : "%.0f", n);
    return cat(text, units[unit]);
}

std::string describe(const LoadEstimate& estimate) {
    constexpr std::array<std::string_view, 4> bytes{" B", " KiB", " MiB", " GiB"}, counts{"", " k", " M", " B"};
    const auto                                size  = [&](std::size_t n) { return amount(double(n), bytes, 1024); };
    const auto                                count = [&](std::int64_t n) { return amount(double(n), counts, 1000); };
    std::string text = cat(estimate.family, ", ", count(estimate.parameters), " parameters");
    if (estimate.active_parameters < estimate.parameters * 3 / 4)
        text += cat(" (", count(estimate.active_parameters), " active)");
    for (const auto& [type, n] : estimate.types)
        if (n * 50 >= estimate.weight_bytes) text += cat(", ", dtype_info(type).name, " ", size(n));
    text += "\n";
    if (estimate.fits)
        text +=
            cat("context ", estimate.context, " of ", estimate.trained, " tokens fits (",
                size(estimate.kv_bytes_per_token), " a token",
                estimate.state_bytes > 0 ? cat(", ", size(estimate.state_bytes), " of state a sequence, kept every ",
                                               estimate.checkpoint_interval, " tokens")
                                         : std::string(),
                ")");
    else
        text += cat("does not fit: ", size(estimate.all_weight_bytes()), " of weights, ", size(estimate.memory),
                    " free on the ", estimate.device);
    if (estimate.draft_bytes > 0)
        text += cat("\ndraft model, counted in this: ", size(estimate.draft_bytes), " of weights, ",
                    size(estimate.draft_kv_bytes_per_token), " a token");
    if (estimate.chat_template_fails) text += cat("\n", estimate.chat_template);
    else if (!estimate.chat_template.empty())
        text += cat("\nchat template: the file's",
                    estimate.chat_template == "default" ? "" : cat(" (", estimate.chat_template, ")"),
                    estimate.tools == ToolForm::none ? ", no tool calls"
                                                     : cat(", tool calls as ", name_of(estimate.tools.kind)));
    else if (estimate.answers) text += "\nchat template: the file has none";
    for (std::size_t i = 0; i < estimate.unknown.size(); i++)
        text += cat(i == 0 ? "\nkeys that quire does not know: " : ", ", estimate.unknown[i]);
    return text;
}

} // namespace quire
