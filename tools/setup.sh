#!/bin/sh
# Installs what a build needs from the distribution, if anything is missing: tools/setup.sh [build|sanitize|lint]
# Looks first, offline and without starting more than one program; with nothing missing it says nothing and ends.
set -eu

missing=
need() { missing="$missing${missing:+ }$1"; }

# command NAME... / header FILE: is it there?
has_command() { command -v "$1" >/dev/null 2>&1; }
has_header() { [ -e "/usr/include/$1" ] || [ -e "/usr/local/include/$1" ]; }

has_cmake() { # 3.28 or later
    has_command cmake || return 1
    version=$(cmake --version 2>/dev/null) || return 1
    version=${version#cmake version }
    major=${version%%.*} minor=${version#*.} minor=${minor%%.*}
    [ "$major" -gt 3 ] 2>/dev/null || [ "$minor" -ge 28 ] 2>/dev/null
}

has_catch2() { # 3 or later; the version file says set(PACKAGE_VERSION "3.7.1")
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
    for file in /usr/lib/llvm-19/lib/clang/19/lib/*/libclang_rt.tsan*; do
        [ -e "$file" ] && return 0
    done
    return 1
}

look() {
    missing=
    has_command make || need make
    has_command ninja || need ninja-build
    has_command pkg-config || need pkg-config
    has_command clang++-19 || need clang-19
    has_command clang-scan-deps-19 || need clang-tools-19
    has_command ld.lld-19 || need lld-19
    has_header xxhash.h || need libxxhash-dev
    has_header nlohmann/json.hpp || need nlohmann-json3-dev
    has_header CLI/CLI.hpp || need libcli11-dev
    has_header utf8proc.h || need libutf8proc-dev
    has_header histedit.h || need libedit-dev
    has_cmake || need cmake
    has_catch2 || need catch2
    if [ "$set" = sanitize ]; then
        has_sanitizers || need libclang-rt-19-dev
    fi
    if [ "$set" = lint ]; then
        has_command clang-tidy-19 || need clang-tidy-19
        has_command clang-format-19 || need clang-format-19
    fi
}

give_up() { # WHY...
    echo "setup: missing packages: $missing (cmake from 3.28, catch2 from 3). Not installed: $*" >&2
    exit 1
}

set=${1:-build}
case $set in
    build | sanitize | lint) ;;
    *) echo "usage: tools/setup.sh [build|sanitize|lint]" >&2; exit 2 ;;
esac
look
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

# apt-get, quiet unless it fails; the lock is waited for, as a fresh machine may be updating itself
apt() {
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 \
        "$@" </dev/null >"$log" 2>&1 ||
        { tail -n 5 "$log" >&2; give_up "apt-get $1 failed, see above."; }
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "setup: installing $missing"
apt update

# Debian 12 has CMake 3.25 and Catch2 2: these two come from its backports suite.
codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
backported=
if [ "$codename" = bookworm ]; then
    for package in cmake catch2; do
        case " $missing " in *" $package "*) backported="$backported $package" ;; esac
    done
fi

# The URIs of the package lists that apt has of Debian's release $1, as far as their Release file says so.
debian_uris() {
    apt-get indextargets --format '$(REPO_URI)' "Codename: $1" 'Component: main' 'Created-By: Packages' "Label: $2" | sort -u
}

# Prints the sources entry of the backports suite: a copy of the machine's own entry of main (URI, options, signature),
# of which the first line says in which format it is, "list" or "sources".
backports_entry() {
    known=$(debian_uris bookworm Debian | tr '\n' ' ')
    for file in /etc/apt/sources.list.d/*.sources /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
        [ -r "$file" ] || continue
        awk -v known="$known" -v suite=bookworm -v format="${file##*.}" '
            function same(uri, i) { # is it one of those that apt knows as Debian itself?
                gsub(/\/+/, "/", uri); sub(/\/$/, "", uri)
                for (i in uris) if (uris[i] == uri) return 1
                return 0
            }
            function holds(text, word, i, n, words) {
                n = split(text, words, " ")
                for (i = 1; i <= n; i++) if (words[i] == word) return 1
                return 0
            }
            BEGIN {
                gsub(/\/+/, "/", known)
                n = split(known, uris, " ")
                for (i = 1; i <= n; i++) sub(/\/$/, "", uris[i])
            }
            # one line: deb [options] uri suite component...
            format == "list" {
                if ($1 != "deb") next
                sub(/[ \t]*#.*/, "")
                options = ""
                line = $0
                sub(/^[ \t]*deb[ \t]+/, "", line)
                if (match(line, /^\[[^]]*\][ \t]*/)) {
                    options = substr(line, 1, RLENGTH)
                    sub(/[ \t]*$/, " ", options)
                    line = substr(line, RLENGTH + 1)
                }
                n = split(line, part, /[ \t]+/)
                if (n >= 3 && part[2] == suite && holds(line, "main") && same(part[1])) {
                    print "list"
                    print "deb " options part[1] " " suite "-backports main"
                    exit
                }
                next
            }
            # deb822: paragraphs of fields, which may go on in indented lines
            function finish(i, n, words, uri) {
                if (types ~ /(^| )deb( |$)/ && enabled !~ /^(no|false|0)$/ && holds(suites, suite) && holds(components, "main")) {
                    n = split(uri_field, words, " ")
                    uri = ""
                    for (i = 1; i <= n; i++) if (same(words[i])) { uri = words[i]; break }
                    if (uri != "") {
                        print "sources"
                        print "Types: deb"
                        print "URIs: " uri
                        print "Suites: " suite "-backports"
                        print "Components: main"
                        printf "%s", kept
                        done = 1
                        exit
                    }
                }
                types = suites = components = uri_field = enabled = kept = field = ""
            }
            /^#/ { next }
            /^[ \t]*$/ { finish(); next }
            {
                value = $0
                if ($0 !~ /^[ \t]/) {
                    field = tolower($0)
                    sub(/:.*/, "", field)
                    sub(/^[^:]*:[ \t]*/, "", value)
                }
                gsub(/[ \t]+/, " ", value)
                if (field == "types") types = types " " value
                else if (field == "uris") uri_field = uri_field " " value
                else if (field == "suites") suites = suites " " value
                else if (field == "components") components = components " " value
                else if (field == "enabled") enabled = tolower(value)
                else kept = kept $0 "\n"
            }
            END { if (format != "list" && !done) finish() }
        ' "$file"
    done
}

if [ -n "$backported" ] && [ -z "$(debian_uris bookworm-backports 'Debian Backports')" ]; then
    entry=$(backports_entry)
    case $entry in
        list*) format=list ;;
        sources*) format=sources ;;
        *) give_up "$backported should come from bookworm-backports, but apt has no entry of Debian bookworm main to derive it from." ;;
    esac
    # only the first entry found: further ones would be the same suite elsewhere
    printf '%s\n' "$entry" | awk 'NR > 1 && /^(list|sources)$/ { exit } NR > 1' |
        $as_root tee "/etc/apt/sources.list.d/quire-backports.$format" >/dev/null
    echo "setup: added /etc/apt/sources.list.d/quire-backports.$format"
    apt update
fi

plain=
for package in $missing; do
    case " $backported " in *" $package "*) ;; *) plain="$plain $package" ;; esac
done
[ -z "$plain" ] || apt install -y --no-install-recommends $plain
[ -z "$backported" ] || apt install -y --no-install-recommends -t bookworm-backports $backported

hash -r
wanted=$missing
look
[ -z "$missing" ] || give_up "apt-get installed $wanted, but these are still not found, or too old."
