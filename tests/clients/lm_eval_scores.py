"""The unmodified lm_eval with its `local-completions` backend against ./server: are its scores equal to those computed directly?

Its packages are large, so `make test-clients` leaves it out:
    python3 -m venv /tmp/lm_eval && /tmp/lm_eval/bin/pip install 'lm_eval[api]==0.4.13'
    /tmp/lm_eval/bin/python tests/clients/lm_eval_scores.py

1. Log-likelihoods of the reference prompts with a model of random weights, compared with transformers in float32.
2. A multiple-choice task, a perplexity and a generation with the toy model, tokenized by /tokenize, compared with the same
   numbers computed from `prompt_logprobs` and single requests.
"""

import json
import math
import os
import sys
import tempfile

sys.path.append(os.path.dirname(os.path.abspath(__file__)))
from quire_server import MODEL, ROOT, Server  # noqa: E402

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import lm_eval  # noqa: E402
from lm_eval.models.openai_completions import LocalCompletionsAPI  # noqa: E402

CHOICES = [("The sun rises in the", [" east", " west", " soup"], 0), ("Grass is", [" green", " loud", " seven"], 0),
           ("The capital of France is", [" London", " Paris", " bread"], 1), ("Fish live in", [" trees", " water"], 1),
           ("A week has seven", [" days", " horses", " oceans"], 0), ("Snow is", [" hot", " cold"], 1),
           ("We read a", [" book", " lake", " cloud"], 0), ("Dogs can", [" bark", " evaporate"], 0),
           ("At night it is", [" dark", " square"], 0), ("Two and two are", [" nine", " four"], 1)]
TEXTS = [f"This is text number {i}." + " It was a long way home, and nobody said a word." * (i + 1) for i in range(6)]


def backend(server, **options):
    return LocalCompletionsAPI(model=os.path.basename(server.model), base_url=server.url + "/v1/completions",
                               tokenizer_backend="remote", max_length=server.context, **options)


def reference(options):
    name = "llama3-gqa"
    with open(os.path.join(ROOT, "tests/data/logits", name, "expected.json")) as file:
        prompts = [p for p in json.load(file)["prompts"] if p["n"] > 1]
    model = os.path.join(ROOT, "tests/data/models", name + "-F16.gguf")
    with Server("--kv-type", "f32", "--alias", os.path.basename(model), "-c", "512", model=model) as server:
        server.model, server.context = model, 512
        parts = [(p, max(1, p["n"] // 3)) for p in prompts]
        scores = backend(server, **options)._loglikelihood_tokens(
            [(None, p["tokens"][:cut], p["tokens"][cut:]) for p, cut in parts])
    worst = 0
    for (p, cut), (score, greedy) in zip(parts, scores, strict=True):
        expected = math.fsum(p["logprobs"][cut - 1:])
        worst = max(worst, abs(score - expected) / (p["n"] - cut))
        assert greedy == (p["top1"][cut - 1:-1] == p["tokens"][cut:]), p["id"]
    print(f"lm_eval {options}: {len(scores)} reference prompts, log-likelihood {sum(s for s, _ in scores):.4f}, transformers "
          f"{sum(math.fsum(p['logprobs'][cut - 1:]) for p, cut in parts):.4f}; at most {worst:.1e} apart a token")
    assert worst < 1e-3


def rated(server, tokens):
    """ln p of each token after the first, by another field than the one that lm_eval uses."""
    status, answer = server.post("/v1/completions", {"prompt": tokens, "max_tokens": 0, "prompt_logprobs": 0})
    assert status == 200, answer
    entries = answer["choices"][0]["prompt_logprobs"][1:]
    return [entry[str(token)]["logprob"] for token, entry in zip(tokens[1:], entries, strict=True)]


def tasks(folder):
    def lines(name, rows):
        path = os.path.join(folder, name + ".jsonl")
        with open(path, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        return {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": path}},
                "test_split": "test"}

    choices = lines("choices", [{"text": t, "choices": c, "label": l} for t, c, l in CHOICES])
    choices |= {"output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "{{choices}}",
                "doc_to_target": "{{label}}", "target_delimiter": "",
                "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}
    rolling = lines("rolling", [{"text": t} for t in TEXTS])
    rolling |= {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
                "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}]}
    generated = lines("generated", [{"text": t, "answer": ""} for t, _, _ in CHOICES])
    generated |= {"output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "{{answer}}",
                  "generation_kwargs": {"until": ["."], "max_gen_toks": 24, "temperature": 0},
                  "metric_list": [{"metric": "exact_match"}]}
    return [choices, rolling, generated]


def shipped(options):
    with tempfile.TemporaryDirectory() as folder, Server("--alias", os.path.basename(MODEL)) as server:
        server.model, server.context = MODEL, 1024
        evaluated = backend(server, **options)
        results = lm_eval.simple_evaluate(model=evaluated, tasks=tasks(folder), bootstrap_iters=0,
                                          log_samples=True)
        ids = lambda text: server.post("/tokenize", {"prompt": text, "add_special_tokens": False})[1]["tokens"]
        right = right_norm = 0
        worst = 0.0
        for (text, choices, label), sample in zip(CHOICES, sorted(results["samples"]["choices"], key=lambda s: s["doc_id"]),
                                                  strict=True):
            scores = [math.fsum(rated(server, ids(text + c))[len(ids(text)) - 1:]) for c in choices]
            right += max(range(len(scores)), key=scores.__getitem__) == label
            right_norm += max(range(len(scores)), key=lambda i: scores[i] / len(choices[i])) == label
            for score, (theirs, _) in zip(scores, sample["filtered_resps"], strict=True):
                worst = max(worst, abs(score - float(theirs)))
        total = math.fsum(math.fsum(rated(server, [evaluated.prefix_token_id] + ids(text))) for text in TEXTS)
        direct = {"acc": right / len(CHOICES), "acc_norm": right_norm / len(CHOICES),
                  "word_perplexity": math.exp(-total / sum(len(t.split()) for t in TEXTS)),
                  "bits_per_byte": -total / sum(len(t.encode()) for t in TEXTS) / math.log(2)}
        for name, value in direct.items():
            theirs = results["results"]["choices" if "acc" in name else "rolling"][name + ",none"]
            print(f"lm_eval {options}: {name} {theirs:.6f}, directly {value:.6f}")
            assert abs(theirs - value) <= 1e-5 * max(1, abs(value))
        print(f"lm_eval {options}: log-likelihoods of choices at most {worst:.1e} apart")
        assert worst < 1e-4
        for (text, _, _), sample in zip(CHOICES, sorted(results["samples"]["generated"], key=lambda s: s["doc_id"])):
            answer = server.post("/v1/completions", {"prompt": ids(text), "max_tokens": 24, "temperature": 0, "stop": ["."]})
            assert sample["filtered_resps"] == [answer[1]["choices"][0]["text"]], (sample["filtered_resps"], answer)
        print(f"lm_eval {options}: {len(CHOICES)} generated answers are those of single requests")


for how in {}, {"num_concurrent": 8}, {"batch_size": 4}:
    reference(how)
    shipped(how)
