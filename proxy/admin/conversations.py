"""The admin API: conversations, what has happened to them, and what is asked of them."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.security import HTTPBearer

from proxy import __version__
from proxy.admin.access import Access, Guard
from proxy.admin.bodies import Bounded
from proxy.admin.shapes import (
    ArchivedMessage,
    Conversation,
    Events,
    Export,
    Forgotten,
    Hits,
    Marked,
    NewPin,
    Pins,
    Round,
    conversation_shape,
    message_shape,
    pins_shape,
    round_shape,
)
from proxy.errors import RequestRefused, StoreUnavailable, openai_error
from proxy.recall import MAX_HITS
from proxy.steering import Steering

PATH = "/admin/v1"
MAX_QUERY_CHARACTERS = 1_000

Shape = ArchivedMessage | Conversation | Events | Export | Forgotten | Hits | Marked | Pins | Round


@dataclass(frozen=True, slots=True)
class Api:
    """What the admin API needs.

    Attributes:
        steering: The use cases.
        access: Who may use it.
    """

    steering: Steering
    access: Access


def _steering(request: Request) -> Steering:
    steering: Steering = request.app.state.steering
    return steering


Steers = Annotated[Steering, Depends(_steering)]
Limit = Annotated[int, Query(ge=1, le=MAX_HITS)]
Words = Annotated[str, Query(max_length=MAX_QUERY_CHARACTERS)]

# The key is asked for before a request gets here (`admin.access`); this describes it.
_routes = APIRouter(prefix=PATH, dependencies=[Depends(HTTPBearer(auto_error=False))])


def _answer(record: Shape, status: int = 200) -> Response:
    """A record as JSON in ASCII, which can hold what UTF-8 cannot: text as clients really send it."""
    body = json.dumps(asdict(record), allow_nan=False).encode()
    return Response(body, status, {"cache-control": "no-store"}, "application/json")


@_routes.get("/conversations/{conversation}", response_model=Conversation)
async def _overview(conversation: str, steering: Steers) -> Response:
    """A conversation as it stands: its totals, its rounds, and what is asked of it."""
    return _answer(conversation_shape(conversation, await steering.overview(conversation)))


@_routes.delete("/conversations/{conversation}", response_model=Forgotten)
async def _forget(conversation: str, steering: Steers) -> Response:
    """Delete everything that is stored of a conversation and its branches."""
    return _answer(Forgotten(await steering.forget(conversation)))


@_routes.delete("/conversations/{conversation}/tenant", response_model=Forgotten)
async def _forget_tenant(conversation: str, steering: Steers) -> Response:
    """Delete everything that is stored of the tenant that a conversation belongs to."""
    return _answer(Forgotten(await steering.forget_tenant(conversation)))


@_routes.get("/conversations/{conversation}/export", response_model=Export)
async def _export(conversation: str, steering: Steers) -> Response:
    """Everything that is kept of a conversation: its totals, rounds, pins, events, and archived messages."""
    seen = conversation_shape(conversation, await steering.overview(conversation))
    events = tuple(await steering.events(conversation))
    messages = tuple(map(message_shape, await steering.archive(conversation)))
    return _answer(Export(seen, events, messages))


@_routes.get("/conversations/{conversation}/events", response_model=Events)
async def _events(conversation: str, steering: Steers) -> Response:
    """What has happened to a conversation, oldest first."""
    return _answer(Events(tuple(await steering.events(conversation))))


@_routes.post("/conversations/{conversation}/compact", status_code=202, response_model=Marked)
async def _compact(conversation: str, steering: Steers) -> Response:
    """Have the conversation's next request compacted."""
    await steering.compact(conversation)
    return _answer(Marked(conversation), 202)


@_routes.post("/conversations/{conversation}/undo", response_model=Round)
async def _undo(conversation: str, steering: Steers) -> Response:
    """Take the newest round back. No other is made until one is forced, or the request would not fit."""
    return _answer(round_shape(await steering.undo(conversation), undone=True))


@_routes.get("/conversations/{conversation}/pins", response_model=Pins)
async def _pins(conversation: str, steering: Steers) -> Response:
    """The texts that no round may lose."""
    return _answer(Pins(pins_shape(await steering.pins(conversation))))


@_routes.post("/conversations/{conversation}/pins", status_code=201, response_model=Pins)
async def _pin(conversation: str, pin: NewPin, steering: Steers) -> Response:
    """Pin a text."""
    return _answer(Pins(pins_shape(await steering.pin(conversation, pin.text))), 201)


@_routes.delete("/conversations/{conversation}/pins/{pin}", response_model=Pins)
async def _unpin(conversation: str, pin: str, steering: Steers) -> Response:
    """Let go of a pinned text."""
    await steering.unpin(conversation, pin)
    return _answer(Pins(pins_shape(await steering.pins(conversation))))


@_routes.get("/conversations/{conversation}/search", response_model=Hits)
async def _search(conversation: str, q: Words, steering: Steers, limit: Limit = 20) -> Response:
    """Messages that rounds have taken out and that hold all the words and quoted phrases of `q`."""
    return _answer(Hits(tuple(await steering.search(conversation, q, limit))))


@_routes.get("/conversations/{conversation}/messages/{message}", response_model=ArchivedMessage)
async def _message(conversation: str, message: str, steering: Steers) -> Response:
    """A message that rounds have taken out, whole."""
    return _answer(message_shape(await steering.message(conversation, message)))


@_routes.get("/openapi.json", include_in_schema=False)
async def _described(request: Request) -> dict[str, Any]:
    """This API, described."""
    return get_openapi(title="compaction-proxy admin", version=__version__, routes=request.app.routes)


async def _refused(_: Request, error: Exception) -> Response:
    refused = error if isinstance(error, RequestRefused) else RequestRefused(500, "", "internal")
    return Response(openai_error(refused), refused.status, media_type="application/json")


async def _invalid(_: Request, error: Exception) -> Response:
    """What does not fit the description; what was sent is not repeated."""
    problems = error.errors() if isinstance(error, RequestValidationError) else ()
    said = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in problems]
    refused = RequestRefused(422, "; ".join(said), "invalid_request")
    return Response(openai_error(refused), 422, media_type="application/json")


async def _away(_: Request, __: Exception) -> Response:
    told = {"message": "The store cannot be used right now.", "type": "server_error", "param": None}
    body = json.dumps({"error": {**told, "code": "store_unavailable"}})
    return Response(body, 503, media_type="application/json")


def install(app: FastAPI, api: Api, base_path: str) -> None:
    """Put the admin API into an application, under `base_path`, behind its guard."""
    app.state.steering = api.steering
    app.include_router(_routes, prefix=base_path)
    app.add_exception_handler(RequestRefused, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(StoreUnavailable, _away)
    app.add_middleware(Bounded)
    app.add_middleware(Guard, access=api.access, path=f"{base_path}/admin")
