#!/bin/sh
# What the documentation counts is what is there: tests/figures.sh FOLDER_OF_THE_TOOLS
# Counts of lines, constants of the sources, defaults of flags, errors of the types, the tables of modules and families; and every
# section with measured times or rates says when they were measured.
set -eu
cd "$(dirname "$0")/.."
tools=$1
rc=0
help=$(mktemp)
text=$(mktemp)
trap 'rm -f "$help" "$text"' EXIT
fault() { echo "$*" >&2; rc=1; }

# stated FILE PATTERN: the number in the one group of PATTERN, an extended regular expression; lines of the file are joined
stated() {
    tr '\n' ' ' <"$1" | tr -s ' ' | sed -n -E "s@.*$2.*@\1@p" | tr -d ,
}
# is FILE PATTERN VALUE [SLACK]: the file states this value, or one that is at most SLACK per cent away
is() {
    got=$(stated "$1" "$2")
    [ -n "$got" ] || { fault "$1: nothing reads: $2"; return; }
    [ -n "$3" ] || { fault "$1: no source for: $2"; return; }
    awk -v a="$got" -v b="$3" -v slack="${4:-0}" 'BEGIN { d = a > b ? a - b : b - a; exit !(d * 100 <= slack * b) }' ||
        fault "$1: $got where it is $3: $2"
}
# constant FILE PATTERN: the first number in the group of PATTERN
constant() { sed -n -E "s@.*$2.*@\1@p" "$1" | head -n 1 | tr -d "'"; }

# -- counts

read_on=$(tr '\n' ' ' <README.md | grep -o 'read four files in this order.*Together they are' | grep -o 'modules/[a-z_/]*\.cppm')
[ "$(echo "$read_on" | wc -l)" = 4 ] || fault "README.md: not four files to read"
# shellcheck disable=SC2086
is README.md 'Together they are about ([0-9,]+) lines' "$(cat $read_on | wc -l)" 10
longest=$(wc -l examples/*.cpp | awk '$2 != "total" && $1 > most { most = $1 } END { print most }')
[ "$longest" -le "$(stated README.md 'has programs of at most ([0-9]+) lines')" ] || fault "README.md: a program of examples/ has $longest lines"
parameters=$("$tools/inspect" show models/quire-14m-q8_0.gguf | sed -E 's/.*"parameters":([0-9]+).*/\1/')
is README.md 'toy model of ([0-9]+) million parameters' "$((parameters / 1000000))"

# -- constants

is ARCHITECTURE.md 'the ([0-9]+) most recently used graphs' "$(constant modules/compute/cuda/backend.cppm 'most_graphs = ([0-9]+)')"
is ARCHITECTURE.md 'processes positions in chunks of ([0-9]+),' "$(constant modules/compute/cpu/kernel_table.cppm 'attention_chunk *= ([0-9]+)')"
is ARCHITECTURE.md 'are cut into ([0-9]+) leaves' "$(constant modules/compute/ranks/shards.cppm 'exact_leaves = ([0-9]+)')"
is ARCHITECTURE.md 'a step takes at most about ([0-9.]+) s' "$(constant tools/chat.cpp 'step_seconds *= interactive \? ([0-9.]+)')"
is docs/kv-memory.md 'while others run, ([0-9]+) % of the blocks' "$(constant modules/engine/options.cppm 'watermark *= 0\.0?([0-9]+)')"
is docs/server.md 'At most ([0-9]+) clients can listen' "$(constant modules/serve/service.cppm 'max_listeners *= ([0-9]+)')"
is docs/server.md 'At most ([0-9]+) empty lines' "$(constant modules/serve/http/request_reader.cppm 'most_blank = ([0-9]+)')"
is docs/server.md 'http.cpp` holds ([0-9,]+) of them' "$(constant tests/test_http.cpp 'min<rlim_t>\(([0-9]+),')"
is docs/tools.md '"parameters"\}\}`, at most ([0-9]+);' "$(constant modules/serve/openai/tool_request.cppm 'most_tools = ([0-9]+)')"

# -- defaults of flags: where the second column of a table has but numbers, --help has the same for the flags of the first

defaults() { # defaults FILE HEADING
    awk -v heading="$2" '
        /^## / { on = $0 == "## " heading }
        on && /^\| `-/ {
            split($0, cell, "|")
            n = split(cell[3], value, ",")
            for (i = 1; i <= n; i++) { gsub(/ /, "", value[i]); if (value[i] !~ /^-?[0-9.]+$/) next }
            found = 0
            rest = cell[2]
            while (match(rest, /`--?[a-z][a-z-]*/)) {
                flag[++found] = substr(rest, RSTART + 1, RLENGTH - 1)
                rest = substr(rest, RSTART + RLENGTH)
            }
            for (i = 1; i <= found; i++) print flag[i], n == 1 ? value[1] : value[i]
            if (n > 1 && n != found) print "bad", cell[2]
        }' "$1"
}
compare_defaults() { # compare_defaults FILE HEADING PROGRAM
    "$tools/$3" --help >"$help"
    defaults "$1" "$2" >"$text"
    while read -r flag value; do
        # "--top-k INT:in 0..1073741824=40"; a flag whose help has no default has it in words, or is another name
        real=$(sed -n -E "s/^ *(.*, ?)?$flag([, ].*)?=(-?[0-9.]+) *\$/\3/p; s/^ *(.*, ?)?$flag([, ].*)?=(-?[0-9.]+) .*/\3/p" "$help" | head -n 1)
        [ -z "$real" ] || awk -v a="$real" -v b="$value" 'BEGIN { exit !(a == b) }' ||
            fault "$1: $flag has the default $real, not $value"
    done <"$text"
}
compare_defaults README.md chat chat
compare_defaults docs/server.md Flags server
compare_defaults docs/block-viz.md "" block-viz

