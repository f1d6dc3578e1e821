"""Suppresses and reports exceptions of any kind. No other module may catch every exception.

Other modules use `suppress_and_report` for code whose faults must not fail a client's request. Examples are
compaction, background jobs such as the store's thread, the tokenizer, and the code that reads a response
while the proxy forwards it to the client.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType

# `suppress_and_report` neither reports nor suppresses these exceptions, because they cancel a task, close a
# generator or end the process.
_PASS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)


class suppress_and_report:  # noqa: N801 - used as a statement; a class, because a generator is five times as slow
    """A context manager that reports and suppresses the exceptions that its `with` block raises.

    The exceptions in `_PASS` are neither reported nor suppressed. All other exceptions are reported and
    suppressed, including the tokenizer's `PanicException` (pyo3), which is derived from `BaseException`.

    Args:
        report: Called with the exception.
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
