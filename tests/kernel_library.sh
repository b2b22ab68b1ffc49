#!/bin/sh
# Checks the library of kernels without linking the programs: tests/kernel_library.sh LIBRARY
# The library defines each function that its stand-in, cuda/none.cpp, defines, and needs nothing but the CUDA run time. CXX and CUDA_HOME name the
# compiler (clang++-19) and the toolkit (/usr/local/cuda).
set -eu
cd "$(dirname "$0")/.."
library=${1:?the library of kernels}
[ -r "$library" ] || { echo "kernel_library: cannot read $library" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
${CXX:-clang++-19} -std=c++23 -c cuda/none.cpp -o "$work/none.o"
functions() { nm --defined-only -g "$1" | awk '$2 == "T" { print $3 }' | grep 'quire' | sort -u; }
functions "$work/none.o" >"$work/wanted"
functions "$library" >"$work/there"
[ -s "$work/wanted" ] || { echo "kernel_library: cuda/none.cpp defines no function" >&2; exit 1; }
missing=$(comm -23 "$work/wanted" "$work/there")
[ -z "$missing" ] || { echo "kernel_library: $library lacks:" >&2; echo "$missing" | c++filt >&2; exit 1; }
echo 'int main() {}' >"$work/main.cpp"
${CXX:-clang++-19} -fuse-ld=lld "$work/main.cpp" -Wl,--whole-archive "$library" -Wl,--no-whole-archive \
    -L"${CUDA_HOME:-/usr/local/cuda}/lib64" -lcudart_static -ldl -lrt -lpthread -o "$work/main"
echo "kernel_library: $(wc -l <"$work/wanted") functions, all there"
