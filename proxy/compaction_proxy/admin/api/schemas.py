"""Schemas of the requests and responses of the admin API. FastAPI generates the OpenAPI document from them.

Some responses contain the fields of a class from another package, such as `Event`. The schema of such a
response takes the names and types of these fields from the class.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from typing import Any

from compaction_proxy.admin.queries import (
    CompactionRecord,
    ListedConversation,
    ModelRow,
    StatisticsReport,
)
from compaction_proxy.compaction.commands import ConversationOverview, UndoResult
from compaction_proxy.compaction.directives import Directives, NotedInstruction, build_pin_id
from compaction_proxy.core.cost.savings import Saving
from compaction_proxy.core.errors import RequestRefusedError
from compaction_proxy.core.event import Event
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.core.search_tool import parse_line_range, split_lines
from compaction_proxy.core.upstream_failure import UpstreamFailure
from compaction_proxy.gateway.size_gate import GateLimits
from compaction_proxy.recall.archive import RecalledMessage, RemovedMessage
from compaction_proxy.recall.round_detail import RoundDetail, SummaryPrompt, VisibleMessage
from compaction_proxy.recall.search import SearchHit
from compaction_proxy.telemetry.live_feed import HIDDEN_FIELDS, FeedItem
from compaction_proxy.telemetry.statistics import (
    COUNTS,
    COUNTS_BY_WORD,
    ExchangeCounters,
    StatisticsRow,
    compute_quantile_s,
)
from compaction_proxy.telemetry.usage import DOLLARS, ExchangeEntry, Totals


def _make_schema(name: str, description: str, members: Mapping[str, Any], **defaults: Any) -> type:  # noqa: ANN401
    typed = [(each, kind, defaults.get(each, field())) for each, kind in members.items()]
    schema = make_dataclass(name, typed, frozen=True)
    schema.__doc__ = description
    return schema


def _select_types(record: type, names: Iterable[str]) -> dict[str, Any]:
    return {name: record.__annotations__[name] for name in names}


def _select_values(record: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


# Names of the fields that responses take from other classes. The four tuples have fields of `Totals`,
# `RemovedMessage`, `VisibleMessage` and `Event`, in this order.
_CONVERSATION_FIELDS = (
    "model", "requests", "last_at", "prompt_tokens", "completion_tokens", "cached_tokens", "tokens_before",
    "tokens_after", "trigger", "window", "status", "strategy", "label", "name",
    "title", "rounds", "priced", "failed", "failure",
)  # fmt: skip
_REMOVED_MESSAGE_FIELDS = ("id", "index", "role", "text")
_VISIBLE_MESSAGE_FIELDS = ("id", "role", "text", "origin")
_ROUND_FIELDS = (
    "strategy", "round", "at", "reason", "outcome", "model", "messages", "tokens_before", "tokens_after",
    "tokens_real",
)  # fmt: skip
_MONEY_FIELDS = (*DOLLARS, "net_usd")
_SAVED_TOKENS_FIELDS = ("gross_tokens", "summary_tokens", "net_tokens")
_LIST_PRICES = """list_prices: Whether the shipped list of prices is used. It is not if all upstreams are on
            this machine or network, unless `upstream.prices` is `list`."""
Saved = _make_schema(
    "Saved",
    """The cost and the saving of an exchange, in dollars, without the cost of summaries.

    Attributes:
        cost: Cost of the exchange.
        gross: Amount by which compaction lowered this cost.
        cache_loss: Amount by which compaction raised this cost, because it broke the provider's prompt cache.
        net: `gross` less `cache_loss`.
    """,
    Saving.__annotations__,
)
Money = _make_schema(
    "Money",
    """The cost and the savings of a conversation, in dollars.

    Attributes:
        cost_usd: Cost of the requests, without summaries.
        gross_usd: Amount by which compaction lowered this cost.
        cache_loss_usd: Amount by which compaction raised this cost, because it broke the prompt cache.
        summary_usd: Cost of summaries.
        net_usd: `gross_usd` less `cache_loss_usd` and `summary_usd`.
    """,
    dict.fromkeys(_MONEY_FIELDS, float),
)
SavedTokens = _make_schema(
    "SavedTokens",
    """The tokens that compaction has saved in a conversation.

    Attributes:
        gross_tokens: Tokens that the client sent and the upstream did not read.
        summary_tokens: Input tokens of summary calls.
        net_tokens: `gross_tokens` less `summary_tokens`.
    """,
    dict.fromkeys(_SAVED_TOKENS_FIELDS, int),
)
ConversationRow = _make_schema(
    "ConversationRow",
    """A conversation in the list: its totals, and the sizes of its last exchange in tokens.

    `key` is the name of its client key in the statistics. `priced` is the number of requests whose cost is
    known. A value that is unknown is null.
    """,
    {
        "id": str,
        "key": str,
        **_select_types(Totals, _CONVERSATION_FIELDS),
        "cost_usd": float | None,
        "net_usd": float | None,
    },
)
Conversations = _make_schema(
    "Conversations",
    """Conversations, in the requested order.

    `next` is the `offset` of the next page; null if there is none.
    """,
    {"conversations": list[ConversationRow], "next": int | None},  # type: ignore[valid-type]
)
Removed = _make_schema(
    "Removed",
    "A message that a compaction has removed.",
    _select_types(RemovedMessage, _REMOVED_MESSAGE_FIELDS),
)
Asked = _make_schema("Asked", "A prompt that a summary model received.", SummaryPrompt.__annotations__)
SeenMessage = _make_schema(
    "SeenMessage",
    """A message as the model saw it after the compaction.

    `origin` tells whether the client's message was kept or replaced (`stand-in`).
    """,
    _select_types(VisibleMessage, _VISIBLE_MESSAGE_FIELDS),
)
UpstreamFailureRow = _make_schema(
    "UpstreamFailureRow",
    """Failures of one upstream with one cause: their number, and the time of the last one.

    `target` is the origin of the upstream. `errors` are what the upstream calls these errors. `models`
    are those of the requests, and `conversation` is that of the latest of them, as far as they are known.
    """,
    UpstreamFailure.__annotations__,
)
UpstreamFailureList = _make_schema(
    "UpstreamFailureList",
    """Failures of upstreams in whole hours, the latest failure first.

    Attributes:
        since: Start of the requested time, in seconds since the epoch.
        until: End of the requested time, in seconds since the epoch.
        complete: Whether the store has answered. If not, the list has only the failures in this process.
        failures: The failures, one row per upstream and cause.
    """,
    {"since": float, "until": float, "complete": bool, "failures": list[UpstreamFailureRow]},  # type: ignore[valid-type]
)
Models = _make_schema(
    "Models",
    f"""The models that are configured by name, and those that were used in the last 30 days.

    Attributes:
        models: The models.
        {_LIST_PRICES}
    """,
    {"models": list[ModelRow], "list_prices": bool},
)
_EVENT_TYPES = {each.name: each.type for each in fields(Event)}
_COMPACTION_TYPES = {
    **_EVENT_TYPES,
    **{name: kind for name, kind in CompactionRecord.__annotations__.items() if name != "event"},
}
_FEED_TYPES = {name: kind for name, kind in _EVENT_TYPES.items() if name not in HIDDEN_FIELDS}
_COUNTER_TYPES: dict[str, Any] = {
    **dict.fromkeys(COUNTS, int),
    "failed_open": int,
    "net_tokens": int,
    "last_at": float | None,
    **dict.fromkeys(_MONEY_FIELDS, float | None),
    **dict.fromkeys(COUNTS_BY_WORD, dict[str, int]),
    "overhead": list[int],
    "overhead_p50_s": float | None,
    "overhead_p95_s": float | None,
    "overhead_own_p50_s": float | None,
    "overhead_own_p95_s": float | None,
    "overhead_waiting": list[int],
    "overhead_waiting_p50_s": float | None,
    "overhead_waiting_p95_s": float | None,
}
ExchangeLine = _make_schema(
    "ExchangeLine",
    "An exchange and its saving. Unknown values are null.",
    {**Exchange.__annotations__, "saving": Saved | None},
)
_NEXT_PAGE = "`next` is the `offset` of the next page; null if there is none."
Exchanges = _make_schema(
    "Exchanges",
    f"Exchanges, oldest first. The first page has the newest ones, the next page older ones. {_NEXT_PAGE}",
    {"exchanges": list[ExchangeLine], "next": int | None},  # type: ignore[valid-type]
)
CompactionLine = _make_schema(
    "CompactionLine", "A compaction and its state. Unknown values are null.", _COMPACTION_TYPES
)
Compactions = _make_schema(
    "Compactions",
    "The compactions of a conversation, oldest first.",
    {"compactions": list[CompactionLine]},  # type: ignore[valid-type]
)
CompactionDetail = _make_schema(
    "CompactionDetail",
    "A compaction with its removed messages, its prompts, and the messages after it.",
    {**_COMPACTION_TYPES, "removed": list[Removed], "prompts": list[Asked], "seen": list[SeenMessage]},  # type: ignore[valid-type]
)
FedEvent = _make_schema(
    "FedEvent", "An event. `feed` is its id in the event stream.", {**_FEED_TYPES, "feed": str}
)
FedEvents = _make_schema(
    "FedEvents",
    f"The latest events, newest first. {_NEXT_PAGE}",
    {"events": list[FedEvent], "next": int | None},  # type: ignore[valid-type]
)
StatsRow = _make_schema(
    "StatsRow", "Counters for one hour, day, model or key.", {"of": str, **_COUNTER_TYPES}
)
Total = _make_schema("Total", "The sum of all rows.", _COUNTER_TYPES)
Stats = _make_schema(
    "Stats",
    f"""Sums over all exchanges in whole hours. Amounts in dollars are null if no price is known.

    Attributes:
        since: Start of the requested time, in seconds since the epoch.
        until: End of the requested time, in seconds since the epoch.
        by: Grouping of the rows, such as `hour` or `model`.
        rows: The sums of each group.
        total: The sum of all rows.
        {_LIST_PRICES}
    """,
    {
        "since": float,
        "until": float,
        "by": str,
        "rows": list[StatsRow],  # type: ignore[valid-type]
        "total": Total,
        "list_prices": bool,
    },
)
Round = _make_schema(
    "Round",
    """A compaction of a conversation. Sizes are in tokens.

    Attributes:
        strategy: Strategy that made the compaction.
        round: Number of the compaction.
        at: Time of the compaction, in seconds since the epoch.
        reason: Why the compaction was due.
        outcome: `applied`, or `scheduled` if it was prepared and no request has used it yet.
        model: Model that wrote the summary.
        messages: Number of messages that were replaced.
        tokens_before: Estimated size of the request before the compaction.
        tokens_after: Estimated size of the request after the compaction.
        tokens_real: Size of the request after the compaction, as the upstream counted it.
        undone: Whether the compaction was undone, so that it is no longer applied.
    """,
    {**_select_types(Event, _ROUND_FIELDS), "undone": bool},
)
Undone = _make_schema(
    "Undone",
    """The undone compaction, with the fields of a `Round`, and the state of the conversation after the undo.

    Attributes:
        dropped: Numbers of the prepared compactions that will not be used either, oldest first.
        remaining: Number of the compaction that is in use again; null if requests are sent in full.
        remaining_strategy: Strategy of this compaction; null if requests are sent in full.
        hard_tokens: Estimated request size, in tokens, from which the proxy makes a new compaction; null if
            unknown.
    """,
    {
        **_select_types(Event, _ROUND_FIELDS),
        "undone": bool,
        "dropped": list[int],
        "remaining": int | None,
        "remaining_strategy": str | None,
        "hard_tokens": int | None,
    },
)
Pin = _make_schema(
    "Pin", "A text that every compaction keeps word for word, and its id.", {"id": str, "text": str}
)
Pins = _make_schema("Pins", "The pins of a conversation, oldest first.", {"pins": list[Pin]})  # type: ignore[valid-type]
ProjectInstruction = _make_schema(
    "ProjectInstruction",
    """Project instructions, such as a CLAUDE.md, that a client puts into user messages.

    Attributes:
        id: Id of the instructions, the same for all their versions.
        client: Name of the client.
        kind: `instructions`, `memory` or `environment`.
        path: Path of the file, or another text that distinguishes instructions of one kind; may be empty.
        tokens: Estimated size of the newest version, in tokens.
        removed: Whether the instructions are left out of requests that the proxy rewrites.
    """,
    {"id": str, **NotedInstruction.__annotations__, "removed": bool},
)
ProjectInstructions = _make_schema(
    "ProjectInstructions",
    "The project instructions of a conversation, oldest first.",
    {"instructions": list[ProjectInstruction]},  # type: ignore[valid-type]
)
Conversation = _make_schema(
    "Conversation",
    f"""The current state of a conversation.

    Attributes:
        id: Id of the conversation.
        totals: Usage of the conversation.
        rounds: Compactions of the conversation, oldest first.
        pins: Pins of the conversation.
        instructions: Project instructions of the conversation.
        compact: Whether the next request will be compacted because a user requested it.
        suppressed: Whether automatic compactions are off after an undo. A request that exceeds the context
            window is compacted nevertheless.
        hard_tokens: Estimated request size, in tokens, from which a compaction is made even if `suppressed`
            is true; null if unknown.
        bypass: Whether requests are forwarded unchanged.
        money: Cost and savings of the conversation; null if no price is known.
        tokens: Tokens that compaction has saved; null if no token count is known.
        {_LIST_PRICES}
        small_bytes: Size, in bytes, up to which requests are not inspected now; null if all are inspected.
        min_trigger: Smallest size, in tokens, at which a request is compacted now; null if none is.
    """,
    {
        "id": str,
        "totals": Totals,
        "rounds": list[Round],  # type: ignore[valid-type]
        "pins": list[Pin],  # type: ignore[valid-type]
        "instructions": list[ProjectInstruction],  # type: ignore[valid-type]
        "compact": bool,
        "suppressed": bool,
        "hard_tokens": int | None,
        "bypass": bool,
        "money": Money | None,
        "tokens": SavedTokens | None,
        "list_prices": bool,
        "small_bytes": int | None,
        "min_trigger": int | None,
    },
)


@dataclass(frozen=True, slots=True)
class NewPin:
    """A text to pin: one line of 1 to 2,000 characters."""

    text: str


Marked = _make_schema(
    "Marked",
    "Confirms that the conversation's next request will be compacted.",
    {"id": str, "compact": bool},
    compact=True,
)
Range = _make_schema(
    "Range",
    """A range of lines of a message. A very long line counts as several.

    Attributes:
        first: Number of the first line, from 1.
        last: Number of the last line.
        of: Number of lines that the message has.
    """,
    {"first": int, "last": int, "of": int},
)
ArchivedMessage = _make_schema(
    "ArchivedMessage",
    """A message that a compaction has removed, with information about the compaction.

    Attributes:
        id: Id of the message.
        index: Index of the message in the conversation. System and developer messages and project
            instructions are not counted.
        role: Role of the message.
        text: Text of the message, or only the requested lines.
        round: Number of the compaction.
        strategy: Strategy of the compaction.
        at: Time of the compaction, in seconds since the epoch.
        conversation: Conversation in which the compaction was made.
        turn: Number of the message's turn, from 1. It is 0 before the first turn, and null if unknown.
        lines: Range of the lines in `text`; null if `text` is the whole message.
    """,
    {
        **_select_types(RemovedMessage, _REMOVED_MESSAGE_FIELDS),
        "round": int,
        "strategy": str,
        "at": float,
        "conversation": str,
        "turn": int | None,
        "lines": Range | None,
    },
    lines=None,
)
Events = _make_schema(
    "Events",
    f"Events, oldest first. The first page has the newest ones, the next page older ones. {_NEXT_PAGE}",
    {"events": list[Event], "next": int | None},
)
Bypass = _make_schema(
    "Bypass", "Whether the conversation's requests are forwarded unchanged.", {"id": str, "bypass": bool}
)
Hits = _make_schema(
    "Hits", "Messages that the search found, the best match first.", {"hits": list[SearchHit]}
)
Forgotten = _make_schema("Forgotten", "The number of records that were deleted.", {"deleted": int})
Export = _make_schema(
    "Export",
    """Everything that is stored about a conversation.

    Attributes:
        conversation: Current state of the conversation.
        events: Events of the conversation, oldest first. The event of a compaction contains its summary.
        messages: Messages that compactions have removed, in the order of the conversation.
    """,
    {"conversation": Conversation, "events": list[Event], "messages": list[ArchivedMessage]},  # type: ignore[valid-type]
)


def to_conversation_row(conversation: ListedConversation) -> dict[str, Any]:
    """Converts a listed conversation to the fields of a `ConversationRow`. Unknown costs become None."""
    totals = conversation.totals
    return {
        "id": conversation.id,
        "key": conversation.key,
        **_select_values(totals, _CONVERSATION_FIELDS),
        "cost_usd": totals.cost_usd if totals.priced else None,
        "net_usd": totals.net_usd,
    }


def to_exchange_line(stored: ExchangeEntry) -> dict[str, Any]:
    """Converts a stored exchange to the fields of an `ExchangeLine`."""
    return {**stored.exchange._asdict(), "saving": None if stored.saving is None else stored.saving._asdict()}


def to_compaction_line(record: CompactionRecord) -> dict[str, Any]:
    """Converts a compaction to the fields of a `CompactionLine`."""
    return {**asdict(record.event), **_select_values(record, CompactionRecord._fields[1:])}


def to_compaction_detail(record: CompactionRecord, detail: RoundDetail) -> dict[str, Any]:
    """Converts a compaction and its details to the fields of a `CompactionDetail`."""
    return {
        **to_compaction_line(record),
        "removed": [_select_values(each, _REMOVED_MESSAGE_FIELDS) for each in detail.removed],
        "prompts": [asdict(each) for each in detail.prompts],
        "seen": [_select_values(each, _VISIBLE_MESSAGE_FIELDS) for each in detail.visible_messages],
    }


def to_item_fields(item: FeedItem) -> dict[str, Any]:
    """Returns the fields of a feed item, except texts of the conversation and ids of messages."""
    return {name: value for name, value in item.fields.items() if name not in HIDDEN_FIELDS}


def to_counters(counters: ExchangeCounters) -> dict[str, Any]:
    """Converts counters to JSON values.

    If there are exchanges and none of them has a known price, all amounts in dollars are None. A failed
    exchange has no price. If all exchanges failed, the cost of summaries counts all the same. The quantiles
    of overhead are those of all exchanges, of those that did not wait for a compaction (`own`), and of those
    that waited (`waiting`).
    """
    answered = counters.requests - counters.failed
    priced = counters.unpriced < answered if answered else not counters.failed or counters.summary_usd > 0
    dollars = _select_values(counters, _MONEY_FIELDS) if priced else dict.fromkeys(_MONEY_FIELDS)
    return {
        **_select_values(counters, COUNTS),
        "failed_open": counters.failed_open,
        "net_tokens": counters.net_tokens,
        "last_at": counters.last_at or None,
        **dollars,
        **_select_values(counters, COUNTS_BY_WORD),
        "overhead": counters.overhead,
        "overhead_p50_s": counters.compute_overhead_quantile_s(0.5),
        "overhead_p95_s": counters.compute_overhead_quantile_s(0.95),
        "overhead_own_p50_s": compute_quantile_s(counters.own_overhead, 0.5),
        "overhead_own_p95_s": compute_quantile_s(counters.own_overhead, 0.95),
        "overhead_waiting": counters.waiting_overhead,
        "overhead_waiting_p50_s": compute_quantile_s(counters.waiting_overhead, 0.5),
        "overhead_waiting_p95_s": compute_quantile_s(counters.waiting_overhead, 0.95),
    }


def to_stats_row(row: StatisticsRow) -> dict[str, Any]:
    """Converts a row of statistics to the fields of a `StatsRow`."""
    return {"of": row.label, **to_counters(row.counters)}


def to_stats(
    since: float, until: float, by: str, report: StatisticsReport, *, list_prices: bool
) -> dict[str, Any]:
    """Converts statistics to the fields of a `Stats`.

    Args:
        since: Start of the period, in seconds since the epoch.
        until: End of the period, in seconds since the epoch.
        by: What each row sums up, such as `day` or `model`.
        report: The statistics.
        list_prices: Whether the shipped list of prices is used.
    """
    return {
        "since": since,
        "until": until,
        "by": by,
        "rows": [to_stats_row(each) for each in report.rows],
        "total": to_counters(report.total),
        "list_prices": list_prices,
    }


def to_round(event: Event, *, undone: bool) -> dict[str, Any]:
    """Converts the event of a compaction to the fields of a `Round`."""
    return {**_select_values(event, _ROUND_FIELDS), "undone": undone}


def to_undone(result: UndoResult, hard_tokens: int | None) -> dict[str, Any]:
    """Converts the result of an undo to the fields of an `Undone`. `hard_tokens` is the hard mark."""
    return {
        **to_round(result.round, undone=True),
        "dropped": [each.round or 0 for each in result.dropped],
        "remaining": result.remaining.round if result.remaining else None,
        "remaining_strategy": result.remaining.strategy if result.remaining else None,
        "hard_tokens": hard_tokens,
    }


def to_pins(pins: Iterable[str]) -> list[dict[str, str]]:
    """Converts each text of a pin to the fields of a `Pin`: the id of the pin and the text."""
    return [{"id": build_pin_id(text), "text": text} for text in pins]


def to_instructions(directives: Directives) -> list[dict[str, Any]]:
    """Converts each of the project instructions in `directives` to the fields of a `ProjectInstruction`."""
    return [
        {"id": each.id, **each._asdict(), "removed": each.id in directives.removed}
        for each in directives.instructions
    ]


def to_conversation(
    conversation: str,
    overview: ConversationOverview,
    limits: GateLimits | None,
    *,
    hard_tokens: int | None,
    list_prices: bool,
) -> dict[str, Any]:
    """Converts the overview of a conversation to the fields of a `Conversation`.

    Args:
        conversation: Id of the conversation.
        overview: The overview.
        limits: The sizes that decide about its next request; None if they are unknown.
        hard_tokens: The hard mark, in tokens; None if it is unknown.
        list_prices: Whether the shipped list of prices is used.
    """
    directives, totals = overview.directives, overview.totals
    return {
        "id": conversation,
        "totals": asdict(totals),
        "rounds": [to_round(each, undone=each.place in overview.undone) for each in overview.rounds],
        "pins": to_pins(directives.pins),
        "instructions": to_instructions(directives),
        "compact": directives.compact,
        "suppressed": directives.suppressed,
        "hard_tokens": hard_tokens,
        "bypass": directives.bypass,
        "money": _select_values(totals, _MONEY_FIELDS) if totals.priced else None,
        "tokens": _select_values(totals, _SAVED_TOKENS_FIELDS) if totals.counted else None,
        "list_prices": list_prices,
        "small_bytes": int(limits.max_bytes) if limits and limits.max_bytes > 0 else None,
        "min_trigger": limits.trigger_tokens if limits else None,
    }


def to_archived_message(recalled: RecalledMessage, lines: str = "") -> dict[str, Any]:
    """Converts an archived message to the fields of an `ArchivedMessage`.

    Args:
        recalled: The message, with the compaction that removed it.
        lines: Range of the lines to return, such as `10-40`. An empty text returns the whole message.

    Raises:
        RequestRefusedError: If `lines` is not a range, or begins after the last line (422).
    """
    message, archived_round = recalled.message, recalled.round
    text, line_range = _select_lines(message.text, lines) if lines else (message.text, None)
    return {
        **_select_values(message, _REMOVED_MESSAGE_FIELDS),
        "text": text,
        "round": archived_round.number,
        "strategy": archived_round.strategy,
        "at": archived_round.made_at,
        "conversation": archived_round.conversation,
        "turn": message.turn,
        "lines": line_range,
    }


def _select_lines(text: str, lines: str) -> tuple[str, dict[str, int]]:
    requested, every = parse_line_range(lines), split_lines(text)
    if requested is None or requested[0] > len(every):
        raise RequestRefusedError(
            422, f"lines: a range from 1 to {len(every)}, such as 1-40", "invalid_request"
        )
    first, last = requested[0], min(requested[1] or len(every), len(every))
    return "\n".join(every[first - 1 : last]), {"first": first, "last": last, "of": len(every)}
