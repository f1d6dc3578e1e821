"""The application for the proxy's own paths: health checks, metrics and the admin API.

Requests for unknown paths get an error in OpenAI's format.
"""

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from typing import Literal

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.status import HTTP_400_BAD_REQUEST, HTTP_413_CONTENT_TOO_LARGE
from starlette.types import Lifespan

from compaction_proxy import __version__
from compaction_proxy.admin.api import conversations, events, export, overview, replay
from compaction_proxy.admin.api.routing import AdminApi, install_api
from compaction_proxy.admin.auth import MAX_BODY_BYTES
from compaction_proxy.core.errors import RequestRefusedError, format_openai_error

METRICS_PATH = "/metrics"
METHODS = ["GET", "HEAD"]

RenderMetrics = Callable[[str], Awaitable[tuple[bytes, str]]]
"""Renders all metrics in the format that an `Accept` header prefers. Also returns their content type."""


def create_metrics_router(render_metrics: RenderMetrics) -> APIRouter:
    """Creates a router with one route, `METRICS_PATH`, which serves the metrics."""
    routes = APIRouter()

    async def get_metrics(request: Request) -> Response:
        text, content_type = await render_metrics(request.headers.get("accept", ""))
        return Response(text, 200, {"content-type": content_type, "cache-control": "no-store"})

    routes.add_api_route(METRICS_PATH, get_metrics, methods=METHODS)
    return routes


ALIVE_PATHS = ("/livez", "/health/liveliness", "/health/liveness")
READY_PATHS = ("/readyz", "/healthz", "/health", "/health/readiness")
ROUTERS = (conversations.router, overview.router, events.router, export.router, replay.router)
ERROR_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
# Error messages for refused request bodies, by the status of the response.
BODY_MESSAGES = {
    HTTP_400_BAD_REQUEST: "The body cannot be read.",
    HTTP_413_CONTENT_TOO_LARGE: f"The request body is larger than {MAX_BODY_BYTES} bytes.",
}


@dataclass(frozen=True, slots=True)
class Readiness:
    """State of the server for health checks.

    Attributes:
        ready: Whether the server accepts requests. False while it starts or stops.
        store: `ok` if the store answers, or else `down`. Requests work without the store, so this does not
            affect `ready`.
        version: Version of the proxy.
    """

    ready: bool
    store: Literal["ok", "down"]
    version: str


async def _respond_http_error(request: Request, error: Exception) -> Response:
    """Responds to a request with an unknown path or method, or with an unreadable or too large body."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    unknown = f"{request.method} {request.url.path} is not something this proxy answers"
    message = BODY_MESSAGES.get(status, unknown)
    body = format_openai_error(
        RequestRefusedError(status, message, ERROR_CODES.get(status, "invalid_request"))
    )
    return Response(body, status, headers, "application/json")


def _create_health_router(read_readiness: Callable[[], Readiness]) -> APIRouter:
    routes = APIRouter()

    async def get_liveness() -> dict[str, str]:
        return {"status": "ok", "version": read_readiness().version}

    async def get_readiness(request: Request) -> JSONResponse:
        now = read_readiness()
        if getattr(request.state, "stopping", False):  # the server sets this when it begins to stop
            return JSONResponse({"status": "stopping", **asdict(replace(now, ready=False))}, 503)
        status = {"status": "ok" if now.ready else "unready", **asdict(now)}
        return JSONResponse(status, 200 if now.ready else 503)

    for path in ALIVE_PATHS:
        routes.add_api_route(path, get_liveness, methods=METHODS)
    for path in READY_PATHS:
        routes.add_api_route(path, get_readiness, methods=METHODS)
    return routes


def create_admin_app(
    read_readiness: Callable[[], Readiness],
    base_path: str = "",
    api: AdminApi | None = None,
    render_metrics: RenderMetrics | None = None,
    lifespan: Lifespan[FastAPI] | None = None,
) -> FastAPI:
    """Creates the application for the proxy's own paths, all of them under `base_path`.

    Args:
        read_readiness: Returns the state of the server. Called at each health check, so it must not block.
        base_path: Empty, or a path that starts with `/` and does not end with it.
        api: What the routes of the admin API need. If None, the application has no admin API.
        render_metrics: Renders the response of `/metrics`. If None, the application does not have this path.
        lifespan: Opens and closes the resources of the application. Used only if a server runs this
            application itself, outside the proxy's application.
    """
    app = FastAPI(
        title="compaction-proxy admin",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.include_router(_create_health_router(read_readiness), prefix=base_path, include_in_schema=False)
    if render_metrics is not None:
        app.include_router(create_metrics_router(render_metrics), prefix=base_path, include_in_schema=False)
    app.add_exception_handler(HTTPException, _respond_http_error)
    if api is not None:
        install_api(app, api, base_path, ROUTERS)
    return app
