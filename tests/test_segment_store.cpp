// The files of the prefix cache: what is read is what was written, whatever happened to the files in between.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>

#include "folder.h"

import quire.core.base;
import quire.core.std;
import quire.engine.files.segment_store;

using namespace quire;
using testing::Folder;
namespace fs = std::filesystem;

namespace {

constexpr int         block = 4;
constexpr std::size_t unit  = 300; // bytes

std::unique_ptr<SegmentStore> open_store(const std::string& path, std::uint64_t bytes = 1 << 20,
                                         std::uint64_t model = 7, std::optional<Cipher> cipher = {}) {
    auto files = open_directory(path);
    if (!files) throw std::runtime_error(files.error().message);
    return std::make_unique<SegmentStore>(SegmentOptions{bytes, model, block, cipher}, std::move(*files));
}

// Serial n is text n: tokens n, n, n, n behind text n - 1.
std::vector<Token>     tokens_of(std::uint64_t n) { return std::vector<Token>(block, Token(n)); }
std::vector<std::byte> bytes_of(std::uint64_t n, int lane = 0) {
    std::vector<std::byte> bytes(unit);
    for (std::size_t i = 0; i < unit; i++) bytes[i] = std::byte((n * 31 + std::uint64_t(lane) * 7 + i * i) & 255);
    return bytes;
}
// A unit is in several pieces of memory.
std::array<std::span<std::byte>, 2> pieces(std::vector<std::byte>& bytes) {
    return {std::span(bytes).first(100), std::span(bytes).subspan(100)};
}
bool append(SegmentStore& store, std::uint64_t n, int lane = 0) {
    std::vector<std::byte> bytes = bytes_of(n, lane);
    return store.append({}, n, n - 1, lane, lane == 0 ? tokens_of(n) : std::vector<Token>{}, pieces(bytes));
}
bool read(SegmentStore& store, std::uint64_t n, int lane, std::vector<std::byte>& to) {
    const auto memory = pieces(to);
    UnitRead   unit{n, lane, {memory.begin(), memory.end()}};
    store.read(std::span(&unit, 1));
    return unit.whole;
}

// The serials of the texts that are found from the beginning on; what is read has to be right.
std::vector<std::uint64_t> serials_of(SegmentStore& store) {
    std::vector<std::byte>     to(unit);
    std::vector<std::uint64_t> serials;
    for (std::uint64_t at = 0;;) {
        const std::uint64_t n = serials.size() + 1;
        at                    = store.find({}, at, tokens_of(n));
        if (at == 0 || !read(store, at, 0, to)) return serials;
        REQUIRE(to == bytes_of(n));
        serials.push_back(at);
    }
}
int chain(SegmentStore& store) { return int(serials_of(store).size()); }

std::vector<fs::path> segments(const std::string& path) {
    std::vector<fs::path> all;
    for (const auto& entry : fs::directory_iterator(path))
        if (entry.path().extension() == ".kv") all.push_back(entry.path());
    std::ranges::sort(all);
    return all;
}

} // namespace

TEST_CASE("records come back after the store was closed") {
    Folder folder;
    {
        auto store = open_store(folder.path);
        for (std::uint64_t n = 1; n <= 20; n++) REQUIRE(append(*store, n));
        CHECK(append(*store, 20, 2));
        CHECK_FALSE(append(*store, 20, 2)); // it is there
        CHECK(chain(*store) == 20);
    }
    auto store = open_store(folder.path);
    CHECK(store->first_serial() > 20);
    CHECK(store->n_records() == 21);
    CHECK(chain(*store) == 20);
    std::vector<std::byte> to(unit);
    CHECK(read(*store, 20, 2, to));
    CHECK(to == bytes_of(20, 2));
    CHECK(store->find({}, 3, tokens_of(5)) == 0); // other tokens behind the same text
    CHECK(store->find({}, 4, tokens_of(4)) == 0); // the same tokens behind another text
    REQUIRE(append(*store, 21));
    CHECK(chain(*store) == 21);
    CHECK(store->stats().damaged == 0);
}

TEST_CASE("a text that is computed again has one record, under the serial that it had") {
    Folder                 folder;
    auto                   store = open_store(folder.path);
    std::vector<std::byte> bytes = bytes_of(1), to(unit);
    REQUIRE(append(*store, 1));
    REQUIRE(append(*store, 2));
    CHECK_FALSE(store->append({}, 11, 0, 0, tokens_of(1), pieces(bytes)));
    CHECK(store->has(11, 0));
    CHECK(read(*store, 11, 0, to));
    CHECK(store->find({}, 11, tokens_of(2)) == 2); // what continues the one continues the other
    CHECK(store->append({}, 12, 11, 0, tokens_of(7), pieces(bytes)));
    CHECK(store->find({}, 1, tokens_of(7)) == 12);
    CHECK(store->find({1, 1}, 1, tokens_of(7)) == 0); // another namespace
    CHECK(store->n_records() == 3);
}

