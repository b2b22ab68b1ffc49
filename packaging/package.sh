#!/bin/sh
# Makes a .deb of what is built, for the Debian at hand: packaging/package.sh BUILD; its path is the last line that is printed.
set -eu
umask 022 # the permissions do not depend on the caller's
cd "$(dirname "$0")/.."
build=$1
version=$(./chat --version | sed 's/^quire //')
architecture=$(dpkg --print-architecture)
root=$build/package/quire_${version}_$architecture
rm -rf "$build/package"
mkdir -p "$root/DEBIAN" "$build/package/debian"
packaging/install.sh /usr "$(realpath "$root")"
rm "$root/usr/share/quire/installed" # dpkg keeps a list of its own

# dpkg-shlibdeps finds the packages of the libraries; it wants to run beside a debian/control.
printf 'Source: quire\n' >"$build/package/debian/control"
depends=$(cd "$build/package" && find "$(basename "$root")/usr/lib/quire" -type f -exec dpkg-shlibdeps -O {} + 2>log |
    sed -n 's/^shlibs:Depends=//p')
[ -n "$depends" ] || { cat "$build/package/log" >&2; exit 1; }
cat >"$root/DEBIAN/control" <<END
Package: quire
Version: $version
Architecture: $architecture
Maintainer: The authors of quire <quire@localhost>
Section: science
Priority: optional
Installed-Size: $(du -sk --apparent-size "$root/usr" | cut -f 1)
Depends: $depends
Recommends: ca-certificates
Description: engine for large language models in GGUF files
 quire runs large language models: as a chat in the terminal, as a server
 that speaks OpenAI's protocol, and in the browser. It is built around
 PagedAttention: memory is given out in small blocks, and equal beginnings
 share blocks.
 .
 A small model comes with it; others are fetched from a hub.
END
echo /etc/quire/server.conf >"$root/DEBIAN/conffiles"
printf 'quire (%s) unstable; urgency=low\n\n  * The version of the source files.\n\n -- The authors of quire <quire@localhost>  %s\n' \
    "$version" "$(date -R -u -d "@${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}")" |
    gzip -9n >"$root/usr/share/doc/quire/changelog.gz"
(cd "$root" && find usr -type f -print0 | sort -z | xargs -0 md5sum >DEBIAN/md5sums)
dpkg-deb --build --root-owner-group -Zxz -z1 "$root" "$build/package" >/dev/null
ls "$build"/package/*.deb
