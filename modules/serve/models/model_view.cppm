// quire.serve.models.model_view: a model of the server as lists show it. Plain values, owns nothing.
export module quire.serve.models.model_view;

import quire.core.base;
export import quire.serve.models.model_card;

export namespace quire {

enum class ModelStatus : std::uint8_t { unloaded, loading, loaded, sleeping };
std::string_view name_of(ModelStatus status); // as llama.cpp names it

// A model as lists show it.
struct ModelView {
    std::string                        id;
    std::vector<std::string>           names;    // the id, its aliases, then its adapters
    std::map<std::string, std::string> adapters; // names and files
    ModelStatus                        status = ModelStatus::unloaded;
    std::string                        failure;       // why the last load failed, or the engine; "": it did not
    std::string                        file;          // without the folder
    int                                in_flight = 0; // requests in the engine
    std::string                        asleep;        // of a model that sleeps: its description
    std::string                        device;        // of a loaded model
    std::optional<double>              sleeps_in;     // seconds, if no request asks a loaded model; nothing: it stays
    std::shared_ptr<const ModelCard>   card;          // null: not known so far
};

} // namespace quire

module :private;

namespace quire {

std::string_view name_of(ModelStatus status) {
    constexpr std::string_view names[] = {"unloaded", "loading", "loaded", "sleeping"};
    return names[std::size_t(status)];
}

} // namespace quire
