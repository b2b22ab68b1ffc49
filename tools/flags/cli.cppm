// quire.tools.flags.cli: CLI11, the library that parses the flags of all programs, as a module: its header is read once.
// Owns nothing.
module;

#include <CLI/CLI.hpp>
#include <cstdio>

export module quire.tools.flags.cli;

import quire.core.base;
import quire.core.version;
import quire.tools.flags.likely_name;

export namespace CLI {

using CLI::App;
using CLI::ExtrasError;
using CLI::IsMember;
using CLI::MultiOptionPolicy;
using CLI::Option;
using CLI::ParseError;
using CLI::RequiredError;
using CLI::Success;
using CLI::ValidationError;
using CLI::Validator;

} // namespace CLI

export namespace quire {

// CLI11's check is a constant of each file that includes its header, and so no name that a module can export.
CLI::Validator existing_file();

// Why a text is not a number from `least` to `most`: the end of a sentence with those bounds in words; "" when it is one.
std::string out_of_bounds(const std::string& text, double least, double most, std::string_view bounds);
// out_of_bounds() as a flag's check. The bounds in words stand in --help, too; "": "in LEAST..MOST".
CLI::Validator within(double least, double most, std::string bounds = "");
// A number within bounds, whose default --help shows.
void add_number(CLI::App& app, const char* names, auto& value, double least, double most, const char* what = "",
                std::string bounds = "") {
    app.add_option(names, value, what)->check(within(least, most, std::move(bounds)))->capture_default_str();
}

// --version, which prints "quire" and the version.
void add_version_flag(CLI::App& app);

// Whether "" is a value: an empty message, the file's own template, no token for the hub. A server refuses an empty key itself.
bool may_be_empty(const CLI::Option& option);
// After app.parse(): throws CLI::ValidationError for an option without a value, as --kv-key '' of a script whose variable is not set. Such
// an option would be off, and nobody would see it.
void refuse_empty(const CLI::App& app);
// The long names of all flags of `app`, and of its subcommand that was parsed.
std::vector<std::string> flag_names(const CLI::App& app);
// The flag that a mistyped one was probably meant to be; "": none is like it.
using MeantFlag = std::function<std::string(const std::string& word)>;
// The fault in the words of `app`, as one sentence. Without `meant` a mistyped flag was meant to be one of the app's own.
std::string sentence_of(const CLI::App& app, const CLI::ParseError& error, const MeantFlag& meant = {});
// app.parse() and refuse_empty(), for a program with flags of its own alone. CLI11 would take -hf for -h and -f: a dash with several letters is
// refused, but for one letter and a number behind it.
void parse_words(CLI::App& app, int argc, char** argv);
// For a program that has met `error`: prints the help, or the sentence behind the program's name. Returns the exit code.
int exit_code_of(const CLI::App& app, const CLI::ParseError& error, const char* program, const MeantFlag& meant = {});
// For main(), where std::bad_alloc arrives: prints a sentence behind the program's name. Returns the exit code.
int out_of_memory(const char* program);

} // namespace quire

module :private;

