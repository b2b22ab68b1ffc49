// quire.tools.common.foreign_flags: the flags that users of llama.cpp and vLLM type by habit, and the flags of quire for each. One
// table; owns nothing.
export module quire.tools.common.foreign_flags;

import quire.core.base;
import quire.tools.flags.likely_name;

export namespace quire {

enum class Program : std::uint8_t { chat = 1, server = 2, bench = 4, inspect = 8 };

struct TranslatedFlags {
    std::vector<std::string> words; // the program's own flags
    std::string              note;  // one sentence about flags that are not needed here; "" without any
};

// The flags of the program's own.
struct OwnFlag {
    std::function<std::optional<bool>(const std::string& name)> takes_value; // nothing: it has no such flag
    std::vector<std::string>                                    names = {};  // the long ones, for meant_flag()

    std::optional<bool> operator()(const std::string& name) const { return takes_value(name); }
};

// Whether a value follows a flag of these other programs (or may follow); nothing: there is no such flag.
std::optional<bool> foreign_takes_value(Program program, std::string_view name);
// The flag that a mistyped one was probably meant to be: one of the program's own, that for a flag of these other programs, or one of those
// that are not needed here. "": none is like it.
std::string meant_flag(Program program, std::string_view typed, const OwnFlag& own);
// Whether a typed word is a flag, and no number below zero.
bool looks_like_flag(std::string_view word);

// The command line in the program's own flags. Error: a flag for a function that quire lacks, or an unknown flag: a dash
// with several letters is never taken for one letter and its value.
Result<TranslatedFlags> translate_flags(Program program, std::span<const std::string> words, const OwnFlag& own);

} // namespace quire

module :private;

