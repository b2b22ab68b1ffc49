// bench windows: the KV memory of models whose layers see different windows, by the scheduler and its blocks, without a model.
import quire.core.base;
import quire.core.json;
import quire.core.tensor;
import quire.schedule.scheduler;

#include "commands.h"

namespace quire::bench {

namespace {

constexpr int block_size = 16;

// The numbers that decide about a model's KV memory, from its published configuration. Of each `period` layers the last one sees all
// positions; 0: none does.
struct Shape {
    const char* name;
    int         n_layers, n_kv_heads, head_dim, window, period, context;
    int         full_kv_heads = n_kv_heads, full_head_dim = head_dim; // of layers that see all

    std::vector<LayerCache> layers(bool with_windows, KvTypes types = {}) const {
        std::vector<LayerCache> all;
        for (int i = 0; i < n_layers; i++) {
            const bool              full  = period > 0 && (i + 1) % period == 0;
            const int               heads = full ? full_kv_heads : n_kv_heads, dim = full ? full_head_dim : head_dim;
            std::vector<CacheArray> arrays{{types.k, heads, dim}, {types.v, heads, dim}};
            for (DType type : {types.k, types.v})
                if (has_scales(type)) arrays.push_back({DType::F32, heads, 1});
            all.push_back({with_windows && !full ? window : 0, arrays});
        }
        return all;
    }
    // Of K and V of one layer.
    double layer_bytes(double n_tokens) const { return n_tokens * n_kv_heads * head_dim * 2 * 2; }
    double block_bytes(const CacheLayout& layout) const {
        return layer_bytes(block_size) * layout.groups[0].layers_per_block;
    }
    // Bytes that some layer can still see when the next position is n, in whole blocks.
    double seen(int n) const {
        double bytes = 0;
        for (const LayerCache& l : layers(true)) {
            const int first = CacheLayout::first_entry_seen(l.window, n, block_size);
            bytes += layer_bytes(double((n + block_size) / block_size - first) * block_size);
        }
        return bytes;
    }
};

SchedulerOptions options_of(const Shape& shape, const CacheLayout& layout, int n_blocks, int max_sequences) {
    SchedulerOptions o;
    o.n_blocks         = n_blocks;
    o.block_size       = block_size;
    o.context          = shape.context;
    o.max_batch_tokens = 2048;
    o.max_sequences    = max_sequences;
    o.max_logit_rows   = max_sequences;
    o.layout           = layout;
    return o;
}

// One step; every sequence that samples gets a token.
bool step(Scheduler& scheduler, StepPlan& plan) {
    const auto items = scheduler.schedule(plan);
    scheduler.commit();
    for (const Scheduled& item : items)
        if (item.samples) {
            item.group->prompt_done = true;
            scheduler.append(*item.sequence, 1);
        }
    return !items.empty();
}

Request request(int n, int seed) {
    Request      r;
    std::mt19937 random{unsigned(seed)};
    for (int i = 0; i < n; i++) r.prompt.push_back(int(random() % 32000));
    r.max_tokens = 1 << 20;
    return r;
}

// Bytes that a sequence holds once it has n positions: it generates the last 64 of them.
double bytes_of_one(const Shape& shape, const CacheLayout& layout, int n) {
    Scheduler scheduler(options_of(shape, layout, layout.blocks_at_once(shape.context, block_size, true) + 64, 1));
    StepPlan  plan;
    scheduler.add(1, request(n - 64, 1));
    const SequenceGroup& group = *scheduler.find(1);
    while (group.sequences[0]->n_computed < n && step(scheduler, plan)) {}
    check(group.sequences[0]->n_computed == n, "a sequence that did not get there");
    return double(scheduler.blocks().n_used()) * shape.block_bytes(layout);
}

// Sequences of n positions that run at the same time in a pool of so many bytes.
int most_sequences(const Shape& shape, const CacheLayout& layout, int n, double bytes) {
    const int n_blocks = int(bytes / shape.block_bytes(layout));
    int       most     = int(bytes / (shape.layer_bytes(1) * 16 * shape.n_layers)); // more than there can be
    most               = std::min(most, 512);
    SchedulerOptions o = options_of(shape, layout, n_blocks, most);
    o.watermark        = 0;
    Scheduler scheduler(o);
    StepPlan  plan;
    for (int i = 0; i < most; i++) scheduler.add(RequestId(i) + 1, request(n - 256, i + 1));
    int running = 0;
    for (int idle = 0; idle < 200; idle++) { // until none has been added for long
        if (!step(scheduler, plan) || scheduler.stats().preemptions > 0) break;
        int done = 0;
        for (const auto& group : scheduler.running()) done += group->prompt_done;
        if (done > running) running = done, idle = 0;
    }
    return running;
}

std::string size(double bytes) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f MiB", bytes / double(1 << 20));
    return text;
}

} // namespace

