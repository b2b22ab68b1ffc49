// bench blocks: the scheduler, block tables and prefix cache, without a model.
import quire.core.base;
import quire.core.json;
import quire.paging.block_hash;
import quire.schedule.scheduler;

#include "commands.h"

namespace quire::bench {

namespace {

// One line of a table: the measurement, and its spread over the repetitions.
struct Line {
    std::string         name, unit;
    std::vector<double> samples;

    double median() const { return at(0.5); }
    double at(double quantile) const {
        std::vector<double> sorted = samples;
        std::sort(sorted.begin(), sorted.end());
        return sorted[std::size_t(quantile * double(sorted.size() - 1))];
    }
};

void print(const std::vector<Line>& lines, bool json) {
    if (json) {
        Json out = Json::array();
        for (const Line& l : lines)
            out.push_back(
                Json{{"name", l.name}, {"unit", l.unit}, {"median", l.median()}, {"min", l.at(0)}, {"max", l.at(1)}});
        std::printf("%s\n", json_dump(out).c_str());
        return;
    }
    std::printf("| %-58s | %9s | %9s | %9s | unit |\n| %s | --------: | --------: | --------: | --- |\n", "", "median",
                "min", "max", std::string(58, '-').c_str());
    for (const Line& l : lines)
        std::printf("| %-58s | %9.4g | %9.4g | %9.4g | %s |\n", l.name.c_str(), l.median(), l.at(0), l.at(1),
                    l.unit.c_str());
}

// The time of one scheduler step: n_running decoding sequences of some hundred tokens, n_waiting requests in the queue.
Line steps(int n_running, int n_waiting, int repetitions) {
    SchedulerOptions o;
    o.block_size       = 16;
    o.context          = 4096;
    o.max_sequences    = n_running;
    o.max_batch_tokens = 1 << 20; // all prompts in the first step
    o.max_logit_rows   = n_running;
    o.n_blocks         = n_running * 128;
    Scheduler    scheduler(o);
    StepPlan     plan;
    std::mt19937 random(1);
    auto         request = [&] {
        Request r;
        for (int i = 0; i < 500; i++) r.prompt.push_back(int(random() % 32000));
        r.max_tokens = 3000;
        return r;
    };
    for (int i = 0; i < n_running + n_waiting; i++) scheduler.add(RequestId(i) + 1, request());
    const auto step = [&] {
        const auto items = scheduler.schedule(plan);
        scheduler.commit();
        for (const Scheduled& item : items) {
            item.group->prompt_done = true;
            scheduler.append(*item.sequence, Token(random() % 32000));
        }
    };
    for (int i = 0; i < 20; i++) step();
    check(scheduler.n_running() == n_running && scheduler.n_waiting() == n_waiting, "the load is not the one wanted");
    Line line{cat("one step, ", n_running, " running, ", n_waiting, " waiting"), "µs", {}};
    for (int i = 0; i < repetitions; i++) {
        Stopwatch     watch;
        constexpr int n = 16; // in which every sequence gets one new block
        for (int k = 0; k < n; k++) step();
        line.samples.push_back(watch.seconds() * 1e6 / n);
    }
    return line;
}

// Millions of operations per second of `operation`, which does `n` of them.
Line rate(std::string name, int repetitions, int n, const std::function<void()>& operation) {
    Line line{std::move(name), "M/s", {}};
    operation(); // warm-up
    for (int i = 0; i < repetitions; i++) {
        Stopwatch watch;
        operation();
        line.samples.push_back(n / watch.seconds() / 1e6);
    }
    return line;
}

} // namespace

int blocks(int repetitions, bool json) {
    std::vector<Line> lines;
    for (int waiting : {0, 100, 10'000}) lines.push_back(steps(256, waiting, repetitions));
    lines.push_back(steps(1, 0, repetitions));

    constexpr int      n = 4096, size = 16;
    BlockManager       m({n, size, n, {}});
    std::vector<Token> tokens(n * size);
    std::mt19937       random(2);
    for (Token& t : tokens) t = int(random() % 32000);
    BlockMoves moves;
    lines.push_back(rate("take and give back a block", repetitions, n, [&] {
        const TableId t = m.open_table();
        for (int i = 0; i < n; i++) m.allocate_slots(t, i * size, size);
        m.close_table(t);
    }));
    lines.push_back(rate("append a token", repetitions, n * size, [&] {
        const TableId t = m.open_table();
        for (int i = 0; i < n * size; i++) m.allocate_slots(t, i, 1);
        m.close_table(t);
    }));
    lines.push_back(rate("fork a table of 64 blocks and drop it", repetitions, 10'000, [&] {
        const TableId t = m.open_table();
        m.allocate_slots(t, 0, 64 * size);
        for (int i = 0; i < 10'000; i++) m.close_table(m.fork_table(t));
        m.close_table(t);
    }));
    const TableId cached = m.open_table();
    m.allocate(cached, tokens);
    m.will_write({cached, 0, n * size});
    m.take_moves(moves);
    m.commit();
    lines.push_back(rate("find a block by its hash, tokens compared", repetitions, n,
                         [&] { m.blocks_to_allocate({}, std::span(tokens).first(tokens.size() - 1)); }));
    lines.push_back(rate("hash a block of 16 tokens", repetitions, n, [&] {
        std::optional<BlockHash> parent;
        for (int i = 0; i < n; i++)
            parent =
                chain_hash(parent, std::span(tokens).subspan(std::size_t(i) * std::size_t(size), std::size_t(size)));
        check(parent != 0, "a hash of zero"); // the result is used, or the compiler removes the loop
    }));
    m.close_table(cached);
    print(lines, json);
    return 0;
}

} // namespace quire::bench
