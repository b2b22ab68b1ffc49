#!/bin/sh
# Every flag in the documentation's tables of flags is one that the tool's --help lists, and the pages name every flag of chat and server:
# tests/flags.sh FOLDER_OF_THE_TOOLS
set -eu
cd "$(dirname "$0")/.."
tools=$1
rc=0
help=$(mktemp)
named=$(mktemp)
trap 'rm -f "$help" "$named"' EXIT

# check WHERE: the flags on standard input, one per line, are in $help
check() {
    while read -r flag; do
        grep -q -E -e "(^|[ ,(])$flag([ ,)=!{]|\$)" "$help" || { echo "$1: $flag is not in the tool's --help" >&2; return 1; }
    done
}
# The flags of the first column of a page's tables: page FILE HEADING
first_column() {
    awk -v heading="$2" '/^## / { on = $0 == "## " heading } on && /^\| `-/ { split($0, cell, "|"); print cell[2] }' "$1" |
        grep -o -E '`-[^` ]*' | tr -d '`,'
}

"$tools/chat" --help >"$help"
first_column README.md chat | check "README.md, chat" || rc=1
"$tools/server" --help >"$help"
first_column docs/server.md Flags | check docs/server.md || rc=1
"$tools/block-viz" --help >"$help"
awk '/^\| `-/ { split($0, cell, "|"); print cell[2] }' docs/block-viz.md | grep -o -E '`-[^` ]*' | tr -d '`,' |
    check docs/block-viz.md || rc=1
# The second column of docs/flags.md is what to type here, for any of the tools.
{ "$tools/chat" --help; "$tools/server" --help; "$tools/bench" model --help; "$tools/bench" batched --help; } >"$help"
awk -F'|' '/^\| `/ { print $3 }' docs/flags.md | grep -o -E '(`| )--?[a-z][a-z-]*' | tr -d '` ' | check docs/flags.md || rc=1
# Every long flag of --help stands on a page.
grep -o -h -E -e '--[a-z][a-z0-9-]*' README.md docs/*.md | sort -u >"$named"
for tool in chat server; do
    # "  -n,--predict,--n-predict INT:..." and, switched off, "--no-pages{false}"
    unnamed=$("$tools/$tool" --help | awk '/^ +-/ { print $1 }' | tr ',' '\n' | grep -o -E -e '^--[a-z][a-z0-9-]*' | sort -u | comm -23 - "$named")
    [ -z "$unnamed" ] || { echo "no page names these flags of $tool:" $unnamed >&2; rc=1; }
done
exit $rc
