#!/bin/sh
# Independent clients against ./server: the openai package and curl; then load and misbehaving clients.
# Parts that need the package index are skipped without one, and say so.
set -eu
cd "$(dirname "$0")/../.."
venv=build/clients
stamp=$venv/installed
mkdir -p build
if ! cmp -s tests/clients/requirements.txt "$stamp"; then
    rm -rf "$venv"
    if python3 -m venv "$venv" >build/clients.log 2>&1 &&
        "$venv/bin/pip" install -q --disable-pip-version-check -r tests/clients/requirements.txt >>build/clients.log 2>&1; then
        cp tests/clients/requirements.txt "$stamp"
    else
        echo "SKIP openai_client.py: $(grep -iE 'error|not' build/clients.log | tail -n 1)"
    fi
fi
[ ! -e "$stamp" ] || "$venv/bin/python" tests/clients/openai_client.py
tests/clients/curl.sh
python3 tests/clients/load.py 20
python3 tests/clients/chaos.py 15
