"""Converts pieces of the `input` of a request to `Message` objects and back, and shortens messages.

A piece is the JSON of one `Message` (see `Wire`). It consists of one item of the input, or of several items
that belong together. The module also estimates the tokens of the content that is not text, such as images,
reasoning, and items that the provider has made.

All items of one response form one piece, so that reasoning is never separated from the calls that follow it.
To group items into pieces, this module decodes only the type and the role of each item.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import groupby
from typing import Any, Final

import msgspec

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.media import (
    estimate_audio_tokens,
    estimate_file_tokens,
    estimate_image_tokens,
    estimate_image_url_tokens,
)
from compaction_proxy.core.message import ContentPart, Message, MessageToolCall
from compaction_proxy.core.render import build_excerpt
from compaction_proxy.wires.body import are_objects, split_objects
from compaction_proxy.wires.content import (
    PieceParser,
    count_base64_bytes,
    estimate_unknown_part,
    get_kind,
    hash_address,
    hash_part,
    read_content,
    shorten_member,
)
from compaction_proxy.wires.json.slices import find_members, read_member, split_elements
from compaction_proxy.wires.json.values import (
    LONG_BYTES,
    JsonObject,
    TextCutter,
    as_list,
    as_object,
    as_string,
    cut_arguments,
    cut_long_texts,
    decode_plain,
    decode_value,
    encode_json,
)
from compaction_proxy.wires.project_instructions import rejoin_divided_messages

# Maps the type of an item that contains the result of a call to the type of the item that contains the call.
CALL_TYPES_BY_OUTPUT: Final[Mapping[str, str]] = {
    "function_call_output": "function_call",
    "custom_tool_call_output": "custom_tool_call",
    "local_shell_call_output": "local_shell_call",
    "shell_call_output": "shell_call",
    "apply_patch_call_output": "apply_patch_call",
}
OUTPUT_TYPES_BY_CALL: Final[Mapping[str, str]] = {
    call: answer for answer, call in CALL_TYPES_BY_OUTPUT.items()
}
# Types of items that contain a compaction made by the provider. For the model, such an item replaces all
# items before it.
COMPACTION_TYPES: Final = frozenset({"compaction", "compaction_summary", "context_compaction"})
# The type of the item that ends a request if the client asks for a compaction item instead of a reply.
TRIGGER_TYPE: Final = "compaction_trigger"
# Types of items that change settings of the model, such as its tools, for all items after them.
SETTING_TYPES: Final = frozenset({"additional_tools", "configuration_update"})

_EMPTY_VALUES: Final = frozenset({b"", b"null", b'""', b"[]"})


class ItemGrouping(Enum):
    """Says how an item of the input is grouped into pieces. A piece is the JSON of one `Message`.

    An item with the value `ALONE` is a separate piece. Adjacent items with the value `RUN` form one piece. An
    item with the value `COMPACTED` and all items before it form one piece.
    """

    ALONE = "alone"
    RUN = "run"
    COMPACTED = "compacted"


class _ItemHead(msgspec.Struct, gc=False):
    type: str | None = None
    role: str | None = None


_ITEM_HEAD = msgspec.json.Decoder(_ItemHead)


def classify_item(kind: str, role: str) -> ItemGrouping:
    """Returns how an item of this type and role is grouped into pieces (see `Wire`).

    Raises:
        UnreadableBodyError: With the reason `stateful` if the item refers to an item that only the provider
            has, or has neither type nor role. With the reason `provider-compacts` if the item asks the
            provider for a compaction.
    """
    if kind in COMPACTION_TYPES:
        return ItemGrouping.COMPACTED
    if kind in CALL_TYPES_BY_OUTPUT or kind in SETTING_TYPES:
        return ItemGrouping.ALONE
    if kind == "item_reference" or not (kind or role):
        raise UnreadableBodyError("stateful")
    if kind == TRIGGER_TYPE:
        raise UnreadableBodyError("provider-compacts")
    return ItemGrouping.ALONE if kind in {"", "message"} and role != "assistant" else ItemGrouping.RUN


def _classify_raw_item(raw: bytes) -> ItemGrouping:
    return classify_item(*read_type_and_role(raw))


def read_type_and_role(raw: bytes) -> tuple[str, str]:
    """Returns the type and the role of an item. Each is an empty string if the item does not have it.

    Raises:
        UnreadableBodyError: If the item cannot be read, for example because it is nested too deeply.
    """
    if len(raw) <= LONG_BYTES:
        try:
            head = _ITEM_HEAD.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass  # for example, a lone surrogate, which JSON allows
        else:
            return head.type or "", head.role or ""
    members = find_members(raw)
    values = [read_member(raw, members, name) for name in ("type", "role")]
    kind, role = [decode_plain(value) if value.startswith(b'"') else "" for value in values]
    return kind, role


def split_message_list(value: memoryview) -> tuple[bytes, ...]:
    """Splits the value of `input` into items. A string becomes one user message.

    Raises:
        UnreadableBodyError: If the value is not a list of objects (reason `no-array` or `no-messages`).
    """
    if bytes(value[:1]) == b'"':
        return (b'{"role":"user","content":%b}' % bytes(value),)
    return split_objects(value)


def group_into_pieces(items: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Groups the items of the input into pieces, as `ItemGrouping` describes.

    Raises:
        UnreadableBodyError: If an item cannot be read, or if `classify_item` refuses it. The proxy must not
            rewrite the input then.
    """
    groupings = [_classify_raw_item(each) for each in items]
    start = (
        len(groupings) - groupings[::-1].index(ItemGrouping.COMPACTED)
        if ItemGrouping.COMPACTED in groupings
        else 0
    )
    pieces = [b",".join(items[:start])] if start else []
    for grouping, group in groupby(range(start, len(items)), groupings.__getitem__):
        indices = list(group)
        run = items[indices[0] : indices[-1] + 1]
        pieces += [b",".join(run)] if grouping is ItemGrouping.RUN else run
    return tuple(pieces)


