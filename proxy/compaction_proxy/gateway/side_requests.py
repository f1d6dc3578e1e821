"""Detects side calls: requests that clients send beside a conversation, under its id.

They ask for titles or topics, probe a quota and the like, and are no part of the conversation. They are
relayed and counted like any request. But they do not show the present state of a conversation, and they begin
none. The signs are chosen so that a request of the conversation itself has none of them. A side call without
a sign only adds a line to the history of the conversation.
"""

from collections import OrderedDict
from collections.abc import Mapping
from enum import Enum
from typing import Final

from compaction_proxy.core.title_request import is_client_prompt, is_title_prompt, is_title_request
from compaction_proxy.wires.prescan import decode_member, read_texts, scan_outline

# The field in which Claude Code classifies a request: `main`, `subagent`, `workflow`, `compaction` or
# `auxiliary`.
CLASS_HEADER: Final = b"x-claude-code-request-class"
_AUXILIARY: Final = b"auxiliary"
# The most bytes of a probe and of a request for a title. A client's request for a summary may be larger,
# because it carries the conversation in its text.
MAX_PROBE_BYTES: Final = 2_048
MAX_TITLE_BYTES: Final = 16_384
# A request for a summary has its system prompt within this many bytes of one end of its body.
EDGE_BYTES: Final = 8_192
_TOKENS: Final = b'tokens"'
# Inside a string these quotes would be escaped, so a match is a key or a value.
_TOOLS: Final = b'"tools"'
# Texts that occur only in requests in which the model has already said something.
_PAST: Final = (b'"assistant"', b'_call"', b'_output"')
# A body without any of these texts does not ask for a summary as a known client does.
_SUMMARIES: Final = (b"partial conversation", b"context summarization")
# A body without any of these texts does not ask for a title, for tags or for follow-up questions.
_TITLES: Final = (
    b"itle",
    b"tags",
    b"eadline",
    b"ollow-up",
    b"this session",
    b"commit messages",
    *_SUMMARIES,
)
# The most conversations of which it is known whether they have tools, and the requests that are searched for
# that.
MAX_CONVERSATIONS: Final = 10_000
_MAX_INSPECTED: Final = 3


class SideRequestKind(Enum):
    """The ways in which a side call relates to its conversation."""

    ALONE = "alone"
    """The side call holds nothing of the conversation."""
    WITHIN = "within"
    """The side call carries the conversation along, so the conversation's checkpoint is applied to it."""


def classify_side_request(raw: bytes, kind: bytes, *, has_tools: bool) -> SideRequestKind | None:
    """Returns the kind of side call that a request is, or None if it is no side call.

    Args:
        raw: The request body.
        kind: The class that the client gives to the request (`CLASS_HEADER`); empty if it gives none.
        has_tools: Whether other requests of the conversation have brought tools.
    """
    if kind == _AUXILIARY:
        return _classify_by_history(raw)
    size = len(raw)
    if size <= MAX_PROBE_BYTES and _TOKENS in raw and _is_probe(raw):
        return _classify_by_history(raw)
    if size > MAX_TITLE_BYTES and not _may_ask_for_summary(raw):  # large bodies are not searched as a whole
        return None
    if _TOOLS in raw or _classify_by_history(raw) is SideRequestKind.WITHIN:
        return None
    if size > MAX_TITLE_BYTES:
        return SideRequestKind.ALONE if any(map(is_client_prompt, read_texts(raw)[0])) else None
    return SideRequestKind.ALONE if has_tools or _asks_for_title(raw) else None


def _is_probe(raw: bytes) -> bool:
    """Returns whether the answer may have only one token, so that no user reads it."""
    outline = scan_outline(raw)
    if outline is None:
        return False
    limits = (outline.max_tokens, outline.max_completion_tokens, outline.max_output_tokens)
    return 1 in [decode_member(limit) for limit in limits]


def _asks_for_title(raw: bytes) -> bool:
    """Returns whether a client asks for the title of a conversation, which may not have begun yet."""
    if not any(each in raw for each in _TITLES):
        return False
    system, user = read_texts(raw)
    return any(map(is_title_prompt, system)) or any(map(is_title_request, user))


def _may_ask_for_summary(raw: bytes) -> bool:
    """Returns whether a client may ask for a summary of a conversation that it carries along as text."""
    edges = raw[:EDGE_BYTES] + raw[-EDGE_BYTES:]
    return any(each in edges for each in _SUMMARIES)


def _classify_by_history(raw: bytes) -> SideRequestKind:
    return SideRequestKind.WITHIN if has_history(raw) else SideRequestKind.ALONE


def has_history(raw: bytes) -> bool:
    """Returns whether a body may hold something that the model has said before."""
    return any(each in raw for each in _PAST)


class SideRequestDetector:
    """Detects side calls of the conversations that this process has seen. Their ids imply the tenant."""

    def __init__(self) -> None:
        self._inspected: OrderedDict[str, int] = OrderedDict()

    def classify_request(
        self, raw: bytes, header_map: Mapping[bytes, bytes], conversation: str | None
    ) -> SideRequestKind | None:
        """Returns the kind of side call that a request is, or None if it is no side call.

        Args:
            raw: The request body.
            header_map: The first value of each header field.
            conversation: The id of the conversation, if it has one.
        """
        inspected = 0 if conversation is None else self._inspected.get(conversation, 0)
        side_kind = classify_side_request(
            raw, header_map.get(CLASS_HEADER, b""), has_tools=inspected > _MAX_INSPECTED
        )
        if conversation is not None and side_kind is None and inspected < _MAX_INSPECTED:
            self._look_for_tools(raw, conversation, inspected)
        return side_kind

    def _look_for_tools(self, raw: bytes, conversation: str, inspected: int) -> None:
        """Looks for tools in the first requests of a conversation only, because it searches the body."""
        self._inspected[conversation] = _MAX_INSPECTED + 1 if _TOOLS in raw else inspected + 1
        self._inspected.move_to_end(conversation)
        if len(self._inspected) > MAX_CONVERSATIONS:
            self._inspected.popitem(last=False)
