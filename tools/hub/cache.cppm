// quire.tools.hub.cache: the folder of the models that were fetched, as huggingface_hub keeps it, so that each finds the files of the other:
//   models--USER--NAME/blobs/DIGEST              the files
//   models--USER--NAME/snapshots/COMMIT/FILE     links to them, by the names of a version
//   models--USER--NAME/refs/main                 the commit of a branch
//   .locks/models--USER--NAME/DIGEST.lock        of processes that fetch the same file
// Owns nothing.
module;

#include <unistd.h>
#include <cerrno>

export module quire.tools.hub.cache;

import quire.core.base;
import quire.core.output_file;

export namespace quire {

// HF_HUB_CACHE, HF_HOME/hub, XDG_CACHE_HOME/huggingface/hub or ~/.cache/huggingface/hub; "": there is no home.
std::string hub_cache_folder();
// HF_HOME, XDG_CACHE_HOME/huggingface or ~/.cache/huggingface; "": there is no home.
std::string hub_home();
// XDG_CACHE_HOME or ~/.cache; "": there is no home.
std::string cache_home();

// The variable's value; "": not set.
std::string variable(const char* name);

// A repository in the cache.
struct CachedRepo {
    std::string folder; // HUB_CACHE/models--USER--NAME

    std::string blob(const std::string& digest) const { return cat(folder, "/blobs/", digest); }
    std::string lock(const std::string& digest) const;
    std::string file(const std::string& commit, const std::string& name) const {
        return cat(folder, "/snapshots/", commit, "/", name);
    }
    std::string              commit_of(const std::string& branch) const; // "": not known
    Result<void>             set_commit(const std::string& branch, const std::string& commit) const;
    std::vector<std::string> files(const std::string& commit) const; // names that lead to a file, sorted
    // Links the name to the blob, unless it is there.
    Result<void> link(const std::string& commit, const std::string& name, const std::string& digest) const;
};

// `repo`: USER/NAME
CachedRepo cached_repo(const std::string& cache, const std::string& repo);

// A model file in the cache, or the first part of one.
struct CachedModel {
    std::string repo, name, path;
};
// All *.gguf of the commits that branches have, sorted.
std::vector<CachedModel> cached_models(const std::string& cache);
// The first files of the models that came from URLs, sorted.
std::vector<std::string> url_models();
// Whether a name ends in .gguf, also in capitals.
bool is_gguf_name(std::string_view name);

// Of NAME-00001-of-00003.gguf: the numbers and the text before them. One part: count is 1.
struct PartName {
    std::string prefix;
    int         number = 1, count = 1;
};
PartName part_of(std::string_view name);
// Of the name of a model's only or first file: the names of all its files, in order.
std::vector<std::string> parts_of(const std::string& name);

} // namespace quire

module :private;

