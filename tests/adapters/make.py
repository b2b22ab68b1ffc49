#!/usr/bin/env python3
"""Makes LoRA adapters of random weights and the logits that `peft` computes with them: tests/data/adapters.

    tests/adapters/make.py REFERENCE_FOLDER OUTPUT_FOLDER [MODEL ...]

The reference folder is the full set of reference data: its models and its `scripts`, which turn a GGUF file into a model of `transformers`.
Of each model (llama3-gqa-F16 and gpt2-F32, if none is named) come

    MODEL.one.gguf     an adapter of rank 4 for every matrix of every layer, the embedding and, where it is not tied, the output; F32
    MODEL.two.gguf     one of rank 8 for the attention alone; F16
    MODEL.json       the prompts, as tokens
    MODEL.npy        logits behind each prompt, of each use of the adapters: [uses × prompts × vocabulary]

A use is a pair of scales, in the order of USES. The test (tests/test_adapters.cpp) has the same list.
"""
import json, pathlib, re, sys

import gguf
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

USES = [(1, 0), (0, 1), (1, 0.5), (-0.75, 0)]
PROMPTS = ("p7", "p33", "text0")
NAMES = ("one", "two")
ALPHA = {"one": 6, "two": 8}
RANK = {"one": 4, "two": 8}


def draw(model, name, seed):
    """Random weights of such a size that the logits change visibly; exact in F16."""
    random = np.random.default_rng(seed)
    for key, p in model.named_parameters():
        if re.search(rf"\.lora_(embedding_)?[AB]\.{name}(\.weight)?$", key):
            rank = RANK[name]
            size = 0.4 / np.sqrt(max(p.shape)) if "_A" in key else 0.4 / np.sqrt(rank)
            values = random.normal(0, size, p.shape).astype(np.float16).astype(np.float32)
            p.data = torch.from_numpy(values)


def write(path, model, spec, entries, name, kind):
    w = gguf.GGUFWriter(path, spec["arch"])
    w.add_type("adapter")
    w.add_string("adapter.type", "lora")
    w.add_float32("adapter.lora.alpha", float(ALPHA[name]))
    parameters = {k: p.data.numpy() for k, p in model.named_parameters()}
    for e in entries:
        base = "base_model.model." + e.hf.removesuffix(".weight")
        if f"{base}.lora_embedding_A.{name}" in parameters:
            a, b = parameters[f"{base}.lora_embedding_A.{name}"].T, parameters[f"{base}.lora_embedding_B.{name}"]
        elif f"{base}.lora_A.{name}.weight" in parameters:
            a, b = parameters[f"{base}.lora_A.{name}.weight"], parameters[f"{base}.lora_B.{name}.weight"]
            if "c_" not in e.hf:  # the rows of b stand as those of the weight; GPT-2's are columns in `transformers`
                (b,) = e.split(b)
        else:
            continue
        for half, x in (("lora_a", a), ("lora_b", b)):
            w.add_tensor(f"{e.gg[0]}.{half}", np.ascontiguousarray(x.astype(kind)))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def make(reference, out, full_name):
    import hfmodels, specs_reference
    name = full_name.rsplit("-", 1)[0]
    spec = dict(next(s for s in specs_reference.SPECS if s["name"] == name))
    spec["arch"] = hfmodels.FAMILY_ARCH[spec["family"]]
    expected = json.loads((reference / "logits" / name / "expected.json").read_text())
    base = hfmodels.hf_from_gguf(str(reference / "models" / f"{full_name}.gguf"), spec, expected["n_vocab"])
    entries = hfmodels.mapping(spec)
    matrices = sorted({e.hf.removesuffix(".weight").rsplit(".", 1)[-1] for e in entries
                       if e.hf.endswith("proj.weight") or ".c_" in e.hf and e.hf.endswith(".weight")})
    ends = ["wte" if spec["family"] == "gpt2" else "embed_tokens"] + ([] if spec["tied"] or spec["family"] == "gpt2" else ["lm_head"])
    attention = [m for m in matrices if m in ("q_proj", "v_proj", "qkv_proj", "c_attn")]
    config = lambda key, targets: LoraConfig(r=RANK[key], lora_alpha=ALPHA[key], target_modules=targets, lora_dropout=0.0,
                                             fan_in_fan_out=spec["family"] == "gpt2")
    model = get_peft_model(base, config("one", matrices + ends), adapter_name="one")
    model.add_adapter("two", config("two", attention))
    draw(model, "one", 1), draw(model, "two", 2)
    model.eval()
    write(str(out / f"{name}.one.gguf"), model, spec, entries, "one", np.float32)
    write(str(out / f"{name}.two.gguf"), model, spec, entries, "two", np.float16)

    prompts = [next(p["tokens"] for p in expected["prompts"] if p["id"] == key) for key in PROMPTS]
    logits = []
    for use in USES:
        active = [key for key, scale in zip(NAMES, use) if scale != 0]
        model.base_model.set_adapter(active)
        for module in model.modules():
            for key, scale in zip(NAMES, use):
                if isinstance(module, LoraLayer) and key in module.scaling:
                    module.scaling[key] = scale * ALPHA[key] / RANK[key]
        with torch.no_grad():
            logits.append([model(torch.tensor([p])).logits[0, -1].numpy() for p in prompts])
    np.save(out / f"{name}.npy", np.array(logits, dtype="<f4"))
    (out / f"{name}.json").write_text(json.dumps({"prompts": prompts}, separators=(",", ":")) + "\n")
    with torch.no_grad(), model.disable_adapter():
        plain = np.array([model(torch.tensor([p])).logits[0, -1].numpy() for p in prompts])
    print(name, "largest logit", np.abs(plain).max(), "largest change by use", np.abs(np.array(logits) - plain).max(axis=(1, 2)))


if __name__ == "__main__":
    reference, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    sys.path.insert(0, str(reference / "scripts"))
    out.mkdir(parents=True, exist_ok=True)
    for one in sys.argv[3:] or ["llama3-gqa-F16", "gpt2-F32"]:
        make(reference, out, one)
