// bench serve: a server under load, with the flags and the report of `vllm bench serve`.

import quire.core.base;
import quire.core.json;
import quire.tools.bench.load_client;
import quire.tools.bench.load_report;
import quire.tools.bench.stream_reader;
import quire.tools.common.engine_flags;
import quire.tools.flags.cli;

#include "commands.h"

namespace quire::bench {

namespace {

// The first model that the server offers.
Result<std::string> first_model(const ServeArguments& a) {
    Result<LoadTarget> target = load_target(a.base_url, "/v1/models", a.api_key);
    if (!target) return std::unexpected(target.error());
    Result<std::string> text = fetch(*target);
    if (!text) return fail_with(ErrorKind::system, a.base_url, "/v1/models: ", text.error().message);
    const Result<Json> json = json_parse(*text);
    if (json && json->is_object() && json->contains("data") && (*json)["data"].is_array() && !(*json)["data"].empty() &&
        (*json)["data"][0].is_object() && (*json)["data"][0].contains("id") && (*json)["data"][0]["id"].is_string())
        return (*json)["data"][0]["id"].get<std::string>();
    return fail_with(ErrorKind::system, a.base_url, "/v1/models names no model");
}

Result<std::vector<std::string>> workload(const ServeArguments& a, bool chat) {
    WorkloadOptions o;
    o.model       = a.model;
    o.chat        = chat;
    o.ignore_eos  = a.ignore_eos;
    o.temperature = a.temperature;
    o.end_id      = a.vocabulary;
    o.first_id    = std::min(o.first_id, a.vocabulary - 1);
    o.prefix      = a.prefix;
    o.seed        = a.seed;
    if (!a.extra_body.empty()) {
        Result<Json> extra = json_parse(a.extra_body);
        if (!extra || !extra->is_object()) return fail("--extra-body is no JSON object");
        o.extra = std::move(*extra);
    }
    if (a.dataset.empty())
        return request_bodies(random_prompts(a.n_prompts, a.n_input, a.n_output, a.range_ratio, a.seed), o);
    std::ifstream file(a.dataset);
    if (!file) return fail_with(ErrorKind::system, "cannot open ", quote(a.dataset));
    Result<std::vector<LoadPrompt>> prompts = read_prompts(file, a.dataset, a.n_prompts, a.n_output);
    if (!prompts) return std::unexpected(prompts.error());
    return request_bodies(*prompts, o);
}

// The text of each different request when it runs alone.
Result<std::map<std::string_view, std::string>> texts_alone(const LoadTarget&               target,
                                                            const std::vector<std::string>& bodies, double timeout) {
    std::map<std::string_view, std::string> texts;
    for (const std::string& body : bodies) texts.emplace(body, "");
    std::vector<LoadRequest> requests;
    for (const auto& [body, text] : texts) requests.push_back({body, 0});
    LoadOptions options;
    options.max_concurrency                 = 1;
    options.request_seconds                 = timeout;
    Result<std::vector<LoadResult>> answers = run_load(target, requests, options);
    if (!answers) return std::unexpected(answers.error());
    for (std::size_t i = 0; i < requests.size(); i++) {
        if (!(*answers)[i].error.empty()) return fail_with(ErrorKind::system, (*answers)[i].error);
        texts[requests[i].body] = (*answers)[i].text;
    }
    return texts;
}

} // namespace

int serve(ServeArguments a) {
    Result<LoadTarget> target = load_target(a.base_url, a.endpoint, a.api_key);
    if (!target) return complain(target.error());
    Result<Goodput> goodput = parse_goodput(a.goodput);
    if (!goodput) return complain(goodput.error());
    a.report.goodput = *goodput;
    if (a.model.empty()) {
        Result<std::string> model = first_model(a);
        if (!model) return complain(model.error());
        a.model = *model;
    }
    Result<std::vector<std::string>> bodies = workload(a, a.endpoint.find("chat") != std::string::npos);
    if (!bodies) return complain(bodies.error());

    // The first request alone shows whether the server accepts such requests at all.
    std::vector<LoadRequest>        warm(std::size_t(std::max(a.n_warmups, 1)), LoadRequest{(*bodies)[0], 0});
    LoadOptions                     options{a.report.max_concurrency, a.timeout, 0, {}};
    Result<std::vector<LoadResult>> first = run_load(*target, warm, options);
    if (!first) return complain(first.error());
    if (const std::string& why = (*first)[0].error; !why.empty())
        return complain({ErrorKind::system, cat(target->path, ": ", why)});
    std::map<std::string_view, std::string> alone;
    if (a.check) {
        Result<std::map<std::string_view, std::string>> texts = texts_alone(*target, *bodies, a.timeout);
        if (!texts) return complain(texts.error());
        alone = std::move(*texts);
    }

    const std::vector<double> times = arrival_times(int(bodies->size()), a.report.request_rate, a.burstiness, a.seed);
    std::vector<LoadRequest>  requests;
    for (std::size_t i = 0; i < bodies->size(); i++) requests.push_back({(*bodies)[i], times[i]});
    options.stop_after                      = a.duration;
    Result<std::vector<LoadResult>> results = run_load(*target, requests, options);
    if (!results) return complain(results.error());
    int n_different = 0;
    for (std::size_t i = 0; a.check && i < results->size(); i++)
        n_different += (*results)[i].error.empty() && (*results)[i].text != alone[requests[i].body];
    std::erase_if(*results, [](const LoadResult& r) { return r.end == 0; }); // never sent: --duration was over

    const LoadReport report = load_report(*results, a.report);
    if (a.json) {
        Json out = render_json(report, a.report, *results);
        if (a.check) out["different_texts"] = n_different;
        std::printf("%s\n", json_dump(out).c_str());
    } else {
        std::printf("%s", render_table(report, a.report).c_str());
        if (a.check) std::printf("Texts other than those got alone: %d of %d\n", n_different, report.completed);
    }
    for (const std::string& error : report.errors) std::fprintf(stderr, "bench: %s\n", error.c_str());
    return report.completed == 0 || (a.check && (report.failed > 0 || n_different > 0)) ? 1 : 0;
}

void add_serve_flags(CLI::App* c, ServeArguments& a) {
    const CLI::Validator positive = within(1, 1 << 24);
    c->add_option("--base-url", a.base_url, "address of the server")->capture_default_str();
    c->add_option("--endpoint", a.endpoint, "/v1/completions or /v1/chat/completions")->capture_default_str();
    c->add_option("--api-key", a.api_key, "key of the server")->envname("OPENAI_API_KEY");
    c->add_option("--model", a.model, "name of the model; default: the server's first");
    c->add_option("--num-prompts", a.n_prompts, "requests to send")->check(positive)->capture_default_str();
    c->add_option("--request-rate", a.report.request_rate, "requests per second; inf: all at once")
        ->check(within(std::numeric_limits<double>::denorm_min(), std::numeric_limits<double>::infinity(), "above 0"))
        ->capture_default_str();
    c->add_option("--burstiness", a.burstiness,
                  "1: a Poisson process; otherwise gamma-distributed; smaller values: in bursts")
        ->check(within(1e-3, 1e6))
        ->capture_default_str();
    c->add_option("--max-concurrency", a.report.max_concurrency, "most requests at once")->check(positive);
    c->add_option("--dataset-path", a.dataset,
                  "JSON lines {\"prompt\": text, ids or a length} or {\"messages\": […]}, with \"output_tokens\"");
    c->add_option("--random-input-len,--input-len", a.n_input, "tokens of a random prompt")
        ->check(positive)
        ->capture_default_str();
    c->add_option("--random-output-len,--output-len", a.n_output, "tokens of an answer to a random prompt")
        ->check(positive)
        ->capture_default_str();
    add_number(*c, "--random-range-ratio", a.range_ratio, 0, 1, "lengths vary by this fraction");
    c->add_option("--random-prefix-len", a.prefix, "tokens of a prefix shared by all prompts")
        ->check(within(0, 1 << 24));
    c->add_option("--random-vocab", a.vocabulary, "random token ids are below this")
        ->check(positive)
        ->capture_default_str();
    add_number(*c, "--temperature", a.temperature, 0, 2, "temperature of the requests");
    c->add_flag("--ignore-eos", a.ignore_eos, "ask for answers that continue after an end token");
    c->add_option("--extra-body", a.extra_body, "JSON object whose members are added to every request");
    c->add_option("--num-warmups", a.n_warmups, "requests sent before the measurement; at least one is sent")
        ->check(within(0, 1 << 20));
    c->add_option("--seed", a.seed, "seed of prompts and arrivals");
    c->add_option("--goodput", a.goodput, "ttft:MS tpot:MS e2el:MS: latency limits of a good answer")->delimiter(' ');
    c->add_option("--metric-percentiles", a.report.percentiles, "percentiles of the table, separated by commas")
        ->delimiter(',')
        ->check(within(0.0, 100.0));
    add_number(*c, "--timeout", a.timeout, 0, 1e9, "seconds after which an answer counts as failed", "0 or more");
    add_number(*c, "--duration", a.duration, 0, 1e9, "seconds after which no more requests are sent; 0: send all",
               "0 or more");
    c->add_flag("--check", a.check,
                "first send every different request alone, then compare all texts with that answer");
    c->add_flag("--json", a.json, "print JSON with vLLM's keys instead of the table");
}

} // namespace quire::bench
