// The map that forgets what was not used for longest.
#include <catch2/catch_test_macros.hpp>

import quire.core.recent;
import quire.core.std;

using namespace quire;

TEST_CASE("a map of bounded size forgets what was not used for longest, and says what") {
    Recent<int, std::string>                entries(3);
    std::vector<std::string>                forgotten;
    const std::function<void(std::string&)> forget = [&](std::string& s) { forgotten.push_back(s); };
    for (int key : {1, 2, 3}) entries.add(key, std::to_string(key), forget);
    CHECK(forgotten.empty());
    REQUIRE(entries.find(1) != nullptr); // used: 2 is the oldest now
    entries.add(4, "4", forget);
    CHECK(forgotten == std::vector<std::string>{"2"});
    CHECK(entries.find(2) == nullptr);
    *entries.find(3) += "!";
    entries.add(5, "5", forget); // in place of 1
    entries.add(6, "6", forget); // of 4
    entries.add(7, "7", forget); // of 3
    CHECK(forgotten == std::vector<std::string>{"2", "1", "4", "3!"});
    std::size_t n = 0;
    entries.each([&](std::string&) { n++; });
    CHECK(n == entries.size());
    CHECK(n == 3);
}
