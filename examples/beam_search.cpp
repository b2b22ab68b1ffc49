// Beam search in the engine: beams fork, die and share their blocks as a tree (the paper, section 4.4 and Fig. 9).
//   beam_search [MODEL]
import quire.core.base;
import quire.core.std;
import quire.engine.engine;
import quire.paging.block;
import quire.paging.snapshot;
import quire.schedule.request;
import quire.text.tokens.tokenizer;

using namespace quire;

int main(int argc, char** argv) {
    EngineOptions options;
    options.pipeline      = false; // the memory is looked at between steps
    options.block_size    = 4;
    options.kv_blocks     = 64;
    Result<Engine> engine = Engine::load(argc > 1 ? argv[1] : "models/quire-14m-q8_0.gguf", options);
    if (!engine) {
        std::fprintf(stderr, "beam_search: %s\n", engine.error().message.c_str());
        return 1;
    }
    Request request;
    request.prompt = engine->tokenizer().encode("<|im_start|>user\nWhat is a quire?<|im_end|>\n<|im_start|>assistant\n",
                                                {.add_special = false});
    request.beam_width     = 4;
    request.n              = 4;
    request.max_tokens     = 40;
    request.length_penalty = 1;
    if (Result<RequestId> id = engine->submit(request); !id) {
        std::fprintf(stderr, "beam_search: %s\n", id.error().message.c_str());
        return 1;
    }

    std::vector<Output> events;
    for (int step = 0; engine->step(events); step++) {
        const Snapshot now = engine->snapshot();
        if (step % 8 != 0 || now.sequences.empty()) continue;
        std::printf("step %d: %d blocks for %zu beams, %.0f %% saved by sharing\n", step, totals(now).used,
                    now.sequences.size(), 100 * totals(now).saved);
        for (const SequenceView& beam : now.sequences) {
            std::printf("   ");
            for (BlockId b : beam.blocks) std::printf(" %d%s", b, now.blocks[std::size_t(b)].ref_count > 1 ? "*" : "");
            std::printf("\n");
        }
    }
    std::printf("\n(* shared)\n");
    for (const Output& e : events) std::printf("%.4f  %s\n", e.score, engine->tokenizer().decode(e.tokens).c_str());
}
