#include <catch2/catch_test_macros.hpp>
#include <string>

import quire.terminal;

TEST_CASE("what a model says cannot steer the terminal", "[terminal]") {
    CHECK(quire::printable("a\tb\nc") == "a\tb\nc");
    CHECK(quire::printable("\x1b[2Jx\r\a\x7f\b") == "[2Jx");
    CHECK(quire::printable("\u009b2J \u00a0é日🙂") == "2J \u00a0é日🙂");
}
