// quire.engine.files.cipher: AES-256-GCM and HMAC-SHA256 under keys that are made from the bytes of a file. **Owns** the keys.
module;

#include <openssl/core_names.h>
#include <openssl/evp.h>
#include <openssl/params.h>
#include <openssl/rand.h>
#include <sys/stat.h>

export module quire.engine.files.cipher;

import quire.core.base;

export namespace quire {

// The pieces of memory that something is in, one behind the other.
using Pieces = std::span<const std::span<std::byte>>;

// An encrypted text is read with this and the key: random bytes of its own, and a checksum that no one can make without the key.
struct Seal {
    std::array<unsigned char, 12> nonce{};
    std::array<unsigned char, 16> tag{};
};

class Cipher {
public:
    // Error: the file is neither a regular one nor a pipe, cannot be read, or has not 32 bytes to 64 KiB.
    static Result<Cipher> from_file(const std::string& path);
    explicit Cipher(std::string_view secret); // of any length

    // A sentence for the user about a file whose key other users of the machine can read; "": they cannot.
    static std::string exposed(const std::string& path);

    // Encrypts `from` to `to`, of the same size. `about`: bytes that are not encrypted, and that open() has to be given, too.
    Seal seal(std::span<const std::byte> about, Pieces from, std::span<std::byte> to) const;
    // Decrypts in place. False: key, seal, `about` and text do not belong together.
    bool open(const Seal& seal, std::span<const std::byte> about, Pieces text) const;

    // 128 bits that only the key leads to, for a text and what it is used for.
    std::array<std::uint64_t, 2> name_of(std::string_view use, std::string_view text) const;

private:
    std::array<unsigned char, 32> secret_, key_; // key_: of texts
};

} // namespace quire

module :private;

