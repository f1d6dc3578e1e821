"""Detects requests for a compaction item on the Responses wire, and expands items that the proxy has made.

A client such as Codex asks for a compaction with an item of type `compaction_trigger` at the end of its
`input`. The response contains a `compaction` item, which the client then sends in place of the compacted
input. If the proxy has made that item, its `encrypted_content` is a *token*: the items to which the proxy has
shortened the input, in encrypted form. This module finds tokens in later requests and replaces them by these
items. `gateway.compaction_items` encrypts and decrypts tokens.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.message import Message
from compaction_proxy.wires.body import decode_small_json
from compaction_proxy.wires.json.slices import (
    Slice,
    contains_bytes,
    find_members,
    read_member,
    split_elements,
)
from compaction_proxy.wires.json.values import as_object, as_string
from compaction_proxy.wires.project_instructions import starts_like_instructions
from compaction_proxy.wires.responses.messages import (
    COMPACTION_TYPES,
    PARSER,
    TRIGGER_TYPE,
    encode_message,
    read_type_and_role,
)

# Every token begins with this text. A token is the encrypted content of a compaction item that the proxy has
# made. The encrypted content of an item that a provider has made never begins like this.
TOKEN_PREFIX: Final = "compaction-proxy:1:"  # noqa: S105 - a prefix, not a secret
_PREFIX_BYTES: Final = TOKEN_PREFIX.encode()
_TRIGGER_BYTES: Final = TRIGGER_TYPE.encode()


class TriggeredRequest(NamedTuple):
    """A request that asks for a compaction item.

    Attributes:
        raw: The body without the `compaction_trigger` item.
        is_streamed: Whether the client requests the response as a stream.
    """

    raw: bytes
    is_streamed: bool


def has_trigger(raw: bytes) -> bool:
    """Returns whether a body may end with a `compaction_trigger` item. Does not parse the body.

    If the result is False, the body certainly has no such item.
    """
    return contains_bytes(raw, _TRIGGER_BYTES)


def may_have_token(raw: bytes) -> bool:
    """Returns whether a body may contain a compaction item that the proxy has made. Does not parse the body.

    If the result is False, the body certainly contains no such item.
    """
    return contains_bytes(raw, _PREFIX_BYTES)


def parse_triggered_request(raw: bytes) -> TriggeredRequest | None:
    """Parses a body that asks for a compaction item. Returns None if the body does not ask for one.

    A body asks for one only if its last item, and no other item, has the type `compaction_trigger`.
    """
    try:
        members, place, items = _cut_items(raw)
        kinds = [read_type_and_role(each)[0] for each in items]
    except UnreadableBodyError:
        return None
    if place is None or TRIGGER_TYPE not in kinds or kinds.index(TRIGGER_TYPE) != len(kinds) - 1:
        return None
    is_streamed = decode_small_json(read_member(raw, members, "stream")) is True
    return TriggeredRequest(_replace_items(raw, place, items[:-1]), is_streamed)


def read_items(raw: bytes) -> tuple[bytes, ...]:
    """Returns the bytes of each item of a body's `input`. A string becomes one user message."""
    place = find_members(raw)["input"]
    value = raw[place.start : place.stop]
    return (
        split_elements(memoryview(value))
        if value.startswith(b"[")
        else (b'{"role":"user","content":%b}' % value,)
    )


