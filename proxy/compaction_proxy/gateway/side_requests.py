"""Side calls: requests that clients send beside a conversation, under its id, and that are no part of it.

Titles, topics, probes of a quota and the like. They are relayed and counted as any request; but they are not
taken for what a conversation is now, and they begin none. The signs are chosen so that a request of the
conversation itself has none of them; a side call without a sign only makes a line more in its history.
"""

from collections import OrderedDict
from collections.abc import Mapping
from enum import Enum
from typing import Final

from compaction_proxy.core.title_request import is_client_prompt, is_title_prompt, is_title_request
from compaction_proxy.wires.prescan import decode_member, read_texts, scan_outline

# What Claude Code says of a request: `main`, `subagent`, `workflow`, `compaction` or `auxiliary`.
CLASS_HEADER: Final = b"x-claude-code-request-class"
_AUXILIARY: Final = b"auxiliary"
# Probes and titles are small, in bytes. A client's request for a summary brings the conversation in its text.
MAX_PROBE_BYTES: Final = 2_048
MAX_TITLE_BYTES: Final = 16_384
# It has its system prompt within so many bytes of one end.
EDGE_BYTES: Final = 8_192
_TOKENS: Final = b'tokens"'
# Inside a string these quotes would be escaped, so each is a key or a value.
_TOOLS: Final = b'"tools"'
# What only requests have in which the model has said something before.
_PAST: Final = (b'"assistant"', b'_call"', b'_output"')
# No body without them asks for a summary as a known client does.
_SUMMARIES: Final = (b"partial conversation", b"context summarization")
# No body without them asks for a title, for tags or for follow-up questions.
_TITLES: Final = (
    b"itle",
    b"tags",
    b"eadline",
    b"ollow-up",
    b"this session",
    b"commit messages",
    *_SUMMARIES,
)
# Conversations that are known to have tools, or not to have any in so many requests.
MAX_CONVERSATIONS: Final = 10_000
_MAX_INSPECTED: Final = 3


class SideRequestKind(Enum):
    """What a side call is beside."""

    ALONE = "alone"
    """Nothing of the conversation is in it."""
    WITHIN = "within"
    """It carries the conversation along, so what stands for that is applied."""


def classify_side_request(raw: bytes, kind: bytes, *, has_tools: bool) -> SideRequestKind | None:
    """Whether a request is a side call, and which; None: it is none.

    Args:
        raw: Its body.
        kind: What its client says that it is (`CLASS_HEADER`); empty: nothing.
        has_tools: Whether other requests of its conversation have brought tools.
    """
    if kind == _AUXILIARY:
        return _classify_by_history(raw)
    size = len(raw)
    if size <= MAX_PROBE_BYTES and _TOKENS in raw and _is_probe(raw):
        return _classify_by_history(raw)
    if size > MAX_TITLE_BYTES and not _may_ask_for_summary(raw):  # no large body is searched whole
        return None
    if _TOOLS in raw or _classify_by_history(raw) is SideRequestKind.WITHIN:
        return None
    if size > MAX_TITLE_BYTES:
        return SideRequestKind.ALONE if any(map(is_client_prompt, read_texts(raw)[0])) else None
    return SideRequestKind.ALONE if has_tools or _asks_for_title(raw) else None


def _is_probe(raw: bytes) -> bool:
    """Whether the answer may have one token, so that nobody reads it."""
    told = scan_outline(raw)
    if told is None:
        return False
    limits = (told.max_tokens, told.max_completion_tokens, told.max_output_tokens)
    return 1 in [decode_member(limit) for limit in limits]


def _asks_for_title(raw: bytes) -> bool:
    """Whether a client asks for a title of a conversation that it may not have begun yet."""
    if not any(each in raw for each in _TITLES):
        return False
    system, user = read_texts(raw)
    return any(map(is_title_prompt, system)) or any(map(is_title_request, user))


def _may_ask_for_summary(raw: bytes) -> bool:
    """Whether a client may ask for a summary of a conversation that it carries along as text."""
    edges = raw[:EDGE_BYTES] + raw[-EDGE_BYTES:]
    return any(each in edges for each in _SUMMARIES)


def _classify_by_history(raw: bytes) -> SideRequestKind:
    return SideRequestKind.WITHIN if has_history(raw) else SideRequestKind.ALONE


def has_history(raw: bytes) -> bool:
    """Whether the model may have said something before, in what a body carries."""
    return any(each in raw for each in _PAST)


class SideRequestDetector:
    """Tells side calls of conversations that this process has seen, each by its tenant's own id."""

    def __init__(self) -> None:
        self._inspected: OrderedDict[str, int] = OrderedDict()

    def classify_request(
        self, raw: bytes, header_map: Mapping[bytes, bytes], conversation: str | None
    ) -> SideRequestKind | None:
        """Whether a request is a side call, and which; None: it is none.

        Args:
            raw: Its body.
            header_map: The first value of each of its header fields.
            conversation: Its id, if it has one.
        """
        inspected = 0 if conversation is None else self._inspected.get(conversation, 0)
        found = classify_side_request(
            raw, header_map.get(CLASS_HEADER, b""), has_tools=inspected > _MAX_INSPECTED
        )
        if conversation is not None and found is None and inspected < _MAX_INSPECTED:
            self._look_for_tools(raw, conversation, inspected)
        return found

    def _look_for_tools(self, raw: bytes, conversation: str, inspected: int) -> None:
        """Look for tools: in the first requests of a conversation only, as each look takes a search."""
        self._inspected[conversation] = _MAX_INSPECTED + 1 if _TOOLS in raw else inspected + 1
        self._inspected.move_to_end(conversation)
        if len(self._inspected) > MAX_CONVERSATIONS:
            self._inspected.popitem(last=False)
