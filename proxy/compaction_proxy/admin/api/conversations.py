"""Defines the endpoints of the admin API that read, change or delete the data of conversations."""

import asyncio
import math
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import Query, Response

from compaction_proxy.admin.api import schemas
from compaction_proxy.admin.api.routing import (
    AdminSettings,
    CommandsDependency,
    ListLimit,
    ListOffset,
    QueriesDependency,
    SettingsDependency,
    TimeParameter,
    build_json_response,
    create_router,
    cut_page,
    parse_time,
)
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
    Undone,
    to_archived_message,
    to_conversation,
    to_instructions,
    to_pins,
    to_round,
    to_undone,
)
from compaction_proxy.admin.queries import (
    MAX_SCANNED,
    ConversationFilter,
    ConversationQueries,
    Sort,
    estimate_hard_mark,
)
from compaction_proxy.compaction.commands import ConversationCommands
from compaction_proxy.providers.pricing import uses_list_prices
from compaction_proxy.recall.search import MAX_HITS

router = create_router()


MAX_QUERY_CHARACTERS = 1_000
MAX_RANGE_CHARACTERS = 20

HitLimit = Annotated[int, Query(ge=1, le=MAX_HITS)]
SearchQuery = Annotated[str, Query(max_length=MAX_QUERY_CHARACTERS)]
LineRange = Annotated[str, Query(max_length=MAX_RANGE_CHARACTERS)]
Scope = Literal["conversation", "tenant"]


@router.get("/conversations", response_model=schemas.Conversations)
async def _listed(  # noqa: PLR0913, PLR0917 - one for each parameter of the query
    queries: QueriesDependency,
    limit: ListLimit = 100,
    offset: ListOffset = 0,
    sort: Sort = "last",
    q: SearchQuery = "",
    session: SearchQuery = "",
    model: SearchQuery = "",
    key: SearchQuery = "",
    label: SearchQuery = "",
    strategy: SearchQuery = "",
    status: SearchQuery = "",
    since: TimeParameter = "",
    until: TimeParameter = "",
) -> Response:
    """List conversations, ordered by the property that `sort` names. The largest or latest value comes first.

    `session` is the id that the client gives a conversation, for example in the header `x-session-id`. `q` is
    this id, or a part of the conversation's id, model, label, stored name or title. `model` is a part of the
    model, and `key` the name of a client key in the statistics (`k_…`). `strategy` is that of the latest
    compaction that was applied. `status`, `since` and `until` are about the last request. All parameters that
    are not empty must match.
    """
    now = queries.now()
    wanted = ConversationFilter(
        text=q,
        session=session,
        model=model,
        key=key,
        label=label,
        strategy=strategy,
        status=status,
        since=parse_time(since, now) if since else -math.inf,
        until=parse_time(until, now) if until else math.inf,
    )
    page = await queries.list_conversations(limit, wanted, offset=offset, sort=sort)
    rows = [schemas.to_conversation_row(each) for each in page.rows]
    return build_json_response({"conversations": rows, "next": page.next})


@router.get("/conversations/{conversation}", response_model=Conversation)
async def _overview(
    conversation: str, commands: CommandsDependency, queries: QueriesDependency, settings: SettingsDependency
) -> Response:
    """Get a conversation: its usage, costs, compactions, pins and project instructions."""
    return build_json_response(await _describe_conversation(conversation, commands, queries, settings))


async def _describe_conversation(
    conversation: str, commands: ConversationCommands, queries: ConversationQueries, settings: AdminSettings
) -> dict[str, Any]:
    """Returns the fields of a `Conversation`."""
    overview = await commands.get_overview(conversation)
    limits = await queries.get_gate_limits(conversation, overview.totals.model)
    hard_tokens = estimate_hard_mark(settings.config, overview.totals)
    list_prices = uses_list_prices(settings.config)
    return to_conversation(conversation, overview, limits, hard_tokens=hard_tokens, list_prices=list_prices)


@router.delete("/conversations/{conversation}", response_model=Forgotten)
async def _forget(conversation: str, commands: CommandsDependency) -> Response:
    """Delete all stored data of a conversation and its branches.

    Branches are conversations that begin with the same messages.
    """
    return build_json_response({"deleted": await commands.forget_conversation(conversation)})


