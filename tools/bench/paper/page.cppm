// quire.tools.bench.paper.page: the stored points → docs/paper.md with its charts, and a self-contained HTML page. Owns nothing.
export module quire.tools.bench.paper.page;

import quire.core.base;
import quire.core.output_file;
import quire.tools.bench.paper.sections;
import quire.tools.bench.paper.simulated_figures;
import quire.tools.bench.paper.svg_plot;

export namespace quire::paper {

// Writes `page` (NAME.md) with its charts in the folder NAME beside it and, with `html`, NAME.html, from the points in `folder`.
Result<void> write_page(const std::string& folder, const std::string& page, bool html);

} // namespace quire::paper

module :private;

namespace quire::paper {

constexpr std::string_view title = "The paper, reproduced";

// The meaning of the columns, in sentences.
std::vector<std::string> introduction(const Sets& simulated, const Sets& measured) {
    std::vector<std::string> out{
        "The evaluation of Kwon et al., \"Efficient Memory Management for Large Language Model Serving with "
        "PagedAttention\" (SOSP '23), on quire's own scheduler, block tables and decoding methods. The systems that "
        "the paper compares with are admission rules behind the same scheduler: Orca (Max), (Pow2) and (Oracle) "
        "reserve a contiguous chunk for each sequence from a buddy allocator; FasterTransformer runs one batch after "
        "another. `./bench throughput --system` runs each of them on any model. This page is made by `./bench paper`."};
    if (!simulated.empty()) {
        const Points& any = simulated.begin()->second;
        out.push_back(cat("**Simulated**: a discrete-event simulation on ", any.machine,
                          " (`./bench paper --simulate`, ", any.settings,
                          "): the scheduler is the real one, a step takes what a cost model says. A100s with 15,728 "
                          "slots (13B), 9,700 (66B) and 60,100 (175B)."));
    }
    if (!measured.empty()) {
        const Points& any      = measured.begin()->second;
        std::string   settings = any.settings;
        if (std::ranges::any_of(measured, [&](const auto& m) { return m.second.settings != any.settings; })) {
            settings.clear();
            for (const auto& [set, points] : measured)
                settings +=
                    cat(settings.empty() ? "" : "; ", set == "beyond" ? "" : "Fig. ", set, ": ", points.settings);
        }
        double seconds = 0;
        for (const auto& [set, points] : measured) seconds += points.seconds;
        out.push_back(cat("**Measured**: ", any.machine, " (`./bench paper --real`, ", settings, "; ",
                          number(seconds / 60, 0),
                          " minutes in all), random weights, a pool of 15,728 slots whatever the memory, rates around "
                          "each system's knee on that machine. In traces of seconds no backlog grows, so a rate is "
                          "sustained there up to three times the latency of a sequence alone."));
    } else out.push_back("**Measured**: not measured yet; `./bench paper --real` fills in the column.");
    out.push_back(
        "The data sets are synthetic: the paper's mean lengths, log-normal prompts and gamma outputs, ShareGPT's "
        "spread fitted to Fig. 2 and 13, Alpaca's to Fig. 13; translations and chats are assumed. Arrivals are "
        "Poisson, outputs have the trace's length, normalized latency is the mean of (end - arrival) / output tokens, "
        "and a rate is sustained if that is at most 0.5 s/token. The traces are those of numpy's default_rng, so that "
        "they can be made elsewhere.");
    return out;
}

std::string markdown(const std::vector<Section>& sections, const std::vector<std::string>& intro,
                     const std::string& charts, bool measured) {
    std::string out = cat("# ", title, "\n\n");
    for (const std::string& paragraph : intro) out += paragraph + "\n\n";
    for (const Section& s : sections) {
        out += cat("## ", s.title, "\n\n");
        if (!s.claim.empty()) out += cat("**Claim.** ", s.claim, "\n\n");
        if (!s.verdict.empty()) out += cat("**Verdict.** ", s.verdict, ".\n\n");
        for (const Chart& c : s.charts)
            out += cat("![", c.caption, "](", charts, "/", c.name, ".svg)\n\n", c.caption, ".\n\n");
        if (!s.rows.empty()) {
            out += "| | paper | simulated | measured |\n| --- | ---: | ---: | ---: |\n";
            for (const Row& r : s.rows)
                out += cat("| ", r.what, " | ", r.paper, " | ", r.simulated, " | ",
                           measured || !r.measured.empty() ? r.measured : "not measured yet", " |\n");
            out += "\n";
        }
        for (const std::string& paragraph : s.why) out += paragraph + "\n\n";
    }
    while (out.ends_with("\n\n")) out.pop_back();
    return out;
}

// Text with `code` and **bold**.
std::string inline_html(std::string_view text) {
    std::string out;
    bool        code = false, bold = false;
    for (std::size_t i = 0; i < text.size(); i++)
        if (text[i] == '`') {
            code = !code;
            out += code ? "<code>" : "</code>";
        } else if (text.substr(i).starts_with("**")) {
            bold = !bold;
            out += bold ? "<b>" : "</b>";
            i++;
        } else out += escape_xml(text.substr(i, 1));
    return out;
}

std::string html_page(const std::vector<Section>& sections, const std::vector<std::string>& intro, bool measured) {
    std::string out =
        cat("<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" "
            "content=\"width=device-width\"><title>",
            title,
            "</title><style>:root{color-scheme:light dark}body{font:15px/1.5 sans-serif;max-width:62rem;margin:2rem "
            "auto;padding:0 "
            "1rem}svg{max-width:100%;height:auto}table{border-collapse:collapse;font-size:13px}td,th{border:1px solid "
            "#8885;padding:.15rem "
            ".6rem}td:nth-child(n+2){text-align:right}figcaption{color:#888;font-size:13px}</style><h1>",
            title, "</h1>");
    for (const std::string& paragraph : intro) out += cat("<p>", inline_html(paragraph), "</p>");
    for (const Section& s : sections) {
        out += cat("<h2>", escape_xml(s.title), "</h2>");
        if (!s.claim.empty()) out += cat("<p><b>Claim.</b> ", inline_html(s.claim), "</p>");
        if (!s.verdict.empty()) out += cat("<p><b>Verdict.</b> ", inline_html(s.verdict), ".</p>");
        for (const Chart& c : s.charts)
            out += cat("<figure>", c.svg, "<figcaption>", escape_xml(c.caption), "</figcaption></figure>");
        if (!s.rows.empty()) {
            out += "<table><tr><th><th>paper<th>simulated<th>measured";
            for (const Row& r : s.rows)
                out += cat("<tr><td>", escape_xml(r.what), "<td>", r.paper, "<td>", r.simulated, "<td>",
                           measured || !r.measured.empty() ? r.measured : "not measured yet");
            out += "</table>";
        }
        for (const std::string& paragraph : s.why) out += cat("<p>", inline_html(paragraph), "</p>");
    }
    return out + "</html>\n";
}

Result<void> write_page(const std::string& folder, const std::string& page, bool html) {
    Sets simulated, measured;
    for (std::string_view set : figure_sets) {
        // The calibrated simulation if it is there, else another one.
        for (const char* mode : {"simulated", "simulated-first-principles", "simulated-measured"})
            if (auto points = load(folder, mode, set); points && !simulated.contains(set))
                simulated.emplace(set, std::move(*points));
        if (auto points = load(folder, "measured", set)) measured.emplace(set, std::move(*points));
    }
    const std::vector<Section>     sections = sections_of(simulated, measured);
    const std::vector<std::string> intro    = introduction(simulated, measured);
    const std::filesystem::path    path     = page;
    const std::filesystem::path    charts   = path.parent_path() / path.stem();
    std::error_code                error;
    std::filesystem::create_directories(charts, error);
    if (error) return fail_with(ErrorKind::system, charts.string(), ": ", error.message());
    for (const Section& s : sections)
        for (const Chart& c : s.charts)
            if (auto ok = write_file((charts / (c.name + ".svg")).string(), c.svg); !ok) return ok;
    if (auto ok = write_file(page, markdown(sections, intro, path.stem().string(), !measured.empty())); !ok) return ok;
    if (!html) return {};
    return write_file((path.parent_path() / (path.stem().string() + ".html")).string(),
                      html_page(sections, intro, !measured.empty()));
}

} // namespace quire::paper
