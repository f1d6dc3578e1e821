"""The admin API: what its routes share, and how they are put into an application."""

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer

from compaction_proxy.admin.auth import Access, Bounded, Guard
from compaction_proxy.admin.queries import Watching
from compaction_proxy.compaction.commands import Steering
from compaction_proxy.config.config import Config
from compaction_proxy.core.errors import (
    Crashed,
    Overloaded,
    RehearsalFailed,
    RequestRefused,
    SearchUnavailable,
    StoreUnavailable,
    openai_error,
)

_UNITS_S = {"m": 60, "h": 3_600, "d": 86_400}
PATTERN = r"^(?:[0-9]{1,6}[mhd]|[0-9]{1,11}(?:\.[0-9]{1,6})?)$"
_AGO = re.compile(r"([0-9]+)([mhd])")

Time = Annotated[str, Query(pattern=PATTERN)]


def moment(told: str, now: float) -> float:
    """The time that a text of `PATTERN` names, in seconds since the epoch."""
    ago = _AGO.fullmatch(told)
    return float(told) if ago is None else now - int(ago[1]) * _UNITS_S[ago[2]]


PATH = "/admin/v1"


@dataclass(frozen=True, slots=True)
class Settings:
    """The configuration that is in force, and where it is from.

    Attributes:
        config: The configuration.
        origins: For each key, dotted, where its value is from; empty where nobody has read any.
        path: The file that was read; empty for none.
        warnings: What works but is probably not meant.
    """

    config: Config = field(default_factory=Config)
    origins: Mapping[str, str] = field(default_factory=dict)
    path: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Api:
    """What the admin API needs.

    Attributes:
        steering: What may be done.
        watching: What may be seen.
        access: Who may use it.
        settings: What `/config` tells.
        stopping: Whether streams are to end: the server was told to, or others may use the API from now on.
        more: Routes of others below `/admin/v1`.
    """

    steering: Steering
    watching: Watching
    access: Access
    settings: Settings = field(default_factory=Settings)
    stopping: Callable[[], bool] = bool
    more: tuple[APIRouter, ...] = ()


def api(request: Request) -> Api:
    """What the application was given."""
    given: Api = request.app.state.api
    return given


def _steering(request: Request) -> Steering:
    return api(request).steering


def _watching(request: Request) -> Watching:
    return api(request).watching


def _settings(request: Request) -> Settings:
    return api(request).settings


Steers = Annotated[Steering, Depends(_steering)]
Watches = Annotated[Watching, Depends(_watching)]
Set = Annotated[Settings, Depends(_settings)]


def routes() -> APIRouter:
    """An empty router below `/admin/v1`; the key is asked for before that (`admin.auth`)."""
    return APIRouter(prefix=PATH, dependencies=[Depends(HTTPBearer(auto_error=False))])


def answer(told: Mapping[str, Any], status: int = 200) -> Response:
    """JSON in ASCII, which can hold what UTF-8 cannot: text as clients really send it."""
    body = json.dumps(told, allow_nan=False).encode()
    return Response(body, status, {"cache-control": "no-store"}, "application/json")


async def _described(request: Request) -> Response:
    """This API, described; worked out once, and beside everything else, because it takes long."""
    return answer(await asyncio.to_thread(request.app.openapi))


async def _refused(_: Request, error: Exception) -> Response:
    told = error if isinstance(error, RequestRefused | RehearsalFailed | Overloaded) else Crashed()
    headers = {"retry-after": str(told.retry_after_s)} if isinstance(told, Overloaded) else None
    return Response(openai_error(told), told.status, headers, "application/json")


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


async def _unsearchable(request: Request, error: Exception) -> Response:
    return await _refused(request, RequestRefused(501, str(error), "search_unavailable"))


def install(app: FastAPI, given: Api, base_path: str, routers: Iterable[APIRouter]) -> None:
    """Put the admin API into an application, under `base_path`, behind its guard."""
    app.state.api = given
    described = routes()
    described.add_api_route("/openapi.json", _described, include_in_schema=False)
    for router in (*routers, *given.more, described):
        app.include_router(router, prefix=base_path)
    app.add_exception_handler(RequestRefused, _refused)
    app.add_exception_handler(RehearsalFailed, _refused)
    app.add_exception_handler(Overloaded, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(StoreUnavailable, _away)
    app.add_exception_handler(SearchUnavailable, _unsearchable)
    app.add_middleware(Bounded, path=f"{base_path}/admin")
    app.add_middleware(Guard, access=given.access, path=f"{base_path}/admin")
