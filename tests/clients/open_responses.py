#!/usr/bin/env python3
"""/v1/responses as Open Responses has it (https://www.openresponses.org/specification): the requests of its compliance suite, and the members
that its schemas of 2026-04-24 require of a response, its items and the events of its stream. Needs only Python's standard library.

Whether a model calls a tool is the model's choice, and the toy model makes none. So the tool is required here; the suite leaves it open.
"""
import json
import time
import urllib.request

from quire_server import Server

# name: what its value may be; a tuple: one of several.
NULL = type(None)
NUMBER = (int, float)
RESPONSE = {
    "id": str, "object": "response", "created_at": int, "completed_at": (int, NULL), "status": str, "incomplete_details": (dict, NULL),
    "model": str, "previous_response_id": (str, NULL), "instructions": (str, NULL), "output": list, "error": (dict, NULL),
    "tools": list, "tool_choice": (str, dict), "truncation": str, "parallel_tool_calls": bool, "text": dict, "top_p": NUMBER,
    "presence_penalty": NUMBER, "frequency_penalty": NUMBER, "top_logprobs": int, "temperature": NUMBER, "reasoning": (dict, NULL),
    "usage": (dict, NULL), "max_output_tokens": (int, NULL), "max_tool_calls": (int, NULL), "store": bool, "background": bool,
    "service_tier": str, "metadata": dict, "safety_identifier": (str, NULL), "prompt_cache_key": (str, NULL)}
USAGE = {"input_tokens": int, "output_tokens": int, "total_tokens": int, "input_tokens_details": {"cached_tokens": int},
         "output_tokens_details": {"reasoning_tokens": int}}
TOOL = {"type": "function", "name": str, "description": (str, NULL), "parameters": (dict, NULL), "strict": (bool, NULL)}
ITEMS = {
    "message": {"id": str, "status": str, "role": "assistant", "content": list},
    "function_call": {"id": str, "call_id": str, "name": str, "arguments": str, "status": str},
    "reasoning": {"id": str, "summary": list}}
PARTS = {
    "output_text": {"text": str, "annotations": list},
    "reasoning_text": {"text": str}}
PLACE = {"item_id": str, "output_index": int}
EVENTS = {
    "response.created": {"response": dict}, "response.in_progress": {"response": dict},
    "response.completed": {"response": dict}, "response.incomplete": {"response": dict},
    "response.output_item.added": {"output_index": int, "item": dict}, "response.output_item.done": {"output_index": int, "item": dict},
    "response.content_part.added": PLACE | {"content_index": int, "part": dict},
    "response.content_part.done": PLACE | {"content_index": int, "part": dict},
    "response.output_text.delta": PLACE | {"content_index": int, "delta": str, "logprobs": list},
    "response.output_text.done": PLACE | {"content_index": int, "text": str, "logprobs": list},
    "response.function_call_arguments.delta": PLACE | {"delta": str},
    "response.function_call_arguments.done": PLACE | {"arguments": str}}
IMAGE = ("data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")
WEATHER = {"type": "function", "name": "get_weather", "description": "Get the current weather for a location",
           "parameters": {"type": "object", "properties": {"location": {"type": "string", "maxLength": 20}}, "required": ["location"]}}


def fit(value, members, where):
    for name, wanted in members.items():
        assert name in value, f"{where} has no {name}"
        at, got = f"{where}.{name}", value[name]
        if isinstance(wanted, dict):
            fit(got, wanted, at)
        elif isinstance(wanted, str):
            assert got == wanted, f"{at} is {got!r}"
        else:
            assert isinstance(got, wanted) and (not isinstance(got, bool) or wanted in (bool, (bool, NULL))), f"{at} is {got!r}"


def fit_item(item, where):
    fit(item, ITEMS[item["type"]], where)
    assert item.get("status", "completed") in ("in_progress", "completed", "incomplete"), item
    for i, part in enumerate(item.get("content") or []):
        fit(part, PARTS[part["type"]], f"{where}.content[{i}]")


