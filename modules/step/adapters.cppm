// quire.step.adapters: which LoRA adapters a sequence runs with. Plain values, owns nothing.
export module quire.step.adapters;

import quire.core.base;

export namespace quire {

// An adapter of the engine by its number, and the factor of what it adds to the model.
struct AdapterUse {
    int   adapter                             = 0;
    float scale                               = 1;
    bool  operator==(const AdapterUse&) const = default;
};

} // namespace quire
