// quire.compute.cpu.file_pages: gives the memory of a mapped file back to the system, which can read the file again. Owns nothing.
module;

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

export module quire.compute.cpu.file_pages;

import quire.compute.memory;
import quire.core.std;

export namespace quire {

// Addresses of a file's pages.
struct MappedPages {
    std::uintptr_t begin = 0, end = 0;
};

// The pages of the file's read-only mapping around `data`; zeros where `data` lies in no such mapping.
MappedPages pages_around(const void* data);

// The process keeps no page of these bytes, nor of a large page that they share with other bytes of the mapping.
void give_back(const MappedPages& pages, const void* data, std::size_t bytes);

} // namespace quire

module :private;

namespace quire {

MappedPages pages_around(const void* data) {
    std::ifstream maps("/proc/self/maps");
    const auto    at = reinterpret_cast<std::uintptr_t>(data);
    for (std::string line;
         std::getline(maps, line);) { // begin-end access offset device inode, numbers in hex but the last
        char*      rest  = nullptr;
        const auto begin = strtoull(line.c_str(), &rest, 16), end = strtoull(rest + 1, &rest, 16);
        if (at < begin || at >= end) continue;
        const std::string access(rest + 1, 4);
        strtoull(rest + 6, &rest, 16);             // the offset
        const char* inode = strchr(rest + 1, ' '); // beyond the device
        if (access.starts_with("r-") && inode && strtoull(inode, nullptr, 10) != 0) return {begin, end};
        break;
    }
    return {};
}

void give_back(const MappedPages& pages, const void* data, std::size_t bytes) {
    const auto           at    = reinterpret_cast<std::uintptr_t>(data);
    const std::uintptr_t begin = std::max(pages.begin, at / large_page * large_page),
                         end   = std::min(pages.end, (at + bytes + large_page - 1) / large_page * large_page);
    if (begin < end)
        madvise(static_cast<std::byte*>(const_cast<void*>(data)) + std::ptrdiff_t(begin - at), end - begin,
                MADV_DONTNEED);
}

} // namespace quire
