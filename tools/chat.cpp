// chat: a conversation with a model in the terminal, or line by line through a pipe.
// Exit codes: 0, 1 (a file or model that cannot be used: one line on stderr), 2 (wrong usage), 130 (a second Ctrl-C).
#include <CLI/CLI.hpp>

import quire.core.base;
import quire.text.chat_template;
import quire.model_file.config;
import quire.engine.engine;
import quire.tools.common.foreign_flags;
import quire.schedule.request;
import quire.core.std;
import quire.tools.chat.terminal;
import quire.text.tokenizer;

using namespace quire;

namespace {

struct Arguments {
    std::string model, prompt, prompt_file, system, form_name, form_file, kv_type = "f16", color = "auto",
                                                                          device = "auto";
    double gpu_memory_utilization                                                = 0.92;
    bool   deterministic                                                         = false;
    int    n = -1, context = 0, threads = 0, block_size = 16, kv_blocks = 0, top_k = 40, repeat_last_n = 64;
    std::optional<float> temperature; // default 0.8; 0 for the toy model
    float                top_p = 0.95f, min_p = 0.05f, repeat = 1, presence = 0, frequency = 0;
    std::int64_t         seed = -1;
    bool single_turn = false, no_prefix_cache = false, ignore_eos = false, timings = false, no_timings = false,
         escapes = false;
};

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

int complain(const Error& error) {
    std::fprintf(stderr, "chat: %s\n", error.message.c_str());
    return 1;
}

Result<std::string> read_file(const std::string& path) {
    constexpr std::size_t most = std::size_t(16) << 20;
    std::error_code       ignored;
    if (std::filesystem::is_directory(path, ignored))
        return fail_with(ErrorKind::system, "cannot read ", quote(path), ": it is a directory");
    if (!std::filesystem::is_regular_file(path, ignored))
        return fail_with(ErrorKind::system, "cannot read ", quote(path), ": no such file");
    std::ifstream file(path, std::ios::binary);
    std::string   text;
    char          buffer[65536];
    while (file.read(buffer, sizeof buffer), file.gcount() > 0) {
        text.append(buffer, std::size_t(file.gcount()));
        if (text.size() > most) return fail_with(ErrorKind::limit, quote(path), " has more than ", most >> 20, " MiB");
    }
    if (!file.eof()) return fail_with(ErrorKind::system, "cannot read ", quote(path));
    return text;
}

// Without -m: the first models/*.gguf beside the program.
Result<std::string> default_model() {
    std::error_code             error;
    const std::filesystem::path folder =
        std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / "models";
    std::vector<std::string> found;
    for (std::filesystem::directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
        if (at->path().extension() == ".gguf") found.push_back(at->path().string());
    if (found.empty()) return fail("no model: name one with -m FILE.gguf or put one into ", folder.string());
    return *std::ranges::min_element(found);
}

// -- a conversation and its tokens ----------------------------------------------------------------------

class Chat {
public:
    Chat(Engine& engine, const Arguments& arguments, ChatForm form, TerminalFacts facts)
        : engine_(engine), arguments_(arguments), form_(form),
          color_(arguments.color == "on" ||
                 (arguments.color == "auto" && facts.out && !facts.dumb && std::getenv("NO_COLOR") == nullptr)),
          timings_(arguments.timings || (facts.in && facts.out && !arguments.no_timings)),
          timings_file_(facts.out ? stdout : stderr), progress_(facts.err && !facts.dumb),
          seed_(arguments.seed >= 0 ? std::uint64_t(arguments.seed) : std::random_device{}()) {
        clear();
    }

    bool failed() const { return failed_; } // an answer ended because the model's numbers are not finite
    bool has_question() const { return !messages_.empty() && messages_.back().role == "user"; }

    void clear() {
        messages_.clear();
        if (!arguments_.system.empty()) messages_.push_back({"system", arguments_.system});
        known_ = {};
    }

    // Adds the user's message and answers it. False: there was no answer, and the message is gone again.
    bool say(std::string text) {
        messages_.push_back({"user", std::move(text)});
        if (answer()) return true;
        messages_.pop_back();
        return false;
    }

    // Another answer to the last message.
    bool regenerate() {
        if (messages_.empty() || messages_.back().role != "assistant") {
            note("There is no answer yet.");
            return false;
        }
        ChatMessage old = std::move(messages_.back());
        messages_.pop_back();
        if (answer()) return true;
        messages_.push_back(std::move(old));
        return false;
    }

    // A line about the program itself: never on standard output, where only answers belong.
    void note(std::string_view text) const { std::fprintf(stderr, "%.*s\n", int(text.size()), text.data()); }

private:
    // The last prompt and its answer as the model saw them. Keeping the ids, in place of tokenising the whole text
    // anew, makes sure that the next prompt begins with them, and that the prefix cache has its blocks.
    struct Known {
        std::string        text, answer;
        std::vector<Token> ids, answer_ids; // the answer without an end token
        bool               whole = false;   // answer_ids spell `answer`
    };

    Result<std::string> render() const {
        ChatVariables    v;
        const Tokenizer& t = engine_.tokenizer();
        if (t.bos() >= 0) v.bos_token = t.piece(t.bos());
        if (t.eos() >= 0) v.eos_token = t.piece(t.eos());
        std::vector<ChatMessage> messages = messages_;
        if (!chat_form_has_system(form_) && messages.size() > 1 && messages[0].role == "system") {
            // Where a form has no place for it, it stands before the first message.
            messages[1].content = cat(messages[0].content, "\n\n", messages[1].content);
            messages.erase(messages.begin());
        }
        return chat_render(form_, messages, v);
    }

    std::vector<Token> encode_whole(const std::string& text) const {
        const Tokenizer&   t   = engine_.tokenizer();
        std::vector<Token> ids = t.encode(text, {.add_special = false, .parse_special = true});
        // A template may have written BOS itself; it must be there once.
        if (t.adds_bos() && t.bos() >= 0 && (ids.empty() || ids[0] != t.bos())) ids.insert(ids.begin(), t.bos());
        return ids;
    }

    // Tokens of a text in the middle: behind an anchor, since some vocabularies put a space before a beginning.
    std::vector<Token> encode_rest(std::string_view rest) const {
        const Tokenizer&    t = engine_.tokenizer();
        const EncodeOptions options{.add_special = false, .parse_special = true};
        const std::string   anchor = "\n";
        std::vector<Token>  before = t.encode(anchor, options), all = t.encode(cat(anchor, rest), options);
        if (all.size() < before.size() || !std::equal(before.begin(), before.end(), all.begin()))
            return t.encode(rest, options);
        all.erase(all.begin(), all.begin() + std::ptrdiff_t(before.size()));
        return all;
    }

    static std::string_view trimmed(std::string_view text) {
        constexpr std::string_view blanks = " \t\r\n";
        const std::size_t          first  = text.find_first_not_of(blanks);
        return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(blanks) - first + 1);
    }

    // Where in `text` the last answer ends, if `text` is the last prompt, that answer and more. A form may have
    // trimmed the answer: then the blanks stay as the model wrote them.
    std::optional<std::size_t> end_of_known(std::string_view text) const {
        if (!known_.whole || !text.starts_with(known_.text)) return std::nullopt;
        const std::string_view rest = text.substr(known_.text.size());
        if (rest.starts_with(known_.answer)) return known_.text.size() + known_.answer.size();
        const std::string_view core  = trimmed(known_.answer);
        const std::size_t      first = rest.find_first_not_of(" \t\r\n");
        if (first == std::string::npos || !rest.substr(first).starts_with(core)) return std::nullopt;
        return known_.text.size() + first + core.size();
    }

    std::vector<Token> encode(const std::string& text) const {
        if (known_.whole && text == known_.text) return known_.ids;
        const std::optional<std::size_t> end = end_of_known(text);
        if (!end) return encode_whole(text);
        std::vector<Token> ids = known_.ids, rest = encode_rest(std::string_view(text).substr(*end));
        ids.insert(ids.end(), known_.answer_ids.begin(), known_.answer_ids.end());
        ids.insert(ids.end(), rest.begin(), rest.end());
        return ids;
    }

    // What a sequence can hold at most.
    int room() const {
        const EngineOptions o = engine_.options();
        return std::min(o.context, o.kv_blocks * o.block_size);
    }

    void say_full() const {
        note(cat("The context of ", room(), " tokens is full; /clear starts a new conversation."));
    }

    // Why a prompt was refused: the last message alone is too long, or all of them together are.
    void say_too_long(std::size_t n_prompt) const {
        const bool        only = std::ranges::count(messages_, "user", &ChatMessage::role) == 1;
        const std::size_t n    = only ? n_prompt : encode_whole(messages_.back().content).size();
        if (n < std::size_t(room())) return say_full();
        note(cat("The message is too long: it has ", n, " tokens", only ? ", with the chat template," : "",
                 " and the context ", room(), "."));
    }

    // Prompt tokens that the model has read since the request was submitted, those from the cache included.
    int n_read(const EngineStats& before) const {
        const EngineStats now = engine_.stats();
        return int(now.prefill_tokens + now.cached_tokens - before.prefill_tokens - before.cached_tokens);
    }

    // Prints the answer's text as it comes; the blank with which many begin is left out.
    class Printer {
    public:
        void print(std::string_view text) {
            if (!begun_ && text.starts_with(' ')) text.remove_prefix(1);
            begun_                  = begun_ || !text.empty();
            const std::string shown = printable(text);
            if (!shown.empty()) line_open_ = shown.back() != '\n';
            std::fwrite(shown.data(), 1, shown.size(), stdout);
            std::fflush(stdout);
        }
        ~Printer() {
            if (line_open_) std::fputs("\n", stdout);
            std::fflush(stdout);
        }

    private:
        bool begun_ = false, line_open_ = true;
    };

    // Without end tokens of its own, a plain conversation ends where the model begins to write the user's part.
    static constexpr std::string_view plain_stop = "\nUser:";

    bool answer() {
        Result<std::string> text = render();
        if (!text) {
            note(text.error().message);
            return false;
        }
        Request request;
        request.prompt     = encode(*text);
        request.max_tokens = arguments_.n > 0 ? arguments_.n : std::max(1, room() - int(request.prompt.size()));
        request.ignore_end = arguments_.ignore_eos;
        request.sampling.temperature        = arguments_.temperature.value_or(0.8f);
        request.sampling.top_k              = arguments_.top_k;
        request.sampling.top_p              = arguments_.top_p;
        request.sampling.min_p              = arguments_.min_p;
        request.sampling.repetition_penalty = arguments_.repeat;
        request.sampling.presence_penalty   = arguments_.presence;
        request.sampling.frequency_penalty  = arguments_.frequency;
        request.sampling.repeat_last_n      = arguments_.repeat_last_n;
        request.sampling.seed               = seed_ + n_answers_++;
        const std::vector<Token> prompt     = request.prompt;
        const EngineStats        before     = engine_.stats();
        Stopwatch                watch;
        Result<RequestId>        id = engine_.submit(std::move(request));
        if (!id) {
            if (id.error().kind == ErrorKind::limit) say_too_long(prompt.size());
            else note(id.error().message);
            return false;
        }

        const Tokenizer&    tokenizer = engine_.tokenizer();
        Detokenizer         detokenizer(tokenizer);
        std::vector<Output> events;
        std::vector<Token>  ids;
        std::string         reply;
        std::size_t         printed  = 0;
        int                 n_tokens = 0, n_cached = 0;
        double              first = 0, last = 0;
        FinishReason        finish = FinishReason::none;
        std::string         refusal;
        bool                stopped = false; // at plain_stop
        {
            StatusLine status(progress_);
            Printer    printer;
            auto       show = [&](bool all) { // but not what may become the stop text
                std::size_t upto = reply.size();
                if (form_ == ChatForm::plain) {
                    if (std::size_t at = reply.find(plain_stop); at != std::string::npos) {
                        if (!stopped) engine_.cancel(*id);
                        stopped = true;
                        upto    = at;
                        reply.resize(at);
                    } else if (std::size_t line = reply.rfind('\n');
                               !all && line != std::string::npos &&
                               plain_stop.starts_with(std::string_view(reply).substr(line))) {
                        upto = line;
                    }
                }
                if (upto > printed) printer.print(std::string_view(reply).substr(printed, upto - printed));
                printed = std::max(printed, upto);
            };
            for (bool more = true; more && finish == FinishReason::none;) {
                if (interrupted()) engine_.cancel(*id);
                events.clear();
                more = engine_.step(events);
                for (const Output& event : events) {
                    if (event.id != *id) continue;
                    last = watch.seconds();
                    if (n_tokens == 0) first = last;
                    status.clear();
                    n_tokens += int(event.tokens.size());
                    n_cached = std::max(n_cached, event.cached_tokens);
                    for (Token token : event.tokens) {
                        if (stopped || (tokenizer.is_end(token) && !arguments_.ignore_eos)) continue;
                        ids.push_back(token);
                        reply += detokenizer.push(token);
                        show(false);
                    }
                    finish  = event.finish;
                    refusal = event.message;
                }
                const int n = n_read(before);
                if (n_tokens == 0 && finish == FinishReason::none && n > 0 &&
                    (prompt.size() >= 256 || watch.seconds() > 0.5))
                    status.show(cat("reading ", n, " of ", prompt.size(), " tokens"));
            }
            status.clear();
            (void)interrupted(); // a Ctrl-C that came with the last token was meant for this answer
            if (!stopped) reply += detokenizer.finish();
            show(true);
        }
        if (finish == FinishReason::refused || finish == FinishReason::failed) {
            note(refusal);
            failed_ = failed_ || finish == FinishReason::failed;
            return false;
        }

        const bool answered = n_tokens > 0;
        const int  read     = answered ? int(prompt.size()) : n_read(before);
        known_              = {*text, reply, prompt, std::move(ids), !stopped};
        messages_.push_back({"assistant", std::move(reply)});
        if (timings_) show_timings(read, n_cached, n_tokens, answered ? first : last, last);
        if (!answered && finish == FinishReason::cancelled)
            note(cat("Stopped when ", read, " of ", prompt.size(), " tokens were read. /regen ",
                     arguments_.no_prefix_cache ? "begins again" : "goes on from there", "."));
        if (finish == FinishReason::length && (arguments_.n < 0 || n_tokens < arguments_.n)) say_full();
        return true;
    }

    void show_timings(int n_prompt, int n_cached, int n_tokens, double first, double last) const {
        auto rate = [](int n, double seconds) {
            char text[32];
            std::snprintf(text, sizeof text, "%.1f t/s", seconds > 0 ? n / seconds : 0.0);
            return std::string(text);
        };
        // The first token comes with the prompt's last step.
        std::string line = cat("[ prompt ", n_prompt - n_cached, " tokens, ", n_cached, " from cache, ",
                               rate(n_prompt - n_cached, first), " | answer ", n_tokens, " tokens, ",
                               rate(n_tokens - 1, last - first), " ]");
        std::fprintf(timings_file_, "%s%s%s\n", color_ ? "\x1b[2m" : "", line.c_str(), color_ ? "\x1b[0m" : "");
        std::fflush(timings_file_);
    }

    Engine&                  engine_;
    const Arguments&         arguments_;
    ChatForm                 form_;
    bool                     color_, timings_;
    std::FILE*               timings_file_;
    bool                     progress_; // of long prompts is shown
    std::uint64_t            seed_, n_answers_ = 0;
    std::vector<ChatMessage> messages_;
    Known                    known_;
    bool                     failed_ = false;
};

// -- the loop -------------------------------------------------------------------------------------------

// A message of one or, with \ at the ends, more lines; nothing at the end of the input.
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

// What Tab makes of the beginning of a line: a command, or a file behind /read.
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

// False: the conversation is over.
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
        if (Result<std::string> text = read_file(with_home(rest))) {
            chat.note(cat("The next message will begin with ", text->size(), " bytes of ", quote(rest), '.'));
            attached += *text;
            if (!attached.ends_with('\n')) attached += '\n';
        } else {
            chat.note(text.error().message);
        }
    } else {
        chat.note(cat("Commands: ", commands, "  (// sends a line that begins with a slash)"));
    }
    return true;
}

