"""Reading a configuration again: whatever was signalled last is in force in the end."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from proxy.cli.reloading import Reloading, reread
from proxy.config.model import Config
from proxy.config.sources import Loaded

if TYPE_CHECKING:
    from proxy.app import Proxy

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGHUP")
FIRST = Loaded(Config(), {}, None, ())


@pytest.fixture(autouse=True)
def _hangup() -> Iterator[None]:
    standing = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, standing)


@dataclass
class Taken:
    """What a proxy was told to go on with."""

    found: list[Loaded] = field(default_factory=list)

    def reload(self, loaded: Loaded) -> None:
        self.found.append(loaded)

    def reloaded(self, *, taken: bool) -> None:
        assert taken


async def test_a_signal_during_a_reading_has_it_read_once_more() -> None:
    app, begun, go_on = Taken(), threading.Event(), threading.Event()
    read_so_often = 0

    def read() -> Loaded:
        nonlocal read_so_often
        read_so_often += 1
        found = replace(FIRST, warnings=(f"reading {read_so_often}",))
        begun.set()
        assert go_on.wait(10)
        return found

    Reloading(cast("Proxy", app), FIRST).begin(read)
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.to_thread(begun.wait, 10)
    for _ in range(3):  # all of them are later than what was read, and one reading is new enough for all
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.01)
    go_on.set()
    async with asyncio.timeout(10):
        while len(app.found) < 2:  # noqa: ASYNC110 - a thread sets no event
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert [found.warnings for found in app.found] == [("reading 1",), ("reading 2",)]


def test_a_pipe_is_not_read_again_because_it_would_be_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert reread(lambda: FIRST, replace(FIRST, path=tmp_path / "pipe")) is None
