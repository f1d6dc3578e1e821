"""The admin endpoint `POST /admin/v1/replay`, and the conversations that it loads from the store.

The messages of a stored conversation are those that compactions have removed, and those that remained after
the last compaction. The store holds only their text: a tool call is a line with its name and arguments, and
fixed messages and tool definitions are missing. The results of the replay are therefore approximate.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import Request, Response

from compaction_proxy.admin.api.routing import build_json_response, create_router, get_api
from compaction_proxy.admin.queries import ConversationQueries
from compaction_proxy.compaction.commands import ConversationCommands
from compaction_proxy.core.errors import RequestRefusedError
from compaction_proxy.recall.archive import RemovedMessage
from compaction_proxy.recall.round_detail import KEPT, VisibleMessage
from compaction_proxy.replay.jobs import parse_job
from compaction_proxy.replay.provider import JsonObject

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


@router.post(
    "/replay",
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": _BODY}}}},
)
async def replay(request: Request) -> Response:
    """Compute what each strategy would do with a conversation, and at what cost. Calls no model."""
    job = await asyncio.to_thread(parse_job, await request.body())
    return build_json_response({"results": await get_api(request).replay_jobs.run_job(job)})


# Roles of tool results.
_ANSWERING = frozenset({"tool", "function"})


def create_conversation_loader(
    commands: ConversationCommands, queries: ConversationQueries
) -> Callable[[str], Awaitable[JsonObject]]:
    """Creates a function that rebuilds a stored conversation as a request body.

    That function raises `RequestRefusedError` if the conversation is unknown (404) or too little of it is
    stored (409).
    """

    async def load_conversation(conversation: str) -> JsonObject:
        overview = await commands.get_overview(conversation)
        in_force = [
            each.place for each in overview.rounds if each.place and each.place not in overview.undone
        ]
        removed = [each.message for each in await commands.list_archived_messages(conversation)]
        detail = (await queries.get_compaction(conversation, in_force[-1]))[1] if in_force else None
        messages = rebuild_messages(removed, detail.visible_messages if detail else ())
        return {"model": overview.totals.model, "messages": messages}

    return load_conversation


def rebuild_messages(
    removed: Sequence[RemovedMessage], visible: Sequence[VisibleMessage]
) -> list[JsonObject]:
    """Rebuilds the messages of a conversation, up to those that the model saw after the last compaction.

    Args:
        removed: Messages that compactions removed. If several have the same index, the last one counts.
        visible: Messages that the model saw after the last compaction. Only those that the compaction kept
            are used.

    Raises:
        RequestRefusedError: Too little of the conversation is stored (409).
    """
    placed = {each.index: (each.role, each.text) for each in removed}
    known = {each.id for each in removed}
    kept = [(each.role, each.text) for each in visible if each.origin == KEPT and each.id not in known]
    total = len(placed) + len(kept)
    free = [index for index in range(total) if index not in placed]
    if not total or max(placed, default=0) >= total:
        raise RequestRefusedError(
            409, "Too little is kept of this conversation: send its messages instead.", "not_kept"
        )
    placed |= dict(zip(free, kept, strict=True))
    return _to_wire_messages([placed[index] for index in range(total)])


def _to_wire_messages(texts: Sequence[tuple[str, str]]) -> list[JsonObject]:
    """Converts pairs of a role and a text to messages of the Chat Completions wire.

    The ids of tool calls are not stored. Each tool result therefore gets a new call in the assistant message
    before it. Without such a message, it becomes a user message.
    """
    messages: list[JsonObject] = []
    caller: JsonObject | None = None
    for index, (role, text) in enumerate(texts):
        if role not in _ANSWERING:
            messages.append({"role": role, "content": text})
            caller = messages[-1] if role == "assistant" else None
        elif caller is None:  # the call of this result is not stored
            messages.append({"role": "user", "content": text})
        else:
            call = {
                "id": f"call_{index}",
                "type": "function",
                "function": {"name": "call", "arguments": "{}"},
            }
            caller.setdefault("tool_calls", []).append(call)
            messages.append({"role": "tool", "tool_call_id": f"call_{index}", "content": text})
    return messages
