"""What the admin API answers and takes, as records; the OpenAPI document is made of these."""

from dataclasses import dataclass

from compaction_proxy.admin.api.figures import Money, money
from compaction_proxy.admin.queries import Standing
from compaction_proxy.compaction.commands import Overview
from compaction_proxy.compaction.directives import Wishes, pin_id
from compaction_proxy.core.errors import RequestRefused
from compaction_proxy.core.event import Event
from compaction_proxy.core.search_tool import lines_of, wanted_lines
from compaction_proxy.recall.search import Hit, Recalled
from compaction_proxy.telemetry.totals import Totals


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
class ProjectInstruction:
    """Instructions of a project, such as a CLAUDE.md, that a client puts before what its user says.

    Attributes:
        id: Their id, the same for each version.
        client: The client.
        kind: `instructions`, `memory` or `environment`.
        path: The file, or what else tells two of a kind apart; may be empty.
        tokens: Estimated size of the newest version.
        removed: Whether they are left out of requests that are rewritten.
    """

    id: str
    client: str
    kind: str
    path: str
    tokens: int
    removed: bool


@dataclass(frozen=True, slots=True)
class ProjectInstructions:
    """The instructions of a project in a conversation, oldest first."""

    instructions: tuple[ProjectInstruction, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as it stands.

    Attributes:
        id: Its id.
        totals: What it has used.
        rounds: Its rounds, oldest first.
        pins: Its pins.
        instructions: What its client says of its project.
        compact: Whether its next request is compacted.
        suppressed: Whether no round is made by itself, unless the request would not fit otherwise.
        bypass: Whether its requests go on as they come.
        money: What it cost and saved; null where no price is known.
    """

    id: str
    totals: Totals
    rounds: tuple[Round, ...]
    pins: tuple[Pin, ...]
    instructions: tuple[ProjectInstruction, ...]
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
class Range:
    """Which lines of a message are told, from 1, and how many it has; longer ones count as several."""

    first: int
    last: int
    of: int


@dataclass(frozen=True, slots=True)
class ArchivedMessage:
    """A message that a round has taken out, and that round.

    Attributes:
        id: Its id.
        index: Its index among the non-privileged messages.
        role: Its role.
        text: Its text, or those of its lines that were asked for.
        round: The round's number.
        strategy: The strategy of the round.
        at: When that was, in seconds since the epoch.
        conversation: The conversation that the round was made in.
        turn: The turn it belongs to, from 1; 0 before the first; null where it is not known.
        lines: Which lines these are; null: all of them.
    """

    id: str
    index: int
    role: str
    text: str
    round: int
    strategy: str
    at: float
    conversation: str
    turn: int | None
    lines: Range | None = None


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


def instructions_shape(wishes: Wishes) -> tuple[ProjectInstruction, ...]:
    """Instructions of a project with their ids."""
    return tuple(
        ProjectInstruction(each.id, each.client, each.kind, each.path, each.tokens, each.id in wishes.removed)
        for each in wishes.instructions
    )


def conversation_shape(conversation: str, seen: Overview, stands: Standing) -> Conversation:
    """A conversation."""
    return Conversation(
        id=conversation,
        totals=seen.totals,
        rounds=tuple(round_shape(each, undone=each.place in seen.undone) for each in seen.rounds),
        pins=pins_shape(seen.wishes.pins),
        instructions=instructions_shape(seen.wishes),
        compact=seen.wishes.compact,
        suppressed=seen.wishes.suppressed,
        bypass=stands.bypass,
        money=money(stands.totals),
    )


def message_shape(found: Recalled, lines: str = "") -> ArchivedMessage:
    """An archived message, or those of its lines.

    Raises:
        RequestRefused: 422, `lines` is no range, or it has no such lines.
    """
    message, made = found.message, found.round
    text, told = _some(message.text, lines) if lines else (message.text, None)
    return ArchivedMessage(
        id=message.id,
        index=message.index,
        role=message.role,
        text=text,
        round=made.number,
        strategy=made.strategy,
        at=made.at,
        conversation=made.conversation,
        turn=message.turn,
        lines=told,
    )


def _some(text: str, lines: str) -> tuple[str, Range]:
    wanted, every = wanted_lines(lines), lines_of(text)
    if wanted is None or wanted[0] > len(every):
        raise RequestRefused(422, f"lines: a range from 1 to {len(every)}, such as 1-40", "invalid_request")
    first, last = wanted[0], min(wanted[1] or len(every), len(every))
    return "\n".join(every[first - 1 : last]), Range(first, last, len(every))
