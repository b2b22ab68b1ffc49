#!/usr/bin/env python3
"""Compares the GPU with the CPU on every model of a folder, through ./inspect: logits and greedy tokens.

    tests/device/compare.py DIST_FOLDER MODEL.gguf ...
"""
import json, random, subprocess, sys

dist, models = sys.argv[1], sys.argv[2:]


def run(*arguments):
    p = subprocess.run([f"{dist}/inspect", *arguments], capture_output=True, text=True)
    if p.returncode:
        sys.exit(f"{' '.join(arguments)}: {p.returncode} {p.stderr}")
    return json.loads(p.stdout)


worst_of_all = 0
for model in models:
    vocab = run("show", model)["model"]["vocab_size"]
    random.seed(1)
    line = []
    for n in (1, 7, 33, 130, 300):
        ids = ",".join(str(random.randrange(vocab)) for _ in range(n))
        cpu = run("logits", model, "--ids", ids, "--top", str(vocab), "--device", "cpu")["top"]
        cpu = {t["id"]: t["logprob"] for t in cpu}
        for flags in ([], ["--deterministic"]):
            gpu = run("logits", model, "--ids", ids, "--top", str(vocab), "--device", "cuda", *flags)["top"]
            d = [t["logprob"] - cpu[t["id"]] for t in gpu]
            rms = (sum(x * x for x in d) / len(d)) ** 0.5
            worst_of_all = max(worst_of_all, rms)
            line.append(f"{rms:.4f}")
        a = run("generate", model, "--ids", ids, "-n", "48", "--ignore-eos", "--device", "cpu")["ids"]
        b = run("generate", model, "--ids", ids, "-n", "48", "--ignore-eos", "--device", "cuda")["ids"]
        same = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a))
        line.append(f"{same}/48")
    print(model.split("/")[-1], " ".join(line), flush=True)
print("worst rms of log-probabilities", worst_of_all)
