#!/usr/bin/env python3
"""Runs the Dockerfile's steps without a container engine: each stage is a new Debian in a chroot, made by debootstrap. Then the image's
entry point runs as the image's user, without a network, until its health check passes and it answers a question.

tests/dockerfile_steps.py [MIRROR]         needs root, debootstrap, 4 GB in TMPDIR (/var/tmp) and some eight minutes
tests/dockerfile_steps.py --in BUILT NEW   the stages are these two systems of that release, which are there: tests/bare.sh calls it so. Every
                                           instruction runs. In BUILT the packages of the build are installed, and the stage's folder is a copy of
                                           the last commit that is compiled: make finds that nothing is left to compile.

It knows the instructions that the Dockerfile has and fails at any other. Exit status: 0 passed, 1 failed."""

import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RELEASES = {"debian:12-slim": "bookworm", "debian:13-slim": "trixie"}
# In a chroot with /proc and /dev: the network is that of the machine, or only a loopback interface.
INSIDE = """set -eu
root=$1; network=$2; user=$3; folder=$4; shift 4
mount --make-rprivate /
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
[ "$network" = yes ] || ip link set lo up
exec env -i "$@" """


def instructions(text):
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if line.strip():
            yield line.strip().split(None, 1)


class Stage:
    def __init__(self, folder):
        self.root, self.cwd, self.user, self.env, self.health, self.entry = folder, "/", "0", {}, None, None

    def inside(self, command, network):
        """The command line that runs a shell command in this stage."""
        env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **self.env}
        spaces = ["--mount", "--pid", "--fork", "--kill-child"] + ([] if network else ["--net"])
        shell = ["chroot", f"--userspec={self.user}", self.root, "sh", "-c", f"cd {shlex.quote(self.cwd)} && {command}"]
        return ["unshare", *spaces, "bash", "-c", INSIDE + shlex.join(shell), "bash", self.root, "yes" if network else "no", self.user,
                self.cwd, *[f"{k}={v}" for k, v in env.items()]]

    def path(self, name):
        return self.root + os.path.join(self.cwd, name)


def made(image, folder, mirror):
    """A new system in the folder."""
    subprocess.run(["debootstrap", "--variant=minbase", RELEASES[image], folder, mirror], check=True, stdout=subprocess.DEVNULL)
    shutil.copy("/etc/resolv.conf", folder + "/etc/resolv.conf")
    return folder


def given(image, folder):
    """The system in the folder, if its release is that of the image."""
    with open(folder + "/etc/os-release") as file:
        assert f"VERSION_CODENAME={RELEASES[image]}\n" in file, f"{folder} is no {RELEASES[image]}"
    return folder


def machines_mirror():
    """The mirror of this machine's own Debian."""
    found = subprocess.run(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian", "Label: Debian"],
                           check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    assert found, "apt knows no Debian here; name a mirror"
    return found[0]


def copy(sources, target):
    """COPY: of files into a folder or to a name, of a folder its content."""
    if len(sources) > 1 or target.endswith("/"):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
    for source in sources:
        if os.path.isdir(source):
            shutil.copytree(source, target, dirs_exist_ok=True, symlinks=True)
        else:
            shutil.copy(source, target)


def build(work, system):
    """Runs the Dockerfile; system(image, number) is the folder of a stage's system."""
    context = os.path.join(work, "context")
    os.mkdir(context)
    files = subprocess.run(["git", "-C", ROOT, "archive", "HEAD"], check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x", "-C", context], input=files, check=True)
    stages, stage = {}, None
    for name, rest in instructions(open(os.path.join(ROOT, "Dockerfile")).read()):
        print(f"{name} {rest}"[:150], flush=True)
        if name == "FROM":
            image, *label = rest.split()
            stage = stages[label[1] if label else ""] = Stage(system(image, len(stages)))
        elif name == "RUN":
            subprocess.run(stage.inside(rest, True), check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        elif name == "COPY":
            *sources, target = rest.split()
            base = context
            if sources[0].startswith("--from="):
                base = stages[sources.pop(0).removeprefix("--from=")].root
            found = [f for s in sources for f in glob.glob(os.path.join(base, s.lstrip("/")))]
            assert len(found) >= len(sources), f"nothing is copied by {rest}"
            copy(found, stage.path(target) + ("/" if target.endswith("/") else ""))
        elif name == "WORKDIR":
            stage.cwd = os.path.join(stage.cwd, rest)
            os.makedirs(stage.path(""), exist_ok=True)
        elif name == "ENV":
            stage.env.update(word.split("=", 1) for word in shlex.split(rest))
        elif name == "USER":
            stage.user = rest
        elif name == "HEALTHCHECK":
            stage.health = json.loads(re.search(r"CMD (\[.*\])", rest)[1])
        elif name == "ENTRYPOINT":
            stage.entry = json.loads(rest)
        else:
            assert name in ("VOLUME", "EXPOSE"), f"an instruction that this script does not know: {name}"
    return stage


def run(stage):
    """The entry point without arguments: healthy, it answers, and it ends when it is asked to."""
    question = json.dumps({"messages": [{"role": "user", "content": "What is a quire?"}], "max_tokens": 40})
    script = f"""set -eu
test "$(id -u)" != 0
{shlex.join(stage.entry)} >&2 &
for i in $(seq 100); do sleep 0.2; if {shlex.join(stage.health)}; then break; fi; done
{shlex.join(stage.health)}
curl -fsS http://127.0.0.1:$QUIRE_PORT/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(question)}
kill $!
wait $!"""
    answer = subprocess.run(stage.inside(script, False), check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE).stdout
    print(json.loads(answer)["choices"][0]["message"]["content"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp"), prefix="quire-image-") as folder:
        os.chmod(folder, 0o755)
        if sys.argv[1:2] == ["--in"]:
            systems = sys.argv[2:4]
            run(build(folder, lambda image, number: given(image, systems[number])))
        else:
            mirror = sys.argv[1] if len(sys.argv) > 1 else machines_mirror()
            run(build(folder, lambda image, number: made(image, os.path.join(folder, f"stage{number}"), mirror)))
    print("Dockerfile: its steps build, its server is healthy and answers")
