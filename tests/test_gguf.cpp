#include <catch2/catch_test_macros.hpp>

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <filesystem>

#include "process.h"
#include "reference.h"

import quire.core.base;
import quire.model_file.config;
import quire.model_file.gguf;
import quire.model_file.gguf_types;
import quire.model_file.gguf_writer;
import quire.core.std;
import quire.core.tensor;
import quire.model_file.weights;

using namespace quire;
using namespace quire::testing;

namespace {

std::span<const std::byte> bytes_of(const std::string& s) { return std::as_bytes(std::span(s)); }

template <class T>
void put(std::string& out, T value) {
    out.append(reinterpret_cast<const char*>(&value), sizeof value);
}
void put_text(std::string& out, std::string_view text) {
    put(out, std::uint64_t(text.size()));
    out += text;
}

// Everything that a file leads to before a model runs. The bytes are copied to a place of just their size, so that a
// sanitizer sees a read past their end.
bool usable(std::span<const std::byte> bytes) {
    const std::vector<std::byte> exact(bytes.begin(), bytes.end());
    Result<Gguf>                 file = Gguf::parse(exact, "bytes");
    if (!file) return false;
    Result<ModelConfig> config = read_config(*file);
    return config && bind_tensors(*file, *config);
}

// A file of one tensor, as it would be part `no` (from 0) of `count`.
GgufWriter part_writer(int no, int count, const std::vector<std::string>& names) {
    static const std::vector<float> values(64, 2);
    GgufWriter                      w;
    w.set("split.no", std::uint16_t(no)); // the widths that llama.cpp's gguf-split writes
    w.set("split.count", std::uint16_t(count));
    w.set("split.tensors.count", std::int32_t(3));
    for (auto& n : names) w.add_tensor(n, DType::F32, {64}, std::as_bytes(std::span(values)));
    return w;
}

template <class T>
void check_round_trip(GgufWriter& w, std::vector<std::function<void(const Gguf&)>>& later, const std::string& name,
                      std::vector<T> values) {
    w.set("one." + name, T(values[0]));
    w.set("many." + name, values);
    w.set("none." + name, std::vector<T>());
    later.push_back([name, values](const Gguf& file) {
        CAPTURE(name);
        const GgufValue *one = file.find("one." + name), *many = file.find("many." + name),
                        *none = file.find("none." + name);
        REQUIRE((one && many && none));
        REQUIRE((std::holds_alternative<GgufArray>(*many) && std::holds_alternative<GgufArray>(*none)));
        const GgufArray& a = std::get<GgufArray>(*many);
        CHECK(a.size() == values.size());
        CHECK(a.type == std::uint32_t(gguf_type<T>()));
        CHECK(std::get<GgufArray>(*none).size() == 0);
        auto same = [&](const auto& got, auto as) {
            using Wide = decltype(as);
            REQUIRE(std::holds_alternative<Wide>(*one));
            CHECK(std::get<Wide>(*one) == Wide(values[0]));
            REQUIRE(got.size() == values.size());
            for (std::size_t i = 0; i < values.size(); i++) CHECK(Wide(got[i]) == Wide(values[i]));
        };
        if constexpr (std::same_as<T, bool>) same(a.bools, false);
        else if constexpr (std::same_as<T, std::string>) same(a.strings, std::string_view());
        else if constexpr (std::floating_point<T>) same(a.floats, 0.0);
        else if constexpr (T(-1) < T(0)) same(a.ints, std::int64_t());
        else same(a.uints, std::uint64_t());
    });
}

template <class T>
std::vector<T> limits() {
    return {std::numeric_limits<T>::max(), std::numeric_limits<T>::lowest(), T(0), T(1)};
}

} // namespace

