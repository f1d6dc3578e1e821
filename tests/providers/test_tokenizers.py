"""The counter against tiktoken itself, and with its vocabularies, its network and its luck taken away."""

import base64
import lzma
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tiktoken_ext.openai_public as reference  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.providers import tokenizers
from compaction_proxy.providers.token_counting import sample_slices
from compaction_proxy.providers.tokenizers import (
    CL100K,
    DATA_FOLDER,
    O200K,
    CharacterCounter,
    TiktokenCounter,
    estimate_tokens,
    find_vocabulary,
    replace_surrogates,
)

CORPUS = {
    "empty": "",
    "word": "hello",
    "english": "The quick brown fox jumps over the lazy dog, but it doesn't mind; we've seen it's FINE.",
    "chinese": "压缩代理在不改变客户端的情况下,让长对话继续适合模型的上下文窗口。",
    "code": "def f(x: int) -> list[str]:\n\treturn [str(i) for i in range(x)]  # ¼ of it\n\n\n",
    "json": '{"order_id":"A-20391","items":[{"sku":"\\u00e9-7","qty":12},null,true],"total":1299.95}',
    "emoji": "👩‍👩‍👧‍👦 family, 🇩🇪 flag, ✅ done 🤷🏽‍♂️",
    "specials": "before <|endoftext|> between <|im_start|>system<|fim_prefix|> after",
    "blanks": "a  b   c\t\t\td \r\n \r\n  e\u00a0f\u3000g",
    "arabic and thai": "مرحبا بالعالم สวัสดีชาวโลก",
    "digits": "3.14159265358979 2026-11-21T22:00:00Z 0xDEADBEEF 127.0.0.1",
    "base64": base64.b64encode(bytes(range(256))).decode(),
}
# Tokens in o200k_base and cl100k_base.
GOLDEN = {
    "empty": (0, 0),
    "word": (1, 1),
    "english": (21, 24),
    "chinese": (23, 41),
    "code": (28, 28),
    "json": (36, 35),
    "emoji": (28, 42),
    "specials": (23, 22),
    "blanks": (15, 14),
    "arabic and thai": (11, 24),
    "digits": (35, 35),
    "base64": (233, 254),
}


def silent(line: str) -> None:
    raise AssertionError(line)


@pytest.fixture(scope="module")
def counter() -> TiktokenCounter:
    return TiktokenCounter(silent)


def _vendored(url: str, expected_hash: str) -> dict[bytes, int]:
    """What tiktoken's loader would download, from the package's own file."""
    name = url.rpartition("/")[2]
    lines = lzma.decompress((DATA_FOLDER / f"{name}.xz").read_bytes()).splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}


@pytest.fixture(scope="module", params=["o200k_base", "cl100k_base"])
def encoding(request: pytest.FixtureRequest) -> tiktoken.Encoding:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "load_tiktoken_bpe", _vendored)
        return tiktoken.Encoding(**reference.ENCODING_CONSTRUCTORS[request.param]())


MODELS = {"o200k_base": "gpt-5", "cl100k_base": "gpt-4"}


@pytest.mark.parametrize("vocabulary", [O200K, CL100K], ids=lambda vocabulary: vocabulary.name)
def test_our_constants_are_those_of_tiktoken(vocabulary: tokenizers.Vocabulary) -> None:
    hashes = []

    def note(url: str, expected_hash: str) -> dict[bytes, int]:
        hashes.append(expected_hash)
        return {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "load_tiktoken_bpe", note)
        theirs: dict[str, Any] = reference.ENCODING_CONSTRUCTORS[vocabulary.name]()
    assert (hashes, theirs["pat_str"]) == ([vocabulary.sha256], vocabulary.pattern)


def test_counts_equal_those_of_tiktoken(counter: TiktokenCounter, encoding: tiktoken.Encoding) -> None:
    expected = {name: len(encoding.encode(text, disallowed_special=())) for name, text in CORPUS.items()}
    assert {name: counter.count(text, MODELS[encoding.name]) for name, text in CORPUS.items()} == expected


