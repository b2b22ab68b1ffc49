"""Claims about the page of the chat, for pages.py: what is kept, branches, and other answers to one question."""
import json
import re
import tempfile
import time

from chat_tools import LISTED, SCRIPTED, act, ask, exchange, forget_all, is_narrow, leave, open_list, opened, reload, script
from page_tools import Server, check, TURNS, BUSY, LAST, NOTE, settle, setting, Busy, shot, presentable, readable, no_overflow, clean


def a_token_has_alternatives(browser, server):
    page = opened(browser, server)
    exchange(page, "What is paged attention?")
    whole = page.run("turns.at(-1).content")
    act(page, "Tokens")
    page.until("document.querySelector('.tokens')")
    check(page.run("[...document.querySelectorAll('.token:not(.end)')].map(e => e.textContent).join('')") == whole, "the tokens are another text")
    # By the keyboard alone: the third token's alternatives, the first of which begins a branch.
    for key in ("ArrowRight", "ArrowRight", "Enter"):
        page.press(key)
    page.until("document.querySelector('.alternatives .percent')")
    before = page.run("[...document.querySelectorAll('.token')].slice(0, 2).map(e => e.textContent).join('')")
    question = {"role": "user", "content": "What is paged attention?"}
    alone = server.post("/v1/chat/completions", messages=[question, {"role": "assistant", "content": before}], max_tokens=1, logprobs=True, top_logprobs=12, temperature=0)
    tops = [t["token"] for t in alone["choices"][0]["logprobs"]["content"][0]["top_logprobs"]]
    shown = page.run("[...document.querySelectorAll('.alternatives .what')].map(e => e.textContent.replaceAll('␣', ' '))")
    check(shown == tops, "shown:", shown, "the API's:", tops)
    cached, all_of_it = map(int, re.search(r"(\d+) of (\d+) tokens came from the cache", page.run("document.querySelector('.alternatives').innerText")).groups())
    check(cached == all_of_it - 1, "the prompt is read again:", cached, all_of_it)
    shot(page, "alternatives")
    readable(page, "alternatives")
    no_overflow(page, "alternatives")
    page.press("Enter")
    page.until("turns.length === 2 && !document.querySelector('.alternatives:popover-open')")
    settle(page)
    check(page.run("turns.at(-1).content").startswith(before + tops[1]) and "cached" in page.run(NOTE), page.run("turns.at(-1).content"))
    check(page.run("now.tree.branches(turns.at(-1)).map(t => t.content)[0]") == whole, "the first answer is gone")
    # An answer cut there is no answer to its request: it cannot be verified. A least number of tokens is none of an alternative.
    verifiable = "[...[...document.querySelectorAll('.turn.assistant')].at(-1).querySelectorAll('.foot > button')].some(b => b.textContent === 'Verify')"
    page.run("branchAt(now, turns.at(-1), 'Paged', null); 0")
    check(page.run(f"turns.at(-1).content === 'Paged' && !{verifiable}"), "what was cut can be verified")
    page.press("ArrowLeft", alt=True)
    page.run("turns.at(-1).made.more = '{\"min_tokens\": 9}'; 0")
    act(page, "Tokens")
    page.until("document.querySelector('.tokens')")
    page.click(".token:nth-child(2)")
    page.until("document.querySelector('.alternatives .percent')")
    page.press("Escape")
    clean(page, server, "tokens")


# The system message goes into the first question, and no text keeps the white space around it.
MERGES = """{% set system = messages[0].content|trim if messages[0].role == 'system' else '' %}{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}
{% if m.role == 'user' and system %}user {{ system }}{% set system = '' %}

{% endif %}{{ m.content | trim }}<|im_end|>
{% endif %}{% endfor %}<|im_start|>assistant
"""


def each_message_shows_what_came_from_the_cache(browser, server):
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
        template.write(MERGES)
        template.flush()
        merging = Server("--chat-template-file", template.name)
        try:
            for at in (server, merging):
                show_the_border(browser, at)
        finally:
            merging.close()


