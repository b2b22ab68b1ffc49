"""Models from a hub: ./inspect, ./chat, ./bench and ./server against local_hub.py, whatever it does; and huggingface_hub, where this Python has it,
on the same cache: each finds what the other fetched.

    hub_client.py [FOLDER_OF_THE_TOOLS]
"""

import concurrent.futures
import contextlib
import hashlib
import http.client
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

from local_hub import COMMIT, TOKEN, Hub

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TOOLS = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else ROOT)
MODEL = os.path.join(ROOT, "models", "quire-14m-q8_0.gguf")
SHA = hashlib.sha256(open(MODEL, "rb").read()).hexdigest()

work = tempfile.mkdtemp()
n_checks = 0
n_caches = 0


def check(ok, *what):
    global n_checks
    n_checks += 1
    if not ok:
        raise SystemExit("hub: " + " ".join(str(w) for w in what))


class Cache:
    """An empty cache and the environment of a user who has it."""

    def __init__(self, **more):
        global n_caches
        n_caches += 1
        self.home = os.path.join(work, f"home{n_caches}")
        self.env = {"PATH": os.environ["PATH"], "HOME": self.home, "HF_ENDPOINT": hub.url, **more}
        self.top = os.path.join(self.home, ".cache/huggingface/hub")

    def start(self, *words, **more):
        os.makedirs(self.home, exist_ok=True)
        return subprocess.Popen([os.path.join(TOOLS, words[0]), *words[1:]], env=self.env, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)

    def run(self, *words, code=0, says="", **more):
        process = self.start(*words, **more)
        out, err = process.communicate(timeout=60)
        check(process.returncode == code, words, "ended with", process.returncode, err)
        check(re.search(says, err + out), words, "does not say", says, "but", err)
        check(TOKEN not in err + out and "signature" not in err + out, words, "tells a secret:", err)
        if code != 0:
            check(err.rstrip().splitlines()[-1].startswith(words[0] + ": "), err)
        return out

    def show(self, repo, *more, **how):
        return self.run("inspect", "tokenize", "-hf", repo, *more, **how)

    def files(self, repo="user--plain"):
        top = os.path.join(self.top, "models--" + repo)
        return sorted(os.path.relpath(os.path.join(at, f), top) for at, _, names in os.walk(top) for f in names)


def ranges(since, kind=""):
    """Of the storage's requests: what a redirected one asked for."""
    return [wanted for _, path, wanted, _ in hub.log[since:] if "signature" in path and wanted and f"/{kind}" in path]


