// quire.host_memory: memory of the host from the operating system, in large pages where these come quickly.
// LargePages **owns** what it hands out.
module;

#include <sys/mman.h>

export module quire.host_memory;

import quire.backend;
import quire.base;
import quire.std;

export namespace quire {

inline constexpr std::uintptr_t large_page = std::uintptr_t(2) << 20; // bytes

// Zeros, in pages that are found when they are first touched. Error: there is no room.
Result<Buffer> fresh_memory(std::size_t bytes);

// Pieces of memory that are kept until the end, side by side, so that the pages are large from the first to the last: these take
// a fraction of the faults, and of the time to look up an address.
//
// A machine has large pages at once or not: a virtual one that gave its memory back to the host waits 5 ms for each, a second for
// 400 MB, where small ones come from what it has kept. So their first touches are watched, and where they are slow the rest is
// left to small pages, which the operating system makes large as time goes.
class LargePages {
public:
    Result<std::byte*> take(std::size_t bytes); // on a line of 64 bytes
    // Before memory that take() gave is first written. By any thread, while nobody takes.
    void touch(std::byte* begin, std::size_t bytes);
    // When all is written.
    void settle();

private:
    static constexpr std::size_t chunk_bytes = std::size_t(256)
                                               << 20; // of addresses: the end of the last one is never touched
    static constexpr double slow      = 1e-3;         // seconds, for what takes a tenth of one
    static constexpr int    most_slow = 8;

    std::vector<Buffer>               memory_;
    std::vector<std::span<std::byte>> chunks_; // of these the whole large pages
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

// What madvise() answers is nothing to us: all of this is a matter of speed alone.
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
