"""Defines a problem: a fault that degrades the proxy, although it still answers requests."""

from typing import NamedTuple


class Problem(NamedTuple):
    """A fault that degrades the proxy.

    Attributes:
        what: A sentence that says what is wrong. It contains no address and no name of a model, because
            everybody who reaches the proxy may read it at `/readyz`.
        fix: A sentence for operators that says what to do, and names the key of the configuration.
    """

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what} {self.fix}"
