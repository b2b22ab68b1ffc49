// quire.tools.common.engine_flags: the flags that the programs with an engine share, the model they open without -m, and how a
// command line is parsed. Owns nothing: the flags write into the caller's options.
export module quire.tools.common.engine_flags;

import quire.core.base;
import quire.core.json;
import quire.engine.options;
import quire.text.templates.chat_template;
import quire.tools.common.flag_sources;
import quire.tools.common.terminal;
export import quire.tools.common.foreign_flags;
import quire.tools.flags.cli;

export namespace quire {

// models/ beside the program.
std::string models_folder();
// Without -m: the first models/*.gguf beside the program.
Result<std::string> default_model();

// Makes `option` take bytes, as 64M or 8G, from `least` to `most`, which is a power of 1024 or a multiple of one.
CLI::Option* take_bytes(CLI::Option* option, std::int64_t least, std::int64_t most = std::int64_t(1) << 50);

// -m
void add_model_flag(CLI::App& app, std::string& model);
// --device, --gpu-memory-utilization, --tensor-parallel, --deterministic, --tune
void add_device_flags(CLI::App& app, EngineOptions& options);
// --block-size
void add_block_size_flag(CLI::App& app, EngineOptions& options);
// --kv-type, --cache-type-k, --cache-type-v. `chooses`: also --kv-type auto with --kv-type-limit.
void add_kv_type_flag(CLI::App& app, EngineOptions& options, bool chooses = false);
// these, --no-prefix-cache and those of what is behind the cache
void add_cache_flags(CLI::App& app, EngineOptions& options);
// --spec, --spec-draft-model
void add_guesser_flags(CLI::App& app, EngineOptions& options);
// These, --spec-draft-n-max, --spec-draft-n-min, --spec-ngram-max, --spec-ngram-min, --speculative-config
void add_speculation_flags(CLI::App& app, EngineOptions& options);
// --lora, --lora-scaled, --lora-modules, --lora-init-without-apply
void add_adapter_flags(CLI::App& app, EngineOptions& options);
// --chat-template, --chat-template-file, --chat-template-kwargs, --reasoning.
struct ChatTemplateFlags {
    std::string name, file, variables, reasoning = "auto";
};
void add_chat_template_flags(CLI::App& app, ChatTemplateFlags& flags, std::string& now); // with --now
void add_now_flag(CLI::App& app, std::string& now, const char* what);
// The template's variables with that of --reasoning among them, as JSON; "": none.
std::string variables_of(const ChatTemplateFlags& flags);
// How answers are split: --tool-format, --reasoning-format.
struct AnswerFlags {
    std::string tool_form        = "auto"; // by the template, or a name of ToolForm
    std::string reasoning_format = "deepseek";
};
void add_answer_flags(CLI::App& app, AnswerFlags& flags);
void add_tool_form_flag(CLI::App& app, std::string& form); // one of them

// A sentence for the user of a command line that is right.
struct FlagNote {
    std::string sentence;
    bool        warning = false;
};
// Parses the flags of the file of --config, of the environment and of the command line, the flags of other programs translated. `adjust`
// changes the words first. `before`: words that count less than all others; an error begins with `where`. `notes` gets the sentences about
// flags that are not needed here, and about variables without a flag; nullptr: standard error gets them. Returns the exit code if the program
// ends here: 0 after --help and --version, 2 after a sentence on standard error.
std::optional<int> parse_flags(CLI::App& app, Program program, int argc, char** argv,
                               const std::function<void(std::vector<std::string>&)>& adjust = {},
                               const std::vector<std::string>& before = {}, const std::string& where = "",
                               std::vector<FlagNote>* notes = nullptr);
// The flags of `app`, for translate_flags() and the functions of quire.tools.common.flag_sources.
OwnFlag flags_of(const CLI::App& app);
// Of an app with subcommands: its own flags, and those of the subcommand that is the first word.
OwnFlag flags_of_command(const CLI::App& app, std::span<const std::string> words);

} // namespace quire

module :private;

