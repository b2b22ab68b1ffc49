"""Reads the GGUF file with independent code (nothing of model.py or make_data's tokenizer), asks the held-out questions,
scores the greedy answers, and prints a table and a transcript.

    python evaluate.py [--gguf models/quire-14m-q8_0.gguf] [--questions build/chat-data/questions.jsonl] [--check build/chat-model.pt]

--check also compares the logits with the trained model before quantisation. --ask "..." asks one question.
"""
import argparse
import json
import re
from collections import defaultdict

import gguf
import jinja2
import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TRANSCRIPT = ["Hello!", "Who are you?", "What is a quire?", "What is paged attention?", "What is a block table?", "Why is a prefix cache useful?", "What is 17 plus 25?",
              "What does the word lantern mean?", "What is a florbit?", "Who won the football match yesterday?", "Tell me a short story about an owl."]


class Model:
    """llama's forward pass from the file's metadata and dequantised tensors, in float32"""

    def __init__(self, path, device):
        r = gguf.GGUFReader(path)
        self.kv = kv = {k: f.contents() for k, f in r.fields.items()}
        assert kv["general.architecture"] == "llama" and kv["tokenizer.ggml.model"] == "gpt2" and kv["tokenizer.ggml.pre"] == "gpt-2"
        self.w = {t.name: torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type), dtype=torch.float32, device=device) for t in r.tensors}
        self.layers, self.heads, self.kv_heads = kv["llama.block_count"], kv["llama.attention.head_count"], kv["llama.attention.head_count_kv"]
        self.size, self.eps, self.device = kv["llama.rope.dimension_count"], kv["llama.attention.layer_norm_rms_epsilon"], device
        tokens, types = kv["tokenizer.ggml.tokens"], kv["tokenizer.ggml.token_type"]
        self.tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[tuple(m.split(" ")) for m in kv["tokenizer.ggml.merges"]]))
        self.tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        self.tok.decoder = decoders.ByteLevel()
        self.tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types) if k == 3])
        self.eos = kv["tokenizer.ggml.eos_token_id"]
        self.template = jinja2.Template(kv["tokenizer.chat_template"])

    def norm(self, x, w):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * w

    def hidden(self, ids):
        w, (b, n) = self.w, ids.shape
        pos = torch.arange(n, device=self.device, dtype=torch.float32)
        angle = pos[:, None] * self.kv["llama.rope.freq_base"] ** (-torch.arange(0, self.size, 2, device=self.device) / self.size)
        turn = torch.polar(torch.ones_like(angle), angle)  # neighbouring pairs as complex numbers

        def rope(x):
            return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * turn).flatten(-2)

        x = w["token_embd.weight"][ids]
        for i in range(self.layers):
            def mat(v, name):
                return v @ w[f"blk.{i}.{name}.weight"].T
            h = self.norm(x, w[f"blk.{i}.attn_norm.weight"])
            q, k, v = (mat(h, f"attn_{c}").view(b, n, -1, self.size).transpose(1, 2) for c in "qkv")
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (rope(k.contiguous()), v))
            y = F.scaled_dot_product_attention(rope(q.contiguous()), k, v, is_causal=True)
            x = x + mat(y.transpose(1, 2).reshape(b, n, -1), "attn_output")
            h = self.norm(x, w[f"blk.{i}.ffn_norm.weight"])
            x = x + mat(F.silu(mat(h, "ffn_gate")) * mat(h, "ffn_up"), "ffn_down")
        return self.norm(x, w["output_norm.weight"])

    def logits(self, hidden):
        return hidden @ self.w.get("output.weight", self.w["token_embd.weight"]).T

    def prompt(self, messages):
        return self.tok.encode(self.template.render(messages=messages, add_generation_prompt=True), add_special_tokens=False).ids

    @torch.no_grad()
    def answer(self, chats, most=220):
        prompts = [self.prompt(m) for m in chats]
        order, out = sorted(range(len(chats)), key=lambda i: len(prompts[i])), [None] * len(chats)
        for at in range(0, len(order), 256):
            part = order[at:at + 256]
            seqs = [list(prompts[i]) for i in part]
            live = list(range(len(part)))
            for _ in range(most):
                width = max(len(seqs[j]) for j in live)
                ids = torch.tensor([seqs[j] + [0] * (width - len(seqs[j])) for j in live], device=self.device)
                last = torch.tensor([len(seqs[j]) - 1 for j in live], device=self.device)
                best = self.logits(self.hidden(ids)[torch.arange(len(live), device=self.device), last]).argmax(-1).tolist()
                for j, t in zip(live, best):
                    seqs[j].append(t)
                live = [j for j in live if seqs[j][-1] != self.eos]
                if not live:
                    break
            for j, i in enumerate(part):
                out[i] = self.tok.decode([t for t in seqs[j][len(prompts[i]):] if t != self.eos])
        return out


