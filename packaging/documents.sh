#!/bin/sh
# The documents that go with the programs: packaging/documents.sh lists them, with their pictures; packaging/documents.sh FILE prints one as an
# installation has it: links to source files, which are not there, are plain text.
set -eu
cd "$(dirname "$0")/.."
case ${1:-} in
    '')
        printf '%s\n' README.md ARCHITECTURE.md CONTRIBUTING.md models/README.md models/train/README.md
        find docs examples -type f
        ;;
    *.md) sed -E 's,\[([^]]*)\]\((\.\./)*(cuda|modules|packaging|tests|tools)/[^)]*\),\1,g' "$1" ;;
    *) cat "$1" ;;
esac
