// Remembered measurements of types of K and V, and --kv-type auto.
#include <unistd.h>
#include <catch2/catch_test_macros.hpp>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "process.h"
#include "reference.h"

import quire.core.base;
import quire.core.std;
import quire.engine.fingerprint;
import quire.engine.kv_quality;
import quire.engine.options;
import quire.model_file.gguf;

using namespace quire;
using namespace quire::testing;

TEST_CASE("the type of K and V is chosen by what was measured") {
    const std::string model  = reference("models/llama3-gqa-Q8_0.gguf");
    const std::string folder = temporary() + "-cache";
    const char* const before = std::getenv("XDG_CACHE_HOME");
    const std::string old    = before ? before : "";
    setenv("XDG_CACHE_HOME", folder.c_str(), 1);
    const std::uint64_t hash   = fingerprint(*Gguf::open(model));
    const auto          chosen = [&](EngineOptions o = {}) {
        o.kv_type_auto         = true;
        const std::string said = choose_kv_type(model, o);
        return std::pair(std::string(name_of(o.kv_type)), said);
    };
    CHECK(chosen().first == "f16");
    CHECK(chosen().second.find("was measured") != std::string::npos);
    EngineOptions fixed;
    fixed.kv_type                  = DType::I8;
    const std::string not_measured = ": what this changes was not measured for this model (bench quality -m FILE)";
    CHECK(choose_kv_type(model, fixed) == "K and V are q8_0" + not_measured);
    EngineOptions usual, mixed;
    CHECK(choose_kv_type(model, usual).empty());
    mixed.kv_type.k = DType::I8;
    CHECK(choose_kv_type(model, mixed) == "K and V are q8_0 (V: f16)" + not_measured);

    REQUIRE(remember_kv_quality(hash, "fp8", {1000, 4e-3, 3e-2}));
    CHECK(chosen().first == "f16"); // above the limit
    CHECK(chosen().second.find("above --kv-type-limit") != std::string::npos);
    REQUIRE(remember_kv_quality(hash, "q8_0", {1000, 2e-4, 9e-4}));
    REQUIRE(remember_kv_quality(hash + 1, "q8_0", {1000, 2e-1, 9e-1})); // of another model
    CHECK(chosen().first == "q8_0");
    CHECK(choose_kv_type(model, fixed).find("0.0002") != std::string::npos);
    REQUIRE(remember_kv_quality(hash, "fp8", {1000, 1e-4, 9e-4})); // the last one counts
    CHECK(chosen().first == "fp8");
    EngineOptions strict;
    strict.kv_type_limit = 1e-5;
    CHECK(chosen(strict).first == "f16");
    EngineOptions odd;
    odd.block_size = 6; // a GPU could not take it
    CHECK(chosen(odd).first == "f16");
    odd.device = "cpu";
    CHECK(chosen(odd).first == "fp8");

    // With the type of one of the two named, the other one gets the same type, as far as that was measured and good.
    const auto other = [&](DType type, bool k, double limit = 0.001) {
        EngineOptions o;
        o.kv_type_limit                 = limit;
        (k ? o.kv_type.k : o.kv_type.v) = type;
        (k ? o.k_named : o.v_named)     = true;
        auto chosen_types               = chosen(o);
        return chosen_types;
    };
    CHECK(other(DType::I8, false) == std::pair(std::string("q8_0"), choose_kv_type(model, fixed)));
    CHECK(other(DType::I8, true).first == "q8_0");
    CHECK(other(DType::I8, false, 1e-5) ==
          std::pair(
              std::string("f16 (V: q8_0)"),
              std::string("K is f16 beside V in q8_0: the mean KLD of q8_0 is 0.0002, above --kv-type-limit 1e-05")));
    CHECK(other(DType::F8, true, 1e-5).first == "fp8 (V: f16)");
    CHECK(other(DType::F32, false) ==
          std::pair(std::string("f16 (V: f32)"), std::string("K is f16 beside V in f32: no such pair is measured")));
    CHECK(other(DType::F16, false) == std::pair(std::string("f16"), std::string()));
    EngineOptions both;
    both.kv_type = KvTypes{DType::I8, DType::F16};
    both.k_named = both.v_named = true;
    CHECK(chosen(both) == std::pair(std::string("q8_0 (V: f16)"), "K and V are q8_0 (V: f16)" + not_measured));

    EngineOptions prompts;
    CHECK(prompt_quality(model, prompts).empty());
    prompts.fp8_rows = 1024;
    CHECK(prompt_quality(model, prompts).find("was not measured") != std::string::npos);
    REQUIRE(remember_kv_quality(hash, fp8_prompts, {2000, 2e-2, 1e-1}));
    CHECK(prompt_quality(model, prompts).find("0.02, p99 0.1, against 16 bits at 2000") != std::string::npos);
    CHECK(chosen().first == "fp8"); // prompts are something else

    for (const char* wrong : {"nan 1", "-1 1", "1e-5 inf", "1e-5 -1", "inf 1"}) // no measurement
        std::ofstream(folder + "/quire/kv-quality") << hash << " q8_0 1000 " << wrong << "\n";
    CHECK(chosen().first == "f16");
    std::ofstream(folder + "/quire/kv-quality") << "no line\n" << hash << " q8_0 x\n" << std::string(1000, 'x');
    CHECK(chosen().first == "f16");
    old.empty() ? unsetenv("XDG_CACHE_HOME") : setenv("XDG_CACHE_HOME", old.c_str(), 1);
    std::filesystem::remove_all(folder);
}
