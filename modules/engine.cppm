// quire.engine: the loop: schedule → execute → sample → deliver. **Owns** the model, the scheduler, inbox and outbox.
export module quire.engine;

import quire.base;
import quire.config;
import quire.request;
import quire.std;
import quire.tokenizer;

export namespace quire {

enum class KvType { f16, f32 };

struct EngineOptions {
    int    threads = 0;            // 0: the physical cores
    int    block_size = 16;        // tokens, 1..256
    int    context = 0;            // longest sequence in tokens; 0: the model's, at most 4096 unless asked for
    int    kv_blocks = 0;          // 0: enough for max_sequences… see engine.cpp
    KvType kv_type = KvType::f16;
    int    max_batch_tokens = 512; // tokens of one step, chunks of prompts included
    int    max_sequences = 16;     // running at once
    bool   prefix_cache = true;
};

// Counters since the start, for timings and tests.
struct EngineStats {
    std::uint64_t steps = 0;
    std::uint64_t prefill_tokens = 0;  // prompt tokens computed (not found in the cache)
    std::uint64_t cached_tokens = 0;   // prompt tokens found in the cache
    std::uint64_t decode_tokens = 0;
    std::uint64_t preemptions = 0;
};

// What a loader reports while it works: a fraction 0..1.
using Progress = std::function<void(double)>;

class Engine {
public:
    // Reads a model file, checks it, takes all memory. Error: one sentence naming file and place.
    static Result<Engine> load(const std::string& path, const EngineOptions& options, const Progress& progress = {});

    Engine(Engine&&) noexcept;
    Engine& operator=(Engine&&) noexcept;
    ~Engine();

    const ModelConfig& config() const;
    const Tokenizer&   tokenizer() const;
    EngineOptions      options() const;        // with the defaults filled in
    std::string        chat_template() const;  // tokenizer.chat_template, or ""
    std::string        describe() const;       // one line: device, instruction set, threads, blocks
    EngineStats        stats() const;

    // Any thread. The request is checked at once: the id, or why it can never run.
    Result<RequestId> submit(Request request);
    // Any thread. The request ends with reason `cancelled`, unless it has ended already.
    void cancel(RequestId id);

    // The owner's thread only. One iteration; false when nothing is left to do. New events are appended to `out`.
    bool step(std::vector<Output>& out);

private:
    struct Impl;
    explicit Engine(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

} // namespace quire
