#!/usr/bin/env python3
"""Makes a tiny model with a layer for multi-token prediction, and the logits of that layer.

    tests/data/mtp/make.py REFERENCE_FOLDER

The model has random weights: a layer with a recurrent state, one with attention, and the MTP layer. Each token has a favourite token behind it,
in the model and in the MTP layer, so that about every second guess comes true. The logits are those of scripts/hyref.py of the reference folder,
which computes a GGUF file in float64, one token at a time. Needs numpy and gguf.
"""
import json, pathlib, sys

import gguf
import numpy as np

HERE = pathlib.Path(__file__).parent
HIDDEN, HEADS, KV_HEADS, HEAD, FF, VOCABULARY = 32, 2, 1, 32, 48, 640
TAPS, GROUPS, STATE_HEADS, STATE = 4, 2, 4, 16
LAYERS = 2  # and the MTP layer
random = np.random.default_rng(20261126)


def write_model(path):
    w = gguf.GGUFWriter(path, "qwen35")
    w.add_name("tiny MTP")
    for key, value in {"context_length": 512, "embedding_length": HIDDEN, "block_count": LAYERS + 1, "nextn_predict_layers": 1,
                       "feed_forward_length": FF, "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS,
                       "attention.key_length": HEAD, "attention.value_length": HEAD, "rope.dimension_count": HEAD // 4,
                       "full_attention_interval": 2, "ssm.conv_kernel": TAPS, "ssm.state_size": STATE, "ssm.group_count": GROUPS,
                       "ssm.time_step_rank": STATE_HEADS, "ssm.inner_size": STATE_HEADS * STATE}.items():
        w.add_uint32(f"qwen35.{key}", value)
    w.add_float32("qwen35.attention.layer_norm_rms_epsilon", 1e-6)
    w.add_float32("qwen35.rope.freq_base", 10000.0)
    tokens = [b"<unk>", b"<s>", b"</s>"] + [b"<0x%02X>" % byte for byte in range(256)]
    kinds = [2, 3, 3] + [6] * 256
    while len(tokens) < VOCABULARY:
        kinds.append(1)
        tokens.append("\u2581w{}".format(len(tokens)).encode())
    w.add_tokenizer_model("llama")
    w.add_token_list(tokens)
    w.add_token_scores([float(-i) for i in range(VOCABULARY)])
    w.add_token_types(kinds)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)

    def matrix(name, rows, cols, scale=1.0, plus=None):
        x = random.normal(0, scale / np.sqrt(cols), (rows, cols))
        w.add_tensor(name + ".weight", (x if plus is None else x + plus).astype(np.float16))

    def vector(name, n, low=0.7, high=1.4):
        w.add_tensor(name, random.uniform(low, high, n).astype(np.float32))

    embedding = random.normal(0, 1, (VOCABULARY, HIDDEN)).astype(np.float16)
    w.add_tensor("token_embd.weight", embedding)
    favourite = embedding[(np.arange(VOCABULARY) * 11 + 7) % VOCABULARY].astype(float)  # 11 and 640 have no common divisor
    matrix("output", VOCABULARY, HIDDEN, 1.6, 0.35 * favourite)
    vector("output_norm.weight", HIDDEN)
    keys, values = GROUPS * STATE, STATE_HEADS * STATE
    for i in range(LAYERS + 1):
        layer = f"blk.{i}."
        vector(layer + "attn_norm.weight", HIDDEN)
        vector(layer + "post_attention_norm.weight", HIDDEN)
        if i == 0:
            matrix(layer + "attn_qkv", 2 * keys + values, HIDDEN)
            matrix(layer + "attn_gate", values, HIDDEN)
            matrix(layer + "ssm_alpha", STATE_HEADS, HIDDEN)
            matrix(layer + "ssm_beta", STATE_HEADS, HIDDEN)
            w.add_tensor(layer + "ssm_conv1d.weight", random.normal(0, 0.5, (2 * keys + values, TAPS)).astype(np.float32))
            vector(layer + "ssm_dt.bias", STATE_HEADS, -1, 1)
            vector(layer + "ssm_a", STATE_HEADS, -2, -0.1)
            vector(layer + "ssm_norm.weight", STATE)
            matrix(layer + "ssm_out", HIDDEN, values, 0.5)
        else:
            matrix(layer + "attn_q", 2 * HEADS * HEAD, HIDDEN)
            matrix(layer + "attn_k", KV_HEADS * HEAD, HIDDEN)
            matrix(layer + "attn_v", KV_HEADS * HEAD, HIDDEN)
            matrix(layer + "attn_output", HIDDEN, HEADS * HEAD, 0.8)
            vector(layer + "attn_q_norm.weight", HEAD)
            vector(layer + "attn_k_norm.weight", HEAD)
        matrix(layer + "ffn_gate", FF, HIDDEN)
        matrix(layer + "ffn_up", FF, HIDDEN)
        matrix(layer + "ffn_down", HIDDEN, FF)
        if i == LAYERS:
            matrix(layer + "nextn.eh_proj", HIDDEN, 2 * HIDDEN, 0.8, np.eye(HIDDEN, 2 * HIDDEN))
            vector(layer + "nextn.enorm.weight", HIDDEN)
            vector(layer + "nextn.hnorm.weight", HIDDEN)
            vector(layer + "nextn.shared_head_norm.weight", HIDDEN)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main(reference):
    path = HERE / "tiny-mtp-F16.gguf"
    write_model(path)
    sys.path.insert(0, str(reference / "scripts"))
    from hyref import Hybrid

    model, cases, hits, tries = Hybrid(str(path)), [], 0, 0
    for n in (1, 2, 9, 40):
        prompt = [int(t) for t in random.integers(3, VOCABULARY, n)]
        state, tokens, guessed, before = model.new_state(), list(prompt), {}, None
        model.mut = None
        for position in range(n + 24):  # the tokens behind the prompt are the likeliest ones
            if before is not None:  # row position - 1: the state before, and the token
                logits, own = model.mtp(before, tokens[position], state, position - 1)
                guessed[position + 1] = int(np.argmax(logits))
                if position == n:
                    first, last = logits, own
            before, row = model.token(tokens[position], state, position)
            if position + 1 == len(tokens):
                tokens.append(int(np.argmax(row)))
            if position == n:  # two more guesses, from the layer's own states; later rows take their places
                chain, kept = [first], {name: list(rows) for name, rows in state[LAYERS].items()}
                for i in (1, 2):
                    logits, last = model.mtp(last, int(np.argmax(chain[-1])), state, position - 1 + i)
                    chain.append(logits)
                state[LAYERS] = kept
        hits += sum(tokens[p] == t for p, t in guessed.items() if p > n)
        tries += sum(p > n for p in guessed)
        cases.append({"tokens": tokens[: n + 1], "top": [guessed[p] for p in range(2, n + 2)],
                      "logits": [[round(float(x), 5) for x in row] for row in chain]})
    (HERE / "tiny-mtp.json").write_text(json.dumps(cases, separators=(",", ":")) + "\n")
    print(f"{hits} of {tries} guesses came true")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]))
