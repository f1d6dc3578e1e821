"""Defines what the endpoints of the admin API share: FastAPI dependencies, responses and error handlers."""

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer

from compaction_proxy.admin.auth import AccessMiddleware, AccessPolicy, BodyLimitMiddleware
from compaction_proxy.admin.queries import MAX_SCANNED, ConversationQueries
from compaction_proxy.compaction.commands import ConversationCommands
from compaction_proxy.config.config import Config
from compaction_proxy.core.errors import (
    OverloadedError,
    ReplayFailedError,
    RequestRefusedError,
    SearchUnavailableError,
    StoreUnavailableError,
    format_openai_error,
)
from compaction_proxy.core.problem import Problem
from compaction_proxy.replay.jobs import ReplayJobRunner

_UNITS_S = {"m": 60, "h": 3_600, "d": 86_400}
TIME_PATTERN = r"^(?:[0-9]{1,6}[mhd]|[0-9]{1,11}(?:\.[0-9]{1,6})?)$"
_TIME_TEXT = "should be an age such as 90m, 24h or 7d, or seconds since 1970"
_AGO = re.compile(r"([0-9]+)([mhd])")

TimeParameter = Annotated[str, Query(pattern=TIME_PATTERN)]
ListLimit = Annotated[int, Query(ge=1, le=MAX_SCANNED)]
# No list is longer, so an offset that a response names as `next` is always accepted.
MAX_OFFSET = 100_000
ListOffset = Annotated[int, Query(ge=0, le=MAX_OFFSET)]
_Row = TypeVar("_Row")


def parse_time(text: str, now: float) -> float:
    """Parses a text that matches `TIME_PATTERN`. Returns a time in seconds since the epoch.

    The text is a number of seconds since the epoch, or an age such as `30m`, `24h` or `7d`. An age is
    subtracted from `now`, which is in seconds since the epoch.
    """
    ago = _AGO.fullmatch(text)
    return float(text) if ago is None else now - int(ago[1]) * _UNITS_S[ago[2]]


def cut_page(rows: Sequence[_Row], limit: int, offset: int) -> tuple[Sequence[_Row], int | None]:
    """Cuts a page of at most `limit` rows out of a list. Leaves out the first `offset` rows of the list.

    Returns the page, and the offset of the next page or None if there is none.
    """
    stop = offset + limit
    return rows[offset:stop], stop if stop < len(rows) else None


API_PATH = "/admin/v1"
# Message of the response (status 503) to a query or command if the store cannot be used.
STORE_UNAVAILABLE = "The store is not available."


@dataclass(frozen=True, slots=True)
class AdminSettings:
    """The current configuration of the proxy, and the sources of its values.

    Attributes:
        config: The configuration.
        origins: Maps each dotted key to the source of its value. Empty if the sources are unknown.
        path: Path of the configuration file; empty without a file.
        warnings: Warnings about settings that are valid but probably not intended.
    """

    config: Config = field(default_factory=Config)
    origins: Mapping[str, str] = field(default_factory=dict)
    path: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AdminApi:
    """The objects that the routes of the admin API use.

    Attributes:
        commands: Runs commands that read or change conversations.
        queries: Runs queries about conversations, statistics and models.
        replay_jobs: Replays conversations.
        access_policy: Rules for access, including the admin key.
        settings: The configuration that the endpoint `/config` shows.
        is_stopping: Returns whether open event streams must end, because the server is stopping or because
            the rules for access have changed.
        list_problems: Returns what degrades the proxy now.
    """

    commands: ConversationCommands
    queries: ConversationQueries
    replay_jobs: ReplayJobRunner
    access_policy: AccessPolicy
    settings: AdminSettings = field(default_factory=AdminSettings)
    is_stopping: Callable[[], bool] = bool
    list_problems: Callable[[], Sequence[Problem]] = tuple


def get_api(request: Request) -> AdminApi:
    """Returns the `AdminApi` that `install_api` has stored in the application that handles the request."""
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


class SummarizedRoute(APIRoute):
    """A route whose summary in the OpenAPI document is the first sentence of its description.

    Without this class, FastAPI would take the name of the function, which says less.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - those of `APIRoute`
        super().__init__(*args, **kwargs)
        sentence = " ".join(self.description.split()).partition(". ")[0]
        self.summary = self.summary or sentence.removesuffix(".")


def create_router() -> APIRouter:
    """Creates an empty router for paths below `/admin/v1`.

    The `HTTPBearer` dependency checks nothing. It only makes the OpenAPI document describe the admin key.
    `AccessMiddleware` checks the key.
    """
    bearer = Depends(HTTPBearer(auto_error=False))
    return APIRouter(prefix=API_PATH, dependencies=[bearer], route_class=SummarizedRoute)


def build_json_response(content: Mapping[str, Any], status: int = 200) -> Response:
    """Builds a JSON response that browsers and proxies must not cache.

    Escapes all characters outside ASCII. The response can therefore contain any text from clients, even lone
    surrogates, which UTF-8 cannot encode.
    """
    body = json.dumps(content, allow_nan=False).encode()
    return Response(body, status, {"cache-control": "no-store"}, "application/json")


async def _get_openapi(request: Request) -> Response:
    """Returns the OpenAPI document.

    FastAPI builds the document at the first call. A thread makes this call, because it takes long.
    """
    return build_json_response(await asyncio.to_thread(request.app.openapi))


async def _respond_refused(
    _: Request, error: RequestRefusedError | ReplayFailedError | OverloadedError
) -> Response:
    headers = {"retry-after": str(error.retry_after_s)} if isinstance(error, OverloadedError) else None
    return Response(format_openai_error(error), error.status, headers, "application/json")


async def _respond_invalid_request(request: Request, error: RequestValidationError) -> Response:
    """Responds to a request that does not match the schema. The response contains no value of the request."""
    messages = [
        f"{'.'.join(map(str, each['loc']))}: "
        + (_TIME_TEXT if each.get("ctx", {}).get("pattern") == TIME_PATTERN else each["msg"])
        for each in error.errors()
    ]
    return await _respond_refused(request, RequestRefusedError(422, "; ".join(messages), "invalid_request"))


async def _respond_store_unavailable(_: Request, __: Exception) -> Response:
    error = {"message": STORE_UNAVAILABLE, "type": "server_error", "param": None}
    body = json.dumps({"error": {**error, "code": "store_unavailable"}})
    return Response(body, 503, media_type="application/json")


async def _respond_search_unavailable(request: Request, error: SearchUnavailableError) -> Response:
    return await _respond_refused(request, RequestRefusedError(501, str(error), "search_unavailable"))


ERROR_HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]] = {
    RequestRefusedError: _respond_refused,
    ReplayFailedError: _respond_refused,
    OverloadedError: _respond_refused,
    RequestValidationError: _respond_invalid_request,
    StoreUnavailableError: _respond_store_unavailable,
    SearchUnavailableError: _respond_search_unavailable,
}


def install_api(app: FastAPI, api: AdminApi, base_path: str, routers: Iterable[APIRouter]) -> None:
    """Adds the routes of the admin API to `app`. `base_path` is the prefix of all paths.

    Also stores `api` in `app.state`, where `get_api` finds it, and adds the middleware that checks access and
    limits the size of request bodies.
    """
    app.state.api = api
    described = create_router()
    described.add_api_route("/openapi.json", _get_openapi, include_in_schema=False)
    for router in (*routers, described):
        app.include_router(router, prefix=base_path)
    app.add_middleware(BodyLimitMiddleware, path=f"{base_path}/admin")
    app.add_middleware(AccessMiddleware, policy=api.access_policy, path=f"{base_path}/admin")
