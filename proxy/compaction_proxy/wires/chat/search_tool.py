"""Offers the proxy's search tool on the Chat Completions wire.

With this tool, the model searches messages that compactions have removed. If a response calls the tool, the
proxy sends a further request. This request ends with the model's assistant message, including its calls and
its thinking, and with a result for each call. The module joins the responses before and after such calls, so
that the client receives the texts of all responses in one response. In a stream, a call arrives in several
pieces. Here, a piece is an element of `delta.tool_calls`.
"""

import json
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from compaction_proxy.core.search_tool import TOOL_DESCRIPTION, TOOL_NAME, TOOL_PARAMETERS
from compaction_proxy.wires.json.values import (
    JsonObject,
    as_list,
    as_object,
    as_string,
    encode_ascii_json,
    encode_json,
    is_json_object,
)
from compaction_proxy.wires.search_tool import (
    AnswerJoiner,
    MemberReader,
    SearchTool,
    StreamJoiner,
    add_usage,
    decode_event,
)
from compaction_proxy.wires.sse import DONE_DATA, read_data, replace_data

TOOL_CALLS: Final = "tool_calls"
STOP: Final = "stop"
# If a response has one of these finish reasons, the proxy does not answer its calls of the search tool,
# because their arguments may be incomplete.
CUT_OFF_REASONS: Final = frozenset({"length", "content_filter"})

# Fields of a call or of thinking whose text a stream divides among several events. `merge_piece` joins the
# parts of the text.
_STREAMED_FIELDS: Final = frozenset(
    {"arguments", "input", "text", "summary", "data", "thinking", "signature"}
)


@dataclass(slots=True)
class PartialToolCall:
    """The part of one tool call that has arrived so far.

    Attributes:
        fields: The fields of the call that have arrived.
        index: The `index` of the call in the upstream's response; None if it has none.
        is_ours: Whether this is a call of the proxy's search tool. None while the name of the called tool may
            be incomplete.
        client_index: The index of the call among the calls that the client gets.
    """

    fields: JsonObject = field(default_factory=dict)
    index: int | None = None
    is_ours: bool | None = None
    client_index: int = 0

    @property
    def id(self) -> str:
        """The id of the call; empty if it has none."""
        return as_string(self.fields.get("id"))

    @property
    def name(self) -> str:
        """The part of the function's name that has arrived."""
        return as_string(get_function(self.fields).get("name"))

    @property
    def arguments(self) -> str:
        """The part of the arguments that has arrived, as text. If they are an object, its JSON."""
        value = get_function(self.fields).get("arguments")
        return json.dumps(value) if isinstance(value, dict) else as_string(value)


