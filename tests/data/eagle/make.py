#!/usr/bin/env python3
"""Makes a tiny model, three drafts of EAGLE-3 for it, and the logits of these drafts.

    tests/data/eagle/make.py

The weights are random, but each token has a favourite token behind it, and the drafts' layer looks at the last token first, so that many guesses
come true and many do not. The drafts are of the forms that files have: with a vocabulary of their own and the model's embedding (small), with an
embedding, a hidden size and norms of their own (wide), and with the model's embedding and output (shared). The logits are computed here in
float64, row by row, from the weights as the files have them: token t[p + 1] and the state of position p make row p. Needs numpy and gguf.
"""
import json, pathlib

import gguf
import numpy as np

HERE = pathlib.Path(__file__).parent
HIDDEN, HEADS, KV_HEADS, HEAD, FF, LAYERS, VOCABULARY = 32, 2, 1, 32, 48, 4, 640
EPS, BASE = 1e-6, 10000.0
random = np.random.default_rng(20261127)


class File:
    """A GGUF file as it is written, and its weights as they are read again."""

    def __init__(self, path, arch, name, numbers):
        self.w, self.t = gguf.GGUFWriter(path, arch), {}
        self.w.add_name(name)
        for key, value in numbers.items():
            self.w.add_uint32(f"{arch}.{key}", value)
        self.w.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", EPS)
        self.w.add_float32(f"{arch}.rope.freq_base", BASE)
        tokens = [b"<unk>", b"<s>", b"</s>"] + [b"<0x%02X>" % byte for byte in range(256)]
        kinds = [2, 3, 3] + [6] * 256
        while len(tokens) < VOCABULARY:
            kinds.append(1)
            tokens.append("\u2581w{}".format(len(tokens)).encode())
        self.w.add_tokenizer_model("llama")
        self.w.add_token_list(tokens)
        self.w.add_token_scores([float(-i) for i in range(VOCABULARY)])
        self.w.add_token_types(kinds)
        self.w.add_bos_token_id(1)
        self.w.add_eos_token_id(2)
        self.w.add_unk_token_id(0)

    def add(self, name, x):
        self.w.add_tensor(name, x)
        self.t[name] = x.astype(np.float64) if x.dtype != np.int64 else x

    def matrix(self, name, rows, cols, scale=1.0, plus=0):
        self.add(name + ".weight", (random.normal(0, scale / np.sqrt(cols), (rows, cols)) + plus).astype(np.float16))

    def vector(self, name, n, low=0.7, high=1.4):
        self.add(name, random.uniform(low, high, n).astype(np.float32))

    def close(self):
        self.w.write_header_to_file()
        self.w.write_kv_data_to_file()
        self.w.write_tensors_to_file()
        self.w.close()


def write_target(path):
    f = File(path, "llama", "tiny target",
             {"context_length": 512, "embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": FF,
              "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD,
              "attention.value_length": HEAD, "rope.dimension_count": HEAD, "vocab_size": VOCABULARY})
    f.add("token_embd.weight", random.normal(0, 1, (VOCABULARY, HIDDEN)).astype(np.float16))
    favourite = f.t["token_embd.weight"][(np.arange(VOCABULARY) * 11 + 7) % VOCABULARY]  # no common divisor: each token is one
    f.matrix("output", VOCABULARY, HIDDEN, 1.2, 0.4 * favourite)
    f.vector("output_norm.weight", HIDDEN)
    for i in range(LAYERS):
        b = f"blk.{i}."
        f.vector(b + "attn_norm.weight", HIDDEN)
        f.matrix(b + "attn_q", HEADS * HEAD, HIDDEN)
        f.matrix(b + "attn_k", KV_HEADS * HEAD, HIDDEN)
        f.matrix(b + "attn_v", KV_HEADS * HEAD, HIDDEN)
        f.matrix(b + "attn_output", HIDDEN, HEADS * HEAD, 0.6)
        f.vector(b + "ffn_norm.weight", HIDDEN)
        f.matrix(b + "ffn_gate", FF, HIDDEN)
        f.matrix(b + "ffn_up", FF, HIDDEN)
        f.matrix(b + "ffn_down", HIDDEN, FF, 0.6)
    f.close()
    return f.t


