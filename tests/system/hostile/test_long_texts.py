"""Texts that take a tokenizer long, and bodies of megabytes: everybody else is served meanwhile.

What is measured is the time for which the loop's thread worked without letting anybody else have a turn, so
that a busy machine does no harm. Each bound is ten times what it should be.
"""

import asyncio
import base64
import gc
import http.client
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import coverage
import pytest

from compaction_proxy.providers.token_counting import TokenScheduler
from compaction_proxy.providers.tokenizers import TiktokenCounter
from compaction_proxy.providers.tokenizers_fast import ToktokCounter
from compaction_proxy.providers.types import TokenCounter

# Coverage makes each line take about twice as long.
BOUND_S = 10 * 0.005 * (2 if coverage.Coverage.current() else 1)
BOUND_S_PER_MB = 10 * 0.0015  # beyond FREE_MB
ATTEMPTS = 3
FREE_MB = 4
CHARACTERS = 1_300_000
HANZI = "".join(map(chr, random.Random(5).choices(range(0x4E00, 0x9FA0), k=CHARACTERS)))
TEXTS = {
    "spaces": " " * CHARACTERS,
    "a": "a" * CHARACTERS,
    "equal signs": "=" * CHARACTERS,
    "hyphens": "-" * CHARACTERS,
    "hanzi": HANZI,
    "letters": "".join(random.Random(6).choices("etaoinshrdlu", k=CHARACTERS)),
    "surrogates": "\ud800" * (CHARACTERS // 6),
    "all of them": (" " * 4_000 + "=" * 4_000 + HANZI[:4_000] + "\ud800x") * 100,
}
# Of the processor's time a count may take this much: 0.6 µs a character, a hundred times over.
PATIENCE_S = 100 * 0.6e-6 * CHARACTERS


@asynccontextmanager
async def stretches() -> AsyncIterator[list[float]]:
    """Seconds of the processor that this thread has used between two turns of a task that is always ready."""
    found: list[float] = []

    async def turns() -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            found.append(now - last)
            last = now
            await asyncio.sleep(0.0005)

    gc.freeze()  # looking through what the test process holds takes longer than anything here
    ticking = asyncio.create_task(turns())
    try:
        yield found
    finally:
        await asyncio.sleep(0.002)
        ticking.cancel()
        gc.unfreeze()


@pytest.fixture(scope="module")
def plain() -> TokenCounter:
    counter = TiktokenCounter(print)
    counter.warm_up()
    return counter


@pytest.fixture(scope="module")
def fast() -> TokenCounter:
    pytest.importorskip("toktok", reason="needs the extra `fast`")
    counter = ToktokCounter(TiktokenCounter(print))
    counter.warm_up()
    assert counter.chosen.startswith("toktok")
    return counter


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("which", ["plain", "fast"])
async def test_a_text_is_counted_beside_the_loop(
    request: pytest.FixtureRequest, which: str, name: str
) -> None:
    counting = TokenScheduler(request.getfixturevalue(which))
    await counting.count(["known"], "gpt-5")
    started = time.process_time()
    async with stretches() as found:
        (tokens,) = await counting.count([TEXTS[name]], "gpt-5")
        await counting.count([TEXTS[name][:5_000]] * 3, "gpt-5")
    counting.close()
    assert max(found) < BOUND_S
    assert time.process_time() - started < PATIENCE_S
    assert len(TEXTS[name]) // 256 < tokens < 4 * len(TEXTS[name])


def asked(content: Any) -> dict[str, Any]:
    return {"model": "gpt-5", "messages": [{"role": "user", "content": content}]}


TURN = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
ROW = {"a": 1, "b": ["x", 0.5], "c": None}
TOOL = {"type": "function", "function": {"name": "f", "description": "does a thing " * 40}}


def escaped(text: str) -> bytes:
    return json.dumps(asked(text)).encode()


def plainly(text: str) -> bytes:
    return json.dumps(asked(text), ensure_ascii=False).encode()


def called(arguments: str) -> dict[str, Any]:
    """A request with a tool call of these arguments."""
    call = {"id": "c", "type": "function", "function": {"name": "write", "arguments": arguments}}
    turn = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
    ]
    return {"model": "gpt-5", "messages": [*asked("go")["messages"], *turn]}