def may_continue_piece(item: bytes) -> bool:
    """Returns whether the item that follows this one may belong to the same piece (see `Wire`)."""
    return _classify_raw_item(item) is ItemGrouping.RUN


def regroups_previous(items: tuple[bytes, ...]) -> bool:
    """Returns whether one of these items forms one piece (see `Wire`) with all items before it."""
    return any(_classify_raw_item(each) is ItemGrouping.COMPACTED for each in items)


def find_skip_reason(indicators: Mapping[str, bytes]) -> str:
    """Returns why a body must stay unchanged; empty if it may change.

    The body must stay unchanged if the provider stores a part of the conversation (`stateful`), or compacts
    the input itself (`provider-compacts`).
    """
    names = {name for name, value in indicators.items() if value not in _EMPTY_VALUES}
    if names & {"previous_response_id", "conversation"}:
        return "stateful"
    return "provider-compacts" if names else ""


def split_items(piece: bytes) -> tuple[bytes, ...]:
    """Splits a piece (see `Wire`), which is the JSON of one or more items, into the bytes of each item.

    Raises:
        UnreadableBodyError: If the bytes are not a valid piece.
    """
    items = split_elements(b"[%b]" % piece)
    if not items or not are_objects(items):
        raise UnreadableBodyError("no-messages")
    return items


def decode_items(piece: bytes) -> list[dict[str, Any]]:
    """Decodes a piece (see `Wire`), which is the JSON of one or more items.

    Raises:
        UnreadableBodyError: If the bytes are not a valid piece. The reason is `not-json`, `no-messages`,
            `too-many` or `too-deep`.
    """
    value = decode_value(b"[%b]" % piece)
    if not isinstance(value, list) or not value or not all(isinstance(each, dict) for each in value):
        raise UnreadableBodyError("no-messages")
    return value


# The separator between the texts of several messages in one response.
_MESSAGE_SEPARATOR = "\n\n"
# Members of an item that are not part of its content. The digest of an item does not depend on them.
_IDENTITY_MEMBERS = frozenset({"id", "status"})
# Maps the type of an item that contains a call to the member that contains the arguments of the call.
_ARGUMENT_MEMBERS: Final = {
    "function_call": "arguments",
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
}
# Types of items whose member `name` is the name of the called tool. Items of other call types have no member
# `name`, so the proxy derives the name of the tool from the type.
_NAMED_CALLS: Final = frozenset({"function_call", "custom_tool_call"})
_SHORTENED_TYPES: Final = {"message", *CALL_TYPES_BY_OUTPUT, *OUTPUT_TYPES_BY_CALL}


