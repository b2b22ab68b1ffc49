// quire.serve.slots: llama.cpp's slots, as far as clients save and restore them. A slot is a number and the text of the last request that named the
// slot, or was given it. A saved slot is a small file with the tokens of such a text; K and V are in the files of the prefix cache. **Owns** the
// texts.
//
//   file   magic, model, tokens, bytes of the salt, seal, checksum                             64 bytes, little-endian
//          the tokens and the salt, encrypted where there is a key
module;

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>

export module quire.serve.slots;

import quire.core.base;
import quire.core.hash;
export import quire.engine.files.cipher;
import quire.engine.files.segment_files;

export namespace quire {

struct SlotText {
    std::vector<Token> tokens;
    std::string        salt;                 // of the namespace
    bool               has_adapters = false; // the last request named adapters of its own; there are no tokens
};

struct SlotOptions {
    int                   n         = 0;  // slots
    int                   context   = 0;  // a text has fewer tokens
    std::string           directory = {}; // of the saved ones, with a / at the end; "": there are none
    std::optional<Cipher> cipher    = {}; // none: the files can be read
    std::uint64_t         model     = 0;  // of whose tokens the files are
};

// The path of a file in the directory of saved slots whose text can be read without a key; "": there is none.
std::string readable_slot(const std::string& directory);

// Any thread.
class Slots {
public:
    // A slot at a time when a request had it.
    struct Use {
        int           slot   = -1;
        std::uint64_t serial = 0;
    };

    explicit Slots(SlotOptions options) : o_(std::move(options)), slots_(std::size_t(o_.n)) {}

    bool on() const { return !o_.directory.empty(); }
    int  n() const { return o_.n; }

    // A request begins, whose text is so far its prompt. `wanted`: the slot that it names. Without one: the slot whose text has the longest
    // common beginning, if that is a tenth of the prompt, as in llama.cpp; else the one that was used least recently.
    Use begin(std::optional<int> wanted, const std::vector<Token>& prompt, const std::string& salt);
    // A request with adapters of its own names the slot. Its text is not kept: a text is found again with the adapters of a request that names
    // none. The slot's older text goes, or a client would save another conversation than the last one.
    void leave(int slot);
    // Tokens of its answer, which are lost if another request has the slot by now.
    void add(const Use& use, std::span<const Token> tokens);

    SlotText text(int slot) const;
    void     set(int slot, SlotText text);

    // Error: write() would refuse this name or text.
    Result<void> check(const std::string& name, const SlotText& text) const;
    // Error: the name is none, or the system refuses. Bytes of the file.
    Result<std::size_t> write(const std::string& name, const SlotText& text) const;
    Result<SlotText>    read(const std::string& name, std::size_t& bytes) const;

private:
    struct Slot {
        SlotText      text;
        std::uint64_t serial = 0; // of the last use
    };
    Result<std::string> path_of(const std::string& name) const;

    SlotOptions        o_;
    mutable std::mutex mutex_;
    std::vector<Slot>  slots_;
    std::uint64_t      n_uses_ = 0;
};

} // namespace quire

module :private;

namespace quire {

constexpr std::uint64_t slot_magic = 0x3130544f4c5351; // "QSLOT01"

struct SlotHead {
    std::uint64_t magic = slot_magic, model = 0;
    std::uint32_t n_tokens = 0, n_salt = 0;
    Seal          seal{}; // where there is a key
    std::uint32_t unused   = 0;
    std::uint64_t checksum = 0; // of the above and what follows, as it is in the file

