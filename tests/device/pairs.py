#!/usr/bin/env python3
"""Two equal prompts that arrive together, then the same prompt alone from the cache, over HTTP: the answers must be the same. The second
prompt shares blocks that the first one writes in the same step.

    tests/device/pairs.py DIST_FOLDER MODEL.gguf [PAIRS] [FLAGS OF THE SERVER ...]

Prints, for the server as it is and with --deterministic, how many pairs differ: by more than 0.3 (with --deterministic: at all) in the
first token's log-probability, and in tokens where the choice is not close. Exit status 1: some do.
"""
import os
import random
import sys

dist, model = sys.argv[1], sys.argv[2]
pairs, flags = int(sys.argv[3]) if len(sys.argv) > 3 else 300, sys.argv[4:]
os.environ["QUIRE_SERVER"] = os.path.join(dist, "server")
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "clients"))
from quire_server import Server  # noqa: E402


def answers(server, prompts):
    status, reply = server.post("/v1/completions", {"model": "any", "prompt": prompts, "max_tokens": 4, "temperature": 0, "logprobs": 2,
                                            "ignore_eos": True})
    if status != 200:
        sys.exit(f"{status}: {reply}")
    return [(c["logprobs"]["tokens"], c["logprobs"]["token_logprobs"], c["logprobs"]["top_logprobs"]) for c in reply["choices"]]


def close(top):
    """Whether the two likeliest tokens are about as likely."""
    best = sorted(top.values(), reverse=True)
    return len(best) > 1 and best[0] - best[1] < 0.05


failed = False
for more in ([], ["--deterministic"]):
    random.seed(1)
    with Server("--kv-blocks", "400", *more, *flags, model=model) as server:
        far = other = 0
        largest = 0.0
        for _ in range(pairs):
            prompt = [random.randrange(300, 2000) for _ in range(16 * random.randint(2, 24) + 1)]
            together = answers(server, [prompt, prompt])
            (tokens, logprobs, tops), = answers(server, [prompt])
            apart = max(abs(a[1][0] - logprobs[0]) for a in together)
            largest = max(largest, apart)
            far += apart > (0 if more else 0.3)
            for said, _, _ in together:
                at = next((k for k, (x, y) in enumerate(zip(said, tokens)) if x != y), None)
                if at is not None and (more or not close(tops[at])):
                    other += 1
                    break
        print(f"{' '.join(more) or 'default'}: of {pairs} pairs {far} differ in the first log-probability (largest {largest:.4f}), "
              f"{other} in tokens", flush=True)
        failed = failed or far > 0 or other > 0
sys.exit(failed)
