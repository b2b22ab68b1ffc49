// Allocations that find no memory, in the whole program.
#pragma once

namespace quire::simulation {

// From now on each so many-th allocation of a thread finds none at first; 0: none. Only where there is a std::new_handler.
void      fail_allocations(unsigned each);
long long n_failed_allocations();

// While it lives, those of this thread do not fail.
class Exempt {
public:
    Exempt();
    ~Exempt();
    Exempt(const Exempt&)            = delete;
    Exempt& operator=(const Exempt&) = delete;

private:
    bool before_;
};

} // namespace quire::simulation
