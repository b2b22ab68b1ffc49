#!/bin/sh
# The server's pages in a headless Chromium, in four looks, then pages of other origins. axe-core comes in a Python package, of which
# only the file is needed; without a package index the claims about accessibility are skipped, and say so.
#     tests/clients/pages.sh [SERVER]
set -eu
cd "$(dirname "$0")/../.."
mkdir -p build
. tests/clients/installed.sh
installed build/axe tests/clients/axe_requirements.txt --no-deps || :
python3 tests/clients/pages.py "${1:-./server}"
python3 tests/clients/origins.py "${1:-./server}"
