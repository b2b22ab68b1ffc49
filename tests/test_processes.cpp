// A model in several processes: what they say to each other, that the answers stay what they are, and what happens when one is lost.
#include <dlfcn.h>
#include <catch2/catch_test_macros.hpp>

#include "process.h"
#include "reference.h"
#include "server_process.h"

import quire.core.base;
import quire.core.std;
import quire.core.tcp;
import quire.core.tensor;
import quire.engine.engine;
import quire.engine.ranks.process_group;
import quire.paging.block;
import quire.schedule.request;
import quire.step.message;
import quire.step.plan;

#include "cuda_tools.h"
#include "engine_tools.h"

using namespace quire;
using namespace quire::testing;

namespace {

const StepMessageLimits limits{.block_size    = 4,
                               .n_blocks      = 500,
                               .n_swap        = 20,
                               .context       = 200,
                               .max_tokens    = 300,
                               .max_sequences = 70,
                               .vocab_size    = 200'000};

struct Planned {
    int                  context = 0, n_tokens = 1;
    std::vector<BlockId> table;
};

StepPlan plan_of(const std::vector<Planned>& sequences, std::mt19937& random) {
    StepPlan plan;
    plan.token_start.push_back(0);
    plan.groups[0].table_start.push_back(0);
    for (const Planned& s : sequences) {
        for (int position = s.context - s.n_tokens; position < s.context; position++) {
            plan.tokens.push_back(int(random() % 128'000));
            plan.positions.push_back(position);
            plan.groups[0].parts[0].slots.push_back(s.table[std::size_t(position / 4)] * 4 + position % 4);
        }
        plan.token_start.push_back(plan.n_tokens());
        plan.context_lens.push_back(s.context);
        plan.readable.push_back(random() % 4 == 0 ? int(random() % unsigned(s.context - s.n_tokens + 1))
                                                  : s.context - s.n_tokens);
        plan.groups[0].parts[0].tables.insert(plan.groups[0].parts[0].tables.end(), s.table.begin(), s.table.end());
        plan.groups[0].first_entry.push_back(0);
        plan.groups[0].table_start.push_back(std::int32_t(plan.groups[0].parts[0].tables.size()));
        plan.logit_rows.push_back(plan.n_tokens() - 1);
    }
    return plan;
}

int free_port() {
    const Result<Listener> listener = listen_tcp("127.0.0.1", 0);
    REQUIRE(listener);
    close_tcp(listener->fd);
    return listener->port;
}

EngineOptions process(int rank, int n, int port) {
    EngineOptions o;
    o.device           = "cpu";
    o.threads          = 1;
    o.tensor_parallel  = 2;
    o.processes        = {rank, n, rank, "127.0.0.1", port};
    o.kv_blocks        = 30;
    o.block_size       = 4;
    o.context          = 96;
    o.max_batch_tokens = 24;
    o.max_sequences    = 4;
    o.rank_seconds     = 20;
    return o;
}

std::vector<Request> some_requests() {
    std::mt19937         random(5);
    std::vector<Request> requests;
    for (int n : {7, 50, 20, 33, 12}) {
        std::vector<Token> prompt;
        for (int i = 0; i < n; i++) prompt.push_back(int(random() % 500));
        requests.push_back(greedy(prompt, 20));
    }
    requests[1].n        = 3; // forks, copy-on-write
    requests[2].priority = 2;
    return requests;
}

// A program with these variables, as torchrun would start it.
class Child {
public:
    Child(const std::string& program, std::vector<std::string> arguments, int rank, int port) : err_(temporary()) {
        std::vector<std::string> all{"env", cat("RANK=", rank), "WORLD_SIZE=2", cat("MASTER_PORT=", port),
                                     cat(QUIRE_BIN, "/", program)};
        all.insert(all.end(), arguments.begin(), arguments.end());
        std::vector<char*> argv;
        for (std::string& a : all) argv.push_back(a.data());
        argv.push_back(nullptr);
        std::fflush(nullptr);
        pid_ = fork();
        if (pid_ == 0) {
            if (std::freopen("/dev/null", "r", stdin) && std::freopen("/dev/null", "w", stdout) &&
                std::freopen(err_.c_str(), "w", stderr))
                execv("/usr/bin/env", argv.data());
            _exit(127);
        }
    }
    ~Child() {
        if (pid_ > 0) kill(pid_, SIGKILL), wait();
    }
    Child(const Child&)            = delete;
    Child& operator=(const Child&) = delete;

    void stop(int signal) { kill(pid_, signal); }
    int  wait() { // exit code, or 128 + the signal
        int status = 0;
        waitpid(std::exchange(pid_, -1), &status, 0);
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    std::string err() const { return slurp(err_); }

private:
    pid_t       pid_ = -1;
    std::string err_;
};

} // namespace

TEST_CASE("a step arrives in another process as it was sent", "[ranks]") {
    std::mt19937           random(3);
    StepSender             sender(4);
    StepReceiver           receiver(limits);
    std::vector<Planned>   sequences;
    std::vector<std::byte> message;
    StepPlan               got;
    for (int step = 0; step < 300; step++) {
        for (Planned& s : sequences) {
            s.n_tokens = 1, s.context++;
            while (int(s.table.size()) * 4 < s.context) s.table.push_back(int(random() % 500));
            if (random() % 40 == 0) s.table.back() = int(random() % 500); // copied
        }
        if (random() % 3 == 0 && sequences.size() < 60) {
            Planned s;
            s.n_tokens = 1 + int(random() % 9);
            s.context  = s.n_tokens + int(random() % 20);
            if (!sequences.empty() && random() % 2 == 0)
                s.table = sequences[random() % sequences.size()].table; // shared
            s.table.resize(std::size_t(s.context + 3) / 4, int(random() % 500));
            sequences.insert(sequences.begin() + std::ptrdiff_t(random() % (sequences.size() + 1)), s);
        }
        std::erase_if(sequences, [&](const Planned& s) { return s.context > 190 || random() % 60 == 0; });
        const StepPlan plan = plan_of(sequences, random);
        message.clear();
        sender.write(plan, message);
        const Result<void> ok = receiver.read(message, got);
        INFO(step << ": " << (ok ? "" : ok.error().message));
        REQUIRE(ok);
        CHECK(got.tokens == plan.tokens);
        CHECK(got.positions == plan.positions);
        CHECK(got.groups[0].parts[0].slots == plan.groups[0].parts[0].slots);
        CHECK(got.token_start == plan.token_start);
        CHECK(got.context_lens == plan.context_lens);
        CHECK(got.readable == plan.readable);
        CHECK(got.groups[0].parts[0].tables == plan.groups[0].parts[0].tables);
        CHECK(got.groups[0].table_start == plan.groups[0].table_start);
        CHECK(got.groups[0].first_entry == plan.groups[0].first_entry);
        CHECK(got.logit_rows == plan.logit_rows);
    }
}

TEST_CASE("a step of 64 sequences that decode is a small message", "[ranks]") {
    std::mt19937         random(4);
    std::vector<Planned> sequences(64);
    for (Planned& s : sequences) {
        s.context = 180;
        for (int i = 0; i < 45; i++) s.table.push_back(int(random() % 500));
    }
    StepSender             sender(4);
    std::vector<std::byte> message;
    sender.write(plan_of(sequences, random), message);
    for (Planned& s : sequences) s.context++, s.table.push_back(int(random() % 500));
    message.clear();
    sender.write(plan_of(sequences, random), message);
    CAPTURE(message.size());
    CHECK(message.size() < 64 * 12);
}

TEST_CASE("a step message that cannot be is refused, whatever is wrong with it", "[ranks]") {
    std::mt19937           random(6);
    std::vector<Planned>   sequences(5);
    std::vector<std::byte> message;
    for (Planned& s : sequences) s.context = 9, s.n_tokens = 9, s.table = {int(random() % 500), 3, 4};
    StepSender sender(4);
    sender.write(plan_of(sequences, random), message);
    BlockMoves moves;
    moves.copies = {{1, 2}}, moves.swap_out = {{3, 4}};
    std::vector<std::byte> moved;
    write_moves(moves, moved);
    REQUIRE(read_moves(moved, limits, moves));
    CHECK((moves.copies.size() == 1 && moves.swap_out[0].to == 4 && moves.swap_in.empty()));
    int refused = 0;
    for (int i = 0; i < 20'000; i++) {
        std::vector<std::byte> broken = i % 2 == 0 ? message : moved;
        for (int n = 1 + int(random() % 3); n > 0; n--) broken[random() % broken.size()] = std::byte(random());
        if (random() % 3 == 0) broken.resize(random() % broken.size());
        StepPlan plan;
        if (i % 2 == 0) {
            const bool ok = StepReceiver(limits).read(broken, plan).has_value();
            refused += !ok;
            if (!ok) continue;
            for (std::int32_t slot : plan.groups[0].parts[0].slots) REQUIRE((slot >= 0 && slot < 2000));
            for (Token t : plan.tokens) REQUIRE((t >= 0 && t < limits.vocab_size));
        } else if (auto ok = read_moves(broken, limits, moves); ok) {
            for (auto [from, to] : moves.swap_in) REQUIRE((from >= 0 && from < 20 && to >= 0 && to < 500));
        } else {
            refused++;
        }
    }
    CHECK(refused > 5000);
}

TEST_CASE("several processes give the bits that as many ranks of one process give", "[ranks]") {
    struct Case {
        int  ranks, processes;
        bool deterministic;
    };
    for (const Case c : {Case{2, 2, false}, Case{2, 2, true}, Case{4, 2, false}, Case{4, 4, true}}) {
        CAPTURE(c.ranks, c.processes, c.deterministic);
        const int         port    = free_port();
        const std::string path    = reference("models/llama3-gqa-Q8_0.gguf");
        const auto        options = [&](int rank, int n) {
            EngineOptions o   = process(rank, n, port);
            o.tensor_parallel = c.ranks;
            o.deterministic   = c.deterministic;
            return o;
        };
        std::vector<std::string> followed(std::size_t(c.processes), "did not end");
        std::vector<std::thread> others;
        for (int rank = 1; rank < c.processes; rank++)
            others.emplace_back([&, rank] {
                std::string&   said   = followed[std::size_t(rank)];
                Result<Engine> engine = Engine::load(path, options(rank, c.processes));
                if (!engine) return (void)(said = engine.error().message);
                const Result<void> ok = engine->follow();
                said                  = ok ? "" : ok.error().message;
            });
        std::vector<Answer> got;
        {
            Engine leads = load(path, options(0, c.processes));
            CHECK(leads.describe().starts_with(cat(c.processes, " processes of ")));
            got = run(leads, some_requests());
            CHECK(leads.stats().preemptions > 0); // blocks were swapped or computed again
        }
        for (std::thread& t : others) t.join();
        for (int rank = 1; rank < c.processes; rank++) CHECK(followed[std::size_t(rank)] == "");
        Engine                    alone = load(path, options(0, 1));
        const std::vector<Answer> want  = run(alone, some_requests());
        for (std::size_t i = 0; i < want.size(); i++) {
            CAPTURE(i);
            CHECK(got[i].tokens == want[i].tokens);
            CHECK(got[i].prompt_logits == want[i].prompt_logits);
        }
    }
}

TEST_CASE("callers that say nothing, too little or nonsense do not keep processes from meeting", "[ranks]") {
    const int         port = free_port();
    const ProcessSpec zero{0, 2, 0, "127.0.0.1", port}, one{1, 2, 0, "127.0.0.1", port};
    std::string       said = "nothing";
    std::thread       leads([&] {
        const auto group = ProcessGroup::rendezvous(zero, "model", 30, 20);
        said             = group ? "" : group.error().message;
    });
    std::vector<int>  strangers;
    for (const char* text :
         {"", "", "", "", "GET / HTTP/1.1\r\n\r\n", "\x10", "\xff\xff\xff\xffH", "\x05\0\0\0Hhello"}) {
        const Result<int> socket = connect_tcp("127.0.0.1", port, 10);
        REQUIRE(socket);
        strangers.push_back(*socket);
        const std::string bytes = *text == '\x05' ? std::string("\x05\0\0\0Hhello", 10) : text;
        CHECK(send_all(*socket, std::as_bytes(std::span(bytes)), 5));
    }
    const Stopwatch watch;
    const auto      group = ProcessGroup::rendezvous(one, "model", 30, 20);
    leads.join();
    CHECK(watch.seconds() < 4); // each of the silent ones has 5 s
    CHECK(said == "");
    REQUIRE(group);
    for (int socket : strangers) close_tcp(socket);
}

TEST_CASE("a process waits for one that lives, however long, and not for one that hangs", "[ranks]") {
    const int         port = free_port();
    const ProcessSpec zero{0, 2, 0, "127.0.0.1", port}, one{1, 2, 0, "127.0.0.1", port};
    constexpr double  seconds = 0.5;
    std::string       heard;
    std::thread       follows([&] {
        auto group = ProcessGroup::rendezvous(one, "model", 30, seconds);
        if (!group) return (void)(heard = group.error().message);
        std::this_thread::sleep_for(std::chrono::duration<double>(4 * seconds)); // it loads
        if (!(*group)->all_reduce_min(1)) return (void)(heard = "all_reduce_min");
        const auto message = (*group)->receive_command();
        heard              = message ? std::string(1, char(message->kind)) : message.error().message;
    });
    auto              group = ProcessGroup::rendezvous(zero, "model", 30, seconds);
    REQUIRE(group);
    CHECK((*group)->all_reduce_min(2).value_or(0) == 1);
    std::this_thread::sleep_for(std::chrono::duration<double>(4 * seconds)); // nothing is to do
    CHECK((*group)->tell(ProcessGroup::Kind::moves, {}));
    follows.join();
    CHECK(heard == "M");
}

TEST_CASE("processes that do not fit together say so", "[ranks]") {
    const int         port  = free_port();
    const std::string path  = reference("models/llama3-gqa-Q8_0.gguf");
    EngineOptions     other = process(1, 2, port);
    other.kv_blocks         = 41;
    std::string          theirs;
    std::thread          second([&] {
        const Result<Engine> engine = Engine::load(path, other);
        theirs                      = engine ? "loaded" : engine.error().message;
    });
    const Result<Engine> engine = Engine::load(path, process(0, 2, port));
    second.join();
    REQUIRE(!engine);
    CHECK(engine.error().message == "rank 1 has --kv-blocks 41, and rank 0 has --kv-blocks 30");
    CHECK(theirs == engine.error().message);

    // Equal weights with other metadata are another model.
    std::string bytes = slurp(path);
    const auto  key   = bytes.find("rope.freq_base");
    REQUIRE(key != std::string::npos);
    bytes[key + std::strlen("rope.freq_base") + 4 + 1] ^= 1; // behind its type
    const std::string turned = temporary();
    std::ofstream(turned, std::ios::binary) << bytes;
    std::thread third([&] {
        const Result<Engine> loaded = Engine::load(turned, process(1, 2, port));
        theirs                      = loaded ? "loaded" : loaded.error().message;
    });
    CHECK(!Engine::load(path, process(0, 2, port)));
    third.join();
    CHECK(theirs.starts_with("rank 1 has a model file with the fingerprint "));

    EngineOptions odd   = process(0, 2, port);
    odd.tensor_parallel = 3;
    CHECK(Engine::load(path, odd).error().message ==
          "3 ranks (--tensor-parallel) cannot be divided among 2 processes (WORLD_SIZE)");
    const Finished wrong =
        run_program("env", {"WORLD_SIZE=2", "RANK=2", cat(QUIRE_BIN, "/server"), "-m", path, "--tensor-parallel", "2"},
                    "", "/usr/bin");
    CHECK(wrong.code == 2);
    CHECK(wrong.err.ends_with("Z error server: RANK is '2', not a number in 0..1\n"));
}

namespace {

// Two processes that share the only GPU: NCCL must take them for processes of two hosts, and the loopback for what is between.
struct Variables {
    explicit Variables(std::vector<std::pair<std::string, std::string>> all) : all_(std::move(all)) {
        for (const auto& [name, value] : all_) setenv(name.c_str(), value.c_str(), 1);
    }
    Variables(const Variables&)            = delete;
    Variables& operator=(const Variables&) = delete;
    ~Variables() {
        for (const auto& [name, value] : all_) unsetenv(name.c_str());
    }

private:
    std::vector<std::pair<std::string, std::string>> all_;
};

} // namespace

TEST_CASE("GPUs of two processes give the bits of one; when one process is killed, every request gets an error",
          "[cuda][cuda-processes]") {
    if (no_gpu()) return;
    void* const nccl = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!nccl) {
        WARN("not tested: there is no NCCL");
        return;
    }
    const Variables      network({{"NCCL_SOCKET_IFNAME", "lo"}, {"NCCL_IB_DISABLE", "1"}});
    const nlohmann::json body{{"prompt", {"Once upon a time", "The", "In the garden there was a"}},
                              {"max_tokens", 24},
                              {"temperature", 0},
                              {"logprobs", 3}};
    const auto           answer = [&](Server& server) { return server.ask("/v1/completions", body)["choices"]; };
    for (const bool deterministic : {true, false}) {
        CAPTURE(deterministic);
        std::vector<std::string> flags{"--device", "cuda", "--kv-blocks", "64", "--batch-size", "64"};
        if (deterministic) flags.emplace_back("--deterministic");
        const nlohmann::json alone = [&] {
            Server server(flags);
            return answer(server);
        }();
        const int port = free_port();
        flags.insert(flags.end(), {"--tensor-parallel", "2", "--rank-timeout", "10"});
        std::vector<std::string> all{"-m", shipped};
        all.insert(all.end(), flags.begin(), flags.end());
        std::optional<Child> follower;
        {
            const Variables host({{"NCCL_HOSTID", "second"}, {"LOCAL_RANK", "1"}});
            follower.emplace("server", all, 1, port);
        }
        const Variables host(
            {{"NCCL_HOSTID", "first"}, {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", cat(port)}});
        Server               server(flags);
        const nlohmann::json together = answer(server);
        for (std::size_t i = 0; i < 3; i++) {
            CAPTURE(i, follower->err());
            if (deterministic) CHECK(together[i] == alone[i]);
            else CHECK(std::string(together[i]["text"]).substr(0, 20) == std::string(alone[i]["text"]).substr(0, 20));
        }
        if (deterministic) {
            server.signal(SIGTERM);
            CHECK(server.wait() == 0);
            CHECK(follower->wait() == 0);
        } else {
            std::thread    killer([&] {
                std::this_thread::sleep_for(std::chrono::milliseconds(300));
                follower->stop(SIGKILL);
            });
            nlohmann::json longer = body;
            longer["max_tokens"] = 400, longer["ignore_eos"] = true, longer.erase("logprobs");
            const auto begin = std::chrono::steady_clock::now();
            CHECK(server.post("/v1/completions", longer).status >= 500);
            killer.join();
            CHECK(server.wait() == 1);
            CHECK(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() < 9);
        }
    }
}

TEST_CASE("a server in two processes answers; when one is killed, every request gets an error and it ends", "[ranks]") {
    const int                      port = free_port();
    const std::vector<std::string> flags{"--tensor-parallel", "2", "--deterministic", "--threads", "1",
                                         "--rank-timeout",    "20"};
    std::vector<std::string>       all{"-m", shipped, "--device", "cpu"};
    all.insert(all.end(), flags.begin(), flags.end());
    const nlohmann::json body{{"prompt", "Once upon"}, {"max_tokens", 12}, {"temperature", 0}};
    const std::string    alone = Server({"--deterministic"}).ask("/v1/completions", body)["choices"][0]["text"];
    for (bool killed : {false, true}) {
        Child follower("server", all, 1, port);
        setenv("RANK", "0", 1), setenv("WORLD_SIZE", "2", 1), setenv("MASTER_PORT", cat(port).c_str(), 1);
        Server server(flags);
        for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_PORT"}) unsetenv(name);
        CHECK(server.ask("/v1/completions", body)["choices"][0]["text"] == alone);
        if (killed) {
            nlohmann::json longer = body;
            longer["max_tokens"] = 900, longer["ignore_eos"] = true;
            std::thread killer([&] {
                std::this_thread::sleep_for(std::chrono::milliseconds(200));
                follower.stop(SIGKILL);
            });
            const auto  answer = server.post("/v1/completions", longer);
            killer.join();
            CHECK(answer.status == 503);
            CHECK(has(answer.body, "the engine has failed: rank 1: its process is gone"));
            CHECK(has(answer.body, "engine_failed"));
            CHECK(server.wait() == 1);
            CHECK(has(server.errors(), "rank 1: its process is gone"));
        } else {
            server.signal(SIGTERM);
            CHECK(server.wait() == 0);
            CHECK(follower.wait() == 0);
        }
    }
}

TEST_CASE("processes notice that another has ended or hangs, though nothing is to do", "[ranks]") {
    const std::vector<std::string> all{
        "-m", shipped,  "--device", "cpu", "--tensor-parallel", "2", "--threads", "1", "--rank-timeout",
        "2",  "--port", "0"};
    const auto until = [](const Child& child, const std::string& words) {
        for (int i = 0; i < 4000 && !has(child.err(), words); i++) nap();
        CHECK(has(child.err(), words));
    };
    for (bool hangs : {false, true}) {
        const int port = free_port();
        Child     follower("server", all, 1, port), leader("server", all, 0, port);
        until(leader, "listening on ");
        until(follower, "follows");
        if (hangs) {
            leader.stop(SIGSTOP);
            CHECK(follower.wait() == 1);
            CHECK(has(follower.err(), "server: rank 0: no answer within 2 seconds"));
            leader.stop(SIGCONT);
        } else {
            follower.stop(SIGKILL);
        }
        CHECK(leader.wait() == 1);
        CHECK(has(leader.err(), "the engine has failed, its requests got an error: rank 1: its process is gone"));
    }
}
