// bench compare: quire and llama.cpp on the CPU, alternating, each run in a process of its own.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cstdio>

import quire.compute.cpu.kernels;
import quire.core.base;
import quire.core.json;
import quire.core.processor;
import quire.core.thread_pool;

#include "commands.h"

namespace quire::bench {

namespace {

struct Ran {
    std::string out;
    double      seconds = 0;
    double      peak_mb = 0; // of resident memory
};

// A program's standard output; its standard error is dropped.
Result<Ran> run_program(std::vector<std::string> words) {
    int pipe_ends[2];
    if (pipe(pipe_ends) != 0) return fail("no pipe to be had");
    std::vector<char*> argv;
    for (std::string& w : words) argv.push_back(w.data());
    argv.push_back(nullptr);
    Stopwatch   watch;
    const pid_t child = fork();
    if (child < 0) return fail("cannot start ", words[0]);
    if (child == 0) {
        dup2(pipe_ends[1], 1);
        close(pipe_ends[0]);
        if (!std::freopen("/dev/null", "w", stderr)) _exit(127);
        execv(argv[0], argv.data());
        _exit(127);
    }
    close(pipe_ends[1]);
    Ran  ran;
    char buffer[4096];
    for (ssize_t n; (n = read(pipe_ends[0], buffer, sizeof buffer)) > 0;) ran.out.append(buffer, std::size_t(n));
    close(pipe_ends[0]);
    int    status = 0;
    rusage usage{};
    wait4(child, &status, 0, &usage);
    ran.seconds = watch.seconds();
    ran.peak_mb = double(usage.ru_maxrss) / 1024;
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) return fail(words[0], " ended without a result");
    return ran;
}

// -- the instruction set of the peer. Its programs do not say it, so their instructions are looked at.

// Whether `code` has at least eight instructions of opcode map 0F38, prefix 66, W0 with this opcode: with registers of 256 bits by
// their VEX prefix of three bytes, or of `bits` (of the fourth byte: 0x20 is 256, 0x40 is 512) by their EVEX prefix (Intel SDM, volume 2,
// 2.3 and 2.7). By chance bytes look like that once in 32 MB.
bool has_instruction(std::string_view code, bool evex, unsigned char opcode, unsigned char bits = 0) {
    const char prefix = evex ? '\x62' : '\xc4';
    int        found  = 0;
    for (std::size_t at = code.find(prefix); at != std::string_view::npos && at + 4 < code.size();
         at             = code.find(prefix, at + 1)) {
        const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(code[at + i]); };
        if (evex)
            found +=
                (byte(1) & 0x0f) == 0x02 && (byte(2) & 0x87) == 0x05 && (byte(3) & 0x60) == bits && byte(4) == opcode;
        else found += (byte(1) & 0x1f) == 0x02 && (byte(2) & 0x87) == 0x05 && byte(3) == opcode;
    }
    return found >= 8;
}

constexpr unsigned char fmadd231ps = 0xb8, dpbusd = 0x50;

// The instruction sets that llama.cpp's program, or its CPU libraries beside it, was compiled for. known: its CPU code was found.
struct PeerBuild {
    bool known = false, avx2 = false, avx_vnni = false, avx512 = false, avx512_vnni = false;
};
PeerBuild build_of(const std::filesystem::path& program) {
    std::vector<std::filesystem::path> files{program};
    for (const char* folder : {".", "../lib"}) {
        std::error_code none;
        for (const auto& entry : std::filesystem::directory_iterator(program.parent_path() / folder, none))
            if (entry.path().filename().string().starts_with("libggml-cpu")) files.push_back(entry.path());
    }
    PeerBuild build;
    for (const auto& file : files) {
        std::ifstream     in(file, std::ios::binary);
        const std::string code(std::istreambuf_iterator<char>(in), {});
        if (!code.starts_with("\x7f"
                              "ELF") ||
            !code.contains("ggml-cpu.c"))
            continue; // its messages name this file
        build.known    = true;
        build.avx512   = build.avx512 || has_instruction(code, true, fmadd231ps, 0x40);
        build.avx2     = build.avx2 || build.avx512 || has_instruction(code, false, fmadd231ps);
        build.avx_vnni = build.avx_vnni || has_instruction(code, false, dpbusd);
        build.avx512_vnni =
            build.avx512_vnni || has_instruction(code, true, dpbusd, 0x20) || has_instruction(code, true, dpbusd, 0x40);
    }
    return build;
}

