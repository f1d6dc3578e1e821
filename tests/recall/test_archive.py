"""The archive of a round holds what it replaced, whole where there is room."""

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from compaction_proxy.core.message import ContentPart, Message, MessageToolCall
from compaction_proxy.recall import archive
from compaction_proxy.recall.archive import (
    ArchivedRound,
    ArchivePieceInfo,
    ArchivePieceList,
    OriginalMessage,
    RemovedMessage,
    build_archive,
    format_message_text,
    parse_archive_contents,
    parse_archived_round,
    parse_messages,
    parse_piece_text,
    shorten_text,
)
from compaction_proxy.storage.envelope import pack, unpack
from compaction_proxy.storage.keys import archive_key, archive_piece_key, parse_hash_tag, root_archives_key
from compaction_proxy.storage.records import Fields, ListItem, RecordItem

ROOT = bytes(32)
ROUND = ArchivedRound("c_1", "chained", bytes(range(64)), 2, 5.5)


def originals(*messages: Message, first: int = 0) -> list[OriginalMessage]:
    """Messages from this index on, all of one turn."""
    return [OriginalMessage(first + k, f"m_{first + k}", 1, each) for k, each in enumerate(messages)]


def stored(items: Iterable[RecordItem]) -> dict[str, Fields]:
    """What a store gives back of these, by key."""
    return {item.key: unpack(pack(item.fields)) or {} for item in items}


def archive_of(*messages: Message) -> list[RemovedMessage]:
    """What a store gives back of the archive of these messages."""
    items = build_archive("t_1", ROOT, ROUND, originals(*messages), 60.0).items
    held = stored(items)
    pieces = parse_archive_contents(held[items[0].key])
    texts = {
        name: parse_piece_text(held[archive_piece_key("t_1", ROOT, name)]) or "" for name, _ in pieces.texts
    }
    stretches = [held[archive_piece_key("t_1", ROOT, name)] for name, _ in pieces.stretches]
    return [each for stretch in stretches for each in parse_messages(stretch, texts)]


def test_a_message_is_archived_as_text_with_its_calls_and_parts() -> None:
    call = MessageToolCall("call_1", "read_file", '{"path": "a.py"}')
    messages = [
        Message("user", "Look:", parts=(ContentPart("image_url", b"x", 5),)),
        Message("assistant", "", calls=(call, MessageToolCall("", "ls", ""))),
        Message("tool", "print(1)", answered_call_ids=("call_1",)),
        Message("assistant", refusal="I cannot."),
    ]
    assert archive_of(*messages) == [
        RemovedMessage("m_0", 0, "user", "Look:\n[image_url]", 1),
        RemovedMessage("m_1", 1, "assistant", 'read_file({"path": "a.py"})\nls()', 1),
        RemovedMessage("m_2", 2, "tool", "print(1)", 1),
        RemovedMessage("m_3", 3, "assistant", "I cannot.", 1),
    ]


def test_the_record_and_its_line_name_the_round_and_are_committed_in_its_scope() -> None:
    (item,), line, pieces = build_archive("t_1", ROOT, ROUND, [], 60.0)
    key = archive_key("t_1", ROOT, "chained", ROUND.checkpoint_place)
    assert (item.key, item.ttl_s, parse_archived_round(item.fields), pieces) == (
        key,
        60.0,
        ROUND,
        ArchivePieceList((), ()),
    )
    assert line == ListItem(root_archives_key("t_1", ROOT), line.fields, 60.0, archive.MAX_ARCHIVES)
    assert (parse_archived_round(line.fields), line.fields["bytes"]) == (ROUND, 0)
    assert parse_hash_tag(item.key) == parse_hash_tag(line.key)


def test_a_text_that_comes_again_is_one_piece_and_so_is_what_a_branch_has_in_common() -> None:
    file = "x" * 150_000
    before = [Message("user", f"Step {k} of many.") for k in range(70)]
    read = Message("tool", file, answered_call_ids=("1",))
    one = build_archive("t_1", ROOT, ROUND, originals(*before, read, read), 60.0)
    other = replace(ROUND, checkpoint_place=bytes(64), strategy="full")
    branch = build_archive("t_1", ROOT, other, originals(*before, Message("user", "Else."), read), 60.0)
    assert (
        one.contents.texts
        == branch.contents.texts
        == (ArchivePieceInfo(one.contents.texts[0].name, 150_000),)
    )
    assert [len(one.contents.stretches), len({*one.contents.stretches, *branch.contents.stretches})] == [3, 4]
    assert len(stored((*one.items, *branch.items))) == 2 + 4 + 1
    assert one.list_line.fields["bytes"] == 150_000 + sum(len(each.text) for each in before)


def test_a_huge_message_keeps_its_beginning_and_its_end() -> None:
    text = "a" * 200_000 + "b" * 200_000
    [found] = archive_of(Message("tool", text, answered_call_ids=("1",)))
    left_out = 400_000 - archive.MAX_MESSAGE_CHARACTERS
    half = archive.MAX_MESSAGE_CHARACTERS // 2
    assert found.text == "a" * half + f"\n[… {left_out} characters left out …]\n" + "b" * half


def test_where_a_record_would_be_too_large_the_small_messages_stay_whole() -> None:
    small = Message("user", "Keep me whole. " * 10)
    huge = [Message("tool", "x" * 300_000, answered_call_ids=("1",)) for _ in range(12)]
    found = archive_of(small, *huge)
    assert found[0].text == small.text
    assert sum(len(each.text) for each in found) < archive.MAX_RECORD_CHARACTERS + 13 * 60


def test_of_too_many_messages_the_newest_are_archived() -> None:
    found = archive_of(*[Message("user", "hi")] * (archive.MAX_MESSAGES + 3))
    assert (len(found), found[0].index) == (archive.MAX_MESSAGES, 3)


@given(st.text(max_size=60), st.integers(2, 40))
def test_a_shortened_text_is_the_text_or_its_two_ends(text: str, limit: int) -> None:
    found = shorten_text(text, limit)
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
    assert format_message_text(Message("assistant")) == ""


def test_what_is_no_archive_is_empty_and_what_is_no_message_is_passed_over() -> None:
    rows = [["m_1", 0, "user", "good"], ["m_2", "0", "user", "bad"], 5, None, ["m_3"]]
    rows += [["m_4", 4, "tool", {"piece": "a"}, 1], ["m_5", 5, "tool", {"piece": "b"}, None]]
    assert list(parse_messages({"messages": rows}, {"b": "text"})) == [
        RemovedMessage("m_1", 0, "user", "good"),
        RemovedMessage("m_5", 5, "tool", "text"),
    ]
    assert list(parse_messages({"messages": "none"})) == list(parse_messages({})) == []
    assert parse_archived_round({"conversation": "c_1", "place": 5}) is None
    assert parse_piece_text({"text": 5}) is None


def test_what_a_version_before_wrote_counts_with_its_size() -> None:
    assert parse_archive_contents({"messages": [["m_1", 0, "user", "größe"]]}) == ArchivePieceList((), (), 7)
    assert parse_archive_contents({"stretches": [["a", 1], ["b"], 5], "texts": None}) == ArchivePieceList(
        (ArchivePieceInfo("a", 1),), ()
    )
