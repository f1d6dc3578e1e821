"""The search tool in a request, and the request that goes on once the model has called it.

It goes back to the provider as the assistant message that the model wrote, with what was thought, and a
result for each call. To the client it is the first part of one answer.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.search_tool import TOOL_DESCRIPTION, TOOL_NAME, TOOL_PARAMETERS
from compaction_proxy.wires.chat.intercept_calls import (
    TOOL_CALLS,
    JsonObject,
    PartialToolCall,
    get_function,
    is_json_object,
    merge_piece,
)
from compaction_proxy.wires.json.slices import find_members, read_member
from compaction_proxy.wires.wire import ToolSupport

TOOL_JSON: Final[bytes] = json.dumps(
    {
        "type": "function",
        "function": {
            "name": TOOL_NAME,
            "description": TOOL_DESCRIPTION,
            "parameters": dict(TOOL_PARAMETERS),
        },
    },
    separators=(",", ":"),
    ensure_ascii=False,
).encode()
# With these a tool is not offered: the older form of tools, which cannot be mixed with the newer one, and
# answers that are sounds and could not be joined.
_OTHERWISE: Final = ("functions", "function_call", "audio")
_CHOICE_NONE: Final = b'"none"'


def inspect_tools(raw: bytes, name: str) -> ToolSupport:
    """How a body stands to a tool of this name.

    Where the client has a tool of that name itself, ours has no place. Nor has it where there are no tools
    and yet a choice among them: providers refuse that, and would not any more. Of several answers each could
    call it, and none could go on without the others. And an answer that must be JSON cannot be put together
    from what was said before a call and what comes after it.

    Raises:
        Unreadable: It is no request (see `json_slices.members`).
    """
    try:
        places = find_members(raw)
    except RecursionError:
        raise UnreadableBodyError("too-deep") from None
    tools = read_member(raw, places, "tools")
    taken = b'"%b"' % name.encode() in tools
    otherwise = any(read_member(raw, places, each) for each in _OTHERWISE)
    chosen = not tools and bool(read_member(raw, places, "tool_choice"))
    listed = not tools or tools.startswith(b"[")
    free = read_member(raw, places, "n") in {b"", b"1"}
    free = free and b'"json' not in read_member(raw, places, "response_format")
    return ToolSupport(raw, places, bool(tools), listed and free and not (taken or otherwise or chosen))


def is_prefill(last: bytes) -> bool:
    """Whether a request's last message is the beginning of the answer, which the model is to go on with.

    No message may come behind it then: providers refuse that, or begin anew.

    Args:
        last: The message's bytes.
    """
    if b'"assistant"' not in last:
        return False
    place = find_members(last).get("role")
    return place is not None and last[place.start : place.stop] == b'"assistant"'


def add_tool(support: ToolSupport, tool: bytes) -> bytes:
    """The body with this tool as its last one."""
    raw, place = support.raw, support.places.get("tools")
    if support.has_tools and place:
        stop = len(raw[: place.stop - 1].rstrip(b" \t\n\r"))
        return b"".join((raw[:stop], b",", tool, raw[stop:]))
    if place:
        return b"".join((raw[: place.start], b"[", tool, b"]", raw[place.stop :]))
    return _append_member(raw, b'"tools":[%b]' % tool)


def forbid_calls(raw: bytes) -> bytes:
    """A body without tool choice of its own, or with null for one, forbidding every call."""
    place = find_members(raw).get("tool_choice")
    if place is not None:
        return b"".join((raw[: place.start], _CHOICE_NONE, raw[place.stop :]))
    return _append_member(raw, b'"tool_choice":' + _CHOICE_NONE)


def _append_member(raw: bytes, member: bytes) -> bytes:
    stop = raw.rindex(b"}")
    return b"".join((raw[:stop], b",", member, raw[stop:]))


def continue_request(raw: bytes, messages: Sequence[Mapping[str, Any]]) -> bytes:
    """The body with more messages behind its own.

    Raises:
        Unreadable: It is no request with messages.
    """
    place = find_members(raw).get("messages")
    if place is None or raw[place.stop - 1 : place.stop] != b"]":
        raise UnreadableBodyError("no-messages")
    more = b",".join(encode_ascii_json(each) for each in messages)
    stop = place.stop - 1
    return b"".join((raw[:stop], b",", more, raw[stop:]))


def encode_ascii_json(value: object) -> bytes:
    """Compact JSON; in ASCII, so that no lone surrogate of a provider's breaks it."""
    return json.dumps(value, separators=(",", ":")).encode()


# What models think, in the words of providers that want it back between a call and its result (DeepSeek,
# Kimi, vLLM, OpenRouter, LiteLLM, Gemini); signatures are among it, so nothing of it is changed.
REASONING: Final = ("reasoning_content", "reasoning", "reasoning_details", "thinking_blocks", "extra_content")
# Of these a client joins pieces by their index.
DETAILS: Final = "reasoning_details"