namespace quire {

enum class Fate { ignored, renamed, refused };

struct ForeignFlag {
    int              programs; // a sum of Program
    std::string_view names;    // between blanks
    int              values;   // words that follow; -1: one may
    std::string_view only;     // only with this value, a number in any spelling; "": with every one
    Fate             fate;
    std::string_view text; // renamed: the words here, "=" for the value, "=MiB" for the value with a unit; refused: why
};

constexpr int chat = 1, server = 2, bench = 4, inspect = 8, talkers = chat + server, all = talkers + bench,
              sources = all + inspect;

// The first line that fits counts.
constexpr ForeignFlag foreign_flags[] = {
    // -- another name
    {chat, "-sys", 1, "", Fate::renamed, "--system-prompt ="},
    {chat, "-st", 0, "", Fate::renamed, "--single-turn"},
    {sources, "-hf -hfr", 1, "", Fate::renamed, "--hf-repo ="},
    {sources, "-hff", 1, "", Fate::renamed, "--hf-file ="},
    {sources, "-hft", 1, "", Fate::renamed, "--hf-token ="},
    {sources, "-mu", 1, "", Fate::renamed, "--model-url ="},
    {chat, "-cl --cache-list", 0, "", Fate::renamed, "--models"},
    {chat, "--grammar-file", 1, "", Fate::renamed, "--grammar ="},
    {chat, "-jf --json-schema-file", 1, "", Fate::renamed, "--schema ="},
    {chat, "-co", -1, "", Fate::renamed, "--color ="},
    {sources, "-tp", 1, "", Fate::renamed, "--tensor-parallel ="},
    {server, "-np", 1, "", Fate::renamed, "--parallel ="},
    {talkers, "--temperature", 1, "", Fate::renamed, "--temp ="},
    {talkers, "-rea", 1, "", Fate::renamed, "--reasoning ="},
    {talkers, "--usage", 0, "", Fate::renamed, "--help"},
    {talkers, "-t --threads", 1, "-1", Fate::renamed, "--threads 0"},
    {talkers, "-n --predict --n-predict", 1, "-2", Fate::renamed, "--predict -1"},
    {talkers, "--spec-default", 0, "", Fate::renamed, "--spec ngram"},
    {talkers, "--spec-type", 1, "none", Fate::renamed, "--spec none"},
    {talkers, "--spec-type", 1, "ngram-simple", Fate::renamed, "--spec ngram"},
    {talkers, "--spec-type", 1, "ngram-map-k", Fate::renamed, "--spec ngram"},
    {talkers, "--spec-type", 1, "ngram-map-k4v", Fate::renamed, "--spec ngram"},
    {talkers, "--spec-type", 1, "ngram-mod", Fate::renamed, "--spec ngram"},
    {talkers, "--spec-type", 1, "ngram-cache", Fate::renamed, "--spec ngram"},
    {talkers, "--spec-type", 1, "draft", Fate::renamed, "--spec draft"},
    {talkers, "--spec-type", 1, "draft-simple", Fate::renamed, "--spec draft"},
    {talkers, "--spec-type", 1, "draft-eagle3", Fate::renamed, "--spec eagle3"},
    {talkers, "--spec-type", 1, "draft-mtp", Fate::renamed, "--spec mtp"},
    {all, "-md --model-draft", 1, "", Fate::renamed, "--spec-draft-model ="},
    {talkers, "--draft --draft-n --draft-max", 1, "", Fate::renamed, "--spec-draft-n-max ="},
    {talkers, "--draft-min --draft-n-min", 1, "", Fate::renamed, "--spec-draft-n-min ="},
    {sources, "-ctk", 1, "", Fate::renamed, "--cache-type-k ="},
    {sources, "-ctv", 1, "", Fate::renamed, "--cache-type-v ="},
    {talkers, "--kv-cache-dtype", 1, "fp8_e4m3", Fate::renamed, "--kv-type fp8"},
    {talkers, "--kv-cache-dtype", 1, "fp8", Fate::renamed, "--kv-type fp8"},
    {talkers, "--kv-cache-dtype", 1, "int8_per_token_head", Fate::renamed, "--kv-type q8_0"},
    {talkers, "--kv-cache-dtype", 1, "bfloat16", Fate::renamed, "--kv-type bf16"},
    {talkers, "--kv-cache-dtype", 1, "f16", Fate::renamed, "--kv-type f16"},
    {talkers, "--kv-cache-dtype", 1, "float16", Fate::renamed, "--kv-type f16"},
    {all, "-ngl --gpu-layers --n-gpu-layers", 1, "0", Fate::renamed, "--device cpu"},
    {all, "-dev --device", 1, "none", Fate::renamed, "--device cpu"},
    {all, "-dev", 1, "cpu", Fate::renamed, "--device cpu"},
    {server, "-to --timeout", 1, "", Fate::renamed, "--write-timeout ="},
    {server, "--no-ui --no-webui", 0, "", Fate::renamed, "--no-pages"},
    {talkers, "--no-cache-prompt --no-enable-prefix-caching", 0, "", Fate::renamed, "--no-prefix-cache"},
    {chat, "--no-perf", 0, "", Fate::renamed, "--no-show-timings"},
    {server, "--log-disable --disable-log-requests", 0, "", Fate::renamed, "--no-log"},
    {server, "--log-verbose", 0, "", Fate::renamed, "--verbose"},
    {server, "-lv --verbosity --log-verbosity", 1, "1", Fate::renamed, "--log-level error"}, // llama.cpp's numbers
    {server, "-lv --verbosity --log-verbosity", 1, "2", Fate::renamed, "--log-level warning"},
    {server, "-lv --verbosity --log-verbosity", 1, "3", Fate::renamed, "--log-level info"},
    {server, "-lv --verbosity --log-verbosity", 1, "4", Fate::renamed, "--log-level debug"},
    {server, "--async-scheduling", 0, "", Fate::renamed, "--pipeline on"},
    {server, "--ssl-certfile", 1, "", Fate::renamed, "--tls-cert ="},
    {server, "--ssl-keyfile", 1, "", Fate::renamed, "--tls-key ="},
    {server, "--allowed-origins", 1, "", Fate::renamed, "--cors-origins ="},

    // -- nothing to choose here: conversation, template, whole model on one device, one prompt cache, threads
    {chat,
     "-i --interactive -if --interactive-first -cnv --conversation -mli --multiline-input --simple-io "
     "--display-prompt --no-display-prompt --no-warmup --warmup --verbose-prompt --no-escape",
     0, "", Fate::ignored, ""},
    {chat, "-b --batch-size", 1, "", Fate::ignored, ""},
    {chat, "--keep", 1, "", Fate::ignored, ""},
    {talkers,
     "--jinja --no-jinja --perf --no-perf --log-disable --log-prefix --no-log-prefix "
     "--log-timestamps --no-log-timestamps --cache-prompt --swa-full --check-tensors --no-mmproj "
     "--no-mmproj-auto --mmproj-offload --no-mmproj-offload",
     0, "", Fate::ignored, ""},
    {chat, "-v --verbose --log-verbose", 0, "", Fate::ignored, ""},
    {chat, "--log-file", 1, "", Fate::ignored, ""},
    {talkers, "--log-colors", -1, "", Fate::ignored, ""},
    {chat, "-cram --cache-ram", 1, "", Fate::ignored, ""},
    {server, "-cram --cache-ram", 1, "-1", Fate::ignored, ""}, // no limit
    {server, "-cram --cache-ram", 1, "", Fate::renamed, "--kv-host-bytes =MiB"},
    {talkers,
     "-lv --verbosity --log-verbosity -ctxcp --ctx-checkpoints --swa-checkpoints -cms "
     "--checkpoint-min-step -sps --slot-prompt-similarity -tb --threads-batch",
     1, "", Fate::ignored, ""},
    {all,
     "-ngl --gpu-layers --n-gpu-layers -ub --ubatch-size -C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb "
     "--cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch -dt --defrag-thold -lm "
     "--load-mode -lzm --lazy-mode --numa -dev -ot --override-tensor -ncmoe --n-cpu-moe -ncffn --n-cpu-ffn -sm "
     "--split-mode -ts --tensor-split -mg --main-gpu -fitt --fit-target -fitc --fit-ctx -mmp --mmap-mode -nopo",
     1, "", Fate::ignored, ""},
    {all, "-fa --flash-attn -fit --fit", -1, "", Fate::ignored, ""},
    {all,
     "--mmap --no-mmap --mlock -kvo --kv-offload -nkvo --no-kv-offload --repack -nr --no-repack --no-host -cmoe "
     "--cpu-moe --op-offload --no-op-offload -dio --direct-io",
     0, "", Fate::ignored, ""},
    {server,
     "-cb --cont-batching -kvu --kv-unified --metrics --embedding --embeddings --ui --webui --warmup --no-warmup "
     "--slots --no-slots --props --rerank --reranking --enable-prefix-caching --enable-chunked-prefill --enforce-eager "
     "--trust-remote-code --disable-log-stats",
     0, "", Fate::ignored, ""},
    {server, "--tags --swap-space --scheduling-policy --max-loras --max-lora-rank --max-cpu-loras", 1, "",
     Fate::ignored, ""},
    {server, "--enable-lora --enable-auto-tool-choice", 0, "", Fate::ignored, ""},
    {server, "--tool-call-parser --reasoning-parser", 1, "", Fate::ignored, ""}, // the chat template shows the forms
    {server, "-e --escape --no-escape", 0, "", Fate::ignored, ""},

    // -- with the value that means "off" nothing is asked for
    {talkers, "--cache-reuse", 1, "0", Fate::ignored, ""},
    {talkers, "--rope-scale --rope-freq-scale", 1, "1", Fate::ignored, ""},
    {talkers, "--adaptive-target", 1, "-1", Fate::ignored, ""},
    {chat, "--sleep-idle-seconds", 1, "", Fate::ignored, ""}, // the variable may be the server's
    {talkers, "--rope-scaling", 1, "none", Fate::ignored, ""},
    {talkers, "--dtype --kv-cache-dtype", 1, "auto", Fate::ignored, ""},
    {chat, "--reasoning-format", 1, "none", Fate::ignored, ""}, // the server has the flag
    {chat, "--reasoning-format", 1, "auto", Fate::ignored, ""},
    {chat, "--reasoning-format", 1, "deepseek", Fate::ignored, ""},
    {talkers,
     "--adaptive-decay --draft-p-min --spec-draft-p-min -ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl "
     "-ctkd --cache-type-k-draft --spec-draft-type-k -ctvd --cache-type-v-draft --spec-draft-type-v --draft-p-split "
     "--spec-draft-p-split --spec-draft-sampling -td --threads-draft --spec-draft-threads -tbd --threads-batch-draft "
     "--spec-draft-threads-batch -Cd --cpu-mask-draft --spec-draft-cpu-mask -Crd --cpu-range-draft "
     "--spec-draft-cpu-range --cpu-strict-draft --spec-draft-cpu-strict --prio-draft --spec-draft-prio --poll-draft "
     "--spec-draft-poll -Cbd --cpu-mask-batch-draft --spec-draft-cpu-mask-batch -Crbd --cpu-range-batch-draft "
     "--spec-draft-cpu-range-batch --cpu-strict-batch-draft --spec-draft-cpu-strict-batch --prio-batch-draft "
     "--spec-draft-prio-batch --poll-batch-draft --spec-draft-poll-batch -devd --device-draft --spec-draft-device -otd "
     "--override-tensor-draft --spec-draft-override-tensor -ncmoed --n-cpu-moe-draft --spec-draft-n-cpu-moe "
     "--spec-draft-ncmoe --spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits --spec-ngram-simple-size-n "
     "--spec-ngram-simple-size-m --spec-ngram-simple-min-hits --spec-ngram-map-k-size-n --spec-ngram-map-k-size-m "
     "--spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m "
     "--spec-ngram-map-k4v-min-hits --spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match",
     1, "", Fate::ignored, ""},
    {talkers, "-cmoed --cpu-moe-draft --spec-draft-cpu-moe --spec-draft-backend-sampling", 0, "", Fate::ignored, ""},
    {server, "--pooling", 1, "mean", Fate::ignored, ""},

    // -- functions that quire lacks
    {sources, "-dr --docker-repo", 1, "", Fate::refused, "quire fetches from a hub (-hf) or a URL (-mu)"},
    {talkers, "--kv-cache-dtype", 1, "", Fate::refused, "--kv-type takes f16, bf16, f32, q8_0 and fp8"},
    {chat, "-no-cnv --no-conversation", 0, "", Fate::refused,
     "chat always holds a conversation; the server's /v1/completions continues plain text"},
    {talkers, "--control-vector --control-vector-scaled", 1, "", Fate::refused, "quire has no control vectors"},
    {talkers, "-mm --mmproj -mmu --mmproj-url --image --audio --video", 1, "", Fate::refused, "quire reads text alone"},
    {talkers, "--spec-type", 1, "", Fate::refused,
     "quire guesses tokens in one way at a time, by n-grams, a draft model, a draft of EAGLE-3 or the model's MTP "
     "layer: --spec ngram, draft, eagle3 or mtp"},
    {talkers, "-hfd -hfrd --hf-repo-draft --spec-draft-hf", 1, "", Fate::refused,
     "a draft model is a file: --spec-draft-model"},
    {talkers, "--spec-synth-len --spec-synth-rates", 1, "", Fate::refused,
     "bench speculate --acceptance measures with guesses of a given chance"},
    {talkers, "-lcs --lookup-cache-static -lcd --lookup-cache-dynamic", 1, "", Fate::refused,
     "quire guesses tokens from the text itself or by a draft model: --spec ngram, draft"},
    {chat, "-j --json-schema", 1, "", Fate::refused, "--schema takes a file with the JSON Schema"},
    {server, "--grammar --grammar-file -j --json-schema -jf --json-schema-file", 1, "", Fate::refused,
     "each request names its own grammar or schema"},
    {talkers, "--samplers --sampler-seq --sampling-seq", 1, "", Fate::refused, "the order of sampling is fixed"},
    {talkers, "--adaptive-target", 1, "", Fate::refused, "quire does not sample like that"},
    {talkers,
     "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor "
     "--yarn-attn-factor --yarn-beta-slow --yarn-beta-fast",
     1, "", Fate::refused, "positions are scaled as the model file says"},
    {talkers, "--override-kv", 1, "", Fate::refused, "what the model file says cannot be changed"},
    {talkers, "--cache-reuse", 1, "", Fate::refused, "only the beginning of a prompt is found again"},
    {chat, "--reasoning-format", 1, "", Fate::refused, "deepseek, auto and none are known"},
    {talkers, "--reasoning-effort", 1, "", Fate::refused,
     "give it to the template: --chat-template-kwargs '{\"reasoning_effort\": \"low\"}'"},
    {talkers, "--rpc", 1, "", Fate::refused, "a model runs on the devices of one machine"},
    {talkers, "--dtype", 1, "", Fate::refused, "weights have the types of the file"},
    {server, "--quantization", 1, "", Fate::refused, "weights have the types of the file"},
    {server, "--pipeline-parallel-size", 1, "1", Fate::ignored, ""},
    {server, "--pipeline-parallel-size", 1, "", Fate::refused,
     "GPUs share each layer (--tensor-parallel), they do not take turns"},
    {server, "--tokenizer --hf-config-path", 1, "", Fate::refused, "the tokenizer and the shape are the file's"},
    {talkers, "-cl --cache-list --list-devices --completion-bash", 0, "", Fate::refused, "quire has no such list"},
    {talkers, "-sp --special", 0, "", Fate::refused, "special tokens are not shown"},
    {talkers, "-r --reverse-prompt", 1, "", Fate::refused, "stop strings come with a request to the server"},
    {chat, "-l --logit-bias", 1, "", Fate::refused, "biases come with a request to the server"},
    {chat, "-sysf --system-prompt-file", 1, "", Fate::refused, "give the text itself: -sys \"$(cat FILE)\""},
    {chat, "-bf --binary-file -o --output-file --prompt-cache --in-prefix --in-suffix --server-base", 1, "",
     Fate::refused, "quire's chat has nothing like it"},
    {server, "-nocb --no-cont-batching -no-kvu --no-kv-unified", 0, "", Fate::refused,
     "requests always run together, from one pool of blocks"},
    {server, "--reuse-port", 0, "", Fate::refused, "the server has nothing like it"},
    {server, "--path --api-prefix --media-path --tools --pooling", 1, "", Fate::refused,
     "the server has nothing like it"},
};

bool has_name(std::string_view names, std::string_view name) {
    return std::ranges::any_of(split(names), [&](std::string_view one) { return one == name; });
}

bool same_value(std::string_view a, std::string_view b) {
    return a == b || (to_number<double>(a) && to_number<double>(a) == to_number<double>(b));
}

const ForeignFlag* find_foreign(Program program, std::string_view name, std::string_view value) {
    for (const ForeignFlag& flag : foreign_flags)
        if ((flag.programs & int(program)) != 0 && has_name(flag.names, name) &&
            (flag.only.empty() || same_value(flag.only, value)))
            return &flag;
    return nullptr;
}

std::optional<bool> foreign_takes_value(Program program, std::string_view name) {
    for (const ForeignFlag& flag : foreign_flags)
        if ((flag.programs & int(program)) != 0 && has_name(flag.names, name)) return flag.values != 0;
    return std::nullopt;
}

std::string meant_flag(Program program, std::string_view typed, const OwnFlag& own) {
    std::vector<KnownName> known;
    for (const std::string& name : own.names) known.push_back({name, name});
    for (const ForeignFlag& flag : foreign_flags) {
        if ((flag.programs & int(program)) == 0 || flag.fate == Fate::refused || !flag.only.empty()) continue;
        for (std::string_view name : split(flag.names))
            if (name.starts_with("--"))
                known.push_back(
                    {std::string(name),
                     std::string(flag.fate == Fate::renamed ? flag.text.substr(0, flag.text.find(' ')) : name)});
    }
    return likely_name(typed, known);
}

bool looks_like_flag(std::string_view word) { return word.size() > 1 && word[0] == '-' && !to_number<double>(word); }

Result<TranslatedFlags> translate_flags(Program program, std::span<const std::string> words, const OwnFlag& own) {
    TranslatedFlags done;
    std::string     ignored;
    for (std::size_t i = 0; i < words.size(); i++) {
        const std::string& word = words[i];
        if (!looks_like_flag(word)) {
            done.words.push_back(word);
            continue;
        }
        const bool                joined      = word.starts_with("--") && word.find('=') != std::string::npos;
        const std::string         name        = joined ? word.substr(0, word.find('=')) : word;
        const std::string         value       = joined                 ? word.substr(name.size() + 1)
                                                : i + 1 < words.size() ? words[i + 1]
                                                                       : std::string();
        const std::optional<bool> takes_value = own(name);
        const ForeignFlag*        foreign     = find_foreign(program, name, value);
        if (foreign && (!takes_value || !foreign->only.empty())) {
            const bool takes =
                !joined && (foreign->values == 1 || (foreign->values < 0 && !value.empty() && !looks_like_flag(value)));
            if (foreign->values == 1 && i + 1 == words.size() && !joined) return fail(name, " needs a value");
            if (foreign->fate == Fate::refused) return fail(name, ": ", foreign->text);
            if (foreign->fate == Fate::ignored) ignored += cat(ignored.empty() ? "" : ", ", name);
            for (std::string_view part : split(foreign->text)) {
                if (foreign->fate != Fate::renamed) break;
                if (!part.starts_with('=')) done.words.emplace_back(part);
                else if (takes || joined) done.words.push_back(cat(value, part.substr(1)));
            }
            i += takes;
        } else if (takes_value.value_or(false) && joined && value.empty()) {
            done.words.insert(done.words.end(), {name, ""}); // CLI11 would take the next word
        } else if (takes_value) {
            done.words.push_back(word);
            if (!*takes_value || joined || i + 1 == words.size()) continue;
            if (!looks_like_flag(value)) done.words.push_back(words[++i]);
            else if (!own(value) && !find_foreign(program, value, "")) // a value that begins with a dash
                done.words.back() += cat(word[1] == '-' ? "=" : "", words[++i]);
        } else if (word[1] != '-' && word.size() > 2) {
            // -n128 is a letter and its number.
            if (!to_number<double>(word.substr(2)) || !own(word.substr(0, 2)).value_or(false)) {
                const std::string meant = meant_flag(program, name, own);
                return fail("there is no flag ", word,
                            meant.empty() ? std::string("; --help lists them") : did_you_mean(meant));
            }
            done.words.push_back(word.substr(0, 2));
            done.words.push_back(word.substr(2));
        } else {
            done.words.push_back(word);
        }
    }
    if (!ignored.empty()) done.note = cat("not needed here, and ignored: ", ignored);
    return done;
}

} // namespace quire