int converse(Chat& chat, LineReader& reader, const Arguments& a, std::optional<std::string> first) {
    std::string attached; // by /read
    if (first) {
        const bool answered = chat.say(std::move(*first));
        if (a.single_turn) return answered ? 0 : 1;
    }
    while (std::optional<std::string> line = read_message(reader)) {
        const std::string bare = without_blanks_around(*line);
        if (bare.find_first_not_of('\n') == std::string::npos) continue;
        const bool slashes = bare.starts_with("//");
        if (bare[0] == '/' && !slashes && bare.find('\n') == std::string::npos) {
            if (!obey(chat, bare, attached)) return 0;
            continue;
        }
        if (chat.say(attached + (slashes ? bare.substr(1) : *line))) attached.clear();
        else if (a.single_turn) return 1;
        if (a.single_turn) return 0;
    }
    return 0;
}

// Of a text piped into a single turn: all of it is the message.
Result<std::optional<std::string>> piped_message(LineReader& reader) {
    Result<std::string> text = reader.read_all();
    if (!text) return std::unexpected(text.error());
    while (text->ends_with('\n') || text->ends_with('\r')) text->pop_back();
    if (text->find_first_not_of(" \t\r\n") == std::string::npos) return std::nullopt;
    return std::optional(std::move(*text));
}

