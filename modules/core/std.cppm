// quire.core.std: the names of the standard library that quire uses, as one module instead of #includes.
//
// libstdc++ 12 has no `import std`. With #includes every module would contain its own copy of <vector>,
// <string>, ... and the build would take almost three times as long. To use another name, add a line below.
// Macros (errno, INT_MAX) cannot be imported: #include the C header where one is needed.
module;

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <charconv>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <expected>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>
#include <queue>
#include <random>
#include <ranges>
#include <semaphore>
#include <set>
#include <shared_mutex>
#include <source_location>
#include <span>
#include <sstream>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

export module quire.core.std;

export namespace std {

// integers, bytes, limits
using std::byte, std::ptrdiff_t, std::size_t, std::nullptr_t;
using std::int8_t, std::int16_t, std::int32_t, std::int64_t;
using std::uint8_t, std::uint16_t, std::uint32_t, std::uint64_t, std::uintptr_t;
using std::numeric_limits, std::bit_cast, std::popcount, std::countl_zero, std::countr_zero, std::rotl, std::bit_ceil,
    std::bit_floor, std::bit_width, std::endian, std::has_single_bit, std::to_underlying;
using std::integral, std::floating_point, std::same_as, std::derived_from, std::is_same_v, std::is_trivially_copyable_v,
    std::decay_t;

// containers and views of memory
using std::array, std::deque, std::list, std::map, std::set, std::pair, std::priority_queue, std::tuple,
    std::unordered_map, std::unordered_set, std::vector;
using std::span, std::as_bytes, std::dynamic_extent;
using std::begin, std::end, std::size, std::data, std::ssize, std::back_inserter, std::erase_if;
using std::initializer_list, std::make_pair, std::make_tuple, std::tie, std::get, std::apply;
using std::tuple_size, std::tuple_element, std::hash, std::allocator, std::equal_to, std::less, std::greater;

// text
using std::string, std::u32string, std::string_view, std::u32string_view, std::char_traits, std::to_string, std::stoi,
    std::stof, std::getline;
using std::ifstream, std::ofstream, std::istream, std::ostream, std::stringstream, std::ostringstream,
    std::istringstream, std::ios;
using std::cin, std::cout, std::cerr, std::istreambuf_iterator, std::strtod, std::strtol, std::strtoll, std::strerror,
    std::strcmp, std::strchr;
using std::from_chars, std::to_chars, std::errc, std::from_chars_result;
using std::memcpy, std::memmove, std::memset, std::memcmp, std::strlen;
using std::FILE, std::fopen, std::fclose, std::fread, std::fwrite, std::fputs, std::fputc, std::fgetc, std::fflush,
    std::fseek, std::ftell, std::ferror, std::perror, std::rename;
using std::printf, std::fprintf, std::snprintf, std::sscanf, std::puts;

// values that may be absent, errors
using std::optional, std::nullopt, std::make_optional, std::variant, std::monostate, std::visit, std::variant_size_v,
    std::holds_alternative, std::get_if;
using std::expected, std::unexpected;
using std::exception, std::runtime_error, std::logic_error, std::invalid_argument, std::out_of_range, std::bad_alloc;
using std::error_code, std::current_exception, std::rethrow_exception, std::exception_ptr;
using std::uncaught_exceptions, std::set_new_handler;
using std::abort, std::exit, std::getenv, std::terminate, std::source_location;

// ownership, functions
using std::unique_ptr, std::shared_ptr, std::weak_ptr, std::enable_shared_from_this, std::make_unique, std::make_shared,
    std::default_delete, std::addressof;
using std::move, std::forward, std::swap, std::exchange, std::function, std::move_only_function, std::invoke, std::ref;

// algorithms and numbers
using std::sort, std::stable_sort, std::partial_sort, std::push_heap, std::pop_heap, std::make_heap, std::sort_heap,
    std::nth_element, std::find, std::find_if, std::copy, std::copy_n, std::swap_ranges, std::find_if_not,
    std::mismatch, std::binary_search, std::none_of, std::count, std::shuffle, std::search, std::rotate, std::fill,
    std::fill_n, std::transform;
using std::all_of, std::any_of, std::count_if, std::lower_bound, std::upper_bound, std::max_element, std::min_element;
using std::min, std::max, std::clamp, std::accumulate, std::iota, std::reverse, std::unique, std::remove_if, std::equal;
using std::abs, std::sqrt, std::exp, std::exp2, std::log, std::log2, std::pow, std::sin, std::cos, std::tanh, std::fabs,
    std::floor, std::ceil, std::round, std::lround, std::lrint, std::nearbyint, std::trunc, std::fmod, std::expm1,
    std::log1p, std::erf, std::fma, std::ldexp, std::frexp, std::isnormal, std::signbit, std::copysign, std::gcd,
    std::isnan, std::isinf, std::isfinite;
using std::random_device, std::mt19937, std::mt19937_64, std::uniform_real_distribution, std::uniform_int_distribution,
    std::normal_distribution, std::gamma_distribution;

// threads
using std::atomic, std::atomic_flag, std::memory_order, std::memory_order_relaxed, std::memory_order_acquire,
    std::memory_order_release, std::memory_order_acq_rel, std::memory_order_seq_cst, std::atomic_ref,
    std::atomic_thread_fence;
using std::signal, std::sig_atomic_t;
using std::thread, std::jthread, std::stop_token, std::stop_source, std::mutex, std::shared_mutex, std::recursive_mutex;
using std::lock_guard, std::unique_lock, std::shared_lock, std::scoped_lock, std::condition_variable,
    std::condition_variable_any;
using std::counting_semaphore, std::binary_semaphore, std::cv_status;

// operators are names too: without these, an importer cannot compare or concatenate. The others are made from `==` and `<=>`; exported, they
// clash with the friends of that name that libstdc++ 14 declares in std::variant.
using std::operator==, std::operator<=>;
using std::operator+, std::operator-, std::operator|, std::operator&;

} // namespace std

