"""Defines the endpoints of the admin API that concern the whole proxy, such as statistics and exports.

An export contains the exchanges and events of conversations, or statistics, but no text of conversations. It
is JSON, or CSV for spreadsheets. The proxy sends an export while it reads the data, one conversation at a
time. The endpoint `conversations/{id}/export` exports one conversation with its text.

A replay can load a stored conversation. The loaded conversation consists of the messages that compactions
have removed and the messages that the last compaction has kept. The store contains only the text of these
messages, in which a tool call is a line with its name and arguments. Fixed messages and tool definitions are
not stored. The results of such a replay are therefore approximate.
"""

import asyncio
import csv
import io
import json
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Annotated, Any, Literal

from fastapi import Header, Request, Response
from fastapi.responses import StreamingResponse

from compaction_proxy.admin.api import schemas
from compaction_proxy.admin.api.conversations import SearchQuery
from compaction_proxy.admin.api.routing import (
    AdminSettings,
    ListLimit,
    ListOffset,
    QueriesDependency,
    SettingsDependency,
    TimeParameter,
    build_json_response,
    create_router,
    cut_page,
    get_api,
    parse_time,
)
from compaction_proxy.admin.queries import ConversationQueries
from compaction_proxy.compaction.commands import ConversationCommands
from compaction_proxy.config.config import Config, format_key_path, iter_keys, to_plain_value
from compaction_proxy.core.cost.savings import Saving
from compaction_proxy.core.errors import RequestRefusedError
from compaction_proxy.core.event import Event
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.providers.pricing import uses_list_prices
from compaction_proxy.recall.archive import RemovedMessage
from compaction_proxy.recall.round_detail import KEPT, VisibleMessage
from compaction_proxy.replay.jobs import parse_job
from compaction_proxy.replay.provider import JsonObject
from compaction_proxy.telemetry.live_feed import HIDDEN_FIELDS, FeedItem
from compaction_proxy.telemetry.statistics import COUNTS, Grouping
from compaction_proxy.telemetry.usage import DOLLARS

# The source that the admin API reports for a configuration value if the real source is not known.
UNKNOWN = "unknown"

router = create_router()


