// quire.engine.fingerprint: whether two processes have the same model, and whether K and V that one has computed are those of the other. Owns
// nothing.
module;

#include <sys/stat.h>

#include "build_numerics.h"

export module quire.engine.fingerprint;

import quire.core.base;
import quire.core.hash;
import quire.engine.options;
import quire.model_file.gguf;

export namespace quire {

// Of the metadata and of samples of the weights: all of them would have to be read. Equal for a file that is in one piece or in parts.
std::uint64_t fingerprint(const Gguf& file);

// All that the bytes of K and V depend on besides the tokens, in words. `numerics`: see Backend::numerics(). On a CPU the number of threads
// is no part of it.
std::string basis_of_kv(const Gguf& file, const EngineOptions& options, std::string_view numerics);

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
        const std::size_t sample = std::min<std::size_t>(t.bytes, 64); // all of it would have to be read
        for (std::size_t at : {std::size_t(0), (t.bytes - sample) / 2, t.bytes - sample}) bytes(t.data + at, sample);
    }
    return hash;
}

std::string basis_of_kv(const Gguf& file, const EngineOptions& o, std::string_view numerics) {
    std::string text = cat(fingerprint(file), ", ", build_numerics, ", ", numerics, ", ", name_of(o.kv_type),
                           ", context ", o.context, ", ranks ", o.tensor_parallel, o.deterministic ? ", exact" : "");
    for (const std::string& part : Gguf::files(file.path())) { // the fingerprint has read samples only
        struct stat info{};
        if (stat(part.c_str(), &info) == 0) text += cat(", ", info.st_mtim.tv_sec, ".", info.st_mtim.tv_nsec);
    }
    for (const CacheGroup& g : o.layout.groups) {
        text += cat("; ", g.window, " ", g.blocks, " ", g.layers_per_block, ":");
        for (int layer : g.layers) text += cat(" ", layer);
    }
    return text;
}

} // namespace quire
