// A small model with random weights, some of which are NaN.
// Include after the imports of quire.core.base, quire.model_file.gguf, quire.tools.bench.random_model, quire.core.std and quire.core.tensor.
#pragma once

#include <unistd.h>
#include "process.h"

namespace quire::testing {

// The file, gone with the object. `tensor` is a matrix or vector of it; its row `row` is NaN: bits that are all set are one, as
// a float, a half or the scale of a block.
class NanModel {
public:
    NanModel(std::string_view tensor, std::int64_t row, DType type = DType::F32) : path_(temporary()) {
        const ModelShape shape{"nan", 2, 256, 4, 2, 256, 320, 256};
        if (!write_random_model(path_, shape, type)) throw std::runtime_error("cannot write " + path_);
        Result<Gguf> file = Gguf::open(path_);
        if (!file) throw std::runtime_error(file.error().message);
        const GgufTensor* t    = file->tensor(tensor);
        const GgufTensor& last = file->tensors().back(); // ends with the file
        const auto        at   = std::int64_t(file->file_bytes()) - (last.data + last.bytes - t->data);
        const std::string nan(row_bytes(t->type, t->dims[0]), '\xff');
        std::fstream      out(path_, std::ios::in | std::ios::out | std::ios::binary);
        out.seekp(at + row * std::int64_t(nan.size()));
        out.write(nan.data(), std::ptrdiff_t(nan.size()));
        if (!out.flush()) throw std::runtime_error("cannot write " + path_);
    }
    NanModel(const NanModel&)            = delete;
    NanModel& operator=(const NanModel&) = delete;
    ~NanModel() { unlink(path_.c_str()); }

    const std::string& path() const { return path_; }

private:
    std::string path_;
};

} // namespace quire::testing
