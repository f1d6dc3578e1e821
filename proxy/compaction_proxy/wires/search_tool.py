"""Adds the proxy's search tool to requests, and joins the responses before and after calls of the tool.

With this tool, a model searches the messages that compactions have removed. If a response calls the tool, the
proxy answers the calls: it sends their results to the upstream in a further request. The client receives all
responses as one response. Each wire has its own `SearchTool` object, and its own filters, which remove calls
of the tool from responses.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.wires.json.slices import DECODER, Slice, find_members, read_member
from compaction_proxy.wires.json.values import (
    JsonObject,
    as_list,
    as_object,
    decode_value,
    encode_ascii_json,
)
from compaction_proxy.wires.sse import EventSplitter

# If the events of a streamed response have more bytes than this in total, `EventBuffer` does not keep them
# all. The proxy then cannot answer calls of the search tool in this response.
MAX_KEPT_BYTES: Final = 16 * 1024 * 1024
# `EventBuffer` compresses events whenever more than this many bytes have accumulated. One compression takes a
# third of a millisecond.
BLOCK_BYTES: Final = 64 * 1024


class EventBuffer:
    """Keeps the server-sent events of one response in order, compressed in blocks.

    If the events have more than `MAX_KEPT_BYTES` bytes in total, drops events to limit its memory.

    Attributes:
        size_bytes: The size of all events that were added, before compression.
    """

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._unpacked = bytearray()
        self.size_bytes = 0

    @property
    def is_complete(self) -> bool:
        """Whether the buffer contains all events that were added."""
        return self.size_bytes <= MAX_KEPT_BYTES

    def add(self, event: bytes) -> None:
        """Adds an event. May drop events if all events together have more than `MAX_KEPT_BYTES` bytes."""
        self.size_bytes += len(event)
        self._unpacked += event
        if len(self._unpacked) > BLOCK_BYTES:
            if self.is_complete:
                self._blocks.append(zlib.compress(self._unpacked, zlib.Z_BEST_SPEED))
            else:
                self._blocks.clear()
            self._unpacked.clear()

    def __iter__(self) -> Iterator[bytes]:
        """Yields the events that were added, in order. If `is_complete` is False, some are missing."""
        events = EventSplitter()
        for block in self._blocks:
            yield from events.feed(zlib.decompress(block))
        yield from events.feed(bytes(self._unpacked))
        if rest := events.flush_rest():
            yield rest


def decode_event(data: bytes) -> JsonObject:
    """Decodes the data of an event. Returns an empty object if the data is not a JSON object."""
    try:
        return as_object(DECODER.decode(data.decode()))
    except (ValueError, RecursionError):
        return {}


def add_usage(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> JsonObject:
    """Returns the sum of two `usage` objects.

    A value that only one of them has as a number is taken from there, and other values from `later`.
    """
    total = dict(later)
    for key, value in earlier.items():
        other = later.get(key)
        if isinstance(value, dict):
            total[key] = add_usage(value, as_object(other))
        elif _is_number(value):
            total[key] = value + other if _is_number(other) else value
    return total


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class StreamFilter(Protocol):
    """Removes the calls of the proxy's search tool from the streams of one wire.

    Each `StreamJoiner` has its own filter. The filter reads all responses that the joiner joins, one after
    the other.
    """

    def filter_event(self, event: bytes) -> bytes:
        """Returns the bytes to send to the client in place of an event of the upstream."""

    def list_own_calls(self) -> Iterable[str]:
        """Returns the arguments of each call of the proxy's search tool in the current response."""

    def end_answer(self) -> JsonObject:
        """Ends the current response. Returns its message, as `SearchTool.build_turn` expects it.

        The caller passes only events of the next response to the filter after that.
        """

    def encode_error_event(self, body: bytes) -> bytes:
        """Returns the event that reports an error to the client. `body` is the JSON of the error."""


