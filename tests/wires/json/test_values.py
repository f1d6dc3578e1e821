"""What is decoded in pieces is what it would be in one."""

import base64
import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.wires.json import slices, values

UNHURRIED = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
SHORTEST_PIECE = slices._ESCAPE_BYTES + 4  # room for an escape and a step


@pytest.fixture(autouse=True)
def little_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "LONG_BYTES", 4)
    monkeypatch.setattr(values, "PIECE_BYTES", SHORTEST_PIECE)
    monkeypatch.setattr(slices, "PIECE_BYTES", SHORTEST_PIECE)
    monkeypatch.setattr(slices, "SHORT_BYTES", 4)
    monkeypatch.setattr(values, "_MAX_ITEMS", 3)


def outcome(raw: bytes, *, whole: bool) -> Any:
    try:
        return values.decode_plain(raw) if whole else values.decode_value(raw)
    except UnreadableBodyError as refused:
        return refused.reason


SCRAPS = [
    *(
        "\\",
        "\\\\",
        "\\n",
        "\\u",
        "\\u4e2d",
        "\\ud83d",
        "\\uDE00",
        "\\ud83d\\ude00",
        "\\x",
        "\\\\ud83d",
        '\\"',
    ),
    *("a", "é", "中", "🐎", "\x01", "u", "d83d"),
]
STRINGS = st.lists(st.sampled_from(SCRAPS), max_size=60).map("".join).map('"{}"'.format)
TEXT = st.text(st.characters(codec=None) | st.sampled_from('"\\/\n中🐎\ud83d\ude00'), max_size=80)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=12,
)


@UNHURRIED
@given(STRINGS, st.sampled_from(["%s", '{"a":%s}', "[1,%s]", '{"a":[{"b":%s}]}']))
@example('"' + "\\" * 100 + '"', "%s")
@example('"' + "\\" * 101 + '"', "%s")
@example('"' + "\\ud83d" * 30 + '"', "%s")
def test_any_run_of_characters_and_escapes_is_judged_as_a_whole(string: str, around: str) -> None:
    raw = (around % string).encode()
    assert outcome(raw, whole=False) == outcome(raw, whole=True)


@UNHURRIED
@given(VALUE, st.sampled_from(["ascii", "utf-8"]), st.data())
def test_any_value_is_what_it_is_as_a_whole_and_any_damage_is_found(
    value: Any, encoding: str, data: st.DataObject
) -> None:
    raw = json.dumps(value, ensure_ascii=encoding == "ascii").encode("utf-8", "surrogatepass")
    at = data.draw(st.integers(0, len(raw)))
    damaged = raw[:at] + data.draw(st.sampled_from([b"", b'"', b"\\", b"\xff", b"\xe4", b" "])) + raw[at:]
    for each in (raw, damaged):
        assert repr(outcome(each, whole=False)) == repr(outcome(each, whole=True))


@pytest.mark.parametrize("escape", ["", "\\n", "\\u4e2d", "\\/"])
@pytest.mark.parametrize(
    "around", ["%s", '{"content":%s}', '{"content":[{"type":"image_url","image_url":{"url":%s}}]}']
)
def test_a_long_string_is_nowhere_decoded_in_one_call(
    monkeypatch: pytest.MonkeyPatch, escape: str, around: str
) -> None:
    raw = (around % f'"{f"a{escape}" * 100}"').encode()
    sizes: list[int] = []

    def noted(part: bytes) -> Any:
        sizes.append(len(part))
        return plain(part)

    plain = values.decode_plain
    monkeypatch.setattr(values, "decode_plain", noted)
    assert values.decode_value(raw) == json.loads(raw)
    assert max(sizes) <= SHORTEST_PIECE + slices._ESCAPE_BYTES + len('""')


@pytest.mark.parametrize("item", ["[]", "{}", "7", '{"a":7}'])
def test_what_no_model_could_read_is_refused_undecoded(monkeypatch: pytest.MonkeyPatch, item: str) -> None:
    monkeypatch.setattr(values, "MAX_STRUCTURAL", 100)
    monkeypatch.setattr(values, "decode_plain", None)
    raw = f'{{"content":[{",".join([item] * 101)}]}}'.encode()
    assert outcome(raw, whole=False) == "too-many"


def texts_in_base64() -> Iterator[str]:
    random_bytes = random.Random(1).randbytes
    for size in (0, 1, 2, 3, 47, 48, 49, 96, 97, 200):
        yield base64.b64encode(random_bytes(size)).decode()
    yield from ("=", "AAAA=", "AAAA====", "A" * 100 + "=", "A" * 101 + "=", "A" * 102 + "==", "A" * 103)
    yield from ("AAAA=AAA" * 20, "A" * 48 + "=" * 100, "A" * 64 + "é", "A" * 63 + "-", "=" + "A" * 63)
    yield from ("A" * 16 + "====" + "A" * 64, "A" * 64 + "\n", "AA==" + "A" * 64)


@pytest.mark.parametrize("text", list(texts_in_base64()))
def test_what_base64_says_is_digested_as_a_whole(text: str) -> None:
    expected: bytes | None
    try:
        expected = hashlib.sha256(base64.b64decode(text, validate=True)).digest()
    except ValueError:
        expected = None
    try:
        found = values.hash_base64(text)
    except ValueError:
        found = None
    assert found == expected


@pytest.mark.parametrize("text", [b"x", b"\\ud800"], ids=["fast", "with-a-lone-surrogate"])
@pytest.mark.parametrize(("start", "end"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_values_are_decoded_to_the_same_depth_on_every_python(start: bytes, end: bytes, text: bytes) -> None:
    def nest(levels: int) -> bytes:
        return start * levels + b'"%b"' % text + end * levels

    assert values.decode_value(nest(values.MAX_NESTING)) == json.loads(nest(values.MAX_NESTING))
    # The levels at which a long value is split come on top.
    for levels in (values.MAX_NESTING + values._MAX_DEPTH + 1, 5_000, 10_000):
        with pytest.raises(UnreadableBodyError, match="too-deep"):
            values.decode_value(nest(levels))


def test_brackets_in_a_text_are_no_nesting() -> None:
    text = "[{" * values.MAX_NESTING

    assert values.decode_value(json.dumps([text, {"a": [text]}]).encode()) == [text, {"a": [text]}]


def test_a_long_string_without_memory_for_it_raises_an_error() -> None:
    script = """
import resource
from compaction_proxy.wires.json.values import decode_plain
raw = b'"' + b"a" * 40_000_000 + b'"'
resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))
held = []
try:
    while True:
        held.append(decode_plain(raw))
except MemoryError:
    print("no memory")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"no memory\n")
