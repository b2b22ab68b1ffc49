// quire.tools.bench.paper.cost_model: how long a step takes, in place of the device that would run it. Plain values, owns nothing.
export module quire.tools.bench.paper.cost_model;

import quire.core.base;
export import quire.core.json;
import quire.step.plan;

export namespace quire::paper {

// Table 1 of the paper.
struct PaperModel {
    std::string_view name;
    double           weight_bytes, parameters, kv_bytes_per_token;
    int              n_slots; // of the KV cache, in tokens
    int              n_gpus;
    double           bandwidth; // bytes a second of one GPU
};

inline constexpr PaperModel opt_13b{"OPT-13B", 26e9, 13e9, 2 * 40 * 5120 * 2, 15728, 1, 1.555e12};
inline constexpr PaperModel opt_66b{"OPT-66B", 132e9, 66e9, 2 * 64 * 9216 * 2, 9700, 4, 1.555e12};
inline constexpr PaperModel opt_175b{"OPT-175B", 346e9, 175e9, 2 * 96 * 12288 * 2, 60100, 8, 2.039e12};

// Seconds of a step = max(step, token · decoding sequences) + token · prompt tokens + kv · KV tokens read + sequence · sequences
//                     + moved blocks
struct CostModel {
    double step = 0, token = 0, kv = 0, sequence = 0;
    double paged         = 1;                 // the cost of reading KV through a block table, as a factor
    double copy_token    = 0;                 // seconds for each token of a block that is copied on the device
    double link_transfer = 0, link_token = 0; // of a block that is swapped: each of its transfers; each token

    double seconds(const StepPlan& plan, int block_size, bool reads_through_tables) const;
    double swap_seconds(int block_size) const { return link_transfer + link_token * block_size; }
};

// From first principles: weights, KV and operations over the bandwidth and half of the peak operations of A100s.
CostModel first_principles(const PaperModel& model);
// first_principles() with two fitted parameters, the time of a step and of a sequence, so that the paper's two vLLM points of Fig. 13 come out by
// Little's law: running requests = rate · output length · time of a step. All other systems' results are predictions.
CostModel calibrated(const PaperModel& model);

// Least squares over measured steps; parameters below 0 are left out.
struct MeasuredStep {
    int    prompt_tokens = 0, sequences = 0; // sequences that decode
    double kv_tokens = 0, seconds = 0;
};
CostModel fit(std::span<const MeasuredStep> steps);

Json              to_json(const CostModel& cost);
Result<CostModel> cost_from_json(const Json& json);

} // namespace quire::paper

module :private;

