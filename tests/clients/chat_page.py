"""Claims about the page of the chat, for pages.py: talking, settings, files, keys, the context."""
import json
import os
import re
import tempfile
import time

from chat_tools import LISTED, act, ask, exchange, is_narrow, leave, open_list, opened, reload, script
from page_tools import ROOT, Server, check, TURNS, BUSY, LAST, NOTE, settle, setting, Busy, shot, presentable, readable, no_overflow, clean


def a_question_is_answered_and_another_turn_follows(browser, server):
    page = opened(browser, server)
    page.type("What is paged attention?")
    page.press("Enter")
    page.until(TURNS + " === 2")
    settle(page)
    first = page.run(LAST)
    alone = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "What is paged attention?"}], temperature=0)
    check(first == alone["choices"][0]["message"]["content"], "another text than the API's:", first)
    check(re.search(r"\d+ prompt tokens.* · \d+ tokens · [\d.]+ tokens/s · first after", page.run(NOTE)), page.run(NOTE))
    page.type("Why?")
    page.press("Enter", shift=True)
    check(page.run("document.querySelector('textarea').value") == "Why?\n", "Shift+Enter starts no line")
    page.press("Enter")
    page.until(TURNS + " === 4")
    settle(page)
    messages = [{"role": "user", "content": "What is paged attention?"}, {"role": "assistant", "content": first}, {"role": "user", "content": "Why?"}]
    alone = server.post("/v1/chat/completions", messages=messages, temperature=0)
    check(page.run(LAST) == alone["choices"][0]["message"]["content"], "the second turn does not know the first")
    check("cached" in page.run(NOTE), "nothing of the first turn was found in the cache:", page.run(NOTE))
    # The talk outlives the page, until a new one begins.
    page.go(server.url + "/")
    page.until(TURNS + " === 4")
    page.click(".new")
    check(page.run(TURNS) == 0 and page.run("document.activeElement.tagName") == "TEXTAREA", "no new chat")
    clean(page, server, "the chat")


def an_answer_is_stopped(browser, server):
    page = opened(browser, server)
    setting(page, temperature=3, seed=7)  # chance without end
    with Busy(server):
        stop_it(page, server)
    clean(page, server, "stopping")


def stop_it(page, server):
    for how in ("Escape", "button"):
        before = server.metric('vllm:request_success_total{finished_reason="abort"}')
        page.type("Tell me a story.")
        page.press("Enter")
        page.until(f"{BUSY} && {LAST}.length > 20")
        page.press("Escape") if how == "Escape" else page.click(".send")
        settle(page)
        check("stopped" in page.run(NOTE), how, page.run(NOTE))
        check(page.run(LAST), "what had come is gone")
        end = time.monotonic() + 30
        while server.metric('vllm:request_success_total{finished_reason="abort"}') == before:
            check(time.monotonic() < end, "the server went on")
    # The answer of an old chat comes while a new one is on the page, and is not shown there.
    page.type("Tell me a story.")
    page.press("Enter")
    page.until(f"{BUSY} && {LAST}.length > 20")
    page.click(".new")
    page.until("document.querySelector('.send').textContent === 'Send'")
    check(page.run(TURNS) == 0 and page.run("document.querySelectorAll('.chats .dot').length") == 1, "the old answer is still there")
    open_list(page)
    page.click(".chats .open")
    page.until(BUSY)
    page.press("Escape")
    settle(page)


