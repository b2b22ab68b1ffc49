// Models from a hub: which files are taken, and how they come, from a hub in this process. tests/clients/hub_client.py tests much more, against
// a hub that misbehaves and beside huggingface_hub.
#include <httplib.h>

#include <catch2/catch_test_macros.hpp>

#include <openssl/evp.h>

#include <atomic>
#include <barrier>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "process.h"

import quire.core.result;
import quire.tools.hub.cache;
import quire.tools.hub.hub;

using namespace quire;
using namespace quire::testing;

namespace {

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::string sha256(const std::string& text) {
    unsigned char bytes[EVP_MAX_MD_SIZE];
    unsigned int  n = 0;
    EVP_Digest(text.data(), text.size(), bytes, &n, EVP_sha256(), nullptr);
    std::string hex;
    for (unsigned i = 0; i < n; i++) {
        char digits[3];
        std::snprintf(digits, sizeof digits, "%02x", bytes[i]);
        hex += digits;
    }
    return hex;
}

const std::string commit(40, 'c');

// One model of two parts, user/model, behind a redirect to another port; user/wrong has other bytes than its list says. A token has to come to
// the hub and must not come to the storage.
class TestHub {
public:
    TestHub() {
        storage_.Get("/(.+)/(part-.+)", [this](const httplib::Request& req, httplib::Response& res) {
            const std::scoped_lock lock(mutex_);
            if (req.has_header("Authorization")) token_leaked_ = true;
            ranges_.push_back(req.get_header_value("Range"));
            const std::string text = contents(req.matches[2]);
            res.set_content(req.matches[1] == "wrong" ? std::string(text.size(), '?') : text, "text/plain");
        });
        hub_.Get("/api/models/user/(.+)/revision/main", [](const httplib::Request&, httplib::Response& res) {
            std::string files;
            for (const std::string name : {"part-00001-of-00002.gguf", "part-00002-of-00002.gguf"})
                files += cat(files.empty() ? "" : ",", R"({"rfilename":")", name, R"(","size":)", contents(name).size(),
                             R"(,"lfs":{"sha256":")", sha256(contents(name)), R"("}})");
            res.set_content(cat(R"({"sha":")", commit, R"(","siblings":[)", files, "]}"), "application/json");
        });
        hub_.Get("/user/(.+)/resolve/(.+)/(.+)", [this](const httplib::Request& req, httplib::Response& res) {
            if (req.get_header_value("Authorization") != "Bearer a-token") res.status = 401;
            else
                res.set_redirect(
                    cat("http://127.0.0.1:", storage_port_, "/", req.matches[1].str(), "/", req.matches[3].str()));
        });
        storage_port_ = storage_.bind_to_any_port("127.0.0.1");
        url           = cat("http://127.0.0.1:", hub_.bind_to_any_port("127.0.0.1"));
        threads_.emplace_back([this] { storage_.listen_after_bind(); });
        threads_.emplace_back([this] { hub_.listen_after_bind(); });
    }
    ~TestHub() {
        while (!hub_.is_running() || !storage_.is_running()) std::this_thread::yield();
        hub_.stop();
        storage_.stop();
        for (std::thread& thread : threads_) thread.join();
    }
    static std::string contents(const std::string& name) { return name + std::string(10000, 'x'); }

    bool token_leaked() const {
        const std::scoped_lock lock(mutex_);
        return token_leaked_;
    }
    std::vector<std::string> ranges() const { // that the storage was asked for; "": a whole file
        const std::scoped_lock lock(mutex_);
        return ranges_;
    }

    std::string url;

private:
    httplib::Server          hub_, storage_;
    int                      storage_port_ = 0;
    mutable std::mutex       mutex_; // of the next two
    bool                     token_leaked_ = false;
    std::vector<std::string> ranges_;
    std::vector<std::thread> threads_;
};

} // namespace

TEST_CASE("which file of a repository is taken", "[hub]") {
    const std::vector<std::string> files{
        "README.md",   "mmproj-F16.gguf", "a-BF16-00001-of-00002.gguf", "a-BF16-00002-of-00002.gguf", "a-Q4_K_M.gguf",
        "a-Q8_0.gguf", "imatrix.gguf",    "UD/a-UD-Q4_K_XL.gguf"};
    using Names = std::vector<std::string>;
    CHECK(choose_files(files, "", "").value() == Names{"a-Q4_K_M.gguf"});
    CHECK(choose_files(files, "q8_0", "").value() == Names{"a-Q8_0.gguf"});
    CHECK(choose_files(files, "UD-Q4_K_XL", "").value() == Names{"UD/a-UD-Q4_K_XL.gguf"});
    CHECK(choose_files(files, "BF16", "").value() == Names{files[2], files[3]});
    CHECK(choose_files(files, "", "A-q8_0.GGUF").value() == Names{"a-Q8_0.gguf"});
    CHECK(choose_files(Names{"b.gguf", "c-Q8_0.gguf"}, "", "").value() == Names{"c-Q8_0.gguf"});
    CHECK(choose_files(Names{"mmproj.gguf", "b.gguf", "c.gguf"}, "", "").value() == Names{"b.gguf"});
    CHECK(has(choose_files(files, "Q4", "").error().message, "no file has the type 'Q4'; there are"));
    CHECK(has(choose_files(files, "Q5_0", "").error().message, "'a-Q8_0.gguf'"));
    CHECK(has(choose_files(files, "", "x.gguf").error().message, "there is no file 'x.gguf'"));
    CHECK(has(choose_files(Names{"config.json"}, "", "").error().message, "there is no GGUF file"));
    CHECK(has(choose_files(Names{"a-00001-of-00002.gguf"}, "", "").error().message, "a-00002-of-00002.gguf"));
    CHECK(part_of("x-00000-of-00002.gguf").count == 1);
    CHECK(part_of("x-00003-of-00002.gguf").count == 1);
    CHECK(part_of("x-00002-of-00002.gguf").number == 2);
    CHECK(parts_of("a/x-00001-of-00002.gguf") == Names{"a/x-00001-of-00002.gguf", "a/x-00002-of-00002.gguf"});
    CHECK(parts_of("x.gguf") == Names{"x.gguf"});

    for (const char* bad : {"model", "/model", "user/", "a/b/c", "../x", "user/..", "us er/x", "user/x?y", "user/x--y"})
        CHECK(!check_hub_model({bad, "", "", "", false}));
    CHECK(check_hub_model({"user/Model-1.5_x-GGUF:Q4_K_M", "", "", "", false}));
    CHECK(!check_hub_model({"", "", "file:///etc/passwd", "", false}));
    CHECK(origin_of("HTTPS://u:p@Host.example:443/x@y") == "https://host.example");
    CHECK(origin_of("http://a\\@b/") == "http://a");
    CHECK(origin_of("http://[::1]:8080/") == "http://[::1]:8080");
    CHECK(origin_of("file") == "");
}