namespace quire::paper {

constexpr double a100_flops = 312e12 * 0.5;
// Fig. 18a: the paged kernel takes 20 to 26 % longer; the middle.
constexpr double paper_paged = 1.23;
// PCI Express 4.0 with 16 lanes, and the start of one of a block's copies, two for each of 40 layers; fitted to Fig. 19a's shape.
constexpr double pcie_bandwidth = 22e9, pcie_start = 2.5e-6;

double CostModel::seconds(const StepPlan& plan, int block_size, bool reads_through_tables) const {
    int    n_decode = 0, n_prompt = 0;
    double n_kv = 0;
    for (std::size_t i = 0; i < plan.context_lens.size(); i++) {
        const int n = plan.token_start[i + 1] - plan.token_start[i];
        if (n == 1) {
            n_decode++;
            n_kv += plan.context_lens[i];
        } else {
            n_prompt += n;
            n_kv += plan.context_lens[i] - n;
        }
    }
    const auto n_swapped = double(plan.moves.swap_in.size() + plan.moves.swap_out.size());
    return std::max(step, token * n_decode) + token * n_prompt + kv * (reads_through_tables ? paged : 1) * n_kv +
           sequence * plan.n_seqs() + copy_token * double(plan.moves.copies.size()) * block_size +
           n_swapped * swap_seconds(block_size);
}

CostModel first_principles(const PaperModel& m) {
    const double bandwidth = m.bandwidth * m.n_gpus;
    CostModel    c;
    c.step          = m.weight_bytes / bandwidth;
    c.token         = 2 * m.parameters / (m.n_gpus * a100_flops);
    c.kv            = m.kv_bytes_per_token / bandwidth;
    c.paged         = paper_paged;
    c.copy_token    = 2 * c.kv; // read and written
    c.link_transfer = 80 * pcie_start;
    c.link_token    = m.kv_bytes_per_token / (pcie_bandwidth * m.n_gpus);
    return c;
}

CostModel calibrated(const PaperModel& model) {
    struct Point {
        double batched, rate, output, prompt, kv_tokens;
    };
    // Fig. 13's batches; ShareGPT with the pool as full as Fig. 2 has it, Alpaca with 80 tokens a sequence.
    constexpr Point points[] = {{30.42, 2, 337.99, 161.31, 0.963 * opt_13b.n_slots},
                                {132.44, 30, 58.45, 19.31, 132.44 * 80}};
    const CostModel ideal    = first_principles(opt_13b);
    double          row[2][3]; // efficiency · step + sequence · batched = the rest of the time
    for (int i = 0; i < 2; i++) {
        const Point& p = points[i];
        const double t = p.batched / (p.rate * p.output);
        row[i][0] = ideal.step, row[i][1] = p.batched;
        row[i][2] = t - ideal.token * p.rate * p.prompt * t - ideal.kv * ideal.paged * p.kv_tokens;
    }
    const double determinant = row[0][0] * row[1][1] - row[1][0] * row[0][1];
    CostModel    c           = first_principles(model);
    c.step *= (row[0][2] * row[1][1] - row[1][2] * row[0][1]) / determinant;
    c.sequence = (row[0][0] * row[1][2] - row[1][0] * row[0][2]) / determinant;
    return c;
}

// The unknowns `used` of (1, prompt tokens, KV tokens, sequences) by the normal equations of relative errors; the others are 0.
std::array<double, 4> solve(std::span<const MeasuredStep> steps, std::span<const std::size_t> used) {
    const std::size_t                    n = used.size();
    std::array<std::array<double, 5>, 4> m{};
    for (const MeasuredStep& s : steps) {
        const std::array<double, 4> values{1, double(s.prompt_tokens), s.kv_tokens, double(s.sequences)};
        const double                weight = 1 / (s.seconds * s.seconds); // a short step counts as much as a long one
        for (std::size_t i = 0; i < n; i++) {
            for (std::size_t j = 0; j < n; j++) m[i][j] += weight * values[used[i]] * values[used[j]];
            m[i][4] += weight * values[used[i]] * s.seconds;
        }
    }
    for (std::size_t i = 0; i < n; i++) {
        if (m[i][i] <= 0) m[i][i] = 1;
        for (std::size_t k = 0; k < n; k++) {
            if (k == i) continue;
            const double factor = m[k][i] / m[i][i];
            for (std::size_t j = 0; j < 5; j++) m[k][j] -= factor * m[i][j];
        }
    }
    std::array<double, 4> x{};
    for (std::size_t i = 0; i < n; i++) x[used[i]] = m[i][4] / m[i][i];
    return x;
}

// Of all choices of unknowns without a negative result, the one with the least error.
CostModel fit(std::span<const MeasuredStep> steps) {
    std::array<double, 4> best{};
    double                least = std::numeric_limits<double>::infinity();
    for (unsigned choice = 1; choice < 16; choice++) {
        std::vector<std::size_t> used;
        for (std::size_t i = 0; i < 4; i++)
            if (choice >> i & 1) used.push_back(i);
        const std::array<double, 4> x     = solve(steps, used);
        double                      error = 0;
        for (const MeasuredStep& s : steps) {
            const double part =
                (x[0] + x[1] * s.prompt_tokens + x[2] * s.kv_tokens + x[3] * s.sequences) / s.seconds - 1;
            error += part * part;
        }
        if (std::ranges::any_of(x, [](double v) { return v < 0; }) || error >= least) continue;
        least = error;
        best  = x;
    }
    CostModel c;
    c.step = best[0], c.token = best[1], c.kv = best[2], c.sequence = best[3];
    c.copy_token = 2 * c.kv;
    return c;
}

Json to_json(const CostModel& c) {
    return Json{{"step", c.step},
                {"token", c.token},
                {"kv", c.kv},
                {"sequence", c.sequence},
                {"paged", c.paged},
                {"copy_token", c.copy_token},
                {"link_token", c.link_token},
                {"link_transfer", c.link_transfer}};
}

Result<CostModel> cost_from_json(const Json& json) {
    CostModel                             c;
    const std::pair<const char*, double*> fields[] = {{"step", &c.step},
                                                      {"token", &c.token},
                                                      {"kv", &c.kv},
                                                      {"sequence", &c.sequence},
                                                      {"paged", &c.paged},
                                                      {"copy_token", &c.copy_token},
                                                      {"link_token", &c.link_token},
                                                      {"link_transfer", &c.link_transfer}};
    for (auto [name, value] : fields) {
        if (!json.is_object() || !json.contains(name) || !json[name].is_number() || json[name].get<double>() < 0)
            return fail("a cost model needs a number ", name, " that is not negative");
        *value = json[name].get<double>();
    }
    return c;
}

} // namespace quire::paper
