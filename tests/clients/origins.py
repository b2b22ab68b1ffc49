"""Pages of other origins in a real browser, against ./server without a key: none can do or read anything, by whatever way a page has;
one that --cors-origins names can do all that OpenAI's JavaScript package does.

    tests/clients/origins.py [SERVER]
"""
import http.server
import json
import os
import sys
import threading

sys.path.insert(0, os.path.dirname(__file__))
from browser import Browser
from quire_server import Server

if len(sys.argv) > 1:
    os.environ["QUIRE_SERVER"] = sys.argv[1]


class Blank(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>a page</title>")

    def log_message(self, *_):
        pass


def check(claim, *why):
    if not claim:
        raise AssertionError(" ".join(map(str, why)))


# Each way that a page has to send a request without asking first; what it may read of the answer is nothing.
SEND = """(async (url, body) => {
    const way = %s;
    try { return await way(url, body); } catch (e) { return "failed: " + e; }
})(%s, %s)"""
WAYS = {
    "text/plain": "(u, b) => fetch(u, {method: 'POST', mode: 'no-cors', body: b}).then(r => r.type)",
    "no type": "(u, b) => fetch(u, {method: 'POST', mode: 'no-cors', body: new Blob([b])}).then(r => r.type)",
    "a form's type": "(u, b) => fetch(u, {method: 'POST', mode: 'no-cors', body: b, headers: {'Content-Type': 'application/x-www-form-urlencoded'}}).then(r => r.type)",
    "multipart": "(u, b) => { const f = new FormData(); f.append('x', b); return fetch(u, {method: 'POST', mode: 'no-cors', body: f}).then(r => r.type); }",
    "a beacon": "async (u, b) => { navigator.sendBeacon(u, b); await new Promise(r => setTimeout(r, 300)); return 'sent'; }",
    "no referrer": "(u, b) => fetch(u, {method: 'POST', mode: 'no-cors', body: b, referrerPolicy: 'no-referrer', credentials: 'omit'}).then(r => r.type)",
    "cors": "(u, b) => fetch(u, {method: 'POST', body: b}).then(r => r.text())",
    "cors, json": "(u, b) => fetch(u, {method: 'POST', body: b, headers: {'Content-Type': 'application/json'}}).then(r => r.text())",
    "a form": """async (u, b) => { const at = b.indexOf(':') + 1, f = document.createElement('form'), i = document.createElement('input');
        f.method = 'POST'; f.action = u; f.enctype = 'text/plain'; f.target = 'out'; i.name = b.slice(0, at) + '"x='; i.value = '"}';
        const out = document.createElement('iframe'); out.name = 'out'; f.append(i); document.body.append(out, f);
        const loaded = new Promise(r => { out.onload = r; }); f.submit(); await Promise.race([loaded, new Promise(r => setTimeout(r, 1000))]); return 'sent'; }""",
}


def send(page, way, url, body):
    return page.run(SEND % (WAYS[way], json.dumps(url), json.dumps(json.dumps(body))))


def tokens(server):
    return server.metric("vllm:prompt_tokens_total")


def nothing_goes(page, server, url, what):
    """From where `page` is, to `url`, which is the server's by some name."""
    before = tokens(server)
    for way in WAYS:
        for path, body in ("/pin", {"prompt": "a page pinned this " * 9}), ("/v1/completions", {"prompt": "Hello", "max_tokens": 1}):
            got = send(page, way, url + path, body)
            check("object" not in str(got), what, way, path, "was answered:", got)
    check(tokens(server) == before, what, ": a request ran")
    check(json.loads(server.get("/pins"))["data"] == [], what, ": a prefix was pinned")


ASK = """fetch(%s, {method: %s, headers: %s, body: %s}).then(async r => [r.status, r.headers.get('x-request-id'), await r.text()], e => [0, null, String(e)])"""
# What openai-node sends from a browser.
PACKAGE = {"Accept": "application/json", "Content-Type": "application/json", "Authorization": "Bearer some-key", "OpenAI-Organization": "o",
           "OpenAI-Project": "p", "X-Stainless-Arch": "unknown", "X-Stainless-Lang": "js", "X-Stainless-OS": "Unknown",
           "X-Stainless-Package-Version": "6.0.0", "X-Stainless-Retry-Count": "0", "X-Stainless-Runtime": "browser:chrome",
           "X-Stainless-Runtime-Version": "130.0.0", "X-Stainless-Timeout": "600", "X-Stainless-Helper-Method": "stream"}


def ask(page, url, body=None, headers=None):
    return page.run(ASK % (json.dumps(url), json.dumps("POST" if body else "GET"), json.dumps(headers or {}),
                           json.dumps(json.dumps(body)) if body else "undefined"))


def main():
    other = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Blank)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    origin = f"http://127.0.0.1:{other.server_port}"
    named = f"http://page.example:{other.server_port}"
    browser = Browser("--host-resolver-rules=MAP *.example 127.0.0.1")
    try:
        with Server() as server:
            page = browser.page()
            for start in origin, named:
                page.go(start)
                nothing_goes(page, server, server.url, f"a page of {start}")
                check(ask(page, server.url + "/metrics")[0] == 0, "a foreign page reads the metrics")
                check(ask(page, server.url + "/v1/models")[0] == 0, "a foreign page reads the models")
            # A name that leads here (DNS rebinding): the page and the server are one origin to the browser.
            page.go(f"http://rebound.example:{server.port}/version")
            check("forbidden_host" in page.run("document.body.innerText"), "a rebound name is answered")
            nothing_goes(page, server, f"http://rebound.example:{server.port}", "a rebound page")
            for name in "metrics", "blocks", "props", "v1/models":
                check(ask(page, f"http://rebound.example:{server.port}/{name}")[0] == 403, "a rebound page reads", name)
            # Its own.
            page.go(server.url + "/version")
            for path in "/v1/models", "/metrics", "/blocks":
                check(ask(page, server.url + path)[0] == 200, "the server's own page cannot read", path)
            own = ask(page, server.url + "/v1/completions", {"prompt": "Hello", "max_tokens": 1}, {"Content-Type": "application/json"})
            check(own[0] == 200, "the server's own page cannot ask:", own)

        for keys in (), ("--api-key", "some-key"):
            with Server("--cors-origins", named, *keys) as server:
                server.headers["Authorization"] = "Bearer some-key"
                page = browser.page()
                page.go(named)
                for headers in PACKAGE, {**PACKAGE, "X-Api-Key": "some-key", "X-Of-Tomorrow": "1"}:
                    got = ask(page, server.url + "/v1/chat/completions",
                              {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "stream": True}, headers)
                    check(got[0] == 200 and got[1] and "data: [DONE]" in got[2], "a listed page cannot ask:", got)
                check(ask(page, server.url + "/v1/models", headers=PACKAGE)[0] == 200, "a listed page cannot read the models")
                page.go(origin)
                check(ask(page, server.url + "/v1/models", headers=PACKAGE)[0] == 0, "a page that is not listed reads the models")
                nothing_goes(page, server, server.url, "a page that is not listed")
        print(f"origins: {len(WAYS)} ways to send, from another port, another name and a rebound name: nothing ran; listed pages may")
    finally:
        browser.close()
        other.shutdown()


main()