class StreamJoiner:
    """Joins one or more upstream streams into one stream for the client.

    Removes calls of the proxy's search tool. If a response calls this tool and no tool of the client, the
    joiner also leaves out the end of the response. The client then gets the upstream's next response as a
    continuation of this response.

    Args:
        open_filter: Creates a filter for the events of the wire. The filter reads the attributes of the
            joiner, and sets `is_continuing`, `is_done` and `usage`.
        tool_name: The name of the search tool.

    Attributes:
        is_first_answer: Whether the current response is the first one.
        may_answer_calls: Whether the proxy may answer calls of the search tool in the current response. If
            False, it only removes these calls.
        previous_usage: The usage of all earlier responses together.
        usage: The part of the current response's usage that has arrived so far.
        buffered_events: Events of the current response. From them, `start_next_answer` builds the message of
            the response.
        is_continuing: Whether another response of the upstream will continue the current response.
        is_done: Whether the upstream has signalled the end of the current response.
    """

    def __init__(self, open_filter: Callable[["StreamJoiner"], StreamFilter], tool_name: str) -> None:
        self.tool_name = tool_name
        self.is_first_answer = self.may_answer_calls = True
        self.is_continuing = self.is_done = False
        self.previous_usage: JsonObject = {}
        self.usage: JsonObject = {}
        self.buffered_events = EventBuffer()
        self._events = EventSplitter()
        self._filter = open_filter(self)
        self.encode_error_event = self._filter.encode_error_event

    @property
    def buffered_bytes(self) -> int:
        """The size of all `buffered_events`, in bytes. `start_next_answer` will have to read them."""
        return self.buffered_events.size_bytes

    @property
    def calls(self) -> tuple[str, ...]:
        """The arguments of each call of the search tool that the proxy must answer, as the model wrote them.

        Empty if `is_continuing` is False.
        """
        return tuple(self._filter.list_own_calls()) if self.is_continuing else ()

    def feed(self, chunk: bytes) -> bytes:
        """Takes the next bytes of the upstream's response. Returns the bytes to send to the client now."""
        return b"".join([self._filter.filter_event(event) for event in self._events.feed(chunk)])

    def flush_rest(self) -> bytes:
        """Returns the last bytes for the client. Call it when the upstream's response has ended normally."""
        rest = self._events.flush_rest()
        return self._filter.filter_event(rest) if rest else b""

    def start_next_answer(self, *, may_answer_calls: bool) -> JsonObject:
        """Ends the current response. Returns its message, as `SearchTool.build_turn` expects it.

        After that, pass the bytes of the next response to `feed`.

        Args:
            may_answer_calls: Whether the proxy may answer calls of the search tool in the next response, too.
                If False, the next response is the last one, and the proxy only removes these calls from it.
        """
        message = self._filter.end_answer()
        self.previous_usage = add_usage(self.previous_usage, self.usage)
        self.may_answer_calls = may_answer_calls
        self.is_first_answer = self.is_continuing = self.is_done = False
        self.usage, self.buffered_events, self._events = {}, EventBuffer(), EventSplitter()
        return message


class AnswerFilter(Protocol):
    """Removes the calls of the proxy's search tool from responses of one wire that are not streams.

    Attributes:
        call_marker: Bytes that every response with a tool call contains. A response without these bytes need
            not be parsed.
        envelope: Names of the members that identify a response, such as its id. A joined response gets the
            values of these members from the first response.
        calls: The arguments of each call of the search tool in the current response.
    """

    call_marker: bytes
    envelope: tuple[str, ...]
    calls: tuple[str, ...]

    def read_answer(self, payload: JsonObject) -> bool:
        """Reads the next response, and returns whether the payload is a response of the model."""

    def may_continue(self) -> bool:
        """Returns whether the response is complete and calls no tool of the client."""

    def keep_answer(self) -> JsonObject:
        """Stores the content of a response that the next one will continue, for `complete_answer`.

        Returns the message of the response, as `SearchTool.build_turn` expects it.
        """

    def complete_answer(self) -> None:
        """Changes the payload of the last response in place, so that it becomes the joined response.

        Removes the calls of the search tool, and adds the content of the earlier responses.
        """


class AnswerJoiner:
    """Joins one or more upstream responses that are not streams into one response for the client.

    Removes calls of the proxy's search tool.

    Args:
        open_filter: Creates a filter of the wire, given the name of the search tool.
        tool_name: The name of the search tool.

    Attributes:
        message: The message of the latest response for which `join_answer` returned None. Pass it to
            `SearchTool.build_turn`.
    """

    def __init__(self, open_filter: Callable[[str], AnswerFilter], tool_name: str) -> None:
        self.message: JsonObject = {}
        self._filter = open_filter(tool_name)
        self._is_first_answer = True
        self._first_envelope: JsonObject = {}
        self._previous_usage: JsonObject = {}

    @property
    def calls(self) -> tuple[str, ...]:
        """The arguments of each call of the proxy's search tool in the latest response."""
        return self._filter.calls

    def join_answer(self, body: bytes, *, may_answer_calls: bool) -> bytes | None:
        """Returns the body for the client, or None if the proxy must first answer calls of its search tool.

        If the first response has no calls of the tool, returns `body` itself. If a later response is a JSON
        object but not a response of the model, such as an error, also returns `body` itself. If a later
        response is not a JSON object, returns no bytes.

        Args:
            body: The upstream's response.
            may_answer_calls: Whether the proxy may answer calls of the search tool in this response. If
                False, this is the last response, and the proxy only removes these calls from it.
        """
        if self._is_first_answer and self._filter.call_marker not in body:
            return body
        payload = _decode_body(body)
        is_answer = self._filter.read_answer(payload)
        if self._is_first_answer and not self.calls:
            return body
        if not is_answer:
            return body if payload else b""  # a body without a response may be an error for the client
        if may_answer_calls and self.calls and self._filter.may_continue():
            self.message = self._filter.keep_answer()
            self._previous_usage = add_usage(self._previous_usage, as_object(payload.get("usage")))
            if self._is_first_answer:
                self._first_envelope = {key: payload[key] for key in self._filter.envelope if key in payload}
            self._is_first_answer = False
            return None
        self._filter.complete_answer()
        payload |= self._first_envelope
        if isinstance(payload.get("usage"), dict):
            payload["usage"] = add_usage(self._previous_usage, payload["usage"])
        return encode_ascii_json(payload)