def expand_tokens(raw: bytes, open_token: Callable[[str], bytes], *, with_latest: bool = False) -> bytes:
    """Replaces each compaction item that the proxy has made by the items in its token.

    A token is the encrypted content of such an item. All other items of the body keep their bytes. Clients
    keep some user messages of the compacted input. So the function leaves out a user message of a token if
    the body also contains this message before the token. It leaves out instructions of a token (privileged
    messages and project instructions) if the body contains any instructions outside of tokens. If a token
    occurs twice, it expands only the first one and leaves out the second. It returns a body without a list of
    items unchanged.

    Args:
        raw: The body.
        open_token: Decrypts a token. Returns the JSON array of its items. If it raises `UnreadableBodyError`,
            this function returns `raw`. This function does not catch other errors.
        with_latest: Whether to include a token's latest user message even if the body also contains this
            message before the token. It then becomes the latest user message of the body.
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
    client_items = [each for each, token in zip(items, tokens, strict=True) if token is None]
    instructed = any(map(_is_instruction, client_items))
    expanded: list[bytes] = []
    opened: set[str] = set()
    for item, token in zip(items, tokens, strict=True):
        if token is None:
            expanded.append(item)
        elif token not in opened:
            opened.add(token)
            sealed = split_elements(memoryview(open_token(token)))
            known = set(_compute_user_digests(expanded)) - set(
                _compute_user_digests(sealed)[-1:] if with_latest else ()
            )
            for each in sealed:
                record = _read_message(each)
                is_known = record is not None and (
                    record.digest in known or (instructed and _has_instructions(record))
                )
                if not is_known:
                    expanded.append(each)
    return _replace_items(raw, place, expanded) if expanded else raw


def _compute_user_digests(items: Iterable[bytes]) -> list[bytes]:
    return [record.digest for record in map(_read_message, items) if record and record.role == "user"]


def _read_message(item: bytes) -> Message | None:
    """Parses an item that is a user message or a privileged message. Returns None for other items."""
    kind, role = read_type_and_role(item)
    return PARSER.parse_message(item) if kind in {"", "message"} and role not in {"", "assistant"} else None


def _is_instruction(item: bytes) -> bool:
    record = _read_message(item)
    return record is not None and _has_instructions(record)


def _has_instructions(record: Message) -> bool:
    """Returns whether a message is privileged, or begins like project instructions of Codex."""
    return record.is_privileged or (record.role == "user" and starts_like_instructions(record.text, "codex"))


def _read_token(item: bytes) -> str | None:
    """Returns the encrypted content of a compaction item that the proxy has made; None for other items."""
    if _PREFIX_BYTES not in item or read_type_and_role(item)[0] not in COMPACTION_TYPES:
        return None
    token = as_string(as_object(decode_small_json(item)).get("encrypted_content"))
    return token if token.startswith(TOKEN_PREFIX) else None


def _cut_items(raw: bytes) -> tuple[dict[str, Slice], Slice | None, tuple[bytes, ...]]:
    """Returns the members of a body, the position of its list of items, and the items.

    The position is None if `input` is not a list.

    Raises:
        UnreadableBodyError: If the bytes are not a valid request body.
    """
    members = find_members(raw)
    place = members.get("input")
    if place is None or not raw.startswith(b"[", place.start):
        return members, None, ()
    return members, place, split_elements(memoryview(raw)[place.start : place.stop])


def _replace_items(raw: bytes, place: Slice, items: tuple[bytes, ...] | list[bytes]) -> bytes:
    return b"".join((raw[: place.start], b"[", b",".join(items), b"]", raw[place.stop :]))


def demote_privileged_item(item: bytes) -> bytes:
    """Returns a privileged message with the role `user`, and any other item unchanged.

    The proxy calls this function for the items that it has written itself, before it encrypts them for a
    compaction item, because only the client may write privileged messages.
    """
    record = _read_message(item)
    return (
        encode_message(Message("user", record.text)) if record is not None and record.is_privileged else item
    )


def build_item(item_id: str, token: str) -> dict[str, Any]:
    """Builds a compaction item of the proxy. `token` is its encrypted content."""
    return {"id": item_id, "type": "compaction", "encrypted_content": token}


def build_response(
    response_id: str, model: str, created_at: int, item: Mapping[str, Any], usage: Mapping[str, Any]
) -> dict[str, Any]:
    """Builds the response to a request for a compaction item, as one object that is not a stream."""
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
    """Returns a response, the result of `build_response`, as a stream of server-sent events.

    Codex reads the compaction item from the event `response.output_item.done`. It reads the id and the usage
    from `response.completed`.
    """
    started = {**response, "status": "in_progress", "output": [], "usage": None}
    [item] = response["output"]
    events: tuple[tuple[str, Mapping[str, Any]], ...] = (
        ("response.created", {"response": started}),
        ("response.in_progress", {"response": started}),
        ("response.output_item.added", {"output_index": 0, "item": item}),
        ("response.output_item.done", {"output_index": 0, "item": item}),
        ("response.completed", {"response": response}),
    )
    return b"".join(
        b"event: %b\ndata: %b\n\n"
        % (name.encode(), json.dumps({"type": name, "sequence_number": number, **fields}).encode())
        for number, (name, fields) in enumerate(events)
    )
