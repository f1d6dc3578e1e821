"""Reading a configuration again: whatever was signalled last is in force in the end."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from structlog.testing import capture_logs

from compaction_proxy.cli.serve import ConfigReloader, reread_config
from compaction_proxy.config.config import Config
from compaction_proxy.config.loader import LoadedConfig, load_config
from compaction_proxy.config.sections import ServerSection

if TYPE_CHECKING:
    from compaction_proxy.app import Proxy

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGHUP")
FIRST = LoadedConfig(Config(), {}, None, ())


@pytest.fixture(autouse=True)
def _hangup() -> Iterator[None]:
    standing = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, standing)


@dataclass
class Taken:
    """What a proxy was told to go on with."""

    found: list[LoadedConfig] = field(default_factory=list)

    def reload(self, loaded: LoadedConfig) -> None:
        self.found.append(loaded)

    def record_reload(self, *, succeeded: bool) -> None:
        assert succeeded


async def test_a_signal_during_a_reading_has_it_read_once_more() -> None:
    app, begun, go_on = Taken(), threading.Event(), threading.Event()
    read_so_often = 0

    def read() -> LoadedConfig:
        nonlocal read_so_often
        read_so_often += 1
        found = replace(FIRST, warnings=(f"reading {read_so_often}",))
        begun.set()
        assert go_on.wait(10)
        return found

    ConfigReloader(cast("Proxy", app), FIRST).start(read)
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.to_thread(begun.wait, 10)
    for _ in range(3):  # all of them are later than what was read, and one reading is new enough for all
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.01)
    go_on.set()
    async with asyncio.timeout(100):
        while len(app.found) < 2:  # noqa: ASYNC110 - a thread sets no event
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert [found.warnings for found in app.found] == [("reading 1",), ("reading 2",)]


def test_a_pipe_is_not_read_again_because_it_would_be_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert reread_config(lambda: FIRST, replace(FIRST, path=tmp_path / "pipe")) is None


@pytest.mark.parametrize("left", ["", "\n", "# server: {admin_key: …}\n", "---\n", None])
def test_a_file_that_says_nothing_any_more_takes_nothing_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("config.yaml")
    file.write_text("server: {admin_key: 0123456789abcdef0123456789abcdef}\n", encoding="utf-8")
    running = load_config(None, {})
    if left is None:
        file.unlink()
    else:
        file.write_text(left, encoding="utf-8")
    with capture_logs() as logged:
        assert reread_config(partial(load_config, None, {}), running) is None
    what = "gone" if left is None else "empty"
    line = f"config.yaml: is {what}; to reset everything to the defaults, write `{{}}` into it"
    assert [(each["event"], each["problems"]) for each in logged] == [("config.not_reloaded", [line])]


@pytest.mark.parametrize("begun", ["", "server: {workers: 1}\n"])
def test_a_file_that_said_nothing_before_or_says_so_on_purpose_is_taken(tmp_path: Path, begun: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(begun, encoding="utf-8")
    running = load_config(file, {})
    file.write_text("{}" if begun else "# nothing yet", encoding="utf-8")
    found = reread_config(partial(load_config, file, {}), running)
    assert found is not None
    assert found.config.server == ServerSection()
