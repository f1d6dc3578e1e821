"""An admin server on a real socket that answers from a script."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Asked = tuple[str, str, str, str]  # method, target, body, authorization


@dataclass(slots=True)
class Scripted:
    """An admin server that answers from a script, and remembers what it was asked.

    Attributes:
        answers: Status and body by method and path, with or without a query; bytes are sent as they are.
        asked: What came.
        streams: What each request for a stream of events gets, one after the other.
        last_ids: The `last-event-id` of each such request.
    """

    url: str = ""
    answers: dict[tuple[str, str], tuple[int, object]] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    streams: list[bytes] = field(default_factory=list)
    last_ids: list[str | None] = field(default_factory=list)

    def put(self, method: str, path: str, body: object, status: int = 200) -> None:
        self.answers[method, f"/admin/v1{path}"] = (status, body)


def _handler(script: Scripted) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            size = int(self.headers.get("content-length", 0))
            body = self.rfile.read(size).decode()
            script.asked.append((self.command, self.path, body, self.headers.get("authorization", "")))
            path = self.path.partition("?")[0]
            if path == "/admin/v1/events/stream" and script.streams:
                script.last_ids.append(self.headers.get("last-event-id"))
                self._send(200, script.streams.pop(0), "text/event-stream")
                return
            missing = (404, {"error": {"message": "There is nothing of that name.", "code": "not_found"}})
            told_anyway = script.answers.get((self.command, path), missing)
            status, told = script.answers.get((self.command, self.path), told_anyway)
            self._send(
                status, told if isinstance(told, bytes) else json.dumps(told).encode(), "application/json"
            )

        def _send(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_DELETE = _answer  # noqa: N815 - the library's names

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
            pass

    return Handler


@contextmanager
def scripted_admin() -> Iterator[Scripted]:
    """A scripted admin server, for as long as the block runs."""
    made = Scripted()
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(made)) as server:
        made.url = f"http://127.0.0.1:{server.server_port}"
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        yield made
        server.shutdown()
        serving.join()
