"""What is kept of a round for people is bounded, and read back as it was."""

from hypothesis import given, settings
from hypothesis import strategies as st

from compaction_proxy.recall.archive import MAX_RECORD_CHARACTERS, Round
from compaction_proxy.recall.round_detail import (
    KEPT,
    MAX_PROMPT_CHARACTERS,
    MAX_PROMPTS,
    STAND_IN,
    Prompt,
    Shown,
    bounded_prompt,
    detail_item,
    prompts_of,
    seen_of,
)
from compaction_proxy.storage.envelope import pack, unpack
from compaction_proxy.storage.keys import archive_key, detail_key, hash_tag

ROOT = bytes(32)
ROUND = Round("c_1", "chained", bytes(range(64)), 2, 5.5)


def stored(prompts: list[Prompt], seen: list[Shown]) -> tuple[list[Prompt], list[Shown]]:
    """What a store gives back."""
    fields = unpack(pack(detail_item("t_1", ROOT, ROUND, prompts, seen, 60.0).fields)) or {}
    return list(prompts_of(fields)), list(seen_of(fields))


@settings(max_examples=50)
@given(st.lists(st.text(max_size=20), max_size=MAX_PROMPTS))
def test_what_is_not_too_large_comes_back_as_it_was(texts: list[str]) -> None:
    prompts = [Prompt("cheap", "Be brief.", text) for text in texts]
    seen = [Shown("user", text, KEPT, "m_1") for text in texts] + [Shown("user", "record", STAND_IN, "")]

    assert stored(prompts, seen) == (prompts, seen)


def test_a_record_stands_in_the_scope_of_the_archive_s() -> None:
    item = detail_item("t_1", ROOT, ROUND, [], [], 60.0)

    assert (item.key, item.ttl_s) == (detail_key("t_1", ROOT, "chained", ROUND.place), 60.0)
    assert hash_tag(item.key) == hash_tag(archive_key("t_1", ROOT, "chained", ROUND.place))


def test_a_prompt_keeps_its_ends_and_of_many_the_last_are_kept() -> None:
    prompts = [bounded_prompt("m", "s" * 90_000, f"{number}" + "x" * 90_000 + "end") for number in range(20)]
    found, _ = stored(prompts, [])

    assert found == prompts[-MAX_PROMPTS:]
    assert found[-1].text.startswith("19x")
    assert found[-1].text.endswith("xend")
    assert len(found[-1].system) + len(found[-1].text) < MAX_PROMPT_CHARACTERS + 100


def test_the_largest_record_there_can_be_is_one_that_a_store_takes() -> None:
    prompts = [bounded_prompt("m", "\0" * 90_000, "\0" * 90_000) for _ in range(MAX_PROMPTS)]
    seen = [Shown("user", "short", KEPT, "m_1"), *[Shown("tool", "\0" * 300_000, KEPT, "m_2")] * 30]
    asked, found = stored(prompts, seen)

    assert (len(asked), len(found), found[0].text) == (MAX_PROMPTS, 31, "short")
    texts = [each.text for each in asked] + [each.text for each in found]
    assert sum(map(len, texts)) < MAX_RECORD_CHARACTERS + 5_000


def test_what_is_no_detail_is_passed_over() -> None:
    fields = {
        "prompts": [["m", "s", "t"], ["m"], 5],
        "seen": [["user", "hi", "kept", "m_1"], None, [1, 2, 3, 4]],
    }

    assert list(prompts_of(fields)) == [Prompt("m", "s", "t")]
    assert list(seen_of(fields)) == [Shown("user", "hi", "kept", "m_1")]
    assert (list(prompts_of({"prompts": "none"})), list(seen_of({}))) == ([], [])