def show_the_border(browser, server):
    page = opened(browser, server)
    system = {"role": "system", "content": "Du bist kurz, höflich 😀 und\nuser"}
    setting(page, system=system["content"], max_tokens=4)
    exchange(page, "user")
    first = [system, {"role": "user", "content": "user"}, {"role": "assistant", "content": page.run("turns[1].content")}]
    page.run("attach([new File(['Some lines, of a file.'], 'a.txt')])")
    exchange(page, "Was ist ein Größenverhältnis?")
    act(page, "Cached")
    page.until("document.querySelector('.origin')")
    second = {"role": "user", "content": "a.txt:\n```\nSome lines, of a file.\n```\n\nWas ist ein Größenverhältnis?"}
    check_origins(page, server, [*first, second])
    presentable(page, "cached", "what was cached")
    # An edit that is not sent does not change it. The key that shows it takes it away.
    page.run("edit(turns[0], views.get(turns[0].id).root); 0")
    page.press("Escape")
    check_origins(page, server, [*first, second])
    page.press("KeyM", alt=True)
    check(not page.run("document.querySelector('.origin, .turn.system')") and page.run(TURNS) == 4, "it stays")
    # Of an answer that goes on, its beginning was in the prompt.
    begun = page.run("turns.at(-1).content")
    act(page, "Continue")
    settle(page)
    act(page, "Cached")
    page.until("document.querySelectorAll('.origin').length === 5")
    check(page.run("document.querySelectorAll('.origin')[4].querySelector('.source').textContent") == page.run("turns.at(-1).content"), "an answer is shown in part")
    check_origins(page, server, [*first, second, {"role": "assistant", "content": begun}])
    # Another end of a question: the border is within its text.
    act(page, "Cached")
    page.run("askInstead(turns[2], 'Was ist ein Größenwahn?'); 0")
    page.until("turns.at(-1).parent && turns.at(-1).content")
    settle(page)
    act(page, "Cached")
    page.until("document.querySelector('.origin .border')")
    mark = page.run("document.querySelector('.origin .border').textContent")
    check(second["content"].startswith(mark) and len(mark) > 40, "the border is behind", mark)
    check_origins(page, server, [*first, {**second, "content": second["content"].replace("verhältnis", "wahn")}])
    # Nothing is told where the server makes another prompt of the messages.
    page.run("turns.at(-1).prompt++; origins = null; drawTalk(); 0")
    act(page, "Cached")
    page.until("/no longer known/.test(document.querySelector('.toast').innerText)")
    check(not page.run("document.querySelector('.origin')"), "it is shown")
    page.run("store.remove(now.chat.id); localStorage.clear(); 0")
    clean(page, server, "what was cached")


# Of each message the marked text, the whole text and its figures; then the sentence about the prompt.
ORIGINS = """[[...document.querySelectorAll('.origin')].map(e => [e.querySelector('mark')?.textContent ?? '', e.querySelector('.source').textContent, e.querySelector('.told').textContent]),
    document.querySelector('.origins-note').textContent]"""


def check_origins(page, server, messages):
    """The oracle: the bytes of the first tokens of the prompt. The marked texts are all that they have of the messages."""
    cached = page.run("turns.at(-1).cached")
    pieces = [t["piece"] for t in server.post("/tokenize", messages=messages, with_pieces=True)["tokens"]]
    front = b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in pieces[:cached]).decode(errors="ignore")
    shown, note = page.run(ORIGINS)
    check(note.startswith(f"{cached} of the {len(pieces)} prompt tokens came from the cache"), note)
    check(len(shown) == len(messages), "shown:", shown)
    at = 0
    for (mark, text, told), message in zip(shown, messages):
        whole = message["content"]
        check(text.startswith(whole), "another text:", text)
        found = front.find(whole.strip(), at)
        if found >= 0:
            check(mark == whole and re.match(r"(\d+) of \1 token", told), whole, "is cached, marked:", mark, told)
            at = found + len(whole.strip())
        elif mark:
            check(whole.startswith(mark) and front[at:].endswith(mark) and re.match(r"[1-9]\d* of ", told), mark, "is not the end of", front)
            at = len(front)
        else:
            check(told.startswith("0 of ") and not front[at:].endswith(whole[:3]), whole, "is cached in part:", front)


def the_border_lies_in_front_of_a_broken_character(browser, server):
    page = opened(browser, server)
    ends = lambda tokens, text: page.run(f"endsOf({json.dumps([{'piece': p} for p in tokens])}, new TextEncoder().encode({json.dumps(text)}))")
    check(ends(["<s>", " a", [240, 159], [152, 128], "b"], "a😀b") == [0, 1, 3, 5, 6], ends(["<s>", " a", [240, 159], [152, 128], "b"], "a😀b"))
    for tokens, text in ((["a", "c"], "ab"), (["a"], "ab"), (["a", "b", "c"], "ab"), (["<s>", "<s>", "a"], "a")):
        check(ends(tokens, text) is None, tokens, "are no tokens of", text)
    clean(page, server, "borders")


def the_same_answer_comes_again(browser, server):
    page = opened(browser, server)
    setting(page, temperature=2, max_tokens=40)
    with Busy(server):
        exchange(page, "Tell me a story.")
        act(page, "Verify")
        page.until("document.querySelector('.verified, .differs')")
    check(re.fullmatch(r"✓ same again: 40 tokens, seed \d+", page.run("document.querySelector('.verified').innerText")), page.run("document.querySelector('.talk').innerText"))
    # It can be stopped.
    page.run("delete turns.at(-1).verified; redraw(turns.at(-1)); 0")
    with Busy(server):
        act(page, "Verify")
        page.until("document.querySelector('.send').textContent === 'Stop'")
        page.press("Escape")
        page.until("document.querySelector('.send').textContent === 'Send' && [...document.querySelectorAll('.foot button')].some(b => b.textContent === 'Verify' && !b.disabled)")
    check(not page.run("document.querySelector('.verified, .differs')") and page.run("document.querySelector('.toast').hidden"), "a stop is told as something else")
    # Another text is told.
    page.run("delete turns.at(-1).verified; turns.at(-1).content += '.'; redraw(turns.at(-1))")
    act(page, "Verify")
    page.until("document.querySelector('.differs')")
    leave(page, server, "the same again")


