"""Starts a ./server on a free port for a test program, inspects and stops it. Needs only Python's standard library."""

import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MODEL = os.path.join(ROOT, "models", "quire-14m-q8_0.gguf")


class Server:
    """`with Server("--kv-blocks", "64") as server: …`; QUIRE_SERVER names another program than ./server."""

    def __init__(self, *arguments, model=MODEL, key=None):
        program = os.environ.get("QUIRE_SERVER", os.path.join(ROOT, "server"))
        self.headers = {"Content-Type": "application/json"}
        if key:
            self.headers["Authorization"] = f"Bearer {key}"
            arguments += "--api-key", key
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [program, "-m", model, "--temp", "0.8", "--port", "0", "--no-log", *arguments],  # seeds count
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.errors)
        deadline = time.monotonic() + 120
        while not (found := re.search(r"listening on http://127\.0\.0\.1:(\d+)", self.said())):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise RuntimeError(f"{program} does not start: {self.said()}")
            time.sleep(0.02)
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        """Ends it as an operator would; whatever it has to say beside its two lines of greeting is a fault."""
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = "none: it had to be killed"
        said = self.said()
        self.errors.close()
        lines = [line for line in said.splitlines() if not re.match(r"\S+Z [a-z]+ server: ", line)]
        if kind is None and (code != 0 or lines):
            raise AssertionError(f"the server ended with code {code} and said:\n" + "\n".join(lines[:200]))

    def said(self):
        self.errors.seek(0)
        return self.errors.read()

    def connect(self, timeout=300):
        return socket.create_connection(("127.0.0.1", self.port), timeout)

    def get(self, path):
        with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=self.headers), timeout=60) as answer:
            return answer.read().decode()

    def post(self, path, body):
        """Status and JSON."""
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), self.headers)
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def metric(self, name):
        """The sum over its labels."""
        rows = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", self.get("/metrics"), re.M)
        assert rows, f"there is no metric {name}"
        return sum(map(float, rows))

    def resident(self):
        """Bytes of its memory that are in RAM."""
        with open(f"/proc/{self.process.pid}/status") as file:
            return int(re.search(r"^VmRSS:\s+(\d+) kB", file.read(), re.M)[1]) * 1024

    def threads(self):
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def wait_until_idle(self, seconds=60):
        """Nobody runs or waits, and all KV blocks are back."""
        deadline = time.monotonic() + seconds
        while True:
            left = {name: self.metric(name) for name in
                    ("vllm:num_requests_running", "vllm:num_requests_waiting", "quire:kv_blocks_used",
                     "quire:swap_blocks_used")}
            if not any(left.values()):
                return
            assert time.monotonic() < deadline, f"not idle after {seconds} s: {left}"
            time.sleep(0.05)


class Memory(threading.Thread):
    """Samples the server's memory, threads and descriptors until stop()."""

    def __init__(self, server, every=1.0):
        super().__init__(daemon=True)
        self.server, self.every, self.samples, self.over = server, every, [], threading.Event()
        self.start()

    def run(self):
        begin = time.monotonic()
        while not self.over.wait(self.every):
            try:
                self.samples.append((time.monotonic() - begin, self.server.resident(), self.server.threads(),
                                     self.server.descriptors()))
            except OSError:
                return

    def stop(self):
        self.over.set()
        self.join()
        return self.samples
