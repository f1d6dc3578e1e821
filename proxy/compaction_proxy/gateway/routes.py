"""The compacted endpoints as routes of the FastAPI application, with their descriptions for OpenAPI."""

from collections.abc import Iterator, Mapping
from typing import Final

from fastapi.routing import APIRoute
from starlette.types import ASGIApp

from compaction_proxy.gateway.paths import COMPACT_PATH

_COMPACT: Final = "compact"
_COMPACT_SUMMARY: Final = "Compact a list of messages"
# By wire: the usual path, the summary for OpenAPI, and the document that defines the body.
_WIRES: Final = {
    "chat": (
        "/v1/chat/completions",
        "Chat completions",
        "https://platform.openai.com/docs/api-reference/chat",
    ),
    "responses": ("/v1/responses", "Responses", "https://platform.openai.com/docs/api-reference/responses"),
    "messages": ("/v1/messages", "Messages", "https://docs.anthropic.com/en/api/messages"),
}
_BODY: Final = {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
_ANSWER: Final = {"application/json": {"schema": {"type": "object"}}}
_STREAM: Final = {"text/event-stream": {"schema": {"type": "string"}}}


class RelayRoute(APIRoute):
    """A route that hands its requests to an ASGI application unchanged: FastAPI reads and checks nothing.

    Args:
        path: The path of the requests.
        handler: The application that answers them.
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
    """Has the signature that FastAPI describes: no parameters. The handler of the route gets the requests."""


def create_relay_routes(
    wires: Mapping[str, ASGIApp], compact: ASGIApp, base_path: str = ""
) -> Iterator[RelayRoute]:
    """Yields a route for each compacted endpoint.

    Args:
        wires: The handlers by the wire's name.
        compact: The handler of `/v1/compact`.
        base_path: The path below which our own paths stand; empty for the root.
    """
    for name, (path, summary, reference) in _WIRES.items():
        description = (
            f"Compacts the conversation if it is too long, and relays the request. Body: {reference}"
        )
        yield RelayRoute(path, wires[name], name, summary=summary, description=description, streams=True)
    description = "Answers a shorter list of messages. Nothing is kept, and nothing is relayed."
    yield RelayRoute(
        base_path + COMPACT_PATH,
        compact,
        _COMPACT,
        summary=_COMPACT_SUMMARY,
        description=description,
        streams=False,
    )
