// block-viz: shows the KV memory of a run: block tables, reference counts, sharing, copies, swaps; as text, JSON or a page.
// Exit codes: 0, 1 (something cannot be used: one line on stderr), 2 (wrong usage).
#include <httplib.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>
#include <cerrno>
#include <cstring>

import quire.core.base;
import quire.core.output_file;
import quire.engine.engine;
import quire.schedule.scheduler;
import quire.serve.status.snapshot_json;
import quire.text.templates.chat_template;
import quire.tools.flags.cli;
import quire.tools.viz.block_view;
import quire.tools.viz.walkthroughs;

using namespace quire;

namespace {

struct Arguments {
    std::string model, trace_file, url, html_file, record_file, demo, color = "auto", recovery = "auto", pin, pin_file;
    std::vector<std::string> prompts;
    std::vector<int>         priorities;
    bool                     json = false, all = false, no_cache = false, ignore_eos = false, raw = false;
    int step = 0, n_tokens = 32, n = 1, best_of = 0, beam = 0, block_size = 16, kv_blocks = 64, swap_blocks = -1,
        max_sequences = 16, threads = 0;
    float         temperature = 0.8f;
    std::uint64_t seed        = 0;
};

int complain(const std::string& message) {
    std::fprintf(stderr, "block-viz: %s\n", message.c_str());
    return 1;
}

Result<std::string> read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::string   text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    if (!file && text.empty()) return fail("cannot read ", quote(path), ": ", std::strerror(errno));
    return text;
}

// -: standard output.
Result<void> put(const std::string& path, const std::string& text) {
    if (path == "-") {
        std::fwrite(text.data(), 1, text.size(), stdout);
        return {};
    }
    return write_file(path, text);
}

// The model that ships, beside the program or above it.
Result<std::string> shipped_model() {
    std::error_code             error;
    const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
    const std::string           name = "models/quire-14m-q8_0.gguf";
    for (std::filesystem::path folder = self.parent_path(); !error && folder.has_relative_path();
         folder                       = folder.parent_path())
        if (std::filesystem::exists(folder / name, error)) return (folder / name).string();
    return fail("no model: name one with -m FILE.gguf or put ", std::filesystem::path(name).filename().string(),
                " into ", (self.parent_path() / "models").string());
}

// -- where a trace comes from

Result<Trace> from_file(const Arguments& a) {
    Result<std::string> text = read_file(a.trace_file);
    if (!text) return std::unexpected(text.error());
    Result<Trace> trace = parse_trace(*text);
    if (!trace) return fail(a.trace_file, ": ", trace.error().message);
    return trace;
}

// Why HOST:PORT does not answer: httplib gives no reason, so this connects once more to get the error from the system.
std::string connection_fault(const std::string& where) {
    const std::size_t colon = where.find(':', where.rfind(']') == std::string::npos ? 0 : where.rfind(']'));
    std::string       host = where.substr(0, colon), port = colon == std::string::npos ? "80" : where.substr(colon + 1);
    if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (const int fault = getaddrinfo(host.c_str(), port.c_str(), &hints, &found); fault != 0)
        return cat("no address for ", where, ": ", gai_strerror(fault));
    const int socket = ::socket(found->ai_family, SOCK_STREAM, 0);
    const int reason = ::connect(socket, found->ai_addr, found->ai_addrlen) == 0 ? 0 : errno;
    close(socket);
    freeaddrinfo(found);
    if (reason == ECONNREFUSED) return cat("connection refused: nothing listens on ", where);
    return cat("cannot connect to ", where, reason != 0 ? cat(": ", std::strerror(reason)) : std::string());
}

Result<Trace> from_server(const Arguments& a) {
    const std::size_t scheme = a.url.find("://"), slash = a.url.find('/', scheme == std::string::npos ? 0 : scheme + 3);
    if (a.url.substr(0, 7) != "http://") return fail("--url ", quote(a.url), " does not begin with http://");
    httplib::Client client(a.url.substr(0, slash));
    client.set_connection_timeout(5);
    client.set_read_timeout(10);
    std::string       body;
    constexpr auto    most = std::size_t(256) << 20;
    const std::string base =
        slash == std::string::npos ? "" : a.url.substr(slash, a.url.find_last_not_of('/') + 1 - slash);
    const auto response = client.Get(base + "/blocks", [&](const char* data, std::size_t n) {
        body.append(data, n);
        return body.size() <= most;
    });
    if (!response && response.error() == httplib::Error::Connection)
        return fail_with(ErrorKind::system, a.url, ": ", connection_fault(a.url.substr(7, slash - 7)));
    if (!response) return fail_with(ErrorKind::system, a.url, ": ", httplib::to_string(response.error()));
    if (response->status != 200) return fail(a.url, "/blocks answers with status ", response->status);
    Result<Trace> trace = parse_trace(body);
    if (!trace) return fail(a.url, "/blocks: ", trace.error().message);
    trace->model = trace->model.empty() ? a.url : trace->model;
    return trace;
}

