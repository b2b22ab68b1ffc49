// quire.compute.memory: memory with an owner, host memory from the operating system in large pages where the system provides them
// quickly, and the amount available. Buffer and LargePages **own** their allocations.
module;

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

export module quire.compute.memory;

import quire.core.base;

export namespace quire {

// Device memory, zeroed, aligned to 64 bytes, freed with its owner. On a CPU it can be read directly.
class Buffer {
public:
    using Free = void (*)(void*, std::size_t);
    Buffer()   = default;
    Buffer(void* data, std::size_t bytes, Free free) : data_(data), bytes_(bytes), free_(free) {}
    Buffer(Buffer&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)), free_(other.free_) {}
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        std::swap(free_, other.free_);
        return *this;
    }
    ~Buffer() {
        if (data_) free_(data_, bytes_);
    }
    void*       data() const { return data_; }
    std::size_t bytes() const { return bytes_; }

private:
    void*       data_  = nullptr;
    std::size_t bytes_ = 0;
    Free        free_  = nullptr;
};

inline constexpr std::uintptr_t large_page = std::uintptr_t(2) << 20; // bytes

// Zeroed memory whose pages are provided at first access. Error: there is not enough.
Result<Buffer> fresh_memory(std::size_t bytes);

// Bytes that this process can still allocate: the minimum of the machine's MemAvailable, the room in the process' control groups, and
// its limits of address space and data. `root` is a prefix of /proc and /sys, for tests.
std::size_t available_memory(const std::string& root = "");

// Memory that is kept until the end, allocated contiguously so that all of it can be in large pages: large pages cause fewer page faults
// and fewer TLB misses.
//
// Large pages are not always available quickly: a virtual machine that returned its memory to the host waits 5 ms for each (a
// second for 400 MB), while small pages come from the machine's reserve. So the first accesses are timed, and if they are slow the rest uses
// small pages, which the operating system merges into large ones later.
class LargePages {
public:
    Result<std::byte*> take(std::size_t bytes); // aligned to 64 bytes
    // Call before memory from take() is first written; any thread, but not while another calls take().
    void touch(std::byte* begin, std::size_t bytes);
    // Call when all memory from take() is written.
    void settle();

private:
    static constexpr std::size_t chunk_bytes = std::size_t(256)
                                               << 20; // of addresses: the end of the last one is never touched
    static constexpr double slow      = 1e-3;         // seconds; an access usually takes a tenth of this
    static constexpr int    most_slow = 8;

    std::vector<Buffer>               memory_;
    std::vector<std::span<std::byte>> chunks_; // the whole large pages of memory_
    std::span<std::byte>              free_;   // the end of the last chunk
    std::atomic<int>                  slow_pages_{0};
};

} // namespace quire

module :private;

namespace quire {

Result<Buffer> fresh_memory(std::size_t bytes) {
    bytes      = std::max<std::size_t>(bytes, 64);
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) return fail_with(ErrorKind::system, "cannot take ", bytes >> 20, " MiB of memory");
    return Buffer(data, bytes, [](void* p, std::size_t n) { munmap(p, n); });
}

// The number behind `key`, which begins a line of a small file; "": the number of the first line. Nothing if there is none.
std::optional<std::uint64_t> number_in(const std::string& path, std::string_view key) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        if (!line.starts_with(key)) continue;
        const std::size_t digit = line.find_first_of("0123456789", key.size());
        std::uint64_t     value = 0;
        if (digit == std::string::npos || // "max"
            std::from_chars(line.data() + digit, line.data() + line.size(), value).ec != std::errc{})
            return std::nullopt;
        return value;
    }
    return std::nullopt;
}

// The room that a control group leaves. The group counts cached pages of files as used, but gives them up when memory is needed.
std::uint64_t left_in_group(const std::string& folder, const char* limit, const char* used, const char* cached) {
    const auto most = number_in(folder + limit, ""), taken = number_in(folder + used, "");
    if (!most || !taken) return std::numeric_limits<std::uint64_t>::max();
    std::uint64_t files = 0;
    for (const char* list : {"inactive_file ", "active_file "})
        files += number_in(folder + "/memory.stat", cat(cached, list)).value_or(0);
    const std::uint64_t fixed = *taken - std::min(*taken, files);
    return *most - std::min(*most, fixed);
}

// The least room in the control groups of /proc/self/cgroup, each with the groups around it.
std::uint64_t left_in_groups(const std::string& root) {
    std::uint64_t left = std::numeric_limits<std::uint64_t>::max();
    std::ifstream file(root + "/proc/self/cgroup");
    for (std::string line; std::getline(file, line);) { // number:controllers:path
        const std::size_t first = line.find(':'), second = line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        if (!controllers.empty() && controllers != "memory") continue;
        const bool        old  = !controllers.empty();
        const std::string base = root + (old ? "/sys/fs/cgroup/memory" : "/sys/fs/cgroup");
        for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
            if (path == "/") path.clear();
            left = std::min(
                left, old ? left_in_group(base + path, "/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_")
                          : left_in_group(base + path, "/memory.max", "/memory.current", ""));
            if (path.find('/') == std::string::npos) break;
        }
    }
    return left;
}

std::size_t available_memory(const std::string& root) {
    const auto machine = number_in(root + "/proc/meminfo", "MemAvailable:"); // kB
    auto       left =
        machine ? *machine << 10 : std::uint64_t(sysconf(_SC_PHYS_PAGES)) * std::uint64_t(sysconf(_SC_PAGE_SIZE));
    left = std::min(left, left_in_groups(root));
    for (auto [which, taken] : {std::pair(RLIMIT_AS, "VmSize:"), std::pair(RLIMIT_DATA, "VmData:")}) {
        rlimit limit{};
        if (getrlimit(which, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) continue;
        const std::uint64_t used = number_in(root + "/proc/self/status", taken).value_or(0) << 10;
        left = std::min(left, std::uint64_t(limit.rlim_cur) - std::min(std::uint64_t(limit.rlim_cur), used));
    }
    return std::size_t(left);
}

// The results of madvise() are ignored: large pages only change the speed.
Result<std::byte*> LargePages::take(std::size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    if (bytes > free_.size()) {
        const std::size_t size   = (std::max(bytes, chunk_bytes) + large_page - 1) / large_page * large_page;
        Result<Buffer>    memory = fresh_memory(size + large_page);
        if (!memory) return std::unexpected(memory.error());
        const auto beyond = reinterpret_cast<std::uintptr_t>(memory->data()) % large_page;
        free_             = {static_cast<std::byte*>(memory->data()) + (large_page - beyond) % large_page, size};
        if (slow_pages_ < most_slow) madvise(free_.data(), free_.size(), MADV_HUGEPAGE);
        memory_.push_back(std::move(*memory));
        chunks_.push_back(free_);
    }
    std::byte* const data = free_.data();
    free_                 = free_.subspan(bytes);
    return data;
}

void LargePages::touch(std::byte* begin, std::size_t bytes) {
    const auto beyond = reinterpret_cast<std::uintptr_t>(begin) % large_page;
    for (std::size_t at = (large_page - beyond) % large_page; at < bytes && slow_pages_ < most_slow; at += large_page) {
        const Stopwatch watch;
        begin[at] = std::byte{0};
        if (watch.seconds() > slow && ++slow_pages_ == most_slow)
            madvise(chunks_.back().data(), chunks_.back().size(), MADV_NOHUGEPAGE);
    }
}

void LargePages::settle() {
    for (const auto& chunk : chunks_) madvise(chunk.data(), chunk.size(), MADV_HUGEPAGE);
}

} // namespace quire
