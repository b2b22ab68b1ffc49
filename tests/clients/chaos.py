"""Well-behaved and misbehaving clients at once. The latter disconnect at any moment, read slowly or not at all, send half of
a request or malformed ones. Every well-behaved client must get the same text as alone, every malformed request a 4xx or a
disconnect, and at the end all blocks, connections and threads must be released.

    tests/clients/chaos.py [SECONDS] [SEED]        QUIRE_SERVER=build/tsan/server for another build
"""

import collections
import json
import random
import socket
import struct
import sys
import threading
import time
import urllib.error

from quire_server import Memory, Server

PROMPTS = [{"prompt": f"Once number {i}" + " went home" * (i % 7), "max_tokens": 6 + 5 * i % 37, "temperature": 0,
            "ignore_eos": True, "n": 1 + (i % 5 == 0)} for i in range(24)]
PROMPTS += [{"prompt": f"Number {i}:", "max_tokens": 12, "n": 2, "use_beam_search": True, "beam_width": 3,
             "temperature": 0} for i in range(4)]
PROMPTS += [{"prompt": f"And {i}", "max_tokens": 24, "n": 3, "seed": i, "priority": i - 2} for i in range(4)]
LONG = {"prompt": "It goes on", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}

count = collections.Counter()
faults = []


def head(path, body, extra=""):
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{extra}\r\n"


def request(path, fields):
    body = json.dumps(fields)
    return (head(path, body) + body).encode()


class Answer:
    """Reads one answer from a socket, `bite` bytes at a time with `pause` seconds between them."""

    def __init__(self, connection, bite=65536, pause=0.0):
        self.connection, self.bite, self.pause, self.bytes = connection, bite, pause, b""
        self.until(b"\r\n\r\n")
        top, self.bytes = self.bytes.split(b"\r\n\r\n", 1)
        self.status = int(top.split(b" ", 2)[1])
        names = dict(line.lower().split(b": ", 1) for line in top.split(b"\r\n")[1:])
        if names.get(b"transfer-encoding") == b"chunked":
            self.body = b"".join(iter(self.chunk, b""))
        else:
            size = int(names[b"content-length"])
            while len(self.bytes) < size:
                self.more()
            self.body, self.bytes = self.bytes[:size], self.bytes[size:]

    def more(self):
        if self.pause:
            time.sleep(self.pause)
        got = self.connection.recv(self.bite)
        if not got:
            raise ConnectionError("the connection ended")
        self.bytes += got

    def until(self, what):
        while what not in self.bytes:
            self.more()

    def chunk(self):
        self.until(b"\r\n")
        size, self.bytes = self.bytes.split(b"\r\n", 1)
        size = int(size, 16)
        while len(self.bytes) < size + 2:
            self.more()
        piece, self.bytes = self.bytes[:size], self.bytes[size + 2:]
        return piece

    def texts(self):
        """Of a whole answer or of a stream, with comments in it where it was silent."""
        if self.body.startswith(b"{"):
            return [c["text"] for c in json.loads(self.body)["choices"]]
        events = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        assert events[-1] == b"[DONE]", events[-1]
        texts = collections.defaultdict(str)
        for event in events[:-1]:
            event = json.loads(event)
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        return [texts[i] for i in sorted(texts)]


# -- the polite


def polite(server, dice, expected):
    bite, pause = dice.choice([(65536, 0), (65536, 0), (200, 0.002), (4096, 0.05)])
    with server.connect() as connection:
        for _ in range(dice.randint(1, 4)):  # on one connection
            i = dice.randrange(len(PROMPTS))
            connection.sendall(request("/v1/completions", {**PROMPTS[i], "stream": dice.random() < 0.6}))
            answer = Answer(connection, bite, pause)
            assert answer.status == 200, answer.body
            assert answer.texts() == expected[i], f"{PROMPTS[i]}: {answer.texts()} instead of {expected[i]}"
            count["right texts"] += 1


