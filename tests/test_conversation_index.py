"""Which conversation a request without an id continues, where several replicas add heads at once."""

import asyncio
import hashlib
from collections.abc import AsyncIterator

import pytest

from proxy.adapters.memory_store import MemoryStore
from proxy.conversation_index import KEPT_HEADS, ConversationIndex
from proxy.core.digest import message_digest, prefix_digests
from proxy.core.message import Message
from proxy.storage.records import Records


def said(*texts: str) -> list[Message]:
    """A conversation that begins with the user."""
    made = [Message(("user", "assistant")[at % 2], text) for at, text in enumerate(texts)]
    return [each.known(message_digest(each), 1) for each in made]


def mint(tenant: str, made_of: bytes) -> str:
    return "c_" + hashlib.sha256(tenant.encode() + made_of).hexdigest()[:8]


@pytest.fixture
async def replicas() -> AsyncIterator[tuple[ConversationIndex, ConversationIndex]]:
    """Two on one store."""
    store = MemoryStore()
    one, other = (ConversationIndex(Records(store, print), mint, 3_600) for _ in range(2))
    yield one, other
    await one.close()
    await other.close()


async def find(index: ConversationIndex, messages: list[Message], *, has_tools: bool = True) -> str | None:
    found = await index.find("t", messages, prefix_digests(messages), has_tools=has_tools)
    await index.close()
    return found


async def test_of_two_that_went_on_from_one_head_at_the_same_time_the_second_gets_an_id(
    replicas: tuple[ConversationIndex, ConversationIndex],
) -> None:
    one, other = replicas
    first = await find(one, said("Hi"))
    ann, bob = said("Hi", "ok", "I am Ann"), said("Hi", "ok", "I am Bob")
    both = await asyncio.gather(find(one, ann), find(other, bob))
    assert first in both
    later = [await find(one, [*each, *said("", "ok", "Go on")[1:]]) for each in (ann, bob)]
    assert first in later
    assert len(set(later)) == 2


async def test_a_client_that_moves_its_last_messages_goes_on(
    replicas: tuple[ConversationIndex, ConversationIndex],
) -> None:
    one, _ = replicas
    beginning = ("Example", "Ok.")
    first = await find(one, said(*beginning, "files of today", "Ok.", "Add a test for the parser"))
    moved = said(*beginning, "Add a test for the parser", "Done.", "files of now", "Ok.", "Now the docs")
    assert await find(one, moved) == first
    stranger = said(*beginning, "Rename the module", "Done.", "files of now", "Ok.", "Now the docs")
    assert await find(one, stranger) != first


async def test_what_has_left_its_list_lends_no_name_to_another(
    replicas: tuple[ConversationIndex, ConversationIndex],
) -> None:
    one, _ = replicas
    names = set()
    for number in range(2 * KEPT_HEADS):
        names.add(await find(one, said("Hi")))
        await find(one, said("Hi", "ok", f"I am {number}"))
    assert len(names) == 2 * KEPT_HEADS


async def test_a_request_without_tools_that_repeats_a_beginning_stands_beside(
    replicas: tuple[ConversationIndex, ConversationIndex],
) -> None:
    one, _ = replicas
    first = await find(one, said("Hi"))
    assert await find(one, said("Hi", "ok", "Go on")) == first
    assert await find(one, said("Hi"), has_tools=False) is None
    assert await find(one, said("Hi")) not in {first, None}


async def test_a_client_that_rewrites_its_first_message_goes_on(
    replicas: tuple[ConversationIndex, ConversationIndex],
) -> None:
    one, _ = replicas
    done = [text for step in range(6) for text in (f"Step {step}.", f"Result {step} of the build.")]
    first = await find(one, said("Context:\nyesterday", *done))
    assert await find(one, said("Context:\ntoday", *done, "All is read.", "Now the tests")) == first
    other = [text.replace("build", "lint") for text in done]
    assert await find(one, said("Context:\ntoday", *other)) != first


async def test_requests_that_are_looked_for_in_another_order_are_one_conversation(
    replicas: tuple[ConversationIndex, ConversationIndex],
) -> None:
    one, other = replicas
    first = await find(one, said("Hi"))
    assert await find(one, said("Hi", "ok", "Go on", "Yes.", "And on")) == first
    assert await find(other, said("Hi", "ok", "Go on")) == first
    assert await find(one, said("Hi", "ok", "Go on", "Yes.", "And on", "Yes.", "Stop")) == first


async def test_two_sessions_of_aider_with_files_and_maps_are_two_conversations(
    replicas: tuple[ConversationIndex, ConversationIndex],
) -> None:
    one, _ = replicas

    def shown(at: int) -> list[str]:
        return [
            f"Here are summaries of some files present in my git repository.\n{at}",
            "Ok, I won't try and edit those files without asking first.",
        ]

    def files(at: int) -> list[str]:
        return [
            f"I have *added these files to the chat* so you can go ahead and edit them.\n{at}",
            "Ok, any changes I propose will be to those files.",
        ]

    found: dict[str, set[str | None]] = {}
    done: dict[str, list[str]] = {"Add a parser": [], "Rename a module": []}
    for turn in range(4):
        for task, past in done.items():
            asked = f"{task}\nline {turn}" if turn == 0 else f"{task}, step {turn}"
            messages = said(*shown(turn), *past, *files(turn), f"{asked}\n\nUse the format of blocks.")
            found.setdefault(task, set()).add(await find(one, messages))
            past += [asked, f"Done with {task}, {turn}."]
    assert [len(ids) for ids in found.values()] == [1, 1]
    assert not found["Add a parser"] & found["Rename a module"]


async def test_a_restored_session_of_aider_goes_on(
    replicas: tuple[ConversationIndex, ConversationIndex],
) -> None:
    one, _ = replicas
    shown = (
        "Here are summaries of some files present in my git repository.\nmap",
        "Ok, I won't try and edit those files without asking first.",
    )
    steps = [(f"Go on with line {step}.", f"Step {step} is done.") for step in range(8)]
    said_before = [text for step in steps for text in step]
    first = None
    for step in range(1, 9):
        first = await find(one, said(*shown, *said_before[: 2 * step - 1]))
    kept = [f"{text}  \n" for step in steps[4:] for text in step]
    restored = said(*shown, "I spoke to you previously.\nA summary.", "Ok.", *kept, "Now the tests.")
    assert await find(one, restored) == first
    strange = [text.replace("Step", "Part") for text in kept]
    other = said(*shown, "I spoke to you previously.\nA summary.", "Ok.", *strange, "Now the docs.")
    assert await find(one, other) != first