def settings_reach_the_server(browser, server):
    page = opened(browser, server)
    page.run("window.bodies = []; { const real = window.fetch; window.fetch = (a, o) => { if (o.body) bodies.push(JSON.parse(o.body)); return real(a, o); }; }")
    setting(page, system="Be brief.", temperature=0.5, top_p=0.9, top_k=40, min_p=0.05, max_tokens=5, seed=1)
    page.type("Hello")
    page.press("Enter")
    page.until(TURNS + " === 2")
    settle(page)
    body = page.run("bodies.at(-1)")
    check(body["messages"][0] == {"role": "system", "content": "Be brief."}, body)
    for name, value in {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 5, "seed": 1}.items():
        check(body[name] == value, name, body)
    check("5 tokens" in page.run(NOTE) and "cut" in page.run(NOTE), page.run(NOTE))
    reload(page, server)
    page.click(".set")
    check(page.run("document.querySelector('[name=top_k]').value") == "40", "the settings are not kept")
    page.click("dialog .reset")
    page.click("dialog [value=save]")
    page.until("!document.querySelector('dialog.settings').open")
    clean(page, server, "the settings")
    # What the server has against a request is a sentence.
    page.run("document.querySelector('.new').click()")
    page.run("document.querySelector('textarea').value = 'word '.repeat(5000); document.querySelector('textarea').oninput(); 0")
    page.click(".send")
    page.until("document.querySelector('.fault')")
    check("context" in page.run("document.querySelector('.fault').innerText"), page.run("document.querySelector('.fault').innerText"))
    check(not page.run("document.querySelector('.fault button')"), "what is too long alone cannot go on without others")
    page.click(".new")


def a_full_context_goes_on_without_the_oldest(browser):
    server = Server("-c", "256")
    try:
        page = opened(browser, server)
        setting(page, system="Be brief.", max_tokens=40)
        asked = 0
        while not page.run("!!document.querySelector('.fault')"):
            check(asked < 20, "the context is never full")
            asked += 1
            page.type(f"What is paged attention, and why is it number {asked}?")
            page.press("Enter")
            page.until(f"{TURNS} === {2 * asked}")
            settle(page)
        check(page.run("!!document.querySelector('.fault button')"), "nothing is offered:", page.run("document.querySelector('.fault').innerText"))
        text = page.run("document.querySelector('.fault button').textContent")
        n = int(re.fullmatch(r"Go on without the (\d+) oldest messages", text)[1])
        shot(page, "full")
        # It lasts a reload, and so does what is chosen.
        page.go(server.url + "/")
        page.until("document.querySelector('.bar .model').textContent && document.querySelector('.fault button')")
        page.run("window.bodies = []; { const real = window.fetch; window.fetch = (a, o) => { if (o.body && /completions/.test(a)) bodies.push(JSON.parse(o.body)); return real(a, o); }; }")
        turns = page.run("turns.map(t => ({role: t.role, content: t.content})).filter(t => t.content)")
        page.click(".fault button")
        settle(page)
        check(not page.run("!!document.querySelector('.fault')"), "it still fails:", page.run("document.querySelector('.talk').innerText"))
        system = {"role": "system", "content": "Be brief."}
        check(page.run("bodies.at(-1).messages") == [system, *turns[n:]], "other messages were sent:", page.run("bodies.at(-1).messages"))

        def room(n):
            return 256 - server.post("/tokenize", messages=[system, *turns[n:]])["count"]
        check(room(n) >= 64 > room(n - 2), "not as few as possible were left out:", n, room(n), room(n - 2))
        check(page.run("document.querySelector('.cut').previousElementSibling") is not None and page.run("document.querySelectorAll('.turn.dropped').length") == n, "it does not show what is left out")
        shot(page, "cut")
        readable(page, "a cut talk")
        reload(page, server)
        check(page.run("document.querySelectorAll('.turn.dropped').length") == n, "what was left out comes back")
        before = page.run(TURNS)
        page.type("Why?")
        page.press("Enter")
        page.until(f"{TURNS} === {before + 2}")
        settle(page)
        check(page.run(LAST), "the talk does not go on")
        page.run("localStorage.clear(); 0")
        refused = [c for c in page.complaints if "400" not in c]
        check(not refused, refused)
    finally:
        server.close()


ACTIONS = "Copy,Try again,Tokens,Compare,Verify"


