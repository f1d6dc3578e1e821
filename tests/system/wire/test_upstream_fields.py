"""What an upstream must not be able to say, and what no client may ask it for."""

import socket
from collections.abc import Iterator

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


@pytest.mark.parametrize("target", ["/v1/files\\..\\x", "/v1/files/%5c..%5cx", "/v1/files/%5Cx"])
def test_a_target_with_a_backslash_is_refused_before_it_reaches_the_upstream(
    target: str, provider: Provider, proxy: Proxy
) -> None:
    before = len(provider.received)
    answer = ask(proxy, f"GET {target}")
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'"error"' in answer
    assert len(provider.received) == before
