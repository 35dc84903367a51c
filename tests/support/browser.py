"""A real browser for tests of pages: Chromium without a screen, told by its debugging pipe what to open, click and say.

Nothing but Chromium is needed. A browser costs a second to start; all of a file's tests may share one.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.deadlines import stretched

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""The program; None where none is installed."""
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    "--remote-debugging-pipe",
)
DEADLINE_S = 60.0


class BrowserFailed(Exception):
    """The browser does not answer, or a page raised an error."""


class Browser:
    """One tab. Sizes are CSS pixels."""

    def __init__(self) -> None:
        """Start it, with an empty profile."""
        assert CHROMIUM is not None, "a browser is installed"
        self._profile = tempfile.mkdtemp(prefix="torchmix-browser-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        def third_and_fourth() -> None:
            # First copies where nothing is: 3 or 4 may be one of them, as any number may.
            copies = [fcntl.fcntl(one, fcntl.F_DUPFD, 5) for one in (to_browser, from_browser)]
            os.dup2(copies[0], 3)
            os.dup2(copies[1], 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={self._profile}"],
            preexec_fn=third_and_fourth,
            close_fds=False,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._rest = 0, b""
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None
        self._visitor: str | None = None
        self._window: dict[str, dict[str, Any]] = {}
        self._be_another_visitor()

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._write)
        os.close(self._read)
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(DEADLINE_S)
        shutil.rmtree(self._profile, ignore_errors=True)

    def look(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Have a window of this size, on a system of light or dark colors."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._window = {"setDeviceMetricsOverride": size, "setEmulatedMedia": {"features": [scheme]}}
        self._have_window()

    def open(self, url: str) -> None:
        """Open a page as who was never there, and wait until it is loaded."""
        self._be_another_visitor()
        self._call("Page.navigate", url=url)
        self._wait_for("Page.loadEventFired")

    def value(self, script: str) -> Any:
        """The value of an expression of JavaScript in the page, as JSON has it.

        Raises:
            BrowserFailed: It raised an error.
        """
        done = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise BrowserFailed(done["exceptionDetails"].get("exception", {}).get("description", str(done)))
        return done["result"].get("value")

    def wait(self, script: str) -> Any:
        """The value of an expression once it is true."""
        deadline = time.monotonic() + stretched(DEADLINE_S)
        while not (found := self.value(script)):
            if time.monotonic() > deadline:
                raise BrowserFailed(f"this does not become true: {script}")
            time.sleep(0.05)
        return found

    def click(self, selector: str) -> None:
        """Press and release the mouse in the middle of the first element of a selector."""
        self.click_at(selector, 0.5)

    def click_at(self, selector: str, part: float) -> None:
        """As `click`, at this part of the element's width."""
        found = json.dumps(selector)
        script = (
            f"(() => {{ const e = document.querySelector({found}); e.scrollIntoView({{block: 'center'}}); "
            f"const r = e.getBoundingClientRect(); return [r.x + r.width * {part}, r.y + r.height / 2] }})()"
        )
        x, y = self.value(script)
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write what the window shows, or the whole page, as PNG."""
        data = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def requests(self) -> list[str]:
        """Addresses that the page has asked for since it was opened."""
        self.value("0")  # what has happened so far has arrived with the answer
        sent = [event for event in self._events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def errors(self) -> list[str]:
        """Errors of the page's scripts since it was opened."""
        self.value("0")
        return [str(event["params"]) for event in self._events if event["method"] == "Runtime.exceptionThrown"]

    def _be_another_visitor(self) -> None:
        # A context of its own: what a page keeps reaches the disk after the page is gone, so no clearing is in time.
        self._session, left = None, self._visitor
        self._visitor = self._call("Target.createBrowserContext")["browserContextId"]
        target = self._call("Target.createTarget", url="about:blank", browserContextId=self._visitor)["targetId"]
        if left is not None:
            self._call("Target.disposeBrowserContext", browserContextId=left)
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self._call(f"{domain}.enable")
        self._have_window()
        self._events.clear()

    def _have_window(self) -> None:
        for method, params in self._window.items():
            self._call(f"Emulation.{method}", **params)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserFailed(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _wait_for(self, method: str) -> None:
        while all(event.get("method") != method for event in self._events):
            self._note(self._receive())

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("sessionId") == self._session:  # another visitor's may still arrive
            self._events.append(event)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + stretched(DEADLINE_S)
        with selectors.DefaultSelector() as selector:
            selector.register(self._read, selectors.EVENT_READ)
            while b"\0" not in self._rest:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise BrowserFailed("the browser is silent")
                part = os.read(self._read, 1 << 20)
                if not part:
                    raise BrowserFailed("the browser has ended")
                self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded
