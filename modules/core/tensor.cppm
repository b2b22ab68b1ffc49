// quire.core.tensor: GGUF's element types, and a view of an array that is owned elsewhere. Owns nothing.
export module quire.core.tensor;

import quire.core.base;

export namespace quire {

// The numbers are those of the GGUF format document (ggml_type); a file's type id is cast only after dtype_known().
enum class DType : std::uint32_t {
    F32     = 0,
    F16     = 1,
    Q4_0    = 2,
    Q4_1    = 3,
    Q5_0    = 6,
    Q5_1    = 7,
    Q8_0    = 8,
    Q2_K    = 10,
    Q3_K    = 11,
    Q4_K    = 12,
    Q5_K    = 13,
    Q6_K    = 14,
    Q8_K    = 15,
    IQ2_XXS = 16,
    IQ2_XS  = 17,
    IQ3_XXS = 18,
    IQ1_S   = 19,
    IQ4_NL  = 20,
    IQ3_S   = 21,
    IQ2_S   = 22,
    IQ4_XS  = 23,
    IQ1_M   = 29,
    BF16    = 30,
    TQ1_0   = 34,
    TQ2_0   = 35,
    MXFP4   = 39,
    NVFP4   = 40,
    Q1_0    = 41,
    Q2_0    = 42,
    // Codes of quantised K and V, each row with a scale; no tensor of a file has these types. F8 is e4m3 without a number in GGUF.
    I8 = 24,
    F8 = 0x10000,
    // Token ids, in the one tensor of a file that holds no weights: "d2t" of a draft of EAGLE-3.
    I64 = 27,
};

// A type stores `items` neighbouring elements of a row in one block of `bytes` bytes.
struct DTypeInfo {
    DType       type;
    const char* name; // as GGUF tools spell it: "Q4_K"
    int         items;
    int         bytes;
};

inline constexpr std::array<DTypeInfo, 29> dtype_table{{
    {DType::F32, "F32", 1, 4},          {DType::F16, "F16", 1, 2},         {DType::BF16, "BF16", 1, 2},
    {DType::Q4_0, "Q4_0", 32, 18},      {DType::Q4_1, "Q4_1", 32, 20},     {DType::Q5_0, "Q5_0", 32, 22},
    {DType::Q5_1, "Q5_1", 32, 24},      {DType::Q8_0, "Q8_0", 32, 34},     {DType::Q2_K, "Q2_K", 256, 84},
    {DType::Q3_K, "Q3_K", 256, 110},    {DType::Q4_K, "Q4_K", 256, 144},   {DType::Q5_K, "Q5_K", 256, 176},
    {DType::Q6_K, "Q6_K", 256, 210},    {DType::IQ4_NL, "IQ4_NL", 32, 18}, {DType::IQ4_XS, "IQ4_XS", 256, 136},
    {DType::IQ1_S, "IQ1_S", 256, 50},   {DType::IQ1_M, "IQ1_M", 256, 56},  {DType::IQ2_XXS, "IQ2_XXS", 256, 66},
    {DType::IQ2_XS, "IQ2_XS", 256, 74}, {DType::IQ2_S, "IQ2_S", 256, 82},  {DType::IQ3_XXS, "IQ3_XXS", 256, 98},
    {DType::IQ3_S, "IQ3_S", 256, 110},  {DType::TQ1_0, "TQ1_0", 256, 54},  {DType::TQ2_0, "TQ2_0", 256, 66},
    {DType::MXFP4, "MXFP4", 32, 17},    {DType::NVFP4, "NVFP4", 64, 36},   {DType::Q1_0, "Q1_0", 128, 18},
    {DType::Q2_0, "Q2_0", 64, 18},      {DType::Q8_K, "Q8_K", 256, 292},
}};

inline constexpr std::array<DTypeInfo, 3> other_dtypes{
    {{DType::I8, "I8", 1, 1}, {DType::F8, "F8", 1, 1}, {DType::I64, "I64", 1, 8}}};

// The entry of a type id read from a file, or nullptr.
const DTypeInfo* dtype_find(std::uint32_t id);
// For an id that dtype_find() does not know: "31 (Q4_0_4_4), which GGUF has dropped", to go on after "has type ".
std::string      dtype_refusal(std::uint32_t id);
const DTypeInfo& dtype_info(DType type);

// Bytes of one row of `cols` elements; cols is a multiple of the type's block.
std::size_t row_bytes(DType type, std::int64_t cols);

// A row-major matrix (a vector has one row) in host memory that something else owns: a mapped file, a copy of a part of it, or repacked weights.
struct TensorView {
    DType        type = DType::F32;
    std::int64_t rows = 0;
    std::int64_t cols = 0; // the contiguous dimension; GGUF's dimension 0
    const void*  data = nullptr;

