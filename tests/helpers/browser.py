"""A headless Chromium that opens a page, runs expressions in it and takes pictures, over its debugging protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

BINARY = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
MISSING = "no Chromium here: install the Debian package `chromium` (tests/run.sh --with-system-packages does)"
SECONDS = 60.0


class Page:
    """One open page. `problems` lists console and script errors, `requests` all requested addresses."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, loop: asyncio.AbstractEventLoop) -> None:
        self._socket, self._loop, self._last = socket, loop, 0
        self.problems: list[str] = []
        self.requests: list[str] = []

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression. Promises are awaited."""
        found = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until the expression is true."""
        until = time.monotonic() + SECONDS
        while not self.run(f"Boolean({expression})"):
            assert time.monotonic() < until, f"never true: {expression}; {self.problems}"
            time.sleep(0.05)

    def press(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def go(self, path: Path | str) -> None:
        """Open a file or an address."""
        self.command("Page.navigate", url=path if isinstance(path, str) else path.resolve().as_uri())
        self.wait_for("document.readyState === 'complete'")

    def look(self, width: int, height: int, *, is_dark: bool = False) -> None:
        """Set the window size and the preferred color scheme."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[feature])

    def picture(self, path: Path) -> None:
        """Write a screenshot as a PNG."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        path.write_bytes(base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"]))

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._loop.run_until_complete(asyncio.wait_for(self._command(method, parameters), SECONDS))

    async def _command(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._last += 1
        await self._socket.send_json({"id": self._last, "method": method, "params": parameters})
        while True:
            answer = await self._socket.receive_json()
            if answer.get("id") == self._last:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _note(self, method: str, event: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = event["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{event['entry']['text']} {event['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
            self.problems.append(str([a.get("value", a.get("description")) for a in event["args"]]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])


@contextlib.contextmanager
def open_browser(profile: Path) -> Iterator[Page]:
    """Open a browser with an empty page. `profile` must be an unused folder."""
    assert BINARY is not None, MISSING
    arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    arguments += [
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        "--disable-background-networking",
        "about:blank",
    ]
    process = subprocess.Popen([BINARY, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    loop = asyncio.new_event_loop()
    try:
        port = _port(profile / "DevToolsActivePort", process)
        session, socket = loop.run_until_complete(_connect(port))
        page = Page(socket, loop)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.command(f"{domain}.enable")
        yield page
        loop.run_until_complete(session.close())
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        loop.close()


def _port(path: Path, process: subprocess.Popen[bytes]) -> int:
    until = time.monotonic() + SECONDS
    while not (path.exists() and "\n" in path.read_text()):
        assert process.poll() is None and time.monotonic() < until, "the browser does not start"
        time.sleep(0.05)
    return int(path.read_text().splitlines()[0])


async def _connect(port: int) -> tuple[aiohttp.ClientSession, aiohttp.ClientWebSocketResponse]:
    session = aiohttp.ClientSession()
    async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
        targets = await answer.json(content_type=None)
    address = next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
    return session, await session.ws_connect(address, max_msg_size=0)
