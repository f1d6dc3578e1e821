"""Runs work that a request starts but does not wait for, such as deleting old archives."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable

# Maximum number of tasks at the same time. Further work is not started; a later request may start it.
MAX_BACKGROUND_TASKS = 8


class BackgroundTasks:
    """Runs background tasks on one event loop, at most one per key at a time. No task may raise."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[object]] = {}

    @property
    def has_running_tasks(self) -> bool:
        """Whether any task is running."""
        return bool(self._tasks)

    def start_once(self, key: Hashable, create_work: Callable[[], Coroutine[object, object, object]]) -> bool:
        """Starts the coroutine that `create_work` returns as a task. Returns whether it was started.

        Does not start it while a task with the same key or `MAX_BACKGROUND_TASKS` tasks are running.
        """
        if key in self._tasks or len(self._tasks) >= MAX_BACKGROUND_TASKS:
            return False
        self._tasks[key] = task = asyncio.create_task(create_work())
        task.add_done_callback(lambda _: self._tasks.pop(key, None))
        return True

    async def close(self) -> None:
        """Cancels the running tasks and waits until they have ended."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
