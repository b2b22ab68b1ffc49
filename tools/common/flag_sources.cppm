// quire.tools.common.flag_sources: flags that are not typed: in environment variables and in a file. Owns nothing.
module;

#include <unistd.h>

export module quire.tools.common.flag_sources;

import quire.core.base;
import quire.tools.common.foreign_flags;
import quire.tools.common.read_file;
import quire.tools.flags.likely_name;

export namespace quire {

// A flag, and the variable or the line of a file that gives it: "QUIRE_PORT", "quire.conf, line 3".
struct GivenFlag {
    std::string              from;
    std::vector<std::string> words;
};

// One sentence about the variables QUIRE_… that name no flag, with the flag that each was probably meant to be; "": there are none. chat names
// only those that are like one of its flags: others may be the server's. The server does not name those of chat's flags.
std::string unknown_variables(Program program, const OwnFlag& own);

// QUIRE_CTX_SIZE=8192 is --ctx-size 8192, and so is LLAMA_ARG_CTX_SIZE=8192, with llama.cpp's names. A flag without a value is given by 1,
// true, on or yes; 0, false, off or no give the flag that says the opposite, if there is one. Variables that name no flag are somebody
// else's. Error: the variable, and what is wrong with it.
Result<std::vector<GivenFlag>> flags_of_environment(Program program, const OwnFlag& own);

// The flags of a file with a flag on each line: `ctx-size = 8192`, `no-pages`, `seed: 7`; # and ; begin comments. Quotes around a value, two
// of " or two of ', are taken away; nothing between them is replaced, and other quotes stay.
// Error: the line, and what is wrong with it.
Result<std::vector<GivenFlag>> flags_of_file(const std::string& path, Program program, const OwnFlag& own);

// Whether a flag without a value, "--log-json", is typed, in a variable or in the file of --config, whatever else is wrong there: for a program
// that has to say in some form what is wrong. A pipe in place of the file is left to flags_of_file(), as a pipe can be read once.
bool is_given(const std::string& flag, int argc, char** argv);
// Whether a flag without a value is given by such a word; nothing: the word says neither yes nor no.
std::optional<bool> is_yes(std::string_view text);
// Whether a value follows the flag; nothing: there is no such flag.
std::optional<bool> takes_value(const std::string& flag, Program program, const OwnFlag& own);
// The flag of one such line, with its dashes; "": the line has none.
std::string flag_of_line(std::string_view line);
// Appends the words of one such line to `words`; a line without a flag has none. `where`: the beginning of an error.
Result<void> add_words_of_line(std::string_view line, const std::string& where, Program program, const OwnFlag& own,
                               std::vector<std::string>& words);

} // namespace quire

module :private;

