// Any bytes as the answer of a server and as a file of prompts: bench serve ends with a result or an error message, and an answer
// is parsed the same in whatever pieces it arrives.
#include <cstddef>
#include <cstdint>

import quire.core.base;
import quire.core.json;
import quire.tools.bench.load_client;
import quire.tools.bench.load_report;
import quire.tools.bench.stream_reader;
import quire.core.std;

using namespace quire;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    LoadResult             at_once, in_pieces;
    StreamReader           one, many;
    if (one.feed(text, 1, at_once)) one.close(2, at_once);
    bool more = true;
    for (const char& c : text)
        if (!(more = many.feed(std::string_view(&c, 1), 1, in_pieces))) break;
    if (more) many.close(2, in_pieces);
    check(at_once.error.empty() == in_pieces.error.empty(), "an answer that depends on how it came");
    if (at_once.error.empty())
        check(at_once.text == in_pieces.text && at_once.times == in_pieces.times &&
                  at_once.output_tokens == in_pieces.output_tokens,
              "an answer that depends on how it came");

    std::istringstream lines{std::string(text)};
    const auto         prompts = read_prompts(lines, "lines", 8, 4);
    if (prompts) {
        check(prompts->size() == 8, "not as many prompts as were asked for");
        for (const LoadPrompt& p : *prompts) check(p.n_prompt > 0 && p.n_output > 0, "no length");
        bool small = true;
        for (const LoadPrompt& p : *prompts) small &= p.n_prompt < 2000;
        WorkloadOptions o;
        if (small) (void)request_bodies(*prompts, o);
        o.chat = true;
        if (small) (void)request_bodies(*prompts, o);
    }
    (void)load_target(text, "/v1/completions", "");
    const std::string pairs[] = {std::string(text)};
    (void)parse_goodput(pairs);
    return 0;
}
