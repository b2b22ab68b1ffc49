// `server --run-batch`: a file of requests becomes a file of answers, and goes on where it stopped.
#include <catch2/catch_test_macros.hpp>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "process.h"
#include "server_process.h"

using namespace quire::testing;
using Json = nlohmann::json;

namespace {

Json line(const std::string& id, const std::string& url, Json body) {
    return {{"custom_id", id}, {"method", "POST"}, {"url", url}, {"body", std::move(body)}};
}

std::vector<Json> lines_of(const std::string& path) {
    std::vector<Json> all;
    std::ifstream     file(path);
    for (std::string text; std::getline(file, text);) all.push_back(Json::parse(text));
    return all;
}

Finished batch(const std::string& in, const std::string& out) {
    return run_program("server", {"-m", shipped, "--device", "cpu", "-c", "256", "--run-batch", in, out});
}

} // namespace

TEST_CASE("a batch answers each line once", "[server][batch]") {
    const std::string in = temporary(), out = temporary();
    {
        std::ofstream file(in);
        const Json    chat{{"messages", user("Hi")}, {"max_tokens", 4}, {"temperature", 0}};
        for (int i = 0; i < 5; i++) file << line("c" + std::to_string(i), "/v1/chat/completions", chat).dump() << "\n";
        file << line("t", "/v1/completions", {{"prompt", "a"}, {"max_tokens", 3}, {"ignore_eos", true}}).dump()
             << "\n\n";
        file << line("e", "/v1/embeddings", {{"input", "a"}}).dump() << "\n";
        file << line("bad", "/v1/completions", {{"prompt", "a"}, {"max_tokens", "x"}}).dump() << "\n";
        file << line("t", "/v1/completions", {{"prompt", "b"}}).dump() << "\n";
        file << line("s", "/v1/completions", {{"prompt", "b"}, {"stream", true}}).dump() << "\n";
        file << line("u", "/metrics", Json::object()).dump() << "\nno JSON\n";
        file << R"({"custom_id": "g", "method": "GET", "url": "/v1/completions", "body": {}})"; // without a newline
    }
    const Finished first = batch(in, out);
    CAPTURE(first.err);
    REQUIRE(first.code == 0);
    CHECK(has(first.err, "13 of 13 lines are answered, 6 of them with an error"));
    std::map<std::string, Json> answers;
    std::vector<std::string>    wrong;
    for (const Json& one : lines_of(out))
        if (one["error"].is_null()) CHECK(answers.emplace(one["custom_id"], one["response"]).second);
        else wrong.push_back(one["error"]["message"]);
    REQUIRE(answers.size() == 8);
    CHECK(answers["c0"]["status_code"] == 200);
    CHECK(answers["c0"]["body"]["choices"] == answers["c4"]["body"]["choices"]);
    CHECK(answers["t"]["body"]["usage"]["completion_tokens"] == 3);
    CHECK(answers["e"]["body"]["data"][0]["embedding"].is_array());
    CHECK(answers["bad"]["status_code"] == 400);
    CHECK(answers["bad"]["body"]["error"]["param"] == "max_tokens");
    std::ranges::sort(wrong);
    CHECK(wrong == std::vector<std::string>{"a batch has no streams: stream is true", "method has to be POST",
                                            "the custom_id stands in an earlier line, too",
                                            "the line is no JSON object", "url is '/metrics', which no batch can ask"});

    // A batch that is complete gets no line, and its errors count as before.
    std::vector<Json> all      = lines_of(out);
    const Finished    complete = batch(in, out);
    REQUIRE(complete.code == 0);
    CHECK(has(complete.err, "13 of 13 lines are answered, 6 of them with an error"));
    CHECK(lines_of(out) == all);

    // The file ends within an answer, and the first answer is lost.
    {
        std::ofstream file(out);
        for (std::size_t i = 1; i < all.size(); i++) file << all[i].dump() << "\n";
        file << all[0].dump().substr(0, 20);
    }
    const Finished again = batch(in, out);
    CAPTURE(again.err);
    REQUIRE(again.code == 0);
    std::map<std::string, int> times;
    for (const Json& one : lines_of(out))
        if (one["custom_id"].is_string() && one["error"].is_null()) times[one["custom_id"]]++;
    CHECK(times.size() == 8);
    for (const auto& [id, n] : times) CHECK(n == 1);

    // The batch ended behind the refusal of a line whose custom_id an earlier line has, and before the answer of that line.
    {
        std::ofstream file(out);
        for (const Json& one : all)
            if (one["custom_id"] == "t" && !one["error"].is_null()) file << one.dump() << "\n";
    }
    REQUIRE(batch(in, out).code == 0);
    times.clear();
    for (const Json& one : lines_of(out))
        times[one["custom_id"].is_null() ? ""
                                         : one["custom_id"].get<std::string>() + (one["error"].is_null() ? "" : "?")]++;
    CHECK(times == std::map<std::string, int>{{"c0", 1},
                                              {"c1", 1},
                                              {"c2", 1},
                                              {"c3", 1},
                                              {"c4", 1},
                                              {"t", 1},
                                              {"t?", 1},
                                              {"e", 1},
                                              {"bad", 1},
                                              {"s?", 1},
                                              {"u?", 1},
                                              {"", 1},
                                              {"g?", 1}});

    // Places that keep nothing, or never end.
    CHECK(has(batch(in, "/dev/full").err, "cannot write '/dev/full'"));
    CHECK(has(batch("/dev/zero", out).err, "cannot read '/dev/zero': it is no regular file"));

    // A file of something else is not touched.
    const Finished other = batch(in, in);
    CHECK(other.code == 1);
    CHECK(has(batch("/none.jsonl", out).err, "cannot read '/none.jsonl': no such file"));
    CHECK(batch("/none.jsonl", out).code == 1);

    // The files are looked at before the model, and `out` is not made where there is no model.
    const auto without_model = [](const std::string& from, const std::string& to) {
        return run_program("server", {"-m", "/nonexistent/model.gguf", "--run-batch", from, to});
    };
    CHECK(has(without_model("/none.jsonl", out).err, "cannot read '/none.jsonl': no such file"));
    CHECK(has(without_model(in, "/none/out.jsonl").err, "cannot write '/none/out.jsonl': No such file or directory"));
    CHECK(has(without_model(in, "/").err, "cannot write '/': Is a directory"));
    CHECK(has(without_model(in, in).err, "has a line that is no answer of a batch; it is not written to"));
    unlink(out.c_str());
    CHECK(has(without_model(in, out).err, "/nonexistent/model.gguf"));
    CHECK(access(out.c_str(), F_OK) != 0);
    unlink(in.c_str());
}

