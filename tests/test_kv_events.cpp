// KV events for routers: their bytes, batches that are handed out again, and the sockets, seen by a consumer of ZeroMQ's own.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>
#include <zmq.h>
#include <cerrno>
#include <nlohmann/json.hpp>

#include "reference.h"

import quire.core.base;
import quire.core.std;
import quire.engine.engine;
import quire.paging.block_hash;
import quire.schedule.request;
import quire.serve.kv_events.log;
import quire.serve.kv_events.publisher;

#include "engine_tools.h"

using namespace quire;
using namespace quire::testing;

namespace {

using Json = nlohmann::json;

Json events_of(const KvBatch& batch) {
    const Json all = Json::from_msgpack(batch.bytes); // another implementation
    REQUIRE(all.is_array());
    REQUIRE(all.size() == 3);
    CHECK(all[0].is_number_float());
    CHECK(all[2] == 0);
    return all[1];
}

// The knowledge of a consumer after some batches: each block's tokens from the beginning of its prompt.
struct Consumer {
    std::map<std::uint64_t, std::vector<Token>> blocks;
    void                                        take(const Json& events) {
        for (const Json& e : events) {
            if (e["type"] == "AllBlocksCleared") {
                blocks.clear();
            } else if (e["type"] == "BlockRemoved") {
                for (const Json& hash : e["block_hashes"]) CHECK(blocks.erase(hash.get<std::uint64_t>()) == 1);
            } else {
                CHECK(e["type"] == "BlockStored");
                std::vector<Token> prefix;
                if (!e["parent_block_hash"].is_null()) prefix = blocks.at(e["parent_block_hash"].get<std::uint64_t>());
                const auto tokens = e["token_ids"].get<std::vector<Token>>();
                const auto size   = e["block_size"].get<std::size_t>();
                REQUIRE(tokens.size() == e["block_hashes"].size() * size);
                for (std::size_t i = 0; i < e["block_hashes"].size(); i++) {
                    prefix.insert(prefix.end(), tokens.begin() + std::ptrdiff_t(i * size),
                                                                         tokens.begin() + std::ptrdiff_t((i + 1) * size));
                    blocks[e["block_hashes"][i].get<std::uint64_t>()] = prefix;
                }
            }
        }
    }
};

CacheChange stored(BlockHash hash, std::optional<BlockHash> parent, std::vector<Token> tokens) {
    return {true, hash, parent, std::move(tokens)};
}
CacheChange removed(BlockHash hash) { return {false, hash, {}, {}}; }

std::vector<std::string> receive(void* socket) {
    std::vector<std::string> frames;
    for (int more = 1; more;) {
        zmq_msg_t m;
        zmq_msg_init(&m);
        REQUIRE(zmq_msg_recv(&m, socket, 0) >= 0);
        frames.emplace_back(static_cast<const char*>(zmq_msg_data(&m)), zmq_msg_size(&m));
        more = zmq_msg_more(&m);
        zmq_msg_close(&m);
    }
    return frames;
}

} // namespace

TEST_CASE("KV events: the first batch clears all, chains are one event", "[kv-events]") {
    KvEventLog log(2, 1.5);
    REQUIRE(log.from(0, 2).size() == 1);
    CHECK(events_of(log.from(0, 2)[0]) == Json::parse(R"([{"type": "AllBlocksCleared"}])"));
    const std::vector<CacheChange> changes{stored(0xfedcba9876543210, {}, {1, 2}),
                                           stored(7, 0xfedcba9876543210, {300, 70000}), stored(9, {}, {5, 6}),
                                           removed(7), removed(9)};
    const KvBatch&                 batch = log.add(changes, 2.5);
    CHECK(batch.number == 1);
    const Json want = Json::parse(R"([
        {"type": "BlockStored", "block_hashes": [18364758544493064720, 7], "parent_block_hash": null,
         "token_ids": [1, 2, 300, 70000], "block_size": 2, "lora_id": null, "medium": "GPU", "lora_name": null},
        {"type": "BlockStored", "block_hashes": [9], "parent_block_hash": null, "token_ids": [5, 6], "block_size": 2,
         "lora_id": null, "medium": "GPU", "lora_name": null},
        {"type": "BlockRemoved", "block_hashes": [7, 9], "medium": "GPU"}])");
    CHECK(events_of(batch) == want);
}