def every_answer_keeps_its_copy(browser, server):
    page = opened(browser, server, scripted=True)
    buttons = "[...document.querySelectorAll('.turn.assistant')].map(t => [...t.querySelectorAll('.foot > button')].map(b => b.textContent).join())"
    for n in (1, 2, 3):
        page.run("window.held = 1; 0")
        ask(page, "Go.", [["content", "Some "], ["content", "words."]], "stop", 10)
        page.until(BUSY)
        check(page.run(buttons) == [ACTIONS.replace("Compare,", "")] * (n - 1) + [""], "during an answer:", page.run(buttons))
        page.run("window.held = 0; 0")
        settle(page)
        check(page.run(buttons) == [ACTIONS.replace("Compare,", "")] * (n - 1) + [ACTIONS], "after an answer:", page.run(buttons))
    # What was cut goes on where it was cut.
    exchange(page, "Go.", [["content", "A begin"]], "length", 10)
    check("cut at the limit" in page.run(NOTE) and "Continue" in page.run(buttons)[-1], page.run(NOTE))
    reload(page, server)
    script(page, [["content", "ning."]], "stop", 12)
    act(page, "Continue")
    settle(page)
    check(page.run(LAST) == "A beginning." and page.run("asked.at(-1).messages.at(-1)") == {"role": "assistant", "content": "A begin"}, page.run(LAST))
    check("Continue" not in page.run(buttons)[-1], "it is complete")
    # So does the server's own answer.
    page.click(".new")
    setting(page, max_tokens=5)
    whole = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "What is paged attention?"}], temperature=0, max_tokens=10)["choices"][0]["message"]["content"]
    exchange(page, "What is paged attention?")
    act(page, "Continue")
    settle(page)
    check(page.run("turns.at(-1).content") == whole, page.run("turns.at(-1).content"), "is not", whole)
    leave(page, server, "copies")


def a_context_that_is_nearly_full_is_said(browser):
    server = Server("-c", "256")
    try:
        page = opened(browser, server, scripted=True)
        check(page.run("document.querySelector('.gauge').hidden"), "a gauge of nothing")
        words = [["content", "word "]] * 3
        exchange(page, "One.", words, "stop", 20)
        check(page.run("document.querySelector('.gauge').innerText").strip() == "23 of 256 tokens", page.run("document.querySelector('.gauge').innerText"))
        # Before it is sent: a long question in a conversation that is not empty.
        talk = [{"role": "user", "content": "One."}, {"role": "assistant", "content": "word word word "}]
        n = next(n for n in range(1, 250) if server.post("/tokenize", messages=[*talk, {"role": "user", "content": ("word " * n).strip()}])["count"] >= 240)
        ask(page, "word " * n)
        page.until("document.querySelector('.fault button')")
        settle(page)
        told = page.run("document.querySelector('.fault').innerText")
        found = re.match(r"The conversation has (\d+) of 256 tokens: (\d+) are left for an answer\.", told)
        check(found and int(found[1]) + int(found[2]) == 256 and int(found[2]) < 32, told)
        check(page.run("asked.length") == 1, "it was sent")
        check(page.run("document.querySelector('.gauge').className") == "gauge full", "the gauge is not full")
        presentable(page, "nearly-full", "a full chat")
        script(page, words, "stop", 230)
        page.run("[...document.querySelectorAll('.fault button')].find(b => b.textContent === 'Answer anyway').click()")
        settle(page)
        check(page.run(LAST).startswith("word") and len(page.run("asked.at(-1).messages")) == 3, "not answered anyway")
        # On the cut: the answer filled the context, and goes on without the oldest.
        page.click(".new")
        exchange(page, "One.", words, "stop", 20)
        exchange(page, "Two.", [["content", "word "]] * 160, "length", 96)
        check("cut: the context is full" in page.run(NOTE) and "context of 256 tokens is full" in page.run("document.querySelector('.fault').innerText"), page.run(NOTE))
        script(page, [["content", "end."]], "stop", 100)
        page.click(".fault button")
        settle(page)
        sent = page.run("asked.at(-1).messages")
        check([m["role"] for m in sent] == ["user", "assistant"] and sent[0]["content"] == "Two." and page.run("turns.at(-1).content").endswith("word end."), sent)
        # A single question that fills the context has nothing to leave out.
        page.click(".new")
        exchange(page, "Three.", words, "length", 253)
        check("cut: the context is full" in page.run(NOTE) and not page.run("document.querySelector('.fault')"), page.run(NOTE))
        check("Continue" not in page.run("[...document.querySelectorAll('.foot')].at(-1).innerText"), "it would only be refused")
        clean(page, server, "a full chat")
    finally:
        server.close()