// Runs the prompts together on an engine of their own and records every step; the answers go to standard error.
Result<Trace> from_engine(const Arguments& a) {
    EngineOptions o;
    o.block_size          = a.block_size;
    o.kv_blocks           = a.kv_blocks;
    o.swap_blocks         = a.swap_blocks;
    o.max_sequences       = a.max_sequences;
    o.threads             = a.threads;
    o.prefix_cache        = !a.no_cache;
    o.preemption_mode     = a.recovery == "swap"        ? PreemptionMode::swap
                            : a.recovery == "recompute" ? PreemptionMode::recompute
                                                        : PreemptionMode::automatic;
    o.pipeline            = false; // no step may run while a snapshot is taken
    Result<Engine> engine = Engine::load(a.model, o);
    if (!engine) return std::unexpected(engine.error());
    const Tokenizer& tokenizer = engine->tokenizer();
    const auto       encode    = [&](const std::string& text) { return tokenizer.encode(text); };
    // A prompt becomes a user message in the model's chat template, unless the file has none or a prefix is pinned.
    const std::string          jinja  = engine->chat_template();
    const Result<ChatTemplate> chosen = ChatTemplate::parse(jinja, "the file's");
    const auto                 ask    = [&](const std::string& text) -> Result<std::vector<Token>> {
        if (jinja.empty() || a.raw || !a.pin.empty() || !a.pin_file.empty()) return encode(text);
        if (!chosen) return std::unexpected(chosen.error());
        ChatSurroundings around;
        if (tokenizer.bos() >= 0) around.bos_token = tokenizer.piece(tokenizer.bos());
        if (tokenizer.eos() >= 0) around.eos_token = tokenizer.piece(tokenizer.eos());
        around.now = local_seconds("").value_or(0);
        ChatInput input;
        input.messages.push_back(Json{{"role", "user"}, {"content", text}});
        const Result<MarkedText> rendered = chosen->render(input, around);
        if (!rendered) return std::unexpected(rendered.error());
        std::vector<Token> ids = tokenizer.encode(
            rendered->bytes, {.add_special = false, .parse_special = true, .no_special = rendered->input});
        if (tokenizer.adds_bos() && tokenizer.bos() >= 0 && (ids.empty() || ids[0] != tokenizer.bos()))
            ids.insert(ids.begin(), tokenizer.bos());
        return ids;
    };

    Trace      trace;
    const auto play = [&](std::vector<Output>* out) {
        Trace part = record(*engine, {}, out);
        trace.steps.insert(trace.steps.end(), std::make_move_iterator(part.steps.begin()),
                           std::make_move_iterator(part.steps.end()));
    };
    std::string prefix = a.pin;
    if (!a.pin_file.empty()) {
        Result<std::string> text = read_file(a.pin_file);
        if (!text) return std::unexpected(text.error());
        prefix = *text;
    }
    std::vector<Output> events;
    if (!prefix.empty()) {
        Request pin;
        pin.prompt = encode(prefix);
        pin.pin    = true;
        if (Result<RequestId> id = engine->submit(std::move(pin)); !id) return std::unexpected(id.error());
        play(&events);
        events.clear();
    }
    for (std::size_t i = 0; i < a.prompts.size(); i++) {
        Request                    r;
        Result<std::vector<Token>> ids = ask(prefix + a.prompts[i]);
        if (!ids) return std::unexpected(ids.error());
        r.prompt               = std::move(*ids);
        r.max_tokens           = a.n_tokens;
        r.ignore_end           = a.ignore_eos;
        r.n                    = a.n;
        r.best_of              = a.best_of;
        r.beam_width           = a.beam;
        r.priority             = i < a.priorities.size() ? a.priorities[i] : 0;
        r.sampling.temperature = a.temperature;
        r.sampling.seed        = a.seed;
        if (Result<RequestId> id = engine->submit(std::move(r)); !id)
            return fail("prompt ", i + 1, ": ", id.error().message);
    }
    play(&events);

    std::map<std::pair<RequestId, int>, std::vector<Token>> answers;
    for (const Output& e : events) {
        std::vector<Token>& tokens = answers[{e.id, e.index}];
        tokens.insert(tokens.end(), e.tokens.begin(), e.tokens.end());
        if (!e.message.empty()) return fail("request ", e.id, ": ", e.message);
    }
    for (const auto& [who, tokens] : answers)
        std::fprintf(stderr, "request %llu.%d: %s\n", static_cast<unsigned long long>(who.first), who.second + 1,
                     engine->tokenizer().decode(tokens).c_str());
    trace.model = std::filesystem::path(a.model).filename().string();
    trace.title = a.prompts.size() == 1 ? "One request" : cat(a.prompts.size(), " requests");
    return trace;
}

