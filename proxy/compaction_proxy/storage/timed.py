"""Measures how long each call of a store takes."""

import time
from collections.abc import Callable
from typing import Any, cast

from compaction_proxy.storage.store import Store

# The methods whose calls are measured, and the operation name that is reported for each.
_OPERATIONS = {
    "read": "read",
    "commit": "commit",
    "write": "write",
    "read_tail": "tail",
    "acquire_lease": "acquire",
    "renew_lease": "renew",
    "release_lease": "release",
    "delete_prefix": "delete",
    "publish": "publish",
}


class InstrumentedStore:
    """Passes all calls on to another store, and reports the duration of each measured call.

    Args:
        store: The store that is called.
        record_duration: Called with the name of the operation and its duration in seconds.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        record_duration: Callable[[str, float], None],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._record_duration = record_duration
        self._clock = clock

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any method of the store
        method, operation = getattr(self._store, name), _OPERATIONS.get(name)
        if operation is None:
            return method

        async def run_and_measure(*args: object, **options: object) -> object:
            started = self._clock()
            try:
                return await method(*args, **options)
            finally:
                self._record_duration(operation, self._clock() - started)

        return run_and_measure


def measure_store_calls(
    store: Store,
    record_duration: Callable[[str, float], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Store:
    """Returns a store that does the same as `store`, and reports how long each call takes.

    Measures only the methods in `_OPERATIONS`.
    """
    return cast("Store", InstrumentedStore(store, record_duration, clock))
