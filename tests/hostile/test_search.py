"""Searching what was removed is no way to anything else: not to others, not to files, not for ever."""

import time

import pytest

from proxy.adapters.memory_store import MemoryStore
from proxy.archive import Round
from proxy.archiving import Original, archived
from proxy.core.message import Message
from proxy.history import History
from proxy.recall import MAX_HITS, SNIPPET_CHARACTERS, Recall
from proxy.storage.records import Records

DAY_S = 86_400.0
PATIENCE_S = 5.0
ROOT = bytes(32)
CONVERSATION = "c_1"


def ignored(_: object) -> None:
    """Nothing fails here."""


async def recall(texts: dict[str, list[str]]) -> Recall:
    """Over what a round has taken out of each tenant's conversation; all have one id and begin alike."""
    records = Records(MemoryStore(), ignored)
    history = History(records, DAY_S)
    for tenant, taken in texts.items():
        await history.rooted(tenant, CONVERSATION, ROOT)
        made = Round(CONVERSATION, "chained", bytes(64), 1, 1.0)
        messages = [Original(k, f"m_{tenant}{k}", 1, Message("tool", text)) for k, text in enumerate(taken)]
        items, line, _ = archived(tenant, ROOT, made, messages, DAY_S)
        await records.save(f"{items[0].key}:x", {}, ttl_s=DAY_S, also=[*items, line])
    return Recall(records, history)


@pytest.mark.parametrize(
    "query",
    ["canary", "CANARY-B", ".*", "c.n.ry", "canary|x", "[a-z]+", "*", "%", "' OR 1=1 --", "../../b",
     "{b}", "m_b0", "\x00", "(?s).+", '"' * 9 + "canary", "canary " * 5_000],
)  # fmt: skip
async def test_no_query_finds_what_another_tenant_has_under_the_same_id(query: str) -> None:
    found = await recall(
        {"a": ["all is well here", "m_b0 { is } *"], "b": ["canary-b: secret ' OR 1=1 -- ../../b"]}
    )
    hits = await found.search("a", CONVERSATION, query, known=frozenset({"m_b0"}))
    assert not [hit for hit in hits if "canary" in hit.snippet]
    assert await found.message("a", CONVERSATION, "m_b0", known=frozenset({"m_b0"})) is None


@pytest.mark.parametrize("query", [".*", "a.c", "(a+)+$", "[abc]+", "a|b", "\\w+", "^abc"])
async def test_a_pattern_is_a_text_like_any_other(query: str) -> None:
    found = await recall({"a": ["abc and a longer text", f"exactly {query} stands here"]})
    assert [hit.index for hit in await found.search("a", CONVERSATION, query)] == [1]


async def test_what_is_found_is_bounded_and_found_in_time_whatever_is_asked() -> None:
    found = await recall({"a": ["a" * 20_000 + " end"] * 200})
    started = time.process_time()
    hits = await found.search("a", CONVERSATION, "(a+)+$ aaaa " + "a" * 100_000, limit=10_000)
    assert hits == []
    hits = await found.search("a", CONVERSATION, "aaaa " + "a" * 100_000, limit=10_000)
    assert time.process_time() - started < PATIENCE_S
    assert len(hits) == MAX_HITS
    assert max(len(hit.snippet) for hit in hits) <= SNIPPET_CHARACTERS
