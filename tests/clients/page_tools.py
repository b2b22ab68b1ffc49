"""What the tests of the pages share: a server, what can be read and seen on a page, and its names for scripts."""
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request

ROOT = os.path.normpath(os.path.join(os.path.dirname(__file__), "..", ".."))
SERVER = sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, "server")
BLOCK_VIZ = os.path.join(os.path.dirname(SERVER) or ".", "block-viz")
SHOTS = sys.argv[2] if len(sys.argv) > 2 else os.path.join(ROOT, "build", "pages")
CACHE = tempfile.TemporaryDirectory()  # no test sees the models that the user has fetched
NO_MODELS = {"HF_HOME": os.path.join(CACHE.name, "hf"), "HF_HUB_CACHE": os.path.join(CACHE.name, "hub"), "XDG_CACHE_HOME": CACHE.name}


LOOKS = ((1400, False), (1400, True), (420, False), (420, True))  # the width of a window, and whether it is dark


def once(test):
    """A test that chooses its own looks, or has none, runs in the first look alone."""
    test.once = True
    return test


class Server:
    def __init__(self, *arguments):
        model = [] if "--models-dir" in arguments else ["-m", os.path.join(ROOT, "models", "quire-14m-q8_0.gguf")]
        self.process = subprocess.Popen([SERVER, *model, "--device", "cpu", "--port", "0",
                                         "--no-log", *arguments], stderr=subprocess.PIPE, text=True,
                                        env=os.environ | NO_MODELS)
        for line in self.process.stderr:
            if found := re.search(r"listening on (http://\S+)", line):
                self.url = found[1]
                break
        else:
            raise RuntimeError("the server did not start")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def get(self, path):
        with urllib.request.urlopen(self.url + path) as answer:
            return answer.read().decode()

    def post(self, path, **body):
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def metric(self, name):
        return float(re.search(rf"^{re.escape(name)} (\S+)$", re.sub(r'model_name="[^"]*",engine="0",?', "", self.get("/metrics")).replace("{}", ""), re.M)[1])

    def close(self):
        self.process.terminate()
        self.process.wait(60)


def check(claim, *why):
    if not claim:
        raise AssertionError(" ".join(map(str, why)))


READY = "document.querySelector('.ideas button') && document.activeElement.tagName === 'TEXTAREA'"
TURNS = "document.querySelectorAll('.turn').length"
BUSY = "!!document.querySelector('.turn.busy')"
LAST = "[...document.querySelectorAll('.turn.assistant .text')].at(-1).innerText"
NOTE = "[...document.querySelectorAll('.turn.assistant .foot')].at(-1).innerText"


def settle(page):
    page.until(f"!{BUSY}")


def setting(page, **values):
    page.click(".set")
    page.until("document.querySelector('dialog.settings').open")
    for name, value in values.items():
        page.run(f"document.querySelector('dialog [name={name}]').value = {json.dumps(str(value))}")
    page.click("dialog [value=save]")
    page.until("!document.querySelector('dialog.settings').open && document.activeElement.tagName === 'TEXTAREA'")


class Busy:
    """Others keep the server busy: an answer takes its time."""

    def __init__(self, server):
        self.server, self.over = server, threading.Event()
        self.thread = threading.Thread(target=self.work)

    def work(self):
        while not self.over.is_set():
            self.server.post("/v1/completions", prompt="Hello", n=24, max_tokens=200, ignore_eos=True)

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()


def watch_shifts(page):
    """From the beginning of the next page on; shifts within half a second of an input do not count, as in the metric."""
    page.call("Page.addScriptToEvaluateOnNewDocument", source="""window.shifts = [];
        new PerformanceObserver(list => { for (const e of list.getEntries()) if (!e.hadRecentInput) shifts.push([e.startTime, e.value,
            e.sources.map(s => `${s.node?.className || s.node?.nodeName} ${[s.previousRect, s.currentRect].map(r => [r.x, r.y, r.width, r.height].map(Math.round))}`)]);
        }).observe({type: "layout-shift", buffered: true});""")


