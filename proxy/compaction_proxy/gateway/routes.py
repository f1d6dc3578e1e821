"""FastAPI routes for the endpoints whose requests the proxy compacts, with descriptions for OpenAPI."""

from collections.abc import Iterator, Mapping
from typing import Final

from fastapi.routing import APIRoute
from starlette.types import ASGIApp

from compaction_proxy.gateway.paths import COMPACT_PATH

# For each wire: the usual path, a short description for OpenAPI, and the URL of the document that defines the
# body.
_WIRES: Final = {
    "chat": (
        "/v1/chat/completions",
        "Compact and forward chat completions",
        "https://platform.openai.com/docs/api-reference/chat",
    ),
    "responses": (
        "/v1/responses",
        "Compact and forward requests for responses",
        "https://platform.openai.com/docs/api-reference/responses",
    ),
    "messages": (
        "/v1/messages",
        "Compact and forward messages",
        "https://docs.anthropic.com/en/api/messages",
    ),
}
_BODY: Final = {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
_ANSWER: Final = {"application/json": {"schema": {"type": "object"}}}
_STREAM: Final = {"text/event-stream": {"schema": {"type": "string"}}}


class RelayRoute(APIRoute):
    """A route whose requests FastAPI passes to an ASGI application without parsing or checking them.

    Args:
        path: The path of the requests.
        handler: The ASGI application that answers the requests.
        name: The name of a wire, or `compact`.
        summary: What the endpoint does, in a few words.
        description: What the endpoint does, in sentences.
        streams: Whether the endpoint may answer with an event stream.
    """

    def __init__(
        self, path: str, handler: ASGIApp, name: str, *, summary: str, description: str, streams: bool
    ) -> None:
        super().__init__(
            path,
            _declare_no_parameters,
            methods=["POST"],
            name=name,
            operation_id=name,
            tags=["relay"],
            summary=summary,
            description=description,
            responses={200: {"content": {**_ANSWER, **(_STREAM if streams else {})}}},
            openapi_extra={"requestBody": _BODY},
        )
        self.app = handler


def _declare_no_parameters() -> None:
    """Never runs. FastAPI documents the parameters of this signature, and it has none."""


def create_relay_routes(
    wires: Mapping[str, ASGIApp], compact: ASGIApp, base_path: str = ""
) -> Iterator[RelayRoute]:
    """Yields a route for each endpoint whose requests the proxy compacts.

    Args:
        wires: For each wire's name, the application that handles its requests.
        compact: The application that handles `/v1/compact`.
        base_path: The path with which all of the proxy's own paths begin; empty for the root.
    """
    for name, (path, summary, reference) in _WIRES.items():
        description = (
            f"Compacts the conversation if it is too long, and forwards the request. Body: {reference}"
        )
        yield RelayRoute(path, wires[name], name, summary=summary, description=description, streams=True)
    yield RelayRoute(
        base_path + COMPACT_PATH,
        compact,
        "compact",
        summary="Compact a list of messages",
        description="Returns a shorter list of messages. Stores nothing and forwards nothing.",
        streams=False,
    )