def in_pieces(server, dice, expected):
    """A request that comes in small pieces, its body in chunks."""
    i = dice.randrange(len(PROMPTS))
    body = json.dumps(PROMPTS[i])
    cuts = sorted(dice.sample(range(1, len(body)), 3))
    chunks = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)])]
    text = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + \
        "".join(f"{len(c):x}\r\n{c}\r\n" for c in chunks) + "0\r\n\r\n"
    with server.connect() as connection:
        for at in range(0, len(text), 40):
            connection.sendall(text[at:at + 40].encode())
            time.sleep(0.001)
        answer = Answer(connection)
        assert answer.status == 200, answer.body
        assert answer.texts() == expected[i]
        count["right texts"] += 1


def others(server, dice, _):
    path, fields = dice.choice([("/tokenize", {"prompt": "some text"}), ("/v1/embeddings", {"input": ["a", "b b b"]}),
                                ("/detokenize", {"tokens": [300, 301]}), ("/metrics", None), ("/blocks", None),
                                ("/v1/models", None), ("/health", None), ("/pins", None)])
    if fields is None:
        server.get(path)
    else:
        assert server.post(path, fields)[0] == 200
    count["other requests"] += 1


def pins(server, dice, _):
    status, pin = server.post("/pin", {"prompt": f"A prefix of everybody, {dice.randrange(8)} " * 3})
    if status == 200:
        time.sleep(dice.random() * 0.2)
        assert server.post("/unpin", {"id": pin["id"]})[0] == 200
    else:
        assert status in (400, 429), pin
    count["pins"] += 1


# -- the rude