def write_draft(path, target, kind):
    hidden, heads, layers = (48, 3, [0, 2, 4]) if kind == "wide" else (HIDDEN, HEADS, [1, 2, 3])
    f = File(path, "eagle3", f"tiny draft, {kind}",
             {"context_length": 512, "embedding_length": hidden, "block_count": 1, "feed_forward_length": FF,
              "attention.head_count": heads, "attention.head_count_kv": 1, "attention.key_length": HEAD,
              "attention.value_length": HEAD, "rope.dimension_count": HEAD, "vocab_size": VOCABULARY,
              "target_hidden_size": HIDDEN})
    f.w.add_array("eagle3.target_layers", layers)
    f.w.add_bool("eagle3.norm_before_residual", kind == "wide")
    f.w.add_bool("eagle3.norm_before_fc", kind == "wide")
    grown = np.eye(hidden, HIDDEN)  # the target's space in the draft's
    f.matrix("fc", hidden, 3 * HIDDEN, 0.5)
    if kind == "wide":
        f.vector("enc.output_norm.weight", 3 * HIDDEN)
        f.add("token_embd.weight", (target["token_embd.weight"] @ grown.T + random.normal(0, 0.2, (VOCABULARY, hidden))).astype(np.float16))
        f.add("rope_freqs.weight", random.uniform(1, 8, HEAD // 2).astype(np.float32))
        f.add("output.weight", (target["output.weight"] @ grown.T + random.normal(0, 0.1, (VOCABULARY, hidden))).astype(np.float16))
    if kind == "small":
        tokens = np.sort(random.permutation(VOCABULARY)[:420]).astype(np.int64)
        f.add("d2t", tokens)
        f.add("output.weight", target["output.weight"][tokens].astype(np.float16))
    # Rows with one token in the query and in the key attract each other, and the layer adds that token's embedding.
    last = np.eye(HEAD, 2 * hidden)
    f.vector("blk.0.attn_norm.weight", hidden)
    f.vector("blk.0.attn_norm_2.weight", hidden)
    f.matrix("blk.0.attn_q", heads * HEAD, 2 * hidden, 0.3, 1.2 * np.tile(last, (heads, 1)))
    f.matrix("blk.0.attn_k", HEAD, 2 * hidden, 0.3, 1.2 * last)
    f.matrix("blk.0.attn_v", HEAD, 2 * hidden, 0.3, last)
    f.matrix("blk.0.attn_output", hidden, heads * HEAD, 0.3, np.tile(np.eye(hidden, HEAD), heads) / heads)
    f.vector("blk.0.ffn_norm.weight", hidden)
    f.matrix("blk.0.ffn_gate", FF, hidden)
    f.matrix("blk.0.ffn_up", FF, hidden)
    f.matrix("blk.0.ffn_down", hidden, FF, 0.6)
    f.vector("output_norm.weight", hidden)
    f.close()
    f.t["layers"], f.t["normed"], f.t["heads"] = layers, kind == "wide", heads
    return f.t


def norm(x, weight):
    return x / np.sqrt(np.mean(x * x) + EPS) * weight


def rope(x, position, divisors=1.0):
    """The pairs (2i, 2i + 1) of each head [heads × HEAD]."""
    angle = position * BASE ** (-np.arange(0, HEAD, 2) / HEAD) / divisors
    even, odd = x[:, 0::2], x[:, 1::2]
    out = np.empty_like(x)
    out[:, 0::2], out[:, 1::2] = even * np.cos(angle) - odd * np.sin(angle), even * np.sin(angle) + odd * np.cos(angle)
    return out


def attend(t, b, h, heads, position, cache, divisors=1.0):
    """The layer's attention of one token, which is the last one of the cache afterwards."""
    q = rope((t[b + "attn_q.weight"] @ h).reshape(heads, HEAD), position, divisors)
    k = rope((t[b + "attn_k.weight"] @ h).reshape(1, HEAD), position, divisors)
    cache.append((k[0], t[b + "attn_v.weight"] @ h))
    scores = q @ np.array([k for k, _ in cache]).T / np.sqrt(HEAD)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return t[b + "attn_output.weight"] @ (weights @ np.array([v for _, v in cache])).reshape(-1)


def feed_forward(t, b, h):
    gate = t[b + "ffn_gate.weight"] @ h
    return t[b + "ffn_down.weight"] @ (gate / (1 + np.exp(-gate)) * (t[b + "ffn_up.weight"] @ h))


def run_target(t, token, position, caches):
    """The residual before each layer and behind the last one, and the logits."""
    x, states = t["token_embd.weight"][token].copy(), []
    for i in range(LAYERS):
        b = f"blk.{i}."
        states.append(x.copy())
        x = x + attend(t, b, norm(x, t[b + "attn_norm.weight"]), HEADS, position, caches[i])
        x = x + feed_forward(t, b, norm(x, t[b + "ffn_norm.weight"]))
    return states + [x.copy()], t["output.weight"] @ norm(x, t["output_norm.weight"])


def state_of(t, states):
    joined = np.concatenate([states[i] for i in t["layers"]])
    return t["fc.weight"] @ (norm(joined, t["enc.output_norm.weight"]) if t["normed"] else joined)


def run_draft(t, target, token, state, position, cache):
    """The logits for the target's vocabulary, and the layer's own state."""
    embedding = t.get("token_embd.weight", target["token_embd.weight"])[token]
    normed = norm(state, t["blk.0.attn_norm_2.weight"])
    h = np.concatenate([norm(embedding, t["blk.0.attn_norm.weight"]), normed])
    x = attend(t, "blk.0.", h, t["heads"], position, cache, t.get("rope_freqs.weight", 1.0))
    x = x + (normed if t["normed"] else state)
    x = x + feed_forward(t, "blk.0.", norm(x, t["blk.0.ffn_norm.weight"]))
    row = t.get("output.weight", target["output.weight"]) @ norm(x, t["output_norm.weight"])
    if "d2t" in t:
        logits = np.full(VOCABULARY, -1e30)  # for -infinity, which JSON has not
        logits[t["d2t"]] = row
        row = logits
    return row, x


def main():
    target = write_target(HERE / "tiny-target-F16.gguf")
    texts = []  # tokens, the states of each position; the tokens behind the prompt are the likeliest ones
    for n in (1, 9, 40):
        tokens, states, caches = [int(t) for t in random.integers(3, VOCABULARY, n)], [], [[] for _ in range(LAYERS)]
        for position in range(n + 24):
            state, row = run_target(target, tokens[position], position, caches)
            states.append(state)
            if position + 1 == len(tokens):
                tokens.append(int(np.argmax(row)))
        texts.append((n, tokens, states))
    for kind in ("small", "wide", "shared"):
        draft, cases, hits, tries = write_draft(HERE / f"tiny-eagle-{kind}-F16.gguf", target, kind), [], 0, 0
        for n, tokens, states in texts:
            cache, guessed, chain = [], {}, []
            for p in range(n + 23):
                logits, own = run_draft(draft, target, tokens[p + 1], state_of(draft, states[p]), p, cache)
                guessed[p + 2] = int(np.argmax(logits))
                if p + 1 == n:  # two more guesses, from the layer's own states; later rows take their places
                    chain, kept = [logits], list(cache)
                    for i in (1, 2):
                        logits, own = run_draft(draft, target, int(np.argmax(chain[-1])), own, p + i, cache)
                        chain.append(logits)
                    cache = kept
            hits += sum(tokens[p] == t for p, t in guessed.items() if p > n)
            tries += sum(p > n for p in guessed)
            cases.append({"tokens": tokens[: n + 1], "top": [guessed[p] for p in range(2, n + 2)],
                          "logits": [[round(float(x), 5) for x in row] for row in chain]})
        (HERE / f"tiny-eagle-{kind}.json").write_text(json.dumps(cases, separators=(",", ":")) + "\n")
        print(f"{kind}: {hits} of {tries} guesses came true")


if __name__ == "__main__":
    main()
