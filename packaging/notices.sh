#!/bin/sh
# Prints the licence of quire and the notices of what quire carries: packaging/notices.sh [LIBRARY...]
#   without a library  what is in the programs and in models/: the copyright file of an installation
#   with libraries     also the notices of these files, from the Debian packages that they belong to, and the licences that those name
# A notice that cannot be found is an error: a copy without it may not be handed on.
set -eu
cd "$(dirname "$0")/.."

cat LICENSE
printf '\n'
cat packaging/third_party.txt
# The words of the page of the model, where the notice is quoted.
printf '\n-- WordNet, in the model quire-14m-q8_0.gguf ------------------------------------------------------------------------\n'
sed -n '/^> WordNet /,$ s/^> \{0,1\}//p' models/README.md
[ $# -gt 0 ] || exit 0

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# The package of each library; the same file may be registered with or without /usr in front.
for library; do
    package=
    for path in "$library" "$(realpath "$library")" "/usr$library" "${library#/usr}"; do
        package=$(dpkg-query -S "$path" 2>/dev/null | sed 's/: .*//; s/, .*//; q')
        [ -z "$package" ] || break
    done
    notice=/usr/share/doc/${package%%:*}/copyright
    if [ -z "$package" ] || [ ! -r "$notice" ]; then
        echo "notices: the licence of $library is not on this machine" >&2
        exit 1
    fi
    # Packages with one source have one notice.
    sum=$(sha256sum <"$notice" | cut -d ' ' -f 1)
    cp "$notice" "$folder/$sum.notice"
    printf '%s %s, %s\n' "$(basename "$library")" "${package%%:*}" "$(dpkg-query -W -f '${source:Package} ${source:Version}' "$package")" \
        >>"$folder/$sum.libraries"
done

printf '\nThe folder lib/ has libraries as Debian distributes them. The sources are those of the packages and versions below, which\n'
printf 'the archive of Debian has.\n'
for notice in "$folder"/*.notice; do
    printf '\n-- library, package, source ---------------------------------------------------------------------------------------\n'
    sort -u "${notice%.notice}.libraries"
    printf '\n'
    cat "$notice"
done
# A notice names these by their path in Debian.
for licence in $(grep -oh '/usr/share/common-licenses/[A-Za-z0-9.+-]*[A-Za-z0-9]' "$folder"/*.notice | sort -u |
    while read -r path; do [ ! -f "$path" ] || realpath "$path"; done | sort -u); do
    printf '\n-- %s ------------------------------------------------------------------------\n' "$licence"
    cat "$licence"
done
