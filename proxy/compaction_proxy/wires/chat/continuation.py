"""Adds the search tool to a request, and builds the next request after the model has called the tool.

The next request ends with the model's assistant message, including its calls and its thinking, and a result
for each call. The client sees the texts of all answers as one answer.
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
# The proxy does not add its tool to a body with one of these members: the legacy form of tools, which cannot
# be mixed with the current form, or audio answers, which cannot be joined.
_EXCLUDING_MEMBERS: Final = ("functions", "function_call", "audio")
_CHOICE_NONE: Final = b'"none"'


def inspect_tool_support(raw: bytes, name: str) -> ToolSupport:
    """Tells whether a tool of this name can be added to a body.

    It cannot be added in these cases:
    - The client has a tool of that name.
    - The body has a tool choice but no tools. Providers refuse such a body, and the client should see this
      error. With the tool added, they would accept the body.
    - The client asks for several answers (`n`). Each of them could call the tool, but one answer cannot be
      continued without the others.
    - The answer must be JSON. The text before a call and the text after it cannot be joined into JSON.
    - The body uses the legacy form of tools or asks for audio (`_EXCLUDING_MEMBERS`).

    Raises:
        UnreadableBodyError: The body is not a request (see `json.slices.find_members`).
    """
    try:
        places = find_members(raw)
    except RecursionError:
        raise UnreadableBodyError("too-deep") from None
    tools = read_member(raw, places, "tools")
    is_taken = b'"%b"' % name.encode() in tools
    is_excluded = any(read_member(raw, places, each) for each in _EXCLUDING_MEMBERS)
    has_choice = not tools and bool(read_member(raw, places, "tool_choice"))
    is_list = not tools or tools.startswith(b"[")
    is_free = read_member(raw, places, "n") in {b"", b"1"}
    is_free = is_free and b'"json' not in read_member(raw, places, "response_format")
    return ToolSupport(
        raw, places, bool(tools), is_list and is_free and not (is_taken or is_excluded or has_choice)
    )


def is_prefill(last: bytes) -> bool:
    """Returns whether a request's last message is the beginning of an answer, which the model must continue.

    No message may be added after such a message: providers refuse the request, or begin the answer anew.

    Args:
        last: The bytes of the message.
    """
    if b'"assistant"' not in last:
        return False
    place = find_members(last).get("role")
    return place is not None and last[place.start : place.stop] == b'"assistant"'


def add_tool(support: ToolSupport, tool: bytes) -> bytes:
    """Returns the body with this tool added after the client's tools."""
    raw, place = support.raw, support.member_slices.get("tools")
    if support.has_tools and place:
        stop = len(raw[: place.stop - 1].rstrip(b" \t\n\r"))
        return b"".join((raw[:stop], b",", tool, raw[stop:]))
    if place:
        return b"".join((raw[: place.start], b"[", tool, b"]", raw[place.stop :]))
    return _append_member(raw, b'"tools":[%b]' % tool)


def forbid_calls(raw: bytes) -> bytes:
    """Returns the body with a tool choice that forbids all calls.

    In the given body, the tool choice is absent or null.
    """
    place = find_members(raw).get("tool_choice")
    if place is not None:
        return b"".join((raw[: place.start], _CHOICE_NONE, raw[place.stop :]))
    return _append_member(raw, b'"tool_choice":' + _CHOICE_NONE)


def _append_member(raw: bytes, member: bytes) -> bytes:
    stop = raw.rindex(b"}")
    return b"".join((raw[:stop], b",", member, raw[stop:]))


def continue_request(raw: bytes, messages: Sequence[Mapping[str, Any]]) -> bytes:
    """Returns the body with more messages added at the end of its list.

    Raises:
        UnreadableBodyError: The body is not a request with messages.
    """
    place = find_members(raw).get("messages")
    if place is None or raw[place.stop - 1 : place.stop] != b"]":
        raise UnreadableBodyError("no-messages")
    more = b",".join(encode_ascii_json(each) for each in messages)
    stop = place.stop - 1
    return b"".join((raw[:stop], b",", more, raw[stop:]))


def encode_ascii_json(value: object) -> bytes:
    """Returns compact JSON in ASCII, because UTF-8 cannot encode a lone surrogate that a provider sent."""
    return json.dumps(value, separators=(",", ":")).encode()


# Fields that hold the model's thinking before a tool call. Providers (DeepSeek, Kimi, vLLM, OpenRouter,
# LiteLLM, Gemini) want them back in the assistant message that made the call. They may hold signatures, so
# they stay unchanged.
REASONING_FIELDS: Final = (
    "reasoning_content",
    "reasoning",
    "reasoning_details",
    "thinking_blocks",
    "extra_content",
)
# The member of `REASONING_FIELDS` that is a list. Clients join its elements that have the same `index`.
REASONING_DETAILS: Final = "reasoning_details"

