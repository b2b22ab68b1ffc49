// quire.tools.common.processes: a model in several processes: the rank of this process, and its work if another process leads. Owns
// nothing.
export module quire.tools.common.processes;

import quire.core.base;
import quire.tools.common.terminal;
export import quire.engine.engine;

export namespace quire {

// RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun sets them. Only --tensor-parallel makes them count. Error: one of them
// that cannot be.
Result<void> read_processes(EngineOptions& options);

// For an engine that follows(): says so by `say`, or on standard error, and runs the messages of rank 0 until rank 0 ends. Returns the exit code.
int follow(Engine& engine, std::string_view program, const std::function<void(const std::string&)>& say = {});

} // namespace quire

module :private;

namespace quire {

Result<int> number_of(const char* name, int otherwise, int least, int most) {
    const char* const text = std::getenv(name);
    if (!text || !*text) return otherwise;
    const auto value = to_number<int>(text);
    if (!value || *value < least || *value > most)
        return fail(name, " is ", quote(text), ", not a number in ", least, "..", most);
    return *value;
}

Result<void> read_processes(EngineOptions& options) {
    if (options.tensor_parallel < 2) return {};
    ProcessSpec&      p = options.processes;
    const Result<int> n = number_of("WORLD_SIZE", 1, 1, 64);
    if (!n) return std::unexpected(n.error());
    if (*n == 1) return {};
    const Result<int> rank = number_of("RANK", 0, 0, *n - 1), port = number_of("MASTER_PORT", p.port, 1, 65535);
    const Result<int> local = number_of("LOCAL_RANK", 0, 0, *n - 1);
    for (const Result<int>* number : {&rank, &port, &local})
        if (!*number) return std::unexpected(number->error());
    p.n = *n, p.rank = *rank, p.port = *port, p.local = *local;
    if (const char* const address = std::getenv("MASTER_ADDR"); address && *address) p.address = address;
    return {};
}

int follow(Engine& engine, std::string_view program, const std::function<void(const std::string&)>& say) {
    const EngineOptions o     = engine.options();
    const std::string follows = cat("rank ", o.processes.rank, " of ", o.processes.n, " follows ", o.processes.address,
                                    " port ", o.processes.port);
    if (say) say(follows);
    else say_error(program, follows);
    const Result<void> ok = engine.follow();
    if (ok) return 0;
    say_error(program, ok.error().message);
    return 1;
}

} // namespace quire