TEST_CASE("many units are read at once, each by itself") {
    Folder folder;
    auto   files = open_directory(folder.path);
    REQUIRE(files.has_value());
    SegmentStore store({1 << 20, 7, block, {}, 3}, std::move(*files));
    for (std::uint64_t n = 1; n <= 50; n++) REQUIRE(append(store, n));
    std::vector<std::vector<std::byte>> to(60, std::vector<std::byte>(unit));
    std::vector<UnitRead>               units;
    for (std::uint64_t n = 1; n <= 60; n++) {
        const auto memory = pieces(to[n - 1]);
        units.push_back({n, 0, {memory.begin(), memory.end()}});
    }
    store.read(units);
    for (std::uint64_t n = 1; n <= 60; n++) {
        CHECK(units[n - 1].whole == (n <= 50));
        if (n <= 50) CHECK(to[n - 1] == bytes_of(n));
    }
}

TEST_CASE("a directory is its owner's, and one process's at a time") {
    Folder            folder;
    const std::string path  = folder.path + "/kv";
    auto              store = open_store(path);
    REQUIRE(append(*store, 1));
    struct stat info{};
    REQUIRE(stat(path.c_str(), &info) == 0);
    CHECK((info.st_mode & 0777) == 0700);
    REQUIRE(stat(segments(path)[0].c_str(), &info) == 0);
    CHECK((info.st_mode & 0777) == 0600);
    const auto second = open_directory(path);
    REQUIRE_FALSE(second.has_value());
    CHECK(second.error().message == path + " is in use by another process");
    store.reset();
    CHECK(open_directory(path).has_value());
    CHECK_FALSE(open_directory(folder.path + "/no/where").has_value());
}

TEST_CASE("another model finds nothing, and its records stay") {
    Folder folder;
    append(*open_store(folder.path), 1);
    CHECK(chain(*open_store(folder.path, 1 << 20, 8)) == 0);
    append(*open_store(folder.path, 1 << 20, 8), 1);
    CHECK(chain(*open_store(folder.path)) == 1);
}