TEST_CASE("KV events: a recurrent state has the hash of its block and a group of its own", "[kv-events]") {
    KvEventLog  log(2, 0, 2);
    CacheChange state = stored(7, {}, {1, 2}), gone = removed(7);
    state.state = gone.state = true;
    state.group = gone.group = 1;
    const std::vector<CacheChange> changes{stored(7, {}, {1, 2}), state, removed(7)};
    const Json                     events = events_of(log.add(changes, 0));
    REQUIRE(events.size() == 3);
    CHECK_FALSE(events[0].contains("group_idx"));
    CHECK(events[1]["block_hashes"] == Json::array({7}));
    CHECK(events[1]["group_idx"] == 1);
    CHECK(events[1]["kv_cache_spec_kind"] == "mamba");
    for (int i = 0; i < 3; i++) (void)log.add(std::vector{removed(5)}, 0);
    const Json all = events_of(log.from(1, 0)[0]); // the block has gone, its state is listed
    REQUIRE(all.size() == 2);
    CHECK(all[1]["group_idx"] == 1);
    CHECK(events_of(log.add(std::vector{gone}, 2))[0]["group_idx"] == 1);
}

TEST_CASE("KV events: a further group that sees all positions is one of full attention", "[kv-events]") {
    KvEventLog  log(1, 0, 2);
    CacheChange all = stored(7, {}, {1}), window = all;
    all.group     = 1;
    window.group  = 2;
    window.window = 4;
    for (const KvBatch& batch : {log.add(std::vector{all, window}, 0)}) {
        const Json events = events_of(batch);
        REQUIRE(events.size() == 2);
        CHECK(events[0]["group_idx"] == 1);
        CHECK(events[0]["kv_cache_spec_kind"] == "full_attention");
        CHECK(events[1]["group_idx"] == 2);
        CHECK(events[1]["kv_cache_spec_kind"] == "sliding_window");
    }
    for (int i = 0; i < 3; i++) (void)log.add(std::vector{removed(5)}, 0);
    const Json whole = events_of(log.from(1, 0)[0]);
    REQUIRE(whole.size() == 3);
    CHECK(whole[1]["kv_cache_spec_kind"] == "full_attention");
    CHECK(whole[2]["kv_cache_spec_kind"] == "sliding_window");
}

TEST_CASE("KV events: layers with a window have a group of their own", "[kv-events]") {
    KvEventLog log(1, 0, 2);
    const auto in_group = [](CacheChange change) {
        change.group  = 1;
        change.window = 4;
        return change;
    };
    const CacheChange first = stored(7, {}, {1}), second = stored(8, 7, {2});
    const Json        events =
        events_of(log.add(std::vector{first, in_group(first), second, in_group(second), in_group(removed(7))}, 0));
    REQUIRE(events.size() == 3); // a chain of each group is one event
    CHECK(events[0]["block_hashes"] == Json::array({7, 8}));
    CHECK_FALSE(events[0].contains("group_idx"));
    CHECK(events[1]["block_hashes"] == Json::array({7, 8}));
    CHECK(events[1]["group_idx"] == 1);
    CHECK(events[1]["kv_cache_spec_kind"] == "sliding_window");
    CHECK(events[2]["block_hashes"] == Json::array({7}));
    CHECK(events[2]["group_idx"] == 1);
    for (int i = 0; i < 3; i++) (void)log.add(std::vector{in_group(first)}, 0); // told again, it is there once
    const Json all = events_of(log.from(1, 0)[0]);
    REQUIRE(all.size() == 5);
    CHECK(all[3]["block_hashes"] == Json::array({7})); // before the block that continues it
    CHECK(all[3]["group_idx"] == 1);
    CHECK(all[4]["block_hashes"] == Json::array({8}));
    CHECK(all[4]["parent_block_hash"] == 7);
}

