"""Gives a Python process a wall clock that is wrong. The monotonic clock stays right.

A process runs this module at its start if its folder is on `PYTHONPATH`. The environment says how the clock
differs: `WALL_CLOCK_FILE` names a file with an offset in seconds, which may change at any time;
`WALL_CLOCK_OFFSET_S` is a constant offset; `WALL_CLOCK_SPEED` is the number of seconds that pass in one.

A library that is loaded before the C library changes all clocks, but waits for a lock at each look at one:
on a busy machine a request took 50 s. The package looks at the wall clock through `time.time` only.
"""

import contextlib
import os
import time
from pathlib import Path

_right = time.time
_start = _right()
_file = os.environ.get("WALL_CLOCK_FILE")
_offset_s = float(os.environ.get("WALL_CLOCK_OFFSET_S", "0"))
_speed = float(os.environ.get("WALL_CLOCK_SPEED", "1"))


def _read_wrong_clock() -> float:
    global _offset_s  # noqa: PLW0603 - the last one holds while the process may open no file
    if _file:
        with contextlib.suppress(OSError, MemoryError):
            _offset_s = float(Path(_file).read_text() or 0)
    return _start + (_right() - _start) * _speed + _offset_s


time.time = _read_wrong_clock
