"""Offers the proxy's search tool on the Messages wire, and joins the responses before and after its calls.

With this tool, the model searches messages that compactions have removed.

Sources: Anthropic's documentation of tool use and of extended thinking with tools, 2026-11.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from compaction_proxy.core.search_tool import TOOL_DESCRIPTION, TOOL_NAME, TOOL_PARAMETERS
from compaction_proxy.wires.json.slices import DECODER
from compaction_proxy.wires.json.values import (
    JsonObject,
    as_object,
    as_string,
    encode_ascii_json,
    encode_json,
    is_json_object,
    parse_json,
)
from compaction_proxy.wires.messages.messages import CALL, RESULT, TEXT, THINKING
from compaction_proxy.wires.search_tool import (
    AnswerJoiner,
    ItemAnswerFilter,
    ItemFormat,
    MemberReader,
    SearchTool,
    StreamJoiner,
    add_usage,
    decode_event,
    is_call,
)
from compaction_proxy.wires.sse import DONE_DATA, read_data, replace_data

# If a response has one of these stop reasons, the proxy does not answer its calls of the search tool. The
# response was cut off or refused, or the provider itself will continue it (`pause_turn`).
CUT_OFF_REASONS: Final = frozenset(
    {"max_tokens", "model_context_window_exceeded", "stop_sequence", "refusal", "pause_turn"}
)
TOOL_USE_REASON: Final = "tool_use"
END_TURN_REASON: Final = "end_turn"


def encode_input(block: Mapping[str, Any]) -> str:
    """Returns the input of a call as JSON; empty if it has none."""
    block_input = block.get("input")
    if isinstance(block_input, str):
        return block_input
    return json.dumps(block_input) if block_input else ""


def build_message(blocks: Iterable[JsonObject]) -> JsonObject:
    """Builds the assistant message of the next request from the blocks of the model's reply.

    Leaves out blank text, and replaces a call's input by an empty object if it is not an object, because
    providers refuse both. The result of the call will tell the model what was wrong with its input.
    """
    content = []
    for number, block in enumerate(blocks):
        if block.get("type") == TEXT and not str(block.get("text") or "").strip():
            continue
        if block.get("type") == CALL:
            input_json = encode_input(block)
            input_value = DECODER.decode(input_json) if is_json_object(input_json) else {}
            content.append({**block, "id": block.get("id") or f"toolu_{number}", "input": input_value})
        else:
            content.append(block)
    return {"role": "assistant", "content": content}


def requires_same_tools(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether a request with these messages must define the same tools as the previous request.

    This is the case if a message contains thinking. Newer models accept thinking only if the request defines
    the same tools as the request to which the model replied with this thinking.
    """
    return any(block.get("type") in THINKING for each in messages for block in each["content"])


def build_turn(message: JsonObject, texts: Iterable[str]) -> list[JsonObject]:
    """Returns the assistant message, followed by a user message with the results of its calls, in order."""
    calls = [block for block in message["content"] if block.get("type") == CALL]
    results = [
        {"type": RESULT, "tool_use_id": call["id"], "content": text}
        for call, text in zip(calls, texts, strict=True)
    ]
    return [message, {"role": "user", "content": results}]


# Matches the events of the first response that must be parsed. Names in the model's text do not match,
# because quotes in JSON strings are escaped. Only `[DONE]` may also match the model's text.
_EVENT_PATTERN: Final = re.compile(
    rb'"(?:message_start|content_block_start|message_delta|message_stop|error)"|\[DONE\]'
)
# The last `message_delta` of a joined response always reports these token counts, because clients use the
# last value that they receive for each of them.
_COUNTS: Final = (
    "input_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "output_tokens",
)