// The machine, and both builds; warns where the peer has less to work with.
void print_builds(const std::string& isa, const std::string& llama_bench) {
    std::string extensions;
    for (const std::string& name : vector_extensions()) extensions += " " + name;
    std::printf("%s:%s\n", processor_name().c_str(), extensions.c_str());
    const CpuKernels* const ours = cpu_kernels(isa);
    if (ours == nullptr) return; // said by the first run
    const std::string_view name = ours->name;
    const bool zmm = name.starts_with("avx512"), ymm = zmm || name.starts_with("avx2"), vnni = name.contains("vnni");
    const PeerBuild theirs = build_of(llama_bench);
    if (!theirs.known) {
        std::printf("quire: kernels for %s; llama.cpp: its code for the CPU was not found\n\n", ours->name);
        std::fprintf(stderr,
                     "bench: %s, and the folders . and ../lib beside it, hold no CPU code of llama.cpp: what it was "
                     "compiled for is not known\n",
                     llama_bench.c_str());
        return;
    }
    std::string with, without;
    for (const auto& [has, set] : {std::pair(theirs.avx2, "AVX2 with FMA"), std::pair(theirs.avx_vnni, "AVX-VNNI"),
                                   std::pair(theirs.avx512, "AVX-512"), std::pair(theirs.avx512_vnni, "AVX-512 VNNI")})
        (has ? with : without) += cat((has ? with : without).empty() ? "" : ", ", set);
    std::printf("quire: kernels for %s; llama.cpp: compiled with %s%s%s\n\n", ours->name,
                with.empty() ? "none of these" : with.c_str(), without.empty() ? "" : ", without ", without.c_str());
    if ((ymm && !theirs.avx2) || (zmm && !theirs.avx512) || (vnni && !theirs.avx512_vnni && (zmm || !theirs.avx_vnni)))
        std::fprintf(stderr,
                     "bench: llama.cpp was compiled without instructions that quire uses here (GGML_NATIVE=ON on "
                     "this machine has them): the ratios say nothing about its kernels\n");
}

// The results of one test in each round.
struct Sides {
    std::vector<double> ours, theirs;
};

} // namespace

