#!/usr/bin/env python3
"""./server under llama-server's flags, for llama.cpp's own tests of its server: every model becomes the file $QUIRE_MODEL."""
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Flags of llama-server without a meaning here, and how many values follow each.
DROPPED = {"--hf-repo": 1, "--hf-file": 1, "--model-url": 1, "--ubatch-size": 1, "--cache-ram": 1, "-fa": 1, "--media-path": 1,
           "--pooling": 1, "--tags": 1, "--offline": 0, "--no-jinja": 0, "--jinja": 0, "--kv-unified": 0, "--swa-full": 0,
           "--no-cache-idle-slots": 0, "--backend_sampling": 0, "--metrics": 0,
           "--embedding": 0, "--reranking": 0, "--cont-batching": 0, "--no-mmproj": 0}
RENAMED = {"--no-ui": "--no-pages"}

given, arguments = sys.argv[1:], []
# llama-server divides its context among the slots, unless they share one cache; here each sequence has the whole one.
slots = 1 if "--kv-unified" in given or "--parallel" not in given else int(given[given.index("--parallel") + 1])
while given:
    flag = given.pop(0)
    if flag in DROPPED:
        del given[:DROPPED[flag]]
    elif flag == "--reasoning":
        # llama-server's auto switches reasoning on where the template can; here it leaves the template as it is.
        arguments += flag, {"auto": "on"}.get(value := given.pop(0), value)
    elif flag == "--ctx-size":
        arguments += flag, str(int(given.pop(0)) // slots)
    else:
        arguments.append(RENAMED.get(flag, flag))
program = os.environ.get("QUIRE_SERVER", os.path.join(ROOT, "server"))
os.execv(program, [program, "-m", os.environ["QUIRE_MODEL"], *arguments])
