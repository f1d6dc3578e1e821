"""The upstream of the hostile run: it does with each request what the request's `x-fate` says.

Summary calls, which carry nothing of the client's but its credential, are answered well or badly by lot. What
reaches the upstream is kept for as long as its client waits, and must hold no other tenant's marker.
"""

import asyncio
import gzip
import json
import random
import re
from collections import Counter
from dataclasses import dataclass, field

import wire_answers

from compaction_proxy.core.search_tool import TOOL_NAME
from tests.helpers.scripted_upstream import Asked
from tests.helpers.summaries import put_as_asked

MARKER = re.compile(rb"kestrel\d\dq")
SUMMARY_MODEL = "hostile-summary"
# How long the upstream says nothing; the proxy waits for less.
HANG_S = 12.0
DRIP_S = 0.02
_STATUSES = {
    "refused": (400, 401, 404, 413, 422), "busy": (429, 503, 529), "broken": (500, 502), "too-long": (400,),
    "odd": (200, 200, 400, 500), "empty": (204, 304), "redirect": (307,),
}  # fmt: skip
_ODD = (
    b"", b"{", b"null", b"NaN", b"[" * 9_000, b'{"usage":{"prompt_tokens":' + b"9" * 5_000 + b"}}",
    b'{"\xff":{}}', b'{"usage":{"prompt_tokens":-1,"input_tokens":"7"}}', b'{"choices":[{"x":"\xff"}]}',
    b'{"error":"' + b"e" * 90_000 + b'"}', b'{"error":{"message":5,"code":[]}}',
    b'{"content":[{"type":"tool_use"}],"stop_reason":7}', b'{"output":[{}],"status":[]}',
)  # fmt: skip
_GARBAGE = (
    b"SSH-2.0-x\r\n", b"HTTP/1.1 2000 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
    b"\x16\x03\x01\0\0", b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
    b"HTTP/1.1 101 Switching\r\n\r\n", b"HTTP/1.1 200 OK\r\nx-long: " + b"a" * 300_000 + b"\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nx: a\0b\r\ncontent-length: 0\r\n\r\n",
)  # fmt: skip
_TOO_LONG = (
    b'{"error":{"message":"The maximum context length is 4000 tokens.","code":"context_length_exceeded"}}',
    b'{"error":{"message":"prompt is too long: 90000 tokens > 4000 maximum"}}',
    b'{"error":{"message":"input is too long for this model"}}',
)
_ERRORS = (b'{"type":"error","error":{"message":"no","type":"some_error","code":null}}', b'{"error":"no"}')
# Bodies that are the same for all requests.
_BODIES = {
    **dict.fromkeys(("refused", "busy", "broken"), _ERRORS), "too-long": _TOO_LONG, "odd": _ODD,
    "large": (b"x" * 1_000_000,), "empty": (b"",), "redirect": (b"go",),
}  # fmt: skip
_STREAM = (b"content-type: text/event-stream",)
_FIELDS = {
    "stream": _STREAM, "drip": _STREAM, "packed": (b"content-encoding: gzip",), "busy": (b"retry-after: 1",),
    "redirect": (b"location: http://127.0.0.1:9/",),
}  # fmt: skip


@dataclass
class Visits:
    """What the upstream has seen of a request and said to it.

    Attributes:
        bodies: What was forwarded, each time.
        answers: The body of each answer.
    """

    bodies: list[bytes] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)


@dataclass
class Provider:
    """The script of the upstream.

    Attributes:
        seed: Of what is left to chance.
        waiting: What it has seen of requests whose clients wait, by their numbers.
        foreign: Requests that held the marker of somebody else.
        seen: How many requests of each kind came.
    """

    seed: int
    waiting: dict[bytes, Visits] = field(default_factory=dict)
    foreign: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    async def __call__(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        """Answer a request."""
        own = set(MARKER.findall(asked.field(b"authorization")))
        if others := set(MARKER.findall(asked.body)) - own:
            self.foreign.append(f"{asked.target[:80]!r} of {own} holds {others}: {asked.body[:2_000]!r}")
        number, fate = asked.field(b"x-case"), asked.field(b"x-fate").decode()
        rng = random.Random(f"{self.seed} {len(asked.body)} {number!r}")
        if not number:
            await self._answer_own_call(asked, writer, rng)
            return
        self.seen["forwarded"] += 1
        visits = self.waiting.get(number, Visits())
        if visits.bodies and fate in {"too-long", "search"} and rng.random() < 0.8:
            fate = "whole"  # the shorter request is accepted, or the search has found something
        visits.bodies.append(asked.body)
        head, body = _make_answer(fate, asked, own, rng)
        visits.answers.append(body)
        await _write_answer(fate, head, body, writer, rng)

    async def _answer_own_call(self, asked: Asked, writer: asyncio.StreamWriter, rng: random.Random) -> None:
        """A summary, or what else the proxy asks by itself."""
        if SUMMARY_MODEL.encode() not in asked.body:
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}")
            return
        self.seen["summary calls"] += 1
        fate = rng.choice(("well",) * 12 + ("busy", "broken", "garbage", "odd", "cut", "reset", "hang"))
        head, body = _make_answer(fate, asked, set(MARKER.findall(asked.body)), rng)
        await _write_answer(fate, head, body, writer, rng)


