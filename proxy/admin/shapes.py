"""What the admin API answers and takes, as records; the OpenAPI document is made of these."""

from dataclasses import dataclass

from proxy.admin.figures import Money, money
from proxy.core.event import Event
from proxy.core.totals import Totals
from proxy.recall import Hit, Recalled
from proxy.steering import Overview
from proxy.watching import Standing
from proxy.wishes import pin_id


@dataclass(frozen=True, slots=True)
class Round:
    """A round of a conversation; sizes in tokens, times in seconds since the epoch.

    Attributes:
        strategy: The strategy that made it.
        round: Its number.
        at: When it was made.
        reason: What made it due.
        outcome: `applied`, or `scheduled` where it was made ahead of need.
        model: The model that wrote the summary.
        messages: Number of messages that it replaced.
        tokens_before: Estimated size of the request it was made for.
        tokens_after: Estimated size of what was forwarded.
        tokens_real: The same as the upstream counted it.
        undone: Whether it is not applied any more.
    """

    strategy: str
    round: int | None
    at: float
    reason: str
    outcome: str
    model: str
    messages: int | None
    tokens_before: int | None
    tokens_after: int | None
    tokens_real: int | None
    undone: bool


@dataclass(frozen=True, slots=True)
class Pin:
    """A text that no round may lose, and its id."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class NewPin:
    """A text to pin: one line of 1 to 2,000 characters."""

    text: str


@dataclass(frozen=True, slots=True)
class Pins:
    """The pins of a conversation, oldest first."""

    pins: tuple[Pin, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as it stands.

    Attributes:
        id: Its id.
        totals: What it has used.
        rounds: Its rounds, oldest first.
        pins: Its pins.
        compact: Whether its next request is compacted.
        suppressed: Whether no round is made by itself, unless the request would not fit otherwise.
        bypass: Whether its requests go on as they come.
        money: What it cost and saved; null where no price is known.
    """

    id: str
    totals: Totals
    rounds: tuple[Round, ...]
    pins: tuple[Pin, ...]
    compact: bool
    suppressed: bool
    bypass: bool
    money: Money | None


@dataclass(frozen=True, slots=True)
class Events:
    """What has happened to a conversation, oldest first."""

    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Marked:
    """The conversation's next request is compacted."""

    id: str
    compact: bool = True


@dataclass(frozen=True, slots=True)
class Bypass:
    """Whether the conversation's requests go on as they come."""

    id: str
    bypass: bool


@dataclass(frozen=True, slots=True)
class Hits:
    """Messages that were found."""

    hits: tuple[Hit, ...]


@dataclass(frozen=True, slots=True)
class ArchivedMessage:
    """A message that a round has taken out, and that round."""

    id: str
    index: int
    role: str
    text: str
    round: int
    strategy: str
    at: float


@dataclass(frozen=True, slots=True)
class Export:
    """Everything that is kept of a conversation.

    Attributes:
        conversation: As it stands.
        events: What has happened to it, oldest first; a round's event has the summary that was made.
        messages: What its rounds have taken out, in the conversation's order.
    """

    conversation: Conversation
    events: tuple[Event, ...]
    messages: tuple[ArchivedMessage, ...]


@dataclass(frozen=True, slots=True)
class Forgotten:
    """How many records were deleted."""

    deleted: int


def round_shape(event: Event, *, undone: bool) -> Round:
    """The round that an event tells of."""
    return Round(
        strategy=event.strategy,
        round=event.round,
        at=event.at,
        reason=event.reason,
        outcome=event.outcome,
        model=event.model,
        messages=event.messages,
        tokens_before=event.tokens_before,
        tokens_after=event.tokens_after,
        tokens_real=event.tokens_real,
        undone=undone,
    )


def pins_shape(pins: tuple[str, ...]) -> tuple[Pin, ...]:
    """Pins with their ids."""
    return tuple(Pin(pin_id(text), text) for text in pins)


def conversation_shape(conversation: str, seen: Overview, stands: Standing) -> Conversation:
    """A conversation."""
    return Conversation(
        id=conversation,
        totals=seen.totals,
        rounds=tuple(round_shape(each, undone=each.place in seen.undone) for each in seen.rounds),
        pins=pins_shape(seen.wishes.pins),
        compact=seen.wishes.compact,
        suppressed=seen.wishes.suppressed,
        bypass=stands.bypass,
        money=money(stands.totals),
    )


def message_shape(found: Recalled) -> ArchivedMessage:
    """An archived message."""
    message, made = found.message, found.round
    return ArchivedMessage(
        message.id, message.index, message.role, message.text, made.number, made.strategy, made.at
    )
