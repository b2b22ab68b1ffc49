"""Claims about the accessibility of the pages, for pages.py: axe-core finds nothing serious in any of their states, in both themes, on a
wide window and on a phone. axe-core comes with a Python package, which pages.sh installs into build/axe."""
import glob
import json
import os
import subprocess
import threading

import chat_texts
from chat_tools import ask, exchange, opened
from page_tools import BLOCK_VIZ, LOOKS, ROOT, SHOTS, TURNS, Server, check, clean, once, settle


def axe_source():
    found = glob.glob(os.path.join(ROOT, "build", "axe", "**", "axe.min.js"), recursive=True)
    if not found:
        return None
    with open(found[0], encoding="utf-8") as file:
        return file.read()


class Examiner:
    """Runs axe-core on what a page shows; collects the findings."""

    def __init__(self, page, source):
        self.page, self.found, self.runs = page, set(), 0
        self.source = source

    def look(self, what, width, dark):
        self.page.look(width, 900, dark)
        self.page.until(f"innerWidth === {width}")
        if not self.page.run("!!window.axe"):
            self.page.run(self.source + "; 0")
        # A colour that is on its way is none of either theme.
        self.page.run("Promise.allSettled(document.getAnimations().filter(a => a.effect.getComputedTiming().endTime < 1000).map(a => a.finished)).then(() => 0)")
        result = self.page.run("axe.run(document, {resultTypes: ['violations']}).then(r => r.violations.map(v => "
                               "[v.impact, v.id, v.help, v.nodes.map(n => n.target.join(' ') + ': ' + (n.any[0] ?? n.all[0] ?? n.none[0])?.message)]))")
        self.runs += 1
        for impact, rule, sentence, places in result:
            for place in places[:3]:
                self.found.add((impact, rule, sentence, f"{what}, {width} px, {'dark' if dark else 'light'}: {place}"))

    def everywhere(self, what):
        for width, dark in LOOKS:
            self.look(what, width, dark)
        self.page.look(1400, 900, False)

    def verdict(self, what):
        grave = sorted(f for f in self.found if f[0] in ("serious", "critical"))
        lighter = sorted({f[1] for f in self.found} - {f[1] for f in grave})
        print(f"  axe-core, {what}: {self.runs} looks, {len(grave)} grave findings" + (f"; lighter ones: {', '.join(lighter)}" if lighter else ""))
        check(not grave, "\n    ".join([""] + [f"{impact} {rule} ({sentence}): {place}" for impact, rule, sentence, place in grave[:40]]))


@once  # the looks change at each state: this takes less time than to come to the state in each look
def the_chat_is_accessible(browser, server):
    source = axe_source()
    if not source:
        print("  SKIP: no axe-core in build/axe (tests/clients/pages.sh installs it)")
        return
    page = opened(browser, server, scripted=True)
    it = Examiner(page, source)
    it.everywhere("a new chat")
    chat_texts.given(page, {"role": "user", "content": chat_texts.SHOWN, "files": [{"name": "notes.md", "text": "a"}]},
                     {"role": "assistant", "content": chat_texts.SHOWN + "\n\n" + chat_texts.MATHS, "reasoning": "So *it* is.", "thought": 2, "note": "23 prompt tokens"})
    page.until("document.querySelector('.toast').hidden", 20)
    it.everywhere("a conversation")
    # Branches, tokens and their alternatives.
    page.click(".new")
    exchange(page, "What is paged attention?")
    page.press("KeyR", alt=True)
    page.until("document.querySelectorAll('.branches button').length === 2")
    settle(page)
    page.press("KeyT", alt=True)
    page.until("document.querySelector('.tokens')")
    for width, dark in LOOKS:
        page.look(width, 900, dark)
        page.click(".token:nth-child(3)")
        page.until("document.querySelector('.alternatives .percent')")
        it.look("alternatives", width, dark)
        page.press("Escape")
    page.look(1400, 900, False)
    # Marks of the cached part.
    exchange(page, "And why is that so?")
    page.press("KeyM", alt=True)
    page.until("document.querySelector('.origin mark')")
    it.everywhere("what was cached")
    # An answer beside another one.
    page.press("KeyM", alt=True)
    page.press("KeyC", alt=True)
    page.until("dialog.open")
    it.everywhere("another answer's settings")
    page.click("dialog [value=save]")
    page.until("document.querySelectorAll('.pair .turn').length === 2")
    settle(page)
    it.everywhere("a pair")
    # Thinking, tools and their results.
    page.click(".new")
    page.run("window.held = 1; 0")
    ask(page, "Think.", [["reasoning_content", "Well, "], ["content", "so."]], "stop", 10)
    page.until("document.querySelector('.busy.thinks')")
    it.everywhere("thinking")
    page.run("window.held = 0; 0")
    settle(page)
    exchange(page, "Weather?", [["tool_calls", [{"index": 0, "id": "x", "function": {"name": "weather", "arguments": '{"city":"Ulm"}'}}]]], "tool_calls", 10)
    it.everywhere("a tool's card")
    page.run(f"script.push({json.dumps([[['content', 'It rains.']], 'stop', 20])}); document.querySelector('.call textarea').value = 'rain'; document.querySelector('.calls > button').click()")
    page.until(f"{TURNS} >= 6")
    settle(page)
    page.run("attach([new File(['text'], 'notes.md')])")
    page.press("KeyE", alt=True)
    it.everywhere("an edited question and a file")
    page.press("Escape")
    page.run("attached = []; drawAttached(); 0")
    # Refusals, the menu of a conversation, the toast, the explanation of the gauge.
    page.run("turns.at(-1).fault = 'The context of 256 tokens is full.'; turns.at(-1).surplus = 2; redraw(turns.at(-1)); 0")
    page.run("document.querySelector('.chats .more').click()")
    it.everywhere("the menu")
    page.press("Escape")
    page.run("toast('“A story” is deleted.', 'Undo', () => {}); 0")
    it.everywhere("a toast")
    page.run("document.querySelector('.toast').hidden = true; gauge.click()")
    it.everywhere("the gauge, explained")
    page.press("Escape")
    page.run("placeSidebar(true); 0")
    for width, dark in LOOKS:
        page.look(width, 900, dark)
        page.run("placeSidebar(true); search.value = 'rains'; search.oninput(); 0")
        page.until("document.querySelector('.chats .found')")
        it.look("the list, searched", width, dark)
    page.run("search.value = ''; search.oninput(); 0")
    page.look(1400, 900, False)
    for key, alt, what in (("KeyS", True, "the settings"), ("?", False, "the keys")):
        page.run("document.activeElement.blur()")
        page.press(key, alt=alt)
        page.until("document.querySelector('dialog[open]')")
        it.everywhere(what)
        page.press("Escape")
        page.until("!document.querySelector('dialog[open]')")
    page.run("localStorage.clear(); 0")
    it.verdict("the chat")
    clean(page, server, "the chat")