def settings_have_names_and_the_page_a_theme(browser, server):
    page = opened(browser, server, scripted=True)
    paper = "getComputedStyle(document.body).backgroundColor"
    width, height, is_dark = page.own
    its, others = ("dark", "light") if is_dark else ("light", "dark")
    first = page.run(paper)
    setting(page, temperature=0.3, system="Be brief.", more='{"repeat_penalty": 1.2}', theme=others)
    second = page.run(paper)
    check(second != first, "no theme but the system's")
    readable(page, "the other theme")
    # It holds on the other page, whatever the system has.
    other = browser.page()
    other.go(server.url + "/blocks.html")
    check(other.run(paper) == second, "the blocks have the system's theme")
    # A preset is kept, and taken over elsewhere; a field that is no JSON is not.
    page.call("Page.bringToFront")
    page.click(".set")
    page.run("presetName.value = 'Brief'; 0")
    page.click("dialog .keep")
    page.run("form.elements.more.value = '[1'; form.elements.more.oninput(); 0")
    page.click("dialog [value=save]")
    check(page.run("dialog.open && form.elements.more.validationMessage") == "This is not a JSON object.", "it is saved")
    page.run("form.elements.more.value = '{\"n\": 2}'; form.elements.more.oninput(); 0")
    check(page.run("form.elements.more.validationMessage") == "The page itself sets n.", "two answers in one")
    page.click("dialog .cancel")
    setting(page, temperature=1, system="", more="", theme=its)
    check(page.run(paper) == first, "the first theme does not come back")
    page.look(width, height, not is_dark)
    check(page.run(paper) == first, "the system decides")
    page.click(".set")
    page.run("presetName.value = 'Brief'; presetName.onchange(); 0")
    shot(page, "preset")
    # A name that begins with another, or that every object knows, is only a name.
    page.run("form.elements.system.value = 'Mine'; presetName.value = ''; presetName.focus(); 0")
    for piece in ("Brief", "er"):
        page.type(piece)
    page.run("presetName.value = 'constructor'; presetName.oninput(); presetName.onchange(); 0")
    check(page.run("[form.elements.system.value, dialog.querySelector('.drop').disabled]") == ["Mine", True], "the form is another")
    page.run("presetName.value = 'Brief'; presetName.onchange(); 0")
    page.click("dialog [value=save]")
    exchange(page, "Hello", [["content", "Hi."]], "stop", 10)
    body = page.run("asked.at(-1)")
    check(body["temperature"] == 0.3 and body["repeat_penalty"] == 1.2 and body["messages"][0]["content"] == "Be brief.", body)
    # Settings are those of a conversation.
    page.click(".new")
    setting(page, temperature=0.7)
    exchange(page, "Hello", [["content", "Hi."]], "stop", 10)
    page.press("ArrowDown", alt=True)
    check(page.run("now.chat.settings.temperature") == 0.3, "a conversation lost its settings")
    leave(page, server, "presets")


