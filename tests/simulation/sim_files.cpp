// Files in memory, and what goes wrong with them.
#include "sim_files.h"

namespace quire::simulation {

void SimDisk::lose_power() {
    for (auto& [number, bytes] : files) {
        if (bytes.empty() || !random.one_in(2)) continue;
        n_lost++;
        const auto anywhere = [&] { return std::size_t(random.below(int(bytes.size()))); };
        if (random.one_in(4)) bytes.resize(anywhere());
        else
            for (int n = random.between(1, 8); n > 0; n--) flip(bytes[anywhere()]);
    }
}

std::map<std::uint64_t, std::uint64_t> SimFiles::sizes() const {
    std::map<std::uint64_t, std::uint64_t> sizes;
    for (const auto& [number, bytes] : disk_->files) sizes[number] = bytes.size();
    return sizes;
}

bool SimFiles::create(std::uint64_t file) {
    if (disk_->fails()) return disk_->n_failed++, false;
    return disk_->files.try_emplace(file).second;
}

bool SimFiles::append(std::uint64_t file, Pieces pieces) {
    const bool fails = disk_->fails();
    for (std::span<const std::byte> piece : pieces) {
        const bool torn = fails && disk_->random.one_in(2);
        if (torn) piece = piece.first(std::size_t(disk_->random.below(int(piece.size()) + 1)));
        disk_->files[file].insert(disk_->files[file].end(), piece.begin(), piece.end());
        if (torn) return disk_->n_torn++, false;
    }
    disk_->n_failed += fails;
    return !fails;
}

bool SimFiles::cut(std::uint64_t file, std::uint64_t bytes) {
    if (disk_->fails()) return disk_->n_failed++, false;
    disk_->files[file].resize(bytes);
    return true;
}

bool SimFiles::read(std::uint64_t file, std::uint64_t at, Pieces pieces) const {
    const auto found = disk_->files.find(file);
    if (found == disk_->files.end() || disk_->fails(4)) return false;
    for (std::span<std::byte> piece : pieces) {
        if (at > found->second.size() || piece.size() > found->second.size() - at) return false;
        std::copy_n(found->second.begin() + std::ptrdiff_t(at), piece.size(), piece.begin());
        at += piece.size();
        if (!piece.empty() && disk_->fails()) // other bytes than were written
            disk_->flip(piece[std::size_t(disk_->random.below(int(piece.size())))]);
    }
    return true;
}

} // namespace quire::simulation
