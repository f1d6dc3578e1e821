"""The requests of the hostile run: conversations on three wires, mutated by structure and by bytes.

A request follows from the seed, its number and the corpus. It holds the marker of its tenant and no other.
"""

import copy
import functools
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.helpers.wires.chat import CHAT
from tests.helpers.wires.messages import MESSAGES
from tests.helpers.wires.responses import RESPONSES
from tests.helpers.wires.talks import Moment, Step, Talk, Turn, Use, requests
from tests.system.malformed.test_bodies import TOKENS
from tests.system.malformed.test_bombs import BOMBS
from tests.system.test_encoded_bodies import ENCODERS

JsonObject = dict[str, Any]
# What a client sends, in order, and the pauses in between, in seconds.
Delivery = list[bytes | float]

ROOT = Path(__file__).resolve().parent.parent
TENANTS, SESSIONS = 6, 5
# So many requests share their sessions; then each tenant begins new ones.
SESSION_REQUESTS = 1_000
# Where a request of the corpus holds the marker of whoever sends it; as long as one.
ANY_MARKER: Final = b"kestrel__q"
_MARKED: Final = b"before"  # a word of every text that a Talk has
MAX_CHARACTERS = 120_000

WIRES = {b"/v1/chat/completions": CHAT, b"/v1/responses": RESPONSES, b"/v1/messages": MESSAGES}
TARGETS = (
    *(10 * [*WIRES]), b"/v1/compact", b"/v1/compact", b"/v1/responses/compact",
    b"/v1/messages/count_tokens", b"/v1/messages/count_tokens", b"/mcp", b"/mcp", b"/v1/models",
    b"/v1/embeddings", b"/openai/deployments/gpt-x/chat/completions?api-version=1",
    b"/openai/deployments/%0a%ff/chat/completions", b"//v1//chat/completions",
    b"/v1/../v1/chat/completions", b"/v1/chat/completions?" + b"q" * 9_000,
)  # fmt: skip
ALIKE = {b"/v1/responses/compact": b"/v1/responses", b"/v1/messages/count_tokens": b"/v1/messages"}

