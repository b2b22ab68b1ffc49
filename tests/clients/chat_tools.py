"""What the claims about the page of the chat share."""
import json

from page_tools import TURNS


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


def ask(page, text, *answer):
    """Asks, and waits for the answer; `answer`: what SCRIPTED gives."""
    if answer:
        page.run(f"script.push({json.dumps(answer)}); 0")
    before = page.run("turns.length - (turns.at(-1)?.content || turns.at(-1)?.reasoning ? 0 : turns.length && 2)")  # an empty answer is left out
    page.run("box.focus(); 0")
    page.type(text)
    page.press("Enter")
    page.until(f"{TURNS} === {before + 2}")


LISTED = "[...document.querySelectorAll('.chats .open .title')].map(e => e.textContent)"
