"""Suppresses and reports exceptions of any kind. No other module may catch every exception.

It is used wherever a fault of the proxy must not fail a client's request: around the compaction stage,
background jobs (such as the store's thread), the tokenizer, and the code that reads an answer while it is
relayed.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType

# These exceptions are not caught, because they are raised to end the block or the process.
_PASS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)


class suppress_and_report:  # noqa: N801 - used as a statement; a class, because a generator is five times as slow
    """Runs a block, and reports and suppresses its exceptions.

    Suppresses every exception except those that cancel the block or end the process (`_PASS`). This includes
    the tokenizer's `PanicException` (pyo3), which is derived from BaseException.

    Args:
        report: Receives the exception.
    """

    __slots__ = ("_report",)

    def __init__(self, report: Callable[[BaseException], None]) -> None:
        self._report = report

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or isinstance(error, _PASS):
            return False
        self._report(error)
        return True
