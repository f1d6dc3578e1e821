from collections.abc import Sequence
from functools import cache

import pytest

from compaction_proxy.cli.demo.run import render_table
from compaction_proxy.providers.types import TokenCounter


class _Words:
    """A token is a word: quick, and easy to add up by hand."""

    def count(self, text: str, model: str) -> int:
        return len(text.split())

    def count_each(self, texts: Sequence[str], model: str) -> list[int]:
        return [self.count(text, model) for text in texts]


@pytest.fixture
def words() -> TokenCounter:
    return _Words()


@cache
def _demo_text() -> str:
    return render_table()


@pytest.fixture
def demo_text() -> str:
    return _demo_text()
