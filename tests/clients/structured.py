"""The openai package and pydantic-ai, unmodified, against ./server: answers that follow a schema, and calls of tools. The model
understands none of it: what comes back is right because nothing else can come back."""

import json
import unittest
from typing import Literal

import openai
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from quire_server import Server

MODEL = "quire-14m-q8_0"
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]


class Weather(BaseModel):
    """The weather of a city for some days."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=7)
    units: list[Literal["C", "F"]] = Field(max_length=2)


TOOL = openai.pydantic_function_tool(Weather)
LOOSE = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {
    "zone": {"type": "string", "enum": ["UTC", "CET"]}}, "required": ["zone"], "additionalProperties": False}}}


def setUpModule():
    global server, client
    server = Server("--tool-format", "hermes")
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def tearDownModule():
    client.close()
    server.__exit__(None)


def chat(**fields):
    return client.chat.completions.create(model=MODEL, **({"messages": QUESTION, "max_tokens": 300} | fields))


class OpenAI(unittest.TestCase):
    def test_parse(self):
        for seed in range(4):
            answer = client.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=Weather, seed=seed)
            self.assertIsInstance(answer.choices[0].message.parsed, Weather)

    def test_forced_calls(self):
        for seed in range(4):
            for choice in "required", {"type": "function", "function": {"name": "Weather"}}:
                answer = client.chat.completions.parse(model=MODEL, messages=QUESTION, tools=[TOOL], tool_choice=choice,
                                                       seed=seed).choices[0]
                self.assertEqual(answer.finish_reason, "tool_calls")
                self.assertIsNone(answer.message.content)
                for call in answer.message.tool_calls:
                    self.assertIsInstance(call.function.parsed_arguments, Weather)

    def test_one_call(self):
        for seed in range(4):
            message = chat(tools=[TOOL, LOOSE], tool_choice="required", parallel_tool_calls=False, seed=seed).choices[0].message
            self.assertEqual(len(message.tool_calls), 1)
            message = chat(tools=[TOOL, LOOSE], tool_choice={"type": "function", "function": {"name": "now"}},
                           seed=seed).choices[0].message
            self.assertEqual([c.function.name for c in message.tool_calls], ["now"])

    def test_stream(self):
        for seed in range(3):
            fields = dict(model=MODEL, messages=QUESTION, tools=[TOOL, openai.pydantic_function_tool(Weather, name="again")],
                          tool_choice="required", seed=seed)
            whole = client.chat.completions.parse(**fields).choices[0].message
            with client.chat.completions.stream(**fields) as stream:
                kinds = {event.type for event in stream}
                message = stream.get_final_completion().choices[0].message
            self.assertIn("tool_calls.function.arguments.done", kinds)
            self.assertEqual([(c.function.name, json.loads(c.function.arguments)) for c in whole.tool_calls],
                             [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls])

    def test_free_text_and_results(self):
        self.assertTrue(chat(tools=[LOOSE], temperature=0).choices[0].message.content)
        call = chat(tools=[LOOSE], tool_choice="required", parallel_tool_calls=False).choices[0].message
        answer = chat(messages=[*QUESTION, call.to_dict(), {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "12:00"}],
                      tools=[LOOSE], max_tokens=8)
        self.assertEqual(answer.usage.completion_tokens <= 8, True)

    def test_refusals(self):
        unsupported = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
        for fields, word in (({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": unsupported}}]}, "uniqueItems"),
                             ({"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": unsupported}}}, "uniqueItems"),
                             ({"tools": [LOOSE], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "'g'")):
            with self.assertRaises(openai.BadRequestError) as e:
                chat(**fields)
            self.assertIn(word, e.exception.message)


class PydanticAI(unittest.TestCase):
    def model(self):
        return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=server.url + "/v1", api_key="none"))

    def test_outputs(self):
        for output in Weather, NativeOutput(Weather):
            agent = Agent(self.model(), output_type=output, model_settings={"max_tokens": 300})
            self.assertIsInstance(agent.run_sync("Paris?").output, Weather)

    def test_tool(self):
        agent, called = Agent(self.model(), output_type=Weather, model_settings={"max_tokens": 300, "seed": 1}), []

        @agent.tool_plain
        def now(zone: Literal["UTC", "CET"]) -> str:
            """The time."""
            called.append(zone)
            return "12:00"

        self.assertIsInstance(agent.run_sync("What time is it?").output, Weather)


if __name__ == "__main__":
    unittest.main()
