// quire.tools.bench.random_model: writes model files with random weights, of any shape and type, and drafts for them, for benchmarks. Owns nothing.
export module quire.tools.bench.random_model;

import quire.core.base;
import quire.model_file.gguf;
import quire.model_file.gguf_writer;
import quire.model_file.quants;

export namespace quire {

struct ModelShape {
    std::string_view name;
    int              n_layers, hidden_size, n_heads, n_kv_heads, ff_size, vocab_size, context_length;
    std::string_view family   = "llama";
    int              head_dim = 0;                  // 0: hidden_size / n_heads
    int              experts = 0, experts_used = 0; // with experts, ff_size is the width of one
    int              window = 0;
    // Layers of two kinds: of so many the last is of another kind (full): it alone has no window, or it alone attends.
    int period = 0;
    // Gemma 4: other heads of the full layers; every layer with experts has a dense network beside them.
    int full_head_dim = 0, full_kv_heads = 0, dense_size = 0;
    // Layers that keep a state, all but the full ones: taps of their convolution (0: there are no such layers); heads, groups and the size of
    // keys and values of their recurrence (none: lfm2). shared_ff: the width of a shared expert.
    int taps = 0, state_heads = 0, state_groups = 0, state_dim = 0, shared_ff = 0;
    int mtp = 0; // layers for multi-token prediction behind the others
};

// "llama-1b", "llama-3b", "llama3-3b", "llama-7b", "llama3-8b", "llama-13b", "llama-70b", "qwen3-30b-a3b", "mixtral-8x7b",
// "gpt-oss-20b", "gemma4-26b-a4b", "opt-13b", "lfm2-350m", "qwen3.5-0.8b", "qwen3.5-27b", "qwen3.5-35b-a3b", and "tiny", "tiny-moe",
// "tiny-opt", "tiny-gemma4", "tiny-hybrid".
std::span<const ModelShape> model_shapes();
std::string                 shape_names(); // "tiny, llama-1b, ..."

// A model of that shape, matrices of `type` (F32, F16, BF16, Q4_0, Q8_0, Q4_K, Q5_K, Q6_K; MXFP4: experts, all other matrices
// Q8_0), norms and routers F32; the same bytes each time. Rows that the type's blocks do not divide are Q8_0, or F16 if Q8_0's blocks do
// not divide them either. `counts`: an embedding in F16 that outweighs the layers, so that after token t the most likely one is t + 1, and an
// answer does not depend on rounding, and an MTP layer guesses it; for shapes with an output matrix. The vocabulary comes from the GGUF file
// `vocabulary`, or is byte tokens and words without a meaning. Error: another type, a file without a vocabulary, or a path that cannot be
// written.
Result<void> write_random_model(const std::string& path, ModelShape shape, DType type,
                                const std::function<void(double)>& progress = {}, const std::string& vocabulary = {},
                                bool counts = false);

// A draft of EAGLE-3 for a model of that shape and vocabulary: one layer whose attention looks at the last token, which is what a model that
// counts goes by, with a feed-forward network of `type`. Error: as above.
Result<void> write_random_draft(const std::string& path, ModelShape shape, DType type,
                                const std::string& vocabulary = {});

} // namespace quire

module :private;

