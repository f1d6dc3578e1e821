"""A provider that remembers what it is sent, and whose summary model does whatever it is told to."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from compaction_proxy.app import create_app
from compaction_proxy.config.config import Config
from compaction_proxy.core.summary.prompt import ALIGNED_CLOSING
from compaction_proxy.gateway.server import serve_embedded
from tests.helpers.summaries import put_as_asked

SUMMARY_MODEL = "summary-small"
_SUMMARY_SIGNS = (SUMMARY_MODEL.encode(), json.dumps(ALIGNED_CLOSING, ensure_ascii=False)[1:-1].encode())


class Provider:
    """An upstream on a socket.

    Attributes:
        summary: What the summary model writes for a prompt; None: it fails.
        bodies: The bodies of all other requests, oldest first.
        verdict: Status and body for all other requests; None: an ordinary answer.
    """

    def __init__(self) -> None:
        self.summary: Callable[[str], str] | None = None
        self.bodies: list[bytes] = []
        self.verdict: tuple[int, bytes] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        raw, more = b"", True
        while more:
            event = await receive()
            raw += event.get("body", b"")
            more = event.get("more_body", False)
        status, answer = self._answer(scope, raw)
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": answer})

    def _answer(self, scope: Any, raw: bytes) -> tuple[int, bytes]:
        if scope["method"] == "GET":
            return 404, b'{"error":{"message":"no such thing"}}'
        asked = _summary_prompt(raw)
        if asked is None:
            self.bodies.append(raw)
            return self.verdict or (200, _said("All right."))
        return (
            (500, b'{"error":{"message":"broken"}}')
            if self.summary is None
            else (200, _said(put_as_asked(self.summary(asked), raw.decode(errors="replace"))))
        )


def _summary_prompt(raw: bytes) -> str | None:
    """The prompt of a summary call; None for any other request."""
    if not any(each in raw for each in _SUMMARY_SIGNS):
        return None  # unread: some tests measure the loop that this runs on, too
    try:
        body = json.loads(raw)
        last = body["messages"][-1]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return (
        last
        if body.get("model") == SUMMARY_MODEL or (isinstance(last, str) and ALIGNED_CLOSING in last)
        else None
    )


def _said(text: str) -> bytes:
    message = {"role": "assistant", "content": text}
    return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()


@pytest.fixture
def provider() -> Provider:
    return Provider()


Proxied = Callable[..., Any]


@pytest.fixture
def before(provider: Provider) -> Proxied:
    """Runs the proxy on a socket before the provider; gives a client whose base URL it is."""

    @asynccontextmanager
    async def running(**sections: Any) -> AsyncIterator[httpx.AsyncClient]:
        async with serve_embedded(provider) as upstream:
            config = Config.model_validate(
                {
                    "upstream": {"base_url": f"{upstream}/v1"},
                    "store": {"url": "memory://"},
                    "summary": {"model": SUMMARY_MODEL, "timeout_s": 5},
                    **sections,
                }
            )
            async with (
                serve_embedded(create_app(config)) as url,
                httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client,
            ):
                client.headers["authorization"] = "Bearer sk-test"
                yield client

    return running
