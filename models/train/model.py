"""A small model of LLaMA architecture. RoPE rotates neighbouring pairs (2i, 2i+1), which is the order of the rows of q and k
in GGUF's llama, so nothing has to be permuted at export."""
from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    vocab: int = 8192
    dim: int = 384
    layers: int = 7
    heads: int = 6
    kv_heads: int = 2
    hidden: int = 1024
    context: int = 1024
    rope_base: float = 10000.0
    eps: float = 1e-5

    @property
    def head_dim(self):
        return self.dim // self.heads

    def dict(self):
        return asdict(self)


def rope_table(c, length, device):
    inv = c.rope_base ** (-torch.arange(0, c.head_dim, 2, device=device, dtype=torch.float32) / c.head_dim)
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * inv
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):  # x: (batch, heads, length, head_dim)
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


class Norm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        f = x.float()
        return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight.to(x.dtype)


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.attn_norm, self.ffn_norm = Norm(c.dim, c.eps), Norm(c.dim, c.eps)
        self.attn_q = nn.Linear(c.dim, c.heads * c.head_dim, bias=False)
        self.attn_k = nn.Linear(c.dim, c.kv_heads * c.head_dim, bias=False)
        self.attn_v = nn.Linear(c.dim, c.kv_heads * c.head_dim, bias=False)
        self.attn_output = nn.Linear(c.heads * c.head_dim, c.dim, bias=False)
        self.ffn_gate = nn.Linear(c.dim, c.hidden, bias=False)
        self.ffn_up = nn.Linear(c.dim, c.hidden, bias=False)
        self.ffn_down = nn.Linear(c.hidden, c.dim, bias=False)

    def forward(self, x, cos, sin, attend):
        n, c = self.attn_norm(x), self.c
        q, k, v = (f(n).unflatten(-1, (-1, c.head_dim)).transpose(1, 2) for f in (self.attn_q, self.attn_k, self.attn_v))
        y = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + self.attn_output(y.transpose(1, 2).flatten(2))
        n = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(n)) * self.ffn_up(n))


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.token_embd = nn.Embedding(c.vocab, c.dim)
        self.blk = nn.ModuleList(Layer(c) for _ in range(c.layers))
        self.output_norm = Norm(c.dim, c.eps)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                scale = (2 * c.layers) ** -0.5 if name.endswith(("attn_output.weight", "ffn_down.weight")) else 1.0
                nn.init.normal_(p, std=0.02 * scale)
        cos, sin = rope_table(c, c.context, "cpu")
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids, attend=causal):
        x = self.token_embd(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.blk:
            x = layer(x, cos, sin, attend)
        return F.linear(self.output_norm(x), self.token_embd.weight)  # the embedding is the output matrix too