class MessagesStreamFilter:
    """Removes calls of the proxy's search tool from streams on the Messages wire; see `StreamFilter`.

    Does not change the events of the first response before its first call of the search tool. Leaves out each
    content block that calls the search tool, and gives later blocks lower indices, so that no index is
    missing. The last `message_delta` event reports the usage of all responses together.
    """

    def __init__(self, stream: StreamJoiner) -> None:
        self._stream = stream
        self._next_index = 0  # index of the next block that the client sees
        self._reset_answer()

    def _reset_answer(self) -> None:
        self._own_calls: dict[int, str] = {}  # arguments of calls, by the upstream's index of the block
        self._client_indices: dict[int, int] = {}  # the client's index of a block, by the upstream's
        self._client_call_count = 0

    def list_own_calls(self) -> Iterable[str]:
        """Returns the arguments of each call of the proxy's search tool in the current response."""
        return self._own_calls.values()

    def end_answer(self) -> JsonObject:
        """Ends the current response. Returns its message, as `SearchTool.build_turn` expects it."""
        message = build_message(
            _join_events(decode_event(read_data(event)) for event in self._stream.buffered_events)
        )
        self._reset_answer()
        return message

    def encode_error_event(self, body: bytes) -> bytes:
        """Returns the event that reports an error to the client. `body` is the JSON of the error."""
        payload = {"type": "error", **decode_event(body)}
        return b"event: error\ndata: %b\n\n" % encode_ascii_json(payload)

    def filter_event(self, event: bytes) -> bytes:
        """Returns the bytes to send to the client in place of an event of the upstream."""
        if self._stream.is_first_answer and not self._own_calls and not _EVENT_PATTERN.search(event):
            self._stream.buffered_events.add(event)
            return event
        data = read_data(event)
        payload = decode_event(data)
        kind = payload.get("type")
        if not data or kind == "ping":
            return event  # a comment or a ping keeps the connection alive
        if kind == "error":
            self._stream.is_continuing = False
            return event
        self._stream.is_done = self._stream.is_done or kind == "message_stop" or data == DONE_DATA
        if self._stream.is_continuing:
            return b""
        self._stream.buffered_events.add(event)
        return self._filter_payload(event, kind, payload)

    def _filter_payload(self, event: bytes, kind: Any, payload: JsonObject) -> bytes:
        if kind == "message_start":
            self._record_usage(as_object(payload.get("message")).get("usage"))
            return event if self._stream.is_first_answer else b""
        if kind == "message_delta":
            return self._filter_end(event, payload)
        index = payload.get("index")
        if type(index) is not int:
            return event
        if kind == "content_block_start":
            self._open_block(index, as_object(payload.get("content_block")))
        if index in self._own_calls:
            self._own_calls[index] += as_string(as_object(payload.get("delta")).get("partial_json"))
            return b""
        number = self._client_indices.get(index, index)
        return (
            event if number == index else replace_data(event, encode_ascii_json({**payload, "index": number}))
        )

    def _open_block(self, index: int, block: JsonObject) -> None:
        if is_call(block, CALL, self._stream.tool_name):
            self._own_calls[index] = encode_input(block)
            return
        self._client_call_count += block.get("type") == CALL
        self._client_indices[index] = self._next_index
        self._next_index += 1

    def _record_usage(self, usage: Any) -> None:
        """Merges counts into the usage of the current response. A zero does not replace an earlier count."""
        counts = as_object(usage)
        self._stream.usage |= {
            name: count for name, count in counts.items() if count or name not in self._stream.usage
        }

    def _filter_end(self, event: bytes, payload: JsonObject) -> bytes:
        """Returns the event to send to the client in place of the `message_delta` that ends a response.

        The result is empty if the next response will continue this one.
        """
        self._record_usage(payload.get("usage"))
        delta = as_object(payload.get("delta"))
        reason = delta.get("stop_reason")
        only_own_calls = bool(self._own_calls) and not self._client_call_count
        if (
            reason
            and only_own_calls
            and self._stream.may_answer_calls
            and self._stream.buffered_events.is_complete
            and reason not in CUT_OFF_REASONS
        ):
            self._stream.is_continuing = True
            return b""
        changed = only_own_calls and reason == TOOL_USE_REASON
        if changed:
            delta["stop_reason"] = END_TURN_REASON  # no calls are left for the client
        if not self._stream.is_first_answer:
            total = add_usage(self._stream.previous_usage, self._stream.usage)
            reported = {*_COUNTS, *as_object(payload.get("usage"))}
            payload["usage"] = {name: value for name, value in total.items() if name in reported}
        return (
            event
            if self._stream.is_first_answer and not changed
            else replace_data(event, encode_ascii_json(payload))
        )


