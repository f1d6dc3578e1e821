"""The admin API of conversations: which there are, what has happened to them, and what they hold."""

import asyncio
from dataclasses import asdict
from typing import Annotated, Literal

from fastapi import Query, Response

from compaction_proxy.admin.api import figures
from compaction_proxy.admin.api.routing import Steers, Watches, answer, routes
from compaction_proxy.admin.api.schemas import (
    ArchivedMessage,
    Conversation,
    Events,
    Export,
    Forgotten,
    Hits,
    conversation_shape,
    message_shape,
)
from compaction_proxy.admin.queries import MAX_LOOKED_AT, Sort
from compaction_proxy.recall.search import MAX_HITS

MAX_QUERY_CHARACTERS = 1_000
MAX_RANGE_CHARACTERS = 20

Limit = Annotated[int, Query(ge=1, le=MAX_HITS)]
Words = Annotated[str, Query(max_length=MAX_QUERY_CHARACTERS)]
Lines = Annotated[str, Query(max_length=MAX_RANGE_CHARACTERS)]
Scope = Literal["conversation", "tenant"]
Many = Annotated[int, Query(ge=1, le=MAX_LOOKED_AT)]

router = routes()


@router.get("/conversations", response_model=figures.Conversations)
async def _listed(watching: Watches, limit: Many = 100, q: Words = "", sort: Sort = "last") -> Response:
    """Conversations, the largest by `sort` first; with `q` those whose id or model holds it."""
    found = await watching.conversations(limit, q=q, sort=sort)
    return answer({"conversations": [asdict(figures.row(each)) for each in found]})


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


@router.get("/conversations/{conversation}/exchanges", response_model=figures.Exchanges)
async def _exchanges(conversation: str, watching: Watches, limit: Many = 500) -> Response:
    """The newest exchanges of a conversation, oldest first."""
    found = await watching.exchanges(conversation, limit)
    return answer({"exchanges": [figures.exchange(each) for each in found]})


@router.get("/conversations/{conversation}/compactions", response_model=figures.Compactions)
async def _compactions(conversation: str, watching: Watches) -> Response:
    """The rounds of a conversation, oldest first."""
    found = await watching.compactions(conversation)
    return answer({"compactions": [figures.compaction(each) for each in found]})


@router.get("/conversations/{conversation}/compactions/{place}", response_model=figures.CompactionDetail)
async def _compaction(conversation: str, place: str, watching: Watches) -> Response:
    """A round: what it took out, what a model was asked, and what the conversation's model then saw."""
    made, found = await watching.detail(conversation, place)
    return await asyncio.to_thread(
        lambda: answer(figures.detail(made, found))
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