def test_together_texts_count_as_they_do_alone(counter: TiktokenCounter, encoding: tiktoken.Encoding) -> None:
    between = tokenizers._BETWEEN
    odd = ["\ud800", between[0], between[:2], between[1:], "", "  ", "x ", " x"]
    texts = [*CORPUS.values(), *odd]
    model = MODELS[encoding.name]
    for some in (texts, texts[::-1], texts[3:4], [], ["", ""], [between, "a"], ["x" * 70_000, "b"]):
        assert counter.count_each(some, model) == [counter.count(text, model) for text in some]
    assert counter.count_each(texts, model) == [len(encoding.encode_ordinary(text)) for text in texts]


def test_counts_are_the_golden_ones(counter: TiktokenCounter) -> None:
    assert {
        name: (counter.count(text, "gpt-5"), counter.count(text, "gpt-4")) for name, text in CORPUS.items()
    } == GOLDEN


@pytest.mark.parametrize("name", ["english", "chinese", "code", "json", "blanks", "base64"])
def test_slicing_costs_at_most_two_tokens_a_cut(
    counter: TiktokenCounter, encoding: tiktoken.Encoding, name: str
) -> None:
    text = CORPUS[name] * (200_000 // len(CORPUS[name]))
    whole = len(encoding.encode_ordinary(text))
    assert abs(counter.count(text, MODELS[encoding.name]) - whole) <= 2 * 3


@pytest.mark.parametrize(
    ("model", "vocabulary"),
    [
        ("gpt-4", CL100K),
        ("gpt-4-turbo-2024-04-09", CL100K),
        ("openai/gpt-4-32k", CL100K),
        ("gpt-3.5-turbo", CL100K),
        ("gpt-35-turbo-16k", CL100K),
        ("ft:gpt-4:acme::x", CL100K),
        ("gpt-4o-mini", O200K),
        ("GPT-4o", O200K),
        ("gpt-4.1", O200K),
        ("gpt-4.5-preview", O200K),
        ("chatgpt-4o-latest", O200K),
        ("gpt-5.4", O200K),
        ("o3", O200K),
        ("anthropic/claude-opus-4.7", O200K),
        ("", O200K),
    ],
)
def test_a_model_is_counted_with_its_vocabulary(model: str, vocabulary: tokenizers.Vocabulary) -> None:
    assert find_vocabulary(model) is vocabulary


def test_lone_surrogates_count_as_in_tiktoken(counter: TiktokenCounter, encoding: tiktoken.Encoding) -> None:
    text = "ab \ud800 cd \udfff\ud83d!"
    assert counter.count(text, MODELS[encoding.name]) == len(encoding.encode_ordinary(text))


@given(st.text(st.sampled_from(["a", "é", "压", "😀", "\ud800", "\udbff", "\ud83d", "\ude00", "\udc00"])))
def test_surrogates_are_repaired_as_tiktoken_repairs_them(text: str) -> None:
    assert replace_surrogates(text) == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def test_a_megabyte_of_blanks_is_counted_without_panic(counter: TiktokenCounter) -> None:
    started = time.thread_time()
    tokens = counter.count(" " * 1_500_000 + "x", "gpt-5")
    assert 1_500_000 // 256 < tokens < 1_500_000 // 64
    assert time.thread_time() - started < 20  # seconds of the processor


class _Panic(BaseException):
    """As pyo3's PanicException: no Exception."""


class _Broken:
    def encode_ordinary(self, text: str) -> list[int]:
        raise _Panic(text)

    def encode(self, text: str, **_: Any) -> list[int]:
        raise _Panic(text)


def test_a_panic_of_the_tokenizer_gives_an_estimate_and_is_said_once() -> None:
    said: list[str] = []
    counter = TiktokenCounter(said.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizers, "load_encoding", lambda *_: _Broken())
        assert [counter.count("größer", "gpt-5"), counter.count("ab" * 60_000, "gpt-5")] == [3, 40_001]
        assert counter.count_each(["größer", "a"], "gpt-5") == [3, 1]
    assert said == ["text was estimated, not counted: _Panic"]


def _empty(folder: Path) -> None:
    """No vocabulary at all."""


def _garbage(folder: Path) -> None:
    (folder / "o200k_base.tiktoken.xz").write_bytes(b"not xz")


def _other(folder: Path) -> None:
    (folder / "o200k_base.tiktoken.xz").write_bytes(lzma.compress(b"IQ== 0\nIg== 1\n"))


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [(_empty, "FileNotFoundError"), (_garbage, "LZMAError"), (_other, "_WrongVocabularyError")],
)
def test_an_unusable_vocabulary_gives_estimates_and_is_said_once(
    tmp_path: Path, spoil: Callable[[Path], None], cause: str
) -> None:
    spoil(tmp_path)
    said: list[str] = []
    counter = TiktokenCounter(said.append, tmp_path)
    assert [counter.count("hello world", "gpt-5") for _ in range(3)] == [4, 4, 4]
    assert said == [f"vocabulary o200k_base is unusable, so tokens are estimated: {cause}"]