def nested(levels: int, times: int) -> bytes:
    """A request whose content is arrays in arrays."""
    return plainly("").replace(b'""', b"[%b]" % b",".join(times * [b"[" * levels + b"]" * levels]))


def image(megabytes: int) -> bytes:
    data = base64.b64encode(random.Random(7).randbytes(megabytes * 750_000)).decode()
    parts = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
    ]
    return json.dumps(asked(parts)).encode()


BODIES: dict[str, Callable[[], bytes]] = {
    "spaces": lambda: escaped(TEXTS["spaces"]),
    "a": lambda: escaped(TEXTS["a"]),
    "equal signs": lambda: escaped(TEXTS["equal signs"]),
    "hanzi": lambda: plainly(HANZI),
    "escaped hanzi": lambda: escaped(HANZI),
    "lines": lambda: escaped("\n" * CHARACTERS),
    "surrogates": lambda: escaped(TEXTS["surrogates"]),
    "quotes": lambda: escaped('"' * 4 * CHARACTERS),
    "backslashes": lambda: escaped("\\" * 4 * CHARACTERS),
    "pairs of surrogates": lambda: escaped("🐎" * (CHARACTERS // 2)),
    "text of 20 MB": lambda: escaped("so it is said\n" * 1_400_000),
    "JSON in JSON": lambda: json.dumps(called(json.dumps({"text": 'print("x")\n' * 400_000}))).encode(),
    "rows in arguments": lambda: json.dumps(called(json.dumps({"rows": [ROW] * 15_000}))).encode(),
    "no UTF-8": lambda: plainly("é" * 4 * CHARACTERS)[:-5] + b'\xff"}]}',
    "nested arrays": lambda: nested(500, 8_000),
    "200,000 parts": lambda: json.dumps(asked(200_000 * [{"type": "text", "text": "a"}])).encode(),
    "10,000 parts": lambda: json.dumps(asked(10_000 * [{"type": "text", "text": "a" * 300}])).encode(),
    "20,000 messages": lambda: json.dumps({**asked(""), "messages": 10_000 * TURN}).encode(),
    "1 MB of tools": lambda: json.dumps({**asked("hi"), "tools": 2_000 * [TOOL]}).encode(),
    "a name of 1 MB among 4 MB of tools": lambda: json.dumps(
        {**asked("hi"), "tools": [{**TOOL, "enum": ["e" * 1_000_000]}, *7_000 * [TOOL]]}
    ).encode(),
    "image of 12 MB": lambda: image(12),
    "image of 12 MB, slashes escaped": lambda: image(12).replace(b"/", b"\\/"),
}


def post(url: str, body: bytes) -> tuple[int, bytes]:
    """An answer's status and body, past the gate; blocks."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    headers = {"authorization": "Bearer k", "x-compaction-trigger-tokens": "90000000"}
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json", **headers})
    response = connection.getresponse()
    try:
        return response.status, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize("name", BODIES)
async def test_a_body_is_answered_and_goes_on_as_it_came(before: Any, provider: Any, name: str) -> None:
    body = BODIES[name]()
    bound = BOUND_S + max(0.0, len(body) / 1e6 - FREE_MB) * BOUND_S_PER_MB
    longest: list[float] = []
    # What holds the loop for too long does so in every proxy; a busy machine does so once.
    while len(longest) < ATTEMPTS and not (longest and longest[-1] < bound):
        async with before(models={"gpt-5": {"window": 100_000_000}}) as client:
            url = str(client.base_url)
            assert (await asyncio.to_thread(post, url, plainly("known")))[0] == 200
            async with stretches() as found:
                status, _ = await asyncio.to_thread(post, url, body)
        assert (status, provider.bodies[-1] == body) == (200, True)
        longest.append(max(found))
    assert longest[-1] < bound
