// A directory for one test, which is deleted with all that is in it when the test ends. Include before the imports.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>

namespace quire::testing {

struct Folder {
    Folder() : path((std::filesystem::temp_directory_path() / "quire-XXXXXX").string()) {
        if (!mkdtemp(path.data())) throw std::runtime_error("no directory can be made like " + path);
    }
    Folder(const Folder&)            = delete;
    Folder& operator=(const Folder&) = delete;
    ~Folder() { std::filesystem::remove_all(path); }
    std::string path;
};

} // namespace quire::testing
