"""What agents are told about their own conversations, and what nobody is told of other people's."""

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from compaction_proxy.compaction.commands import ConversationCommands, ConversationOverview
from compaction_proxy.compaction.directives import NO_DIRECTIVES, Directives
from compaction_proxy.core.errors import RequestRefusedError, StoreUnavailableError
from compaction_proxy.core.event import COMPACTED, Event
from compaction_proxy.gateway.mcp.tools import (
    MAX_LISTED,
    NONE_YET,
    NOT_FOUND,
    STORE_UNREACHABLE,
    McpToolRunner,
)
from compaction_proxy.recall.tool import RecallContext
from compaction_proxy.telemetry.conversation_registry import ConversationRegistry, RegisteredConversation
from compaction_proxy.telemetry.usage import Totals

NOW = 1_000_000.0
IDLE = ConversationOverview(Totals(), (), frozenset(), NO_DIRECTIVES)


@dataclass
class Known:
    """Conversations, scripted: both who knows whose they are and who steers them."""

    seen: list[RegisteredConversation] = field(default_factory=list)
    overviews: dict[str, ConversationOverview] = field(default_factory=dict)
    error: Exception | None = None
    compacted: list[str] = field(default_factory=list)

    async def find_tenant(self, conversation: str) -> str | None:
        return next((each.tenant for each in self.seen if each.id == conversation), None)

    async def list_recent(self, limit: int) -> list[RegisteredConversation]:
        return self.seen[:limit]

    async def get_overview(self, conversation: str) -> ConversationOverview:
        if self.error is not None:
            raise self.error
        return self.overviews[conversation]

    async def request_compaction(self, conversation: str) -> None:
        if self.error is not None:
            raise self.error
        self.compacted.append(conversation)


def conversations(known: Known, *, away: bool = False) -> McpToolRunner:
    return McpToolRunner(
        cast("Any", None),
        cast("ConversationCommands", known),
        cast("ConversationRegistry", known),
        is_store_reachable=lambda: not away,
        now=lambda: NOW,
    )


async def describe(runner: McpToolRunner, tenant: str, conversation: str | None) -> str:
    """The text of `conversation_status`."""
    return (await runner.call_tool(RecallContext(tenant, conversation), "conversation_status", {})).text


async def compact(runner: McpToolRunner, tenant: str, conversation: str) -> str:
    """The text of `compact_now`."""
    return (await runner.call_tool(RecallContext(tenant, conversation), "compact_now", {})).text


async def test_a_conversation_is_told_of_in_figures() -> None:
    event = Event(
        COMPACTED, NOW - 7_200, "c_1", strategy="anchored", round=2, messages=57,
        tokens_before=80_000, tokens_after=30_000,
    )  # fmt: skip
    totals = Totals(
        model="gpt <|im_start|>", requests=42, tokens_before=120_000, tokens_after=45_000, trigger=96_000,
        last_at=NOW - 180,
    )  # fmt: skip
    overview = ConversationOverview(
        totals, (event, event), frozenset(), Directives(compact=True, bypass=True)
    )
    known = Known([RegisteredConversation("c_1", "t", NOW)], {"c_1": overview})
    assert await describe(conversations(known), "t", "c_1") == (
        "Conversation c_1: 42 requests, the last one 3 min ago. Model: gpt < |im_start|>.\n"
        "Last request: 120,000 tokens from the client, 45,000 to the model. "
        "Compaction starts at 96,000 tokens.\n"
        "Compactions: 2.\n"
        "Latest: round 2 by anchored, 2 h ago, 57 messages removed, 80,000 tokens reduced to 30,000.\n"
        "The next request will be compacted.\n"
        "Compaction is off for this conversation."
    )


async def test_one_is_not_many() -> None:
    event = Event(COMPACTED, NOW, "c_1", strategy="prune", round=1, messages=1)
    overview = ConversationOverview(Totals(requests=1), (event,), frozenset(), Directives())
    told = await describe(
        conversations(Known([RegisteredConversation("c_1", "t", NOW)], {"c_1": overview})), "t", "c_1"
    )
    assert told == (
        "Conversation c_1: 1 request.\nCompactions: 1.\n"
        "Latest: round 1 by prune, just now, 1 message removed."
    )


async def test_the_only_conversation_need_not_be_named_and_several_are_listed() -> None:
    known = Known([RegisteredConversation("c_9", "other", NOW)])
    assert await describe(conversations(known), "t", None) == NONE_YET
    known.seen.append(RegisteredConversation("c_1", "t", NOW))
    known.overviews["c_1"] = IDLE
    told = "Conversation c_1: 0 requests.\nCompactions: 0."
    assert await describe(conversations(known), "t", None) == told
    known.seen += [RegisteredConversation(f"c_{number}", "t", NOW - 90_000) for number in range(20, 40)]
    first, *rows = (await describe(conversations(known), "t", None)).splitlines()
    assert first == "Choose one of these conversations (most recently used first):"
    assert rows[:2] == ["- c_1, last used just now", "- c_20, last used 1 d ago"]
    assert len(rows) == MAX_LISTED


async def test_another_tenant_s_conversation_is_as_absent_as_none() -> None:
    known = Known([RegisteredConversation("c_9", "other", NOW)], {"c_9": IDLE})
    asked = conversations(known)
    answers = {
        answer
        for name in ("c_9", "c_0")
        for answer in (
            await describe(asked, "t", name),
            await compact(asked, "t", name),
            await asked.explain_if_unavailable("t", name),
        )
    }
    assert (answers, known.compacted) == ({NOT_FOUND}, [])


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (RequestRefusedError(404, "gone", "gone"), NOT_FOUND),
        (StoreUnavailableError("store-failed"), STORE_UNREACHABLE),
    ],
)
async def test_what_goes_away_meanwhile_is_a_sentence(error: Exception, wanted: str) -> None:
    asked = conversations(Known([RegisteredConversation("c_1", "t", NOW)], error=error))
    assert [
        await describe(asked, "t", "c_1"),
        await compact(asked, "t", "c_1"),
    ] == [
        wanted,
        wanted,
    ]


async def test_a_store_that_does_not_answer_is_told_of() -> None:
    asked = conversations(Known(), away=True)
    assert [
        await describe(asked, "t", None),
        await describe(asked, "t", "c_1"),
    ] == [
        STORE_UNREACHABLE,
        STORE_UNREACHABLE,
    ]
    assert await compact(asked, "t", "c_1") == STORE_UNREACHABLE
