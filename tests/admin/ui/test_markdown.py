"""Markdown of messages: what becomes a block, that no word is lost, that parsing stays cheap."""

import time
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.admin.ui.markdown import Block, parse_markdown

LIMIT_S = 10.0  # many times what it takes
TEXTS = st.text(st.sampled_from("ab \n#*-_|>1.\t"), max_size=80)


def texts_of(blocks: tuple[Block, ...]) -> list[tuple[str, str]]:
    return [
        (each.kind, " / ".join("".join(span.text for span in cell) for row in each.rows for cell in row))
        for each in blocks
    ]


def test_the_usual_elements_become_blocks() -> None:
    text = (
        "# Title\nSome **bold** and `code`\nsecond line\n\n- one\n  more\n  - deep\n2. two\n\n"
        "```py\nx = 1\n\ny\n```\n> said\n> so\n\n| a | b |\n|---|---|\n| 1 | `2` |\n---\n"
    )
    blocks = parse_markdown(text)
    assert texts_of(blocks) == [
        ("heading", "Title"),
        ("text", "Some bold and code\nsecond line"),
        ("item", "one\n  more"),
        ("item", "deep"),
        ("item", "2. two"),
        ("code", "x = 1\n\ny"),
        ("quote", "said\nso"),
        ("table", "a / b / 1 / 2"),
        ("rule", ""),
    ]
    assert [span.style for span in blocks[1].rows[0][0]] == ["", "strong", "", "code", ""]
    assert [(each.level, each.is_numbered) for each in blocks[2:5]] == [(0, False), (1, False), (0, True)]


@pytest.mark.parametrize(
    "text",
    [
        "[a](javascript:x)",
        "![a](https://evil.example/x.png)",
        "<img src=x>",
        "a*b*c",
        "```",
        "|",
        "#no",
        "\r",
    ],
)
def test_what_is_no_element_of_ours_stays_text(text: str) -> None:
    assert [kind for kind, _ in texts_of(parse_markdown(text))] in (["text"], ["code"], [])


@given(TEXTS, st.data())
def test_no_word_is_lost_and_marks_stand_where_they_were(text: str, data: st.DataObject) -> None:
    points = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    shared = list(zip(points[::2], points[1::2], strict=False))
    marked = "".join(text[start:stop] for start, stop in shared)
    spans = [
        span for block in parse_markdown(text, shared) for row in block.rows for cell in row for span in cell
    ]
    assert _letters(each.text for each in spans) == _letters(text)
    assert _letters(each.text for each in spans if each.is_shared) == _letters(marked)


def _letters(texts: Iterable[str]) -> str:
    return "".join(letter for text in texts for letter in text if letter in "ab")


@pytest.mark.parametrize("piece", ["`", "**", "*", "|", "> ", "- ", "```\n", "| a |\n", "a`b**c ", " ", "#"])
def test_no_text_makes_parsing_dear(piece: str) -> None:
    begun = time.process_time()
    parse_markdown(piece * (200_000 // len(piece)), [(10, 20)])
    assert time.process_time() - begun < LIMIT_S
