"""Writes the trained model as GGUF: matrices in Q8_0, norms in F32, vocabulary and chat template inside.

    python export.py [--model build/chat-model.pt] [--data build/chat-data] [--out models/quire-14m-q8_0.gguf]
"""
import argparse
import json

import gguf
import numpy as np
import torch

from chat import END, END_OF_TEXT, START, TEMPLATE
from model import Config


def main():
    arg = argparse.ArgumentParser()
    arg.add_argument("--model", default="build/chat-model.pt")
    arg.add_argument("--data", default="build/chat-data")
    arg.add_argument("--out", default="models/quire-14m-q8_0.gguf")
    a = arg.parse_args()
    saved = torch.load(a.model, map_location="cpu")
    c, state = Config(**saved["config"]), saved["state"]
    bpe = json.load(open(f"{a.data}/tokenizer.json"))["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].get)
    merges = [m if isinstance(m, str) else " ".join(m) for m in bpe["merges"]]
    special = {END_OF_TEXT, START, END}

    w = gguf.GGUFWriter(a.out, "llama")
    w.add_type("model")
    w.add_name("quire 14M chat")
    w.add_basename("quire")
    w.add_finetune("chat")
    w.add_size_label("14M")
    w.add_author("the quire authors")
    w.add_description("A tiny chat model trained from scratch for the quire engine: definitions from WordNet, paged attention and its terms, small sums, short stories.")
    w.add_license("mit")
    w.add_license_name("MIT; definitions from WordNet 3.0, Copyright 2006 by Princeton University")
    w.add_languages(["en"])
    w.add_float32("general.sampling.temp", 0)  # one random token spoils a fact learned by heart
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    w.add_vocab_size(c.vocab)
    w.add_context_length(c.context)
    w.add_embedding_length(c.dim)
    w.add_block_count(c.layers)
    w.add_feed_forward_length(c.hidden)
    w.add_head_count(c.heads)
    w.add_head_count_kv(c.kv_heads)
    w.add_key_length(c.head_dim)
    w.add_value_length(c.head_dim)
    w.add_rope_dimension_count(c.head_dim)
    w.add_rope_freq_base(c.rope_base)
    w.add_layer_norm_rms_eps(c.eps)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens)
    w.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens])
    w.add_token_merges(merges)
    w.add_bos_token_id(bpe["vocab"][END_OF_TEXT])
    w.add_eos_token_id(bpe["vocab"][END])
    w.add_pad_token_id(bpe["vocab"][END_OF_TEXT])
    w.add_add_bos_token(False)
    w.add_add_space_prefix(False)
    w.add_chat_template(TEMPLATE)

    for name, t in state.items():
        x = t.numpy().astype(np.float32)
        if x.ndim == 1:
            w.add_tensor(name, x)
        else:
            q = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0)
            w.add_tensor(name, q, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    print(a.out, sum(t.numel() for t in state.values()), "parameters")


if __name__ == "__main__":
    main()
