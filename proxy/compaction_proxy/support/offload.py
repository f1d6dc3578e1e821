"""Pure work that takes milliseconds or more, done beside the event loop and one piece at a time.

Pure computing in several threads is no faster than in one, but the event loop waits for each of them in turn.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# One for the process, since its threads share one interpreter lock. The thread starts with the first work.
_EXECUTOR = ThreadPoolExecutor(max_workers=1, thread_name_prefix="beside")

_Result = TypeVar("_Result")


async def run_in_worker(work: Callable[[], _Result]) -> _Result:
    """What `work` gives, once everything that was asked for before is done.

    Work whose caller has been cancelled is left out, unless it has begun: then it goes on, and what comes
    next waits for it.
    """
    return await asyncio.get_running_loop().run_in_executor(_EXECUTOR, work)
