"""Offers the proxy's search tool on the Responses wire, and joins the responses before and after its calls.

With this tool, the model searches messages that compactions have removed.

Sources: OpenAI's documentation of function calling and of encrypted reasoning (`store: false`), 2026-11.
"""

import json
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

from compaction_proxy.core.search_tool import TOOL_DESCRIPTION, TOOL_NAME, TOOL_PARAMETERS
from compaction_proxy.wires.json.values import (
    JsonObject,
    as_list,
    as_object,
    encode_ascii_json,
    encode_json,
    is_json_object,
    parse_json,
)
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

CALL: Final = "function_call"
RESULT: Final = "function_call_output"
_REASONING: Final = "reasoning"
# Types of those items of a response for which the client need not send a result: the model's text and
# reasoning, and calls of tools that the provider runs itself.
_SELF_CONTAINED_TYPES: Final = frozenset(
    {"message", _REASONING, "web_search_call", "file_search_call", "code_interpreter_call"}
    | {"image_generation_call", "mcp_call", "mcp_list_tools", "compaction"}
)
# The proxy does not add its search tool to a request with one of these members. With `previous_response_id`
# and `conversation`, the provider has stored a part of the conversation. With `prompt`, it may have stored
# tools, which the tools in the request would replace.
_STATEFUL_MEMBERS: Final = ("previous_response_id", "conversation", "prompt")
# Names of the members that identify a response. A joined response gets the values of these members from the
# first response.
_ENVELOPE: Final = ("id", "created_at", "model")


def must_client_answer(item: Mapping[str, Any]) -> bool:
    """Returns whether an item of a response is a call that the client must answer.

    An item of an unknown type counts as such a call.
    """
    return item.get("type") not in _SELF_CONTAINED_TYPES


def read_arguments(item: Mapping[str, Any]) -> str:
    """Returns the arguments of a call as JSON text, even if the provider sent them as an object."""
    arguments = item.get("arguments")
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {})


def build_message(items: Iterable[JsonObject]) -> JsonObject:
    """Prepares the items of a response for the next request. The result contains them as `output`.

    Reasoning with content stays unchanged. Leaves out reasoning without content, because a provider that
    stores nothing cannot find it by its id. If any reasoning is left out, also removes the ids of all other
    items, because the provider refuses items with ids if the reasoning before them is missing. Replaces call
    arguments that are not a JSON object by an empty object.
    """
    all_items = list(items)
    remaining = [item for item in all_items if item.get("type") != _REASONING or _has_content(item)]
    if len(remaining) < len(all_items):
        remaining = [{name: value for name, value in item.items() if name != "id"} for item in remaining]
    return {"output": [_mend_call(item, number) for number, item in enumerate(remaining)]}


def _has_content(item: Mapping[str, Any]) -> bool:
    return bool(item.get("encrypted_content") or item.get("content"))


def _mend_call(item: JsonObject, number: int) -> JsonObject:
    if item.get("type") != CALL:
        return item
    arguments = read_arguments(item)
    valid_arguments = arguments if is_json_object(arguments) else "{}"
    return {**item, "call_id": item.get("call_id") or f"call_{number}", "arguments": valid_arguments}


def build_turn(message: JsonObject, texts: Iterable[str]) -> list[JsonObject]:
    """Returns the items of the response, followed by an item with the result of each call, in order."""
    calls = [item for item in message["output"] if item.get("type") == CALL]
    results = [
        {"type": RESULT, "call_id": call["call_id"], "output": text}
        for call, text in zip(calls, texts, strict=True)
    ]
    return [*message["output"], *results]


_OPENING_EVENTS: Final = frozenset({"response.created", "response.queued", "response.in_progress"})
_COMPLETED_EVENT: Final = "response.completed"
_END_EVENTS: Final = frozenset({_COMPLETED_EVENT, "response.incomplete", "response.failed"})
_ITEM_DONE_EVENT: Final = "response.output_item.done"
# Matches the events of the first response that must be parsed. Names in the model's text do not match,
# because quotes in JSON strings are escaped. Only `[DONE]` may also match the model's text.
_EVENT_PATTERN: Final = re.compile(
    rb'"(?:response\.(?:created|queued|in_progress|output_item\.(?:added|done)|completed|incomplete|failed)'
    rb'|error)"|\[DONE\]'
)
_SEQUENCE_MARKER: Final = b'"sequence_number"'