def _decode_body(body: bytes) -> JsonObject:
    """Decodes a body. Returns an empty object if the body is not a JSON object."""
    try:
        return as_object(decode_value(body.strip()))
    except UnreadableBodyError:
        return {}


class ItemFormat(NamedTuple):
    """Describes the responses of a wire on which a response contains a list of items, such as tool calls.

    Attributes:
        list_member: The member of a response that contains its items.
        call_type: The type of the items that call the search tool. Calls of client tools may have the same
            type.
        envelope: Names of the members that identify a response, such as its id.
        read_arguments: Returns the arguments of a call as JSON text.
        must_client_answer: Returns whether an item is a call that the client must answer.
        is_complete: Returns whether a response is complete, that is, not cut off.
        build_message: Builds the message of a response from its items, as `SearchTool.build_turn` expects it.
        adapt_end: Changes the last response in place, for example its stop reason. The second argument says
            whether the response calls the search tool and no tool of the client.
    """

    list_member: str
    call_type: str
    envelope: tuple[str, ...]
    read_arguments: Callable[[JsonObject], str]
    must_client_answer: Callable[[JsonObject], bool]
    is_complete: Callable[[JsonObject], bool]
    build_message: Callable[[Iterable[JsonObject]], JsonObject]
    adapt_end: Callable[[JsonObject, bool], None] | None = None


class ItemAnswerFilter:
    """Removes the calls of the proxy's search tool from responses with a list of items; see `AnswerFilter`.

    Args:
        item_format: The format of the responses.
        name: The name of the search tool.
    """

    def __init__(self, item_format: ItemFormat, name: str) -> None:
        self._format = item_format
        self._name = name
        self.call_marker = b'"%b"' % item_format.call_type.encode()
        self.envelope = item_format.envelope
        self.calls: tuple[str, ...] = ()
        self._payload: JsonObject = {}
        self._previous_items: list[JsonObject] = []  # items of earlier responses that the client gets
        self._items: list[JsonObject] = []

    def read_answer(self, payload: JsonObject) -> bool:
        """Reads the next response, and returns whether it has a list of items."""
        self._payload, value = payload, payload.get(self._format.list_member)
        self._items = [item for item in as_list(value) if isinstance(item, dict)]
        own_calls = [item for item in self._items if is_call(item, self._format.call_type, self._name)]
        self._shown = [item for item in self._items if item not in own_calls]
        self._calls_client = any(map(self._format.must_client_answer, self._shown))
        self.calls = tuple(map(self._format.read_arguments, own_calls))
        return isinstance(value, list)

    def may_continue(self) -> bool:
        """Returns whether the response is complete and calls no tool of the client."""
        return not self._calls_client and self._format.is_complete(self._payload)

    def keep_answer(self) -> JsonObject:
        """Stores the items that are not calls of the proxy's search tool, for `complete_answer`.

        Returns the message of the response, as `SearchTool.build_turn` expects it.
        """
        self._previous_items += self._shown
        return self._format.build_message(self._items)

    def complete_answer(self) -> None:
        """Changes the payload of the last response in place, so that it becomes the joined response.

        Removes the calls of the search tool, and adds the items of the earlier responses.
        """
        if self._format.adapt_end:
            self._format.adapt_end(self._payload, bool(self.calls) and not self._calls_client)
        self._payload[self._format.list_member] = [*self._previous_items, *self._shown]


def is_call(item: Mapping[str, Any], call_type: str, name: str) -> bool:
    """Returns whether an element of a response is a tool call of the type `call_type` for the tool `name`."""
    return item.get("type") == call_type and item.get("name") == name


class ToolSupport(NamedTuple):
    """A request body, and whether the proxy can add its search tool to it.

    Attributes:
        raw: The body.
        member_slices: The positions of the body's members, by name.
        has_tools: Whether the client's body already has tools.
        can_add_tool: Whether the proxy can add its tool to the body, and answer the model's calls of the
            tool.
    """

    raw: bytes
    member_slices: Mapping[str, Slice]
    has_tools: bool
    can_add_tool: bool


