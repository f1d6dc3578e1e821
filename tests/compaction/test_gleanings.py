"""What messages say and show, remembered within bounds."""

import asyncio
import threading

import pytest

from compaction_proxy.compaction import ledger_cache
from compaction_proxy.compaction.ledger_cache import RECORD_CHARACTERS, Gleanings
from compaction_proxy.core.ledger.actions import Action, read_action
from compaction_proxy.core.ledger.active import Standing
from compaction_proxy.core.ledger.facts import shown
from compaction_proxy.core.ledger.frontier import read_frontier
from compaction_proxy.core.ledger.statements import Statement, statements
from compaction_proxy.core.message import Call, Message
from compaction_proxy.support.offload import beside

PORT, HOST = "The port is 8080.", "The host is db.internal."


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that are read from now on."""
    found: list[str] = []

    def reading(text: str) -> tuple[Statement, ...]:
        found.append(text)
        return statements(text)

    monkeypatch.setattr(ledger_cache, "statements", reading)
    return found


def users(*texts: str) -> list[Message]:
    return [Message("user", text) for text in texts]


def test_a_text_is_read_once(read: list[str]) -> None:
    held = Gleanings()
    assert [held.said(PORT), held.said(HOST), held.said(PORT)] == [
        statements(PORT),
        statements(HOST),
        statements(PORT),
    ]
    assert read == [PORT, HOST]


def test_what_was_not_asked_for_longest_is_forgotten_first(read: list[str]) -> None:
    held = Gleanings(max_held=2 * (RECORD_CHARACTERS + len(HOST)))
    for text in (PORT, HOST, PORT, "And now?", PORT, HOST):
        held.said(text)
    assert read == [PORT, HOST, "And now?", HOST]


def test_what_a_message_shows_depends_on_all_that_it_is_read_from() -> None:
    held = Gleanings()
    calls = (Call("1", "read", '{"path":"src/a.py"}'),)
    asked = [
        Message("assistant", "ValueError: bad"),
        Message("tool", "ValueError: bad", answers=("1",)),
        Message("assistant", "ValueError: bad", calls=calls),
    ]
    assert [held.seen(each) for each in asked * 2] == [shown(each) for each in asked * 2]


def test_of_a_list_that_has_grown_only_what_is_new_is_read(read: list[str]) -> None:
    held = Gleanings(max_held=RECORD_CHARACTERS)  # it holds no more than the last list
    held.standing(users(PORT, HOST))
    grown = held.standing(users(PORT, HOST, "The port is 9090."))
    assert read == [PORT, HOST, "The port is 9090."]
    assert grown.outdated == Standing(users(PORT, HOST, "The port is 9090.")).outdated


def test_an_edited_last_message_has_nothing_else_read_again(read: list[str]) -> None:
    held = Gleanings()
    held.standing(users(PORT))
    held.standing(users(PORT, HOST))
    read.clear()
    edited = held.standing(users(PORT, "The port is 9090."))
    assert read == ["The port is 9090."]
    assert edited.outdated.texts == {0: (PORT,)}


def test_the_same_list_twice_is_remembered_once() -> None:
    held = Gleanings()
    for _ in range(3):
        held.standing(users(PORT, HOST))
    assert len(held._standings) == 1


def test_of_a_conversation_the_last_two_lists_are_remembered() -> None:
    held = Gleanings()
    for length in range(1, 9):
        held.standing(users(*(f"Step {step}." for step in range(length))))
    assert [len(each) for each in held._standings] == [7, 8]


def test_of_a_conversation_that_has_grown_the_frontier_reads_only_what_is_new(
    read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    acted: list[str] = []

    def act(call: Call, result: str | None) -> Action:
        acted.append(call.arguments)
        return read_action(call, result)

    monkeypatch.setattr(ledger_cache, "read_action", act)
    held = Gleanings()
    messages: list[Message] = []
    for step in range(5):
        call = Call("1", "edit", f'{{"path":"{step}.py"}}')
        messages += [*users(f"Please fix {step}.py."), Message("assistant", calls=(call,))]
        messages += [
            Message("tool", "ok", answers=("1",)),
            Message("assistant", f"The file {step}.py is fixed."),
        ]
        read.clear()
        acted.clear()
        assert held.frontier(messages) == read_frontier(messages)
        assert read == [f"Please fix {step}.py."]
        assert acted == [call.arguments]


async def test_work_beside_the_loop_is_done_one_piece_at_a_time() -> None:
    running, most = 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.002)
        with lock:
            running -= 1

    await asyncio.gather(*(beside(work) for _ in range(10)))
    assert most == 1


async def test_work_that_nobody_waits_for_any_more_is_left_out() -> None:
    begun, done, go = threading.Event(), [], threading.Event()

    def first() -> None:
        begun.set()
        go.wait(10)

    running = asyncio.create_task(beside(first))
    await asyncio.to_thread(begun.wait, 10)
    left = asyncio.create_task(beside(lambda: done.append("left")))
    stays = asyncio.create_task(beside(lambda: done.append("stays")))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait([left])
    go.set()
    await asyncio.gather(running, stays)
    assert done == ["stays"]
