"""A stand-in for the endpoint of sessions: answers from a script, over real HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]


def say(content: str, *calls: tuple[str, Any], invalid: list[dict[str, str]] | None = None) -> dict[str, Any]:
    """Return an assistant message."""
    listed = [
        {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return message | ({"tool_calls": listed} if listed else {}) | ({"invalid_tool_calls": invalid} if invalid else {})


class Endpoint:
    """Answers each request with `answer(body)`: a status and the JSON body."""

    def __init__(self, answer: Callable[[list[dict[str, Any]]], dict[str, Any] | int]) -> None:
        self.requests: list[dict[str, Any]] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.requests.append(body | {"path": self.path, "key": self.headers["Authorization"]})
                message = answer(body["messages"])
                status, reply = 200, {}
                if isinstance(message, int):
                    status, reply = message, {"error": {"message": "no more", "code": "max_turns"}}
                    reply = reply if message == 400 else {"error": {"message": "broken"}}
                else:
                    reason = "tool_calls" if "tool_calls" in message else "stop"
                    choice = {"message": message, "finish_reason": reason}
                    reply = {"id": f"turn-{len(body['messages'])}", "choices": [choice]}
                data = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/sessions/s/v1"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
