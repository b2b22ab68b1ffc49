// One request, token by token: the block table as it grows, and the bytes of K and V that each step reads.
//   token_by_token [MODEL]
import quire.compute.kv_cache;
import quire.core.base;
import quire.core.std;
import quire.core.tensor;
import quire.engine.engine;
import quire.model_file.config;
import quire.paging.block;
import quire.paging.snapshot;
import quire.schedule.request;
import quire.text.tokens.tokenizer;

using namespace quire;

int main(int argc, char** argv) {
    EngineOptions options;
    options.pipeline      = false; // the memory is looked at between steps
    options.block_size    = 4;
    options.kv_blocks     = 16;
    Result<Engine> engine = Engine::load(argc > 1 ? argv[1] : "models/quire-14m-q8_0.gguf", options);
    if (!engine) {
        std::fprintf(stderr, "token_by_token: %s\n", engine.error().message.c_str());
        return 1;
    }
    Request request;
    request.prompt     = engine->tokenizer().encode("Four score and seven years ago our", {.add_special = false});
    request.max_tokens = 16;
    request.ignore_end = true;
    request.sampling.temperature = 0;
    const Result<RequestId> id   = engine->submit(request);
    check(id.has_value(), "a short prompt fits");

    const std::size_t   per_token = KvCache::bytes_per_token(engine->config(), DType::F16);
    std::vector<Output> events;
    std::printf("K and V take %zu bytes per token; blocks of %d tokens\n\n", per_token, options.block_size);
    while (engine->step(events)) {
        if (events.empty() || events.back().tokens.empty()) continue;
        const std::string text = engine->tokenizer().decode(events.back().tokens);
        const Snapshot    now  = engine->snapshot();
        if (now.sequences.empty()) break; // that was the last token
        const SequenceView& s = now.sequences[0];
        std::printf("%2d tokens cached, %6zu KiB read ", s.n_computed, std::size_t(s.n_computed) * per_token >> 10);
        for (int i = 0; i < s.n_computed; i += 2) std::printf("▪");
        std::printf("%*s  blocks", 10 - (s.n_computed + 1) / 2, "");
        for (BlockId b : s.blocks) std::printf(" %d[%d]", b, now.blocks[std::size_t(b)].filled);
        std::printf("  → %s\n", text.c_str());
    }
}
