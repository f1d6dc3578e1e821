"""The admin endpoint `POST /admin/v1/replay`: replays a conversation under several strategies."""

import asyncio
from typing import Any

from fastapi import Request, Response

from compaction_proxy.admin.api.routing import build_json_response, create_router, get_api
from compaction_proxy.core.errors import RequestRefusedError
from compaction_proxy.replay.jobs import parse_job

# Largest body, in bytes. The command `compaction-proxy replay` takes longer conversations.
MAX_BYTES = 8 * 1024 * 1024
TOO_LARGE = f"The request body is larger than {MAX_BYTES} bytes."
_TOKENS = {"type": "integer", "minimum": 1, "nullable": True}
# Schema of the request body, for the OpenAPI document. FastAPI does not decode the body, because decoding
# megabytes on the event loop would delay other requests.
_BODY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "messages": {"type": "array", "items": {"type": "object"}},
        "tools": {"type": "array", "items": {"type": "object"}},
        "conversation": {"type": "string", "description": "In place of messages: the id of a stored one."},
        "model": {"type": "string", "nullable": True},
        "strategies": {"type": "array", "items": {"type": "string"}},
        "trigger_tokens": _TOKENS,
        "target_tokens": _TOKENS,
        "window": _TOKENS,
    },
}

router = create_router()


async def _read_body(request: Request) -> bytes:
    """Reads the whole body.

    Raises:
        RequestRefusedError: The body is too large (413).
    """
    parts, remaining_bytes = [], MAX_BYTES
    async for part in request.stream():
        parts.append(part)
        remaining_bytes -= len(part)
        if remaining_bytes < 0:
            raise RequestRefusedError(413, TOO_LARGE, "request_too_large")
    return b"".join(parts)


@router.post(
    "/replay",
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": _BODY}}}},
)
async def replay(request: Request) -> Response:
    """Compute what each strategy would do with a conversation, and at what cost. Calls no model."""
    job = await asyncio.to_thread(parse_job, await _read_body(request))
    return build_json_response({"results": await get_api(request).replay_jobs.run_job(job)})
