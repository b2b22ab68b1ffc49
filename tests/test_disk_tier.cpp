// The prefix cache in files: an engine that starts with another's directory answers the same, bit for bit, and computes less.
#include <sys/resource.h>
#include <unistd.h>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include <filesystem>
#include <fstream>

#include "folder.h"
#include "process.h"
#include "reference.h"

import quire.core.base;
import quire.core.std;
import quire.engine.engine;
import quire.core.tensor;
import quire.engine.fingerprint;
import quire.model_file.gguf;
import quire.model_file.gguf_writer;
import quire.model_file.quants;
import quire.schedule.request;
import quire.schedule.scheduler;

#include "engine_tools.h"
#include "odd_model.h"

using namespace quire;
using namespace quire::testing;
namespace fs = std::filesystem;

namespace {

std::vector<Token> prompt_of(int n, int first) {
    std::vector<Token> tokens;
    for (int i = 0; i < n; i++) tokens.push_back(5 + (first + i * 37) % 600);
    return tokens;
}

EngineOptions options_of(const std::string& directory) {
    EngineOptions o;
    o.threads             = 1;
    o.block_size          = 8;
    o.kv_blocks           = 20;
    o.max_sequences       = 2;
    o.context             = 128;
    o.checkpoint_interval = 16;
    o.kv_dir              = directory;
    if (!directory.empty()) o.kv_host_bytes = std::int64_t(64) << 20;
    return o;
}

struct Asked {
    std::vector<Answer> answers;
    EngineStats         stats;
};

// Requests of several users, now and then two at a time.
Asked ask(const std::string& model, const EngineOptions& o, const std::string& salt = "") {
    Engine               engine = load(model, o);
    std::vector<Request> requests;
    for (int i = 0; i < 6; i++) {
        Request& r   = requests.emplace_back(greedy(prompt_of(70, 50 * (i / 2)), 6));
        r.cache_salt = salt;
        if (i % 2) r.prompt[40] = 7; // begins as the one before it
    }
    Asked asked;
    asked.answers = run(engine, requests, {0, 2, 40, 44, 80, 81});
    std::vector<Output> events;
    while (engine.step(events)) {} // what is left to be moved
    asked.stats = engine.stats();
    return asked;
}

bool same(const Asked& a, const Asked& b) {
    return std::ranges::equal(a.answers, b.answers, [](const Answer& x, const Answer& y) { return identical(x, y); });
}

} // namespace

TEST_CASE("after a restart the same prompts have the same answers, from files") {
    struct Case {
        const char* model;
        KvTypes     types = DType::F16; // of K and V
    };
    const Case of = GENERATE(values<Case>({{"llama3-gqa-Q8_0.gguf"},
                                           {"llama3-gqa-Q8_0.gguf", DType::I8},
                                           {"llama3-gqa-Q8_0.gguf", DType::F8},
                                           {"llama3-gqa-Q8_0.gguf", KvTypes(DType::I8, DType::BF16)},
                                           {"mistral-swa-Q8_0.gguf"},
                                           {"gemma2-Q8_0.gguf"},
                                           {"gemma2-Q8_0.gguf", KvTypes(DType::I8, DType::BF16)},
                                           {"deepseek2-Q8_0.gguf"},
                                           {"deepseek2-Q8_0.gguf", DType::F8},
                                           {"gemma4-Q8_0.gguf"},
                                           {"lfm2-Q8_0.gguf"},
                                           {"qwen35-k-Q4_K_M.gguf"},
                                           {"nemotron_h-Q8_0.gguf"}}));
    CAPTURE(of.model, name_of(of.types));
    const std::string model = reference(cat("models/", of.model));
    Folder            folder;
    const auto        options = [&](const std::string& directory) {
        EngineOptions o = options_of(directory);
        o.kv_type       = of.types;
        return o;
    };
    const Asked plain = ask(model, options("")), first = ask(model, options(folder.path)),
                second = ask(model, options(folder.path));
    CHECK(same(first, plain));
    CHECK(same(second, plain));
    CHECK(first.stats.disk_tokens == 0);
    CHECK(second.stats.disk_tokens > 0);
    CHECK(second.stats.cached_tokens > first.stats.cached_tokens);
    CHECK(second.stats.prefill_tokens < first.stats.prefill_tokens);
    CHECK(second.stats.disk.damaged == 0);

    // Bytes that flip, ends that are missing: the answers do not change.
    std::mt19937 random(3);
    for (int round = 0; round < 4; round++) {
        for (const auto& entry : fs::directory_iterator(folder.path)) {
            if (entry.path().extension() != ".kv") continue;
            const auto size = fs::file_size(entry.path());
            if (round == 3) {
                fs::resize_file(entry.path(), size - random() % size / 2);
                continue;
            }
            std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
            for (int i = 0; i < 3; i++) {
                file.seekp(std::streamoff(random() % size));
                file.put(char(random()));
            }
        }
        CAPTURE(round);
        CHECK(same(ask(model, options(folder.path)), plain));
    }
}

