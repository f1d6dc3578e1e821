"""Where JSON is cut, and that passing over its escapes changes nothing but them."""

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from compaction_proxy.wires.json import slices as json_pieces
from compaction_proxy.wires.json.slices import has_excess_structure, iter_pieces, mask_escapes

UNHURRIED = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
SHORTEST_PIECE = json_pieces._ESCAPE_BYTES + 4  # room for an escape and a step
ESCAPE = re.compile(rb'\\(["\\])|\\([/bfnrt]|u[0-9a-fA-F]{4})')
SCRAPS = [
    "\\",
    "\\\\",
    "\\n",
    "\\b",
    "\\u",
    "\\u4E2d",
    "\\ud83d",
    "\\q",
    '\\"',
    '"',
    "a",
    "é",
    "中",
    "🐎",
    "[",
    "0",
]


@pytest.fixture
def little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_pieces, "PIECE_BYTES", SHORTEST_PIECE)


def unescaped(raw: bytes) -> bytes:
    return ESCAPE.sub(lambda found: b"##" if found[1] else b"#" + found[2], raw)


def judged(raw: bytes | bytearray) -> Any:
    """The shape of JSON, with no string but its length in UTF-8; None for what is none."""

    def shape(value: Any) -> Any:
        if isinstance(value, list):
            return [shape(each) for each in value]
        if isinstance(value, dict):
            return [shape(each) for each in value.values()]
        return "string" if isinstance(value, str) else value

    try:
        return shape(
            json.loads(raw, object_pairs_hook=lambda pairs: dict(enumerate(each for _, each in pairs)))
        )
    except ValueError:
        return None


TEXT = st.text(st.characters(codec=None) | st.sampled_from('"\\/\n\b中🐎\ud83d\ude00'), max_size=60)
VALUE = st.recursive(
    st.none() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=12,
)


@UNHURRIED
@given(VALUE, st.data())
@pytest.mark.usefixtures("little_at_a_time")
def test_json_without_its_escapes_is_as_long_and_the_same_but_for_them(
    value: Any, data: st.DataObject
) -> None:
    raw = json.dumps(value).encode()
    smooth = mask_escapes(raw, mask_all=True)
    assert smooth == unescaped(raw)
    assert judged(smooth) == judged(raw)
    at = data.draw(st.integers(0, len(raw)))
    scrap = data.draw(st.sampled_from([b"\\", b'"', b"\\u", b"\\x", b"\\n", b"]"]))
    damaged = raw[:at] + scrap + raw[at:]
    assert judged(mask_escapes(damaged, mask_all=True)) == judged(damaged)


@UNHURRIED
@given(st.lists(st.sampled_from(SCRAPS), max_size=60).map("".join))
@example("\\" * 101)
@example("\\u00" * 20)
@pytest.mark.usefixtures("little_at_a_time")
def test_what_is_no_json_is_none_without_its_escapes(string: str) -> None:
    for text in (f'"{string}"', string, f"[0{string}0]"):
        raw = text.encode()
        assert judged(mask_escapes(raw, mask_all=True)) == judged(raw)


@pytest.mark.parametrize("piece", [b"\\ud83d\\ude00", "中".encode(), b"\\\\", b"\\n", b"a"])
@pytest.mark.usefixtures("little_at_a_time")
def test_every_piece_but_the_last_is_about_as_long_as_it_may_be(piece: bytes) -> None:
    raw = b'"%b"' % (piece * 100)
    sizes = [stop - start for start, stop in iter_pieces(raw, 1, len(raw) - 1)]
    assert sum(sizes) == len(raw) - 2
    near = json_pieces._ESCAPE_BYTES
    assert all(SHORTEST_PIECE - near <= size <= SHORTEST_PIECE + near for size in sizes[:-1])


@pytest.mark.parametrize(
    "escape", [b"\\n", b"\\\\", b'\\"', b"\\/", b"\\u4e2d", b"\\ud83d\\ude00", b"\\ud800"]
)
def test_a_text_that_is_all_escapes_is_passed_over(escape: bytes) -> None:
    raw = b'{"a":"%b"}' % (escape * 100_000)
    assert mask_escapes(raw) == unescaped(raw)
    assert len(unescaped(raw)) == len(raw)
    assert b"\\" not in unescaped(raw)


def test_only_where_escapes_are_many_are_they_passed_over() -> None:
    few, many = b"It is said:\\nso it is. " * 20_000, b"\\u0438\\u043b\\u0438 " * 20_000
    assert mask_escapes(few) is few
    smooth = mask_escapes(few + many)
    assert len(smooth) == len(few + many)
    assert smooth[: len(few) - json_pieces.PIECE_BYTES] == few[: len(few) - json_pieces.PIECE_BYTES]
    assert b"\\" not in smooth[len(few) + json_pieces.PIECE_BYTES :]


@UNHURRIED
@given(VALUE)
@pytest.mark.usefixtures("little_at_a_time")
def test_only_what_stands_outside_strings_crowds(value: Any) -> None:
    raw = json.dumps(value).encode()
    marks = len(re.findall(rb"[,:{[]", re.sub(rb'"[^"]*"', b"", unescaped(raw))))
    assert has_excess_structure(raw, marks - 1)
    assert not has_excess_structure(raw, marks)
