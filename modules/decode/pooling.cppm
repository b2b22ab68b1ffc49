// quire.decode.pooling: the hidden states of a text → one vector, or a reranker's score. **Owns** the weights of the reranker's head.
export module quire.decode.pooling;

import quire.core.base;
import quire.core.std;
import quire.core.tensor;
import quire.model_file.config;
import quire.model_file.quants;
import quire.model_file.weights;

export namespace quire {

class Pooler {
public:
    Pooler() = default; // the mean
    // `tensors`: views of the file.
    Pooler(const ModelConfig& config, const ModelTensors& tensors);

    // Takes up the state of one position of a text of n positions; `pooled` is empty at first.
    void add(std::span<const float> state, int position, int n, std::vector<float>& pooled) const;
    // After the last: a vector of length 1, or of one number, the score as a probability.
    void finish(std::vector<float>& pooled) const;

private:
    Pooling            pooling_ = Pooling::mean;
    std::vector<float> dense_, dense_bias_, out_; // [hidden × hidden], [hidden], [hidden]
    double             out_bias_ = 0;
};

} // namespace quire

module :private;

namespace quire {

static std::vector<float> on_host(const TensorView& w) {
    std::vector<float> values(static_cast<std::size_t>(w ? w.rows * w.cols : 0));
    if (w) dequantize(w.type, w.data, values.data(), w.rows * w.cols);
    return values;
}

Pooler::Pooler(const ModelConfig& config, const ModelTensors& tensors) : pooling_(config.pooling) {
    if (pooling_ != Pooling::rank) return;
    dense_      = on_host(tensors.classifier.weight);
    dense_bias_ = on_host(tensors.classifier.bias);
    out_        = on_host(tensors.classifier_out.weight);
    if (tensors.classifier_out.bias) out_bias_ = double(on_host(tensors.classifier_out.bias)[0]);
}

void Pooler::add(std::span<const float> state, int position, int n, std::vector<float>& pooled) const {
    const bool first = pooling_ == Pooling::first || pooling_ == Pooling::rank;
    pooled.resize(state.size());
    if ((first && position > 0) || (pooling_ == Pooling::last && position + 1 < n)) return;
    for (std::size_t i = 0; i < state.size(); i++) pooled[i] += state[i];
}

void Pooler::finish(std::vector<float>& pooled) const {
    if (pooling_ == Pooling::rank) {
        double score = out_bias_;
        for (std::size_t i = 0; i < pooled.size(); i++) {
            double inner = double(pooled[i]);
            if (!dense_.empty()) {
                inner = dense_bias_.empty() ? 0 : double(dense_bias_[i]);
                for (std::size_t j = 0; j < pooled.size(); j++)
                    inner += double(dense_[i * pooled.size() + j]) * double(pooled[j]);
                inner = std::tanh(inner);
            }
            score += double(out_[i]) * inner;
        }
        pooled = {float(1 / (1 + std::exp(-score)))};
        return;
    }
    // The mean has the direction of the sum, and only that counts.
    double squares = 0;
    for (float v : pooled) squares += double(v) * double(v);
    const double length = std::sqrt(squares);
    if (length > 0)
        for (float& v : pooled) v = float(double(v) / length);
}

} // namespace quire
