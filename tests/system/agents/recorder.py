"""Stands between a client and the proxy, and records what each of the two sends."""

import http.client
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

# By this header of ours the provider tells to which of the client's requests a forwarded one belongs.
EXCHANGE_HEADER = "x-agents-exchange"
CHUNK_BYTES = 65_536
ANSWER_LIMIT_S = 300.0  # only catches a hang
# What belongs to one connection.
HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}


@dataclass
class Exchange:
    """A request of the client and the answer that it got.

    Attributes:
        number: Its place among the client's requests, from 0.
        body: The bytes that the client sent.
        status: HTTP status of the answer; 0 until there is one.
        answer_headers: Headers of the answer, names in lower case.
        answer: The bytes of the answer's body.
    """

    number: int
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    status: int = 0
    answer_headers: Mapping[str, str] = field(default_factory=dict)
    answer: bytes = b""

    @property
    def compaction_status(self) -> str:
        """`x-compaction-status` of the answer; empty where it has none."""
        return self.answer_headers.get("x-compaction-status", "")


def _read_body(handler: BaseHTTPRequestHandler) -> bytes:
    if handler.headers.get("transfer-encoding", "").lower() != "chunked":
        return handler.rfile.read(int(handler.headers.get("content-length", 0)))
    body = b""
    while size := int(handler.rfile.readline().split(b";")[0], 16):
        body += handler.rfile.read(size)
        handler.rfile.readline()
    handler.rfile.readline()
    return body


def _drop_hop_headers(headers: Message) -> dict[str, str]:
    """Headers without those that belong to one connection."""
    return {name: value for name, value in headers.items() if name.lower() not in HOP_HEADERS}


def _make_handler(recorder: "Recorder", target: str) -> type[BaseHTTPRequestHandler]:
    """A handler of requests that forwards them to `target`."""
    host, port = urlsplit(target).hostname, urlsplit(target).port

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _forward(self) -> None:
            exchange = recorder.add_exchange(self)
            upstream = http.client.HTTPConnection(str(host), port, timeout=ANSWER_LIMIT_S)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_HEADERS}
            headers[EXCHANGE_HEADER] = str(exchange.number)
            try:
                upstream.request(self.command, self.path, exchange.body or None, headers)
                answer = upstream.getresponse()
                exchange.answer_headers = {name.lower(): value for name, value in answer.getheaders()}
                exchange.status = answer.status
                self._send_answer(exchange, answer)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # the client has left
            finally:
                upstream.close()

        def _send_answer(self, exchange: Exchange, answer: http.client.HTTPResponse) -> None:
            self.send_response_only(answer.status)
            for name, value in _drop_hop_headers(answer.headers).items():
                self.send_header(name, value)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            if self.command == "HEAD":
                return
            while piece := answer.read1(CHUNK_BYTES):
                exchange.answer += piece
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")

        do_GET = do_POST = do_HEAD = do_PUT = do_DELETE = do_OPTIONS = _forward  # noqa: N815

        def log_message(self, *args: object) -> None:
            pass

    return Handler


class Recorder:
    """Forwards each request to the proxy, with a number in a header, and streams the answer back.

    Args:
        target: Where the proxy listens.

    Attributes:
        url: Where the recorder listens.
        exchanges: All requests so far, oldest first.
    """

    def __init__(self, target: str) -> None:
        self.exchanges: list[Exchange] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _make_handler(self, target))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def add_exchange(self, handler: BaseHTTPRequestHandler) -> Exchange:
        """Read a request and give it its number."""
        body = _read_body(handler)
        headers = {name.lower(): value for name, value in handler.headers.items()}
        with self._lock:
            exchange = Exchange(len(self.exchanges), handler.command, handler.path, headers, body)
            self.exchanges.append(exchange)
        return exchange

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def run_recorder(target: str) -> Iterator[Recorder]:
    """A recorder in front of `target` until the end of the block."""
    recorder = Recorder(target)
    try:
        yield recorder
    finally:
        recorder.close()