    std::size_t                bytes() const { return sizeof *this + n_tokens * sizeof(Token) + n_salt; }
    std::span<const std::byte> sealed() const { return std::as_bytes(std::span(this, 1)).first(24); }
};
static_assert(sizeof(SlotHead) == 64);

constexpr std::size_t longest_name = 128, longest_salt = 1 << 16; // bytes

std::uint64_t checksum_of_slot(const SlotHead& head, std::span<const std::byte> body) {
    return hash_bytes(body.data(), body.size(), hash_bytes(&head, sizeof head - 8));
}

std::string readable_slot(const std::string& directory) {
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
        const std::string path = entry.path().string();
        if (path.find(".slot", directory.size()) == path.npos || !entry.is_regular_file(error)) continue;
        std::ifstream file(path, std::ios::binary);
        SlotHead      head;
        if (file.read(reinterpret_cast<char*>(&head), sizeof head) && head.magic == slot_magic &&
            head.seal.tag == Seal{}.tag)
            return path;
    }
    return {};
}

Slots::Use Slots::begin(std::optional<int> wanted, const std::vector<Token>& prompt, const std::string& salt) {
    if (!on()) return {};
    const std::scoped_lock lock(mutex_);
    int                    slot = wanted && *wanted >= 0 && *wanted < o_.n ? *wanted : -1;
    if (slot < 0) {
        std::size_t best = prompt.size() / 10;
        for (int i = 0; i < o_.n; i++) {
            const SlotText& text = slots_[std::size_t(i)].text;
            const auto differ    = std::mismatch(text.tokens.begin(), text.tokens.end(), prompt.begin(), prompt.end());
            const auto n         = std::size_t(differ.second - prompt.begin());
            if (text.salt == salt && n > best) best = n, slot = i;
        }
    }
    if (slot < 0) slot = int(std::ranges::min_element(slots_, {}, &Slot::serial) - slots_.begin());
    Slot& s = slots_[std::size_t(slot)];
    s       = {{.tokens = prompt, .salt = salt}, ++n_uses_};
    return {slot, s.serial};
}

void Slots::leave(int slot) {
    if (!on() || slot < 0 || slot >= o_.n) return;
    SlotText text;
    text.has_adapters = true;
    set(slot, std::move(text)); // the answer of an earlier request adds nothing any more
}

void Slots::add(const Use& use, std::span<const Token> tokens) {
    if (use.slot < 0) return;
    const std::scoped_lock lock(mutex_);
    Slot&                  s = slots_[std::size_t(use.slot)];
    if (s.serial != use.serial) return;
    const std::size_t room = std::size_t(o_.context) - std::min(std::size_t(o_.context), s.text.tokens.size() + 1);
    const auto        some = tokens.first(std::min(room, tokens.size()));
    s.text.tokens.insert(s.text.tokens.end(), some.begin(), some.end());
}

SlotText Slots::text(int slot) const {
    const std::scoped_lock lock(mutex_);
    return slots_[std::size_t(slot)].text;
}

void Slots::set(int slot, SlotText text) {
    const std::scoped_lock lock(mutex_);
    slots_[std::size_t(slot)] = {std::move(text), ++n_uses_};
}

// A name is one of a file in the directory, whatever it consists of. The ending keeps it apart from the files of the prefix cache.
Result<std::string> Slots::path_of(const std::string& name) const {
    const auto plain = [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
               c == '-';
    };
    if (name.empty() || name.size() > longest_name || name[0] == '.' || !std::ranges::all_of(name, plain))
        return fail("filename has to be 1 to ", longest_name,
                    " letters, digits, dots, dashes and underscores, and cannot begin with a dot");
    return cat(o_.directory, name, ".slot");
}

Result<void> Slots::check(const std::string& name, const SlotText& text) const {
    if (const auto path = path_of(name); !path) return std::unexpected(path.error());
    if (text.has_adapters)
        return fail("the last request of this slot named adapters of its own, and such texts are not saved");
    if (!text.salt.empty() && !o_.cipher)
        return fail("the last request of this slot has a cache_salt, and such texts are saved only with --kv-key");
    if (text.salt.size() > longest_salt) return fail("the cache_salt of this slot is too long to be saved");
    return {};
}

