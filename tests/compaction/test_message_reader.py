"""Messages are decoded and counted once, within a bound."""

import json
from collections.abc import Sequence

import pytest

from compaction_proxy.compaction import message_reader
from compaction_proxy.compaction import message_reader as reading_module
from compaction_proxy.compaction.message_reader import CACHE_ENTRY_BYTES, CountingOptions, MessageReader
from compaction_proxy.core.digest import compute_prefix_digests
from compaction_proxy.providers.token_counting import TokenScheduler
from compaction_proxy.wires.body import parse_body
from compaction_proxy.wires.chat.wire import CHAT
from compaction_proxy.wires.incremental_reader import KEY_BYTES, IncrementalReader

GAUGE = CountingOptions("gpt-x", "tiktoken", CHAT)


class Words:
    """A counter that notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def count(self, text: str, model: str) -> int:
        self.asked.append(text)
        return len(text.split())

    def count_each(self, texts: Sequence[str], model: str) -> list[int]:
        return [self.count(text, model) for text in texts]


def said(*texts: str) -> list[bytes]:
    return [b'{"role":"user","content":"%b"}' % text.encode() for text in texts]


async def asked_for(max_held: int, requests: Sequence[list[bytes]]) -> list[str]:
    words = Words()
    reading = MessageReader({"tiktoken": TokenScheduler(words)}, max_held_bytes=max_held)
    for request in requests:
        await reading.decode_messages(request, GAUGE)
    reading.close()
    return words.asked


async def test_a_message_known_from_the_request_before_is_not_counted_again() -> None:
    assert await asked_for(100_000, [said("one"), said("one", "two")]) == ["one", "two"]


async def test_short_messages_take_the_room_of_their_records() -> None:
    room = 2 * (CACHE_ENTRY_BYTES + 100)  # for two messages, which take fewer than 100 with their texts
    assert await asked_for(room, [said("one", "two", "six"), said("six"), said("one")]) == [
        "one",
        "two",
        "six",
        "one",
    ]


def talk(*texts: str) -> bytes:
    """A body in which every third message is a tool's, and the first instructs."""
    roles = ["system", "user", "tool"]
    messages = [
        {"role": roles[index % 3], "content": text, "tool_call_id": "c"} for index, text in enumerate(texts)
    ]
    return json.dumps({"user": "u" * 300, "messages": messages}).encode()


TEXTS = ("one", "two", "three", "four")
OTHER = CountingOptions("gpt-y", "tiktoken", CHAT)


@pytest.mark.parametrize(
    ("max_listed", "gauges"),
    [(100_000, (GAUGE, GAUGE, GAUGE)), (100_000, (GAUGE, OTHER, GAUGE)), (1_200, (GAUGE, GAUGE, GAUGE))],
    ids=["grown", "counted-otherwise-in-between", "forgotten"],
)
async def test_a_grown_list_is_what_it_would_be_read_from_its_first_message(
    max_listed: int, gauges: Sequence[CountingOptions]
) -> None:
    reader = IncrementalReader(bytes(KEY_BYTES), CHAT)
    reading = MessageReader({"tiktoken": TokenScheduler(Words())}, max_listed_bytes=max_listed)
    fresh = MessageReader({"tiktoken": TokenScheduler(Words())})
    texts = ["be brief", "one", "two words", "a b c", "now", "so"]
    for size, gauge in zip((2, 4, 6), gauges, strict=True):
        raw = talk(*texts[:size])
        body = reader.read(raw, "t")
        listed = await reading.read_request(body, gauge)
        assert listed == await fresh.read_request(parse_body(raw, CHAT), gauge)
        assert listed.prefixes == tuple(compute_prefix_digests(listed.unfixed_messages))
        assert listed.tokens == sum(message.tokens for message in listed.messages)
        assert [message.raw for message in listed.messages] == list(parse_body(raw, CHAT).messages)
        assert await reading.read_request(body, gauge) == listed
    reading.close()
    fresh.close()


async def test_of_a_grown_list_only_what_is_new_is_looked_at() -> None:
    reader, words = IncrementalReader(bytes(KEY_BYTES), CHAT), Words()
    reading = MessageReader(
        {"tiktoken": TokenScheduler(words)}, max_held_bytes=0
    )  # single messages are not remembered
    for size in (2, 3, 3, 4):
        await reading.read_request(reader.read(talk(*TEXTS[:size]), "t"), GAUGE)
    reading.close()
    assert words.asked == list(TEXTS)


async def test_large_messages_and_definitions_are_read_as_little_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "a b"}, image]}, {"role": "system"}]
    tools = [{"name": "é", "n": [1.0, {}]}, 2, "x"]
    body = parse_body(
        json.dumps({"messages": messages, "tools": tools, "functions": {"a": 1}}).encode(), CHAT
    )
    found = []
    for at_once in (message_reader.CHUNK_BYTES, 1):
        for module in (reading_module, message_reader):
            monkeypatch.setattr(module, "CHUNK_BYTES", at_once)
        words = Words()
        reading = MessageReader({"tiktoken": TokenScheduler(words)})
        overhead = await reading.count_overhead(body.prompt_members, GAUGE)
        found.append((await reading.read_request(body, GAUGE), overhead, sorted(words.asked)))
        reading.close()
    assert found[0] == found[1]


async def test_definitions_are_counted_once() -> None:
    words = Words()
    reading = MessageReader({"tiktoken": TokenScheduler(words)})
    sizes = [await reading.count_overhead(['{"a": 1}', "[2]"], GAUGE) for _ in range(2)]
    reading.close()
    assert (sizes[0] == sizes[1], words.asked) == (True, ['{"a":1}', "[2]"])
