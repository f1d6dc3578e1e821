"""The one place that may catch broadly.

It stands where our own trouble, whatever it is, must not become the client's: around the compaction stage,
background jobs (the store's thread among them), the tokenizer, and the tap that watches an answer go by.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def contained(report: Callable[[BaseException], None]) -> Iterator[None]:
    """Run a block whose failure is reported and then forgotten.

    Cancellation and the end of the process pass. Everything else is contained, down to the tokenizer's
    `PanicException`, which derives from BaseException (pyo3).
    """
    try:
        yield
    except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001 - the one broad except, see above
        report(error)
