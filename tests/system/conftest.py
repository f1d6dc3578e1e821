"""What black-box tests share."""

from collections.abc import Iterator

import pytest

from tests.system.black_box import Provider


@pytest.fixture
def provider() -> Iterator[Provider]:
    running = Provider()
    yield running
    running.close()
