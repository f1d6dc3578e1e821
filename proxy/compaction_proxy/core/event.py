"""Events: what has happened to a conversation, one line each.

One event per decision or failure feeds the log, the metrics, traces, the live feed, the history, the API, the
pages and the command line. Events are kept for people, by any version that shares the store. So what is
missing or of another type is taken as unknown, and what is not known here is passed over.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from compaction_proxy.core.trigger import TRIGGER_FIELDS

# What makes a round due: a field of a trigger row, or one of these.
DUE_REASONS = frozenset({
    *TRIGGER_FIELDS,
    "force",  # it was asked for
    "huge",  # a new result is so large that it is shortened by itself
    "limit",  # the request would not fit otherwise
    "output",  # the upstream would refuse it together with the output that it asks for
    "overflow",  # the upstream has refused it as too long
    "soft",  # the trigger is near, and nobody waits
})  # fmt: skip

# Bodies that go on as they came, because they are not read.
UNREAD_REASONS = frozenset({
    "duplicate-keys", "encoded", "no-array", "no-messages", "not-json", "provider-compacts",
    "stateful", "too-deep", "too-many",
})  # fmt: skip
# Requests in which rounds would do no good, or do none for now.
LEFT_ALONE_REASONS = frozenset({"irreducible", "nothing-to-take", "paused"})
# Nobody to ask for a summary, or nobody who may or can be asked for this one.
UNASKED_REASONS = frozenset({
    "breaker-open", "budget", "no-model", "no-summary-model", "overflow", "summary-window", "unknown-model",
})  # fmt: skip
# Summaries that did not come.
MISSED_REASONS = frozenset({"cancelled", "deadline", "internal", "timeout", "unreachable"})
# Summaries that came and cannot be used.
UNUSABLE_REASONS = frozenset({
    "content-filter", "empty", "garbage", "language", "longer", "reasoning", "refused", "rules-lost",
    "too-short", "tool-calls", "truncated", "unfaithful",
})  # fmt: skip

# Why a request went on as it came, or without a summary.
REASONS = UNREAD_REASONS | LEFT_ALONE_REASONS | UNASKED_REASONS | MISSED_REASONS | UNUSABLE_REASONS
# These begin with one of the following: the status of the summary model, a trouble of the store.
REASON_PREFIXES = ("http-", "store-")


def is_known_reason(reason: str) -> bool:
    """Whether this is one of the words for why no round was made."""
    return reason in REASONS or reason.startswith(REASON_PREFIXES)


VERSION = 1

COMPACTED = "compacted"  # a round was made
INSTALLED = "installed"  # a round that was made ahead of need is in force from now on
FAILED = "failed"  # a round was due, and none was made
FAILED_OPEN = "failed-open"  # a request went on as it came, because of trouble of ours
OVER_LIMIT = "over-limit"  # a request went on although it is too long, because nothing made it shorter
RECOVERED = "recovered"  # the upstream refused a request as too long, and took a shorter one
MEASURED = "measured"  # the upstream has counted the first request that a round went into
UNDONE = "undone"  # a round is not applied any more
MARKED = "marked"  # the next request is to be compacted
PINNED = "pinned"  # a text was pinned
UNPINNED = "unpinned"  # a pinned text was let go
INSTRUCTION_REMOVED = "instruction-removed"  # instructions of the project are left out from now on
INSTRUCTION_RESTORED = "instruction-restored"  # they are kept again
BYPASSED = "bypassed"  # the conversation's requests go on as they come from now on
RESUMED = "resumed"  # they are compacted again
KINDS = (
    COMPACTED, INSTALLED, FAILED, FAILED_OPEN, OVER_LIMIT, RECOVERED, MEASURED, UNDONE, MARKED, PINNED,
    UNPINNED, INSTRUCTION_REMOVED, INSTRUCTION_RESTORED, BYPASSED, RESUMED,
)  # fmt: skip
# Those that say that something went wrong.
FAILURES = frozenset({FAILED, FAILED_OPEN, OVER_LIMIT})
# A round may replace thousands of messages; its event names so many.
MAX_MESSAGE_IDS = 200
# What only the conversation's own history tells: everything else may go into a log.
CONTENT_FIELDS = frozenset({"summary"})


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. Empty and None mean that it is unknown, or does not apply.

    Attributes:
        kind: One of the words above, or that of another version.
        at: Seconds since the epoch.
        conversation: Its id, `c_…`.
        id: Its own, `e_…`.
        request: The id of the request that it happened in, as the log has it.
        strategy: Name of the strategy.
        round: Number of the round in its chain, from 1.
        place: Where the round's checkpoint is kept (`core.checkpoint.place`), as hex digits.
        reason: What made it due, or why it failed: a short word.
        outcome: How it ended: a short word, such as the response header's status.
        asked: The model that the conversation asks.
        model: The model that wrote the summary.
        tokens_before: Estimated size of the request it was made for.
        tokens_after: Estimated size of what was forwarded instead.
        tokens_real: Size of what was forwarded, as the upstream counted it.
        trigger: T, in tokens.
        window: Of the model, in tokens.
        basis: The numbers that T was worked out from where it follows from prices, each with its name.
        listed: Messages that the client sent, privileged ones included.
        messages: Number of messages that were replaced.
        message_ids: Their ids, `m_…`; of the first `MAX_MESSAGE_IDS`.
        seconds: How long it took.
        calls: Summary calls that it took, those that were of no use included.
        prompt_tokens: Input tokens of those calls, as their provider counted them.
        completion_tokens: Output tokens of them.
        cached_tokens: Input tokens of them that the provider had cached.
        cost_usd: Price of them, in dollars; None where no price is known.
        facts: What was observed in the messages that were replaced, by kind: how many of these the model
            still sees word for word, and how many there were.
        summary: The text that stands in for them.
    """

    kind: str
    at: float
    conversation: str = ""
    id: str = ""
    request: str = ""
    strategy: str = ""
    round: int | None = None
    place: str = ""
    reason: str = ""
    outcome: str = ""
    asked: str = ""
    model: str = ""
    tokens_before: int | None = None
    tokens_after: int | None = None
    tokens_real: int | None = None
    trigger: int | None = None
    window: int | None = None
    basis: Mapping[str, float] = field(default_factory=dict)
    listed: int | None = None
    messages: int | None = None
    message_ids: tuple[str, ...] = ()
    seconds: float | None = None
    calls: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    facts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    summary: str = ""