def get_function(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the member `function` of a call, or of a part of a call; an empty dict if there is none."""
    return as_object(fields.get("function"))


class ToolCallFilter:
    """Removes the calls of the proxy's search tool from one response.

    A call arrives in one or more pieces. A piece is an element of `delta.tool_calls`.

    Args:
        name: The name of the search tool.

    Attributes:
        client_call_count: The number of calls of other tools so far. The client gets these calls.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: list[PartialToolCall] = []
        self._latest_by_index: dict[int | None, PartialToolCall] = {}
        self.client_call_count = 0

    @property
    def own_calls(self) -> list[PartialToolCall]:
        """The calls of the proxy's search tool that have arrived so far, in order."""
        return [call for call in self._calls if call.is_ours]

    @property
    def has_only_own_calls(self) -> bool:
        """Whether the response calls the proxy's search tool and no tool of the client."""
        return bool(self.own_calls) and not self.client_call_count

    def filter_pieces(self, pieces: list[Any]) -> list[Any]:
        """Returns the pieces to send to the client in place of `pieces`, the elements of `delta.tool_calls`.

        Leaves out the calls of the search tool. Holds back the pieces of any other call until the name of its
        tool is known, and then returns them joined into one. After a call of the search tool, gives the
        pieces of later calls lower indices, so that no index is missing.
        """
        return [shown for piece in pieces for shown in self._filter_piece(piece)]

    def release_unnamed(self) -> list[Any]:
        """Returns the calls that `filter_pieces` still holds back because the name of their tool is unknown.

        Call the method when the response ends, and send the result to the client.
        """
        return [self._show_call(call) for call in self._calls if call.is_ours is None]

    def _filter_piece(self, piece: Any) -> list[Any]:
        if not isinstance(piece, dict):
            return [piece]
        call = self._find_call(piece)
        merge_piece(call.fields, piece)
        if call.is_ours is None:
            call.is_ours = self._is_ours(call)
            return [self._show_call(call)] if call.is_ours is False else []
        return [] if call.is_ours else [self._renumber_piece(call, piece)]

    def _find_call(self, piece: JsonObject) -> PartialToolCall:
        """Returns the call to which `piece`, an element of `delta.tool_calls`, belongs.

        If the piece begins a new call, adds this call first. The `index` in the piece is not sufficient to
        find the call, because some providers give no index to calls, or the same index to all calls.
        """
        raw_index = piece.get("index")
        index = raw_index if type(raw_index) is int else None
        latest = self._latest_by_index.get(index)
        if latest is not None and not self._is_new_call(piece, latest):
            return latest
        call = self._latest_by_index[index] = PartialToolCall(index=index)
        self._calls.append(call)
        return call

    @staticmethod
    def _is_new_call(piece: JsonObject, last: PartialToolCall) -> bool:
        """Returns whether `piece`, an element of `delta.tool_calls`, begins a new call.

        If not, the piece belongs to the call `last`. Only a piece with a function name can begin a call, and
        only if the name of `last` has arrived. Such a piece begins a call if it has another id than `last`,
        or if there is neither an id nor an index. Some servers give all calls the same id, or no id. Then the
        piece begins a call if its arguments begin with `{` and the arguments of `last` are complete.
        """
        function = get_function(piece)
        if not function.get("name") or not last.name:
            return False
        call_id = as_string(piece.get("id"))
        if call_id and call_id != last.id:
            return True
        if not call_id and last.index is None:
            return True
        begins_object = as_string(function.get("arguments")).lstrip().startswith("{")
        return begins_object and last.arguments.rstrip().endswith("}") and is_json_object(last.arguments)

    def _is_ours(self, call: PartialToolCall) -> bool | None:
        if call.name == self._name:
            return True
        is_incomplete = not call.name or (self._name.startswith(call.name) and not call.arguments)
        return None if is_incomplete and "custom" not in call.fields else False

    def _show_call(self, call: PartialToolCall) -> JsonObject:
        """Records that a call is for a client's tool. Returns its pieces so far, joined into one."""
        call.is_ours = False
        call.client_index = self.client_call_count
        self.client_call_count += 1
        return self._renumber_piece(call, deepcopy(call.fields))

    def _renumber_piece(self, call: PartialToolCall, piece: JsonObject) -> JsonObject:
        """Returns a piece of a call with the call's index among the calls that the client gets.

        Returns the piece unchanged if the search tool was not called before, or if the call has no index.
        """
        return {**piece, "index": call.client_index} if call.index is not None and self.own_calls else piece


def merge_piece(fields: JsonObject, piece: Mapping[str, Any]) -> None:
    """Merges a piece of a streamed object into `fields`, which contain the object's earlier pieces.

    Merges nested objects member by member. Appends texts in `_STREAMED_FIELDS`, and parts of a name, to the
    earlier text. Any other value replaces the earlier value, unless it is None or an empty text.
    """
    for key, value in piece.items():
        previous = fields.get(key)
        is_text = isinstance(previous, str) and isinstance(value, str)
        if isinstance(previous, dict) and isinstance(value, dict):
            merge_piece(previous, value)
        elif is_text and (key in _STREAMED_FIELDS or (key == "name" and value != previous)):
            fields[key] += value  # some providers repeat the whole name in each piece
        elif key not in fields or value not in (None, ""):
            fields[key] = dict(value) if isinstance(value, dict) else value


# Fields that contain the model's thinking before a tool call. Providers (DeepSeek, Kimi, vLLM, OpenRouter,
# LiteLLM, Gemini) expect these fields in the assistant message of the next request. The fields may contain
# signatures, so their content stays unchanged.
REASONING_FIELDS: Final = (
    "reasoning_content",
    "reasoning",
    "reasoning_details",
    "thinking_blocks",
    "extra_content",
)
# A field of `REASONING_FIELDS` whose value is a list. A client joins those elements of the list that have the
# same `index`.
REASONING_DETAILS: Final = "reasoning_details"

# Matches the end of a text that ends with a complete sentence or a heading. If the text before a call of the
# search tool matches, the text after the call begins a new paragraph.
_SENTENCE_END: Final = re.compile(r"""[.!?:\u2026\u3002\uff01\uff1f\uff1a]["'`*_)\]\u201d\u00bb]{0,8}\Z""")
PARAGRAPH_BREAK: Final = "\n\n"


@dataclass(slots=True)
class AnswerContent:
    """The text and the thinking in one response of the model, without the tool calls in it.

    Attributes:
        texts: The strings of the content and of each thinking field, in order, by field name.
        parts: The parts of the response's content, if the provider sent the content as an array.
        reasoning: The values of thinking fields that are not strings, by field name.
    """

    texts: dict[str, list[str]] = field(default_factory=dict)
    parts: list[Any] = field(default_factory=list)
    reasoning: JsonObject = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The text of the content that the provider sent as strings, without the text in `parts`."""
        return "".join(self.texts.get("content", ()))

    @property
    def reasoning_index_count(self) -> int:
        """The highest `index` of an element of `reasoning_details`, plus one; 0 without any index."""
        return 1 + max((_get_index(each) for each in self.reasoning.get(REASONING_DETAILS) or ()), default=-1)

    def add_delta(self, delta: Mapping[str, Any]) -> None:
        """Adds the content and the thinking of one `delta` of a stream, or of a whole message."""
        for key in ("content", *REASONING_FIELDS):
            value = delta.get(key)
            if isinstance(value, str) and value:
                self.texts.setdefault(key, []).append(value)
            elif isinstance(value, list) and key == "content":
                self.parts += value
            elif value and key != "content":
                self._add_reasoning(key, value)

    def _add_reasoning(self, key: str, value: Any) -> None:
        previous = self.reasoning.get(key)
        if isinstance(previous, list) and isinstance(value, list):
            for each in value:
                _join_reasoning(previous, each)
        elif isinstance(previous, dict) and isinstance(value, dict):
            merge_piece(previous, value)
        else:
            self.reasoning[key] = list(value) if isinstance(value, list) else value

    def build_message(self, calls: Iterable[PartialToolCall]) -> JsonObject:
        """Builds the assistant message of the next request from this content and these calls."""
        text_parts = [{"type": "text", "text": self.text}] if self.text else []
        return {
            "role": "assistant",
            "content": [*text_parts, *self.parts] if self.parts else self.text or None,
            **{key: "".join(pieces) for key, pieces in self.texts.items() if key != "content"},
            **self.reasoning,
            TOOL_CALLS: [_build_returned_call(call, number) for number, call in enumerate(calls)],
        }


def _build_returned_call(call: PartialToolCall, index: int) -> JsonObject:
    """Builds a tool call for the assistant message of the next request.

    Replaces arguments that are not a JSON object by an empty object, because some servers would refuse them.
    The result of the call will tell the model what was wrong with its arguments.

    Args:
        call: The call as the model made it.
        index: The call's position in its message. A call without an id gets an id with this number.
    """
    fields = {name: value for name, value in call.fields.items() if name != "index"}
    arguments = call.arguments if is_json_object(call.arguments) else "{}"
    identity = {"id": call.id or f"call_{index}", "type": "function"}
    return {**fields, **identity, "function": {**get_function(fields), "arguments": arguments}}


def build_turn(message: JsonObject, texts: Iterable[str]) -> list[JsonObject]:
    """Returns the assistant message, followed by a tool message for each of its calls.

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
    """Adds a piece of thinking, an element of a list such as `reasoning_details`, to `pieces`.

    Merges it into the earlier piece with the same `index`. If there is none, appends it.
    """
    index = _get_index(piece)
    for each in pieces:
        if index >= 0 and _get_index(each) == index:
            merge_piece(each, piece)
            return
    pieces.append(piece)


def _get_index(piece: object) -> int:
    """Returns the `index` of a piece of thinking; -1 if it has none."""
    index = piece.get("index") if isinstance(piece, dict) else None
    return index if type(index) is int else -1


def shift_indices(pieces: object, offset: int) -> None:
    """Adds `offset` to the `index` of each piece of thinking in a list such as `reasoning_details`, in place.

    The client receives several responses as one, and joins pieces with the same index. So the pieces of a
    later response must not have the same indices as pieces of earlier responses.
    """
    for piece in as_list(pieces):
        if _get_index(piece) >= 0:
            piece["index"] += offset


def choose_text_separator(before: str, after: str) -> str:
    """Returns the separator between the text before a call and the text after it.

    The separator is a paragraph break if the first text ends with a complete sentence or a heading. Otherwise
    it is empty. It is also empty if the second text begins with white space, or if one of the texts is empty.
    """
    is_joined = not before or not after or after[0].isspace()
    return "" if is_joined or not _SENTENCE_END.search(before) else PARAGRAPH_BREAK


# Names of the members of an event or a response that identify the response. A joined response gets the values
# of these members from the first response.
ENVELOPE: Final = ("id", "created", "model", "system_fingerprint", "service_tier")
# Matches events that must be parsed because they contain calls, a finish reason or usage. It does not match
# the end of a stream (`[DONE]`), for which there is a separate test. Without `[DONE]`, all alternatives of
# the pattern begin with a quote, which makes the search five times as fast.
_EVENT_PATTERN: Final = re.compile(rb'"(?:tool_calls"|finish_reason"\s*:\s*"|usage"\s*:\s*\{)')


class ChatStreamFilter:
    """Removes calls of the proxy's search tool from streams on the Chat Completions wire; see `StreamFilter`.

    Does not parse events of the first response that contain no calls, no finish reason and no usage. Changes
    later responses so that they continue the first response: their events get its id, do not repeat the role,
    and report the usage of all responses together.
    """

    def __init__(self, stream: StreamJoiner) -> None:
        self._stream = stream
        self._envelope: JsonObject = {}
        self._has_sent_role = False
        self._previous_text = ""  # text of the previous response, until the separator after it is chosen
        self._reasoning_offset = 0  # added to the index of `reasoning_details`; see `shift_indices`
        self._reset_answer()

    def _reset_answer(self) -> None:
        self._calls = ToolCallFilter(self._stream.tool_name)
        self._has_finish_reason = False  # the provider has given a finish reason

    def list_own_calls(self) -> list[str]:
        """Returns the arguments of each call of the proxy's search tool in the current response."""
        return [call.arguments for call in self._calls.own_calls]

    def end_answer(self) -> JsonObject:
        """Ends the current response. Returns its message, as `SearchTool.build_turn` expects it."""
        content = AnswerContent()
        for event in self._stream.buffered_events:
            payload = decode_event(read_data(event))
            choice = get_choice(payload)
            delta = as_object(choice.get("delta"))
            content.add_delta(delta)
            self._has_sent_role = self._has_sent_role or "role" in delta
            if self._stream.is_first_answer and not self._envelope and choice:
                self._envelope = {key: payload[key] for key in ENVELOPE if key in payload}
        self._previous_text = content.text or self._previous_text
        self._reasoning_offset += content.reasoning_index_count
        message = content.build_message(self._calls.own_calls)
        self._reset_answer()
        return message

    def encode_error_event(self, body: bytes) -> bytes:
        """Returns the event that reports an error to the client. `body` is the JSON of the error."""
        return b"data: %b\n\n" % body

    def filter_event(self, event: bytes) -> bytes:
        """Returns the bytes to send to the client in place of an event of the upstream."""
        if (
            self._stream.is_first_answer
            and not self._stream.is_continuing
            and DONE_DATA not in event
            and not _EVENT_PATTERN.search(event)
        ):
            self._stream.buffered_events.add(event)
            return event
        data = read_data(event)
        if not data:
            return event  # only a comment, which keeps the connection alive
        if data == DONE_DATA:
            self._stream.is_done = True
            if not self._has_finish_reason and self._may_continue(""):
                self._stream.is_continuing = True
            return b"" if self._stream.is_continuing else event
        payload = decode_event(data)
        if payload.get("error"):
            self._stream.is_continuing = False
            return event
        return self._filter_payload(event, payload)

    def _may_continue(self, reason: str) -> bool:
        """Returns whether the proxy will answer the calls of its search tool in the current response.

        The result is False in these cases: the response has no such calls, it also calls tools of the client,
        it is too large to keep, `reason` (the finish reason) shows that it was cut off, or the proxy may not
        answer calls in it.
        """
        return (
            self._stream.may_answer_calls
            and self._stream.buffered_events.is_complete
            and self._calls.has_only_own_calls
            and reason not in CUT_OFF_REASONS
        )

    def _filter_payload(self, event: bytes, payload: JsonObject) -> bytes:
        usage_holders = find_usage_holders(payload)
        for holder in usage_holders:
            self._stream.usage = holder["usage"]
        if self._stream.is_continuing:
            return b""
        if not payload:
            return event
        self._stream.buffered_events.add(event)
        choice = get_choice(payload)
        is_changed = self._filter_choice(choice)
        if self._stream.is_continuing:
            for holder in usage_holders:
                holder["usage"] = None
            usage_holders = []
        if self._stream.is_first_answer and not is_changed:
            return event
        if not self._stream.is_first_answer:
            self._rewrite_as_continuation(payload, choice, usage_holders)
        has_delta = any(as_object(choice.get("delta")).values())
        is_empty = choice and not (usage_holders or choice.get("finish_reason") or has_delta)
        return b"" if is_empty else replace_data(event, encode_ascii_json(payload))

    def _filter_choice(self, choice: JsonObject) -> bool:
        """Removes calls of the proxy's search tool from a choice, and returns whether the choice has changed.

        If the next response will continue this one, also removes the finish reason. Otherwise, if no calls
        are left for the client, changes the finish reason `tool_calls` to `stop`, and gives the choice an
        empty text if it has none, because clients expect a message without calls to have a text.
        """
        delta = as_object(choice.get("delta"))
        pieces = as_list(delta.get(TOOL_CALLS))
        shown = self._calls.filter_pieces(pieces)
        reason = as_string(choice.get("finish_reason"))
        if reason:
            self._has_finish_reason = True
            shown += self._calls.release_unnamed()
        is_changed = shown != pieces
        if is_changed:
            choice["delta"] = delta
            delta[TOOL_CALLS] = shown
            if not shown:
                del delta[TOOL_CALLS]
        if reason and self._may_continue(reason):
            self._stream.is_continuing = True
            choice["finish_reason"] = None
            return True
        if reason and self._calls.has_only_own_calls:  # no calls are left for the client
            choice["finish_reason"] = STOP if reason == TOOL_CALLS else reason
            choice["delta"] = {**delta, "content": as_string(delta.get("content"))}
            return True
        return is_changed

    def _rewrite_as_continuation(
        self, payload: JsonObject, choice: JsonObject, usage_holders: list[JsonObject]
    ) -> None:
        """Changes an event of a later response, in place, so that it continues the first response."""
        payload.update(self._envelope)
        for holder in usage_holders:
            holder["usage"] = add_usage(self._stream.previous_usage, holder["usage"])
        delta = as_object(choice.get("delta"))
        if self._has_sent_role:
            delta.pop("role", None)
        shift_indices(delta.get(REASONING_DETAILS), self._reasoning_offset)
        content = delta.get("content")
        if isinstance(content, str) and content and self._previous_text:
            delta["content"] = choose_text_separator(self._previous_text, content) + content
            self._previous_text = ""


def get_choice(payload: Mapping[str, Any]) -> JsonObject:
    """Returns the first choice of a response or an event; empty if there is none."""
    return as_object(next(iter(as_list(payload.get("choices"))), None))


def find_usage_holders(payload: JsonObject) -> list[JsonObject]:
    """Returns those objects in an event or a response that have a member `usage`.

    Looks at the event or the response itself, at its first choice (for Kimi) and at its `x_groq` (for Groq).
    """
    holders = (payload, get_choice(payload), as_object(payload.get("x_groq")))
    return [holder for holder in holders if isinstance(holder.get("usage"), dict)]


class ChatAnswerFilter:
    """Removes calls of the proxy's search tool from Chat Completions responses; see `AnswerFilter`.

    Args:
        name: The name of the search tool.
    """

    def __init__(self, name: str) -> None:
        self.call_marker = b'"tool_calls"'
        self.envelope: tuple[str, ...] = ENVELOPE
        self.calls: tuple[str, ...] = ()
        self._tool_name = name
        self._previous_text = ""
        self._previous_logprobs: list[Any] = []

    def read_answer(self, payload: JsonObject) -> bool:
        """Reads the next response of the upstream. Returns False if it contains no message."""
        self._call_filter = ToolCallFilter(self._tool_name)
        self._choice = get_choice(payload)
        self._message = as_object(self._choice.get("message"))
        # The calls that the client gets. They do not include calls of the search tool.
        self._shown = self._call_filter.filter_pieces(as_list(self._message.get(TOOL_CALLS)))
        self._shown += self._call_filter.release_unnamed()
        self.calls = tuple(call.arguments for call in self._call_filter.own_calls)
        return bool(self._message)

    def may_continue(self) -> bool:
        """Returns whether the response is complete and calls no tool of the client."""
        return not self._shown and self._choice.get("finish_reason") not in CUT_OFF_REASONS

    def keep_answer(self) -> JsonObject:
        """Stores the text of a response that the next one will continue, for `complete_answer`.

        Returns the message of the response, as `SearchTool.build_turn` expects it.
        """
        content = AnswerContent()
        content.add_delta(self._message)
        self._previous_text += choose_text_separator(self._previous_text, content.text) + content.text
        self._previous_logprobs += _get_logprobs(self._choice)
        return content.build_message(self._call_filter.own_calls)

    def complete_answer(self) -> None:
        """Changes the last response in place, so that it becomes the joined response.

        Removes the calls of the search tool, and adds the text of the earlier responses. If no calls are left
        for the client, the message has a text, which may be empty.
        """
        choice, message, previous = self._choice, self._message, self._previous_text
        if self.calls:
            message[TOOL_CALLS] = self._shown
            if not self._shown:
                del message[TOOL_CALLS]
                message["content"] = message.get("content") or ""
                if choice.get("finish_reason") == TOOL_CALLS:
                    choice["finish_reason"] = STOP  # no calls are left for the client
        content = message.get("content")
        if isinstance(content, list) and previous:
            message["content"] = [{"type": "text", "text": previous}, *content]
        elif previous:
            text = as_string(content)
            message["content"] = previous + choose_text_separator(previous, text) + text
        if self._previous_logprobs and _get_logprobs(choice):
            choice["logprobs"]["content"] = [*self._previous_logprobs, *_get_logprobs(choice)]


def _get_logprobs(choice: Mapping[str, Any]) -> list[Any]:
    """Returns the log probabilities of a choice's tokens; empty if the choice has none."""
    return as_list(as_object(choice.get("logprobs")).get("content"))


# The proxy does not add its search tool to a body with one of these members. `functions` and `function_call`
# are the legacy form of tools, which a request cannot mix with the current form. With `audio`, the responses
# are audio, which the proxy cannot join.
_EXCLUDING_MEMBERS: Final = ("functions", "function_call", "audio")


def _allows_tool(read: MemberReader) -> bool:
    """Returns whether the proxy may add its search tool to a request. Returns False in these cases.

    - The body has a tool choice but no tools. Providers refuse such a body, and the client should see this
      error. If the search tool were added, they would accept the body.
    - The client asks for several responses (`n`). Each of them could call the tool, but one response cannot
      be continued without the others.
    - The response must be JSON. The text before a call and the text after it cannot be joined into JSON.
    - The body uses the legacy form of tools or asks for audio (`_EXCLUDING_MEMBERS`).
    """
    return (
        not any(map(read, _EXCLUDING_MEMBERS))
        and bool(read("tools") or not read("tool_choice"))
        and read("n") in {b"", b"1"}
        and b'"json' not in read("response_format")
    )


SEARCH_TOOL: Final = SearchTool(
    definition_json=encode_json(
        {
            "type": "function",
            "function": {
                "name": TOOL_NAME,
                "description": TOOL_DESCRIPTION,
                "parameters": dict(TOOL_PARAMETERS),
            },
        }
    ),
    messages_member="messages",
    forbidding_choice=b'"none"',
    allows_tool=_allows_tool,
    build_turn=build_turn,
    open_stream_joiner=partial(StreamJoiner, ChatStreamFilter),
    open_answer_joiner=partial(AnswerJoiner, ChatAnswerFilter),
)