def settings_stand_beside_each_other(browser, server):
    page = opened(browser, server)
    exchange(page, "What is paged attention?")
    act(page, "Compare")
    page.until("document.querySelector('dialog.settings').open")
    page.run("document.querySelector('dialog [name=temperature]').value = '1.5'; document.querySelector('dialog [name=seed]').value = '5'")
    page.click("dialog [value=save]")
    page.until("document.querySelectorAll('.pair .turn').length === 2")
    settle(page)
    heads = page.run("[...document.querySelectorAll('.pair .head span:first-child')].map(e => e.innerText)")
    check(heads == ["temperature 0", "temperature 1.5"], heads)
    alone = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "What is paged attention?"}], temperature=1.5, seed=5)
    check(page.run(LAST) == alone["choices"][0]["message"]["content"], "another answer than the API's")
    note = re.search(r"(\d+) prompt tokens \((\d+) cached\)", page.run("[...document.querySelectorAll('.pair .note')].at(-1).innerText"))
    check(note and int(note[2]) == int(note[1]) - 1, "the prompt is not shared")
    presentable(page, "beside", "a pair")
    page.run("[...document.querySelectorAll('.pair button')].find(b => b.textContent === 'Go on with this').click()")
    exchange(page, "Why?")
    check(page.run("turns[1].made.temperature") == 1.5, "it went on with the other")
    check(page.run("now.chat.settings.temperature ?? null") is None, "the conversation's own settings changed")
    clean(page, server, "a pair")


def a_reload_loses_neither_question_nor_answer(browser, server):
    page = opened(browser, server)
    setting(page, temperature=3, seed=7, max_tokens=400)
    with Busy(server):
        page.type("Tell me a story.")
        page.press("Enter")
        page.until(f"{BUSY} && {LAST}.length > 20")
        there = page.run("turns.at(-1).content")
        page.go(server.url + "/")
        page.until(TURNS)
        check(page.run(TURNS) == 2 and "Tell me a story." in page.run("document.querySelector('.turn.user').innerText"), "the question is gone")
        kept = page.run("turns.at(-1).content")
        check(kept.startswith(there), "the answer is gone:", kept)
        check("interrupted" in page.run(NOTE), page.run(NOTE))
        shot(page, "interrupted")
        act(page, "Continue")
        page.until(f"turns.at(-1).content.length > {len(kept) + 20}")
        check(page.run("turns.at(-1).content").startswith(kept), "it does not go on where it broke off")
        page.press("Escape")
        settle(page)
        check("stopped" in page.run(NOTE) and "interrupted" not in page.run(NOTE), page.run(NOTE))
        # Before the first word, too; and it can be asked again.
        page.click(".new")
        page.type("Tell me another.")
        page.press("Enter")
        page.go(server.url + "/")
        page.until(TURNS)
        check(page.run(TURNS) == 2 and "Tell me another." in page.run("document.querySelector('.turn.user').innerText"), "the question is gone")
    act(page, "Try again")
    page.until(BUSY)
    settle(page)
    check(page.run(TURNS) == 2 and page.run(LAST), "it is not asked again")
    leave(page, server, "a reload")


