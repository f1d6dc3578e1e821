"""What is kept of a round for people is bounded, and read back as it was."""

from hypothesis import given, settings
from hypothesis import strategies as st

from compaction_proxy.recall.archive import MAX_RECORD_CHARACTERS, ArchivedRound
from compaction_proxy.recall.round_detail import (
    KEPT,
    MAX_PROMPT_CHARACTERS,
    MAX_PROMPTS,
    STAND_IN,
    SummaryPrompt,
    VisibleMessage,
    build_bounded_prompt,
    build_detail_item,
    parse_prompts,
    parse_visible_messages,
)
from compaction_proxy.storage.envelope import pack, unpack
from compaction_proxy.storage.keys import archive_key, parse_hash_tag, round_detail_key

ROOT = bytes(32)
ROUND = ArchivedRound("c_1", "chained", bytes(range(64)), 2, 5.5)


def stored(
    prompts: list[SummaryPrompt], seen: list[VisibleMessage]
) -> tuple[list[SummaryPrompt], list[VisibleMessage]]:
    """What a store gives back."""
    fields = unpack(pack(build_detail_item("t_1", ROOT, ROUND, prompts, seen, 60.0).fields)) or {}
    return list(parse_prompts(fields)), list(parse_visible_messages(fields))


@settings(max_examples=50)
@given(st.lists(st.text(max_size=20), max_size=MAX_PROMPTS))
def test_what_is_not_too_large_comes_back_as_it_was(texts: list[str]) -> None:
    prompts = [SummaryPrompt("cheap", "Be brief.", text) for text in texts]
    seen = [VisibleMessage("user", text, KEPT, "m_1") for text in texts] + [
        VisibleMessage("user", "record", STAND_IN, "")
    ]

    assert stored(prompts, seen) == (prompts, seen)


def test_a_record_stands_in_the_scope_of_the_archive_s() -> None:
    item = build_detail_item("t_1", ROOT, ROUND, [], [], 60.0)

    assert (item.key, item.ttl_s) == (round_detail_key("t_1", ROOT, "chained", ROUND.checkpoint_place), 60.0)
    assert parse_hash_tag(item.key) == parse_hash_tag(
        archive_key("t_1", ROOT, "chained", ROUND.checkpoint_place)
    )


def test_a_prompt_keeps_its_ends_and_of_many_the_last_are_kept() -> None:
    prompts = [
        build_bounded_prompt("m", "s" * 90_000, f"{number}" + "x" * 90_000 + "end") for number in range(20)
    ]
    found, _ = stored(prompts, [])

    assert found == prompts[-MAX_PROMPTS:]
    assert found[-1].text.startswith("19x")
    assert found[-1].text.endswith("xend")
    assert len(found[-1].system) + len(found[-1].text) < MAX_PROMPT_CHARACTERS + 100


def test_the_largest_record_there_can_be_is_one_that_a_store_takes() -> None:
    prompts = [build_bounded_prompt("m", "\0" * 90_000, "\0" * 90_000) for _ in range(MAX_PROMPTS)]
    seen = [
        VisibleMessage("user", "short", KEPT, "m_1"),
        *[VisibleMessage("tool", "\0" * 300_000, KEPT, "m_2")] * 30,
    ]
    asked, found = stored(prompts, seen)

    assert (len(asked), len(found), found[0].text) == (MAX_PROMPTS, 31, "short")
    texts = [each.text for each in asked] + [each.text for each in found]
    assert sum(map(len, texts)) < MAX_RECORD_CHARACTERS + 5_000


def test_what_is_no_detail_is_passed_over() -> None:
    fields = {
        "prompts": [["m", "s", "t"], ["m"], 5],
        "seen": [["user", "hi", "kept", "m_1"], None, [1, 2, 3, 4]],
    }

    assert list(parse_prompts(fields)) == [SummaryPrompt("m", "s", "t")]
    assert list(parse_visible_messages(fields)) == [VisibleMessage("user", "hi", "kept", "m_1")]
    assert (list(parse_prompts({"prompts": "none"})), list(parse_visible_messages({}))) == ([], [])
