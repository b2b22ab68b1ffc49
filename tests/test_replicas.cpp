// bench replicas: the router's policies by hand-worked examples, and fleets in simulated time.
#include <catch2/catch_test_macros.hpp>

#include <numeric>
#include <vector>

import quire.core.base;
import quire.core.std;
import quire.paging.block_hash;
import quire.tools.bench.paper.cost_model;
import quire.tools.bench.replicas.chats;
import quire.tools.bench.replicas.fleet;
import quire.tools.bench.replicas.router;

using namespace quire;
using namespace quire::replicas;

namespace {

std::vector<Token> prompt(int n, Token from = 0) {
    std::vector<Token> tokens(static_cast<std::size_t>(n));
    std::iota(tokens.begin(), tokens.end(), from);
    return tokens;
}

// That a replica stores the first n blocks of a prompt, or no longer has the last of them.
std::vector<CacheChange> stored(const std::vector<Token>& tokens, int n, int block_size) {
    std::vector<CacheChange> changes;
    std::optional<BlockHash> parent;
    for (int i = 0; i < n; i++) {
        const auto  block = std::span(tokens).subspan(std::size_t(i * block_size), std::size_t(block_size));
        CacheChange c{true, chain_hash(parent, block), parent, {block.begin(), block.end()}};
        parent = c.hash;
        changes.push_back(std::move(c));
    }
    return changes;
}

} // namespace

TEST_CASE("a router that follows events goes where the prompt is, unless there is too much to do", "[replicas]") {
    Router     router(Policy::kv_aware, 3, 16, 1);
    const auto text = prompt(100);
    router.events(2, stored(text, 4, 16));
    const Router::Choice first = router.choose(text);
    CHECK(first.replica == 2);
    CHECK(first.work == 100 - 64);
    router.first_token(first);
    // Another 64 tokens of work for the request under way: as much as the blocks save; one more request, and others are better.
    const Router::Choice second = router.choose(text);
    router.first_token(second);
    CHECK(router.choose(text).replica != (second.replica == 2 ? 2 : -1));
    router.ended(first);
    router.ended(second);
    // Without its first block a replica has nothing that can be used.
    CacheChange gone = stored(text, 1, 16)[0];
    gone.stored      = false;
    Router other(Policy::kv_aware, 2, 16, 1);
    other.events(1, stored(text, 4, 16));
    other.events(1, {&gone, 1});
    CHECK(other.choose(text).work == 100);
    // A prompt that waits counts with all that is to be computed, until its first token.
    Router waits(Policy::kv_aware, 2, 16, 1);
    waits.events(0, stored(text, 4, 16));
    const Router::Choice large = waits.choose(prompt(5000, 1000));
    CHECK(waits.choose(text).replica == 1 - large.replica);
}

TEST_CASE("the other policies know only their own requests", "[replicas]") {
    const auto text = prompt(40);
    Router     turns(Policy::round_robin, 3, 16, 1);
    for (int i = 0; i < 7; i++) CHECK(turns.choose(text).replica == i % 3);
    Router                      least(Policy::least_loaded, 3, 16, 1);
    std::vector<Router::Choice> made;
    std::vector<int>            n(3, 0);
    for (int i = 0; i < 6; i++) {
        made.push_back(least.choose(text));
        n[std::size_t(made.back().replica)]++;
    }
    CHECK(n == std::vector<int>{2, 2, 2});
    least.ended(made[3]);
    CHECK(least.choose(text).replica == made[3].replica);
    Router           drawn(Policy::random, 4, 16, 1);
    std::vector<int> counts(4, 0);
    for (int i = 0; i < 4000; i++) counts[std::size_t(drawn.choose(text).replica)]++;
    for (int count : counts) CHECK((count > 900 && count < 1100));
    CHECK(policy_named("kv-aware") == Policy::kv_aware);
    CHECK(!policy_named("sticky"));
}

TEST_CASE("a chat's prompts continue what was said", "[replicas]") {
    Chats chats({.n_open = 20, .think = 2, .context = 2048, .seed = 5});
    for (Round round : chats.first()) {
        for (int i = 0; i < 30; i++) {
            CHECK(round.prompt + round.output < 2048);
            const Round next = chats.next(round, round.at + 1);
            CHECK(next.chat == round.chat);
            CHECK(next.at > round.at + 1);
            if (next.text == round.text) CHECK(next.prompt > round.prompt + round.output);
            round = next;
        }
    }
    CHECK(chats.token_at(3, 17) == chats.token_at(3, 17));
    CHECK(chats.token_at(3, 17) != chats.token_at(4, 17));
}

TEST_CASE("a fleet in simulated time: the same again by its seed, and routers that follow events find more",
          "[replicas]") {
    const paper::CostModel cost{.step = 0.007, .token = 3e-5, .kv = 2e-7, .sequence = 1e-5};
    FleetOptions           o;
    o.n_replicas   = 4;
    o.n_slots      = 40'000;
    o.seconds      = 30;
    o.warm_up      = 10;
    o.chats.n_open = 20;
    o.chats.think  = 3;
    const auto run = [&](Policy policy) {
        o.policy = policy;
        return simulate_fleet(o, cost);
    };
    const FleetResult kv = run(Policy::kv_aware), again = run(Policy::kv_aware), random = run(Policy::random);
    CHECK(kv.n_rounds > 100);
    CHECK(kv.n_rounds == again.n_rounds);
    CHECK(kv.hit == again.hit);
    CHECK(kv.ttft_p99 == again.ttft_p99);
    CHECK(kv.hit > 1.5 * random.hit);
    CHECK(kv.ttft_mean < random.ttft_mean);
    CHECK(kv.balance < 1.5);
    // Alone, every policy is the same.
    o.n_replicas = 1;
    CHECK(run(Policy::least_loaded).hit == run(Policy::kv_aware).hit);
}
