#!/bin/sh
# Installs the packages that a build needs, if any are missing: tools/setup.sh [SET]
# SET is build (the default), sanitize, lint, clients, pages, real, package or bare; each except bare includes build.
# It first looks for what is there, without a network. If nothing is missing it prints nothing and ends.
# tools/setup.sh --list SET prints the packages of a set, one per line (tests/setup_table.sh).
set -eu

missing=
need() { missing="$missing${missing:+ }$1"; }

# Is it there? With --list nothing is, so that every package of the set is named.
has_command() { [ -z "$list" ] && command -v "$1" >/dev/null 2>&1; }
has_header() { [ -z "$list" ] && { [ -e "/usr/include/$1" ] || [ -e "/usr/local/include/$1" ]; }; }
has_library() { [ -z "$list" ] && [ -e "/usr/share/javascript/$1" ]; }

has_cmake() { # 3.28 or later
    has_command cmake || return 1
    version=$(cmake --version 2>/dev/null) || return 1
    version=${version#cmake version }
    major=${version%%.*} minor=${version#*.} minor=${minor%%.*}
    [ "$major" -gt 3 ] 2>/dev/null || [ "$minor" -ge 28 ] 2>/dev/null
}

has_catch2() { # 3 or later; the version file says set(PACKAGE_VERSION "3.7.1")
    [ -z "$list" ] || return 1
    for file in /usr/local/*/cmake/Catch2/Catch2ConfigVersion.cmake /usr/share/cmake/Catch2/Catch2ConfigVersion.cmake \
        /usr/lib/cmake/Catch2/Catch2ConfigVersion.cmake /usr/lib/*/cmake/Catch2/Catch2ConfigVersion.cmake; do
        [ -r "$file" ] || continue
        while read -r line; do
            case $line in
                'set(PACKAGE_VERSION "'[012].*) break ;;
                'set(PACKAGE_VERSION "'[0-9]*) return 0 ;;
            esac
        done <"$file"
    done
    return 1
}

has_sanitizers() {
    [ -z "$list" ] || return 1
    for file in /usr/lib/llvm-19/lib/clang/19/lib/*/libclang_rt.tsan*; do
        [ -e "$file" ] && return 0
    done
    return 1
}

has_curl() { # Debian keeps its headers in a folder of the architecture
    [ -z "$list" ] || return 1
    for file in /usr/include/curl/curl.h /usr/include/*/curl/curl.h /usr/local/include/curl/curl.h; do
        [ -e "$file" ] && return 0
    done
    return 1
}

has_venv() { # [PYTHON]
    has_command "${1:-python3}" && "${1:-python3}" -c 'import ensurepip, venv' 2>/dev/null
}

look() {
    missing=
    if [ "$set" = bare ]; then
        has_command debootstrap || need debootstrap
        has_command unshare || need util-linux
        has_command ip || need iproute2
        return
    fi
    has_command make || need make
    has_command ninja || need ninja-build
    has_command pkg-config || need pkg-config
    has_command clang++-19 || need clang-19
    has_command clang-scan-deps-19 || need clang-tools-19
    has_command ld.lld-19 || need lld-19
    has_header xxhash.h || need libxxhash-dev
    has_header httplib.h || need libcpp-httplib-dev
    has_header openssl/ssl.h || need libssl-dev
    has_curl || need libcurl4-openssl-dev
    has_header zmq.h || need libzmq3-dev
    has_command openssl || need openssl
    has_header nlohmann/json.hpp || need nlohmann-json3-dev
    has_header CLI/CLI.hpp || need libcli11-dev
    has_header utf8proc.h || need libutf8proc-dev
    has_header jemalloc/jemalloc.h || need libjemalloc-dev
    has_cmake || need cmake
    has_catch2 || need catch2
    # Without these the chat page is plainer, but whole: they are no reason to install something, except for its tests.
    if [ -n "$missing" ] || [ "$set" = pages ]; then
        has_library katex/katex.js || need libjs-katex
        has_library highlight.js/highlight.min.js || need libjs-highlight.js
    fi
    if [ "$set" = sanitize ]; then
        has_sanitizers || need libclang-rt-19-dev
        has_command llvm-symbolizer-19 || has_command llvm-symbolizer || need llvm-19 # tests/tsan.supp names functions
    fi
    if [ "$set" = clients ]; then
        has_command curl || need curl
        has_venv || need python3-venv
    fi
    if [ "$set" = package ]; then
        has_command dpkg-shlibdeps || need dpkg-dev
    fi
    if [ "$set" = pages ]; then
        has_command chromium || has_command google-chrome || need chromium
        has_command python3 || need python3
        has_venv || need python3-venv
    fi
    if [ "$set" = real ]; then # a module of Debian's own Python, whatever stands before it in PATH
        [ -z "$list" ] && [ -e /usr/lib/python3/dist-packages/torch/__init__.py ] || need python3-torch
        has_venv /usr/bin/python3 || need python3-venv
    fi
    if [ "$set" = lint ]; then
        has_command clang-tidy-19 || need clang-tidy-19
        has_command clang-format-19 || need clang-format-19
    fi
}

log=
give_up() { # WHY...
    [ -z "$log" ] || grep '^[EW]:' "$log" | tail -n 5 >&2
    echo "setup: missing packages: $missing (cmake from 3.28, catch2 from 3). Not installed: $*" >&2
    exit 1
}

