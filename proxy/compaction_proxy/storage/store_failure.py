"""Defines a failure of the store, which says in words what is wrong and how to fix it."""

import os
import socket
import ssl
from typing import NamedTuple

from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.core.problem import Problem

# What is wrong with a store, by the reason of its failure. The subject of each text is the store.
_TEXTS = {
    "store-busy": "is busy",
    "store-corrupt": "is damaged",
    "store-denied": "refuses the user name or the password",
    "store-down": "cannot be reached",
    "store-forbidden": "gives the user no permission",
    "store-foreign": "is a file that another program wrote",
    "store-full": "is full",
    "store-loading": "is still loading its data",
    "store-newer": "was written by a newer version of the proxy",
    "store-readonly": "can be read but not written",
    "store-timeout": "does not answer in time",
    "store-unwritable": "cannot be opened for writing",
}
# How to fix a failure, by its reason. `{key}` is what sets the URL, and `{url}` the URL without passwords.
_FIXES = {
    "store-busy": "stop the other program that uses {url}, or set another store in {key}",
    "store-corrupt": "restore the file from a backup, or move it away; the proxy then creates a new one",
    "store-denied": "correct the user name and the password in {key}",
    "store-forbidden": "grant the user what docs/redis.md lists under Permissions, for the prefix in {key}",
    "store-foreign": "set another file in {key}",
    "store-full": "free some space, or raise its memory limit",
    "store-loading": "wait until the server has started",
    "store-newer": "install that version, or set another file in {key}",
    "store-readonly": "check whether the server is a replica or its disk is full",
    "store-timeout": "check the machine and the network of {url}, or correct {key}",
    "store-unwritable": "give this user write permission, or set another file in {key}",
}
_GENERAL_FIX = "start the server, or correct {key}"


class StoreFailure(NamedTuple):
    """A failure of the store.

    The proxy keeps this object and not the exception, because the exception would keep the data of the failed
    call in memory.

    Attributes:
        reason: The reason of the error, such as `store-down`.
        cause: The operating system's text for the cause, or what the server's user may not do; empty if it is
            unknown.
    """

    reason: str
    cause: str = ""

    @classmethod
    def from_error(cls, error: BaseException) -> "StoreFailure":
        """Builds the failure from the error that a store has raised."""
        if isinstance(error, StoreUnavailableError):
            is_forbidden = error.reason == "store-forbidden"  # the message says what
            return cls(error.reason, str(error) if is_forbidden else _find_cause(error))
        return cls("store-timeout") if isinstance(error, TimeoutError) else cls("", _find_cause(error))

    def describe(self) -> str:
        """Returns a text that lacks its subject, such as "cannot be reached: connection refused"."""
        text = _TEXTS.get(self.reason, "fails")
        return f"{text}: {self.cause}" if self.cause else text

    def suggest_fix(self, url: str, key: str) -> str:
        """Returns how to fix the failure, such as "start it, or correct store.url".

        Args:
            url: The URL of the store without passwords.
            key: What sets the URL: the key of the configuration, or the name of an environment variable.
        """
        return _FIXES.get(self.reason, _GENERAL_FIX).format(url=url, key=key)

    def to_problem(self, url: str, key: str) -> Problem:
        """Builds the `Problem` that reports this failure. The arguments are those of `suggest_fix`."""
        return Problem(f"The store {self.describe()}.", f"At {url}: {self.suggest_fix(url, key)}.")


def _find_cause(error: BaseException) -> str:
    """Returns the operating system's text for what caused an error; empty if it is unknown.

    redis-py raises its own errors while it handles those of the system, so the context is searched, too.
    """
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, socket.gaierror):
            return "the host name cannot be resolved"
        if isinstance(found, ssl.SSLError):
            return "the server has no TLS or an untrusted certificate"
        if isinstance(found, FileExistsError):  # `mkdir` has found a file
            return "a file exists in place of the folder"
        if isinstance(found, OSError) and found.errno:
            return os.strerror(found.errno).lower()
        found = found.__cause__ or found.__context__
    return ""
