// inspect: shows the contents of a model file and runs single parts of the engine. Every command prints one line of JSON; show prints on a
// terminal a few lines for a person.
// Exit codes: 0, 1 (a file or input that cannot be used: one line on stderr), 2 (wrong usage).

#include <unistd.h>

import quire.compute.kv_cache;
import quire.core.base;
import quire.core.output_file;
import quire.engine.engine;
import quire.engine.load_estimate;
import quire.engine.sampling_defaults;
import quire.model_file.weights;
import quire.text.calls.reasoning_form;
import quire.text.calls.tool_form;
import quire.tools.common.constraint_flags;
import quire.tools.common.engine_flags;
import quire.tools.common.foreign_flags;
import quire.tools.common.model_source;
import quire.tools.common.read_file;
import quire.tools.common.terminal;
import quire.tools.common.word_wrap;
import quire.tools.flags.cli;
import quire.tools.inspect.constrain;
import quire.tools.inspect.tool_calls;

using namespace quire;

namespace {

struct Arguments {
    ConstraintFlags constraint;
    ConstrainTests  constrain_tests;
    std::string     schema_tests, key_order = "any", numbers = "any";
    std::string     model, ids, raw_file, template_file, template_name, now;
    std::string     tool_form = "auto"; // of recorded answers: by the template, or a name of ToolForm
    ModelSource     source;
    EngineOptions   engine; // what the flags say of it
    bool            no_special = false, bos = false, all = false, ignore_eos = false, json_lines = false, json = false;
    int             top = 20, n = 48, beam = 0;
    float           length_penalty = 0;
};

int complain(const Error& error, int code = 1) {
    say_error("inspect", error.message);
    return code;
}

int print_json(const Json& json) {
    std::printf("%s\n", json_dump(json).c_str());
    const auto ok = flush_output();
    return ok ? 0 : complain(ok.error());
}

std::string read_input() {
    std::string text;
    char        buffer[65536];
    while (std::size_t n = std::fread(buffer, 1, sizeof buffer, stdin)) text.append(buffer, n);
    return text;
}

Result<std::vector<Token>> parse_ids(const std::string& text) {
    std::vector<Token> ids;
    for (std::string_view part : split(text, ',')) {
        const auto id = to_number<Token>(part);
        if (!id) return fail("--ids ", quote(text), " is not a list of numbers like 1,2,3");
        ids.push_back(*id);
    }
    return ids;
}

// The file with everything in it checked. A file without tensors is a vocabulary, and fine as one.
struct Checked {
    Gguf                       file;
    Tokenizer                  tokenizer;
    std::optional<ModelConfig> config; // of an architecture that can run
};

Result<Checked> open_checked(const std::string& path) {
    Result<Gguf> file = Gguf::open(path);
    if (!file) return std::unexpected(file.error());
    std::optional<ModelConfig> config;
    Result<std::string_view>   architecture = file->text("general.architecture");
    if (!architecture) return std::unexpected(architecture.error());
    if (!file->tensors().empty() && !is_foreign_architecture(*architecture)) {
        Result<ModelConfig> read = read_config(*file);
        if (!read) return std::unexpected(read.error());
        if (auto bound = bind_tensors(*file, *read); !bound) return std::unexpected(bound.error());
        config = std::move(*read);
    }
    Result<Tokenizer> tokenizer = Tokenizer::load(*file);
    if (!tokenizer) return std::unexpected(tokenizer.error());
    return Checked{std::move(*file), std::move(*tokenizer), std::move(config)};
}

// Error: the file was written while it was read, so that the output would mix the old content with the new one.
Result<void> check_unchanged(Gguf& file) {
    std::string part = file.torn();
    if (part.empty()) part = file.changed();
    if (!part.empty()) return fail_with(ErrorKind::system, part, ": it was changed in place while it was read");
    return {};
}

template <class List>
Json first_of(const List& list) {
    constexpr std::size_t shown = 8;
    Json                  out   = Json::array();
    for (std::size_t i = 0; i < std::min(list.size(), shown); i++) {
        if constexpr (std::is_same_v<std::decay_t<decltype(list[i])>, std::string_view>)
            out.push_back(std::string(list[i]));
        else out.push_back(static_cast<typename List::value_type>(list[i]));
    }
    return out;
}

Json to_json(const GgufValue& value) {
    return std::visit(
        [](const auto& v) -> Json {
            using T = std::decay_t<decltype(v)>;
            if constexpr (std::is_same_v<T, GgufArray>) {
                Json first = !v.uints.empty()    ? first_of(v.uints)
                             : !v.ints.empty()   ? first_of(v.ints)
                             : !v.floats.empty() ? first_of(v.floats)
                             : !v.bools.empty()  ? first_of(v.bools)
                                                 : first_of(v.strings);
                return Json{{"count", v.size()}, {"first", std::move(first)}};
            } else if constexpr (std::is_same_v<T, std::string_view>) {
                return std::string(v);
            } else {
                return v;
            }
        },
        value);
}

// The facts about a file that a person wants to know. `estimate`: of a model that can run here, or null.
std::string summary(const Checked& checked, const LoadEstimate* estimate) {
    const Gguf&                    file = checked.file;
    const Result<std::string_view> name = file.text("general.name", "");
    std::string text = cat(file.path(), ": ", file.tensors().size(), " tensors, ", file.file_bytes(), " bytes");
    if (name && !name->empty()) text += cat("\nname: ", cut_short(std::string(*name), 200));
    if (!estimate)
        return text + (file.tensors().empty() ? "\na vocabulary: there are no tensors in it"
                                              : "\nquire does not run this architecture");
    text += "\n" + describe(*estimate);
    if (const std::string call = example_of(estimate->tools); !call.empty()) text += "\na call of a tool: " + call;
    if (estimate->reasoning)
        text += cat("\nreasoning between ", estimate->reasoning.begin, " and ", estimate->reasoning.end);
    SamplerChoice      choice;
    const FileSampling sampling = take_file_sampling(file, [](const std::string&) { return false; }, choice);
    if (!sampling.said.empty()) text += "\nsampling: the file says " + sampling.said;
    if (!sampling.refused.empty()) text += "\nsampling: not possible, and not taken: " + sampling.refused;
    return text + "\n(--json: everything, with metadata and tensors)";
}

int show(const Arguments& a) {
    Result<Checked> checked = open_checked(a.model);
    if (!checked) return complain(checked.error());
    const Gguf& file = checked->file;
    const bool  read = !a.json && isatty(STDOUT_FILENO) == 1; // by a person
    if (read) {
        std::optional<LoadEstimate> known;
        if (checked->config) {
            Result<LoadEstimate> estimate = estimate_load(file, *checked->config, a.engine);
            if (!estimate) return complain(estimate.error());
            known = std::move(*estimate);
        }
        const std::string text = printable(summary(*checked, known ? &*known : nullptr));
        if (auto ok = check_unchanged(checked->file); !ok) return complain(ok.error());
        std::printf("%s\n", wrapped(text, screen_columns()).c_str());
        const auto ok = flush_output();
        return ok ? 0 : complain(ok.error());
    }
    Json out;
    out["file"]    = file.path();
    out["version"] = file.version();
    out["bytes"]   = file.file_bytes();
    if (const std::optional<ModelConfig>& config = checked->config) {
        const ModelConfig& c = *config;
        for (const KvTypeName& one : kv_type_names)
            out["kv_bytes_per_token"][std::string(one.name)] = KvCache::bytes_per_token(c, one.type);
        if (const std::size_t bytes = KvCache::state_bytes(c); bytes > 0)
            out["state"] = Json{{"bytes_per_sequence", bytes}};
        out["model"]                        = Json{{"architecture", c.architecture_name},
                                                   {"context_length", c.context_length},
                                                   {"vocab_size", c.vocab_size},
                                                   {"hidden_size", c.hidden_size},
                                                   {"layers", c.n_layers},
                                                   {"heads", c.n_heads},
                                                   {"kv_heads", c.n_kv_heads},
                                                   {"head_dim", c.head_dim},
                                                   {"ff_size", c.ff_size},
                                                   {"experts", c.experts.n},
                                                   {"experts_used", c.experts.used},
                                                   {"sliding_window", c.sliding_window}};
        const Result<LoadEstimate> estimate = estimate_load(file, c, a.engine);
        if (!estimate) return complain(estimate.error());
        if (estimate->state_bytes > 0) out["state"]["checkpoint_interval"] = estimate->checkpoint_interval;
        Json types = Json::object();
        for (const auto& [type, bytes] : estimate->types) types[dtype_info(type).name] = bytes;
        out["load_estimate"] =
            Json{{"family", estimate->family},
                 {"active_parameters", estimate->active_parameters},
                 {"types", std::move(types)},
                 {"weight_bytes", estimate->weight_bytes},
                 {"active_bytes", estimate->active_bytes},
                 {"device", estimate->device},
                 {"memory", estimate->memory},
                 {"fits", estimate->fits},
                 {"context", estimate->context},
                 {"bandwidth", estimate->bandwidth},
                 {"chat_template", estimate->chat_template},
                 {"tool_form", std::string(name_of(estimate->tools.kind))},
                 {"tool_call", example_of(estimate->tools)},
                 {"reasoning",
                  estimate->reasoning ? Json::array({estimate->reasoning.begin, estimate->reasoning.end}) : Json()},
                 {"unknown_keys", estimate->unknown},
                 {"text", describe(*estimate)}};
    }
    std::int64_t parameters = 0;
    Json         tensors    = Json::array();
    for (const GgufTensor& t : file.tensors()) {
        Json dims = Json::array();
        for (int i = 0; i < t.n_dims; i++) dims.push_back(t.dims[std::size_t(i)]);
        tensors.push_back(
            Json{{"name", t.name}, {"type", dtype_info(t.type).name}, {"dims", std::move(dims)}, {"bytes", t.bytes}});
        parameters += t.view().rows * t.view().cols;
    }
    out["parameters"] = parameters;
    Json metadata     = Json::object();
    for (const auto& [key, value] : file.metadata()) metadata[key] = to_json(value);
    out["metadata"] = std::move(metadata);
    out["tensors"]  = std::move(tensors);
    if (auto ok = check_unchanged(checked->file); !ok) return complain(ok.error());
    return print_json(out);
}

int tokenize(const Arguments& a) {
    Result<Checked> checked = open_checked(a.model);
    if (!checked) return complain(checked.error());
    const Tokenizer& tokenizer = checked->tokenizer;
    if (a.bos && tokenizer.bos() < 0)
        return complain({ErrorKind::input, cat(a.model, ": --bos, but the vocabulary names no BOS token")});
    const auto print_tokens = [&](std::string_view text) {
        EncodeOptions options;
        options.add_special    = false;
        options.parse_special  = !a.no_special;
        std::vector<Token> ids = tokenizer.encode(text, options);
        if (a.bos) ids.insert(ids.begin(), tokenizer.bos());
        Json pieces = Json::array();
        for (Token id : ids) pieces.push_back(std::string(tokenizer.piece(id)));
        return print_json(Json{{"ids", ids}, {"pieces", std::move(pieces)}});
    };
    const std::string input = read_input();
    if (!a.json_lines) return print_tokens(input);
    std::istringstream lines(input);
    int                number = 0, code = 0;
    for (std::string line; code == 0 && std::getline(lines, line);) {
        const Result<Json> text = json_parse(line);
        number++;
        if (!text) return complain({ErrorKind::input, cat("line ", number, ": ", text.error().message)});
        if (!text->is_string()) return complain({ErrorKind::input, cat("line ", number, " is no JSON string")});
        code = print_tokens(text->get_ref<const std::string&>());
    }
    return code;
}

int detokenize(const Arguments& a) {
    Result<Checked> checked = open_checked(a.model);
    if (!checked) return complain(checked.error());
    Result<std::vector<Token>> ids = parse_ids(a.ids);
    if (!ids) return complain(ids.error(), 2);
    for (Token id : *ids)
        if (id < 0 || id >= checked->tokenizer.vocab_size())
            return complain({ErrorKind::input,
                             cat("token ", id, " is outside the vocabulary of ", checked->tokenizer.vocab_size())});
    const std::string bytes = checked->tokenizer.decode(*ids);
    return print_json(
        Json{{"text", bytes}, {"hex", hexadecimal(bytes)}}); // json_dump() replaces bytes that are not UTF-8
}

// With a context of `n_tokens`, as the request needs.
Result<Engine> load_engine(const Arguments& a, std::size_t n_tokens) {
    EngineOptions options = a.engine;
    options.context       = int(std::min(n_tokens, std::size_t(1) << 30));
    options.max_sequences = std::max(1, a.beam);
    return Engine::load(a.model, options);
}

// Runs one request to its end and gathers its events in one.
Result<Output> run(const std::string& model, Engine& engine, Request request) {
    Result<RequestId> id = engine.submit(std::move(request));
    if (!id) return std::unexpected(id.error());
    Output              all;
    std::vector<Output> events;
    while (all.finish == FinishReason::none && engine.step(events)) {
        for (Output& e : events) {
            all.tokens.insert(all.tokens.end(), e.tokens.begin(), e.tokens.end());
            all.logprobs.insert(all.logprobs.end(), e.logprobs.begin(), e.logprobs.end());
            if (!e.prompt_logprobs.empty()) all.prompt_logprobs = std::move(e.prompt_logprobs);
            if (!e.prompt_logits.empty()) all.prompt_logits = std::move(e.prompt_logits);
            all.finish  = e.finish;
            all.message = std::move(e.message);
        }
        events.clear();
    }
    if (all.finish == FinishReason::failed) return fail(model, ": ", all.message);
    return all;
}

Json to_json(const TokenLogprob& t) { return Json{{"id", t.token}, {"logprob", t.logprob}}; }

int logits(const Arguments& a) {
    Result<std::vector<Token>> ids = parse_ids(a.ids);
    if (!ids) return complain(ids.error(), 2);
    if (auto ok = check_not_input(a.raw_file, Gguf::files(a.model)); !ok) return complain(ok.error());
    Result<Engine> engine = load_engine(a, ids->size() + 1);
    if (!engine) return complain(engine.error());
    Request request;
    request.prompt               = *ids;
    request.max_tokens           = 1;
    request.sampling.temperature = 0;
    request.sampling.logprobs    = std::max(a.top, 1);
    request.prompt_logprobs      = a.all ? 1 : -1;
    request.return_logits        = !a.raw_file.empty();
    Result<Output> output        = run(a.model, *engine, std::move(request));
    if (!output) return complain(output.error());
    if (output->logprobs.empty()) return complain({ErrorKind::limit, "the prompt does not fit into the KV pool"});

    Json top = Json::array();
    for (const TokenLogprob& t : output->logprobs[0].top)
        if (int(top.size()) < a.top) top.push_back(to_json(t));
    Json out{{"top", std::move(top)}};
    if (a.all) {
        // logprobs[i]: of token i + 1 given the tokens before it; top1[i]: the best continuation after token i
        Json logprobs = Json::array(), top1 = Json::array();
        for (const PositionLogprobs& p : output->prompt_logprobs) {
            logprobs.push_back(p.chosen.logprob);
            top1.push_back(p.top[0].token);
        }
        top1.push_back(output->logprobs[0].top[0].token);
        out["logprobs"] = std::move(logprobs);
        out["top1"]     = std::move(top1);
    }
    if (!a.raw_file.empty()) {
        OutputFile file(a.raw_file);
        file.write(std::as_bytes(std::span(output->prompt_logits)));
        if (auto ok = file.finish(); !ok) return complain(ok.error());
    }
    return print_json(out);
}

int generate(const Arguments& a) {
    Result<std::vector<Token>> ids = parse_ids(a.ids);
    if (!ids) return complain(ids.error(), 2);
    Result<Engine> engine = load_engine(a, ids->size() + std::size_t(a.n) + 1);
    if (!engine) return complain(engine.error());
    Request request;
    request.prompt               = *ids;
    request.max_tokens           = a.n;
    request.ignore_end           = a.ignore_eos;
    request.sampling.temperature = 0;
    if (a.beam > 0) {
        request.n = request.beam_width = a.beam;
        request.length_penalty         = a.length_penalty;
        request.early_stopping         = EarlyStopping::never;
        Result<RequestId> id           = engine->submit(std::move(request));
        if (!id) return complain(id.error());
        std::vector<Output> events;
        while (engine->step(events)) {}
        Json beams = Json::array();
        for (const Output& e : events) {
            if (e.finish == FinishReason::failed) return complain({ErrorKind::input, cat(a.model, ": ", e.message)});
            beams.push_back(Json{{"ids", e.tokens}, {"logprob", e.logprob}, {"score", e.score}});
        }
        return print_json(Json{{"beams", std::move(beams)}});
    }
    request.sampling.logprobs = 0;
    Result<Output> output     = run(a.model, *engine, std::move(request));
    if (!output) return complain(output.error());
    Json logprobs = Json::array();
    for (const PositionLogprobs& p : output->logprobs) logprobs.push_back(p.chosen.logprob);
    return print_json(Json{{"ids", output->tokens}, {"logprobs", std::move(logprobs)}});
}

// The template of the file by its name; without one tool_use for tools, where it is there, else the default.
Result<std::string> template_of(const Gguf& file, const std::string& name, bool has_tools) {
    constexpr std::string_view key  = "tokenizer.chat_template";
    const auto                 find = [&](std::string_view own) -> Result<std::string_view> {
        Result<std::string_view> text = file.text(cat(key, ".", own), "");
        return own != "default" || !text || !text->empty() ? text : file.text(key, "");
    };
    Result<std::string_view> text = find(!name.empty() ? name : has_tools ? "tool_use" : "default");
    if (text && text->empty() && name.empty()) text = find("default");
    if (!text) return std::unexpected(text.error());
    if (text->empty())
        return fail(file.path(), ": there is no chat template", name.empty() ? "" : " ",
                    name.empty() ? "" : quote(name));
    return std::string(*text);
}

// Of --file, or else of the model: where it has several, of the one for tools if `has_tools`.
Result<std::string> template_source(const Arguments& a, bool has_tools) {
    if (a.template_file.empty()) {
        Result<Gguf> file = Gguf::open(a.model);
        return file ? template_of(*file, a.template_name, has_tools) : std::unexpected(file.error());
    }
    std::ifstream file(a.template_file, std::ios::binary);
    std::string   jinja{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    if (!file && jinja.empty()) return std::unexpected(cannot_read(a.template_file));
    return jinja;
}

int tool_calls(const Arguments& a) {
    std::optional<Checked> checked;
    RecordedAnswers        how;
    if (!a.model.empty()) {
        Result<Checked> opened = open_checked(a.model);
        if (!opened) return complain(opened.error());
        checked       = std::move(*opened);
        how.tokenizer = &checked->tokenizer;
    }
    Result<std::string> source = template_source(a, true);
    if (!source) return complain(source.error());
    const Result<ChatTemplate> parsed = ChatTemplate::parse(*source, a.template_file);
    if (!parsed) return complain({ErrorKind::input, cat("the chat template: ", parsed.error().message)});
    how.form =
        a.tool_form == "auto" ? call_form(*parsed) : CallForm(tool_form_of(a.tool_form).value_or(ToolForm::none));
    if (how.form == ToolForm::none || how.form == ToolForm::other) how.form = ToolForm::hermes; // as the server does
    how.reasoning = reasoning_form(*parsed);
    int number    = 0;
    for (std::string text; std::getline(std::cin, text);) {
        number++;
        const Result<Json> line = json_parse(text);
        if (!line) return complain({ErrorKind::input, cat("line ", number, ": ", line.error().message)});
        const Result<Json> read = read_recorded(how, *line);
        if (!read) return complain({ErrorKind::input, cat("line ", number, ": ", read.error().message)});
        if (const int code = print_json(*read)) return code;
    }
    return 0;
}

int render(const Arguments& a) {
    const std::string  input     = read_input();
    const Result<Json> variables = json_parse(input);
    if (!variables) return complain(variables.error());
    if (!variables->is_object()) return complain({ErrorKind::input, "the input is no JSON object"});
    const auto                tools = variables->find("tools");
    const Result<std::string> jinja =
        template_source(a, tools != variables->end() && tools->is_array() && !tools->empty());
    if (!jinja) return complain(jinja.error());
    Result<JinjaTemplate> parsed = JinjaTemplate::parse(*jinja);
    if (!parsed) return complain({ErrorKind::input, cat("the chat template: ", parsed.error().message)});
    const Result<std::int64_t> now = local_seconds(a.now);
    if (!now) return complain(now.error());
    constexpr std::array<std::string_view, 2> trusted{"bos_token", "eos_token"};
    const Result<MarkedText>                  text =
        parsed->render(*variables, {.trusted = trusted, .now = *now, .bytes = input.size()});
    if (!text) return complain(text.error());
    Json marks = Json::array();
    for (const TextSpan& s : text->input) marks.push_back(Json::array({s.begin, s.end}));
    return print_json(Json{{"text", text->bytes}, {"input", std::move(marks)}});
}

int constrain_text(const Arguments& a) {
    Result<Checked> checked = open_checked(a.model);
    if (!checked) return complain(checked.error());
    ConstrainTests options = a.constrain_tests;
    options.schema = {.ordered = a.key_order == "declared", .plain_numbers = a.numbers == "plain", .closed = false};
    if (!a.schema_tests.empty()) {
        std::ifstream file;
        if (a.schema_tests != "-") {
            file.open(a.schema_tests, std::ios::binary);
            if (!file) return complain(cannot_read(a.schema_tests));
        }
        int        failed = 0;
        const auto ok     = constrain_tests(checked->tokenizer, a.schema_tests == "-" ? std::cin : file, options,
                                            [&](const Json& line) { failed |= print_json(line); });
        return ok ? failed : complain({ErrorKind::input, cat(a.schema_tests, ": ", ok.error().message)});
    }
    Result<std::optional<ConstraintSpec>> spec = constraint_of(a.constraint);
    if (!spec) return complain(spec.error());
    (*spec)->ordered       = options.schema.ordered;
    (*spec)->plain_numbers = options.schema.plain_numbers;
    (*spec)->closed        = false;
    Result<Json> out       = constrain(checked->tokenizer, **spec, read_input());
    return out ? print_json(*out)
               : complain(in_constraint(a.constraint, out.error()), a.constraint.regex.empty() ? 1 : 2);
}

// Whether no subcommand is named, but what `show` takes: a file, or flags that say where it is. A word that could be a mistyped subcommand is none.
bool names_only_a_file(const CLI::App& app, const std::vector<std::string>& words) {
    if (words.empty() || words[0].empty()) return false;
    for (const std::string& word : words) {
        if (word == "-h" || word == "--help" || word == "--version") return false;
        if (!app.get_subcommands([&](const CLI::App* c) { return c->check_name(word); }).empty()) return false;
    }
    std::error_code ignored;
    return looks_like_flag(words[0]) || words[0].contains('/') || words[0].ends_with(".gguf") ||
           std::filesystem::exists(words[0], ignored);
}

} // namespace

int main(int argc, char** argv) try {
    Arguments a;
    CLI::App  app{
        "Shows what is in a GGUF file and runs single parts of the engine; most commands print one line of JSON. "
         "A file without a subcommand is shown.",
        "inspect"};
    app.require_subcommand(1);
    add_version_flag(app);
    auto command = [&](const char* name, const char* what) {
        CLI::App* c = app.add_subcommand(name, what);
        c->add_option("model", a.model, "GGUF file, or its URL");
        add_hub_flags(*c, a.source.hub);
        return c;
    };
    auto run_options = [&](CLI::App* c) {
        c->add_option("--ids", a.ids, "prompt, as token ids: 1,2,3")->required();
        add_kv_type_flag(*c, a.engine);
        add_block_size_flag(*c, a.engine);
        add_number(*c, "-t,--threads", a.engine.threads, 0, 1024, "threads; 0: one per physical core");
        add_device_flags(*c, a.engine);
        c->add_option("--isa", a.engine.isa, "instruction set; default: the best this CPU has")
            ->check(CLI::IsMember({"plain", "avx2", "avxvnni", "avx512", "avx512gfni", "amx"}));
        return c;
    };
    CLI::App* show_command = command("show", "print what the file is; as JSON also metadata and tensors");
    show_command->add_flag("--json", a.json, "JSON on a terminal, too");
    CLI::App* tokenize_command = command("tokenize", "text on standard input (any bytes) → token ids and pieces");
    tokenize_command->add_flag("--no-special", a.no_special,
                               "treat text that looks like a special token as plain text");
    tokenize_command->add_flag("--bos", a.bos, "put the BOS token first");
    tokenize_command->add_flag("--json-lines", a.json_lines,
                               "each line of standard input is a text, as a JSON string; prints a line for each");
    CLI::App* detokenize_command = command("detokenize", "token ids → text, and its exact bytes in hexadecimal");
    detokenize_command->add_option("--ids", a.ids, "token ids: 1,2,3")->required();
    CLI::App* logits_command = run_options(command("logits", "print the most likely next tokens of a prompt"));
    add_number(*logits_command, "--top", a.top, 0, 1 << 20, "number of tokens to print");
    logits_command->add_flag("--all", a.all, "print log-probabilities and the most likely token at every position");
    logits_command->add_option("--raw", a.raw_file, "write the last row of logits to this file, as float32");
    CLI::App* generate_command = run_options(command("generate", "continue a prompt greedily"));
    add_number(*generate_command, "-n", a.n, 1, 1 << 24, "tokens to generate");
    generate_command->add_flag("--ignore-eos", a.ignore_eos, "go on after an end token");
    generate_command->add_option("--beam", a.beam, "use beam search of this width; prints all beams, best first")
        ->check(within(1, 256));
    add_number(*generate_command, "--length-penalty", a.length_penalty, -100, 100,
               "rank beams by log-probability / length ^ this");
    CLI::App* template_command = command(
        "template",
        R"({"messages": [{"role": "user", "content": "Hello"}], "add_generation_prompt": true} on standard input → the prompt's text)");
    template_command->add_option("--file", a.template_file, "file with a Jinja template, in place of the model");
    template_command->add_option("--name", a.template_name,
                                 "one of the file's named templates: default, tool_use, ...");
    add_now_flag(*template_command, a.now, "current time for the template: 2024-07-26T10:00:00");

    CLI::App* calls_command = command(
        "tool-calls",
        R"(lines {"tools": [...], "tokens": [[1, "text"], ...], "prompt": "its end"} on standard input: an answer in deltas → its content, reasoning and calls of tools, whole and in deltas)");
    calls_command->add_option("--file", a.template_file, "file with a Jinja template, in place of the model's");
    calls_command->add_option("--name", a.template_name, "one of the file's named templates: default, tool_use, ...");
    add_tool_form_flag(*calls_command, a.tool_form);

    CLI::App* constrain_command = command("constrain",
                                          "text on standard input → whether a constraint accepts it, or the byte where "
                                          "it is refused; exit code 0 for both");
    auto*     constraints       = constrain_command->add_option_group("constraint");
    add_constraint_flags(*constraints, a.constraint);
    auto* schema_tests = constraints->add_option(
        "--schema-tests", a.schema_tests,
        R"(lines {"id", "schema", "tests": [{"valid", "data"}]}, from a file or - for standard input)");
    constraints->require_option(1);
    constrain_command->add_option("--key-order", a.key_order, "order of an object's members: as declared, or any")
        ->check(CLI::IsMember({"declared", "any"}))
        ->capture_default_str();
    constrain_command
        ->add_flag("--masks", a.constrain_tests.masks,
                   "print also the vocabulary, and the tokens and masks of each test")
        ->needs(schema_tests);
    constrain_command
        ->add_option("--walks", a.constrain_tests.n_walks, "print also so many random texts under each schema's masks")
        ->check(within(0, 1000000))
        ->needs(schema_tests);
    constrain_command->add_option("--seed", a.constrain_tests.seed, "of random texts")->needs(schema_tests);
    constrain_command->add_option("--numbers", a.numbers, "integers as 12 only (plain), or as 12.0 also (any)")
        ->check(CLI::IsMember({"plain", "any"}))
        ->capture_default_str();

    std::vector<std::string> typed(argv + 1, argv + argc);
    if (names_only_a_file(app, typed)) typed.insert(typed.begin(), "show");
    const OwnFlag           own   = flags_of_command(app, typed);
    Result<TranslatedFlags> flags = translate_source_flags(typed, own);
    if (!flags) {
        complain(flags.error());
        return 2;
    }
    try {
        app.parse(std::vector<std::string>(flags->words.rbegin(), flags->words.rend()));
        refuse_empty(app);
        const HubModel& hub  = a.source.hub;
        const bool      some = !a.model.empty() || !hub.repo.empty() || !hub.url.empty() || !hub.file.empty();
        if (template_command->parsed() && some == !a.template_file.empty())
            throw CLI::ValidationError("template takes a MODEL, -hf USER/MODEL or --file");
        if (calls_command->parsed() && !some && a.template_file.empty())
            throw CLI::ValidationError("tool-calls takes a MODEL, -hf USER/MODEL or --file");
        if (!template_command->parsed() && !calls_command->parsed() && !some)
            throw CLI::ValidationError(app.get_subcommands()[0]->get_name() + " takes a MODEL or -hf USER/MODEL");
    } catch (const CLI::ParseError& e) {
        if (e.get_exit_code() == 0) return app.exit(e); // --help
        const auto meant = [&](const std::string& word) { return meant_source_flag(word, own); };
        return complain({ErrorKind::input, sentence_of(app, e, meant)}, 2);
    }
    if (a.model.starts_with("https://") || a.model.starts_with("http://")) a.source.word = std::exchange(a.model, "");
    if (const std::optional<int> code = find_model("inspect", a.source, a.model)) return *code;
    if (show_command->parsed()) return show(a);
    if (tokenize_command->parsed()) return tokenize(a);
    if (detokenize_command->parsed()) return detokenize(a);
    if (constrain_command->parsed()) return constrain_text(a);
    if (calls_command->parsed()) return tool_calls(a);
    try {
        if (logits_command->parsed()) return logits(a);
        if (generate_command->parsed()) return generate(a);
    } catch (const std::runtime_error& e) { // a GPU is lost
        return complain({ErrorKind::system, e.what()});
    }
    return render(a);
} catch (const std::bad_alloc&) {
    return out_of_memory("inspect");
}
