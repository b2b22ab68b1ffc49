"""A model hub on this machine that speaks the protocol of huggingface.co, and can misbehave.

    local_hub.py FOLDER     serves FOLDER/USER/NAME/FILE..., prints its port, then a line for each request; ends with its standard input

Files are answered by a redirect to another port (as the hub's storage is another host), which checks that no token comes with it.
What a repository's name holds makes it misbehave, each a fixed number of times, so that a client that is patient gets the file:
"gated" and "private" want the token "good-token"; "cut" ends each body after a third; "stall" sends a third and is silent; "busy" answers
429 with Retry-After once, "broken" 503; "wrong" sends a byte that is not the file's, "refuses" answers 429 always, "norange" knows no
ranges, "slow" takes half a second for each third and "slower" two, "short" says another size than the list; "outside" lists names that lead out of a folder.
"""

import hashlib
import http.server
import json
import os
import re
import sys
import threading
import time
import urllib.parse

TOKEN = "good-token"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    def __init__(self, folder):
        self.folder = folder
        self.lock = threading.Lock()
        self.log = []  # of both ports: (method, path, range, whether a token came)
        self.n_times = {}
        self.servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (h,), {"hub": self})) for h in (Front, Storage)]
        for server in self.servers:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, daemon=True).start()
        self.port, self.storage_port = (server.server_address[1] for server in self.servers)
        self.url = f"http://127.0.0.1:{self.port}"

    def close(self):
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def first_times(self, what, n):
        """Whether `what` happens one of its first n times."""
        with self.lock:
            self.n_times[what] = self.n_times.get(what, 0) + 1
            return self.n_times[what] <= n

    def note(self, handler):
        entry = (handler.command, handler.path, handler.headers.get("Range"), handler.headers.get("Authorization"))
        with self.lock:
            self.log.append(entry)
        if __name__ == "__main__":
            print(*entry, flush=True)

    def files(self, repo):
        top = os.path.join(self.folder, repo)
        return sorted(os.path.relpath(os.path.join(at, f), top) for at, _, names in os.walk(top) for f in names)

    def digest(self, repo, name):
        with open(os.path.join(self.folder, repo, name), "rb") as file:
            data = file.read()
        return hashlib.sha256(data).hexdigest(), data


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def handle(self):
        try:
            super().handle()
        except OSError:
            pass  # the client has gone

    def answer(self, status, body=b"", headers=()):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class Front(Handler):
    def refuse(self, status, code, message):
        self.answer(status, json.dumps({"error": message}).encode(),
                    [("X-Error-Code", code), ("X-Error-Message", message), ("Content-Type", "application/json")])

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub = self.hub
        hub.note(self)
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        repo = (api or file).group(1) if api or file else ""
        revision = (api or file).group(2) if repo else ""
        if repo == "user/renamed":
            return self.answer(307, headers=[("Location", self.path.replace("user/renamed", "user/plain"))])
        if not repo or not os.path.isdir(os.path.join(hub.folder, repo)):
            return self.refuse(401, "RepoNotFound", "Invalid username or password.")
        token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if "private" in repo and not token:
            return self.refuse(401, "RepoNotFound", "Repository not found")
        if "gated" in repo and not token:
            return self.refuse(401, "GatedRepo", "Access to this model is restricted.")
        if "refuses" in repo or ("busy" in repo and hub.first_times(self.path, 1)):
            wait = "3000" if "refuses" in repo else "1"
            return self.answer(429, b"{}", [("Retry-After", wait)])
        if "broken" in repo and hub.first_times(self.path, 1):
            return self.answer(503, b"no")
        if revision not in (None, "main", COMMIT):
            return self.refuse(404, "RevisionNotFound", "Invalid rev id")
        if api:
            siblings = []
            for name in hub.files(repo):
                sha, data = hub.digest(repo, name)
                one = {"rfilename": name}
                if "blobs" in query:
                    git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
                    one |= {"size": len(data), "blobId": git}
                    if name.endswith(".gguf"):
                        one["lfs"] = {"sha256": sha, "size": len(data) + ("short" in repo), "pointerSize": 134}
                siblings.append(one)
            if "outside" in repo:
                siblings = [one | {"rfilename": "../../../../../" + one["rfilename"]} for one in siblings]
            answer = {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}
            return self.answer(200, json.dumps(answer).encode(), [("Content-Type", "application/json")])
        name = file.group(3)
        if name not in hub.files(repo):
            return self.refuse(404, "EntryNotFound", "Entry not found")
        sha, data = hub.digest(repo, name)
        headers = [("X-Repo-Commit", COMMIT), ("Accept-Ranges", "bytes")]
        if not name.endswith(".gguf"):
            git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            return self.answer(200, data, [*headers, ("ETag", f'"{git}"')])
        location = f"http://127.0.0.1:{hub.storage_port}/{urllib.parse.quote(repo)}/{urllib.parse.quote(name)}?signature=secret"
        self.answer(302, headers=[*headers, ("X-Linked-Etag", f'"{sha}"'), ("X-Linked-Size", str(len(data))), ("Location", location)])


class Storage(Handler):
    """Also serves files by themselves: /plain/USER/NAME/FILE, with an ETag, for -mu."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub = self.hub
        hub.note(self)
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).removeprefix("/plain")
        repo, name = "/".join(path.split("/")[1:3]), "/".join(path.split("/")[3:])
        if self.headers.get("Authorization"):
            return self.answer(400, b"a token for the hub came to its storage")
        if not name or name not in hub.files(repo):
            return self.answer(404)
        sha, data = hub.digest(repo, name)
        etag = f'"{sha[:16]}"'
        if self.headers.get("If-None-Match") == etag:
            return self.answer(304)
        if "wrong" in repo:
            data = data[:-1] + bytes([data[-1] ^ 1])
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = int(wanted.group(1)) if wanted and "norange" not in repo else 0
        if self.headers.get("If-Range") not in (None, etag):
            start = 0
        if start >= len(data):
            return self.answer(416, headers=[("Content-Range", f"bytes */{len(data)}")])
        body = data[start:]
        self.send_response(206 if start else 200)
        self.send_header("ETag", etag)
        self.send_header("Content-Length", str(len(body)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        third = len(data) // 3 + 1
        try:
            if "cut" in repo and hub.first_times(path, 2):
                self.wfile.write(body[:third])
                self.close_connection = True
            elif "stall" in repo and hub.first_times(path, 1):
                self.wfile.write(body[:third])
                self.wfile.flush()
                time.sleep(5)
                self.close_connection = True
            else:
                for at in range(0, len(body), third):
                    self.wfile.write(body[at : at + third])
                    self.wfile.flush()
                    if "slow" in repo:
                        time.sleep(2 if "slower" in repo else 0.5)
        except OSError:
            self.close_connection = True  # the client has gone


if __name__ == "__main__":
    served = Hub(sys.argv[1])
    print(served.port, served.storage_port, flush=True)
    sys.stdin.read()
