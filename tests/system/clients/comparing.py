"""What must hold between the runs of one client: each function gives what is wrong, line by line."""

import json
import re
from collections.abc import Iterator
from typing import Any

from tests.system.clients.playing import Case
from tests.system.clients.stage import Request

# Fields about the connection, ours, and those in which a client shows a number that it drew for this request.
_PASSING = {"host", "connection", "keep-alive", "x-compaction-hop"}
_DRAWN = {"idempotency-key", "x-client-request-id", "traceparent", "x-request-id"}
_COMPACTED = {"applied", "reused"}
# The provider says how many messages it was sent, and counts the requests so far, summaries among them.
_COUNTS = re.compile(r"(I was sent |req_)\d+")
_PRIVILEGED = {"system", "developer"}
_MESSAGE_LISTS = ("messages", "input")


def _short(value: object) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else json.dumps(value, default=str)
    return text if len(text) <= 600 else f"{text[:300]} … {text[-300:]}"


def unlike(what: str, one: object, other: object) -> Iterator[str]:
    """A line, if two values differ."""
    if one != other:
        yield f"{what}: {_short(one)} became {_short(other)}"


def _fields(request: Request) -> list[tuple[str, str]]:
    kept = [pair for pair in request.headers if pair[0] not in _PASSING]
    return sorted((name, "…" if name in _DRAWN else value) for name, value in kept)


def untouched(direct: Case, proxied: Case) -> list[str]:
    """What differs although nothing was compacted: outcome, number of requests, their bytes, their fields."""
    found = [*unlike("outcome", direct.outcome, proxied.outcome)]
    found += unlike("requests", len(direct.received), len(proxied.received))
    for one, other in zip(direct.received, proxied.received, strict=False):
        found += unlike("target", one.target, other.target)
        found += unlike("body", one.body, other.body)
        found += unlike("headers", _fields(one), _fields(other))
        found += unlike("status", one.status, other.status)
    return found


def meant(outcome: Any) -> Any:
    """An outcome without what compaction may change: tokens used, and the provider's counts."""
    if isinstance(outcome, dict):
        return {name: meant(value) for name, value in outcome.items() if name != "usage"}
    if isinstance(outcome, list):
        return [meant(value) for value in outcome]
    return _COUNTS.sub(r"\1n", outcome) if isinstance(outcome, str) else outcome


def _blocks(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _asked(body: Any) -> list[Any]:
    """What the user said last, as content blocks; answers of tools are not said."""
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, str):
        return _blocks(messages)
    for message in reversed(messages):
        if message.get("role") == "user":
            blocks = [block for block in _blocks(message["content"]) if block.get("type") != "tool_result"]
            if blocks:
                return blocks
    return []


def _privileged(body: Any) -> list[Any]:
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, str):
        return []
    return [message for message in messages if message.get("role") in _PRIVILEGED]


def _around(body: Any) -> Any:
    return {name: value for name, value in body.items() if name not in _MESSAGE_LISTS}


def _kept(sent: Request, received: Request) -> Iterator[str]:
    """What a compacted request has lost that it must keep."""
    was, became = sent.json(), received.json()
    yield from unlike("around the messages", _around(was), _around(became))
    yield from unlike("instructions", _privileged(was), _privileged(became))
    asked = _asked(was)
    yield from unlike("what the user said last", asked, _asked(became)[-len(asked) :])
    if len(received.body) > len(sent.body):
        yield f"larger: {len(sent.body)} bytes became {len(received.body)}"


def compacted(direct: Case, narrow: Case) -> list[str]:
    """What is wrong with a case in whose run requests were compacted.

    The provider has refused what does not fit its window and what has no pair, so 200s say much.
    """
    found = [*unlike("outcome", meant(direct.outcome), meant(narrow.outcome))]
    found += unlike("statuses", [r.status for r in direct.received], [r.status for r in narrow.sent])
    sent = [request for request in narrow.sent if request.status == 200 and request.body]
    received = [request for request in narrow.received if request.status == 200 and request.body]
    found += unlike("answered", len(sent), len(received))
    for one, other in zip(sent, received, strict=False):
        found += _kept(one, other)
    return found


def was_compacted(case: Case) -> bool:
    """Whether a compaction was in force for a request of this case."""
    return any(request.compaction in _COMPACTED for request in case.sent)
