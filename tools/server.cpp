// server: an OpenAI-compatible server for many users of one engine, or of several models.
// Exit codes: 0, 1 (a model, address or file that cannot be used: one line on stderr; or a second signal), 2 (wrong usage).

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <csignal>

import quire.core.base;
import quire.core.json;
import quire.engine.files.segment_files;
import quire.serve.endpoints;
import quire.serve.http.listener;
import quire.serve.http.parser;
import quire.serve.http.server;
import quire.serve.memory_reserve;
import quire.serve.models.catalog;
import quire.serve.status.status_api;
import quire.tools.common.engine_flags;
import quire.tools.common.flag_sources;
import quire.tools.common.foreign_flags;
import quire.tools.common.model_source;
import quire.tools.common.processes;
import quire.tools.common.read_file;
import quire.tools.common.sampler_flags;
import quire.tools.common.terminal;
import quire.tools.flags.cli;
import quire.tools.hub.cache;
import quire.tools.server.presets;
import quire.tools.server.run_batch;
import quire.tools.server.server_log;

using namespace quire;

namespace {

constexpr int default_port = 8080;

struct Arguments {
    std::string              model, host = "127.0.0.1", unix_path, aliases, key_file, kv_events, kv_replay;
    std::vector<std::string> keys, pin_files, pins, hosts, cors;
    ModelSource              source;
    std::optional<HubModel>  wanted; // the model that is to be fetched
    ChatTemplateFlags        chat_template;
    AnswerFlags              answer;
    int                      port = default_port, drain_seconds = 30, max_queue = 1024, max_pinned = 0;
    bool                     no_log = false, blocks_text = false;
    std::vector<std::string> batch; // the files of --run-batch: in, out
    BatchLock                batch_lock;
    LogOptions               log;
    double                   ping_seconds = 15, watchdog_seconds = 60;
    EngineOptions            engine;
    EndpointOptions          endpoints;
    FlagGiven                given; // which flags of samplers were
    HttpOptions              http;
    std::string              models_dir, models_preset;
    PoolOptions              pool; // of the models
    bool only_cached = false;      // no model is named, and there is none beside the program: those of the hub's cache

    bool many() const { return !models_dir.empty() || !models_preset.empty() || only_cached; }
};

void add_flags(CLI::App& app, Arguments& a);
void complete_limits(Arguments& a);

// For a sentence after which the program ends.
int complain(const Error& error, int code = 1) {
    say_error("server", error.message);
    return code;
}

// While it is there, errors are lines of the log; before and after it they are on standard error in the form of the log.
class LoggedErrors {
public:
    explicit LoggedErrors(ServerLog& log) {
        write_errors_by([&log](std::string_view sentence) {
            log.say(std::string(sentence), LogLevel::error);
            log.flush();
        });
    }
    LoggedErrors(const LoggedErrors&)            = delete;
    LoggedErrors& operator=(const LoggedErrors&) = delete;
    ~LoggedErrors() { write_errors_by(to_standard_error); }

