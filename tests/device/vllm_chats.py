#!/usr/bin/env python3
"""Asks vLLM the questions of `bench chats --questions FILE`, on a model of the 8B shape with random weights, and prints the same columns.

    tests/device/vllm_chats.py QUESTIONS --pool TOKENS [--host MULTIPLE] [--at-once N]

Without --host vLLM has its prefix cache alone; with it, blocks that leave the pool go to host memory (kv_offloading_size).
"""
import argparse, itertools, json, math, os, time

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("questions")
parser.add_argument("--pool", type=int, required=True, help="tokens that the GPU's pool has room for")
parser.add_argument("--host", type=float, default=0, help="room in host memory, as a multiple of the pool")
parser.add_argument("--at-once", type=int, default=4)
a = parser.parse_args()

VOCABULARY, TOKEN_BYTES = 128256, 131072
CONFIG = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
              num_attention_heads=32, num_key_value_heads=8, vocab_size=VOCABULARY, max_position_embeddings=1 << 20, rms_norm_eps=1e-5,
              rope_theta=500000.0, torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2, hidden_act="silu", tie_word_embeddings=False)


def token_at(text, position):  # as tools/bench/replicas/chats.cppm has it
    x = (text * 0x9E3779B97F4A7C15 + position) * 0xD6E8FEB86659FD93 % 2**64
    return 300 + (x >> 32) % (VOCABULARY - 300)


def measure(engine, questions, other, SamplingParams):
    """other: makes the texts others than those of the working set before, which may still be in a cache."""
    questions, running, said = [dict(q, text=q["text"] + other) for q in questions], {}, {}
    n_warm, n_answered = sum(not q["counts"] for q in questions), 0
    prompt = tokens = cached = 0
    first, begin, numbers = [], 0, itertools.count()
    while questions or running:
        while len(running) < a.at_once and questions and questions[0]["text"] not in {r["text"] for r in running.values()}:
            q = questions.pop(0)
            ids = said.pop(q["text"], [])
            ids = ids + [token_at(q["text"], i) for i in range(len(ids), q["prompt"])]
            number = f"{other}-{next(numbers)}"
            engine.add_request(number, {"prompt_token_ids": ids},
                               SamplingParams(temperature=0, max_tokens=q["output"], ignore_eos=True, detokenize=False))
            running[number] = dict(q, ids=ids, asked=time.perf_counter(), begun=0)
        for out in engine.step():
            r = running[out.request_id]
            answer = list(out.outputs[0].token_ids)
            if answer and not r["begun"]:
                r["begun"] = time.perf_counter()
            if not out.finished:
                continue
            n_answered += 1
            if n_answered == n_warm:
                begin = time.perf_counter()
            if r["counts"]:
                prompt += len(r["ids"])
                tokens += len(r["ids"]) + len(answer)
                cached += out.num_cached_tokens or 0
                first.append(r["begun"] - r["asked"])
            said[r["text"]] = r["ids"] + answer
            del running[out.request_id]
    seconds, first = time.perf_counter() - begin, sorted(first)
    return 100 * cached / prompt, 1e3 * sum(first) / len(first), 1e3 * first[math.ceil(0.99 * len(first)) - 1], tokens / seconds


def main():
    from vllm import LLM, SamplingParams

    os.makedirs("/tmp/vllm-8b", exist_ok=True)
    json.dump(CONFIG, open("/tmp/vllm-8b/config.json", "w"))
    more = dict(kv_offloading_size=a.host * a.pool * TOKEN_BYTES / 2**30, kv_offloading_backend="native") if a.host else {}
    start = time.perf_counter()
    engine = LLM(model="/tmp/vllm-8b", load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=a.pool // 2,
                 max_num_seqs=a.at_once, num_gpu_blocks_override=a.pool // 16, enable_prefix_caching=True, **more).llm_engine
    print(f"vLLM started in {time.perf_counter() - start:.0f} s, {'with' if a.host else 'without'} host memory", flush=True)
    lines = [json.loads(line) for line in open(a.questions)]
    for n, (size, questions) in enumerate(itertools.groupby(lines, lambda q: q["working_set"])):
        share, mean, last, rate = measure(engine, questions, n << 32, SamplingParams)
        print(f"| {size:5.1f} × | {share:5.1f} % | {mean:6.0f} | {last:6.0f} | {rate:7.0f} |", flush=True)


if __name__ == "__main__":
    main()
