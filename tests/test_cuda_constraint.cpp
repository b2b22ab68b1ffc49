// Constraints on the GPU: masks go up with the sampling plan, those of different constraints are made at the same time. Without a
// GPU these tests print that and pass.
#include <catch2/catch_test_macros.hpp>

#include "../cuda/kernels.h"
#include "reference.h"

import quire.constraint.compile;
import quire.core.base;
import quire.core.json;
import quire.core.std;
import quire.core.tensor;
import quire.engine.engine;
import quire.schedule.request;

#include "cuda_tools.h"
#include "engine_tools.h"

using namespace quire;
using namespace quire::testing;

namespace {

std::shared_ptr<Constraint> compiled(std::string_view schema) {
    ConstraintSpec spec{.kind = ConstraintSpec::Kind::json_schema};
    spec.schema = *json_parse(std::string(schema));
    return *compile_constraint(spec);
}

} // namespace

TEST_CASE("GPU: answers under constraints satisfy them, and are those of the CPU", "[cuda]") {
    if (no_gpu()) return;
    EngineOptions o;
    o.device         = "cpu";
    o.max_sequences  = 32;
    o.kv_blocks      = 512;
    Engine cpu       = load(reference("models/llama3-gqa-F16.gguf"), o);
    o.device         = "cuda";
    Engine     gpu   = load(reference("models/llama3-gqa-F16.gguf"), o);
    const auto kinds = std::array{
        compiled(R"({"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer"}}})"),
        compiled(R"({"type":"array","items":{"enum":["first","second","third"]},"minItems":2,"maxItems":9})"),
        compiled(R"({"type":"array","items":{"type":"integer","minimum":-9,"maximum":99}})"),
        compiled(R"({"type":"string","pattern":"^[a-f]{4,12}( [0-9]+)?$"})"),
    };
    const auto kind_of      = [&](int i) { return i % 6 == 5 ? nullptr : &kinds[std::size_t(i) % kinds.size()]; };
    const auto requests_for = [&](Engine& engine) {
        std::mt19937         random(4);
        std::vector<Request> requests;
        for (int i = 0; i < 24; i++) {
            Request r;
            for (int n = 3 + int(random() % 60); n > 0; n--)
                r.prompt.push_back(int(random() % unsigned(engine.config().vocab_size)));
            r.max_tokens           = 24;
            r.sampling.seed        = random();
            r.sampling.temperature = i % 2 == 0 ? 0.0f : 1.0f;
            r.sampling.logprobs    = i % 5 == 0 ? 2 : -1;
            if (const auto* kind = kind_of(i)) r.constraint = ConstraintState(*kind, engine.token_trie());
            requests.push_back(std::move(r));
        }
        return requests;
    };
    const auto got = run(gpu, requests_for(gpu)), want = run(cpu, requests_for(cpu));
    int        tokens = 0, same = 0;
    for (std::size_t i = 0; i < got.size(); i++) {
        CAPTURE(i);
        if (const auto* kind = kind_of(int(i))) {
            ConstraintState state(*kind, gpu.token_trie());
            for (Token t : got[i].tokens) CHECK(state.accept(t));
        }
        CHECK((got[i].finish == FinishReason::stop || got[i].finish == FinishReason::length));
        bool alike = true;
        for (std::size_t k = 0; k < want[i].tokens.size(); k++) {
            alike = alike && k < got[i].tokens.size() && got[i].tokens[k] == want[i].tokens[k];
            tokens++;
            same += alike;
        }
    }
    CAPTURE(tokens, same); // random weights make close choices: most of the tokens, not all
    CHECK(same * 10 >= tokens * 7);
}
