#!/usr/bin/env python3
"""Copies the part of the reference data that ships with the project.

    tests/data/make.py REFERENCE_FOLDER

The reference folder is the full set (tiny models of random weights, what `transformers` computes from them, quantised
blocks with their values, malformed files). What stands here is a subset of it; JSON is rewritten without spaces.
"""
import gzip, json, pathlib, shutil, sys, tarfile

here = pathlib.Path(__file__).parent
MODELS = ["llama3-gqa-Q8_0", "qwen2-Q4_0", "mistral-swa-Q8_0", "llama-zoo-Q2_K",
          "gemma2-Q8_0", "qwen3moe-Q8_0", "deepseek2-Q8_0", "gemma4-Q8_0", "lfm2-Q8_0", "qwen35-k-Q4_K_M",
          "nemotron_h-Q8_0"]
TEMPLATES = ("chatml llama-2 llama-3 mistral-v1 zephyr gemma-2 phi-3 "
             "hermes-2-pro-tool_use qwen2.5 qwen3 qwen3-coder mistral-nemo granite-3.3").split()
VOCABULARIES = {"llama-spm": ".gguf", "gpt-2": ".gguf.gz", "deepseek-coder": ".gguf.gz"}
TYPES = "F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS".split()


def compact(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(json.loads(source.read_text()), separators=(",", ":"), ensure_ascii=False) + "\n")


def copy(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def main(reference):
    for folder in ("models", "logits", "quants", "templates", "tokenizers"):
        shutil.rmtree(here / folder, ignore_errors=True)
    for name in MODELS:
        model, kind = name.rsplit("-", 1)
        copy(reference / "models" / f"{name}.gguf", here / "models" / f"{name}.gguf")
        logits, out = reference / "logits" / model, here / "logits" / model
        compact(logits / "expected.json", out / "expected.json")
        compact(logits / f"expected.{kind}.json", out / f"expected.{kind}.json")
        copy(logits / f"last_logits.{kind}.npy", out / f"last_logits.{kind}.npy")
    for model, kind in (("llama3-gqa", "F16"), ("gpt2", "F32")):
        copy(reference / "models" / f"{model}-{kind}.gguf", here / "models" / f"{model}-{kind}.gguf")
        compact(reference / "logits" / model / "beams.json", here / "logits" / model / "beams.json")
    compact(reference / "logits" / "gpt2" / "expected.json", here / "logits" / "gpt2" / "expected.json")
    copy(reference / "logits" / "gpt2" / "last_logits.npy", here / "logits" / "gpt2" / "last_logits.npy")
    copy(reference / "logits" / "llama3-gqa" / "last_logits.npy", here / "logits" / "llama3-gqa" / "last_logits.npy")
    for kind in TYPES:
        copy(reference / "quants" / f"{kind}.bin", here / "quants" / f"{kind}.bin")
        copy(reference / "quants" / f"{kind}.f32.npy", here / "quants" / f"{kind}.f32.npy")
    for name, suffix in VOCABULARIES.items():
        for kind in (suffix, ".gguf.inp", ".gguf.out"):
            copy(reference / "tokenizers" / f"ggml-vocab-{name}{kind}", here / "tokenizers" / f"ggml-vocab-{name}{kind}")
        compact(reference / "tokenizers" / f"{name}.cases.json", here / "tokenizers" / f"{name}.cases.json")
    for name in TEMPLATES:
        copy(reference / "templates" / f"{name}.jinja", here / "templates" / f"{name}.jinja")
        compact(reference / "templates" / f"{name}.json", here / "templates" / f"{name}.json")
    # 90 variants of one small file: as an archive (CMake unpacks it) they take a twentieth
    def plain(info):
        info.mode = 0o755 if info.isdir() else 0o644  # or only root could remove the build folder
        info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
        return info

    with gzip.GzipFile(here / "bad.tar.gz", "wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        tar.add(reference / "bad", "bad", filter=plain)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]))
