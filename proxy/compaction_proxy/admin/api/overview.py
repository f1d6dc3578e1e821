"""Admin API endpoints for the whole proxy: statistics, events, upstream failures, models, configuration."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Annotated, Any

from fastapi import Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from compaction_proxy.admin.api import schemas
from compaction_proxy.admin.api.routing import (
    AdminSettings,
    QueriesDependency,
    SettingsDependency,
    TimeParameter,
    build_json_response,
    create_router,
    get_api,
    parse_time,
)
from compaction_proxy.admin.queries import MAX_SCANNED
from compaction_proxy.config.config import Config, format_key_path, iter_keys, to_plain_value
from compaction_proxy.telemetry.live_feed import FeedItem
from compaction_proxy.telemetry.statistics import Grouping

# Shown as the origin of a configuration value if the origin is not known.
UNKNOWN = "unknown"

router = create_router()


@dataclass(frozen=True, slots=True)
class Value:
    """A configuration key, its value, and the source of the value (such as a file or a default)."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Configuration:
    """The current configuration. Secrets are masked.

    Attributes:
        path: Path of the configuration file; null if there is none.
        values: All keys with their values.
        warnings: Settings that are valid but probably not intended.
    """

    path: str | None
    values: tuple[Value, ...]
    warnings: tuple[str, ...]


@router.get("/stats", response_model=schemas.Stats)
async def _stats(
    queries: QueriesDependency,
    since: TimeParameter = "7d",
    until: TimeParameter = "0m",
    by: Grouping = "total",
) -> Response:
    """Get the sums of all exchanges, in the whole hours that overlap the time from `since` to `until`."""
    now = queries.now()
    start, stop = parse_time(since, now), parse_time(until, now)
    return build_json_response(
        schemas.to_stats(start, stop, by, await queries.get_statistics(start, stop, by))
    )


@router.get("/upstream-failures", response_model=schemas.UpstreamFailureList)
async def _upstream_failures(
    queries: QueriesDependency, since: TimeParameter = "24h", until: TimeParameter = "0m"
) -> Response:
    """List the failures of upstreams by target and cause, in the hours from `since` to `until`."""
    now = queries.now()
    start, stop = parse_time(since, now), parse_time(until, now)
    found, complete = await queries.list_upstream_failures(start, stop)
    rows = [asdict(each) for each in found]
    return build_json_response({"since": start, "until": stop, "complete": complete, "failures": rows})


@router.get("/models", response_model=schemas.Models)
async def _models(queries: QueriesDependency) -> Response:
    """List the context windows and prices of models."""
    return build_json_response({"models": [asdict(each) for each in await queries.list_models()]})


@router.get("/config", response_model=Configuration)
async def _config(settings: SettingsDependency) -> Response:
    """Get the current configuration, with the source of each value."""
    return build_json_response(asdict(build_configuration(settings)))


def build_configuration(settings: AdminSettings) -> Configuration:
    """Builds the response that shows the current configuration, with masked secrets."""
    return Configuration(settings.path or None, tuple(_list_values(settings)), settings.warnings)


def _list_values(settings: AdminSettings) -> Iterator[Value]:
    for key in iter_keys():
        name = format_key_path(key.path)
        yield Value(
            name, to_plain_value(_get_value(settings.config, key.path)), settings.origins.get(name, UNKNOWN)
        )


def _get_value(config: Config, place: tuple[str | int, ...]) -> object:
    found: object = reduce(getattr, map(str, place), config)
    return found


# Interval of heartbeats on a stream without events, in seconds. Without them, proxies or load balancers on
# the way might close the connection.
HEARTBEAT_S = 15.0
# Longest time until a stream notices that the server is stopping, in seconds.
NOTICE_S = 0.5
MAX_ID_CHARACTERS = 64
STREAM_OPENING = b": here begins what happens from now on\n\n"
HEARTBEAT = b": nothing new\n\n"

ListLimit = Annotated[int, Query(ge=1, le=MAX_SCANNED)]
LastId = Annotated[str, Header(max_length=MAX_ID_CHARACTERS)]


@router.get("/events", response_model=schemas.FedEvents)
async def _recent(queries: QueriesDependency, limit: ListLimit = 100, *, failures: bool = False) -> Response:
    """List the latest events of all conversations, newest first. With `failures`, list only failures."""
    found = await queries.list_recent_items(limit, failures=failures)
    return build_json_response(
        {"events": [{**schemas.to_item_fields(each), "feed": each.id} for each in found]}
    )


@router.get(
    "/events/stream",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def _stream(
    request: Request, queries: QueriesDependency, last_event_id: LastId = ""
) -> StreamingResponse:
    """Stream events and exchanges of all conversations, as server-sent events.

    The type is `compaction` (any event of a conversation), `exchange`, or `lost` (the client was too slow,
    and missed some).
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
    """Yields feed items as server-sent events, and a heartbeat after each `heartbeat_s` without an item.

    Ends after the last item, or at most `notice_s` after `is_stopping` begins to return True. Closes `items`.
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
    """Formats a feed item as a server-sent event."""
    data = json.dumps(schemas.to_item_fields(item), allow_nan=False)
    return f"id: {item.id}\nevent: {item.kind}\ndata: {data}\n\n".encode()
