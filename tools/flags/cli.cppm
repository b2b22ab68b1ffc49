// quire.tools.flags.cli: CLI11, the library that parses the flags of all programs, as a module: its header is read once.
// Owns nothing.
module;

#include <CLI/CLI.hpp>

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

} // namespace quire

module :private;

namespace quire {

CLI::Validator existing_file() { return CLI::ExistingFile; }
CLI::Validator positive_number() { return CLI::PositiveNumber; }

} // namespace quire
