// quire.tools.flags.cli: CLI11, the library that parses the flags of all programs, as a module: its header is read once.
// Owns nothing.
module;

#include <CLI/CLI.hpp>
#include <cstdio>

export module quire.tools.flags.cli;

export namespace CLI {

using CLI::App;
using CLI::IsMember;
using CLI::MultiOptionPolicy;
using CLI::Option;
using CLI::ParseError;
using CLI::Range;
using CLI::Success;
using CLI::ValidationError;
using CLI::Validator;

} // namespace CLI

export namespace quire {

// CLI11's checks that are constants of each file that includes its header, and so no names that a module can export.
CLI::Validator existing_file();
CLI::Validator positive_number();

// The fault in the words of `app`, as one sentence.
std::string sentence_of(const CLI::App& app, const CLI::ParseError& error);
// For a program that has met `error`: prints the help, or the sentence behind the program's name. Returns the exit code.
int exit_code_of(const CLI::App& app, const CLI::ParseError& error, const char* program);

} // namespace quire

module :private;

namespace quire {

CLI::Validator existing_file() { return CLI::ExistingFile; }
CLI::Validator positive_number() { return CLI::PositiveNumber; }

std::string sentence_of(const CLI::App& app, const CLI::ParseError& error) {
    std::string text = error.what();
    // CLI11 looks for what is missing before it looks at the words that are left.
    const std::vector<std::string> left = app.remaining(true);
    if (dynamic_cast<const CLI::RequiredError*>(&error) != nullptr)
        text = left.empty() ? text + "; --help lists all" : "The following argument was not expected: " + left.front();
    for (char& c : text)
        if (c == '\n') c = ' ';
    return text;
}

int exit_code_of(const CLI::App& app, const CLI::ParseError& error, const char* program) {
    if (error.get_exit_code() == 0) return app.exit(error);
    std::fprintf(stderr, "%s: %s\n", program, sentence_of(app, error).c_str());
    return 2;
}

} // namespace quire