TEST_CASE("what the writer wrote the reader reads: every type, alone and in an array", "[gguf]") {
    GgufWriter                                    w;
    std::vector<std::function<void(const Gguf&)>> later;
    check_round_trip(w, later, "u8", limits<std::uint8_t>());
    check_round_trip(w, later, "i8", limits<std::int8_t>());
    check_round_trip(w, later, "u16", limits<std::uint16_t>());
    check_round_trip(w, later, "i16", limits<std::int16_t>());
    check_round_trip(w, later, "u32", limits<std::uint32_t>());
    check_round_trip(w, later, "i32", limits<std::int32_t>());
    check_round_trip(w, later, "u64", limits<std::uint64_t>());
    check_round_trip(w, later, "i64", limits<std::int64_t>());
    check_round_trip(w, later, "f32", limits<float>());
    check_round_trip(w, later, "f64", limits<double>());
    check_round_trip(w, later, "bool", std::vector<bool>{true, false, true});
    check_round_trip(w, later, "string", std::vector<std::string>{"x", "", std::string("\0\xff", 2), "ü"});
    const std::vector<float> values{1, 2, 3, 4, 5, 6};
    w.add_tensor("m", DType::F32, {3, 2}, std::as_bytes(std::span(values)));
    w.add_tensor("v", DType::F32, {6}, std::as_bytes(std::span(values)));
    w.add_tensor("t", DType::F32, {1, 2, 3, 1}, std::as_bytes(std::span(values)));

    const std::string path = temporary();
    for (std::uint32_t alignment : {8u, 32u, 4096u}) {
        REQUIRE(w.write(path, alignment));
        Result<Gguf> file = Gguf::open(path);
        REQUIRE(file);
        CHECK(file->version() == 3);
        CHECK(file->alignment() == alignment);
        CHECK(file->file_bytes() == std::filesystem::file_size(path));
        CHECK(file->metadata().size() == 37);
        for (auto& look : later) look(*file);
        REQUIRE(file->tensors().size() == 3);
        const TensorView m = file->tensor("m")->view();
        CHECK(m.rows == 2);
        CHECK(m.cols == 3);
        for (const GgufTensor& t : file->tensors()) CHECK(std::memcmp(t.data, values.data(), 24) == 0);
        CHECK(file->tensor("t")->view().rows == 6);
        CHECK(file->tensor("nosuch") == nullptr);
        file->prefetch();
    }
    unlink(path.c_str());
    CHECK_FALSE(w.write("/nonexistent/folder/x.gguf"));
}

TEST_CASE("a value is asked for by kind: another kind is an error, a missing one may have a fallback", "[gguf]") {
    GgufWriter w;
    w.set("text", "x");
    w.set("text", "text"); // replaces
    w.set("int", std::int16_t(-3));
    w.set("half", 0.5f);
    w.set("flag", true);
    const std::string path = temporary();
    REQUIRE(w.write(path));
    Result<Gguf> file = Gguf::open(path);
    REQUIRE(file);
    CHECK(*file->text("text") == "text");
    CHECK(*file->integer("int", 7) == -3);
    CHECK(*file->number("int") == -3);
    CHECK(*file->number("half") == 0.5);
    CHECK(*file->boolean("flag", false));
    CHECK(*file->integer("nosuch", 3) == 3);
    CHECK(*file->text("nosuch", "") == "");
    CHECK_FALSE(file->integer("text", 3));
    CHECK_FALSE(file->integer("half", 3));
    CHECK_FALSE(file->number("flag"));
    CHECK_FALSE(file->boolean("int"));
    CHECK_FALSE(file->text("int"));
    CHECK(file->integer("nosuch").error().message == path + ": the required key nosuch is missing");
    CHECK(file->integer("text").error().message == path + ": text is a string, not an integer");
    unlink(path.c_str());
}