def right(q, answer):
    if "story" in q:
        sentences = re.findall(r"[.!?]\"?(?: |$)", answer)
        return f" {q['story']}" in answer.lower() and len(sentences) >= 4 and answer.rstrip().endswith((".", '"'))
    ok = True
    if "exact" in q and "keys" in q:
        return answer.strip() in q["exact"]
    if "exact" in q:
        ok = answer.strip() in q["exact"]
    if "contains" in q:
        ok = any(x in answer for x in q["contains"])
    if "keys" in q:
        ok = all(re.search(k, answer, re.I) for k in q["keys"])
    return ok


def main():
    arg = argparse.ArgumentParser()
    arg.add_argument("--gguf", default="models/quire-14m-q8_0.gguf")
    arg.add_argument("--questions", default="build/chat-data/questions.jsonl")
    arg.add_argument("--check", help="the trained model, to compare logits with")
    arg.add_argument("--ask")
    arg.add_argument("--out", help="where to write all answers (jsonl)")
    a = arg.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    m = Model(a.gguf, device)
    if a.ask:
        print(m.answer([[dict(role="user", content=a.ask)]])[0])
        return
    asked = [json.loads(x) for x in open(a.questions)]
    if a.check:
        from model import Config, Llama
        saved = torch.load(a.check, map_location="cpu")
        full = Llama(Config(**saved["config"]))
        full.load_state_dict(saved["state"])
        full = full.to(device).eval()
        worst, same, count = 0.0, 0, 0
        with torch.no_grad():
            for q in asked[::25]:
                ids = torch.tensor([m.prompt(q["messages"]) + m.tok.encode(q["reference"]).ids], device=device)
                x, y = m.logits(m.hidden(ids)), full(ids)
                worst = max(worst, float((x - y).norm() / y.norm()))
                same, count = same + int((x.argmax(-1) == y.argmax(-1)).sum()), count + ids.numel()
        print(f"logits against the model before quantisation: largest relative error {worst:.4f}, best token the same in {same} of {count}")
    answers = m.answer([q["messages"] for q in asked])
    table, bad = defaultdict(lambda: [0, 0]), defaultdict(list)
    for q, text in zip(asked, answers):
        ok = right(q, text)
        table[q["category"]][0] += ok
        table[q["category"]][1] += 1
        if not ok:
            bad[q["category"]].append((q["messages"][-1]["content"], text, q["reference"]))
    print("| held-out questions | right | of | |\n|---|---|---|---|")
    for name, (n, of) in table.items():
        print(f"| {name} | {n} | {of} | {100 * n / of:.0f} % |")
    print(f"| all | {sum(n for n, _ in table.values())} | {len(asked)} | {100 * sum(n for n, _ in table.values()) / len(asked):.0f} % |")
    print("\nwrong, a few of each:")
    for name, list_ in bad.items():
        for question, text, wanted in list_[:4]:
            print(f"- {name}: {question!r} -> {text[:150]!r}, wanted {wanted[:80]!r}")
    print()
    for q, text in zip(TRANSCRIPT, m.answer([[dict(role="user", content=q)] for q in TRANSCRIPT])):
        print(f"> **{q}**\n>\n> {text}\n")
    if a.out:
        with open(a.out, "w") as f:
            for q, text in zip(asked, answers):
                f.write(json.dumps(dict(category=q["category"], question=q["messages"], answer=text, reference=q["reference"], right=bool(right(q, text)))) + "\n")


if __name__ == "__main__":
    main()