def _write_message(asked: Asked, markers: set[bytes]) -> bytes:
    """An ordinary answer on the wire of the request."""
    said = f"They looked at one part after the other, and {b' '.join(sorted(markers)).decode()} is well."
    text = put_as_asked(said, asked.body.decode(errors="replace"))
    wire = wire_answers.wire_of(b"POST " + asked.target)
    if wire != "chat":
        return wire_answers.whole(wire, text, len(asked.body))
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": len(asked.body) // 4, "completion_tokens": 8}
    return json.dumps({"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage}).encode()


def _call_search(wire: str, rng: random.Random) -> bytes:
    """An answer in which the model searches what was removed."""
    given: object = {
        "query": rng.choice(("found answer", '"', "kestrel*", 7, "a" * 5_000)),
        "scope": "tenant",
    }
    given = rng.choice((given, given, given, {}, [], None))
    written = json.dumps(given) if rng.random() < 0.9 else "{"
    if wire == "chat":
        call = {"id": "s1", "type": "function", "function": {"name": TOOL_NAME, "arguments": written}}
        message = {"role": "assistant", "content": None, "tool_calls": [call] * rng.choice((1, 1, 3, 40))}
        return json.dumps(
            {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
        ).encode()
    if wire == "responses":
        item = {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "s1",
            "name": TOOL_NAME,
            "arguments": written,
        }
        return json.dumps(
            {"id": "resp_1", "object": "response", "status": "completed", "output": [item]}
        ).encode()
    block = {"type": "tool_use", "id": "toolu_1", "name": TOOL_NAME, "input": given}
    told = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "content": [block],
        "stop_reason": "tool_use",
    }
    return json.dumps(told).encode()


def _make_body(fate: str, asked: Asked, markers: set[bytes], rng: random.Random) -> bytes:
    if fate in _BODIES:
        return rng.choice(_BODIES[fate])
    wire = wire_answers.wire_of(b"POST " + asked.target)
    if fate == "search":
        return _call_search(wire, rng)
    if fate not in {"stream", "drip"}:
        message = _write_message(asked, markers)
        return gzip.compress(message) if fate == "packed" else message
    if wire == "chat":
        return b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n' * 8 + b"data: [DONE]\n\n"
    return b"".join(wire_answers.events(wire, 8, len(asked.body)))


def _make_answer(fate: str, asked: Asked, markers: set[bytes], rng: random.Random) -> tuple[bytes, bytes]:
    """The head and the body of an answer."""
    body = _make_body(fate, asked, markers, rng)
    kinds = (b"application/json", b"text/event-stream", b"text/html", b"")
    kind = rng.choice(kinds) if fate == "odd" else kinds[0]
    fields = _FIELDS.get(fate, ())
    lines = [
        b"HTTP/1.1 %d Said" % rng.choice(_STATUSES.get(fate, (200,))),
        b"content-length: %d" % len(body),
        b"x-fate: " + fate.encode(),
        *([] if fields is _STREAM else [b"content-type: " + kind]),
        *fields,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n", body


async def _write_answer(
    fate: str, head: bytes, body: bytes, writer: asyncio.StreamWriter, rng: random.Random
) -> None:
    """Write an answer as its fate says."""
    if fate == "hang":
        await asyncio.sleep(HANG_S)
    if fate == "garbage":
        writer.write(rng.choice(_GARBAGE))
        writer.close()
    elif fate == "reset":
        writer.transport.abort()
    elif fate == "cut":
        writer.write(head + body[: rng.randrange(len(body))])
        writer.close()
    elif fate == "drip":
        writer.write(head)
        for at in range(0, len(body), 100):
            if writer.is_closing():
                break
            writer.write(body[at : at + 100])
            await asyncio.sleep(DRIP_S)
    else:
        writer.write(head + body)
