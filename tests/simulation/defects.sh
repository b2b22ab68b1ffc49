#!/bin/sh
# Shows that the simulator finds defects: plants each patch of tests/simulation/defects, alone, in a copy of the tree, builds the simulator
# there and runs it until it fails. Takes minutes for each. tests/simulation/defects.sh [--check] [--seeds N] [NAME...]
# --check: only looks whether every patch still applies.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
seeds=2000
check=
names=
while [ $# -gt 0 ]; do
    case $1 in
        --check) check=1 ;;
        --seeds) seeds=$2; shift ;;
        *) names="$names $1" ;;
    esac
    shift
done
[ -n "$names" ] || names=$(cd "$here/defects" && ls ./*.patch | sed 's,^\./,,; s/\.patch$//')

applies() { (cd "$root" && git apply --check "$here/defects/$1.patch") 2>/dev/null; }

rc=0
if [ -n "$check" ]; then
    for name in $names; do
        applies "$name" || { echo "tests/simulation/defects/$name.patch does not apply" >&2; rc=1; }
    done
    exit $rc
fi

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
# What the build reads; clang looks for changes by time, so the copies keep theirs.
for part in CMakeLists.txt CMakePresets.json modules tools cuda examples tests models; do cp -a "$root/$part" "$copy/"; done
cmake -S "$copy" -B "$copy/build" --preset release -DQUIRE_CUDA=OFF >"$copy/log" 2>&1 || { cat "$copy/log" >&2; exit 1; }
build() { cmake --build "$copy/build" --target simulate >"$copy/log" 2>&1 || { tail -n 40 "$copy/log" >&2; exit 1; }; }

printf '%-34s %-8s %s\n' defect seed "what is wrong"
for name in $names; do
    applies "$name" || { echo "$name does not apply" >&2; exit 1; }
    (cd "$copy" && GIT_CEILING_DIRECTORIES=/ git apply "$here/defects/$name.patch")
    build
    if "$copy/build/simulate" --seeds "$seeds" --no-shrink >"$copy/out"; then
        printf '%-34s %-8s %s\n' "$name" - "not found in $seeds seeds"
        rc=1
    else
        printf '%-34s %-8s %s\n' "$name" "$(sed -n 's/^seed \([0-9]*\) fails.*/\1/p' "$copy/out")" \
            "$(grep -v '^repeat' "$copy/out" | grep . | tail -n 1)"
    fi
    (cd "$copy" && GIT_CEILING_DIRECTORIES=/ git apply --reverse "$here/defects/$name.patch")
done
exit $rc
