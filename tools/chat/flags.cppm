// quire.tools.chat.flags: the flags of chat. Owns nothing.
export module quire.tools.chat.flags;

import quire.core.base;
import quire.engine.options;
import quire.engine.sampling_defaults;
import quire.tools.common.constraint_flags;
import quire.tools.common.engine_flags;
import quire.tools.common.model_source;
import quire.tools.common.sampler_flags;
import quire.tools.flags.cli;

export namespace quire {

struct ChatArguments {
    std::string                 model, prompt, prompt_file, system, now, color = "auto";
    ModelSource                 source;
    ChatTemplateFlags           chat_template;
    EngineOptions               engine;
    ConstraintFlags             constraint;
    std::shared_ptr<Constraint> answers; // the constraint of each answer, or null
    int                         n = -1;
    SamplerChoice               samplers;
    FlagGiven                   given; // which flags of samplers were
    int                         reasoning_budget = -1;
    bool                        trim = true, context_shift = false;
    std::int64_t                seed = -1;
    bool single_turn = false, ignore_eos = false, timings = false, no_timings = false, escapes = false;
    bool list_models = false;
};

void add_chat_flags(CLI::App& app, ChatArguments& a);

} // namespace quire

module :private;

namespace quire {

void add_chat_flags(CLI::App& app, ChatArguments& a) {
    add_model_flag(app, a.model);
    add_source_flags(app, a.source);
    app.add_flag("--models", a.list_models, "list the models on this machine, then leave");
    add_constraint_flags(app, a.constraint);
    auto* prompt =
        app.add_option("-p,--prompt", a.prompt, "the first message; a piped text follows it behind an empty line");
    app.add_option("-f,--file", a.prompt_file, "the same, from a file")->excludes(prompt);
    app.add_option("--system-prompt", a.system, "system message (short: -sys)");
    app.add_flag("--single-turn", a.single_turn, "one answer, then leave (also -st); a piped text is one message");
    app.add_flag("-e,--escape", a.escapes, "\\n, \\t and the like in -p and -sys mean what they do in C");
    app.add_option("-n,--predict,--n-predict", a.n, "most tokens in an answer; -1: until the context is full")
        ->check(
            [](const std::string& text) {
                return text == "-1" ? std::string() : out_of_bounds(text, 1, 1 << 24, "-1 or at least 1");
            },
            "-1 or at least 1")
        ->capture_default_str();
    add_number(app, "-c,--ctx-size", a.engine.context, 0, 1 << 24, "context length in tokens; 0: the model's");
    add_device_flags(app, a.engine);
    add_number(app, "-t,--threads", a.engine.threads, 0, 1024, "threads; 0: one per physical core");
    add_number(app, "-s,--seed", a.seed, -1, 0x1p63, "random seed; -1: a new one each time", "-1 or more");
    a.given = add_sampler_flags(app, a.samplers);
    add_number(app, "--reasoning-budget", a.reasoning_budget, -1, 1 << 30,
               "most tokens of reasoning in an answer; -1: no limit");
    app.add_flag("--trim-chats,!--no-trim-chats", a.trim,
                 "a conversation that is too long for the context loses its oldest messages (the default)");
    app.add_flag("--context-shift,!--no-context-shift", a.context_shift,
                 "when an answer fills the context, forget the middle of the text and go on");
    app.add_flag("--ignore-eos", a.ignore_eos, "continue after an end token");
    add_chat_template_flags(app, a.chat_template, a.now);
    add_block_size_flag(app, a.engine);
    add_number(app, "--kv-blocks", a.engine.kv_blocks, 0, 1 << 24, "number of KV blocks; 0: enough for a full context");
    add_cache_flags(app, a.engine);
    add_speculation_flags(app, a.engine);
    add_adapter_flags(app, a.engine);
    auto* timings =
        app.add_flag("--show-timings", a.timings, "print timings after each answer; the default on a terminal");
    app.add_flag("--no-show-timings", a.no_timings, "do not print timings")->excludes(timings);
    app.add_option("--color", a.color, "colours: auto, on, off; alone: on")
        ->check(CLI::IsMember({"auto", "on", "off"}))
        ->capture_default_str();
}

} // namespace quire
