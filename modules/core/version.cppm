// quire.core.version: the version that programs, packages and the server's answers name. Owns nothing.
export module quire.core.version;

import quire.core.std;

export namespace quire {

constexpr std::string_view quire_version = "0.1";

} // namespace quire
