// A scenario behind the real service and HTTP server, on a Unix socket. Each request is a client in a thread of its own. The engine's
// thread waits before each launch until all that belongs before it has happened, so what it runs does not depend on the threads.
#include <sys/socket.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "../http_client.h"

#include "allocations.h"
#include "run.h"
#include "world.h"

import quire.core.json;
import quire.model_file.gguf;
import quire.serve.endpoints;
import quire.serve.http.server;
import quire.serve.memory_reserve;
import quire.serve.service;
import quire.text.templates.chat_template;

namespace quire::simulation {

namespace {

constexpr double patience = 60; // seconds for what takes milliseconds

// Lets the engine's thread go on a launch at a time.
class Gate {
public:
    void wait() {
        std::unique_lock lock(mutex_);
        waiting_ = true;
        changed_.notify_all();
        changed_.wait(lock, [&] { return open_ || granted_ > 0; });
        if (!open_) granted_--;
        waiting_ = false;
    }
    // Lets one launch through.
    void grant() {
        std::scoped_lock lock(mutex_);
        granted_++;
        waiting_ = false;
        changed_.notify_all();
    }
    void open() {
        std::scoped_lock lock(mutex_);
        open_ = true;
        changed_.notify_all();
    }
    bool waiting() {
        std::scoped_lock lock(mutex_);
        return waiting_;
    }

private:
    std::mutex              mutex_;
    std::condition_variable changed_;
    bool                    waiting_ = false, open_ = false;
    int                     granted_ = 0;
};

// The text and tokens that a client has received.
struct Reader {
    int                              task = 0, at = 0;
    Request                          request;
    bool                             stream = false, left = false; // it hung up
    int                              status = 0;
    std::string                      error;
    std::vector<Answer>              answers;
    std::vector<int>                 ends; // of each answer, how often
    bool                             whole = false;
    std::atomic<bool>                over  = false;
    std::unique_ptr<testing::Client> client;
    std::thread                      thread;
};

Json body_of(const Request& r, bool stream) {
    Json body{{"model", "sim"},
              {"prompt", r.prompt},
              {"max_tokens", r.max_tokens},
              {"min_tokens", r.min_tokens},
              {"ignore_eos", r.ignore_end},
              {"n", r.n},
              {"temperature", r.sampling.temperature},
              {"top_p", r.sampling.top_p},
              {"min_p", r.sampling.min_p},
              {"top_k", 0},
              {"seed", r.sampling.seed},
              {"repetition_penalty", r.sampling.repetition_penalty},
              {"frequency_penalty", r.sampling.frequency_penalty},
              {"repeat_last_n", r.sampling.repeat_last_n},
              {"priority", r.priority},
              {"return_token_ids", true},
              {"stream", stream}};
    if (!r.stop_tokens.empty()) body["stop_token_ids"] = r.stop_tokens;
    for (const auto& [token, bias] : r.sampling.logit_bias) body["logit_bias"][cat(token)] = bias;
    if (r.best_of > 0) body["best_of"] = r.best_of;
    if (r.beam_width > 0) body["use_beam_search"] = true, body["beam_width"] = r.beam_width;
    if (!r.cache_salt.empty()) body["cache_salt"] = r.cache_salt;
    if (!r.uses_cache) body["cache_prompt"] = false;
    return body;
}

void take(Reader& reader, const Json& message) {
    if (message.contains("error")) {
        reader.error = json_dump(message["error"]);
        return;
    }
    for (const Json& choice : message["choices"]) {
        const auto i = std::size_t(choice["index"].get<int>());
        if (i >= reader.answers.size()) throw std::runtime_error("an answer that nobody asked for");
        if (choice.contains("token_ids") && choice["token_ids"].is_array())
            for (const Json& id : choice["token_ids"]) {
                if (reader.ends[i] > 0) throw std::runtime_error("an answer goes on behind its end");
                reader.answers[i].tokens.push_back(id.get<Token>());
            }
        if (choice["finish_reason"].is_string()) {
            reader.ends[i]++;
            reader.answers[i].finish =
                choice["finish_reason"].get<std::string>() == "stop" ? FinishReason::stop : FinishReason::length;
        }
    }
}

void read_answer(Reader& reader) {
    testing::Client& client = *reader.client;
    testing::Reply   head   = client.head();
    reader.status           = head.status;
    if (head.status == 0) return;
    if (!head.headers.contains("transfer-encoding")) {
        const std::string body =
            client.bytes(std::size_t(std::strtoul(head.headers["content-length"].c_str(), nullptr, 10)));
        const Result<Json> json = json_parse(body);
        if (!json) return;
        take(reader, *json);
        reader.whole = head.status == 200;
        return;
    }
    std::string text;
    for (std::string piece = client.chunk(); !piece.empty(); piece = client.chunk()) {
        text += piece;
        for (std::size_t end = 0; (end = text.find("\n\n")) != std::string::npos; text.erase(0, end + 2)) {
            if (!text.starts_with("data: ")) continue;
            const std::string data = text.substr(6, end - 6);
            if (data == "[DONE]") {
                reader.whole = true;
                continue;
            }
            if (const Result<Json> json = json_parse(data)) take(reader, *json);
        }
    }
}

// Takes out of the scenario the features that the API does not have.
Scenario for_clients(Scenario s) {
    for (Task& t : s.tasks) {
        t.pin = t.shifts = t.progress = false;
        t.logprobs = t.prompt_logprobs = t.cancel_answer = -1;
        t.pattern                                        = Pattern::none;
        if (t.beams > 0) t.sampled = t.penalties = false;
        if (t.best_of > 0) t.best_of = std::max(t.best_of, t.n);
    }
    return s;
}

class Served {
public:
    Served(const Scenario& scenario, bool trace) : s_(for_clients(scenario)), trace_(trace), oracle_(s_) {}
    Verdict run();

private:
    void start();
    void submit(int task);
    void hang_up(Reader& reader);
    void settle();
    void until(const char* what, const std::function<bool()>& there) const;
    void check(Reader& reader);
    void stop();
    int  n_reading() const {
        return int(std::ranges::count_if(readers_, [](const auto& r) { return !r->over; }));
    }