def what_is_not_sent_is_kept(browser, server):
    page = opened(browser, server, scripted=True)
    forget_all(page)
    draft = "[box.value, attached.map(f => f.text).join()]"
    page.run("attach([new File(['a file'], 'notes.txt')])")
    page.type("A draft")
    reload(page, server)
    check(page.run(draft) == ["A draft", "a file"], "after a reload:", page.run(draft))
    other = opened(browser, server)
    check(other.run(draft) == ["A draft", "a file"], "in a new tab:", other.run(draft))
    page.call("Page.bringToFront")
    # Sent, it is no draft any more; each conversation has its own.
    page.run(f"script.push({json.dumps([[['content', 'An apple.']], 'stop', 10])}); box.focus(); 0")
    page.press("Enter")
    page.until(f"{TURNS} === 2")
    settle(page)
    page.type("Of the first")
    page.click(".new")
    check(page.run(draft) == ["", ""], "a new conversation begins with", page.run(draft))
    exchange(page, "Second question", [["content", "A pear."]], "stop", 10)
    page.press("KeyE", alt=True)
    page.run("{ const area = document.querySelector('.edit textarea'); area.value = 'Second, edited'; area.oninput(); } 0")
    open_list(page)
    page.click(".chats li:nth-child(2) .open")
    page.until("box.value === 'Of the first'")
    page.go(server.url + "/")
    page.until("box.value === 'Of the first'")
    open_list(page)
    page.click(".chats li:nth-child(1) .open")
    page.until("document.querySelector('.edit textarea')?.value === 'Second, edited'")
    page.go(server.url + "/")
    page.until("document.querySelector('.edit textarea')?.value === 'Second, edited'")
    check('"draft"' not in page.run("(async () => { let text; URL.createObjectURL = b => { text = b.text(); return 'data:,'; }; HTMLAnchorElement.prototype.click = () => {}; await exportChats(); return text; })()"), "a draft is exported")
    page.run("document.querySelector('.edit .row button').click(); 0")
    check(not page.run("!!document.querySelector('.edit')"), "it is still edited")
    # Each of two that are deleted can be had back.
    choose(page, "A draft", "Delete")
    choose(page, "Second", "Delete")
    check(page.run("document.querySelectorAll('.toast button').length") == 2 and page.run(LISTED) == [], page.run("document.querySelector('.toast').innerText"))
    shot(page, "undo")
    page.run("toast('x'.repeat(200), 'Undo', () => {}); 0")
    check(page.run("document.querySelector('.toast .line:last-child button').getBoundingClientRect().right < innerWidth"), "Undo is outside of the window")
    page.run("document.querySelector('.toast .line:last-child').remove()")
    page.click(".toast .line:first-child button")
    page.until(f"{LISTED}.join() === 'A draft' && box.value === 'Of the first'")
    page.click(".toast button")
    page.until(f"{LISTED}.length === 2 && document.querySelector('.toast').hidden")
    page.run("box.value = ''; keepDraft(); 0")
    clean(page, server, "drafts")


def another_tab_follows_an_answer(browser, server):
    tabs = []
    for _ in range(2):
        tabs.append(tab := browser.page())
        tab.call("Page.addScriptToEvaluateOnNewDocument", source=SCRIPTED)
        reload(tab, server)
    page, other = tabs
    page.call("Page.bringToFront")
    page.run("window.held = 2; 0")
    ask(page, "Followed?", [["content", "Some "], ["content", "words "], ["content", "more."]], "stop", 10)
    page.until(f"{LAST} === 'Some words'")
    other.until("[...chats.values()].some(c => c.title === 'Followed?')")
    other.run("show([...chats.values()].find(c => c.title === 'Followed?').id)")
    other.until("turns.length === 2 && /answering in another tab/.test(document.querySelector('.talk').innerText)")
    buttons = "[...document.querySelectorAll('.turn.assistant .foot > button')].map(b => b.textContent).join()"
    check(other.run(buttons) == "" and other.run("send.textContent") == "Stop", "another tab offers", other.run(buttons))
    shot(other, "elsewhere")
    page.run("window.held = 0; 0")
    settle(page)
    other.until("turns.at(-1).content === 'Some words more.' && !document.querySelector('.turn.busy') && send.textContent === 'Send'")
    check("Verify" in other.run(buttons), "it stays busy:", other.run(buttons))
    # It can be stopped from there; and a tab that is closed leaves an answer that can go on.
    for how in ("stop", "close"):
        page.run("window.held = 1; 0")
        ask(page, "Again?", [["content", "Half "], ["content", "and half."]], "stop", 10)
        other.until("/answering in another tab/.test(document.querySelector('.talk').innerText)")
        if how == "stop":
            other.run("stop()")
            page.until("[...runs.values()].every(run => run.controller.signal.aborted)")
            page.run("window.held = 0; 0")
            settle(page)
            other.until("!document.querySelector('.turn.busy')")
        else:
            time.sleep(0.6)  # what has come is kept
            page.run("setTimeout(() => location.href = 'about:blank')")
            other.until("/interrupted/.test(document.querySelector('.talk').innerText) && !document.querySelector('.turn.busy')")
    clean(other, server, "another tab")


def many_answers_wait_for_each_other(browser, server):
    page = opened(browser, server, scripted=True)
    page.run("window.held = 1; 0")
    for i in range(7):
        page.click(".new")
        ask(page, f"Number {i}", [["content", "One "], ["content", "two."]], "stop", 10)
        if i < 5:
            page.until("turns.at(-1).content")
        else:
            page.until("/Waits for another answer/.test(document.querySelector('.talk').innerText)")
    check(page.run("asked.length") == 5, "the seventh was sent")
    page.press("Escape")
    settle(page)
    open_list(page)
    page.click(".chats li:nth-child(2) .open")
    page.run("window.held = 0; 0")
    page.until("runs.size === 0")
    check(page.run(LAST) == "One two." and page.run("asked.length") == 6 and page.run("streams") == 0, page.run(LAST), page.run("asked.length"))
    clean(page, server, "many answers")