int compare(const Arguments& a) {
    const std::string self    = std::filesystem::read_symlink("/proc/self/exe").string();
    const std::string threads = cat(a.engine.threads > 0 ? a.engine.threads : physical_cores());
    const auto        list    = [](const std::vector<int>& values) {
        std::string text;
        for (int v : values) text += cat(text.empty() ? "" : ",", v);
        return text;
    };
    const int   most          = *std::max_element(a.npl.begin(), a.npl.end());
    std::string batched_bench = a.llama_batched_bench;
    if (batched_bench.empty())
        batched_bench = (std::filesystem::path(a.llama_bench).parent_path() / "llama-batched-bench").string();
    const bool batches = most > 0 && std::filesystem::exists(batched_bench);
    if (most > 0 && !batches) std::fprintf(stderr, "bench: without %s no batches\n", batched_bench.c_str());

    print_builds(a.engine.isa, a.llama_bench);

    std::vector<std::string>     order;
    std::map<std::string, Sides> table;
    const auto                   note = [&](const std::string& name, bool ours, double value) {
        if (!table.contains(name)) order.push_back(name);
        (ours ? table[name].ours : table[name].theirs).push_back(value);
    };
    // Reads the output of either program: JSON objects, one or an array of them per line.
    const auto read = [&](const std::string& text, bool ours) {
        std::istringstream lines(text);
        for (std::string line; std::getline(lines, line);) {
            Result<Json> json = json_parse(line);
            if (!json) continue;
            for (const Json& j : json->is_array() ? *json : Json::array({*json})) {
                if (!j.is_object()) continue;
                if (j.contains("pl")) note(cat("tg, batch ", j["pl"].get<int>()), ours, j["speed_tg"].get<double>());
                else if (j.contains("test")) note(j["test"].get<std::string>(), ours, j["avg_ts"].get<double>());
                else if (j.contains("n_gen"))
                    note(j["n_gen"].get<int>() > 0 ? cat("tg", j["n_gen"].get<int>())
                                                   : cat("pp", j["n_prompt"].get<int>()),
                         ours, j["avg_ts"].get<double>());
            }
        }
    };
    const std::vector<std::string> isa =
        a.engine.isa.empty() ? std::vector<std::string>{} : std::vector<std::string>{"--isa", a.engine.isa};
    const std::vector<std::string> common{"-m", a.model, "-t", threads},
        rates{"-p", list(a.pp), "-n", list(a.tg), "-r", cat(a.repetitions)},
        start{"-p", "16", "-n", "0", "-r", "1", "--no-warmup"},
        batch{"-npp", cat(a.npp), "-ntg", cat(a.ntg), "-npl", list(a.npl)};
    const auto words = [](std::initializer_list<std::vector<std::string>> parts) {
        std::vector<std::string> all;
        for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
        return all;
    };
    for (int round = 0; round < a.rounds; round++)
        for (bool ours : {false, true}) {
            const auto go = [&](std::vector<std::string> command) {
                std::fprintf(stderr, "\rround %d, %s   ", round + 1, ours ? "quire" : "llama.cpp");
                return run_program(std::move(command));
            };
            auto cold = go(ours ? words({{self, "model", "--device", "cpu"}, isa, common, start, {"--json"}})
                                : words({{a.llama_bench}, common, start, {"-o", "jsonl"}}));
            if (!cold) return complain(cold.error());
            note("process start to 16 tokens read, s", ours, cold->seconds);
            auto speed = go(ours ? words({{self, "model", "--device", "cpu"}, isa, common, rates, {"--json"}})
                                 : words({{a.llama_bench}, common, rates, {"-o", "jsonl"}}));
            if (!speed) return complain(speed.error());
            read(speed->out, ours);
            note("peak memory, MB", ours, speed->peak_mb);
            if (!batches) continue;
            auto many = go(ours ? words({{self, "batched", "--device", "cpu"},
                                         isa,
                                         common,
                                         {"--npp", cat(a.npp), "--ntg", cat(a.ntg), "--npl", list(a.npl), "--json"}})
                                : words({{batched_bench, "-m", a.model, "-t", threads, "-c",
                                          cat(most * (a.npp + a.ntg + 8)), "--output-format", "jsonl"},
                                         batch}));
            if (!many) return complain(many.error());
            read(many->out, ours);
        }
    std::fprintf(stderr, "\n");
    const auto middle = [](std::vector<double> v) {
        std::sort(v.begin(), v.end());
        return v.empty() ? 0.0 : (v[(v.size() - 1) / 2] + v[v.size() / 2]) / 2;
    };
    std::printf("| %s, %s threads | quire | llama.cpp | ratio | of the rounds |\n| --- | ---: | ---: | ---: | ---: |\n",
                std::filesystem::path(a.model).filename().c_str(), threads.c_str());
    for (const std::string& name : order) {
        const Sides& s = table[name];
        if (s.ours.size() != s.theirs.size()) continue;
        std::vector<double> ratios;
        for (std::size_t i = 0; i < s.ours.size(); i++) ratios.push_back(s.ours[i] / s.theirs[i]);
        std::printf("| %s | %.4g | %.4g | %.2f | %.2f to %.2f |\n", name.c_str(), middle(s.ours), middle(s.theirs),
                    middle(ratios), *std::min_element(ratios.begin(), ratios.end()),
                    *std::max_element(ratios.begin(), ratios.end()));
    }
    return 0;
}

} // namespace quire::bench
