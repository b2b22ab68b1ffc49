#!/bin/bash
# An installation is whole, and goes again: tests/packaging.sh FOLDER_OF_THE_TOOLS
#   make uninstall removes what make install has placed, and nothing else
#   the links and pictures of installed pages lead to installed files
#   the notices of what quire carries are there, and those of libraries in the archive
#   completions know the flags of programs and commands (fish, where it is there)
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$(realpath "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
rc=0
wrong() { echo "packaging: $*" >&2; rc=1; }
stage=$folder/stage
state() { (cd "$stage" && find . -printf '%y %p %l\n' -type f -exec sha256sum {} + | sort); }

# -- install and uninstall: what was there before is there again
for prefix in /usr /opt/quire "/opt/my programs"; do
    rm -rf "$stage"
    mkdir -p "$stage/usr/bin" "$stage/usr/share/doc/other"
    echo own >"$stage/usr/bin/own"
    before=$(state)
    packaging/install.sh "$prefix" "$stage" "$tools"
    packaging/install.sh "$prefix" "$stage" "$tools" # again, over the first one
    [ -x "$stage$prefix/bin/quire-chat" ] || wrong "$prefix: no quire-chat"
    make -s uninstall PREFIX="$prefix" DESTDIR="$stage"
    [ "$(state)" = "$before" ] || { wrong "$prefix: after uninstall the folder is another one"; diff <(echo "$before") <(state) >&2 || :; }
    if packaging/uninstall.sh "$prefix" "$stage" 2>"$folder/said"; then wrong "$prefix: a second uninstall passed"; fi
    grep -q 'there is no .*/share/quire/installed' "$folder/said" || wrong "$prefix: a second uninstall does not say why"
done
# A file that somebody changed or added since stays.
packaging/install.sh /usr "$stage" "$tools"
echo '# edited' >>"$stage/etc/quire/server.conf"
ln -sfn /elsewhere "$stage/usr/bin/quire-chat"
touch "$stage/usr/share/quire/models/mine.gguf"
packaging/uninstall.sh /usr "$stage" >"$folder/said"
[ "$(cd "$stage" && find . ! -type d | sort | tr '\n' ' ')" = \
    "./etc/quire/server.conf ./usr/bin/own ./usr/bin/quire-chat ./usr/share/quire/models/mine.gguf " ] ||
    { wrong "a change does not stay, or something else does"; find "$stage" ! -type d >&2; }
[ "$(grep -c 'was changed, and stays' "$folder/said")" = 2 ] || { wrong "what stays is not named"; cat "$folder/said" >&2; }

# -- pages
rm -rf "$stage"
packaging/install.sh /usr "$stage" "$tools"
documents=$stage/usr/share/doc/quire
n_pictures=0
while read -r page; do
    # shellcheck disable=SC2016 # backticks of Markdown
    for link in $(sed 's/`[^`]*`//g' "$page" | grep -o -E '\]\([^)]*\)|src="[^"]*"' | sed -E 's/^\]\(|^src="//; s/[)"]$//; s/#.*//' |
        grep -v -E '^(https?|mailto):' || true); do
        [ -e "$(dirname "$page")/$link" ] || wrong "${page#"$documents/"}: $link is not installed"
        case $link in *.png | *.svg) n_pictures=$((n_pictures + 1)) ;; esac
    done
done < <(find "$documents" -name '*.md')
[ "$n_pictures" -gt 10 ] || wrong "only $n_pictures pictures"

# -- notices
has() { # FILE TEXT...
    local file=$1 text
    shift
    for text; do tr -s ' \n' ' ' <"$file" | grep -q -F -e "$text" || wrong "${file#"$folder/"} lacks: $text"; done
}
carried=("Copyright (c) 2026 the quire authors" "CLI11" "University of Cincinnati" "Yann Collet" "Niels Lohmann" "Yuji Hirose" "Khan Academy"
    "highlight.js" "WordNet 3.0 Copyright 2006 by Princeton University" "LICENSEE agrees to preserve same.")
has "$documents/copyright" "${carried[@]}"
libraries=$(ldd "$tools/server" | sed -n 's/.*=> \(\/[^ ]*\).*/\1/p' | grep -E '/(libssl|libcurl|libzmq|libidn2)\.' || true)
if command -v dpkg-query >/dev/null && [ -n "$libraries" ] && dpkg-query -W libssl-dev >/dev/null 2>&1; then
    # shellcheck disable=SC2086 # one word for each
    packaging/notices.sh $libraries >"$folder/NOTICES"
    has "$folder/NOTICES" "${carried[@]}"
    for library in $libraries; do has "$folder/NOTICES" "$(basename "$library") lib"; done
    has "$folder/NOTICES" "GNU LESSER GENERAL PUBLIC LICENSE" # libidn2's notice names it by a path in Debian
    echo nothing >"$folder/libnone.so"
    if packaging/notices.sh "$folder/libnone.so" >/dev/null 2>"$folder/said"; then wrong "a library without a notice passed"; fi
    has "$folder/said" "the licence of $folder/libnone.so is not on this machine"
fi

# -- completions: LINE WORD..., which have to be among those that are offered
mkdir "$folder/bin"
for program in chat server bench inspect quantize block-viz; do ln -s "$tools/$program" "$folder/bin/quire-$program"; done
PATH=$folder/bin:$PATH
offered() { # SHELL LINE
    # shellcheck disable=SC2016 # the other shell's
    case $1 in
        bash) bash -c '. packaging/quire.bash
            read -ra COMP_WORDS <<<"$1"; [[ $1 != *" " ]] || COMP_WORDS+=("")
            COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _quire; printf "%s\n" "${COMPREPLY[@]}"' bash "$2" ;;
        fish) fish --no-config -c "source packaging/quire.fish; complete -C '$2'" ;;
    esac
}
for shell in bash fish; do
    command -v $shell >/dev/null || continue
    while IFS='|' read -r line words; do
        all=$(offered $shell "$line")
        for word in $words; do grep -q -x -F -e "$word" <<<"$all" || wrong "$shell does not complete '$line' to $word"; done
    done <<'END'
quire-chat --sy|--system-prompt
quire-server --kv-t|--kv-type --kv-type-limit
quire-bench mo|model
quire-bench model --n-|--n-prompt --n-gen --n-depth
quire-bench replicas --|--policy
quire-inspect |show tokenize tool-calls constrain
quire-inspect constrain --|--regex --key-order
quire-quantize --im|--imatrix
quire-quantize in out Q4_K|Q4_K_M Q4_K_S
quire-block-viz --be|--beam --best-of
END
done
exit $rc
