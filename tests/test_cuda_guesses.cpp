// Layers that guess on a GPU, MTP layers and drafts of EAGLE-3: the kernels against plain copies, the logits against those of an independent
// reference, and guesses of an engine with CUDA graphs. Without a GPU these tests print that and pass.
#include <catch2/catch_test_macros.hpp>

#include <nlohmann/json.hpp>

#include "../cuda/guesses.h"
#include "reference.h"

import quire.core.base;
import quire.core.std;
import quire.engine.eagle_draft;
import quire.engine.engine;
import quire.engine.executor;
import quire.engine.local_executor;
import quire.model_file.config;
import quire.model_file.weights;
import quire.schedule.request;
import quire.schedule.scheduler;

#include "cuda_tools.h"
#include "engine_tools.h"
#include "guess_tools.h"
#include "process.h"
#include "schedule_tools.h"

using namespace quire;
using namespace quire::testing;

TEST_CASE("GPU: states are kept and carried, columns put and gathered, as plain copies do", "[cuda]") {
    if (no_gpu()) return;
    const Gpu    gpu;
    std::mt19937 random(43);
    for (std::size_t cols : {1u, 3u, 8u, 257u, 5120u}) {
        CAPTURE(cols);
        constexpr std::size_t tokens = 7, rows = 4, places = 12;
        const auto            x = random_fp16(tokens * cols, random), steps = random_fp16(rows * cols, random),
                   guesses = random_fp16(rows * cols, random), memory = random_fp16(places * cols, random);
        const std::vector<std::int32_t>  from{cuda::CarryStep::zeros,      cuda::CarryStep::row_before, 11, 3,
                                             cuda::CarryStep::row_before, cuda::CarryStep::zeros,      5};
        const std::vector<cuda::KeptRow> kept{{3, 5, 0}, {0, 11, 1}, {2, 0, 0}};
        auto                             want_memory = memory;
        const auto                       copy = [&](auto& to, std::size_t at, const auto& source, std::size_t row) {
            std::copy_n(source.begin() + std::ptrdiff_t(row * cols), cols, to.begin() + std::ptrdiff_t(at * cols));
        };
        for (const cuda::KeptRow& k : kept)
            copy(want_memory, std::size_t(k.to), k.guessed ? guesses : steps, std::size_t(k.row));
        std::vector<std::uint16_t> want(tokens * cols, 0);
        for (std::size_t t = 0; t < tokens; t++)
            if (from[t] >= 0) copy(want, t, want_memory, std::size_t(from[t]));
            else if (from[t] == cuda::CarryStep::row_before) copy(want, t, x, t - 1);

        const OnDevice<std::uint16_t> x_there(gpu, x), steps_there(gpu, steps), guesses_there(gpu, guesses),
            memory_there(gpu, memory), out(gpu, std::vector<std::uint16_t>(tokens * cols, fp16_nan));
        const OnDevice<std::int32_t>  from_there(gpu, from), n(gpu, {std::int32_t(kept.size())});
        const OnDevice<cuda::KeptRow> kept_there(gpu, kept);
        cuda::carry(
            {x_there.data, steps_there.data, guesses_there.data, memory_there.data, out.data, std::int64_t(2 * cols)},
            {from_there.data, n.data, kept_there.data}, std::int64_t(tokens), gpu);
        CHECK(memory_there.back(gpu) == want_memory);
        CHECK(out.back(gpu) == want);

        // Columns 2 .. of rows that are two columns wider.
        const auto wide = cols + 2;
        for (bool from_float : {false, true})
            for (bool to_float : {false, true}) {
                const auto            values = floats_of(x);
                const OnDevice<float> float_x(gpu, values), float_out(gpu, std::vector<float>(tokens * wide, 7));
                const OnDevice<std::uint16_t> half_out(gpu, std::vector<std::uint16_t>(tokens * wide, f32_to_f16(7)));
                const void* const source = from_float ? static_cast<const void*>(float_x.data) : x_there.data;
                void* const       third  = to_float ? static_cast<void*>(float_out.data + 2) : half_out.data + 2;
                cuda::put_columns(source, from_float, std::int64_t(tokens), std::int64_t(cols), third, to_float,
                                  std::int64_t(wide), gpu);
                const std::vector<float> got  = to_float ? float_out.back(gpu) : floats_of(half_out.back(gpu));
                bool                     same = true;
                for (std::size_t t = 0; t < tokens; t++)
                    for (std::size_t c = 0; c < wide; c++)
                        same = same && got[t * wide + c] == (c < 2 ? 7.0f : values[t * cols + c - 2]);
                CHECK(same);
            }
        const OnDevice<float>         large(gpu, {1e9f, -1e9f, 2.0f});
        const OnDevice<std::uint16_t> held(gpu, {0, 0, 0});
        cuda::put_columns(large.data, true, 1, 3, held.data, false, 3, gpu);
        CHECK(floats_of(held.back(gpu)) == std::vector<float>{65504, -65504, 2});

        std::vector<std::int32_t> columns(cols + 5, -1);
        for (std::size_t c = 0; c < cols; c++) columns[(3 * c + 1) % columns.size()] = std::int32_t(c);
        const auto            values = floats_of(x);
        const OnDevice<float> float_x(gpu, values), gathered(gpu, std::vector<float>(tokens * columns.size(), 7));
        const OnDevice<std::int32_t> columns_there(gpu, columns);
        cuda::gather_columns(float_x.data, std::int64_t(tokens), std::int64_t(cols), columns_there.data, gathered.data,
                             std::int64_t(columns.size()), gpu);
        const std::vector<float> got  = gathered.back(gpu);
        bool                     same = true;
        for (std::size_t t = 0; t < tokens; t++)
            for (std::size_t c = 0; c < columns.size(); c++)
                same = same &&
                       got[t * columns.size() + c] == (columns[c] < 0 ? -std::numeric_limits<float>::infinity()
                                                                      : values[t * cols + std::size_t(columns[c])]);
        CHECK(same);
    }
}

