#!/bin/sh
# Every relative link and picture in the Markdown files leads to a file that exists, and every #anchor to a heading. Every source
# file or folder that they name in `code`, by its path from the root, exists.
set -eu
cd "$(dirname "$0")/.."
rc=0

# The anchors of FILE's headings: lower case, letters, digits and hyphens, a blank is a hyphen.
anchors() {
    awk '/^( *```|    )/ { if ($0 ~ /```/) code = !code; next } !code && /^#+ / { sub(/^#+ +/, ""); print tolower($0) }' "$1" |
        sed 's/[^a-z0-9 -]//g; s/ /-/g'
}

for page in *.md docs/*.md docs/*/*.md models/*.md models/*/*.md; do
    # ](TARGET) outside of code; addresses of other hosts are not looked up
    links=$(sed 's/`[^`]*`//g' "$page" | grep -o '\]([^)]*)' | sed 's/^](//; s/)$//' | grep -v -E '^(https?|mailto):' || true)
    for link in $links; do
        file=${link%%#*}
        anchor=${link#"$file"}
        target=$page
        [ -z "$file" ] || target=$(dirname "$page")/$file
        if [ ! -e "$target" ]; then
            echo "$page: ($link): $target does not exist" >&2
            rc=1
        elif [ -n "$anchor" ] && ! anchors "$target" | grep -q -x -F -e "${anchor#?}"; then
            echo "$page: ($link): $target has no such heading" >&2
            rc=1
        fi
    done
    # `modules/LAYER/NAME.cppm` and the like; no patterns, no placeholders in capitals
    for path in $(grep -o '`[^`]*`' "$page" | tr -d '`' |
        grep -x -E '(cuda|docs|examples|models|modules|tests|tools)/[a-z0-9_./-]*' || true); do
        # A module of ARCHITECTURE.md's table has its layer in another column.
        if [ ! -e "$path" ] && ! ls modules/*/"$path.cppm" >/dev/null 2>&1; then
            echo "$page: \`$path\` does not exist" >&2
            rc=1
        fi
    done
done
exit $rc