def to_fields(event: Event) -> dict[str, Any]:
    """The event as JSON values, without what is unknown; `v` is the version of their meaning."""
    told = {each.name: getattr(event, each.name) for each in fields(event)}
    return {"v": VERSION, **{name: value for name, value in told.items() if value not in (None, "", (), {})}}


def to_log_fields(event: Event) -> dict[str, Any]:
    """What a log line may say of it: no content, and no list of messages."""
    told = to_fields(event)
    return {
        name: value for name, value in told.items() if name not in CONTENT_FIELDS | {"message_ids", "v", "at"}
    }


def from_fields(values: Mapping[str, Any]) -> Event | None:
    """The event that these fields tell of, or None if they do not say what happened and when."""
    kind, at = _parse_text(values.get("kind")), parse_number(values.get("at"))
    if not kind or at is None:
        return None
    read = {each.name: _READERS[each.type](values.get(each.name)) for each in fields(Event)}
    if read["messages"] is None:
        read["messages"] = len(read["message_ids"]) or None
    return Event(**{**read, "kind": kind, "at": at})


def _parse_text(value: object) -> str:
    return value if isinstance(value, str) else ""


def parse_number(value: object) -> float | None:
    """A finite number, or None; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        finite = float(value)
    except OverflowError:
        return None
    return finite if math.isfinite(finite) else None


def parse_integer(value: object) -> int | None:
    """A whole number, or None; true and false are none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _parse_ids(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        return ()
    return tuple(each for each in value if isinstance(each, str))


def _parse_numbers(value: object) -> dict[str, float]:
    told = value if isinstance(value, Mapping) else {}
    read = {str(name): parse_number(each) for name, each in told.items()}
    return {name: each for name, each in read.items() if each is not None}


def _parse_kept_counts(value: object) -> dict[str, tuple[int, int]]:
    """Pairs of whole numbers, `kept` of `total`, by kind."""
    found: dict[str, tuple[int, int]] = {}
    for kind, pair in value.items() if isinstance(value, Mapping) else ():
        match pair:
            case [int(kept), int(total)] if 0 <= kept <= total:
                found[str(kind)] = (kept, total)
    return found


# How the value of a field of this type is read.
_READERS: Mapping[object, Callable[[object], Any]] = {
    str: _parse_text,
    float: parse_number,
    float | None: parse_number,
    int | None: parse_integer,
    tuple[str, ...]: _parse_ids,
    Mapping[str, float]: _parse_numbers,
    Mapping[str, tuple[int, int]]: _parse_kept_counts,
}
