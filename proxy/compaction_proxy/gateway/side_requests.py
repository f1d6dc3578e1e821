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
from compaction_proxy.wires.prescan import held, outline, read_texts

# What Claude Code says of a request: `main`, `subagent`, `workflow`, `compaction` or `auxiliary`.
CLASS: Final = b"x-claude-code-request-class"
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
_LOOKS: Final = 3


class Side(Enum):
    """What a side call is beside."""

    ALONE = "alone"
    """Nothing of the conversation is in it."""
    WITHIN = "within"
    """It carries the conversation along, so what stands for that is applied."""


def side(raw: bytes, kind: bytes, *, tooled: bool) -> Side | None:
    """Whether a request is a side call, and which; None: it is none.

    Args:
        raw: Its body.
        kind: What its client says that it is (`CLASS`); empty: nothing.
        tooled: Whether other requests of its conversation have brought tools.
    """
    if kind == _AUXILIARY:
        return _beside(raw)
    size = len(raw)
    if size <= MAX_PROBE_BYTES and _TOKENS in raw and _is_probe(raw):
        return _beside(raw)
    if size > MAX_TITLE_BYTES and not _may_ask_for_summary(raw):  # no large body is searched whole
        return None
    if _TOOLS in raw or _beside(raw) is Side.WITHIN:
        return None
    if size > MAX_TITLE_BYTES:
        return Side.ALONE if any(map(is_client_prompt, read_texts(raw)[0])) else None
    return Side.ALONE if tooled or _asks_for_title(raw) else None


def _is_probe(raw: bytes) -> bool:
    """Whether the answer may have one token, so that nobody reads it."""
    told = outline(raw)
    if told is None:
        return False
    limits = (told.max_tokens, told.max_completion_tokens, told.max_output_tokens)
    return 1 in [held(limit) for limit in limits]


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


def _beside(raw: bytes) -> Side:
    return Side.WITHIN if has_history(raw) else Side.ALONE


def has_history(raw: bytes) -> bool:
    """Whether the model may have said something before, in what a body carries."""
    return any(each in raw for each in _PAST)


class SideCalls:
    """Tells side calls of conversations that this process has seen, each by its tenant's own id."""

    def __init__(self) -> None:
        self._looks: OrderedDict[str, int] = OrderedDict()

    def told(self, raw: bytes, first: Mapping[bytes, bytes], conversation: str | None) -> Side | None:
        """Whether a request is a side call, and which; None: it is none.

        Args:
            raw: Its body.
            first: The first value of each of its header fields.
            conversation: Its id, if it has one.
        """
        looks = 0 if conversation is None else self._looks.get(conversation, 0)
        found = side(raw, first.get(CLASS, b""), tooled=looks > _LOOKS)
        if conversation is not None and found is None and looks < _LOOKS:
            self._look(raw, conversation, looks)
        return found

    def _look(self, raw: bytes, conversation: str, looks: int) -> None:
        """Look for tools: in the first requests of a conversation only, as each look takes a search."""
        self._looks[conversation] = _LOOKS + 1 if _TOOLS in raw else looks + 1
        self._looks.move_to_end(conversation)
        if len(self._looks) > MAX_CONVERSATIONS:
            self._looks.popitem(last=False)