# A sentence that has ended, or a heading; what follows it after a call begins anew.
_ENDED: Final = re.compile(r"""[.!?:\u2026\u3002\uff01\uff1f\uff1a]["'`*_)\]\u201d\u00bb]{0,8}\Z""")
BREAK: Final = "\n\n"


@dataclass(slots=True)
class AnswerContent:
    """What a model has said in one answer, beside its calls.

    Attributes:
        texts: Its text, in pieces.
        parts: Parts of its content, where that came as an array.
        thinking: What it thought, where that came as text, in pieces by the name of the field.
        reasoning: What it thought else, by the name of the field.
    """

    texts: list[str] = field(default_factory=list)
    parts: list[Any] = field(default_factory=list)
    thinking: dict[str, list[str]] = field(default_factory=dict)
    reasoning: JsonObject = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Its text."""
        return "".join(self.texts)

    @property
    def reasoning_indices(self) -> int:
        """Indices that its reasoning takes."""
        return 1 + max((_get_index(each) for each in self.reasoning.get(DETAILS) or ()), default=-1)

    def add_delta(self, delta: Mapping[str, Any]) -> None:
        """Take a delta or a message into it."""
        content = delta.get("content")
        if isinstance(content, str):
            self.texts.append(content)
        elif isinstance(content, list):
            self.parts += content
        for key in REASONING:
            value = delta.get(key)
            if value not in (None, "", [], {}):
                self._add_reasoning(key, value)

    def _add_reasoning(self, key: str, value: Any) -> None:
        held = self.reasoning.get(key)
        if isinstance(value, str):
            self.thinking.setdefault(key, []).append(value)
        elif isinstance(held, list) and isinstance(value, list):
            for each in value:
                _join_reasoning(held, each)
        elif isinstance(held, dict) and isinstance(value, dict):
            merge_piece(held, value)
        else:
            self.reasoning[key] = list(value) if isinstance(value, list) else value

    def build_message(self, calls: Iterable[PartialToolCall]) -> JsonObject:
        """The assistant message, with the calls that are to be answered."""
        text = self.text
        content: Any = text or None
        if self.parts:
            content = [*([{"type": "text", "text": text}] if text else ()), *self.parts]
        return {
            "role": "assistant",
            "content": content,
            **{key: "".join(pieces) for key, pieces in self.thinking.items()},
            **self.reasoning,
            TOOL_CALLS: [_build_returned_call(call, number) for number, call in enumerate(calls)],
        }


def _build_returned_call(call: PartialToolCall, number: int) -> JsonObject:
    """The call as its provider takes it back.

    Arguments that are no JSON object would be refused by servers that put them into a template; the result
    says what is wrong with them.
    """
    fields, made = call.fields, get_function(call.fields)
    arguments = call.arguments if is_json_object(call.arguments) else "{}"
    known = {"id": call.id or f"call_{number}", "type": "function"}
    return {**fields, **known, "function": {**made, "arguments": arguments}}


def build_turn(message: JsonObject, texts: Iterable[str]) -> list[JsonObject]:
    """The assistant message and behind it a result for each of its calls, in their order."""
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": text}
        for call, text in zip(message[TOOL_CALLS], texts, strict=True)
    ]
    return [message, *results]


def _join_reasoning(pieces: list[Any], piece: Any) -> None:
    """Add a piece of reasoning to the one with its index, or behind all."""
    index = _get_index(piece)
    for each in pieces:
        if index >= 0 and _get_index(each) == index:
            merge_piece(each, piece)
            return
    pieces.append(piece)


def _get_index(piece: object) -> int:
    """The index of a piece; -1 if it has none."""
    told = piece.get("index") if isinstance(piece, dict) else None
    return told if type(told) is int else -1


def shift_indices(pieces: object, taken: int) -> None:
    """Move pieces behind those whose indices are taken."""
    for piece in pieces if isinstance(pieces, list) else ():
        if _get_index(piece) >= 0:
            piece["index"] += taken


def choose_separator(before: str, after: str) -> str:
    """What stands between what was said before a call and after it: nothing, unless a sentence has ended."""
    apart = not before or not after or after[0].isspace()
    return "" if apart or not _ENDED.search(before) else BREAK


def add_usage(before: Mapping[str, Any], now: Mapping[str, Any]) -> JsonObject:
    """The sum of two `usage` objects, number by number; what is no number is that of the later one."""
    total = dict(now)
    for key, value in before.items():
        told = now.get(key)
        if isinstance(value, dict):
            total[key] = add_usage(value, told if isinstance(told, dict) else {})
        elif _is_number(value):
            total[key] = value + told if _is_number(told) else value
    return total


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