list=
[ "${1:-}" != --list ] || { list=yes; shift; }
set=${1:-build}
case $set in
    build | sanitize | lint | clients | pages | real | package | bare) ;;
    *) echo "usage: tools/setup.sh [--list] [build|sanitize|lint|clients|pages|real|package|bare]" >&2; exit 2 ;;
esac
look
[ -z "$list" ] || { printf '%s\n' $missing; exit 0; }
[ -z "$missing" ] && exit 0

# -- something is missing: apt, as root

has_command apt-get || give_up "this machine has no apt-get; install what corresponds to these Debian packages."
if [ "$(id -u)" = 0 ]; then
    as_root=
elif has_command sudo && { sudo -n true 2>/dev/null || { [ -t 0 ] && [ -t 2 ] && sudo -v; }; }; then
    as_root=sudo
else
    give_up "that takes root or a user who may use sudo."
fi

log=$(mktemp)
added=
trap 'rm -f "$log"' EXIT

# apt-get, quiet unless it fails; the lock is waited for, as a fresh machine may be updating itself
apt() {
    $as_root env DEBIAN_FRONTEND=noninteractive LC_ALL=C apt-get -q -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 \
        "$@" </dev/null 2>&1
}
update() { apt update >>"$log" || true; } # somebody else's broken source is no reason to stop: what is needed may be found yet

# What apt-get says on standard input, as far as it tells how far it is: a line that changes on a terminal, else a line for
# each tenth package.
progress() {
    awk -v file="$log" -v terminal="$([ ! -t 1 ] || echo yes)" '
        function show(what) {
            if (terminal) printf "\r\033[Ksetup: %s", what
            else if (what !~ /^(fetching|unpacking)/ || n_shown++ % 10 == 0) print "setup: " what
            fflush()
        }
        { print >>file; fflush(file) }
        /^[0-9]+ upgraded,/ { total = $3 }
        /^Need to get/ { sub(/\.$/, ""); printf "setup: %s packages; n%s\n", total, substr($0, 2); fflush() }
        /^After this operation/ { sub(/\.$/, ""); printf "setup: a%s\n", substr($0, 2); fflush() }
        /^Get:/ { show("fetching " $5 " (" ++n_got " of " total ")") }
        /^Unpacking / { show("unpacking " $2 " (" ++n_unpacked " of " total ")") }
        /^Setting up / { if (terminal) show("setting up " $3 " (" ++n_done " of " total ")") }
        END { if (terminal) printf "\r\033[K" }'
}
install() {
    { apt install -y --no-install-recommends "$@" || : >"$log.failed"; } | progress
    [ -e "$log.failed" ] || return 0
    rm -f "$log.failed"
    [ -z "$added" ] || $as_root rm -f "$added"
    give_up "apt-get failed."
}

# Debian 12 has CMake 3.25 and Catch2 2: these two come from its backports suite, which is added if apt has it not yet.
# The new entry is the machine's own of Debian bookworm main (URI, signature, options), but for suite and component.
# apt says where that one stands: FILE:N, line N of a .list or paragraph N of a .sources.
add_backports() {
    lists() { apt-get indextargets --format "$1" 'Created-By: Packages' "Codename: $2" 'Component: main'; }
    [ -z "$(lists '$(URI)' bookworm-backports)" ] || return 0
    place=$(lists '$(LABEL)|$(SOURCESENTRY)' bookworm | sed -n 's/^Debian|//p' | head -n 1)
    [ -n "$place" ] || give_up "apt knows no entry of Debian bookworm main to derive its backports suite from."
    file=${place%:*} number=${place##*:}
    added=/etc/apt/sources.list.d/quire-backports.${file##*.}
    echo "setup: adding bookworm-backports in $added"
    case $file in
        *.list) sed -nE "$number"'s/^(deb[[:space:]]+(\[[^]]*\][[:space:]]*)?[^[:space:]]+).*/\1 bookworm-backports main/p' "$file" ;;
        *) sed '/^#/d' "$file" | awk -v number="$number" '
            BEGIN { RS = ""; FS = "\n" }
            NR != number { next }
            {
                for (i = 1; i <= NF; i++) {
                    if ($i ~ /^[^ \t]/) { field = tolower($i); sub(/:.*/, "", field) } # an indented line goes on with its field
                    if (field !~ /^(types|suites|components)$/) print $i
                }
                print "Types: deb\nSuites: bookworm-backports\nComponents: main"
            }' ;;
    esac | $as_root tee "$added" >/dev/null
    update
}

echo "setup: installing $missing"
case " $missing " in
    *" clang-19 "*) echo "setup: about 1 GB on disk and about four minutes, once" ;;
esac
wanted=$missing packages='' backports=
codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
# Only these come from backports, each by name: with `-t bookworm-backports` their libraries would, too (libcurl among
# them), and other packages of Debian 12 that need exactly those libraries, curl among them, could not be installed any more.
for package in $missing; do
    case $codename:$package in
        bookworm:cmake) packages="$packages cmake/bookworm-backports cmake-data/bookworm-backports" backports=yes ;;
        bookworm:catch2) packages="$packages catch2/bookworm-backports" backports=yes ;;
        *) packages="$packages $package" ;;
    esac
done
update
[ -z "$backports" ] || add_backports
install $packages

hash -r
look
[ -z "$missing" ] || give_up "apt-get installed $wanted, but these are still not found, or too old."
