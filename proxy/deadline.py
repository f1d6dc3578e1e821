"""A deadline that is fair to a call on a busy event loop."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


async def within(limit_s: float, call: Coroutine[Any, Any, _T]) -> _T:
    """What `call` returns or raises, or TimeoutError.

    Unlike under `asyncio.timeout`, an answer that came while the event loop itself was busy is taken, however
    late the loop looks, and a call that does not end when it is cancelled is left behind.
    """
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait((task,), timeout=limit_s)
    finally:
        task.cancel()
    if not done:
        raise TimeoutError
    return task.result()
