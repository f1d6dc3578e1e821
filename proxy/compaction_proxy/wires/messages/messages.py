"""Converts pieces of the list `messages` to `Message` objects and back, and shortens messages.

A piece is the JSON of one `Message` (see `Wire`). The same content gives the same `Message` and digest as on
the Chat Completions wire. For example, a tool result becomes a message with the role `tool`, and the input of
a call becomes its arguments as text.

The module encodes messages as an array in which user and assistant must alternate. So it writes consecutive
messages of the same role as one element of the array. A message without such a neighbour keeps its bytes. In
an element that contains several messages, the content blocks keep their bytes, but their order may change. A
user's element begins with the tool results, because they must directly follow their calls. An assistant's
element begins with thinking if one of its messages has any.

The module shortens a message block by block. Blocks that need no change keep their bytes. Thinking stays
unchanged, because its provider has signed it. The module removes the client's cache marks (`cache_control`),
because the client moves them with each request, but a shortened message must keep its bytes in all later
requests.

Newer models refuse signed thinking if the messages before it have changed since the model wrote it, but
accept requests without this thinking. So the module removes all thinking from every request whose messages
the proxy changes. Because it does so each time, the forwarded messages stay the same, and prompt caches stay
valid.

Older models, whose requests set a thinking budget (`"type":"enabled"`), do not check the messages before the
thinking. But if the latest turn contains tool calls, they require that its first assistant message begins
with thinking, so the module keeps the thinking. If a compaction has removed that thinking, the module removes
all thinking, and disables thinking in the request.

Sources: Anthropic's documentation of preserved thinking and of extended thinking with tools, 2026-11.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.media import estimate_file_tokens, estimate_image_url_tokens
from compaction_proxy.core.message import ContentPart, Message, MessageToolCall, find_latest_user_message
from compaction_proxy.core.render import build_excerpt
from compaction_proxy.core.repair import CONTINUE_TEXT
from compaction_proxy.wires.content import (
    PieceParser,
    count_base64_bytes,
    decode_fields,
    get_kind,
    hash_address,
    hash_part,
    hash_text,
    read_content,
    shorten_member,
)
from compaction_proxy.wires.json.slices import find_members, read_member, split_elements
from compaction_proxy.wires.json.values import (
    JsonObject,
    TextCutter,
    as_list,
    as_object,
    as_string,
    cut_long_texts,
    decode_value,
    encode_json,
    parse_json,
)
from compaction_proxy.wires.project_instructions import rejoin_divided_messages
from compaction_proxy.wires.wire import AdaptedMessages

TEXT: Final = "text"
RESULT: Final = "tool_result"
CALL: Final = "tool_use"
THINKING: Final = frozenset({"thinking", "redacted_thinking"})
# The name of the member of a content block that makes a provider cache the prompt up to this block. This
# module calls this member a cache mark. Providers do not pass it to the model.
CACHE_MARK: Final = "cache_control"
# The name and the tags of the XML element in which Claude Code adds text to a user's message.
_REMINDER: Final = b"system-reminder"
_OPENING: Final = "<system-reminder>"
_CLOSING: Final = "</system-reminder>"
# `is_blank` returns False for a content block with more bytes than this, without parsing the block.
_BLANK_BYTES: Final = 256


class _TypedBlock(msgspec.Struct, gc=False):
    """A content block of any kind. The decoder reads only its `type` and skips its other members."""

    type: str = ""


_TYPED_BLOCK: Final = msgspec.json.Decoder(_TypedBlock)


def read_kind(block: bytes) -> str:
    """Returns the `type` of a content block; empty if it has none."""
    try:
        return _TYPED_BLOCK.decode(block).type
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    return as_string(as_object(decode_value(block)).get("type"))


def split_blocks(content: bytes) -> tuple[bytes, ...]:
    """Returns the content blocks in the JSON of a message's content. A string becomes one block of text.

    Raises:
        UnreadableBodyError: If the content is nested too deeply (reason `too-deep`).
    """
    if content.startswith(b'"'):
        return (b'{"type":"text","text":%b}' % content,)
    return split_elements(content) if content.startswith(b"[") else ()


def split_content_blocks(raw: bytes) -> tuple[bytes, ...]:
    """Returns the content blocks of a message; an empty tuple if it has no content."""
    return split_blocks(read_member(raw, find_members(raw), "content"))


def is_reminder(block: bytes) -> bool:
    """Returns whether a content block is a reminder: text in `<system-reminder>` tags, which clients add."""
    if _REMINDER not in block:
        return False
    return is_decoded_reminder(as_object(decode_value(block)))


def is_decoded_reminder(fields: Mapping[str, Any]) -> bool:
    """Returns whether a decoded content block is a reminder, that is, text in `<system-reminder>` tags."""
    text = fields.get("text") if fields.get("type") == TEXT else None
    return isinstance(text, str) and text.strip().startswith(_OPENING) and text.strip().endswith(_CLOSING)


def is_blank(block: bytes) -> bool:
    """Returns whether a content block is a text that is empty or consists of white space.

    Providers refuse such blocks. Returns False for every block with more than `_BLANK_BYTES` bytes.
    """
    if len(block) > _BLANK_BYTES or b'"text"' not in block:
        return False
    fields = as_object(decode_value(block))
    text = fields.get("text") if fields.get("type") == TEXT else None
    return isinstance(text, str) and not text.strip()


# A message whose bytes contain neither of these texts becomes one piece (see `Wire`) without being parsed.
_SPLIT_MARKERS: Final = b'"tool_result"', b'"compaction"'
# The type of a content block with a compaction that the provider has made. The model ignores everything
# before such a block.
_COMPACTION: Final = "compaction"
PROVIDER_COMPACTS: Final = "provider-compacts"


def group_into_pieces(elements: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Divides the elements of `messages` into pieces (see `Wire`). Content blocks keep the client's bytes.

    A user message with tool results becomes one piece for each result, and one piece for all other blocks
    together. If all other blocks are reminders (`is_reminder`), they belong to the piece of the last result.
    Any other element becomes one piece.

    Raises:
        UnreadableBodyError: If an element is not a message, or contains a compaction of the provider.
    """
    found: list[bytes] = []
    for each in elements:
        if any(sign in each for sign in _SPLIT_MARKERS):
            found += _split_by_tool_result(each)
        else:
            found.append(each)
    return tuple(found)


