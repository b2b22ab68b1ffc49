// A prefix shared by many requests, computed once and pinned: each request computes only its own tokens (the paper,
// sections 4.4 and 6.4).
//   shared_prefix [MODEL]
import quire.core.base;
import quire.core.std;
import quire.engine.engine;
import quire.paging.snapshot;
import quire.schedule.request;
import quire.text.tokens.tokenizer;

using namespace quire;

int main(int argc, char** argv) {
    EngineOptions options;
    options.pipeline      = false; // the memory is looked at between steps
    options.kv_blocks     = 40;
    Result<Engine> engine = Engine::load(argc > 1 ? argv[1] : "models/quire-14m-q8_0.gguf", options);
    if (!engine) {
        std::fprintf(stderr, "shared_prefix: %s\n", engine.error().message.c_str());
        return 1;
    }
    std::string instruction = "Translate English to French:\n";
    for (const char* example : {"sea otter => loutre de mer", "cheese => fromage", "peppermint => menthe poivrée",
                                "plush giraffe => girafe en peluche", "bread => pain", "a block => un bloc"})
        instruction += cat(example, "\n");

    std::vector<Output> events;
    Request             prefix;
    prefix.prompt                  = engine->tokenizer().encode(instruction, {.add_special = false});
    prefix.pin                     = true; // kept until cancel()
    const Result<RequestId> pinned = engine->submit(prefix);
    check(pinned.has_value(), "the prefix fits");
    engine->step(events);
    std::printf("pinned: %zu tokens in %d blocks\n", prefix.prompt.size(), totals(engine->snapshot()).pinned);

    for (const char* task : {"water =>", "a table =>", "the memory =>"}) {
        Request request;
        request.prompt               = engine->tokenizer().encode(instruction + task, {.add_special = false});
        request.max_tokens           = 8;
        request.sampling.temperature = 0;
        events.clear();
        if (!engine->submit(request)) return 1;
        while (engine->step(events)) {}
        std::printf("%-14s %2zu tokens of the prompt, %zu from the prefix, %zu computed\n", task, request.prompt.size(),
                    std::size_t(events[0].cached_tokens), request.prompt.size() - std::size_t(events[0].cached_tokens));
    }
    std::printf("copies on write: %llu, one for each request: the prefix ends in the middle of a block\n",
                static_cast<unsigned long long>(engine->stats().memory.copied_blocks));
    engine->cancel(*pinned);
    engine->step(events);
    std::printf("released: %d blocks pinned\n", totals(engine->snapshot()).pinned);
}
