// quire.serve.constraint_cache: a constraint that several requests ask for is compiled once. Constraints that take long to compile are
// compiled one after the other. **Owns** the compiled constraints, as many as there is memory for.
export module quire.serve.constraint_cache;

import quire.constraint.compile;
import quire.constraint.formats.canonical_schema;
import quire.constraint.memory;
import quire.core.base;
import quire.serve.memory_semaphore;
import quire.text.calls.tool_form;

export namespace quire {

// Any thread.
class ConstraintCache {
public:
    // The state at the beginning of a text, with its first mask. Error: compile_constraint() or the mask failed, or too many other
    // constraints are being compiled. Ends early when `stop` becomes true.
    Result<ConstraintState> begin(const ConstraintSpec& spec, const std::shared_ptr<const TokenTrie>& tokens,
                                  const std::atomic<bool>& stop);

private:
    using Made = std::shared_ptr<Constraint>;
    struct Entry {
        Made          made;
        std::uint64_t used = 0;
    };
    // Constraints that are kept beside the ones in use.
    static constexpr std::size_t most = 32;
    // A constraint that takes more than this is long: long ones are compiled one after the other.
    static constexpr std::size_t little_work    = 1'000'000;
    static constexpr auto        little_time    = std::chrono::milliseconds(100);
    static constexpr double      timeout        = 30; // seconds
    static constexpr int         memory_retries = 20;

    Result<Made> compile(const std::string& key, const ConstraintSpec& spec, std::optional<MemorySemaphore::Pass>& pass,
                         const std::atomic<bool>& stop);
    Result<void> enter(std::optional<MemorySemaphore::Pass>& pass, const std::atomic<bool>& stop);
    Made         find(const std::string& key);
    Made         add(const std::string& key, Made made);
    void         make_room();

    MemorySemaphore              long_ones_{1};
    std::mutex                   mutex_;
    std::map<std::string, Entry> entries_;
    std::uint64_t                now_ = 0;
};

} // namespace quire

module :private;

namespace quire {

// The values on which a constraint depends. Marks and the vocabulary's control tokens do not differ within a server.
std::string key_of(const ConstraintSpec& spec) {
    const bool        is_schema = spec.kind == ConstraintSpec::Kind::json_schema;
    const std::string schema    = is_schema ? canonical_schema(spec.schema, spec.ordered) : json_dump(spec.schema);
    std::string       key =
        cat(int(spec.kind), spec.ordered ? "o" : "a", spec.closed ? "c" : "-", schema.size(), ":", schema, spec.text);
    for (const std::string& c : spec.choices) key += cat(" ", c.size(), ":", c);
    const auto& a = spec.answer;
    if (!a) return key;
    key += cat("\n", name_of(a->form.kind), a->required ? "r" : "-", a->parallel ? "p" : "-", a->may_reason ? "m" : "-",
               a->in_reasoning ? "i" : "-");
    for (const Json& tool : a->tools) {
        const Json& function = tool["function"];
        const auto  strict = function.find("strict"), parameters = function.find("parameters");
        key += cat("\n", json_dump(function["name"]), strict != function.end() && *strict == true ? "s" : "-",
                   parameters == function.end() ? "" : canonical_schema(*parameters, true));
    }
    return key;
}

Result<ConstraintState> ConstraintCache::begin(const ConstraintSpec&                   spec,
                                               const std::shared_ptr<const TokenTrie>& tokens,
                                               const std::atomic<bool>&                stop) {
    const std::string key = key_of(spec);
    if (key.size() > 2 * most_constraint_bytes)
        return fail_with(ErrorKind::limit, "it has ", key.size(), " bytes; ", 2 * most_constraint_bytes,
                         " are allowed");
    std::optional<MemorySemaphore::Pass> pass;
    Made                                 made = find(key);
    for (int i = 0; !made; i++) {
        Result<Made> compiled = compile(key, spec, pass, stop);
        if (!compiled && ConstraintMemory::all().over() && i < memory_retries && !stop) { // others may end
            make_room();
            std::this_thread::sleep_for(std::chrono::milliseconds(200));
            continue;
        }
        if (!compiled) return std::unexpected(compiled.error());
        made = std::move(*compiled);
    }
    ConstraintState state(made, tokens);
    Result<bool> begun = state.prepare(false, {.stop = &stop, .until = std::chrono::steady_clock::now() + little_time});
    if (begun && !*begun) {
        if (auto ok = enter(pass, stop); !ok) return std::unexpected(ok.error());
        begun = state.prepare(false, {.stop = &stop});
    }
    if (!begun) return std::unexpected(begun.error());
    if (!*begun) return fail("the client has gone");
    return state;
}

Result<void> ConstraintCache::enter(std::optional<MemorySemaphore::Pass>& pass, const std::atomic<bool>& stop) {
    if (!pass) {
        std::optional<MemorySemaphore::Pass> granted = long_ones_.enter(1, timeout, [&] { return stop.load(); });
        if (granted) pass.emplace(std::move(*granted));
    }
    if (pass) return {};
    return fail_with(ErrorKind::limit, "it takes long to compile, and so do those before it");
}

Result<ConstraintCache::Made> ConstraintCache::compile(const std::string& key, const ConstraintSpec& spec,
                                                       std::optional<MemorySemaphore::Pass>& pass,
                                                       const std::atomic<bool>&              stop) {
    if (!pass) {
        const Result<Made> quick = compile_constraint(spec, {}, little_work, &stop);
        if (!quick) return quick;
        if (*quick) return add(key, *quick);
        if (auto ok = enter(pass, stop); !ok) return std::unexpected(ok.error());
    }
    if (Made known = find(key)) return known; // another thread was faster
    const Result<Made> made = compile_constraint(spec, {}, WorkBudget::endless, &stop);
    if (!made) return made;
    if (!*made) return fail("the client has gone");
    return add(key, *made);
}

ConstraintCache::Made ConstraintCache::find(const std::string& key) {
    std::scoped_lock lock(mutex_);
    const auto       at = entries_.find(key);
    if (at == entries_.end()) return nullptr;
    at->second.used = ++now_;
    return at->second.made;
}

ConstraintCache::Made ConstraintCache::add(const std::string& key, Made made) {
    {
        std::scoped_lock lock(mutex_);
        const auto [at, added] = entries_.try_emplace(key, Entry{made, 0});
        at->second.used        = ++now_;
        made                   = at->second.made;
    }
    make_room();
    return made;
}

// Drops the constraints that were not used for longest. Constraints of running requests stay: so this thread, not the engine's, destroys
// each constraint.
void ConstraintCache::make_room() {
    std::vector<Made> gone; // destroyed after the lock
    std::scoped_lock  lock(mutex_);
    while (true) {
        std::size_t unused = 0, bytes = 0;
        auto        oldest = entries_.end();
        for (auto at = entries_.begin(); at != entries_.end(); ++at) {
            bytes += at->second.made->held() + at->first.size();
            if (at->second.made.use_count() > 1) continue;
            unused++;
            if (oldest == entries_.end() || at->second.used < oldest->second.used) oldest = at;
        }
        if (oldest == entries_.end() || (unused <= most && bytes <= ConstraintMemory::all().limit() / 4 * 3)) return;
        gone.push_back(std::move(oldest->second.made));
        entries_.erase(oldest);
    }
}

} // namespace quire
