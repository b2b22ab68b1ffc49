// bench: measures how fast the parts of quire are on this machine.
// Exit codes: 0, 1 (something cannot be measured: one line on stderr), 2 (wrong usage).

import quire.core.base;
import quire.core.output_file;
import quire.decode.drafting;
import quire.tools.bench.random_model;
import quire.tools.common.constraint_flags;
import quire.tools.common.engine_flags;
import quire.tools.common.foreign_flags;
import quire.tools.common.model_source;
import quire.tools.flags.cli;

#include "bench/commands.h"

using namespace quire;
using namespace quire::bench;

namespace {

int run(int argc, char** argv) {
    CLI::App app{"Measures the parts of quire on this machine.", "bench"};
    app.require_subcommand(1);
    add_version_flag(app);
    int       repetitions = 20;
    bool      json        = false;
    CLI::App* blocks_command =
        app.add_subcommand("blocks", "scheduler, block tables and prefix cache, without a model");
    add_number(*blocks_command, "-r,--repetitions", repetitions, 1, 10'000, "repetitions of each line");
    blocks_command->add_flag("--json", json, "print JSON instead of a Markdown table");
    CLI::App* windows_command =
        app.add_subcommand("windows", "KV memory of models whose layers see different windows, without a model");
    windows_command->add_flag("--json", json, "print JSON instead of a Markdown table");
    Arguments   a;
    ModelSource source;
    const auto  model_options = [&](CLI::App* c) {
        c->add_option("-m,--model", a.model, "GGUF file");
        add_source_flags(*c, source);
        add_device_flags(*c, a.engine);
        add_kv_type_flag(*c, a.engine);
        c->add_option("-t,--threads", a.engine.threads, "threads; 0: one per physical core")->check(within(0, 1024));
        c->add_option("--isa", a.engine.isa, "instruction set; default: the best this CPU has")
            ->check(CLI::IsMember({"plain", "avx2", "avxvnni", "avx512", "avx512gfni", "amx"}));
        c->add_option("-b,--batch-size", a.batch_tokens,
                       "most tokens in a step; 0: 2048 or 4096 on a GPU, 256 on a CPU")
            ->check(within(0, 1 << 20));
        c->add_option("--kv-blocks", a.kv_blocks, "number of KV blocks; 0: as many as needed")
            ->check(within(0, 1 << 24));
        c->add_option("--pipeline", a.engine.pipeline,
                       "on or off: start the next step before the last one's outputs are processed");
        c->add_option("--bandwidth", a.bandwidth,
                       "this machine's memory bandwidth in GB/s, to print the fraction of the limit");
        c->add_option("--tflops", a.tflops, "this machine's TFLOP/s, to print the fraction of the limit");
        c->add_flag("--json", a.json, "print JSON instead of a Markdown table");
        return c;
    };
    CLI::App* model_command =
        model_options(app.add_subcommand("model", "prefill and decode of one sequence, like llama-bench"));
    // A list is one word, with commas: the word behind it may be the file.
    const auto one_word = [](CLI::Option* option) { return option->delimiter(',')->allow_extra_args(false); };
    one_word(model_command->add_option("-p,--n-prompt", a.pp))->check(within(0, 1 << 20));
    one_word(model_command->add_option("-n,--n-gen", a.tg))->check(within(0, 1 << 20));
    model_command->add_option("-d,--n-depth", a.depth, "tokens of context before the generated ones")
        ->check(within(0, 1 << 20));
    add_number(*model_command, "-r,--repetitions", a.repetitions, 1, 1000);
    model_command->add_flag("--no-warmup", a.no_warmup, "measure the first run, too");
    model_command->add_flag("--explain", a.explain,
                            "print the model's program and the kernels chosen for each kind of step, then exit");
    model_command->add_flag("!--no-fusion", a.engine.fusion, "on a GPU: run every operation in a kernel of its own");
    CLI::App* batched_command =
        model_options(app.add_subcommand("batched", "many sequences at once, like llama-batched-bench"));
    add_number(*batched_command, "--npp", a.npp, 1, 1 << 20, "tokens in each prompt");
    add_number(*batched_command, "--ntg", a.ntg, 1, 1 << 20, "tokens generated for each sequence");
    batched_command->add_flag("--pps", a.prompt_shared, "one prompt, shared by all sequences");
    one_word(batched_command->add_option("--npl", a.npl, "numbers of sequences"))->check(within(1, 4096));
    add_constraint_flags(*batched_command, a.constraint);
    batched_command->add_flag("--no-fast-forward", a.no_fast_forward,
                              "sample also those tokens that the constraint leaves no choice about");
    add_number(*batched_command, "--rounds", a.rounds, 1, 100,
               "under a constraint: of the two by turns; the middle one counts");
    Arguments side; // of compare: sizes for three rounds in about two minutes
    side.repetitions = 1, side.npp = 8, side.ntg = 16, side.npl = {8, 32};
    CLI::App* compare_command =
        app.add_subcommand("compare", "quire and llama.cpp on the CPU, alternating, with the range of the ratios");
    compare_command->add_option("-m,--model,FILE", side.model, "GGUF file")->required()->check(existing_file());
    compare_command->add_option("--llama-bench", side.llama_bench, "path of llama-bench")
        ->required()
        ->check(existing_file());
    compare_command
        ->add_option("--llama-batched-bench", side.llama_batched_bench,
                     "path of llama-batched-bench; default: next to llama-bench")
        ->check(existing_file());
    compare_command->add_option("-t,--threads", side.engine.threads, "threads; 0: one per physical core")
        ->check(within(0, 1024));
    compare_command->add_option("--isa", side.engine.isa, "instruction set; default: the best this CPU has")
        ->check(CLI::IsMember({"plain", "avx2", "avxvnni", "avx512", "avx512gfni", "amx"}));
    one_word(compare_command->add_option("-p,--n-prompt", side.pp))->check(within(1, 1 << 20));
    one_word(compare_command->add_option("-n,--n-gen", side.tg))->check(within(1, 1 << 20));
    add_number(*compare_command, "-r,--repetitions", side.repetitions, 1, 1000, "repetitions of each test in a round");
    add_number(*compare_command, "--npp", side.npp, 1, 1 << 20, "tokens in each prompt of a batch");
    add_number(*compare_command, "--ntg", side.ntg, 1, 1 << 20, "tokens generated for each sequence of a batch");
    one_word(compare_command->add_option("--npl", side.npl, "numbers of sequences; 0: no batches"))
        ->check(within(0, 4096));
    add_number(*compare_command, "--rounds", side.rounds, 1, 100);
    CLI::App* throughput_command =
        model_options(app.add_subcommand("throughput", "many requests of different lengths, without a server"));
    add_number(*throughput_command, "--requests", a.n_requests, 1, 1'000'000);
    throughput_command->add_option("--lengths", a.lengths, "JSON lines {\"prompt\": n, \"output\": n}");
    throughput_command
        ->add_option("--system", a.system,
                     "who gives out KV memory: blocks on demand, or contiguous chunks as the paper's other systems do")
        ->check(CLI::IsMember({"quire", "orca-max", "orca-pow2", "orca-oracle", "faster-transformer"}))
        ->capture_default_str();
    add_number(*throughput_command, "--max-sequences", a.max_sequences, 0, 4096,
               "most sequences at once; 0: as many as the server's");
    CLI::App* kernel_command = app.add_subcommand("kernel", "single GPU kernels");
    kernel_command->add_option("--only", a.only,
                               "kernels whose name begins so: gemv, skinny GEMM, cuBLASLt, decode, prefill attention, "
                               "prefill GEMM, layer kernel, norm, swiglu, rope, copy, argmax, sample");
    kernel_command->add_option("--bandwidth", a.bandwidth, "memory bandwidth in GB/s; default 4300");
    kernel_command->add_option("--tflops", a.tflops, "TFLOP/s; default 790");
    CLI::App* make_command = app.add_subcommand("make-model", "write a model file with random weights");
    make_command->add_option("--shape", a.shape, shape_names())->capture_default_str();
    make_command->add_option("--type", a.type, "f32, f16, bf16, q4_0, q8_0, q4_k, q5_k, q6_k, mxfp4")
        ->capture_default_str();
    make_command->add_option("--layers", a.layers, "number of layers; default: the shape's")->check(within(1, 1000));
    make_command
        ->add_option("--vocabulary", a.vocabulary,
                     "GGUF file whose tokenizer it gets; default: words without a meaning")
        ->check(existing_file());
    make_command->add_option("--mtp", a.mtp, "layers for multi-token prediction behind these; default: none")
        ->check(within(0, 4));
    make_command->add_flag("--eagle3", a.eagle,
                           "not the model, but a draft of EAGLE-3 for it, which guesses right where it is --counting");
    make_command->add_flag("--counting", a.counts,
                           "token t + 1 follows token t whatever was before: answers that do not depend on rounding");
    make_command->add_option("-o,--out", a.out, "GGUF file")->required();
    QualityArguments quality_arguments;
    CLI::App*        quality_command =
        app.add_subcommand("quality", "what types of the KV cache, or other weights, change in a model's predictions");
    quality_command->add_option("-m,--model", quality_arguments.model, "GGUF file");
    add_source_flags(*quality_command, source);
    add_device_flags(*quality_command, quality_arguments.engine);
    add_number(*quality_command, "-t,--threads", quality_arguments.engine.threads, 0, 1024,
               "threads; 0: one per physical core");
    quality_command->add_option("--text", quality_arguments.text, "a text to predict; default: one about quire")
        ->check(existing_file());
    quality_command
        ->add_option("--against", quality_arguments.against,
                     "the GGUF file of other weights to compare with, instead of types of the KV cache")
        ->check(existing_file());
    quality_command->add_option("--reference", quality_arguments.reference, "the type of the KV cache to compare with")
        ->check(CLI::IsMember({"f32", "f16"}))
        ->capture_default_str();
    add_kv_type_flag(*quality_command, quality_arguments.engine);
    add_number(*quality_command, "--tokens", quality_arguments.tokens, 2, 1 << 20, "of the text, at most");
    add_number(*quality_command, "-c,--ctx-size", quality_arguments.window, 3, 1 << 20,
               "tokens of a window, which is predicted from its beginning");
    quality_command->add_flag("--json", quality_arguments.json, "print JSON instead of a Markdown table");
    SpeculateArguments speculation;
    CLI::App*          speculate_command =
        app.add_subcommand("speculate", "decoding with draft tokens beside decoding without, by turns");
    speculate_command->add_option("-m,--model,FILE", speculation.model, "GGUF file")->required();
    add_device_flags(*speculate_command, speculation.engine);
    add_number(*speculate_command, "-t,--threads", speculation.engine.threads, 0, 1024,
               "threads; 0: one per physical core");
    one_word(
        speculate_command->add_option("--acceptance", speculation.acceptance,
                                      "guess from recorded answers, so that this part of the guessed tokens is right"))
        ->check(within(0.0, 1.0));
    one_word(speculate_command->add_option("--text", speculation.texts,
                                           "files with a prompt each, whose answers n-grams guess instead"))
        ->check(existing_file());
    add_guesser_flags(*speculate_command, speculation.engine);
    add_number(*speculate_command, "-k,--spec-draft-n-max", speculation.engine.drafts.most, 1, most_drafts,
               "most draft tokens of a sequence in a step");
    one_word(speculate_command->add_option("--npl", speculation.npl, "numbers of sequences"))->check(within(1, 1024));
    add_number(*speculate_command, "-p,--n-prompt", speculation.n_prompt, 1, 1 << 20, "tokens in each random prompt");
    add_number(*speculate_command, "-n,--n-gen", speculation.n_tokens, 3, 1 << 20, "tokens in each answer");
    add_number(*speculate_command, "--rounds", speculation.rounds, 1, 100,
               "of the two by turns; the middle one counts");
    add_number(*speculate_command, "--check", speculation.check, 1, 1 << 24,
               "instead of a measurement: so many random requests of all methods, or a few more, which guesses of all "
               "kinds must not change");
    speculate_command->add_flag("--processor-time", speculation.processor_time,
                                "measure the processor's time of one thread, for a machine that has other work");
    speculate_command->add_flag("--json", speculation.json, "print JSON instead of a Markdown table");
    ServeArguments serving;
    CLI::App*      serve_command = app.add_subcommand("serve", "a server under load, like `vllm bench serve`");
    add_serve_flags(serve_command, serving);
    ReplicasArguments replicas_arguments;
    CLI::App*         replicas_command =
        app.add_subcommand("replicas", "many servers behind a router, by policy, simulated or measured");
    add_replicas_flags(replicas_command, replicas_arguments);
    ChatsArguments chats_arguments;
    CLI::App*      chats_command = app.add_subcommand(
        "chats",
        "chats of many users that the device has no room for, with and without host memory and files behind it");
    add_chats_flags(chats_command, chats_arguments);
    PaperArguments paper_arguments;
    CLI::App*      paper_command =
        app.add_subcommand("paper", "the figures of the paper, in simulated time or on this machine's engine");
    add_paper_flags(paper_command, paper_arguments);
    const std::vector<std::string> typed(argv + 1, argv + argc);
    const OwnFlag                  own   = flags_of_command(app, typed);
    Result<TranslatedFlags>        flags = translate_flags(Program::bench, typed, own);
    if (!flags) {
        std::fprintf(stderr, "bench: %s\n", flags.error().message.c_str());
        return 2;
    }
    try {
        app.parse(std::vector<std::string>(flags->words.rbegin(), flags->words.rend()));
    } catch (const CLI::ParseError& e) {
        return exit_code_of(app, e, "bench",
                            [&](const std::string& word) { return meant_flag(Program::bench, word, own); });
    }
    if (!flags->note.empty()) std::fprintf(stderr, "bench: %s\n", flags->note.c_str());
    for (const auto& [command, file] :
         {std::pair{model_command, &a.model}, std::pair{batched_command, &a.model},
          std::pair{throughput_command, &a.model}, std::pair{quality_command, &quality_arguments.model}}) {
        if (!command->parsed()) continue;
        if (const std::optional<int> code = find_model("bench", source, *file)) return *code;
        if (!file->empty()) continue;
        std::fprintf(stderr, "bench: name a model with -m FILE, or fetch one with -hf USER/MODEL\n");
        return 2;
    }
    if (model_command->parsed()) return model(a);
    if (batched_command->parsed()) return batched(a);
    if (compare_command->parsed()) return compare(side);
    if (throughput_command->parsed()) return throughput(a);
    if (kernel_command->parsed()) return kernels(a);
    if (serve_command->parsed()) return serve(std::move(serving));
    if (replicas_command->parsed()) return replicas(replicas_arguments);
    if (chats_command->parsed()) return chats(chats_arguments);
    if (paper_command->parsed()) return paper(std::move(paper_arguments));
    if (quality_command->parsed()) return quality(quality_arguments);
    if (speculate_command->parsed()) return speculation.check > 0 ? check_drafts(speculation) : speculate(speculation);
    if (make_command->parsed()) return make_model(a);
    if (windows_command->parsed()) return windows(json);
    return blocks(repetitions, json);
}

} // namespace

int main(int argc, char** argv) {
    try {
        const int  code = run(argc, argv);
        const auto ok   = flush_output();
        return ok ? code : complain(ok.error());
    } catch (const std::bad_alloc&) {
        return out_of_memory("bench");
    } catch (const std::runtime_error& e) { // a GPU is lost
        return complain({ErrorKind::system, e.what()});
    }
}