    explicit operator bool() const { return data != nullptr; }
};

// IEEE half and bfloat16, bit for bit as the hardware converts (round to nearest even).
float         f16_to_f32(std::uint16_t h);
std::uint16_t f32_to_f16(float f);
float         bf16_to_f32(std::uint16_t b);
std::uint16_t f32_to_bf16(float f);

} // namespace quire

module :private;

namespace quire {

const DTypeInfo* dtype_find(std::uint32_t id) {
    for (const DTypeInfo& info : dtype_table)
        if (std::uint32_t(info.type) == id) return &info;
    return nullptr;
}

std::string dtype_refusal(std::uint32_t id) {
    struct Refused {
        std::uint32_t id;
        const char*   name;
    };
    constexpr std::array<Refused, 8> dropped{{{4, "Q4_2"},
                                              {5, "Q4_3"},
                                              {31, "Q4_0_4_4"},
                                              {32, "Q4_0_4_8"},
                                              {33, "Q4_0_8_8"},
                                              {36, "IQ4_NL_4_4"},
                                              {37, "IQ4_NL_4_8"},
                                              {38, "IQ4_NL_8_8"}}};
    constexpr std::array<Refused, 6> not_weights{
        {{9, "Q8_1"}, {24, "I8"}, {25, "I16"}, {26, "I32"}, {27, "I64"}, {28, "F64"}}};
    for (const Refused& r : dropped)
        if (r.id == id) return cat(id, " (", r.name, "), which GGUF has dropped: convert the model again");
    for (const Refused& r : not_weights)
        if (r.id == id) return cat(id, " (", r.name, "), in which no model stores weights");
    return cat(std::int64_t(std::int32_t(id)), ", which quire does not know");
}

const DTypeInfo& dtype_info(DType type) {
    const DTypeInfo* info = dtype_find(std::uint32_t(type));
    for (const DTypeInfo& other : other_dtypes)
        if (other.type == type) info = &other;
    check(info != nullptr, "a DType outside the table");
    return *info;
}

std::size_t row_bytes(DType type, std::int64_t cols) {
    const DTypeInfo& info = dtype_info(type);
    check(cols % info.items == 0, "a row that does not fill its blocks");
    return std::size_t(cols / info.items) * std::size_t(info.bytes);
}

// sign 1 | exponent 5, bias 15 | mantissa 10. A subnormal is mantissa * 2^-24.
float f16_to_f32(std::uint16_t h) {
    std::uint32_t sign = std::uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023u;
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000 | (mantissa << 13));
    if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
    float magnitude = float(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
}

std::uint16_t f32_to_f16(float f) {
    std::uint32_t bits = std::bit_cast<std::uint32_t>(f), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return std::uint16_t(sign | 0x7e00 | ((magnitude >> 13) & 1023)); // NaN stays NaN
    if (magnitude >= 0x477ff000) return std::uint16_t(sign | 0x7c00);                             // rounds past 65504
    if (magnitude < 0x38800000) { // below 2^-14: let the FPU round mantissa * 2^-24 to an integer
        float scaled = std::bit_cast<float>(magnitude) * 0x1p24f;
        return std::uint16_t(sign | std::uint32_t(std::lrint(scaled)));
    }
    std::uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1); // to nearest, ties to even
    return std::uint16_t(sign | ((rounded - 0x38000000) >> 13));
}

float bf16_to_f32(std::uint16_t b) { return std::bit_cast<float>(std::uint32_t(b) << 16); }

std::uint16_t f32_to_bf16(float f) {
    std::uint32_t bits = std::bit_cast<std::uint32_t>(f);
    if ((bits & 0x7fffffff) > 0x7f800000) return std::uint16_t((bits >> 16) | 64);
    return std::uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

} // namespace quire
