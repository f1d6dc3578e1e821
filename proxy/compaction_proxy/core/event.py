"""Events: the entries of a conversation's history, one for each decision or failure.

The proxy writes events to the log and the history, sends them to the live feed, and builds metrics and traces
from them. The API, the dashboard and the command line show them. Any version of the proxy that shares the
store may have written a stored event. So a field that is missing or of another type counts as unknown, and
unknown fields are ignored.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from compaction_proxy.core.errors import OUT_OF_RESOURCES
from compaction_proxy.core.trigger import TRIGGER_FIELDS

# Reasons why a compaction is due. A reason that is named like a field of `core.trigger.TriggerRule` means
# that the threshold in this field was reached.
DUE_REASONS = frozenset({
    *TRIGGER_FIELDS,
    "force",  # a user asked for a compaction
    "huge",  # a new tool result is huge, and the compaction shortens only this result
    "limit",  # the request would not fit without a compaction
    "output",  # the upstream would refuse the request together with its requested output
    "overflow",  # the upstream has refused the request as too long
    "soft",  # the trigger is near, and no request waits for the compaction
})  # fmt: skip

SMALL = "small"  # by its size alone, the request cannot need a compaction
# Reasons why the proxy does not read the body of a request, and forwards it unchanged.
UNREAD_BODY_REASONS = frozenset({
    "duplicate-keys", "encoded", "no-array", "no-messages", "not-json", "provider-compacts", SMALL,
    "stateful", "too-deep", "too-many",
})  # fmt: skip
# Reasons why no compaction is tried: it would not help, or the last compactions did not help and the proxy
# waits before it tries again.
NO_BENEFIT_REASONS = frozenset({"irreducible", "nothing-to-take", "paused"})
# Reasons why no summary model can write the summary: no model is configured, the model is not known, the
# proxy may not call it at the moment, or the text is too long for it.
SUMMARY_NOT_ASKED_REASONS = frozenset({
    "breaker-open", "budget", "no-model", "no-summary-model", "overflow", "summary-window", "unknown-model",
})  # fmt: skip
# Reasons why a summary did not arrive.
SUMMARY_MISSING_REASONS = frozenset({
    "cancelled", "deadline", "internal", OUT_OF_RESOURCES, "timeout", "unreachable",
})  # fmt: skip
# Reasons why a summary that arrived cannot be used.
SUMMARY_UNUSABLE_REASONS = frozenset({
    "content-filter", "empty", "garbage", "language", "longer", "reasoning", "refused", "rules-lost",
    "too-short", "tool-calls", "truncated", "unfaithful",
})  # fmt: skip

# All reasons why a request was forwarded unchanged, or without a summary.
REASONS = (
    UNREAD_BODY_REASONS
    | NO_BENEFIT_REASONS
    | SUMMARY_NOT_ASKED_REASONS
    | SUMMARY_MISSING_REASONS
    | SUMMARY_UNUSABLE_REASONS
)
# The beginnings of two more kinds of reasons. After `http-` comes the status of the response from the summary
# model's provider. After `store-` comes a word for the fault of the store.
REASON_PREFIXES = ("http-", "store-")


# Parts of the proxy's work that can fail, and that keep a due compaction from being made.
SUMMARY_PART, STORE_PART, REQUEST_PART, PROXY_PART = "summary-model", "store", "request", "proxy"


def find_failed_part(reason: str) -> str:
    """Returns which part failed when a request was forwarded without a due compaction.

    The part is the summary model, the store, the request itself, which could not be read, or the proxy.
    """
    if reason.startswith("store-"):
        return STORE_PART
    if reason in UNREAD_BODY_REASONS:
        return REQUEST_PART
    of_summaries = SUMMARY_NOT_ASKED_REASONS | SUMMARY_MISSING_REASONS | SUMMARY_UNUSABLE_REASONS
    is_of_summary = reason in of_summaries - {"cancelled", "internal", OUT_OF_RESOURCES} or reason.startswith(
        "http-"
    )
    return SUMMARY_PART if is_of_summary else PROXY_PART


EVENT_VERSION = 1

# The outcome of a compaction, as its event reports it. `APPLIED`: a request uses the compaction. `SCHEDULED`:
# the compaction was prepared, and no request has used it yet.
APPLIED, SCHEDULED = "applied", "scheduled"

COMPACTED = "compacted"  # a compaction was made
INSTALLED = "installed"  # a compaction that was made ahead of need is in force from now on
FAILED = "failed"  # a compaction was due, and none was made
FAILED_OPEN = "failed-open"  # a request was forwarded unchanged, because of a fault of the proxy
OVER_LIMIT = "over-limit"  # a request was forwarded although it is too long, because no step made it fit
RECOVERED = "recovered"  # the upstream refused a request as too long, and accepted a shorter one
MEASURED = "measured"  # the upstream has counted the first request to which a compaction was applied
UNDONE = "undone"  # a compaction is no longer applied
REDONE = "redone"  # a compaction that was undone is applied again
MARKED = "marked"  # the next request will be compacted
PINNED = "pinned"  # a text was pinned
UNPINNED = "unpinned"  # a pin was removed
INSTRUCTION_REMOVED = "instruction-removed"  # project instructions are left out from now on
INSTRUCTION_RESTORED = "instruction-restored"  # project instructions are kept again
BYPASSED = "bypassed"  # the conversation's requests are forwarded unchanged from now on
RESUMED = "resumed"  # the conversation's requests are compacted again
EVENT_KINDS = (
    COMPACTED, INSTALLED, FAILED, FAILED_OPEN, OVER_LIMIT, RECOVERED, MEASURED, UNDONE, REDONE, MARKED,
    PINNED, UNPINNED, INSTRUCTION_REMOVED, INSTRUCTION_RESTORED, BYPASSED, RESUMED,
)  # fmt: skip
# The kinds of events that report a failure.
FAILURE_KINDS = frozenset({FAILED, FAILED_OPEN, OVER_LIMIT})
# The event of a compaction names at most this many of the replaced messages, of which there may be thousands.
MAX_MESSAGE_IDS = 200
# Fields that hold text of the conversation. They appear in the conversation's history, but never in a log.
CONTENT_FIELDS = frozenset({"summary"})


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a conversation. An empty value or None means that a field is unknown or does not apply.

    Attributes:
        kind: One of `EVENT_KINDS`, or a kind that another version of the proxy knows.
        at: Time of the event, in seconds since the epoch.
        conversation: Id of the conversation, `c_…`.
        id: Id of the event, `e_…`.
        request: Id of the request during which the event happened, as in the log.
        strategy: Name of the strategy.
        round: Number of the compaction, from 1.
        place: Id of the compaction's checkpoint (`core.checkpoint.build_checkpoint_id`), as hex digits.
        reason: Why the compaction was due or why it failed, as short words separated by commas.
        outcome: How the compaction or the request ended, as a short word, such as the value of the header
            `x-compaction-status`.
        asked: Model that the conversation uses.
        model: Model that wrote the summary.
        tokens_before: Estimated size of the request before the compaction, in tokens.
        tokens_after: Estimated size of the request that was forwarded instead, in tokens.
        tokens_real: Size of the forwarded request in tokens, as the upstream counted it.
        trigger: T, in tokens.
        window: Context window of the model, in tokens.
        basis: If T follows from prices, the numbers from which it was computed, by name.
        listed: Number of messages that the client sent, privileged ones included.
        messages: Number of messages that were replaced.
        message_ids: Ids of the replaced messages, `m_…`; at most the first `MAX_MESSAGE_IDS`.
        seconds: Duration of the compaction, in seconds.
        calls: Number of summary calls, including those whose summaries were not used.
        prompt_tokens: Input tokens of the summary calls, as their provider counted them.
        completion_tokens: Output tokens of the summary calls.
        cached_tokens: Input tokens of the summary calls that the provider had cached.
        cost_usd: Price of the summary calls in dollars; None if no price is known.
        facts: Two numbers for each kind of fact observed in the replaced messages: how many facts the model
            still sees word for word, and how many there were.
        summary: The text that replaces the messages.
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


def is_shortened(tokens_before: int | None, tokens_after: int | None) -> bool:
    """Returns whether a request was forwarded shorter than it came, because compactions applied to it."""
    return tokens_before is not None and tokens_after is not None and tokens_after < tokens_before


def to_fields(event: Event) -> dict[str, Any]:
    """Returns the event as JSON values, without empty fields. The field `v` is the version of the format."""
    values = {each.name: getattr(event, each.name) for each in fields(event)}
    return {
        "v": EVENT_VERSION,
        **{name: value for name, value in values.items() if value not in (None, "", (), {})},
    }


def to_log_fields(event: Event) -> dict[str, Any]:
    """Returns the fields of an event that a log line may contain.

    Text of the conversation, the list of message ids, the time and the version of the format are left out.
    """
    values = to_fields(event)
    return {
        name: value
        for name, value in values.items()
        if name not in CONTENT_FIELDS | {"message_ids", "v", "at"}
    }


def from_fields(values: Mapping[str, Any]) -> Event | None:
    """Builds an event from its fields.

    Returns None if the kind or the time is missing or invalid. Any other invalid field counts as unknown.
    """
    kind, at = _parse_text(values.get("kind")), parse_number(values.get("at"))
    if not kind or at is None:
        return None
    parsed = {each.name: _READERS[each.type](values.get(each.name)) for each in fields(Event)}
    if parsed["messages"] is None:
        parsed["messages"] = len(parsed["message_ids"]) or None
    return Event(**{**parsed, "kind": kind, "at": at})


def _parse_text(value: object) -> str:
    return value if isinstance(value, str) else ""


def parse_number(value: object) -> float | None:
    """Returns the value as a float, or None if it is not a finite number. Booleans are not accepted."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        finite = float(value)
    except OverflowError:
        return None
    return finite if math.isfinite(finite) else None


