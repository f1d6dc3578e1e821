"""A conversation put together again from what is kept of it: what rounds took out, and what stayed then.

Kept is text: of a tool call its name and arguments as a line, of privileged messages and tools nothing. So
figures about it are near those of the conversation, not the same.
"""

from collections.abc import Awaitable, Callable, Sequence

from compaction_proxy.admin.queries import ConversationQueries
from compaction_proxy.compaction.commands import ConversationCommands
from compaction_proxy.core.errors import RequestRefusedError
from compaction_proxy.recall.archive import RemovedMessage
from compaction_proxy.recall.round_detail import KEPT, VisibleMessage
from compaction_proxy.replay.prompt_size import JsonObject

_ANSWERING = frozenset({"tool", "function"})


def create_replay_source(
    commands: ConversationCommands, queries: ConversationQueries
) -> Callable[[str], Awaitable[JsonObject]]:
    """Gives what is kept of a conversation as a request body.

    It raises `RequestRefusedError`: it is not known (404), or too little of it is kept (409).
    """

    async def load_conversation(conversation: str) -> JsonObject:
        overview = await commands.get_overview(conversation)
        in_force = [
            each.place for each in overview.rounds if each.place and each.place not in overview.undone
        ]
        removed = [each.message for each in await commands.list_archived_messages(conversation)]
        detail = (await queries.get_compaction(conversation, in_force[-1]))[1] if in_force else None
        messages = rebuild_messages(removed, detail.seen if detail else ())
        return {"model": overview.totals.model, "messages": messages}

    return load_conversation


def rebuild_messages(removed: Sequence[RemovedMessage], seen: Sequence[VisibleMessage]) -> list[JsonObject]:
    """The messages of a conversation up to its last round, as far as they can be told.

    Args:
        removed: What its rounds took out; of several with one index the last stands.
        seen: What the model saw after its last round.

    Raises:
        RequestRefused: Too little of it is kept (409).
    """
    placed = {each.index: (each.role, each.text) for each in removed}
    known = {each.id for each in removed}
    stayed = [(each.role, each.text) for each in seen if each.origin == KEPT and each.id not in known]
    total = len(placed) + len(stayed)
    free = [index for index in range(total) if index not in placed]
    if not total or max(placed, default=0) >= total:
        raise RequestRefusedError(
            409, "Too little is kept of this conversation: send its messages instead.", "not_kept"
        )
    placed |= dict(zip(free, stayed, strict=True))
    return _to_wire_messages([placed[index] for index in range(total)])


def _to_wire_messages(texts: Sequence[tuple[str, str]]) -> list[JsonObject]:
    """Messages in the wire's form; calls and their results are paired by place."""
    messages: list[JsonObject] = []
    caller: JsonObject | None = None
    for index, (role, text) in enumerate(texts):
        if role not in _ANSWERING:
            messages.append({"role": role, "content": text})
            caller = messages[-1] if role == "assistant" else None
        elif caller is None:  # whatever asked for it is not kept as such
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
