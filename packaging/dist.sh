#!/bin/sh
# Fills dist/ with what runs on another x86-64 Linux without installing anything: packaging/dist.sh BUILD
#   dist/                          the programs, lib/ with the libraries that they need, models/; and the tests, where they are built
#   dist/quire-VERSION-x86_64.tar.gz  the same as an archive, without the tests and without symbols, with the documents and their pictures
# NOTICES has the licences of all that is in the archive.
# Of the other system they need the C library alone, in the version that is printed, or a later one.
set -eu
umask 022 # the permissions do not depend on the caller's
cd "$(dirname "$0")/.."
build=$1
programs="chat server bench inspect quantize block-viz"
version=$(./chat --version | sed 's/^quire //')
mkdir -p dist/lib dist/models
for program in $programs; do cp "$program" dist/; done
cp models/*.gguf models/README.md dist/models/
cp README.md LICENSE dist/
# The C library and the loader belong to the kernel and the settings of a system; all others come along, and what these need.
libraries=$(for program in $programs; do ldd "dist/$program"; done | sed -n 's/.*=> \(\/[^ ]*\).*/\1/p' | sort -u |
    grep -v -E '/(libc|libm|libdl|libpthread|librt|libresolv|ld-linux[^/]*)\.so')
for library in $libraries; do cp -L "$library" dist/lib/; done
# shellcheck disable=SC2086 # one word for each
packaging/notices.sh $libraries >dist/NOTICES

name=quire-$version-$(uname -m)
mkdir "dist/$name"
cp -r dist/lib dist/models dist/LICENSE dist/NOTICES "dist/$name/"
for file in $(packaging/documents.sh); do
    mkdir -p "dist/$name/$(dirname "$file")"
    packaging/documents.sh "$file" >"dist/$name/$file"
done
for program in $programs; do strip -o "dist/$name/$program" "dist/$program"; done
tar -C dist --sort=name --owner=0 --group=0 --numeric-owner -czf "dist/$name.tar.gz" "$name"
rm -rf "dist/${name:?}"
[ ! -e "$build/quire_tests" ] || cp "$build/quire_tests" dist/

needs=$(find dist -type f -exec objdump -T {} + 2>/dev/null | grep -o 'GLIBC_2\.[0-9.]*' | sort -uV | tail -n 1)
echo "dist/$name.tar.gz: $(du -h "dist/$name.tar.gz" | cut -f 1), needs the C library $needs or later"
