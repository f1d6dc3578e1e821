"""Which facts of the messages that a round replaces are still seen."""

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.ledger.facts import list_message_facts
from compaction_proxy.core.message import Message, MessageToolCall
from compaction_proxy.core.summary.retention import MAX_FACTS, count_retained_facts

FAILED = Message("tool", "ValueError: no port in ledger.toml\nexit code 3", answered_call_ids=("1",))
CALLED = Message("assistant", calls=(MessageToolCall("1", "bash", '{"command": "pytest tests/unit -x"}'),))
EDITED = Message("assistant", calls=(MessageToolCall("2", "edit", '{"path": "src/a.py"}'),))
SAID = Message(
    "user", "It costs $1,200 and stands at https://db.acme.dev/x since 2026-11-02; ask ops@acme.dev."
)


def test_facts_are_counted_by_kind_and_those_that_are_still_seen_among_them() -> None:
    seen = ["Ran `pytest tests/unit -x` (exit code 3).", "It costs $1,200, see https://db.acme.dev/x."]
    rules = ["Never touch main.", "Use SI units."]

    assert count_retained_facts([CALLED, FAILED, EDITED, SAID], [*seen, "Never   touch\nmain."], rules) == {
        "command": (1, 1),
        "path": (0, 1),
        "error": (1, 2),
        "number": (1, 2),
        "url": (1, 1),
        "id": (0, 1),
        "rule": (1, 2),
    }


def test_a_kind_of_which_there_is_nothing_is_left_out() -> None:
    assert count_retained_facts([Message("user", "Hello there.")], ["Hello"]) == {}


@pytest.mark.parametrize(
    ("seen", "kept"),
    [
        ("see src/a.py.", 1),
        ('"src/a.py"', 1),
        ("src/a.py", 1),
        ("lib/src/a.pyi", 0),
        ("xsrc/a.py", 0),
        ("xsrc/a.py is not the src of any src", 0),
        ("src/a.pyi is not py, and no py", 0),
        ("src / a.py", 0),
        ("", 0),
    ],
)
def test_a_fact_is_kept_where_it_stands_word_for_word_and_not_as_a_part_of_another(
    seen: str, kept: int
) -> None:
    assert count_retained_facts([EDITED], [seen])["path"] == (kept, 1)


def test_a_rule_in_a_script_without_spaces_is_found_within_a_sentence() -> None:
    assert count_retained_facts([], ["规则：不要碰主分支。完"], ["不要碰主分支", "别的"]) == {"rule": (1, 2)}  # noqa: RUF001 - Chinese


@given(st.lists(st.sampled_from([CALLED, FAILED, SAID, Message("user", "v1.2.3 src/b.rs")]), max_size=6))
def test_of_what_is_all_still_seen_nothing_is_lost(removed: list[Message]) -> None:
    seen = [text for message in removed for _, text, *_ in list_message_facts(message)]

    assert all(kept == total for kept, total in count_retained_facts(removed, seen).values())


def test_of_very_many_facts_the_newest_are_counted() -> None:
    removed = [
        replace(EDITED, calls=(MessageToolCall("3", "edit", f'{{"path": "out/file{number}.txt"}}'),))
        for number in range(MAX_FACTS + 9)
    ]

    assert count_retained_facts(removed, ["out/file8.txt", f"out/file{MAX_FACTS + 8}.txt"])["path"] == (
        1,
        MAX_FACTS,
    )


@pytest.mark.parametrize("piece", ["a/b ", "a-1 ", "error: a a a ", "$1 ", "x" * 40 + " "])
def test_no_messages_take_long(piece: str) -> None:
    text = piece * (30_000 // len(piece))
    removed = [Message("tool", f"{number} {text}", answered_call_ids=("1",)) for number in range(60)]
    begun = time.process_time()
    count_retained_facts(
        removed, [each.text for each in removed], [f"{piece * 9}{number}" for number in range(600)]
    )

    assert time.process_time() - begun < 40  # a hundred times what it takes
