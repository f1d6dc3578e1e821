import pytest

from compaction_proxy.providers.types import TokenCounter
from tests.doubles.word_counter import WordCounter


@pytest.fixture
def words() -> TokenCounter:
    return WordCounter()
