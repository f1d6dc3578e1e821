"""`/metrics`: what Prometheus asks for. Open as health is: there is no id and no text in it."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request, Response

PATH = "/metrics"
METHODS = ["GET", "HEAD"]

Written = Callable[[str], Awaitable[tuple[bytes, str]]]
"""Gives all metrics in the form that a value of `Accept` prefers, and their content type."""


def metrics_routes(written: Written) -> APIRouter:
    """The route that answers with metrics."""
    routes = APIRouter()

    async def metrics(request: Request) -> Response:
        text, content_type = await written(request.headers.get("accept", ""))
        return Response(text, 200, {"content-type": content_type, "cache-control": "no-store"})

    routes.add_api_route(PATH, metrics, methods=METHODS)
    return routes