int windows(bool json) {
    // https://huggingface.co/openai/gpt-oss-20b, google/gemma-3-12b-it, mistralai/Mistral-7B-v0.1: config.json. Mistral's context is
    // raised to that of the others.
    const Shape shapes[]  = {{"gpt-oss-20b", 24, 8, 64, 128, 2, 131072 + 64},
                             {"Gemma 3 12B", 48, 8, 256, 1024, 6, 131072 + 64},
                             {"Mistral 7B v0.1", 32, 8, 128, 4096, 0, 131072 + 64}};
    const int   lengths[] = {1024, 8192, 32768, 131072};
    Json        out       = Json::array();
    if (!json)
        std::printf(
            "| | KV of a sequence | 1k | 8k | 32k | 128k | sequences of 32k in 20 GB |\n"
            "| --- | --- | --: | --: | --: | --: | --: |\n");
    for (const Shape& shape : shapes) {
        const CacheLayout before = make_cache_layout(shape.layers(false), shape.context),
                          after  = make_cache_layout(shape.layers(true), shape.context);
        constexpr double pool    = 20e9;
        const auto       line    = [&](const char* what, auto&& bytes, int sequences) {
            Json row = {{"model", shape.name}, {"what", what}, {"sequences", sequences}};
            if (!json) std::printf("| %s | %s |", shape.name, what);
            for (int n : lengths) {
                const double b = bytes(n);
                row["bytes"].push_back(b);
                if (!json) std::printf(" %s |", size(b).c_str());
            }
            if (!json) std::printf(" %d |\n", sequences);
            out.push_back(std::move(row));
        };
        const bool mistral_was_so = shape.period == 0; // every layer has the window: its blocks were given back before
        const CacheLayout& old    = mistral_was_so ? after : before;
        line(
            "before: one kind of block", [&](int n) { return bytes_of_one(shape, old, n); },
            most_sequences(shape, old, 32768, pool));
        line(
            "cache groups", [&](int n) { return bytes_of_one(shape, after, n); },
            most_sequences(shape, after, 32768, pool));
        line("limit: what a layer sees", [&](int n) { return shape.seen(n - 1); }, int(pool / shape.seen(32767)));
    }
    // How the layers share blocks of one size, and the largest part of the pool that no layer uses.
    const Shape more[] = {{"Gemma 3 1B", 26, 1, 256, 512, 6, 32768},
                          {"Gemma 3 4B", 34, 4, 256, 1024, 6, 131072},
                          {"Gemma 3 27B", 62, 16, 128, 1024, 6, 131072},
                          {"Gemma 2 9B", 42, 8, 256, 4096, 2, 8192},
                          {"Gemma 4 26B-A4B", 30, 8, 256, 1024, 6, 262144, 2, 512}};
    if (!json)
        std::printf(
            "\n| | K, V | layers that see all, with a window | layers of a block | blocks of their entries | unused |\n"
            "| --- | --- | --: | --: | --: | --: |\n");
    const auto layout_line = [&](const Shape& shape, const char* types, KvTypes kv) {
        const CacheLayout layout = make_cache_layout(shape.layers(true, kv), shape.context);
        std::string       layers, blocks, of_block;
        for (const CacheGroup& g : layout.groups) {
            const char* const comma = layers.empty() ? "" : ", ";
            layers += cat(comma, g.layers.size());
            blocks += cat(comma, g.blocks);
            of_block += cat(comma, g.layers_per_block / (g.halves ? 2.0 : 1.0));
        }
        out.push_back({{"model", shape.name}, {"types", types}, {"blocks", blocks}, {"waste", layout.waste()}});
        if (!json)
            std::printf("| %s | %s | %s | %s | %s | %.1f %% |\n", shape.name, types, layers.c_str(), of_block.c_str(),
                        blocks.c_str(), 100 * layout.waste());
    };
    for (const auto& [types, kv] : {std::pair("f16", KvTypes(DType::F16)), std::pair("q8_0", KvTypes(DType::I8))}) {
        for (const Shape& shape : shapes) layout_line(shape, types, kv);
        for (const Shape& shape : more) layout_line(shape, types, kv);
    }
    layout_line(std::end(more)[-1], "f16, q8_0", {DType::F16, DType::I8});
    if (json) std::printf("%s\n", json_dump(out).c_str());
    return 0;
}

} // namespace quire::bench
