"""1,000 streaming clients at once (./bench serve) against a KV pool that holds a few of them: no request is lost, every text is
the same as alone, all blocks are released, and the server's memory does not grow after the first tenth of the time.

    tests/clients/load.py [SECONDS] [CLIENTS]
"""

import json
import os
import subprocess
import sys
import tempfile

from quire_server import ROOT, Memory, Server

MIB = 1 << 20


def prompts(file, n):
    """Different lengths in and out; some begin alike, so that blocks are shared."""
    for i in range(n):
        begin = "Once upon a time there was a house by the sea, and in it lived " if i % 3 == 0 else ""
        text = f"{begin}number {i}" + " and so on" * (i % 23)
        file.write(json.dumps({"prompt": text, "output_tokens": 4 + 5 * i % 29}) + "\n")
    file.flush()


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20
    clients = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file, \
            Server("--kv-blocks", "96", "-c", "256", "--max-queue", str(clients)) as server:
        prompts(file, 60)
        memory = Memory(server)
        done = subprocess.run(
            [os.path.join(ROOT, "bench"), "serve", "--base-url", server.url, "--dataset-path", file.name,
             "--num-prompts", str(int(max(2 * clients, seconds * 400))), "--max-concurrency", str(clients),
             "--duration", str(seconds), "--ignore-eos", "--check", "--json"],
            capture_output=True, text=True)
        server.wait_until_idle()
        samples = memory.stop()
        assert done.stdout, done.stderr
        result = json.loads(done.stdout)
        preempted = server.metric("vllm:num_preemptions_total")
        blocks = json.loads(server.get("/blocks"))["totals"]
        used = server.metric("quire:kv_blocks_used")

        # What it takes to serve so many is there early: of the rest of the time the last third is held against the first.
        median = lambda part: sorted(s[1] for s in part)[len(part) // 2]
        late = [s for s in samples if s[0] > samples[-1][0] * 0.3]
        early, end = median(late[:max(1, len(late) // 3)]), median(late[-max(1, len(late) // 3):])
        tenths = [median(samples[i * len(samples) // 10:][:max(1, len(samples) // 10)]) for i in range(10)]
        print(f"load: {clients} clients for {result['duration']:.0f} s: {result['completed']} answers, "
              f"{result['failed']} failed, {result['different_texts']} other than alone; "
              f"at most {result['max_concurrent_requests']} at once; {result['output_throughput']:.0f} tokens/s; "
              f"TTFT {result['median_ttft_ms']:.0f} ms median, {result['p99_ttft_ms']:.0f} ms p99; "
              f"{preempted:.0f} preemptions; blocks used at the end: {used:.0f} of {blocks['blocks']}; "
              f"MiB of memory in each tenth of the time: {' '.join(f'{t / MIB:.1f}' for t in tenths)}; "
              f"{max(s[2] for s in samples)} threads, {max(s[3] for s in samples)} descriptors")
        assert done.returncode == 0 and result["failed"] == 0 and result["different_texts"] == 0, done.stderr
        assert result["completed"] >= clients and result["max_concurrent_requests"] >= min(clients, result["completed"])
        assert preempted > 0, "the pool held them all: nothing was shown"
        assert end < early * 1.05 + 4 * MIB, "memory grows"


main()
