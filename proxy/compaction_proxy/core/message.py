"""What the core knows of a conversation: messages, and the units and spans they form.

A dialect builds these records from a provider's bytes; the core never sees a provider's schema. Indices
are positions in the list at hand, and every range is half-open.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# So many exchanges may have come of one answer: some clients write each parallel call with its result.
MAX_OF_ONE_ANSWER = 16
PRIVILEGED_ROLES = frozenset({"system", "developer"})


class Span(NamedTuple):
    """A half-open range `[start, stop)` of message indices."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class MessageToolCall:
    """A tool call that an assistant message makes.

    Attributes:
        id: The call's id as sent; empty for the legacy `function_call`. Ids may be reused in a conversation.
        name: The tool's name.
        arguments: The arguments as sent, usually JSON text.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ContentPart:
    """Content that is not text: an image, audio, a file, or a kind we do not know.

    Attributes:
        kind: The dialect's name for it, such as `image_url`.
        payload: SHA-256 of what it carries (DESIGN.md §5.3).
        at: Offset in the message's text, in characters, where it stands.
    """

    kind: str
    payload: bytes
    at: int


class Instruction(NamedTuple):
    """What a program has put before what its user says: rules of a project, its memory, its surroundings.

    Attributes:
        client: The program, such as `claude-code`.
        kind: `instructions`, `memory` or `environment`.
        path: Which of that kind: a file, or what else tells two of them apart; empty where there is one only.
    """

    client: str
    kind: str
    path: str = ""


class SourceMessage(NamedTuple):
    """A message of the client's that was divided.

    Attributes:
        raw: Its bytes.
        parts: Number of messages that it was divided into.
    """

    raw: bytes
    parts: int


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: The role as sent.
        text: All text content, joined; empty when there is none.
        parts: Content that is not text, in order.
        refusal: An assistant's refusal text.
        name: The optional participant name.
        calls: Tool calls made, in order.
        answers: Ids of the calls that this message answers; one for a chat `tool` message.
        raw: The client's own bytes; empty for a message of ours that no dialect has written yet.
        digest: Canonical SHA-256 of the content (`core.digest`), 32 bytes; empty until computed.
        tokens: Estimated tokens, framing included, before calibration.
        signed: Whether it carries reasoning that goes with all the calls that came of it. No part of what the
            message says, so no part of its digest.
        instruction: What it is where a known program, and no user, says it; no part of its digest.
        source: The message that it is a part of on the wire; None: it is a message there.
    """

    role: str
    text: str = ""
    parts: tuple[ContentPart, ...] = ()
    refusal: str = ""
    name: str = ""
    calls: tuple[MessageToolCall, ...] = ()
    answers: tuple[str, ...] = ()
    raw: bytes = b""
    digest: bytes = b""
    tokens: int = 0
    signed: bool = False
    instruction: Instruction | None = None
    source: SourceMessage | None = None

    @property
    def is_privileged(self) -> bool:
        """Whether the message instructs the model: never covered, never summarised, never stored."""
        return self.role in PRIVILEGED_ROLES

    @property
    def is_fixed(self) -> bool:
        """Whether no round takes the message: it is privileged, or holds instructions of a project."""
        return self.instruction is not None or self.role in PRIVILEGED_ROLES

    def with_digest_and_tokens(self, digest: bytes, tokens: int) -> "Message":
        """The same message with its digest and size; several times as fast as `dataclasses.replace`."""
        return Message(
            self.role,
            self.text,
            self.parts,
            self.refusal,
            self.name,
            self.calls,
            self.answers,
            self.raw,
            digest,
            tokens,
            self.signed,
            self.instruction,
            self.source,
        )

    @property
    def is_empty(self) -> bool:
        """Whether the message says nothing at all, which most providers refuse from an assistant."""
        return not (self.text or self.parts or self.refusal or self.calls)


def iter_exchanges(messages: Sequence[Message]) -> Iterator[Span]:
    """Cut a list into plain messages, and messages with calls with every answer that directly follows them.

    They cover the list in order.
    """
    start = 0
    while start < len(messages):
        stop = _find_exchange_stop(messages, start)
        yield Span(start, stop)
        start = stop


def iter_units(messages: Sequence[Message]) -> Iterator[Span]:
    """Cut a list into its units: the smallest runs that may be removed without making the rest invalid.

    A unit is one exchange; and where its calls are signed, the next exchanges whose calls are not, as they
    may have come of the same answer (`MAX_OF_ONE_ANSWER`). The units cover the list in order.
    """
    start = 0
    while start < len(messages):
        stop = find_unit_stop(messages, start)
        yield Span(start, stop)
        start = stop


def find_unit_stop(messages: Sequence[Message], start: int) -> int:
    """Where the unit ends that starts there."""
    stop = _find_exchange_stop(messages, start)
    if messages[start].calls and messages[start].signed:
        for _ in range(MAX_OF_ONE_ANSWER - 1):
            if stop == len(messages) or not messages[stop].calls or messages[stop].signed:
                break
            stop = _find_exchange_stop(messages, stop)
    return stop


def find_unit_start(messages: Sequence[Message], at: int) -> int:
    """The start of the unit that the message at `at` belongs to, found without a look at all before it."""
    own = start = _find_exchange_start(messages, at)
    for _ in range(MAX_OF_ONE_ANSWER - 1):
        if not start or not messages[start].calls or messages[start].signed:
            break
        start = _find_exchange_start(messages, start - 1)
    return start if messages[start].calls and messages[start].signed else own


def _find_exchange_stop(messages: Sequence[Message], start: int) -> int:
    stop = start + 1
    if messages[start].calls:
        while stop < len(messages) and messages[stop].answers:
            stop += 1
    return stop


def _find_exchange_start(messages: Sequence[Message], at: int) -> int:
    start = at
    while start > 0 and messages[start].answers:
        start -= 1
    # Answers belong to the nearest calls in front of all of them, if there are any; else each stands alone.
    return next((index for index in range(start, at) if messages[index].calls), at) if start < at else at


def find_latest_user_message(messages: Sequence[Message]) -> int | None:
    """Index of the last user message, or None.

    A user-role message that only answers calls does not count, and neither do instructions of a project.
    """
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if message.role == "user" and not message.answers and message.instruction is None:
            return index
    return None
