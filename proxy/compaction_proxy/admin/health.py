"""Creates the endpoints for health checks and metrics, which work without the admin API."""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

METRICS_PATH = "/metrics"
METHODS = ("GET", "HEAD")
ALIVE_PATHS = ("/livez", "/health/liveliness", "/health/liveness")
READY_PATHS = ("/readyz", "/healthz", "/health", "/health/readiness")

RenderMetrics = Callable[[str], Awaitable[tuple[bytes, str]]]


@dataclass(frozen=True, slots=True)
class Readiness:
    """State of the server for health checks.

    Attributes:
        ready: Whether the server accepts requests. False while it starts or stops.
        store: `ok` if the store can be reached, else `down`. Requests work without the store, so this value
            does not affect `ready`.
        version: Version of the proxy.
        problems: What degrades the proxy, such as a store that is down, in sentences. Requests work all the
            same, so problems do not affect `ready`.
    """

    ready: bool
    store: Literal["ok", "down"]
    version: str
    problems: tuple[str, ...] = ()


def create_health_routes(
    read_readiness: Callable[[], Readiness], base_path: str = "", render_metrics: RenderMetrics | None = None
) -> Iterator[Route]:
    """Yields the routes of health checks and metrics.

    Args:
        read_readiness: Returns the state of the server. It is called at each health check, so it must not
            block.
        base_path: Prefix of all paths. It is empty, or starts with `/` and does not end with `/`.
        render_metrics: Takes the value of an `Accept` header. Returns all metrics in the format that the
            header prefers, and their content type. If None, there is no route for `/metrics`.
    """

    async def get_liveness(_: Request) -> Response:
        return JSONResponse({"status": "ok", "version": read_readiness().version})

    async def get_readiness(request: Request) -> Response:
        now = read_readiness()
        if getattr(request.state, "stopping", False):  # the server sets this when it begins to stop
            return JSONResponse({"status": "stopping", **asdict(replace(now, ready=False))}, 503)
        name = ("degraded" if now.problems else "ok") if now.ready else "unready"
        status = {"status": name, **asdict(now)}
        if not now.problems:
            del status["problems"]
        return JSONResponse(status, 200 if now.ready else 503)

    endpoints = {**dict.fromkeys(ALIVE_PATHS, get_liveness), **dict.fromkeys(READY_PATHS, get_readiness)}
    if render_metrics is not None:

        async def get_metrics(request: Request) -> Response:
            text, content_type = await render_metrics(request.headers.get("accept", ""))
            return Response(text, 200, {"content-type": content_type, "cache-control": "no-store"})

        endpoints[METRICS_PATH] = get_metrics
    for path, endpoint in endpoints.items():
        yield Route(base_path + path, endpoint, methods=METHODS, include_in_schema=False)


def serve_route(route: Route, other: ASGIApp) -> ASGIApp:
    """Returns an application that handles GET and HEAD requests with `route` and passes others to `other`."""

    async def answer_request(scope: Scope, receive: Receive, send: Send) -> None:
        await (route.app if scope["method"] in METHODS else other)(scope, receive, send)

    return answer_request
