"""The summary model over HTTP: what is sent, what is remembered, and that nothing broken gets through."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest

from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.summary.call import SummaryAnswer, SummaryCall
from compaction_proxy.gateway.client.connection_pool import NativeEngine
from compaction_proxy.gateway.client.httpx_transport import EngineTransport
from compaction_proxy.providers.summary_transport import MAX_ANSWER_BYTES, MAX_MODELS, HttpSummaryModel

SAID = {"choices": [{"message": {"content": "Done."}, "finish_reason": "stop"}]}
SAID_BYTES = json.dumps(SAID).encode()
CALL = SummaryCall(
    url="http://summary.test/v1/chat/completions",
    headers={"authorization": "Bearer sk-a"},
    model="m",
    system="s",
    prompt="p",
    max_tokens=10,
    temperature=0.3,
)


def call(key: str) -> SummaryCall:
    return replace(CALL, headers={"authorization": f"Bearer {key}"})


async def failure(model: HttpSummaryModel, asked: SummaryCall = CALL) -> SummaryError:
    with pytest.raises(SummaryError) as caught:
        await model.request_summary(asked)
    return caught.value


def answering(answer: Callable[[httpx.Request], httpx.Response]) -> HttpSummaryModel:
    return HttpSummaryModel(httpx.MockTransport(answer))


def picky(
    taken: Callable[[dict[str, object]], str | None], status: int = 400
) -> Callable[..., httpx.Response]:
    """A provider that refuses the first member that `taken` names, and says so."""

    def answer(request: httpx.Request) -> httpx.Response:
        refused = taken(json.loads(request.content))
        if refused is None:
            return httpx.Response(200, json=SAID)
        return httpx.Response(status, json={"error": {"message": f"Unsupported: {refused}"}})

    return answer


async def test_a_cookie_set_for_one_credential_is_not_sent_with_another() -> None:
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("cookie"))
        return httpx.Response(200, json=SAID, headers={"set-cookie": "session=alice; Path=/"})

    model = answering(answer)
    assert await model.request_summary(call("sk-alice")) == SummaryAnswer("Done.", "stop")
    await model.request_summary(call("sk-bob"))
    assert seen == [None, None]


async def test_a_credential_goes_out_byte_for_byte_whatever_its_characters() -> None:
    seen: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(dict(request.headers.raw)[b"authorization"])
        return httpx.Response(200, json=SAID)

    await answering(answer).request_summary(call("k\xe9y"))
    assert seen == [b"Bearer k\xe9y"]


@pytest.mark.parametrize("status", [400, 422])
async def test_a_member_that_is_refused_is_left_out_from_then_on(status: int) -> None:
    seen: list[bool] = []

    def refused(body: dict[str, object]) -> str | None:
        seen.append("temperature" in body)
        return "temperature" if "temperature" in body else None

    model = answering(picky(refused, status))
    await model.request_summary(CALL)
    await model.request_summary(CALL)
    assert seen == [True, False, False]


async def test_a_reasoning_model_is_asked_with_the_lowest_effort_that_it_takes() -> None:
    seen: list[object] = []

    def refused(body: dict[str, object]) -> str | None:
        seen.append(body.get("reasoning_effort"))
        return None if seen[-1] == "low" else f"reasoning_effort does not support '{seen[-1]}'"

    model = answering(picky(refused))
    await model.request_summary(replace(CALL, model="o4-mini"))
    await model.request_summary(replace(CALL, model="o4-mini"))
    assert seen == ["minimal", "none", "low", "low"]


async def test_a_provider_that_refuses_one_member_after_the_other_is_given_what_it_takes() -> None:
    def refused(body: dict[str, object]) -> str | None:
        return next(
            (name for name in ("temperature", "max_tokens", "max_completion_tokens") if name in body), None
        )

    assert await answering(picky(refused)).request_summary(CALL) == SummaryAnswer("Done.", "stop")


async def test_what_is_refused_is_forgotten_before_memory_grows() -> None:
    model = answering(picky(lambda body: "temperature" if "temperature" in body else None))
    for number in range(MAX_MODELS + 2):
        await model.request_summary(replace(CALL, model=f"m{number}"))
    assert len(model._refused) == 2


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (httpx.Response(500), "http-500"),
        (httpx.Response(302, headers={"location": "http://elsewhere.test/"}), "http-302"),
        (httpx.Response(404, json={"error": {"code": "model_not_found"}}), "unknown-model"),
        (httpx.Response(400, text="prompt is too long: 9 tokens > 8 maximum"), "overflow"),
        (httpx.Response(400, json={"error": {"message": "temperature"}}), "http-400"),
        (httpx.Response(400, text="maximum context length is 8 tokens, max_tokens 9"), "overflow"),
        (
            httpx.Response(200, json={"error": {"message": "prompt is too long: 9 tokens > 8 maximum"}}),
            "overflow",
        ),
    ],
)
async def test_what_is_no_answer_has_a_reason(response: httpx.Response, reason: str) -> None:
    assert (await failure(answering(lambda _: response))).reason == reason


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("7", 7.0), ("", 0.0), ("-1", 0.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 0.0), ("²", 0.0)],
)
async def test_when_to_ask_again_is_passed_on(said: str, seconds: float) -> None:
    headers = [(b"retry-after", said.encode())]
    found = await failure(answering(lambda _: httpx.Response(429, headers=headers)))
    assert (found.reason, found.retry_after_s) == ("http-429", seconds)


@pytest.mark.parametrize(
    "asked",
    [
        replace(CALL, url="http://summary.test/\x00"),
        replace(CALL, url="gopher://summary.test/"),
        replace(CALL, headers={"authorization": "Bearer \u20ac"}),
    ],
)
async def test_what_cannot_be_sent_is_unreachable(asked: SummaryCall) -> None:
    async with real() as (model, _):
        assert (await failure(model, asked)).reason == "unreachable"


def http(
    body: bytes = b"",
    *,
    status: str = "200 OK",
    kind: str = "application/json",
    headers: str = "",
    cut: int = 0,
) -> bytes:
    """A whole response, its declared length `cut` bytes more than what comes."""
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body) + cut}\r\n{headers}\r\n"
    return head.encode() + body


def said(message: object) -> bytes:
    return http(json.dumps({"choices": [{"message": message}]}).encode())


EVENT = b'data: {"choices":[{"delta":{"content":"Done."}}]}\n\ndata: [DONE]\n\n'
BROKEN = {
    "empty body": (http(), "garbage"),
    "white space": (http(b" \r\n\t "), "garbage"),
    "no JSON": (http(b"Done."), "garbage"),
    "a JSON string": (http(b'"Done."'), "garbage"),
    "null": (http(b"null"), "garbage"),
    "an array": (http(b"[" + SAID_BYTES + b"]"), "garbage"),
    "an empty object": (http(b"{}"), "garbage"),
    "half an object": (http(SAID_BYTES[:30]), "garbage"),
    "no choices": (http(b'{"choices":[]}'), "garbage"),
    "choices null": (http(b'{"choices":null}'), "garbage"),
    "choices an object": (http(b'{"choices":{"message":{"content":"x"}}}'), "garbage"),
    "a choice of text": (http(b'{"choices":[{"text":"x"}]}'), "garbage"),
    "a choice that is none": (http(b'{"choices":[null]}'), "garbage"),
    "a message that is text": (said("Done."), "garbage"),
    "a message that is a list": (said(["Done."]), "garbage"),
    "no UTF-8": (http(b'{"choices":[{"message":{"content":"\xff\xfe"}}]}'), "garbage"),
    "too deep": (http(b"[" * 200_000), "garbage"),
    "HTML": (http(b"<html>Sign in</html>", kind="text/html"), "garbage"),
    "a stream": (http(EVENT, kind="text/event-stream"), "garbage"),
    "an error with status 200": (http(b'{"error":{"message":"no"}}'), "garbage"),
    "huge": (http(b" " * (MAX_ANSWER_BYTES + 1)), "garbage"),
    "not gzip": (http(SAID_BYTES, headers="content-encoding: gzip\r\n"), "garbage"),
    "a gzip bomb": (http(gzip.compress(b" " * 40_000_000), headers="content-encoding: gzip\r\n"), "garbage"),
    "an unknown encoding": (http(SAID_BYTES, headers="content-encoding: br\r\n"), "garbage"),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", "garbage"),
    "a redirect": (http(SAID_BYTES, status="307 Go", headers="location: /x\r\n"), "http-307"),
    "nobody": (http(status="404 Not Found"), "unknown-model"),
    "an error page of a gateway": (http(b"<html>", status="502 Bad Gateway", kind="text/html"), "http-502"),
    "a huge error": (http(b"x" * (MAX_ANSWER_BYTES + 1), status="500 Oh"), "http-500"),
    "a cut": (http(SAID_BYTES, cut=10), "unreachable"),
    "a closed connection": (b"", "unreachable"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9\r\n\r\n", "unreachable"),
    "broken chunks": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        "unreachable",
    ),
}
SILENT = {
    "null content": said({"content": None}),
    "content of a wrong type": said({"content": 7}),
    "an object as content": said({"content": {"text": "x"}}),
    "a list without text": said({"content": [{"type": "image_url"}, 7, None]}),
    "no content at all": said({"role": "assistant"}),
}


@asynccontextmanager
async def real(response: bytes = b"") -> AsyncIterator[tuple[HttpSummaryModel, SummaryCall]]:
    """A server that answers everything with these bytes and hangs up; who asks it, and what."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))
        writer.write(response)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    transport = EngineTransport(NativeEngine())
    try:
        port = server.sockets[0].getsockname()[1]
        yield HttpSummaryModel(transport), replace(CALL, url=f"http://127.0.0.1:{port}/v1/chat/completions")
    finally:
        await transport.aclose()
        server.close()