    static void to_standard_error(std::string_view sentence) {
        std::fprintf(stderr, "%s\n", sentence_line(sentence, LogLevel::error, json).c_str());
    }
    static inline bool json = false;
};

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

// Origins between commas, or in a JSON list, as vLLM takes them.
Result<std::vector<std::string>> origins_of(const std::string& text) {
    std::vector<std::string> origins;
    if (text.find_first_not_of(' ') < text.size() && text[text.find_first_not_of(' ')] == '[') {
        const Result<Json> list = json_parse(text);
        if (!list || !std::ranges::all_of(*list, [](const Json& one) { return one.is_string(); }))
            return fail(quote(text), " is not a JSON list of strings, such as [\"https://chat.example\"]");
        origins = list->get<std::vector<std::string>>();
    } else {
        origins = split(text, ',');
    }
    for (std::string& origin : origins)
        if (origin.ends_with('/')) origin.pop_back(); // as addresses are written
    return origins;
}

bool is_loopback(const std::string& host) { return host == "localhost" || host == "::1" || host.starts_with("127."); }

// Raises the limit of open files: every connection is a file descriptor.
void raise_descriptors(int connections) {
    rlimit limit{};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
    limit.rlim_cur = std::min(limit.rlim_max, std::max<rlim_t>(limit.rlim_cur, rlim_t(connections) + 256));
    setrlimit(RLIMIT_NOFILE, &limit);
}

// The texts of the prefixes to pin.
Result<std::vector<std::string>> pinned_texts(const Arguments& a) {
    std::vector<std::string> texts = a.pins;
    for (const std::string& path : a.pin_files) {
        Result<std::string> text = read_file(path);
        if (!text) return std::unexpected(text.error());
        texts.push_back(std::move(*text));
    }
    return texts;
}

// One thread waits for the signals. The first one while the server serves starts the shutdown; one before that, or a second one, ends
// the process. SIGHUP reloads, unless the terminal of the server's standard error has gone: then it is as the others, and a second one is
// ignored, since shells and terminals send several. One object, made before any other thread is there.
class Signals {
public:
    Signals() {
        sigset_t set;
        sigemptyset(&set);
        sigaddset(&set, SIGTERM);
        sigaddset(&set, SIGINT);
        if (std::signal(SIGHUP, SIG_DFL) == SIG_IGN) (void)std::signal(SIGHUP, SIG_IGN); // started by nohup
        else sigaddset(&set, SIGHUP);
        pthread_sigmask(SIG_BLOCK, &set, nullptr); // in all threads to come
        std::thread([set, at_terminal = isatty(STDERR_FILENO) == 1] {
            while (true) {
                int which = 0;
                sigwait(&set, &which);
                const bool reload = which == SIGHUP && !(at_terminal && isatty(STDERR_FILENO) == 0);
                if (reload) {
                    const std::scoped_lock lock(mutex_);
                    if (reload_) reload_();
                    continue;
                }
                if (!serving_) _exit(128 + which);
                if (came_ && which == SIGHUP) continue;
                if (came_) _exit(1);
                came_ = true;
                came_.notify_all();
            }
        }).detach();
    }
    static void serving() { serving_ = true; }
    // SIGHUP calls `reload`; {}: SIGHUP does nothing. The last `reload` is not running any more when on_hangup() returns.
    static void on_hangup(std::function<void()> reload) {
        const std::scoped_lock lock(mutex_);
        reload_ = std::move(reload);
    }
    static void wait() { came_.wait(false); }
    static void stop() { // as a signal would
        came_ = true;
        came_.notify_all();
    }

private:
    static inline std::atomic<bool>     serving_ = false, came_ = false;
    static inline std::mutex            mutex_; // guards reload_
    static inline std::function<void()> reload_;
};

// Serves until the first signal. Then no request is accepted any more, and running ones have --drain-timeout to end.
int serve(const Arguments& a, ModelPool& models, HttpServer& http, ServerLog& log) {
    Signals::wait();
    if (const std::string why = models.failure(); !why.empty()) {
        log.say(cat("the engine has failed, its requests got an error: ", why), LogLevel::error);
        models.drain();
        for (const Stopwatch watch; http.n_answering() > 0 && watch.seconds() < 2;)
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
        http.stop();
        log.flush();
        _exit(1); // a GPU that hangs is waited for by no destructor
    }
    log.say(cat("shutting down; ", models.in_flight(), " requests are still running"));
    models.drain();
    Stopwatch watch;
    bool      cancelled = false;
    while (models.in_flight() > 0 || http.n_answering() > 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        if (watch.seconds() > a.drain_seconds && !cancelled) {
            log.say(cat(models.in_flight(), " requests did not end in time"), LogLevel::warning);
            models.cancel_all();
            cancelled = true;
        }
        if (watch.seconds() > a.drain_seconds + 2.0) break; // a client does not read
    }
    return 0;
}

// Where --host and --unix say that the server is. NAME.sock among the hosts is a Unix socket, as llama.cpp has it.
void read_addresses(Arguments& a) {
    const std::vector<std::string> hosts = split(a.host, ',');
    for (const char* all : {"::", "0.0.0.0"}) // first, since they hold the others
        if (std::ranges::find(hosts, all) != hosts.end()) a.hosts.emplace_back(all);
    for (const std::string& host : hosts)
        if (host == "::" || host == "0.0.0.0") continue;
        else if (!host.ends_with(".sock")) a.hosts.push_back(host);
        else if (a.unix_path.empty()) a.unix_path = host;
    if (!a.unix_path.empty() && a.port == default_port) a.hosts.clear(); // a port beside it has to be asked for
}

// Takes the port of each host and checks whether the Unix socket can be had; no client can connect yet. Returns the addresses as a text.
Result<std::string> take_addresses(const Arguments& a, HttpServer& http) {
    std::string where;
    if (!a.unix_path.empty()) {
        if (auto ok = can_listen_unix(a.unix_path); !ok) return std::unexpected(ok.error());
        where = cat("unix:", a.unix_path);
    }
    int wanted = a.port;
    for (const std::string& host : a.hosts) {
        const Result<int> port = http.bind(host, wanted);
        if (!port) return std::unexpected(port.error());
        wanted         = *port; // where 0 was asked for, all have the one that the first one found
        const bool six = host.find(':') != std::string::npos;
        where += cat(where.empty() ? "" : " and ", a.http.tls_cert.empty() ? "http://" : "https://", six ? "[" : "",
                     host, six ? "]" : "", ":", *port);
    }
    return where;
}

Result<void> check_kv_events(const Arguments& a) {
    if (a.kv_events.empty() && a.kv_replay.empty()) return {};
    if (a.kv_events.empty())
        return fail("--kv-events-replay sends again what --kv-events has sent: it needs an endpoint too");
    if (!a.engine.prefix_cache)
        return fail("--kv-events says which blocks the prefix cache has, and --no-prefix-cache that there is none");
    return {};
}

// SIGHUP calls `reload` until the end of the object.
class OnHangup {
public:
    explicit OnHangup(std::function<void()> reload) { Signals::on_hangup(std::move(reload)); }
    OnHangup(const OnHangup&)            = delete;
    OnHangup& operator=(const OnHangup&) = delete;
    ~OnHangup() { Signals::on_hangup({}); }
};

// After SIGHUP before the server serves: the log's file.
void reopen_log(const Arguments& a, ServerLog& log) {
    if (auto ok = log.reopen(); !ok) log.say(ok.error().message, LogLevel::warning);
    else if (!a.log.file.empty()) log.say("SIGHUP: the log was opened again");
}

// After SIGHUP: the log's file, the keys of --api-key-file and the certificate are read again. A file that cannot be used changes nothing.
void reload(const Arguments& a, Endpoints& endpoints, HttpServer& http, ServerLog& log) {
    std::string done;
    const auto  tell = [&](const Result<void>& ok, bool asked, std::string_view what) {
        if (!ok) log.say(ok.error().message, LogLevel::warning);
        else if (asked) done += cat(done.empty() ? "" : ", ", what);
    };
    tell(log.reopen(), !a.log.file.empty(), "the log was opened again");
    if (Result<std::vector<std::string>> keys = api_keys(a); !keys) {
        tell(std::unexpected(keys.error()), true, "");
    } else {
        endpoints.set_keys(std::move(*keys));
        tell({}, !a.key_file.empty(), "the keys were read again");
    }
    tell(http.reload_tls(), !a.http.tls_cert.empty(), "the certificate was read again");
    log.say(cat("SIGHUP: ", done.empty() ? "nothing was read again" : done));
}

// -- the models

// A model as the flags name it. `id`: where there are many; "": the first of --alias, or the file's name.
Result<ModelSetup> setup_of(const Arguments& a, const std::string& id = "") {
    ModelSetup       setup;
    EndpointOptions& options = setup.endpoints;
    setup.path               = a.model;
    setup.engine             = a.engine;
    options                  = a.endpoints;
    options.aliases          = split(a.aliases, ',');
    if (!id.empty()) options.aliases.insert(options.aliases.begin(), id);
    if (options.aliases.empty()) options.aliases = {std::filesystem::path(a.model).stem().string()};
    std::set<std::string> met; // a name that is given twice is no clash
    std::erase_if(options.aliases, [&](const std::string& name) { return !met.insert(name).second; });
    setup.id = options.aliases[0];
    if (!id.empty()) { // a directory for each
        std::string& files = setup.engine.kv_dir;
        if (!files.empty()) files += cat("/", directory_name(id));
        std::string& slots = options.saved_slots.directory;
        if (!slots.empty()) slots += cat(directory_name(id), "/");
    }
    if (SlotOptions& slots = options.saved_slots; !slots.directory.empty()) {
        if (auto ok = make_private_directory(slots.directory); !ok) return std::unexpected(ok.error());
        if (!a.engine.kv_key.empty()) {
            const Result<Cipher> key = Cipher::from_file(a.engine.kv_key);
            if (!key) return std::unexpected(key.error());
            slots.cipher = *key;
            if (const std::string open = readable_slot(slots.directory); !open.empty())
                return fail(open,
                            " was saved without a key, so that its text can be read: delete it, or leave out "
                            "--kv-key");
        }
    }
    Result<std::string> source =
        a.chat_template.file.empty() ? Result<std::string>("") : read_file(a.chat_template.file);
    if (!source) return std::unexpected(source.error());
    Result<std::vector<std::string>> pins = pinned_texts(a);
    if (!pins) return std::unexpected(pins.error());
    setup.template_name            = a.chat_template.name;
    setup.template_source          = std::move(*source);
    setup.template_variables       = variables_of(a.chat_template);
    setup.tool_form                = a.answer.tool_form;
    setup.reasoning_format         = a.answer.reasoning_format;
    setup.pins                     = std::move(*pins);
    setup.kv_events                = a.kv_events;
    setup.kv_replay                = a.kv_replay;
    setup.given                    = a.given;
    setup.service.max_queue        = a.max_queue;
    setup.service.max_pinned       = a.max_pinned;
    setup.service.watchdog_seconds = a.watchdog_seconds;
    setup.service.show_text        = a.blocks_text;
    setup.service.failed           = Signals::stop;
    return setup;
}

// A flag beside --models-dir that is about one model; "": there is none.
std::string flag_of_one_model(const Arguments& a) {
    const HubModel& hub = a.source.hub;
    if (!a.model.empty() || !a.source.word.empty()) return "-m";
    if (!hub.repo.empty() || !hub.file.empty() || !hub.url.empty()) return "-hf";
    if (!a.aliases.empty()) return "--alias";
    if (!a.kv_events.empty() || !a.kv_replay.empty()) return "--kv-events";
    if (a.endpoints.limits.strict_model) return "--strict-model-name";
    return "";
}

// A command line with the flags of a model in front; ModelSetup::given reads it.
struct ModelFlags {
    Arguments arguments;
    CLI::App  app{"", "server"};
};

// Of a model's flags, the files that they name, and all parts of its own file; another one says that it is another model.
std::string version_of(const std::vector<std::string>& words, const Arguments& a) {
    std::string version;
    const auto  add = [&](const std::string& file) {
        struct stat of = {};
        if (stat(file.c_str(), &of) == 0 && S_ISREG(of.st_mode))
            version += cat(of.st_dev, ' ', of.st_ino, ' ', of.st_size, ' ', of.st_mtim.tv_sec, ' ', of.st_mtim.tv_nsec);
        version += '\0';
    };
    for (const std::string& word : words) {
        version += cat(word, '\0');
        for (std::string_view one : split(word, ',')) { // FILE, --FLAG=FILE, NAME=FILE, FILE:SCALE
            one.remove_prefix(one.rfind('=') + 1);
            add(std::string(one.substr(0, one.rfind(':'))));
        }
    }
    for (const AdapterOption& adapter : a.engine.adapters) add(adapter.path); // also between blanks, and in JSON
    for (const std::string& part : parts_of(a.model)) add(part);
    return version;
}

// Misplaced, of --models-preset.
std::string misplaced_in_presets(const std::string& flag) {
    constexpr std::string_view of_server[] = {"--host",          "--port",
                                              "--unix",          "--uds",
                                              "--api-key",       "--api-key-file",
                                              "--cors-origins",  "--tls-cert",
                                              "--ssl-cert-file", "--tls-key",
                                              "--ssl-key-file",  "--ssl-certfile",
                                              "--ssl-keyfile",   "--allowed-origins",
                                              "--log-file",      "--models-dir",
                                              "--models-preset", "--models-max",
                                              "--models-memory", "--help",
                                              "--version",       "--config",
                                              "--run-batch"};
    constexpr std::string_view of_hub[]    = {"--hf-repo",   "-hf", "-hfr",       "--hf-file", "-hff",
                                              "--model-url", "-mu", "--hf-token", "-hft",      "--offline"};
    const auto in = [&](const auto& names) { return std::ranges::find(names, flag) != std::end(names); };
    if (in(of_server)) return " belongs to the server, not to a model: give it on the command line";
    if (in(of_hub)) return " fetches no model here: a section names one in the hub's cache, or has model = PATH";
    if (flag == "--kv-events" || flag == "--kv-events-replay") return " is about a server of one model";
    return "";
}

// Fails where an adapter has a name of its own model, which would answer the adapter's requests. An adapter that is applied to all requests may
// have the model's name: --lora takes the name from the file.
Result<void> check_adapter_names(const ModelSetup& setup) {
    for (const AdapterOption& adapter : setup.engine.adapters)
        if (!adapter.usual && setup.has_alias(adapter.name))
            return fail("the adapter ", adapter.path, " has the name of its model, ", quote(adapter.name),
                        ": --lora-modules NAME=FILE gives the adapter another one");
    return {};
}

// The models of --models-dir, --models-preset and the hub's cache. Error: `code` is that of the program.
Result<std::vector<ModelSetup>> find_setups(const Arguments& typed, int argc, char** argv, int& code) {
    code = 2;
    if (const std::string flag = flag_of_one_model(typed); !flag.empty())
        return fail(flag, " is about one model, and ", typed.models_dir.empty() ? "--models-preset" : "--models-dir",
                    " about many");
    CLI::App  app{"", "server"};
    Arguments unused;
    add_flags(app, unused);
    Preset              all;
    std::vector<Preset> presets;
    if (!typed.models_preset.empty()) {
        Result<std::vector<Preset>> read = read_presets(typed.models_preset, flags_of(app), misplaced_in_presets, all);
        if (!read) return std::unexpected(read.error());
        presets = std::move(*read);
    }
    code = 1;
    std::vector<FoundModel> found;
    if (!typed.models_dir.empty()) {
        Result<std::vector<FoundModel>> files = find_models(typed.models_dir);
        if (!files) return std::unexpected(files.error());
        found = std::move(*files);
    }
    for (NamedModel& one : named_models(hub_cache_folder()))
        if (std::ranges::find(found, one.name, &FoundModel::id) == found.end())
            found.push_back({std::move(one.name), std::move(one.path)});
    for (const FoundModel& one : found)
        if (std::ranges::find(presets, one.id, &Preset::name) == presets.end()) {
            presets.push_back(all);
            presets.back().name = one.id;
        }
    for (const std::string& path : {typed.engine.kv_dir, typed.endpoints.saved_slots.directory})
        if (!path.empty()) // each model has one below it
            if (auto ok = make_private_directory(path); !ok) return std::unexpected(ok.error());

    std::vector<ModelSetup> setups;
    std::set<std::string>   names;
    for (const Preset& preset : presets) {
        const std::string        where = cat(typed.models_preset, ", [", preset.name, "]: ");
        const auto               file  = std::ranges::find(found, preset.name, &FoundModel::id);
        std::vector<std::string> words = preset.words;
        if (file != found.end()) words.insert(words.begin(), {"-m", file->path});
        const auto parsed = std::make_shared<ModelFlags>();
        Arguments& a      = parsed->arguments;
        add_flags(parsed->app, a);
        if (const auto failed = parse_flags(parsed->app, Program::server, argc, argv, {}, words, where)) {
            code = 2;
            return fail("");
        }
        complete_limits(a);
        code = 2;
        if (a.model.empty())
            return fail(where,
                        "no file of --models-dir and no model of the hub's cache has this name, and there is no line "
                        "model = PATH");
        code                     = 1;
        Result<ModelSetup> setup = setup_of(a, preset.name);
        if (!setup) return fail_with(setup.error().kind, where, setup.error().message);
        setup->given         = [parsed](const std::string& flag) { return parsed->arguments.given(flag); };
        setup->load_at_start = preset.load_on_startup;
        setup->version       = version_of(words, a);
        for (const std::string& name : setup->endpoints.aliases)
            if (!names.insert(name).second) return fail(where, "another model has the name ", quote(name), " too");
        setups.push_back(std::move(*setup));
    }
    std::set<std::string> adapters; // their files may stand in the directory; they are no models
    const auto            file_of = [](const std::string& path) {
        struct stat of = {};
        return stat(path.c_str(), &of) == 0 ? cat(of.st_dev, ' ', of.st_ino) : path;
    };
    for (const ModelSetup& setup : setups)
        for (const AdapterOption& adapter : setup.engine.adapters) adapters.insert(file_of(adapter.path));
    std::erase_if(setups, [&](const ModelSetup& setup) {
        if (!adapters.contains(file_of(setup.path))) return false;
        for (const std::string& name : setup.endpoints.aliases) names.erase(name);
        return true;
    });
    for (const ModelSetup& setup : setups) { // the names of all models are known
        const std::string where = typed.models_preset.empty() ? cat("the model ", quote(setup.id), ": ")
                                                              : cat(typed.models_preset, ", [", setup.id, "]: ");
        if (auto ok = check_adapter_names(setup); !ok) return fail(where, ok.error().message);
        for (const AdapterOption& adapter : setup.engine.adapters)
            if (names.contains(adapter.name) && !setup.has_alias(adapter.name))
                return fail(where, "another model has the name ", quote(adapter.name),
                            " too, which is that of the adapter ", adapter.path);
    }
    return setups;
}

std::string no_models(const Arguments& a) {
    return cat(quote(a.models_dir.empty() ? a.models_preset : a.models_dir), " has no model");
}

// -- running

// Appends the setup of the server's one model. Returns the exit code if the program ends here.
std::optional<int> add_setup(const Arguments& a, std::vector<ModelSetup>& setups) {
    Result<ModelSetup> setup = setup_of(a);
    if (!setup) return complain(setup.error());
    if (auto ok = check_adapter_names(*setup); !ok) return complain(ok.error(), 2);
    bool wrong_name = false;
    if (auto ok = setup->read_file(&wrong_name); !ok) return complain(ok.error(), wrong_name ? 2 : 1);
    setups.push_back(std::move(*setup));
    return std::nullopt;
}

int run(Arguments& a, int argc, char** argv, ServerLog& log) {
    if (auto ok = check_kv_events(a); !ok) return complain(ok.error(), 2);
    if (a.pool.sleep_seconds >= 0 && (a.engine.processes.n > 1 || !a.kv_events.empty()))
        return complain({ErrorKind::input,
                         "--sleep-idle-seconds is for a model in one process without --kv-events: others wait for it"},
                        2);
    read_addresses(a);
    if (a.hosts.empty() && a.unix_path.empty()) return complain({ErrorKind::input, "--host is empty"}, 2);
    raise_descriptors(a.http.limits.connections);

    a.pool.many = a.many();
    if (a.pool.many && a.engine.processes.n > 1)
        return complain({ErrorKind::input, "several models run in one process: WORLD_SIZE is for one model"}, 2);
    if (a.model.empty() && !a.wanted && !a.pool.many) {
        Result<std::string> found = default_model();
        a.only_cached = !found && a.engine.processes.n == 1 && a.batch.empty() && flag_of_one_model(a).empty() &&
                        !named_models(hub_cache_folder()).empty();
        if (!found && !a.only_cached) return complain(found.error());
        if (found) a.model = *found;
        a.pool.many = a.many();
    }
    Result<std::vector<std::string>> keys = api_keys(a);
    if (!keys) return complain(keys.error());

    EndpointOptions& options = a.endpoints;
    options.api_keys         = std::move(*keys);
    options.cors_origins     = a.cors;
    options.ping_seconds     = a.ping_seconds;

    std::vector<ModelSetup> setups;
    if (a.pool.many) {
        int                             code  = 0;
        Result<std::vector<ModelSetup>> found = find_setups(a, argc, argv, code);
        if (!found) return found.error().message.empty() ? code : complain(found.error(), code);
        setups = std::move(*found);
        if (setups.empty() && !a.batch.empty()) return complain({ErrorKind::system, no_models(a)});
        a.pool.list = [typed = a, argc, argv] {
            int code = 0;
            return find_setups(typed, argc, argv, code);
        };
    } else if (!a.wanted) {
        if (const std::optional<int> code = add_setup(a, setups)) return *code;
    }

    const auto give_up = [&log](const Error& error) {
        log.say(error.message, LogLevel::error);
        log.flush();
        return 1;
    };
    a.http.refusal = [](std::string_view path, int status, const std::string& message) {
        return error_body(ApiError{status, message, "", ""}, error_form(path));
    };
    a.http.is_probe = is_probe;
    if (!a.no_log)
        a.http.log = [&log](const HttpExchange& e, double seconds, std::size_t bytes) { log.add(e, seconds, bytes); };
    std::atomic<double>                 loaded = 0;
    Result<std::unique_ptr<HttpServer>> http   = HttpServer::create(a.http);
    if (!http) return give_up(http.error());
    (*http)->hold([&loaded, &a](HttpExchange& e) { answer_loading(e, loaded, a.endpoints.pages); });
    // If the address is taken, the model is neither fetched nor read.
    const bool  leads = a.engine.processes.rank == 0;
    std::string where;
    if (leads && a.batch.empty()) {
        Result<std::string> taken = take_addresses(a, **http);
        if (!taken) return give_up(taken.error());
        where = std::move(*taken);
        if (auto ok = (*http)->listen(); !ok) return give_up(ok.error());
        if (!a.unix_path.empty())
            if (auto ok = (*http)->listen_unix(a.unix_path); !ok) return give_up(ok.error());
        (*http)->start();
    }
    if (a.wanted) {
        const FetchListener listener{[&log](const std::string& sentence, bool error) {
                                         log.say(sentence, error ? LogLevel::error : LogLevel::info);
                                         log.flush(); // a terminal's line about the progress follows
                                     },
                                     [&loaded](double fraction) { loaded = fraction; }};
        if (const std::optional<int> code = fetch_model("server", *a.wanted, a.model, listener)) return *code;
        if (const std::optional<int> code = add_setup(a, setups)) return *code;
        loaded = 0;
    }

    const TerminalFacts facts = terminal_facts();
    ProgressBar         bar("loading", facts.err && !facts.dumb);
    const auto          progress = [&](double fraction) {
        if (loaded == 0) log.flush(); // the bar is on the line below
        loaded = fraction;
        bar.show(fraction);
    };
    a.pool.say = [&log](const std::string& sentence, bool warning) {
        log.say(sentence, warning ? LogLevel::warning : LogLevel::info);
    };
    if (!leads) {
        Result<Engine> engine = ModelHost::load_engine(setups[0], progress, a.pool.say);
        bar.clear();
        if (!engine) return give_up(engine.error());
        return follow(*engine, "server", [&log](const std::string& sentence) { log.say(sentence); });
    }
    a.pool.max_waiting           = a.max_queue;
    a.pool.describe              = props_asleep;
    a.pool.strict                = options.limits.strict_model;
    const FileSampling from_file = a.pool.many ? FileSampling{} : setups[0].from_file;
    const std::size_t  n_models  = setups.size();
    SharedContext      shared(options.stored_bytes);
    shared.dropped_log_lines = [&log] { return log.dropped(); };
    ModelPool models(std::move(setups), a.pool, shared);
    if (!a.pool.many) {
        const Result<void> done = models.load_first(progress);
        bar.clear();
        if (!done) return give_up(done.error());
        options.limits = models.loaded()[0].host().api().options.limits;
    } else {
        options.limits.models     = models.names();
        options.limits.vocab_size = options.limits.context = 1 << 30; // of the description: no model is known yet
    }
    options.local_only = std::ranges::all_of(a.hosts, is_loopback);
    Endpoints endpoints(models, options);
    endpoints.add_to(**http);
    models.start();
    if (!a.batch.empty()) {
        const int  sequences = a.pool.many ? 16 : models.loaded()[0].host().service().engine_options().max_sequences;
        const int  at_once   = std::min(2 * sequences, a.max_queue);
        const auto done      = run_batch(endpoints, {.in         = a.batch[0],
                                                     .out        = a.batch[1],
                                                     .at_once    = std::max(at_once, 1),
                                                     .line_bytes = a.http.limits.body_bytes,
                                                     .say        = [&log](const std::string& line) { log.say(line); },
                                                     .lock       = a.batch_lock});
        return done ? 0 : give_up(done.error());
    }

    if (const auto open = std::ranges::find_if(a.hosts, [](const auto& host) { return !is_loopback(host); });
        open != a.hosts.end() && options.api_keys.empty())
        log.say(
            cat(*open,
                " can be reached from other machines, and there is no --api-key: anybody who can connect may use it"),
            LogLevel::warning);
    (*http)->open();
    keep_reserve(std::size_t(32) << 20); // from now on no request's lack of memory is the server's
    Signals::serving();
    if (n_models == 0) log.say(cat(no_models(a), " yet; GET /models?reload=1 looks again"), LogLevel::warning);
    else if (a.pool.many)
        log.say(cat(n_models, n_models == 1 ? " model; GET /models lists it" : " models; GET /models lists them"));
    else
        log.say(cat("requests that do not say are sampled with ", describe_sampling(options.limits.samplers.params),
                    from_file.said.empty() ? "" : cat("; the file says ", from_file.said)));
    log.say(cat("listening on ", where));
    Signals::on_hangup([&] { reload(a, endpoints, **http, log); });
    const int code = serve(a, models, **http, log);
    Signals::on_hangup({});
    (*http)->stop();
    return code;
}

void add_engine_flags(CLI::App& app, Arguments& a) {
    EngineOptions& o      = a.engine;
    o.max_sequences       = 0;
    o.shared_step_seconds = 0.15; // on a CPU, for the users of streams
    o.kv_host_bytes       = -1;
    add_model_flag(app, a.model);
    add_source_flags(app, a.source);
    app.add_option("-a,--alias,--served-model-name", a.aliases,
                   "names of the model, separated by commas; default: the file's");
    app.add_flag("--strict-model-name", a.endpoints.limits.strict_model,
                 "refuse requests that name another model (404); without it any name is answered");
    app.add_option("-c,--ctx-size,--max-model-len", o.context, "longest sequence in tokens; 0: the model's")
        ->check(within(0, 1 << 24));
    app.add_option("-t,--threads", o.threads, "threads of the engine; 0: one per physical core")
        ->check(within(0, 1024));
    add_number(app, "--parallel,--max-num-seqs", o.max_sequences, -1, 4096,
               "most sequences at once (short: -np); 0 or -1: 64, on a GPU up to 1024, by its memory");
    app.add_option("-b,--batch-size,--max-num-batched-tokens", o.max_batch_tokens,
                   "most tokens in one step; default: 2048 or 4096 on a GPU, 256 on a CPU")
        ->check(within(1, 1 << 20));
    add_device_flags(app, o);
    add_number(app, "--rank-timeout", o.rank_seconds, 0, 1e6,
               "seconds without an answer of one of several GPUs or processes after which the server ends; 0: 10, of "
               "processes 20, on a CPU 60");
    app.add_option("--pipeline", o.pipeline,
                   "on or off: start the next step before the last one's tokens are sent; default: on with a GPU");
    add_block_size_flag(app, o);
    app.add_option("--kv-blocks,--num-gpu-blocks-override", o.kv_blocks,
                   "number of KV blocks; 0: what fits into memory, at most a full context for each sequence")
        ->check(within(0, 1 << 24));
    app.add_option("--swap-blocks", o.swap_blocks, "blocks in the swap pool; -1: as many as KV blocks")
        ->check(within(-1, 1 << 24));
    app.add_option_function<std::string>( // before --kv-dir, which has the last word
        "--slot-save-path",
        [&a](const std::string& path) {
            if (path.empty()) throw CLI::ValidationError("--slot-save-path", "a directory is missing");
            a.endpoints.saved_slots.directory = path + "/";
            a.engine.kv_dir                   = path;
        },
        "directory for slots that POST /slots/N saves; without --kv-dir it has the KV as well");
    add_cache_flags(app, o);
    add_speculation_flags(app, o);
    add_adapter_flags(app, o);
    app.add_option("--kv-events", a.kv_events,
                   "ZeroMQ endpoint (tcp://*:5557) where routers learn which blocks the prefix cache has");
    app.add_option("--kv-events-replay", a.kv_replay, "the same for routers that have missed some of it");
    app.add_option("--run-batch", a.batch,
                   "answer the requests of a file in OpenAI's batch form, a line each, into another file, and end; a "
                   "batch that was "
                   "interrupted goes on")
        ->type_name("IN OUT")
        ->expected(2);
    app.add_option("--pin", a.pins, "a prefix whose KV is computed at start and kept")->take_all();
    app.add_option("--pin-file", a.pin_files, "the same, from a file")->take_all();
    app.add_option("--max-pinned-blocks", a.max_pinned, "most KV blocks in pinned prefixes; 0: a quarter of the pool")
        ->check(within(0, 1 << 24));
    add_chat_template_flags(app, a.chat_template, a.endpoints.now);
    add_answer_flags(app, a.answer);
}

void add_server_flags(CLI::App& app, Arguments& a) {
    HttpLimits& h = a.http.limits;
    app.add_option("--host", a.host, "addresses to listen on, separated by commas; NAME.sock: a Unix socket")
        ->capture_default_str();
    add_number(app, "--port", a.port, 0, 65535, "port; 0: any free port");
    app.add_option("--unix,--uds", a.unix_path, "listen on this Unix socket; with --port also on the port");
    app.add_option("--api-key", a.keys, "keys, separated by commas; a client must send one of them")->take_all();
    app.add_option("--api-key-file", a.key_file, "file with keys, one per line");
    app.add_option_function<std::string>(
        "--cors-origins",
        [&a](const std::string& text) {
            Result<std::vector<std::string>> origins = origins_of(text);
            if (!origins) throw CLI::ValidationError("--cors-origins", origins.error().message);
            a.cors = std::move(*origins);
        },
        "origins whose web pages may use this server, separated by commas or as a JSON list; *: all");
    app.add_option("--tls-cert,--ssl-cert-file", a.http.tls_cert, "certificate (PEM); switches TLS on");
    app.add_option("--tls-key,--ssl-key-file", a.http.tls_key, "the certificate's private key (PEM)");
    app.add_option("--models-dir", a.models_dir,
                   "serve the models below this directory, in place of one; a request's model chooses");
    app.add_option("--models-preset", a.models_preset, "INI file with the flags of models, and with models elsewhere");
    add_number(app, "--models-max", a.pool.most, 0, 1 << 20, "most models that are loaded at once; 0: any number");
    app.add_flag("--models-autoload,!--no-models-autoload", a.pool.autoload,
                 "off: a request for a model that is not loaded gets 400");
    take_bytes(app.add_option("--models-memory", a.pool.bytes,
                              "memory for all loaded models, as 8G; 0: what the device has, which is the default"),
               0);
    add_number(app, "--sleep-idle-seconds", a.pool.sleep_seconds, -1, 1e9,
               "seconds without a request after which a model leaves memory until the next one; -1: never",
               "-1 or more");
    app.add_flag("!--no-pages", a.endpoints.pages, "no chat page at / and no /blocks.html");
    app.add_flag("--blocks-text", a.blocks_text, "show the words of all requests in GET /blocks and on /blocks.html");
    app.add_flag("--slots,!--no-slots", a.endpoints.slots, "off: GET /slots, which shows what runs, answers 501");
    app.add_flag("--log-json", a.log.json, "write all lines of the log as JSON");
    app.add_option("--log-file", a.log.file, "append the log to this file; SIGHUP opens it again");
    const std::vector<std::string> levels{"error", "warning", "info", "debug"}; // as LogLevel has them
    app.add_option_function<std::string>(
           "--log-level",
           [&a, levels](const std::string& level) {
               a.log.most = LogLevel(std::ranges::find(levels, level) - levels.begin());
           },
           "error, warning, info or debug; info: a line for each request; debug: for probes of /health too")
        ->check(CLI::IsMember(levels));
    app.add_flag_callback(
        "-v,--verbose",
        [&a] {
            a.log.most                 = LogLevel::debug;
            a.endpoints.limits.verbose = true;
        },
        "as --log-level debug, and answers of /v1/completions and /v1/chat/completions have the prompt and the "
        "settings in __verbose");
    app.add_flag("--no-log", a.no_log, "write no access log");
    add_number(app, "--max-queue", a.max_queue, 0, 1 << 20, "most waiting requests; more get 429");
    add_number(app, "--max-connections", h.connections, 1, 1 << 20, "most connections at once");
    add_number(app, "--threads-http", h.threads, 1, 1 << 16, "most requests being answered at once");
    take_bytes(app.add_option("--max-body", h.body_bytes, "most bytes in a request's body"), 1, std::int64_t(10) << 30)
        ->default_str("16M");
    take_bytes(app.add_option("--max-buffered", h.buffered_bytes,
                              "most bytes that all requests may hold until they are answered; more get 503"),
               1, std::int64_t(1) << 40)
        ->default_str("256M");
    take_bytes(app.add_option("--max-working", a.endpoints.working_bytes,
                              "most bytes that requests may take while they are parsed and tokenized; others wait"),
               1, std::int64_t(1) << 40)
        ->default_str("512M");
    take_bytes(app.add_option("--response-store", a.endpoints.stored_bytes,
                              "memory for responses of /v1/responses that later ones continue; 0: none is stored"),
               0)
        ->default_str("64M");
    take_bytes(app.add_option("--max-header-bytes", h.head_bytes, "most bytes in a request line and its headers"), 64,
               1 << 24)
        ->default_str("32K");
    add_number(app, "--max-headers", h.headers, 1, 1 << 16, "most headers in a request");
    add_number(app, "--request-timeout", h.request_seconds, 0.1, 1e6,
               "seconds from a request's first byte to its last");
    add_number(app, "--idle-timeout", h.idle_seconds, 0.1, 1e6, "seconds that a connection may be idle");
    add_number(app, "--write-timeout", h.write_seconds, 0.1, 1e6,
               "seconds after which a client that reads nothing is disconnected");
    add_number(app, "--drain-timeout", a.drain_seconds, 0, 1 << 20,
               "seconds that running requests may take after SIGTERM");
    add_number(app, "--sse-ping-interval", a.ping_seconds, 0.05, 1e6,
               "seconds of silence in a stream after which a comment is sent");
    add_number(app, "--watchdog", a.watchdog_seconds, 0.1, 1e6, "seconds without a step after which /health says 503");
}

void add_request_flags(CLI::App& app, Arguments& a) {
    ApiLimits& l = a.endpoints.limits;
    app.add_option("--max-tokens", l.max_tokens, "most tokens a request may ask for; 0: no limit")
        ->check(within(0, 1 << 30));
    add_number(
        app, "-n,--predict,--n-predict", l.default_tokens, -1, 1 << 30,
        "tokens in an answer if the request does not say; -1: 16 for completions, until the context is full for chats");
    add_number(app, "--max-n", l.n, 1, 4096, "most answers to a request (n)");
    add_number(app, "--max-best-of", l.best_of, 1, 4096, "largest best_of and beam width");
    add_number(app, "--max-stops", l.stops, 0, 4096, "most stop strings in a request");
    add_number(app, "--max-prompts", l.prompts, 1, 1 << 16, "most prompts in a request");
    add_number(app, "--max-logprobs", l.logprobs, 0, 1000, "most log-probabilities per position");
    add_number(app, "--max-json-depth", l.json.depth, 1, 1000, "deepest nesting of a JSON body");
    add_number(app, "-s,--seed", l.seed, -1, 0x1p62, "seed of requests that name none; -1: a new one for each",
               "-1 or more");
    a.given = add_sampler_flags(app, l.samplers);
    add_number(app, "--reasoning-budget", l.reasoning_budget, -1, 1 << 30,
               "most tokens of reasoning in a chat's answer if the request does not say; -1: no limit");
    app.add_flag(
        "--trim-chats", l.trim_chats,
        "a chat that is too long for the context loses its oldest messages, unless the request says otherwise");
    app.add_flag("--context-shift,!--no-context-shift", l.context_shift,
                 "when an answer fills the context, forget the middle of the text and go on");
}

void add_flags(CLI::App& app, Arguments& a) {
    app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast); // as llama.cpp does
    add_version_flag(app);
    add_engine_flags(app, a);
    add_server_flags(app, a);
    add_request_flags(app, a);
}

