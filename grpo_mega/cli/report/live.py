"""A live page of a run: the report, served on loopback, with new steps without a reload.

`watch(run_dir, port)` serves until Ctrl-C. The address has a random path, so other users of the machine cannot read the
run. The page asks for the data every second. The server reads the run's files only if one of them has changed, and uses
at most MAX_SHARE of a core for it.
"""

import hashlib
import secrets
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from grpo_mega.cli.report.report import check_run, embedded, is_held, read_run, render_report
from grpo_mega.errors import ConfigError
from grpo_mega.paths import (
    CONFIG_FILE,
    EXPERTS_FILE,
    LOCK_FILE,
    MESSAGES_FILE,
    METRICS_FILE,
    RUN_FILE,
    SAMPLES_FILE,
    heldout_files,
)

MAX_SHARE = 0.2
HOST = "127.0.0.1"
_IDLE_S = 60.0  # a connection without a request is closed after this time
_FILES = (METRICS_FILE, SAMPLES_FILE, MESSAGES_FILE, EXPERTS_FILE, CONFIG_FILE, RUN_FILE)


def watch(run_dir: Path, port: int = 0) -> None:
    """Serve the page until Ctrl-C. Print its address first. Port 0 is any free port.

    Raise ConfigError if the folder does not belong to a run, or the port is taken.
    """
    check_run(run_dir)
    if not 0 <= port < 2**16:
        raise ConfigError(f"--port={port}: must be from 0 to 65535; use another, or leave it out")
    try:
        server = _Server((HOST, port), _Handler)
    except OSError as error:
        raise ConfigError(
            f"--port={port}: must be a free port ({error.strerror}); use another, or leave it out"
        ) from None
    server.source, server.token = Source(run_dir), secrets.token_urlsafe(12)
    with server:
        print(f"watching {run_dir}: http://{HOST}:{server.server_port}/{server.token}/ (Ctrl-C ends)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(f"stopped watching {run_dir}; the run is not affected", flush=True)


class Source:
    """The data of the page. Threads share one."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._lock = run_dir, threading.Lock()
        self._data: dict[str, Any] = {"version": ""}
        self._not_before = 0.0

    def read(self) -> dict[str, Any]:
        """Return the newest data. Its "version" changes with the files. Raise ConfigError if the folder is gone."""
        check_run(self._run_dir)
        with self._lock:
            started_at = time.monotonic()
            paths = [*(self._run_dir / name for name in _FILES), *heldout_files(self._run_dir).values()]
            stats = [path.stat() for path in paths if path.exists()]
            stamp = [is_held(self._run_dir / LOCK_FILE), *((one.st_ino, one.st_size, one.st_mtime_ns) for one in stats)]
            version = hashlib.sha256(repr(stamp).encode()).hexdigest()[:16]
            if version != self._data["version"] and started_at >= self._not_before:
                self._data = read_run(self._run_dir) | {"is_live_page": True, "version": version}
                now = time.monotonic()
                self._not_before = now + (now - started_at) * (1 / MAX_SHARE - 1)
            return self._data


class _Server(ThreadingHTTPServer):
    source: Source
    token: str

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing if a browser has left."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _IDLE_S

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        is_page, is_data = (
            secrets.compare_digest(path.encode(), f"/{self.server.token}/{name}".encode()) for name in ("", "data")
        )
        if not (is_page or is_data):
            self._send(HTTPStatus.NOT_FOUND, "not found")
            return
        try:
            data = self.server.source.read()
        except (OSError, ConfigError) as error:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
            return
        if is_page:
            self._send(HTTPStatus.OK, render_report(data), "text/html")
        elif query == f"version={data['version']}":
            self._send(HTTPStatus.NO_CONTENT)
        else:
            self._send(HTTPStatus.OK, embedded(data), "application/json")

    def _send(self, status: HTTPStatus, text: str = "", kind: str = "text/plain") -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Print nothing for a request."""
