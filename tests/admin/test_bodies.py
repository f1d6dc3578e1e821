"""Bodies that nobody needs, sent to the admin API over real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import httpx
import pytest

from compaction_proxy.admin.auth import MAX_BODY_BYTES
from compaction_proxy.app import create_app
from compaction_proxy.config.config import Config
from compaction_proxy.gateway.server import serve_embedded

DECLARED_BYTES = 300_000_000
LIMIT_S = 60.0
HEAD = (
    "POST /admin/v1/conversations/c_0/pins HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)
PATH = "/admin/v1/conversations/c_0/pins"


@pytest.fixture
async def url() -> AsyncIterator[str]:
    config = Config.model_validate(
        {"server": {"admin_key": "none"}, "upstream": {"base_url": "http://127.0.0.1:1/v1"}}
    )
    async with serve_embedded(create_app(config)) as url:
        yield url


async def begun(url: str, framing: str, part: bytes) -> bytes:
    """What is answered to a body of which only a part is ever sent."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(f"{HEAD}{framing}\r\n\r\n".encode() + part)
    try:
        async with asyncio.timeout(LIMIT_S):
            head = await reader.readuntil(b"\r\n\r\n")
            return head + await reader.readuntil(b"}}")
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    ("framing", "part"),
    [
        (f"Content-Length: {DECLARED_BYTES}", b"x" * 65_537),
        ("Transfer-Encoding: chunked", b"10001\r\n" + b"x" * 65_537 + b"\r\n"),
    ],
)
async def test_a_body_too_large_for_the_admin_api_gets_413_before_the_rest_of_it_comes(
    url: str, framing: str, part: bytes
) -> None:
    head, _, body = (await begun(url, framing, part)).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 413 ")
    assert json.loads(body)["error"] == {
        "message": f"The request body is larger than {MAX_BODY_BYTES} bytes.",
        "type": "invalid_request_error",
        "param": None,
        "code": "request_too_large",
    }


@pytest.mark.parametrize(("size", "status"), [(MAX_BODY_BYTES, 422), (MAX_BODY_BYTES + 1, 413)])
async def test_a_body_of_the_largest_size_is_read_and_one_byte_more_is_not(
    url: str, size: int, status: int
) -> None:
    body = b'{"no": "pin"}'.ljust(size)
    async with httpx.AsyncClient(base_url=url) as client:
        answer = await client.post(PATH, content=body, headers={"content-type": "application/json"})

    assert answer.status_code == status