def _split_by_tool_result(raw: bytes) -> Iterator[bytes]:
    places = find_members(raw)
    content, role = read_member(raw, places, "content"), read_member(raw, places, "role")
    blocks = split_blocks(content) if content.startswith(b"[") else ()
    kinds = [read_kind(each) for each in blocks]
    if _COMPACTION in kinds:
        raise UnreadableBodyError(PROVIDER_COMPACTS)
    if role != b'"user"' or RESULT not in kinds or len(blocks) == 1:
        yield raw
        return
    others = [each for each, kind in zip(blocks, kinds, strict=True) if kind != RESULT]
    results = [each for each, kind in zip(blocks, kinds, strict=True) if kind == RESULT]
    if others and all(map(is_reminder, others)):
        results[-1] = b",".join((results[-1], *others))
        others = []
    yield from map(_encode_user_message, results)
    if others:
        yield _encode_user_message(b",".join(others))


def _encode_user_message(blocks: bytes) -> bytes:
    return b'{"role":"user","content":[%b]}' % blocks


_THINKING_MARKER: Final = b"thinking"  # occurs in the names of both kinds of thinking blocks
_THINKING_DISABLED: Final = b'{"type":"disabled"}'


def adapt_for_provider(raw: bytes, messages: Sequence[Message]) -> AdaptedMessages:
    """Returns the messages without the thinking that the provider would refuse.

    The result also contains the members of the body that must change together with the messages.

    Args:
        raw: The client's body.
        messages: The list of messages that replaces the client's list.
    """
    thinking = _read_thinking(raw)
    if as_object(thinking.get("block_binding")).get("prefix_mismatch_behavior") == "drop_block":
        return AdaptedMessages(messages)  # the client has asked the provider to drop such thinking itself
    if thinking.get("type") == "enabled" and _has_required_thinking(messages):
        return AdaptedMessages(messages)
    return drop_thoughts(raw, messages)


def drop_thoughts(raw: bytes, messages: Sequence[Message]) -> AdaptedMessages:
    """Returns the messages without thinking. If the request sets a thinking budget, also disables thinking.

    If the messages contain only thinking, returns them unchanged, because no provider accepts an empty list.
    """
    remaining = tuple([each for each in map(_drop_message_thoughts, messages) if each is not None])
    if not remaining:
        return AdaptedMessages(messages)
    is_enabled = _read_thinking(raw).get("type") == "enabled"
    return AdaptedMessages(remaining, {"thinking": _THINKING_DISABLED} if is_enabled else {})