// \n, \t and the like as a shell leaves them in a flag's text.
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

// The form of the conversation, and a sentence on standard error where it is not exactly the file's.
Result<ChatForm> choose_form(const Arguments& a, const Engine& engine) {
    if (std::optional<ChatForm> named = chat_form_named(a.form_name)) return *named; // checked with the flags
    std::string      jinja = engine.chat_template();
    std::string_view whose = "the model's chat template";
    if (!a.form_file.empty()) {
        Result<std::string> text = read_file(a.form_file);
        if (!text) return std::unexpected(text.error());
        jinja = *text;
        whose = "the chat template of --chat-template-file";
    }
    if (std::optional<ChatForm> exact = chat_form_detect(jinja)) return *exact;
    const ChatForm nearest = chat_form_nearest(jinja);
    if (jinja.empty())
        std::fprintf(stderr, "chat: the model has no chat template; using '%s' (--chat-template names another)\n",
                     std::string(chat_form_name(nearest)).c_str());
    else
        std::fprintf(stderr,
                     "chat: %s is not one of the recognised forms; using '%s' (--chat-template names another)\n",
                     std::string(whose).c_str(), std::string(chat_form_name(nearest)).c_str());
    return nearest;
}

int run(Arguments& a) {
    const TerminalFacts facts       = terminal_facts();
    const bool          interactive = facts.in && facts.out;
    on_interrupt(OnInterrupt::leave);

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
    if (a.model.empty()) {
        Result<std::string> found = default_model();
        if (!found) return complain(found.error());
        a.model = *found;
        if (!a.temperature) a.temperature = 0;
    }

    EngineOptions options;
    options.device                 = a.device;
    options.gpu_memory_utilization = a.gpu_memory_utilization;
    options.deterministic          = a.deterministic;
    options.threads                = a.threads;
    options.block_size             = a.block_size;
    options.context                = a.context;
    options.kv_blocks              = a.kv_blocks;
    options.kv_type                = a.kv_type == "f32" ? KvType::f32 : KvType::f16;
    options.max_sequences          = 1;
    options.prefix_cache           = !a.no_prefix_cache;
    options.step_seconds           = interactive ? 0.7 : 0; // Ctrl-C is seen between two steps
    const std::string name         = std::filesystem::path(a.model).filename().string();
    ProgressBar       bar(cat("loading ", printable(name)), facts.err && !facts.dumb);
    bar.show(0);
    Result<Engine> engine = Engine::load(a.model, options, [&](double fraction) { bar.show(fraction); });
    bar.clear();
    if (!engine) return complain(engine.error());
    if (const std::string warning = engine->warning(); !warning.empty())
        std::fprintf(stderr, "chat: %s\n", warning.c_str());
    Result<ChatForm> form = choose_form(a, *engine);
    if (!form) return complain(form.error());

    if (interactive && !a.single_turn) {
        std::printf(
            "quire  %s\n%s\nchat template: %s\n%s\n\\ at the end of a line continues it; Ctrl-C stops an answer, "
            "Ctrl-D "
            "leaves.\n\n",
            printable(name).c_str(), engine->describe().c_str(), std::string(chat_form_name(*form)).c_str(),
            std::string(commands).c_str());
        std::fflush(stdout);
    }
    Chat chat(*engine, a, *form, facts);
    if (first && interactive && !a.single_turn) std::printf("> %s\n", printable(*first).c_str());
    on_interrupt(OnInterrupt::ask);
    int code = 0;
    {
        LineReader reader(facts, interactive ? history_path() : "", completions);
        if (!first && a.single_turn && !facts.in) {
            Result<std::optional<std::string>> piped = piped_message(reader);
            if (!piped) return complain(piped.error());
            first = std::move(*piped);
        }
        code = converse(chat, reader, a, std::move(first));
        if (chat.failed()) code = 1;
    }
    on_interrupt(OnInterrupt::leave);
    if (interactive && !a.single_turn) std::puts("");
    if (std::fflush(stdout) != 0 || std::ferror(stdout))
        return complain({ErrorKind::system, "cannot write to standard output"});
    return code;
}

