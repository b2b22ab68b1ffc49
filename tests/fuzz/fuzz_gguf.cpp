// Any bytes as a GGUF file: the file is refused, or everything read from it lies inside it.
#include <cstddef>
#include <cstdint>

import quire.core.base;
import quire.model_file.config;
import quire.model_file.gguf;
import quire.model_file.quants;
import quire.core.std;
import quire.core.tensor;
import quire.model_file.weights;

using namespace quire;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Result<Gguf> file = Gguf::parse(std::as_bytes(std::span(data, size)), "fuzz");
    if (!file) return 0;
    // read every tensor once, its first row as floats
    unsigned sum = 0;
    for (const GgufTensor& t : file->tensors()) {
        for (std::size_t i = 0; i < t.bytes; i += 64) sum += unsigned(t.data[i]);
        if (t.dims[0] <= 1 << 16 && t.type != DType::I64) {
            std::vector<float> row(static_cast<std::size_t>(t.dims[0]));
            dequantize(t.type, t.data, row.data(), t.dims[0]);
        }
    }
    if (auto config = read_config(*file)) (void)bind_tensors(*file, *config);
    ModelConfig target;
    target.vocab_size = 640, target.hidden_size = 32; // as of tests/data/eagle
    if (auto draft = read_eagle_config(*file)) (void)bind_eagle_tensors(*file, *draft, target);
    return sum == 0xffffffff;
}
