"""vllm-router, unmodified, before two servers: requests are spread, prefixes go where their blocks are (KV events), a replica that is
killed costs no request that had not begun to stream, one that is asked to end costs none at all.

router.py PATH/vllm-router"""

import concurrent.futures
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

from quire_server import Server

def free_ports(n):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Router:
    def __init__(self, servers, policy, *arguments):
        self.port, metrics = free_ports(2)
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.argv[1], "--worker-urls", *[s.url for s in servers], "--policy", policy, "--port", str(self.port),
             "--prometheus-port", str(metrics), "--worker-startup-check-interval", "1", "--log-level", "debug", *arguments],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, start_new_session=True)
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the router does not start: " + self.said()[-2000:])
            time.sleep(0.1)

    def said(self):
        self.log.seek(0)
        return re.sub(r"\x1b\[[0-9;]*m", "", self.log.read())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()

    def complete(self, prompt, max_tokens=16, stream=False):
        """The text; raises for anything but a whole answer."""
        body = {"model": "quire-14m-q8_0", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
                "stream": stream}
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = answer.read().decode()
        if not stream:
            return json.loads(text)["choices"][0]["text"]
        events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        assert events and events[-1] == "[DONE]", "a stream without its end: " + text[-300:]
        return "".join(choice["text"] for e in events[:-1] for choice in json.loads(e)["choices"])


def requests_of(server):
    return server.metric("vllm:request_success_total")


def spread(policy):
    with Server() as one, Server() as two, Router([one, two], policy) as router:
        texts = {router.complete("Tell me about paper.", stream=i % 2 == 1) for i in range(8)}
        assert len(texts) == 1, f"one prompt, several answers: {texts}"
        counts = requests_of(one), requests_of(two)
        assert sum(counts) == 8, counts
        if policy == "round_robin":
            assert counts == (4, 4), counts
    print(f"router, {policy}: 8 of 8 answers, {counts[0]:.0f} and {counts[1]:.0f}")


def by_events():
    ports = free_ports(4)
    events = lambda i: ("--kv-events", f"tcp://127.0.0.1:{ports[2 * i]}", "--kv-events-replay", f"tcp://127.0.0.1:{ports[2 * i + 1]}")
    bind = lambda i: tuple(a.replace("tcp://127.0.0.1", "tcp://*") for a in events(i))
    with Server(*bind(0)) as one, Server(*bind(1)) as two:
        flags = ["--kv-event-block-size", "16", "--kv-event-model", "quire-14m-q8_0"]
        for i, server in enumerate((one, two)):
            flags += ["--kv-event-source", f"{server.url}={events(i)[1]}", "--kv-event-replay-source",
                      f"{server.url}={events(i)[3]}"]
        with Router([one, two], "kv_aware", *flags) as router:
            prefixes = [f"Chapter {i}. " + "A quire is a quantity of paper, and paper is folded. " * 8 for i in range(4)]
            first = {p: router.complete(p + "So", 4) for p in prefixes}
            time.sleep(1)  # the events are on their way
            hits = [s.metric("vllm:prefix_cache_hits_total") for s in (one, two)]
            for _ in range(3):
                for p in prefixes:
                    assert router.complete(p + "So", 4) == first[p]
            more = [s.metric("vllm:prefix_cache_hits_total") - h for s, h in zip((one, two), hits)]
            credited = [int(n) for n in re.findall(r"credited_prefix_tokens[=:\s]+(\d+)", router.said())]
            assert sum(more) >= 12 * 64, f"of 12 prompts only {sum(more)} tokens were found in the caches"
            assert credited and max(credited) >= 64, f"the router credited no prefix: {credited}"
    print(f"router, kv_aware: 12 of 12 prompts went to their blocks, {sum(more):.0f} tokens found, "
          f"{sum(c > 0 for c in credited)} decisions with a credited prefix")


def lose_one(how, streams):
    """40 requests from four clients; one of the two replicas goes away in between. Lost are those of it that had begun to stream, or
    none."""
    one, two = Server(), Server()
    try:
        with Router([one, two], "round_robin", "--retry-max-retries", "8", "--retry-initial-backoff-ms", "20") as router:
            done, lost, lock = 0, [], threading.Lock()

            def client(i):
                nonlocal done
                try:
                    router.complete(f"Number {i}: a quire", 48, stream=streams and i % 2 == 1)
                    with lock:
                        done += 1
                        if done == 10:
                            two.process.send_signal(how)
                except Exception as error:
                    with lock:
                        lost.append((i, str(error)[:200]))

            with concurrent.futures.ThreadPoolExecutor(4) as clients:
                list(clients.map(client, range(40)))
            assert not lost, f"lost: {lost}"
            assert two.process.wait(60) == (0 if how == signal.SIGTERM else -signal.SIGKILL)
            print(f"router, a replica gets {signal.Signals(how).name} under load: {done} of 40 requests answered")
    finally:
        for server in (one, two):
            server.process.kill()
            server.process.wait()


if __name__ == "__main__":
    for policy in ("round_robin", "cache_aware"):
        spread(policy)
    by_events()
    lose_one(signal.SIGKILL, streams=False)
    lose_one(signal.SIGTERM, streams=True)