def _read_thinking(raw: bytes) -> Mapping[str, Any]:
    return as_object(parse_json(read_member(raw, find_members(raw), "thinking")))


def _has_required_thinking(messages: Sequence[Message]) -> bool:
    """Returns whether the latest turn has the thinking that older models require.

    These models require thinking in the turn's first assistant message if this message calls tools. So the
    result is False only if that message calls tools and has no thinking.
    """
    user = find_latest_user_message(messages)
    turn = messages[0 if user is None else user + 1 :]
    first = next((each for each in turn if each.role == "assistant"), None)
    return first is None or not first.calls or has_thoughts(first)


def has_thoughts(record: Message) -> bool:
    """Returns whether a message has thinking blocks."""
    return record.role == "assistant" and any(
        read_kind(each) in THINKING for each in _split_thinking_message(record.raw)
    )


def _split_thinking_message(raw: bytes) -> tuple[bytes, ...]:
    """Returns the content blocks of a message.

    If the message certainly has no thinking, returns an empty tuple without parsing it.
    """
    return split_content_blocks(raw) if _THINKING_MARKER in raw else ()


def _drop_message_thoughts(record: Message) -> Message | None:
    """Returns a message without its thinking blocks; None if it has no other blocks."""
    if record.role != "assistant":
        return record
    blocks = _split_thinking_message(record.raw)
    remaining = [each for each in blocks if read_kind(each) not in THINKING]
    if len(remaining) == len(blocks):
        return record
    place = find_members(record.raw)["content"]
    content = b"[" + b",".join(remaining) + b"]"
    changed = record.raw[: place.start] + content + record.raw[place.stop :]
    return replace(record, raw=changed) if remaining else None


# The `name` of a `Message` that is a failed tool result. If a mask later replaces the result, the mask gets
# the same name, so the proxy still sends it as a failed result.
FAILED_RESULT_NAME: Final = "error"
_ASSISTANT: Final = "assistant"
_USER: Final = "user"
_TURNS: Final = frozenset({_ASSISTANT, _USER})
# Types of content blocks that are neither in the `text` nor in the `parts` of a `Message`. Calls are in a
# separate field. Thinking is in no field except `raw`, because only the model reads it.
_NONCONTENT_KINDS: Final = THINKING | {CALL}
# Maps the type of a content block to the type that the same content has on the Chat Completions wire.
_CHAT_KINDS: Final = {"image": "image_url", "document": "file"}


