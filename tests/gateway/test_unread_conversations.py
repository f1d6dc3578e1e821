"""Conversations of requests that are forwarded unread: which are searched, and what of a request counts."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from compaction_proxy.compaction.conversation_index import ConversationIndex
from compaction_proxy.gateway.unread_conversations import (
    BURST_BYTES,
    BYTES_PER_S,
    MAX_BYTES,
    REQUEST_BYTES,
    UnreadConversationFinder,
)
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.wires.chat.wire import CHAT
from tests.helpers.journals import ignored

TENANT = "t"
TALK = [
    {"role": "user", "content": "Find the fault in the parser, please."},
    {"role": "assistant", "content": "It is in the lexer."},
    {"role": "user", "content": "Then mend it."},
]


class Clock:
    s = 100.0

    def __call__(self) -> float:
        return self.s


class Bench:
    """A finder on a clock of its own, and the index behind it."""

    def __init__(self) -> None:
        self.clock = Clock()
        mint = lambda tenant, made_of: f"c_{tenant}_{made_of.hex()[:8]}"  # noqa: E731
        self.index = ConversationIndex(RecordStore(MemoryStore(), ignored), mint, 3_600)
        self.finder = UnreadConversationFinder(CHAT, self.index, clock=self.clock)

    async def find(
        self, messages: Any, *, tenant: str = TENANT, client: str = "", **members: Any
    ) -> str | None:
        raw = messages if isinstance(messages, bytes) else body(messages, **members)
        search = self.finder.start_search(tenant, raw, client)
        assert search is not None
        return await search

    def starts(self, size: int) -> bool:
        """Whether a request of this size is searched; it holds no messages."""
        search = self.finder.start_search(TENANT, b" " * size, "")
        if search is not None:
            search.cancel()
        return search is not None


def body(messages: Any, **members: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **members}).encode()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.index.close()


async def test_a_request_that_goes_on_has_the_id_of_the_one_before_and_another_has_its_own(
    bench: Bench,
) -> None:
    first = await bench.find(TALK[:1])
    assert first is not None
    assert await bench.find(TALK) == first
    assert await bench.find([{"role": "user", "content": "Write a poem about rain."}]) not in {None, first}
    assert await bench.find(TALK, tenant="u") not in {None, first}


async def test_what_the_operator_says_does_not_make_another_conversation(bench: Bench) -> None:
    first = await bench.find([{"role": "system", "content": "It is Monday."}, *TALK[:1]])
    assert await bench.find([{"role": "system", "content": "It is Tuesday."}, *TALK]) == first


async def test_project_instructions_of_a_known_client_do_not_make_another_conversation(bench: Bench) -> None:
    def instruct(rule: str) -> dict[str, str]:
        start = "# AGENTS.md instructions for /repo\n\n<INSTRUCTIONS>\n"
        return {"role": "user", "content": f"{start}{rule}\n</INSTRUCTIONS>"}

    first = await bench.find([instruct("Use tabs."), *TALK[:1]], client="codex")
    assert first is not None
    assert await bench.find([instruct("Use spaces."), *TALK], client="codex") == first


async def test_a_request_for_a_title_belongs_to_no_conversation_unless_it_has_tools(bench: Bench) -> None:
    asked = [{"role": "user", "content": "Generate a concise, 3-5 word title for this conversation."}]
    tool = {"type": "function", "function": {"name": "open"}}
    assert await bench.find(asked) is None
    assert await bench.find(asked, tools=[tool]) is not None


@pytest.mark.parametrize(
    "raw", [b"no json", b"{}", b'{"messages":7}', body([{"role": "system", "content": "x"}])]
)
async def test_a_body_without_a_conversation_has_no_id(bench: Bench, raw: bytes) -> None:
    assert await bench.find(raw) is None


async def test_a_large_request_is_not_searched(bench: Bench) -> None:
    assert (bench.starts(MAX_BYTES + 1), bench.starts(MAX_BYTES)) == (False, True)


async def test_only_so_many_bytes_are_searched_at_once_and_more_as_time_passes(bench: Bench) -> None:
    size = BURST_BYTES // 4 - REQUEST_BYTES
    assert [bench.starts(size) for _ in range(5)] == [True] * 4 + [False]
    assert not bench.starts(0)  # a request costs something whatever its size
    bench.clock.s += BURST_BYTES / 4 / BYTES_PER_S
    assert [bench.starts(size) for _ in range(2)] == [True, False]
    bench.clock.s += 1e6  # a pause fills the allowance, and no more than that
    assert [bench.starts(size) for _ in range(5)] == [True] * 4 + [False]