TEST_CASE("processes that link one name at once see it from then on", "[hub]") {
    const std::string top = temporary();
    std::filesystem::remove(top);
    const CachedRepo repo = cached_repo(top, "user/model");
    std::filesystem::create_directories(top + "/models--user--model/blobs");
    std::ofstream(repo.blob("digest")) << "weights";
    std::atomic<int> n_missing = 0, n_failed = 0;
    for (int round = 0; round < 200; round++) {
        const std::string name = cat("model-", round, ".gguf");
        std::barrier      together(4);
        {
            std::vector<std::jthread> threads;
            for (int t = 0; t < 4; t++)
                threads.emplace_back([&] {
                    together.arrive_and_wait();
                    if (!repo.link(commit, name, "digest")) n_failed++;
                    if (!std::ifstream(repo.file(commit, name))) n_missing++;
                });
        }
    }
    CHECK(n_failed == 0);
    CHECK(n_missing == 0);
    CHECK(repo.files(commit).size() == 200);
    CHECK(std::distance(std::filesystem::directory_iterator(top + "/models--user--model/blobs"), {}) == 1);
    // A link that leads nowhere is replaced.
    std::filesystem::remove(repo.file(commit, "model-0.gguf"));
    std::filesystem::create_symlink("nowhere", repo.file(commit, "model-0.gguf"));
    CHECK(repo.link(commit, "model-0.gguf", "digest"));
    CHECK(std::ifstream(repo.file(commit, "model-0.gguf")).good());
    std::filesystem::remove_all(top);
}

TEST_CASE("a model comes from a hub into the cache", "[hub]") {
    namespace fs               = std::filesystem;
    const std::string cache    = temporary();
    const std::string previous = variable("HF_HUB_CACHE");
    fs::remove(cache);
    TestHub hub;
    setenv("HF_HUB_CACHE", cache.c_str(), 1);
    setenv("HF_ENDPOINT", hub.url.c_str(), 1);
    for (const char* name : {"HF_TOKEN", "HF_HUB_OFFLINE", "http_proxy", "all_proxy", "ALL_PROXY"}) unsetenv(name);

    const CachedRepo  repo  = cached_repo(cache, "user/model");
    const std::string first = "part-00001-of-00002.gguf", second = "part-00002-of-00002.gguf",
                      digest = sha256(TestHub::contents(second));
    // Half of the second part is there from an earlier time.
    fs::create_directories(repo.folder + "/blobs");
    std::ofstream(repo.blob(digest) + ".incomplete") << TestHub::contents(second).substr(0, 5000);
    std::int64_t        done = 0;
    const FetchReport   report{[&](const FetchProgress& p) { done = p.done; }, {}};
    HubModel            model{"user/model", "", "", "a-token", false};
    Result<std::string> path = hub_file(model, report);
    INFO((path ? "" : path.error().message));
    REQUIRE(path);
    CHECK(*path == repo.file(commit, first));
    CHECK(slurp(*path) == TestHub::contents(first));
    CHECK(slurp(repo.file(commit, second)) == TestHub::contents(second));
    CHECK(fs::read_symlink(repo.file(commit, second)) == "../../blobs/" + digest);
    CHECK(repo.commit_of("main") == commit);
    CHECK(done == std::int64_t(TestHub::contents(second).size()));
    CHECK(hub.ranges() == std::vector<std::string>{"", "bytes=5000-"});
    CHECK_FALSE(hub.token_leaked());
    // A file that is there is not fetched again; nothing is asked with --offline.
    CHECK(hub_file(model, report));
    model.offline = true;
    CHECK(hub_file(model, report));
    CHECK(hub.ranges().size() == 2);
    CHECK(cached_models(cache).size() == 1);

    model.offline = false, model.repo = "user/wrong";
    CHECK(has(hub_file(model, report).error().message, "it was deleted, so try again"));
    CHECK(fs::is_empty(cached_repo(cache, "user/wrong").folder + "/blobs"));
    model.token = "another";
    CHECK(has(hub_file(model, report).error().message, "does not take your token"));
    model.repo = "user/x/y";
    CHECK_FALSE(check_hub_model(model));
    fs::remove_all(cache);
    unsetenv("HF_ENDPOINT");
    setenv("HF_HUB_CACHE", previous.c_str(), 1);
}