def test_concurrent_first_counts_load_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []
    real = tokenizers.load_encoding

    def load(vocabulary: tokenizers.Vocabulary, data: Any) -> tiktoken.Encoding:
        loads.append(vocabulary.name)
        return real(vocabulary, data)

    monkeypatch.setattr(tokenizers, "load_encoding", load)
    counter = TiktokenCounter(silent)
    counts: list[int] = []
    threads = [threading.Thread(target=lambda: counts.append(counter.count("hello", "o1"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (loads, counts) == (["o200k_base"], [1] * 8)


def test_warming_loads_what_the_first_count_would(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = TiktokenCounter(silent)
    counter.warm_up()
    monkeypatch.setattr(tokenizers, "load_encoding", lambda *_: pytest.fail("loaded again"))
    assert counter.count("hello", "gpt-5") == 1


def test_a_vocabulary_is_not_held_twice() -> None:
    tracemalloc.start()
    encoding = tokenizers.load_encoding.__wrapped__(CL100K, DATA_FOLDER)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert encoding.encode_ordinary("hello world") == [15339, 1917]
    assert held < 1_000_000  # bytes; tiktoken's own copy is none of Python's


OFFLINE = """
import sys
def refuse(event, arguments):
    if event.startswith("socket."):
        raise AssertionError(event)
sys.addaudithook(refuse)
from compaction_proxy.providers.tokenizers import TiktokenCounter
counter = TiktokenCounter(print)
print(counter.count("hello world", "gpt-5"), counter.count("hello world", "gpt-4"))
"""


def test_it_counts_without_network_home_or_environment() -> None:
    source = Path(tokenizers.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE], env={}, cwd=source, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("2 2\n", "")


def test_text_beyond_the_budget_is_extrapolated(
    counter: TiktokenCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = CORPUS["english"] * 30_000
    exact = counter.count(text, "gpt-5")
    encoding = tokenizers.load_encoding(O200K, DATA_FOLDER)
    seen: list[int] = []

    class Watching:
        def encode_ordinary(self, text: str) -> list[int]:
            seen.append(len(text))
            return encoding.encode_ordinary(text)

    monkeypatch.setattr(tokenizers, "load_encoding", lambda *_: Watching())
    monkeypatch.setattr(tokenizers, "sample_slices", partial(sample_slices, budget=512 * 1024))
    extrapolated = TiktokenCounter(silent).count(text, "gpt-5")
    assert 0 < sum(seen) <= 512 * 1024 < len(text)
    assert extrapolated == pytest.approx(exact, rel=0.01)


def test_an_estimate_is_a_third_of_the_bytes_rounded_up() -> None:
    assert [estimate_tokens(text) for text in ("", "a", "abc", "abcd", "压缩", "\ud800")] == [
        0,
        1,
        1,
        2,
        2,
        1,
    ]


def test_the_character_counter_divides_by_four_and_rounds_up() -> None:
    counts = [CharacterCounter().count(text, "any") for text in ("", "a", "abcd", "abcde", "压缩代理好")]
    assert counts == [0, 1, 1, 2, 2]
