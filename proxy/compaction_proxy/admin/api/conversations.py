"""The admin API of conversations: which there are, what has happened to them, and what they hold."""

import asyncio
from dataclasses import asdict
from typing import Annotated, Literal

from fastapi import Query, Response

from compaction_proxy.admin.api import schemas
from compaction_proxy.admin.api.routing import Steers, Watches, answer, routes
from compaction_proxy.admin.api.schemas import (
    ArchivedMessage,
    Bypass,
    Conversation,
    Events,
    Export,
    Forgotten,
    Hits,
    Marked,
    NewPin,
    Pins,
    ProjectInstructions,
    Round,
    conversation_shape,
    instructions_shape,
    message_shape,
    pins_shape,
    round_shape,
)
from compaction_proxy.admin.queries import MAX_LOOKED_AT, Sort
from compaction_proxy.recall.search import MAX_HITS

router = routes()


MAX_QUERY_CHARACTERS = 1_000
MAX_RANGE_CHARACTERS = 20

Limit = Annotated[int, Query(ge=1, le=MAX_HITS)]
Words = Annotated[str, Query(max_length=MAX_QUERY_CHARACTERS)]
Lines = Annotated[str, Query(max_length=MAX_RANGE_CHARACTERS)]
Scope = Literal["conversation", "tenant"]
Many = Annotated[int, Query(ge=1, le=MAX_LOOKED_AT)]


@router.get("/conversations", response_model=schemas.Conversations)
async def _listed(watching: Watches, limit: Many = 100, q: Words = "", sort: Sort = "last") -> Response:
    """Conversations, the largest by `sort` first; with `q` those whose id or model holds it."""
    found = await watching.conversations(limit, q=q, sort=sort)
    return answer({"conversations": [asdict(schemas.row(each)) for each in found]})


@router.get("/conversations/{conversation}", response_model=Conversation)
async def _overview(conversation: str, steering: Steers, watching: Watches) -> Response:
    """A conversation as it stands: its totals, its rounds, its money, and what is asked of it."""
    seen, stands = await steering.overview(conversation), await watching.standing(conversation)
    return answer(asdict(conversation_shape(conversation, seen, stands)))


@router.delete("/conversations/{conversation}", response_model=Forgotten)
async def _forget(conversation: str, steering: Steers) -> Response:
    """Delete everything that is stored of a conversation and its branches."""
    return answer(asdict(Forgotten(await steering.forget(conversation))))


@router.delete("/conversations/{conversation}/tenant", response_model=Forgotten)
async def _forget_tenant(conversation: str, steering: Steers) -> Response:
    """Delete everything that is stored of the tenant that a conversation belongs to."""
    return answer(asdict(Forgotten(await steering.forget_tenant(conversation))))


@router.get("/conversations/{conversation}/export", response_model=Export)
async def _export(conversation: str, steering: Steers, watching: Watches) -> Response:
    """Everything that is kept of a conversation: its totals, rounds, pins, events, and archived messages."""
    seen, stands = await steering.overview(conversation), await watching.standing(conversation)
    shape = conversation_shape(conversation, seen, stands)
    events = tuple(await steering.events(conversation))
    messages = tuple(map(message_shape, await steering.archive(conversation)))
    # Megabytes: what is relayed meanwhile does not wait for them.
    return await asyncio.to_thread(lambda: answer(asdict(Export(shape, events, messages))))


@router.get("/conversations/{conversation}/events", response_model=Events)
async def _events(conversation: str, steering: Steers) -> Response:
    """What has happened to a conversation, oldest first."""
    return answer(asdict(Events(tuple(await steering.events(conversation)))))


@router.get("/conversations/{conversation}/exchanges", response_model=schemas.Exchanges)
async def _exchanges(conversation: str, watching: Watches, limit: Many = 500) -> Response:
    """The newest exchanges of a conversation, oldest first."""
    found = await watching.exchanges(conversation, limit)
    return answer({"exchanges": [schemas.exchange(each) for each in found]})


@router.get("/conversations/{conversation}/compactions", response_model=schemas.Compactions)
async def _compactions(conversation: str, watching: Watches) -> Response:
    """The rounds of a conversation, oldest first."""
    found = await watching.compactions(conversation)
    return answer({"compactions": [schemas.compaction(each) for each in found]})


