"""The live probe of canitoolcall against ./server: the toy model, whose answers have to be calls, and SmolLM2 of 135 million parameters, which may
call or not. What such models say is not judged; that an answer is a call by the rules, whole as streamed, is.

    probe_calls.py [FILE OF SMOLLM2]
"""
import dataclasses
import sys

from canitoolcall.probe import BUILTIN_SCENARIOS, EQUIVALENCE_CHECK, probe

from quire_server import Server

# Of these the text of arguments is judged, or the number of calls: both are the model's.
OF_THE_MODEL = {"unicode-args", "parallel-calls"}


def bounded(schema):
    """The schema of short values: small models end no text by themselves."""
    schema = {key: [bounded(v) for v in value] if isinstance(value, list) else bounded(value)
              for key, value in schema.items()} if isinstance(schema, dict) else schema
    if isinstance(schema, dict):
        bounds = {"string": {"maxLength": 16}, "array": {"maxItems": 2}, "object": {"additionalProperties": False}}
        schema |= bounds.get(schema.get("type") if isinstance(schema.get("type"), str) else None, {})
    return schema


def with_bounds(scenario, **changes):
    tools = [{**t, "function": {**t["function"], "parameters": bounded(t["function"]["parameters"])}} for t in scenario.tools]
    return dataclasses.replace(scenario, tools=tuple(tools), extra_body={**scenario.extra_body, "max_tokens": 200}, **changes)


def run(name, scenarios, always, *flags, **server):
    """`always`: the scenarios that have to pass."""
    with Server(*flags, **server) as server:
        report = probe(server.url + "/v1", name, scenarios=scenarios, timeout_s=300)
    print(report.render_text())
    for outcome in report.outcomes:
        assert outcome.status != "error", outcome
        if outcome.check == EQUIVALENCE_CHECK or outcome.scenario_id in always:
            assert outcome.status in ("pass", "skip"), outcome
        assert "marker" not in (outcome.detail or ""), outcome


calling = [with_bounds(s, tool_choice="required") for s in BUILTIN_SCENARIOS if s.expect.tool_names and s.tool_choice == "auto"]
run("toy", calling, {s.id for s in calling} - OF_THE_MODEL)
for path in sys.argv[1:]:
    run("smollm2", [with_bounds(s) for s in BUILTIN_SCENARIOS], {"forced-tool-choice"}, model=path)