def choose(page, title, name):
    """What the menu of a listed conversation offers."""
    open_list(page)
    page.run(f"[...document.querySelectorAll('.chats li')].find(e => e.innerText.startsWith({json.dumps(title)})).querySelector('.more').click()")
    page.run(f"[...document.querySelectorAll('.menu button')].find(b => b.textContent === {json.dumps(name)}).click()")


def conversations_are_kept(browser, server):
    page = opened(browser, server, scripted=True)
    forget_all(page)
    for question, reply in (("First question", "An apple."), ("Second question", "A pear, and more."), ("Third question", "A plum.")):
        page.click(".new")
        exchange(page, question, [["content", reply]], "stop", 10)
    check(page.run(LISTED) == ["Third question", "Second question", "First question"], page.run(LISTED))
    choose(page, "First", "Pin")
    check(page.run(LISTED) == ["First question", "Third question", "Second question"], "pinned:", page.run(LISTED))
    choose(page, "Second", "Rename")
    page.type("Of fruit")
    page.press("Enter")
    page.until(f"{LISTED}.includes('Of fruit')")
    # They are there in another tab, and after a reload.
    other = opened(browser, server)
    check(other.run(LISTED) == ["First question", "Third question", "Of fruit"] and other.run(TURNS) == 0, "another tab lists", other.run(LISTED))
    open_list(other)
    shot(other, "chats")
    readable(other, "the list")
    other.click(".chats .open")
    other.until(f"{TURNS} === 2 && document.body.classList.contains('with-chats') !== {json.dumps(is_narrow(other))}")
    # Search looks at titles and texts.
    for word, wanted in (("FRUIT", ["Of fruit"]), ("pear", ["Of fruit"]), ("question", ["First question", "Third question", "Of fruit"]), ("nowhere", [])):
        page.run(f"search.value = {json.dumps(word)}; search.oninput(); 0")
        page.until(f"JSON.stringify({LISTED}) === {json.dumps(json.dumps(wanted, separators=(',', ':')))}")
    page.run("search.value = ''; search.oninput(); 0")
    page.until(f"{LISTED}.length === 3")
    # Deleted, and had back; deleted, and gone.
    choose(page, "Third", "Delete")
    check("deleted" in page.run("document.querySelector('.toast').innerText") and len(page.run(LISTED)) == 2 and page.run(TURNS) == 0, "it is not deleted")
    other.until(f"{LISTED}.length === 2")
    page.click(".toast button")
    page.until(f"{LISTED}.length === 3 && {TURNS} === 2")
    choose(page, "Third", "Delete")
    page.call("Page.bringToFront")
    reload(page, server)
    check(page.run(LISTED) == ["First question", "Of fruit"], "after a reload:", page.run(LISTED))
    # As a file, and back; a file of another kind is refused.
    page.run("window.files = []; URL.createObjectURL = blob => { files.push(blob); return 'data:,'; }; HTMLAnchorElement.prototype.click = () => {}; 0")
    open_list(page)
    page.click(".export")
    page.until("files.length")
    text = page.run("files[0].text()")
    file = json.loads(text)
    check(len(file["chats"]) == 2 and len(file["messages"]) == 4, "the file has", file)
    page.run(f"importChats({json.dumps(text)})")
    page.until(f"{LISTED}.length === 4")
    check(sorted(page.run(LISTED)) == ["First question"] * 2 + ["Of fruit"] * 2, page.run(LISTED))
    for bad in ("no JSON", "[]", "{}", '{"quire":"conversations","chats":[{}],"messages":[null,{"id":1}]}'):
        page.run(f"importChats({json.dumps(bad)})")
    check(len(page.run(LISTED)) == 4, "something came of a bad file")
    no_overflow(page, "the list")
    clean(page, server, "the list")
    clean(other, server, "the list of another tab")


def the_list_keeps_what_is_done_in_it(browser, server):
    page = opened(browser, server, scripted=True)
    forget_all(page)
    for name in ("First", "Second", "Third"):
        page.click(".new")
        exchange(page, name, [["content", "An apple."]], "stop", 10)
    # An answer of another conversation comes: what is sought, a title being edited and the focus stay.
    page.run("window.held = 1; 0")
    page.click(".new")
    page.run("attach([new File(['a quince'], 'fruit.txt')])")
    ask(page, "Fourth", [["content", "Some "], ["content", "words."]], "stop", 10)
    page.until(BUSY)
    page.run("search.value = 'First'; search.oninput(); 0")
    page.until(f"{LISTED}.join() === 'First'")
    page.run("pin(now.chat); 0")
    check(page.run(LISTED) == ["First"], "what is sought is forgotten:", page.run(LISTED))
    page.run("search.value = 'quince'; search.oninput(); 0")
    page.until(f"{LISTED}.join() === 'Fourth'")
    page.run("search.value = ''; search.oninput(); 0")
    page.until(f"{LISTED}.length === 4")
    choose(page, "Second", "Rename")
    page.type("Half of a ti")
    page.run("window.held = 0; 0")
    page.until("runs.size === 0")
    check(page.run("document.activeElement.tagName") == "INPUT", "the title lost the focus")
    page.type("tle")
    page.press("Enter")
    page.until(f"{LISTED}.includes('Half of a title')")
    page.run("[...list.querySelectorAll('li')].find(e => e.innerText.startsWith('Third')).querySelector('.more').focus(); drawChats(); 0")
    check(page.run("document.activeElement.closest('li')?.innerText.startsWith('Third') && document.activeElement.className === 'more'"), "the focus is lost")
    choose(page, "Third", "Delete")
    check(page.run("document.activeElement !== document.body"), "the focus is nowhere")
    # Esc closes a menu, and stops nothing.
    page.run("window.held = 1; 0")
    ask(page, "Fifth", [["content", "Some "], ["content", "words."]], "stop", 10)
    page.until(BUSY)
    page.run("list.querySelector('.more').click(); 0")
    page.press("Escape")
    check(page.run(f"{BUSY} && !document.querySelector(':popover-open')"), "a closed menu stops the answer")
    page.run("window.held = 0; 0")
    settle(page)
    forget_all(page)
    leave(page, server, "the list")