TEST_CASE("blocks in files are told, also those of an earlier process, and those that go") {
    const std::string   model = reference("models/llama3-gqa-Q8_0.gguf");
    Folder              folder;
    EngineOptions       o = options_of(folder.path);
    std::set<BlockHash> there;
    for (int round = 0; round < 3; round++) {
        if (round == 2) o.kv_disk_bytes = 10'000;
        Engine engine = load(model, o);
        engine.log_cache(true);
        std::set<BlockHash> now;
        int                 n_gone = 0;
        (void)run(engine, {greedy(prompt_of(70, 50 * (round % 2)), 6)}, {0});
        std::vector<Output> events;
        while (engine.step(events)) {}
        std::this_thread::sleep_for(std::chrono::milliseconds(50)); // the thread writes
        (void)run(engine, {greedy(prompt_of(30, 7), 3)}, {0});
        for (const CacheChange& c : engine.take_cache_changes()) {
            if (c.medium != Medium::files) continue;
            if (!c.stored) n_gone += int(now.erase(c.hash));
            else {
                CHECK((!c.parent || now.contains(*c.parent)));
                CHECK(now.insert(c.hash).second);
                CHECK(c.tokens.size() == 8);
            }
        }
        CAPTURE(round);
        if (round < 2) CHECK(now.size() > 8);
        if (round == 1)
            for (const BlockHash hash : there) CHECK(now.contains(hash));
        if (round == 2) CHECK(n_gone > 0);
        there = now;
    }
}

TEST_CASE("with a key the files have requests with a salt, each for its own salt") {
    const std::string model = reference("models/llama3-gqa-Q8_0.gguf");
    Folder            folder;
    EngineOptions     o = options_of(folder.path + "/kv");
    o.kv_key            = folder.path + "/key";
    std::ofstream(o.kv_key) << std::string(32, 'k');
    const Asked plain = ask(model, options_of("")), first = ask(model, o, "mine");
    CHECK(first.stats.disk.written > 0);
    CHECK(ask(model, o, "yours").stats.disk_tokens == 0);
    CHECK(ask(model, o).stats.disk_tokens == 0);
    const Asked again = ask(model, o, "mine");
    CHECK(same(again, plain));
    CHECK(again.stats.disk_tokens > 0);
    std::ofstream(o.kv_key) << std::string(32, 'o');
    CHECK(ask(model, o, "mine").stats.disk_tokens == 0); // another key
    o.kv_dir.clear();
    CHECK(Engine::load(model, o).error().message.find("--kv-dir") != std::string::npos);
}

TEST_CASE("requests with a salt are not in files") {
    const std::string model = reference("models/llama3-gqa-Q8_0.gguf");
    Folder            folder;
    const Asked       first = ask(model, options_of(folder.path), "mine");
    CHECK(first.stats.disk.written == 0);
    CHECK(ask(model, options_of(folder.path)).stats.disk_tokens == 0);
    CHECK(ask(model, options_of(folder.path), "mine").stats.disk_tokens == 0);
}

