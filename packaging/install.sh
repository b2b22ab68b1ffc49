#!/bin/sh
# Installs what is built: packaging/install.sh PREFIX [DESTDIR]
#   PREFIX/lib/quire          the programs by their own names, and models: a link to PREFIX/share/quire/models
#   PREFIX/bin                quire-chat, quire-server, ...: links to them, as other packages have a `chat`
#   PREFIX/share              the toy model, manual pages, completions, documentation, examples
#   PREFIX/lib/systemd/system quire.service; its flags are in /etc/quire/server.conf (below PREFIX/etc unless PREFIX is /usr)
set -eu
umask 022 # the permissions do not depend on the caller's
cd "$(dirname "$0")/.."
prefix=$1 destdir=${2:-}
to=$destdir$prefix
programs="chat server bench inspect quantize block-viz"
version=$(./chat --version | sed 's/^quire //')
case $prefix in
    /*) ;;
    *) echo "install: PREFIX is $prefix, which is not a path from /" >&2; exit 2 ;;
esac
etc=$prefix/etc zsh=$prefix/share/zsh/site-functions
if [ "$prefix" = /usr ]; then etc=/etc zsh=/usr/share/zsh/vendor-completions; fi

put() { install -D -m 644 "$1" "$2"; } # FILE PATH
mkdir -p "$to/bin"
for program in $programs; do
    install -D -m 755 "$program" "$to/lib/quire/$program"
    if command -v strip >/dev/null; then strip "$to/lib/quire/$program"; fi
    ln -sfn "../lib/quire/$program" "$to/bin/quire-$program"
done
for model in models/*.gguf; do put "$model" "$to/share/quire/$model"; done
ln -sfn ../../share/quire/models "$to/lib/quire/models"

page=$(mktemp)
trap 'rm -f "$page"' EXIT
for program in $programs; do
    packaging/man_page.sh "./$program" "$version" >"$page"
    gzip -9nf "$page"
    put "$page.gz" "$to/share/man/man1/quire-$program.1.gz"
    rm -f "$page.gz"
done
put packaging/quire.bash "$to/share/bash-completion/completions/quire-chat"
for program in $programs; do
    [ "$program" = chat ] || ln -sfn quire-chat "$to/share/bash-completion/completions/quire-$program"
done
put packaging/quire.zsh "$destdir$zsh/_quire"
put packaging/quire.fish "$to/share/fish/vendor_completions.d/quire.fish"
sed "s,@bin@,$prefix/bin,; s,@etc@,$etc," packaging/quire.service >"$page"
put "$page" "$to/lib/systemd/system/quire.service"
[ -e "$destdir$etc/quire/server.conf" ] || put packaging/server.conf "$destdir$etc/quire/server.conf"
for file in README.md LICENSE $(find docs -name '*.md' -o -name '*.svg') $(find examples -type f); do
    case $file in
        *.md | docs/* | examples/*) put "$file" "$to/share/doc/quire/$file" ;;
        LICENSE) put "$file" "$to/share/doc/quire/copyright" ;;
    esac
done
