"""The unmodified openai package against ./server: what its users write must work."""

import asyncio
import base64
import math
import struct
import unittest

import openai

from quire_server import Server

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "max_tokens": 12}


def setUpModule():
    global server, client, model
    server = Server(key="right")
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="right", max_retries=0)
    model = client.models.list().data[0].id


def tearDownModule():
    client.close()
    server.__exit__(None)


def complete(**fields):
    return client.completions.create(model=model, **{"prompt": "Once upon a time", **GREEDY, **fields})


def chat(**fields):
    return client.chat.completions.create(model=model, **{"messages": QUESTION, **GREEDY, **fields})


class Completions(unittest.TestCase):
    def test_answer(self):
        answer = complete()
        self.assertTrue(answer.choices[0].text)
        self.assertEqual(answer.object, "text_completion")
        self.assertEqual(answer.model, model)
        self.assertEqual(answer.usage.completion_tokens, 12)
        self.assertEqual(answer.usage.total_tokens, answer.usage.prompt_tokens + 12)

    def test_stream_says_the_same(self):
        for fields in {}, {"n": 3, "temperature": 1, "seed": 5}, {"stop": [" the"]}, {"logprobs": 2}:
            with self.subTest(fields):
                whole = complete(**fields)
                texts = [""] * len(whole.choices)
                reasons = [None] * len(whole.choices)
                tokens = [[] for _ in whole.choices]
                for chunk in complete(stream=True, **fields):
                    for choice in chunk.choices:
                        texts[choice.index] += choice.text
                        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
                        if choice.logprobs:
                            tokens[choice.index] += choice.logprobs.token_logprobs
                self.assertEqual(texts, [c.text for c in whole.choices])
                self.assertEqual(reasons, [c.finish_reason for c in whole.choices])
                if "logprobs" in fields:
                    self.assertEqual(tokens, [c.logprobs.token_logprobs for c in whole.choices])

    def test_usage_of_a_stream(self):
        chunks = list(complete(stream=True, stream_options={"include_usage": True}))
        self.assertEqual(chunks[-1].choices, [])
        self.assertEqual(chunks[-1].usage.completion_tokens, 12)
        self.assertTrue(all(c.usage is None for c in chunks[:-1]))

    def test_prompts(self):
        two = complete(prompt=["One", "Two"])
        self.assertEqual([c.index for c in two.choices], [0, 1])
        for text, choice in zip(("One", "Two"), two.choices):
            self.assertEqual(complete(prompt=text).choices[0].text, choice.text)
        ids = server.post("/tokenize", {"prompt": "One"})[1]["tokens"]
        self.assertEqual(complete(prompt=ids).choices[0].text, two.choices[0].text)
        self.assertEqual(len(complete(prompt=[ids, ids, ids]).choices), 3)

    def test_logprobs(self):
        l = complete(logprobs=3).choices[0].logprobs
        self.assertEqual(len(l.tokens), 12)
        self.assertEqual(len(l.text_offset), 12)
        for token, logprob, top in zip(l.tokens, l.token_logprobs, l.top_logprobs):
            self.assertEqual(top[token], logprob)  # greedy: the best
            self.assertEqual(max(top.values()), logprob)
            self.assertIn(len(top), (3, 4))

    def test_echo(self):
        answer = complete(echo=True, logprobs=1, max_tokens=1).choices[0]
        self.assertTrue(answer.text.startswith("Once upon a time"))
        self.assertIsNone(answer.logprobs.token_logprobs[0])
        self.assertTrue(all(x <= 0 for x in answer.logprobs.token_logprobs[1:]))
        self.assertEqual("".join(answer.logprobs.tokens), answer.text)
        rated = complete(echo=True, logprobs=1, max_tokens=0).choices[0]
        self.assertEqual(rated.text, "Once upon a time")
        self.assertEqual(rated.logprobs.token_logprobs, answer.logprobs.token_logprobs[:-1])

    def test_n_and_best_of(self):
        answers = complete(n=3, temperature=1, seed=1).choices
        self.assertEqual(len({c.text for c in answers}), 3)
        for i, answer in enumerate(answers):
            self.assertEqual(answer.text, complete(temperature=1, seed=1 + i).choices[0].text)
        mean = lambda c: sum(c.logprobs.token_logprobs) / len(c.logprobs.token_logprobs)
        fields = {"temperature": 1, "seed": 1, "logprobs": 0}
        best = complete(n=1, best_of=3, **fields).choices
        self.assertEqual(best[0].text, max(complete(n=3, **fields).choices, key=mean).text)

    def test_stop(self):
        text = complete().choices[0].text
        stop = text[len(text) // 2:][:3]
        answer = complete(stop=stop).choices[0]
        self.assertEqual(answer.text, text[:text.index(stop)])
        self.assertEqual(answer.finish_reason, "stop")
        self.assertEqual(answer.stop_reason, stop)
        kept = complete(stop=[stop, "never"], extra_body={"include_stop_str_in_output": True}).choices[0].text
        self.assertEqual(kept, text[:text.index(stop) + len(stop)])

    def test_seed(self):
        hot = {"temperature": 1.5, "max_tokens": 20}
        self.assertEqual(complete(seed=7, **hot).choices[0].text, complete(seed=7, **hot).choices[0].text)
        self.assertNotEqual(complete(seed=7, **hot).choices[0].text, complete(seed=8, **hot).choices[0].text)

    def test_penalties_and_bias(self):
        plain = complete(extra_body={"return_token_ids": True}).choices[0].token_ids
        bias = complete(logit_bias={str(plain[0]): -100}, extra_body={"return_token_ids": True}).choices[0].token_ids
        self.assertNotIn(plain[0], bias)
        forced = complete(logit_bias={"300": 100}, max_tokens=3, extra_body={"return_token_ids": True})
        self.assertEqual(forced.choices[0].token_ids, [300] * 3)
        spread = complete(logit_bias={"300": 30, "301": 30}, frequency_penalty=2, presence_penalty=2, max_tokens=30,
                          extra_body={"return_token_ids": True}).choices[0].token_ids
        self.assertLess(spread.count(300), 30)


class Extras(unittest.TestCase):
    """What vLLM has beyond OpenAI, by extra_body."""

    def test_beam_search(self):
        answer = complete(n=3, extra_body={"use_beam_search": True, "beam_width": 4}, logprobs=0)
        scores = [sum(c.logprobs.token_logprobs) / len(c.logprobs.token_logprobs) for c in answer.choices]
        self.assertEqual(len({c.text for c in answer.choices}), 3)
        self.assertEqual(scores, sorted(scores, reverse=True))
        greedy = complete(logprobs=0).choices[0].logprobs.token_logprobs
        self.assertGreaterEqual(scores[0] + 1e-6, sum(greedy) / len(greedy))

    def test_sampling(self):
        greedy = complete().choices[0].text
        self.assertEqual(complete(temperature=1, extra_body={"top_k": 1}).choices[0].text, greedy)
        self.assertEqual(complete(temperature=1, extra_body={"min_p": 1.0}).choices[0].text, greedy)
        self.assertEqual(complete(extra_body={"repetition_penalty": 1.0}).choices[0].text, greedy)
        self.assertEqual(complete(extra_body={"cache_salt": "a", "priority": -3}).choices[0].text, greedy)
        ids = complete(extra_body={"allowed_token_ids": [300, 301], "return_token_ids": True}).choices[0].token_ids
        self.assertLessEqual(set(ids), {300, 301})
        self.assertNotIn("time", complete(max_tokens=60, extra_body={"bad_words": ["time"]}).choices[0].text)
        long = complete(max_tokens=300, extra_body={"min_tokens": 290}).usage.completion_tokens
        self.assertGreaterEqual(long, 290)

    def test_prompt_logprobs(self):
        choice = complete(max_tokens=1, extra_body={"prompt_logprobs": 1}).choices[0]
        rated = complete(max_tokens=0, echo=True, logprobs=1).choices[0].logprobs.token_logprobs
        self.assertIsNone(choice.prompt_logprobs[0])
        for entry, logprob in zip(choice.prompt_logprobs[1:], rated[1:]):
            self.assertIn(logprob, [v["logprob"] for v in entry.values()])

    def test_salt(self):
        text = "A long story that was told to nobody before, " * 4
        cached = lambda salt: complete(prompt=text, extra_body={"cache_salt": salt}).usage.prompt_tokens_details.cached_tokens
        self.assertEqual(cached("one"), 0)
        self.assertGreater(cached("one"), 0)
        self.assertEqual(cached("two"), 0)

    def test_unknown_and_unsupported(self):
        self.assertTrue(complete(extra_body={"field_of_the_future": 1}).choices)
        with self.assertRaises(openai.BadRequestError) as e:
            complete(suffix="the end")
        self.assertEqual(e.exception.param, "suffix")


class Chats(unittest.TestCase):
    def test_answer(self):
        answer = chat(max_tokens=60)
        self.assertEqual(answer.choices[0].message.role, "assistant")
        self.assertTrue(answer.choices[0].message.content)
        self.assertIsNone(answer.choices[0].message.tool_calls)
        self.assertEqual(answer.object, "chat.completion")

    def test_stream(self):
        for fields in {}, {"n": 2, "temperature": 1, "seed": 3}:
            whole = chat(**fields)
            texts = [""] * len(whole.choices)
            roles = set()
            last = None
            for last in chat(stream=True, stream_options={"include_usage": True}, **fields):
                for choice in last.choices:
                    texts[choice.index] += choice.delta.content or ""
                    if choice.delta.role:
                        roles.add((choice.index, choice.delta.role))
            self.assertEqual(texts, [c.message.content for c in whole.choices])
            self.assertEqual(roles, {(i, "assistant") for i in range(len(texts))})
            self.assertEqual(last.usage.completion_tokens, whole.usage.completion_tokens)

    def test_stream_helper(self):
        with client.chat.completions.stream(model=model, messages=QUESTION, **GREEDY) as stream:
            events = [event.type for event in stream]
            answer = stream.get_final_completion()
        self.assertIn("content.delta", events)
        self.assertEqual(answer.choices[0].message.content, chat().choices[0].message.content)

    def test_leaving_a_stream(self):
        stream = chat(stream=True, max_tokens=800, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
        server.wait_until_idle()

    def test_logprobs(self):
        answer = chat(logprobs=True, top_logprobs=4)
        content = answer.choices[0].logprobs.content
        self.assertEqual(len(content), answer.usage.completion_tokens)
        for entry in content:
            self.assertEqual(len(entry.top_logprobs), 4)
            self.assertEqual(entry.top_logprobs[0].token, entry.token)
            self.assertEqual(bytes(entry.bytes).decode(errors="replace"), entry.token)
        streamed = [entry.logprob for chunk in chat(logprobs=True, top_logprobs=4, stream=True)
                    for choice in chunk.choices if choice.logprobs for entry in choice.logprobs.content]
        self.assertEqual(streamed, [entry.logprob for entry in content])

    def test_fields_that_change_nothing(self):
        plain = chat().choices[0].message.content
        for fields in ({"tools": [], "tool_choice": "none"}, {"functions": [], "function_call": "none"},
                       {"response_format": {"type": "text"}}, {"store": False, "metadata": {}, "service_tier": "auto"},
                       {"tools": None, "tool_choice": None, "reasoning_effort": None, "logit_bias": None, "stop": None},
                       {"parallel_tool_calls": False, "modalities": ["text"], "prediction": None, "audio": None},
                       {"logit_bias": {}, "stream_options": None, "seed": None, "user": "u", "verbosity": "medium"}):
            with self.subTest(fields):
                self.assertEqual(chat(**fields).choices[0].message.content, plain)

    def test_messages(self):
        parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]
        self.assertEqual(chat(messages=parts).choices[0].message.content, chat().choices[0].message.content)
        talk = [{"role": "system", "content": "Be brief."}, *QUESTION, {"role": "assistant", "content": "Paris."},
                {"role": "user", "content": "And of Spain?"}]
        self.assertTrue(chat(messages=talk, max_completion_tokens=5, max_tokens=openai.omit).choices)


class Others(unittest.TestCase):
    def test_models(self):
        self.assertEqual([m.id for m in client.models.list()], [model])
        self.assertEqual(client.models.retrieve(model).object, "model")

    def test_embeddings(self):
        answer = client.embeddings.create(model=model, input=["a dog", "a dog", "the price of bread"])
        vectors = [d.embedding for d in answer.data]  # the package asks for base64 and decodes it
        self.assertEqual(vectors[0], vectors[1])
        for v in vectors:
            self.assertAlmostEqual(math.fsum(x * x for x in v), 1, 4)
        floats = client.embeddings.create(model=model, input="a dog", encoding_format="float").data[0].embedding
        raw = client.embeddings.create(model=model, input="a dog", encoding_format="base64").data[0].embedding
        decoded = struct.unpack(f"<{len(floats)}f", base64.b64decode(raw))
        for x, y, z in zip(floats, decoded, vectors[0], strict=True):
            self.assertAlmostEqual(x, y, 5)
            self.assertAlmostEqual(y, z, 5)

    def test_raw_response(self):
        raw = client.with_raw_response.completions.create(model=model, prompt="a", max_tokens=1,
                                                          extra_headers={"X-Request-Id": "mine-1"})
        self.assertEqual(raw.headers["x-request-id"], "mine-1")
        self.assertTrue(raw.parse().choices)


class Async(unittest.TestCase):
    def test_many_at_once(self):
        async def run():
            async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="right", max_retries=0) as many:
                async def streamed(i):
                    stream = await many.completions.create(model=model, prompt=f"Number {i}", stream=True, **GREEDY)
                    return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

                async def whole(i):
                    answer = await many.completions.create(model=model, prompt=f"Number {i}", **GREEDY)
                    return answer.choices[0].text

                return await asyncio.gather(*map(streamed, range(16)), *map(whole, range(16)))

        texts = asyncio.run(run())
        self.assertEqual(texts[:16], texts[16:])
        self.assertEqual(texts[:16], [complete(prompt=f"Number {i}").choices[0].text for i in range(16)])


