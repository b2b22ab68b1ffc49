"""The recorded answers of canitoolcall against ./inspect tool-calls: each as a whole and as streams that are cut in several ways, judged by the
package's own checks. Chat templates come from llama.cpp's source package. An answer that does not pass and is not KNOWN is a failure, and so is
a known one that passes.

    recorded_calls.py TEMPLATES [--list] [--id ID] [--text]

The package has token ids, and no vocabularies. So the text is cut at the marks of the family, and between them into as many pieces as there are
ids: a reader of calls that is right for every cut is right for those of any vocabulary.
"""
import argparse
import collections
import json
import pathlib
import subprocess
import sys
import tempfile

from canitoolcall import checks, chunking, fixtures, results

# Of each model its template, or, where the source package has none that is like it, the form of its calls.
SOURCES = {
    "Qwen/Qwen3-0.6B": "Qwen-Qwen3-0.6B",
    "Qwen/Qwen3-4B-Instruct-2507": "Qwen-Qwen3-0.6B",
    "Qwen/Qwen3-4B-Thinking-2507": "Qwen-Qwen3-0.6B",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": "Qwen3-Coder",
    "Qwen/Qwen3-Coder-Next": "Qwen3-Coder",
    "Qwen/Qwen3.5-9B": "Qwen3.5-4B",
    "Qwen/Qwen3.8-27B": "Qwen3.5-4B",
    "openai/gpt-oss-20b": "openai-gpt-oss-120b",
    "deepseek-ai/DeepSeek-V3-0324": "deepseek",
    "deepseek-ai/DeepSeek-V3.1": "deepseek-ai-DeepSeek-V3.1",
    "deepseek-ai/DeepSeek-V3.2": "deepseek-ai-DeepSeek-V3.2",
    "deepseek-ai/DeepSeek-V4-Flash": "deepseek-ai-DeepSeek-V4",
    "deepseek-ai/DeepSeek-V4.1-Flash": "DeepSeek-V4.1",
    "moonshotai/Kimi-K2-Instruct-0905": "Kimi-K2-Instruct",
    "moonshotai/Kimi-K2.6": "Kimi-K2-Thinking",
    "moonshotai/Kimi-K3": "Kimi-K3",
    "zai-org/GLM-4.5": "GLM-4.6",
    "zai-org/GLM-4.7": "GLM-4.7-Flash",
    "zai-org/GLM-5.3": "GLM-4.7-Flash",
    "meta-llama/Llama-3.3-70B-Instruct": "meta-llama-Llama-3.3-70B-Instruct",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "pythonic",
    "google/gemma-4-31B-it": "google-gemma-4-31B-it",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistralai-Mistral-Nemo-Instruct-2407",
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": "Mistral-Small-3.2-24B-Instruct-2506",
    "mistralai/Devstral-Small-2507": "unsloth-mistral-Devstral-Small-2507",
    "mistralai/Magistral-Small-2506": "unsloth-mistral-Devstral-Small-2507",
    "mistralai/Magistral-Small-2509": "mistralai-Ministral-3-14B-Reasoning-2512",
    "mistralai/Ministral-3-14B-Instruct-2512": "mistralai-Ministral-3-14B-Reasoning-2512",
    "mistralai/Ministral-3-14B-Reasoning-2512": "mistralai-Ministral-3-14B-Reasoning-2512",
}
# The form of calls that a template does not write, and a template with the model's marks of reasoning.
FORMS = {"deepseek": "deepseek-ai-DeepSeek-V3.1.jinja", "pythonic": "meta-llama-Llama-3.3-70B-Instruct.jinja"}

# Templates that are made from those of the source package, by replacing: K2's there use append(), which jinja2 refuses in a template; V4.1's
# is not there, and writes the marks of V4 with other names.
APPEND = ("_ = tool_response_queue.ids.append(formatted_id)",
          "tool_response_queue.ids = tool_response_queue.ids + [formatted_id]")
MADE = {
    "Kimi-K2-Instruct": ("Kimi-K2-Instruct", [APPEND]),
    "Kimi-K2-Thinking": ("Kimi-K2-Thinking", [APPEND]),
    "DeepSeek-V4.1": ("deepseek-ai-DeepSeek-V4", [("'｜DSML｜'", "'｜DSML｜ '"), ("'tool_calls>", "'calls>")]),
}


# Those that do not pass, with the status: docs/tools.md says why.
KNOWN = {
    "deepseek/sglang-v4-self-closing-invoke": "fail",
    "gemma4/vllm-text-before-call": "soft_pass",
    "gpt-oss/llamacpp-builtin-python-recipient": "fail",
    "gpt-oss/harmony-marker-in-reasoning": "fail",
    "kimi/k2i-vllm-id-without-functions-prefix": "fail",
    "kimi/k2i-vllm-noise-between-markers": "fail",
    "kimi/k3-bug-truncated-reasoning-recorded": "soft_pass",
    "kimi/k3-bug-response-only-completion": "fail",
    "kimi/k3-xtml-attr-escaping": "fail",
    "llama/l3-sglang-text-before-python-tag": "soft_pass",
    "llama/l4-vllm-pythonic-python-start-end": "fail",
    "mistral/vllm-v11-think-text": "fail",
    "qwen3-xml/llamacpp-q35-call-inside-think": "fail",
}