class ResponsesStreamFilter:
    """Removes calls of the proxy's search tool from streams on the Responses wire; see `StreamFilter`.

    The client gets one stream, even if the proxy joins several responses of the upstream. Events of the first
    response before its first call of the search tool stay unchanged. Each item that calls the search tool is
    left out. Later items get new output indices, and later events new sequence numbers. Both continue without
    a gap over all responses. The last event lists the items of all responses.
    """

    def __init__(self, stream: StreamJoiner) -> None:
        self._stream = stream
        self._next_index = 0  # output index of the next item that the client sees
        self._next_sequence_number = 0  # sequence number of the next event that the client sees
        self._envelope: JsonObject = {}
        self._previous_items: list[JsonObject] = []  # items of earlier responses that the client has received
        self._reset_answer()

    def _reset_answer(self) -> None:
        self._own_call_keys: set[int | str] = set()
        # Maps the key of an item in the upstream's events (`_get_item_key`) to the output index that the item
        # has in the client's stream.
        self._client_indices: dict[int | str, int] = {}
        self._answer_items: list[JsonObject] = []  # items of the current response so far

    def list_own_calls(self) -> Iterable[str]:
        """Returns the arguments of each call of the proxy's search tool in the current response."""
        return [
            read_arguments(item) for item in self._answer_items if is_call(item, CALL, self._stream.tool_name)
        ]

    def end_answer(self) -> JsonObject:
        """Ends the current response. Returns its message, as `SearchTool.build_turn` expects it."""
        self._previous_items += self._drop_calls(self._answer_items)
        message = build_message(self._answer_items)
        self._reset_answer()
        return message

    def encode_error_event(self, body: bytes) -> bytes:
        """Returns the event that reports an error to the client. `body` is the JSON of the error."""
        # OpenAI documents that the fields of the error are directly in the event, but its SDKs read them from
        # the field `error`. So the event has both.
        details = decode_event(body).get("error")
        error = details if isinstance(details, dict) else {"message": str(details)}
        flat = {name: error.get(name) for name in ("code", "message", "param")}
        event = {"type": "error", "sequence_number": self._next_sequence_number, **flat, "error": error}
        return b"event: error\ndata: %b\n\n" % encode_ascii_json(event)

    def filter_event(self, event: bytes) -> bytes:
        """Returns the bytes to send to the client in place of an event of the upstream."""
        if self._stream.is_first_answer and not self._own_call_keys and not _EVENT_PATTERN.search(event):
            self._next_sequence_number += _SEQUENCE_MARKER in event
            return event
        data = read_data(event)
        if not data:
            return event  # only a comment, which keeps the connection alive
        payload = decode_event(data)
        kind = payload.get("type")
        if kind == "error":
            self._stream.is_continuing = False
            return self._renumber_event(event, payload)
        self._stream.is_done = self._stream.is_done or kind in _END_EVENTS or data == DONE_DATA
        if self._stream.is_continuing or (kind in _OPENING_EVENTS and not self._stream.is_first_answer):
            return b""
        if kind in _END_EVENTS:
            return self._filter_end(event, payload)
        return b"" if self._is_hidden(event, payload) else self._renumber_event(event, payload)

    def _is_hidden(self, event: bytes, payload: JsonObject) -> bool:
        """Returns whether the client must not get an event, because it belongs to a call of the search tool.

        Also stores what the filter needs to change later events: the item in the event, or the sequence
        number and the members in `_ENVELOPE` of a `response.created` event.
        """
        if payload.get("type") == "response.created":
            self._envelope = {
                key: payload["response"][key]
                for key in _ENVELOPE
                if key in as_object(payload.get("response"))
            }
            sequence = payload.get("sequence_number")
            self._next_sequence_number = sequence if type(sequence) is int else 0
        item, key = payload.get("item"), _get_item_key(payload)
        if not isinstance(item, dict):
            return key in self._own_call_keys
        if payload.get("type") == _ITEM_DONE_EVENT:
            self._stream.buffered_events.add(event)
        if is_call(item, CALL, self._stream.tool_name):
            self._own_call_keys.add(key)
        elif key not in self._client_indices:
            self._client_indices[key] = self._next_index
            self._next_index += 1
        return key in self._own_call_keys

    def _renumber_event(self, event: bytes, payload: JsonObject) -> bytes:
        """Returns the event with its output index and its sequence number in the client's stream.

        If neither number changes, returns the event itself.
        """
        numbers: JsonObject = {}
        index = payload.get("output_index")
        if type(index) is int:
            numbers["output_index"] = self._client_indices.get(index, index)
        if "sequence_number" in payload:
            numbers["sequence_number"] = self._next_sequence_number
            self._next_sequence_number += 1
        is_unchanged = all(payload[name] == value for name, value in numbers.items())
        return event if is_unchanged else replace_data(event, encode_ascii_json({**payload, **numbers}))

    def _filter_end(self, event: bytes, payload: JsonObject) -> bytes:
        """Returns the event to send to the client in place of the last event of a response.

        The result is empty if the next response will continue this one.
        """
        response = as_object(payload.get("response"))
        output = response.get("output")
        items = (
            [decode_event(read_data(each))["item"] for each in self._stream.buffered_events]
            if self._stream.buffered_events.is_complete
            else []
        )
        items = items or [item for item in as_list(output) if isinstance(item, dict)]
        shown = self._drop_calls(items)
        has_calls = len(shown) < len(items)
        self._stream.usage = as_object(response.get("usage"))
        if (
            has_calls
            and self._stream.may_answer_calls
            and payload["type"] == _COMPLETED_EVENT
            and not any(map(must_client_answer, shown))
        ):
            self._stream.is_continuing, self._answer_items = True, items
            return b""
        if self._stream.is_first_answer and not has_calls:
            return self._renumber_event(event, payload)
        response |= {**self._envelope, "output": [*self._previous_items, *shown]}
        if self._stream.usage:
            response["usage"] = add_usage(self._stream.previous_usage, self._stream.usage)
        sequence = {"sequence_number": self._next_sequence_number} if "sequence_number" in payload else {}
        return replace_data(event, encode_ascii_json({**payload, **sequence, "response": response}))

    def _drop_calls(self, items: list[JsonObject]) -> list[JsonObject]:
        return [item for item in items if not is_call(item, CALL, self._stream.tool_name)]


