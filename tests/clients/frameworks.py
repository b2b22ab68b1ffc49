"""litellm and langchain-openai, unmodified, against ./server: a prompt that does not fit has to reach their users as what it is.
By hand: pip install litellm langchain-openai, then this file with that python."""

import os
import unittest

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the network for prices

import langchain_openai
import litellm
from langchain_core.exceptions import ContextOverflowError

from quire_server import Server

LONG = "word " * 2000
MODEL = "quire-14m-q8_0"


def setUpModule():
    global server, where
    server = Server()
    where = {"api_base": server.url + "/v1", "api_key": "none", "num_retries": 0}


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

    def test_text(self):
        for prompt in LONG, list(range(300, 1324)):
            with self.assertRaises(litellm.ContextWindowExceededError):
                litellm.text_completion(prompt=prompt, model="text-completion-openai/" + MODEL, **where)

    def test_embedding(self):
        with self.assertRaises(litellm.ContextWindowExceededError):
            litellm.embedding("openai/" + MODEL, input=[LONG], **where)


class LangChain(unittest.TestCase):
    def test_chat(self):
        chat = langchain_openai.ChatOpenAI(base_url=server.url + "/v1", api_key="none", model=MODEL, max_retries=0)
        self.assertTrue(chat.invoke("Hello", max_tokens=4).content)
        self.assertTrue(chat.bind(tools=[], tool_choice="none").invoke("Hello", max_tokens=4).content)
        with self.assertRaises(ContextOverflowError):
            chat.invoke(LONG)
        with self.assertRaises(ContextOverflowError):
            list(chat.stream(LONG))


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    unittest.main(warnings="ignore")
