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

from compaction_proxy.admin.auth import AccessMiddleware, AccessPolicy, BodyLimitMiddleware
from compaction_proxy.admin.queries import ConversationQueries
from compaction_proxy.compaction.commands import ConversationCommands
from compaction_proxy.config.config import Config
from compaction_proxy.core.errors import (
    InternalError,
    OverloadedError,
    ReplayFailedError,
    RequestRefusedError,
    SearchUnavailableError,
    StoreUnavailableError,
    format_openai_error,
)

_UNITS_S = {"m": 60, "h": 3_600, "d": 86_400}
PATTERN = r"^(?:[0-9]{1,6}[mhd]|[0-9]{1,11}(?:\.[0-9]{1,6})?)$"
_AGO = re.compile(r"([0-9]+)([mhd])")

Time = Annotated[str, Query(pattern=PATTERN)]


def parse_time(text: str, now: float) -> float:
    """The time that a text of `PATTERN` names, in seconds since the epoch."""
    ago = _AGO.fullmatch(text)
    return float(text) if ago is None else now - int(ago[1]) * _UNITS_S[ago[2]]


PATH = "/admin/v1"


@dataclass(frozen=True, slots=True)
class AdminSettings:
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
class AdminApi:
    """What the admin API needs.

    Attributes:
        commands: What may be done.
        queries: What may be seen.
        access_policy: Who may use it.
        settings: What `/config` tells.
        is_stopping: Whether streams are to end: the server was told to, or others may use the API from now
            on.
        extra_routers: Routes of others below `/admin/v1`.
    """

    commands: ConversationCommands
    queries: ConversationQueries
    access_policy: AccessPolicy
    settings: AdminSettings = field(default_factory=AdminSettings)
    is_stopping: Callable[[], bool] = bool
    extra_routers: tuple[APIRouter, ...] = ()


def get_api(request: Request) -> AdminApi:
    """What the application was given."""
    found: AdminApi = request.app.state.api
    return found


def _get_commands(request: Request) -> ConversationCommands:
    return get_api(request).commands


def _get_queries(request: Request) -> ConversationQueries:
    return get_api(request).queries


def _get_settings(request: Request) -> AdminSettings:
    return get_api(request).settings


CommandsDependency = Annotated[ConversationCommands, Depends(_get_commands)]
QueriesDependency = Annotated[ConversationQueries, Depends(_get_queries)]
SettingsDependency = Annotated[AdminSettings, Depends(_get_settings)]


def create_router() -> APIRouter:
    """An empty router below `/admin/v1`; the key is asked for before that (`admin.auth`)."""
    return APIRouter(prefix=PATH, dependencies=[Depends(HTTPBearer(auto_error=False))])


def build_json_response(content: Mapping[str, Any], status: int = 200) -> Response:
    """JSON in ASCII, which can hold what UTF-8 cannot: text as clients really send it."""
    body = json.dumps(content, allow_nan=False).encode()
    return Response(body, status, {"cache-control": "no-store"}, "application/json")


async def _get_openapi(request: Request) -> Response:
    """This API, described; worked out once, and beside everything else, because it takes long."""
    return build_json_response(await asyncio.to_thread(request.app.openapi))


async def _respond_refused(_: Request, error: Exception) -> Response:
    told = (
        error
        if isinstance(error, RequestRefusedError | ReplayFailedError | OverloadedError)
        else InternalError()
    )
    headers = {"retry-after": str(told.retry_after_s)} if isinstance(told, OverloadedError) else None
    return Response(format_openai_error(told), told.status, headers, "application/json")


async def _respond_invalid_request(_: Request, error: Exception) -> Response:
    """What does not fit the description; what was sent is not repeated."""
    problems = error.errors() if isinstance(error, RequestValidationError) else ()
    said = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in problems]
    refused = RequestRefusedError(422, "; ".join(said), "invalid_request")
    return Response(format_openai_error(refused), 422, media_type="application/json")


async def _respond_store_unavailable(_: Request, __: Exception) -> Response:
    told = {"message": "The store cannot be used right now.", "type": "server_error", "param": None}
    body = json.dumps({"error": {**told, "code": "store_unavailable"}})
    return Response(body, 503, media_type="application/json")


async def _respond_search_unavailable(request: Request, error: Exception) -> Response:
    return await _respond_refused(request, RequestRefusedError(501, str(error), "search_unavailable"))


def install_api(app: FastAPI, api: AdminApi, base_path: str, routers: Iterable[APIRouter]) -> None:
    """Put the admin API into an application, under `base_path`, behind its guard."""
    app.state.api = api
    described = create_router()
    described.add_api_route("/openapi.json", _get_openapi, include_in_schema=False)
    for router in (*routers, *api.extra_routers, described):
        app.include_router(router, prefix=base_path)
    app.add_exception_handler(RequestRefusedError, _respond_refused)
    app.add_exception_handler(ReplayFailedError, _respond_refused)
    app.add_exception_handler(OverloadedError, _respond_refused)
    app.add_exception_handler(RequestValidationError, _respond_invalid_request)
    app.add_exception_handler(StoreUnavailableError, _respond_store_unavailable)
    app.add_exception_handler(SearchUnavailableError, _respond_search_unavailable)
    app.add_middleware(BodyLimitMiddleware, path=f"{base_path}/admin")
    app.add_middleware(AccessMiddleware, access=api.access_policy, path=f"{base_path}/admin")
