"""A scripted admin server, and commands run in this process."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from compaction_proxy.cli.main import app
from tests.helpers.scripted_admin import Scripted, scripted_admin

Run = Callable[..., Result]


@pytest.fixture
def script() -> Iterator[Scripted]:
    """A scripted admin server."""
    with scripted_admin() as made:
        yield made


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in an empty folder, with a home of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("COMPACTION_PROXY_CONFIG", "REDIS_URL", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)

    def command(*arguments: str, **environ: str) -> Result:
        return CliRunner().invoke(app, list(arguments), env=environ)

    return command
