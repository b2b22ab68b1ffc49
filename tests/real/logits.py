#!/usr/bin/env python3
"""The log-probabilities of a pretrained model: quire and llama.cpp beside exact arithmetic, and quantised copies of the model.

usage: logits.py FOLDER_OF_BINARIES MODEL FOLDER; prints tables, exits with 1 where quire is further away than it may be.
"""
import json, os, subprocess, sys

import numpy as np
from exact import Llama, log_softmax

try:
    import xllamacpp
except ImportError:  # a machine without a package for it
    xllamacpp = None

TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time there was a small library in a large forest. Nobody knew who had built it, and",
    "Water boils at one hundred degrees Celsius at sea level. On a high mountain it boils",
    "<|im_start|>user\nName three colours of the rainbow.<|im_end|>\n<|im_start|>assistant\n",
    "Memory is handed out in blocks of a fixed size. A table says where the blocks of a sequence are. " * 12 + "A block is",
]
# The rms of the 50 best log-probabilities' errors; quire has K and V in float16, exact arithmetic has not.
MOST_RMS = 0.005
# Means of the divergence from the file's own weights, which have 4 bits: about twice of what these prompts give (2026-11-25). The rows of
# this model are no multiple of 256: most matrices of a Q5_K_M file have Q5_1, of a Q4_K_M file Q5_0.
MOST_DIVERGENCE = {"F16": 1e-4, "Q8_0": 4e-3, "Q6_K": 1.2e-2, "Q5_K_M": 0.12, "Q4_K_M": 0.12}


def quire_logits(binary, model, ids, raw, flags=()):
    subprocess.run([binary, "logits", model, "--ids", ",".join(map(str, ids)), "--raw", raw, *flags], check=True,
                   stdout=subprocess.DEVNULL)
    return np.fromfile(raw, np.float32).astype(np.float64)


class LlamaCpp:
    """llama.cpp in this process."""

    def __init__(self, model):
        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.warmup, params.n_parallel, params.verbosity = model, 1024, False, 1, 0
        self.server = xllamacpp.Server(params)

    def best(self, ids):
        """Log-probabilities of the 200 best next tokens."""
        answer = self.server.handle_completions({"prompt": ids, "n_predict": 1, "logprobs": 200, "temperature": 1.0, "cache_prompt": False})
        return {t["id"]: t["logprob"] for t in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}


def rms(a, b):
    return float(np.sqrt(np.mean((a - b) ** 2)))


def main():
    binaries, model, folder = sys.argv[1:4]
    inspect, raw = os.path.join(binaries, "inspect"), os.path.join(folder, "logits.raw")
    exact = Llama(model)
    peer = LlamaCpp(model) if xllamacpp else None

    failed = False
    prompts, truths = [], []
    print("rms error of the 50 best log-probabilities | tokens | quire, KV f32 | quire | llama.cpp (KV f16)")
    for text in TEXTS:
        ids = json.loads(subprocess.run([inspect, "tokenize", model], input=text, check=True, capture_output=True, text=True).stdout)["ids"]
        truth = exact.log_probabilities(ids)[-1]
        best = np.argsort(-truth)[:50]
        f16 = rms(log_softmax(quire_logits(inspect, model, ids, raw))[best], truth[best])
        f32 = rms(log_softmax(quire_logits(inspect, model, ids, raw, ["--kv-type", "f32"]))[best], truth[best])
        other = "–"
        if peer:
            theirs = peer.best(ids)
            known = [i for i in best if i in theirs]
            other = f"{rms(np.array([theirs[i] for i in known]), truth[known]):.5f}"
        wrong = max(f16, f32) > MOST_RMS
        failed |= wrong
        print(f"{text[:40]!r:44} | {len(ids):4} | {f32:.5f} | {f16:.5f} | {other}{'  TOO FAR' if wrong else ''}")
        prompts.append(ids)
        truths.append(truth)

    print("\nquantised copies | bytes | mean divergence from the file's weights (KL, nats)")
    for kind, most in MOST_DIVERGENCE.items():
        copy = os.path.join(folder, f"copy-{kind}.gguf")
        subprocess.run([os.path.join(binaries, "quantize"), "--allow-requantize", model, copy, kind], check=True, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)
        divergence = 0.0
        for ids, truth in zip(prompts, truths):
            found = log_softmax(quire_logits(inspect, copy, ids, raw))
            divergence += float(np.sum(np.exp(truth) * (truth - found))) / len(prompts)
        wrong = divergence > most
        failed |= wrong
        print(f"{kind:7} | {os.path.getsize(copy):11,} | {divergence:.6f}{'  TOO FAR' if wrong else ''}")
        os.remove(copy)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