Result<std::size_t> Slots::write(const std::string& name, const SlotText& text) const {
    if (auto ok = check(name, text); !ok) return std::unexpected(ok.error());
    const Result<std::string> path = path_of(name);
    SlotHead                  head{
                         .model = o_.model, .n_tokens = std::uint32_t(text.tokens.size()), .n_salt = std::uint32_t(text.salt.size())};
    std::vector<std::byte> body;
    for (std::span<const std::byte> part : {std::as_bytes(std::span(text.tokens)), std::as_bytes(std::span(text.salt))})
        body.insert(body.end(), part.begin(), part.end());
    const std::span<std::byte> piece(body);
    if (o_.cipher) head.seal = o_.cipher->seal(head.sealed(), std::array{piece}, piece);
    head.checksum = checksum_of_slot(head, body);

    // Completely or not at all, whoever writes the same name at the same time.
    std::string part = *path + ".XXXXXX";
    const int   out  = mkostemp(part.data(), O_CLOEXEC); // for its owner alone
    const auto  put  = [&](std::span<const std::byte> bytes) {
        while (!bytes.empty()) {
            const ssize_t n = ::write(out, bytes.data(), bytes.size());
            if (n < 0 && errno == EINTR) continue;
            if (n <= 0) return false;
            bytes = bytes.subspan(std::size_t(n));
        }
        return true;
    };
    bool good = out >= 0 && put(std::as_bytes(std::span(&head, 1))) && put(body) && fsync(out) == 0;
    int  why  = errno;
    if (out >= 0) ::close(out);
    if (good && std::rename(part.c_str(), path->c_str()) != 0) good = false, why = errno;
    if (good) return head.bytes();
    if (out >= 0) ::unlink(part.c_str());
    return fail_with(ErrorKind::system, "cannot write ", quote(name), ": ", std::strerror(why));
}

Result<SlotText> Slots::read(const std::string& name, std::size_t& bytes) const {
    const Result<std::string> path = path_of(name);
    if (!path) return std::unexpected(path.error());
    const int in = ::open(path->c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (in < 0) return fail("cannot read ", quote(name), ": ", std::strerror(errno));
    const auto get = [&](std::span<std::byte> to) {
        while (!to.empty()) {
            const ssize_t n = ::read(in, to.data(), to.size());
            if (n < 0 && errno == EINTR) continue;
            if (n <= 0) return false;
            to = to.subspan(std::size_t(n));
        }
        return true;
    };
    SlotHead               head;
    std::vector<std::byte> body;
    bool                   good =
        get(piece_of(head)) && head.magic == slot_magic && head.n_tokens < 1u << 30 && head.n_salt <= longest_salt;
    struct stat info{};
    good = good && fstat(in, &info) == 0 && std::size_t(info.st_size) == head.bytes();
    if (good) body.resize(head.bytes() - sizeof head);
    good = good && get(body) && head.checksum == checksum_of_slot(head, body);
    ::close(in);
    if (!good) return fail(quote(name), " is no saved slot, or is damaged");
    if (head.model != o_.model) return fail(quote(name), " was saved with another model");
    const std::span<std::byte> piece(body);
    const bool                 sealed = head.seal.tag != Seal{}.tag;
    if (sealed != o_.cipher.has_value() || (sealed && !o_.cipher->open(head.seal, head.sealed(), std::array{piece})))
        return fail(quote(name), sealed ? " was saved with another key (--kv-key)" : " was saved without a key");
    if (head.n_tokens == 0 || head.n_tokens >= std::uint32_t(o_.context))
        return fail(quote(name), " has ", head.n_tokens, " tokens; the context has room for ", o_.context - 1);
    SlotText text;
    text.tokens.resize(head.n_tokens);
    std::memcpy(text.tokens.data(), body.data(), head.n_tokens * sizeof(Token));
    text.salt.assign(reinterpret_cast<const char*>(body.data()) + head.n_tokens * sizeof(Token), head.n_salt);
    bytes = head.bytes();
    return text;
}

} // namespace quire
