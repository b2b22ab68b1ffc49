// Files of the prefix cache with any content: nothing breaks, the files stay below their bound, and what is read is what was written. Input: a
// byte of flags (1: heads and records get right magics and checksums, so that their other fields are looked at; 2: there is a key; 4: the
// checksums of payloads are right as well), a byte for the size of the first of two files, their bytes.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

import quire.core.base;
import quire.core.hash;
import quire.core.std;
import quire.engine.files.segment_store;

using namespace quire;

namespace {

constexpr int         block = 4;
constexpr std::size_t head = 160, unit = 64, most = 8192;

using Bytes = std::vector<std::byte>;

class Memory final : public SegmentFiles {
public:
    explicit Memory(std::map<std::uint64_t, Bytes>& files) : files_(files) {}
    std::map<std::uint64_t, std::uint64_t> sizes() const override {
        std::map<std::uint64_t, std::uint64_t> sizes;
        for (const auto& [number, bytes] : files_) sizes[number] = bytes.size();
        return sizes;
    }
    bool create(std::uint64_t file) override { return files_.try_emplace(file).second; }
    bool append(std::uint64_t file, Pieces pieces) override {
        for (auto piece : pieces) files_[file].insert(files_[file].end(), piece.begin(), piece.end());
        return true;
    }
    bool cut(std::uint64_t file, std::uint64_t bytes) override { return files_[file].resize(bytes), true; }
    bool read(std::uint64_t file, std::uint64_t at, Pieces pieces) const override {
        const Bytes& from = files_.at(file);
        for (auto piece : pieces) {
            if (at > from.size() || piece.size() > from.size() - at) return false;
            std::copy_n(from.begin() + std::ptrdiff_t(at), piece.size(), piece.begin());
            at += piece.size();
        }
        return true;
    }
    void remove(std::uint64_t file) override { files_.erase(file); }

private:
    std::map<std::uint64_t, Bytes>& files_;
};

template <class T>
void put(Bytes& bytes, std::size_t at, T value) {
    std::memcpy(bytes.data() + at, &value, sizeof value);
}
template <class T>
T get(const Bytes& bytes, std::size_t at) {
    T value;
    std::memcpy(&value, bytes.data() + at, sizeof value);
    return value;
}

// As segment_store says.
void put_right(Bytes& bytes, std::uint64_t number, bool payloads) {
    if (bytes.size() < 32) return;
    put<std::uint64_t>(bytes, 0, 0x32304745534b51);
    put<std::uint64_t>(bytes, 8, 7); // model
    put<std::uint32_t>(bytes, 16, block);
    put<std::uint64_t>(bytes, 24, hash_bytes(nullptr, 0, hash_bytes(bytes.data(), 24)));
    for (std::size_t at = 32; at + head <= bytes.size();) {
        const std::uint32_t tokens = get<std::uint32_t>(bytes, at + 64) % 2 * block;
        if (at + head + tokens * 4 > bytes.size()) return;
        put<std::uint32_t>(bytes, at, 0x32524b51);
        put<std::uint32_t>(bytes, at + 4, get<std::uint32_t>(bytes, at + 4) % 3); // lane
        const auto put_name = [&](std::size_t name, std::uint64_t serial) {       // of one of two stores
            put<std::uint64_t>(bytes, name, serial > 0 ? 1 + get<std::uint64_t>(bytes, name) % 2 : 0);
            put<std::uint64_t>(bytes, name + 8, serial);
        };
        put_name(at + 8, 1 + get<std::uint64_t>(bytes, at + 16) % 16);
        put_name(at + 24, get<std::uint64_t>(bytes, at + 32) % 16);
        put<std::uint64_t>(bytes, at + 56, 7); // model
        put<std::uint32_t>(bytes, at + 64, tokens);
        put<std::uint64_t>(bytes, at + 144, number);
        const auto        payload = get<std::uint64_t>(bytes, at + 72);
        const std::size_t begin   = at + head + tokens * 4;
        if (payloads && payload <= bytes.size() - begin)
            put<std::uint64_t>(bytes, at + 136,
                               hash_bytes(bytes.data() + begin, payload, hash_bytes(bytes.data() + at + 8, 16)));
        put<std::uint64_t>(bytes, at + 152,
                           hash_bytes(bytes.data() + at + head, tokens * 4, hash_bytes(bytes.data() + at, 152)));
        if (payload > bytes.size()) return;
        at += head + tokens * 4 + payload;
    }
}

void require(bool good) {
    if (!good) std::abort();
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size < 3 || size > 4096) return 0;
    const std::uint8_t             flags = data[0];
    const auto*                    from  = reinterpret_cast<const std::byte*>(data) + 2;
    const std::size_t              first = std::min<std::size_t>(std::size_t(data[1]) * 16, size - 2);
    std::map<std::uint64_t, Bytes> files{{1, {from, from + first}}, {5, {from + first, from + size - 2}}};
    if (flags & 1)
        for (auto& [number, bytes] : files) put_right(bytes, number, flags & 4);
    std::optional<Cipher> key;
    if (flags & 2) key = Cipher(std::string(32, 'k'));
    for (int round = 0; round < 2; round++) {
        SegmentStore store({most, 7, block, key}, std::make_unique<Memory>(files));
        require(store.bytes() <= most);
        Bytes      to(unit), payload(unit);
        const auto read = [&](std::uint64_t serial, int lane) {
            UnitRead one{serial, lane, {std::span(to)}};
            store.read(std::span(&one, 1));
            return one.whole;
        };
        std::vector<Token> tokens(block, 1);
        for (std::uint64_t serial = 0; serial < 16; serial++) {
            (void)store.find({}, serial, tokens);
            for (int lane = 0; lane < 3; lane++) (void)read(serial, lane);
        }
        const std::uint64_t serial = store.first_serial();
        for (std::uint64_t i = 0; i < 20; i++) { // a chain, which no file had
            for (std::size_t k = 0; k < unit; k++) payload[k] = std::byte(serial + i * 7 + k);
            tokens.assign(block, Token(100 + i + 50 * std::uint64_t(round)));
            require(
                store.append({}, serial + i, i == 0 ? 0 : serial + i - 1, 0, tokens, std::array{std::span(payload)}));
            require(store.bytes() <= most);
            require(read(serial + i, 0) && to == payload);
        }
        std::uint64_t on_disk = 0;
        for (const auto& [number, bytes] : files) on_disk += bytes.size();
        require(on_disk == store.bytes());
    }
    return 0;
}
