"""The one place that may catch broadly.

It stands where our own trouble, whatever it is, must not become the client's: around the compaction stage,
background jobs (the store's thread among them), the tokenizer, and the tap that watches an answer go by.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType

# These pass: somebody wants the block, or the process, to end.
_PASS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)


class suppress_and_report:  # noqa: N801 - used as a statement; a class, because a generator costs five times as much
    """Run a block whose failure is reported and then forgotten.

    Cancellation and the end of the process pass. Everything else is contained, down to the tokenizer's
    `PanicException`, which derives from BaseException (pyo3).

    Args:
        report: Is given the error.
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