def several_models_are_chosen_from(browser):
    toy, other = "quire-14m-q8_0", "llama3-gqa-Q8_0"
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(os.path.join(ROOT, "models", toy + ".gguf"), os.path.join(folder, toy + ".gguf"))
        os.symlink(os.path.join(ROOT, "tests", "data", "models", other + ".gguf"), os.path.join(folder, other + ".gguf"))
        server = Server("--models-dir", folder, "-c", "512")
        try:
            page = opened(browser, server)
            status = lambda: {m["id"]: m["status"]["value"] for m in json.loads(server.get("/v1/models"))["data"]}
            check(page.run("[...choice.options].map(o => o.value)") == sorted(status(), key=str.lower), "the page lists", page.run("[...choice.options].map(o => o.value)"))
            check(set(status().values()) == {"unloaded"}, "a look at the page loads a model")
            # The choice is the conversation's, and is there after a reload; its messages are counted and answered by that model.
            page.run(f"choice.value = {json.dumps(toy)}; choice.onchange(); 0")
            page.until(f"known.has({json.dumps(toy)})")
            check(page.run("document.querySelector('.welcome .who').textContent") == toy, "the model is not named")
            exchange(page, "What is paged attention?")
            alone = server.post("/v1/chat/completions", model=toy, messages=[{"role": "user", "content": "What is paged attention?"}], temperature=0)
            check(page.run(LAST) == alone["choices"][0]["message"]["content"], page.run("document.querySelector('.talk').innerText"))
            check(re.search(r"of 512 tokens", page.run("document.querySelector('.gauge').innerText")), "the context is not shown")
            page.run("toggleTokens(turns.at(-1))")
            page.until("document.querySelectorAll('.token').length > 9")
            page.go(server.url + "/")
            page.until(f"{TURNS} === 2 && choice.value === {json.dumps(toy)}")
            page.until(f"known.has({json.dumps(toy)})")
            # Another one beside it, which is loaded for that.
            page.run(f"openSettings(turns.at(-1)); form.elements.model.value = {json.dumps(other)}; form.elements.max_tokens.value = 8; 0")
            page.click("dialog [value=save]")
            page.until("document.querySelectorAll('.pair .turn').length === 2")
            settle(page)
            heads = page.run("[...document.querySelectorAll('.pair .head span:first-child')].map(e => e.innerText)")
            check([h.split(",")[0] for h in heads] == ["model " + toy, "model " + other] and status()[other] == "loaded", heads)
            check("8 tokens" in page.run("turns[0].id && now.tree.after(turns[0].id).at(-1).note"), "the other did not answer")
            presentable(page, "models", "a choice of models")
            # The page of the blocks shows the model that the chat's link names.
            page.go(server.url + page.run("document.querySelector('.ways [target]').getAttribute('href')"))
            page.until("document.querySelectorAll('.demos button').length === 4 && snapshot")
            check(page.run("[model, document.querySelector('.state').textContent, document.querySelector('.models').value]") == [toy, "live", toy], "another model's blocks")
            check(page.run("totalsOf(snapshot).cached") > 0, "the chat's blocks are not there")
            page.go(server.url + f"/blocks.html?model={other}")
            page.until(f"model === {json.dumps(other)} && snapshot")
            leave(page, server, "several models")
        finally:
            server.close()


def files_go_with_a_message(browser, server):
    page = opened(browser, server, scripted=True)
    page.run("attach([new File(['a ``` b\\r\\nc'], 'notes.md'), new File(['\\0\\1'], 'x.bin'), new File([''], 'empty')])")
    check(page.run("attached.length") == 1 and "notes.md · 9" in page.run("document.querySelector('.attached').innerText"), page.run("document.querySelector('.attached').innerText"))
    page.run("attach([new File(['x'], 'a.png', {type: 'image/png'})])")
    page.until("/a.png is a picture/.test(document.querySelector('.toast').innerText)")
    if is_narrow(page):  # Esc closes the list of conversations, which is over the talk
        page.click(".toggle")
        page.press("Escape")
        check(not page.run("document.body.classList.contains('with-chats')"), "the list stays open")
    presentable(page, "files", "a file")
    exchange(page, "What is it?", [["content", "Notes."]], "stop", 10)
    check(page.run("asked.at(-1).messages[0].content") == "notes.md:\n````\na ``` b\nc\n````\n\nWhat is it?", page.run("asked.at(-1).messages"))
    check(page.run("attached.length") == 0 and page.run("document.querySelector('.file summary').innerText") == "notes.md · 9 characters", "it is not shown")
    clean(page, server, "a file")