namespace quire {

std::optional<bool> is_yes(std::string_view text) {
    constexpr std::array<std::string_view, 5> yes{"1", "true", "on", "yes", "enabled"};
    constexpr std::array<std::string_view, 6> no{"", "0", "false", "off", "no", "disabled"};
    std::string                               value;
    for (const char c : text) value += char(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
    if (std::ranges::find(yes, value) != yes.end()) return true;
    if (std::ranges::find(no, value) != no.end()) return false;
    return std::nullopt;
}

std::optional<bool> takes_value(const std::string& flag, Program program, const OwnFlag& own) {
    const std::optional<bool> mine = own(flag);
    return mine ? mine : foreign_takes_value(program, flag);
}

// `where`: the beginning of an error.
Result<void> add_words(const std::string& flag, const std::string& value, const std::string& where, Program program,
                       const OwnFlag& own, std::vector<std::string>& words) {
    if (takes_value(flag, program, own).value_or(false)) {
        words.push_back(cat(flag, "=", value)); // in one word, as a value may begin with a dash
        return {};
    }
    const std::optional<bool> given = is_yes(value);
    if (!given)
        return fail(where, flag, " takes no value but 1, true, on, yes or 0, false, off, no; ", quote(value),
                    " is none");
    const std::string opposite = cat("--no-", flag.substr(std::min<std::size_t>(2, flag.size())));
    if (*given) words.push_back(flag);
    else if (flag.starts_with("--") && takes_value(opposite, program, own)) words.push_back(opposite);
    return {};
}

// The flag of a variable's name behind its prefix.
std::string flag_of(std::string_view name) {
    std::string flag = "--";
    for (const char c : name) flag += c == '_' ? '-' : char(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
    return flag;
}

// And back.
std::string variable_of(std::string_view flag) {
    std::string name = "QUIRE_";
    for (const char c : flag.substr(2)) name += c == '-' ? '_' : char(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c);
    return name;
}

std::string flag_of_llama(std::string_view name) {
    // Where llama.cpp's variable is not named after the flag.
    constexpr std::pair<std::string_view, std::string_view> others[] = {
        {"N_PARALLEL", "--parallel"},    {"BATCH", "--batch-size"},
        {"UBATCH", "--ubatch-size"},     {"ENDPOINT_METRICS", "--metrics"},
        {"ENDPOINT_PROPS", "--props"},   {"ENDPOINT_SLOTS", "--slots"},
        {"THINK", "--reasoning-format"}, {"THINK_BUDGET", "--reasoning-budget"},
        {"STATIC_PATH", "--path"},       {"ROPE_SCALING_TYPE", "--rope-scaling"},
    };
    const auto at = std::ranges::find(others, name, &std::pair<std::string_view, std::string_view>::first);
    return at == std::end(others) ? flag_of(name) : std::string(at->second);
}

Result<std::vector<GivenFlag>> flags_of_environment(Program program, const OwnFlag& own) {
    constexpr std::string_view quire = "QUIRE_", llama = "LLAMA_ARG_";
    std::vector<GivenFlag>     flags;
    for (char** at = environ; at != nullptr && *at != nullptr; at++) {
        const std::string_view entry = *at, name = entry.substr(0, entry.find('='));
        if (name.size() == entry.size()) continue;
        const std::string value(entry.substr(name.size() + 1));
        const std::string flag = name == "LLAMA_API_KEY"   ? std::string("--api-key")
                                 : name.starts_with(quire) ? flag_of(name.substr(quire.size()))
                                 : name.starts_with(llama) ? flag_of_llama(name.substr(llama.size()))
                                                           : std::string();
        if (flag.empty() || flag == "--config") continue;
        if (!takes_value(flag, program, own)) continue;
        GivenFlag given{std::string(name), {}};
        if (auto ok = add_words(flag, value, cat(name, ": "), program, own, given.words); !ok)
            return std::unexpected(ok.error());
        flags.push_back(std::move(given));
    }
    return flags;
}

std::string unknown_variables(Program program, const OwnFlag& own) {
    constexpr std::string_view prefix     = "QUIRE_";
    constexpr std::string_view no_flags[] = {"QUIRE_CONFIG", "QUIRE_NCCL_FROM", "QUIRE_LONG", "QUIRE_CLIENTS",
                                             "QUIRE_SERVER"}; // the last three are those of the tests
    constexpr std::string_view of_chat[]  = {"--color",           "--escape",       "--file",   "--grammar",
                                             "--ignore-eos",      "--models",       "--prompt", "--regex",
                                             "--no-show-timings", "--show-timings", "--schema", "--no-trim-chats",
                                             "--single-turn",     "--system-prompt"};
    std::vector<std::string>   unknown;
    for (char** at = environ; at != nullptr && *at != nullptr; at++) {
        const std::string_view entry = *at, name = entry.substr(0, entry.find('='));
        if (!name.starts_with(prefix) || name.size() == entry.size()) continue;
        if (std::ranges::find(no_flags, name) != std::end(no_flags)) continue;
        const std::string flag = flag_of(name.substr(prefix.size()));
        if (takes_value(flag, program, own)) continue;
        if (program == Program::server && std::ranges::find(of_chat, flag) != std::end(of_chat)) continue;
        const std::string meant = meant_flag(program, flag, own);
        if (program == Program::chat && meant.empty()) continue;
        unknown.push_back(cat(is_plain_word(name) ? std::string(name) : quote(name),
                              meant.empty() ? "" : cat(" (did you mean ", variable_of(meant), "?)")));
    }
    if (unknown.empty()) return {};
    std::ranges::sort(unknown);
    std::string list;
    for (const std::string& one : unknown) list += cat(list.empty() ? "" : ", ", one);
    return cat("warning: there is no flag for ", list, " in the environment");
}

std::string_view without_blanks(std::string_view text) {
    constexpr std::string_view blanks = " \t\r";
    const std::size_t          first  = text.find_first_not_of(blanks);
    return first == std::string_view::npos ? "" : text.substr(first, text.find_last_not_of(blanks) - first + 1);
}

struct FlagLine {
    std::string      flag; // with its dashes; "": the line has none
    std::string_view value;
};

FlagLine split_line(std::string_view line) {
    const std::string_view text = without_blanks(line);
    if (text.empty() || text[0] == '#' || text[0] == ';') return {};
    const std::size_t end = text.find_first_of("=: \t");
    std::string       flag(without_blanks(text.substr(0, end)));
    std::string_view  value = end == std::string_view::npos ? "" : without_blanks(text.substr(end));
    if (value.starts_with('=') || value.starts_with(':')) value = without_blanks(value.substr(1));
    if (value.size() > 1 && (value[0] == '"' || value[0] == '\'') && value.ends_with(value[0]))
        value = value.substr(1, value.size() - 2);
    if (!flag.starts_with('-')) flag = cat(flag.size() == 1 ? "-" : "--", flag);
    return {std::move(flag), value};
}

std::string flag_of_line(std::string_view line) { return split_line(line).flag; }

bool is_given(const std::string& flag, int argc, char** argv) {
    const std::string variable = variable_of(flag);
    for (const std::string& name : {variable, cat("LLAMA_ARG_", variable.substr(variable.find('_') + 1))})
        if (const char* value = std::getenv(name.c_str()); value && is_yes(value).value_or(false)) return true;
    const char* config = std::getenv("QUIRE_CONFIG");
    for (int i = 1; i < argc; i++) {
        const std::string_view word = argv[i];
        if (word == flag) return true;
        if (word == "--config" && i + 1 < argc) config = argv[i + 1];
        if (word.starts_with("--config=")) config = argv[i] + word.find('=') + 1;
    }
    std::error_code           ignored;
    const Result<std::string> text =
        config && std::filesystem::is_regular_file(config, ignored) ? read_file(config) : Result<std::string>("");
    std::istringstream lines(text ? *text : "");
    for (std::string line; std::getline(lines, line);)
        if (const FlagLine given = split_line(line);
            given.flag == flag && (given.value.empty() || is_yes(given.value).value_or(false)))
            return true;
    return false;
}

Result<void> add_words_of_line(std::string_view line, const std::string& where, Program program, const OwnFlag& own,
                               std::vector<std::string>& words) {
    auto [flag, value] = split_line(line);
    if (flag.empty()) return {};
    std::optional<bool> takes = takes_value(flag, program, own);
    if (!takes && flag.starts_with("--")) { // llama.cpp's short names: ngl is -ngl
        takes = takes_value(flag.substr(1), program, own);
        if (takes) flag.erase(0, 1);
    }
    if (flag == "--config") return fail(where, flag, " cannot stand in a file");
    if (!takes) return fail(where, "there is no flag ", quote(flag), did_you_mean(meant_flag(program, flag, own)));
    if (*takes && value.empty()) return fail(where, flag, " needs a value");
    if (*takes && !flag.starts_with("--")) {
        words.push_back(flag);
        words.emplace_back(value);
        return {};
    }
    return add_words(flag, !*takes && value.empty() ? "1" : std::string(value), where, program, own, words);
}

Result<std::vector<GivenFlag>> flags_of_file(const std::string& path, Program program, const OwnFlag& own) {
    const Result<std::string> text = read_file(path);
    if (!text) return std::unexpected(text.error());
    std::istringstream     lines(*text);
    std::vector<GivenFlag> flags;
    int                    number = 0;
    for (std::string line; std::getline(lines, line);) {
        GivenFlag given{cat(path, ", line ", ++number), {}};
        if (auto ok = add_words_of_line(line, given.from + ": ", program, own, given.words); !ok)
            return std::unexpected(ok.error());
        flags.push_back(std::move(given));
    }
    return flags;
}

} // namespace quire
