"""The packages openai (responses) and anthropic, unmodified, against ./server: whole answers, streams that add up to them, schemas,
calls of tools and their results, counting, errors."""

import asyncio
import unittest
from typing import Literal

import anthropic
import langchain_openai
import openai
from langchain_core.exceptions import ContextOverflowError
from pydantic import BaseModel, ConfigDict

from quire_server import Server

MODEL = "quire-14m-q8_0"
CITIES = ["Paris", "Rome"]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "enum": CITIES}}, "required": ["city"],
              "additionalProperties": False}


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    rain: bool


def setUpModule():
    global server, responses, messages
    server = Server("--tool-format", "hermes", key="secret")
    responses = openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0)
    messages = anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0)


def tearDownModule():
    responses.close()
    messages.close()
    server.__exit__(None)


class LangChain(unittest.TestCase):
    """With version 3 of openai, whose errors are their messages alone."""

    def test_overflow(self):
        chat = langchain_openai.ChatOpenAI(base_url=server.url + "/v1", api_key="secret", model=MODEL, max_retries=0)
        for call in chat.invoke, lambda text: list(chat.stream(text)):
            with self.assertRaises(ContextOverflowError):
                call("word " * 2000)


class Responses(unittest.TestCase):
    FIELDS = {"model": MODEL, "input": "Tell me about Paris.", "max_output_tokens": 40, "temperature": 0}

    def same(self, one, other):
        """But for what every response has of its own."""
        drop = {"id": True, "created_at": True, "completed_at": True, "usage": True, "output": {"__all__": {"id", "call_id"}}}
        one, other = (r.model_dump(exclude=drop) for r in (one, other))
        self.assertEqual(one, other)

    def test_create_and_stream(self):
        whole = responses.responses.create(**self.FIELDS)
        self.assertTrue(whole.output_text)
        self.assertIn(whole.status, ("completed", "incomplete"))
        events = list(responses.responses.create(**self.FIELDS, stream=True))
        self.assertEqual([e.sequence_number for e in events], list(range(len(events))))
        self.assertEqual([e.type for e in events[:4]], ["response.created", "response.in_progress",
                                                        "response.output_item.added", "response.content_part.added"])
        self.assertEqual("".join(e.delta for e in events if e.type == "response.output_text.delta"), whole.output_text)
        self.same(events[-1].response, whole)
        self.assertEqual(events[-1].response.usage.output_tokens, whole.usage.output_tokens)

    def test_stream_helper(self):
        """The helper of the package wants a response that is complete."""
        fields = {"model": MODEL, "input": "Weather?", "text_format": Weather, "temperature": 0}
        with responses.responses.stream(**fields) as stream:
            for _ in stream:
                pass
            final = stream.get_final_response()
        self.same(final, responses.responses.parse(**fields))

    def test_parse(self):
        for seed in range(3):
            answer = responses.responses.parse(model=MODEL, input="Weather?", text_format=Weather,
                                               extra_body={"seed": seed})
            self.assertIsInstance(answer.output_parsed, Weather)

    def test_tools(self):
        tools = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]
        ask = [{"role": "user", "content": "The weather in Paris?"}]
        fields = {"model": MODEL, "input": ask, "tools": tools, "tool_choice": "required",
                  "parallel_tool_calls": False, "temperature": 0, "max_output_tokens": 300}
        first = responses.responses.create(**fields)
        [call] = [item for item in first.output if item.type == "function_call"]
        self.assertEqual(call.name, "weather")
        with responses.responses.stream(**fields) as stream:
            for event in stream:
                if event.type == "response.function_call_arguments.done":
                    self.assertEqual(event.arguments, call.arguments)
            final = stream.get_final_response()
        self.assertEqual([item.arguments for item in final.output if item.type == "function_call"], [call.arguments])
        again = ask + [item.model_dump(exclude_none=True) for item in first.output] + [
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
        second = responses.responses.create(model=MODEL, input=again, tools=tools, tool_choice="none",
                                            max_output_tokens=8)
        self.assertTrue(second.output)

    def test_errors(self):
        for fields, param in (({"previous_response_id": "resp_1"}, "previous_response_id"),
                              ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
                              ({"tools": [{"type": 1}]}, "tools[0].type"),
                              ({"max_output_tokens": 0}, "max_output_tokens")):
            with self.assertRaises(openai.BadRequestError) as caught:
                responses.responses.create(**self.FIELDS | fields)
            self.assertEqual(caught.exception.param, param)

    def test_tools_that_nothing_calls_are_left_out(self):
        answer = responses.responses.create(**self.FIELDS | {"tools": [{"type": "web_search"}]})
        self.assertTrue(answer.output)
        self.assertIn("web_search", str(answer.model_extra["warnings"]))


class Messages(unittest.TestCase):
    FIELDS = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me about Paris."}], "max_tokens": 40,
              "extra_body": {"temperature": 0}}

    def same(self, one, other):
        self.assertEqual(one.model_dump(exclude={"id": True, "usage": True, "content": {"__all__": {"id"}}}),
                         other.model_dump(exclude={"id": True, "usage": True, "content": {"__all__": {"id"}}}))
        self.assertEqual(one.usage.output_tokens, other.usage.output_tokens)

    def stream(self, **fields):
        with messages.messages.stream(**fields) as stream:
            text = "".join(stream.text_stream)
            return text, stream.get_final_message()

    def test_create_and_stream(self):
        whole = messages.messages.create(**self.FIELDS)
        self.assertEqual(whole.content[0].type, "text")
        self.assertEqual(whole.role, "assistant")
        text, final = self.stream(**self.FIELDS)
        self.assertEqual(text, whole.content[0].text)
        self.same(final, whole)
        types = [event.type for event in messages.messages.create(**self.FIELDS, stream=True)]
        self.assertEqual(types[:2] + types[-3:], ["message_start", "content_block_start", "content_block_stop",
                                                  "message_delta", "message_stop"])

    def test_asynchronous(self):
        async def run():
            async with anthropic.AsyncAnthropic(base_url=server.url, api_key="secret", max_retries=0) as client:
                async with client.messages.stream(**self.FIELDS) as stream:
                    return await stream.get_final_message()
        self.same(asyncio.run(run()), messages.messages.create(**self.FIELDS))

    def test_stops(self):
        text = messages.messages.create(**self.FIELDS).content[0].text
        word = text[len(text) // 2:][:4]
        stopped = messages.messages.create(**self.FIELDS, stop_sequences=[word])
        self.assertEqual((stopped.stop_reason, stopped.stop_sequence), ("stop_sequence", word))
        short = messages.messages.create(**self.FIELDS | {"max_tokens": 1})
        self.assertEqual(short.stop_reason, "max_tokens")

    def test_tools(self):
        tools = [{"name": "weather", "description": "The weather of a city.", "input_schema": PARAMETERS}]
        for choice in {"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}:
            fields = self.FIELDS | {"max_tokens": 300, "tools": tools, "tool_choice": choice}
            first = messages.messages.create(**fields)
            self.assertEqual(first.stop_reason, "tool_use")
            [use] = [block for block in first.content if block.type == "tool_use"]
            self.assertIn(use.input["city"], CITIES)
            self.same(self.stream(**fields)[1], first)
            history = fields["messages"] + [
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}]}]
            second = messages.messages.create(**fields | {"messages": history, "max_tokens": 4,
                                                          "tool_choice": {"type": "none"}})
            self.assertEqual(second.content[0].type, "text")

    def test_count_tokens(self):
        count = messages.messages.count_tokens(model=MODEL, messages=self.FIELDS["messages"], system="Be kind.")
        used = messages.messages.create(**self.FIELDS, system="Be kind.").usage
        self.assertEqual(count.input_tokens, used.input_tokens + used.cache_read_input_tokens)

    def test_errors(self):
        image = {"type": "image", "source": {"type": "url", "url": "http://localhost/x.png"}}
        for fields, part in (({"messages": [{"role": "user", "content": [image]}]}, "messages.0.content.0"),
                             ({"messages": []}, "messages"), ({"max_tokens": -1}, "max_tokens"),
                             ({"messages": [{"role": "user", "content": "word " * 5000}]}, "maximum context length")):
            with self.assertRaises(anthropic.BadRequestError) as caught:
                messages.messages.create(**self.FIELDS | fields)
            self.assertEqual(caught.exception.body["error"]["type"], "invalid_request_error")
            self.assertIn(part, caught.exception.body["error"]["message"])
        self.assertEqual(messages.messages.create(**self.FIELDS | {"model": "other"}).model, "other")
        with anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as stranger:
            with self.assertRaises(anthropic.AuthenticationError):
                stranger.messages.create(**self.FIELDS)


if __name__ == "__main__":
    unittest.main()
