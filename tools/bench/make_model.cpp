// bench make-model: writes a model file with random weights, or a draft for such a model.
import quire.core.base;
import quire.core.output_file;
import quire.model_file.gguf;
import quire.tools.bench.random_model;

#include "commands.h"

namespace quire::bench {

int make_model(const Arguments& a) {
    if (auto ok = check_not_input(a.out, Gguf::files(a.vocabulary)); !ok) return complain(ok.error());
    const auto shape = std::ranges::find_if(model_shapes(), [&](const ModelShape& s) { return s.name == a.shape; });
    if (shape == model_shapes().end())
        return complain({ErrorKind::input, cat("there is no shape ", quote(a.shape), ": there are ", shape_names())},
                        2);
    std::string upper = a.type;
    for (char& c : upper)
        if (c >= 'a' && c <= 'z') c = char(c - 'a' + 'A');
    const auto type = std::ranges::find_if(dtype_table, [&](const DTypeInfo& t) { return t.name == upper; });
    if (type == dtype_table.end()) return complain({ErrorKind::input, cat("there is no type ", quote(a.type))}, 2);
    ModelShape wanted = *shape;
    if (a.layers > 0) wanted.n_layers = a.layers;
    wanted.mtp = a.mtp;
    if (a.eagle) {
        const auto ok = write_random_draft(a.out, wanted, type->type, a.vocabulary);
        return ok ? 0 : complain(ok.error());
    }
    int  shown = -1;
    auto ok    = write_random_model(
        a.out, wanted, type->type,
        [&](double fraction) {
            if (const int percent = int(fraction * 100); percent / 10 != shown) {
                shown = percent / 10;
                std::fprintf(stderr, "\r%3d %%", percent);
            }
        },
        a.vocabulary, a.counts);
    std::fprintf(stderr, "\n");
    return ok ? 0 : complain(ok.error());
}

} // namespace quire::bench