MemberReader = Callable[[str], bytes]


def _never_requires_same_tools(_: Sequence[Mapping[str, Any]]) -> bool:
    return False


@dataclass(frozen=True, slots=True, eq=False)
class SearchTool:
    """Describes how the proxy offers its search tool on one wire, and answers calls of the tool.

    Attributes:
        definition_json: The tool's definition as JSON.
        messages_member: The member of a body that contains the messages.
        forbidding_choice: The JSON value of `tool_choice` that forbids all tool calls.
        allows_tool: Returns whether a request allows one more tool. Its argument is a function that returns
            the JSON of a member of the request's body (`json.slices.read_member`).
        build_turn: Builds the elements that the proxy adds to the messages of the next request: the message
            of the latest response, and the results of the calls in it, in order. The first argument is this
            message, as a joiner has returned it. The second argument contains the texts of the results.
        open_stream_joiner: Creates a joiner for streams, given the tool's name.
        open_answer_joiner: Creates a joiner for responses that are not streams, given the tool's name.
        requires_same_tools: Returns whether a provider accepts the elements that `build_turn` has built only
            if the next request defines the same tools as the previous request.
    """

    definition_json: bytes
    messages_member: str
    forbidding_choice: bytes
    allows_tool: Callable[[MemberReader], bool]
    build_turn: Callable[[JsonObject, Iterable[str]], list[JsonObject]]
    open_stream_joiner: Callable[[str], StreamJoiner]
    open_answer_joiner: Callable[[str], AnswerJoiner]
    requires_same_tools: Callable[[Sequence[Mapping[str, Any]]], bool] = _never_requires_same_tools

    def inspect_tool_support(self, raw: bytes, name: str) -> ToolSupport:
        """Checks whether a body has tools, and whether the proxy can add a tool of this name to it.

        The proxy cannot add the tool if the body already has a tool of this name, if the body's `tools` are
        not a list, or if `allows_tool` returns False.

        Raises:
            UnreadableBodyError: If the body is not a JSON object (see `json.slices.find_members`).
        """
        places = find_members(raw)
        read = partial(read_member, raw, places)
        tools = read("tools")
        is_list = not tools or tools.startswith(b"[")
        is_taken = b'"%b"' % name.encode() in tools
        return ToolSupport(raw, places, bool(tools), is_list and not is_taken and self.allows_tool(read))

    def forbid_calls(self, raw: bytes) -> bytes:
        """Returns the body with a `tool_choice` that forbids all tool calls.

        The given body must have no `tool_choice`, or null as its value.
        """
        return _set_member(raw, find_members(raw).get("tool_choice"), "tool_choice", self.forbidding_choice)

    def continue_request(self, raw: bytes, elements: Sequence[Mapping[str, Any]]) -> bytes:
        """Returns the body with `elements` added at the end of its list of messages.

        If the body has a string instead of a list of messages, the string becomes the first user message.

        Raises:
            UnreadableBodyError: If the body has no messages.
        """
        places = find_members(raw)
        value = read_member(raw, places, self.messages_member)
        if value.startswith(b'"'):
            value = b'[{"role":"user","content":%b}]' % value
        if not value.startswith(b"["):
            raise UnreadableBodyError("no-messages")
        place = places[self.messages_member]
        more = b",".join(encode_ascii_json(each) for each in elements)
        return b"".join((raw[: place.start], value[:-1], b",", more, b"]", raw[place.stop :]))


def add_tool(support: ToolSupport, tool: bytes) -> bytes:
    """Returns the body in `support` with this tool, given as JSON, added after the client's tools."""
    raw, place = support.raw, support.member_slices.get("tools")
    if support.has_tools and place:
        stop = len(raw[: place.stop - 1].rstrip(b" \t\n\r"))
        return b"".join((raw[:stop], b",", tool, raw[stop:]))
    return _set_member(raw, place, "tools", b"[%b]" % tool)


def _set_member(raw: bytes, place: Slice | None, name: str, value: bytes) -> bytes:
    """Returns the body with the value of a member replaced.

    If the body does not have the member, adds it at the end of the body.
    """
    if place:
        return b"".join((raw[: place.start], value, raw[place.stop :]))
    stop = raw.rindex(b"}")
    return b"".join((raw[:stop], b',"', name.encode(), b'":', value, raw[stop:]))


def is_prefill(last: bytes) -> bool:
    """Returns whether a request's last message is the beginning of a reply, which the model must continue.

    The proxy must not add a message after such a message. If it did, the provider would refuse the request,
    or the model would begin a new reply.

    Args:
        last: The bytes of the message.
    """
    return b'"assistant"' in last and read_member(last, find_members(last), "role") == b'"assistant"'
