// quire.engine.fingerprint: whether two processes have the same model, and whether K and V that one has computed are those of the other. Owns
// nothing.
//
//   weights   in a directory of segments: what is known of model files, a line each: a hash of names and times of the files, the hash of all
//             weights, a checksum of both
module;

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <ctime>

#include "build_numerics.h"

export module quire.engine.fingerprint;

import quire.core.base;
import quire.core.hash;
import quire.core.thread_pool;
import quire.engine.options;
import quire.model_file.gguf;

export namespace quire {

// Of the metadata and of samples of the weights: fast, for models that nobody confuses on purpose. Equal for a file that is in one piece or in
// parts.
std::uint64_t fingerprint(const Gguf& file);

// Of the metadata and of all weights, which are read at the speed of memory or disk. `directory`: where the hash is remembered until the model's
// files change; "": nowhere. A file counts as changed when its device, inode, size, or one of its times is another one.
std::uint64_t full_fingerprint(const Gguf& file, int threads, const std::string& directory);

// The fingerprint of the metadata with the numbers and times by which the system tells the model's files: another one as soon as a file is
// written. Fast; of this process.
std::uint64_t fingerprint_now(const Gguf& file);

// All that the bytes of K and V depend on besides the tokens, in words. `weights`: see full_fingerprint(). `long_rope`: the model has two sets of
// frequencies for RoPE, and uses those of long contexts; else the context is no part of it. `numerics`: see Backend::numerics(). On a CPU the
// number of threads is no part of it.
std::string basis_of_kv(std::uint64_t weights, bool long_rope, const EngineOptions& options, std::string_view numerics);

} // namespace quire

module :private;

namespace quire {

std::uint64_t fingerprint(const Gguf& file) {
    std::uint64_t hash  = 0;
    const auto    bytes = [&](const void* data, std::size_t n) { hash = hash_bytes(data, n, hash); };
    for (const GgufPair& pair : file.pairs()) {
        if (pair.key.starts_with("general.") || pair.key.starts_with("split."))
            continue; // one host may have it in parts
        bytes(pair.key.data(), pair.key.size());
        bytes(pair.value.data(), pair.value.size());
    }
    for (const GgufTensor& t : file.tensors()) {
        bytes(t.name.data(), t.name.size());
        bytes(&t.type, sizeof t.type);
        bytes(t.dims.data(), sizeof t.dims);
        const std::size_t sample = std::min<std::size_t>(t.bytes, 64);
        for (std::size_t at : {std::size_t(0), (t.bytes - sample) / 2, t.bytes - sample}) bytes(t.data + at, sample);
    }
    return hash;
}

std::uint64_t hash_of_weights(const Gguf& file, int threads) {
    constexpr std::size_t                   chunk = std::size_t(8) << 20; // bytes
    std::vector<std::span<const std::byte>> chunks;
    for (const GgufTensor& t : file.tensors())
        for (std::size_t at = 0; at < t.bytes; at += chunk)
            chunks.emplace_back(t.data + at, std::min(chunk, t.bytes - at));
    std::vector<std::uint64_t> sums(chunks.size() + 1, fingerprint(file));
    ThreadPool                 pool(threads);
    pool.run(int(chunks.size()), [&](int i, int) {
        sums[std::size_t(i)] = hash_bytes(chunks[std::size_t(i)].data(), chunks[std::size_t(i)].size());
    });
    return hash_bytes(sums.data(), sums.size() * sizeof sums[0]);
}

// The numbers and times by which the system tells the files of a model. "": it tells none, or a file is younger than least_age seconds, so that
// another change could have the same times. Without least_age a file may have any time, even one that is still to come.
std::string state_of_files(const Gguf& file, std::optional<std::time_t> least_age) {
    std::string text;
    for (const std::string& part : Gguf::files(file.path())) {
        struct stat info{};
        if (stat(part.c_str(), &info) != 0) return {};
        if (least_age && std::max(info.st_mtim.tv_sec, info.st_ctim.tv_sec) > std::time(nullptr) - *least_age)
            return {};
        text += cat(info.st_dev, ' ', info.st_ino, ' ', info.st_size, ' ', info.st_mtim.tv_sec, '.',
                    info.st_mtim.tv_nsec, ' ', info.st_ctim.tv_sec, '.', info.st_ctim.tv_nsec, '\n');
    }
    return text;
}

std::string line_of_weights(std::uint64_t files, std::uint64_t hash) {
    const std::string both = cat(files, ' ', hash, ' ');
    return cat(both, hash_bytes(both), '\n');
}

constexpr std::time_t settled = 2; // seconds

std::uint64_t fingerprint_now(const Gguf& file) { return hash_bytes(state_of_files(file, {}), fingerprint(file)); }

std::uint64_t full_fingerprint(const Gguf& file, int threads, const std::string& directory) {
    const std::string state = directory.empty() ? std::string() : state_of_files(file, settled);
    if (state.empty()) return hash_of_weights(file, threads);
    const std::uint64_t key  = hash_bytes(state, fingerprint(file));
    const std::string   path = directory + "/weights";
    if (std::error_code error; std::filesystem::exists(path, error) && !std::filesystem::is_regular_file(path, error))
        return hash_of_weights(file, threads);
    std::ifstream in(path);
    int           n = 0;
    for (std::string line; std::getline(in, line) && line.size() < 200; n++) {
        const auto words = split(line, ' ');
        const auto hash  = words.size() == 3 ? to_number<std::uint64_t>(words[1]) : std::nullopt;
        if (hash && line + '\n' == line_of_weights(key, *hash)) return *hash;
    }
    const std::uint64_t hash = hash_of_weights(file, threads);
    if (state_of_files(file, settled) != state) return hash; // it was changed meanwhile
    constexpr int     most_lines = 64;
    const std::string line       = line_of_weights(key, hash);
    const int         out =
        ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW | (n < most_lines ? O_APPEND : O_TRUNC), 0600);
    if (out < 0) return hash;
    [[maybe_unused]] const auto done = ::write(out, line.data(), line.size()); // a line in part is none
    ::close(out);
    return hash;
}

std::string basis_of_kv(std::uint64_t weights, bool long_rope, const EngineOptions& o, std::string_view numerics) {
    std::string text = cat(weights, ", ", build_numerics, ", ", numerics, ", ", name_of(o.kv_type), ", ranks ",
                           o.tensor_parallel, o.deterministic ? ", exact" : "", long_rope ? ", long" : "",
                           o.fp8_rows > 0 ? cat(", fp8 from ", o.fp8_rows, " rows") : std::string());
    if (o.layout.block_bytes > 0) text += cat(", blocks of ", o.layout.block_bytes);
    for (const CacheGroup& g : o.layout.groups) {
        text += cat("; ", g.window, " ", g.blocks, " ", g.layers_per_block, g.halves ? " halves:" : ":");
        for (int layer : g.layers) text += cat(" ", layer);
    }
    return text;
}

} // namespace quire
