"""A llama model in float64 with numpy: the weights of a GGUF file, each operation as the papers define it. Slow, and exact."""
import gguf
import numpy as np


class Llama:
    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        value = lambda key: reader.fields[key].contents()
        assert value("general.architecture") == "llama", "exact.py computes llama models only"
        self.n_layers = value("llama.block_count")
        self.n_heads, self.n_kv_heads = value("llama.attention.head_count"), value("llama.attention.head_count_kv")
        self.eps, self.base = value("llama.attention.layer_norm_rms_epsilon"), value("llama.rope.freq_base")
        self.context = value("llama.context_length")
        self.weights = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors}

    def _norm(self, x, name):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps) * self.weights[name]

    def _rotate(self, x):
        """Rotary embedding of neighbouring pairs; x: tokens, heads, dimensions."""
        half = x.shape[-1] // 2
        angle = np.outer(np.arange(len(x)), self.base ** (-np.arange(half) / half))[:, None, :]
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.stack([even * np.cos(angle) - odd * np.sin(angle), even * np.sin(angle) + odd * np.cos(angle)], -1).reshape(x.shape)

    def log_probabilities(self, ids):
        """Of each next token: tokens, vocabulary."""
        w, n = self.weights, len(ids)
        x = w["token_embd.weight"][ids]
        for i in range(self.n_layers):
            of = lambda name: w[f"blk.{i}.{name}.weight"]
            h = self._norm(x, f"blk.{i}.attn_norm.weight")
            q = self._rotate((h @ of("attn_q").T).reshape(n, self.n_heads, -1))
            k = self._rotate((h @ of("attn_k").T).reshape(n, self.n_kv_heads, -1))
            v = (h @ of("attn_v").T).reshape(n, self.n_kv_heads, -1)
            k, v = (np.repeat(a, self.n_heads // self.n_kv_heads, axis=1) for a in (k, v))
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
            scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v)
            x = x + mixed.reshape(n, -1) @ of("attn_output").T
            h = self._norm(x, f"blk.{i}.ffn_norm.weight")
            gate = h @ of("ffn_gate").T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ of("ffn_up").T)) @ of("ffn_down").T
        logits = self._norm(x, "output_norm.weight") @ w.get("output.weight", w["token_embd.weight"]).T
        return log_softmax(logits)


def log_softmax(logits):
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))
