// Display of the KV memory: sums, text, JSON written and read again, the page, and the program block-viz.
#include <httplib.h>
#include <catch2/catch_test_macros.hpp>
#include <thread>

#include "process.h"

import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.paging.snapshot;
import quire.schedule.request;
import quire.serve.status.snapshot_json;
import quire.tools.viz.block_view;

using namespace quire;
using namespace quire::testing;

namespace {

// Two requests that share a prefix block, one of them forked, one swapped out; a cached and a pinned block.
Snapshot sample() {
    Snapshot s;
    s.step          = 9;
    s.label         = "A </script> must not end the page.";
    s.block_size    = 4;
    s.n_swap_blocks = 4;
    s.n_swap_used   = 1;
    s.blocks.resize(8);
    s.blocks[0] = {3, 4, false, true, 0x8a1b000000000001};
    s.blocks[1] = {1, 2, false, false, 0};
    s.blocks[2] = {1, 3, false, false, 0};
    s.blocks[5] = {0, 4, false, true, 0x77};
    s.blocks[7] = {1, 1, true, false, 0};
    s.sequences.push_back({1, 0, ViewStatus::running, 4, 7, 6, 0, {0, 1}, {"Four", " <b>"}});
    s.sequences.push_back({1, 1, ViewStatus::running, 4, 8, 7, 0, {0, 2}, {}});
    s.sequences.push_back({2, 0, ViewStatus::pinned, 5, 5, 5, 0, {0, 7}, {}});
    s.sequences.push_back({3, 0, ViewStatus::swapped, 3, 4, 3, 0, {2}, {}});
    s.sequences.push_back({4, 0, ViewStatus::waiting, 3, 3, 0, 0, {}, {}});
    s.events.push_back({MemoryEventKind::copy, 0, 0, 1, 2});
    s.events.push_back({MemoryEventKind::fork, 1, 1, -1, -1});
    return s;
}

bool says(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

} // namespace

TEST_CASE("sums of a snapshot") {
    const MemoryTotals t = totals(sample());
    CHECK(t.used == 4);
    CHECK(t.cached == 1);
    CHECK(t.free == 3);
    CHECK(t.pinned == 1);
    CHECK(t.shared == 1);
    CHECK(t.waste == 1 - 10.0 / 16);
    CHECK(t.saved == 1 - 4.0 / 6);
    CHECK(totals(Snapshot{}).waste == 0);
}

TEST_CASE("JSON there and back") {
    const Json       json = to_json(sample());
    Result<Snapshot> back = snapshot_from_json(json);
    REQUIRE(back);
    CHECK(json_dump(to_json(*back)) == json_dump(json));
    CHECK(json["totals"]["used"] == 4);
    CHECK(json["blocks"][0]["hash"] == "8a1b000000000001");
    CHECK(json["sequences"][3]["status"] == "swapped");
}

TEST_CASE("a further block of an entry belongs to whom its first block belongs to") {
    Snapshot s;
    s.block_size = 4;
    s.blocks.resize(3);
    s.blocks[0].ref_count = s.blocks[1].ref_count = 1;
    s.blocks[1].first                             = 0;
    s.sequences.push_back({1, 0, ViewStatus::running, 4, 4, 4, 0, {0}, {}});
    const std::string one = "\x1b[38;5;39m1\x1b[0m"; // a block of request 1 in the pool
    CHECK(says(to_text(s, true), one + one));
    Json json = to_json(s);
    CHECK_FALSE(json["blocks"][0].contains("first"));
    CHECK(json["blocks"][1]["first"] == 0);
    const Result<Snapshot> back = snapshot_from_json(json);
    REQUIRE(back);
    CHECK(back->blocks == s.blocks);
    json["blocks"][1]["first"] = 3;
    CHECK_FALSE(snapshot_from_json(json));
}

TEST_CASE("changes are the blocks that are not as they were") {
    Snapshot after         = sample();
    after.blocks[1].filled = 3;
    after.blocks[5]        = {};
    after.blocks[2].pinned = true;
    const Json json        = changes_to_json(sample(), after);
    CHECK(!json.contains("blocks"));
    Json whole             = to_json(after)["sequences"]; // but for the texts, which are as before
    whole[0]["texts"]      = Json::array();
    whole[0]["texts_kept"] = 2;
    CHECK(json["sequences"] == whole);
    REQUIRE(json["changed"].size() == 3);
    CHECK(json["changed"][0] == Json{{"refs", 1}, {"filled", 3}, {"id", 1}});
    CHECK(json["changed"][1] == Json{{"refs", 1}, {"filled", 3}, {"pinned", true}, {"id", 2}});
    CHECK(json["changed"][2] == Json{{"refs", 0}, {"filled", 0}, {"id", 5}});
    CHECK(changes_to_json(after, after)["changed"].empty());
    CHECK(changes_to_json({}, after)["changed"].size() == 8);
}

TEST_CASE("texts that the last snapshot had are not sent again") {
    Snapshot before = sample(), after = sample();
    before.sequences[0].texts = {"Once upon", " a ti"};
    after.sequences[0].texts  = {"Once upon", " a time"};
    after.sequences[1].texts  = {"new"};
    const Json sequences      = changes_to_json(before, after)["sequences"];
    CHECK(sequences[0]["texts"] == Json{" a time"});
    CHECK(sequences[0]["texts_kept"] == 1);
    CHECK(sequences[1]["texts"] == Json{"new"});
    CHECK(!sequences[1].contains("texts_kept"));
    CHECK(changes_to_json(after, after)["sequences"][0]["texts"] == Json::array());
}

TEST_CASE("a trace there and back, and a snapshot alone is one") {
    Trace trace{"m.gguf", "a run", {sample(), sample()}};
    trace.steps[1].step = 10;
    Result<Trace> back  = parse_trace(to_jsonl(trace));
    REQUIRE(back);
    CHECK(back->title == "a run");
    CHECK(back->model == "m.gguf");
    REQUIRE(back->steps.size() == 2);
    CHECK(back->steps[1].step == 10);
    CHECK(parse_trace(json_dump(to_json(sample()))));
}

TEST_CASE("whatever a trace holds, it is read or refused with the line") {
    const std::string good = json_dump(to_json(sample()));
    auto              why  = [](const std::string& text) {
        Result<Trace> t = parse_trace(text);
        return t ? std::string("read") : t.error().message;
    };
    auto with = [&](auto change) {
        Json json = to_json(sample());
        change(json);
        return why(json_dump(json));
    };
    CHECK(why("") == "there is no snapshot in it");
    CHECK(says(why("{"), "line 1"));
    CHECK(says(why(good + "\n[1]"), "line 2: the snapshot is not an object"));
    CHECK(says(why("{\"quire_trace\":2}\n" + good), "line 1: the header has a quire_trace"));
    CHECK(says(with([](Json& j) { j.erase("block_size"); }), "has no block_size"));
    CHECK(says(with([](Json& j) { j["block_size"] = 0; }), "block_size that is not a whole number in 1.."));
    CHECK(says(with([](Json& j) { j["blocks"] = 3; }), "has blocks that are no array"));
    CHECK(says(with([](Json& j) { j["blocks"][0]["refs"] = -1; }), "block 0 has a refs"));
    CHECK(says(with([](Json& j) { j["blocks"][0]["refs"] = 1e300; }), "block 0 has a refs"));
    CHECK(says(with([](Json& j) { j["blocks"][0]["filled"] = 5; }), "block 0 has a filled"));
    CHECK(says(with([](Json& j) { j["blocks"][0]["hash"] = "xyz"; }), "hexadecimal"));
    CHECK(says(with([](Json& j) { j["blocks"][0]["pinned"] = "yes"; }), "neither true nor false"));
    CHECK(says(with([](Json& j) { j["sequences"][0]["blocks"][0] = 8; }), "maps a block that is not one of 8"));
    CHECK(says(with([](Json& j) { j["sequences"][3]["blocks"][0] = 4; }), "maps a block that is not one of 4"));
    CHECK(says(with([](Json& j) { j["sequences"][0]["blocks"][0] = "0"; }), "maps a block"));
    CHECK(says(with([](Json& j) { j["sequences"][0]["status"] = "asleep"; }), "unknown status 'asleep'"));
    CHECK(says(with([](Json& j) { j["sequences"][0]["computed"] = 99; }), "has a computed"));
    CHECK(says(with([](Json& j) { j["events"][0]["from"] = 1 << 30; }), "event 0 has a from"));
    CHECK(says(with([](Json& j) { j["step"] = std::numeric_limits<std::uint64_t>::max(); }), "has a step"));
    for (std::size_t n = 0; n < good.size(); n += 7) CHECK(why(good.substr(0, n)) != "read");
    CHECK(says(why(std::string(100'000, '[')), "line 1"));
}

TEST_CASE("the text names blocks, counts, hashes, marks and sums") {
    const std::string text = to_text(sample(), false);
    CHECK(says(text, "request 1.1  running  4+3 tokens    0[4]×3#8a1b 1[2/4]\n"));
    CHECK(says(text, "request 1.2  running  4+4 tokens    0[4]×3#8a1b 2[3/4]\n"));
    CHECK(says(text, "request 2.1  pinned  5+0 tokens     0[4]×3#8a1b 7[1/4]◆\n"));
    CHECK(says(text, "request 3.1  swapped  3+1 tokens    host:2\n"));
    CHECK(says(text, "request 4.1  waiting  3+0 tokens    no blocks\n"));
    CHECK(says(text, "     0 311··#·1\n"));
    CHECK(says(text,
               "used 4  cached 1  free 3  pinned 1  internal waste 37.5 %  saved by sharing 33.3 %  swapped 1 of 4"));
    CHECK(says(text, "copy on write: block 1 → 2; request 1 forked: answer 2"));
    CHECK_FALSE(says(text, "\x1b["));
    CHECK(says(to_text(sample(), true), "\x1b["));
    CHECK(says(text, "\n    Four | <b>\n")); // what stands in the blocks
    // No line of prose is longer than a terminal is wide, and none is lost.
    Snapshot wordy = sample();
    wordy.label    = "";
    for (int i = 0; i < 40; i++) wordy.label += cat("word", i, " → ");
    wordy.sequences[0].texts = {"two\nlines\x1b[2J"};
    const std::string prose  = to_text(wordy, false);
    for (std::size_t at = 0, end = 0; at < prose.size(); at = end + 1) {
        end = prose.find('\n', at);
        if (!says(prose.substr(at, end - at), "word")) continue;
        INFO(prose.substr(at, end - at));
        CHECK(std::count_if(prose.begin() + std::ptrdiff_t(at), prose.begin() + std::ptrdiff_t(end),
                            [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }) <= 80);
    }
    for (int i = 0; i < 40; i++) CHECK(says(prose, cat("word", i)));
    CHECK(says(prose, "    two lines [2J\n"));
    Snapshot large;
    large.block_size = 16;
    large.blocks.resize(100'000);
    CHECK(to_text(large, false).size() < 10'000);
}

TEST_CASE("the page holds the run, and no text of it can leave its place") {
    const std::string page = to_html({"m.gguf", "</script><script>alert(1)</script>", {sample()}});
    CHECK(says(page, "\\u003c/script>\\u003cscript>alert(1)"));
    CHECK_FALSE(says(page, "<script>alert(1)"));
    for (const char* place : {"@TRACE@", ".css@", ".js@"}) CHECK_FALSE(says(page, place));
    CHECK_FALSE(says(page, "http://www.w3.org/1999")); // nothing is fetched: the one address is SVG's name
    CHECK(page.ends_with("</html>\n"));
}

TEST_CASE("block-viz shows a recorded run as text, JSON and a page", "[block-viz]") {
    const std::string file = temporary();
    std::ofstream(file) << to_jsonl({"m.gguf", "a run", {sample(), sample()}});
    const Finished text = run_program("block-viz", {"--trace", file});
    CHECK(text.code == 0);
    CHECK(says(text.out, "request 1.1  running"));
    const Finished json = run_program("block-viz", {"--trace", file, "--json", "--all"});
    CHECK(std::count(json.out.begin(), json.out.end(), '\n') == 2);
    CHECK(says(run_program("block-viz", {"--trace", file, "--html", "-"}).out, "<!doctype html>"));
    CHECK(run_program("block-viz", {"--trace", file, "--step", "3"}).code == 1);
    CHECK(run_program("block-viz", {"--trace", "/nowhere"}).code == 1);
    std::ofstream(file) << "{}";
    const Finished bad = run_program("block-viz", {"--trace", file});
    CHECK(bad.code == 1);
    CHECK(says(bad.err, "line 1: the snapshot has no block_size"));
    const Finished dead =
        run_program("block-viz", {"--url", "http://127.0.0.1:1"}); // nothing listens on a port that low
    CHECK(dead.code == 1);
    CHECK(dead.err == "block-viz: http://127.0.0.1:1: connection refused: nothing listens on 127.0.0.1:1\n");
    CHECK(says(run_program("block-viz", {"--url", "http://no.such.host.invalid:1/x"}).err,
               "no address for no.such.host.invalid:1: "));
    CHECK(run_program("block-viz", {}).code == 2);
    CHECK(run_program("block-viz", {"--trace", file, "--demo"}).code == 2);
    unlink(file.c_str());
}

TEST_CASE("block-viz runs prompts and shows them, and the demo", "[block-viz]") {
    const std::string file = temporary();
    const Finished    run  = run_program(
        "block-viz", {"-p", "What is a quire?", "-p", "What is a block table?", "--answers", "2", "--kv-blocks", "24",
                          "--block-size", "4", "-n", "40", "--recovery", "swap", "--record", file, "--pin", "Answer me: "});
    INFO(run.err);
    CHECK(run.code == 0);
    CHECK(says(run.err, "request 3.2: "));
    const Finished again = run_program("block-viz", {"--trace", file, "--json"});
    CHECK(again.code == 0);
    unlink(file.c_str());
    const Finished demo = run_program("block-viz", {"--demo"});
    CHECK(demo.code == 0);
    CHECK(says(demo.out, "1[3/4]×2"));
    CHECK(says(demo.out, "copy on write: block 1 → 3"));
    CHECK(says(demo.out, "host:"));
    CHECK_FALSE(says(demo.out, "smaller smaller")); // the toy model's second choice, taken twice
    CHECK(run_program("block-viz", {"--demo", "fig9", "--html", "-"}).out.size() > 20'000);
    CHECK(run_program("block-viz", {"-p", "x", "-m", "/nowhere.gguf"}).code == 1);
}

TEST_CASE("block-viz looks at a server", "[block-viz]") {
    httplib::Server server;
    server.Get("/blocks", [](const httplib::Request&, httplib::Response& r) {
        r.set_content(json_dump(to_json(sample())), "application/json");
    });
    server.Get("/bad/blocks",
               [](const httplib::Request&, httplib::Response& r) { r.set_content("{}", "application/json"); });
    const int         port = server.bind_to_any_port("127.0.0.1");
    std::thread       thread([&] { server.listen_after_bind(); });
    const std::string url  = cat("http://127.0.0.1:", port);
    const Finished    seen = run_program("block-viz", {"--url", url}),
                   bad     = run_program("block-viz", {"--url", url + "/bad"}),
                   missing = run_program("block-viz", {"--url", url + "/none"});
    server.stop();
    thread.join();
    CHECK(seen.code == 0);
    CHECK(says(seen.out, "request 1.1  running"));
    CHECK(bad.code == 1);
    CHECK(says(missing.err, "status 404"));
    CHECK(run_program("block-viz", {"--url", url}).code == 1); // nobody there any more
    CHECK(run_program("block-viz", {"--url", "ftp://x"}).code == 1);
}
