"""The admin API's exports of everything: JSON with what is known of conversations, CSV for spreadsheets.

They are written while they are read, one conversation at a time. No text of a conversation is among them;
`conversations/{id}/export` has that.
"""

import csv
import io
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Literal

from fastapi.responses import StreamingResponse

from compaction_proxy.admin.api import schemas
from compaction_proxy.admin.api.routing import Time, Watches, moment, routes
from compaction_proxy.admin.queries import Watching
from compaction_proxy.core.cost.savings import Saving
from compaction_proxy.core.event import Event
from compaction_proxy.core.exchange import Exchange
from compaction_proxy.telemetry.counters import COUNTS
from compaction_proxy.telemetry.live_feed import HIDDEN
from compaction_proxy.telemetry.statistics import By
from compaction_proxy.telemetry.totals import DOLLARS

# What a spreadsheet takes for a formula begins with one of these.
FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")


def line(values: Iterable[object]) -> str:
    """A line of CSV with its end (RFC 4180); nothing in it is computed, and what is None stays empty."""
    made = io.StringIO()
    csv.writer(made, lineterminator="\r\n").writerow(_cells(values))
    return made.getvalue()


def _cells(values: Iterable[object]) -> Iterator[object]:
    for value in values:
        formula = isinstance(value, str) and value.startswith(FORMULAS)
        yield f"'{value}" if formula else value


SAVED = tuple(f"saving_{name}" for name in Saving._fields)
EXCHANGE_COLUMNS = ("conversation", *Exchange._fields, *SAVED)
STATS_COLUMNS = (
    "of", *COUNTS, "failed_open", *DOLLARS, "net_usd", "overhead_p50_s", "overhead_p95_s",
)  # fmt: skip

router = routes()


@router.get(
    "/export.json",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/json": {}}}},
)
async def _json(watching: Watches, since: Time = "30d") -> StreamingResponse:
    """Conversations with their exchanges and events, and the statistics by day since `since`."""
    await watching.reachable()
    start = moment(since, watching.now())
    return _attached(_document(watching, start), "application/json", "compaction.json")


@router.get("/export.csv", response_class=StreamingResponse, responses={200: {"content": {"text/csv": {}}}})
async def _csv(
    watching: Watches, of: Literal["exchanges", "stats"] = "exchanges", since: Time = "30d", by: By = "day"
) -> StreamingResponse:
    """A line for each exchange that came since `since`, or for each row of the statistics."""
    await watching.reachable()
    start = moment(since, watching.now())
    columns = EXCHANGE_COLUMNS if of == "exchanges" else STATS_COLUMNS
    rows = _exchanges(watching, start) if of == "exchanges" else _stats(watching, start, by)
    return _attached(_lines(columns, rows), "text/csv; charset=utf-8", f"{of}.csv")


def _attached(body: AsyncIterator[bytes], kind: str, name: str) -> StreamingResponse:
    headers = {"cache-control": "no-store", "content-disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(body, media_type=kind, headers=headers)


async def _document(watching: Watching, since: float) -> AsyncIterator[bytes]:
    """The JSON document in pieces."""
    opening = b'{"conversations":['
    async for listed, exchanges, events in watching.everything():
        told = asdict(schemas.row(listed))
        told |= {"exchanges": [schemas.exchange(each) for each in exchanges], "events": _events(events)}
        yield opening + json.dumps(told, allow_nan=False).encode()
        opening = b","
    summed = await watching.summed(since, watching.now(), "day")
    rows = json.dumps([schemas.stats_row(each) for each in summed.rows], allow_nan=False).encode()
    start = opening if opening != b"," else b""
    yield b'%b],"stats":%b}' % (start, rows)


def _events(events: Iterable[Event]) -> list[dict[str, Any]]:
    told = (asdict(event) for event in events)
    return [{name: value for name, value in each.items() if name not in HIDDEN} for each in told]


async def _exchanges(watching: Watching, since: float) -> AsyncIterator[Mapping[str, Any]]:
    async for listed, exchanges, _ in watching.everything():
        for kept in exchanges:
            if kept.exchange.at >= since:
                saved = {} if kept.saving is None else dict(zip(SAVED, kept.saving, strict=True))
                yield {"conversation": listed.id, **kept.exchange._asdict(), **saved}


async def _stats(watching: Watching, since: float, by: By) -> AsyncIterator[Mapping[str, Any]]:
    summed = await watching.summed(since, watching.now(), by)
    for row in summed.rows:
        yield schemas.stats_row(row)


async def _lines(columns: tuple[str, ...], rows: AsyncIterator[Mapping[str, Any]]) -> AsyncIterator[bytes]:
    yield line(columns).encode()
    async for row in rows:
        yield line(row.get(name) for name in columns).encode("utf-8", "replace")