@router.get("/conversations/{conversation}/compactions/{place}", response_model=schemas.CompactionDetail)
async def _compaction(conversation: str, place: str, watching: Watches) -> Response:
    """A round: what it took out, what a model was asked, and what the conversation's model then saw."""
    made, found = await watching.detail(conversation, place)
    return await asyncio.to_thread(
        lambda: answer(schemas.detail(made, found))
    )  # megabytes, as with an export


@router.get("/sessions/{conversation}/search", response_model=Hits, include_in_schema=False)
@router.get("/conversations/{conversation}/search", response_model=Hits)
async def _search(
    conversation: str, q: Words, steering: Steers, limit: Limit = 20, scope: Scope = "conversation"
) -> Response:
    """Messages that rounds have taken out, those first that answer `q` best: words, `begin*`, "phrases"."""
    found = await steering.search(conversation, q, limit, everywhere=scope == "tenant")
    return answer(asdict(Hits(tuple(found))))


@router.get("/conversations/{conversation}/messages/{message}", response_model=ArchivedMessage)
async def _message(conversation: str, message: str, steering: Steers, lines: Lines = "") -> Response:
    """A message that rounds have taken out, whole, or some of its lines: `10-40`, `10-` or `10`, from 1."""
    found = await steering.message(conversation, message)
    return answer(asdict(message_shape(found, lines) if lines else message_shape(found)))


@router.post("/conversations/{conversation}/compact", status_code=202, response_model=Marked)
async def _compact(conversation: str, steering: Steers) -> Response:
    """Have the conversation's next request compacted."""
    await steering.compact(conversation)
    return answer(asdict(Marked(conversation)), 202)


@router.post("/conversations/{conversation}/undo", response_model=Round)
async def _undo(conversation: str, steering: Steers) -> Response:
    """Take the newest round back. No other is made until one is forced, or the request would not fit."""
    return answer(asdict(round_shape(await steering.undo(conversation), undone=True)))


@router.post("/conversations/{conversation}/bypass", response_model=Bypass)
async def _bypass(conversation: str, steering: Steers) -> Response:
    """Have the conversation's requests go on as they come; what is stored of it stays."""
    await steering.bypass(conversation)
    return answer(asdict(Bypass(conversation, bypass=True)))


@router.post("/conversations/{conversation}/resume", response_model=Bypass)
async def _resume(conversation: str, steering: Steers) -> Response:
    """Have the conversation's requests compacted again."""
    await steering.resume(conversation)
    return answer(asdict(Bypass(conversation, bypass=False)))


@router.get("/conversations/{conversation}/pins", response_model=Pins)
async def _pins(conversation: str, steering: Steers) -> Response:
    """The texts that no round may lose."""
    return answer(asdict(Pins(pins_shape(await steering.pins(conversation)))))


@router.post("/conversations/{conversation}/pins", status_code=201, response_model=Pins)
async def _pin(conversation: str, pin: NewPin, steering: Steers) -> Response:
    """Pin a text."""
    return answer(asdict(Pins(pins_shape(await steering.pin(conversation, pin.text)))), 201)


@router.delete("/conversations/{conversation}/pins/{pin}", response_model=Pins)
async def _unpin(conversation: str, pin: str, steering: Steers) -> Response:
    """Let go of a pinned text."""
    await steering.unpin(conversation, pin)
    return answer(asdict(Pins(pins_shape(await steering.pins(conversation)))))


@router.get("/conversations/{conversation}/instructions", response_model=ProjectInstructions)
async def _instructions(conversation: str, steering: Steers) -> Response:
    """What the client says of its project, such as a CLAUDE.md: no round takes it."""
    wishes = await steering.instructions(conversation)
    return answer(asdict(ProjectInstructions(instructions_shape(wishes))))


@router.delete("/conversations/{conversation}/instructions/{instruction}", response_model=ProjectInstructions)
async def _remove_instruction(conversation: str, instruction: str, steering: Steers) -> Response:
    """Leave instructions out of requests that are rewritten."""
    await steering.remove_instruction(conversation, instruction)
    return await _instructions(conversation, steering)


@router.post("/conversations/{conversation}/instructions/{instruction}", response_model=ProjectInstructions)
async def _restore_instruction(conversation: str, instruction: str, steering: Steers) -> Response:
    """Keep instructions again that were left out."""
    await steering.remove_instruction(conversation, instruction, removed=False)
    return await _instructions(conversation, steering)
