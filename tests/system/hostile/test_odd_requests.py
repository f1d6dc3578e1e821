"""Requests that no sensible client sends: each gets an answer, whatever the strategy, and none a fault of ours.

What is forwarded is never larger than what came, and the latest user message is in it, whole.
"""

# ruff: noqa: E501 - one case a line

import base64
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from compaction_proxy.core.strategies import STRATEGIES

JsonObject = dict[str, Any]

CHARACTERS = 400_000
LATEST = {"role": "user", "content": "And what does that come to, in one line?"}
TRIGGER_TOKENS = 2_000
# What one of these requests may take, in seconds; about a tenth of it is expected.


def _words(characters: int) -> str:
    rng = random.Random(7)
    words = ("the", "service", "reads", "its", "queue", "and", "writes", "reports", "about", "every", "part")
    return " ".join(rng.choice(words) for _ in range(characters // 4))[:characters]


def _huge() -> Iterator[tuple[str, str]]:
    """Texts of 400,000 characters."""
    yield "prose", _words(CHARACTERS)
    yield (
        "json",
        json.dumps([{"id": number, "name": f"part {number}"} for number in range(14_000)])[:CHARACTERS],
    )
    yield "base64", base64.b64encode(random.Random(7).randbytes(300_000)).decode()
    yield "one letter", "x" * CHARACTERS
    yield "blanks", " " * CHARACTERS
    yield "lines", "ok\n" * (CHARACTERS // 3)
    yield "chinese", "我们把计费服务迁移到新的集群上。" * (CHARACTERS // 16)


def _answered(result: Any, *, call_id: Any = "call_1", arguments: Any = '{"path": "a.py"}') -> list[Any]:
    call = {"id": call_id, "type": "function", "function": {"name": "read", "arguments": arguments}}
    return [
        {"role": "user", "content": "Look at the file."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": result},
    ]


def _chat(exchanges: int) -> list[JsonObject]:
    messages: list[JsonObject] = []
    for number in range(exchanges):
        messages += [
            {"role": "user", "content": f"Tell me about part {number} of the cluster."},
            {
                "role": "assistant",
                "content": f"Part {number} reads its queue and writes a report, as it should.",
            },
        ]
    return messages


def _large() -> Iterator[tuple[str, list[Any]]]:
    for name, text in _huge():
        yield f"a huge user message: {name}", [{"role": "user", "content": text}, *_chat(3), LATEST]
        yield f"a huge answer: {name}", [*_chat(3), {"role": "assistant", "content": text}, LATEST]
        yield f"a huge result: {name}", [*_chat(3), *_answered(text), LATEST]
        yield f"a huge result, unanswered: {name}", [*_chat(3), *_answered(text)]
        yield f"a huge argument: {name}", [*_answered("ok", arguments=json.dumps({"content": text})), LATEST]
    yield "3,000 messages", [*_chat(1_500), LATEST]
    yield "one user message larger than any window", [{"role": "user", "content": _words(2_000_000)}]
    yield "3,000 results", [each for _ in range(1_000) for each in _answered("a few words of a file")]


def _odd() -> Iterator[tuple[str, list[Any]]]:
    chat = _chat(120)
    yield "no content", [*chat, {"role": "assistant"}, {"role": "user"}, LATEST]
    yield (
        "null contents",
        [*chat, *[{"role": role, "content": None} for role in ("system", "assistant", "user")], LATEST],
    )
    yield (
        "numbers as contents",
        [*chat, {"role": "user", "content": 7}, {"role": "assistant", "content": 1.5}, LATEST],
    )
    yield (
        "booleans and objects",
        [*chat, {"role": "user", "content": True}, {"role": "assistant", "content": {"a": [1]}}, LATEST],
    )
    yield "a huge number", [*chat, {"role": "user", "content": 10**400}, LATEST]
    yield (
        "unknown parts",
        [
            *chat,
            {
                "role": "user",
                "content": [
                    {"type": "hologram", "hologram": {"x": 1}},
                    {"type": "text"},
                    7,
                    None,
                    [],
                    "loose",
                ],
            },
            {"role": "assistant", "content": [{"text": 7}, {"type": "refusal", "refusal": "no"}]},
            LATEST,
        ],
    )
    yield "empty parts", [*chat, {"role": "user", "content": []}, LATEST]
    yield "no roles", [*chat, {"content": "who says this?"}, {}, LATEST]
    yield (
        "unknown roles",
        [
            *chat,
            {"role": "critic", "content": "hm"},
            {"role": 7, "content": "x"},
            {"role": "", "content": ""},
            LATEST,
        ],
    )
    yield (
        "a result without an id",
        [
            *chat,
            {"role": "tool", "content": "42"},
            {"role": "tool", "tool_call_id": None, "content": "43"},
            LATEST,
        ],
    )
    yield "a call without an id", [*chat, *_answered("ok", call_id=None), LATEST]
    yield (
        "calls that are none",
        [
            *chat,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": ["x", None, {}, {"id": "call_9", "function": "read"}],
            },
            {"role": "assistant", "content": "", "tool_calls": {"id": "x"}},
            LATEST,
        ],
    )
    for arguments in ("{not json", "", "null", "[" * 5_000, {"path": "a"}, None):
        yield f"arguments {str(arguments)[:12]}", [*chat, *_answered("ok", arguments=arguments), LATEST]
    yield (
        "a legacy call",
        [
            *chat,
            {"role": "assistant", "content": None, "function_call": {"name": "read", "arguments": "{}"}},
            {"role": "function", "name": "read", "content": _words(20_000)},
            LATEST,
        ],
    )
    yield (
        "lone surrogates",
        [
            *chat,
            {"role": "user", "content": "half \ud83d of it"},
            {"role": "assistant", "content": "\udc00"},
            LATEST,
        ],
    )
    yield "control characters", [*chat, {"role": "user", "content": "\x00\x01\x1b[2J\u2028"}, LATEST]
    yield "an answer begun", [*chat, LATEST, {"role": "assistant", "content": "It comes to"}]
    yield (
        "system messages only",
        [{"role": "system", "content": f"Rule {number}: {_words(200)}"} for number in range(80)],
    )
    yield "one user message", [{"role": "user", "content": _words(60_000)}]
    yield (
        "two users in a row",
        [*chat, {"role": "user", "content": "One thing more."}, {"role": "user", "content": "And:"}, LATEST],
    )
    yield (
        "user messages only",
        [{"role": "user", "content": f"{number}: {_words(300)}"} for number in range(80)],
    )
    yield (
        "assistant messages only",
        [{"role": "assistant", "content": f"{number}: {_words(300)}"} for number in range(80)],
    )
    yield (
        "results only",
        [{"role": "tool", "tool_call_id": f"c{number}", "content": _words(300)} for number in range(80)],
    )
    yield (
        "system messages in between",
        [
            each
            for pair in zip(chat, [{"role": "developer", "content": "Be brief."}] * len(chat), strict=True)
            for each in pair
        ]
        + [LATEST],
    )
    yield "the same message again and again", [LATEST] * 400
    yield "results in another order", [
        *chat,
        {"role": "assistant", "tool_calls": [{"id": each, "type": "function", "function": {"name": "f", "arguments": "{}"}} for each in "abc"]},
        *[{"role": "tool", "tool_call_id": each, "content": each * 3_000} for each in "cxab"],
        LATEST,
    ]  # fmt: skip


def _deep(levels: int) -> bytes:
    return b'{"model":"m","messages":[{"role":"user","content":' + b"[" * levels + b"]" * levels + b"}]}"


_MESSAGES = json.dumps([*_chat(120), LATEST]).encode()
BROKEN = {
    "no messages": b'{"model":"m"}',
    "empty messages": b'{"model":"m","messages":[]}',
    "messages as text": b'{"model":"m","messages":"hi"}',
    "messages as null": b'{"model":"m","messages":null}',
    "messages as an object": b'{"model":"m","messages":{"role":"user","content":"hi"}}',
    "messages that are none": b'{"model":"m","messages":["hi",7,null]}',
    "nothing": b"",
    "no json": b"hello",
    "half of it": b'{"model":"m","messages":' + _MESSAGES[:5_000],
    "an array": b"[]",
    "null": b"null",
    "a number": b"7",
    "not utf-8": b'{"model":"m","messages":[{"role":"user","content":"\xff\xfe"}]}',
    "a mark of byte order": b'\xef\xbb\xbf{"model":"m","messages":' + _MESSAGES + b"}",
    "nan": b'{"model":"m","temperature":NaN,"messages":' + _MESSAGES + b"}",
    "keys twice": b'{"model":"m","messages":[{"role":"user","content":"a"}],"messages":' + _MESSAGES + b"}",
    "keys twice in a message": b'{"model":"m","messages":[{"role":"user","content":"a","content":"b","role":"system"}]}',
    "a little deep": _deep(500),
    "deep": _deep(100_000),
    "deep beside the messages": b'{"model":"m","tools":' + b"[" * 100_000 + b"]" * 100_000 + b',"messages":' + _MESSAGES + b"}",
    "white space": b" \n\t" * 50_000 + b'{"model":"m","messages":' + _MESSAGES + b"}" + b" \n" * 50_000,
    "no model": b'{"messages":' + _MESSAGES + b"}",
    "a model that is none": b'{"model":[7],"messages":' + _MESSAGES + b"}",
    "a long model": b'{"model":"' + b"m" * 100_000 + b'","messages":' + _MESSAGES + b"}",
}  # fmt: skip

LARGE = dict(_large())
ODD = dict(_odd())
MEMBERS: dict[str, JsonObject] = {
    "four answers": {"n": 4},
    "huge tools": {"tools": [{"type": "function", "function": {"name": f"f{number}", "description": _words(900)}} for number in range(150)]},
    "legacy functions": {"functions": [{"name": "read", "parameters": {"type": "object"}}], "function_call": "auto"},
    "more output than the window": {"max_tokens": 10**9},
    "no output": {"max_tokens": 0},
    "output that is none": {"max_tokens": "many", "max_completion_tokens": -5},
    "output of a huge number": {"max_tokens": 10**30},
    "tools that are none": {"tools": "read", "tool_choice": 7},
    "a prediction": {"prediction": {"type": "content", "content": _words(5_000)}},
}  # fmt: skip


def summary(_: str) -> str:
    return "The parts of the cluster were looked at one by one; each reads its queue and writes a report."


async def post(client: Any, raw: bytes, strategy: str, case: str) -> Any:
    return await client.post(
        "/v1/chat/completions",
        content=raw,
        headers={
            "content-type": "application/json",
            "x-compaction-strategy": strategy,
            "x-compaction-trigger-tokens": str(TRIGGER_TOKENS),
            "x-session-id": f"{case} {strategy}",
        },
    )


def _latest(messages: list[Any]) -> Any:
    return next(
        (each for each in reversed(messages) if isinstance(each, dict) and each.get("role") == "user"), None
    )


def _holds(forwarded: list[Any], latest: JsonObject) -> bool:
    """Whether the latest user message is there, whole; `full` moves its text into its stand-in."""
    text = latest.get("content")
    return latest in forwarded or (
        isinstance(text, str)
        and any(str(each.get("content", "")).endswith(text) for each in forwarded if isinstance(each, dict))
    )


def wrongs(raw: bytes, forwarded: bytes, answer: Any) -> Iterator[str]:
    if answer.status_code != 200:
        yield f"status {answer.status_code}: {answer.text[:100]}"
    if len(forwarded) > len(raw):
        yield f"{len(forwarded)} bytes of {len(raw)}"
    sent, went = json.loads(raw), json.loads(forwarded)
    latest = _latest(sent["messages"])
    if latest is not None and not _holds(went["messages"], latest):
        yield "the latest user message is not whole"
    if {**sent, "messages": []} != {**went, "messages": []}:
        yield "something beside the messages has changed"
    if answer.headers.get("x-compaction-reason") == "internal":
        yield "a fault of ours was hidden"


@pytest.mark.parametrize(
    "strategy",
    [
        strategy if strategy in {"anchored", "full"} else pytest.param(strategy, marks=pytest.mark.slow)
        for strategy in STRATEGIES
    ],
)
async def test_large_requests_are_answered(before: Any, provider: Any, strategy: str) -> None:
    await _answers(before, provider, strategy, {name: {"messages": each} for name, each in LARGE.items()})


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_odd_messages_are_answered(before: Any, provider: Any, strategy: str) -> None:
    await _answers(before, provider, strategy, {name: {"messages": each} for name, each in ODD.items()})


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_odd_members_are_answered(before: Any, provider: Any, strategy: str) -> None:
    messages = [*_chat(120), LATEST]
    await _answers(
        before, provider, strategy, {name: {**each, "messages": messages} for name, each in MEMBERS.items()}
    )


async def _answers(before: Any, provider: Any, strategy: str, cases: dict[str, JsonObject]) -> None:
    """Every request is answered as `wrongs` wants it, the first time and the second, longer one."""
    provider.summary = summary
    wrong: list[str] = []
    async with before() as client:
        for case, fields in cases.items():
            grown = {
                **fields,
                "messages": [*fields["messages"], {"role": "assistant", "content": "Done."}, LATEST],
            }
            for body in (fields, grown):
                raw = json.dumps({"model": "a-model-that-no-one-knows", **body}).encode()
                answer = await post(client, raw, strategy, case)
                wrong += [f"{case}: {each}" for each in wrongs(raw, provider.bodies[-1], answer)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_what_is_no_request_gets_the_verdict_of_the_provider(
    before: Any, provider: Any, strategy: str
) -> None:
    provider.summary = summary
    provider.verdict = (422, b'{"error":{"message":"this is no request"}}')
    wrong: list[str] = []
    async with before() as client:
        for case, raw in BROKEN.items():
            provider.bodies.clear()
            answer = await post(client, raw, strategy, case)
            if (answer.status_code, answer.content) != provider.verdict:
                wrong.append(f"{case}: {answer.status_code} {answer.text[:100]}")
            if not provider.bodies or len(provider.bodies[-1]) > len(raw):
                wrong.append(f"{case}: not forwarded, or larger than it came")
            if answer.headers.get("x-compaction-reason") == "internal":
                wrong.append(f"{case}: a fault of ours was hidden")
    assert not wrong, "\n".join(wrong)
