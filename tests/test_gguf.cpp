#include <catch2/catch_test_macros.hpp>

#include "process.h"
#include "reference.h"

import quire.base;
import quire.config;
import quire.gguf;
import quire.std;
import quire.tensor;
import quire.weights;

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

// Everything that a file leads to before a model runs.
bool usable(std::span<const std::byte> bytes) {
    Result<Gguf> file = Gguf::parse(bytes, "bytes");
    if (!file) return false;
    Result<ModelConfig> config = read_config(*file);
    return config && bind_tensors(*file, *config);
}

GgufWriter small_writer() {
    GgufWriter w;
    w.set("a.u32", std::uint32_t(7));
    w.set("a.i32", std::int32_t(-7));
    w.set("a.u64", std::uint64_t(1) << 60);
    w.set("a.f32", 1.5f);
    w.set("a.bool", true);
    w.set("a.text", "text");
    w.set("a.texts", std::vector<std::string>{"x", "", "yz"});
    w.set("a.floats", std::vector<float>{1, 2.5f});
    w.set("a.ints", std::vector<std::int32_t>{-1, 2});
    const std::vector<float> values{1, 2, 3, 4, 5, 6};
    w.add_tensor("m", DType::F32, {3, 2}, std::as_bytes(std::span(values)));
    w.add_tensor("v", DType::F32, {6}, std::as_bytes(std::span(values)));
    return w;
}

} // namespace

TEST_CASE("what the writer wrote the reader reads", "[gguf]") {
    const std::string path = temporary();
    for (std::uint32_t alignment : {32u, 8u, 4096u}) {
        REQUIRE(small_writer().write(path, alignment));
        Result<Gguf> file = Gguf::open(path);
        REQUIRE(file);
        CHECK(file->version() == 3);
        CHECK(file->alignment() == alignment);
        CHECK(*file->integer("a.u32") == 7);
        CHECK(*file->integer("a.i32") == -7);
        CHECK(*file->integer("a.u64") == std::int64_t(1) << 60);
        CHECK(*file->number("a.f32") == 1.5);
        CHECK(*file->boolean("a.bool"));
        CHECK(*file->text("a.text") == "text");
        CHECK(std::get<GgufArray>(*file->find("a.texts")).strings == std::vector<std::string_view>{"x", "", "yz"});
        CHECK(std::get<GgufArray>(*file->find("a.floats")).floats == std::vector<double>{1, 2.5});
        CHECK(std::get<GgufArray>(*file->find("a.ints")).ints == std::vector<std::int64_t>{-1, 2});
        REQUIRE(file->tensor("m") != nullptr);
        const TensorView m = file->tensor("m")->view();
        CHECK(m.rows == 2);
        CHECK(m.cols == 3);
        CHECK(static_cast<const float*>(m.data)[5] == 6);
        CHECK(file->tensor("nosuch") == nullptr);
        CHECK_FALSE(file->integer("a.text"));   // of another kind
        CHECK_FALSE(file->integer("nosuch"));   // missing
        CHECK(*file->integer("nosuch", 3) == 3);
    }
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
    key("array", 9), put(f, std::uint32_t(7)), put(f, std::uint64_t(3)), put(f, std::uint8_t(1)), put(f, std::uint8_t(0)), put(f, std::uint8_t(1));
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

TEST_CASE("a file cut off anywhere is refused", "[gguf]") {
    const std::string good = slurp(reference("bad/good.gguf"));
    REQUIRE(usable(bytes_of(good)));
    for (std::size_t n = 0; n < good.size(); n++) REQUIRE_FALSE(usable(bytes_of(good).first(n)));
}

TEST_CASE("a header with any bit flipped is refused or used, and never worse", "[gguf]") {
    const std::string good = slurp(reference("bad/good.gguf"));
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

TEST_CASE("a model split into parts is one model", "[gguf]") {
    const std::filesystem::path folder = temporary() + ".d";
    std::filesystem::create_directory(folder);
    const std::vector<float> values(64, 2);
    auto part = [&](int i, int count, std::vector<std::string> names, int says) {
        GgufWriter w;
        if (i == 0) w.set("general.name", "whole");
        w.set("split.no", std::uint32_t(says));
        w.set("split.count", std::uint32_t(count));
        w.set("split.tensors.count", std::int32_t(3));
        for (auto& n : names) w.add_tensor(n, DType::F32, {64}, std::as_bytes(std::span(values)));
        char name[64];
        std::snprintf(name, sizeof name, "m-%05d-of-%05d.gguf", i + 1, count);
        REQUIRE(w.write((folder / name).string()));
        return (folder / name).string();
    };
    const std::string first = part(0, 2, {"a"}, 0);
    CHECK_FALSE(Gguf::open(first)); // the second is missing
    part(1, 2, {"b", "c"}, 1);
    {
        Result<Gguf> file = Gguf::open(first);
        REQUIRE(file);
        CHECK(file->tensors().size() == 3);
        CHECK(file->tensor("c") != nullptr);
        CHECK(*file->text("general.name") == "whole");
    }
    part(1, 2, {"b"}, 1);
    CHECK_FALSE(Gguf::open(first)); // a tensor short of split.tensors.count
    part(1, 2, {"a", "c"}, 1);
    CHECK_FALSE(Gguf::open(first)); // a tensor twice
    part(1, 2, {"b", "c"}, 0);
    CHECK_FALSE(Gguf::open(first)); // says it is another part
    std::filesystem::remove_all(folder);
}

TEST_CASE("what is not a file of ours is refused by name", "[gguf]") {
    for (const char* path : {"/nonexistent/x.gguf", "/dev/null", "/tmp", "/dev/zero"}) {
        Result<Gguf> file = Gguf::open(path);
        REQUIRE_FALSE(file);
        CHECK(file.error().message.find(path) != std::string::npos);
    }
}