def two(browser, server, question):
    """Two tabs that show the same conversation."""
    page = opened(browser, server, scripted=True)
    forget_all(page)
    exchange(page, question, [["content", "An apple."]], "stop", 10)
    other = opened(browser, server, scripted=True)
    other.run(f"show({json.dumps(page.run('now.chat.id'))})")
    other.until(f"{TURNS} === 2")
    return page, other


def what_is_deleted_can_be_had_back(browser, server):
    page, other = two(browser, server, "Deleted?")
    page.call("Page.bringToFront")
    # By the tab that deleted it, also after another page was opened; and with all that came of an answer.
    page.run("window.held = 2; 0")
    ask(page, "Half?", [["content", "Half "], ["content", "and "], ["content", "more."]], "stop", 10)
    page.until(f"{LAST} === 'Half and'")
    page.run("discard(now.chat); window.held = 0; 0")
    page.until("!runs.size")
    opened(browser, server)
    page.call("Page.bringToFront")
    page.click(".toast button")
    page.until(f"{TURNS} === 4")
    reload(page, server)
    page.until(f"{TURNS} === 4")
    check(page.run("turns.map(t => t.content).join()").startswith("Deleted?,An apple.,Half?,Half and"), page.run("turns.map(t => t.content)"))
    # By and by it is gone for good.
    page.run("discard(now.chat); 0")
    kept = "(async () => (await store.read('messages')).filter(m => m.content === 'Deleted?').length)()"
    reload(page, server)
    check(page.run(kept) >= 1, "it is gone at once")
    page.run("(async () => { for (const chat of await store.read('chats')) if (chat.deleted) await store.write('chats', {...chat, deleted: 1}); })()")
    reload(page, server)
    page.until(f"{kept}.then(n => n === 0)")
    clean(page, server, "what was deleted")
    clean(other, server, "what another tab deleted")


def an_answer_takes_nothing_back_that_another_tab_does(browser, server):
    page, other = two(browser, server, "Renamed?")
    page.call("Page.bringToFront")
    page.run("window.held = 1; 0")
    ask(page, "More?", [["content", "Some "], ["content", "more."]], "stop", 10)
    page.until(f"{LAST} === 'Some'")
    other.until("turns.length === 4 && /answering in another tab/.test(document.querySelector('.talk').innerText)")
    other.run("rename(now.chat, 'Another name').then(() => pin(now.chat))")
    page.until(f"{LISTED}.includes('Another name') && document.querySelector('.chats .pinned') && document.querySelector('main .title').textContent === 'Another name'")
    page.run("window.held = 0; 0")
    settle(page)
    stored = "(async () => (await store.read('chats')).find(c => c.id === ID))()".replace("ID", json.dumps(page.run("now.chat.id")))
    page.until(f"{stored}.then(c => c.title === 'Another name' && c.pinned)")
    page.until("turns.at(-1).content === 'Some more.'")
    # Deleted there, it stays so.
    page.run("window.held = 1; 0")
    ask(page, "Still?", [["content", "Some "], ["content", "more."]], "stop", 10)
    page.until(f"{LAST} === 'Some'")
    other.until("turns.length === 6")
    other.run("discard(now.chat); 0")
    page.until(f"{TURNS} === 0")
    page.run("window.held = 0; 0")
    page.until("!runs.size")
    check(page.run(LISTED) == [] and page.run(f"{stored}.then(c => !!c.deleted)"), "it is back:", page.run(LISTED))
    clean(page, server, "an answer")
    clean(other, server, "another tab")


