"""Which requests have a line, and what of their paths it holds."""

from typing import Any, Final

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.testing import capture_logs

from compaction_proxy.gateway.access_log import AccessLog
from compaction_proxy.gateway.client_stream import DEPARTURE, HAS_LEFT

ERRORS: Final = "errors"


def answer(status: int, *parts: bytes, whole: bool = True) -> ASGIApp:
    """An application that answers with these parts of a body."""

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if whole:
            await send({"type": "http.response.body"})

    return app


async def ask(app: ASGIApp, path: str = "/v1/models", *, has_left: bool = False) -> list[dict[str, Any]]:
    """The lines of one request to `app`, without the time that it took."""

    async def receive() -> Message:
        raise AssertionError

    async def send(_: Message) -> None:
        pass

    extensions = {DEPARTURE: {HAS_LEFT: lambda: has_left}}
    scope = {"type": "http", "method": "GET", "raw_path": path.encode(), "extensions": extensions}
    with capture_logs() as lines:
        await app(scope, receive, send)
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/openai/deployments/gpt-4o/chat/completions", "/openai/deployments/gpt-4o/chat/completions"),
        ("/a-segment-with-words-only/x", "/a-segment-with-words-only/x"),
        ("/v1/files/file-0123456789abcdef/content", "/v1/files/[id]/content"),
        ("/admin/v1/conversations/c_0123456789abcdef", "/admin/v1/conversations/[id]"),
        ("/QWERTYUIOPASDFGH", "/[id]"),
        ("/" + "a/" * 5_000, "/" + "a/" * 499 + "a"),
    ],
)
async def test_a_path_has_no_ids_and_no_end(path: str, shown: str) -> None:
    [line] = await ask(AccessLog(answer(200, b"ab", b"c"), "all"), path)
    assert line == {
        "event": "request.answered", "log_level": "info", "method": "GET", "path": shown, "status": 200,
        "bytes": 3,
    }  # fmt: skip


async def test_of_errors_only_those_of_the_proxy_and_of_the_upstream_have_a_line() -> None:
    assert await ask(AccessLog(answer(399), ERRORS)) == []
    assert await ask(AccessLog(answer(200, b"x", whole=False), ERRORS), has_left=True) == []
    [refused] = await ask(AccessLog(answer(400), ERRORS))
    [cut] = await ask(AccessLog(answer(200, b"x", whole=False), ERRORS))
    assert (refused["status"], refused.get("end"), refused["log_level"]) == (400, None, "warning")
    assert (cut["status"], cut["end"], cut["log_level"]) == (200, "cut", "warning")


async def test_a_request_without_any_answer_is_the_error_that_the_server_sends() -> None:
    async def send_nothing(_scope: Scope, _receive: Receive, _send: Send) -> None:
        pass

    [line] = await ask(AccessLog(send_nothing, "errors"))
    [left] = await ask(AccessLog(send_nothing, "all"), has_left=True)
    assert (line["status"], line["end"]) == (500, "cut")
    assert ("status" in left, left["end"]) == (False, "client-left")
