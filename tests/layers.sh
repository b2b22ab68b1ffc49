#!/bin/sh
# Imports point to the same layer of modules/layers.txt or to one further down, a module is named after its path, and ARCHITECTURE.md has the same
# list. The words "of LAYER: only A, B" at the end of a layer's line restrict what it imports of that LAYER.
set -eu
cd "$(dirname "$0")/.."
rc=0
list=modules/layers.txt
folders=$(mktemp)
trap 'rm -f "$folders"' EXIT

# The list in ARCHITECTURE.md, between the two markers, in a code block.
sed -n '/^<!-- layers -->$/,/^<!-- end of layers -->$/p' ARCHITECTURE.md | sed '/^<!--/d; /^```/d' | cmp -s - "$list" || {
    echo "ARCHITECTURE.md: the list between the markers is not the text of $list" >&2
    rc=1
}

# Every folder of modules is a layer, and every layer a folder.
{ find modules -mindepth 1 -maxdepth 1 -type d -printf '%f\n'; echo tools; } | sort >"$folders"
cut -d ' ' -f 1 "$list" | sort | cmp -s - "$folders" || { echo "$list: not the folders of modules/ and tools" >&2; rc=1; }

find modules tools -name '*.cppm' -o -name '*.cpp' -o -name '*.h' | sort | xargs awk -v list="$list" '
    function fault(text) { print FILENAME ":" FNR ": " text >"/dev/stderr"; rc = 1 }
    BEGIN {
        while ((getline line <list) > 0) {
            layer = line; sub(/ .*/, "", layer)
            rank[layer] = ++n
            if (match(line, /; of [a-z_]+: only .*/)) {
                split(substr(line, RSTART + 5), part, ": only ")
                only[layer, part[1]] = ", " part[2] ","
            }
        }
    }
    FNR == 1 {
        path = FILENAME; sub(/\.[a-z]+$/, "", path); sub(/^modules\//, "", path); gsub(/\//, ".", path)
        from = path; sub(/\..*/, "", from)
    }
    /^(export )?module quire/ {
        name = $NF; sub(/;.*/, "", name)
        if (name != "quire." path) fault("module " name ": by its path it is quire." path)
    }
    /^(export )?import quire\./ {
        name = $0; sub(/^(export )?import quire\./, "", name); sub(/;.*/, "", name)
        to = name; sub(/\..*/, "", to)
        if (!(to in rank)) fault("quire." name ": there is no layer " to)
        else if (rank[to] < rank[from]) fault("quire." name ": the layer " from " is below " to)
        else if ((from, to) in only && !index(only[from, to], ", " substr(name, length(to) + 2) ","))
            fault("quire." name ": of " to ", " from " imports only" substr(only[from, to], 2, length(only[from, to]) - 2))
    }
    END { exit rc }' || rc=1
exit $rc