def _join_events(payloads: Iterable[JsonObject]) -> list[JsonObject]:
    """Returns the content blocks of a response, in order, built from the data of its events."""
    blocks: dict[Any, JsonObject] = {}
    pieces: dict[tuple[Any, str], list[str]] = {}
    for payload in payloads:
        index, block, delta = (payload.get(name) for name in ("index", "content_block", "delta"))
        if isinstance(block, dict):
            blocks[index] = dict(block)
        if index in blocks and isinstance(delta, dict):
            _apply_delta(blocks[index], index, delta, pieces)
    for (index, name), texts in pieces.items():
        _join_text(blocks[index], name, "".join(texts))
    return list(blocks.values())


def _apply_delta(
    block: JsonObject, index: Any, delta: JsonObject, pieces: dict[tuple[Any, str], list[str]]
) -> None:
    """Adds a delta, the change that one event describes, to the content block with the given index.

    Appends texts only to the lists in `pieces`, by index and field name. The caller joins these texts and
    adds them to the block after the last event.
    """
    for name, value in delta.items():
        if name == "citation":
            block["citations"] = [*(block.get("citations") or ()), value]
        elif isinstance(value, str) and name != "type":
            pieces.setdefault((index, name), []).append(value)
        elif name != "type":
            block[name] = value


def _join_text(block: JsonObject, name: str, text: str) -> None:
    if name != "partial_json":
        block[name] = as_string(block.get(name)) + text
    elif text:  # a call's input stays text: `build_message` parses it
        parsed = None if block.get("type") == CALL else parse_json(text.encode("utf-8", "surrogatepass"))
        block["input"] = text if parsed is None else parsed


def _is_call_block(block: JsonObject) -> bool:
    return block.get("type") == CALL


def _is_complete(answer: JsonObject) -> bool:
    return answer.get("stop_reason") not in CUT_OFF_REASONS


def _adapt_end(answer: JsonObject, only_own_calls: bool) -> None:  # noqa: FBT001 - set by `ItemAnswerFilter`
    if only_own_calls and answer.get("stop_reason") == TOOL_USE_REASON:
        answer["stop_reason"] = END_TURN_REASON  # no calls are left for the client
    answer["usage"] = as_object(answer.get("usage"))


_ITEM_FORMAT: Final = ItemFormat(
    "content", CALL, ("id", "model"), encode_input, _is_call_block, _is_complete, build_message, _adapt_end
)


def _allows_tool(read: MemberReader) -> bool:
    """Returns whether the proxy may add its search tool to a request. Returns False in these cases.

    - The body has a `tool_choice` other than `auto`. With `any` or `tool`, each response of the upstream must
      call a tool, and with `none`, no response may call one.
    - The body has a `tool_choice` but no tools.
    - The body requires a format of the response, such as JSON. The text before a call and the text after it
      cannot be joined into JSON.
    """
    choice, output = read("tool_choice"), read("output_config")
    is_free = not choice or (bool(read("tools")) and as_object(parse_json(choice)).get("type") == "auto")
    has_format = read("output_format") or as_object(parse_json(output or b"{}")).get("format")
    return is_free and not has_format


SEARCH_TOOL: Final = SearchTool(
    definition_json=encode_json(
        {"name": TOOL_NAME, "description": TOOL_DESCRIPTION, "input_schema": dict(TOOL_PARAMETERS)}
    ),
    messages_member="messages",
    forbidding_choice=b'{"type":"none"}',
    allows_tool=_allows_tool,
    build_turn=build_turn,
    open_stream_joiner=partial(StreamJoiner, MessagesStreamFilter),
    open_answer_joiner=partial(AnswerJoiner, partial(ItemAnswerFilter, _ITEM_FORMAT)),
    requires_same_tools=requires_same_tools,
)