def _get_item_key(payload: JsonObject) -> int | str:
    """Returns the output index in an event, or else the id of its item; an empty string if it has neither."""
    index, item = payload.get("output_index"), payload.get("item")
    if type(index) is int:
        return index
    item_id = item.get("id") if isinstance(item, dict) else payload.get("item_id")
    return item_id if isinstance(item_id, str) else ""


def _is_complete(answer: JsonObject) -> bool:
    return bool(answer.get("status", "completed") == "completed")


_ITEM_FORMAT: Final = ItemFormat(
    "output", CALL, _ENVELOPE, read_arguments, must_client_answer, _is_complete, build_message
)


def _allows_tool(read: MemberReader) -> bool:
    """Returns whether the proxy may add its search tool to a request. Returns False in these cases.

    - The provider stores the responses, because `store` is not false or `background` is true. The client
      could then continue a stored response by its id, although that response ends in a call of the search
      tool.
    - The body has a `tool_choice` other than `auto`, or has a `tool_choice` but no tools.
    - The response must be JSON. The text before a call and the text after it cannot be joined into JSON.
    - The body has one of the `_STATEFUL_MEMBERS`.
    """
    choice = read("tool_choice")
    text_format = as_object(as_object(parse_json(read("text") or b"{}")).get("format"))
    return (
        (not choice or (bool(read("tools")) and choice == b'"auto"'))
        and read("store") == b"false"
        and read("background") != b"true"
        and not any(map(read, _STATEFUL_MEMBERS))
        and text_format.get("type") in {None, "text"}
    )


# On this wire, `strict` is true by default, which does not allow optional arguments. All arguments of the
# search tool are optional, so `strict` is false here.
SEARCH_TOOL: Final = SearchTool(
    definition_json=encode_json(
        {
            "type": "function",
            "name": TOOL_NAME,
            "description": TOOL_DESCRIPTION,
            "parameters": dict(TOOL_PARAMETERS),
            "strict": False,
        }
    ),
    messages_member="input",
    forbidding_choice=b'"none"',
    allows_tool=_allows_tool,
    build_turn=build_turn,
    open_stream_joiner=partial(StreamJoiner, ResponsesStreamFilter),
    open_answer_joiner=partial(AnswerJoiner, partial(ItemAnswerFilter, _ITEM_FORMAT)),
)
