// bench batched: many sequences at once, like llama-batched-bench; also under a constraint, beside a run without one.
import quire.core.base;
import quire.tools.common.constraint_flags;
import quire.tools.common.processes;

#include "commands.h"

namespace quire::bench {

// Decode under a constraint against decode without one, by turns: both sampled at temperature 1. Tokens that the constraint leaves no
// choice about count like all others.
Result<void> compare_constrained(Engine& engine, const Arguments& a, const std::shared_ptr<Constraint>& constraint,
                                 int n) {
    std::array<std::vector<double>, 2> rates;
    for (int round = 0; round <= a.rounds; round++)
        for (bool constrained : {false, true}) {
            Polymorphic<TokenFilter> state;
            if (constrained) state = ConstraintState(constraint, engine.token_trie());
            const Result<Timed> t = run_batch(engine, n, a.npp, a.ntg, unsigned(round), a.prompt_shared, &state);
            if (!t) return std::unexpected(t.error());
            if (round > 0) rates[constrained].push_back(t->tokens / t->decode); // the first one fills the caches
        }
    for (auto& r : rates) std::ranges::sort(r);
    const double plain = rates[0][rates[0].size() / 2], constrained = rates[1][rates[1].size() / 2];
    if (a.json)
        std::printf("%s\n",
                    json_dump(Json{{"pl", n}, {"speed_plain", plain}, {"speed_constrained", constrained}}).c_str());
    else
        std::printf("| %5d | %5d | %4d | %12.2f | %12.2f | %5.3f |\n", a.npp, a.ntg, n, plain, constrained,
                    constrained / plain);
    std::fflush(stdout);
    return {};
}

int batched_constrained(Engine& engine, const Arguments& a, const ConstraintSpec& spec) {
    Result<std::shared_ptr<Constraint>> constraint = compile_constraint(spec);
    if (!constraint) return complain(in_constraint(a.constraint, constraint.error()));
    if (!a.json)
        std::printf(
            "|    PP |    TG |    B |    plain t/s | constrained t/s | ratio |\n"
            "| ----: | ----: | ---: | -----------: | --------------: | ----: |\n");
    for (int n : a.npl)
        if (auto ok = compare_constrained(engine, a, *constraint, n); !ok) return complain(ok.error());
    return 0;
}

// llama-batched-bench's columns.
int batched(const Arguments& a) {
    Result<std::optional<ConstraintSpec>> spec = constraint_of(a.constraint);
    if (!spec) return complain(spec.error());
    Result<Work> work = work_of(a.model, a.engine.kv_type);
    if (!work) return complain(work.error());
    const int     most    = *std::max_element(a.npl.begin(), a.npl.end());
    EngineOptions options = options_of(a, most, a.npp + a.ntg + 8 + head_start(most, a.npp, step_tokens(a)));
    options.prefix_cache  = a.prompt_shared;
    if (a.no_fast_forward) options.fast_forward = 0;
    if (auto ok = read_processes(options); !ok) return complain(ok.error());
    Result<Engine> engine = Engine::load(a.model, options);
    if (!engine) return complain(engine.error());
    if (engine->follows()) return follow(*engine, "bench");
    std::fprintf(stderr, "%s\n", engine->describe().c_str());
    if (*spec) return batched_constrained(*engine, a, **spec);
    if (!a.json)
        std::printf(
            "|    PP |    TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s | of "
            "the limit |\n"
            "| ----: | ----: | ---: | -----: | -------: | -------: | -------: | -------: | -------: | -------: | "
            "-----------: |\n");
    for (int n : a.npl) {
        if (Result<Timed> warm = run_batch(*engine, n, a.npp, std::min(a.ntg, 4), 1, a.prompt_shared); !warm)
            return complain(warm.error());
        Result<Timed> t = run_batch(*engine, n, a.npp, a.ntg, 2, a.prompt_shared);
        if (!t) return complain(t.error());
        const double s_pp = double(n) * a.npp / t->prefill, s_tg = double(n) * a.ntg / t->decode,
                     all   = t->prefill + t->decode;
        const double bytes = work->bytes_read(n) + double(n) * (a.npp + a.ntg / 2.0) * work->kv_bytes_per_token;
        if (a.json)
            std::printf("%s\n", json_dump(Json{{"pp", a.npp},
                                               {"tg", a.ntg},
                                               {"pl", n},
                                               {"t_pp", t->prefill},
                                               {"speed_pp", s_pp},
                                               {"t_tg", t->decode},
                                               {"speed_tg", s_tg}})
                                    .c_str());
        else
            std::printf("| %5d | %5d | %4d | %6d | %8.3f | %8.2f | %8.3f | %8.2f | %8.3f | %8.2f | %12s |\n", a.npp,
                        a.ntg, n, n * (a.npp + a.ntg), t->prefill, s_pp, t->decode, s_tg, all,
                        n * double(a.npp + a.ntg) / all,
                        limit_of(a, n / s_tg, bytes, 2 * work->active_parameters() * n).c_str());
        std::fflush(stdout);
    }
    return 0;
}

} // namespace quire::bench