class Faults(unittest.TestCase):
    def fault(self, kind, status, param, call):
        with self.assertRaises(kind) as e:
            call()
        self.assertEqual(e.exception.status_code, status)
        self.assertEqual(e.exception.param, param)
        self.assertTrue(e.exception.message)
        return e.exception

    def test_bad_requests(self):
        for field, value in {"temperature": -1, "top_p": 0, "n": 0, "max_tokens": -7, "logit_bias": {"5": "x"}, "stop": 5,
                             "logprobs": 1000, "best_of": 1000000, "presence_penalty": 7,
                             "prompt": [100000000]}.items():
            with self.subTest(field):
                self.fault(openai.BadRequestError, 400, field, lambda: complete(**{field: value}))
        for field, value in {"top_logprobs": 3, "messages": [], "tools": {"type": "function"},
                             "response_format": {"type": "xml"}}.items():
            with self.subTest(field):
                self.fault(openai.BadRequestError, 400, field, lambda: chat(**{field: value}))
        with self.subTest("stream"):
            self.fault(openai.BadRequestError, 400, "temperature", lambda: complete(stream=True, temperature=-1))

    def test_length(self):
        long = "word " * 5000
        for param, call in (("prompt", lambda: complete(prompt=long)),
                            ("messages", lambda: chat(messages=[{"role": "user", "content": long}])),
                            ("messages", lambda: chat(messages=[{"role": "user", "content": long}], stream=True)),
                            ("input", lambda: client.embeddings.create(model=model, input=long))):
            e = self.fault(openai.BadRequestError, 400, param, call)
            self.assertEqual(e.code, "context_length_exceeded")
            self.assertEqual(e.type, "invalid_request_error")
            self.assertRegex(e.message, r"This model's maximum context length is 1024 tokens\. However, you requested "
                                        rf"\d+ tokens \(\d+ in the {param}, \d+ in the completion\)\. Please reduce ")
        ids = list(range(300, 1324))
        self.assertEqual(complete(prompt=ids, max_tokens=0).usage.prompt_tokens, 1024)
        self.assertEqual(client.embeddings.create(model=model, input=ids).usage.prompt_tokens, 1024)

    def test_model(self):
        self.assertEqual(client.completions.create(model="gpt-any", prompt="a", max_tokens=1).model, "gpt-any")
        with Server("--strict-model-name") as strict, openai.OpenAI(base_url=strict.url + "/v1", api_key="none",
                                                                    max_retries=0) as other:
            e = self.fault(openai.NotFoundError, 404, "model",
                           lambda: other.completions.create(model="gpt-none", prompt="a"))
        self.assertEqual(e.code, "model_not_found")
        self.fault(openai.NotFoundError, 404, None, lambda: client.models.retrieve("gpt-none"))

    def test_key(self):
        with openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as stranger:
            e = self.fault(openai.AuthenticationError, 401, None, stranger.models.list)
            self.assertEqual(e.code, "invalid_api_key")

    def test_no_such_endpoint(self):
        self.fault(openai.NotFoundError, 404, None, lambda: client.moderations.create(model=model, input="a"))
        self.fault(openai.NotFoundError, 404, None, lambda: client.moderations.create(input="a"))

    def test_full_queue(self):
        with Server("--parallel", "1", "--max-queue", "0") as small, \
                openai.OpenAI(base_url=small.url + "/v1", api_key="none", max_retries=0) as one:
            busy = one.completions.create(model=model, prompt="a", stream=True, max_tokens=900,
                                          extra_body={"ignore_eos": True})
            next(iter(busy))
            e = self.fault(openai.RateLimitError, 429, None, lambda: one.completions.create(model=model, prompt="a"))
            self.assertGreaterEqual(int(e.response.headers["retry-after"]), 1)
            busy.close()
            patient = one.with_options(max_retries=5)  # the package waits as it is told to
            self.assertTrue(patient.completions.create(model=model, prompt="a", max_tokens=1).choices)


if __name__ == "__main__":
    unittest.main(warnings="ignore")  # of files that the package leaves to the collector