// -- the outputs of a run

int show(const Arguments& a, const Trace& trace, bool whole) {
    if (trace.steps.empty()) return complain("nothing was run, so there is nothing to show");
    if (a.step > int(trace.steps.size()))
        return complain(cat("--step ", a.step, ", but there are ", trace.steps.size(), " steps"));
    if (!a.record_file.empty())
        if (auto ok = put(a.record_file, to_jsonl(trace)); !ok) return complain(ok.error().message);
    if (!a.html_file.empty()) {
        if (auto ok = put(a.html_file, to_html(trace)); !ok) return complain(ok.error().message);
        if (!a.json) return 0;
    }
    const bool  color = a.color == "on" || (a.color == "auto" && isatty(1) && !std::getenv("NO_COLOR"));
    std::size_t first = 0, last = trace.steps.size();
    if (a.step > 0) first = std::size_t(a.step) - 1, last = first + 1;
    else if (!whole && !a.all) {
        // The step to show by default: the last one in which a sequence holds blocks.
        for (std::size_t i = 0; i < trace.steps.size(); i++)
            if (totals(trace.steps[i]).used > 0) first = i;
        last = first + 1;
    }
    if (!a.json && whole && !trace.title.empty())
        std::printf("\n%s%s%s\n\n", color ? "\x1b[1;4m" : "== ", trace.title.c_str(), color ? "\x1b[0m" : " ==");
    for (std::size_t i = first; i < last; i++) {
        const Snapshot& s = trace.steps[i];
        if (a.json) std::printf("%s\n", json_dump(to_json(s)).c_str());
        else if (!whole || !s.label.empty() || a.all) std::printf("%s\n", to_text(s, color).c_str());
    }
    if (!a.json && !whole) std::printf("%s", text_legend().c_str());
    return 0;
}

// Plays all walk-throughs, or the one named; --html writes them into one page.
int demo(const Arguments& a) {
    Trace all;
    if (a.html_file.empty() && a.record_file.empty() && !a.json && a.step == 0)
        std::printf("%s", text_legend().c_str());
    for (const Walkthrough& w : walkthroughs()) {
        if (a.demo != "all" && a.demo != w.name) continue;
        Result<Trace> trace = play(w.name, a.model);
        if (!trace) return complain(trace.error().message);
        if (a.html_file.empty() && a.record_file.empty()) {
            if (const int code = show(a, *trace, a.step == 0); code != 0) return code;
            continue;
        }
        // One page plays them all: the title of each stands before its sentences.
        for (Snapshot& s : trace->steps) all.steps.push_back(std::move(s));
        Snapshot& begin = all.steps[all.steps.size() - trace->steps.size()];
        if (a.demo == "all") begin.label = cat(w.title, ". ", begin.label);
        all.model = trace->model;
        all.title = a.demo == "all" ? "PagedAttention, step by step" : trace->title;
    }
    return a.html_file.empty() && a.record_file.empty() ? 0 : show(a, all, false);
}