def _find_result(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the `tool_result` block of a user message with one result; None for any other message.

    The block must be the first one, and only reminders (`is_reminder`) may follow it.
    """
    content = as_list(fields.get("content"))
    if fields.get("role") != "user" or as_object(next(iter(content), None)).get("type") != RESULT:
        return None
    first, *rest = content
    return as_object(first) if all(is_decoded_reminder(as_object(each)) for each in rest) else None


def _convert_fields(raw: bytes, fields: Mapping[str, Any]) -> Message:
    result = _find_result(fields)
    if result is not None:
        text, parts = read_content(result.get("content"), _read_text, _build_part)
        failure_name = FAILED_RESULT_NAME if result.get("is_error") is True else ""
        answers = (as_string(result.get("tool_use_id")),)
        return Message("tool", text, parts, name=failure_name, answered_call_ids=answers, raw=raw)
    role = as_string(fields.get("role"))
    content = fields.get("content")
    if role != "assistant" or not isinstance(content, list):
        text, parts = read_content(content, _read_text, _build_part)
        return Message(role, text, parts, raw=raw)
    plain = [each for each in content if get_kind(each) not in _NONCONTENT_KINDS]
    text, parts = read_content(plain, _read_text, _build_part)
    calls = tuple(_build_call(each) for each in content if get_kind(each) == CALL)
    return Message(role, text, parts, calls=calls, raw=raw)


def _build_call(block: Mapping[str, Any]) -> MessageToolCall:
    block_input = block.get("input", {})
    if not isinstance(block_input, str):
        block_input = json.dumps(block_input, ensure_ascii=False, separators=(",", ":"))
    return MessageToolCall(as_string(block.get("id")), as_string(block.get("name")), block_input)


def _read_text(block: Any) -> str | None:
    if isinstance(block, str):
        return block
    return block["text"] if is_text(block) else None


def _build_part(block: Any, text_offset: int) -> ContentPart:
    kind = get_kind(block)
    return ContentPart(_CHAT_KINDS.get(kind, kind) or "unknown", _hash_payload(kind, block), text_offset)


def is_text(block: object) -> bool:
    """Returns whether a decoded content block is plain text: a string, or an object of type `text`."""
    if not isinstance(block, Mapping):
        return isinstance(block, str)
    return isinstance(block.get("text"), str) and block.get("type", TEXT) == TEXT


def _hash_payload(kind: str, block: Any) -> bytes:
    """Returns the SHA-256 of a content block's inline data or URL (see `hash_address`).

    If the block has neither, returns the SHA-256 of its JSON.
    """
    source = block.get("source") if kind in _CHAT_KINDS else None
    if isinstance(source, Mapping):
        for key in ("data", "url"):
            if isinstance(source.get(key), str):
                return hash_text(source[key]) if source.get("type") == TEXT else hash_address(source[key])
        return hash_part(source)
    return hash_part(block)


def encode_message(record: Message) -> bytes:
    """Returns the JSON of a message that the proxy has written itself. A privileged role becomes `user`."""
    if record.answered_call_ids:
        result = {"type": RESULT, "tool_use_id": record.answered_call_ids[0], "content": record.text}
        error_mark = {"is_error": True} if record.name == FAILED_RESULT_NAME else {}
        return encode_json({"role": "user", "content": [{**result, **error_mark}]})
    return encode_json({"role": _choose_role(record), "content": record.text})


def _choose_role(record: Message) -> str:
    return _ASSISTANT if record.role == _ASSISTANT else _USER


def attach_parts(record: Message, source: Message) -> Message:
    """Returns a message with the text of `record` and the other content of `source`, such as images.

    The other content is all content blocks except text, thinking, calls and tool results. Removes cache marks
    (`CACHE_MARK`) from these blocks, because the client moves cache marks with each request, but the bytes of
    a replacement must not change. Otherwise, the blocks stay unchanged.

    Args:
        record: A message that the proxy has written itself.
        source: A message of the client.
    """
    parts = [
        drop_cache_marks(each)
        for each in as_list(decode_fields(source.raw).get("content"))
        if not is_text(each) and get_kind(each) not in {*_NONCONTENT_KINDS, RESULT}
    ]
    text = [{"type": TEXT, "text": record.text}] if record.text.strip() or not parts else []
    role = _choose_role(source if parts else record)
    return PARSER.parse_message(encode_json({"role": role, "content": [*text, *parts]}))


def drop_cache_marks(value: Any) -> Any:
    """Returns a content block without the cache marks (`CACHE_MARK`) in it and in the blocks inside it."""
    if not isinstance(value, Mapping):
        return value
    plain = {key: each for key, each in value.items() if key != CACHE_MARK}
    if isinstance(plain.get("content"), list):
        plain["content"] = [drop_cache_marks(each) for each in plain["content"]]
    if isinstance(plain.get("source"), Mapping):
        plain["source"] = drop_cache_marks(plain["source"])
    return plain


# To estimate the tokens of a text without a tokenizer, this module assumes this many characters per token.
_TOKEN_CHARACTERS: Final = 4
# The proxy looks for the header of an image, which contains the width and the height, only in this many
# characters at the beginning of the image's base64 data.
_HEADER_CHARACTERS: Final = 128 * 1024


def _has_nontext(record: Message) -> bool:
    return bool(record.parts) or has_thoughts(record)


def _sum_block_tokens(fields: Mapping[str, Any], model: str) -> int:
    return sum([_estimate_block(each, model) for each in as_list(fields.get("content"))])


def _estimate_block(block: Any, model: str) -> int:
    if is_text(block) or not isinstance(block, Mapping):
        return 0
    kind, source = get_kind(block), block.get("source")
    if kind == RESULT:
        return _sum_block_tokens(block, model)
    if kind in THINKING:
        return _estimate_thought(block)
    if kind == "image" and isinstance(source, Mapping):
        return estimate_image_url_tokens(model, _get_image_url(source))
    if kind == "document" and isinstance(source, Mapping):
        return _estimate_document(source, model)
    return 0 if kind == CALL else _estimate_unknown(block)


def _get_image_url(source: Mapping[str, Any]) -> str:
    """Returns the URL of an image.

    For inline data, it is a data URL with the first `_HEADER_CHARACTERS` characters of the data.
    """
    data = source.get("data")
    return (
        f"data:;base64,{data[:_HEADER_CHARACTERS]}" if isinstance(data, str) else str(source.get("url", ""))
    )


def _estimate_document(source: Mapping[str, Any], model: str) -> int:
    data = source.get("data")
    if isinstance(data, str):
        plain = source.get("type") == "text"
        return len(data) // _TOKEN_CHARACTERS if plain else estimate_file_tokens(count_base64_bytes(data))
    content = source.get("content")
    if isinstance(content, list):
        return _estimate_unknown([each for each in content if is_text(each)]) + _sum_block_tokens(
            source, model
        )
    return len(content) // _TOKEN_CHARACTERS if isinstance(content, str) else estimate_file_tokens(None)


def _estimate_thought(block: Mapping[str, Any]) -> int:
    """Estimates the tokens of a thinking block from the largest of three sizes.

    These are the number of characters of `thinking`, that of `data` (redacted thinking), and the number of
    decoded bytes of `signature` (an encrypted copy of the thinking).
    """
    text_length = max(len(str(block.get(key, ""))) for key in ("thinking", "data"))
    sealed_length = count_base64_bytes(str(block.get("signature", "")))
    return max(text_length, sealed_length) // _TOKEN_CHARACTERS


def _estimate_unknown(block: Any) -> int:
    """Estimates the tokens of a content block of unknown type, such as a result of a provider's own tool.

    The estimate is never greater than the number of bytes of the block.
    """
    return len(json.dumps(block, ensure_ascii=False)) // _TOKEN_CHARACTERS


PARSER: Final = PieceParser[JsonObject](decode_fields, _convert_fields, _has_nontext, _sum_block_tokens)


def shorten_message(record: Message, share: float, handle: str) -> Message:
    """Returns the message with about `share` (0..1) of its text, from the beginning and the end of the text.

    Also shortens long texts in the input of calls, replaces blocks such as images by a note that contains the
    `handle`, and removes cache marks (`CACHE_MARK`). If the result would not be shorter, only removes cache
    marks. If there are no cache marks either, returns `record` itself.
    """
    raw = record.raw or encode_message(record)
    cut = partial(build_excerpt, share=share, source_name=handle)
    try:
        shortened = _change_content(raw, partial(_shorten_block, cut=cut, handle=handle))
        if len(shortened) >= len(raw) and b'"cache_control"' in raw:
            shortened = _change_content(raw, drop_cache_marks)
    except (UnreadableBodyError, ValueError, RecursionError):
        return record
    return PARSER.parse_message(shortened) if len(shortened) < len(raw) else record


def _change_content(raw: bytes, change: Callable[[Any], Any]) -> bytes:
    """Returns the message with `change` applied to each content block. All other bytes stay the same.

    Thinking stays unchanged. If a call of a provider's own tool is in the message without its result, or such
    a result without its call (`_find_unpaired_ids`), removes only the cache marks from this block.
    """
    place = find_members(raw).get("content")
    if place is None:
        return raw
    content = raw[place.start : place.stop]
    if content.startswith(b"["):
        values = [(block, decode_value(block)) for block in split_blocks(content)]
        unpaired_ids = _find_unpaired_ids([value for _, value in values])
        changed = b"[%b]" % b",".join(
            [_change_block(block, value, change, unpaired_ids) for block, value in values]
        )
    else:
        changed = encode_json(change(decode_value(content)))
    return b"".join((raw[: place.start], changed, raw[place.stop :]))


def _change_block(
    raw: bytes, value: Any, change: Callable[[Any], Any], unpaired_ids: frozenset[str]
) -> bytes:
    if get_kind(value) in THINKING:
        return raw
    is_unpaired = isinstance(value, Mapping) and _get_pair_id(value) in unpaired_ids
    changed = drop_cache_marks(value) if is_unpaired else change(value)
    return raw if changed == value else encode_json(changed)


def _get_pair_id(block: Mapping[str, Any]) -> str:
    """Returns the id that a call of a provider's own tool has in common with its result.

    Returns an empty string for other blocks.
    """
    if get_kind(block) in {CALL, RESULT}:
        return ""
    pair_id = block.get("tool_use_id", block.get("id"))
    return pair_id if isinstance(pair_id, str) else ""


def _find_unpaired_ids(values: list[Any]) -> frozenset[str]:
    """Returns those ids of calls of a provider's own tools that occur only once in these content blocks.

    A call and its result have the same id. If an id occurs only once, these blocks contain only one of the
    two. The proxy must not replace this one by a note, because providers refuse a call without its result,
    and a result without its call.
    """
    ids = [_get_pair_id(each) for each in values if isinstance(each, Mapping)]
    return frozenset(each for each in ids if each and ids.count(each) == 1)


def _shorten_block(value: Any, cut: TextCutter, handle: str) -> Any:
    """Returns a content block with its text shortened and its cache marks removed.

    Replaces a block that is neither text, nor a call, nor a tool result by a note with the `handle`.
    """
    if isinstance(value, str):
        return cut(value)
    block = drop_cache_marks(value)
    if is_text(block):
        text = cut(block["text"])
        uncited = {key: each for key, each in block.items() if key != "citations"}
        return block if text == block["text"] else {**uncited, "text": text}
    kind = block.get("type", "part") if isinstance(block, dict) else "part"
    if kind == CALL:
        return {**block, "input": cut_long_texts(block.get("input", {}), cut)}
    if kind == RESULT:
        return shorten_member(block, "content", cut, partial(_shorten_block, cut=cut, handle=handle))
    return {"type": TEXT, "text": f"[{kind} of {handle} left out]"}


def join_messages(messages: Sequence[Message]) -> bytes:
    """Encodes messages as the bytes between the brackets of the array `messages`."""
    return b",".join(
        [_write_turn(role, run) for role, run in _group_turns(rejoin_divided_messages(messages))]
    )


def _group_turns(messages: Sequence[Message]) -> list[tuple[str, list[Message]]]:
    """Groups consecutive messages of the same role. Returns each group with its role, in order.

    Each group becomes one element of the array `messages`. The array must begin with a user message. If it
    would begin with an assistant message, the function adds a user message before it. A privileged message is
    allowed only after a user message. If a compaction has removed that user message, the function puts the
    privileged message after the next group of user messages.
    """
    turns: list[tuple[str, list[Message]]] = []
    waiting: list[Message] = []  # privileged messages that wait for the end of a group of user messages
    for each in messages:
        role = each.role if each.is_privileged and each.raw else _choose_role(each)
        if role not in _TURNS:
            waiting.append(each)
        elif role == _ASSISTANT and not turns:
            turns.append((_USER, [Message(role=_USER, text=CONTINUE_TEXT)]))
        if role != _USER and turns and turns[-1][0] == _USER:
            turns += [(record.role, [record]) for record in waiting]
            waiting.clear()
        if role in _TURNS and turns and turns[-1][0] == role:
            turns[-1][1].append(each)
        elif role in _TURNS:
            turns.append((role, [each]))
    return [*turns, *((record.role, [record]) for record in waiting)]


def _write_turn(role: str, run: Sequence[Message]) -> bytes:
    if len(run) == 1:
        return run[0].raw or encode_message(run[0])
    ordered = sorted(run, key=lambda each: not each.answered_call_ids)
    parts = [split_content_blocks(each.raw or encode_message(each)) for each in ordered]
    if role == _ASSISTANT:
        parts = _put_thoughts_first(ordered, parts)
    blocks = [block for part in parts for block in part]
    content_blocks = [block for block in blocks if not is_blank(block)] or blocks[:1]
    if role == _USER:
        content_blocks.sort(key=lambda block: read_kind(block) != RESULT)
    return b'{"role":"%b","content":[%b]}' % (role.encode(), b",".join(content_blocks))


def _put_thoughts_first(
    run: Sequence[Message], parts: Sequence[tuple[bytes, ...]]
) -> list[tuple[bytes, ...]]:
    """Returns the content blocks of consecutive assistant messages in an order that begins with thinking.

    Moves the thinking blocks at the beginning of one message, the first one that has thinking, before all
    other blocks. If this is the first message, or if no message has thinking, the order stays the same.

    Args:
        run: The messages, which become one element of the array `messages`.
        parts: The content blocks of each message.
    """
    first = next((k for k, each in enumerate(run) if has_thoughts(each)), 0)
    if not first:
        return list(parts)
    opening_blocks = parts[first]
    stop = next(
        (k for k, block in enumerate(opening_blocks) if read_kind(block) not in THINKING), len(opening_blocks)
    )
    return [opening_blocks[:stop], *parts[:first], opening_blocks[stop:], *parts[first + 1 :]]
