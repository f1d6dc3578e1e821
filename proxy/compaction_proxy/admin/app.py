"""Creates the applications for the proxy's own paths: health checks, metrics, admin API and admin pages.

Below the path `/ui`, the applications report an error as a page. On all other paths, they report it in
OpenAI's format.
"""

from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from compaction_proxy import __version__
from compaction_proxy.admin.api import conversations, overview
from compaction_proxy.admin.api.routing import ERROR_HANDLERS, AdminApi, install_api
from compaction_proxy.admin.auth import BASIC, AccessMiddleware
from compaction_proxy.admin.browser_sessions import SIGN_IN_PATH
from compaction_proxy.admin.health import Readiness, RenderMetrics, create_health_routes
from compaction_proxy.admin.ui.pages import PageRoutes
from compaction_proxy.admin.ui.templates import Templates
from compaction_proxy.core.errors import OverloadedError, ProxyError, RequestRefusedError, format_openai_error
from compaction_proxy.gateway.paths import DASHBOARD_PATH

ROUTERS = (conversations.router, overview.router)
ERROR_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


async def _respond_http_error(request: Request, error: HTTPException) -> Response:
    """Builds the error response for an unknown path or method, or for an unreadable or too large body."""
    status, message = error.status_code, error.detail
    if status == 400:
        # FastAPI responds with 422 to other invalid JSON. Which of the two it takes for deeply nested JSON
        # depends on the version of Python.
        status, message = 422, "The request body is not valid."
    elif status != 413:
        message = f"Unknown endpoint: {request.method} {request.url.path}"
    refused = RequestRefusedError(status, message, ERROR_CODES.get(status, "invalid_request"))
    return Response(format_openai_error(refused), status, error.headers, "application/json")


def create_admin_app(
    read_readiness: Callable[[], Readiness],
    base_path: str = "",
    api: AdminApi | None = None,
    render_metrics: RenderMetrics | None = None,
    lifespan: Lifespan[FastAPI] | None = None,
) -> FastAPI:
    """Creates the application for the proxy's own paths except the admin pages.

    Args:
        read_readiness: Returns the state of the server for health checks.
        base_path: Prefix of all paths. It is empty, or starts with `/` and does not end with `/`.
        api: Commands, queries and settings that the admin API uses. If None, the application has no admin
            API.
        render_metrics: Takes the value of an `Accept` header. Returns all metrics in the format that the
            header prefers, and their content type. If None, the application has no path `/metrics`.
        lifespan: Opens and closes the resources of the application. It runs only if a server runs this
            application directly, and not if the proxy's application passes requests to this one.
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
    app.router.routes.extend(create_health_routes(read_readiness, base_path, render_metrics))
    if api is not None:
        install_api(app, api, base_path, ROUTERS)
    return app


_CONVERSATION = "/conversations/{name}"


def mount_pages(app: ASGIApp, api: AdminApi, base_path: str = "") -> ASGIApp:
    """Creates an application that serves the admin pages and passes all other requests to `app`.

    Args:
        app: Application that gets the other requests.
        api: Commands, queries and settings of the admin API, which the pages use too.
        base_path: Prefix of all paths. It is empty, or starts with `/` and does not end with `/`.
    """
    root, templates = base_path + DASHBOARD_PATH, Templates(base_path + DASHBOARD_PATH)
    pages = PageRoutes(api, templates)

    async def show_error(_: Request, error: Exception) -> Response:
        answer = await templates.render_error(error)
        if isinstance(error, OverloadedError):
            answer.headers["retry-after"] = str(error.retry_after_s)
        elif isinstance(error, HTTPException):
            answer.headers.update(error.headers or {})
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
        _CONVERSATION + "/transcript": pages.show_transcript,
        "/failures": pages.show_failures,
        "/settings": pages.show_settings,
        "/playground": pages.show_playground,
        "/static/{name}": templates.serve_static,
        SIGN_IN_PATH: pages.open_session,
    }
    routes = [Route(root + path, answer, methods=["POST"]) for path, answer in post_routes.items()]
    routes += [Route(root + path, answer, methods=["GET"]) for path, answer in get_routes.items()]
    handlers = dict.fromkeys((ProxyError, HTTPException), show_error)
    pages_app = Starlette(routes=routes, exception_handlers=handlers)
    site = AccessMiddleware(pages_app, api.access_policy, root, BASIC, templates.render_refusal)

    async def dispatch_request(scope: Scope, receive: Receive, send: Send) -> None:
        ours = scope["type"] == "http" and f"{scope['path']}/".startswith(f"{root}/")
        await (site if ours else app)(scope, receive, send)

    return dispatch_request
