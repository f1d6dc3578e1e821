from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.cli.demo.chat import split_words


@given(st.text())
def test_the_pieces_of_a_text_are_the_text(text: str) -> None:
    assert "".join(split_words(text)) == text
