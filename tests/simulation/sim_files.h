// Files in memory that outlive an engine, on a disk that fails.
#pragma once

#include "scenario.h"

import quire.engine.files.segment_files;

namespace quire::simulation {

struct SimDisk {
    explicit SimDisk(const Scenario& s) : random(s.seed, Stream::trouble), trouble(s.disk_trouble) {}

    // After a kill the files are there as they are; after a loss of power some ends and bytes are not.
    void lose_power();
    void flip(std::byte& byte) { byte = std::byte(unsigned(byte) ^ 1u << random.below(8)); }
    bool fails(int times = 1) { return trouble > 0 && random.one_in(trouble * times); }

    std::map<std::uint64_t, std::vector<std::byte>> files;
    Random                                          random;
    int                                             trouble = 0; // one in so many writes fails; 0: none
    int n_failed = 0, n_torn = 0, n_lost = 0, steps = 0;         // steps: of the devices before this one
};

class SimFiles final : public SegmentFiles {
public:
    explicit SimFiles(std::shared_ptr<SimDisk> disk) : disk_(std::move(disk)) {}

    std::map<std::uint64_t, std::uint64_t> sizes() const override;

    bool create(std::uint64_t file) override;
    bool append(std::uint64_t file, Pieces pieces) override;
    bool cut(std::uint64_t file, std::uint64_t bytes) override;
    bool read(std::uint64_t file, std::uint64_t at, Pieces pieces) const override;
    void remove(std::uint64_t file) override { disk_->files.erase(file); }

private:
    std::shared_ptr<SimDisk> disk_;
};

} // namespace quire::simulation
