// quire.constraint.compile: a constraint as it is asked for (ConstraintSpec) → Constraint. Owns nothing.
export module quire.constraint.compile;

export import quire.constraint.constraint;
export import quire.constraint.formats.answer_grammar;
import quire.constraint.formats.gbnf;
export import quire.constraint.formats.json_schema;
import quire.constraint.formats.structural_tag;
import quire.constraint.memory;
import quire.constraint.regex.parser;
import quire.core.base;
export import quire.core.json;
import quire.text.calls.call_marks;
export import quire.text.tokens.tokenizer;

export namespace quire {

struct ConstraintSpec {
    enum class Kind : std::uint8_t { any, json_object, json_schema, regex, choice, grammar, structural_tag };
    Kind                       kind = Kind::any;     // any: only with `answer`
    Json                       schema{};             // json_schema; structural_tag: vLLM's object
    std::string                text{};               // regex (of the whole text); grammar (GBNF)
    std::vector<std::string>   choices{};            // choice
    bool                       ordered       = true; // members come in the order of the schema's `properties`
    bool                       plain_numbers = true; // integers are written as 12 only, not as 12.0 also
    bool                       closed        = true; // only members that the schema names
    std::optional<AnswerRules> answer{};             // reasoning before the text, or calls of tools in its place
};

// The largest schema, grammar, or list of choices.
constexpr std::size_t most_constraint_bytes = std::size_t(256) << 10;
// The limits of a schema as JSON text.
constexpr JsonLimits schema_json_limits{.bytes = most_constraint_bytes, .depth = 64};

// Error: the specification's fault and its place, an unsupported part, or a limit that it exceeds. Null: compiling takes more than `work`,
// which is less than the limit, or `stop` has become true.
Result<std::shared_ptr<Constraint>> compile_constraint(const ConstraintSpec& spec, const GrammarLimits& limits = {},
                                                       std::size_t              work = WorkBudget::endless,
                                                       const std::atomic<bool>* stop = nullptr);
// compile_constraint() for a parsed schema. The caller limits its text.
Result<std::shared_ptr<Constraint>> compile_schema(const Json& schema, const SchemaOptions& options);

// The token trie of a vocabulary's first `vocab_size` tokens. Control tokens stand in it as control_bytes(). It keeps a reference to the tokenizer.
std::shared_ptr<const TokenTrie> make_token_trie(const Tokenizer& tokenizer, int vocab_size);
// Which control tokens of the vocabulary stand in answer_marks() or in the marks of the rules' own form, and which of them end an
// answer. Looks at the whole vocabulary.
void find_controls(const Tokenizer& tokenizer, AnswerRules& rules);

} // namespace quire

module :private;