TEST_CASE("the oldest segments go when the bytes are spent") {
    Folder folder;
    auto   store = open_store(folder.path, 20'000);
    for (std::uint64_t n = 1; n <= 500; n++) {
        REQUIRE(append(*store, n));
        REQUIRE(store->bytes() <= 20'000);
    }
    CHECK(store->stats().segments_gone > 20);
    std::uintmax_t on_disk = 0;
    for (const fs::path& p : segments(folder.path)) on_disk += fs::file_size(p);
    CHECK(on_disk == store->bytes());
    std::vector<std::byte> to(unit);
    CHECK(read(*store, 500, 0, to));
    CHECK_FALSE(store->has(400, 0));
    store.reset();
    CHECK(open_store(folder.path, 5'000)->bytes() <= 5'000);
    CHECK_FALSE(append(*open_store(folder.path, 100), 501)); // less than a record
}

TEST_CASE("a store says which records are gone, of every lane and namespace, and under every serial") {
    Folder                 folder;
    auto                   store = open_store(folder.path, 8192);
    std::vector<std::byte> bytes = bytes_of(1);
    REQUIRE(append(*store, 1));
    REQUIRE(append(*store, 1, 2));
    CHECK_FALSE(store->append({}, 100, 0, 0, tokens_of(1), pieces(bytes))); // text 1, computed again
    REQUIRE(store->append({1, 2}, 200, 0, 0, tokens_of(50), pieces(bytes)));
    CHECK(store->take_gone().empty());
    for (std::uint64_t n = 300; n < 340; n++) REQUIRE(append(*store, n));
    using Keys      = std::set<std::pair<std::uint64_t, int>>;
    const auto gone = store->take_gone();
    const Keys all(gone.begin(), gone.end());
    for (const auto& [serial, lane] : all) CHECK_FALSE(store->has(serial, lane));
    for (const auto& key : Keys{{1, 0}, {1, 2}, {100, 0}, {100, 2}, {200, 0}}) CHECK(all.contains(key));
    CHECK_FALSE(all.contains({339, 0}));
    CHECK(store->take_gone().empty());
}

TEST_CASE("what is damaged is not served: any byte flipped, any length cut") {
    const std::optional<Cipher> key =
        GENERATE(std::optional<Cipher>{}, std::optional<Cipher>{Cipher(std::string(32, 'k'))});
    Folder     folder;
    const auto open_again = [&] { return open_store(folder.path, 1 << 20, 7, key); };
    {
        auto store = open_again();
        for (std::uint64_t n = 1; n <= 8; n++) REQUIRE(append(*store, n));
    }
    const fs::path    file = segments(folder.path)[0];
    std::ifstream     in(file, std::ios::binary);
    const std::string whole((std::istreambuf_iterator<char>(in)), {});
    std::mt19937      random(1);
    const auto        put = [&](const std::string& bytes) {
        for (const fs::path& p : segments(folder.path)) fs::remove(p);
        std::ofstream(file, std::ios::binary) << bytes;
        fs::permissions(file, fs::perms(0600)); // a umask may let the group write
    };
    const std::size_t record = (whole.size() - 32) / 8;
    for (std::size_t at = 0; at < whole.size(); at += 3) { // every third byte: each part of a record has some
        std::string bytes = whole;
        bytes[at]         = char(bytes[at] ^ (1 << random() % 8));
        put(bytes);
        auto store = open_again();
        CAPTURE(at);
        // Everything before the byte is there, and nothing of its own record.
        CHECK(chain(*store) == (at < 32 ? 0 : int((at - 32) / record)));
        CHECK(append(*store, 100)); // it goes on
    }
    for (std::size_t n = 0; n < whole.size(); n += 5) {
        put(whole.substr(0, n));
        CAPTURE(n);
        CHECK(chain(*open_again()) == (n < 32 ? 0 : int((n - 32) / record)));
    }
    for (int i = 0; i < 300; i++) { // chaos
        std::string bytes = whole;
        for (int k = int(random() % 20); k >= 0; k--) {
            const std::size_t at = random() % bytes.size(), n = random() % 200;
            switch (random() % 3) {
                case 0: bytes.erase(at, n); break;
                case 1: bytes.insert(at, bytes.substr(random() % bytes.size(), n)); break;
                default: bytes[at] = char(random()); break;
            }
            if (bytes.empty()) bytes = "x";
        }
        put(bytes);
        auto store = open_again();
        (void)chain(*store); // whatever is served is right
        std::vector<std::byte> to(unit);
        for (std::uint64_t n = 1; n <= 8; n++)
            if (read(*store, n, 0, to)) REQUIRE(to == bytes_of(n));
    }
}

TEST_CASE("a process that is killed while it writes leaves whole records") {
    Folder                     folder;
    std::mt19937               random(2);
    std::vector<std::uint64_t> firsts{open_store(folder.path)->first_serial()}; // of each process
    int                        n_read = 0;
    for (int round = 0; round < 25; round++) {
        const pid_t child = fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            auto store = open_store(folder.path, 1 << 30); // nothing has to go: serials stay what they are
            for (std::uint64_t n = store->first_serial();; n++) append(*store, n);
        }
        usleep(useconds_t(500 + random() % 6000));
        kill(child, SIGKILL);
        int status = 0;
        waitpid(child, &status, 0);
        REQUIRE(WIFSIGNALED(status));
        auto                   store = open_store(folder.path, 1 << 30);
        std::vector<std::byte> to(unit);
        CAPTURE(round);
        for (std::uint64_t first : firsts)
            for (std::uint64_t n = first; store->has(n, 0); n++) {
                REQUIRE(read(*store, n, 0, to)); // no record that is found is torn
                REQUIRE(to == bytes_of(n));
                n_read++;
            }
        firsts.push_back(store->first_serial());
    }
    CHECK(n_read > 100);
}

TEST_CASE("a full disk costs records, nothing else") {
    Folder      folder;
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) { // no file can become larger than this
        const rlimit limit{2000, 2000};
        setrlimit(RLIMIT_FSIZE, &limit);
        auto store = open_store(folder.path);
        for (std::uint64_t n = 1; n <= 20; n++) append(*store, n);
        std::vector<std::byte> to(unit);
        const bool             first = read(*store, 1, 0, to) && to == bytes_of(1);
        _exit(first && store->stats().refused > 0 && store->n_records() >= 4 ? 0 : 2);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    auto store = open_store(folder.path);
    CHECK(store->stats().damaged == 0); // what did not fit was taken back
    CHECK(chain(*store) == 4);
}

TEST_CASE("a beginning that many texts share outlives the segment it was written to") {
    Folder folder;
    auto   store = open_store(folder.path, 40'000);
    for (std::uint64_t n = 1; n <= 3; n++) REQUIRE(append(*store, n));
    std::vector<std::byte> bytes = bytes_of(9), to(unit);
    for (std::uint64_t n = 100; n < 1000; n++) // each continues the third text
        REQUIRE(store->append({}, n, 3, 0, tokens_of(n), pieces(bytes)));
    CHECK(store->stats().segments_gone > 5);
    CHECK(store->stats().kept > 0);
    CHECK(store->bytes() <= 40'000);
    store.reset();
    store                                   = open_store(folder.path, 40'000);
    const std::vector<std::uint64_t> shared = serials_of(*store);
    REQUIRE(shared.size() == 3);
    const std::uint64_t last = store->find({}, shared[2], tokens_of(999));
    CHECK(read(*store, last, 0, to));
    CHECK(to == bytes);
    CHECK(store->find({}, shared[2], tokens_of(100)) == 0);
    std::uint64_t           n_told = 0;
    std::set<std::uint64_t> told{0};
    for (const TextChange& change : store->take_changes()) { // parents come before children
        CHECK(told.contains(change.parent));
        n_told += told.insert(change.serial).second;
    }
    CHECK(n_told == store->n_records());
}

TEST_CASE("without the key nothing can be read") {
    Folder       folder;
    const Cipher key(std::string(32, 'k')), other(std::string(32, 'o'));
    {
        auto store = open_store(folder.path, 1 << 20, 7, key);
        for (std::uint64_t n = 1; n <= 5; n++) REQUIRE(append(*store, n));
        CHECK(chain(*store) == 5);
    }
    CHECK(chain(*open_store(folder.path, 1 << 20, 7, other)) == 0);
    CHECK(chain(*open_store(folder.path)) == 0);
    std::ifstream     in(segments(folder.path)[0], std::ios::binary);
    const std::string whole((std::istreambuf_iterator<char>(in)), {});
    for (std::uint64_t n = 1; n <= 5; n++) { // neither a half of a payload nor the tokens
        const std::vector<std::byte> bytes  = bytes_of(n);
        const std::vector<Token>     tokens = tokens_of(n);
        CHECK(whole.find({reinterpret_cast<const char*>(bytes.data()), 16}) == whole.npos);
        CHECK(whole.find({reinterpret_cast<const char*>(bytes.data()) + 150, 16}) == whole.npos);
        CHECK(whole.find({reinterpret_cast<const char*>(tokens.data()), sizeof(Token) * block}) == whole.npos);
    }
    auto store = open_store(folder.path, 1 << 20, 7, key);
    CHECK(chain(*store) == 5);
    CHECK(store->stats().damaged == 0);
}

TEST_CASE("segments of two directories in one lead to no other text") {
    const std::optional<Cipher> key =
        GENERATE(std::optional<Cipher>{}, std::optional<Cipher>{Cipher(std::string(32, 'k'))});
    Folder     mine, other;
    const auto add = [&](const Folder& folder, std::uint64_t tokens, bool behind) {
        auto                   store  = open_store(folder.path, 1 << 20, 7, key);
        std::vector<std::byte> bytes  = bytes_of(tokens);
        const std::uint64_t    parent = behind ? store->find({}, 0, tokens_of(1)) : 0;
        REQUIRE((parent > 0) == behind);
        REQUIRE(store->append({}, store->first_serial(), parent, 0, tokens_of(tokens), pieces(bytes)));
    };
    add(mine, 1, false);
    add(mine, 3, true);
    add(other, 2, false); // under the serial that text 1 has here
    const auto copy = GENERATE(false, true);
    if (copy) fs::copy_file(segments(other.path)[0], mine.path + "/3.kv");
    else fs::copy_file(segments(other.path)[0], mine.path + "/1.kv", fs::copy_options::overwrite_existing);
    auto                   store = open_store(mine.path, 1 << 20, 7, key);
    std::vector<std::byte> to(unit);
    const std::uint64_t    text = store->find({}, 0, tokens_of(2));
    CHECK((text > 0) == !copy); // a file under another number than its own is not read
    if (text > 0) {
        CHECK(store->find({}, text, tokens_of(3)) == 0);
        CHECK(read(*store, text, 0, to));
        CHECK(to == bytes_of(2));
    }
    const std::uint64_t first = store->find({}, 0, tokens_of(1));
    CHECK((first > 0) == copy);
    if (copy) CHECK(store->find({}, first, tokens_of(3)) > 0);
}

TEST_CASE("segments of an earlier format are deleted") {
    Folder folder;
    append(*open_store(folder.path), 1);
    const fs::path file = segments(folder.path)[0];
    {
        std::fstream change(file, std::ios::in | std::ios::out | std::ios::binary);
        change.write("QKSEG01", 7);
    }
    auto store = open_store(folder.path);
    CHECK(store->found().old == 1);
    CHECK(store->bytes() == 0);
    CHECK_FALSE(fs::exists(file));
    CHECK(append(*store, 1));
    CHECK(chain(*store) == 1);
}

TEST_CASE("with a key nothing stays that can be read without it") {
    Folder       folder;
    const Cipher key(std::string(32, 'k'));
    append(*open_store(folder.path), 1);
    append(*open_store(folder.path, 1 << 20, 8), 1); // of another model
    append(*open_store(folder.path, 1 << 20, 9, key), 1);
    CHECK(segments(folder.path).size() == 1);
    auto store = open_store(folder.path, 1 << 20, 7, key);
    CHECK(store->found().open == 0);
    CHECK(store->found().other == 1);
    store.reset();
    append(*open_store(folder.path), 1);
    CHECK(open_store(folder.path, 1 << 20, 7, key)->found().open == 1);
    CHECK(segments(folder.path).size() == 1);
}

TEST_CASE("a store says what it has found") {
    Folder folder;
    {
        auto store = open_store(folder.path);
        CHECK(store->found().records == 0);
        for (std::uint64_t n = 1; n <= 3; n++) REQUIRE(append(*store, n));
    }
    append(*open_store(folder.path, 1 << 20, 8), 1);
    fs::resize_file(segments(folder.path)[0], fs::file_size(segments(folder.path)[0]) - 1);
    auto store = open_store(folder.path);
    CHECK(store->found().records == 2);
    CHECK(store->found().damaged == 1);
    CHECK(store->found().other == 1);
    CHECK(store->found().bytes == store->bytes());
}

TEST_CASE("a directory or file of others is not used") {
    Folder            folder;
    const std::string path = folder.path + "/kv";
    fs::create_directory(path); // empty, and as its owner has made it
    fs::permissions(path, fs::perms(0755));
    append(*open_store(path), 1);
    struct stat info{};
    REQUIRE(stat(path.c_str(), &info) == 0);
    CHECK((info.st_mode & 0777) == 0700);
    fs::permissions(path, fs::perms(0777));
    const auto open = open_directory(path);
    REQUIRE_FALSE(open.has_value());
    CHECK(open.error().message == "the directory " + path +
                                      " is open to other users (mode 0777): make it private (chmod 700), or name one "
                                      "that is not there yet");
    fs::permissions(path, fs::perms(0700));
    const fs::path file = segments(path)[0];
    fs::permissions(file, fs::perms(0644));
    CHECK(chain(*open_store(path)) == 1);
    fs::permissions(file, fs::perms(0660));
    auto store = open_store(path);
    CHECK(chain(*store) == 0);
    CHECK(store->found().foreign == 1);
    CHECK(append(*store, 1)); // in a file with another number
    store.reset();
    fs::permissions(file, fs::perms(0600));
    const uid_t other = getuid() + 1000;
    if (chown(file.c_str(), other, other) != 0) return; // only the superuser can give files away
    CHECK(open_store(path)->found().foreign == 1);
    REQUIRE(chown(path.c_str(), other, other) == 0);
    CHECK(open_directory(path).error().message == "the directory " + path + " belongs to another user (" +
                                                      std::to_string(other) +
                                                      "): name one that this user owns, or that is not there yet");
}

TEST_CASE("a key is a file of at least 32 bytes") {
    Folder            folder;
    const std::string path = folder.path + "/key";
    CHECK(Cipher::from_file(path).error().message == "cannot read the key " + path);
    std::ofstream(path) << "short";
    CHECK(Cipher::from_file(path).error().message == "the key " + path + " has 5 bytes: it has to have at least 32");
    std::ofstream(path) << std::string(40, 'x');
    REQUIRE(Cipher::from_file(path).has_value());
    CHECK(Cipher::from_file(path)->name_of("a", "b") == Cipher(std::string(40, 'x')).name_of("a", "b"));
    CHECK(Cipher(std::string(40, 'x')).name_of("a", "b") != Cipher(std::string(40, 'x')).name_of("ab", ""));
}
