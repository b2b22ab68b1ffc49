// quire.engine.kv_quality: what a type of K and V, or prompts in fp8, change in a model's predictions, as `bench quality` has measured it, and the
// type that is chosen by it. The measurements are lines of a file, the last one of a model and type counts. Owns nothing.
//
//   kv-quality   in $XDG_CACHE_HOME/quire or ~/.cache/quire: fingerprint of the model, type, positions, mean KLD, p99 KLD
module;

#include <sys/stat.h>

export module quire.engine.kv_quality;

import quire.core.base;
import quire.engine.fingerprint;
import quire.engine.options;
import quire.model_file.gguf;

export namespace quire {

// Kullback-Leibler divergences from the predictions with K and V in f32, in nats.
struct KvQuality {
    int    positions = 0; // of a text
    double mean = 0, p99 = 0;
};

// Measurements of fewer positions are not remembered.
inline constexpr int least_quality_positions = 500;

// Nothing: it was not measured.
std::optional<KvQuality> remembered_kv_quality(std::uint64_t model, std::string_view type);
// The file's path. Error: it cannot be written.
Result<std::string> remember_kv_quality(std::uint64_t model, std::string_view type, const KvQuality& quality);

// Where `options` leave the type open, sets it: of the types with the fewest bytes the one with the least mean KLD, if that is below the limit; else
// F16. Types are measured for K and V together: where one of the two is named, the other one gets the same type or F16. Returns a sentence about the
// type for the user; "": there is nothing to say.
std::string choose_kv_type(const std::string& path, EngineOptions& options);

// In the file of measurements: GEMMs of prompts in e4m3, against those in 16 bits with the same type of K and V.
inline constexpr std::string_view fp8_prompts = "fp8-prompts";
// A sentence for the user about prompts in fp8; "": they are not.
std::string prompt_quality(const std::string& path, const EngineOptions& options);

} // namespace quire

module :private;

namespace quire {

std::filesystem::path quality_file() {
    const char* cache = std::getenv("XDG_CACHE_HOME");
    const char* home  = std::getenv("HOME");
    if (cache && *cache) return std::filesystem::path(cache) / "quire" / "kv-quality";
    if (home && *home) return std::filesystem::path(home) / ".cache" / "quire" / "kv-quality";
    return {};
}

std::optional<KvQuality> remembered_kv_quality(std::uint64_t model, std::string_view type) {
    std::ifstream            in(quality_file());
    std::optional<KvQuality> found;
    for (std::string line; std::getline(in, line) && line.size() < 200;) {
        const auto words = split(line, ' ');
        if (words.size() != 5 || to_number<std::uint64_t>(words[0]) != model || words[1] != type) continue;
        const auto positions = to_number<int>(words[2]);
        const auto mean = to_number<double>(words[3]), p99 = to_number<double>(words[4]);
        const auto is_good = [](const auto& nats) { return nats && std::isfinite(*nats) && *nats >= 0; };
        if (positions && is_good(mean) && is_good(p99)) found = KvQuality{*positions, *mean, *p99};
    }
    return found;
}

Result<std::string> remember_kv_quality(std::uint64_t model, std::string_view type, const KvQuality& q) {
    const std::filesystem::path path = quality_file();
    if (path.empty()) return fail("there is no folder for measurements: name one in XDG_CACHE_HOME");
    std::error_code error;
    std::filesystem::create_directories(path.parent_path(), error);
    std::ofstream     out(path, std::ios::app);
    const std::string line = cat(model, ' ', type, ' ', q.positions, ' ', q.mean, ' ', q.p99, '\n');
    out.write(line.data(), std::ptrdiff_t(line.size())); // at once: others may append, too
    out.close();
    if (!out) return fail_with(ErrorKind::system, "cannot write ", path.string());
    return path.string();
}

std::string said_of(std::string_view type, const KvQuality& q) {
    return cat("K and V are ", type, ": mean KLD ", q.mean, ", p99 ", q.p99, ", against f32 at ", q.positions,
               " positions (bench quality)");
}

std::string choose_kv_type(const std::string& path, EngineOptions& o) {
    const Result<Gguf> file = Gguf::open(path);
    if (!file) return {}; // Engine::load() says why
    const std::uint64_t model = fingerprint(*file);
    if (!o.kv_type_auto || (o.k_named && o.v_named)) {
        const auto is_fine = [](DType type) { return type == DType::F16 || type == DType::F32; };
        if (is_fine(o.kv_type.k) && is_fine(o.kv_type.v)) return {};
        const auto measured = remembered_kv_quality(model, name_of(o.kv_type));
        return measured ? said_of(name_of(o.kv_type), *measured)
                        : cat("K and V are ", name_of(o.kv_type),
                              ": what this changes was not measured for this model (bench quality -m FILE)");
    }
    const bool  one    = o.k_named || o.v_named;
    const DType named  = o.k_named ? o.kv_type.k : o.kv_type.v;
    const auto  choose = [&o](DType type) {
        if (!o.k_named) o.kv_type.k = type;
        if (!o.v_named) o.kv_type.v = type;
    };
    const std::string in_f16 = !one        ? std::string("K and V are f16: ")
                               : o.k_named ? cat("V is f16 beside K in ", name_of(named), ": ")
                                           : cat("K is f16 beside V in ", name_of(named), ": ");
    choose(DType::F16);
    if (one && named != DType::I8 && named != DType::F8)
        return named == DType::F16 ? "" : in_f16 + "no such pair is measured";
    if (o.device != "cpu" && o.block_size % 4 != 0) // a GPU has no others then
        return in_f16 + "of the block sizes only multiples of 4 go with other types on a GPU";
    std::optional<KvQuality> best, least;
    std::string_view         name, least_name;
    for (const DType type : {DType::I8, DType::F8}) {
        if (one && type != named) continue;
        const auto q = remembered_kv_quality(model, name_of(type));
        if (!q) continue;
        if (!least || q->mean < least->mean) least = q, least_name = name_of(type);
        if (q->mean > o.kv_type_limit || (best && best->mean <= q->mean)) continue;
        best = q, name = name_of(type);
        choose(type);
    }
    if (best) return said_of(name, *best);
    if (!least)
        return cat(in_f16, one ? name_of(named) : "no other type", one ? " was not measured" : " was measured",
                   " for this model (bench quality -m FILE)");
    return cat(in_f16, "the mean KLD of ", least_name, " is ", least->mean, ", above --kv-type-limit ",
               o.kv_type_limit);
}

std::string prompt_quality(const std::string& path, const EngineOptions& o) {
    if (o.fp8_rows == 0) return {};
    const Result<Gguf> file = Gguf::open(path);
    if (!file) return {}; // Engine::load() says why
    const auto q = remembered_kv_quality(fingerprint(*file), fp8_prompts);
    return q ? cat("prompts are in fp8: mean KLD ", q->mean, ", p99 ", q->p99, ", against 16 bits at ", q->positions,
                   " positions (bench quality)")
             : std::string(
                   "prompts are in fp8: what this changes was not measured for this model (bench quality -m "
                   "FILE --prompt-precision fp8)");
}

} // namespace quire
