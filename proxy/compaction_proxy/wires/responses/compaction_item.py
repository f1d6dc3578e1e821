"""Compaction items of our own on the Responses wire: the trigger that asks for one, and what one stands for.

A client such as Codex ends its `input` with an item of type `compaction_trigger`, and takes a `compaction`
item out of the streamed answer. It sends that item back in place of what it stands for. An item of ours holds
a token: the items of the compacted input, sealed. This module finds tokens and puts back what they hold;
`gateway.compaction_items` seals and opens them.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.message import Message
from compaction_proxy.wires.body import decode_small
from compaction_proxy.wires.json.slices import Slice, find_members, split_elements
from compaction_proxy.wires.project_instructions import starts_with_form
from compaction_proxy.wires.responses.items import COMPACTED, TRIGGER, read_kind
from compaction_proxy.wires.responses.messages import encode_message, parse_message

# Every token of ours begins so, and no provider's does.
TOKEN_PREFIX: Final = "compaction-proxy:1:"  # noqa: S105 - a mark, no secret
_PREFIX_BYTES: Final = TOKEN_PREFIX.encode()
_TRIGGER_BYTES: Final = TRIGGER.encode()


class TriggeredRequest(NamedTuple):
    """A request that asks for a compaction item.

    Attributes:
        raw: The body without the item that asks.
        streamed: Whether the answer is to be a stream of events.
    """

    raw: bytes
    streamed: bool


def has_trigger(raw: bytes) -> bool:
    """Returns whether a body may end in a trigger; False is certain."""
    return _TRIGGER_BYTES in raw


def has_token(raw: bytes) -> bool:
    """Returns whether a body may hold a token of ours; False is certain."""
    return _PREFIX_BYTES in raw


def read_trigger(raw: bytes) -> TriggeredRequest | None:
    """Returns the request that asks for a compaction item, or None if the body does not.

    The trigger must be the last item and the only one of its kind, as the provider demands.
    """
    try:
        found, place, items = _cut_items(raw)
        kinds = [read_kind(each)[0] for each in items]
    except UnreadableBodyError:
        return None
    if place is None or TRIGGER not in kinds or kinds.index(TRIGGER) != len(kinds) - 1:
        return None
    stream = found.get("stream")
    streamed = stream is not None and decode_small(raw[stream.start : stream.stop]) is True
    return TriggeredRequest(_with_items(raw, place, items[:-1]), streamed)


def read_items(raw: bytes) -> tuple[bytes, ...]:
    """Returns the bytes of each item of a body's `input`; a text is one message of the user."""
    place = find_members(raw)["input"]
    value = raw[place.start : place.stop]
    return (
        split_elements(memoryview(value))
        if value.startswith(b"[")
        else (b'{"role":"user","content":%b}' % value,)
    )


def expand_items(raw: bytes, open_token: Callable[[str], bytes], *, with_latest: bool = False) -> bytes:
    """Returns a body with the items that its tokens of ours stand for; every other byte is the client's.

    Clients keep some messages of the user: what a token holds of those that stand before it is left out.
    Instructions are the request's own; those in a token count only where the request holds none. A token that
    comes twice is put back once. A body that is no list of items is returned as it is.

    Args:
        raw: The body.
        open_token: Returns the JSON array of a token. What it raises ends the work.
        with_latest: Whether a token's latest message of the user is put back in any case, so that it is the
            body's latest, too.
    """
    try:
        return _expand_tokens(raw, open_token, with_latest=with_latest)
    except UnreadableBodyError:
        return raw


def _expand_tokens(raw: bytes, open_token: Callable[[str], bytes], *, with_latest: bool) -> bytes:
    _, place, items = _cut_items(raw)
    tokens = [_read_token(each) for each in items]
    if place is None or not any(tokens):
        return raw
    own = [each for each, token in zip(items, tokens, strict=True) if token is None]
    instructed = any(map(_is_instruction, own))
    kept: list[bytes] = []
    opened: set[str] = set()
    for item, token in zip(items, tokens, strict=True):
        if token is None:
            kept.append(item)
        elif token not in opened:
            opened.add(token)
            sealed = split_elements(memoryview(open_token(token)))
            known = set(_user_digests(kept)) - set(_user_digests(sealed)[-1:] if with_latest else ())
            kept += _select_items(sealed, known, instructed=instructed)
    return _with_items(raw, place, kept) if kept else raw


