// quire.engine.adapter_list: the adapters of an engine: reads their files, and checks which of them a request uses. Owns nothing.
export module quire.engine.adapter_list;

import quire.core.base;
export import quire.engine.options;
export import quire.model_file.adapter;
import quire.model_file.gguf;
export import quire.step.adapters;

export namespace quire {

// The adapters of `o`, in their order, for `model`. Error: a file that is no adapter of it, or a scale that is no number.
Result<std::vector<Adapter>> read_adapters(const EngineOptions& o, const Gguf& model);

// In ascending order, without scales of 0. Error: an adapter that is none of the n, or is named twice; a scale that is no number.
Result<std::vector<AdapterUse>> checked_uses(std::span<const AdapterUse> uses, std::size_t n);

} // namespace quire

module :private;

namespace quire {

Result<std::vector<Adapter>> read_adapters(const EngineOptions& o, const Gguf& model) {
    std::vector<Adapter> adapters;
    for (const AdapterOption& one : o.adapters) {
        if (!std::isfinite(one.scale)) return fail(one.path, ": the scale of an adapter has to be a finite number");
        const auto has_name = [&](const AdapterOption& other) { return &other != &one && other.name == one.name; };
        if (!one.name.empty() && std::ranges::any_of(o.adapters, has_name))
            return fail(one.path, ": another adapter has the name ", quote(one.name), ", too");
        Result<Adapter> adapter = read_adapter(one.path, model);
        if (!adapter) return std::unexpected(adapter.error());
        adapters.push_back(std::move(*adapter));
    }
    if (!adapters.empty() && o.processes.n > 1)
        return fail(adapters[0].file.path(), ": adapters are for a model that runs in one process");
    return adapters;
}

Result<std::vector<AdapterUse>> checked_uses(std::span<const AdapterUse> uses, std::size_t n) {
    std::vector<AdapterUse> all(uses.begin(), uses.end());
    std::ranges::sort(all, {}, &AdapterUse::adapter);
    for (std::size_t i = 0; i < all.size(); i++) {
        const auto& [adapter, scale] = all[i];
        if (adapter < 0 || std::size_t(adapter) >= n)
            return fail("there is no adapter ", adapter,
                        n == 0   ? "; the server has none (--lora)"
                        : n == 1 ? "; the only one is 0"
                                 : cat("; they are 0 to ", n - 1));
        if (i > 0 && all[i - 1].adapter == adapter) return fail("adapter ", adapter, " is named twice");
        if (!std::isfinite(scale)) return fail("the scale of adapter ", adapter, " is not a finite number");
    }
    std::erase_if(all, [](const AdapterUse& use) { return use.scale == 0; });
    return all;
}

} // namespace quire
