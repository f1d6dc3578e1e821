"""The simulated summary model writes what a summary call asks for."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from compaction_proxy.core.message import Message
from compaction_proxy.core.strategies import SummaryShape
from compaction_proxy.core.summary.answer import (
    PromptSection,
    repair_sections,
    split_run_texts,
    validate_summary,
)
from compaction_proxy.core.summary.prompt import build_aligned_prompt, build_prompt
from compaction_proxy.replay.provider import OPENING, write_summary

SHAPE = SummaryShape(prompt_name="selective", tokens=2_000, max_tokens=2_000)
# The words differ, because an extract repeats nothing.
CRATE = "Crate BX-{0} left hall{0} by gate{0} for quay{0} with team{0} under seal{0}."


def ask(
    *groups: Sequence[Message], system: str = "Summarise.", earlier: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """A summary call that holds transcripts."""
    prompt = build_prompt(
        groups, SHAPE, task="Move them.", earlier_summaries=earlier, language="English", max_tokens=400
    )
    return [{"role": "system", "content": system}, {"role": "user", "content": prompt}]


def count(text: str) -> int:
    return len(text) // 3


def write(messages: Sequence[dict[str, Any]], tokens: int = 400) -> str:
    return write_summary([json.dumps(message).encode() for message in messages], tokens, count)


def said(*numbers: int) -> list[Message]:
    return [Message("assistant", CRATE.format(number)) for number in numbers]


def test_a_transcript_is_summarised_and_the_words_around_it_are_not() -> None:
    messages = [Message("user", "Move the crates."), *said(11), Message("tool", "moved 1 crate")]
    text = write(ask(messages))
    assert text.startswith(OPENING)
    assert f"- {CRATE.format(11)} (1)" in text
    assert "At most" not in text


def test_an_earlier_summary_is_part_of_the_next() -> None:
    assert CRATE.format(7) in write(ask(said(11), earlier=[f"Done:\n- {CRATE.format(7)}"]))


def test_the_sections_that_the_prompt_names_are_written() -> None:
    sections = [PromptSection(f"### {name}") for name in ("Work", "State", "Errors")]
    system = "Write these sections:\n\n" + "\n\n".join(f"{each.heading}\n- one" for each in sections)
    text = write(ask(said(11), system=system))
    assert repair_sections(text, sections) == text
    assert text.startswith(f"### Work\n{OPENING}")


def test_a_prompt_with_several_runs_gets_a_text_for_each() -> None:
    first, second = split_run_texts(write(ask(said(1), said(2))), 2)
    assert ("BX-1" in first, "BX-2" in first) == (True, False)
    assert ("BX-1" in second, "BX-2" in second) == (False, True)


@pytest.mark.parametrize("run_count", [1, 2])
def test_a_conversation_whose_last_message_asks_for_it_is_summarised_itself(run_count: int) -> None:
    prompt = build_aligned_prompt(
        "Write the record of BX-9.", language="", max_tokens=400, run_count=run_count
    )
    text = write(
        [
            {"role": "system", "content": CRATE.format(7)},
            {"role": "user", "content": "Go on."},
            {"role": "assistant", "content": CRATE.format(1)},
            {"role": "user", "content": "Go on."},
            {"role": "assistant", "content": CRATE.format(2)},
            {"role": "user", "content": prompt},
        ]
    )
    texts = split_run_texts(text, run_count)
    assert [number for number in (1, 2, 7, 9) if f"BX-{number}" in text] == [1, 2]
    assert run_count == 1 or "BX-1" in texts[0]


@pytest.mark.parametrize("tokens", [120, 200, 400])
def test_a_summary_keeps_to_the_size_asked_for(tokens: int) -> None:
    text = write(ask(said(*range(100, 200))), tokens)
    assert tokens / 2 < count(text) <= tokens


@pytest.mark.parametrize("prompt", ["", "Order 12 is due."])
def test_even_a_prompt_without_a_transcript_has_a_usable_summary(prompt: str) -> None:
    text = write([{"role": "user", "content": prompt}])
    assert validate_summary(text, "stop", called_tools=False, refused=False) == text