    const Scenario                       s_;
    bool                                 trace_;
    Oracle                               oracle_;
    Gate                                 gate_;
    SimExecutor*                         executor_ = nullptr;
    std::shared_ptr<Clock>               clock_;
    std::unique_ptr<SharedContext>       shared_;
    std::unique_ptr<ModelPool>           pool_;
    Service*                             service_ = nullptr; // the pool's
    std::unique_ptr<Endpoints>           endpoints_;
    std::unique_ptr<HttpServer>          http_;
    std::string                          path_;
    std::vector<std::unique_ptr<Reader>> readers_;
    Reached                              reached_;
    int                                  step_ = 0, n_failed_ = 0;
    bool                                 broke_ = false;
};

void Served::until(const char* what, const std::function<bool()>& there) const {
    const auto start = std::chrono::steady_clock::now();
    while (!there()) {
        if (std::chrono::steady_clock::now() - start > std::chrono::duration<double>(patience))
            throw std::runtime_error(cat("step ", step_, ": ", what));
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
}

void Served::start() {
    SimEngine sim             = make_engine(s_, false);
    executor_                 = sim.executor;
    clock_                    = sim.clock;
    executor_->before_launch  = [this] { gate_.wait(); };
    executor_->trace          = trace_;
    const Result<Gguf>   file = Gguf::open(model_path());
    Result<ChatTemplate> chat = ChatTemplate::choose(*file, "", "");
    if (!chat) throw std::runtime_error(chat.error().message);
    ModelSetup       setup;
    EndpointOptions& options = setup.endpoints;
    options.aliases          = {"sim"};
    options.chat_template    = std::move(*chat);
    options.pages            = false;
    setup.id                 = "sim";
    shared_                  = std::make_unique<SharedContext>(options.stored_bytes);
    auto host                = std::make_unique<ModelHost>(std::move(*sim.engine), std::move(setup), *shared_);
    service_                 = &host->service();
    EndpointOptions known    = host->api().options;
    pool_                    = std::make_unique<ModelPool>(std::move(host), *shared_);
    endpoints_               = std::make_unique<Endpoints>(*pool_, std::move(known));
    HttpOptions http;
    http.refusal = [](std::string_view, int, const std::string& message) {
        return json_dump(Json{{"error", message}});
    };
    Result<std::unique_ptr<HttpServer>> made = HttpServer::create(std::move(http));
    if (!made) throw std::runtime_error(made.error().message);
    http_ = std::move(*made);
    endpoints_->add_to(*http_);
    path_ = cat(std::filesystem::temp_directory_path().string(), "/quire-simulate-", getpid(), ".sock");
    unlink(path_.c_str());
    if (auto ok = http_->listen_unix(path_); !ok) throw std::runtime_error(ok.error().message);
    http_->start();
}

// Until the engine stands before a launch, or has nothing to do.
void Served::settle() {
    until("the engine neither runs nor rests",
          [&] { return gate_.waiting() || service_->in_flight() == 0 || !service_->failure().empty(); });
    broke_ = !service_->failure().empty();
}

void Served::submit(int task) {
    settle(); // an earlier request that ends without a launch would be taken for this one's place
    Reader& r = *readers_.emplace_back(std::make_unique<Reader>());
    r.task    = task;
    r.at      = step_;
    r.request = oracle_.request(task);
    r.stream  = task % 2 == 0 && !withheld(r.request);
    r.answers.resize(std::size_t(r.request.n));
    r.ends.resize(std::size_t(r.request.n));
    (void)oracle_.expected(task);
    r.client         = std::make_unique<testing::Client>(path_);
    const int before = service_->in_flight();
    r.thread =
        std::thread([&r, text = testing::Client::request("/v1/completions", json_dump(body_of(r.request, r.stream)))] {
            const Exempt exempt;
            try {
                r.client->send(text);
                read_answer(r);
            } catch (const std::exception& e) {
                r.error = cat("the client: ", e.what());
            }
            r.over = true;
        });
    until("a request does not arrive", [&] { return service_->in_flight() > before || r.over; });
    reached_["served requests"]++;
}

void Served::hang_up(Reader& reader) {
    // An answer is over for the server a little before it is for its client: only when both agree does the server's count show the client.
    until("the server and its clients disagree", [&] { return http_->n_answering() == n_reading(); });
    reader.left = true;
    reached_["clients that hung up"]++;
    shutdown(reader.client->fd(), SHUT_RDWR);
    until("a client that hung up goes on", [&] { return bool(reader.over); });
    until("the server does not notice that a client hung up", [&] { return http_->n_answering() <= n_reading(); });
}

void Served::check(Reader& r) {
    const auto wrong = [&](const std::string& what) {
        throw std::runtime_error(cat("step ", step_, ": the client of request ", r.task, " ", what));
    };
    if (r.error.starts_with("the client")) wrong(cat("met ", r.error));
    const Expected& e = oracle_.expected(r.task);
    for (std::size_t i = 0; i < r.answers.size(); i++) {
        const std::vector<Token>&all = e.answers[i].tokens, &got = r.answers[i].tokens;
        if (withheld(r.request)) continue;
        if (got.size() > all.size() || !std::equal(got.begin(), got.end(), all.begin()))
            wrong("got other tokens than alone");
    }
    if (r.left) return;
    if (r.status == 200 && r.error.empty()) {
        if (!r.whole && n_failed_allocations() > 0) {
            reached_["served without memory"]++;
            return;
        }
        if (!r.whole) wrong("got no end");
        bool cut = false;
        for (std::size_t i = 0; i < r.answers.size(); i++) {
            if (r.ends[i] != 1) wrong(cat("got ", r.ends[i], " ends of answer ", i));
            cut = cut || r.answers[i].tokens != e.answers[i].tokens || r.answers[i].finish != e.answers[i].finish;
        }
        if (cut && !may_outgrow(s_, r.request, e, 0, true)) wrong("got another answer than alone");
        reached_["served answers"] += !cut;
        return;
    }
    if (r.status == 0 && n_failed_allocations() == 0) wrong("got no answer");
    reached_[n_failed_allocations() > 0 ? "served without memory" : "served errors"]++;
    if (broke_ || may_outgrow(s_, r.request, e, 0) || n_failed_allocations() > 0) return;
    if (++n_failed_ > executor_->n_not_finite) wrong(cat("got status ", r.status, ": ", r.error));
}

void Served::stop() {
    fail_allocations(0);
    gate_.open();
    for (auto& r : readers_) {
        if (!r->over && r->client) shutdown(r->client->fd(), SHUT_RDWR);
        if (r->thread.joinable()) r->thread.join();
    }
    if (http_) http_->stop();
    http_.reset();
    endpoints_.reset();
    pool_.reset();
    shared_.reset();
    if (!path_.empty()) unlink(path_.c_str());
}

Verdict Served::run() {
    const Exempt exempt; // the driver; clients have their own
    Verdict      verdict;
    try {
        start();
        if (s_.crash == 2) std::abort();
        if (s_.no_memory > 0) {
            keep_reserve(1 << 20);
            fail_allocations(unsigned(s_.no_memory));
        }
        int most_steps = 2000;
        for (const Task& t : s_.tasks)
            most_steps = std::max(most_steps, t.at) + 4 * s_.context * (1 + std::max({t.n, t.best_of, t.beams}));
        const auto  n_tasks    = std::size_t(std::ranges::count_if(s_.tasks, [](const Task& t) { return t.on; }));
        std::size_t next_fault = 0, ended = 0; // ended: clients
        int         n_behind = 0;              // steps in a row
        for (; readers_.size() < n_tasks || n_reading() > 0; step_++) {
            if (step_ > most_steps) throw std::runtime_error("it does not end");
            for (std::size_t i = 0; i < s_.tasks.size(); i++)
                if (s_.tasks[i].on && s_.tasks[i].at == step_) submit(int(i));
            settle();
            for (auto& r : readers_)
                if (const int after = s_.tasks[std::size_t(r->task)].cancel_after;
                    after >= 0 && r->at + after == step_ && !r->over)
                    hang_up(*r);
            for (; next_fault < s_.faults.size() && s_.faults[next_fault].at <= step_ && gate_.waiting(); next_fault++)
                switch (s_.faults[next_fault].kind) {
                    case FaultKind::not_finite: executor_->trouble.not_finite = true; break;
                    case FaultKind::move: executor_->trouble.move = true; break;
                    case FaultKind::torn_move: executor_->trouble.torn_move = true; break;
                    case FaultKind::launch: executor_->trouble.launch = true; break;
                    case FaultKind::results: executor_->trouble.results = true; break;
                }
            if (gate_.waiting()) gate_.grant();
            settle();
            if (service_->in_flight() == 0)
                until("a client waits for an answer that is over", [&] { return n_reading() == 0; });
            // A request is over for its client a little before it is for the service, which may take the next two steps; so steps are counted
            // from the last client that ended. Where the machine is busy, the server may not have come to a client that hung up.
            const bool is_behind = service_->in_flight() > n_reading() && http_->n_answering() <= n_reading();
            const auto n_over    = readers_.size() - std::size_t(n_reading());
            n_behind             = is_behind && n_over == ended ? n_behind + 1 : 0;
            ended                = n_over;
            if (n_behind > 3 && !broke_)
                until("a client has hung up, and its request goes on",
                      [&] { return service_->in_flight() <= n_reading(); });
            if (!executor_->broken().empty()) throw std::runtime_error(executor_->broken());
        }
        for (auto& r : readers_) check(*r);
        gate_.open();
        until("requests are left", [&] { return service_->in_flight() == 0; });
        if (broke_) reached_["served by an engine that failed"]++;
        else
            until("blocks are left", [&] {
                const EngineStats stats = service_->stats();
                return stats.blocks_used + stats.swap_used + stats.running + stats.waiting == 0;
            });
        reached_["served steps"] += service_->stats().steps;
        reached_["served preemptions"] += service_->stats().preemptions;
    } catch (const std::exception& e) {
        verdict.wrong = cat("served: ", e.what());
    }
    stop();
    verdict.reached = std::move(reached_);
    return verdict;
}

} // namespace

Verdict serve(const Scenario& scenario, bool trace) { return Served(scenario, trace).run(); }

} // namespace quire::simulation