@once
def the_block_pages_are_accessible(browser):
    source = axe_source()
    if not source:
        print("  SKIP: no axe-core in build/axe (tests/clients/pages.sh installs it)")
        return
    for blocks in ("144", "4000"):
        server = Server("--kv-blocks", blocks, "--swap-blocks", "64", "-np", "16", "--blocks-text")
        try:
            page = browser.page()
            page.go(server.url + "/blocks.html")
            page.until("drawn && document.querySelectorAll('.demos button').length === 4")
            it = Examiner(page, source)
            it.everywhere("an empty pool")
            thread = threading.Thread(target=lambda: server.post("/v1/completions", prompt="A story", n=6, max_tokens=150, ignore_eos=True, temperature=1))
            thread.start()
            page.until("snapshot.sequences.length > 4 && totalsOf(snapshot).used > 20")
            page.click(".pause")
            thread.join()
            page.run("drawing.pool.canvas.focus()")
            page.press("ArrowRight")
            it.everywhere("requests, paused")
            if blocks == "4000":
                page.run("drawing.pool.canvas.focus()")
                page.press("ArrowRight")
                page.press("Enter")
                page.until("!document.querySelector('.back').hidden")
                it.everywhere("looked into")
                page.press("Escape")
            else:
                page.click(".pause")
                page.until("!still")
                page.run("document.querySelectorAll('.demos button')[2].click()")
                page.until("demonstrations.running")
                page.until("!demonstrations.running && totalsOf(snapshot).used === 0", 180)
                page.run("""pause(); timeline.choose(minutes.steps.findLastIndex(step => step.snapshot.sequences.length > 2 &&
                    treeOf(step.snapshot.sequences).children.length > 1)); 0""")
                page.until("document.querySelector('.branch')")
                it.everywhere("beams, rewound")
            it.verdict(f"the pool of {blocks} blocks")
            clean(page, server, "the block page")
        finally:
            server.close()


@once
def what_block_viz_writes_is_accessible(browser):
    source = axe_source()
    if not source:
        print("  SKIP: no axe-core in build/axe (tests/clients/pages.sh installs it)")
        return
    html = os.path.join(SHOTS, "accessible.html")
    subprocess.run([BLOCK_VIZ, "--demo", "fig8", "--html", html], check=True)
    page = browser.page()
    page.go("file://" + os.path.abspath(html) + "#step=2")
    it = Examiner(page, source)
    it.everywhere("the walk-through")
    it.verdict("block-viz")


TESTS = [the_chat_is_accessible, the_block_pages_are_accessible, what_block_viz_writes_is_accessible]