TEST_CASE("another model, another type of KV and another size of blocks find nothing in files") {
    const std::string model = reference("models/llama3-gqa-Q8_0.gguf");
    Folder            folder;
    (void)ask(model, options_of(folder.path));
    EngineOptions o = options_of(folder.path);
    o.kv_type       = DType::F32;
    CHECK(ask(model, o).stats.disk_tokens == 0);
    o         = options_of(folder.path);
    o.threads = 2; // the bits do not depend on it
    CHECK(ask(model, o).stats.disk_tokens > 0);
    o            = options_of(folder.path);
    o.block_size = 4;
    o.kv_blocks  = 40;
    CHECK(ask(model, o).stats.disk_tokens == 0);
    CHECK(ask(reference("models/llama3-gqa-F16.gguf"), options_of(folder.path)).stats.disk_tokens == 0);
    CHECK(ask(model, options_of(folder.path)).stats.disk_tokens > 0);
}

TEST_CASE("after a restart as much of a prompt is found as without it") {
    const std::string name = GENERATE("llama3-gqa-Q8_0.gguf", "mistral-swa-Q8_0.gguf", "gemma2-Q8_0.gguf",
                                      "gemma4-Q8_0.gguf", "lfm2-Q8_0.gguf", "qwen35-k-Q4_K_M.gguf");
    CAPTURE(name);
    const std::string model = reference(cat("models/", name));
    Folder            folder;
    EngineOptions     o = options_of(folder.path);
    o.kv_blocks         = 200;
    const auto texts    = [](int user) { // a beginning that all users share, and their own
        std::vector<Token> tokens = prompt_of(64, 3);
        for (Token t : prompt_of(30, 100 * user)) tokens.push_back(t);
        return tokens;
    };
    const auto ask_for = [](Engine& engine, std::vector<Token> prompt) {
        const Answer        answer = run(engine, {greedy(std::move(prompt), 3)}, {0})[0];
        std::vector<Output> events;
        while (engine.step(events)) {}
        return answer;
    };
    std::vector<Answer> before;
    {
        Engine engine = load(model, o);
        (void)ask_for(engine, prompt_of(64, 3)); // a state at its end
        for (int user : {1, 2, 1, 3}) before.push_back(ask_for(engine, texts(user)));
    }
    {
        Engine engine = load(model, o);
        (void)ask_for(engine, texts(1)); // brings the shared beginning back to the memory
        const Answer third = ask_for(engine, texts(3));
        CHECK(third.cached_tokens >= before[3].cached_tokens);
        CHECK(identical(third, before[3]));
    }
    Engine  engine    = load(model, o);
    Request move      = greedy(texts(1), 0);
    move.cache_move   = CacheMove::load;
    const int n_moved = run(engine, {move}, {0})[0].cached_tokens;
    CHECK(n_moved >= 64);
    CHECK(ask_for(engine, texts(1)).cached_tokens >= n_moved - 8);
    const Answer other = ask_for(engine, texts(2));
    CHECK(other.cached_tokens >= 64);
    CHECK(identical(other, before[1]));
}

TEST_CASE("weights that have changed find nothing in files, whatever the file's time says") {
    Folder            folder;
    const std::string model = folder.path + "/model.gguf", files = folder.path + "/kv";
    fs::copy_file(reference("models/llama3-gqa-F16.gguf"), model);
    const auto  time  = fs::last_write_time(model);
    const Asked first = ask(model, options_of(files));
    fs::last_write_time(model, time + std::chrono::hours(1));
    CHECK(ask(model, options_of(files)).stats.disk_tokens > 0); // the time alone does not matter
    {
        const Gguf              file = value_of(Gguf::open(model));
        const GgufTensor* const k    = file.tensor("blk.0.attn_k.weight");
        REQUIRE(k);
        std::ifstream     in(model, std::ios::binary);
        const std::string all((std::istreambuf_iterator<char>(in)), {});
        const std::size_t at = all.find(std::string_view(reinterpret_cast<const char*>(k->data), k->bytes));
        REQUIRE(at != all.npos);
        std::fstream out(model, std::ios::in | std::ios::out | std::ios::binary);
        for (std::size_t i = 100; i + 100 < k->bytes / 2; i += 2) { // where no sample is taken
            out.seekp(std::streamoff(at + i + 1));
            out.put(char(all[at + i + 1] ^ 0x80));
        }
    }
    fs::last_write_time(model, time);
    const Asked plain = ask(model, options_of("")), again = ask(model, options_of(files));
    CHECK_FALSE(same(plain, first));
    CHECK(same(again, plain));
    CHECK(again.stats.disk_tokens == 0);
}