TEST_CASE("KV events: the medium says where a block is", "[kv-events]") {
    KvEventLog  log(2, 0);
    CacheChange host = stored(7, {}, {1, 2}), files = host, gone = removed(7);
    host.medium  = Medium::host;
    files.medium = gone.medium = Medium::files;
    const Json events          = events_of(log.add(std::vector{stored(7, {}, {1, 2}), host, files, gone}, 0));
    REQUIRE(events.size() == 4);
    CHECK(events[0]["medium"] == "GPU");
    CHECK(events[1]["medium"] == "CPU");
    CHECK(events[2]["medium"] == "STORAGE");
    CHECK(events[3]["medium"] == "STORAGE");
    CHECK(events[3]["block_hashes"] == Json::array({7}));
}

TEST_CASE("KV events: batches again, or all blocks at once when some are gone", "[kv-events]") {
    KvEventLog log(1, 0, 3);
    for (BlockHash i = 1; i <= 6; i++)
        (void)log.add(std::vector{stored(i, i > 1 ? std::optional(i - 1) : std::nullopt, {Token(i)})}, 0);
    (void)log.add(std::vector{removed(6)}, 0);
    CHECK(log.from(8, 0).empty());
    REQUIRE(log.from(5, 0).size() == 3);
    CHECK(log.from(5, 0)[0].number == 5);
    const auto all = log.from(2, 0); // 2, 3 and 4 are not kept
    REQUIRE(all.size() == 1);
    CHECK(all[0].number == 7);
    Consumer late;
    late.take(events_of(all[0]));
    CHECK(late.blocks.size() == 5);
    CHECK(late.blocks.at(5) == std::vector<Token>{1, 2, 3, 4, 5});
}

TEST_CASE("KV events: large batches are kept up to so many bytes", "[kv-events]") {
    KvEventLog log(1, 0, 1000, 2000);
    for (BlockHash i = 1; i <= 100; i++) (void)log.add(std::vector{stored(i, {}, {Token(i)})}, 0);
    CHECK(log.from(0, 0).size() == 1); // all blocks at once
    const auto last = log.from(98, 0);
    CHECK((last.size() == 3 && last[0].number == 98));
    std::size_t bytes = 0, n = 0;
    for (std::int64_t i = 100; i > 0 && log.next(i, 0)->number == i; i--, n++) bytes += log.next(i, 0)->bytes.size();
    CHECK((n > 5 && bytes <= 2000));
}

TEST_CASE("KV events of an engine tell a consumer exactly which blocks the cache has", "[kv-events]") {
    EngineOptions o;
    o.kv_blocks     = 24;
    o.swap_blocks   = 12;
    o.block_size    = 4;
    o.context       = 64;
    o.max_sequences = 4;
    Engine engine   = load(reference("models/qwen2-Q4_0.gguf"), o);
    engine.log_cache(true);
    KvEventLog          log(4, 0, 5);
    Consumer            consumer;
    std::mt19937        random(1);
    std::vector<Output> events;
    for (int round = 0; round < 12; round++) {
        std::vector<Request> requests;
        for (int i = 0; i < 3; i++) {
            std::vector<Token> prompt;
            for (int t = 0; t < 12 + int(random() % 20); t++)
                prompt.push_back(Token(t < 8 ? round % 3 : int(random() % 50)));
            requests.push_back(greedy(prompt, 6));
            if (round % 4 == 3) requests.back().cache_salt = "secret"; // its blocks are not told
            REQUIRE(engine.submit(requests.back()));
        }
        while (engine.step(events)) {
            events.clear();
            const std::vector<CacheChange> changes = engine.take_cache_changes();
            if (!changes.empty()) consumer.take(events_of(log.add(changes, 0)));
        }
        if (const auto changes = engine.take_cache_changes(); !changes.empty())
            consumer.take(events_of(log.add(changes, 0)));
        Consumer fresh; // learns it from what is kept alone
        for (const KvBatch& batch : log.from(0, 0)) fresh.take(events_of(batch));
        CHECK(fresh.blocks == consumer.blocks);
        // A request finds the blocks that the consumer thinks are cached.
        std::size_t        longest = 0;
        std::vector<Token> prefix;
        for (const auto& [hash, tokens] : consumer.blocks)
            if (tokens.size() > longest && tokens.size() < 50) longest = tokens.size(), prefix = tokens;
        if (prefix.empty()) continue;
        prefix.push_back(3);
        const auto answers = run(engine, {greedy(prefix, 1)});
        CHECK(answers[0].cached_tokens >= int(longest));
        if (const auto changes = engine.take_cache_changes(); !changes.empty())
            consumer.take(events_of(log.add(changes, 0)));
    }
    CHECK(!consumer.blocks.empty());
}