def reset(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def leave(connection, dice):
    dice.choice([lambda: connection.close(), lambda: reset(connection), lambda: connection.shutdown(socket.SHUT_WR),
                 lambda: connection.shutdown(socket.SHUT_RDWR)])()
    connection.close()


def hang_up(server, dice, _):
    """Before anything is read, or somewhere in the stream."""
    connection = server.connect()
    connection.sendall(request("/v1/completions", {**LONG, "n": dice.choice([1, 1, 4]), "stream": dice.random() < 0.8}))
    if dice.random() < 0.7:
        connection.settimeout(dice.random())
        try:
            for _ in range(dice.randrange(20)):
                if not connection.recv(500):
                    break
        except TimeoutError:
            pass
    leave(connection, dice)
    count["hung up"] += 1


def half(server, dice, _):
    """Half of a request; some stay for a while."""
    connection = server.connect()
    text = request("/v1/completions", LONG)
    connection.sendall(text[:dice.randrange(len(text))])
    if dice.random() < 0.3:
        time.sleep(dice.random() * 2)
    leave(connection, dice)
    count["half requests"] += 1


def deaf(server, dice, _):
    """Asks for much and reads nothing."""
    connection = server.connect()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.sendall(request("/v1/completions", {**LONG, "n": 3, "logprobs": 20}))
    time.sleep(dice.random() * 3)
    leave(connection, dice)
    count["deaf"] += 1


def watcher(server, dice, _):
    connection = server.connect()
    connection.sendall(b"GET /blocks/events HTTP/1.1\r\nHost: x\r\n\r\n")
    connection.settimeout(1)
    try:
        for _ in range(dice.randrange(6)):
            connection.recv(65536)
    except TimeoutError:
        pass
    leave(connection, dice)
    count["watchers"] += 1


NONSENSE = [
    b"", b"{", b"[]", b"null", b"\xff\xfe{}", b'{"prompt":"\xc3("}', b'{"prompt":' + b"[" * 5000, b'{"prompt":"\\ud800"}',
    b'{"prompt":"a","max_tokens":1e999}', b'{"prompt":"a","n":-1}', b'{"prompt":[99999999]}', b'{"prompt":[[]]}',
    b'{"prompt":"a","logit_bias":{"99999999":1}}', b'{"prompt":"a","stop":["",1]}', b'{"prompt":' + b'"a' * 3000,
    b'{"prompt":"a","best_of":1000000000000}', b'{"prompt":"' + b"word " * 20000 + b'"}', b'{"messages":{}}',
    b'{"prompt":"a","use_beam_search":true,"temperature":"hot"}']
HEADS = [
    b"GARBAGE\r\n\r\n", b"\0\1\2\3\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-2\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n", b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 500 + b"\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 70000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n", b"GET /..%2f..%2fetc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /%zz HTTP/1.1\r\nHost: x\r\n\r\n",
    b"BREW /pot HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /nothing?a=%00&b HTTP/1.1\r\nHost: x\r\n\r\n"]


def mutated(dice):
    body = bytearray(json.dumps(dice.choice(PROMPTS)).encode())
    for _ in range(dice.randint(1, 6)):
        at = dice.randrange(len(body))
        body[at:at + dice.randrange(3)] = bytes(dice.choices(range(256), k=dice.randrange(4)))
    return bytes(body)


def nonsense(server, dice, _):
    kind = dice.randrange(3)
    if kind == 0:
        text = dice.choice(HEADS)
    else:
        body = dice.choice(NONSENSE) if kind == 1 else mutated(dice)
        path = dice.choice(["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize",
                            "/apply-template", "/unpin"])
        text = head(path, body).encode() + body
    with server.connect() as connection:
        try:
            connection.sendall(text)
            answer = Answer(connection)
        except (ConnectionError, BrokenPipeError):
            count["cut off"] += 1
            return
    assert answer.status < 500 or answer.status == 505, f"status {answer.status} for {text[:200]}: {answer.body[:200]}"
    if answer.status >= 400:
        assert json.loads(answer.body)["error"]["message"], answer.body
    count["nonsense refused" if answer.status >= 400 else "mutations that are valid"] += 1


ACTS = [polite] * 8 + [in_pieces] * 2 + [others] * 2 + [pins] + [hang_up] * 4 + [half] * 2 + [deaf] + [watcher] + [nonsense] * 5


def actor(server, seed, until, expected):
    dice = random.Random(seed)
    while time.monotonic() < until and not faults:
        act = dice.choice(ACTS)
        try:
            act(server, dice, expected)
        except (AssertionError, OSError, ValueError, KeyError, urllib.error.HTTPError) as e:
            if act in (hang_up, half, deaf, watcher) and isinstance(e, OSError):
                continue  # hung up on while hanging up
            faults.append(f"{act.__name__}: {e!r}")


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 15
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(1 << 30)
    with Server("--kv-blocks", "80", "--block-size", "8", "-c", "512", "--parallel", "16", "--request-timeout", "5",
                "--write-timeout", "5") as server:
        expected = [[c["text"] for c in server.post("/v1/completions", p)[1]["choices"]] for p in PROMPTS]
        threads, descriptors = server.threads(), server.descriptors()
        memory = Memory(server)
        until = time.monotonic() + seconds
        actors = [threading.Thread(target=actor, args=(server, seed + i, until, expected)) for i in range(24)]
        for a in actors:
            a.start()
        for a in actors:
            a.join()
        samples = memory.stop()
        assert not faults, f"seed {seed}: " + "\n".join(faults)
        server.wait_until_idle()
        assert json.loads(server.get("/pins"))["data"] == [], server.get("/pins")
        for answer, prompt in zip(expected, PROMPTS):
            assert [c["text"] for c in server.post("/v1/completions", prompt)[1]["choices"]] == answer
        deadline = time.monotonic() + 30  # idle workers end after a while
        while server.descriptors() > descriptors + 2 or server.threads() > threads + 8:
            assert time.monotonic() < deadline, f"{server.descriptors()} descriptors, {server.threads()} threads are left"
            time.sleep(0.1)
        said = ", ".join(f"{n} {what}" for what, n in sorted(count.items()))
        print(f"chaos: seed {seed}, {seconds:.0f} s: {said}; {server.metric('vllm:num_preemptions_total'):.0f} preemptions; "
              f"all blocks back; at most {max(s[1] for s in samples) >> 20} MiB, {max(s[2] for s in samples)} threads")


main()