def a_tab_hears_of_what_is_written(browser, server):
    page, other = two(browser, server, "Heard?")
    page.call("Page.bringToFront")
    # A message to another tab comes behind the writes of which it tells.
    page.run("(() => { const write = store.write.bind(store);"
             " store.write = async (...all) => { await new Promise(done => setTimeout(done, 300)); return write(...all); }; })()")
    page.run("window.held = 1; 0")
    ask(page, "More?", [["content", "Some "], ["content", "more."]], "stop", 10)
    page.until(f"{LAST} === 'Some'")
    other.until("turns.length === 4", 10)
    page.run("window.held = 0; 0")
    settle(page)
    other.until("turns.at(-1).content === 'Some more.'", 10)
    # A change comes while an earlier one is being read.
    other.run("(() => { const read = store.read.bind(store), look = lookElsewhere, later = ms => new Promise(done => setTimeout(done, ms));"
              " let looks = 0; window.reads = 0;"
              " store.read = async (...all) => { const values = await read(...all); if (all[0] === 'messages' && ++reads === 1) await later(1500); return values; };"
              " lookElsewhere = async () => { if (++looks === 2) await later(3000); return look(); }; })()")
    page.run("pin(now.chat)")
    other.until("reads === 1", 10)
    page.run("now.add(now.chat.leaf, 'user', {content: 'Late.'}); 0")
    other.until("turns.at(-1).content === 'Late.'", 10)
    clean(page, server, "what is written")
    clean(other, server, "what is read")


def a_draft_survives_what_another_tab_asks(browser, server):
    page, other = two(browser, server, "Drafted?")
    other.call("Page.bringToFront")
    other.run("box.focus(); 0")
    other.type("My draft")
    other.until("now.chat.draft?.text === 'My draft'")
    page.call("Page.bringToFront")
    exchange(page, "And then?", [["content", "A pear."]], "stop", 10)
    other.until("turns.length === 4 && turns.at(-1).content === 'A pear.' && !document.querySelector('.turn.busy')")
    other.until("(async () => (await store.read('chats')).find(c => c.id === now.chat.id).draft?.text === 'My draft')()")
    other.call("Page.bringToFront")
    reload(other, server)
    check(other.run("box.value") == "My draft", "the draft is", other.run("box.value"))
    other.run("box.value = ''; keepDraft(); 0")
    clean(page, server, "a question")
    clean(other, server, "a draft")


def odd_files_are_opened(browser, server):
    page = opened(browser, server)
    forget_all(page)
    open_file = "importChats(JSON.stringify({{quire: 'conversations', version: 1, chats: {}, messages: {}}}))".format
    page.run(open_file("[null]", "[]"))
    check("no conversations of quire" in page.run("document.querySelector('.toast').innerText"), page.run("document.querySelector('.toast').innerText"))
    # A message behind none; a number of messages that are not there; the order of the list.
    chats = "[{id: 'a', title: 'Old', changed: 1000}, {id: 'b', title: 'New', changed: 2000}, {id: 'c', title: 'Odd', changed: '3'}]"
    page.run(open_file(chats, """[{id: '1', chat: 'a', parent: 'gone', at: 1, role: 'user', content: 'Q'},
        {id: '2', chat: 'a', parent: '1', at: 2, role: 'assistant', content: 'A', fault: 'Full.', surplus: 99}]"""))
    page.until(f"{TURNS} === 2")
    check(page.run(LISTED) == ["Odd", "New", "Old"], page.run(LISTED))
    page.run("answer = () => {}; document.querySelector('.fault button').click()")
    check(page.run("turns[0].start"), "the button does nothing")
    forget_all(page)
    # A long conversation, without the time of the database.
    seconds = page.run("""(async () => { const at = performance.now(), {write} = store;
        store.write = () => {};
        await importChats(JSON.stringify({quire: 'conversations', chats: [{id: 'l', title: 'Long'}],
            messages: Array.from({length: 20000}, (_, i) => ({id: 'm' + i, chat: 'l', parent: i ? 'm' + (i - 1) : null, at: i + 1, role: 'user', content: ''}))}));
        store.write = write;
        chats.delete(now.chat.id);
        return (performance.now() - at) / 1000; })()""")
    check(seconds < 5, seconds, "s for a long conversation")
    leave(page, server, "odd files")


def a_circle_in_a_file_is_opened(browser, server):
    page = opened(browser, server)
    messages = [{"id": str(i), "chat": "c", "parent": parent, "at": i, "role": "user", "content": f"Q{i}"} for i, parent in enumerate(["1", "0", "1", "3"])]
    page.run(f"importChats({json.dumps(json.dumps({'quire': 'conversations', 'chats': [{'id': 'c', 'title': 'Circle', 'leaf': '0'}], 'messages': messages}))})")
    page.until("now.chat.title === 'Circle'")
    check(page.run("[...now.tree.messages.values()].filter(m => m.parent === null).length") == 2, "a circle stays")
    for key in ("ArrowLeft", "ArrowRight"):
        page.press(key, alt=True)
    check(page.run(TURNS) >= 1, "nothing is shown")
    forget_all(page)
    leave(page, server, "a circle")