def add(repo, *names, text=None):
    for name in names:
        path = os.path.join(work, "served", repo, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if text is None:
            shutil.copyfile(MODEL, path)
        else:
            with open(path, "w") as file:
                file.write(text + name)


def layout_and_choice():
    add("user/plain", "README.md", "mmproj-F16.gguf", "toy.imatrix.gguf", text="no model: ")
    add("user/plain", "toy-Q4_K_M.gguf")
    add("user/plain", "sub/toy-F16.gguf", "toy-Q8_0-00001-of-00003.gguf", "toy-Q8_0-00002-of-00003.gguf", "toy-Q8_0-00003-of-00003.gguf",
        text="weights ")
    c = Cache()
    c.show("user/plain", says="inspect: user/plain/toy-Q4_K_M.gguf  .* of .* \\(100 %\\)")
    check(c.files() == sorted([f"blobs/{SHA}", "refs/main", f"snapshots/{COMMIT}/toy-Q4_K_M.gguf"]), c.files())
    link = os.readlink(os.path.join(c.top, f"models--user--plain/snapshots/{COMMIT}/toy-Q4_K_M.gguf"))
    check(link == f"../../blobs/{SHA}", link)
    before = len(hub.log)
    c.show("user/plain:q4_k_m")
    check(len(hub.log) == before + 1, "a second run fetches:", hub.log[before:])
    before = len(hub.log)
    c.show("user/plain", "--offline")
    c.env["HF_HUB_OFFLINE"] = "1"
    c.show("user/plain")
    c.show("user/other", code=1, says="user/other: it is not in .*without --offline")
    c.show("user/plain:Q8_0", code=1, says="no file has the type 'Q8_0'; there are 'toy-Q4_K_M.gguf'; without")
    check(len(hub.log) == before, "--offline asks:", hub.log[before:])
    del c.env["HF_HUB_OFFLINE"]
    c.show("user/plain:Q8_0", code=1, says="not a GGUF file|GGUF")  # all parts came; they are texts
    check([f for f in c.files() if "of-00003" in f] == [f"snapshots/{COMMIT}/toy-Q8_0-0000{i}-of-00003.gguf" for i in (1, 2, 3)], c.files())
    c.show("user/plain", "-hff", "SUB/toy-f16.gguf", code=1, says="GGUF")
    check(f"snapshots/{COMMIT}/sub/toy-F16.gguf" in c.files(), c.files())
    c.show("user/plain:Q5_K_M", code=1, says="user/plain: no file has the type 'Q5_K_M'; there are .*toy-Q4_K_M.gguf")
    c.show("user/plain", "-hff", "none.gguf", code=1, says="there is no file 'none.gguf'; there are")
    c.show("nobody/nothing", code=1, says="there is no such model at http://.*check the name, or put a token into HF_TOKEN")
    c.show("plain", code=2, says="not USER/MODEL")
    c.show("../plain", code=2, says="not USER/MODEL")
    c.run("inspect", "show", "-hff", "x", code=2, says="-hff names a file")
    c.run("chat", "-m", "x", "-hf", "user/plain", code=2, says="only one can be given")
    c.run("bench", "model", code=2, says="name a model with -m")
    c.run("chat", "nothing.gguf", code=1, says="there is no file 'nothing.gguf'; -hf USER/MODEL fetches a model")
    listed = c.run("chat", "--models")
    check(re.search(r"user/plain toy-Q4_K_M.gguf +Q8_0 +14\.\d MiB +/.*snapshots", listed), listed)
    check("quire-14m-q8_0.gguf" in listed, listed)
    check("toy-Q8_0-" not in listed, "no GGUF file, and listed:", listed)
    add("user/words", "README.md", text="no model")
    c.show("user/words", code=1, says="there is no GGUF file")
    c.show("user/renamed")
    add("user/outside", "toy-Q4_K_M.gguf")
    c.show("user/outside", code=1, says="there is no GGUF file")
    # The programs, and llama.cpp's variables.
    c.run("chat", "-hf", "user/plain", "-st", "-p", "Hello", "-n", "2", "--device", "cpu")
    c.run("bench", "model", "-hf", "user/plain", "-p", "8", "-n", "1", "-r", "1", "--device", "cpu")
    c.env["LLAMA_ARG_HF_REPO"] = "user/plain"
    c.env["LLAMA_ARG_OFFLINE"] = "1"
    before = len(hub.log)
    c.run("chat", "-st", "-p", "Hello", "-n", "2", "--device", "cpu")
    check(len(hub.log) == before, hub.log[before:])


def faults():
    for kind in ("cut", "stall", "busy", "broken", "norange-cut", "wrong", "refuses", "short", "slow"):
        add(f"user/{kind}", "toy-Q4_K_M.gguf")
    c = Cache()
    hasty = Cache(HF_HUB_DOWNLOAD_TIMEOUT="1")
    before = len(hub.log)

    def patient(kind):
        cache = hasty if kind == "stall" else c
        cache.show(f"user/{kind}", says="the next attempt is in")
        check(f"blobs/{SHA}" in cache.files(f"user--{kind}"), kind)
        check(len(ranges(before, f"{kind}/")) == {"cut": 2, "stall": 1, "norange-cut": 2}.get(kind, 0), kind, hub.log[before:])

    with concurrent.futures.ThreadPoolExecutor() as pool:  # they wait most of the time
        list(pool.map(patient, ("cut", "stall", "busy", "broken", "norange-cut")))
    c.show("user/wrong", code=1, says="has the digest [0-9a-f]{64}, not " + SHA + "; it was deleted, so try again")
    check(not [f for f in c.files("user--wrong") if f.startswith("blobs")], c.files("user--wrong"))
    c.show("user/refuses", code=1, says="takes no more requests for now \\(429\\): try again in 3000 seconds; with a token")
    c.show("user/short", code=1, says="should have .* offers")
    # What is there is used where the hub is gone.
    gone = Cache(HF_ENDPOINT="http://127.0.0.1:9")
    gone.show("user/plain", code=1, says="user/plain: 'http://127.0.0.1:9' cannot be read: .*; check the network")
    c.env["HF_ENDPOINT"] = "http://127.0.0.1:9"
    c.show("user/cut", says="the copy in the cache is used")
    Cache(HF_ENDPOINT="nonsense").show("user/plain", code=1, says="HF_ENDPOINT is 'nonsense', not a URL")


def tokens():
    add("user/gated", "toy-Q4_K_M.gguf")
    add("user/private", "toy-Q4_K_M.gguf")
    c = Cache()
    c.show("user/gated", code=1, says="the model is gated: accept its terms at .*/user/gated, then put a token")
    c.show("user/private", code=1, says="there is no such model at .*or it is private")
    c.env["HF_TOKEN"] = "bad-token"
    c.show("user/private", code=1, says="or it is private: check the name and the rights of your token")
    c.env["HF_TOKEN"] = "two\nlines"
    c.show("user/private", code=1, says="the token of HF_TOKEN has a character that no token has")
    del c.env["HF_TOKEN"]
    os.makedirs(os.path.join(c.home, ".cache/huggingface"), exist_ok=True)
    with open(os.path.join(c.home, ".cache/huggingface/token"), "w") as file:
        file.write(TOKEN + "\n")
    c.show("user/gated")
    c = Cache(HF_TOKEN=TOKEN)
    c.show("user/private")
    check(any(token == f"Bearer {TOKEN}" for *_, token in hub.log), "no token came")
    storage = [token for _, path, _, token in hub.log if "signature" in path]
    check(storage and not any(storage), "a token came to the storage")


def kill_and_resume():
    c = Cache()
    part = os.path.join(c.top, f"models--user--slow/blobs/{SHA}.incomplete")
    process = c.start("inspect", "show", "-hf", "user/slow")
    deadline = time.monotonic() + 20
    while not (os.path.exists(part) and os.path.getsize(part) > 1 << 20):
        check(time.monotonic() < deadline, "no part came")
        time.sleep(0.02)
    process.kill()
    process.communicate()
    before = len(hub.log)
    size = os.path.getsize(part)
    c.show("user/slow")
    check(ranges(before) == [f"bytes={size}-"], hub.log[before:])
    # A part of something else: its digest shows it, and all of it comes once more.
    c = Cache()
    os.makedirs(os.path.join(c.top, "models--user--plain/blobs"))
    with open(os.path.join(c.top, f"models--user--plain/blobs/{SHA}.incomplete"), "wb") as file:
        file.write(b"x" * 1000)
    c.show("user/plain")
    # Two at once: one fetches.
    c = Cache()
    before = len(hub.log)
    both = [c.start("inspect", "show", "-hf", "user/slow") for _ in range(2)]
    said = [process.communicate(timeout=60)[1] for process in both]
    check([process.returncode for process in both] == [0, 0], said)
    check(sum("waiting for another process that fetches it" in text for text in said) == 1, said)
    check(sum("signature" in path for _, path, *_ in hub.log[before:]) == 1, hub.log[before:])


def a_server_fetches_behind_its_port():
    add("user/slower", "toy-Q4_K_M.gguf")  # time enough to look into the fetch on a busy machine
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def started(*flags):
        return c.start("server", "-hf", "user/slower", "--device", "cpu", "--port", str(port), *flags,
                       preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))  # these tests may run under nohup

    def until(process, wanted):
        """Until /health answers with what is wanted."""
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            try:
                connection.request("GET", "/health")
                answer = connection.getresponse()
                if wanted(answer.status, json.loads(answer.read())):
                    return
            except OSError:
                pass  # the port is not open yet
            finally:
                connection.close()
            time.sleep(0.02)
        process.kill()
        check(False, "the server does not come so far:", process.communicate())

    c, log = Cache(), os.path.join(work, "server.log")
    process = started("--log-json", "--log-file", log, "-ngl", "99", "--jinja")
    until(process, lambda status, body: status == 503 and body["progress"] > 0)
    process.send_signal(signal.SIGHUP)
    until(process, lambda status, body: status == 200)
    process.terminate()
    err = process.communicate(timeout=60)[1]
    check(process.returncode == 0, process.returncode, err)
    said = [json.loads(line)["message"] for line in err.splitlines()]
    check(said[0] == "not needed here, and ignored: -ngl, --jinja", said)
    check(any(re.match(r"user/slower/toy-Q4_K_M.gguf  .*\(100 %\)", one) for one in said), said)
    check("SIGHUP: the log was opened again" in said, said)
    check(said == [json.loads(line)["message"] for line in open(log) if "message" in line], "the file has other lines:", open(log).read())
    c = Cache()  # a signal ends what is not there yet
    process = started()
    until(process, lambda status, body: status == 503 and body["progress"] > 0)
    process.terminate()
    err = process.communicate(timeout=60)[1]
    check(process.returncode == 128 + signal.SIGTERM, process.returncode, err)
    c.env["HF_ENDPOINT"] = "http://127.0.0.1:9"
    process = started("--log-json")
    err = process.communicate(timeout=60)[1]
    check(process.returncode == 1 and json.loads(err.splitlines()[-1])["level"] == "error", process.returncode, err)