TEST_CASE("GPU: the logits of layers that guess are those of the reference, also of guesses behind guesses", "[cuda]") {
    if (no_gpu()) return;
    for (const bool deterministic : {false, true}) {
        EngineOptions how;
        how.device         = "cuda";
        how.deterministic  = deterministic;
        const float most   = 0.05f; // of a logit, in fp16
        const auto  mtp    = std::string(QUIRE_ROOT "/tests/data/mtp/tiny-mtp");
        const auto  folder = std::string(QUIRE_ROOT "/tests/data/eagle/");
        GuessedText of_layer(mtp + "-F16.gguf", "", how);
        check_recorded(of_layer, mtp + ".json", most);
        for (const char* kind : {"small", "wide", "shared"}) {
            CAPTURE(kind, deterministic);
            GuessedText of_draft(folder + "tiny-target-F16.gguf", folder + "tiny-eagle-" + kind + "-F16.gguf", how);
            check_recorded(of_draft, folder + "tiny-eagle-" + kind + ".json", most);
        }
    }
}

TEST_CASE("GPU: guesses come true where the model counts, with CUDA graphs and without", "[cuda]") {
    if (no_gpu()) return;
    const std::string hybrid = temporary(), dense = temporary(), draft = temporary();
    const auto        make = [](std::vector<std::string> words) {
        words.insert(words.begin(), "make-model");
        REQUIRE(run_program("bench", words).code == 0);
    };
    make({"--shape", "tiny-hybrid", "--layers", "2", "--type", "q8_0", "--mtp", "1", "--counting", "-o", hybrid});
    make({"--shape", "tiny", "--type", "q8_0", "--counting", "-o", dense});
    make({"--shape", "tiny", "--type", "q8_0", "--eagle3", "-o", draft});
    for (const bool deterministic : {false, true})
        for (const bool eagle : {false, true}) {
            CAPTURE(eagle, deterministic);
            EngineOptions o;
            o.device        = "cuda";
            o.deterministic = deterministic;
            o.context       = 200;
            o.kv_blocks     = 200;
            o.drafts.on = o.drafts.always = true;
            o.drafts.most                 = 3;
            o.drafts.by_eagle             = eagle;
            o.drafts.by_mtp               = !eagle;
            if (eagle) o.drafts.model = draft;
            Engine            engine = load(eagle ? dense : hybrid, o);
            std::vector<Task> tasks;
            for (int i = 0; i < 5; i++)
                tasks.push_back({.request = greedy({40 + 30 * i, 41 + 30 * i}, 25), .submit_at = 3 * i});
            const std::vector<Answers> got = run_all(engine, tasks);
            for (int i = 0; i < 5; i++) {
                const auto& tokens = got[std::size_t(i)].by_index.at(0).tokens;
                CHECK(tokens.front() == 42 + 30 * i);
                CHECK(tokens.back() == 66 + 30 * i);
            }
            const auto stats = engine.stats().memory;
            CHECK(stats.draft_tokens > 5 * 12);
            CHECK(stats.draft_tokens == stats.accepted_tokens);
        }
}

