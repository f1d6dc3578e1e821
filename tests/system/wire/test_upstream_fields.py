"""What an upstream must not be able to say, and what no client may ask it for."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.system.black_box import Provider, Proxy, Received, Reply, chat_reply, run_proxy

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    running = Provider()
    yield running
    running.close()


@pytest.fixture(scope="module")
def proxy(provider: Provider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with run_proxy(tmp_path_factory.mktemp("proxy"), provider.url) as running:
        yield running


def ask(proxy: Proxy, head: str) -> bytes:
    """Sends the head of a request as it is, and returns all that comes back."""
    host, _, port = proxy.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=100) as connection:
        connection.sendall(f"{head} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        received = b""
        while chunk := connection.recv(65_536):
            received += chunk
    return received


def test_fields_that_only_the_proxy_may_write_do_not_come_from_the_upstream(
    provider: Provider, proxy: Proxy
) -> None:
    forged = {"x-compaction-status": "applied", "x-compaction-request-id": "r_forged", "x-compaction": "1"}

    def answer(request: Received) -> Reply:
        reply = chat_reply(request)
        return Reply(body=reply.body, headers={**reply.headers, **forged, "x-other": "kept"})

    provider.answer = answer
    with proxy.client() as client:
        for answered in (client.post("/v1/chat/completions", json=CHAT), client.get("/v1/models")):
            ours = {
                name: value for name, value in answered.headers.items() if name.startswith("x-compaction")
            }
            assert not set(ours.values()) & set(forged.values())
            assert answered.headers["x-other"] == "kept"


@pytest.mark.parametrize("status", [204, 304])
def test_a_response_that_has_no_body_declares_no_length(
    status: int, provider: Provider, proxy: Proxy
) -> None:
    provider.answer = lambda _: Reply(status=status, body=b"")
    head = ask(proxy, "GET /v1/models").partition(b"\r\n\r\n")[0].lower()
    assert head.startswith(b"http/1.1 %d" % status)
    assert b"content-length" not in head


@contextmanager
def serve_bytes(answer: bytes) -> Iterator[str]:
    """A provider that answers one request with these bytes; gives its base URL."""

    def answer_once() -> None:
        accepted, _ = listener.accept()
        with accepted:
            accepted.recv(65_536)
            accepted.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(100)
        serving = threading.Thread(target=answer_once)
        serving.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        serving.join()


def test_an_interim_response_declares_no_length_and_ends_no_answer(tmp_path: Path) -> None:
    answer = (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\ncontent-length: 2\r\n\r\n"
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    )
    with serve_bytes(answer) as url, run_proxy(tmp_path, url) as proxy:
        head = "POST /v1/files HTTP/1.1\r\nhost: x\r\nconnection: close\r\nexpect: 100-continue\r\n"
        host, _, port = proxy.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=100) as connection:
            connection.sendall(f"{head}content-length: 2\r\n\r\n".encode())
            interim = connection.recv(65_536)
            connection.sendall(b"{}")
            received = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert interim.startswith(b"HTTP/1.1 100 ")
    assert b"content-length" not in interim.lower()
    final, _, body = received.partition(b"\r\n\r\n")
    assert (final[:12], body, received.count(b"HTTP/1.1")) == (b"HTTP/1.1 200", b"{}", 1)


@pytest.mark.parametrize("target", ["/v1/files\\..\\x", "/v1/files/%5c..%5cx", "/v1/files/%5Cx"])
def test_a_target_with_a_backslash_is_refused_before_it_reaches_the_upstream(
    target: str, provider: Provider, proxy: Proxy
) -> None:
    before = len(provider.received)
    answer = ask(proxy, f"GET {target}")
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'"error"' in answer
    assert len(provider.received) == before
