#!/usr/bin/env bash
# Compares the logits of models of random shapes, of many families, with those of transformers: run.sh [INSPECT [TESTS [SEED [NAME...]]]].
# llama.cpp's converter writes the models' files. The packages (3 GB) go to build/families.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=build/families
mkdir -p "$here"
# Without a package index there is nothing to compare with.
if ! { [[ -x $here/venv/bin/python ]] || python3 -m venv "$here/venv"; } ||
    ! "$here/venv/bin/python" -m pip install -q --disable-pip-version-check numpy torch transformers sentencepiece pyyaml 2>"$here/log"; then
    echo "SKIP test-families: $(grep -iE 'error|not' "$here/log" | tail -n 1)"
    exit 0
fi
tests/fetch_converter.sh "$here/venv/bin/python" "$here"
inspect=${1:-./inspect} tests=${2:-build/release/quire_tests} seed=${3:-1}
shift $(($# < 3 ? $# : 3))
HF_HUB_OFFLINE=1 "$here/venv/bin/python" tests/families/compare.py "$inspect" "$tests" "$here/llama" "$seed" "$@" 2>"$here/log" || { grep -A 20 Traceback "$here/log" | tail -n 40; exit 1; }
