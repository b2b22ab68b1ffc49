#!/usr/bin/env python3
"""schemathesis against ./server: requests made from /openapi.json, within its types and beyond them. described.py [SCHEMATHESIS] [EXAMPLES]

A request may be refused with a status that is described and in the described form; a body that breaks a type has to be. One that keeps them
all may be refused as well: a tool that is not defined, a prompt that does not fit. So positive_data_acceptance is no check here.
"""
import json
import os
import subprocess
import sys
import tempfile
import time

from quire_server import ROOT, Server

CONFIG = """
[checks]
positive_data_acceptance.enabled = false

# 501: this model has no marks to fill in the middle.
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 501]
"""
# Routes that stand under /v1 as well, and a stream without an end.
LEFT_OUT = ("^/((chat|responses)/|(chat/completions|responses|embeddings|rerank|tokenize|detokenize|tokenizer_info|models|blocks/events)$)")
# Every value of every field in turn: of the samplers' fields, which all routes for text share, on one of these routes.
SHARING = "^/(completions?$|infill$|v1/(completions|responses|messages|chat/completions/))"


def run(program, server, folder, phases, examples, left_out):
    """schemathesis' own count of its requests."""
    done = subprocess.run(
        [program, "run", server.url + "/openapi.json", "--phases", phases, "--max-examples", examples, "--seed", "1", "--no-shrink",
         "--no-color", "--request-timeout", "60", "--warnings", "off", "--exclude-path-regex", left_out],
        cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        print(done.stdout[-20000:], done.stderr[-2000:])
        sys.exit("described: the answers are not as /openapi.json says")
    counts = [line.strip() for line in done.stdout.splitlines() if "generated" in line]
    if not counts:
        sys.exit(f"described: no requests for {phases}")
    return counts[0].partition(",")[0]


def main():
    program = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, "build/described/bin/schemathesis"))
    examples = sys.argv[2] if len(sys.argv) > 2 else "3"
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Server("--slot-save-path", os.path.join(folder, "slots"), "--max-tokens", "4") as server:
        with open(os.path.join(folder, "schemathesis.toml"), "w") as file:
            file.write(CONFIG)
        made = run(program, server, folder, "examples,fuzzing", examples, LEFT_OUT)
        walked = run(program, server, folder, "coverage", examples, f"{LEFT_OUT}|{SHARING}")
        for pin in json.loads(server.get("/pins"))["data"]:
            assert server.post("/unpin", {"id": pin["id"]})[0] == 200
        server.wait_until_idle()
    print(f"described: all answers as described; made at random: {made}; value by value: {walked}; {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