TEST_CASE("a file that is written is another one, also where its time is still to come") {
    Folder            folder;
    const std::string model = folder.path + "/model.gguf";
    fs::copy_file(reference("models/llama3-gqa-F16.gguf"), model);
    const Gguf              file = value_of(Gguf::open(model));
    const auto              time = fs::last_write_time(model) + std::chrono::hours(1000);
    std::set<std::uint64_t> seen;
    for (int hours = 0; hours < 3; hours++) {
        fs::last_write_time(model, time + std::chrono::hours(hours));
        CHECK(fingerprint_now(file) == fingerprint_now(file));
        CHECK(seen.insert(fingerprint_now(file)).second);
    }
}

TEST_CASE("the hash of all weights does not depend on threads, nor on what is remembered") {
    Folder              folder;
    const Gguf          file = value_of(Gguf::open(reference("models/llama3-gqa-Q8_0.gguf")));
    const std::uint64_t hash = full_fingerprint(file, 1, "");
    CHECK(full_fingerprint(file, 3, "") == hash);
    CHECK(full_fingerprint(file, 1, folder.path) == hash);
    CHECK(full_fingerprint(file, 1, folder.path) == hash);
    std::ofstream(folder.path + "/weights") << "1 2 3\nno line\n" << std::string(1000, 'x');
    CHECK(full_fingerprint(file, 1, folder.path) == hash);
    CHECK(full_fingerprint(value_of(Gguf::open(reference("models/llama3-gqa-F16.gguf"))), 1, folder.path) != hash);
}

TEST_CASE("another context finds what is in files") {
    const std::string model = reference("models/llama3-gqa-Q8_0.gguf");
    Folder            folder;
    const Asked       first = ask(model, options_of(folder.path));
    EngineOptions     o     = options_of(folder.path);
    o.context               = 120;
    const Asked second      = ask(model, o);
    CHECK(second.stats.disk_tokens > 0);
    CHECK(same(second, first));
}

TEST_CASE("segments of another directory change no answer") {
    const std::string model = reference("models/llama3-gqa-Q8_0.gguf");
    Folder            mine, other;
    const auto        fill = [&](const Folder& folder, std::vector<Token> prompt) {
        Engine engine = load(model, options_of(folder.path));
        (void)run(engine, {greedy(std::move(prompt), 1)}, {0});
        std::vector<Output> events;
        while (engine.step(events)) {}
    };
    std::vector<Token> first = prompt_of(32, 1), second = prompt_of(32, 333), tail = prompt_of(40, 7);
    const auto         with_tail = [&](std::vector<Token> tokens) {
        tokens.insert(tokens.end(), tail.begin(), tail.end());
        return tokens;
    };
    fill(mine, second);
    fill(mine, with_tail(second));
    fill(other, first); // with the serials that the other beginning has
    fs::copy_file(other.path + "/1.kv", mine.path + "/1.kv", fs::copy_options::overwrite_existing);
    Engine       plain = load(model, options_of("")), mixed = load(model, options_of(mine.path));
    const Answer right = run(plain, {greedy(with_tail(first), 6)}, {0})[0];
    const Answer got   = run(mixed, {greedy(with_tail(first), 6)}, {0})[0];
    CHECK(got.cached_tokens == 32);
    CHECK(identical(got, right));
}