# -- docs/quantize.md: errors in thousandths, to three digits, as tests/test_quantize.cpp has and checks them

awk '
    FNR == NR {
        if (match($0, /DType::[A-Z0-9_]+, [0-9.]+, [0-9.]+, [0-9.]+, [0-9.]+\}/)) {
            split(substr($0, RSTART + 7, RLENGTH - 8), v, ", ")
            for (i = 2; i <= 5; i++) is[v[1], i] = 1000 * v[i]
        }
        next
    }
    /^\| [A-Z0-9_, ]+ \| [0-9.]+ \|/ {
        split($0, cell, " *[|] *")
        n = split(cell[2], type, ", ")
        column[3] = 2; column[4] = 4; column[5] = 3; column[6] = 5 # quire, llama.cpp, weighted quire, weighted llama.cpp
        for (k = 1; k <= n; k++) for (c = 3; c <= 6; c++) {
            if (cell[c] == "" && is[type[k], column[c]] == 0) continue
            if (sprintf("%.3g", cell[c]) != sprintf("%.3g", is[type[k], column[c]])) {
                print FILENAME ": " type[k] ": " cell[c] " where the test has " is[type[k], column[c]] >"/dev/stderr"
                rc = 1
            }
        }
        rows++
    }
    END { if (rows < 10) { print "docs/quantize.md: no table of errors" >"/dev/stderr"; rc = 1 } exit rc }
' tests/test_quantize.cpp docs/quantize.md || rc=1

# -- the table of ARCHITECTURE.md has every module in its layer, and no other

find modules tools -name '*.cppm' | sed 's/\.cppm$//; s,^modules/,,' | awk '
    FNR == NR { slash = index($0, "/"); layer = substr($0, 1, slash - 1); path[layer, ++n[layer]] = substr($0, slash + 1); next }
    /^\| layer \|/ { on = 1 }
    on && /^$/ { on = 0 }
    on && /^\| / {
        split($0, cell, " *[|] *")
        if (cell[2] != "") layer = cell[2]
        names = cell[3] " " (cell[3] ~ /jinja/ ? cell[4] : cell[3] ~ /encoder/ ? cell[4] : "")
        while (match(names, /`[a-z0-9_\/.*]+`/)) {
            name = substr(names, RSTART + 1, RLENGTH - 2)
            names = substr(names, RSTART + RLENGTH)
            sub("^" layer "/", "", name)
            all = name ~ /\*$/ ? substr(name, 1, length(name) - 1) : ""
            sub(/\.$/, "/", all)
            hit = 0
            for (i = 1; i <= n[layer]; i++) {
                p = path[layer, i]
                if (all != "" ? index(p, all) == 1 : p == name || substr(p, length(p) - length(name)) == "/" name) { seen[layer, i] = 1; hit = 1 }
            }
            if (!hit && name !~ /\./) { print "ARCHITECTURE.md: there is no module " name " in " layer >"/dev/stderr"; rc = 1 }
        }
    }
    END {
        for (layer in n) for (i = 1; i <= n[layer]; i++)
            if (!seen[layer, i]) { print "ARCHITECTURE.md: the table has no module " path[layer, i] " of " layer >"/dev/stderr"; rc = 1 }
        exit rc
    }' - ARCHITECTURE.md || rc=1

# -- every family is in both tables of families

for family in $(grep -o 'Family{\.name *= "[a-z0-9-]*"' modules/model_file/family.cppm | sed 's/.*"\(.*\)"/\1/'); do
    for file in README.md docs/adding-a-model.md; do
        grep -q "^|.*\`$family\`" "$file" || fault "$file: no row has the family $family"
    done
done

# -- what was measured names a date: in its section, or at the beginning of the page

for file in README.md ARCHITECTURE.md docs/*.md docs/experiments/*.md models/*.md models/train/*.md; do
    [ "$file" != docs/paper.md ] || continue # made by `bench paper`, simulated times beside measured ones
    awk '
        function finish() {
            if (measured && !dated && !general) { print FILENAME ": measured, but when? " measured >"/dev/stderr"; rc = 1 }
            measured = ""; dated = 0
        }
        /^```/ { code = !code }
        /^#+ / && !code { if (!first) general = dated; first++; if (first == 1) { dated = 0; measured = "" } else finish() }
        /20[0-9][0-9]-[0-9][0-9]-[0-9][0-9]/ { dated = 1; if (first <= 1) general = 1 }
        !code && /[0-9] (µs|ms|tok\/s|t\/s|GB\/s|tokens\/s|requests\/s)([^a-z]|$)/ { if (!measured) measured = $0 }
        END { finish(); exit rc }' "$file" || rc=1
done
exit $rc
