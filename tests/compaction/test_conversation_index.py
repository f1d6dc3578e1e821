"""Which conversation a request without an id continues, where several replicas add heads at once."""

import asyncio
import gc
import hashlib
import time
from collections.abc import AsyncIterator

import pytest

from compaction_proxy.compaction.conversation_index import KEPT_HEADS, ConversationIndex
from compaction_proxy.core.digest import compute_message_digest, compute_prefix_digests
from compaction_proxy.core.message import Message, MessageToolCall
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore


def said(*texts: str) -> list[Message]:
    """A conversation that begins with the user."""
    made = [Message(("user", "assistant")[at % 2], text) for at, text in enumerate(texts)]
    return [each.with_digest_and_tokens(compute_message_digest(each), 1) for each in made]


def worked(task: str, *results: str) -> list[Message]:
    """An agent's task and calls, whose ids many models number, with what tools said to each."""
    made = [Message("user", task)]
    for step, result in enumerate(results):
        call = MessageToolCall(f"functions.ls:{step}", "ls", "{}")
        made += [Message("assistant", calls=(call,)), Message("tool", result, answered_call_ids=(call.id,))]
    return [each.with_digest_and_tokens(compute_message_digest(each), 1) for each in made]


def mint(tenant: str, made_of: bytes) -> str:
    return "c_" + hashlib.sha256(tenant.encode() + made_of).hexdigest()[:8]


@pytest.fixture
async def replicas() -> AsyncIterator[tuple[ConversationIndex, ConversationIndex]]:
    """Two on one store."""
    store = MemoryStore()
    one, other = (ConversationIndex(RecordStore(store, print), mint, 3_600) for _ in range(2))
    yield one, other
    await one.close()
    await other.close()


async def find(index: ConversationIndex, messages: list[Message], *, has_tools: bool = True) -> str | None:
    found = await index.find_conversation(
        "t", messages, compute_prefix_digests(messages), has_tools=has_tools
    )
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


async def test_a_conversation_that_its_client_has_compacted_goes_on(
    replicas: tuple[ConversationIndex, ConversationIndex],
) -> None:
    one, _ = replicas
    steps = [text for step in range(20) for text in (f"Step {step} is next.", f"Step {step} is done.")]
    first = None
    for number in range(1, 20):
        first = await find(one, said("Do all steps.", *steps[1 : 2 * number]))
        await find(one, said(f"Question {number}", "Answer."))
    summary = "The conversation before this point was compacted.\nSteps 0 to 9 are done."
    compacted = said(summary, *steps[21:])
    assert await find(one, compacted) == first
    assert await find(one, [*compacted, *said("", "", "Thanks.", "Bye.", "And now?")[2:]]) == first
    other = said(summary, *(text.replace("done", "left out") for text in steps[21:]))
    assert await find(one, other) != first


EXAMPLES = ("Is 7 prime?", "Yes.", "Is 8 prime?", "No.")
Replicas = tuple[ConversationIndex, ConversationIndex]


@pytest.mark.parametrize("others", [0, KEPT_HEADS], ids=["few", "many"])
async def test_a_conversation_that_says_later_what_another_says_now_is_not_that_one(
    replicas: Replicas, others: int
) -> None:
    one, _ = replicas
    await find(one, said(*EXAMPLES, "I lost my card"))
    await find(one, said(*EXAMPLES, "I lost my card", "When?", "Today"))
    for number in range(others):
        await find(one, said(*EXAMPLES, f"Question {number}"))
    first = await find(one, said(*EXAMPLES, "Hello"))
    edited = said(*EXAMPLES, "My card was stolen", "Oh.", "Hello")
    assert await find(one, edited) != first
    assert await find(one, said(*EXAMPLES, "Hello", "Hi.", "And now?")) == first


async def test_a_question_that_another_asked_later_shows_no_moved_messages(replicas: Replicas) -> None:
    one, _ = replicas
    first = await find(one, said(*EXAMPLES, "Good morning", "Hello!", "What do I owe?"))
    # The first request of the other one was too large to be listed, or came while the process was busy.
    other = said(*EXAMPLES, "What do I owe?", "Nothing.", "Thanks", "Bye.", "And now?")
    assert await find(one, other) != first


async def test_texts_behind_one_line_are_two_conversations(replicas: Replicas) -> None:
    one, _ = replicas
    first = await find(one, said(*EXAMPLES, "Summarise this text:\nAnn owes nothing."))
    # The first request of the other one was too large to be listed, or came while the process was busy.
    other = said(*EXAMPLES, "Summarise this text:\nBob owes a lot.", "Bob is in debt.", "Shorter")
    assert await find(one, other) != first