TEST_CASE("KV events of a model with windows tell no memory that has gone", "[kv-events]") {
    // Windows alone; layers with a window and others. With host memory the blocks go there, and are told there.
    const std::string name = GENERATE("mistral-swa-Q8_0.gguf", "gemma2-Q8_0.gguf");
    const bool        host = GENERATE(false, true);
    CAPTURE(name, host);
    EngineOptions o;
    o.kv_blocks     = 40;
    o.swap_blocks   = 0;
    o.block_size    = 4;
    o.context       = 128;
    o.kv_host_bytes = host ? 8 << 20 : 0;
    Engine engine   = load(reference("models/" + name), o);
    engine.log_cache(true);
    using Told      = std::map<std::pair<std::string, int>, std::set<BlockHash>>; // by medium and group
    const auto take = [](Told& told, const Json& events) {
        for (const Json& e : events) {
            if (e["type"] == "AllBlocksCleared") {
                told.clear();
                continue;
            }
            auto& blocks = told[{e["medium"].get<std::string>(), e.value("group_idx", 0)}];
            for (const auto hash : e["block_hashes"].get<std::vector<BlockHash>>()) {
                if (e["type"] == "BlockStored") CHECK(blocks.insert(hash).second);
                else CHECK(blocks.erase(hash) == 1);
            }
        }
        std::erase_if(told, [](const auto& blocks) { return blocks.second.empty(); });
    };
    KvEventLog  log(4, 0, 2);
    Told        told;
    const auto& groups = engine.options().layout.groups;
    const auto  answer = [&](const std::vector<Token>& prompt, int n) {
        const auto answers = run(engine, {greedy(prompt, n)});
        take(told, events_of(log.add(engine.take_cache_changes(), 0)));
        std::size_t blocks = 0; // of the pool
        for (const auto& [where, hashes] : told)
            if (where.first == "GPU") blocks += hashes.size() * std::size_t(groups[std::size_t(where.second)].blocks);
        CHECK(blocks <= std::size_t(engine.options().kv_blocks));
        Told fresh; // from what is kept alone
        for (const KvBatch& batch : log.from(0, 0)) take(fresh, events_of(batch));
        CHECK(fresh == told);
        return answers[0].cached_tokens;
    };
    // Tokens of the prompt's leading blocks that are told of all groups, and of some group.
    const auto n_told = [&](const std::vector<Token>& prompt, bool all) {
        std::optional<BlockHash> parent;
        int                      n = 0;
        for (std::size_t at = 0; at + 4 <= prompt.size(); at += 4) {
            parent  = chain_hash(parent, std::span(prompt).subspan(at, 4));
            int has = 0;
            for (int group = 0; group < int(groups.size()); group++) has += told[{"GPU", group}].contains(*parent);
            if (all && has < int(groups.size())) break;
            n += has > 0 ? 4 : 0;
        }
        return n;
    };
    std::mt19937 random(4);
    const auto   text = [&](int n) {
        std::vector<Token> tokens;
        for (int i = 0; i < n; i++) tokens.push_back(Token(10 + random() % 200));
        return tokens;
    };
    std::vector<Token> prompt = text(80);
    CHECK(answer(prompt, 10) == 0);
    CHECK(n_told(prompt, true) == 80);
    prompt.push_back(3);
    CHECK(answer(prompt, 1) == 80);
    for (int i = 0; i < 4; i++) (void)answer(text(80), 20);
    CHECK(n_told(prompt, false) == 0);
    CHECK(told.contains({"CPU", 0}) == host);
    CHECK((answer(prompt, 1) >= 4) == host);
}

