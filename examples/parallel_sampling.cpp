// Four answers to one request: the prompt is computed once, and its blocks are shared (the paper, section 4.4).
//   parallel_sampling [MODEL]
import quire.core.base;
import quire.core.std;
import quire.engine.engine;
import quire.schedule.request;
import quire.text.tokens.tokenizer;

using namespace quire;

int main(int argc, char** argv) {
    EngineOptions options;
    options.block_size    = 4; // so that a short prompt has blocks to share
    Result<Engine> engine = Engine::load(argc > 1 ? argv[1] : "models/quire-14m-q8_0.gguf", options);
    if (!engine) {
        std::fprintf(stderr, "parallel_sampling: %s\n", engine.error().message.c_str());
        return 1;
    }
    Request request;
    request.prompt = engine->tokenizer().encode("<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n",
                                                {.add_special = false});
    request.n      = 4;
    request.max_tokens           = 48;
    request.sampling.temperature = 1;
    request.sampling.seed        = 1; // answer i draws as one alone with seed 1 + i would
    const Result<RequestId> id   = engine->submit(request);
    if (!id) {
        std::fprintf(stderr, "parallel_sampling: %s\n", id.error().message.c_str());
        return 1;
    }

    std::vector<Output>             events;
    std::vector<std::vector<Token>> answers(4);
    while (engine->step(events)) {}
    for (const Output& e : events)
        answers[std::size_t(e.index)].insert(answers[std::size_t(e.index)].end(), e.tokens.begin(), e.tokens.end());
    for (const std::vector<Token>& answer : answers) std::printf("– %s\n", engine->tokenizer().decode(answer).c_str());

    const EngineStats stats = engine->stats();
    std::printf(
        "\n%llu prompt tokens computed for 4 answers, %llu forks, %llu blocks copied on write; %.0f %% of the "
        "blocks saved by sharing\n",
        static_cast<unsigned long long>(stats.prefill_tokens), static_cast<unsigned long long>(stats.memory.forks),
        static_cast<unsigned long long>(stats.memory.copied_blocks), 100 * events.back().sharing.saved());
}
