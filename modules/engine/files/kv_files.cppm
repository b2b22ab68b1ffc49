// quire.engine.files.kv_files: opens the files in which an engine keeps its prefix cache, and says what they have. Owns nothing.
export module quire.engine.files.kv_files;

import quire.core.base;
import quire.core.hash;
import quire.core.thread_pool;
export import quire.engine.executor;
export import quire.engine.files.disk_requests;
export import quire.engine.options;
export import quire.schedule.scheduler;

export namespace quire {

// Opens the files that `options` name, with the defaults filled in, for the model whose file is `path`. `basis`: asked when the directory is this
// process's; returns what the bytes of K and V depend on, see basis_of_kv(). Scheduler and executor outlive the result. Error: one sentence.
Result<std::unique_ptr<DiskRequests>> open_kv_files(const std::string& path, const EngineOptions& options,
                                                    std::optional<Cipher>               cipher,
                                                    const std::function<std::string()>& basis, Scheduler& scheduler,
                                                    const Executor& executor);

// One line: what the files of `directory` had when they were opened.
std::string text_of(const SegmentsFound& found, const std::string& directory);

} // namespace quire

module :private;

namespace quire {

Result<std::unique_ptr<DiskRequests>> open_kv_files(const std::string& path, const EngineOptions& o,
                                                    std::optional<Cipher>               cipher,
                                                    const std::function<std::string()>& basis, Scheduler& scheduler,
                                                    const Executor& executor) {
    if (o.processes.n > 1) return fail(path, ": --kv-dir is for a model that runs in one process");
    if (o.tier_blocks == 0) return fail("--kv-dir needs room in host memory (--kv-host-bytes) and the prefix cache");
    if (const std::size_t block = executor.memory().kv / std::size_t(o.kv_blocks);
        !o.kv_dir.empty() && std::uint64_t(o.kv_disk_bytes) < 2 * block)
        return fail("--kv-disk-bytes ", o.kv_disk_bytes, " is too little for ", o.kv_dir, ": one block of K and V has ",
                    block, " bytes");
    Result<std::unique_ptr<SegmentFiles>> segments = o.kv_files.make ? o.kv_files.make() : open_directory(o.kv_dir);
    if (!segments) return std::unexpected(segments.error());
    const std::uint64_t model   = hash_bytes(basis());
    const int           threads = o.device == "cuda" ? std::clamp(physical_cores() - 2, 1, 16) : 1;
    return std::make_unique<DiskRequests>(
        SegmentOptions{std::uint64_t(o.kv_disk_bytes), model, o.block_size, std::move(cipher), threads},
        std::move(*segments), o.kv_files.jobs, scheduler, executor);
}

std::string text_of(const SegmentsFound& found, const std::string& directory) {
    const auto some = [](int n, std::string_view one, std::string_view more, std::string_view what) {
        return n == 0 ? std::string() : cat("; ", n, " ", n == 1 ? one : more, " ", what);
    };
    const auto          files = [&](int n, std::string_view what) { return some(n, "file", "files", what); };
    const std::uint64_t mib   = found.bytes >> 20;
    return cat("the KV files in ", directory, " have ", mib > 0 ? cat(mib, " MiB") : cat(found.bytes, " bytes"),
               " with ", found.records, found.records == 1 ? " record" : " records",
               " for this model and these settings", files(found.other, "for others"),
               some(found.damaged, "end", "ends", "of files damaged and dropped"),
               files(found.old, "of an earlier version deleted"), files(found.open, "without encryption deleted"),
               files(found.foreign, "left alone that other users own or can write"));
}

} // namespace quire