export using ::stderr, ::stdout, ::stdin; // variables in glibc, not only macros

export namespace std::ranges {
using ranges::sort, ranges::find, ranges::find_if, ranges::any_of, ranges::all_of, ranges::max_element,
    ranges::min_element;
using ranges::copy, ranges::fill, ranges::reverse, ranges::lower_bound, ranges::equal, ranges::count_if;
using ranges::begin, ranges::end, ranges::size, ranges::subrange, ranges::range, ranges::view;
} // namespace std::ranges

export namespace std::ranges::views {
using views::iota, views::filter, views::transform, views::take, views::drop, views::reverse, views::split, views::keys,
    views::values;
}
export namespace std {
namespace views = ranges::views;
}

export namespace std::chrono {
using chrono::duration, chrono::time_point, chrono::steady_clock, chrono::system_clock, chrono::duration_cast;
using chrono::nanoseconds, chrono::microseconds, chrono::milliseconds, chrono::seconds;
using chrono::operator+, chrono::operator-, chrono::operator*, chrono::operator/, chrono::operator==, chrono::operator<,
    chrono::operator<=, chrono::operator>, chrono::operator>=, chrono::operator<=>;
} // namespace std::chrono

export namespace std::this_thread {
using this_thread::sleep_for, this_thread::sleep_until, this_thread::yield, this_thread::get_id;
}

export namespace std::filesystem {
using filesystem::path, filesystem::exists, filesystem::resize_file, filesystem::copy_file, filesystem::file_size,
    filesystem::directory_iterator, filesystem::temp_directory_path, filesystem::remove, filesystem::remove_all,
    filesystem::create_directory, filesystem::create_directories, filesystem::is_directory, filesystem::is_regular_file,
    filesystem::read_symlink, filesystem::status;
using filesystem::begin, filesystem::end;
} // namespace std::filesystem

// the iterators of vector, string and span are __normal_iterator
export namespace __gnu_cxx {
using __gnu_cxx::operator==, __gnu_cxx::operator<=>, __gnu_cxx::operator+, __gnu_cxx::operator-;
}
