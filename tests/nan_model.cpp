// The functions of nan_model.h, compiled once for all tests.
#include <unistd.h>

#include "process.h"

import quire.core.base;
import quire.core.std;
import quire.core.tensor;
import quire.model_file.gguf;
import quire.tools.bench.random_model;

#include "nan_model.h"

namespace quire::testing {

NanModel::NanModel(std::string_view tensor, std::int64_t row, DType type) : path_(temporary()) {
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

NanModel::~NanModel() { unlink(path_.c_str()); }

} // namespace quire::testing