TEST_CASE("KV events over ZeroMQ: numbered messages, and a replay for who missed some", "[kv-events]") {
    auto publisher = KvPublisher::create("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", 2);
    REQUIRE(publisher);
    void* const context = zmq_ctx_new();
    void* const sub     = zmq_socket(context, ZMQ_SUB);
    void* const dealer  = zmq_socket(context, ZMQ_DEALER);
    const int   timeout = 10'000; // milliseconds
    for (void* socket : {sub, dealer}) zmq_setsockopt(socket, ZMQ_RCVTIMEO, &timeout, sizeof timeout);
    zmq_setsockopt(sub, ZMQ_SUBSCRIBE, "", 0);
    REQUIRE(zmq_connect(sub, (*publisher)->events_endpoint().c_str()) == 0);
    REQUIRE(zmq_connect(dealer, (*publisher)->replay_endpoint().c_str()) == 0);
    const auto replay = [&](char first) {
        const char request[8] = {0, 0, 0, 0, 0, 0, 0, first};
        zmq_send(dealer, "", 0, ZMQ_SNDMORE);
        zmq_send(dealer, request, 8, 0);
        std::vector<std::vector<std::string>> replies;
        do replies.push_back(receive(dealer));
        while (replies.back()[2] != std::string(8, '\xff'));
        return replies;
    };
    // A subscription takes its time: batches are sent until one has come.
    int            sent  = 0;
    constexpr int  brief = 20; // milliseconds
    zmq_pollitem_t come{sub, 0, ZMQ_POLLIN, 0};
    do (*publisher)->publish({stored(BlockHash(100 + sent++), {}, {1, 2})});
    while (zmq_poll(&come, 1, brief) == 0 && sent < 100);
    std::vector<std::string> message = receive(sub);
    REQUIRE(message.size() == 3);
    if (message[1] == std::string(8, '\0')) { // subscribed before the publisher's thread began
        CHECK(Json::from_msgpack(message[2])[1][0]["type"] == "AllBlocksCleared");
        message = receive(sub);
        REQUIRE(message.size() == 3);
    }
    CHECK(message[0].empty());
    const int came = int(static_cast<unsigned char>(message[1].back()));
    CHECK(message[1].size() == 8);
    CHECK(Json::from_msgpack(message[2])[1][0]["block_hashes"][0] == 99 + came);
    const auto replies = replay(0);
    REQUIRE(replies.size() == std::size_t(sent) + 2); // from AllBlocksCleared to the end mark
    for (const auto& frames : replies) {
        REQUIRE(frames.size() == 4);
        CHECK(frames[0].empty());
        CHECK(frames[1].empty());
    }
    CHECK(replies[0][2] == std::string(8, '\0'));
    CHECK(Json::from_msgpack(replies[0][3])[1][0]["type"] == "AllBlocksCleared");
    CHECK(Json::from_msgpack(replies[1][3])[1][0]["block_hashes"][0] == 100);
    CHECK(replay(char(sent)).size() == 2);
    zmq_close(sub);
    zmq_close(dealer);
    zmq_ctx_term(context);
    for (const char* where :
         {"tcp://no such place", "tcp://no such place:1", "tcp://127.0.0.1:65536", "tcp://127.0.0.1:1x",
          "inproc://here", "127.0.0.1:5557", "ipc:///no/such/folder/socket"}) {
        const auto refused = KvPublisher::create(where, "", 2);
        REQUIRE(!refused);
        CHECK(refused.error().message.find(where) != std::string::npos);
    }
}