TEST_CASE("a file of answers has one batch at a time", "[server][batch]") {
    const std::string in = temporary(), out = temporary();
    std::ofstream(in) << line("one", "/v1/completions", {{"prompt", "a"}, {"max_tokens", 2}}).dump() << "\n";
    const int held = open(out.c_str(), O_WRONLY);
    REQUIRE(held >= 0);
    REQUIRE(flock(held, LOCK_EX | LOCK_NB) == 0); // as a batch that runs does
    // Before the model is read, and under another name of the file as well.
    const std::string link = temporary();
    unlink(link.c_str());
    REQUIRE(symlink(out.c_str(), link.c_str()) == 0);
    for (const std::string& name : {out, link}) {
        const Finished second = run_program("server", {"-m", "/nonexistent/model.gguf", "--run-batch", in, name});
        CHECK(second.code == 1);
        CHECK(second.err.ends_with("Z error server: another --run-batch writes '" + name +
                                   "' now; nothing was written\n"));
    }
    CHECK(slurp(out).empty());
    close(held);
    REQUIRE(batch(in, out).code == 0);
    CHECK(lines_of(out).size() == 1);
    unlink(out.c_str()); // a run makes the file, and locks the file that it made
    REQUIRE(batch(in, out).code == 0);
    CHECK(lines_of(out).size() == 1);
    const Finished printed = batch(in, "/dev/stdout");
    CAPTURE(printed.err);
    REQUIRE(printed.code == 0);
    CHECK(has(printed.out, R"("custom_id":"one")"));
    for (const std::string& path : {in, out, link}) unlink(path.c_str());
}

TEST_CASE("a line of a batch says what is wrong with its custom_id", "[server][batch]") {
    const std::string in = temporary(), out = temporary();
    {
        std::ofstream file(in);
        Json          one = line("", "/v1/completions", {{"prompt", "a"}});
        one["custom_id"]  = 5;
        file << one.dump() << "\n";
        one.erase("custom_id");
        file << one.dump() << "\n";
    }
    REQUIRE(batch(in, out).code == 0);
    std::vector<std::string> wrong;
    for (const Json& answer : lines_of(out)) wrong.push_back(answer["error"]["message"]);
    std::ranges::sort(wrong);
    CHECK(wrong == std::vector<std::string>{"custom_id has to be a string", "custom_id is missing"});
    for (const std::string& path : {in, out}) unlink(path.c_str());
}
