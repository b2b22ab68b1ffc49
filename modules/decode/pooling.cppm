// quire.decode.pooling: the hidden states of a text → one vector, or a reranker's score. **Owns** the weights of the reranker's head.
export module quire.decode.pooling;

import quire.core.base;
import quire.model_file.quants;
import quire.model_file.weights;

export namespace quire {

class Pooler {
public:
    Pooler() = default; // the mean
    // `tensors`: views of the file.
    Pooler(const ModelConfig& config, const ModelTensors& tensors);

    // Adds the state of one position of a text of n positions to `pooled`, which is empty at first.
    void add(std::span<const float> state, int position, int n, std::vector<float>& pooled) const;
    // After the last position: a vector of length 1, or of one number, the score as a probability.
    void finish(std::vector<float>& pooled) const;

private:
    Pooling            pooling_ = Pooling::mean;
    bool               causal_  = false; // only the last position has seen the whole text
    std::vector<float> dense_, dense_bias_, out_,
        out_bias_; // [hidden × hidden], [hidden], [classes × hidden], [classes]
};

} // namespace quire

module :private;

namespace quire {

static std::vector<float> on_host(const TensorView& w) {
    std::vector<float> values(static_cast<std::size_t>(w ? w.rows * w.cols : 0));
    if (w) dequantize(w.type, w.data, values.data(), w.rows * w.cols);
    return values;
}

Pooler::Pooler(const ModelConfig& config, const ModelTensors& tensors)
    : pooling_(config.pooling), causal_(!config.family->encoder) {
    if (pooling_ != Pooling::rank) return;
    dense_      = on_host(tensors.classifier.weight);
    dense_bias_ = on_host(tensors.classifier.bias);
    out_        = on_host(tensors.classifier_out.weight);
    out_bias_   = on_host(tensors.classifier_out.bias);
    out_bias_.resize(std::size_t(config.classes));
}

void Pooler::add(std::span<const float> state, int position, int n, std::vector<float>& pooled) const {
    const bool first = pooling_ == Pooling::first || (pooling_ == Pooling::rank && !causal_);
    const bool last  = pooling_ == Pooling::last || (pooling_ == Pooling::rank && causal_);
    pooled.resize(state.size());
    if ((first && position > 0) || (last && position + 1 < n)) return;
    for (std::size_t i = 0; i < state.size(); i++) pooled[i] += state[i];
}

void Pooler::finish(std::vector<float>& pooled) const {
    if (pooling_ == Pooling::rank) {
        std::vector<double> scores(out_bias_.begin(), out_bias_.end());
        for (std::size_t i = 0; i < pooled.size(); i++) {
            double inner = double(pooled[i]);
            if (!dense_.empty()) {
                inner = dense_bias_.empty() ? 0 : double(dense_bias_[i]);
                for (std::size_t j = 0; j < pooled.size(); j++)
                    inner += double(dense_[i * pooled.size() + j]) * double(pooled[j]);
                inner = std::tanh(inner);
            }
            for (std::size_t c = 0; c < scores.size(); c++) scores[c] += double(out_[c * pooled.size() + i]) * inner;
        }
        // Yes against no, or one score against 0.
        const double against = scores.size() > 1 ? scores[1] : 0;
        pooled               = {float(1 / (1 + std::exp(against - scores[0])))};
        return;
    }
    // The sum has the direction of the mean, and only the direction counts.
    double squares = 0;
    for (float v : pooled) squares += double(v) * double(v);
    const double length = std::sqrt(squares);
    if (length > 0)
        for (float& v : pooled) v = float(double(v) / length);
}

} // namespace quire
