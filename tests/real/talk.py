#!/usr/bin/env python3
"""A chat of ten turns with a pretrained model: with the prefix cache and without it, over the end of the context, in the terminal.

usage: talk.py FOLDER_OF_BINARIES MODEL; exits with 1 at the first difference.
"""
import os, subprocess, sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "clients"))
from quire_server import Server

QUESTIONS = ["Hello! Who are you?", "Name three animals that live in the sea.", "Which of them is the largest?",
             "Write one sentence about it.", "What is two plus three?", "And if you add ten?", "Name a city in Italy.",
             "What can a visitor see there?", "Which language do people speak there?", "Thank you. Say goodbye."]


def talk(model, *flags):
    """The answers of ten turns, and how many tokens of the last prompt came from the cache."""
    messages, answers = [], []
    with Server("-c", "2048", *flags, model=model) as server:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            status, reply = server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 48})
            assert status == 200, reply
            messages.append(reply["choices"][0]["message"])
            answers.append(messages[-1]["content"])
            assert answers[-1].strip(), f"an empty answer to {question!r}"
    usage = reply["usage"]
    return answers, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def over_the_end(model, context=256, length=112):
    """Ten turns in a context that holds about two of them: the oldest turns are left out, and an answer goes on behind the end."""
    messages, shifted, total = [], 0, 0
    with Server("-c", str(context), "--trim-chats", "--context-shift", model=model) as server:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            status, reply = server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": length,
                                                                 "ignore_eos": True})
            assert status == 200, reply
            messages.append(reply["choices"][0]["message"])
            assert messages[-1]["content"].strip(), f"an empty answer to {question!r}"
            usage = reply["usage"]
            assert usage["completion_tokens"] == length and usage["prompt_tokens"] <= context, usage
            assert reply["choices"][0]["finish_reason"] == "length", reply
            shifted += usage["prompt_tokens"] + length > context
            total += length
    assert shifted >= 5 and total > 2 * context, f"{shifted} answers over the end, {total} tokens"
    print(f"ten turns in a context of {context}: all answers, of {total} tokens, are there; {shifted} went over the context's end")


def main():
    binaries, model = sys.argv[1:3]
    cached, n_prompt, n_cached = talk(model)
    plain, _, none = talk(model, "--no-prefix-cache")
    assert cached == plain, f"the prefix cache changes answers:\n{cached}\n{plain}"
    assert none == 0 and n_cached > n_prompt // 2, f"{n_cached} of {n_prompt} tokens came from the cache"
    print(f"ten turns: equal with and without the prefix cache; {n_cached} of the last prompt's {n_prompt} tokens were cached")

    over_the_end(model)
    with Server("-c", "256", "--context-shift", model=model) as server:
        status, reply = server.post("/v1/completions", {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 600,
                                                        "ignore_eos": True})
        assert status == 200, reply
        assert reply["usage"]["completion_tokens"] == 600, reply["usage"]
        print("an answer of 600 tokens in a context of 256 goes on")

    # Ten questions on lines, in a context that holds about four of the turns.
    chat = subprocess.run([os.path.join(binaries, "chat"), "-m", model, "-c", "256", "--temp", "0", "-n", "48"], text=True,
                          input="\n".join(QUESTIONS) + "\n", capture_output=True)
    assert chat.returncode == 0, chat.stderr
    print("ten lines in ./chat with a context of 256:\n" + chat.stdout)
    assert len(chat.stdout.split()) > 60, "the chat answers too little"


if __name__ == "__main__":
    main()
