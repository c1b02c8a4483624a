"""A real headless browser, driven by its own protocol over a pair of pipes: no port, no further package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
REQUIRED = "ORCHESTRATOR_TEST_BROWSER"  # "required": a browser that is missing is a failure
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions",
    "--disable-default-apps", "--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)  # fmt: skip
PATIENCE = 120.0  # seconds for any one answer; a bound for hangs, never a measure


def find() -> str | None:
    """Return the browser's program: that of ``CHROME``, else the first on the PATH."""
    names = (os.environ.get("CHROME") or "", *NAMES)
    return next((path for name in names if name and (path := shutil.which(name))), None)


def required() -> str:
    """Return the browser's program; without one the test is skipped, or fails where one is required."""
    if path := find():
        return path
    why = "no browser: apt-get install chromium, or set CHROME to the path of a Chromium"
    if os.environ.get(REQUIRED) == "required":
        pytest.fail(f"{why} ({REQUIRED} is set to required)")
    pytest.skip(why)


class Browser:
    """A browser with a profile of its own, for the length of a `with`."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program, self._folder = program, folder
        self._data, self._number = b"", 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        (low_in, self._to), (self._from, low_out) = os.pipe(), os.pipe()
        theirs_in, theirs_out = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20) for fd in (low_in, low_out))
        # it reads commands from descriptor 3 and answers on 4
        script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out} {theirs_in}<&- {theirs_out}>&-'
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                script,
                "bash",
                self._program,
                *FLAGS,
                f"--user-data-dir={self._folder}",
                "about:blank",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs_in, theirs_out),
            env={**os.environ, "HOME": str(self._folder)},
        )
        for fd in (low_in, low_out, theirs_in, theirs_out):
            os.close(fd)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._process.poll() is None:
                self.call("Browser.close")
                self._process.wait(PATIENCE)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._to)
            os.close(self._from)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Give a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, method: str, session: str) -> dict[str, Any]:
        """Return the first event with this name in a session, waiting for it if it has not come."""
        seen = 0
        while True:
            for event in self.events[seen:]:
                if event.get("method") == method and event.get("sessionId") == session:
                    return event["params"]
            seen = len(self.events)
            self.events.append(self._next())

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._data:
            readable, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, "the browser does not answer"
            read = os.read(self._from, 1 << 20)
            assert read, f"the browser is gone: exit code {self._process.wait(PATIENCE)}"
            self._data += read
        message, _, self._data = self._data.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, width: int = 1400, scheme: str = "light", media: str = "screen") -> Page:
        """Open a file in a window of this width, in a light or dark scheme, on a screen or in print."""
        return Page(self, path, width, scheme, media)


class Page:
    """A page that has been loaded."""

    def __init__(self, browser: Browser, path: Path, width: int, scheme: str, media: str) -> None:
        self._browser = browser
        self._target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self._media = media
        self.prefer(scheme)
        self.call("Page.navigate", url=path.absolute().as_uri())
        browser.wait_for("Page.loadEventFired", self.session)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Give this page a command."""
        return self._browser.call(method, self.session, **parameters)

    def prefer(self, scheme: str) -> None:
        """Have the reader prefer ``light`` or ``dark``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=self._media, features=features)

    def evaluate(self, expression: str) -> Any:
        """Return what an expression of JavaScript gives."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def complaints(self) -> list[str]:
        """Return everything in the console."""
        names = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self._mine() if event["method"] in names]

    def requests(self) -> list[str]:
        """Return the addresses of everything that was asked for."""
        sent = [event for event in self._mine() if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def _mine(self) -> list[dict[str, Any]]:
        self.evaluate(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
        )
        return [event for event in self._browser.events if event.get("sessionId") == self.session]

    def screenshot(self) -> bytes:
        """Return the whole page as a PNG."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    def close(self) -> None:
        """Close it."""
        self._browser.call("Target.closeTarget", targetId=self._target)
