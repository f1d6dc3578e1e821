"""The archive of a round holds what it replaced, whole where there is room."""

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy import archive
from proxy.archive import Archived, Round, archived, messages_of, readable, round_of, shortened
from proxy.core.envelope import pack, unpack
from proxy.core.keys import archive_key, archives_key, hash_tag
from proxy.core.message import Call, Message, Part
from proxy.storage.records import Line

ROOT = bytes(32)
ROUND = Round("c_1", "chained", bytes(range(64)), 2, 5.5)


def archive_of(*messages: Message) -> list[Archived]:
    """What a store gives back of the archive of these messages."""
    numbered = [(index, f"m_{index}", message) for index, message in enumerate(messages)]
    item, _ = archived("t_1", ROOT, ROUND, numbered, 60.0)
    return list(messages_of(unpack(pack(item.fields)) or {}))


def test_a_message_is_archived_as_text_with_its_calls_and_parts() -> None:
    call = Call("call_1", "read_file", '{"path": "a.py"}')
    messages = [
        Message("user", "Look:", parts=(Part("image_url", b"x", 5),)),
        Message("assistant", "", calls=(call, Call("", "ls", ""))),
        Message("tool", "print(1)", answers=("call_1",)),
        Message("assistant", refusal="I cannot."),
    ]
    assert archive_of(*messages) == [
        Archived("m_0", 0, "user", "Look:\n[image_url]"),
        Archived("m_1", 1, "assistant", 'read_file({"path": "a.py"})\nls()'),
        Archived("m_2", 2, "tool", "print(1)"),
        Archived("m_3", 3, "assistant", "I cannot."),
    ]


def test_the_record_and_its_line_name_the_round_and_are_committed_in_its_scope() -> None:
    item, line = archived("t_1", ROOT, ROUND, [], 60.0)
    key = archive_key("t_1", ROOT, "chained", ROUND.place)
    assert (item.key, item.ttl_s, round_of(item.fields)) == (key, 60.0, ROUND)
    assert line == Line(archives_key("t_1", ROOT), line.fields, 60.0, archive.KEPT_ARCHIVES)
    assert round_of(line.fields) == ROUND
    assert hash_tag(item.key) == hash_tag(line.key)


def test_a_huge_message_keeps_its_beginning_and_its_end() -> None:
    text = "a" * 200_000 + "b" * 200_000
    [found] = archive_of(Message("tool", text, answers=("1",)))
    left_out = 400_000 - archive.MAX_MESSAGE_CHARACTERS
    half = archive.MAX_MESSAGE_CHARACTERS // 2
    assert found.text == "a" * half + f"\n[… {left_out} characters left out …]\n" + "b" * half


def test_where_a_record_would_be_too_large_the_small_messages_stay_whole() -> None:
    small = Message("user", "Keep me whole. " * 10)
    huge = [Message("tool", "x" * 300_000, answers=("1",)) for _ in range(12)]
    found = archive_of(small, *huge)
    assert found[0].text == small.text
    assert sum(len(each.text) for each in found) < archive.MAX_RECORD_CHARACTERS + 13 * 60


def test_of_too_many_messages_the_newest_are_archived() -> None:
    found = archive_of(*[Message("user", "hi")] * (archive.MAX_MESSAGES + 3))
    assert (len(found), found[0].index) == (archive.MAX_MESSAGES, 3)


@given(st.text(max_size=60), st.integers(2, 40))
def test_a_shortened_text_is_the_text_or_its_two_ends(text: str, limit: int) -> None:
    found = shortened(text, limit)
    if len(text) <= limit:
        assert found == text
    else:
        head = limit - limit // 2
        assert found.startswith(text[:head])
        assert found.endswith(text[-(limit // 2) :])
        assert f"{len(text) - limit} characters" in found


@settings(max_examples=50)
@given(st.lists(st.text(max_size=20), max_size=8))
def test_any_text_comes_back_as_it_was(texts: list[str]) -> None:
    assert [each.text for each in archive_of(*[Message("user", text) for text in texts])] == texts


def test_an_empty_message_is_no_text() -> None:
    assert readable(Message("assistant")) == ""


def test_what_is_no_archive_is_empty_and_what_is_no_message_is_passed_over() -> None:
    rows = [["m_1", 0, "user", "good"], ["m_2", "0", "user", "bad"], 5, None, ["m_3"]]
    assert list(messages_of({"messages": rows})) == [Archived("m_1", 0, "user", "good")]
    assert list(messages_of({"messages": "none"})) == list(messages_of({})) == []
    assert round_of({"conversation": "c_1", "place": 5}) is None
