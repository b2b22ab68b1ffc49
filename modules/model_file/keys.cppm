// quire.model_file.keys: reads the metadata of a file by name, type and range, and remembers the first fault. Owns nothing.
export module quire.model_file.keys;

import quire.core.base;
import quire.model_file.gguf;

export namespace quire {

// Reads keys. After the first wrong key every value is its fallback, and `error` keeps the reason.
class Keys {
public:
    Keys(const Gguf& file, std::string prefix) : file_(file), prefix_(std::move(prefix)) {}

    // An integer in [least, most].
    int integer(std::string_view key, std::optional<std::int64_t> fallback, std::int64_t least, std::int64_t most) {
        const std::string    full  = prefix_ + std::string(key);
        Result<std::int64_t> value = file_.integer(full, fallback);
        if (!value) return set_error(value.error()), 0;
        if (*value < least || *value > most)
            return set_error({ErrorKind::input,
                              cat(file_.path(), ": ", full, " is ", *value, ", not in ", least, "..", most)}),
                   0;
        return int(*value);
    }
    // A finite number above `least`.
    float number(std::string_view key, std::optional<double> fallback, double least) {
        const std::string full  = prefix_ + std::string(key);
        Result<double>    value = file_.number(full, fallback);
        if (!value) return set_error(value.error()), 0;
        if (!(*value > least) || !(*value < 1e30)) // NaN fails both
            return set_error({ErrorKind::input,
                              cat(file_.path(), ": ", full, " is ", *value, ", not a finite number above ", least)}),
                   0;
        if (least < 0) return float(*value);
        return std::max(float(*value), std::numeric_limits<float>::min()); // a double may vanish as a float
    }
    std::string text(std::string_view key, std::string_view fallback) {
        Result<std::string_view> value = file_.text(prefix_ + std::string(key), fallback);
        if (!value) return set_error(value.error()), "";
        return std::string(*value);
    }
    bool flag(std::string_view key, bool fallback) {
        Result<bool> value = file_.boolean(prefix_ + std::string(key), fallback);
        if (!value) return set_error(value.error()), false;
        return *value;
    }
    // A list of one flag for each layer, as booleans or as integers 0 and 1; empty if the key is missing, or a number where `or_number`.
    std::vector<bool> flags(std::string_view key, int n_layers, bool or_number = false) {
        const GgufValue* value = file_.find(full(key));
        const auto*      list  = value ? std::get_if<GgufArray>(value) : nullptr;
        if (!list) {
            if (value && !or_number) refuse(cat(full(key), " is no list of true or false for each layer"));
            return {};
        }
        std::vector<bool> flags     = list->bools;
        bool              are_flags = true;
        const auto        take      = [&](const auto& numbers) {
            for (const auto v : numbers) {
                are_flags = are_flags && (v == 0 || v == 1);
                flags.push_back(v != 0);
            }
        };
        take(list->uints);
        take(list->ints);
        if (!are_flags || flags.size() != std::size_t(n_layers)) {
            refuse(cat(full(key), " is a list of ", list->size(), ", not of a true or false for each of ", n_layers,
                       " layers"));
            return {};
        }
        return flags;
    }
    // A number for each of n layers, from a list of them or from one for all.
    std::vector<int> by_layer(std::string_view key, std::optional<std::int64_t> fallback, std::int64_t least,
                              std::int64_t most, int n) {
        const GgufValue* value = file_.find(full(key));
        const auto*      list  = value ? std::get_if<GgufArray>(value) : nullptr;
        if (!list) return std::vector<int>(std::size_t(n), integer(key, fallback, least, most));
        std::vector<int> numbers;
        if (list->uints.size() + list->ints.size() != std::size_t(n))
            refuse(cat(full(key), " is an array of ", list->size(), ", not of an integer for each of ", n, " layers"));
        const auto take = [&](std::int64_t v) {
            if (v < least || v > most) refuse(cat(full(key), " has ", v, ", not in ", least, "..", most));
            numbers.push_back(int(v));
        };
        for (std::uint64_t v : list->uints) take(std::int64_t(std::min(v, std::uint64_t(1) << 62)));
        for (std::int64_t v : list->ints) take(v);
        return numbers;
    }
    // A number for all of n layers that have one: the numbers of a list may be 0, and the others of them are equal.
    int for_layers(std::string_view key, std::optional<std::int64_t> fallback, std::int64_t least, std::int64_t most,
                   int n) {
        const GgufValue* value = file_.find(full(key));
        if (!value || !std::holds_alternative<GgufArray>(*value)) return integer(key, fallback, least, most);
        int number = 0;
        for (int v : by_layer(key, fallback, 0, most, n)) {
            if (v != 0 && number != 0 && v != number)
                refuse(cat(full(key), " has ", number, " and ", v,
                           "; quire runs only equal numbers in the layers that have one"));
            number = std::max(number, v);
        }
        if (number < least) refuse(cat(full(key), " has no number from ", least, " on"));
        return number;
    }
    bool has(std::string_view key) const { return file_.find(full(key)) != nullptr; }
    // Whether the value is 0, false or an empty list.
    bool is_zero(std::string_view key) const {
        const GgufValue* value = file_.find(full(key));
        return value && std::visit(
                            [](const auto& v) {
                                using V = std::decay_t<decltype(v)>;
                                if constexpr (std::is_same_v<V, GgufArray>) return v.size() == 0;
                                else return v == V();
                            },
                            *value);
    }
    std::string full(std::string_view key) const { return prefix_ + std::string(key); }
    void        refuse(const std::string& why) { set_error({ErrorKind::input, cat(file_.path(), ": ", why)}); }
    const std::optional<Error>& error() const { return error_; }

private:
    void set_error(Error error) {
        if (!error_) error_ = std::move(error);
    }
    const Gguf&          file_;
    std::string          prefix_;
    std::optional<Error> error_;
};

} // namespace quire
