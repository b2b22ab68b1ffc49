// operator new of the simulator: of chosen threads every so many allocations find no memory at first, as they would on a full machine.
// The product's own code (quire.serve.memory_reserve) deals with the failure.
#include <atomic>
#include <cstdlib>
#include <new>

#include "allocations.h"

namespace quire::simulation {

namespace {

std::atomic<unsigned>  fail_each = 0; // 0: none fails
thread_local bool      exempt    = false;
thread_local unsigned  n         = 0;
std::atomic<long long> n_failed  = 0;

} // namespace

void      fail_allocations(unsigned each) { fail_each = each; }
long long n_failed_allocations() { return n_failed; }
Exempt::Exempt() : before_(exempt) { exempt = true; }
Exempt::~Exempt() { exempt = before_; }

[[maybe_unused]] static void* allocate(std::size_t size) {
    const unsigned each = fail_each.load(std::memory_order_relaxed);
    if (each > 0 && !exempt && ++n % each == 0)
        if (const std::new_handler handler = std::get_new_handler()) {
            n_failed++;
            handler(); // throws, or has made room
        }
    for (;;) {
        if (void* p = std::malloc(size > 0 ? size : 1)) return p;
        const std::new_handler handler = std::get_new_handler();
        if (!handler) throw std::bad_alloc();
        handler();
    }
}

} // namespace quire::simulation

#if !defined(__has_feature) || \
    !__has_feature(thread_sanitizer) // which has operators of its own: there no allocation fails
void* operator new(std::size_t size) { return quire::simulation::allocate(size); }
void* operator new[](std::size_t size) { return quire::simulation::allocate(size); }
// The library's sorts take memory by these; operator delete gives it back.
void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return std::malloc(size); }
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept { return std::malloc(size); }
void  operator delete(void* p) noexcept { std::free(p); }
void  operator delete[](void* p) noexcept { std::free(p); }
void  operator delete(void* p, std::size_t) noexcept { std::free(p); }
void  operator delete[](void* p, std::size_t) noexcept { std::free(p); }
#endif
