"""Values are found in time that is linear in the text, whatever it is made of."""

import time

import pytest

from proxy.core.facts import looked_at, shown
from proxy.core.message import Message
from proxy.core.statements import statements
from proxy.core.values import values

CHARACTERS = 64_000
# Ten times what is meant, in seconds a character: a shared machine is slow at times.
MOST_S = 10e-6

PATHOLOGICAL = (
    " ", "a", "=", "1", "/", ".", '"', "-", "_", "@", "A", "\u5b57", "\u65e5", "a.", "1.", "a/", "a@", "A ",
    "a-", "1,", "Ab ", "//", "a1", "\u0661", "\u00e9", "http:", "://", "\\", "+", "~",
    "#", "[", "<", "is ", "1 ",
)  # fmt: skip


@pytest.mark.parametrize("piece", PATHOLOGICAL)
@pytest.mark.parametrize("end", ["", "1", "!", "://x", "@"])
def test_no_text_takes_long_to_be_searched_for_values(piece: str, end: str) -> None:
    text = (piece * CHARACTERS)[:CHARACTERS] + end
    begun = time.process_time()
    list(values(text))
    assert time.process_time() - begun < MOST_S * len(text)


@pytest.mark.parametrize("piece", PATHOLOGICAL)
def test_no_message_takes_long_to_be_read(piece: str) -> None:
    text = piece * 1_300_000
    begun = time.process_time()
    statements(text)
    shown(Message("tool", text, answers=("1",)))
    assert time.process_time() - begun < MOST_S * len(looked_at(text)) * 10