def _user_digests(items: Iterable[bytes]) -> list[bytes]:
    return [record.digest for record in map(_read_message, items) if record and record.role == "user"]


def _select_items(items: tuple[bytes, ...], known: set[bytes], *, instructed: bool) -> Iterator[bytes]:
    """The items of a token that the request does not hold in another way; `known` are digests of messages."""
    for item in items:
        record = _read_message(item)
        if record is not None and (record.digest in known or (_has_instructions(record) and instructed)):
            continue
        yield item


def _read_message(item: bytes) -> Message | None:
    """The record of a message; None for other items."""
    kind, role = read_kind(item)
    return parse_message(item) if kind in {"", "message"} and role not in {"", "assistant"} else None


def _is_instruction(item: bytes) -> bool:
    record = _read_message(item)
    return record is not None and _has_instructions(record)


def _has_instructions(record: Message) -> bool:
    """Whether a message is privileged, or begins with instructions as Codex writes them."""
    return record.is_privileged or (record.role == "user" and starts_with_form(record.text, "codex"))


def _read_token(item: bytes) -> str | None:
    """The token of ours that an item holds; None if it holds none."""
    if _PREFIX_BYTES not in item or read_kind(item)[0] not in COMPACTED:
        return None
    held = decode_small(item)
    token = held.get("encrypted_content") if isinstance(held, dict) else None
    return token if isinstance(token, str) and token.startswith(TOKEN_PREFIX) else None


def _cut_items(raw: bytes) -> tuple[dict[str, Slice], Slice | None, tuple[bytes, ...]]:
    """The members of a body, the place of its list of items, and these; no place where it is no list.

    Raises:
        Unreadable: The body is none.
    """
    try:
        found = find_members(raw)
        place = found.get("input")
        if place is None or not raw.startswith(b"[", place.start):
            return found, None, ()
        items = split_elements(memoryview(raw)[place.start : place.stop])
    except RecursionError:
        raise UnreadableBodyError("too-deep") from None
    return found, place, items


def _with_items(raw: bytes, place: Slice, items: tuple[bytes, ...] | list[bytes]) -> bytes:
    return b"".join((raw[: place.start], b"[", b",".join(items), b"]", raw[place.stop :]))


def strip_privilege(item: bytes) -> bytes:
    """Returns an item of the proxy's own as it is sealed.

    Instructions come from the client alone, so a stand-in with the role `system` becomes the user's.
    """
    record = _read_message(item)
    return (
        encode_message(Message("user", record.text)) if record is not None and record.is_privileged else item
    )


def build_item(item_id: str, token: str) -> dict[str, Any]:
    """Returns the compaction item that holds a token."""
    return {"id": item_id, "type": "compaction", "encrypted_content": token}


def build_response(
    response_id: str, model: str, created_at: int, item: Mapping[str, Any], usage: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the whole answer to a trigger."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": [item],
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": usage,
    }


def build_stream(response: Mapping[str, Any]) -> bytes:
    """Returns an answer as events: created, the item added and done, completed.

    Codex reads the item from `response.output_item.done`, and id and usage from `response.completed`.
    """
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    [item] = response["output"]
    events: tuple[tuple[str, Mapping[str, Any]], ...] = (
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
        ("response.output_item.added", {"output_index": 0, "item": item}),
        ("response.output_item.done", {"output_index": 0, "item": item}),
        ("response.completed", {"response": response}),
    )
    return b"".join(
        b"event: %b\ndata: %b\n\n"
        % (name.encode(), json.dumps({"type": name, "sequence_number": number, **fields}).encode())
        for number, (name, fields) in enumerate(events)
    )