# Matches the end of a sentence or of a heading. If the text before a call ends like this, the text after the
# call begins a new paragraph.
_SENTENCE_END: Final = re.compile(r"""[.!?:\u2026\u3002\uff01\uff1f\uff1a]["'`*_)\]\u201d\u00bb]{0,8}\Z""")
PARAGRAPH_BREAK: Final = "\n\n"


@dataclass(slots=True)
class AnswerContent:
    """The text and the thinking of one answer, without its calls.

    Attributes:
        texts: The answer's text, in pieces.
        parts: The parts of the answer's content, if the provider sent the content as an array.
        thinking: Thinking that is plain text: a list of pieces for each field name.
        reasoning: Thinking in other forms, by field name.
    """

    texts: list[str] = field(default_factory=list)
    parts: list[Any] = field(default_factory=list)
    thinking: dict[str, list[str]] = field(default_factory=dict)
    reasoning: JsonObject = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The answer's whole text, without the text in `parts`."""
        return "".join(self.texts)

    @property
    def reasoning_index_count(self) -> int:
        """The highest index in the answer's `reasoning_details` plus one; 0 if there is none."""
        return 1 + max((_get_index(each) for each in self.reasoning.get(REASONING_DETAILS) or ()), default=-1)

    def add_delta(self, delta: Mapping[str, Any]) -> None:
        """Adds the content and the thinking of one `delta` of a stream, or of a whole message."""
        content = delta.get("content")
        if isinstance(content, str):
            self.texts.append(content)
        elif isinstance(content, list):
            self.parts += content
        for key in REASONING_FIELDS:
            value = delta.get(key)
            if value not in (None, "", [], {}):
                self._add_reasoning(key, value)

    def _add_reasoning(self, key: str, value: Any) -> None:
        previous = self.reasoning.get(key)
        if isinstance(value, str):
            self.thinking.setdefault(key, []).append(value)
        elif isinstance(previous, list) and isinstance(value, list):
            for each in value:
                _join_reasoning(previous, each)
        elif isinstance(previous, dict) and isinstance(value, dict):
            merge_piece(previous, value)
        else:
            self.reasoning[key] = list(value) if isinstance(value, list) else value

    def build_message(self, calls: Iterable[PartialToolCall]) -> JsonObject:
        """Builds the assistant message of the next request from this content and the proxy's tool calls."""
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


def _build_returned_call(call: PartialToolCall, index: int) -> JsonObject:
    """Builds a tool call for the assistant message of the next request.

    Arguments that are not a JSON object are replaced by an empty object, because servers that put arguments
    into a template would refuse them. The result of the call tells the model what was wrong.

    Args:
        call: The call as the model made it.
        index: The call's position in its message. A call without an id gets an id that contains it.
    """
    fields, function = call.fields, get_function(call.fields)
    arguments = call.arguments if is_json_object(call.arguments) else "{}"
    identity = {"id": call.id or f"call_{index}", "type": "function"}
    return {**fields, **identity, "function": {**function, "arguments": arguments}}


def build_turn(message: JsonObject, texts: Iterable[str]) -> list[JsonObject]:
    """Returns the assistant message, followed by one tool message with the result of each call.

    Args:
        message: The assistant message with the calls.
        texts: The texts of the results, in the order of the calls.
    """
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": text}
        for call, text in zip(message[TOOL_CALLS], texts, strict=True)
    ]
    return [message, *results]


def _join_reasoning(pieces: list[Any], piece: Any) -> None:
    """Merges a piece of reasoning into the earlier piece with the same index, or appends it."""
    index = _get_index(piece)
    for each in pieces:
        if index >= 0 and _get_index(each) == index:
            merge_piece(each, piece)
            return
    pieces.append(piece)


def _get_index(piece: object) -> int:
    """Returns the `index` of a piece of reasoning; -1 if it has none."""
    index = piece.get("index") if isinstance(piece, dict) else None
    return index if type(index) is int else -1


def shift_indices(pieces: object, offset: int) -> None:
    """Adds `offset` to the `index` of each piece of reasoning, in place.

    The client joins pieces with the same index, so an answer must not use the indices of earlier answers.
    """
    for piece in pieces if isinstance(pieces, list) else ():
        if _get_index(piece) >= 0:
            piece["index"] += offset


def choose_text_separator(before: str, after: str) -> str:
    """Returns the separator between the text before a call and the text after it.

    The separator is a paragraph break if the first text ends with a complete sentence or a heading. It is
    empty if the sentence goes on, if the second text begins with white space, or if one of the texts is
    empty.
    """
    is_joined = not before or not after or after[0].isspace()
    return "" if is_joined or not _SENTENCE_END.search(before) else PARAGRAPH_BREAK


def add_usage(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> JsonObject:
    """Returns the sum of two `usage` objects, number by number. Other values come from `later`."""
    total = dict(later)
    for key, value in earlier.items():
        other = later.get(key)
        if isinstance(value, dict):
            total[key] = add_usage(value, other if isinstance(other, dict) else {})
        elif _is_number(value):
            total[key] = value + other if _is_number(other) else value
    return total


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
