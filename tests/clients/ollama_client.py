"""The package ollama, unmodified, against ./server: chats and texts, whole and streamed, tools, formats, thinking, vectors, errors."""

import json
import unittest

import ollama
from pydantic import BaseModel

from quire_server import Server

MODEL = "quire-14m-q8_0"
OPTIONS = {"temperature": 0, "num_predict": 20, "num_ctx": 2048}


class Weather(BaseModel):
    rain: bool


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"It rains in {city}."


def setUpModule():
    global server, client
    server = Server()
    client = ollama.Client(host=server.url)


def tearDownModule():
    server.__exit__(None)


class Ollama(unittest.TestCase):
    ASK = [{"role": "user", "content": "Tell me about Paris."}]

    def test_chat(self):
        whole = client.chat(MODEL, self.ASK, options=OPTIONS)
        self.assertTrue(whole.message.content)
        self.assertTrue(whole.done)
        self.assertIn(whole.done_reason, ("stop", "length"))
        self.assertGreater(whole.eval_count, 0)
        self.assertGreater(whole.total_duration, whole.eval_duration)
        pieces = list(client.chat(MODEL, self.ASK, options=OPTIONS, stream=True))
        self.assertEqual("".join(p.message.content for p in pieces), whole.message.content)
        self.assertEqual([p.done for p in pieces], [False] * (len(pieces) - 1) + [True])
        self.assertEqual(pieces[-1].eval_count, whole.eval_count)

    def test_generate(self):
        whole = client.generate(MODEL, "Tell me about Paris.", options=OPTIONS, system="Be kind.")
        pieces = list(client.generate(MODEL, "Tell me about Paris.", options=OPTIONS, system="Be kind.", stream=True))
        self.assertEqual("".join(p.response for p in pieces), whole.response)
        self.assertTrue(client.generate(MODEL, "Paris", raw=True, options=OPTIONS).response)
        self.assertEqual(client.generate(MODEL).done_reason, "load")

    def test_logprobs(self):
        answer = client.chat(MODEL, self.ASK, options=OPTIONS, logprobs=True, top_logprobs=2)
        self.assertEqual(len(answer.logprobs), answer.eval_count)
        self.assertEqual(len(answer.logprobs[0].top_logprobs), 2)

    def test_format(self):
        answer = client.chat(MODEL, self.ASK, format=Weather.model_json_schema(), options={"seed": 1})
        Weather.model_validate_json(answer.message.content)
        answer = client.generate(MODEL, "Weather?", format="json", options={"seed": 1, "num_predict": 400})
        if answer.done_reason == "stop":
            self.assertIsInstance(json.loads(answer.response), dict)

    def test_tools(self):
        ask = [{"role": "user", "content": "The weather in Paris?"}]
        for stream in False, True:
            answer = client.chat(MODEL, ask, tools=[weather], options=OPTIONS, stream=stream)
            calls = [c for a in (answer if stream else [answer]) for c in a.message.tool_calls or ()]
            for call in calls:
                self.assertEqual(call.function.name, "weather")
        call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
        ask += [{"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_name": "weather", "content": weather("Paris")}]
        self.assertTrue(client.chat(MODEL, ask, tools=[weather], options=OPTIONS).message.content)

    def test_think(self):
        for think in True, False, "low":
            self.assertTrue(client.chat(MODEL, self.ASK, think=think, options=OPTIONS).message.content)

    def test_vectors(self):
        answer = client.embed(MODEL, ["a", "b"])
        self.assertEqual(len(answer.embeddings), 2)
        self.assertEqual(list(client.embeddings(MODEL, "a").embedding), list(answer.embeddings[0]))

    def test_models(self):
        model = client.list().models[0]
        self.assertEqual(model.model, MODEL + ":latest")
        self.assertGreater(model.size, 10_000_000)
        self.assertEqual(client.ps().models[0].model, model.model)
        shown = client.show(model.model)
        self.assertIn("completion", shown.capabilities)
        self.assertEqual(shown.modelinfo["general.architecture"], "llama")

    def test_errors(self):
        for call in (lambda: client.chat(MODEL, [{"role": "robot", "content": "a"}]),
                     lambda: list(client.chat(MODEL, [{"role": "robot", "content": "a"}], stream=True)),
                     lambda: client.generate(MODEL, "a", suffix="b")):
            with self.assertRaises(ollama.ResponseError) as caught:
                call()
            self.assertEqual(caught.exception.status_code, 400)
            self.assertTrue(caught.exception.error)

    def test_async(self):
        import asyncio

        async def run():
            pieces = await ollama.AsyncClient(host=server.url).chat(MODEL, self.ASK, options=OPTIONS, stream=True)
            return "".join([p.message.content async for p in pieces])

        self.assertTrue(asyncio.run(run()))


if __name__ == "__main__":
    unittest.main()