TEST_CASE("every metadata type is read", "[gguf]") {
    std::string f = "GGUF";
    put(f, std::uint32_t(2)); // version 2 has the same layout
    put(f, std::uint64_t(0));
    put(f, std::uint64_t(13));
    auto key = [&](const char* name, std::uint32_t type) {
        put_text(f, name);
        put(f, type);
    };
    key("u8", 0), put(f, std::uint8_t(200));
    key("i8", 1), put(f, std::int8_t(-100));
    key("u16", 2), put(f, std::uint16_t(60000));
    key("i16", 3), put(f, std::int16_t(-30000));
    key("u32", 4), put(f, std::uint32_t(4000000000));
    key("i32", 5), put(f, std::int32_t(-2000000000));
    key("f32", 6), put(f, 0.25f);
    key("bool", 7), put(f, std::uint8_t(1));
    key("string", 8), put_text(f, "s");
    key("array", 9), put(f, std::uint32_t(7)), put(f, std::uint64_t(3)), put(f, std::uint8_t(1)),
        put(f, std::uint8_t(0)), put(f, std::uint8_t(1));
    key("u64", 10), put(f, std::numeric_limits<std::uint64_t>::max());
    key("i64", 11), put(f, std::numeric_limits<std::int64_t>::min());
    key("f64", 12), put(f, 1e300);
    Result<Gguf> file = Gguf::parse(bytes_of(f), "all");
    REQUIRE(file);
    CHECK(file->version() == 2);
    CHECK(*file->integer("u8") == 200);
    CHECK(*file->integer("i8") == -100);
    CHECK(*file->integer("u16") == 60000);
    CHECK(*file->integer("i16") == -30000);
    CHECK(*file->integer("u32") == 4000000000);
    CHECK(*file->integer("i32") == -2000000000);
    CHECK(*file->number("f32") == 0.25);
    CHECK(*file->boolean("bool"));
    CHECK(std::get<GgufArray>(*file->find("array")).bools == std::vector<bool>{true, false, true});
    CHECK_FALSE(file->integer("u64")); // beyond what an integer holds
    CHECK(std::get<std::uint64_t>(*file->find("u64")) == std::numeric_limits<std::uint64_t>::max());
    CHECK(*file->integer("i64") == std::numeric_limits<std::int64_t>::min());
    CHECK(*file->number("f64") == 1e300);
}

TEST_CASE("a file cut off anywhere is refused, as what it looks like", "[gguf]") {
    const std::string good = slurp(reference("bad/good.gguf"));
    REQUIRE(usable(bytes_of(good)));
    for (std::size_t n = 0; n < good.size(); n++) {
        REQUIRE_FALSE(usable(bytes_of(good).first(n)));
        Result<Gguf> file = Gguf::parse(bytes_of(good).first(n), "cut");
        if (file) continue; // of a length that none of its tensors needs
        CAPTURE(n, file.error().message);
        CHECK(file.error().message.find("incomplete download?") != std::string::npos);
        CHECK(file.error().message.find(cat(n)) != std::string::npos);
    }
    // Once the header is there, with the size that it should have.
    const std::string path = temporary();
    std::ofstream(path, std::ios::binary) << good.substr(0, good.size() - 1000);
    const Result<Gguf> file = Gguf::open(path);
    REQUIRE_FALSE(file);
    const std::string wanted = cat(path, ": its tensors need a file of ", good.size(), " bytes, up to the end of '");
    CHECK(file.error().message.starts_with(wanted));
    CHECK(file.error().message.ends_with(cat(", it has ", good.size() - 1000, ": an incomplete download?")));
    unlink(path.c_str());
    CHECK(Gguf::open("/dev/null").error().message.find("regular file") != std::string::npos);
}

TEST_CASE("an alignment that leaves floats between words is refused", "[gguf]") {
    const std::vector<float> values(16, 2);
    GgufWriter               w;
    w.add_tensor("a", DType::F32, {16}, std::as_bytes(std::span(values)));
    const std::string path = temporary();
    REQUIRE(w.write(path, 32));
    std::string       file = slurp(path);
    const std::size_t at   = file.find("general.alignment") + 17 + 4;
    for (std::uint32_t alignment : {0u, 1u, 2u, 4u, 8u, 12u, 24u, 32u}) {
        std::memcpy(file.data() + at, &alignment, 4);
        const Result<Gguf> parsed = Gguf::parse(bytes_of(file), "file");
        CAPTURE(alignment);
        CHECK(parsed.has_value() == (alignment == 8 || alignment == 32));
        if (!parsed) CHECK(parsed.error().message.find("multiple of 8") != std::string::npos);
    }
    unlink(path.c_str());
}