TEST_CASE("a text that the files do not take is not said to be saved") {
    const std::string model = reference("models/llama3-gqa-Q8_0.gguf");
    Folder            folder;
    EngineOptions     o = options_of(folder.path);
    Request           save;
    save.prompt     = prompt_of(70, 5);
    save.cache_move = CacheMove::save;
    for (const bool small : {false, true}) {
        o.kv_disk_bytes = small ? 10'000 : std::int64_t(1) << 20;
        Engine engine   = load(model, o);
        (void)run(engine, {greedy(prompt_of(70, 5), 3)}, {0});
        const Answer saved = run(engine, {save}, {0})[0];
        CHECK(saved.finish == (small ? FinishReason::failed : FinishReason::stop));
        CHECK((saved.cached_tokens == 64) == !small);
    }
    o.kv_disk_bytes     = 1000;
    Result<Engine> none = Engine::load(model, o);
    REQUIRE_FALSE(none.has_value());
    CHECK(none.error().message.find("--kv-disk-bytes 1000 is too little for " + folder.path) == 0);
}

namespace {

// No file can become larger than this, as if the disk were full.
struct FullDisk {
    FullDisk() {
        getrlimit(RLIMIT_FSIZE, &before);
        const rlimit small{100, before.rlim_max};
        setrlimit(RLIMIT_FSIZE, &small);
    }
    FullDisk(const FullDisk&) = delete;
    ~FullDisk() { setrlimit(RLIMIT_FSIZE, &before); }
    rlimit before{};
};

// Runs a request, and all that its blocks do behind it.
Answer settle(Engine& engine, const Request& request) {
    const Answer        answer = run(engine, {request}, {0})[0];
    std::vector<Output> events;
    for (int i = 0; i < 20; i++) engine.step(events);
    engine.check_invariants();
    return answer;
}

Request save_of(std::vector<Token> prompt) {
    Request save;
    save.prompt     = std::move(prompt);
    save.cache_move = CacheMove::save;
    return save;
}

} // namespace

TEST_CASE("what a full disk has refused is written when its text is used again, or saved") {
    const std::string name  = GENERATE("llama3-gqa-Q8_0.gguf", "gemma2-Q8_0.gguf", "lfm2-Q8_0.gguf");
    const bool        saves = GENERATE(false, true);
    CAPTURE(name, saves);
    const std::string model = reference(cat("models/", name));
    Folder            folder;
    EngineOptions     o = options_of(folder.path);
    o.kv_files.jobs     = [] { return 100; }; // each step writes
    Answer first;
    int    n_known = 0; // tokens that the memory has in whole blocks
    {
        Engine      engine = load(model, o);
        Answer      refused;
        EngineStats full, idle;
        bool        busy = false;
        {
            const FullDisk disk;
            first   = settle(engine, greedy(prompt_of(70, 5), 3));
            n_known = settle(engine, greedy(prompt_of(70, 5), 3)).cached_tokens / 8 * 8;
            refused = settle(engine, save_of(prompt_of(70, 5)));
            full    = engine.stats();
            std::vector<Output> events;
            for (int i = 0; i < 20; i++) busy = engine.step(events) || busy;
            idle = engine.stats();
        }
        CHECK(n_known > 0);
        CHECK(full.disk.written == 0);
        CHECK(full.disk.refused > 0);
        CHECK(refused.finish == FinishReason::failed);
        CHECK_FALSE(busy); // nothing is tried again while there are no requests
        CHECK(idle.disk.refused == full.disk.refused);
        if (saves) {
            const Answer saved = settle(engine, save_of(prompt_of(70, 5)));
            CHECK(saved.finish == FinishReason::stop);
            CHECK(saved.cached_tokens >= n_known);
        } else {
            (void)settle(engine, greedy(prompt_of(70, 5), 3));
        }
        CHECK(engine.stats().disk.written >= 8);
    }
    Engine       engine = load(model, o);
    const Answer again  = settle(engine, greedy(prompt_of(70, 5), 3));
    CHECK(again.cached_tokens >= n_known);
    CHECK(identical(again, first));
}

