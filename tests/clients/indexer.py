"""dynamo.indexer, unmodified, listens to a server's KV events: at any time it knows of as many blocks of a prompt as the server finds,
also after blocks were evicted, and after messages were lost on their way and replayed. Run it with the Python that has it."""

import json
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import zmq

from quire_server import Server
from router import free_ports

BLOCK = 16


class Relay(threading.Thread):
    """Passes messages on, but for those that it is told to lose."""

    def __init__(self, source, port):
        super().__init__(daemon=True)
        context = zmq.Context.instance()
        self.source = context.socket(zmq.SUB)
        self.source.connect(source)
        self.source.subscribe(b"")
        self.out = context.socket(zmq.PUB)
        self.out.bind(f"tcp://127.0.0.1:{port}")
        self.lose_every, self.seen, self.lost = 0, 0, 0
        self.start()

    def run(self):
        while True:
            message = self.source.recv_multipart()
            self.seen += 1
            if self.lose_every and self.seen % self.lose_every == 0:
                self.lost += 1
            else:
                self.out.send_multipart(message)


def post(port, path, body):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read() or b"null")


def main():
    events, replay, relayed, port = free_ports(4)
    log = tempfile.TemporaryFile()
    indexer = subprocess.Popen([sys.executable, "-m", "dynamo.indexer", "--port", str(port)], stdout=log, stderr=log)
    try:
        with Server("--kv-blocks", "80", "--kv-events", f"tcp://127.0.0.1:{events}".replace("127.0.0.1", "*"),
                    "--kv-events-replay", f"tcp://*:{replay}") as server:
            relay = Relay(f"tcp://127.0.0.1:{events}", relayed)
            deadline = time.monotonic() + 30
            while True:
                try:
                    post(port, "/register", {"instance_id": 1, "endpoint": f"tcp://127.0.0.1:{relayed}", "model_name": "m",
                                             "block_size": BLOCK, "replay_endpoint": f"tcp://127.0.0.1:{replay}"})
                    break
                except OSError:
                    assert time.monotonic() < deadline, "the indexer does not start"
                    time.sleep(0.1)
            time.sleep(1)
            numbers = random.Random(7)
            words = "paper quire fold sheet book press ink page leaf type".split()
            prompts = [" ".join(numbers.choice(words) for _ in range(50)) for _ in range(8)]
            prompts += [p[:len(p) // 2] + " " + " ".join(numbers.choice(words) for _ in range(20)) for p in prompts]

            def tokens_of(prompt):
                return server.post("/tokenize", {"prompt": prompt})[1]["tokens"]

            def ask(prompt):
                """Tokens of whole blocks that the server found."""
                status, body = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "temperature": 0})
                assert status == 200, body
                return body["usage"]["prompt_tokens_details"]["cached_tokens"] // BLOCK * BLOCK

            def known(prompt):
                tokens = tokens_of(prompt)
                scores = post(port, "/query", {"model_name": "m", "token_ids": tokens})["scores"]
                found = max((n for by_rank in scores.values() for n in by_rank.values()), default=0)
                return min(found, (len(tokens) - 1) // BLOCK * BLOCK)  # one token is always computed

            def compare(n):
                total = 0
                for prompt in (numbers.choice(prompts) for _ in range(n)):
                    told = known(prompt)
                    found = ask(prompt)
                    assert told == found, f"the indexer knows {told} tokens, the server found {found}"
                    total += found
                    time.sleep(0.1)
                return total

            found = compare(40)
            relay.lose_every = 3
            for i in range(20):  # new blocks, which evict others
                ask(f"Number {i}. " + numbers.choice(prompts))
                ask(numbers.choice(prompts))
            relay.lose_every = 0
            ask("a last one, after which all that was lost is asked for " * 3)
            time.sleep(1)
            found_after = compare(40)
            assert relay.lost > 5 and found > 0 and found_after > 0
            print(f"indexer: 80 prompts, {found + found_after} tokens in the caches, of which it knew the same; {relay.lost} of "
                  f"{relay.seen} messages lost and replayed")
    finally:
        indexer.kill()
        indexer.wait()


main()
