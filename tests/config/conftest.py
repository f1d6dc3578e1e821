"""What tests of the configuration share."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in an empty working directory."""
    monkeypatch.chdir(tmp_path)