int run(int argc, char** argv) {
    Arguments a;
    CLI::App  app{
        "Shows the KV memory: block tables, sharing, copies, swaps.\n"
         "  block-viz -m MODEL -p PROMPT [-p PROMPT …]   runs the prompts together\n"
         "  block-viz --demo                             plays the examples of the documents",
        "block-viz"};
    add_version_flag(app);
    app.add_option("-m,--model", a.model, "GGUF file; default: the toy model");
    app.add_option("-p,--prompt", a.prompts, "prompt of a request; give several to run them together");
    app.add_option("--trace", a.trace_file, "show the run that --record wrote to this file");
    app.add_option("--url", a.url, "show a running server: http://HOST:PORT");
    app.add_option("--demo", a.demo, "play all worked examples, or one of fig6, fig8, fig9, lesson, swap")
        ->expected(0, 1)
        ->default_str("all")
        ->check(CLI::IsMember({"all", "fig6", "fig8", "fig9", "lesson", "swap"}));
    app.add_flag("--json", a.json, "print one line of JSON for each step");
    app.add_option("--html", a.html_file, "write the run as one self-contained web page; -: to standard output");
    app.add_option("--record", a.record_file, "write the run as a trace");
    app.add_option("--step", a.step, "show this step, counted from 1; default: the last one that uses blocks")
        ->check(within(1, 100'000));
    app.add_flag("--all", a.all, "show every step");
    app.add_option("--color", a.color, "colours; auto: on a terminal")
        ->check(CLI::IsMember({"auto", "on", "off"}))
        ->capture_default_str();
    app.add_option("-n,--tokens", a.n_tokens, "tokens to generate")->check(within(1, 1 << 20))->capture_default_str();
    app.add_option("--answers", a.n, "answers to each request")->check(within(1, 1024))->capture_default_str();
    app.add_option("--best-of", a.best_of, "answers to sample; the best ones are returned")->check(within(0, 1024));
    app.add_option("--beam", a.beam, "beam search of this width")->check(within(0, 1024));
    app.add_option("--temp", a.temperature)->check(within(0.0, 100.0))->capture_default_str();
    app.add_option("-s,--seed", a.seed, "random seed")->capture_default_str();
    app.add_option("--priority", a.priorities, "priority of each prompt; lower runs first");
    app.add_option("--pin", a.pin, "a prefix of all prompts, to be pinned");
    app.add_option("--pin-file", a.pin_file, "the same, from a file")->excludes("--pin");
    app.add_option("--block-size", a.block_size, "tokens in a block")->check(within(1, 256))->capture_default_str();
    app.add_option("--kv-blocks", a.kv_blocks, "blocks in the pool")->check(within(1, 1 << 20))->capture_default_str();
    app.add_option("--swap-blocks", a.swap_blocks, "blocks in the swap pool; -1: as many as KV blocks")
        ->check(within(-1, 1 << 20));
    app.add_option("--max-sequences", a.max_sequences, "most sequences at once")
        ->check(within(1, 1024))
        ->capture_default_str();
    app.add_option("--recovery", a.recovery, "how preempted requests get their KV back")
        ->check(CLI::IsMember({"auto", "swap", "recompute"}))
        ->capture_default_str();
    app.add_flag("--no-prefix-cache", a.no_cache, "do not reuse KV between requests");
    app.add_flag("--ignore-eos", a.ignore_eos, "continue after an end token");
    app.add_flag("--raw", a.raw, "use prompts unchanged, without the model's chat template");
    app.add_option("-t,--threads", a.threads, "threads; 0: one per physical core")->check(within(0, 1024));
    try {
        parse_words(app, argc, argv);
        if (app.count("--demo") > 0 && a.demo.empty()) a.demo = "all";
        const int sources = !a.prompts.empty() + !a.trace_file.empty() + !a.url.empty() + !a.demo.empty();
        if (sources != 1) throw CLI::ValidationError("give one of -p, --trace, --url or --demo");
    } catch (const CLI::ParseError& e) {
        return exit_code_of(app, e, "block-viz");
    }
    if (a.model.empty() && (!a.prompts.empty() || !a.demo.empty())) {
        Result<std::string> found = shipped_model();
        if (!found) return complain(found.error().message);
        a.model = *found;
    }
    std::vector<std::string> inputs = Gguf::files(a.model);
    inputs.insert(inputs.end(), {a.trace_file, a.pin_file});
    for (const std::string& output : {a.html_file, a.record_file})
        if (auto ok = check_not_input(output, inputs); !ok) return complain(ok.error().message);
    if (!a.demo.empty()) return demo(a);
    Result<Trace> trace = !a.trace_file.empty() ? from_file(a) : !a.url.empty() ? from_server(a) : from_engine(a);
    if (!trace) return complain(trace.error().message);
    return show(a, *trace, false);
}

} // namespace

int main(int argc, char** argv) try {
    const int  code = run(argc, argv);
    const auto ok   = flush_output();
    return ok ? code : complain(ok.error().message);
} catch (const std::bad_alloc&) {
    return out_of_memory("block-viz");
}
