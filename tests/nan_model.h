// A small model with random weights, some of which are NaN.
// Include after the imports of quire.core.std and quire.core.tensor.
#pragma once

namespace quire::testing {

// The file, gone with the object. `tensor` is a matrix or vector of it; its row `row` is NaN: bits that are all set are one, as
// a float, a half or the scale of a block.
class NanModel {
public:
    NanModel(std::string_view tensor, std::int64_t row, DType type = DType::F32);
    NanModel(const NanModel&)            = delete;
    NanModel& operator=(const NanModel&) = delete;
    ~NanModel();

    const std::string& path() const { return path_; }

private:
    std::string path_;
};

} // namespace quire::testing