def full_disk():
    c = Cache()
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    c.show("user/plain", code=1, says="cannot be written: File too large \\(1.0 MiB are kept", preexec_fn=limit)
    before = len(hub.log)
    c.show("user/plain")
    check(ranges(before) == ["bytes=1048576-"], hub.log[before:])
    small = Cache()
    os.makedirs(small.top)
    if os.geteuid() == 0 and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small.top], stderr=subprocess.DEVNULL).returncode == 0:
        try:
            small.show("user/plain", code=1, says="are to come, and .* has room for .*: make room, or name another folder in HF_HUB_CACHE")
        finally:
            subprocess.run(["umount", small.top], check=True)
    else:
        print("SKIP hub: a full disk takes root")
    if os.geteuid() != 0:
        os.chmod(small.top, 0o500)
        small.show("user/plain", code=1, says="Permission denied")


def urls():
    add("user/files", "toy.gguf")
    plain = f"http://127.0.0.1:{hub.storage_port}/plain/user/files/toy.gguf"
    c = Cache()
    c.run("inspect", "show", "-mu", plain)
    before = len(hub.log)
    c.run("inspect", "show", plain)
    c.run("chat", plain, "-st", "-p", "Hello", "-n", "2", "--device", "cpu")
    check(len(hub.log) == before + 2, hub.log[before:])
    c.run("inspect", "show", "-mu", plain, "--offline")
    check(len(hub.log) == before + 2, hub.log[before:])
    add("user/files", "toy.gguf", text="another file of that name: ")
    c.run("inspect", "show", "-mu", plain, code=1, says="GGUF")
    c.run("inspect", "show", "-mu", plain.replace("toy", "none"), code=1, says="none.gguf: .* answered with status 404")
    c.run("inspect", "show", "-mu", "ftp://host/x.gguf", code=2, says="not a URL that begins with https")
    c.run("inspect", "show", "-mu", f"{hub.url}/user/plain/blob/main/toy-Q4_K_M.gguf")
    check(f"snapshots/{COMMIT}/toy-Q4_K_M.gguf" in c.files(), c.files())
    # Through a proxy: the hub itself, which understands such requests; its storage is reached directly.
    behind = Cache(HF_ENDPOINT="http://hub.invalid", http_proxy=hub.url, no_proxy="127.0.0.1")
    behind.show("user/plain")