namespace quire {

CLI::Validator existing_file() { return CLI::ExistingFile; }

std::string out_of_bounds(const std::string& text, double least, double most, std::string_view bounds) {
    const auto value = to_number<double>(text);
    if (value && *value >= least && *value <= most) return "";
    return cat(quote(text), " is not a number that is ", bounds);
}

CLI::Validator within(double least, double most, std::string bounds) {
    auto shown = [](double v) { return std::trunc(v) == v ? cat(std::int64_t(v)) : cat(v); };
    if (bounds.empty()) bounds = cat("in ", shown(least), "..", shown(most));
    return {[=](const std::string& text) { return out_of_bounds(text, least, most, bounds); }, bounds};
}

void add_version_flag(CLI::App& app) { app.set_version_flag("--version", cat("quire ", quire_version)); }

bool may_be_empty(const CLI::Option& option) {
    constexpr std::array<std::string_view, 5> names{"--prompt", "--system-prompt", "--chat-template", "--hf-token",
                                                    "--api-key"};
    return std::ranges::find(names, std::string_view(option.get_name())) != names.end();
}

void refuse_empty(const CLI::App& app) {
    for (const CLI::Option* option : app.get_options()) {
        if (option->get_items_expected_min() == 0 || option->get_positional() || may_be_empty(*option)) continue;
        const std::vector<std::string>& values = option->results();
        if (std::ranges::find(values, std::string()) != values.end())
            throw CLI::ValidationError(option->get_name() + " needs a value");
    }
    const auto all = [](const CLI::App*) { return true; }; // groups of options, too
    for (const CLI::App* below : app.get_subcommands(all)) refuse_empty(*below);
}

int out_of_memory(const char* program) {
    std::fprintf(stderr, "%s: there is not enough memory\n", program);
    return 1;
}

std::vector<std::string> flag_names(const CLI::App& app) {
    std::vector<std::string> names;
    for (const CLI::Option* option : app.get_options())
        for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    const auto all = [](const CLI::App*) { return true; };
    for (const CLI::App* below : app.get_subcommands(all)) {
        if (!below->get_name().empty() && !below->parsed()) continue; // a group of options has no name
        const std::vector<std::string> more = flag_names(*below);
        names.insert(names.end(), more.begin(), more.end());
    }
    return names;
}

// The flag that a word unknown to `app` was probably meant to be; a subcommand where none is named.
std::string likely_word(const CLI::App& app, const std::string& word, const MeantFlag& meant) {
    std::vector<KnownName> known;
    if (word.starts_with('-')) {
        const std::string name = word.substr(0, word.find('='));
        if (meant) return meant(name);
        for (const std::string& one : flag_names(app)) known.push_back({one, one});
        return likely_name(name, known);
    }
    if (app.get_subcommands().empty())
        for (const CLI::App* one : app.get_subcommands([](const CLI::App*) { return true; }))
            known.push_back({one->get_name(), one->get_name()});
    return likely_name(word, known);
}

// "quantize [OPTIONS] IN OUT TYPE", of the command that was parsed.
std::string usage_of(const CLI::App& app, std::string name) {
    if (const std::vector<CLI::App*> parsed = app.get_subcommands(); !parsed.empty())
        return usage_of(*parsed.front(), cat(name, " ", parsed.front()->get_name()));
    const auto* formatter = dynamic_cast<CLI::Formatter*>(app.get_formatter().get());
    std::string text      = formatter ? formatter->make_usage(&app, name) : name;
    for (char& c : text)
        if (c == '\n') c = ' ';
    const std::size_t first = std::min(text.find(name), text.size());
    return text.substr(first, text.find_last_not_of(' ') + 1 - first);
}

// Of a word that the app has no use for.
std::string unexpected_sentence(const CLI::App& app, const std::string& word, const MeantFlag& meant) {
    const std::string likely = likely_word(app, word, meant),
                      hint   = likely.empty() ? std::string("; --help lists them") : did_you_mean(likely);
    if (word.starts_with('-')) {
        const std::string name = word.substr(0, word.find('='));
        return cat("there is no flag ", is_plain_word(name) ? name : quote(name), hint);
    }
    const bool chooses = app.get_subcommands().empty() &&
                         !app.get_subcommands([](const CLI::App* one) { return !one->get_name().empty(); }).empty();
    if (chooses) return cat("there is no command ", quote(word), hint);
    return cat(quote(word), " is one word too many; the usage is ", usage_of(app, app.get_name()));
}

void parse_words(CLI::App& app, int argc, char** argv) {
    for (int i = 1; i < argc; i++) {
        const std::string word = argv[i];
        if (word == "--") break;
        if (word.size() < 2 || word[0] != '-' || to_number<double>(word)) continue;
        const std::string        name   = word[1] == '-' ? word.substr(0, word.find('=')) : word.substr(0, 2);
        const CLI::Option* const option = app.get_option_no_throw(name);
        const bool               takes  = option != nullptr && option->get_items_expected_min() > 0;
        if (word[1] != '-' && name != word && !(takes && to_number<double>(word.substr(2))))
            throw CLI::ValidationError(unexpected_sentence(app, word, {}));
        i += takes && name == word; // a value may begin with a dash
    }
    app.parse(argc, argv);
    refuse_empty(app);
}

std::string sentence_of(const CLI::App& app, const CLI::ParseError& error, const MeantFlag& meant) {
    std::string text = error.what();
    // CLI11 looks for what is missing before it looks at the words that are left.
    const std::vector<std::string> left    = app.remaining(true);
    const bool                     missing = dynamic_cast<const CLI::RequiredError*>(&error) != nullptr;
    const bool unknown = dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr || (missing && !left.empty());
    if (unknown && !left.empty()) {
        const auto flag = std::ranges::find_if(left, [](const std::string& word) { return word.starts_with('-'); });
        const std::string& word = flag != left.end() ? *flag : left.front();
        text                    = unexpected_sentence(app, word, meant);
    } else if (missing) {
        text += "; --help lists all";
    }
    constexpr std::string_view unconverted = "Could not convert: "; // NAME = VALUE
    if (const std::size_t equals = text.find(" = "); text.starts_with(unconverted) && equals != std::string::npos) {
        const std::string value = text.substr(equals + 3);
        text                    = cat(text.substr(unconverted.size(), equals - unconverted.size()), ": ", quote(value),
                   to_number<double>(value) ? " is no whole number that this flag takes" : " is not a number");
    }
    for (char& c : text)
        if (c == '\n') c = ' ';
    return text;
}

int exit_code_of(const CLI::App& app, const CLI::ParseError& error, const char* program, const MeantFlag& meant) {
    if (error.get_exit_code() == 0) return app.exit(error);
    std::fprintf(stderr, "%s: %s\n", program, sentence_of(app, error, meant).c_str());
    return 2;
}

} // namespace quire