TEST_CASE("a text whose records went with the oldest files is written again when it is used again, or saved") {
    const std::string model = reference("models/llama3-gqa-Q8_0.gguf");
    const bool        saves = GENERATE(false, true);
    CAPTURE(saves);
    Folder        folder;
    EngineOptions o = options_of(folder.path);
    o.kv_files.jobs = [] { return 100; };
    o.kv_disk_bytes = 200'000;
    {
        Engine engine = load(model, o);
        (void)settle(engine, greedy(prompt_of(70, 5), 3));
        for (int i = 0; i < 300 && engine.stats().disk.segments_gone < 16; i++)
            (void)settle(engine, greedy(prompt_of(70, 6 + i), 3));
        REQUIRE(engine.stats().disk.segments_gone >= 16);
        if (saves) {
            const Answer saved = settle(engine, save_of(prompt_of(70, 5)));
            CHECK(saved.finish == FinishReason::stop);
            CHECK(saved.cached_tokens == 64);
        } else {
            (void)settle(engine, greedy(prompt_of(90, 5), 3)); // goes on behind them
        }
    }
    Engine engine = load(model, o);
    CHECK(settle(engine, greedy(prompt_of(90, 5), 3)).cached_tokens == (saves ? 64 : 88));
}

TEST_CASE("a text is saved however many others are written meanwhile") {
    const std::string model = reference("models/llama3-gqa-Q8_0.gguf");
    Folder            folder;
    EngineOptions     o = options_of(folder.path);
    o.kv_host_bytes     = 60 * std::int64_t(load(model, options_of("")).block_bytes() + 4096);
    o.kv_files.jobs     = [] { return 1; }; // the others' blocks come faster
    Engine engine       = load(model, o);
    REQUIRE(engine.options().tier_blocks >= 60);
    constexpr int       asks = 60, most = 400; // steps
    RequestId           saving = 0;
    bool                ended  = false;
    std::vector<Output> events;
    for (int step = 0; step < most && !ended; step++) {
        if (step % 3 == 0) REQUIRE(engine.submit(greedy(prompt_of(70, step / 3), 3)).has_value());
        if (step == asks) saving = value_of(engine.submit(save_of(prompt_of(70, 0))));
        events.clear();
        engine.step(events);
        ended = std::ranges::any_of(events, [&](const Output& e) { return step >= asks && e.id == saving && e.done; });
    }
    CHECK(ended);
}

TEST_CASE("an engine says what the files have") {
    const std::string model = reference("models/llama3-gqa-Q8_0.gguf");
    Folder            folder;
    CHECK(load(model, options_of("")).files_found().empty());
    const std::string none = load(model, options_of(folder.path)).files_found();
    CHECK(none == "the KV files in " + folder.path + " have 0 bytes with 0 records for this model and these settings");
    (void)ask(model, options_of(folder.path));
    EngineOptions o = options_of(folder.path);
    o.kv_type       = DType::F32;
    CHECK(load(model, o).files_found().find("with 0 records for this model and these settings; 1 file for others") !=
          std::string::npos);
    CHECK(load(model, options_of(folder.path)).files_found().find(" 0 records") == std::string::npos);
}

TEST_CASE("files need room in host memory, and a directory of their own") {
    const std::string model = reference("models/llama3-gqa-Q8_0.gguf");
    Folder            folder;
    EngineOptions     o = options_of(folder.path);
    o.kv_host_bytes     = 0;
    Result<Engine> none = Engine::load(model, o);
    REQUIRE_FALSE(none.has_value());
    CHECK(none.error().message.find("--kv-host-bytes") != std::string::npos);
    Engine        first   = load(model, options_of(folder.path));
    EngineOptions again   = options_of(folder.path);
    again.device          = "cpu";
    Result<Engine> second = Engine::load(model, again);
    REQUIRE_FALSE(second.has_value());
    CHECK(second.error().message == folder.path + " is in use by another process");
}

TEST_CASE(
    "the bytes of host memory pay for the bookkeeping of small blocks, and by default there are not millions of them") {
    Folder            folder;
    const std::string model = folder.path + "/small.gguf";
    write_odd_model(model, {"small", DType::F32, 32, 1, 1, 8, 8, 32, 300, 1});
    EngineOptions o      = options_of(folder.path + "/kv");
    o.kv_host_bytes      = 1 << 20;
    const int block      = 8 * 2 * 8 * 2; // bytes: tokens, K and V, dimensions, F16
    const int with_notes = block + 512 + 8 * 8;
    CHECK(load(model, o).options().tier_blocks == (1 << 20) / with_notes);
    o.kv_host_bytes       = -1;
    const Engine standard = load(model, o);
    CHECK(standard.options().tier_blocks <= 1 << 18);
    CHECK(standard.options().kv_host_bytes <= std::int64_t(1 << 18) * with_notes);
}