async def test_a_client_that_adds_paragraphs_to_its_latest_message_goes_on(replicas: Replicas) -> None:
    one, _ = replicas
    rules = "\n\n".join(f"# Rule {number}" for number in range(40))
    past = ["Add a parser", "Done."]
    found = set()
    for turn in range(4):
        task = f"Step {turn} \n of the plan.\n\nKeep it short."
        found.add(await find(one, said(*past, f"{task}\n\n{rules}")))
        past += [task, f"Done with step {turn}."]
    assert len(found) == 1


async def test_examples_behind_a_text_of_each_user_make_no_conversation(replicas: Replicas) -> None:
    one, _ = replicas
    examples = [text for k in range(4) for text in (f"Question {k}", f"Answer {k}")]
    found = [
        await find(one, said(f"About the user:\n{name}", "Noted.", *examples, *more))
        for name in ("Ann", "Bob", "Eve")
        for more in (("Hello",), ("Hello", "Hi.", "What is my name?"))
    ]
    assert found[0::2] == found[1::2]
    assert len(set(found)) == 3
    late = said(
        "About the user:\nIda", "Noted.", *examples, "Hello", "Hi.", "What is my name?", "Ida.", "So?"
    )
    assert await find(one, late) not in found


async def test_words_that_repeat_show_no_conversation(replicas: Replicas) -> None:
    one, _ = replicas
    first = await find(one, said("Do this task:\nthe parser", *["Done.", "Go on"] * 6))
    assert await find(one, said("Do this task:\nthe docs", *["Done.", "Go on"] * 8)) != first


@pytest.mark.parametrize("words", [1, 400], ids=["short", "long"])
async def test_conversations_are_apart_where_only_results_of_tools_differ(
    replicas: Replicas, words: int
) -> None:
    one, _ = replicas
    names = ("Ann", "Bob")
    first = [await find(one, worked("Check it", name * words)) for name in names]
    assert len(set(first)) == 2
    for steps in (2, 3):
        lists = [worked("Check it", name * words, *["done"] * (steps - 1)) for name in reversed(names)]
        assert [await find(one, each) for each in lists] == first[::-1]


async def test_a_task_that_is_given_again_is_another_conversation_whose_results_stay_apart(
    replicas: Replicas,
) -> None:
    one, _ = replicas
    nights = []
    for night in range(3):
        results = [f"{night} of step {step}" for step in range(3)]
        nights.append({await find(one, worked("Check it", *results[:step])) for step in range(4)})
    assert [len(night) for night in nights] == [1, 1, 1]
    assert len(set.union(*nights)) == 3


@pytest.mark.parametrize("kept", [1, 2, 4])
async def test_a_client_that_clears_results_goes_on(replicas: Replicas, kept: int) -> None:
    one, _ = replicas
    results = [f"{step} of the files. " * 40 for step in range(12)]
    found = set()
    for step in range(1, 13):
        since = max(0, step - kept)
        found.add(await find(one, worked("Check it", *["(cleared)"] * since, *results[since:step])))
    cleared = worked("Check it", *["(cleared)"] * 11, results[11])
    found |= {await find(one, cleared), await find(one, cleared)}
    assert len(found) == 1


async def test_a_client_that_shortens_results_goes_on(replicas: Replicas) -> None:
    one, _ = replicas
    results = [f"{step} of the files. " * 40 for step in range(12)]
    found = set()
    for step in range(12):
        found.add(
            await find(one, worked("Check it", *[each[:300] for each in results[:step]], results[step]))
        )
    assert len(found) == 1


async def test_a_long_request_is_compared_once_with_however_many_conversations(replicas: Replicas) -> None:
    one, _ = replicas
    for number in range(KEPT_HEADS):
        await find(one, said(*EXAMPLES, f"Question {number}"))
    messages = said(*EXAMPLES, *(f"Message {number}" for number in range(20_000)))
    prefixes = compute_prefix_digests(messages)
    gc.disable()  # in a large test process one collection takes longer than all that is measured here
    try:
        start = time.thread_time()
        compute_prefix_digests(messages)
        once = time.thread_time() - start
        start = time.thread_time()
        await one.find_conversation("t", messages, prefixes, has_tools=True)
        took = time.thread_time() - start
    finally:
        gc.enable()
    assert took < 100 * once
