#!/usr/bin/env python3
"""Makes tiny models of other families with a layer for multi-token prediction, and the logits of that layer.

    tests/data/mtp/make_others.py LLAMA

LLAMA is the folder of llama.cpp's converter, which writes the files. The logits are those of the layer that `make test-families` puts together
from transformers' parts, and the Python with the packages is its own: build/families/venv/bin/python, build/families/llama.
"""
import json, pathlib, random, shutil, sys, tempfile

HERE = pathlib.Path(__file__).parent
if len(sys.argv) != 2:
    sys.exit(__doc__)
sys.argv = [sys.argv[0], "", "", sys.argv[1], "1"]
sys.path.insert(0, str(HERE.parents[1] / "families"))

import numpy as np
from compare import FAMILIES, VOCABULARY, Shape, cases, gguf, make

SIZES = {
    "glm4moe": ("Glm4Moe/mtp", dict(head_dim=16, use_qk_norm=True, n_routed_experts=4, num_experts_per_tok=2)),
    "deepseek2": ("DeepseekV3/mtp", dict(q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, head_dim=8, v_head_dim=16,
                                         num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
                                         n_shared_experts=1, norm_topk_prob=True, routed_scaling_factor=2.5)),
}


def main():
    for architecture, (name, sizes) in SIZES.items():
        given = FAMILIES[name](Shape(random.Random(1))) | dict(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, num_key_value_heads=1,
                                                               intermediate_size=32, tie_word_embeddings=False) | sizes
        folder = tempfile.mkdtemp()
        _, mtp = make(name, given, 1, folder, types=gguf.LlamaFileType.MOSTLY_F16)
        shutil.copyfile(folder + "/model.gguf", HERE / f"tiny-mtp-{architecture}-F16.gguf")
        ids = np.random.default_rng(1).integers(1, VOCABULARY, 41).tolist()
        (HERE / f"tiny-mtp-{architecture}.json").write_text(json.dumps(list(cases(mtp, ids, (1, 2, 9, 40))), separators=(",", ":")) + "\n")
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
