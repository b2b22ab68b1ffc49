// quire.compute.cpu.tuning: chooses by measurement how the CPU kernels prefetch weights; measures the rate of a plain sum. Owns nothing.
//
// Which cache weights should be prefetched into depends on the processor: on Zen 4, one token with Q8_0 takes twice as long if they
// go to the L1. Results are the same bits either way, so that a choice by the clock is harmless.
export module quire.compute.cpu.tuning;

import quire.compute.cpu.kernel_table;
import quire.core.base;
import quire.core.output_file;
import quire.core.processor;
import quire.core.thread_pool;
import quire.model_file.quants;

export namespace quire {

// How the weights of a type are prefetched, and the bytes a second that were measured for each cache. Zeros: an earlier start has measured.
struct PrefetchChoice {
    DType    type = DType::F32;
    Prefetch into = Prefetch::l2;
    double   l1 = 0, l2 = 0;
};

// Chooses for one type, in some 10 ms, by one token's GEMV over parts of the weights. All weights are of this type and as the kernels take
// them. Nothing if the weights are so few that they come from a cache.
std::optional<PrefetchChoice> choose_prefetch(const CpuKernels& kernels, ThreadPool& pool,
                                              std::span<const TensorView> weights);

// The choice, remembered for this processor, instruction set and number of threads in the user's cache folder
// ($XDG_CACHE_HOME/quire or ~/.cache/quire). If the file cannot be read or written, the next start measures again.
std::optional<PrefetchChoice> remembered_prefetch(const CpuKernels& kernels, int n_threads, DType type);
void                          remember_prefetch(const CpuKernels& kernels, int n_threads, const PrefetchChoice& choice);

// The choices for the types of a model's weights; other types are prefetched into the L2.
class Prefetching {
public:
    // For weights as GEMMs read them; measures a type that was not measured on this machine before.
    void        choose(const CpuKernels& kernels, ThreadPool& pool, std::span<const TensorView> weights);
    Prefetch    of(DType type) const;
    std::string describe() const; // for a person

private:
    std::vector<PrefetchChoice> choices_;
};

// Bytes a second at which the threads sum the weights (at most 2 GB of them), the best of four passes. 0: they may fit into a cache.
double sum_rate(ThreadPool& pool, std::span<const TensorView> weights);

} // namespace quire

module :private;

