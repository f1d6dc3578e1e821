"""Admin API endpoints that export the figures of conversations: as JSON, or as CSV for spreadsheets.

An export is sent while its data is read, one conversation at a time. It contains no text of a conversation.
The endpoint `conversations/{id}/export` exports one conversation with its text.
"""

import csv
import io
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import asdict
from typing import Any, Literal

from fastapi.responses import StreamingResponse

from compaction_proxy.admin.api import schemas
from compaction_proxy.admin.api.routing import QueriesDependency, TimeParameter, create_router, parse_time
from compaction_proxy.admin.queries import ConversationQueries
from compaction_proxy.core.cost.savings import Saving
from compaction_proxy.core.event import Event
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.telemetry.live_feed import HIDDEN_FIELDS
from compaction_proxy.telemetry.statistics import COUNTS, Grouping
from compaction_proxy.telemetry.usage import DOLLARS

# Spreadsheet programs treat a cell that begins with one of these characters as a formula.
FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")


def format_csv_line(values: Iterable[object]) -> str:
    """Formats a line of CSV (RFC 4180), including its line end. None becomes an empty cell.

    A text that a spreadsheet program would treat as a formula gets the prefix `'`.
    """
    line = io.StringIO()
    cells = [f"'{each}" if isinstance(each, str) and each.startswith(FORMULAS) else each for each in values]
    csv.writer(line, lineterminator="\r\n").writerow(cells)
    return line.getvalue()


SAVING_COLUMNS = tuple(f"saving_{name}" for name in Saving._fields)
EXCHANGE_COLUMNS = ("conversation", *Exchange._fields, *SAVING_COLUMNS)
STATS_COLUMNS = (
    "of", *COUNTS, "failed_open", *DOLLARS, "net_usd", "overhead_p50_s", "overhead_p95_s",
)  # fmt: skip

router = create_router()


@router.get(
    "/export.json",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/json": {}}}},
)
async def _json(queries: QueriesDependency, since: TimeParameter = "30d") -> StreamingResponse:
    """Export the 1,000 most recently used conversations, and the daily statistics since `since`.

    Each conversation has its exchanges and events.
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
    """Export one line per exchange since `since`, or with `of=stats` one line per row of the statistics.

    The exchanges are those of the 1,000 most recently used conversations.
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
    """Yields the JSON document in pieces: one for each conversation, and one for the statistics."""
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
