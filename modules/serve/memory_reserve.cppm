// quire.serve.memory_reserve: the behaviour when memory runs out: a thread that serves one request fails that request; the threads that all
// requests share use a reserve, then wait. **Owns** the reserve.
module;

#include <sys/mman.h>

export module quire.serve.memory_reserve;

import quire.core.base;
export import quire.core.may_fail;

export namespace quire {

// From now on an allocation (operator new) that finds no memory gives back the reserve of so many bytes, then waits up to a
// minute for others to free some, before it throws std::bad_alloc. Once in a process.
void keep_reserve(std::size_t bytes);

// Takes the reserve back if it was given away and there is room. Any thread; cheap when nothing is to be done.
void refill_reserve();

} // namespace quire

module :private;

namespace quire {

using Clock = std::chrono::steady_clock;

std::atomic<std::size_t>              reserve_bytes = 0;
std::atomic<void*>                    reserve       = nullptr;
static thread_local Clock::time_point waits_since, waited_last; // static: clang 19 defines others in the importers, too

// Called by operator new until there is memory or this throws.
void out_of_memory() {
    if (may_fail() && std::uncaught_exceptions() == 0)
        throw std::bad_alloc(); // while an exception unwinds, cleaning up must not throw another
    if (void* held = reserve.exchange(nullptr)) {
        munmap(held, reserve_bytes);
        return;
    }
    const Clock::time_point now = Clock::now();
    if (now - waited_last > std::chrono::seconds(1)) waits_since = now;
    waited_last = now;
    if (now - waits_since > std::chrono::seconds(60)) throw std::bad_alloc();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
}

// Mapped, not allocated: once unmapped it is free for every thread; an allocator could keep it for one.
void refill_reserve() {
    if (reserve_bytes == 0 || reserve) return;
    void* held = mmap(nullptr, reserve_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (held == MAP_FAILED) return;
    void* none = nullptr;
    if (!reserve.compare_exchange_strong(none, held)) munmap(held, reserve_bytes);
}

void keep_reserve(std::size_t bytes) {
    reserve_bytes = bytes;
    refill_reserve();
    std::set_new_handler(out_of_memory);
}

} // namespace quire
