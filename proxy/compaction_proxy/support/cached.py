"""Values that follow from an object that does not change, worked out when they are asked for, and once."""

from collections.abc import Callable
from typing import Generic, TypeVar, overload

Whose = TypeVar("Whose")
Value = TypeVar("Value")


class kept(Generic[Whose, Value]):  # noqa: N801 - used as a decorator
    """As `functools.cached_property`, without the lock that it takes up to Python 3.11.

    That lock costs more than most of what is kept. Without it two threads may both work a value out. This
    goes when 3.11 is no longer supported.

    Args:
        work: Gives the value.
    """

    def __init__(self, work: Callable[[Whose], Value]) -> None:
        self._work = work
        self._name = work.__name__
        self.__doc__ = work.__doc__

    @overload
    def __get__(self, whose: None, owner: type[Whose]) -> "kept[Whose, Value]": ...
    @overload
    def __get__(self, whose: Whose, owner: type[Whose]) -> Value: ...

    def __get__(self, whose: Whose | None, owner: type[Whose]) -> "Value | kept[Whose, Value]":
        """The value, which from now on stands in the object itself."""
        if whose is None:
            return self
        value = whose.__dict__[self._name] = self._work(whose)
        return value
