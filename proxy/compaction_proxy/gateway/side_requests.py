"""Detects side calls: requests that clients send under the id of a conversation, but that are not part of it.

A side call asks for a title or a topic, checks a quota, or the like. The proxy relays a side call like any
request. But it does not treat the messages of a side call as the current state of the conversation, and it
does not start a new conversation for them. The proxy recognises a side call by features that no request of
the conversation itself has, such as a limit of one output token. If a side call has none of these features,
the proxy treats it as a request of the conversation. The only effect is one more line in the conversation's
history.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final

from compaction_proxy.core.title_request import (
    is_side_request_prompt,
    is_title_or_side_prompt,
    is_title_request,
)
from compaction_proxy.support.lru import BoundedDict
from compaction_proxy.wires.prescan import decode_member, read_system_and_user_texts, scan_outline

# The header field in which Claude Code classifies a request: `main`, `subagent`, `workflow`, `compaction` or
# `auxiliary`. An `auxiliary` request is a side call.
CLASS_HEADER: Final = b"x-claude-code-request-class"
_AUXILIARY: Final = b"auxiliary"
# A request with more bytes than this is not a client's test request (`_is_probe`).
MAX_PROBE_BYTES: Final = 2_048
# A request with more bytes than this does not ask for a title or the like. A client's request for a summary
# may have more bytes, because its text quotes the conversation.
MAX_TITLE_BYTES: Final = 16_384
# The system prompt of a request for a summary is in the first or in the last `EDGE_BYTES` bytes of the body.
# The proxy searches only these bytes of a large body.
EDGE_BYTES: Final = 8_192
# Of a larger body, only this many bytes at each end are searched for tools and earlier replies.
MAX_SEARCHED_EDGE_BYTES: Final = 1024 * 1024
# The keys of all limits on output tokens, such as `max_tokens`, end in this text.
_TOKENS: Final = b'tokens"'
# A request body with tools contains this text. Inside a JSON string, its quotes would be escaped, so a match
# is never in the text of a message.
_TOOLS: Final = b'"tools"'
# A request that contains earlier replies or tool calls of the model contains at least one of these texts.
_HISTORY_MARKS: Final = (b'"assistant"', b'_call"', b'_output"')
# Every request for a summary from a known client contains one of these texts.
_SUMMARY_PHRASES: Final = (b"partial conversation", b"context summarization")
# Every request for a title, for tags or for follow-up questions contains one of these texts.
_TITLE_PHRASES: Final = (
    b"itle",
    b"tags",
    b"eadline",
    b"ollow-up",
    b"this session",
    b"commit messages",
    *_SUMMARY_PHRASES,
)
# The most conversations for which the proxy remembers whether their requests have tools. If there are more,
# it forgets the conversation whose requests it searched longest ago.
MAX_CONVERSATIONS: Final = 10_000
# The number of requests of each conversation that the proxy searches for tools.
_MAX_INSPECTED: Final = 3


class SideRequestKind(Enum):
    """Whether a side call, such as a request for a title, contains the messages of its conversation."""

    ALONE = "alone"
    """The side call does not carry the conversation's messages."""
    WITHIN = "within"
    """The side call carries the conversation's messages, so the conversation's checkpoint applies to it."""


def classify_side_request(raw: bytes, request_class: bytes, *, has_tools: bool) -> SideRequestKind | None:
    """Returns the kind of a side call, or None if the request is no side call.

    A side call is a request that is not part of the conversation, such as a request for a title.

    Args:
        raw: The request body.
        request_class: The class that the client gives to the request (`CLASS_HEADER`); empty if it gives
            none.
        has_tools: Whether earlier requests of the conversation had tools.
    """
    if request_class == _AUXILIARY:
        return _classify_by_history(raw)
    size = len(raw)
    if size <= MAX_PROBE_BYTES and raw.find(_TOKENS) >= 0 and _is_probe(raw):
        return _classify_by_history(raw)
    if size > MAX_TITLE_BYTES and not may_ask_for_summary(raw):  # large bodies are not searched as a whole
        return None
    if _has_tools(raw) or _classify_by_history(raw) is SideRequestKind.WITHIN:
        return None
    if size > MAX_TITLE_BYTES:
        return (
            SideRequestKind.ALONE
            if any(map(is_side_request_prompt, read_system_and_user_texts(raw)[0]))
            else None
        )
    return SideRequestKind.ALONE if has_tools or _asks_for_title(raw) else None


