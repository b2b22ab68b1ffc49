"""Drives a headless Chromium through its debugging pipe. Needs only Python's standard library."""
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
import base64


def find_browser():
    for name in ("chromium", "google-chrome"):
        if path := shutil.which(name):
            return path
    return None


def name_of(look):
    return f"{look[0]}-{'dark' if look[-1] else 'light'}"


class Browser:
    def __init__(self, *more, look=(1400, False)):
        self.look = look  # of its pages: their width, and whether they are dark
        self.profile = tempfile.mkdtemp(prefix="quire-browser-")
        to_read, self.out = os.pipe()
        self.into, to_write = os.pipe()

        def pipes():  # Chromium reads commands from 3 and writes answers to 4
            a, b = os.dup(to_read), os.dup(to_write)
            os.dup2(a, 3)
            os.dup2(b, 4)

        arguments = [find_browser(), "--headless", "--remote-debugging-pipe", f"--user-data-dir={self.profile}", "--no-first-run",
                     "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--disable-background-networking", *more]
        if os.geteuid() == 0:
            arguments.append("--no-sandbox")
        self.process = subprocess.Popen(arguments, preexec_fn=pipes, pass_fds=(3, 4), stdin=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(to_write)
        self.n = 0
        self.lock = threading.Lock()
        self.answers = {}  # id → queue
        self.pages = {}    # session → Page
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        text = b""
        while True:
            try:
                piece = os.read(self.into, 1 << 20)
            except OSError:
                return
            if not piece:
                return
            text += piece
            *messages, text = text.split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    with self.lock:
                        box = self.answers.pop(message["id"], None)
                    if box:
                        box.put(message)
                elif page := self.pages.get(message.get("sessionId")):
                    page.hear(message["method"], message["params"])

    def call(self, method, session=None, **params):
        with self.lock:
            self.n += 1
            number, box = self.n, queue.Queue()
            self.answers[number] = box
        command = {"id": number, "method": method, "params": params}
        if session:
            command["sessionId"] = session
        data = json.dumps(command).encode() + b"\0"
        while data:
            data = data[os.write(self.out, data):]
        try:
            answer = box.get(timeout=120)
        except queue.Empty:
            raise TimeoutError(f"{method}: no answer") from None
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def page(self, width=None, height=900, dark=None):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session, target)
        for domain in ("Runtime", "Log", "Page", "Network", "Audits"):
            page.call(domain + ".enable")
        page.own = width or self.look[0], height, self.look[1] if dark is None else dark
        page.look()
        return page

    def close(self):
        try:
            self.call("Browser.close")
            self.process.wait(20)
        except Exception:
            self.process.kill()
        shutil.rmtree(self.profile, ignore_errors=True)


class Page:
    def __init__(self, browser, session, target):
        self.browser, self.session, self.target = browser, session, target
        self.complaints = []  # of the console: errors, exceptions, violations of the policy
        self.addresses = []   # that were asked for
        self.loaded = threading.Event()

    def hear(self, method, params):
        if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"] + " " + params["entry"].get("url", ""))
        elif method == "Audits.issueAdded" and params["issue"]["code"] == "ContentSecurityPolicyIssue":
            self.complaints.append("policy: " + json.dumps(params["issue"]["details"]))
        elif method == "Network.requestWillBeSent":
            self.addresses.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self.loaded.set()

    def call(self, method, **params):
        return self.browser.call(method, self.session, **params)

    def look(self, *other):  # width, height and whether it is dark; without them the look in which the page was opened
        width, height, dark = other or self.own
        self.name = name_of((width, dark))
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def go(self, url):
        self.loaded.clear()
        self.call("Page.navigate", url=url)
        if not self.loaded.wait(30):
            raise TimeoutError(url)

    def run(self, expression):  # JavaScript; its value
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"].get("exception", {}).get("description", expression))
        return result["result"].get("value")

    def until(self, expression, seconds=60):
        end = time.monotonic() + seconds
        while not self.run(f"!!({expression})"):
            if time.monotonic() > end:
                raise TimeoutError(expression)
            time.sleep(0.02)

    def type(self, text):
        self.call("Input.insertText", text=text)

    def press(self, key, shift=False, alt=False, ctrl=False):  # KeyE and the like: a letter's place
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "ArrowUp": 38, "ArrowDown": 40, "?": 191}
        letter = key[3:].lower() if key.startswith("Key") else None
        event = {"key": letter or key, "code": key, "windowsVirtualKeyCode": ord(letter.upper()) if letter else codes[key],
                 "modifiers": (1 if alt else 0) + (2 if ctrl else 0) + (8 if shift else 0)}
        if key in ("Enter", "?"):
            event["text"] = "\r" if key == "Enter" else key
        self.call("Input.dispatchKeyEvent", type="keyDown", **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **{k: v for k, v in event.items() if k != "text"})

    def middle(self, selector):
        self.until(f"document.querySelector({json.dumps(selector)})", 10)
        return self.run(f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'nearest'}}); "
                        "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()")

    def click(self, selector):
        end = time.monotonic() + 5  # what moves, or has yet to be drawn, may cover it for a while
        x, y = self.middle(selector)
        while not self.run(f"document.querySelector({json.dumps(selector)}).contains(document.elementFromPoint({x}, {y}))"):
            if time.monotonic() > end:
                raise RuntimeError(f"{selector} is hidden or covered: a click does not reach it")
            time.sleep(0.05)
            x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def move(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path):
        data = self.call("Page.captureScreenshot", format="png")["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))
