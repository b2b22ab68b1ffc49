// quire.serve.models.catalog: the model files below a directory, and the names under which a server offers them. Owns nothing.
export module quire.serve.models.catalog;

import quire.core.base;
import quire.core.hash;
import quire.core.unicode;
import quire.model_file.gguf;

export namespace quire {

struct FoundModel {
    std::string id;   // the file's name without its suffix; of a split model without the number of the part
    std::string path; // of the file, or of its first part
};

// The id of a model with this file name; nothing: it is no model of its own but a later part, an image encoder, or no GGUF file.
std::optional<std::string> model_id(const std::string& file_name);

// The models below `directory`, sorted by depth and path, without those whose name is no UTF-8 (no request could name them) and files that do
// not begin as GGUF files. A file whose id another one has gets its path below `directory` without the suffix; where that is taken, too, with
// it. Error: the directory cannot be read, or it has more than 10,000 models.
Result<std::vector<FoundModel>> find_models(const std::string& directory);

// A directory's name for a model: the id, where other characters than letters, digits, '-', '_' and '.' become '_' and a hash follows.
std::string directory_name(const std::string& id);

} // namespace quire

module :private;

namespace quire {

constexpr std::string_view suffix = ".gguf";

// Behind NAME of NAME-00001-of-00006: the number of the part; 0: the name has no such end. Cuts the end off.
int cut_part(std::string& name) {
    constexpr std::string_view form = "-00000-of-00000";
    if (name.size() <= form.size()) return 0;
    const std::string_view end = std::string_view(name).substr(name.size() - form.size());
    for (std::size_t i = 0; i < form.size(); i++)
        if (form[i] == '0' ? end[i] < '0' || end[i] > '9' : end[i] != form[i]) return 0;
    const int part = to_number<int>(std::string(end.substr(1, 5))).value_or(0);
    name.resize(name.size() - form.size());
    return part;
}

std::optional<std::string> model_id(const std::string& file_name) {
    if (!file_name.ends_with(suffix) || file_name.starts_with("mmproj")) return std::nullopt;
    std::string name = file_name.substr(0, file_name.size() - suffix.size());
    if (cut_part(name) > 1 || name.empty()) return std::nullopt;
    return name;
}

// Adds the models of a directory and of those in it. Links to directories are not followed: they may lead in circles.
void add_models(const std::string& directory, int depth, std::vector<FoundModel>& found, std::error_code& error) {
    constexpr int deepest = 32;
    for (std::filesystem::directory_iterator at(directory, error), end; !error && at != end; at.increment(error)) {
        std::error_code unknown; // of a file that vanishes
        if (at->is_directory(unknown) && !at->is_symlink(unknown) && depth < deepest) {
            add_models(at->path().string(), depth + 1, found, unknown);
            continue;
        }
        const std::optional<std::string> id = model_id(at->path().filename().string());
        if (id && utf8_valid(*id) && at->is_regular_file(unknown) && !is_no_gguf(at->path().string()))
            found.push_back({*id, at->path().string()});
    }
}

Result<std::vector<FoundModel>> find_models(const std::string& directory) {
    constexpr std::size_t   most = 10'000;
    std::error_code         error;
    std::vector<FoundModel> found;
    add_models(directory, 0, found, error);
    if (error) return fail_with(ErrorKind::system, "cannot read ", quote(directory), ": ", error.message());
    if (found.size() > most) return fail_with(ErrorKind::limit, directory, " has more than ", most, " models");
    const auto depth = [](const FoundModel& one) { return std::count(one.path.begin(), one.path.end(), '/'); };
    std::ranges::sort(found, [&](const FoundModel& a, const FoundModel& b) {
        return depth(a) != depth(b) ? depth(a) < depth(b) : a.path < b.path;
    });
    std::set<std::string> taken;
    for (FoundModel& one : found) {
        if (taken.insert(one.id).second) continue;
        std::string whole = std::filesystem::path(one.path).lexically_relative(directory).string();
        one.id            = whole.substr(0, whole.size() - suffix.size());
        cut_part(one.id);
        if (taken.insert(one.id).second) continue;
        one.id = std::move(whole); // a split model has the path without the suffix
        taken.insert(one.id);
    }
    return found;
}

std::string directory_name(const std::string& id) {
    std::string name;
    for (const char c : id) name += is_alphanumeric(c) || c == '-' || c == '_' || c == '.' ? c : '_';
    if (name == id && !name.empty() && name[0] != '.') return name;
    char hash[20];
    std::snprintf(hash, sizeof hash, "-%016llx", static_cast<unsigned long long>(hash_bytes(id)));
    return cat("_", name, static_cast<const char*>(hash));
}

} // namespace quire