def _is_probe(raw: bytes) -> bool:
    """Returns whether a request limits its output to one token. Clients send such requests only as tests."""
    outline = scan_outline(raw)
    if outline is None:
        return False
    limits = (outline.max_tokens, outline.max_completion_tokens, outline.max_output_tokens)
    return 1 in [decode_member(limit) for limit in limits]


def _asks_for_title(raw: bytes) -> bool:
    """Returns whether the system or user messages of a request ask for a title, for tags or the like."""
    if not _contains_any(raw, _TITLE_PHRASES):
        return False
    system, user = read_system_and_user_texts(raw)
    return any(map(is_title_or_side_prompt, system)) or any(map(is_title_request, user))


def may_ask_for_summary(raw: bytes) -> bool:
    """Returns whether a request may quote a conversation in a message and ask for a summary of it.

    Such a body is parsed as a whole, however large it is.
    """
    return _contains_any(raw[:EDGE_BYTES] + raw[-EDGE_BYTES:], _SUMMARY_PHRASES)


def _classify_by_history(raw: bytes) -> SideRequestKind:
    return SideRequestKind.WITHIN if has_history(raw) else SideRequestKind.ALONE


def has_history(raw: bytes) -> bool:
    """Returns whether a body may contain earlier replies or tool calls of the model."""
    return _contains_any(raw, _HISTORY_MARKS)


def _has_tools(raw: bytes) -> bool:
    return _contains_any(raw, (_TOOLS,))


def _contains_any(raw: bytes, phrases: tuple[bytes, ...]) -> bool:
    if len(raw) > 2 * MAX_SEARCHED_EDGE_BYTES:
        raw = raw[:MAX_SEARCHED_EDGE_BYTES] + raw[-MAX_SEARCHED_EDGE_BYTES:]
    # `find` is faster than `in`, which first tries to convert the phrase to an integer and fails.
    for phrase in phrases:  # noqa: SIM110 - every request pays for the generator that `any` would need
        if raw.find(phrase) >= 0:
            return True
    return False


class SideRequestDetector:
    """Detects side calls, such as requests for a title.

    For this, the detector remembers in which conversations the requests have tools.

    It needs only the id of a conversation, and not the tenant, because conversations of two tenants never
    have the same id.
    """

    def __init__(self) -> None:
        self._inspected: BoundedDict[str, int] = BoundedDict(MAX_CONVERSATIONS)

    def classify_request(
        self, raw: bytes, header_map: Mapping[bytes, bytes], conversation: str | None
    ) -> SideRequestKind | None:
        """Returns the kind of a side call, or None if the request is no side call.

        A side call is a request that is not part of the conversation, such as a request for a title.

        Args:
            raw: The request body.
            header_map: The first value of each header field.
            conversation: The id of the conversation; None if the client gives none.
        """
        inspected = 0 if conversation is None else self._inspected.get(conversation, 0)
        side_kind = classify_side_request(
            raw, header_map.get(CLASS_HEADER, b""), has_tools=inspected > _MAX_INSPECTED
        )
        if conversation is not None and side_kind is None and inspected < _MAX_INSPECTED:
            self._record_tools(raw, conversation, inspected)
        return side_kind

    def _record_tools(self, raw: bytes, conversation: str, inspected_count: int) -> None:
        """Looks for tools in one of the first requests of a conversation, and remembers the result.

        Later requests are not searched, because the search reads the whole body.
        """
        self._inspected[conversation] = _MAX_INSPECTED + 1 if _has_tools(raw) else inspected_count + 1