def a_file_keeps_all_of_an_answer(browser, server):
    page = opened(browser, server)
    chat = {"id": "c", "title": "All of it", "leaf": "2", "settings": {"temperature": 0.5, "model": "m", "strange": 1}}
    made = {"seed": 7, "temperature": 0.5, "from": "1", "strange": [1]}
    whole = {"id": "2", "chat": "c", "parent": "1", "at": 2, "role": "assistant", "content": "A", "made": made, "parts": 1, "tokens": 9, "prompt": 7, "cached": 3, "begun": 1, "cut": True,
             "ended": True, "open": True, "surplus": 2, "fault": "Full.", "verified": {"same": True, "tokens": 4, "seed": 7}, "beside": "3"}
    odd = {"id": "3", "chat": "c", "parent": "1", "at": 3, "role": "assistant", "content": "B", "made": "x", "verified": {"same": True, "tokens": "<b>"}, "cut": "yes", "surplus": "2", "cached": None}
    file = {"quire": "conversations", "version": 1, "chats": [chat], "messages": [{"id": "1", "chat": "c", "parent": None, "at": 1, "role": "user", "content": "Q"}, whole, odd]}
    page.run(f"importChats({json.dumps(json.dumps(file))})")
    page.until(f"{TURNS} === 3")
    question, answer, other = page.run("[...now.tree.messages.values()]")
    check(answer["made"] == {"seed": 7, "temperature": 0.5, "from": question["id"]} and answer["verified"] == whole["verified"] and answer["beside"] == other["id"], answer)
    check(all(answer[name] == whole[name] for name in ("parts", "tokens", "prompt", "cached", "begun", "cut", "ended", "open", "surplus", "fault")), answer)
    check(not {"made", "verified", "cut", "surplus", "cached"} & other.keys() and page.run("now.chat.settings") == {"temperature": 0.5, "model": "m"}, other)
    check("✓ same again" in page.run("document.querySelector('.talk').innerText"), "what was verified is not shown")
    page.run("store.remove(now.chat.id)")
    clean(page, server, "a file")


def answers_branch(browser, server):
    page = opened(browser, server, scripted=True)
    texts = "turns.map(t => t.content)"
    exchange(page, "One?", [["content", "A."]], "stop", 10)
    page.run("window.first = document.querySelector('.turn'); 0")
    exchange(page, "Two?", [["content", "B."]], "stop", 20)
    check(page.run("first === document.querySelector('.turn')"), "all is drawn again for a question")
    # Another answer is a branch, of which either is shown.
    script(page, [["content", "C."]], "stop", 20)
    page.run("[...document.querySelectorAll('.turn.assistant')].at(-1).querySelectorAll('.foot > button')[1].click()")
    settle(page)
    check(page.run(texts) == ["One?", "A.", "Two?", "C."], page.run(texts))
    branches = "[...document.querySelectorAll('.branches')].map(e => e.innerText.replace(/\\s+/g, '')).filter(Boolean)"
    check(page.run(branches) == ["‹2/2›"], page.run(branches))
    page.click("[aria-label='Previous branch']")
    check(page.run(texts)[-1] == "B." and page.run(branches) == ["‹1/2›"], page.run(texts))
    # An edited question is one, too, with what follows.
    page.run("document.querySelectorAll('.turn.user')[0].querySelectorAll('.foot > button')[1].click()")
    page.run(f"script.push({json.dumps([[['content', 'D.']], 'stop', 10])}); document.querySelector('.edit textarea').value = 'Uno?'; 0")
    page.press("Enter")
    page.until("turns.length === 2 && turns[0].content === 'Uno?'")
    settle(page)
    check(page.run("asked.at(-1).messages") == [{"role": "user", "content": "Uno?"}], page.run("asked.at(-1).messages"))
    shot(page, "branches")
    page.click("[aria-label='Previous branch']")
    check(page.run(texts)[:3] == ["One?", "A.", "Two?"], page.run(texts))
    shown = page.run(texts)
    page.go(server.url + "/")
    page.until(f"{TURNS} === 4")
    check(page.run(texts) == shown, "after a reload:", page.run(texts))
    readable(page, "branches")
    clean(page, server, "branches")


TESTS = [
    a_reload_loses_neither_question_nor_answer, what_is_not_sent_is_kept, another_tab_follows_an_answer, many_answers_wait_for_each_other,
    what_is_deleted_can_be_had_back, an_answer_takes_nothing_back_that_another_tab_does, a_tab_hears_of_what_is_written, a_draft_survives_what_another_tab_asks, odd_files_are_opened,
    the_list_keeps_what_is_done_in_it, a_circle_in_a_file_is_opened, a_file_keeps_all_of_an_answer, conversations_are_kept, answers_branch, a_token_has_alternatives,
    each_message_shows_what_came_from_the_cache, the_border_lies_in_front_of_a_broken_character,
    the_same_answer_comes_again, settings_stand_beside_each_other,
]
