#!/bin/bash
# Runs the two commands as a new user would: tests/bare.sh RELEASE [KERNELS [PID]] (12 or 13) creates a Debian of that release with only git
# and make (debootstrap, a chroot), on 13 with sudo, clones the last commit into it, and runs there
#   as a user without rights     make chat: must name what is missing and stop
#   as root on 12, on 13 as a user with sudo
#                                make chat with a question piped in
#   as root on 12, on 13 as that user, whose rights are taken back
#                                make chat without a network, make test; on 13 this, too, without a network
# The products of `make package` and `make dist` are then tried in the same Debian with nothing installed: the archive without a network, and
# the package, which is installed and removed. The archive stays in dist/bare-RELEASE; 13 tries that of 12, too, if it is there.
# On 13 the Dockerfile's steps run in these two systems (tests/dockerfile_steps.py --in). KERNELS is a folder with libquire_cuda.a and
# libcudart_static.a, which process PID may still be making: archive and package are then made and tried once more, with these kernels.
# The mirror, the name servers and the certificates are those of the machine at hand. Needs root, debootstrap and about 4 GB
# in TMPDIR (/var/tmp). Exit status: 0 passed or skipped (only without root or debootstrap), 1 failed.
set -euo pipefail
cd "$(dirname "$0")/.."

release=${1:-}
case $release in
    12) codename=bookworm packages=git,make ;;
    13) codename=trixie packages=git,make,sudo ;;
    *) echo "usage: tests/bare.sh 12|13 [KERNELS [PID]]" >&2; exit 2 ;;
