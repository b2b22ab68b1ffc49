"""Trains on the tokens of make_data.py: AdamW, cosine, bfloat16 on one GPU.

    python train.py [--data build/chat-data] [--out build/chat-model.pt] [--minutes 7]

Dialogues are packed into rows of 1024 tokens and see only themselves; the loss counts what the assistant
says. For the first tenth WordNet's plain text is mixed in. The rate falls by the clock: --minutes is the budget.
"""
import argparse
import glob
import json
import queue
import threading
import time

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from chat import END, START
from model import Config, Llama

ROW = 1024


class Stream:
    """dialogues of one array, cut at <|endoftext|> (id 0)"""

    def __init__(self, ids, head=None, start=None, end=None):
        self.ids = ids
        stops = np.flatnonzero(ids == 0)
        self.begin = np.concatenate(([0], stops[:-1] + 1))
        self.length = stops + 1 - self.begin
        self.target = np.ones(len(ids), bool)  # may token i be learned as a target?
        if head is not None:
            n, at = len(head), np.flatnonzero(ids[: -len(head)] == start)
            at = at[np.all([ids[at + 1 + i] == head[i] for i in range(n)], axis=0)]
            close = np.flatnonzero(ids == end)
            stop = close[np.searchsorted(close, at + n)]
            step = np.zeros(len(ids) + 1, np.int8)
            step[at + 1 + n] += 1
            step[stop + 1] -= 1
            self.target = np.cumsum(step[:-1]) > 0

    def __add__(self, other):
        both = object.__new__(Stream)
        both.ids, both.target = np.concatenate((self.ids, other.ids)), np.concatenate((self.target, other.target))
        both.begin = np.concatenate((self.begin, other.begin + len(self.ids)))
        both.length = np.concatenate((self.length, other.length))
        return both

    def pack(self, rng=None):
        """-> rows of ids, targets (-100 where nothing is learned) and dialogue numbers, in a fresh order"""
        order = np.flatnonzero(self.length <= ROW)
        if rng is not None:
            rng.shuffle(order)
        length, place, at = self.length[order], [], 0
        for n in length.tolist():
            if at % ROW + n > ROW:
                at += ROW - at % ROW
            place.append(at)
            at += n
        rows = -(-at // ROW)
        within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
        source = np.repeat(self.begin[order], length) + within
        dest = np.repeat(np.array(place), length) + within
        ids, doc = np.zeros(rows * ROW, np.int64), np.full(rows * ROW, -1, np.int32)
        target = np.full(rows * ROW, -100, np.int64)
        ids[dest], doc[dest] = self.ids[source], np.repeat(np.arange(len(order)), length)
        learn = (within > 0) & self.target[source]  # what a token is learned from stands one place before it
        target[dest[learn] - 1] = self.ids[source[learn]]
        return tuple(x.reshape(rows, ROW) for x in (ids, target, doc))


def main():
    arg = argparse.ArgumentParser()
    arg.add_argument("--data", default="build/chat-data")
    arg.add_argument("--out", default="build/chat-model.pt")
    arg.add_argument("--minutes", type=float, default=7.0)
    arg.add_argument("--rows", type=int, default=48, help="rows of 1024 tokens in a step")
    arg.add_argument("--rate", type=float, default=3e-3)
    arg.add_argument("--decay", type=float, default=0.1)
    arg.add_argument("--seed", type=int, default=1)
    a = arg.parse_args()
    torch.manual_seed(a.seed)
    torch.set_float32_matmul_precision("high")
    c = Config()
    tokenizer = Tokenizer.from_file(f"{a.data}/tokenizer.json")
    head = tokenizer.encode("assistant\n").ids
    start, end = tokenizer.token_to_id(START), tokenizer.token_to_id(END)
    shards = sorted(glob.glob(f"{a.data}/chat*.npy"))
    held, text = Stream(np.load(f"{a.data}/held.npy"), head, start, end), Stream(np.load(f"{a.data}/text.npy"))
    print(f"{len(shards)} shards of dialogues")

    model = Llama(c).cuda()
    total = sum(p.numel() for p in model.parameters())
    print(f"{total} parameters")
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    opt = torch.optim.AdamW([dict(params=matrices, weight_decay=a.decay), dict(params=vectors, weight_decay=0.0)], lr=a.rate, betas=(0.9, 0.95), fused=True)

    def loss_of(ids, target, mask):
        def attend(q, k, v):
            return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        logits = model(ids, attend)
        return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), ignore_index=-100)

    compiled, make_mask = torch.compile(loss_of), torch.compile(create_block_mask)

    def run(ids, target, doc):
        def inside(b, h, q, k):
            return (q >= k) & (doc[b, q] == doc[b, k])
        mask = make_mask(inside, ids.shape[0], None, ROW, ROW, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            return compiled(ids, target, mask)

    progress = [0.0]
    batches = queue.Queue(maxsize=64)

    def feed():
        rng = np.random.default_rng(a.seed)
        epoch = 0
        while True:
            chat = Stream(np.load(shards[epoch % len(shards)]), head, start, end)
            ids, target, doc = (chat + text if progress[0] < 0.1 else chat).pack(rng)
            for i in range(0, len(ids) - a.rows + 1, a.rows):
                batches.put((epoch, *(torch.from_numpy(x[i:i + a.rows]).pin_memory() for x in (ids, target, doc))))
            epoch += 1

    threading.Thread(target=feed, daemon=True).start()
    hids, htarget, hdoc = (torch.from_numpy(x).cuda() for x in held.pack())

    def held_loss():
        total, count = 0.0, 0
        with torch.no_grad():
            for i in range(0, len(hids), a.rows):
                part = [F.pad(x[i:i + a.rows], (0, 0, 0, a.rows - len(x[i:i + a.rows])), value=v) for x, v in ((hids, 0), (htarget, -100), (hdoc, -1))]
                n = int((part[1] >= 0).sum())
                total, count = total + float(run(*part)) * n, count + n
        return total / count

    log, step, seen, began, recent = [], 0, 0, None, []
    while True:
        epoch, ids, target, doc = batches.get()
        if step == 20:  # compiled by now
            torch.cuda.synchronize()
            began = time.time()
        t = 0.0 if began is None else (time.time() - began) / (60 * a.minutes)
        if t >= 1.0:
            break
        progress[0] = t
        rate = a.rate * min(1.0, (step + 1) / 300) * (0.02 + 0.98 * 0.5 * (1 + np.cos(np.pi * t)))
        for g in opt.param_groups:
            g["lr"] = rate
        loss = run(ids.cuda(non_blocking=True), target.cuda(non_blocking=True), doc.cuda(non_blocking=True))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        recent.append(loss.detach())
        step, seen = step + 1, seen + ids.numel()
        if step % 250 == 0:
            mean = float(torch.stack(recent).mean())
            recent = []
            log.append(dict(step=step, shard=epoch, tokens=seen, train=mean, held=held_loss() if step % 1000 == 0 else None, rate=float(rate)))
            print(f"step {step} shard {epoch} {seen / 1e6:.0f}M tokens {time.time() - began:.0f}s train {mean:.4f} held-out {log[-1]['held']} rate {rate:.5f}", flush=True)
    final = dict(step=step, shard=epoch, tokens=seen, train=float(torch.stack(recent).mean()) if recent else log[-1]["train"], held=held_loss())
    print("final", final, flush=True)
    torch.save(dict(config=c.dict(), state={k: v.float().cpu() for k, v in model.state_dict().items()}, log=log + [final]), a.out)
    with open(a.out + ".log.json", "w") as f:
        json.dump(log + [final], f)


if __name__ == "__main__":
    main()
