// quire.tools.common.model_source: where a program's model comes from: a file, a model hub, a URL. Owns nothing.
export module quire.tools.common.model_source;

import quire.core.base;
import quire.tools.common.foreign_flags;
import quire.tools.common.terminal;
import quire.tools.flags.cli;
export import quire.tools.hub.hub;

export namespace quire {

// -hf, -hff, -mu, --hf-token, --offline
void add_hub_flags(CLI::App& app, HubModel& hub);
// These and -m, and for the program's last word, without a flag: FILE or URL.
struct ModelSource {
    std::string word; // the last one
    HubModel    hub;
};
void add_source_flags(CLI::App& app, ModelSource& source);

// -hf and the like → the long names, for a program that takes no other flags of llama.cpp (inspect). Error: as translate_flags().
Result<TranslatedFlags> translate_source_flags(std::span<const std::string> words, const OwnFlag& own);
// meant_flag() for such a program.
std::string meant_source_flag(std::string_view typed, const OwnFlag& own);

// Where the sentences and the progress of a fetch go. `say` empty: the sentences go to standard error, behind the program's name. `progress`:
// of the file that is fetched now; may be empty.
struct FetchListener {
    std::function<void(const std::string& sentence, bool error)> say;
    std::function<void(double fraction)>                         progress;
};

// Sets `model` to the path of the model's file, fetched if a flag says so; how that goes is shown on standard error. Nothing happens when
// only -m was given, or nothing at all. Returns the exit code if the program ends here: 1 where no file can be had, 2 after wrong usage, each
// with a sentence on standard error.
std::optional<int> find_model(const std::string& program, const ModelSource& source, std::string& model);
// The two halves of find_model(), each with its exit code. The first one sets `model` where it is a file, or `wanted` where it is to be
// fetched; the second one fetches it.
std::optional<int> read_source(const std::string& program, const ModelSource& source, std::string& model,
                               std::optional<HubModel>& wanted);
std::optional<int> fetch_model(const std::string& program, const HubModel& wanted, std::string& model,
                               const FetchListener& listener = {});

} // namespace quire

module :private;

namespace quire {

void add_hub_flags(CLI::App& app, HubModel& hub) {
    app.add_option("--hf-repo", hub.repo,
                   "USER/MODEL or USER/MODEL:TYPE: fetch this model from the hub, once (short: -hf); "
                   "default of TYPE: Q4_K_M");
    app.add_option("--hf-file", hub.file, "this file of it (short: -hff)");
    app.add_option("--model-url", hub.url, "fetch the model's file from this URL, once (short: -mu)");
    app.add_option("--hf-token", hub.token,
                   "token for private models (short: -hft); better in HF_TOKEN, where no other user sees it");
    app.add_flag("--offline", hub.offline, "fetch nothing: take what was fetched before");
}

void add_source_flags(CLI::App& app, ModelSource& source) {
    app.add_option("FILE", source.word, "the model's GGUF file, or its URL; as -m and -mu");
    add_hub_flags(app, source.hub);
}

Result<TranslatedFlags> translate_source_flags(std::span<const std::string> words, const OwnFlag& own) {
    return translate_flags(Program::inspect, words, own);
}

std::string meant_source_flag(std::string_view typed, const OwnFlag& own) {
    return meant_flag(Program::inspect, typed, own);
}

// How a fetch is shown: a line that changes on a terminal, otherwise a sentence every ten seconds.
class FetchDisplay {
public:
    FetchDisplay(std::string program, FetchListener listener)
        : program_(std::move(program)), listener_(std::move(listener)),
          line_(terminal_facts_.err && !terminal_facts_.dumb) {}

    void show(const FetchProgress& p) {
        const auto   now     = std::chrono::steady_clock::now();
        const bool   whole   = p.size >= 0 && p.done == p.size;
        const double percent = p.size > 0 ? 100 * double(p.done) / double(p.size) : 0;
        std::string  text    = cat(p.name, "  ", bytes_text(p.done));
        if (listener_.progress && p.size > 0) listener_.progress(double(p.done) / double(p.size));
        if (p.size > 0) text += cat(" of ", bytes_text(p.size), " (", int(percent), " %)");
        if (p.rate > 0) text += cat("  ", bytes_text(std::int64_t(p.rate)), "/s");
        if (p.rate > 0 && p.size > p.done) text += cat("  ", duration(double(p.size - p.done) / p.rate), " left");
        if (terminal_facts_.err && !terminal_facts_.dumb) {
            const std::size_t columns = std::size_t(std::max(20, screen_columns()));
            if (text.size() >= columns) text = cat("...", text.substr(text.size() - columns + 4)); // the numbers stay
            line_.show(printable(text));
        } else if (now - said_ >= std::chrono::seconds(10) || (whole && p.name != finished_)) {
            said_ = now;
            say(printable(text));
        }
        if (whole) finished_ = p.name;
    }
    void clear() { line_.clear(); }
    void say(const std::string& sentence, bool error = false) {
        clear();
        if (listener_.say) listener_.say(sentence, error);
        else say_error(program_, sentence);
    }

private:
    static std::string duration(double seconds) {
        const std::int64_t s = std::int64_t(std::min(seconds, 1e7));
        char               text[32];
        std::snprintf(text, sizeof text, "%lld:%02lld", static_cast<long long>(s / 60), static_cast<long long>(s % 60));
        return s < 3600 ? std::string(text) : cat(s / 3600, " h ", s / 60 % 60, " min");
    }

    std::string                           program_, finished_;
    FetchListener                         listener_;
    TerminalFacts                         terminal_facts_ = terminal_facts();
    StatusLine                            line_;
    std::chrono::steady_clock::time_point said_ = std::chrono::steady_clock::now();
};

std::optional<int> read_source(const std::string& program, const ModelSource& source, std::string& model,
                               std::optional<HubModel>& wanted) {
    const auto complain = [&](const std::string& sentence, int code) {
        say_error(program, sentence);
        return code;
    };
    HubModel   hub  = source.hub;
    const bool url  = source.word.starts_with("http://") || source.word.starts_with("https://"),
               word = !source.word.empty();
    if (int(word) + int(!model.empty()) + int(!hub.repo.empty()) + int(!hub.url.empty()) > 1)
        return complain("of FILE, -m, -hf and -mu only one can be given (variables as LLAMA_ARG_MODEL count, too)", 2);
    if (url) hub.url = source.word;
    if (auto ok = check_hub_model(hub); !ok) return complain(ok.error().message, 2);
    if (word && !url) {
        std::error_code ignored;
        if (!std::filesystem::exists(source.word, ignored))
            return complain(cat("there is no file ", quote(source.word, 200), "; -hf USER/MODEL fetches a model"), 1);
        model = source.word;
    }
    if (!hub.repo.empty() || !hub.url.empty()) wanted = std::move(hub);
    return std::nullopt;
}

std::optional<int> fetch_model(const std::string& program, const HubModel& wanted, std::string& model,
                               const FetchListener& listener) {
    FetchDisplay        display(program, listener);
    Result<std::string> path = hub_file(wanted, {[&](const FetchProgress& p) { display.show(p); },
                                                 [&](const std::string& sentence) { display.say(sentence); }});
    display.clear();
    if (!path) {
        display.say(path.error().message, true);
        return 1;
    }
    model = std::move(*path);
    return std::nullopt;
}

std::optional<int> find_model(const std::string& program, const ModelSource& source, std::string& model) {
    std::optional<HubModel> wanted;
    if (const std::optional<int> code = read_source(program, source, model, wanted)) return code;
    return wanted ? fetch_model(program, *wanted, model) : std::nullopt;
}

} // namespace quire