// Writes over the tensors of a file of fp16: `value` gives each number from the one that is there.
static void change(const std::string& path, const std::string& tensor, const std::function<float(float)>& value) {
    std::size_t at = 0, n = 0;
    {
        const Gguf  file  = value_of(Gguf::open(path));
        const auto& all   = file.tensors();
        const auto  found = std::ranges::find(all, tensor, &GgufTensor::name);
        REQUIRE(found != all.end());
        REQUIRE(found->type == DType::F16);
        const GgufTensor& last = all.back();
        at = std::filesystem::file_size(path) - std::size_t(last.data + (last.bytes + 31) / 32 * 32 - found->data);
        n  = found->bytes / 2;
    }
    std::fstream               file(path, std::ios::in | std::ios::out | std::ios::binary);
    std::vector<std::uint16_t> numbers(n);
    file.seekg(std::streamoff(at)).read(reinterpret_cast<char*>(numbers.data()), std::streamsize(n * 2));
    for (std::uint16_t& x : numbers) x = f32_to_f16(value(f16_to_f32(x)));
    file.seekp(std::streamoff(at)).write(reinterpret_cast<const char*>(numbers.data()), std::streamsize(n * 2));
    REQUIRE(file.good());
}

TEST_CASE("GPU: the decode megakernel leaves a draft of EAGLE-3 the states that plain kernels leave", "[cuda]") {
    if (no_gpu()) return;
    const std::string target = temporary(), draft = temporary();
    const auto        make = [](std::vector<std::string> words) {
        words.insert(words.begin(), "make-model");
        REQUIRE(run_program("bench", words).code == 0);
    };
    make({"--shape", "llama-1b", "--layers", "8", "--type", "bf16", "-o", target});
    make({"--shape", "llama-1b", "--layers", "8", "--type", "bf16", "--eagle3", "-o", draft});
    // The draft as it is made goes by the last token alone; with these weights it goes by the states.
    std::mt19937                    random(7);
    std::normal_distribution<float> normal(0, 0.02f);
    change(draft, "fc.weight", [&](float) { return normal(random); });
    change(draft, "blk.0.attn_output.weight", [](float x) { return x / 1000; });
    std::vector<std::vector<float>> rows[2];
    for (const bool fused : {true, false}) {
        EngineOptions how;
        how.device = "cuda";
        how.fusion = fused;
        GuessedText text(target, draft, how);
        // Compute capability 9.0 has the megakernel.
        const bool has = text.explain().find("decode megakernel") != std::string::npos;
        if (fused && !has) std::puts("no decode megakernel here");
        CHECK((!has || fused));
        for (const int first : {5, 900}) {
            std::vector<Token> tokens{first, first + 3};
            for (int i = 0; i < 38; i++) tokens.push_back(2 + (37 * i + first) % 30000);
            tokens.push_back(77);
            text.begin(tokens, std::vector<int>(tokens.size() - 1, 1));
            rows[fused].push_back(text.guess(int(tokens.size()) - 1));
            rows[fused].push_back(text.guess_next(99));
        }
    }
    float most = 0, apart = 0, largest = 0;
    for (std::size_t i = 0; i < rows[0].size(); i++)
        for (std::size_t j = 0; j < rows[0][i].size(); j++) {
            most    = std::max(most, std::abs(rows[0][i][j] - rows[1][i][j]));
            largest = std::max(largest, std::abs(rows[0][i][j]));
            apart   = std::max(apart, std::abs(rows[0][0][j] - rows[0][2][j])); // of other texts with one last token
        }
    INFO(most << " of " << largest << ", texts " << apart);
    CHECK(most < 0.02f * largest);
    CHECK(apart > 0.2f * largest);
}
