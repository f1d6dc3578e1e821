"""A deadline that is fair to a call on a busy event loop."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

# A deadline is spent in parts, so that the time in which the event loop looked at nothing counts as one.
PARTS = 25

_T = TypeVar("_T")


async def within(limit_s: float, call: Coroutine[Any, Any, _T]) -> _T:
    """What `call` returns or raises, or TimeoutError.

    Unlike under `asyncio.timeout`, an answer that came while the event loop itself was busy is taken, however
    late the loop looks, and a call that does not end when it is cancelled is left behind. A call that needs
    several steps gets its turns: while the loop is busy, a deadline lasts as many of its rounds as there are
    parts.
    """
    task = asyncio.ensure_future(call)
    try:
        for _ in range(PARTS):
            await asyncio.wait((task,), timeout=limit_s / PARTS)
            if task.done():
                return task.result()
    finally:
        task.cancel()
    raise TimeoutError
