// server: an OpenAI-compatible endpoint for many users of one engine.
// Exit codes: 0, 1 (a model, address or file that cannot be used: one line on stderr; or a second signal), 2 (wrong usage).
#include <CLI/CLI.hpp>

#include <sys/resource.h>
#include <unistd.h>
#include <csignal>
#include <ctime>

import quire.base;
import quire.chat_template;
import quire.config;
import quire.endpoints;
import quire.engine;
import quire.foreign_flags;
import quire.http;
import quire.json;
import quire.openai;
import quire.service;
import quire.std;
import quire.terminal;
import quire.tokenizer;

using namespace quire;

namespace {

struct Arguments {
    std::string model, host = "127.0.0.1", unix_path, aliases, form_name, kv_type = "f16", key_file, cors, log_file;
    std::vector<std::string> keys, pin_files, pins;
    int                      port = 8080, drain_seconds = 30, max_queue = 1024, max_pinned = 0;
    bool                     log_json = false, no_log = false, no_prefix_cache = false;
    double                   ping_seconds = 15, watchdog_seconds = 60;
    EngineOptions            engine;
    EndpointOptions          endpoints;
    HttpOptions              http;
};

int complain(const Error& error) {
    std::fprintf(stderr, "server: %s\n", error.message.c_str());
    return 1;
}

// Without -m: the first models/*.gguf beside the program.
Result<std::string> default_model() {
    std::error_code             error;
    const std::filesystem::path folder =
        std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / "models";
    std::vector<std::string> found;
    for (std::filesystem::directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
        if (at->path().extension() == ".gguf") found.push_back(at->path().string());
    if (found.empty()) return fail("no model: name one with -m FILE.gguf or put one into ", folder.string());
    return *std::ranges::min_element(found);
}

Result<std::string> read_file(const std::string& path) {
    constexpr std::size_t most = std::size_t(16) << 20;
    std::ifstream         file(path, std::ios::binary);
    if (!file || !std::filesystem::is_regular_file(path))
        return fail_with(ErrorKind::system, "cannot read ", quote(path), ": no such file");
    if (std::filesystem::file_size(path) > most)
        return fail_with(ErrorKind::limit, quote(path), " has more than ", most >> 20, " MiB");
    return std::string(std::istreambuf_iterator<char>(file), {});
}

std::vector<std::string> split(const std::string& text, char at) {
    std::vector<std::string> parts;
    std::stringstream        stream(text);
    for (std::string part; std::getline(stream, part, at);) {
        while (!part.empty() && (part.back() == '\r' || part.back() == ' ')) part.pop_back();
        while (!part.empty() && part.front() == ' ') part.erase(0, 1);
        if (!part.empty()) parts.push_back(part);
    }
    return parts;
}

// -- the access log: one line for each request; no keys, no texts

std::string clock_text() {
    const std::time_t now = std::time(nullptr);
    std::tm           parts{};
    gmtime_r(&now, &parts);
    char text[32];
    std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
    return text;
}

// Only what keeps a line a line.
std::string printable(std::string_view text) {
    std::string out;
    for (char c : text.substr(0, 200)) out += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
    return out;
}

bool is_number(const std::string& text) {
    double     value  = 0;
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
    return result.ec == std::errc{} && result.ptr == text.data() + text.size();
}

void log_exchange(const HttpExchange& e, double seconds, std::size_t bytes, bool json) {
    const HttpRequest& r = e.request;
    std::string        line;
    if (json) {
        Json record{{"time", clock_text()}, {"id", r.id},     {"remote", r.remote},
                    {"method", r.method},   {"path", r.path}, {"status", e.response.status},
                    {"seconds", seconds},   {"bytes", bytes}};
        for (const auto& [key, value] : e.notes) {
            if (key == "unknown_field") record["unknown_fields"].push_back(value);
            else if (is_number(value)) record[key] = std::strtod(value.c_str(), nullptr);
            else record[key] = value;
        }
        line = json_dump(record);
    } else {
        char time[32];
        std::snprintf(time, sizeof time, "%.3f", seconds);
        line = cat(clock_text(), ' ', r.id.empty() ? "-" : r.id, ' ', r.remote, ' ', r.method.empty() ? "-" : r.method,
                   ' ', r.path.empty() ? "-" : printable(r.path), ' ', e.response.status, ' ',
                   static_cast<const char*>(time), "s");
        for (const auto& [key, value] : e.notes)
            line += cat(' ', key, '=', value.find(' ') == std::string::npos ? printable(value) : quote(value, 200));
    }
    std::fprintf(stdout, "%s\n", line.c_str());
    std::fflush(stdout);
}

// -- running

Result<std::vector<std::string>> api_keys(const Arguments& a) {
    std::vector<std::string> keys;
    for (const std::string& list : a.keys)
        for (std::string& key : split(list, ',')) keys.push_back(std::move(key));
    if (!a.key_file.empty()) {
        Result<std::string> text = read_file(a.key_file);
        if (!text) return std::unexpected(text.error());
        const std::size_t before = keys.size();
        for (std::string& key : split(*text, '\n')) keys.push_back(std::move(key));
        if (keys.size() == before) return fail(quote(a.key_file), " has no key in it");
    }
    if (!a.keys.empty() && keys.empty()) return fail("--api-key is empty");
    return keys;
}

bool is_loopback(const std::string& host) { return host == "localhost" || host == "::1" || host.starts_with("127."); }

// Every connection is a descriptor.
void raise_descriptors(int connections) {
    rlimit limit{};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
    limit.rlim_cur = std::min(limit.rlim_max, std::max<rlim_t>(limit.rlim_cur, rlim_t(connections) + 256));
    setrlimit(RLIMIT_NOFILE, &limit);
}

Result<void> pin_prefixes(const Arguments& a, Service& service) {
    std::vector<std::string> texts = a.pins;
    for (const std::string& path : a.pin_files) {
        Result<std::string> text = read_file(path);
        if (!text) return std::unexpected(text.error());
        texts.push_back(std::move(*text));
    }
    for (const std::string& text : texts) {
        const auto pin = service.pin(service.tokenizer().encode(text), "");
        if (!pin) return fail("a prefix to pin cannot be kept: ", pin.error().error.message);
    }
    return {};
}

// Signals come to one thread that waits for nothing else. Before the server serves, and from the second on, they end it.
class Signals {
public:
    Signals() {
        sigset_t set;
        sigemptyset(&set);
        sigaddset(&set, SIGTERM);
        sigaddset(&set, SIGINT);
        pthread_sigmask(SIG_BLOCK, &set, nullptr); // in all threads to come
        std::thread([set] {
            for (int n = 0;; n++) {
                int which = 0;
                sigwait(&set, &which);
                if (!serving_) _exit(128 + which);
                if (n > 0) _exit(1);
                came_ = true;
                came_.notify_all();
            }
        }).detach();
    }
    static void serving() { serving_ = true; }
    static void wait() { came_.wait(false); }

private:
    static inline std::atomic<bool> serving_ = false, came_ = false;
};

// Until the first signal; then no new requests, and until all that runs is over, or the time is up.
int serve(const Arguments& a, Service& service, HttpServer& http) {
    Signals::wait();
    std::fprintf(stderr, "server: shutting down; %d requests are still running\n", service.in_flight());
    service.drain();
    Stopwatch watch;
    bool      cancelled = false;
    while (service.in_flight() > 0 || http.n_answering() > 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        if (watch.seconds() > a.drain_seconds && !cancelled) {
            std::fprintf(stderr, "server: %d requests did not end in time\n", service.in_flight());
            service.cancel_all();
            cancelled = true;
        }
        if (watch.seconds() > a.drain_seconds + 2.0) break; // somebody does not read
    }
    return 0;
}

int run(Arguments& a) {
    const Signals signals; // before any other thread is there
    raise_descriptors(a.http.limits.connections);

    if (a.model.empty()) {
        Result<std::string> found = default_model();
        if (!found) return complain(found.error());
        a.model = *found;
    }
    Result<std::vector<std::string>> keys = api_keys(a);
    if (!keys) return complain(keys.error());

    EndpointOptions& options = a.endpoints;
    options.api_keys         = std::move(*keys);
    options.aliases          = split(a.aliases, ',');
    options.model_file       = std::filesystem::path(a.model).filename().string();
    options.cors_origins     = split(a.cors, ',');
    options.ping_seconds     = a.ping_seconds;
    if (options.aliases.empty()) options.aliases = {std::filesystem::path(a.model).stem().string()};

    a.engine.kv_type          = a.kv_type == "f32" ? KvType::f32 : KvType::f16;
    a.engine.prefix_cache     = !a.no_prefix_cache;
    const TerminalFacts facts = terminal_facts();
    ProgressBar         bar("loading", facts.err && !facts.dumb);
    Result<Engine>      engine = Engine::load(a.model, a.engine, [&](double fraction) { bar.show(fraction); });
    bar.clear();
    if (!engine) return complain(engine.error());
    const std::string jinja = engine->chat_template();
    if (const auto named = chat_form_named(a.form_name)) options.form = *named;
    else if (const auto exact = chat_form_detect(jinja)) options.form = *exact;
    else {
        options.form = chat_form_nearest(jinja);
        std::fprintf(stderr, "server: %s; using '%s' (--chat-template names another)\n",
                     jinja.empty() ? "the model has no chat template"
                                   : "the model's chat template is not one of the recognised forms",
                     std::string(chat_form_name(options.form)).c_str());
    }
    const std::string description = engine->describe();

    ServiceOptions queueing;
    queueing.max_queue        = a.max_queue;
    queueing.max_pinned       = a.max_pinned;
    queueing.watchdog_seconds = a.watchdog_seconds;
    Service service(std::move(*engine), queueing);
    if (auto ok = pin_prefixes(a, service); !ok) return complain(ok.error());

    a.http.refusal = [](int status, const std::string& message) {
        return error_body(ApiFault{status, message, "", ""});
    };
    if (!a.no_log)
        a.http.log = [json = a.log_json](const HttpExchange& e, double seconds, std::size_t bytes) {
            log_exchange(e, seconds, bytes, json);
        };
    options.local_only = is_loopback(a.host) && a.unix_path.empty() && !a.host.ends_with(".sock");
    Endpoints                           endpoints(service, options);
    Result<std::unique_ptr<HttpServer>> http = HttpServer::create(a.http);
    if (!http) return complain(http.error());
    endpoints.add_to(**http);

    std::string where;
    if (a.host.ends_with(".sock") && a.unix_path.empty()) a.unix_path = a.host; // as llama.cpp has it
    if (!a.unix_path.empty()) {
        if (auto ok = (*http)->listen_unix(a.unix_path); !ok) return complain(ok.error());
        where = cat("unix:", a.unix_path);
    }
    if (a.unix_path.empty() || (a.port != 8080 && !a.host.ends_with(".sock"))) {
        Result<int> port = (*http)->listen(a.host, a.port);
        if (!port) return complain(port.error());
        const bool six = a.host.find(':') != std::string::npos;
        where += cat(where.empty() ? "" : " and ", a.http.tls_cert.empty() ? "http://" : "https://", six ? "[" : "",
                     a.host, six ? "]" : "", ":", *port);
        if (!is_loopback(a.host) && options.api_keys.empty())
            std::fprintf(stderr,
                         "server: warning: %s can be reached from other machines, and there is no --api-key: anybody "
                         "who can connect may use it\n",
                         a.host.c_str());
    }
    (*http)->start();
    Signals::serving();
    std::fprintf(stderr, "server: %s\nserver: listening on %s\n", description.c_str(), where.c_str());
    const int code = serve(a, service, **http);
    (*http)->stop();
    return code;
}

CLI::Validator within(double least, double most) {
    return {[=](const std::string& text) {
                double     value = 0;
                const auto done  = std::from_chars(text.data(), text.data() + text.size(), value);
                return done.ec == std::errc{} && done.ptr == text.data() + text.size() && value >= least &&
                               value <= most
                           ? std::string()
                           : cat(quote(text), " is not a number in ", least, "..", most);
            },
            cat("in ", least, "..", most)};
}

void add_engine_flags(CLI::App& app, Arguments& a) {
    EngineOptions& o = a.engine;
    o.max_sequences  = 64;
    app.add_option("-m,--model", a.model, "GGUF file; the first of models/ beside this program by default");
    app.add_option("-a,--alias,--served-model-name", a.aliases,
                   "names of the model, with commas; the file's by default");
    app.add_option("-c,--ctx-size,--max-model-len", o.context, "longest sequence in tokens; 0: the model's")
        ->check(within(0, 1 << 24));
    app.add_option("-t,--threads", o.threads, "threads of the engine; 0: the physical cores")->check(within(0, 1024));
    app.add_option("--parallel,--max-num-seqs", o.max_sequences, "sequences that run at once (also -np)")
        ->check(within(1, 4096))
        ->capture_default_str();
    app.add_option("-b,--batch-size,--max-num-batched-tokens", o.max_batch_tokens,
                   "tokens of one step; by default 2048 on a GPU, 256 on a CPU")
        ->check(within(1, 1 << 20));
    app.add_option("--device", o.device, "where it runs: the GPU if there is one, or the CPU")
        ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
        ->capture_default_str();
    app.add_option("--gpu-memory-utilization", o.gpu_memory_utilization, "of the GPU's memory, weights and KV together")
        ->check(within(0.01, 1))
        ->capture_default_str();
    app.add_flag("--deterministic", o.deterministic, "on a GPU: the same bits in any batch");
    app.add_option("--pipeline", o.pipeline,
                   "on or off: a step begins before the last one's tokens are sent; by default on a GPU");
    app.add_option("--block-size", o.block_size, "tokens of a KV block")->check(within(1, 256))->capture_default_str();
    app.add_option("--kv-blocks,--num-gpu-blocks-override", o.kv_blocks, "KV blocks; 0: what there is room for")
        ->check(within(0, 1 << 24));
    app.add_option("--swap-blocks", o.swap_blocks, "blocks of the swap pool; -1: as many")->check(within(-1, 1 << 24));
    app.add_option("--kv-type", a.kv_type, "type of the KV cache")
        ->check(CLI::IsMember({"f16", "f32"}))
        ->capture_default_str();
    app.add_flag("--no-prefix-cache", a.no_prefix_cache, "compute every prompt from its beginning");
    app.add_option("--pin", a.pins, "a prefix whose KV is computed now and kept")->take_all();
    app.add_option("--pin-file", a.pin_files, "the same from a file")->take_all();
    app.add_option("--max-pinned-blocks", a.max_pinned, "KV blocks in pinned prefixes; 0: a quarter")
        ->check(within(0, 1 << 24));
    app.add_option("--chat-template", a.form_name,
                   "chatml, llama-2, llama-3, mistral, zephyr, gemma, phi-3 or plain; the file's by default")
        ->check(
            [](const std::string& name) {
                return chat_form_named(name)
                           ? std::string()
                           : cat(quote(name),
                                 " is not one of chatml, llama-2, llama-3, mistral, zephyr, gemma, phi-3, plain");
            },
            "NAME");
}

void add_server_flags(CLI::App& app, Arguments& a) {
    HttpLimits& h = a.http.limits;
    app.add_option("--host", a.host, "address to listen on; NAME.sock: a Unix socket")->capture_default_str();
    app.add_option("--port", a.port, "port; 0: any that is free")->check(within(0, 65535))->capture_default_str();
    app.add_option("--unix,--uds", a.unix_path, "listen on this Unix socket; with --port also on that");
    app.add_option("--api-key", a.keys, "keys that open this server, with commas")->take_all();
    app.add_option("--api-key-file", a.key_file, "a file of keys, one a line");
    app.add_option("--cors-origins", a.cors, "origins of pages that may read answers, with commas; *: all");
    app.add_option("--tls-cert,--ssl-cert-file", a.http.tls_cert, "certificate (PEM): speak TLS");
    app.add_option("--tls-key,--ssl-key-file", a.http.tls_key, "its key (PEM)");
    app.add_flag("!--no-pages", a.endpoints.pages, "no chat page at / and no /blocks.html");
    app.add_flag("--log-json", a.log_json, "the access log as JSON lines");
    app.add_flag("--no-log", a.no_log, "no access log");
    app.add_option("--max-queue", a.max_queue, "requests that may wait beside those that run: 429 beyond")
        ->check(within(0, 1 << 20))
        ->capture_default_str();
    app.add_option("--max-connections", h.connections, "connections at once")
        ->check(within(1, 1 << 20))
        ->capture_default_str();
    app.add_option("--threads-http", h.threads, "requests that are answered at once")
        ->check(within(1, 1 << 16))
        ->capture_default_str();
    app.add_option("--max-body", h.body_bytes, "bytes of a request's body")
        ->check(within(1, 1e10))
        ->capture_default_str();
    app.add_option("--max-buffered", h.buffered_bytes, "bytes of all requests that are still coming in")
        ->check(within(1, 1e12))
        ->capture_default_str();
    app.add_option("--max-header-bytes", h.head_bytes, "bytes of a request's line and headers")
        ->check(within(64, 1 << 24))
        ->capture_default_str();
    app.add_option("--max-headers", h.headers, "headers of a request")
        ->check(within(1, 1 << 16))
        ->capture_default_str();
    app.add_option("--request-timeout", h.request_seconds, "seconds from a request's first byte to its last")
        ->check(within(0.1, 1e6))
        ->capture_default_str();
    app.add_option("--idle-timeout", h.idle_seconds, "seconds that a connection may wait for a request")
        ->check(within(0.1, 1e6))
        ->capture_default_str();
    app.add_option("--write-timeout", h.write_seconds, "seconds without progress until a reader is cut off")
        ->check(within(0.1, 1e6))
        ->capture_default_str();
    app.add_option("--drain-timeout", a.drain_seconds, "seconds that running requests have after SIGTERM")
        ->check(within(0, 1 << 20))
        ->capture_default_str();
    app.add_option("--sse-ping-interval", a.ping_seconds, "seconds of silence in a stream until a comment is sent")
        ->check(within(0.05, 1e6))
        ->capture_default_str();
    app.add_option("--watchdog", a.watchdog_seconds, "seconds without a step until /health says so")
        ->check(within(0.1, 1e6))
        ->capture_default_str();
}

void add_request_flags(CLI::App& app, Arguments& a) {
    ApiLimits& l = a.endpoints.limits;
    app.add_option("--max-tokens", l.max_tokens, "tokens that a request may ask for; 0: any number")
        ->check(within(0, 1 << 30));
    app.add_option("-n,--predict,--n-predict", l.default_tokens,
                   "tokens of an answer when a request says nothing; -1: 16 for completions, the context for chats")
        ->check(within(-1, 1 << 30))
        ->capture_default_str();
    app.add_option("--max-n", l.n, "answers to a request")->check(within(1, 4096))->capture_default_str();
    app.add_option("--max-best-of", l.best_of, "best_of and beam width of a request")
        ->check(within(1, 4096))
        ->capture_default_str();
    app.add_option("--max-stops", l.stops, "stop strings of a request")->check(within(0, 4096))->capture_default_str();
    app.add_option("--max-prompts", l.prompts, "prompts of a request")
        ->check(within(1, 1 << 16))
        ->capture_default_str();
    app.add_option("--max-logprobs", l.logprobs, "log-probabilities of a position")
        ->check(within(0, 1000))
        ->capture_default_str();
    app.add_option("--max-json-depth", l.json.depth, "nesting of a body")
        ->check(within(1, 1000))
        ->capture_default_str();
    app.add_option("--temp", l.temperature, "temperature when a request says nothing")
        ->check(within(0, 100))
        ->capture_default_str();
    app.add_option("--top-k", l.top_k, "likewise top_k; 0: all")->check(within(0, 1 << 30))->capture_default_str();
    app.add_option("--top-p", l.top_p, "likewise top_p")->check(within(1e-9, 1))->capture_default_str();
    app.add_option("--min-p", l.min_p, "likewise min_p")->check(within(0, 1))->capture_default_str();
}

// glibc keeps freed memory for each thread and each size. What the engine's thread allocates a stream's thread frees: a
// thousand of them keep some 50 MiB after a few minutes (docs/server-load.md). Without these caches memory stays level, at no
// measurable cost; they can only be turned off before the process starts.
void restart_without_thread_caches(char** argv) {
#ifdef __GLIBC__
    if (std::getenv("GLIBC_TUNABLES")) return; // ours, or what the operator prefers
    std::array<char, 4096> path{};
    const ssize_t          n = readlink("/proc/self/exe", path.data(), path.size() - 1);
    if (n <= 0 || setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0", 1) != 0) return;
    execv(path.data(), argv); // comes back only if it cannot: then with the caches
#endif
}

} // namespace

int main(int argc, char** argv) {
    restart_without_thread_caches(argv);
    Arguments a;
    CLI::App  app{"An OpenAI-compatible server for a GGUF model.", "server"};
    app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast); // as llama.cpp does
    app.set_version_flag("--version", cat("quire ", quire_version));
    add_engine_flags(app, a);
    add_server_flags(app, a);
    add_request_flags(app, a);

    const OwnFlag own = [&](const std::string& name) -> std::optional<bool> {
        const CLI::Option* option = app.get_option_no_throw(name);
        return option ? std::optional(option->get_items_expected_min() > 0) : std::nullopt;
    };
    const std::vector<std::string> typed(argv + 1, argv + argc);
    Result<TranslatedFlags>        flags = translate_flags(Program::server, typed, own);
    if (!flags) {
        std::fprintf(stderr, "server: %s\n", flags.error().message.c_str());
        return 2;
    }
    std::vector<std::string> words(flags->words.rbegin(), flags->words.rend());
    try {
        app.parse(words); // in reverse, as CLI11 wants them
    } catch (const CLI::Success& e) {
        return app.exit(e); // --help and --version
    } catch (const CLI::ParseError& e) {
        std::string text = e.what();
        for (char& c : text)
            if (c == '\n') c = ' ';
        std::fprintf(stderr, "server: %s\n", text.c_str());
        return 2;
    }
    if (!flags->note.empty()) std::fprintf(stderr, "server: %s\n", flags->note.c_str());
    a.endpoints.limits.json.bytes  = a.http.limits.body_bytes;
    a.endpoints.limits.json.values = std::size_t(1) << 20;
    if (a.engine.max_batch_tokens > 0 && a.engine.max_batch_tokens < a.engine.max_sequences)
        a.engine.max_batch_tokens = a.engine.max_sequences;
    return run(a);
}
