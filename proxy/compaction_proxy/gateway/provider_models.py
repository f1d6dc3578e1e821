"""Asks a provider for the list of its models."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass

import httpx

from compaction_proxy.core.errors import ProxyError
from compaction_proxy.gateway.summary_routes import build_key_header
from compaction_proxy.gateway.upstream_monitor import find_cause
from compaction_proxy.providers.discovery import USER_AGENT
from compaction_proxy.support.formatting import describe_upstream_cause
from compaction_proxy.wires.registry import WIRES

DEADLINE_S = 10.0
# The proxy stops reading a response after this many bytes. The number is high because a list of models may be
# long.
MAX_BODY_BYTES = 4 * 1_048_576


@dataclass(frozen=True, slots=True)
class ModelList:
    """A provider's response to the request for its models.

    Attributes:
        response: The response, without its body.
        names: The ids of the models; empty if the response is not a list of models.
        takes_any_name: Whether the provider serves a single model and accepts any name for it, as llama.cpp
            does.
    """

    response: httpx.Response
    names: frozenset[str] = frozenset()
    takes_any_name: bool = False

    def lacks_model(self, model: str) -> bool:
        """Returns whether the list is known and does not contain the model.

        Ollama lists a model as `name:latest`, although requests call it `name`. OpenRouter lists `name`, and
        accepts `name:variant`.
        """
        if not self.names or self.takes_any_name:
            return False
        return self.names.isdisjoint((model, f"{model}:latest", model.partition(":")[0]))


async def fetch_page(
    transport: httpx.AsyncBaseTransport, url: str, headers: Mapping[str, str]
) -> tuple[httpx.Response, bytes]:
    """Sends a GET request. Returns the response and its body. Stops reading beyond `MAX_BODY_BYTES` bytes.

    Does not follow redirects, so that a key in `headers` is never sent to another server.

    Raises:
        ProxyError: If the provider does not respond within `DEADLINE_S` seconds, or if the request fails. The
            message names the cause in words.
    """
    fields = {
        "accept": "application/json",
        "accept-encoding": "identity",
        "user-agent": USER_AGENT,
        **headers,
    }
    # The client is not closed here, because closing it would also close the transport, which belongs to the
    # caller.
    client = httpx.AsyncClient(transport=transport, timeout=None)  # noqa: S113 - asyncio.timeout sets the deadline
    body = bytearray()
    try:
        async with asyncio.timeout(DEADLINE_S), client.stream("GET", url, headers=fields) as response:
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    break
        return response, bytes(body)
    except TimeoutError:
        raise ProxyError(f"no response within {DEADLINE_S:g} s") from None
    except httpx.TransportError as error:
        raise ProxyError(describe_upstream_cause(find_cause(error))) from None
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeEncodeError):
        raise ProxyError("the URL or the response is invalid") from None


async def fetch_model_list(
    transport: httpx.AsyncBaseTransport, base_url: str, key: str, wire: str = "chat"
) -> ModelList:
    """Asks a provider for its models.

    Args:
        transport: Transport to the provider.
        base_url: Base URL of the provider.
        key: Key for the provider; empty sends none.
        wire: Name of the wire that the provider speaks. It decides in which header field the key is sent.

    Raises:
        ProxyError: Under the conditions that `fetch_page` documents.
    """
    spoken = WIRES[wire]
    headers = {**spoken.summary_call_format.headers, **(build_key_header(spoken, key) if key else {})}
    start = base_url.rstrip("/")
    if spoken.api_key_header and not start.endswith("/v1"):
        start = f"{start}/v1"
    response, body = await fetch_page(transport, f"{start}/models", headers)
    # A list may have megabytes, so a thread parses it.
    return ModelList(response, *await asyncio.to_thread(_parse_model_list, body))


def _parse_model_list(body: bytes) -> tuple[frozenset[str], bool]:
    """Returns the fields `names` and `takes_any_name` of a `ModelList`."""
    try:
        rows = json.loads(body)["data"]
        names = frozenset(each["id"] for each in rows if isinstance(each["id"], str))
        return names, len(rows) == 1 and "meta" in rows[0]
    except (ValueError, LookupError, TypeError, RecursionError):
        return frozenset(), False
