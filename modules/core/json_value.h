// nlohmann's JSON value, which can be destroyed where there is no memory. Its destructor takes memory: for a list of what is in an array or an
// object, by std::allocator of the value itself. A destructor must not throw, so this allocator waits for memory where others of its thread
// throw. The arrays of the values have an allocator of their own, which throws as all others do. (A header: before `export module` stand
// directives alone.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace quire {

// Waits for memory, whatever quire.core.may_fail says of the thread.
void* memory_to_destroy(std::size_t bytes);

// std::allocator, by another name.
template <class T>
struct JsonAllocator {
    using value_type = T;

    JsonAllocator() = default;
    template <class U>
    JsonAllocator(const JsonAllocator<U>&) {}
    T*   allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T))); }
    void deallocate(T* p, std::size_t) { ::operator delete(p); }
    bool operator==(const JsonAllocator&) const = default;
};

// Objects keep the order of their keys.
using JsonValue = nlohmann::basic_json<nlohmann::ordered_map, std::vector, std::string, bool, std::int64_t,
                                       std::uint64_t, double, JsonAllocator>;

} // namespace quire

template <>
class std::allocator<quire::JsonValue> {
public:
    using value_type = quire::JsonValue;

    allocator() = default;
    template <class U>
    allocator(const std::allocator<U>&) {}
    value_type* allocate(std::size_t n);
    void        deallocate(value_type* p, std::size_t) { ::operator delete(p); }
    bool        operator==(const allocator&) const = default;
};

#include <nlohmann/json.hpp>

inline quire::JsonValue* std::allocator<quire::JsonValue>::allocate(std::size_t n) {
    return static_cast<quire::JsonValue*>(quire::memory_to_destroy(n * sizeof(quire::JsonValue)));
}
