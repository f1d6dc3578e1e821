"""The fast counter: adopted only where it counts like tiktoken, and what happens where it does not."""

import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compaction_proxy.providers import tokenizers, tokenizers_fast
from compaction_proxy.providers.token_counting import SLICE_CHARACTERS
from compaction_proxy.providers.tokenizers import DATA_FOLDER, O200K, TiktokenCounter, load_encoding
from compaction_proxy.providers.tokenizers_fast import GOLDEN_COUNTS_PATH, ToktokCounter, read_golden_texts

pytest.importorskip("toktok", reason="needs the extra `fast`")


def silent(line: str) -> None:
    raise AssertionError(line)


def adopted(known: Path = GOLDEN_COUNTS_PATH, report: Callable[[str], None] = silent) -> ToktokCounter:
    made = ToktokCounter(TiktokenCounter(report), known)
    made.warm_up()
    return made


@pytest.fixture(scope="module")
def fast() -> ToktokCounter:
    return adopted()


@pytest.fixture(scope="module")
def reference() -> TiktokenCounter:
    return TiktokenCounter(silent)


def test_the_stored_counts_are_tiktokens() -> None:
    encoding = load_encoding(O200K, DATA_FOLDER)
    known = read_golden_texts()
    assert [len(encoding.encode_ordinary(each.text)) for each in known] == [each.tokens for each in known]
    assert len(known) >= 200


def test_it_is_adopted_without_loading_tiktokens_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "load_encoding", lambda *_: pytest.fail("loaded"))
    counter = adopted()
    assert counter.chosen == "toktok-rs 0.3.0"
    assert counter.count("hello world", "gpt-5") == 2
    assert counter.count_each(["hello world", "", "hello"], "gpt-5") == [2, 0, 1]


def test_until_it_is_warm_tiktoken_counts(reference: TiktokenCounter) -> None:
    counter = ToktokCounter(reference)
    assert (counter.count("hello world", "gpt-5"), counter.chosen) == (2, "tiktoken")


def other(folder: Path) -> Path:
    """The stored counts with one that is wrong."""
    rows = json.loads(GOLDEN_COUNTS_PATH.read_text(encoding="utf-8"))
    rows[7][2] += 1
    path = folder / "counts.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def none(folder: Path) -> Path:
    path = folder / "counts.json"
    path.write_text("[]", encoding="utf-8")
    return path


def damaged(folder: Path) -> Path:
    path = folder / "counts.json"
    path.write_bytes(b'[["a", 1, 1]')
    return path


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (other, "counts sample 7 differently"),
        (none, "counts sample 0 differently"),
        (damaged, "fails: JSONDecodeError"),
        (lambda folder: folder / "absent", "fails: FileNotFoundError"),
    ],
)
def test_one_count_that_differs_leaves_it_to_tiktoken(
    tmp_path: Path, spoil: Callable[[Path], Path], why: str
) -> None:
    counter = adopted(spoil(tmp_path))
    assert counter.chosen == f"tiktoken; toktok-rs {why}"
    assert (counter.count("hello world", "gpt-5"), counter.count_each(["a", "b c"], "gpt-5")) == (2, [1, 2])


class _Panic(BaseException):
    """As pyo3's PanicException: no Exception."""


class _Tokenizer:
    """toktok's, until it is to fail.

    Attributes:
        failing: What it raises for a text that holds an exclamation mark.
    """

    def __init__(self, failing: BaseException | None = None) -> None:
        self.failing = failing
        self._tokenizer = tokenizers_fast.load_tokenizer()

    def count(self, text: str) -> int:
        if self.failing and "!" in text:
            raise self.failing
        return self._tokenizer.count(text)

    def count_batch(self, texts: list[str], threads: int) -> list[int]:
        if self.failing and any("!" in text for text in texts):
            raise self.failing
        return self._tokenizer.count_batch(texts, threads)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ModuleNotFoundError("toktok"), "is not installed"),
        (ImportError("wrong libc"), "fails: ImportError"),
        (AttributeError("_encoding"), "fails: AttributeError"),
        (_Panic(), "fails: _Panic"),
    ],
)
def test_a_package_that_cannot_be_used_leaves_it_to_tiktoken(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, why: str
) -> None:
    def fail(name: str) -> Any:
        raise error

    monkeypatch.setattr(tokenizers_fast, "import_module", fail)
    counter = adopted()
    assert counter.chosen == f"tiktoken; toktok-rs {why}"
    assert counter.count("hello world", "gpt-5") == 2


def test_a_self_test_that_panics_leaves_it_to_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = _Tokenizer(_Panic())
    monkeypatch.setattr(tokenizers_fast, "load_tokenizer", lambda: tokenizer)
    assert adopted().chosen == "tiktoken; toktok-rs fails: _Panic"


def test_a_text_it_fails_on_later_is_estimated_alone_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, said = _Tokenizer(), list[str]()
    monkeypatch.setattr(tokenizers_fast, "load_tokenizer", lambda: tokenizer)
    counter = adopted(report=said.append)
    tokenizer.failing = _Panic("the text")
    assert counter.count_each(["hello world", "größer!", "hello"], "gpt-5") == [2, 3, 1]
    assert counter.count("größer!", "gpt-5") == 3
    assert said == ["text was estimated, not counted: _Panic"]


def test_other_vocabularies_stay_with_tiktoken(fast: ToktokCounter, reference: TiktokenCounter) -> None:
    text = "The proxy counts 1,234 tokens; 压缩代理 stays responsive."
    assert fast.count(text, "gpt-4") == reference.count(text, "gpt-4") != fast.count(text, "gpt-4o")
    assert fast.count_each([text, ""], "gpt-4") == [reference.count(text, "gpt-4"), 0]


def test_lone_surrogates_count_as_in_tiktoken(fast: ToktokCounter, reference: TiktokenCounter) -> None:
    texts = ["ab \ud800 cd \udfff\ud83d!", "plain", "\ud83d\ude00", "\udfff" * 99]
    expected = [reference.count(text, "gpt-5") for text in texts]
    assert [fast.count(text, "gpt-5") for text in texts] == expected
    assert fast.count_each(texts, "gpt-5") == expected


@pytest.mark.parametrize("length", [SLICE_CHARACTERS, SLICE_CHARACTERS + 1, 200_000])
def test_long_texts_are_cut_where_tiktoken_cuts_them(
    fast: ToktokCounter, reference: TiktokenCounter, length: int
) -> None:
    text = ("The order was shipped on 3 March, wasn't it? " * (length // 40))[:length]
    texts = [text, "short", " " * length]
    expected = [reference.count(each, "gpt-5") for each in texts]
    assert [fast.count(each, "gpt-5") for each in texts] == expected
    assert fast.count_each(texts, "gpt-5") == expected


def test_threads_get_the_counts_that_one_gets(fast: ToktokCounter) -> None:
    known = [each for each in read_golden_texts() if len(each.text) < 1_000]
    wrong: list[str] = []

    def count(seed: int) -> None:
        order = random.Random(seed).sample(known, len(known))
        together = fast.count_each([each.text for each in order], "gpt-5")
        alone = [fast.count(each.text, "gpt-5") for each in order]
        if not [each.tokens for each in order] == together == alone:
            wrong.append(f"thread {seed}")

    threads = [threading.Thread(target=count, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_lock_is_free_while_it_counts(fast: ToktokCounter) -> None:
    counting = threading.Thread(target=fast.count, args=("-" * SLICE_CHARACTERS * 8, "gpt-5"))
    counting.start()
    steps = 0
    while counting.is_alive():
        steps += 1
    assert steps > 10_000  # held, it would be some dozens
