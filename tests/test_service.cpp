// The service between the callers and the engine.
#include <catch2/catch_test_macros.hpp>

#include "reference.h"

import quire.core.base;
import quire.engine.engine;
import quire.schedule.request;
import quire.serve.service;
import quire.core.std;

#include "engine_tools.h"

using namespace quire;
using namespace quire::testing;

TEST_CASE("a caller that does not take its output is cut off, others are not") {
    EngineOptions o = small_blocks(false, 256, 4);
    o.context       = 256;
    ServiceOptions options;
    options.max_behind = 200'000;
    Service    service(load(reference("models/llama3-gqa-Q8_0.gguf"), o), options);
    const auto submit = [&](int logprobs) {
        Request r           = greedy({1, 2, 3}, 200);
        r.ignore_end        = true;
        r.sampling.logprobs = logprobs;
        auto handle         = service.submit({r});
        REQUIRE(handle.has_value());
        return std::move(*handle);
    };
    const auto          behind = submit(200), reads = submit(200);
    std::vector<Output> outputs;
    std::size_t         n = 0;
    while (reads->wait(1, outputs))
        for (const Output& output : outputs) n += output.tokens.size();
    CHECK(n == 200);
    REQUIRE(behind->wait(1, outputs));
    REQUIRE(outputs.size() == 1);
    CHECK(outputs[0].finish == FinishReason::refused);
    CHECK(outputs[0].message.contains("reads too slowly"));
    CHECK(outputs[0].tokens.empty());
}