def tools_are_cards(browser, server):
    page = opened(browser, server, scripted=True)
    ask(page, "Weather?", [["tool_calls", [{"index": 0, "id": "x", "function": {"name": "weather", "arguments": '{"city":'}}]],
                           ["tool_calls", [{"index": 0, "function": {"arguments": '"Ulm"}'}}]]], "tool_calls", 10)
    settle(page)
    check("Calls weather" in page.run("document.querySelector('.call').innerText") and '"city": "Ulm"' in page.run("document.querySelector('.call code').innerText"), "no card")
    shot(page, "tools")
    readable(page, "a card")
    page.run("{ const area = document.querySelector('.call textarea'); area.value = 'dry'; area.oninput(); } 0")
    reload(page, server)
    check(page.run("document.querySelector('.call textarea').value") == "dry", "what was typed into a card is gone")
    page.run(f"script.push({json.dumps([[['content', 'It rains.']], 'stop', 20])}); document.querySelector('.call textarea').value = 'rain'; document.querySelector('.calls > button').click()")
    page.until("turns.length === 4")
    settle(page)
    sent = page.run("asked.at(-1).messages")
    check(sent[1].get("tool_calls", [0])[0] == {"id": "call_0", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Ulm"}'}}, sent)
    check(sent[2] == {"role": "tool", "content": "rain", "tool_call_id": "call_0"} and page.run(LAST) == "It rains.", sent)
    # What a tool returned stays where its answer fails. A question in place of a result: nothing came of the call.
    call = [["tool_calls", [{"index": 0, "function": {"name": "weather", "arguments": "{}"}}]]]
    exchange(page, "And now?", call, "tool_calls", 30)
    page.run("script.push([[], null, 40]); document.querySelector('.calls textarea').value = 'sun'; document.querySelector('.calls > button').click()")
    page.until("turns.length === 8 && turns.at(-1).fault")
    settle(page)
    script(page, call, "tool_calls", 50)
    page.run("ask('Go on'); 0")
    page.until("turns.length === 9")
    settle(page)
    check([m["role"] for m in page.run("asked.at(-1).messages")][4:] == ["user", "assistant", "tool", "user"], page.run("asked.at(-1).messages"))
    script(page, [["content", "Well."]], "stop", 60)
    page.run("ask('Never mind'); 0")
    page.until("turns.length === 12")
    settle(page)
    sent = page.run("asked.at(-1).messages")
    check(sent[-2] == {"role": "tool", "content": "", "tool_call_id": "call_0"} and sent[-1]["content"] == "Never mind", sent)
    clean(page, server, "tools")


# A conversation in the form that the toy model knows; each answer begins within its thoughts.
THINKS = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
<think>
"""


def thinking_is_ended_by_the_reader(browser):
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
        template.write(THINKS)
        template.flush()
        server = Server("--chat-template-file", template.name)
        try:
            for how in ("a click", "the keyboard"):
                page = opened(browser, server)
                setting(page, temperature=0, max_tokens=800, more='{"ignore_eos": true, "logit_bias": {"</think>": -100}}')
                with Busy(server):
                    ask(page, "Think.")
                    page.until("document.querySelector('.busy.thinks .skip')?.checkVisibility()")
                    page.click(".busy.thinks .skip") if how == "a click" else page.press("KeyW", alt=True)
                    page.until("turns.at(-1).content.length > 20 && turns.at(-1).ended")
                    check(page.run(BUSY), "it is another request")
                    page.press("Escape")
                    settle(page)
                check(page.run("turns.length === 2 && turns.at(-1).reasoning.length > 0"), how, "the thoughts are gone")
                buttons = page.run("[...document.querySelectorAll('.foot button')].map(b => b.textContent)")
                check("Verify" not in buttons, "no request alone gives this answer again:", buttons)
                leave(page, server, "ended thoughts")
        finally:
            server.close()


def a_full_context_is_said_ahead(browser):
    server = Server("-c", "256")
    try:
        page = opened(browser, server, scripted=True)
        for n in (60, 120, 180):
            exchange(page, "word " * 20, [["content", "word "]] * 30, "stop", n)
        page.click(".gauge")
        page.until("document.querySelector('.explain button')")
        check("at most 256 tokens" in page.run("document.querySelector('.explain').innerText"), "not explained")
        shot(page, "explained")
        readable(page, "the explanation")
        page.press("Escape")
        page.run("box.focus(); 0")
        page.type("word " * 70)
        page.until("!document.querySelector('.ahead').hidden")
        told = page.run("document.querySelector('.ahead').innerText")
        found = re.search(r"(\d+) are left for an answer|longer than the model's context", told)
        without = re.search(r"Go on without the (\d) oldest messages", told)
        check(found and int(found[1] or 0) < 32 and without and page.run("asked.length") == 3, told)
        no_overflow(page, "what is said ahead")
        page.click(".ahead button")
        script(page, [["content", "Yes."]], "stop", 100)
        page.run("box.focus(); 0")
        page.press("Enter")
        page.until(f"{TURNS} === 8")
        settle(page)
        check(len(page.run("asked.at(-1).messages")) == 7 - int(without[1]), page.run("asked.at(-1).messages"))
        clean(page, server, "what is said ahead")
    finally:
        server.close()


def the_keyboard_does_everything(browser, server):
    page = opened(browser, server, scripted=True)
    page.press("?")
    check(page.run("box.value") == "?" and not page.run("!!document.querySelector('dialog[open]')"), "a question mark is no text")
    page.run("box.value = ''; fit(); 0")
    page.press("KeyH", alt=True)
    page.until("document.querySelector('.keys-list').open")
    check(page.run("document.querySelectorAll('.keys-list dt').length === KEYS.length + 3"), "keys are missing")
    shot(page, "keys")
    readable(page, "the keys")
    page.press("Escape")
    page.until("!document.querySelector('.keys-list').open")
    page.run("box.focus(); 0")
    for text in ("A.", "B."):
        script(page, [["content", text]], "stop", 10)
    page.type("One?")
    page.press("Enter")
    page.until(f"{TURNS} === 2 && !{BUSY} && {LAST} === 'A.'")
    page.press("KeyR", alt=True)
    page.until(f"!{BUSY} && {LAST} === 'B.'")
    page.press("ArrowLeft", alt=True)
    check(page.run(LAST) == "A.", "no step back")
    page.press("ArrowRight", alt=True)
    check(page.run(LAST) == "B.", "no step forward")
    page.press("KeyE", alt=True)
    page.until("document.activeElement.closest('.edit')")
    page.type(" and two?")
    page.press("KeyE", alt=True)
    check(page.run("document.querySelector('.edit textarea').value") == "One? and two?", "the same key takes the edit away")
    page.press("Escape")
    page.press("KeyT", alt=True)
    page.until("document.activeElement.classList.contains('token')")
    page.press("KeyN", alt=True)
    check(page.run(TURNS) == 0, "no new chat")
    # An idea leaves what stands in the box.
    page.type("Not sent")
    page.run("attach([new File(['a file'], 'notes.txt')])")
    script(page, [["content", "C."]], "stop", 10)
    page.click(".ideas button")
    page.until(f"{TURNS} === 2")
    settle(page)
    kept = "[turns[0].files, box.value, attached.length, now.chat.draft?.text, newDraft]"
    check(page.run(kept) == [None, "Not sent", 1, "Not sent", None], page.run(kept))
    page.run("store.remove(now.chat.id); chats.delete(now.chat.id); box.value = ''; attached = []; now = newTalk(); show(null)")
    page.press("ArrowDown", alt=True)
    page.until(f"{TURNS} === 2")
    page.press("KeyB", ctrl=True)
    check(page.run("document.body.classList.contains('with-chats')") == is_narrow(page), "the list stays")
    page.press("KeyK", ctrl=True)
    page.until("document.activeElement === search")
    page.type("One")
    page.until(f"{LISTED}.length >= 1")
    page.press("Escape")
    page.press("KeyS", alt=True)
    page.until("dialog.open")
    page.press("Escape")
    # What Tab reaches can be seen to have the focus, and nothing keeps it.
    page.until("!dialog.open")
    page.run("window.reached = new Set(); 0")
    for _ in range(60):
        page.press("Tab")
        page.run("document.activeElement !== document.body && reached.add(document.activeElement.className || document.activeElement.textContent)")
    check(page.run("['toggle', 'new', 'set', 'export', 'main send'].every(name => reached.has(name) || name === 'main send')"), "not reached:", page.run("[...reached]"))
    leave(page, server, "the keyboard")


def a_key_is_asked_for(browser):
    server = Server("--api-key", "open-sesame")
    try:
        for path in ("/", "/blocks.html"):
            page = browser.page()
            page.go(server.url + path)
            page.until("!document.querySelector('.key').hidden")
            check("key" in page.run("document.querySelector('.key label').textContent"), "no word of a key")
            if path == "/":
                shot(page, "key")
                no_overflow(page, "the chat")
                page.click("#key-now")
                page.type("wrong")
                page.press("Enter")
                page.until("/not accepted/.test(document.querySelector('.key label').textContent)")
            page.click("#key-now")
            page.type("open-sesame")
            page.press("Enter")
            page.until("document.querySelector('.key').hidden && document.querySelector('.bar .model').textContent")
            if path == "/":
                page.click("textarea")
                page.type("Hello")
                page.press("Enter")
                page.until(TURNS + " === 2")
                settle(page)
                check(page.run(LAST), "no answer with the key")
            else:
                page.until("document.querySelector('.state').textContent === 'live'")
            page.run("localStorage.clear(); 0")
            refused = [c for c in page.complaints if "401" not in c]
            check(not refused, refused)
    finally:
        server.close()
    # A server that is gone is said, too.
    page = browser.page()
    server = Server()
    reload(page, server)
    server.close()
    page.type("Hello")
    page.press("Enter")
    page.until("document.querySelector('.fault')")
    check(page.run("document.querySelector('.fault').textContent") == "The server cannot be reached.", page.run("document.querySelector('.fault').textContent"))


def a_missing_template_is_said(browser, server):
    page = opened(browser, server)
    check(page.run("document.querySelector('.notice').hidden"), "a note about a template that is there")
    bare = Server("-m", os.path.join(ROOT, "tests", "data", "models", "gpt2-F32.gguf"))
    try:
        page.go(bare.url + "/")
        page.until("!document.querySelector('.notice').hidden")
        check("no chat template" in page.run("document.querySelector('.notice').textContent"), "no word of the template")
        shot(page, "no-template")
        no_overflow(page, "the chat")
    finally:
        bare.close()


TESTS = [
    a_question_is_answered_and_another_turn_follows, an_answer_is_stopped, settings_reach_the_server,
    a_full_context_goes_on_without_the_oldest, every_answer_keeps_its_copy, a_context_that_is_nearly_full_is_said,
    settings_have_names_and_the_page_a_theme, several_models_are_chosen_from, files_go_with_a_message, tools_are_cards, thinking_is_ended_by_the_reader,
    a_full_context_is_said_ahead, the_keyboard_does_everything, a_key_is_asked_for, a_missing_template_is_said,
]
