"""What models and agents are answered, whatever they ask, in whatever shape."""

import json
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compaction_proxy.core.search_tool import LINE_RANGE_HELP, NO_HITS_TEXT, UNKNOWN_ID_TEXT
from compaction_proxy.recall.archive import ArchivedRound, RecalledMessage, RemovedMessage
from compaction_proxy.recall.search import ArchiveSearch, SearchHit
from compaction_proxy.recall.tool import (
    MAX_QUERY_CHARACTERS,
    STORE_UNAVAILABLE_TEXT,
    USAGE_TEXT,
    RecallContext,
    RecallTool,
)

OURS = RecallContext("t", "c_1")
MADE = ArchivedRound(conversation="c_1", strategy="anchored", checkpoint_place=b"p", number=1, made_at=0.0)
MESSAGE = RecalledMessage(RemovedMessage("m_1", 4, "tool", "one\ntwo\nthree"), MADE)


def hit(conversation: str = "c_1") -> SearchHit:
    return SearchHit(
        message_id="m_1", index=4, role="tool", round=1, strategy="anchored", at=0.0, score=1.0,
        snippet="two", conversation=conversation, turn=2,
    )  # fmt: skip


class Scripted:
    """Finds what it is told to, and remembers what it was asked.

    Attributes:
        asked: Arguments of each call. A query with a phrase finds nothing.
        snippet_characters: Size of snippets in the last search.
    """

    def __init__(self, hits: list[SearchHit], messages: dict[str | None, RecalledMessage]) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.snippet_characters = 0
        self._hits = hits
        self._messages = messages

    async def search(
        self,
        tenant: str,
        conversation: str | None,
        query: str,
        limit: int,
        *,
        known_ids: Any,
        root: bytes | None,
        snippet_characters: int,
    ) -> list[SearchHit]:
        self.asked.append((tenant, conversation, query, limit))
        self.snippet_characters = snippet_characters
        return [] if '"' in query else self._hits

    async def find_message(
        self,
        tenant: str,
        conversation: str | None,
        message_id: str,
        *,
        known_ids: Any = frozenset(),
        root: bytes | None = None,
    ) -> RecalledMessage | None:
        self.asked.append((tenant, conversation, message_id))
        return self._messages.get(conversation)


class Bench:
    """A memory over scripted finds.

    Attributes:
        recall: What is asked.
        memory: What answers.
        counted: What was counted: who searched, and how that ended.
    """

    def __init__(
        self,
        hits: list[SearchHit],
        messages: dict[str | None, RecalledMessage] | None = None,
        *,
        away: bool = False,
    ) -> None:
        self.recall = Scripted(hits, messages or {})
        self.counted: list[tuple[str, str]] = []
        self.memory = RecallTool(
            cast("ArchiveSearch", self.recall),
            len,
            is_store_reachable=lambda: not away,
            on_search=lambda *told: self.counted.append(told),
        )


async def test_a_search_is_in_the_conversation_or_in_all_of_the_tenant_s() -> None:
    bench = Bench([hit(), hit("c_2")])
    text = await bench.memory.search(OURS, "q" * 2_000, limit=500)
    assert "[m_1 · tool · turn 2]\ntwo\n[m_1 · tool · turn 2 · conversation c_2]\ntwo\n" in text
    await bench.memory.search(OURS._replace(source="mcp"), "q", limit=-1, scope="tenant")
    assert bench.recall.asked == [("t", "c_1", "q" * MAX_QUERY_CHARACTERS, 20), ("t", None, "q", 1)]
    assert bench.counted == [("model", "found"), ("mcp", "found")]


async def test_words_of_a_phrase_that_occurs_nowhere_are_searched_instead() -> None:
    bench = Bench([hit()])
    assert "\ntwo\n" in await bench.memory.search(OURS, 'the "port 9999" of staging')
    assert [asked[2] for asked in bench.recall.asked] == [
        'the "port 9999" of staging',
        "the  port 9999  of staging",
    ]
    assert bench.counted == [("model", "found")]


async def test_few_hits_are_shown_with_more_of_what_stands_around_them() -> None:
    bench = Bench([hit()])
    shown = []
    for limit in (20, 5, 1):
        await bench.memory.search(OURS, "q", limit=limit)
        shown.append(bench.recall.snippet_characters)
    assert shown == [300, 1_000, 5_000]


async def test_who_asks_about_no_conversation_finds_nothing_in_it() -> None:
    bench = Bench([hit()], {None: MESSAGE})
    nobody = RecallContext("t", None)
    assert await bench.memory.search(nobody, "q") == NO_HITS_TEXT
    assert await bench.memory.read_message(nobody, "m_1") == UNKNOWN_ID_TEXT
    assert (bench.recall.asked, bench.counted) == ([], [("model", "nothing")])


async def test_a_message_is_looked_for_in_the_conversation_first() -> None:
    bench = Bench([], {None: MESSAGE})
    assert await bench.memory.read_message(OURS, "m_1") == UNKNOWN_ID_TEXT
    assert "\ntwo\n</" in await bench.memory.read_message(OURS, " m_1 ", "2", scope="tenant")
    assert bench.recall.asked == [("t", "c_1", "m_1"), ("t", "c_1", "m_1"), ("t", None, "m_1")]


async def test_a_store_that_is_away_is_told_of_where_nothing_is_found() -> None:
    bench = Bench([], away=True)
    assert [await bench.memory.search(OURS, "q"), await bench.memory.read_message(OURS, "m_1")] == [
        STORE_UNAVAILABLE_TEXT,
        STORE_UNAVAILABLE_TEXT,
    ]


@pytest.mark.parametrize(
    "arguments",
    ["", "{", "null", "[]", '"q"', "{}", '{"query": " "}', '{"query": true}', '{"query": ["a"]}',
     "[" * 99_999, '{"id": null}', '{"query": ' + "9" * 9_999 + "}", '{"q": "a"}'],
)  # fmt: skip
async def test_arguments_that_cannot_be_used_are_answered_with_what_is_wanted(arguments: str) -> None:
    bench = Bench([hit()])
    assert await bench.memory.answer_call(OURS, arguments) == USAGE_TEXT
    assert bench.recall.asked == []


async def test_a_call_asks_for_a_message_where_it_names_one() -> None:
    bench = Bench([hit()], {"c_1": MESSAGE})
    assert "\none\ntwo\n</" in await bench.memory.answer_call(
        OURS, '{"query": "q", "id": "m_1", "lines": "1-2"}'
    )
    assert "\nthree\n</" in await bench.memory.answer_call(OURS, '{"id": "m_1", "lines": 3}')
    assert await bench.memory.answer_call(OURS, '{"id": "m_1", "lines": "last"}') == LINE_RANGE_HELP
    assert "\ntwo\n</" in await bench.memory.answer_call(OURS, '{"query": 4141, "id": ""}')
    assert bench.recall.asked[-1] == ("t", "c_1", "4141", 5)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
_CALLS = st.dictionaries(st.sampled_from(["query", "id", "lines", "limit"]), _VALUES).map(json.dumps)


@settings(deadline=None, max_examples=100)
@given(_CALLS | st.text())
async def test_no_call_raises(arguments: str) -> None:
    bench = Bench([hit()], {"c_1": MESSAGE})
    assert await bench.memory.answer_call(OURS, arguments)
