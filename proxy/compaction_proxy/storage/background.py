"""Work behind requests: what a request starts and does not wait for, such as another look at a record."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable

# Pieces of work under way at once; what comes on top is not begun, and the next request tries again.
MAX_BACKGROUND_TASKS = 8


class BackgroundTasks:
    """Runs pieces of work on one event loop, each under its key once at a time. None may raise."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[object]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._tasks)

    def start_once(self, key: Hashable, create_work: Callable[[], Coroutine[object, object, object]]) -> bool:
        """Begin a piece of work, unless it is under way or there is too much. Whether it was begun."""
        if key in self._tasks or len(self._tasks) >= MAX_BACKGROUND_TASKS:
            return False
        self._tasks[key] = task = asyncio.create_task(create_work())
        task.add_done_callback(lambda _: self._tasks.pop(key, None))
        return True

    async def close(self) -> None:
        """End what is under way."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