TEST_CASE("a request that is cancelled while its files are read ends, and leaves nothing behind") {
    const std::string model = reference("models/llama3-gqa-Q8_0.gguf");
    Folder            folder;
    (void)ask(model, options_of(folder.path));
    Engine              engine = load(model, options_of(folder.path));
    std::vector<Output> events;
    for (int i = 0; i < 20; i++) {
        Result<RequestId> id = engine.submit(greedy(prompt_of(70, 0), 6));
        REQUIRE(id.has_value());
        for (int steps = i % 4; steps > 0; steps--) engine.step(events);
        engine.cancel(*id);
        while (engine.step(events)) engine.check_invariants();
        REQUIRE(!events.empty());
        CHECK(events.back().done);
        events.clear();
    }
    CHECK(engine.stats().blocks_used == 0);
}

TEST_CASE("a prompt of which the files have nothing does not wait for them") {
    const std::string model = reference("models/llama3-gqa-Q8_0.gguf");
    Folder            folder;
    EngineOptions     o      = options_of(folder.path);
    int               n_jobs = 100; // of files in each step
    o.kv_files.jobs          = [&] { return n_jobs; };
    Engine engine            = load(model, o);
    (void)settle(engine, greedy(prompt_of(70, 5), 3));
    REQUIRE(engine.stats().disk.written > 0);
    n_jobs = 0; // the disk is busy
    REQUIRE(engine.submit(greedy(prompt_of(70, 333), 3)));
    std::vector<Output> events;
    for (int i = 0; i < 20; i++) engine.step(events);
    CHECK(std::ranges::any_of(events, [](const Output& output) { return output.finish != FinishReason::none; }));
}

TEST_CASE("a request without the cache finds nothing, leaves nothing, and nothing of it is in files") {
    const std::string name = GENERATE("llama3-gqa-Q8_0.gguf", "gemma2-Q8_0.gguf", "lfm2-Q8_0.gguf");
    CAPTURE(name);
    Folder        folder;
    EngineOptions o = options_of(folder.path + "/kv");
    o.kv_key        = folder.path + "/key"; // files have all namespaces
    std::ofstream(o.kv_key) << std::string(32, 'k');
    o.kv_files.jobs     = [] { return 100; };
    Engine       engine = load(reference(cat("models/", name)), o);
    const Answer first  = settle(engine, greedy(prompt_of(70, 5), 3));
    const auto   before = engine.stats();
    Request      alone  = greedy(prompt_of(70, 5), 3);
    alone.uses_cache    = false;
    for (int i = 0; i < 3; i++) {
        const Answer answer = settle(engine, alone);
        CHECK(answer.cached_tokens == 0);
        CHECK(answer.tokens == first.tokens);
    }
    CHECK(engine.stats().disk.written == before.disk.written);
    CHECK(engine.stats().blocks_used == before.blocks_used);
    CHECK(engine.stats().host_cached == before.host_cached);
    CHECK(settle(engine, greedy(prompt_of(70, 5), 3)).cached_tokens >= 64);
}

TEST_CASE("an engine that ends brings to files what they could not take at once") {
    const std::string model = reference("models/llama3-gqa-Q8_0.gguf");
    Folder            folder;
    EngineOptions     o = options_of(folder.path);
    o.kv_host_bytes     = 10 * std::int64_t(load(model, options_of("")).block_bytes() + 4096);
    o.kv_files.jobs     = [] { return 1; };
    {
        Engine engine = load(model, o);
        REQUIRE(engine.options().tier_blocks >= 10);
        REQUIRE(engine.options().tier_blocks < 24);
        (void)run(engine, {greedy(prompt_of(70, 5), 3)}, {0});
        CHECK(engine.stats().disk.written < 8);
        engine.flush(60);
        std::vector<Output> none;
        for (int i = 0; i < 20; i++) engine.step(none); // the thread's work, which ends by itself
        CHECK(engine.stats().disk.written >= 8);
    }
}
