"""A headless Chromium for tests, over the DevTools protocol on a pipe: it needs no package and no port, only `chromium`.

The protocol (https://chromedevtools.github.io/devtools-protocol/) is JSON objects ended by a zero byte; Chromium reads them from
file descriptor 3 and writes to 4.
"""

import base64
import json
import os
import pathlib
import select
import shutil
import subprocess
import time
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)

PATIENCE_S = 120  # a browser that shares its cores with compilers is slow, not dead


def chromium() -> str | None:
    """The browser's path, if there is one."""
    return next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page. `events` are all that the page reported since `open`: (method, parameters)."""

    def __init__(self, folder: pathlib.Path) -> None:
        """`folder`: a new, empty place for the profile."""
        from_us, self._write = os.pipe()
        self._read, from_it = os.pipe()
        # High copies first: 3 and 4 may be among the ends themselves.
        high = [os.dup2(end, 200 + i) for i, end in enumerate((from_us, from_it))]
        script = f'exec 3<&{high[0]} 4>&{high[1]} {high[0]}<&- {high[1]}>&-; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", str(chromium()), *FLAGS, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=high,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (from_us, from_it, *high):
            os.close(end)
        self._left = b""
        self._next = 0
        self._session: str | None = None
        self.events: list[tuple[str, dict[str, Any]]] = []
        page = next(target for target in self.call("Target.getTargets")["targetInfos"] if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its result; AssertionError if the browser refuses it or is silent."""
        self._next += 1
        message = {"id": self._next, "method": method, "params": parameters} | ({"sessionId": self._session} if self._session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            answer = self._receive(deadline, method)
            if answer.get("id") == self._next:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _receive(self, deadline: float, waiting_for: str) -> dict[str, Any]:
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no answer from the browser to {waiting_for}"
            piece = os.read(self._read, 1 << 20)
            assert piece, f"the browser ended during {waiting_for}"
            self._left += piece
        line, _, self._left = self._left.partition(b"\0")
        answer = json.loads(line)
        if "method" in answer:
            self.events.append((answer["method"], answer["params"]))
        return answer

    def open(self, path: pathlib.Path, *, width: int = 1200, height: int = 900, scheme: str = "light") -> None:
        """Load a file at that size with that `prefers-color-scheme`, and wait until it is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=path.absolute().as_uri())
        deadline = time.monotonic() + PATIENCE_S
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            self._receive(deadline, "the page's load event")

    def value(self, expression: str) -> Any:
        """A JavaScript expression's value; AssertionError if it throws."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, (expression, result["exceptionDetails"])
        return result["result"].get("value")

    def screenshot(self, *, width: float | None = None, height: float | None = None) -> bytes:
        """The page from its top left corner as PNG, whole if no size is given."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": width or size["width"], "height": height or size["height"], "scale": 1}
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"])

    def close(self) -> None:
        """End the browser."""
        try:
            self._session = None
            self.call("Browser.close")
            self._process.wait(10)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
