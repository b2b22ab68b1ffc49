#!/usr/bin/env python3
"""Models of random shapes and weights: quire's logits against transformers'.

usage: compare.py INSPECT TESTS LLAMA SEED [NAME...]; INSPECT: quire's program; TESTS: the program of its tests; LLAMA: the folder of llama.cpp's
converter, which writes the GGUF files; NAME: only these families, in all their forms ("Gemma4"), or in one ("Gemma4/experts"). Prints a line for
each model, and exits with 1 where a logit is further away than rounding explains.

A form "mtp" has a layer for multi-token prediction, whose guesses are compared, too. transformers leaves such layers out: class Mtp puts one
together from a decoder layer, norms and an output of the model's own classes.

Float32 weights and a float32 KV cache on both sides. Heads, head sizes, experts, windows and periods are drawn, so that none is a multiple of
another by habit.
"""
import copy, json, os, random, shutil, subprocess, sys, tempfile, traceback
from pathlib import Path

INSPECT, TESTS, LLAMA, SEED = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2]), sys.argv[3], int(sys.argv[4])
sys.path[:0] = [LLAMA, LLAMA + "/gguf-py"]

import gguf
import numpy as np
import safetensors.torch
import torch
import transformers
from conversion import get_model_class

TOLERANCE = 1e-3
LENGTHS = (1, 2, 17, 64, 130, 300, 700)
MORE_LENGTHS = {"Llama4/long": (8300,)}  # an attention's chunk has 8,192 tokens
VOCABULARY = 320
CONTEXT = 1024
GUESSED_LENGTHS = (1, 2, 17, 64, 130, 300)  # of texts that an MTP layer goes on with
CHAIN = 3  # tokens guessed one behind the other
CLOSE = 1e-3  # two logits that rounding may exchange

torch.set_grad_enabled(False)
transformers.logging.set_verbosity_error()


class Shape:
    """Sizes for one model."""

    def __init__(self, draw):
        self.draw = draw
        self.kv = draw.choice((1, 2, 3))
        self.heads = self.kv * draw.choice((1, 2, 3, 5))
        self.head = draw.choice((32, 64, 128))
        self.layers = draw.choice((2, 3, 5))
        self.hidden = self.heads * draw.choice((16, 32, 48))
        self.ff = 16 * draw.randint(3, 12)
        self.window = draw.choice((1, 15, 16, 33, 100, 257))
        self.experts = draw.choice((3, 5, 8, 12))
        self.used = draw.randint(1, self.experts)
        self.tied = draw.random() < 0.5

    def config(self, **more):
        return dict(vocab_size=VOCABULARY, hidden_size=self.hidden, intermediate_size=self.ff, num_hidden_layers=self.layers,
                    num_attention_heads=self.heads, num_key_value_heads=self.kv, head_dim=self.head, max_position_embeddings=CONTEXT,
                    tie_word_embeddings=self.tied, bos_token_id=None, eos_token_id=None, pad_token_id=None) | more

    def narrow(self, **more):
        """Of families whose heads share the hidden size."""
        config = self.config(hidden_size=self.heads * self.head, **more)
        del config["head_dim"]
        return config

    def kinds(self, n, rare="full_attention", common="sliding_attention", period=None):
        period = period or self.draw.choice((2, 3, 4))
        return [rare if i % period == period - 1 else common for i in range(n)]

    def moe(self, **more):
        return self.config(num_experts=self.experts, num_experts_per_tok=self.used, moe_intermediate_size=self.ff) | more


def rope(kind="default", base=1e4, **more):
    return {"rope_type": kind, "rope_theta": base} | more


def yarn(draw):
    return rope("yarn", factor=draw.choice((2.0, 8.0)), original_max_position_embeddings=draw.choice((64, 128)), beta_fast=32.0, beta_slow=1.0)


