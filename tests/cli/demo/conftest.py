from functools import cache

import pytest

from compaction_proxy.cli.demo.run import render_table
from compaction_proxy.providers.types import TokenCounter
from tests.doubles.word_counter import WordCounter


@pytest.fixture
def words() -> TokenCounter:
    return WordCounter()


@cache
def _demo_text() -> str:
    return render_table()


@pytest.fixture
def demo_text() -> str:
    return _demo_text()
