"""HTTP servers for tests: `serving` answers with a status and JSON, `sending` with any bytes at any pace."""

from __future__ import annotations

import contextlib
import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[str, Any], tuple[int, Any]]  # (path, body) -> (status, JSON object or raw text)


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """Run a server that sends the return values of `answer`. Yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, found = answer(self.path, json.loads(body) if body else dict(self.headers))
            data = found.encode() if isinstance(found, str) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@dataclass
class Sender:
    url: str
    num_sent: int = 0  # number of pieces


@contextmanager
def sending(pieces: Sequence[bytes], pause_s: float = 0.0) -> Iterator[Sender]:
    """Run a server that sends these bytes to every request and closes the connection."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            with contextlib.suppress(OSError):
                for piece in pieces:
                    self.request.sendall(piece)
                    sender.num_sent += 1
                    time.sleep(pause_s)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        sender = Sender(f"http://127.0.0.1:{server.server_address[1]}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield sender
        finally:
            server.shutdown()