@pytest.mark.parametrize("shape", BROKEN)
async def test_a_broken_answer_is_a_failed_summary(shape: str) -> None:
    response, reason = BROKEN[shape]
    async with real(response) as (model, asked), asyncio.timeout(100):
        assert (await failure(model, asked)).reason == reason


@pytest.mark.parametrize("shape", SILENT)
async def test_an_answer_without_text_says_nothing(shape: str) -> None:
    async with real(SILENT[shape]) as (model, asked), asyncio.timeout(100):
        assert await model.request_summary(asked) == SummaryAnswer("")


async def test_an_answer_that_is_encoded_all_the_same_is_understood() -> None:
    response = http(gzip.compress(SAID_BYTES), headers="content-encoding: gzip\r\n")
    async with real(response) as (model, asked):
        assert await model.request_summary(asked) == SummaryAnswer("Done.", "stop")


async def test_nobody_there_is_unreachable() -> None:
    async with real() as (model, asked):
        pass
    assert (await failure(model, asked)).reason == "unreachable"


async def test_a_deadline_ends_a_call_that_drips() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
        await reader.read()
        writer.close()
        ended.set()

    ended = asyncio.Event()
    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    transport = EngineTransport(NativeEngine())
    model = HttpSummaryModel(transport)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await model.request_summary(replace(CALL, url=f"http://127.0.0.1:{port}/v1/chat/completions"))
    async with asyncio.timeout(100):
        await ended.wait()  # the connection is closed, not kept
    await transport.aclose()
    server.close()
