// quire.model_file.gguf_types: the definitions that the reader and the writer of GGUF files share. Plain values, owns nothing.
export module quire.model_file.gguf_types;

import quire.core.std;

export namespace quire {

// The value types of a metadata pair, by the numbers of the format document.
enum class GgufType : std::uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };
inline constexpr std::uint32_t n_gguf_types = 13;

// The alignment of tensors is a power of two and a multiple of this, as the format document says.
inline constexpr std::uint32_t least_gguf_alignment = 8;

// The GgufType that stores a C++ type.
template <class T>
consteval GgufType gguf_type() {
    if constexpr (std::same_as<T, bool>) return GgufType::boolean;
    else if constexpr (std::same_as<T, std::string>) return GgufType::string;
    else if constexpr (std::floating_point<T>) return sizeof(T) == 4 ? GgufType::f32 : GgufType::f64;
    else if constexpr (std::integral<T>) {
        constexpr bool is_signed = T(-1) < T(0);
        switch (sizeof(T)) {
            case 1: return is_signed ? GgufType::i8 : GgufType::u8;
            case 2: return is_signed ? GgufType::i16 : GgufType::u16;
            case 4: return is_signed ? GgufType::i32 : GgufType::u32;
            default: return is_signed ? GgufType::i64 : GgufType::u64;
        }
    } else return GgufType::array; // a vector
}

} // namespace quire
