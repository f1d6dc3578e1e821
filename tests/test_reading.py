"""Messages are decoded and counted once, within a bound."""

from collections.abc import Sequence

from proxy.counting import Counting
from proxy.reading import RECORD_BYTES, Gauge, Reading

GAUGE = Gauge("gpt-x", "tiktoken")


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
    reading = Reading({"tiktoken": Counting(words)}, max_held_bytes=max_held)
    for request in requests:
        await reading.messages(request, GAUGE)
    reading.close()
    return words.asked


async def test_a_message_known_from_the_request_before_is_not_counted_again() -> None:
    assert await asked_for(100_000, [said("one"), said("one", "two")]) == ["one", "two"]


async def test_short_messages_take_the_room_of_their_records() -> None:
    room = 2 * (RECORD_BYTES + 40)  # for two messages, whose own bytes are fewer than 40
    assert await asked_for(room, [said("one", "two", "six"), said("six"), said("one")]) == [
        "one",
        "two",
        "six",
        "one",
    ]
