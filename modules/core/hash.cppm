// quire.core.hash: xxHash's XXH3, 64 bits of any bytes: for tables, names and fingerprints. Owns nothing.
module;

#define XXH_INLINE_ALL // header only: nothing to link
#include <xxhash.h>

export module quire.core.hash;

import quire.core.std;

export namespace quire {

// Equal texts have equal hashes in every process. A writer of the bytes can make two texts collide.
std::uint64_t        hash_bytes(const void* data, std::size_t n_bytes, std::uint64_t seed = 0);
inline std::uint64_t hash_bytes(std::string_view text, std::uint64_t seed = 0) {
    return hash_bytes(text.data(), text.size(), seed);
}

} // namespace quire

module :private;

namespace quire {

std::uint64_t hash_bytes(const void* data, std::size_t n_bytes, std::uint64_t seed) {
    return XXH3_64bits_withSeed(data, n_bytes, seed);
}

} // namespace quire