esac
kernels=${2:-} kernels_made_by=${3:-}
skip() { echo "SKIP bare $release: $*"; exit 0; }
fail() { echo "FAILED bare $release: $*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || skip "a chroot takes root"
tools/setup.sh bare || true
command -v debootstrap >/dev/null || skip "no debootstrap here"
[ -z "$(git status --porcelain --untracked-files=no)" ] || echo "bare $release: uncommitted changes are not in the clone" >&2

# The mirror of this machine's own Debian; its other suites lie beside it.
mirror_of() { apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | head -n 1; }
mirror=${DEBIAN_MIRROR:-$(mirror_of)}
[ -n "$mirror" ] || { apt-get -qq update || true; mirror=$(mirror_of); }
[ -n "$mirror" ] || fail "apt knows no Debian here; name a mirror in DEBIAN_MIRROR"

root=$(mktemp -d "${TMPDIR:-/var/tmp}/quire-bare-$release.XXXXXX")
chmod 755 "$root" # a user has to be able to enter
log=$root.log
clean=$root.clean # the same system as it is at first
image=$root.image # once more, for the Dockerfile
trap 'rm -rf --one-file-system "$root" "$root.clean" "$root.image"; rm -f "$root.log"' EXIT

SECONDS=0
stamp() { printf 'bare %s  %2d:%02d  %s\n' "$release" $((SECONDS / 60)) $((SECONDS % 60)) "$*"; }

# Mounts and processes end with their namespaces, so nothing of the chroot is left when a step ends, however it ends.
inside() { # NETWORK(yes|no) USER COMMAND
    local spaces=(--mount --pid --fork)
    [ "$1" = yes ] || spaces+=(--net)
    # shellcheck disable=SC2016
    unshare "${spaces[@]}" bash -euc '
        root=$1 network=$2 user=$3 certificates=$4 command=$5
        mount --make-rprivate /
        mount -t proc proc "$root/proc"
        mount --rbind /dev "$root/dev"
        mount -t tmpfs tmpfs "$root/dev/shm"
        [ "$network" = yes ] || ip link set lo up
        exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin ${certificates:+PIP_CERT=$certificates} \
            chroot "$root" su "$user" -s /bin/bash --whitelist-environment=PIP_CERT -l -c "cd ~/quire && $command"
    ' bash "$root" "$1" "$2" "$certificates" "$3" </dev/null
}
why() { # what failed, wherever it stands in the log, and how the log ends
    grep -E -A 25 'FAILED|error:|\*\*\*Failed' "$log" | head -n 120 || true
    tail -n 40 "$log"
}
step() { # WHAT NETWORK USER COMMAND
    stamp "$1"
    inside "$2" "$3" "$4" >"$log" 2>&1 || { why; fail "$1"; }
}
says() { # PATTERN: the last step's output has to hold it
    grep -Eq -- "$1" "$log" || { tail -n 60 "$log"; fail "the output lacks: $1"; }
}

stamp "debootstrap $codename"
debootstrap --variant=minbase --include="$packages" "$codename" "$root" "$mirror" >"$log" 2>&1 || { tail -n 20 "$log"; fail debootstrap; }
cp /etc/resolv.conf "$root/etc/resolv.conf"
echo force-unsafe-io >"$root/etc/dpkg/dpkg.cfg.d/unsafe-io" # dpkg need not wait for the disk: nobody keeps this system
cp -a "$root" "$clean"
[ "$release" != 13 ] || cp -a "$clean" "$image"
mkdir "$clean/root/quire"
# pip there trusts whom pip here trusts (the proxy of a company, for one), also after ca-certificates wrote its own bundle.
certificates=
if [ -r "${PIP_CERT:-}" ]; then
    certificates=/etc/certificates-of-the-machine.pem
    install -m 644 "$PIP_CERT" "$root$certificates"
fi
began=$SECONDS
git clone -q --no-hardlinks . "$root/root/quire"
cloned=$((SECONDS - began))
chroot "$root" useradd -m reader
git clone -q --no-hardlinks . "$root/home/reader/quire"
chroot "$root" chown -R reader:reader /home/reader

chat="printf '%s\n' 'What is a quire?' | make chat"
tests() { # what ctest says of all tests
    says '^100% tests passed, 0 tests failed out of [1-9][0-9]*'
    stamp "  $(grep -E 'tests passed' "$log")"
}
answer() { # standard output is the build's and then the answer alone: it ends with a sentence
    tail -n 1 "$log" | grep -Eq '^[A-Z].* .*[.!?]$' || { tail -n 60 "$log"; fail "no answer"; }
    stamp "  $(tail -n 1 "$log")"
}

stamp "make chat as a user without rights, nothing installed"
if inside yes reader "$chat" >"$log" 2>&1; then fail "make chat without its packages passed"; fi
says 'missing packages: .*clang-19.*root or a user who may use sudo'
user=root home=/root network=yes
rights=$root/etc/sudoers.d/reader
if [ "$release" = 13 ]; then # what one release shows for both: a user who may use sudo installs, and all that follows needs no rights
    user=reader home=/home/reader network=no
    install -m 440 /dev/stdin "$rights" <<<"reader ALL=(ALL) NOPASSWD: ALL"
fi
began=$SECONDS
step "make chat as $user" yes $user "$chat"
first=$((cloned + SECONDS - began)) # without the step before it
answer
stamp "  from the clone to the first answer: $first s"
says 'about 1 GB on disk and about four minutes' # said before it is taken
says '^setup: unpacking '                        # and shown while it is
rm -f "$rights"
step "without network: make chat" no $user "$chat"
answer
if grep -q '^setup:' "$log"; then fail "the second make chat installs something"; fi
if [ "$release" = 13 ]; then
    step "packages to make packages" yes root "tools/setup.sh package && apt-get -q install -y --no-install-recommends lintian"
fi
step "make test" $network $user "make test"
tests
# The Debian with nothing installed. A pipe into chat makes it answer each line.
step "make package" yes $user "make package"
[ "$release" != 13 ] || step "lintian" no $user "lintian --fail-on error,warning --suppress-tags bogus-mail-host,bogus-mail-host-in-debian-changelog build/release/package/*.deb"
step "make dist" no $user "make dist"
tail -n 1 "$log"
cp "$root$home"/quire/build/release/package/*.deb "$root$home"/quire/dist/*.tar.gz "$clean/root/quire/"
rm -rf "dist/bare-$release" && mkdir -p "dist/bare-$release"
cp "$root$home"/quire/dist/*.tar.gz "dist/bare-$release/"
root=$clean step "nothing installed: the archive" no root "tar -xzf *.tar.gz && cd */ && for program in server bench inspect quantize \
    block-viz; do ./\$program --help >/dev/null; done && echo 'What is a quire?' | ./chat -st"
answer
if [ "$release" = 13 ] && ls dist/bare-12/*.tar.gz >/dev/null 2>&1; then # what runs on a release runs on later ones
    mkdir "$clean/root/quire/older"
    cp dist/bare-12/*.tar.gz "$clean/root/quire/older/"
    root=$clean step "nothing installed: the archive of Debian 12" no root \
        "cd older && tar -xzf *.tar.gz && cd */ && echo 'What is a quire?' | ./chat -st"
    answer
fi
root=$clean step "nothing installed: the package" yes root "apt-get -q update && apt-get -q install -y --no-install-recommends ./*.deb && \
    quire-server --version && quire-chat --models | grep -q quire-14m && echo 'What is a quire?' | quire-chat -st"
answer
root=$clean step "the package is removed" no root "apt-get -q purge -y quire && ! ls -d /usr/*/quire /usr/bin/quire* /etc/quire"
if [ "$release" = 13 ]; then
    # The image has no git, and its folder is /quire: make goes on there with what is compiled.
    step "no git any more" no root "rm -rf ~reader/quire/.git && apt-get -q purge -y git"
    ln -s "${home#/}/quire" "$root/quire"
    stamp "the Dockerfile's steps, with the packages and the compiled programs of this system"
    tests/dockerfile_steps.py --in "$root" "$image" >"$log" 2>&1 || { why; fail "the Dockerfile's steps"; }
    tail -n 2 "$log"
fi
if [ -n "$kernels" ]; then
    stamp "the rest of the kernels"
    [ -z "$kernels_made_by" ] || tail --pid="$kernels_made_by" -f /dev/null
    mkdir "$root/kernels"
    cp "$kernels/libquire_cuda.a" "$kernels/libcudart_static.a" "$root/kernels/" || fail "no kernels in $kernels"
    step "make package, dist with kernels" no root "cd $home/quire && cmake --preset release -DQUIRE_CUDA=/kernels/libquire_cuda.a && \
        make package dist SETUP=:"
    tail -n 1 "$log"
    rm -rf "$clean/root/quire" && mkdir "$clean/root/quire"
    cp "$root$home"/quire/build/release/package/*.deb "$root$home"/quire/dist/*.tar.gz "$clean/root/quire/"
    # Without a driver the programs run on the CPU, and say why it is not a GPU where one is asked for.
    root=$clean step "nothing installed, no driver: the archive with kernels" no root "tar -xzf *.tar.gz && cd */ && \
        ! ./chat --device cuda -st -p Hello && echo 'What is a quire?' | ./chat -st"
    says '^chat: no GPU to run on: no NVIDIA driver'
    answer
    root=$clean step "nothing installed, no driver: the package with kernels" yes root "apt-get -q install -y --no-install-recommends ./*.deb && \
        ! quire-chat --device cuda -st -p Hello && echo 'What is a quire?' | quire-chat -st"
    says '^chat: no GPU to run on: no NVIDIA driver'
    answer
fi
stamp "passed"