@router.delete("/conversations/{conversation}/tenant", response_model=Forgotten)
async def _forget_tenant(conversation: str, commands: CommandsDependency) -> Response:
    """Delete all stored data of the tenant to which a conversation belongs."""
    return build_json_response({"deleted": await commands.forget_owning_tenant(conversation)})


@router.get("/conversations/{conversation}/export", response_model=Export)
async def _export(
    conversation: str, commands: CommandsDependency, queries: QueriesDependency, settings: SettingsDependency
) -> Response:
    """Export the current state of a conversation, with its events and its archived messages."""
    described = await _describe_conversation(conversation, commands, queries, settings)
    events = await commands.list_events(conversation)
    messages = await commands.list_archived_messages(conversation)
    # An export may have megabytes. A thread encodes it as JSON, so that the event loop can relay requests
    # meanwhile.
    return await asyncio.to_thread(
        lambda: build_json_response(
            {
                "conversation": described,
                "events": [asdict(each) for each in events],
                "messages": [to_archived_message(each) for each in messages],
            }
        )
    )


@router.get("/conversations/{conversation}/events", response_model=Events)
async def _events(
    conversation: str, commands: CommandsDependency, limit: ListLimit = MAX_SCANNED, offset: ListOffset = 0
) -> Response:
    """List the newest events of a conversation, oldest first. Skips the `offset` newest ones."""
    events = await commands.list_events(conversation)
    page, following = cut_page(events[::-1], limit, offset)
    return build_json_response({"events": [asdict(each) for each in reversed(page)], "next": following})


@router.get("/conversations/{conversation}/exchanges", response_model=schemas.Exchanges)
async def _exchanges(
    conversation: str, queries: QueriesDependency, limit: ListLimit = 500, offset: ListOffset = 0
) -> Response:
    """List the newest exchanges (requests and their responses) of a conversation, oldest first.

    Skips the `offset` newest ones.
    """
    found = await queries.list_exchanges(conversation, offset + limit + 1)  # one more: is there another page?
    page, following = cut_page(found[::-1], limit, offset)
    rows = [schemas.to_exchange_line(each) for each in reversed(page)]
    return build_json_response({"exchanges": rows, "next": following})


@router.get("/conversations/{conversation}/compactions", response_model=schemas.Compactions)
async def _compactions(conversation: str, queries: QueriesDependency) -> Response:
    """List the compactions of a conversation, oldest first."""
    found = await queries.list_compactions(conversation)
    return build_json_response({"compactions": [schemas.to_compaction_line(each) for each in found]})


@router.get("/conversations/{conversation}/compactions/{place}", response_model=schemas.CompactionDetail)
async def _compaction(conversation: str, place: str, queries: QueriesDependency) -> Response:
    """Get a compaction, with the messages that it removed and the prompts of its summary calls.

    The response also contains the messages that the conversation's model saw after the compaction.
    """
    made, found = await queries.get_compaction(conversation, place)
    return await asyncio.to_thread(
        lambda: build_json_response(schemas.to_compaction_detail(made, found))
    )  # the details may have megabytes, so they are encoded in a thread, as an export is


@router.get("/sessions/{conversation}/search", response_model=Hits, include_in_schema=False)
@router.get("/conversations/{conversation}/search", response_model=Hits)
async def _search(
    conversation: str,
    q: SearchQuery,
    commands: CommandsDependency,
    limit: HitLimit = 20,
    scope: Scope = "conversation",
) -> Response:
    """Search the messages that compactions have removed. The best match comes first.

    `q` may contain words, beginnings of words (`begin*`) and phrases in double quotes. `scope` is
    `conversation` for this conversation, or `tenant` for all conversations of its tenant.
    """
    found = await commands.search_archive(conversation, q, limit, everywhere=scope == "tenant")
    return build_json_response({"hits": [asdict(each) for each in found]})


@router.get("/conversations/{conversation}/messages/{message}", response_model=ArchivedMessage)
async def _message(
    conversation: str, message: str, commands: CommandsDependency, lines: LineRange = ""
) -> Response:
    """Get a message that a compaction has removed, or only some of its lines.

    `lines` is a range such as `10-40`, `10-` or `10`. The first line has the number 1.
    """
    found = await commands.get_archived_message(conversation, message)
    return build_json_response(to_archived_message(found, lines))