// Limits that follow from others.
void complete_limits(Arguments& a) {
    a.engine.max_sequences         = std::max(a.engine.max_sequences, 0);
    a.endpoints.limits.json.bytes  = a.http.limits.body_bytes;
    a.endpoints.limits.json.values = std::size_t(1) << 20;
    if (a.engine.max_batch_tokens > 0 && a.engine.max_batch_tokens < a.engine.max_sequences)
        a.engine.max_batch_tokens = a.engine.max_sequences;
}

} // namespace

// The options of jemalloc, if it is linked. The engine's thread allocates memory that a thousand other threads free: few arenas and no caches
// per thread, or memory would grow with the number of threads. Freed pages and their addresses return to the system within a second.
extern "C" {
extern const char* malloc_conf;
const char*        malloc_conf =
    "narenas:4,tcache:false,retain:false,background_thread:true,dirty_decay_ms:1000,muzzy_decay_ms:0";
}

int main(int argc, char** argv) try {
    LoggedErrors::json = is_given("--log-json", argc, argv);
    write_errors_by(LoggedErrors::to_standard_error);
    Arguments a;
    CLI::App  app{"An OpenAI-compatible server for GGUF models.", "server"};
    add_flags(app, a);
    std::vector<FlagNote> notes;
    if (const std::optional<int> code = parse_flags(app, Program::server, argc, argv, {}, {}, "", &notes)) return *code;
    complete_limits(a);
    LoggedErrors::json = a.log.json;
    const Signals signals;
    if (auto ok = read_processes(a.engine); !ok) return complain(ok.error(), 2);
    if (!a.batch.empty() && a.engine.processes.rank == 0) { // before a model is fetched and read, which takes long
        Result<BatchLock> lock = check_batch_files(a.batch[0], a.batch[1]);
        if (!lock) return complain(lock.error());
        a.batch_lock = std::move(*lock);
    }
    // The log's threads are there before anything is said that a reader of it could keep waiting.
    Result<std::unique_ptr<ServerLog>> log = ServerLog::open(a.log);
    if (!log) return complain(log.error());
    const LoggedErrors errors(**log);
    const OnHangup     hangup([&] { reopen_log(a, **log); });
    for (const FlagNote& note : notes) (*log)->say(note.sentence, note.warning ? LogLevel::warning : LogLevel::info);
    (*log)->flush(); // before a sentence with which the program ends
    if (!a.many())
        if (const std::optional<int> code = read_source("server", a.source, a.model, a.wanted)) return *code;
    return run(a, argc, argv, **log);
} catch (const std::bad_alloc&) {
    try { // what the server held is free again
        return complain({ErrorKind::system, "there is not enough memory"});
    } catch (const std::bad_alloc&) {
        return out_of_memory("server");
    }
}