// A sentence's end when the text is a number beyond the bounds, or none at all; "" when it is fine.
std::string outside(const std::string& text, double least, double most, std::string_view bounds) {
    double value      = 0;
    auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (fault == std::errc{} && end == text.data() + text.size() && value >= least && value <= most) return "";
    return cat(quote(text), " is not a number that is ", bounds);
}

CLI::Validator within(double least, double most, std::string bounds = "") {
    auto shown = [](double v) { return std::trunc(v) == v ? cat(std::int64_t(v)) : cat(v); };
    if (bounds.empty()) bounds = cat("in ", shown(least), "..", shown(most));
    return {[=](const std::string& text) { return outside(text, least, most, bounds); }, bounds};
}

} // namespace

int main(int argc, char** argv) {
    Arguments a;
    CLI::App  app{"A conversation with a GGUF model.", "chat"};
    app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast); // as llama.cpp does
    app.set_version_flag("--version", "quire 0.1");
    app.add_option("-m,--model", a.model, "GGUF file; default: the first one in models/ next to this program");
    auto* prompt = app.add_option("-p,--prompt", a.prompt, "the first message");
    app.add_option("-f,--file", a.prompt_file, "the first message, from a file")->excludes(prompt);
    app.add_option("--system-prompt", a.system, "system message (short: -sys)");
    app.add_flag("--single-turn", a.single_turn, "one answer, then leave (also -st); a piped text is one message");
    app.add_flag("-e,--escape", a.escapes, "\\n, \\t and the like in -p and -sys mean what they do in C");
    app.add_option("-n,--predict,--n-predict", a.n, "most tokens in an answer; -1: no limit but the context")
        ->check(
            [](const std::string& text) {
                return text == "-1" ? std::string() : outside(text, 1, 1 << 24, "-1 or at least 1");
            },
            "-1 or at least 1")
        ->capture_default_str();
    app.add_option("-c,--ctx-size", a.context, "context length in tokens; 0: the model's")
        ->check(within(0, 1 << 24))
        ->capture_default_str();
    app.add_option("--device", a.device, "device to run on; auto: the GPU if there is one")
        ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
        ->capture_default_str();
    app.add_option("--gpu-memory-utilization", a.gpu_memory_utilization,
                   "fraction of the GPU's memory for weights and KV together")
        ->check(within(0.01, 1.0))
        ->capture_default_str();
    app.add_flag("--deterministic", a.deterministic, "on a GPU: bit-identical logits in any batch");
    app.add_option("-t,--threads", a.threads, "threads; 0: one per physical core")
        ->check(within(0, 1024))
        ->capture_default_str();
    app.add_option("-s,--seed", a.seed, "random seed; -1: a new one each time")
        ->check(within(-1, 0x1p63, "-1 or more"))
        ->capture_default_str();
    app.add_option("--temp", a.temperature,
                   "temperature; 0: always the most likely token (default 0.8; 0 for the toy model)")
        ->check(within(0.0, 100.0));
    app.add_option("--top-k", a.top_k, "choose from the k most likely tokens; 0: all")
        ->check(within(0, 1 << 30))
        ->capture_default_str();
    app.add_option("--top-p", a.top_p, "choose from the most likely tokens with this total probability; 1: all")
        ->check(within(1e-9, 1, "above 0, at most 1"))
        ->capture_default_str();
    app.add_option("--min-p", a.min_p, "choose from tokens with at least this fraction of the top probability; 0: all")
        ->check(within(0.0, 1.0))
        ->capture_default_str();
    app.add_option("--repeat-penalty", a.repeat, "above 1: tokens that occurred before become less likely")
        ->check(within(0.01, 100.0))
        ->capture_default_str();
    app.add_option("--repeat-last-n", a.repeat_last_n, "number of last tokens that the penalties count; -1: all")
        ->check(within(-1, 1 << 24))
        ->capture_default_str();
    app.add_option("--presence-penalty", a.presence, "subtracted from the logits of tokens generated before")
        ->check(within(-100.0, 100.0))
        ->capture_default_str();
    app.add_option("--frequency-penalty", a.frequency, "subtracted once for each time a token was generated")
        ->check(within(-100.0, 100.0))
        ->capture_default_str();
    app.add_flag("--ignore-eos", a.ignore_eos, "continue after an end token");
    app.add_option("--chat-template", a.form_name,
                   "chatml, llama-2, llama-3, mistral, zephyr, gemma, phi-3 or plain; default: the file's")
        ->check(
            [](const std::string& name) {
                return chat_form_named(name)
                           ? std::string()
                           : cat(quote(name),
                                 " is not one of chatml, llama-2, llama-3, mistral, zephyr, gemma, phi-3, plain");
            },
            "NAME");
    app.add_option("--chat-template-file", a.form_file, "file with a Jinja template of one of these formats")
        ->excludes("--chat-template");
    app.add_option("--block-size", a.block_size, "tokens in a KV block")->check(within(1, 256))->capture_default_str();
    app.add_option("--kv-blocks", a.kv_blocks, "number of KV blocks; 0: enough for a full context")
        ->check(within(0, 1 << 24))
        ->capture_default_str();
    app.add_option("--kv-type", a.kv_type, "element type of the KV cache")
        ->check(CLI::IsMember({"f16", "f32"}))
        ->capture_default_str();
    app.add_flag("--no-prefix-cache", a.no_prefix_cache, "do not reuse KV between requests");
    auto* timings =
        app.add_flag("--show-timings", a.timings, "print timings after each answer; the default on a terminal");
    app.add_flag("--no-show-timings", a.no_timings, "do not print timings")->excludes(timings);
    app.add_option("--color", a.color, "colours: auto, on, off; alone: on")
        ->check(CLI::IsMember({"auto", "on", "off"}))
        ->capture_default_str();

    const OwnFlag own = [&](const std::string& name) -> std::optional<bool> {
        const CLI::Option* option = app.get_option_no_throw(name);
        return option ? std::optional(option->get_items_expected_min() > 0) : std::nullopt;
    };
    const std::vector<std::string> typed(argv + 1, argv + argc);
    Result<TranslatedFlags>        flags = translate_flags(Program::chat, typed, own);
    if (!flags) {
        std::fprintf(stderr, "chat: %s\n", flags.error().message.c_str());
        return 2;
    }
    for (std::size_t i = 0; i < flags->words.size(); i++) // --color alone, as llama.cpp had it
        if (flags->words[i] == "--color" && (i + 1 == flags->words.size() || flags->words[i + 1].starts_with('-')))
            flags->words.insert(flags->words.begin() + std::ptrdiff_t(i) + 1, "on");
    std::vector<std::string> words(flags->words.rbegin(), flags->words.rend());
    try {
        app.parse(words); // in reverse, as CLI11 wants them
    } catch (const CLI::Success& e) {
        return app.exit(e); // --help and --version
    } catch (const CLI::ParseError& e) {
        std::string text = e.what();
        for (char& c : text)
            if (c == '\n') c = ' ';
        std::fprintf(stderr, "chat: %s\n", text.c_str());
        return 2;
    }
    if (!flags->note.empty()) std::fprintf(stderr, "chat: %s\n", flags->note.c_str());
    return run(a);
}
