"""Failures of the store in words: the cause is the system's, and no exception is named."""

import errno
import socket
import ssl

import pytest

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.storage.store_failure import StoreFailure


def raise_from(reason: str, cause: Exception) -> StoreUnavailableError:
    error = StoreUnavailableError(reason, type(cause).__name__)
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (raise_from("store-down", OSError(errno.ECONNREFUSED, "x")), "cannot be reached: connection refused"),
        (
            raise_from("store-down", socket.gaierror(-2, "x")),
            "cannot be reached: the host name cannot be resolved",
        ),
        (
            raise_from("store-down", ssl.SSLError(1, "x")),
            "cannot be reached: the server has no TLS or an untrusted certificate",
        ),
        (
            raise_from("store-unwritable", FileExistsError(errno.EEXIST, "x")),
            "cannot be opened for writing: a file exists in place of the folder",
        ),
        (raise_from("store-denied", ValueError("secret words")), "refuses the user name or the password"),
        (
            StoreUnavailableError("store-forbidden", "the command mget"),
            "gives the user no permission: the command mget",
        ),
        (StoreUnavailableError("store-failed", "ResponseError"), "fails"),
        (TimeoutError(), "does not answer in time"),
        (OSError(errno.ENOSPC, "x"), "fails: no space left on device"),
    ],
)
def test_a_failure_is_said_with_the_cause_that_the_system_names(error: Exception, words: str) -> None:
    assert StoreFailure.from_error(error).describe() == words


def test_what_a_library_raised_while_it_handled_an_error_of_the_system_is_looked_through() -> None:
    cause = ConnectionError("Error 111 connecting to h:1")
    cause.__context__ = OSError(errno.EHOSTUNREACH, "x")
    failure = StoreFailure.from_error(raise_from("store-down", cause))
    assert failure == StoreFailure("store-down", "no route to host")


def test_the_fix_names_what_sets_the_url() -> None:
    problem = StoreFailure("store-down").to_problem("redis://h", "$REDIS_URL")
    assert problem == (
        "The store cannot be reached.",
        "At redis://h: start the server, or correct $REDIS_URL.",
    )
