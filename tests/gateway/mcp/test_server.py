"""MCP with the official SDK's client, over HTTP and over stdio: every tool, for its own tenant only."""

import re
from typing import Any

import pytest
from mcp import Client

from tests.gateway.mcp.conftest import (
    CODE,
    THEIRS,
    Connected,
    Stack,
    over_http,
    refused,
    running,
    said,
)

LISTED = ["memory_search", "memory_get", "conversation_status", "compact_now"]
ABSENT = "c_" + "0" * 24
MOST_CHARACTERS = 8_000  # 2,000 tokens
NAMED = {"x_session_id": "ticket-4711"}


async def found_id(client: Client) -> str:
    """Id of the message with the planted code."""
    found = re.search(r"\[(m_\w+) · assistant", await said(client, "memory_search", query=CODE))
    assert found is not None
    return found[1]


async def test_every_tool_is_listed_and_answers(stack: Stack, connected: Connected) -> None:
    async with connected(stack, **NAMED) as client:
        tools = (await client.list_tools()).tools
        assert [tool.name for tool in tools] == LISTED
        assert CODE in await said(client, "memory_search", query="code of the rollback", limit=1)
        read = await said(client, "memory_get", id=await found_id(client), lines="1")
        assert f"Gladly. The code of the rollback is {CODE}." in read
        status = await said(client, "conversation_status")
        assert status.startswith(f"Conversation {stack.conversation}: ")
        assert "Compactions: 1." in status
        compacts = f"The next request of conversation {stack.conversation} will be compacted."
        assert await said(client, "compact_now") == compacts
        assert "The next request will be compacted." in await said(client, "conversation_status")


async def test_another_key_finds_nothing_and_learns_nothing(stack: Stack, connected: Connected) -> None:
    async with over_http(stack) as ours:
        message = await found_id(ours)
    async with connected(stack, THEIRS, **NAMED) as client:
        for scope in ("conversation", "tenant"):
            assert CODE not in await said(client, "memory_search", query=CODE, scope=scope)
        assert await said(client, "memory_get", id=message) == "There is no removed message with this id."
        for name in (stack.conversation, ABSENT):  # told apart by nothing
            for tool in ("memory_search", "conversation_status", "compact_now"):
                arguments: dict[str, Any] = {"query": CODE} if tool == "memory_search" else {}
                told = await refused(client, tool, conversation=name, **arguments)
                assert told == "This conversation does not exist."


async def test_a_connection_that_names_no_conversation_searches_all_of_the_key(stack: Stack) -> None:
    async with over_http(stack) as client:
        found = await said(client, "memory_search", query=CODE)
        assert f"conversation {stack.conversation}]" in found
        assert await said(client, "memory_search", query=CODE, conversation=stack.conversation) != found
        assert (await said(client, "conversation_status")).startswith(f"Conversation {stack.conversation}: ")


async def test_hostile_text_stays_data(stack: Stack) -> None:
    async with over_http(stack, **NAMED) as client:
        found = await said(client, "memory_search", query="password zyxwvut")
        first = re.search(r"\[(m_\w+) · assistant", found)
        assert first is not None
        for text in (found, await said(client, "memory_get", id=first[1])):
            begin, end = re.findall(r"</?recalled-[0-9a-f]{16}>", text)
            assert text.index(begin) < text.index("zyxwvut") < text.index(end) == len(text) - len(end)
            assert "<|" not in text
            assert len(text) <= MOST_CHARACTERS


@pytest.mark.parametrize(
    ("tool", "arguments", "wanted"),
    [
        ("memory_search", {}, "`query` must be a text."),
        ("memory_search", {"query": ""}, "`query` must be given."),
        ("memory_search", {"query": ["x"]}, "`query` must be a text."),
        ("memory_search", {"query": "x", "limit": 0}, "`limit` must be 1 to 20."),
        ("memory_search", {"query": "x", "limit": True}, "`limit` must be a whole number."),
        ("memory_search", {"query": "x", "scope": "world"}, "`scope` must be conversation or tenant."),
        (
            "memory_search",
            {"query": "x", "tenant": "y"},
            "memory_search takes query, conversation, scope, limit, and nothing else.",
        ),
        (
            "memory_search",
            {"query": "x", "scope": "conversation"},
            "`conversation` must be the id of a conversation (c_…). conversation_status lists them.",
        ),
        (
            "memory_get",
            {"id": "m_1", "lines": "all"},
            '`lines` must be a range such as "1-40", counted from 1.',
        ),
        (
            "compact_now",
            {"conversation": "mine"},
            "`conversation` must be the id of a conversation (c_…). conversation_status lists them.",
        ),
        ("drop_tables", {}, f"Unknown tool; the tools are {', '.join(LISTED)}."),
    ],
)
async def test_odd_arguments_are_refused_in_a_sentence(
    stack: Stack, tool: str, arguments: dict[str, Any], wanted: str
) -> None:
    async with over_http(stack, mode="legacy") as client:
        assert await refused(client, tool, **arguments) == wanted


async def test_a_dead_store_gives_a_sentence() -> None:
    async with running() as (url, store), over_http(Stack(url), **NAMED) as client:
        store.dead = True
        texts = [
            await said(client, "memory_search", query="anything"),
            await said(client, "memory_get", id="m_0123456789ab"),
            await said(client, "conversation_status"),
            await said(client, "compact_now"),
        ]
    assert texts == [
        *["What was removed cannot be searched right now: the store does not answer. Go on without it."] * 2,
        *["The store of the proxy does not respond. Try again later."] * 2,
    ]
