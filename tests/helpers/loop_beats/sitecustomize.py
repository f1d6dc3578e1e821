"""Writes down how long each step of a process's event loop takes.

A process runs this module at its start if its folder is on `PYTHONPATH`. `LOOP_BEATS_FILE` names the file. A
timer of the loop fires every 5 ms. If the loop's thread has used more than 1 ms of processor time since the
last time, the timer appends that time, in seconds, as a line. Time in which the thread had no turn does not
count, so that a busy machine changes little.
"""

import asyncio
import contextlib
import importlib
import os
import time
from collections.abc import Awaitable
from typing import Any

BEAT_S, LEAST_S = 0.005, 0.001
FILE = os.open(os.environ["LOOP_BEATS_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def _start_beats(loop: asyncio.AbstractEventLoop) -> None:
    last_s = time.thread_time()

    def beat() -> None:
        nonlocal last_s
        held_s = time.thread_time() - last_s
        if held_s > LEAST_S:
            os.write(FILE, f"{held_s:.6f}\n".encode())
        last_s = time.thread_time()
        loop.call_later(BEAT_S, beat)

    loop.call_soon(beat)


def _watch(kind: Any) -> None:
    run = kind.run_until_complete
    watched = set[int]()

    def run_until_complete(self: asyncio.AbstractEventLoop, future: Awaitable[object]) -> object:
        if id(self) not in watched:
            watched.add(id(self))
            _start_beats(self)
        return run(self, future)

    kind.run_until_complete = run_until_complete


_watch(asyncio.BaseEventLoop)
with contextlib.suppress(ImportError):
    _watch(importlib.import_module("uvloop").Loop)
