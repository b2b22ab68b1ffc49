"""litellm, langchain-openai, llama-index and instructor, unmodified, against ./server: structured answers and calls of tools, and
prompts that do not fit have to reach their users as what they are."""

import os
import unittest
from typing import Literal, Optional

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the network for prices

import instructor
import langchain_openai
import litellm
import openai
from langchain_core.exceptions import ContextOverflowError
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict, Field

from quire_server import Server

litellm.suppress_debug_info = True
LONG = "word " * 2000
MODEL = "quire-14m-q8_0"


class Weather(BaseModel):
    """The weather of a city for some days."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=7)


class Anything(BaseModel):
    """What a client takes that asks for any JSON object."""

    city: Optional[str] = None


def setUpModule():
    global server, where, braces
    server = Server("--tool-format", "hermes")
    where = {"api_base": server.url + "/v1", "api_key": "none", "num_retries": 0}
    # Any JSON object may be long: with these tokens alone it is short.
    braces = {"allowed_token_ids": [token for text in ("{", "}", "<|im_end|>") for token in server.post(
        "/tokenize", {"prompt": text, "add_special_tokens": False})[1]["tokens"]]}


def tearDownModule():
    server.__exit__(None)


def messages(text):
    return [{"role": "user", "content": text}]


class LiteLLM(unittest.TestCase):
    def test_chat(self):
        for provider in "openai/", "hosted_vllm/":
            answer = litellm.completion(provider + MODEL, messages("Hello"), max_tokens=3, tools=[], tool_choice="none", **where)
            self.assertTrue(answer.choices[0].message.content)
            for stream in False, True:
                with self.subTest(provider=provider, stream=stream), self.assertRaises(litellm.ContextWindowExceededError):
                    litellm.completion(provider + MODEL, messages(LONG), stream=stream, **where)

    def test_tools(self):
        tool = {"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}
        for provider in "openai/", "hosted_vllm/":
            answer = litellm.completion(provider + MODEL, messages("Paris?"), tools=[tool], tool_choice="required", **where)
            for call in answer.choices[0].message.tool_calls:
                Weather.model_validate_json(call.function.arguments)
            answer = litellm.completion(provider + MODEL, messages("Paris?"), response_format=Weather, **where)
            Weather.model_validate_json(answer.choices[0].message.content)

    def test_fallback(self):
        with Server("-c", "256") as small:
            router = litellm.Router(
                model_list=[{"model_name": "small", "litellm_params": {"model": "openai/" + MODEL, "api_base": small.url + "/v1", "api_key": "none"}},
                            {"model_name": "large", "litellm_params": {"model": "openai/" + MODEL, "api_base": server.url + "/v1", "api_key": "none"}}],
                context_window_fallbacks=[{"small": ["large"]}], num_retries=0)
            answer = router.completion("small", messages("word " * 400), max_tokens=4)
            self.assertGreater(answer.usage.prompt_tokens, 256)

    def test_text(self):
        for prompt in LONG, list(range(300, 1324)):
            with self.assertRaises(litellm.ContextWindowExceededError):
                litellm.text_completion(prompt=prompt, model="text-completion-openai/" + MODEL, **where)

    def test_embedding(self):
        with self.assertRaises(litellm.ContextWindowExceededError):
            litellm.embedding("openai/" + MODEL, input=[LONG], **where)


class LangChain(unittest.TestCase):
    def chat(self, **more):
        return langchain_openai.ChatOpenAI(base_url=server.url + "/v1", api_key="none", model=MODEL, max_retries=0, **more)

    def test_chat(self):
        chat = self.chat()
        self.assertTrue(chat.invoke("Hello", max_tokens=4).content)
        self.assertTrue(chat.bind(tools=[], tool_choice="none").invoke("Hello", max_tokens=4).content)
        with self.assertRaises(ContextOverflowError):
            chat.invoke(LONG)
        with self.assertRaises(ContextOverflowError):
            list(chat.stream(LONG))

    def test_bind_tools(self):
        for choice in "any", "Weather":
            chat = self.chat(max_tokens=300).bind_tools([Weather], tool_choice=choice)
            for call in chat.invoke("Paris?").tool_calls:
                Weather.model_validate(call["args"])
            whole = None
            for chunk in chat.stream("Paris?"):
                whole = chunk if whole is None else whole + chunk
            self.assertTrue(whole.tool_calls)
            for call in whole.tool_calls:
                Weather.model_validate(call["args"])
        self.assertTrue(self.chat(max_tokens=20, temperature=0).bind_tools([Weather]).invoke("Hello").content)

    def test_structured_output(self):
        for method in "function_calling", "json_schema":
            answer = self.chat(max_tokens=300).with_structured_output(Weather, method=method).invoke("Paris?")
            self.assertIsInstance(answer, Weather, method)
        answer = self.chat(extra_body=braces).with_structured_output(Anything, method="json_mode").invoke("Paris?")
        self.assertIsInstance(answer, Anything)


class LlamaIndex(unittest.TestCase):
    def llm(self):
        return OpenAILike(model=MODEL, api_base=server.url + "/v1", api_key="none", is_chat_model=True, max_retries=0,
                          is_function_calling_model=True, max_tokens=300, context_window=1024)

    def test_structured(self):
        answer = self.llm().as_structured_llm(Weather).complete("Paris?")
        self.assertIsInstance(answer.raw, Weather)

    def test_tools(self):
        def weather(city: Literal["Paris", "Rome"]) -> str:
            """The weather of a city."""
            return f"It rains in {city}."

        llm, tool = self.llm(), FunctionTool.from_defaults(weather)
        answer = llm.chat_with_tools([tool], chat_history=[ChatMessage(role="user", content="Paris?")], tool_required=True)
        calls = llm.get_tool_calls_from_response(answer)
        self.assertTrue(calls)
        for call in calls:
            self.assertIn(call.tool_kwargs["city"], ("Paris", "Rome"))


class Instructor(unittest.TestCase):
    def test_modes(self):
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        for mode, kind, more in ((instructor.Mode.TOOLS, Weather, {}), (instructor.Mode.JSON_SCHEMA, Weather, {}),
                                 (instructor.Mode.JSON, Anything, {"extra_body": braces})):
            with self.subTest(mode):
                answer = instructor.from_openai(client, mode=mode).chat.completions.create(
                    model=MODEL, messages=messages("Paris?"), response_model=kind, max_retries=0, **more)
                self.assertIsInstance(answer, kind)


if __name__ == "__main__":
    unittest.main()