@dataclass(frozen=True, slots=True)
class Value:
    """A configuration key, its value, and the source of the value (`origin`), such as a file or a default."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Configuration:
    """The current configuration. Secrets are masked.

    Attributes:
        path: Path of the configuration file; null without a file.
        values: All keys with their values.
        warnings: Warnings about settings that are valid but probably not intended.
    """

    path: str | None
    values: tuple[Value, ...]
    warnings: tuple[str, ...]


@router.get("/stats", response_model=schemas.Stats)
async def _stats(
    queries: QueriesDependency,
    settings: SettingsDependency,
    since: TimeParameter = "7d",
    until: TimeParameter = "0m",
    by: Grouping = "total",
    model: SearchQuery = "",
    key: SearchQuery = "",
) -> Response:
    """Get the sums of all exchanges in the hours that the period from `since` to `until` overlaps.

    `by` says what each row of the response sums up, such as an hour or a model. `model` and `key` (`k_…`)
    select one model and one client key.
    """
    now = queries.now()
    start, stop = parse_time(since, now), parse_time(until, now)
    report = await queries.get_statistics(start, stop, by, model=model, key=key)
    return build_json_response(
        schemas.to_stats(start, stop, by, report, list_prices=uses_list_prices(settings.config))
    )


@router.get("/upstream-failures", response_model=schemas.UpstreamFailureList)
async def _upstream_failures(
    queries: QueriesDependency, since: TimeParameter = "24h", until: TimeParameter = "0m"
) -> Response:
    """List the failures of upstreams, one row for each pair of an upstream and a cause.

    The list covers all hours that the period from `since` to `until` overlaps.
    """
    now = queries.now()
    start, stop = parse_time(since, now), parse_time(until, now)
    found, complete = await queries.list_upstream_failures(start, stop)
    rows = [asdict(each) for each in found]
    return build_json_response({"since": start, "until": stop, "complete": complete, "failures": rows})


@router.get("/models", response_model=schemas.Models)
async def _models(queries: QueriesDependency, settings: SettingsDependency) -> Response:
    """List the context windows and prices of models that are configured by name or were used recently."""
    rows = [asdict(each) for each in await queries.list_models()]
    return build_json_response({"models": rows, "list_prices": uses_list_prices(settings.config)})


@router.get("/config", response_model=Configuration)
async def _config(settings: SettingsDependency) -> Response:
    """Get the current configuration, with the source of each value."""
    return build_json_response(asdict(build_configuration(settings)))


def build_configuration(settings: AdminSettings) -> Configuration:
    """Returns the current configuration as the admin API and the pages show it, with masked secrets."""
    return Configuration(settings.path or None, tuple(_list_values(settings)), settings.warnings)


def _list_values(settings: AdminSettings) -> Iterator[Value]:
    defaults = Config()
    for key in iter_keys():
        name = format_key_path(key.path)
        value = _get_value(settings.config, key.path)
        # Without a loaded configuration, such as in the demo, the origins are unknown.
        presumed = "default" if value == _get_value(defaults, key.path) else UNKNOWN
        yield Value(name, to_plain_value(value), settings.origins.get(name, presumed))


def _get_value(config: Config, place: tuple[str | int, ...]) -> object:
    found: object = reduce(getattr, map(str, place), config)
    return found


# Seconds without an item after which an event stream sends a heartbeat. Without heartbeats, another proxy or
# a load balancer between the client and this proxy might close the connection.
HEARTBEAT_S = 15.0
# Interval, in seconds, at which an event stream without new items checks whether it must end.
NOTICE_S = 0.5
MAX_ID_CHARACTERS = 64
STREAM_OPENING = b": here begins what happens from now on\n\n"
HEARTBEAT = b": nothing new\n\n"

LastId = Annotated[str, Header(max_length=MAX_ID_CHARACTERS)]


@router.get("/events", response_model=schemas.FedEvents)
async def _recent(
    queries: QueriesDependency, limit: ListLimit = 100, offset: ListOffset = 0, *, failures: bool = False
) -> Response:
    """List the latest events of all conversations, newest first. `failures=true` selects only failures.

    Skips the `offset` newest ones.
    """
    found = await queries.list_recent_items(offset + limit + 1, failures=failures)
    page, following = cut_page(found, limit, offset)
    rows = [{**schemas.to_item_fields(each), "feed": each.id} for each in page]
    return build_json_response({"events": rows, "next": following})


@router.get(
    "/events/stream",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def _stream(
    request: Request, queries: QueriesDependency, last_event_id: LastId = ""
) -> StreamingResponse:
    """Stream events, exchanges and failures of upstreams, as server-sent events (SSE).

    The type of a server-sent event is `compaction` (any event of a conversation), `exchange`, `upstream` (a
    failure of an upstream) or `lost`. The type `lost` means that the client read too slowly and the proxy
    skipped items. If the header `Last-Event-ID` names an item, the stream begins with the newer stored items.
    """
    await queries.check_store()
    body = stream_events(queries.feed.follow(last_event_id or None), get_api(request).is_stopping)
    return StreamingResponse(body, media_type="text/event-stream", headers={"cache-control": "no-store"})


async def stream_events(
    items: AsyncGenerator[FeedItem],
    is_stopping: Callable[[], bool],
    *,
    heartbeat_s: float = HEARTBEAT_S,
    notice_s: float = NOTICE_S,
) -> AsyncGenerator[bytes]:
    """Yields an opening comment, then each item of the live feed as a server-sent event.

    Also yields a heartbeat after each `heartbeat_s` seconds without an item.

    Ends after the last item, or at most about `notice_s` seconds after `is_stopping` begins to return True.
    Then closes `items`.
    """
    clock = asyncio.get_running_loop().time
    last_sent_at = clock()
    pending = asyncio.ensure_future(anext(items, None))
    try:
        await asyncio.sleep(0)  # `items` begins to collect events before the opening is sent
        yield STREAM_OPENING
        while not is_stopping():
            done, _ = await asyncio.wait({pending}, timeout=notice_s)
            if is_stopping():  # the access policy may have changed, so a newer item must not be sent
                return
            if done:
                item = pending.result()
                if item is None:
                    return
                pending = asyncio.ensure_future(anext(items, None))
                last_sent_at = clock()
                yield format_event(item)
            elif clock() - last_sent_at >= heartbeat_s:
                last_sent_at = clock()
                yield HEARTBEAT
    finally:
        pending.cancel()
        await asyncio.wait({pending})
        await items.aclose()


def format_event(item: FeedItem) -> bytes:
    """Formats an item of the live feed as a server-sent event, without texts of the conversation."""
    data = json.dumps(schemas.to_item_fields(item), allow_nan=False)
    return f"id: {item.id}\nevent: {item.kind}\ndata: {data}\n\n".encode()


# Spreadsheet programs treat a cell that begins with one of these characters as a formula.
FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")


def format_csv_line(values: Iterable[object]) -> str:
    """Returns a line of CSV (RFC 4180), including its line ending. None becomes an empty cell.

    The function puts `'` before a text that a spreadsheet program would treat as a formula.
    """
    line = io.StringIO()
    cells = [f"'{each}" if isinstance(each, str) and each.startswith(FORMULAS) else each for each in values]
    csv.writer(line, lineterminator="\r\n").writerow(cells)
    return line.getvalue()


SAVING_COLUMNS = tuple(f"saving_{name}" for name in Saving._fields)
EXCHANGE_COLUMNS = ("conversation", *Exchange._fields, *SAVING_COLUMNS)
STATS_COLUMNS = (
    "of", *COUNTS, "failed_open", "net_tokens", "last_at", *DOLLARS, "net_usd", "overhead_p50_s",
    "overhead_p95_s",
)  # fmt: skip


@router.get(
    "/export.json",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/json": {}}}},
)
async def _json(queries: QueriesDependency, since: TimeParameter = "30d") -> StreamingResponse:
    """Export the 1,000 most recently used conversations, and the daily statistics from `since` until now.

    The export contains the exchanges and events of these conversations even if they are older than `since`.
    """
    await queries.check_store()
    start = parse_time(since, queries.now())
    return _build_attachment(_stream_json(queries, start), "application/json", "compaction.json")


@router.get("/export.csv", response_class=StreamingResponse, responses={200: {"content": {"text/csv": {}}}})
async def _csv(
    queries: QueriesDependency,
    of: Literal["exchanges", "stats"] = "exchanges",
    since: TimeParameter = "30d",
    by: Grouping = "day",
) -> StreamingResponse:
    """Export the exchanges of the 1,000 most recently used conversations from `since` until now, as CSV.

    Each line has one exchange. With `of=stats`, export the statistics from `since` until now instead. Each
    line then has the sums of one hour, day, model or client key, as `by` says.
    """
    await queries.check_store()
    start = parse_time(since, queries.now())
    columns = EXCHANGE_COLUMNS if of == "exchanges" else STATS_COLUMNS
    rows = (
        _stream_exchange_rows(queries, start)
        if of == "exchanges"
        else _stream_statistics_rows(queries, start, by)
    )
    return _build_attachment(_stream_csv(columns, rows), "text/csv; charset=utf-8", f"{of}.csv")


def _build_attachment(body: AsyncIterator[bytes], kind: str, name: str) -> StreamingResponse:
    headers = {"cache-control": "no-store", "content-disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(body, media_type=kind, headers=headers)


async def _stream_json(queries: ConversationQueries, since: float) -> AsyncIterator[bytes]:
    """Yields the JSON export in parts: one for each conversation, then one for the statistics."""
    opening = b'{"conversations":['
    async for listed, exchanges, events in queries.iter_conversations():
        fields = schemas.to_conversation_row(listed)
        fields |= {
            "exchanges": [schemas.to_exchange_line(each) for each in exchanges],
            "events": _to_event_fields(events),
        }
        yield opening + json.dumps(fields, allow_nan=False).encode()
        opening = b","
    summed = await queries.get_statistics(since, queries.now(), "day")
    rows = json.dumps([schemas.to_stats_row(each) for each in summed.rows], allow_nan=False).encode()
    start = opening if opening != b"," else b""
    yield b'%b],"stats":%b}' % (start, rows)


def _to_event_fields(events: Iterable[Event]) -> list[dict[str, Any]]:
    rows = (asdict(event) for event in events)
    return [{name: value for name, value in each.items() if name not in HIDDEN_FIELDS} for each in rows]


async def _stream_exchange_rows(
    queries: ConversationQueries, since: float
) -> AsyncIterator[Mapping[str, Any]]:
    async for listed, exchanges, _ in queries.iter_conversations():
        for entry in exchanges:
            if entry.exchange.at >= since:
                saving = {} if entry.saving is None else dict(zip(SAVING_COLUMNS, entry.saving, strict=True))
                yield {"conversation": listed.id, **entry.exchange._asdict(), **saving}


async def _stream_statistics_rows(
    queries: ConversationQueries, since: float, by: Grouping
) -> AsyncIterator[Mapping[str, Any]]:
    summed = await queries.get_statistics(since, queries.now(), by)
    for row in summed.rows:
        yield schemas.to_stats_row(row)


async def _stream_csv(
    columns: tuple[str, ...], rows: AsyncIterator[Mapping[str, Any]]
) -> AsyncIterator[bytes]:
    yield format_csv_line(columns).encode()
    async for row in rows:
        yield format_csv_line(row.get(name) for name in columns).encode("utf-8", "replace")


_TOKENS = {"type": "integer", "minimum": 1, "nullable": True}
# Schema of the body of a replay request, for the OpenAPI document. The function `replay` has no parameter for
# the body, because FastAPI would decode the body on the event loop. To decode megabytes there would delay
# other requests.
_BODY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "messages": {"type": "array", "items": {"type": "object"}},
        "tools": {"type": "array", "items": {"type": "object"}},
        "conversation": {
            "type": "string",
            "description": "Id of a stored conversation, instead of `messages`.",
        },
        "model": {"type": "string", "nullable": True},
        "strategies": {"type": "array", "items": {"type": "string"}},
        "trigger_tokens": _TOKENS,
        "target_tokens": _TOKENS,
        "window": _TOKENS,
    },
}


@router.post(
    "/replay",
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": _BODY}}}},
)
async def replay(request: Request) -> Response:
    """Compute what each strategy would forward for a conversation, and what that would cost.

    The computation calls no model.
    """
    job = await asyncio.to_thread(parse_job, await request.body())
    return build_json_response({"results": await get_api(request).replay_jobs.run_job(job)})


# The roles of messages that contain a tool result.
_ANSWERING = frozenset({"tool", "function"})


def create_conversation_loader(
    commands: ConversationCommands, queries: ConversationQueries
) -> Callable[[str], Awaitable[JsonObject]]:
    """Creates a function that takes the id of a stored conversation and loads the conversation.

    The created function returns the members `model` and `messages` of a request of the Chat Completions wire.
    It raises `RequestRefusedError` if the conversation is unknown (404) or if too little of it is stored
    (409).
    """

    async def load_conversation(conversation: str) -> JsonObject:
        overview = await commands.get_overview(conversation)
        in_force = [
            each.place for each in overview.rounds if each.place and each.place not in overview.undone
        ]
        removed = [each.message for each in await commands.list_archived_messages(conversation)]
        detail = (await queries.get_compaction(conversation, in_force[-1]))[1] if in_force else None
        messages = rebuild_messages(removed, detail.visible_messages if detail else ())
        return {"model": overview.totals.model, "messages": messages}

    return load_conversation


def rebuild_messages(
    removed: Sequence[RemovedMessage], visible: Sequence[VisibleMessage]
) -> list[JsonObject]:
    """Rebuilds the messages that a conversation had at its last compaction, without fixed messages.

    Args:
        removed: Messages that compactions removed. If several messages have the same index, the function
            uses the last of them.
        visible: Messages that the model saw after the last compaction. The function uses only those that the
            compaction kept, and not the replacements.

    Raises:
        RequestRefusedError: If too little of the conversation is stored (409).
    """
    placed = {each.index: (each.role, each.text) for each in removed}
    known = {each.id for each in removed}
    kept = [(each.role, each.text) for each in visible if each.origin == KEPT and each.id not in known]
    total = len(placed) + len(kept)
    free = [index for index in range(total) if index not in placed]
    if not total or max(placed, default=0) >= total:
        raise RequestRefusedError(
            409, "The store has too little of this conversation. Send its messages instead.", "not_kept"
        )
    placed |= dict(zip(free, kept, strict=True))
    return _to_wire_messages([placed[index] for index in range(total)])


def _to_wire_messages(texts: Sequence[tuple[str, str]]) -> list[JsonObject]:
    """Converts pairs of a role and a text to messages of the Chat Completions wire.

    The ids of tool calls are not stored. Therefore, the function makes a new tool call with a new id for each
    tool result, and adds the call to the assistant message before the result. If there is no such message,
    the tool result becomes a user message.
    """
    messages: list[JsonObject] = []
    caller: JsonObject | None = None
    for index, (role, text) in enumerate(texts):
        if role not in _ANSWERING:
            messages.append({"role": role, "content": text})
            caller = messages[-1] if role == "assistant" else None
        elif caller is None:  # the call of this result is not stored
            messages.append({"role": "user", "content": text})
        else:
            call = {
                "id": f"call_{index}",
                "type": "function",
                "function": {"name": "call", "arguments": "{}"},
            }
            caller.setdefault("tool_calls", []).append(call)
            messages.append({"role": "tool", "tool_call_id": f"call_{index}", "content": text})
    return messages