def fit_response(response, status=None):
    fit(response, RESPONSE, "response")
    if status:
        assert response["status"] == status, response["status"]
        fit(response["usage"], USAGE, "usage")
        usage = response["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert response["output"], "no output"
        assert (response["completed_at"] is not None) == (status == "completed")
        assert (response["incomplete_details"] is not None) == (status == "incomplete")
    if response["completed_at"] is not None:
        assert response["created_at"] <= response["completed_at"] <= time.time() + 1
    fit(response["text"], {"format": {"type": str}}, "text")
    fit(response["reasoning"], {"effort": (str, NULL), "summary": (str, NULL)}, "reasoning")
    for i, tool in enumerate(response["tools"]):
        fit(tool, TOOL, f"tools[{i}]")
    for i, item in enumerate(response["output"]):
        fit_item(item, f"output[{i}]")


def ask(server, status="completed", **body):
    code, response = server.post("/v1/responses", {"model": "any", **body})
    assert code == 200, response
    fit_response(response, status)
    return response


def stream(server, **body):
    """The events, each checked, and in the order that the state machines of a response and its items ask for."""
    request = urllib.request.Request(server.url + "/v1/responses", json.dumps({"model": "any", "stream": True, **body}).encode(),
                                     server.headers)
    events = []
    with urllib.request.urlopen(request, timeout=120) as answer:
        for block in answer.read().decode().split("\n\n"):
            lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
            if lines and lines["data"] != "[DONE]":
                events.append(json.loads(lines["data"]))
                assert lines["event"] == events[-1]["type"]
    open_item = open_part = None
    for i, event in enumerate(events):
        kind = event["type"]
        assert event["sequence_number"] == i
        fit(event, EVENTS[kind], kind)
        if kind.startswith("response.output_item"):
            fit_item(event["item"], kind)
        if "response" in event:
            fit_response(event["response"])
            assert (event["response"]["status"] == "in_progress") == (i < len(events) - 1)
        if kind == "response.output_item.added":
            assert open_item is None and event["item"]["status"] == "in_progress"
            open_item = event["item"]
        elif kind == "response.output_item.done":
            assert open_item["id"] == event["item"]["id"] and open_part is None and event["item"]["status"] != "in_progress"
            open_item = None
        elif "item_id" in event:
            assert event["item_id"] == open_item["id"]
            if kind == "response.content_part.added":
                assert open_part is None
                open_part = ""
            elif kind == "response.content_part.done":
                assert event["part"]["text"] == open_part
                open_part = None
            elif kind == "response.output_text.delta":
                open_part += event["delta"]
            elif kind == "response.output_text.done":
                assert event["text"] == open_part
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"], kinds
    assert kinds[-1] in ("response.completed", "response.incomplete") and open_item is None
    fit_response(events[-1]["response"], kinds[-1].removeprefix("response."))
    return events


def message(role, content):
    return {"type": "message", "role": role, "content": content}


def texts(server):
    ask(server, input=[message("user", "Say hello in exactly 3 words.")])
    ask(server, input=[message("system", "You are a pirate. Always respond in pirate speak."), message("user", "Say hello.")])
    ask(server, input=[message("user", "My name is Alice."), message("assistant", "Hello Alice! Nice to meet you."),
                       message("user", "What is my name?")])
    cut = ask(server, status="incomplete", input="Tell me a story.", max_output_tokens=1)
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"} and cut["max_output_tokens"] == 1
    whole = ask(server, input="Hi", metadata={"a": "b"}, safety_identifier="me", prompt_cache_key="key", presence_penalty=0.5,
                temperature=0, top_p=0.5, store=False, parallel_tool_calls=False, truncation="auto")
    for name, value in {"metadata": {"a": "b"}, "safety_identifier": "me", "prompt_cache_key": "key", "presence_penalty": 0.5,
                        "temperature": 0, "top_p": 0.5, "store": False, "parallel_tool_calls": False, "truncation": "auto"}.items():
        assert whole[name] == value, f"{name}: {whole[name]}"


def streams(server):
    body = {"input": [message("user", "Count from 1 to 5.")], "temperature": 0}
    events = stream(server, **body)
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    last = events[-1]["response"]
    assert last["output"][0]["content"][0]["text"] == text
    assert ask(server, **body)["output"][0]["content"][0]["text"] == text
    assert stream(server, input="Tell me a story.", max_output_tokens=1)[-1]["type"] == "response.incomplete"


def tools(server):
    question = message("user", "What's the weather like in San Francisco?")
    body = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0, "max_output_tokens": 200}
    call = ask(server, input=[question], **body)["output"][0]
    assert call["type"] == "function_call" and isinstance(json.loads(call["arguments"])["location"], str)
    events = stream(server, input=[question], **body)
    added = [event for event in events if event["type"] == "response.output_item.added" and event["item"]["type"] == "function_call"]
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    pieces = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert added and done and "".join(pieces) == done[0]["arguments"] == call["arguments"]
    ask(server, input=[question, {name: call[name] for name in ("type", "call_id", "name", "arguments")},
                       {"type": "function_call_output", "call_id": call["call_id"], "output": "18 degrees"}], tools=[WEATHER])
    shape = {"type": "json_schema", "name": "n", "schema": {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}},
                                                            "required": ["n"], "additionalProperties": False}}
    made = ask(server, input="A number.", text={"format": shape}, temperature=0)
    assert made["text"]["format"]["description"] is None and "n" in json.loads(made["output"][0]["content"][0]["text"])


def turns(server):
    first = ask(server, input="My name is Alice.")
    second = ask(server, input="What is my name?", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"] + first["usage"]["output_tokens"]


def refusals(server):
    for body, word in (
            ({"input": [message("user", [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": IMAGE}])]},
             "input_image"),
            ({"input": "Hi", "previous_response_id": "resp_none"}, "resp_none"),
            ({"input": [{"type": "function_call_output", "call_id": "none", "output": "1"}]}, "none"),
            ({"input": "Hi", "background": True}, "background")):
        code, answer = server.post("/v1/responses", {"model": "any", **body})
        assert code == 400 and word in answer["error"]["message"], answer
        assert "\n" not in answer["error"]["message"]


def main():
    with Server() as server:
        for part in (texts, streams, tools, turns, refusals):
            part(server)
        server.wait_until_idle()
    print("open_responses: texts, streams, tools, turns and refusals are as the specification has them")


if __name__ == "__main__":
    main()
