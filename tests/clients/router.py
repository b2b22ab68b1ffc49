"""vllm-router, unmodified, before two servers: requests are spread, prefixes go where their blocks are (KV events), a replica that is
killed costs no request that had not begun to stream, one that is asked to end costs none at all.

router.py PATH/vllm-router"""

import concurrent.futures
import http.client
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


class Cut(Exception):
    """A stream had begun."""


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

    def complete(self, prompt, max_tokens=16, stream=False, begun=lambda: None):
        """The text; raises Cut for a stream that began and has no end, something else for anything but a whole answer."""
        body = {"model": "quire-14m-q8_0", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
                "stream": stream}
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            if not stream:
                return json.loads(answer.read())["choices"][0]["text"]
            events = []
            try:
                for line in answer:
                    if line.startswith(b"data: "):
                        events.append(line[6:].decode().strip())
                        begun()
            except (OSError, http.client.HTTPException) as error:
                if events:
                    raise Cut(str(error)) from error
                raise
        assert events, "a stream of nothing"
        if events[-1] != "[DONE]" or any("error" in json.loads(e) for e in events[:-1]):
            raise Cut("it ends with " + events[-1])
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


def event_flags():
    """Of two servers, and of a router that follows them."""
    ports = free_ports(4)
    servers = [("--kv-events", f"tcp://*:{ports[2 * i]}", "--kv-events-replay", f"tcp://*:{ports[2 * i + 1]}") for i in (0, 1)]

    def router(urls):
        flags = ["--kv-event-block-size", "16", "--kv-event-model", "quire-14m-q8_0"]
        for i, url in enumerate(urls):
            flags += ["--kv-event-source", f"{url}=tcp://127.0.0.1:{ports[2 * i]}", "--kv-event-replay-source",
                      f"{url}=tcp://127.0.0.1:{ports[2 * i + 1]}"]
        return flags

    return servers, router


def by_events():
    server_flags, router_flags = event_flags()
    with Server(*server_flags[0]) as one, Server(*server_flags[1]) as two:
        with Router([one, two], "kv_aware", *router_flags([one.url, two.url])) as router:
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


def lose_one(how, policy):
    """40 requests from four clients, half of them streams, beside four long streams; one of the two replicas goes away in between. Lost are
    those of it that had begun to stream, if it is killed, or none."""
    server_flags, router_flags = event_flags()
    one, two = (Server(*flags) for flags in server_flags)
    try:
        flags = router_flags([one.url, two.url]) if policy == "kv_aware" else []
        # A policy with affinity sends each retry of a prompt to one replica until its circuit breaker opens: after 10 failures if unsaid.
        flags += ["--retry-max-retries", "8", "--retry-initial-backoff-ms", "20", "--cb-failure-threshold", "3"]
        with Router([one, two], policy, *flags) as router:
            done, cut, lost, lock, begun, gone = 0, 0, [], threading.Lock(), threading.Semaphore(0), []

            def client(i, tokens=48, stream=None, go=lambda: None):
                nonlocal done, cut
                try:
                    router.complete(f"Number {i}: a quire", tokens, i % 2 == 1 if stream is None else stream, go)
                    with lock:
                        done += 1
                        if done == 10:  # the one with more to do
                            gone.append(max((one, two), key=lambda s: s.metric("vllm:num_requests_running")))
                            gone[0].process.send_signal(how)
                except Cut as error:
                    with lock:
                        cut += 1
                        if how == signal.SIGTERM:
                            lost.append((i, "cut off: " + str(error)))
                except Exception as error:
                    with lock:
                        lost.append((i, str(error)[:200]))

            with concurrent.futures.ThreadPoolExecutor(8) as clients:
                long = [clients.submit(client, -1 - i, 400, True, begun.release) for i in range(4)]
                for _ in long:
                    assert begun.acquire(timeout=60)
                asked = [clients.submit(client, i) for i in range(40)]
                for future in long + asked:
                    future.result()
            assert not lost, f"lost: {lost}"
            assert gone[0].process.wait(60) == (0 if how == signal.SIGTERM else -signal.SIGKILL)
            assert done + cut == 44 and cut <= 12, (done, cut)
            print(f"router, {policy}, a replica gets {signal.Signals(how).name} under load: {done} of 44 requests answered"
                  + (f", {cut} had begun to stream there" if cut else ""))
    finally:
        for server in (one, two):
            server.process.kill()
            server.process.wait()


if __name__ == "__main__":
    for policy in ("round_robin", "cache_aware"):
        spread(policy)
    by_events()
    for policy in ("round_robin", "cache_aware", "kv_aware", "power_of_two", "consistent_hash"):
        lose_one(signal.SIGKILL, policy)
        lose_one(signal.SIGTERM, policy)
