// quantize: a GGUF file with its matrices in another type.
// Exit codes: 0, 1 (this file cannot be converted: one line on stderr), 2 (wrong usage).
#include <unistd.h>

import quire.core.base;
import quire.core.output_file;
import quire.core.tensor;
import quire.core.thread_pool;
import quire.tools.flags.cli;
import quire.tools.quantize.convert;
import quire.tools.quantize.mix;

using namespace quire;

namespace {

// Bits for a weight of a Llama 3 8B.
double bits_per_weight(const Mix& mix) {
    struct Matrix {
        const char*  name;
        std::int64_t cols, rows;
    };
    constexpr Matrix of_a_layer[] = {{"attn_q", 4096, 4096},      {"attn_k", 4096, 1024},    {"attn_v", 4096, 1024},
                                     {"attn_output", 4096, 4096}, {"ffn_gate", 4096, 14336}, {"ffn_up", 4096, 14336},
                                     {"ffn_down", 14336, 4096}};
    std::deque<std::string> names; // tensors refer to them
    std::vector<MixTensor>  tensors;
    const auto              add = [&](std::string name, std::int64_t cols, std::int64_t rows) {
        tensors.push_back({names.emplace_back(std::move(name)), DType::F32, {cols, rows, 1, 1}});
    };
    add("token_embd.weight", 4096, 128256);
    add("output.weight", 4096, 128256);
    for (int layer = 0; layer < 32; layer++)
        for (const Matrix& m : of_a_layer) add(cat("blk.", layer, ".", m.name, ".weight"), m.cols, m.rows);
    const auto types = types_of(mix, {"llama", 32, 0, 32, 8, false}, tensors);
    double     bits = 0, weights = 0;
    for (std::size_t i = 0; i < tensors.size(); i++) {
        const double n = double(tensors[i].dims[0]) * double(tensors[i].dims[1]);
        bits += n * 8 * double(row_bytes((*types)[i], tensors[i].dims[0])) / double(tensors[i].dims[0]);
        weights += n;
    }
    return bits / weights;
}

std::string list_of_types() {
    std::string out = "\nTypes, with the bits that a weight of a Llama 3 8B takes:\n";
    for (const Mix& mix : mixes()) {
        char line[160];
        std::snprintf(line, sizeof line, "  %-10s %5.2f  %s\n", std::string(mix.name).c_str(), bits_per_weight(mix),
                      std::string(mix.note).c_str());
        out += line;
    }
    return out;
}

// Two sizes in the largest unit in which they read differently.
std::pair<std::string, std::string> sizes_apart(std::uint64_t a, std::uint64_t b) {
    constexpr std::pair<double, const char*> units[] = {{1e9, "GB"}, {1e6, "MB"}};
    for (const auto& [bytes, name] : units) {
        char first[32], second[32];
        std::snprintf(first, sizeof first, "%.2f %s", double(a) / bytes, name);
        std::snprintf(second, sizeof second, "%.2f %s", double(b) / bytes, name);
        if (std::strcmp(first, second) != 0) return {first, second};
    }
    return {cat(a, " bytes"), cat(b, " bytes")};
}

// `written`: the file that is in its place.
int run(int argc, char** argv, std::string& written) {
    CLI::App app{"Writes a GGUF file with its matrices in another type.", "quantize"};
    app.footer(list_of_types);
    add_version_flag(app);
    ConvertOptions o;
    std::string    type;
    app.add_option("IN", o.in, "GGUF file: F32, F16 or BF16; with --allow-requantize any types")->required();
    app.add_option("OUT", o.out, "file to write; it appears only when it is complete")->required();
    app.add_option("TYPE", type, "see below")->required();
    app.add_option("--imatrix", o.imatrix,
                   "importance matrix of llama-imatrix, GGUF or .dat: errors in columns with large inputs count more");
    app.add_flag("--allow-requantize", o.allow_requantize,
                 "also convert matrices that are quantised already; quality already lost does not come back");
    app.add_option("-t,--threads", o.threads, "threads; 0: one per physical core")
        ->check(within(0, 1024))
        ->default_val(0);
    try {
        parse_words(app, argc, argv);
        if (o.out == "-") throw CLI::ValidationError("OUT is no -: a GGUF file is not written to standard output");
    } catch (const CLI::ParseError& e) {
        return exit_code_of(app, e, "quantize");
    }
    o.mix = find_mix(type);
    if (o.mix == nullptr) {
        std::fprintf(stderr, "quantize: there is no type %s; --help lists them\n", quote(type).c_str());
        return 2;
    }
    if (o.threads == 0) o.threads = physical_cores();

    const bool      shows = isatty(STDERR_FILENO) == 1;
    const Stopwatch time;
    const auto      done = convert(
        o, !shows ? std::function<void(const ConvertProgress&)>() : [](const ConvertProgress& p) {
            std::fprintf(stderr, "\r\033[K%3d %%  %zu of %zu  %s  %s to %s", int(p.fraction * 100), p.index + 1, p.n,
                              quote(p.tensor).c_str(), dtype_info(p.from).name, dtype_info(p.to).name);
        });
    if (shows) std::fprintf(stderr, "\r\033[K");
    if (!done) {
        std::fprintf(stderr, "quantize: %s\n", done.error().message.c_str());
        return 1;
    }
    written = o.out;
    std::string types;
    for (const auto& [name, n] : done->types) types += cat(types.empty() ? "" : ", ", n, " ", name);
    std::printf("%s: %zu tensors (%s), %.2f GB, %.2f bits a weight instead of %.2f, %.1f s\n", o.out.c_str(),
                done->tensors, types.c_str(), double(done->bytes_out) / 1e9,
                8 * double(done->bytes_out) / double(done->weights), 8 * double(done->bytes_in) / double(done->weights),
                time.seconds());
    if (done->bytes_out > done->bytes_in) {
        const auto [larger, smaller] = sizes_apart(done->bytes_out, done->bytes_in);
        std::fprintf(stderr, "quantize: %s is larger than %s: the tensors have %s instead of %s\n", o.out.c_str(),
                     o.in.c_str(), larger.c_str(), smaller.c_str());
    }
    if (done->without_importance > 0)
        std::printf("%zu of them without importance: %s does not know them\n", done->without_importance,
                    o.imatrix.c_str());
    return 0;
}

} // namespace

int main(int argc, char** argv) try {
    std::string written;
    const int   code = run(argc, argv, written);
    const auto  ok   = flush_output();
    if (ok) return code;
    std::fprintf(stderr, "quantize: %s%s%s\n", written.c_str(), written.empty() ? "" : " is written, but ",
                 ok.error().message.c_str());
    return 1;
} catch (const std::bad_alloc&) {
    return out_of_memory("quantize");
}
