"""Creates the applications for the proxy's own paths: health checks, metrics, admin API and admin pages.

A request for an unknown path gets an error in OpenAI's format.
"""

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from typing import Literal

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from compaction_proxy import __version__
from compaction_proxy.admin.api import conversations, overview
from compaction_proxy.admin.api.routing import ERROR_HANDLERS, AdminApi, install_api
from compaction_proxy.admin.auth import BASIC, AccessMiddleware
from compaction_proxy.admin.ui.pages import PageRoutes
from compaction_proxy.admin.ui.templates import Templates
from compaction_proxy.core.errors import OverloadedError, ProxyError, RequestRefusedError, format_openai_error

METRICS_PATH = "/metrics"
METHODS = ["GET", "HEAD"]

ALIVE_PATHS = ("/livez", "/health/liveliness", "/health/liveness")
READY_PATHS = ("/readyz", "/healthz", "/health", "/health/readiness")
ROUTERS = (conversations.router, overview.router)
ERROR_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


@dataclass(frozen=True, slots=True)
class Readiness:
    """State of the server for health checks.

    Attributes:
        ready: Whether the server accepts requests. False while it starts or stops.
        store: `ok` if the store can be reached, else `down`. Requests work without the store, so this value
            does not affect `ready`.
        version: Version of the proxy.
    """

    ready: bool
    store: Literal["ok", "down"]
    version: str


async def _respond_http_error(request: Request, error: HTTPException) -> Response:
    """Builds the response for an unknown path or method, or for a body that is unreadable or too large."""
    status, message = error.status_code, error.detail
    if status == 400:
        message = "The body cannot be read."
    elif status != 413:
        message = f"{request.method} {request.url.path} is not something this proxy answers"
    refused = RequestRefusedError(status, message, ERROR_CODES.get(status, "invalid_request"))
    return Response(format_openai_error(refused), status, error.headers, "application/json")


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
    render_metrics: Callable[[str], Awaitable[tuple[bytes, str]]] | None = None,
    lifespan: Lifespan[FastAPI] | None = None,
) -> FastAPI:
    """Creates the application for the proxy's own paths except the admin pages.

    Args:
        read_readiness: Returns the state of the server. It is called at each health check, so it must not
            block.
        base_path: Prefix of all paths. It is empty, or starts with `/` and does not end with `/`.
        api: Commands, queries and settings that the admin API uses. If None, the application has no admin
            API.
        render_metrics: Takes the value of an `Accept` header. Returns all metrics in the format that the
            header prefers, and their content type. If None, the application does not have the path
            `/metrics`.
        lifespan: Opens and closes the resources of the application. It is used only if a server runs this
            application directly, not inside the proxy's application.
    """
    app = FastAPI(
        title="compaction-proxy admin",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        exception_handlers={HTTPException: _respond_http_error, **ERROR_HANDLERS},
    )
    app.include_router(_create_health_router(read_readiness), prefix=base_path, include_in_schema=False)
    if render_metrics is not None:

        async def get_metrics(request: Request) -> Response:
            text, content_type = await render_metrics(request.headers.get("accept", ""))
            return Response(text, 200, {"content-type": content_type, "cache-control": "no-store"})

        app.add_api_route(base_path + METRICS_PATH, get_metrics, methods=METHODS, include_in_schema=False)
    if api is not None:
        install_api(app, api, base_path, ROUTERS)
    return app


PATH = "/ui"
_CONVERSATION = "/conversations/{name}"


def mount_pages(app: ASGIApp, api: AdminApi, base_path: str = "") -> ASGIApp:
    """Creates an application that serves the admin pages and passes all other requests to `app`.

    Args:
        app: Application for the other requests.
        api: Commands, queries and settings of the admin API, which the pages use too.
        base_path: Prefix of all paths. It is empty, or starts with `/` and does not end with `/`.
    """
    root, templates = base_path + PATH, Templates(base_path + PATH)
    pages = PageRoutes(api, templates)

    async def show_error(_: Request, error: Exception) -> Response:
        answer = await templates.render_error(error)
        if isinstance(error, OverloadedError):
            answer.headers["retry-after"] = str(error.retry_after_s)
        return answer

    post_routes = {_CONVERSATION + "/{action}": pages.run_action, "/playground": pages.run_replay}
    get_routes = {
        "": pages.show_overview,
        "/": pages.show_overview,
        "/conversations": pages.show_conversations,
        _CONVERSATION: pages.show_conversation,
        _CONVERSATION + "/compactions/{place}": pages.show_compaction,
        _CONVERSATION + "/compactions/{place}/prompts": pages.show_prompts,
        _CONVERSATION + "/messages/{message}": pages.show_message,
        _CONVERSATION + "/search": pages.show_search,
        "/failures": pages.show_failures,
        "/settings": pages.show_settings,
        "/playground": pages.show_playground,
        "/static/{name}": templates.serve_static,
    }
    routes = [Route(root + path, answer, methods=["POST"]) for path, answer in post_routes.items()]
    routes += [Route(root + path, answer, methods=["GET"]) for path, answer in get_routes.items()]
    handlers = dict.fromkeys((ProxyError, HTTPException), show_error)
    pages_app = Starlette(routes=routes, exception_handlers=handlers)
    site = AccessMiddleware(pages_app, api.access_policy, root, scheme=BASIC)

    async def dispatch_request(scope: Scope, receive: Receive, send: Send) -> None:
        ours = scope["type"] == "http" and f"{scope['path']}/".startswith(f"{root}/")
        await (site if ours else app)(scope, receive, send)

    return dispatch_request
