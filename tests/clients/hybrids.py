#!/usr/bin/env python3
"""Hybrid models over ./server: the second turn of a chat of 8,000 tokens computes its new tokens and at most one checkpoint interval, and two
conversations in turn have the answers that they have without the prefix cache, token by token.

usage: hybrids.py; needs only Python's standard library.
"""
import json, os, random, struct, subprocess, tempfile

from quire_server import ROOT, Server

MODELS = ["lfm2-Q8_0", "nemotron_h-Q8_0", "qwen35-k-Q4_K_M"]
CONTEXT = 16384
WORDS = "the of and to in is that it was for on are with as his they at be this from have or by one had not but what all were when".split()


def with_context(name, folder):
    """A copy of the model that says it was trained with CONTEXT tokens or more."""
    path = os.path.join(folder, name + ".gguf")
    with open(os.path.join(ROOT, "tests", "data", "models", name + ".gguf"), "rb") as file:
        content = bytearray(file.read())
    at = content.index(b".context_length") + len(b".context_length")
    kind, value = struct.unpack_from("<II", content, at)
    assert kind == 4, "context_length is no uint32"
    struct.pack_into("<I", content, at + 4, max(value, CONTEXT))
    with open(path, "wb") as file:
        file.write(content)
    return path


def long_chat(path, interval):
    numbers = random.Random(1)
    messages, before = [{"role": "user", "content": " ".join(numbers.choices(WORDS, k=6400))}], None
    with Server("-c", str(CONTEXT), "--device", "cpu", "--chat-template", "chatml", model=path) as server:
        for turn in range(3):
            status, reply = server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 24, "ignore_eos": True})
            assert status == 200, reply
            prompt, cached = reply["usage"]["prompt_tokens"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert prompt >= 8000, prompt
            if before:
                assert prompt - cached <= prompt - before + interval, \
                    f"turn {turn + 1}: {prompt - cached} of {prompt} tokens were computed, {prompt - before} were new"
                print(f"  turn {turn + 1}: {prompt} tokens, {prompt - before} of them new, {prompt - cached} computed; interval {interval}")
            before = prompt
            messages += [reply["choices"][0]["message"], {"role": "user", "content": " ".join(numbers.choices(WORDS, k=20))}]


def two_talks(path, *flags):
    """Tokens and log-probabilities of A, B, A, B, A, A, B, each prompt of what came before and 33 more tokens; and how many were cached."""
    numbers, answers, cached = random.Random(2), [], 0
    talks = [numbers.choices(range(5, 670), k=n) for n in (700, 900)]
    with Server("-c", "2048", "--device", "cpu", *flags, model=path) as server:
        for which in (0, 1, 0, 1, 0, 0, 1):
            status, reply = server.post("/completion", {"prompt": talks[which], "n_predict": 24, "temperature": 1, "seed": 5, "n_probs": 3,
                                                        "return_tokens": True, "ignore_eos": True})
            assert status == 200, reply
            answers.append((reply["tokens"], [(p["id"], p["logprob"]) for p in reply["completion_probabilities"]]))
            assert len(reply["tokens"]) == 24, reply
            cached += reply["timings"]["cache_n"]
            talks[which] += reply["tokens"] + numbers.choices(range(5, 670), k=33)
    return answers, cached


def main():
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            path = with_context(name, folder)
            shown = subprocess.run([os.path.join(ROOT, "inspect"), "show", path, "--json"], check=True, capture_output=True)
            print(name)
            long_chat(path, json.loads(shown.stdout)["state"]["checkpoint_interval"])
            plain, none = two_talks(path, "--no-prefix-cache")
            assert none == 0, none
            small = "--parallel", "2", "--kv-blocks", "72"
            for flags in (), small, small + ("--kv-host-bytes", "50000000"), ("--block-size", "1"):
                answers, cached = two_talks(path, *flags)
                assert answers == plain, f"{name} {flags}: the prefix cache changes answers"
                assert cached > 0, f"{name} {flags}: nothing was cached"
                print(f"  two talks {' '.join(flags)}: equal; {cached} tokens were cached")


if __name__ == "__main__":
    main()