def _convert_items(raw: bytes, items: Sequence[JsonObject]) -> Message:
    groupings = [classify_item(get_kind(each), as_string(each.get("role"))) for each in items]
    if ItemGrouping.COMPACTED in groupings:
        return Message(
            "developer", parts=(ContentPart("compaction", hashlib.sha256(raw).digest(), 0),), raw=raw
        )
    if groupings[0] is ItemGrouping.RUN:
        return _convert_run(raw, items)
    item = items[0]
    kind = as_string(item.get("type"))
    if kind in CALL_TYPES_BY_OUTPUT:
        return _convert_output(raw, item, kind)
    if kind in SETTING_TYPES:
        return Message("developer", parts=(ContentPart(kind, hash_part(_drop_identity(item)), 0),), raw=raw)
    text, parts, refusal = _read_content(item.get("content"))
    return Message(as_string(item.get("role")), text, parts, refusal, as_string(item.get("name")), raw=raw)


def get_item_kind(item: Mapping[str, Any]) -> str:
    """Returns the type of an item. An item without a type is a message."""
    return as_string(item.get("type")) or "message"


def _convert_run(raw: bytes, items: Sequence[JsonObject]) -> Message:
    """Converts the items of one response to one `Message`.

    The result does not contain the text of reasoning items, except in `raw`. Its `has_signed_reasoning` says
    whether there are any reasoning items.
    """
    text, refusal, signed = "", "", False
    parts: list[ContentPart] = []
    calls: list[MessageToolCall] = []
    for item in items:
        kind = get_item_kind(item)
        if kind == "reasoning":
            signed = True
        elif kind in OUTPUT_TYPES_BY_CALL:
            calls.append(_build_call(item))
        elif kind == "message":
            message_text, message_parts, message_refusal = _read_content(item.get("content"))
            text += _MESSAGE_SEPARATOR if text and message_text else ""
            parts += [
                ContentPart(each.kind, each.payload_digest, each.text_offset + len(text))
                for each in message_parts
            ]
            text, refusal = text + message_text, refusal + message_refusal
        else:
            parts.append(ContentPart(kind, hash_part(_drop_identity(item)), len(text)))
    return Message(
        "assistant", text, tuple(parts), refusal, calls=tuple(calls), raw=raw, has_signed_reasoning=signed
    )


def _drop_identity(item: Mapping[str, Any]) -> JsonObject:
    return {key: value for key, value in item.items() if key not in _IDENTITY_MEMBERS}


def _build_call(item: Mapping[str, Any]) -> MessageToolCall:
    kind = get_item_kind(item)
    arguments = item.get(_ARGUMENT_MEMBERS[kind], "")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = as_string(item.get("name")) if kind in _NAMED_CALLS else kind.removesuffix("_call")
    return MessageToolCall(_get_call_id(item), name, arguments)


def _get_call_id(item: Mapping[str, Any]) -> str:
    """Returns the id that a call and its result have in common; empty if the item has none.

    It is the item's `call_id`, or else the `id` of an item of a local shell.
    """
    return as_string(item.get("call_id")) or (
        as_string(item.get("id")) if get_item_kind(item).startswith("local_shell") else ""
    )


def _convert_output(raw: bytes, item: Mapping[str, Any], kind: str) -> Message:
    output, answers = item.get("output"), (_get_call_id(item),)
    if kind == "shell_call_output":
        name, text = f"{kind}:{_read_outcome(output)}", "\n".join(_iter_shell_texts(output))
        return Message("tool", text, name=name, answered_call_ids=answers, raw=raw)
    text, parts, _ = _read_content(output)
    name = "" if kind == "function_call_output" else kind
    if kind == "apply_patch_call_output":
        name = f"{kind}:{as_string(item.get('status'))}"
    return Message("tool", text, parts, name=name, answered_call_ids=answers, raw=raw)


def _iter_shell_texts(output: object) -> Iterator[str]:
    """Yields the texts that shell commands have written to stdout and stderr."""
    for each in map(as_object, as_list(output)):
        yield from filter(None, (as_string(each.get("stdout")), as_string(each.get("stderr"))))


def _read_outcome(output: object) -> str:
    """Returns the exit code of the last shell command, or `timeout` if it ran too long; 0 if unknown."""
    last = next(reversed(as_list(output)), None)
    fields = as_object(as_object(last).get("outcome"))
    return "timeout" if fields.get("type") == "timeout" else str(fields.get("exit_code", 0))


def _read_content(content: object) -> tuple[str, tuple[ContentPart, ...], str]:
    """Returns the text, the other parts and the refusal of a message's content or a call's output.

    Raises:
        UnreadableBodyError: With the reason `too-many` if the content has more than `content.MAX_PARTS`
            parts.
    """
    text, parts = read_content(content, _read_text, _build_part)
    refusals = [
        as_string(as_object(part).get("refusal")) for part in as_list(content) if _read_text(part) is None
    ]
    return text, parts, "".join(refusals)


