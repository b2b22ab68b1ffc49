#!/bin/sh
# Removes what packaging/install.sh has placed, by the list that it left: packaging/uninstall.sh PREFIX [DESTDIR]
# A file that was changed since stays, and is named: a file of flags that somebody edited, a program of somebody else. A folder goes if the
# installation made it and nothing else is in it.
set -eu
prefix=$1 destdir=${2:-}
manifest=$destdir$prefix/share/quire/installed
case $prefix in
    /*) ;;
    *) echo "uninstall: PREFIX is $prefix, which is not a path from /" >&2; exit 2 ;;
esac
if [ ! -r "$manifest" ]; then
    echo "uninstall: there is no $manifest, the list of what make install has placed there" >&2
    exit 1
fi
list=$(mktemp)
trap 'rm -f "$list"' EXIT
cat "$manifest" >"$list"

# A path may stand there several times, from several versions: one of its lines has to fit.
fits() { # KIND PATH
    case $1 in
        f) [ ! -L "$destdir$2" ] && [ -f "$destdir$2" ] && now=$(sha256sum <"$destdir$2" | cut -d ' ' -f 1) ;;
        l) [ -L "$destdir$2" ] && now=$(readlink "$destdir$2") ;;
    esac && grep -q -x -F -e "$1 $2 $now" "$list"
}
while read -r kind path; do # the path may have blanks, the last word of a line has none
    [ "$kind" != d ] || continue
    path=${path% *}
    if fits "$kind" "$path"; then rm -f "$destdir$path"
    elif [ -e "$destdir$path" ] || [ -L "$destdir$path" ]; then echo "uninstall: $destdir$path was changed, and stays"
    fi
done <"$list"
rm -f "$manifest"
# The deepest first.
sed -n 's/^d //p' "$list" | LC_ALL=C sort -r | while read -r path; do
    [ ! -d "$destdir$path" ] || rmdir "$destdir$path" 2>/dev/null || :
done