namespace quire {

constexpr std::size_t measured_bytes = std::size_t(96) << 20; // larger than caches

struct Piece {
    TensorView   weight;
    std::int64_t first, last; // rows
};

// Weights with as many columns as the first: n regions of pieces that threads take one by one. Fewer if there are not enough.
static std::vector<std::vector<Piece>> regions_of(std::span<const TensorView> weights, std::size_t n) {
    std::vector<std::vector<Piece>> regions(1);
    std::size_t                     bytes = 0;
    for (const TensorView& w : weights) {
        if (w.cols != weights[0].cols) continue;
        const std::size_t  stride = row_bytes(w.type, w.cols);
        const std::int64_t rows = std::max<std::int64_t>(16, std::int64_t((std::size_t(256) << 10) / stride) / 16 * 16);
        for (std::int64_t row = 0; row < w.rows; row += rows) {
            if (bytes >= measured_bytes / n) {
                if (regions.size() == n) return regions;
                regions.emplace_back();
                bytes = 0;
            }
            regions.back().push_back({w, row, std::min(w.rows, row + rows)});
            bytes += std::size_t(std::min(w.rows, row + rows) - row) * stride;
        }
    }
    regions.pop_back(); // not full
    return regions;
}

std::optional<PrefetchChoice> choose_prefetch(const CpuKernels& kernels, ThreadPool& pool,
                                              std::span<const TensorView> weights) {
    if (weights.empty()) return {};
    // Where another program takes a core for some milliseconds, only some of many short runs are disturbed, and the best one counts.
    const std::size_t                     n       = pool.n_threads() > 8 ? 4 : 12;
    const std::vector<std::vector<Piece>> regions = regions_of(weights, n);
    if (regions.size() < n) return {};
    const auto                cols = std::size_t(weights[0].cols);
    std::vector<float>        x(cols), scales(cols / 32), sums(cols / 32);
    std::vector<std::int16_t> integers(cols);
    std::vector<std::int32_t> products(cols / 32);
    for (std::size_t i = 0; i < cols; i++) x[i] = float(i % 17) - 8;
    QuantisedRows quantised{1,
                            weights[0].cols,
                            integers.data(),
                            scales.data(),
                            sums.data(),
                            products.data(),
                            wide_integers(weights[0].type)};
    if (uses_integer_gemm(weights[0].type)) kernels.quantise_rows(x.data(), quantised, 0, 1);
    std::vector<float>              packed(cols);
    std::vector<std::vector<float>> scratch(std::size_t(pool.n_threads())), out(scratch.size());
    kernels.pack_panels(x.data(), 1, weights[0].cols, packed.data(), 0, kernels.token_tiles(1));
    std::int64_t most_rows = 0;
    for (const TensorView& w : weights) most_rows = std::max(most_rows, w.rows);
    for (std::size_t i = 0; i < scratch.size(); i++)
        scratch[i].resize(gemm_scratch + 16), out[i].resize(std::size_t(most_rows));

    std::atomic<unsigned> touched{0};
    for (const std::vector<Piece>& region : regions) // pages of a file come with their first use
        pool.run(int(region.size()), [&](int item, int) {
            const auto& [w, first, last] = region[std::size_t(item)];
            const std::size_t stride     = row_bytes(w.type, w.cols);
            const auto*       bytes      = static_cast<const std::byte*>(w.data);
            unsigned          sum        = 0;
            for (std::size_t at = std::size_t(first) * stride; at < std::size_t(last) * stride; at += 4096)
                sum += unsigned(bytes[at]);
            touched += sum;
        });

    PrefetchChoice choice{.type = weights[0].type};
    const auto     run = [&](const std::vector<Piece>& region, Prefetch into) {
        std::size_t bytes = 0;
        for (const Piece& piece : region)
            bytes += std::size_t(piece.last - piece.first) * row_bytes(piece.weight.type, piece.weight.cols);
        const auto start = std::chrono::steady_clock::now();
        pool.run(int(region.size()), [&](int item, int thread) {
            const Piece& piece   = region[std::size_t(item)];
            float*       aligned = scratch[std::size_t(thread)].data();
            aligned += (64 - reinterpret_cast<std::uintptr_t>(aligned) % 64) % 64 / sizeof(float);
            GemmTask task{&piece.weight, nullptr, x.data(), &quantised, packed.data(), out[std::size_t(thread)].data(),
                          into,          1};
            task.first = piece.first, task.last = piece.last, task.scratch = aligned;
            kernels.gemm(task);
        });
        const double rate =
            double(bytes) / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        double& best = into == Prefetch::l1 ? choice.l1 : choice.l2;
        best         = std::max(best, rate);
    };
    for (std::size_t round = 0; round < 2; round++) // both caches over each region, never twice over one region
        for (std::size_t i = 0; i < n; i++) run(regions[i], (i + round) % 2 == 0 ? Prefetch::l1 : Prefetch::l2);
    choice.into = choice.l1 > choice.l2 ? Prefetch::l1 : Prefetch::l2;
    return choice;
}

static std::filesystem::path cache_file() {
    const char* cache = std::getenv("XDG_CACHE_HOME");
    const char* home  = std::getenv("HOME");
    if (cache && *cache) return std::filesystem::path(cache) / "quire" / "prefetch";
    if (home && *home) return std::filesystem::path(home) / ".cache" / "quire" / "prefetch";
    return {};
}

// A line of the file without its last word, the choice.
static std::string key_of(const CpuKernels& kernels, int n_threads, DType type) {
    return cat(processor_name(), "; ", kernels.name, "; ", n_threads, "; ", dtype_info(type).name, "; ");
}

// The lines of the file that end in a choice; of a large file the lines at its beginning.
static std::vector<std::string> remembered_lines() {
    std::ifstream in(cache_file(), std::ios::binary);
    std::string   text(std::size_t(1) << 16, 0);
    in.read(text.data(), std::ptrdiff_t(text.size()));
    text.resize(std::size_t(in.gcount()));
    std::vector<std::string> lines;
    for (std::size_t end; (end = text.find('\n')) != std::string::npos; text.erase(0, end + 1))
        if (const std::string line = text.substr(0, end); line.ends_with("; l1") || line.ends_with("; l2"))
            lines.push_back(line);
    return lines;
}

std::optional<PrefetchChoice> remembered_prefetch(const CpuKernels& kernels, int n_threads, DType type) {
    const std::string key = key_of(kernels, n_threads, type);
    for (const std::string& line : remembered_lines()) {
        if (line == key + "l1") return PrefetchChoice{.type = type, .into = Prefetch::l1};
        if (line == key + "l2") return PrefetchChoice{.type = type, .into = Prefetch::l2};
    }
    return {};
}

// Replaces the whole file, and with it broken lines. If two processes write at once, one may lose its line, which costs another measurement.
void remember_prefetch(const CpuKernels& kernels, int n_threads, const PrefetchChoice& choice) {
    const std::filesystem::path file = cache_file();
    if (file.empty()) return;
    const std::string        key   = key_of(kernels, n_threads, choice.type);
    std::vector<std::string> lines = remembered_lines();
    std::erase_if(lines, [&](const std::string& line) { return line.starts_with(key); });
    if (lines.size() >= 300) lines.clear(); // so that the file stays short enough to be read whole
    lines.push_back(key + (choice.into == Prefetch::l1 ? "l1" : "l2"));
    std::error_code error;
    std::filesystem::create_directories(file.parent_path(), error);
    std::string text;
    for (const std::string& line : lines) text += line + '\n';
    (void)write_file(file.string(), text); // a cache that cannot be written only costs the next start's measurement
}

void Prefetching::choose(const CpuKernels& kernels, ThreadPool& pool, std::span<const TensorView> weights) {
    choices_.clear();
    std::map<DType, std::vector<TensorView>> by_type;
    for (const TensorView& w : weights) by_type[w.type].push_back(w);
    for (const auto& [type, of_type] : by_type) {
        std::optional<PrefetchChoice> choice = remembered_prefetch(kernels, pool.n_threads(), type);
        if (!choice) {
            choice = choose_prefetch(kernels, pool, of_type);
            if (choice) remember_prefetch(kernels, pool.n_threads(), *choice);
        }
        if (choice) choices_.push_back(*choice);
    }
}

Prefetch Prefetching::of(DType type) const {
    for (const PrefetchChoice& choice : choices_)
        if (choice.type == type) return choice.into;
    return Prefetch::l2;
}

std::string Prefetching::describe() const {
    std::string text;
    for (const PrefetchChoice& c : choices_) {
        char rates[64] = " (remembered)";
        if (c.l1 > 0)
            std::snprintf(rates, sizeof rates, " (measured: L1 %.1f GB/s, L2 %.1f GB/s)", c.l1 / 1e9, c.l2 / 1e9);
        text += cat(text.empty() ? "prefetch: " : ", ", dtype_info(c.type).name, " into the ",
                    c.into == Prefetch::l1 ? "L1" : "L2", rates);
    }
    return text;
}

// In parts that the threads take one by one, as they take the rows of a GEMM.
double sum_rate(ThreadPool& pool, std::span<const TensorView> weights) {
    constexpr std::size_t                   part_bytes = std::size_t(1) << 20, most = std::size_t(2) << 30;
    std::vector<std::span<const std::byte>> parts;
    std::size_t                             bytes = 0;
    for (const TensorView& w : weights) {
        const std::span all(static_cast<const std::byte*>(w.data), std::size_t(w.rows) * row_bytes(w.type, w.cols));
        for (std::size_t at = 0; at < all.size() && bytes < most; at += part_bytes) {
            parts.push_back(all.subspan(at, std::min(part_bytes, all.size() - at)));
            bytes += parts.back().size();
        }
    }
    if (bytes < measured_bytes) return 0;
    std::atomic<std::uint64_t> total = 0; // used, or the compiler removes the reads
    double                     best  = 0;
    for (int pass = 0; pass < 4; pass++) {
        const auto start = std::chrono::steady_clock::now();
        pool.run(int(parts.size()), [&](int item, int) {
            const std::span<const std::byte> part = parts[std::size_t(item)];
            std::array<std::uint64_t, 16>    sum{}, words;
            for (std::size_t at = 0; at + sizeof words <= part.size(); at += sizeof words) {
                std::memcpy(words.data(), part.data() + at, sizeof words);
                for (std::size_t i = 0; i < words.size(); i++) sum[i] += words[i];
            }
            for (const std::uint64_t s : sum) total += s;
        });
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        best                 = std::max(best, double(bytes) / seconds);
    }
    return best;
}

} // namespace quire