def parse_integer(value: object) -> int | None:
    """Returns the value if it is an integer, else None. Booleans are not accepted."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _parse_ids(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        return ()
    return tuple(each for each in value if isinstance(each, str))


def _parse_numbers(value: object) -> dict[str, float]:
    mapping = value if isinstance(value, Mapping) else {}
    numbers = {str(name): parse_number(each) for name, each in mapping.items()}
    return {name: each for name, each in numbers.items() if each is not None}


def _parse_kept_counts(value: object) -> dict[str, tuple[int, int]]:
    """Returns two integers by kind of fact: how many facts were kept, and how many there were.

    Invalid pairs are left out.
    """
    counts: dict[str, tuple[int, int]] = {}
    for kind, pair in value.items() if isinstance(value, Mapping) else ():
        match pair:
            case [int(kept), int(total)] if 0 <= kept <= total:
                counts[str(kind)] = (kept, total)
    return counts


# A parser for each type that a field of `Event` may have. A parser turns an invalid value into an empty value
# or None.
_READERS: Mapping[object, Callable[[object], Any]] = {
    str: _parse_text,
    float: parse_number,
    float | None: parse_number,
    int | None: parse_integer,
    tuple[str, ...]: _parse_ids,
    Mapping[str, float]: _parse_numbers,
    Mapping[str, tuple[int, int]]: _parse_kept_counts,
}
