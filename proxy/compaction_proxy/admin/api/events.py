"""The admin API of what happens: the last events, and a stream of them and of exchanges."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Annotated

from fastapi import Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from compaction_proxy.admin.api import schemas
from compaction_proxy.admin.api.routing import Watches, answer, api, routes
from compaction_proxy.admin.queries import MAX_LOOKED_AT
from compaction_proxy.telemetry.live_feed import Item

# A stream on which nothing happens says so this often, in seconds, so that nobody between takes it for dead.
HEARTBEAT_S = 15.0
# A server that ends waits no longer than this for a stream to notice, in seconds.
NOTICE_S = 0.5
MAX_ID_CHARACTERS = 64
BEGUN = b": here begins what happens from now on\n\n"
HEARTBEAT = b": nothing new\n\n"

Many = Annotated[int, Query(ge=1, le=MAX_LOOKED_AT)]
LastId = Annotated[str, Header(max_length=MAX_ID_CHARACTERS)]

router = routes()


@router.get("/events", response_model=schemas.FedEvents)
async def _recent(watching: Watches, limit: Many = 100, *, failures: bool = False) -> Response:
    """What has happened last, newest first; with `failures` only what went wrong."""
    found = await watching.recent(limit, failures=failures)
    return answer({"events": [schemas.fed(each) for each in found]})


@router.get(
    "/events/stream",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def _stream(request: Request, watching: Watches, last_event_id: LastId = "") -> StreamingResponse:
    """What happens, as server-sent events: `compaction`, `exchange`, and `lost` where some were left out."""
    await watching.reachable()
    told = stream(watching.follow(last_event_id or None), api(request).stopping)
    return StreamingResponse(told, media_type="text/event-stream", headers={"cache-control": "no-store"})


async def stream(
    items: AsyncGenerator[Item],
    stopping: Callable[[], bool],
    *,
    heartbeat_s: float = HEARTBEAT_S,
    notice_s: float = NOTICE_S,
) -> AsyncGenerator[bytes]:
    """Items as server-sent events. Ends with them, and once it is told to (`stopping`)."""
    clock = asyncio.get_running_loop().time
    told_at = clock()
    pending = asyncio.ensure_future(anext(items, None))
    try:
        await asyncio.sleep(0)  # it listens by then
        yield BEGUN
        while not stopping():
            done, _ = await asyncio.wait({pending}, timeout=notice_s)
            if stopping():  # what has come since is not for those who are no longer admitted
                return
            if done:
                item = pending.result()
                if item is None:
                    return
                pending = asyncio.ensure_future(anext(items, None))
                told_at = clock()
                yield written(item)
            elif clock() - told_at >= heartbeat_s:
                told_at = clock()
                yield HEARTBEAT
    finally:
        pending.cancel()
        await asyncio.wait({pending})
        await items.aclose()


def written(item: Item) -> bytes:
    """An item as a server-sent event."""
    data = json.dumps(schemas.shown(item), allow_nan=False)
    return f"id: {item.id}\nevent: {item.kind}\ndata: {data}\n\n".encode()
