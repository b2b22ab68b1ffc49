"""What the claims about the page of the chat share."""
import json

from page_tools import READY, TURNS, clean, settle


# Answers the page's requests in the server's place: of window.script the next answer, a list of [reasoning or content, text], the
# finish reason, and the tokens of the prompt. What was asked goes to window.asked.
SCRIPTED = """window.script = []; window.asked = []; { const real = window.fetch; window.fetch = async (path, options) => {
    if (!/completions/.test(path) || !script.length) return real(path, options);
    asked.push(JSON.parse(options.body));
    const [pieces, reason, prompt] = script.shift(), text = new TextEncoder(), usage = n => ({prompt_tokens: prompt, completion_tokens: n, total_tokens: prompt + n});
    const event = (delta, n, reason = null) => text.encode("data: " + JSON.stringify({choices: [{index: 0, delta, finish_reason: reason}], usage: usage(n)}) + "\\n\\n");
    return new Response(new ReadableStream({async start(c) {
        for (const [i, [name, piece]] of pieces.entries()) {
            while (window.held && i === window.held) await new Promise(done => setTimeout(done, 20));
            c.enqueue(event({[name]: piece}, i + 1));
        }
        c.enqueue(event({}, pieces.length, reason));
        c.close();
    }}));
}; }"""


def opened(browser, server, scripted=False):
    """The page of the chat."""
    page = browser.page()
    if scripted:
        page.call("Page.addScriptToEvaluateOnNewDocument", source=SCRIPTED)
    page.go(server.url + "/")
    page.until(READY)
    return page


def is_narrow(page):
    """The list of conversations covers the talk, and is closed at first."""
    return page.own[0] < 900


def open_list(page):
    """Shows the list of conversations, where it is not seen."""
    if not page.run("document.body.classList.contains('with-chats')"):
        page.click(".toggle")


def reload(page, server):
    page.go(server.url + "/")
    page.until(READY)


def leave(page, server, what):
    """The next test finds no settings of this one."""
    page.run("localStorage.clear(); 0")
    clean(page, server, what)


def forget_all(page):
    """Of what other tests left, no conversation is listed."""
    page.run("(async () => { for (const id of [...chats.keys()]) await store.remove(id); chats.clear(); await show(null); })()")


def script(page, pieces, reason, prompt):
    """The next answer that SCRIPTED gives."""
    page.run(f"script.push({json.dumps([pieces, reason, prompt])}); 0")


def act(page, name, nth=-1):
    """A button below an answer."""
    page.run(f"[...[...document.querySelectorAll('.turn.assistant')].at({nth}).querySelectorAll('.foot > button')].find(b => b.textContent === {json.dumps(name)}).click()")


def exchange(page, text, *answer):
    """Asks, and waits until the answer is complete; `answer`: what SCRIPTED gives."""
    ask(page, text, *answer)
    settle(page)


def ask(page, text, *answer):
    """Asks, and waits for the answer to begin; `answer`: what SCRIPTED gives."""
    if answer:
        script(page, *answer)
    before = page.run("turns.length - (turns.at(-1)?.content || turns.at(-1)?.reasoning ? 0 : turns.length && 2)")  # an empty answer is left out
    page.run("box.focus(); 0")
    page.type(text)
    page.press("Enter")
    page.until(f"{TURNS} === {before + 2}")


LISTED = "[...document.querySelectorAll('.chats .open .title')].map(e => e.textContent)"
