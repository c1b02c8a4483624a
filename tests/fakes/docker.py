"""A stand-in for docker: a client that talks to a daemon, whose containers outlive the client.

    python docker.py daemon SOCKET      serves until it is killed; its containers die with it
    python docker.py WORDS...           the client; DOCKER_HOST=unix://SOCKET names the daemon

A "container" is the fake engine as a process of the daemon's, in a session and an environment of its own.
What is published on loopback is reached when the engine listens on every address "inside", as with a real
one. Words, messages and exit codes are those of docker 27; an unknown flag is an error.

Images: ``fake/engine`` runs the fake engine, ``fake/missing`` is in no registry.
What goes wrong on purpose comes as JSON in the file SOCKET.knobs, read at each request:
    slow_stop: seconds that a stop takes beyond the engine's own; deaf: nothing is stopped or removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

ENGINE = Path(__file__).with_name("engine.py")
VALUED = {
    "--name", "--label", "--publish", "-p", "--env", "-e", "--device", "--group-add", "--mount", "--ipc",
    "--shm-size", "--log-driver", "--network", "--gpus", "--volume", "-v", "--entrypoint",
}  # fmt: skip
BARE = {"--rm", "--init", "--detach", "-d"}
DAEMON = "docker: Error response from daemon: "


class Fault(Exception):
    """What the client prints before it ends with `code`."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


# -- words ------------------------------------------------------------------------------------------


def parse_run(words: list[str]) -> dict[str, Any]:
    """Read the words after ``run``: options, image, and what follows it."""
    found: dict[str, Any] = {"options": [], "env": {}}
    at = 0
    while at < len(words) and words[at].startswith("-"):
        flag, equals, value = words[at].partition("=")
        at += 1
        if flag in VALUED:
            if not equals:
                value = words[at]
                at += 1
        elif flag not in BARE:
            raise Fault(f"unknown flag: {flag}\nSee 'docker run --help'.", 125)
        if flag in ("--env", "-e"):
            name, given, text = value.partition("=")
            if given or name in os.environ:
                found["env"][name] = text if given else os.environ[name]
        found["options"].append([flag, value])
    if at == len(words):
        raise Fault("'docker run' requires at least 1 argument.", 125)
    return {**found, "image": words[at], "argv": words[at + 1 :]}


def option(options: list[list[str]], *names: str) -> list[str]:
    """Return every value of an option."""
    return [value for flag, value in options if flag in names]


# -- the daemon -------------------------------------------------------------------------------------


class Container:
    """One container, from its creation to its removal."""

    def __init__(self, order: dict[str, Any]) -> None:
        options = order["options"]
        self.id = uuid.uuid4().hex * 2
        self.name = (option(options, "--name") or [f"random_{self.id[:8]}"])[0]
        self.labels = option(options, "--label")
        self.remove = bool(option(options, "--rm"))
        self.ports = option(options, "--publish", "-p")
        self.host_network = option(options, "--network") == ["host"]
        self.clients: list[Any] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.removed = threading.Event()

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def shown_ports(self) -> str:
        """Return what ``ps --format {{.Ports}}`` shows."""
        if not self.running:
            return ""
        halves = (port.rpartition(":") for port in self.ports)
        return ", ".join(f"{outside}->{inside}/tcp" for outside, _, inside in halves)


