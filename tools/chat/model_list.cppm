// quire.tools.chat.model_list: the models that are on this machine: those beside the program and those in the hub's cache. Owns nothing.
export module quire.tools.chat.model_list;

import quire.core.base;
import quire.core.tensor;
import quire.model_file.gguf;
import quire.tools.common.terminal;
import quire.tools.hub.cache;
import quire.tools.hub.fetch;

export namespace quire {

// A table: name, type of most weights, size, path. `folder`: models/ beside the program. Files that do not begin as GGUF files are left out.
// Ends with a sentence where there is none.
std::string model_list(const std::string& folder);

} // namespace quire

module :private;

namespace quire {

struct ListedModel {
    std::string name, type, size, path;
};

// The type that has most of the bytes; a file that cannot be opened is listed with "-".
void describe_file(ListedModel& model) {
    std::error_code    error;
    const auto         bytes = std::filesystem::file_size(model.path, error);
    const Result<Gguf> file  = Gguf::open(model.path);
    model.size               = bytes_text(std::int64_t(file ? file->file_bytes() : error ? 0 : bytes));
    model.type               = "-";
    if (!file) return;
    std::map<DType, std::size_t> by_type;
    for (const GgufTensor& tensor : file->tensors()) by_type[tensor.type] += tensor.bytes;
    const auto most = std::ranges::max_element(by_type, {}, [](const auto& one) { return one.second; });
    if (most != by_type.end()) model.type = dtype_info(most->first).name;
}

std::string model_list(const std::string& folder) {
    std::vector<ListedModel> models;
    std::error_code          error;
    for (std::filesystem::directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
        if (at->path().extension() == ".gguf" && part_of(at->path().filename().string()).number == 1)
            models.push_back({at->path().filename().string(), "", "", at->path().string()});
    std::ranges::sort(models, {}, &ListedModel::name);
    const std::string cache = hub_cache_folder();
    for (const CachedModel& one : cached_models(cache))
        models.push_back({cat(one.repo, " ", one.name), "", "", one.path});
    for (const std::string& path : url_models())
        models.push_back({std::filesystem::path(path).filename().string(), "", "", path});
    std::erase_if(models, [](const ListedModel& model) { return is_no_gguf(model.path); });
    if (models.empty())
        return cat("There is no model in ", folder, cache.empty() ? "" : " or ", cache,
                   "; chat -hf USER/MODEL fetches one.\n");
    std::size_t name = 5, type = 4, size = 4; // the widths of the columns
    for (ListedModel& model : models) {
        describe_file(model);
        model.name = printable(model.name);
        name = std::max(name, model.name.size()), type = std::max(type, model.type.size());
        size = std::max(size, model.size.size());
    }
    const auto line = [&](const ListedModel& m) {
        return cat(m.name, std::string(name + 2 - m.name.size(), ' '), m.type,
                   std::string(type + 2 + size - m.type.size() - m.size.size(), ' '), m.size, "  ", printable(m.path),
                   "\n");
    };
    std::string text = line({"model", "type", "size", "path"});
    for (const ListedModel& model : models) text += line(model);
    return text;
}

} // namespace quire