@router.post("/conversations/{conversation}/compact", status_code=202, response_model=Marked)
async def _compact(conversation: str, commands: CommandsDependency) -> Response:
    """Make the proxy compact the next request of the conversation."""
    await commands.request_compaction(conversation)
    return build_json_response({"id": conversation, "compact": True}, 202)


@router.post("/conversations/{conversation}/undo", response_model=Undone)
async def _undo(conversation: str, commands: CommandsDependency, settings: SettingsDependency) -> Response:
    """Undo the latest compaction, and discard prepared ones. The response describes the undone one.

    The undone compaction is the latest that a request has used. The next request uses the compaction before
    it, or is sent in full. Automatic compaction is paused until a user requests a compaction, or until a
    request reaches the hard mark (`hard_tokens`, by default 90 percent of the usable context window). To
    prevent compaction at the hard mark too, send the request header `x-compaction: bypass`, or call the
    endpoint `bypass` for all requests.
    """
    result = await commands.undo_round(conversation)
    return build_json_response(to_undone(result, estimate_hard_mark(settings.config, result.totals)))


@router.post("/conversations/{conversation}/redo", response_model=schemas.Round)
async def _redo(conversation: str, commands: CommandsDependency) -> Response:
    """Redo the compaction that was undone last. The response describes this compaction.

    This is possible until a new compaction is made.
    """
    return build_json_response(to_round(await commands.redo_round(conversation), undone=False))


@router.post("/conversations/{conversation}/bypass", response_model=Bypass)
async def _bypass(conversation: str, commands: CommandsDependency) -> Response:
    """Forward the conversation's requests unchanged from now on. The proxy keeps the stored data."""
    await commands.bypass_compaction(conversation)
    return build_json_response({"id": conversation, "bypass": True})


@router.post("/conversations/{conversation}/resume", response_model=Bypass)
async def _resume(conversation: str, commands: CommandsDependency) -> Response:
    """End a bypass. The proxy compacts the conversation's requests again when necessary."""
    await commands.resume_compaction(conversation)
    return build_json_response({"id": conversation, "bypass": False})


@router.get("/conversations/{conversation}/pins", response_model=Pins)
async def _pins(conversation: str, commands: CommandsDependency) -> Response:
    """List the pins of a conversation: texts that every compaction keeps word for word."""
    return build_json_response({"pins": to_pins(await commands.list_pins(conversation))})


@router.post("/conversations/{conversation}/pins", status_code=201, response_model=Pins)
async def _pin(conversation: str, pin: NewPin, commands: CommandsDependency) -> Response:
    """Pin a text, so that every compaction keeps the text word for word. The response lists all pins."""
    return build_json_response({"pins": to_pins(await commands.add_pin(conversation, pin.text))}, 201)


@router.delete("/conversations/{conversation}/pins/{pin}", response_model=Pins)
async def _unpin(conversation: str, pin: str, commands: CommandsDependency) -> Response:
    """Remove a pin. The response lists the pins that remain."""
    await commands.remove_pin(conversation, pin)
    return await _pins(conversation, commands)


@router.get("/conversations/{conversation}/instructions", response_model=ProjectInstructions)
async def _instructions(conversation: str, commands: CommandsDependency) -> Response:
    """List the project instructions of a conversation, such as a CLAUDE.md, which no compaction removes."""
    directives = await commands.get_instructions(conversation)
    return build_json_response({"instructions": to_instructions(directives)})


@router.delete("/conversations/{conversation}/instructions/{instruction}", response_model=ProjectInstructions)
async def _remove_instruction(conversation: str, instruction: str, commands: CommandsDependency) -> Response:
    """Remove project instructions. When the proxy rewrites a request, it leaves them out from now on."""
    await commands.set_instruction_removed(conversation, instruction)
    return await _instructions(conversation, commands)


@router.post("/conversations/{conversation}/instructions/{instruction}", response_model=ProjectInstructions)
async def _restore_instruction(conversation: str, instruction: str, commands: CommandsDependency) -> Response:
    """Restore removed project instructions. When the proxy rewrites a request, it keeps them again."""
    await commands.set_instruction_removed(conversation, instruction, removed=False)
    return await _instructions(conversation, commands)