namespace {

std::size_t resident() {
    std::ifstream file("/proc/self/statm");
    std::size_t   all = 0, pages = 0;
    file >> all >> pages;
    return pages * 4096;
}

} // namespace

TEST_CASE("KV events: consumers that ask and never read, or send no requests, do not make the server grow",
          "[kv-events]") {
    auto publisher = KvPublisher::create("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", 2000);
    REQUIRE(publisher);
    for (int i = 0; i < 1000; i++)
        (*publisher)->publish({stored(BlockHash(100 + i), {}, std::vector<Token>(2000, 100'000))}); // 10 MB in all
    void* const        context = zmq_ctx_new();
    const int          timeout = 10'000, one = 1, none = 0; // milliseconds
    std::vector<void*> sockets;
    const auto         consumer = [&](int queue) {
        void* const dealer = sockets.emplace_back(zmq_socket(context, ZMQ_DEALER));
        zmq_setsockopt(dealer, ZMQ_RCVTIMEO, &timeout, sizeof timeout);
        zmq_setsockopt(dealer, ZMQ_LINGER, &none, sizeof none);
        zmq_setsockopt(dealer, ZMQ_RCVHWM, &queue, sizeof queue);
        REQUIRE(zmq_connect(dealer, (*publisher)->replay_endpoint().c_str()) == 0);
        return dealer;
    };
    const auto ask = [](void* dealer) {
        zmq_send(dealer, "", 0, ZMQ_SNDMORE);
        zmq_send(dealer, "\0\0\0\0\0\0\0", 8, 0);
    };
    const auto n_replies = [&](void* dealer) {
        int n = 0;
        while (receive(dealer)[2] != std::string(8, '\xff')) n++;
        return n;
    };
    void* const first = consumer(100'000);
    ask(first);
    CHECK(n_replies(first) == 1001);
    const std::size_t before = resident();
    for (int i = 0; i < 30; i++) {
        void* const lazy = consumer(one);
        for (int k = 0; k < 20; k++) ask(lazy);
    }
    for (int i = 0; i < 5; i++) { // while they wait
        ask(first);
        CHECK(n_replies(first) == 1001);
    }
    CHECK(resident() < before + (std::size_t(150) << 20)); // all of it for each would be 300 MB, for each request 6 GB

    // A message that is longer than any request ends the connection.
    REQUIRE(zmq_socket_monitor(first, "inproc://monitor", ZMQ_EVENT_DISCONNECTED) == 0);
    void* const monitor = sockets.emplace_back(zmq_socket(context, ZMQ_PAIR));
    zmq_setsockopt(monitor, ZMQ_RCVTIMEO, &timeout, sizeof timeout);
    REQUIRE(zmq_connect(monitor, "inproc://monitor") == 0);
    const std::string large(1 << 20, 'x');
    zmq_send(first, large.data(), large.size(), 0);
    CHECK(receive(monitor).size() == 2); // the event, and from where
    for (void* socket : sockets) zmq_close(socket);
    zmq_ctx_term(context);
}

namespace {

// A client of ZMTP 3.0 that says what it likes. The endpoint is tcp://127.0.0.1:PORT.
class RawClient {
public:
    RawClient(const std::string& endpoint, const std::string& kind) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
        sockaddr_in to{};
        to.sin_family      = AF_INET;
        to.sin_port        = htons(std::uint16_t(std::stoi(endpoint.substr(endpoint.rfind(':') + 1))));
        to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        const timeval timeout{20, 0};
        for (int option : {SO_RCVTIMEO, SO_SNDTIMEO}) setsockopt(socket_, SOL_SOCKET, option, &timeout, sizeof timeout);
        REQUIRE(connect(socket_, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0);
        std::string greeting = "\xff" + std::string(8, '\0') + "\x7f\x03" + std::string(1, '\0') + "NULL";
        greeting.resize(64);
        const std::string ready = "\x05READY\x0bSocket-Type" + std::string(3, '\0') + char(kind.size()) + kind;
        REQUIRE(send("" + greeting + '\4' + char(ready.size()) + ready));
    }
    ~RawClient() { close(socket_); }
    RawClient(const RawClient&)            = delete;
    RawClient& operator=(const RawClient&) = delete;

    bool send(std::string_view bytes) {
        while (!bytes.empty()) {
            const ssize_t n = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
            if (n <= 0) return false;
            bytes.remove_prefix(std::size_t(n));
        }
        return true;
    }
    // Whether the other side ends the connection; false: it has said nothing more for 20 s.
    bool is_ended() {
        char    bytes[4096];
        ssize_t n = 0;
        while ((n = recv(socket_, bytes, sizeof bytes, 0)) > 0) {}
        return n == 0 || errno == ECONNRESET;
    }

private:
    int socket_;
};

} // namespace

TEST_CASE("KV events: endless parts of a message and endless subscriptions end their connection", "[kv-events]") {
    auto publisher = KvPublisher::create("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", 2);
    REQUIRE(publisher);
    const std::size_t before = resident();
    {
        std::string parts;
        while (parts.size() < 100'000) parts += std::string("\1\0", 2); // empty, and more to come
        RawClient client((*publisher)->replay_endpoint(), "DEALER");
        for (int i = 0; i < 40 && client.send(parts); i++) {} // 2 million, of 64 bytes in libzmq
        CHECK(client.is_ended());
    }
    {
        RawClient client((*publisher)->events_endpoint(), "SUB");
        int       n = 0;
        for (bool open = true; open && n < 400'000;) {
            std::string subscriptions;
            while (subscriptions.size() < 100'000) {
                const std::string topic = cat("topic ", n++);
                subscriptions += std::string(1, '\0') + char(topic.size() + 1) + '\1' + topic;
            }
            open = client.send(subscriptions);
        }
        CHECK(client.is_ended());
    }
    CHECK(resident() < before + (std::size_t(60) << 20));
    // Others are served as before.
    void* const context = zmq_ctx_new();
    void* const dealer  = zmq_socket(context, ZMQ_DEALER);
    const int   timeout = 10'000; // milliseconds
    zmq_setsockopt(dealer, ZMQ_RCVTIMEO, &timeout, sizeof timeout);
    REQUIRE(zmq_connect(dealer, (*publisher)->replay_endpoint().c_str()) == 0);
    zmq_send(dealer, "", 0, ZMQ_SNDMORE);
    zmq_send(dealer, "\0\0\0\0\0\0\0", 8, 0);
    CHECK(receive(dealer).size() == 4);
    CHECK(receive(dealer)[2] == std::string(8, '\xff'));
    zmq_close(dealer);
    zmq_ctx_term(context);
}

TEST_CASE("KV events: a batch of all blocks is made once for all that ask for it", "[kv-events]") {
    KvEventLog log(2, 0, 3);
    for (int i = 0; i < 10; i++) log.add(std::vector{stored(BlockHash(100 + i), {}, {1, 2})}, 1);
    const auto first = log.next(0, 10);
    CHECK(log.next(1, 10.5).get() == first.get());
    log.add(std::vector{stored(BlockHash(200), {}, {1, 2})}, 10.6);
    CHECK(log.next(0, 10.7).get() == first.get()); // what came after it is kept
    CHECK(log.next(first->number + 1, 10.7)->number == first->number + 1);
    CHECK(log.next(0, 11.5)->number == first->number + 1);
    for (int i = 0; i < 5; i++) log.add(std::vector{stored(BlockHash(300 + i), {}, {1, 2})}, 11.6);
    CHECK(log.next(0, 11.7)->number == first->number + 6); // it is not
}