namespace quire {

Result<GrammarSymbol> add_spec(Grammar& g, const ConstraintSpec& spec) {
    using Kind = ConstraintSpec::Kind;
    switch (spec.kind) {
        case Kind::any: break;
        case Kind::json_object: return add_json_schema(g, Json{{"type", "object"}});
        case Kind::json_schema:
            return add_json_schema(
                g, spec.schema, {.ordered = spec.ordered, .plain_numbers = spec.plain_numbers, .closed = spec.closed});
        case Kind::regex: {
            Result<RegexId> regex = parse_regex(g.pool, spec.text, TextSpelling::utf8, true);
            if (!regex) return std::unexpected(regex.error());
            return g.optional(*regex);
        }
        case Kind::choice: {
            std::vector<RegexId> all;
            for (const std::string& c : spec.choices) all.push_back(g.pool.literal(c));
            if (all.empty()) return fail("the list of choices is empty");
            return g.optional(g.pool.any_of(std::move(all)));
        }
        case Kind::grammar: return add_gbnf(g, spec.text);
        case Kind::structural_tag: return add_structural_tag(g, spec.schema);
    }
    return fail("a constraint of unknown kind");
}

// While a grammar grows, which is no constraint yet.
class Growing final : public ConstraintMemory::Holder {
public:
    Growing() { join(); }
    ~Growing() { leave(); }
};

template <class Make>
Result<std::shared_ptr<Constraint>> compile(const GrammarLimits& limits, std::size_t work,
                                            const std::atomic<bool>* stop, const Make& make) {
    using Why                = WorkEnded::Why;
    const std::size_t most   = limits.bytes / 2; // automata grow beside it
    ConstraintMemory& memory = ConstraintMemory::all();
    Growing           growing;
    Grammar           g;
    WorkBudget        budget(std::min(work, limits.compile_work), {.stop = stop}, [&] {
        growing.holds(g.pool.bytes() + g.symbols.size() * 256);
        if (growing.held() > most || (memory.over() && !memory.make_room(growing, growing.held())))
            throw WorkEnded{Why::memory};
    });
    try {
        const RegexPool::Under      under(g.pool, budget);
        const Result<GrammarSymbol> start = make(g);
        if (!start) return std::unexpected(start.error());
        g.start = start->is_lexeme() ? g.add_rules({{*start}}) : *start;
        if (g.pool.too_deep()) throw WorkEnded{Why::depth};
        if (auto ok = g.finish(); !ok) return fail("the constraint cannot be met: ", ok.error().message);
        (void)TokenTrie::plain_character(g.pool); // its classes of bytes are needed before the lexer starts
    } catch (const WorkEnded& e) {
        if (e.why == Why::depth) return fail_with(ErrorKind::limit, "it is nested too deep");
        if (e.why == Why::memory)
            return fail_with(ErrorKind::limit, "it takes more memory to compile than is allowed (", most >> 20,
                             " MiB of the ", memory.limit() >> 20, " MiB that all constraints have)");
        if (e.why == Why::interrupted || work < limits.compile_work) return nullptr;
        return fail_with(ErrorKind::limit, "it takes more work to compile than is allowed (", limits.compile_work,
                         " steps)");
    }
    return std::make_shared<Constraint>(std::move(g), limits);
}

Result<std::shared_ptr<Constraint>> compile_schema(const Json& schema, const SchemaOptions& options) {
    return compile(options.limits, WorkBudget::endless, nullptr,
                   [&](Grammar& g) { return add_json_schema(g, schema, options); });
}

Result<std::shared_ptr<Constraint>> compile_constraint(const ConstraintSpec& spec, const GrammarLimits& limits,
                                                       std::size_t work, const std::atomic<bool>* stop) {
    std::size_t bytes = spec.text.size();
    for (const std::string& c : spec.choices) bytes += c.size();
    if (bytes > most_constraint_bytes)
        return fail_with(ErrorKind::limit, "a constraint of ", bytes, " bytes; ", most_constraint_bytes,
                         " are allowed");
    return compile(limits, work, stop, [&](Grammar& g) -> Result<GrammarSymbol> {
        std::optional<GrammarSymbol> text;
        if (spec.kind != ConstraintSpec::Kind::any || !spec.answer) {
            const Result<GrammarSymbol> made = add_spec(g, spec);
            if (!made) return made;
            text = *made;
        }
        return spec.answer ? add_answer(g, *spec.answer, text) : *text;
    });
}

std::shared_ptr<const TokenTrie> make_token_trie(const Tokenizer& tokenizer, int vocab_size) {
    std::vector<std::string> all;
    for (Token t = 0; t < vocab_size; t++) {
        std::string bytes = tokenizer.bytes(t);
        if (tokenizer.type(t) == TokenType::control)
            bytes = tokenizer.is_end(t) ? "" : control_bytes(tokenizer.piece(t));
        else if (bytes.find_first_of("\xfe\xff") != std::string::npos)
            bytes.clear(); // in no text, and marks of controls
        all.push_back(std::move(bytes));
    }
    return std::make_shared<const TokenTrie>(all, tokenizer.end_tokens(), &tokenizer);
}

void find_controls(const Tokenizer& tokenizer, AnswerRules& rules) {
    std::vector<std::string_view> texts(answer_marks().begin(), answer_marks().end());
    texts.insert(texts.end(), {rules.reasoning.begin, rules.reasoning.end});
    if (const CallMarks* m = rules.form.marks.get())
        texts.insert(texts.end(), {m->section_open, m->call_open, m->name_close, m->call_close, m->separator,
                                   m->section_close, m->parameter_open, m->parameter_separator, m->text.open,
                                   m->text.close, m->other.open, m->other.close, m->wrap.open, m->wrap.close});
    for (Token t = 0; t < tokenizer.vocab_size(); t++) {
        if (tokenizer.type(t) != TokenType::control || tokenizer.piece(t).empty()) continue;
        const std::string_view piece = tokenizer.piece(t);
        if (std::ranges::any_of(texts, [&](std::string_view text) { return text.contains(piece); }))
            (tokenizer.is_end(t) ? rules.ends : rules.controls).emplace_back(piece);
    }
}

} // namespace quire