namespace quire {

constexpr ModelShape shapes[] = {
    {"tiny", 4, 256, 8, 4, 512, 2048, 2048},
    {"tiny-opt", 2, 64, 2, 2, 128, 512, 2048, "opt"},
    {"opt-13b", 40, 5120, 40, 40, 20480, 50272, 2048, "opt"},
    {"llama-1b", 22, 2048, 32, 4, 5632, 32000, 4096},
    {"llama-3b", 26, 3200, 32, 32, 8640, 32000, 4096},
    {"llama3-3b", 28, 3072, 24, 8, 8192, 128256, 8192},
    {"llama-7b", 32, 4096, 32, 32, 11008, 32000, 4096},
    {"llama3-8b", 32, 4096, 32, 8, 14336, 128256, 8192},
    {"llama-13b", 40, 5120, 40, 40, 13824, 32000, 4096},
    {"llama-70b", 80, 8192, 64, 8, 28672, 32000, 4096},
    {"tiny-moe", 4, 256, 8, 4, 256, 2048, 2048, "qwen3moe", 64, 8, 2},
    {"qwen3-30b-a3b", 48, 2048, 32, 4, 768, 151936, 40960, "qwen3moe", 128, 128, 8},
    {"mixtral-8x7b", 32, 4096, 32, 8, 14336, 32000, 32768, "llama", 128, 8, 2},
    {"gpt-oss-20b", 24, 2880, 64, 8, 2880, 201088, 131072, "gpt-oss", 64, 32, 4, 128},
    {"tiny-gemma4", 4, 256, 8, 4, 64, 2048, 2048, "gemma4", 32, 8, 2, 64, 2, 64, 2, 256},
    {"gemma4-26b-a4b", 30, 2816, 16, 8, 704, 262144, 262144, "gemma4", 256, 128, 8, 1024, 6, 512, 2, 2112},
    {"tiny-hybrid", 4, 256, 4, 2, 512, 2048, 2048, "qwen35", 64, 0, 0, 0, 4, 0, 0, 0, 4, 4, 2, 64},
    {"lfm2-350m", 16, 1024, 16, 8, 4608, 65536, 128000, "lfm2", 64, 0, 0, 0, 3, 0, 0, 0, 3},
    {"qwen3.5-0.8b", 24, 1024, 8, 2, 3584, 248320, 262144, "qwen35", 256, 0, 0, 0, 4, 0, 0, 0, 4, 16, 16, 128},
    {"qwen3.5-27b", 64, 5120, 24, 4, 17408, 248320, 262144, "qwen35", 256, 0, 0, 0, 4, 0, 0, 0, 4, 48, 16, 128},
    {"qwen3.5-35b-a3b",
     40,
     2048,
     16,
     2,
     512,
     248320,
     262144,
     "qwen35moe",
     256,
     256,
     8,
     0,
     4,
     0,
     0,
     0,
     4,
     32,
     16,
     128,
     512}};

// The places and values of the fp16 scales of a block, so that its weights have a standard deviation of about 1/70.
struct ScaleAt {
    int   offset;
    float value;
};

std::vector<ScaleAt> scales_of(DType type) {
    switch (type) {
        case DType::Q8_0: return {{0, 1.9e-4f}};
        case DType::Q4_0: return {{0, 3.0e-3f}};
        case DType::Q4_K: return {{0, 9.5e-5f}, {2, 7.1e-4f}};
        case DType::Q5_K: return {{0, 4.8e-5f}, {2, 7.4e-4f}};
        case DType::Q6_K: return {{208, 1.0e-5f}};
        default: return {};
    }
}

// A stretch of random blocks; tensors are cut out of its repetition. Its length in blocks is odd and more than most vocabularies, so that no
// two rows of a matrix are alike.
std::vector<std::byte> random_blocks(DType type) {
    const DTypeInfo&       info = dtype_info(type);
    const std::size_t      n    = std::max((std::size_t(8) << 20) / std::size_t(info.bytes), std::size_t(1) << 18) | 1;
    std::vector<std::byte> out(n * std::size_t(info.bytes));
    std::mt19937_64        random(20261121);
    const auto             scales = scales_of(type);
    if (info.items == 1) { // F32, F16, BF16
        std::normal_distribution<float> normal(0, 1.0f / 70);
        for (std::size_t i = 0; i < n; i++) {
            const float         v = normal(random);
            const std::uint16_t h = type == DType::BF16 ? f32_to_bf16(v) : f32_to_f16(v);
            if (type == DType::F32) std::memcpy(out.data() + i * 4, &v, 4);
            else std::memcpy(out.data() + i * 2, &h, 2);
        }
        return out;
    }
    for (std::byte& b : out) b = std::byte(random() >> 17);
    if (type == DType::MXFP4) // a block's power of two
        for (std::size_t i = 0; i < n; i++) out[i * std::size_t(info.bytes)] = std::byte(119);
    for (std::size_t i = 0; i < n; i++)
        for (auto [offset, value] : scales) {
            const std::uint16_t h = f32_to_f16(value);
            std::memcpy(out.data() + i * std::size_t(info.bytes) + std::size_t(offset), &h, 2);
        }
    return out;
}

void add_vocabulary(GgufWriter& w, int n) {
    std::vector<std::string>  tokens{"<unk>", "<s>", "</s>"};
    std::vector<float>        scores(std::size_t(n), 0.0f);
    std::vector<std::int32_t> types(std::size_t(n), 1); // normal
    types[0] = 2;                                       // unknown
    types[1] = types[2] = 3;                            // control
    for (int byte = 0; byte < 256; byte++) {
        char text[8];
        std::snprintf(text, sizeof text, "<0x%02X>", unsigned(byte));
        types[tokens.size()] = 6; // byte
        tokens.emplace_back(text);
    }
    for (int i = int(tokens.size()); i < n; i++) {
        scores[std::size_t(i)] = float(-i);
        tokens.push_back(cat("\xe2\x96\x81w", i)); // SPM's blank in front
    }
    w.set("tokenizer.ggml.model", "llama");
    w.set("tokenizer.ggml.tokens", tokens);
    w.set("tokenizer.ggml.scores", scores);
    w.set("tokenizer.ggml.token_type", types);
    w.set("tokenizer.ggml.bos_token_id", std::uint32_t(1));
    w.set("tokenizer.ggml.eos_token_id", std::uint32_t(2));
    w.set("tokenizer.ggml.unknown_token_id", std::uint32_t(0));
}

// Everything that another file says about its tokenizer; returns the number of its tokens.
Result<int> copy_vocabulary(GgufWriter& w, const std::string& path) {
    Result<Gguf> file = Gguf::open(path);
    if (!file) return std::unexpected(file.error());
    const GgufValue* tokens = file->find("tokenizer.ggml.tokens");
    const auto*      list   = tokens ? std::get_if<GgufArray>(tokens) : nullptr;
    if (!list || list->strings.empty()) return fail(path, ": has no tokenizer.ggml.tokens");
    for (const GgufPair& pair : file->pairs())
        if (pair.key.starts_with("tokenizer."))
            w.set_bytes(std::string(pair.key), pair.type, {pair.value.begin(), pair.value.end()});
    return int(list->strings.size());
}

std::span<const ModelShape> model_shapes() { return shapes; }

std::string shape_names() {
    std::string text;
    for (const ModelShape& s : shapes) text += cat(text.empty() ? "" : ", ", s.name);
    return text;
}

bool type_is_known(DType type) {
    constexpr DType known[] = {DType::F32,  DType::F16,  DType::BF16, DType::Q4_0, DType::Q8_0,
                               DType::Q4_K, DType::Q5_K, DType::Q6_K, DType::MXFP4};
    return std::ranges::find(known, type) != std::end(known);
}

int head_dim_of(const ModelShape& s) { return s.head_dim > 0 ? s.head_dim : s.hidden_size / s.n_heads; }

Result<void> write_random_model(const std::string& path, ModelShape s, DType type,
                                const std::function<void(double)>& progress, const std::string& vocabulary,
                                bool counts) {
    if (!type_is_known(type)) return fail("a random model of type ", dtype_info(type).name, " cannot be made");
    if (counts && (s.family == "opt" || s.family == "gemma4"))
        return fail("the shape ", s.name, " has no output matrix, and cannot count");
    if (s.mtp > 0 && (s.family == "opt" || s.family == "gemma4" || s.family == "gpt-oss"))
        return fail("the shape ", s.name, " has no layers for multi-token prediction");
    GgufWriter w;
    if (vocabulary.empty()) {
        add_vocabulary(w, s.vocab_size);
    } else {
        const Result<int> n = copy_vocabulary(w, vocabulary);
        if (!n) return std::unexpected(n.error());
        s.vocab_size = *n;
    }
    const int  head_dim = head_dim_of(s);
    const auto key      = [&](const char* name) { return cat(s.family, ".", name); };
    const auto number   = [&](const char* name, int value) { w.set(key(name), std::uint32_t(value)); };
    w.set("general.architecture", std::string(s.family));
    w.set("general.name", cat("random ", s.name));
    number("context_length", s.context_length);
    number("embedding_length", s.hidden_size);
    const int n_layers = s.n_layers + s.mtp;
    number("block_count", n_layers);
    if (s.mtp > 0) number("nextn_predict_layers", s.mtp);
    const bool gemma4  = s.family == "gemma4";
    const auto is_full = [&](int layer) { return s.period > 0 && (layer + 1) % s.period == 0; };
    const int  most    = std::max(head_dim, s.full_head_dim); // of a head
    number("feed_forward_length", gemma4 ? s.dense_size : s.ff_size);
    number("attention.head_count", s.n_heads);
    const bool conv_only = s.taps > 0 && s.state_heads == 0, delta = s.state_heads > 0;
    const auto attends = [&](int layer) { return s.taps == 0 || is_full(layer) || layer >= s.n_layers; };
    if (conv_only) {
        std::vector<std::uint32_t> heads;
        for (int i = 0; i < n_layers; i++) heads.push_back(attends(i) ? std::uint32_t(s.n_kv_heads) : 0);
        w.set(key("attention.head_count_kv"), heads);
        number("shortconv.l_cache", s.taps);
    } else if (!gemma4) number("attention.head_count_kv", s.n_kv_heads);
    const int keys = s.state_groups * s.state_dim, values = s.state_heads * s.state_dim;
    if (delta) {
        number("full_attention_interval", s.period);
        number("ssm.conv_kernel", s.taps);
        number("ssm.state_size", s.state_dim);
        number("ssm.group_count", s.state_groups);
        number("ssm.time_step_rank", s.state_heads);
        number("ssm.inner_size", values);
    }
    number("attention.key_length", most);
    number("attention.value_length", most);
    number("rope.dimension_count", delta ? head_dim / 4 : most);
    if (delta) { // of the pairs: time, height and width of a picture; a text has one position for all
        const int pairs = head_dim / 8;
        w.set(key("rope.dimension_sections"),
              std::vector<std::int32_t>{(pairs + 2) / 3, (pairs + 1) / 3, pairs / 3, 0});
    }
    if (gemma4) {
        std::vector<bool>         windows;
        std::vector<std::int32_t> kv_heads;
        for (int i = 0; i < s.n_layers; i++) {
            windows.push_back(!is_full(i));
            kv_heads.push_back(is_full(i) ? s.full_kv_heads : s.n_kv_heads);
        }
        w.set(key("attention.sliding_window_pattern"), windows);
        w.set(key("attention.head_count_kv"), kv_heads);
        number("attention.key_length_swa", head_dim);
        number("attention.value_length_swa", head_dim);
        number("rope.dimension_count_swa", head_dim);
        w.set(key("rope.freq_base_swa"), 10000.0f);
        w.set(key("final_logit_softcapping"), 30.0f);
        number("embedding_length_per_layer_input", 0);
    }
    number("vocab_size", s.vocab_size);
    if (s.experts > 0) {
        number("expert_count", s.experts);
        number("expert_used_count", s.experts_used);
        number("expert_feed_forward_length", s.ff_size);
        if (s.shared_ff > 0) number("expert_shared_feed_forward_length", s.shared_ff);
    }
    if (s.window > 0) number("attention.sliding_window", s.window);
    const bool oss = s.family == "gpt-oss", opt = s.family == "opt", biased_all = oss || opt;
    w.set(key(opt ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon"), 1e-5f);
    w.set(key("rope.freq_base"), gemma4 ? 1000000.0f : 10000.0f);

    // A stretch of random blocks of each type that is used; tensors are cut out of its repetition.
    std::map<DType, std::vector<std::byte>> patterns;
    std::uint64_t                           total = 0, done = 0, n_written = 0;
    const auto                              type_of = [&](int n, int cols) { // of a stack of n matrices
        DType mine = type == DType::MXFP4 && n == 1 ? DType::Q8_0 : type;
        for (DType other : {DType::Q8_0, DType::F16})
            if (cols % dtype_info(mine).items != 0) mine = other;
        return mine;
    };
    const auto pattern_of = [&](DType of) -> const std::vector<std::byte>& {
        std::vector<std::byte>& pattern = patterns[of];
        if (pattern.empty()) pattern = random_blocks(of);
        return pattern;
    };
    const auto stack = [&](const std::string& name, int n, int rows, int cols, bool router = false) {
        const DType                   mine    = router ? DType::F32 : type_of(n, cols);
        const std::vector<std::byte>& pattern = pattern_of(mine);
        const std::uint64_t           bytes   = row_bytes(mine, cols) * std::uint64_t(rows) * std::uint64_t(n);
        // Each tensor begins elsewhere in the pattern.
        const std::uint64_t skip = (n_written++ * 7919) % (pattern.size() / std::size_t(dtype_info(mine).bytes)) *
                                   std::uint64_t(dtype_info(mine).bytes);
        total += bytes;
        std::vector<std::int64_t> dims{cols, rows};
        if (n > 1) dims.push_back(n);
        // Where a model counts, rows of the output matrix that repeat earlier ones get less of a logit, so that no two tokens have the same one.
        const std::size_t row = row_bytes(mine, cols), item = std::size_t(dtype_info(mine).bytes),
                          less =
                              counts && name == "output.weight" ? std::max<std::size_t>(row / item / 8, 1) * item : 0;
        const std::uint64_t repeats_at = pattern.size() / std::gcd(pattern.size(), row) * row;
        w.add_tensor(name, mine, std::move(dims),
                     [=, &pattern, &done, &total, &progress](std::span<std::byte> piece, std::uint64_t offset) {
                         for (std::size_t at = 0; at < piece.size();) {
                             const std::size_t from = std::size_t((skip + offset + at) % pattern.size()),
                                               some = std::min(piece.size() - at, pattern.size() - from);
                             std::memcpy(piece.data() + at, pattern.data() + from, some);
                             at += some;
                         }
                         for (std::size_t at = 0; less > 0 && at < piece.size();) {
                             const std::size_t in  = std::size_t((offset + at) % row),
                                               end = std::min(piece.size(), at + row - in);
                             if (offset + at >= repeats_at && in < less)
                                 std::fill_n(piece.begin() + std::ptrdiff_t(at), std::min(end - at, less - in),
                                             std::byte(0));
                             at = end;
                         }
                         done += piece.size();
                         if (progress) progress(double(done) / double(total));
                     });
    };
    const auto               matrix = [&](const std::string& name, int rows, int cols) { stack(name, 1, rows, cols); };
    const std::vector<float> ones(
        std::size_t(std::max({s.hidden_size, s.n_heads * most, 2 * keys + values}) * std::max(s.taps, 1)), 1.0f);
    const std::vector<float> zeros(std::size_t(std::max(s.experts, 1)) *
                                   std::size_t(std::max({s.hidden_size, s.ff_size, s.n_heads * most})));
    const auto               vector = [&](const std::string& name, int n) {
        w.add_tensor(name, DType::F32, {n}, std::as_bytes(std::span(ones).first(std::size_t(n))));
    };
    const auto bias = [&](const std::string& name, int n, int of = 1) {
        if (!biased_all) return;
        std::vector<std::int64_t> dims{n};
        if (of > 1) dims.push_back(of);
        w.add_tensor(name, DType::F32, std::move(dims),
                     std::as_bytes(std::span(zeros).first(std::size_t(n) * std::size_t(of))));
    };
    // The layer then reads the embedding, so large that it outweighs the layer.
    const auto join = [&](const std::string& name) {
        std::vector<std::uint16_t> values(std::size_t(2 * s.hidden_size) * std::size_t(s.hidden_size));
        for (int i = 0; i < s.hidden_size; i++)
            values[std::size_t(i) * std::size_t(2 * s.hidden_size + 1)] = f32_to_f16(1000);
        w.add_tensor(name, DType::F16, {2 * s.hidden_size, s.hidden_size},
                     [values = std::move(values)](std::span<std::byte> piece, std::uint64_t offset) {
                         std::memcpy(piece.data(), std::as_bytes(std::span(values)).data() + offset, piece.size());
                     });
    };
    if (counts) { // the embedding of token t is row t + 1 of the output matrix, which begins where its pattern does
        matrix("output.weight", s.vocab_size, s.hidden_size);
        const DType mine = type_of(1, s.hidden_size);
        total += std::uint64_t(s.vocab_size) * std::uint64_t(s.hidden_size) * 2;
        w.add_tensor("token_embd.weight", DType::F16, {s.hidden_size, s.vocab_size},
                     [&, mine, now = std::int64_t(-1), row = std::vector<std::byte>(row_bytes(mine, s.hidden_size)),
                      values = std::vector<float>(std::size_t(s.hidden_size))](std::span<std::byte> piece,
                                                                               std::uint64_t        offset) mutable {
                         constexpr float               outweighs = 20000; // the sum of what the layers add
                         const std::vector<std::byte>& pattern   = pattern_of(mine);
                         for (std::size_t at = 0; at < piece.size(); at += 2) {
                             const std::uint64_t i = (offset + at) / 2, n = std::uint64_t(s.hidden_size);
                             const auto          next = std::int64_t((i / n + 1) % std::uint64_t(s.vocab_size));
                             if (now != next) {
                                 now = next;
                                 for (std::size_t b = 0; b < row.size(); b++)
                                     row[b] = pattern[(std::size_t(next) * row.size() + b) % pattern.size()];
                                 dequantize(mine, row.data(), values.data(), s.hidden_size);
                             }
                             const std::uint16_t h = f32_to_f16(values[std::size_t(i % n)] * outweighs);
                             std::memcpy(piece.data() + at, &h, 2);
                         }
                         done += piece.size();
                     });
    } else {
        matrix("token_embd.weight", s.vocab_size, s.hidden_size);
    }
    vector(conv_only ? "token_embd_norm.weight" : "output_norm.weight", s.hidden_size);
    if (gemma4) { // in the full layers a quarter of the pairs turns
        std::vector<float> divisors(std::size_t(s.full_head_dim / 2), 1e30f);
        std::ranges::fill(std::span(divisors).first(divisors.size() / 4), 1.0f);
        w.add_tensor("rope_freqs.weight", DType::F32, {s.full_head_dim / 2}, std::as_bytes(std::span(divisors)));
    }
    if (opt) { // positions are learned, and the head is the embedding
        bias("output_norm.bias", s.hidden_size);
        matrix("position_embd.weight", s.context_length + 2, s.hidden_size);
    } else if (!gemma4 && !counts)
        matrix("output.weight", s.vocab_size, s.hidden_size); // Gemma's head is the embedding
    for (int i = 0; i < n_layers; i++) {
        const auto name   = [&](const char* part) { return cat("blk.", i, ".", part, ".weight"); };
        const auto biased = [&](const char* part) { return cat("blk.", i, ".", part, ".bias"); };
        const bool full   = gemma4 && is_full(i);
        const int  dim    = full ? s.full_head_dim : head_dim;
        const int  q = s.n_heads * dim, kv = (full ? s.full_kv_heads : s.n_kv_heads) * dim;
        vector(name("attn_norm"), s.hidden_size);
        if (i >= s.n_layers) {
            vector(name("nextn.enorm"), s.hidden_size);
            vector(name("nextn.hnorm"), s.hidden_size);
            if (counts) join(name("nextn.eh_proj"));
            else matrix(name("nextn.eh_proj"), s.hidden_size, 2 * s.hidden_size);
        }
        const auto taps = [&](const char* part, int columns) {
            w.add_tensor(name(part), DType::F32, {s.taps, columns},
                         std::as_bytes(std::span(ones).first(std::size_t(columns * s.taps))));
        };
        if (!attends(i) && conv_only) {
            matrix(name("shortconv.in_proj"), 3 * s.hidden_size, s.hidden_size);
            taps("shortconv.conv", s.hidden_size);
            matrix(name("shortconv.out_proj"), s.hidden_size, s.hidden_size);
        } else if (!attends(i)) {
            matrix(name("attn_qkv"), 2 * keys + values, s.hidden_size);
            matrix(name("attn_gate"), values, s.hidden_size);
            matrix(name("ssm_alpha"), s.state_heads, s.hidden_size);
            matrix(name("ssm_beta"), s.state_heads, s.hidden_size);
            taps("ssm_conv1d", 2 * keys + values);
            vector(cat("blk.", i, ".ssm_dt.bias"), s.state_heads);
            const std::vector<float> decays(std::size_t(s.state_heads), -1.0f);
            w.add_tensor(cat("blk.", i, ".ssm_a"), DType::F32, {s.state_heads}, std::as_bytes(std::span(decays)));
            vector(name("ssm_norm"), s.state_dim);
            matrix(name("ssm_out"), s.hidden_size, values);
        } else {
            matrix(name("attn_q"), delta ? 2 * q : q, s.hidden_size);
            matrix(name("attn_k"), kv, s.hidden_size);
            if (!full) matrix(name("attn_v"), kv, s.hidden_size); // a full layer's V is its K
            matrix(name("attn_output"), s.hidden_size, q);
        }
        bias(biased("attn_q"), q);
        bias(biased("attn_k"), kv);
        bias(biased("attn_v"), kv);
        bias(biased("attn_output"), s.hidden_size);
        if (s.family == "qwen3moe" || gemma4 || (s.taps > 0 && attends(i))) {
            vector(name("attn_q_norm"), dim);
            vector(name("attn_k_norm"), dim);
        }
        if (gemma4) {
            for (const char* norm :
                 {"post_attention_norm", "post_ffw_norm", "post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"})
                vector(name(norm), s.hidden_size);
            vector(cat("blk.", i, ".ffn_gate_inp.scale"), s.hidden_size);
            matrix(name("ffn_gate"), s.dense_size, s.hidden_size);
            matrix(name("ffn_up"), s.dense_size, s.hidden_size);
            matrix(name("ffn_down"), s.hidden_size, s.dense_size);
            stack(name("ffn_gate_inp"), 1, s.experts, s.hidden_size, true);
            stack(name("ffn_gate_up_exps"), s.experts, 2 * s.ff_size, s.hidden_size);
            stack(name("ffn_down_exps"), s.experts, s.hidden_size, s.ff_size);
        }
        if (oss) vector(name("attn_sinks"), s.n_heads);
        vector(name(oss || delta ? "post_attention_norm" : "ffn_norm"), s.hidden_size);
        if (gemma4) continue;
        if (opt) {
            bias(biased("attn_norm"), s.hidden_size);
            bias(biased("ffn_norm"), s.hidden_size);
            matrix(name("ffn_up"), s.ff_size, s.hidden_size);
            matrix(name("ffn_down"), s.hidden_size, s.ff_size);
            bias(biased("ffn_up"), s.ff_size);
            bias(biased("ffn_down"), s.hidden_size);
            continue;
        }
        if (s.experts == 0) {
            matrix(name("ffn_gate"), s.ff_size, s.hidden_size);
            matrix(name("ffn_up"), s.ff_size, s.hidden_size);
            matrix(name("ffn_down"), s.hidden_size, s.ff_size);
            continue;
        }
        stack(name("ffn_gate_inp"), 1, s.experts, s.hidden_size, true);
        bias(biased("ffn_gate_inp"), s.experts);
        stack(name("ffn_gate_exps"), s.experts, s.ff_size, s.hidden_size);
        stack(name("ffn_up_exps"), s.experts, s.ff_size, s.hidden_size);
        stack(name("ffn_down_exps"), s.experts, s.hidden_size, s.ff_size);
        if (s.shared_ff > 0) {
            matrix(name("ffn_gate_shexp"), s.shared_ff, s.hidden_size);
            matrix(name("ffn_up_shexp"), s.shared_ff, s.hidden_size);
            matrix(name("ffn_down_shexp"), s.hidden_size, s.shared_ff);
            vector(name("ffn_gate_inp_shexp"), s.hidden_size);
        }
        bias(biased("ffn_gate_exps"), s.ff_size, s.experts);
        bias(biased("ffn_up_exps"), s.ff_size, s.experts);
        bias(biased("ffn_down_exps"), s.hidden_size, s.experts);
    }
    return w.write(path);
}

Result<void> write_random_draft(const std::string& path, ModelShape s, DType type, const std::string& vocabulary) {
    GgufWriter w;
    if (vocabulary.empty()) add_vocabulary(w, s.vocab_size);
    else if (const Result<int> n = copy_vocabulary(w, vocabulary); !n) return std::unexpected(n.error());
    else s.vocab_size = *n;
    // Heads as the model's, as published drafts have them: so both share blocks of one size.
    const int hidden = s.hidden_size, ff = s.ff_size, dim = head_dim_of(s), group = s.n_heads / s.n_kv_heads;
    if (const int items = dtype_info(type).items; !type_is_known(type) || ff % items != 0 || hidden % items != 0)
        return fail("a draft of type ", dtype_info(type).name, " cannot be made for the shape ", s.name);
    const auto number = [&](const char* name, int value) { w.set(cat("eagle3.", name), std::uint32_t(value)); };
    w.set("general.architecture", "eagle3");
    w.set("general.name", cat("draft for random ", s.name));
    number("context_length", s.context_length);
    number("embedding_length", hidden);
    number("block_count", 1);
    number("feed_forward_length", ff);
    number("attention.head_count", s.n_heads);
    number("attention.head_count_kv", s.n_kv_heads);
    number("attention.key_length", dim);
    number("attention.value_length", dim);
    number("rope.dimension_count", dim);
    number("vocab_size", s.vocab_size);
    number("target_hidden_size", hidden);
    w.set("eagle3.target_layers",
          std::vector<std::int32_t>{std::min(2, s.n_layers), s.n_layers / 2, std::max(s.n_layers - 3, 0)});
    w.set("eagle3.norm_before_residual", true);
    w.set("eagle3.attention.layer_norm_rms_epsilon", 1e-5f);
    w.set("eagle3.rope.freq_base", 10000.0f);

    const std::vector<float> ones(std::size_t(hidden), 1.0f);
    for (const char* name : {"blk.0.attn_norm", "blk.0.attn_norm_2", "blk.0.ffn_norm", "output_norm"})
        w.add_tensor(cat(name, ".weight"), DType::F32, {hidden}, std::as_bytes(std::span(ones)));
    // Row i is `factor` times column from(i), if there is one.
    const auto copies = [&](const char* name, int rows, int cols, float factor, const auto& from) {
        std::vector<std::uint16_t> values(std::size_t(rows) * std::size_t(cols));
        for (int i = 0; i < rows; i++)
            if (const int column = from(i); column >= 0 && column < cols)
                values[std::size_t(i) * std::size_t(cols) + std::size_t(column)] = f32_to_f16(factor);
        w.add_tensor(cat("blk.0.", name, ".weight"), DType::F16, {cols, rows}, std::as_bytes(std::span(values)));
    };
    // A KV head has its part of the embedding of the last token; a query head has that of its KV head. The first query head of each group brings
    // it back to its place.
    const int  q = s.n_heads * dim, kv = s.n_kv_heads * dim;
    const auto part_of = [&](int i) { return i < hidden ? i : -1; };
    const auto of_head = [&](int i) { return part_of(i / dim / group * dim + i % dim); };
    const auto back    = [&](int i) { return i < kv ? i / dim * group * dim + i % dim : -1; };
    copies("attn_q", q, 2 * hidden, 2, of_head);
    copies("attn_k", kv, 2 * hidden, 2, part_of);
    copies("attn_v", kv, 2 * hidden, 1, part_of);
    copies("attn_output", hidden, q, 1000, back); // outweighs the feed-forward network
    const std::vector<std::uint16_t> nothing(std::size_t(hidden) * std::size_t(3 * hidden));
    w.add_tensor("fc.weight", DType::F16, {3 * hidden, hidden},
                 std::as_bytes(std::span(nothing))); // the states say nothing
    const std::vector<std::byte> pattern = random_blocks(type);
    for (const auto& [name, rows, cols] : {std::tuple("gate", ff, hidden), {"up", ff, hidden}, {"down", hidden, ff}})
        w.add_tensor(cat("blk.0.ffn_", name, ".weight"), type, {cols, rows},
                     [&](std::span<std::byte> piece, std::uint64_t offset) {
                         for (std::size_t i = 0; i < piece.size(); i++)
                             piece[i] = pattern[std::size_t(offset + i) % pattern.size()];
                     });
    return w.write(path);
}

} // namespace quire