namespace quire {

std::string models_folder() {
    std::error_code error;
    return (std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / "models").string();
}

Result<std::string> default_model() {
    std::error_code          error;
    const std::string        folder = models_folder();
    std::vector<std::string> found;
    for (std::filesystem::directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
        if (at->path().extension() == ".gguf") found.push_back(at->path().string());
    if (found.empty())
        return fail("no model: name one with -m FILE.gguf, fetch one with -hf USER/MODEL or put one into ", folder);
    return *std::ranges::min_element(found);
}

CLI::Option* take_bytes(CLI::Option* option, std::int64_t least, std::int64_t most) {
    const auto check = [least, most](std::string& text) {
        constexpr std::string_view units = "kmgtp"; // behind one of them may stand B or iB
        const std::size_t          end   = std::min(text.find_first_not_of("0123456789."), text.size());
        std::string                unit  = text.substr(end);
        for (char& c : unit) c = c >= 'A' && c <= 'Z' ? char(c - 'A' + 'a') : c;
        if (unit.ends_with('b')) unit.pop_back();
        if (unit.size() == 2 && unit[1] == 'i') unit.pop_back();
        const std::size_t power = unit.empty() ? 0 : units.find(unit) + 1;
        const auto        value = to_number<double>(text.substr(0, end));
        const double      bytes = value ? std::trunc(std::ldexp(*value, 10 * int(power))) : -1;
        if (unit.size() > 1 || (!unit.empty() && power == 0) || bytes < double(least) || bytes > double(most)) {
            std::size_t n = 0; // units of 1024 in `most`
            while (n < 5 && most % (std::int64_t(1) << (10 * (n + 1))) == 0) n++;
            return cat(quote(text), " is not a number of bytes from ", least, " to ", most >> (10 * n),
                       std::string_view("KMGTP").substr(n - 1, 1), ", such as 64M or 8G");
        }
        text = cat(std::int64_t(bytes));
        return std::string();
    };
    return option->transform(CLI::Validator(check, ""))->type_name("BYTES");
}

void add_model_flag(CLI::App& app, std::string& model) {
    app.add_option("-m,--model", model, "GGUF file; default: the first one in models/ next to this program");
}

void add_device_flags(CLI::App& app, EngineOptions& options) {
    app.add_option("--device", options.device, "device to run on; auto: the GPU if there is one")
        ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
        ->capture_default_str();
    add_number(app, "--gpu-memory-utilization", options.gpu_memory_utilization, 0.01, 1,
               "fraction of the GPU's memory for weights and KV together");
    add_number(app, "--tensor-parallel,--tensor-parallel-size", options.tensor_parallel, 1, 64,
               "GPUs that share the model, or parts of the CPU's threads (short: -tp)");
    app.add_flag("--deterministic", options.deterministic,
                 "bit-identical logits on any number of GPUs and in any batch");
    app.add_option_function<std::string>(
           "--prompt-precision",
           [&options](const std::string& name) { options.fp8_rows = name == "fp8" ? usual_fp8_rows : 0; },
           "f16, or fp8: the GEMMs of prompts in 8 bits on a Hopper GPU, faster and not exact")
        ->check(CLI::IsMember({"f16", "fp8"}))
        ->default_str("f16");
    app.add_option("--tune", options.tune,
                   "on or off: measure at start; on a CPU, once, how weights are best prefetched, on a GPU which of "
                   "cuBLASLt's GEMMs are fastest")
        ->default_str(options.tune ? "on" : "off");
}

void add_block_size_flag(CLI::App& app, EngineOptions& options) {
    add_number(app, "--block-size", options.block_size, 1, 256, "tokens in a KV block");
}

DType kv_type(std::string_view name) { return std::ranges::find(kv_type_names, name, &KvTypeName::name)->type; }

void add_kv_type_flag(CLI::App& app, EngineOptions& options, bool chooses) {
    std::vector<std::string> kv_types;
    for (const KvTypeName& one : kv_type_names) kv_types.emplace_back(one.name);
    std::vector<std::string> all = kv_types;
    if (chooses) all.emplace_back("auto");
    app.add_option_function<std::string>(
           "--kv-type",
           [&options](const std::string& name) {
               options.kv_type_auto = name == "auto";
               if (!options.kv_type_auto) options.kv_type = kv_type(name);
           },
           chooses ? "element type of the KV cache; auto: the smallest that bench quality has found good enough"
                   : "element type of the KV cache")
        ->check(CLI::IsMember(all))
        ->default_str("f16");
    if (chooses)
        add_number(app, "--kv-type-limit", options.kv_type_limit, 0, 100,
                   "largest mean KLD of --kv-type auto, in nats");
    app.add_option_function<std::string>(
           "--cache-type-k",
           [&options](const std::string& name) {
               options.kv_type.k = kv_type(name);
               options.k_named   = true;
           },
           "element type of K alone (short: -ctk)")
        ->check(CLI::IsMember(kv_types));
    app.add_option_function<std::string>(
           "--cache-type-v",
           [&options](const std::string& name) {
               options.kv_type.v = kv_type(name);
               options.v_named   = true;
           },
           "element type of V alone (short: -ctv)")
        ->check(CLI::IsMember(kv_types));
}

void add_cache_flags(CLI::App& app, EngineOptions& options) {
    add_kv_type_flag(app, options, true);
    app.add_flag_callback(
        "--no-prefix-cache", [&options] { options.prefix_cache = false; }, "do not reuse KV between requests");
    app.add_option_function<std::string>( // before --kv-host-bytes, which has the last word
        "--kv-dir",
        [&options](const std::string& path) {
            if (path.empty()) throw CLI::ValidationError("--kv-dir", "a directory is missing");
            options.kv_dir = path;
            if (options.kv_host_bytes == 0) options.kv_host_bytes = -1;
        },
        "directory where the prefix cache is kept, so that it outlasts a restart");
    take_bytes(
        app.add_option(
            "--kv-host-bytes", options.kv_host_bytes,
            "host memory for what the prefix cache has no room for on the device, as 8G; 0: none; default: on a GPU, "
            "and with --kv-dir, an eighth of the free memory, at most 8 GiB, else none"),
        0);
    app.add_option("--kv-key", options.kv_key,
                   "file with a key of at least 32 bytes, which --kv-dir is encrypted with");
    take_bytes(app.add_option("--kv-disk-bytes", options.kv_disk_bytes, "most bytes of the files in --kv-dir"), 1)
        ->default_str("10G");
}

// More than quire checks at once, as other programs take them, counts as most_drafts.
int clamped_drafts(const CLI::App& app, const char* flag, double wanted) {
    if (wanted > most_drafts)
        say_error(app.get_name(), cat(flag, ": a step checks at most ", most_drafts,
                                      " guessed tokens of a sequence; so many are taken"));
    return int(std::min<double>(wanted, most_drafts));
}

// vLLM's JSON: the method and its numbers. Returns what is wrong with it, or "".
std::string read_speculative_config(const CLI::App& app, const std::string& text, DraftOptions& drafts) {
    const Result<Json> json = json_parse(text);
    if (!json || !json->is_object()) return cat(quote(text), " is not a JSON object");
    DraftOptions read  = drafts;
    read.most          = 0;
    read.on            = true;
    const bool has_max = json->contains("prompt_lookup_max"), has_min = json->contains("prompt_lookup_min"),
               named = json->contains("method");
    bool by_ngrams   = false; // where vLLM writes the name of that method in place of a model's
    for (auto at = json->begin(); at != json->end(); ++at) {
        const std::string& name   = at.key();
        const Json&        value  = at.value();
        int* const         number = name == "num_speculative_tokens" ? &read.most
                                    : name == "prompt_lookup_max"    ? &read.ngram.most
                                    : name == "prompt_lookup_min"    ? &read.ngram.least
                                                                     : nullptr;
        if (name == "method") {
            // vLLM has a name for each family, such as deepseek_mtp.
            read.by_mtp = value.is_string() && (value == "mtp" || value.get<std::string>().ends_with("_mtp"));
            if (value != "ngram" && value != "draft_model" && value != "eagle3" && !read.by_mtp)
                return cat("the method ", json_dump(value),
                           " is none of \"ngram\", \"draft_model\", \"eagle3\" and \"mtp\", which quire has");
            read.by_model = value == "draft_model";
            read.by_eagle = value == "eagle3";
        } else if (name == "model") {
            if (!value.is_string()) return cat(json_dump(value), " is not the name of a draft model's file");
            by_ngrams = value == "[ngram]" || (value == "ngram" && !named);
            if (!by_ngrams) read.model = value.get<std::string>();
        } else if (name == "draft_tensor_parallel_size" && value == 1) {
            continue; // a draft runs on one device
        } else if (!number) {
            return cat("quire has nothing like ", quote(name));
        } else if (number == &read.most && value.is_number_integer() && value > most_drafts) {
            read.most = clamped_drafts(app, "num_speculative_tokens of --speculative-config", value.get<double>());
        } else if (const int most = number == &read.most ? most_drafts : most_ngram;
                   !value.is_number_integer() || value < 1 || value > most) {
            return cat(quote(name), " is not a whole number in 1..", most);
        } else {
            *number = value.get<int>();
        }
    }
    if (has_max && !has_min) read.ngram.least = read.ngram.most; // as in vLLM
    if (has_min && !has_max) read.ngram.most = read.ngram.least;
    if (!named && !json->contains("model")) return "it names no method";
    if (!named) read.by_model = !by_ngrams, read.by_eagle = read.by_mtp = false;
    if (read.by_model && read.model.empty()) return "the method \"draft_model\" needs a \"model\"";
    if (read.by_eagle && read.model.empty()) return "the method \"eagle3\" needs a \"model\"";
    if (json->contains("model") && !by_ngrams && !read.by_model && !read.by_eagle)
        return "only the methods \"draft_model\" and \"eagle3\" have a \"model\"";
    if (read.most == 0 && read.by_mtp) read.most = 1; // vLLM takes the number of the MTP layers, which is mostly 1
    if (read.most == 0) return "it names no num_speculative_tokens";
    drafts = std::move(read);
    return "";
}

void add_guesser_flags(CLI::App& app, EngineOptions& options) {
    DraftOptions& drafts = options.drafts;
    app.add_option_function<std::string>(
           "--spec-draft-model",
           [&drafts](const std::string& file) { drafts.model = file, drafts.on = drafts.by_model = true; },
           "GGUF file of a smaller model with the same vocabulary, or of a draft of EAGLE-3 for the model, which "
           "guesses tokens: --spec draft (short: -md)")
        ->type_name("FILE");
    app.add_option_function<std::string>(
           "--spec",
           [&drafts](const std::string& method) {
               drafts.on       = method != "none";
               drafts.by_model = method == "draft";
               drafts.by_eagle = method == "eagle3";
               drafts.by_mtp   = method == "mtp";
           },
           "a step checks several guessed tokens where that saves time; the answers stay the same. ngram: guesses from "
           "the text itself; draft: from --spec-draft-model; eagle3: likewise, which has to be a draft of EAGLE-3; "
           "mtp: "
           "from the file's own layer for them")
        ->check(CLI::IsMember({"none", "ngram", "draft", "eagle3", "mtp"}))
        ->default_str("none");
}

void add_speculation_flags(CLI::App& app, EngineOptions& options) {
    DraftOptions& drafts = options.drafts;
    add_guesser_flags(app, options);
    app.add_option_function<double>(
           "--spec-draft-n-max",
           [&app, &drafts](double most) {
               if (most < 1) drafts.on = drafts.by_model = drafts.by_eagle = drafts.by_mtp = false; // as in llama.cpp
               else drafts.most = clamped_drafts(app, "--spec-draft-n-max", most);
           },
           cat("most guessed tokens of a sequence in a step, up to ", most_drafts, "; 0: --spec none"))
        ->check(within(0, 1e18, "0 or more"))
        ->type_name("INT")
        ->default_str(cat(drafts.most));
    app.add_option_function<double>(
           "--spec-draft-n-min",
           [&app, &drafts](double least) {
               drafts.least = std::max(clamped_drafts(app, "--spec-draft-n-min", least), 1);
           },
           "with fewer guessed tokens a step checks none; 0: as 1")
        ->check(within(0, 1e18, "0 or more"))
        ->type_name("INT")
        ->default_str(cat(drafts.least));
    add_number(app, "--spec-ngram-max", drafts.ngram.most, 1, most_ngram,
               "ngram: so many last tokens are looked for in the text before them, then fewer");
    add_number(app, "--spec-ngram-min", drafts.ngram.least, 1, most_ngram, "ngram: fewer tokens are not looked for");
    app.add_option("--speculative-config",
                   "the same, as vLLM's JSON: {\"method\": \"ngram\", \"num_speculative_tokens\": 4}")
        ->each([&app, &drafts](const std::string& text) {
            if (const std::string wrong = read_speculative_config(app, text, drafts); !wrong.empty())
                throw CLI::ValidationError(wrong);
        })
        ->type_name("JSON");
}

// The pairs NAME=FILE between blanks; a blank that no NAME= follows belongs to the file's name. At least one, which may be "".
std::vector<std::string_view> split_pairs(std::string_view text) {
    constexpr std::string_view    blanks = " \t\r\n";
    std::vector<std::string_view> pairs;
    text.remove_prefix(std::min(text.find_first_not_of(blanks), text.size()));
    text = text.substr(0, text.find_last_not_of(blanks) + 1);
    for (std::size_t at = 0; (at = text.find_first_of(blanks, at)) != std::string_view::npos;) {
        const std::size_t      next = text.find_first_not_of(blanks, at);
        const std::string_view word = text.substr(next, text.find_first_of(blanks, next) - next);
        const std::size_t      name = word.find('=');
        if (name == std::string_view::npos || name == 0 || word.substr(0, name).contains('/')) {
            at = next;
            continue;
        }
        pairs.push_back(text.substr(0, at));
        text.remove_prefix(next);
        at = 0;
    }
    pairs.push_back(text);
    return pairs;
}

// Adds the adapters of lists with commas. `read` makes one of a member, or says what is wrong with it. `modules`: a list may be a JSON object,
// whose commas are its own; and a preset, a file of flags or a variable of the environment has all pairs in one text, with blanks between them.
void add_adapters(const char* flag, const std::vector<std::string>& lists, std::vector<AdapterOption>& adapters,
                  const std::function<std::string(const std::string& member, AdapterOption& adapter)>& read,
                  bool modules = false) {
    const auto add = [&](std::string_view member) {
        AdapterOption     adapter;
        const std::string wrong = read(std::string(member), adapter);
        if (!wrong.empty()) throw CLI::ValidationError(flag, wrong);
        if (adapter.name.empty()) adapter.name = std::filesystem::path(adapter.path).stem().string();
        adapters.push_back(std::move(adapter));
    };
    for (const std::string& list : lists) {
        const bool whole = modules && list.starts_with('{');
        for (std::string_view part : whole ? std::vector<std::string_view>{list} : split(list, ','))
            for (std::string_view member : modules && !whole ? split_pairs(part) : std::vector{part}) add(member);
    }
}

// vLLM's {"name": NAME, "path": FILE}; its base_model_name says nothing where there is one model.
std::string read_adapter_object(const std::string& text, AdapterOption& adapter) {
    const Result<Json> object = json_parse(text);
    if (!object) return object.error().message;
    for (const auto& item : object->items()) {
        const std::string& key   = item.key();
        const Json&        value = item.value();
        if (key != "name" && key != "path" && key != "base_model_name")
            return cat(quote(key), " is not one of name, path, base_model_name");
        if (!value.is_string() && (key != "base_model_name" || !value.is_null())) return cat(key, " is not a text");
        if (key == "name") adapter.name = value.get<std::string>();
        if (key == "path") adapter.path = value.get<std::string>();
    }
    return adapter.name.empty() || adapter.path.empty() ? cat(quote(text), " lacks a name or a path") : "";
}

std::string read_adapter_module(const std::string& text, AdapterOption& adapter) {
    adapter.usual = false;
    if (text.starts_with('{')) return read_adapter_object(text, adapter);
    const std::size_t equals = text.find('=');
    if (equals == std::string::npos || equals == 0 || equals + 1 == text.size())
        return cat(quote(text), " is not NAME=FILE");
    adapter.name = text.substr(0, equals);
    adapter.path = text.substr(equals + 1);
    return "";
}

void add_adapter_flags(CLI::App& app, EngineOptions& options) {
    std::vector<AdapterOption>& adapters = options.adapters;
    using Lists                          = std::vector<std::string>;
    const auto add = [&app](const char* flag, const std::function<void(const Lists&)>& take, const char* type,
                            const char* what) {
        return app.add_option_function<Lists>(flag, take, what)->type_name(type)->take_all();
    };
    add(
        "--lora",
        [&adapters](const Lists& lists) {
            add_adapters("--lora", lists, adapters, [](const std::string& path, AdapterOption& adapter) {
                adapter.path = path;
                return std::string(path.empty() ? "the name of a file is empty" : "");
            });
        },
        "FILE,...", "LoRA adapters (GGUF) that are applied to requests that name none");
    add(
        "--lora-scaled",
        [&adapters](const Lists& lists) {
            add_adapters("--lora-scaled", lists, adapters, [](const std::string& text, AdapterOption& adapter) {
                const std::size_t colon = text.rfind(':');
                const auto scale = colon == std::string::npos ? std::nullopt : to_number<float>(text.substr(colon + 1));
                if (!scale || !std::isfinite(*scale) || colon == 0)
                    return cat(quote(text), " is not FILE:SCALE with a number as the scale");
                if (std::abs(*scale) > 1e6F) // the limit of requests
                    return cat(quote(text), " has a scale that is not between -1000000 and 1000000");
                adapter.path  = text.substr(0, colon);
                adapter.scale = *scale;
                return std::string();
            });
        },
        "FILE:SCALE,...", "the same with scales other than 1");
    app.add_flag_callback( // before --lora-modules, which are applied to no request that does not name them
        "--lora-init-without-apply",
        [&adapters] {
            for (AdapterOption& adapter : adapters) adapter.usual = false;
        },
        "these adapters are applied only to requests that name them, until POST /lora-adapters");
    add(
        "--lora-modules",
        [&adapters](const Lists& lists) { add_adapters("--lora-modules", lists, adapters, read_adapter_module, true); },
        "NAME=FILE ...",
        "adapters that requests choose by NAME in place of the model's; or vLLM's JSON: {\"name\": NAME, \"path\": "
        "FILE}")
        ->expected(1, 1024);
}

void add_chat_template_flags(CLI::App& app, ChatTemplateFlags& flags, std::string& now) {
    CLI::Option* by_name =
        app.add_option("--chat-template", flags.name,
                       cat("a template of the file by its name, or one of ours in place of the file's: ",
                           ChatTemplate::built_in_names()));
    app.add_option("--chat-template-file", flags.file, "file with a Jinja template in place of the model's")
        ->excludes(by_name);
    app.add_option("--chat-template-kwargs,--default-chat-template-kwargs", flags.variables,
                   "variables for the template, as JSON: {\"enable_thinking\": false}; a request's own come first")
        ->check(
            [](const std::string& text) {
                if (const Result<Json> json = json_parse(text); text.empty() || (json && json->is_object()))
                    return std::string();
                return cat(quote(text), " is not a JSON object, such as {\"enable_thinking\": false}");
            },
            "");
    app.add_option("--reasoning", flags.reasoning,
                   "on or off: enable_thinking among these variables; auto: as the template has it (short: -rea)")
        ->check(CLI::IsMember({"auto", "on", "off"}))
        ->capture_default_str();
    add_now_flag(app, now, "date and time for templates that ask for them: 2024-07-26T10:00:00; default: the clock");
}

void add_now_flag(CLI::App& app, std::string& now, const char* what) {
    app.add_option("--now", now, what)
        ->check(
            [](const std::string& text) {
                const Result<std::int64_t> time = local_seconds(text);
                return time ? std::string() : time.error().message;
            },
            "");
}

std::string variables_of(const ChatTemplateFlags& flags) {
    if (flags.reasoning == "auto") return flags.variables;
    Result<Json> all = json_parse(flags.variables.empty() ? "{}" : flags.variables);
    if (!all || !all->is_object()) return flags.variables; // the template says what is wrong with it
    all->emplace("enable_thinking", flags.reasoning == "on");
    return json_dump(*all);
}

void add_tool_form_flag(CLI::App& app, std::string& form) {
    app.add_option("--tool-format", form, "how the model writes calls of tools; auto: as its template does")
        ->check(CLI::IsMember({"auto", "hermes", "llama3", "mistral", "qwen3-coder", "glm", "deepseek", "functionary",
                               "pythonic", "harmony", "json"}))
        ->capture_default_str();
}

void add_answer_flags(CLI::App& app, AnswerFlags& flags) {
    add_tool_form_flag(app, flags.tool_form);
    app.add_option("--reasoning-format", flags.reasoning_format,
                   "deepseek, auto: what stands in <think> becomes reasoning_content; none: it stays in the content")
        ->check(CLI::IsMember({"deepseek", "auto", "none"}))
        ->capture_default_str();
}

struct ParsedWords {
    std::optional<int> code; // with which the program ends
    std::string        note; // of translate_flags()
};

Result<ParsedWords> parse_words(CLI::App& app, Program program, const std::vector<std::string>& words,
                                const OwnFlag& own, const std::function<void(std::vector<std::string>&)>& adjust) {
    Result<TranslatedFlags> flags = translate_flags(program, words, own);
    if (!flags) return std::unexpected(flags.error());
    if (adjust) adjust(flags->words);
    try {
        app.parse(
            std::vector<std::string>(flags->words.rbegin(), flags->words.rend())); // in reverse, as CLI11 wants them
        refuse_empty(app);
    } catch (const CLI::Success& e) {
        return ParsedWords{app.exit(e), ""}; // --help and --version
    } catch (const CLI::ParseError& e) {
        return fail(sentence_of(app, e, [&](const std::string& word) { return meant_flag(program, word, own); }));
    }
    return ParsedWords{std::nullopt, std::move(flags->note)};
}

// Whether `flags` has the name of a flag that says where the model is; FILE is the word without a flag.
bool names_model(const std::set<std::string>& flags) {
    constexpr std::string_view sources[] = {"FILE", "-m", "--model", "-hf", "-hfr", "--hf-repo", "-mu", "--model-url"};
    return std::ranges::any_of(sources, [&](std::string_view one) { return flags.count(std::string(one)) > 0; });
}

// Typed flags count more than the environment and files: removes from `untyped` other places of the model, and flags that exclude a typed one.
void forget_overruled(const CLI::App& app, Program program, const OwnFlag& own, std::span<char* const> typed,
                      std::vector<GivenFlag>& untyped) {
    std::set<std::string> names;
    for (std::size_t i = 0; i < typed.size(); i++) {
        const std::string word = typed[i], name = word.substr(0, word.find('='));
        names.insert(looks_like_flag(word) ? name : "FILE");
        i += looks_like_flag(word) && name == word && takes_value(name, program, own).value_or(false);
    }
    const auto excludes = [&](const std::string& name) {
        const CLI::Option* const option = app.get_option_no_throw(name);
        return option != nullptr && std::ranges::any_of(option->get_excludes(), [&](const CLI::Option* other) {
                   return std::ranges::any_of(
                       names, [&](const std::string& one) { return app.get_option_no_throw(one) == other; });
               });
    };
    std::erase_if(untyped, [&](const GivenFlag& flag) {
        if (flag.words.empty()) return false;
        const std::string name = flag.words[0].substr(0, flag.words[0].find('='));
        return (names_model(names) && (names_model({name}) || name == "--hf-file")) || excludes(name);
    });
}

// An empty variable counts as one that is not set, where a flag takes any text.
bool is_unset(const CLI::App& app, const GivenFlag& flag) {
    if (flag.words.size() != 1 || flag.words[0].find('=') + 1 != flag.words[0].size()) return false;
    const CLI::Option* const option = app.get_option_no_throw(flag.words[0].substr(0, flag.words[0].size() - 1));
    if (option == nullptr) return true; // of another program
    return !may_be_empty(*option) && (option->get_type_name() == "TEXT" || option->get_type_name() == "FILE");
}

std::optional<int> parse_flags(CLI::App& app, Program program, int argc, char** argv,
                               const std::function<void(std::vector<std::string>&)>& adjust,
                               const std::vector<std::string>& before, const std::string& where,
                               std::vector<FlagNote>* notes) {
    const auto complain = [&](const std::string& text) {
        say_error(app.get_name(), cat(where, text));
        return 2;
    };
    std::string config; // read before the other flags
    if (program != Program::bench)
        app.add_option("--config", config,
                       "file with a flag on each line: ctx-size = 8192; what is typed, and variables QUIRE_CTX_SIZE, "
                       "count more");
    const OwnFlag          own = flags_of(app);
    std::vector<GivenFlag> untyped;
    if (program != Program::bench) {
        Result<std::vector<GivenFlag>> read = flags_of_environment(program, own);
        if (!read) return complain(read.error().message);
        untyped = std::move(*read);
        std::erase_if(untyped, [&](const GivenFlag& flag) { return is_unset(app, flag); });
    }
    const auto take_file = [&](const std::string& path) -> Result<void> {
        Result<std::vector<GivenFlag>> read = flags_of_file(path, program, own);
        if (!read) return std::unexpected(read.error());
        untyped.insert(untyped.begin(), read->begin(), read->end());
        return {};
    };
    bool typed_config = false;
    for (int i = 1; i < argc && program != Program::bench; i++) {
        const std::string word   = argv[i];
        const bool        joined = word.starts_with("--config=");
        if (!joined && (word != "--config" || i + 1 == argc)) continue;
        typed_config = true;
        if (auto ok = take_file(joined ? word.substr(9) : argv[i + 1]); !ok) return complain(ok.error().message);
    }
    if (const char* path = std::getenv("QUIRE_CONFIG"); path && *path && !typed_config && program != Program::bench)
        if (auto ok = take_file(path); !ok) return complain(cat("QUIRE_CONFIG: ", ok.error().message));
    // Whatever is typed comes last, and counts.
    forget_overruled(app, program, own, std::span(argv + 1, std::size_t(std::max(0, argc - 1))), untyped);
    std::vector<std::string> words = before;
    for (const GivenFlag& flag : untyped) words.insert(words.end(), flag.words.begin(), flag.words.end());
    words.insert(words.end(), argv + 1, argv + argc);
    Result<ParsedWords> done = parse_words(app, program, words, own, adjust);
    if (!done) {
        // An error that a flag makes alone is that of its variable or line.
        for (const GivenFlag& flag : untyped)
            if (auto alone = parse_words(app, program, flag.words, own, {});
                !alone && alone.error().message == done.error().message)
                return complain(cat(flag.from, ": ", done.error().message));
        return complain(done.error().message);
    }
    if (done->code) return done->code;
    std::vector<FlagNote> said;
    if (!done->note.empty()) said.push_back({done->note});
    if (const std::string unknown = program == Program::bench ? "" : unknown_variables(program, own); !unknown.empty())
        said.push_back({unknown, true});
    if (notes) *notes = std::move(said);
    else if (where.empty())
        for (const FlagNote& one : said) say_error(app.get_name(), one.sentence);
    return std::nullopt;
}

OwnFlag flags_of(const CLI::App& app) {
    return {[&app](const std::string& name) -> std::optional<bool> {
                const CLI::Option* option = app.get_option_no_throw(name);
                return option ? std::optional(option->get_items_expected_min() > 0) : std::nullopt;
            },
            flag_names(app)};
}

OwnFlag flags_of_command(const CLI::App& app, std::span<const std::string> words) {
    std::vector<const CLI::App*> apps;
    for (const CLI::App* one : app.get_subcommands([](const CLI::App*) { return true; }))
        if (!words.empty() && one->check_name(words[0])) apps.push_back(one);
    apps.push_back(&app);
    std::vector<std::string> names;
    for (const CLI::App* one : apps)
        for (std::string& name : flag_names(*one)) names.push_back(std::move(name));
    return {[apps](const std::string& name) -> std::optional<bool> {
                for (const CLI::App* one : apps)
                    if (const CLI::Option* option = one->get_option_no_throw(name))
                        return option->get_items_expected_min() > 0;
                return std::nullopt;
            },
            std::move(names)};
}

} // namespace quire
