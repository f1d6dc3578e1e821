"""Admin API endpoints for events: the latest events, and a stream of events and exchanges."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Annotated

from fastapi import Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from compaction_proxy.admin.api import schemas
from compaction_proxy.admin.api.routing import QueriesDependency, build_json_response, create_router, get_api
from compaction_proxy.admin.queries import MAX_SCANNED
from compaction_proxy.telemetry.live_feed import FeedItem

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

router = create_router()


@router.get("/events", response_model=schemas.FedEvents)
async def _recent(queries: QueriesDependency, limit: ListLimit = 100, *, failures: bool = False) -> Response:
    """List the latest events of all conversations, newest first. With `failures`, list only failures."""
    found = await queries.list_recent_items(limit, failures=failures)
    return build_json_response({"events": [schemas.to_fed_event(each) for each in found]})


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
    body = stream_events(queries.follow_feed(last_event_id or None), get_api(request).is_stopping)
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
