"""Values are found in time that is linear in the text, whatever it is made of, and none is passed over."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.ledger import values as shapes
from compaction_proxy.core.ledger.facts import list_message_facts, take_head_and_tail
from compaction_proxy.core.ledger.statements import read_statements
from compaction_proxy.core.ledger.values import ExactValue, find_values
from compaction_proxy.core.message import Message

CHARACTERS = 64_000
# In seconds a character; a hundred times what is meant: a shared machine is slow at times.
MOST_S = 100e-6

PATHOLOGICAL = (
    " ", "a", "=", "1", "/", ".", "-", "_", "@", "A", "\u5b57", "\u65e5", "a.", "1.", "a/", "a@", "A ",
    "a-", "1,", "Ab ", "//", "a1", "\u0661", "\u00e9", "http:", "://", "\\", "+", "~",
    "#", "[", "<", "is ", "1 ",
)  # fmt: skip


PIECES = (
    *PATHOLOGICAL,
    "https://a.example/x?y=1", "HTTPS://A", "postgres://u:p@db:5432/x", "ana.b+c@mail.example.com",
    "0b8f1c1e-1111-4222-8333-123456789abc", "2027-03-01", "2027-03-01T10:00:00Z", "1/2/27",
    "March 3rd", "3 May",
    "3. mai", "2027\u5e743\u67081\u65e5", "3\u67081\u53f7", "Monday", "monday", "\u5468\u4e00",
    "\u6708\u66dc\u65e5",
    "lundi", "Mi\u00e9rcoles", "$400", "\u20ac 5,000.50", "400 USD", "12\u5143",
    "900 \u0440\u0443\u0431", "5 %", "95%",
    "3 of 5", "10.0.0.1:8080", "us-east-1", "Europe/Berlin", "UTC+2", "CET", "PST", "feature/x-1",
    "fix/a", "~/.ssh",
    "./a/b.py", "../x/", "/etc", "/etc/hosts", "src/a_b.py", "README.md", "C:\\x", "db.internal",
    "localhost:80",
    "a-b.example.com", "10:30", "10:30:05 pm", "5pm", "5 ms", "1.5GB", "30 days", "v1.2.3",
    "1.2.3-rc1", "Python 3.11",
    "ORD-4711", "A1", "ABC_DEF", "a1b2c3d4", "deadbeef", "Python", "C++", "C#", "German", "Ana Ruiz",
    "Ben O\u2019Neil",
    "Please Check", "The Port", "42", "1,000", "3.14", "port", "branch", "commit", "is", "the",
    "works", "don't", "Done",
    "ok", "I", "x_y", "foo-bar", "foo.bar", "a.b.c", "1a", "2d", "3x", "10th", "utf-8", "p99",
    "\u017ftp://x", "\u0661\u0662",
    "e.g.", "...", "--", "->", "**", "\n", "\t", ", ", ": ", "; ", "(", ")", "'", "\u2019s", "!", "?",
    "=", "|", "`", "{}",
)  # fmt: skip
TEXTS = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.lists(st.sampled_from(PIECES), max_size=12).map(" ".join),
    st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=10).map("".join),
)
PLAIN = re.compile("|".join(f"(?P<{name}>{shape})" for name, shape in shapes._SHAPES.items()))


def tried_everywhere(text: str) -> list[ExactValue]:
    """The values where every shape is tried at every place, the first one first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "_VALUE", PLAIN)
        patch.setattr(shapes, "_VALUE_WITHOUT_ADDRESSES", PLAIN)
        patch.setattr(shapes, "_KINDS", {name: name for name in shapes._SHAPES})
        return list(find_values(text))


@given(TEXTS)
def test_no_value_is_passed_over(text: str) -> None:
    assert list(find_values(text)) == tried_everywhere(text)


@pytest.mark.parametrize("piece", PATHOLOGICAL)
@pytest.mark.parametrize("end", ["", "1", "!", "://x", "@"])
def test_no_text_takes_long_to_be_searched_for_values(piece: str, end: str) -> None:
    text = (piece * CHARACTERS)[:CHARACTERS] + end
    begun = time.process_time()
    list(find_values(text))
    assert time.process_time() - begun < MOST_S * len(text)


@pytest.mark.parametrize("piece", PATHOLOGICAL)
def test_no_message_takes_long_to_be_read(piece: str) -> None:
    text = piece * 1_300_000
    begun = time.process_time()
    read_statements(text)
    list_message_facts(Message("tool", text, answered_call_ids=("1",)))
    assert time.process_time() - begun < MOST_S * len(take_head_and_tail(text)) * 10
