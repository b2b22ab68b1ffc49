// An executor that draws tokens as a GPU does, on a CPU: the engine gives it sampling tasks, without masks, log-probabilities and mirostat, and
// gets tokens. Include after the imports of quire.core.std and quire.engine.engine.
#pragma once

namespace quire::testing {

// Loads a model onto it. The engine takes it for a GPU: it overlaps steps, and plans drafts as for one.
Engine load_sampling(const std::string& path, const EngineOptions& options);

} // namespace quire::testing
