// quire.text.templates.jinja.jinja_template: a Jinja template, parsed once, rendered as often as wanted, by Jinja's rules as chat templates rely on them:
// trim_blocks, lstrip_blocks, break and continue, an immutable sandbox. **Owns** the parsed program.
module;

#include <ctime>

export module quire.text.templates.jinja.jinja_template;

import quire.core.base;
export import quire.core.json;
export import quire.text.marked_text;
import quire.text.templates.jinja.ast;
import quire.text.templates.jinja.filters;
import quire.text.templates.jinja.interpreter;
import quire.text.templates.jinja.lexer;
import quire.text.templates.jinja.parser;
import quire.text.templates.jinja.tests;

export namespace quire {

struct RenderContext {
    // Variables whose texts come from the model's file, not from input: they may hold special tokens.
    std::span<const std::string_view> trusted = {};
    std::int64_t now   = 0; // for strftime_now: seconds since 1970, of the local time as if it were UTC
    std::size_t  bytes = 0; // of the variables: limits grow with them
};

// RenderContext::now for `when`: 2024-07-26T10:00:00 (the seconds may be absent), or "" for this moment. Error: another text.
Result<std::int64_t> local_seconds(const std::string& when);
// Such a time as a text, by a format of strftime that is never empty; of at most 255 bytes.
std::string date_text(std::int64_t local_seconds, const char* format);

// Immutable, so any number of threads may use one.
class JinjaTemplate {
public:
    // Error: the fault, with line and column; or a limit.
    static Result<JinjaTemplate> parse(std::string_view source);

    // `variables`: a JSON object. Error: a refusal by the template, in its own words; an operation that is not possible; a limit.
    Result<MarkedText> render(const Json& variables, const RenderContext& context) const;
    const std::string& source() const { return program_->source; }
    // Whether the template names it anywhere.
    bool names(std::string_view variable) const { return program_->ids.contains(std::string(variable)); }

private:
    std::shared_ptr<const jinja::Program> program_;
};

} // namespace quire

module :private;

namespace quire {

Result<std::int64_t> local_seconds(const std::string& when) {
    std::tm parts{};
    if (when.empty()) {
        const std::time_t now = std::time(nullptr);
        localtime_r(&now, &parts);
        return std::int64_t(timegm(&parts));
    }
    for (const char* format :
         {"%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%d"}) {
        parts           = {};
        const char* end = strptime(when.c_str(), format, &parts);
        if (end && *end == 0) return std::int64_t(timegm(&parts));
    }
    return fail(quote(when), " is not a date and time, such as 2024-07-26T10:00:00");
}

std::string date_text(std::int64_t local_seconds, const char* format) {
    const std::time_t time = local_seconds;
    std::tm           parts{};
    gmtime_r(&time, &parts);
    char text[256];
    return {text, std::strftime(text, sizeof text, format, &parts)}; // NOLINT: the caller's format
}

Result<JinjaTemplate> JinjaTemplate::parse(std::string_view source) {
    Result<jinja::Program> program = jinja::parse(source, {jinja::is_filter, jinja::is_test});
    if (!program) return std::unexpected(program.error());
    JinjaTemplate out;
    out.program_ = std::make_shared<const jinja::Program>(std::move(*program));
    return out;
}

Result<MarkedText> JinjaTemplate::render(const Json& variables, const RenderContext& context) const {
    jinja::Runtime runtime;
    runtime.now = context.now;
    runtime.budget.steps += std::int64_t(context.bytes) * 8;
    runtime.budget.longest += context.bytes * 2;
    runtime.budget.bytes += context.bytes * 256;
    jinja::Interpreter interpreter(*program_, runtime);
    try {
        for (const auto& [name, value] : variables.get_ref<const Json::object_t&>())
            interpreter.set(name, jinja::from_json(value, std::ranges::find(context.trusted, std::string_view(name)) ==
                                                              context.trusted.end()));
        return interpreter.run();
    } catch (const jinja::Fault& f) {
        const std::string where = jinja::place(program_->source, interpreter.position());
        if (f.refused) return fail(f.message, " (raised by the chat template, ", where, ")");
        return fail("the chat template, ", where, ": ", f.message);
    }
}

} // namespace quire
