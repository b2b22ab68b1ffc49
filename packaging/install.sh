#!/bin/sh
# Installs what is built: packaging/install.sh PREFIX [DESTDIR [PROGRAMS]]
#   PREFIX/lib/quire          the programs by their own names, from the folder PROGRAMS (.), and models: a link to PREFIX/share/quire/models
#   PREFIX/bin                quire-chat, quire-server, ...: links to them, as other packages have a `chat`
#   PREFIX/share              the toy model, manual pages, completions, documentation with its pictures, examples
#   PREFIX/lib/systemd/system quire.service; its flags are in /etc/quire/server.conf (below PREFIX/etc unless PREFIX is /usr)
#   PREFIX/share/quire/installed  what was placed, for packaging/uninstall.sh:
#                             d PATH (a folder that was not there), l PATH TARGET (a link), f PATH SHA256 (a file)
set -eu
umask 022 # the permissions do not depend on the caller's
cd "$(dirname "$0")/.."
prefix=$1 destdir=${2:-} from=${3:-.}
programs="chat server bench inspect quantize block-viz"
version=$("$from/chat" --version | sed 's/^quire //')
case $prefix in
    /*) ;;
    *) echo "install: PREFIX is $prefix, which is not a path from /" >&2; exit 2 ;;
esac
etc=$prefix/etc zsh=$prefix/share/zsh/site-functions
if [ "$prefix" = /usr ]; then etc=/etc zsh=/usr/share/zsh/vendor-completions; fi

page=$(mktemp)
list=$(mktemp)
trap 'rm -f "$page" "$page.gz" "$list"' EXIT
manifest=$prefix/share/quire/installed
# Files of an earlier run count, too: uninstall.sh passes over what is not there any more.
if [ -f "$destdir$manifest" ]; then cat "$destdir$manifest" >"$list"; fi

[ -z "$destdir" ] || mkdir -p "$destdir"
folder() { # PATH: makes the folder and those above it
    [ ! -d "$destdir$1" ] || return 0
    folder "$(dirname "$1")"
    mkdir "$destdir$1"
    echo "d $1" >>"$list"
}
put() { # FILE PATH [MODE]
    folder "$(dirname "$2")"
    install -m "${3:-644}" "$1" "$destdir$2"
    case $2 in "$prefix"/lib/quire/*) if command -v strip >/dev/null; then strip "$destdir$2"; fi ;; esac
    echo "f $2 $(sha256sum <"$destdir$2" | cut -d ' ' -f 1)" >>"$list"
}
link() { # TARGET PATH
    folder "$(dirname "$2")"
    ln -sfn "$1" "$destdir$2"
    echo "l $2 $1" >>"$list"
}

for program in $programs; do
    put "$from/$program" "$prefix/lib/quire/$program" 755
    link "../lib/quire/$program" "$prefix/bin/quire-$program"
done
for model in models/*.gguf; do put "$model" "$prefix/share/quire/$model"; done
link ../../share/quire/models "$prefix/lib/quire/models"

for program in $programs; do
    packaging/man_page.sh "$from/$program" "$version" >"$page"
    gzip -9nf "$page"
    put "$page.gz" "$prefix/share/man/man1/quire-$program.1.gz"
    rm -f "$page.gz"
done
put packaging/quire.bash "$prefix/share/bash-completion/completions/quire-chat"
for program in $programs; do
    [ "$program" = chat ] || link quire-chat "$prefix/share/bash-completion/completions/quire-$program"
done
put packaging/quire.zsh "$zsh/_quire"
put packaging/quire.fish "$prefix/share/fish/vendor_completions.d/quire.fish"
sed "s,@bin@,$prefix/bin,; s,@etc@,$etc," packaging/quire.service >"$page"
put "$page" "$prefix/lib/systemd/system/quire.service"
[ -e "$destdir$etc/quire/server.conf" ] || put packaging/server.conf "$etc/quire/server.conf"
for file in $(packaging/documents.sh); do
    packaging/documents.sh "$file" >"$page"
    put "$page" "$prefix/share/doc/quire/$file"
done
packaging/notices.sh >"$page"
put "$page" "$prefix/share/doc/quire/copyright"

folder "$(dirname "$manifest")"
LC_ALL=C sort -u "$list" >"$page"
install -m 644 "$page" "$destdir$manifest"
