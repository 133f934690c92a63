"""One HTTP request with one deadline for everything, a limit on the reply and no redirects.

A followed redirect would send the request's headers, including an API key, to an address that the user did not set. So
a redirect is returned like any other reply. The request runs in a thread, because a socket's timeout limits neither a
name lookup nor a reply that arrives byte by byte.

`use_cache_if_unreachable` asks once if the Hugging Face hub answers, because its libraries retry for half a minute if
it does not. `LoopThread` is an event loop for several requests at once.
"""

from __future__ import annotations

import asyncio
import functools
import http.client
import os
import queue
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

_CHUNK = 1 << 16  # bytes


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes  # at most most_bytes of the body
    is_whole: bool  # False if the server sent more than most_bytes
    redirects_to: str = ""  # scheme and host of a redirect


class NoReply(OSError):
    """The server sent no reply in time, or no valid HTTP. The text is the cause in one line."""


def send(url: str, body: bytes | None, headers: Mapping[str, str], *, deadline_s: float, most_bytes: int) -> Reply:
    """Return the reply to a POST, or to a GET if there is no body, with any status. Raise NoReply."""
    outcome: queue.SimpleQueue[Reply | BaseException] = queue.SimpleQueue()
    end = time.monotonic() + deadline_s

    def work() -> None:
        try:
            outcome.put(_exchange(urllib.request.Request(url, body, dict(headers)), end, most_bytes))
        except BaseException as error:
            outcome.put(error)

    try:
        threading.Thread(target=work, name="http", daemon=True).start()
        found = outcome.get(timeout=deadline_s)
    except queue.Empty:
        raise NoReply(f"no whole reply within {deadline_s:g} s") from None
    except RuntimeError as error:  # no more threads are available
        raise NoReply(str(error)) from None
    if isinstance(found, Reply):
        return found
    if isinstance(found, MemoryError) or not isinstance(found, Exception):
        raise found
    cause = found.reason if isinstance(found, urllib.error.URLError) else found
    text = " ".join(str(cause).split())
    if isinstance(cause, http.client.HTTPException):
        text = f"{type(cause).__name__}: {text}" if text else ""
    raise NoReply(text or type(cause).__name__) from found


def is_on_this_machine(url: str) -> bool:
    return urllib.parse.urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


def _exchange(request: urllib.request.Request, end: float, most_bytes: int) -> Reply:
    proxies = [urllib.request.ProxyHandler({})] if is_on_this_machine(request.full_url) else []
    try:
        response = urllib.request.build_opener(_NoRedirects, *proxies).open(
            request, timeout=max(end - time.monotonic(), 0.01)
        )
    except urllib.error.HTTPError as error:
        response = error
    with response:
        body = bytearray()
        while len(body) <= most_bytes and (chunk := response.read1(min(_CHUNK, most_bytes + 1 - len(body)))):
            body += chunk
            if time.monotonic() >= end:
                raise TimeoutError("the reply takes too long")
        target = urllib.parse.urlsplit(response.headers.get("Location") or "") if 300 <= response.status < 400 else None
    return Reply(
        response.status,
        bytes(body[:most_bytes]),
        len(body) <= most_bytes,
        f"{target.scheme}://{target.netloc.rpartition('@')[2]}" if target and target.netloc else "",
    )


SECONDS_TO_ANSWER = 5.0
VARIABLE = "HF_HUB_OFFLINE"


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co")


def use_cache_if_unreachable() -> bool:
    """Make the libraries of this process and its children use only their cache if the hub does not answer.

    Return True if only the cache is used.
    """
    if os.environ.get(VARIABLE, "").upper() in ("1", "ON", "YES", "TRUE"):
        return True
    if answers(endpoint()):
        return False
    os.environ[VARIABLE] = "1"
    for name in ("huggingface_hub.constants", "datasets.config"):  # they have read the variable if they are imported
        if name in sys.modules:
            setattr(sys.modules[name], VARIABLE, True)
    return True


@functools.cache
def answers(url: str) -> bool:
    """Return True if a server answers within SECONDS_TO_ANSWER, with whatever status."""
    found: list[bool] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=SECONDS_TO_ANSWER):
                found.append(True)
        except urllib.error.HTTPError:
            found.append(True)
        except (OSError, ValueError):
            found.append(False)

    thread = threading.Thread(target=ask, daemon=True)  # a timeout does not end the resolution of a name
    thread.start()
    thread.join(SECONDS_TO_ANSWER)
    return found == [True]


T = TypeVar("T")


class LoopThread:
    """An event loop in a separate thread, for code that is not asynchronous."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and wait for its result."""
        return self.start(coroutine).result()

    def stop(self) -> None:
        """Stop the loop and its thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
