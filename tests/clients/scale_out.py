"""The files of examples/scale-out, as they are: the Compose file's and the Kubernetes manifest's servers and router start with exactly
these arguments (hosts and ports of this machine put in), the probes answer, and the drain is shorter than the grace before a kill.
Compose's own check of its file runs where it is installed.

scale_out.py PATH/vllm-router; needs PyYAML."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

import yaml

from quire_server import MODEL, ROOT
from router import free_ports

FOLDER = os.path.join(ROOT, "examples", "scale-out")
ALIAS = "model"


def seconds(text):
    """Of Compose's 40s, 2m, 1m30s."""
    assert re.fullmatch(r"(\d+m)?(\d+s)?", text), text
    return sum(int(n) * (60 if unit == "m" else 1) for n, unit in re.findall(r"(\d+)([ms])", text))


def flag(arguments, name):
    return arguments[arguments.index(name) + 1] if name in arguments else None


def entry_point(dockerfile):
    with open(os.path.join(FOLDER, dockerfile)) as file:
        return yaml.safe_load(re.search(r"^ENTRYPOINT (.*)$", file.read(), re.M)[1])


class Program:
    """A container's process, with the ports of its file moved to free ones."""

    def __init__(self, command, arguments, moved):
        def here(argument):
            argument = argument.replace("/models/${MODEL:-quire-14m-q8_0.gguf}", MODEL).replace("/models/model.gguf", MODEL)
            for old, new in moved:
                argument = argument.replace(old, new)
            return argument

        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([*command, *map(here, arguments)], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=self.log,
                                        stderr=self.log, start_new_session=True)

    def said(self):
        self.log.seek(0)
        return self.log.read()

    def end(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


def status(url, body=None):
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def wait_for(url, program, patience=60):
    deadline = time.monotonic() + patience
    while status(url) != 200:
        assert program.process.poll() is None and time.monotonic() < deadline, "does not get ready: " + program.said()[-2000:]
        time.sleep(0.1)


def run(name, servers, router, grace, probes, check_server):
    """servers: {host: (arguments, its ports by name)}; router: (arguments, its port)."""
    server_command, router_command = entry_point("Dockerfile"), entry_point("router.Dockerfile")
    server_command[0] = os.path.join(ROOT, "server")
    router_command[0] = sys.argv[1]
    assert flag(server_command, "--port") and flag(router_command, "--port") == str(router[1])
    programs, moved_hosts, moved_ports = [], [], {}
    try:
        for host, (arguments, ports) in servers.items():
            free = dict(zip(ports, free_ports(len(ports))))
            assert flag(server_command, "--port") == str(ports["http"]), "the port of the image is not the one that is probed"
            moved = [(f"tcp://*:{ports[p]}", f"tcp://127.0.0.1:{free[p]}") for p in ports]
            command = [str(free["http"]) if a == str(ports["http"]) else a for a in server_command]
            programs.append(Program(command, arguments, moved))
            moved_hosts += [(f"//{host}:{ports[p]}", f"//127.0.0.1:{free[p]}") for p in ports]
            moved_ports[host] = free["http"]
        urls = [f"http://127.0.0.1:{port}" for port in moved_ports.values()]
        for url, program in zip(urls, programs):
            for probe in probes:
                wait_for(url + probe, program)
        for port in moved_ports.values():
            check_server(port)
        port, metrics = free_ports(2)
        command = [str(port) if a == str(router[1]) else a for a in router_command] + ["--prometheus-port", str(metrics)]
        programs.append(Program(command, router[0], moved_hosts))
        url = f"http://127.0.0.1:{port}"
        wait_for(url + "/health", programs[-1])
        body = b'{"model": "%s", "prompt": "A quire of paper", "max_tokens": %d, "ignore_eos": true, "stream": %s}'
        for _ in range(4):
            assert status(url + "/v1/completions", body % (ALIAS.encode(), 4, b"false")) == 200, programs[-1].said()[-2000:]

        # The first server is asked to end while it streams.
        drain = float(flag(servers[next(iter(servers))][0], "--drain-timeout") or 30)
        assert drain < grace, f"{name}: killed after {grace} s, but requests may run for {drain} s"
        streamed = []

        def stream():
            request = urllib.request.Request(urls[0] + "/v1/completions", body % (ALIAS.encode(), 200, b"true"),
                                             {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                for line in answer:
                    streamed.append(line)

        reader = threading.Thread(target=stream)
        reader.start()
        while not streamed:
            time.sleep(0.01)
        programs[0].process.send_signal(signal.SIGTERM)
        probed = set()
        while reader.is_alive():
            probed.add(status(urls[0] + probes[0]))
            time.sleep(0.02)
        assert 503 in probed, f"{name}: not told to be unready while it drains: {probed}"
        text = b"".join(streamed)
        assert text.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"length"' in text, f"{name}: a stream was cut off: {text[-300:]}"
        assert programs[0].process.wait(grace) == 0
        for _ in range(4): # by the other one
            assert status(url + "/v1/completions", body % (ALIAS.encode(), 4, b"false")) == 200, programs[-1].said()[-2000:]
        print(f"scale-out, {name}: servers and router run as the file says, probes and drain as well")
    finally:
        for program in programs:
            program.end()


def compose():
    path = os.path.join(FOLDER, "compose.yaml")
    for tool in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(tool[0]) and subprocess.run([*tool, "version"], capture_output=True).returncode == 0:
            checked = subprocess.run([*tool, "-f", path, "config", "--quiet"], capture_output=True, text=True)
            assert checked.returncode == 0 and "unset" not in checked.stderr, checked.stderr
            print("scale-out:", *tool, "accepts compose.yaml")
            break
    else:
        print("SKIP docker compose config: there is no Compose here (Debian: docker-compose)")
    with open(path) as file:
        services = yaml.safe_load(file)["services"]
    servers, grace, test = {}, None, None
    for name, service in services.items():
        if name == "router":
            continue
        command = service["command"]
        ports = {"http": 8000, "events": int(flag(command, "--kv-events").rsplit(":", 1)[1]),
                 "replay": int(flag(command, "--kv-events-replay").rsplit(":", 1)[1])}
        servers[name] = command, ports
        grace, test = seconds(service["stop_grace_period"]), service["healthcheck"]["test"]
        assert service["restart"], "a server that has lost a GPU ends, and has to be started again"
    assert set(services["router"]["depends_on"]) == set(servers)

    def healthy(port):
        assert test[0] == "CMD"
        command = [part.replace("/8000 ", f"/{port} ") for part in test[1:]]
        assert command != test[1:]
        assert subprocess.run(command).returncode == 0, "the health check fails at a healthy server"
        command = [part.replace("/health", "/nothing") for part in command]
        assert subprocess.run(command).returncode != 0, "the health check accepts anything"

    run("compose.yaml", servers, (services["router"]["command"], int(services["router"]["ports"][0].split(":")[1])), grace, ["/health"],
        healthy)


def kubernetes():
    with open(os.path.join(FOLDER, "kubernetes.yaml")) as file:
        objects = {(o["kind"], o["metadata"]["name"]): o for o in yaml.safe_load_all(file)}
    service, workload = objects["Service", "quire"]["spec"], objects["StatefulSet", "quire"]["spec"]
    pod = workload["template"]["spec"]
    server, router = pod["containers"][0], objects["Deployment", "quire-router"]["spec"]["template"]["spec"]["containers"][0]
    assert workload["serviceName"] == "quire" and service["selector"] == workload["selector"]["matchLabels"]
    ports = {p["name"]: p["containerPort"] for p in server["ports"]}
    assert ports == {p["name"]: p["port"] for p in service["ports"]}
    probes = [server[probe]["httpGet"] for probe in ("readinessProbe", "startupProbe", "livenessProbe")]
    assert all(probe["port"] == "http" for probe in probes)
    assert router["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    assert objects["Service", "quire-router"]["spec"]["ports"][0]["targetPort"] == router["ports"][0]["containerPort"]
    hosts = [f"quire-{i}.quire" for i in range(workload["replicas"])]
    assert [host for host in hosts if f"http://{host}:{ports['http']}" not in router["args"]] == []
    run("kubernetes.yaml", {host: (server["args"], ports) for host in hosts}, (router["args"], router["ports"][0]["containerPort"]),
        pod["terminationGracePeriodSeconds"], [probe["path"] for probe in probes], lambda port: None)


def documented():
    """The commands of docs/scale-out.md, with other ports and a model."""
    with open(os.path.join(ROOT, "docs", "scale-out.md")) as file:
        block = re.search(r"## N servers behind a router\n.*?```\n(.*?)```", file.read(), re.S)[1]
    ports = sorted(set(re.findall(r":(\d{4})\b|--port (\d{4})", block)))
    ports = [a or b for a, b in ports]
    for old, new in zip(ports, free_ports(len(ports))):
        block = re.sub(rf"\b{old}\b", str(new), block)
    name = os.path.splitext(os.path.basename(MODEL))[0]
    commands = [shlex.split(line) for line in block.replace("\\\n", " ").splitlines()]
    commands = [[MODEL if word == "MODEL.gguf" else name if word == "MODEL" else word for word in line] for line in commands]
    port, metrics = free_ports(2)
    programs = []
    try:
        for line in commands[:-1]:
            assert line[0] == "./server", line
            programs.append(Program([os.path.join(ROOT, "server")], line[1:], []))
            wait_for(f"http://127.0.0.1:{flag(line, '--port')}/health", programs[-1])
        router = commands[-1]
        assert router[0] == "vllm-router", router
        programs.append(Program([sys.argv[1]], router[1:] + ["--port", str(port), "--prometheus-port", str(metrics)], []))
        wait_for(f"http://127.0.0.1:{port}/health", programs[-1])
        body = {"model": name, "prompt": "A quire is a quantity of paper, and paper is folded. " * 8, "max_tokens": 2}
        for _ in range(2):
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(),
                                             {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                cached = json.loads(answer.read())["usage"]["prompt_tokens_details"]["cached_tokens"]
            time.sleep(1)  # the events are on their way
        assert cached >= 64, f"a prompt did not go to its blocks: {cached} tokens found"
        print("scale-out: the commands of docs/scale-out.md run, and a prompt goes to its blocks")
    finally:
        for program in programs:
            program.end()


compose()
kubernetes()
documented()