def oracle():
    try:
        import huggingface_hub
    except ImportError:
        print("SKIP hub: no huggingface_hub in this Python")
        return
    code = """
import sys
from huggingface_hub import hf_hub_download, scan_cache_dir, try_to_load_from_cache
what, repo, name = sys.argv[1:]
if what == "scan":
    found = scan_cache_dir()
    assert not found.warnings, found.warnings
    print(*sorted((r.repo_id, f.file_name, v.commit_hash, *v.refs) for r in found.repos for v in r.revisions for f in v.files))
elif what == "look":
    print(try_to_load_from_cache(repo, name))
else:
    print(hf_hub_download(repo, name, local_files_only=what == "local"))
"""
    def theirs(cache, *words):
        env = cache.env | {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run([sys.executable, "-c", code, *words], env=env, capture_output=True, text=True, timeout=120)
        check(done.returncode == 0, words, done.stderr)
        return done.stdout.strip()

    ours = Cache()
    ours.show("user/plain")
    path = theirs(ours, "local", "user/plain", "toy-Q4_K_M.gguf")
    check(path.endswith(f"snapshots/{COMMIT}/toy-Q4_K_M.gguf") and theirs(ours, "look", "user/plain", "toy-Q4_K_M.gguf") == path, path)
    check(theirs(ours, "scan", "", "") == f"('user/plain', 'toy-Q4_K_M.gguf', '{COMMIT}', 'main')", theirs(ours, "scan", "", ""))
    before, files = len(hub.log), ours.files()
    theirs(ours, "fetch", "user/plain", "toy-Q4_K_M.gguf")
    check(not any("signature" in path for _, path, *_ in hub.log[before:]), "huggingface_hub fetches what is there")
    check(ours.files() == files, ours.files())
    first = Cache()
    theirs(first, "fetch", "user/plain", "toy-Q4_K_M.gguf")
    theirs(first, "fetch", "user/plain", "README.md")
    before = len(hub.log)
    first.show("user/plain", "--offline")
    first.show("user/plain")
    check(len(hub.log) == before + 1, "quire fetches what is there:", hub.log[before:])
    check(sorted(f for f in first.files() if not f.startswith("blobs")) ==
          ["refs/main", f"snapshots/{COMMIT}/README.md", f"snapshots/{COMMIT}/toy-Q4_K_M.gguf"], first.files())
    # Both at once: one lock.
    shared = Cache()
    process = shared.start("inspect", "show", "-hf", "user/slow")
    theirs(shared, "fetch", "user/slow", "toy-Q4_K_M.gguf")
    check(process.wait(60) == 0, process.communicate())
    print(f"hub: the cache of huggingface_hub {huggingface_hub.__version__}, read and written")


hub = Hub(os.path.join(work, "served"))
with contextlib.ExitStack() as at_end:
    at_end.callback(shutil.rmtree, work, ignore_errors=True)
    at_end.callback(hub.close)
    for part in (layout_and_choice, faults, tokens, kill_and_resume, a_server_fetches_behind_its_port, full_disk, urls, oracle):
        part()
print(f"hub: {n_checks} checks")