# JSON that takes the place of a value.
RAW = (
    b"null", b"true", b"[]", b"{}", b'""', b"0", b"-1", b"1.5", b"-0.0", b"1e999", b"NaN", b"-Infinity",
    b"9" * 400, b"-" + b"9" * 5_000, b"18446744073709551616", b"[" * 149 + b"]" * 149,
    b"[" * 3_000 + b"]" * 3_000, b'{"a":' * 151 + b"1" + b"}" * 151, b"[" * 90_000, b'{"a":1,"a":2}',
    b'"\\ud800"', b'"\\u0000\\u001b[2J"', b'"\xff\xfe"', b'"\xed\xa0\x80"', b'"' + b"x" * 100_000 + b'"',
    b'"' + "👨‍👩‍👧".encode() * 2_000 + b'"', b'"' + b"\\n" * 20_000 + b'"', b"[" + b"{}," * 9_000 + b"{}]",
    b'[null,1,"a",{},[]]', b'"data:image/png;base64,!!"', b'{"type":"text","text":"x"}',
    b'{"type":"compaction_trigger"}', b'{"role":"user","content":"x"}',
    b'{"type":"compaction","encrypted_content":"gAAAA"}',
    b'{"type":"tool_result","tool_use_id":"no","content":[]}',
    b'{"role":"tool","tool_call_id":"no","content":"x"}',
    b'{"type":"function_call_output","call_id":"no","output":[1]}',
)  # fmt: skip
NAMES = (
    "role", "content", "type", "text", "id", "tool_calls", "tool_call_id", "call_id", "name", "arguments",
    "model", "messages", "input", "system", "instructions", "tools", "max_tokens", "stream",
    "previous_response_id", "conversation", "context_management", "cache_control", "metadata",
    "prompt_cache_key", "n", "\ud800", "", "strategy", "trigger_tokens", "target_tokens", "thinking",
)  # fmt: skip
TEXTS = (
    "\ud800",
    "\x00",
    "\u202e",
    "<|im_end|>",
    "]]>",
    "x" * 20_000,
    "ß" * 3_000,
    "\r\n\r\ndata: [DONE]",
    "Never.",
)
STRATEGIES = (
    b"anchored",
    b"chained",
    b"full",
    b"selective",
    b"iterations",
    b"split",
    b"archive",
    b"nonsense",
)
ODD = (
    b"",
    b"0",
    b"-1",
    b"9" * 40,
    b"\xff\xfe",
    b"a" * 3_000,
    b"%ff%00",
    b"None",
    b"1e3",
    b"force, force",
    b"\t x \t",
)
# Header fields, and values that mean something.
FIELDS: dict[bytes, Sequence[bytes]] = {
    b"x-compaction": (b"force", b"bypass", b"shadow"),
    b"x-compaction-strategy": STRATEGIES,
    b"x-compaction-trigger-tokens": (b"1", b"500", b"3000", b"100000"),
    b"x-compaction-pin": (b"Never drop the table.", b"%C3%9F"),
    b"x-compaction-label": (b"nightly", b"%E2%82%AC"),
    b"x-compaction-hop": (b"0" * 16,),
    b"x-request-id": (b"r1", b"r" * 128),
    b"x-stainless-timeout": (b"1", b"60"),
    b"x-claude-code-agent-id": (b"agent",),
    b"x-claude-code-request-class": (b"auxiliary",),
    b"anthropic-version": (b"2023-06-01",),
    b"anthropic-beta": (b"compact-2026-01-12",),
    b"content-encoding": (b"gzip", b"zstd", b"identity", b"gzip, gzip, gzip"),
    b"accept-encoding": (b"gzip", b"*;q=0"),
    b"content-type": (b"text/plain", b"application/json; charset=utf-16"),
    b"idempotency-key": (b"same",),
    b"user-agent": (b"claude-cli/2.1", b"codex_exec/0.9", b"compaction-proxy/0.1"),
    b"baggage": (b"session=1",),
    b"upgrade": (b"h2c", b"websocket"),
    b"traceparent": (b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01",),
    b"x-session-id": (b"another", b"\x7f"),
}

# What the upstream does with a request, and how often in a hundred (hostile_upstream.py).
FATES = {
    "whole": 40, "stream": 20, "refused": 4, "busy": 3, "broken": 3, "too-long": 6, "search": 6, "odd": 5,
    "garbage": 3, "cut": 4, "reset": 3, "hang": 0.3, "drip": 3, "packed": 2, "large": 1, "empty": 1,
    "redirect": 1,
}  # fmt: skip
# How a client sends a request, and how often in a hundred.
WAYS = {"whole": 66, "slices": 8, "chunked": 8, "expects": 2, "leaves": 8, "framed badly": 7, "stalls": 1}
BAD_FRAMES: tuple[tuple[bytes, bytes], ...] = (
    (b"content-length: ", b"content-length: 1"),
    (b"content-length: ", b"content-length: -"),
    (b"content-length: ", b"transfer-encoding: chunked\r\ncontent-length: "),
    (b"content-length: ", b"transfer-encoding: gzip, chunked\r\ncontent-length: "),
    (b"content-length: ", b"content-length: 3\r\ncontent-length: "),
    (b"content-length: ", b"content-length : "),
    (b"content-length: ", b"x-folded: a\r\n b\r\ncontent-length: "),
    (b"content-length: ", b"transfer-encoding: chunked\r\nx-length: "),
    (b"content-length: ", b"x-many: 1\r\n" * 300 + b"content-length: "),
    (b"content-length: ", b"x-long: " + b"a" * 70_000 + b"\r\ncontent-length: "),
    (b"content-length: ", b"x-nul: \0\r\ncontent-length: "),
    (b"host: ", b"x-host: "),
    (b"host: ", b"host: a\r\nhost: "),
    (b" HTTP/1.1\r\n", b" HTTP/1.0\r\n"),
    (b" HTTP/1.1\r\n", b" HTTP/2.0\r\n"),
    (b" HTTP/1.1\r\n", b"\n"),
    (b"POST /", b"POST http://127.0.0.1/"),
    (b"POST ", b"PO\xffST "),
    (b"POST ", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nPOST "),
    (b"\r\n\r\n", b"\r\n\r\n\r\n"),
)


def marker_of(tenant: int) -> bytes:
    """A word that stands in what this tenant sends, and in nothing else."""
    return b"kestrel%02dq" % tenant


@dataclass(frozen=True, slots=True)
class Case:
    """One request.

    Attributes:
        number: In the run.
        tenant: Who sends it.
        fate: What the upstream does with it.
        way: How it is sent.
        target: Path and query.
        fields: Lines of its head, besides those that every request has.
        body: Its body.
    """

    number: int
    tenant: int
    fate: str
    way: str
    target: bytes
    fields: tuple[bytes, ...]
    body: bytes

    @property
    def method(self) -> bytes:
        return b"GET" if self.target.endswith(b"/models") else b"POST"

    @property
    def head(self) -> bytes:
        """The head as a well-behaved client sends it, with the empty line."""
        own = (
            self.method + b" %b HTTP/1.1" % self.target, b"host: 127.0.0.1", b"connection: close",
            b"authorization: Bearer sk-" + marker_of(self.tenant), b"x-case: %d" % self.number,
            b"x-fate: " + self.fate.encode(), b"content-length: %d" % len(self.body), *self.fields,
        )  # fmt: skip
        return b"\r\n".join(own) + b"\r\n\r\n"

    def to_seed(self) -> bytes:
        """What the corpus keeps of it."""
        lines = b"\r\n".join([self.target, *self.fields])
        return (lines + b"\r\n\r\n" + self.body).replace(marker_of(self.tenant), ANY_MARKER)


class CaseMaker:
    """Makes the requests of a run.

    Args:
        seed: Of what is left to chance.
        corpus: Requests of earlier runs, as `Case.to_seed` gives them.
        chats: Chat conversations that others have had.
    """

    def __init__(self, seed: int, corpus: Sequence[bytes], chats: Sequence[JsonObject]) -> None:
        self._seed = seed
        self._corpus = corpus
        self._chats = chats

    def make(self, number: int) -> Case:
        """The request of this number."""
        rng = random.Random(f"{self._seed} {number}")
        tenant = rng.randrange(TENANTS)
        target = rng.choice(TARGETS)
        fields: tuple[bytes, ...] = (b"content-type: application/json",)
        if self._corpus and rng.random() < 0.15:
            head, _, body = rng.choice(self._corpus).partition(b"\r\n\r\n")
            target, *kept = head.split(b"\r\n")
            fields = tuple(kept)
            if rng.random() < 0.7:
                body = _mutate_bytes(rng, body) if rng.random() < 0.5 else _mutate_json(rng, body)
        else:
            body = self._make_body(rng, target, tenant, number)
            fields += _draw_fields(rng, number)
            body, coding = _encode(rng, body)
            fields += (b"content-encoding: " + coding,) * bool(coding)
        fate, way = (rng.choices([*each], [*each.values()])[0] for each in (FATES, WAYS))
        marker = marker_of(tenant)
        fields = tuple(each.replace(ANY_MARKER, marker) for each in fields)
        return Case(number, tenant, fate, way, target, fields, body.replace(ANY_MARKER, marker))

    def _make_body(self, rng: random.Random, target: bytes, tenant: int, number: int) -> bytes:
        if target == b"/mcp":
            return _mutate_json(rng, json.dumps(_draw_call(rng)).encode())
        path = ALIKE.get(target, target)
        if rng.random() < 0.002:
            return BOMBS[rng.choice([*BOMBS])]
        if path not in WIRES and rng.random() < 0.5:
            path = b"/v1/chat/completions"
        if path == b"/v1/chat/completions" and rng.random() < 0.4:
            body = self._draw_chat(rng)
        else:
            body = self._draw_turns(rng, path if path in WIRES else rng.choice([*WIRES]), tenant, number)
        if rng.random() < 0.35:
            return body
        return _mutate_json(rng, body, times=rng.choice((1, 1, 1, 2, 3, 8)))

    def _draw_turns(self, rng: random.Random, path: bytes, tenant: int, number: int) -> bytes:
        """A request of one of the tenant's conversations, at any of its turns."""
        session = f"{self._seed} {path!r} {tenant} {number // SESSION_REQUESTS} {rng.randrange(SESSIONS)}"
        talk, held = _draw_talk(session)
        wire = WIRES[path]
        raw = wire.sent(talk, held[rng.randrange(len(held))], **{wire.output: rng.choice((16, 1_000))}).raw
        return raw.replace(_MARKED, ANY_MARKER)

    def _draw_chat(self, rng: random.Random) -> bytes:
        """A part of a conversation that somebody had; results may have lost their calls."""
        chat = rng.choice(self._chats)
        first = 0 if rng.random() < 0.6 else rng.randrange(len(chat["messages"]) or 1)
        kept, room = [], rng.choice((2_000, 8_000, 8_000, 20_000, MAX_CHARACTERS))
        for each in chat["messages"][first:]:
            content = each.get("content")
            room -= len(content) if isinstance(content, str) else 200
            if room < 0:
                break
            text = {"content": f"{ANY_MARKER.decode()} {content}"} if isinstance(content, str) else {}
            kept.append({**each, **text})
        return json.dumps({"model": "gpt-x", "messages": kept, "tools": chat.get("tools") or []}).encode()


def load_chats(folder: Path) -> list[JsonObject]:
    """Conversations as others had them: those of a folder, else the few of the fixtures."""
    paths = sorted(folder.glob("*/*.jsonl")) or [ROOT / "tests" / "fixtures" / "conversations.jsonl"]
    return [json.loads(line) for path in paths for line in path.read_text().splitlines() if line.strip()]


@functools.lru_cache(maxsize=512)
def _draw_talk(session: str) -> tuple[Talk, list[list[Moment]]]:
    """A conversation, and what each of its requests holds."""
    rng = random.Random(session)

    def draw_use() -> Use:
        return Use(rng.choice((0, 3, 30, 120, 400)), rng.random() < 0.2, rng.random() < 0.1)

    def draw_step() -> Step:
        uses = tuple(draw_use() for _ in range(rng.randrange(4)))
        seldom = [rng.random() < 0.3 for _ in range(3)]
        return Step(rng.choice((0, 5, 40, 150)), uses, *seldom)

    def draw_turn() -> Turn:
        steps = tuple(draw_step() for _ in range(rng.randrange(4)))
        return Turn(rng.choice((6, 30, 90, 200)), rng.random() < 0.1, rng.random() < 0.2, (*steps, Step(20)))

    turns = tuple(draw_turn() for _ in range(rng.randrange(3, 8)))
    reused, spaced, escaped, prefilled = (rng.random() < share for share in (0.4, 0.4, 0.4, 0.1))
    talk = Talk(turns, reused, spaced, escaped, prefilled)
    return talk, list(requests(talk))


def _draw_call(rng: random.Random) -> JsonObject:
    """A call of an agent's."""
    query = rng.choice(("found answer", "kestrel*", '"', "a OR b", "%"))
    search = {"query": query, "scope": rng.choice(("tenant", "conversation")), "limit": 5}
    name, given = rng.choice(
        (
            ("memory_search", search),
            ("memory_search", search),
            ("memory_get", {"id": "m_1", "lines": "1-40"}),
            ("conversation_status", {}),
            ("compact_now", {"conversation": "c_" + "0" * 24}),
            ("nothing", {}),
        )
    )
    params = rng.choice(({}, {"name": name, "arguments": given}))
    method = rng.choice(("tools/list", "tools/call", "tools/call", "initialize", "ping", "notifications/x"))
    return {"jsonrpc": "2.0", "id": rng.choice((1, "a", None)), "method": method, "params": params}


def _draw_fields(rng: random.Random, number: int) -> tuple[bytes, ...]:
    drawn = [b"accept: application/json, text/event-stream"]
    if rng.random() < 0.7:
        drawn.append(b"x-session-id: s%d-%d" % (number // SESSION_REQUESTS, rng.randrange(SESSIONS)))
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3, 6))):
        name = rng.choice([*FIELDS])
        drawn.append(name + b": " + rng.choice(FIELDS[name] if rng.random() < 0.7 else ODD))
    return tuple(drawn)


def _encode(rng: random.Random, body: bytes) -> tuple[bytes, bytes]:
    """The body in some coding, or cut, or what unpacks to much more; and the name of the coding."""
    drawn = rng.random()
    if drawn > 0.08:
        return body, b""
    coding, encode = ENCODERS[rng.choice([*ENCODERS])]
    packed = encode(bytes(rng.choice((1, 7, 9, 40)) << 20) if drawn < 0.003 else body)
    if drawn > 0.06:
        packed = packed[: rng.randrange(len(packed))]
    return packed, coding.encode()


def _list_slots(value: Any) -> list[tuple[Any, Any]]:  # noqa: ANN401 - JSON
    """Each place in a JSON value that holds another: the container, and the key or index."""
    slots, containers = [], [value]
    for each in containers:
        for key in each if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ():
            slots.append((each, key))
            if isinstance(each[key], dict | list):
                containers.append(each[key])
    return slots


def _mutate_json(rng: random.Random, raw: bytes, times: int = 1) -> bytes:
    """JSON whose values are of other kinds, gone, doubled or in other places, and now and then no JSON."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return _mutate_bytes(rng, raw)
    for _ in range(times):
        slots = _list_slots(value)
        if slots:
            _mutate_slot(rng, *rng.choice(slots), slots)
    separators = rng.choice((None, (",", ":")))
    if rng.random() < 0.5:
        made = json.dumps(value, separators=separators).encode()
    else:
        made = json.dumps(value, separators=separators, ensure_ascii=False).encode("utf-8", "surrogatepass")
    for number, each in enumerate(RAW):
        made = made.replace(b'"@raw%d@"' % number, each)
    return _mutate_bytes(rng, made) if rng.random() < 0.15 else made


def _mutate_slot(rng: random.Random, into: Any, key: Any, slots: list[tuple[Any, Any]]) -> None:  # noqa: ANN401
    """Change what stands in one place."""
    held = into[key]
    other_into, other_key = rng.choice(slots)
    other = copy.deepcopy(other_into[other_key])
    kind = rng.randrange(8)
    if kind <= 2:
        into[key] = f"@raw{rng.randrange(len(RAW))}@"
    elif kind == 3:
        del into[key]
    elif kind == 4:
        into[key] = other
    elif kind == 5 and isinstance(held, str):
        into[key] = held + rng.choice(TEXTS)
    elif isinstance(into, list):
        into.insert(rng.randrange(len(into) + 1), copy.deepcopy(held) if kind == 6 else into.pop(key))
    else:
        into[rng.choice(NAMES)] = copy.deepcopy(held) if kind == 6 else into.pop(key)


def _mutate_bytes(rng: random.Random, raw: bytes) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(raw) + 1)
        raw = raw[:at] + rng.choice(TOKENS) + raw[at + rng.choice((0, 1, 3, 100)) :]
    return raw


def deliver(case: Case) -> Delivery:
    """What the client of a request sends, and when."""
    rng = random.Random(case.number)
    head, body, raw = case.head, case.body, case.head + case.body
    match case.way:
        case "slices":
            ends = sorted(rng.randrange(len(raw)) for _ in range(rng.randrange(1, 6)))
            cuts = zip([0, *ends], [*ends, len(raw)], strict=True)
            made: Delivery = [each for start, stop in cuts for each in (raw[start:stop], 0.02 * rng.random())]
        case "chunked":
            made = [
                re.sub(rb"content-length: \d+", b"transfer-encoding: chunked", head, count=1),
                *_chunk(rng, body),
            ]
        case "expects":
            made = [head.replace(b"host: ", b"expect: 100-continue\r\nhost: ", 1), 0.02, body]
        case "leaves":
            made = [raw[: rng.choice((rng.randrange(len(raw)), len(raw), len(raw)))], 0.2 * rng.random()]
        case "stalls":
            made = [raw[:-1], 4.0, raw[-1:]]
        case "framed badly":
            made = [raw.replace(*rng.choice(BAD_FRAMES), 1), 0.2]
        case _:
            made = [raw]
    return made


def _chunk(rng: random.Random, body: bytes) -> Iterator[bytes]:
    """The body in chunks of any size, some with extensions; trailers behind."""
    at = 0
    while at < len(body):
        size = min(rng.choice((1, 100, 5_000, 70_000)), len(body) - at)
        extension = b';a="b;c"' if rng.random() < 0.1 else b""
        yield b"%x%b\r\n%b\r\n" % (size, extension, body[at : at + size])
        at += size
    yield b"0\r\nx-trailer: 1\r\nhost: b\r\n\r\n"