def latent(s, **more):
    """DeepSeek's attention; experts in groups."""
    groups = s.draw.choice((1, 2, 4))
    experts = groups * s.draw.choice((2, 3, 5))
    kept = s.draw.randint(1, groups)
    rotated = s.draw.choice((16, 24))
    return s.config(num_key_value_heads=s.heads, q_lora_rank=s.draw.choice((None, 40, 56)), kv_lora_rank=s.draw.choice((48, 64)),
                    qk_nope_head_dim=s.draw.choice((32, 40)), qk_rope_head_dim=rotated, v_head_dim=s.draw.choice((32, 48)),
                    head_dim=rotated, moe_intermediate_size=32, n_routed_experts=experts, n_shared_experts=s.draw.choice((1, 2)),
                    num_experts_per_tok=s.draw.randint(1, experts // groups * kept), n_group=groups, topk_group=kept,
                    first_k_dense_replace=1, norm_topk_prob=s.draw.random() < 0.5, routed_scaling_factor=s.draw.choice((1.0, 2.5)),
                    rope_parameters=rope()) | more


def deepseek_v2(s):
    c = latent(s, norm_topk_prob=False)
    c["topk_method"] = "group_limited_greedy" if c["n_group"] > 1 else "greedy"
    return c


def recurrent(s, **more):
    """A gated delta rule beside attention."""
    keys = s.draw.choice((1, 2, 3))
    return s.config(linear_num_key_heads=keys, linear_num_value_heads=keys * s.draw.choice((1, 2, 3)),
                    linear_key_head_dim=(d := s.draw.choice((16, 32, 40))), linear_value_head_dim=d,
                    linear_conv_kernel_dim=s.draw.choice((2, 3, 4)),
                    layer_types=s.kinds(s.layers, common="linear_attention", period=2),
                    rope_parameters=rope(partial_rotary_factor=s.draw.choice((0.25, 0.5)))) | more


def gemma4(s, **more):
    """Windows and whole contexts, whose heads have sizes and K and V heads of their own; whole contexts turn a quarter of each head."""
    period = s.draw.choice((2, 3))
    layers = 2 * period
    return s.config(num_hidden_layers=layers, layer_types=s.kinds(layers, period=period), sliding_window=s.window, tie_word_embeddings=True,
                    global_head_dim=s.draw.choice((64, 128)), hidden_size_per_layer_input=0, final_logit_softcapping=s.draw.choice((None, 30.0)),
                    rope_parameters={"full_attention": rope("proportional", 1e6, partial_rotary_factor=0.25), "sliding_attention": rope()}) | more


def gemma4_per_layer(s):
    config = gemma4(s, vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=s.draw.choice((16, 24)),
                    use_double_wide_mlp=s.draw.random() < 0.5)
    # At least one layer of each kind has K and V of its own.
    return config | {"num_kv_shared_layers": s.draw.randint(1, config["num_hidden_layers"] // 2)}


def llama4(s, **more):
    return s.config(intermediate_size_mlp=48, num_local_experts=s.experts, num_experts_per_tok=s.used, rope_parameters=rope(base=5e5),
                    use_qk_norm=True, tie_word_embeddings=False) | more


def nemotron(s, network):
    """A layer is a scan, attention, or `network`."""
    layers = ["linear_attention", network, "full_attention"] + s.draw.choices(("linear_attention", network, "full_attention"), k=s.layers - 1)
    s.draw.shuffle(layers)
    groups, size = s.draw.choice((1, 2, 4)), s.draw.choice((16, 32))
    scans = groups * s.draw.choice((1, 2, 3)) * 64 // size  # the converter wants a multiple of 64 numbers
    config = s.config(layers_block_type=layers, ssm_state_size=s.draw.choice((16, 40, 128)), mamba_num_heads=scans,
                      mamba_head_dim=size, n_groups=groups, conv_kernel=s.draw.choice((2, 3, 4)), n_routed_experts=s.experts,
                      num_experts_per_tok=s.used, moe_intermediate_size=32, moe_shared_expert_intermediate_size=48,
                      moe_latent_size=s.draw.choice((None, 24, 40)), norm_topk_prob=True, routed_scaling_factor=s.draw.choice((1.0, 2.5)),
                      tie_word_embeddings=False)
    del config["num_hidden_layers"]
    return config


def ernie_moe(s):
    shared = s.draw.choice((0, 1, 2))
    # The converter takes the quotient of the dense layers' width and the K and V heads for the width of the shared experts, as in ERNIE-4.5-21B.
    return s.narrow(moe_num_experts=s.experts, moe_k=s.used, moe_intermediate_size=32, intermediate_size=32 * max(1, shared) * s.kv,
                    use_bias=False, moe_num_shared_experts=shared, moe_layer_start_index=s.draw.choice((0, 1)),
                    moe_layer_interval=s.draw.choice((1, 2)), rope_parameters=rope())


def hunyuan(s, **more):
    return s.config(num_experts=s.experts, moe_topk=s.used, rope_parameters=rope()) | more


def hunyuan_names(given):
    """Of Hunyuan-A13B's own config, which has a number for each layer."""
    n = given["num_hidden_layers"]
    return {"moe_intermediate_size": [given["intermediate_size"]] * n, "num_shared_expert": [1] * n, "moe_topk": [given["moe_topk"]] * n}


# Members of published configs that transformers does not write, or writes in another way; None: does not stand there.
ADDED = {"HunYuanMoEV1": hunyuan_names,
         "GPT2": lambda given: {"n_ctx": CONTEXT},
         "Gemma4": lambda given: {"global_head_dim": given["global_head_dim"]},
         "NemotronH/dense": lambda given: {"num_experts_per_tok": None, "n_routed_experts": None, "layers_block_type": None,
                                           "num_hidden_layers": len(given["layers_block_type"]),
                                           "hybrid_override_pattern": "".join({"m": "-", "l": "M", "f": "*"}[kind[0]]
                                                                              for kind in given["layers_block_type"])},
         "Cohere2": lambda given: {"rotary_pct": 1.0},
         "MiniMaxM2": lambda given: {"scoring_func": "sigmoid", "use_routing_bias": True},
         "GraniteMoeHybrid": lambda given: {"layer_types": given["layer_types"]}}

# Of families that the converter knows by another class.
CONVERTED_AS = {"Mistral/3": "Mistral3ForConditionalGeneration",
                # DeepSeek-V3's own class drops the MTP layer; the other one writes the architecture of both.
                "DeepseekV3/mtp": "Glm4MoeLiteForCausalLM",
                "DeepseekV3/yarn/mtp": "Glm4MoeLiteForCausalLM",
                "Glm4/mtp": "GlmOcrForConditionalGeneration"}

# A family: the prefix of its classes, the form behind a slash, and the members of its config.
FAMILIES = {
    "Llama": lambda s: s.config(rope_parameters=s.draw.choice((rope(), rope("linear", factor=3.0), yarn(s.draw))), attention_bias=False),
    "Mistral": lambda s: s.config(rope_parameters=yarn(s.draw), sliding_window=None),
    "Qwen2": lambda s: s.narrow(rope_parameters=rope()),
    "Qwen3": lambda s: s.config(rope_parameters=rope(base=1e6)),
    "Qwen3Moe": lambda s: s.moe(rope_parameters=rope(), norm_topk_prob=True),
    "Mixtral": lambda s: s.config(num_local_experts=s.experts, num_experts_per_tok=s.used, sliding_window=None, rope_parameters=rope()),
    "Qwen2Moe": lambda s: s.narrow(num_experts=s.experts, num_experts_per_tok=s.used, moe_intermediate_size=32, decoder_sparse_step=1,
                                   shared_expert_intermediate_size=48, norm_topk_prob=False, rope_parameters=rope()),
    "Olmoe": lambda s: s.narrow(num_experts=s.experts, num_experts_per_tok=s.used, norm_topk_prob=False, rope_parameters=rope()),
    "GraniteMoe": lambda s: s.narrow(num_local_experts=s.experts, num_experts_per_tok=s.used, rope_parameters=rope(), attention_multiplier=0.3,
                                     embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0),
    "Gemma": lambda s: s.config(tie_word_embeddings=True, rope_parameters=rope()),
    "Gemma2": lambda s: s.config(sliding_window=s.window, layer_types=s.kinds(s.layers, period=2), query_pre_attn_scalar=s.head,
                                 tie_word_embeddings=True, rope_parameters=rope()),
    "Olmo2": lambda s: s.narrow(rope_parameters=rope()),
    "Granite": lambda s: s.narrow(rope_parameters=rope(), attention_multiplier=0.3, embedding_multiplier=3.0,
                                  residual_multiplier=0.5, logits_scaling=2.0),
    "Cohere2": lambda s: s.narrow(sliding_window=s.window, layer_types=s.kinds(s.layers, period=4), logit_scale=0.25, tie_word_embeddings=True,
                                  rope_parameters=rope()),
    "Exaone4": lambda s: s.config(sliding_window=s.window, layer_types=s.kinds(s.layers, period=4), rope_parameters=rope()),
    "SeedOss": lambda s: s.config(rope_parameters=rope(), attention_out_bias=False),
    "DeepseekV2": deepseek_v2,
    "DeepseekV3": lambda s: latent(s),
    "Glm4Moe": lambda s: s.config(n_routed_experts=s.experts, num_experts_per_tok=s.used, moe_intermediate_size=32, n_shared_experts=1,
                                  first_k_dense_replace=1, use_qk_norm=s.draw.random() < 0.5, n_group=1, topk_group=1,
                                  rope_parameters=rope(partial_rotary_factor=0.5)),
    "Lfm2": lambda s: s.narrow(conv_L_cache=s.draw.choice((2, 3, 5)), block_auto_adjust_ff_dim=False,
                               layer_types=s.kinds(s.layers, common="conv", period=2), rope_parameters=rope()),
    "Qwen3Next": lambda s: recurrent(s, num_experts=s.experts, num_experts_per_tok=s.used, moe_intermediate_size=32,
                                     shared_expert_intermediate_size=48, decoder_sparse_step=1, norm_topk_prob=True),
    "Qwen3_5": lambda s: recurrent(s),
    "Qwen3_5Moe": lambda s: recurrent(s, num_experts=s.experts, num_experts_per_tok=s.used, moe_intermediate_size=32,
                                      shared_expert_intermediate_size=48),
    "Lfm2Moe": lambda s: s.narrow(conv_L_cache=s.draw.choice((2, 3, 5)), num_experts=s.experts, num_experts_per_tok=s.used,
                                  moe_intermediate_size=32, num_dense_layers=1, use_expert_bias=True, norm_topk_prob=True,
                                  tie_word_embeddings=True, layer_types=s.kinds(s.layers, common="conv", period=2), rope_parameters=rope()),
    "Gemma3": lambda s: s.config(num_hidden_layers=7, sliding_window=s.window, layer_types=s.kinds(7, period=6), query_pre_attn_scalar=s.head, tie_word_embeddings=True,
                                 rope_parameters={"full_attention": rope(base=1e6), "sliding_attention": rope()}),
    "SmolLM3": lambda s: s.narrow(num_hidden_layers=5, no_rope_layers=[1, 1, 1, 0, 1], use_sliding_window=False, rope_parameters=rope()),
    "Ernie4_5": lambda s: s.config(use_bias=False, rope_parameters=rope()),
    "MiniMaxM2": lambda s: s.config(num_local_experts=s.experts, num_experts_per_tok=s.used, rotary_dim=s.head // 2,
                                    rope_parameters=rope(partial_rotary_factor=0.5)),
    "HunYuanDenseV1": lambda s: s.config(rope_parameters=rope()),
    "GraniteMoeHybrid": lambda s: s.narrow(layer_types=s.kinds(s.layers, rare="attention", common="mamba", period=2),
                                           mamba_n_heads=2 * s.heads * s.head // 16, mamba_d_head=16, mamba_d_state=s.draw.choice((16, 40, 128)),
                                           mamba_n_groups=1, mamba_d_conv=s.draw.choice((2, 3, 4)), mamba_expand=2, num_local_experts=s.experts,
                                           num_experts_per_tok=s.used, shared_intermediate_size=48, attention_multiplier=0.3,
                                           embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0,
                                           position_embedding_type="nope"),
    "Gemma4": lambda s: gemma4(s),
    "Gemma4/per-layer": gemma4_per_layer,
    "Gemma4/experts": lambda s: gemma4(s, enable_moe_block=True, num_experts=s.experts, top_k_experts=s.used, moe_intermediate_size=32),
    "Gemma4/K=V": lambda s: gemma4(s, attention_k_eq_v=True, num_global_key_value_heads=1),
    "Gemma4/experts,K=V": lambda s: gemma4(s, attention_k_eq_v=True, num_global_key_value_heads=s.draw.choice((1, s.kv)), enable_moe_block=True,
                                           num_experts=s.experts, top_k_experts=s.used, moe_intermediate_size=32),
    "Llama4": lambda s: llama4(s, interleave_moe_layer_step=s.draw.choice((1, 2)), num_hidden_layers=5),
    "Llama4/long": lambda s: llama4(s, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16384, interleave_moe_layer_step=1,
                                    num_hidden_layers=5),
    "Llama4/128": lambda s: llama4(s, num_local_experts=128, num_experts_per_tok=1, interleave_moe_layer_step=2, use_qk_norm=False),
    "Llama4/dense": lambda s: llama4(s, num_local_experts=0, num_experts_per_tok=0, interleave_moe_layer_step=0, moe_layers=[],
                                     no_rope_layers=[1] * s.layers, layer_types=["full_attention"] * s.layers),
    "NemotronH/dense": lambda s: nemotron(s, "mlp"),
    "NemotronH/experts": lambda s: nemotron(s, "moe"),
    "Ernie4_5_Moe": ernie_moe,
    "HunYuanMoEV1": lambda s: hunyuan(s),
    "HunYuanMoEV1/dynamic": lambda s: hunyuan(s, head_dim=128, hidden_size=s.heads * 128, max_position_embeddings=32768,
                                              rope_parameters=rope("dynamic", alpha=1000.0, factor=1.0)),
    "Ministral3": lambda s: s.config(rope_parameters=yarn(s.draw) | {"mscale": 1.0, "mscale_all_dim": 1.0,
                                                                     "llama_4_scaling_beta": s.draw.choice((0.1, 0.3))}),
    "Llama/llama3": lambda s: s.config(rope_parameters=rope("llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                                            original_max_position_embeddings=128)),
    "DeepseekV3/yarn": lambda s: latent(s, rope_parameters=yarn(s.draw) | dict.fromkeys(("mscale", "mscale_all_dim"), s.draw.choice((0.7, 1.0)))),
    "Glm4MoeLite": lambda s: latent(s),
    "GptOss": lambda s: s.config(num_local_experts=s.experts, num_experts_per_tok=s.used, sliding_window=s.window,
                                 layer_types=s.kinds(s.layers, period=2), rope_parameters=yarn(s.draw) | {"truncate": False},
                                 tie_word_embeddings=False),
    "Olmo3": lambda s: s.narrow(sliding_window=s.window, layer_types=s.kinds(s.layers, period=4), rope_parameters=rope(base=5e5)),
    "Phi": lambda s: s.narrow(intermediate_size=4 * s.heads * s.head, num_key_value_heads=s.heads, tie_word_embeddings=False,
                              rope_parameters=rope(partial_rotary_factor=0.5)),
    "Phi3": lambda s: s.narrow(rope_parameters=rope(), sliding_window=None),
    "Starcoder2": lambda s: s.narrow(rope_parameters=rope(), sliding_window=None, use_bias=True),
    "StableLm": lambda s: s.narrow(rope_parameters=rope(partial_rotary_factor=0.25), use_qkv_bias=s.draw.random() < 0.5,
                                   use_parallel_residual=s.draw.random() < 0.5, qk_layernorm=False),
    "Cohere": lambda s: s.narrow(logit_scale=0.25, tie_word_embeddings=True, use_qk_norm=False, rope_parameters=rope()),
    "Glm4": lambda s: s.config(rope_parameters=rope(partial_rotary_factor=0.5)),
    "GPT2": lambda s: dict(vocab_size=VOCABULARY, n_embd=s.heads * s.head, n_layer=s.layers, n_head=s.heads, n_positions=CONTEXT,
                           bos_token_id=None, eos_token_id=None),
    "Mistral/3": lambda s: s.config(rope_parameters=rope(base=1e9), sliding_window=None),
    "Mamba2": lambda s: dict(vocab_size=VOCABULARY, hidden_size=s.hidden, num_hidden_layers=s.layers, expand=2,
                             num_heads=2 * s.hidden // 16, head_dim=16, state_size=s.draw.choice((16, 40, 128)), n_groups=1,
                             conv_kernel=s.draw.choice((2, 3, 4)), tie_word_embeddings=s.tied, bos_token_id=None, eos_token_id=None,
                             pad_token_id=None),
}
# Families whose published files hold MTP layers.
FAMILIES |= {f"{name}/mtp": FAMILIES[name]
             for name in ("DeepseekV3", "DeepseekV3/yarn", "Glm4MoeLite", "Glm4Moe", "Glm4", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe")}


def randomise(model, seed):
    """Weights that a half holds exactly; norms around 1. Recurrences keep what transformers gives them."""
    numbers = np.random.default_rng(seed)
    tensors = list(model.named_parameters()) + [(n, b) for n, b in model.named_buffers() if n.endswith(("correction_bias", "layer_scalar"))]
    for name, tensor in tensors:
        if name.endswith(("A_log", "dt_bias", ".D")):
            continue
        x = numbers.standard_normal(tuple(tensor.shape))
        if tensor.ndim > 1:
            x *= 1.0 if "embed" in name or "conv" in name else 1.3 / tensor.shape[-1] ** 0.5
        elif "norm" in name and not name.endswith("bias") or name.endswith(("scale", "scalar")):
            x = np.clip(tensor.numpy() + 0.25 * x, -2, 2)
        else:
            x *= 0.2
        tensor.data.copy_(torch.from_numpy(x.astype(np.float16).astype(np.float32)))


class Mtp(torch.nn.Module):
    """The last layer of a model, taken away from it, for multi-token prediction (DeepSeek-V3's report, section 2.2).

    The layer's row of position p reads the embedding of token p and the model's state of position p - 1 behind its output norm, as vLLM and
    SGLang have it for DeepSeek-V3, GLM-4.5 and Qwen3-Next, and sees the rows 1 to p. A guess behind a guess reads the layer's own state behind
    its norm. `own`: the layer has an embedding and an output of its own.
    """

    def __init__(self, model, own, seed):
        super().__init__()
        size = model.config.hidden_size
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(model.model.norm) for _ in range(3))
        self.eh_proj = torch.nn.Linear(2 * size, size, bias=False)
        if own:
            self.embed_tokens, self.head = torch.nn.Embedding(VOCABULARY, size), torch.nn.Linear(size, VOCABULARY, bias=False)
        randomise(self, seed)
        parts = dict(self.named_parameters())  # before the model's own ones
        self.model, self.layer = model, copy.deepcopy(model)
        self.own = parts
        if own:
            self.layer.lm_head = self.head
        else:
            self.embed_tokens = model.model.embed_tokens
        self.layer.model.norm = self.norm
        for part, kept in ((model, slice(0, -1)), (self.layer, slice(-1, None))):
            part.model.layers = part.model.layers[kept]
            if getattr(part.config, "layer_types", None):
                part.config.layer_types = part.config.layer_types[kept]
            part.config.num_hidden_layers = len(part.model.layers)

    def rows(self, tokens, states):
        return self.eh_proj(torch.cat((self.enorm(self.embed_tokens(tokens)), self.hnorm(states)), dim=-1))

    def guesses(self, ids):
        """The likeliest tokens behind each token but the first, -1 where two are about as likely; the logits behind the last token, and behind
        guesses that follow."""
        tokens = torch.tensor([ids])
        rows = self.rows(tokens[:, 1:], self.model.model(tokens[:, :-1], use_cache=False).last_hidden_state)
        chain = []
        while True:
            states = self.layer.model(inputs_embeds=rows, use_cache=False).last_hidden_state
            logits = self.layer.lm_head(states)
            if not chain:
                best = logits[0].topk(2)
                top = [int(tokens[0]) if values[0] - values[1] > CLOSE else -1 for values, tokens in zip(best.values, best.indices)]
            chain.append(logits[0, -1])
            if len(chain) == CHAIN:
                return top, chain
            rows = torch.cat((rows, self.rows(chain[-1].argmax()[None, None], states[:, -1:])), dim=1)

    def save(self, folder, name):
        """Puts the layer into the folder of the model with all its layers, under published names."""
        file, config = Path(folder, "model.safetensors"), Path(folder, "config.json")
        members = json.loads(config.read_text())
        n = members["num_hidden_layers"] = members["num_hidden_layers"] - 1
        if members.get("layer_types"):
            members["layer_types"].pop()
        qwen = name.startswith("Qwen")
        members["mtp_num_hidden_layers" if qwen else "num_nextn_predict_layers"] = 1
        config.write_text(json.dumps(members))
        layer = f"model.layers.{n}."
        names = ({"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "norm": "mtp.norm", "eh_proj": "mtp.fc"} if qwen else
                 {part: layer + ("shared_head." if part in ("norm", "head") else "") + part
                  for part in ("enorm", "hnorm", "norm", "head", "eh_proj", "embed_tokens")})
        tensors = {key.replace(layer, "mtp.layers.0.") if qwen else key: tensor for key, tensor in safetensors.torch.load_file(file).items()}
        for key, tensor in self.own.items():
            part, _, kind = key.rpartition(".")
            tensors[f"{names[part]}.{kind}"] = tensor.data.contiguous()
        safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


def write_gguf(name, model, given, folder, path, mtp=None, types=gguf.LlamaFileType.ALL_F32):
    """By llama.cpp's converter, with a vocabulary that no text needs."""
    config = Path(folder, "config.json")
    members = None  # the converter asks transformers, which leaves out or fills in what it does not know
    if added := ADDED.get(name) or ADDED.get(name.split("/")[0]):
        own = added(given)
        members = {k: v for k, v in (json.loads(config.read_text()) | own).items() if v is not None or k not in own}
        config.write_text(json.dumps(members))
    # Gemma's converter counts its entries.
    Path(folder, "tokenizer.json").write_text(json.dumps({"model": {"vocab": {str(i): i for i in range(VOCABULARY)}}, "added_tokens": []}))
    converter = get_model_class(CONVERTED_AS.get(name, type(model).__name__))
    converter.no_mtp = mtp is None
    if mtp:
        mtp.save(folder, name)
        members = json.loads(config.read_text())
    converter = converter(Path(folder), types, Path(path), hparams=members)
    converter = getattr(converter, "impl", converter)

    def set_vocab():
        writer = converter.gguf_writer
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        tokens = [chr(0x100 + i) for i in range(VOCABULARY)]
        tokens[-1] = tokens[1] + tokens[2]
        writer.add_token_list(tokens)
        writer.add_token_types([gguf.TokenType.NORMAL] * VOCABULARY)
        writer.add_token_merges([f"{tokens[1]} {tokens[2]}"])
        writer.add_eos_token_id(0)

    converter.set_vocab = set_vocab
    converter.write()


def logits_of(path, ids, folder):
    raw = folder + "/logits"
    done = subprocess.run([INSPECT, "logits", path, "--ids", ",".join(map(str, ids)), "--kv-type", "f32", "--device", "cpu", "--tune", "off",
                           "--raw", raw], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip())
    return np.fromfile(raw, dtype=np.float32)


def cases(mtp, ids, lengths):
    """What quire's test of MTP layers reads."""
    for n in lengths:
        top, chain = mtp.guesses(ids[:n + 1])
        yield {"tokens": ids[:n + 1], "top": top, "logits": [[round(x, 5) for x in row.tolist()] for row in chain]}


def difference_of_guesses(mtp, ids, folder):
    """The test of quire that drives an MTP layer reads the model and what is expected, and writes the largest difference."""
    Path(folder, "mtp.json").write_text(json.dumps(list(cases(mtp, ids, GUESSED_LENGTHS))))
    done = subprocess.run([TESTS, "[.families]"], capture_output=True, text=True, env=os.environ | {"QUIRE_MTP_FOLDER": folder})
    difference = Path(folder, "difference")
    if not difference.exists() or done.returncode != 0 and float(difference.read_text()) <= TOLERANCE:
        raise RuntimeError(done.stdout.strip()[-500:])  # another failure: a likeliest token, a file that quire refuses
    return float(difference.read_text())


def make(name, given, seed, folder, own=False, types=gguf.LlamaFileType.ALL_F32):
    """A model with these members in its config, which is also the file model.gguf in the folder; and the MTP layer behind it, if its form has one,
    whose embedding and output are its `own`."""
    # Of models that also see, the part for text.
    family = name.split("/")[0]
    kind = getattr(transformers, family + "TextConfig", None) or getattr(transformers, family + "Config")
    has_mtp = name.endswith("/mtp")
    if has_mtp:
        given = given | {"num_hidden_layers": given["num_hidden_layers"] + 1}
        if "layer_types" in given:
            given["layer_types"] = given["layer_types"] + ["full_attention"]
    config = kind(**given)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = (getattr(transformers, family + "ForCausalLM", None) or getattr(transformers, family + "LMHeadModel"))(config).float().eval()
    # Of NemotronH transformers bounds the steps of a scan from below, by what its training began with; other engines do not.
    for part in model.modules():
        if hasattr(part, "time_step_limit"):
            part.time_step_limit = (0.0, float("inf"))
    randomise(model, seed)
    model.tie_weights()
    model.save_pretrained(folder + "/model")
    mtp = Mtp(model, own, seed + 1) if has_mtp else None
    write_gguf(name, model, given, folder + "/model", folder + "/model.gguf", mtp, types)
    return model, mtp


def compare(name, seed, folder):
    """The largest difference over all lengths."""
    shape = Shape(random.Random(f"{name} {seed}"))
    given = FAMILIES[name](shape)
    # Qwen's published layers share the model's embedding and output.
    model, mtp = make(name, given, seed, folder, not name.startswith("Qwen") and shape.draw.random() < 0.5)
    path = folder + "/model.gguf"
    lengths = LENGTHS + MORE_LENGTHS.get(name, ())
    ids = np.random.default_rng(seed).integers(1, VOCABULARY, max(lengths)).tolist()
    # Each length on its own: a rope may depend on it.
    worst = max(float(np.abs(logits_of(path, ids[:n], folder)[:VOCABULARY] - model(torch.tensor([ids[:n]])).logits[0, -1].numpy()).max())
                for n in lengths)
    return max(worst, difference_of_guesses(mtp, ids, folder)) if mtp else worst


def main():
    wrong = 0
    wanted = sys.argv[5:]
    if unknown := set(wanted) - {*FAMILIES} - {name.split("/")[0] for name in FAMILIES}:
        sys.exit(f"no such families: {' '.join(sorted(unknown))}")
    for name in FAMILIES:
        if wanted and name not in wanted and name.split("/")[0] not in wanted:
            continue
        for seed in range(SEED, SEED + 2):
            folder = tempfile.mkdtemp()
            try:
                difference = compare(name, seed, folder)
                wrong += not difference <= TOLERANCE
                print(f"{name:20} seed {seed}: {difference:.1e}{'' if difference <= TOLERANCE else '  WRONG'}", flush=True)
            except Exception as error:
                wrong += 1
                traceback.print_exc()
                print(f"{name:20} seed {seed}: {type(error).__name__}: {error}", flush=True)
            finally:
                shutil.rmtree(folder)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
