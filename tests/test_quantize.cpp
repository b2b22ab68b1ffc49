// Quantising: the types that a reference defines, to the bit; the others by their errors; mixes; the program as a process.
#include <catch2/catch_test_macros.hpp>

#include <filesystem>

#include "process.h"
#include "reference.h"

import quire.core.base;
import quire.core.std;
import quire.core.tensor;
import quire.model_file.gguf;
import quire.model_file.gguf_writer;
import quire.model_file.quants;
import quire.tools.quantize.defined;
import quire.tools.quantize.mix;
import quire.tools.quantize.search;

using namespace quire;
using namespace quire::testing;

namespace {

// Sums of four uniform numbers, about 0, with a deviation of 0.58: the same on every machine.
std::vector<float> bell(std::size_t n) {
    std::vector<float> out(n);
    std::uint32_t      state = 1;
    for (float& v : out) {
        double sum = -2;
        for (int i = 0; i < 4; i++) {
            state = state * 1664525u + 1013904223u;
            sum += double(state >> 8) / 16777216.0;
        }
        v = float(sum);
    }
    return out;
}

double rmse(DType type, std::span<const float> x, const float* weights, std::int64_t cols) {
    std::vector<std::byte> blocks(row_bytes(type, std::int64_t(x.size())));
    std::vector<float>     y(x.size());
    for (std::int64_t at = 0; at < std::int64_t(x.size()); at += cols) {
        std::byte* to = blocks.data() + row_bytes(type, at);
        if (weights != nullptr || !has_defined_quantisation(type))
            quantize_search(type, x.data() + at, weights, to, cols);
        else quantize_defined(type, x.data() + at, to, cols);
    }
    dequantize(type, blocks.data(), y.data(), std::int64_t(y.size()));
    double sum = 0;
    for (std::size_t i = 0; i < x.size(); i++) {
        const double d = double(x[i]) - double(y[i]);
        sum += d * d * (weights ? double(weights[i % std::size_t(cols)]) : 1);
    }
    return std::sqrt(sum / double(x.size()));
}

// A model of two layers as far as quantize looks at it.
std::string write_model(int cols = 256, DType type = DType::F32) {
    const std::string path = temporary();
    GgufWriter        w;
    w.set("general.architecture", "llama");
    w.set("general.name", "two layers");
    w.set("llama.block_count", std::uint32_t(2));
    w.set("llama.attention.head_count", std::uint32_t(8));
    w.set("llama.attention.head_count_kv", std::uint32_t(2));
    w.set("tokenizer.ggml.tokens", std::vector<std::string>{"a", "b"});
    w.set("tokenizer.ggml.scores", std::vector<float>{0.5f, -1.0f});
    const auto add = [&](const std::string& name, std::int64_t rows) {
        const auto             x = bell(std::size_t(rows * cols));
        std::vector<std::byte> bytes(row_bytes(type, cols) * std::size_t(rows));
        quantize_defined(rows == 1 ? DType::F32 : type, x.data(), bytes.data(), rows * cols);
        w.add_tensor(name, rows == 1 ? DType::F32 : type,
                     rows == 1 ? std::vector<std::int64_t>{cols} : std::vector<std::int64_t>{cols, rows}, bytes);
    };
    add("token_embd.weight", 4);
    for (int layer = 0; layer < 2; layer++) {
        if (type == DType::F32) add(cat("blk.", layer, ".attn_norm.weight"), 1);
        for (const char* name : {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"})
            add(cat("blk.", layer, ".", name, ".weight"), 40);
    }
    REQUIRE(w.write(path));
    return path;
}

} // namespace

TEST_CASE("types that a reference defines are quantised to its bits", "[quantize]") {
    if (!has_reference("quants/source.f32.npy")) return;
    const std::string npy = slurp(reference("quants/source.f32.npy"));
    const std::size_t header =
        10 + std::size_t(static_cast<unsigned char>(npy[8])) + 256 * std::size_t(static_cast<unsigned char>(npy[9]));
    std::vector<float> x((npy.size() - header) / sizeof(float));
    std::memcpy(x.data(), npy.data() + header, x.size() * sizeof(float));
    for (DType type : {DType::BF16, DType::Q4_0, DType::Q4_1, DType::Q5_0, DType::Q5_1, DType::Q8_0, DType::MXFP4,
                       DType::TQ1_0, DType::TQ2_0}) {
        CAPTURE(dtype_info(type).name);
        const std::string want = slurp(reference(cat("quants/", dtype_info(type).name, ".quantized.bin")));
        std::string       got(row_bytes(type, std::int64_t(x.size())), '\0');
        quantize_defined(type, x.data(), reinterpret_cast<std::byte*>(got.data()), std::int64_t(x.size()));
        CHECK(got == want);
    }
}

TEST_CASE("the errors of quantised types are those that were measured, below those of llama.cpp", "[quantize]") {
    struct Line {
        DType  type;
        double plain, weighted;       // 0: the same search with or without
        double llama, llama_weighted; // of ggml_quantize_chunk, ggml 0.16
    };
    constexpr std::int64_t cols = 512;
    const auto             x    = bell(32 * cols);
    std::vector<float>     weights(cols, 1);
    for (std::size_t i = 0; i < weights.size(); i += 7) weights[i] = 16;
    for (const Line& l : {Line{DType::Q8_0, 0.00292613978, 0, 0.00292613978, 0},
                          {DType::Q4_0, 0.0472596419, 0.0690157189, 0.0472596419, 0.070805565},
                          {DType::Q4_1, 0.0433749251, 0.0551480203, 0.0433749251, 0.0565302772},
                          {DType::Q5_0, 0.0234324887, 0.034235762, 0.0234324887, 0.0353814416},
                          {DType::Q5_1, 0.0212086344, 0.0268628085, 0.0212086344, 0.0275484589},
                          {DType::MXFP4, 0.0643978683, 0, 0.0643978683, 0},
                          {DType::TQ1_0, 0.443234954, 0, 0.443234954, 0},
                          {DType::TQ2_0, 0.443234954, 0, 0.443234954, 0},
                          {DType::Q2_K, 0.144346893, 0.190511566, 0.163569974, 0.202536263},
                          {DType::Q3_K, 0.0798120712, 0.119213123, 0.0838471207, 0.121597994},
                          {DType::Q4_K, 0.0388566195, 0.0560350535, 0.0397233453, 0.057755115},
                          {DType::Q5_K, 0.0192751817, 0.0284143142, 0.02004124, 0.0299522221},
                          {DType::Q6_K, 0.00930659518, 0.0135662042, 0.00988414072, 0.0144476924},
                          {DType::IQ4_NL, 0.040932443, 0.0613511793, 0.0424562283, 0.0652362897},
                          {DType::IQ4_XS, 0.0411833053, 0.0618832575, 0.0427580682, 0.0660057694}}) {
        CAPTURE(dtype_info(l.type).name);
        const double plain = rmse(l.type, x, nullptr, cols);
        CHECK(std::abs(plain / l.plain - 1) < 1e-6);
        CHECK(plain <= l.llama * 1.000001);
        if (l.weighted == 0) continue;
        const double weighted = rmse(l.type, x, weights.data(), cols);
        CHECK(std::abs(weighted / l.weighted - 1) < 1e-6);
        CHECK(weighted <= l.llama_weighted);
    }
}

TEST_CASE("blocks of zeros, of one value, of the smallest and the largest values stand for about what they were",
          "[quantize]") {
    for (const DTypeInfo& info : dtype_table) {
        if (!has_defined_quantisation(info.type) && !has_search(info.type)) continue;
        for (float value : {0.0f, 1.0f, -3.0f, 1e-30f, -1e-7f, 60000.0f})
            for (int kind = 0; kind < 3; kind++) { // all alike; one of them; of both signs
                CAPTURE(info.name, value, kind);
                std::vector<float> x(256, kind == 1 ? 0.0f : value), y(256), weights(256, 0.0f);
                x[0] = value;
                if (kind == 2)
                    for (std::size_t i = 0; i < 256; i += 2) x[i] = -value;
                std::vector<std::byte> blocks(row_bytes(info.type, 256));
                for (const float* w : {static_cast<const float*>(nullptr), static_cast<const float*>(weights.data())}) {
                    if (has_search(info.type) && (w || !has_defined_quantisation(info.type)))
                        quantize_search(info.type, x.data(), w, blocks.data(), 256);
                    else quantize_defined(info.type, x.data(), blocks.data(), 256);
                    dequantize(info.type, blocks.data(), y.data(), 256);
                    for (std::size_t i = 0; i < 256; i++)
                        REQUIRE(std::abs(double(x[i]) - double(y[i])) <= 0.35 * std::abs(double(value)) + 1e-6);
                }
            }
    }
}

TEST_CASE("mixes give tensors the types that llama-quantize gives them", "[quantize]") {
    const auto type = [](std::string_view mix, std::string_view name, MixModel model, std::int64_t cols = 4096,
                         std::int64_t experts = 1) {
        std::deque<std::string> names{"output.weight"};
        std::vector<MixTensor>  tensors{{"output.weight", DType::F16, {4096, 64, 1, 1}}};
        for (int layer = 0; layer < int(model.layers); layer++) // attn_v of every layer is counted
            tensors.push_back({names.emplace_back(cat("blk.", layer, ".attn_v.weight")), DType::F16, {4096, 64, 1, 1}});
        std::erase_if(tensors, [&](const MixTensor& t) { return t.name == name; });
        tensors.push_back({name, DType::F16, {cols, 64, experts, 1}});
        const auto types = types_of(*find_mix(mix), model, tensors);
        REQUIRE(types);
        return std::string(dtype_info(types->back()).name);
    };
    const MixModel llama{"llama", 32, 0, 32, 32, false}, grouped{"llama", 32, 0, 32, 8, false},
        experts{"llama", 32, 8, 32, 8, false}, large{"llama", 80, 0, 64, 8, false};
    CHECK(type("Q4_K_M", "output.weight", llama) == "Q6_K");
    CHECK(type("Q8_0", "output.weight", llama) == "Q8_0");
    CHECK(type("Q4_K_M", "blk.0.attn_v.weight", llama) == "Q6_K"); // the first eighth
    CHECK(type("Q4_K_M", "blk.4.attn_v.weight", llama) == "Q4_K");
    CHECK(type("Q4_K_M", "blk.6.attn_v.weight", llama) == "Q6_K");  // every third after it
    CHECK(type("Q4_K_M", "blk.31.attn_v.weight", llama) == "Q6_K"); // the last eighth
    CHECK(type("Q4_K", "blk.31.attn_v.weight", llama) == "Q6_K");   // another name
    CHECK(type("q4_k_s", "blk.3.attn_v.weight", llama) == "Q5_K");
    CHECK(type("Q4_K_S", "blk.4.attn_v.weight", llama) == "Q4_K");
    CHECK(type("Q2_K", "blk.9.attn_v.weight", llama) == "Q3_K");
    CHECK(type("Q2_K", "blk.9.attn_v.weight", grouped) == "Q4_K");
    CHECK(type("IQ4_XS", "blk.9.attn_v.weight", grouped) == "Q5_K");
    CHECK(type("Q3_K_M", "blk.1.attn_v.weight", llama) == "Q5_K");
    CHECK(type("Q3_K_M", "blk.2.attn_v.weight", llama) == "Q4_K");
    CHECK(type("Q3_K_M", "blk.2.attn_v.weight", large) == "Q5_K");
    CHECK(type("Q3_K_L", "blk.2.attn_output.weight", llama) == "Q5_K");
    CHECK(type("Q4_K_M", "blk.2.attn_v.weight", experts) == "Q8_0");
    CHECK(type("Q4_K_M", "blk.2.attn_output.weight", experts) == "Q5_K");
    CHECK(type("Q4_K_M", "blk.31.ffn_down_exps.weight", experts, 4096, 8) == "Q6_K");
    CHECK(type("Q4_K_M", "blk.9.ffn_down_exps.weight", experts, 4096, 8) == "Q6_K");
    CHECK(type("Q4_K_M", "blk.10.ffn_down_exps.weight", experts, 4096, 8) == "Q4_K");
    CHECK(type("MXFP4_MOE", "blk.0.ffn_up_exps.weight", experts, 4096, 8) == "MXFP4");
    CHECK(type("MXFP4_MOE", "blk.0.attn_q.weight", experts) == "Q8_0");
    CHECK(type("TQ2_0", "token_embd.weight", llama) == "Q4_K");
    CHECK(type("Q4_K_M", "token_embd.weight", llama) == "Q4_K");
    CHECK(type("IQ4_NL", "blk.0.ffn_down.weight", llama) == "Q5_K");
    CHECK(type("IQ4_NL", "blk.0.ffn_down.weight", {"llama", 32, 0, 32, 32, true}) == "IQ4_NL");
    CHECK(type("Q4_0", "blk.0.ffn_down.weight", {"llama", 32, 0, 32, 32, true}) == "Q4_1");
    // what stays as it is
    CHECK(type("Q4_K_M", "blk.0.ffn_gate_inp.weight", experts) == "F16");
    CHECK(type("Q4_K_M", "blk.0.attn_q.bias", llama) == "F16");
    CHECK(type("Q4_K_M", "blk.0.attn_q_norm.weight", llama) == "F16");
    CHECK(type("Q4_K_M", "position_embd.weight", llama) == "F16");
    // rows that do not fill blocks
    for (auto [mix, of_96, of_100] : {std::tuple("Q4_K_S", "Q5_0", "F16"),
                                      {"Q5_K_S", "Q5_1", "F16"},
                                      {"Q6_K", "Q8_0", "F16"},
                                      {"Q3_K_S", "Q4_0", "F16"},
                                      {"IQ4_XS", "IQ4_NL", "F16"},
                                      {"TQ1_0", "Q4_0", "F16"},
                                      {"Q4_0", "Q4_0", "F16"}}) {
        CAPTURE(mix);
        CHECK(type(mix, "blk.9.ffn_up.weight", llama, 96) == of_96);
        CHECK(type(mix, "blk.9.ffn_up.weight", llama, 100) == of_100);
    }
    CHECK(find_mix("Q9") == nullptr);
    CHECK(needs_imatrix(*find_mix("Q2_K_S"), "blk.0.attn_q.weight", DType::Q2_K));
    CHECK(!needs_imatrix(*find_mix("Q2_K"), "blk.0.attn_q.weight", DType::Q2_K));
}

TEST_CASE("quantize copies what it does not convert, and says what it did", "[quantize]") {
    const std::string in = write_model(), out = temporary(), again = temporary();
    const Finished    f = run_program("quantize", {in, out, "q4_k_m", "-t", "2"});
    CAPTURE(f.out, f.err);
    REQUIRE(f.code == 0);
    CHECK(f.err.empty());
    CHECK(f.out.find("17 tensors (2 F32, ") != std::string::npos);
    const auto before = Gguf::open(in), after = Gguf::open(out);
    REQUIRE(before);
    REQUIRE(after);
    CHECK(after->integer("general.file_type").value() == 15);
    CHECK(after->integer("general.quantization_version").value() == 2);
    for (const GgufPair& pair : before->pairs()) {
        const auto found = std::ranges::find_if(after->pairs(), [&](const GgufPair& p) { return p.key == pair.key; });
        REQUIRE(found != after->pairs().end());
        CHECK(found->type == pair.type);
        CHECK(std::ranges::equal(found->value, pair.value));
    }
    const GgufTensor* norm = after->tensor("blk.0.attn_norm.weight");
    REQUIRE(norm != nullptr);
    CHECK(norm->type == DType::F32);
    CHECK(std::memcmp(norm->data, before->tensor("blk.0.attn_norm.weight")->data, norm->bytes) == 0);
    CHECK(after->tensor("token_embd.weight")->type == DType::Q6_K); // tied: the output too
    CHECK(after->tensor("blk.0.attn_q.weight")->type == DType::Q4_K);
    // the same whatever the number of threads
    REQUIRE(run_program("quantize", {in, again, "Q4_K_M", "-t", "1"}).code == 0);
    CHECK(slurp(out) == slurp(again));
    // a quantised file only if that is wanted
    const Finished refused = run_program("quantize", {out, again, "Q5_0"});
    CHECK(refused.code == 1);
    CHECK(refused.err.find("Q4_K already; a quantised file is quantised again only with --allow-requantize") !=
          std::string::npos);
    const Finished larger = run_program("quantize", {out, again, "Q8_0", "--allow-requantize"});
    CHECK(larger.code == 0);
    CHECK(larger.err.find(again + " is larger than " + out) != std::string::npos);
    const std::size_t have = larger.err.find("have "), instead = larger.err.find(" instead of ");
    REQUIRE((have != std::string::npos && instead != std::string::npos));
    CHECK(larger.err.substr(have + 5, instead - have - 5) + "\n" !=
          larger.err.substr(instead + 12)); // the sizes differ
    const Finished smaller = run_program("quantize", {again, out, "Q5_0", "--allow-requantize"});
    CHECK(smaller.code == 0);
    CHECK(smaller.err.empty());
}

TEST_CASE("quantize weighs errors by an importance matrix of either form", "[quantize]") {
    const std::string in = write_model(), gguf = temporary(), dat = temporary(), plain = temporary(), a = temporary(),
                      b = temporary();
    std::vector<float> importance(256, 1);
    for (std::size_t i = 0; i < 256; i += 5) importance[i] = 100;
    const std::string name = "blk.1.attn_q.weight";
    {
        GgufWriter         w;
        std::vector<float> sums = importance, count{32};
        for (float& v : sums) v *= 32;
        w.set("general.type", "imatrix");
        w.add_tensor(name + ".in_sum2", DType::F32, {256}, std::as_bytes(std::span(sums)));
        w.add_tensor(name + ".counts", DType::F32, {1}, std::as_bytes(std::span(count)));
        REQUIRE(w.write(gguf));
        std::ofstream file(dat, std::ios::binary);
        const auto    put = [&](std::int32_t v) { file.write(reinterpret_cast<const char*>(&v), 4); };
        put(1);
        put(std::int32_t(name.size()));
        file << name;
        put(7);
        put(256);
        file.write(reinterpret_cast<const char*>(importance.data()), 1024);
    }
    REQUIRE(run_program("quantize", {in, plain, "Q4_K_S"}).code == 0);
    const Finished f = run_program("quantize", {in, a, "Q4_K_S", "--imatrix", gguf});
    CAPTURE(f.err);
    REQUIRE(f.code == 0);
    CHECK(f.out.find("without importance") != std::string::npos); // all but one
    REQUIRE(run_program("quantize", {in, b, "Q4_K_S", "--imatrix", dat}).code == 0);
    const auto source = Gguf::open(in), without = Gguf::open(plain), with = Gguf::open(a), old = Gguf::open(b);
    REQUIRE((source && without && with && old));
    const auto miss = [&](const Gguf& file) {
        const GgufTensor*  t = file.tensor(name);
        std::vector<float> x(256 * 40), y(256 * 40);
        dequantize(DType::F32, source->tensor(name)->data, x.data(), std::int64_t(x.size()));
        dequantize(t->type, t->data, y.data(), std::int64_t(y.size()));
        double sum = 0;
        for (std::size_t i = 0; i < x.size(); i++)
            sum += double(importance[i % 256]) * (double(x[i]) - double(y[i])) * (double(x[i]) - double(y[i]));
        return sum;
    };
    CHECK(miss(*with) < 0.8 * miss(*without));
    CHECK(std::memcmp(with->tensor(name)->data, old->tensor(name)->data, with->tensor(name)->bytes) == 0);
    CHECK(with->integer("quantize.imatrix.entries_count").value() == 1);

    // of another model, or none
    std::ofstream(dat, std::ios::binary) << "text that is no matrix";
    Finished bad = run_program("quantize", {in, a, "Q4_K_S", "--imatrix", dat});
    CHECK(bad.code == 1);
    CHECK(bad.err.find("not an importance matrix") != std::string::npos);
    bad = run_program("quantize", {write_model(512), a, "Q4_K_S", "--imatrix", gguf});
    CHECK(bad.code == 1);
    CHECK(bad.err.find("has 256 values for 'blk.1.attn_q.weight', whose 1 × 512 columns need 512") !=
          std::string::npos);
    bad = run_program("quantize", {in, a, "Q2_K_S"});
    CHECK(bad.code == 1);
    CHECK(bad.err.find("needs an importance matrix") != std::string::npos);
}

TEST_CASE("quantize refuses in one sentence, and leaves the former file", "[quantize]") {
    const std::string out = temporary();
    std::ofstream(out) << "former";
    const auto refuses = [&](std::vector<std::string> arguments, int code, const std::string& why) {
        const Finished f = run_program("quantize", std::move(arguments));
        CAPTURE(f.err);
        CHECK(f.code == code);
        CHECK(f.err.find(why) != std::string::npos);
        CHECK(std::count(f.err.begin(), f.err.end(), '\n') == 1);
        CHECK(slurp(out) == "former");
    };
    const std::string in = write_model();
    refuses({in, out, "Q9"}, 2, "there is no type 'Q9'; --help lists them");
    refuses({in + ".none", out, "Q8_0"}, 1, "cannot open ");
    refuses({out, out, "Q8_0"}, 1, "a GGUF header alone has 24");
    refuses({in, "/nowhere/x.gguf", "Q8_0"}, 1, "cannot write /nowhere/x.gguf: ");
    refuses({in, "-", "Q8_0"}, 2, "OUT is no -");
    refuses({in, out, "Q8_0", "--imatrix", ""}, 2, "--imatrix needs a value");
    // The sentence about standard output says that the file is there.
    const std::string new_file = temporary();
    const Finished    full =
        run_program("sh", {"-c", cat(QUIRE_BIN "/quantize ", in, " ", new_file, " Q8_0 > /dev/full")}, "", "/bin");
    CHECK(full.code == 1);
    CHECK(full.err.contains(new_file + " is written, but cannot write to standard output: "));
    CHECK(std::filesystem::exists(new_file));

    const std::string wild = temporary();
    GgufWriter        w;
    w.set("general.architecture", "llama");
    std::vector<float> x(256 * 8, 1);
    x[600] = std::numeric_limits<float>::infinity();
    w.add_tensor("blk.0.ffn_up.weight", DType::F32, {256, 8}, std::as_bytes(std::span(x)));
    REQUIRE(w.write(wild));
    refuses({wild, out, "Q4_K_M"}, 1,
            "tensor 'blk.0.ffn_up.weight' has the value inf in row 2, column 88, which Q4_K cannot hold");
    const Finished help = run_program("quantize", {"--help"});
    CHECK(help.code == 0);
    for (const Mix& mix : mixes()) CHECK(help.out.find(cat("  ", mix.name, " ")) != std::string::npos);
}

TEST_CASE("quantize writes over none of its inputs, whatever they are called", "[quantize]") {
    const std::string folder = temporary() + ".d";
    std::filesystem::create_directories(folder + "/below");
    const std::string in = folder + "/a.gguf", imatrix = folder + "/i.gguf", hard = folder + "/hard.gguf",
                      soft = folder + "/soft.gguf";
    std::filesystem::rename(write_model(), in);
    std::filesystem::create_hard_link(in, hard);
    std::filesystem::create_symlink("a.gguf", soft);
    {
        GgufWriter         w;
        std::vector<float> sums(256, 1), count{1};
        w.set("general.type", "imatrix");
        w.add_tensor("blk.0.attn_q.weight.in_sum2", DType::F32, {256}, std::as_bytes(std::span(sums)));
        w.add_tensor("blk.0.attn_q.weight.counts", DType::F32, {1}, std::as_bytes(std::span(count)));
        REQUIRE(w.write(imatrix));
    }
    const std::vector<std::string> parts{folder + "/p-00001-of-00002.gguf", folder + "/p-00002-of-00002.gguf"};
    for (int no = 0; no < 2; no++) {
        GgufWriter w;
        w.set("general.architecture", "llama");
        w.set("split.no", std::uint16_t(no));
        w.set("split.count", std::uint16_t(2));
        w.set("split.tensors.count", std::int32_t(2));
        const auto x = bell(std::size_t(256 * 8));
        w.add_tensor(cat("blk.", no, ".ffn_up.weight"), DType::F32, {256, 8}, std::as_bytes(std::span(x)));
        REQUIRE(w.write(parts[std::size_t(no)]));
    }
    const auto files = [&] {
        std::map<std::string, std::string> out;
        for (const auto& file : std::filesystem::directory_iterator(folder))
            if (file.is_regular_file()) out[file.path().filename().string()] = slurp(file.path().string());
        return out;
    };
    const auto before  = files();
    const auto refuses = [&](std::vector<std::string> arguments, const std::string& why) {
        const Finished f = run_program("quantize", std::move(arguments));
        CAPTURE(f.err);
        CHECK(f.code == 1);
        CHECK(f.err == "quantize: the output " + why + ", so nothing was written\n");
        CHECK(files() == before);
        CHECK(std::filesystem::is_symlink(soft));
    };
    const std::string other = folder + "/below/../a.gguf";
    refuses({in, in, "Q8_0", "--allow-requantize"}, in + " is also an input");
    for (const std::string& name : {hard, soft, other}) {
        refuses({in, name, "Q8_0"}, name + " is also an input (" + in + ")");
        refuses({name, in, "Q8_0"}, in + " is also an input (" + name + ")");
    }
    refuses({in, imatrix, "Q8_0", "--imatrix", imatrix}, imatrix + " is also an input");
    refuses({parts[0], parts[0], "Q8_0"}, parts[0] + " is also an input");
    refuses({parts[0], parts[1], "Q8_0"}, parts[1] + " is also an input");
    CHECK(run_program("quantize", {parts[0], folder + "/whole.gguf", "Q8_0"}).code == 0);
    std::filesystem::remove_all(folder);
}