def no_shift(page, what):
    """Cumulative layout shift: the largest sum over a window of at most 5 s whose shifts lie less than 1 s apart."""
    worst, total, begin, last = 0, 0, 0, -1e9
    shifts = page.run("shifts")
    for at, value, _ in shifts:
        if at - last > 1000 or at - begin > 5000:
            total, begin = 0, at
        total, last = total + value, at
        worst = max(worst, total)
    print(f"  layout shift of {what}: {worst:.3f}")
    check(worst <= 0.1, what, "shifts by", worst, sorted(shifts, key=lambda s: -s[1])[:3])


# Text that can be seen, its size (exponents are small) and its contrast to what it stands on.
FAINT = """(() => {
    const p = Object.assign(document.createElement("canvas"), {width: 1, height: 1}).getContext("2d", {willReadFrequently: true}), out = new Set();
    const rgb = (color, under) => { p.globalCompositeOperation = "copy"; p.fillStyle = under; p.fillRect(0, 0, 1, 1);
        p.globalCompositeOperation = "source-over"; p.fillStyle = color; p.fillRect(0, 0, 1, 1); return [...p.getImageData(0, 0, 1, 1).data].slice(0, 3); };
    const light = c => c.map(x => (x /= 255) <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4).reduce((sum, x, i) => sum + x * [.2126, .7152, .0722][i], 0);
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const node = walker.currentNode, e = node.parentElement, style = getComputedStyle(e);
        if (!node.data.trim() || !e.checkVisibility() || e.closest(".unseen, script, style, option, select, svg, :disabled")) continue;
        const line = [];
        let opacity = 1;
        for (let a = e; a; a = a.parentElement) { line.unshift(a); opacity *= getComputedStyle(a).opacity; }
        let under = "white";
        for (const a of line) under = `rgb(${rgb(getComputedStyle(a).backgroundColor, under)})`;
        const back = rgb(under, under), front = rgb(style.color, under).map((x, i) => x * opacity + back[i] * (1 - opacity));
        const [a, b] = [light(front), light(back)], size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.6 && style.fontWeight >= 700);
        const contrast = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
        if (contrast < (large ? 3 : 4.5) || size < 12 && !e.closest("math")) out.add(`${contrast.toFixed(2)} ${size}px .${e.className || e.tagName}: ${node.data.trim().slice(0, 30)}`);
    }
    return [...out];
})()"""


def readable(page, what):
    faint = page.run(FAINT)
    check(not faint, what, "is hard to read:", faint)


def no_overflow(page, what):
    wide = page.run("[document.documentElement.scrollWidth, innerWidth]")
    check(wide[0] <= wide[1], what, "is wider than the window:", wide)


def shot(page, name):
    page.screenshot(os.path.join(SHOTS, f"{name}-{page.name}.png"))


def presentable(page, name, what):
    """It is readable and fits, and has a screenshot."""
    shot(page, name)
    readable(page, what)
    no_overflow(page, what)


def clean(page, server, what):
    check(not page.complaints, what, "complains:", page.complaints)
    for address in page.addresses:
        check(address.startswith(server.url) or address.startswith("data:"), what, "asked", address)


def load(server, n=9, tokens=300):
    """Threads whose requests share a pinned prefix and want more blocks than there are; and what went wrong in them."""
    prefix, faults = "You are a friendly assistant that answers briefly. " * 4, []
    server.post("/pin", prompt=prefix)

    def one(i):
        try:
            server.post("/v1/completions", prompt=f"{prefix}A story of {i} blocks and of what they hold:", n=1 + i % 3, max_tokens=tokens, ignore_eos=True, temperature=1)
        except urllib.error.HTTPError as e:
            faults.append(e.read())
    return [threading.Thread(target=one, args=(i,)) for i in range(n)], faults
