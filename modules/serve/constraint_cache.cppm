// quire.serve.constraint_cache: constraints that requests ask for again are compiled once. **Owns** the compiled ones that were used last.
export module quire.serve.constraint_cache;

import quire.core.base;
import quire.core.json;
import quire.core.recent;
import quire.core.std;
import quire.text.grammar.compile;
import quire.text.tool_form;

export namespace quire {

// Any thread.
class ConstraintCache {
public:
    // Error: as compile_constraint() says it.
    Result<std::shared_ptr<Constraint>> get(const ConstraintSpec& spec);

private:
    static constexpr std::size_t most = 32;

    std::mutex                                       mutex_;
    Recent<std::string, std::shared_ptr<Constraint>> recent_{most};
};

} // namespace quire

module :private;

namespace quire {

Result<std::shared_ptr<Constraint>> ConstraintCache::get(const ConstraintSpec& spec) {
    const std::string schema = json_dump(spec.schema);
    std::string       key =
        cat(int(spec.kind), spec.ordered ? "o" : "a", spec.closed ? "c" : "-", schema.size(), ":", schema, spec.text);
    for (const std::string& c : spec.choices) key += cat(" ", c.size(), ":", c);
    if (const auto& a = spec.answer) // marks and the vocabulary's control tokens are always the same
        key += cat("\n", name_of(a->form.kind), a->required ? "r" : "-", a->parallel ? "p" : "-",
                   a->may_reason ? "m" : "-", a->in_reasoning ? "i" : "-", json_dump(a->tools));
    if (key.size() > 2 * most_constraint_bytes || schema.size() > most_constraint_bytes)
        return fail_with(ErrorKind::limit, "it has ", std::max(key.size(), schema.size()), " bytes; ",
                         most_constraint_bytes, " are allowed");
    {
        std::scoped_lock lock(mutex_);
        if (const auto* known = recent_.find(key)) return *known;
    }
    Result<std::shared_ptr<Constraint>> made = compile_constraint(spec);
    if (!made) return made;
    std::scoped_lock lock(mutex_);
    if (const auto* known = recent_.find(key)) return *known; // another thread was faster
    return recent_.add(key, *made, [](std::shared_ptr<Constraint>&) {});
}

} // namespace quire
