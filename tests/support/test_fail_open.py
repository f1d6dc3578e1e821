"""Faults of the proxy are reported and suppressed; what ends a task or the process is not."""

import asyncio

import pytest

from compaction_proxy.support.fail_open import suppress_and_report


class NativeError(BaseException):
    """Stands for errors of native extensions that do not derive from Exception."""


@pytest.mark.parametrize("error", [ValueError("bad"), MemoryError(), RecursionError(), NativeError("panic")])
def test_an_error_is_reported_and_goes_no_further(error: BaseException) -> None:
    reported: list[BaseException] = []
    with suppress_and_report(reported.append):
        raise error
    assert reported == [error]


@pytest.mark.parametrize("kind", [asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_a_task_or_the_process_is_passed_on_unreported(kind: type[BaseException]) -> None:
    reported: list[BaseException] = []
    with pytest.raises(kind), suppress_and_report(reported.append):
        raise kind
    assert reported == []


def test_a_block_without_an_error_reports_nothing() -> None:
    reported: list[BaseException] = []
    with suppress_and_report(reported.append):
        pass
    assert reported == []
