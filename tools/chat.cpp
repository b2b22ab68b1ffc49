// chat: a conversation with a model in the terminal, or line by line through a pipe.
// Exit codes: 0, 1 (a file or model that cannot be used, a piped message without an answer: one line on stderr), 2 (wrong usage), 130 (a
// second Ctrl-C; in a pipe and with -st the first).

import quire.core.base;
import quire.core.output_file;
import quire.engine.files.cipher;
import quire.engine.kv_quality;
import quire.engine.load_estimate;
import quire.engine.sampling_defaults;
import quire.text.templates.chat_template;
import quire.tools.chat.conversation;
import quire.tools.chat.flags;
import quire.tools.chat.model_list;
import quire.tools.common.constraint_flags;
import quire.tools.common.engine_flags;
import quire.tools.common.foreign_flags;
import quire.tools.common.model_source;
import quire.tools.common.processes;
import quire.tools.common.read_file;
import quire.tools.common.terminal;
import quire.tools.common.word_wrap;
import quire.tools.flags.cli;

using namespace quire;

namespace {

constexpr std::string_view commands =
    "/exit  /clear (new conversation)  /regen (answer again)  /read FILE (into the next message)  /help";
constexpr std::string_view help =
    "  /exit        leave, as Ctrl-D or Ctrl-C twice\n"
    "  /clear       a new conversation\n"
    "  /regen       answer again, or read on where Ctrl-C stopped\n"
    "  /read FILE   put a file's text before the next message; Tab completes names\n"
    "  //text       a message that begins with a slash\n"
    "A \\ at the end of a line or Alt-Enter continues a message on the next line; a pasted text is one message.\n"
    "Ctrl-C stops an answer or clears the line, Ctrl-R searches in what was typed before.";

// A line on the screen.
void tell(std::string_view text) { std::printf("%s\n", wrapped(text, screen_columns()).c_str()); }

void warn(std::string_view text) { say_error("chat", text); }

int complain(const Error& error, int code = 1) {
    warn(error.message);
    return code;
}

// -- the loop -------------------------------------------------------------------------------------------

// A message of one line, or of several if all but the last end with \; nothing at the end of the input.
std::optional<std::string> read_message(LineReader& reader) {
    std::string message;
    for (std::string prompt = "> ";; prompt = "| ") {
        Line line = reader.read(prompt);
        if (line.end == LineEnd::end) return message.empty() ? std::nullopt : std::optional(message);
        if (line.end == LineEnd::abandoned) return "";
        if (!line.text.empty()) reader.remember(line.text);
        message += line.text;
        if (!message.ends_with('\\')) return message;
        message.back() = '\n';
    }
}

std::string without_blanks_around(std::string_view text) {
    const std::size_t first = text.find_first_not_of(" \t\r");
    return first == std::string::npos ? ""
                                      : std::string(text.substr(first, text.find_last_not_of(" \t\r") - first + 1));
}

// ~ and ~/x are in the home directory.
std::string with_home(const std::string& path) {
    const char* home = std::getenv("HOME");
    if (home == nullptr || !(path == "~" || path.starts_with("~/"))) return path;
    return home + path.substr(1);
}

constexpr std::string_view command_names[] = {"/exit", "/clear", "/regen", "/read ", "/help"};

// The texts to which Tab completes the beginning of a line: commands, or files after /read.
std::vector<std::string> completions(const std::string& text) {
    std::vector<std::string> found;
    const std::string        read = "/read ";
    if (!text.starts_with(read)) {
        for (std::string_view name : command_names)
            if (!text.empty() && name.starts_with(text)) found.emplace_back(name);
        return found;
    }
    const std::string path   = text.substr(read.size());
    const std::size_t slash  = path.rfind('/');
    const std::string folder = slash == std::string::npos ? "" : path.substr(0, slash + 1),
                      name   = path.substr(folder.size());
    std::error_code error;
    for (std::filesystem::directory_iterator at(folder.empty() ? "." : with_home(folder), error), end;
         !error && at != end; at.increment(error)) {
        const std::string file = at->path().filename().string();
        if (!file.starts_with(name) || (name.empty() && file[0] == '.')) continue;
        std::error_code ignored;
        found.push_back(cat(read, folder, file, at->is_directory(ignored) ? "/" : ""));
    }
    std::ranges::sort(found);
    return found;
}

// Runs a command. False: the conversation is over.
bool obey(Chat& chat, const std::string& line, std::string& attached) {
    const std::size_t space   = line.find(' ');
    const std::string command = line.substr(0, space),
                      rest =
                          space == std::string::npos ? "" : without_blanks_around(std::string_view(line).substr(space));
    if (command == "/exit") return false;
    if (command == "/help") {
        chat.note(help);
    } else if (command == "/clear") {
        chat.clear();
        attached.clear();
        chat.note("A new conversation.");
    } else if (command == "/regen") {
        chat.regenerate();
    } else if (command == "/read" && !rest.empty()) {
        const Result<std::string> text = read_file(with_home(rest));
        if (!text) {
            chat.note(text.error().message);
            return true;
        }
        std::string both = cat(attached, *text, text->ends_with('\n') ? "" : "\n");
        if (auto fits = chat.check_length(both); !fits) {
            chat.note(cat(quote(rest), " is not put before the next message: ",
                          attached.empty() ? "" : "together with what /read put there, ", fits.error().message, '.'));
            return true;
        }
        chat.note(cat("The next message will begin with ", text->size(), " bytes of ", quote(rest), '.'));
        attached = std::move(both);
    } else {
        chat.note(cat("Commands: ", commands, "  (// sends a line that begins with a slash)"));
    }
    return true;
}

// Returns the exit code: 1 where a script, which sees answers alone, lacks one.
int converse(Chat& chat, LineReader& reader, const ChatArguments& a, std::optional<std::string> first, bool script) {
    std::string attached; // by /read
    int         code = 0;
    if (first) {
        const bool answered = chat.say(std::move(*first));
        if (a.single_turn) return answered ? 0 : 1;
        if (script && !answered) code = 1;
    }
    while (std::optional<std::string> line = read_message(reader)) {
        const std::string bare = without_blanks_around(*line);
        if (bare.find_first_not_of('\n') == std::string::npos) continue;
        const bool slashes = bare.starts_with("//");
        if (bare[0] == '/' && !slashes && bare.find('\n') == std::string::npos) {
            if (!obey(chat, bare, attached)) return code;
            continue;
        }
        const bool answered = chat.say(attached + (slashes ? bare.substr(1) : *line));
        if (!answered && !attached.empty()) chat.note("What /read put before it is gone, too.");
        attached.clear();
        if (a.single_turn) return answered ? 0 : 1;
        if (script && !answered) code = 1;
    }
    return code;
}

// All of a piped text as one message; nothing if there are but blanks.
Result<std::optional<std::string>> piped_message(LineReader& reader) {
    Result<std::string> text = reader.read_all();
    if (!text) return std::unexpected(text.error());
    while (text->ends_with('\n') || text->ends_with('\r')) text->pop_back();
    if (text->find_first_not_of(" \t\r\n") == std::string::npos) return std::nullopt;
    return std::optional(std::move(*text));
}

// Replaces \n, \t and the like, as C does; a shell does not.
std::string without_escapes(const std::string& text) {
    constexpr std::string_view names = "nrt\\'\"", meant = "\n\r\t\\'\"";
    std::string                out;
    for (std::size_t i = 0; i < text.size(); i++) {
        const std::size_t which = text[i] == '\\' && i + 1 < text.size() ? names.find(text[i + 1]) : std::string::npos;
        out += which == std::string::npos ? text[i] : meant[which];
        i += which != std::string::npos;
    }
    return out;
}

// And takes from the file how to sample.
Result<ChatTemplate> choose_template(ChatArguments& a) {
    const Result<Gguf> file = Gguf::open(a.model);
    if (!file) return std::unexpected(file.error());
    Result<std::string> source =
        a.chat_template.file.empty() ? Result<std::string>("") : read_file(a.chat_template.file);
    if (!source) return std::unexpected(source.error());
    if (const auto now = local_seconds(a.now); !now) return std::unexpected(now.error());
    Result<ChatTemplate> chosen = ChatTemplate::choose(*file, a.chat_template.name, *source);
    if (!chosen) return chosen;
    if (auto ok = chosen->set_defaults(variables_of(a.chat_template)); !ok) return std::unexpected(ok.error());
    if (const FileSampling taken = take_file_sampling(*file, a.given, a.samplers); !taken.refused.empty())
        warn(cat("not taken from the file, since no such value is possible: ", taken.refused));
    return chosen;
}

int run(ChatArguments& a) {
    const TerminalFacts facts       = terminal_facts();
    const bool          interactive = facts.in && facts.out;
    on_interrupt(OnInterrupt::leave);
    if (a.list_models) {
        const std::string list = model_list(models_folder());
        std::fputs((facts.out ? wrapped(list, screen_columns()) : list).c_str(), stdout);
        const auto ok = flush_output();
        return ok ? 0 : complain(ok.error());
    }

    if (a.escapes)
        for (std::string* text : {&a.prompt, &a.system}) *text = without_escapes(*text);
    std::optional<std::string> first;
    if (!a.prompt.empty()) first = a.prompt;
    if (!a.prompt_file.empty()) {
        Result<std::string> text = read_file(a.prompt_file);
        if (!text) return complain(text.error());
        if (text->ends_with('\n')) text->pop_back();
        first = *text;
    }
    Result<std::optional<ConstraintSpec>> constraint = constraint_of(a.constraint);
    if (!constraint) return complain(constraint.error());
    if (*constraint) {
        Result<std::shared_ptr<Constraint>> made = compile_constraint(**constraint);
        if (!made) return complain(in_constraint(a.constraint, made.error()), a.constraint.regex.empty() ? 1 : 2);
        a.answers = std::move(*made);
    }
    if (const std::optional<int> code = find_model("chat", a.source, a.model)) return *code;
    if (a.model.empty()) {
        Result<std::string> found = default_model();
        if (!found) return complain(found.error());
        a.model = *found;
    }

    Result<ChatTemplate> chat_template = choose_template(a);
    if (!chat_template) {
        const bool usage = !a.chat_template.name.empty() && chat_template.error().kind != ErrorKind::system;
        return complain(chat_template.error(), usage ? 2 : 1);
    }

    EngineOptions& options          = a.engine;
    options.max_sequences           = 1;
    options.step_seconds            = interactive ? 0.7 : 0; // Ctrl-C is seen between two steps
    const std::string name          = std::filesystem::path(a.model).filename().string();
    bool              template_told = false; // the first lines name the file's template
    const std::string type_said     = choose_kv_type(a.model, options);
    if (const std::string said = Cipher::exposed(options.kv_key); !said.empty()) warn(said);
    if (interactive && !a.single_turn)
        if (const Result<LoadEstimate> estimate = estimate_load(a.model, options)) {
            tell(printable(describe(*estimate)));
            template_told =
                !estimate->chat_template.empty() && a.chat_template.file.empty() && a.chat_template.name.empty();
        }
    if (auto ok = read_processes(options); !ok) return complain(ok.error(), 2);
    ProgressBar bar(cat("loading ", printable(name)), facts.err && !facts.dumb);
    bar.show(0);
    Result<Engine> engine = Engine::load(a.model, options, [&](double fraction) { bar.show(fraction); });
    bar.clear();
    if (!engine) return complain(engine.error());
    if (engine->follows()) return follow(*engine, "chat");
    if (const std::string warning = engine->warning(); !warning.empty()) warn(warning);
    if (chat_template->is_fallback())
        warn("the model has no chat template; using chatml (--chat-template names another)");

    if (interactive && !a.single_turn) {
        tell(cat("quire  ", printable(name)));
        tell(engine->describe());
        for (const std::string& said : {type_said, prompt_quality(a.model, options), engine->files_found()})
            if (!said.empty()) tell(said);
        if (!template_told) tell(cat("chat template: ", chat_template->name()));
        tell(commands);
        tell("\\ at the end of a line continues it; Ctrl-C stops an answer, Ctrl-D leaves.\n");
        std::fflush(stdout);
    }
    Chat chat(*engine, a, *chat_template, facts);
    if (first && interactive && !a.single_turn) std::printf("> %s\n", printable(*first).c_str());
    // Without a conversation that goes on, Ctrl-C ends the program: half an answer must not look like a whole one.
    on_interrupt(facts.in && !a.single_turn ? OnInterrupt::ask : OnInterrupt::leave);
    int code = 0;
    {
        LineReader reader(facts, interactive ? history_path() : "", completions);
        if (!facts.in && (first || a.single_turn)) {
            Result<std::optional<std::string>> piped = piped_message(reader);
            if (!piped) return complain(piped.error());
            if (first && *piped) *first += "\n\n" + **piped; // -p is a question about the piped text
            else if (*piped) first = std::move(*piped);
        }
        if (!facts.in && !first && !a.single_turn && facts.err)
            chat.note("Each line of the piped text is a message; with -st all of it is one.");
        code = converse(chat, reader, a, std::move(first), !facts.in);
        if (chat.failed()) code = 1;
    }
    on_interrupt(OnInterrupt::leave);
    if (interactive && !a.single_turn) std::puts("");
    if (std::fflush(stdout) != 0 || std::ferror(stdout))
        return complain({ErrorKind::system, "cannot write to standard output"});
    return code;
}

} // namespace

int main(int argc, char** argv) try {
    ChatArguments a;
    CLI::App      app{"A conversation with a GGUF model.", "chat"};
    app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast); // as llama.cpp does
    add_version_flag(app);
    add_chat_flags(app, a);
    const auto color_alone = [](std::vector<std::string>& words) { // --color alone, as llama.cpp had it
        for (std::size_t i = 0; i < words.size(); i++)
            if (words[i] == "--color" && (i + 1 == words.size() || words[i + 1].starts_with('-')))
                words.insert(words.begin() + std::ptrdiff_t(i) + 1, "on");
    };
    if (const std::optional<int> code = parse_flags(app, Program::chat, argc, argv, color_alone)) return *code;
    try {
        return run(a);
    } catch (const std::runtime_error& e) { // a GPU is lost
        warn(e.what());
        return 1;
    }
} catch (const std::bad_alloc&) {
    return out_of_memory("chat");
}