def _read_text(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    return part["text"] if is_text(part) else None


def is_text(part: Any) -> bool:
    """Returns whether a content part is an object with a string as its member `text`."""
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _build_part(part: Any, text_offset: int) -> ContentPart | None:
    """Builds the `ContentPart` of a part that is not text; None for a refusal.

    For images, files and audio, the kind and the digest are the same as on other wires.
    """
    if isinstance(part, dict) and isinstance(part.get("refusal"), str):
        return None
    kind = get_kind(part)
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return ContentPart("image_url", hash_address(part["image_url"]), text_offset)
    if kind == "input_file":
        source = next((part[key] for key in ("file_data", "file_url") if isinstance(part.get(key), str)), "")
        inner = {key: part[key] for key in ("file_id", "filename") if part.get(key)}
        digest = hash_address(source) if source else hash_part({"type": "file", "file": inner})
        return ContentPart("file", digest, text_offset)
    audio = as_object(part.get(kind)).get("data") if kind == "input_audio" else None
    if isinstance(audio, str):
        return ContentPart(kind, hash_address(audio), text_offset)
    if isinstance(part, dict):
        part = {key: each for key, each in part.items() if key != "prompt_cache_breakpoint"}
    return ContentPart(kind or "unknown", hash_part(part), text_offset)


def encode_message(record: Message) -> bytes:
    """Returns the JSON of a message that the proxy has written itself.

    Writes an assistant message in the form that messages have in responses, because servers that translate
    requests to Chat Completions accept no other form.
    """
    if record.answered_call_ids:
        kind, _, ending = record.name.partition(":")
        return encode_json(
            _build_output(record, kind if kind in CALL_TYPES_BY_OUTPUT else "function_call_output", ending)
        )
    if record.role == "assistant":
        content = [{"type": "output_text", "text": record.text}]
        return encode_json({"type": "message", "role": "assistant", "content": content})
    return encode_json({"role": record.role, "content": record.text})


def _build_output(record: Message, kind: str, ending: str = "") -> JsonObject:
    """Builds the item that contains the result of a call.

    Args:
        record: The message with the result.
        kind: The type of the item.
        ending: The exit code of a shell command, `timeout`, or the status of a patch. Empty for other
            results.
    """
    call_id, text = record.answered_call_ids[0], record.text
    if kind == "shell_call_output":
        code = int(ending) if ending.isascii() and ending.isdigit() else 0
        outcome = {"type": "timeout"} if ending == "timeout" else {"type": "exit", "exit_code": code}
        shell_output = [{"stdout": text, "stderr": "", "outcome": outcome}]
        return {"type": kind, "call_id": call_id, "output": shell_output}
    if kind == "apply_patch_call_output":
        status = ending if ending in {"completed", "failed"} else "failed"
        return {"type": kind, "call_id": call_id, "status": status, "output": text}
    # In the result of a local shell, OpenAI's specification puts the id of the call into `id`, but its
    # examples put the id into `call_id`. So this item has both.
    item_id = {"id": call_id} if kind == "local_shell_call_output" else {}
    return {"type": kind, **item_id, "call_id": call_id, "output": text}


def join_messages(messages: Sequence[Message]) -> bytes:
    """Encodes messages as items, separated by commas.

    A tool result that the proxy has written, such as a mask, becomes an item of the type that matches its
    call, such as `function_call_output` for a `function_call`.
    """
    encoded: list[bytes] = []
    messages = rejoin_divided_messages(messages)
    for index, each in enumerate(messages):
        if (
            not each.raw
            and each.answered_call_ids
            and each.name.partition(":")[0] not in CALL_TYPES_BY_OUTPUT
        ):
            kind = _find_output_kind(each.answered_call_ids[0], messages[:index])
            encoded.append(encode_json(_build_output(each, kind)))
        else:
            encoded.append(each.raw or encode_message(each))
    return b",".join(encoded)


def _find_output_kind(call_id: str, before: Sequence[Message]) -> str:
    """Returns the type of the item that must contain the result of a call.

    Searches `before`, the messages before the result, for the latest call with this id. If there is none,
    returns `function_call_output`.
    """
    for message in reversed(before):
        if any(call.id == call_id for call in message.calls):
            for item in decode_items(message.raw) if message.raw else ():
                if _get_call_id(item) == call_id and get_item_kind(item) in OUTPUT_TYPES_BY_CALL:
                    return OUTPUT_TYPES_BY_CALL[get_item_kind(item)]
            break
    return "function_call_output"


# To estimate tokens without a tokenizer, this module assumes this many bytes per token in English text, in
# JSON, and in encrypted reasoning.
_BYTES_PER_TOKEN: Final = 4


def _sum_item_tokens(items: Sequence[JsonObject], model: str) -> int:
    if not any(get_item_kind(each) in COMPACTION_TYPES for each in items):
        return sum([_estimate_item(each, model) for each in items])
    total = 0
    for each in _select_read_items(items):
        content = each.get("content")
        text_parts = content if isinstance(content, list) else [{"text": as_string(content)}]
        total += _estimate_item(each, model) + _estimate_text(text_parts)
    return total


def _select_read_items(items: Sequence[JsonObject]) -> Sequence[JsonObject]:
    """Returns those items of a piece that the model reads. The piece contains a compaction of the provider.

    Such a piece consists of a compaction item and all items before it. Usually, the items before it are
    messages that the provider has returned together with it, and the model reads all items. But if the piece
    also contains calls or their results, the client has also sent the items that were compacted. The model
    then reads only the compaction items.
    """
    is_uncut = any(get_item_kind(each) in {*OUTPUT_TYPES_BY_CALL, *CALL_TYPES_BY_OUTPUT} for each in items)
    return [each for each in items if not is_uncut or get_item_kind(each) in COMPACTION_TYPES]


def _estimate_text(parts: list[Any]) -> int:
    """Estimates the tokens of those content parts that are text, by the number of their bytes in UTF-8."""
    texts = [each["text"].encode("utf-8", "surrogatepass") for each in parts if is_text(each)]
    return sum(map(len, texts)) // _BYTES_PER_TOKEN


def _estimate_item(item: JsonObject, model: str) -> int:
    kind = get_item_kind(item)
    if kind in OUTPUT_TYPES_BY_CALL or kind == "shell_call_output":  # these items contain only text
        return 0
    if kind == "reasoning":
        return _estimate_reasoning(item)
    if kind == "image_generation_call":
        return estimate_image_url_tokens(model, "data:image/png;base64," + as_string(item.get("result")))
    if kind == "message" or kind in CALL_TYPES_BY_OUTPUT or kind == "computer_call_output":
        content = item.get("content" if kind == "message" else "output")
        parts = [content] if isinstance(content, Mapping) else as_list(content)
        return sum([_estimate_part(part, model) for part in parts])
    other_members = {key: value for key, value in item.items() if key != "encrypted_content"}
    return _estimate_sealed(item) + len(json.dumps(other_members)) // _BYTES_PER_TOKEN


def _estimate_sealed(item: JsonObject) -> int:
    """Estimates the tokens of an item's `encrypted_content` by the number of its bytes; 0 if it has none."""
    return count_base64_bytes(as_string(item.get("encrypted_content"))) // _BYTES_PER_TOKEN


def _estimate_reasoning(item: JsonObject) -> int:
    """Estimates the tokens of a reasoning item.

    Providers include only the reasoning of the current turn in the prompt. But the proxy estimates an item
    only once, while the item belongs to the current turn, and so always counts the reasoning. For earlier
    turns, the estimate is therefore too high. This is safe, because the proxy then compacts too early rather
    than too late, and because calibration corrects the estimates. If an item has encrypted reasoning, the
    function does not count readable reasoning, because the model gets only one of them.
    """
    content = as_list(item.get("content"))
    return _estimate_sealed(item) or _estimate_text(content or as_list(item.get("summary")))


def _estimate_part(part: Any, model: str) -> int:
    if not isinstance(part, Mapping) or is_text(part) or part.get("type") == "refusal":
        return 0
    if get_kind(part) in {"input_image", "computer_screenshot"}:
        url, detail = part.get("image_url"), as_string(part.get("detail")) or "auto"
        return (
            estimate_image_url_tokens(model, url, detail)
            if isinstance(url, str)
            else estimate_image_tokens(model, None, detail)
        )
    if part.get("type") == "input_file":
        data = as_string(part.get("file_data"))
        return estimate_file_tokens(count_base64_bytes(data) if data else None)
    inner = part.get("input_audio")
    if part.get("type") == "input_audio" and isinstance(inner, Mapping):
        size = count_base64_bytes(as_string(inner.get("data")))
        return estimate_audio_tokens(model, size, as_string(inner.get("format")))
    return estimate_unknown_part(part)


def _has_nontext(record: Message) -> bool:
    return bool(record.parts) or record.has_signed_reasoning


PARSER: Final = PieceParser[Sequence[JsonObject]](
    decode_items, _convert_items, _has_nontext, _sum_item_tokens
)


def shorten_message(record: Message, share: float, handle: str) -> Message:
    """Returns the message with about `share` (0..1) of its text, from the beginning and the end of the text.

    Also shortens long texts in the arguments of calls. In a user's message or a tool's result, replaces each
    part that is not text by a note that contains the `handle`. Keeps unknown fields. Returns `record` itself
    if it is privileged, or if the result would not be shorter.
    """
    raw = record.raw or encode_message(record)
    if record.is_privileged:
        return record
    cut = partial(build_excerpt, share=share, source_name=handle)
    shortened = b",".join([_shorten_item(each, cut, handle) for each in split_items(raw)])
    return PARSER.parse_message(shortened) if len(shortened) < len(raw) else record


def _shorten_item(raw: bytes, cut: TextCutter, handle: str) -> bytes:
    """Returns a shortened item, or `raw` if the result would not be shorter."""
    item = decode_value(raw)
    if get_item_kind(item) not in _SHORTENED_TYPES:
        return raw
    try:
        return min(raw, encode_json(_shorten_fields(item, cut, handle)), key=len)
    except (ValueError, RecursionError):
        return raw


def _shorten_fields(item: JsonObject, cut: TextCutter, handle: str) -> JsonObject:
    kind = get_item_kind(item)
    if kind == "message":
        # An assistant message keeps its parts that are not text. So `_shorten_part` gets an empty handle.
        note_handle = "" if item.get("role") == "assistant" else handle
        return shorten_member(item, "content", cut, partial(_shorten_part, cut=cut, handle=note_handle))
    if kind == "shell_call_output":
        return {**item, "output": [_shorten_streams(each, cut) for each in as_list(item.get("output"))]}
    if kind in CALL_TYPES_BY_OUTPUT:
        return shorten_member(item, "output", cut, partial(_shorten_part, cut=cut, handle=handle))
    member = _ARGUMENT_MEMBERS[kind]
    if member == "arguments" and isinstance(item.get(member), str):
        return {**item, member: cut_arguments(item[member], cut)}
    return {**item, member: cut_long_texts(item[member], cut)} if member in item else item


def _shorten_part(part: Any, cut: TextCutter, handle: str) -> Any:
    """Shortens the text or the refusal of a part. Replaces any other part by a note that contains `handle`.

    If `handle` is empty, other parts stay unchanged.
    """
    if isinstance(part, str):
        return cut(part)
    if is_text(part):
        text = cut(part["text"])
        if text == part["text"]:
            return part
        # `logprobs` and `annotations` refer to positions in the old text and would be wrong for the new one.
        remaining = {key: each for key, each in part.items() if key != "logprobs"}
        return {**remaining, "text": text, **({"annotations": []} if "annotations" in remaining else {})}
    if isinstance(part, Mapping) and isinstance(part.get("refusal"), str):
        return {**part, "refusal": cut(part["refusal"])}
    if not handle:
        return part
    kind = part.get("type", "part") if isinstance(part, Mapping) else "part"
    return {"type": "input_text", "text": f"[{kind} of {handle} left out]"}


def _shorten_streams(shown: Any, cut: TextCutter) -> Any:
    if not isinstance(shown, dict):
        return shown
    texts = {key: shown[key] for key in ("stdout", "stderr") if isinstance(shown.get(key), str)}
    return {**shown, **{key: cut(text) for key, text in texts.items()}}


def attach_parts(record: Message, source: Message) -> Message:
    """Returns a message with the text of `record` and all parts of `source` that are not text.

    If there are such parts, the message has the role `user`, because only user messages may contain images
    and files.

    Args:
        record: A message that the proxy has written itself.
        source: A message of the client. Its parts are copied unchanged.
    """
    [item, *_] = decode_items(source.raw) if source.raw else [{}]
    content = as_list(item.get("content"))
    parts = [each for each in content if not isinstance(each, str) and not is_text(each)]
    if not parts:
        return PARSER.parse_message(encode_message(record))
    content_parts = [{"type": "input_text", "text": record.text}, *parts]
    return PARSER.parse_message(encode_json({"role": "user", "content": content_parts}))