class Daemon(socketserver.ThreadingUnixStreamServer):
    """Owns every container."""

    daemon_threads = True

    def __init__(self, path: str) -> None:
        self.knobs_path = Path(f"{path}.knobs")
        self.containers: dict[str, Container] = {}
        self.lock = threading.RLock()
        super().__init__(path, Handler)

    def knobs(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(self.knobs_path.read_text()))
        return {}

    def find(self, name: str) -> Container:
        for found in self.containers.values():
            if found.name == name or found.id.startswith(name):
                return found
        raise Fault(f"Error response from daemon: No such container: {name}")

    def create(self, order: dict[str, Any], client: Any) -> Container:
        """Create and start; what is wrong is said as the real one says it."""
        container = Container(order)
        container.clients.append(client)
        with self.lock:
            if order["image"] == "fake/missing":
                raise Fault(
                    "Unable to find image 'fake/missing:latest' locally\n"
                    f"{DAEMON}pull access denied for fake/missing, repository does not exist",
                    125,
                )
            for other in self.containers.values():
                if other.name == container.name:
                    raise Fault(
                        f'{DAEMON}Conflict. The container name "/{other.name}" is already in use by '
                        f'container "{other.id}".',
                        125,
                    )
            self.containers[container.id] = container
        try:
            self.start(container, order)
        except Fault:
            if container.remove:
                self.forget(container)
            raise
        return container

    def start(self, container: Container, order: dict[str, Any]) -> None:
        argv, at = list(order["argv"]), order["argv"].index("--host") + 1
        published = [port.split(":") for port in container.ports]
        for address, outside, _ in published:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((address, int(outside)))
                except OSError:
                    raise Fault(
                        f"{DAEMON}driver failed programming external connectivity on endpoint "
                        f"{container.name}: Bind for {address}:{outside} failed: port is already allocated.",
                        125,
                    ) from None
        if not container.host_network:
            inside = argv[argv.index("--port") + 1]
            reachable = argv[at] == "0.0.0.0" and any(port[2] == inside for port in published)
            argv[at] = "127.0.0.1"
            if not reachable:  # its loopback is not ours
                argv[argv.index("--port") + 1] = "0"
        container.process = subprocess.Popen(
            [sys.executable, "-S", str(ENGINE), *argv],
            env={"PATH": os.defpath, **order["env"]},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        threading.Thread(target=self.attend, args=(container,), daemon=True).start()

    def attend(self, container: Container) -> None:
        """Pass its output on to whoever is attached, and its end."""
        process = container.process
        assert process is not None
        assert process.stdout is not None
        for line in process.stdout:
            for client in list(container.clients):
                with contextlib.suppress(OSError):
                    client.say(out=line.decode("utf-8", "replace"))
        code = process.wait()
        if container.remove:
            self.forget(container)
        for client in list(container.clients):
            with contextlib.suppress(OSError):
                client.say(exit=code if code >= 0 else 128 - code)
        container.removed.set()

    def forget(self, container: Container) -> None:
        with self.lock:
            self.containers.pop(container.id, None)

    def stop(self, container: Container, seconds: float) -> None:
        """TERM, KILL after that many seconds, and wait for the end."""
        process = container.process
        if process is None:
            return
        if self.knobs().get("deaf"):
            raise Fault(f"Error response from daemon: cannot stop container: {container.id}: tried 10 times")
        time.sleep(self.knobs().get("slow_stop", 0))
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
        process.wait()
        container.removed.wait(5)


class Handler(socketserver.StreamRequestHandler):
    """One client's request."""

    server: Daemon

    def say(self, **message: Any) -> None:
        self.wfile.write(json.dumps(message).encode() + b"\n")

    def handle(self) -> None:
        order = json.loads(self.rfile.readline())
        try:
            text = getattr(self, f"do_{order['do']}")(order)
            if text is not None:
                self.say(out=text, exit=0)
        except Fault as fault:
            with contextlib.suppress(OSError):
                self.say(err=f"{fault}\n", exit=fault.code)

    def do_run(self, order: dict[str, Any]) -> None:
        container = self.server.create(order, self)
        for line in self.rfile:  # signals that the client passes on; its end is the end of this
            if container.process is not None:
                container.process.send_signal(json.loads(line)["signal"])
        container.clients.remove(self)

    def do_ps(self, order: dict[str, Any]) -> str:
        lines = []
        for container in list(self.server.containers.values()):
            shown = container.running or order["all"]
            for wanted in order["filters"]:
                key, _, value = wanted.partition("=")
                if key == "label":
                    shown &= value in container.labels
                elif key == "status":
                    shown &= container.running == (value == "running")
                else:
                    raise Fault(f"Error response from daemon: invalid filter '{key}'")
            if shown:
                text = order["format"] or "{{.ID}}"
                lines.append(
                    text.replace("{{.ID}}", container.id).replace("{{.Ports}}", container.shown_ports())
                )
        return "".join(f"{line}\n" for line in lines)

    def do_inspect(self, order: dict[str, Any]) -> str:
        found = [self.server.find(name) for name in order["names"]]
        if order["format"] == "{{.State.Pid}}":
            return "".join(f"{each.process.pid if each.process else 0}\n" for each in found)
        return json.dumps([{"Id": each.id, "Name": f"/{each.name}"} for each in found]) + "\n"

    def do_stop(self, order: dict[str, Any]) -> str:
        for name in order["names"]:
            self.server.stop(self.server.find(name), order["seconds"])
        return "".join(f"{name}\n" for name in order["names"])

    def do_rm(self, order: dict[str, Any]) -> str:
        for name in order["names"]:
            try:
                container = self.server.find(name)
            except Fault:
                if order["force"]:
                    continue
                raise
            if self.server.knobs().get("deaf"):
                raise Fault(f"Error response from daemon: could not kill container {container.id}")
            if container.running and not order["force"]:
                raise Fault(f'Error response from daemon: cannot remove container "/{name}": it is running')
            if container.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    container.process.kill()
                container.process.wait()
            self.server.forget(container)
        return "".join(f"{name}\n" for name in order["names"])


def serve(path: str) -> None:
    """Be the daemon."""
    daemon = Daemon(path)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        daemon.serve_forever(0.1)
    finally:
        for container in list(daemon.containers.values()):
            if container.running and container.process is not None:
                container.process.kill()


# -- the client -------------------------------------------------------------------------------------


def order_of(words: list[str]) -> dict[str, Any]:
    """Read the client's words."""
    verb, *rest = words
    if verb == "run":
        return {"do": "run", **parse_run(rest)}
    flags: dict[str, Any] = {"all": False, "filters": [], "format": "", "force": False, "seconds": 10.0}
    names, at = [], 0
    while at < len(rest):
        word, at = rest[at], at + 1
        if verb == "ps" and word in ("--all", "-a"):
            flags["all"] = True
        elif verb == "ps" and word in ("--quiet", "-q", "--no-trunc"):
            continue
        elif (verb, word) in {
            ("ps", "--filter"),
            ("ps", "--format"),
            ("stop", "-t"),
            ("inspect", "--type"),
            ("inspect", "--format"),
        }:
            value, at = rest[at], at + 1
            if word == "--filter":
                flags["filters"].append(value)
            elif word == "--format":
                flags["format"] = value
            elif word == "-t":
                flags["seconds"] = float(int(value))
        elif verb == "rm" and word in ("--force", "-f"):
            flags["force"] = True
        elif word.startswith("-") or verb not in ("ps", "stop", "rm", "inspect"):
            raise Fault(f"unknown flag or command: {verb} {word}", 125)
        else:
            names.append(word)
    if verb != "ps" and not names:
        raise Fault(f"'docker {verb}' requires at least 1 argument.")
    return {"do": verb, "names": names, **flags}


def main(words: list[str]) -> int:
    """Be the client."""
    with Path(os.environ.get("FAKE_DOCKER_LOG") or os.devnull).open("a") as log:
        log.write(json.dumps(words) + "\n")  # command lines are everybody's to read, so tests read them
    connection = socket.socket(socket.AF_UNIX)
    try:
        order = order_of(words)
        where = os.environ["DOCKER_HOST"].removeprefix("unix://")
        if not Path(where).stat().st_mode & 0o222:  # the tests may run as root, whom no mode keeps out
            raise PermissionError
        connection.connect(where)
    except Fault as fault:
        sys.stderr.write(f"{fault}\n")
        return fault.code
    except PermissionError:
        sys.stderr.write(
            "permission denied while trying to connect to the Docker daemon socket at "
            f"{os.environ['DOCKER_HOST']}: dial unix {where}: connect: permission denied\n"
        )
        return 125 if words[0] == "run" else 1
    except OSError:
        sys.stderr.write(
            f"Cannot connect to the Docker daemon at {os.environ['DOCKER_HOST']}. Is it running?\n"
        )
        return 125 if words[0] == "run" else 1

    def proxy(number: int, _frame: object) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps({"signal": number}).encode() + b"\n")

    connection.sendall(json.dumps(order).encode() + b"\n")
    if order["do"] == "run":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, proxy)
    for line in connection.makefile("rb"):
        said = json.loads(line)
        sys.stdout.write(said.get("out", ""))
        sys.stdout.flush()
        sys.stderr.write(said.get("err", ""))
        if "exit" in said:
            return int(said["exit"])
    sys.stderr.write("error waiting for container: unexpected EOF\n")
    return 125


if __name__ == "__main__":
    sys.exit(serve(sys.argv[2]) if sys.argv[1] == "daemon" else main(sys.argv[1:]))
