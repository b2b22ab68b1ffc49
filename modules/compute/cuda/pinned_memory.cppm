// quire.compute.cuda.pinned_memory: host memory that the GPU copies from and to at full speed. **Owns** the memory, which lives as long as the
// backend.
module;

#include "../../../cuda/kernels.h"

export module quire.compute.cuda.pinned_memory;

import quire.core.std;

export namespace quire {

class PinnedMemory {
public:
    PinnedMemory()                               = default;
    PinnedMemory(const PinnedMemory&)            = delete;
    PinnedMemory& operator=(const PinnedMemory&) = delete;
    ~PinnedMemory() {
        for (void* memory : owned_) cuda::release_host(memory);
    }
    void* take(std::size_t bytes) { // null: there is not enough
        void* memory = cuda::allocate_host(bytes);
        if (memory != nullptr) owned_.push_back(memory);
        return memory;
    }

private:
    std::vector<void*> owned_;
};

} // namespace quire