namespace quire {

namespace fs = std::filesystem;

std::string variable(const char* name) {
    const char* value = std::getenv(name);
    return value ? value : "";
}

std::string cache_home() {
    if (const std::string folder = variable("XDG_CACHE_HOME"); !folder.empty()) return folder;
    const std::string home = variable("HOME");
    return home.empty() ? "" : home + "/.cache";
}

std::string hub_home() {
    if (const std::string folder = variable("HF_HOME"); !folder.empty()) return folder;
    const std::string caches = cache_home();
    return caches.empty() ? "" : caches + "/huggingface";
}

std::string hub_cache_folder() {
    for (const char* name : {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"})
        if (const std::string folder = variable(name); !folder.empty()) return folder;
    const std::string home = hub_home();
    return home.empty() ? "" : home + "/hub";
}

CachedRepo cached_repo(const std::string& cache, const std::string& repo) {
    const std::size_t slash = repo.find('/');
    return {cat(cache, "/models--", repo.substr(0, slash), "--", repo.substr(slash + 1))};
}

std::string CachedRepo::lock(const std::string& digest) const {
    const fs::path path(folder);
    return cat(path.parent_path().string(), "/.locks/", path.filename().string(), "/", digest, ".lock");
}

std::string CachedRepo::commit_of(const std::string& branch) const {
    std::ifstream file(cat(folder, "/refs/", branch));
    std::string   commit;
    std::getline(file, commit);
    return commit;
}

Result<void> CachedRepo::set_commit(const std::string& branch, const std::string& commit) const {
    if (commit_of(branch) == commit) return {};
    const std::string path = cat(folder, "/refs/", branch);
    std::error_code   ignored;
    fs::create_directories(fs::path(path).parent_path(), ignored);
    return write_file(path, commit);
}

// The files below a folder, by their names in it, sorted. Links that lead nowhere are none.
std::vector<std::string> files_below(const std::string& top, const std::string& inside = "") {
    std::vector<std::string> names;
    std::error_code          error, ignored;
    for (fs::directory_iterator at(top + inside, error), end; !error && at != end; at.increment(error)) {
        const std::string name = cat(inside, "/", at->path().filename().string());
        if (at->is_regular_file(ignored)) names.push_back(name.substr(1));
        if (!at->is_symlink(ignored) && at->is_directory(ignored))
            for (std::string& below : files_below(top, name)) names.push_back(std::move(below));
    }
    std::ranges::sort(names);
    return names;
}

std::vector<std::string> CachedRepo::files(const std::string& commit) const {
    return files_below(cat(folder, "/snapshots/", commit));
}

Result<void> CachedRepo::link(const std::string& commit, const std::string& name, const std::string& digest) const {
    const fs::path  path = file(commit, name);
    std::error_code error;
    if (fs::exists(path, error)) return {};
    fs::create_directories(path.parent_path(), error);
    const std::string to = (fs::path(blob(digest)).lexically_relative(path.parent_path())).string();
    // Made beside the blob and renamed: it replaces a link that leads nowhere, and another process sees its own link at each
    // moment.
    const std::string made = cat(blob(digest), '.', gettid(), ".link");
    fs::remove(made, error); // of a process that was killed
    // A file system without links: the name has the file itself.
    if (symlink(to.c_str(), made.c_str()) == 0 || ::link(blob(digest).c_str(), made.c_str()) == 0) {
        if (std::rename(made.c_str(), path.c_str()) == 0) {
            fs::remove(made, error); // rename leaves both where they are one file
            return {};
        }
        const int fault = errno;
        fs::remove(made, error);
        errno = fault;
    }
    return fail_with(ErrorKind::system, "cannot write ", path.string(), ": ", std::strerror(errno));
}

PartName part_of(std::string_view name) {
    constexpr std::string_view end = "-00001-of-00001.gguf";
    PartName                   part{std::string(name)};
    if (name.size() <= end.size()) return part;
    const std::string_view tail = name.substr(name.size() - end.size());
    if (tail[0] != '-' || tail.substr(6, 4) != "-of-" || !tail.ends_with(".gguf")) return part;
    const auto number = to_number<int>(tail.substr(1, 5)), count = to_number<int>(tail.substr(10, 5));
    if (!number || !count || *number < 1 || *number > *count) return part;
    return {std::string(name.substr(0, name.size() - end.size())), *number, *count};
}

std::vector<std::string> parts_of(const std::string& name) {
    const PartName part = part_of(name);
    if (part.count == 1) return {name};
    std::vector<std::string> names;
    for (int i = 1; i <= part.count; i++) {
        char end[32];
        std::snprintf(end, sizeof end, "-%05d-of-%05d.gguf", i, part.count);
        names.push_back(part.prefix + end);
    }
    return names;
}

bool is_gguf_name(std::string_view name) { return name.ends_with(".gguf") || name.ends_with(".GGUF"); }

std::vector<std::string> url_models() {
    const std::string        folder = cat(cache_home(), "/quire/urls");
    std::vector<std::string> models;
    for (const std::string& name : files_below(folder))
        if (is_gguf_name(name) && part_of(fs::path(name).filename().string()).number == 1)
            models.push_back(cat(folder, "/", name));
    return models;
}

std::vector<CachedModel> cached_models(const std::string& cache) {
    std::vector<CachedModel> models;
    std::error_code          error, ignored;
    for (fs::directory_iterator at(cache, error), end; !error && at != end; at.increment(error)) {
        const std::string folder = at->path().filename().string();
        if (!folder.starts_with("models--")) continue;
        std::string       repo = folder.substr(8);
        const std::size_t gap  = repo.find("--");
        if (gap == std::string::npos) continue; // a model without a user: none that has GGUF files
        repo.replace(gap, 2, "/");
        const CachedRepo      cached{at->path().string()};
        std::set<std::string> commits;
        for (const std::string& branch : files_below(cached.folder + "/refs")) commits.insert(cached.commit_of(branch));
        for (const std::string& commit : commits)
            for (const std::string& name : cached.files(commit))
                if (is_gguf_name(name) && part_of(name).number == 1)
                    models.push_back({repo, name, cached.file(commit, name)});
    }
    std::ranges::sort(models, {}, [](const CachedModel& m) { return std::tie(m.repo, m.name, m.path); });
    return models;
}

} // namespace quire