namespace quire {

using Sum = std::array<unsigned char, 32>;

Sum hmac(std::span<const unsigned char> key, std::string_view use, std::string_view text) {
    EVP_MAC* const      algorithm = EVP_MAC_fetch(nullptr, "HMAC", nullptr);
    EVP_MAC_CTX* const  mac       = EVP_MAC_CTX_new(algorithm);
    char                name[]    = "SHA256";
    const OSSL_PARAM    options[] = {OSSL_PARAM_construct_utf8_string(OSSL_MAC_PARAM_DIGEST, name, 0),
                                     OSSL_PARAM_construct_end()};
    Sum                 sum;
    std::size_t         n     = 0;
    const auto          bytes = [](std::string_view t) { return reinterpret_cast<const unsigned char*>(t.data()); };
    const unsigned char end   = 0; // of `use`, which has no zero in it
    const bool          good  = mac && EVP_MAC_init(mac, key.data(), key.size(), options) &&
                      EVP_MAC_update(mac, bytes(use), use.size()) && EVP_MAC_update(mac, &end, 1) &&
                      EVP_MAC_update(mac, bytes(text), text.size()) && EVP_MAC_final(mac, sum.data(), &n, sum.size());
    EVP_MAC_CTX_free(mac);
    EVP_MAC_free(algorithm);
    check(good && n == sum.size(), "libcrypto has no HMAC-SHA256");
    return sum;
}

Result<Cipher> Cipher::from_file(const std::string& path) {
    constexpr std::size_t most = 65536;
    struct stat           info{};
    const bool            there = stat(path.c_str(), &info) == 0;
    if (there && S_ISDIR(info.st_mode)) return fail("the key ", path, " is a directory: it has to be a file");
    if (there && !S_ISREG(info.st_mode) && !S_ISFIFO(info.st_mode)) // a pipe may be a shell's <(...)
        return fail("the key ", path, " is a device: it has to be a file");
    std::ifstream file(path, std::ios::binary);
    if (!file) return fail_with(ErrorKind::system, "cannot read the key ", path);
    std::string secret(most + 1, '\0');
    file.read(secret.data(), std::ptrdiff_t(secret.size()));
    secret.resize(std::size_t(file.gcount()));
    if (file.bad()) return fail_with(ErrorKind::system, "cannot read the key ", path);
    if (secret.size() > most)
        return fail("the key ", path, " has more than ", most >> 10,
                    " KiB: a key has at least 32 bytes, and not many more");
    if (secret.size() < 32) return fail("the key ", path, " has ", secret.size(), " bytes: it has to have at least 32");
    return Cipher(secret);
}

std::string Cipher::exposed(const std::string& path) {
    struct stat info{};
    if (stat(path.c_str(), &info) != 0 || !S_ISREG(info.st_mode) || (info.st_mode & S_IROTH) == 0) return {};
    return cat("warning: every user of this machine can read the key ", path, "; chmod o-r takes that away");
}

Cipher::Cipher(std::string_view secret) : secret_(hmac(Sum{}, "secret", secret)), key_(hmac(secret_, "texts", "")) {}

std::array<std::uint64_t, 2> Cipher::name_of(std::string_view use, std::string_view text) const {
    const Sum                    sum = hmac(secret_, use, text);
    std::array<std::uint64_t, 2> name;
    std::memcpy(name.data(), sum.data(), sizeof name);
    return name;
}

struct FreeContext {
    void operator()(EVP_CIPHER_CTX* context) const { EVP_CIPHER_CTX_free(context); }
};
using Context = std::unique_ptr<EVP_CIPHER_CTX, FreeContext>;

unsigned char* bytes_of(std::span<std::byte> piece) { return reinterpret_cast<unsigned char*>(piece.data()); }

Context begin(std::span<const unsigned char> key, Seal& seal, std::span<const std::byte> about, bool encrypts) {
    Context    context(EVP_CIPHER_CTX_new());
    int        n    = 0;
    const int  mode = encrypts ? 1 : 0;
    const bool good =
        context && EVP_CipherInit_ex2(context.get(), EVP_aes_256_gcm(), key.data(), seal.nonce.data(), mode, nullptr) &&
        EVP_CipherUpdate(context.get(), nullptr, &n, reinterpret_cast<const unsigned char*>(about.data()),
                         int(about.size()));
    check(good, "libcrypto has no AES-256-GCM");
    return context;
}

Seal Cipher::seal(std::span<const std::byte> about, Pieces from, std::span<std::byte> to) const {
    Seal seal;
    check(RAND_bytes(seal.nonce.data(), int(seal.nonce.size())) == 1, "libcrypto has no random bytes");
    const Context context = begin(key_, seal, about, true);
    bool          good    = true;
    int           n       = 0;
    for (std::span<std::byte> piece : from) {
        good = good && EVP_CipherUpdate(context.get(), bytes_of(to), &n, bytes_of(piece), int(piece.size()));
        to   = to.subspan(piece.size());
    }
    unsigned char none[16];
    good = good && EVP_CipherFinal_ex(context.get(), none, &n) &&
           EVP_CIPHER_CTX_ctrl(context.get(), EVP_CTRL_AEAD_GET_TAG, int(seal.tag.size()), seal.tag.data());
    check(good, "libcrypto cannot encrypt");
    return seal;
}

bool Cipher::open(const Seal& sealed, std::span<const std::byte> about, Pieces text) const {
    Seal          seal    = sealed;
    const Context context = begin(key_, seal, about, false);
    int           n       = 0;
    for (std::span<std::byte> piece : text)
        if (!EVP_CipherUpdate(context.get(), bytes_of(piece), &n, bytes_of(piece), int(piece.size()))) return false;
    unsigned char none[16];
    return EVP_CIPHER_CTX_ctrl(context.get(), EVP_CTRL_AEAD_SET_TAG, int(seal.tag.size()), seal.tag.data()) &&
           EVP_CipherFinal_ex(context.get(), none, &n) > 0;
}

} // namespace quire