def pieces_of(text, markers, n):
    """`text` in `n` pieces or a few more, of which each mark is one; and the numbers of the marks."""
    parts, at = [], 0
    while at < len(text):
        mark = next((m for m in markers if text.startswith(m, at)), None)
        if mark:
            parts.append((mark, True))
        elif parts and not parts[-1][1]:
            parts[-1] = (parts[-1][0] + text[at], False)
        else:
            parts.append((text[at], False))
        at += len(mark or text[at])
    n_marks = sum(mark for _, mark in parts)
    size = max(1, (len(text) - sum(len(t) for t, mark in parts if mark)) // max(1, n - n_marks))
    pieces, special = [], set()
    for part, mark in parts:
        if mark:
            special.add(len(pieces))
        pieces += [part] if mark else [part[i:i + size] for i in range(0, len(part), size)]
    return pieces, special


def result_of(read):
    calls = [results.ParsedToolCall(c["name"], c["arguments"]) for c in read.get("tool_calls", [])]
    return results.ParseResult(read.get("content"), read.get("reasoning_content"), tuple(calls))


def added_up(deltas):
    """As a client of OpenAI's adds them up."""
    whole = {"tool_calls": []}
    for delta in deltas:
        for key in "content", "reasoning_content":
            if key in delta:
                whole[key] = whole.get(key, "") + delta[key]
        for call in delta.get("tool_calls", []):
            if "name" in call:
                assert call["index"] == len(whole["tool_calls"])
                whole["tool_calls"].append({"name": call["name"], "arguments": ""})
            whole["tool_calls"][call["index"]]["arguments"] += call["arguments"]
    return whole


def observe(case, family, template):
    """What ./inspect reads: as a whole, and of each way to cut."""
    reference = family.reference_for(case.reference_model)
    prompt = case.generation_prompt if case.generation_prompt is not None else reference.default_generation_prompt
    pieces, special = pieces_of(case.raw_output, sorted(family.markers, key=len, reverse=True),
                                len(case.output_token_ids or ()))
    units = list(range(len(pieces)))
    cuts = {s.id: [[pieces[i] for i in group] for group in chunking.split(units, s, special)]
            for s in chunking.DEFAULT_STRATEGIES}
    cuts["rand:0:1"] = [[c] for c in case.raw_output]  # stricter than any vocabulary
    lines = [json.dumps({"tools": list(case.tools), "tokens": cut, "prompt": prompt}) for cut in cuts.values()]
    run = subprocess.run(["./inspect", "tool-calls", *template], input="\n".join(lines), text=True, capture_output=True)
    assert run.returncode == 0, (case.id, run.returncode, run.stderr)
    read = [json.loads(line) for line in run.stdout.splitlines()]
    assert all(r["whole"] == read[0]["whole"] for r in read), case.id
    return checks.Observation(nonstream=result_of(read[0]["whole"]),
                              streams={name: result_of(added_up(r["deltas"])) for name, r in zip(cuts, read)})


def template_of(model, templates, made):
    """The flags of ./inspect for the template of a model. `made`: a folder for those that are made."""
    source = SOURCES[model]
    if source in FORMS:
        return ["--file", str(templates / FORMS[source]), "--tool-format", source]
    if source not in MADE:
        return ["--file", str(templates / f"{source}.jinja")]
    origin, edits = MADE[source]
    text = (templates / f"{origin}.jinja").read_text()
    for old, new in edits:
        text = text.replace(old, new)
    (made / f"{source}.jinja").write_text(text)
    return ["--file", str(made / f"{source}.jinja")]


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("templates", type=pathlib.Path)
    flags.add_argument("--list", action="store_true", help="print what is wrong with each that does not pass")
    flags.add_argument("--id", help="only those whose id has this in it")
    flags.add_argument("--text", action="store_true", help="print the texts, too")
    with tempfile.TemporaryDirectory() as made:
        return replay(flags.parse_args(), pathlib.Path(made))


def replay(flags, made):
    families = fixtures.load_families()
    status, unexpected = collections.defaultdict(collections.Counter), []
    for case in fixtures.load_fixtures():
        if flags.id and flags.id not in case.id:
            continue
        chosen = template_of(case.reference_model, flags.templates, made)
        rows = checks.run_checks(case, families[case.family], observe(case, families[case.family], chosen))
        state = checks.case_status(rows)
        status[case.family][state.value] += 1
        if flags.list and state.value != "pass":
            wrong = [r for r in rows if r.status.value != "pass"]
            print(state.value, case.id, "|", wrong[0].check, wrong[0].strategy, wrong[0].detail)
            if flags.text:
                print("    ", repr(case.raw_output), "\n    ", case.expected or case.expected_error)
        if state.value != KNOWN.get(case.id, "pass"):
            unexpected.append(f"{case.id}: {state.value}")
    total = collections.Counter()
    for name, counts in sorted(status.items()):
        total += counts
        print(f"{name:14}", *(f"{k}={counts[k]}" for k in ("pass", "soft_pass", "fail", "error")))
    print(f"{'total':14}", *(f"{k}={total[k]}" for k in ("pass", "soft_pass", "fail", "error")))
    return unexpected


if __name__ == "__main__":
    if unexpected := main():
        sys.exit("\n".join(["not as known:", *unexpected]))
