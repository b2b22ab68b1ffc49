#!/bin/sh
# What the build does not hold about the layers (CMakeLists.txt: an import of a higher layer finds no module): every folder of modules is a
# layer, a module is named after its path, ARCHITECTURE.md lists the layers in the same order, and two folders of a layer do not import each
# other.
set -eu
cd "$(dirname "$0")/.."
rc=0
fault() { echo "$*" >&2; rc=1; }

layers=$(sed -n 's/^add_layer(\([a-z_]*\).*/\1/p' CMakeLists.txt) # the lowest first
folders=$(find modules -mindepth 1 -maxdepth 1 -type d -printf '%f\n' | sort)
[ "$(echo "$layers" | sort)" = "$folders" ] || fault "CMakeLists.txt: the layers are not the folders of modules/"

listed=$(sed -n '/^<!-- layers -->$/,/^<!-- end of layers -->$/s/^\([a-z_]\{1,\}\) .*/\1/p' ARCHITECTURE.md)
[ "$listed" = "$(echo tools; echo "$layers" | tac)" ] || fault "ARCHITECTURE.md: the list of layers is not that of CMakeLists.txt"

for file in $(find modules tools -name '*.cppm'); do
    path=${file#modules/}
    want=quire.$(echo "${path%.cppm}" | tr / .)
    grep -qx "export module $want;" "$file" || fault "$file: by its path it is $want"
done

pairs=$(grep -rE '^(export )?import quire\.' modules --include='*.cppm' |
    sed -nE 's@^modules/([a-z_]+)/([a-z_]+)/[^:]*:.*import quire\.\1\.([a-z_]+)\..*;.*@\1/\2 \1/\3@p' | awk '$1 != $2' | sort -u)
both=$(echo "$pairs" | awk '{ if (seen[$2 " " $1]) print; seen[$1 " " $2] = 1 }')
[ -z "$both" ] || fault "folders of a layer that import each other: $both"
exit $rc
