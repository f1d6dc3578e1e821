"""What messages say and show, remembered within bounds."""

import gc
import sys
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from compaction_proxy.compaction import ledger_cache
from compaction_proxy.compaction.ledger_cache import MAX_HELD_BYTES, LedgerCache
from compaction_proxy.core.ledger.actions import Action, read_action
from compaction_proxy.core.ledger.active import ActiveStatements
from compaction_proxy.core.ledger.facts import list_message_facts
from compaction_proxy.core.ledger.frontier import read_frontier
from compaction_proxy.core.ledger.statements import Statement, read_statements
from compaction_proxy.core.message import Message, MessageToolCall
from compaction_proxy.support.lru import LruCache

PORT, HOST = "The port is 8080.", "The host is db.internal."


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that are read from now on."""
    found: list[str] = []

    def reading(text: str) -> tuple[Statement, ...]:
        found.append(text)
        return read_statements(text)

    monkeypatch.setattr(ledger_cache, "read_statements", reading)
    return found


def measure_memory(make: Callable[[], object]) -> int:
    """The bytes that what is made holds."""
    tracemalloc.start()
    try:
        held = make()
        gc.collect()
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    del held
    return size


def say_rules(tenant: int, count: int) -> list[Message]:
    return users(
        *(
            f"You must never use library {tenant}-{number}. Always write to /srv/{tenant}/{number}."
            for number in range(count)
        )
    )


def users(*texts: str) -> list[Message]:
    return [Message("user", text) for text in texts]


def test_a_text_is_read_once(read: list[str]) -> None:
    held = LedgerCache()
    assert [held.get_statements(PORT), held.get_statements(HOST), held.get_statements(PORT)] == [
        read_statements(PORT),
        read_statements(HOST),
        read_statements(PORT),
    ]
    assert read == [PORT, HOST]


def test_what_was_not_asked_for_longest_is_forgotten_first(read: list[str]) -> None:
    held = LedgerCache()
    held.get_statements(HOST)
    held = LedgerCache(max_held_bytes=2 * held._results._bytes + 100)
    read.clear()
    for text in (PORT, HOST, PORT, "And now?", PORT, HOST):
        held.get_statements(text)
    assert read == [PORT, HOST, "And now?", HOST]


def test_the_memory_of_the_rules_of_many_tenants_stays_within_the_limit() -> None:
    limit = 1_000_000

    def read_rules() -> LedgerCache:
        held = LedgerCache(max_held_bytes=limit)
        for tenant in range(8):
            messages = say_rules(tenant, 300)
            held.get_active_statements(messages)
            held.get_frontier(messages)
        return held

    assert measure_memory(read_rules) < 2 * limit


def test_statements_of_more_memory_than_the_limit_are_not_held() -> None:
    held = LedgerCache(max_held_bytes=20_000)
    held.get_active_statements(say_rules(0, 300))
    assert not held._active_statements


def test_of_8_000_rules_only_the_new_one_is_read(read: list[str]) -> None:
    held = LedgerCache()
    held.get_active_statements(say_rules(0, 8_000))
    read.clear()
    grown = [*say_rules(0, 8_000), *users(PORT)]
    held.get_active_statements(grown)
    held.get_frontier(grown)
    assert read == [PORT]
    assert sum(each.counted_bytes for each in held._active_statements.values()) <= MAX_HELD_BYTES


def test_what_a_message_shows_depends_on_all_that_it_is_read_from() -> None:
    held = LedgerCache()
    calls = (MessageToolCall("1", "read", '{"path":"src/a.py"}'),)
    asked = [
        Message("assistant", "ValueError: bad"),
        Message("tool", "ValueError: bad", answered_call_ids=("1",)),
        Message("assistant", "ValueError: bad", calls=calls),
    ]
    assert [held.get_shown_facts(each) for each in asked * 2] == [
        list_message_facts(each) for each in asked * 2
    ]


def test_of_a_list_that_has_grown_only_what_is_new_is_read(read: list[str]) -> None:
    held = LedgerCache()
    held._results = LruCache(0)  # it holds no single texts
    held.get_active_statements(users(PORT, HOST))
    grown = held.get_active_statements(users(PORT, HOST, "The port is 9090."))
    assert read == [PORT, HOST, "The port is 9090."]
    assert grown.superseded == ActiveStatements(users(PORT, HOST, "The port is 9090.")).superseded


def test_an_edited_last_message_has_nothing_else_read_again(read: list[str]) -> None:
    held = LedgerCache()
    held.get_active_statements(users(PORT))
    held.get_active_statements(users(PORT, HOST))
    read.clear()
    edited = held.get_active_statements(users(PORT, "The port is 9090."))
    assert read == ["The port is 9090."]
    assert edited.superseded.texts_by_message == {0: (PORT,)}


def test_the_same_list_twice_is_remembered_once() -> None:
    held = LedgerCache()
    for _ in range(3):
        held.get_active_statements(users(PORT, HOST))
    assert len(held._active_statements) == 1


def test_of_a_conversation_the_last_two_lists_are_remembered() -> None:
    held = LedgerCache()
    for length in range(1, 9):
        held.get_active_statements(users(*(f"Step {step}." for step in range(length))))
    assert [len(each) for each in held._active_statements] == [7, 8]


def test_of_a_conversation_that_has_grown_the_frontier_reads_only_what_is_new(
    read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    acted: list[str] = []

    def act(call: MessageToolCall, result: str | None) -> Action:
        acted.append(call.arguments)
        return read_action(call, result)

    monkeypatch.setattr(ledger_cache, "read_action", act)
    held = LedgerCache()
    messages: list[Message] = []
    for step in range(5):
        call = MessageToolCall("1", "edit", f'{{"path":"{step}.py"}}')
        messages += [*users(f"Please fix {step}.py."), Message("assistant", calls=(call,))]
        messages += [
            Message("tool", "ok", answered_call_ids=("1",)),
            Message("assistant", f"The file {step}.py is fixed."),
        ]
        read.clear()
        acted.clear()
        assert held.get_frontier(messages) == read_frontier(messages)
        assert read == [f"Please fix {step}.py."]
        assert acted == [call.arguments]


def test_threads_that_share_a_full_cache_read_what_each_would_read_alone() -> None:
    conversations = [
        users(*(f"{name} {number}: always use port {number}." for number in range(40))) for name in "ABCD"
    ]
    expected = [
        (ActiveStatements(messages).superseded, read_frontier(messages)) for messages in conversations
    ]
    held = LedgerCache(max_held_bytes=20_000)

    def read_growing(messages: list[Message]) -> object:
        for length in range(1, len(messages)):
            held.get_active_statements(messages[:length])
            held.get_frontier(messages[:length])
        return held.get_active_statements(messages).superseded, held.get_frontier(messages)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(conversations)) as pool:
            assert list(pool.map(read_growing, conversations)) == expected
    finally:
        sys.setswitchinterval(interval)
    assert held._results._bytes == sum(size for _, size in held._results._held.values())