TEST_CASE("a write that fails leaves no file, and what was there before", "[gguf]") {
    const std::string folder = temporary() + ".d/", path = folder + "x.gguf";
    std::filesystem::create_directory(folder);
    std::ofstream(path) << "before";
    const std::vector<float> values(100'000, 2);
    GgufWriter               w;
    w.add_tensor("a", DType::F32, {100'000}, std::as_bytes(std::span(values)));
    CHECK(w.write("/dev/full").error().message.find("cannot write /dev/full: No space left") != std::string::npos);
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
        const rlimit small{100'000, 100'000};
        setrlimit(RLIMIT_FSIZE, &small);
        const Result<void> written = w.write(path);
        _exit(!written && written.error().message.find(cat("cannot write ", path, ": File too large")) == 0 ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(status == 0);
    CHECK(slurp(path) == "before");
    CHECK(std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator()) == 1);
    const std::string link = folder + "link.gguf";
    std::filesystem::create_symlink("x.gguf", link);
    REQUIRE(w.write(link));
    CHECK(std::filesystem::is_symlink(link));
    CHECK(Gguf::open(path));
    std::filesystem::remove_all(folder);
}

TEST_CASE("a header with any bit flipped is refused or used, and never worse", "[gguf]") {
    const std::string good    = slurp(reference("bad/good.gguf"));
    int               refused = 0;
    for (std::size_t at = 0; at < good.size(); at++) {
        std::string changed = good;
        changed[at]         = char(changed[at] ^ (1 << at % 8));
        refused += !usable(bytes_of(changed));
        changed[at] = char(0xff);
        refused += !usable(bytes_of(changed));
    }
    CHECK(refused > 1000);
}

TEST_CASE("a version 2 file is read like version 3, any other version is refused", "[gguf]") {
    std::string file = slurp(reference("bad/good.gguf"));
    for (int version = 0; version < 256; version++) {
        file[4] = char(version);
        CHECK(usable(bytes_of(file)) == (version == 2 || version == 3));
    }
}

TEST_CASE("a model split into parts is one model", "[gguf]") {
    const std::string folder = temporary() + ".d/", first = folder + "m-00001-of-00002.gguf",
                      second = folder + "m-00002-of-00002.gguf";
    std::filesystem::create_directory(folder);
    auto refusal = [&](const std::string& path = {}) {
        const Result<Gguf> file = Gguf::open(path.empty() ? first : path);
        return file ? std::string() : file.error().message;
    };
    GgufWriter one = part_writer(0, 2, {"a"}), two = part_writer(1, 2, {"b", "c"});
    one.set("general.name", "whole");
    two.set("general.name", "not looked at");
    REQUIRE(one.write(first));
    CHECK(refusal().find(second) != std::string::npos); // is missing
    REQUIRE(two.write(second, 4096));                   // each part has an alignment of its own
    {
        const Result<Gguf> file = Gguf::open(first);
        REQUIRE(file);
        CHECK(file->tensors().size() == 3);
        REQUIRE(file->tensor("c") != nullptr);
        CHECK(static_cast<const float*>(file->tensor("c")->view().data)[63] == 2);
        CHECK(*file->text("general.name") == "whole");
        CHECK(file->file_bytes() == std::filesystem::file_size(first) + std::filesystem::file_size(second));
    }
    CHECK(refusal(second).find("part 2 of 2; open the first part") != std::string::npos);
    const std::string loose = folder + "renamed.gguf";
    std::filesystem::copy_file(first, loose);
    CHECK(refusal(loose).find("name does not end in") != std::string::npos);
    CHECK_FALSE(usable(bytes_of(slurp(first))));

    REQUIRE(part_writer(1, 2, {"b"}).write(second));
    CHECK(refusal().find("split.tensors.count is 3, the parts have 2") != std::string::npos);
    REQUIRE(part_writer(1, 2, {"a", "c"}).write(second));
    CHECK(refusal().find("'a' is in two parts") != std::string::npos);
    REQUIRE(part_writer(0, 2, {"b", "c"}).write(second));
    CHECK(refusal().find("part 1 of 2 where part 2 of 2") != std::string::npos);
    REQUIRE(part_writer(1, 3, {"b", "c"}).write(second));
    CHECK(refusal().find("part 2 of 3 where part 2 of 2") != std::string::npos);
    std::filesystem::resize_file(second, 100);
    CHECK(refusal().find(second) != std::string::npos);

    one.set("split.count", std::uint64_t(1) << 63);
    REQUIRE(one.write(first));
    CHECK(refusal().find("split.count is 9223372036854775808") != std::string::npos);
    one.set("split.count", "two");
    REQUIRE(one.write(first));
    CHECK(refusal().find("split.count is a string") != std::string::npos);
    std::filesystem::remove_all(folder);
}

TEST_CASE("a file of another kind is refused as what it seems to be", "[gguf]") {
    const std::string lfs = "version https://git-lfs.github.com/spec/v1\noid sha256:0", page = "<!DOCTYPE html><html>",
                      tensors = std::string("\x40\0\0\0\0\0\0\0", 8) + R"({"a":{"dtype":"F32"}})",
                      zip     = "PK\3\4 and so on";
    for (const auto& [text, kind] :
         {std::pair(lfs, "Git LFS"), std::pair(page, "HTML"), std::pair(tensors, "safetensors"),
          std::pair(zip, "PyTorch"), std::pair(std::string("tjgg\3\0\0\0", 8), "GGML"),
          std::pair(std::string("\x1f\x8b\x08\x00", 4), "compressed")}) {
        const Result<Gguf> file = Gguf::parse(bytes_of(text), "x");
        REQUIRE_FALSE(file);
        CAPTURE(file.error().message);
        CHECK(file.error().message.starts_with("x: not a GGUF file: it does not begin with 'GGUF', but as "));
        CHECK(file.error().message.contains(kind));
    }
    const std::string other = "GGU? or nothing that is known";
    CHECK(Gguf::parse(bytes_of(other), "x").error().message == "x: not a GGUF file: it does not begin with 'GGUF'");
}

TEST_CASE("what is not a file of ours is refused by name", "[gguf]") {
    for (const char* path : {"/nonexistent/x.gguf", "/dev/null", "/tmp", "/dev/zero"}) {
        Result<Gguf> file = Gguf::open(path);
        REQUIRE_FALSE(file);
        CHECK(file.error().message.find(path) != std::string::npos);
    }
    const std::string path = temporary();
    CHECK_FALSE(Gguf::open(path)); // empty
    unlink(path.c_str());
    REQUIRE(mkfifo(path.c_str(), 0600) == 0);
    CHECK_FALSE(Gguf::open(path)); // a pipe that nobody writes to: no waiting for one
    unlink(path.c_str());
}

TEST_CASE("a large vocabulary opens at once", "[gguf]") {
    std::vector<std::string> tokens;
    for (int i = 0; i < 150'000; i++) tokens.push_back("token number " + std::to_string(i));
    GgufWriter w;
    w.set("tokenizer.ggml.tokens", tokens);
    w.set("tokenizer.ggml.merges", tokens);
    w.set("tokenizer.ggml.token_type", std::vector<std::int32_t>(tokens.size(), 1));
    const std::string path = temporary();
    REQUIRE(w.write(path));
    const pid_t child = fork();
    if (child == 0) { // a few ms; the bound only says "not quadratic", and counts the child's processor time alone
        const rlimit limit{5, 5};
        _exit(setrlimit(RLIMIT_CPU, &limit) == 0 && Gguf::open(path) ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(status == 0);
    const Result<Gguf> file = Gguf::open(path);
    REQUIRE(file);
    CHECK(std::get<GgufArray>(*file->find("tokenizer.ggml.tokens")).strings[149'999] == "token number 149999");
    unlink(path.c_str());
}
