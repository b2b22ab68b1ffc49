// quire.tools.common.constraint_flags: --schema, --grammar and --regex: the constraint of a text. Owns nothing.
export module quire.tools.common.constraint_flags;

export import quire.constraint.compile;
import quire.core.base;
import quire.tools.common.read_file;
import quire.tools.flags.cli;

export namespace quire {

struct ConstraintFlags {
    std::string schema_file, grammar_file, regex;
};

// At most one of them may be given. `owner`: the program, or a part of its flags.
void add_constraint_flags(CLI::App& owner, ConstraintFlags& flags);
// Reads the files. None of the flags is given: nothing. Error: a file that cannot be used.
Result<std::optional<ConstraintSpec>> constraint_of(const ConstraintFlags& flags);
// A fault of that constraint, behind the name of the file that it is in.
Error in_constraint(const ConstraintFlags& flags, const Error& fault);

} // namespace quire

module :private;

namespace quire {

void add_constraint_flags(CLI::App& owner, ConstraintFlags& flags) {
    auto* schema =
        owner.add_option("--schema", flags.schema_file, "file with a JSON Schema that the text must satisfy");
    auto* grammar = owner.add_option("--grammar", flags.grammar_file, "file with a grammar (GBNF) for the text");
    auto* regex   = owner.add_option("--regex", flags.regex, "regular expression of the whole text");
    schema->excludes(grammar)->excludes(regex);
    grammar->excludes(regex);
}

Result<std::optional<ConstraintSpec>> constraint_of(const ConstraintFlags& flags) {
    ConstraintSpec spec;
    if (!flags.schema_file.empty()) {
        Result<std::string> text = read_file(flags.schema_file, most_constraint_bytes);
        if (!text) return std::unexpected(text.error());
        Result<Json> schema = json_parse(*text, schema_json_limits);
        if (!schema) return fail(quote(flags.schema_file), ": ", schema.error().message);
        spec.kind   = ConstraintSpec::Kind::json_schema;
        spec.schema = std::move(*schema);
        return spec;
    }
    if (!flags.grammar_file.empty()) {
        Result<std::string> text = read_file(flags.grammar_file, most_constraint_bytes);
        if (!text) return std::unexpected(text.error());
        spec.kind = ConstraintSpec::Kind::grammar;
        spec.text = std::move(*text);
        return spec;
    }
    if (flags.regex.empty()) return std::optional<ConstraintSpec>();
    spec.kind = ConstraintSpec::Kind::regex;
    spec.text = flags.regex;
    return spec;
}

Error in_constraint(const ConstraintFlags& flags, const Error& fault) {
    const std::string& file = flags.schema_file.empty() ? flags.grammar_file : flags.schema_file;
    return file.empty() ? fault : Error{fault.kind, cat(quote(file), ": ", fault.message)};
}

} // namespace quire
