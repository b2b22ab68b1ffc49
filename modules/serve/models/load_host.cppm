// quire.serve.models.load_host: loads a model for the pool, which goes on meanwhile: with the scales of its last host, and with words for clients if
// it cannot be loaded. Owns nothing.
export module quire.serve.models.load_host;

import quire.core.base;
export import quire.serve.models.model_host;
export import quire.serve.models.model_view; // ModelCard

export namespace quire {

struct LoadedHost {
    std::unique_ptr<ModelHost>       host;
    std::shared_ptr<const ModelCard> card; // never null
};

// Loads the model of `setup`, see ModelHost::load(). `scales`: of all adapters, see changed_scales(); nothing: those of the flags.
Result<LoadedHost> load_host(const ModelSetup& setup, SharedContext& shared, const Progress& progress, const Say& say,
                             const ParkedCache* parked, const std::optional<std::vector<AdapterUse>>& scales);

// The scales of all adapters in requests that name none; nothing: they are those of the flags.
std::optional<std::vector<AdapterUse>> changed_scales(const Service& service);

// The error with which a model was not loaded, in words for clients: without the places of its files.
ApiError load_fault(const ModelSetup& setup, const Error& error);

} // namespace quire

module :private;

namespace quire {

Result<LoadedHost> load_host(const ModelSetup& setup, SharedContext& shared, const Progress& progress, const Say& say,
                             const ParkedCache* parked, const std::optional<std::vector<AdapterUse>>& scales) {
    Result<std::unique_ptr<ModelHost>> host = ModelHost::load(setup, shared, progress, say, parked);
    if (!host) return std::unexpected(host.error());
    if (scales) // before a request comes
        if (const auto ok = (*host)->service().set_adapters(*scales); !ok) say(ok.error().message, true);
    say((*host)->description(), false);
    auto card = std::make_shared<const ModelCard>(card_of((*host)->api()));
    return LoadedHost{std::move(*host), std::move(card)};
}

std::optional<std::vector<AdapterUse>> changed_scales(const Service& service) {
    const std::vector<AdapterOption>& given = service.engine_options().adapters;
    const std::vector<AdapterOption>  now   = service.engine().adapters();
    std::vector<AdapterUse>           uses;
    bool                              changed = false;
    for (std::size_t i = 0; i < now.size(); i++) {
        if (now[i].scale != (given[i].usual ? given[i].scale : 0)) changed = true;
        uses.push_back({int(i), now[i].scale});
    }
    if (!changed) return std::nullopt;
    return uses;
}

ApiError load_fault(const ModelSetup& setup, const Error& error) {
    std::string              message = error.message;
    std::vector<std::string> paths{setup.path, setup.engine.drafts.model, setup.engine.kv_key};
    for (const AdapterOption& adapter : setup.engine.adapters) paths.push_back(adapter.path);
    for (const std::string& path : paths) {
        const std::string name   = std::filesystem::path(path).filename().string(),
                          folder = path.substr(0, path.size() - name.size());
        if (folder.size() < 2) continue; // "/" tells nothing, and stands in many sentences
        for (std::size_t at = 0; (at = message.find(folder, at)) != std::string::npos;)
            message.erase(at, folder.size());
    }
    const bool no_room = error.kind == ErrorKind::limit;
    return {no_room ? 503 : 500, cat("the model ", quote(setup.id), " cannot be loaded: ", message), "model",
            no_room ? "no_room" : "model_not_loaded"};
}

} // namespace quire
