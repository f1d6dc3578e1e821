"""Events that are kept to be read again."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.wires import search_tool
from compaction_proxy.wires.search_tool import EventBuffer


@given(st.lists(st.binary(max_size=40_000).map(lambda each: each.hex().encode() + b"\n\n"), max_size=8))
def test_what_was_added_comes_back(events: list[bytes]) -> None:
    held = EventBuffer()
    for each in events:
        held.add(each)
    assert (list(held), held.size_bytes, held.is_complete) == (events, sum(map(len, events)), True)


def test_a_long_answer_takes_little_memory() -> None:
    held, event = EventBuffer(), b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n'
    for number in range(20_000):
        held.add(event % number)
    packed = sum(map(sys.getsizeof, held._blocks))
    assert packed + 2 * search_tool.BLOCK_BYTES < held.size_bytes / 3


def test_of_an_answer_that_is_too_long_nothing_is_kept() -> None:
    held = EventBuffer()
    for _ in range(2):
        held.add(b"x" * search_tool.MAX_KEPT_BYTES)
    assert (list(held), held.is_complete) == ([], False)
