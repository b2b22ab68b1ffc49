// quire.tools.bench.paper.workload: the lengths of the paper's data sets, and traces of requests that arrive at random. The lengths are
// synthetic, with the means that the paper gives; docs/paper.md names the other fitted values. Owns nothing.
module;

#include "paper_lengths.h"

export module quire.tools.bench.paper.workload;

import quire.core.base;
import quire.tools.bench.paper.numpy_random;

export namespace quire::paper {

// sharegpt, alpaca: sections 6.2 and 6.3. chatbot: section 6.5, prompts cut to their last 1024 tokens. one_shot, five_shot: section
// 6.4, behind a prefix of 80 or 341 tokens that all requests share.
enum class Workload : std::uint8_t { sharegpt, alpaca, chatbot, one_shot, five_shot };

struct Lengths {
    int prompt = 0, output = 0;         // tokens; prompt: without the shared prefix
    int conversation = -1, history = 0; // of a chat: which one, and the tokens said before this round
};

std::string_view         name_of(Workload workload);
std::span<const Lengths> lengths_of(Workload workload);
int                      prefix_of(Workload workload); // tokens

struct Arrival {
    double  at = 0; // seconds
    Lengths lengths;
};

struct Trace {
    std::vector<Arrival> requests; // by time
    int                  prefix  = 0;
    double               seconds = 0; // in which they arrive
};

// A Poisson process of `rate` requests a second; lengths are drawn with replacement. In Python:
//   g = default_rng(seed); n = max(1, g.poisson(rate * seconds)); at = sort(g.uniform(0, seconds, n)); row = g.integers(0, rows, n)
Trace make_trace(Workload workload, double rate, double seconds, std::uint32_t seed);

// A trace of chats whose rounds come in order, one conversation beginning where another ends; `n_open` go on at a time.
Trace make_chat_trace(double rate, double seconds, std::uint32_t seed, int n_open);

} // namespace quire::paper

module :private;

namespace quire::paper {

constexpr std::string_view names[] = {"ShareGPT", "Alpaca", "chatbot", "one-shot translation", "five-shot translation"};

std::string_view name_of(Workload workload) { return names[std::size_t(workload)]; }

int prefix_of(Workload workload) {
    return workload == Workload::one_shot ? 80 : workload == Workload::five_shot ? 341 : 0;
}

// Rows of integers: prompt, output and, of chats, conversation, history.
std::vector<Lengths> parse(std::string_view text) {
    std::vector<Lengths> rows;
    for (const char *at = text.data(), *end = at + text.size(); at < end;) {
        Lengths& row = rows.emplace_back();
        for (int* field : {&row.prompt, &row.output, &row.conversation, &row.history}) {
            at = std::from_chars(at, end, *field).ptr;
            if (at == end || *at++ == '\n') break;
        }
    }
    return rows;
}

std::span<const Lengths> lengths_of(Workload workload) {
    static const std::vector<Lengths> sharegpt = parse(sharegpt_csv), alpaca = parse(alpaca_csv),
                                      chatbot = parse(chatbot_csv), translation = parse(translation_csv);
    switch (workload) {
        case Workload::sharegpt: return sharegpt;
        case Workload::alpaca: return alpaca;
        case Workload::chatbot: return chatbot;
        default: return translation;
    }
}

Trace make_trace(Workload workload, double rate, double seconds, std::uint32_t seed) {
    const std::span<const Lengths> rows = lengths_of(workload);
    NumpyRandom                    random(seed);
    Trace                          trace{.requests = {}, .prefix = prefix_of(workload), .seconds = seconds};
    trace.requests.resize(std::size_t(std::max<std::int64_t>(1, random.poisson(rate * seconds))));
    for (Arrival& a : trace.requests) a.at = seconds * random.uniform();
    std::ranges::sort(trace.requests, {}, &Arrival::at);
    for (Arrival& a : trace.requests) a.lengths = rows[random.below(std::uint32_t(rows.size()))];
    return trace;
}

Trace make_chat_trace(double rate, double seconds, std::uint32_t seed, int n_open) {
    Trace                          trace = make_trace(Workload::chatbot, rate, seconds, seed);
    const std::span<const Lengths> rows  = lengths_of(Workload::chatbot);
    NumpyRandom                    random(seed + 1);
    std::size_t                    next_row = 0;
    // The rows that are left of each open conversation.
    std::vector<std::pair<std::size_t, std::size_t>> open(std::size_t(n_open), {0, 0});
    int                                              n_begun = 0;
    for (Arrival& a : trace.requests) {
        auto& [first, end] = open[random.below(std::uint32_t(n_open))];
        if (first == end) {
            first = end = next_row;
            while (end < rows.size() && rows[end].conversation == rows[first].conversation) end++;
            next_row = end < rows.size() ? end : 0;
            n_begun++;
        }
        a.lengths = rows[first++];
        // The file has some 500 conversations; when they are used up they begin again, as others.
        a.lengths.conversation += n_begun / 400 * 100'000;
    }
    return trace;
}

} // namespace quire::paper
